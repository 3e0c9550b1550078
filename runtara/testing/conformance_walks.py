"""Lists of a store, walked page by page, and what their filters mean in plain Python."""

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from runtara.persistence.store import (
    PAGE_BYTES,
    CheckpointFilter,
    EventFilter,
    InstanceFilter,
    InstanceOrder,
    Page,
    PageRequest,
    R,
    RecordFilter,
    StepFilter,
    Store,
)
from runtara.records import (
    CheckpointRecord,
    CompensationAttemptRecord,
    ErrorRecord,
    EventRecord,
    InstanceRecord,
    RequestRecord,
    RetryAttemptRecord,
    SignalRecord,
    StepRecord,
    WaitRecord,
)
from runtara.testing.expectations import expect

T = TypeVar("T")
Between = Callable[[int], Awaitable[None]]
"""Called after each page, with its number."""

MANY_PAGES: Final = 1000
"""More than any walk here has; a cursor that stands still is found by it."""
KINDS: Final[tuple[type[Any], ...]] = (
    CheckpointRecord,
    WaitRecord,
    EventRecord,
    StepRecord,
    SignalRecord,
    ErrorRecord,
    RetryAttemptRecord,
    CompensationAttemptRecord,
    RequestRecord,
)
"""Every kind of record that is listed."""


# ---------------------------------------------------------------- walking


async def pages(
    page_of: Callable[[PageRequest], Awaitable[Page[T]]],
    *,
    limit: int,
    descending: bool = True,
    between: Between | None = None,
) -> list[tuple[T, ...]]:
    """The items of every page of a list, with ``between(page number)`` after each page."""
    found: list[tuple[T, ...]] = []
    cursor: str | None = None
    while True:
        page = await page_of(PageRequest(limit=limit, cursor=cursor, descending=descending))
        found.append(page.items)
        expect(len(page.items) <= limit, True, "the page's limit")
        expect(len(page.items) > 0 or page.next is None, True, "a page that goes on holds something")
        expect(len(found) < MANY_PAGES, True, "the walk comes to an end")
        cursor = page.next
        if between is not None:
            await between(len(found))
        if cursor is None:
            return found


def gathered(found: list[tuple[T, ...]]) -> list[T]:
    return [item for page in found for item in page]


async def walk(
    store: Store,
    where: InstanceFilter,
    order: InstanceOrder,
    *,
    limit: int,
    descending: bool = True,
    between: Between | None = None,
) -> list[InstanceRecord]:
    """All instances of a list."""

    async def page_of(page: PageRequest) -> Page[InstanceRecord]:
        return await store.list_instances(where, order, page)

    return gathered(await pages(page_of, limit=limit, descending=descending, between=between))


async def walk_records(
    store: Store,
    row: int,
    kind: type[R],
    where: RecordFilter | None = None,
    *,
    limit: int,
    descending: bool = True,
    between: Between | None = None,
) -> list[R]:
    """All records of a list."""
    return gathered(await record_pages(store, row, kind, where, limit, descending, between))


async def record_pages(
    store: Store,
    row: int,
    kind: type[R],
    where: RecordFilter | None = None,
    limit: int = MANY_PAGES,
    descending: bool = True,
    between: Between | None = None,
) -> list[tuple[R, ...]]:
    """All records of a list, page by page."""

    async def page_of(page: PageRequest) -> Page[R]:
        return await store.list_records(row, kind, page, where)

    return await pages(page_of, limit=limit, descending=descending, between=between)


def expect_bounded(found: list[tuple[T, ...]], size_of: Callable[[T], int], what: str) -> None:
    """Each page ends with the record that brings its large values to `PAGE_BYTES` (A5)."""
    for number, page in enumerate(found, 1):
        sizes = [size_of(item) for item in page]
        expect(sum(sizes[:-1]) < PAGE_BYTES, True, f"{what}: page {number} ends in time; sizes {sizes}")


# ---------------------------------------------------------------- what filters mean


def instance_matches(record: InstanceRecord, where: InstanceFilter) -> bool:
    return (
        (where.tenant_id is None or record.tenant_id == where.tenant_id)
        and (not where.statuses or record.status in where.statuses)
        and (where.workflow is None or record.workflow == where.workflow)
        and record.instance_id.startswith(where.id_prefix or "")
        and within(record.created_us, where.created_from_us, where.created_before_us)
        and within(record.finished_us, where.finished_from_us, where.finished_before_us)
        and (not where.awaits_client or record.awaits_client_us is not None)
    )


def checkpoint_matches(checkpoint: CheckpointRecord, where: CheckpointFilter) -> bool:
    return within(checkpoint.created_us, where.created_from_us, where.created_before_us)


def event_matches(event: EventRecord, where: EventFilter) -> bool:
    return (
        (where.type is None or event.type is where.type)
        and (where.subtype is None or event.subtype == where.subtype)
        and within(event.created_us, where.created_from_us, where.created_before_us)
        and (where.text is None or (event.payload is not None and where.text.encode() in event.payload))
        and in_scope(event, where)
    )


def step_matches(step: StepRecord, where: StepFilter) -> bool:
    return (
        (not where.statuses or step.status in where.statuses)
        and (where.type is None or step.step_type == where.type)
        and (not where.step_ids or step.step_id in where.step_ids)
        and in_scope(step, where)
    )


def in_scope(record: EventRecord | StepRecord, where: EventFilter | StepFilter) -> bool:
    return (
        (where.scope_id is None or record.scope_id == where.scope_id)
        and (where.parent_scope_id is None or record.parent_scope_id == where.parent_scope_id)
        and (not where.root_only or record.parent_scope_id is None)
    )


def within(instant: int | None, start: int | None, end: int | None) -> bool:
    """In the half open range; an instant that is not there is in no range but the whole."""
    if instant is None:
        return start is None and end is None
    return (start is None or instant >= start) and (end is None or instant < end)


def in_order(
    records: list[InstanceRecord], order: InstanceOrder, *, descending: bool
) -> list[InstanceRecord]:
    """As a list gives them; by finish, only those that have ended."""
    if order is InstanceOrder.CREATED:
        return sorted(records, key=lambda r: (r.created_us, r.row), reverse=descending)
    ended = [(r.finished_us, r.row, r) for r in records if r.finished_us is not None]
    return [r for _, _, r in sorted(ended, key=lambda e: e[:2], reverse=descending)]
