"""Checkpoints, events, retry attempts, recorded errors, and asking twice."""

import base64
import json
from typing import Any

import pytest

from runtara.errors import Conflict, ErrorNotFound, InvalidInstanceState, ValidationError
from runtara.limits import MAX_DURATION_US, MAX_INSTANT_US
from runtara.machine.requests import digest
from runtara.messages import (
    ChangeReply,
    CheckpointReply,
    ErrorReply,
    EventReply,
    FoundCheckpoint,
    GetCheckpoint,
    RecordError,
    RecordRetryAttempt,
    Register,
    ReportEvent,
    Request,
    RetryReply,
    SaveCheckpoint,
    SendSignal,
    Sleep,
    StartInstance,
    StartReply,
    WaitReply,
    WaitSignal,
    Wake,
)
from runtara.records import (
    CheckpointRecord,
    ErrorCategory,
    ErrorSeverity,
    EventType,
    PayloadKind,
    Reason,
    RetryHint,
    SignalType,
    Status,
    WaitOutcome,
)
from tests.machine_world import SECOND, START_US, World, hosted, registered


def report(world: World, type: EventType, payload: bytes | None = None, **more: Any) -> EventReply:
    return world.ask(ReportEvent(epoch=world.epoch, type=type, payload=payload, **more), EventReply)


def save(world: World, name: str, state: bytes | None) -> CheckpointReply:
    return world.ask(SaveCheckpoint(epoch=world.epoch, checkpoint_id=name, state=state), CheckpointReply)


# ---------------------------------------------------------------- checkpoints


def test_a_new_checkpoint_is_stored_with_one_record_and_becomes_the_current_one() -> None:
    world = registered()
    reply = save(world, "c", b"x")
    assert (reply.found, reply.state, reply.created_us) == (False, b"x", START_US)
    assert world.last.ops == (
        CheckpointRecord(revision=2, checkpoint_id="c", state=b"x", created_us=START_US),
    )
    assert world.known.checkpoint_id == "c"


def test_a_checkpoint_that_exists_is_found_and_the_new_state_is_ignored() -> None:
    world = registered()
    save(world, "a", b"first")
    save(world, "b", b"x")
    world.advance(9)
    reply = save(world, "a", b"second")
    assert (reply.found, reply.state, reply.created_us) == (True, b"first", START_US)
    assert world.last.ops == ()
    assert world.known.checkpoint_id == "b"


@pytest.mark.parametrize("state", [None, b""])
def test_a_checkpoint_without_a_state_only_looks(state: bytes | None) -> None:
    world = registered()
    reply = save(world, "c", state)
    assert (reply.found, reply.state) == (False, None)
    assert world.last.ops == ()
    assert not save(world, "c", b"data").found
    assert save(world, "c", state).state == b"data"


def test_get_checkpoint_reads_and_never_writes() -> None:
    world = registered()
    assert not world.ask(GetCheckpoint(checkpoint_id="c"), FoundCheckpoint).found
    assert world.last.ops == ()
    save(world, "c", b"x")
    report(world, EventType.COMPLETED)
    assert world.ask(GetCheckpoint(checkpoint_id="c"), FoundCheckpoint).state == b"x"


def test_a_checkpoint_reply_carries_the_last_error() -> None:
    world = registered()
    assert save(world, "c", b"x").last_error is None
    for code in ("E1", "E2"):
        world.say(RecordError(epoch=world.epoch, code=code, message="m"))
    world.crash()
    error = save(world, "c", None).last_error
    assert error is not None
    assert error.code == "E2"


def test_a_checkpoint_is_a_sign_of_life() -> None:
    world = registered()
    world.advance(7)
    save(world, "c", None)
    assert world.known.last_activity_us == START_US + 7 * SECOND


# ---------------------------------------------------------------- events


