"""The client: a `Link` to a runtime over a WebSocket that comes back by itself.

Rules:

1. One task keeps a socket while the client lives: it connects, says hello, reads and writes, and begins again
   with growing, jittered pauses when the socket is lost. Callers never see that; they wait a little longer.
2. A call is taken once by the server, however often the socket is lost (`ClientConversation`). When the
   server itself was started anew, sessions are attached at their epochs first, and then calls are sent again
   under their own request ids.
3. A call that is cancelled leaves the connection as it is: its answer is ignored when it comes.
4. What cannot get better (a refused token, another version) ends the client: every call and session gets the
   error.
"""

import logging
import ssl
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import attrs
import trio
from outcome import Error, Outcome, Value
from trio_websocket import (
    ConnectionClosed,
    DisconnectionTimeout,
    HandshakeError,
    WebSocketConnection,
    wrap_client_stream,
)

from runtara.errors import (
    PayloadTooLarge,
    PeerError,
    RuntaraError,
    RuntimeClosed,
    ValidationError,
    WatchLagged,
    restored,
)
from runtara.link import Sink, Watcher
from runtara.messages import (
    Attach,
    Change,
    ClosedPush,
    Registered,
    Reply,
    Request,
    SessionLost,
    SignalPush,
    SupersededPush,
)
from runtara.operations import NAME_OF, OPERATIONS, PUSH_KINDS
from runtara.randomness import Randomness
from runtara.transport.guard import GuardedStream
from runtara.transport.limits import StreamLimits
from runtara.transport.session import (
    Answered,
    ClientConversation,
    Pending,
    Restarted,
    Violation,
)
from runtara.validation import size_of
from runtara.wire import (
    MSGPACK,
    Answer,
    Codec,
    Failure,
    Goodbye,
    Map,
    Pushed,
    Refused,
    Welcome,
)

logger = logging.getLogger("runtara.transport")
T = TypeVar("T")

SOCKET_ERRORS: Final = (
    OSError,
    HandshakeError,
    ConnectionClosed,
    DisconnectionTimeout,
    trio.TooSlowError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
)
"""What a lost or refused socket raises."""
ATTACH: Final = NAME_OF[Attach]
ENVELOPE_BYTES: Final = 4096
"""Of a call around its body: more than any has."""
QUEUE: Final = 64
READ_BYTES: Final = 64 * 1024
CLIENT: Final = "runtara-python/1"

PUSHES: Final[dict[str, type[Any]]] = {word: kind for kind, word in PUSH_KINDS.items()}
FINAL_CODES: Final = frozenset({"unauthorized", "forbidden", "validation_error"})
"""Refusals of a hello that no second try can heal."""


@attrs.frozen(kw_only=True)
class ClientLimits:
    """Bounds and deadlines of a client."""

    connect_seconds: float = 10.0
    """To the end of the handshake and the welcome."""
    first_pause: float = 0.05
    longest_pause: float = 5.0
    ping_seconds: float = 15.0
    pong_seconds: float = 10.0
    close_seconds: float = 2.0
    message_bytes: int = 64 * 1024 * 1024
    calls: int = 10_000
    """That are unanswered; one more waits."""


@attrs.frozen
class Address:
    """Where a gateway is."""

    host: str
    port: int
    secure: bool
    path: str


