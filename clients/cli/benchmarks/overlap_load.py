"""What the overlap benchmark samples and trains: how long each response is, and how long a step takes for it.

Invariants:
- A response's length depends on its prompt and its place in the group alone, so every setting does the same work.
- `step_s` makes both sides equally busy: with all slots busy, sampling a step's worth of groups takes as long as
  training on them.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headrace.engine.types import GenerateRequest, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The work of one setting, the same for each.

    Attributes:
        groups_per_step, group_size: Groups in a batch and samples in a group.
        slots: Groups that the inference side runs at once; the hardware, equal for all settings.
        median_tokens: Half of the responses are shorter.
        sigma: Standard deviation of the logarithm of the length.
        max_tokens: Longer responses are cut here, as in any run.
        tokens_per_chunk, tokens_per_s: Speed of one sample, whatever else runs; it gets its tokens in chunks.
        warm_up_steps: Steps before the measured ones: processes start, the pipeline fills.
        steps: Steps that are measured.
        seed: Of the lengths.
    """

    groups_per_step: int = 16
    group_size: int = 8
    slots: int = 20
    median_tokens: int = 60
    sigma: float = 1.0
    max_tokens: int = 720
    tokens_per_chunk: int = 30
    tokens_per_s: float = 320.0
    warm_up_steps: int = 3
    steps: int = 16
    seed: int = 0

    def num_steps(self, max_staleness: int) -> int:
        """Steps of a run: as many more than are measured as the window holds, so that those see a full window."""
        return self.warm_up_steps + self.steps + max_staleness

    def num_prompts(self, max_staleness: int) -> int:
        """Groups of a run: each prompt is sampled once."""
        return self.num_steps(max_staleness) * self.groups_per_step

    def write_prompts(self, path: Path, max_staleness: int) -> None:
        """A JSON line for each prompt: its number."""
        numbers = range(self.num_prompts(max_staleness))
        path.write_text("".join(json.dumps({"prompt": str(number)}) + "\n" for number in numbers))


class Lengths:
    """The length of every response: lognormal, cut at `max_tokens`.

    Attributes:
        tokens: int64 [prompts, group_size].
    """

    def __init__(self, load: Load, num_prompts: int) -> None:
        """Draw them; the first prompts have the same lengths whatever `num_prompts` is."""
        rng = np.random.default_rng(load.seed)
        drawn = rng.lognormal(math.log(load.median_tokens), load.sigma, (num_prompts, load.group_size))
        self._load = load
        self.tokens: npt.NDArray[np.int64] = np.clip(np.rint(drawn), 1, load.max_tokens).astype(np.int64)

    @property
    def step_s(self) -> float:
        """Seconds of a learner step that keep both sides equally busy."""
        load = self._load
        chunks = -(-self.tokens.max(axis=1) // load.tokens_per_chunk)
        group_s = float(chunks.mean()) * load.tokens_per_chunk / load.tokens_per_s
        return load.groups_per_step * group_s / load.slots

    def script(self, request: GenerateRequest, rng: np.random.Generator) -> list[int]:
        """The response to a request of a worker: as many ids as it is long."""
        prompt = request.token_ids[0] - 1
        sample = int(request.request_id.split("/")[1])
        ids: list[int] = rng.integers(1, 1000, int(self.tokens[prompt, sample])).tolist()
        return ids


class NumberRenderer:
    """A prompt is a number, its only token id is the number after it; responses are their ids written out."""

    def render(self, prompt: Prompt) -> tuple[int, ...]:
        """One id."""
        return (int(prompt.text or prompt.messages[-1].content) + 1,)

    def text_of(self, token_ids: "list[int] | tuple[int, ...]") -> str:
        """The ids in decimal."""
        return " ".join(map(str, token_ids))
