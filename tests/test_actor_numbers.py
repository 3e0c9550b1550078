"""Numbers that never come twice, taken in blocks."""

import pytest
import trio
from trio.testing import MockClock

import runtara
from runtara.actors.numbers import BLOCK, Numbers
from tests.runtimes import ScriptedStore, scripted_store


async def take_into(numbers: Numbers, taken: list[int], count: int) -> None:
    for _ in range(count):
        taken.append(await numbers.take())


async def test_no_number_comes_twice_however_many_ask_at_once(autojump_clock: MockClock) -> None:
    async with scripted_store() as store:
        numbers, taken = Numbers(store), list[int]()
        async with trio.open_nursery() as nursery:
            for _ in range(2 * BLOCK + 50):
                nursery.start_soon(take_into, numbers, taken, 1)
        assert len(set(taken)) == len(taken) == 2 * BLOCK + 50
        assert sorted(taken) == list(range(numbers.first or 0, (numbers.first or 0) + len(taken)))


async def test_a_later_run_takes_higher_numbers(autojump_clock: MockClock) -> None:
    async with scripted_store() as store:
        first, second = Numbers(store), Numbers(store)
        taken = [await first.take(), await second.take(), await first.take()]
        assert taken == [taken[0], taken[0] + BLOCK, taken[0] + 1]
        assert second.first == taken[1]


async def test_a_store_that_gives_no_block_is_asked_again_by_the_next(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted_store() as store:
        numbers = Numbers(store)

        async def away(self: ScriptedStore, count: int) -> int:
            await trio.lowlevel.checkpoint()
            raise runtara.StoreUnavailable("away")

        with monkeypatch.context() as patch:
            patch.setattr(ScriptedStore, "reserve", away)
            for _ in range(2):
                with pytest.raises(runtara.StoreUnavailable):
                    await numbers.take()
        assert await numbers.take() == numbers.first


async def test_a_cancelled_caller_leaves_the_lock_free(autojump_clock: MockClock) -> None:
    async with scripted_store() as store:
        numbers, taken = Numbers(store), list[int]()
        for steps in range(6):
            numbers.next = numbers.end
            async with trio.open_nursery() as nursery:
                nursery.start_soon(take_into, numbers, taken, 1)
                for _ in range(steps):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            await take_into(numbers, taken, 1)
        assert len(set(taken)) == len(taken)
