"""Whose a schema is, which version it has, and bringing it up to this program's.

Rules:

1. A schema is looked at before anything is done with it. One that holds tables but not our ``meta``, or one
   of a newer version, is refused and stays as it was.
2. Migrations are the numbered files in ``migrations/postgres``. All that are missing run in one
   transaction, together with their number, under a lock of that transaction; so two programs that start at
   once run each of them once, and a kill at any moment leaves the schema before or after. There is no way
   back.
3. A server that may lose a commit is refused: ``fsync`` and ``full_page_writes`` must be on.
"""

from importlib import resources
from typing import Final

import attrs

from runtara.errors import StoreCorrupt, StoreFailed, StoreTooNew, StoreTooOld
from runtara.persistence.postgres.driver import Connection, Statement
from runtara.persistence.postgres.statements import identifier, statement
from runtara.persistence.postgres.values import rows
from runtara.persistence.rows import Row

OLDEST_SERVER: Final = 140000

SERVER: Final = Statement(
    b"SELECT current_setting('fsync'), current_setting('full_page_writes'),"
    b" current_setting('server_encoding'), current_setting('synchronous_commit'),"
    b" current_setting('server_version_num')::bigint"
)
LOCK: Final = "SELECT pg_advisory_xact_lock(hashtextextended($1, 7))"
LOOK: Final = (
    "SELECT count(*), count(*) FILTER (WHERE relname IN ('meta', 'runtimes', 'instances'))"
    " FROM pg_class WHERE relnamespace = to_regnamespace($1) AND relkind IN ('r', 'p', 'v')"
)
VERSION: Final = Statement(b"SELECT version FROM meta")
NUMBER: Final = "UPDATE meta SET version = $1"
WITHOUT_TIMEOUT: Final = Statement(b"SELECT set_config('statement_timeout', '0', true)")
MIGRATION_SECONDS: Final = 3600.0
"""For one file: an index of a large table takes its time."""


@attrs.frozen
class Migration:
    """One numbered file of SQL."""

    number: int
    sql: str


def migrations() -> list[Migration]:
    """All of them, in order."""
    folder = resources.files("runtara.persistence") / "migrations" / "postgres"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".sql")), key=lambda f: f.name)
    return [Migration(int(f.name.partition("_")[0]), f.read_text(encoding="utf-8")) for f in files]


def newest_version() -> int:
    """The version that this program writes."""
    return migrations()[-1].number


def check_server(answer: Row, location: str) -> str:
    """Refuse a server that breaks rule 3; returns the ``synchronous_commit`` that it is to have for us.

    ``remote_apply`` promises more than ``on`` and is left; anything else becomes ``on``.
    """
    fsync, full_pages, encoding, commit, version = (v if isinstance(v, int) else str(v) for v in answer)
    if not isinstance(version, int) or version < OLDEST_SERVER:
        raise StoreFailed(f"{location}: PostgreSQL {OLDEST_SERVER // 10000} or newer is needed")
    if (fsync, full_pages) != ("on", "on"):
        raise StoreFailed(
            f"{location}: fsync is {fsync} and full_page_writes is {full_pages}; with either of them off a"
            " crash may lose what was acknowledged"
        )
    if encoding != "UTF8":
        raise StoreFailed(f"{location}: the database's encoding is {encoding}, it must be UTF8")
    return "remote_apply" if commit == "remote_apply" else "on"


def check_version(version: int, location: str) -> None:
    """Refuse what a newer program has made."""
    if version > newest_version():
        raise StoreTooNew(
            f"{location} has version {version}, this program knows up to {newest_version()};"
            " it was not touched"
        )


def require_ours(looked: Row, location: str) -> bool:
    """Whether there is a schema of ours, by the answer to `LOOK`; one of another program is refused."""
    tables, ours = looked
    if ours != 3 and tables:
        raise StoreCorrupt(f"{location} holds {tables!r} tables of another program; it was not touched")
    return ours == 3


def check_current(version: int, location: str) -> None:
    """Refuse to read what a program of another version has made."""
    check_version(version, location)
    if version < newest_version():
        raise StoreTooOld(f"{location} has an older layout; open it for writing once")


async def bring_up(connection: Connection, schema: str, location: str, seconds: float) -> None:
    """Within the transaction that is open: check the schema (rule 1) and run what it has not seen (rule 2).

    Raises:
        StoreCorrupt, StoreTooNew: See rule 1.
    """
    lock = statement(LOCK, f"runtara {schema}")
    _, looked = await connection.run([lock, statement(LOOK, identifier(schema))], seconds)
    version = 0
    if require_ours(rows(looked)[0], location):
        [found] = await connection.run([VERSION], seconds)
        value = rows(found)[0][0]
        assert isinstance(value, int)
        version = value
    check_version(version, location)
    if version == 0:
        await connection.script(f"CREATE SCHEMA IF NOT EXISTS {identifier(schema)}", seconds)
    missing = [migration for migration in migrations() if migration.number > version]
    if missing:
        await connection.run([WITHOUT_TIMEOUT], seconds)
    for migration in missing:
        await connection.script(migration.sql, MIGRATION_SECONDS)
        await connection.run([statement(NUMBER, migration.number)], seconds)
