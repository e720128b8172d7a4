# pyright: basic
# transformers and torch are only partly typed.
"""Packed micro-batches through a causal language model, sequences kept apart.

The model runs whole (so that sharding hooks stay in force), on the rows of `layout.py`; between its body and its head a
hook keeps only the positions that score a token, so prompts are never projected to the vocabulary, and `scored_head.py`
makes the head give their scores, so that no logits of all tokens exist.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from headrace.actors.learner.layout import LayoutMode, RowLayout, lay_out
from headrace.actors.learner.scored_head import ScoredHead
from headrace.engine.types import MicroBatch

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel
else:
    PreTrainedModel = Tensor = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardResult:
    """Scores of one micro-batch; 0 where a token has none.

    Attributes:
        logprobs: float32 [N], nats, at each sequence's temperature; connected to the graph even if nothing is scored.
        entropy: float32 [N], nats, of the same distribution.
        num_computed: Tokens that the model ran over, padding included.
    """

    logprobs: Tensor
    entropy: Tensor
    num_computed: int


class PackedForward:
    """Runs micro-batches through one model. The model stays in the mode it is in; nothing is drawn at random in eval.

    Build it before the model is sharded; it adds two hooks, which `close` removes.

    Attributes:
        mode: How sequences are laid out.
        head: How scores leave the model.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._hidden_size: int = model.config.get_text_config().hidden_size
        self._source: Tensor | None = None
        self.head = ScoredHead(model)
        self._hook = model.base_model.register_forward_hook(self._keep_scored)
        self.mode: LayoutMode = "auto" if _honours_masks(model) else "plain"

    def __call__(self, micro_batch: MicroBatch) -> ForwardResult:
        """Score each loss token. One forward pass, whatever the micro-batch holds."""
        layout = lay_out(micro_batch, hidden_size=self._hidden_size, mode=self.mode)
        target = torch.from_numpy(layout.target).to(self._device)
        ids = torch.zeros(len(layout.source), dtype=torch.int64)
        ids[: len(layout.target)] = torch.from_numpy(micro_batch.token_ids[layout.target].astype(np.int64))
        temperature = torch.ones(len(layout.source), dtype=torch.float32)
        sequences = micro_batch.sequence_ids[layout.target]
        temperature[: len(layout.target)] = torch.from_numpy(micro_batch.temperature[sequences])
        scores = self.head.score(lambda: self._run(layout), ids.to(self._device), temperature.to(self._device))
        spread = [
            torch.zeros(len(micro_batch.token_ids), device=self._device).index_copy(0, target, values[: len(target)])
            for values in scores
        ]
        return ForwardResult(logprobs=spread[0], entropy=spread[1], num_computed=layout.token_ids.size)

    def close(self) -> None:
        """Remove the hooks. May be called twice."""
        self._hook.remove()
        self.head.close()

    def _run(self, layout: RowLayout) -> Any:
        attention = None
        if layout.attention is not None:
            attention = torch.from_numpy(layout.attention[:, None]).to(self._device)
        self._source = torch.from_numpy(layout.source).to(self._device)
        try:
            return self._model(
                input_ids=torch.from_numpy(layout.token_ids).to(self._device),
                position_ids=torch.from_numpy(layout.position_ids).to(self._device),
                attention_mask=attention,
                use_cache=False,
            )
        finally:
            self._source = None

    def _keep_scored(self, module: torch.nn.Module, args: object, output: Any) -> Any:
        if self._source is not None:
            hidden = output.last_hidden_state
            output.last_hidden_state = hidden.reshape(-1, hidden.shape[-1]).index_select(0, self._source)[None]
        return output

    @torch.no_grad()
    def verify_isolation(self) -> bool:
        """Whether shared prompts work with this model; if not, fall back to one sequence a row.

        A small shared micro-batch is scored three times. Where one branch is changed, the others must keep their
        scores to the last bit; where the prompt is changed, each token of its branches must notice. Three short
        passes; with several ranks, all must call it.
        """
        if self.mode == "auto":
            base, branch, prompt = (
                self(_probe(**changed)).logprobs for changed in ({}, {"branch_token": 2}, {"prompt_token": 2})
            )
            sequence = torch.from_numpy(_probe().sequence_ids).to(self._device)
            scored = torch.from_numpy(_probe().loss_mask != 0).to(self._device)
            leaks = (base != branch) & (sequence != 0) | (base != prompt) & (sequence == 3)
            blind = (base == prompt) & (sequence != 3) & scored
            if bool((leaks | blind).any()):
                self.mode = "plain"
        return self.mode == "auto"


def _honours_masks(model: PreTrainedModel) -> bool:
    """Only full attention through torch's kernel takes a mask as it is; sliding windows would be lost under it."""
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    return config._attn_implementation == "sdpa" and layers == {"full_attention"}


def _probe(*, branch_token: int = 1, prompt_token: int = 1) -> MicroBatch:
    """Three branches of one prompt and one of another; cheap enough when shared that any model shares it."""
    prompts = [[prompt_token, *range(3, 15)]] * 3 + [[4, 6, 8]]
    responses = [[branch_token] * 4, [11, 12, 13], [14, 15, 16], [17, 18, 19]]
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    tokens = [token for pair in zip(prompts, responses, strict=True) for part in pair for token in part]
    mask = [flag for p, r in zip(prompts, responses, strict=True) for flag in [0] * len(p) + [1] * len(r)]
    return MicroBatch(
        token_ids=np.array(tokens, dtype=np.int32),
        position_ids=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        sequence_ids=np.repeat(np.arange(4, dtype=np.int32), lengths),
        loss_mask=np.array(mask, dtype=np.uint8),
        behaviour_logprobs=np.zeros(len(tokens), dtype=np.float32),
        advantages=np.zeros(len(tokens), dtype=np.float32),
        temperature=np.ones(4, dtype=np.float32),
        record_ids=("", "", "", ""),
        lags=np.zeros(4, dtype=np.int32),
    )