@pytest.mark.parametrize(
    ("type", "status", "reason"),
    [
        (EventType.HEARTBEAT, Status.RUNNING, None),
        (EventType.COMPLETED, Status.COMPLETED, Reason.COMPLETED),
        (EventType.FAILED, Status.FAILED, Reason.APPLICATION_ERROR),
        (EventType.SUSPENDED, Status.SUSPENDED, Reason.DISCONNECTED),
        (EventType.CUSTOM, Status.RUNNING, None),
    ],
)
def test_an_event_applies_to_a_running_instance(
    type: EventType, status: Status, reason: Reason | None
) -> None:
    world = registered()
    reply = report(world, type, b"p", checkpoint_id="c", subtype="s", timestamp_us=5)
    assert reply == EventReply(applied=True, status=status, reason=reason, event_id=2)
    stored = world.tables.events[-1]
    assert (stored.type, stored.payload, stored.checkpoint_id) == (type, b"p", "c")
    assert (stored.subtype, stored.created_us, stored.applied) == ("s", 5, True)


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("type", [EventType.COMPLETED, EventType.FAILED, EventType.SUSPENDED])
def test_an_event_that_comes_too_late_is_stored_and_says_that_it_did_not_apply(
    type: EventType, ended: bool
) -> None:
    world = registered()
    report(world, EventType.COMPLETED if ended else EventType.SUSPENDED, b"out" if ended else None)
    row = world.row
    reply = report(world, type, b"late")
    assert (reply.applied, reply.status, reply.reason) == (False, row.status, row.reason)
    assert (world.tables.events[-1].payload, world.tables.events[-1].applied) == (b"late", False)
    assert world.row is row
    assert world.tables.payloads == ({PayloadKind.OUTPUT: b"out"} if ended else {})


@pytest.mark.parametrize("payload", [None, b""])
def test_completion_without_a_payload_has_no_output(payload: bytes | None) -> None:
    world = registered()
    report(world, EventType.COMPLETED, payload)
    assert (world.status, world.tables.payloads) == (Status.COMPLETED, {})


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (None, "Unknown error"),
        (b"", "Unknown error"),
        (b"\xff\xfe\x00", "Unknown error (binary payload)"),
        ("zu spät\0".encode(), "zu spät\0"),
    ],
)
def test_a_failure_keeps_its_text_or_says_that_it_had_none(payload: bytes | None, text: str) -> None:
    world = registered()
    report(world, EventType.FAILED, payload)
    assert world.tables.payloads == {PayloadKind.ERROR: text.encode()}


@pytest.mark.parametrize("timestamp", [None, -1, MAX_INSTANT_US + 1, 10**30])
def test_a_timestamp_outside_the_calendar_becomes_the_present(timestamp: int | None) -> None:
    world = registered()
    report(world, EventType.CUSTOM, subtype="s", timestamp_us=timestamp)
    assert world.tables.events[-1].created_us == START_US


@pytest.mark.parametrize("timestamp", [0, MAX_INSTANT_US])
def test_a_timestamp_inside_the_calendar_is_kept(timestamp: int) -> None:
    world = registered()
    report(world, EventType.CUSTOM, subtype="s", timestamp_us=timestamp)
    assert world.tables.events[-1].created_us == timestamp


def test_of_a_stream_of_heartbeats_one_per_period_is_stored() -> None:
    world = registered()
    stored = []
    for _ in range(25):
        world.advance(1)
        stored.append(report(world, EventType.HEARTBEAT).event_id is not None)
    assert [n for n, kept in enumerate(stored) if kept] == [0, 10, 20]
    assert world.known.last_activity_us == world.now_us


def test_a_heartbeat_of_a_suspended_instance_does_not_apply() -> None:
    world = registered()
    report(world, EventType.SUSPENDED)
    reply = report(world, EventType.HEARTBEAT)
    assert (reply.applied, reply.status, reply.event_id) == (False, Status.SUSPENDED, None)


# ---------------------------------------------------------------- suspended, with a wake request


