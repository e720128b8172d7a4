# pyright: basic
# transformers and torch are only partly typed.
"""A causal model's output embedding that scores tokens instead of making logits.

Invariants:
- The model runs whole, through its own forward method, so that sharding hooks see every module, and the scores leave
  it in place of the logits, so that the hooks of the backward pass hang on them.
- Only during a scored pass does the model differ from what its makers wrote.
- Whatever the model does to logits after its head would be lost, so it is done here instead, as far as the
  configuration names it, and a trial at construction proves that the scores are those of the model's logits. Where they
  are not, logits are made and scored as usual.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from headrace.actors.learner.linear_logprobs import linear_logprobs
from headrace.actors.learner.token_logprobs import token_logprobs

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel
else:
    PreTrainedModel = Tensor = Any

logger = logging.getLogger(__name__)

# Names under which configurations keep a factor or a divisor of the logits; the trial finds out which of the two it is.
_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")

# Spread of the logits in the trial: large enough for soft-caps to bite and for scales to show.
_TRIAL_SPREAD = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEnding:
    """What a model does to its logits after the head: `cap(scale * z)`, `cap(z) = softcap * tanh(z / softcap)`.

    Attributes:
        scale: Above 0.
        softcap: Above 0, or None for no cap.
    """

    scale: float = 1.0
    softcap: float | None = None


class ScoredHead:
    """Scores tokens during a pass of one model. Build it before the model is sharded; not for several threads.

    The head must belong to the root's sharding unit: only what leaves the model as a whole carries gradients.

    Attributes:
        ending: How logits end in this model, or None where they have to be made.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Tries the short way out on a few tokens; two passes, or more where the configuration names a scale."""
        self._model = model
        find: Any = model.get_output_embeddings  # untyped
        self._head: Any = find()
        self._ids: Tensor | None = None
        self._temperature: Tensor | None = None
        self._scores: tuple[Tensor, Tensor] | None = None
        # Registered first, so that what sharding hooks see on the way out are the scores.
        self._hook = model.register_forward_hook(self._hand_out)
        self.ending: LogitEnding | None = None
        reason = self._find_ending()
        if reason is not None:
            logger.warning(
                "%s scores tokens through whole logits, which takes more memory: %s", type(model).__name__, reason
            )

    def score(self, run: Callable[[], Any], token_ids: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """Score one token for each position that reaches the head.

        Args:
            run: Runs the model, with one row of K positions at the head, and returns its output.
            token_ids: int64 [K].
            temperature: float32 [K], above 0.

        Returns:
            Log-probabilities and entropies in nats, float32 [K] each, both differentiable.
        """
        if self.ending is None:
            return token_logprobs(run().logits[0], token_ids, temperature)
        self._ids, self._temperature = token_ids, temperature
        self._head.forward = self._score_instead
        try:
            logprobs, entropies = run().logits
        finally:
            del self._head.forward
            self._ids = self._temperature = self._scores = None
        return logprobs, entropies

    def close(self) -> None:
        """Remove the hook. May be called twice."""
        self._hook.remove()

    def _score_instead(self, hidden: Tensor) -> Tensor:
        """Stands in for the head's forward method: hidden states [1, K, H] to logits of no word [1, K, 0]."""
        assert self.ending is not None and self._ids is not None and self._temperature is not None, "a pass is scored"
        scale, softcap = self.ending.scale, self.ending.softcap
        # cap(scale * z) / temperature is the function's own cap and temperature, both divided by the scale.
        self._scores = linear_logprobs(
            hidden[0],
            self._head.weight,
            self._ids,
            self._temperature if scale == 1.0 else self._temperature / scale,
            bias=self._head.bias,
            softcap=None if softcap is None else softcap / scale,
        )
        return hidden.new_empty(*hidden.shape[:-1], 0)

    def _hand_out(self, module: torch.nn.Module, args: object, output: Any) -> Any:
        if self._scores is not None:
            output.logits = self._scores
        return output

    @torch.no_grad()
    def _find_ending(self) -> str | None:
        """Set `ending` to the one under which the trial succeeds; the reason if there is none."""
        head = self._head
        hooks = () if head is None else (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks)
        if type(head) is not torch.nn.Linear or any(hooks) or "forward" in head.__dict__:
            return f"its head is not a plain linear layer but {type(head).__name__}, or has hooks"
        trial = _Trial(self._model, head)
        try:
            expected = self.score(trial.run, trial.token_ids, trial.temperature)
            bound = 1e-3 + 4 * torch.finfo(head.weight.dtype).eps * float(expected[0].abs().max())
            for ending in _endings(self._model.config.get_text_config()):
                self.ending = ending
                scores = self.score(trial.run, trial.token_ids, trial.temperature)
                if all(torch.allclose(*pair, atol=bound, rtol=0) for pair in zip(scores, expected, strict=True)):
                    return None
        except Exception as error:  # whatever a model may raise when its head gives no logits; said in the log
            reason = f"{type(error).__name__}: {error}"
        else:
            reason = "it changes its logits in a way that its configuration does not name"
        finally:
            trial.close()
        self.ending = None
        return reason


class _Trial:
    """Runs the model on two tokens, with hidden states of its own choice at the head."""

    def __init__(self, model: PreTrainedModel, head: torch.nn.Linear) -> None:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(8, head.in_features, generator=generator).to(head.weight)
        spread = float(torch.nn.functional.linear(hidden, head.weight).float().std())
        # Some tokens with little difference between their logits, some with much.
        sizes = torch.tensor([0.03, 0.1, 0.3, 1.0] * 2)[:, None].to(hidden)
        self._hidden = hidden * (_TRIAL_SPREAD / max(spread, 1e-6)) * sizes
        ids = torch.randint(0, head.out_features, (8,), generator=generator)
        self.token_ids = ids.to(hidden.device)
        self.temperature = torch.ones(8, device=hidden.device)
        self._model = model
        self._hook = head.register_forward_pre_hook(lambda module, args: (self._hidden[None],))

    def run(self) -> Any:
        return self._model(
            input_ids=torch.tensor([[0, 1]], device=self._hidden.device),
            position_ids=torch.tensor([[0, 1]], device=self._hidden.device),
            use_cache=False,
        )

    def close(self) -> None:
        self._hook.remove()


def _endings(config: Any) -> Iterator[LogitEnding]:
    """What the configuration names, likeliest first, then nothing."""
    softcap = getattr(config, "final_logit_softcapping", None)
    scales: list[float] = []
    for name in _SCALES:
        value = getattr(config, name, None)
        if isinstance(value, int | float) and value > 0:
            scales += [float(value), 1 / value]
    for scale in dict.fromkeys([*scales, 1.0]):
        if softcap:
            yield LogitEnding(scale=scale, softcap=float(softcap))
        yield LogitEnding(scale=scale)
