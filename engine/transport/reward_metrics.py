"""The names of a scorer's own figures: which of them a run keeps, and how it calls them.

Each becomes a key of the metrics rows, `reward/<name>` and `eval/<task>/<name>`, so their number must not follow from
what is scored: a scorer that makes a name of each sample's id would fill the rows, and the hub's memory, for ever.
"""

import logging
import re
from collections.abc import Mapping

log = logging.getLogger(__name__)

MAX_NAMES = 64
_ALLOWED = re.compile(r"[\w.@/+-]{1,64}", re.ASCII)
# Figures of the hub's own that stand beside a scorer's.
_TAKEN = frozenset({"failed", "latency_s", "avg@1"})


class MetricNames:
    """The names that one scorer has used so far.

    Invariants: there are at most `MAX_NAMES` of them; the first to come stay. None is that of a figure of the hub.
    """

    def __init__(self, scorer: str) -> None:
        """`scorer` heads the warning."""
        self._scorer = scorer
        self._names: set[str] = set()
        self._has_warned = False

    def keep(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The figures that a run keeps. A name that the hub has for itself gets `scorer_` before it.

        Dropped are names with other characters than letters, digits and `_ . @ / + -`, or with more than 64 of them,
        and names beyond `MAX_NAMES`; the log says so once.
        """
        kept: dict[str, float] = {}
        for given, value in metrics.items():
            name = f"scorer_{given}" if given in _TAKEN else given
            if name not in self._names and (len(self._names) == MAX_NAMES or not _ALLOWED.fullmatch(name)):
                self._warn(given)
                continue
            self._names.add(name)
            kept[name] = value
        return kept

    def _warn(self, name: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s gave the metric %.80r, which is left out, as further ones will be: names have at most 64 letters, "
                "digits and _ . @ / + -, and there are at most %d of them in a run",
                self._scorer,
                name,
                MAX_NAMES,
            )
