"""Typed errors across gRPC: each error class has a status code and travels by name, so that it arrives as itself."""

from collections.abc import Iterable
from typing import Protocol, cast

import grpc

from headrace.engine import errors
from headrace.engine.errors import ActorLostError, DeadlineError, HeadraceError, RunError

ERROR_KEY = "headrace-error"
_MAX_MESSAGE_CHARS = 2000

_CODES: dict[type[HeadraceError], grpc.StatusCode] = {
    errors.UsageError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.FormatError: grpc.StatusCode.DATA_LOSS,
    errors.DeadlineError: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.ActorLostError: grpc.StatusCode.UNAVAILABLE,
    errors.BufferFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.FencedError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WeightUpdateError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StorageError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.StoppedError: grpc.StatusCode.CANCELLED,
    errors.NoProgressError: grpc.StatusCode.ABORTED,
}


class RpcFailure(Protocol):
    """What both the blocking and the asyncio `RpcError` offer."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...

    def trailing_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


def code_of(error: HeadraceError) -> grpc.StatusCode:
    """The status code of an error: that of its nearest listed class, INTERNAL where none is listed."""
    for kind in type(error).__mro__:
        code = _CODES.get(kind)
        if code is not None:
            return code
    return grpc.StatusCode.INTERNAL


def message_of(error: HeadraceError) -> str:
    """The message, cut to what fits gRPC's metadata."""
    text = str(error)
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[: _MAX_MESSAGE_CHARS - 3] + "..."


def error_from_rpc(error: grpc.RpcError, doing: str) -> HeadraceError:
    """The typed error behind a failed call.

    Args:
        error: From a blocking or an asyncio stub.
        doing: What the call was for, e.g. "taking the batch of step 7 from unix:/x"; heads the message of errors that
            did not come from Headrace itself.
    """
    failure = cast(RpcFailure, error)
    details = failure.details() or ""
    for key, value in failure.trailing_metadata() or ():
        if key == ERROR_KEY:
            kind = getattr(errors, value if isinstance(value, str) else value.decode(), None)
            if isinstance(kind, type) and issubclass(kind, HeadraceError):
                return kind(details)
    code = failure.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"{doing}: no answer before the deadline")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return ActorLostError(f"{doing}: the other side is not reachable ({details or code.name})")
    return RunError(f"{doing}: {code.name}: {details}")
