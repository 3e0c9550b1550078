"""register, start, the end of a session, drains, forced endings, exit reports: each rule, each refusal."""

from typing import Any

import pytest

from runtara.errors import (
    AlreadyFinished,
    CheckpointNotFound,
    Conflict,
    Draining,
    InstanceNotFound,
    InvalidInstanceState,
    RuntaraError,
    StaleEpoch,
    TooManyInstances,
)
from runtara.messages import (
    AckSignal,
    AskShutdown,
    ChangeReply,
    ClosedPush,
    ExitReport,
    FinishCompensation,
    ForceSuspend,
    ForceTerminate,
    GetCheckpoint,
    GetStatus,
    InstanceView,
    PollSignals,
    RecordError,
    RecordRetryAttempt,
    Register,
    Registered,
    ReportEvent,
    Request,
    SaveCheckpoint,
    SendSignal,
    SessionLost,
    SignalPush,
    Sleep,
    StartCompensation,
    StartInstance,
    StartReply,
    WaitSignal,
    Wake,
)
from runtara.records import EventType, PayloadKind, Reason, SignalType, Status
from tests.machine_world import INSTANCE, SECOND, START_US, TENANT, World, hosted, registered

SESSION_REQUESTS: dict[type[Any], dict[str, Any]] = {
    SaveCheckpoint: {"checkpoint_id": "c", "state": b"x"},
    Sleep: {"duration_us": SECOND},
    WaitSignal: {"key": "k", "checkpoint_id": "w"},
    ReportEvent: {"type": EventType.HEARTBEAT},
    PollSignals: {},
    AckSignal: {"signal_id": 1},
    RecordRetryAttempt: {"checkpoint_id": "c", "attempt": 1},
    RecordError: {"code": "E", "message": "m"},
    StartCompensation: {"checkpoint_id": "c"},
    FinishCompensation: {"checkpoint_id": "c", "attempt": 1, "success": True},
    ExitReport: {"reason": Reason.COMPLETED},
    SessionLost: {},
    AskShutdown: {},
    ForceSuspend: {},
}
MUST_RUN = (SaveCheckpoint, Sleep, WaitSignal, RecordRetryAttempt, StartCompensation, FinishCompensation)


def save(world: World, name: str = "c1") -> None:
    world.say(SaveCheckpoint(epoch=world.epoch, checkpoint_id=name, state=b"x"))


# ---------------------------------------------------------------- the order of checks of a session


@pytest.mark.parametrize("kind", SESSION_REQUESTS, ids=lambda kind: kind.__name__)
def test_an_unknown_instance_is_refused_before_anything_else(kind: type[Any]) -> None:
    with pytest.raises(InstanceNotFound) as caught:
        World().say(kind(epoch=1, **SESSION_REQUESTS[kind]))
    assert caught.value.details == {"instance_id": INSTANCE}


