"""One socket of a gateway, from its first byte to its last, and the connection that it carries.

Rules:

1. Every wait for the peer has a deadline: the head, the hello, each slice that is sent, the answer to a ping,
   the close.
2. Before its hello was judged a peer costs next to nothing, and gets no answer but a refusal.
3. One socket carries a connection at a time. One that was overtaken touches the conversation no more.
4. A frame that took long to take in (they hold up to 8 MiB) makes its sender wait for some times as long, so
   that one client never has the loop for itself.
5. The last words of a socket, and its close code, are said when everything else on it has ended
   (`GatedStream.leave`): no state of the library can keep them back.

    the socket got to | ends with                                  | the connection
    ------------------|--------------------------------------------|------------------------------------
    its head          | an HTTP status                             | there is none
    its hello         | a refusal: 1002, 1007, 1008, 1009, 1013    | there is none
                      | or 4401                                    |
    its welcome       | goodbye (1000)                             | ends in good order
                      | a broken rule or bound (`Post.cut`)        | ends, as by a crash of the client
                      | the peer closes, goes, or is silent (1001) | waits for the grace period
                      | another socket resumes it (4409)           | goes on over there
"""

import json
from typing import Final, Protocol, assert_never

import attrs
import trio
from trio_websocket import ConnectionClosed, WebSocketConnection, wrap_server_stream

from runtara.errors import Draining, RuntaraError, ValidationError
from runtara.transport.backend import Backend
from runtara.transport.connection import Connection
from runtara.transport.guard import BINARY, TEXT, GatedStream, Refusal, close_frame, server_frame
from runtara.transport.handshake import Head, Upgrade, judge, library_head, plain_answer, read_head
from runtara.transport.limits import GatewayLimits
from runtara.transport.session import (
    GOING_AWAY,
    INTERNAL,
    NORMAL,
    POLICY,
    PROTOCOL_ERROR,
    TAKEN_OVER,
    TOO_BIG,
    TRY_LATER,
    UNAUTHORIZED,
    BadCall,
    ServerConversation,
    Violation,
)
from runtara.wire import CODECS, Call, Codec, Frame, Goodbye, Hello, Renew, Welcome

QUEUE: Final = 16
"""Messages that were read from a socket and wait for `Carrier.read`, which never waits for anything else."""
READ_BYTES: Final = 64 * 1024
HEALTH: Final = "/health"
NOT_TEXT: Final = 1007
ILL_FORMED: Final = frozenset({PROTOCOL_ERROR, NOT_TEXT, TOO_BIG})
"""Close codes with which the library gives up a peer."""
LONG_SECONDS: Final = 0.25
LONG_FACTOR: Final = 4
"""A frame that takes longer than so many seconds makes its sender wait for so many times as long (rule 4)."""
MISSED_PONGS: Final = 10
"""In a row, of a peer that sends other things: the library remembers every ping that was not answered."""


class Post(Protocol):
    """What a socket needs of its gateway."""

    limits: GatewayLimits
    backend: Backend
    origins: frozenset[str]
    draining: bool
    carried: "dict[Connection, Carrier]"
    """By which socket a connection is carried now."""

    def greet(self, hello: Hello, codec: Codec) -> tuple[Connection, Welcome]:
        """The connection of a client that said hello. Raises `RuntaraError` if it is not let in."""
        ...

    def lose(self, connection: Connection) -> None:
        """A connection lost its socket: unless it is over, its grace period begins."""
        ...

    def end(self, connection: Connection, crashed: bool) -> None:
        """Forget a connection, and its sessions with it."""
        ...

    def cut(self, connection: Connection, code: int, error: RuntaraError, crashed: bool = True) -> None:
        """Say why a connection ends, and end it."""
        ...


@attrs.frozen
class Farewell:
    """How a socket ends."""

    code: int
    reason: str = ""
    frames: list[Frame] = attrs.Factory(list)

    def as_bytes(self) -> bytes:
        """The last messages, and the close frame."""
        words = [
            server_frame(TEXT, frame.encode()) if isinstance(frame, str) else server_frame(BINARY, frame)
            for frame in self.frames
        ]
        return b"".join(words) + close_frame(self.code, self.reason)


