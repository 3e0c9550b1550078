"""The lists that a store gives, as SQL that every backend understands; a ``?`` stands for each value.

Every list is a keyset page: ``(order's value, key)`` is compared with where the last page ended, and an
index gives the rows in that order, so a page costs what it holds.

Instances are listed status by status and merged: each index that leads with a status gives its rows in
order, however rare the status is.
"""

from collections.abc import Callable
from typing import Final, TypeVar

import attrs

from runtara.errors import ValidationError
from runtara.persistence.cursors import Place, decode_cursor
from runtara.persistence.rows import (
    APPENDED,
    CHECKPOINTS,
    INSTANCES,
    SPEC_COLUMNS,
    STEPS,
    Row,
    Table,
    Value,
    checkpoint_record,
    names,
    step_record,
)
from runtara.persistence.store import (
    CheckpointFilter,
    EventFilter,
    InstanceFilter,
    InstanceOrder,
    PageRequest,
    R,
    RecordFilter,
    StepFilter,
)
from runtara.records import CheckpointRecord, EventRecord, InstanceRecord, Reason, Status, StepRecord

A = TypeVar("A")

TERMINAL: Final = tuple(status for status in Status if status.is_terminal)
EVERY_STATUS: Final = tuple(status for status in Status if status is not Status.UNKNOWN)

OF_TENANT: Final = "tenant_id = ?"
"""A backend may put a condition of its own in its place."""

UNEXPLAINED: Final = (
    f"status IN ({Status.PENDING:d}, {Status.SUSPENDED:d})"
    " AND sleep_until_us IS NULL AND awaits_client_us IS NULL"
    f" AND NOT (status = {Status.PENDING:d} AND hosted = 1)"
    f" AND NOT (status = {Status.SUSPENDED:d} AND coalesce(reason, 0) = {Reason.PAUSED:d})"
)
"""Neither a session, a dispatcher, a pause, its wake time nor its client moves the instance."""


# ---------------------------------------------------------------- conditions


@attrs.frozen
class Clause:
    """A condition, with a ``?`` for each of its values; without any, always true."""

    parts: tuple[str, ...] = ()
    values: tuple[Value, ...] = ()

    def and_(self, part: str, *values: Value) -> "Clause":
        return Clause((*self.parts, part), (*self.values, *values))

    @property
    def sql(self) -> str:
        return " AND ".join(self.parts) or "true"


def marks(count: int) -> str:
    return ", ".join("?" * count)


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


# ---------------------------------------------------------------- one list


@attrs.frozen(kw_only=True)
class Listing:
    """A list in one order: what to select, and the columns that order it."""

    name: str
    """Of this very list, in its cursors."""
    select: str
    """SELECT and FROM."""
    value: str
    key: str | None
    """Breaks ties; None where a value occurs once."""
    descending: bool

    @property
    def order(self) -> str:
        way = "DESC" if self.descending else "ASC"
        return ", ".join(f"{column} {way}" for column in (self.value, self.key) if column is not None)

    def after(self, where: Clause, cursor: str | None) -> Clause:
        """``where``, and behind the place that ``cursor`` names."""
        if cursor is None:
            return where
        place = decode_cursor(self.name, cursor)
        sign = "<" if self.descending else ">"
        if self.key is None:
            return where.and_(f"{self.value} {sign} ?", place.value)
        return where.and_(f"({self.value}, {self.key}) {sign} (?, ?)", place.value, place.key)

    def sql(self, where: Clause) -> str:
        """Its last value is how many rows to read at most."""
        return f"{self.select} WHERE {where.sql} ORDER BY {self.order} LIMIT ?"


def direction(page: PageRequest) -> str:
    return "desc" if page.descending else "asc"


# ---------------------------------------------------------------- instances


def instance_listing(order: InstanceOrder, page: PageRequest) -> Listing:
    return Listing(
        name=f"instances/{order.value}/{direction(page)}",
        select=f"SELECT {names(INSTANCES.columns)} FROM instances",
        value=value_of(order),
        key='"row"',
        descending=page.descending,
    )


def value_of(order: InstanceOrder) -> str:
    return "created_us" if order is InstanceOrder.CREATED else "finished_us"


def place_of_instance(record: InstanceRecord, order: InstanceOrder) -> Place:
    value = record.created_us if order is InstanceOrder.CREATED else record.finished_us
    assert value is not None
    return Place(value, record.row)


def instances_sql(
    where: InstanceFilter, order: InstanceOrder, page: PageRequest
) -> tuple[str, tuple[Value, ...]]:
    """One page of instances and one more row."""
    listing = instance_listing(order, page)
    branches = [
        listing.after(ordered_clause(where, order, statuses), page.cursor)
        for statuses in branches_of(where, order)
    ]
    limit = page.limit + 1
    if len(branches) == 1:
        return listing.sql(branches[0]), (*branches[0].values, limit)
    parts = (f"SELECT * FROM ({listing.sql(clause)}) AS b{at}" for at, clause in enumerate(branches))
    values = [value for clause in branches for value in (*clause.values, limit)]
    return f"{' UNION ALL '.join(parts)} ORDER BY {listing.order} LIMIT ?", (*values, limit)


def branches_of(where: InstanceFilter, order: InstanceOrder) -> list[frozenset[Status]]:
    """Sets of statuses, each of which some index gives in order; empty: all of them together."""
    statuses = sorted(where.statuses)
    if order is InstanceOrder.FINISHED:
        ended = [status for status in statuses if status.is_terminal] if statuses else list(TERMINAL)
        statuses = ended or statuses[:1]
    elif not statuses and where.workflow is not None and where.tenant_id is not None:
        statuses = list(EVERY_STATUS)
    return [frozenset({status}) for status in statuses] or [frozenset()]


