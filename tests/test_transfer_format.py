"""The lines of an export: what is written and read back, and what is refused."""

import json
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtara.errors import BadExport
from runtara.limits import MEBIBYTE
from runtara.persistence.rows import stand_in
from runtara.records import (
    CheckpointRecord,
    CompensationSpec,
    ErrorRecord,
    PayloadKind,
    PutPayload,
    RequestRecord,
    Status,
    StepRecord,
    WaitKind,
    WaitRecord,
)
from runtara.testing import samples
from runtara.testing.samples import ALL_BYTES, NAUGHTY
from runtara.transfer.format import read_line, write_line
from runtara.transfer.items import End, Header, Item, Record, Skipped, Trailer
from runtara.transfer.rules import line_limit
from runtara.transfer.shapes import FieldProblem
from runtara.transfer.verifying import Verifier
from tests.transfer_samples import records, texts
from tests.transfers import PAYLOAD_BYTES, forged

HEADER = Header(program="1.2.3", backend="sqlite", created_us=1, export_id="x")


def read(line: bytes) -> Item:
    return read_line(line, 7, PAYLOAD_BYTES)


def line_of(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def refusal(line: bytes, payload_bytes: int = PAYLOAD_BYTES) -> tuple[str, str]:
    """The field and the problem for which a line is refused."""
    with pytest.raises(BadExport) as caught:
        read_line(line, 7, payload_bytes)
    assert caught.value.details["line"] == 7
    return caught.value.field, str(caught.value.details["problem"])


# ------------------------------------------------------------ there and back


@settings(max_examples=300, deadline=None)
@given(records)
def test_every_record_comes_back_as_it_was(record: Record) -> None:
    line = write_line(record)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert read(line) == record
    assert len(line) <= line_limit(PAYLOAD_BYTES)


@given(
    st.one_of(
        st.builds(Skipped, tenant_id=st.none() | texts, what=texts, problem=texts),
        st.builds(End, lines=st.integers(0, 2**63 - 1), sha256=texts),
        st.builds(Trailer, counts=st.dictionaries(texts, st.integers(0, 9)), sha256=texts),
        st.just(HEADER),
        st.just(
            attrs.evolve(HEADER, tenant_id="acme", until_us=-5, statuses=(Status.RUNNING,), salvage=True)
        ),
    )
)
def test_the_lines_beside_the_records_come_back_as_they_were(item: Item) -> None:
    assert read(write_line(item)) == item


def test_a_line_is_what_the_reference_says() -> None:
    record = CheckpointRecord(
        revision=4,
        checkpoint_id="a \u00e9",
        state=b"\xff\x00",
        created_us=5,
        compensation=CompensationSpec(step_id="undo"),
    )
    assert write_line(record).decode() == (
        '{"t":"checkpoint","revision":4,"checkpoint_id":"a \u00e9","state":"/wA=","created_us":5,'
        '"compensation":{"step_id":"undo","data":"","order":0}}\n'
    )


def test_the_row_of_an_instance_is_left_out_and_so_is_what_a_step_borrows() -> None:
    instance = samples.instance(77)
    assert b"row" not in write_line(instance)
    assert read(write_line(instance)) == attrs.evolve(instance, row=0)
    step = samples.step(1, start_payload=b"a", end_payload=b"b")
    assert read(write_line(step)) == samples.step(1)


def test_nothing_and_empty_are_different() -> None:
    for payload in (None, b""):
        event = samples.event(1, payload=payload)
        assert read(write_line(event)) == event


def test_text_is_written_as_it_is_but_for_what_json_must_escape() -> None:
    line = write_line(samples.error(1, message=NAUGHTY))
    assert "\U0001f600 e\u0301 \u00e9".encode() in line
    assert b"a\\u0000b" in line


def test_a_word_without_a_name_and_a_lone_surrogate_cannot_be_written() -> None:
    unknown = samples.wait(1, kind=stand_in(WaitKind, 99))
    with pytest.raises(FieldProblem, match="kind: holds the number 99"):
        write_line(unknown)
    with pytest.raises(FieldProblem, match="lone surrogate"):
        write_line(samples.error(1, message="\ud800"))


# ------------------------------------------------------------ what is refused

WAIT = json.loads(write_line(samples.wait(3)))
INSTANCE = json.loads(write_line(samples.instance(1)))


@pytest.mark.parametrize(
    ("line", "field", "problem"),
    [
        (b"", "line", "has no end"),
        (b'{"t":"end","lines":1,"sha256":""}', "line", "has no end"),
        (b"\n", "line", "is not JSON"),
        (b"null\n", "line", "must be a JSON object"),
        (b"[1]\n", "line", "must be a JSON object"),
        (b"{} {}\n", "line", "is not JSON: Extra data"),
        (b"\xef\xbb\xbf{}\n", "line", "is not JSON"),
        (b'{"a":"\xff"}\n', "line", "byte 6 is not UTF-8"),
        (b'{"a":NaN}\n', "line", "NaN is not JSON"),
        (b'{"a":-Infinity}\n', "line", "Infinity is not JSON"),
        (b'{"a":1.0}\n', "line", "a number is not whole"),
        (b'{"a":1e3}\n', "line", "a number is not whole"),
        (b'{"a":9223372036854775808}\n', "line", "does not fit 64 bits"),
        (b'{"a":-9223372036854775809}\n', "line", "does not fit 64 bits"),
        (b'{"a":' + b"9" * 100_000 + b"}\n", "line", "does not fit 64 bits"),
        (b'{"a":1,"a":1}\n', "line", "a key occurs twice"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", "line", "nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n", "line", "nested too deeply"),
        (b"{}\n", "t", "must be one of header, instance"),
        (b'{"t":1}\n', "t", "must be one of"),
        (b'{"t":"Wait"}\n', "t", "must be one of"),
        (b'{"t":["wait"]}\n', "t", "must be one of"),
    ],
)
def test_what_is_no_line_is_refused(line: bytes, field: str, problem: str) -> None:
    found = refusal(line)
    assert found[0] == field
    assert problem in found[1]


@pytest.mark.parametrize(
    ("change", "field", "problem"),
    [
        ({"revision": "3"}, "revision", "must be a whole number"),
        ({"revision": True}, "revision", "must be a whole number"),
        ({"revision": None}, "revision", "must be a whole number"),
        ({"revision": 0}, "revision", "at least 1"),
        ({"revision": 2**62 + 1}, "revision", "must be at most"),
        ({"wait_id": 5}, "wait_id", "must be text"),
        ({"wait_id": ""}, "wait_id", "must not be empty"),
        ({"wait_id": "a\x00b"}, "wait_id", "forbidden character U+0000"),
        ({"wait_id": "a" * 513}, "wait_id", "the limit is 512"),
        ({"wait_id": "\ud800"}, "wait_id", "lone surrogate"),
        ({"key": "~1"}, "key", "must not start with"),
        ({"kind": 1}, "kind", "must be one of sleep, signal, retry"),
        ({"kind": "Signal"}, "kind", "must be one of"),
        ({"kind": "SIGNAL"}, "kind", "must be one of"),
        ({"kind": {}}, "kind", "must be one of"),
        ({"instance": 5}, "'instance'", "is no key of this kind of line"),
        ({"x" * 9999: 5}, "'" + "x" * 40 + "'", "is no key of this kind of line"),
        ({"\x1b[31m": 5}, "'\\x1b[31m'", "is no key of this kind of line"),
    ],
)
def test_a_field_that_is_not_what_it_must_be_is_refused(
    change: dict[str, Any], field: str, problem: str
) -> None:
    found = refusal(line_of(**{**WAIT, **change}))
    assert found[0] == field
    assert problem in found[1]


def test_a_field_that_is_missing_is_named() -> None:
    for name in WAIT:
        rest = {key: value for key, value in WAIT.items() if key != name}
        if name in ("key", "deadline_us"):
            assert getattr(read(line_of(**rest)), name) is None
        elif name != "t":
            assert refusal(line_of(**rest)) == (name, "is missing")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tenant_id": "a\n"}, "tenant_id"),
        ({"instance_id": ""}, "instance_id"),
        ({"workflow": "\x7f"}, "workflow"),
        ({"checkpoint_id": "~x"}, "checkpoint_id"),
        ({"status": "unknown"}, "status"),
        ({"status": "completed"}, "finished_us"),
        ({"finished_us": 5}, "finished_us"),
        ({"intended": "running"}, "intended"),
        ({"compensation_reason": "because"}, "compensation_reason"),
        ({"compensation_reason": "Crashed"}, "compensation_reason"),
        ({"epoch": -1}, "epoch"),
        ({"epoch": 2**62 + 1}, "epoch"),
        ({"attempt": -1}, "attempt"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"hosted": 1}, "hosted"),
        ({"row": 1}, "'row'"),
    ],
)
def test_an_instance_that_no_runtime_would_have_written_is_refused(
    change: dict[str, Any], field: str
) -> None:
    assert refusal(line_of(**{**INSTANCE, **change}))[0] == field


