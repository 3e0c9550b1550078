"""Purging: bounded transactions, all or nothing of each, and nothing read that is not deleted."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest

from runtara.errors import StoreFailed, StoreFull, StoreReadOnly, ValidationError
from runtara.persistence.rows import HISTORY
from runtara.persistence.sqlite import SqliteStore, purge, writes
from runtara.persistence.sqlite.purge import Spending
from runtara.persistence.sqlite.wal import read_log
from runtara.persistence.store import Unit
from runtara.records import InstanceRecord, PayloadKind, PutPayload
from runtara.testing import samples
from runtara.testing.samples import TENANT, compensatable, creation, finished, instance, one_of_each, unit
from tests.sqlite_stores import new_database, opened, plan_of
from tests.test_sqlite_faults import FailingCommit, with_code

PAGE = 4096


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with new_database(tmp_path / "a.db") as opened:
        yield opened


def with_history(record: InstanceRecord, length: int = 10) -> list[Unit]:
    """An instance with rows in every table."""
    puts = [PutPayload(kind=kind, data=b"x" * 10_000) for kind in PayloadKind]
    later = (unit(record.row, n, *one_of_each(n)) for n in range(2, length + 2))
    return [creation(record, compensatable(1), *one_of_each(1)[1:], *puts), *later]


async def there(store: SqliteStore) -> dict[str, int]:
    """How many rows there are, of the tables that have any."""
    return {table: count for table, count in (await store.growth()).rows.items() if count}


# ---------------------------------------------------------------- the budget


@pytest.mark.parametrize("most", [1, 7, 50, 400])
def test_a_transaction_deletes_as_much_as_its_budget(most: int, database: sqlite3.Connection) -> None:
    for row in (1, 2, 3):
        writes.write(database, with_history(finished(row, 9), 30))
    total = sum(len(rows_of(database, table)) for table in HISTORY)
    database.execute("UPDATE payloads SET data = x''")
    assert purge.purge(database, [1, 2, 3], Spending(most)) == {1, 2, 3}
    swept = [total - count_all(database)]
    more = purge.is_left(database, {1, 2, 3})
    while more:
        before = count_all(database)
        more = purge.sweep(database, Spending(most))
        swept.append(before - count_all(database))
    assert sum(swept) == total
    assert all(count == most for count in swept[:-1])
    assert rows_of(database, "purged") == []


def rows_of(database: sqlite3.Connection, table: str) -> list[Any]:
    return database.execute(f"SELECT * FROM {table}").fetchall()  # noqa: S608


def count_all(database: sqlite3.Connection) -> int:
    return sum(len(rows_of(database, table)) for table in HISTORY)


def test_a_record_costs_one_and_one_more_for_each_page() -> None:
    spending = Spending(100)
    for size in (0, PAGE - 1, PAGE, 10 * PAGE):
        spending.spend(size)
    assert spending == Spending(left=100 - 1 - 1 - 2 - 11, deleted=4, size=12 * PAGE - 1)


def test_purged_rows_without_history_are_forgotten_within_the_budget(database: sqlite3.Connection) -> None:
    database.executemany("INSERT INTO purged VALUES (?)", ((row,) for row in range(1, 1001)))
    assert purge.sweep(database, Spending(250))
    assert len(rows_of(database, "purged")) == 1000 - 300, "a hundred at once"
    assert not purge.sweep(database, Spending(10_000))
    assert rows_of(database, "purged") == []


# ---------------------------------------------------------------- what is read


def test_measuring_a_blob_reads_none_of_its_pages(database: sqlite3.Connection, tmp_path: Path) -> None:
    """All its overflow pages are damaged, and it is measured all the same; a text is read."""
    writes.write(database, [creation(finished(1, 9), samples.checkpoint(1, state=b"\x01" * 100_000))])
    writes.write(database, [creation(finished(2, 9), samples.error(1, message="\x02" * 100_000))])
    with damaged_where(database, tmp_path / "a.db", b"\x01" * 1000, b"\x02" * 1000) as damaged:
        assert damaged.execute(purge.FIND["checkpoints"], ("[1]",)).fetchall() == [(1, 100_000)]
        with pytest.raises(sqlite3.DatabaseError):
            damaged.execute("SELECT state FROM checkpoints").fetchall()
        with pytest.raises(sqlite3.DatabaseError):
            damaged.execute(purge.FIND["errors"], ("[2]",)).fetchall()


@contextmanager
def damaged_where(database: sqlite3.Connection, path: Path, *contents: bytes) -> Iterator[sqlite3.Connection]:
    """The file, with the links of all its overflow pages that hold one of ``contents`` broken."""
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    data = bytearray(path.read_bytes())
    broken = 0
    for at in range(0, len(data), PAGE):
        if any(data[at + 4 :].startswith(content) for content in contents):
            data[at : at + 4] = b"\xff" * 4
            broken += 1
    assert broken > 20
    other = path.with_name("damaged.db")
    other.write_bytes(data)
    connection = sqlite3.connect(other)
    yield connection
    connection.close()


@pytest.mark.parametrize("text", ["", "a", "\0" * 9000, "e\u0301" * 9000, "\U0001f600\0" * 2000])
def test_a_text_is_measured_in_bytes(text: str, database: sqlite3.Connection) -> None:
    writes.write(database, [creation(finished(1, 9), samples.error(1, message=text, attributes=text))])
    [(_, size)] = database.execute(purge.FIND["errors"], ("[1]",)).fetchall()
    assert size == 2 * len(text.encode())


@pytest.mark.parametrize("table", HISTORY)
def test_history_is_found_and_deleted_by_an_index(table: str, database: sqlite3.Connection) -> None:
    for sql in (purge.FIND[table], purge.DELETE[table]):
        plan = plan_of(database, sql, ("[1, 2]",))
        assert f"SEARCH {table} USING" in plan, plan
        assert f"SCAN {table}" not in plan, plan


def test_instances_are_found_by_their_rows(database: sqlite3.Connection) -> None:
    for sql, table in ((purge.REMOVE, "instances"), (purge.FORGET, "purged")):
        plan = plan_of(database, sql, ("[1, 2]",))
        assert f"SEARCH {table} USING INTEGER PRIMARY KEY (rowid=?)" in plan, plan


# ---------------------------------------------------------------- faults


@attrs.define
class FullAt:
    """A connection for which the disk is full at one statement."""

    connection: sqlite3.Connection
    beginning: str

    def execute(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        if sql.startswith(self.beginning):
            raise with_code(sqlite3.SQLITE_FULL)
        return self.connection.execute(sql, values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)


@pytest.mark.parametrize("at", [purge.REMEMBER, *purge.DELETE.values(), purge.FORGET, "COMMIT"])
async def test_what_fails_in_the_middle_deletes_nothing(at: str, tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db", synchronous="OFF") as store:
        row = await store.reserve(1)
        await store.apply(with_history(finished(row, 9)))
        whole = await there(store)
        real = store.write_connection
        assert real is not None
        store.write_connection = FullAt(real, at)  # type: ignore[assignment]
        with pytest.raises(StoreFull):
            await store.purge([row], 10_000)
        store.write_connection = real
        assert await there(store) == whole
        assert await store.find(TENANT, f"i{row}") == finished(row, 9)
        assert await store.verify() == []
        assert (await store.purge([row], 10_000)).rows == {row}
        assert await there(store) == {}


@pytest.mark.parametrize("committed", [True, False])
async def test_an_unknown_commit_stops_the_store_and_leaves_all_or_nothing(
    committed: bool, tmp_path: Path
) -> None:
    async with opened(tmp_path / "a.db") as store:
        row = await store.reserve(2)
        await store.apply([u for r in (row, row + 1) for u in with_history(finished(r, 9))])
        whole = await there(store)
        assert store.write_connection is not None
        store.write_connection = FailingCommit(store.write_connection, committed=committed)  # type: ignore[assignment]
        with pytest.raises(StoreFailed, match="the commit failed"):
            await store.purge([row], 10_000)
        for write in (store.purge([row], 1), store.sweep(1), store.set_note("a", "b"), store.reserve(1)):
            with pytest.raises(StoreFailed, match="must be opened again"):
                await write
    async with opened(tmp_path / "a.db") as store:
        halved = {table: count // 2 for table, count in whole.items()}
        assert await there(store) == (halved if committed else whole)
        assert (await store.find(TENANT, f"i{row}") is None) is committed
        assert await store.verify() == []


async def test_a_reader_purges_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with opened(path) as store, opened(path, read_only=True) as looker:
        row = await store.reserve(1)
        await store.apply(with_history(finished(row, 9)))
        for write in (looker.purge([row], 1), looker.sweep(1), looker.set_note("a", "b")):
            with pytest.raises(StoreReadOnly, match="opened for reading only"):
                await write
        assert await looker.find(TENANT, f"i{row}") is not None


async def test_a_budget_of_nothing_is_refused_by_name() -> None:
    async with opened(":memory:") as store:
        for write in (store.purge([1], 0), store.sweep(0), store.sweep(-1)):
            with pytest.raises(ValidationError) as caught:
                await write
            assert caught.value.field == "most"


# ---------------------------------------------------------------- the log


async def test_the_bound_of_the_log_is_never_below_what_a_purge_wrote(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db", synchronous="OFF") as store:
        assert store.log is not None
        row = await store.reserve(300)
        rows = range(row, row + 300)
        await store.apply([u for r in rows for u in with_history(finished(r, r * 7919 % 1000), 1)])
        for n in range(2, 20):
            await store.apply([unit(r, n + 1, samples.event(n + 1)) for r in rows])
        for at in range(0, 300, 13):  # scattered over all pages
            batch = [rows[(at + k * 23) % 300] for k in range(10)]
            for work in (partial(store.purge, batch, 60), partial(store.sweep, 100)):
                before = store.log.look().frames  # so that what was written before does not count
                await work()
                assert store.log.written >= read_log(str(tmp_path / "a.db-wal")).frames - before > 0


async def test_purging_keeps_the_log_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtara.persistence.sqlite.wal.CHECKPOINT_PAGES", 100)
    monkeypatch.setattr("runtara.persistence.sqlite.wal.FAR_PAGES", 400)
    async with opened(tmp_path / "a.db", synchronous="OFF") as store:
        row = await store.reserve(100)
        for r in range(row, row + 100):
            await store.apply(with_history(finished(r, 9), 20))
            await store.maintain()
        largest = 0
        for r in range(row, row + 100):
            await store.purge([r], 10)
            await store.maintain()
            while await store.sweep(20):
                await store.maintain()
                largest = max(largest, store.statistics().log_bytes or 0)
        assert largest < 250 * (PAGE + 24)
        assert await there(store) == {}


async def test_the_pages_of_what_was_purged_are_used_again(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db", synchronous="OFF") as store:
        sizes = []
        for _ in range(4):
            row = await store.reserve(50)
            await store.apply([u for r in range(row, row + 50) for u in with_history(finished(r, 9))])
            assert (await store.purge(range(row, row + 50), 10_000)).children_left is False
            assert store.write_connection is not None
            sizes.append(store.write_connection.execute("PRAGMA page_count").fetchone()[0])
        assert sizes[-1] <= sizes[0] * 1.05, sizes


async def test_an_instance_that_lives_keeps_its_history_beside_a_purge(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as store:
        row = await store.reserve(2)
        await store.apply([u for r in (finished(row, 9), instance(row + 1)) for u in with_history(r)])
        before = await store.load(TENANT, f"i{row + 1}", 100)
        purged = await store.purge([row, row + 1], 3)
        while purged.children_left and await store.sweep(3):
            assert await store.load(TENANT, f"i{row + 1}", 100) == before
        assert purged.rows == {row}
