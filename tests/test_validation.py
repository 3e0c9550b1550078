"""The door: a table of bad values for each field of each request, and what is let through."""

import json
from typing import Any

import attrs
import pytest

from runtara.errors import PayloadTooLarge, ValidationError
from runtara.limits import MAX_DURATION_US, MAX_INT, MEBIBYTE, Limits
from runtara.messages import (
    AckSignal,
    Attach,
    ExitReport,
    FinishCompensation,
    ForceTerminate,
    GetCheckpoint,
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
    WaitSignal,
    Wake,
)
from runtara.records import (
    CompensationSpec,
    ErrorCategory,
    EventType,
    Reason,
    RetryHint,
    SignalType,
    Status,
    WaitKind,
)
from runtara.validation import CHECKS, MAX_JSON_DEPTH, check, check_json_object, duration_us, size_of

LIMITS = Limits(payload_bytes=100)

ID = ["", "x" * 513, "a\nb", "a\0b", "\ud800", 5, b"a"]
"""Bad in every id; None too where the field must be there."""
NAME = [*ID, "~x"]
INT = [-1, 1.5, "5", True, None, 2**63, float("nan")]
OPTIONAL_INT = [bad for bad in INT if bad is not None]
DURATION = [-1, 1.5, "5", True, MAX_DURATION_US + 1, float("nan"), float("inf")]
BYTES = ["text", bytearray(b"x"), memoryview(b"x"), 5]
TEXT: list[Any] = [b"x", 5, True]
FLAG = [None, 0, 1, "true"]

Table = list[tuple[Request, dict[str, list[Any]]]]
EPOCH = {"epoch": [*INT, 0]}
CLASSES: dict[str, list[Any]] = {
    "category": [0, "transient", RetryHint.UNKNOWN, None],
    "severity": [2, "error", None],
    "retry_hint": [0, ErrorCategory.UNKNOWN, None],
    "retry_after_us": DURATION,
}