def wake_at(us: object, state: bytes | None = b"s") -> bytes:
    body = {"wake_at_ms": us // 1000 if isinstance(us, int) else us}
    if state is not None:
        body["state"] = base64.b64encode(state).decode()
    return json.dumps(body).encode()


@pytest.mark.parametrize("begin", [registered, hosted])
def test_a_suspension_may_ask_to_be_woken(begin: Any) -> None:
    world = begin()
    wake = START_US + 60 * SECOND
    reply = report(world, EventType.SUSPENDED, wake_at(wake), checkpoint_id="nap")
    assert (reply.applied, reply.status, reply.reason) == (True, Status.SUSPENDED, Reason.SLEEPING)
    assert world.row.sleep_until_us == wake
    assert world.tables.checkpoints["nap"].state == b"s"
    assert world.tables.waits["nap"].deadline_us == wake
    world.now_us = wake
    assert world.ask(Wake(epoch=world.epoch, deadline_us=wake), ChangeReply).applied
    world.say(Register())
    again = Sleep(epoch=world.epoch, duration_us=1, checkpoint_id="nap")
    assert world.ask(again, WaitReply).outcome is WaitOutcome.ELAPSED


@pytest.mark.parametrize("begin", [registered, hosted])
def test_a_suspension_may_ask_to_be_woken_after_a_while(begin: Any) -> None:
    """The present protocol: a duration crosses the wire, and the machine's clock makes it an instant."""
    world = begin()
    wake = START_US + 60 * SECOND
    reply = report(world, EventType.SUSPENDED, checkpoint_id="nap", wake_after_us=60 * SECOND, state=b"s")
    assert (reply.status, reply.reason) == (Status.SUSPENDED, Reason.SLEEPING)
    assert world.row.sleep_until_us == wake
    assert world.tables.checkpoints["nap"].state == b"s"
    assert world.tables.waits["nap"].deadline_us == wake


def test_a_suspension_that_is_asked_for_again_keeps_its_deadline() -> None:
    world = registered()
    wake = START_US + 60 * SECOND
    report(world, EventType.SUSPENDED, wake_at(wake), checkpoint_id="nap")
    world.say(Register())
    report(world, EventType.SUSPENDED, wake_at(wake + SECOND), checkpoint_id="nap")
    assert world.row.sleep_until_us == wake


def test_a_suspension_until_a_sleep_that_is_over_is_due_at_once() -> None:
    world = hosted()
    world.say(Sleep(epoch=world.epoch, duration_us=0, checkpoint_id="nap"))
    report(world, EventType.SUSPENDED, wake_at(START_US + SECOND), checkpoint_id="nap")
    assert world.row.due_us == START_US


def test_a_suspension_under_the_name_of_a_wait_for_a_signal_is_a_conflict() -> None:
    world = registered()
    world.say(WaitSignal(epoch=world.epoch, key="k", checkpoint_id="w"))
    with pytest.raises(Conflict):
        report(world, EventType.SUSPENDED, wake_at(START_US + SECOND), checkpoint_id="w")


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        (wake_at(-1000), "wake_at_ms"),
        (wake_at(MAX_INSTANT_US + SECOND), "wake_at_ms"),
        (wake_at(START_US + MAX_DURATION_US + SECOND), "wake_at_ms"),
        (wake_at("soon"), "wake_at_ms"),
        (wake_at(1.5), "wake_at_ms"),
        (b'{"wake_at_ms": true}', "wake_at_ms"),
        (wake_at(None), "wake_at_ms"),
        (b'{"wake_at_ms": NaN}', "wake_at_ms"),
        (b'{"wake_at_ms": 1, "state": "%%%"}', "state"),
        (b'{"wake_at_ms": 1, "state": 5}', "state"),
    ],
)
def test_a_wake_request_that_makes_no_sense_is_refused_and_names_its_field(
    payload: bytes, field: str
) -> None:
    world = registered()
    with pytest.raises(ValidationError) as caught:
        report(world, EventType.SUSPENDED, payload, checkpoint_id="nap")
    assert caught.value.field == field
    assert world.status is Status.RUNNING


@pytest.mark.parametrize(
    "payload", [None, b"", b"bye", b"\xff", b"[]", b"{}", b'"x"', b"[" * 100_000, b'{"state": "%"}']
)
def test_any_other_payload_is_a_plain_suspension(payload: bytes | None) -> None:
    world = registered()
    assert report(world, EventType.SUSPENDED, payload).status is Status.SUSPENDED
    assert world.row.awaits_client_us == START_US
    assert world.tables.waits == {}


# ---------------------------------------------------------------- attempts


def test_an_attempt_is_stored_once_and_is_no_checkpoint() -> None:
    world = registered()
    message = RecordRetryAttempt(
        epoch=world.epoch,
        checkpoint_id="c",
        attempt=1,
        error="timeout",
        timestamp_us=5,
        category=ErrorCategory.TRANSIENT,
        severity=ErrorSeverity.WARNING,
        retry_hint=RetryHint.RETRY_AFTER,
        retry_after_us=9,
        error_code="E",
    )
    assert world.ask(message, RetryReply) == RetryReply(applied=True)
    assert world.ask(message, RetryReply) == RetryReply(applied=False)
    (record,) = world.tables.attempts.values()
    assert (record.attempt, record.error, record.created_us, record.error_code) == (1, "timeout", 5, "E")
    assert (record.category, record.severity) == (ErrorCategory.TRANSIENT, ErrorSeverity.WARNING)
    assert (record.retry_hint, record.retry_after_us) == (RetryHint.RETRY_AFTER, 9)
    assert world.tables.checkpoints == {}
    assert world.known.checkpoint_id is None


