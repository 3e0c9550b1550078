"""Signals: accepted, pushed, coalesced, acknowledged; cancel, pause and resume in all their combinations."""

from typing import Any

import pytest

from runtara.errors import (
    AlreadyFinished,
    Conflict,
    Draining,
    InstanceNotFound,
    SignalNotPending,
    SignalQueueFull,
)
from runtara.limits import Limits
from runtara.messages import (
    AckReply,
    AckSignal,
    AskShutdown,
    CheckpointReply,
    ForceTerminate,
    PollSignals,
    Register,
    Registered,
    ReportEvent,
    SaveCheckpoint,
    SendSignal,
    SessionLost,
    SignalPush,
    SignalReply,
    SignalsReply,
    Sleep,
    StartInstance,
    WaitReply,
    WaitSignal,
    Wake,
)
from runtara.records import EventType, PayloadKind, Reason, SignalType, Status
from tests.machine_world import SECOND, START_US, World, hosted, registered

CANCEL = SendSignal(type=SignalType.CANCEL)
PAUSE = SendSignal(type=SignalType.PAUSE)
RESUME = SendSignal(type=SignalType.RESUME)


def custom(key: str = "k", payload: bytes | None = None, **more: Any) -> SendSignal:
    return SendSignal(type=SignalType.CUSTOM, key=key, payload=payload, **more)


def send(world: World, message: SendSignal) -> SignalReply:
    return world.ask(message, SignalReply)


def ack(world: World, signal_id: int, granted: bool = True) -> AckReply:
    return world.ask(AckSignal(epoch=world.epoch, signal_id=signal_id, acknowledged=granted), AckReply)


def ack_type(world: World, type: SignalType) -> AckReply:
    return world.ask(AckSignal(epoch=world.epoch, signal_type=type), AckReply)


def event(world: World, type: EventType, payload: bytes | None = None) -> None:
    world.say(ReportEvent(epoch=world.epoch, type=type, payload=payload))


def paused(world: World) -> World:
    ack(world, send(world, PAUSE).signal_id)
    assert world.row.paused
    return world


def pending(world: World) -> list[SignalType]:
    return [signal.type for signal in world.known.signals]


def pushed(world: World) -> list[SignalType]:
    return [push.signal.type for push in world.last.pushes if isinstance(push, SignalPush)]


# ---------------------------------------------------------------- accepting


@pytest.mark.parametrize("type", SignalType, ids=lambda type: type.word)
def test_a_signal_to_an_unknown_instance_is_refused(type: SignalType) -> None:
    key = "k" if type is SignalType.CUSTOM else None
    with pytest.raises(InstanceNotFound):
        World().say(SendSignal(type=type, key=key))


@pytest.mark.parametrize("type", SignalType, ids=lambda type: type.word)
def test_a_signal_to_a_finished_instance_says_how_it_ended(type: SignalType) -> None:
    world = registered()
    event(world, EventType.COMPLETED)
    key = "k" if type is SignalType.CUSTOM else None
    with pytest.raises(AlreadyFinished) as caught:
        world.say(SendSignal(type=type, key=key))
    assert caught.value.status == "completed"


def test_an_accepted_signal_is_stored_and_pushed_to_the_live_session() -> None:
    world = registered()
    reply = send(world, custom(payload=b"p"))
    assert reply == SignalReply(signal_id=2, status=Status.RUNNING, reason=None, applied=False)
    record = world.tables.signals[2]
    assert (record.type, record.key, record.payload) == (SignalType.CUSTOM, "k", b"p")
    assert (record.created_us, record.acknowledged_us) == (START_US, None)
    assert pushed(world) == [SignalType.CUSTOM]


def test_the_duplicate_check_comes_before_the_state_check() -> None:
    world = registered()
    first = send(world, custom(request_id="r"))
    event(world, EventType.COMPLETED)
    assert send(world, custom(request_id="r")) == first
    assert world.last.ops == ()
    with pytest.raises(Conflict) as caught:
        world.say(custom(payload=b"other", request_id="r"))
    assert caught.value.field == "request_id"


