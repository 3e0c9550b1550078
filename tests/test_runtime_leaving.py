"""Leaving: drains, deaths, cancellations at every step, and what is found when the file is opened again."""

import os
import shutil
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import runtara
from runtara import Reason, Status
from runtara.instance import Instance
from tests.runtimes import MEMORY, cancelled_at, runtime, url_of

# ---------------------------------------------------------------- drains


async def test_a_session_that_listens_suspends_by_itself_and_no_attempt_is_counted(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    url = url_of(tmp_path / "a.db")
    seen: list[str] = []

    async def session(rt: runtara.Runtime) -> None:
        async with rt.register("a") as inst:
            async for signal in inst.signals():
                seen.append(signal.type.word)
                await inst.ack(signal)
                break

    for _ in range(3):
        async with trio.open_nursery() as nursery:
            start = trio.current_time()
            async with runtime(url, drain_seconds=60) as rt:
                nursery.start_soon(session, rt)
                await wait_all_tasks_blocked()
            assert trio.current_time() - start < 1
    assert seen == ["shutdown"] * 3
    async with runtime(url) as rt:
        view = await rt.get("a")
        assert (view.status, view.reason) == (Status.SUSPENDED, Reason.SHUTDOWN_REQUESTED)
        assert view.record.attempt == 1
        assert view.record.awaits_client_us is not None


async def test_a_session_that_does_not_listen_is_suspended_when_the_drain_is_over(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    url = url_of(tmp_path / "a.db")
    raised: list[type[BaseException]] = []

    async def session(rt: runtara.Runtime) -> None:
        async with rt.register("a") as inst:
            await trio.sleep(30)
            try:
                await inst.checkpoint("late", b"x")
            except runtara.RuntaraError as error:
                raised.append(type(error))

    async with trio.open_nursery() as nursery:
        start = trio.current_time()
        async with runtime(url, drain_seconds=7) as rt:
            nursery.start_soon(session, rt)
            await wait_all_tasks_blocked()
        assert trio.current_time() - start == pytest.approx(7, abs=0.1)
    assert raised == [runtara.RuntimeClosed]
    async with runtime(url) as rt, rt.register("a") as inst:
        assert inst.registered.due is True
        assert inst.registered.attempt == 1
        assert (await inst.get_checkpoint("late")).found is False


async def test_a_sleeper_is_told_of_the_drain_and_keeps_its_deadline(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    url = url_of(tmp_path / "a.db")
    replies: list[runtara.WaitReply] = []

    async def session(rt: runtara.Runtime) -> None:
        async with rt.register("a") as inst:
            replies.append(await inst.sleep(86_400 * 21, checkpoint_id="nap"))

    async with trio.open_nursery() as nursery, runtime(url, drain_seconds=60) as rt:
        nursery.start_soon(session, rt)
        await wait_all_tasks_blocked()
    [early] = replies
    assert early.interrupted
    assert early.signal is not None
    assert early.signal.type is runtara.SignalType.SHUTDOWN
    async with runtime(url) as rt, rt.register("a") as inst:
        late = await inst.sleep(5, checkpoint_id="nap")
    assert late.outcome is runtara.WaitOutcome.ELAPSED
    assert late.deadline_us == early.deadline_us


async def test_sleepers_without_a_session_do_not_delay_the_end(autojump_clock: MockClock) -> None:
    start = trio.current_time()
    async with runtime(drain_seconds=60) as rt:
        for number in range(200):
            async with rt.register(f"i{number}") as inst:
                await inst.suspend(seconds=86_400, checkpoint_id="nap")
    assert trio.current_time() - start < 1


async def test_a_new_instance_is_refused_while_the_runtime_drains(autojump_clock: MockClock) -> None:
    refusals: list[runtara.Draining] = []

    async def session(rt: runtara.Runtime) -> None:
        async with rt.register("a") as inst:
            async for signal in inst.signals():
                try:
                    async with rt.register("b"):
                        raise AssertionError("a new instance was taken")
                except runtara.Draining as error:
                    refusals.append(error)
                await inst.ack(signal)
                break

    async with trio.open_nursery() as nursery, runtime() as rt:
        nursery.start_soon(session, rt)
        await wait_all_tasks_blocked()
    assert len(refusals) == 1
    assert refusals[0].retryable


async def test_a_second_cancellation_does_not_tear_the_drain(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    url = url_of(tmp_path / "a.db")
    with trio.CancelScope() as outer, trio.CancelScope() as inner:
        async with runtime(url, drain_seconds=5) as rt, rt.register("a") as inst:
            await inst.checkpoint("c", b"x")
            inner.cancel()
            outer.cancel()
            await trio.sleep_forever()
    async with runtime(url) as rt:
        view = await rt.get("a")
        assert (view.status, view.reason) == (Status.SUSPENDED, Reason.DISCONNECTED)
        assert view.record.attempt == 1
        assert (await rt.get_checkpoint("a", "c")).state == b"x"


# ---------------------------------------------------------------- deaths


async def copy_of_a_running_store(tmp_path: Path) -> str:
    """What a runtime leaves that dies at this moment: its files, without a drain."""
    source, dead = tmp_path / "live.db", tmp_path / "dead.db"
    async with runtime(url_of(source)) as rt, rt.register("a") as inst:
        await inst.checkpoint("c", b"x")
        for end in ("", "-wal"):
            shutil.copy(f"{source}{end}", f"{dead}{end}")
    return url_of(dead)


async def test_what_a_dead_runtime_left_running_is_suspended_after_the_grace(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with runtime(await copy_of_a_running_store(tmp_path), grace_seconds=30) as rt:
        await trio.sleep(29)
        assert (await rt.get("a")).status is Status.RUNNING
        await trio.sleep(2)
        view = await rt.get("a")
        assert (view.status, view.reason) == (Status.SUSPENDED, Reason.ORPHANED)
        assert view.record.awaits_client_us is not None
        async with rt.register("a") as inst:
            assert inst.registered.attempt == 1  # there was progress since it began
            assert (await inst.checkpoint("c", b"other")).state == b"x"


async def test_who_registers_within_the_grace_is_left_alone(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    url = await copy_of_a_running_store(tmp_path)
    async with runtime(url, grace_seconds=30) as rt, rt.register("a") as inst:
        await trio.sleep(100)
        assert (await rt.get("a")).status is Status.RUNNING
        assert (await inst.checkpoint("d", b"y")).found is False


async def test_a_second_runtime_on_one_file_is_refused_and_names_the_holder(tmp_path: Path) -> None:
    url = url_of(tmp_path / "a.db")
    async with runtime(url):
        with pytest.raises(runtara.StoreLocked, match=f"{os.getpid()}"):
            async with runtime(url):
                raise AssertionError("the store was opened twice")
    async with runtime(url):
        pass


async def test_opening_again_and_again_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    url = url_of(tmp_path / "a.db")

    async def once(number: int) -> None:
        async with runtime(url) as rt, rt.register("a") as inst:
            await inst.checkpoint(f"c{number}", b"x")

    await once(0)
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for number in range(1, 30):
        await once(number)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


async def test_an_opening_cancelled_at_any_step_leaves_the_file_free(tmp_path: Path) -> None:
    url = url_of(tmp_path / "a.db")

    async def open_and_close() -> None:
        async with runtime(url):
            pass

    for step in range(1, 60):
        await cancelled_at(step, open_and_close)
    async with runtime(url) as rt:
        assert (await rt.status("a")).status is Status.UNKNOWN


# ---------------------------------------------------------------- cancelled callers

CALLS: dict[str, Callable[[Instance], Awaitable[object]]] = {
    "checkpoint": lambda inst: inst.checkpoint("c", b"x"),
    "sleep": lambda inst: inst.sleep(0.001, checkpoint_id="nap", state=b"s"),
    "wait": lambda inst: inst.wait_signal("k", checkpoint_id="w"),
    "event": lambda inst: inst.emit("progress", b"1", request_id="r"),
    "error": lambda inst: inst.record_error("code", "text"),
    "complete": lambda inst: inst.complete(b"out"),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("url", [MEMORY, None], ids=["in memory", "in a file, with threads"])
async def test_a_call_cancelled_at_any_step_can_be_made_again(
    name: str, url: str | None, tmp_path: Path
) -> None:
    call = CALLS[name]
    async with runtime(url or url_of(tmp_path / "a.db")) as rt:
        for step in range(1, 12):
            async with rt.register(f"i{step}") as inst:
                await rt.send_custom_signal(f"i{step}", "k", b"p")
                await cancelled_at(step, partial(call, inst))
                with trio.fail_after(5):
                    await call(inst)
                view = await rt.get(f"i{step}")
                ended = Status.COMPLETED if name == "complete" else Status.RUNNING
                assert view.status is ended
                if name == "wait":
                    assert view.unconsumed_signals == 0
                if name == "event":
                    events = await rt.list_events(f"i{step}", type="custom")
                    assert len(events.items) == 1


async def test_a_registration_cancelled_at_any_step_leaves_no_session(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with runtime(url_of(tmp_path / "a.db")) as rt:

        async def register(name: str) -> None:
            async with rt.register(name):
                pass

        for step in range(1, 25):
            await cancelled_at(step, partial(register, f"i{step}"))
        await trio.sleep(100)
        assert rt.statistics().instances.sessions == 0
        left = await rt.list_instances(statuses=frozenset({Status.RUNNING}))
        assert left.items == ()
