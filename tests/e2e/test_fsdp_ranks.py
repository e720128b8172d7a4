"""The FSDP trainer on real gloo ranks: the same numbers on one, two and three of them."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.actors.learner.checkpoint import find_latest
from headrace.actors.tiny import build_tiny_model
from headrace.engine.types import WeightManifest, WeightUpdate
from headrace.engine.weights.payload import open_payload, verify_payload

RANK = Path(__file__).with_name("fsdp_rank.py")


RunRanks = Callable[[int, str, Path, Path], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def run_ranks() -> Iterator[RunRanks]:
    """Runs a scenario in so many processes, and returns what each wrote."""
    parent = subprocess.Popen(
        [sys.executable, str(RANK)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert parent.stdin is not None and parent.stdout is not None
    ask, answers = parent.stdin, parent.stdout

    def run(num_ranks: int, scenario: str, model_dir: Path, folder: Path) -> list[dict[str, Any]]:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "meet").unlink(missing_ok=True)
        ask.write(f"{scenario} {num_ranks} {model_dir} {folder}\n")
        ask.flush()
        answer = answers.readline()
        logs = [(folder / f"log-{rank}").read_text() for rank in range(num_ranks)]
        assert answer == "0\n", "\n".join(logs)
        return [json.loads((folder / f"report-{rank}").read_text()) | {"log": logs[rank]} for rank in range(num_ranks)]

    with parent:
        yield run
        with contextlib.suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)


def start_rank(scenario: str, rank: int, num_ranks: int, model_dir: Path, folder: Path) -> "subprocess.Popen[str]":
    """One rank of a scenario."""
    argv = [sys.executable, str(RANK), scenario, str(rank), str(num_ranks), str(model_dir), str(folder)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def reports(
    run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, tuple[Path, list[dict[str, Any]]]]:
    """Two steps on 1, 2 and 3 ranks, all from the same model; 1 and 3 then go on from the checkpoint of 2."""
    model_dir = build_tiny_model(tmp_path_factory.mktemp("model"), "llama", tied=True)
    found = {}
    for num_ranks in (2, 1, 3):
        folder = tmp_path_factory.mktemp(f"ranks-{num_ranks}")
        if num_ranks != 2:
            (folder / "others").symlink_to(found[2][0] / "checkpoints")
        found[num_ranks] = (folder, run_ranks(num_ranks, "train", model_dir, folder))
    return found


def published(folder: Path) -> dict[str, np.ndarray]:
    """The keyframe that all ranks of a folder wrote, joined."""
    parts = [
        msgspec.json.decode(path.read_bytes(), type=WeightManifest) for path in sorted(folder.glob("manifest-*.json"))
    ]
    joined = msgspec.structs.replace(
        parts[0],
        buckets=tuple(bucket for part in parts for bucket in part.buckets),
        digest=sum(part.digest for part in parts) % 2**64,
    )
    (payload,) = folder.glob("keyframe-*.bin")
    update = WeightUpdate(manifest=joined, local_path=str(payload))
    verify_payload(update)
    return {name: bits.view(np.float32) for name, (_, bits) in open_payload(update).items()}


@pytest.mark.timeout(300)
def test_token_mean_ranks_loss_gradient_and_update_are_those_of_one_rank(
    reports: dict[int, tuple[Path, list[dict[str, Any]]]],
) -> None:
    # Ranks hold different numbers of tokens, and one of three holds nothing but padding in its second micro-batch.
    folder, (alone,) = reports[1]
    weights = published(folder)
    for num_ranks in (2, 3):
        other_folder, ranks = reports[num_ranks]
        for report in ranks:
            assert report["metrics"] == ranks[0]["metrics"]  # equal bits on every rank
            for step, metrics in enumerate(report["metrics"]):
                for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "mismatch_kl/mean", "perf/tokens"):
                    assert metrics[name] == pytest.approx(alone["metrics"][step][name], rel=1e-4), (name, step)
        other = published(other_folder)
        assert other.keys() == weights.keys()
        for name, values in weights.items():
            np.testing.assert_allclose(other[name], values, atol=1e-6, rtol=1e-5, err_msg=name)


def test_every_rank_writes_only_its_own_shard(reports: dict[int, tuple[Path, list[dict[str, Any]]]]) -> None:
    folder, _ = reports[2]
    for path in folder.glob("manifest-*.json"):
        part = msgspec.json.decode(path.read_bytes(), type=WeightManifest)
        written = sum(bucket.count for bucket in part.buckets)
        assert written == sum(int(np.prod(spec.shape)) for spec in part.tensors) // 2
        assert "lm_head.weight" not in {spec.name for spec in part.tensors}  # tied, so published once


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.timeout(300)
def test_a_checkpoint_of_two_ranks_resumes_on_another_number_of_ranks(
    reports: dict[int, tuple[Path, list[dict[str, Any]]]], num_ranks: int
) -> None:
    _, (first, _) = reports[2]
    for report in reports[num_ranks][1]:
        resumed = report["resumed"]
        assert resumed["version"] == [0, 2]
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
            assert resumed["metrics"][0][name] == pytest.approx(first["metrics"][1][name], rel=1e-4), name


@pytest.mark.timeout(300)
def test_nonfinite_grad_of_one_rank_skips_the_step_on_both_and_a_streak_ends_the_run(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    model_dir = build_tiny_model(tmp_path / "model", "llama", tied=True)
    ranks = run_ranks(2, "poison", model_dir, tmp_path / "run")
    for report in ranks:
        assert report["skipped"] == [False, True, False, True, True]
        assert report["unchanged"] and report["streak_ended_at"] == 5
    bad, good = ranks[1]["log"], ranks[0]["log"]
    assert "g/5/0" in bad and "not finite" in good


@pytest.mark.full
@pytest.mark.timeout(300)
def test_atomic_checkpoint_a_killed_rank_costs_at_most_the_checkpoint_being_saved(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    """K-022: of two ranks that save for ever one is killed; the other is ended as a supervisor would do it."""
    model_dir, folder = build_tiny_model(tmp_path / "model", "llama", tied=True), tmp_path / "run"
    folder.mkdir()
    rng = random.Random(0)
    reported = 0
    for victim in (1, 0):
        (folder / "meet").unlink(missing_ok=True)
        ranks = [start_rank("save", rank, 2, model_dir, folder) for rank in range(2)]
        try:
            out = ranks[0].stdout
            assert out is not None
            reported = int(out.readline())
            time.sleep(rng.uniform(0, 0.05))  # a random moment of the saves that follow
            ranks[victim].kill()
            ranks[victim].wait()
        finally:
            for rank in ranks:
                rank.kill()
        rest = ranks[0].communicate()[0].split()
        ranks[1].communicate()
        reported = int(rest[-1]) if rest else reported
        latest = find_latest(folder / "checkpoints")
        assert latest is not None and int(latest.name.removeprefix("step-")) >= reported, victim
    for report in run_ranks(2, "resume", model_dir, folder):
        assert report["version"] == [0, 2]
