"""Conformance of a `TrainerBackend`, on one rank."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from headrace.engine.errors import FormatError
from headrace.engine.interfaces import TrainerBackend
from headrace.engine.testing.expect import expect, expect_error
from headrace.engine.types import MicroBatch, PolicyVersion, StepBatch, UpdateKind
from headrace.engine.weights.payload import verify_payload


def make_micro_batch(
    lengths: tuple[tuple[int, int], ...] = ((3, 4), (2, 6)), *, vocabulary_size: int = 97
) -> MicroBatch:
    """A packed micro-batch without randomness: prompt and response lengths of each sequence; all responses sampled."""
    totals = [prompt + response for prompt, response in lengths]
    num_tokens = sum(totals)
    sequence_ids = np.repeat(np.arange(len(lengths), dtype=np.int32), totals)
    position_ids = np.concatenate([np.arange(total, dtype=np.int32) for total in totals])
    mask = position_ids >= np.array([prompt for prompt, _ in lengths])[sequence_ids]
    signs = np.where(sequence_ids % 2 == 0, np.float32(1), np.float32(-0.5))
    return MicroBatch(
        token_ids=(1 + np.arange(num_tokens) * 7 % (vocabulary_size - 1)).astype(np.int32),
        position_ids=position_ids,
        sequence_ids=sequence_ids,
        loss_mask=mask.astype(np.uint8),
        behaviour_logprobs=np.where(mask, np.float32(-1), np.float32(0)),
        advantages=np.where(mask, signs, np.float32(0)),
        temperature=np.ones(len(lengths), np.float32),
        record_ids=tuple(f"g/{index}/0" for index in range(len(lengths))),
        lags=np.zeros(len(lengths), np.int32),
    )


def make_step_batch(*micro_batches: MicroBatch, step: int = 1) -> StepBatch:
    """The share of a single rank, with the global counts that belong to it."""
    return StepBatch(
        step=step,
        micro_batches=micro_batches,
        num_loss_tokens=sum(int(m.loss_mask.sum()) for m in micro_batches),
        num_sequences=sum(len(np.unique(m.sequence_ids[m.loss_mask == 1])) for m in micro_batches),
        num_groups=1,
    )


def check_trainer_backend(
    factory: Callable[[], TrainerBackend], folder: Path, micro_batch: MicroBatch | None = None
) -> None:
    """Run every rule of `TrainerBackend` against two trainers of one rank. Blocks for their steps.

    Args:
        factory: Makes a trainer that starts from the same weights each time; called twice.
        folder: An empty folder for payloads and checkpoints.
        micro_batch: With at least one loss token and two sequences; ids that the model knows.

    Raises:
        AssertionError: With one sentence on the first rule that is broken.
    """
    micro_batch = micro_batch or make_micro_batch()
    payloads = folder / "payloads"
    payloads.mkdir()
    trainer = factory()
    try:
        _check_logprobs(trainer, micro_batch)
        version = _check_export(trainer, payloads)
        _check_steps(trainer, micro_batch, version, payloads)
        _check_checkpoint(trainer, factory, micro_batch, folder)
        expect_error(FormatError, lambda: trainer.load(folder / "absent"), "load() of an absent folder must fail")
        partial = folder / "partial"
        partial.mkdir()
        expect_error(FormatError, lambda: trainer.load(partial), "load() of an empty folder must raise FormatError")
    finally:
        trainer.close()
    trainer.close()


def _check_logprobs(trainer: TrainerBackend, micro_batch: MicroBatch) -> None:
    scores = trainer.logprobs(micro_batch)
    expect(scores.dtype == np.float32, "logprobs() must be float32")
    expect(
        scores.shape == micro_batch.token_ids.shape, "logprobs() must have one value a token of the micro-batch: [N]"
    )
    expect(bool(np.isfinite(scores).all() and (scores <= 1e-3).all()), "logprobs() must be finite and at most 0")
    expect(bool((scores[micro_batch.position_ids == 0] == 0).all()), "the first token of a sequence must have score 0")
    again = trainer.logprobs(micro_batch)
    expect(bool(np.allclose(scores, again, rtol=0, atol=1e-6)), "logprobs() must not change the weights")


def _check_export(trainer: TrainerBackend, payloads: Path) -> PolicyVersion:
    update = trainer.export_update(None, payloads)
    manifest = update.manifest
    expect(manifest.kind is UpdateKind.KEYFRAME, "export_update(None) must give a keyframe")
    expect(manifest.base is None, "a keyframe must have no base")
    verify_payload(update)
    return manifest.version


def _digest(trainer: TrainerBackend, payloads: Path) -> int:
    update = trainer.export_update(None, payloads)
    verify_payload(update)
    return update.manifest.digest


def _check_steps(trainer: TrainerBackend, micro_batch: MicroBatch, version: PolicyVersion, payloads: Path) -> None:
    before = _digest(trainer, payloads)
    result = trainer.step(make_step_batch(micro_batch))
    after_one = PolicyVersion(version.incarnation, version.version + 1)
    expect(result.version == after_one, "step() must count the version up by one")
    expect(not result.skipped, "a step with loss tokens and a finite gradient must not be skipped")
    finite = all(np.isfinite(value) for value in result.metrics.values())
    expect(finite, "the metrics of a step that was not skipped must be finite")
    exported = trainer.export_update(version, payloads).manifest
    expect(exported.version == after_one, "export_update() must carry the version after the step")
    expect(exported.base in (None, version), "export_update(since) must give a keyframe or a delta from `since`")
    moved = _digest(trainer, payloads)
    expect(exported.digest == moved, "a delta must lead to the weights that a keyframe of the same version holds")
    expect(moved != before, "a step must change the weights")
    silent = msgspec.structs.replace(
        micro_batch,
        loss_mask=np.zeros_like(micro_batch.loss_mask),
        behaviour_logprobs=np.zeros_like(micro_batch.behaviour_logprobs),
        advantages=np.zeros_like(micro_batch.advantages),
    )
    result = trainer.step(make_step_batch(silent, step=2))
    expect(result.skipped, "a step in which no token takes part must be skipped")
    expect(result.version.version == version.version + 2, "a skipped step must count the version up all the same")
    expect(_digest(trainer, payloads) == moved, "a skipped step must not change the weights")


def _check_checkpoint(
    trainer: TrainerBackend, factory: Callable[[], TrainerBackend], micro_batch: MicroBatch, folder: Path
) -> None:
    saved = folder / "checkpoint"
    payloads = folder / "payloads-after-load"
    payloads.mkdir()
    trainer.save(saved)
    other = factory()
    try:
        other.load(saved)
        version = trainer.export_update(None, payloads).manifest.version
        loaded = other.export_update(None, payloads).manifest.version
        expect(loaded == version, "load() must restore the version")
        same = _digest(other, payloads) == _digest(trainer, payloads)
        expect(same, "load() must restore the weights bit for bit")
        batch = make_step_batch(micro_batch, step=3)
        trainer.step(batch)
        other.step(batch)
        same = _digest(other, payloads) == _digest(trainer, payloads)
        expect(same, "the step after load() must be the one that would have come without it: the optimizer counts too")
    finally:
        other.close()
