"""What a table accepts: verdicts on records and columns before room is asked for. Pure."""

from headrace.buffers.groups import DUPLICATE, GroupState, PutStatus, PutVerdict, StoredRecord
from headrace.buffers.index import GroupIndex
from headrace.buffers.past import PastGroups
from headrace.engine.errors import FormatError, SchemaError
from headrace.engine.records import TableSchema, decode_column
from headrace.engine.types.records import RecordHeader


def judge_record(header: RecordHeader, index: GroupIndex, past: PastGroups) -> PutVerdict | None:
    """The verdict on a record that needs no room, or None for one that may be stored."""
    malformed = _malformed(header)
    if malformed:
        return refused(f"record {header.record_id!r} cannot be stored: {malformed}")
    known = index.records.get(header.record_id)
    if known is not None:
        if (known.header.group_id, known.header.attempt) == (header.group_id, header.attempt):
            return DUPLICATE
        return refused(f"record id {header.record_id!r} is taken by another group or attempt")
    group = index.groups.get(header.group_id)
    if group is None or header.attempt < group.attempt:
        return past.verdict(header, None if group is None else group.attempt)
    name = f"group {header.group_id!r} attempt {group.attempt}"
    if group.state is not GroupState.WAITING:
        return refused(f"record {header.record_id!r} comes too late: {name} is {group.state.value}")
    if header.attempt > group.attempt:
        return None
    if header.group_size != group.size:
        return refused(f"record {header.record_id!r} names {header.group_size} samples, but {name} has {group.size}")
    taken = group.records.get(header.sample_index)
    if taken is not None:
        return refused(f"sample {header.sample_index} of {name} is already here as {taken.header.record_id!r}")
    return None


def judge_column(record: StoredRecord, name: str, data: bytes, schema: TableSchema) -> PutVerdict | None:
    """The verdict on a column of a stored record, or None for one that may be added."""
    record_id = record.header.record_id
    present = record.columns.get(name)
    if present is not None:
        if present == data:
            return DUPLICATE
        return refused(f"record {record_id!r} already has another column {name!r}; columns never change")
    try:
        encoded_name, array = decode_column(data)
        if encoded_name != name:
            return refused(f"column {name!r} of record {record_id!r} is encoded as {encoded_name!r}")
        schema.check(name, array, record.header.num_response_tokens)
    except (FormatError, SchemaError) as error:
        return refused(f"column {name!r} of record {record_id!r}: {error}")
    return None


def refused(reason: str) -> PutVerdict:
    """A verdict that says why trying again is of no use."""
    return PutVerdict(PutStatus.REFUSED, reason)


def _malformed(header: RecordHeader) -> str:
    """What is wrong with a header by itself; empty when nothing is."""
    if not header.record_id or not header.group_id:
        return "its record_id or group_id is empty"
    if header.group_size < 1 or not 0 <= header.sample_index < header.group_size:
        return f"sample_index {header.sample_index} does not lie in a group of {header.group_size}"
    if header.attempt < 0 or header.num_prompt_tokens < 0 or header.num_response_tokens < 0:
        return "its attempt or a token count is negative"
    return ""
