"""The sentences D1 to D3: which instances may go, and that all of them goes."""

from collections.abc import Sequence
from typing import Final

import trio

from runtara.errors import ValidationError
from runtara.persistence.store import Finished, InstanceFilter, InstanceOrder, PageRequest, Store, Unit
from runtara.records import (
    CheckpointRecord,
    InstanceRecord,
    PayloadKind,
    PutPayload,
    Status,
    StepRecord,
)
from runtara.testing import samples
from runtara.testing.conformance_operating import TABLES
from runtara.testing.conformance_walks import KINDS
from runtara.testing.conformance_writing import OpenStore, apply_all, load_row, loaded_row
from runtara.testing.expectations import expect, expect_error
from runtara.testing.samples import TENANT, creation, finished, instance, unit

PLENTY: Final = 10_000
"""More than any history here counts."""
NO_ROWS: Final[frozenset[int]] = frozenset()
ENDED: Final = frozenset(status for status in Status if status.is_terminal)
FAR: Final = 2**63 - 1

# ---------------------------------------------------------------- D1: which have ended


def as_finished(record: InstanceRecord) -> Finished:
    assert record.finished_us is not None
    return Finished(
        tenant_id=record.tenant_id,
        instance_id=record.instance_id,
        row=record.row,
        finished_us=record.finished_us,
    )


async def terminal_walk(
    store: Store, status: Status, before_us: int, tenant_id: str | None, limit: int
) -> list[Finished]:
    seen: list[Finished] = []
    after: tuple[int, int] | None = None
    while page := await store.terminal(status, before_us, tenant_id, after, limit):
        expect(len(page) <= limit, True, "the page's limit")
        expect(len(seen) < 1_000, True, "the walk comes to an end")
        seen += page
        after = (page[-1].finished_us, page[-1].row)
    return seen