@pytest.mark.parametrize("kind", SESSION_REQUESTS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("ended", [False, True])
def test_a_stale_epoch_is_refused_before_the_state_is_looked_at(kind: type[Any], ended: bool) -> None:
    world = registered()
    old = world.epoch
    world.say(Register())
    if ended:
        world.say(ReportEvent(epoch=world.epoch, type=EventType.COMPLETED))
    with pytest.raises(StaleEpoch) as caught:
        world.say(kind(epoch=old, **SESSION_REQUESTS[kind]))
    assert caught.value.details == {"epoch": old, "current": world.epoch}


@pytest.mark.parametrize("kind", MUST_RUN, ids=lambda kind: kind.__name__)
def test_a_request_that_needs_running_names_the_state_it_found(kind: type[Any]) -> None:
    world = registered()
    world.say(ReportEvent(epoch=world.epoch, type=EventType.SUSPENDED))
    with pytest.raises(InvalidInstanceState) as caught:
        world.say(kind(epoch=world.epoch, **SESSION_REQUESTS[kind]))
    assert caught.value.details == {"expected": "running", "actual": "suspended"}


@pytest.mark.parametrize(
    "message", [GetCheckpoint(checkpoint_id="c"), ForceTerminate(), Wake(epoch=1, deadline_us=1)]
)
def test_outsiders_too_are_told_that_there_is_no_such_instance(message: Request) -> None:
    with pytest.raises(InstanceNotFound):
        World().say(message)


# ---------------------------------------------------------------- register


def test_register_creates_a_running_instance_with_an_epoch_and_a_started_event() -> None:
    world = World()
    reply = world.ask(Register(definition_version="v1"), Registered)
    assert (reply.created, reply.status, reply.epoch, reply.attempt) == (True, Status.RUNNING, 1, 1)
    assert (reply.paused, reply.due, reply.compensating, reply.signals) == (False, False, False, ())
    assert (reply.input, reply.checkpoint_id) == (None, None)
    assert (world.row.tenant_id, world.row.instance_id) == (TENANT, INSTANCE)
    assert (world.row.created_us, world.row.started_us) == (START_US, START_US)
    assert (world.row.definition_version, world.row.finished_us) == ("v1", None)
    (event,) = world.tables.events
    assert (event.type, event.checkpoint_id, event.revision) == (EventType.STARTED, None, 1)


@pytest.mark.parametrize("refusal", [Draining("drains"), TooManyInstances("full")])
def test_register_of_a_new_id_is_refused_first_while_draining_or_over_the_cap(refusal: RuntaraError) -> None:
    world = World(refuse_new=refusal)
    with pytest.raises(type(refusal)):
        world.say(Register(checkpoint_id="missing"))
    assert world.state is None


def test_register_of_a_known_id_is_not_refused_while_draining() -> None:
    world = registered()
    world.refuse_new = Draining("drains")
    assert not world.ask(Register(), Registered).created


def test_register_under_another_workflow_is_a_conflict_even_when_it_has_ended() -> None:
    world = hosted()
    world.say(ReportEvent(epoch=world.epoch, type=EventType.COMPLETED))
    with pytest.raises(Conflict) as caught:
        world.say(Register(workflow="other", checkpoint_id="missing"))
    assert caught.value.field == "workflow"


def test_register_of_a_finished_instance_says_how_it_ended_before_it_looks_for_the_checkpoint() -> None:
    world = registered()
    world.say(ReportEvent(epoch=world.epoch, type=EventType.FAILED, payload=b"no"))
    with pytest.raises(AlreadyFinished) as caught:
        world.say(Register(checkpoint_id="missing"))
    assert caught.value.details == {
        "status": "failed",
        "reason": "application_error",
        "finished_us": START_US,
    }


def test_register_at_a_checkpoint_that_does_not_exist_changes_nothing() -> None:
    world = registered()
    before = world.state
    with pytest.raises(CheckpointNotFound) as caught:
        world.say(Register(checkpoint_id="missing"))
    assert caught.value.details["field"] == "checkpoint_id"
    assert world.state is before
    new = World()
    with pytest.raises(CheckpointNotFound):
        new.say(Register(checkpoint_id="missing"))
    assert new.state is None


def test_register_again_supersedes_keeps_the_first_start_and_replies_with_the_newest_checkpoint() -> None:
    world = registered()
    save(world)
    world.advance(10)
    reply = world.ask(Register(checkpoint_id="c1"), Registered)
    assert (reply.created, reply.epoch, reply.checkpoint_id, reply.attempt) == (False, 2, "c1", 1)
    assert world.last.supersedes
    assert world.row.started_us == START_US
    assert world.tables.events[-1].checkpoint_id == "c1"


def test_register_ends_the_waits_that_the_old_session_is_parked_on() -> None:
    world = registered()
    world.say(Sleep(epoch=world.epoch, duration_us=60 * SECOND, checkpoint_id="nap"))
    world.say(Register())
    answer = world.released("nap")
    assert isinstance(answer, StaleEpoch)
    assert answer.details == {"epoch": 1, "current": 2}
    assert [w.wait_id for w in world.known.waits] == ["nap"]


def test_register_does_not_unpause() -> None:
    world = registered()
    pause = world.ask(SendSignal(type=SignalType.PAUSE), object)
    world.say(AckSignal(epoch=world.epoch, signal_id=pause.signal_id))  # type: ignore[attr-defined]
    world.say(SessionLost(epoch=world.epoch))
    reply = world.ask(Register(), Registered)
    assert (reply.paused, reply.status) == (True, Status.SUSPENDED)
    assert world.row.reason is Reason.PAUSED


def test_register_replies_with_and_pushes_every_pending_signal() -> None:
    world = registered()
    world.say(SendSignal(type=SignalType.CUSTOM, key="k", payload=b"1"))
    world.say(SendSignal(type=SignalType.CANCEL))
    reply = world.ask(Register(), Registered)
    assert [s.type for s in reply.signals] == [SignalType.CUSTOM, SignalType.CANCEL]
    assert [p.signal.type for p in world.last.pushes if isinstance(p, SignalPush)] == [
        SignalType.CUSTOM,
        SignalType.CANCEL,
    ]


def test_an_epoch_is_never_used_twice() -> None:
    world = registered()
    epochs = {world.epoch}
    for _ in range(5):
        world.crash()
        world.say(Register())
        epochs.add(world.epoch)
    assert epochs == {1, 2, 3, 4, 5, 6}


# ---------------------------------------------------------------- attempts


def crash_and_register(world: World) -> int:
    world.crash()
    return world.ask(Register(), Registered).attempt


def test_a_crash_without_progress_counts_as_an_attempt_and_progress_begins_anew() -> None:
    world = registered()
    assert [crash_and_register(world) for _ in range(2)] == [2, 3]
    save(world)
    assert crash_and_register(world) == 1
    assert world.row.attempt == 1


@pytest.mark.parametrize("begin", [registered, hosted])
@pytest.mark.parametrize("orphaned", [False, True])
def test_a_lost_session_counts_as_an_attempt_once(begin: Any, orphaned: bool) -> None:
    world = begin()
    if orphaned:
        world.crash()  # the server that held the session is gone
    world.say(SessionLost(epoch=world.epoch, orphaned=orphaned))
    assert world.row.attempt == 2
    assert world.ask(Register(), Registered).attempt == 2


def test_what_was_asked_for_is_no_attempt() -> None:
    world = registered()
    world.say(AskShutdown(epoch=world.epoch))
    world.say(AckSignal(epoch=world.epoch, signal_type=SignalType.SHUTDOWN))
    assert world.ask(Register(), Registered).attempt == 1
    world.say(ForceSuspend(epoch=world.epoch))
    assert world.ask(Register(), Registered).attempt == 1
    world.say(ReportEvent(epoch=world.epoch, type=EventType.SUSPENDED))
    assert world.ask(Register(), Registered).attempt == 1
    world.say(SendSignal(type=SignalType.PAUSE))
    world.say(AckSignal(epoch=world.epoch, signal_type=SignalType.PAUSE))
    world.say(SessionLost(epoch=world.epoch))
    world.say(SendSignal(type=SignalType.RESUME))
    assert world.ask(Register(), Registered).attempt == 1


# ---------------------------------------------------------------- start


def test_start_creates_a_pending_hosted_instance_with_its_input() -> None:
    world = World()
    message = StartInstance(
        workflow="orders", input=b"in", definition_version="v2", max_attempts=7, timeout_us=60 * SECOND
    )
    assert world.ask(message, StartReply) == StartReply(created=True, status=Status.PENDING)
    row = world.row
    assert (row.hosted, row.workflow, row.definition_version, row.max_attempts) == (True, "orders", "v2", 7)
    assert (row.epoch, row.attempt, row.started_us) == (0, 0, None)
    assert row.deadline_us == row.due_us == START_US + 60 * SECOND
    assert world.tables.payloads == {PayloadKind.INPUT: b"in"}


def test_start_again_finds_the_instance_whatever_became_of_it() -> None:
    world = hosted(input=b"in")
    again = StartInstance(workflow="orders", input=b"in")
    assert world.ask(again, StartReply) == StartReply(created=False, status=Status.RUNNING)
    world.say(ReportEvent(epoch=world.epoch, type=EventType.COMPLETED))
    assert world.ask(again, StartReply) == StartReply(created=False, status=Status.COMPLETED)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (StartInstance(workflow="other", input=b"in"), "workflow"),
        (StartInstance(workflow="orders", input=b"other"), "input"),
    ],
)
def test_start_again_with_another_body_is_a_conflict(message: StartInstance, field: str) -> None:
    with pytest.raises(Conflict) as caught:
        hosted(input=b"in").say(message)
    assert caught.value.field == field


