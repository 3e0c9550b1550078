"""Acknowledged checkpoints per second on PostgreSQL, beside the raw limit of its driver.

The server is the one of the tests, or that of ``RUNTARA_TEST_POSTGRES``. The raw side runs the same
statements for the same rows over one connection of the same driver: the lease, the guards, the rows, COMMIT.
Nobody looks at the answers there, and nobody waits for one of his own. ``synchronous_commit`` is on.
"""

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import trio

import runtara
from benchmarks.figures import Effort, Figure, figure, ratios
from benchmarks.load import STATE, Load, names
from benchmarks.raw import rows
from runtara.persistence.postgres import open_postgres
from runtara.persistence.postgres.statements import BEGIN, COMMIT, append_to, statement
from runtara.persistence.postgres.writes import GUARDS
from runtara.records import CheckpointRecord
from tests.postgres_server import administer, new_schema, url_of

BATCH = 100
GOALS = {100: 0.4}
ANSWER_SECONDS = 30.0


async def raw_rate(schema: str, instances: int, batch: int, seconds: float) -> float:
    """Rows per second."""
    async with open_postgres(url_of(schema)) as store:
        writer = store.writer
        assert writer.connection is not None
        append = append_to(CheckpointRecord)
        written = number = 0
        begun = time.perf_counter()
        while (passed := time.perf_counter() - begun) < seconds:
            number += 1
            found = rows(written, batch, instances, STATE)
            insert = append.over([in_order(row) for row in found])
            asked = statement(GUARDS, sorted({row[0] for row in found}))
            begin = [BEGIN, writer.settings, writer.lease.renew(number), asked]
            await writer.connection.run(begin, ANSWER_SECONDS)
            await writer.connection.run([insert, COMMIT], ANSWER_SECONDS)
            written += batch
    return written / passed


def in_order(row: tuple[int, int, int, str, bytes]) -> tuple[int, int, str, bytes, int]:
    """The row of `benchmarks.raw` in the order of the table's columns."""
    instance, revision, created_us, checkpoint_id, state = row
    return (instance, revision, checkpoint_id, state, created_us)


async def our_rate(schema: str, instances: int, seconds: float) -> float:
    async with runtara.open_runtime(url_of(schema)) as runtime:
        return (await Load(runtime, names(instances)).run(seconds)).rate


def measured(function: object, *arguments: object) -> float:
    """In a schema of its own, which is dropped."""
    schema = new_schema()
    gc.collect()
    try:
        rate: float = trio.run(function, schema, *arguments)  # type: ignore[arg-type]
        return rate
    finally:
        administer(f'DROP SCHEMA IF EXISTS "{schema}" CASCADE')


def postgres(folder: Path, effort: Effort) -> Iterator[Figure]:
    for instances in (1, 10, 100, 1000):
        batch = 1 if instances == 1 else BATCH
        ours, raw = [], []
        for _ in range(effort.repeats):
            raw.append(measured(raw_rate, instances, batch, effort.seconds))
            ours.append(measured(our_rate, instances, effort.seconds))
        what = f"{instances:,} instance{'s' if instances > 1 else ''} on PostgreSQL"
        yield figure(f"checkpoints, {what}", ours, "/s")
        yield figure(f"raw driver, {batch} per commit", raw, "/s")
        yield figure(f"{what} over raw driver", ratios(ours, raw), "", at_least=GOALS.get(instances))
