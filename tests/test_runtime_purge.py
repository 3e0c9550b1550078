"""Purging: all of an instance goes, nothing of what lives, and nothing late comes back."""

import datetime
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import runtara
from runtara import Instance, Reason, Runtime, Status
from runtara.actors.retention import FIRST_SECONDS
from runtara.messages import ExitReport
from runtara.persistence.store import Purged
from runtara.retention import FIRST_RECORDS
from tests.runtimes import (
    STORES,
    StepCounter,
    at_every_await,
    cancelled_at,
    entry_of,
    runtime,
    scripted_runtime,
    url_of,
    url_on,
)

ALL = ("completed", "failed", "cancelled")


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_on(request.param, tmp_path)


async def rows_of(rt: Runtime) -> dict[str, int]:
    """How many rows each table holds; those without any are left out."""
    return {table: count for table, count in (await rt.system.store.growth()).rows.items() if count}


async def live_fully(rt: Runtime, instance_id: str) -> Instance:
    """A life that leaves a row in every table, and a failure at its end."""
    await rt.send_custom_signal(instance_id, "k", b"p", idempotency_key="once", store_if_unknown=True)
    undo = runtara.CompensationSpec(step_id="undo", data=b"d")
    async with rt.register(instance_id) as inst:
        await inst.checkpoint("c", b"state", compensation=undo)
        await inst.wait_signal("k", checkpoint_id="w")
        await inst.emit("step_debug_start", b'{"step_id": "s"}')
        await inst.record_retry("c", 1, error="again")
        await inst.record_error("E", "message")
        await inst.fail("out of stock")
        attempt = await inst.compensation.start("c")
        await inst.compensation.finish("c", attempt, success=True)
    assert (await rt.get(instance_id)).status is Status.FAILED
    return inst


async def finish(rt: Runtime, instance_id: str, status: str = "completed") -> None:
    async with rt.register(instance_id) as inst:
        await inst.checkpoint("c", b"x")
        if status == "completed":
            await inst.complete(b"out")
        elif status == "failed":
            await inst.fail("why")
    if status == "cancelled":
        await rt.send_signal(instance_id, "cancel")


async def ids_in(rt: Runtime) -> set[str]:
    return {record.instance_id for record in (await rt.list_instances(limit=1000)).items}


# ---------------------------------------------------------------- one instance


async def test_a_purged_instance_is_gone_with_all_its_history(url: str) -> None:
    async with runtime(url) as rt:
        await finish(rt, "other")
        before = await rows_of(rt)
        await live_fully(rt, "a")
        assert set(await rows_of(rt)) | {"steps"} == set((await rt.system.store.growth()).rows)
        await rt.purge("a")
        assert await rows_of(rt) == before
        assert await rt.system.store.sweep(1) is False
        assert (await rt.status("a")).status is Status.UNKNOWN
        with pytest.raises(runtara.InstanceNotFound):
            await rt.list_events("a")
        assert await ids_in(rt) == {"other"}
        assert (await rt.result("other")) == b"out"


async def test_the_id_of_a_purged_instance_starts_clean(url: str) -> None:
    async with runtime(url) as rt:
        old = await live_fully(rt, "a")
        await rt.purge("a")
        again = await rt.send_custom_signal(
            "a", "k", b"another body", idempotency_key="once", store_if_unknown=True
        )
        assert again.status is Status.PENDING
        async with rt.register("a", workflow="another") as inst:
            assert inst.registered.created is False
            assert inst.registered.epoch > old.epoch
            assert (inst.registered.attempt, inst.registered.checkpoint_id) == (1, None)
            assert [signal.payload for signal in inst.registered.signals] == [b"another body"]
            assert (await inst.checkpoint("c", b"new")).found is False
            assert (await inst.wait_signal("k", checkpoint_id="w")).payload == b"another body"
            await inst.complete(b"second")
        assert await rt.result("a") == b"second"
        assert await rt.count_records("a", runtara.ErrorRecord) == 0


@pytest.mark.parametrize("status", ALL)
async def test_every_way_to_end_may_be_purged(autojump_clock: MockClock, status: str) -> None:
    async with runtime() as rt:
        await finish(rt, "a", status)
        assert (await rt.get("a")).status.word == status
        await rt.purge("a")
        assert await rows_of(rt) == {}