def test_start_of_an_id_that_a_client_runs_on_its_own_is_refused() -> None:
    with pytest.raises(InvalidInstanceState) as caught:
        registered().say(StartInstance(workflow="orders"))
    assert caught.value.details == {"expected": "pending", "actual": "running"}


def test_start_is_refused_for_new_ids_while_draining() -> None:
    with pytest.raises(Draining):
        World(refuse_new=Draining("drains")).say(StartInstance(workflow="orders"))


def test_a_launch_gets_the_input() -> None:
    world = World()
    world.say(StartInstance(workflow="orders", input=b"in"))
    assert world.ask(Register(workflow="orders"), Registered).input == b"in"


# ---------------------------------------------------------------- the end of a session


def test_a_lost_client_leaves_its_instance_suspended_and_awaited() -> None:
    world = registered()
    world.advance(5)
    reply = world.ask(SessionLost(epoch=world.epoch), ChangeReply)
    assert reply == ChangeReply(applied=True, status=Status.SUSPENDED, reason=Reason.DISCONNECTED)
    assert world.row.awaits_client_us == START_US + 5 * SECOND
    assert not world.known.connected


def test_a_client_lost_with_its_runtime_leaves_an_orphan() -> None:
    world = registered()
    world.crash()
    world.say(SessionLost(epoch=world.epoch, orphaned=True))
    assert (world.status, world.row.reason) == (Status.SUSPENDED, Reason.ORPHANED)


