"""Backups: one moment of a store that works, in one file, whole or not there."""

import errno
import os
import sqlite3
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from runtara.errors import (
    StoreCorrupt,
    StoreError,
    StoreFailed,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
    ValidationError,
)
from runtara.persistence.sqlite import SqliteStore, copies
from runtara.persistence.store import PageRequest, Unit
from runtara.records import CheckpointRecord
from runtara.testing.samples import ALL_BYTES, TENANT, checkpoint, creation, instance, unit
from tests.sqlite_stores import opened
from tests.test_sqlite_faults import damaged, files_may_grow_to

INSTANCES = 5


async def filled(store: SqliteStore, count: int = INSTANCES, size: int = 5_000) -> range:
    row = await store.reserve(count)
    rows = range(row, row + count)
    await store.apply([creation(instance(r), checkpoint(1, state=ALL_BYTES * (size // 256))) for r in rows])
    return rows


def batch(rows: range, revision: int) -> list[Unit]:
    """One checkpoint of every instance."""
    return [unit(r, revision, checkpoint(revision, state=b"%d" % revision * 1000)) for r in rows]


async def revisions(store: SqliteStore, rows: range) -> set[int]:
    found = set()
    for row in rows:
        loaded = await store.load(TENANT, f"i{row}", 1)
        assert loaded is not None
        found.add(loaded.revision)
    return found


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---------------------------------------------------------------- what a copy holds


@pytest.mark.parametrize("inline", [True, False])
async def test_a_copy_is_a_store_of_its_own(inline: bool, tmp_path: Path) -> None:
    copy = tmp_path / "copies" / "a b.db"
    copy.parent.mkdir()
    async with opened(tmp_path / "a.db", inline=inline) as store:
        rows = await filled(store)
        await store.set_note("a", "text")
        size = await store.backup(str(copy))
        assert size == copy.stat().st_size > INSTANCES * 5_000
        assert names(copy.parent) == {"a b.db"}, "one file"
        assert stat.S_IMODE(copy.stat().st_mode) == 0o600
        await store.apply(batch(rows, 2))
        assert await revisions(store, rows) == {2}
    async with opened(copy) as store:
        assert await store.verify() == []
        assert await revisions(store, rows) == {1}
        assert await store.note("a") == "text"
        page = await store.list_records(rows[0], CheckpointRecord, PageRequest())
        assert page.items == (checkpoint(1, state=ALL_BYTES * 19),)
        await store.apply(batch(rows, 2))
        assert await revisions(store, rows) == {2}


async def test_a_copy_needs_no_log_and_no_writing(tmp_path: Path) -> None:
    copy = tmp_path / "copies" / "b.db"
    copy.parent.mkdir()
    async with opened(tmp_path / "a.db") as store:
        rows = await filled(store)
        await store.backup(str(copy))
    assert copy.read_bytes()[18:20] == b"\1\1", "rollback mode, in its header"
    async with opened(copy, read_only=True) as looker:
        assert await revisions(looker, rows) == {1}
        assert names(copy.parent) == {"b.db"}
    connection = sqlite3.connect(f"{copy.as_uri()}?immutable=1", uri=True)
    assert connection.execute("SELECT count(*) FROM checkpoints").fetchone() == (INSTANCES,)
    connection.close()


async def test_a_copy_can_be_made_of_a_store_in_memory(tmp_path: Path) -> None:
    async with opened(":memory:", inline=False) as store:
        rows = await filled(store)
        await store.backup(str(tmp_path / "b.db"))
        await store.apply(batch(rows, 2))
    async with opened(tmp_path / "b.db") as copy:
        assert await revisions(copy, rows) == {1}
        assert await copy.verify() == []


async def test_a_reader_makes_a_copy_beside_a_program_that_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with opened(path) as store, opened(path, read_only=True) as looker:
        rows = await filled(store)
        await looker.backup(str(tmp_path / "b.db"))
        await store.apply(batch(rows, 2))
        await looker.backup(str(tmp_path / "c.db"))
    for name, revision in (("b.db", 1), ("c.db", 2)):
        async with opened(tmp_path / name) as copy:
            assert await revisions(copy, rows) == {revision}


@pytest.mark.parametrize("name", ["a?mode=ro", "50%41.db", "'quote\"", "-x", ":memory:", "\udcff.db"])
async def test_any_file_name_will_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with opened(tmp_path / "a.db") as store:
        await filled(store)
        await store.backup(name)
    assert name in os.listdir(tmp_path)


# ---------------------------------------------------------------- while it works


async def test_a_copy_is_one_moment_of_a_store_that_is_written_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch is committed between any two steps of the copy, which would otherwise begin again each time."""
    committed = threading.Semaphore(0)
    seen: list[int] = []  # what was committed, at each step

    def looking(is_stopped: Callable[[], bool]) -> Callable[[int, int, int], object]:
        def look(status: int, remaining: int, total: int) -> None:
            seen.append(newest)
            while committed.acquire(blocking=False):
                pass
            assert committed.acquire(timeout=10)

        return look

    monkeypatch.setattr(copies, "PAGES_AT_ONCE", 20)
    monkeypatch.setattr(copies, "looking", looking)
    newest = 1
    async with opened(tmp_path / "a.db", synchronous="OFF", inline=False) as store:
        rows = await filled(store, 20, 20_000)

        async def write() -> None:
            nonlocal newest
            while True:
                await store.apply(batch(rows, newest + 1))
                newest += 1
                committed.release()
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            for number in range(3):
                path, before = tmp_path / f"{number}.db", newest
                await store.backup(str(path))
                assert len(set(seen)) > 5, "it changed all the while"
                async with opened(path) as copy:
                    [revision] = await revisions(copy, rows)
                    assert before <= revision <= seen[0] + 1, "of the moment when it began"
                    assert await copy.verify() == []
                seen.clear()
            nursery.cancel_scope.cancel()


async def test_a_store_answers_actors_and_writes_while_a_copy_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path / "a.db", inline=False) as store, trio.open_nursery() as nursery:
        rows = await filled(store)
        begun, go_on = held_copy(monkeypatch)
        nursery.start_soon(store.backup, str(tmp_path / "b.db"))
        await begun.wait()
        await store.apply(batch(rows, 2))
        assert await revisions(store, rows) == {2}
        assert not (tmp_path / "b.db").exists()
        go_on.set()
    async with opened(tmp_path / "b.db") as copy:
        assert await revisions(copy, rows) == {1}


@pytest.mark.parametrize("end", ["close", "settle"])
async def test_a_copy_is_given_up_where_the_store_is_closed_or_settled(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copies" / "b.db"
    copy.parent.mkdir()
    async with opened(tmp_path / "a.db", inline=False) as store:
        await filled(store)
        begun, go_on = held_copy(monkeypatch)

        async def back_up() -> None:
            with pytest.raises(StoreUnavailable, match="the copy was given up"):
                await store.backup(str(copy))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(back_up)
            await begun.wait()
            nursery.start_soon(getattr(store, end))
            await trio.testing.wait_all_tasks_blocked()
            go_on.set()
        assert names(copy.parent) == set()
        if end == "settle":
            monkeypatch.undo()
            await store.backup(str(copy))


def held_copy(monkeypatch: pytest.MonkeyPatch) -> tuple[trio.Event, threading.Event]:
    """The next copy tells when it has begun, and goes on when it may."""
    begun, go_on = trio.Event(), threading.Event()
    token = trio.lowlevel.current_trio_token()
    looking = copies.looking

    def held(is_stopped: Callable[[], bool]) -> Callable[[int, int, int], object]:
        look = looking(is_stopped)

        def wait_and_look(status: int, remaining: int, total: int) -> object:
            token.run_sync_soon(begun.set)
            assert go_on.wait(10)
            return look(status, remaining, total)

        return wait_and_look

    monkeypatch.setattr(copies, "PAGES_AT_ONCE", 5)
    monkeypatch.setattr(copies, "looking", held)
    return begun, go_on


# ---------------------------------------------------------------- nothing is left


async def refused(store: SqliteStore, path: Path, error: type[Exception], words: str) -> Exception:
    """A backup raises, and leaves the folder as it was; the store works on."""
    before = names(path.parent) if path.parent.exists() else None
    with pytest.raises(error, match=words) as caught:
        await store.backup(str(path))
    if before is not None:
        assert names(path.parent) == before
    await store.check()
    return caught.value


def file_at(path: Path) -> None:
    path.write_bytes(b"mine")


def broken_link_at(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("make", [file_at, Path.mkdir, broken_link_at])
async def test_what_is_there_is_never_written_over(make: Callable[[Path], object], tmp_path: Path) -> None:
    copy = tmp_path / "copies" / "b.db"
    copy.parent.mkdir()
    make(copy)
    async with opened(tmp_path / "a.db") as store:
        error = await refused(store, copy, ValidationError, "there is something at")
        assert isinstance(error, ValidationError)
        assert error.field == "path"
        await refused(store, tmp_path / "a.db", ValidationError, "there is something at")


async def test_what_comes_meanwhile_is_not_written_over_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copies" / "b.db"
    copy.parent.mkdir()
    monkeypatch.setattr(copies, "check_whole", lambda name: copy.write_bytes(b"mine"))
    async with opened(tmp_path / "a.db") as store:
        with pytest.raises(ValidationError, match="there is something at"):
            await store.backup(str(copy))
    assert names(copy.parent) == {"b.db"}
    assert copy.read_bytes() == b"mine"


@pytest.mark.parametrize("path", ["a\0b", "\ud800"])
async def test_what_is_no_path_is_refused_by_name(path: str) -> None:
    async with opened(":memory:") as store:
        with pytest.raises(ValidationError) as caught:
            await store.backup(path)
        assert caught.value.field == "path"


async def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as store:
        await refused(
            store, tmp_path / "none" / "b.db", StoreReadOnly, f"the folder {tmp_path}/none cannot be"
        )


async def test_a_damaged_store_has_no_copy(tmp_path: Path) -> None:
    copy = tmp_path / "copies" / "b.db"
    copy.parent.mkdir()
    await damaged(tmp_path / "a.db", table="checkpoints")
    async with opened(tmp_path / "a.db") as store:
        await refused(store, copy, StoreCorrupt, "what was copied is damaged: .*age")


def fails(number: int) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, StoreFull), (errno.EROFS, StoreReadOnly), (errno.EIO, StoreReadOnly)]
)
@pytest.mark.parametrize("step", ["force_file", "force_folder"])
async def test_an_error_of_the_disk_leaves_nothing(
    step: str, number: int, error: type[StoreError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copies" / "b.db"
    copy.parent.mkdir()
    async with opened(tmp_path / "a.db") as store:
        rows = await filled(store)
        monkeypatch.setattr(copies, step, fails(number))
        await refused(store, copy, error, "cannot be written")
        monkeypatch.undo()
        await store.backup(str(copy))
        await store.apply(batch(rows, 2))


async def test_a_copy_that_cannot_be_written_to_its_end_leaves_nothing(tmp_path: Path) -> None:
    copy = tmp_path / "copies" / "b.db"
    copy.parent.mkdir()
    async with opened(tmp_path / "a.db") as store:
        rows = await filled(store)
        with files_may_grow_to(100_000):
            await refused(store, copy, StoreFailed, "copying to .*: the disk reported an error")
        await store.apply(batch(rows, 2))


async def test_a_copy_has_its_name_once_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copies" / "b.db"
    copy.parent.mkdir()
    forced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        forced.append((os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), copy.exists()))
        fsync(descriptor)

    async with opened(tmp_path / "a.db") as store:
        await filled(store)
        monkeypatch.setattr(os, "fsync", noted)
        await store.backup(str(copy))
    [(file, named), (folder, named_then)] = forced
    assert (file.endswith(".partial"), named) == (True, False)
    assert (folder, named_then) == ("copies", True)
