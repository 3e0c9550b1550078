"""Compensation: what was done is undone before a failure or a cancel becomes final."""

from typing import Any

import pytest

from runtara.errors import CheckpointNotFound, InvalidInstanceState, Overloaded
from runtara.limits import Limits
from runtara.messages import (
    AckReply,
    AckSignal,
    ChangeReply,
    CheckpointReply,
    ClosedPush,
    CompensationReply,
    CompensationView,
    EventReply,
    ExitReport,
    FinishCompensation,
    ForceTerminate,
    Register,
    Registered,
    ReportEvent,
    SaveCheckpoint,
    SendSignal,
    SessionLost,
    SignalReply,
    Sleep,
    StartCompensation,
    StartInstance,
    WaitSignal,
    Wake,
)
from runtara.records import (
    CompensationSpec,
    CompensationState,
    EventType,
    PayloadKind,
    Reason,
    SignalType,
    Status,
    WaitKind,
    WaitOutcome,
)
from tests.machine_world import SECOND, START_US, World, hosted, registered


def save(world: World, name: str, order: int = 0) -> None:
    spec = CompensationSpec(step_id=f"undo-{name}", data=b"d", order=order)
    message = SaveCheckpoint(epoch=world.epoch, checkpoint_id=name, state=b"x", compensation=spec)
    assert not world.ask(message, CheckpointReply).found


def report(world: World, type: EventType, payload: bytes | None = None) -> EventReply:
    return world.ask(ReportEvent(epoch=world.epoch, type=type, payload=payload), EventReply)


def begin_undo(world: World, name: str) -> CompensationReply:
    return world.ask(StartCompensation(epoch=world.epoch, checkpoint_id=name), CompensationReply)


def end_undo(
    world: World, name: str, attempt: int = 1, success: bool = True, **more: Any
) -> CompensationReply:
    message = FinishCompensation(
        epoch=world.epoch, checkpoint_id=name, attempt=attempt, success=success, **more
    )
    return world.ask(message, CompensationReply)


def with_two(world: World) -> World:
    save(world, "a", order=1)
    save(world, "b", order=2)
    return world


def failed(world: World) -> World:
    with_two(world)
    report(world, EventType.FAILED, b"broken")
    return world


# ---------------------------------------------------------------- registering


def test_a_compensation_is_registered_with_its_checkpoint() -> None:
    world = with_two(registered())
    assert [
        (c.checkpoint_id, c.step_id, c.order, c.state, c.attempts) for c in world.known.compensations
    ] == [
        ("a", "undo-a", 1, CompensationState.PENDING, 0),
        ("b", "undo-b", 2, CompensationState.PENDING, 0),
    ]
    assert world.row.compensation_state is CompensationState.PENDING
    spec = world.tables.checkpoints["a"].compensation
    assert spec == CompensationSpec(step_id="undo-a", data=b"d", order=1)


def test_a_checkpoint_that_is_found_registers_nothing_again() -> None:
    world = registered()
    save(world, "a")
    spec = CompensationSpec(step_id="other")
    message = SaveCheckpoint(epoch=1, checkpoint_id="a", state=b"x", compensation=spec)
    assert world.ask(message, CheckpointReply).found
    assert world.last.ops == ()


def test_compensations_are_bounded() -> None:
    world = registered(World(limits=Limits(compensations=1)))
    save(world, "a")
    with pytest.raises(Overloaded):
        save(world, "b")
    assert "b" not in world.tables.checkpoints


def test_a_completed_instance_undoes_nothing() -> None:
    world = with_two(registered())
    assert report(world, EventType.COMPLETED).status is Status.COMPLETED


def test_all_succeeded_is_true_when_there_are_none() -> None:
    view = CompensationView(state=CompensationState.NONE, reason=None, compensations=())
    assert (view.all_succeeded, view.pending) == (True, 0)
    open_one = CompensationView(
        state=CompensationState.PENDING,
        reason=None,
        compensations=with_two(registered()).known.compensations,
    )
    assert (open_one.all_succeeded, open_one.pending) == (False, 2)


# ---------------------------------------------------------------- turning compensating


def test_a_failure_turns_the_live_session_of_a_client_compensating() -> None:
    world = with_two(registered())
    reply = report(world, EventType.FAILED, b"broken")
    assert (reply.applied, reply.status, reply.reason) == (True, Status.RUNNING, Reason.COMPENSATING)
    row = world.row
    assert (row.compensating, row.intended, row.cancelling_us) == (True, Status.FAILED, START_US)
    assert row.compensation_state is CompensationState.TRIGGERED
    assert row.compensation_reason == "application_error"
    assert world.tables.payloads == {PayloadKind.ERROR: b"broken"}
    assert row.finished_us is None


