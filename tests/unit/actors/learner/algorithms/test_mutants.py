"""The learning tests fail when a line of a method is wrong: each mutant is a copy of the sources with one line changed.

A mutant names a line of today's sources; where such a line was rewritten, the mutant has to be written anew.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[5]
LEARNING = Path(__file__).with_name("test_learning.py").relative_to(ROOT)


class Mutant(NamedTuple):
    """One wrong line: what kind of mistake it is, the file below actors/learner, the right text and the wrong one."""

    mistake: str
    file: str
    right: str
    wrong: str


GROUP_SIGN = Mutant(
    "sign: good answers are punished",
    "advantages/group_relative.py",
    "    return as_credit(centred)",
    "    return as_credit(-centred)",
)
NO_GROUP_BASELINE = Mutant(
    "baseline: rewards are not centred",
    "advantages/group_relative.py",
    "    centred -= centred.mean()",
    "    centred -= 0.0",
)
MASK_FORGOTTEN = Mutant(
    "mask: prompt tokens take part",
    "losses/masking.py",
    "    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))",
    "    return values",
)
REJECTED_TAKE_PART = Mutant(
    "mask: rejected tokens take part", "losses/policy.py", "        kept=importance.kept,", "        kept=None,"
)
REJECTED_TOKENS_COUNT = Mutant(
    "denominator: rejected tokens stay in it",
    "losses/normalization.py",
    "        rejected = (mask & ~taking).sum()",
    "        rejected = (mask & ~mask).sum()",
)
OWN_COUNT = Mutant(
    "denominator: a micro-batch divides by its own tokens",
    "losses/normalization.py",
    "where_loss(taking, values).sum(), num_loss_tokens",
    "where_loss(taking, values).sum(), int(mask.sum())",
)
NO_IMPORTANCE = Mutant(
    "importance: stale samples count as fresh",
    "losses/policy.py",
    "    weighted = importance.weight * surrogate",
    "    weighted = surrogate",
)
KL_SIGN = Mutant(
    "sign: the KL term pushes away from the reference",
    "losses/policy.py",
    "    return inputs.kl_coef * kl_loss(",
    "    return -inputs.kl_coef * kl_loss(",
)
KL_HALVES = Mutant(
    "KL: k3 without its linear part", "losses/kl.py", "torch.expm1(bounded) - bounded", "torch.expm1(bounded)"
)

MUTANTS: dict[str, tuple[Mutant, ...]] = {
    "grpo": (
        GROUP_SIGN,
        NO_GROUP_BASELINE,
        MASK_FORGOTTEN,
        KL_SIGN,
        Mutant(
            "baseline: the population's deviation", "advantages/group_relative.py", "(values.size - 1))", "values.size)"
        ),
        Mutant(
            "denominator: sequences are summed, not averaged",
            "losses/normalization.py",
            "total = (sequence_totals(values, taking, sequence_ids) / counts.clamp(min=1.0)).sum()",
            "total = sequence_totals(values, taking, sequence_ids).sum()",
        ),
    ),
    "dr_grpo": (
        GROUP_SIGN,
        NO_GROUP_BASELINE,
        REJECTED_TAKE_PART,
        Mutant(
            "baseline: divided by the deviation", "algorithms/dr_grpo.py", "normalize_std=False", "normalize_std=True"
        ),
        Mutant("denominator: the mean over tokens", "algorithms/dr_grpo.py", 'unit = "constant"', 'unit = "token"'),
        Mutant(
            "denominator: rejected responses leave it without their length",
            "losses/normalization.py",
            "rejected = normalization.length * lost_sequences",
            "rejected = lost_sequences",
        ),
    ),
    "dapo": (
        GROUP_SIGN,
        NO_GROUP_BASELINE,
        REJECTED_TOKENS_COUNT,
        OWN_COUNT,
        Mutant("filter: off", "algorithms/dapo.py", "replaces_groups = True", "replaces_groups = False"),
        Mutant(
            "filter: keeps what teaches nothing",
            "advantages/dynamic_sampling.py",
            "return not is_zero_variance",
            "return is_zero_variance",
        ),
    ),
    "gspo": (
        GROUP_SIGN,
        MASK_FORGOTTEN,
        NO_IMPORTANCE,
        Mutant(
            "detach: the mean ratio has a gradient of its own",
            "losses/gspo.py",
            "sequence_mean(log_ratio.detach(), mask, sequence_ids)",
            "sequence_mean(log_ratio, mask, sequence_ids)",
        ),
        Mutant(
            "sign: of the token's own gradient",
            "losses/gspo.py",
            "mean + (logprobs - logprobs.detach())",
            "mean - (logprobs - logprobs.detach())",
        ),
        Mutant("denominator: the mean over tokens", "algorithms/gspo.py", 'unit = "sequence"', 'unit = "token"'),
        Mutant("importance: a weight of tokens", "algorithms/gspo.py", 'else "sequence"', 'else "token"'),
    ),
    "cispo": (
        NO_GROUP_BASELINE,
        REJECTED_TAKE_PART,
        REJECTED_TOKENS_COUNT,
        Mutant("sign", "losses/cispo.py", "return -weight * advantages", "return weight * advantages"),
        Mutant(
            "detach: the weight has a gradient",
            "losses/cispo.py",
            "bounded_exp(log_ratio.detach())",
            "bounded_exp(log_ratio)",
        ),
    ),
    "rloo": (
        OWN_COUNT,
        NO_IMPORTANCE,
        Mutant("sign", "algorithms/rloo.py", "return rloo_advantages", "return -rloo_advantages"),
        Mutant("baseline: none", "advantages/rloo.py", "(scaled - scaled.mean())", "(scaled - 0.0)"),
        Mutant(
            "baseline: the sample itself is in it",
            "advantages/rloo.py",
            "(values.size / (values.size - 1))",
            "(values.size / values.size)",
        ),
        Mutant(
            "importance: a mean instead of the product",
            "losses/ratios.py",
            "values = sequence_sum(values, mask, sequence_ids)",
            "values = sequence_mean(values, mask, sequence_ids)",
        ),
    ),
    "reinforce_plus_plus": (
        OWN_COUNT,
        KL_HALVES,
        Mutant("sign", "advantages/moments.py", "(numbers - moments.mean) /", "(moments.mean - numbers) /"),
        Mutant("baseline: none", "advantages/moments.py", "(numbers - moments.mean) /", "(numbers - 0.0) /"),
        Mutant(
            "baseline: of each group instead of the step",
            "algorithms/reinforce_plus_plus.py",
            'credit_scope = "batch"',
            'credit_scope = "group"',
        ),
        Mutant("baseline: the group's as well", "algorithms/reinforce_plus_plus.py", "= False", "= True"),
    ),
    "reinforce_plus_plus_baseline": (
        REJECTED_TOKENS_COUNT,
        MASK_FORGOTTEN,
        Mutant("sign", "advantages/moments.py", "(numbers - moments.mean) /", "(moments.mean - numbers) /"),
        Mutant("baseline: the step's only", "algorithms/reinforce_plus_plus.py", "group_baseline = True", "pass"),
        Mutant("baseline: the sample deviation", "advantages/moments.py", "/ self.weight)", "/ (self.weight - 1))"),
    ),
    "ppo": (
        Mutant("sign: of the critic", "advantages/gae.py", "following, 0.0) - value", "following, 0.0) + value"),
        Mutant("baseline: no critic", "advantages/gae.py", "following, 0.0) - value", "following, 0.0)"),
        Mutant(
            "mask: credit runs on into the next response",
            "advantages/gae.py",
            "(factor * total if more else 0.0)",
            "(factor * total)",
        ),
        Mutant("baseline: lambda is lost", "advantages/gae.py", "gamma * lam)", "gamma)"),
        Mutant(
            "sign: drifting away is rewarded",
            "advantages/kl_reward.py",
            "= -kl_coef * distance",
            "= kl_coef * distance",
        ),
        Mutant(
            "reward: on the first token",
            "advantages/gae.py",
            "is_last = np.append(sequences[1:] != sequences[:-1], True)",
            "is_last = np.append(True, sequences[1:] != sequences[:-1])",
        ),
        NO_IMPORTANCE,
    ),
    "dpo": (
        Mutant(
            "sign: the rejected answer is preferred",
            "losses/preference.py",
            "rewards[chosen] - rewards[rejected]",
            "rewards[rejected] - rewards[chosen]",
        ),
        Mutant(
            "sign: of the sigmoid",
            "losses/preference.py",
            "-functional.logsigmoid(margin)",
            "-functional.logsigmoid(-margin)",
        ),
        Mutant(
            "baseline: no reference",
            "losses/preference.py",
            "where_loss(mask, inputs.logprobs) - where_loss(mask, reference.detach())",
            "where_loss(mask, inputs.logprobs)",
        ),
        Mutant(
            "mask: prompt tokens take part",
            "losses/masking.py",
            "index_add(0, sequence_ids, where_loss(mask, values))",
            "index_add(0, sequence_ids, values + torch.where(mask, 0.0, float('nan')))",
        ),
        Mutant(
            "denominator: answers instead of pairs",
            "losses/preference.py",
            "float(max(1, inputs.num_groups))",
            "float(max(1, inputs.num_sequences))",
        ),
    ),
    "distillation": (
        REJECTED_TOKENS_COUNT,
        NO_IMPORTANCE,
        Mutant(
            "sign: away from the teacher",
            "losses/distillation.py",
            "gap = where_loss(mask, teacher.detach()) - where_loss(mask, logprobs.detach())",
            "gap = where_loss(mask, logprobs.detach()) - where_loss(mask, teacher.detach())",
        ),
        Mutant(
            "baseline: the teacher without the student",
            "losses/distillation.py",
            "gap = where_loss(mask, teacher.detach()) - where_loss(mask, logprobs.detach())",
            "gap = where_loss(mask, teacher.detach())",
        ),
        Mutant(
            "mask: the teacher's junk on prompt tokens",
            "losses/distillation.py",
            "gap = where_loss(mask, teacher.detach()) - where_loss(mask, logprobs.detach())",
            "gap = teacher.detach() - logprobs.detach() + teacher.sum()",
        ),
    ),
    "sft": (
        MASK_FORGOTTEN,
        OWN_COUNT,
        Mutant("sign", "losses/supervised.py", "nll = -where_loss(", "nll = where_loss("),
        Mutant(
            "denominator: demonstrations",
            "losses/supervised.py",
            "num_loss_tokens=inputs.num_loss_tokens",
            "num_loss_tokens=inputs.num_sequences",
        ),
        Mutant(
            "detach",
            "losses/supervised.py",
            "where_loss(mask, inputs.logprobs)",
            "where_loss(mask, inputs.logprobs.detach())",
        ),
    ),
}


# Torch is imported once; each mutant is a fork of that process, which imports the package afresh.
RUNNER = """
import json, os, sys, msgspec, numpy, pytest, torch
torch.set_num_threads(1)
folder, log, tests, mutants = json.loads(sys.argv[1])
sys.dont_write_bytecode = True
sys.path.insert(0, folder)
codes = []
for path, right, wrong in mutants:
    source = open(path).read()
    open(path, "w").write(source.replace(right, wrong))
    child = os.fork()
    if child == 0:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1), os.dup2(file, 2)
        os._exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", *tests]))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    open(path, "w").write(source)
