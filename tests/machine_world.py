"""A small world for the machine: tables in memory, a clock that the test moves, and one instance.

`World.say` does what an instance actor does, without trio and without a database: it answers `needs` from
the tables, decides, writes the operations into the tables, and keeps the parked replies until they are
released. After every decision it checks `check_decision`: what must be true of each of them.
"""

import copy
from collections import Counter
from typing import Any, TypeVar

import attrs

from runtara.errors import RuntaraError
from runtara.lifecycle import TRANSITIONS
from runtara.limits import OPEN_STEPS, Limits
from runtara.machine import Decision, Fact, Facts, InstanceState, decide, needs
from runtara.machine.liveness import reason_to_move
from runtara.messages import (
    CheckpointReply,
    Register,
    Registered,
    Reply,
    Request,
    SignalPush,
    SignalsReply,
    StartInstance,
    WaitReply,
)
from runtara.records import (
    AcknowledgeSignal,
    CheckpointRecord,
    CompensationAttemptRecord,
    CompensationRecord,
    ErrorRecord,
    EventRecord,
    FinishCompensationAttempt,
    FinishStep,
    InstanceRecord,
    Op,
    PayloadKind,
    PutPayload,
    RequestRecord,
    RetryAttemptRecord,
    SetCompensation,
    SettleWait,
    SignalRecord,
    Status,
    StepRecord,
    StepStatus,
    WaitOutcome,
    WaitRecord,
)

START_US = 1_700_000_000_000_000
SECOND = 1_000_000
TENANT, INSTANCE = "acme", "order-1"

T = TypeVar("T")

EARLY = (WaitOutcome.ELAPSED, WaitOutcome.TIMED_OUT)
"""Outcomes that time alone brings."""

APPENDED = (
    CheckpointRecord,
    WaitRecord,
    EventRecord,
    StepRecord,
    SignalRecord,
    RetryAttemptRecord,
    ErrorRecord,
    CompensationAttemptRecord,
    RequestRecord,
)


@attrs.define
class Tables:
    """What is on disk of one instance. Every rule of a real table that a decision could break is asserted."""

    row: InstanceRecord | None = None
    revision: int = 0
    checkpoints: dict[str, CheckpointRecord] = attrs.Factory(dict)
    waits: dict[str, WaitRecord] = attrs.Factory(dict)
    signals: dict[int, SignalRecord] = attrs.Factory(dict)
    events: list[EventRecord] = attrs.Factory(list)
    steps: dict[int, StepRecord] = attrs.Factory(dict)
    attempts: dict[tuple[str, int], RetryAttemptRecord] = attrs.Factory(dict)
    errors: list[ErrorRecord] = attrs.Factory(list)
    compensations: dict[str, CompensationRecord] = attrs.Factory(dict)
    log: dict[tuple[str, int], CompensationAttemptRecord] = attrs.Factory(dict)
    requests: dict[str, RequestRecord] = attrs.Factory(dict)
    payloads: dict[PayloadKind, bytes] = attrs.Factory(dict)

    def write(self, ops: tuple[Op, ...], revision: int) -> None:
        for op in ops:
            self.write_one(op)
        self.revision = revision
        assert self.row is not None

    def write_one(self, op: Op) -> None:
        match op:
            case InstanceRecord():
                self.row = op
            case CheckpointRecord():
                insert(self.checkpoints, op.checkpoint_id, op)
                if op.compensation is not None:
                    record = CompensationRecord(
                        checkpoint_id=op.checkpoint_id,
                        step_id=op.compensation.step_id,
                        order=op.compensation.order,
                        revision=op.revision,
                    )
                    insert(self.compensations, op.checkpoint_id, record)
            case WaitRecord():
                insert(self.waits, op.wait_id, op)
            case SignalRecord():
                insert(self.signals, op.signal_id, op)
            case EventRecord():
                self.events.append(op)
            case StepRecord():
                insert(self.steps, op.revision, op)
            case RetryAttemptRecord():
                insert(self.attempts, (op.checkpoint_id, op.attempt), op)
            case ErrorRecord():
                self.errors.append(op)
            case CompensationAttemptRecord():
                insert(self.log, (op.checkpoint_id, op.attempt), op)
            case RequestRecord():
                insert(self.requests, op.request_id, op)
            case PutPayload():
                self.payloads[op.kind] = op.data
            case SettleWait():
                wait = self.waits[op.wait_id]
                assert wait.open, "a wait is settled once"
                self.waits[op.wait_id] = attrs.evolve(wait, outcome=op.outcome, settled_us=op.settled_us)
            case FinishStep():
                step = self.steps[op.start_revision]
                assert step.status is StepStatus.RUNNING, "a step ends once"
                self.steps[op.start_revision] = attrs.evolve(
                    step, status=op.status, finished_us=op.finished_us, end_revision=op.end_revision
                )
            case AcknowledgeSignal():
                signal = self.signals[op.signal_id]
                assert signal.acknowledged_us is None, "a signal is consumed once"
                self.signals[op.signal_id] = attrs.evolve(
                    signal, shown_us=op.shown_us, acknowledged_us=op.acknowledged_us
                )
            case SetCompensation():
                self.compensations[op.checkpoint_id] = attrs.evolve(
                    self.compensations[op.checkpoint_id], state=op.state, attempts=op.attempts
                )
            case FinishCompensationAttempt():
                line = self.log[op.checkpoint_id, op.attempt]
                self.log[op.checkpoint_id, op.attempt] = attrs.evolve(
                    line,
                    finished_us=op.finished_us,
                    success=op.success,
                    error_message=op.error_message,
                    error_id=op.error_id,
                )

    def load(self) -> InstanceState | None:
        """What an actor would know that has just loaded the instance."""
        if self.row is None:
            return None
        over = self.row.status.is_terminal
        newest = max(self.checkpoints.values(), key=lambda c: c.revision, default=None)
        return InstanceState(
            row=self.row,
            revision=self.revision,
            checkpoint_id=None if newest is None else newest.checkpoint_id,
            last_activity_us=self.row.last_activity_us,
            signals=tuple(s for s in self.signals.values() if s.acknowledged_us is None),
            waits=() if over else tuple(w for w in self.waits.values() if w.open),
            compensations=tuple(self.compensations.values()),
            last_error=self.errors[-1] if self.errors else None,
            steps=tuple(s for s in self.steps.values() if s.status is StepStatus.RUNNING)[-OPEN_STEPS:],
        )


