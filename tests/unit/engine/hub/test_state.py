"""What all parts of a hub share does not grow with the run."""

from typing import Any, cast

from headrace.engine.hub.state import HubState


class LongRun:
    """A window far into a run; the rest of the flow is not looked at."""

    step = 1000

    @property
    def window(self) -> "LongRun":
        return self


def test_token_counts_that_nobody_reports_are_forgotten_and_those_of_late_steps_kept(hub_state: HubState) -> None:
    hub_state.flow = cast(Any, LongRun())
    hub_state.tokens_by_step = {step: 10 for step in range(1, 1002)}
    hub_state.progressed()
    assert min(hub_state.tokens_by_step) > 900 and {999, 1000, 1001} <= hub_state.tokens_by_step.keys()
