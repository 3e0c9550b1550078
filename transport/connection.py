"""One connection of a gateway: the conversation, its sessions, its calls and its watches.

Rules:

1. A connection outlives its sockets. While it has none it keeps its sessions for the grace period; pushes
   wait in the conversation, within its bound.
2. Calls are given to their instances in the order in which they arrived; answers leave as they come.
3. Nothing here blocks the reader of the socket. Calls for which the server has no room yet wait in a line of
   their own, and questions are asked a few at a time; the reader goes on to see what is confirmed, and pongs.
4. A session begins for the client with the answer to its registration; what is pushed before waits for it.
5. Everything has a bound (`ConnectionLimits`). A call over a bound is answered with a retryable error; a
   connection over one is ended with an error and a close code.
6. Of what the client has not confirmed there may be ``buffer_bytes``. Over a half, calls are refused; over
   three quarters, an answer is left out for a retryable error; over all of it, the connection ends.
"""

import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, Protocol

import attrs
import trio

from runtara.errors import (
    Forbidden,
    Overloaded,
    RuntaraError,
    RuntimeFault,
    Unauthorized,
    ValidationError,
    WatchLagged,
)
from runtara.link import Identity
from runtara.messages import (
    Attach,
    Change,
    ClosedPush,
    Push,
    Register,
    Registered,
    Reply,
    SessionLost,
    SupersededPush,
)
from runtara.operations import OPERATIONS, PUSH_KINDS, Operation, role_words
from runtara.transport.backend import Backend
from runtara.transport.limits import ConnectionLimits
from runtara.transport.session import (
    POLICY,
    TRY_LATER,
    UNAUTHORIZED,
    BadCall,
    ServerConversation,
    failure_of,
)
from runtara.validation import size_of
from runtara.wire import Call, Codec, Map, Renew

logger = logging.getLogger("runtara.transport")


ENDINGS: Final = frozenset({"superseded", "closed", "ended"})
"""Pushes after which a session is over."""


