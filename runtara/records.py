"""What is stored: frozen records, and the changes made to them.

Rules:

1. All times are integers: microseconds of UTC since 1970 (``_us``). Durations are microseconds too.
2. A record never names its instance: it belongs to the unit (see `Unit`) that writes it, or to the
   instance that was asked for.
3. Every appended record carries the ``revision`` of the change that made it. Within one instance and one
   table a revision occurs once, so it is also the record's id: signal ids, error ids and event ids are
   revisions. There is no second counter.
4. `InstanceRecord` is the row that moves: it is written whole, and only when something in it changed that
   a restart must know. Large values are never in it (`Payload`), so a status never rewrites a blob.
"""

import datetime
import enum
from typing import Final

import attrs

from runtara.payloads import json_object

EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def to_datetime(us: int) -> datetime.datetime:
    """The aware UTC datetime of an instant in microseconds."""
    return EPOCH + datetime.timedelta(microseconds=us)


def to_us(instant: datetime.datetime) -> int:
    """Microseconds of UTC of an aware datetime, exact.

    Raises:
        ValueError: ``instant`` has no time zone.
    """
    if instant.tzinfo is None:
        raise ValueError("a naive datetime has no place on the time line; give it a time zone")
    return (instant - EPOCH) // datetime.timedelta(microseconds=1)


# ---------------------------------------------------------------- words with numbers


class Named(enum.IntEnum):
    """A closed set of words; the number is what is stored and what the older protocol sends."""

    def __bool__(self) -> bool:
        """True for every member: a word with the number 0 is not nothing."""
        return True

    @property
    def word(self) -> str:
        """The word as it stands on the wire: lower case."""
        return self.name.lower()


class Status(Named):
    """Where an instance is."""

    UNKNOWN = 0
    PENDING = 1
    RUNNING = 2
    SUSPENDED = 3
    COMPLETED = 4
    FAILED = 5
    CANCELLED = 6

    @property
    def is_terminal(self) -> bool:
        return self >= Status.COMPLETED


class Reason(Named):
    """Why an instance is where it is."""

    SLEEPING = 1
    WAITING_SIGNAL = 2
    PAUSED = 3
    SHUTDOWN_REQUESTED = 4
    DISCONNECTED = 5
    COMPENSATING = 6
    COMPLETED = 7
    APPLICATION_ERROR = 8
    CANCELLED = 9
    CRASHED = 10
    TIMEOUT = 11
    ATTEMPTS_EXHAUSTED = 12
    ORPHANED = 13


class SignalType(Named):
    """Instance-wide signals, and `CUSTOM` for those addressed to a key."""

    CANCEL = 0
    PAUSE = 1
    RESUME = 2
    SHUTDOWN = 3
    CUSTOM = 4


class EventType(Named):
    """What an instance reports."""

    HEARTBEAT = 0
    STARTED = 1
    COMPLETED = 2
    FAILED = 3
    SUSPENDED = 4
    CUSTOM = 5


class ErrorCategory(Named):
    UNKNOWN = 0
    TRANSIENT = 1
    PERMANENT = 2
    BUSINESS = 3


class ErrorSeverity(Named):
    INFO = 0
    WARNING = 1
    ERROR = 2
    CRITICAL = 3


class RetryHint(Named):
    UNKNOWN = 0
    RETRY_IMMEDIATELY = 1
    RETRY_WITH_BACKOFF = 2
    RETRY_AFTER = 3
    DO_NOT_RETRY = 4


class CompensationState(Named):
    """Of one compensation, and of an instance as a whole."""

    NONE = 0
    PENDING = 1
    TRIGGERED = 2
    COMPLETED = 3
    FAILED = 4


class WaitKind(Named):
    SLEEP = 0
    SIGNAL = 1
    RETRY = 2


class WaitOutcome(Named):
    """How a wait ended: its time came, its signal came, or the time ran out before the signal."""

    ELAPSED = 0
    RECEIVED = 1
    TIMED_OUT = 2


