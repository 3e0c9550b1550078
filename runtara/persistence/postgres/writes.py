"""A batch of units as a few statements, inside one transaction. Nothing here waits: it makes statements.

How a batch is written:

1. The first trip begins the transaction, reads the lease and the guards of all chains; chains that do not
   stand are left out (W3, W4).
2. The operations of the others are grouped by statement. Of several records of one instance the last
   wins (W8), and so it does of several changes of one row.
3. New instances first, then what is appended, then what moves.
4. The update of an instance carries its guard again, in its WHERE, and every update counts the rows it
   changed: one that finds nothing is refused, never silent. A batch that updates nothing is committed in the
   same trip.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import attrs

from runtara.errors import StoreRefused
from runtara.persistence.chains import Heads, guards_that_fail, require_created
from runtara.persistence.postgres.driver import Result, Statement
from runtara.persistence.postgres.statements import (
    INSERT_COMPENSATIONS,
    INSERT_INSTANCES,
    PUT_PAYLOADS,
    SetStatement,
    append_to,
    statement,
    update,
)
from runtara.persistence.postgres.values import changed, rows
from runtara.persistence.rows import (
    APPENDED,
    CHANGES,
    INSTANCES,
    MOVING,
    Row,
    compensation_row,
    moving_values,
)
from runtara.persistence.store import Unit
from runtara.records import CheckpointRecord, InstanceRecord, Op, PayloadKind, PutPayload

GUARDS: Final = 'SELECT "row", epoch, revision FROM instances WHERE "row" = ANY($1)'
MOVE_INSTANCES: Final = update("instances", ("row", "epoch", "revision"), MOVING)


@cache
def change_of(kind: type) -> SetStatement:
    change = CHANGES[kind]
    return update(change.table, ("instance", *change.keys), change.columns)


def guards(heads: Heads) -> Statement:
    """Asks for what the guards are compared with."""
    return statement(GUARDS, list(heads))


def left_out(heads: Heads, answer: Result) -> frozenset[int]:
    """The rows whose chains do not stand, by the answer to `guards`."""
    stored: dict[int, Any] = {row: found for row, *found in rows(answer)}  # type: ignore[misc]  # its key
    return guards_that_fail(heads, {row: (epoch, revision) for row, (epoch, revision) in stored.items()})


@attrs.frozen
class Writing:
    """One statement, and for an update the table and how many rows it must change."""

    statement: Statement
    table: str = ""
    wanted: int | None = None

    def check(self, answer: Result) -> None:
        """Raise `StoreRefused` if it changed fewer rows than it was to (rule 4)."""
        found = changed(answer)
        if self.wanted is not None and found != self.wanted:
            raise StoreRefused(f"{self.wanted} rows of {self.table} were to change, {found} were there")


@attrs.define
class Work:
    """What a batch writes, grouped by statement."""

    heads: Heads
    instances: dict[int, InstanceRecord] = attrs.Factory(dict)
    appended: defaultdict[type, list[Row]] = attrs.Factory(lambda: defaultdict(list))
    compensations: list[Row] = attrs.Factory(list)
    payloads: dict[tuple[int, PayloadKind], bytes] = attrs.Factory(dict)
    changes: defaultdict[type, dict[Row, Row]] = attrs.Factory(lambda: defaultdict(dict))

    def add(self, row: int, op: Op) -> None:
        kind = type(op)
        table = APPENDED.get(kind)
        if table is not None:
            self.appended[kind].append((row, *table.values(op)))
            if kind is CheckpointRecord and isinstance(op, CheckpointRecord) and op.compensation is not None:
                self.compensations.append((row, *compensation_row(op, op.compensation)))
        elif isinstance(op, InstanceRecord):
            self.instances[row] = op
        elif isinstance(op, PutPayload):
            self.payloads[row, op.kind] = op.data
        else:
            change = CHANGES[kind]
            self.changes[kind][row, *change.key(op)] = change.values(op)

    def writings(self) -> list[Writing]:
        """The statements, in the order in which they must run (rule 3)."""
        created = [INSTANCES.values(i) for row, i in self.instances.items() if self.heads[row].base == 0]
        moved: list[Row] = [
            (row, self.heads[row].epoch, self.heads[row].base, *moving_values(record))
            for row, record in self.instances.items()
            if self.heads[row].base != 0
        ]
        payloads: list[Row] = [(row, kind, data) for (row, kind), data in self.payloads.items()]
        inserts = [
            (INSERT_INSTANCES, created),
            *((append_to(kind), appended) for kind, appended in self.appended.items()),
            (INSERT_COMPENSATIONS, self.compensations),
            (PUT_PAYLOADS, payloads),
        ]
        found = [Writing(sql.over(rows)) for sql, rows in inserts if rows]
        for kind, change in self.changes.items():
            rows = [(*key, *values) for key, values in change.items()]
            found.append(Writing(change_of(kind).over(rows), CHANGES[kind].table, len(rows)))
        if moved:
            found.append(Writing(MOVE_INSTANCES.over(moved), "instances", len(moved)))
        return found


def writings(batch: Sequence[Unit], heads: Heads, left_out: frozenset[int]) -> list[Writing]:
    """All statements for the chains that stand.

    Raises:
        StoreRefused, UNFIT: A unit cannot be written.
    """
    work = Work({row: head for row, head in heads.items() if row not in left_out})
    for unit in batch:
        if unit.row not in left_out:
            for op in unit.ops:
                work.add(unit.row, op)
    require_created(work.heads, work.instances)
    return work.writings()
