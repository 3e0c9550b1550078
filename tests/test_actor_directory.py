"""The directory: lives of actors, faults, quarantine and rest."""

import logging
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import runtara
from runtara import Instance, Reason, Runtime, Status
from runtara.actors.directory import QUARANTINE_SECONDS
from runtara.instance import Inbox
from runtara.machine import decide
from tests.runtimes import entry_of, runtime, scripted_runtime


class Bug:
    """A machine with a bug: it fails on checkpoints whose name begins with "bad"."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hits = 0
        monkeypatch.setattr("runtara.actors.instance.decide", self)

    def __call__(self, state: Any, message: Any, *others: Any) -> Any:
        if str(getattr(message, "checkpoint_id", "")).startswith("bad"):
            self.hits += 1
            raise ZeroDivisionError("a bug")
        return decide(state, message, *others)


# ---------------------------------------------------------------- bugs


async def test_a_bug_is_logged_with_the_instance_and_fails_that_request_alone(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bug = Bug(monkeypatch)
    async with runtime() as rt, rt.register("a") as inst, rt.register("b") as other:
        answers: dict[str, object] = {}

        async def call(inst: Instance, name: str) -> None:
            try:
                answers[name] = await inst.checkpoint(name, b"x")
            except runtara.RuntaraError as error:
                answers[name] = error

        with trio.move_on_after(0.01):
            async with trio.open_nursery() as nursery:
                for name in ("c1", "bad", "c2"):
                    nursery.start_soon(call, inst, name)
                    nursery.start_soon(call, other, f"{name[::-1]}")
        assert {n for n, a in answers.items() if isinstance(a, runtara.CheckpointReply)} == {
            "c1",
            "c2",
            "1c",
            "2c",
            "dab",
        }
        assert bug.hits >= 1
        assert rt.statistics().instances.failures == bug.hits
        assert (await inst.checkpoint("c3", b"x")).found is False
    failures = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert failures
    assert all(record.getMessage() == "instance default/a: its actor failed" for record in failures)
    assert all(record.exc_info and record.exc_info[0] is ZeroDivisionError for record in failures)


async def test_too_many_failures_rest_the_instance_alone_and_it_comes_back(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = Bug(monkeypatch)
    async with runtime() as rt, rt.register("a") as inst, rt.register("b") as other:
        start = trio.current_time()
        with pytest.raises(runtara.Quarantined) as caught:
            await inst.checkpoint("bad", b"x")
        assert caught.value.retryable
        assert bug.hits == 4
        for call in (inst.heartbeat, inst.status, lambda: rt.get_checkpoint("a", "c")):
            with pytest.raises(runtara.Quarantined) as resting:
                await call()
            assert resting.value.retry_after_seconds == pytest.approx(
                QUARANTINE_SECONDS - (trio.current_time() - start), abs=1
            )
        assert (await other.checkpoint("c", b"x")).found is False
        await trio.sleep(QUARANTINE_SECONDS)
        assert (await inst.checkpoint("c", b"x")).found is False
        assert rt.statistics().instances.sessions == 2


async def test_a_rested_instance_is_forgotten_in_the_end(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    Bug(monkeypatch)
    async with runtime(idle_seconds=1) as rt:
        async with rt.register("a") as inst:
            await inst.checkpoint("c", b"x")
        with pytest.raises(runtara.Quarantined):
            await rt.get_checkpoint("a", "bad")
        await trio.sleep(5)
        assert rt.statistics().instances.live == 1
        await trio.sleep(10)
        assert rt.statistics().instances.live == 0


async def test_a_failure_now_and_then_never_rests_an_instance(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with runtime() as rt, rt.register("a") as inst:
        for number in range(20):
            with monkeypatch.context() as patch:
                patch.setattr("runtara.actors.instance.decide", fail_once(decide))
                assert (await inst.checkpoint(f"c{number}", b"x")).found is False
            await trio.sleep(2)
        assert rt.statistics().instances.failures == 20


def fail_once(real: Any) -> Any:
    left = [1]

    def call(*arguments: Any) -> Any:
        if left:
            left.pop()
            raise ZeroDivisionError("a bug")
        return real(*arguments)

    return call


# ---------------------------------------------------------------- kills


async def test_a_parked_sleep_and_a_parked_wait_survive_their_actor(autojump_clock: MockClock) -> None:
    async with runtime() as rt, rt.register("a") as inst, trio.open_nursery() as nursery:
        start = trio.current_time()
        ended: dict[str, float] = {}

        async def sleep(name: str | None) -> None:
            assert (await inst.sleep(100, checkpoint_id=name)).interrupted is False
            ended[f"sleep {name}"] = trio.current_time() - start

        async def wait() -> None:
            assert (await inst.wait_signal("k", checkpoint_id="w", timeout=1000)).payload == b"p"
            ended["wait"] = trio.current_time() - start

        nursery.start_soon(sleep, "nap")
        nursery.start_soon(sleep, None)
        nursery.start_soon(wait)
        for _ in range(10):
            await trio.sleep(5)
            assert rt.system.directory.kill(("default", "a"))
        await trio.sleep(25)
        await rt.send_custom_signal("a", "k", b"p")
        await wait_all_tasks_blocked()
        assert ended == {"wait": pytest.approx(75)}
        await trio.sleep(50)
        assert ended["sleep nap"] == ended["sleep None"] == pytest.approx(100)


async def test_killing_what_is_not_live_says_so(autojump_clock: MockClock) -> None:
    async with runtime() as rt:
        assert rt.system.directory.kill(("default", "a")) is False
        async with rt.register("a"):
            pass
        await trio.sleep(100)
        assert rt.system.directory.kill(("default", "a")) is False


# ---------------------------------------------------------------- rest


async def test_an_idle_instance_leaves_memory_and_comes_back(autojump_clock: MockClock) -> None:
    async with runtime(idle_seconds=30) as rt:
        async with rt.register("a") as inst:
            await inst.checkpoint("c", b"x")
            await trio.sleep(1000)
            assert rt.statistics().instances.live == 1  # it has a session
        await trio.sleep(29)
        assert rt.statistics().instances.live == 1
        await trio.sleep(2)
        assert rt.statistics().instances.live == 0
        assert (await rt.get_checkpoint("a", "c")).state == b"x"
        await trio.sleep(29)
        await rt.status("a")  # a sign of life
        await trio.sleep(29)
        assert rt.statistics().instances.live == 1
        await trio.sleep(2)
        assert rt.statistics().instances.live == 0


async def test_an_actor_with_uncommitted_units_is_not_passivated(autojump_clock: MockClock) -> None:
    async with scripted_runtime(idle_seconds=1) as (rt, store):
        async with rt.register("a"):
            pass
        gate = store.hold()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rt.send_custom_signal, "a", "k")
            await trio.sleep(100)
            actor = entry_of(rt, "a").actor
            assert actor is not None
            gate.set()
        assert entry_of(rt, "a").actor is actor
        await trio.sleep(5)
        assert rt.statistics().instances.live == 0


async def test_an_instance_whose_session_waits_is_not_passivated(autojump_clock: MockClock) -> None:
    async with runtime(idle_seconds=1) as rt, rt.register("a") as inst:
        actor = entry_of(rt, "a").actor
        await inst.sleep(1000, checkpoint_id="nap")
        assert entry_of(rt, "a").actor is actor


async def test_ten_thousand_instances_registered_and_left_leave_the_directory_empty(
    autojump_clock: MockClock,
) -> None:
    async with runtime() as rt:

        async def visit(numbers: range) -> None:
            for number in numbers:
                async with rt.register(f"i{number}"):
                    pass

        async with trio.open_nursery() as nursery:
            for first in range(200):
                nursery.start_soon(visit, range(first, 10_000, 200))
        assert rt.statistics().instances.live == 10_000
        await trio.sleep(61)
        assert rt.statistics().instances.live == 0
        assert len(rt.system.directory.idle) == 0
        assert await rt.count_instances() == 10_000


async def test_unknown_ids_leave_no_entry_behind(autojump_clock: MockClock) -> None:
    async with runtime() as rt:

        async def ask(number: int) -> None:
            with pytest.raises(runtara.InstanceNotFound):
                await rt.send_signal(f"typo-{number}", "cancel")
            assert (await rt.status(f"typo-{number}")).revision == 0

        async with trio.open_nursery() as nursery:
            for number in range(100):
                nursery.start_soon(ask, number)
        await wait_all_tasks_blocked()
        assert rt.statistics().instances.live == 0
        assert len(rt.system.directory.idle) == 0


async def test_letters_at_the_moment_of_rest_are_answered(autojump_clock: MockClock) -> None:
    """A request comes in every phase of the passivation."""
    async with runtime(idle_seconds=1) as rt:
        async with rt.register("a") as inst:
            await inst.checkpoint("c", b"x")
        for number in range(100):
            await trio.sleep(1)
            for _ in range(number % 10):
                await trio.lowlevel.checkpoint()
            assert (await rt.get_checkpoint("a", "c")).state == b"x"
        assert rt.statistics().instances.failures == 0


async def test_no_next_life_begins_while_units_of_the_last_are_on_their_way(
    autojump_clock: MockClock,
) -> None:
    """The host of all actors is lost while a unit is being written; the entry keeps the order."""
    async with scripted_runtime() as (rt, store):
        async with rt.register("a"):
            pass
        gate = store.hold()
        async with trio.open_nursery() as nursery:
            answers: list[int] = []

            async def send(rt: Runtime, payload: bytes) -> None:
                answers.append((await rt.send_custom_signal("a", "k", payload)).signal_id)

            nursery.start_soon(send, rt, b"1")
            await wait_all_tasks_blocked()
            rt.system.supervisor.kill("instances")
            await wait_all_tasks_blocked()
            nursery.start_soon(send, rt, b"2")
            await wait_all_tasks_blocked()
            assert answers == []
            gate.set()
        assert rt.statistics().writer.failed_units == 0
        assert [s.payload for s in (await rt.list_signals("a")).items] == [b"2", b"1"]


async def test_an_entry_that_comes_and_goes_in_one_moment_disturbs_nobody(autojump_clock: MockClock) -> None:
    async with runtime() as rt:
        key = (rt.tenant, "a")
        await wait_all_tasks_blocked()

        def watcher(_: object) -> None:
            raise AssertionError("nothing happens")

        rt.system.directory.watch(key, watcher)
        rt.system.directory.unwatch(key, watcher)
        assert rt.statistics().instances.live == 0
        await wait_all_tasks_blocked()
        assert [child.restarts for child in rt.system.supervisor.statistics().children] == [0] * 5


async def test_a_session_that_began_as_its_registration_was_given_up_ends_and_no_attempt_is_counted(
    autojump_clock: MockClock,
) -> None:
    """The commit came between the cancellation of the caller and the caller's next step."""
    async with runtime() as rt, rt.register("a") as inst:
        key = (rt.tenant, "a")
        rt.system.directory.abandon(key, Inbox())
        await wait_all_tasks_blocked()
        assert (await rt.status("a")).status is Status.RUNNING
        rt.system.directory.abandon(key, inst.inbox)
        await wait_all_tasks_blocked()
        view = await rt.status("a")
        assert (view.status, view.reason) == (Status.SUSPENDED, Reason.DISCONNECTED)
        assert (view.connected, view.record.attempt) == (False, 1)
        assert rt.statistics().instances.sessions == 0
