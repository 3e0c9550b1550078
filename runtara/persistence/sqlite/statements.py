"""The SQL that writes many rows at once, and how it is run.

Rules:

1. Few, large statements. Each one must win the interpreter lock back when the trio loop is busy, and
   may wait 5 ms for it; ``executemany`` does so for every row.
2. The sizes of the statements are powers of two, so any number of rows needs few of them, and the
   connection keeps all of them prepared.
3. A prepared statement keeps a copy of the values it was last given. So rows with large values go through
   the statement for one row.
"""

import sqlite3
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from typing import Final

from runtara.persistence.rows import Row, names

SqlOf = Callable[[int], str]
"""A statement that exists in several sizes: rows -> SQL."""

SIZES: Final = (128, 64, 32, 16, 8, 4, 2, 1)
LARGE_BYTES: Final = 16 * 1024
"""A unit over this size writes its rows one by one (rule 3)."""


def places(columns: int, rows: int) -> str:
    one = f"({', '.join('?' * columns)})"
    return ", ".join([one] * rows)


@cache
def insert_sql(table: str, columns: tuple[str, ...], rows: int) -> str:
    return f"INSERT INTO {table} ({names(columns)}) VALUES {places(len(columns), rows)}"


@cache
def replace_payload_sql(rows: int) -> str:
    sql = insert_sql("payloads", ("instance", "kind", "data"), rows)
    return f"{sql} ON CONFLICT (instance, kind) DO UPDATE SET data = excluded.data"


@cache
def update_sql(table: str, keys: tuple[str, ...], columns: tuple[str, ...], rows: int) -> str:
    """Each row of values holds ``keys`` and then ``columns``."""
    width = len(keys) + len(columns)
    found = " AND ".join(f'{table}."{key}" = v.column{at}' for at, key in enumerate(keys, 1))
    moved = ", ".join(f'"{name}" = v.column{at}' for at, name in enumerate(columns, len(keys) + 1))
    return f"UPDATE {table} SET {moved} FROM (VALUES {places(width, rows)}) AS v WHERE {found}"


def run_rows(connection: sqlite3.Connection, sql: SqlOf, rows: Sequence[Row]) -> int:
    """Run ``sql`` over all ``rows``, in as few statements as rule 2 gives. Returns how many rows changed."""
    changed = at = 0
    for size in SIZES:
        while len(rows) - at >= size:
            part = rows[at : at + size]
            changed += connection.execute(sql(size), tuple(chain.from_iterable(part))).rowcount
            at += size
    return changed


def run_single(connection: sqlite3.Connection, sql: SqlOf, rows: Sequence[Row]) -> int:
    """Run ``sql`` over ``rows`` one by one (rule 3)."""
    return sum(connection.execute(sql(1), row).rowcount for row in rows)
