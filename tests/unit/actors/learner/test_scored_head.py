import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headrace.actors.learner.scored_head import LogitEnding, ScoredHead
from headrace.actors.learner.token_logprobs import token_logprobs

VOCAB = 80
TOKENS = torch.tensor([[5, 7, 11, 13, 17, 19]])
IDS = torch.tensor([7, 11, 13, 17, 19, 23])
TEMPERATURE = torch.tensor([0.6, 1.0, 1.7, 1.0, 0.8, 1.0])


def build(kind: str, *, spread: float = 1.0, **options: Any) -> Any:
    """A tiny random model of a family; its head is drawn with a spread that makes its logits differ much."""
    from transformers import AutoConfig

    shared = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    shared |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **shared, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config).eval()
        head = model.get_output_embeddings()
        torch.nn.init.normal_(head.weight, std=spread)
        if head.bias is not None:
            torch.nn.init.normal_(head.bias, std=spread)
    return model


def run(model: Any) -> Callable[[], Any]:
    return lambda: model(input_ids=TOKENS, use_cache=False)


def gradients(model: Any, scores: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
    weights = torch.linspace(-1, 1, len(IDS))
    model.zero_grad()
    (scores[0] * weights + scores[1] * weights.flip(0)).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(
    ("kind", "options", "ending"),
    [
        ("llama", {}, LogitEnding()),
        ("llama", {"tie_word_embeddings": True}, LogitEnding()),
        ("phi", {}, LogitEnding()),  # its head has a bias
        ("gemma2", {"final_logit_softcapping": 5.0}, LogitEnding(softcap=5.0)),
        ("gemma2", {"final_logit_softcapping": None}, LogitEnding()),
        ("cohere", {"logit_scale": 0.0625}, LogitEnding(scale=0.0625)),
        ("granite", {"logits_scaling": 8.0}, LogitEnding(scale=0.125)),  # divides
        ("hyperclovax", {"logits_scaling": 0.5}, LogitEnding(scale=0.5)),  # multiplies, under the same name
    ],
)
def test_scores_and_gradients_are_those_of_the_models_own_logits(
    kind: str, options: dict[str, Any], ending: LogitEnding
) -> None:
    model = build(kind, **options)
    expected = token_logprobs(run(model)().logits[0], IDS, TEMPERATURE)
    of_logits = gradients(model, expected)
    head = ScoredHead(model)
    assert head.ending == ending
    scores = head.score(run(model), IDS, TEMPERATURE)
    torch.testing.assert_close(scores, expected, atol=3e-5, rtol=1e-5)
    of_scores = gradients(model, scores)
    assert of_scores.keys() == of_logits.keys()
    for name, gradient in of_scores.items():
        torch.testing.assert_close(gradient, of_logits[name], atol=1e-3, rtol=1e-3)
    head.close()


def test_between_scored_passes_the_model_makes_logits_as_ever() -> None:
    model = build("llama")
    before = run(model)().logits
    head = ScoredHead(model)
    head.score(run(model), IDS, TEMPERATURE)
    assert torch.equal(run(model)().logits, before)
    head.close()
    head.close()
    assert not model._forward_hooks


def test_a_pass_that_fails_leaves_the_model_as_it_was() -> None:
    model = build("llama")
    before = run(model)().logits
    head = ScoredHead(model)
    with pytest.raises(IndexError):
        head.score(lambda: model(input_ids=TOKENS + VOCAB), IDS, TEMPERATURE)
    assert torch.equal(run(model)().logits, before)


def change_logits_unnamed(model: Any) -> None:
    original = model.forward

    def shifted(**given: Any) -> Any:
        output = original(**given)
        output.logits = output.logits + torch.linspace(0, 1, output.logits.shape[-1])
        return output

    model.forward = shifted


def demand_a_word(model: Any) -> None:
    original = model.forward

    def forward(**given: Any) -> Any:
        output = original(**given)
        _ = output.logits[..., 0]  # there is none where the head gives scores
        return output

    model.forward = forward


def wrap_head(model: Any) -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    head = Scaled(32, VOCAB, bias=False)
    head.load_state_dict(model.lm_head.state_dict())
    model.lm_head = head


def hook_head(model: Any) -> None:
    model.lm_head.register_forward_hook(lambda module, args, output: output / 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change_logits_unnamed, "does not name"),
        (demand_a_word, "IndexError"),
        (wrap_head, "not a plain linear layer but Scaled"),
        (hook_head, "has hooks"),
    ],
)
def test_a_model_that_is_not_understood_makes_its_logits_and_the_log_says_why(
    change: Callable[[Any], None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = build("llama")
    change(model)
    expected = token_logprobs(run(model)().logits[0], IDS, TEMPERATURE)
    with caplog.at_level(logging.WARNING):
        head = ScoredHead(model)
    assert head.ending is None
    assert said in caplog.text
    torch.testing.assert_close(head.score(run(model), IDS, TEMPERATURE), expected)
