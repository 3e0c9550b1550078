"""Words for numbers, and JSON."""

import json
from collections.abc import Mapping
from types import MappingProxyType

import pytest

from runtara import ErrorCategory, EventType, SignalType, ValidationError
from runtara.words import json_text, member


@pytest.mark.parametrize("signal", list(SignalType))
def test_a_word_and_its_member_are_the_same(signal: SignalType) -> None:
    assert member(SignalType, signal.word, "type") is signal
    assert member(SignalType, signal, "type") is signal


@pytest.mark.parametrize(
    "value", ["Cancel", "CANCEL", "", "stop", " cancel", "__members__", None, 0, True, b"cancel", ["cancel"]]
)
def test_what_names_no_member_is_refused_with_the_words_that_do(value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        member(SignalType, value, "type")
    assert caught.value.field == "type"
    assert caught.value.details["problem"] == "must be one of " + ", ".join(s.word for s in SignalType)


def test_a_member_of_another_enumeration_is_refused() -> None:
    with pytest.raises(ValidationError, match="category: must be one of unknown, transient"):
        member(ErrorCategory, EventType.HEARTBEAT, "category")


def test_no_object_is_no_text() -> None:
    assert json_text(None, "attributes") is None


@pytest.mark.parametrize(
    "value", [{}, {"a": [1, 2.5, None, True, "é\0"]}, MappingProxyType({"b": {"c": "d"}})]
)
def test_an_object_comes_back_as_it_was(value: Mapping[str, object]) -> None:
    text = json_text(value, "attributes")
    assert text is not None
    assert json.loads(text) == dict(value)


@pytest.mark.parametrize(
    "value",
    [{"a": float("nan")}, {"a": float("inf")}, {"a": b"bytes"}, {"a": {1, 2}}, {("a",): 1}, {"a": object()}],
)
def test_what_json_cannot_hold_is_refused(value: Mapping[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"^attributes: is not JSON: "):
        json_text(value, "attributes")


def test_an_object_within_itself_is_refused() -> None:
    circle: dict[str, object] = {}
    circle["circle"] = circle
    with pytest.raises(ValidationError, match=r"^attributes: is not JSON: "):
        json_text(circle, "attributes")


def test_an_object_nested_without_end_is_refused() -> None:
    deep: dict[str, object] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(ValidationError, match=r"^attributes: is not JSON: "):
        json_text(deep, "attributes")


@pytest.mark.parametrize("value", [[], "{}", 1, b"{}"])
def test_what_is_no_mapping_is_refused(value: object) -> None:
    with pytest.raises(ValidationError, match=r"^attributes: must be a mapping, not "):
        json_text(value, "attributes")  # type: ignore[arg-type]
