"""One connection of a gateway without a socket, on a still clock: what it is told, and what it says."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio
import trio.testing

from runtara.config import Settings
from runtara.executor import InlineExecutor
from runtara.persistence.sqlite import open_sqlite
from runtara.randomness import SeededRandomness
from runtara.runtime import run_runtime
from runtara.serving import ServedRuntime
from runtara.tenant import Runtime
from runtara.tokens import Tokens
from runtara.transport.connection import Connection
from runtara.transport.gateway import Gateway
from runtara.transport.session import ServerConversation, Violation
from runtara.wire import JSON, Goodbye, Hello

NOW = 1_767_225_600_000_000
"""The first instant of 2026, in microseconds."""


class StillClock:
    """A clock that stands still."""

    def now_us(self) -> int:
        return NOW

    async def sleep_until_us(self, instant_us: int) -> None:
        await trio.sleep_forever()


class Peer:
    """A client of the gateway that writes its frames by hand."""

    def __init__(self, gateway: Gateway, runtime: Runtime) -> None:
        self.gateway = gateway
        self.runtime = runtime
        self.connection: Connection | None = None

    async def say(self, text: str) -> list[Any]:
        """Send a frame; what comes back, once nothing moves any more."""
        if self.connection is None:
            greeter = ServerConversation(JSON, 1)
            [hello] = greeter.receive(text)
            assert isinstance(hello, Hello)
            self.connection, welcome = self.gateway.greet(hello, JSON)
            self.connection.conversation.open(welcome)
        else:
            for happening in self.connection.conversation.receive(text):
                assert not isinstance(happening, Hello | Violation)
                if isinstance(happening, Goodbye):
                    self.connection.end(crashed=False)
                else:
                    await self.connection.handle(happening)
        return await self.hear()

    async def hear(self) -> list[Any]:
        await trio.testing.wait_all_tasks_blocked(0.005)
        assert self.connection is not None
        found: list[Any] = []
        for frame in self.connection.conversation.take_output():
            value = json.loads(frame)
            found.extend(value if isinstance(value, list) else [value])
        return found

    def lose_socket(self) -> None:
        assert self.connection is not None
        self.connection.conversation.socket_lost()
        self.connection = None


@asynccontextmanager
async def peer() -> AsyncIterator[Peer]:
    """A peer of a gateway over a store in memory; everything is the same in every run."""
    executor = InlineExecutor()
    clock = StillClock()
    async with (
        open_sqlite(":memory:", writer=executor, reader=executor) as store,
        run_runtime(store, clock, Settings(drain_seconds=0), SeededRandomness(1)) as runtime,
        trio.open_nursery() as nursery,
    ):
        tokens = Tokens(store, clock, SeededRandomness(2))
        gateway = Gateway(ServedRuntime(runtime.system, tokens, SeededRandomness(4)), SeededRandomness(3))
        gateway.nursery = nursery
        yield Peer(gateway, runtime)
        nursery.cancel_scope.cancel()