class StepStatus(Named):
    """How a step that an instance reported is going."""

    RUNNING = 0
    COMPLETED = 1
    FAILED = 2


class PayloadKind(Named):
    """The large values of an instance, each in a row of its own."""

    INPUT = 0
    OUTPUT = 1
    ERROR = 2
    STDERR = 3


# ---------------------------------------------------------------- the row that moves


@attrs.frozen(kw_only=True)
class InstanceRecord:
    """One row of ``instances``: everything of an instance but its large values and its history."""

    row: int
    """Key in the store. Never used again, not even for a purged id."""
    tenant_id: str
    instance_id: str
    workflow: str | None = None
    definition_version: str | None = None
    hosted: bool = False
    """Whether the runtime dispatches it (it was started for a workflow) or its client brings it to life."""
    status: Status
    reason: Reason | None = None
    epoch: int = 0
    """Of the newest session or launch; 0 before the first."""
    revision: int
    """Of the change that last wrote this row; the newest revision of the instance may be higher."""
    checkpoint_id: str | None = None
    """The newest checkpoint when this row was written. `InstanceView` tells the newest one."""
    attempt: int = 0
    """Executions begun that nobody asked to end: the first one, and one more for each crash."""
    max_attempts: int = 3
    created_us: int
    started_us: int | None = None
    """Of the first start; kept for ever."""
    finished_us: int | None = None
    """Set if and only if the status is terminal."""
    last_activity_us: int
    sleep_until_us: int | None = None
    """The earliest deadline of the open waits, or None when no time can move the instance."""
    deadline_us: int | None = None
    """The instant at which the whole instance times out."""
    awaits_client_us: int | None = None
    """Since when nothing but its client can move the instance."""
    cancelling_us: int | None = None
    """When cancelling began, kept until the instance has ended."""
    intended: Status | None = None
    """How the instance ends once its compensations have: `FAILED` or `CANCELLED`."""
    compensation_state: CompensationState = CompensationState.NONE
    compensation_reason: str | None = None
    exit_code: int | None = None
    peak_memory_bytes: int | None = None
    cpu_time_us: int | None = None

    @property
    def compensating(self) -> bool:
        return self.intended is not None and not self.status.is_terminal

    @property
    def paused(self) -> bool:
        return self.status is Status.SUSPENDED and self.reason is Reason.PAUSED

    @property
    def due_us(self) -> int | None:
        """The instant at which time moves the instance: the earlier of its wait's and its own deadline."""
        if self.status.is_terminal:
            return None
        return min((d for d in (self.sleep_until_us, self.deadline_us) if d is not None), default=None)

    @property
    def termination_reason(self) -> Reason | None:
        """The reason of a terminal instance; None while it lives."""
        return self.reason if self.status.is_terminal else None

    @property
    def created_at(self) -> datetime.datetime:
        return to_datetime(self.created_us)

    @property
    def started_at(self) -> datetime.datetime | None:
        return None if self.started_us is None else to_datetime(self.started_us)

    @property
    def finished_at(self) -> datetime.datetime | None:
        return None if self.finished_us is None else to_datetime(self.finished_us)

    @property
    def sleep_until(self) -> datetime.datetime | None:
        return None if self.sleep_until_us is None else to_datetime(self.sleep_until_us)


# ---------------------------------------------------------------- appended records


@attrs.frozen(kw_only=True)
class CompensationSpec:
    """What undoes a checkpoint: the step to run, its data, and when in the order (highest first)."""

    step_id: str
    data: bytes = b""
    order: int = 0


@attrs.frozen(kw_only=True)
class CheckpointRecord:
    """A named, write-once result."""

    revision: int
    checkpoint_id: str
    state: bytes
    created_us: int
    compensation: CompensationSpec | None = None

    @property
    def is_compensatable(self) -> bool:
        return self.compensation is not None

    @property
    def created_at(self) -> datetime.datetime:
        return to_datetime(self.created_us)


