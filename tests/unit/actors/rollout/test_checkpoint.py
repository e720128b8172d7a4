"""What a checkpoint folder says of itself."""

import json
from pathlib import Path

import msgspec
import pytest

from headrace.actors.rollout.checkpoint import (
    check_context,
    check_request,
    end_token_ids,
    has_tokenizer,
    layout_difference,
    read_shapes,
)
from headrace.actors.tiny import EOS_ID, build_tiny_model
from headrace.engine.errors import ConfigError, FormatError, UsageError
from headrace.engine.types import (
    GenerateRequest,
    PolicyVersion,
    SamplingParams,
    TensorSpec,
    UpdateKind,
    WeightManifest,
)

SHAPES = {"a": (2, 3), "b": (4,)}


def manifest(**shapes: tuple[int, ...]) -> WeightManifest:
    return WeightManifest(
        run_id="run",
        version=PolicyVersion(0, 1),
        base=None,
        kind=UpdateKind.KEYFRAME,
        layout_hash=0,
        tensors=tuple(TensorSpec(name=name, dtype="bfloat16", shape=shape) for name, shape in shapes.items()),
        buckets=(),
        payload_bytes=0,
        digest=0,
    )


def test_names_and_shapes_come_from_the_headers_of_all_files(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, "qwen2")
    shapes = read_shapes(tmp_path)
    assert shapes["model.embed_tokens.weight"] == (320, 128)
    assert "lm_head.weight" not in shapes
    assert "__metadata__" not in shapes


def test_tied_embeddings_a_repeated_output_head_is_no_tensor_of_its_own(tmp_path: Path) -> None:
    header = json.dumps({name: {"shape": [2, 2]} for name in ("lm_head.weight", "embed")}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    assert read_shapes(tmp_path) == {"embed": (2, 2)}
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    assert set(read_shapes(tmp_path)) == {"lm_head.weight", "embed"}


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[", b"\x05" + b"\0" * 7 + b"abcde"])
def test_a_file_that_only_has_the_name_of_a_checkpoint_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(FormatError, match="not a safetensors file"):
        read_shapes(tmp_path)


def test_a_folder_without_a_checkpoint_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="safetensors"):
        read_shapes(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json"):
        check_context(tmp_path, 10)


def test_end_tokens_are_those_of_both_configurations(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert end_token_ids(tmp_path) == {2}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7]}))
    assert end_token_ids(tmp_path) == {2, 5, 7}
    build_tiny_model(tmp_path / "tiny")
    assert end_token_ids(tmp_path / "tiny") == {EOS_ID}
    assert has_tokenizer(tmp_path / "tiny")
    assert not has_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"a": (2, 3)}, "lacks 1 of 2 tensors of the served model, first 'b'"),
        ({"a": (2, 3), "b": (4,), "c": (1,)}, "does not have, first 'c'"),
        ({"a": (3, 2), "b": (4,)}, "'a' has the shape (3, 2); the served model's is (2, 3)"),
        ({"b": (4,), "a": (2, 3)}, ""),
    ],
)
def test_a_layout_that_differs_is_told_in_one_sentence(given: dict[str, tuple[int, ...]], sentence: str) -> None:
    assert sentence in layout_difference(manifest(**given), SHAPES)
    assert bool(layout_difference(manifest(**given), SHAPES)) == bool(sentence)


def test_positions_limit_the_context_under_either_name(tmp_path: Path) -> None:
    for key in ("max_position_embeddings", "n_positions"):
        (tmp_path / "config.json").write_text(json.dumps({key: 64}))
        check_context(tmp_path, 64)
        with pytest.raises(ConfigError, match="this model has 64 positions"):
            check_context(tmp_path, 65)


def test_requests_that_do_not_fit_or_need_a_tokenizer_are_refused(tmp_path: Path) -> None:
    fits = GenerateRequest(request_id="r", token_ids=(1,) * 6, sampling=SamplingParams(max_tokens=4))
    check_request(fits, 10, tmp_path)
    with pytest.raises(UsageError, match="at most 9"):
        check_request(fits, 9, tmp_path)
    stop = msgspec.structs.replace(fits, sampling=SamplingParams(max_tokens=4, stop=("x",)))
    with pytest.raises(UsageError, match="give stop_token_ids"):
        check_request(stop, 10, tmp_path)