def insert(table: dict[Any, T], key: object, record: T) -> None:
    assert key not in table, f"{key!r} is there already"
    table[key] = record


@attrs.frozen
class Step:
    """One decision and all that it depended on."""

    before: InstanceState | None
    message: Request
    facts: Facts
    now_us: int
    decision: Decision


@attrs.define
class World:
    """One instance, its tables, and a clock. See the module's docstring."""

    limits: Limits = attrs.Factory(Limits)
    now_us: int = START_US
    latest_us: int = START_US
    state: InstanceState | None = None
    tables: Tables = attrs.Factory(Tables)
    next_number: int = 1
    refuse_new: RuntaraError | None = None
    steps: list[Step] = attrs.Factory(list)
    answers: dict[str, list[Reply | RuntaraError]] = attrs.Factory(dict)
    """What was released, by the id of the wait."""
    careful: bool = True
    """Check each decision twice, and that its arguments stay as they were."""

    # ------------------------------------------------------------ acting

    def say(self, message: Request) -> Decision:
        """Decide on a message and write what follows. Raises what `decide` raises; then nothing changed."""
        facts = self.facts_for(message)
        decision = self.decide(message, facts)
        self.steps.append(Step(self.state, message, facts, self.now_us, decision))
        before, self.state = self.state, decision.state
        if decision.ops:
            assert self.state is not None
            self.tables.write(decision.ops, self.state.revision)
        for release in decision.releases:
            self.answers.setdefault(release.wait_id, []).append(release.reply)
        check_decision(before, decision, self)
        return decision

    def decide(self, message: Request, facts: Facts) -> Decision:
        if self.careful:
            check_purity(self.state, message, facts, self.now_us, self.limits)
        return decide(self.state, message, facts, self.now_us, self.limits)

    def ask(self, message: Request, kind: type[T]) -> T:
        """The reply to a message, which must be one of ``kind``."""
        reply = self.say(message).reply
        assert isinstance(reply, kind), f"{reply!r} is no {kind.__name__}"
        return reply

    def facts_for(self, message: Request) -> Facts:
        found: dict[str, Any] = {}
        for fact, key in needs(self.state, message):
            found[fact.value] = self.answer(fact, key)
        base = Facts(tenant_id=TENANT, instance_id=INSTANCE)
        return attrs.evolve(base, **found, refuse_new=self.refuse_new if self.state is None else None)

    def answer(self, fact: Fact, key: Any) -> Any:
        tables = self.tables
        match fact:
            case Fact.NUMBER:
                self.next_number += 1
                return self.next_number - 1
            case Fact.CHECKPOINT:
                return tables.checkpoints.get(key)
            case Fact.WAIT:
                return tables.waits.get(key)
            case Fact.REQUEST:
                return tables.requests.get(key)
            case Fact.ATTEMPT:
                return tables.attempts.get(key)
            case Fact.ERROR:
                return any(e.error_id == key for e in tables.errors)
            case Fact.SIGNAL:
                return tables.signals.get(key)
            case Fact.PAYLOADS:
                return {kind: data for kind, data in tables.payloads.items() if kind in key}

    def advance(self, seconds: float) -> None:
        """Move the wall clock, forwards or backwards."""
        self.now_us += round(seconds * SECOND)
        self.latest_us = max(self.latest_us, self.now_us)

    def crash(self, *, session_survives: bool = False) -> None:
        """The memory is gone; the next state comes from the tables."""
        epoch_lives = session_survives and self.state is not None and self.state.connected
        self.state = self.tables.load()
        if epoch_lives:
            assert self.state is not None
            pending = frozenset(s.signal_id for s in self.state.signals)
            self.state = attrs.evolve(self.state, connected=True, shown=pending)

    # ------------------------------------------------------------ looking

    @property
    def known(self) -> InstanceState:
        assert self.state is not None
        return self.state

    @property
    def row(self) -> InstanceRecord:
        return self.known.row

    @property
    def status(self) -> Status:
        return self.row.status

    @property
    def epoch(self) -> int:
        return self.row.epoch

    @property
    def last(self) -> Decision:
        return self.steps[-1].decision

    def released(self, wait_id: str) -> Reply | RuntaraError:
        """The one answer that was held back for a wait and is released now."""
        (answer,) = self.answers.pop(wait_id)
        return answer

    def released_wait(self, wait_id: str) -> WaitReply:
        answer = self.released(wait_id)
        assert isinstance(answer, WaitReply)
        return answer