TABLE: Table = [
    (Register(), {"checkpoint_id": NAME, "workflow": ID, "definition_version": ID}),
    (Attach(epoch=1), EPOCH),
    (
        SaveCheckpoint(epoch=1, checkpoint_id="c"),
        {
            **EPOCH,
            "checkpoint_id": [*NAME, None],
            "state": BYTES,
            "compensation": ["undo", CompensationSpec(step_id="s")],  # without a state
        },
    ),
    (
        SaveCheckpoint(epoch=1, checkpoint_id="c", state=b"x"),
        {
            "compensation": [
                CompensationSpec(step_id=""),
                CompensationSpec(step_id="a\n"),
                CompensationSpec(step_id="s", data="x"),  # type: ignore[arg-type]  # that is the point
                CompensationSpec(step_id="s", order=2**63),
                CompensationSpec(step_id="s", order=1.5),  # type: ignore[arg-type]  # that is the point
            ]
        },
    ),
    (GetCheckpoint(checkpoint_id="c"), {"checkpoint_id": [*NAME, None]}),
    (
        Sleep(epoch=1, duration_us=1),
        {
            **EPOCH,
            "duration_us": [*DURATION, None],
            "checkpoint_id": NAME,
            "state": [*BYTES, b"without a name"],
            "kind": [0, "sleep", WaitKind.SIGNAL, None],
            "request_id": ID,
        },
    ),
    (
        WaitSignal(epoch=1, key="k", checkpoint_id="c"),
        {**EPOCH, "key": [*NAME, None], "checkpoint_id": [*NAME, None], "timeout_us": DURATION},
    ),
    (
        ReportEvent(epoch=1, type=EventType.COMPLETED),
        {
            **EPOCH,
            "type": [0, 77, "completed", None, Status.COMPLETED, EventType.STARTED, EventType.CUSTOM],
            "subtype": ["not custom"],
            "checkpoint_id": NAME,
            "payload": BYTES,
            "timestamp_us": ["5", 1.5, True, float("nan")],
            "wake_after_us": [5],  # not suspended
            "state": [*BYTES, b"without a wake"],
            "request_id": ID,
        },
    ),
    (
        ReportEvent(epoch=1, type=EventType.SUSPENDED, wake_after_us=5),
        {"wake_after_us": DURATION, "state": [b"without a name"]},
    ),
    (ReportEvent(epoch=1, type=EventType.CUSTOM, subtype="s"), {"subtype": [*ID, None]}),
    (PollSignals(epoch=1), {**EPOCH, "checkpoint_id": NAME}),
    (
        AckSignal(epoch=1, signal_id=5),
        {
            **EPOCH,
            "signal_id": [0, *INT],
            "signal_type": [SignalType.CANCEL],  # both are given
            "acknowledged": FLAG,
        },
    ),
    (
        AckSignal(epoch=1, signal_type=SignalType.CANCEL),
        {"signal_type": [0, "cancel", None, EventType.HEARTBEAT, SignalType.CUSTOM]},
    ),
    (
        RecordRetryAttempt(epoch=1, checkpoint_id="c", attempt=1),
        {
            **EPOCH,
            **CLASSES,
            "checkpoint_id": [*NAME, None],
            "attempt": [0, *INT],
            "error": TEXT,
            "timestamp_us": ["5", 1.5, True],
            "error_code": ID,
        },
    ),
    (
        RecordError(epoch=1, code="E", message="m"),
        {
            **EPOCH,
            **CLASSES,
            "code": [*ID, None],
            "message": [*TEXT, None],
            "checkpoint_id": NAME,
            "step_id": ID,
            "attributes": [*TEXT, "", "nonsense", "[]", "5", '{"a": NaN}'],
            "cause_id": [0, *OPTIONAL_INT],
            "request_id": ID,
        },
    ),
    (StartCompensation(epoch=1, checkpoint_id="c"), {**EPOCH, "checkpoint_id": [*NAME, None]}),
    (
        FinishCompensation(epoch=1, checkpoint_id="c", attempt=1, success=True),
        {
            **EPOCH,
            "checkpoint_id": [*NAME, None],
            "attempt": [0, *INT],
            "success": FLAG,
            "final": FLAG,
            "error_message": TEXT,
            "error_id": [0, *OPTIONAL_INT],
        },
    ),
    (
        ExitReport(epoch=1, reason=Reason.CRASHED),
        {
            **EPOCH,
            "reason": [0, 10, "crashed", None, Status.FAILED],
            "exit_code": [1.5, "1", True, 2**63, -(2**63)],
            "stderr": BYTES,
            "checkpoint_id": NAME,
            "output": BYTES,
            "error": TEXT,
            "peak_memory_bytes": OPTIONAL_INT,
            "cpu_time_us": OPTIONAL_INT,
        },
    ),
    (
        StartInstance(workflow="w"),
        {
            "workflow": [*ID, None],
            "input": BYTES,
            "definition_version": ID,
            "max_attempts": [0, *INT],
            "timeout_us": DURATION,
            "request_id": ID,
        },
    ),
    (
        SendSignal(type=SignalType.CUSTOM, key="k"),
        {
            "type": [0, "custom", None, SignalType.CANCEL],  # a cancel has no key
            "key": [*NAME, None],
            "payload": BYTES,
            "request_id": ID,
            "store_if_unknown": FLAG,
        },
    ),
    (ForceTerminate(), {"error": TEXT}),
]

CASES = [
    pytest.param(good, field, bad, id=f"{type(good).__name__}-{field}-{bad!r:.20}")
    for good, fields in TABLE
    for field, values in fields.items()
    for bad in values
]
REPORTED_AS = {"request_id": {"request_id", "idempotency_key"}, "signal_type": {"signal_type", "signal_id"}}
"""Fields that the error may name otherwise: as the caller knows them, or as the first of two."""


@pytest.mark.parametrize("good", [good for good, _ in TABLE], ids=lambda good: type(good).__name__)
def test_a_well_formed_request_passes_unchanged(good: Request) -> None:
    assert check(good, LIMITS) is good


@pytest.mark.parametrize(("good", "field", "bad"), CASES)
def test_a_bad_value_is_refused_and_its_field_is_named(good: Request, field: str, bad: Any) -> None:
    changes: dict[str, Any] = {field: bad}
    with pytest.raises(ValidationError) as caught:
        check(attrs.evolve(good, **changes), LIMITS)
    named = str(caught.value.details["field"])
    assert (
        named.split(".")[0] in {field, *REPORTED_AS.get(field, ())}
        or (field, named) == ("type", "key")
        or (
            field,
            named,
        )
        == ("type", "subtype")
    )


