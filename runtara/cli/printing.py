"""What the operators' commands print.

Rules:

1. Nothing from a store reaches a terminal as it is: what controls it, and what hides or reorders text, is
   shown as an escape (`visible`), and nothing is taken for markup.
2. With ``--json`` each object is one line of ASCII that holds everything in full. The keys are the fields of
   the record: words as words, instants in microseconds of UTC, bytes as text where they are UTF-8 and as
   ``{"base64": ...}`` where they are not. ``undecodable`` names the fields that hold an unknown number.
3. The lines for people shorten what is long, and say so.
"""

import base64
import enum
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, Final, TypeVar

import attrs
import click
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

import runtara

T = TypeVar("T")
Columns = Mapping[str, Callable[[T], str]]
"""Title -> what stands below it."""

MOST_SHOWN: Final = 80
"""Characters of a payload, for people."""
WIDEST: Final = 40
"""A column is no wider than this; a longer value pushes the rest of its line aside."""

UNITS: Final = ((86_400, "d"), (3600, "h"), (60, "m"), (1, "s"))


# ---------------------------------------------------------------- single values


def visible(text: str) -> str:
    """``text`` with everything that is not printed as itself as an escape: one line, harmless anywhere."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str) -> str:
    shown = visible(text[:MOST_SHOWN])
    return shown if len(text) <= MOST_SHOWN else f"{shown}... ({len(text)} characters)"


def payload(data: bytes | None) -> str:
    """Bytes as text where they are UTF-8, else how many there are."""
    if data is None:
        return "-"
    text = decoded(data)
    return f"({len(data)} bytes)" if text is None else shortened(text)


def decoded(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def word(value: object) -> str:
    """A word of a record, a text or a number; ``-`` for none."""
    if value is None:
        return "-"
    return value.name.lower() if isinstance(value, enum.Enum) else str(value)


def moment(us: int | None) -> str:
    """An instant as ISO 8601 in UTC, exact; it may be given back as an option."""
    if us is None:
        return "-"
    try:
        return runtara.to_datetime(us).isoformat(timespec="microseconds").replace("+00:00", "Z")
    except OverflowError:  # outside of the calendar
        return f"{us}us"


def age(us: int) -> str:
    """A duration by its two largest units."""
    left = max(0, us) // 1_000_000
    parts: list[str] = []
    for size, unit in UNITS:
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2]) or "0s"


# ---------------------------------------------------------------- JSON


def plain(value: Any) -> Any:
    """``value`` as plain JSON values (rule 2)."""
    if isinstance(value, enum.Enum):
        return word(value)
    if isinstance(value, bytes):
        text = decoded(value)
        return {"base64": base64.b64encode(value).decode()} if text is None else text
    if attrs.has(type(value)):
        return fields(value)
    if isinstance(value, Mapping):
        return {word(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list | frozenset):
        return [plain(item) for item in value]
    return value


def fields(record: Any) -> dict[str, Any]:
    """The fields of a record, as plain JSON values."""
    values = {field.name: getattr(record, field.name) for field in attrs.fields(type(record))}
    found = {name: plain(value) for name, value in values.items()}
    unknown = [name for name, value in values.items() if is_unknown(value)]
    return {**found, "undecodable": unknown} if unknown else found


def is_unknown(value: object) -> bool:
    """Whether it is a word that this version does not know."""
    return isinstance(value, enum.IntEnum) and value.name.startswith("?")


def json_line(value: Mapping[str, Any]) -> str:
    """One object. One that JSON cannot hold is marked; the others are not hidden by it."""
    try:
        return json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        simple = {name: item for name, item in value.items() if is_simple(item)}
        return json.dumps({**simple, "undecodable": sorted(set(value) - set(simple))})


def is_simple(value: object) -> bool:
    return value is None or isinstance(value, int | str) or (isinstance(value, float) and isfinite(value))


# ---------------------------------------------------------------- lines


def say(*lines: str, title: str | None = None) -> None:
    """Lines, below a title if there is one."""
    console = Console(highlight=False)
    if title is not None:
        console.print(Text(title, style="bold"), soft_wrap=True)
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def say_json(*values: Mapping[str, Any]) -> None:
    for value in values:
        click.echo(json_line(value))


def say_table(items: Sequence[T], columns: Columns[T]) -> None:
    """A line of titles and one for each item."""
    rows = [tuple(visible(make(item)) for make in columns.values()) for item in items]
    widths = [
        min(WIDEST, max(cell_len(cell) for cell in column))
        for column in zip(tuple(columns), *rows, strict=True)
    ]
    say(*(aligned(row, widths) for row in rows), title=aligned(tuple(columns), widths))


def say_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Names and values, one pair a line."""
    found = list(pairs)
    width = max(len(name) for name, _ in found)
    say(*(aligned((name, visible(value)), (width, 0)) for name, value in found))


def aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell + " " * max(0, width - cell_len(cell)) for cell, width in zip(cells, widths, strict=True))
    return "  ".join(padded).rstrip()
