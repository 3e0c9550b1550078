"""What goes wrong with a disk: each fault is one typed error, and loses nothing that was acknowledged."""

import resource
import sqlite3
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from runtara.errors import (
    OutcomeUnknown,
    StoreCorrupt,
    StoreError,
    StoreFailed,
    StoreFull,
    StoreReadOnly,
    StoreRefused,
    StoreUnavailable,
)
from runtara.persistence.sqlite import SqliteStore
from runtara.persistence.sqlite.damage import find_damage
from runtara.persistence.sqlite.faults import commit_error, store_error
from runtara.records import SettleWait, WaitOutcome
from runtara.testing.samples import TENANT, checkpoint, creation, finished, instance, unit
from tests.sqlite_stores import opened, other_process

PAGE = 4096


def big(row: int, revision: int) -> Any:
    return unit(row, revision, checkpoint(revision, state=b"%d" % revision * 20_000))


async def newest(store: SqliteStore, row: int) -> int:
    loaded = await store.load(TENANT, f"i{row}", 1)
    assert loaded is not None
    return loaded.revision


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_BUSY, StoreUnavailable),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, StoreUnavailable),
        (sqlite3.SQLITE_LOCKED, StoreUnavailable),
        (sqlite3.SQLITE_FULL, StoreFull),
        (sqlite3.SQLITE_READONLY, StoreReadOnly),
        (sqlite3.SQLITE_READONLY_DBMOVED, StoreReadOnly),
        (sqlite3.SQLITE_CANTOPEN, StoreReadOnly),
        (sqlite3.SQLITE_IOERR_FSYNC, StoreFailed),
        (sqlite3.SQLITE_IOERR_READ, StoreFailed),
        (sqlite3.SQLITE_CORRUPT, StoreCorrupt),
        (sqlite3.SQLITE_NOTADB, StoreCorrupt),
        (sqlite3.SQLITE_CONSTRAINT_UNIQUE, StoreRefused),
        (sqlite3.SQLITE_TOOBIG, StoreRefused),
        (sqlite3.SQLITE_MISMATCH, StoreRefused),
        (sqlite3.SQLITE_ERROR, StoreFailed),
    ],
)
def test_each_code_has_its_error(code: int, kind: type[StoreError]) -> None:
    assert type(store_error(with_code(code), "a.db")) is kind


@pytest.mark.parametrize(
    "error",
    [OverflowError(), sqlite3.ProgrammingError("binding"), sqlite3.InterfaceError("binding")],
)
def test_a_value_that_cannot_be_bound_is_refused(error: Exception) -> None:
    assert type(store_error(error, "a.db")) is StoreRefused


def test_what_is_not_the_stores_fault_is_left_alone() -> None:
    assert store_error(KeyError("x"), "a.db") is None


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_BUSY, StoreUnavailable),
        (sqlite3.SQLITE_FULL, StoreFull),
        (sqlite3.SQLITE_IOERR_FSYNC, OutcomeUnknown),
        (sqlite3.SQLITE_CORRUPT, OutcomeUnknown),
        (sqlite3.SQLITE_READONLY, OutcomeUnknown),
    ],
)
def test_at_commit_only_busy_and_full_are_known(code: int, kind: type[StoreError]) -> None:
    assert type(commit_error(with_code(code), "a.db")) is kind


def with_code(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("made up")
    error.sqlite_errorcode = code
    return error


# ---------------------------------------------------------------- full, read-only, busy


async def test_on_a_full_disk_writes_are_refused_and_reads_go_on(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row)), big(row, 2)])
        assert store.write_connection is not None
        (pages,) = store.write_connection.execute("PRAGMA page_count").fetchone()
        store.write_connection.execute(f"PRAGMA max_page_count = {pages}")
        for _ in range(3):
            with pytest.raises(StoreFull, match="the disk is full"):
                await store.apply([big(row, 3)])
            assert not store.write_connection.in_transaction
        assert await newest(store, row) == 2
        store.write_connection.execute(f"PRAGMA max_page_count = {pages + 1000}")
        await store.apply([big(row, 3)])
        assert await newest(store, row) == 3
    assert_sound(tmp_path / "a.db")


def assert_sound(path: Path) -> None:
    connection = sqlite3.connect(path)
    assert find_damage(connection) == []
    connection.close()


async def test_a_file_that_became_read_only_is_still_read(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row))])
        assert store.write_connection is not None
        store.write_connection.execute("PRAGMA query_only = 1")
        with pytest.raises(StoreReadOnly):
            await store.apply([big(row, 2)])
        with pytest.raises(StoreReadOnly):
            await store.reserve(1)
        assert await newest(store, row) == 1
        store.write_connection.execute("PRAGMA query_only = 0")
        await store.apply([big(row, 2)])
        assert await newest(store, row) == 2


