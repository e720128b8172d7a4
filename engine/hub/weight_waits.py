"""The waits of receivers that an agent serves, on the hub's board: people ask the hub, and only the agent knows."""

import contextlib
from collections.abc import Collection

from headrace.engine.hub.waits import Wait, WaitBoard


class AgentWaits:
    """For each agent the receivers of its host that wait for a newer version."""

    def __init__(self, board: WaitBoard) -> None:
        self._board = board
        self._waits: dict[tuple[str, str], contextlib.ExitStack] = {}

    def set(self, agent: str, receivers: Collection[str]) -> None:
        """These wait now, and no others behind this agent; none once it has left."""
        now = {(agent, receiver) for receiver in receivers}
        before = {key for key in self._waits if key[0] == agent}
        for key in before - now:
            self._waits.pop(key).close()
        for key in sorted(now - before):
            wait = Wait(role="weights", member=key[1], waits_for="a newer version", on_whom="the learner")
            stack = self._waits[key] = contextlib.ExitStack()
            stack.enter_context(self._board.waiting(wait))