@pytest.mark.parametrize(
    ("item", "change", "field"),
    [
        (samples.compensatable(1), {"compensation": "undo"}, "compensation"),
        (
            samples.compensatable(1),
            {"compensation": {"step_id": "a", "data": "", "order": 1, "x": 1}},
            "compensation.'x'",
        ),
        (samples.compensatable(1), {"compensation": {"step_id": "a", "data": ""}}, "compensation.order"),
        (
            samples.compensatable(1),
            {"compensation": {"step_id": "\n", "data": "", "order": 1}},
            "compensation.step_id",
        ),
        (samples.checkpoint(1), {"state": "a"}, "state"),
        (samples.checkpoint(1), {"state": "YQ==\n"}, "state"),
        (samples.checkpoint(1), {"state": "YQ-_"}, "state"),
        (samples.checkpoint(1), {"checkpoint_id": "~1"}, "checkpoint_id"),
        (samples.signal(1), {"type": "cancel"}, "key"),
        (samples.signal(1), {"key": "~"}, "key"),
        (samples.step(1), {"status": "failed"}, "finished_us"),
        (samples.step(1), {"status": "failed", "finished_us": 1}, "end_revision"),
        (samples.step(1), {"finished_us": 1}, "finished_us"),
        (samples.step(1), {"end_revision": 1}, "end_revision"),
        (samples.error(1), {"attributes": "[]"}, "attributes"),
        (samples.error(1), {"attributes": "{" * 50}, "attributes"),
        (samples.request(1), {"answer": "yes"}, "answer"),
        (samples.attempt(1), {"retry_after_us": -1}, "retry_after_us"),
        (samples.attempt(1), {"attempt": 0}, "attempt"),
        (HEADER, {"tenant_id": ""}, "tenant_id"),
        (HEADER, {"statuses": "running"}, "statuses"),
        (HEADER, {"statuses": ["running", 2]}, "statuses"),
        (HEADER, {"version": 2, "more": 1}, "version"),
        (HEADER, {"version": True}, "version"),
        (HEADER, {"format": "csv"}, "format"),
        (Trailer(counts={}, sha256=""), {"counts": []}, "counts"),
        (Trailer(counts={}, sha256=""), {"counts": {"wait": True}}, "counts"),
    ],
)
def test_what_later_code_takes_for_granted_is_checked(item: Item, change: dict[str, Any], field: str) -> None:
    assert refusal(line_of(**{**json.loads(write_line(item)), **change}))[0] == field


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (samples.checkpoint(1, state=b"x" * 11), "state"),
        (samples.checkpoint(1, compensation=CompensationSpec(step_id="a", data=b"x" * 11)), "compensation"),
        (samples.event(1, payload=b"x" * 11), "payload"),
        (samples.event(1, scope_id="x" * 11), "scope_id"),
        (samples.signal(1, payload=b"x" * 11), "payload"),
        (samples.attempt(1, error="\u00e9" * 6), "error"),
        (samples.error(1, message="x" * 11), "message"),
        (samples.step(1, step_name="x" * 11), "step_name"),
        (samples.request(1, digest=b"x" * 11, answer="{}"), "digest"),
        (PutPayload(kind=PayloadKind.INPUT, data=b"x" * 11), "data"),
        (PutPayload(kind=PayloadKind.ERROR, data=b"x" * 31), "data"),
    ],
)
def test_a_value_that_is_over_the_setting_is_refused(record: Record, field: str) -> None:
    line = write_line(record)
    assert refusal(line, payload_bytes=10)[0] == field
    assert read_line(line, 7, 11 if field != "error" else 12) == record


