import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace.actors.learner.linear_logprobs import linear_logprobs
from headrace.engine.errors import InputError

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Scores = tuple[torch.Tensor, torch.Tensor]

K, H, V = 19, 6, 53
IDS = torch.randint(0, V, (K,), generator=torch.Generator().manual_seed(3))
RAGGED = torch.rand(K, generator=torch.Generator().manual_seed(4)) * 2 + 0.3


def inputs(dtype: torch.dtype = torch.float64) -> Tensors:
    """Hidden states, weight and bias, all wanting gradients."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((K, H), (V, H), (V,))
    hidden, weight, bias = (torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    return hidden, weight, bias


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, softcap: float | None = None
) -> Scores:
    """The textbook form, in float64."""
    logits = torch.nn.functional.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits / RAGGED[:, None].double()).log_softmax(-1)
    return log_p.gather(-1, IDS[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def gradients(scores: Scores, of: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    weights = torch.randn(2, K, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    return torch.autograd.grad((scores[0] * weights[0] + scores[1] * weights[1]).sum(), of)


def test_temperature_divides_the_logits() -> None:
    identity = torch.eye(3)
    values, _ = linear_logprobs(
        torch.tensor([[2.0, 1.0, 0.0]]), identity, torch.tensor([1]), torch.tensor([0.5]), chunk_vocab=2
    )
    assert values.item() == pytest.approx(-2.142932, abs=1e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("tokens", "words"), [(1, 7), (7, 1), (7, 10), (19, 53), (1024, 1024), (None, None)])
def test_full_vocab_logprob_agrees_with_the_plain_one_in_value_and_gradient(
    tokens: int | None, words: int | None, with_bias: bool, softcap: float | None
) -> None:
    hidden, weight, bias = inputs(torch.float32)
    given = (hidden, weight, bias) if with_bias else (hidden, weight)
    expected = plain(*given, softcap=softcap)
    actual = linear_logprobs(
        hidden,
        weight,
        IDS,
        RAGGED,
        bias=bias if with_bias else None,
        softcap=softcap,
        chunk_tokens=tokens,
        chunk_vocab=words,
    )
    for value, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(value.double(), reference, atol=1e-5, rtol=0)
    pairs = zip(gradients(actual, given), gradients(expected, given), strict=True)
    for gradient, reference in pairs:
        torch.testing.assert_close(gradient, reference, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("output", [0, 1])
def test_gradients_are_those_of_finite_differences(output: int, softcap: float | None) -> None:
    def one(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        scores = linear_logprobs(
            hidden, weight, IDS[:5] % 11, RAGGED[:5], bias=bias, softcap=softcap, chunk_tokens=2, chunk_vocab=4
        )
        return scores[output]

    hidden, weight, bias = (tensor.detach() for tensor in inputs())
    small = [part.clone().requires_grad_() for part in (hidden[:5], weight[:11], bias[:11])]
    assert torch.autograd.gradcheck(one, small)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)]
)
def test_each_dtype_is_summed_in_float32_or_better_and_its_gradients_have_the_dtype(
    dtype: torch.dtype, tolerance: float
) -> None:
    given = inputs(dtype)
    hidden, weight, bias = given
    expected = plain(*given)
    actual = linear_logprobs(hidden, weight, IDS, RAGGED, bias=bias, chunk_tokens=4, chunk_vocab=9)
    for value, reference in zip(actual, expected, strict=True):
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(value.double(), reference, atol=min(tolerance, 1e-5), rtol=0)  # inputs are exact
    for gradient, reference in zip(gradients(actual, given), gradients(expected, given), strict=True):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), reference.double(), atol=tolerance, rtol=tolerance)


def test_sixteen_bit_gradients_are_not_rounded_once_a_chunk() -> None:
    # One token after another: sums kept in bfloat16 would lose what each new token adds.
    given = inputs(torch.bfloat16)
    whole, single = (
        gradients(linear_logprobs(*given[:2], IDS, RAGGED, chunk_tokens=tokens, chunk_vocab=9), given[:2])
        for tokens in (K, 1)
    )
    for one, other in zip(whole, single, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1 / 128)  # one last bit of bfloat16


@pytest.mark.parametrize("output", [0, 1])
def test_either_output_alone_can_be_differentiated(output: int) -> None:
    hidden, weight, _ = inputs()
    expected = torch.autograd.grad(plain(hidden, weight)[output].sum(), (hidden, weight))
    score = linear_logprobs(hidden, weight, IDS, RAGGED, chunk_vocab=10)[output]
    for gradient, reference in zip(torch.autograd.grad(score.sum(), (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(gradient, reference)


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_only_the_wanted_gradients_are_made(wanted: int) -> None:
    given = [tensor.detach().requires_grad_(index == wanted) for index, tensor in enumerate(inputs())]
    linear_logprobs(given[0], given[1], IDS, RAGGED, bias=given[2], chunk_vocab=10)[0].sum().backward()
    assert [tensor.grad is not None for tensor in given] == [index == wanted for index in range(3)]
    expected = [tensor.detach().requires_grad_(index == wanted) for index, tensor in enumerate(inputs())]
    plain(*expected)[0].sum().backward()
    torch.testing.assert_close(given[wanted].grad, expected[wanted].grad)


def test_without_gradients_the_scores_stand_alone() -> None:
    hidden, weight, _ = (tensor.detach() for tensor in inputs())
    assert not linear_logprobs(hidden, weight, IDS, RAGGED)[0].requires_grad


def test_no_tokens_give_no_scores_and_gradients_of_zero() -> None:
    hidden = torch.zeros(0, H, requires_grad=True)
    weight = torch.ones(V, H, requires_grad=True)
    values, entropies = linear_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    (values.sum() + entropies.sum()).backward()
    assert values.shape == entropies.shape == (0,)
    assert hidden.grad is not None and hidden.grad.shape == (0, H)
    assert weight.grad is not None and not weight.grad.any()


def test_huge_logits_neither_overflow_nor_lose_the_gradient() -> None:
    # One word is certain in the last block; before it every block's maximum is overtaken.
    hidden = torch.tensor([[1e4]], requires_grad=True)
    weight = torch.linspace(-1, 1, 9)[:, None].requires_grad_()
    values, entropies = linear_logprobs(hidden, weight, torch.tensor([8]), torch.ones(1), chunk_vocab=2)
    (values.sum() + entropies.sum()).backward()
    assert values.item() == entropies.item() == 0.0
    assert hidden.grad is not None and hidden.grad.item() == 0.0


def test_a_hidden_state_that_is_not_finite_spoils_its_own_score_only() -> None:
    hidden, weight, _ = (tensor.detach() for tensor in inputs())
    hidden[2, 0] = torch.nan
    values, _ = linear_logprobs(hidden, weight, IDS, RAGGED, chunk_tokens=5, chunk_vocab=10)
    assert values.isnan().nonzero().tolist() == [[2]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"weight": torch.zeros(V, H + 1)}, "shapes"),
        ({"temperature": torch.ones(K + 1)}, "shapes"),
        ({"bias": torch.zeros(V - 1)}, "shapes"),
        ({"weight": torch.zeros(V, H, dtype=torch.bfloat16)}, "dtype"),
        ({"token_ids": IDS.int()}, "dtype"),
        ({"token_ids": torch.full((K,), V)}, "vocabulary"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"chunk_vocab": 0}, "chunk_vocab"),
        ({"softcap": 0.0}, "soft-cap"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], said: str) -> None:
    call: Callable[..., object] = linear_logprobs
    given = {"hidden": torch.zeros(K, H), "weight": torch.zeros(V, H), "token_ids": IDS, "temperature": RAGGED}
    with pytest.raises(InputError, match=said):
        call(**{**given, **change})


# K-082: memory, measured in a process of its own.


def extra_bytes(num_tokens: int, num_words: int, *, chunk_tokens: int, dtype: str) -> tuple[int, int]:
    """Peak of memory over inputs and one set of gradients: after the forward pass, and after the backward pass."""
    sizes = [str(num_tokens), str(num_words), str(chunk_tokens), dtype]
    child = subprocess.run([sys.executable, __file__, *sizes], capture_output=True, text=True, check=True, timeout=250)
    forward, backward = json.loads(child.stdout)
    return forward, backward


def test_full_vocab_logprob_memory_of_both_passes_is_a_tenth_of_one_copy_of_the_logits() -> None:
    one_copy = 2048 * 50000 * 4
    assert max(extra_bytes(2048, 50000, chunk_tokens=1024, dtype="bfloat16")) < one_copy // 10


@pytest.mark.full
@pytest.mark.parametrize("chunk_tokens", [7, 1024])
def test_full_vocab_logprob_memory_at_full_size(chunk_tokens: int) -> None:
    assert max(extra_bytes(4 * 2048, 50000, chunk_tokens=chunk_tokens, dtype="bfloat16")) < 1638400000 // 10


def peak_bytes() -> int:
    # Not ru_maxrss, which a spawned process takes over from its parent.
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def main(num_tokens: int, num_words: int, chunk_tokens: int, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    weight = torch.full((num_words, 16), 0.1, dtype=dtype, requires_grad=True)
    hidden = torch.full((num_tokens, 16), 0.1, dtype=dtype, requires_grad=True)
    ids, temperature = torch.zeros(num_tokens, dtype=torch.int64), torch.ones(num_tokens)

    def score(rows: slice) -> torch.Tensor:
        logprobs, entropies = linear_logprobs(
            hidden[rows], weight, ids[rows], temperature[rows], chunk_tokens=chunk_tokens
        )
        return (logprobs + entropies).sum()

    score(slice(0, 8)).backward()  # libraries and threads are loaded, and both gradients are there
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    total = score(slice(None))
    forward = peak_bytes()
    total.backward()
    print(json.dumps([forward - before, peak_bytes() - before]))


if __name__ == "__main__":
    main(*(int(size) for size in sys.argv[1:4]), dtype=getattr(torch, sys.argv[4]))
