"""Restoring: the old store or the new one, whatever happens, and never a log of one beside the other."""

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtara.errors import (
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreLocked,
    StoreReadOnly,
    StoreTooNew,
    ValidationError,
)
from runtara.persistence.sqlite import SqliteStore, copies, restore
from runtara.persistence.sqlite.restore import SKIPPED, restore_sqlite
from runtara.testing.samples import TENANT, checkpoint, creation, instance, unit
from tests.sqlite_stores import opened, other_process
from tests.test_sqlite_faults import PAGE
from tests.test_sqlite_killed import kill_while_writing

OLD, NEW = 5, 3


async def fill(path: Path, revision: int) -> None:
    """A store whose first instance is at ``revision``."""
    async with opened(path) as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row))])
        for n in range(2, revision + 1):
            await store.apply([unit(row, n, checkpoint(n, state=b"%d" % n * 5_000))])


async def revision_of(path: Path) -> int:
    """Of the first instance of a sound store."""
    async with opened(path) as store:
        assert await store.verify() == []
        return await newest(store)


async def newest(store: SqliteStore) -> int:
    loaded = await store.load(TENANT, "i1", 1)
    assert loaded is not None
    return loaded.revision


async def a_backup(folder: Path) -> Path:
    """Of another store, which is at `NEW`."""
    await fill(folder / "source.db", NEW)
    async with opened(folder / "source.db") as store:
        await store.backup(str(folder / "backup.db"))
    return folder / "backup.db"


async def killed(path: Path, revision: int) -> None:
    """A store at ``revision``, most of which is in its log only: its program was killed."""
    async with opened(path.with_name("lives.db")) as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row))])
        for n in range(2, revision + 1):
            await store.apply([unit(row, n, checkpoint(n, state=b"%d" % n * 5_000))])
        for suffix in ("", "-wal"):
            shutil.copy(f"{path.with_name('lives.db')}{suffix}", f"{path}{suffix}")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder for the store alone."""
    folder = tmp_path / "home"
    folder.mkdir()
    return folder / "a.db"


# ---------------------------------------------------------------- what comes back


async def test_a_backup_becomes_a_store(home: Path, tmp_path: Path) -> None:
    backup = await a_backup(tmp_path)
    before = backup.read_bytes()
    size = restore_sqlite(str(backup), str(home))
    assert size == home.stat().st_size
    assert names(home.parent) == {"a.db", "a.db-lock"}
    assert home.stat().st_mode & 0o777 == 0o600
    assert await revision_of(home) == NEW
    assert backup.read_bytes() == before


async def test_numbers_that_were_given_out_since_never_come_again(home: Path, tmp_path: Path) -> None:
    async with opened(home) as store:
        first = await store.reserve(100)
        await store.backup(str(tmp_path / "backup.db"))
        given = await store.reserve(1_000_000)
    restore_sqlite(str(tmp_path / "backup.db"), str(home), replace=True)
    async with opened(home) as store:
        number = await store.reserve(1)
        assert number == first + 100 + SKIPPED
        assert number > given + 1_000_000
        await store.backup(str(tmp_path / "second.db"))
    restore_sqlite(str(tmp_path / "second.db"), str(home), replace=True)
    async with opened(home) as store:
        assert await store.reserve(1) == number + 1 + SKIPPED


async def test_a_restored_store_settles_its_own_batches(home: Path, tmp_path: Path) -> None:
    """The number of its newest batch is the backup's, lower than what the old store came to."""
    backup = await a_backup(tmp_path)
    await fill(home, 50)
    restore_sqlite(str(backup), str(home), replace=True)
    async with opened(home) as store:
        assert await store.settle() == frozenset()
        await store.apply([unit(1, NEW + 1, checkpoint(NEW + 1))])
        assert await store.settle() == frozenset()
        assert await newest(store) == NEW + 1


async def test_a_copy_in_wal_mode_with_its_log_is_a_backup_too(home: Path, tmp_path: Path) -> None:
    await killed(tmp_path / "copied.db", NEW)
    restore_sqlite(str(tmp_path / "copied.db"), str(home))
    assert await revision_of(home) == NEW


