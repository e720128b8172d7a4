"""One sample from an inference backend to a finished trajectory."""

import contextlib

import numpy as np

from headrace.actors.rollout.rendering import Renderer
from headrace.engine.clock import Clock
from headrace.engine.errors import RunError
from headrace.engine.interfaces import InferenceBackend
from headrace.engine.types import FinishReason, GenerateRequest, PolicyVersion, PromptGroup, Trajectory, VersionSpan


class SampleBuilder:
    """Collects the chunks of one response.

    Invariants: as many log-probabilities as ids; spans merge neighbours of one version and sum to the length; versions
    never go back.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, ids: tuple[int, ...], logprobs: tuple[float, ...], version: PolicyVersion) -> None:
        """Append a chunk.

        Raises:
            RunError: The backend's chunk breaks an invariant.
        """
        if len(ids) != len(logprobs):
            raise RunError(f"the inference backend gave {len(ids)} tokens with {len(logprobs)} log-probabilities")
        if not ids:
            return
        if self._spans and version < self._spans[-1].version:
            raise RunError(f"the inference backend went back from version {self._spans[-1].version} to {version}")
        self._ids.extend(ids)
        self._logprobs.extend(logprobs)
        if self._spans and self._spans[-1].version == version:
            self._spans[-1] = VersionSpan(version, self._spans[-1].num_tokens + len(ids))
        else:
            self._spans.append(VersionSpan(version, len(ids)))

    def finish(
        self,
        group: PromptGroup,
        sample_index: int,
        prompt_ids: tuple[int, ...],
        finish_reason: FinishReason,
        renderer: Renderer,
        started_at_s: float,
        finished_at_s: float,
    ) -> Trajectory:
        """The trajectory; every token was sampled by the policy, so the whole mask is 1.

        Raises:
            RunError: The response is empty.
        """
        if not self._ids:
            raise RunError(f"the inference backend gave no token for sample {sample_index} of group {group.group_id}")
        return Trajectory(
            record_id=f"{group.group_id}/{sample_index}/{group.attempt}",
            group_id=group.group_id,
            prompt_id=group.prompt.prompt_id,
            sample_index=sample_index,
            group_size=group.group_size,
            attempt=group.attempt,
            prompt_token_ids=np.array(prompt_ids, np.int32),
            response_token_ids=np.array(self._ids, np.int32),
            logprobs=np.array(self._logprobs, np.float32),
            loss_mask=np.ones(len(self._ids), np.uint8),
            spans=tuple(self._spans),
            finish_reason=finish_reason,
            temperature=group.sampling.temperature,
            prompt_text=renderer.text_of(prompt_ids),
            response_text=renderer.text_of(self._ids),
            data=group.prompt.data,
            started_at_s=started_at_s,
            finished_at_s=finished_at_s,
        )


async def sample_once(
    backend: InferenceBackend,
    renderer: Renderer,
    group: PromptGroup,
    sample_index: int,
    prompt_ids: tuple[int, ...],
    clock: Clock,
) -> Trajectory:
    """Generate one sample of a group to its end. Cancelling aborts the request in the backend.

    Raises:
        RunError: The request was aborted by someone else, or the stream ended without a finish reason.
        WeightUpdateError: The backend serves an older version than the group asks for.
    """
    builder = SampleBuilder()
    started_at_s = clock.wall()
    request = GenerateRequest(
        request_id=f"{group.group_id}/{sample_index}/{group.attempt}",
        token_ids=prompt_ids,
        sampling=group.sampling,
        min_version=group.min_version,
    )
    async with contextlib.aclosing(backend.generate(request)) as chunks:
        async for chunk in chunks:
            builder.add(chunk.token_ids, chunk.logprobs, chunk.policy_version)
            if chunk.finish_reason is FinishReason.ABORTED:
                raise RunError(f"request {request.request_id} was aborted after {len(builder)} tokens")
            if chunk.finish_reason is not FinishReason.NONE:
                return builder.finish(
                    group, sample_index, prompt_ids, chunk.finish_reason, renderer, started_at_s, clock.wall()
                )
    raise RunError(f"the stream of request {request.request_id} ended without a finish reason")
