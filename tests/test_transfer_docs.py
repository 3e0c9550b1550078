"""The page about exports shows the lines as they are."""

import os
import re
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import attrs

from runtara.records import CompensationSpec, Named
from runtara.testing.samples import instance
from runtara.transfer.format import KINDS, LEFT_OUT
from runtara.transfer.rules import line_limit
from tests.sqlite_stores import opened
from tests.transfers import content, exported, forged, imported

PAGE = Path(__file__).parent.parent / "docs" / "transfer.md"
TEXT = PAGE.read_text(encoding="utf-8")
NAMES = {int: "number", str: "text", bytes: "bytes", bool: "truth"}


def type_of(hint: Any) -> str:
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] or [hint]
    kind = kinds[0]
    if kind is CompensationSpec:
        return f"object of {fields_of(kind)}"
    if kind in NAMES:
        return "object of numbers" if len(kinds) > 1 else NAMES[kind]
    assert issubclass(kind, Named)
    words = " ".join(f"`{member.word}`" for member in kind)
    return f"array of {words}" if Ellipsis in kinds else words


def fields_of(kind: type[Any]) -> str:
    shown = []
    for field in attrs.fields(kind):
        if field.name not in LEFT_OUT.get(kind, {}):
            mark = "*" if NoneType in get_args(field.type) else ""
            shown.append(f"{mark}{field.name}{mark}: {type_of(field.type)}")
    return ", ".join(shown)


def table() -> str:
    rows = [f"| `{word}` | {fields_of(kind)} |" for word, kind in KINDS.items()]
    return "\n".join(["| line | fields |", "|---|---|", *rows])


def example() -> list[bytes]:
    [found] = re.findall(r"```json\n(.*?)```", TEXT, re.S)
    return [line.encode() for line in found.splitlines(keepends=True)]


def test_the_page_shows_every_line_and_every_field() -> None:
    before, _, rest = TEXT.partition("<!-- lines: begin -->\n")
    shown, _, after = rest.partition("<!-- lines: end -->")
    if os.environ.get("UPDATE_DOCS"):
        written = f"{before}<!-- lines: begin -->\n{table()}\n<!-- lines: end -->{after}"
        digested = b"".join(forged(example())).decode()
        old = b"".join(example()).decode()
        PAGE.write_text(written.replace(old, digested), encoding="utf-8")
        return
    assert shown.rstrip("\n") == table()


async def test_the_example_of_the_page_is_an_export() -> None:
    lines = example()
    assert lines == forged(lines)
    async with opened(":memory:") as store:
        done = await imported(store, b"".join(lines))
        assert done.counts["instance"] == 1
        assert content(await exported(store)) == content(b"".join(lines))
        record = await store.find("default", "order-1")
        assert record is not None
        assert record.epoch == 7


def test_the_order_of_the_lines_is_that_of_the_page() -> None:
    [shown] = re.findall(r"    header  \((.*?)\)\*  trailer", TEXT, re.S)
    assert [word.rstrip("*") for word in shown.split()] == [
        word for word in KINDS if word not in ("header", "skipped", "trailer")
    ]


def test_the_page_tells_the_length_of_a_line() -> None:
    assert "12 times as long and 64 KiB" in TEXT
    assert line_limit(1000) == 12 * 1000 + 64 * 1024
    assert "row" not in fields_of(type(instance(1)))
