"""The machine under random messages: `tests.machine_world` checks every decision of every run.

What a run is made of: requests of the newest session and of an old one, of outsiders, and of the runtime
itself; a clock that steps forwards and backwards; crashes that leave nothing but the tables, with and without
a session that survives them.
"""

import base64
import contextlib
import itertools
import json
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtara.errors import CallerError
from runtara.limits import Limits
from runtara.machine import RULES, RULES_WHILE_RUNNING
from runtara.machine.liveness import Mover, reason_to_move
from runtara.messages import (
    AckSignal,
    AskShutdown,
    Attach,
    CompensationReply,
    ExitReport,
    FinishCompensation,
    ForceSuspend,
    ForceTerminate,
    GetCheckpoint,
    GetStatus,
    PollSignals,
    RecordError,
    RecordRetryAttempt,
    Register,
    ReportEvent,
    Request,
    SaveCheckpoint,
    SendSignal,
    SessionLost,
    Sleep,
    StartCompensation,
    StartInstance,
    WaitReply,
    WaitSignal,
    Wake,
)
from runtara.records import (
    AcknowledgeSignal,
    CheckpointRecord,
    CompensationSpec,
    CompensationState,
    EventType,
    FinishStep,
    Reason,
    SignalRecord,
    SignalType,
    Status,
    StepStatus,
    WaitKind,
    WaitOutcome,
)
from tests.machine_world import SECOND, START_US, Step, World, check_reload, outcome
from tests.steps_model import steps_of