async def test_what_is_unknown_cannot_be_purged_and_leaves_nothing_behind(url: str) -> None:
    async with runtime(url) as rt:
        await finish(rt, "a")
        with pytest.raises(runtara.InstanceNotFound) as caught:
            await rt.purge("b")
        assert caught.value.details == {"instance_id": "b"}
        await rt.purge("a")
        with pytest.raises(runtara.InstanceNotFound):
            await rt.purge("a")
        with pytest.raises(runtara.ValidationError, match=r"^instance_id: "):
            await rt.purge("")
        with pytest.raises(runtara.InstanceNotFound):
            await rt.for_tenant("other").purge("a")
        assert await rows_of(rt) == {}
        assert rt.system.directory.held == {}


async def test_what_lives_is_refused_and_does_not_notice(autojump_clock: MockClock) -> None:
    async with runtime() as rt, rt.register("running") as inst, trio.open_nursery() as nursery:
        await rt.send_custom_signal("pending", "k", store_if_unknown=True)
        async with rt.register("suspended") as other:
            await other.suspend(seconds=1000, checkpoint_id="nap")
        naps: list[runtara.WaitReply] = []

        async def nap() -> None:
            naps.append(await inst.sleep(100, checkpoint_id="nap"))

        nursery.start_soon(nap)
        await wait_all_tasks_blocked()
        actor, before = entry_of(rt, "running").actor, await rows_of(rt)
        for name in ("running", "pending", "suspended"):
            with pytest.raises(runtara.InvalidInstanceState) as caught:
                await rt.purge(name)
            assert caught.value.details == {"expected": "completed or failed or cancelled", "actual": name}
        assert entry_of(rt, "running").actor is actor
        assert await rows_of(rt) == before
        await trio.sleep(101)
        assert [reply.outcome for reply in naps] == [runtara.WaitOutcome.ELAPSED]


async def test_tenants_are_walls_for_a_purge(url: str) -> None:
    async with runtime(url) as rt:
        acme = rt.for_tenant("acme")
        await finish(rt, "a")
        await finish(acme, "a")
        before = await rows_of(acme)
        await rt.purge("a")
        assert await acme.result("a") == b"out"
        assert await rows_of(rt) == {table: count // 2 for table, count in before.items()}


async def test_an_instance_that_rested_too_often_is_well_again_after_its_purge(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with runtime() as rt:
        await finish(rt, "a")

        def bug(*_: object) -> None:
            raise ZeroDivisionError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr("runtara.actors.instance.decide", bug)
            with pytest.raises(runtara.Quarantined):
                await rt.status("a")
        with pytest.raises(runtara.Quarantined):
            await rt.status("a")
        await rt.purge("a")
        async with rt.register("a") as inst:
            assert inst.registered.created


# ---------------------------------------------------------------- what comes late


async def late_calls(rt: Runtime, old: Instance) -> list[type[BaseException]]:
    """What the session of a former life hears, whatever it says."""
    port = rt.port("a")
    report = ExitReport(epoch=old.epoch, reason=Reason.CRASHED, stderr=b"late")
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: old.checkpoint("late", b"x"),
        lambda: old.emit("late"),
        lambda: old.complete(b"late"),
        lambda: old.ack("cancel"),
        lambda: old.record_error("E", "late"),
        lambda: old.sleep(1, checkpoint_id="late"),
        lambda: port.request(report),
        lambda: port.request(runtara.messages.SessionLost(epoch=old.epoch, crashed=True)),
    ]
    heard: list[type[BaseException]] = []
    for call in calls:
        with pytest.raises(runtara.RuntaraError) as caught:
            await call()
        heard.append(type(caught.value))
    return heard


async def test_whatever_comes_late_is_refused_and_leaves_no_row(autojump_clock: MockClock) -> None:
    async with runtime() as rt:
        async with rt.register("a") as old:
            await old.complete()
            await rt.purge("a")
            assert set(await late_calls(rt, old)) == {runtara.InstanceNotFound}
            rt.link.end_session("a", old.epoch, crashed=True, told=False)
        await trio.sleep(3)
        assert await rows_of(rt) == {}
        assert rt.system.left == {}


async def test_whatever_comes_late_does_not_touch_the_next_life(autojump_clock: MockClock) -> None:
    async with runtime() as rt:
        async with rt.register("a") as old:
            await old.complete()
        await rt.purge("a")
        async with rt.register("a") as inst:
            before = await rows_of(rt)
            assert set(await late_calls(rt, old)) == {runtara.StaleEpoch}
            rt.link.end_session("a", old.epoch, crashed=True, told=False)
            await trio.sleep(3)
            assert await rows_of(rt) == before
            view = await inst.status()
            assert (view.status, view.connected, view.record.attempt) == (Status.RUNNING, True, 1)


async def test_a_change_that_is_on_its_way_is_written_before_the_purge_and_goes_with_it(
    autojump_clock: MockClock,
) -> None:
    async with scripted_runtime() as (rt, store):
        async with rt.register("a") as inst:
            await inst.complete()
        gate = store.hold()
        answers: list[object] = []

        async def emit() -> None:
            answers.append((await inst.emit("after the end")).applied)

        async def delete() -> None:
            await rt.purge("a")
            answers.append("purged")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(emit)
            await wait_all_tasks_blocked()
            nursery.start_soon(delete)
            await trio.sleep(5)
            assert answers == []
            gate.set()
        assert answers == [True, "purged"]
        assert await rows_of(rt) == {}
        assert rt.statistics().writer.failed_units == 0


# ---------------------------------------------------------------- at the same time


async def outcome_of(call: Callable[[], Awaitable[object]]) -> object:
    try:
        await call()
    except runtara.RuntaraError as error:
        return type(error)
    return "done"


async def together(
    step: int, first: Callable[[], Awaitable[object]], second: Callable[[], Awaitable[object]]
) -> tuple[object, object]:
    """Call ``first``, and ``second`` when all tasks have run for so many steps; what became of the two."""
    outcomes: dict[int, object] = {}
    begin = trio.Event()

    async def call_first() -> None:
        outcomes[1] = await outcome_of(first)
        begin.set()

    async def call_second() -> None:
        await begin.wait()
        outcomes[2] = await outcome_of(second)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call_second)
        await wait_all_tasks_blocked()
        counter = StepCounter(step, begin.set)
        trio.lowlevel.add_instrument(counter)
        try:
            await call_first()
        finally:
            trio.lowlevel.remove_instrument(counter)
    return outcomes[1], outcomes[2]


