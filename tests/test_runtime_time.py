"""Durable time: one deadline, never early, over restarts and jumps of the clock."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import runtara
from runtara import Instance, Reason, Status, WaitOutcome
from runtara.actors.letters import Key
from runtara.clock import TrioClock
from runtara.link import Sink
from runtara.messages import Reply, Request, Wake
from tests.runtimes import HandClock, runtime, scripted_runtime, url_of

WEEK = 7 * 86_400.0


@pytest.fixture
def url(tmp_path: Path) -> str:
    return url_of(tmp_path / "a.db")


async def test_three_weeks_of_sleep_are_exact_and_over_at_once(autojump_clock: MockClock) -> None:
    async with runtime() as rt, rt.register("a") as inst:
        start = trio.current_time()
        reply = await inst.sleep(3 * WEEK, checkpoint_id="nap", state=b"s")
        assert (reply.outcome, reply.interrupted) == (WaitOutcome.ELAPSED, False)
        assert trio.current_time() - start == pytest.approx(3 * WEEK)
        assert (await inst.get_checkpoint("nap")).state == b"s"
        assert await inst.sleep(3 * WEEK, checkpoint_id="nap") == reply
        assert trio.current_time() - start == pytest.approx(3 * WEEK)


@pytest.mark.parametrize(
    "seconds",
    [float("nan"), float("inf"), float("-inf"), -1, -1e-9, None, "5", True, 101 * 365 * 86_400, b"1"],
)
async def test_what_is_no_duration_is_refused_by_its_field(seconds: Any) -> None:
    async with runtime() as rt, rt.register("a") as inst:
        calls: list[tuple[str, partial[Any]]] = [
            ("seconds", partial(inst.sleep, seconds)),
            ("seconds", partial(inst.sleep, seconds, checkpoint_id="c")),
        ]
        if seconds is not None:  # which means for ever
            calls.append(("timeout", partial(inst.wait_signal, "k", checkpoint_id="w", timeout=seconds)))
            calls.append(("seconds", partial(inst.suspend, seconds=seconds)))
        for field, call in calls:
            with pytest.raises(runtara.ValidationError) as caught:
                await call()
            assert caught.value.field == field
        assert (await inst.status()).status is Status.RUNNING
        assert await rt.count_records("a", runtara.CheckpointRecord) == 0


@pytest.mark.parametrize("seconds", [0, 0.0, -0.0])
async def test_no_time_is_over_at_once(autojump_clock: MockClock, seconds: float) -> None:
    async with runtime() as rt, rt.register("a") as inst:
        start = trio.current_time()
        assert (await inst.sleep(seconds)).outcome is WaitOutcome.ELAPSED
        timeout = await inst.wait_signal("k", checkpoint_id="w", timeout=seconds)
        assert timeout.timed_out
        assert trio.current_time() == start


async def test_the_shortest_sleep_is_a_microsecond_long(autojump_clock: MockClock) -> None:
    async with runtime() as rt, rt.register("a") as inst:
        start = trio.current_time()
        assert (await inst.sleep(1e-9)).outcome is WaitOutcome.ELAPSED
        assert 0 < trio.current_time() - start < 2e-6


# ---------------------------------------------------------------- restarts


@pytest.mark.parametrize(("away", "left"), [(10.0, 90.0), (99.0, 1.0), (100.0, 0.0), (5000.0, 0.0)])
async def test_a_restart_neither_shortens_nor_lengthens_a_sleep(
    autojump_clock: MockClock, url: str, away: float, left: float
) -> None:
    clock = TrioClock(1_700_000_000_000_000)
    async with runtime(url, clock=clock) as rt, rt.register("a") as inst:
        with trio.move_on_after(1):
            await inst.sleep(101, checkpoint_id="nap", state=b"s")
    await trio.sleep(away)
    async with runtime(url, clock=clock) as rt, rt.register("a") as again:
        start = trio.current_time()
        assert (await again.sleep(999, checkpoint_id="nap")).outcome is WaitOutcome.ELAPSED
        assert trio.current_time() - start == pytest.approx(left)


async def test_a_restart_keeps_the_deadline_of_a_wait(autojump_clock: MockClock, url: str) -> None:
    """Ten minutes from the first entry, whatever happens in between; the late signal is kept."""
    clock = TrioClock(1_700_000_000_000_000)
    start = trio.current_time()
    for _ in range(4):
        async with runtime(url, clock=clock) as rt, rt.register("a") as inst:
            with trio.move_on_after(100):
                await inst.wait_signal("k", checkpoint_id="w", timeout=600)
                raise AssertionError("not reached")
        await trio.sleep(20)
    async with runtime(url, clock=clock) as rt, rt.register("a") as inst:
        reply = await inst.wait_signal("k", checkpoint_id="w", timeout=600)
        assert reply.timed_out
        assert trio.current_time() - start == pytest.approx(600)
        await rt.send_custom_signal("a", "k", b"late")
        assert (await inst.wait_signal("k", checkpoint_id="w", timeout=600)).timed_out
        assert (await inst.wait_signal("k", checkpoint_id="w2")).payload == b"late"


async def test_a_suspended_instance_becomes_due_without_its_session(
    autojump_clock: MockClock, url: str
) -> None:
    clock = TrioClock(1_700_000_000_000_000)
    async with runtime(url, clock=clock) as rt:
        async with rt.register("a") as inst:
            await inst.suspend(seconds=7200, checkpoint_id="nap")
        view = await rt.status("a")
        assert (view.status, view.reason) == (Status.SUSPENDED, Reason.SLEEPING)
        assert view.record.awaits_client_us is None
    async with runtime(url, clock=clock) as rt:
        await trio.sleep(7199)
        async with rt.register("a") as early:
            assert early.registered.due is False
            await early.suspend(seconds=0, checkpoint_id="other")
        await trio.sleep(2)
        async with rt.register("a") as late:
            assert late.registered.due is True
        assert rt.statistics().wake.deadlines == 0


async def test_deadlines_beyond_the_horizon_are_read_when_their_time_nears(
    autojump_clock: MockClock,
) -> None:
    woken: list[tuple[int, float]] = []
    async with runtime(horizon_seconds=10, horizon_deadlines=5) as rt, trio.open_nursery() as nursery:
        start = trio.current_time()

        async def session(number: int) -> None:
            async with rt.register(f"i{number}") as inst:
                await inst.sleep(number, checkpoint_id="nap")
                woken.append((number, trio.current_time() - start))

        for number in range(1, 60):
            nursery.start_soon(session, number)
        await wait_all_tasks_blocked()
        assert rt.statistics().wake.deadlines <= 10
    assert [number for number, _ in woken] == list(range(1, 60))
    assert [seconds for _, seconds in woken] == pytest.approx(list(range(1, 60)))


async def test_a_thousand_sleepers_due_at_once_are_woken_once_each(autojump_clock: MockClock) -> None:
    async with runtime(concurrent_wakes=10) as rt:
        ended = []

        async def session(number: int) -> None:
            async with rt.register(f"i{number}") as inst:
                ended.append((await inst.sleep(50, checkpoint_id="nap")).outcome)

        async with trio.open_nursery() as nursery:
            for number in range(1000):
                nursery.start_soon(session, number)
        assert ended == [WaitOutcome.ELAPSED] * 1000
        assert rt.statistics().wake.woken == 1000
        assert rt.statistics().wake.deadlines == 0


# ---------------------------------------------------------------- jumps of the wall clock


async def sleeper(inst: Instance, seconds: float, woken: list[float]) -> None:
    assert (await inst.sleep(seconds, checkpoint_id="nap")).outcome is WaitOutcome.ELAPSED
    woken.append(trio.current_time())


async def test_a_wall_clock_that_jumps_forward_wakes_within_one_scan(autojump_clock: MockClock) -> None:
    """The machine was suspended for two hours; trio's clock stood still."""
    clock = HandClock()
    async with runtime(clock=clock) as rt, rt.register("a") as inst, trio.open_nursery() as nursery:
        woken: list[float] = []
        nursery.start_soon(sleeper, inst, 7200, woken)
        await trio.sleep(10.5)
        assert woken == []
        clock.advance(7200)
        jumped = trio.current_time()
        await trio.sleep(1.5)
        assert len(woken) == 1
        assert woken[0] - jumped <= 1.0
        assert rt.statistics().wake.woken == 1


