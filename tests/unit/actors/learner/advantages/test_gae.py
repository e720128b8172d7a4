import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.learner.advantages.gae import gae, outcome_rewards, rewards_to_go
from headrace.engine.errors import InputError

numbers = st.integers(-16, 16).map(lambda number: number / 8)
factors = st.sampled_from([0.0, 0.5, 0.9, 0.95, 1.0])


@st.composite
def packed_batches(draw: st.DrawFn) -> dict[str, npt.NDArray[np.float64]]:
    """Ragged sequences with prompts and holes; what stands off the loss tokens is not a number."""
    rewards: list[float] = []
    values: list[float] = []
    masks: list[int] = []
    ids: list[int] = []
    for sequence in range(draw(st.integers(0, 4))):
        mask = draw(st.lists(st.integers(0, 1), min_size=1, max_size=8))
        masks += mask
        ids += [sequence] * len(mask)
        rewards += [draw(numbers) if here else np.nan for here in mask]
        values += [draw(numbers) if here else np.nan for here in mask]
    return {
        "rewards": np.array(rewards),
        "values": np.array(values),
        "loss_mask": np.array(masks, np.uint8),
        "sequence_ids": np.array(ids, np.int32),
    }


def derived(
    batch: dict[str, npt.NDArray[np.float64]], gamma: float, lam: float
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Equation 16 as a sum of temporal-difference errors: A_t = sum over l of (gamma * lambda)^l * delta_(t+l)."""
    advantages, returns = np.zeros(batch["loss_mask"].size), np.zeros(batch["loss_mask"].size)
    for sequence in set(batch["sequence_ids"].tolist()):
        steps = [
            index
            for index in range(batch["loss_mask"].size)
            if batch["sequence_ids"][index] == sequence and batch["loss_mask"][index]
        ]
        state = [float(batch["values"][index]) for index in steps] + [0.0]
        delta = [float(batch["rewards"][index]) + gamma * state[t + 1] - state[t] for t, index in enumerate(steps)]
        for t, index in enumerate(steps):
            advantages[index] = sum((gamma * lam) ** later * delta[t + later] for later in range(len(steps) - t))
            returns[index] = advantages[index] + state[t]
    return advantages, returns


@pytest.mark.parametrize("pad", [100.0, 0.0, -7.0, np.nan, np.inf])
def test_gae_tail(pad: float) -> None:
    """K-009: no value behind the last response token leaks; 100.6 at position 1 would be bootstrapped from a pad."""
    result = gae(
        rewards=[0, 1, pad], values=[0.2, 0.4, pad], loss_mask=[1, 1, 0], sequence_ids=[0, 0, 0], gamma=1.0, lam=0.95
    )
    assert result.advantages == pytest.approx([0.77, 0.6, 0.0], abs=1e-9)
    assert result.returns == pytest.approx([0.97, 1.0, 0.0], abs=1e-9)


def test_credit_passes_over_what_the_environment_said() -> None:
    """Two turns of two tokens with a tool's answer between them are an episode of four decisions, not of seven."""
    hole = np.nan
    result = gae(
        rewards=[hole, 0, 0, hole, hole, 0, 1],
        values=[hole, 0.1, 0.2, hole, hole, 0.3, 0.4],
        loss_mask=[0, 1, 1, 0, 0, 1, 1],
        sequence_ids=[0] * 7,
        gamma=0.9,
        lam=0.8,
    )
    without = gae(
        rewards=[0, 0, 0, 1], values=[0.1, 0.2, 0.3, 0.4], loss_mask=[1] * 4, sequence_ids=[0] * 4, gamma=0.9, lam=0.8
    )
    assert result.advantages[[1, 2, 5, 6]].tolist() == without.advantages.tolist()
    assert result.advantages[[0, 3, 4]].tolist() == [0.0, 0.0, 0.0]
    # Worked out backwards: 0.6; 0.06 + 0.72 * 0.6; 0.07 + 0.72 * 0.492; 0.08 + 0.72 * 0.42424.
    assert without.advantages == pytest.approx([0.3854528, 0.42424, 0.492, 0.6], abs=1e-9)


def test_the_next_sequence_does_not_bootstrap_this_one() -> None:
    result = gae(rewards=[1, 0], values=[0.5, 50.0], loss_mask=[1, 1], sequence_ids=[0, 1])
    assert result.advantages.tolist() == [0.5, -50.0]


@settings(max_examples=40, deadline=None)
@given(packed_batches(), factors, factors)
def test_credit_is_the_sum_of_later_errors(batch: dict[str, npt.NDArray[np.float64]], gamma: float, lam: float) -> None:
    result = gae(**batch, gamma=gamma, lam=lam)
    advantages, returns = derived(batch, gamma, lam)
    assert result.advantages == pytest.approx(advantages, abs=1e-9)
    assert result.returns == pytest.approx(returns, abs=1e-9)
    assert not result.advantages[batch["loss_mask"] == 0].any()


@settings(max_examples=40, deadline=None)
@given(packed_batches(), factors)
def test_lambda_0_is_the_one_step_error_and_lambda_1_the_return_minus_the_value(
    batch: dict[str, npt.NDArray[np.float64]], gamma: float
) -> None:
    """Equations 17 and 18."""
    to_go = rewards_to_go(
        rewards=batch["rewards"], loss_mask=batch["loss_mask"], sequence_ids=batch["sequence_ids"], gamma=gamma
    )
    value = np.where(batch["loss_mask"] != 0, batch["values"], 0.0)
    assert gae(**batch, gamma=gamma, lam=1.0).advantages == pytest.approx(to_go - value, abs=1e-9)
    one_step = gae(**batch, gamma=0.0, lam=0.0).advantages
    reward = np.where(batch["loss_mask"] != 0, batch["rewards"], 0.0)
    assert one_step == pytest.approx(reward - value, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(packed_batches(), factors, st.randoms(use_true_random=False))
def test_order_padding_and_the_cut_into_micro_batches_change_nothing(
    batch: dict[str, npt.NDArray[np.float64]], lam: float, rng: object
) -> None:
    whole = gae(**batch, gamma=0.9, lam=lam).advantages
    order = sorted(set(batch["sequence_ids"].tolist()))
    rng.shuffle(order)  # type: ignore[attr-defined]
    for sequence in order:
        alone = np.flatnonzero(batch["sequence_ids"] == sequence)
        cut = {name: column[alone] for name, column in batch.items()}
        assert gae(**cut, gamma=0.9, lam=lam).advantages.tolist() == whole[alone].tolist()
        padded = {
            name: np.concatenate([fill, column, fill])
            for (name, column), fill in zip(
                cut.items(), ([99.0] * 3, [np.inf] * 3, [0] * 3, [sequence] * 3), strict=True
            )
        }
        assert gae(**padded, gamma=0.9, lam=lam).advantages[3:-3].tolist() == whole[alone].tolist()
    rows = np.concatenate([np.flatnonzero(batch["sequence_ids"] == sequence) for sequence in order] or [[]]).astype(int)
    shuffled = gae(**{name: column[rows] for name, column in batch.items()}, gamma=0.9, lam=lam)
    assert shuffled.advantages.tolist() == whole[rows].tolist()


@settings(max_examples=40, deadline=None)
@given(packed_batches(), st.data())
def test_derivatives_by_rewards_are_powers_of_gamma_and_lambda(
    batch: dict[str, npt.NDArray[np.float64]], data: st.DataObject
) -> None:
    """Finite differences in float64: dA_t / dr_u is (gamma lambda)^(decisions between) for a later u, else 0."""
    steps = np.flatnonzero(batch["loss_mask"])
    if not steps.size:
        return
    later = int(data.draw(st.sampled_from(steps.tolist())))
    moved = {**batch, "rewards": batch["rewards"].copy()}
    moved["rewards"][later] += 1e-3
    slope = (gae(**moved, gamma=0.9, lam=0.5).advantages - gae(**batch, gamma=0.9, lam=0.5).advantages) / 1e-3
    for index in range(batch["loss_mask"].size):
        same = batch["sequence_ids"][index] == batch["sequence_ids"][later]
        reaches = bool(batch["loss_mask"][index]) and same and index <= later
        between = int(batch["loss_mask"][index:later].sum())
        assert slope[index] == pytest.approx(0.45**between if reaches else 0.0, abs=1e-9)


def test_a_perfect_critic_leaves_no_credit() -> None:
    result = gae(
        rewards=[0, 0, 1], values=[0.81, 0.9, 1.0], loss_mask=[1] * 3, sequence_ids=[0] * 3, gamma=0.9, lam=0.95
    )
    assert result.advantages == pytest.approx([0.0, 0.0, 0.0], abs=1e-12)


def test_an_outcome_stands_at_the_last_loss_token_of_its_sequence() -> None:
    hole = np.nan
    rewards = outcome_rewards([hole, 2.0, 2.0, hole, hole, 5.0, hole], [0, 1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1, 1])
    assert rewards.tolist() == [0.0, 0.0, 2.0, 0.0, 0.0, 5.0, 0.0]


def test_nothing_to_train_on_gives_zeros() -> None:
    empty = gae(rewards=[], values=[], loss_mask=[], sequence_ids=[])
    assert empty.advantages.shape == empty.returns.shape == (0,)
    masked = gae(rewards=[np.nan], values=[np.nan], loss_mask=[0], sequence_ids=[0])
    assert masked.advantages.tolist() == masked.returns.tolist() == [0.0]
    assert outcome_rewards([1.0, 1.0], [0, 0], [0, 1]).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"values": [0.1, np.nan, 0.3]}, "values at token 1 are nan"),
        ({"rewards": [np.inf, 0.0, 0.0]}, "rewards at token 0 are inf"),
        ({"values": [0.1, 0.2]}, "one number a token"),
        ({"loss_mask": [1, 1]}, "one of each a token"),
        ({"sequence_ids": [0, 1, 0]}, "do not lie together"),
        ({"gamma": 1.5}, "gamma is 1.5"),
        ({"lam": -0.1}, "lambda is -0.1"),
        ({"gamma": float("nan")}, "gamma is nan"),
    ],
)
def test_input_outside_the_domain_is_refused(change: dict[str, object], sentence: str) -> None:
    batch: dict[str, object] = {
        "rewards": [0.0, 0.0, 1.0],
        "values": [0.1, 0.2, 0.3],
        "loss_mask": [1, 1, 1],
        "sequence_ids": [0, 0, 1],
    }
    with pytest.raises(InputError, match=sentence):
        gae(**{**batch, **change})  # type: ignore[arg-type]