@pytest.mark.parametrize("order", ["ending first", "purge first"])
@pytest.mark.parametrize("way", ["cancel", "terminate"])
async def test_an_ending_and_a_purge_at_once_happen_in_order_or_the_purge_is_refused(
    autojump_clock: MockClock, way: str, order: str
) -> None:
    seen: set[object] = set()
    async with runtime() as rt:
        for step in range(1, 25):
            name = f"i{step}"
            async with rt.register(name):
                pass
            end = partial(rt.send_signal, name, "cancel") if way == "cancel" else partial(rt.terminate, name)
            calls = (end, partial(rt.purge, name))
            if order == "ending first":
                ended, purged = await together(step, *calls)
            else:
                purged, ended = await together(step, *reversed(calls))
            status = (await rt.status(name)).status
            assert ended == "done"
            if purged == "done":
                assert status is Status.UNKNOWN
            else:
                assert purged is runtara.InvalidInstanceState
                assert status is Status.CANCELLED
                await rt.purge(name)
            seen.add(purged)
        assert ("done" if order == "ending first" else runtara.InvalidInstanceState) in seen
        assert await rows_of(rt) == {}


@pytest.mark.parametrize("order", ["registration first", "purge first"])
async def test_a_registration_and_a_purge_at_once_find_the_old_instance_or_make_a_new_one(
    autojump_clock: MockClock, order: str
) -> None:
    seen: set[object] = set()
    async with runtime() as rt:
        for step in range(1, 30):
            name = f"i{step}"
            await finish(rt, name)

            async def register(name: str = name) -> None:
                async with rt.register(name) as inst:
                    assert inst.registered.created
                    assert (await inst.get_checkpoint("c")).found is False
                    await inst.checkpoint("new", b"x")

            calls: list[Callable[[], Awaitable[object]]] = [register, partial(rt.purge, name)]
            if order == "registration first":
                registered, purged = await together(step, *calls)
            else:
                purged, registered = await together(step, *reversed(calls))
            assert purged == "done"
            assert registered in ("done", runtara.AlreadyFinished)
            wanted = Status.SUSPENDED if registered == "done" else Status.UNKNOWN
            assert (await rt.status(name)).status is wanted
            seen.add(registered)
        assert (runtara.AlreadyFinished if order == "registration first" else "done") in seen


async def test_many_purges_of_one_instance_at_once_are_one(autojump_clock: MockClock) -> None:
    async with runtime() as rt:
        await finish(rt, "a")
        outcomes: list[object] = []

        async def delete() -> None:
            outcomes.append(await outcome_of(partial(rt.purge, "a")))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(delete)
        assert sorted(map(str, outcomes)) == sorted(map(str, ["done", *[runtara.InstanceNotFound] * 4]))
        assert await rows_of(rt) == {}


