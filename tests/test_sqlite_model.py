"""SQLite against a plain Python model of it, over random batches and reopenings."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from runtara.limits import OPEN_STEPS
from runtara.persistence.sqlite import SqliteStore
from runtara.persistence.store import Loaded, Unit
from runtara.records import (
    AcknowledgeSignal,
    CheckpointRecord,
    CompensationRecord,
    CompensationState,
    ErrorRecord,
    FinishStep,
    InstanceRecord,
    Op,
    PayloadKind,
    PutPayload,
    RequestRecord,
    SetCompensation,
    SettleWait,
    SignalRecord,
    Status,
    StepRecord,
    StepStatus,
    WaitOutcome,
    WaitRecord,
)
from runtara.testing import samples
from runtara.testing.samples import TENANT, instance
from tests.sqlite_stores import opened

INSTANCES = 3
KNOWN = 1000


@attrs.define
class Model:
    """One instance, as it must be in the store."""

    record: InstanceRecord
    revision: int
    """Of the last unit; a unit that only changes rows leaves no trace of its own."""
    newest: int = 1
    """The newest revision that a row carries."""
    checkpoints: list[CheckpointRecord] = attrs.Factory(list)
    waits: dict[str, WaitRecord] = attrs.Factory(dict)
    steps: dict[int, StepRecord] = attrs.Factory(dict)
    signals: dict[int, SignalRecord] = attrs.Factory(dict)
    compensations: dict[str, CompensationRecord] = attrs.Factory(dict)
    errors: list[ErrorRecord] = attrs.Factory(list)
    requests: list[RequestRecord] = attrs.Factory(list)
    payloads: dict[PayloadKind, bytes] = attrs.Factory(dict)

    def take(self, op: Op) -> None:
        self.newest = max(self.newest, getattr(op, "revision", 0))
        match op:
            case InstanceRecord():
                self.record = op
            case CheckpointRecord():
                self.checkpoints.append(op)
                if op.compensation is not None:
                    self.compensations[op.checkpoint_id] = CompensationRecord(
                        checkpoint_id=op.checkpoint_id,
                        step_id=op.compensation.step_id,
                        order=op.compensation.order,
                        revision=op.revision,
                    )
            case WaitRecord():
                self.waits[op.wait_id] = op
            case SettleWait(wait_id=wait_id, outcome=outcome, settled_us=settled_us):
                self.waits[wait_id] = attrs.evolve(
                    self.waits[wait_id], outcome=outcome, settled_us=settled_us
                )
            case StepRecord():
                self.steps[op.revision] = op
            case FinishStep(start_revision=start, end_revision=end, status=status, finished_us=at):
                self.steps[start] = attrs.evolve(
                    self.steps[start], status=status, finished_us=at, end_revision=end
                )
            case SignalRecord():
                self.signals[op.revision] = op
            case AcknowledgeSignal(signal_id=signal_id, shown_us=shown_us, acknowledged_us=at):
                self.signals[signal_id] = attrs.evolve(
                    self.signals[signal_id], shown_us=shown_us, acknowledged_us=at
                )
            case SetCompensation(checkpoint_id=name, state=state, attempts=attempts):
                self.compensations[name] = attrs.evolve(
                    self.compensations[name], state=state, attempts=attempts
                )
            case ErrorRecord():
                self.errors.append(op)
            case RequestRecord():
                self.requests.append(op)
            case PutPayload(kind=kind, data=data):
                self.payloads[kind] = data

    def loaded(self) -> Loaded:
        return Loaded(
            record=self.record,
            revision=self.newest,
            checkpoint_id=self.checkpoints[-1].checkpoint_id if self.checkpoints else None,
            signals=tuple(s for s in self.signals.values() if s.acknowledged_us is None),
            waits=tuple(w for w in self.waits.values() if w.open),
            compensations=tuple(self.compensations.values()),
            last_error=self.errors[-1] if self.errors else None,
            steps=self.running_steps()[-OPEN_STEPS:],
            checkpoint_ids=frozenset(c.checkpoint_id for c in self.checkpoints),
            wait_ids=frozenset(self.waits),
            request_ids=frozenset(r.request_id for r in self.requests),
        )

    def running_steps(self) -> tuple[StepRecord, ...]:
        return tuple(s for s in self.steps.values() if s.status is StepStatus.RUNNING)


ACTIONS = (
    "checkpoint",
    "compensatable",
    "wait",
    "settle",
    "step",
    "finish",
    "signal",
    "acknowledge",
    "compensate",
    "error",
    "request",
    "payload",
    "move",
    "epoch",
)

Step = tuple[int, list[str]]
"""An instance, and what its next unit does."""
Batch = tuple[list[Step], frozenset[int]]
"""The steps, and the instances whose chains begin with a wrong guard."""

numbers = st.integers(0, INSTANCES - 1)
steps = st.tuples(numbers, st.lists(st.sampled_from(ACTIONS), max_size=4, unique=True))
batches = st.lists(st.tuples(st.lists(steps, min_size=1, max_size=12), st.frozensets(numbers)), max_size=6)


def operation(model: Model, action: str, revision: int) -> Op | None:
    """What ``action`` writes at ``revision``, if the instance has what it needs."""
    match action:
        case "checkpoint":
            return samples.checkpoint(revision, state=b"x" * (revision * 997 % 5000))
        case "compensatable":
            return samples.compensatable(revision, order=-revision)
        case "wait":
            return samples.wait(revision)
        case "settle" if open_waits := [w for w in model.waits.values() if w.open]:
            return SettleWait(wait_id=open_waits[0].wait_id, outcome=WaitOutcome.ELAPSED, settled_us=revision)
        case "step":
            return samples.step(revision)
        case "finish" if running := model.running_steps():
            return samples.finish_step(running[-1].revision, revision)
        case "signal":
            return samples.signal(revision)
        case "acknowledge" if pending := [s for s in model.signals.values() if s.acknowledged_us is None]:
            return AcknowledgeSignal(signal_id=pending[-1].revision, shown_us=1, acknowledged_us=revision)
        case "compensate" if model.compensations:
            name = min(model.compensations)
            return SetCompensation(checkpoint_id=name, state=CompensationState.TRIGGERED, attempts=revision)
        case "error":
            return samples.error(revision)
        case "request":
            return samples.request(revision)
        case "payload":
            return PutPayload(kind=PayloadKind(revision % 4), data=b"%d" % revision * (revision * 31 % 9000))
        case "move":
            return attrs.evolve(model.record, revision=revision, status=Status(1 + revision % 3))
        case "epoch":
            return attrs.evolve(model.record, revision=revision, epoch=model.record.epoch + 1)
    return None


def change(model: Model, actions: Sequence[str]) -> Unit:
    """The next unit of an instance; the model takes it at once, as an actor does."""
    guard = model.record
    model.revision += 1
    ops: list[Op] = []
    kinds: set[type] = set()
    for action in actions:
        op = operation(model, action, model.revision)
        if op is not None and type(op) not in kinds:
            kinds.add(type(op))
            ops.append(op)
            model.take(op)
    row, size = guard.row, sum(len(getattr(op, "data", b"")) for op in ops)
    return Unit(
        row=row, epoch=guard.epoch, base=guard.revision, revision=model.revision, ops=tuple(ops), size=size
    )


async def check_equal(store: SqliteStore, models: Sequence[Model]) -> None:
    for model in models:
        assert await store.load(TENANT, model.record.instance_id, KNOWN) == model.loaded()
        row = model.record.row
        assert await store.payloads(row, frozenset(PayloadKind)) == model.payloads
        for checkpoint in model.checkpoints:
            assert await store.checkpoint(row, checkpoint.checkpoint_id) == checkpoint


async def compare(path: Path, plan: Sequence[Batch]) -> None:
    async with opened(path, synchronous="OFF") as store:
        row = await store.reserve(INSTANCES)
        models = [Model(instance(row + n), 1) for n in range(INSTANCES)]
        await store.apply([samples.creation(model.record) for model in models])
    for steps, stale in plan:
        async with opened(path, synchronous="OFF") as store:
            await run_batch(store, models, steps, stale)
            await check_equal(store, models)


async def run_batch(
    store: SqliteStore, models: list[Model], steps: list[Step], stale: frozenset[int]
) -> None:
    """Apply one batch, in which the chains of the ``stale`` instances begin with a wrong guard."""
    kept = {n: copy_of(models[n]) for n in stale}
    units = [change(models[n], actions) for n, actions in steps]
    wrong = {models[n].record.row for n in stale} & {unit.row for unit in units}
    units = [attrs.evolve(u, epoch=u.epoch + 1000) if u.row in wrong else u for u in units]
    assert await store.apply(units) == wrong
    for n, model in kept.items():
        models[n] = model


def copy_of(model: Model) -> Model:
    return attrs.evolve(
        model,
        **{
            name: getattr(model, name).copy()
            for name in (
                "checkpoints",
                "waits",
                "steps",
                "signals",
                "compensations",
                "errors",
                "requests",
                "payloads",
            )
        },
    )


@settings(max_examples=60, deadline=None)
@given(batches)
def test_the_store_is_what_a_plain_model_says(plan: list[Batch]) -> None:
    with TemporaryDirectory() as folder:
        trio.run(partial(compare, Path(folder) / "a.db", plan))
