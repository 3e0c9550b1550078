"""What is said to an instance and by it: one frozen class per request, reply and push; closed unions.

Rules:

1. A request never names its instance: it is sent to the actor of one. What a session says carries the
   ``epoch`` of that session, and is refused as stale when a newer one exists.
2. Requests that are not idempotent by themselves carry a ``request_id`` chosen by the caller. The same id
   with the same body gets the same answer; with another body it is a conflict.
3. Pushes are copies of what is stored. Losing one loses nothing.
"""

import datetime

import attrs

from runtara.records import (
    CheckpointRecord,
    CompensationRecord,
    CompensationSpec,
    CompensationState,
    ErrorCategory,
    ErrorRecord,
    ErrorSeverity,
    EventType,
    InstanceRecord,
    Reason,
    RetryHint,
    SignalRecord,
    SignalType,
    Status,
    WaitKind,
    WaitOutcome,
    to_datetime,
)

# ---------------------------------------------------------------- requests of a session


@attrs.frozen(kw_only=True)
class Register:
    """Begin a session: a new epoch of the instance, which is created if it is new."""

    checkpoint_id: str | None = None
    """A checkpoint that must exist."""
    workflow: str | None = None
    definition_version: str | None = None


@attrs.frozen(kw_only=True)
class Attach:
    """Go on with the session of ``epoch``, whose connection was lost with the server that held it."""

    epoch: int


@attrs.frozen(kw_only=True)
class SaveCheckpoint:
    """Store a result under a name, or find the one stored before."""

    epoch: int
    checkpoint_id: str
    state: bytes | None = None
    """Absent or empty: only look."""
    compensation: CompensationSpec | None = None


@attrs.frozen(kw_only=True)
class GetCheckpoint:
    """Read a checkpoint. Never writes."""

    checkpoint_id: str


@attrs.frozen(kw_only=True)
class Sleep:
    """Wait for a time. The deadline is fixed when the same wait is first asked for."""

    epoch: int
    duration_us: int
    checkpoint_id: str | None = None
    state: bytes | None = None
    kind: WaitKind = WaitKind.SLEEP
    """`SLEEP`, or `RETRY` for the back-off before an attempt."""
    request_id: str | None = None
    """Names the wait when it has no checkpoint id, so that it can be asked for again."""


@attrs.frozen(kw_only=True)
class WaitSignal:
    """Consume the oldest custom signal for ``key``, recording it as ``checkpoint_id``; else wait for one."""

    epoch: int
    key: str
    checkpoint_id: str
    timeout_us: int | None = None


@attrs.frozen(kw_only=True)
class ReportEvent:
    """Report a heartbeat, an ending, a suspension, or an event of the caller's own."""

    epoch: int
    type: EventType
    subtype: str | None = None
    checkpoint_id: str | None = None
    payload: bytes | None = None
    timestamp_us: int | None = None
    wake_after_us: int | None = None
    """With `SUSPENDED` only: be woken so long from now. (In the older protocol an instant in the payload.)"""
    state: bytes | None = None
    """With ``wake_after_us`` only: the state of the checkpoint ``checkpoint_id``."""
    request_id: str | None = None


@attrs.frozen(kw_only=True)
class PollSignals:
    """Show what a checkpoint reply would carry. Consumes nothing."""

    epoch: int
    checkpoint_id: str | None = None


@attrs.frozen(kw_only=True)
class AckSignal:
    """Consume a signal: by its id, or the oldest of a type that was shown to this session."""

    epoch: int
    signal_id: int | None = None
    signal_type: SignalType | None = None
    acknowledged: bool = True


@attrs.frozen(kw_only=True)
class RecordRetryAttempt:
    """Put one attempt of a step into the audit trail."""

    epoch: int
    checkpoint_id: str
    attempt: int
    error: str | None = None
    timestamp_us: int | None = None
    category: ErrorCategory = ErrorCategory.UNKNOWN
    severity: ErrorSeverity = ErrorSeverity.ERROR
    retry_hint: RetryHint = RetryHint.UNKNOWN
    retry_after_us: int | None = None
    error_code: str | None = None


@attrs.frozen(kw_only=True)
class RecordError:
    """Put a structured error into the history; the reply carries its id."""

    epoch: int
    code: str
    message: str
    checkpoint_id: str | None = None
    step_id: str | None = None
    category: ErrorCategory = ErrorCategory.UNKNOWN
    severity: ErrorSeverity = ErrorSeverity.ERROR
    retry_hint: RetryHint = RetryHint.UNKNOWN
    retry_after_us: int | None = None
    attributes: str | None = None
    cause_id: int | None = None
    request_id: str | None = None


@attrs.frozen(kw_only=True)
class StartCompensation:
    """Begin an attempt to undo a checkpoint."""

    epoch: int
    checkpoint_id: str


