"""The gateway, as a client in another process sees it, beside what the WebSocket library does by itself."""

import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import trio
from trio_websocket import open_websocket_url

import runtara
from benchmarks.checkpoints import fresh
from benchmarks.figures import Effort, Figure, figure, number, percentile, ratios
from benchmarks.load import STATE, names, run_load
from runtara import Instance, Runtime

MESSAGE = b"x" * 150
"""About as long as a checkpoint of 100 bytes on the wire."""
PIPELINED = 16
SESSIONS = 1_000
IDLE = 5_000


@contextmanager
def server(what: str) -> Iterator[tuple[int, int]]:
    """A server process; its port and its pid."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.served", what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield int(process.stdout.readline()), process.pid
    finally:
        process.stdin.close()
        process.wait(30)


class Counter:
    """What is answered while the clock runs."""

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.ready = 0
        self.start = trio.Event()
        self.answered = 0
        self.over = False

    async def begin(self) -> None:
        self.ready += 1
        if self.ready == self.wanted:
            self.start.set()
        await self.start.wait()

    async def rate(self, seconds: float) -> float:
        await self.start.wait()
        answered, begun = self.answered, time.perf_counter()
        await trio.sleep(seconds)
        rate = (self.answered - answered) / (time.perf_counter() - begun)
        self.over = True
        return rate


async def echo_rate(port: int, connections: int, seconds: float) -> float:
    counter = Counter(connections)

    async def client() -> None:
        async with open_websocket_url(f"ws://127.0.0.1:{port}") as socket:
            await counter.begin()
            while not counter.over:
                await socket.send_message(MESSAGE)
                await socket.get_message()
                counter.answered += 1

    async with trio.open_nursery() as nursery:
        for _ in range(connections):
            nursery.start_soon(client)
        rate = await counter.rate(seconds)
    return rate


async def checkpoint_rate(port: int, connections: int, pipelined: int, seconds: float) -> float:
    counter = Counter(connections)

    async def steps(instance: Instance, lane: int) -> None:
        at = 0
        while not counter.over:
            await instance.checkpoint(f"{lane}.{at}", STATE)
            at += 1
            counter.answered += 1

    async def client(at: int) -> None:
        async with (
            runtara.connect(f"ws://127.0.0.1:{port}") as runtime,
            runtime.register(f"i-{at}") as instance,
        ):
            await counter.begin()
            async with trio.open_nursery() as lanes:
                for lane in range(pipelined):
                    lanes.start_soon(steps, instance, lane)

    async with trio.open_nursery() as nursery:
        for at in range(connections):
            nursery.start_soon(client, at)
        rate = await counter.rate(seconds)
    return rate


@asynccontextmanager
async def sessions(port: int, count: int) -> AsyncIterator[tuple[Runtime, list[Instance]]]:
    """``count`` sessions over connections of a hundred each, and a connection of an operator."""
    held: list[Instance] = []
    ready = trio.Event()

    async def hold(runtime: Runtime, at: int) -> None:
        async with runtime.register(f"s-{at}") as instance:
            held.append(instance)
            if len(held) == count:
                ready.set()
            await trio.sleep_forever()

    async def connection(first: int) -> None:
        async with runtara.connect(f"ws://127.0.0.1:{port}") as runtime, trio.open_nursery() as nursery:
            for at in range(first, min(first + 100, count)):
                nursery.start_soon(hold, runtime, at)

    async with (
        runtara.connect(f"ws://127.0.0.1:{port}") as operator,
        trio.open_nursery() as nursery,
    ):
        for first in range(0, count, 100):
            nursery.start_soon(connection, first)
        await ready.wait()
        yield operator, held
        nursery.cancel_scope.cancel()


async def signal_latencies(port: int, count: int, rate: float, seconds: float) -> list[float]:
    """Milliseconds from the call of the sender to the session, at ``rate`` signals per second."""
    found: list[float] = []

    async def receive(instance: Instance) -> None:
        async for signal in instance.signals():
            assert signal.payload is not None
            found.append((time.perf_counter_ns() - int(signal.payload)) / 1e6)
            await instance.ack(signal)

    async def send(operator: Runtime, instance_id: str) -> None:
        await operator.send_custom_signal(instance_id, "key", b"%d" % time.perf_counter_ns())

    async with sessions(port, count) as (operator, held), trio.open_nursery() as nursery:
        for instance in held:
            nursery.start_soon(receive, instance)
        began = trio.current_time()
        sent = 0
        while trio.current_time() < began + seconds:
            due = int((trio.current_time() - began) * rate)
            while sent < due:
                nursery.start_soon(send, operator, held[sent * 7919 % len(held)].instance_id)
                sent += 1
            await trio.sleep(0.001)
        await trio.sleep(0.5)
        nursery.cancel_scope.cancel()
    return found


def resident(pid: int) -> int:
    """Bytes of memory that a process holds."""
    fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * 4096


async def memory_of_idle(port: int, pid: int, count: int) -> float:
    """KiB of the server for each connection with one session."""
    before = resident(pid)
    ready = Counter(count)

    async def client(at: int) -> None:
        async with runtara.connect(f"ws://127.0.0.1:{port}") as runtime, runtime.register(f"m-{at}"):
            await ready.begin()
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for at in range(count):
            nursery.start_soon(client, at)
            if at % 50 == 49:
                await trio.sleep(0.02)
        await ready.start.wait()
        await trio.sleep(0.5)
        after = resident(pid)
        nursery.cancel_scope.cancel()
    return (after - before) / 1024 / count


def gateway(folder: Path, effort: Effort) -> Iterator[Figure]:
    quick = effort.seconds < 1
    for connections in (1, 10) if quick else (1, 10, 100, 1000):
        ours, piped, raw = [], [], []
        for _ in range(effort.repeats):
            with server("--echo") as (port, _):
                raw.append(trio.run(echo_rate, port, connections, effort.seconds))
            with server(str(fresh(folder))) as (port, _):
                ours.append(trio.run(checkpoint_rate, port, connections, 1, effort.seconds))
            if connections <= 100:
                with server(str(fresh(folder))) as (port, _):
                    piped.append(trio.run(checkpoint_rate, port, connections, PIPELINED, effort.seconds))
        what = f"{connections:,} connection{'s' if connections > 1 else ''}"
        yield figure(f"echoes of the WebSocket library, {what}", raw, "/s")
        yield figure(f"checkpoints over {what}", ours, "/s")
        goal = 0.6 if connections == 100 else None
        yield figure(f"{what} over echoes", ratios(ours, raw), "", at_least=goal)
        if piped:
            yield figure(f"checkpoints over {what}, {PIPELINED} at a time each", piped, "/s")
    yield from beside_embedded(folder, effort)
    yield from live_sessions(folder, effort)


def beside_embedded(folder: Path, effort: Effort) -> Iterator[Figure]:
    served, embedded = [], []
    for _ in range(effort.repeats):
        embedded.append(run_load(fresh(folder), names(100), effort.seconds).rate)
        with server(str(fresh(folder))) as (port, _):
            served.append(trio.run(checkpoint_rate, port, 10, PIPELINED, effort.seconds))
    beside = f"{number(median(served))}/s against {number(median(embedded))}/s"
    yield figure(
        f"10 connections, {PIPELINED} at a time, over embedded",
        ratios(served, embedded),
        "",
        beside=beside,
        at_least=0.6,
    )


def live_sessions(folder: Path, effort: Effort) -> Iterator[Figure]:
    quick = effort.seconds < 1
    count = 20 if quick else SESSIONS
    with server(str(fresh(folder))) as (port, _):
        found = trio.run(partial(signal_latencies, port, count, 50 if quick else 1000, effort.seconds * 2))
    for percent, goal in ((50, None), (99, 20.0)):
        value = percentile(found, percent) if found else 0.0
        name = f"a signal to one of {count:,} live sessions, p{percent}"
        yield figure(name, [value], "ms", beside=f"{len(found):,} signals", at_most=goal)
    idle = 50 if quick else IDLE
    with server(str(fresh(folder))) as (port, pid):
        kib = trio.run(memory_of_idle, port, pid, idle)
    goal = None if quick else 60.0
    yield figure(f"memory per idle connection with a session, {idle:,} of them", [kib], "KiB", at_most=goal)
