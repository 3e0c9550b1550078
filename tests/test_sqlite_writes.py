"""How rows are written: what a statement touches, and which index a question goes by."""

import sqlite3
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest

from runtara.persistence.cursors import Place, encode_cursor
from runtara.persistence.sqlite import connection, queries, rows, schema, writes
from runtara.persistence.sqlite.statements import insert_sql, run_rows, update_sql
from runtara.persistence.store import InstanceFilter, InstanceOrder, PageRequest
from runtara.records import (
    CheckpointRecord,
    EventRecord,
    PayloadKind,
    PutPayload,
    Reason,
    Status,
)
from runtara.testing.samples import (
    TENANT,
    checkpoint,
    compensatable,
    creation,
    instance,
    one_of_each,
    unit,
)
from tests.sqlite_stores import opened


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    path = str(tmp_path / "a.db")
    schema.make_file(path)
    opened = connection.open_writer(path, 2, 0.01)
    schema.migrate(opened, path)
    yield opened
    opened.close()


def with_values(database: sqlite3.Connection) -> None:
    puts = [PutPayload(kind=kind, data=bytes([kind]) * 20_000) for kind in PayloadKind]
    writes.write(database, [creation(instance(1), *one_of_each(1), compensatable(2), *puts)])


def rows_of(database: sqlite3.Connection, sql: str) -> list[object]:
    return database.execute(sql).fetchall()


def owners(database: sqlite3.Connection, table: str) -> set[int]:
    """The instances that have rows in ``table``."""
    return {owner for (owner,) in database.execute(f"SELECT instance FROM {table}")}  # noqa: S608


APPENDED = [*(table.name for table in rows.APPENDED.values()), "compensations", "payloads"]


def test_deleting_an_instance_takes_all_that_is_its_own(database: sqlite3.Connection) -> None:
    with_values(database)
    writes.write(database, [creation(instance(2), *one_of_each(1))])
    assert all(owners(database, name) for name in APPENDED)
    database.execute("DELETE FROM instances WHERE row = 1")
    for name in APPENDED:
        assert owners(database, name) == (set() if name in ("compensations", "payloads") else {2}), name


def test_nothing_can_be_appended_to_an_instance_that_is_not_there(database: sqlite3.Connection) -> None:
    for name, table in ((t.name, t) for t in rows.APPENDED.values()):
        record = next(r for r in one_of_each(1) if rows.APPENDED[type(r)] is table)
        sql = insert_sql(name, ("instance", *table.columns), 1)
        with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
            database.execute(sql, (99, *table.values(record)))


def test_a_move_opens_no_table_but_the_instances(database: sqlite3.Connection) -> None:
    sql = writes.MOVE_INSTANCES(4)
    values = (0,) * sql.count("?")
    names = dict(database.execute("SELECT rootpage, tbl_name FROM sqlite_master").fetchall())
    program = database.execute(f"EXPLAIN {sql}", values).fetchall()
    opens = {names[step[3]] for step in program if step[1] in ("OpenRead", "OpenWrite")}
    assert opens == {"instances"}


def test_a_move_finds_its_rows_by_their_key(database: sqlite3.Connection) -> None:
    for sql in (
        writes.MOVE_INSTANCES(4),
        update_sql("waits", ("instance", "wait_id"), ("outcome",), 4),
        update_sql("signals", ("instance", "revision"), ("acknowledged_us",), 4),
        update_sql("compensations", ("instance", "checkpoint_id"), ("state",), 4),
        update_sql("compensation_attempts", ("instance", "checkpoint_id", "attempt"), ("success",), 4),
    ):
        plan = plan_of(database, sql, (0,) * sql.count("?"))
        assert "SEARCH" in plan, plan
        assert "SCAN v" in plan, plan


def plan_of(database: sqlite3.Connection, sql: str, values: tuple[object, ...]) -> str:
    steps = database.execute(f"EXPLAIN QUERY PLAN {sql}", values).fetchall()
    return "; ".join(step[3] for step in steps)


async def test_large_values_keep_their_rows_when_the_status_moves(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as store:
        row = await store.reserve(1)
        puts = [PutPayload(kind=kind, data=bytes([kind]) * 20_000) for kind in PayloadKind]
        await store.apply([creation(instance(row), *puts)])
        assert store.write_connection is not None
        before = rows_of(store.write_connection, "SELECT id, instance, kind, data FROM payloads")
        changes = store.write_connection.total_changes
        moved = instance(row, revision=2, status=Status.SUSPENDED, reason=Reason.SLEEPING, sleep_until_us=5)
        await store.apply([unit(row, 2, moved)])
        assert rows_of(store.write_connection, "SELECT id, instance, kind, data FROM payloads") == before
        assert store.write_connection.total_changes == changes + 2  # the row, and the batch's number


async def test_several_records_of_one_instance_are_one_update(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row))])
        assert store.write_connection is not None
        changes = store.write_connection.total_changes
        await store.apply([unit(row, n, instance(row, revision=n, attempt=n)) for n in range(2, 20)])
        assert store.write_connection.total_changes == changes + 2


