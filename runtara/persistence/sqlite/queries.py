"""Everything that is asked of the database: one function for each question, all of them plain reads.

Every list is a keyset page: ``(order's value, key)`` is compared with where the last page ended, and an
index gives the rows in that order, so a page costs what it holds.
"""

import sqlite3
from collections.abc import Callable
from typing import Final, TypeVar

import attrs

from runtara.errors import ValidationError
from runtara.persistence.cursors import Place, decode_cursor, encode_cursor
from runtara.persistence.sqlite.rows import (
    APPENDED,
    CHECKPOINTS,
    COMPENSATIONS,
    ERRORS,
    INSTANCES,
    REQUESTS,
    RETRY_ATTEMPTS,
    SIGNALS,
    SPEC_COLUMNS,
    WAITS,
    Row,
    Table,
    Value,
    checkpoint_record,
)
from runtara.persistence.sqlite.statements import names
from runtara.persistence.store import (
    Due,
    EventFilter,
    InstanceFilter,
    InstanceOrder,
    Loaded,
    Page,
    PageRequest,
    R,
)
from runtara.records import (
    CheckpointRecord,
    ErrorRecord,
    EventRecord,
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


@attrs.frozen
class Clause:
    """A condition in SQL and its values; without any, always true."""

    parts: tuple[str, ...] = ()
    values: tuple[Value, ...] = ()

    def and_(self, part: str, *values: Value) -> "Clause":
        return Clause((*self.parts, part), (*self.values, *values))

    @property
    def sql(self) -> str:
        return " AND ".join(self.parts) or "true"


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


SELECT_CHECKPOINTS: Final = (
    f"SELECT {', '.join(f'c.{name}' for name in CHECKPOINTS.columns)}, "
    + ", ".join(f'k."{name}"' for name in SPEC_COLUMNS)
    + " FROM checkpoints AS c LEFT JOIN compensations AS k"
    + " ON k.instance = c.instance AND k.checkpoint_id = c.checkpoint_id"
)


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
    sql = f"SELECT kind, data FROM payloads WHERE instance = ? AND kind IN ({marks(kinds)})"
    return {PayloadKind(kind): data for kind, data in connection.execute(sql, (row, *kinds))}


def compensation_data(connection: Connection, row: int, checkpoint_id: str) -> bytes | None:
    sql = "SELECT data FROM compensations WHERE instance = ? AND checkpoint_id = ?"
    found = connection.execute(sql, (row, checkpoint_id)).fetchone()
    data: bytes | None = None if found is None else found[0]
    return data


def marks(values: frozenset[A]) -> str:
    return ", ".join("?" * len(values))


# ---------------------------------------------------------------- what an actor needs

NEWEST_REVISION: Final = "SELECT max({})".format(
    ", ".join(
        f"ifnull((SELECT max(revision) FROM {table.name} WHERE instance = ?1), 0)"
        for table in APPENDED.values()
    )
)


def load(connection: Connection, tenant_id: str, instance_id: str, known: int) -> Loaded | None:
    """One consistent picture: all of it is read in one transaction."""
    connection.execute("BEGIN")
    try:
        record = find(connection, tenant_id, instance_id)
        return None if record is None else load_rest(connection, record, known)
    finally:
        if connection.in_transaction:
            connection.execute("COMMIT")


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
        f"SELECT {DUE_COLUMNS}, 0 FROM instances"
        " WHERE status = 2 AND epoch < ? AND row > ? ORDER BY row LIMIT ?"
    )
    return [due_record(found) for found in connection.execute(sql, (before_epoch, after_row, limit))]


def due_record(found: tuple[str, str, int, int, int]) -> Due:
    tenant_id, instance_id, row, epoch, deadline_us = found
    return Due(tenant_id=tenant_id, instance_id=instance_id, row=row, epoch=epoch, deadline_us=deadline_us)


# ---------------------------------------------------------------- lists


@attrs.frozen(kw_only=True)
class Listing:
    """A list in one order: what to select, and the two columns that order it."""

    name: str
    """Of this very list, in its cursors."""
    select: str
    value: str
    key: str
    descending: bool

    def sql(self, where: Clause) -> str:
        way = "DESC" if self.descending else "ASC"
        return f"{self.select} WHERE {where.sql} ORDER BY {self.value} {way}, {self.key} {way} LIMIT ?"

    def after(self, where: Clause, cursor: str | None) -> Clause:
        if cursor is None:
            return where
        place = decode_cursor(self.name, cursor)
        sign = "<" if self.descending else ">"
        return where.and_(f"({self.value}, {self.key}) {sign} (?, ?)", place.value, place.key)


def fetch(
    connection: Connection,
    listing: Listing,
    where: Clause,
    page: PageRequest,
    make: Callable[[Row], A],
    place_of: Callable[[A], Place],
) -> Page[A]:
    """One page; one row more than asked for is read, to know whether it is the last."""
    clause = listing.after(where, page.cursor)
    rows = connection.execute(listing.sql(clause), (*clause.values, page.limit + 1)).fetchall()
    items = tuple(make(row) for row in rows[: page.limit])
    more = len(rows) > page.limit
    return Page(items=items, next=encode_cursor(listing.name, place_of(items[-1])) if more else None)


