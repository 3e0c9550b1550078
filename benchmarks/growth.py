"""The cost of a checkpoint in a large file and in a small one.

The files differ in nothing but the number of instances, each of which has 100 checkpoints. The load goes to
100 of them that are spread over the whole file, so that it does not only touch the end of each index.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.checkpoints import fresh
from benchmarks.figures import Effort, Figure, figure, number, ratios
from benchmarks.load import STATE, run_load
from benchmarks.raw import new_file
from runtara import Instance

STEPS = 100
LOAD = 100

INSTANCES = """
    WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :count)
    INSERT INTO instances (row, tenant_id, instance_id, hosted, status, reason, epoch, revision, attempt,
                           max_attempts, created_us, started_us, last_activity_us, awaits_client_us,
                           compensation_state)
    SELECT i, 'default', 'i-' || i, 0, 3, 5, i, 1, 1, 3, :now + i, :now + i, :now + i, :now + i, 0 FROM n
"""
ROWS = """
    WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < :steps)
    INSERT INTO checkpoints (instance, revision, created_us, checkpoint_id, state)
    SELECT row, n + 1, created_us + n, 'old-' || n, zeroblob(100) FROM instances, s
    WHERE row BETWEEN :first AND :last
"""
SLICE = 10_000


def fill(path: Path, rows: int) -> None:
    """``rows`` checkpoints, a slice of instances per transaction."""
    count = rows // STEPS
    connection = new_file(path)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute(INSTANCES, {"count": count, "now": time.time_ns() // 1000})
    for first in range(1, count + 1, SLICE):
        connection.execute(ROWS, {"steps": STEPS, "first": first, "last": first + SLICE - 1})
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    connection.execute("UPDATE meta SET next_number = ?", (count + 1,))
    connection.close()
    # What the filling left in the page cache must not be written out while something is measured.
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)


async def save_anew(instance: Instance, number: int) -> None:
    """A checkpoint that no earlier repetition has made: that one would only be found."""
    await instance.checkpoint(f"step-{instance.epoch}-{number}", STATE)


def spread(rows: int) -> list[str]:
    """Instances that lie evenly over the file."""
    count = rows // STEPS
    size = min(LOAD, count)
    return [f"i-{1 + at * count // size}" for at in range(size)]


def growth(folder: Path, effort: Effort) -> Iterator[Figure]:
    large, small_folder = fresh(folder), folder.parent / "small"
    small_folder.mkdir()
    fill(large, effort.many_rows)
    few, many = [], []
    for _ in range(effort.repeats):
        small = fresh(small_folder)
        fill(small, effort.few_rows)
        few.append(1e6 / run_load(small, spread(effort.few_rows), effort.seconds, step=save_anew).rate)
        many.append(1e6 / run_load(large, spread(effort.many_rows), effort.seconds, step=save_anew).rate)
    yield figure(f"a checkpoint with {effort.few_rows:,} rows", few, "us")
    yield figure(f"a checkpoint with {effort.many_rows:,} rows", many, "us")
    beside = f"the file has {number(large.stat().st_size / 2**20)} MiB"
    yield figure("many rows over few", ratios(many, few), "", beside=beside, at_most=1.5)
