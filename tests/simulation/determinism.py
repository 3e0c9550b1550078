"""One seed, one schedule: everything that trio and Python leave to chance is pinned.

Pinned are the order in which trio runs the tasks of a batch (by two private names: `SORTED` and its dice),
the global ``random``, and ``os.urandom`` (so ``uuid4`` and ``secrets``). Threads are forbidden. The garbage
collector is off during a world, because its time of day decides when trio is told about dropped generators.
The clock of a world is a `trio.testing.MockClock`, and everything else is injected into the runtime.
"""

import gc
import hashlib
import os
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import trio
import trio._core._run as trio_run  # no public way to seed the scheduler
from trio.testing import MockClock

T = TypeVar("T")

SORTED = "_ALLOW_DETERMINISTIC_SCHEDULING"
"""Private to trio: tasks of a batch are sorted before they are shuffled."""


MOST_STEPS = 200_000


class Circle(AssertionError):
    """The world went on for ever without letting time pass."""


class Trace(trio.abc.Instrument):
    """A digest of every step of every task, with its virtual time, and of what the world notes."""

    def __init__(self, *, keep: bool = False) -> None:
        self.hasher = hashlib.blake2b(digest_size=12)
        self.steps = 0
        self.first: int | None = None
        self.scope = trio.CancelScope()
        """Around the world: left when it takes `MOST_STEPS`, because then it runs in a circle."""
        self.kept: list[str] | None = [] if keep else None

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.first is None:
            self.first = task._counter
        self.steps += 1
        if self.steps == MOST_STEPS:
            self.scope.cancel()
        self.note(f"{trio.current_time():.6f} {task._counter - self.first} {task.name}")

    def note(self, line: str) -> None:
        """Add a line of the world's own."""
        self.hasher.update(line.encode())
        if self.kept is not None:
            self.kept.append(line)

    @property
    def digest(self) -> str:
        return self.hasher.hexdigest()


def no_threads(self: threading.Thread) -> None:
    raise AssertionError("a thread was started inside a simulation")


@contextmanager
def pinned(seed: int) -> Iterator[None]:
    """Pin every source of chance for the body."""
    bytes_of_seed = random.Random(f"bytes {seed}")
    urandom, start, sorting = os.urandom, threading.Thread.start, vars(trio_run)[SORTED]
    scheduler, everybody, collecting = trio_run._r.getstate(), random.getstate(), gc.isenabled()
    os.urandom = bytes_of_seed.randbytes
    threading.Thread.start = no_threads  # type: ignore[method-assign]
    vars(trio_run)[SORTED] = True
    trio_run._r.seed(f"scheduler {seed}")
    random.seed(f"everybody {seed}")
    gc.disable()
    try:
        yield
    finally:
        os.urandom = urandom
        threading.Thread.start = start  # type: ignore[method-assign]
        vars(trio_run)[SORTED] = sorting
        trio_run._r.setstate(scheduler)
        random.setstate(everybody)
        if collecting:
            gc.enable()


def simulate(seed: int, trace: Trace, world: Callable[[], Awaitable[T]]) -> T:
    """Run ``world`` to its end in virtual time, every step of it decided by ``seed``."""
    results: list[T] = []

    async def bounded() -> None:
        with trace.scope:
            results.append(await world())
        if not results:
            raise Circle(f"{MOST_STEPS} steps, and {trio.current_time():.3f} virtual seconds")

    with pinned(seed):
        trio.run(bounded, clock=MockClock(autojump_threshold=0), instruments=[trace])
    return results[0]