def test_an_error_text_may_be_larger_for_bad_bytes_have_become_three() -> None:
    text = b"\xff".decode(errors="replace").encode() * 10
    record = PutPayload(kind=PayloadKind.ERROR, data=text)
    assert read_line(write_line(record), 7, 10) == record


def test_the_longest_line_of_each_kind_is_within_the_limit() -> None:
    size = 1 * MEBIBYTE
    worst: list[Record] = [
        ErrorRecord(revision=1, code="x", message="\0" * size, attributes="\0" * size, created_us=1),
        samples.checkpoint(
            1, state=bytes(size), compensation=CompensationSpec(step_id="\U0010ffff" * 512, data=bytes(size))
        ),
        PutPayload(kind=PayloadKind.ERROR, data=bytes(3 * size)),
        StepRecord(revision=1, step_id="\0" * size, started_us=1),
        WaitRecord(
            revision=1,
            wait_id="\\" * 512,
            kind=WaitKind.SIGNAL,
            key="\\" * 512,
            deadline_us=-(2**63),
            created_us=-(2**63),
        ),
        RequestRecord(revision=1, request_id="\\" * 512, digest=ALL_BYTES, answer="{}"),
    ]
    assert max(len(write_line(record)) for record in worst) <= line_limit(size)


# ------------------------------------------------------------ the order of lines


