"""The retention actor: what a pass purges and when, how gently, and what becomes of it under trouble."""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import runtara
from runtara import InstanceRecord, Reason, Runtime, Settings, Status
from runtara.actors.purge import Pace
from runtara.actors.retention import FIRST_SECONDS, RETRY_SECONDS, RetentionStatistics
from runtara.actors.supervisor import ChildKilled
from runtara.clock import TrioClock
from runtara.persistence.store import (
    Finished,
    Growth,
    InstanceFilter,
    InstanceOrder,
    PageRequest,
    Purged,
    StoreStatistics,
)
from runtara.retention import FIRST_RECORDS, LEAST_RECORDS, LONGEST_SECONDS, TARGET_SECONDS
from runtara.runtime import run_runtime
from runtara.testing.samples import checkpoint, creation, instance
from tests.runtimes import ScriptedStore, assert_nothing_held, store_of

START_US = 1_700_000_000_000_000
DAY = 86_400


@attrs.define(kw_only=True, eq=False)
class PurgeStore(ScriptedStore):
    """A store whose purges fail, wait and take time as the test says."""

    purge_faults: list[Exception | None] = attrs.field(factory=list)
    """What the next calls of `purge` raise before they delete."""
    sweep_faults: list[Exception | None] = attrs.field(factory=list)
    terminal_faults: list[Exception | None] = attrs.field(factory=list)
    record_seconds: float = 0.0
    """How long a delete takes for each record that it may delete."""
    gate: trio.Event | None = None
    """While set, `purge` waits for it before it deletes."""
    purges: list[tuple[float, float, int]] = attrs.field(factory=list)
    """When each purge and sweep began and ended, and how much it was allowed."""
    size: int | None = None
    """Of the file, as `statistics` says it."""
    grown: int | None = None
    """The same, as `growth` says it."""
    growth_faults: list[Exception | None] = attrs.field(factory=list)

    async def terminal(
        self,
        status: Status,
        before_us: int,
        tenant_id: str | None,
        after: tuple[int, int] | None,
        limit: int,
    ) -> list[Finished]:
        self.raise_next(self.terminal_faults)
        return await super().terminal(status, before_us, tenant_id, after, limit)

    async def purge(self, rows: Sequence[int], most: int) -> Purged:
        begun = trio.current_time()
        if self.gate is not None:
            await self.gate.wait()
        self.raise_next(self.purge_faults)
        await trio.sleep(self.record_seconds * most)
        purged = await super().purge(rows, most)
        self.purges.append((begun, trio.current_time(), most))
        return purged

    async def sweep(self, most: int) -> bool:
        begun = trio.current_time()
        self.raise_next(self.sweep_faults)
        await trio.sleep(self.record_seconds * most)
        left = await super().sweep(most)
        self.purges.append((begun, trio.current_time(), most))
        return left

    async def growth(self) -> Growth:
        self.raise_next(self.growth_faults)
        return attrs.evolve(await super().growth(), file_bytes=self.grown)

    def statistics(self) -> StoreStatistics:
        return attrs.evolve(super().statistics(), file_bytes=self.size)


def opened() -> AbstractAsyncContextManager[PurgeStore]:
    return store_of(PurgeStore)


@asynccontextmanager
async def retention(
    policy: str, ended: Sequence[InstanceRecord] = (), **settings: Any
) -> AsyncIterator[tuple[Runtime, PurgeStore]]:
    """A runtime with a policy, on a store that holds ``ended`` (whose rows are given here)."""
    chosen = Settings(retention=policy, **settings)
    async with opened() as store:
        await fill(store, ended)
        async with run_runtime(store, TrioClock(START_US), chosen) as rt:
            yield rt, store
        assert_nothing_held(rt.system)
        assert rt.system.directory.held == {}


async def fill(store: PurgeStore, ended: Sequence[InstanceRecord], checkpoints: int = 1) -> None:
    first = await store.reserve(len(ended) or 1)
    for row, record in enumerate(ended, start=first):
        saved = [checkpoint(revision) for revision in range(1, checkpoints + 1)]
        await store.apply([creation(attrs.evolve(record, row=row), *saved)])


