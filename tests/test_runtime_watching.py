"""watch and result: a stream of committed changes, and the end of an instance."""

from collections import Counter
from pathlib import Path

import pytest
import trio

import runtara
from runtara import Change, Instance, Runtime, Status
from runtara.tenant import WATCH_BUFFER
from tests.runtimes import STORES, entry_of, runtime, scripted_runtime, url_on


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_on(request.param, tmp_path)


async def collect(rt: Runtime, seen: list[Change], *, task_status: trio.TaskStatus[None]) -> None:
    async with rt.watch("a") as changes:
        async for change in changes:
            seen.append(change)
            if len(seen) == 1:
                task_status.started()


async def test_a_watcher_sees_how_it_is_and_then_every_change_until_the_end(url: str) -> None:
    seen: list[Change] = []
    async with runtime(url) as rt:
        async with rt.register("a") as inst:
            await inst.checkpoint("before", b"1")
            async with trio.open_nursery() as nursery:
                await nursery.start(collect, rt, seen)
                await inst.checkpoint("c1", b"1")
                await inst.emit("e")
                await rt.send_custom_signal("a", "k", b"p")
                await inst.wait_signal("k", checkpoint_id="w")
                await inst.complete(b"out")
        assert entry_of(rt, "a").watchers is None
    first, *later = seen
    assert first.kinds == ("snapshot",)
    assert (first.status, first.checkpoint_id) == (Status.RUNNING, "before")
    assert [c.revision for c in later] == list(range(first.revision + 1, first.revision + 1 + len(later)))
    assert [c.kinds for c in later] == [
        ("checkpoint",),
        ("event", "request"),
        ("request", "signal"),
        ("checkpoint", "signal", "wait"),
        ("event", "instance", "payload", "request"),
    ]
    assert [c.checkpoint_id for c in later] == ["c1", "c1", "c1", "w", "w"]
    assert later[-1].status is Status.COMPLETED


async def test_watching_an_ended_instance_shows_its_end_alone(url: str) -> None:
    async with runtime(url) as rt:
        async with rt.register("a") as inst:
            await inst.complete()
        async with rt.watch("a") as changes:
            assert [(c.kinds, c.status) async for c in changes] == [(("snapshot",), Status.COMPLETED)]


