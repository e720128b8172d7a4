"""Processes for test_buffer_service.py: `serve`, `take` and `half_put`. Commands and answers are lines of JSON."""

import asyncio
import json
import re
import resource
import sys
from pathlib import Path
from typing import Any

from headrace.engine.errors import HeadraceError
from headrace.engine.transport.channel import open_blocking_channel, open_channel


def say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


async def _commands() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def serve(address: str, options: dict[str, Any]) -> None:
    """A buffer server with one table; answers commands until standard input ends."""
    from headrace.buffers.async_table import AsyncTable
    from headrace.buffers.backend import check_record
    from headrace.buffers.service import buffer_service
    from headrace.buffers.table import Table
    from headrace.buffers.table_backend import TableBackend
    from headrace.engine.transport.server import serving

    table = AsyncTable(Table("train", **options.get("table", {})))
    if options.get("hold"):
        table.leases.hold_for_checkpoints()
    backend = TableBackend(
        {"train": table},
        groups_per_step=options.get("groups_per_step", 1),
        token_budget=8192,
        check=check_record if options.get("check") else None,
    )
    async with serving([buffer_service(backend, **options.get("service", {}))], address):
        say("ready")
        commands = await _commands()
        while line := await commands.readline():
            command, *arguments = json.loads(line)
            if command == "lost":
                table.consumer_lost(*arguments)
                say("done")
            elif command == "memory":
                # Not ru_maxrss, which a spawned process takes over from its parent.
                status = Path("/proc/self/status").read_text()
                peak_bytes = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]
                with open("/proc/self/statm") as statm:
                    now_bytes = int(statm.read().split()[1]) * resource.getpagesize()
                say({"peak": peak_bytes, "now": now_bytes, "tasks": len(asyncio.all_tasks())})
            elif command == "waits":
                say([[wait.member, wait.waits_for] for wait in table.waits()])
            elif command == "stats":
                stats = table.stats()
                say({name: getattr(stats, name) for name in type(stats).__slots__})


def take(address: str, options: dict[str, Any]) -> None:
    """A learner that takes a step, says so, and commits when it is told to."""
    from headrace.clients.buffer import BlockingBufferClient

    with open_blocking_channel(address) as channel:
        client = BlockingBufferClient(channel, incarnation=options["incarnation"])
        batch = client.take(options["step"], 20.0)
        say(list(batch.records))
        sys.stdin.readline()
        try:
            say(["committed", *client.commit(batch.step, batch.lease_token)])
        except HeadraceError as error:
            say([type(error).__name__, str(error)])


async def half_put(address: str, options: dict[str, Any]) -> None:
    """A producer that has sent half of a large record, and then no more."""
    from headrace.v1 import buffer_pb2 as pb
    from headrace.v1 import buffer_pb2_grpc as rpc
    from headrace.v1 import trajectory_pb2 as trajectory

    async with open_channel(address) as channel:
        call = rpc.BufferServiceStub(channel).Put()
        header = trajectory.RecordHeader(
            record_id=options["record_id"], group_id=options["group_id"], group_size=1, num_response_tokens=1
        )
        for part in range(3):
            piece = trajectory.EncodedRecord(
                header=header if part == 0 else None, data=bytes(1 << 20), offset=part << 20, total_bytes=6 << 20
            )
            await call.write(pb.PutRequest(table="train", producer_id="half", sequence=part + 1, records=[piece]))
        while (await call.read()).credit_bytes < options["until_credit"]:
            pass
        say("half sent")
        await asyncio.Event().wait()


if __name__ == "__main__":
    role, where, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    if role == "take":
        take(where, settings)
    else:
        asyncio.run({"serve": serve, "half_put": half_put}[role](where, settings))
