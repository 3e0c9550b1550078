"""What is allowed in an id: the naughty ones that are fine, and the ones that are refused by name."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtara.errors import ValidationError
from runtara.ids import MAX_ID_LENGTH, check_id, check_instance_id, check_name, check_tenant_id

FINE = [
    "a",
    "a/b",
    "a%2Fb",
    "a#b",
    "a b(",
    "a:b",
    "a'b",
    '"',
    "é",
    "e\u0301",
    "..",
    "-x",
    " ",
    "\u2028",
    "\u202e",
    "\U0001f600",
    "\ufffd",
    "0",
    "null",
    "x" * MAX_ID_LENGTH,
    "\U0001f600" * MAX_ID_LENGTH,
]
BAD: list[tuple[object, str]] = [
    ("", "must not be empty"),
    ("x" * (MAX_ID_LENGTH + 1), "is 513 characters long, the limit is 512"),
    ("a\0b", "holds the forbidden character U+0000 at position 1"),
    ("\n", "holds the forbidden character U+000A at position 0"),
    ("ab\x1b[31m", "holds the forbidden character U+001B at position 2"),
    ("\x7f", "holds the forbidden character U+007F at position 0"),
    ("\x85", "holds the forbidden character U+0085 at position 0"),
    ("\x9f", "holds the forbidden character U+009F at position 0"),
    ("a\ud800", "holds the forbidden character U+D800 at position 1"),
    ("\udfff", "holds the forbidden character U+DFFF at position 0"),
    (None, "must be text, not NoneType"),
    (5, "must be text, not int"),
    (b"a", "must be text, not bytes"),
    (True, "must be text, not bool"),
]


@pytest.mark.parametrize("value", FINE)
def test_a_naughty_id_is_kept_as_it_is(value: str) -> None:
    assert check_id(value, "instance_id") == value
    assert (check_tenant_id(value), check_instance_id(value)) == (value, value)
    assert check_name(value, "key") == value


@pytest.mark.parametrize(("value", "problem"), BAD)
def test_an_ill_formed_id_is_refused_with_its_field_and_the_rule(value: object, problem: str) -> None:
    for check in (check_id, check_name):
        with pytest.raises(ValidationError) as caught:
            check(value, "some_field")
        assert caught.value.details == {"field": "some_field", "problem": problem}


def test_the_fields_of_keys_name_themselves() -> None:
    with pytest.raises(ValidationError, match=r"^tenant_id: "):
        check_tenant_id("")
    with pytest.raises(ValidationError, match=r"^instance_id: "):
        check_instance_id("")


def test_composed_and_decomposed_letters_make_different_ids() -> None:
    assert check_id("é", "id") != check_id("e\u0301", "id")


@pytest.mark.parametrize("value", ["~", "~x", "~5"])
def test_the_names_of_the_runtimes_own_waits_are_reserved(value: str) -> None:
    assert check_id(value, "request_id") == value
    with pytest.raises(ValidationError) as caught:
        check_name(value, "checkpoint_id")
    assert caught.value.field == "checkpoint_id"


@settings(derandomize=True, database=None, max_examples=300)
@given(st.text(alphabet=st.characters(), min_size=1, max_size=20))
def test_any_text_is_kept_or_refused_never_changed(value: str) -> None:
    forbidden = any(ord(c) < 32 or 127 <= ord(c) < 160 or 0xD800 <= ord(c) < 0xE000 for c in value)
    try:
        assert check_id(value, "id") == value
        assert not forbidden
    except ValidationError:
        assert forbidden
