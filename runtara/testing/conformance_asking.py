"""The sentences A1 to A4 and C1: lists, counts, cursors, and closing."""

import base64
from collections.abc import Awaitable, Callable
from typing import Any, Final

from runtara.errors import RuntimeClosed, ValidationError
from runtara.persistence.store import (
    EventFilter,
    InstanceFilter,
    InstanceOrder,
    Page,
    PageRequest,
    Store,
)
from runtara.records import (
    CheckpointRecord,
    CompensationAttemptRecord,
    ErrorRecord,
    EventRecord,
    EventType,
    InstanceRecord,
    PayloadKind,
    RetryAttemptRecord,
    SignalRecord,
    Status,
)
from runtara.testing import samples
from runtara.testing.conformance_writing import OpenStore, apply_all
from runtara.testing.expectations import expect, expect_error
from runtara.testing.samples import TENANT, creation, finished, instance, unit

EVERYTHING: Final = InstanceFilter()
MANY_PAGES: Final = 1000
"""More than any walk here has; a cursor that stands still is found by it."""
CREATED, FINISHED = InstanceOrder.CREATED, InstanceOrder.FINISHED
KINDS: Final[tuple[type[Any], ...]] = (
    CheckpointRecord,
    EventRecord,
    SignalRecord,
    ErrorRecord,
    RetryAttemptRecord,
    CompensationAttemptRecord,
)


async def walk(
    store: Store,
    where: InstanceFilter,
    order: InstanceOrder,
    *,
    limit: int,
    descending: bool = True,
    between: Callable[[int], Awaitable[None]] | None = None,
) -> list[InstanceRecord]:
    """All pages of a list, with ``between(page number)`` after each."""
    seen: list[InstanceRecord] = []
    cursor: str | None = None
    number = 0
    while True:
        request = PageRequest(limit=limit, cursor=cursor, descending=descending)
        page = await store.list_instances(where, order, request)
        expect(len(page.items) <= limit, True, "the page's limit")
        expect(number < MANY_PAGES, True, "the walk comes to an end")
        seen += page.items
        cursor, number = page.next, number + 1
        if between is not None:
            await between(number)
        if cursor is None:
            return seen