INTRUDER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.readline()
"""


async def test_a_foreign_writer_makes_the_store_unavailable_until_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with opened(path) as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row))])
        with other_process(INTRUDER, str(path)):
            for _ in range(2):
                with pytest.raises(StoreUnavailable, match="another process is writing"):
                    await store.apply([big(row, 2)])
            assert await newest(store, row) == 1
        await store.apply([big(row, 2)])
        assert await newest(store, row) == 2


# ---------------------------------------------------------------- damage


async def damaged(path: Path, *, table: str) -> list[int]:
    """A store with two instances, whose page for the rows of ``table`` is overwritten."""
    async with opened(path) as store:
        row = await store.reserve(2)
        await store.apply([creation(instance(r), checkpoint(1)) for r in (row, row + 1)])
        await store.apply([big(r, n) for n in (2, 3) for r in (row, row + 1)])
    connection = sqlite3.connect(path)
    (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()
    connection.close()
    with path.open("r+b") as file:
        file.seek((root - 1) * PAGE)
        file.write(b"\xa5" * PAGE)
    return [row, row + 1]


async def test_damage_is_reported_by_load_and_what_is_whole_is_read(tmp_path: Path) -> None:
    rows = await damaged(tmp_path / "a.db", table="instances")
    async with opened(tmp_path / "a.db") as store:
        with pytest.raises(StoreCorrupt, match="the store is damaged"):
            await store.load(TENANT, f"i{rows[0]}", 10)
        for row in rows:
            found = await store.checkpoint(row, "step-3")
            assert found == checkpoint(3, state=b"3" * 20_000)


async def test_damage_of_one_value_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with opened(path) as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row)), *(big(row, n) for n in (2, 3, 4))])
    data = path.read_bytes()
    page = data.index(b"3" * 3000) // PAGE * PAGE  # in the middle of the chain of pages of revision 3
    path.write_bytes(data[:page] + b"\xff" * 4 + data[page + 4 :])  # where the chain goes on
    async with opened(path) as store:
        with pytest.raises(StoreCorrupt):
            await store.checkpoint(row, "step-3")
        for revision in (2, 4):
            found = await store.checkpoint(row, f"step-{revision}")
            assert found is not None
            assert found.state == b"%d" % revision * 20_000


async def test_after_damage_was_met_while_writing_nothing_is_written_any_more(tmp_path: Path) -> None:
    rows = await damaged(tmp_path / "a.db", table="checkpoints")
    async with opened(tmp_path / "a.db") as store:
        with pytest.raises(StoreCorrupt):
            await store.apply([big(rows[0], 4)])
        for write in (store.apply([big(rows[0], 4)]), store.reserve(1), store.maintain()):
            with pytest.raises(StoreFailed, match="must be opened again"):
                await write
        assert await store.find(TENANT, f"i{rows[0]}") == instance(rows[0])


# ---------------------------------------------------------------- errors at COMMIT


class FailingCommit:
    """A connection whose COMMIT reports an error of fsync, before or after it has committed."""

    def __init__(self, connection: sqlite3.Connection, *, committed: bool) -> None:
        self.connection = connection
        self.committed = committed

    def execute(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        if sql != "COMMIT":
            return self.connection.execute(sql, values)
        if self.committed:
            self.connection.execute(sql)
        raise with_code(sqlite3.SQLITE_IOERR_FSYNC)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("committed", [True, False])
async def test_an_unknown_commit_is_settled_by_its_number(
    committed: bool, inline: bool, tmp_path: Path
) -> None:
    async with opened(tmp_path / "a.db", inline=inline) as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row))])
        assert store.write_connection is not None
        store.write_connection = FailingCommit(store.write_connection, committed=committed)  # type: ignore[assignment]
        with pytest.raises(OutcomeUnknown):
            await store.apply([big(row, 2), big(99, 2)])  # of 99 there is no instance: it is left out
        with pytest.raises(StoreFailed):
            await store.apply([big(row, 2)])
        for _ in range(2):
            assert await store.settle() == (frozenset({99}) if committed else None)
        assert await newest(store, row) == (2 if committed else 1)
        with pytest.raises(StoreFailed):
            await store.apply([big(row, 3)])
    async with opened(tmp_path / "a.db") as store:
        assert await newest(store, row) == (2 if committed else 1)
        await store.apply([big(row, 3)])


async def test_in_memory_an_unknown_commit_is_settled_too() -> None:
    async with opened(":memory:") as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row))])
        assert await store.settle() == frozenset()
        real = store.write_connection
        assert real is not None
        store.write_connection = FailingCommit(real, committed=False)  # type: ignore[assignment]
        with pytest.raises(OutcomeUnknown):
            await store.apply([big(row, 2)])
        store.write_connection = real
        assert await store.settle() is None
        assert await newest(store, row) == 1


async def test_a_refused_batch_was_not_committed(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row), checkpoint(1))])
        assert await store.settle() == frozenset()
        with pytest.raises(StoreRefused):
            await store.apply([unit(row, 1, checkpoint(1))])
        assert await store.settle() is None


async def test_numbers_whose_commit_is_unknown_are_not_given(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as store:
        assert await store.reserve(5) == 1
        assert store.write_connection is not None
        store.write_connection = FailingCommit(store.write_connection, committed=True)  # type: ignore[assignment]
        with pytest.raises(StoreFailed):
            await store.reserve(5)
    async with opened(tmp_path / "a.db") as store:
        assert await store.reserve(5) == 11


async def test_what_waits_behind_an_unknown_commit_is_not_written(tmp_path: Path) -> None:
    refused: list[str] = []

    async def refuse(write: Callable[[], Awaitable[object]]) -> None:
        with pytest.raises(StoreError) as caught:
            await write()
        refused.append(type(caught.value).__name__)

    async with opened(tmp_path / "a.db", inline=False) as store:
        row = await store.reserve(2)
        await store.apply([creation(instance(row)), creation(finished(row + 1, 9))])
        real = store.write_connection
        assert real is not None
        store.write_connection = FailingCommit(real, committed=True)  # type: ignore[assignment]
        held = threading.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.writer.run, partial(held.wait, 10))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(refuse, lambda: store.apply([big(row, 2)]))
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(refuse, lambda: store.purge([row + 1], 10))
            nursery.start_soon(refuse, lambda: store.reserve(1))
            await trio.testing.wait_all_tasks_blocked()
            held.set()
        assert sorted(refused) == ["OutcomeUnknown", "StoreFailed", "StoreFailed"]
        assert await store.settle() == frozenset()
        assert await store.find(TENANT, f"i{row + 1}") == finished(row + 1, 9)
    async with opened(tmp_path / "a.db") as store:
        assert await store.reserve(1) == row + 2


@contextmanager
def files_may_grow_to(size: int) -> Iterator[None]:
    """A real error of write(2), from the kernel: EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_write_error_while_committing_is_unknown_and_settled(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with opened(path) as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row)), big(row, 2)])
        log_bytes = store.statistics().log_bytes
        assert log_bytes is not None
        with files_may_grow_to(log_bytes + 2 * PAGE):
            with pytest.raises(OutcomeUnknown):
                await store.apply([big(row, 3)])
            with pytest.raises(StoreFailed):
                await store.apply([big(row, 3)])
            assert await newest(store, row) == 2
        assert await store.settle() is None
        assert await newest(store, row) == 2
    async with opened(path) as store:
        await store.apply([big(row, 3)])
        assert await newest(store, row) == 3
    assert_sound(path)