# ---------------------------------------------------------------- errors


def error(world: World, **more: Any) -> RecordError:
    return RecordError(epoch=world.epoch, code="E", message="m", **more)


def test_an_error_gets_an_id_and_becomes_the_last_one() -> None:
    world = registered()
    first = world.ask(error(world, checkpoint_id="c", step_id="s", attributes="{}"), ErrorReply)
    second = world.ask(error(world, cause_id=first.error_id), ErrorReply)
    assert (first.error_id, second.error_id) == (2, 3)
    stored = world.tables.errors
    assert [(e.error_id, e.cause_id, e.checkpoint_id, e.step_id) for e in stored] == [
        (2, None, "c", "s"),
        (3, 2, None, None),
    ]
    assert (stored[0].attributes, stored[0].severity) == ("{}", ErrorSeverity.ERROR)
    assert world.known.last_error == stored[1]


def test_an_error_whose_cause_does_not_exist_is_refused() -> None:
    world = registered()
    with pytest.raises(ErrorNotFound) as caught:
        world.say(error(world, cause_id=77))
    assert caught.value.details == {"field": "cause_id", "error_id": 77}


def test_an_error_of_an_instance_that_does_not_run_is_refused_before_its_cause_is_looked_up() -> None:
    world = registered()
    report(world, EventType.SUSPENDED)
    with pytest.raises(InvalidInstanceState):
        world.say(error(world, cause_id=77))


# ---------------------------------------------------------------- asking twice


@pytest.mark.parametrize("crashed", [False, True])
def test_a_request_asked_twice_gets_the_same_answer_also_after_the_end(crashed: bool) -> None:
    world = registered()
    requests: list[Request] = [
        ReportEvent(epoch=1, type=EventType.CUSTOM, subtype="s", request_id="event"),
        error(world, request_id="error"),
        SendSignal(type=SignalType.CUSTOM, key="k", request_id="signal"),
        ReportEvent(epoch=1, type=EventType.COMPLETED, payload=b"out", request_id="end"),
    ]
    answers = [world.say(request).reply for request in requests]
    if crashed:
        world.crash()
    revision = world.known.revision
    assert [world.say(request).reply for request in requests] == answers
    assert world.known.revision == revision


def test_a_start_asked_twice_gets_the_same_answer_whatever_became_of_the_instance() -> None:
    world = World()
    message = StartInstance(workflow="orders", input=b"in", request_id="r")
    first = world.ask(message, StartReply)
    world.say(Register())
    report(world, EventType.COMPLETED)
    assert world.ask(message, StartReply) == first == StartReply(created=True, status=Status.PENDING)


def test_a_stale_session_is_refused_before_its_request_is_recognised() -> None:
    world = registered()
    message = error(world, request_id="r")
    world.say(message)
    world.say(Register())
    with pytest.raises(Exception, match="epoch 1 is over"):
        world.say(message)
    assert world.ask(error(world, request_id="r"), ErrorReply).error_id == 2


@pytest.mark.parametrize(
    "other",
    [
        ReportEvent(epoch=1, type=EventType.CUSTOM, subtype="other", request_id="r"),
        ReportEvent(epoch=1, type=EventType.CUSTOM, subtype="s", payload=b"", request_id="r"),
        RecordError(epoch=1, code="E", message="m", request_id="r"),
        SendSignal(type=SignalType.CUSTOM, key="k", request_id="r"),
    ],
)
def test_the_same_request_id_with_another_body_is_a_conflict(other: Any) -> None:
    world = registered()
    report(world, EventType.CUSTOM, subtype="s", request_id="r")
    with pytest.raises(Conflict) as caught:
        world.say(other)
    assert caught.value.field == "request_id"


def test_a_digest_tells_bodies_apart_and_ignores_the_epoch_and_the_id() -> None:
    def made(epoch: int = 1, request_id: str = "r", **more: Any) -> bytes:
        return digest(RecordError(epoch=epoch, request_id=request_id, code="E", **more))

    assert made(message="m") == made(2, "other", message="m")
    different = [
        made(message="m"),
        made(message="m", step_id="m"),
        made(message="m", checkpoint_id="m"),
        made(message="m", step_id="None"),
        made(message="m", cause_id=1),
        made(message="m", step_id="1"),
        made(message="m", category=ErrorCategory.TRANSIENT),
        made(message="m", attributes=""),
    ]
    assert len(set(different)) == len(different)
