"""Every error that Headrace raises on purpose.

    HeadraceError
    ├── UsageError                what the caller gave cannot be used; nothing was started      exit code 2
    │   ├── ConfigError           a configuration key or value
    │   ├── SchemaError           an unknown table or column, a wrong dtype or shape
    │   ├── InputError            bad tensors or rewards handed to a pure function
    │   └── PromptTooLongError    a prompt and its response do not fit the context
    └── RunError                  something went wrong while running                           exit code 1
        ├── FormatError           received bytes are not what they claim to be
        ├── DeadlineError         a wait reached its deadline; says for what and for whom
        ├── ActorLostError        a process or a connection ended before its work did
        ├── BufferFullError       a table is full and the caller did not want to wait
        ├── FencedError           the caller's lease or incarnation is no longer the current one
        ├── RewardError           a scorer failed in a way that the run's policy does not absorb
        ├── WeightUpdateError     an update was refused or failed; the old version is still served
        │   ├── WrongBaseError    a delta against a version that the receiver does not hold
        │   ├── UnknownLayoutError    it has other tensors than the served model, or it cannot be written there
        │   └── CorruptUpdateError    checksums, layout or extent do not agree
        ├── NonFiniteStreakError  too many steps in a row with non-finite gradients
        ├── StoppedError          the run is ending; not a failure of the one who hears it
        ├── NoProgressError       the run cannot go on (every group filtered, no worker left, ...)
        └── StorageError          the disk or shared memory is full or not writable

A message says what was given, what is allowed and what to change, in one sentence.
"""


class HeadraceError(Exception):
    """Base of all errors of this package."""

    exit_code = 1


class UsageError(HeadraceError, ValueError):
    """What the caller gave cannot be used; nothing was started and nothing was written."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration key or value is not allowed."""


class SchemaError(UsageError):
    """A table or column is unknown, or its dtype or shape is not the declared one."""


class InputError(UsageError):
    """Arrays or rewards handed to a pure function are out of its domain."""


class PromptTooLongError(UsageError):
    """A prompt and the response that is asked for do not fit the context together."""


class RunError(HeadraceError, RuntimeError):
    """Something went wrong while running."""


class FormatError(RunError):
    """Received bytes are not what they claim to be; nothing in them was executed."""


class DeadlineError(RunError, TimeoutError):
    """A wait reached its deadline."""


class ActorLostError(RunError):
    """A process or a connection ended before its work did."""


class BufferFullError(RunError):
    """A table is full and the caller did not want to wait."""


class FencedError(RunError):
    """The caller's lease or incarnation is no longer the current one."""


class RewardError(RunError):
    """A scorer failed in a way that the run's policy does not absorb."""


class WeightUpdateError(RunError):
    """A weight update was refused or failed; the old version is still served."""


class WrongBaseError(WeightUpdateError):
    """A delta names a base version that the receiver does not hold."""


class UnknownLayoutError(WeightUpdateError):
    """An update has other tensors than the served model, or of a kind that cannot be changed while it serves."""


class CorruptUpdateError(WeightUpdateError):
    """An update's checksums, layout or extent do not agree with its manifest."""


class NonFiniteStreakError(RunError):
    """Too many steps in a row had non-finite gradients."""


class StoppedError(RunError):
    """The run is ending; leave in an orderly way."""


class NoProgressError(RunError):
    """The run cannot go on as it is configured."""


class StorageError(RunError):
    """The disk or shared memory is full or not writable."""
