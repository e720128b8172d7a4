from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.actors.learner.forward import PackedForward
from headrace.actors.learner.layout import LayoutMode
from headrace.actors.learner.packing import build_micro_batch
from headrace.actors.learner.scored_head import LogitEnding
from headrace.actors.models import load_causal_lm
from headrace.actors.tiny import TinyKind, build_tiny_model
from headrace.engine.types import MicroBatch, Trajectory

MakeRecord = Callable[..., Trajectory]
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["llama", "qwen2", "gpt2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    kind: TinyKind = request.param
    return load_causal_lm(build_tiny_model(tmp_path_factory.mktemp(kind), kind))


@pytest.fixture
def packed(make_record: MakeRecord) -> MicroBatch:
    """Two prompts of different lengths, shared and not, one masked tail, one sequence of only masked tokens."""
    rng = np.random.default_rng(0)
    long, short = rng.integers(0, 256, 20).tolist(), rng.integers(0, 256, 3).tolist()
    records = [make_record(long, rng.integers(0, 256, n).tolist(), temperature=0.6) for n in (5, 1, 9, 4)]
    records += [make_record(short, rng.integers(0, 256, n).tolist()) for n in (2, 7)]
    records.append(make_record([8], [5, 6, 7, 2], mask=[1, 0, 1, 0], temperature=1.7))
    records.append(make_record([9], [1, 2], mask=[0, 0]))
    return build_micro_batch(records, [1.0] * len(records), step=0)


def separately(model: torch.nn.Module, packed: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence alone through the plain model: log-probabilities and entropies [N]."""
    logprobs, entropies = [], []
    for sequence in range(int(packed.sequence_ids.max()) + 1):
        tokens = torch.from_numpy(packed.token_ids[packed.sequence_ids == sequence].astype(np.int64))
        mask = torch.from_numpy(packed.loss_mask[packed.sequence_ids == sequence] != 0)
        logits = model(input_ids=tokens[None], use_cache=False).logits[0].float() / packed.temperature[sequence]
        log_p = logits.log_softmax(-1)[:-1]
        scores = log_p.gather(-1, tokens[1:, None]).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        for collected, values in ((logprobs, scores), (entropies, entropy)):
            collected.append(torch.where(mask, torch.cat([values.new_zeros(1), values]), 0.0))
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("mode", ["auto", "plain"])
def test_packed_scores_and_gradients_equal_those_of_separate_passes(
    model: torch.nn.Module, packed: MicroBatch, mode: LayoutMode
) -> None:
    model.zero_grad()
    expected = separately(model, packed)
    (expected[0].sum() + expected[1].sum()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    forward = PackedForward(model, CPU)
    forward.mode = mode
    assert forward.head.ending == LogitEnding()
    result = forward(packed)
    (result.logprobs.sum() + result.entropy.sum()).backward()
    forward.close()
    torch.testing.assert_close(result.logprobs, expected[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(result.entropy, expected[1], atol=2e-5, rtol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=2e-3, rtol=1e-3)
    assert result.num_computed < packed.token_ids.size or mode == "plain"


def test_left_padding_and_companions_change_no_score(model: torch.nn.Module, make_record: MakeRecord) -> None:
    # A sequence scored alone, behind others, and in front of others: absolute positions start anew each time.
    mine, other = make_record([11], [12, 13]), make_record([20] * 9, [21] * 5)
    forward = PackedForward(model, CPU)
    alone = forward(build_micro_batch([mine], [1.0], step=0)).logprobs
    for records, start in (([other, mine], 14), ([mine, other], 0), ([other, mine, other], 14)):
        together = forward(build_micro_batch(records, [1.0] * len(records), step=0)).logprobs
        torch.testing.assert_close(together[start : start + 3], alone, atol=1e-5, rtol=0)
    forward.close()


def test_isolation_is_verified_with_a_shared_prompt(model: torch.nn.Module) -> None:
    forward = PackedForward(model, CPU)
    assert forward.verify_isolation()
    forward.close()


def test_a_model_that_ignores_the_mask_is_found_out_and_run_one_sequence_a_row(tmp_path: Path) -> None:
    deaf = load_causal_lm(build_tiny_model(tmp_path, "llama"))
    original = deaf.forward
    deaf.forward = lambda **given: original(**{**given, "attention_mask": None})
    forward = PackedForward(deaf, CPU)
    assert not forward.verify_isolation()
    assert forward.mode == "plain"


def test_all_masked_runs_the_model_and_gives_a_connected_zero(model: torch.nn.Module, make_record: MakeRecord) -> None:
    model.zero_grad()
    forward = PackedForward(model, CPU)
    result = forward(build_micro_batch([], [], step=0))
    result.logprobs.sum().backward()
    forward.close()
    assert result.logprobs.tolist() == [0.0]
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_full_vocab_logprob_no_tensor_of_tokens_by_words_is_kept(model: torch.nn.Module, packed: MicroBatch) -> None:
    forward = PackedForward(model, CPU)
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    shapes: list[torch.Size] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward(packed)
    forward.close()
    assert result.logprobs.requires_grad and shapes
    assert not [shape for shape in shapes if shape[-1:] == (320,)]