async def many_instances(store: Store, count: int, *, tied: int) -> list[int]:
    """Running and finished ones by turns, ``tied`` of them at each instant."""
    row = await store.reserve(count)
    rows = list(range(row, row + count))
    await apply_all(
        store,
        *(
            creation(
                finished(r, 5_000 + n // tied, created_us=100 + n // tied)
                if n % 2
                else instance(r, created_us=100 + n // tied)
            )
            for n, r in enumerate(rows)
        ),
    )
    return rows


async def a1_pages_continue_where_they_ended(open_store: OpenStore) -> None:
    async with open_store() as store:
        rows = await many_instances(store, 40, tied=7)
        for limit in (1, 3, 40, 1000):
            for descending in (True, False):
                seen = await walk(store, EVERYTHING, CREATED, limit=limit, descending=descending)
                wanted = sorted(rows, reverse=descending)
                expect([r.row for r in seen], wanted, f"pages of {limit}, descending={descending}")
        seen = await walk(store, EVERYTHING, FINISHED, limit=3)
        expect([r.row for r in seen], rows[1::2][::-1], "finished ones, in pages of 3")


async def a1_the_last_page_says_so(open_store: OpenStore) -> None:
    async with open_store() as store:
        empty = await store.list_instances(EVERYTHING, CREATED, PageRequest())
        expect((empty.items, empty.next), ((), None), "the page of an empty list")
        await many_instances(store, 4, tied=1)
        full = await store.list_instances(EVERYTHING, CREATED, PageRequest(limit=4))
        expect((len(full.items), full.next), (4, None), "a page that holds exactly all")


async def a1_a_record_present_all_along_is_seen_once(open_store: OpenStore) -> None:
    async with open_store() as store:
        rows = await many_instances(store, 30, tied=4)

        async def disturb(number: int) -> None:
            extra = await store.reserve(2)
            running = rows[(number * 2) % len(rows)]
            await store.apply(
                [
                    creation(instance(extra, created_us=100 + number % 8)),
                    creation(finished(extra + 1, 5_000 + number % 8, created_us=100 + number % 8)),
                    unit(running, 2, finished(running, 5_000 + number % 8, revision=2)),
                ]
            )

        for descending in (True, False):
            seen = await walk(
                store, EVERYTHING, CREATED, limit=4, descending=descending, between=disturb_few(disturb)
            )
            found = [r.row for r in seen if r.row in rows]
            expect(sorted(found), rows, "each row present all along, once")
            expect(len({r.row for r in seen}), len(seen), "no row twice")


def disturb_few(disturb: Callable[[int], Awaitable[None]]) -> Callable[[int], Awaitable[None]]:
    """Disturb the first pages only, or a walk against the growing end would never end."""

    async def between(number: int) -> None:
        if number <= 10:
            await disturb(number)

    return between


async def a1_records_are_paged_like_instances(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        revisions = range(1, 12)
        units = [unit(row, n, *samples.one_of_each(n)) for n in revisions if n > 1]
        await apply_all(store, creation(instance(row), *samples.one_of_each(1)), *units)
        for kind in KINDS:
            for descending in (True, False):
                seen = await walk_revisions(store, row, kind, descending=descending)
                wanted = sorted(revisions, reverse=descending)
                expect(seen, wanted, f"{kind.__name__}, descending={descending}")


async def walk_revisions(store: Store, row: int, kind: type[Any], *, descending: bool) -> list[int]:
    seen: list[int] = []
    cursor: str | None = None
    while True:
        request = PageRequest(limit=3, cursor=cursor, descending=descending)
        page: Page[Any] = await store.list_records(row, kind, request)
        seen += [record.revision for record in page.items]
        expect(len(seen) < MANY_PAGES, True, "the walk comes to an end")
        cursor = page.next
        if cursor is None:
            return seen


async def a1_a_cursor_outlives_a_reopening(open_store: OpenStore) -> None:
    async with open_store() as store:
        rows = await many_instances(store, 6, tied=2)
        first = await store.list_instances(EVERYTHING, CREATED, PageRequest(limit=4))
    async with open_store() as store:
        second = await store.list_instances(EVERYTHING, CREATED, PageRequest(limit=4, cursor=first.next))
        found = [r.row for r in (*first.items, *second.items)]
        expect(found, rows[::-1], "two pages with a reopening between them")


FILTERS: Final = (
    EVERYTHING,
    InstanceFilter(tenant_id=TENANT),
    InstanceFilter(tenant_id="other"),
    InstanceFilter(tenant_id="nobody"),
    InstanceFilter(statuses=frozenset({Status.RUNNING})),
    InstanceFilter(tenant_id=TENANT, statuses=frozenset({Status.RUNNING, Status.FAILED})),
    InstanceFilter(statuses=frozenset({Status.CANCELLED})),
    InstanceFilter(workflow="order"),
    InstanceFilter(id_prefix="a"),
    InstanceFilter(tenant_id=TENANT, id_prefix="a_"),
    InstanceFilter(id_prefix="a%"),
    InstanceFilter(id_prefix=""),
    InstanceFilter(id_prefix="\U0010ffff"),
    InstanceFilter(id_prefix="\ud7ff"),
    InstanceFilter(created_from_us=102, created_before_us=105),
    InstanceFilter(finished_from_us=502, finished_before_us=505),
    InstanceFilter(tenant_id=TENANT, finished_before_us=504, statuses=frozenset({Status.COMPLETED})),
)
IDS: Final = ("a", "a_1", "a%1", "ab1", "A", "b", "\U0010ffff", "\U0010ffffz", "\ud7ff!", "\ue000")


def matches(record: InstanceRecord, where: InstanceFilter) -> bool:
    """What a filter means, in plain Python."""
    at = record.finished_us
    return (
        (where.tenant_id is None or record.tenant_id == where.tenant_id)
        and (not where.statuses or record.status in where.statuses)
        and (where.workflow is None or record.workflow == where.workflow)
        and record.instance_id.startswith(where.id_prefix or "")
        and (where.created_from_us is None or record.created_us >= where.created_from_us)
        and (where.created_before_us is None or record.created_us < where.created_before_us)
        and (where.finished_from_us is None or (at is not None and at >= where.finished_from_us))
        and (where.finished_before_us is None or (at is not None and at < where.finished_before_us))
    )


async def filterable(store: Store) -> list[InstanceRecord]:
    row = await store.reserve(2 * len(IDS))
    records = []
    for n, name in enumerate((*IDS, *IDS)):
        fields = {
            "tenant_id": TENANT if n < len(IDS) else "other",
            "instance_id": name,
            "created_us": 100 + n % 7,
            "workflow": "order" if n % 3 else None,
        }
        record = instance(row + n, **fields) if n % 2 else finished(row + n, 500 + n % 7, **fields)
        records.append(record)
    await apply_all(store, *(creation(record) for record in records))
    return records


async def a2_list_and_count_agree_for_every_filter(open_store: OpenStore) -> None:
    async with open_store() as store:
        records = await filterable(store)
        for where in FILTERS:
            wanted = {r.row for r in records if matches(r, where)}
            seen = await walk(store, where, CREATED, limit=3)
            expect({r.row for r in seen}, wanted, f"the list for {where}")
            expect(await store.count_instances(where), len(wanted), f"the count for {where}")
            ended = await walk(store, where, FINISHED, limit=3)
            expect(
                {r.row for r in ended},
                {r.row for r in records if matches(r, where) and r.finished_us is not None},
                f"the list by finish for {where}",
            )


EVENT_FILTERS: Final = (
    None,
    EventFilter(),
    EventFilter(type=EventType.CUSTOM),
    EventFilter(type=EventType.COMPLETED),
    EventFilter(subtype="log"),
    EventFilter(type=EventType.CUSTOM, subtype="metric"),
    EventFilter(created_from_us=2_003, created_before_us=2_006),
)


async def a2_events_are_filtered(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        events = [
            samples.event(
                n,
                type=EventType.HEARTBEAT if n % 3 == 0 else EventType.CUSTOM,
                subtype="log" if n % 2 else "metric",
            )
            for n in range(1, 10)
        ]
        units = [unit(row, event.revision, event) for event in events[1:]]
        await apply_all(store, creation(instance(row), events[0]), *units)
        for where in EVENT_FILTERS:
            wanted = tuple(e for e in events if where is None or event_matches(e, where))
            page = await store.list_records(row, EventRecord, PageRequest(descending=False), where)
            expect(page.items, wanted, f"the events for {where}")
            count = await store.count_records(row, EventRecord, where)
            expect(count, len(wanted), f"the count for {where}")


def event_matches(event: EventRecord, where: EventFilter) -> bool:
    return (
        (where.type is None or event.type is where.type)
        and (where.subtype is None or event.subtype == where.subtype)
        and (where.created_from_us is None or event.created_us >= where.created_from_us)
        and (where.created_before_us is None or event.created_us < where.created_before_us)
    )


async def a3_a_foreign_cursor_is_refused(open_store: OpenStore) -> None:
    async with open_store() as store:
        rows = await many_instances(store, 6, tied=2)
        await apply_all(store, *(unit(rows[0], n, samples.event(n), samples.error(n)) for n in (2, 3)))
        page = await store.list_instances(EVERYTHING, CREATED, PageRequest(limit=2))
        events = await store.list_records(rows[0], EventRecord, PageRequest(limit=1))
        foreign = page.next, events.next
        for cursor in (*foreign, *malformed_cursors()):
            for call in (
                store.list_instances(EVERYTHING, FINISHED, PageRequest(cursor=cursor)),
                store.list_instances(EVERYTHING, CREATED, PageRequest(cursor=cursor, descending=False)),
                store.list_records(rows[0], ErrorRecord, PageRequest(cursor=cursor)),
                store.list_records(rows[1], EventRecord, PageRequest(cursor=cursor)),
            ):
                error = await expect_error(ValidationError, call, f"cursor {cursor!r}")
                expect(error.field, "cursor", "the field that is named")


def malformed_cursors() -> tuple[str, ...]:
    short = b'["instances/created/desc",1]'
    texts = (b"[]", b"{}", b"1", b"null", short, b"[" * 300, b"\xff\xfe", b'["a",1e99,2]')
    return ("", "!", "a", "\u00e9", "a" * 100_000, *(base64.urlsafe_b64encode(t).decode() for t in texts))


async def a4_order_is_by_instant_and_then_by_row(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(4)
        records = [
            finished(row, 20, created_us=300),
            finished(row + 1, 10, created_us=100),
            finished(row + 2, 20, created_us=100),
            instance(row + 3, created_us=200),
        ]
        await apply_all(store, *(creation(record) for record in records))
        created = await walk(store, EVERYTHING, CREATED, limit=10, descending=False)
        expect([r.row - row for r in created], [1, 2, 3, 0], "by creation")
        ended = await walk(store, EVERYTHING, FINISHED, limit=10, descending=False)
        expect([r.row - row for r in ended], [1, 0, 2], "by finish")


async def a4_records_are_ordered_by_revision_and_not_by_time(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        events = [samples.event(n, created_us=100 - n) for n in (1, 2, 3)]
        units = [unit(row, event.revision, event) for event in events[1:]]
        await apply_all(store, creation(instance(row), events[0]), *units)
        newest_first = await store.list_records(row, EventRecord, PageRequest())
        expect(newest_first.items, tuple(reversed(events)), "newest first by default")


async def c1_after_close_everything_raises(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        await apply_all(store, creation(instance(row)))
        await store.close()
        await store.close()
        for name, call in calls(store, row).items():
            await expect_error(RuntimeClosed, call, name)
        await expect_error(RuntimeClosed, as_call(store.statistics), "statistics")


async def as_call(function: Callable[[], object]) -> object:
    return function()


def calls(store: Store, row: int) -> dict[str, Awaitable[object]]:
    """One call of every method but `close`."""
    page = PageRequest()
    return {
        "apply": store.apply([unit(row, 2, samples.checkpoint(2))]),
        "apply of nothing": store.apply([]),
        "settle": store.settle(),
        "reserve": store.reserve(1),
        "maintain": store.maintain(),
        "load": store.load(TENANT, "i", 1),
        "checkpoint": store.checkpoint(row, "c"),
        "wait": store.wait(row, "w"),
        "request": store.request(row, "r"),
        "signal": store.signal(row, 1),
        "error": store.error(row, 1),
        "attempt": store.attempt(row, "c", 1),
        "payloads": store.payloads(row, frozenset(PayloadKind)),
        "compensation_data": store.compensation_data(row, "c"),
        "due": store.due(1, None, 1),
        "running": store.running(1, 0, 1),
        "list_instances": store.list_instances(EVERYTHING, CREATED, page),
        "count_instances": store.count_instances(EVERYTHING),
        "list_records": store.list_records(row, EventRecord, page),
        "count_records": store.count_records(row, EventRecord),
        "find": store.find(TENANT, "i"),
        "check": store.check(),
    }


async def c1_an_open_store_answers(open_store: OpenStore) -> None:
    async with open_store() as store:
        await store.check()
        await store.maintain()
        row = await store.reserve(1)
        await apply_all(store, creation(instance(row)), unit(row, 2, samples.checkpoint(2)))
        found = store.statistics()
        expect((found.batches, found.units), (1, 2), "batches and units in the statistics")


SENTENCES: Final = (
    a1_pages_continue_where_they_ended,
    a1_the_last_page_says_so,
    a1_a_record_present_all_along_is_seen_once,
    a1_records_are_paged_like_instances,
    a1_a_cursor_outlives_a_reopening,
    a2_list_and_count_agree_for_every_filter,
    a2_events_are_filtered,
    a3_a_foreign_cursor_is_refused,
    a4_order_is_by_instant_and_then_by_row,
    a4_records_are_ordered_by_revision_and_not_by_time,
    c1_after_close_everything_raises,
    c1_an_open_store_answers,
)
