"""Everything that is asked of the database: a `Question` is statements, and how to read their answers."""

from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import attrs

from runtara.limits import OPEN_STEPS
from runtara.persistence.cursors import encode_cursor
from runtara.persistence.lists import (
    OF_TENANT,
    SELECT_CHECKPOINTS,
    UNEXPLAINED,
    Clause,
    instance_clause,
    instance_listing,
    instances_sql,
    maker,
    place_of_instance,
    place_of_record,
    record_clause,
    record_listing,
    with_prefix,
)
from runtara.persistence.postgres.driver import Result, Statement
from runtara.persistence.postgres.schema import LOOK, VERSION
from runtara.persistence.postgres.statements import KINDS, identifier, statement
from runtara.persistence.postgres.values import BYTES, NUMBERS, Kind, rows
from runtara.persistence.rows import (
    APPENDED,
    COMPENSATIONS,
    ERRORS,
    INSTANCES,
    REQUESTS,
    RETRY_ATTEMPTS,
    SIGNALS,
    SPEC_COLUMNS,
    STEPS,
    WAITS,
    Row,
    Table,
    Value,
    checkpoint_record,
    known_or_stand_in,
    names,
)
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
    StepRecord,
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
    seconds: float | None = None
    """How long the answer may take, where that is longer than for others."""


def asking(
    sql: str,
    *values: Value | list[int],
    answer: Callable[[list[Row]], T],
    seconds: float | None = None,
) -> Question[T]:
    """A question of one statement; ``answer`` is given its rows."""
    return Question((statement(sql, *values),), lambda results: answer(rows(results[0])), seconds=seconds)


OF_THIS_TENANT: Final = (
    r"tenant_digest = sha256(decode(replace(?, E'\\', E'\\\\'), 'escape'))"  # the bytes of the text
)
"""In an index a tenant stands by its digest, which is never too long for one."""
THIS_INSTANCE: Final = f"{OF_THIS_TENANT} AND instance_id = ?"


def numbered(sql: str) -> str:
    """``sql`` with ``$1``, ``$2`` ... for each ``?``, and the tenant looked for by its digest."""
    first, *others = sql.replace(OF_TENANT, OF_THIS_TENANT).split("?")
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
    return one(INSTANCES, numbered(THIS_INSTANCE), tenant_id, instance_id)


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
    sql = "SELECT kind, data FROM payloads WHERE instance = $1 AND kind = ANY($2)"

    def answer(found: list[Row]) -> dict[PayloadKind, bytes]:
        return {PayloadKind(kind): data for kind, data in found}  # type: ignore[arg-type,misc]  # NOT NULL

    return asking(sql, row, sorted(kinds), answer=answer)


def compensation_data(row: int, checkpoint_id: str) -> Question[bytes | None]:
    sql = "SELECT data FROM compensations WHERE instance = $1 AND checkpoint_id = $2"

    def answer(found: list[Row]) -> bytes | None:
        data = found[0][0] if found else None
        assert data is None or isinstance(data, bytes)
        return data

    return asking(sql, row, checkpoint_id, answer=answer)


# ---------------------------------------------------------------- what an actor needs

OF_INSTANCE: Final = f'instance = (SELECT "row" FROM instances WHERE {numbered(THIS_INSTANCE)})'

NEWEST_REVISION: Final = "SELECT greatest({})".format(
    ", ".join(f"(SELECT max(revision) FROM {table.name} WHERE {OF_INSTANCE})" for table in APPENDED.values())
)

