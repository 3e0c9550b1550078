"""A wall clock that jumps, and that can make its next reader fail."""

from typing import Final

import trio

from runtara.clock import SCAN_SECONDS

START_US: Final = 1_800_000_000_000_000


class InjectedFault(Exception):
    """A bug in a handler, says the simulation."""


class JumpingClock:
    """A `Clock` whose wall time runs with trio's, but for its jumps.

    A waiter reads it again after `SCAN_SECONDS`, as with the clock of a machine.
    """

    def __init__(self) -> None:
        self.offset_us = START_US - round(trio.current_time() * 1e6)
        self.latest_us = START_US
        """The latest instant it ever showed."""
        self.readers_fail = 0
        """How many of its next readers fail: a bug in the middle of a handler."""

    def look(self) -> int:
        """What it shows, for the world itself."""
        now_us = self.offset_us + round(trio.current_time() * 1e6)
        self.latest_us = max(self.latest_us, now_us)
        return now_us

    def now_us(self) -> int:
        if self.readers_fail:
            self.readers_fail -= 1
            raise InjectedFault("the clock fell off the wall")
        return self.look()

    async def sleep_until_us(self, instant_us: int) -> None:
        await trio.sleep(min(max(0, instant_us - self.look()) / 1e6, SCAN_SECONDS))

    def jump(self, seconds: float) -> None:
        self.look()
        self.offset_us += round(seconds * 1e6)
        self.look()