def check_purity(
    state: InstanceState | None, message: Request, facts: Facts, now_us: int, limits: Limits
) -> None:
    """A decision is a function of its arguments alone, and changes none of them."""
    refuse_new = facts.refuse_new
    state_copy, message_copy, facts_copy = copy.deepcopy(
        (state, message, attrs.evolve(facts, refuse_new=None))
    )
    once = outcome(state, message, facts, now_us, limits)
    again = outcome(state_copy, message_copy, attrs.evolve(facts_copy, refuse_new=refuse_new), now_us, limits)
    assert once == again
    assert (state, message) == (state_copy, message_copy)
    assert attrs.evolve(facts, refuse_new=None) == facts_copy


def outcome(
    state: InstanceState | None, message: Request, facts: Facts, now_us: int, limits: Limits
) -> object:
    """The decision with its errors as plain values, or what the refusal says."""
    try:
        decision = decide(state, message, facts, now_us, limits)
    except RuntaraError as refusal:
        return said(refusal)
    releases = [(r.wait_id, said(r.reply)) for r in decision.releases]
    return attrs.evolve(decision, releases=()), releases


def said(reply: Reply | RuntaraError) -> object:
    return (reply.code, reply.message, reply.details) if isinstance(reply, RuntaraError) else reply


# ---------------------------------------------------------------- what is true of every decision


def check_decision(before: InstanceState | None, decision: Decision, world: World) -> None:
    after = decision.state
    assert (decision.reply is None) == (decision.park is not None)
    check_unit(before, decision)
    check_times(decision, world)
    if after is None:
        return
    check_row(before, after, world)
    check_pending(decision, after)
    check_reload(after, world)
    assert reason_to_move(after) is not None, "stuck in silence"


