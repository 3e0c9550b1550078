"""The sentences A8, A9, K1 and C1: what an operator asks of a store as a whole, notes, and closing."""

import os
import tempfile
from collections.abc import Awaitable, Callable
from itertools import product
from pathlib import Path
from typing import Any, Final

from runtara.errors import RuntimeClosed, StoreRefused, ValidationError
from runtara.persistence.rows import HISTORY
from runtara.persistence.store import InstanceFilter, InstanceOrder, PageRequest, Store
from runtara.records import (
    EventRecord,
    InstanceRecord,
    PayloadKind,
    PutPayload,
    Reason,
    Status,
)
from runtara.testing import samples
from runtara.testing.conformance_writing import OpenStore, apply_all
from runtara.testing.expectations import expect, expect_error
from runtara.testing.samples import NAUGHTY, TENANT, creation, finished, instance, unit

TABLES: Final = ("instances", *HISTORY)

# ---------------------------------------------------------------- A8: counts and growth


async def a8_counts_agree_with_the_counted_list(open_store: OpenStore) -> None:
    numbers = {Status.PENDING: 1, Status.RUNNING: 3, Status.COMPLETED: 2, Status.CANCELLED: 4}
    async with open_store() as store:
        expect(await store.counts(None), {}, "the counts of an empty store")
        for tenant, times in ((TENANT, 1), (f"{TENANT}\0", 2)):
            statuses = [status for status, count in numbers.items() for _ in range(count * times)]
            row = await store.reserve(len(statuses))
            records = [instance(row + n, tenant_id=tenant, status=s) for n, s in enumerate(statuses)]
            await apply_all(store, *(creation(record) for record in records))
        expect(await store.counts(TENANT), numbers, "the counts of one tenant")
        expect(await store.counts("nobody"), {}, "the counts of an unknown tenant")
        for asked in (None, TENANT, f"{TENANT}\0"):
            counts = await store.counts(asked)
            expect({type(status) for status in counts}, {Status}, "what is counted")
            for status in Status:
                where = InstanceFilter(tenant_id=asked, statuses=frozenset({status}))
                wanted = await store.count_instances(where)
                expect(counts.get(status, 0), wanted, f"{status.name} of tenant {asked!r}")
            expect(0 in counts.values(), False, "a status without any is left out")


