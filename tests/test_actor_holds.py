"""Held keys: no actor lives there, letters wait within their bound, and a fresh actor answers them."""

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import runtara
from runtara import Runtime, Status
from runtara.actors.letters import Key
from runtara.messages import GetStatus
from runtara.persistence.store import Loaded
from runtara.records import PayloadKind
from tests.runtimes import at_every_await, entry_of, runtime, scripted_runtime


def key_of(rt: Runtime, instance_id: str = "a") -> Key:
    return (rt.tenant, instance_id)


async def finish(rt: Runtime, instance_id: str) -> None:
    async with rt.register(instance_id) as inst:
        await inst.complete(b"out")


async def ask(rt: Runtime, instance_id: str, answers: list[object]) -> None:
    try:
        answers.append((await rt.status(instance_id)).status)
    except runtara.RuntaraError as error:
        answers.append(type(error))


async def test_letters_wait_while_their_key_is_held_and_are_answered_by_a_fresh_actor(
    autojump_clock: MockClock,
) -> None:
    async with scripted_runtime() as (rt, store), trio.open_nursery() as nursery:
        await finish(rt, "a")
        before = entry_of(rt, "a").actor
        answers: list[object] = []
        async with rt.system.directory.hold([key_of(rt)]):
            store.loading = [runtara.StoreUnavailable("loaded while it is held")]
            for _ in range(3):
                nursery.start_soon(ask, rt, "a", answers)
            await trio.sleep(100)
            assert answers == []
            assert entry_of(rt, "a").actor is None
            assert len(store.loading) == 1
            store.loading = []
            assert (await rt.status("b")).status is Status.UNKNOWN
        await wait_all_tasks_blocked()
        assert answers == [Status.COMPLETED] * 3
        assert entry_of(rt, "a").actor not in (before, None)


async def test_no_more_letters_wait_than_the_mailbox_holds(autojump_clock: MockClock) -> None:
    async with runtime(mailbox_messages=5) as rt, trio.open_nursery() as nursery:
        answers: list[object] = []
        async with rt.system.directory.hold([key_of(rt)]):
            for _ in range(8):
                nursery.start_soon(ask, rt, "a", answers)
            await wait_all_tasks_blocked()
            assert answers == [runtara.Overloaded] * 3
        await wait_all_tasks_blocked()
        assert answers[3:] == [Status.UNKNOWN] * 5


async def test_what_the_live_actor_has_begun_is_done_and_settled_first(autojump_clock: MockClock) -> None:
    async with scripted_runtime() as (rt, store), rt.register("a") as inst:
        gate = store.hold()
        held = trio.Event()
        replies: list[runtara.CheckpointReply] = []

        async def save() -> None:
            replies.append(await inst.checkpoint("c", b"x"))

        async def hold() -> None:
            async with rt.system.directory.hold([key_of(rt)]):
                await wait_all_tasks_blocked()
                assert len(replies) == 1
                assert (await store.load(*key_of(rt), 10)).checkpoint_id == "c"  # type: ignore[union-attr]
                held.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(save)
            await wait_all_tasks_blocked()
            nursery.start_soon(hold)
            await trio.sleep(10)
            assert not held.is_set()
            gate.set()
        assert held.is_set()
        assert (await inst.checkpoint("d", b"y")).found is False


