import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.reward.pool import RewardPool, create_pool
from headrace.engine.config.schema import RewardConfig
from headrace.engine.errors import ConfigError, UsageError
from headrace.engine.interfaces import Reward
from headrace.engine.types import RewardSample, RewardStatus

HERE = Path(__file__).parent
OK, TIMEOUT, ERROR = RewardStatus.OK, RewardStatus.TIMEOUT, RewardStatus.ERROR


def samples(*responses: str, **data: Any) -> list[RewardSample]:
    return [RewardSample(sample_id=f"s{i}", response_text=text, data=data) for i, text in enumerate(responses)]


@asynccontextmanager
async def pool(name: str, **options: Any) -> AsyncIterator[RewardPool]:
    made = RewardPool(f"{HERE / 'scorers.py'}:{name}", **{"num_workers": 1, **options})
    try:
        yield made
    finally:
        await made.close()
        await made.close()


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # about other processes: there is no event
            await asyncio.sleep(0.01)


async def test_reward_timeout_slot_a_hanging_scorer_costs_one_sample_and_not_its_slot() -> None:
    async with pool("ten_milliseconds_or_forever", num_workers=8, timeout_s=2.0) as scorer:
        await scorer.start()
        num_beats = 0

        async def heartbeat() -> None:
            nonlocal num_beats
            while True:
                await asyncio.sleep(0.01)
                num_beats += 1

        beats = asyncio.create_task(heartbeat())
        begin = time.monotonic()
        outcomes = await scorer.score(samples(*("loop" if i in (3, 50, 99) else "" for i in range(100))))
        elapsed_s = time.monotonic() - begin
        again = await asyncio.gather(*(scorer.score(samples("")) for _ in range(8)))
        beats.cancel()
        assert [outcome.status for outcome in outcomes].count(OK) == 97
        assert [index for index, outcome in enumerate(outcomes) if outcome.status is TIMEOUT] == [3, 50, 99]
        assert all(outcome.value == (0.5 if outcome.status is OK else 0.0) for outcome in outcomes)
        assert [outcome.sample_id for outcome in outcomes] == [f"s{i}" for i in range(100)]
        assert elapsed_s < 20 and num_beats > 20  # of about 100 on an idle machine
        assert {outcomes[0].status for outcomes in again} == {OK}
        assert scorer.statistics.num_timeouts == 3


async def test_texts_and_data_reach_the_function_and_extras_come_back_as_metrics() -> None:
    async with pool("texts") as scorer:
        assert isinstance(scorer, Reward)
        (outcome,) = await scorer.score(samples("drei 🙂", answer="drei 🙂"))
    assert (outcome.value, outcome.metrics) == (1.0, {"length": 0.0})


async def test_a_crash_is_an_error_for_its_sample_alone_and_the_message_says_how_it_ended() -> None:
    async with pool("misbehave") as scorer:
        outcomes = await scorer.score(samples("fine", "exit", "sigkill", "sys.exit", "raise", "fine"))
        statuses = [outcome.status for outcome in outcomes]
        assert sorted(statuses) == [OK, OK, ERROR, ERROR, ERROR, ERROR]
        assert "exit status 3" in outcomes[1].message and "SIGKILL" in outcomes[2].message
        assert "SystemExit: done" in outcomes[3].message and "KeyError" in outcomes[4].message
        assert all(f"'s{i}'" in outcomes[i].message for i in range(1, 5))
        assert scorer.statistics.num_crashes == 2


async def test_prints_and_reads_of_the_scorer_do_not_disturb_the_frames() -> None:
    async with pool("misbehave") as scorer:
        assert [outcome.value for outcome in await scorer.score(samples("print", "fine"))] == [1.0, 1.0]


async def test_a_sample_of_several_megabytes_passes() -> None:
    async with pool("misbehave") as scorer:
        large = RewardSample(sample_id="s", prompt_text="x" * 5_000_000, response_text="large")
        assert (await scorer.score([large]))[0].value == 5e6


