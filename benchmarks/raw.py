"""The raw limit: the same rows, from one plain thread that does nothing else.

The same file layout, the same connection settings, the same rows in the same order as the runtime writes them
under a load: `executemany` into ``checkpoints`` with its indexes, a transaction per batch. No guards, no
counting of batches, no actors, nobody who waits.
"""

import sqlite3
import time
from pathlib import Path

from runtara.persistence.sqlite import schema
from runtara.persistence.sqlite.connection import open_writer, synchronous_level
from runtara.persistence.sqlite.wal import CHECKPOINT_PAGES

FULL = synchronous_level("FULL")

INSERT = """
    INSERT INTO checkpoints (instance, revision, created_us, checkpoint_id, state) VALUES (?, ?, ?, ?, ?)
"""
INSERT_INSTANCE = """
    INSERT INTO instances (row, tenant_id, instance_id, hosted, status, epoch, revision, attempt,
                           max_attempts, created_us, last_activity_us, compensation_state)
    VALUES (?, 'default', ?, 0, 2, 1, 1, 1, 3, 1, 1, 0)
"""

Row = tuple[int, int, int, str, bytes]


def new_file(path: Path) -> sqlite3.Connection:
    """An empty file of our layout, opened as the runtime opens it."""
    schema.prepare_file(str(path), 1.0)
    connection = open_writer(str(path), FULL, 1.0)
    schema.migrate(connection, str(path))
    return connection


def raw_rate(path: Path, instances: int, batch: int, seconds: float, state: bytes) -> float:
    """Rows per second."""
    connection = new_file(path)
    connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    connection.executemany(INSERT_INSTANCE, [(row, f"i-{row}") for row in range(1, instances + 1)])
    written, begun = 0, time.perf_counter()
    while (passed := time.perf_counter() - begun) < seconds:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(INSERT, rows(written, batch, instances, state))
        connection.execute("COMMIT")
        written += batch
    connection.close()
    return written / passed


def rows(first: int, count: int, instances: int, state: bytes) -> list[Row]:
    """One step of each instance after the other, as a load of so many instances makes them."""
    now = time.time_ns() // 1000
    return [
        (at % instances + 1, at // instances + 2, now, f"step-{at // instances}", state)
        for at in range(first, first + count)
    ]
