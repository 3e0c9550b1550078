"""Where blocking calls run."""

import threading
from collections.abc import Callable
from functools import partial

import pytest
import trio

from runtara.executor import Donation, Executor, InlineExecutor, ThreadExecutor

KINDS: list[Callable[[], Executor]] = [
    InlineExecutor,
    lambda: ThreadExecutor("plain"),
    lambda: ThreadExecutor("donating", donate=True),
]


@pytest.fixture(params=[0, 1, 2], ids=["inline", "thread", "donating thread"])
def make(request: pytest.FixtureRequest) -> Callable[[], Executor]:
    kind: Callable[[], Executor] = KINDS[request.param]
    return kind


class Mine(Exception):
    pass


def fail() -> None:
    raise Mine("call")


async def test_a_call_returns_what_it_returns_and_raises_what_it_raises(make: Callable[[], Executor]) -> None:
    executor = make()
    assert await executor.run(lambda: 5) == 5
    with pytest.raises(Mine, match="call"):
        await executor.run(fail)
    assert await executor.run(lambda: 6) == 6
    await executor.close()
    await executor.close()


async def test_calls_run_one_by_one_in_order_and_all_outcomes_arrive(make: Callable[[], Executor]) -> None:
    executor = make()
    ran: list[int] = []
    outcomes: list[int] = []

    def note(number: int) -> int:
        ran.append(number)
        return number

    async def call(number: int) -> None:
        outcomes.append(await executor.run(partial(note, number)))

    async with trio.open_nursery() as nursery:
        for number in range(200):
            nursery.start_soon(call, number)
    assert sorted(ran) == sorted(outcomes) == list(range(200))
    await executor.close()


async def test_a_cancelled_call_ends_first_and_its_outcome_is_received(make: Callable[[], Executor]) -> None:
    executor = make()
    answer = None
    with trio.CancelScope() as scope:
        scope.cancel()
        answer = await executor.run(lambda: 7)
    assert answer == 7
    assert not scope.cancelled_caught
    await executor.close()


async def test_all_calls_of_a_thread_run_in_that_thread_and_it_ends_with_close() -> None:
    executor = ThreadExecutor("runtara-test")
    names = {await executor.run(lambda: threading.current_thread().name) for _ in range(3)}
    assert names == {"runtara-test"}
    thread = executor.thread
    with trio.CancelScope() as scope:
        scope.cancel()
        await executor.close()
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="the executor is closed"):
        await executor.run(lambda: 1)


async def test_closing_waits_for_the_calls_that_were_handed_over() -> None:
    executor = ThreadExecutor("runtara-test")
    gate = threading.Event()
    ran: list[int] = []

    def wait(number: int) -> None:
        gate.wait(10)
        ran.append(number)

    async def call(number: int) -> None:
        await executor.run(partial(wait, number))

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(call, number)
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(executor.close)
        for _ in range(5):
            await trio.lowlevel.checkpoint()
        assert executor.closed
        assert ran == []
        gate.set()
    assert sorted(ran) == [0, 1, 2]
    assert not executor.thread.is_alive()


async def test_the_loop_gives_the_lock_away_only_while_calls_run(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr("runtara.executor.time.sleep", naps.append)
    executor = ThreadExecutor("runtara-test", donate=True)
    assert executor.donation is not None
    gate = threading.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(executor.run, lambda: gate.wait(10))
        for _ in range(5):
            await trio.lowlevel.checkpoint()
        assert len(naps) >= 3
        gate.set()
    naps.clear()
    for _ in range(5):
        await trio.lowlevel.checkpoint()
    assert naps == []
    await executor.close()


def test_a_loop_that_waits_for_io_gives_the_lock_away_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr("runtara.executor.time.sleep", naps.append)
    Donation().after_io_wait(0.1)
    assert naps == []
    Donation().after_io_wait(0)
    assert len(naps) == 1


async def test_a_ring_for_jobs_that_were_delivered_already_does_nothing() -> None:
    """The loop takes a job with an earlier ring, and then the thread's own ring for it arrives."""
    executor = ThreadExecutor("runtara-test", donate=True)
    assert await executor.run(lambda: 1) == 1
    executor.deliver()
    assert executor.pending == 0
    assert await executor.run(lambda: 2) == 2
    await executor.close()


async def test_two_tasks_that_call_without_pause_never_lose_an_outcome() -> None:
    executor = ThreadExecutor("runtara-test", donate=True)
    counts = [0, 0]

    async def work(index: int) -> None:
        for _ in range(1000):
            await executor.run(lambda: None)
            counts[index] += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(work, 0)
        nursery.start_soon(work, 1)
    assert counts == [1000, 1000]
    assert executor.pending == 0
    await executor.close()
