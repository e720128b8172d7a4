"""What a checkpoint folder says of itself, read without torch: layout, end tokens, context length.

A backend compares each update with this layout before it touches a parameter, so that a wrong one changes nothing.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from headrace.engine.errors import ConfigError, FormatError, PromptTooLongError, UsageError
from headrace.engine.types import GenerateRequest, WeightManifest

# Larger headers than this are nonsense: it is some hundred bytes a tensor.
_MAX_HEADER_BYTES = 100 << 20

_OUTPUT_HEAD = "lm_head.weight"


class _EndTokens(msgspec.Struct):
    eos_token_id: int | list[int] = []


class _Entry(msgspec.Struct):
    shape: tuple[int, ...] | None = None


Shapes = Mapping[str, tuple[int, ...]]


def read_config(model_dir: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        ConfigError: There is none, or it is not a JSON object.
    """
    config = _read_json(model_dir / "config.json")
    if config is None:
        raise ConfigError(f"model.path: {model_dir} has no readable config.json; give a checkpoint's folder.")
    return config


def read_shapes(model_dir: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors in the folder's safetensors files, from their headers alone.

    A tied output head is left out even where a file repeats it: updates name the embedding for both.

    Raises:
        ConfigError: The folder has no safetensors file.
        FormatError: A header is not what the format says.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model.path: {model_dir} holds no .safetensors file; save the model in that format.")
    for path in files:
        shapes |= _read_header(path)
    if (_read_json(model_dir / "config.json") or {}).get("tie_word_embeddings"):
        shapes.pop(_OUTPUT_HEAD, None)
    return shapes


def end_token_ids(model_dir: Path) -> frozenset[int]:
    """Tokens that end a response: those of generation_config.json and of config.json, the same for each backend."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        try:
            ends = msgspec.json.decode((model_dir / name).read_bytes(), type=_EndTokens).eos_token_id
        except (OSError, msgspec.MsgspecError):
            # Not there, or none of these kinds: then the file names no end token.
            continue
        found.update([ends] if isinstance(ends, int) else ends)
    return frozenset(found)


def has_tokenizer(model_dir: Path) -> bool:
    """Whether the folder can turn token ids into text (needed for stop strings only)."""
    return any((model_dir / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def check_context(model_dir: Path, max_context_tokens: int) -> None:
    """Refuse a context that the model's positions do not reach.

    Raises:
        ConfigError: model.max_context_tokens is larger than the model's max_position_embeddings.
    """
    config = read_config(model_dir)
    limit = config.get("max_position_embeddings", config.get("n_positions"))
    if isinstance(limit, int) and max_context_tokens > limit:
        raise ConfigError(
            f"model.max_context_tokens is {max_context_tokens}; this model has {limit} positions, so set at most that."
        )


def check_request(request: GenerateRequest, max_context_tokens: int, model_dir: Path) -> None:
    """Refuse a request that cannot run.

    Raises:
        PromptTooLongError: Prompt and `max_tokens` do not fit the context.
        UsageError: The prompt is empty, `max_tokens` is not positive, or stop strings were given to a checkpoint
            without a tokenizer.
    """
    num_prompt, num_response = len(request.token_ids), request.sampling.max_tokens
    if not num_prompt or num_response < 1 or num_prompt + num_response > max_context_tokens:
        kind = PromptTooLongError if num_prompt and num_response > 0 else UsageError
        raise kind(
            f"Request {request.request_id} has {num_prompt} prompt tokens and asks for {num_response}; neither may be "
            f"empty and both together are at most {max_context_tokens}."
        )
    if request.sampling.stop and not has_tokenizer(model_dir):
        raise UsageError(f"{model_dir} has no tokenizer for stop strings; give stop_token_ids instead.")


def layout_difference(manifest: WeightManifest, expected: Shapes) -> str:
    """Why an update does not fit a model, in one sentence; empty where it does. Each tensor must be there, once."""
    given = {spec.name: spec.shape for spec in manifest.tensors}
    missing = sorted(expected.keys() - given.keys())
    unknown = sorted(given.keys() - expected.keys())
    if missing:
        return f"It lacks {len(missing)} of {len(expected)} tensors of the served model, first {missing[0]!r}."
    if unknown:
        return f"It names {len(unknown)} tensors that the served model does not have, first {unknown[0]!r}."
    for name, shape in given.items():
        if shape != expected[name]:
            return f"Tensor {name!r} has the shape {shape}; the served model's is {expected[name]}."
    return ""


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def _read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes that one file's header names."""
    with path.open("rb") as file:
        head = file.read(8)
        (size,) = struct.unpack("<Q", head) if len(head) == 8 else (0,)
        if not 0 < size <= _MAX_HEADER_BYTES:
            raise FormatError(f"{path} is not a safetensors file: its header claims {size} bytes.")
        text = file.read(size)
    try:
        entries = msgspec.json.decode(text, type=dict[str, _Entry])
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(f"{path} is not a safetensors file: {error}.") from error
    entries.pop("__metadata__", None)
    shapes = {name: entry.shape for name, entry in entries.items() if entry.shape is not None}
    if shapes.keys() != entries.keys():
        raise FormatError(f"{path} is not a safetensors file: its header names tensors without a shape.")
    return shapes