async def a8_counts_follow_what_moves(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(2)
        await apply_all(store, *(creation(instance(r)) for r in (row, row + 1)))
        await apply_all(store, unit(row, 2, finished(row, 5, revision=2)))
        expect(await store.counts(TENANT), {Status.RUNNING: 1, Status.COMPLETED: 1}, "after one has ended")


async def a8_growth_tells_the_rows_of_every_table(open_store: OpenStore) -> None:
    puts = [PutPayload(kind=kind, data=b"x") for kind in PayloadKind]
    async with open_store() as store:
        empty = await store.growth()
        expect(dict(empty.rows), dict.fromkeys(TABLES, 0), "the rows of an empty store")
        row = await store.reserve(3)
        await apply_all(
            store,
            creation(instance(row), samples.compensatable(1), *samples.one_of_each(1)[1:], *puts),
            unit(row, 2, *samples.one_of_each(2)),
            creation(instance(row + 1), samples.step(1)),
            creation(instance(row + 2)),
        )
        wanted = dict.fromkeys(HISTORY, 2) | {"instances": 3, "steps": 3, "compensations": 1, "payloads": 4}
        found = await store.growth()
        expect(dict(found.rows), wanted, "the rows of each table")
        for size in (found.file_bytes, found.log_bytes):
            expect(size is None or size >= 0, True, f"a size of {size}")


async def a8_growth_tells_when_the_first_one_ended(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(5)
        expect((await store.growth()).oldest_finished_us, None, "an empty store")
        await apply_all(store, creation(instance(row, created_us=-9)))
        expect((await store.growth()).oldest_finished_us, None, "none has ended")
        for n, (status, at) in enumerate(
            ((Status.COMPLETED, 700), (Status.CANCELLED, 0), (Status.FAILED, -5), (Status.COMPLETED, 9)), 1
        ):
            await apply_all(store, creation(finished(row + n, at, status=status, created_us=-9)))
            oldest = min((700, 0, -5, 9)[:n])
            expect((await store.growth()).oldest_finished_us, oldest, f"after {n} have ended")


async def a8_a_sound_store_has_no_findings(open_store: OpenStore) -> None:
    async with open_store() as store:
        expect(await store.verify(), [], "the findings in an empty store")
        row = await store.reserve(2)
        full = samples.full_instance(row)
        born = instance(row, instance_id=full.instance_id)
        await apply_all(store, creation(born), unit(row, 9, full, *samples.full_records(9)))
        puts = [PutPayload(kind=kind, data=samples.ALL_BYTES) for kind in PayloadKind]
        await apply_all(store, creation(instance(row + 1), *samples.one_of_each(1), *puts))
        expect(await store.verify(), [], "the findings in a store with one of everything")


async def a8_a_backup_never_writes_over_a_file(open_store: OpenStore) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "there"
        path.write_bytes(b"mine")
        async with open_store() as store:
            error = await expect_error(ValidationError, store.backup(str(path)), "a backup onto a file")
            expect(error.field, "path", "the field that is named")
            expect(path.read_bytes(), b"mine", "the file that was there")
            expect(os.listdir(folder), ["there"], "the files beside it")


# ---------------------------------------------------------------- A9: what nothing moves

STATES: Final[tuple[dict[str, Any], ...]] = tuple(
    {
        "status": status,
        "hosted": hosted,
        "reason": reason,
        "sleep_until_us": sleep,
        "awaits_client_us": client,
        "deadline_us": deadline,
    }
    for status, hosted, reason, sleep, client, deadline in product(
        (s for s in Status if s is not Status.UNKNOWN),
        (False, True),
        (None, Reason.PAUSED, Reason.WAITING_SIGNAL, Reason.SLEEPING),
        (None, 0),
        (None, 0),
        (None, 5),
    )
)


def is_unexplained(record: InstanceRecord) -> bool:
    """Neither its session, a dispatcher, a pause, its wake time nor its client moves it."""
    if record.status not in (Status.PENDING, Status.SUSPENDED):
        return False
    dispatched = record.status is Status.PENDING and record.hosted
    waits = record.sleep_until_us is not None or record.awaits_client_us is not None
    return not (dispatched or record.paused or waits)


async def a9_unexplained_are_those_that_nothing_moves(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(len(STATES))
        records = []
        for n, state in enumerate(STATES):
            ended = 9 if state["status"].is_terminal else None
            tenant = TENANT if n % 3 else "other"
            records.append(instance(row + n, **state, tenant_id=tenant, finished_us=ended))
        await apply_all(store, *(creation(record) for record in reversed(records)))
        wanted = [record for record in records if is_unexplained(record)]
        expect(await store.unexplained(0, 1_000), wanted, "all of them, by row")
        seen: list[InstanceRecord] = []
        while page := await store.unexplained(seen[-1].row if seen else 0, 7):
            expect(len(page) <= 7, True, "the page's limit")
            expect(len(seen) <= len(wanted), True, "the walk comes to an end")
            seen += page
        expect(seen, wanted, "all of them, in pages of 7")


async def a9_what_is_explained_later_is_left_out(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        stuck = instance(row, status=Status.SUSPENDED, reason=Reason.WAITING_SIGNAL)
        await apply_all(store, creation(stuck))
        expect(await store.unexplained(0, 10), [stuck], "one that waits for a signal")
        asleep = instance(row, status=Status.SUSPENDED, sleep_until_us=7, revision=2)
        await apply_all(store, unit(row, 2, asleep))
        expect(await store.unexplained(0, 10), [], "one that has a wake time")


# ---------------------------------------------------------------- K1: notes

NOTES: Final = {"a": "text", "A": "other", "a\0": NAUGHTY, NAUGHTY: "\0", "": "", "empty": ""}


async def k1_notes_are_kept_replaced_and_removed(open_store: OpenStore) -> None:
    async with open_store() as store:
        for name, text in NOTES.items():
            expect(await store.note(name), None, f"note {name!r} before it is set")
            await store.set_note(name, "something before")
            await store.set_note(name, text)
        for name, text in NOTES.items():
            expect(await store.note(name), text, f"note {name!r}")
        await store.set_note("a", None)
        await store.set_note("never there", None)
        found = {name: await store.note(name) for name in NOTES}
        expect(found, NOTES | {"a": None}, "the notes without one that was removed")


PREFIXES: Final = ("", "a", "a\0", "A", "%", "_", "\U0010ffff", NAUGHTY, "emptyish")


async def k1_notes_are_found_by_their_prefix(open_store: OpenStore) -> None:
    names = ("", "a", "A", "ab", "a%", "a_", "a\0", "a\0b", "b", "\U0010ffff", "\U0010ffff!", NAUGHTY, "_")
    async with open_store() as store:
        expect(await store.notes(""), {}, "the notes of an empty store")
        for name in names:
            await store.set_note(name, f"text of {name}")
        await store.set_note("gone", "text")
        await store.set_note("gone", None)
        for prefix in PREFIXES:
            wanted = {name: f"text of {name}" for name in sorted(names) if name.startswith(prefix)}
            found = await store.notes(prefix)
            expect(list(found.items()), list(wanted.items()), f"notes that begin with {prefix!r}, by name")


async def k1_a_note_that_no_store_can_hold_is_refused(open_store: OpenStore) -> None:
    async with open_store() as store:
        for name, text in (("a", "\ud800"), ("\udfff", "text"), ("\udfff", None)):
            what = f"note {name!r} with {text!r}"
            await expect_error(StoreRefused, store.set_note(name, text), what)
        expect(await store.notes(""), {}, "the notes")
        await store.set_note("a", "text")
        expect(await store.notes(""), {"a": "text"}, "a note after them")


async def k1_notes_are_there_after_reopening(open_store: OpenStore) -> None:
    for before, after in ((None, NAUGHTY), (NAUGHTY, "replaced"), ("replaced", None), (None, None)):
        async with open_store() as store:
            expect(await store.note("a"), before, "the note as it was left")
            expect(await store.note("b"), None, "another note")
            await store.set_note("a", after)


# ---------------------------------------------------------------- C1: closing


async def c1_after_close_everything_raises(open_store: OpenStore) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with open_store() as store:
            row = await store.reserve(1)
            await apply_all(store, creation(instance(row)))
            await store.close()
            await store.close()
            for name, call in calls(store, row, str(Path(folder) / "backup")).items():
                await expect_error(RuntimeClosed, call, name)
            await expect_error(RuntimeClosed, as_call(store.statistics), "statistics")
            expect(os.listdir(folder), [], "what a backup left")


async def as_call(function: Callable[[], object]) -> object:
    return function()


def calls(store: Store, row: int, path: str) -> dict[str, Awaitable[object]]:
    """One call of every method but `close`."""
    page, everything = PageRequest(), InstanceFilter()
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
        "list_instances": store.list_instances(everything, InstanceOrder.CREATED, page),
        "count_instances": store.count_instances(everything),
        "list_records": store.list_records(row, EventRecord, page),
        "count_records": store.count_records(row, EventRecord),
        "counts": store.counts(None),
        "unexplained": store.unexplained(0, 1),
        "growth": store.growth(),
        "verify": store.verify(),
        "backup": store.backup(path),
        "terminal": store.terminal(Status.COMPLETED, 1, None, None, 1),
        "purge": store.purge([row], 1),
        "purge of nothing": store.purge([], 1),
        "sweep": store.sweep(1),
        "note": store.note("n"),
        "notes": store.notes(""),
        "set_note": store.set_note("n", "text"),
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
    a8_counts_agree_with_the_counted_list,
    a8_counts_follow_what_moves,
    a8_growth_tells_the_rows_of_every_table,
    a8_growth_tells_when_the_first_one_ended,
    a8_a_sound_store_has_no_findings,
    a8_a_backup_never_writes_over_a_file,
    a9_unexplained_are_those_that_nothing_moves,
    a9_what_is_explained_later_is_left_out,
    k1_notes_are_kept_replaced_and_removed,
    k1_notes_are_found_by_their_prefix,
    k1_a_note_that_no_store_can_hold_is_refused,
    k1_notes_are_there_after_reopening,
    c1_after_close_everything_raises,
    c1_an_open_store_answers,
)
