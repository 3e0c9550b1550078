"""The write-ahead log: counted exactly, moved in time, and never without bound."""

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runtara.errors import StoreFailed
from runtara.persistence.sqlite import SqliteStore, wal
from runtara.persistence.sqlite.wal import EMPTY, LogKeeper, read_log
from runtara.persistence.store import Unit
from runtara.testing.samples import checkpoint, creation, instance, unit
from tests.sqlite_stores import opened
from tests.test_sqlite_faults import FailingCommit, with_code


def batch(rows: range, revision: int) -> list[Unit]:
    return [unit(row, revision, checkpoint(revision, state=b"x" * 100)) for row in rows]


async def with_instances(store: SqliteStore, count: int) -> range:
    row = await store.reserve(count)
    rows = range(row, row + count)
    await store.apply([creation(instance(r)) for r in rows])
    return rows


def test_a_missing_log_holds_nothing(tmp_path: Path) -> None:
    assert read_log(str(tmp_path / "none")) == EMPTY
    (tmp_path / "empty").write_bytes(b"")
    assert read_log(str(tmp_path / "empty")) == EMPTY


async def test_the_frames_are_counted_as_sqlite_counts_them(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as store:
        rows = await with_instances(store, 20)
        assert store.write_connection is not None
        for revision in range(2, 40):
            await store.apply(batch(rows, revision))
            counted = read_log(str(tmp_path / "a.db-wal")).frames
            if revision % 7 == 0:  # the log starts again after this, over older and longer remains
                answer = store.write_connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                assert answer == (0, counted, counted)


async def test_the_bound_is_never_below_what_was_written(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as store:
        assert store.log is not None
        rows = await with_instances(store, 50)
        for revision in range(2, 200):
            await store.apply(batch(rows, revision))
            large = checkpoint(1000 + revision, state=b"x" * 50_000)
            await store.apply([unit(rows[0], large.revision, large)])
            bound = store.log.waiting + store.log.written
            assert bound >= read_log(str(tmp_path / "a.db-wal")).frames


async def test_the_log_is_bounded_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wal, "CHECKPOINT_PAGES", 100)
    monkeypatch.setattr(wal, "FAR_PAGES", 400)
    largest = 0
    async with opened(tmp_path / "a.db", synchronous="OFF") as store:
        rows = await with_instances(store, 10)
        for revision in range(2, 3000):
            await store.apply(batch(rows, revision))
            await store.maintain()
            largest = max(largest, store.statistics().log_bytes or 0)
    assert largest < 200 * 4200
    assert (tmp_path / "a.db").stat().st_size > 10 * largest / 2


async def test_nothing_is_moved_before_it_is_due(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as store:
        rows = await with_instances(store, 10)
        size = (tmp_path / "a.db").stat().st_size
        for revision in range(2, 50):
            await store.apply(batch(rows, revision))
            await store.maintain()
        assert (tmp_path / "a.db").stat().st_size == size


@contextmanager
def pinning(path: Path) -> Iterator[None]:
    """A reader that stays in its transaction."""
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM instances").fetchone()
    yield
    reader.execute("COMMIT")
    reader.close()


async def test_a_reader_that_pins_the_log_is_logged_with_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wal, "CHECKPOINT_PAGES", 100)
    monkeypatch.setattr(wal, "FAR_PAGES", 400)
    path = tmp_path / "a.db"
    async with opened(path, synchronous="OFF") as store:
        rows = await with_instances(store, 10)
        with pinning(path), caplog.at_level(logging.WARNING, logger="runtara.persistence"):
            for revision in range(2, 202):
                await store.apply(batch(rows, revision))
                await store.maintain()
        log_bytes = store.statistics().log_bytes
        assert log_bytes is not None
        assert log_bytes > 400 * 4120
        messages = [record.getMessage() for record in caplog.records]
        assert 1 <= len(messages) <= log_bytes // (100 * 4120)
        assert all(f"{path}-wal holds " in message for message in messages)
        for revision in range(202, 302):
            await store.apply(batch(rows, revision))
            await store.maintain()
        assert (store.statistics().log_bytes or 0) < log_bytes / 2


async def test_an_error_while_moving_the_log_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wal, "CHECKPOINT_PAGES", 10)
    async with opened(tmp_path / "a.db") as store:
        rows = await with_instances(store, 10)
        await store.apply(batch(rows, 2))
        assert store.write_connection is not None
        store.write_connection = FailingCheckpoint(store.write_connection, committed=False)  # type: ignore[assignment]
        with pytest.raises(StoreFailed, match="the disk reported an error"):
            await store.maintain()
        with pytest.raises(StoreFailed, match="must be opened again"):
            await store.apply(batch(rows, 3))


class FailingCheckpoint(FailingCommit):
    """A connection whose checkpoints report an error of fsync."""

    def execute(self, sql: str, values: object = ()) -> sqlite3.Cursor:
        if "wal_checkpoint" in sql:
            raise with_code(sqlite3.SQLITE_IOERR_FSYNC)
        return self.connection.execute(sql)


def test_the_keeper_looks_only_when_its_bound_says_so() -> None:
    keeper = LogKeeper("a.db")
    for _ in range(10):
        keeper.note(rows=100, size=30_000)
    assert not keeper.may_be_due
    for _ in range(15):
        keeper.note(rows=100, size=30_000)
    assert keeper.may_be_due


async def test_in_memory_there_is_no_log() -> None:
    async with opened(":memory:") as store:
        assert store.log is None
        await store.maintain()
        assert store.statistics().log_bytes is None