async def test_a_wall_clock_that_is_set_back_wakes_nobody_early_or_twice(autojump_clock: MockClock) -> None:
    clock = HandClock()
    async with runtime(clock=clock) as rt, rt.register("a") as inst, trio.open_nursery() as nursery:
        woken: list[float] = []
        nursery.start_soon(sleeper, inst, 100, woken)
        await wait_all_tasks_blocked()
        clock.advance(99.9)
        clock.advance(-3600)
        await trio.sleep(5000)
        assert woken == []
        clock.advance(3600)
        await trio.sleep(5)
        assert woken == []
        clock.advance(0.2)
        await trio.sleep(5)
        assert len(woken) == 1
        clock.advance(-50)
        await trio.sleep(5)
        clock.advance(100)
        await trio.sleep(5)
        assert (len(woken), rt.statistics().wake.woken) == (1, 1)


async def test_a_clock_set_back_between_the_firing_and_the_actor_wakes_later(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler reads a clock that is right, the actor one that was set back meanwhile."""
    clock = HandClock()
    async with runtime(clock=clock) as rt, rt.register("a") as inst, trio.open_nursery() as nursery:
        woken: list[float] = []
        nursery.start_soon(sleeper, inst, 100, woken)
        await wait_all_tasks_blocked()
        request = rt.system.request
        fired: list[int] = []

        async def late(key: Key, message: Request, sink: Sink | None = None) -> Reply:
            if isinstance(message, Wake) and not fired:
                fired.append(message.deadline_us)
                clock.advance(-50)
            return await request(key, message, sink)

        monkeypatch.setattr(rt.system, "request", late)
        clock.advance(100)
        await trio.sleep(10)
        assert len(fired) == 1
        assert woken == []
        clock.advance(50)
        await trio.sleep(5)
        assert len(woken) == 1


# ---------------------------------------------------------------- an instance cannot be missed


async def test_a_deadline_that_moves_while_the_deadlines_are_read_is_kept(autojump_clock: MockClock) -> None:
    """What the sweep read is older than what was noted meanwhile."""
    async with scripted_runtime() as (rt, store), rt.register("a") as inst:
        with trio.move_on_after(1):
            await inst.sleep(1000, checkpoint_id="long")
        start = trio.current_time()

        async def move() -> None:
            store.after_due = None
            nursery.start_soon(inst.sleep, 100)
            await wait_all_tasks_blocked()

        async with trio.open_nursery() as nursery:
            store.after_due = move
            rt.system.supervisor.kill("wake")
            await wait_all_tasks_blocked()
        assert trio.current_time() - start == pytest.approx(100)


async def test_deadlines_that_cannot_be_read_are_read_later(autojump_clock: MockClock) -> None:
    async with scripted_runtime() as (rt, store), rt.register("a") as inst:
        store.due_faults = [runtara.StoreUnavailable("away")] * 5
        rt.system.supervisor.kill("wake")
        start = trio.current_time()
        await inst.sleep(1, checkpoint_id="nap")
        assert 1 <= trio.current_time() - start <= 6
        assert store.due_faults == []


async def stubborn_sleeper(inst: Instance, seconds: float, woken: list[float]) -> None:
    """Asks again while the answer is an error that says that this may help."""
    while not woken:
        try:
            await sleeper(inst, seconds, woken)
        except runtara.StoreUnavailable:
            await trio.sleep(1)


async def test_an_outage_at_the_time_of_waking_makes_a_wake_late_and_loses_none(
    autojump_clock: MockClock,
) -> None:
    """An outage of the store does not lengthen a sleep by more than itself."""
    async with scripted_runtime(store_seconds=10) as (rt, store), rt.register("a") as inst:
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            woken: list[float] = []
            nursery.start_soon(stubborn_sleeper, inst, 60, woken)
            await trio.sleep(50)
            store.away = runtara.StoreUnavailable("away")
            await trio.sleep(50)
            assert woken == []
            store.away = None
        assert 100 <= woken[0] - start <= 103
        assert rt.statistics().wake.woken == 1