@pytest.mark.parametrize("any_task", [False, True])
async def test_a_purge_that_is_cancelled_at_any_await_happened_or_did_not(
    autojump_clock: MockClock, any_task: bool
) -> None:
    async with runtime() as rt:
        await live_fully(rt, "whole")
        whole = await rows_of(rt)
        await rt.purge("whole")
        ends: list[bool] = []

        async def attempt(step: int) -> None:
            name = f"i{step}"
            with trio.CancelScope(shield=True):
                await live_fully(rt, name)
            try:
                await rt.purge(name)
            finally:
                with trio.CancelScope(shield=True):
                    assert rt.system.directory.held == {}
                    gone = (await rt.status(name)).status is Status.UNKNOWN
                    ends.append(gone)
                    assert await rows_of(rt) == ({} if gone else whole)
                    if not gone:
                        await rt.purge(name)

        if any_task:
            for step in range(1, 60):
                await cancelled_at(step, partial(attempt, step), any_task=True)
        else:
            assert await at_every_await(attempt) > 3
        assert set(ends) == {False, True}


# ---------------------------------------------------------------- who is attached


async def test_whoever_waits_for_the_result_of_what_is_purged_never_waits_for_ever(
    autojump_clock: MockClock,
) -> None:
    """The purge comes so soon that some have not read the output; those hear that it is gone."""
    heard: set[object] = set()
    async with runtime() as rt:
        for moment in range(12):
            name = f"i{moment}"
            results: list[object] = []

            async def wait(name: str, results: list[object]) -> None:
                try:
                    results.append(await rt.result(name))
                except runtara.InstanceNotFound as error:
                    results.append(type(error))

            async with trio.open_nursery() as nursery, rt.register(name) as inst:
                for _ in range(5):
                    nursery.start_soon(wait, name, results)
                await wait_all_tasks_blocked()
                await inst.complete(b"out")
                for _ in range(moment):
                    await trio.lowlevel.checkpoint()
                await rt.purge(name)
            assert len(results) == 5
            heard.update(results)
    assert heard == {b"out", runtara.InstanceNotFound}


async def test_a_watcher_of_a_purged_instance_sees_its_end_and_no_more(autojump_clock: MockClock) -> None:
    async with runtime() as rt, trio.open_nursery() as nursery:
        seen: list[Status] = []

        async def watch(*, task_status: trio.TaskStatus[None]) -> None:
            async with rt.watch("a") as changes:
                task_status.started()
                await trio.sleep(10)  # so that all changes wait for it, those of the next life as well
                async for change in changes:
                    seen.append(change.status)

        async with rt.register("a") as inst:
            await nursery.start(watch)
            await inst.complete()
        await rt.purge("a")
        async with rt.register("a") as inst:
            await inst.checkpoint("c", b"x")
        await trio.sleep(20)
        assert seen == [Status.RUNNING, Status.COMPLETED]
        assert entry_of(rt, "a").watchers is None


async def test_whoever_missed_the_end_hears_of_the_purge(autojump_clock: MockClock) -> None:
    """The writer is lost after the commit of the end, before it tells; the purge comes at once."""
    async with scripted_runtime() as (rt, store), trio.open_nursery() as nursery:
        heard: list[object] = []
        missed: list[bool] = []

        async def watch(*, task_status: trio.TaskStatus[None]) -> None:
            async with rt.watch("a") as changes:
                task_status.started()
                try:
                    async for change in changes:
                        heard.append(change.status)
                except runtara.InstanceNotFound as error:
                    heard.append(type(error))

        async def hold_session() -> None:
            async with rt.register("a") as inst:
                await nursery.start(watch)
                nursery.start_soon(listen, inst)
                store.after_commit = [runtara.OutcomeUnknown("lost")]
                store.settling = [runtara.StoreUnavailable("away")]
                with pytest.raises(runtara.InstanceNotFound):
                    await inst.complete(b"out")

        async def listen(inst: Instance) -> None:
            with pytest.raises(runtara.InstanceNotFound):
                async for _ in inst.signals():
                    raise AssertionError("there is no signal")
            missed.append(True)

        nursery.start_soon(hold_session)
        await wait_all_tasks_blocked()
        rt.system.supervisor.kill("writer")
        await rt.purge("a")
        await trio.sleep(10)
        assert heard == [Status.RUNNING, runtara.InstanceNotFound]
        assert missed == [True]
        assert await rows_of(rt) == {}
        assert rt.statistics().instances.sessions == 0


