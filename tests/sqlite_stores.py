"""Opening SQLite stores in tests, in this process and in others."""

import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import attrs

from runtara.executor import Executor, InlineExecutor, ThreadExecutor
from runtara.persistence.sqlite import SqliteStore, connection, open_sqlite, schema

ROOT = Path(__file__).parent.parent

HOLDER = """
import sys, trio
from runtara.executor import InlineExecutor
from runtara.persistence.sqlite import open_sqlite

async def main():
    executor = InlineExecutor()
    async with open_sqlite(sys.argv[1], writer=executor, reader=executor):
        print("open", flush=True)
        sys.stdin.readline()

trio.run(main)
"""


@asynccontextmanager
async def opened(
    path: object,
    *,
    synchronous: str = "FULL",
    read_only: bool = False,
    busy_timeout_seconds: float = 0.01,
    inline: bool = True,
) -> AsyncIterator[SqliteStore]:
    """A store on ``path`` with executors of its own."""
    writer: Executor = InlineExecutor() if inline else ThreadExecutor("writer")
    reader: Executor = InlineExecutor() if inline else ThreadExecutor("reader")
    lister: Executor = InlineExecutor() if inline else ThreadExecutor("lister")
    try:
        async with open_sqlite(
            str(path),
            synchronous=synchronous,
            writer=writer,
            reader=reader,
            lister=lister,
            busy_timeout_seconds=busy_timeout_seconds,
            read_only=read_only,
        ) as store:
            yield store
    finally:
        await writer.close()
        await reader.close()
        await lister.close()


@contextmanager
def other_process(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Python running ``script``, which has printed one line; it is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().strip(), "the process said nothing"
            yield process
        finally:
            process.kill()


@contextmanager
def new_database(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that writes to a new store at ``path``, and nothing else of a store."""
    schema.make_file(str(path))
    opened = connection.open_writer(str(path), 0, 0.01)
    schema.migrate(opened, str(path))
    yield opened
    opened.close()


@attrs.define
class Recorder:
    """A connection that keeps what it was asked."""

    database: sqlite3.Connection
    asked: list[tuple[str, Sequence[Any]]] = attrs.Factory(list)

    def execute(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        self.asked.append((sql, values))
        return self.database.execute(sql, values)

    def plans(self) -> list[str]:
        """How SQLite answers each question."""
        return [plan_of(self.database, sql, values) for sql, values in self.asked]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.database, name)


def plan_of(database: sqlite3.Connection, sql: str, values: Sequence[Any] = ()) -> str:
    if sql in ("BEGIN", "COMMIT"):
        return ""
    steps = database.execute(f"EXPLAIN QUERY PLAN {sql}", values).fetchall()
    return "; ".join(step[3] for step in steps)
