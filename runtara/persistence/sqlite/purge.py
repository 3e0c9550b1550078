"""Deleting instances that have ended, and their history after them, inside one transaction.

Rules:

1. An instance goes at once, and its row stands in ``purged`` until nothing of its history is left. Its number
   is never given out again, so what is left belongs to nobody.
2. History goes as far as a budget reaches: a record costs 1, and 1 more for each 4 KiB of its large values,
   for their pages have to be freed; forgetting a purged row costs 1 as well. Records are looked at one by
   one, so no more of them is read than is deleted.
3. ``length`` of a blob reads none of its pages. That of a text would count characters, up to the first NUL;
   so a text is measured as bytes, and is read for that.
"""

import json
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, get_args

import attrs

from runtara.persistence.rows import APPENDED, COMPENSATIONS, HISTORY, LARGE
from runtara.records import Status

BYTES_PER_COUNT: Final = 4096
ROWS_AT_ONCE: Final = 100
"""Purged instances whose history a sweep looks for with one question for each table."""

RECORDS_OF_AN_INSTANCE: Final = 3
"""How many records an instance's row is worth in the log: it stands in a dozen indexes."""

ENDED: Final = ", ".join(str(int(status)) for status in Status if status.is_terminal)

AMONG: Final = "IN (SELECT value FROM json_each(?))"
REMOVE: Final = f"DELETE FROM instances NOT INDEXED WHERE row {AMONG} AND status IN ({ENDED}) RETURNING row"
REMEMBER: Final = "INSERT OR IGNORE INTO purged (row) SELECT value FROM json_each(?)"
FORGET: Final = f"DELETE FROM purged WHERE row {AMONG}"
NEXT: Final = "SELECT row FROM purged ORDER BY row LIMIT ?"


def measure(table: str, column: str) -> str:
    """The bytes of a value, as SQL (rule 3)."""
    kinds: dict[str, Any] = {t.name: t.make for t in (*APPENDED.values(), COMPENSATIONS)}
    fields: Mapping[str, Any] = attrs.fields_dict(kinds[table]) if table in kinds else {}
    hint = fields[column].type if column in fields else bytes
    is_text = str in (hint, *get_args(hint))
    return f"ifnull(length(CAST({column} AS BLOB)), 0)" if is_text else f"ifnull(length({column}), 0)"


def find_sql(table: str) -> str:
    """The records of some instances, with the bytes of their large values."""
    size = " + ".join(measure(table, column) for column in LARGE.get(table, ())) or "0"
    return f"SELECT id, {size} FROM {table} WHERE instance {AMONG}"


FIND: Final[Mapping[str, str]] = {table: find_sql(table) for table in HISTORY}
DELETE: Final[Mapping[str, str]] = {table: f"DELETE FROM {table} WHERE id {AMONG}" for table in HISTORY}


@attrs.define
class Spending:
    """How far a transaction still goes, and what it has done."""

    left: int
    """Of the budget (rule 2)."""
    deleted: int = 0
    """Rows, of any table."""
    size: int = 0
    """Bytes of large values."""

    def spend(self, size: int) -> None:
        self.left -= 1 + size // BYTES_PER_COUNT
        self.deleted += 1
        self.size += size


def purge(connection: sqlite3.Connection, rows: Sequence[int], spending: Spending) -> frozenset[int]:
    """Delete those of ``rows`` that have ended, and their history as far as it goes; returns their rows.

    What is left is found by `is_left`.
    """
    found = connection.execute(REMOVE, (json.dumps(list(rows)),)).fetchall()
    gone = sorted(row for (row,) in found)
    connection.execute(REMEMBER, (json.dumps(gone),))
    delete_all_of(connection, gone, spending)
    return frozenset(gone)


def is_left(connection: sqlite3.Connection, rows: Collection[int]) -> bool:
    """Whether some of ``rows`` may have history."""
    sql = f"SELECT 1 FROM purged WHERE row {AMONG} LIMIT 1"
    return connection.execute(sql, (json.dumps(list(rows)),)).fetchone() is not None


def sweep(connection: sqlite3.Connection, spending: Spending) -> bool:
    """Delete what purges have left, as far as it goes; whether more is left."""
    while rows := [row for (row,) in connection.execute(NEXT, (ROWS_AT_ONCE,))]:
        if spending.left <= 0 or not delete_all_of(connection, rows, spending):
            return True
    return False


def delete_all_of(connection: sqlite3.Connection, rows: Sequence[int], spending: Spending) -> bool:
    """Delete the history of purged rows, and forget them; whether the budget reached to the end."""
    for table in HISTORY:
        if rows and not delete_from(connection, table, rows, spending):
            return False
    connection.execute(FORGET, (json.dumps(rows),))
    spending.left -= len(rows)
    spending.deleted += len(rows)
    return True


def delete_from(connection: sqlite3.Connection, table: str, rows: Sequence[int], spending: Spending) -> bool:
    """Delete the records of ``rows`` in one table; whether the budget reached to the last of them."""
    ids: list[int] = []
    complete = True
    for record, size in connection.execute(FIND[table], (json.dumps(rows),)):
        if spending.left <= 0:
            complete = False
            break
        ids.append(record)
        spending.spend(size)
    if ids:
        connection.execute(DELETE[table], (json.dumps(ids),))
    return complete
