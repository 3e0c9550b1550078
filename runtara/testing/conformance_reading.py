"""The sentences R1 to R4, N1 and T1: what comes back, numbers, and time."""

from typing import Final

import attrs

from runtara.limits import OPEN_STEPS
from runtara.persistence.store import DEFAULT_PAGE, Due, PageRequest, Store
from runtara.records import (
    AcknowledgeSignal,
    CheckpointRecord,
    CompensationAttemptRecord,
    CompensationRecord,
    CompensationState,
    ErrorRecord,
    EventRecord,
    FinishCompensationAttempt,
    InstanceRecord,
    RequestRecord,
    RetryAttemptRecord,
    SetCompensation,
    SettleWait,
    SignalRecord,
    Status,
    StepRecord,
    WaitOutcome,
    WaitRecord,
)
from runtara.testing import samples
from runtara.testing.conformance_writing import OpenStore, apply_all, load_row, loaded_row
from runtara.testing.expectations import expect
from runtara.testing.samples import TENANT, creation, instance, unit


async def r1_load_returns_all_that_an_actor_needs(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        await apply_all(
            store,
            creation(instance(row), samples.compensatable(1, order=5), samples.request(1)),
            *(unit(row, n, *samples.one_of_each(n)) for n in (2, 3)),
            unit(row, 4, samples.event(4)),
        )
        loaded = await loaded_row(store, row)
        expect(loaded.record, instance(row), "the row")
        expect(loaded.revision, 4, "the newest revision of any table")
        expect(loaded.checkpoint_id, "step-3", "the newest checkpoint")
        expect(loaded.signals, (samples.signal(2), samples.signal(3)), "the pending signals")
        expect(loaded.waits, (samples.wait(2), samples.wait(3)), "the open waits")
        pending = CompensationRecord(checkpoint_id="step-1", step_id="undo-1", order=5, revision=1)
        expect(loaded.compensations, (pending,), "the compensations")
        expect(loaded.last_error, samples.error(3), "the last error")
        expect(loaded.steps, (samples.step(2), samples.step(3)), "the running steps")
        expect(loaded.checkpoint_ids, {"step-1", "step-2", "step-3"}, "the checkpoint ids")
        expect(loaded.wait_ids, {"wait-2", "wait-3"}, "the wait ids")
        expect(loaded.request_ids, {"request-1", "request-2", "request-3"}, "the request ids")


async def r1_a_new_instance_has_nothing_else(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        await apply_all(store, creation(instance(row)))
        loaded = await loaded_row(store, row)
        expect((loaded.revision, loaded.checkpoint_id, loaded.last_error), (1, None, None), "newest things")
        lists = (loaded.signals, loaded.waits, loaded.compensations, loaded.steps)
        expect(lists, ((), (), (), ()), "lists")
        none: frozenset[str] = frozenset()
        ids = (loaded.checkpoint_ids, loaded.wait_ids, loaded.request_ids)
        expect(ids, (none, none, none), "ids")


async def r1_nothing_is_loaded_of_an_unknown_instance(open_store: OpenStore) -> None:
    async with open_store() as store:
        expect(await store.load(TENANT, "nobody", 10), None, "load")
        expect(await store.find(TENANT, "nobody"), None, "find")
        expect(await store.checkpoint(1, "c"), None, "checkpoint")
        expect(await store.wait(1, "w"), None, "wait")
        expect(await store.request(1, "r"), None, "request")
        expect(await store.signal(1, 1), None, "signal")
        expect(await store.error(1, 1), None, "error")
        expect(await store.attempt(1, "c", 1), None, "attempt")
        expect(await store.compensation_data(1, "c"), None, "compensation data")


async def r1_the_newest_revision_counts_every_table(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        await apply_all(store, creation(instance(row)))
        for revision, index in enumerate(range(len(samples.one_of_each(1))), start=2):
            record = samples.one_of_each(revision)[index]
            await apply_all(store, unit(row, revision, record))
            found = (await loaded_row(store, row)).revision
            expect(found, revision, f"the newest revision after a {type(record).__name__}")


async def r1_id_sets_are_whole_or_none(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        await apply_all(
            store, creation(instance(row)), *(unit(row, n, samples.checkpoint(n)) for n in (2, 3, 4))
        )
        for known, wanted in ((3, {"step-2", "step-3", "step-4"}), (2, None), (0, None)):
            loaded = await store.load(TENANT, f"i{row}", known)
            found = loaded.checkpoint_ids if loaded else "nothing loaded"
            expect(found, wanted, f"ids within a bound of {known}")


async def r1_changes_move_what_is_open(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        await apply_all(
            store,
            creation(instance(row), samples.compensatable(1), samples.wait(1), samples.signal(1)),
            unit(row, 2, samples.wait(2), samples.signal(2), samples.compensation_attempt(2)),
        )
        await apply_all(
            store,
            unit(
                row,
                3,
                SettleWait(wait_id="wait-1", outcome=WaitOutcome.RECEIVED, settled_us=50),
                AcknowledgeSignal(signal_id=1, shown_us=40, acknowledged_us=50),
                SetCompensation(checkpoint_id="step-1", state=CompensationState.TRIGGERED, attempts=0),
            ),
            unit(
                row,
                4,
                SetCompensation(checkpoint_id="step-1", state=CompensationState.COMPLETED, attempts=1),
                FinishCompensationAttempt(
                    checkpoint_id="step",
                    attempt=2,
                    finished_us=60,
                    success=True,
                    error_message=None,
                    error_id=None,
                ),
            ),
        )
        await expect_moved(store, row)


async def expect_moved(store: Store, row: int) -> None:
    loaded = await loaded_row(store, row)
    expect(loaded.waits, (samples.wait(2),), "the waits still open")
    expect(loaded.signals, (samples.signal(2),), "the signals still pending")
    states = [(c.checkpoint_id, c.state, c.attempts) for c in loaded.compensations]
    expect(states, [("step-1", CompensationState.COMPLETED, 1)], "the compensation, last change wins")
    settled = samples.wait(1, outcome=WaitOutcome.RECEIVED, settled_us=50)
    expect(await store.wait(row, "wait-1"), settled, "the settled wait")
    consumed = samples.signal(1, shown_us=40, acknowledged_us=50)
    expect(await store.signal(row, 1), consumed, "the acknowledged signal, which is kept")
    log = await store.list_records(row, CompensationAttemptRecord, PageRequest())
    ended = samples.compensation_attempt(2, finished_us=60, success=True)
    expect(log.items, (ended,), "the compensation log")


async def r1_the_newest_running_steps_are_loaded(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(2)
        begun = range(1, OPEN_STEPS + 6)
        steps = {n: samples.step(n, scope_id="inner", parent_scope_id="outer") for n in begun}
        ended = (3, 700, begun[-1])
        await apply_all(
            store,
            creation(instance(row)),
            creation(instance(row + 1), samples.step(1)),
            *(unit(row, n, step, samples.event(n, payload=b"{}")) for n, step in steps.items()),
        )
        await apply_all(store, *(unit(row, 5_000 + n, samples.finish_step(n, 5_000 + n)) for n in ended))
        loaded = await loaded_row(store, row)
        wanted = [step for n, step in steps.items() if n not in ended][-OPEN_STEPS:]
        expect([s.revision for s in loaded.steps], [s.revision for s in wanted], "the newest that run")
        expect(loaded.steps, tuple(wanted), "the steps, oldest first and without payloads")
        expect((await loaded_row(store, row + 1)).steps, (samples.step(1),), "another instance's steps")


async def r2_every_read_sees_every_batch_before_it(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        expect(await load_row(store, row), None, "before its creation")
        await apply_all(store, creation(instance(row)))
        for revision in range(2, 30):
            await apply_all(store, unit(row, revision, samples.checkpoint(revision)))
            expect((await loaded_row(store, row)).revision, revision, "the revision that is loaded")
            expect(
                await store.checkpoint(row, f"step-{revision}"),
                samples.checkpoint(revision),
                "the checkpoint",
            )
            expect(await store.count_records(row, CheckpointRecord), revision - 1, "the count")


async def r3_every_field_comes_back_as_it_went_in(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        record = samples.full_instance(row)
        created = attrs.evolve(record, epoch=1, revision=1, status=Status.RUNNING, finished_us=None)
        await apply_all(store, creation(created))
        await apply_all(store, unit(row, 9, record, *samples.full_records(9)))
        expect(await store.find(TENANT, record.instance_id), record, "the row")
        text = samples.NAUGHTY
        checkpoint, wait, event, step, signal, attempt, error, log, request = samples.full_records(9)
        expect(await store.checkpoint(row, text), checkpoint, "the checkpoint")
        expect(await store.wait(row, text), wait, "the wait")
        expect(await store.signal(row, 9), signal, "the signal")
        expect(await store.attempt(row, text, 3), attempt, "the retry attempt")
        expect(await store.error(row, 9), error, "the error")
        expect(await store.request(row, text), request, "the request")
        expect(await store.compensation_data(row, text), samples.ALL_BYTES, "the compensation's data")
        page = PageRequest()
        expect((await store.list_records(row, EventRecord, page)).items, (event,), "events")
        expect((await store.list_records(row, CheckpointRecord, page)).items, (checkpoint,), "checkpoints")
        [listed] = (await store.list_records(row, StepRecord, page)).items
        expect(attrs.evolve(listed, start_payload=None), step, "the step, but for its event's payload")
        expect((await store.list_records(row, WaitRecord, page)).items, (wait,), "waits")
        expect((await store.list_records(row, RequestRecord, page)).items, (request,), "requests")
        expect((await store.list_records(row, SignalRecord, page)).items, (signal,), "signals")
        expect((await store.list_records(row, ErrorRecord, page)).items, (error,), "errors")
        expect((await store.list_records(row, RetryAttemptRecord, page)).items, (attempt,), "attempts")
        expect((await store.list_records(row, CompensationAttemptRecord, page)).items, (log,), "the log")


async def r3_empty_and_absent_are_two_things(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        await apply_all(
            store,
            creation(instance(row), samples.checkpoint(1, state=b""), samples.signal(1, payload=b"")),
            unit(row, 2, samples.signal(2, payload=None), samples.error(2, attributes="")),
            unit(row, 3, samples.error(3, attributes=None)),
        )
        found = await store.checkpoint(row, "step-1")
        expect(found and found.state, b"", "an empty state")
        payloads = [s.payload for s in (await loaded_row(store, row)).signals]
        expect(payloads, [b"", None], "an empty payload, and none")
        errors = (await store.list_records(row, ErrorRecord, PageRequest())).items
        expect([e.attributes for e in errors], [None, ""], "no text, and an empty one")


async def r3_a_large_state_comes_back_whole(open_store: OpenStore) -> None:
    state = samples.ALL_BYTES * (4 * 1024 * 4)
    async with open_store() as store:
        row = await store.reserve(1)
        await apply_all(store, creation(instance(row), samples.checkpoint(1, state=state)))
        found = await store.checkpoint(row, "step-1")
        expect(found is not None and found.state == state, True, "4 MiB of state")


async def r3_ids_are_compared_exactly(open_store: OpenStore) -> None:
    ids = ("\u00e9", "e\u0301", "a", "A", "a ", "a%", "a_", "..", "a/b", "\u212b", "\u00c5")
    async with open_store() as store:
        row = await store.reserve(len(ids))
        records = [instance(row + n, instance_id=name) for n, name in enumerate(ids)]
        await apply_all(store, *(creation(record) for record in records))
        for record in records:
            expect(await store.find(TENANT, record.instance_id), record, f"id {record.instance_id!r}")


async def r4_one_id_in_two_tenants_is_two_instances(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(2)
        mine = instance(row, tenant_id="a", instance_id="order")
        theirs = instance(row + 1, tenant_id="b", instance_id="order")
        await apply_all(store, creation(mine, samples.checkpoint(1)), creation(theirs))
        expect(await store.find("a", "order"), mine, "the first tenant's")
        expect(await store.find("b", "order"), theirs, "the second tenant's")
        expect(await store.find("c", "order"), None, "a third tenant's")
        loaded = await store.load("b", "order", 10)
        expect(loaded and loaded.checkpoint_id, None, "nothing of the other's history")


async def n1_numbers_are_given_once(open_store: OpenStore) -> None:
    async with open_store() as store:
        given: set[int] = set()
        for count in (1, 5, 1, 1000, 2):
            first = await store.reserve(count)
            block = set(range(first, first + count))
            expect(given & block, set(), f"numbers given before, in a block of {count}")
            expect(min(block) > 0, True, "numbers are above zero")
            given |= block


async def n1_numbers_are_not_given_again_after_reopening(open_store: OpenStore) -> None:
    given: set[int] = set()
    for _ in range(3):
        async with open_store() as store:
            first = await store.reserve(10)
            block = set(range(first, first + 10))
            expect(given & block, set(), "numbers given before the reopening")
            given |= block


def asleep(row: int, until_us: int | None, deadline_us: int | None = None) -> InstanceRecord:
    return instance(row, status=Status.SUSPENDED, sleep_until_us=until_us, deadline_us=deadline_us)


def due_at(row: int, instant_us: int) -> Due:
    return Due(tenant_id=TENANT, instance_id=f"i{row}", row=row, epoch=1, deadline_us=instant_us)


async def t1_due_is_the_earlier_of_sleep_and_deadline(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(8)
        records = [
            asleep(row, 300),
            asleep(row + 1, 100),
            asleep(row + 2, None, 200),
            asleep(row + 3, 900, 50),
            asleep(row + 4, 60, 900),
            asleep(row + 5, None),
            samples.finished(row + 6, 9, sleep_until_us=1, deadline_us=1),
            instance(row + 7, deadline_us=301),
        ]
        await apply_all(store, *(creation(record) for record in records))
        wanted = [
            due_at(row + 3, 50),
            due_at(row + 4, 60),
            due_at(row + 1, 100),
            due_at(row + 2, 200),
            due_at(row, 300),
        ]
        expect(await store.due(300, None, 100), wanted, "due at 300, earliest first")
        expect(await store.due(49, None, 100), [], "due at 49")
        expect(await store.due(50, None, 100), wanted[:1], "due at 50, the instant itself")


async def t1_due_is_read_in_stable_pages(open_store: OpenStore) -> None:
    count = 25
    async with open_store() as store:
        row = await store.reserve(count)
        await apply_all(store, *(creation(asleep(row + n, 100 + n // 5)) for n in range(count)))
        seen: list[int] = []
        after: tuple[int, int] | None = None
        while page := await store.due(1_000, after, 4):
            expect(len(page) <= 4, True, "the page's limit")
            expect(len(seen) <= count, True, "the walk comes to an end")
            seen += [due.row for due in page]
            after = (page[-1].deadline_us, page[-1].row)
        expect(seen, list(range(row, row + count)), "all of them, once, with ties by row")


async def t1_what_moved_is_due_at_its_new_instant(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        await apply_all(store, creation(asleep(row, 100)))
        later = attrs.evolve(asleep(row, 200), revision=2)
        await apply_all(store, unit(row, 2, later))
        expect(await store.due(150, None, 10), [], "at the old instant")
        expect(await store.due(200, None, 10), [due_at(row, 200)], "at the new one")
        await apply_all(store, unit(row, 3, samples.finished(row, 9, revision=3), base=2))
        expect(await store.due(10**9, None, 10), [], "once it has ended")


async def t1_running_lists_what_an_older_epoch_left(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(6)
        records = [
            instance(row, epoch=3),
            instance(row + 1, epoch=9),
            instance(row + 2, epoch=10),
            asleep(row + 3, 5),
            samples.finished(row + 4, 9),
            instance(row + 5, epoch=1),
        ]
        await apply_all(store, *(creation(record) for record in records))
        found = await store.running(10, 0, DEFAULT_PAGE)
        expect([(d.row, d.epoch) for d in found], [(row, 3), (row + 1, 9), (row + 5, 1)], "below epoch 10")
        expect({d.deadline_us for d in found}, {0}, "their instants")
        second = await store.running(10, row, 1)
        expect([d.row for d in second], [row + 1], "the page after the first row")


SENTENCES: Final = (
    r1_load_returns_all_that_an_actor_needs,
    r1_a_new_instance_has_nothing_else,
    r1_nothing_is_loaded_of_an_unknown_instance,
    r1_the_newest_revision_counts_every_table,
    r1_id_sets_are_whole_or_none,
    r1_changes_move_what_is_open,
    r1_the_newest_running_steps_are_loaded,
    r2_every_read_sees_every_batch_before_it,
    r3_every_field_comes_back_as_it_went_in,
    r3_empty_and_absent_are_two_things,
    r3_a_large_state_comes_back_whole,
    r3_ids_are_compared_exactly,
    r4_one_id_in_two_tenants_is_two_instances,
    n1_numbers_are_given_once,
    n1_numbers_are_not_given_again_after_reopening,
    t1_due_is_the_earlier_of_sleep_and_deadline,
    t1_due_is_read_in_stable_pages,
    t1_what_moved_is_due_at_its_new_instant,
    t1_running_lists_what_an_older_epoch_left,
)
