"""A batch scorer, as a reward model would be: one call gets many samples, so a forward pass can share its cost.

Run `headrace reward serve batched_length.py:score --workers 1`.
"""

from headrace.clients.reward import RewardOutcome, RewardSample, RewardStatus, batched

TARGET_CHARS = 200


@batched
def score(samples: list[RewardSample]) -> list[RewardOutcome | float]:
    """1 at 200 characters, falling to 0 at none and at 400; an empty response is not judged."""
    results: list[RewardOutcome | float] = []
    for sample in samples:
        if sample.response_text:
            results.append(max(0.0, 1.0 - abs(len(sample.response_text) - TARGET_CHARS) / TARGET_CHARS))
        else:
            message = "an empty response has no length to judge"
            results.append(RewardOutcome(sample_id="", status=RewardStatus.ABSTAIN, message=message))
    return results