def ended(
    name: str, age: float, status: Status = Status.COMPLETED, tenant_id: str = "acme", **fields: Any
) -> InstanceRecord:
    """An instance that ended ``age`` seconds before the start, and was made long before that."""
    reasons = {Status.COMPLETED: Reason.COMPLETED, Status.FAILED: Reason.APPLICATION_ERROR}
    return instance(
        1,
        instance_id=name,
        tenant_id=tenant_id,
        status=status,
        reason=reasons.get(status, Reason.CANCELLED),
        finished_us=START_US - round(age * 1e6),
        **fields,
    )


def many(count: int) -> list[InstanceRecord]:
    return [ended(f"i{number}", 10 * DAY + number) for number in range(count)]


async def names_in(store: PurgeStore) -> set[str]:
    page = await store.list_instances(InstanceFilter(), InstanceOrder.CREATED, PageRequest(limit=1000))
    return {f"{record.tenant_id}/{record.instance_id}" for record in page.items}


async def a_pass() -> None:
    await trio.sleep(FIRST_SECONDS + 1)


# ---------------------------------------------------------------- what goes, and when


async def test_a_pass_goes_by_the_time_of_finish_and_never_touches_what_lives(
    autojump_clock: MockClock,
) -> None:
    some = [
        ended("old", 31 * DAY),
        ended("long and just ended", 1, created_us=START_US - 400 * DAY * 1_000_000),
        ended("young", 29 * DAY),
        ended("failed", 31 * DAY, Status.FAILED),
        ended("cancelled", 500 * DAY, Status.CANCELLED),
        instance(1, instance_id="alive", status=Status.SUSPENDED, reason=Reason.PAUSED, created_us=1),
    ]
    async with retention("completed=30d, failed=90d", some) as (rt, store):
        await a_pass()
        left = {"long and just ended", "young", "failed", "cancelled", "alive"}
        assert await names_in(store) == {f"acme/{name}" for name in left}
        await trio.sleep(2 * DAY)
        assert await names_in(store) == {f"acme/{name}" for name in left - {"young"}}
        assert rt.statistics().retention.purged == 2


async def test_the_rules_of_tenants_replace_the_general_ones(autojump_clock: MockClock) -> None:
    some = [
        ended(f"{status.word} {days}", days * DAY, status, tenant_id=tenant)
        for tenant in ("acme", "bank", "other")
        for status in (Status.COMPLETED, Status.FAILED)
        for days in (8, 31, 100)
    ]
    policy = "completed=30d, acme/completed=7d, bank/completed=keep, bank/failed=90d"
    async with retention(policy, some) as (rt, store):
        await a_pass()
        assert await names_in(store) == {
            "bank/completed 8",
            "bank/completed 31",
            "bank/completed 100",
            "bank/failed 8",
            "bank/failed 31",
            "other/completed 8",
            *(f"{tenant}/failed {days}" for tenant in ("acme", "other") for days in (8, 31, 100)),
        }
        assert rt.statistics().retention.purged == 6


async def test_the_first_pass_comes_soon_and_the_others_in_their_time(autojump_clock: MockClock) -> None:
    async with retention("completed=1d", retention_seconds=600) as (rt, store):
        assert rt.statistics().retention == RetentionStatistics(passes=0, purged=0, last_pass_us=None)
        await trio.sleep(FIRST_SECONDS - 0.5)
        assert rt.statistics().retention.passes == 0
        await trio.sleep(1)
        assert rt.statistics().retention.passes == 1
        assert rt.statistics().retention.last_pass_us == pytest.approx(
            START_US + FIRST_SECONDS * 1e6, abs=100_000
        )
        await trio.sleep(598)
        assert rt.statistics().retention.passes == 1
        await trio.sleep(2)
        assert rt.statistics().retention.passes == 2
        await trio.sleep(6000)
        assert rt.statistics().retention.passes == 12
        assert store.begun == 0


