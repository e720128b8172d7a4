"""What all parts of a hub share does not grow with the run."""

from typing import Any, cast

import msgspec

from headrace.engine.hub.members import Member
from headrace.engine.hub.state import HubState
from headrace.v1 import control_pb2 as pb


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


def test_the_time_in_which_a_member_loads_does_not_count_as_standing_still_once_it_is_ready(
    hub_state: HubState,
) -> None:
    timeouts = msgspec.structs.replace(hub_state.config.timeouts, no_progress_s=30.0, start_s=60.0)
    hub_state.config = msgspec.structs.replace(hub_state.config, timeouts=timeouts)
    hub_state.last_progress_s = 0.0
    learner = Member(member_id="learner-0", role="learner", rank=0, pid=1, host="h", heard_s=0.0, moved_s=0.0)
    hub_state.members.join(learner)
    assert hub_state.stands_still(80.0) is None
    learner.phase = pb.PHASE_READY
    assert hub_state.stands_still(100.0) is None  # it has been ready for 20 s at most
    assert hub_state.stands_still(111.0) == 31.0


def test_loading_for_ever_is_standing_still_too(hub_state: HubState) -> None:
    timeouts = msgspec.structs.replace(hub_state.config.timeouts, no_progress_s=30.0, start_s=60.0)
    hub_state.config = msgspec.structs.replace(hub_state.config, timeouts=timeouts)
    hub_state.last_progress_s = 0.0
    hub_state.members.join(
        Member(member_id="learner-0", role="learner", rank=0, pid=1, host="h", heard_s=0.0, moved_s=0.0)
    )
    assert hub_state.stands_still(90.0) is None
    assert hub_state.stands_still(91.0) == 91.0