print(json.dumps(codes))
"""


def run_mutants(method: str, package: Path, log: Path, mutants: Sequence[Mutant]) -> list[int]:
    """pytest's exit codes of one method's learning tests, with each mutant in turn as headrace."""
    kinds = ("a_step_is_what_the_paper_says", "neither_lengths_nor_order_nor_the_cut_into_micro_batches_change_a_step")
    tests = [f"{LEARNING}::test_{kind}[{method}]" for kind in (*kinds, "a_method_learns_the_bandit")]
    changes = [(str(package / "actors" / "learner" / file), right, wrong) for _, file, right, wrong in mutants]
    task = json.dumps((str(package.parent), str(log), tests, changes))
    command = [sys.executable, "-c", RUNNER, task]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=280)
    codes: list[int] = json.loads(done.stdout.splitlines()[-1])
    return codes


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package with its own copy of the learner's sources; all else is linked."""
    copy = tmp_path / "headrace"
    (copy / "actors").mkdir(parents=True)
    source = ROOT / "src" / "headrace"
    for path in source.iterdir():
        if path.name not in ("actors", "__pycache__"):
            (copy / path.name).symlink_to(path.resolve())
    for path in (source / "actors").iterdir():
        if path.name not in ("learner", "__pycache__"):
            (copy / "actors" / path.name).symlink_to(path.resolve())
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree((source / "actors" / "learner").resolve(), copy / "actors" / "learner", ignore=ignored)
    return copy


