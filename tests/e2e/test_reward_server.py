"""Reward servers as people start them: processes of their own, real signals, the command line."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.engine.transport.reward import GrpcReward
from headrace.engine.types import RewardSample, RewardStatus

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
HEADRACE = [sys.executable, "-m", "headrace.clients.cli.main"]
OK, ERROR = RewardStatus.OK, RewardStatus.ERROR

SCORER = """
import os, time
from pathlib import Path
def score(prompt, response, data):
    Path(data["marks"], str(os.getpid())).touch()
    if response == "loop":
        while True:
            pass
    time.sleep(float(data.get("seconds", 0)))
    return 1.0
"""


class Server:
    """A running server process and where it listens."""

    def __init__(self, process: "asyncio.subprocess.Process", address: str, name: str) -> None:
        self.process = process
        self.address = address
        self.name = name

    async def ended(self) -> tuple[int, str]:
        """Wait for its end; exit status and what it wrote to standard error."""
        async with asyncio.timeout(60):
            assert self.process.stderr is not None
            text = await self.process.stderr.read()
            return await self.process.wait(), text.decode()


@asynccontextmanager
async def started(*command: str) -> AsyncIterator[Server]:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode().strip()
        head, _, address = line.rpartition(" on ")
        yield Server(process, address, head.removeprefix("serving "))
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def scorer_served(folder: Path, *options: str) -> AsyncIterator[Server]:
    script = folder / "scorer.py"
    script.write_text(SCORER)
    async with started(*HEADRACE, "reward", "serve", f"{script}:score", *options) as server:
        yield server


async def run_to_end(*command: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    async with asyncio.timeout(120):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # about other processes: there is no event
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def sample(sample_id: str, response: str, folder: Path, seconds: float = 0.0) -> RewardSample:
    marks = folder / "marks"
    marks.mkdir(exist_ok=True)
    return RewardSample(sample_id=sample_id, response_text=response, data={"marks": str(marks), "seconds": seconds})


def worker_pids(folder: Path) -> list[int]:
    return [int(path.name) for path in (folder / "marks").glob("*")]


async def test_a_served_function_scores_over_the_network_and_a_hanging_sample_costs_itself(tmp_path: Path) -> None:
    options = ("--workers", "2", "--timeout", "2", "--port-file", str(tmp_path / "port"))
    async with scorer_served(tmp_path, *options) as server:
        assert server.name.endswith("scorer.py:score")
        assert (tmp_path / "port").read_text() == server.address + "\n"
        reward = GrpcReward(server.address)
        texts = ["loop" if i == 3 else "x" for i in range(20)]
        outcomes = await reward.score([sample(f"s{i}", text, tmp_path) for i, text in enumerate(texts)])
        await reward.close()
        assert [outcome.status for outcome in outcomes].count(OK) == 19
        assert outcomes[3].status is RewardStatus.TIMEOUT


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_term_signal_running_calls_are_finished_and_the_exit_is_clean(number: int, tmp_path: Path) -> None:
    async with scorer_served(tmp_path) as server:
        reward = GrpcReward(server.address, outage_s=0.1)
        call = asyncio.create_task(reward.score([sample("s", "x", tmp_path, seconds=1.0)]))
        await until(lambda: (tmp_path / "marks").exists() and bool(worker_pids(tmp_path)))
        os.kill(server.process.pid, number)
        assert (await call)[0].status is OK
        assert await server.ended() == (0, "")
        await reward.close()
        assert not any(is_alive(pid) for pid in worker_pids(tmp_path))


async def test_term_signal_a_second_signal_ends_running_calls_at_once(tmp_path: Path) -> None:
    async with scorer_served(tmp_path, "--grace", "60", "--timeout", "60") as server:
        reward = GrpcReward(server.address, outage_s=0.1)
        call = asyncio.create_task(reward.score([sample("s", "loop", tmp_path)]))
        await until(lambda: (tmp_path / "marks").exists() and bool(worker_pids(tmp_path)))
        server.process.terminate()
        await until(lambda: not accepts(server.address))
        server.process.terminate()
        assert (await call)[0].status is ERROR
        assert await server.ended() == (0, "")
        await reward.close()


def accepts(address: str) -> bool:
    """Whether something listens there."""
    port = f"{int(address.rpartition(':')[2]):04X}"
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return any(fields[1].endswith(f":{port}") and fields[3] == "0A" for fields in map(str.split, lines))


async def test_watch_parent_the_server_and_its_workers_end_with_the_program_that_started_them(tmp_path: Path) -> None:
    async with scorer_served(tmp_path, "--watch-parent", "--timeout", "60") as server:
        reward = GrpcReward(server.address, outage_s=0.1)
        call = asyncio.create_task(reward.score([sample("s", "loop", tmp_path)]))
        await until(lambda: (tmp_path / "marks").exists() and bool(worker_pids(tmp_path)))
        assert server.process.stdin is not None
        server.process.stdin.close()  # what the kernel does when the parent is gone
        assert (await server.ended())[0] == 0
        assert (await call)[0].status is ERROR
        await reward.close()
        assert not any(is_alive(pid) for pid in worker_pids(tmp_path))


async def test_a_killed_server_leaves_no_worker(tmp_path: Path) -> None:
    async with scorer_served(tmp_path, "--timeout", "60") as server:
        reward = GrpcReward(server.address, outage_s=0.1)
        call = asyncio.create_task(reward.score([sample("s", "loop", tmp_path)]))
        await until(lambda: (tmp_path / "marks").exists() and bool(worker_pids(tmp_path)))
        server.process.kill()
        assert (await call)[0].status is ERROR
        await until(lambda: not any(is_alive(pid) for pid in worker_pids(tmp_path)))
        await reward.close()


async def test_reward_server_5xx_a_server_that_is_restarted_is_used_again(tmp_path: Path) -> None:
    async with scorer_served(tmp_path) as server:
        reward = GrpcReward(server.address, backoff_s=0.05)
        assert (await reward.score([sample("s", "x", tmp_path)]))[0].status is OK
        port = server.address.rpartition(":")[2]
        server.process.kill()
        await server.process.wait()
        call = asyncio.create_task(reward.score([sample("t", "x", tmp_path)]))
        async with scorer_served(tmp_path, "--port", port):
            assert (await call)[0].status is OK
        await reward.close()


async def test_a_function_that_cannot_be_imported_is_one_sentence_and_exit_code_2() -> None:
    code, out, err = await run_to_end(*HEADRACE, "reward", "serve", "no_such_module_here:score")
    assert (code, out) == (2, "")
    assert "reward.function 'no_such_module_here:score'" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "example",
    [
        "demo/reward.py",
        "reward_servers/async_judge.py",
        pytest.param("reward_servers/batched_length.py", marks=pytest.mark.full),
    ],
)
async def test_the_examples_keep_the_contract(example: str) -> None:
    async with started(*HEADRACE, "reward", "serve", f"{EXAMPLES / example}:score") as server:
        code, out, err = await run_to_end(*HEADRACE, "reward", "check", server.address, "--calls", "40")
        assert (code, err) == (0, "") and "the server keeps the contract" in out and "latency p50" in out


async def test_a_server_without_our_sdk_keeps_the_contract_and_gets_advice() -> None:
    script = str(EXAMPLES / "reward_servers" / "without_sdk.py")
    async with started(sys.executable, script, "127.0.0.1:0") as server:
        code, out, err = await run_to_end(*HEADRACE, "reward", "check", server.address, "--calls", "40")
        assert (code, err) == (0, "") and "advice  serve grpc.health.v1.Health" in out


BROKEN = """
import sys
sys.path.insert(0, sys.argv[1])
import random
import without_sdk
judge = without_sdk.judge
def broken(sample):
    outcome = judge(sample)
    if sample.sample_id.startswith("order"):
        outcome.sample_id = "order-1"
    elif not sample.response_text:
        outcome.outcome, outcome.value = 1, float("nan")
    elif sample.sample_id == "twice":
        outcome.value = random.random()
    return outcome