async def test_watchers_that_come_at_any_moment_see_no_gap(url: str) -> None:
    """Ten watchers come while checkpoints are on their way; each sees all revisions after its snapshot."""
    streams: list[list[Change]] = [[] for _ in range(10)]
    async with runtime(url) as rt, rt.register("a") as inst, trio.open_nursery() as watchers:
        async with trio.open_nursery() as work:
            for number in range(100):
                work.start_soon(inst.checkpoint, f"c{number}", b"x")
                if number % 10 == 0:
                    work.start_soon(watchers.start, collect, rt, streams[number // 10])
                await trio.lowlevel.checkpoint()
        await inst.complete()
    last = max(change.revision for change in streams[0])
    for stream in streams:
        revisions = [change.revision for change in stream]
        assert revisions == list(range(revisions[0], last + 1))
        assert stream[-1].status is Status.COMPLETED


async def test_a_watcher_that_lags_is_told_and_the_others_notice_nothing(autojump_clock: object) -> None:
    quick: list[Change] = []
    total = WATCH_BUFFER + 10
    async with runtime() as rt, rt.register("a") as inst, trio.open_nursery() as nursery:
        await nursery.start(collect, rt, quick)
        async with rt.watch("a") as slow:
            snapshot = await anext(slow)
            for number in range(total):
                await inst.checkpoint(f"c{number}", b"x")
            held = [await anext(slow) for _ in range(WATCH_BUFFER)]
            assert [c.revision for c in held] == [
                snapshot.revision + 1 + number for number in range(WATCH_BUFFER)
            ]
            with pytest.raises(runtara.WatchLagged):
                await anext(slow)
        await inst.complete()
    assert len(quick) == 1 + total + 1


async def test_nothing_is_announced_before_it_is_on_disk(autojump_clock: object) -> None:
    async with scripted_runtime() as (rt, store), rt.register("a") as inst:  # noqa: SIM117
        async with rt.watch("a") as changes, trio.open_nursery() as nursery:
            await anext(changes)
            gate = store.hold()
            nursery.start_soon(inst.checkpoint, "c", b"x")
            with trio.move_on_after(1):
                raise AssertionError(f"announced {await anext(changes)}")
            gate.set()
            assert (await anext(changes)).checkpoint_id == "c"


async def test_a_watcher_that_leaves_early_leaves_nothing_behind(autojump_clock: object) -> None:
    async with runtime() as rt:
        async with rt.register("a"):
            pass
        for _ in range(3):
            async with rt.watch("a") as changes:
                async for _change in changes:
                    break
        await trio.sleep(61)
        assert rt.statistics().instances.live == 0


# ---------------------------------------------------------------- result


async def test_result_waits_for_the_end(url: str) -> None:
    answers: list[bytes | None] = []
    async with runtime(url) as rt, rt.register("a") as inst, trio.open_nursery() as nursery:

        async def wait() -> None:
            answers.append(await rt.result("a"))

        for _ in range(5):
            nursery.start_soon(wait)
        await inst.checkpoint("c", b"1")
        assert answers == []
        await inst.complete(b"out")
    assert answers == [b"out"] * 5


@pytest.mark.parametrize("end", ["fail", "cancel", "terminate"])
async def test_result_of_an_instance_that_did_not_complete_raises_how_it_ended(url: str, end: str) -> None:
    async with runtime(url) as rt:
        async with rt.register("a") as inst:
            if end == "fail":
                await inst.fail("broken")
            elif end == "terminate":
                await rt.terminate("a", "broken")
            else:
                await rt.send_signal("a", "cancel", b"broken")
                await inst.ack(await anext(inst.signals()))
        with pytest.raises(runtara.InstanceFailed) as caught:
            await rt.result("a")
        status, reason = ("failed", "application_error") if end == "fail" else ("cancelled", "cancelled")
        assert caught.value.details == {"status": status, "reason": reason, "error": "broken"}


async def test_200_cancelled_waiters_leave_nothing_behind(autojump_clock: object) -> None:
    async with runtime() as rt:
        async with rt.register("a") as inst:
            async with trio.open_nursery() as nursery:
                for _ in range(200):
                    nursery.start_soon(rt.result, "a")
                await trio.testing.wait_all_tasks_blocked()
                assert len(entry_of(rt, "a").watchers or ()) == 200
                nursery.cancel_scope.cancel()
            assert entry_of(rt, "a").watchers is None
            assert (await inst.checkpoint("c", b"1")).state == b"1"
        await trio.sleep(61)
        assert rt.statistics().instances.live == 0


async def test_a_waiter_outlives_the_rest_of_its_instance(autojump_clock: object) -> None:
    """A watched instance may stay in memory, and the wait ends when it does."""
    async with runtime() as rt, trio.open_nursery() as nursery:
        async with rt.register("a"):
            pass
        answers: list[bytes | None] = []

        async def wait() -> None:
            answers.append(await rt.result("a"))

        nursery.start_soon(wait)
        await trio.sleep(1000)
        async with rt.register("a") as inst:
            await inst.complete(b"late")
        await trio.testing.wait_all_tasks_blocked()
        assert answers == [b"late"]


async def test_waiters_watchers_and_iterators_end_with_the_runtime(url: str) -> None:
    """Those who are not in the body of the runtime must not wait for ever."""
    ended: Counter[str] = Counter()
    async with trio.open_nursery() as nursery:
        async with runtime(url, drain_seconds=0.01) as rt:
            registered: trio.Event = trio.Event()

            async def session() -> None:
                async with rt.register("a") as inst:
                    nursery.start_soon(iterate, inst)
                    registered.set()
                    await trio.sleep_forever()

            async def iterate(inst: Instance) -> None:
                assert [s.type async for s in inst.signals()] == [runtara.SignalType.SHUTDOWN]
                ended["iterator"] += 1

            async def wait() -> None:
                with pytest.raises(runtara.RuntimeClosed):
                    await rt.result("a")
                ended["waiter"] += 1

            async def watch() -> None:
                async with rt.watch("a") as changes:
                    with pytest.raises(runtara.RuntimeClosed):
                        async for _ in changes:
                            pass
                ended["watcher"] += 1

            nursery.start_soon(session)
            await registered.wait()
            nursery.start_soon(wait)
            nursery.start_soon(watch)
            while len(entry_of(rt, "a").watchers or ()) < 2:
                await trio.lowlevel.checkpoint()
        while ended.total() < 3:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert ended == {"iterator": 1, "waiter": 1, "watcher": 1}