class Owner(Protocol):
    """What a connection needs of its gateway."""

    def spawn(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run something beside the reading of the socket. It must not raise."""
        ...

    def cut(self, connection: "Connection", code: int, error: RuntaraError) -> None:
        """End the connection for breaking a rule or a bound."""
        ...

    def note_kept(self, bytes: int) -> None:
        """So many bytes more (or fewer) are kept for the client of a connection."""
        ...


class SessionSink:
    """The pushes of one session on their way to the client."""

    __slots__ = ("connection", "early", "epoch", "instance_id")

    def __init__(self, connection: "Connection", instance_id: str) -> None:
        self.connection = connection
        self.instance_id = instance_id
        self.epoch: int | None = None
        """None until the registration was answered (rule 3)."""
        self.early: list[tuple[str, Map]] = []

    @property
    def abandoned(self) -> bool:
        return self.connection.over

    def push(self, push: Push) -> None:
        self.say(PUSH_KINDS[type(push)], self.connection.codec.pack(push))
        if isinstance(push, SupersededPush | ClosedPush):
            self.connection.drop_session(self)

    def end(self, error: RuntaraError) -> None:
        self.say("ended", {"error": self.connection.codec.pack(failure_of(error))})
        self.connection.drop_session(self)

    def say(self, kind: str, body: Map) -> None:
        if self.epoch is None:
            self.early.append((kind, body))
        else:
            self.connection.push(kind, self.instance_id, self.epoch, body)

    def begin(self, epoch: int) -> None:
        """The registration was answered."""
        self.epoch = epoch
        early, self.early = self.early, []
        for kind, body in early:
            self.connection.push(kind, self.instance_id, epoch, body)


@attrs.frozen
class Waiting:
    """A call that waits for room (rule 3)."""

    call: Call
    submit: Callable[[], Awaitable[None]]
    size: int
    deadline: float


class Connection:
    """See the module's docstring."""

    def __init__(
        self,
        id: str,
        secret: str,
        identity: Identity,
        conversation: ServerConversation,
        backend: Backend,
        limits: ConnectionLimits,
        owner: Owner,
    ) -> None:
        self.id = id
        self.secret = secret
        self.identity = identity
        self.conversation = conversation
        self.backend = backend
        self.limits = limits
        self.owner = owner
        self.sessions: dict[str, SessionSink] = {}
        self.in_flight: dict[int, str | None] = {}
        self.per_instance: Counter[str] = Counter()
        self.opening: set[int] = set()
        """Calls that ask for a session."""
        self.line: deque[Waiting] = deque()
        self.line_bytes = 0
        self.questions: deque[Call] = deque()
        self.asking = 0
        """Tasks that ask questions."""
        self.watches: dict[int, tuple[str, Callable[[Change | RuntaraError], None]]] = {}
        self.bad_since = 0.0
        self.bad_calls = 0
        """Since ``bad_since``."""
        self.kept_bytes = 0
        """As the owner knows them."""
        self.output = trio.Event()
        """Set when there is something to send, or the socket must go."""
        self.leaving = False
        """Whether it ends when all that was said is out."""
        self.code = POLICY
        self.reason = ""
        """The close code and why, when it is over."""
        self.over = False

    def __repr__(self) -> str:
        return f"<Connection {self.id} of {self.identity.tenant_id!r}>"

    @property
    def codec(self) -> Codec:
        return self.conversation.codec

    def key(self, instance_id: str) -> tuple[str, str]:
        return (self.identity.tenant_id, instance_id)

    # ------------------------------------------------------------ out

    def push(self, kind: str, instance_id: str | None, epoch: int | None, body: Map) -> None:
        if not self.over:
            self.conversation.push(kind, instance_id, epoch, body)
            self.said()

    def answer(self, id: int, body: Any = None, error: RuntaraError | None = None) -> None:
        """Answer a call; it is not in flight any more."""
        self.landed(id)
        if self.over:
            return
        self.conversation.answer(id, body, error)
        self.said()
        if isinstance(error, ValidationError):
            self.count_bad_call()

    def landed(self, id: int) -> None:
        instance_id = self.in_flight.pop(id, None)
        self.opening.discard(id)
        if instance_id is not None:
            self.per_instance[instance_id] -= 1
            if not self.per_instance[instance_id]:
                del self.per_instance[instance_id]

    def said(self) -> None:
        """There is something to send."""
        self.output.set()
        self.note_kept()
        if self.conversation.overflowed and not self.over:
            self.owner.cut(self, TRY_LATER, Overloaded("too much is not confirmed", retry_after_seconds=1.0))

    def note_kept(self) -> None:
        """Tell the owner what has changed of the bytes that are kept."""
        kept = 0 if self.over else self.conversation.kept_bytes
        more, self.kept_bytes = kept - self.kept_bytes, kept
        if more:
            self.owner.note_kept(more)

    @property
    def crowded(self) -> bool:
        """Whether a large answer must wait (rule 6)."""
        return self.conversation.kept_bytes > self.limits.buffer_bytes // 4 * 3

    # ------------------------------------------------------------ in

    async def handle(self, happening: Call | Renew | BadCall) -> None:
        """Do what an envelope asked for. Never blocks (rule 3), and never raises."""
        if self.over:
            return
        match happening:
            case Call():
                await self.call(happening)
            case BadCall():
                self.said()
                self.count_bad_call()
            case Renew(token=token):
                self.renew(token)

    def count_bad_call(self) -> None:
        now = trio.current_time()
        if now >= self.bad_since + 60:
            self.bad_since, self.bad_calls = now, 0
        self.bad_calls += 1
        if self.bad_calls > self.limits.bad_calls and not self.over:
            problem = f"more than {self.limits.bad_calls} calls in a minute were wrong"
            self.owner.cut(self, POLICY, ValidationError("call", problem))

    def renew(self, token: str) -> None:
        """Take a new token of the same identity; anything else ends the connection."""
        mine = self.identity
        try:
            identity = self.backend.authenticate(token, mine.tenant_id)
            if not identity.same_rights(mine):
                raise Unauthorized("the new token is of another identity")
        except RuntaraError as error:
            self.owner.cut(self, UNAUTHORIZED, Unauthorized(f"the token was not renewed: {error.message}"))
        else:
            self.identity = identity

    async def call(self, call: Call) -> None:
        """Begin one call; its answer comes by itself."""
        self.in_flight[call.id] = call.instance
        if call.instance is not None:
            self.per_instance[call.instance] += 1
        try:
            self.check_room(call)
            await self.begin(call)
        except RuntaraError as error:
            self.answer(call.id, error=error)
        except Exception:
            self.failed(call)

    def failed(self, call: Call) -> None:
        """A bug came between a call and its answer."""
        logger.exception("%r: %s failed", self, call.op)
        self.answer(call.id, error=RuntimeFault(f"{call.op} failed; the server's log says why"))

    def check_room(self, call: Call) -> None:
        if len(self.in_flight) > self.limits.in_flight:
            raise Overloaded(
                f"{self.limits.in_flight} calls of this connection are unanswered", retry_after_seconds=0.1
            )
        most = self.limits.in_flight_per_instance
        if call.instance is not None and self.per_instance[call.instance] > most:
            raise Overloaded(f"{most} calls of this instance are unanswered", retry_after_seconds=0.1)
        if self.conversation.stalled:
            raise too_much()

    async def begin(self, call: Call) -> None:
        operation = OPERATIONS.get(call.op)
        if operation is not None:
            await self.operate(call, operation)
        elif call.op == "watch":
            self.watch(call)
        elif call.op == "unwatch":
            self.unwatch(call)
        else:
            self.question(call)

    # ------------------------------------------------------------ calls of an instance

    async def operate(self, call: Call, operation: Operation) -> None:
        if not operation.roles & self.identity.roles:
            raise Forbidden(call.op, role_words(self.identity.roles))
        instance_id = named_instance(call)
        message = self.codec.unpack(call.body, operation.request)
        sink = None
        if isinstance(message, Register | Attach):
            self.check_sessions(instance_id)
            self.opening.add(call.id)
            sink = SessionSink(self, instance_id)
        done = partial(self.done, call, operation, message, sink)
        submit = partial(self.backend.submit, self.key(instance_id), message, sink, done)
        if self.line or not await at_once(submit):
            self.stand_in_line(call, submit, size_of(message))

    def check_sessions(self, instance_id: str) -> None:
        held = len(self.sessions) + len(self.opening)
        if held >= self.limits.sessions and instance_id not in self.sessions:
            raise Overloaded(
                f"this connection holds {self.limits.sessions} sessions", retry_after_seconds=1.0
            )

    def stand_in_line(self, call: Call, submit: Callable[[], Awaitable[None]], size: int) -> None:
        """Let a call wait for room, behind those that wait already."""
        if self.line and self.line_bytes + size > self.limits.waiting_bytes:
            raise Overloaded("too many calls of this connection wait for room", retry_after_seconds=0.1)
        deadline = trio.current_time() + self.limits.waiting_seconds
        self.line.append(Waiting(call, submit, size, deadline))
        self.line_bytes += size
        if len(self.line) == 1:
            self.owner.spawn(self.work_off_line)

    async def work_off_line(self) -> None:
        """Submit those in line, in order. Each leaves it only when it was."""
        while self.line:
            waiting = self.line[0]
            try:
                with trio.move_on_at(waiting.deadline) as scope:
                    await waiting.submit()
                if scope.cancelled_caught:
                    error = Overloaded("there was no room in time", retry_after_seconds=0.1)
                    self.answer(waiting.call.id, error=error)
            except Exception:
                self.failed(waiting.call)
            if self.line:  # else the connection ended meanwhile
                self.line.popleft()
                self.line_bytes -= waiting.size
            await trio.lowlevel.checkpoint()

    def done(
        self,
        call: Call,
        operation: Operation,
        message: object,
        sink: SessionSink | None,
        reply: Reply | RuntaraError,
    ) -> None:
        """The answer of an instance."""
        if isinstance(reply, RuntaraError):
            self.answer(call.id, error=reply)
            return
        try:
            self.reply(call, operation, reply, registers=sink is not None)
        except Exception:
            self.failed(call)
        if sink is not None and isinstance(reply, Registered):
            self.begin_session(sink, reply.epoch)
        elif isinstance(message, SessionLost):
            held = self.sessions.get(call.instance or "")
            if held is not None and held.epoch == message.epoch:
                self.drop_session(held)

    def reply(self, call: Call, operation: Operation, reply: Reply, *, registers: bool) -> None:
        """Answer a call, unless there is no room for the answer; a session that began is always told."""
        if self.over:
            self.landed(call.id)
        elif self.crowded and not registers:
            self.answer(call.id, error=too_much())
        else:
            self.answer(call.id, body=self.codec.pack(reply, operation.reply))

    def begin_session(self, sink: SessionSink, epoch: int) -> None:
        if self.over:  # it ended while the registration was on its way
            self.backend.lose(self.key(sink.instance_id), epoch, crashed=True)
            return
        if not any(kind in ENDINGS for kind, _ in sink.early):
            self.sessions[sink.instance_id] = sink
        sink.begin(epoch)

    def drop_session(self, sink: SessionSink) -> None:
        if self.sessions.get(sink.instance_id) is sink:
            del self.sessions[sink.instance_id]

    # ------------------------------------------------------------ questions

    def question(self, call: Call) -> None:
        """Have a question about the tenant answered, beside the reading of the socket."""
        self.questions.append(call)
        if self.asking < self.limits.questions:
            self.asking += 1
            self.owner.spawn(self.ask_on)

    async def ask_on(self) -> None:
        """Ask until there are no more questions."""
        try:
            while self.questions and not self.over:
                await self.ask(self.questions.popleft())
        finally:
            self.asking -= 1

    async def ask(self, call: Call) -> None:
        try:
            if self.crowded:
                raise too_much()
            self.answer(call.id, body=await self.backend.ask(self.identity, self.codec, call))
        except RuntaraError as error:
            self.answer(call.id, error=error)
        except Exception:
            self.failed(call)

    # ------------------------------------------------------------ watches

    def watch(self, call: Call) -> None:
        instance_id = named_instance(call)
        number = watch_number(call)
        if number in self.watches:
            raise ValidationError("watch", f"{number} is in use")
        if len(self.watches) >= self.limits.watches:
            raise Overloaded(f"this connection watches {self.limits.watches} instances")
        watcher = partial(self.see, number, instance_id)
        self.backend.watch(self.key(instance_id), watcher)
        self.watches[number] = (instance_id, watcher)
        self.answer(call.id, body={})

    def see(self, number: int, instance_id: str, change: Change | RuntaraError) -> None:
        if isinstance(change, RuntaraError):
            self.end_watch(number, change)
        elif self.conversation.stalled:
            self.end_watch(number, WatchLagged("the client has too much to confirm"))
        else:
            self.push("change", instance_id, None, {"watch": number, "change": self.codec.pack(change)})

    def end_watch(self, number: int, error: RuntaraError | None) -> None:
        found = self.watches.pop(number, None)
        if found is None:
            return
        instance_id, watcher = found
        self.backend.unwatch(self.key(instance_id), watcher)
        if error is not None:
            body = {"watch": number, "error": self.codec.pack(failure_of(error))}
            self.push("watch_ended", instance_id, None, body)

    def unwatch(self, call: Call) -> None:
        self.end_watch(watch_number(call), None)
        self.answer(call.id, body={})

    # ------------------------------------------------------------ the end

    def end(self, crashed: bool) -> None:
        """The connection is over: its sessions and watches with it."""
        if self.over:
            return
        self.over = True
        for number in list(self.watches):
            self.end_watch(number, None)
        held, self.sessions = self.sessions, {}
        for instance_id, sink in held.items():
            if sink.epoch is not None:
                self.backend.lose(self.key(instance_id), sink.epoch, crashed)
        self.line.clear()
        self.questions.clear()
        self.conversation.forget()  # calls that are never answered may hold the connection for long
        self.note_kept()
        self.output.set()


def too_much() -> Overloaded:
    return Overloaded("the client has too many answers to confirm", retry_after_seconds=0.1)


async def at_once(submit: Callable[[], Awaitable[None]]) -> bool:
    """Submit a call if that is possible without waiting; whether it was.

    Cancellation: Makes no difference; a call that has arrived is not lost.
    """
    with trio.CancelScope(shield=True) as scope:
        scope.cancel()
        await submit()
    return not scope.cancelled_caught


def named_instance(call: Call) -> str:
    if call.instance is None:
        raise ValidationError("instance", f"{call.op} is asked of an instance")
    return call.instance


def watch_number(call: Call) -> int:
    number = call.body.get("watch")
    if type(number) is not int or not 0 <= number < 2**53 or len(call.body) != 1:
        raise ValidationError("watch", "must be a whole number that the client chose, and stand alone")
    return number