def whole(*instances: list[Record]) -> list[bytes]:
    """An export with its digests."""
    lines = [write_line(HEADER)]
    for found in instances:
        lines += [write_line(record) for record in found]
        lines.append(write_line(End(lines=0, sha256="")))
    return forged([*lines, write_line(Trailer(counts={}, sha256=""))])


def instance(number: int, *more: Record) -> list[Record]:
    return [samples.instance(number), *more]


FULL = whole(
    instance(
        1,
        PutPayload(kind=PayloadKind.INPUT, data=b"in"),
        PutPayload(kind=PayloadKind.OUTPUT, data=b"out"),
        samples.compensation_attempt(1),
        samples.checkpoint(1),
        samples.checkpoint(2),
        samples.wait(2),
        samples.event(3),
    ),
    instance(2),
    instance(3, samples.request(1)),
)


def verify(lines: list[bytes]) -> Verifier:
    verifier = Verifier(PAYLOAD_BYTES)
    for line in lines:
        verifier.take(line)
    verifier.finish()
    return verifier


def problem_with(lines: list[bytes]) -> tuple[object, str]:
    with pytest.raises(BadExport) as caught:
        verify(lines)
    return caught.value.details["line"], caught.value.field


def test_a_whole_export_is_verified() -> None:
    verifier = verify(FULL)
    assert verifier.line == len(FULL)
    assert verifier.tally.counts == {
        "instance": 3,
        "payload": 2,
        "compensation_attempt": 1,
        "checkpoint": 2,
        "wait": 1,
        "event": 1,
        "request": 1,
    }