def test_a_lost_host_sends_its_instance_back_to_the_queue() -> None:
    world = hosted()
    world.say(SessionLost(epoch=world.epoch))
    assert (world.status, world.row.reason) == (Status.PENDING, None)


def test_a_lost_session_that_sleeps_keeps_its_deadline() -> None:
    world = registered()
    world.say(Sleep(epoch=world.epoch, duration_us=60 * SECOND, checkpoint_id="nap"))
    world.say(SessionLost(epoch=world.epoch))
    assert isinstance(world.released("nap"), StaleEpoch)
    assert world.row.sleep_until_us == START_US + 60 * SECOND
    assert world.row.awaits_client_us is None


def test_the_loss_of_a_session_that_is_over_changes_nothing() -> None:
    world = registered()
    world.say(ReportEvent(epoch=world.epoch, type=EventType.COMPLETED))
    decision = world.say(SessionLost(epoch=world.epoch))
    assert decision.ops == ()
    assert decision.reply == ChangeReply(applied=False, status=Status.COMPLETED, reason=Reason.COMPLETED)


# ---------------------------------------------------------------- drains


def test_a_drain_asks_once_and_ends_what_is_parked() -> None:
    world = registered()
    world.say(Sleep(epoch=world.epoch, duration_us=60 * SECOND, checkpoint_id="nap"))
    assert world.ask(AskShutdown(epoch=world.epoch), ChangeReply).applied
    answer = world.released_wait("nap")
    assert answer.interrupted
    assert answer.signal is not None
    assert (answer.signal.type, answer.signal.epoch) == (SignalType.SHUTDOWN, world.epoch)
    assert not world.ask(AskShutdown(epoch=world.epoch), ChangeReply).applied
    assert len(world.known.signals) == 1


@pytest.mark.parametrize(("begin", "due"), [(registered, None), (hosted, START_US)])
def test_an_acknowledged_shutdown_suspends_due_at_once(begin: Any, due: int | None) -> None:
    world = begin()
    world.say(AskShutdown(epoch=world.epoch))
    world.say(AckSignal(epoch=world.epoch, signal_type=SignalType.SHUTDOWN))
    assert (world.status, world.row.reason) == (Status.SUSPENDED, Reason.SHUTDOWN_REQUESTED)
    assert world.row.sleep_until_us == due
    if due is None:
        assert world.row.awaits_client_us == START_US
    else:
        world.say(Wake(epoch=world.epoch, deadline_us=due))
        assert world.status is Status.PENDING


