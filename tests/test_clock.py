"""The wall clock, and waiting for it."""

import pytest
import trio
from trio.testing import MockClock

from runtara.clock import SCAN_SECONDS, SystemClock, TrioClock, default_clock, runs_on_mock_clock


async def test_a_run_without_a_mock_clock_takes_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not runs_on_mock_clock()
    clock = default_clock()
    assert isinstance(clock, SystemClock)
    monkeypatch.setattr("runtara.clock.time.time_ns", lambda: 1_700_000_000_123_456_789)
    assert clock.now_us() == 1_700_000_000_123_456


async def test_a_run_with_a_mock_clock_takes_trios(mock_clock: MockClock) -> None:
    assert runs_on_mock_clock()
    clock = default_clock()
    assert isinstance(clock, TrioClock)
    before = clock.now_us()
    assert abs(before - SystemClock().now_us()) < 60_000_000
    mock_clock.jump(1.5)
    assert clock.now_us() == before + 1_500_000


async def test_three_weeks_are_over_at_once(autojump_clock: MockClock) -> None:
    clock = TrioClock(1_700_000_000_000_000)
    target = clock.now_us() + 21 * 86_400 * 1_000_000
    await clock.sleep_until_us(target)
    assert clock.now_us() == target


async def test_waiting_for_trios_clock_never_ends_early(autojump_clock: MockClock) -> None:
    clock = TrioClock(1_700_000_000_000_000)
    for step in (1, 3, 7, 333_333, 1_000_001, 10**12 + 1):
        target = clock.now_us() + step
        await clock.sleep_until_us(target)
        assert clock.now_us() >= target


async def test_waiting_for_an_instant_that_is_over_is_a_checkpoint(autojump_clock: MockClock) -> None:
    for clock in (TrioClock(1_700_000_000_000_000), SystemClock()):
        start = trio.current_time()
        await clock.sleep_until_us(clock.now_us() - 10**9)
        await clock.sleep_until_us(0)
        assert trio.current_time() == start
        with trio.CancelScope() as scope:
            scope.cancel()
            await clock.sleep_until_us(0)
        assert scope.cancelled_caught


@pytest.mark.parametrize(("ahead", "waited"), [(0.5, 0.5), (4.0, 4.0), (5.0, 5.0), (3600.0, SCAN_SECONDS)])
async def test_a_long_wait_on_the_machines_clock_ends_for_a_look_after_each_scan(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, ahead: float, waited: float
) -> None:
    monkeypatch.setattr("runtara.clock.time.time_ns", lambda: 1_700_000_000 * 10**9)
    start = trio.current_time()
    await SystemClock().sleep_until_us(round((1_700_000_000 + ahead) * 1e6))
    assert trio.current_time() - start == pytest.approx(waited)