@pytest.mark.parametrize("policy", ["", "completed=keep, acme/failed=keep"])
async def test_without_rules_nothing_goes_but_what_a_purge_has_left(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    caplog.set_level(logging.INFO, "runtara.actors")
    async with opened() as store:
        await fill(store, [ended("kept", 5000 * DAY), ended("gone", 1)], checkpoints=200)
        record = await store.find("acme", "gone")
        assert record is not None
        assert (await store.purge([record.row], 1)).children_left
        async with run_runtime(store, TrioClock(START_US), Settings(retention=policy)) as rt:
            await trio.sleep(30 * DAY)
            assert await names_in(store) == {"acme/kept"}
            assert (await store.growth()).rows["checkpoints"] == 200
            assert rt.statistics().retention.purged == 0
    assert [r.getMessage() for r in caplog.records if "retention" in r.getMessage()] == []


async def test_a_pass_is_one_line_in_the_log(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "runtara.actors")
    async with retention("completed=1d", many(300)):
        await a_pass()
    lines = [record.getMessage() for record in caplog.records if "retention" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("retention: a pass purged 300 instances in ")


# ---------------------------------------------------------------- how gently


async def test_batches_come_to_the_target_and_leave_the_writer_at_least_as_long_as_they_took(
    autojump_clock: MockClock,
) -> None:
    async with retention("completed=1d", many(600)) as (rt, store):
        store.record_seconds = 0.00007
        await trio.sleep(600)
        assert rt.statistics().retention.purged == 600
        took = [end - begin for begin, end, _ in store.purges]
        assert took[0] == pytest.approx(FIRST_RECORDS * 0.00007)
        assert took[0] > TARGET_SECONDS >= max(took[3:])
        pauses = [
            later[0] - earlier[1] for earlier, later in zip(store.purges, store.purges[1:], strict=False)
        ]
        assert all(pause >= spent * 0.999 for pause, spent in zip(pauses, took, strict=False))


async def test_a_batch_that_took_too_long_is_followed_by_the_smallest(autojump_clock: MockClock) -> None:
    pace = Pace()

    async def slow(records: int) -> None:
        await trio.sleep(LONGEST_SECONDS + 0.001)

    await pace.measure(slow)
    await pace.pause(full=True)
    assert pace.records == LEAST_RECORDS
    assert pace.instances >= 1


async def test_what_a_batch_holds_waits_and_what_it_does_not_goes_on(autojump_clock: MockClock) -> None:
    async with (
        retention("completed=1d", [ended("old", 2 * DAY)]) as (rt, store),
        trio.open_nursery() as calls,
    ):
        acme = rt.for_tenant("acme")
        store.gate = trio.Event()
        await trio.sleep(FIRST_SECONDS + 1)
        created: list[bool] = []

        async def register() -> None:
            async with acme.register("old") as inst:
                created.append(inst.registered.created)

        calls.start_soon(register)
        async with acme.register("other") as inst:
            for number in range(10):
                await inst.checkpoint(f"c{number}", b"x")
        await trio.sleep(10)
        assert created == []
        store.gate.set()
        await wait_all_tasks_blocked()
        assert created == [True]
        assert await names_in(store) == {"acme/old", "acme/other"}


# ---------------------------------------------------------------- trouble


async def test_an_outage_delays_a_pass_and_it_goes_on_where_it_was(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "runtara.actors")
    away = runtara.StoreUnavailable("away")
    async with retention("completed=1d", many(200)) as (rt, store):
        store.sweep_faults = [away]
        store.terminal_faults = [None, away, runtara.StoreFull("full")]
        store.purge_faults = [None, away, away, runtara.OutcomeUnknown("lost"), runtara.StoreReadOnly("ro")]
        await trio.sleep(FIRST_SECONDS + 1)
        assert rt.statistics().retention.passes == 0
        await trio.sleep(20 * RETRY_SECONDS)
        assert await names_in(store) == set()
        assert not store.purge_faults + store.terminal_faults + store.sweep_faults
        statistics = rt.statistics().retention
        assert (statistics.passes, statistics.purged) == (1, 200)
    lines = [record.getMessage() for record in caplog.records if "a pass purged" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].startswith("retention: a pass purged 200 instances in ")


async def test_a_refusal_ends_the_pass_and_the_next_one_begins_anew(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with retention("completed=1d", many(3), retention_seconds=100) as (rt, store):
        store.purge_faults = [runtara.StoreRefused("no")]
        await trio.sleep(FIRST_SECONDS + 50)
        assert rt.statistics().retention.passes == 0
        assert len(await names_in(store)) == 3
        await trio.sleep(100)
        assert await names_in(store) == set()
        assert all(child.restarts == 0 for child in rt.system.supervisor.statistics().children)
    assert "retention: a pass was given up: no" in [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("where", ["purge_faults", "sweep_faults", "terminal_faults"])
async def test_damage_stops_the_runtime(autojump_clock: MockClock, where: str) -> None:
    with pytest.raises(runtara.StoreFailed, match=r"^an I/O error$"):
        async with retention("completed=1d", many(3)) as (_, store):
            setattr(store, where, [runtara.StoreFailed("an I/O error")])
            await trio.sleep(10 * DAY)


@pytest.mark.parametrize("victim", ["retention", "instances", "writer", "wake", "recovery"])
async def test_a_part_of_the_tree_that_is_lost_during_a_batch_leaves_no_half(
    autojump_clock: MockClock, victim: str
) -> None:
    async with retention("completed=1d", many(300)) as (rt, store):
        acme = rt.for_tenant("acme")
        async with acme.register("alive") as inst:
            store.gate = trio.Event()
            await trio.sleep(FIRST_SECONDS + 1)
            held = list(rt.system.directory.held)
            assert len(held) == Pace().instances
            rt.system.supervisor.kill(victim, ChildKilled(victim))
            await wait_all_tasks_blocked()
            assert list(rt.system.directory.held) == held
            store.gate.set()
            await wait_all_tasks_blocked()
            assert len(await names_in(store)) <= 301 - len(held)
            await trio.sleep(60)
            assert await names_in(store) == {"acme/alive"}
            assert (await inst.checkpoint("c", b"x")).found is False
            assert (await store.growth()).rows["checkpoints"] == 1
            assert {c.name: c.restarts for c in rt.system.supervisor.statistics().children}[victim] == 1
        assert rt.statistics().retention.purged == 300


async def test_a_runtime_that_ends_during_a_batch_lets_it_end(autojump_clock: MockClock) -> None:
    settings = Settings(retention="completed=1d")
    async with opened() as store, trio.open_nursery() as nursery:
        await fill(store, many(10))
        async with run_runtime(store, TrioClock(START_US), settings) as rt:
            gate = store.gate = trio.Event()
            await trio.sleep(FIRST_SECONDS + 1)

            async def open_gate() -> None:
                await trio.sleep(1)
                gate.set()

            nursery.start_soon(open_gate)
        assert rt.system.directory.held == {}
        assert await names_in(store) == set()


# ---------------------------------------------------------------- growth

GIB = 1024**3


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


async def test_a_store_that_grows_without_a_retention_is_told_of_once_per_doubling(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with retention("", retention_seconds=100) as (_, store):
        said = []
        for size in (0, 9, 10, 11, 19, 20, 25, 39, 20, 41, 85, 400):
            store.size = size * GIB
            await trio.sleep(100)
            said.append(len(warnings_in(caplog)))
            caplog.clear()
    assert said == [0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("policy", "size", "limit", "times"),
    [
        ("completed=keep", 100, 100, 1),
        ("", 99, 100, 0),
        ("", 10**15, 0, 0),
        ("failed=1d", 10**15, 100, 0),
        ("", None, 1, 0),
    ],
)
async def test_the_warning_is_for_a_store_without_a_retention_that_has_the_stated_size(
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
    policy: str,
    size: int | None,
    limit: int,
    times: int,
) -> None:
    async with retention(policy, size_warning_bytes=limit) as (_, store):
        store.size = size
        await trio.sleep(DAY)
    assert len(warnings_in(caplog)) == times


async def test_a_store_that_cannot_tell_its_size_at_once_is_asked_for_its_growth(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with retention("", retention_seconds=100) as (_, store):
        store.grown = 10 * GIB
        store.growth_faults = [runtara.StoreUnavailable("away")] * 2
        await trio.sleep(FIRST_SECONDS + 1)
        assert warnings_in(caplog) == ["retention: the store does not answer, trying again: away"]
        await trio.sleep(2 * RETRY_SECONDS)
        assert warnings_in(caplog)[2:] == [
            "the store holds 10737418240 bytes, and no retention deletes what has ended (see the setting)"
        ]
