"""What must hold between settings."""

import pytest

from headrace.engine.config import load_config
from headrace.engine.errors import ConfigError

BASE = ("--model.path=m", "--reward.function=rewards:score")


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return str(caught.value)


def test_staleness_tighter_than_the_publishing_interval_is_refused() -> None:
    message = refusal(*BASE, "--schedule.max_staleness=2", "--schedule.weight_sync_steps=4")
    assert "schedule.max_staleness = 2" in message and "schedule.weight_sync_steps = 4" in message
    load_config(None, [*BASE, "--schedule.max_staleness=3", "--schedule.weight_sync_steps=4"])


def test_zero_variance_a_group_of_one_with_a_group_relative_method_is_refused() -> None:
    message = refusal(*BASE, "--schedule.group_size=1")
    assert "schedule.group_size = 1" in message and 'algorithm.name = "grpo"' in message
    load_config(None, [*BASE, "--schedule.group_size=1", "--algorithm.name=ppo"])


def test_exactly_one_way_to_score_is_needed() -> None:
    assert "neither reward.function nor reward.address is set" in refusal("--model.path=m")
    assert "keep the one that shall score" in refusal(*BASE, "--reward.address=grpc://host:1")
    load_config(None, ["--model.path=m", "--reward.address=unix:/run/reward.sock"])


def test_the_form_of_the_scorer_is_checked() -> None:
    assert 'write "grpc://HOST:PORT" or "unix:/path"' in refusal("--model.path=m", "--reward.address=host:1")
    assert 'write "module:function"' in refusal("--model.path=m", "--reward.function=rewards.score")


def test_a_model_is_needed() -> None:
    assert "model.path is empty" in refusal("--reward.function=rewards:score")


def test_the_response_must_leave_room_for_a_prompt() -> None:
    message = refusal(*BASE, "--rollout.max_tokens=64", "--model.max_context_tokens=64")
    assert "rollout.max_tokens = 64" in message and "model.max_context_tokens = 64" in message


def test_evaluation_from_files_needs_held_out_prompts() -> None:
    assert "needs eval.path" in refusal(*BASE, "--eval.num_prompts=4")
    load_config(None, [*BASE, "--eval.num_prompts=4", "--eval.path=held-out.jsonl"])
    load_config(None, [*BASE, "--eval.num_prompts=4", "--data.source=reasoning_gym"])


def test_a_table_that_cannot_hold_one_batch_is_refused() -> None:
    assert "cannot hold one step's batch of 64 records" in refusal(*BASE, "--buffer.capacity_records=63")
    load_config(None, [*BASE, "--buffer.capacity_records=64"])


def test_a_nucleus_with_importance_correction_is_allowed() -> None:
    load_config(None, [*BASE, "--rollout.top_p=0.9", "--rollout.top_k=50"])


def test_a_constant_length_that_the_loss_does_not_read_is_refused() -> None:
    for given in ("--algorithm.name=grpo", "--algorithm.normalization=token"):
        assert "algorithm.length_constant = 512 has no effect" in refusal(
            *BASE, given, "--algorithm.length_constant=512"
        )
    for given in ("--algorithm.name=dr_grpo", "--algorithm.normalization=constant", "--algorithm.name=mine:Own"):
        load_config(None, [*BASE, given, "--algorithm.length_constant=512"])


def test_a_step_of_one_sample_cannot_be_normalised_over_itself() -> None:
    method = "--algorithm.name=reinforce_plus_plus"
    assert "groups_per_step = 1" in refusal(*BASE, method, "--schedule.group_size=1", "--schedule.groups_per_step=1")
    load_config(None, [*BASE, method, "--schedule.group_size=1"])


def test_a_rate_cannot_follow_the_distance_of_on_policy_samples() -> None:
    message = refusal(*BASE, "--learner.kl_target=0.01", "--schedule.max_staleness=0")
    assert "learner.kl_target = 0.01" in message and "schedule.max_staleness = 0" in message
    load_config(None, [*BASE, "--learner.kl_target=0.01"])
