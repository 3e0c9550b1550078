"""Values as PostgreSQL's binary formats, and back.

Rules:

1. Numbers are ``bigint``, texts ``text``, bytes ``bytea``; the columns of a batch go as one array each. The
   encoding is written out here, because psycopg's own takes several times as long.
2. ``text`` cannot hold NUL. So U+0000 is stored as U+0001 U+0001, and U+0001 as U+0001 U+0002. This keeps the
   order of texts, and a prefix stays a prefix; all columns compare by code point (``COLLATE "C"``).
3. A value that has no encoding (a lone surrogate, a number of more than 64 bits) raises one of `UNFIT`.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from runtara.persistence.postgres.driver import Result
from runtara.persistence.rows import Row, Value

UNFIT: Final = (struct.error, UnicodeEncodeError, OverflowError)
"""Raised for a value that PostgreSQL cannot hold."""

BYTEA, INT8, INT2, INT4, TEXT = 17, 20, 21, 23, 25
BYTEA_ARRAY, TEXT_ARRAY, INT8_ARRAY = 1001, 1009, 1016

LENGTH: Final = struct.Struct("!i")
NUMBER: Final = struct.Struct("!q")
HEADER: Final = struct.Struct("!iiiii")
NULL: Final = LENGTH.pack(-1)
EMPTY: Final = struct.Struct("!iii")


def escape(text: str) -> str:
    """``text`` as it is stored (rule 2)."""
    if "\x00" in text or "\x01" in text:
        return text.replace("\x01", "\x01\x02").replace("\x00", "\x01\x01")
    return text


def unescape(text: str) -> str:
    if "\x01" in text:
        return text.replace("\x01\x01", "\x00").replace("\x01\x02", "\x01")
    return text


def encode_number(value: int) -> bytes:
    return NUMBER.pack(value)


def encode_text(value: str) -> bytes:
    return escape(value).encode()


def encode_bytes(value: bytes) -> bytes:
    return value


# ---------------------------------------------------------------- arrays


def array(type_number: int, items: Sequence[bytes | None]) -> bytes:
    """A one-dimensional array of items that are encoded already."""
    parts = [array_header(type_number, len(items), any(item is None for item in items))]
    for item in items:
        if item is None:
            parts.append(NULL)
        else:
            parts += (LENGTH.pack(len(item)), item)
    return b"".join(parts)


def array_header(type_number: int, count: int, holds_null: bool) -> bytes:
    if count == 0:
        return EMPTY.pack(0, 0, type_number)
    return HEADER.pack(1, holds_null, type_number, count, 1)


def number_array(values: Sequence[int | None]) -> bytes:
    if None in values:
        return array(INT8, [None if value is None else NUMBER.pack(value) for value in values])
    pairs = [part for value in values for part in (8, value)]
    return array_header(INT8, len(values), False) + struct.pack("!" + "iq" * len(values), *pairs)


def text_array(values: Sequence[str | None]) -> bytes:
    return array(TEXT, [None if value is None else escape(value).encode() for value in values])


def bytes_array(values: Sequence[bytes | None]) -> bytes:
    return array(BYTEA, values)


@attrs.frozen(kw_only=True)
class Kind:
    """How the values of a column are sent."""

    word: str
    """Of the type in SQL."""
    number: int
    array_number: int
    one: Callable[..., bytes]
    many: Callable[..., bytes]


NUMBERS: Final = Kind(
    word="bigint", number=INT8, array_number=INT8_ARRAY, one=encode_number, many=number_array
)
TEXTS: Final = Kind(word="text", number=TEXT, array_number=TEXT_ARRAY, one=encode_text, many=text_array)
BYTES: Final = Kind(word="bytea", number=BYTEA, array_number=BYTEA_ARRAY, one=encode_bytes, many=bytes_array)


def encode(value: Value | list[int]) -> tuple[bytes | None, int]:
    """One value and its type; None is a number that is not there, a list is an array."""
    match value:
        case list():
            return number_array(value), INT8_ARRAY
        case None:
            return None, INT8
        case int():
            return NUMBER.pack(value), INT8
        case str():
            return encode_text(value), TEXT
        case bytes():
            return value, BYTEA


# ---------------------------------------------------------------- results


def decode_number(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


def decode_text(data: bytes) -> str:
    return unescape(data.decode())


DECODERS: Final[dict[int, Callable[[bytes], Value]]] = {
    INT8: decode_number,
    INT4: decode_number,
    INT2: decode_number,
    TEXT: decode_text,
    BYTEA: lambda data: data,
}


def rows(result: Result) -> list[Row]:
    """All rows of a result."""
    columns = [(at, DECODERS[result.ftype(at)]) for at in range(result.nfields)]
    get = result.get_value
    found: list[Row] = []
    for row in range(result.ntuples):
        found.append(
            tuple(None if (data := get(row, at)) is None else decode(data) for at, decode in columns)
        )
    return found


def changed(result: Result) -> int:
    """How many rows a statement changed."""
    return result.command_tuples or 0