async def test_a_link_to_a_store_stays_a_link(home: Path, tmp_path: Path) -> None:
    backup = await a_backup(tmp_path)
    await fill(home, OLD)
    (tmp_path / "link.db").symlink_to(home)
    restore_sqlite(str(backup), str(tmp_path / "link.db"), replace=True)
    assert (tmp_path / "link.db").is_symlink()
    assert await revision_of(home) == NEW


# ---------------------------------------------------------------- what is refused


def contents(folder: Path) -> dict[str, bytes]:
    """Every file but the lock's."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".db-lock"}


def refused(
    backup: Path, home: Path, error: type[Exception], words: str, *, replace: bool = True
) -> Exception:
    """A restore raises and leaves everything as it was."""
    before = contents(home.parent)
    with pytest.raises(error, match=words) as caught:
        restore_sqlite(str(backup), str(home), replace=replace)
    assert contents(home.parent) == before
    return caught.value


async def test_a_store_that_is_there_is_not_replaced_unasked(home: Path, tmp_path: Path) -> None:
    backup = await a_backup(tmp_path)
    await fill(home, OLD)
    error = refused(backup, home, ValidationError, "there is something at", replace=False)
    assert isinstance(error, ValidationError)
    assert error.field == "path"
    assert await revision_of(home) == OLD


@pytest.mark.parametrize("suffix", ["-wal", "-journal"])
async def test_a_log_without_its_store_is_not_removed_unasked(
    suffix: str, home: Path, tmp_path: Path
) -> None:
    backup = await a_backup(tmp_path)
    Path(f"{home}{suffix}").write_bytes(b"what is left of a store")
    refused(backup, home, ValidationError, f"there is something at .*{suffix}", replace=False)
    restore_sqlite(str(backup), str(home), replace=True)
    assert names(home.parent) == {"a.db", "a.db-lock"}
    assert await revision_of(home) == NEW


async def test_a_store_that_a_runtime_holds_is_not_replaced(home: Path, tmp_path: Path) -> None:
    backup = await a_backup(tmp_path)
    async with opened(home) as store:
        await store.reserve(1)
        refused(backup, home, StoreLocked, f"is held by process {os.getpid()}")
        await store.reserve(1)


READER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("SELECT count(*) FROM instances").fetchone()
print("open", flush=True)
sys.stdin.readline()
"""


async def test_a_store_that_another_program_has_open_is_not_replaced(home: Path, tmp_path: Path) -> None:
    backup = await a_backup(tmp_path)
    await killed(home, OLD)
    with other_process(READER, str(home)), pytest.raises(StoreLocked, match="is open in another program"):
        restore_sqlite(str(backup), str(home), replace=True)
    assert await revision_of(home) == OLD


async def test_a_backup_that_is_not_there_or_is_the_store_is_refused_by_name(
    home: Path, tmp_path: Path
) -> None:
    await fill(home, OLD)
    for backup, words in (
        (tmp_path / "none", "there is no file at"),
        (tmp_path, "there is no file at"),
        (home, "is the store itself"),
    ):
        error = refused(backup, home, ValidationError, words)
        assert isinstance(error, ValidationError)
        assert error.field == "backup"
    assert await revision_of(home) == OLD


def garbage(backup: Path) -> None:
    backup.write_text("dear diary, " * 1000)


def empty(backup: Path) -> None:
    backup.write_bytes(b"")


def another_programs(backup: Path) -> None:
    backup.unlink()
    with sqlite3.connect(backup) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()


def newer(backup: Path) -> None:
    with sqlite3.connect(backup) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


def cut_short(backup: Path) -> None:
    backup.write_bytes(backup.read_bytes()[: -2 * PAGE])


def a_page_damaged(backup: Path) -> None:
    data = backup.read_bytes()
    page = data.index(b"3" * 3000) // PAGE * PAGE
    backup.write_bytes(data[:page] + b"\xff" * 4 + data[page + 4 :])


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (garbage, StoreCorrupt, "is no SQLite database"),
        (empty, StoreCorrupt, "is empty"),
        (another_programs, StoreCorrupt, "another program's database"),
        (newer, StoreTooNew, "has version 99"),
        (cut_short, StoreCorrupt, "damaged"),
        (a_page_damaged, StoreCorrupt, "what was copied is damaged"),
    ],
)
async def test_a_backup_that_is_no_sound_store_is_refused(
    spoil: Callable[[Path], None], error: type[StoreError], words: str, home: Path, tmp_path: Path
) -> None:
    backup = await a_backup(tmp_path)
    spoil(backup)
    await killed(home, OLD)
    Path(f"{home.parent}/lives.db").unlink()
    refused(backup, home, error, words)
    assert await revision_of(home) == OLD


