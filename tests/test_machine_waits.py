"""sleep, wait_signal and wake: deadlines are absolute, and every outcome is recorded once."""

from typing import Any

import pytest

from runtara.errors import AlreadyFinished, Conflict, Overloaded
from runtara.limits import Limits
from runtara.messages import (
    AckSignal,
    ChangeReply,
    CheckpointReply,
    ClosedPush,
    Register,
    Registered,
    ReportEvent,
    SaveCheckpoint,
    SendSignal,
    SessionLost,
    Sleep,
    StartInstance,
    WaitReply,
    WaitSignal,
    Wake,
    WakePush,
)
from runtara.records import (
    AcknowledgeSignal,
    CheckpointRecord,
    EventType,
    PayloadKind,
    Reason,
    SettleWait,
    SignalType,
    Status,
    WaitKind,
    WaitOutcome,
)
from tests.machine_world import SECOND, START_US, World, hosted, registered

MINUTE = 60 * SECOND


def nap(world: World, name: str | None = "nap", us: int = MINUTE, **more: Any) -> Sleep:
    return Sleep(epoch=world.epoch, duration_us=us, checkpoint_id=name, **more)


def wait(world: World, name: str = "w", key: str = "k", us: int | None = None) -> WaitSignal:
    return WaitSignal(epoch=world.epoch, key=key, checkpoint_id=name, timeout_us=us)


def signal(world: World, payload: bytes = b"p", key: str = "k") -> None:
    world.say(SendSignal(type=SignalType.CUSTOM, key=key, payload=payload))


def ring(world: World) -> ChangeReply:
    """The wake scheduler, at the deadline that the row has; the clock goes there."""
    due = world.row.due_us
    assert due is not None
    world.now_us = max(world.now_us, due)
    return world.ask(Wake(epoch=world.epoch, deadline_us=due), ChangeReply)


# ---------------------------------------------------------------- sleep


def test_a_sleep_stores_its_checkpoint_and_its_deadline_and_is_answered_when_it_is_due() -> None:
    world = registered()
    decision = world.say(nap(world, state=b"s"))
    assert (decision.reply, decision.park) == (None, "nap")
    assert world.row.sleep_until_us == START_US + MINUTE
    assert world.tables.checkpoints["nap"].state == b"s"
    assert world.known.checkpoint_id == "nap"
    ring(world)
    answer = world.released_wait("nap")
    assert (answer.outcome, answer.deadline_us) == (WaitOutcome.ELAPSED, START_US + MINUTE)
    assert world.status is Status.RUNNING
    assert world.row.sleep_until_us is None


def test_the_same_sleep_asked_again_keeps_its_first_deadline() -> None:
    world = registered()
    world.say(nap(world))
    world.crash()
    world.advance(20)
    world.say(Register())
    decision = world.say(nap(world, us=3600 * SECOND, state=b"other"))
    assert (decision.park, decision.ops) == ("nap", ())
    assert world.known.waits[0].deadline_us == START_US + MINUTE
    assert world.tables.checkpoints["nap"].state == b""


def test_a_sleep_asked_again_after_its_deadline_is_over_without_a_ring() -> None:
    world = registered()
    world.say(nap(world))
    world.advance(61)
    first = world.ask(nap(world), WaitReply)
    assert (first.outcome, first.deadline_us) == (WaitOutcome.ELAPSED, START_US + MINUTE)
    again = world.ask(nap(world), WaitReply)
    assert again == first
    assert world.last.ops == ()


def test_a_sleep_of_zero_returns_at_once_and_is_recorded() -> None:
    world = registered()
    reply = world.ask(nap(world, us=0), WaitReply)
    assert (reply.outcome, reply.deadline_us) == (WaitOutcome.ELAPSED, START_US)
    assert world.tables.waits["nap"].settled_us == START_US
    assert world.known.waits == ()


@pytest.mark.parametrize("type", [SignalType.CANCEL, SignalType.PAUSE, SignalType.SHUTDOWN])
def test_a_sleep_is_not_begun_while_a_signal_asks_to_stop(type: SignalType) -> None:
    world = registered()
    world.say(SendSignal(type=type))
    reply = world.ask(nap(world), WaitReply)
    assert reply.interrupted
    assert reply.signal is not None
    assert reply.signal.type is type
    assert reply.deadline_us == START_US + MINUTE, "its deadline is fixed all the same"
    assert [w.wait_id for w in world.known.waits] == ["nap"]