def test_the_table_has_every_field_of_every_request() -> None:
    tried: dict[type[Any], set[str]] = {kind: set() for kind in CHECKS}
    for good, fields in TABLE:
        tried[type(good)] |= set(fields)
    assert tried == {kind: set(attrs.fields_dict(kind)) for kind in CHECKS}


def test_an_ack_names_one_signal_in_one_way() -> None:
    with pytest.raises(ValidationError, match="give either signal_id or signal_type"):
        check(AckSignal(epoch=1), LIMITS)


@pytest.mark.parametrize("message", [Wake(epoch=0, deadline_us=-5), SessionLost(epoch=0)])
def test_what_the_runtime_says_to_itself_is_not_checked(message: Request) -> None:
    assert check(message, LIMITS) is message


# ---------------------------------------------------------------- sizes

PAYLOADS: list[tuple[Any, str]] = [
    (SaveCheckpoint(epoch=1, checkpoint_id="c"), "state"),
    (Sleep(epoch=1, duration_us=1, checkpoint_id="c"), "state"),
    (ReportEvent(epoch=1, type=EventType.COMPLETED), "payload"),
    (ReportEvent(epoch=1, type=EventType.SUSPENDED, checkpoint_id="c", wake_after_us=5), "state"),
    (StartInstance(workflow="w"), "input"),
    (SendSignal(type=SignalType.CANCEL), "payload"),
    (ExitReport(epoch=1, reason=Reason.COMPLETED), "output"),
    (ExitReport(epoch=1, reason=Reason.COMPLETED), "stderr"),
]
TEXTS: list[tuple[Any, str]] = [
    (RecordRetryAttempt(epoch=1, checkpoint_id="c", attempt=1), "error"),
    (RecordError(epoch=1, code="E", message="m"), "message"),
    (FinishCompensation(epoch=1, checkpoint_id="c", attempt=1, success=False), "error_message"),
    (ExitReport(epoch=1, reason=Reason.CRASHED), "error"),
    (ForceTerminate(), "error"),
]


@pytest.mark.parametrize(("message", "field"), PAYLOADS)
@pytest.mark.parametrize("limit", [100, 4 * MEBIBYTE])
def test_a_payload_may_be_as_large_as_the_limit(message: Any, field: str, limit: int) -> None:
    limits = Limits(payload_bytes=limit)
    for size in (0, limit - 1, limit):
        check(attrs.evolve(message, **{field: bytes(size)}), limits)
    with pytest.raises(PayloadTooLarge) as caught:
        check(attrs.evolve(message, **{field: bytes(limit + 1)}), limits)
    assert caught.value.details == {"field": field, "size": limit + 1, "limit": limit}


def test_the_data_of_a_compensation_is_a_payload_too() -> None:
    spec = CompensationSpec(step_id="s", data=bytes(101))
    with pytest.raises(PayloadTooLarge) as caught:
        check(SaveCheckpoint(epoch=1, checkpoint_id="c", state=b"x", compensation=spec), LIMITS)
    assert caught.value.field == "compensation.data"


@pytest.mark.parametrize(("message", "field"), TEXTS)
def test_a_text_is_measured_in_bytes(message: Any, field: str) -> None:
    check(attrs.evolve(message, **{field: "é" * 50}), LIMITS)
    for text, size in (("x" * 101, 101), ("é" * 51, 102), ("\ud800" * 40, 120)):
        with pytest.raises(PayloadTooLarge) as caught:
            check(attrs.evolve(message, **{field: text}), LIMITS)
        assert caught.value.details == {"field": field, "size": size, "limit": 100}


@pytest.mark.parametrize(("message", "field"), TEXTS)
def test_free_text_is_kept_as_it_is_and_a_lone_surrogate_is_replaced_visibly(
    message: Any, field: str
) -> None:
    kept = attrs.evolve(message, **{field: "a\0b\n\x1b é \U0001f600 '; --"})
    assert check(kept, LIMITS) is kept
    broken = attrs.evolve(message, **{field: "a\ud800b\udfff"})
    assert getattr(check(broken, LIMITS), field) == "a\ufffdb\ufffd"


