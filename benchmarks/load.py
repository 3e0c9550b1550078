"""A load on the runtime: so many instances, each of which waits for the answer before it asks again."""

import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import attrs
import trio

import runtara
from benchmarks.figures import percentile
from runtara import Instance, Runtime

STATE = b"x" * 100

Step = Callable[[Instance, int], Awaitable[object]]


@attrs.frozen(kw_only=True)
class Outcome:
    """What a load came to."""

    rate: float
    """Answered requests per second."""
    lateness_ms: tuple[float, ...] = ()
    """Of a ticker of 1 ms on the same loop."""

    def late(self, percent: float) -> float:
        return percentile(self.lateness_ms, percent)


async def save(instance: Instance, number: int) -> None:
    await instance.checkpoint(f"step-{number}", STATE)


@attrs.define
class Load:
    """Registers the instances, lets all begin at once, and counts until the time is over."""

    runtime: Runtime
    ids: Sequence[str]
    step: Step = save
    answered: int = 0
    ready: int = 0
    over: bool = False
    start: trio.Event = attrs.Factory(trio.Event)

    async def run(self, seconds: float, *, saturate: bool = False, tick: bool = False) -> Outcome:
        lateness: list[float] = []
        async with trio.open_nursery() as nursery:
            for instance_id in self.ids:
                nursery.start_soon(self.live, instance_id)
            await self.start.wait()
            async with trio.open_nursery() as others:
                if saturate:
                    others.start_soon(self.spin)
                if tick:
                    others.start_soon(self.tick, lateness)
                answered, begun = self.answered, time.perf_counter()
                await trio.sleep(seconds)
                rate = (self.answered - answered) / (time.perf_counter() - begun)
                others.cancel_scope.cancel()
            self.over = True
        return Outcome(rate=rate, lateness_ms=tuple(lateness))

    async def live(self, instance_id: str) -> None:
        async with self.runtime.register(instance_id) as instance:
            self.ready += 1
            if self.ready == len(self.ids):
                self.start.set()
            await self.start.wait()
            number = 0
            while not self.over:
                await self.step(instance, number)
                self.answered += 1
                number += 1

    async def spin(self) -> None:
        """A task that is always ready to run: the loop never waits for anything."""
        while True:
            await trio.lowlevel.checkpoint()

    async def tick(self, lateness: list[float]) -> None:
        while True:
            due = trio.current_time() + 0.001
            await trio.sleep_until(due)
            lateness.append(1000 * (trio.current_time() - due))


def run_load(
    path: Path,
    ids: Sequence[str],
    seconds: float,
    *,
    step: Step = save,
    saturate: bool = False,
    tick: bool = False,
) -> Outcome:
    """Open a runtime on ``path``, and put a load on it."""

    async def main() -> Outcome:
        async with runtara.open_runtime(f"sqlite:///{path}") as runtime:
            return await Load(runtime, ids, step).run(seconds, saturate=saturate, tick=tick)

    gc.collect()
    return trio.run(main)


def names(count: int) -> list[str]:
    return [f"i-{number}" for number in range(count)]
