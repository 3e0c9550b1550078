"""What the simulation found, each as a scenario of its own."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from runtara.actors.system import Budget
from runtara.actors.wake import WakeScheduler
from runtara.clock import default_clock
from runtara.config import Settings
from runtara.errors import StoreRefused
from runtara.messages import Reply, Wake
from runtara.persistence.store import Due
from runtara.records import Reason, Status
from runtara.runtime import run_runtime
from runtara.tenant import Runtime
from runtara.testing.faulty import NO_FAULT, Fault, FaultyStore, ScriptedFaults
from tests.sqlite_stores import opened


@asynccontextmanager
async def faulty_runtime(**settings: Any) -> AsyncIterator[tuple[Runtime, FaultyStore, ScriptedFaults]]:
    faults = ScriptedFaults()
    async with opened(":memory:") as inner:
        store = FaultyStore(inner, faults)
        async with run_runtime(store, default_clock(), Settings(**settings)) as rt:
            yield rt, store, faults


async def test_a_change_that_comes_while_a_watcher_leaves_harms_nobody(autojump_clock: MockClock) -> None:
    # The watcher's channel was closed at one end and still fed at the other: the error ended the actor of the
    # instance, or the writer, in the middle of a commit.
    with trio.fail_after(60):
        await watch_while_it_changes()


async def watch_while_it_changes() -> None:
    async with faulty_runtime() as (rt, _, _), rt.register("a") as inst:

        async def save() -> None:
            for number in range(20):
                await inst.checkpoint(f"c{number}", b"x")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(save)
            for _ in range(60):
                async with rt.watch("a"):
                    await trio.lowlevel.checkpoint()
        assert rt.statistics().instances.failures == 0
        assert [child.restarts for child in rt.system.supervisor.statistics().children] == [0] * 5
        assert await rt.status("a")


async def test_an_instance_whose_session_is_left_during_an_outage_is_told_afterwards(
    autojump_clock: MockClock,
) -> None:
    # It stayed running, without a session, until the runtime was started again (P10).
    async with faulty_runtime(store_seconds=1.0) as (rt, store, _):
        async with rt.register("a") as inst:
            await inst.checkpoint("c", b"x")
            store.outage = True
        await trio.sleep(20.0)
        store.outage = False
        await trio.sleep(5.0)
        view = await rt.status("a")
        assert (view.status, view.reason) == (Status.SUSPENDED, Reason.DISCONNECTED)


async def test_an_instance_whose_session_is_left_when_the_disk_is_full_is_told_afterwards(
    autojump_clock: MockClock,
) -> None:
    async with faulty_runtime() as (rt, _, faults):
        async with rt.register("a"):
            faults.add("apply", Fault.full(), Fault.refused(), NO_FAULT)
        assert (await rt.status("a")).status is Status.RUNNING
        await trio.sleep(5.0)
        assert (await rt.status("a")).status is Status.SUSPENDED


async def test_a_lost_recovery_still_tells_what_it_was_to_tell(autojump_clock: MockClock) -> None:
    async with faulty_runtime(store_seconds=0.1) as (rt, store, _):
        async with rt.register("a"):
            store.outage = True
        assert rt.system.supervisor.kill("recovery")
        await trio.sleep(3.0)
        store.outage = False
        await trio.sleep(5.0)
        assert (await rt.status("a")).status is Status.SUSPENDED


async def test_a_registration_that_was_given_up_leaves_no_session_even_if_the_store_then_fails(
    autojump_clock: MockClock,
) -> None:
    async with faulty_runtime() as (rt, _, faults):
        faults.add("apply", Fault.slow(after_seconds=1.0), Fault.full(), Fault.full())
        with trio.move_on_after(0.5):
            async with rt.register("a"):
                raise AssertionError("the registration takes a second")
        await trio.sleep(10.0)
        assert rt.system.directory.sessions() == []
        assert (await rt.status("a")).status is Status.SUSPENDED


async def test_a_refused_write_is_refused_to_its_asker_alone(autojump_clock: MockClock) -> None:
    # A sleep and a wait that the refused change would have ended were told that they had been refused.
    async with (
        faulty_runtime() as (rt, store, faults),
        rt.register("a") as inst,
        trio.open_nursery() as nursery,
    ):
        outcomes: dict[str, object] = {}

        async def sleep() -> None:
            outcomes["sleep"] = (await inst.sleep(60.0, checkpoint_id="nap", state=b"z")).interrupted

        async def wait() -> None:
            outcomes["wait"] = (await inst.wait_signal("k", checkpoint_id="w")).interrupted

        nursery.start_soon(sleep)
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        faults.add("apply", Fault.refused())
        with pytest.raises(StoreRefused):
            await rt.send_signal("a", "pause")
        assert len(store.refused) == 1
        await trio.sleep(3.0)
        assert outcomes == {}
        await rt.send_signal("a", "pause")
        await trio.sleep(3.0)
        assert outcomes == {"sleep": True, "wait": True}


async def test_a_caller_that_is_cancelled_while_it_is_let_in_gives_its_bytes_back(
    autojump_clock: MockClock,
) -> None:
    # Cancelled, and let into the budget before it ran again: its bytes were never given back.
    budget = Budget(Settings(budget_bytes=100))
    budget.used = 100
    async with trio.open_nursery() as nursery:
        nursery.start_soon(budget.wait, 60)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        budget.release(100)
    assert budget.used == 0
    assert budget.fits(100)


class ManyDeadlines:
    """A store that has more near deadlines than the scheduler may hold."""

    def __init__(self, now_us: int) -> None:
        self.sweeps = 0
        self.rows = [
            Due(
                tenant_id="t", instance_id=f"i{n}", row=n, epoch=1, deadline_us=now_us + (100 + n) * 1_000_000
            )
            for n in range(1, 10)
        ]

    async def due(self, until_us: int, after: tuple[int, int] | None, limit: int) -> list[Due]:
        self.sweeps += 1
        assert self.sweeps < 1000, "the scheduler reads in a circle"
        await trio.lowlevel.checkpoint()
        return [row for row in self.rows if after is None and row.deadline_us <= until_us]


async def test_more_near_deadlines_than_memory_may_hold_are_not_read_in_a_circle(
    autojump_clock: MockClock,
) -> None:
    # The horizon came nearer than the margin in which the next sweep is due: the scheduler swept for ever.
    clock = default_clock()
    store = ManyDeadlines(clock.now_us())
    settings = Settings(horizon_deadlines=2, horizon_seconds=3600.0)
    scheduler = WakeScheduler(store, clock, settings)  # type: ignore[arg-type]  # it only asks for `due`
    woken: list[tuple[str, int]] = []

    async def post(key: tuple[str, str], message: Wake) -> Reply:
        woken.append((key[1], message.deadline_us))
        store.rows = [row for row in store.rows if row.instance_id != key[1]]
        await trio.lowlevel.checkpoint()
        assert clock.now_us() >= message.deadline_us
        return None  # type: ignore[return-value]  # the scheduler wants to know whether it applied: it did not

    async with trio.open_nursery() as nursery:
        await nursery.start(scheduler.run, post)
        await trio.sleep(50.0)
        assert 1 <= store.sweeps <= 51
        await trio.sleep(80.0)
        nursery.cancel_scope.cancel()
    assert [name for name, _ in woken] == [f"i{n}" for n in range(1, 10)]
