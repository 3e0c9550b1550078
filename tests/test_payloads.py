"""JSON in payloads from outside, and what a step says of it."""

import datetime
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtara.limits import MAX_INSTANT_US
from runtara.payloads import json_object, storable
from runtara.records import StepRecord, StepStatus

NO_OBJECTS: list[bytes | None] = [
    None,
    b"",
    b" ",
    b"null",
    b"5",
    b'"{}"',
    b"[{}]",
    b"{",
    b"{}{}",
    b"{'a': 1}",
    b'{"a": NaN}',
    b'{"a": [Infinity]}',
    b'{"a": -Infinity}',
    b'{"a": "\xff"}',
    b'{"a": 1%s}' % (b"0" * 5000),
    b'{"a":' * 100_000,
    b'{"a":%s1%s}' % (b"[" * 100_000, b"]" * 100_000),
    b"\xef\xbb\xbf{}",
    b"\0{}",
]


@pytest.mark.parametrize("data", NO_OBJECTS, ids=lambda data: repr(data)[:40])
def test_what_is_no_json_object_is_none(data: bytes | None) -> None:
    assert json_object(data) is None


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"{}", {}),
        (b' \r\n\t{"a": null} \n', {"a": None}),
        (b'{"a": 1, "a": 2}', {"a": 2}),
        (b'{"a": "\\ud800\\u0000"}', {"a": "\ud800\0"}),
        (b'{"a": 123456789012345678901234567890}', {"a": 123456789012345678901234567890}),
        ('{"ä": "😀"}'.encode(), {"ä": "😀"}),
    ],
)
def test_a_json_object_is_read(data: bytes, value: object) -> None:
    assert json_object(data) == value


@settings(derandomize=True, deadline=None)
@given(st.binary() | st.text().map(str.encode) | st.binary().map(lambda data: b"{" + data))
def test_no_bytes_are_too_odd_to_be_read(data: bytes) -> None:
    found = json_object(data)
    assert found is None or json.loads(data) == found


@settings(derandomize=True, deadline=None)
@given(st.text(st.sampled_from("a\0ä😀\ud800\udbff\udc00\udfff")))
def test_storable_text_differs_in_lone_surrogates_only(text: str) -> None:
    kept = storable(text)
    kept.encode()
    assert len(kept) == len(text)
    assert all(
        a == b or (b == "\ufffd" and "\ud800" <= a <= "\udfff") for a, b in zip(text, kept, strict=True)
    )


# ---------------------------------------------------------------- steps


def step(
    start_payload: bytes | None = None, end_payload: bytes | None = None, finished_us: int | None = None
) -> StepRecord:
    return StepRecord(
        revision=1,
        step_id="a",
        status=StepStatus.RUNNING if finished_us is None else StepStatus.COMPLETED,
        started_us=1_000_000,
        finished_us=finished_us,
        start_payload=start_payload,
        end_payload=end_payload,
    )


@pytest.mark.parametrize("data", [*NO_OBJECTS, b"{}"], ids=lambda data: repr(data)[:40])
def test_a_step_whose_payloads_say_nothing_has_no_values(data: bytes | None) -> None:
    found = step(data, data, 2_000_000)
    assert (found.inputs, found.outputs, found.error) == (None, None, None)


@pytest.mark.parametrize("value", [None, False, 0, "", [], {"_error": True}, "ä\0", 1.5, 10**40])
def test_a_step_gives_its_values_as_its_events_had_them(value: object) -> None:
    found = step(
        json.dumps({"inputs": value}).encode(), json.dumps({"outputs": value, "error": value}).encode()
    )
    assert (found.inputs, found.outputs, found.error) == (value, value, value)


def test_the_inputs_are_those_of_the_start_and_the_rest_is_of_the_end() -> None:
    data = b'{"inputs": 1, "outputs": 2, "error": 3}'
    begun, ended = step(start_payload=data), step(end_payload=data)
    assert (begun.inputs, begun.outputs, begun.error) == (1, None, None)
    assert (ended.inputs, ended.outputs, ended.error) == (None, 2, 3)


@pytest.mark.parametrize(
    ("finished_us", "duration_ms"),
    [
        (None, None),
        (1_000_000, 0.0),
        (1_000_001, 0.001),
        (1_001_500, 1.5),
        (999_999, 0.0),
        (0, 0.0),
        (MAX_INSTANT_US, (MAX_INSTANT_US - 1_000_000) / 1000),
    ],
)
def test_the_duration_is_in_true_milliseconds_and_never_negative(
    finished_us: int | None, duration_ms: float | None
) -> None:
    assert step(finished_us=finished_us).duration_ms == duration_ms


def test_the_times_of_a_step_are_instants() -> None:
    assert step().started_at == datetime.datetime(1970, 1, 1, 0, 0, 1, tzinfo=datetime.UTC)
    assert step().completed_at is None
    assert step(finished_us=0).completed_at == datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
