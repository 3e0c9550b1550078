"""A server and its clients in one process, on real sockets that can be cut."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio

import runtara
from runtara.server import Server, serve
from runtara.tenant import Runtime
from runtara.transport.client import ClientLimits
from runtara.transport.limits import ConnectionLimits, GatewayLimits

MEMORY = "sqlite:///:memory:"
QUICK = ClientLimits(first_pause=0.01, longest_pause=0.05)


def limits(**connection: Any) -> GatewayLimits:
    """The limits of a gateway whose sessions wait ``grace_seconds`` and so on."""
    return GatewayLimits(close_seconds=0.5, connection=ConnectionLimits(**connection))


@asynccontextmanager
async def server(url: str = MEMORY, **options: Any) -> AsyncIterator[Server]:
    """A server that is stopped in good order at the end."""
    options = {"port": 0, "signals": False, "limits": limits(grace_seconds=5), **options}
    found: Server | None
    settings = {"drain_seconds": 0.2, **options}
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        found = None
        try:
            found = await nursery.start(partial(serve, url, **settings))
            yield found
        except Exception as error:  # so that it leaves as it is, and not in a group
            failure = error
        finally:
            if found is not None:
                found.stop()
    if failure is not None:
        raise failure


@asynccontextmanager
async def client(found: Server, **options: Any) -> AsyncIterator[Runtime]:
    """A client of a server."""
    async with runtara.connect(found.address, **{"limits": QUICK, **options}) as runtime:
        yield runtime


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until a condition holds; the sockets are real, so is the time."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110  # nothing else tells
            await trio.sleep(0.005)


class Proxy:
    """Stands between clients and a server, and cuts their connections when it is told to."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.streams: set[trio.SocketStream] = set()
        self.refusing = False
        self.silent = False
        """Bytes are swallowed in both directions: a half-open connection."""
        self.accepted = 0
        self.address = ""

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.address = f"ws://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        task_status.started()
        await trio.serve_listeners(self.carry, listeners)

    async def carry(self, near: trio.SocketStream) -> None:
        self.accepted += 1
        if self.refusing:
            await trio.aclose_forcefully(near)
            return
        try:
            far = await trio.open_tcp_stream("127.0.0.1", self.port)
        except OSError:
            await trio.aclose_forcefully(near)
            return
        self.streams |= {near, far}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.pump, near, far, nursery.cancel_scope)
            nursery.start_soon(self.pump, far, near, nursery.cancel_scope)
        self.streams -= {near, far}

    async def pump(
        self, source: trio.SocketStream, target: trio.SocketStream, scope: trio.CancelScope
    ) -> None:
        try:
            async for data in source:
                if not self.silent:
                    await target.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        await trio.aclose_forcefully(target)
        await trio.aclose_forcefully(source)
        scope.cancel()

    async def cut(self) -> None:
        """End every connection at once."""
        for stream in list(self.streams):
            await trio.aclose_forcefully(stream)


@asynccontextmanager
async def proxy(port: int) -> AsyncIterator[Proxy]:
    async with trio.open_nursery() as nursery:
        found = Proxy(port)
        await nursery.start(found.run)
        yield found
        nursery.cancel_scope.cancel()