def test_a_repeated_signal_is_recognised_after_a_crash() -> None:
    world = registered()
    first = send(world, custom(request_id="r"))
    world.crash()
    assert send(world, custom(request_id="r")) == first
    assert len(world.known.signals) == 1


def test_the_queue_is_full_in_number() -> None:
    world = registered(World(limits=Limits(pending_signals=2)))
    send(world, custom())
    send(world, custom())
    with pytest.raises(SignalQueueFull) as caught:
        world.say(custom())
    assert caught.value.retryable
    assert len(world.known.signals) == 2
    ack(world, world.known.signals[0].signal_id)
    send(world, custom())


def test_the_queue_is_full_in_bytes() -> None:
    world = registered(World(limits=Limits(pending_signal_bytes=10)))
    send(world, custom(payload=b"123456"))
    with pytest.raises(SignalQueueFull):
        world.say(custom(payload=b"12345"))
    send(world, custom(payload=b"1234"))
    send(world, custom())


def test_a_full_queue_does_not_keep_anybody_from_pausing_resuming_or_cancelling() -> None:
    world = registered(World(limits=Limits(pending_signals=1, pending_signal_bytes=1)))
    send(world, custom())
    paused(world)
    world.say(SessionLost(epoch=world.epoch))
    assert send(world, RESUME).applied
    assert send(world, CANCEL).status is Status.CANCELLED


def test_parallel_senders_of_one_instance_wide_signal_share_it() -> None:
    world = registered()
    ids = {send(world, CANCEL).signal_id for _ in range(20)}
    assert len(ids) == 1
    assert len(world.tables.signals) == 1
    (signal_id,) = ids
    replies = [ack(world, signal_id) for _ in range(20)]
    assert [reply.applied for reply in replies] == [True] + [False] * 19
    assert {reply.status for reply in replies} == {Status.CANCELLED}


def test_a_coalesced_signal_remembers_its_request_id() -> None:
    world = registered()
    first = send(world, CANCEL)
    second = send(world, SendSignal(type=SignalType.CANCEL, request_id="r"))
    assert second.signal_id == first.signal_id
    event(world, EventType.COMPLETED)
    assert send(world, SendSignal(type=SignalType.CANCEL, request_id="r")) == second


# ---------------------------------------------------------------- the mailbox


@pytest.mark.parametrize("type", [SignalType.CANCEL, SignalType.PAUSE, SignalType.CUSTOM])
def test_a_signal_may_wait_for_an_instance_that_does_not_exist_yet(type: SignalType) -> None:
    world = World()
    key = "k" if type is SignalType.CUSTOM else None
    reply = send(world, SendSignal(type=type, key=key, payload=b"p", store_if_unknown=True))
    assert (reply.status, reply.applied) == (Status.PENDING, False)
    assert world.row.awaits_client_us == START_US
    world.crash()
    registered = world.ask(Register(), Registered)
    assert registered.status is Status.RUNNING
    assert [(s.type, s.key, s.payload) for s in registered.signals] == [(type, key, b"p")]


def test_a_start_finds_what_the_mailbox_holds() -> None:
    world = World()
    send(world, custom(store_if_unknown=True))
    world.say(StartInstance(workflow="orders"))
    assert (world.status, world.row.hosted, world.row.awaits_client_us) == (Status.PENDING, True, None)
    assert len(world.ask(Register(), Registered).signals) == 1


def test_a_mailbox_is_no_new_instance_for_a_draining_runtime() -> None:
    with pytest.raises(Draining):
        World(refuse_new=Draining("drains")).say(custom(store_if_unknown=True))


def test_a_mailbox_can_be_terminated() -> None:
    world = World()
    send(world, custom(store_if_unknown=True))
    world.say(ForceTerminate())
    assert world.status is Status.CANCELLED


# ---------------------------------------------------------------- showing


