"""Made-up instances with all their history, such as a runtime could have written, for hypothesis."""

from typing import Any, Final

import attrs
from hypothesis import strategies as st

from runtara.limits import MAX_DURATION_US
from runtara.persistence.store import Store, Unit
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
    InstanceRecord,
    Op,
    PayloadKind,
    PutPayload,
    Reason,
    RequestRecord,
    RetryAttemptRecord,
    RetryHint,
    SetCompensation,
    SignalRecord,
    SignalType,
    Status,
    StepRecord,
    StepStatus,
    WaitKind,
    WaitOutcome,
    WaitRecord,
)
from runtara.testing.samples import ALL_BYTES, NAUGHTY
from runtara.transfer.items import Record

HIGHEST: Final = 2**62
"""Of the numbers from which a store counts on."""

texts = st.sampled_from(("", NAUGHTY, "\u2028\r\n", '{"a":1}')) | st.text(max_size=8)
ids = st.sampled_from(("a", "A", "a/b %2F", "..", "\u00e9", "e\u0301", "\U0010ffff", "\u202e")) | st.text(
    st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=6
)
names = ids.filter(lambda name: not name.startswith("~"))
wait_ids = names | st.integers(1, 99).map("~{}".format) | ids.map("~request:{}".format)
blobs = st.sampled_from((b"", b"\0", ALL_BYTES)) | st.binary(max_size=12)
int64 = st.sampled_from((-(2**63), -1, 0, 2**53 + 1, 2**63 - 1)) | st.integers(-(2**63), 2**63 - 1)
counts = st.integers(1, 2**63 - 1)
naturals = st.integers(0, 2**63 - 1)
numbers = st.sampled_from((1, 2**53 + 1, HIGHEST)) | st.integers(1, HIGHEST)
epochs = st.integers(0, HIGHEST)
delays = st.integers(0, MAX_DURATION_US)
objects = st.sampled_from(("{}", '{"a": [1, null]}', '{"\\u0000":"\U0001f600"}'))


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def of(words: type) -> st.SearchStrategy[Any]:
    return st.sampled_from(list(words))  # type: ignore[call-overload]  # an enum


@st.composite
def instances(draw: st.DrawFn) -> InstanceRecord:
    status = draw(of(Status).filter(lambda found: found is not Status.UNKNOWN))
    fields = st.fixed_dictionaries(
        {
            "tenant_id": ids,
            "instance_id": ids,
            "workflow": maybe(ids),
            "definition_version": maybe(ids),
            "hosted": st.booleans(),
            "reason": maybe(of(Reason)),
            "epoch": epochs,
            "revision": numbers,
            "checkpoint_id": maybe(names),
            "attempt": naturals,
            "max_attempts": counts,
            "created_us": int64,
            "started_us": maybe(int64),
            "finished_us": int64 if status.is_terminal else st.none(),
            "last_activity_us": int64,
            "sleep_until_us": maybe(int64),
            "deadline_us": maybe(int64),
            "awaits_client_us": maybe(int64),
            "cancelling_us": maybe(int64),
            "intended": st.sampled_from((None, Status.FAILED, Status.CANCELLED)),
            "compensation_state": of(CompensationState),
            "compensation_reason": maybe(of(Reason).map(lambda reason: reason.word)),
            "exit_code": maybe(int64),
            "peak_memory_bytes": maybe(naturals),
            "cpu_time_us": maybe(naturals),
        }
    )
    return InstanceRecord(row=0, status=status, **draw(fields))