def check_unit(before: InstanceState | None, decision: Decision) -> None:
    """One revision per change and never one without; one appended record per table (records.py, rule 3)."""
    after, ops = decision.state, decision.ops
    revision = 0 if before is None else before.revision
    if not ops:
        assert after is None or (
            before is not None and after.revision == revision and after.row is before.row
        )
        assert not decision.pushes, "a push follows a change"
        assert not decision.supersedes
        return
    assert after is not None
    assert after.revision == revision + 1
    appended = [op for op in ops if isinstance(op, APPENDED)]
    assert all(op.revision == after.revision for op in appended)
    assert max(Counter(type(op) for op in appended).values(), default=0) <= 1
    rows = [op for op in ops if isinstance(op, InstanceRecord)]
    assert len(rows) <= 1
    assert rows or appended, "every revision is found on disk"
    assert rows or before is not None, "the first change makes the row"
    if rows:
        assert ops[0] is rows[0]
        assert rows[0].revision == after.revision
        assert after.row is rows[0]
    else:
        assert before is not None
        assert after.row is before.row


def check_times(decision: Decision, world: World) -> None:
    """Nothing elapses or times out before the wall clock has reached its deadline."""
    for op in decision.ops:
        if isinstance(op, SettleWait | WaitRecord) and op.outcome in EARLY:
            deadline = world.tables.waits[op.wait_id].deadline_us
            assert deadline is not None
            assert deadline <= world.now_us


def check_row(before: InstanceState | None, after: InstanceState, world: World) -> None:
    row = after.row
    old = None if before is None else before.row.status
    if old is not None and old.is_terminal:
        assert row is before.row if before else False, "terminal is terminal"
    edges = {target for (source, _), target in TRANSITIONS.items() if source is old}
    assert row.status is old or row.status in edges
    assert (row.finished_us is not None) == row.status.is_terminal
    assert row.status is not Status.UNKNOWN
    if row.status.is_terminal:
        assert row.awaits_client_us is None
        assert row.intended is None
        assert row.due_us is None
    if row.status is Status.RUNNING or row.hosted:
        assert row.awaits_client_us is None
    if before is not None:
        assert row.epoch >= before.row.epoch
        assert row.started_us == before.row.started_us or before.row.started_us is None
        assert row.created_us == before.row.created_us
    check_sleep_until(after, world)


def check_sleep_until(after: InstanceState, world: World) -> None:
    row = after.row
    if row.status.is_terminal or row.paused:
        assert row.sleep_until_us is None
        return
    earliest = min((w.deadline_us for w in after.waits if w.deadline_us is not None), default=None)
    due_at_once = (
        row.status is Status.SUSPENDED
        and row.hosted
        and row.sleep_until_us is not None
        and row.sleep_until_us <= world.latest_us
    )
    assert row.sleep_until_us == earliest or due_at_once


def check_pending(decision: Decision, after: InstanceState) -> None:
    """A consumed signal is never pushed, shown or replied again; only open waits are parked."""
    pending = {signal.signal_id for signal in after.signals}
    assert after.shown <= pending
    assert after.parked <= {wait.wait_id for wait in after.waits}
    shown: list[SignalRecord | None] = [p.signal for p in decision.pushes if isinstance(p, SignalPush)]
    for reply in (decision.reply, *(release.reply for release in decision.releases)):
        match reply:
            case WaitReply():
                shown.append(reply.signal)
            case CheckpointReply() | SignalsReply():
                shown += [reply.signal, reply.custom_signal]
            case Registered():
                shown += reply.signals
                assert {s.signal_id for s in reply.signals} == pending, "what is not acknowledged comes again"
            case _:
                pass
    told = {signal.signal_id for signal in shown if signal is not None}
    assert told <= pending
    if after.connected:
        assert told <= after.shown


def check_reload(after: InstanceState, world: World) -> None:
    """Nothing that is needed lives in memory only."""
    loaded = world.tables.load()
    assert loaded is not None
    assert durable(loaded) == durable(after)


def durable(state: InstanceState) -> InstanceState:
    """The state without what may be lost with the memory."""
    return attrs.evolve(
        state,
        last_activity_us=0,
        connected=False,
        shown=frozenset(),
        parked=frozenset(),
        heartbeat_us=0,
        signals=tuple(attrs.evolve(s, shown_us=None) for s in state.signals),
    )


# ---------------------------------------------------------------- beginnings


def registered(world: World | None = None) -> World:
    """A world whose instance was registered by its client."""
    found = world or World()
    found.say(Register())
    return found


def hosted(world: World | None = None, **start: Any) -> World:
    """A world whose instance was started for a workflow and launched on a host."""
    found = world or World()
    found.say(StartInstance(workflow="orders", **start))
    found.say(Register(workflow="orders"))
    return found