@attrs.frozen(kw_only=True)
class FinishCompensation:
    """End the attempt. A failure that is not ``final`` leaves the compensation to be tried again."""

    epoch: int
    checkpoint_id: str
    attempt: int
    success: bool
    final: bool = True
    error_message: str | None = None
    error_id: int | None = None


@attrs.frozen(kw_only=True)
class ExitReport:
    """What became of an execution, said by whoever ran it. Applies only while running, at the same epoch."""

    epoch: int
    reason: Reason
    exit_code: int | None = None
    stderr: bytes | None = None
    checkpoint_id: str | None = None
    output: bytes | None = None
    error: str | None = None
    peak_memory_bytes: int | None = None
    cpu_time_us: int | None = None


# ---------------------------------------------------------------- requests of anyone allowed


@attrs.frozen(kw_only=True)
class GetStatus:
    """How the instance is now."""


@attrs.frozen(kw_only=True)
class StartInstance:
    """Create a pending instance of a workflow, or find the one that exists."""

    workflow: str
    input: bytes | None = None
    definition_version: str | None = None
    max_attempts: int = 3
    timeout_us: int | None = None
    request_id: str | None = None


@attrs.frozen(kw_only=True)
class SendSignal:
    """Store a signal and push it: instance-wide by its type, or custom to a ``key``."""

    type: SignalType
    key: str | None = None
    payload: bytes | None = None
    request_id: str | None = None
    """The idempotency key."""
    store_if_unknown: bool = False
    """Keep the signal until an instance that does not exist yet registers."""


@attrs.frozen(kw_only=True)
class ForceTerminate:
    """End the instance now, whatever it does. It becomes cancelled."""

    error: str | None = None


# ---------------------------------------------------------------- requests of the runtime itself


@attrs.frozen(kw_only=True)
class Wake:
    """A deadline was reached. Does nothing unless the instance still has this epoch and deadline."""

    epoch: int
    deadline_us: int


@attrs.frozen(kw_only=True)
class SessionLost:
    """The session of this epoch is over and its grace period too."""

    epoch: int
    orphaned: bool = False
    """True when it belonged to a runtime that died."""
    crashed: bool = True
    """False when the session was left in good order: that counts as no attempt."""


@attrs.frozen(kw_only=True)
class AskShutdown:
    """The runtime drains: ask the session of this epoch to suspend."""

    epoch: int


@attrs.frozen(kw_only=True)
class ForceSuspend:
    """The drain's grace period is over: suspend the session of this epoch, due at once."""

    epoch: int


SessionRequest = (
    SaveCheckpoint
    | Sleep
    | WaitSignal
    | ReportEvent
    | PollSignals
    | AckSignal
    | RecordRetryAttempt
    | RecordError
    | StartCompensation
    | FinishCompensation
    | ExitReport
)
"""What only the newest session may say; each carries its epoch."""

Request = (
    Register
    | Attach
    | SessionRequest
    | GetCheckpoint
    | GetStatus
    | StartInstance
    | SendSignal
    | ForceTerminate
    | Wake
    | SessionLost
    | AskShutdown
    | ForceSuspend
)


# ---------------------------------------------------------------- replies


@attrs.frozen(kw_only=True)
class Registered:
    """A session has begun."""

    epoch: int
    created: bool
    status: Status
    paused: bool
    due: bool
    """A deadline passed, or an awaited signal came, while no client was there."""
    attempt: int
    compensating: bool
    input: bytes | None
    checkpoint_id: str | None
    signals: tuple[SignalRecord, ...]
    """All pending ones, oldest first."""


@attrs.frozen(kw_only=True)
class CheckpointReply:
    """The stored state, and what waits for the instance."""

    found: bool
    state: bytes | None
    """What is stored now under this id; None if nothing is."""
    created_us: int | None = None
    signal: SignalRecord | None = None
    """The oldest pending instance-wide signal, a cancel first."""
    custom_signal: SignalRecord | None = None
    """The oldest unconsumed custom signal whose key is the checkpoint id."""
    last_error: ErrorRecord | None = None


@attrs.frozen(kw_only=True)
class FoundCheckpoint:
    """A checkpoint that was read, or None."""

    checkpoint: CheckpointRecord | None

    @property
    def found(self) -> bool:
        return self.checkpoint is not None

    @property
    def state(self) -> bytes | None:
        return None if self.checkpoint is None else self.checkpoint.state


@attrs.frozen(kw_only=True)
class WaitReply:
    """How a sleep or a wait ended, for now or for good."""

    outcome: WaitOutcome | None
    """None: it was ended early by ``signal`` and may be asked for again under the same id."""
    deadline_us: int | None
    payload: bytes | None = None
    """Of the consumed custom signal."""
    signal_id: int | None = None
    """Of the custom signal that this request consumed; None when its answer was recorded before."""
    signal: SignalRecord | None = None

    @property
    def interrupted(self) -> bool:
        return self.outcome is None

    @property
    def timed_out(self) -> bool:
        return self.outcome is WaitOutcome.TIMED_OUT

    @property
    def received(self) -> bool:
        return self.outcome is WaitOutcome.RECEIVED


