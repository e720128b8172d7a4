"""Whole named tensors: what they are taken for, and what travels."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from headrace.engine.errors import ConfigError, InputError
from headrace.engine.transport.tensor_publisher import TensorPublisher, run_publisher, tensor_bits
from headrace.engine.types import PolicyVersion, TensorSpec, UpdateKind, WeightUpdate
from headrace.engine.weights.payload import open_payload, verify_payload


class Hub:
    """Takes every part."""

    takes_deltas = True

    def __init__(self) -> None:
        self.published: list[WeightUpdate] = []

    def publish(self, part: WeightUpdate) -> bool:
        self.published.append(part)
        return True


class OnlyDlpack:
    """An array of another framework."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array

    def __dlpack__(self, **given: object) -> object:
        return self._array.__dlpack__(**given)  # type: ignore[arg-type]

    def __dlpack_device__(self) -> object:
        return self._array.__dlpack_device__()


class OnlyNumpy:
    def numpy(self) -> npt.NDArray[Any]:
        return np.arange(3, dtype=np.float16)


def make(hub: Hub, folder: Path) -> TensorPublisher:
    return TensorPublisher(hub, run_id="run", payload_dirs=[folder], say=print, keyframe_steps=25)


VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    ("value", "dtype", "bits"),
    [
        (VALUES, "float32", VALUES.view(np.uint32)),
        (VALUES.T, "float32", np.ascontiguousarray(VALUES.T).view(np.uint32)),
        (OnlyDlpack(VALUES), "float32", VALUES.view(np.uint32)),
        (OnlyNumpy(), "float16", np.arange(3, dtype=np.float16).view(np.uint16)),
        (("bfloat16", np.array([1, 2], np.uint16)), "bfloat16", np.array([1, 2], np.uint16)),
        (torch.tensor([1.0, -2.0], dtype=torch.bfloat16), "bfloat16", np.array([0x3F80, 0xC000], np.uint16)),
        (torch.tensor([[1.0]], requires_grad=True), "float32", np.array([[0x3F800000]], np.uint32)),
    ],
)
def test_arrays_of_any_framework_are_taken_bit_for_bit(value: Any, dtype: str, bits: npt.NDArray[Any]) -> None:
    spec, found = tensor_bits("w", value)
    assert spec == TensorSpec(name="w", dtype=dtype, shape=bits.shape)
    assert found.dtype == bits.dtype and np.array_equal(found, bits.reshape(-1))


@pytest.mark.parametrize(
    "value",
    [np.arange(3), np.zeros(2, np.float64), ("bfloat16", np.zeros(2, np.uint32)), ("int8", np.zeros(2, np.int8)), "x"],
)
def test_what_cannot_be_published_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InputError, match="tensor 'w'"):
        tensor_bits("w", value)


def test_what_was_published_may_be_written_over_and_what_changed_travels(tmp_path: Path) -> None:
    hub = Hub()
    publisher = make(hub, tmp_path)
    weights = np.zeros(10_000, np.float32)
    publisher.publish({"w": weights}, PolicyVersion(0, 1))
    weights[17] = 1.0
    assert publisher.publish({"w": weights}, PolicyVersion(0, 2))
    first, second = hub.published
    verify_payload(first)
    assert not open_payload(first)["w"][1].any()
    assert (second.manifest.kind, second.manifest.base) == (UpdateKind.DELTA, PolicyVersion(0, 1))
    assert second.manifest.payload_bytes < 200


def test_another_layout_is_published_in_full(tmp_path: Path) -> None:
    hub = Hub()
    publisher = make(hub, tmp_path)
    publisher.publish({"w": VALUES}, PolicyVersion(0, 1))
    publisher.publish({"w": VALUES, "v": VALUES}, PolicyVersion(0, 2))
    assert hub.published[1].manifest.kind is UpdateKind.KEYFRAME
    with pytest.raises(InputError, match="no tensor"):
        publisher.publish({}, PolicyVersion(0, 3))


def test_a_run_of_several_ranks_awaits_their_parts() -> None:
    with pytest.raises(ConfigError, match=r"learner\.num_ranks = 2"):
        run_publisher(
            "unix:/nowhere",
            run_id="run",
            fencing_token=1,
            payload_dir="",
            run_folder="",
            num_ranks=2,
            keyframe_steps=25,
            say=print,
        )