async def d1_terminal_ones_come_by_finish_and_not_by_creation(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(60)
        records = []
        for n in range(60):
            status = (Status.COMPLETED, Status.FAILED, Status.CANCELLED)[n % 3]
            tenant = "other" if n % 5 == 0 else TENANT
            at = n * 7 % 20 // 3 - 2  # many at one instant, some before 1970
            records.append(finished(row + n, at, status=status, tenant_id=tenant, created_us=-n))
        await apply_all(store, *(creation(record) for record in records))
        for status in ENDED:
            for tenant_id in (None, TENANT, "other", "nobody"):
                for before_us in (-3, -2, 0, 3, FAR):
                    chosen = [
                        as_finished(r)
                        for r in records
                        if r.status is status and tenant_id in (None, r.tenant_id)
                    ]
                    wanted = sorted(
                        (f for f in chosen if f.finished_us < before_us), key=lambda f: (f.finished_us, f.row)
                    )
                    for limit in (1, 4, 100):
                        seen = await terminal_walk(store, status, before_us, tenant_id, limit)
                        what = f"{status.name} of {tenant_id!r} before {before_us} in pages of {limit}"
                        expect(seen, wanted, what)


async def d1_an_instance_that_lives_is_never_terminal(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(4)
        live = (Status.PENDING, Status.RUNNING, Status.SUSPENDED)
        await apply_all(store, *(creation(instance(row + n, status=s)) for n, s in enumerate(live)))
        for status in Status:
            expect(await store.terminal(status, FAR, None, None, 10), [], f"{status.name}, none has ended")
        at = 2_000
        await apply_all(store, creation(finished(row + 3, at, created_us=0)))
        found = await store.terminal(Status.COMPLETED, at, None, None, 10)
        expect(found, [], "before the very instant at which it ended")
        found = await store.terminal(Status.COMPLETED, at + 1, None, None, 10)
        expect([f.row for f in found], [row + 3], "before the instant after it")


async def d1_pages_go_on_while_what_they_held_is_purged(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(30)
        rows = list(range(row, row + 30))
        await apply_all(store, *(creation(finished(r, 100 + (r - row) // 7)) for r in rows))
        seen: list[int] = []
        after: tuple[int, int] | None = None
        while page := await store.terminal(Status.COMPLETED, FAR, TENANT, after, 4):
            await expect_purged(store, [f.row for f in page])
            seen += [f.row for f in page]
            after = (page[-1].finished_us, page[-1].row)
        expect(seen, rows, "each of them once, oldest first")
        expect(await store.counts(None), {}, "the instances that are left")


# ---------------------------------------------------------------- what is purged


def with_history(record: InstanceRecord) -> Unit:
    """The creation of an instance with rows in every table."""
    puts = [PutPayload(kind=kind, data=b"large") for kind in PayloadKind]
    return creation(record, samples.compensatable(1), *samples.one_of_each(1)[1:], *puts)


def with_checkpoints(record: InstanceRecord, count: int, size: int = 1) -> list[Unit]:
    """The units of an instance that has ``count`` checkpoints of ``size`` bytes."""
    saves = (unit(record.row, n, samples.checkpoint(n, state=b"x" * size)) for n in range(2, count + 2))
    return [creation(record), *saves]


async def rows_left(store: Store) -> dict[str, int]:
    """How many rows there are, of the tables that have any."""
    rows = (await store.growth()).rows
    return {table: rows[table] for table in TABLES if rows[table]}


async def expect_purged(store: Store, rows: Sequence[int], most: int = PLENTY) -> bool:
    """Purge ``rows``, all of which must go; whether some of their history is left."""
    found = await store.purge(rows, most)
    expect(found.rows, frozenset(rows), "the rows that purge removed")
    return found.children_left


async def sweep_all(store: Store, most: int) -> int:
    """Sweep until nothing is left; how often it took."""
    before = sum((await rows_left(store)).values())
    for number in range(1, 1_000):
        if not await store.sweep(most):
            return number
        after = sum((await rows_left(store)).values())
        expect(after < before, True, "a sweep that leaves something has deleted something")
        before = after
    raise AssertionError("sweep leaves something for ever")


# ---------------------------------------------------------------- D2: purging instances


async def d2_a_purged_instance_is_not_found_any_more(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(2)
        gone = finished(row, 50, sleep_until_us=1, deadline_us=1)
        kept = finished(row + 1, 50)
        await apply_all(store, *(with_history(record) for record in (gone, kept)))
        await expect_purged(store, [row])
        expect(await load_row(store, row), None, "load")
        expect(await store.find(TENANT, gone.instance_id), None, "find")
        expect(await store.counts(TENANT), {Status.COMPLETED: 1}, "counts")
        expect(await store.count_instances(InstanceFilter()), 1, "count_instances")
        for order in InstanceOrder:
            page = await store.list_instances(InstanceFilter(), order, PageRequest())
            expect([r.row for r in page.items], [row + 1], f"list_instances by {order.value}")
        found = await store.terminal(Status.COMPLETED, FAR, None, None, 10)
        expect([f.row for f in found], [row + 1], "terminal")
        expect(await store.due(FAR, None, 10), [], "due")


async def d2_only_terminal_instances_are_purged(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(6)
        records = [
            instance(row + n, status=status, finished_us=9 if status.is_terminal else None)
            for n, status in enumerate(s for s in Status if s is not Status.UNKNOWN)
        ]
        await apply_all(store, *(with_history(record) for record in records))
        live = [record for record in records if not record.status.is_terminal]
        before = [await loaded_row(store, record.row) for record in live]
        found = await store.purge([record.row for record in records], PLENTY)
        wanted = frozenset(r.row for r in records if r.status.is_terminal)
        expect(found.rows, wanted, "the rows that purge removed")
        expect([await loaded_row(store, r.row) for r in live], before, "those that live, untouched")
        expect(await store.sweep(PLENTY), False, "whether anything is left to sweep")
        whole = await rows_left(store)
        share = {"instances": 1, "payloads": len(PayloadKind)}
        expect(whole, {t: share.get(t, 1) * len(live) for t in TABLES}, "their history, untouched")
        for record in live:
            kinds = frozenset(PayloadKind)
            expect(len(await store.payloads(record.row, kinds)), len(kinds), "their large values")


async def d2_an_instance_may_move_on_and_be_purged_once_it_has_ended(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        await apply_all(store, with_history(instance(row)))
        expect((await store.purge([row], PLENTY)).rows, NO_ROWS, "while it runs")
        await apply_all(store, unit(row, 2, samples.checkpoint(2), finished(row, 9, revision=2)))
        await expect_purged(store, [row])
        expect((await store.purge([row], PLENTY)).rows, NO_ROWS, "once it is purged")


async def d2_rows_that_are_not_there_or_given_twice_do_no_harm(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(3)
        await apply_all(store, *(with_history(finished(r, 9)) for r in (row, row + 1)))
        nothing = await store.purge([], PLENTY)
        expect((nothing.rows, nothing.children_left), (NO_ROWS, False), "a purge of nothing")
        unknown = await store.purge([row + 2, row + 1_000, 2**62, 0, -1], PLENTY)
        expect((unknown.rows, unknown.children_left), (NO_ROWS, False), "a purge of what is not there")
        found = await store.purge([row, row, row + 2, row], PLENTY)
        expect(found.rows, frozenset({row}), "one row given three times, beside one that is not there")
        expect(found.children_left, False, "whether some of its history is left")
        await loaded_row(store, row + 1)
        expect(await store.count_records(row + 1, CheckpointRecord), 1, "the history of the other one")
        expect(
            (await store.purge([row, row + 1], PLENTY)).rows, frozenset({row + 1}), "one that is gone again"
        )
        expect(await rows_left(store), {}, "the rows that are left")


async def d2_many_are_purged_at_once(open_store: OpenStore) -> None:
    count = 1_500
    async with open_store() as store:
        row = await store.reserve(count)
        rows = range(row, row + count)
        await apply_all(store, *(creation(finished(r, 9), samples.event(1), samples.step(1)) for r in rows))
        expect(await expect_purged(store, rows, 3 * count), False, "whether some history is left")
        expect(await rows_left(store), {}, "the rows that are left")


async def d2_a_late_change_of_a_purged_instance_is_left_out(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        await apply_all(store, *with_checkpoints(finished(row, 9), 40))
        late = unit(row, 99, samples.checkpoint(99), samples.finish_step(1, 99))
        for left in (await expect_purged(store, [row], 5), await store.sweep(PLENTY)):
            expect(await store.apply([late]), frozenset({row}), f"with children left: {left}")
        expect(await rows_left(store), {}, "the rows that are left")


async def d2_an_id_that_is_used_again_starts_clean(open_store: OpenStore) -> None:
    async with open_store() as store:
        first = await store.reserve(1)
        await apply_all(
            store,
            with_history(finished(first, 9, instance_id="order")),
            *(unit(first, n, *samples.one_of_each(n)) for n in range(2, 40)),
        )
        expect(await expect_purged(store, [first], 5), True, "whether some of its history is left")
        second = await store.reserve(1)
        expect(second > first, True, "the number of the new one is a new one")
        again = instance(second, instance_id="order")
        await apply_all(store, creation(again))
        await expect_clean(store, again)
        await apply_all(store, unit(second, 2, *samples.one_of_each(2)))
        before = await store.load(TENANT, "order", 100)
        await sweep_all(store, 50)
        expect(await store.load(TENANT, "order", 100), before, "the new one when the old one is swept")
        for kind in KINDS:
            expect(await store.count_records(second, kind), 1, f"its {kind.__name__}s")
            expect(await store.count_records(first, kind), 0, f"{kind.__name__}s of the old one")


async def expect_clean(store: Store, record: InstanceRecord) -> None:
    """An instance that was only created holds nothing of another one before it."""
    loaded = await store.load(record.tenant_id, record.instance_id, 100)
    if loaded is None:
        raise AssertionError(f"{record.instance_id} is not there")
    expect((loaded.record, loaded.revision, loaded.checkpoint_id), (record, 1, None), "the new row")
    lists = (loaded.signals, loaded.waits, loaded.compensations, loaded.steps, loaded.last_error)
    expect(lists, ((), (), (), (), None), "its lists")
    expect((loaded.checkpoint_ids, loaded.wait_ids, loaded.request_ids), (frozenset(),) * 3, "its ids")
    expect(await store.payloads(record.row, frozenset(PayloadKind)), {}, "its large values")


async def d2_an_id_may_be_purged_again_and_again(open_store: OpenStore) -> None:
    async with open_store() as store:
        rows: list[int] = []
        for turn in range(4):
            rows.append(await store.reserve(1))
            record = finished(rows[-1], 9, instance_id="order")
            await apply_all(store, *with_checkpoints(record, 20))
            expect(await expect_purged(store, rows[-1:], 3), True, f"history left in turn {turn}")
        await sweep_all(store, 7)
        expect(await rows_left(store), {}, "the rows that are left")
        expect(await store.verify(), [], "the findings")


async def d2_numbers_of_purged_instances_are_not_given_again(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(5)
        await apply_all(store, *(with_history(finished(r, 9)) for r in range(row, row + 5)))
        await expect_purged(store, range(row, row + 5))
        expect(await store.sweep(PLENTY), False, "whether anything is left to sweep")
    async with open_store() as store:
        expect(await store.reserve(1) >= row + 5, True, "a number given after the purge and a reopening")


# ---------------------------------------------------------------- D3: their history


async def d3_children_go_in_the_same_transaction(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(3)
        ended = [finished(r, 9) for r in (row, row + 2)]
        await apply_all(store, *(with_history(record) for record in (*ended, instance(row + 1))))
        left = await expect_purged(store, [record.row for record in ended])
        expect(left, False, "whether some of their history is left")
        share = {"payloads": len(PayloadKind)}
        expect(await rows_left(store), {t: share.get(t, 1) for t in TABLES}, "the rows of the one that lives")
        expect(await store.sweep(PLENTY), False, "whether anything is left to sweep")
        expect(await store.verify(), [], "the findings")


async def d3_a_bound_below_one_is_refused(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        await apply_all(store, with_history(finished(row, 9)))
        for call in (store.purge([row], 0), store.purge([], -1), store.sweep(0)):
            error = await expect_error(ValidationError, call, "a bound below 1")
            expect(error.field, "most", "the field that is named")
        await loaded_row(store, row)


async def d3_nothing_to_sweep_is_told(open_store: OpenStore) -> None:
    async with open_store() as store:
        expect(await store.sweep(1), False, "in an empty store")
        row = await store.reserve(1)
        await apply_all(store, with_history(finished(row, 9)))
        whole = await rows_left(store)
        expect(await store.sweep(PLENTY), False, "when none is purged")
        expect(await rows_left(store), whole, "the rows, which no sweep may touch")


async def d3_a_large_history_goes_in_bounded_steps(open_store: OpenStore) -> None:
    count, most = 200, 20
    async with open_store() as store:
        row = await store.reserve(2)
        await apply_all(store, *with_checkpoints(finished(row, 9), count))
        await apply_all(store, *with_checkpoints(instance(row + 1), 5))
        left = await expect_purged(store, [row], most)
        expect(left, True, "whether some of its history is left")
        expect(await load_row(store, row), None, "the instance, while its history is there")
        expect(await store.verify(), [], "the findings while some is left")
        total = count + 5
        while True:
            found = (await rows_left(store)).get("checkpoints", 0)
            expect(total - found <= 2 * most, True, f"{total - found} records at once are about {most}")
            expect(total - found > 0, True, "each step deletes something")
            total = found
            if not left:
                break
            left = await store.sweep(most)
        expect(total, 5, "the checkpoints that are left, which are another's")
        expect(await store.sweep(most), False, "whether anything is left to sweep")


async def d3_large_values_count_by_their_size(open_store: OpenStore) -> None:
    count, size = 12, 100 * 4_096
    async with open_store() as store:
        row = await store.reserve(1)
        await apply_all(store, *with_checkpoints(finished(row, 9), count, size))
        left = await expect_purged(store, [row], 200)
        there = (await rows_left(store)).get("checkpoints", 0)
        expect((left, there >= count - 4), (True, True), f"{there} of {count} are left, each counts 101")
        number = await sweep_all(store, 200)
        expect(number >= 2, True, f"the rest goes in several sweeps, not in {number}")
        expect(await rows_left(store), {}, "the rows that are left")


async def d3_a_record_that_counts_more_than_the_bound_goes_too(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        put = PutPayload(kind=PayloadKind.OUTPUT, data=b"x" * 500_000)
        event, error = samples.event(9, payload=b"x" * 500_000), samples.error(9, message="x" * 500_000)
        units = with_checkpoints(finished(row, 9), 2, 500_000)
        await apply_all(store, *units, unit(row, 9, event, error, put))
        await expect_purged(store, [row], 1)
        await sweep_all(store, 1)
        expect(await rows_left(store), {}, "the rows that are left")


async def d3_every_table_is_swept(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(2)
        for r in (row, row + 1):
            units = [unit(r, n, *samples.one_of_each(n), samples.finish_step(n, n)) for n in range(2, 6)]
            await apply_all(store, with_history(finished(r, 9)), *units)
        await expect_purged(store, [row, row + 1], 1)
        number = await sweep_all(store, 9)
        expect(number > 5, True, f"several sweeps were needed, not {number}")
        expect(await rows_left(store), {}, "the rows that are left")
        expect(await store.verify(), [], "the findings")


async def d3_many_purged_instances_are_swept(open_store: OpenStore) -> None:
    count = 300
    async with open_store() as store:
        row = await store.reserve(count)
        rows = range(row, row + count)
        await apply_all(store, *(u for r in rows for u in with_checkpoints(finished(r, 9), 2)))
        expect(await expect_purged(store, rows, 1), True, "whether some of their history is left")
        expect(await store.counts(None), {}, "the instances, with some of their history left")
        await sweep_all(store, 150)
        expect(await rows_left(store), {}, "the rows that are left")


async def d3_children_left_tells_of_this_purge_at_least(open_store: OpenStore) -> None:
    """Where it says that nothing is left, nothing is; and a purge of everything says so."""
    async with open_store() as store:
        for most in (1, 9, 10, 11, 12, 30):
            row = await store.reserve(1)
            await apply_all(store, *with_checkpoints(finished(row, 9), 10))
            left = await expect_purged(store, [row], most)
            there = await store.count_records(row, CheckpointRecord)
            expect(left or there == 0, True, f"most={most}: {there} left, and children_left={left}")
            expect(left and most > 12, False, f"most={most} is enough for 10 records")
            await sweep_all(store, PLENTY)


async def d3_others_write_and_read_beside_a_sweep(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(2)
        await apply_all(store, *with_checkpoints(finished(row, 9), 60), with_history(instance(row + 1)))
        await expect_purged(store, [row], 1)

        async def save() -> None:
            for n in range(2, 32):
                await apply_all(store, unit(row + 1, n, samples.checkpoint(n)))
                await store.set_note("newest", str(n))

        async def ask() -> None:
            for _ in range(30):
                expect(await store.count_instances(InstanceFilter()), 1, "the instances during the sweep")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(save)
            nursery.start_soon(ask)
            await sweep_all_beside(store, 2)
        expect((await loaded_row(store, row + 1)).revision, 31, "what was written beside it")
        expect(await store.note("newest"), "31", "the note")
        expect(await store.count_records(row, CheckpointRecord), 0, "what is left")
        expect(await store.verify(), [], "the findings")


async def sweep_all_beside(store: Store, most: int) -> None:
    """Sweep until nothing is left, whatever others write meanwhile."""
    for _ in range(1_000):
        if not await store.sweep(most):
            return
    raise AssertionError("sweep leaves something for ever")


async def d3_the_rest_is_swept_after_a_reopening(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(3)
        for r in (row, row + 1):
            await apply_all(store, *with_checkpoints(finished(r, 9, instance_id=f"o{r}"), 30))
        await apply_all(store, with_history(instance(row + 2)))
        expect(await expect_purged(store, [row, row + 1], 4), True, "whether some history is left")
    async with open_store() as store:
        expect(await store.find(TENANT, f"o{row}"), None, "the instance after the reopening")
        expect(await store.verify(), [], "the findings before the sweep")
        expect(await store.sweep(4), True, "whether more is left after one sweep")
    async with open_store() as store:
        again = await store.reserve(1)
        await apply_all(store, creation(instance(again, instance_id=f"o{row}"), samples.checkpoint(1)))
        await sweep_all(store, 10)
        loaded = await store.load(TENANT, f"o{row}", 10)
        expect(loaded and loaded.checkpoint_ids, {"step-1"}, "the id used again")
        share = {"instances": 2, "checkpoints": 2, "payloads": len(PayloadKind)}
        expect(await rows_left(store), {t: share.get(t, 1) for t in TABLES}, "the rows of those that live")
        steps = await store.list_records(row + 2, StepRecord, PageRequest())
        expect(steps.items, (samples.step(1),), "the steps of the one that lives")


SENTENCES: Final = (
    d1_terminal_ones_come_by_finish_and_not_by_creation,
    d1_an_instance_that_lives_is_never_terminal,
    d1_pages_go_on_while_what_they_held_is_purged,
    d2_a_purged_instance_is_not_found_any_more,
    d2_only_terminal_instances_are_purged,
    d2_an_instance_may_move_on_and_be_purged_once_it_has_ended,
    d2_rows_that_are_not_there_or_given_twice_do_no_harm,
    d2_many_are_purged_at_once,
    d2_a_late_change_of_a_purged_instance_is_left_out,
    d2_an_id_that_is_used_again_starts_clean,
    d2_an_id_may_be_purged_again_and_again,
    d2_numbers_of_purged_instances_are_not_given_again,
    d3_children_go_in_the_same_transaction,
    d3_a_bound_below_one_is_refused,
    d3_nothing_to_sweep_is_told,
    d3_a_large_history_goes_in_bounded_steps,
    d3_large_values_count_by_their_size,
    d3_a_record_that_counts_more_than_the_bound_goes_too,
    d3_every_table_is_swept,
    d3_many_purged_instances_are_swept,
    d3_children_left_tells_of_this_purge_at_least,
    d3_others_write_and_read_beside_a_sweep,
    d3_the_rest_is_swept_after_a_reopening,
)
