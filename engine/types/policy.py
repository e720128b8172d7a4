"""Which weights produced what."""

from typing import NamedTuple


class PolicyVersion(NamedTuple):
    """A version of the policy: how many batches one incarnation of the learner has consumed.

    A skipped step (non-finite gradient) counts too. Ordered first by incarnation, then by version. A pair never means
    two different weights: a restart that cannot prove its weights equal starts a new incarnation.
    """

    incarnation: int
    version: int

    def __str__(self) -> str:
        return f"{self.version}" if self.incarnation == 0 else f"{self.incarnation}:{self.version}"


class VersionSpan(NamedTuple):
    """A run of consecutive response tokens that one version produced."""

    version: PolicyVersion
    num_tokens: int
