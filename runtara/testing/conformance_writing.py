"""The sentences W1 to W8: what `Store.apply` promises."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import attrs

from runtara.errors import StoreRefused
from runtara.persistence.store import Loaded, PageRequest, Store, Unit
from runtara.records import (
    AcknowledgeSignal,
    CheckpointRecord,
    CompensationState,
    EventRecord,
    FinishCompensationAttempt,
    Op,
    PayloadKind,
    PutPayload,
    Reason,
    SetCompensation,
    SettleWait,
    Status,
    StepRecord,
    StepStatus,
    WaitOutcome,
)
from runtara.testing import samples
from runtara.testing.expectations import expect, expect_error
from runtara.testing.samples import creation, instance, unit

OpenStore = Callable[[], AbstractAsyncContextManager[Store]]

NOTHING_LEFT_OUT: Final[frozenset[int]] = frozenset()
KNOWN: Final = 100


async def apply_all(store: Store, *units: Unit) -> None:
    """Apply one batch of which nothing may be left out."""
    expect(await store.apply(units), NOTHING_LEFT_OUT, "the rows that apply left out")


async def load_row(store: Store, row: int) -> Loaded | None:
    return await store.load(samples.TENANT, f"i{row}", KNOWN)


async def loaded_row(store: Store, row: int) -> Loaded:
    """Load an instance that must be there."""
    loaded = await load_row(store, row)
    if loaded is None:
        raise AssertionError(f"instance i{row} is not there")
    return loaded


async def w1_an_applied_batch_is_there_after_reopening(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(2)
        await apply_all(
            store,
            creation(instance(row), samples.checkpoint(1), PutPayload(kind=PayloadKind.INPUT, data=b"in")),
            creation(instance(row + 1), samples.event(1), samples.step(1)),
            unit(row + 1, 2, samples.finish_step(1, 2)),
        )
    async with open_store() as store:
        expect((await loaded_row(store, row)).record, instance(row), "the first row")
        expect((await loaded_row(store, row + 1)).record, instance(row + 1), "the second row")
        expect(await store.checkpoint(row, "step-1"), samples.checkpoint(1), "the checkpoint")
        inputs = await store.payloads(row, frozenset({PayloadKind.INPUT}))
        expect(inputs, {PayloadKind.INPUT: b"in"}, "the input")
        events = await store.list_records(row + 1, EventRecord, PageRequest())
        expect(events.items, (samples.event(1),), "the event")
        steps = await store.list_records(row + 1, StepRecord, PageRequest())
        expect([(s.revision, s.end_revision) for s in steps.items], [(1, 2)], "the step and its end")


async def w1_a_batch_may_be_large(open_store: OpenStore) -> None:
    count = 300
    async with open_store() as store:
        row = await store.reserve(count)
        rows = range(row, row + count)
        await apply_all(store, *(creation(instance(r), samples.checkpoint(1)) for r in rows))
        await apply_all(store, *(unit(r, 2, samples.checkpoint(2), instance(r, revision=2)) for r in rows))
        for r in (row, row + count // 2, row + count - 1):
            loaded = await loaded_row(store, r)
            expect((loaded.record.revision, loaded.checkpoint_id), (2, "step-2"), f"row {r}")


async def w1_an_empty_batch_is_nothing(open_store: OpenStore) -> None:
    async with open_store() as store:
        expect(await store.apply([]), NOTHING_LEFT_OUT, "the rows that apply left out")


async def w2_nothing_of_a_refused_batch_is_written(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(3)
        await apply_all(store, creation(instance(row), samples.checkpoint(1)))
        before = await loaded_row(store, row)
        batch = [
            creation(instance(row + 1)),
            unit(row, 2, instance(row, revision=2), samples.checkpoint(1)),
            creation(instance(row + 2)),
        ]
        await expect_error(StoreRefused, store.apply(batch), "a batch with one refused unit")
        expect(await loaded_row(store, row), before, "the instance of the refused unit")
        expect(await load_row(store, row + 1), None, "the unit before the refused one")
        expect(await load_row(store, row + 2), None, "the unit after the refused one")
        await apply_all(store, batch[0], batch[2])
        expect((await loaded_row(store, row + 1)).revision, 1, "the others, applied without it")


async def w2_a_value_that_does_not_fit_is_refused(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        for record in (
            instance(row, exit_code=2**70),
            instance(row, workflow="lone \ud800 surrogate"),
        ):
            await expect_error(StoreRefused, store.apply([creation(record)]), "a value that does not fit")
            expect(await load_row(store, row), None, "the instance that was refused")
        await apply_all(store, creation(instance(row)))


CHANGES_OF_NOTHING: Final[tuple[Op, ...]] = (
    SettleWait(wait_id="wait-9", outcome=WaitOutcome.RECEIVED, settled_us=50),
    samples.finish_step(9, 10),
    AcknowledgeSignal(signal_id=9, shown_us=40, acknowledged_us=50),
    SetCompensation(checkpoint_id="step-9", state=CompensationState.COMPLETED, attempts=1),
    FinishCompensationAttempt(
        checkpoint_id="step", attempt=9, finished_us=60, success=True, error_message=None, error_id=None
    ),
)
"""One of each kind, of records that are not there."""


async def w2_a_change_of_what_is_not_there_is_refused(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(2)
        theirs = creation(instance(row + 1), samples.compensatable(9), *samples.one_of_each(9)[1:])
        await apply_all(store, creation(instance(row)), theirs)
        for op in CHANGES_OF_NOTHING:
            batch = [unit(row, 2, samples.checkpoint(2), op)]
            await expect_error(StoreRefused, store.apply(batch), f"another instance has it: {op!r}")
            expect((await loaded_row(store, row)).revision, 1, f"the instance after {op!r}")
        untouched = (await loaded_row(store, row + 1)).steps
        expect(untouched, (samples.step(9),), "the other instance's step")


async def w3_only_the_first_guard_of_a_chain_is_checked(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        await apply_all(
            store,
            creation(instance(row)),
            unit(row, 2, samples.checkpoint(2), epoch=0, base=0),
            unit(row, 3, samples.checkpoint(3), epoch=99, base=99),
        )
        await apply_all(
            store,
            unit(row, 4, samples.checkpoint(4)),
            unit(row, 5, samples.checkpoint(5), epoch=99, base=99),
        )
        loaded = await loaded_row(store, row)
        expect((loaded.revision, loaded.checkpoint_id), (5, "step-5"), "the end of the chain")
        expect(loaded.record, instance(row), "the row, which only its own record moves")


async def w3_a_guard_that_does_not_hold_leaves_its_chain_out(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(2)
        await apply_all(store, creation(instance(row)))
        moved = instance(row, revision=2)
        for what, late in {
            "an older epoch": unit(row, 2, moved, epoch=0),
            "a newer epoch": unit(row, 2, moved, epoch=2),
            "another revision": unit(row, 2, moved, base=2),
            "a creation of what is there": creation(moved),
        }.items():
            expect(await store.apply([late]), frozenset({row}), f"{what} is left out")
            expect((await loaded_row(store, row)).record, instance(row), f"the row after {what}")
        absent = unit(row + 1, 2, samples.checkpoint(2))
        expect(await store.apply([absent]), frozenset({row + 1}), "an instance that is not there")


async def w3_the_guard_is_the_row_and_not_its_newest_record(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        await apply_all(store, creation(instance(row)))
        for revision in (2, 3, 4):
            await apply_all(store, unit(row, revision, samples.checkpoint(revision)))
        await apply_all(store, unit(row, 5, instance(row, revision=5, epoch=2)))
        late = unit(row, 6, samples.checkpoint(6))
        expect(await store.apply([late]), frozenset({row}), "the base from before the row moved")
        await apply_all(store, unit(row, 6, samples.checkpoint(6), epoch=2, base=5))


async def w4_the_other_chains_are_written(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(4)
        await apply_all(store, *(creation(instance(r)) for r in (row, row + 1, row + 2)))
        left_out = await store.apply(
            [
                unit(row, 2, samples.checkpoint(2)),
                unit(row + 1, 2, samples.checkpoint(2), epoch=9),
                unit(row + 2, 2, samples.checkpoint(2)),
                unit(row + 1, 3, samples.checkpoint(3)),
                creation(instance(row + 3)),
            ]
        )
        expect(left_out, frozenset({row + 1}), "the rows that apply left out")
        revisions = [(await loaded_row(store, r)).revision for r in range(row, row + 4)]
        expect(revisions, [2, 1, 2, 1], "the newest revisions; of the chain left out nothing is written")


async def w4_no_step_of_a_chain_left_out_is_begun_or_ended(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(2)
        await apply_all(store, *(creation(instance(r), samples.step(1)) for r in (row, row + 1)))
        left_out = await store.apply(
            [
                unit(row, 2, samples.step(2), samples.finish_step(1, 2), base=7),
                unit(row + 1, 2, samples.step(2), samples.finish_step(1, 2)),
            ]
        )
        expect(left_out, frozenset({row}), "the rows that apply left out")
        for r, wanted in ((row, (samples.step(1),)), (row + 1, (samples.step(2),))):
            expect((await loaded_row(store, r)).steps, wanted, f"the running steps of row {r}")


async def w5_a_revision_occurs_once_in_each_table(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(2)
        await apply_all(store, creation(instance(row), *samples.one_of_each(1)))
        before = await loaded_row(store, row)
        for record in samples.one_of_each(1):
            again = with_other_key(record)
            batch = [creation(instance(row + 1)), unit(row, 1, again)]
            await expect_error(StoreRefused, store.apply(batch), f"revision 1 again: {again!r}")
            expect(await load_row(store, row + 1), None, "the other unit of the batch")
        expect(await loaded_row(store, row), before, "the instance")


def with_other_key(record: samples.Appended) -> samples.Appended:
    """The same revision under another id, so that nothing but the revision is there twice."""
    names = {field.name for field in attrs.fields(type(record))}
    for name in ("attempt", "checkpoint_id", "wait_id", "request_id"):
        if name in names:
            other: dict[str, Any] = {name: 77 if name == "attempt" else "another"}
            return attrs.evolve(record, **other)
    return record


async def w6_a_checkpoint_is_never_rewritten(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        await apply_all(store, creation(instance(row), samples.checkpoint(1, checkpoint_id="a")))
        again = unit(row, 2, samples.checkpoint(2, checkpoint_id="a", state=b"other"))
        await expect_error(StoreRefused, store.apply([again]), "the same checkpoint id again")
        twice = [unit(row, n, samples.checkpoint(n, checkpoint_id="b")) for n in (2, 3)]
        await expect_error(StoreRefused, store.apply(twice), "one id twice in a batch")
        stored = await store.checkpoint(row, "a")
        expect(stored, samples.checkpoint(1, checkpoint_id="a"), "the first checkpoint")
        expect(await store.count_records(row, CheckpointRecord), 1, "the number of checkpoints")


async def w7_large_values_stay_when_the_row_moves(open_store: OpenStore) -> None:
    kinds = frozenset(PayloadKind)
    wanted = {kind: bytes([kind]) * 50_000 for kind in kinds}
    async with open_store() as store:
        row = await store.reserve(1)
        puts = [PutPayload(kind=kind, data=data) for kind, data in wanted.items()]
        await apply_all(store, creation(instance(row), *puts))
        done = samples.finished(row, 5_000, revision=2)
        await apply_all(store, unit(row, 2, done))
        expect(await store.payloads(row, kinds), wanted, "the large values")
        expect(await store.payloads(row, frozenset()), {}, "no kinds")
        one = await store.payloads(row, frozenset({PayloadKind.OUTPUT}))
        expect(one, {PayloadKind.OUTPUT: wanted[PayloadKind.OUTPUT]}, "one kind")


async def w7_a_large_value_is_replaced_by_the_last_one(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        large, small = b"x" * 100_000, b"y"
        await apply_all(
            store,
            creation(instance(row), PutPayload(kind=PayloadKind.OUTPUT, data=large)),
            unit(row, 2, PutPayload(kind=PayloadKind.OUTPUT, data=small)),
        )
        kinds = frozenset({PayloadKind.OUTPUT})
        expect(await store.payloads(row, kinds), {PayloadKind.OUTPUT: small}, "the last one")
        await apply_all(store, unit(row, 3, PutPayload(kind=PayloadKind.OUTPUT, data=large)))
        expect(await store.payloads(row, kinds), {PayloadKind.OUTPUT: large}, "the one after it")


async def w8_the_last_record_of_a_batch_wins(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        asleep = instance(row, revision=3, status=Status.SUSPENDED, reason=Reason.SLEEPING, sleep_until_us=7)
        between = unit(row, 2, instance(row, revision=2))
        await apply_all(store, creation(instance(row)), between, unit(row, 3, asleep))
        expect((await loaded_row(store, row)).record, asleep, "the row after its creating batch")
        awake = instance(row, revision=5, epoch=3, attempt=2)
        await apply_all(
            store,
            unit(row, 4, instance(row, revision=4, epoch=2), base=3),
            unit(row, 5, awake, samples.checkpoint(5)),
        )
        expect((await loaded_row(store, row)).record, awake, "the row after the second batch")


async def w8_a_step_may_begin_and_end_in_one_batch(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        failed = samples.finish_step(1, 4, status=StepStatus.FAILED)
        await apply_all(
            store,
            creation(instance(row), samples.step(1)),
            unit(row, 2, samples.step(2)),
            unit(row, 3, samples.finish_step(1, 3)),
            unit(row, 4, failed),
        )
        page = await store.list_records(row, StepRecord, PageRequest(descending=False))
        ended = samples.step(1, status=StepStatus.FAILED, end_revision=4, finished_us=failed.finished_us)
        expect(page.items, (ended, samples.step(2)), "the steps; of two ends the last one wins")


SENTENCES: Final = (
    w1_an_applied_batch_is_there_after_reopening,
    w1_a_batch_may_be_large,
    w1_an_empty_batch_is_nothing,
    w2_nothing_of_a_refused_batch_is_written,
    w2_a_value_that_does_not_fit_is_refused,
    w2_a_change_of_what_is_not_there_is_refused,
    w3_only_the_first_guard_of_a_chain_is_checked,
    w3_a_guard_that_does_not_hold_leaves_its_chain_out,
    w3_the_guard_is_the_row_and_not_its_newest_record,
    w4_the_other_chains_are_written,
    w4_no_step_of_a_chain_left_out_is_begun_or_ended,
    w5_a_revision_occurs_once_in_each_table,
    w6_a_checkpoint_is_never_rewritten,
    w7_large_values_stay_when_the_row_moves,
    w7_a_large_value_is_replaced_by_the_last_one,
    w8_the_last_record_of_a_batch_wins,
    w8_a_step_may_begin_and_end_in_one_batch,
)
