"""Nothing is stuck in silence: what a runtime says of instances that nothing moves, and of itself."""

from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
import trio

import runtara
from runtara import Runtime, Status, Stuck
from runtara.clock import default_clock
from runtara.config import Settings
from runtara.persistence.store import Unit
from runtara.runtime import run_runtime
from tests.operated import make_store
from tests.postgres_server import new_schema
from tests.postgres_server import url_of as schema_url
from tests.runtimes import MEMORY, ScriptedStore, entry_of, runtime, scripted_runtime, store_of, url_of


async def stuck(rt: Runtime) -> list[tuple[Stuck, str]]:
    return [(v.stuck, v.record.instance_id) for v in await rt.violations()]


def forget_session(rt: Runtime, instance_id: str) -> None:
    """What no part of the program does: the session is dropped, and nobody tells its instance."""
    entry_of(rt, instance_id).session = None


# ---------------------------------------------------------------- running, and nobody has the session


async def test_instances_in_every_healthy_state_are_no_violations(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with runtime() as rt, rt.register("running"):
        async with rt.register("left"):
            pass
        async with rt.register("asleep") as asleep:
            await asleep.suspend(seconds=3600)
        async with rt.register("ended") as ended:
            await ended.complete()
        async with rt.register("paused") as paused:
            await rt.send_signal("paused", "pause")
            await paused.ack("pause")
        async with rt.register("waiting") as waiting:
            with trio.move_on_after(1):
                await waiting.wait_signal("paid", checkpoint_id="w")
        assert await rt.violations() == ()
        assert await rt.count_instances() == 6


@pytest.mark.parametrize("on", ["SQLite", "PostgreSQL"])
async def test_a_running_instance_whose_session_nobody_has_is_found(on: str) -> None:
    url = MEMORY if on == "SQLite" else schema_url(new_schema())
    async with runtime(url) as rt, rt.register("a") as inst, rt.register("b"):
        assert await rt.violations() == ()
        forget_session(rt, "a")
        [found] = await rt.violations()
        assert (found.stuck, found.record.instance_id) == (Stuck.NO_SESSION, "a")
        assert (found.record.status, found.record.epoch) == (Status.RUNNING, inst.epoch)
        assert await rt.for_tenant("acme").violations() == ()
        assert await rt.for_tenant("acme").all_violations() == (found,)


async def test_a_session_that_is_over_and_could_not_be_told_is_no_violation(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with scripted_runtime(store_seconds=100.0) as (rt, store), rt.register("a") as inst:
        store.away = runtara.StoreUnavailable("away")
        forget_session(rt, "a")
        rt.system.lose_later(("default", "a"), inst.epoch)
        await trio.testing.wait_all_tasks_blocked()
        assert await rt.violations() == ()
        store.away = None
        await trio.sleep(5)
        assert (await rt.status("a")).status is Status.SUSPENDED
        assert await rt.violations() == ()


@attrs.define(kw_only=True, eq=False)
class LateStore(ScriptedStore):
    """A store whose commits are known to the runtime later than to everybody else."""

    late: trio.Event | None = None
    committed: trio.Event = attrs.field(factory=trio.Event)

    async def apply(self, batch: Sequence[Unit]) -> frozenset[int]:
        left_out = await super().apply(batch)
        if self.late is not None:
            self.committed.set()
            await self.late.wait()
        return left_out


async def test_a_registration_that_is_on_its_way_is_no_violation() -> None:
    answers: list[tuple[runtara.Violation, ...]] = []
    async with (
        store_of(LateStore) as store,
        run_runtime(store, default_clock(), Settings()) as rt,
        trio.open_nursery() as nursery,
    ):
        leave = trio.Event()

        async def session() -> None:
            async with rt.register("a"):
                await leave.wait()

        async def ask() -> None:
            answers.append(await rt.violations())

        store.late = trio.Event()
        nursery.start_soon(session)
        await store.committed.wait()
        assert [due.instance_id for due in await store.running(2**60, 0, 10)] == ["a"]
        assert not rt.system.directory.sessions()
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        early = list(answers)
        store.late.set()
        store.late = None
        await trio.testing.wait_all_tasks_blocked()
        assert early == []  # it waited for what the actor has decided to be known
        assert answers == [()]
        leave.set()


async def test_what_a_dead_runtime_left_running_has_the_grace_period(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    url = url_of(tmp_path / "a.db")
    await make_store(url)
    async with runtime(url, grace_seconds=30.0) as rt:
        both = [(Stuck.NO_REASON, "default"), (Stuck.NO_REASON, "acme")]
        assert [(v.stuck, v.record.tenant_id) for v in await rt.all_violations()] == both
        assert (await rt.for_tenant("acme").get("paid")).status is Status.RUNNING
        await trio.sleep(31)
        assert (await rt.for_tenant("acme").get("paid")).status is Status.SUSPENDED
        assert [(v.stuck, v.record.tenant_id) for v in await rt.all_violations()] == both


async def test_after_the_grace_period_an_old_epoch_is_no_excuse(
    tmp_path: Path, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_of(tmp_path / "a.db")
    await make_store(url)
    async with runtime(url, tenant="acme", grace_seconds=30.0) as rt:

        async def lose_nothing(*_: object) -> None: ...

        monkeypatch.setattr(rt.system, "lose", lose_nothing)
        await trio.sleep(31)
        assert await stuck(rt) == [(Stuck.NO_REASON, "stuck"), (Stuck.NO_SESSION, "paid")]


async def test_no_more_violations_are_returned_than_were_asked_for(tmp_path: Path) -> None:
    url = url_of(tmp_path / "a.db")
    await make_store(url)
    async with runtime(url) as rt, rt.register("a"), rt.register("b"), rt.register("c"):
        for name in ("a", "b", "c"):
            forget_session(rt, name)
        every = await rt.violations()
        assert [v.record.instance_id for v in every] == ["stuck", "a", "b", "c"]
        for limit in (1, 2, 3):
            assert await rt.violations(limit=limit) == every[:limit]
        with pytest.raises(runtara.ValidationError) as caught:
            await rt.violations(limit=0)
        assert caught.value.field == "limit"


async def test_an_instance_whose_actor_cannot_answer_is_judged_by_its_row() -> None:
    async with runtime() as rt, rt.register("a"):
        forget_session(rt, "a")
        entry_of(rt, "a").quarantined_until = trio.current_time() + 100
        entry_of(rt, "a").actor = None
        assert await stuck(rt) == [(Stuck.NO_SESSION, "a")]
        entry_of(rt, "a").quarantined_until = 0.0


# ---------------------------------------------------------------- health


async def test_a_healthy_runtime_says_how_much_it_holds(tmp_path: Path) -> None:
    async with runtime(url_of(tmp_path / "a.db")) as rt:
        async with rt.register("a") as inst:
            await inst.checkpoint("c", b"1")
            health = await rt.health()
            assert health.ok
            assert (health.degraded_seconds, health.draining, health.queued) == (None, False, 0)
            assert (health.live, health.sessions) == (1, 1)
            assert health.file_bytes == (tmp_path / "a.db").stat().st_size
            assert health.log_bytes == (tmp_path / "a.db-wal").stat().st_size
        assert (await rt.health()).sessions == 0
    with pytest.raises(runtara.RuntimeClosed):
        await rt.health()


async def test_writes_that_wait_for_the_store_make_a_runtime_degraded(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with scripted_runtime() as (rt, store), rt.register("a") as inst, trio.open_nursery() as nursery:
        store.away = runtara.StoreUnavailable("away")
        nursery.start_soon(inst.checkpoint, "c", b"1")
        await trio.sleep(4)
        health = await rt.health()
        assert not health.ok
        assert health.degraded_seconds == pytest.approx(4)
        store.away = None
        await trio.sleep(2)
        assert (await rt.health()).ok


async def test_a_runtime_that_drains_says_so() -> None:
    async with runtime() as rt, trio.open_nursery() as nursery, rt.register("a") as inst:
        nursery.start_soon(rt.system.drain)
        await anext(inst.signals())
        health = await rt.health()
        assert (health.ok, health.draining) == (False, True)
        await inst.ack("shutdown")


async def test_a_store_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted_runtime() as (rt, _):

        async def no_answer(store: object) -> None:
            raise runtara.StoreUnavailable("away")

        monkeypatch.setattr(ScriptedStore, "check", no_answer, raising=False)
        with pytest.raises(runtara.StoreUnavailable):
            await rt.health()