@pytest.mark.parametrize("end", ["register", "lose", "force"])
def test_a_shutdown_dies_with_its_epoch(end: str) -> None:
    world = registered()
    world.say(AskShutdown(epoch=world.epoch))
    if end == "lose":
        world.say(SessionLost(epoch=world.epoch))
    elif end == "force":
        world.say(ForceSuspend(epoch=world.epoch))
    assert world.ask(Register(), Registered).signals == ()
    world.say(Sleep(epoch=world.epoch, duration_us=SECOND, checkpoint_id="nap"))
    assert world.last.park == "nap"


def test_a_shutdown_of_an_old_epoch_is_stale() -> None:
    world = registered()
    world.say(Register())
    with pytest.raises(StaleEpoch):
        world.say(AskShutdown(epoch=1))


def test_the_end_of_the_grace_period_suspends_due_at_once_and_tells_the_session() -> None:
    world = hosted()
    world.say(ForceSuspend(epoch=world.epoch))
    assert (world.status, world.row.reason) == (Status.SUSPENDED, Reason.SHUTDOWN_REQUESTED)
    assert world.row.sleep_until_us == START_US
    closed = ClosedPush(status=Status.SUSPENDED, reason=Reason.SHUTDOWN_REQUESTED)
    assert world.last.pushes == (closed,)


def test_the_end_of_the_grace_period_does_nothing_to_a_session_that_suspended_itself() -> None:
    world = registered()
    world.say(ReportEvent(epoch=world.epoch, type=EventType.SUSPENDED))
    reply = world.ask(ForceSuspend(epoch=world.epoch), ChangeReply)
    assert not reply.applied
    assert not world.known.connected


# ---------------------------------------------------------------- forced endings


@pytest.mark.parametrize("begin", [registered, hosted])
def test_force_terminate_ends_the_instance_now(begin: Any) -> None:
    world = begin()
    world.say(Sleep(epoch=world.epoch, duration_us=60 * SECOND, checkpoint_id="nap"))
    reply = world.ask(ForceTerminate(error="enough"), ChangeReply)
    assert reply == ChangeReply(applied=True, status=Status.CANCELLED, reason=Reason.CANCELLED)
    assert isinstance(world.released("nap"), AlreadyFinished)
    assert world.row.cancelling_us == world.row.finished_us == START_US
    assert world.tables.payloads == {PayloadKind.ERROR: b"enough"}
    assert world.last.pushes == (ClosedPush(status=Status.CANCELLED, reason=Reason.CANCELLED),)


def test_force_terminate_of_a_finished_instance_says_how_it_ended() -> None:
    world = registered()
    world.say(ReportEvent(epoch=world.epoch, type=EventType.COMPLETED))
    with pytest.raises(AlreadyFinished) as caught:
        world.say(ForceTerminate())
    assert caught.value.status == "completed"


# ---------------------------------------------------------------- exit reports

EXITS: dict[Reason, tuple[Status, Reason | None]] = {
    Reason.SLEEPING: (Status.SUSPENDED, Reason.DISCONNECTED),
    Reason.WAITING_SIGNAL: (Status.SUSPENDED, Reason.DISCONNECTED),
    Reason.PAUSED: (Status.SUSPENDED, Reason.PAUSED),
    Reason.SHUTDOWN_REQUESTED: (Status.SUSPENDED, Reason.SHUTDOWN_REQUESTED),
    Reason.DISCONNECTED: (Status.SUSPENDED, Reason.DISCONNECTED),
    Reason.COMPENSATING: (Status.SUSPENDED, Reason.DISCONNECTED),
    Reason.COMPLETED: (Status.COMPLETED, Reason.COMPLETED),
    Reason.APPLICATION_ERROR: (Status.FAILED, Reason.APPLICATION_ERROR),
    Reason.CANCELLED: (Status.CANCELLED, Reason.CANCELLED),
    Reason.CRASHED: (Status.FAILED, Reason.CRASHED),
    Reason.TIMEOUT: (Status.FAILED, Reason.TIMEOUT),
    Reason.ATTEMPTS_EXHAUSTED: (Status.FAILED, Reason.ATTEMPTS_EXHAUSTED),
    Reason.ORPHANED: (Status.SUSPENDED, Reason.ORPHANED),
}