specs = st.builds(CompensationSpec, step_id=ids, data=blobs, order=int64)
payloads = st.builds(PutPayload, kind=of(PayloadKind), data=blobs)
compensation_attempts = st.builds(
    CompensationAttemptRecord,
    revision=numbers,
    checkpoint_id=names,
    step_id=ids,
    attempt=counts,
    started_us=int64,
    finished_us=maybe(int64),
    success=maybe(st.booleans()),
    error_message=maybe(texts),
    error_id=maybe(counts),
)
checkpoints = st.builds(
    CheckpointRecord,
    revision=numbers,
    checkpoint_id=names,
    state=blobs,
    created_us=int64,
    compensation=maybe(specs),
)
waits = st.builds(
    WaitRecord,
    revision=numbers,
    wait_id=wait_ids,
    kind=of(WaitKind),
    key=maybe(names),
    deadline_us=maybe(int64),
    created_us=int64,
    outcome=maybe(of(WaitOutcome)),
    settled_us=maybe(int64),
)
events = st.builds(
    EventRecord,
    revision=numbers,
    type=of(EventType),
    subtype=maybe(ids),
    checkpoint_id=maybe(names),
    payload=maybe(blobs),
    created_us=int64,
    applied=st.booleans(),
    scope_id=maybe(texts),
    parent_scope_id=maybe(texts),
)
running_steps = st.builds(
    StepRecord,
    revision=numbers,
    step_id=texts,
    step_name=maybe(texts),
    step_type=maybe(texts),
    status=st.just(StepStatus.RUNNING),
    scope_id=maybe(texts),
    parent_scope_id=maybe(texts),
    started_us=int64,
    finished_us=st.none(),
    end_revision=st.none(),
    start_payload=st.none(),
    end_payload=st.none(),
)
ended_steps = st.builds(
    attrs.evolve,
    running_steps,
    status=st.sampled_from((StepStatus.COMPLETED, StepStatus.FAILED)),
    finished_us=int64,
    end_revision=numbers,
)
steps = running_steps | ended_steps
signals = st.builds(
    lambda key, control, **fields: SignalRecord(
        key=key, type=control if key is None else SignalType.CUSTOM, **fields
    ),
    key=maybe(names),
    control=of(SignalType).filter(lambda type: type is not SignalType.CUSTOM),
    revision=numbers,
    payload=maybe(blobs),
    created_us=int64,
    epoch=maybe(epochs),
    shown_us=maybe(int64),
    acknowledged_us=maybe(int64),
)
retry_attempts = st.builds(
    RetryAttemptRecord,
    revision=numbers,
    checkpoint_id=names,
    attempt=counts,
    created_us=int64,
    error=maybe(texts),
    category=of(ErrorCategory),
    severity=of(ErrorSeverity),
    retry_hint=of(RetryHint),
    retry_after_us=maybe(delays),
    error_code=maybe(ids),
)
errors = st.builds(
    ErrorRecord,
    revision=numbers,
    checkpoint_id=maybe(names),
    step_id=maybe(ids),
    code=ids,
    message=texts,
    category=of(ErrorCategory),
    severity=of(ErrorSeverity),
    retry_hint=of(RetryHint),
    retry_after_us=maybe(delays),
    attributes=maybe(objects),
    cause_id=maybe(counts),
    created_us=int64,
)
requests = st.builds(RequestRecord, revision=numbers, request_id=ids, digest=blobs, answer=objects)
compensations = st.builds(
    SetCompensation, checkpoint_id=names, state=of(CompensationState), attempts=naturals
)

records: Final[st.SearchStrategy[Record]] = st.one_of(
    instances(),
    payloads,
    compensation_attempts,
    checkpoints,
    compensations,
    waits,
    events,
    steps,
    signals,
    retry_attempts,
    errors,
    requests,
)
"""One of any kind."""


# ---------------------------------------------------------------- whole instances


@attrs.frozen
class Sample:
    """An instance and everything that belongs to it."""

    record: InstanceRecord
    ops: tuple[Op, ...]

    def units(self, row: int) -> list[Unit]:
        record = attrs.evolve(self.record, row=row)
        first = Unit(row=row, epoch=0, base=0, revision=record.revision, ops=(record,), size=512)
        return [
            first,
            *(
                Unit(
                    row=row,
                    epoch=record.epoch,
                    base=record.revision,
                    revision=getattr(op, "revision", record.revision),
                    ops=(op,),
                    size=512,
                )
                for op in self.ops
            ),
        ]


def several(strategy: st.SearchStrategy[Any], *keys: str) -> st.SearchStrategy[list[Any]]:
    """Some records that a table takes together: each key, and each revision, once."""
    unique = [lambda one: one.revision] if keys != ("kind",) else []
    return st.lists(
        strategy, max_size=3, unique_by=(*unique, lambda one: tuple(getattr(one, key) for key in keys))
    )


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    ops: list[Op] = []
    for strategy, keys in (
        (payloads, ("kind",)),
        (compensation_attempts, ("checkpoint_id", "attempt")),
        (checkpoints, ("checkpoint_id",)),
        (waits, ("wait_id",)),
        (events, ("revision",)),
        (steps, ("revision",)),
        (signals, ("revision",)),
        (retry_attempts, ("checkpoint_id", "attempt")),
        (errors, ("revision",)),
        (requests, ("request_id",)),
    ):
        ops += draw(several(strategy, *keys))
    record = draw(instances())
    newest = max([record.revision, *(getattr(op, "revision", 0) for op in ops)])
    for at, op in enumerate(list(ops)):
        if isinstance(op, StepRecord) and op.end_revision is not None:  # of an event that there was
            ops[at] = attrs.evolve(op, end_revision=min(op.end_revision, newest))
        if isinstance(op, CheckpointRecord) and op.compensation is not None:
            state, attempts = draw(of(CompensationState)), draw(naturals)
            ops.append(SetCompensation(checkpoint_id=op.checkpoint_id, state=state, attempts=attempts))
    return Sample(record, tuple(ops))


stores: Final = st.lists(
    samples(), max_size=3, unique_by=lambda one: (one.record.tenant_id, one.record.instance_id)
)


async def fill(store: Store, samples: list[Sample]) -> None:
    """Store the samples; the order in which they were created may be any."""
    for sample in samples:
        left_out = await store.apply(sample.units(await store.reserve(1)))
        assert left_out == frozenset()
