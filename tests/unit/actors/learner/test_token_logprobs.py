import pytest
import torch

from headrace.actors.learner.token_logprobs import token_logprobs


def test_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    values, _ = token_logprobs(logits, torch.tensor([1]), torch.tensor([0.5]))
    assert values.item() == pytest.approx(-2.142932, abs=1e-6)


@pytest.mark.parametrize("chunk", [1, 7, 1024, None])
def test_full_vocab_logprob_agrees_with_the_plain_one_in_value_and_gradient(chunk: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    plain = torch.randn(19, 53, generator=generator).requires_grad_()
    chunked = plain.detach().clone().requires_grad_()
    ids = torch.randint(0, 53, (19,), generator=generator)
    temperature = torch.rand(19, generator=generator) + 0.5
    weights = torch.randn(2, 19, generator=generator)

    log_p = (plain / temperature[:, None]).log_softmax(-1)
    expected = log_p.gather(-1, ids[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
    (expected[0] * weights[0] + expected[1] * weights[1]).sum().backward()
    values, entropy = token_logprobs(chunked, ids, temperature, chunk_tokens=chunk)
    (values * weights[0] + entropy * weights[1]).sum().backward()

    torch.testing.assert_close(values, expected[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, expected[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(chunked.grad, plain.grad, atol=1e-5, rtol=0)


def test_one_of_the_two_outputs_alone_can_be_differentiated() -> None:
    logits = torch.zeros(2, 4, requires_grad=True)
    values, entropy = token_logprobs(logits, torch.tensor([0, 1]), torch.ones(2))
    values.sum().backward(retain_graph=True)
    assert logits.grad is not None and logits.grad[0].tolist() == [0.75, -0.25, -0.25, -0.25]
    logits.grad = None
    entropy.sum().backward()
    assert logits.grad.abs().max().item() == pytest.approx(0.0, abs=1e-6)  # a uniform distribution is the maximum