@attrs.frozen(kw_only=True)
class EventReply:
    """Whether the event changed the instance, and how the instance is now."""

    applied: bool
    status: Status
    reason: Reason | None
    event_id: int | None
    """None for a heartbeat that was not stored."""


@attrs.frozen(kw_only=True)
class SignalsReply:
    """What a checkpoint reply would carry."""

    signal: SignalRecord | None
    custom_signal: SignalRecord | None
    last_error: ErrorRecord | None


@attrs.frozen(kw_only=True)
class AckReply:
    """Whether the acknowledgement consumed anything, and how the instance is now."""

    applied: bool
    status: Status
    reason: Reason | None
    signal_id: int | None
    compensating: bool = False


@attrs.frozen(kw_only=True)
class RetryReply:
    """Whether the attempt is new in the trail."""

    applied: bool


@attrs.frozen(kw_only=True)
class ErrorReply:
    """The id of a recorded error."""

    error_id: int


@attrs.frozen(kw_only=True)
class CompensationReply:
    """An attempt, and how the instance is now."""

    attempt: int
    status: Status
    pending: int
    """Compensations that have not ended."""


@attrs.frozen(kw_only=True)
class ChangeReply:
    """Whether a guarded change applied, and how the instance is now."""

    applied: bool
    status: Status
    reason: Reason | None


@attrs.frozen(kw_only=True)
class SignalReply:
    """A signal was accepted."""

    signal_id: int
    status: Status
    reason: Reason | None
    applied: bool
    """True if it took effect at once; False if it is pending until the session acknowledges it."""


@attrs.frozen(kw_only=True)
class StartReply:
    """A pending instance, or the one that exists."""

    created: bool
    status: Status


@attrs.frozen(kw_only=True)
class InstanceView:
    """All of an instance but its history: the row, and what is only in memory or in other tables."""

    record: InstanceRecord
    revision: int
    checkpoint_id: str | None
    last_activity_us: int
    unconsumed_signals: int
    connected: bool
    input: bytes | None = None
    output: bytes | None = None
    error: str | None = None
    stderr: bytes | None = None

    @property
    def instance_id(self) -> str:
        return self.record.instance_id

    @property
    def status(self) -> Status:
        return self.record.status

    @property
    def reason(self) -> Reason | None:
        return self.record.reason

    @property
    def epoch(self) -> int:
        return self.record.epoch

    @property
    def last_activity(self) -> datetime.datetime:
        return to_datetime(self.last_activity_us)

    @property
    def created_at(self) -> datetime.datetime:
        return self.record.created_at

    @property
    def started_at(self) -> datetime.datetime | None:
        return self.record.started_at

    @property
    def finished_at(self) -> datetime.datetime | None:
        return self.record.finished_at

    @property
    def sleep_until(self) -> datetime.datetime | None:
        return self.record.sleep_until


Reply = (
    Registered
    | CheckpointReply
    | FoundCheckpoint
    | WaitReply
    | EventReply
    | SignalsReply
    | AckReply
    | RetryReply
    | ErrorReply
    | CompensationReply
    | ChangeReply
    | SignalReply
    | StartReply
    | InstanceView
)


# ---------------------------------------------------------------- pushes


@attrs.frozen(kw_only=True)
class SignalPush:
    """A pending signal, pushed the moment it is on disk and again at every registration."""

    signal: SignalRecord


@attrs.frozen(kw_only=True)
class WakePush:
    """The suspended instance of this session is due."""


@attrs.frozen(kw_only=True)
class SupersededPush:
    """A newer session owns the instance; this one must stop."""

    epoch: int


@attrs.frozen(kw_only=True)
class ClosedPush:
    """The runtime suspended the instance of this session, or it ended; no more will come."""

    status: Status
    reason: Reason | None


Push = SignalPush | WakePush | SupersededPush | ClosedPush


@attrs.frozen(kw_only=True)
class Change:
    """One committed change of an instance, for those who watch it."""

    instance_id: str
    revision: int
    status: Status
    reason: Reason | None
    checkpoint_id: str | None
    kinds: tuple[str, ...]
    """What the change wrote: ``checkpoint``, ``event``, ``signal`` ..."""


@attrs.frozen(kw_only=True)
class CompensationView:
    """The compensations of an instance and how far they are."""

    state: CompensationState
    reason: str | None
    compensations: tuple[CompensationRecord, ...]

    @property
    def pending(self) -> int:
        return sum(
            c.state in (CompensationState.PENDING, CompensationState.TRIGGERED) for c in self.compensations
        )

    @property
    def all_succeeded(self) -> bool:
        return all(c.state is CompensationState.COMPLETED for c in self.compensations)