def test_replies_show_the_cancel_first_and_the_custom_signal_of_their_name() -> None:
    world = registered()
    send(world, custom("other"))
    send(world, custom("c", b"first"))
    send(world, custom("c", b"second"))
    send(world, PAUSE)
    send(world, CANCEL)
    poll = world.ask(PollSignals(epoch=world.epoch, checkpoint_id="c"), SignalsReply)
    saved = world.ask(SaveCheckpoint(epoch=world.epoch, checkpoint_id="c", state=b"x"), CheckpointReply)
    for reply in (poll, saved):
        assert reply.signal is not None
        assert reply.custom_signal is not None
        assert reply.signal.type is SignalType.CANCEL
        assert reply.custom_signal.payload == b"first"
    assert len(world.known.signals) == 5, "showing consumes nothing"
    nameless = world.ask(PollSignals(epoch=world.epoch), SignalsReply)
    assert nameless.custom_signal is None


def test_the_oldest_instance_wide_signal_is_shown_when_there_is_no_cancel() -> None:
    world = registered()
    send(world, PAUSE)
    world.say(AskShutdown(epoch=world.epoch))
    reply = world.ask(PollSignals(epoch=world.epoch), SignalsReply)
    assert reply.signal is not None
    assert reply.signal.type is SignalType.PAUSE


# ---------------------------------------------------------------- acknowledging


def test_an_ack_by_id_consumes_exactly_that_signal_and_is_idempotent() -> None:
    world = registered()
    first, second = send(world, custom()), send(world, custom())
    world.advance(1)
    assert ack(world, second.signal_id).applied
    assert not ack(world, second.signal_id).applied
    assert [s.signal_id for s in world.known.signals] == [first.signal_id]
    record = world.tables.signals[second.signal_id]
    assert (record.shown_us, record.acknowledged_us) == (START_US, START_US + SECOND)


def test_an_ack_of_an_id_that_never_was_is_refused() -> None:
    with pytest.raises(SignalNotPending) as caught:
        ack(registered(), 99)
    assert caught.value.details == {"field": "signal_id", "value": 99}


def test_an_ack_by_type_consumes_the_oldest_that_was_shown() -> None:
    world = registered()
    send(world, CANCEL)
    assert ack_type(world, SignalType.CANCEL).status is Status.CANCELLED
    other = registered()
    with pytest.raises(SignalNotPending) as caught:
        ack_type(other, SignalType.CANCEL)
    assert caught.value.details == {"field": "signal_type", "value": "cancel"}


@pytest.mark.parametrize("show", ["poll", "checkpoint", "probe", "sleep"])
def test_an_ack_by_type_needs_a_reply_that_showed_the_signal(show: str) -> None:
    world = registered()
    send(world, PAUSE)
    world.crash()  # the session goes on, but nothing was pushed to it
    with pytest.raises(SignalNotPending):
        ack_type(world, SignalType.PAUSE)
    match show:
        case "poll":
            world.say(PollSignals(epoch=world.epoch))
        case "checkpoint":
            world.say(SaveCheckpoint(epoch=world.epoch, checkpoint_id="c", state=b"x"))
        case "probe":
            world.say(SaveCheckpoint(epoch=world.epoch, checkpoint_id="c"))
        case "sleep":
            world.say(Sleep(epoch=world.epoch, duration_us=SECOND))
    assert ack_type(world, SignalType.PAUSE).applied


def test_a_refused_acknowledgement_leaves_the_signal_pending() -> None:
    world = registered()
    signal_id = send(world, CANCEL).signal_id
    reply = ack(world, signal_id, granted=False)
    assert (reply.applied, reply.status, reply.signal_id) == (False, Status.RUNNING, signal_id)
    assert pending(world) == [SignalType.CANCEL]


def test_an_ack_after_the_end_changes_nothing() -> None:
    world = registered()
    signal_id = send(world, CANCEL).signal_id
    event(world, EventType.COMPLETED, b"out")
    decision = world.say(AckSignal(epoch=world.epoch, signal_id=signal_id))
    assert decision.ops == ()
    assert decision.reply == AckReply(
        applied=False, status=Status.COMPLETED, reason=Reason.COMPLETED, signal_id=signal_id
    )


# ---------------------------------------------------------------- cancel


