"""The budget in bytes, full mailboxes, the cap on instances: who waits, who is refused, what comes back."""

from functools import partial

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import runtara
from runtara import Instance, Runtime, Settings
from runtara.actors.system import Budget
from tests.runtimes import runtime, scripted_runtime

KB = 1000


async def enter(budget: Budget, size: int, order: list[int]) -> None:
    if budget.fits(size):
        budget.used += size
    else:
        await budget.wait(size)
    order.append(size)


def budget_of(limit: int, patience: float = 5.0) -> Budget:
    return Budget(Settings(budget_bytes=limit, overload_seconds=patience))


# ---------------------------------------------------------------- the budget alone


async def test_callers_over_the_budget_wait_in_order(autojump_clock: MockClock) -> None:
    budget, order = budget_of(100), list[int]()
    async with trio.open_nursery() as nursery:
        await enter(budget, 90, order)
        for size in (20, 5, 70, 1):
            nursery.start_soon(enter, budget, size, order)
            await wait_all_tasks_blocked()
        assert order == [90]
        budget.release(90)
        await wait_all_tasks_blocked()
        assert (order[0], set(order[1:])) == (90, {20, 5, 70, 1})
        assert budget.used == 96
    for size in (20, 5, 70, 1):
        budget.release(size)
    assert budget.used == 0


async def test_a_small_request_does_not_overtake_a_large_one(autojump_clock: MockClock) -> None:
    budget, order = budget_of(100), list[int]()
    async with trio.open_nursery() as nursery:
        await enter(budget, 60, order)
        nursery.start_soon(enter, budget, 80, order)
        await wait_all_tasks_blocked()
        nursery.start_soon(enter, budget, 10, order)
        await wait_all_tasks_blocked()
        assert order == [60]
        budget.release(60)
        await wait_all_tasks_blocked()
        assert sorted(order) == [10, 60, 80]


async def test_a_request_larger_than_the_budget_is_held_alone(autojump_clock: MockClock) -> None:
    budget, order = budget_of(100), list[int]()
    async with trio.open_nursery() as nursery:
        await enter(budget, 1000, order)
        nursery.start_soon(enter, budget, 1, order)
        await wait_all_tasks_blocked()
        assert order == [1000]
        budget.release(1000)
    assert (order, budget.used) == ([1000, 1], 1)


async def test_patience_ends_with_overloaded_and_lets_those_behind_in(autojump_clock: MockClock) -> None:
    budget, order = budget_of(100), list[int]()
    async with trio.open_nursery() as nursery:
        await enter(budget, 60, order)
        start = trio.current_time()

        async def large() -> None:
            with pytest.raises(runtara.Overloaded) as caught:
                await enter(budget, 80, order)
            assert caught.value.retry_after_seconds == 1.0
            assert trio.current_time() - start == pytest.approx(5)

        nursery.start_soon(large)
        await trio.sleep(1)
        nursery.start_soon(enter, budget, 10, order)
        await trio.sleep(4.5)
        assert order == [60, 10]
    assert (budget.used, len(budget.queue)) == (70, 0)


async def test_a_caller_that_is_cancelled_while_it_waits_holds_nothing(autojump_clock: MockClock) -> None:
    budget, order = budget_of(100), list[int]()
    await enter(budget, 60, order)
    with trio.move_on_after(1):
        await enter(budget, 80, order)
    assert (budget.used, len(budget.queue)) == (60, 0)


async def test_a_caller_that_is_let_in_while_it_is_cancelled_holds_its_bytes(
    autojump_clock: MockClock,
) -> None:
    """Its request goes on its way; so the bytes are neither lost nor counted twice."""
    budget, order = budget_of(100), list[int]()
    await enter(budget, 60, order)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(enter, budget, 80, order)
        await wait_all_tasks_blocked()
        budget.release(60)
        nursery.cancel_scope.cancel()
    assert (order, budget.used, len(budget.queue)) == ([60, 80], 80, 0)


# ---------------------------------------------------------------- in a runtime


async def checkpoint(inst: Instance, name: str, size: int, answers: dict[str, object]) -> None:
    try:
        answers[name] = (await inst.checkpoint(name, b"x" * size)).found
    except runtara.RuntaraError as error:
        answers[name] = type(error)


