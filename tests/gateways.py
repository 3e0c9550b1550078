"""A gateway over a runtime in memory, on a real port, and peers that write every byte by hand."""

import json
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import attrs
import trio

from runtara import Runtime, open_runtime
from runtara.clock import SystemClock
from runtara.operations import Role
from runtara.randomness import SystemRandomness
from runtara.serving import ServedRuntime
from runtara.tokens import Tokens
from runtara.transport.gateway import Gateway
from runtara.transport.limits import ConnectionLimits, GatewayLimits, StreamLimits
from runtara.wire import CODECS, JSON, JSON_PROTOCOL, Codec

HEAD_END = b"\r\n\r\n"
KEY = "dGhlIHNhbXBsZSBub25jZQ=="
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10

QUICK = GatewayLimits(
    handshake_seconds=0.4,
    hello_seconds=0.4,
    close_seconds=0.1,
    connection=ConnectionLimits(grace_seconds=0.2),
)
"""Deadlines of fractions of a second; for peers on this machine."""


def quick(stream: StreamLimits | None = None, **changes: Any) -> GatewayLimits:
    """`QUICK`, changed: fields of the gateway, of a connection, or all of a stream."""
    own = {field.name for field in attrs.fields(GatewayLimits)}
    mine = {name: value for name, value in changes.items() if name in own}
    connection = {name: value for name, value in changes.items() if name not in own}
    return attrs.evolve(
        QUICK,
        stream=stream or StreamLimits(send_seconds=0.5),
        connection=attrs.evolve(QUICK.connection, **connection),
        **mine,
    )


# ---------------------------------------------------------------- the bytes of a peer


def head(*lines: str, first: str = "GET / HTTP/1.1", protocol: str | None = JSON_PROTOCOL) -> bytes:
    """The request that opens a socket, with more ``lines``."""
    known = [
        first,
        "Host: 127.0.0.1",
        "Connection: Upgrade",
        "Upgrade: websocket",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Key: {KEY}",
        *([] if protocol is None else [f"Sec-WebSocket-Protocol: {protocol}"]),
        *lines,
    ]
    return "\r\n".join([*known, "", ""]).encode("latin-1")


def frame(
    opcode: int,
    data: bytes = b"",
    *,
    final: bool = True,
    reserved: int = 0,
    masked: bool = True,
    length: int | None = None,
    wide: int = 0,
) -> bytes:
    """A frame of a client; the mask is zero, so the payload stands as it is.

    Args:
        length: The length that is announced, if it is another one.
        wide: 126 or 127 for a length that is written wider than it has to be.
    """
    size = len(data) if length is None else length
    mask = 0x80 if masked else 0
    short = wide or (size if size < 126 else 126 if size < 2**16 else 127)
    more = b"" if short < 126 else size.to_bytes(2 if short == 126 else 8, "big")
    first = (0x80 if final else 0) | reserved << 4 | opcode
    return bytes([first, mask | short]) + more + (bytes(4) if masked else b"") + data


def closing(code: int, reason: bytes = b"") -> bytes:
    return frame(CLOSE, struct.pack(">H", code) + reason)


@attrs.frozen
class Heard:
    """A frame of the server."""

    opcode: int
    payload: bytes

    @property
    def code(self) -> int:
        """The code of a close frame."""
        assert self.opcode == CLOSE, self
        return int.from_bytes(self.payload[:2], "big")