def test_a_cancel_waits_for_the_live_session() -> None:
    world = registered()
    reply = send(world, SendSignal(type=SignalType.CANCEL, payload=b"too late"))
    assert (reply.status, reply.applied, world.row.cancelling_us) == (Status.RUNNING, False, START_US)
    world.advance(3)
    acked = ack(world, reply.signal_id)
    assert (acked.applied, acked.status, acked.compensating) == (True, Status.CANCELLED, False)
    row = world.row
    assert (row.reason, row.finished_us) == (Reason.CANCELLED, START_US + 3 * SECOND)
    assert row.cancelling_us == START_US
    assert world.tables.payloads == {PayloadKind.ERROR: b"too late"}


@pytest.mark.parametrize("where", ["lost", "started", "suspended", "paused", "asleep"])
def test_a_cancel_without_a_live_session_takes_effect_at_once(where: str) -> None:
    world = World()
    if where == "started":
        world.say(StartInstance(workflow="orders"))
    else:
        registered(world)
        if where == "paused":
            paused(world)
        elif where == "asleep":
            world.say(Sleep(epoch=world.epoch, duration_us=SECOND, checkpoint_id="nap"))
        world.say(SessionLost(epoch=world.epoch))
    reply = send(world, CANCEL)
    assert (reply.applied, reply.status, reply.reason) == (True, Status.CANCELLED, Reason.CANCELLED)
    assert world.tables.signals[reply.signal_id].acknowledged_us == START_US


def test_a_lost_session_counts_as_live_within_its_grace_period() -> None:
    world = registered()
    world.crash()
    reply = send(world, SendSignal(type=SignalType.CANCEL, payload=b"why"))
    assert (reply.applied, reply.status) == (False, Status.RUNNING)
    world.say(SessionLost(epoch=world.epoch))
    assert world.status is Status.CANCELLED
    assert world.tables.payloads == {PayloadKind.ERROR: b"why"}


@pytest.mark.parametrize("begin", [registered, hosted])
def test_a_cancel_that_an_idle_session_never_acknowledged_takes_effect_when_it_goes(begin: Any) -> None:
    world = begin()
    event(world, EventType.SUSPENDED)
    if world.row.hosted:
        world.say(Wake(epoch=world.epoch, deadline_us=START_US))
        assert world.status is Status.PENDING
    assert send(world, CANCEL).applied is False
    world.say(SessionLost(epoch=world.epoch))
    assert world.status is Status.CANCELLED


def test_a_second_cancel_ends_what_a_crash_left_with_an_unacknowledged_one() -> None:
    world = registered()
    event(world, EventType.SUSPENDED)
    first = send(world, CANCEL)
    world.crash()
    second = send(world, CANCEL)
    assert (second.signal_id, second.applied) == (first.signal_id, True)
    assert world.status is Status.CANCELLED


@pytest.mark.parametrize("completed_first", [True, False])
def test_a_cancel_that_races_completion_is_answered_with_what_happened(completed_first: bool) -> None:
    world = registered()
    if completed_first:
        event(world, EventType.COMPLETED, b"out")
        with pytest.raises(AlreadyFinished) as caught:
            world.say(CANCEL)
        assert caught.value.status == "completed"
    else:
        signal_id = send(world, CANCEL).signal_id
        event(world, EventType.COMPLETED, b"out")
        assert ack(world, signal_id).status is Status.COMPLETED
    assert world.status is Status.COMPLETED
    assert world.tables.payloads == {PayloadKind.OUTPUT: b"out"}


def test_completion_after_the_acknowledged_cancel_is_recorded_and_not_applied() -> None:
    world = registered()
    ack(world, send(world, CANCEL).signal_id)
    event(world, EventType.COMPLETED, b"out")
    assert world.status is Status.CANCELLED
    assert world.tables.payloads == {}
    assert world.tables.events[-1].applied is False


# ---------------------------------------------------------------- pause and resume