async def test_a_request_that_the_actor_is_reading_for_is_answered_and_not_given_up(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is held while the actor waits for the store; nobody hears of a lost actor."""
    async with scripted_runtime() as (rt, store):
        await finish(rt, "a")
        reading, gate = trio.Event(), trio.Event()
        payloads = store.payloads

        async def slowly(row: int, kinds: frozenset[PayloadKind]) -> dict[PayloadKind, bytes]:
            reading.set()
            await gate.wait()
            return await payloads(row, kinds)

        monkeypatch.setattr(type(store), "payloads", staticmethod(slowly))
        views: list[runtara.InstanceView] = []

        async def look() -> None:
            view = await rt.system.request(key_of(rt), GetStatus())
            assert isinstance(view, runtara.InstanceView)
            views.append(view)

        async def hold() -> None:
            async with rt.system.directory.hold([key_of(rt)]):
                await wait_all_tasks_blocked()
                assert len(views) == 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            await reading.wait()
            nursery.start_soon(hold)
            await trio.sleep(1)
            assert rt.system.directory.held
            gate.set()
            start = trio.current_time()
        assert trio.current_time() == start
        assert [view.output for view in views] == [b"out"]


async def test_an_actor_that_is_being_loaded_goes_and_its_letters_stay(autojump_clock: MockClock) -> None:
    async with runtime(idle_seconds=1) as rt:
        await finish(rt, "a")
        await trio.sleep(10)
        assert rt.statistics().instances.live == 0
        for step in range(1, 8):
            answers: list[object] = []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, rt, "a", answers)
                for _ in range(step):
                    await trio.lowlevel.checkpoint()
                async with rt.system.directory.hold([key_of(rt)]):
                    await wait_all_tasks_blocked()
                    early = list(answers)
                    await trio.sleep(0.1)
                    assert answers == early
                    assert key_of(rt) not in rt.system.directory.entries or entry_of(rt, "a").actor is None
            assert answers == [Status.COMPLETED]
            await trio.sleep(10)


async def test_an_actor_that_was_loaded_before_its_key_was_held_answers_nothing_afterwards(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has read may be gone when the key is released."""
    async with scripted_runtime(idle_seconds=1) as (rt, store), trio.open_nursery() as nursery:
        await finish(rt, "a")
        await trio.sleep(10)
        loading, gate = trio.Event(), trio.Event()
        load = store.load

        async def slowly(tenant_id: str, instance_id: str, known: int) -> Loaded | None:
            loaded = await load(tenant_id, instance_id, known)
            loading.set()
            await gate.wait()
            return loaded

        monkeypatch.setattr(type(store), "load", staticmethod(slowly))
        answers: list[object] = []
        nursery.start_soon(ask, rt, "a", answers)
        await loading.wait()
        nursery.start_soon(open_soon, gate)
        start = trio.current_time()
        async with rt.system.directory.hold([key_of(rt)]):
            assert trio.current_time() - start == pytest.approx(0.1)
            await wait_all_tasks_blocked()
            assert answers == []
            record = await store.find(*key_of(rt))
            assert record is not None
            await store.purge([record.row], 1000)
        await wait_all_tasks_blocked()
        assert answers == [Status.UNKNOWN]


async def open_soon(gate: trio.Event) -> None:
    await trio.sleep(0.1)
    gate.set()


async def test_two_holders_of_crossing_keys_take_turns(autojump_clock: MockClock) -> None:
    async with runtime() as rt:
        start = trio.current_time()
        begun: dict[str, float] = {}

        async def hold(*ids: str) -> None:
            async with rt.system.directory.hold([key_of(rt, i) for i in ids]):
                begun["".join(ids)] = trio.current_time() - start
                await trio.sleep(1)

        async with trio.open_nursery() as nursery:
            for ids in ("ab", "ba", "bc", "d"):
                nursery.start_soon(hold, *ids)
        turns = sorted(begun[ids] for ids in ("ab", "ba", "bc"))
        assert turns == [pytest.approx(0), pytest.approx(1), pytest.approx(2)]
        assert begun["d"] == pytest.approx(0)
        assert rt.system.directory.held == {}


async def test_a_session_outlives_the_hold(autojump_clock: MockClock) -> None:
    async with runtime() as rt, rt.register("a") as inst, trio.open_nursery() as nursery:
        naps: list[bool] = []

        async def nap() -> None:
            naps.append((await inst.sleep(50, checkpoint_id="nap")).interrupted)

        start = trio.current_time()
        nursery.start_soon(nap)
        await trio.sleep(10)
        async with rt.system.directory.hold([key_of(rt)]):
            await trio.sleep(10)
        await rt.send_signal("a", "pause")
        pending = (await inst.poll_signals()).signal
        assert pending is not None
        assert pending.type is runtara.SignalType.PAUSE
        assert trio.current_time() - start == pytest.approx(20, abs=1)
    assert naps == [True]


@pytest.mark.parametrize("victim", ["instances", "writer"])
async def test_a_part_of_the_tree_that_is_lost_meanwhile_does_not_wake_what_is_held(
    autojump_clock: MockClock, victim: str
) -> None:
    async with runtime() as rt, trio.open_nursery() as nursery:
        await finish(rt, "a")
        answers: list[object] = []
        async with rt.system.directory.hold([key_of(rt)]):
            nursery.start_soon(ask, rt, "a", answers)
            await wait_all_tasks_blocked()
            rt.system.supervisor.kill(victim)
            await trio.sleep(1)
            assert entry_of(rt, "a").actor is None
            assert answers == []
        await wait_all_tasks_blocked()
        assert answers == [Status.COMPLETED]


async def test_a_holder_whose_actor_is_killed_while_it_ends_goes_on(autojump_clock: MockClock) -> None:
    async with scripted_runtime() as (rt, store), rt.register("a") as inst:
        gate = store.hold()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(inst.checkpoint, "c", b"x")
            await wait_all_tasks_blocked()

            async def hold() -> None:
                async with rt.system.directory.hold([key_of(rt)]):
                    assert (await store.load(*key_of(rt), 10)).checkpoint_id == "c"  # type: ignore[union-attr]

            nursery.start_soon(hold)
            await trio.lowlevel.checkpoint()
            rt.system.directory.kill(key_of(rt))
            rt.system.supervisor.kill("instances")
            await wait_all_tasks_blocked()
            gate.set()


async def test_a_hold_that_is_cancelled_at_any_await_leaves_no_key_held(autojump_clock: MockClock) -> None:
    async with runtime() as rt:

        async def hold(step: int) -> None:
            try:
                async with rt.system.directory.hold([key_of(rt), key_of(rt, "b")]):
                    await trio.lowlevel.checkpoint()
            finally:
                assert rt.system.directory.held == {}
                with trio.CancelScope(shield=True):
                    assert (await inst.checkpoint(f"c{step}", b"x")).found is False
                    assert (await rt.get("b")).status is Status.COMPLETED

        async with rt.register("a") as inst:
            await finish(rt, "b")
            assert await at_every_await(hold) > 3


async def test_a_key_is_not_held_while_nobody_can_tell_whether_it_is_settled(
    autojump_clock: MockClock,
) -> None:
    async with scripted_runtime(store_seconds=5) as (rt, store), rt.register("a") as inst:
        store.after_commit = [runtara.OutcomeUnknown("lost")]
        store.settling = [runtara.StoreUnavailable("away")] * 30
        with pytest.raises(runtara.OutcomeUnknown):
            await inst.checkpoint("c", b"x")
        with pytest.raises(runtara.StoreUnavailable):
            async with rt.system.directory.hold([key_of(rt)]):
                raise AssertionError("not reached")
        assert rt.system.directory.held == {}
        store.settling = []
        await trio.sleep(10)
        async with rt.system.directory.hold([key_of(rt)]):
            assert rt.system.directory.held.keys() == {key_of(rt)}
        assert (await inst.checkpoint("c", b"y")).state == b"x"


async def test_after_the_end_of_the_runtime_nothing_is_held(autojump_clock: MockClock) -> None:
    async with runtime() as rt:
        directory, key = rt.system.directory, key_of(rt)
    with pytest.raises(runtara.RuntimeClosed):
        async with directory.hold([key]):
            raise AssertionError("not reached")
    assert directory.held == {}


async def test_letters_of_a_held_key_are_answered_when_the_runtime_ends(autojump_clock: MockClock) -> None:
    answers: list[object] = []
    async with trio.open_nursery() as nursery:
        async with runtime() as rt:

            async def hold() -> None:
                async with rt.system.directory.hold([key_of(rt)]):
                    await trio.sleep_forever()

            nursery.start_soon(hold)
            await wait_all_tasks_blocked()
            nursery.start_soon(ask, rt, "a", answers)
            await wait_all_tasks_blocked()
        await wait_all_tasks_blocked()
        assert answers == [runtara.RuntimeClosed]
        nursery.cancel_scope.cancel()
