"""The gateway: a WebSocket server in front of a `Backend`.

Rules:

1. One `Carrier` per socket, with a boundary around it: whatever a peer sends, and whatever goes wrong with
   it, ends that socket only. A bug is logged; a peer's nonsense is counted.
2. A connection outlives its sockets for the grace period; a socket that resumes it takes it from the one that
   had it.
3. A token that ends, ends the connections that stand on it: at once when it is revoked, within
   ``token_seconds`` when it expires.
4. What all peers together may cost is bounded (`GatewayLimits`).
"""

import hmac
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

import attrs
import trio
from trio_websocket import ConnectionClosed, HandshakeError

from runtara.errors import (
    Draining,
    Overloaded,
    RuntaraError,
    Unauthorized,
    ValidationError,
)
from runtara.link import Identity
from runtara.operations import role_words
from runtara.randomness import Randomness
from runtara.transport.backend import Backend
from runtara.transport.carrier import Carrier
from runtara.transport.connection import Connection
from runtara.transport.handshake import plain_answer
from runtara.transport.limits import GatewayLimits
from runtara.transport.session import GOING_AWAY, POLICY, TRY_LATER, UNAUTHORIZED, ServerConversation
from runtara.wire import VERSION, Codec, Hello, Welcome

logger = logging.getLogger("runtara.transport")


@attrs.frozen(kw_only=True)
class GatewayStatistics:
    """The gateway at one moment."""

    sockets: int
    connections: int
    sessions: int
    kept_bytes: int
    """Answers and pushes that clients have not confirmed."""
    refused: int
    """Sockets that ended before their hello was accepted, since the start."""
    dropped: int
    """Connections that were ended for breaking a rule or a limit, or for their token."""
    failed: int
    """Sockets that ended by a bug; each was logged."""


