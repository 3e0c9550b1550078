"""What the purge of many ended instances costs those that live."""

import time
from collections.abc import Iterator
from pathlib import Path

import trio

import runtara
from benchmarks.checkpoints import fresh
from benchmarks.figures import Effort, Figure, figure, percentile, ratios
from benchmarks.load import STATE, names
from benchmarks.raw import new_file
from runtara import Instance, Runtime

LIVE = 100
CHECKPOINTS = 5
"""Of each ended instance."""
DAY_US = 86_400 * 1_000_000

ENDED = """
    WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :count)
    INSERT INTO instances (row, tenant_id, instance_id, hosted, status, reason, epoch, revision, attempt,
                           max_attempts, created_us, started_us, finished_us, last_activity_us,
                           compensation_state)
    SELECT i, 'default', 'old-' || i, 0, 4, 7, i, 1, 1, 3, :past, :past, :past + i, :past, 0 FROM n
"""
ROWS = """
    WITH RECURSIVE s (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < :steps)
    INSERT INTO checkpoints (instance, revision, created_us, checkpoint_id, state)
    SELECT row, n + 1, created_us + n, 'old-' || n, zeroblob(100) FROM instances, s
"""


def fill(path: Path, count: int) -> None:
    connection = new_file(path)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute(ENDED, {"count": count, "past": time.time_ns() // 1000 - DAY_US})
    connection.execute(ROWS, {"steps": CHECKPOINTS})
    connection.execute("UPDATE meta SET next_number = ?", (count + 1,))
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    connection.close()


async def latencies(path: Path, count: int, seconds: float, purge: bool) -> tuple[list[float], float]:
    """Milliseconds of every checkpoint, and how many seconds the purge took."""
    found: list[float] = []
    over = False

    async def live(runtime: Runtime, name: str) -> None:
        async with runtime.register(name) as instance:
            number = 0
            while not over:
                found.append(await timed(instance, number))
                number += 1

    async with runtara.open_runtime(f"sqlite:///{path}") as runtime, trio.open_nursery() as nursery:
        for name in names(LIVE):
            nursery.start_soon(live, runtime, name)
        await trio.sleep(seconds / 4)
        found.clear()
        begun = time.perf_counter()
        if purge:
            assert await runtime.purge_finished(time.time_ns() // 1000) == count
        else:
            await trio.sleep(seconds)
        took = time.perf_counter() - begun
        over = True
    return found, took


async def timed(instance: Instance, number: int) -> float:
    begun = time.perf_counter()
    await instance.checkpoint(f"step-{instance.epoch}-{number}", STATE)
    return 1000 * (time.perf_counter() - begun)


def retention(folder: Path, effort: Effort) -> Iterator[Figure]:
    count = effort.live
    path = fresh(folder)
    fill(path, count)
    alone, _ = trio.run(latencies, path, count, effort.seconds * 2, False)
    beside, took = trio.run(latencies, path, count, effort.seconds * 2, True)
    ours, others = [percentile(beside, 99)], [percentile(alone, 99)]
    yield figure(f"p99 of {LIVE} instances that checkpoint", others, "ms")
    yield figure(f"the same while {count:,} ended ones are purged", ours, "ms", beside=f"in {took:.1f} s")
    yield figure("with the purge over without", ratios(ours, others), "", at_most=2.0)