@pytest.mark.parametrize("begin", [registered, hosted])
def test_a_pause_waits_for_the_live_session_and_a_resume_goes_on_in_it(begin: Any) -> None:
    world = begin()
    assert send(world, PAUSE).applied is False
    assert ack_type(world, SignalType.PAUSE).reason is Reason.PAUSED
    reply = send(world, RESUME)
    assert (reply.applied, reply.status, reply.reason) == (True, Status.RUNNING, None)
    assert pushed(world) == [SignalType.RESUME]
    assert ack_type(world, SignalType.RESUME).applied
    assert pending(world) == []


def test_a_resume_cancels_an_unacknowledged_pause() -> None:
    world = registered()
    pause = send(world, PAUSE)
    resume = send(world, RESUME)
    assert (resume.applied, resume.status) == (True, Status.RUNNING)
    assert pending(world) == [SignalType.RESUME]
    assert not ack(world, pause.signal_id).applied
    assert world.status is Status.RUNNING
    world.say(Sleep(epoch=world.epoch, duration_us=SECOND, checkpoint_id="nap"))
    assert world.last.park == "nap"


def test_a_resume_with_nothing_to_resume_does_nothing() -> None:
    world = registered()
    assert not send(world, RESUME).applied
    assert pending(world) == []


@pytest.mark.parametrize("acknowledged", [True, False])
def test_a_second_pause_and_resume_work_though_the_first_resume_was_never_acknowledged(
    acknowledged: bool,
) -> None:
    world = paused(registered())
    first = send(world, RESUME)
    pause = send(world, PAUSE)
    if acknowledged:
        ack(world, pause.signal_id)
    second = send(world, RESUME)
    assert (second.applied, second.status) == (True, Status.RUNNING)
    assert second.signal_id != first.signal_id
    assert pending(world) == [SignalType.RESUME]
    assert send(world, RESUME).signal_id == second.signal_id


def test_a_pause_of_a_paused_instance_changes_nothing() -> None:
    world = paused(registered())
    assert not send(world, PAUSE).applied
    assert world.row.paused
    assert pending(world) == []


@pytest.mark.parametrize(
    ("begin", "status", "reason"),
    [(registered, Status.SUSPENDED, Reason.DISCONNECTED), (hosted, Status.PENDING, None)],
)
def test_without_a_session_a_pause_and_a_resume_take_effect_at_once(
    begin: Any, status: Status, reason: Reason | None
) -> None:
    world = begin()
    world.say(SessionLost(epoch=world.epoch))
    assert send(world, PAUSE).reason is Reason.PAUSED
    reply = send(world, RESUME)
    assert (reply.applied, reply.status, reply.reason) == (True, status, reason)
    assert (world.row.awaits_client_us is None) == world.row.hosted
    assert pending(world) == []


def test_a_pause_that_a_lost_session_never_acknowledged_takes_effect() -> None:
    world = hosted()
    send(world, PAUSE)
    world.say(SessionLost(epoch=world.epoch))
    assert world.row.paused
    assert pending(world) == []


def test_a_pending_instance_that_is_paused_is_not_dispatched_until_it_is_resumed() -> None:
    world = World()
    world.say(StartInstance(workflow="orders"))
    assert send(world, PAUSE).reason is Reason.PAUSED
    assert send(world, RESUME).status is Status.PENDING


def test_neither_a_custom_signal_nor_a_due_time_unpauses() -> None:
    world = registered()
    world.say(WaitSignal(epoch=world.epoch, key="k", checkpoint_id="w", timeout_us=10 * SECOND))
    deadline = world.row.sleep_until_us
    assert deadline is not None
    paused(world)
    send(world, custom())
    assert world.row.paused
    assert world.row.due_us is None
    world.advance(60)
    assert world.say(Wake(epoch=world.epoch, deadline_us=deadline)).ops == ()
    assert world.row.paused
    assert len(world.known.waits) == len(world.known.signals) == 1


