"""Every method: found by name, conforming, light to make, and plain about what it cannot do."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from headrace.actors.learner.algorithms.dapo import Dapo
from headrace.actors.learner.algorithms.dr_grpo import DrGrpo
from headrace.actors.learner.algorithms.ppo import Ppo
from headrace.actors.learner.loss_inputs import TensorLossInputs
from headrace.engine.config import AlgorithmConfig
from headrace.engine.config.algorithm import ImportanceConfig, KlConfig, ShapingConfig
from headrace.engine.errors import ConfigError, InputError
from headrace.engine.interfaces import Algorithm
from headrace.engine.plugins import load_entry_point
from headrace.engine.testing import check_algorithm
from headrace.engine.testing.check_algorithm import make_group
from headrace.engine.testing.check_trainer import make_micro_batch
from headrace.engine.types import AlgorithmTraits, MicroBatch

GROUP_RELATIVE = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo")
BATCH_RELATIVE = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
ON_ROLLOUTS = (*GROUP_RELATIVE, *BATCH_RELATIVE, "ppo", "distillation")
EVERY_METHOD = (*ON_ROLLOUTS, "dpo", "sft")


def make(name: str, **settings: Any) -> Algorithm:
    method: Any = load_entry_point("headrace.algorithms", name)
    return method(AlgorithmConfig(name=name, length_constant=20, **settings))


def with_every_column(micro_batch: MicroBatch) -> MicroBatch:
    mask = micro_batch.loss_mask != 0
    column = np.where(mask, np.float32(-1.5), np.float32("nan"))
    return msgspec.structs.replace(
        micro_batch,
        reference_logprobs=column,
        teacher_logprobs=column,
        values=column,
        group_ids=np.zeros(len(micro_batch.record_ids), np.int32),
    )


def loss_inputs(algorithm: Algorithm, *, kl_coef: float = 0.0) -> Callable[[], TensorLossInputs]:
    micro_batch = with_every_column(make_micro_batch())

    def build() -> TensorLossInputs:
        size = len(micro_batch.token_ids)
        return TensorLossInputs.build(
            micro_batch,
            logprobs=torch.linspace(-2.0, -0.5, size, requires_grad=True),
            entropy=torch.ones(size, requires_grad=True),
            advantages=algorithm.token_advantages(micro_batch),
            num_loss_tokens=10,
            num_sequences=2,
            num_groups=1,
            kl_coef=kl_coef,
        )

    return build


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_every_method_conforms(name: str) -> None:
    algorithm = make(name)
    assert isinstance(algorithm, Algorithm)
    check_algorithm(lambda: make(name), make_loss_inputs=loss_inputs(algorithm))


@pytest.mark.parametrize("name", ON_ROLLOUTS)
def test_every_method_conforms_with_all_its_terms_on(name: str) -> None:
    def factory() -> Algorithm:
        return make(
            name, kl_coef=0.1, entropy_coef=0.01, importance=ImportanceConfig(kind="mask", cap=1.5, reject_above=3.0)
        )

    check_algorithm(factory, make_loss_inputs=loss_inputs(factory(), kl_coef=0.1))


def test_making_a_method_and_assigning_credit_need_no_torch() -> None:
    program = (
        "import sys\n"
        "from headrace.engine.config import AlgorithmConfig\n"
        "from headrace.engine.plugins import load_entry_point\n"
        "from headrace.engine.testing.check_algorithm import make_group\n"
        f"for name in {EVERY_METHOD}:\n"
        "    method = load_entry_point('headrace.algorithms', name)(AlgorithmConfig(length_constant=20))\n"
        "    group = make_group([1.0, 0.0])\n"
        "    method.shape_rewards(group), method.keeps(group), method.assign_credit([group]), method.traits\n"
        "print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == "False"


def test_the_traits_say_what_each_method_needs() -> None:
    grouped = AlgorithmTraits(min_group_size=2, skips_zero_credit=True)
    expected = {
        **dict.fromkeys(GROUP_RELATIVE, grouped),
        "dapo": msgspec.structs.replace(grouped, filters_groups=True),
        "reinforce_plus_plus": AlgorithmTraits(credit_scope="batch", skips_zero_credit=True),
        "reinforce_plus_plus_baseline": msgspec.structs.replace(grouped, credit_scope="batch"),
        "ppo": AlgorithmTraits(columns=("values",)),
        "distillation": AlgorithmTraits(columns=("teacher_logprobs",)),
        "dpo": AlgorithmTraits(
            trains_on="preference_pairs",
            min_group_size=2,
            skips_zero_credit=True,
            whole_groups=True,
            columns=("reference_logprobs",),
        ),
        "sft": AlgorithmTraits(trains_on="demonstrations"),
    }
    assert {name: make(name).traits for name in EVERY_METHOD} == expected


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_a_sample_without_credit_is_needed_where_a_kl_or_entropy_term_pulls_at_it(name: str) -> None:
    assert make(name, kl_coef=0.1).traits.columns == ("reference_logprobs",)
    assert not make(name, kl_coef=0.1).traits.skips_zero_credit
    assert not make(name, entropy_coef=0.1).traits.skips_zero_credit
    assert make(name, entropy_coef=0.1).traits.needs_entropy
    assert not make(name, skip_zero_variance=False).traits.skips_zero_credit


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("grpo", {"kl": KlConfig(place="reward")}, r'kl.place = "reward" is not possible.*set kl.place = "loss"'),
        ("reinforce_plus_plus", {"kl": KlConfig(place="reward")}, "one number a sample"),
        ("rloo", {"kl": KlConfig(estimator="k1")}, 'estimator = "k1" has no effect as a loss'),
        ("grpo", {"kl": KlConfig(target=0.1)}, "kl_coef, which is 0 and stays 0"),
        ("ppo", {"kl_coef": 0.1, "kl": KlConfig(place="reward", target=0.1)}, "set target = 0"),
        ("grpo", {"dual_clip": 1.0}, "set it above 1"),
        ("grpo", {"beta": 0.5}, r'beta = 0.5 has no effect with algorithm.name = "grpo": leave it at 0.1'),
        ("cispo", {"clip_low": 0.1}, "clip_low = 0.1 has no effect"),
        ("gspo", {"clip_high": 0.3}, "clip_high = 0.3 has no effect"),
        ("reinforce_plus_plus", {"normalize_std": False}, "normalize_std = false has no effect"),
        ("dpo", {"importance": ImportanceConfig(cap=3.0)}, "importance.cap = 3 has no effect"),
        ("sft", {"kl_coef": 0.1}, "kl_coef = 0.1 has no effect"),
        ("distillation", {"dynamic_sampling": "on"}, 'dynamic_sampling = "on" has no effect'),
        ("dr_grpo", {"shaping": ShapingConfig(overlong_tokens=5)}, "max_tokens is 0"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_refused(name: str, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make(name, **settings)


def test_demo_settings_are_good_for_every_method_that_learns_from_groups() -> None:
    for name in (*GROUP_RELATIVE, "ppo"):
        make(name, normalize_std=False, clip_low=0.2, clip_high=0.28, dynamic_sampling="off")


def test_a_constant_length_has_to_be_known() -> None:
    for config in (AlgorithmConfig(name="dr_grpo"), AlgorithmConfig(name="grpo", normalization="constant")):
        method: Any = load_entry_point("headrace.algorithms", config.name)
        with pytest.raises(ConfigError, match="length_constant = 0"):
            method(config)
    DrGrpo(AlgorithmConfig(name="dr_grpo", normalization="token"))


def test_a_bad_reward_names_its_group() -> None:
    for name in EVERY_METHOD:
        algorithm, bad = make(name), make_group([1.0, float("nan")], "bad-one")
        for call in (algorithm.shape_rewards, lambda group, of=algorithm: of.assign_credit([make_group([1.0]), group])):
            with pytest.raises(InputError, match="group 'bad-one'"):
                call(bad)


def test_dynamic_filter_raw() -> None:
    """K-039: groups are kept by the raw outcome, and credit comes from the shaped reward."""
    dapo = Dapo(
        AlgorithmConfig(name="dapo", shaping=ShapingConfig(length_penalty="linear", length_coef=1.0, max_tokens=8))
    )
    lengths = (1, 4, 8, 2)
    groups = [
        make_group(rewards, name, lengths=lengths)
        for name, rewards in (("g1", [0, 0, 0, 0]), ("g2", [1, 1, 0, 1]), ("g3", [1, 1, 1, 1]))
    ]
    assert [dapo.keeps(group) for group in groups] == [False, True, False]
    shaped = dapo.shape_rewards(groups[1])
    assert shaped.tolist() == [0.875, 0.5, -1.0, 0.75]
    assert groups[1].rewards.tolist() == [1, 1, 0, 1]
    (credit,) = dapo.assign_credit([make_group(shaped.tolist(), lengths=lengths)])
    assert credit.tolist() == pytest.approx(((shaped - shaped.mean()) / shaped.std(ddof=1)).tolist(), abs=1e-6)


def test_dynamic_sampling_can_be_turned_on_for_grpo_and_off_for_dapo() -> None:
    flat = make_group([1.0, 1.0])
    assert make("grpo").keeps(flat)
    assert not make("grpo", dynamic_sampling="on").keeps(flat)
    assert make("dapo", dynamic_sampling="off").keeps(flat)
    assert make("ppo", dynamic_sampling="on").traits.min_group_size == 2


def test_drgrpo_constant() -> None:
    """K-031: credit is centred and not divided, and the loss is divided by a constant length and the responses."""
    dr_grpo = DrGrpo(AlgorithmConfig(name="dr_grpo", length_constant=10))
    (credit,) = dr_grpo.assign_credit([make_group([1, 0, 0, 0])])
    assert credit.tolist() == [0.75, -0.25, -0.25, -0.25]
    mask = torch.tensor([True] * 8)
    inputs = TensorLossInputs(
        logprobs=torch.full((8,), -1.0, requires_grad=True),
        entropy=None,
        proximal_logprobs=torch.full((8,), -1.0),
        behaviour_logprobs=torch.full((8,), -1.0),
        reference_logprobs=None,
        teacher_logprobs=None,
        advantages=torch.full((8,), -1.0),
        loss_mask=mask,
        sequence_ids=torch.tensor([0, 0, 1, 1, 1, 1, 1, 1]),
        group_ids=None,
        kl_coef=0.0,
        num_loss_tokens=8,
        num_sequences=2,
        num_groups=1,
    )
    output: Any = dr_grpo.loss(inputs)
    assert output.loss.item() == pytest.approx(0.4)
    assert output.denominator == 20.0


def test_kl_once() -> None:
    """K-085: the KL enters the reward or the loss of ppo, never both, and drifting away lowers the reward."""
    logprobs, reference = np.float32([0, -1, -1]), np.float32([0, -1.5, -1.5])
    micro_batch = MicroBatch(
        token_ids=np.array([1, 2, 3], np.int32),
        position_ids=np.arange(3, dtype=np.int32),
        sequence_ids=np.zeros(3, np.int32),
        loss_mask=np.array([0, 1, 1], np.uint8),
        behaviour_logprobs=logprobs,
        advantages=np.float32([0, 1, 1]),
        temperature=np.ones(1, np.float32),
        record_ids=("a",),
        lags=np.zeros(1, np.int32),
        reference_logprobs=reference,
        values=np.zeros(3, np.float32),
    )
    returns, losses = {}, {}
    for place in ("reward", "loss"):
        ppo = Ppo(AlgorithmConfig(name="ppo", kl_coef=0.1, kl=KlConfig(place=place)))
        returns[place] = ppo.estimate(micro_batch).returns
        leaf = torch.from_numpy(logprobs.copy()).requires_grad_(True)
        inputs = TensorLossInputs.build(
            micro_batch,
            logprobs=leaf,
            entropy=None,
            advantages=np.zeros(3, np.float32),
            num_loss_tokens=2,
            num_sequences=1,
            num_groups=1,
            kl_coef=0.1,
        )
        output: Any = ppo.loss(inputs)
        losses[place] = output.loss.item()
    # Values of 0 and lambda 0.95: the last return is its reward, the first 0.95 of that and its own.
    assert returns["reward"].tolist() == pytest.approx([0.0, -0.05 + 0.95 * 0.95, 0.95], abs=1e-6)
    assert returns["loss"].tolist() == pytest.approx([0.0, 0.95, 1.0], abs=1e-6)
    assert losses["reward"] == 0.0
    assert losses["loss"] == pytest.approx(0.1 * (np.exp(-0.5) + 0.5 - 1), abs=1e-6)


def test_a_pair_has_a_best_and_a_worst() -> None:
    credit = make("dpo").assign_credit([make_group([0.2, 0.9]), make_group([3.0, 1.0, 2.0]), make_group([1.0, 1.0])])
    assert [values.tolist() for values in credit] == [[-1.0, 1.0], [1.0, -1.0, 0.0], [0.0, 0.0]]


def test_a_single_member_has_no_credit_unless_the_whole_step_is_its_group() -> None:
    for name in GROUP_RELATIVE:
        assert make(name).assign_credit([make_group([0.7])])[0].tolist() == [0.0]
    lonely = [make_group([1.0]), make_group([0.0])]
    assert [v.tolist() for v in make("reinforce_plus_plus").assign_credit(lonely)] == [[1.0], [-1.0]]
    assert [v.tolist() for v in make("reinforce_plus_plus_baseline").assign_credit(lonely)] == [[0.0], [0.0]]
