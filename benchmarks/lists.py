"""What an operator asks of a large store: each list, a first page and a deep one; the steps of one instance.

The file holds three tenants, ten workflows and every status, one of them rare. All lists but those of events
are over instances. A deep page begins half-way through its list, behind a cursor, as a walk would come to it.
"""

import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import trio

from benchmarks.checkpoints import fresh
from benchmarks.figures import Effort, Figure, figure, percentile
from benchmarks.raw import new_file
from runtara.executor import ThreadExecutor
from runtara.persistence.cursors import Place, encode_cursor
from runtara.persistence.lists import Listing, instance_listing, record_listing
from runtara.persistence.sqlite import SqliteStore, open_sqlite
from runtara.persistence.store import (
    EventFilter,
    InstanceFilter,
    InstanceOrder,
    PageRequest,
    StepFilter,
)
from runtara.records import EventRecord, EventType, Status, StepRecord, StepStatus

EVENTS = 10
"""Of each instance; the last one has a hundred thousand."""
MANY_EVENTS = 100_000
ASKED = 200
GOAL_MS = 20.0
STEPS = 5_000
STEP_BYTES = 20_000
STEPS_GOAL_MS = 30.0
BEGAN = 1_700_000_000_000_000
SECOND = 1_000_000

INSTANCES = """
    WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :count)
    INSERT INTO instances (row, tenant_id, instance_id, workflow, hosted, status, reason, epoch, revision,
                           attempt, max_attempts, created_us, started_us, finished_us, last_activity_us,
                           awaits_client_us, compensation_state)
    SELECT i, 't' || (i % 3), 'order-' || i, 'w' || (i % 10), 0, s, NULL, i, 1, 1, 3, c, c,
           CASE WHEN s >= 4 THEN c + (i * 7919) % 1000000 * 1000 END, c, c, 0
    FROM (
        SELECT i, :began + i / 4 * 1000000 AS c,
               CASE WHEN i % 10000 = 7 THEN 6 WHEN i % 100 = 3 THEN 5 WHEN i % 10 = 1 THEN 3
                    WHEN i % 1000 = 5 THEN 2 ELSE 4 END AS s
        FROM n
    )
"""
ROWS = """
    WITH RECURSIVE e (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM e WHERE n < :events)
    INSERT INTO events (instance, revision, type, subtype, applied, created_us, scope_id, payload)
    SELECT row, n + 1, 5, CASE WHEN n % 2 THEN 'tick' ELSE 'tock' END, 1, created_us + n,
           's' || (n % 7), CAST('{"scope_id": "s' || (n % 7) || '", "n": ' || n || '}' AS BLOB)
    FROM instances, e WHERE row BETWEEN :first AND :last
"""
SLICE = 20_000


def fill(path: Path, count: int) -> None:
    """``count`` instances and their events, a slice of them per transaction."""
    connection = new_file(path)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute(INSTANCES, {"count": count, "began": BEGAN})
    for first in range(1, count, SLICE):
        last = min(first + SLICE - 1, count - 1)
        connection.execute(ROWS, {"events": EVENTS, "first": first, "last": last})
    connection.execute(ROWS, {"events": min(MANY_EVENTS, 10 * count), "first": count, "last": count})
    connection.execute("UPDATE meta SET next_number = ?", (count + 1,))
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    connection.close()
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)


@asynccontextmanager
async def reading(path: Path) -> AsyncIterator[SqliteStore]:
    writer, reader = ThreadExecutor("bench-writer"), ThreadExecutor("bench-reader")
    async with open_sqlite(str(path), writer=writer, reader=reader, read_only=True) as store:
        yield store
    await reader.close()
    await writer.close()


Ask = Callable[[], Awaitable[object]]


async def latencies(ask: Ask, times: int) -> list[float]:
    """Milliseconds of each answer."""
    await ask()
    found: list[float] = []
    for _ in range(times):
        begun = time.perf_counter()
        await ask()
        found.append(1000 * (time.perf_counter() - begun))
    return found


@attrs.frozen
class Asked:
    """One list of instances."""

    name: str
    where: InstanceFilter
    order: InstanceOrder = InstanceOrder.CREATED


def asked(count: int) -> list[Asked]:
    made, ended = InstanceOrder.CREATED, InstanceOrder.FINISHED
    rare = frozenset({Status.CANCELLED})
    some = frozenset({Status.RUNNING, Status.FAILED, Status.CANCELLED})
    middle = BEGAN + count // 8 * SECOND
    return [
        Asked("all tenants", InstanceFilter(), made),
        Asked("a tenant", InstanceFilter(tenant_id="t1"), made),
        Asked("a tenant, by finish", InstanceFilter(tenant_id="t1"), ended),
        Asked("a tenant, a rare status", InstanceFilter(tenant_id="t1", statuses=rare), made),
        Asked("a tenant, three statuses", InstanceFilter(tenant_id="t1", statuses=some), made),
        Asked("a tenant, three statuses, by finish", InstanceFilter(tenant_id="t1", statuses=some), ended),
        Asked("all tenants, a rare status", InstanceFilter(statuses=rare), made),
        Asked("all tenants, a rare status, by finish", InstanceFilter(statuses=rare), ended),
        Asked("a tenant, a workflow", InstanceFilter(tenant_id="t1", workflow="w4"), made),
        Asked(
            "a tenant, a workflow, a rare status",
            InstanceFilter(tenant_id="t1", workflow="w7", statuses=rare),
            made,
        ),
        Asked("a tenant, a prefix of few", InstanceFilter(tenant_id="t1", id_prefix="order-1234"), made),
        Asked("a tenant, a prefix of all", InstanceFilter(tenant_id="t1", id_prefix="order-"), made),
        Asked("a tenant, made since", InstanceFilter(tenant_id="t1", created_from_us=middle), made),
        Asked(
            "a tenant, ended between",
            InstanceFilter(tenant_id="t1", finished_from_us=middle, finished_before_us=middle + 10**9),
            ended,
        ),
    ]


