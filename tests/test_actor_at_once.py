"""A letter that finds its actor idle is handled where it was posted; everything else goes by the mailbox."""

import pytest
import trio
import trio.testing

import runtara
from runtara import Runtime
from runtara.actors.directory import Entry
from runtara.machine import sessions


def entry_of(runtime: Runtime, instance_id: str) -> Entry:
    return runtime.system.directory.entries[runtime.tenant, instance_id]


async def test_an_idle_actor_is_not_woken_for_a_letter_that_needs_no_read() -> None:
    async with runtara.open_runtime("sqlite:///:memory:") as runtime, runtime.register("a") as instance:
        await trio.testing.wait_all_tasks_blocked()
        actor = entry_of(runtime, "a").actor
        assert actor is not None
        handled = actor.handled
        reply = await instance.checkpoint("one", b"1")
        assert (reply.found, reply.state) == (False, b"1")
        assert actor.handled == handled
        reply = await instance.checkpoint("one", b"2")  # must be read: the actor's own turn
        assert (reply.found, reply.state) == (True, b"1")
        assert actor.handled == handled + 1


async def test_a_refusal_on_the_short_way_waits_for_the_commit_it_has_seen() -> None:
    async with runtara.open_runtime("sqlite:///:memory:") as runtime, runtime.register("a") as instance:
        await trio.testing.wait_all_tasks_blocked()
        order: list[str] = []

        async def complete() -> None:
            await instance.complete()
            order.append("completed")

        async def save() -> None:
            with pytest.raises(runtara.InvalidInstanceState):
                await instance.checkpoint("late", b"x")
            order.append("refused")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(complete)
            for _ in range(3):
                await trio.lowlevel.checkpoint()
            nursery.start_soon(save)
        assert order[0] == "completed"
        assert (await runtime.status("a")).status is runtara.Status.COMPLETED


async def test_letters_that_wait_are_not_overtaken() -> None:
    async with runtara.open_runtime("sqlite:///:memory:") as runtime, runtime.register("a") as instance:
        await instance.checkpoint("known", b"0")
        mailbox = entry_of(runtime, "a").mailbox
        answered: list[str] = []

        async def save(name: str) -> None:
            await instance.checkpoint(name, b"1")
            answered.append(name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(save, "known")  # must be read, so it takes the mailbox
            while mailbox.idle:
                await trio.lowlevel.checkpoint()
            nursery.start_soon(save, "new")  # needs nothing, and stays behind it all the same
        assert answered == ["known", "new"]


async def test_a_bug_in_a_rule_ends_the_actor_and_not_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    async with runtara.open_runtime("sqlite:///:memory:") as runtime, runtime.register("a") as instance:
        await trio.testing.wait_all_tasks_blocked()
        with monkeypatch.context() as patch:
            patch.setattr(sessions, "checkpoint_reply", broken)
            with pytest.raises((runtara.ActorFailed, runtara.Quarantined)):
                await instance.checkpoint("one", b"1")
        assert runtime.statistics().instances.failures >= 1


async def test_an_idle_instance_holds_no_unit() -> None:
    async with runtara.open_runtime("sqlite:///:memory:") as runtime, runtime.register("a") as instance:
        await instance.checkpoint("one", b"1" * 1000)
        activation = entry_of(runtime, "a").activation
        assert activation is not None
        assert activation.outstanding == 0
        assert activation.last is None
