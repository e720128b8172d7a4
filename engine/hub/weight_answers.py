"""What receivers answer to an update, as figures and lines for people."""

from headrace.engine.hub.reporting import Reporting
from headrace.engine.types import AckStatus, PolicyVersion, WeightAck


def report_answer(
    reporting: Reporting, receiver: str, ack: WeightAck, *, newest: PolicyVersion | None, moved: bool, agent: bool
) -> None:
    """Write an answer down.

    Args:
        reporting: Of the run.
        receiver: Who answers.
        ack: Its answer.
        newest: The newest sealed version.
        moved: It serves the acknowledged version now.
        agent: It is an agent: no generation stands still for it.
    """
    add = reporting.parts.add
    if ack.fetch_s:
        add("weights/fetch_s", ack.fetch_s)
    if moved and not agent:
        add("weights/pause_s", ack.pause_s)
        add("weights/apply_s", ack.apply_s)
        if newest is not None and newest.incarnation == ack.version.incarnation:
            add("weights/lag", newest.version - ack.version.version)
    elif ack.status is not AckStatus.SERVING:
        why = f"{ack.status.name.lower()}: {ack.message}" if ack.message else ack.status.name.lower()
        reporting.say(f"{receiver} goes on with version {ack.version}: {why}")
