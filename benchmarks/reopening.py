"""Opening a file in which very many instances are suspended, until the first new one was served."""

import time
from collections.abc import Iterator
from pathlib import Path

import trio

import runtara
from benchmarks.checkpoints import fresh
from benchmarks.figures import Effort, Figure, figure
from benchmarks.raw import new_file

FAR_US = 30 * 86_400 * 1_000_000

SUSPENDED = """
    WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :count)
    INSERT INTO instances (row, tenant_id, instance_id, hosted, status, reason, epoch, revision, attempt,
                           max_attempts, created_us, started_us, last_activity_us, sleep_until_us,
                           awaits_client_us, compensation_state)
    SELECT i, 'default', printf('suspended-%08d', i), 0, 3, iif(i % 2, 1, 5), i, 3, 1, 3, :now + i, :now + i,
           :now + i, iif(i % 2, :far + i, NULL), iif(i % 2, NULL, :now + i), 0
    FROM n
"""
CHECKPOINTS = """
    INSERT INTO checkpoints (instance, revision, created_us, checkpoint_id, state)
    SELECT row, 2, created_us, 'step-0', zeroblob(100) FROM instances
"""
WAITS = """
    INSERT INTO waits (instance, revision, wait_id, kind, deadline_us, created_us)
    SELECT row, 3, 'nap', 0, sleep_until_us, created_us FROM instances WHERE sleep_until_us IS NOT NULL
"""


def fill(path: Path, count: int) -> None:
    """Half of the instances sleep for a month, the others await their clients."""
    now = time.time_ns() // 1000
    connection = new_file(path)
    connection.execute("BEGIN")
    connection.execute(SUSPENDED, {"count": count, "now": now, "far": now + FAR_US})
    connection.execute(CHECKPOINTS)
    connection.execute(WAITS)
    connection.execute("UPDATE meta SET next_number = ?", (count + 1,))
    connection.execute("COMMIT")
    connection.close()


async def first_answer(path: Path, number: int) -> float:
    begun = time.perf_counter()
    async with (
        runtara.open_runtime(f"sqlite:///{path}") as runtime,
        runtime.register(f"new-{number}") as instance,
    ):
        await instance.checkpoint("first", b"served")
        return time.perf_counter() - begun


def reopening(folder: Path, effort: Effort) -> Iterator[Figure]:
    path = fresh(folder)
    fill(path, effort.suspended)
    seconds = [trio.run(first_answer, path, number) for number in range(effort.repeats)]
    what = f"opening with {effort.suspended:,} suspended instances, until the first answer"
    yield figure(what, seconds, "s", at_most=2.0)
