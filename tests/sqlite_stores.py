"""Opening SQLite stores in tests, in this process and in others."""

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from runtara.executor import Executor, InlineExecutor, ThreadExecutor
from runtara.persistence.sqlite import SqliteStore, open_sqlite

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
    try:
        async with open_sqlite(
            str(path),
            synchronous=synchronous,
            writer=writer,
            reader=reader,
            busy_timeout_seconds=busy_timeout_seconds,
            read_only=read_only,
        ) as store:
            yield store
    finally:
        await writer.close()
        await reader.close()


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
