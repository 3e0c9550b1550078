"""Where the time of a checkpoint goes, by layer.

Two instruments, both cheap enough not to change the picture:

1. The CPU time of both threads, from their own clocks; of the writer's, also what runs inside SQLite.
2. A sample of the loop's thread each millisecond of CPU (`signal.setitimer`): the innermost frame that is
   ours names the layer, so what a layer calls in trio or attrs counts for the layer. Samples while the loop
   waits (the writer works) are left out.
"""

import signal
import sqlite3
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.figures import Effort
from benchmarks.load import names, run_load
from runtara.executor import ThreadExecutor

WRITER = "runtara-writer"
INTERVAL = 0.001
WAITING = "get_events"

LAYERS = {
    "benchmarks/": "caller: the benchmark's own code",
    "runtara/instance.py": "caller: Instance",
    "runtara/tenant.py": "caller: Instance",
    "runtara/messages.py": "caller: Instance",
    "runtara/validation.py": "door: checks, budget",
    "runtara/ids.py": "door: checks, budget",
    "actors/system.py": "door: checks, budget",
    "actors/letters.py": "door: checks, budget",
    "actors/directory.py": "mailbox and actor",
    "actors/mailbox.py": "mailbox and actor",
    "actors/actor.py": "mailbox and actor",
    "actors/instance.py": "mailbox and actor",
    "actors/facts.py": "mailbox and actor",
    "runtara/machine/": "machine: needs, decide",
    "runtara/records.py": "machine: needs, decide",
    "actors/persistence.py": "writer's actor: queue, answers",
    "runtara/executor.py": "writer's actor: queue, answers",
    "runtara/persistence/": "writer's actor: queue, answers",
}
TRIO = "trio: switching between tasks"


def layer_of(frame: FrameType | None) -> str:
    while frame is not None:
        code = frame.f_code
        if code.co_name == WAITING:
            return WAITING
        if code.co_name == "unrolled_run":
            break
        for part, layer in LAYERS.items():
            if part in code.co_filename:
                return layer
        frame = frame.f_back
    return TRIO


class Meter:
    """CPU seconds of the writer's thread: of all of it, and of what runs inside SQLite."""

    def __init__(self) -> None:
        self.thread = 0.0
        self.sqlite = 0.0

    def install(self) -> Callable[[], None]:
        """Measure every runtime that is opened from now on; returns what takes that back."""
        meter, work, connect = self, ThreadExecutor.work, sqlite3.connect

        class Timed(sqlite3.Connection):
            def execute(self, *arguments: Any) -> sqlite3.Cursor:
                begun = time.thread_time()
                try:
                    return super().execute(*arguments)
                finally:
                    if threading.current_thread().name == WRITER:
                        meter.sqlite += time.thread_time() - begun

        def timed(executor: ThreadExecutor) -> None:
            work(executor)
            if threading.current_thread().name == WRITER:
                meter.thread = time.thread_time()

        def remove() -> None:
            ThreadExecutor.work, sqlite3.connect = work, connect  # type: ignore[method-assign]

        ThreadExecutor.work = timed  # type: ignore[method-assign, assignment]
        sqlite3.connect = partial(connect, factory=Timed)  # type: ignore[assignment]
        return remove


def report(effort: Effort) -> Iterator[str]:
    """Run a load of one and of a hundred instances and say where the time goes."""
    for instances in (1, 100):
        yield ""
        yield from layers(instances, 3 * effort.seconds)


def layers(instances: int, seconds: float) -> Iterator[str]:
    samples: Counter[str] = Counter()

    def sample(_: int, frame: FrameType | None) -> None:
        samples[layer_of(frame)] += 1

    meter = Meter()
    remove = meter.install()
    signal.signal(signal.SIGPROF, sample)
    began, cpu = time.perf_counter(), time.thread_time()
    signal.setitimer(signal.ITIMER_PROF, INTERVAL, INTERVAL)
    try:
        with tempfile.TemporaryDirectory(prefix="runtara-bench-") as own:
            rate = run_load(Path(own) / "profile.db", names(instances), seconds).rate
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        remove()
    wall, loop = time.perf_counter() - began, time.thread_time() - cpu
    each = 1e6 / (rate * seconds)
    plural = "s" if instances > 1 else ""
    yield f"{instances} instance{plural}: {rate:,.0f} checkpoints/s, {1e6 / rate:.1f} us each"
    yield f"  {each * meter.sqlite:6.1f} us  writer's thread, inside SQLite"
    rest = meter.thread - meter.sqlite
    yield f"  {each * rest:6.1f} us  writer's thread, the rest: rows, statements, handing over"
    del samples[WAITING]
    total = sum(samples.values())
    for layer, seen in samples.most_common():
        yield f"  {each * loop * seen / total:6.1f} us  loop, {layer}"
    idle = wall - loop - meter.thread
    yield f"  {each * idle:6.1f} us  neither thread has a processor: the disk, and waking each other"
