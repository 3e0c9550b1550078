"""What an instance reports: events, retry attempts, errors, compensations, and the exit report."""

import base64
import binascii
import json

import attrs

from runtara.errors import (
    CheckpointNotFound,
    Conflict,
    ErrorNotFound,
    InvalidInstanceState,
    StaleEpoch,
    ValidationError,
)
from runtara.lifecycle import Cause
from runtara.limits import MAX_DURATION_US, MAX_INSTANT_US, SECOND_US, Limits
from runtara.machine import steps
from runtara.machine.draft import UNFINISHED, Draft
from runtara.machine.endings import end, finish_compensating, owned, rest, suspend_due
from runtara.machine.requests import recall, remember
from runtara.machine.state import Decision, Facts, InstanceState
from runtara.machine.waits import named_by
from runtara.messages import (
    ChangeReply,
    CompensationReply,
    ErrorReply,
    EventReply,
    ExitReport,
    FinishCompensation,
    RecordError,
    RecordRetryAttempt,
    ReportEvent,
    RetryReply,
    StartCompensation,
)
from runtara.records import (
    CompensationAttemptRecord,
    CompensationRecord,
    CompensationState,
    ErrorRecord,
    EventType,
    FinishCompensationAttempt,
    PayloadKind,
    Reason,
    RetryAttemptRecord,
    SetCompensation,
    Status,
    WaitKind,
)

NO_TEXT = "Unknown error"
NO_READABLE_TEXT = "Unknown error (binary payload)"

# ---------------------------------------------------------------- events


