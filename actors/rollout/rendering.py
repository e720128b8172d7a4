"""Prompts to token ids and responses to text, once: nothing is ever decoded and encoded again on the training path."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from headrace.actors.models import load_tokenizer
from headrace.engine.errors import ConfigError
from headrace.engine.types import Prompt


class Renderer(Protocol):
    """Turns prompts into ids and ids into text."""

    def render(self, prompt: Prompt) -> tuple[int, ...]:
        """The ids that are sent to the engine and trained on, with exactly one BOS where the model has one.

        Raises:
            ConfigError: The prompt needs a chat template or a tokenizer that the model does not have.
        """
        ...

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Readable text, special tokens left out; for rewards and people only."""
        ...


class TokenizerRenderer:
    """Renders with the model's own tokenizer and chat template.

    A chat template writes the BOS text itself, a plain prompt gets it from the tokenizer.
    """

    def __init__(self, model_dir: Path) -> None:
        """Load the tokenizer from a checkpoint folder; blocks for some 100 ms.

        Raises:
            ConfigError: The folder holds no tokenizer.
        """
        self._tokenizer: Any = load_tokenizer(model_dir)

    def render(self, prompt: Prompt) -> tuple[int, ...]:
        if prompt.token_ids:
            return prompt.token_ids
        if not prompt.messages:
            return tuple(self._tokenizer(prompt.text).input_ids)
        if self._tokenizer.chat_template is None:
            raise ConfigError(
                f"prompt {prompt.prompt_id!r} has chat messages, but the model's tokenizer has no chat template; "
                "give plain text, or a model with a chat template"
            )
        messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
        ids = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
        return tuple(ids["input_ids"])

    def text_of(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


class IdsOnlyRenderer:
    """For backends without a tokenizer: prompts must come as ids, text is the ids written out."""

    def render(self, prompt: Prompt) -> tuple[int, ...]:
        if not prompt.token_ids:
            raise ConfigError(f"prompt {prompt.prompt_id!r} has no token ids, and rollout.backend has no tokenizer")
        return prompt.token_ids

    def text_of(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))