def list_instances(
    connection: Connection, where: InstanceFilter, order: InstanceOrder, page: PageRequest
) -> Page[InstanceRecord]:
    value = "created_us" if order is InstanceOrder.CREATED else "finished_us"
    clause = instance_clause(where)
    if order is InstanceOrder.FINISHED:
        clause = clause.and_("finished_us IS NOT NULL")
    listing = Listing(
        name=f"instances/{order.value}/{direction(page)}",
        select=select_sql(INSTANCES),
        value=value,
        key="row",
        descending=page.descending,
    )

    def place_of(record: InstanceRecord) -> Place:
        return Place(int(getattr(record, value)), record.row)

    return fetch(connection, listing, clause, page, INSTANCES.record, place_of)


def direction(page: PageRequest) -> str:
    return "desc" if page.descending else "asc"


def count_instances(connection: Connection, where: InstanceFilter) -> int:
    clause = instance_clause(where)
    sql = f"SELECT count(*) FROM instances WHERE {clause.sql}"
    count: int = connection.execute(sql, clause.values).fetchone()[0]
    return count


def instance_clause(where: InstanceFilter) -> Clause:
    clause = Clause()
    if where.tenant_id is not None:
        clause = clause.and_("tenant_id = ?", where.tenant_id)
    if where.statuses:
        statuses: frozenset[Status] = where.statuses
        clause = clause.and_(f"status IN ({marks(statuses)})", *sorted(statuses))
    if where.workflow is not None:
        clause = clause.and_("workflow = ?", where.workflow)
    if where.id_prefix:
        clause = with_prefix(clause, "instance_id", where.id_prefix)
    clause = in_range(clause, "created_us", where.created_from_us, where.created_before_us)
    return in_range(clause, "finished_us", where.finished_from_us, where.finished_before_us)


def in_range(clause: Clause, column: str, from_us: int | None, before_us: int | None) -> Clause:
    if from_us is not None:
        clause = clause.and_(f"{column} >= ?", from_us)
    if before_us is not None:
        clause = clause.and_(f"{column} < ?", before_us)
    return clause


def with_prefix(clause: Clause, column: str, prefix: str) -> Clause:
    """A literal prefix as a range: text is compared by its bytes, which is the order of code points."""
    clause = clause.and_(f"{column} >= ?", prefix)
    above = text_above(prefix)
    return clause if above is None else clause.and_(f"{column} < ?", above)


def text_above(prefix: str) -> str | None:
    """The least text above all that begin with ``prefix``; None if there is none."""
    stem = prefix.rstrip("\U0010ffff")
    if not stem:
        return None
    following = ord(stem[-1]) + 1
    if 0xD800 <= following <= 0xDFFF:  # surrogates are no characters
        following = 0xE000
    return stem[:-1] + chr(following)


def list_records(
    connection: Connection, row: int, kind: type[R], page: PageRequest, where: EventFilter | None
) -> Page[R]:
    table: Table[R] = APPENDED[kind]
    columns = SELECT_CHECKPOINTS if kind is CheckpointRecord else f"{select_sql(table)} AS c"
    listing = Listing(
        name=f"{table.name}/{row}/{direction(page)}",
        select=columns,
        value="c.revision",
        key="c.revision",
        descending=page.descending,
    )
    make: Callable[[Row], R] = checkpoint_record if kind is CheckpointRecord else table.record  # type: ignore[assignment]
    return fetch(connection, listing, record_clause(row, kind, where), page, make, place_of_record)


def place_of_record(record: R) -> Place:
    """A revision occurs once in a table, so it needs no tie-break."""
    return Place(record.revision, record.revision)


def count_records(connection: Connection, row: int, kind: type[R], where: EventFilter | None) -> int:
    clause = record_clause(row, kind, where)
    sql = f"SELECT count(*) FROM {APPENDED[kind].name} AS c WHERE {clause.sql}"
    count: int = connection.execute(sql, clause.values).fetchone()[0]
    return count


def record_clause(row: int, kind: type[R], where: EventFilter | None) -> Clause:
    clause = Clause().and_("c.instance = ?", row)
    if where is None:
        return clause
    if kind is not EventRecord:
        raise ValidationError("where", "is for events only")
    if where.type is not None:
        clause = clause.and_("c.type = ?", where.type)
    if where.subtype is not None:
        clause = clause.and_("c.subtype = ?", where.subtype)
    return in_range(clause, "c.created_us", where.created_from_us, where.created_before_us)


def marker(connection: Connection) -> int:
    """The number of the newest batch that was committed."""
    found: int = connection.execute("SELECT last_batch FROM meta").fetchone()[0]
    return found
