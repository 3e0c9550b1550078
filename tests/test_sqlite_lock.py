"""One runtime for one file, and what becomes of the lock when its holder dies."""

import json
import os
import signal
from pathlib import Path

import pytest

from runtara.errors import StoreCorrupt, StoreLocked
from runtara.persistence.sqlite.lock import FileLock
from tests.sqlite_stores import HOLDER, opened, other_process


async def test_a_second_process_is_refused_and_told_who_holds_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with other_process(HOLDER, str(path)) as holder:
        with pytest.raises(StoreLocked) as caught:
            async with opened(path):
                pass
        assert f"is held by process {holder.pid} on {os.uname().nodename} since 20" in str(caught.value)


async def test_after_a_sigkill_of_the_holder_the_file_opens(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with other_process(HOLDER, str(path)) as holder:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        async with opened(path) as store:
            assert await store.reserve(1) == 1
            assert json.loads((tmp_path / "a.db-lock").read_text())["pid"] == os.getpid()


async def test_a_second_opening_in_one_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with opened(path) as store:
        with pytest.raises(StoreLocked, match=f"process {os.getpid()} "):
            async with opened(path):
                pass
        assert await store.reserve(1) == 1
    async with opened(path) as store:
        assert await store.reserve(1) == 2


async def test_another_name_of_the_file_is_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.db").symlink_to(tmp_path / "a.db")
    (tmp_path / "linked").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path)
    async with opened(tmp_path / "a.db"):
        for name in ("a.db", "folder/../a.db", "link.db", "linked/a.db"):
            with pytest.raises(StoreLocked):
                async with opened(name):
                    pass


async def test_an_opening_that_fails_gives_the_lock_back(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_text("no database" * 100)
    with pytest.raises(StoreCorrupt):
        async with opened(path):
            pass
    path.unlink()
    async with opened(path) as store:
        assert await store.reserve(1) == 1


FORKER = """
import os, sys
from runtara.persistence.sqlite.lock import FileLock
lock = FileLock(sys.argv[1])
if os.fork() == 0:
    print("the child is ready", flush=True)
sys.stdin.read()
"""


def test_a_forked_child_does_not_keep_the_lock_of_a_dead_parent(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with other_process(FORKER, path) as parent:
        with pytest.raises(StoreLocked, match=f"process {parent.pid} "):
            FileLock(path)
        parent.kill()
        parent.wait()
        FileLock(path).release()  # the child lives on, until its input is closed


def test_a_forked_child_does_not_keep_a_lock_that_was_given_up(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    lock = FileLock(path)
    waiting, let_go = os.pipe()
    child = os.fork()
    if child == 0:  # it lives on after its parent has given up the lock
        os.close(let_go)
        os.read(waiting, 1)
        os._exit(0)
    try:
        with pytest.raises(StoreLocked):
            FileLock(path)
        lock.release()
        FileLock(path).release()
    finally:
        os.close(let_go)
        os.close(waiting)
        os.waitpid(child, 0)


def test_a_lock_is_released_once(tmp_path: Path) -> None:
    lock = FileLock(str(tmp_path / "a.db"))
    lock.release()
    lock.release()


def test_a_lock_file_that_says_nothing_still_locks(tmp_path: Path) -> None:
    lock = FileLock(str(tmp_path / "a.db"))
    (tmp_path / "a.db-lock").write_text("")
    with pytest.raises(StoreLocked, match="another process, which is just taking it"):
        FileLock(str(tmp_path / "a.db"))
    lock.release()
