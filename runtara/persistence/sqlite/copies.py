"""Copying a store to a file of its own: whole, or not at all.

Rules:

1. A copy is one moment of the store. The source is read in one transaction, so a busy writer does not make
   SQLite begin the copy again, and a batch is in it or not.
2. It is made in a temporary file beside its place, checked, and forced to the disk. Only then it gets its
   name. Whatever goes wrong, nothing is left.
3. It is in rollback mode: one file, which needs no log beside it and may lie where nothing can be written.
"""

import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from runtara.errors import StoreCorrupt, StoreFailed, StoreUnavailable, ValidationError
from runtara.persistence.sqlite.connection import connect, file_uri, read_pragma
from runtara.persistence.sqlite.faults import errors_translated, file_error
from runtara.persistence.sqlite.transaction import one_moment

Connection = sqlite3.Connection

PAGES_AT_ONCE: Final = 4096
"""Copied between two looks whether to go on."""
SIDE_FILES: Final = ("-wal", "-shm", "-journal")
"""What SQLite keeps beside a file."""


def back_up(connection: Connection, path: str, is_stopped: Callable[[], bool]) -> int:
    """See `Store.backup`; ``connection`` is in no transaction.

    Args:
        is_stopped: Whether to give up.
    """
    require_path(path)
    require_nothing_at(path)
    with file_errors(path), temporary_file_beside(path) as name:
        copy_to(name, connection, is_stopped)
        check_whole(name)
        size = force_file(name)
        place(name, path)
    return size


def require_path(path: str) -> None:
    try:
        possible = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise ValidationError("path", f"{path!r} is no path")


def require_nothing_at(path: str) -> None:
    if os.path.lexists(path):
        raise ValidationError("path", f"there is something at {path}")


@contextmanager
def file_errors(path: str) -> Iterator[None]:
    """Errors of the file at ``path``, of the disk or of SQLite, as those of a store."""
    try:
        with errors_translated(f"copying to {path}"):
            yield
    except OSError as error:
        raise file_error(os.path.abspath(path), error) from error


@contextmanager
def temporary_file_beside(path: str) -> Iterator[str]:
    """An empty file of its owner only; gone at the end, unless it was moved."""
    folder = os.path.dirname(os.path.abspath(path))
    descriptor, name = tempfile.mkstemp(prefix=".runtara-", suffix=".partial", dir=folder)
    os.close(descriptor)
    try:
        yield name
    finally:
        for suffix in ("", *SIDE_FILES):
            with suppress(FileNotFoundError):
                os.unlink(name + suffix)


# ---------------------------------------------------------------- copying


def copy_to(name: str, source: Connection, is_stopped: Callable[[], bool]) -> None:
    """Copy ``source``, as it is at one moment, into the empty file ``name``."""
    target = connect(file_uri(name, "rw"), {"journal_mode": "off", "synchronous": 0}, 0)
    try:
        with one_moment(source):
            source.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            source.backup(target, pages=PAGES_AT_ONCE, progress=looking(is_stopped))
        read_pragma(target, "journal_mode = delete")  # it took over the source's
    finally:
        target.close()


def looking(is_stopped: Callable[[], bool]) -> Callable[[int, int, int], object]:
    def look(status: int, remaining: int, total: int) -> None:
        if is_stopped():
            raise StoreUnavailable("the copy was given up: the store is being closed or opened again")

    return look


def check_whole(name: str) -> None:
    """Read all of a copy.

    Raises:
        StoreCorrupt: It is damaged, and so is what it was made of.
    """
    connection = connect(file_uri(name, "ro"), {}, 0)
    try:
        found = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
        mode = read_pragma(connection, "journal_mode")
    finally:
        connection.close()
    if found != "ok":
        raise StoreCorrupt(f"what was copied is damaged: {' '.join(found.split())}")
    if mode != "delete":
        raise StoreFailed(f"the copy is in mode {mode}, and would need a log beside it")


# ---------------------------------------------------------------- the disk


def force_file(name: str) -> int:
    """Bring a file to the disk; returns its bytes."""
    descriptor = os.open(name, os.O_RDWR)
    try:
        os.fsync(descriptor)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def force_folder(path: str) -> None:
    """Bring the names in the folder of ``path`` to the disk."""
    descriptor = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def place(name: str, path: str) -> None:
    """Give a file its name, durably, and never over another file.

    Raises:
        ValidationError: There is something at ``path`` by now.
    """
    try:
        os.link(name, path)
    except FileExistsError as error:
        raise ValidationError("path", f"there is something at {path}") from error
    try:
        os.unlink(name)
        force_folder(path)
    except BaseException:
        os.unlink(path)
        raise
