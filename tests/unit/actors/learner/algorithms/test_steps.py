"""A step of each method is what its paper says, however it is cut up.

A gradient is compared with one that is written here from the formulas, loop by loop in float64, so a wrong sign, mask,
baseline, denominator or detach has nowhere to hide; `test_mutants.py` shows that on the sources.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from headrace.actors.learner.loss_inputs import TensorLossInputs
from headrace.engine.config import AlgorithmConfig
from headrace.engine.config.algorithm import ImportanceConfig, KlConfig
from headrace.engine.interfaces import Algorithm
from headrace.engine.plugins import load_entry_point
from headrace.engine.testing.check_algorithm import make_group
from headrace.engine.types import MicroBatch

GROUP_RELATIVE = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo")
ON_POLICY_LOSS = (*GROUP_RELATIVE, "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo", "distillation")
EVERY_METHOD = (*ON_POLICY_LOSS, "dpo", "sft")


def make(name: str, **settings: Any) -> Algorithm:
    method: Any = load_entry_point("headrace.algorithms", name)
    return method(AlgorithmConfig(name=name, length_constant=3, **settings))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A response with everything that any method reads; float64 [T] each."""

    group: int
    reward: float
    current: np.ndarray
    behaviour: np.ndarray
    reference: np.ndarray
    teacher: np.ndarray
    values: np.ndarray
    advantage: float = 0.0


GROUP_SIZES = (4, 3, 4)


