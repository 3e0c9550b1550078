"""The SQL that writes many rows at once, and the settings that every transaction gives itself.

Rules:

1. A batch writes each table with one statement: its columns are arrays, and ``unnest`` turns them into rows.
2. A setting lasts for its transaction only (``set_config(..., true)``), the search path included, so that a
   pooler in transaction mode may sit between; and ours do not leak to others.
3. What is written is found by its key. So the writer's transactions forbid the plans that read whole
   tables, which old statistics might recommend.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final, get_args

import attrs

from runtara.persistence.postgres.driver import Statement
from runtara.persistence.postgres.values import BYTES, NUMBERS, TEXTS, Kind, encode
from runtara.persistence.rows import (
    APPENDED,
    COMPENSATION_COLUMNS,
    COMPENSATIONS,
    INSTANCES,
    Row,
    Table,
    Value,
    names,
)

BEGIN: Final = Statement(b"BEGIN ISOLATION LEVEL READ COMMITTED")
BEGIN_SNAPSHOT: Final = Statement(b"BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
COMMIT: Final = Statement(b"COMMIT")
ROLLBACK: Final = Statement(b"ROLLBACK")


def statement(sql: str, *values: Value | list[int]) -> Statement:
    """``sql`` with its values, ``$1`` and so on."""
    encoded = [encode(value) for value in values]
    return Statement(sql.encode(), tuple(data for data, _ in encoded), tuple(number for _, number in encoded))


def settings(values: Mapping[str, str]) -> Statement:
    """Set ``values`` for the rest of the transaction; the result holds what the server made of them."""
    calls = ", ".join(f"set_config('{name}', {literal(value)}, true)" for name, value in values.items())
    return Statement(f"SELECT {calls}".encode())


def literal(text: str) -> str:
    """``text`` as a constant in SQL."""
    doubled = text.replace("'", "''").replace("\\", "\\\\")
    return f"E'{doubled}'"


def identifier(name: str) -> str:
    """``name`` as a name in SQL."""
    doubled = name.replace('"', '""')
    return f'"{doubled}"'


FOR_WRITING: Final[Mapping[str, str]] = {
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}
"""Rule 3."""


# ---------------------------------------------------------------- columns


def kind_of(hint: object) -> Kind:
    """How a field of this type is sent: words and truth are numbers."""
    for part in (hint, *get_args(hint)):
        if part is str:
            return TEXTS
        if part is bytes:
            return BYTES
    return NUMBERS


def kinds_of(table: Table[Any]) -> dict[str, Kind]:
    make: Any = table.make
    return {field.name: kind_of(field.type) for field in attrs.fields(make)}


KINDS: Final[Mapping[str, Mapping[str, Kind]]] = {
    **{table.name: {"instance": NUMBERS, **kinds_of(table)} for table in APPENDED.values()},
    "instances": kinds_of(INSTANCES),
    "compensations": {"instance": NUMBERS, **kinds_of(COMPENSATIONS), "data": BYTES},
    "payloads": {"instance": NUMBERS, "kind": NUMBERS, "data": BYTES},
}
"""How each column of each table is sent."""


def unnest(table: str, columns: Sequence[str]) -> str:
    """The rows that the arrays ``$1``, ``$2`` ... make, with columns ``c1``, ``c2`` ..."""
    places = ", ".join(f"${at}::{KINDS[table][name].word}[]" for at, name in enumerate(columns, 1))
    called = ", ".join(f"c{at}" for at in range(1, len(columns) + 1))
    return f"unnest({places}) AS v ({called})"


# ---------------------------------------------------------------- sets of rows


@attrs.frozen(eq=False)
class SetStatement:
    """A statement over any number of rows."""

    sql: bytes
    kinds: tuple[Kind, ...]
    types: tuple[int, ...]

    def over(self, rows: Sequence[Row]) -> Statement:
        columns: Iterable[tuple[Value, ...]] = zip(*rows, strict=True)
        arrays = tuple(kind.many(column) for kind, column in zip(self.kinds, columns, strict=True))
        return Statement(self.sql, arrays, self.types)


def set_statement(table: str, columns: Sequence[str], sql: str) -> SetStatement:
    kinds = tuple(KINDS[table][name] for name in columns)
    return SetStatement(sql.encode(), kinds, tuple(kind.array_number for kind in kinds))


def insert(table: str, columns: Sequence[str], then: str = "") -> SetStatement:
    sql = f"INSERT INTO {table} ({names(columns)}) SELECT * FROM {unnest(table, columns)}{then}"
    return set_statement(table, columns, sql)


def update(table: str, keys: Sequence[str], columns: Sequence[str]) -> SetStatement:
    """Each row holds ``keys`` and then ``columns``."""
    found = " AND ".join(f'{table}."{key}" = v.c{at}' for at, key in enumerate(keys, 1))
    moved = ", ".join(f'"{name}" = v.c{at}' for at, name in enumerate(columns, len(keys) + 1))
    both = (*keys, *columns)
    return set_statement(table, both, f"UPDATE {table} SET {moved} FROM {unnest(table, both)} WHERE {found}")


INSERT_INSTANCES: Final = insert("instances", INSTANCES.columns)
INSERT_COMPENSATIONS: Final = insert("compensations", ("instance", *COMPENSATION_COLUMNS))
PUT_PAYLOADS: Final = insert(
    "payloads",
    ("instance", "kind", "data"),
    " ON CONFLICT (instance, kind) DO UPDATE SET data = excluded.data",
)


@cache
def append_to(kind: type) -> SetStatement:
    """The statement that appends records of class ``kind``."""
    table = APPENDED[kind]
    return insert(table.name, ("instance", *table.columns))
