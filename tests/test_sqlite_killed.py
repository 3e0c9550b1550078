"""A file whose first opening was killed: SQLite's rollback journal lies beside it and must be rolled back.

Found by `tests.crash`: a look through a read-only connection cannot do that, and the file stayed refused.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from runtara.errors import StoreCorrupt
from runtara.testing.samples import creation, instance
from tests.sqlite_stores import ROOT, opened

KILLED_WHILE_WRITING = """
import os, signal, sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size = 1")
for statement in sys.argv[2:]:
    connection.execute(statement)
connection.execute("BEGIN IMMEDIATE")
connection.execute("CREATE TABLE half (data BLOB)")
for _ in range(100):
    connection.execute("INSERT INTO half VALUES (zeroblob(3000))")
os.kill(os.getpid(), signal.SIGKILL)
"""


def kill_while_writing(path: Path, *before: str) -> None:
    """Leave a file in the middle of a transaction, with its journal."""
    subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, path, *before], cwd=ROOT, check=False)
    assert path.with_name(path.name + "-journal").stat().st_size > 0


async def test_a_file_whose_first_opening_was_killed_is_a_new_store(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    kill_while_writing(path)
    async with opened(path) as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row))])
        assert store.write_connection is not None
        tables = store.write_connection.execute("SELECT name FROM sqlite_schema").fetchall()
        assert ("instances",) in tables
        assert ("half",) not in tables


async def test_another_programs_file_that_was_killed_is_refused_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    kill_while_writing(path, "CREATE TABLE theirs (a)", "INSERT INTO theirs VALUES (1)")
    with pytest.raises(StoreCorrupt, match="another program's"):
        async with opened(path):
            pass