UNTOUCHED = Mutant("none", "losses/__init__.py", "", "")


@pytest.mark.full
@pytest.mark.parametrize("method", MUTANTS)
def test_every_mutant_is_found(method: str, package: Path, tmp_path: Path) -> None:
    mutants = MUTANTS[method]
    for _, file, right, _ in mutants:
        count = (package / "actors" / "learner" / file).read_text().count(right)
        assert count == 1, f"{file} has {right!r} {count} times: write the mutant anew"
    untouched, *codes = run_mutants(method, package, tmp_path / "log", [UNTOUCHED, *mutants])
    assert untouched == 0, (tmp_path / "log").read_text()
    for mutant, code in zip(mutants, codes, strict=True):
        print(f"{method:30} {mutant.mistake:60} {'found' if code == 1 else f'SURVIVED ({code})'}")
    # 1: a test failed. Anything else would be a broken copy, not a mutant that was found.
    assert [mutant.mistake for mutant, code in zip(mutants, codes, strict=True) if code != 1] == []


def test_every_method_has_mutants_of_sign_and_of_mask_or_baseline() -> None:
    for method, mutants in MUTANTS.items():
        kinds = {mutant.mistake.partition(":")[0] for mutant in mutants}
        assert len(mutants) >= 3, method
        assert "sign" in kinds, method
        assert kinds & {"mask", "baseline"}, method
        assert kinds & {"denominator", "detach", "importance", "KL", "reward"}, method
