"""Made-up units and records, for tests of a store. Everything is a function of its arguments."""

from typing import Any, Final

import attrs

from runtara.persistence.store import Unit
from runtara.records import (
    CheckpointRecord,
    CompensationAttemptRecord,
    CompensationSpec,
    CompensationState,
    ErrorCategory,
    ErrorRecord,
    ErrorSeverity,
    EventRecord,
    EventType,
    FinishStep,
    InstanceRecord,
    Op,
    Reason,
    RequestRecord,
    RetryAttemptRecord,
    RetryHint,
    SignalRecord,
    SignalType,
    Status,
    StepRecord,
    StepStatus,
    WaitKind,
    WaitOutcome,
    WaitRecord,
)

TENANT: Final = "acme"

NAUGHTY: Final = "a\x00b \U0001f600 e\u0301 \u00e9 '\"\\ %_ \ufeff \U0010ffff \u202e"
"""Text with everything that some database or driver has stumbled over; no lone surrogates."""
ALL_BYTES: Final = bytes(range(256))

Appended = (
    CheckpointRecord
    | WaitRecord
    | EventRecord
    | StepRecord
    | SignalRecord
    | RetryAttemptRecord
    | ErrorRecord
    | CompensationAttemptRecord
    | RequestRecord
)


def instance(row: int, **fields: Any) -> InstanceRecord:
    """A running instance at epoch 1 and revision 1; ``fields`` change it."""
    record = InstanceRecord(
        row=row,
        tenant_id=TENANT,
        instance_id=f"i{row}",
        status=Status.RUNNING,
        epoch=1,
        revision=1,
        attempt=1,
        created_us=1_000 + row,
        last_activity_us=1_000 + row,
    )
    return attrs.evolve(record, **fields)


def finished(row: int, finished_us: int, **fields: Any) -> InstanceRecord:
    """A completed instance."""
    ended: dict[str, Any] = {
        "status": Status.COMPLETED,
        "reason": Reason.COMPLETED,
        "finished_us": finished_us,
    }
    return instance(row, **(ended | fields))


def unit(row: int, revision: int, *ops: Op, epoch: int = 1, base: int = 1) -> Unit:
    """A change of an instance that is stored at ``epoch`` and ``base``."""
    return Unit(row=row, epoch=epoch, base=base, revision=revision, ops=ops, size=512)


def creation(record: InstanceRecord, *ops: Op) -> Unit:
    """The unit that creates ``record``."""
    return unit(record.row, record.revision, record, *ops, epoch=0, base=0)


def checkpoint(revision: int, **fields: Any) -> CheckpointRecord:
    record = CheckpointRecord(
        revision=revision,
        checkpoint_id=f"step-{revision}",
        state=b"state %d" % revision,
        created_us=2_000 + revision,
    )
    return attrs.evolve(record, **fields)


def compensatable(revision: int, order: int = 0) -> CheckpointRecord:
    spec = CompensationSpec(step_id=f"undo-{revision}", data=b"data %d" % revision, order=order)
    return checkpoint(revision, compensation=spec)


def wait(revision: int, **fields: Any) -> WaitRecord:
    record = WaitRecord(
        revision=revision,
        wait_id=f"wait-{revision}",
        kind=WaitKind.SIGNAL,
        key="paid",
        deadline_us=9_000,
        created_us=2_000 + revision,
    )
    return attrs.evolve(record, **fields)


def event(revision: int, **fields: Any) -> EventRecord:
    record = EventRecord(revision=revision, type=EventType.CUSTOM, subtype="log", created_us=2_000 + revision)
    return attrs.evolve(record, **fields)


def step(revision: int, **fields: Any) -> StepRecord:
    """A running step."""
    record = StepRecord(
        revision=revision, step_id=f"step-{revision}", step_type="http", started_us=2_000 + revision
    )
    return attrs.evolve(record, **fields)


def finish_step(start_revision: int, end_revision: int, **fields: Any) -> FinishStep:
    op = FinishStep(
        start_revision=start_revision,
        end_revision=end_revision,
        status=StepStatus.COMPLETED,
        finished_us=2_000 + end_revision,
    )
    return attrs.evolve(op, **fields)


def signal(revision: int, **fields: Any) -> SignalRecord:
    record = SignalRecord(
        revision=revision,
        type=SignalType.CUSTOM,
        key="paid",
        payload=b"payload %d" % revision,
        created_us=2_000 + revision,
    )
    return attrs.evolve(record, **fields)


def attempt(revision: int, **fields: Any) -> RetryAttemptRecord:
    record = RetryAttemptRecord(
        revision=revision, checkpoint_id="step", attempt=revision, created_us=2_000 + revision
    )
    return attrs.evolve(record, **fields)


def error(revision: int, **fields: Any) -> ErrorRecord:
    record = ErrorRecord(
        revision=revision, code="E_CARD", message=f"error {revision}", created_us=2_000 + revision
    )
    return attrs.evolve(record, **fields)


