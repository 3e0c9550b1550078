"""What the fields of a line may hold: the rules of the doors through which these values once came in.

A record that keeps them is one that the runtime itself could have written, so nothing that reads it later
is surprised. An id is an id (`runtara.ids`), a large value is no larger than ``payload_bytes``, and the
numbers from which the store counts on leave it room to do so.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from runtara.errors import ValidationError
from runtara.ids import check_id, check_name
from runtara.limits import MAX_DURATION_US
from runtara.records import (
    CheckpointRecord,
    CompensationAttemptRecord,
    CompensationSpec,
    ErrorRecord,
    EventRecord,
    InstanceRecord,
    PayloadKind,
    PutPayload,
    Reason,
    RequestRecord,
    RetryAttemptRecord,
    SetCompensation,
    SignalRecord,
    SignalType,
    Status,
    StepRecord,
    StepStatus,
    WaitRecord,
)
from runtara.transfer.items import FORMAT, VERSION, Header, Item
from runtara.validation import check_int, check_json_object

HIGHEST_NUMBER: Final = 2**62
"""Of epochs and revisions: the store counts on from them."""
SMALL_PARTS: Final = 64 * 1024
"""Bytes of a line besides its large values, at most."""


def check_number(value: object, field: str) -> None:
    check_int(value, field, least=1)
    at_most(value, field, HIGHEST_NUMBER)


def check_epoch(value: object, field: str) -> None:
    check_int(value, field)
    at_most(value, field, HIGHEST_NUMBER)


def at_most(value: Any, field: str, most: int) -> None:
    if value > most:
        raise ValidationError(field, f"must be at most {most}")


def check_count(value: object, field: str) -> None:
    check_int(value, field, least=1)


def check_delay(value: object, field: str) -> None:
    check_int(value, field)
    at_most(value, field, MAX_DURATION_US)


def check_wait_id(value: str, field: str) -> None:
    """A checkpoint id, or a name of the runtime's own, which may hold a whole request id."""
    check_id(value.removeprefix("~request:"), field)


def check_reason(value: str, field: str) -> None:
    if value.upper() not in Reason.__members__ or value != value.lower():
        raise ValidationError(field, "must be the word of a reason")


def check_status(value: Status, field: str) -> None:
    if value is Status.UNKNOWN:
        raise ValidationError(field, "must not be unknown")


def check_intended(value: Status, field: str) -> None:
    if value not in (Status.FAILED, Status.CANCELLED):
        raise ValidationError(field, "must be failed or cancelled")


def check_spec(value: CompensationSpec, field: str) -> None:
    check_id(value.step_id, f"{field}.step_id")


Check = Callable[[Any, str], object]

CHECKS: Final[Mapping[type[Any], Mapping[str, Check]]] = {
    Header: {"tenant_id": check_id},
    InstanceRecord: {
        "tenant_id": check_id,
        "instance_id": check_id,
        "workflow": check_id,
        "definition_version": check_id,
        "status": check_status,
        "epoch": check_epoch,
        "revision": check_number,
        "checkpoint_id": check_name,
        "attempt": check_int,
        "max_attempts": check_count,
        "intended": check_intended,
        "compensation_reason": check_reason,
        "peak_memory_bytes": check_int,
        "cpu_time_us": check_int,
    },
    CompensationAttemptRecord: {
        "revision": check_number,
        "checkpoint_id": check_name,
        "step_id": check_id,
        "attempt": check_count,
        "error_id": check_count,
    },
    CheckpointRecord: {
        "revision": check_number,
        "checkpoint_id": check_name,
        "compensation": check_spec,
    },
    SetCompensation: {"checkpoint_id": check_name, "attempts": check_int},
    WaitRecord: {"revision": check_number, "wait_id": check_wait_id, "key": check_name},
    EventRecord: {"revision": check_number, "subtype": check_id, "checkpoint_id": check_name},
    StepRecord: {"revision": check_number, "end_revision": check_number},
    SignalRecord: {"revision": check_number, "key": check_name, "epoch": check_epoch},
    RetryAttemptRecord: {
        "revision": check_number,
        "checkpoint_id": check_name,
        "attempt": check_count,
        "retry_after_us": check_delay,
        "error_code": check_id,
    },
    ErrorRecord: {
        "revision": check_number,
        "checkpoint_id": check_name,
        "step_id": check_id,
        "code": check_id,
        "retry_after_us": check_delay,
        "attributes": check_json_object,
        "cause_id": check_count,
    },
    RequestRecord: {"revision": check_number, "request_id": check_id, "answer": check_json_object},
}
"""The rules of the doors through which these values came into the runtime."""

LARGE: Final[Mapping[type[Any], tuple[str, ...]]] = {
    PutPayload: ("data",),
    CompensationAttemptRecord: ("error_message",),
    CheckpointRecord: ("state", "compensation"),
    EventRecord: ("payload", "scope_id", "parent_scope_id"),
    SignalRecord: ("payload",),
    RetryAttemptRecord: ("error",),
    ErrorRecord: ("message", "attributes"),
    StepRecord: ("step_id", "step_name", "step_type", "scope_id", "parent_scope_id"),
    RequestRecord: ("digest", "answer"),
}
"""Fields whose size is bounded by the setting ``payload_bytes``."""


def size_limit(record: Item, payload_bytes: int) -> int:
    """Of each large value. Bytes that were no text have grown when they became the text of an error."""
    grows = isinstance(record, PutPayload) and record.kind is PayloadKind.ERROR
    return 3 * payload_bytes if grows else payload_bytes


def line_limit(payload_bytes: int) -> int:
    """Bytes of the longest line: two large texts of which every character is escaped."""
    return 2 * 6 * payload_bytes + SMALL_PARTS


def size_of(value: Any) -> int:
    if isinstance(value, CompensationSpec):
        return len(value.data)
    return len(value.encode()) if isinstance(value, str) else len(value or b"")


def check_item(record: Item, payload_bytes: int) -> None:
    """Raises `ValidationError` for a field that no part of the program would have made."""
    for name, check in CHECKS.get(type(record), {}).items():
        value = getattr(record, name)
        if value is not None:
            check(value, name)
    limit = size_limit(record, payload_bytes)
    for name in LARGE.get(type(record), ()):
        if (size := size_of(getattr(record, name))) > limit:
            raise ValidationError(name, f"is {size} bytes long, the limit is {limit} (RUNTARA_PAYLOAD_BYTES)")
    check_whole(record)


def check_whole(record: Item) -> None:
    """Fields that must agree with one another."""
    match record:
        case InstanceRecord() if record.status.is_terminal == (record.finished_us is None):
            raise ValidationError("finished_us", "must be there if and only if the status is terminal")
        case StepRecord():
            ended = record.status is not StepStatus.RUNNING
            for name in ("finished_us", "end_revision"):
                if ended == (getattr(record, name) is None):
                    raise ValidationError(name, "must be there if and only if the step has ended")
        case SignalRecord() if (record.type is SignalType.CUSTOM) == (record.key is None):
            raise ValidationError("key", "must be there if and only if the type is custom")


def check_version(found: Mapping[str, Any]) -> None:
    """Before the other keys of a header are looked at: another version may have others."""
    if found.get("format") != FORMAT:
        raise ValidationError("format", f"must be {FORMAT}: this is no export")
    if found.get("version") != VERSION:
        raise ValidationError("version", f"must be {VERSION}: another version of this program wrote it")
