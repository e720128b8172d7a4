"""What a scorer may return, and what becomes of it: the border between user code and typed outcomes."""

import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from headrace.engine.types import RewardOutcome, RewardStatus

MAX_MESSAGE_CHARS = 2000

ALLOWED = 'a finite number, a bool, a dict with "reward", a RewardOutcome or None'


def normalise_result(result: object, *, sample_id: str, scorer: str) -> RewardOutcome:
    """Turn what a scorer returned into the outcome of one sample. Pure; never raises.

    | returned                     | outcome                                                          |
    |------------------------------|------------------------------------------------------------------|
    | `True`, `1`, numpy scalar    | OK, as a float                                                   |
    | `{"reward": x, "extra": y}`  | the rule for x; finite numbers beside it become metrics          |
    | `None`                       | ABSTAIN                                                          |
    | NaN, infinity                | ERROR: unscored                                                  |
    | `RewardOutcome`              | itself, with this sample's id; an OK value must be finite        |
    | anything else (`"0.5"`, ...) | ERROR                                                            |

    Args:
        result: What the scorer returned for the sample.
        sample_id: The sample that was scored; messages name it.
        scorer: Name of the scorer; messages name it.
    """
    if isinstance(result, RewardOutcome):
        return _checked_outcome(result, sample_id, scorer)
    if isinstance(result, Mapping):
        return _from_mapping({str(key): item for key, item in result.items()}, sample_id, scorer)  # pyright: ignore
    if result is None:
        return RewardOutcome(
            sample_id=sample_id,
            status=RewardStatus.ABSTAIN,
            message=f"scorer {scorer!r} returned None for sample {sample_id!r}: not scored",
        )
    number = as_number(result)
    if number is None:
        shown = shorten(repr(result), 80)
        return error_outcome(
            sample_id,
            f"scorer {scorer!r} returned {shown} ({type(result).__name__}) for sample {sample_id!r}; "
            f"allowed is {ALLOWED}",
        )
    if not math.isfinite(number):
        return error_outcome(
            sample_id, f"scorer {scorer!r} returned {number} for sample {sample_id!r}; a reward must be finite"
        )
    return RewardOutcome(sample_id=sample_id, status=RewardStatus.OK, value=number)


def as_number(value: object) -> float | None:
    """A bool, int, float or numpy scalar (also a 0-d array) as a float; None for anything else, text included."""
    if isinstance(value, np.ndarray) and value.ndim == 0:  # pyright: ignore[reportUnknownMemberType]
        value = value[()]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        try:
            return float(cast(Any, value))
        except OverflowError:  # an int beyond the range of float
            return math.inf
    return None


def error_outcome(sample_id: str, message: str) -> RewardOutcome:
    """An ERROR outcome with a message of bounded length."""
    return RewardOutcome(sample_id=sample_id, status=RewardStatus.ERROR, message=shorten(message, MAX_MESSAGE_CHARS))


def shorten(text: str, max_chars: int) -> str:
    """The text, cut to `max_chars` with a mark where something is missing."""
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def _checked_outcome(outcome: RewardOutcome, sample_id: str, scorer: str) -> RewardOutcome:
    if outcome.status is not RewardStatus.OK:
        return RewardOutcome(
            sample_id=sample_id,
            status=RewardStatus(outcome.status),
            metrics=_finite_metrics(outcome.metrics),
            message=shorten(outcome.message or f"scorer {scorer!r} gave no reason", MAX_MESSAGE_CHARS),
        )
    checked = normalise_result(outcome.value, sample_id=sample_id, scorer=scorer)
    if checked.status is not RewardStatus.OK:
        return checked
    return RewardOutcome(
        sample_id=sample_id,
        status=RewardStatus.OK,
        value=checked.value,
        metrics=_finite_metrics(outcome.metrics),
        message=shorten(outcome.message, MAX_MESSAGE_CHARS),
    )


def _from_mapping(result: dict[str, object], sample_id: str, scorer: str) -> RewardOutcome:
    if "reward" not in result:
        keys = ", ".join(repr(key) for key in list(result)[:10]) or "none"
        return error_outcome(
            sample_id,
            f'scorer {scorer!r} returned a dict without "reward" for sample {sample_id!r}; its keys are: {keys}',
        )
    if isinstance(result["reward"], Mapping):
        return error_outcome(
            sample_id, f'scorer {scorer!r} returned a dict under "reward" for sample {sample_id!r}; give a number there'
        )
    outcome = normalise_result(result["reward"], sample_id=sample_id, scorer=scorer)
    extras = {key: item for key, item in result.items() if key != "reward"}
    return RewardOutcome(
        sample_id=sample_id,
        status=outcome.status,
        value=outcome.value,
        metrics={**outcome.metrics, **_finite_metrics(extras)},
        message=outcome.message,
    )


def _finite_metrics(extras: Mapping[str, object]) -> dict[str, float]:
    """The finite numbers among the extras; text and the like is left out, for metrics are averaged over samples."""
    numbers = ((key, as_number(item)) for key, item in extras.items())
    return {key: number for key, number in numbers if number is not None and math.isfinite(number)}
