"""Conformance of an `InferenceBackend` to what weight updates ask of it."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from headrace.engine.interfaces import InferenceBackend
from headrace.engine.testing.delta_samples import damaged_copy, flipped_signs, make_change_update, state_of
from headrace.engine.testing.expect import expect, within
from headrace.engine.testing.inference_streams import InferenceCase, count_tokens, first_chunk, read_stream
from headrace.engine.types import AckStatus, FinishReason, PolicyVersion, UpdateKind, WeightUpdate

MakeUpdate = Callable[[PolicyVersion], WeightUpdate]


async def check_updates(backend: InferenceBackend, case: InferenceCase, make_update: MakeUpdate) -> None:
    """Every rule of `apply`, on a backend that is started and idle.

    Raises:
        AssertionError: With one sentence on the first rule that is broken.
    """
    served = (await backend.state()).policy_version
    await _check_apply(backend, case, make_update(_after(served)))
    await _check_failed_apply(backend, case, make_update)
    if case.deltas:
        with tempfile.TemporaryDirectory(prefix="headrace-check-") as folder:
            await _check_deltas(backend, case, make_update, Path(folder))


def _after(version: PolicyVersion) -> PolicyVersion:
    return PolicyVersion(version.incarnation, version.version + 1)


async def _check_apply(backend: InferenceBackend, case: InferenceCase, update: WeightUpdate) -> None:
    state = await backend.state()
    old, new = state.policy_version, update.manifest.version
    chunks = backend.generate(case.request("across"))
    first = await first_chunk(chunks, case, "a sample")
    produced = (await backend.state()).num_tokens - state.num_tokens
    expect(first.policy_version == old, "tokens produced before an update must carry the old version")
    ack = await within(backend.apply(update), case.timeout_s, "apply() must return while requests run")
    expect(ack.status is AckStatus.SERVING, f"a good update must be acknowledged as SERVING, not {ack.status.name}")
    expect(ack.version == new, "the ack of a good update must name the update's version")
    expect(ack.digest == update.manifest.digest, "the ack of a good update must have the update's digest")
    expect((await backend.state()).policy_version == new, "state() must tell the new version once apply() has returned")
    rest = await read_stream(chunks, case, "a sample across an update")
    versions = [chunk.policy_version for chunk in rest]
    expect(versions == sorted(versions), "versions must not go back within a sample")
    expect(set(versions) <= {old, new}, "a token must carry the version that was served when it was produced")
    num_old = count_tokens([chunk for chunk in [first, *rest] if chunk.policy_version == old])
    expect(num_old >= produced, "a token must carry the version that was served when it was produced, not delivered")
    expect(rest[-1].finish_reason is not FinishReason.ABORTED, "an update must not abort a running request")
    expect(versions[-1] == new, "tokens produced after an update must carry the new version")
    fresh = await read_stream(
        backend.generate(case.request("fresh", 4, min_version=new)), case, "a sample after an update"
    )
    expect(
        all(chunk.policy_version == new for chunk in fresh),
        "a request sent after an update must carry the new version alone",
    )


async def _check_failed_apply(backend: InferenceBackend, case: InferenceCase, make_update: MakeUpdate) -> None:
    served = (await backend.state()).policy_version
    new = PolicyVersion(served.incarnation, served.version + 1)
    good = make_update(new)
    far = PolicyVersion(served.incarnation, served.version + 41)
    delta = msgspec.structs.replace(good.manifest, kind=UpdateKind.DELTA, base=far)
    bad = {
        "a delta against another base": msgspec.structs.replace(good, manifest=delta),
        "an update whose payload is missing": msgspec.structs.replace(good, local_path=good.local_path + ".missing"),
    }
    await _check_refused(backend, case, bad)


async def _check_refused(backend: InferenceBackend, case: InferenceCase, bad: Mapping[str, WeightUpdate]) -> None:
    """None of the updates may be served, and after each the old version is."""
    served = (await backend.state()).policy_version
    for name, update in bad.items():
        try:
            ack = await within(backend.apply(update), case.timeout_s, f"apply() of {name} must return")
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"apply() of {name} must not raise; {type(error).__name__} was raised") from error
        expect(ack.status is not AckStatus.SERVING, f"{name} must not be acknowledged as SERVING")
        expect(ack.version == served, f"the ack of {name} must name the version that is still served")
        expect((await backend.state()).policy_version == served, f"after {name} the old version must be served")
        chunks = await read_stream(backend.generate(case.request(f"after {name}", 4)), case, f"a sample after {name}")
        expect(
            all(chunk.policy_version == served for chunk in chunks),
            f"a sample after {name} must carry the old version",
        )


async def _check_deltas(backend: InferenceBackend, case: InferenceCase, make_update: MakeUpdate, folder: Path) -> None:
    """A change of the served state is served; one of any other, or a damaged one, leaves the old version served."""
    base = make_update(_after((await backend.state()).policy_version))
    ack = await within(backend.apply(base), case.timeout_s, "apply() must return")
    expect(ack.status is AckStatus.SERVING, f"a good update must be acknowledged as SERVING, not {ack.status.name}")
    state = flipped_signs(state_of(base))
    good = make_change_update(base, state, _after(base.manifest.version), folder / "good")
    await _check_apply(backend, case, good)
    late = make_change_update(base, state, _after(good.manifest.version), folder / "late")
    ack = await within(backend.apply(late), case.timeout_s, "apply() must return")
    expect(ack.status is AckStatus.WRONG_BASE, f"a delta from an old base must be WRONG_BASE, not {ack.status.name}")
    following = make_change_update(good, state_of(base), late.manifest.version, folder / "next", before=state)
    digest = following.manifest.digest ^ 1
    bad = {
        "a delta from an old base": late,
        "a damaged delta": damaged_copy(following, folder / "damaged"),
        "a delta with another one's file": msgspec.structs.replace(following, local_path=good.local_path),
        "a delta of another digest than its file's": msgspec.structs.replace(
            following, manifest=msgspec.structs.replace(following.manifest, digest=digest)
        ),
    }
    await _check_refused(backend, case, bad)
    await _check_apply(backend, case, following)
    await _check_apply(backend, case, make_update(_after(following.manifest.version)))
