"""The clock: the only module that reads the time.

Rules:

1. The wall clock (UTC, microseconds) decides; the monotonic clock of trio only says when to look again.
2. The wall clock may jump, and the monotonic clock may stand still while the machine is suspended. So a
   long wait is cut into pieces of `SCAN_SECONDS`, and each piece ends by reading the wall clock.
3. In a trio run with a `trio.testing.MockClock` (`autojump_clock`), wall time follows trio's time, so that
   a test that sleeps three weeks is over at once.
"""

import sys
import time
from typing import Final, Protocol

import trio

SCAN_SECONDS: Final = 5.0
"""How late a wake can be after the wall clock jumped forward, or the machine was suspended."""


class Clock(Protocol):
    """Wall time, and waiting for it."""

    def now_us(self) -> int:
        """Microseconds of UTC since 1970."""
        ...

    async def sleep_until_us(self, instant_us: int) -> None:
        """Return once the wall clock may have reached ``instant_us``; the caller reads the clock again."""
        ...


class SystemClock:
    """The clock of the machine."""

    def now_us(self) -> int:
        return time.time_ns() // 1000

    async def sleep_until_us(self, instant_us: int) -> None:
        missing = max(0, instant_us - self.now_us()) / 1e6
        await trio.sleep(min(missing, SCAN_SECONDS))


class TrioClock:
    """Wall time that follows trio's own time: for trio runs with a mock clock."""

    def __init__(self, start_us: int) -> None:
        self.offset_us = start_us - round(trio.current_time() * 1e6)

    def now_us(self) -> int:
        return self.offset_us + round(trio.current_time() * 1e6)

    async def sleep_until_us(self, instant_us: int) -> None:
        await trio.sleep_until((instant_us - self.offset_us) / 1e6)


def runs_on_mock_clock() -> bool:
    """Whether this trio run has a `trio.testing.MockClock`."""
    testing = sys.modules.get("trio.testing")
    return testing is not None and isinstance(trio.lowlevel.current_clock(), testing.MockClock)


def default_clock() -> Clock:
    """`TrioClock` under a mock clock, starting at the machine's time; else `SystemClock`."""
    system = SystemClock()
    return TrioClock(system.now_us()) if runs_on_mock_clock() else system