def ragged_rows(name: str, seed: int = 3) -> list[Row]:
    """Three groups of ragged responses with scores far enough apart that weights are truncated and rejected."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for group, size in enumerate(GROUP_SIZES):
        for member in range(2 if name == "dpo" else size):
            length = int(rng.integers(1, 6))
            current, reference, teacher = (-rng.uniform(0.1, 3.0, length).astype(np.float32) for _ in range(3))
            rows.append(
                Row(
                    group=group,
                    reward=float(member % 2 + 0.25 * group * member),
                    current=current.astype(np.float64),
                    behaviour=current + rng.normal(0, 0.6, length).astype(np.float32),
                    reference=reference,
                    teacher=teacher,
                    values=rng.normal(0, 1, length).astype(np.float32),
                )
            )
    return rows


def with_credit(algorithm: Algorithm, rows: Sequence[Row], order: Sequence[int] = (0, 1, 2)) -> list[Row]:
    """The rows with the credit of their groups, which are handed over in the given order."""
    members = {group: [row for row in rows if row.group == group] for group in order}
    groups = [make_group([row.reward for row in members[group]], f"g{group}") for group in order]
    if algorithm.traits.credit_scope == "batch":
        credit = algorithm.assign_credit(groups)
    else:
        credit = [algorithm.assign_credit([group])[0] for group in groups]
    given = {
        id(row): float(value)
        for group, values in zip(order, credit, strict=True)
        for row, value in zip(members[group], values, strict=True)
    }
    return [dataclasses.replace(row, advantage=given[id(row)]) for row in rows]


def pack(rows: Sequence[Row], prompt: int) -> MicroBatch:
    """Rows end to end behind prompts of junk."""

    def column(values: Callable[[Row], np.ndarray], junk: float, dtype: type = np.float32) -> np.ndarray:
        return np.concatenate([np.array([junk] * prompt + values(row).tolist(), dtype) for row in rows])

    lengths = [prompt + len(row.current) for row in rows]
    numbers = {group: index for index, group in enumerate(dict.fromkeys(row.group for row in rows))}
    return MicroBatch(
        token_ids=np.ones(sum(lengths), np.int32),
        position_ids=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        sequence_ids=np.repeat(np.arange(len(rows), dtype=np.int32), lengths),
        loss_mask=column(lambda row: np.ones_like(row.current), 0, np.uint8),
        behaviour_logprobs=column(lambda row: row.behaviour, 0.0),
        advantages=column(lambda row: np.full_like(row.current, row.advantage), 0.0),
        temperature=np.ones(len(rows), np.float32),
        record_ids=tuple(f"r{index}" for index in range(len(rows))),
        lags=np.zeros(len(rows), np.int32),
        group_ids=np.array([numbers[row.group] for row in rows], np.int32),
        reference_logprobs=column(lambda row: row.reference, float("nan")),
        teacher_logprobs=column(lambda row: row.teacher, float("nan")),
        values=column(lambda row: row.values, float("nan")),
    )


def step_gradient(
    algorithm: Algorithm, rows: Sequence[Row], parts: Sequence[Sequence[int]], *, kl_coef: float = 0.0, prompt: int = 2
) -> list[np.ndarray]:
    """What a trainer applies: the gradient of each row's current scores, float64 [T], after making up for rejections.

    Args:
        parts: Which rows stand in each micro-batch, in order.
    """
    leaves = [torch.from_numpy(row.current.copy()).requires_grad_(True) for row in rows]
    junk = torch.full((prompt,), -1.0, dtype=torch.float64, requires_grad=True)
    counts = {
        "num_loss_tokens": sum(len(row.current) for row in rows),
        "num_sequences": len(rows),
        "num_groups": len({row.group for row in rows}),
    }
    rejected, denominator = 0.0, math.nan
    for part in parts:
        micro_batch = pack([rows[index] for index in part], prompt)
        scores = torch.cat([piece for index in part for piece in (junk, leaves[index])])
        inputs = TensorLossInputs.build(
            micro_batch,
            logprobs=scores,
            entropy=-scores * scores.detach().exp(),
            advantages=algorithm.token_advantages(micro_batch),
            kl_coef=kl_coef,
            **counts,
        )
        columns = ("behaviour_logprobs", "reference_logprobs", "teacher_logprobs", "advantages")
        output: Any = algorithm.loss(
            dataclasses.replace(inputs, **{name: getattr(inputs, name).double() for name in columns})
        )
        output.loss.backward()
        rejected, denominator = rejected + output.rejected.item(), output.denominator
    assert junk.grad is not None
    assert not junk.grad.any()
    scale = denominator / (denominator - rejected)
    return [leaf.grad.numpy() * scale for leaf in leaves if leaf.grad is not None]


# Weights are cut off at 1.5: truncated for some methods, rejected for others; a KL and an entropy term beside the loss.
CAP, KL_COEF, ENTROPY_COEF = 1.5, 0.1, 0.01
TERMS = {"kl_coef": KL_COEF, "entropy_coef": ENTROPY_COEF}
SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"importance": ImportanceConfig(kind="mask", cap=CAP), **TERMS} for name in ON_POLICY_LOSS},
    "grpo": {"importance": ImportanceConfig(cap=CAP), "normalization": "sequence", **TERMS},
    "gspo": {"importance": ImportanceConfig(cap=CAP, reject_above=1.3), **TERMS},
    "rloo": {
        "importance": ImportanceConfig(cap=100.0, level="product"),
        "kl_coef": KL_COEF,
        "kl": KlConfig(estimator="k2"),
    },
    "ppo": {"importance": ImportanceConfig(cap=CAP), "kl_coef": KL_COEF, "kl": KlConfig(place="reward")},
    "dpo": {"beta": 0.3},
    "sft": {},
}


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_neither_lengths_nor_order_nor_the_cut_into_micro_batches_change_a_step(name: str) -> None:
    algorithm, rows = make(name, **SETTINGS[name]), ragged_rows(name)
    kl_coef = SETTINGS[name].get("kl_coef", 0.0)
    whole = list(range(len(rows)))
    rows = with_credit(algorithm, rows)
    gradients = step_gradient(algorithm, rows, [whole], kl_coef=kl_coef)
    backwards = whole[::-1]
    cuts = [
        [whole[:2], whole[2:]],
        [backwards],
        [backwards[:2], backwards[2:4], backwards[4:]],
        *([] if algorithm.traits.whole_groups else [[[index] for index in whole]]),
    ]
    for cut in cuts:
        for prompt in (1, 5):
            again = step_gradient(algorithm, rows, cut, kl_coef=kl_coef, prompt=prompt)
            for one, other in zip(gradients, again, strict=True):
                assert np.allclose(one, other, rtol=1e-9, atol=1e-12)
    turned = with_credit(algorithm, rows, order=(2, 0, 1))
    assert [row.advantage for row in turned] == pytest.approx([row.advantage for row in rows], rel=1e-6)


def written_out(name: str, rows: Sequence[Row]) -> list[np.ndarray]:
    """The gradient of each row's current scores by the formulas of the paper, one loop after the other."""
    if name == "dpo":
        return written_out_dpo(rows, beta=0.3)
    settings = SETTINGS[name]
    importance = settings.get("importance", ImportanceConfig(kind="none"))
    tokens: list[list[dict[str, float]]] = []
    for row, credit in zip(rows, written_out_credit(name, rows), strict=True):
        gaps = row.current - row.behaviour
        mean, total = float(np.mean(gaps)), float(np.sum(gaps))
        entries: list[dict[str, float]] = []
        for place in range(len(row.current)):
            level = "sequence" if name == "gspo" else importance.level
            raw = math.exp({"token": gaps[place], "sequence": mean, "product": total}[level])
            kept = not (importance.kind == "mask" and raw > importance.cap)
            kept = kept and not (importance.reject_above and math.exp(mean) > importance.reject_above)
            weight = {"tis": min(raw, importance.cap), "mask": raw, "none": 1.0}[importance.kind]
            slope = -weight * credit[place]
            if settings.get("kl_coef") and name != "ppo":
                gap = row.reference[place] - row.current[place]
                slope += KL_COEF * (-gap if name == "rloo" else 1 - math.exp(gap))
            if settings.get("entropy_coef"):
                slope += ENTROPY_COEF * math.exp(row.current[place])  # of the stand-in -score * exp(score), detached
            entries.append({"slope": slope if kept else 0.0, "kept": float(kept)})
        tokens.append(entries)
    kept_tokens = sum(entry["kept"] for entries in tokens for entry in entries)
    kept_rows = sum(any(entry["kept"] for entry in entries) for entries in tokens)
    gradients: list[np.ndarray] = []
    for entries in tokens:
        own = sum(entry["kept"] for entry in entries)
        if name == "dr_grpo":
            divisor = 3.0 * kept_rows
        elif name in ("gspo", "grpo"):
            divisor = own * kept_rows
        else:
            divisor = kept_tokens
        gradients.append(np.array([entry["slope"] / max(divisor, 1.0) for entry in entries]))
    return gradients