def test_a_failure_sends_a_hosted_instance_to_the_queue_to_be_undone() -> None:
    world = with_two(hosted())
    reply = report(world, EventType.FAILED, b"broken")
    assert (reply.status, reply.reason) == (Status.PENDING, Reason.COMPENSATING)
    assert world.last.pushes == (ClosedPush(status=Status.PENDING, reason=Reason.COMPENSATING),)
    launched = world.ask(Register(workflow="orders"), Registered)
    assert (launched.compensating, launched.status) == (True, Status.RUNNING)


def test_an_acknowledged_cancel_turns_compensating_first() -> None:
    world = with_two(registered())
    world.say(SendSignal(type=SignalType.CANCEL))
    reply = world.ask(AckSignal(epoch=world.epoch, signal_type=SignalType.CANCEL), AckReply)
    assert (reply.status, reply.reason, reply.compensating) == (Status.RUNNING, Reason.COMPENSATING, True)
    assert world.row.intended is Status.CANCELLED


@pytest.mark.parametrize(("begin", "status"), [(registered, Status.SUSPENDED), (hosted, Status.PENDING)])
def test_a_cancel_without_a_session_turns_compensating_first(begin: Any, status: Status) -> None:
    world = with_two(begin())
    world.say(SessionLost(epoch=world.epoch))
    reply = world.ask(SendSignal(type=SignalType.CANCEL), SignalReply)
    assert (reply.applied, reply.status, reply.reason) == (True, status, Reason.COMPENSATING)


def test_a_time_out_turns_compensating_and_its_reason_is_the_one_that_stays() -> None:
    world = with_two(hosted(timeout_us=60 * SECOND))
    world.advance(60)
    world.say(Wake(epoch=world.epoch, deadline_us=START_US + 60 * SECOND))
    assert (world.status, world.row.reason) == (Status.PENDING, Reason.COMPENSATING)
    assert world.row.due_us is None, "the deadline was for the work, not for undoing it"
    world.say(Register())
    for name in "ba":
        begin_undo(world, name)
        end_undo(world, name)
    assert (world.status, world.row.reason) == (Status.FAILED, Reason.TIMEOUT)


def test_the_deadline_of_the_work_does_not_cut_its_undoing_short() -> None:
    world = World()
    world.say(StartInstance(workflow="orders", timeout_us=60 * SECOND))
    world.say(Register())
    failed(world)
    assert world.row.due_us is None


def test_what_is_parked_ends_when_the_instance_turns_compensating() -> None:
    world = with_two(registered())
    world.say(WaitSignal(epoch=world.epoch, key="k", checkpoint_id="w"))
    report(world, EventType.FAILED)
    answer = world.released("w")
    assert isinstance(answer, InvalidInstanceState)
    assert answer.details == {"expected": "running", "actual": "compensating"}


@pytest.mark.parametrize("type", [EventType.COMPLETED, EventType.FAILED])
def test_the_intended_outcome_stays_as_it_is(type: EventType) -> None:
    world = failed(registered())
    assert report(world, type, b"other").applied is False
    assert not world.ask(SendSignal(type=SignalType.CANCEL), SignalReply).applied
    assert world.row.intended is Status.FAILED
    assert world.tables.payloads == {PayloadKind.ERROR: b"broken"}


# ---------------------------------------------------------------- undoing


def test_only_a_compensating_instance_undoes() -> None:
    world = with_two(registered())
    with pytest.raises(InvalidInstanceState) as caught:
        begin_undo(world, "a")
    assert caught.value.details == {"expected": "compensating", "actual": "running"}


def test_what_was_never_registered_cannot_be_undone() -> None:
    with pytest.raises(CheckpointNotFound):
        begin_undo(failed(registered()), "missing")


def test_the_instance_ends_as_intended_when_all_have_ended() -> None:
    world = failed(registered())
    assert begin_undo(world, "b") == CompensationReply(attempt=1, status=Status.RUNNING, pending=2)
    world.advance(1)
    assert end_undo(world, "b") == CompensationReply(attempt=1, status=Status.RUNNING, pending=1)
    begin_undo(world, "a")
    world.advance(1)
    assert end_undo(world, "a") == CompensationReply(attempt=1, status=Status.FAILED, pending=0)
    row = world.row
    assert (row.reason, row.finished_us) == (Reason.APPLICATION_ERROR, START_US + 2 * SECOND)
    assert row.compensation_state is CompensationState.COMPLETED
    assert world.tables.payloads == {PayloadKind.ERROR: b"broken"}
    line = world.tables.log["b", 1]
    assert (line.step_id, line.started_us, line.finished_us) == ("undo-b", START_US, START_US + SECOND)
    assert (line.success, line.error_message, line.error_id) == (True, None, None)


def test_a_failure_that_is_not_final_is_tried_again_under_the_next_number() -> None:
    world = failed(registered())
    begin_undo(world, "b")
    reply = end_undo(world, "b", success=False, final=False, error_message="no", error_id=5)
    assert reply.pending == 2
    assert begin_undo(world, "b").attempt == 2
    assert end_undo(world, "b", 2).pending == 1
    lines = [world.tables.log["b", number] for number in (1, 2)]
    assert [(line.success, line.error_message, line.error_id) for line in lines] == [
        (False, "no", 5),
        (True, None, None),
    ]