async def test_a_result_is_never_that_of_another_instance_with_the_id(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instance is purged, and its id registered anew, between its end and the look at its output."""
    async with runtime() as rt, trio.open_nursery() as nursery:
        await finish(rt, "a")
        get = rt.get
        looks = 0

        async def look(instance_id: str) -> runtara.InstanceView:
            nonlocal looks
            looks += 1
            if looks == 2:
                await rt.purge("a")
                await nursery.start(stay, rt)
            return await get(instance_id)

        monkeypatch.setattr(rt, "get", look)
        with pytest.raises(runtara.InstanceNotFound):
            await rt.result("a")
        nursery.cancel_scope.cancel()


async def stay(rt: Runtime, *, task_status: trio.TaskStatus[None]) -> None:
    async with rt.register("a"):
        task_status.started()
        await trio.sleep_forever()


# ---------------------------------------------------------------- many at once


async def test_a_purge_of_many_goes_by_finish_and_status_and_leaves_what_lives(
    autojump_clock: MockClock,
) -> None:
    async with runtime(idle_seconds=1) as rt:
        async with rt.register("long") as inst:
            await trio.sleep(1000)
            for name, status in (("c1", "completed"), ("f1", "failed"), ("x1", "cancelled")):
                await finish(rt, name, status)
            await trio.sleep(1000)
            middle = rt.system.clock.now_us()
            await inst.complete()  # created first, and ended last
        for name, status in (("c2", "completed"), ("f2", "failed")):
            await finish(rt, name, status)
        async with rt.register("alive"):
            pass
        assert await rt.purge_finished(middle, statuses=["failed"]) == 1
        assert await ids_in(rt) == {"long", "c1", "x1", "c2", "f2", "alive"}
        assert await rt.purge_finished(middle) == 2
        assert await ids_in(rt) == {"long", "c2", "f2", "alive"}
        assert await rt.purge_finished(middle) == 0
        later = datetime.datetime.fromtimestamp(
            rt.system.clock.now_us() / 1e6 + 1, tz=datetime.timezone(datetime.timedelta(hours=5))
        )
        assert await rt.purge_finished(later, statuses={Status.COMPLETED}, limit=1) == 1
        assert await ids_in(rt) == {"c2", "f2", "alive"}
        assert await rt.purge_finished(later, limit=1) == 1
        assert await ids_in(rt) == {"f2", "alive"}
        assert await rt.for_tenant("other").purge_finished(later) == 0
        assert await rt.purge_finished(later, limit=100) == 1
        assert await ids_in(rt) == {"alive"}


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("before", {"before": datetime.datetime(2026, 1, 1)}),
        ("before", {"before": "2026-01-01"}),
        ("before", {"before": 1.5}),
        ("before", {"before": 2**63}),
        ("statuses", {"statuses": [Status.RUNNING]}),
        ("statuses", {"statuses": ["completed", "pending"]}),
        ("statuses", {"statuses": ["done"]}),
        ("limit", {"limit": 0}),
        ("limit", {"limit": True}),
        ("limit", {"limit": 1.0}),
    ],
)
async def test_an_ill_formed_purge_of_many_is_refused_by_its_field(
    autojump_clock: MockClock, field: str, arguments: dict[str, Any]
) -> None:
    async with runtime() as rt:
        await finish(rt, "a")
        with pytest.raises(runtara.ValidationError) as caught:
            await rt.purge_finished(**({"before": 2**62} | arguments))
        assert caught.value.field == field
        assert await ids_in(rt) == {"a"}


async def test_a_purge_of_many_beside_many_that_work_leaves_those_untouched(tmp_path: Path) -> None:
    async with runtime(url_of(tmp_path / "a.db"), synchronous="OFF") as rt:

        async def fill(numbers: range) -> None:
            for number in numbers:
                async with rt.register(f"old{number}") as inst:
                    await inst.complete(b"out")

        async with trio.open_nursery() as nursery:
            for first in range(50):
                nursery.start_soon(fill, range(first, 2000, 50))
        over = False
        saved: dict[str, int] = {}

        async def work(name: str) -> None:
            async with rt.register(name) as inst:
                number = 0
                while not over or number < 20:
                    assert (await inst.checkpoint(f"c{number}", b"x")).found is False
                    number += 1
                saved[name] = number

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(work, f"live{number}")
            assert await rt.purge_finished(2**62) == 2000
            over = True
        assert await ids_in(rt) == set(saved)
        for name, count in saved.items():
            assert await rt.count_records(name, runtara.CheckpointRecord) == count
        rows = await rows_of(rt)
        assert (rows["instances"], rows["checkpoints"]) == (20, sum(saved.values()))
        statistics = rt.statistics()
        assert (statistics.writer.failed_units, statistics.instances.failures) == (0, 0)
        assert await rt.system.store.sweep(1) is False


# ---------------------------------------------------------------- faults


async def long_life(rt: Runtime, instance_id: str) -> None:
    """More history than a batch deletes."""
    async with rt.register(instance_id) as inst:
        async with trio.open_nursery() as nursery:
            for number in range(3 * FIRST_RECORDS):
                nursery.start_soon(inst.checkpoint, f"c{number}", b"x")
        await inst.complete(b"out")


async def test_a_long_history_goes_in_several_batches_before_the_purge_returns(url: str) -> None:
    async with runtime(url) as rt:
        await long_life(rt, "a")
        await rt.purge("a")
        assert await rows_of(rt) == {}
        await long_life(rt, "b")
        assert await rt.purge_finished(2**62) == 1
        assert await rows_of(rt) == {}


async def test_a_crash_between_a_purge_and_its_sweep_is_made_good_by_the_next_runtime(
    autojump_clock: MockClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_of(tmp_path / "a.db")
    async with runtime(url) as rt:
        await long_life(rt, "a")

        async def lost(most: int) -> bool:
            raise runtara.StoreUnavailable("the program died here")

        with monkeypatch.context() as patch, pytest.raises(runtara.StoreUnavailable):
            patch.setattr(type(rt.system.store), "sweep", staticmethod(lost))
            await rt.purge("a")
    async with runtime(url) as rt:
        left = await rows_of(rt)
        assert left["checkpoints"] >= FIRST_RECORDS
        assert "instances" not in left
        async with rt.register("a") as inst:
            assert inst.registered.created
            assert (await inst.checkpoint("c1", b"new")).found is False
        await trio.sleep(FIRST_SECONDS + 1)
        assert (await rt.get_checkpoint("a", "c1")).state == b"new"
        assert (await rows_of(rt))["checkpoints"] == 1
        assert await rt.system.store.sweep(1) is False


@pytest.mark.parametrize(
    "error", [runtara.StoreUnavailable("away"), runtara.StoreFull("full"), runtara.StoreRefused("no")]
)
async def test_a_purge_that_fails_leaves_the_instance_as_it_was(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, error: runtara.StoreError
) -> None:
    async with runtime() as rt:
        await finish(rt, "a")
        before = await rows_of(rt)

        async def away(rows: tuple[int, ...], most: int) -> Purged:
            raise error

        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(type(rt.system.store), "purge", staticmethod(away))
            await rt.purge("a")
        assert await rows_of(rt) == before
        assert await rt.result("a") == b"out"
        await rt.purge("a")
        assert await rows_of(rt) == {}


async def test_damage_that_a_purge_finds_stops_the_runtime(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[type[BaseException]] = []
    with pytest.raises(runtara.StoreFailed, match=r"^an I/O error$"):
        async with runtime() as rt:
            await finish(rt, "a")

            async def broken(rows: tuple[int, ...], most: int) -> Purged:
                raise runtara.StoreFailed("an I/O error")

            monkeypatch.setattr(type(rt.system.store), "purge", staticmethod(broken))
            try:
                await rt.purge("a")
            except runtara.StoreFailed as error:
                heard.append(type(error))
            await trio.sleep_forever()
    assert heard == [runtara.StoreFailed]


async def test_a_purge_keeps_the_house_of_a_store_that_nobody_else_writes(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is written moves the log into the file, and in an idle runtime that is the purge."""
    async with runtime(url) as rt:
        for name in ("a", "b"):
            async with rt.register(name) as inst:
                await inst.complete()
        kept = 0
        kind = type(rt.system.store)
        maintain = kind.maintain

        async def counted(store: Any) -> None:
            nonlocal kept
            kept += 1
            await maintain(store)

        monkeypatch.setattr(kind, "maintain", counted)
        await rt.purge("a")
        assert kept == 1
        assert await rt.purge_finished(datetime.datetime.now(datetime.UTC)) == 1
        assert kept == 2
