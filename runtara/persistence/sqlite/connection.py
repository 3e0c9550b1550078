"""Opening connections to a SQLite file, with settings that are read back.

Rules:

1. A pragma that SQLite did not take is a reason not to start: switching to WAL may fail without any
   exception, and the answer is all there is to see it by.
2. ``wal_autocheckpoint`` is 0: an automatic checkpoint swallows the error of an fsync of the database. The
   log is moved on purpose (see `wal`).
3. Transactions are begun and ended by hand (``isolation_level=None``).
"""

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from runtara.errors import StoreFailed, ValidationError

MEMORY: Final = ":memory:"

SYNCHRONOUS: Final = {"OFF": 0, "NORMAL": 1, "FULL": 2, "EXTRA": 3}
CACHED_STATEMENTS: Final = 512
LOG_LIMIT_BYTES: Final = 64 * 1024 * 1024

Pragmas = Mapping[str, int | str]

COMMON: Final[Pragmas] = {
    "trusted_schema": 0,
    "temp_store": 2,  # a full temporary folder must not fail a query
}
WRITER: Final[Pragmas] = {
    "journal_mode": "wal",
    "wal_autocheckpoint": 0,
    "journal_size_limit": LOG_LIMIT_BYTES,
    "cache_size": -64 * 1024,
    "mmap_size": 0,  # a page read by mmap turns an I/O error into SIGBUS
    "secure_delete": 0,  # the log holds old pages anyway
}
READER: Final[Pragmas] = {"query_only": 1, "cache_size": -16 * 1024, "mmap_size": 0}
LISTER: Final[Pragmas] = {**READER, "cache_size": -64 * 1024}
"""A list may look rows up all over a table; out of this cache that is four times faster."""


def synchronous_level(word: str) -> int:
    """The number of a word for ``PRAGMA synchronous``.

    Raises:
        ValidationError: There is no such word.
    """
    level = SYNCHRONOUS.get(word.upper())
    if level is None:
        raise ValidationError("synchronous", f"must be one of {', '.join(SYNCHRONOUS)}")
    return level


def open_writer(path: str, synchronous: int, busy_timeout_seconds: float) -> sqlite3.Connection:
    """A connection that may write; makes an empty file if there is none."""
    pragmas: dict[str, int | str] = {**COMMON, "synchronous": synchronous}
    if path == MEMORY:
        return connect(path, pragmas, busy_timeout_seconds)
    return connect(file_uri(path, "rw"), {**pragmas, **WRITER}, busy_timeout_seconds)


def open_reader(
    path: str, busy_timeout_seconds: float, *, read_only: bool, pragmas: Pragmas = READER
) -> sqlite3.Connection:
    """A connection that never writes. ``read_only`` opens the file itself without the right to write."""
    mode = "ro" if read_only else "rw"
    return connect(file_uri(path, mode), {**COMMON, **pragmas}, busy_timeout_seconds)


def file_uri(path: str, mode: str) -> str:
    return f"{Path(path).absolute().as_uri()}?mode={mode}"


def connect(uri: str, pragmas: Pragmas, busy_timeout_seconds: float) -> sqlite3.Connection:
    connection = sqlite3.connect(
        uri,
        uri=True,
        timeout=busy_timeout_seconds,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=CACHED_STATEMENTS,
    )
    try:
        for name, value in pragmas.items():
            set_pragma(connection, name, value)
    except BaseException:
        connection.close()
        raise
    return connection


def set_pragma(connection: sqlite3.Connection, name: str, value: int | str) -> None:
    connection.execute(f"PRAGMA {name} = {value}").close()
    actual = read_pragma(connection, name)
    if actual != value:
        raise StoreFailed(f"SQLite did not take PRAGMA {name} = {value}: it says {actual}")


def read_pragma(connection: sqlite3.Connection, name: str) -> int | str | None:
    found = connection.execute(f"PRAGMA {name}").fetchone()
    value: int | str | None = None if found is None else found[0]
    return value