def parse_address(url: str) -> Address:
    """Raises `ValidationError` for anything but ``ws://host[:port][/path]`` and ``wss://``."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValidationError("url", str(error)) from None
    if parts.scheme not in ("ws", "wss") or not parts.hostname:
        raise ValidationError("url", "must be ws://host:port or wss://host:port")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ValidationError("url", "must hold no user, password, query or fragment; a token is an argument")
    secure = parts.scheme == "wss"
    return Address(parts.hostname, port or (443 if secure else 8001), secure, parts.path or "/")


def error_of(failure: Failure) -> RuntaraError:
    """An error that came over the connection."""
    after = failure.retry_after_ms
    return restored(
        failure.code,
        failure.message,
        failure.details,
        failure.retryable,
        None if after is None else after / 1000,
    )


class Waiter:
    """A call, and the task that waits for its answer."""

    __slots__ = ("done", "hint", "outcome", "sink")

    def __init__(self, hint: Any, sink: Sink | None) -> None:
        self.done = trio.Event()
        self.outcome: Outcome[Any] = Error(RuntimeClosed("the client is closed"))
        self.hint = hint
        self.sink = sink

    def set(self, outcome: Outcome[Any]) -> None:
        if not self.done.is_set():
            self.outcome = outcome
            self.done.set()


@attrs.define(eq=False)
class HeldSession:
    """A session of this client."""

    epoch: int
    sink: Sink


class Client:
    """See the module's docstring. Made by `runtara.connect`."""

    def __init__(
        self,
        address: Address,
        *,
        token: str | None,
        tenant: str | None,
        randomness: Randomness,
        codec: Codec = MSGPACK,
        tls: ssl.SSLContext | None = None,
        limits: ClientLimits | None = None,
    ) -> None:
        self.address = address
        self.token = token
        self.tenant = tenant
        self.randomness = randomness
        self.tls = tls
        self.limits = limits or ClientLimits()
        self.conversation = ClientConversation(codec)
        self.waiters: dict[Pending, Waiter] = {}
        self.sessions: dict[str, HeldSession] = {}
        self.watchers: dict[int, tuple[str, Watcher]] = {}
        self.next_watch = 0
        self.output = trio.Event()
        self.gone = trio.Event()
        """Set when a socket has ended."""
        self.settled = trio.Event()
        """Set while calls may be made: cleared while sessions are attached to a new server."""
        self.settled.set()
        self.welcome: Welcome | None = None
        self.first_welcome = trio.Event()
        self.draining = False
        self.fatal: RuntaraError | None = None
        self.room = trio.Event()
        self.nursery: trio.Nursery | None = None
        self.left: list[Pending] = []
        """Calls that servers which are gone have not answered; they wait until the sessions are attached."""
        self.restarts = 0

    def __repr__(self) -> str:
        return f"<Client of {self.address.host}:{self.address.port}>"

    @property
    def codec(self) -> Codec:
        return self.conversation.codec

    # ------------------------------------------------------------ the socket

    async def run(self) -> None:
        """Keep a connection until cancelled, or until it cannot be had (`fatal`)."""
        try:
            async with trio.open_nursery() as nursery:
                self.nursery = nursery
                await self.keep_socket()
                nursery.cancel_scope.cancel()
        finally:
            self.close(self.fatal or RuntimeClosed("the client is closed"))

    async def keep_socket(self) -> None:
        failures = 0
        while self.fatal is None:
            began = trio.current_time()
            try:
                await self.carry_one_socket()
            except* SOCKET_ERRORS as group:
                logger.info("%r: no connection: %r", self, group.exceptions)
            except* ValidationError as group:
                logger.error("%r: the server's frame is ill formed", self, exc_info=group)
                self.fatal = PeerError(f"the server broke the protocol: {group.exceptions[0]}")
            failures = 0 if trio.current_time() - began > self.limits.longest_pause else failures + 1
            if self.fatal is None:
                await trio.sleep(self.pause(failures))

    def pause(self, failures: int) -> float:
        """Full jitter: so that many clients of one server do not come back at once."""
        longest: float = min(self.limits.longest_pause, self.limits.first_pause * 2 ** min(failures, 16))
        return longest * (0.5 + 0.5 * self.randomness.fraction())

    async def carry_one_socket(self) -> None:
        broken = trio.Event()
        with trio.fail_after(self.limits.connect_seconds):
            stream = await self.open_stream(broken)
        try:
            await self.speak(stream, broken)
        finally:
            await trio.aclose_forcefully(stream.stream)

    async def speak(self, stream: GuardedStream, broken: trio.Event) -> None:
        """The WebSocket on a stream, from its handshake to its end."""
        address = self.address
        async with trio.open_nursery() as nursery:
            greeted = trio.Event()
            nursery.start_soon(self.end_when_broken, broken, greeted, nursery.cancel_scope)
            with trio.fail_after(self.limits.connect_seconds):
                socket = await wrap_client_stream(
                    nursery,
                    stream,  # type: ignore[arg-type]  # any stream will do
                    f"{address.host}:{address.port}",
                    address.path,
                    subprotocols=[self.codec.name],
                    message_queue_size=QUEUE,
                    max_message_size=self.limits.message_bytes,
                    receive_buffer_size=READ_BYTES,
                )
                await socket.send_message(self.conversation.hello(self.token, CLIENT, self.tenant))
                first = await socket.get_message()
            greeted.set()
            try:
                self.take(first)
                await self.carry(socket, stream)
            finally:
                self.conversation.socket_lost()
                self.gone.set()
                nursery.cancel_scope.cancel()

    async def end_when_broken(self, broken: trio.Event, greeted: trio.Event, scope: trio.CancelScope) -> None:
        """A broken stream ends the socket, whatever the library still waits for.

        What was read before is looked at first: it may hold the reason.
        """
        await broken.wait()
        await trio.sleep(self.limits.close_seconds if greeted.is_set() else self.limits.first_pause)
        scope.cancel()

    async def open_stream(self, broken: trio.Event) -> GuardedStream:
        address = self.address
        stream: trio.abc.Stream = await trio.open_tcp_stream(address.host, address.port)
        if address.secure:
            tls = self.tls or ssl.create_default_context()
            stream = trio.SSLStream(stream, tls, server_hostname=address.host, https_compatible=True)
        return GuardedStream(stream, StreamLimits(), broken.set)

    async def carry(self, socket: WebSocketConnection, stream: GuardedStream) -> None:
        """Read, write and ping until the socket is lost."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.read, socket, nursery.cancel_scope)
            nursery.start_soon(self.write, socket, nursery.cancel_scope)
            nursery.start_soon(self.keep_alive, socket, stream, nursery.cancel_scope)

    async def read(self, socket: WebSocketConnection, scope: trio.CancelScope) -> None:
        try:
            while self.fatal is None:
                frame = await socket.get_message()
                self.take(frame)
                if self.conversation.has_output:
                    self.output.set()
        except ConnectionClosed:
            pass
        scope.cancel()

    async def write(self, socket: WebSocketConnection, scope: trio.CancelScope) -> None:
        try:
            while True:
                self.output = trio.Event()
                for frame in self.conversation.take_output():
                    await socket.send_message(frame)
                if not self.conversation.has_output:
                    await self.output.wait()
        except ConnectionClosed:
            scope.cancel()

    async def keep_alive(
        self, socket: WebSocketConnection, stream: GuardedStream, scope: trio.CancelScope
    ) -> None:
        """Ping a silent server, and give it up when it stays silent. Any byte is a sign of life."""
        while True:
            silent_since = stream.last_received
            await trio.sleep_until(silent_since + self.limits.ping_seconds)
            if stream.last_received > silent_since:
                continue
            with trio.move_on_after(self.limits.pong_seconds):
                try:
                    await socket.ping()
                except ConnectionClosed:
                    return
            if stream.last_received <= silent_since:
                logger.info("%r: the server is silent", self)
                await trio.aclose_forcefully(stream.stream)
                scope.cancel()
                return

    # ------------------------------------------------------------ what arrives

    def take(self, frame: str | bytes) -> None:
        for happening in self.conversation.receive(frame):
            match happening:
                case Welcome():
                    self.welcomed(happening)
                case Restarted(welcome=welcome):
                    self.welcomed(welcome)
                    self.restart()
                case Answered(pending=pending, answer=answer):
                    self.answered(pending, answer)
                case Pushed():
                    self.pushed(happening)
                case Refused(error=failure):
                    self.refused(error_of(failure))
                case Violation(error=error):
                    logger.error("%r: the server broke the protocol: %s", self, error)
                    raise ConnectionClosed(None)

    def welcomed(self, welcome: Welcome) -> None:
        self.welcome = welcome
        self.draining = False
        self.first_welcome.set()
        self.output.set()

    def refused(self, error: RuntaraError) -> None:
        if error.code in FINAL_CODES and not error.retryable:
            self.fatal = error
        logger.info("%r: refused: %s", self, error)

    def answered(self, pending: Pending, answer: Answer) -> None:
        waiter = self.waiters.pop(pending)
        self.room.set()
        if answer.error is not None:
            waiter.set(Error(error_of(answer.error)))
            return
        try:
            reply = self.codec.unpack(answer.body, waiter.hint) if waiter.hint is not None else answer.body
        except ValidationError as error:
            waiter.set(Error(PeerError(f"the answer to {pending.op} is ill formed: {error}")))
            return
        self.note_session(pending, waiter, reply)
        waiter.set(Value(reply))

    def note_session(self, pending: Pending, waiter: Waiter, reply: object) -> None:
        if isinstance(reply, Registered) and waiter.sink is not None and pending.instance is not None:
            if waiter.sink.abandoned:
                self.leave(pending.instance, reply.epoch)
            else:
                self.sessions[pending.instance] = HeldSession(reply.epoch, waiter.sink)

    def leave(self, instance_id: str, epoch: int) -> None:
        """End a session that nobody wants; nobody waits for the answer."""
        self.send(instance_id, SessionLost(epoch=epoch, crashed=False), None)

    def pushed(self, push: Pushed) -> None:
        if push.kind == "change":
            self.changed(push.body)
        elif push.kind == "watch_ended":
            found = self.watchers.pop(number_of(push.body), None)
            if found is not None:
                found[1](error_of(self.codec.unpack(push.body.get("error"), Failure)))
        elif push.kind == "drain":
            self.draining = True
        elif push.instance is not None:
            self.session_push(push.instance, push)

    def changed(self, body: Map) -> None:
        found = self.watchers.get(number_of(body))
        if found is not None:
            found[1](self.codec.unpack(body.get("change"), Change))

    def session_push(self, instance_id: str, push: Pushed) -> None:
        held = self.sessions.get(instance_id)
        if held is None or held.epoch != push.epoch:
            return
        if push.kind == "ended":
            del self.sessions[instance_id]
            held.sink.end(error_of(self.codec.unpack(push.body.get("error"), Failure)))
            return
        kind = PUSHES.get(push.kind)
        if kind is None:
            return  # of a newer server
        message = self.codec.unpack(push.body, kind)
        if isinstance(message, SupersededPush | ClosedPush):
            del self.sessions[instance_id]
        held.sink.push(message)

    # ------------------------------------------------------------ a server that was started anew

    def restart(self) -> None:
        """Attach the sessions, then send again what was not answered (rule 2)."""
        self.restarts += 1
        for pending in self.conversation.restart():
            if pending.op == ATTACH:  # to a server that is gone, too: it is done anew
                self.waiters.pop(pending).set(Error(RuntimeClosed("the server is gone")))
            elif pending in self.waiters:
                self.left.append(pending)
        if self.settled.is_set():
            self.settled = trio.Event()
        for _, watcher in self.watchers.values():
            watcher(WatchLagged("the server was started again"))
        self.watchers.clear()
        assert self.nursery is not None
        self.nursery.start_soon(self.attach_all, self.restarts)

    async def attach_all(self, restarts: int) -> None:
        """Goes on over lost sockets; ends when the server is started yet again."""
        async with trio.open_nursery() as nursery:
            for instance_id, held in list(self.sessions.items()):
                nursery.start_soon(self.attach, instance_id, held, restarts)
        if restarts != self.restarts:
            return
        left, self.left = self.left, []
        for pending in left:
            self.conversation.queue(pending)
        self.settled.set()
        self.output.set()

    async def attach(self, instance_id: str, held: HeldSession, restarts: int) -> None:
        """Go on with one session; if that is not possible it is over, and its holder is told."""
        while self.sessions.get(instance_id) is held and restarts == self.restarts:
            waiter = self.send(instance_id, Attach(epoch=held.epoch), None)
            await waiter.done.wait()
            try:
                reply = waiter.outcome.unwrap()
            except RuntaraError as error:
                if restarts != self.restarts:
                    return
                if error.retryable:
                    await trio.sleep(self.limits.first_pause)
                    continue
                if self.sessions.get(instance_id) is held:
                    del self.sessions[instance_id]
                held.sink.end(error)
                return
            for signal in reply.signals:
                held.sink.push(SignalPush(signal=signal))
            return

    # ------------------------------------------------------------ calls

    def send(self, instance_id: str | None, message: Request, sink: Sink | None) -> Waiter:
        """Queue a request; the answer comes to the waiter."""
        name = NAME_OF[type(message)]
        body = self.codec.pack(message)
        self.check_size(body, size_of(message))
        return self.call(name, instance_id, body, OPERATIONS[name].reply, sink)

    def check_size(self, body: Map, roughly: int) -> None:
        """A frame that the server does not take would cost the socket, again and again.

        Raises:
            PayloadTooLarge: The call is over the server's ``message_bytes``.
        """
        limit = None if self.welcome is None else self.welcome.message_bytes
        if limit is None or roughly < limit // 2:
            return
        size = len(self.codec.dump(body)) + ENVELOPE_BYTES
        if size > limit:
            raise PayloadTooLarge("message", size, limit)

    def call(
        self, op: str, instance_id: str | None, body: Map, hint: Any, sink: Sink | None = None
    ) -> Waiter:
        waiter = Waiter(hint, sink)
        self.waiters[self.conversation.call(op, instance_id, body)] = waiter
        self.output.set()
        return waiter

    async def ready(self) -> None:
        """Wait until a call may be made. Raises what ended the client."""
        while self.fatal is None and (not self.settled.is_set() or len(self.waiters) >= self.limits.calls):
            if not self.settled.is_set():
                await self.settled.wait()
            else:
                self.room = trio.Event()
                await self.room.wait()
        if self.fatal is not None:
            raise self.fatal

    async def request(self, instance_id: str, message: Request, sink: Sink | None = None) -> Reply:
        """See `Link`."""
        await self.ready()
        reply: Reply = await answer_of(self.send(instance_id, message, sink))
        return reply

    async def ask(self, op: str, instance_id: str | None, arguments: object, hint: Any) -> Any:
        """Ask a question; the answer is structured as ``hint``."""
        await self.ready()
        return await answer_of(self.call(op, instance_id, self.codec.pack(arguments), hint))

    # ------------------------------------------------------------ watches

    async def watch(self, instance_id: str, watcher: Watcher) -> None:
        await self.ready()
        number, self.next_watch = self.next_watch, self.next_watch + 1
        self.watchers[number] = (instance_id, watcher)
        try:
            await answer_of(self.call("watch", instance_id, {"watch": number}, None))
        except BaseException:
            self.watchers.pop(number, None)
            self.call("unwatch", None, {"watch": number}, None)
            raise

    def unwatch(self, instance_id: str, watcher: Watcher) -> None:
        for number, found in list(self.watchers.items()):
            if found == (instance_id, watcher):
                del self.watchers[number]
                self.call("unwatch", None, {"watch": number}, None)

    # ------------------------------------------------------------ sessions

    def give_up(self, instance_id: str, sink: Sink) -> None:
        held = self.sessions.get(instance_id)
        if held is not None and held.sink is sink:
            del self.sessions[instance_id]
            self.leave(instance_id, held.epoch)

    def end_session(self, instance_id: str, epoch: int, crashed: bool, told: bool) -> None:
        held = self.sessions.get(instance_id)
        if held is not None and held.epoch == epoch:
            del self.sessions[instance_id]

    # ------------------------------------------------------------ the end

    async def leave_server(self) -> None:
        """Say goodbye, if the socket is there, so that no session has to wait for its grace period.

        The server answers by closing the socket, once everything that was said before is done with.
        """
        self.conversation.say(Goodbye())
        self.gone = trio.Event()
        self.output.set()
        if self.conversation.has_output:
            with trio.move_on_after(self.limits.close_seconds) as scope:
                scope.shield = True
                await self.gone.wait()

    def close(self, error: RuntaraError) -> None:
        """Everything that waits gets ``error``."""
        self.fatal = self.fatal or error
        for waiter in self.waiters.values():
            waiter.set(Error(error))
        self.waiters.clear()
        for held in self.sessions.values():
            held.sink.end(error)
        self.sessions.clear()
        for _, watcher in self.watchers.values():
            watcher(error)
        self.watchers.clear()
        self.settled.set()
        self.room.set()
        self.first_welcome.set()


async def answer_of(waiter: Waiter) -> Any:
    """The answer, once it is there. An error is raised anew for its caller."""
    await waiter.done.wait()
    return waiter.outcome.unwrap()


def number_of(body: Map) -> int:
    number = body.get("watch")
    return number if type(number) is int else -1
