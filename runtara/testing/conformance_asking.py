"""The sentences A1 to A4 for instances: lists, counts, cursors."""

import base64
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from runtara.errors import ValidationError
from runtara.persistence.store import InstanceFilter, InstanceOrder, Page, PageRequest, Store
from runtara.records import ErrorRecord, EventRecord, InstanceRecord, Status, StepRecord
from runtara.testing import samples
from runtara.testing.conformance_walks import Between, in_order, instance_matches, walk
from runtara.testing.conformance_writing import OpenStore, apply_all
from runtara.testing.expectations import expect, expect_error
from runtara.testing.samples import TENANT, creation, finished, instance, unit

EVERYTHING: Final = InstanceFilter()
CREATED, FINISHED = InstanceOrder.CREATED, InstanceOrder.FINISHED


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


TIED: Final = 4
LIVE: Final = frozenset({Status.RUNNING, Status.COMPLETED})
WALKS: Final = (
    (EVERYTHING, CREATED),
    (EVERYTHING, FINISHED),
    (InstanceFilter(statuses=LIVE), CREATED),
    (InstanceFilter(tenant_id=TENANT, statuses=LIVE | {Status.FAILED}), CREATED),
    (InstanceFilter(tenant_id=TENANT, statuses=frozenset({Status.COMPLETED, Status.FAILED})), FINISHED),
)
"""Lists in which what is there stays there while it finishes; several statuses are lists merged."""


async def a1_a_record_present_all_along_is_seen_once(open_store: OpenStore) -> None:
    async with open_store() as store:
        for where, order in WALKS:
            for descending in (False, True):
                rows = await many_instances(store, 24, tied=TIED)
                seen = await walk(
                    store,
                    where,
                    order,
                    limit=6,
                    descending=descending,
                    between=disturbance(store, rows),
                )
                found = sorted(r.row for r in seen if r.row in rows[::2])
                what = f"{order}, descending={descending}, {where}"
                if order is CREATED:
                    expect(found, rows[::2], f"each row that may have finished meanwhile, once: {what}")
                ended = sorted(r.row for r in seen if r.row in rows[1::2])
                expect(ended, rows[1::2], f"each row that had finished before, once: {what}")
                expect(len({r.row for r in seen}), len(seen), f"no row twice: {what}")


def disturbance(store: Store, rows: list[int]) -> Between:
    """Adds and finishes instances at instants that other ones have.

    Only after the first pages, or a walk against the growing end would never end.
    """

    async def between(number: int) -> None:
        if number > 8:
            return
        extra = await store.reserve(2)
        at = number * 2 % len(rows)
        record = finished(rows[at], 5_000 + number % 8, created_us=100 + at // TIED, revision=2)
        await apply_all(
            store,
            creation(instance(extra, created_us=100 + number % 8)),
            creation(finished(extra + 1, 5_000 + number % 8, created_us=100 + number % 8)),
            unit(rows[at], 2, record),
        )

    return between


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
    InstanceFilter(statuses=frozenset({Status.RUNNING, Status.COMPLETED})),
    InstanceFilter(tenant_id=TENANT, statuses=frozenset({Status.RUNNING, Status.FAILED})),
    InstanceFilter(statuses=frozenset({Status.CANCELLED})),
    InstanceFilter(statuses=frozenset({Status.PENDING, Status.SUSPENDED})),
    InstanceFilter(tenant_id=TENANT, statuses=frozenset(Status)),
    InstanceFilter(workflow="order"),
    InstanceFilter(tenant_id="other", workflow="order"),
    InstanceFilter(tenant_id="other", workflow="order", statuses=frozenset({Status.FAILED, Status.PENDING})),
    InstanceFilter(tenant_id=TENANT, workflow="Order"),
    InstanceFilter(id_prefix="a"),
    InstanceFilter(tenant_id=TENANT, id_prefix="a_"),
    InstanceFilter(id_prefix="a%"),
    InstanceFilter(id_prefix=""),
    InstanceFilter(id_prefix="\U0010ffff"),
    InstanceFilter(id_prefix="\ud7ff"),
    InstanceFilter(created_from_us=102, created_before_us=105),
    InstanceFilter(created_from_us=102, created_before_us=102),
    InstanceFilter(finished_from_us=502, finished_before_us=505),
    InstanceFilter(finished_from_us=503, created_before_us=105, id_prefix="a"),
    InstanceFilter(tenant_id=TENANT, finished_before_us=504, statuses=frozenset({Status.COMPLETED})),
    InstanceFilter(awaits_client=True),
    InstanceFilter(awaits_client=True, statuses=frozenset({Status.SUSPENDED, Status.PENDING})),
    InstanceFilter(awaits_client=True, tenant_id="other", workflow="order", created_from_us=102),
)
IDS: Final = ("a", "a_1", "a%1", "ab1", "A", "b", "\U0010ffff", "\U0010ffffz", "\ud7ff!", "\ue000")


