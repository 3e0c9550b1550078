"""Scopes and steps, as custom events tell of them."""

import json
from typing import Any

import pytest

from runtara.actors.instance import state_of
from runtara.limits import STEP_TEXT
from runtara.machine import steps
from runtara.messages import EventReply, Register, ReportEvent, SaveCheckpoint
from runtara.persistence.store import Loaded
from runtara.records import EventRecord, EventType, FinishStep, Status, StepRecord, StepStatus
from tests import machine_world
from tests.machine_world import SECOND, START_US, World, registered

START, END = "step_debug_start", "step_debug_end"
DEEP = b'{"scope_id": ' * 100_000
HUGE = b'{"step_id": "a", "scope_id": "s", "n": 1%s}' % (b"0" * 5000)


def tell(world: World, subtype: str, body: object = None, **more: Any) -> EventReply:
    """Report a custom event; a body that is not bytes is sent as JSON."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    message = ReportEvent(epoch=world.epoch, type=EventType.CUSTOM, subtype=subtype, payload=payload, **more)
    return world.ask(message, EventReply)


def start(world: World, step_id: str = "a", **body: Any) -> None:
    tell(world, START, {"step_id": step_id, **body})


def end(world: World, step_id: str = "a", **body: Any) -> None:
    tell(world, END, {"step_id": step_id, **body})


def listed(world: World) -> list[StepRecord]:
    return list(world.tables.steps.values())


def ends(world: World) -> dict[int, int | None]:
    """By which event each step ended; both by their revisions."""
    return {step.revision: step.end_revision for step in listed(world)}


def scopes(world: World) -> tuple[str | None, str | None]:
    event = world.tables.events[-1]
    return event.scope_id, event.parent_scope_id


# ---------------------------------------------------------------- scopes


@pytest.mark.parametrize("subtype", ["log", START, END])
def test_a_custom_event_belongs_to_the_scope_that_its_payload_names(subtype: str) -> None:
    world = registered()
    tell(world, subtype, {"scope_id": "s", "parent_scope_id": "p"})
    assert scopes(world) == ("s", "p")
    tell(world, subtype, {"parent_scope_id": "p"})
    assert scopes(world) == (None, "p")
    tell(world, subtype, {"scope_id": "", "parent_scope_id": None})
    assert scopes(world) == ("", None)


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("Büro \0 😀", "Büro \0 😀"),
        ("a\ud800b\udfff", "a\ufffdb\ufffd"),
        ("x" * STEP_TEXT, "x" * STEP_TEXT),
        ("x" * (STEP_TEXT + 1), None),
        (5, None),
        (1.5, None),
        (True, None),
        (["s"], None),
        ({"s": "s"}, None),
    ],
)
def test_a_scope_is_text_that_a_store_can_hold(said: object, kept: str | None) -> None:
    world = registered()
    tell(world, "log", {"scope_id": said, "parent_scope_id": said})
    assert scopes(world) == (kept, kept)


@pytest.mark.parametrize("type", [EventType.HEARTBEAT, EventType.FAILED, EventType.COMPLETED])
def test_only_custom_events_have_a_scope(type: EventType) -> None:
    world = registered()
    world.advance(60)
    world.say(ReportEvent(epoch=world.epoch, type=type, payload=b'{"scope_id": "s", "step_id": "a"}'))
    assert world.tables.events[-1].type is type
    assert scopes(world) == (None, None)


def test_a_payload_that_can_tell_nothing_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    monkeypatch.setattr(steps, "json_object", parsed.append)
    world = registered(World(careful=False))
    tell(world, "log", {"step_id": "a"})
    world.say(ReportEvent(epoch=world.epoch, type=EventType.FAILED, payload=b'{"scope_id": "s"}'))
    assert parsed == []
    for subtype, body in (("log", b'{"scope_id": 1}'), (START, b"{}"), (END, b"{}")):
        tell(world, subtype, body)
    assert parsed == [b'{"scope_id": 1}', b"{}", b"{}"]


# ---------------------------------------------------------------- steps


def test_a_start_begins_a_step_and_an_end_finishes_it() -> None:
    world = registered()
    start(world, "a", step_name="Charge", step_type="http", scope_id="s", parent_scope_id="p", inputs=[1])
    assert world.last.ops[1:] == (
        StepRecord(
            revision=2,
            step_id="a",
            step_name="Charge",
            step_type="http",
            scope_id="s",
            parent_scope_id="p",
            started_us=START_US,
        ),
    )
    world.advance(3)
    end(world, "a", scope_id="s", outputs={"x": 1}, error=None)
    assert isinstance(world.last.ops[0], EventRecord)
    assert world.last.ops[1:] == (
        FinishStep(
            start_revision=2,
            end_revision=3,
            status=StepStatus.COMPLETED,
            finished_us=START_US + 3 * SECOND,
        ),
    )
    assert world.known.steps == ()


def test_the_times_of_a_step_are_those_of_its_events() -> None:
    world = registered()
    tell(world, START, {"step_id": "a"}, timestamp_us=5)
    tell(world, END, {"step_id": "a"}, timestamp_us=2)
    (step,) = listed(world)
    assert (step.started_us, step.finished_us, step.duration_ms) == (5, 2, 0.0)


def test_a_step_without_a_name_or_type_has_none() -> None:
    world = registered()
    start(world, "a", step_name=5, step_type=["http"], scope_id=False)
    assert listed(world) == [StepRecord(revision=2, step_id="a", started_us=START_US)]


def test_names_lose_what_no_store_can_hold() -> None:
    world = registered()
    start(world, "a\ud800", step_name="n\udfff", step_type="t\ud900")
    (step,) = listed(world)
    assert (step.step_id, step.step_name, step.step_type) == ("a\ufffd", "n\ufffd", "t\ufffd")
    end(world, "a\ud800")
    assert ends(world) == {2: 3}


def test_a_step_that_runs_twice_in_one_scope_is_two_steps() -> None:
    world = registered()
    for _ in range(2):
        start(world, scope_id="s")
        end(world, scope_id="s")
    assert ends(world) == {2: 3, 4: 5}


def test_nested_runs_of_one_step_end_newest_first() -> None:
    world = registered()
    for _ in range(3):
        start(world)
    for _ in range(3):
        end(world)
    assert ends(world) == {2: 7, 3: 6, 4: 5}


def test_an_end_finishes_a_step_of_its_own_scope_only() -> None:
    world = registered()
    start(world, scope_id="s")
    start(world)
    start(world, scope_id="t")
    end(world, scope_id="s")
    end(world)
    end(world, "b", scope_id="t")
    assert ends(world) == {2: 5, 3: 6, 4: None}


def test_an_end_without_a_running_start_makes_no_step() -> None:
    world = registered()
    end(world)
    start(world)
    end(world)
    end(world)
    assert ends(world) == {3: 4}
    assert [event.subtype for event in world.tables.events[1:]] == [END, START, END, END]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, StepStatus.COMPLETED),
        ({"error": None}, StepStatus.COMPLETED),
        ({"error": "broken"}, StepStatus.FAILED),
        ({"error": {}}, StepStatus.FAILED),
        ({"error": False}, StepStatus.FAILED),
        ({"error": ""}, StepStatus.FAILED),
        ({"error": 0}, StepStatus.FAILED),
        ({"outputs": {"_error": True}}, StepStatus.FAILED),
        ({"outputs": {"_error": True}, "error": None}, StepStatus.FAILED),
        ({"outputs": {"_error": False}}, StepStatus.COMPLETED),
        ({"outputs": {"_error": 1}}, StepStatus.COMPLETED),
        ({"outputs": {"_error": "true"}}, StepStatus.COMPLETED),
        ({"outputs": ["_error"]}, StepStatus.COMPLETED),
        ({"outputs": "_error"}, StepStatus.COMPLETED),
        ({"outputs": None}, StepStatus.COMPLETED),
    ],
)
def test_a_step_fails_by_its_error_or_by_its_outputs(body: dict[str, Any], status: StepStatus) -> None:
    world = registered()
    start(world)
    end(world, **body)
    assert [step.status for step in listed(world)] == [status]


ODD: list[bytes | None] = [
    None,
    b"",
    b"step_id",
    b"\xff\xfe",
    b"null",
    b"[]",
    b'["step_id", "scope_id"]',
    b'"step_id scope_id"',
    b"{",
    b"{}",
    b'{"step_id": "a", "scope_id": NaN}',
    b'{"step_id": "a", "scope_id": "s", "x": -Infinity}',
    b'{"step_id": "a", "scope_id": "s"} and more',
    DEEP,
    b"[" * 100_000,
    HUGE,
    b'{"step_id": null, "scope_id": null}',
    b'{"step_id": 5}',
    b'{"step_id": {"scope_id": "s"}}',
    b'{"step_id": ["a"]}',
    json.dumps({"step_id": "x" * (STEP_TEXT + 1)}).encode(),
]


@pytest.mark.parametrize("subtype", [START, END, "log"])
@pytest.mark.parametrize("payload", ODD, ids=lambda payload: repr(payload)[:40])
def test_a_payload_that_tells_of_no_step_breaks_nothing(payload: bytes | None, subtype: str) -> None:
    world = registered()
    start(world)
    message = ReportEvent(epoch=world.epoch, type=EventType.CUSTOM, subtype=subtype, payload=payload)
    assert world.ask(message, EventReply).applied
    assert world.tables.events[-1] == EventRecord(
        revision=3, type=EventType.CUSTOM, subtype=subtype, payload=payload, created_us=START_US
    )
    assert ends(world) == {2: None}


@pytest.mark.parametrize("subtype", ["Step_debug_start", "step_debug_start ", "step_debug", "log"])
def test_other_subtypes_tell_of_no_step(subtype: str) -> None:
    world = registered()
    tell(world, subtype, {"step_id": "a", "scope_id": "s"})
    assert listed(world) == []


# ---------------------------------------------------------------- when, and for how long


def test_an_instance_that_has_ended_still_tells_of_its_steps() -> None:
    world = registered()
    start(world)
    world.say(ReportEvent(epoch=world.epoch, type=EventType.COMPLETED))
    row = world.row
    end(world)
    start(world, "b", scope_id="late")
    assert (ends(world), scopes(world)) == ({2: 4, 5: None}, ("late", None))
    assert world.row is row
    assert world.status is Status.COMPLETED


def test_the_same_event_asked_again_makes_nothing_new() -> None:
    world = registered()
    first = tell(world, START, {"step_id": "a"}, request_id="r1")
    assert tell(world, START, {"step_id": "a"}, request_id="r1") == first
    tell(world, END, {"step_id": "a"}, request_id="r2")
    start(world)
    tell(world, END, {"step_id": "a"}, request_id="r2")
    assert ends(world) == {2: 3, 4: None}


def test_a_crash_in_the_middle_of_a_step_changes_nothing() -> None:
    world = registered()
    start(world, scope_id="s")
    start(world)
    world.crash()
    world.say(Register())
    end(world, scope_id="s")
    world.crash()
    end(world)
    assert ends(world) == {2: 5, 3: 6}


def test_a_checkpoint_forgets_no_step() -> None:
    world = registered()
    start(world)
    before = world.known.steps
    world.say(SaveCheckpoint(epoch=world.epoch, checkpoint_id="c", state=b"x"))
    assert world.known.steps is before
    end(world)
    assert ends(world) == {2: 4}


def test_the_newest_running_steps_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (steps, machine_world):
        monkeypatch.setattr(module, "OPEN_STEPS", 3)
    world = registered()
    for step_id in "abcde":
        start(world, step_id)
    assert [step.step_id for step in world.known.steps] == ["c", "d", "e"]
    assert len(listed(world)) == 5
    world.crash()
    assert [step.step_id for step in world.known.steps] == ["c", "d", "e"]


# ---------------------------------------------------------------- what the actor makes of it


def test_the_actor_loads_the_running_steps_also_of_an_instance_that_has_ended() -> None:
    world = registered()
    start(world, scope_id="s")
    for over in (False, True):
        if over:
            world.say(ReportEvent(epoch=world.epoch, type=EventType.COMPLETED))
        loaded = Loaded(
            record=world.row,
            revision=world.known.revision,
            checkpoint_id=None,
            signals=(),
            waits=(),
            compensations=(),
            last_error=None,
            steps=tuple(listed(world)),
            checkpoint_ids=frozenset(),
            wait_ids=frozenset(),
            request_ids=frozenset(),
        )
        assert state_of(loaded, None).steps == world.known.steps != ()
