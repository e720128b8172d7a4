"""A run's events, from the messages of the hub's Watch stream."""

import msgspec

from headrace.engine.errors import FormatError
from headrace.engine.hub.members import ROLE_NAMES
from headrace.engine.telemetry.events import Activity, Ended, LogLine, MetricsRow, RunEvent, RunStatus
from headrace.v1 import control_pb2 as pb


def event_from_proto(message: pb.WatchResponse) -> RunEvent | None:
    """The event, or None where a newer hub tells of something that is not known here.

    Raises:
        FormatError: The message is not what a hub sends.
    """
    try:
        return _event(message)
    except msgspec.DecodeError as error:  # of which ValidationError is one
        raise FormatError(f"an event of the run cannot be read: {error}") from error


def _event(message: pb.WatchResponse) -> RunEvent | None:
    match message.WhichOneof("event"):
        case "metrics_json":
            return msgspec.json.decode(message.metrics_json, type=MetricsRow)
        case "log_line":
            return LogLine(text=message.log_line)
        case "activity":
            activity = message.activity
            return Activity(
                role=ROLE_NAMES.get(activity.role, "hub"),
                member=activity.rank,
                doing=activity.doing,
                since_s=activity.since_s,
            )
        case "status":
            return _status(message.status)
        case _:
            return None


def _status(status: pb.GetStatusResponse) -> RunStatus:
    return RunStatus(
        step=status.step,
        num_steps=status.num_steps,
        ended=msgspec.convert(status.ended, Ended),
        error=status.error or None,
        model=status.model,
        backend=status.backend,
        groups_in_flight=status.num_in_flight,
        groups_ready=status.num_ready,
    )
