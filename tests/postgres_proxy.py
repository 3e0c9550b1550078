"""A TCP proxy in front of PostgreSQL, in this process, that breaks connections where a test wants it."""

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import trio

CHUNK = 65536


class Proxy:
    """Passes everything on, until a test says otherwise."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.upstream = (parts.hostname or "127.0.0.1", parts.port or 5432)
        self.parts = parts
        self.port = 0
        self.down = False
        """Close every new connection at once."""
        self.silent = False
        """Swallow everything, both ways; connections are still accepted."""
        self.cut_before: bytes | None = None
        """Cut the connection on which the client sends this; the server never sees it."""
        self.cut_after: bytes | None = None
        """Pass on what holds this, wait for the server's answer, and cut instead of passing it on."""
        self.but: bytes | None = None
        """What holds this too is left alone."""
        self.cuts = 0
        self.connections = 0
        self.pairs: set[tuple[trio.SocketStream, trio.SocketStream]] = set()

    @property
    def url(self) -> str:
        """The server's own url, through the proxy."""
        user = f"{self.parts.username}@" if self.parts.username else ""
        return self.parts._replace(netloc=f"{user}127.0.0.1:{self.port}").geturl()

    def cut_all(self) -> None:
        for pair in list(self.pairs):
            self.cut(pair)

    def cut(self, pair: tuple[trio.SocketStream, trio.SocketStream]) -> None:
        """Reset both ends, as a firewall does."""
        self.cuts += 1
        self.pairs.discard(pair)
        for stream in pair:
            linger = struct.pack("ii", 1, 0)
            stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            stream.socket.close()

    async def handle(self, client: trio.SocketStream) -> None:
        if self.down:
            return
        server = await trio.open_tcp_stream(*self.upstream)
        pair = (client, server)
        self.pairs.add(pair)
        self.connections += 1
        try:
            async with trio.open_nursery() as nursery:
                answer_lost = trio.Event()
                scope = nursery.cancel_scope
                nursery.start_soon(self.pump, client, server, pair, answer_lost, True, scope)
                nursery.start_soon(self.pump, server, client, pair, answer_lost, False, scope)
        finally:
            self.pairs.discard(pair)
            for stream in pair:
                stream.socket.close()

    async def pump(
        self,
        source: trio.SocketStream,
        target: trio.SocketStream,
        pair: tuple[trio.SocketStream, trio.SocketStream],
        answer_lost: trio.Event,
        from_client: bool,
        scope: trio.CancelScope,
    ) -> None:
        try:
            while data := await source.receive_some(CHUNK):
                if self.silent:
                    continue
                spared = self.but is not None and self.but in data
                if from_client and self.cut_before is not None and self.cut_before in data and not spared:
                    self.cut_before = None
                    self.cut(pair)
                    break
                if from_client and self.cut_after is not None and self.cut_after in data and not spared:
                    self.cut_after = None
                    answer_lost.set()
                if not from_client and answer_lost.is_set():
                    self.cut(pair)
                    break
                await target.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            pass
        scope.cancel()


@asynccontextmanager
async def open_proxy(url: str) -> AsyncIterator[Proxy]:
    """A proxy to the server of ``url``."""
    proxy = Proxy(url)
    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        proxy.port = listener.socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, proxy.handle, [listener])
        try:
            yield proxy
        finally:
            nursery.cancel_scope.cancel()
