"""The table of an instance's life, and the page that shows it."""

import os
import re
from pathlib import Path

import pytest

from runtara.errors import InvalidInstanceState
from runtara.lifecycle import REASONS, TRANSITIONS, Cause, advance, allows, diagram
from runtara.records import Reason, Status

PAGE = Path(__file__).parent.parent / "docs" / "lifecycle.md"
REAL = [status for status in Status if status is not Status.UNKNOWN]


@pytest.mark.parametrize("source", [None, *REAL])
@pytest.mark.parametrize("cause", Cause)
def test_what_is_in_the_table_is_allowed_and_the_rest_is_refused(source: Status | None, cause: Cause) -> None:
    target = TRANSITIONS.get((source, cause))
    assert allows(source, cause) == (target is not None)
    if target is not None:
        assert advance(source, cause) is target
        return
    with pytest.raises(InvalidInstanceState) as caught:
        advance(source, cause)
    assert caught.value.details["actual"] == ("absent" if source is None else source.word)


def test_nothing_leaves_a_terminal_state() -> None:
    assert not [source for source, _ in TRANSITIONS if source is not None and source.is_terminal]


def test_every_state_can_be_reached_and_every_living_one_can_end() -> None:
    reached = {None} | set(TRANSITIONS.values())
    assert reached == {None, *REAL}
    for status in REAL:
        if not status.is_terminal:
            ends = {target for (source, _), target in TRANSITIONS.items() if source is status}
            assert ends >= {Status.CANCELLED, Status.FAILED}
    assert {source for (source, cause) in TRANSITIONS if cause is Cause.COMPLETE} == {Status.RUNNING}


def test_a_refusal_names_the_states_that_would_do() -> None:
    with pytest.raises(InvalidInstanceState) as caught:
        advance(Status.COMPLETED, Cause.SUSPEND)
    assert caught.value.details == {"expected": "pending or running or suspended", "actual": "completed"}


def test_every_cause_but_suspend_brings_its_own_reason() -> None:
    """An instance is suspended for many reasons; whoever suspends it says which."""
    assert set(Cause) - set(REASONS) == {Cause.SUSPEND}


def test_every_reason_is_explained_on_the_page() -> None:
    text = PAGE.read_text()
    for reason in Reason:
        assert f"| `{reason.word}` |" in text


def test_the_page_shows_the_table_as_it_is() -> None:
    """`UPDATE_DOCS=1 pytest tests/test_lifecycle.py` writes the diagram anew."""
    text = PAGE.read_text()
    wanted = f"<!-- diagram: begin -->\n```mermaid\n{diagram()}```\n<!-- diagram: end -->"
    now = re.sub("<!-- diagram: begin -->.*<!-- diagram: end -->", lambda _: wanted, text, flags=re.DOTALL)
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(now)
    assert wanted in now
    assert now == PAGE.read_text()
