"""Putting a backup in the place of a store.

Rules:

1. Nobody may use the store meanwhile: its lock is taken, and SQLite must find itself alone with the old file.
2. The new file is a copy of the backup, checked and on the disk before the old one is touched; a rename puts
   it in place. A kill at any moment leaves the old store or the new one.
3. A log or a journal belongs to one file, but SQLite combines whatever lies beside a file with it. So the
   old file first takes in its own log, which leaves it whole without one; then what lies beside it is
   removed, durably; and only then the new file comes. An old file that is too damaged for that loses its
   log: it is given up anyway.
4. Numbers that were given out after the backup was made must never be given out again: an epoch that comes
   again would let a stale session in. So the counter goes on `SKIPPED` further than the backup says.
"""

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from runtara.errors import StoreCorrupt, StoreLocked, ValidationError
from runtara.persistence.sqlite import schema
from runtara.persistence.sqlite.connection import COMMON, connect, file_uri
from runtara.persistence.sqlite.copies import (
    SIDE_FILES,
    check_whole,
    copy_to,
    file_errors,
    force_file,
    force_folder,
    place,
    require_path,
    temporary_file_beside,
)
from runtara.persistence.sqlite.faults import errors_translated, primary_code
from runtara.persistence.sqlite.lock import FileLock

logger = logging.getLogger("runtara.persistence")

SKIPPED: Final = 2**32
SKIP: Final = "UPDATE meta SET next_number = next_number + ?"
BUSY: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def restore_sqlite(backup: str, path: str, *, replace: bool = False) -> int:
    """Make a store at ``path`` of the backup in the file ``backup``; returns its bytes. Blocks.

    Args:
        replace: Give up the store that is at ``path``, if there is one.

    Raises:
        ValidationError: ``backup`` is not there or is the store itself, or (without ``replace``) there is
            something at ``path`` or a log beside it.
        StoreCorrupt, StoreTooNew: The backup is damaged, or is none of this program's.
        StoreLocked: A runtime, or another program, has the store open.
        StoreError: The file could not be written. As with all others, what was at ``path`` is still there.

    Durability: When it returns, the new store is on the disk.
    """
    require_path(path)
    target = os.path.realpath(path)
    require_backup(backup, target)
    if not replace:
        require_free(target)
    with locked(target), file_errors(target), temporary_file_beside(target) as name:
        copy_backup(backup, name)
        size = force_file(name)
        put(name, target, replace)
    return size


def require_backup(backup: str, target: str) -> None:
    if not os.path.isfile(backup):
        raise ValidationError("backup", f"there is no file at {backup}")
    if os.path.exists(target) and os.path.samefile(backup, target):
        raise ValidationError("backup", f"{backup} is the store itself")


def require_free(target: str) -> None:
    for suffix in ("", *SIDE_FILES):
        if os.path.lexists(target + suffix):
            raise ValidationError("path", f"there is something at {target}{suffix}")


@contextmanager
def locked(target: str) -> Iterator[None]:
    lock = FileLock(target)
    try:
        yield
    finally:
        lock.release()


def copy_backup(backup: str, name: str) -> None:
    """Copy a backup into the empty file ``name``, and check it."""
    source = connect(file_uri(backup, "ro"), COMMON, 0)
    try:
        with errors_translated(backup):
            if schema.check_version(source, backup) == 0:
                raise StoreCorrupt(f"{backup} is empty")
        copy_to(name, source, lambda: False)
    finally:
        source.close()
    skip_numbers(name)
    check_whole(name)


def skip_numbers(name: str) -> None:
    connection = connect(file_uri(name, "rw"), {"synchronous": 0}, 0)
    try:
        connection.execute(SKIP, (SKIPPED,))
    finally:
        connection.close()


def put(name: str, target: str, replace: bool) -> None:
    """Put the file ``name`` in the place of ``target`` (rule 3)."""
    if os.path.isfile(target):
        take_in_log(target)
    for suffix in SIDE_FILES:
        with suppress(FileNotFoundError):
            os.unlink(target + suffix)
    force_folder(target)
    if replace:
        os.replace(name, target)
        force_folder(target)
    else:
        place(name, target)


def take_in_log(target: str) -> None:
    """Move the log of a file into it, so that it is whole without; a damaged one is left as it is.

    Raises:
        StoreLocked: Another program has the file open.
    """
    try:
        connection = connect(file_uri(target, "rw"), {}, 0)
        try:
            connection.execute("PRAGMA journal_mode = delete").fetchone()
        finally:
            connection.close()
    except sqlite3.Error as error:
        if primary_code(error) in BUSY:
            raise StoreLocked(f"{target} is open in another program ({error})") from error
        logger.warning("%s is replaced, and its log could not be moved into it: %s", target, error)