async def test_coroutines_run_side_by_side_in_one_worker_and_time_out_alone() -> None:
    async with pool("coroutine", timeout_s=2.0) as scorer:
        await scorer.start()
        begin = time.monotonic()
        outcomes = await scorer.score(samples(*["fast"] * 15, "never"))
        assert time.monotonic() - begin < 4.0  # one time limit, not one after another
        assert [outcome.status for outcome in outcomes] == [OK] * 15 + [TIMEOUT]
        assert scorer.statistics.num_started == 1


async def test_a_coroutine_that_swallows_its_cancellation_is_killed() -> None:
    async with pool("coroutine", timeout_s=1.0) as scorer:
        outcomes = await scorer.score(samples("fast", "stubborn"))
        assert [outcome.status for outcome in outcomes] == [OK, TIMEOUT]
        assert (await scorer.score(samples("fast")))[0].status is OK


async def test_a_batch_function_gets_whole_batches_and_a_wrong_length_names_both_numbers() -> None:
    async with pool("batch", batch_size=4) as scorer:
        outcomes = await scorer.score(samples(*["x"] * 6))
        assert [outcome.value for outcome in outcomes] == [4.0, 4.0, 4.0, 4.0, 2.0, 2.0]
        outcomes = await scorer.score(samples("x", "short", "x"))
        assert {outcome.status for outcome in outcomes} == {ERROR}
        assert "returned 1 results for 3 samples" in outcomes[0].message


async def test_a_timeout_ends_what_the_scorer_has_started_too(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    async with pool("misbehave", timeout_s=3.0) as scorer:
        (outcome,) = await scorer.score(samples("spawn", pid_file=str(pid_file)))
        assert outcome.status is TIMEOUT
        await until(lambda: not is_alive(int(pid_file.read_text())))


async def test_cancelling_a_call_frees_its_slot() -> None:
    async with pool("ten_milliseconds_or_forever", timeout_s=60.0) as scorer:
        await scorer.start()
        call = asyncio.create_task(scorer.score(samples("loop", "loop")))
        await until(lambda: scorer.num_busy == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await scorer.score(samples("")))[0].status is OK


async def test_closing_answers_what_is_running_and_refuses_what_comes_after() -> None:
    async with pool("ten_milliseconds_or_forever", timeout_s=60.0) as scorer:
        await scorer.start()
        call = asyncio.create_task(scorer.score(samples("loop", "")))
        await until(lambda: scorer.num_busy == 1)
        await scorer.close()
        assert {outcome.status for outcome in await call} == {ERROR}
        with pytest.raises(UsageError, match="closed"):
            await scorer.score(samples(""))


async def test_an_empty_batch_has_no_outcomes() -> None:
    async with pool("length") as scorer:
        assert await scorer.score([]) == []


@pytest.mark.parametrize("name", ["no_such_function", "four"])
async def test_a_function_that_cannot_be_used_is_a_config_error_at_start(name: str) -> None:
    async with pool(name, num_workers=2) as scorer:
        with pytest.raises(ConfigError, match=r"reward\.function .*" + name):
            await scorer.start()


def test_a_pool_without_function_or_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reward\.function ''"):
        create_pool(RewardConfig())
    with pytest.raises(ConfigError, match="num_workers 0"):
        RewardPool("m:f", num_workers=0)


PARENT = """
import asyncio, json, sys
from headrace.actors.reward.pool import RewardPool
from headrace.engine.types import RewardSample
async def main():
    pool = RewardPool(sys.argv[1], num_workers=2, timeout_s=100)
    await pool.start()
    print(json.dumps(pool.worker_pids), flush=True)
    await pool.score([RewardSample(sample_id="s", response_text=sys.argv[2])])
asyncio.run(main())
"""


@pytest.mark.parametrize("function", ["ten_milliseconds_or_forever", "runaway_pattern"])
async def test_workers_die_with_their_parent_also_while_user_code_runs(function: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, f"{HERE / 'scorers.py'}:{function}", "loop"], stdout=subprocess.PIPE
    )
    with parent:
        assert parent.stdout is not None
        pids = json.loads(await asyncio.to_thread(parent.stdout.readline))
        await until(lambda: any(cpu_ticks(pid) > 60 for pid in pids))
        os.kill(parent.pid, 9)
        await until(lambda: not any(is_alive(pid) for pid in pids))


def cpu_ticks(pid: int) -> int:
    """User time of a process in clock ticks: it grows once its scorer loops."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])