def test_an_export_that_is_cut_off_anywhere_is_refused() -> None:
    for count in range(len(FULL)):
        assert problem_with(FULL[:count]) == (count + 1, "line")
        assert problem_with([*FULL[:count], FULL[count][:-1]]) == (count + 1, "line")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_an_export_that_was_changed_anywhere_is_refused(data: st.DataObject) -> None:
    lines = list(FULL)
    at = data.draw(st.integers(0, len(lines) - 1))
    match data.draw(st.sampled_from(("byte", "remove", "repeat", "swap"))):
        case "byte":
            place = data.draw(st.integers(0, len(lines[at]) - 1))
            other = data.draw(st.integers(0, 255).filter(lambda byte: byte != lines[at][place]))
            lines[at] = lines[at][:place] + bytes([other]) + lines[at][place + 1 :]
        case "remove":
            del lines[at]
        case "repeat":
            lines.insert(at, lines[at])
        case "swap":
            other = data.draw(st.integers(0, len(lines) - 1).filter(lambda place: lines[place] != lines[at]))
            lines[at], lines[other] = lines[other], lines[at]
    if lines != FULL:
        problem_with(lines)


def moved(change: Callable[[list[bytes]], object]) -> list[bytes]:
    """The export with its lines changed, and with digests and counts that fit."""
    lines = list(FULL)
    change(lines)
    return forged(lines)


@pytest.mark.parametrize(
    ("change", "line", "field"),
    [
        (lambda lines: lines.insert(1, lines[0]), 2, "t"),
        (lambda lines: lines.insert(0, lines[1]), 1, "t"),
        (lambda lines: lines.insert(1, write_line(samples.event(1))), 2, "t"),
        (lambda lines: lines.insert(3, lines[0]), 4, "t"),
        (lambda lines: lines.insert(3, lines[-1]), 4, "t"),
        (lambda lines: lines.insert(3, lines[1]), 4, "t"),
        (lambda lines: lines.append(lines[-1]), len(FULL) + 1, "t"),
        (lambda lines: lines.append(lines[0]), len(FULL) + 1, "t"),
        (lambda lines: lines.insert(3, lines[2]), 4, "revision"),
        (lambda lines: lines.insert(6, lines[5]), 7, "revision"),
        (lambda lines: lines.insert(6, write_line(samples.checkpoint(1, checkpoint_id="b"))), 7, "revision"),
        (lambda lines: lines.insert(9, lines[7]), 10, "t"),
        (lambda lines: lines.insert(9, write_line(PutPayload(kind=PayloadKind.STDERR, data=b""))), 10, "t"),
    ],
)
def test_lines_in_a_wrong_order_are_refused_though_the_digests_fit(
    change: Callable[[list[bytes]], object], line: int, field: str
) -> None:
    assert problem_with(moved(change)) == (line, field)


def test_something_left_out_may_be_told_anywhere() -> None:
    skipped = write_line(Skipped(what="event", problem="damage"))
    for at in range(1, len(FULL)):
        verifier = verify(moved(lambda lines, at=at: lines.insert(at, skipped)))  # type: ignore[misc]  # of a lambda's default
        assert verifier.tally.counts["skipped"] == 1
    assert problem_with([*FULL, skipped]) == (len(FULL) + 1, "t")


@pytest.mark.parametrize(("at", "field"), [(9, "lines"), (9, "sha256"), (-1, "counts"), (-1, "sha256")])
def test_digests_and_counts_are_compared(at: int, field: str) -> None:
    lines = list(FULL)
    found = json.loads(lines[at])
    found[field] = {"lines": 5, "sha256": "0" * 64, "counts": {"wait": 1}}[field]
    lines[at] = line_of(**found)
    assert problem_with(lines) == (len(FULL) if at == -1 else at + 1, field)