async def test_where_nothing_can_be_written_the_old_store_stays(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = await a_backup(tmp_path)
    await fill(home, OLD)

    def full(name: str) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(restore, "force_file", full)
    refused(backup, home, StoreFull, "No space left")
    with pytest.raises(StoreReadOnly, match=f"the folder {tmp_path}/none cannot be written"):
        restore_sqlite(str(backup), str(tmp_path / "none" / "a.db"))
    with pytest.raises(ValidationError, match=r"path: .* is no path"):
        restore_sqlite(str(backup), "a\0b")
    assert await revision_of(home) == OLD


# ---------------------------------------------------------------- logs and kills


class Killed(BaseException):
    """From here on nothing of the program runs."""


def kill_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the program before its call number ``step`` that changes names or forces the disk.

    No call after it does anything either, so nothing is cleaned up.
    """
    calls = 0

    def killing(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= step:
                raise Killed
            return call(*arguments, **named)

        return counted

    for name in ("unlink", "link", "replace", "fsync"):
        monkeypatch.setattr(os, name, killing(getattr(os, name)))


async def killed_at(step: int, backup: Path, home: Path) -> bool:
    """Whether the restore was killed at ``step``, and did not end before."""
    with pytest.MonkeyPatch.context() as patch:
        kill_at(step, patch)
        try:
            restore_sqlite(str(backup), str(home), replace=True)
        except Killed:
            return True
    return False


async def test_a_kill_at_any_moment_leaves_the_old_store_or_the_new_one(home: Path, tmp_path: Path) -> None:
    """Both have a history of their own, the old one in its log: together they would be damaged."""
    backup = await a_backup(tmp_path)
    seen: list[int] = []
    while True:
        for path in home.parent.iterdir():
            path.unlink()
        await killed(home, OLD)
        was_killed = await killed_at(len(seen) + 1, backup, home)
        seen.append(await revision_of(home))
        if not was_killed:
            break
    assert seen == sorted(seen, reverse=True)
    assert set(seen) == {OLD, NEW}
    assert len(seen) > 5


async def test_an_old_log_is_gone_before_the_new_file_comes(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = await a_backup(tmp_path)
    await killed(home, OLD)
    assert Path(f"{home}-wal").stat().st_size > 0
    beside: list[set[str]] = []
    replace = os.replace

    def looking(source: str, target: str) -> None:
        beside.append({name for name in names(home.parent) if name.startswith("a.db")})
        replace(source, target)

    monkeypatch.setattr(os, "replace", looking)
    restore_sqlite(str(backup), str(home), replace=True)
    assert beside == [{"a.db", "a.db-lock"}]
    assert await revision_of(home) == NEW


async def test_a_damaged_store_is_replaced_with_its_log(
    home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backup = await a_backup(tmp_path)
    await killed(home, OLD)
    home.write_bytes(b"\xa5" * home.stat().st_size)
    Path(f"{home}-wal").write_bytes(b"\xa5" * 10_000)
    restore_sqlite(str(backup), str(home), replace=True)
    assert "its log could not be moved into it" in caplog.text
    assert not Path(f"{home}-wal").exists()
    assert await revision_of(home) == NEW


async def test_the_journal_of_a_file_that_was_killed_is_not_rolled_back_into_the_new_one(
    home: Path, tmp_path: Path
) -> None:
    backup = await a_backup(tmp_path)
    kill_while_writing(home)
    restore_sqlite(str(backup), str(home), replace=True)
    assert not Path(f"{home}-journal").exists()
    assert await revision_of(home) == NEW


def test_what_is_removed_is_all_that_sqlite_would_combine_with_a_file() -> None:
    assert copies.SIDE_FILES == ("-wal", "-shm", "-journal")
