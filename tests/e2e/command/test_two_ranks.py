"""A run whose learner has two ranks, and its resumption on one; scripted rollouts, a real model that is trained."""

from typing import Any

import pytest

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]  # torch is imported three times

Train = Any  # the fixture of conftest.py

OPTIONS = (
    "--model.path=tiny",
    "--model.max_context_tokens=64",
    "--learner.launch=engine",
    "--learner.device=cpu",
    "--learner.threads=1",
    "--learner.mixed_precision=no",
    "--learner.checkpoint_steps=2",
    "--timeouts.start_s=200",
    "--timeouts.no_progress_s=120",
)


def test_two_ranks_of_a_learner_train_save_and_publish_and_one_rank_goes_on(train: Train) -> None:
    from headrace.actors.tiny import build_tiny_model

    build_tiny_model(train.folder / "tiny", vocab=1000)  # what the scripted engine draws from
    ended = train.run(*OPTIONS, "--learner.num_ranks=2", "--run.steps=3", limit_s=240)
    assert ended.code == 0, (ended, train.log())
    assert [row["step"] for row in train.rows()] == [1, 2, 3]
    # A version is sealed by the slower rank's part, which may come after the other has reported its step.
    assert sum(row.get("weights/wire_bytes", 0) for row in train.rows()) > 0
    folder = train.run_folder
    parts = sorted(path.name for path in (folder / "checkpoints" / "step-00000003").glob("*.safetensors"))
    assert parts == ["rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"]
    train.assert_nothing_is_left()
    again = train.run("--resume", str(folder), *OPTIONS, "--learner.num_ranks=1", "--run.steps=5", limit_s=240)
    assert again.code == 0, (again, train.log())
    assert [row["step"] for row in train.rows()] == [1, 2, 3, 4, 5]
    train.assert_nothing_is_left()