LIMITS = Limits(pending_signals=5, pending_signal_bytes=40, open_waits=4, compensations=3)
CHOICES = settings(
    derandomize=True,
    deadline=None,
    max_examples=400,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

Action = Callable[[World], None]
"""Acts on a world; a refusal is raised."""


# ---------------------------------------------------------------- what can happen


def says(build: Callable[[World], Request]) -> Action:
    return lambda world: void(world.say(build(world)))


def void(_: object) -> None:
    return None


def session(kind: type[Any], /, **fields: Any) -> st.SearchStrategy[Action]:
    """A request of a session: mostly of the newest epoch."""
    lag = st.sampled_from([0] * 15 + [1])
    return st.builds(
        lambda lag, **made: says(lambda world: kind(epoch=max(0, epoch(world) - lag), **made)), lag, **fields
    )


def epoch(world: World) -> int:
    return 0 if world.state is None else world.epoch


def outside(kind: type[Any], /, **fields: Any) -> st.SearchStrategy[Action]:
    return st.builds(lambda **made: says(lambda world: kind(**made)), **fields)


def ring(early: int) -> Action:
    """The wake scheduler: at the deadline that it knows of, or somewhat before."""

    def act(world: World) -> None:
        if world.state is None or world.row.due_us is None:
            return
        world.advance((world.row.due_us - world.now_us) / SECOND - early)
        world.say(Wake(epoch=world.epoch, deadline_us=world.row.due_us))

    return act


def acknowledge(index: int, granted: bool) -> Action:
    def act(world: World) -> None:
        ids = list(world.tables.signals)
        if ids:
            message = AckSignal(epoch=epoch(world), signal_id=ids[index % len(ids)], acknowledged=granted)
            world.say(message)

    return act


def finish_undoing(name: str, lag: int, success: bool, final: bool) -> Action:
    """End the newest attempt to undo a checkpoint, or one before it."""

    def act(world: World) -> None:
        record = world.tables.compensations.get(name)
        message = FinishCompensation(
            epoch=epoch(world),
            checkpoint_id=name,
            attempt=max(1, (record.attempts if record else 1) - lag),
            success=success,
            final=final,
        )
        world.say(message)

    return act


def sleep_until(name: str | None, seconds: int) -> Action:
    def act(world: World) -> None:
        body = {
            "wake_at_ms": (world.now_us + seconds * SECOND) // 1000,
            "state": base64.b64encode(b"s").decode(),
        }
        message = ReportEvent(
            epoch=epoch(world),
            type=EventType.SUSPENDED,
            checkpoint_id=name,
            payload=json.dumps(body).encode(),
        )
        world.say(message)

    return act


def clock_moves(seconds: int) -> Action:
    return lambda world: world.advance(seconds)


def crashes(session_survives: bool) -> Action:
    def act(world: World) -> None:
        if world.state is not None:
            world.crash(session_survives=session_survives)

    return act


def comes_back(lag: int) -> Action:
    """The server was lost, and the client goes on with its session, or with an older one."""

    def act(world: World) -> None:
        if world.state is not None:
            world.crash()
            world.say(Attach(epoch=max(0, world.epoch - lag)))

    return act


def orphaned(world: World) -> None:
    """The server was lost, and nobody came back."""
    if world.state is not None:
        world.crash()
        world.say(SessionLost(epoch=world.epoch, orphaned=True))


def signal(types: st.SearchStrategy[SignalType], key: st.SearchStrategy[Any]) -> st.SearchStrategy[Action]:
    return outside(
        SendSignal,
        type=types,
        key=key,
        payload=BYTES,
        request_id=REQUEST_IDS,
        store_if_unknown=st.booleans(),
    )


NAMES = st.sampled_from(["a", "b", "c", "d"])
MAYBE = st.none() | NAMES
REQUEST_IDS = st.sampled_from([None, None, None, "r1", "r2"])
BYTES = st.sampled_from([None, b"", b"x", b"0123456789"])
SPECS = st.none() | st.builds(CompensationSpec, step_id=NAMES, order=st.integers(0, 2))
SECONDS = st.sampled_from([0, 1, 60, 3600])
KEYS = st.sampled_from(["a", "k"])
SIGNALS = st.sampled_from([SignalType.PAUSE, SignalType.PAUSE, SignalType.RESUME, SignalType.SHUTDOWN])
QUIET_EVENTS = st.sampled_from([EventType.HEARTBEAT, EventType.CUSTOM])

STAYS: list[tuple[int, st.SearchStrategy[Action]]] = [
    (2, outside(Register, workflow=st.sampled_from([None, "orders"]))),
    (2, session(SaveCheckpoint, checkpoint_id=NAMES, state=BYTES)),
    (3, session(SaveCheckpoint, checkpoint_id=NAMES, state=st.just(b"y"), compensation=SPECS)),
    (1, outside(GetCheckpoint, checkpoint_id=NAMES)),
    (
        4,
        session(
            Sleep,
            duration_us=SECONDS.map(lambda s: s * SECOND),
            checkpoint_id=MAYBE,
            kind=st.sampled_from([WaitKind.SLEEP, WaitKind.SLEEP, WaitKind.RETRY]),
            request_id=REQUEST_IDS,
        ),
    ),
    (
        6,
        session(
            WaitSignal,
            key=KEYS,
            checkpoint_id=NAMES,
            timeout_us=st.none() | SECONDS.map(lambda s: s * SECOND),
        ),
    ),
    (2, session(ReportEvent, type=QUIET_EVENTS, payload=BYTES, request_id=REQUEST_IDS)),
    (1, session(ReportEvent, type=st.just(EventType.SUSPENDED), payload=BYTES)),
    (1, st.builds(sleep_until, MAYBE, SECONDS)),
    (1, st.sampled_from([0, 0, 0, 1]).map(comes_back)),
    (1, session(PollSignals, checkpoint_id=MAYBE)),
    (3, st.builds(acknowledge, st.integers(0, 9), st.sampled_from([True, True, False]))),
    (1, session(AckSignal, signal_type=st.sampled_from([SignalType.PAUSE, SignalType.RESUME]))),
    (1, session(RecordRetryAttempt, checkpoint_id=NAMES, attempt=st.integers(1, 2))),
    (1, session(RecordError, code=NAMES, message=NAMES, request_id=REQUEST_IDS)),
    (3, session(StartCompensation, checkpoint_id=NAMES)),
    (4, st.builds(finish_undoing, NAMES, st.sampled_from([0, 0, 0, 1]), st.booleans(), st.booleans())),
    (1, outside(GetStatus)),
    (
        1,
        outside(
            StartInstance,
            workflow=st.just("orders"),
            input=BYTES,
            timeout_us=st.sampled_from([None, 100 * SECOND]),
            request_id=REQUEST_IDS,
        ),
    ),
    (2, signal(SIGNALS, key=st.none())),
    (5, signal(st.just(SignalType.CUSTOM), key=KEYS)),
    (4, st.builds(ring, st.sampled_from([0, 0, 0, -5, 5]))),
    (1, session(AskShutdown)),
    (1, st.sampled_from([1, 61, 4000, -5, -4000]).map(clock_moves)),
    (1, st.booleans().map(crashes)),
]
"""What leaves a run alive, with weights."""

ENDS: list[tuple[int, st.SearchStrategy[Action]]] = [
    (2, session(ReportEvent, type=st.sampled_from([EventType.COMPLETED, EventType.FAILED]), payload=BYTES)),
    (2, session(ExitReport, reason=st.sampled_from(Reason))),
    (1, outside(ForceTerminate, error=st.sampled_from([None, "enough"]))),
    (2, session(SessionLost, orphaned=st.booleans())),
    (1, st.just(orphaned)),
    (1, session(ForceSuspend)),
    (2, signal(st.just(SignalType.CANCEL), key=st.none())),
    (2, session(AckSignal, signal_type=st.just(SignalType.CANCEL))),
]
"""What ends a run or a session."""


def weighted(choices: list[tuple[int, st.SearchStrategy[Action]]]) -> st.SearchStrategy[Action]:
    numbers = [number for number, (weight, _) in enumerate(choices) for _ in range(weight)]
    return st.sampled_from(numbers).flatmap(lambda number: choices[number][1])


def begins(*messages: Request, compensations: int = 0, failed: bool = False) -> Action:
    def act(world: World) -> None:
        for message in messages:
            world.say(message)
        for name in "ab"[:compensations]:
            spec = CompensationSpec(step_id=f"undo-{name}")
            world.say(SaveCheckpoint(epoch=world.epoch, checkpoint_id=name, state=b"y", compensation=spec))
        if failed:
            world.say(ReportEvent(epoch=world.epoch, type=EventType.FAILED))

    return act


START = StartInstance(workflow="orders")
BEGINNINGS: list[Action] = [
    begins(),
    begins(Register()),
    begins(START, Register()),
    begins(Register(), compensations=2),
    begins(START, Register(), compensations=2),
    begins(Register(), compensations=2, failed=True),
    begins(START, Register(), compensations=2, failed=True),
]


def run(actions: list[Action], *, careful: bool = True) -> World:
    world = World(limits=LIMITS, careful=careful)
    for action in actions:
        with contextlib.suppress(CallerError):  # a refusal changes nothing, as the next decisions show
            action(world)
    return world


RUNS = st.builds(
    lambda first, actions, end, after: [first, *actions, end, *after],
    st.sampled_from(BEGINNINGS),
    st.lists(weighted(STAYS), min_size=5, max_size=30),
    weighted(ENDS),
    st.lists(weighted([*STAYS, *ENDS]), max_size=30),
)


# ---------------------------------------------------------------- what is always true


@settings(CHOICES, max_examples=1000)
@given(RUNS)
def test_every_decision_of_a_random_run_keeps_the_rules(actions: list[Action]) -> None:
    """The rules are those of `tests.machine_world.check_decision`, which looks at every step."""
    world = run(actions)
    if world.state is not None:
        check_reload(world.state, world)


@CHOICES
@given(RUNS)
def test_a_recorded_run_can_be_decided_again_with_the_same_outcome(actions: list[Action]) -> None:
    world = run(actions, careful=False)
    state = None
    for step in world.steps:
        if step.before is not state:
            state = step.before  # a crash: the memory came from the tables
        again = outcome(state, step.message, step.facts, step.now_us, LIMITS)
        assert again == outcome(step.before, step.message, step.facts, step.now_us, LIMITS)
        state = step.decision.state


@CHOICES
@given(RUNS)
def test_each_custom_signal_is_consumed_at_most_once_in_order_and_only_by_name(
    actions: list[Action],
) -> None:
    """By a wait, which records it as a checkpoint in the same unit, or by an ack of its id."""
    world = run(actions, careful=False)
    consumed: list[int] = []
    by_waits: dict[str | None, list[int]] = {}
    for step in world.steps:
        for op in step.decision.ops:
            if not isinstance(op, AcknowledgeSignal):
                continue
            consumed.append(op.signal_id)
            signal = world.tables.signals[op.signal_id]
            if signal.type is not SignalType.CUSTOM:
                continue
            if isinstance(step.message, AckSignal):
                assert step.message.signal_id == op.signal_id
            else:
                recorded = [c for c in step.decision.ops if isinstance(c, CheckpointRecord)]
                assert [c.state for c in recorded] == [signal.payload or b""]
                assert world.tables.waits[recorded[0].checkpoint_id].key == signal.key
                by_waits.setdefault(signal.key, []).append(op.signal_id)
    assert len(consumed) == len(set(consumed))
    for ids in by_waits.values():
        assert ids == sorted(ids)


@CHOICES
@given(RUNS)
def test_a_custom_signal_is_kept_until_it_is_consumed(actions: list[Action]) -> None:
    world = run(actions, careful=False)
    accepted = [s for s in world.tables.signals.values() if s.acknowledged_us is None]
    assert accepted == ([] if world.state is None else without_shown(world.state.signals))


def without_shown(signals: tuple[SignalRecord, ...]) -> list[SignalRecord]:
    return [attrs.evolve(s, shown_us=None) for s in signals]


@CHOICES
@given(RUNS)
def test_every_run_can_be_brought_to_its_end_by_its_client(actions: list[Action]) -> None:
    """Whatever happened: register, resume, undo what is to be undone, and it ends as intended."""
    world = run(actions, careful=False)
    if world.state is None or world.status.is_terminal:
        return
    world.say(Register())
    world.say(SendSignal(type=SignalType.RESUME))
    assert world.status is Status.RUNNING
    intended = world.row.intended or Status.COMPLETED
    world.say(ReportEvent(epoch=world.epoch, type=EventType.COMPLETED))
    for record in world.known.compensations if intended is not Status.COMPLETED else ():
        if record.state in (CompensationState.PENDING, CompensationState.TRIGGERED):
            undo(world, record.checkpoint_id)
    assert world.status is intended


def undo(world: World, name: str) -> None:
    begun = world.ask(StartCompensation(epoch=world.epoch, checkpoint_id=name), CompensationReply)
    done = FinishCompensation(epoch=world.epoch, checkpoint_id=name, attempt=begun.attempt, success=True)
    world.say(done)


@CHOICES
@given(RUNS)
def test_every_run_can_be_terminated_at_any_point(actions: list[Action]) -> None:
    world = run(actions, careful=False)
    if world.state is not None and not world.status.is_terminal:
        world.say(ForceTerminate())
        assert world.status is Status.CANCELLED


@CHOICES
@given(RUNS)
def test_every_run_that_time_can_move_comes_to_rest(actions: list[Action]) -> None:
    """Rings never go round in a circle: every one of them settles something or moves the instance."""
    world = run(actions, careful=False)
    for _ in range(LIMITS.open_waits + 3):
        if world.state is None or world.row.due_us is None:
            return
        world.now_us = max(world.now_us, world.row.due_us)
        world.say(Wake(epoch=world.epoch, deadline_us=world.row.due_us))
    pytest.fail(f"still due: {world.row}")


STEP_BODIES = st.fixed_dictionaries(
    {"step_id": st.sampled_from(["a", "a", "a", "b", None])},
    optional={
        "scope_id": st.sampled_from(["s", "s", 5]),
        "parent_scope_id": st.sampled_from(["s", []]),
        "step_name": st.sampled_from(["A", {}]),
        "step_type": st.sampled_from(["http", False]),
        "error": st.sampled_from([None, None, "broken", {}]),
        "outputs": st.sampled_from([None, "x", {"_error": True}, {"_error": 1}]),
    },
).map(lambda body: json.dumps(body).encode())
STEP_EVENTS = session(
    ReportEvent,
    type=st.just(EventType.CUSTOM),
    subtype=st.sampled_from(["step_debug_start", "step_debug_end", "log"]),
    payload=st.one_of(STEP_BODIES, STEP_BODIES, STEP_BODIES, BYTES),
    timestamp_us=st.sampled_from([None, None, 0, START_US]),
    request_id=REQUEST_IDS,
)
STEP_RUNS = st.builds(
    lambda first, actions: [first, *actions],
    st.sampled_from(BEGINNINGS[1:]),
    st.lists(
        weighted([(25, STEP_EVENTS), (5, st.booleans().map(crashes)), *ENDS]),
        min_size=5,
        max_size=40,
    ),
)


@CHOICES
@given(STEP_RUNS)
def test_the_steps_are_those_that_the_stored_events_tell_of(actions: list[Action]) -> None:
    world = run(actions)
    assert list(world.tables.steps.values()) == steps_of(world.tables.events)


def test_random_steps_reach_what_they_are_about() -> None:
    """A guard for the test above: steps end both ways, nested, after a crash and after the instance's end."""
    seen: set[object] = set()

    @CHOICES
    @given(STEP_RUNS)
    def look(actions: list[Action]) -> None:
        world = run(actions, careful=False)
        for before, step in itertools.pairwise(world.steps):
            finished = [op for op in step.decision.ops if isinstance(op, FinishStep)]
            if not finished or step.before is None:
                continue
            seen.add(finished[0].status)
            seen.add(("over", step.before.row.status.is_terminal))
            seen.add(("crashed", step.before is not before.decision.state))
            names = [(s.step_id, s.scope_id) for s in step.before.steps]
            seen.add(("nested", len(names) != len(set(names))))

    look()
    assert seen >= {StepStatus.COMPLETED, StepStatus.FAILED}
    assert seen >= {("over", True), ("crashed", True), ("nested", True)}


ONLY_REPORTED = (Reason.CRASHED, Reason.ATTEMPTS_EXHAUSTED)
"""Reasons that nothing but one exit report in thirteen brings."""


def test_random_runs_reach_what_they_are_about() -> None:
    """A guard for the tests above: the actions must not lose their teeth."""
    seen: set[object] = set()

    @settings(CHOICES, max_examples=800)
    @given(RUNS)
    def look(actions: list[Action]) -> None:
        for step in run(actions, careful=False).steps:
            state = step.decision.state
            seen.add(type(step.message))
            seen.update((WaitOutcome, release.reply.outcome) for release in waits_of(step))
            if state is not None:
                row = state.row
                seen.update([(Status, row.status), (Reason, row.reason), reason_to_move(state)])
                seen.add((row.compensating, row.status))

    look()
    assert seen >= {*RULES, *RULES_WHILE_RUNNING}
    assert seen >= {(WaitOutcome, outcome) for outcome in (*WaitOutcome, None)}
    assert seen >= {(Status, status) for status in Status if status is not Status.UNKNOWN}
    assert seen >= set(Mover)
    assert seen >= {(Reason, reason) for reason in Reason if reason not in ONLY_REPORTED}
    assert seen >= {(True, status) for status in (Status.PENDING, Status.RUNNING, Status.SUSPENDED)}


def waits_of(step: Step) -> list[Any]:
    return [r for r in step.decision.releases if isinstance(r.reply, WaitReply)]


def test_an_instance_that_nothing_moves_is_found() -> None:
    """The guard itself: take away whatever moves an instance, and it is a violation."""
    world = run([begins(Register())])
    world.say(ReportEvent(epoch=world.epoch, type=EventType.SUSPENDED))
    state = world.known
    assert reason_to_move(state) is Mover.CLIENT
    assert reason_to_move(attrs.evolve(state, row=attrs.evolve(state.row, awaits_client_us=None))) is None