def test_a_final_failure_does_not_keep_the_others_from_being_undone() -> None:
    world = failed(registered())
    begin_undo(world, "b")
    assert end_undo(world, "b", success=False).pending == 1
    begin_undo(world, "a")
    assert end_undo(world, "a").status is Status.FAILED
    assert world.row.compensation_state is CompensationState.FAILED
    with pytest.raises(InvalidInstanceState):
        begin_undo(world, "a")


def test_an_attempt_that_is_over_cannot_begin_or_end_otherwise() -> None:
    world = failed(registered())
    begin_undo(world, "b")
    with pytest.raises(InvalidInstanceState):
        end_undo(world, "b", attempt=2)
    end_undo(world, "b")
    with pytest.raises(InvalidInstanceState) as caught:
        begin_undo(world, "b")
    assert caught.value.details == {"expected": "pending or triggered", "actual": "completed"}
    with pytest.raises(InvalidInstanceState):
        end_undo(world, "b", success=False)


def test_a_finish_whose_reply_was_lost_is_answered_again() -> None:
    world = failed(registered())
    begin_undo(world, "b")
    first = end_undo(world, "b")
    assert end_undo(world, "b") == first
    assert world.last.ops == ()


@pytest.mark.parametrize("begin", [registered, hosted])
def test_a_crash_in_the_middle_goes_on_where_it_was(begin: Any) -> None:
    world = with_two(begin())
    report(world, EventType.FAILED)
    if world.row.hosted:
        world.say(Register())
    begin_undo(world, "b")
    end_undo(world, "b")
    begin_undo(world, "a")
    world.crash()
    world.say(SessionLost(epoch=world.epoch, orphaned=True))
    assert (world.row.compensating, world.row.reason) == (True, Reason.COMPENSATING)
    assert world.ask(Register(), Registered).compensating
    assert begin_undo(world, "a").attempt == 2, "the attempt that the crash left open counts"
    assert end_undo(world, "a", 2).status is Status.FAILED
    assert world.tables.log["a", 1].finished_us is None


def test_a_client_lost_while_compensating_is_awaited() -> None:
    world = failed(registered())
    world.say(SessionLost(epoch=world.epoch))
    assert (world.status, world.row.reason) == (Status.SUSPENDED, Reason.COMPENSATING)
    assert world.row.awaits_client_us == START_US


def test_undoing_may_sleep_before_it_is_tried_again() -> None:
    world = failed(registered())
    nap = Sleep(epoch=world.epoch, duration_us=SECOND, checkpoint_id="backoff", kind=WaitKind.RETRY)
    world.say(nap)
    assert world.row.due_us == START_US + SECOND
    world.advance(1)
    world.say(Wake(epoch=world.epoch, deadline_us=START_US + SECOND))
    assert world.released_wait("backoff").outcome is WaitOutcome.ELAPSED


@pytest.mark.parametrize("begin", [registered, hosted])
def test_undoing_may_be_paused_and_goes_on_when_it_is_resumed(begin: Any) -> None:
    world = with_two(begin())
    report(world, EventType.FAILED)
    if not world.row.hosted:
        world.say(SessionLost(epoch=world.epoch))
    world.say(SendSignal(type=SignalType.PAUSE))
    assert world.row.paused
    world.say(SendSignal(type=SignalType.RESUME))
    assert (world.row.reason, world.row.compensating) == (Reason.COMPENSATING, True)
    assert world.status is (Status.PENDING if world.row.hosted else Status.SUSPENDED)


@pytest.mark.parametrize("reason", [Reason.COMPLETED, Reason.CRASHED, Reason.SLEEPING, Reason.CANCELLED])
@pytest.mark.parametrize("begin", [registered, hosted])
def test_an_execution_that_ends_in_the_middle_leaves_the_rest_to_the_next(begin: Any, reason: Reason) -> None:
    world = with_two(begin())
    report(world, EventType.FAILED)
    if world.row.hosted:
        world.say(Register())
    reply = world.ask(ExitReport(epoch=world.epoch, reason=reason), ChangeReply)
    assert reply == ChangeReply(applied=True, status=Status.SUSPENDED, reason=Reason.COMPENSATING)
    assert world.row.due_us == (START_US if world.row.hosted else None)


def test_an_execution_of_a_client_that_fails_with_work_to_undo_awaits_the_client() -> None:
    world = with_two(registered())
    world.say(ExitReport(epoch=world.epoch, reason=Reason.CRASHED))
    assert (world.status, world.row.reason) == (Status.SUSPENDED, Reason.COMPENSATING)
    assert world.row.awaits_client_us == START_US


def test_force_terminate_cuts_undoing_short() -> None:
    world = failed(registered())
    world.say(ForceTerminate())
    assert (world.status, world.row.compensation_state) == (Status.CANCELLED, CompensationState.FAILED)