class Gateway:
    """See the module's docstring."""

    def __init__(
        self,
        backend: Backend,
        randomness: Randomness,
        limits: GatewayLimits | None = None,
        origins: frozenset[str] = frozenset(),
    ) -> None:
        self.backend = backend
        self.randomness = randomness
        self.limits = limits or GatewayLimits()
        self.origins = origins
        """Of the browser pages that may connect; programs send none."""
        self.carriers: set[Carrier] = set()
        """One for each socket."""
        self.connections: dict[str, Connection] = {}
        self.per_tenant: Counter[str] = Counter()
        self.carried: dict[Connection, Carrier] = {}
        self.lost: dict[Connection, float] = {}
        """Connections without a socket, by the end of their grace period, soonest first."""
        self.lost_changed = trio.Event()
        self.kept_bytes = 0
        self.refused = 0
        self.dropped = 0
        self.failed = 0
        self.draining = False
        self.nursery: trio.Nursery | None = None
        self.empty = trio.Event()
        """Set when the last socket is gone."""

    # ------------------------------------------------------------ sockets

    async def serve(
        self,
        listeners: list[trio.abc.Listener[trio.abc.Stream]],
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept sockets until cancelled. A listener that fails for a while is tried again.

        Cancellation: Peers are told (1001) within ``close_seconds``, and sessions are left in good order.
        """
        try:
            async with trio.open_nursery() as nursery:
                self.nursery = nursery
                for listener in listeners:
                    nursery.start_soon(self.accept, listener, nursery)
                nursery.start_soon(self.end_lost)
                nursery.start_soon(self.look_at_tokens)
                task_status.started()
        finally:
            for connection in list(self.connections.values()):
                self.end(connection, crashed=False)

    async def accept(self, listener: trio.abc.Listener[trio.abc.Stream], nursery: trio.Nursery) -> None:
        failing = False
        while not self.draining:
            try:
                stream = await listener.accept()
            except trio.ClosedResourceError:
                return
            except OSError as error:  # no file descriptors, for one
                if not failing:
                    logger.warning("sockets cannot be accepted: %s", error)
                failing = True
                await trio.sleep(0.1)
                continue
            failing = False
            if len(self.carriers) < self.limits.sockets:
                carrier = Carrier(self, stream)
                self.carriers.add(carrier)
                nursery.start_soon(self.serve_socket, carrier)
            else:
                self.refused += 1
                nursery.start_soon(self.turn_away, stream)

    async def turn_away(self, stream: trio.abc.Stream) -> None:
        """There are too many sockets: say so, if that takes no time."""
        try:
            with trio.move_on_after(self.limits.close_seconds):
                if isinstance(stream, trio.SocketStream):
                    await stream.send_all(plain_answer(503, "too many sockets are open"))
        except trio.BrokenResourceError:
            pass
        finally:
            with trio.CancelScope(shield=True):
                await trio.aclose_forcefully(stream)

    async def serve_socket(self, carrier: Carrier) -> None:
        """One socket, from its first byte to its last (rule 1)."""
        try:
            await carrier.run()
        except* (
            ConnectionClosed,
            HandshakeError,
            trio.BrokenResourceError,
            trio.ClosedResourceError,
            OSError,
        ) as group:
            logger.debug("a socket ended: %s", [type(error).__name__ for error in group.exceptions])
        except* Exception as group:
            self.failed += 1
            logger.error("a socket failed", exc_info=group)
        finally:
            self.refused += not carrier.welcomed
            self.carriers.discard(carrier)
            if not self.carriers:
                self.empty.set()

    # ------------------------------------------------------------ connections

    def greet(self, hello: Hello, codec: Codec) -> tuple[Connection, Welcome]:
        """The connection of a client that said hello.

        Raises:
            RuntaraError: It is not let in.
        """
        if hello.version != VERSION:
            raise ValidationError("version", f"must be {VERSION}")
        identity = self.backend.authenticate(hello.token, hello.tenant)
        connection = self.resumed(hello, identity, codec)
        known = connection is not None
        if connection is None:
            connection = self.new_connection(identity, codec)
        connection.identity = identity
        limits = self.limits
        welcome = Welcome(
            version=VERSION,
            connection=connection.id,
            secret=connection.secret,
            resumed=known,
            received=connection.conversation.received,
            tenant=identity.tenant_id,
            roles=role_words(identity.roles),
            grace_ms=round(limits.connection.grace_seconds * 1000),
            message_bytes=limits.stream.message_bytes,
            in_flight=limits.connection.in_flight,
        )
        return connection, welcome

    def resumed(self, hello: Hello, identity: Identity, codec: Codec) -> Connection | None:
        """The connection that a client comes back to; None if it has to begin anew."""
        resume = hello.resume
        found = None if resume is None else self.connections.get(resume.connection)
        if resume is None or found is None or found.over or found.codec is not codec:
            return None
        if not hmac.compare_digest(found.secret.encode(), resume.secret.encode()):
            return None
        if not identity.same_rights(found.identity):
            return None
        if not found.conversation.next_socket(resume.seen):
            self.cut(found, POLICY, ValidationError("seen", "is not what can have been seen"))
            return None
        self.lost.pop(found, None)
        return found

    def new_connection(self, identity: Identity, codec: Codec) -> Connection:
        if self.draining:
            raise Draining("the gateway is shutting down", retry_after_seconds=1.0)
        limits = self.limits
        if len(self.connections) >= limits.connections:
            raise Overloaded(f"{limits.connections} connections are open", retry_after_seconds=5.0)
        if self.per_tenant[identity.tenant_id] >= limits.connections_per_tenant:
            raise Overloaded(
                f"{limits.connections_per_tenant} connections of this tenant are open",
                retry_after_seconds=5.0,
            )
        connection = Connection(
            self.randomness.identifier(),
            self.randomness.secret(),
            identity,
            ServerConversation(codec, limits.connection.buffer_bytes),
            self.backend,
            limits.connection,
            self,
        )
        self.connections[connection.id] = connection
        self.per_tenant[identity.tenant_id] += 1
        return connection

    def spawn(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run something that belongs to a connection, beside the reading of its socket."""
        assert self.nursery is not None
        self.nursery.start_soon(self.run_apart, work)

    async def run_apart(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception:
            self.failed += 1
            logger.exception("work of a connection failed")

    def note_kept(self, bytes: int) -> None:
        """So many bytes more, or fewer, are kept for clients (rule 4)."""
        self.kept_bytes += bytes
        if bytes > 0 and self.kept_bytes > self.limits.total_buffer_bytes:
            worst = max(self.connections.values(), key=lambda connection: connection.kept_bytes)
            error = Overloaded("too much is not confirmed, over all clients", retry_after_seconds=1.0)
            self.cut(worst, TRY_LATER, error)

    # ------------------------------------------------------------ the end of a connection

    def lose(self, connection: Connection) -> None:
        """A connection lost its socket: unless it is over, its grace period begins."""
        if connection.over:
            return
        connection.conversation.socket_lost()
        self.lost[connection] = trio.current_time() + self.limits.connection.grace_seconds
        self.lost_changed.set()

    async def end_lost(self) -> None:
        """End the connections that do not come back. The grace period is the same for all of them."""
        while True:
            self.lost_changed = trio.Event()
            first = next(iter(self.lost), None)
            if first is None:
                await self.lost_changed.wait()
                continue
            deadline = self.lost[first]
            await trio.sleep_until(deadline)
            if self.lost.get(first) == deadline:
                logger.info("%r did not come back", first)
                self.end(first, crashed=True)

    def end(self, connection: Connection, crashed: bool) -> None:
        """Forget a connection, and its sessions with it."""
        connection.end(crashed)
        self.lost.pop(connection, None)
        carrier = self.carried.get(connection)
        if carrier is not None:
            carrier.finish()
        if self.connections.pop(connection.id, None) is not None:
            tenant = connection.identity.tenant_id
            self.per_tenant[tenant] -= 1
            if not self.per_tenant[tenant]:
                del self.per_tenant[tenant]

    def cut(self, connection: Connection, code: int, error: RuntaraError, crashed: bool = True) -> None:
        """Say why a connection ends, and end it."""
        if connection.over:
            return
        if not connection.conversation.is_over:
            connection.conversation.refuse(error)
        connection.code, connection.reason = code, error.message
        if code != GOING_AWAY:
            self.dropped += 1
            logger.info("%r is ended: %s, %d", connection, error.code, code)
        self.end(connection, crashed)

    def revoked(self, token_id: str) -> None:
        """A token is not good any more: its connections end."""
        self.cut_unauthorized(lambda identity: identity.token_id == token_id)

    async def look_at_tokens(self) -> None:
        """End the connections whose tokens are not good any more (rule 3)."""
        while True:
            await trio.sleep(self.limits.token_seconds)
            try:
                self.cut_unauthorized(lambda identity: not self.backend.lasting(identity))
            except Exception:
                self.failed += 1
                logger.exception("the tokens could not be looked at")

    def cut_unauthorized(self, wrong: Callable[[Identity], bool]) -> None:
        for connection in list(self.connections.values()):
            if wrong(connection.identity):
                self.cut(connection, UNAUTHORIZED, Unauthorized("the token is not good any more"))

    # ------------------------------------------------------------ the end

    def begin_drain(self) -> None:
        """Take no new connections, and tell those that are here."""
        self.draining = True
        for connection in list(self.connections.values()):
            connection.push("drain", None, None, {})

    async def finish_drain(self) -> None:
        """Close all sockets; what was said before reaches them first, within ``close_seconds``."""
        self.draining = True
        for connection in list(self.connections.values()):
            connection.leaving = True
            connection.output.set()
        for carrier in list(self.carriers):
            if not carrier.welcomed:
                carrier.scope.cancel()
        with trio.move_on_after(2 * self.limits.close_seconds):
            while self.carriers:
                self.empty = trio.Event()
                await self.empty.wait()
        for connection in list(self.connections.values()):
            self.end(connection, crashed=False)
        for carrier in list(self.carriers):
            carrier.scope.cancel()

    def statistics(self) -> GatewayStatistics:
        return GatewayStatistics(
            sockets=len(self.carriers),
            connections=len(self.connections),
            sessions=sum(len(connection.sessions) for connection in self.connections.values()),
            kept_bytes=self.kept_bytes,
            refused=self.refused,
            dropped=self.dropped,
            failed=self.failed,
        )
