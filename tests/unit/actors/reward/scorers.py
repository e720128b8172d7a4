"""Scoring functions that the pool's tests run in worker processes."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from headrace.engine.types import RewardSample


def length(sample: RewardSample) -> int:
    return len(sample.response_text)


def ten_milliseconds_or_forever(sample: RewardSample) -> float:
    if sample.response_text == "loop":
        while True:
            pass
    time.sleep(0.01)
    return 0.5


def texts(prompt: str, response: str, data: dict[str, Any]) -> dict[str, Any]:
    return {"reward": float(response == data["answer"]), "length": len(prompt), "note": "text is no metric"}


def misbehave(prompt: str, response: str, data: dict[str, Any]) -> float:
    match response:
        case "exit":
            os._exit(3)
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sys.exit":
            sys.exit("done")
        case "raise":
            raise KeyError("answer")
        case "print":
            print("x" * 100_000)
            sys.stdout.write(str(sys.stdin.read()))
        case "large":
            return float(len(prompt))
        case "spawn":
            Path(data["pid_file"]).write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
            while True:
                pass
    return 1.0


async def coroutine(sample: RewardSample) -> float:
    if sample.response_text == "never":
        await asyncio.Event().wait()
    if sample.response_text == "stubborn":
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue
    await asyncio.sleep(0.05)
    return 1.0


def batch(samples: list[RewardSample]) -> list[float]:
    if any(sample.response_text == "short" for sample in samples):
        return [1.0]
    return [float(len(samples))] * len(samples)


batch.batch = True  # type: ignore[attr-defined]


def four(a: int, b: int, c: int, d: int) -> float:
    return 0.0


def runaway_pattern(sample: RewardSample) -> float:
    return float(re.match(r"(a+)+$", "a" * 40 + "b") is None)  # holds the interpreter's lock for hours
