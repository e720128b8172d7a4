"""Frames and pieces: what is cut comes together again, and what does not belong is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import FormatError
from headrace.engine.transport.buffer_wire import (
    Assembler,
    Broken,
    Whole,
    cut_frames,
    header_from_proto,
    header_to_proto,
    micro_batch_from_proto,
    micro_batch_to_proto,
    whole_records,
)
from headrace.engine.types import MicroBatchPlan, PolicyVersion
from headrace.engine.types.records import RecordHeader
from headrace.v1 import buffer_pb2
from headrace.v1 import trajectory_pb2 as pb


def _header(name: str) -> RecordHeader:
    return RecordHeader(
        record_id=name,
        group_id=f"group of {name}",
        sample_index=3,
        attempt=2,
        group_size=8,
        oldest_version=PolicyVersion(1, 5),
        newest_version=PolicyVersion(1, 7),
        num_prompt_tokens=11,
        num_response_tokens=12,
        num_loss_tokens=9,
        mean_version=6.25,
    )


def _piece(name: str | None, data: bytes, offset: int, total: int) -> pb.EncodedRecord:
    header = None if name is None else header_to_proto(_header(name))
    return pb.EncodedRecord(header=header, data=data, offset=offset, total_bytes=total)


def test_a_header_survives_the_wire() -> None:
    message = pb.RecordHeader.FromString(header_to_proto(_header("r")).SerializeToString())
    assert header_from_proto(message) == _header("r")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(1, 16))
def test_records_of_any_size_are_cut_and_put_together_again(records: list[bytes], frame_bytes: int) -> None:
    named = [(_header(f"r{n}"), data) for n, data in enumerate(records)]
    frames = list(cut_frames(named, frame_bytes))
    assert all(frames)
    assert all(sum(piece.stop - piece.start for piece in frame) <= frame_bytes for frame in frames)
    assembler = Assembler()
    pieces = [pb.EncodedRecord.FromString(p.to_proto().SerializeToString()) for frame in frames for p in frame]
    assert [(whole.header, whole.data) for whole in whole_records(assembler, pieces)] == named
    assert not assembler.unfinished and assembler.received_bytes == 0
    begun = [piece for frame in frames for piece in frame[1:]]
    assert all(piece.start == 0 for piece in begun), "only the first piece of a frame continues a record"


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([_piece("a", b"12", 0, 1)], "first piece is 2 of 1 bytes"),
        ([_piece("a", b"12", 1, 9)], "at offset 1"),
        ([_piece("a", b"12", 0, 101)], "it has 101 bytes, and the most is 100"),
        ([_piece("a", b"12", 0, 2**64 - 1)], "the most is 100"),
        ([_piece("a", b"12", 0, 4), _piece(None, b"34", 1, 4)], "does not follow 2 of 4"),
        ([_piece("a", b"12", 0, 4), _piece(None, b"34", 2, 5)], "does not follow 2 of 4"),
        ([_piece("a", b"12", 0, 4), _piece(None, b"", 2, 4)], "does not follow 2 of 4"),
        ([_piece("a", b"12", 0, 4), _piece(None, b"345", 2, 4)], "more than the 4 bytes"),
        ([_piece("a", b"12", 0, 4), _piece("b", b"12", 0, 2)], "its last piece never came"),
    ],
)
def test_a_broken_record_is_named_once_and_the_next_one_arrives(pieces: list[pb.EncodedRecord], reason: str) -> None:
    assembler = Assembler(max_record_bytes=100)
    outcomes = [outcome for piece in pieces for outcome in assembler.feed(piece)]
    broken = [outcome for outcome in outcomes if isinstance(outcome, Broken)]
    assert [one.record_id for one in broken] == ["a"] and reason in broken[0].reason
    assert assembler.received_bytes == 0
    assert assembler.feed(_piece(None, b"rest", 50, 100)) == [] or pieces[-1].HasField("header"), "its rest is ignored"
    assert assembler.feed(_piece("next", b"x", 0, 1)) == [Whole(_header("next"), b"x")]


def test_a_piece_without_a_beginning_is_refused_unless_it_was_dealt_with_before() -> None:
    assembler = Assembler()
    (broken,) = assembler.feed(_piece(None, b"x", 5, 6))
    assert isinstance(broken, Broken) and "no beginning" in broken.reason
    assembler.skip_rest()
    assert assembler.feed(_piece(None, b"x", 5, 6)) == []
    with pytest.raises(FormatError, match="first piece"):
        list(whole_records(assembler, [_piece("a", b"12", 0, 1)]))


@pytest.mark.parametrize("shared", [(), (2, 1), (1, 1, 1)])
def test_a_micro_batch_s_plan_survives_the_wire(shared: tuple[int, ...]) -> None:
    plan = MicroBatchPlan(record_ids=("a", "b", "c"), num_tokens=7, shared=shared)
    sent = micro_batch_to_proto(plan).SerializeToString()
    assert micro_batch_from_proto(buffer_pb2.MicroBatchPlan.FromString(sent)) == plan


@pytest.mark.parametrize("shared", [[1], [2, 2], [3, 0], [4_000_000_000]])
def test_sharing_units_that_do_not_add_up_to_the_records_are_refused(shared: list[int]) -> None:
    with pytest.raises(FormatError, match="sharing units"):
        micro_batch_from_proto(buffer_pb2.MicroBatchPlan(record_ids=["a", "b", "c"], shared=shared))
