"""Everything that is asked of the database: one function for each question, all of them plain reads."""

import sqlite3
from collections.abc import Sequence
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import Any, Final, TypeVar

import attrs

from runtara.limits import OPEN_STEPS
from runtara.persistence.cursors import encode_cursor
from runtara.persistence.lists import (
    SELECT_CHECKPOINTS,
    TERMINAL,
    UNEXPLAINED,
    Clause,
    Listing,
    instance_clause,
    instance_listing,
    maker,
    marks,
    place_of_instance,
    place_of_record,
    record_clause,
    record_listing,
    with_prefix,
)
from runtara.persistence.rows import (
    APPENDED,
    COMPENSATIONS,
    ERRORS,
    HISTORY,
    INSTANCES,
    REQUESTS,
    RETRY_ATTEMPTS,
    SIGNALS,
    STEPS,
    WAITS,
    Row,
    Table,
    Value,
    checkpoint_record,
    known_or_stand_in,
    names,
)
from runtara.persistence.sqlite.indexes import Run, runs
from runtara.persistence.sqlite.transaction import one_moment
from runtara.persistence.store import (
    PAGE_BYTES,
    Due,
    Finished,
    InstanceFilter,
    InstanceOrder,
    Loaded,
    Page,
    PageRequest,
    R,
    RecordFilter,
)
from runtara.records import (
    CheckpointRecord,
    ErrorRecord,
    InstanceRecord,
    PayloadKind,
    RequestRecord,
    RetryAttemptRecord,
    SignalRecord,
    Status,
    WaitRecord,
)

A = TypeVar("A")
Connection = sqlite3.Connection

FIRST: Final = -(2**63)
"""Below every instant and key."""


def select_sql(table: Table[A]) -> str:
    return f"SELECT {names(table.columns)} FROM {table.name}"


def one(connection: Connection, table: Table[A], where: str, *values: Value) -> A | None:
    """The record that ``where`` names, or the first of them, or None."""
    found = connection.execute(f"{select_sql(table)} WHERE {where} LIMIT 1", values).fetchone()
    return None if found is None else table.record(found)


def every(connection: Connection, table: Table[A], where: str, *values: Value) -> tuple[A, ...]:
    rows = connection.execute(f"{select_sql(table)} WHERE {where}", values)
    return tuple(table.record(row) for row in rows)


# ---------------------------------------------------------------- one thing


def find(connection: Connection, tenant_id: str, instance_id: str) -> InstanceRecord | None:
    return one(connection, INSTANCES, "tenant_id = ? AND instance_id = ?", tenant_id, instance_id)


def checkpoint(connection: Connection, row: int, checkpoint_id: str) -> CheckpointRecord | None:
    sql = f"{SELECT_CHECKPOINTS} WHERE c.instance = ? AND c.checkpoint_id = ?"
    found = connection.execute(sql, (row, checkpoint_id)).fetchone()
    return None if found is None else checkpoint_record(found)


def wait(connection: Connection, row: int, wait_id: str) -> WaitRecord | None:
    return one(connection, WAITS, "instance = ? AND wait_id = ?", row, wait_id)


def request(connection: Connection, row: int, request_id: str) -> RequestRecord | None:
    return one(connection, REQUESTS, "instance = ? AND request_id = ?", row, request_id)


def signal(connection: Connection, row: int, signal_id: int) -> SignalRecord | None:
    return one(connection, SIGNALS, "instance = ? AND revision = ?", row, signal_id)


def error(connection: Connection, row: int, error_id: int) -> ErrorRecord | None:
    return one(connection, ERRORS, "instance = ? AND revision = ?", row, error_id)


def attempt(connection: Connection, row: int, checkpoint_id: str, number: int) -> RetryAttemptRecord | None:
    where = "instance = ? AND checkpoint_id = ? AND attempt = ?"
    return one(connection, RETRY_ATTEMPTS, where, row, checkpoint_id, number)


def payloads(connection: Connection, row: int, kinds: frozenset[PayloadKind]) -> dict[PayloadKind, bytes]:
    sql = f"SELECT kind, data FROM payloads WHERE instance = ? AND kind IN ({marks(len(kinds))})"
    return {PayloadKind(kind): data for kind, data in connection.execute(sql, (row, *kinds))}


def compensation_data(connection: Connection, row: int, checkpoint_id: str) -> bytes | None:
    sql = "SELECT data FROM compensations WHERE instance = ? AND checkpoint_id = ?"
    found = connection.execute(sql, (row, checkpoint_id)).fetchone()
    data: bytes | None = None if found is None else found[0]
    return data


# ---------------------------------------------------------------- what an actor needs

NEWEST_REVISION: Final = "SELECT max({})".format(
    ", ".join(
        f"ifnull((SELECT max(revision) FROM {table.name} WHERE instance = ?1), 0)"
        for table in APPENDED.values()
    )
)


