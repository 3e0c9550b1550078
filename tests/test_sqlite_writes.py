"""How rows are written: what a statement touches, and which index a question goes by."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtara.errors import StoreRefused
from runtara.persistence import rows
from runtara.persistence.sqlite import writes
from runtara.persistence.sqlite.statements import insert_sql, run_rows, update_sql
from runtara.records import (
    AcknowledgeSignal,
    Op,
    PayloadKind,
    PutPayload,
    Reason,
    SettleWait,
    Status,
    WaitOutcome,
)
from runtara.testing import samples
from runtara.testing.samples import (
    checkpoint,
    compensatable,
    creation,
    instance,
    one_of_each,
    unit,
)
from tests.sqlite_stores import new_database, opened, plan_of


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with new_database(tmp_path / "a.db") as opened:
        yield opened


def with_values(database: sqlite3.Connection) -> None:
    puts = [PutPayload(kind=kind, data=bytes([kind]) * 20_000) for kind in PayloadKind]
    writes.write(database, [creation(instance(1), *one_of_each(1), compensatable(2), *puts)])


def rows_of(database: sqlite3.Connection, sql: str) -> list[object]:
    return database.execute(sql).fetchall()


def operations(revision: int) -> list[Op]:
    """One of every kind, but the record of an instance."""
    settle = SettleWait(wait_id="wait-1", outcome=WaitOutcome.ELAPSED, settled_us=1)
    changes = (
        settle,
        samples.finish_step(1, revision),
        AcknowledgeSignal(signal_id=1, shown_us=1, acknowledged_us=1),
    )
    return [
        *one_of_each(revision),
        compensatable(revision),
        PutPayload(kind=PayloadKind.INPUT, data=b"x"),
        *changes,
    ]


@pytest.mark.parametrize("op", operations(2), ids=lambda op: type(op).__name__)
def test_nothing_is_written_for_an_instance_that_is_not_there(op: Op, database: sqlite3.Connection) -> None:
    with_values(database)
    before = children(database)
    assert writes.write(database, [unit(99, 2, op), unit(99, 3, op)]) == {99}
    with pytest.raises(StoreRefused, match="a unit creates the instance 99 without its record"):
        writes.write(database, [unit(99, 1, op, epoch=0, base=0)])
    assert children(database) == before


def children(database: sqlite3.Connection) -> dict[str, list[object]]:
    return {table: rows_of(database, f"SELECT * FROM {table}") for table in rows.HISTORY}  # noqa: S608


async def test_the_guard_reads_the_instance_in_the_transaction_that_writes(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row))])
        assert store.write_connection is not None
        statements: list[str] = []
        store.write_connection.set_trace_callback(statements.append)
        await store.apply([unit(row, 2, *operations(2)[:1])])
        begin, guard, *others = statements
        assert begin == "BEGIN IMMEDIATE", "from here on nobody else deletes the instance"
        assert guard.strip().startswith("SELECT row, epoch, revision FROM instances")
        assert [statement[:6] for statement in others] == ["INSERT", "UPDATE", "COMMIT"]


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