class Peer:
    """A peer of a gateway, byte by byte."""

    def __init__(self, stream: trio.abc.Stream, codec: Codec = JSON) -> None:
        self.stream = stream
        self.codec = codec
        self.unread = b""
        self.envelopes: list[Any] = []
        """Heard, and not yet asked for."""
        self.answers: dict[int, Any] = {}
        self.calls = 0

    async def send(self, data: bytes) -> None:
        """Send bytes; a server that has closed is no error."""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            await self.stream.send_all(data)

    async def read(self) -> bytes:
        """Some bytes; empty at the end, however it came."""
        try:
            return bytes(await self.stream.receive_some(65536))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return b""

    async def read_all(self) -> bytes:
        """Everything until the end; then the peer goes too."""
        found, self.unread = self.unread, b""
        while more := await self.read():
            found += more
        await self.close()
        return found

    async def read_head(self) -> bytes:
        """The answer to the request."""
        while HEAD_END not in self.unread:
            more = await self.read()
            if not more:
                break
            self.unread += more
        answer, _, self.unread = self.unread.partition(HEAD_END)
        return answer

    async def status(self) -> int:
        """The status of the answer to the request; 0 if there was none."""
        answer = await self.read_head()
        return int(answer.split(b" ")[1]) if answer.startswith(b"HTTP/1.1 ") else 0

    async def hear(self) -> Heard | None:
        """The next frame; None at the end."""
        while True:
            found = self.next_frame()
            if found is not None:
                return found
            more = await self.read()
            if not more:
                return None
            self.unread += more

    def next_frame(self) -> Heard | None:
        data = self.unread
        if len(data) < 2:
            return None
        short = data[1]
        begin = 2 if short < 126 else 4 if short == 126 else 10
        size = short if short < 126 else int.from_bytes(data[2:begin], "big")
        if len(data) < max(begin, begin + size):
            return None
        self.unread = data[begin + size :]
        return Heard(data[0] & 0x0F, data[begin : begin + size])

    async def hear_close(self) -> int:
        """The code with which the server closes, whatever it says before; 0 if it says none."""
        while (found := await self.hear()) is not None:
            if found.opcode == CLOSE:
                return found.code
        return 0

    async def leave(self) -> None:
        """Close in good order."""
        await self.send(closing(1000))
        await self.read_all()

    async def answer_pings(self) -> None:
        """Read on, and answer pings, until the end."""
        while (found := await self.hear()) is not None:
            if found.opcode == PING:
                await self.send(frame(PONG, found.payload))

    async def envelope(self) -> Any:
        """The next envelope; None when the server closes."""
        while not self.envelopes:
            found = await self.hear()
            if found is None or found.opcode == CLOSE:
                return None
            if found.opcode in (TEXT, BINARY):
                value = self.codec.load(found.payload.decode() if found.opcode == TEXT else found.payload)
                self.envelopes.extend(value if isinstance(value, list) else [value])
        return self.envelopes.pop(0)

    async def say(self, *envelopes: Any) -> None:
        """Send envelopes in one frame."""
        found = self.codec.join([self.codec.dump(one) for one in envelopes])
        await self.send(frame(TEXT, found.encode()) if isinstance(found, str) else frame(BINARY, found))

    async def hello(self, **fields: Any) -> Any:
        """Say hello; the answer."""
        await self.say({"t": "hello", "version": 1, **fields})
        return await self.envelope()

    def call(self, op: str, instance: str | None = None, **body: Any) -> dict[str, Any]:
        """The envelope of the next call."""
        self.calls += 1
        return {"t": "call", "id": self.calls, "op": op, "instance": instance, "body": body}

    async def ask(self, op: str, instance: str | None = None, **body: Any) -> Any:
        """Call, and the answer; pushes on the way are passed over."""
        await self.say(self.call(op, instance, **body))
        return await self.answer(self.calls)

    async def answer(self, id: int) -> Any:
        """The answer to a call; other answers are kept until they are asked for, pushes are passed over."""
        while id not in self.answers:
            found = await self.envelope()
            if found is None:
                return None
            if found["t"] == "answer":
                self.answers[found["id"]] = found
        return self.answers.pop(id)

    async def reset(self) -> None:
        """End the connection with a reset."""
        assert isinstance(self.stream, trio.SocketStream)
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await trio.aclose_forcefully(self.stream)

    async def close(self) -> None:
        await trio.aclose_forcefully(self.stream)


# ---------------------------------------------------------------- the gateway