def ordered_clause(where: InstanceFilter, order: InstanceOrder, statuses: frozenset[Status]) -> Clause:
    """An instance that has not ended has no place in the order of their ends."""
    clause = instance_clause(where, statuses)
    return clause.and_("finished_us IS NOT NULL") if order is InstanceOrder.FINISHED else clause


def instance_clause(where: InstanceFilter, statuses: frozenset[Status]) -> Clause:
    """``where``, with ``statuses`` in place of its own."""
    clause = Clause()
    if where.tenant_id is not None:
        clause = clause.and_(OF_TENANT, where.tenant_id)
    if len(statuses) == 1:
        clause = clause.and_("status = ?", *statuses)
    elif statuses:
        clause = clause.and_(f"status IN ({marks(len(statuses))})", *sorted(statuses))
    if where.workflow is not None:
        clause = clause.and_("workflow = ?", where.workflow)
    if where.awaits_client:
        clause = clause.and_("awaits_client_us IS NOT NULL")
    if where.id_prefix:
        clause = with_prefix(clause, "instance_id", where.id_prefix)
    clause = in_range(clause, "created_us", where.created_from_us, where.created_before_us)
    return in_range(clause, "finished_us", where.finished_from_us, where.finished_before_us)


# ---------------------------------------------------------------- records of an instance

SELECT_CHECKPOINTS: Final = (
    f"SELECT {names(CHECKPOINTS.columns, 'c.')}, {names(SPEC_COLUMNS, 'k.')}"
    " FROM checkpoints AS c LEFT JOIN compensations AS k"
    " ON k.instance = c.instance AND k.checkpoint_id = c.checkpoint_id"
)
SELECT_STEPS: Final = (
    f"SELECT {names(STEPS.columns, 'c.')}, b.payload, e.payload"
    " FROM steps AS c"
    " LEFT JOIN events AS b ON b.instance = c.instance AND b.revision = c.revision"
    " LEFT JOIN events AS e ON e.instance = c.instance AND e.revision = c.end_revision"
)


def select_records(kind: type[R]) -> str:
    """SELECT and FROM of one kind of record, called ``c``; checkpoints and steps come with what they join."""
    if kind is CheckpointRecord:
        return SELECT_CHECKPOINTS
    if kind is StepRecord:
        return SELECT_STEPS
    table: Table[R] = APPENDED[kind]
    return f"SELECT {names(table.columns, 'c.')} FROM {table.name} AS c"


def maker(kind: type[R]) -> Callable[[Row], R]:
    """How a row of `select_records` becomes a record."""
    special: dict[type, Callable[[Row], R]] = {
        CheckpointRecord: checkpoint_record,  # type: ignore[dict-item]  # only where R is that class
        StepRecord: step_record,  # type: ignore[dict-item]
    }
    table: Table[R] = APPENDED[kind]
    return special.get(kind, table.listed)


def record_listing(row: int, kind: type[R], page: PageRequest) -> Listing:
    """A revision occurs once in a table, so it needs no tie-break."""
    return Listing(
        name=f"{APPENDED[kind].name}/{row}/{direction(page)}",
        select=select_records(kind),
        value="c.revision",
        key=None,
        descending=page.descending,
    )


def place_of_record(record: R) -> Place:
    return Place(record.revision, record.revision)


def record_clause(row: int, kind: type[R], where: RecordFilter | None, contains: str) -> Clause:
    """Which records of an instance.

    Args:
        contains: The condition that ``c.payload`` holds the bytes ``?``.

    Raises:
        ValidationError: The filter is for records of another kind.
    """
    clause = Clause().and_("c.instance = ?", row)
    match where:
        case None:
            return clause
        case CheckpointFilter() if kind is CheckpointRecord:
            return in_range(clause, "c.created_us", where.created_from_us, where.created_before_us)
        case EventFilter() if kind is EventRecord:
            return event_clause(clause, where, contains)
        case StepFilter() if kind is StepRecord:
            return step_clause(clause, where)
    raise ValidationError("where", f"is not a filter for {APPENDED[kind].name}")


def event_clause(clause: Clause, where: EventFilter, contains: str) -> Clause:
    if where.type is not None:
        clause = clause.and_("c.type = ?", where.type)
    if where.subtype is not None:
        clause = clause.and_("c.subtype = ?", where.subtype)
    clause = in_scope(clause, where)
    clause = in_range(clause, "c.created_us", where.created_from_us, where.created_before_us)
    return clause if where.text is None else clause.and_(contains, where.text.encode())


def step_clause(clause: Clause, where: StepFilter) -> Clause:
    if where.statuses:
        clause = clause.and_(f"c.status IN ({marks(len(where.statuses))})", *sorted(where.statuses))
    if where.type is not None:
        clause = clause.and_("c.step_type = ?", where.type)
    if where.step_ids:
        clause = clause.and_(f"c.step_id IN ({marks(len(where.step_ids))})", *sorted(where.step_ids))
    return in_scope(clause, where)


def in_scope(clause: Clause, where: EventFilter | StepFilter) -> Clause:
    if where.scope_id is not None:
        clause = clause.and_("c.scope_id = ?", where.scope_id)
    if where.parent_scope_id is not None:
        clause = clause.and_("c.parent_scope_id = ?", where.parent_scope_id)
    return clause.and_("c.parent_scope_id IS NULL") if where.root_only else clause
