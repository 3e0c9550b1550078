"""A pooler in transaction mode in front of PostgreSQL, in this process.

It answers the start of a connection itself. Each transaction is given a connection to the server, which is
given back when the server says that it is at rest; the next transaction gets another one. So whatever a
client leaves in a session, it finds that of somebody else.
"""

import os
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import urlsplit

import attrs
import psycopg
import trio

CHUNK: Final = 65536
SSL_REQUEST, GSS_REQUEST, CANCEL_REQUEST = 80877103, 80877104, 80877102
LENGTH: Final = struct.Struct("!i")
TOLD: Final = (b"server_version", b"client_encoding", b"standard_conforming_strings", b"integer_datetimes")
BYE: Final = b"X"
READY: Final = ord("Z")
AT_REST: Final = ord("I")
GONE: Final = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)


def message(kind: bytes, body: bytes) -> bytes:
    return kind + LENGTH.pack(len(body) + 4) + body


@attrs.define(eq=False)
class Upstream:
    """One connection to the server. The driver made it; from then on its socket is ours."""

    connection: "psycopg.Connection[tuple[object, ...]]"
    stream: trio.SocketStream
    unread: bytes = b""
    """The beginning of a message."""

    @property
    def pid(self) -> int:
        return self.connection.info.backend_pid

    def is_at_rest_after(self, data: bytes) -> bool:
        """Take what the server sent; whether it ends with the server at rest."""
        data = self.unread + data
        at, rest = 0, False
        while len(data) - at >= 5:
            end = at + 1 + LENGTH.unpack_from(data, at + 1)[0]
            if end > len(data):
                break
            rest = data[at] == READY and data[at + 5] == AT_REST
            at = end
        self.unread = data[at:]
        return rest and not self.unread

    def close(self) -> None:
        self.stream.socket.close()
        self.connection.pgconn.finish()


@attrs.define(eq=False)
class Pooler:
    """Clients come in at `url`."""

    upstream_url: str
    size: int
    port: int = 0
    told: bytes = b""
    """What every client is told of the server."""
    free: deque[Upstream] = attrs.Factory(deque)
    """The first one is that which was used the longest ago."""
    places: trio.CapacityLimiter = attrs.field(init=False)
    using: dict[int, Upstream] = attrs.Factory(dict)
    """What each client uses now, by the key that it was told."""
    clients: int = 0
    transactions: int = 0
    changes: int = 0
    """Transactions of a client on another connection than its last one."""
    made: int = 0

    def __attrs_post_init__(self) -> None:
        self.places = trio.CapacityLimiter(self.size)

    @property
    def url(self) -> str:
        parts = urlsplit(self.upstream_url)
        user = f"{parts.username}@" if parts.username else ""
        return parts._replace(netloc=f"{user}127.0.0.1:{self.port}").geturl()

    # ------------------------------------------------------------ the server's side

    def take(self, last: Upstream | None) -> Upstream:
        """A connection, another one than ``last`` while there is one or may be one."""
        if self.free and (self.free[0] is not last or self.made == self.size):
            return self.free.popleft()
        self.made += 1
        connection = psycopg.connect(self.upstream_url, autocommit=True, sslmode="disable")
        plain = socket.socket(fileno=os.dup(connection.fileno()))
        plain.setblocking(False)
        return Upstream(connection, trio.SocketStream(trio.socket.from_stdlib_socket(plain)))

    def learn(self) -> None:
        first = self.take(None)
        self.free.append(first)
        status = first.connection.pgconn.parameter_status
        self.told = b"".join(message(b"S", name + b"\0" + (status(name) or b"") + b"\0") for name in TOLD)

    def discard(self, upstream: Upstream) -> None:
        self.made -= 1
        upstream.close()

    def restart(self) -> None:
        """Let every connection to the server go; who uses one is cut off."""
        for upstream in (*self.free, *self.using.values()):
            upstream.stream.socket.close()
        while self.free:
            self.discard(self.free.popleft())

    # ------------------------------------------------------------ the client's side

    async def handle(self, client: trio.SocketStream) -> None:
        try:
            key = await self.greet(client)
            if key is not None:
                await self.serve(client, key)
        except GONE:
            pass
        finally:
            client.socket.close()

    async def greet(self, client: trio.SocketStream) -> int | None:
        """Answer the start of a connection; its key, or None for one that only asked to cancel."""
        while True:
            head = await exactly(client, 8)
            length, code = struct.unpack("!ii", head)
            body = await exactly(client, length - 8)
            if code == CANCEL_REQUEST:
                self.cancel(struct.unpack("!i", body[:4])[0])
                return None
            if code not in (SSL_REQUEST, GSS_REQUEST):
                break
            await client.send_all(b"N")
        self.clients += 1
        key = self.clients
        await client.send_all(
            message(b"R", LENGTH.pack(0))
            + self.told
            + message(b"K", struct.pack("!ii", key, key))
            + message(b"Z", b"I")
        )
        return key

    def cancel(self, key: int) -> None:
        if key in self.using:
            self.using[key].connection.pgconn.get_cancel().cancel()

    async def serve(self, client: trio.SocketStream, key: int) -> None:
        """One transaction after the other."""
        last: Upstream | None = None
        while (data := await client.receive_some(CHUNK)) and not data.startswith(BYE):
            async with self.places:
                upstream = self.using[key] = self.take(last)
                whole = False
                try:
                    whole = await self.transaction(client, upstream, data)
                finally:
                    del self.using[key]
                    if whole:
                        self.free.append(upstream)
                    else:
                        self.discard(upstream)
            if not whole:
                return
            self.transactions += 1
            self.changes += last is not None and last is not upstream
            last = upstream

    async def transaction(self, client: trio.SocketStream, upstream: Upstream, first: bytes) -> bool:
        """Pass everything on until the server is at rest; whether it came to that."""
        whole = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.pass_on, client, upstream.stream, first, nursery.cancel_scope)
            while data := await receive(upstream.stream):
                whole = upstream.is_at_rest_after(data)
                if whole:
                    nursery.cancel_scope.cancel()
                    break
                await client.send_all(data)
            nursery.cancel_scope.cancel()
        if whole:
            await client.send_all(data)
        return whole

    async def pass_on(
        self, client: trio.SocketStream, server: trio.SocketStream, data: bytes, scope: trio.CancelScope
    ) -> None:
        while data and not data.startswith(BYE):
            try:
                await server.send_all(data)
            except GONE:
                break
            data = await receive(client)
        scope.cancel()


async def receive(stream: trio.SocketStream) -> bytes:
    """What has arrived; nothing when the other end is gone."""
    try:
        return bytes(await stream.receive_some(CHUNK))
    except GONE:
        return b""


async def exactly(stream: trio.SocketStream, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = await stream.receive_some(count - len(data))
        if not part:
            raise trio.BrokenResourceError("the client went away")
        data += part
    return data


@asynccontextmanager
async def open_pooler(url: str, size: int = 3) -> AsyncIterator[Pooler]:
    """A pooler in front of the server of ``url``, with at most ``size`` connections to it."""
    pooler = Pooler(url, size)
    pooler.learn()
    try:
        async with trio.open_nursery() as nursery:
            [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
            pooler.port = listener.socket.getsockname()[1]
            nursery.start_soon(trio.serve_listeners, pooler.handle, [listener])
            try:
                yield pooler
            finally:
                nursery.cancel_scope.cancel()
    finally:
        pooler.restart()
