"""The faulty store keeps the contract of a store, and fails exactly as it was told."""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from runtara.errors import OutcomeUnknown, StoreFailed, StoreFull, StoreRefused, StoreUnavailable
from runtara.persistence.store import Store, Unit
from runtara.records import CheckpointRecord, InstanceRecord, Status
from runtara.testing.conformance import check_store
from runtara.testing.faulty import NO_FAULT, Fault, Faults, FaultyStore, Rates, ScriptedFaults, SeededFaults
from tests.sqlite_stores import opened


@asynccontextmanager
async def faulty(faults: Faults) -> AsyncIterator[FaultyStore]:
    async with opened(":memory:") as store:
        yield FaultyStore(store, faults)


def birth(row: int) -> Unit:
    record = InstanceRecord(
        row=row,
        tenant_id="t",
        instance_id=f"i{row}",
        status=Status.RUNNING,
        revision=1,
        created_us=1,
        last_activity_us=1,
    )
    return Unit(row=row, epoch=0, base=0, revision=1, ops=(record,), size=100)


def save(row: int, revision: int) -> Unit:
    record = CheckpointRecord(revision=revision, checkpoint_id=f"c{revision}", state=b"x", created_us=1)
    return Unit(row=row, epoch=0, base=1, revision=revision, ops=(record,), size=100)


async def exists(store: FaultyStore, row: int) -> bool:
    return await store.find("t", f"i{row}") is not None


async def test_without_faults_it_keeps_the_contract(tmp_path: Path) -> None:
    numbers = iter(range(1_000))

    def new_store() -> Callable[[], object]:
        path = tmp_path / f"{next(numbers)}.db"

        @asynccontextmanager
        async def open_store() -> AsyncIterator[FaultyStore]:
            async with opened(path, synchronous="OFF") as store:
                yield FaultyStore(store, ScriptedFaults())

        return open_store

    await check_store(new_store)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fault", "error"), [(Fault.unavailable(), StoreUnavailable), (Fault.full(), StoreFull)]
)
async def test_a_fault_before_the_commit_writes_nothing(fault: Fault, error: type[Exception]) -> None:
    faults = ScriptedFaults()
    faults.add("apply", fault)
    async with faulty(faults) as store:
        with pytest.raises(error):
            await store.apply([birth(1)])
        assert not await exists(store, 1)
        assert await store.apply([birth(1)]) == frozenset()
        assert await exists(store, 1)


@pytest.mark.parametrize("committed", [True, False])
async def test_after_an_unknown_outcome_settle_tells_the_truth(committed: bool) -> None:
    faults = ScriptedFaults()
    faults.add("apply", Fault.unknown(committed=committed))
    async with faulty(faults) as store:
        with pytest.raises(OutcomeUnknown):
            await store.apply([birth(1)])
        assert await store.settle() == (frozenset() if committed else None)
        assert await exists(store, 1) is committed


async def test_settle_names_the_rows_that_a_guard_left_out() -> None:
    faults = ScriptedFaults()
    faults.add("apply", NO_FAULT, Fault.unknown(committed=True))
    async with faulty(faults) as store:
        await store.apply([birth(1)])
        with pytest.raises(OutcomeUnknown):
            await store.apply([birth(1), birth(2)])
        assert await store.settle() == frozenset({1})


async def test_a_refused_unit_is_refused_until_it_was_alone() -> None:
    faults = ScriptedFaults()
    faults.add("apply", NO_FAULT, Fault.refused(unit=1))
    async with faulty(faults) as store:
        await store.apply([birth(1), birth(2)])
        both = [save(1, 2), save(2, 2)]
        for batch in (both, both, both[1:]):
            with pytest.raises(StoreRefused):
                await store.apply(batch)
        assert store.refused == [(2, 2)]
        assert await store.apply(both) == frozenset()


async def test_an_outage_lasts_as_long_as_it_is_set() -> None:
    async with faulty(ScriptedFaults()) as store:
        store.outage = True
        with pytest.raises(StoreUnavailable):
            await store.reserve(1)
        with pytest.raises(StoreUnavailable):
            await store.load("t", "i", 1)
        store.outage = False
        assert await store.reserve(1) == 1


CALLS = [name for name, value in vars(Store).items() if inspect.iscoroutinefunction(value)]


@pytest.mark.parametrize("name", [name for name in CALLS if name != "close"])
async def test_every_call_of_a_store_goes_by_the_faults(name: str) -> None:
    async with faulty(ScriptedFaults()) as store:
        method = getattr(store, name)
        arguments = [None] * len(inspect.signature(method).parameters)
        store.outage = True
        with pytest.raises(StoreUnavailable, match=name):
            await method(*arguments)
        store.kill()
        with pytest.raises(StoreFailed, match=name):
            await method(*arguments)
        assert store.injected == {"outage": 1}


async def test_a_call_lingers_before_and_after_it_takes_effect(
    autojump_clock: trio.testing.MockClock,
) -> None:
    faults = ScriptedFaults()
    faults.add("apply", Fault.slow(before_seconds=2.0, after_seconds=3.0))
    async with faulty(faults) as store, trio.open_nursery() as nursery:
        began = trio.current_time()
        nursery.start_soon(store.apply, [birth(1)])
        await trio.sleep(1.9)
        assert not await exists(store, 1)
        await trio.sleep(0.2)
        assert await exists(store, 1)
        while nursery.child_tasks:  # noqa: ASYNC110  # virtual time
            await trio.sleep(0.1)
        assert trio.current_time() - began == pytest.approx(5.0, abs=0.2)


async def test_a_dead_store_fails_even_the_calls_that_are_under_way(
    autojump_clock: trio.testing.MockClock,
) -> None:
    faults = ScriptedFaults()
    faults.add("apply", Fault.slow(after_seconds=1.0))
    async with faulty(faults) as store:
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                with pytest.raises(StoreFailed):
                    await store.apply([birth(1)])

            nursery.start_soon(write)
            await trio.sleep(0.5)
            store.kill()
        with pytest.raises(StoreFailed):
            await store.check()
        assert await store.store.find("t", "i1") is not None


def test_a_fault_that_would_break_the_contract_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="unknown outcome"):
        Fault(error=StoreUnavailable, committed=True)
    with pytest.raises(ValueError, match="names the bad unit"):
        Fault(error=StoreRefused)


def test_seeded_faults_are_the_same_for_the_same_seed() -> None:
    rates = Rates(unavailable=0.1, full=0.1, refused=0.1, unknown=0.3, slow=0.5, slow_seconds=1.0)

    def drawn(seed: int) -> list[Fault]:
        faults = SeededFaults(seed, rates)
        return [faults.next("apply") for _ in range(200)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    kinds = {(fault.error, fault.committed) for fault in drawn(1)}
    assert kinds == {
        (None, False),
        (StoreUnavailable, False),
        (StoreFull, False),
        (StoreRefused, False),
        (OutcomeUnknown, False),
        (OutcomeUnknown, True),
    }
