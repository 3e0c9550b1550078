"""Where the time of a checkpoint goes, by layer.

Two instruments, both cheap enough not to change the picture:

1. The CPU time of the writer thread and of the loop's thread, from the clocks of the threads.
2. A sample of the loop's thread each millisecond of CPU (`signal.setitimer`): the innermost frame that is
   ours names the layer, so what a layer calls in trio or attrs counts for the layer. Samples while the loop
   waits (the writer works) are left out.
"""

import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from benchmarks.figures import Effort
from benchmarks.load import names, run_load
from runtara.executor import ThreadExecutor

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


class Clocks:
    """CPU time of the writer's thread, and the part of it inside `writes.write` and SQLite."""

    def __init__(self) -> None:
        self.thread = 0.0
        self.prepare = 0.0


def report(effort: Effort, instances: int = 100) -> Iterator[str]:
    """Run a load and say where its time went."""
    samples: Counter[str] = Counter()

    def sample(_: int, frame: FrameType | None) -> None:
        samples[layer_of(frame)] += 1

    busy = 0.0
    work = ThreadExecutor.work

    def timed(self: ThreadExecutor) -> None:
        nonlocal busy
        work(self)
        if "writer" in threading.current_thread().name:
            busy = time.thread_time()

    ThreadExecutor.work = timed  # type: ignore[method-assign]
    signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, INTERVAL, INTERVAL)
    began, cpu = time.perf_counter(), time.thread_time()
    try:
        with tempfile.TemporaryDirectory(prefix="runtara-bench-") as own:
            seconds = 3 * effort.seconds
            rate = run_load(Path(own) / "profile.db", names(instances), seconds).rate
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        ThreadExecutor.work = work  # type: ignore[method-assign]
    wall, loop = time.perf_counter() - began, time.thread_time() - cpu
    count = rate * seconds
    yield f"{rate:,.0f} checkpoints/s with {instances} instances: {1e6 / rate:.1f} us each"
    yield f"  CPU of the loop's thread    {1e6 * loop / count:5.1f} us"
    yield f"  CPU of the writer's thread  {1e6 * busy / count:5.1f} us"
    yield f"  both, over the time passed  {(loop + busy) / wall:5.2f}"
    del samples[WAITING]
    total = sum(samples.values())
    for layer, seen in samples.most_common():
        yield f"  {100 * seen / total:5.1f} % of the loop: {layer}"