async def test_over_the_budget_callers_wait_and_then_get_overloaded(autojump_clock: MockClock) -> None:
    async with scripted_runtime(budget_bytes=10 * KB, overload_seconds=5) as (rt, store):  # noqa: SIM117
        async with rt.register("a") as inst:
            gate = store.hold()
            answers: dict[str, object] = {}
            async with trio.open_nursery() as nursery:
                for number in range(6):
                    nursery.start_soon(checkpoint, inst, f"c{number}", 3 * KB, answers)
                    await wait_all_tasks_blocked()
                assert rt.statistics().budget_used <= 10 * KB
                await trio.sleep(4)
                assert answers == {}
                await trio.sleep(2)
                refused = {name for name, answer in answers.items() if answer is runtara.Overloaded}
                assert refused == {"c2", "c3", "c4", "c5"} or refused == {"c3", "c4", "c5"}
                gate.set()
            assert {answers[name] for name in answers if name not in refused} == {False}
            assert (await inst.checkpoint("after", b"x" * 3 * KB)).found is False


@pytest.mark.parametrize("fault", ["refused", "full", "unavailable", "killed", "cancelled", "bug"])
async def test_every_way_out_gives_the_bytes_back(
    autojump_clock: MockClock, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shared opening asserts at its end that nothing is held; here also while the runtime goes on."""
    async with scripted_runtime(store_seconds=2) as (rt, store), rt.register("a") as inst:
        answers: dict[str, object] = {}
        if fault == "refused":
            store.refusal, store.bad = runtara.StoreRefused("bad"), {"c1"}
        elif fault == "full":
            store.away = runtara.StoreFull("full")
        elif fault == "unavailable":
            store.away = runtara.StoreUnavailable("away")
        elif fault == "bug":
            monkeypatch.setattr("runtara.actors.instance.decide", broken)
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(checkpoint, inst, f"c{number}", KB, answers)
            if fault in ("killed", "cancelled"):
                await trio.lowlevel.checkpoint()
                if fault == "killed":
                    rt.system.directory.kill(("default", "a"))
                else:
                    nursery.cancel_scope.cancel()
        await wait_all_tasks_blocked()
        assert rt.statistics().budget_used == 0
        monkeypatch.undo()
        store.away = store.refusal = None
        await trio.sleep(20)
        assert (await inst.checkpoint("after", b"x")).found is False
        assert rt.statistics().budget_used == 0


def broken(*_: object) -> None:
    raise ZeroDivisionError("bug")


async def test_a_full_mailbox_refuses_at_once(autojump_clock: MockClock) -> None:
    async with scripted_runtime(mailbox_messages=3) as (rt, store), rt.register("a") as inst:
        gate = store.hold()
        answers: dict[str, object] = {}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(checkpoint, inst, "first", 1, answers)
            await wait_all_tasks_blocked()
            nursery.start_soon(
                inst.record_retry, "c", 1
            )  # must ask the store, and waits for what is unwritten
            await wait_all_tasks_blocked()
            for number in range(5):
                nursery.start_soon(checkpoint, inst, f"c{number}", 1, answers)
            await wait_all_tasks_blocked()
            assert list(answers.values()) == [runtara.Overloaded] * 2
            assert (await rt.status("other")).status is runtara.Status.UNKNOWN  # it has its own mailbox
            gate.set()
        assert (
            sorted(map(str, answers.values())) == ["<class 'runtara.errors.Overloaded'>"] * 2 + ["False"] * 4
        )


async def test_over_the_cap_new_ids_are_refused_and_known_ones_are_not(autojump_clock: MockClock) -> None:
    async with runtime(live_instances=3, idle_seconds=10) as rt:
        async with rt.register("a"):
            pass
        await trio.sleep(11)
        async with trio.open_nursery() as nursery:
            for name in ("b", "c", "d"):
                await nursery.start(hold, rt, name)
            for register in (rt.register, partial(rt.register, workflow="w")):
                with pytest.raises(runtara.TooManyInstances) as caught:
                    async with register("new"):
                        raise AssertionError("not reached")
                assert (caught.value.retryable, caught.value.retry_after_seconds) == (True, 10)
            with pytest.raises(runtara.TooManyInstances):
                await rt.send_custom_signal("new", "k", store_if_unknown=True)
            async with rt.register("a") as known:
                assert (await known.checkpoint("c", b"x")).found is False
            assert rt.statistics().instances.live == 4
            nursery.cancel_scope.cancel()
        await trio.sleep(25)
        async with rt.register("new") as inst:
            assert inst.registered.created


async def hold(rt: Runtime, name: str, *, task_status: trio.TaskStatus[None]) -> None:
    async with rt.register(name):
        task_status.started()
        await trio.sleep_forever()
