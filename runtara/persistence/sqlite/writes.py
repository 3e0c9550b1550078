"""A batch of units as a few set-based statements, inside one transaction.

How a batch is written:

1. The guards of all chains are read with one statement; chains that do not stand are left out (W3, W4).
2. The operations of the others are grouped by statement. Of several records of one instance the last
   wins (W8), and so it does of several changes of one row.
3. New instances first; then what is appended; then what moves.
4. The update of an instance carries its guard again, in its WHERE, and every update counts the rows it
   changed: one that finds nothing is refused, never silent.
"""

import json
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

import attrs

from runtara.errors import StoreRefused
from runtara.persistence.chains import Heads, guards_that_fail, heads_of, require_created
from runtara.persistence.rows import (
    APPENDED,
    CHANGES,
    COMPENSATION_COLUMNS,
    INSTANCES,
    MOVING,
    Change,
    Row,
    compensation_row,
    moving_values,
)
from runtara.persistence.sqlite.statements import (
    LARGE_BYTES,
    SqlOf,
    insert_sql,
    replace_payload_sql,
    run_rows,
    run_single,
    update_sql,
)
from runtara.persistence.store import Unit
from runtara.records import CheckpointRecord, InstanceRecord, Op, PayloadKind, PutPayload

Rows = defaultdict[SqlOf, list[Row]]

SET_NOTE: Final = "INSERT INTO notes VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET text = excluded.text"
REMOVE_NOTE: Final = "DELETE FROM notes WHERE name = ?"

GUARDS: Final = """
    SELECT row, epoch, revision FROM instances WHERE row IN (SELECT value FROM json_each(?))
"""

INSERT_INSTANCES: Final[SqlOf] = partial(insert_sql, "instances", INSTANCES.columns)
INSERT_COMPENSATIONS: Final[SqlOf] = partial(insert_sql, "compensations", ("instance", *COMPENSATION_COLUMNS))
MOVE_INSTANCES: Final[SqlOf] = partial(update_sql, "instances", ("row", "epoch", "revision"), MOVING)


@attrs.frozen
class Append:
    """How the records of one class are appended."""

    sql: SqlOf
    values: Callable[[Any], Row]


APPENDS: Final = {
    kind: Append(partial(insert_sql, table.name, ("instance", *table.columns)), table.values)
    for kind, table in APPENDED.items()
}


def left_out(connection: sqlite3.Connection, heads: Heads) -> frozenset[int]:
    """The rows whose chains do not continue what is stored."""
    found = connection.execute(GUARDS, (json.dumps(list(heads)),))
    return guards_that_fail(heads, {row: (epoch, revision) for row, epoch, revision in found})


@attrs.define
class Work:
    """What a batch writes, grouped by statement."""

    heads: Heads
    instances: dict[int, InstanceRecord] = attrs.Factory(dict)
    many: Rows = attrs.Factory(lambda: defaultdict(list))
    single: Rows = attrs.Factory(lambda: defaultdict(list))
    """Rows with large values."""
    payloads: dict[tuple[int, PayloadKind], bytes] = attrs.Factory(dict)
    changes: defaultdict[type, dict[Row, Row]] = attrs.Factory(lambda: defaultdict(dict))

    def add(self, unit: Unit) -> None:
        rows = self.single if unit.size > LARGE_BYTES else self.many
        for op in unit.ops:
            append = APPENDS.get(type(op))
            if append is None:
                self.change(unit.row, op)
                continue
            rows[append.sql].append((unit.row, *append.values(op)))
            if type(op) is CheckpointRecord and op.compensation is not None:
                pending = compensation_row(op, op.compensation)
                rows[INSERT_COMPENSATIONS].append((unit.row, *pending))

    def change(self, row: int, op: Op) -> None:
        """Take what is not appended; the last one of a row wins."""
        match op:
            case InstanceRecord():
                self.instances[row] = op
            case PutPayload():
                self.payloads[row, op.kind] = op.data
            case _:
                change = CHANGES[type(op)]
                self.changes[type(op)][row, *change.key(op)] = change.values(op)

    def created(self) -> list[Row]:
        return [INSTANCES.values(i) for row, i in self.instances.items() if self.heads[row].base == 0]

    def moved(self) -> list[Row]:
        return [
            (row, self.heads[row].epoch, self.heads[row].base, *moving_values(record))
            for row, record in self.instances.items()
            if self.heads[row].base != 0
        ]


def write(connection: sqlite3.Connection, batch: Sequence[Unit]) -> frozenset[int]:
    """Write the chains that stand; returns the rows of the others. The caller commits."""
    heads = heads_of(batch)
    failed = left_out(connection, heads)
    work = Work({row: head for row, head in heads.items() if row not in failed})
    for unit in batch:
        if unit.row not in failed:
            work.add(unit)
    require_created(work.heads, work.instances)
    run_rows(connection, INSERT_INSTANCES, work.created())
    append_rows(connection, work)
    put_payloads(connection, work)
    for kind, rows in work.changes.items():
        change_rows(connection, CHANGES[kind], rows)
    move_instances(connection, work.moved())
    return failed


def append_rows(connection: sqlite3.Connection, work: Work) -> None:
    for sql, rows in work.many.items():
        run_rows(connection, sql, rows)
    for sql, rows in work.single.items():
        run_single(connection, sql, rows)


def put_payloads(connection: sqlite3.Connection, work: Work) -> None:
    small: list[Row] = []
    large: list[Row] = []
    for (row, kind), data in work.payloads.items():
        (large if len(data) > LARGE_BYTES else small).append((row, kind, data))
    run_rows(connection, replace_payload_sql, small)
    run_single(connection, replace_payload_sql, large)


def change_rows(connection: sqlite3.Connection, change: Change, rows: dict[Row, Row]) -> None:
    sql = partial(update_sql, change.table, ("instance", *change.keys), change.columns)
    changed = run_rows(connection, sql, [(*key, *values) for key, values in rows.items()])
    require_all(change.table, changed, len(rows))


def move_instances(connection: sqlite3.Connection, rows: Sequence[Row]) -> None:
    require_all("instances", run_rows(connection, MOVE_INSTANCES, rows), len(rows))


def require_all(table: str, changed: int, wanted: int) -> None:
    if changed != wanted:
        raise StoreRefused(f"{wanted} rows of {table} were to change, {changed} were there")


def appended_rows(batch: Iterable[Unit]) -> int:
    """How many operations a batch holds, as a measure of the pages it may write."""
    return sum(len(unit.ops) for unit in batch)


def set_note(connection: sqlite3.Connection, name: str, text: str | None) -> None:
    if text is None:
        connection.execute(REMOVE_NOTE, (name,))
    else:
        connection.execute(SET_NOTE, (name, text))
