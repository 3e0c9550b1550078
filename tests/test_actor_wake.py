"""The wake scheduler alone: a store of deadlines, a clock, and a post that the test reads."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import runtara
from runtara import InstanceRecord, Reason, Settings, Status
from runtara.actors.letters import Key
from runtara.actors.wake import RETRY_SECONDS, WakeScheduler
from runtara.clock import TrioClock
from runtara.messages import ChangeReply, Reply, Wake
from runtara.testing.samples import creation, instance, unit
from tests.runtimes import ScriptedStore, scripted_store

START_US = 1_700_000_000_000_000


def key(number: int) -> Key:
    return ("acme", f"i{number}")


class Post:
    """What was woken and when (seconds since the start), and what the instances answer and write."""

    def __init__(self, clock: TrioClock, store: ScriptedStore) -> None:
        self.clock = clock
        self.store = store
        self.stored: dict[str, InstanceRecord] = {}
        self.woken: list[tuple[str, float]] = []
        self.answers: list[Exception | bool] = []
        self.gate: trio.Event | None = None
        self.under_way = 0

    async def __call__(self, key: Key, message: Wake) -> Reply:
        self.woken.append((key[1], (self.clock.now_us() - START_US) / 1e6))
        self.under_way += 1
        if self.gate is not None:
            await self.gate.wait()
        await trio.lowlevel.checkpoint()
        self.under_way -= 1
        answer = self.answers.pop(0) if self.answers else True
        if isinstance(answer, Exception):
            raise answer
        if answer and key[1] in self.stored:
            await self.settle(self.stored.pop(key[1]))
        return ChangeReply(applied=answer, status=Status.SUSPENDED, reason=Reason.SLEEPING)

    async def settle(self, record: InstanceRecord) -> None:
        after = attrs.evolve(record, revision=2, sleep_until_us=None)
        await self.store.apply([unit(record.row, 2, after)])


@asynccontextmanager
async def scheduler(
    *deadlines: float, **settings: float
) -> AsyncIterator[tuple[WakeScheduler, Post, ScriptedStore]]:
    """A scheduler that runs over a store with an instance for each of ``deadlines`` (seconds from now)."""
    clock = TrioClock(START_US)
    async with scripted_store() as store, trio.open_nursery() as nursery:
        post = Post(clock, store)
        for number, seconds in enumerate(deadlines, start=1):
            record = instance(
                number,
                status=Status.SUSPENDED,
                reason=Reason.SLEEPING,
                sleep_until_us=START_US + round(seconds * 1e6),
            )
            await store.apply([creation(record)])
            post.stored[record.instance_id] = record
        wake = WakeScheduler(store, clock, Settings(**settings))  # type: ignore[arg-type]
        nursery.start_soon(wake.run, post)
        await wait_all_tasks_blocked()
        yield wake, post, store
        nursery.cancel_scope.cancel()


async def test_what_is_due_is_woken_in_order_and_not_early(autojump_clock: MockClock) -> None:
    async with scheduler(30, 10, 20, -5) as (wake, post, _):
        assert post.woken == [("i4", 0)]
        await trio.sleep(100)
        assert post.woken == [("i4", 0), ("i2", 10), ("i3", 20), ("i1", 30)]
        assert (wake.statistics().deadlines, wake.statistics().woken) == (0, 4)
        assert wake.statistics().next_us is None


async def test_a_nearer_deadline_that_is_noted_comes_first(autojump_clock: MockClock) -> None:
    async with scheduler(100) as (wake, post, _):
        wake.note(key(7), 1, START_US + 5_000_000)
        assert wake.statistics().next_us == START_US + 5_000_000
        await trio.sleep(50)
        assert post.woken == [("i7", 5)]


async def test_a_deadline_that_moves_is_woken_once_at_the_new_time(autojump_clock: MockClock) -> None:
    async with scheduler(10, 20, 30) as (wake, post, _):
        wake.note(key(1), 2, START_US + 40_000_000)
        wake.note(key(2), 2, None)
        wake.note(key(3), 1, START_US + 30_000_000)
        await trio.sleep(100)
        assert post.woken == [("i3", 30), ("i1", 40)]


async def test_a_wake_that_fails_is_tried_again_and_one_without_an_instance_is_not(
    autojump_clock: MockClock,
) -> None:
    async with scheduler(10) as (wake, post, _):
        post.answers = [runtara.StoreUnavailable("away"), runtara.Overloaded("full"), True]
        await trio.sleep(50)
        assert post.woken == [("i1", 10), ("i1", 10 + RETRY_SECONDS), ("i1", 10 + 2 * RETRY_SECONDS)]
        assert wake.statistics().woken == 1
        post.woken.clear()
        post.answers = [runtara.InstanceNotFound("i9")]
        wake.note(key(9), 1, START_US + 60_000_000)
        await trio.sleep(50)
        assert post.woken == [("i9", 60)]


async def test_a_failed_wake_gives_way_to_a_newer_deadline(autojump_clock: MockClock) -> None:
    async with scheduler(10) as (wake, post, _):
        post.answers = [runtara.StoreUnavailable("away")]
        await trio.sleep(10.5)
        wake.note(key(1), 2, START_US + 30_000_000)
        await trio.sleep(50)
        assert post.woken == [("i1", 10), ("i1", 30)]


async def test_a_wake_that_no_longer_applies_is_forgotten(autojump_clock: MockClock) -> None:
    async with scheduler(10) as (wake, post, _):
        post.answers = [False]
        await trio.sleep(50)
        assert (post.woken, wake.statistics().woken) == ([("i1", 10)], 0)


async def test_only_so_many_are_woken_at_once_and_all_are_in_the_end(autojump_clock: MockClock) -> None:
    async with scheduler(*[10.0] * 30, concurrent_wakes=4) as (wake, post, _):
        post.gate = trio.Event()
        await trio.sleep(20)
        assert (post.under_way, len(post.woken)) == (4, 4)
        post.gate.set()
        await trio.sleep(1)
        assert sorted(name for name, _ in post.woken) == sorted(f"i{n}" for n in range(1, 31))
        assert wake.statistics().woken == 30


async def test_memory_holds_the_nearest_deadlines_and_the_others_come_in_time(
    autojump_clock: MockClock,
) -> None:
    seconds = [float(n) for n in range(1, 201)]
    async with scheduler(*seconds, horizon_deadlines=10, horizon_seconds=1000) as (wake, post, _):
        assert wake.statistics().deadlines <= 21
        assert wake.statistics().horizon_us < START_US + 100_000_000
        await trio.sleep(300)
        assert [name for name, _ in post.woken] == [f"i{n}" for n in range(1, 201)]
        assert all(0 <= at - n <= 10 for (_, at), n in zip(post.woken, seconds, strict=True))


async def test_deadlines_beyond_the_horizon_are_not_kept(autojump_clock: MockClock) -> None:
    async with scheduler(10, 5000, horizon_seconds=100) as (wake, post, _):
        assert wake.statistics().deadlines == 1
        wake.note(key(1), 2, START_US + 4_000_000_000)
        assert wake.statistics().deadlines == 0
        await trio.sleep(5001)
        assert ("i2", 5000) in post.woken


async def test_a_store_that_is_away_when_deadlines_are_read_is_asked_again(autojump_clock: MockClock) -> None:
    async with scheduler(150, horizon_seconds=100) as (_, post, store):
        store.due_faults = [runtara.StoreUnavailable("away")] * 3
        await trio.sleep(200)
        assert post.woken == [("i1", 150)]
        assert store.due_faults == []