def test_an_interrupted_sleep_can_be_asked_for_again() -> None:
    world = registered()
    world.say(nap(world))
    world.say(SendSignal(type=SignalType.PAUSE))
    assert world.released_wait("nap").interrupted
    world.say(SendSignal(type=SignalType.RESUME))
    world.advance(10)
    assert world.say(nap(world)).park == "nap"
    ring(world)
    assert world.released_wait("nap").outcome is WaitOutcome.ELAPSED
    assert world.now_us == START_US + MINUTE


def test_one_name_used_for_two_kinds_of_wait_is_a_conflict() -> None:
    world = registered()
    world.say(nap(world, "x"))
    for message in (nap(world, "x", kind=WaitKind.RETRY), wait(world, "x")):
        with pytest.raises(Conflict) as caught:
            world.say(message)
        assert caught.value.field == "checkpoint_id"
    world.say(wait(world, "y"))
    for message in (nap(world, "y"), nap(world, "y", kind=WaitKind.RETRY)):
        with pytest.raises(Conflict):
            world.say(message)


def test_a_name_that_is_a_checkpoint_is_no_wait() -> None:
    world = registered()
    world.say(SaveCheckpoint(epoch=world.epoch, checkpoint_id="x", state=b"s"))
    for message in (nap(world, "x"), wait(world, "x")):
        with pytest.raises(Conflict) as caught:
            world.say(message)
        assert caught.value.field == "checkpoint_id"


def test_the_name_of_an_open_wait_is_no_checkpoint() -> None:
    """Else the signal could never be recorded: a checkpoint is written once."""
    world = registered()
    world.say(wait(world))
    with pytest.raises(Conflict) as caught:
        world.say(SaveCheckpoint(epoch=world.epoch, checkpoint_id="w", state=b"s"))
    assert caught.value.field == "checkpoint_id"
    probe = world.ask(SaveCheckpoint(epoch=world.epoch, checkpoint_id="w"), CheckpointReply)
    assert not probe.found
    signal(world)
    assert world.released_wait("w").payload == b"p"


def test_a_sleep_without_a_name_is_found_again_by_its_request_id() -> None:
    world = registered()
    world.say(nap(world, None, request_id="r"))
    world.advance(20)
    assert world.say(nap(world, None, request_id="r")).ops == ()
    world.say(nap(world, None))
    world.say(nap(world, None))
    assert [w.deadline_us for w in world.known.waits] == [
        START_US + MINUTE,
        START_US + MINUTE + 20 * SECOND,
        START_US + MINUTE + 20 * SECOND,
    ]
    assert world.tables.checkpoints == {}


def test_no_request_id_can_take_the_name_of_a_nameless_sleep() -> None:
    world = registered()
    for revision in range(2, 12):
        world.say(nap(world, None, request_id=str(revision + 1)))
        world.say(nap(world, None))
    assert len(world.tables.waits) == 20


def test_open_waits_are_bounded() -> None:
    world = registered(World(limits=Limits(open_waits=2)))
    world.say(nap(world, "a"))
    world.say(wait(world, "b"))
    before = world.state
    for message in (nap(world, "c"), wait(world, "d")):
        with pytest.raises(Overloaded):
            world.say(message)
    assert world.state is before
    assert world.ask(nap(world, "e", us=0), WaitReply).outcome is WaitOutcome.ELAPSED