@attrs.frozen(kw_only=True)
class WaitRecord:
    """A sleep, a wait for a signal, or the back-off of a retry. First entry fixes the deadline."""

    revision: int
    wait_id: str
    """The checkpoint id it was asked under, or ``~`` and a name of the runtime's own."""
    kind: WaitKind
    key: str | None = None
    """The signal key waited for; None for a sleep."""
    deadline_us: int | None
    """None: a wait for a signal without a timeout."""
    created_us: int
    outcome: WaitOutcome | None = None
    settled_us: int | None = None

    @property
    def open(self) -> bool:
        return self.outcome is None


@attrs.frozen(kw_only=True)
class EventRecord:
    """What an instance reported."""

    revision: int
    type: EventType
    subtype: str | None = None
    checkpoint_id: str | None = None
    payload: bytes | None = None
    created_us: int
    """The caller's timestamp where it is in range, else the time of acceptance."""
    applied: bool = True
    """Whether it changed the instance; a completion that came too late is stored and not applied."""
    scope_id: str | None = None
    """Of a custom event whose payload is a JSON object with this key; so is ``parent_scope_id``."""
    parent_scope_id: str | None = None

    @property
    def created_at(self) -> datetime.datetime:
        return to_datetime(self.created_us)


@attrs.frozen(kw_only=True)
class StepRecord:
    """A step, as the custom events ``step_debug_start`` and ``step_debug_end`` told of it.

    A step that runs twice in one scope is two records. An end without a start makes none. What the events
    hold is not stored again: a list reads it back from them, for the steps of its page only.
    """

    revision: int
    """Of the event that began it."""
    step_id: str
    step_name: str | None = None
    step_type: str | None = None
    status: StepStatus = StepStatus.RUNNING
    scope_id: str | None = None
    parent_scope_id: str | None = None
    started_us: int
    finished_us: int | None = None
    end_revision: int | None = None
    """Of the event that ended it."""
    start_payload: bytes | None = None
    """Of the event that began it, where the list read it."""
    end_payload: bytes | None = None

    @property
    def started_at(self) -> datetime.datetime:
        return to_datetime(self.started_us)

    @property
    def completed_at(self) -> datetime.datetime | None:
        return None if self.finished_us is None else to_datetime(self.finished_us)

    @property
    def duration_ms(self) -> float | None:
        """True milliseconds, to the microsecond; never negative, whatever the caller's clock did."""
        return None if self.finished_us is None else max(0, self.finished_us - self.started_us) / 1000

    @property
    def inputs(self) -> object:
        """What the step was given, as JSON values; None if its event did not say."""
        return (json_object(self.start_payload) or {}).get("inputs")

    @property
    def outputs(self) -> object:
        """What the step gave, as JSON values."""
        return (json_object(self.end_payload) or {}).get("outputs")

    @property
    def error(self) -> object:
        """Why the step failed, as JSON values."""
        return (json_object(self.end_payload) or {}).get("error")


@attrs.frozen(kw_only=True)
class SignalRecord:
    """An accepted signal. It is kept after it was consumed, until the instance is purged."""

    revision: int
    type: SignalType
    key: str | None = None
    """The key of a custom signal; None for the others."""
    payload: bytes | None = None
    created_us: int
    epoch: int | None = None
    """Set for a drain's shutdown only: it dies with this epoch."""
    shown_us: int | None = None
    """When a session first saw it; written together with the acknowledgement."""
    acknowledged_us: int | None = None

    @property
    def signal_id(self) -> int:
        return self.revision

    @property
    def size(self) -> int:
        return len(self.payload or b"")

    @property
    def created_at(self) -> datetime.datetime:
        return to_datetime(self.created_us)