@pytest.mark.parametrize("count", [0, 1, 2, 3, 127, 128, 129, 300])
def test_any_number_of_rows_is_written_once(count: int, database: sqlite3.Connection) -> None:
    writes.write(database, [creation(instance(1))])
    statements: list[str] = []
    database.set_trace_callback(statements.append)
    table = rows.CHECKPOINTS
    values = [(1, *table.values(checkpoint(n))) for n in range(1, count + 1)]
    changed = run_rows(database, lambda n: insert_sql("checkpoints", ("instance", *table.columns), n), values)
    database.set_trace_callback(None)
    assert changed == count
    assert len(statements) <= 8
    assert database.execute("SELECT count(*) FROM checkpoints").fetchone() == (count,)


def test_a_batch_of_checkpoints_is_a_few_statements(database: sqlite3.Connection) -> None:
    writes.write(database, [creation(instance(row)) for row in range(1, 101)])
    statements: list[str] = []
    database.set_trace_callback(statements.append)
    writes.write(database, [unit(row, 2, checkpoint(2)) for row in range(1, 101)])
    database.set_trace_callback(None)
    assert len(statements) == 4, "the guards, and 64 + 32 + 4 rows"


# ---------------------------------------------------------------- questions go by an index

LISTS = [
    (InstanceFilter(), InstanceOrder.CREATED, "instances_by_creation"),
    (InstanceFilter(tenant_id=TENANT), InstanceOrder.CREATED, "instances_by_tenant"),
    (
        InstanceFilter(tenant_id=TENANT, statuses=frozenset({Status.RUNNING})),
        InstanceOrder.CREATED,
        "instances_by_status",
    ),
    (InstanceFilter(), InstanceOrder.FINISHED, "instances_by_finish"),
    (InstanceFilter(tenant_id=TENANT), InstanceOrder.FINISHED, "instances_by_tenant_finish"),
]


class Asked(Exception):
    """Ends a question once its SQL is known."""


@attrs.define
class Listener:
    """A connection that tells the plan of the first statement it is asked to run."""

    database: sqlite3.Connection

    def execute(self, sql: str, values: tuple[object, ...] = ()) -> None:
        raise Asked(plan_of(self.database, sql, values))


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize(("where", "order", "index"), LISTS)
def test_a_list_goes_by_its_index_and_sorts_nothing(
    where: InstanceFilter, order: InstanceOrder, index: str, descending: bool, database: sqlite3.Connection
) -> None:
    name = f"instances/{order.value}/{'desc' if descending else 'asc'}"
    for cursor in (None, encode_cursor(name, Place(5, 5))):
        page = PageRequest(cursor=cursor, descending=descending)
        with pytest.raises(Asked) as asked:
            queries.list_instances(Listener(database), where, order, page)  # type: ignore[arg-type]
        plan = str(asked.value)
        assert f"INDEX {index}" in plan, plan
        assert "TEMP B-TREE" not in plan, plan


@pytest.mark.parametrize("kind", [CheckpointRecord, EventRecord])
def test_records_are_listed_by_their_index(kind: type, database: sqlite3.Connection) -> None:
    with pytest.raises(Asked) as asked:
        queries.list_records(Listener(database), 1, kind, PageRequest(), None)  # type: ignore[arg-type]
    plan = str(asked.value)
    assert "SEARCH c USING INDEX" in plan, plan
    assert "TEMP B-TREE" not in plan, plan


def test_what_is_due_goes_by_its_index(database: sqlite3.Connection) -> None:
    listener: Any = Listener(database)
    for question, index in (
        (partial(queries.due, listener, 5, (1, 1), 10), "instances_due"),
        (partial(queries.running, listener, 5, 1, 10), "instances_running"),
    ):
        with pytest.raises(Asked) as asked:
            question()
        plan = str(asked.value)
        assert index in plan, plan
        assert "TEMP B-TREE" not in plan, plan


def test_pending_and_open_rows_have_small_indexes(database: sqlite3.Connection) -> None:
    pending = "SELECT * FROM signals WHERE instance = 1 AND acknowledged_us IS NULL ORDER BY revision"
    still_open = "SELECT * FROM waits WHERE instance = 1 AND outcome IS NULL ORDER BY revision"
    for sql, index in ((pending, "signals_pending"), (still_open, "waits_open")):
        plan = plan_of(database, sql, ())
        assert f"INDEX {index}" in plan, plan
        assert "TEMP B-TREE" not in plan, plan


def test_loading_scans_nothing(database: sqlite3.Connection) -> None:
    plan = plan_of(database, queries.NEWEST_REVISION, (1,))
    assert plan.count("SEARCH") == len(rows.APPENDED)
    assert "SCAN" not in plan.replace("SCAN CONSTANT ROW", "")