def deep(listing: Listing, place: Place) -> PageRequest:
    """A page half-way through a list."""
    return PageRequest(cursor=encode_cursor(listing.name, place))


async def instance_lists(path: Path, count: int) -> AsyncIterator[tuple[str, list[float]]]:
    half = Place(BEGAN + count // 8 * SECOND, count // 2)
    async with reading(path) as store:
        for one in asked(count):
            first = PageRequest()
            listing = instance_listing(one.order, first)
            for what, page in (("first", first), ("deep", deep(listing, half))):

                async def ask(one: Asked = one, page: PageRequest = page) -> object:
                    return await store.list_instances(one.where, one.order, page)

                yield f"{one.name}, {what} page", await latencies(ask, ASKED)


async def event_lists(path: Path, count: int) -> AsyncIterator[tuple[str, list[float]]]:
    filters = {
        "events": None,
        "events of a subtype": EventFilter(type=EventType.CUSTOM, subtype="tick"),
        "events of a scope": EventFilter(scope_id="s3"),
        "events with a text": EventFilter(text='"s5"'),
    }
    half = Place(MANY_EVENTS // 2, MANY_EVENTS // 2)
    async with reading(path) as store:
        for name, where in filters.items():
            first = PageRequest()
            listing = record_listing(count, EventRecord, first)
            for what, page in (("first", first), ("deep", deep(listing, half))):

                async def ask(where: EventFilter | None = where, page: PageRequest = page) -> object:
                    return await store.list_records(count, EventRecord, page, where)

                yield f"{name} of one with {MANY_EVENTS:,}, {what} page", await latencies(ask, ASKED)


async def gather(found: AsyncIterator[tuple[str, list[float]]]) -> list[tuple[str, list[float]]]:
    return [one async for one in found]


def lists(folder: Path, effort: Effort) -> Iterator[Figure]:
    path = fresh(folder)
    count = effort.many_rows // EVENTS
    fill(path, count)
    for make in (instance_lists, event_lists):
        for name, times in trio.run(gather, make(path, count)):
            p99 = percentile(times, 99)
            beside = f"p50 {percentile(times, 50):.2f} ms"
            yield figure(f"{name}, p99", [p99], "ms", beside=beside, at_most=GOAL_MS)


# ---------------------------------------------------------------- steps


def fill_steps(path: Path, count: int) -> None:
    connection = new_file(path)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute(INSTANCES, {"count": 1, "began": BEGAN})
    text = "x" * STEP_BYTES
    events, steps = [], []
    for at in range(count):
        begin, end = 2 * at + 2, 2 * at + 3
        for revision, name in ((begin, "inputs"), (end, "outputs")):
            payload = json.dumps({"step_id": f"s{at}", name: text}).encode()
            events.append((1, revision, 5, f"step_debug_{'start' if revision == begin else 'end'}", payload))
        steps.append((1, begin, end, int(StepStatus.COMPLETED), BEGAN, BEGAN + at, f"s{at}", f"t{at % 5}"))
    connection.executemany(
        "INSERT INTO events (instance, revision, type, subtype, applied, created_us, payload)"
        " VALUES (?, ?, ?, ?, 1, 0, ?)",
        events,
    )
    connection.executemany(
        "INSERT INTO steps"
        " (instance, revision, end_revision, status, started_us, finished_us, step_id, step_type)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        steps,
    )
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    connection.close()


async def step_lists(path: Path) -> AsyncIterator[tuple[str, list[float]]]:
    filters = {
        "a page of 100": None,
        "of one type": StepFilter(type="t3"),
        "by their ids": StepFilter(step_ids=frozenset({"s17", "s4711"})),
        "that failed (none)": StepFilter(statuses=frozenset({StepStatus.FAILED})),
    }
    async with reading(path) as store:
        for name, where in filters.items():

            async def ask(where: StepFilter | None = where) -> object:
                return await store.list_records(1, StepRecord, PageRequest(), where)

            yield f"steps {name}", await latencies(ask, ASKED)


def steps(folder: Path, effort: Effort) -> Iterator[Figure]:
    path = fresh(folder)
    count = min(STEPS, effort.many_rows // 100)
    fill_steps(path, count)
    for name, times in trio.run(gather, step_lists(path)):
        beside = f"{count:,} steps of {STEP_BYTES // 1000} KB, p50 {percentile(times, 50):.2f} ms"
        yield figure(f"{name}, p99", [percentile(times, 99)], "ms", beside=beside, at_most=STEPS_GOAL_MS)
