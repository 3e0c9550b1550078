"""The tree of exceptions, its table, and the page that shows it."""

import inspect
import json
import os
import re
from pathlib import Path

import pytest

from runtara import errors
from runtara.errors import ERROR_CODES, ErrorCode, RuntaraError, StoreError

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"
CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, RuntaraError) and value.__module__ == errors.__name__
]
EXAMPLES: list[tuple[RuntaraError, str, dict[str, object]]] = [
    (errors.ValidationError("f", "bad"), "f: bad", {"field": "f", "problem": "bad"}),
    (
        errors.PayloadTooLarge("state", 11, 10),
        "state: 11 bytes, the limit is 10",
        {"field": "state", "size": 11, "limit": 10},
    ),
    (errors.InstanceNotFound("i"), "Instance not found", {"instance_id": "i"}),
    (
        errors.CheckpointNotFound("c"),
        "checkpoint_id: no checkpoint 'c'",
        {"field": "checkpoint_id", "checkpoint_id": "c"},
    ),
    (
        errors.ErrorNotFound(5, "cause_id"),
        "cause_id: no recorded error 5",
        {"field": "cause_id", "error_id": 5},
    ),
    (
        errors.SignalNotPending("signal_id", 7),
        "signal_id: no pending signal 7",
        {"field": "signal_id", "value": 7},
    ),
    (
        errors.InvalidInstanceState("running", "pending"),
        "the instance is pending, this needs running",
        {"expected": "running", "actual": "pending"},
    ),
    (
        errors.AlreadyFinished("failed", "timeout", 9),
        "the instance is failed",
        {"status": "failed", "reason": "timeout", "finished_us": 9},
    ),
    (
        errors.BadExport(3, "state", "bad"),
        "line 3: state: bad",
        {"line": 3, "field": "state", "problem": "bad"},
    ),
    (errors.Conflict("key", "used"), "key: used", {"field": "key", "problem": "used"}),
    (
        errors.StaleEpoch(1, 2),
        "epoch 1 is over, the instance is at 2",
        {"epoch": 1, "current": 2},
    ),
    (
        errors.InstanceFailed("failed", "timeout", "late"),
        "the instance is failed: late",
        {"status": "failed", "reason": "timeout", "error": "late"},
    ),
]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_exception_has_a_code_and_a_meaning_of_its_own(cls: type[RuntaraError]) -> None:
    row = ERROR_CODES[cls.code]
    assert row == ErrorCode(cls.code, cls.meaning, cls.retryable, cls.http_status, cls)
    assert re.fullmatch("[a-z][a-z_]*", cls.code)
    assert cls.meaning.endswith(".")
    assert 400 <= cls.http_status < 600
    assert cls.__doc__


def test_no_code_occurs_twice() -> None:
    assert len({cls.code for cls in CLASSES}) == len(CLASSES)
    assert {row.exception for row in ERROR_CODES.values()} >= set(CLASSES)


def test_the_first_level_says_whose_fault_it_was() -> None:
    assert [c.__name__ for c in CLASSES if c.__base__ is RuntaraError] == [
        "CallerError",
        "PeerError",
        "StoreError",
        "RuntimeFault",
    ]


def test_what_may_have_happened_may_be_sent_again_and_damage_may_not() -> None:
    retryable = {row.code for row in ERROR_CODES.values() if row.retryable}
    assert retryable >= {
        "outcome_unknown",
        "store_unavailable",
        "signal_queue_full",
        "overloaded",
        "draining",
    }
    assert not retryable & {"store_failed", "store_corrupt", "conflict", "stale_epoch", "already_finished"}


@pytest.mark.parametrize(("error", "message", "details"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_an_error_says_what_is_wrong_in_words_and_in_plain_json(
    error: RuntaraError, message: str, details: dict[str, object]
) -> None:
    assert str(error) == error.message == message
    assert error.details == json.loads(json.dumps(error.details)) == details


def test_an_error_says_when_to_come_again() -> None:
    error = errors.StoreUnavailable("busy", retry_after_seconds=0.5)
    assert (error.retry_after_seconds, error.retryable) == (0.5, True)
    assert isinstance(error, StoreError)


def table() -> str:
    """All codes as a Markdown table."""
    lines = ["| code | meaning | retryable | HTTP | exception |", "|---|---|---|---|---|"]
    for cls in CLASSES:
        retryable = "yes" if cls.retryable else "no"
        name = f"`{cls.__name__}`"
        lines.append(f"| `{cls.code}` | {cls.meaning} | {retryable} | {cls.http_status} | {name} |")
    return "\n".join(lines) + "\n"


def test_the_page_shows_the_table_as_it_is() -> None:
    """`UPDATE_DOCS=1 pytest tests/test_errors.py` writes the table anew."""
    text = PAGE.read_text()
    wanted = f"<!-- codes: begin -->\n{table()}<!-- codes: end -->"
    now = re.sub("<!-- codes: begin -->.*<!-- codes: end -->", lambda _: wanted, text, flags=re.DOTALL)
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(now)
    assert wanted in now
    assert now == PAGE.read_text()
