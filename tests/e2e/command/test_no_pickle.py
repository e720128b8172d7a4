"""K-007: what is received is data. A pickle sent to every endpoint of a run executes nothing and ends nothing."""

import itertools
import pickle
import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from headrace.v1 import buffer_pb2, control_pb2, reward_pb2, rollout_pb2, rollout_pb2_grpc, trajectory_pb2, weights_pb2
from headrace.v1 import buffer_pb2_grpc as buffer_rpc

pytestmark = pytest.mark.timeout(300)

Train = Any  # the fixture of conftest.py

HUB_PROTOS = (buffer_pb2, control_pb2, rollout_pb2, weights_pb2)
ANSWER_S = 30.0


class Bomb:
    """Its reconstruction makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def filled(message: Message, text: str, data: bytes, depth: int = 4) -> Message:
    """The message with the pickle in each of its strings and bytes, however deep; numbers stay 0."""
    for field in message.DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            if depth and not field.message_type.GetOptions().map_entry:
                inner = getattr(message, field.name)
                inner = inner.add() if field.is_repeated else inner
                inner.SetInParent()
                filled(inner, text, data, depth - 1)
        elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            value = text if field.type == FieldDescriptor.TYPE_STRING else data
            if field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)
    return message


def ask(channel: grpc.Channel, method: Any, request: bytes, num_answers: int) -> str:
    """Call a method with these bytes, read so many answers at most; returns the code of the error, or "OK"."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    call = getattr(channel, kind)(path, None, None)
    argument = iter([request]) if method.client_streaming else request
    try:
        answer = call(argument, timeout=ANSWER_S)
        if method.server_streaming:
            for _ in itertools.islice(answer, num_answers):
                pass
            answer.cancel()
    except grpc.RpcError as error:
        return str(error.code().name)  # type: ignore[attr-defined]
    return "OK"


def attack(channel: grpc.Channel, protos: tuple[Any, ...], payload: bytes, text: str) -> int:
    """Send the pickle to each method, as the request itself and inside a request that can be read."""
    count = 0
    for proto in protos:
        for service in proto.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                where = f"{service.name}.{method.name}"
                assert ask(channel, method, payload, 9) not in ("OK", "DEADLINE_EXCEEDED", "UNAVAILABLE"), where
                if method.name == "Stop":  # may do as it is told, whatever the reason says
                    continue
                request = filled(GetMessageClass(method.input_type)(), text, payload)
                code = ask(channel, method, request.SerializeToString(), 1)
                assert code not in ("INTERNAL", "UNKNOWN", "DEADLINE_EXCEEDED", "UNAVAILABLE"), (where, code)
                count += 2
    return count


def records_of_pickles(channel: grpc.Channel, payload: bytes, put: buffer_rpc.BufferServiceStub) -> list[str]:
    """Work as a rollout worker whose records are pickles; returns why each was refused."""
    said: queue.Queue[rollout_pb2.WorkRequest | None] = queue.Queue()
    said.put(rollout_pb2.WorkRequest(worker_id="rogue", serving=trajectory_pb2.PolicyVersion()))
    said.put(rollout_pb2.WorkRequest(worker_id="rogue", capacity=2))
    work = rollout_pb2_grpc.RolloutServiceStub(channel).Work(iter(said.get, None), timeout=ANSWER_S)
    group = next(iter(work)).group
    headers = [
        trajectory_pb2.RecordHeader(
            record_id=f"{group.group_id}/{index}/0", group_id=group.group_id, sample_index=index, group_size=2
        )
        for index in range(2)
    ]

    def frames() -> Iterator[buffer_pb2.PutRequest]:
        records = [trajectory_pb2.EncodedRecord(header=h, data=payload, total_bytes=len(payload)) for h in headers]
        yield buffer_pb2.PutRequest(table="train", producer_id="rogue", sequence=1, records=records)

    rejected = [one.reason for answer in put.Put(frames(), timeout=ANSWER_S) for one in answer.rejected]
    ended = rollout_pb2.GroupEnded(group_id=group.group_id, status=rollout_pb2.GroupEnded.STATUS_GENERATED)
    said.put(rollout_pb2.WorkRequest(worker_id="rogue", group_ended=ended))
    said.put(None)
    for _ in work:  # to the end: the hub has read what was said
        pass
    return rejected


def test_no_pickle_is_executed_by_any_endpoint_of_a_run_and_the_run_goes_on(train: Train, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    payload, text = (pickle.dumps(Bomb(marker), protocol) for protocol in (4, 0))
    process = train.start("--rollout.launch=external")
    (hub,) = train.until(lambda: list(train.temp.glob("headrace-*/hub")))
    (reward,) = train.until(lambda: list(train.temp.glob("headrace-*/reward")))
    with grpc.insecure_channel(f"unix:{hub}") as channel:
        grpc.channel_ready_future(channel).result(ANSWER_S)
        assert attack(channel, HUB_PROTOS, payload, text.decode("ascii")) >= 30
        for reason in records_of_pickles(channel, payload, buffer_rpc.BufferServiceStub(channel)):
            assert "not a record" in reason
    with grpc.insecure_channel(f"unix:{reward}") as channel:
        grpc.channel_ready_future(channel).result(ANSWER_S)
        attack(channel, (reward_pb2,), payload, text.decode("ascii"))
    worker = f"from headrace.actors.rollout.main import main; main('unix:{hub}', 'rollout-0')"
    with subprocess.Popen([sys.executable, "-c", worker], cwd=train.folder, env=train.env) as rollouts:
        train.start_learner()
        ended = train.finish(process)
        assert rollouts.wait(60) == 0
    assert ended.code == 0, (ended, train.log())
    assert [row["step"] for row in train.rows()] == [1, 2, 3]
    assert "only 0 of 2 records were accepted" in train.log()
    assert not marker.exists()
    pickle.loads(payload)  # the bomb works where it is let
    assert marker.exists()
