"""Memory per idle live instance: a session is registered, its code is waiting, nothing is in flight.

python -m benchmarks.memory 100000      measures in this very process, and prints JSON
"""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

import trio

import runtara
from benchmarks.figures import Effort, Figure, figure

AT_ONCE = 500


def resident_bytes() -> int:
    """Of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def measure(path: str, count: int) -> None:
    """Print what ``count`` live instances take. The process ends without a drain."""
    async with runtara.open_runtime(f"sqlite:///{path}") as runtime, AsyncExitStack() as stack:
        await enter(runtime, stack, "warm", AT_ONCE)
        gc.collect()
        before, begun = resident_bytes(), time.perf_counter()
        await enter(runtime, stack, "live", count)
        seconds = time.perf_counter() - begun
        gc.collect()
        after = resident_bytes()
        sessions = runtime.statistics().instances.sessions
        found = {"bytes": (after - before) / count, "rss": after, "sessions": sessions, "seconds": seconds}
        print(json.dumps(found), flush=True)
        os._exit(0)


async def enter(runtime: runtara.Runtime, stack: AsyncExitStack, prefix: str, count: int) -> None:
    """Begin so many sessions, some at once, and hold them."""

    async def some(first: int) -> None:
        for number in range(first, count, AT_ONCE):
            await stack.enter_async_context(runtime.register(f"{prefix}-{number}"))

    async with trio.open_nursery() as nursery:
        for first in range(min(AT_ONCE, count)):
            nursery.start_soon(some, first)


def memory(folder: Path, effort: Effort) -> Iterator[Figure]:
    kibibytes, rss, rates = [], [], []
    for _ in range(1 if effort.live < 10_000 else 3):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.memory", str(effort.live)],
            cwd=Path(__file__).parent.parent,
            capture_output=True,
            text=True,
            check=True,
        )
        found = json.loads(done.stdout)
        assert found["sessions"] >= effort.live
        kibibytes.append(found["bytes"] / 1024)
        rss.append(found["rss"] / 2**20)
        rates.append(effort.live / found["seconds"])
    beside = f"{effort.live:,} live instances, the process has {median(rss):,.0f} MiB"
    yield figure("memory per idle live instance", kibibytes, "KiB", beside=beside, at_most=10.0)
    yield figure(f"registrations, up to {effort.live:,} live", rates, "/s")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as own:
        trio.run(measure, f"{own}/memory.db", int(sys.argv[1]))
