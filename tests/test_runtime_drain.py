"""Drains under trouble: many sleepers, cancellations meanwhile, endings that overlap with calls."""

import os
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import runtara
from runtara import Reason, Runtime, Settings, Status
from runtara.clock import default_clock
from runtara.runtime import run_runtime
from tests.runtimes import ScriptedStore, cancelled_at, runtime, scripted_runtime, scripted_store, url_of

DAY = 86_400.0


async def test_a_thousand_sleepers_with_sessions_do_not_delay_the_end(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    """TIM-02: each is told, leaves, and keeps its deadline; nobody waits for the drain's time."""
    url = url_of(tmp_path / "a.db")
    interrupted: list[bool] = []

    async def session(rt: Runtime, number: int) -> None:
        async with rt.register(f"i{number}") as inst:
            interrupted.append((await inst.sleep(5 * DAY, checkpoint_id="nap")).interrupted)

    async with trio.open_nursery() as nursery:
        start = trio.current_time()
        async with runtime(url, drain_seconds=1000) as rt:
            for number in range(1000):
                nursery.start_soon(session, rt, number)
            await wait_all_tasks_blocked()
        assert trio.current_time() - start < 1
    assert interrupted == [True] * 1000
    async with runtime(url) as rt:
        assert await rt.count_instances(statuses=frozenset({Status.SUSPENDED})) == 1000
        page = await rt.list_instances(limit=1000)
        assert {record.attempt for record in page.items} == {1}
        assert len({record.sleep_until_us for record in page.items}) <= 1000


async def test_a_cancellation_that_comes_while_the_runtime_drains_does_not_tear_it(
    autojump_clock: MockClock, tmp_path: Path
) -> None:
    url = url_of(tmp_path / "a.db")
    async with trio.open_nursery() as sessions:
        with trio.CancelScope() as outer:
            outer.deadline = trio.current_time() + 2
            async with runtime(url, drain_seconds=5) as rt:
                sessions.start_soon(deaf, rt, "a")
                await wait_all_tasks_blocked()
                start = trio.current_time()
        assert trio.current_time() - start == pytest.approx(5, abs=0.1)
        sessions.cancel_scope.cancel()
    async with runtime(url) as rt:
        view = await rt.get("a")
        assert (view.status, view.reason) == (Status.SUSPENDED, Reason.SHUTDOWN_REQUESTED)
        assert view.record.awaits_client_us is not None
        assert view.record.attempt == 1


async def deaf(rt: Runtime, name: str) -> None:
    async with rt.register(name):
        await trio.sleep_forever()


@pytest.mark.parametrize("way", ["suspend", "ack", "complete", "leave"])
async def test_every_way_to_obey_a_drain_ends_it_at_once(autojump_clock: MockClock, way: str) -> None:
    replies: list[Status] = []

    async def session(rt: Runtime) -> None:
        async with rt.register("a") as inst:
            async for signal in inst.signals():
                assert signal.type is runtara.SignalType.SHUTDOWN
                if way == "suspend":
                    replies.append((await inst.suspend()).status)
                elif way == "ack":
                    replies.append((await inst.ack(signal)).status)
                elif way == "complete":
                    replies.append((await inst.complete()).status)
                break

    async with trio.open_nursery() as nursery:
        start = trio.current_time()
        async with runtime(drain_seconds=1000) as rt:
            nursery.start_soon(session, rt)
            await wait_all_tasks_blocked()
        assert trio.current_time() - start < 1
    ended = {"suspend": Status.SUSPENDED, "ack": Status.SUSPENDED, "complete": Status.COMPLETED}
    assert replies == ([ended[way]] if way in ended else [])


async def test_a_call_during_the_drain_is_done_or_refused_and_never_hangs(autojump_clock: MockClock) -> None:
    """Callers in the background go on until they are told that the runtime is closed."""
    ends: list[type[BaseException]] = []

    async def caller(rt: Runtime, name: str) -> None:
        done = 0
        try:
            async with rt.register(name) as inst:
                while True:
                    await inst.checkpoint(f"c{done}", b"x")
                    done += 1
        except runtara.RuntaraError as error:
            ends.append(type(error))

    async with trio.open_nursery() as nursery, runtime(drain_seconds=0.01) as rt:
        for number in range(20):
            nursery.start_soon(caller, rt, f"i{number}")
        await trio.lowlevel.checkpoint()
    assert len(ends) == 20
    assert set(ends) <= {runtara.InvalidInstanceState, runtara.RuntimeClosed, runtara.Draining}


async def test_a_drain_with_a_store_that_is_away_ends_in_bounded_time(autojump_clock: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        async with scripted_runtime(drain_seconds=5, store_seconds=10) as (rt, store):
            nursery.start_soon(deaf, rt, "a")
            await wait_all_tasks_blocked()
            store.away = runtara.StoreUnavailable("away")
            start = trio.current_time()
        assert trio.current_time() - start <= 30
        nursery.cancel_scope.cancel()


async def knock(rt: Runtime, name: str, heard: list[object]) -> None:
    try:
        async with rt.register(name) as inst:
            heard.append(inst.registered.status)
            await trio.sleep_forever()
    except runtara.RuntaraError as error:
        heard.append(type(error))


async def test_no_session_begins_once_what_runs_is_being_suspended(autojump_clock: MockClock) -> None:
    """A known instance comes back while the last ones are suspended, when nobody would tell it any more."""
    heard: list[object] = []
    async with scripted_store() as store, trio.open_nursery() as nursery:
        async with run_runtime(store, default_clock(), Settings(drain_seconds=5)) as rt:
            async with rt.register("known"):
                pass
            nursery.start_soon(deaf, rt, "a")
            await wait_all_tasks_blocked()
            nursery.start_soon(at_the_end, rt, store, heard, nursery)
        record = await store.find("default", "known")
        assert record is not None
        assert (record.status, record.reason) == (Status.SUSPENDED, Reason.DISCONNECTED)
        nursery.cancel_scope.cancel()
    assert heard == [runtara.Draining]


async def at_the_end(rt: Runtime, store: ScriptedStore, heard: list[object], nursery: trio.Nursery) -> None:
    """Just before the drain's patience ends, let no write end; just after it, knock."""
    await trio.sleep(4.9)
    gate = store.hold()
    await trio.sleep(0.5)
    nursery.start_soon(knock, rt, "known", heard)
    await trio.sleep(0.5)
    gate.set()


async def test_a_session_that_is_beginning_when_the_patience_ends_is_suspended_too(
    autojump_clock: MockClock,
) -> None:
    heard: list[object] = []
    async with scripted_store() as store, trio.open_nursery() as nursery:

        async def knock_and_wait(rt: Runtime) -> None:
            await trio.sleep(4.9)
            gate = store.hold()
            nursery.start_soon(knock, rt, "known", heard)
            await trio.sleep(1)
            gate.set()

        async with run_runtime(store, default_clock(), Settings(drain_seconds=5)) as rt:
            async with rt.register("known"):
                pass
            nursery.start_soon(deaf, rt, "a")
            await wait_all_tasks_blocked()
            nursery.start_soon(knock_and_wait, rt)
        for name in ("a", "known"):
            record = await store.find("default", name)
            assert record is not None
            assert (record.status, record.reason) == (Status.SUSPENDED, Reason.SHUTDOWN_REQUESTED)
            assert record.attempt == 1
        nursery.cancel_scope.cancel()
    assert heard[:1] == [Status.RUNNING]


async def test_openings_that_are_cancelled_leave_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    """TRI-06: at the n-th step of any task, for 100 n, with threads."""
    url = url_of(tmp_path / "a.db")

    async def once() -> None:
        async with runtime(url) as rt, rt.register("a") as inst:
            await inst.checkpoint("c", b"x")

    await once()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for step in range(1, 101):
        await cancelled_at(step, once, any_task=True)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
    async with runtime(url) as rt:
        assert (await rt.get_checkpoint("a", "c")).state == b"x"
        assert (await rt.get("a")).connected is False


async def test_an_opening_that_is_cancelled_at_any_step_of_any_task_ends(autojump_clock: MockClock) -> None:
    async def once() -> None:
        async with runtime():
            pass

    cancelled = [await cancelled_at(step, once, any_task=True) for step in range(1, 120)]
    assert cancelled[0] is True
    assert cancelled[-1] is False


@pytest.mark.parametrize("method", ["checkpoint", "sleep", "wait", "complete", "register"])
async def test_a_call_cancelled_at_any_step_of_any_task_takes_effect_once(
    autojump_clock: MockClock, method: str
) -> None:
    async with runtime() as rt:
        for step in range(1, 30):
            name = f"i{step}"
            await rt.send_custom_signal(name, "k", b"p", store_if_unknown=True)
            if method == "register":
                await cancelled_at(step, partial(visit, rt, name), any_task=True)
                await trio.sleep(1)
                assert (await rt.status(name)).connected is False
            async with rt.register(name) as inst:
                calls: dict[str, Callable[[], Awaitable[object]]] = {
                    "checkpoint": partial(inst.checkpoint, "c", b"x"),
                    "sleep": partial(inst.sleep, 50, checkpoint_id="c", state=b"x"),
                    "wait": partial(inst.wait_signal, "k", checkpoint_id="c"),
                    "complete": partial(inst.complete, b"out"),
                    "register": partial(inst.checkpoint, "c", b"x"),
                }
                begun = trio.current_time()
                await cancelled_at(step, calls[method], any_task=True)
                await calls[method]()
                assert trio.current_time() - begun <= 51
            checkpoints = await rt.list_checkpoints(name)
            names = [] if method == "complete" else ["c"]
            assert [record.checkpoint_id for record in checkpoints.items] == names
            view = await rt.get(name)
            assert view.unconsumed_signals == (0 if method == "wait" else 1)
            assert (view.status is Status.COMPLETED) is (method == "complete")
            assert view.connected is False


async def visit(rt: Runtime, name: str) -> None:
    async with rt.register(name):
        pass