@attrs.frozen(kw_only=True)
class Served:
    """A gateway that runs."""

    gateway: Gateway
    runtime: Runtime
    tokens: Tokens
    port: int
    nursery: trio.Nursery
    peers: list[Peer] = attrs.Factory(list)

    async def raw(self) -> Peer:
        """A peer that has said nothing."""
        peer = Peer(await trio.open_tcp_stream("127.0.0.1", self.port))
        self.peers.append(peer)
        return peer

    async def asks(self, data: bytes) -> Peer:
        """A peer that has sent a request."""
        peer = await self.raw()
        await peer.send(data)
        return peer

    async def upgraded(self, protocol: str = JSON_PROTOCOL) -> Peer:
        """A peer that has its socket, and has not said hello."""
        peer = await self.asks(head(protocol=protocol))
        assert await peer.status() == 101
        peer.codec = CODECS[protocol]
        return peer

    async def welcomed(self, protocol: str = JSON_PROTOCOL, **hello: Any) -> Peer:
        """A peer that was let in."""
        peer = await self.upgraded(protocol)
        answer = await peer.hello(**hello)
        assert answer["t"] == "welcome", answer
        return peer

    async def token(self, tenant: str, *roles: Role, seconds: float | None = None) -> str:
        """The text of a new token."""
        made = await self.tokens.create(tenant_id=tenant, roles=frozenset(roles), seconds=seconds)
        return made.text

    async def settled(self, sockets: int = 0, within: float = 2.0) -> None:
        """Wait until so many sockets are left."""
        await until(lambda: self.gateway.statistics().sockets == sockets, within)


@asynccontextmanager
async def served(
    limits: GatewayLimits = QUICK, tls: ssl.SSLContext | None = None, **settings: Any
) -> AsyncIterator[Served]:
    """A gateway with short deadlines; at its end it has counted no bug."""
    randomness = SystemRandomness()
    async with (
        open_runtime("sqlite:///:memory:", **{"drain_seconds": 0, **settings}) as runtime,
        trio.open_nursery() as nursery,
    ):
        tokens = Tokens(runtime.system.store, SystemClock(), randomness)
        backend = ServedRuntime(runtime.system, tokens, randomness)
        gateway = Gateway(backend, randomness, limits, frozenset({"https://app.example"}))
        tokens.watchers.add(gateway.revoked)
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1", backlog=1024)
        port = listeners[0].socket.getsockname()[1]
        wrapped = [trio.SSLListener(listener, tls, https_compatible=True) for listener in listeners if tls]
        await nursery.start(gateway.serve, wrapped or listeners)
        found = Served(gateway=gateway, runtime=runtime, tokens=tokens, port=port, nursery=nursery)
        try:
            yield found
            assert gateway.failed == 0
        finally:
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                for end in (*listeners, *(peer.stream for peer in found.peers)):
                    await trio.aclose_forcefully(end)


@asynccontextmanager
async def attacked(limits: GatewayLimits = QUICK, **settings: Any) -> AsyncIterator[Served]:
    """A gateway with a well-behaved client on it, which must notice nothing of what happens in the block.

    At its end all other sockets are gone, and no connection but the client's is left.
    """
    async with served(limits, **settings) as found:
        neighbour = await found.welcomed()
        registered = await neighbour.ask("register", "neighbour")
        epoch = registered["body"]["epoch"]
        yield found
        with trio.fail_after(1):
            saved = await neighbour.ask("checkpoint", "neighbour", epoch=epoch, checkpoint_id="c")
        assert saved["body"] == {"found": False, "state": None}
        await found.settled(sockets=1)
        await until(lambda: found.gateway.statistics().connections == 1)


async def until(true: Callable[[], bool], within: float = 2.0) -> None:
    """Wait for something that nobody tells; the sockets are real, so is the time."""
    for _ in range(round(within / 0.002)):
        if true():
            return
        await trio.sleep(0.002)
    assert true()


def resident() -> int:
    """Bytes of memory that this process has."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()