@attrs.frozen(kw_only=True)
class RetryAttemptRecord:
    """One attempt of a step, for the audit trail. Keyed by (checkpoint id, attempt)."""

    revision: int
    checkpoint_id: str
    attempt: int
    created_us: int
    error: str | None = None
    category: ErrorCategory = ErrorCategory.UNKNOWN
    severity: ErrorSeverity = ErrorSeverity.ERROR
    retry_hint: RetryHint = RetryHint.UNKNOWN
    retry_after_us: int | None = None
    error_code: str | None = None


@attrs.frozen(kw_only=True)
class ErrorRecord:
    """One structured error of the instance's history; ``cause_id`` is the id of an earlier one."""

    revision: int
    checkpoint_id: str | None = None
    step_id: str | None = None
    code: str
    message: str
    category: ErrorCategory = ErrorCategory.UNKNOWN
    severity: ErrorSeverity = ErrorSeverity.ERROR
    retry_hint: RetryHint = RetryHint.UNKNOWN
    retry_after_us: int | None = None
    attributes: str | None = None
    """A JSON object as text, or None."""
    cause_id: int | None = None
    created_us: int

    @property
    def error_id(self) -> int:
        return self.revision

    @property
    def created_at(self) -> datetime.datetime:
        return to_datetime(self.created_us)


@attrs.frozen(kw_only=True)
class CompensationRecord:
    """What is to be undone: one per compensatable checkpoint, without its data."""

    checkpoint_id: str
    step_id: str
    order: int
    revision: int
    """Of the checkpoint; ties in the order are broken by it, newest first."""
    state: CompensationState = CompensationState.PENDING
    attempts: int = 0


@attrs.frozen(kw_only=True)
class CompensationAttemptRecord:
    """One line of the compensation log."""

    revision: int
    checkpoint_id: str
    step_id: str
    attempt: int
    started_us: int
    finished_us: int | None = None
    success: bool | None = None
    error_message: str | None = None
    error_id: int | None = None


@attrs.frozen(kw_only=True)
class RequestRecord:
    """The memory of a request that is not idempotent by itself: same id, same answer."""

    revision: int
    request_id: str
    digest: bytes
    """Of the request's body; the same id with another body is a conflict."""
    answer: str
    """The reply, as JSON text."""


# ---------------------------------------------------------------- changes


@attrs.frozen(kw_only=True)
class PutPayload:
    """Write (or replace) one of the instance's large values."""

    kind: PayloadKind
    data: bytes


@attrs.frozen(kw_only=True)
class SettleWait:
    """Give an open wait its outcome."""

    wait_id: str
    outcome: WaitOutcome
    settled_us: int


@attrs.frozen(kw_only=True)
class AcknowledgeSignal:
    """Mark a signal consumed."""

    signal_id: int
    shown_us: int | None
    acknowledged_us: int


@attrs.frozen(kw_only=True)
class FinishStep:
    """End the step that the event of revision ``start_revision`` began."""

    start_revision: int
    end_revision: int
    status: StepStatus
    finished_us: int


@attrs.frozen(kw_only=True)
class SetCompensation:
    """Move one compensation to another state."""

    checkpoint_id: str
    state: CompensationState
    attempts: int


@attrs.frozen(kw_only=True)
class FinishCompensationAttempt:
    """End an open line of the compensation log."""

    checkpoint_id: str
    attempt: int
    finished_us: int
    success: bool
    error_message: str | None
    error_id: int | None


Op = (
    InstanceRecord
    | CheckpointRecord
    | WaitRecord
    | EventRecord
    | StepRecord
    | SignalRecord
    | RetryAttemptRecord
    | ErrorRecord
    | CompensationAttemptRecord
    | RequestRecord
    | PutPayload
    | SettleWait
    | FinishStep
    | AcknowledgeSignal
    | SetCompensation
    | FinishCompensationAttempt
)
"""What one change writes. An appended record is inserted (a checkpoint with a compensation also makes the
pending `CompensationRecord`); an `InstanceRecord` is inserted when the unit creates the instance, and
replaces the row otherwise."""