# ---------------------------------------------------------------- cancellation, bugs


@pytest.mark.parametrize("inline", [True, False])
async def test_a_cancelled_apply_leaves_no_transaction_open(inline: bool, tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db", inline=inline) as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row))])
        revision = 1
        for moment in range(4):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(store.apply, [big(row, revision + 1)])
                    for _ in range(moment):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
            assert store.write_connection is not None
            assert not store.write_connection.in_transaction
            stored = await newest(store, row)
            assert stored in (revision, revision + 1)
            revision = stored
            await store.apply([big(row, revision + 1)])
            revision += 1
            assert await newest(store, row) == revision


async def test_a_bug_in_the_middle_of_a_batch_leaves_no_transaction_open(tmp_path: Path) -> None:
    nonsense: Any = "not an operation"
    async with opened(tmp_path / "a.db") as store:
        row = await store.reserve(1)
        with pytest.raises(KeyError):
            await store.apply([creation(instance(row)), unit(row, 2, nonsense)])
        assert store.write_connection is not None
        assert not store.write_connection.in_transaction
        assert await store.find(TENANT, f"i{row}") is None
        await store.apply([creation(instance(row))])


async def test_an_update_that_finds_nothing_is_refused(tmp_path: Path) -> None:
    settle = SettleWait(wait_id="none", outcome=WaitOutcome.ELAPSED, settled_us=1)
    async with opened(tmp_path / "a.db") as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row))])
        with pytest.raises(StoreRefused, match="1 rows of waits were to change, 0 were there"):
            await store.apply([unit(row, 2, settle)])
        assert await newest(store, row) == 1
