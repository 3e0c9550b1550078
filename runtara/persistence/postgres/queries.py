"""Everything that is asked of the database: a `Question` is statements, and how to read their answers.

Every list is a keyset page: ``(order's value, key)`` is compared with where the last page ended, and an
index gives the rows in that order, so a page costs what it holds.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import attrs

from runtara.errors import ValidationError
from runtara.persistence.cursors import Place, decode_cursor, encode_cursor
from runtara.persistence.postgres.driver import Result, Statement
from runtara.persistence.postgres.statements import names, numbers, statement
from runtara.persistence.postgres.values import Row, Value, rows
from runtara.persistence.sqlite.queries import direction, place_of_record, text_above
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
    Table,
    checkpoint_record,
)
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
    WaitRecord,
)

A = TypeVar("A")
T = TypeVar("T")

FIRST: Final = -(2**63)
"""Below every instant and key."""


@attrs.frozen
class Question(Generic[T]):
    """Statements for one trip, and what their results mean."""

    statements: tuple[Statement, ...]
    answer: Callable[[Sequence[Result]], T]
    consistent: bool = False
    """Whether all statements must see the same moment."""


def asking(sql: str, *values: Value, answer: Callable[[list[Row]], T]) -> Question[T]:
    """A question of one statement; ``answer`` is given its rows."""
    return Question((statement(sql, *values),), lambda results: answer(rows(results[0])))


@attrs.frozen
class Clause:
    """A condition in SQL, with a ``?`` for each of its values; without any, always true."""

    parts: tuple[str, ...] = ()
    values: tuple[Value, ...] = ()

    def and_(self, part: str, *values: Value) -> "Clause":
        return Clause((*self.parts, part), (*self.values, *values))

    @property
    def sql(self) -> str:
        """With ``$1``, ``$2`` ... for the values."""
        first, *others = (" AND ".join(self.parts) or "true").split("?")
        return first + "".join(f"${at}{other}" for at, other in enumerate(others, 1))


def select_sql(table: Table[A]) -> str:
    return f"SELECT {names(table.columns)} FROM {table.name}"


def first_of(table: Table[A], result: Result) -> A | None:
    return next(iter(all_of(table, result)), None)


def all_of(table: Table[A], result: Result) -> tuple[A, ...]:
    return tuple(table.record(row) for row in rows(result))


def one(table: Table[A], where: str, *values: Value) -> Question[A | None]:
    """The record that ``where`` names, or None."""

    def answer(results: Sequence[Result]) -> A | None:
        return first_of(table, results[0])

    return Question((statement(f"{select_sql(table)} WHERE {where} LIMIT 1", *values),), answer)


# ---------------------------------------------------------------- one thing


def find(tenant_id: str, instance_id: str) -> Question[InstanceRecord | None]:
    return one(INSTANCES, "tenant_id = $1 AND instance_id = $2", tenant_id, instance_id)


SELECT_CHECKPOINTS: Final = (
    f"SELECT {', '.join(f'c.{name}' for name in CHECKPOINTS.columns)}, "
    + ", ".join(f'k."{name}"' for name in SPEC_COLUMNS)
    + " FROM checkpoints AS c LEFT JOIN compensations AS k"
    + " ON k.instance = c.instance AND k.checkpoint_id = c.checkpoint_id"
)


def checkpoint(row: int, checkpoint_id: str) -> Question[CheckpointRecord | None]:
    sql = f"{SELECT_CHECKPOINTS} WHERE c.instance = $1 AND c.checkpoint_id = $2"
    return asking(
        sql, row, checkpoint_id, answer=lambda found: checkpoint_record(found[0]) if found else None
    )


def wait(row: int, wait_id: str) -> Question[WaitRecord | None]:
    return one(WAITS, "instance = $1 AND wait_id = $2", row, wait_id)


def request(row: int, request_id: str) -> Question[RequestRecord | None]:
    return one(REQUESTS, "instance = $1 AND request_id = $2", row, request_id)


def signal(row: int, signal_id: int) -> Question[SignalRecord | None]:
    return one(SIGNALS, "instance = $1 AND revision = $2", row, signal_id)


def error(row: int, error_id: int) -> Question[ErrorRecord | None]:
    return one(ERRORS, "instance = $1 AND revision = $2", row, error_id)


def attempt(row: int, checkpoint_id: str, number: int) -> Question[RetryAttemptRecord | None]:
    where = "instance = $1 AND checkpoint_id = $2 AND attempt = $3"
    return one(RETRY_ATTEMPTS, where, row, checkpoint_id, number)


def payloads(row: int, kinds: frozenset[PayloadKind]) -> Question[dict[PayloadKind, bytes]]:
    sql = "SELECT kind, data FROM payloads WHERE instance = ANY($1) AND kind = ANY($2)"

    def answer(results: Sequence[Result]) -> dict[PayloadKind, bytes]:
        found: dict[PayloadKind, bytes] = {}
        for kind, data in rows(results[0]):
            assert isinstance(kind, int)
            assert isinstance(data, bytes)
            found[PayloadKind(kind)] = data
        return found

    return Question((numbers(sql, [row], sorted(kinds)),), answer)


def compensation_data(row: int, checkpoint_id: str) -> Question[bytes | None]:
    sql = "SELECT data FROM compensations WHERE instance = $1 AND checkpoint_id = $2"

    def answer(found: list[Row]) -> bytes | None:
        data = found[0][0] if found else None
        assert data is None or isinstance(data, bytes)
        return data

    return asking(sql, row, checkpoint_id, answer=answer)


# ---------------------------------------------------------------- what an actor needs

OF_INSTANCE: Final = 'instance = (SELECT "row" FROM instances WHERE tenant_id = $1 AND instance_id = $2)'

NEWEST_REVISION: Final = "SELECT greatest({})".format(
    ", ".join(f"(SELECT max(revision) FROM {table.name} WHERE {OF_INSTANCE})" for table in APPENDED.values())
)

LOADING: Final = (
    f"{select_sql(INSTANCES)} WHERE tenant_id = $1 AND instance_id = $2",
    NEWEST_REVISION,
    f"SELECT checkpoint_id FROM checkpoints WHERE {OF_INSTANCE} ORDER BY revision DESC LIMIT 1",
    f"{select_sql(SIGNALS)} WHERE {OF_INSTANCE} AND acknowledged_us IS NULL ORDER BY revision",
    f"{select_sql(WAITS)} WHERE {OF_INSTANCE} AND outcome IS NULL ORDER BY revision",
    f"{select_sql(COMPENSATIONS)} WHERE {OF_INSTANCE} ORDER BY revision",
    f"{select_sql(ERRORS)} WHERE {OF_INSTANCE} ORDER BY revision DESC LIMIT 1",
)
KNOWN_IDS: Final = tuple(
    f"SELECT {column} FROM {table} WHERE {OF_INSTANCE} LIMIT $3"
    for table, column in (
        ("checkpoints", "checkpoint_id"),
        ("waits", "wait_id"),
        ("requests", "request_id"),
    )
)


def load(tenant_id: str, instance_id: str, known: int) -> Question[Loaded | None]:
    """One consistent picture, in one trip."""

    def answer(results: Sequence[Result]) -> Loaded | None:
        record = first_of(INSTANCES, results[0])
        return None if record is None else loaded(record, results, known)

    statements = (
        *(statement(sql, tenant_id, instance_id) for sql in LOADING),
        *(statement(sql, tenant_id, instance_id, known + 1) for sql in KNOWN_IDS),
    )
    return Question(statements, answer, consistent=True)


def loaded(record: InstanceRecord, results: Sequence[Result], known: int) -> Loaded:
    _, newest, checkpoint, signals, waits, compensations, last_error, *ids = results
    revision = rows(newest)[0][0] or 0
    checkpoint_id = next((name for (name,) in rows(checkpoint)), None)
    assert isinstance(revision, int)
    assert checkpoint_id is None or isinstance(checkpoint_id, str)
    checkpoint_ids, wait_ids, request_ids = (id_set(result, known) for result in ids)
    return Loaded(
        record=record,
        revision=max(record.revision, revision),
        checkpoint_id=checkpoint_id,
        signals=all_of(SIGNALS, signals),
        waits=all_of(WAITS, waits),
        compensations=all_of(COMPENSATIONS, compensations),
        last_error=first_of(ERRORS, last_error),
        checkpoint_ids=checkpoint_ids,
        wait_ids=wait_ids,
        request_ids=request_ids,
    )


def id_set(result: Result, known: int) -> frozenset[str] | None:
    if result.ntuples > known:
        return None
    return frozenset(str(name) for (name,) in rows(result))


# ---------------------------------------------------------------- time

DUE_COLUMNS: Final = 'tenant_id, instance_id, "row", epoch'


def due(until_us: int, after: tuple[int, int] | None, limit: int) -> Question[list[Due]]:
    sql = (
        f"SELECT {DUE_COLUMNS}, due_us FROM instances"
        ' WHERE due_us <= $1 AND (due_us, "row") > ($2, $3) ORDER BY due_us, "row" LIMIT $4'
    )
    return asking(sql, until_us, *(after or (FIRST, FIRST)), limit, answer=due_records)


def running(before_epoch: int, after_row: int, limit: int) -> Question[list[Due]]:
    sql = (
        f"SELECT {DUE_COLUMNS}, 0::bigint FROM instances"
        ' WHERE status = 2 AND epoch < $1 AND "row" > $2 ORDER BY "row" LIMIT $3'
    )
    return asking(sql, before_epoch, after_row, limit, answer=due_records)


def due_records(found: list[Row]) -> list[Due]:
    return [due_record(*row) for row in found]


def due_record(tenant_id: Any, instance_id: Any, row: Any, epoch: Any, deadline_us: Any) -> Due:
    return Due(tenant_id=tenant_id, instance_id=instance_id, row=row, epoch=epoch, deadline_us=deadline_us)


# ---------------------------------------------------------------- lists


@attrs.frozen(kw_only=True)
class Listing:
    """A list in one order: what to select, and the columns that order it."""

    name: str
    """Of this very list, in its cursors."""
    select: str
    value: str
    key: str | None
    """Breaks ties; None where a value occurs once."""
    descending: bool

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.value,) if self.key is None else (self.value, self.key)

    def page(self, where: Clause, page: PageRequest) -> Statement:
        """One row more than asked for is read, to know whether the page is the last."""
        clause = where if page.cursor is None else self.after(where, decode_cursor(self.name, page.cursor))
        way = "DESC" if self.descending else "ASC"
        order = ", ".join(f"{column} {way}" for column in self.columns)
        last = f"${len(clause.values) + 1}"
        sql = f"{self.select} WHERE {clause.sql} ORDER BY {order} LIMIT {last}"
        return statement(sql, *clause.values, page.limit + 1)

    def after(self, where: Clause, place: Place) -> Clause:
        sign = "<" if self.descending else ">"
        if self.key is None:
            return where.and_(f"{self.value} {sign} ?", place.value)
        return where.and_(f"({self.value}, {self.key}) {sign} (?, ?)", place.value, place.key)


def paging(
    listing: Listing,
    where: Clause,
    page: PageRequest,
    make: Callable[[Row], A],
    place_of: Callable[[A], Place],
) -> Question[Page[A]]:
    def answer(results: Sequence[Result]) -> Page[A]:
        found = rows(results[0])
        items = tuple(make(row) for row in found[: page.limit])
        more = len(found) > page.limit
        return Page(items=items, next=encode_cursor(listing.name, place_of(items[-1])) if more else None)

    return Question((listing.page(where, page),), answer)


def list_instances(
    where: InstanceFilter, order: InstanceOrder, page: PageRequest
) -> Question[Page[InstanceRecord]]:
    value = "created_us" if order is InstanceOrder.CREATED else "finished_us"
    clause = instance_clause(where)
    if order is InstanceOrder.FINISHED:
        clause = clause.and_("finished_us IS NOT NULL")
    listing = Listing(
        name=f"instances/{order.value}/{direction(page)}",
        select=select_sql(INSTANCES),
        value=value,
        key='"row"',
        descending=page.descending,
    )

    def place_of(record: InstanceRecord) -> Place:
        return Place(int(getattr(record, value)), record.row)

    return paging(listing, clause, page, INSTANCES.record, place_of)


def first_number(found: list[Row]) -> int:
    number = found[0][0]
    assert isinstance(number, int)
    return number


def counting(table: str, clause: Clause) -> Question[int]:
    return asking(f"SELECT count(*) FROM {table} WHERE {clause.sql}", *clause.values, answer=first_number)


def count_instances(where: InstanceFilter) -> Question[int]:
    return counting("instances", instance_clause(where))


def instance_clause(where: InstanceFilter) -> Clause:
    clause = Clause()
    if where.tenant_id is not None:
        clause = clause.and_("tenant_id = ?", where.tenant_id)
    if where.statuses:
        places = ", ".join("?" * len(where.statuses))
        clause = clause.and_(f"status IN ({places})", *sorted(where.statuses))
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


def list_records(row: int, kind: type[R], page: PageRequest, where: EventFilter | None) -> Question[Page[R]]:
    table: Table[R] = APPENDED[kind]
    listing = Listing(
        name=f"{table.name}/{row}/{direction(page)}",
        select=SELECT_CHECKPOINTS if kind is CheckpointRecord else f"{select_sql(table)} AS c",
        value="c.revision",
        key=None,
        descending=page.descending,
    )
    make: Callable[[Row], R] = table.record
    if kind is CheckpointRecord:
        make = checkpoint_record  # type: ignore[assignment]  # R is CheckpointRecord here
    return paging(listing, record_clause(row, kind, where), page, make, place_of_record)


def count_records(row: int, kind: type[R], where: EventFilter | None) -> Question[int]:
    return counting(f"{APPENDED[kind].name} AS c", record_clause(row, kind, where))


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


def alive() -> Question[int]:
    """Asks the tables for the number of the newest batch."""
    return asking("SELECT batch FROM runtimes WHERE slot = 1", answer=first_number)