def compensation_attempt(revision: int, **fields: Any) -> CompensationAttemptRecord:
    record = CompensationAttemptRecord(
        revision=revision,
        checkpoint_id="step",
        step_id="undo",
        attempt=revision,
        started_us=2_000 + revision,
    )
    return attrs.evolve(record, **fields)


def request(revision: int, **fields: Any) -> RequestRecord:
    record = RequestRecord(
        revision=revision, request_id=f"request-{revision}", digest=b"digest", answer='{"ok":true}'
    )
    return attrs.evolve(record, **fields)


def one_of_each(revision: int) -> tuple[Appended, ...]:
    """One record of every kind that is appended, all at ``revision``."""
    return (
        checkpoint(revision),
        wait(revision),
        event(revision),
        step(revision),
        signal(revision),
        attempt(revision),
        error(revision),
        compensation_attempt(revision),
        request(revision),
    )


# ---------------------------------------------------------------- records with every field filled


def full_instance(row: int) -> InstanceRecord:
    """Every field holds something, and every text is `NAUGHTY`; as an instance that has failed."""
    return InstanceRecord(
        row=row,
        tenant_id=TENANT,
        instance_id=f"{row} {NAUGHTY}",
        workflow=NAUGHTY,
        definition_version=NAUGHTY,
        hosted=True,
        status=Status.FAILED,
        reason=Reason.TIMEOUT,
        epoch=7,
        revision=9,
        checkpoint_id=NAUGHTY,
        attempt=2,
        max_attempts=5,
        created_us=-1,
        started_us=2**53 + 1,
        finished_us=2**62,
        last_activity_us=4,
        sleep_until_us=5,
        deadline_us=6,
        awaits_client_us=7,
        cancelling_us=8,
        intended=Status.FAILED,
        compensation_state=CompensationState.TRIGGERED,
        compensation_reason=NAUGHTY,
        exit_code=-9,
        peak_memory_bytes=2**40,
        cpu_time_us=11,
    )


def full_records(revision: int) -> tuple[Appended, ...]:
    """One record of every kind, with every field filled."""
    return (
        CheckpointRecord(
            revision=revision,
            checkpoint_id=NAUGHTY,
            state=ALL_BYTES,
            created_us=1,
            compensation=CompensationSpec(step_id=NAUGHTY, data=ALL_BYTES, order=-3),
        ),
        WaitRecord(
            revision=revision,
            wait_id=NAUGHTY,
            kind=WaitKind.RETRY,
            key=NAUGHTY,
            deadline_us=2,
            created_us=1,
            outcome=WaitOutcome.TIMED_OUT,
            settled_us=3,
        ),
        EventRecord(
            revision=revision,
            type=EventType.COMPLETED,
            subtype=NAUGHTY,
            checkpoint_id=NAUGHTY,
            payload=ALL_BYTES,
            created_us=1,
            applied=False,
            scope_id=NAUGHTY,
            parent_scope_id=NAUGHTY,
        ),
        StepRecord(
            revision=revision,
            step_id=NAUGHTY,
            step_name=NAUGHTY,
            step_type=NAUGHTY,
            status=StepStatus.FAILED,
            scope_id=NAUGHTY,
            parent_scope_id=NAUGHTY,
            started_us=-1,
            finished_us=2**62,
            end_revision=2**53 + 1,
        ),
        SignalRecord(
            revision=revision,
            type=SignalType.SHUTDOWN,
            key=NAUGHTY,
            payload=ALL_BYTES,
            created_us=1,
            epoch=7,
            shown_us=2,
            acknowledged_us=3,
        ),
        RetryAttemptRecord(
            revision=revision,
            checkpoint_id=NAUGHTY,
            attempt=3,
            created_us=1,
            error=NAUGHTY,
            category=ErrorCategory.BUSINESS,
            severity=ErrorSeverity.CRITICAL,
            retry_hint=RetryHint.RETRY_AFTER,
            retry_after_us=4,
            error_code=NAUGHTY,
        ),
        ErrorRecord(
            revision=revision,
            checkpoint_id=NAUGHTY,
            step_id=NAUGHTY,
            code=NAUGHTY,
            message=NAUGHTY,
            category=ErrorCategory.TRANSIENT,
            severity=ErrorSeverity.INFO,
            retry_hint=RetryHint.DO_NOT_RETRY,
            retry_after_us=4,
            attributes=NAUGHTY,
            cause_id=2,
            created_us=1,
        ),
        CompensationAttemptRecord(
            revision=revision,
            checkpoint_id=NAUGHTY,
            step_id=NAUGHTY,
            attempt=3,
            started_us=1,
            finished_us=2,
            success=False,
            error_message=NAUGHTY,
            error_id=5,
        ),
        RequestRecord(revision=revision, request_id=NAUGHTY, digest=ALL_BYTES, answer=NAUGHTY),
    )