LOADING: Final = (
    f"{select_sql(INSTANCES)} WHERE {numbered(THIS_INSTANCE)}",
    NEWEST_REVISION,
    f"SELECT checkpoint_id FROM checkpoints WHERE {OF_INSTANCE} ORDER BY revision DESC LIMIT 1",
    f"{select_sql(SIGNALS)} WHERE {OF_INSTANCE} AND acknowledged_us IS NULL ORDER BY revision",
    f"{select_sql(WAITS)} WHERE {OF_INSTANCE} AND outcome IS NULL ORDER BY revision",
    f"{select_sql(COMPENSATIONS)} WHERE {OF_INSTANCE} ORDER BY revision",
    f"{select_sql(ERRORS)} WHERE {OF_INSTANCE} ORDER BY revision DESC LIMIT 1",
    f"{select_sql(STEPS)} WHERE {OF_INSTANCE} AND status = 0 ORDER BY revision DESC LIMIT {OPEN_STEPS}",
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
    _, newest, checkpoint, signals, waits, compensations, last_error, steps, *ids = results
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
        steps=all_of(STEPS, steps)[::-1],
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


def list_instances(
    where: InstanceFilter, order: InstanceOrder, page: PageRequest
) -> Question[Page[InstanceRecord]]:
    sql, values = instances_sql(where, order, page)
    listing = instance_listing(order, page)

    def answer(found: list[Row]) -> Page[InstanceRecord]:
        items = tuple(INSTANCES.listed(row) for row in found[: page.limit])
        if len(found) <= page.limit:
            return Page(items=items, next=None)
        return Page(items=items, next=encode_cursor(listing.name, place_of_instance(items[-1], order)))

    return asking(numbered(sql), *values, answer=answer)


def first_number(found: list[Row]) -> int:
    number = found[0][0]
    assert isinstance(number, int)
    return number


def counting(table: str, clause: Clause) -> Question[int]:
    sql = f"SELECT count(*) FROM {table} WHERE {clause.sql}"
    return asking(numbered(sql), *clause.values, answer=first_number)


def count_instances(where: InstanceFilter) -> Question[int]:
    return counting("instances", instance_clause(where, where.statuses))


def counts(tenant_id: str | None) -> Question[dict[Status, int]]:
    def answer(found: list[Row]) -> dict[Status, int]:
        numbers: Any = found
        return {known_or_stand_in(Status, status): count for status, count in numbers}

    clause = instance_clause(InstanceFilter(tenant_id=tenant_id), frozenset())
    sql = f"SELECT status, count(*) FROM instances WHERE {clause.sql} GROUP BY status"
    return asking(numbered(sql), *clause.values, answer=answer)


def unexplained(after_row: int, limit: int) -> Question[list[InstanceRecord]]:
    sql = f'{select_sql(INSTANCES)} WHERE {UNEXPLAINED} AND "row" > $1 ORDER BY "row" LIMIT $2'
    return asking(sql, after_row, limit, answer=lambda found: [INSTANCES.listed(row) for row in found])


def terminal(
    status: Status, before_us: int, tenant_id: str | None, after: tuple[int, int] | None, limit: int
) -> Question[list[Finished]]:
    where = InstanceFilter(tenant_id=tenant_id, finished_before_us=before_us)
    clause = instance_clause(where, frozenset({status}))
    clause = clause.and_('(finished_us, "row") > (?, ?)', *(after or (FIRST, FIRST)))
    sql = (
        f'SELECT tenant_id, instance_id, "row", finished_us FROM instances WHERE {clause.sql}'
        ' ORDER BY finished_us, "row" LIMIT ?'
    )
    return asking(
        numbered(sql), *clause.values, limit, answer=lambda found: [finished(*row) for row in found]
    )


def finished(tenant_id: Any, instance_id: Any, row: Any, finished_us: Any) -> Finished:
    return Finished(tenant_id=tenant_id, instance_id=instance_id, row=row, finished_us=finished_us)


def notes(prefix: str) -> Question[dict[str, str]]:
    clause = with_prefix(Clause(), "name", prefix)

    def answer(found: list[Row]) -> dict[str, str]:
        return {str(name): str(text) for name, text in found}

    sql = f"SELECT name, text FROM notes WHERE {numbered(clause.sql)} ORDER BY name"
    return asking(sql, *clause.values, answer=answer)


def note(name: str) -> Question[str | None]:
    def answer(found: list[Row]) -> str | None:
        return str(found[0][0]) if found else None

    return asking("SELECT text FROM notes WHERE name = $1", name, answer=answer)


CONTAINS: Final = "position(? IN c.payload) > 0"


def list_records(row: int, kind: type[R], page: PageRequest, where: RecordFilter | None) -> Question[Page[R]]:
    """One page. The server ends it where its large values reach `PAGE_BYTES`, without reading them."""
    listing = record_listing(row, kind, page)
    clause = listing.after(record_clause(row, kind, where, CONTAINS), page.cursor)
    make = maker(kind)

    def answer(found: list[Row]) -> Page[R]:
        items = tuple(make(row[:-1]) for row in found[: page.limit])
        there = found[0][-1] if found else 0
        if there == len(items):
            return Page(items=items, next=None)
        return Page(items=items, next=encode_cursor(listing.name, place_of_record(items[-1])))

    sql = within_bytes(listing.sql(clause), kind, page)
    return asking(numbered(sql), *clause.values, page.limit + 1, answer=answer)


def within_bytes(sql: str, kind: type[R], page: PageRequest) -> str:
    """The rows of ``sql`` up to the one that brings the page to `PAGE_BYTES`, and how many there were.

    ``octet_length`` reads how long a value is from the pointer to it: a value that is left out costs nothing.
    """
    columns = kinds_of_record(kind)
    called = ", ".join(f"c{at}" for at in range(len(columns)))
    sizes = [f"coalesce(octet_length(c{at}), 0)" for at, kind in enumerate(columns) if kind is not NUMBERS]
    order = f"c{APPENDED[kind].columns.index('revision')} {'DESC' if page.descending else 'ASC'}"
    window = f"ORDER BY {order} ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING"
    before = f"sum({' + '.join(sizes)}) OVER ({window})"
    return (
        f"SELECT {called}, there FROM ("
        f"SELECT {called}, {before} AS before, count(*) OVER () AS there FROM ({sql}) AS found ({called})"
        f") AS sized WHERE before IS NULL OR before < {PAGE_BYTES} ORDER BY {order}"
    )


def kinds_of_record(kind: type[R]) -> tuple[Kind, ...]:
    """Of the columns that `select_records` selects."""
    table = APPENDED[kind]
    own = tuple(KINDS[table.name][column] for column in table.columns)
    joined: dict[type, tuple[Kind, ...]] = {
        CheckpointRecord: tuple(KINDS["compensations"][column] for column in SPEC_COLUMNS),
        StepRecord: (BYTES, BYTES),
    }
    return own + joined.get(kind, ())


def count_records(row: int, kind: type[R], where: RecordFilter | None) -> Question[int]:
    return counting(f"{APPENDED[kind].name} AS c", record_clause(row, kind, where, CONTAINS))


def tables(schema: str) -> Question[Row]:
    """Asks what is in a schema: see `runtara.persistence.postgres.schema`."""
    return asking(LOOK, identifier(schema), answer=lambda found: found[0])


def version() -> Question[int]:
    return Question((VERSION,), lambda results: first_number(rows(results[0])))


def alive() -> Question[int]:
    """Asks the tables for the number of the newest batch."""
    return asking("SELECT batch FROM runtimes WHERE slot = 1", answer=first_number)
