# pyright: basic
# transformers and torch are only partly typed.
"""Tiny random checkpoints with a byte-level tokenizer: for tests, and for a first smoke run without a download."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headrace.engine.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
else:
    PreTrainedConfig = PreTrainedModel = Any

TinyKind = Literal["llama", "qwen2", "gpt2"]

PAD_ID = 256
BOS_ID = 257
EOS_ID = 258
MIN_VOCAB = 259

# The Qwen2 and GPT-2 tokenizer classes add this very token where a vocabulary lacks it.
END_TOKEN = "<|endoftext|>"

_HIDDEN = 128
_HEADS = 4
_CONTEXT = 512
# Larger than usual, so that two random models differ visibly in what they say.
_INIT_STD = 0.1

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def build_tiny_model(
    folder: Path,
    kind: TinyKind = "llama",
    *,
    vocab: int = 320,
    tied: bool | None = None,
    layers: int = 2,
    dtype: str = "float32",
    seed: int = 0,
) -> Path:
    """Write a random model of about 0.4 M parameters, with its tokenizer, into `folder`.

    Ids 0-255 are the bytes; then pad, bos and eos; the rest of the vocabulary decodes to visible marks, so that every
    id a random model samples is a real token. The same arguments give the same bytes; the global generator is not
    touched.

    Args:
        folder: Created if missing.
        kind: "llama" and "qwen2" use rotary positions and shared key heads, "gpt2" absolute positions.
        vocab: Number of ids, at least 259.
        tied: Whether input and output embeddings are one tensor; default as each kind usually is.
        layers: Number of layers.
        dtype: Of the saved weights.
        seed: Of the weights.

    Returns:
        `folder`.

    Raises:
        InputError: The vocabulary is too small.
    """
    import torch
    from transformers import AutoModelForCausalLM

    if vocab < MIN_VOCAB:
        raise InputError(
            f"vocab is {vocab}: a byte-level vocabulary with its special tokens needs at least {MIN_VOCAB}"
        )
    config = _config(kind, vocab=vocab, layers=layers, tied=(kind != "llama") if tied is None else tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto: Any = AutoModelForCausalLM  # partly untyped
        model = auto.from_config(config, dtype=torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    _tokenizer(vocab).save_pretrained(folder)
    return folder


def _config(kind: TinyKind, *, vocab: int, layers: int, tied: bool) -> PreTrainedConfig:
    from transformers import GPT2Config, LlamaConfig, Qwen2Config

    ends: dict[str, Any] = {"pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    if kind == "gpt2":
        return GPT2Config(
            vocab_size=vocab,
            n_positions=_CONTEXT,
            n_embd=_HIDDEN,
            n_layer=layers,
            n_head=_HEADS,
            initializer_range=_INIT_STD,
            tie_word_embeddings=tied,
            **ends,
        )
    if kind not in ("llama", "qwen2"):
        raise InputError(f'kind is {kind!r}: choose "llama", "qwen2" or "gpt2"')
    make = LlamaConfig if kind == "llama" else Qwen2Config
    return make(
        vocab_size=vocab,
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS // 2,
        max_position_embeddings=_CONTEXT,
        initializer_range=_INIT_STD,
        tie_word_embeddings=tied,
        **ends,
    )


def _tokenizer(vocab: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = _byte_letters()
    ids = {letter: byte for byte, letter in enumerate(letters)}
    # The spare ids are plain tokens, not special ones: they stay visible in decoded text.
    ids |= {f"<{index}>": index for index in range(MIN_VOCAB, vocab)}
    ids |= {"<pad>": PAD_ID, "<bos>": BOS_ID, END_TOKEN: EOS_ID}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrap: Any = PreTrainedTokenizerFast  # untyped
    fast = wrap(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token=END_TOKEN, model_max_length=_CONTEXT
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def _byte_letters() -> list[str]:
    """The printable letter that stands for each byte in byte-level tokenizers: printable ones for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in printable}
    spare = 256
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(spare)
            spare += 1
    return [letters[byte] for byte in range(256)]