def test_the_limit_is_four_mebibytes_and_may_be_set_up_to_64() -> None:
    assert Limits().payload_bytes == 4 * MEBIBYTE
    assert Limits(payload_bytes=64 * MEBIBYTE).payload_bytes == 64 * MEBIBYTE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("payload_bytes", 0),
        ("payload_bytes", 64 * MEBIBYTE + 1),
        ("pending_signals", 0),
        ("pending_signal_bytes", 0),
        ("open_waits", -1),
        ("compensations", 0),
        ("heartbeat_seconds", -0.1),
        ("heartbeat_seconds", float("nan")),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        Limits(**{field: value})
    assert caught.value.field == field


def test_the_size_of_a_message_counts_its_payloads() -> None:
    empty = size_of(Register())
    assert size_of(SaveCheckpoint(epoch=1, checkpoint_id="c", state=bytes(1000))) == empty + 1000
    error = RecordError(epoch=1, code="E", message="m" * 10, attributes="{}")
    assert size_of(error) == empty + 12


# ---------------------------------------------------------------- durations


@pytest.mark.parametrize(
    ("seconds", "us"),
    [
        (0, 0),
        (-0.0, 0),
        (0.0, 0),
        (1, 1_000_000),
        (0.1, 100_000),
        (0.3, 300_000),
        (1e-9, 1),
        (1e-6, 1),
        (1.5e-6, 2),
        (60.000001, 60_000_001),
        (MAX_DURATION_US // 1_000_000, MAX_DURATION_US),
    ],
)
def test_a_duration_in_seconds_becomes_microseconds_and_never_shorter(seconds: float, us: int) -> None:
    assert duration_us(seconds, "timeout") == us


@pytest.mark.parametrize(
    "seconds",
    [
        -1,
        -1e-9,
        float("nan"),
        float("inf"),
        float("-inf"),
        MAX_DURATION_US,
        1e300,
        10**400,
        -(10**400),
        None,
        "5",
        b"5",
        True,
        1j,
    ],
)
def test_a_duration_that_makes_no_sense_is_refused_by_name(seconds: object) -> None:
    with pytest.raises(ValidationError) as caught:
        duration_us(seconds, "timeout")
    assert caught.value.field == "timeout"


@pytest.mark.parametrize("us", [0, 1, MAX_DURATION_US])
def test_every_duration_up_to_the_longest_is_fine(us: int) -> None:
    for message in (
        Sleep(epoch=1, duration_us=us),
        WaitSignal(epoch=1, key="k", checkpoint_id="c", timeout_us=us),
        StartInstance(workflow="w", timeout_us=us),
    ):
        assert check(message, LIMITS) is message


# ---------------------------------------------------------------- JSON from outside


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"a": [1, 2.5, null, true, "\\u0000\\ud800"]}',
        json.dumps({"a": MAX_INT, "b": -(2**63)}),
        '{"a":' * (MAX_JSON_DEPTH - 1) + "{}" + "}" * (MAX_JSON_DEPTH - 1),
    ],
)
def test_a_json_object_is_let_through(text: str) -> None:
    check_json_object(text, "attributes")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("{} x", "is not JSON"),
        ('{"a": "raw\0"}', "is not JSON"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        ('{"a": 1, "a": 2}', "a key occurs twice"),
        ('{"x": {"a": 1, "\\u0061": 2}}', "a key occurs twice"),
        (json.dumps({"a": 2**63}), "does not fit 64 bits"),
        ('{"a": ' + "9" * 10_000 + "}", "does not fit 64 bits"),
        ("[1]", "must be a JSON object"),
        ("null", "must be a JSON object"),
        ('{"a":' * MAX_JSON_DEPTH + "{}" + "}" * MAX_JSON_DEPTH, "nested deeper"),
        ('{"a":' + "[" * 200 + "]" * 200 + "}", "nested deeper"),
        ("[" * 100_000, "is not JSON"),
        ('{"a":' * 100_000, "is not JSON"),
    ],
)
def test_json_that_nobody_could_store_or_read_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValidationError, match=r"^attributes: ") as caught:
        check_json_object(text, "attributes")
    assert problem in str(caught.value)
