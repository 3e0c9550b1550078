"""What an error of sqlite3 means to us: one table, and the only place that reads SQLite's result codes.

Rules:

1. Before COMMIT an error means that nothing was written. What it says about the store is in `FAULTS`.
2. At COMMIT, a busy or full store has written nothing either. Any other error there is *unknown*: a commit
   whose fsync failed has been seen present after the file was opened again.
3. An error without a result code comes from the binding of a value: the value was refused.
"""

import errno
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

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

REFUSED_BINDINGS: Final = (
    OverflowError,
    UnicodeEncodeError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    sqlite3.DataError,
)
"""Raised by the sqlite3 module itself, for a value that it cannot hand to SQLite."""

FAULTS: Final[dict[int, tuple[type[StoreError], str]]] = {
    sqlite3.SQLITE_BUSY: (StoreUnavailable, "another process is writing to the store"),
    sqlite3.SQLITE_LOCKED: (StoreUnavailable, "the store is locked"),
    sqlite3.SQLITE_PROTOCOL: (StoreUnavailable, "the store's locks are contended"),
    sqlite3.SQLITE_INTERRUPT: (StoreUnavailable, "the statement was interrupted"),
    sqlite3.SQLITE_NOMEM: (StoreUnavailable, "the store is out of memory"),
    sqlite3.SQLITE_FULL: (StoreFull, "the disk is full"),
    sqlite3.SQLITE_READONLY: (StoreReadOnly, "the store cannot be written"),
    sqlite3.SQLITE_CANTOPEN: (StoreReadOnly, "the store or its log cannot be opened"),
    sqlite3.SQLITE_PERM: (StoreReadOnly, "the store may not be accessed"),
    sqlite3.SQLITE_IOERR: (StoreFailed, "the disk reported an error"),
    sqlite3.SQLITE_CORRUPT: (StoreCorrupt, "the store is damaged"),
    sqlite3.SQLITE_NOTADB: (StoreCorrupt, "the file is no SQLite database, or its start is damaged"),
    sqlite3.SQLITE_CONSTRAINT: (StoreRefused, "a key or a value was refused"),
    sqlite3.SQLITE_MISMATCH: (StoreRefused, "a value has the wrong type"),
    sqlite3.SQLITE_TOOBIG: (StoreRefused, "a value is too large"),
}
"""Primary result code -> what to raise, and the plain words for it."""


def primary_code(error: BaseException) -> int | None:
    """SQLite's primary result code of ``error``, or None if SQLite had no part in it."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def store_error(error: BaseException, location: str) -> StoreError | None:
    """What ``error`` means for the store at ``location``; None if it is not the store's error."""
    code = primary_code(error)
    if code is None:
        if isinstance(error, REFUSED_BINDINGS):
            return StoreRefused(f"{location}: a value was refused ({error})")
        return StoreFailed(f"{location}: {error}") if isinstance(error, sqlite3.Error) else None
    kind, words = FAULTS.get(code, (StoreFailed, "an unexpected error"))
    return kind(f"{location}: {words} ({error})")


def commit_error(error: sqlite3.Error, location: str) -> StoreError:
    """What an error of COMMIT means (rule 2)."""
    known = store_error(error, location)
    if isinstance(known, StoreUnavailable | StoreFull):
        return known
    return OutcomeUnknown(f"{location}: the commit failed, it may or may not be on disk ({error})")


@contextmanager
def errors_translated(location: str) -> Iterator[None]:
    """Errors of sqlite3, as what they mean for the store at ``location``."""
    try:
        yield
    except Exception as error:
        known = store_error(error, location)
        if known is None:
            raise
        raise known from error


def file_error(path: str, error: OSError) -> StoreError:
    """What it means that the file at ``path`` cannot be made."""
    kind = StoreFull if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreReadOnly
    return kind(f"the folder {os.path.dirname(path)} cannot be written: {error}")