def event(
    state: InstanceState | None, message: ReportEvent, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    draft = Draft(owned(state, facts, message.epoch), facts, now_us, limits)
    before = recall(facts.request, message, EventReply)
    if before is not None:
        return Decision(state=draft.state, reply=before)
    if message.type is EventType.HEARTBEAT and not heartbeat_is_stored(draft):
        applied = draft.status is Status.RUNNING
        return draft.decide(event_reply(draft, applied, None))
    applied = apply_event(draft, message)
    body = steps.body_of(message)
    record = draft.add_event(
        message.type,
        subtype=message.subtype,
        checkpoint_id=message.checkpoint_id,
        payload=message.payload,
        created_us=in_range(message.timestamp_us, now_us),
        applied=applied,
        scope_id=steps.text(body, "scope_id"),
        parent_scope_id=steps.text(body, "parent_scope_id"),
    )
    steps.follow(draft, record, body)
    reply = event_reply(draft, applied, draft.revision)
    remember(draft, message, message.request_id, reply)
    return draft.decide(reply)


def event_reply(draft: Draft, applied: bool, event_id: int | None) -> EventReply:
    return EventReply(applied=applied, status=draft.status, reason=draft.reason, event_id=event_id)


def in_range(timestamp_us: int | None, now_us: int) -> int:
    """The caller's timestamp, or now if it has none or one outside the calendar."""
    return timestamp_us if timestamp_us is not None and 0 <= timestamp_us <= MAX_INSTANT_US else now_us


def heartbeat_is_stored(draft: Draft) -> bool:
    if draft.status is not Status.RUNNING:
        return False
    if draft.now_us - draft.state.heartbeat_us < draft.limits.heartbeat_seconds * SECOND_US:
        return False
    draft.set(heartbeat_us=draft.now_us)
    return True


def apply_event(draft: Draft, message: ReportEvent) -> bool:
    """What the event does to the instance; False if it came too late to do anything."""
    if message.type is EventType.CUSTOM:
        return True
    if draft.status is not Status.RUNNING:
        return False
    match message.type:
        case EventType.COMPLETED:
            return complete(draft, message.payload)
        case EventType.FAILED:
            return fail(draft, Reason.APPLICATION_ERROR, error_text(message.payload))
        case EventType.SUSPENDED:
            suspend(draft, message)
    return True


def complete(draft: Draft, output: bytes | None) -> bool:
    if draft.row("intended") is not None:
        return False
    draft.put_payload(PayloadKind.OUTPUT, output)
    draft.move(Cause.COMPLETE)
    return True


def fail(draft: Draft, reason: Reason, error: str) -> bool:
    if draft.row("intended") is not None:
        return False
    end(draft, Cause.FAIL, reason, error)
    return True


def error_text(payload: bytes | None) -> str:
    if not payload:
        return NO_TEXT
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return NO_READABLE_TEXT


# ---------------------------------------------------------------- suspend


@attrs.frozen
class WakeRequest:
    """The body of a suspension that asks to be woken."""

    wake_at_us: int
    state: bytes


def wake_request(payload: bytes | None) -> WakeRequest | None:
    """``{"wake_at_ms": int, "state": base64}`` if that is what the payload holds, else None."""
    try:
        body = json.loads(payload or b"")
        if not isinstance(body, dict) or "wake_at_ms" not in body:
            return None
    except (ValueError, RecursionError):
        return None
    wake_at_ms = body["wake_at_ms"]
    if type(wake_at_ms) is not int or not 0 <= wake_at_ms <= MAX_INSTANT_US // 1000:
        raise ValidationError("wake_at_ms", "must be milliseconds since 1970, up to the year 9999")
    try:
        state = base64.b64decode(body.get("state") or "", validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise ValidationError("state", "must be base64") from None
    return WakeRequest(wake_at_ms * 1000, state)


def suspend(draft: Draft, message: ReportEvent) -> None:
    request = wake_request(message.payload)
    if message.wake_after_us is not None:
        request = WakeRequest(draft.now_us + message.wake_after_us, message.state or b"")
    if request is not None:
        suspend_until(draft, message.checkpoint_id, request)
    elif draft.row("intended") is not None:
        suspend_due(draft, Reason.COMPENSATING)
    else:
        rest(draft)


def suspend_until(draft: Draft, checkpoint_id: str | None, request: WakeRequest) -> None:
    """Checkpoint, wait, wake time and status in one transaction. A wait that exists keeps its deadline."""
    if request.wake_at_us > draft.now_us + MAX_DURATION_US:
        raise ValidationError("wake_at_ms", f"is more than {MAX_DURATION_US // 1000} ms ahead")
    wait = draft.facts.wait
    if wait is not None and wait.kind is not WaitKind.SLEEP:
        raise Conflict("checkpoint_id", f"{wait.wait_id!r} was used for a wait of another kind")
    if checkpoint_id is not None and draft.facts.checkpoint is None:
        draft.add_checkpoint(checkpoint_id, request.state)
    if wait is None:
        wait_id = checkpoint_id or named_by(None, draft.revision)
        wait = draft.add_wait(wait_id, WaitKind.SLEEP, request.wake_at_us)
    if wait.open:
        rest(draft, Reason.SLEEPING)
    else:
        suspend_due(draft, Reason.SLEEPING)


# ---------------------------------------------------------------- exit report


def exit_report(
    state: InstanceState | None, message: ExitReport, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    draft = Draft(owned(state, facts, message.epoch), facts, now_us, limits)
    applied = draft.status is Status.RUNNING
    if applied:
        draft.set_row(
            exit_code=message.exit_code,
            peak_memory_bytes=message.peak_memory_bytes,
            cpu_time_us=message.cpu_time_us,
        )
        draft.put_payload(PayloadKind.STDERR, message.stderr)
        draft.release_all(StaleEpoch(message.epoch, message.epoch))
        draft.set(connected=False, shown=frozenset())
        apply_exit(draft, message)
    return draft.decide(ChangeReply(applied=applied, status=draft.status, reason=draft.reason))


def apply_exit(draft: Draft, message: ExitReport) -> None:
    """The execution is over, and its session with it."""
    reason = message.reason
    if draft.row("intended") is not None:
        suspend_due(draft, Reason.COMPENSATING)
        return
    match reason:
        case Reason.COMPLETED:
            complete(draft, message.output)
        case Reason.CANCELLED:
            end(draft, Cause.CANCEL, error=message.error)
        case Reason.PAUSED:
            draft.move(Cause.PAUSE)
        case Reason.SLEEPING | Reason.WAITING_SIGNAL | Reason.COMPENSATING:
            rest(draft)
        case Reason.DISCONNECTED | Reason.ORPHANED:
            draft.count_crash()
            rest(draft, reason)
        case Reason.SHUTDOWN_REQUESTED:
            suspend_due(draft, reason)
        case _:
            fail(draft, reason, message.error or NO_TEXT)


# ---------------------------------------------------------------- attempts and errors


def retry_attempt(
    state: InstanceState, message: RecordRetryAttempt, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    draft = Draft(state, facts, now_us, limits)
    if facts.attempt is not None:
        return draft.decide(RetryReply(applied=False))
    draft.ops.append(
        RetryAttemptRecord(
            revision=draft.revision,
            checkpoint_id=message.checkpoint_id,
            attempt=message.attempt,
            created_us=in_range(message.timestamp_us, now_us),
            error=message.error,
            category=message.category,
            severity=message.severity,
            retry_hint=message.retry_hint,
            retry_after_us=message.retry_after_us,
            error_code=message.error_code,
        )
    )
    return draft.decide(RetryReply(applied=True))


def record_error(
    state: InstanceState | None, message: RecordError, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    draft = Draft(owned(state, facts, message.epoch), facts, now_us, limits)
    before = recall(facts.request, message, ErrorReply)
    if before is not None:
        return Decision(state=draft.state, reply=before)
    if draft.status is not Status.RUNNING:
        raise InvalidInstanceState(Status.RUNNING.word, draft.status.word)
    if message.cause_id is not None and not facts.error:
        raise ErrorNotFound(message.cause_id, "cause_id")
    names = attrs.fields_dict(ErrorRecord).keys() & attrs.fields_dict(RecordError).keys()
    fields = {name: getattr(message, name) for name in names}
    record = ErrorRecord(**fields, revision=draft.revision, created_us=now_us)
    draft.ops.append(record)
    draft.set(last_error=record)
    reply = ErrorReply(error_id=record.error_id)
    remember(draft, message, message.request_id, reply)
    return draft.decide(reply)


# ---------------------------------------------------------------- compensations


def find_compensation(draft: Draft, checkpoint_id: str) -> CompensationRecord:
    if draft.row("intended") is None:
        raise InvalidInstanceState(Reason.COMPENSATING.word, draft.status.word)
    for record in draft.compensations:
        if record.checkpoint_id == checkpoint_id:
            return record
    raise CheckpointNotFound(checkpoint_id)


def change_compensation(draft: Draft, record: CompensationRecord) -> None:
    draft.ops.append(
        SetCompensation(checkpoint_id=record.checkpoint_id, state=record.state, attempts=record.attempts)
    )
    draft.set(
        compensations=tuple(
            record if c.checkpoint_id == record.checkpoint_id else c for c in draft.compensations
        )
    )


def compensation_reply(draft: Draft, attempt: int) -> CompensationReply:
    pending = sum(c.state in UNFINISHED for c in draft.compensations)
    return CompensationReply(attempt=attempt, status=draft.status, pending=pending)


def start_compensation(
    state: InstanceState, message: StartCompensation, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    """Begin an attempt. An attempt that a crash left open counts; the new one has the next number."""
    draft = Draft(state, facts, now_us, limits)
    record = find_compensation(draft, message.checkpoint_id)
    if record.state not in UNFINISHED:
        raise InvalidInstanceState("pending or triggered", record.state.word)
    record = attrs.evolve(record, state=CompensationState.TRIGGERED, attempts=record.attempts + 1)
    change_compensation(draft, record)
    draft.ops.append(
        CompensationAttemptRecord(
            revision=draft.revision,
            checkpoint_id=record.checkpoint_id,
            step_id=record.step_id,
            attempt=record.attempts,
            started_us=now_us,
        )
    )
    return draft.decide(compensation_reply(draft, record.attempts))


def finish_compensation(
    state: InstanceState, message: FinishCompensation, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    draft = Draft(state, facts, now_us, limits)
    record = find_compensation(draft, message.checkpoint_id)
    ended = CompensationState.COMPLETED if message.success else CompensationState.FAILED
    if record.attempts == message.attempt and record.state is ended:
        return draft.decide(compensation_reply(draft, message.attempt))
    if record.state is not CompensationState.TRIGGERED or record.attempts != message.attempt:
        raise InvalidInstanceState(f"attempt {message.attempt}", f"attempt {record.attempts}")
    draft.ops.append(
        FinishCompensationAttempt(
            checkpoint_id=record.checkpoint_id,
            attempt=record.attempts,
            finished_us=now_us,
            success=message.success,
            error_message=message.error_message,
            error_id=message.error_id,
        )
    )
    if message.success or message.final:
        change_compensation(draft, attrs.evolve(record, state=ended))
        finish_compensating(draft)
    return draft.decide(compensation_reply(draft, message.attempt))