class Carrier:
    """See the module's docstring."""

    def __init__(self, post: Post, stream: trio.abc.Stream) -> None:
        self.post = post
        self.limits = post.limits
        self.stream = GatedStream(stream, post.limits.stream)
        self.welcomed = False
        self.scope = trio.CancelScope()
        """Of everything before the last words."""
        self.carrying = trio.CancelScope()
        """Of the time in which it carries a connection."""
        self.written = trio.Event()
        """Set when no more messages are sent."""

    async def run(self) -> None:
        """Serve the socket.

        Raises:
            BaseExceptionGroup, or an exception: What went wrong, after the peer was told.

        Cancellation: The peer is told, and gets ``close_seconds`` to go.
        """
        last_words = None
        try:
            with self.scope:
                last_words = await self.serve()
        except Exception:
            last_words = self.closing(INTERNAL)
            raise
        finally:
            if last_words is None:
                last_words = self.closing(GOING_AWAY)
            with trio.CancelScope(shield=True):
                with trio.move_on_after(self.limits.close_seconds):
                    await self.stream.leave(last_words)
                await trio.aclose_forcefully(self.stream.stream)

    def closing(self, code: int) -> bytes:
        return Farewell(code).as_bytes() if self.stream.upgraded else b""

    async def serve(self) -> bytes:
        """All but the end; returns the last words."""
        try:
            with trio.fail_after(self.limits.handshake_seconds):
                head = await read_head(self.stream.stream, self.limits.stream)
                if head is None:
                    return b""
                if head.target == HEALTH and "upgrade" not in head.headers:
                    return await self.health(head)
                upgrade = judge(head, self.post.origins)
                if self.post.draining:
                    raise Refusal(503, "the server shuts down")
        except Refusal as refusal:
            return plain_answer(refusal.code, str(refusal))
        except trio.TooSlowError:
            return plain_answer(408, "the request did not come in time")
        async with trio.open_nursery() as nursery:
            farewell = await self.converse(await self.open(upgrade, nursery))
            nursery.cancel_scope.cancel()
        return farewell.as_bytes()

    # ------------------------------------------------------------ the beginning

    async def health(self, head: Head) -> bytes:
        """The only thing that is told without an upgrade."""
        if head.method not in ("GET", "HEAD"):
            raise Refusal(405, "only GET and HEAD are known here")
        ready = not self.post.draining and await self.post.backend.ready()
        body = json.dumps({"ready": ready, "draining": self.post.draining})
        return plain_answer(200 if ready else 503, body, bare=head.method == "HEAD")

    async def open(self, upgrade: Upgrade, nursery: trio.Nursery) -> WebSocketConnection:
        """Have the library upgrade the stream, with a head of our own making."""
        self.stream.opening = library_head(upgrade)
        request = await wrap_server_stream(
            nursery,
            self.stream,
            message_queue_size=QUEUE,
            max_message_size=self.limits.stream.message_bytes,
            receive_buffer_size=READ_BYTES,
        )
        socket = await request.accept(subprotocol=upgrade.protocol)
        self.stream.upgraded = True
        return socket

    async def converse(self, socket: WebSocketConnection) -> Farewell:
        """Take a client in, and carry its connection."""
        assert socket.subprotocol is not None
        codec = CODECS[socket.subprotocol]
        greeter = ServerConversation(codec, 0)
        try:
            with trio.fail_after(self.limits.hello_seconds):
                frame = await socket.get_message()
        except trio.TooSlowError:
            return turned_away(greeter, POLICY, ValidationError("hello", "did not come in time"))
        except ConnectionClosed as closed:
            fault = self.fault_of(closed)
            return Farewell(NORMAL) if fault is None else turned_away(greeter, *fault)
        match greeter.receive(frame):
            case [Hello() as hello]:
                pass
            case [*_, Violation(code=code, error=error)]:
                return turned_away(greeter, code, error)
            case _:
                return turned_away(greeter, POLICY, ValidationError("hello", "must come first"))
        try:
            connection, welcome = self.post.greet(hello, codec)
        except RuntaraError as error:
            return turned_away(greeter, close_code(error), error)
        connection.conversation.open(welcome)
        self.welcomed = self.stream.gate.welcomed = True
        return await self.carry(socket, connection)

    def fault_of(self, closed: ConnectionClosed) -> tuple[int, RuntaraError] | None:
        """What was wrong with the peer's bytes, if that is why the socket is closed."""
        refusal = self.stream.refusal
        if refusal is not None:
            return refusal.code, ValidationError("frame", str(refusal))
        reason = closed.reason
        if reason is not None and reason.code in ILL_FORMED and not self.stream.close_sent:
            return reason.code, ValidationError("frame", reason.reason or "is ill formed")
        return None

    # ------------------------------------------------------------ carrying

    def carries(self, connection: Connection) -> bool:
        return self.post.carried.get(connection) is self

    def finish(self) -> None:
        """The connection is over: what is being sent goes out whole, if that is soon."""
        self.carrying.deadline = trio.current_time() + self.limits.close_seconds

    async def carry(self, socket: WebSocketConnection, connection: Connection) -> Farewell:
        """Read, write and ping until the socket or the connection ends."""
        before = self.post.carried.get(connection)
        self.post.carried[connection] = self
        if before is not None:
            before.carrying.cancel()
        try:
            with self.carrying:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.write, socket, connection, nursery.cancel_scope)
                    nursery.start_soon(self.keep_alive, socket, nursery.cancel_scope)
                    await self.read(socket, connection)
                    if connection.over:
                        await self.written.wait()
                    nursery.cancel_scope.cancel()
        finally:
            overtaken = not self.carries(connection)
            if not overtaken:
                del self.post.carried[connection]
                self.post.lose(connection)
        if overtaken:
            return Farewell(TAKEN_OVER, "another socket resumed the connection")
        if connection.over:
            return Farewell(connection.code, connection.reason, connection.conversation.take_output())
        return Farewell(GOING_AWAY)

    async def read(self, socket: WebSocketConnection, connection: Connection) -> None:
        """Do what the client says, until the socket or the connection is over."""
        try:
            while not connection.over:
                frame = await socket.get_message()
                if not self.carries(connection):
                    return
                began = trio.current_time()
                await self.take(connection, frame)
                took = trio.current_time() - began
                if took > LONG_SECONDS:
                    await trio.sleep(took * LONG_FACTOR)
        except ConnectionClosed as closed:
            fault = self.fault_of(closed)
            if fault is not None and self.carries(connection):
                self.post.cut(connection, *fault)

    async def take(self, connection: Connection, frame: Frame) -> None:
        """Do what a frame says. All of it: its calls are counted as received."""
        for happening in connection.conversation.receive(frame):
            match happening:
                case Violation(code=code, error=error):
                    self.post.cut(connection, code, error)
                case Goodbye():
                    connection.code = NORMAL
                    self.post.end(connection, crashed=False)
                case Call() | BadCall() | Renew():
                    await connection.handle(happening)
                case Hello():
                    raise AssertionError("only a new socket takes a hello")
                case _:
                    assert_never(happening)
        connection.note_kept()

    async def write(
        self, socket: WebSocketConnection, connection: Connection, scope: trio.CancelScope
    ) -> None:
        """Send what there is to say, until the socket or the connection is over."""
        conversation = connection.conversation
        try:
            while self.carries(connection) and not connection.over:
                connection.output = trio.Event()
                if conversation.has_output:
                    for frame in conversation.take_output():
                        await socket.send_message(frame)
                elif connection.leaving:
                    error = Draining("the server shuts down", retry_after_seconds=1.0)
                    self.post.cut(connection, GOING_AWAY, error, crashed=False)
                else:
                    await connection.output.wait()
        except ConnectionClosed:
            return  # the reader hears of it too, when it has taken what came before
        finally:
            self.written.set()
        scope.cancel()

    async def keep_alive(self, socket: WebSocketConnection, scope: trio.CancelScope) -> None:
        """Ping a silent peer, and give it up when it stays silent. Any byte is a sign of life."""
        missed = 0
        while missed < MISSED_PONGS:
            silent_since = self.stream.last_received
            await trio.sleep_until(silent_since + self.limits.ping_seconds)
            if self.stream.last_received > silent_since:
                continue
            with trio.move_on_after(self.limits.pong_seconds) as waiting:
                try:
                    await socket.ping()
                except ConnectionClosed:
                    return
            if self.stream.last_received <= silent_since:
                break
            missed = missed + 1 if waiting.cancelled_caught else 0
        scope.cancel()


def turned_away(greeter: ServerConversation, code: int, error: RuntaraError) -> Farewell:
    """The end of a socket that was not let in."""
    if not greeter.urgent:
        greeter.refuse(error)
    return Farewell(code, error.message, greeter.take_output())


def close_code(error: RuntaraError) -> int:
    """The close code that goes with a refused hello."""
    if error.http_status in (401, 403):
        return UNAUTHORIZED
    return TRY_LATER if error.retryable else POLICY