async def filterable(store: Store) -> list[InstanceRecord]:
    row = await store.reserve(2 * len(IDS))
    statuses = [status for status in Status if status is not Status.UNKNOWN]
    records = []
    for n, name in enumerate((*IDS, *IDS)):
        status = statuses[(n + n // len(statuses)) % len(statuses)]
        record = instance(
            row + n,
            tenant_id=TENANT if n < len(IDS) else "other",
            instance_id=name,
            created_us=100 + n * 3 % 7,
            workflow="order" if n % 3 else None,
            status=status,
            finished_us=500 + n % 7 if status.is_terminal else None,
            awaits_client_us=(None, 0, 7)[n % 4 % 3],
        )
        records.append(record)
    await apply_all(store, *(creation(record) for record in records))
    return records


async def a2_list_and_count_agree_for_every_filter(open_store: OpenStore) -> None:
    async with open_store() as store:
        records = await filterable(store)
        for where in FILTERS:
            wanted = [r for r in records if instance_matches(r, where)]
            expect(await store.count_instances(where), len(wanted), f"the count for {where}")
            for order in InstanceOrder:
                for descending in (False, True):
                    seen = await walk(store, where, order, limit=3, descending=descending)
                    what = f"{order}, descending={descending}, {where}"
                    expect(seen, in_order(wanted, order, descending=descending), f"the list for {what}")


Asked = Callable[[PageRequest], Awaitable[Page[Any]]]


COMPARED: Final[tuple[type[Any], ...]] = (EventRecord, StepRecord, ErrorRecord)


def lists_of(store: Store, rows: list[int]) -> dict[str, Asked]:
    """Lists that differ in one thing each."""
    found: dict[str, Asked] = {
        f"instances by {order.value}": partial(store.list_instances, EVERYTHING, order)
        for order in InstanceOrder
    }
    for row in rows:
        for kind in COMPARED:
            found[f"{kind.__name__} of {row}"] = partial(store.list_records, row, kind)
    return found


async def a3_a_foreign_cursor_is_refused(open_store: OpenStore) -> None:
    async with open_store() as store:
        rows = (await many_instances(store, 6, tied=2))[1::2]
        units = [unit(row, n, *samples.one_of_each(n)) for row in rows[:2] for n in (2, 3)]
        await apply_all(store, *units)
        lists = lists_of(store, rows[:2])
        cursors: dict[tuple[str, bool], str] = {}
        for name, asked in lists.items():
            for descending in (False, True):
                first = await asked(PageRequest(limit=1, descending=descending))
                cursors[name, descending] = first.next or "no cursor"
        for here in cursors:
            asked, descending = lists[here[0]], here[1]
            second = await asked(PageRequest(limit=1, cursor=cursors[here], descending=descending))
            expect(len(second.items), 1, f"{here} goes on from its own cursor")
            foreign = [cursor for there, cursor in cursors.items() if there != here]
            for cursor in (*foreign, *malformed_cursors()):
                call = asked(PageRequest(cursor=cursor, descending=descending))
                error = await expect_error(ValidationError, call, f"{here} with cursor {cursor!r}")
                expect(error.field, "cursor", "the field that is named")


async def a3_a_cursor_may_go_on_with_another_filter(open_store: OpenStore) -> None:
    async with open_store() as store:
        rows = await many_instances(store, 8, tied=2)
        first = await store.list_instances(EVERYTHING, CREATED, PageRequest(limit=3))
        ended = InstanceFilter(statuses=frozenset({Status.COMPLETED}))
        rest = await store.list_instances(ended, CREATED, PageRequest(cursor=first.next))
        found = [r.row for r in (*first.items, *rest.items)]
        expect(found, [rows[7], rows[6], rows[5], rows[3], rows[1]], "all, and then those that have ended")


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


SENTENCES: Final = (
    a1_pages_continue_where_they_ended,
    a1_the_last_page_says_so,
    a1_a_record_present_all_along_is_seen_once,
    a1_a_cursor_outlives_a_reopening,
    a2_list_and_count_agree_for_every_filter,
    a3_a_foreign_cursor_is_refused,
    a3_a_cursor_may_go_on_with_another_filter,
    a4_order_is_by_instant_and_then_by_row,
)