@pytest.mark.parametrize("overdue", [False, True])
def test_a_paused_sleeper_keeps_its_deadline_and_rings_once(overdue: bool) -> None:
    world = hosted()
    world.say(Sleep(epoch=world.epoch, duration_us=60 * SECOND, checkpoint_id="nap"))
    paused(world)
    world.say(SessionLost(epoch=world.epoch))
    world.advance(100 if overdue else 20)
    assert send(world, RESUME).reason is Reason.SLEEPING
    assert world.row.sleep_until_us == START_US + 60 * SECOND
    world.now_us = max(world.now_us, START_US + 60 * SECOND)
    world.say(Wake(epoch=world.epoch, deadline_us=START_US + 60 * SECOND))
    assert (world.status, world.row.due_us) == (Status.PENDING, None)
    reply = world.say(Wake(epoch=world.epoch, deadline_us=START_US + 60 * SECOND))
    assert reply.ops == ()


@pytest.mark.parametrize("begin", [registered, hosted])
def test_a_resume_finds_the_signal_that_came_during_the_pause(begin: Any) -> None:
    """Nothing more will come for the wait: it must not go back to waiting in silence."""
    world = begin()
    world.say(WaitSignal(epoch=world.epoch, key="k", checkpoint_id="w"))
    paused(world)
    world.say(SessionLost(epoch=world.epoch))
    send(world, custom())
    send(world, RESUME)
    if world.row.hosted:
        assert world.row.due_us == START_US
    else:
        assert world.row.awaits_client_us == START_US


def test_a_pause_ends_parked_waits_early() -> None:
    world = registered()
    world.say(Sleep(epoch=world.epoch, duration_us=60 * SECOND, checkpoint_id="nap"))
    world.say(WaitSignal(epoch=world.epoch, key="k", checkpoint_id="w"))
    signal_id = send(world, PAUSE).signal_id
    for name in ("nap", "w"):
        answer = world.released_wait(name)
        assert answer.interrupted
        assert answer.signal is not None
        assert answer.signal.signal_id == signal_id


def test_a_resume_ends_no_wait() -> None:
    world = registered()
    world.say(Sleep(epoch=world.epoch, duration_us=60 * SECOND, checkpoint_id="nap"))
    send(world, RESUME)
    assert world.answers == {}
    assert world.known.parked == {"nap"}


# ---------------------------------------------------------------- custom signals, in order


def test_custom_signals_of_a_key_are_received_in_the_order_of_their_acceptance() -> None:
    world = registered()
    for number in range(20):
        send(world, custom("item", b"%d" % number))
        send(world, custom("other"))
    received = [
        world.ask(WaitSignal(epoch=world.epoch, key="item", checkpoint_id=f"w{number}"), WaitReply).payload
        for number in range(20)
    ]
    assert received == [b"%d" % number for number in range(20)]
    assert {s.key for s in world.known.signals} == {"other"}


def test_a_signal_that_a_parked_wait_consumes_is_not_pushed() -> None:
    world = registered()
    world.say(WaitSignal(epoch=world.epoch, key="k", checkpoint_id="w"))
    reply = send(world, custom(payload=b"p"))
    assert reply.applied
    assert world.released_wait("w").payload == b"p"
    assert pushed(world) == []
    assert not ack(world, reply.signal_id).applied


def test_a_parked_wait_gets_the_signal_though_an_older_one_is_not_asked_for_any_more() -> None:
    world = registered()
    world.say(WaitSignal(epoch=world.epoch, key="k", checkpoint_id="left"))
    world.say(Register())
    world.say(WaitSignal(epoch=world.epoch, key="k", checkpoint_id="right"))
    send(world, custom(payload=b"p"))
    assert world.released_wait("right").payload == b"p"
    assert [wait.wait_id for wait in world.known.waits] == ["left"]


# ---------------------------------------------------------------- shutdown, sent as a signal


def test_a_shutdown_signal_belongs_to_the_live_session_only() -> None:
    world = registered()
    send(world, SendSignal(type=SignalType.SHUTDOWN))
    assert world.known.signals[0].epoch == world.epoch
    assert ack_type(world, SignalType.SHUTDOWN).reason is Reason.SHUTDOWN_REQUESTED
    assert not send(world, SendSignal(type=SignalType.SHUTDOWN)).applied
    assert pending(world) == []