OPEN_OF_INSTANCE: Final = "instance = ? AND status = 0 ORDER BY revision DESC LIMIT ?"


def load(connection: Connection, tenant_id: str, instance_id: str, known: int) -> Loaded | None:
    """One consistent picture."""
    with one_moment(connection):
        record = find(connection, tenant_id, instance_id)
        return None if record is None else load_rest(connection, record, known)


def load_rest(connection: Connection, record: InstanceRecord, known: int) -> Loaded:
    row = record.row
    newest: int = connection.execute(NEWEST_REVISION, (row,)).fetchone()[0]
    return Loaded(
        record=record,
        revision=max(record.revision, newest),
        checkpoint_id=newest_checkpoint_id(connection, row),
        signals=every(connection, SIGNALS, "instance = ? AND acknowledged_us IS NULL ORDER BY revision", row),
        waits=every(connection, WAITS, "instance = ? AND outcome IS NULL ORDER BY revision", row),
        compensations=every(connection, COMPENSATIONS, "instance = ? ORDER BY revision", row),
        last_error=one(connection, ERRORS, "instance = ? ORDER BY revision DESC", row),
        steps=every(connection, STEPS, OPEN_OF_INSTANCE, row, OPEN_STEPS)[::-1],
        checkpoint_ids=ids(connection, "checkpoints", "checkpoint_id", row, known),
        wait_ids=ids(connection, "waits", "wait_id", row, known),
        request_ids=ids(connection, "requests", "request_id", row, known),
    )


def newest_checkpoint_id(connection: Connection, row: int) -> str | None:
    sql = "SELECT checkpoint_id FROM checkpoints WHERE instance = ? ORDER BY revision DESC LIMIT 1"
    found = connection.execute(sql, (row,)).fetchone()
    checkpoint_id: str | None = None if found is None else found[0]
    return checkpoint_id


def ids(connection: Connection, table: str, column: str, row: int, known: int) -> frozenset[str] | None:
    sql = f"SELECT {column} FROM {table} WHERE instance = ? LIMIT ?"
    found = [value for (value,) in connection.execute(sql, (row, known + 1))]
    return frozenset(found) if len(found) <= known else None


# ---------------------------------------------------------------- time

DUE_COLUMNS: Final = "tenant_id, instance_id, row, epoch"


def due(connection: Connection, until_us: int, after: tuple[int, int] | None, limit: int) -> list[Due]:
    sql = (
        f"SELECT {DUE_COLUMNS}, due_us FROM instances"
        " WHERE due_us <= ? AND (due_us, row) > (?, ?) ORDER BY due_us, row LIMIT ?"
    )
    values = (until_us, *(after or (FIRST, FIRST)), limit)
    return [due_record(found) for found in connection.execute(sql, values)]


def running(connection: Connection, before_epoch: int, after_row: int, limit: int) -> list[Due]:
    sql = (
        f"SELECT {DUE_COLUMNS}, 0 FROM instances INDEXED BY instances_running"
        " WHERE status = 2 AND epoch < ? AND row > ? ORDER BY row LIMIT ?"
    )
    return [due_record(found) for found in connection.execute(sql, (before_epoch, after_row, limit))]


def due_record(found: tuple[str, str, int, int, int]) -> Due:
    tenant_id, instance_id, row, epoch, deadline_us = found
    return Due(tenant_id=tenant_id, instance_id=instance_id, row=row, epoch=epoch, deadline_us=deadline_us)


# ---------------------------------------------------------------- lists


def list_instances(
    connection: Connection, where: InstanceFilter, order: InstanceOrder, page: PageRequest
) -> Page[InstanceRecord]:
    listing = instance_listing(order, page)
    with one_moment(connection):
        rows = merged(connection, listing, runs(connection, where, order), page)
    items = tuple(INSTANCES.listed(row) for row in rows[: page.limit])
    if len(rows) <= page.limit:
        return Page(items=items, next=None)
    return Page(items=items, next=encode_cursor(listing.name, place_of_instance(items[-1], order)))


def merged(connection: Connection, listing: Listing, found: Sequence[Run], page: PageRequest) -> list[Row]:
    """One page of the runs of a list, and one more row. Of each run no more is read than that takes."""
    limit = page.limit + 1
    cursors = []
    for run in found:
        after = attrs.evolve(run, clause=listing.after(run.clause, page.cursor))
        cursors.append(connection.execute(after.sql(listing), (*after.clause.values, limit)))
    key = itemgetter(INSTANCES.columns.index(listing.value), INSTANCES.columns.index("row"))
    rows = list(islice(merge(*cursors, key=key, reverse=listing.descending), limit))
    for cursor in cursors:
        cursor.close()
    return rows


