"""Whose a file is, which version it has, and bringing it up to this program's.

Rules:

1. A file is looked at through a read-only connection before anything else is done with it. One that is no
   database, another program's, or of a newer version is refused, and stays as it was.
2. ``application_id`` marks a file as ours; ``user_version`` is the number of its newest migration.
3. Migrations are the numbered files in ``migrations/sqlite``. Each runs in one transaction together with
   its number, so a kill at any moment leaves the file before or after it. There is no way back.
4. A new file can be read and written by its owner only; SQLite gives its log the same rights.
"""

import os
import sqlite3
from importlib import resources
from typing import Final

import attrs

from runtara.errors import StoreCorrupt, StoreReadOnly, StoreTooNew
from runtara.persistence.sqlite.connection import COMMON, connect, file_uri, read_pragma

APPLICATION_ID: Final = 0x52754E74
"""'RuNt', in the header of the file."""


@attrs.frozen
class Migration:
    """One numbered file of SQL."""

    number: int
    sql: str


def migrations() -> list[Migration]:
    """All of them, in order."""
    folder = resources.files("runtara.persistence") / "migrations" / "sqlite"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".sql")), key=lambda f: f.name)
    return [Migration(int(f.name.partition("_")[0]), f.read_text(encoding="utf-8")) for f in files]


def newest_version() -> int:
    """The version that this program writes."""
    return migrations()[-1].number


def prepare_file(path: str, busy_timeout_seconds: float) -> None:
    """Look at the file at ``path`` and refuse it (rule 1), or make a new one (rule 4).

    Raises:
        StoreReadOnly: The folder is missing or cannot be written; the message names it.
        StoreCorrupt, StoreTooNew: See rule 1.
    """
    if os.path.isdir(path):
        raise StoreReadOnly(f"{path} is a folder, not a file")
    if os.path.exists(path) and os.path.getsize(path) > 0:
        look_at(path, busy_timeout_seconds)
    elif not os.path.exists(path):
        make_file(path)


def make_file(path: str) -> None:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        folder = os.path.dirname(os.path.realpath(path))
        raise StoreReadOnly(f"the folder {folder} cannot be written: {error}") from error


def look_at(path: str, busy_timeout_seconds: float) -> None:
    try:
        look_through(file_uri(path, "ro"), path, busy_timeout_seconds)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_READONLY_ROLLBACK:
            raise
        # Killed while it was switched to WAL: nobody can read it before its journal is rolled back.
        look_through(file_uri(path, "rw"), path, busy_timeout_seconds)


def look_through(uri: str, path: str, busy_timeout_seconds: float) -> None:
    connection = connect(uri, COMMON, busy_timeout_seconds)
    try:
        check_version(connection, path)
    finally:
        connection.close()


def check_version(connection: sqlite3.Connection, path: str) -> int:
    """The version of a file that this program may open; 0 for one that nobody has written to."""
    owner = read_pragma(connection, "application_id")
    version = read_pragma(connection, "user_version")
    assert isinstance(version, int)
    if owner == 0 and read_pragma(connection, "schema_version") == 0:
        return 0
    if owner != APPLICATION_ID:
        raise StoreCorrupt(f"{path} is another program's database (id {owner}); it was not touched")
    if version > newest_version():
        raise StoreTooNew(
            f"{path} has version {version}, this program knows up to {newest_version()}; it was not touched"
        )
    return version


def migrate(connection: sqlite3.Connection, path: str) -> None:
    """Run the migrations that the file has not seen (rule 3)."""
    version = check_version(connection, path)
    for migration in migrations():
        if migration.number > version:
            run_migration(connection, migration)


def run_migration(connection: sqlite3.Connection, migration: Migration) -> None:
    try:
        connection.executescript(
            f"BEGIN IMMEDIATE; PRAGMA application_id = {APPLICATION_ID};\n{migration.sql}\n"
            f"PRAGMA user_version = {migration.number}; COMMIT;"
        )
    finally:
        if connection.in_transaction:
            connection.rollback()