without_sdk.judge = broken
sys.argv[1] = "127.0.0.1:0"
without_sdk.main()
"""


async def test_the_check_says_what_a_server_does_wrong(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    async with started(sys.executable, str(script), str(EXAMPLES / "reward_servers")) as server:
        code, out, _ = await run_to_end(*HEADRACE, "reward", "check", server.address, "--calls", "8")
    assert code == 1 and "3 faults" in out
    assert "sample_id 'order-1' where 'order-3' was asked" in out
    assert "the value nan; a reward must be finite" in out
    assert "the same sample got different outcomes" in out


async def test_the_check_without_a_server_is_one_sentence() -> None:
    code, _, err = await run_to_end(*HEADRACE, "reward", "check", "nonsense")
    assert code == 2 and "write grpc://HOST:PORT" in err


async def test_a_script_without_a_main_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text("from headrace.clients.reward import serve\ndef score(sample):\n    return 1.0\nserve(score)\n")
    code, _, err = await run_to_end(sys.executable, str(script))
    assert code == 1 and 'if __name__ == "__main__"' in err.splitlines()[-1]


def test_a_reward_server_imports_no_torch() -> None:
    imports = "import sys, headrace.clients.reward, headrace.actors.reward.worker"
    code = f"{imports}; print(sorted({{'torch', 'vllm'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
