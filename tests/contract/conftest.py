"""Processes of the buffer's contract tests, and headers of made-up records."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.clients.buffer import BlockingBufferClient, BufferClient, open_blocking_channel, open_channel
from headrace.engine.types import PolicyVersion
from headrace.engine.types.records import RecordHeader

CHILD = Path(__file__).with_name("buffer_child.py")


class BufferChild:
    """A process of ours that speaks lines of JSON; see buffer_child.py."""

    def __init__(self, role: str, address: str, **options: Any) -> None:
        self.address = address
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), role, address, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the child ended with {self.process.wait()}"
        return json.loads(line)

    def tell(self, *command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def ask(self, *command: Any) -> Any:
        self.tell(*command)
        return self.hear()

    async def waits(self) -> list[list[str]]:
        """The waits of a server, as soon as there are any."""
        while True:
            waits: list[list[str]] = await asyncio.to_thread(self.ask, "waits")
            if waits:
                return waits

    @contextlib.asynccontextmanager
    async def producer(self, **options: Any) -> AsyncIterator[BufferClient]:
        """A client that puts into this server."""
        async with (
            open_channel(self.address) as channel,
            contextlib.aclosing(BufferClient(channel, "test", **options)) as client,
        ):
            yield client

    @contextlib.contextmanager
    def consumer(self, **options: Any) -> Iterator[BlockingBufferClient]:
        """A client that takes from this server."""
        with open_blocking_channel(self.address) as channel:
            yield BlockingBufferClient(channel, **options)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """End the process if it still runs, and close its pipes."""
        assert self.process.stdin is not None and self.process.stdout is not None
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture
def start_buffer(tmp_path: Path) -> Iterator[Callable[..., BufferChild]]:
    """Starts children; a server is ready when it is returned. All are ended with the test."""
    children: list[BufferChild] = []
    address = f"unix:{tmp_path}/s"

    def begin(role: str = "serve", **options: Any) -> BufferChild:
        children.append(BufferChild(role, address, **options))
        if role == "serve":
            assert children[-1].hear() == "ready"
        return children[-1]

    yield begin
    for child in reversed(children):
        child.end()


@pytest.fixture
def record_header() -> Callable[..., RecordHeader]:
    """Makes the header of sample `index` of a group; `version` is that of all its tokens."""

    def make(group: str, index: int = 0, size: int = 1, version: int = 0, tokens: int = 10) -> RecordHeader:
        return RecordHeader(
            record_id=f"{group}/{index}/0",
            group_id=group,
            sample_index=index,
            attempt=0,
            group_size=size,
            oldest_version=PolicyVersion(0, version),
            newest_version=PolicyVersion(0, version),
            num_prompt_tokens=tokens,
            num_response_tokens=tokens,
            num_loss_tokens=tokens,
            mean_version=float(version),
        )

    return make