def test_the_table_of_exits_names_every_reason() -> None:
    assert set(EXITS) == set(Reason)


@pytest.mark.parametrize("begin", [registered, hosted])
@pytest.mark.parametrize("reason", Reason, ids=lambda reason: reason.word)
def test_an_exit_report_moves_a_running_instance(begin: Any, reason: Reason) -> None:
    world = begin()
    world.say(Sleep(epoch=world.epoch, duration_us=60 * SECOND, checkpoint_id="nap"))
    message = ExitReport(
        epoch=world.epoch,
        reason=reason,
        exit_code=-9,
        stderr=b"trace",
        output=b"out",
        error="broken",
        peak_memory_bytes=1024,
        cpu_time_us=77,
    )
    reply = world.ask(message, ChangeReply)
    expected = EXITS[reason]
    if expected == (Status.SUSPENDED, Reason.DISCONNECTED) and reason is not Reason.DISCONNECTED:
        expected = (Status.SUSPENDED, Reason.SLEEPING)  # there is a sleep to wait for
    assert (reply.applied, reply.status, reply.reason) == (True, *expected)
    row = world.row
    assert (row.exit_code, row.peak_memory_bytes, row.cpu_time_us) == (-9, 1024, 77)
    assert world.tables.payloads[PayloadKind.STDERR] == b"trace"
    assert not world.known.connected
    assert "nap" in world.answers
    if reason is Reason.COMPLETED:
        assert world.tables.payloads[PayloadKind.OUTPUT] == b"out"
    if expected[0] in (Status.FAILED, Status.CANCELLED):
        assert world.tables.payloads[PayloadKind.ERROR] == b"broken"


def test_an_exit_report_without_a_text_says_so() -> None:
    world = registered()
    world.say(ExitReport(epoch=world.epoch, reason=Reason.CRASHED))
    assert world.tables.payloads[PayloadKind.ERROR] == b"Unknown error"


@pytest.mark.parametrize("first", [EventType.COMPLETED, EventType.FAILED, EventType.SUSPENDED])
def test_an_exit_report_applies_only_while_running_and_says_so(first: EventType) -> None:
    world = registered()
    world.say(ReportEvent(epoch=world.epoch, type=first))
    before = world.row
    decision = world.say(ExitReport(epoch=world.epoch, reason=Reason.CRASHED, exit_code=1))
    assert decision.ops == ()
    assert decision.reply == ChangeReply(applied=False, status=before.status, reason=before.reason)


# ---------------------------------------------------------------- status


def test_the_status_of_an_unknown_instance_is_unknown() -> None:
    view = World().ask(GetStatus(), InstanceView)
    assert (view.status, view.error, view.revision) == (Status.UNKNOWN, "Instance not found", 0)
    assert view.instance_id == INSTANCE


def test_the_status_shows_the_row_the_newest_checkpoint_and_the_unconsumed_signals() -> None:
    world = hosted(input=b"in")
    save(world)
    world.say(SendSignal(type=SignalType.CUSTOM, key="k"))
    view = world.ask(GetStatus(), InstanceView)
    assert (view.status, view.reason, view.epoch) == (Status.RUNNING, None, world.epoch)
    assert (view.checkpoint_id, view.unconsumed_signals, view.connected) == ("c1", 1, True)
    assert (view.input, view.output, view.error) == (b"in", None, None)
    assert view.revision == world.known.revision


def test_the_status_of_a_finished_instance_shows_its_outcome() -> None:
    done, broken = registered(), registered()
    done.say(ReportEvent(epoch=1, type=EventType.COMPLETED, payload=b"out"))
    broken.say(ReportEvent(epoch=1, type=EventType.FAILED, payload=b"no"))
    assert done.ask(GetStatus(), InstanceView).output == b"out"
    assert broken.ask(GetStatus(), InstanceView).error == "no"
