"""The binary encoding: what goes in comes out, and order and prefixes of texts are kept."""

import struct

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from runtara.persistence.postgres import values
from runtara.persistence.postgres.driver import Result, Statement
from runtara.persistence.postgres.values import BYTES, NUMBERS, TEXTS, UNFIT, escape, rows, unescape
from runtara.testing.samples import ALL_BYTES, NAUGHTY
from tests.test_postgres_driver import connected

texts = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\0\1\2"))
numbers = st.integers(-(2**63), 2**63 - 1)


@given(texts)
def test_an_escaped_text_holds_no_nul_and_comes_back(text: str) -> None:
    assert "\0" not in escape(text)
    assert unescape(escape(text)) == text


@given(texts, texts)
def test_escaping_keeps_the_order_by_code_point(one: str, other: str) -> None:
    assert (escape(one).encode() < escape(other).encode()) == (one < other)


@given(texts, texts)
def test_escaping_keeps_prefixes(start: str, text: str) -> None:
    assert escape(text).startswith(escape(start)) == text.startswith(start)


@given(st.lists(st.none() | numbers), st.lists(st.none() | texts), st.lists(st.none() | st.binary()))
@settings(max_examples=30, deadline=None)
def test_arrays_come_back_from_the_server(
    some: list[int | None], words: list[str | None], blobs: list[bytes | None]
) -> None:
    async def ask() -> list[Result]:
        asked = [
            Statement(
                f"SELECT * FROM unnest($1::{kind.word}[])".encode(),
                (kind.many(column),),
                (kind.array_number,),
            )
            for kind, column in ((NUMBERS, some), (TEXTS, words), (BYTES, blobs))
        ]
        async with connected() as connection:
            return await connection.run(asked, 10)

    answers = trio.run(ask)
    assert [[value for (value,) in rows(answer)] for answer in answers] == [some, words, blobs]


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, "lone \ud800"])
def test_a_value_that_does_not_fit_raises(value: int | str) -> None:
    with pytest.raises(UNFIT):
        values.encode(value)
    with pytest.raises(UNFIT):
        (TEXTS if isinstance(value, str) else NUMBERS).many([value, None])
    with pytest.raises(UNFIT):
        (TEXTS if isinstance(value, str) else NUMBERS).many([value])


def test_single_values_are_what_arrays_hold() -> None:
    assert values.encode(None) == (None, values.INT8)
    assert values.encode(-5) == (struct.pack("!q", -5), values.INT8)
    assert values.encode(NAUGHTY)[0] == escape(NAUGHTY).encode()
    assert values.encode(ALL_BYTES) == (ALL_BYTES, values.BYTEA)
