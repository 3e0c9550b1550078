"""Opening a SQLite store: settings, versions, and files that are not ours."""

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from runtara.errors import (
    StoreCorrupt,
    StoreFailed,
    StoreNotFound,
    StoreReadOnly,
    StoreTooNew,
    StoreTooOld,
    ValidationError,
)
from runtara.persistence.sqlite import connection, schema
from runtara.persistence.sqlite.schema import APPLICATION_ID, Migration
from runtara.testing.samples import TENANT, creation, instance, unit
from tests.sqlite_stores import ROOT, opened


def pragma(connection: sqlite3.Connection | None, name: str) -> object:
    assert connection is not None
    return connection.execute(f"PRAGMA {name}").fetchone()[0]


async def fill(path: Path) -> int:
    async with opened(path) as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row))])
        return row


LEVELS = [("OFF", 0), ("NORMAL", 1), ("FULL", 2), ("EXTRA", 3), ("full", 2)]


@pytest.mark.parametrize(("word", "level"), LEVELS)
async def test_the_settings_are_what_sqlite_says(word: str, level: int, tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db", synchronous=word) as store:
        writer, reader = store.write_connection, store.reading.connection
        assert pragma(writer, "journal_mode") == "wal"
        assert pragma(writer, "synchronous") == level
        assert pragma(writer, "wal_autocheckpoint") == 0
        assert pragma(writer, "journal_size_limit") == 64 * 1024 * 1024
        assert pragma(writer, "mmap_size") == 0
        assert pragma(writer, "trusted_schema") == 0
        assert pragma(writer, "application_id") == APPLICATION_ID
        assert pragma(reader, "journal_mode") == "wal"
        for reads, cache in ((reader, -16 * 1024), (store.listing.connection, -64 * 1024)):
            assert pragma(reads, "query_only") == 1
            assert pragma(reads, "cache_size") == cache


async def test_full_is_the_default(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as store:
        assert pragma(store.write_connection, "synchronous") == 2


async def test_an_unknown_setting_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValidationError) as caught:
        async with opened(tmp_path / "a.db", synchronous="SOMETIMES"):
            pass
    assert caught.value.field == "synchronous"
    assert list(tmp_path.iterdir()) == []


def test_a_setting_that_sqlite_does_not_take_is_a_reason_not_to_start() -> None:
    with pytest.raises(StoreFailed, match="did not take PRAGMA journal_mode = wal: it says memory"):
        connection.connect(":memory:", {"journal_mode": "wal"}, 0.01)


async def test_a_new_file_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with opened(path) as store:
        await store.reserve(1)
        for name in ("a.db", "a.db-wal", "a.db-shm", "a.db-lock"):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600, name


@pytest.mark.parametrize("name", ["a b.db", "a?mode=ro", "a#b", "50%41.db", "é.db", "'quote\"", "-x"])
async def test_any_file_name_will_do(name: str, tmp_path: Path) -> None:
    row = await fill(tmp_path / name)
    assert (tmp_path / name).exists()
    async with opened(tmp_path / name) as store:
        assert await store.find(TENANT, f"i{row}") == instance(row)


# ---------------------------------------------------------------- files that are not ours


async def refused_untouched(path: Path, error: type[Exception], words: str) -> None:
    before = path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(error, match=words):
            async with opened(path, read_only=read_only):
                pass
    assert path.read_bytes() == before


async def test_a_newer_file_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    await fill(path)
    newer = sqlite3.connect(path)
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    await refused_untouched(path, StoreTooNew, "has version 99, .* it was not touched")


async def test_a_newer_version_that_is_still_in_the_log_is_refused_untouched(tmp_path: Path) -> None:
    await fill(tmp_path / "a.db")
    newer = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
    newer.execute("PRAGMA wal_autocheckpoint = 0")
    newer.execute("PRAGMA user_version = 99")
    path = tmp_path / "killed.db"
    for suffix in ("", "-wal"):
        shutil.copy(f"{tmp_path / 'a.db'}{suffix}", f"{path}{suffix}")
    newer.close()
    await refused_untouched(path, StoreTooNew, "has version 99")


async def test_what_is_no_database_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_text("dear diary, " * 1000)
    await refused_untouched(path, StoreCorrupt, "is no SQLite database")


@pytest.mark.parametrize("mode", ["delete", "wal"])
async def test_another_programs_database_is_refused_untouched(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    foreign = sqlite3.connect(path)
    foreign.execute(f"PRAGMA journal_mode = {mode}")
    foreign.execute("CREATE TABLE t (x)")
    foreign.close()
    await refused_untouched(path, StoreCorrupt, "another program's database")


async def test_an_empty_file_is_a_new_store(tmp_path: Path) -> None:
    (tmp_path / "a.db").touch()
    row = await fill(tmp_path / "a.db")
    assert row == 1


async def test_a_file_cut_short_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    await fill(path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(StoreCorrupt):
        async with opened(path) as store:
            await store.find(TENANT, "i1")


# ---------------------------------------------------------------- folders


async def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreReadOnly, match=f"the folder {tmp_path}/none cannot be written"):
        async with opened(tmp_path / "none" / "a.db"):
            pass


async def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreReadOnly):
        async with opened(tmp_path):
            pass


NOBODY = """
import os, sys, trio
from runtara.errors import StoreReadOnly
from runtara.executor import InlineExecutor
from runtara.persistence.sqlite import open_sqlite

async def main():
    executor = InlineExecutor()
    try:
        async with open_sqlite(sys.argv[1], writer=executor, reader=executor):
            print("opened")
    except StoreReadOnly as error:
        print(error)

if os.getuid() == 0:  # to root, every folder is writable
    os.setgid(65534)
    os.setuid(65534)
trio.run(main)
"""


@pytest.mark.parametrize("existing", [False, True])
async def test_a_folder_that_may_not_be_written_is_named(existing: bool) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        if existing:
            await fill(folder / "a.db")
            (folder / "a.db").chmod(0o644)
            (folder / "a.db-lock").chmod(0o644)
        folder.chmod(0o555)
        command = [sys.executable, "-c", NOBODY, str(folder / "a.db")]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert said.startswith(f"the folder {folder} cannot be written"), said
    finally:
        folder.chmod(0o755)
        shutil.rmtree(folder)


# ---------------------------------------------------------------- reading only


async def test_a_reader_may_look_while_a_runtime_writes(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with opened(path) as store, opened(path, read_only=True) as looker:
        row = await store.reserve(1)
        await store.apply([creation(instance(row))])
        assert await looker.find(TENANT, f"i{row}") == instance(row)
        await store.apply([unit(row, 2, instance(row, revision=2))])
        assert await looker.find(TENANT, f"i{row}") == instance(row, revision=2)
        for write in (looker.apply([]), looker.apply([unit(row, 3)]), looker.reserve(1), looker.maintain()):
            with pytest.raises(StoreReadOnly, match="opened for reading only"):
                await write


async def test_a_reader_makes_no_file(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound, match="there is no store at"):
        async with opened(tmp_path / "a.db", read_only=True):
            pass
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- migrations


def test_migrations_are_numbered_without_gaps() -> None:
    assert [m.number for m in schema.migrations()] == list(range(1, schema.newest_version() + 1))


def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    schema.make_file(path)
    writer = connection.open_writer(path, 2, 0.01)
    try:
        with pytest.raises(sqlite3.OperationalError):
            schema.run_migration(writer, Migration(1, "CREATE TABLE t (x); CREATE TABLE t (x);"))
        assert not writer.in_transaction
        assert writer.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
        assert pragma(writer, "application_id") == 0
        schema.migrate(writer, path)
        assert pragma(writer, "user_version") == schema.newest_version()
    finally:
        writer.close()


def test_migrations_run_once(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    schema.make_file(path)
    writer = connection.open_writer(path, 2, 0.01)
    try:
        schema.migrate(writer, path)
        writer.execute("UPDATE meta SET next_number = 77")
        schema.migrate(writer, path)
        assert writer.execute("SELECT next_number FROM meta").fetchone() == (77,)
    finally:
        writer.close()


async def test_a_reader_asks_for_the_migration_of_an_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(tmp_path / "a.db")
    more = [*schema.migrations(), Migration(schema.newest_version() + 1, "CREATE TABLE t (x);")]
    monkeypatch.setattr(schema, "migrations", lambda: more)
    with pytest.raises(StoreTooOld, match="open it for writing once"):
        async with opened(tmp_path / "a.db", read_only=True):
            pass
    async with opened(tmp_path / "a.db") as store:
        assert pragma(store.write_connection, "user_version") == more[-1].number


async def test_in_memory_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with opened(":memory:", inline=False) as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row))])
        assert await store.find(TENANT, f"i{row}") == instance(row)
        assert store.statistics().file_bytes is None
    assert os.listdir(tmp_path) == []