def count_instances(connection: Connection, where: InstanceFilter) -> int:
    clause = instance_clause(where, where.statuses)
    sql = f"SELECT count(*) FROM instances WHERE {clause.sql}"
    count: int = connection.execute(sql, clause.values).fetchone()[0]
    return count


CONTAINS: Final = "instr(c.payload, ?) > 0"


def list_records(
    connection: Connection, row: int, kind: type[R], page: PageRequest, where: RecordFilter | None
) -> Page[R]:
    """One page. Rows are read one by one, so no more large values are fetched than the page holds."""
    listing = record_listing(row, kind, page)
    clause: Clause = listing.after(record_clause(row, kind, where, CONTAINS), page.cursor)
    make = maker(kind)
    items: list[R] = []
    size = 0
    for found in connection.execute(listing.sql(clause), (*clause.values, page.limit + 1)):
        if len(items) == page.limit or size >= PAGE_BYTES:
            next = encode_cursor(listing.name, place_of_record(items[-1]))
            return Page(items=tuple(items), next=next)
        items.append(make(found))
        size += sum(bytes_of(value) for value in found)
    return Page(items=tuple(items), next=None)


def bytes_of(value: Value) -> int:
    """How much a value weighs in a page."""
    match value:
        case str():
            return len(value.encode())
        case bytes():
            return len(value)
    return 0


def count_records(connection: Connection, row: int, kind: type[R], where: RecordFilter | None) -> int:
    clause = record_clause(row, kind, where, CONTAINS)
    sql = f"SELECT count(*) FROM {APPENDED[kind].name} AS c WHERE {clause.sql}"
    count: int = connection.execute(sql, clause.values).fetchone()[0]
    return count


# ---------------------------------------------------------------- the store as a whole


def counts(connection: Connection, tenant_id: str | None) -> dict[Status, int]:
    clause = instance_clause(InstanceFilter(tenant_id=tenant_id), frozenset())
    sql = f"SELECT status, count(*) FROM instances WHERE {clause.sql} GROUP BY status"
    found = connection.execute(sql, clause.values)
    shown: list[Any] = [(known_or_stand_in(Status, status), count) for status, count in found]
    return dict(shown)


def unexplained(connection: Connection, after_row: int, limit: int) -> list[InstanceRecord]:
    sql = (
        f"{select_sql(INSTANCES)} INDEXED BY instances_unexplained"
        f" WHERE {UNEXPLAINED} AND row > ? ORDER BY row LIMIT ?"
    )
    return [INSTANCES.listed(found) for found in connection.execute(sql, (after_row, limit))]


def terminal(
    connection: Connection,
    status: Status,
    before_us: int,
    tenant_id: str | None,
    after: tuple[int, int] | None,
    limit: int,
) -> list[Finished]:
    where = InstanceFilter(tenant_id=tenant_id, finished_before_us=before_us)
    clause = instance_clause(where, frozenset({status}))
    clause = clause.and_("(finished_us, row) > (?, ?)", *(after or (FIRST, FIRST)))
    index = "instances_by_finish" if tenant_id is None else "instances_by_tenant_finish"
    sql = (
        f"SELECT tenant_id, instance_id, row, finished_us FROM instances INDEXED BY {index}"
        f" WHERE {clause.sql} ORDER BY finished_us, row LIMIT ?"
    )
    return [finished(*found) for found in connection.execute(sql, (*clause.values, limit))]


def finished(tenant_id: str, instance_id: str, row: int, finished_us: int) -> Finished:
    return Finished(tenant_id=tenant_id, instance_id=instance_id, row=row, finished_us=finished_us)


def rows_by_table(connection: Connection) -> dict[str, int]:
    """Counted by the smallest index of each table, so no large value is passed."""
    return {
        table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        for table in (INSTANCES.name, *HISTORY)
    }


def oldest_finished(connection: Connection) -> int | None:
    """When the first of all that have ended did."""
    sql = "SELECT min(finished_us) FROM instances WHERE status = ? AND finished_us IS NOT NULL"
    found = [connection.execute(sql, (status,)).fetchone()[0] for status in TERMINAL]
    return min((instant for instant in found if instant is not None), default=None)


def note(connection: Connection, name: str) -> str | None:
    found = connection.execute("SELECT text FROM notes WHERE name = ?", (name,)).fetchone()
    text: str | None = None if found is None else found[0]
    return text


def notes(connection: Connection, prefix: str) -> dict[str, str]:
    clause = with_prefix(Clause(), "name", prefix)
    sql = f"SELECT name, text FROM notes WHERE {clause.sql} ORDER BY name"
    return dict(connection.execute(sql, clause.values).fetchall())


def marker(connection: Connection) -> int:
    """The number of the newest batch that was committed."""
    found: int = connection.execute("SELECT last_batch FROM meta").fetchone()[0]
    return found