def written_out_credit(name: str, rows: Sequence[Row]) -> list[list[float]]:
    """The credit of each token."""
    credit: list[list[float]] = []
    everything = [row.reward for row in rows]
    centred = [row.reward - np.mean([r.reward for r in rows if r.group == row.group]) for row in rows]
    for index, row in enumerate(rows):
        rewards = [r.reward for r in rows if r.group == row.group]
        others = [r.reward for r in rows if r.group == row.group and r is not row]
        length = len(row.current)
        if name == "sft":
            credit.append([1.0] * length)
        elif name == "distillation":
            credit.append([float(t - c) for t, c in zip(row.teacher, row.current, strict=True)])
        elif name == "ppo":
            credit.append(written_out_gae(row))
        elif name == "rloo":
            credit.append([row.reward - float(np.mean(others))] * length)
        elif name == "dr_grpo":
            credit.append([row.reward - float(np.mean(rewards))] * length)
        elif name == "reinforce_plus_plus":
            credit.append([float((row.reward - np.mean(everything)) / np.std(everything))] * length)
        elif name == "reinforce_plus_plus_baseline":
            credit.append([float(centred[index] / np.std(centred))] * length)
        else:
            credit.append([float((row.reward - np.mean(rewards)) / np.std(rewards, ddof=1))] * length)
    return credit


def written_out_gae(row: Row, lam: float = 0.95) -> list[float]:
    """Sum of lam^k times the later one-step errors, with the KL of each token in its reward."""
    length = len(row.current)
    rewards = [-KL_COEF * float(row.behaviour[t] - row.reference[t]) for t in range(length)]
    rewards[-1] += row.reward
    values = [*row.values.tolist(), 0.0]
    errors = [rewards[t] + values[t + 1] - values[t] for t in range(length)]
    return [sum(lam ** (k - t) * errors[k] for k in range(t, length)) for t in range(length)]


def written_out_dpo(rows: Sequence[Row], beta: float) -> list[np.ndarray]:
    """d/dx of -log sigmoid(beta (x+ - x-)) is -+ beta sigmoid(-margin), over the pairs."""
    pairs = {row.group: [r for r in rows if r.group == row.group] for row in rows}
    gradients: list[np.ndarray] = []
    for row in rows:
        best, worst = sorted(pairs[row.group], key=lambda r: -r.reward)
        margin = beta * sum(side * float(np.sum(r.current - r.reference)) for side, r in ((1.0, best), (-1.0, worst)))
        slope = beta / (1 + math.exp(margin)) / len(pairs)
        gradients.append(np.full(len(row.current), -slope if row is best else slope))
    return gradients


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_a_step_is_what_the_paper_says(name: str) -> None:
    algorithm, rows = make(name, **SETTINGS[name]), ragged_rows(name)
    given = with_credit(algorithm, rows)
    middle = len(rows) // 2 // 2 * 2
    cut = [list(range(middle)), list(range(middle, len(rows)))]
    gradients = step_gradient(algorithm, given, cut, kl_coef=SETTINGS[name].get("kl_coef", 0.0))
    for one, other in zip(gradients, written_out(name, rows), strict=True):
        assert np.allclose(one, other, rtol=1e-5, atol=1e-7)  # credit travels as float32
    assert any(np.abs(gradient).max() > 1e-3 for gradient in gradients)
