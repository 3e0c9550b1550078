"""Events per second, signals per second, and how long a signal takes from its sender to the session."""

import time
from collections.abc import Iterator
from pathlib import Path

import trio

import runtara
from benchmarks.checkpoints import fresh
from benchmarks.figures import Effort, Figure, figure, percentile
from benchmarks.load import STATE, Load, names, run_load
from runtara import Instance

INSTANCES = 100


async def emit(instance: Instance, number: int) -> None:
    await instance.emit("tick", STATE)


async def signal_rate(path: Path, seconds: float) -> float:
    """Each session is sent a signal, consumes it by its own wait, and is sent the next one."""

    async with runtara.open_runtime(f"sqlite:///{path}") as runtime:

        async def send_and_take(instance: Instance, number: int) -> None:
            await runtime.send_custom_signal(instance.instance_id, "key", STATE)
            await instance.wait_signal("key", checkpoint_id=f"wait-{number}")

        outcome = await Load(runtime, names(INSTANCES), send_and_take).run(seconds)
    return outcome.rate


async def push_latencies(path: Path, seconds: float) -> tuple[list[float], list[float]]:
    """Milliseconds from the call of the sender to the session's iterator, and to the sender's answer."""
    pushed: list[float] = []
    accepted: list[float] = []
    arrived = trio.Event()

    async def receive(instance: Instance) -> None:
        nonlocal arrived
        async for signal in instance.signals():
            assert signal.payload is not None
            pushed.append((time.perf_counter_ns() - int(signal.payload)) / 1e6)
            await instance.ack(signal)
            arrived.set()

    async with (
        runtara.open_runtime(f"sqlite:///{path}") as runtime,
        runtime.register("receiver") as instance,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(receive, instance)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            arrived = trio.Event()
            begun = time.perf_counter_ns()
            await runtime.send_custom_signal("receiver", "key", b"%d" % begun)
            accepted.append((time.perf_counter_ns() - begun) / 1e6)
            await arrived.wait()
        nursery.cancel_scope.cancel()
    return pushed, accepted


def signals(folder: Path, effort: Effort) -> Iterator[Figure]:
    repeats = range(effort.repeats)
    events = [run_load(fresh(folder), names(INSTANCES), effort.seconds, step=emit).rate for _ in repeats]
    yield figure(f"events, {INSTANCES} instances", events, "/s")
    taken = [trio.run(signal_rate, fresh(folder), effort.seconds) for _ in repeats]
    yield figure(f"signals sent and consumed, {INSTANCES} instances", taken, "/s")
    found = [trio.run(push_latencies, fresh(folder), effort.seconds) for _ in repeats]
    for percent in (50, 99):
        pushed = [percentile(one, percent) for one, _ in found]
        yield figure(f"a signal from the call to the session, p{percent}", pushed, "ms")
    accepted = [percentile(one, 50) for _, one in found]
    yield figure("a signal from the call to its acceptance, p50", accepted, "ms")