def test_the_row_sleeps_until_the_earliest_of_several_waits() -> None:
    world = registered()
    world.say(nap(world, "late", 90 * SECOND))
    world.say(wait(world, "soon", us=30 * SECOND))
    world.say(nap(world, "later", 120 * SECOND, kind=WaitKind.RETRY))
    world.say(wait(world, "endless"))
    seen = []
    while world.row.sleep_until_us is not None:
        seen.append((world.row.sleep_until_us - START_US) // SECOND)
        ring(world)
    assert seen == [30, 90, 120]
    assert [w.wait_id for w in world.known.waits] == ["endless"]
    assert world.tables.waits["soon"].outcome is WaitOutcome.TIMED_OUT


# ---------------------------------------------------------------- wait_signal


def test_a_signal_sent_before_the_wait_is_received_at_once() -> None:
    world = registered()
    signal(world)
    reply = world.ask(wait(world, us=MINUTE), WaitReply)
    assert (reply.outcome, reply.payload) == (WaitOutcome.RECEIVED, b"p")
    assert world.known.signals == ()
    assert world.row.sleep_until_us is None


def test_consuming_and_recording_is_one_decision_and_a_lost_reply_can_be_asked_again() -> None:
    world = registered()
    world.say(wait(world))
    signal(world)
    kinds = {type(op) for op in world.last.ops}
    assert kinds >= {AcknowledgeSignal, CheckpointRecord, SettleWait}
    first = world.released_wait("w")
    world.crash()
    world.say(Register())
    again = world.ask(wait(world), WaitReply)
    assert (again.outcome, again.payload) == (first.outcome, first.payload) == (WaitOutcome.RECEIVED, b"p")
    assert world.last.ops == ()
    assert world.tables.checkpoints["w"].state == b"p"


def test_an_empty_payload_is_received_as_empty() -> None:
    world = registered()
    world.say(SendSignal(type=SignalType.CUSTOM, key="k"))
    assert world.ask(wait(world), WaitReply).payload == b""
    assert world.ask(wait(world), WaitReply).payload == b""


def test_a_timeout_is_recorded_and_a_replay_agrees_whatever_came_since() -> None:
    world = registered()
    world.say(wait(world, us=MINUTE))
    ring(world)
    first = world.released_wait("w")
    assert (first.timed_out, first.payload) == (True, None)
    signal(world)
    again = world.ask(wait(world, us=MINUTE), WaitReply)
    assert (again.outcome, again.deadline_us) == (first.outcome, first.deadline_us)
    assert len(world.known.signals) == 1
    assert "w" not in world.tables.checkpoints


def test_a_wait_asked_again_keeps_the_deadline_of_its_first_entry() -> None:
    world = registered()
    world.say(wait(world, us=600 * SECOND))
    world.advance(480)
    world.crash()
    world.say(Register())
    assert world.say(wait(world, us=600 * SECOND)).park == "w"
    ring(world)
    assert world.now_us == START_US + 600 * SECOND
    assert world.released_wait("w").timed_out


def test_a_wait_for_another_key_under_the_same_name_is_a_conflict() -> None:
    world = registered()
    world.say(wait(world))
    with pytest.raises(Conflict) as caught:
        world.say(wait(world, key="other"))
    assert caught.value.field == "key"


def test_a_timeout_of_zero_takes_what_is_there_and_waits_for_nothing() -> None:
    world = registered()
    assert world.ask(wait(world, "a", us=0), WaitReply).timed_out
    signal(world)
    assert world.ask(wait(world, "b", us=0), WaitReply).payload == b"p"


@pytest.mark.parametrize("accepted", ["before", "at", "after"])
def test_a_signal_before_the_deadline_wins_over_a_late_wake(accepted: str) -> None:
    """The session was interrupted, so nothing is parked; the ring comes long after the deadline."""
    world = registered()
    world.say(wait(world, us=MINUTE))
    world.say(SendSignal(type=SignalType.PAUSE))
    world.say(SendSignal(type=SignalType.RESUME))
    world.advance({"before": 59, "at": 60, "after": 61}[accepted])
    signal(world)
    world.advance(100)
    ring(world)
    reply = world.ask(wait(world, us=MINUTE), WaitReply)
    if accepted == "before":
        assert (reply.outcome, reply.payload) == (WaitOutcome.RECEIVED, b"p")
        assert [s.type for s in world.known.signals] == [SignalType.RESUME]
    else:
        assert reply.timed_out
        assert [s.type for s in world.known.signals] == [SignalType.RESUME, SignalType.CUSTOM]


def test_a_signal_accepted_before_the_wait_counts_though_the_clock_stepped_back() -> None:
    world = registered()
    signal(world)
    world.say(SendSignal(type=SignalType.PAUSE))
    world.advance(-3600)
    assert world.ask(wait(world, us=MINUTE), WaitReply).interrupted
    world.say(SendSignal(type=SignalType.RESUME))
    assert world.ask(wait(world, us=MINUTE), WaitReply).payload == b"p"


def test_a_late_signal_stays_queued_for_the_next_wait() -> None:
    world = registered()
    world.say(wait(world, us=MINUTE))
    world.advance(61)
    signal(world)
    assert world.answers == {}
    ring(world)
    assert world.released_wait("w").timed_out
    assert world.ask(wait(world, "next"), WaitReply).payload == b"p"


def test_a_signal_does_not_interrupt_what_a_cancel_has_interrupted() -> None:
    world = registered()
    signal(world)
    world.say(SendSignal(type=SignalType.CANCEL))
    reply = world.ask(wait(world), WaitReply)
    assert reply.interrupted
    assert [s.type for s in world.known.signals] == [SignalType.CUSTOM, SignalType.CANCEL]


def test_two_waits_due_at_once_with_signals_consume_one_signal_per_change() -> None:
    world = registered()
    for key in "ab":
        world.say(wait(world, f"w{key}", key, us=MINUTE))
    world.say(SessionLost(epoch=world.epoch))
    for key in "ab":
        signal(world, key.encode(), key)
    world.advance(120)
    ring(world)
    assert [w.wait_id for w in world.known.waits] == ["wb"]
    assert world.row.sleep_until_us == START_US + MINUTE, "it rings again at once"
    ring(world)
    assert {n: c.state for n, c in world.tables.checkpoints.items()} == {"wa": b"a", "wb": b"b"}
    assert {w.outcome for w in world.tables.waits.values()} == {WaitOutcome.RECEIVED}
    assert world.row.sleep_until_us is None


def test_of_two_waits_for_one_key_only_one_gets_the_signal() -> None:
    world = registered()
    world.say(wait(world, "first", us=MINUTE))
    world.say(wait(world, "second", us=MINUTE))
    signal(world)
    assert world.released_wait("first").received
    ring(world)
    assert world.released_wait("second").timed_out


def test_the_losing_wait_of_a_race_dies_with_its_instance() -> None:
    world = registered()
    world.say(wait(world, "a", "a", us=86_400 * SECOND))
    world.say(wait(world, "b", "b", us=86_400 * SECOND))
    signal(world, key="b")
    world.say(ReportEvent(epoch=world.epoch, type=EventType.COMPLETED))
    assert isinstance(world.released("a"), AlreadyFinished)
    assert (world.row.due_us, world.known.waits) == (None, ())


# ---------------------------------------------------------------- wake


@pytest.mark.parametrize("wrong", ["epoch", "deadline", "early"])
def test_a_wake_that_does_not_match_does_nothing(wrong: str) -> None:
    world = registered()
    world.say(nap(world))
    deadline = START_US + MINUTE
    world.now_us = deadline - 1 if wrong == "early" else deadline
    message = Wake(epoch=world.epoch - (wrong == "epoch"), deadline_us=deadline - (wrong == "deadline"))
    decision = world.say(message)
    assert decision.ops == ()
    assert decision.releases == ()
    assert decision.reply == ChangeReply(applied=False, status=Status.RUNNING, reason=None)


def test_a_clock_that_steps_back_wakes_nothing_twice_and_nothing_early() -> None:
    world = registered()
    world.say(nap(world))
    world.advance(-3600)
    early = Wake(epoch=world.epoch, deadline_us=START_US + MINUTE)
    assert world.say(early).ops == ()
    world.now_us = START_US + MINUTE
    assert world.ask(early, ChangeReply).applied
    assert not world.ask(early, ChangeReply).applied


def test_a_due_client_is_recorded_as_due_once_and_never_rung_again() -> None:
    world = registered()
    world.say(nap(world))
    world.say(SessionLost(epoch=world.epoch))
    ring(world)
    assert (world.status, world.row.due_us) == (Status.SUSPENDED, None)
    assert world.row.awaits_client_us == START_US + MINUTE
    assert world.last.pushes == (), "there is nobody to tell"
    reply = world.ask(Register(), Registered)
    assert (reply.due, reply.status) == (True, Status.RUNNING)
    assert world.ask(nap(world), WaitReply).outcome is WaitOutcome.ELAPSED


def test_a_client_that_suspended_and_stayed_is_told_that_it_is_due() -> None:
    world = registered()
    world.say(nap(world))
    world.say(ReportEvent(epoch=world.epoch, type=EventType.SUSPENDED))
    assert world.row.reason is Reason.SLEEPING
    ring(world)
    assert world.last.pushes == (WakePush(),)


def test_a_due_hosted_instance_goes_to_the_dispatch_queue() -> None:
    world = hosted()
    world.say(nap(world))
    world.say(ReportEvent(epoch=world.epoch, type=EventType.SUSPENDED))
    assert ring(world) == ChangeReply(applied=True, status=Status.PENDING, reason=None)


@pytest.mark.parametrize("begin", [registered, hosted])
def test_an_awaited_signal_moves_a_suspended_instance(begin: Any) -> None:
    world = begin()
    world.say(wait(world))
    world.say(ReportEvent(epoch=world.epoch, type=EventType.SUSPENDED))
    assert world.row.reason is Reason.WAITING_SIGNAL
    world.crash()
    signal(world)
    if world.row.hosted:
        assert world.status is Status.PENDING
    else:
        assert world.row.awaits_client_us == START_US
    world.say(Register())
    assert world.ask(wait(world), WaitReply).payload == b"p"


@pytest.mark.parametrize("begin", [registered, hosted])
def test_a_wait_still_parked_when_its_instance_suspends_moves_it_when_the_signal_comes(begin: Any) -> None:
    world = begin()
    world.say(wait(world))
    world.say(ReportEvent(epoch=world.epoch, type=EventType.SUSPENDED))
    signal(world)
    assert world.released_wait("w").received
    assert world.status is (Status.PENDING if world.row.hosted else Status.SUSPENDED)
    assert world.row.hosted or world.row.awaits_client_us == START_US


def test_suspending_with_the_awaited_signal_in_the_queue_is_due_at_once() -> None:
    world = hosted()
    world.say(wait(world))
    world.say(SendSignal(type=SignalType.PAUSE))
    signal(world)
    world.say(SendSignal(type=SignalType.RESUME))
    world.say(ReportEvent(epoch=world.epoch, type=EventType.SUSPENDED))
    assert world.row.due_us == START_US
    ring(world)
    assert world.status is Status.PENDING


# ---------------------------------------------------------------- the deadline of the whole instance


def test_an_instance_times_out_at_its_own_deadline_also_after_a_restart() -> None:
    world = hosted(timeout_us=3600 * SECOND)
    world.say(wait(world))
    world.advance(3000)
    world.crash()
    world.say(Register())
    world.say(wait(world))
    assert world.row.due_us == START_US + 3600 * SECOND
    assert ring(world) == ChangeReply(applied=True, status=Status.FAILED, reason=Reason.TIMEOUT)
    assert world.tables.payloads[PayloadKind.ERROR] == b"Timed out"
    assert isinstance(world.released("w"), AlreadyFinished)
    assert world.last.pushes == (ClosedPush(status=Status.FAILED, reason=Reason.TIMEOUT),)


@pytest.mark.parametrize("where", ["pending", "paused", "asleep"])
def test_an_instance_times_out_wherever_it_is(where: str) -> None:
    world = World()
    world.say(StartInstance(workflow="orders", timeout_us=100 * SECOND))
    if where != "pending":
        world.say(Register())
        world.say(nap(world, us=1000 * SECOND))
    if where == "paused":
        world.say(SendSignal(type=SignalType.PAUSE))
        world.say(AckSignal(epoch=world.epoch, signal_type=SignalType.PAUSE))
    elif where == "asleep":
        world.say(ReportEvent(epoch=world.epoch, type=EventType.SUSPENDED))
    assert ring(world).reason is Reason.TIMEOUT
    assert world.now_us == START_US + 100 * SECOND
