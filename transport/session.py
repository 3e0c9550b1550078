"""The conversation of one connection, without a socket: frames in, happenings out; envelopes in, frames out.

Both sides are reliable streams over a chain of sockets:

1. The client numbers its calls 1, 2, 3 ...; the server takes each number once, in order. When the client
   comes back it is told the highest one that arrived, and sends those behind it again.
2. The server numbers its envelopes 1, 2, 3 ...; it keeps each one until the client has confirmed it, and
   sends what is not confirmed again after a resume. The client handles each number once.
3. What a side keeps is bounded: the answers and pushes of the server in bytes, the calls of the client in
   number. A client that confirms too little is asked for less (`ServerConversation.stalled`), and given up
   when even pushes go over the bound (`ServerConversation.overflowed`).
4. Nothing here waits, and nothing here knows a clock, a socket or a store. A frame that breaks the rules is a
   `Violation`, whatever it holds; no input raises.

States of a socket, on the server:

    state    | a frame holds      | then
    ---------|--------------------|-------------------------------------------------------------
    NEW      | hello              | JUDGED: the token is looked at; nothing else is taken
    NEW      | anything else      | OVER, a violation
    JUDGED   | anything           | OVER, a violation: the client must wait for its welcome
    OPEN     | call               | the call, or its refusal if its body is wrong
    OPEN     | received, renew    | noted
    OPEN     | goodbye            | OVER, in good order
    OPEN     | hello, no envelope | OVER, a violation
    OVER     | anything           | ignored
"""

from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Any, Final

import attrs

from runtara.errors import RuntaraError, ValidationError
from runtara.wire import (
    VERSION,
    Answer,
    BadFrame,
    Call,
    ClientEnvelope,
    Codec,
    Failure,
    Frame,
    Goodbye,
    Hello,
    Map,
    Pushed,
    Received,
    Refused,
    Renew,
    Resume,
    Welcome,
    pack_envelope,
    unpack_envelope,
)

FRAME_BYTES: Final = 256 * 1024
"""Envelopes are gathered into one frame up to this size; a larger one has a frame of its own."""
FRAME_ENVELOPES: Final = 256

# Close codes: RFC 6455, section 7.4.1, and 4000 to 4999 for what only this protocol knows.
NORMAL: Final = 1000
GOING_AWAY: Final = 1001
PROTOCOL_ERROR: Final = 1002
POLICY: Final = 1008
TOO_BIG: Final = 1009
INTERNAL: Final = 1011
TRY_LATER: Final = 1013
UNAUTHORIZED: Final = 4401
TAKEN_OVER: Final = 4409


def failure_of(error: RuntaraError) -> Failure:
    """An error as it is written."""
    after = error.retry_after_seconds
    return Failure(
        code=error.code,
        message=error.message,
        retryable=error.retryable,
        retry_after_ms=None if after is None else max(0, round(after * 1000)),
        details=error.details,
    )


# ---------------------------------------------------------------- what happens


@attrs.frozen
class Violation:
    """The peer broke the rules: say ``error``, close with ``code``."""

    code: int
    error: ValidationError


@attrs.frozen
class BadCall:
    """A call whose form is wrong; it was answered. Too many of them are a reason to close."""

    id: int


@attrs.frozen
class Restarted:
    """The server knows nothing of the connection: sessions must be attached before calls are sent again."""

    welcome: Welcome


ServerHappening = Hello | Call | Renew | Goodbye | BadCall | Violation


class Side(Enum):
    """Where a socket is."""

    NEW = "new"
    JUDGED = "judged"
    OPEN = "open"
    OVER = "over"


def gather(maps: Iterable[bytes], codec: Codec) -> list[Frame]:
    """Envelopes as few frames, in order."""
    frames: list[Frame] = []
    waiting: list[bytes] = []
    size = 0
    for one in maps:
        if waiting and (size + len(one) > FRAME_BYTES or len(waiting) == FRAME_ENVELOPES):
            frames.append(codec.join(waiting))
            waiting, size = [], 0
        waiting.append(one)
        size += len(one)
    if waiting:
        frames.append(codec.join(waiting))
    return frames


def violation(field: str, problem: str, code: int = POLICY) -> Violation:
    return Violation(code, ValidationError(field, problem))


# ---------------------------------------------------------------- the server's side


class ServerConversation:
    """One connection, as the server sees it. It outlives its sockets."""

    def __init__(self, codec: Codec, buffer_bytes: int) -> None:
        self.codec = codec
        self.buffer_bytes = buffer_bytes
        self.side = Side.NEW
        self.received = 0
        """Highest id of a call that arrived."""
        self.seq = 0
        self.kept: deque[tuple[int, bytes]] = deque()
        """Envelopes that are not confirmed."""
        self.kept_bytes = 0
        self.sent = 0
        """Of those kept, the last one that was given to this socket."""
        self.urgent: list[bytes] = []
        """Envelopes without a number: a welcome, a refusal."""

    # ------------------------------------------------------------ in

    def receive(self, frame: Frame) -> list[ServerHappening]:
        """What a frame means. Never raises; after a `Violation` the rest of the frame is ignored."""
        if self.side is Side.OVER:
            return []
        try:
            maps = self.codec.envelopes(frame)
        except BadFrame as error:
            return [self.broken(violation("frame", str(error)))]
        found: list[ServerHappening] = []
        for one in maps:
            happening = self.take_one(one)
            if happening is not None:
                found.append(happening)
            if self.is_over:
                break
        return found

    def take_one(self, found: Map) -> ServerHappening | None:
        id = found.get("id")
        try:
            if self.side is Side.NEW:
                hello: Hello = unpack_envelope(self.codec, found, (Hello,))
                self.side = Side.JUDGED
                return hello
            if self.side is Side.JUDGED:
                return self.broken(violation("t", "nothing may be sent before the welcome"))
            envelope: ClientEnvelope = unpack_envelope(self.codec, found, (Call, Received, Renew, Goodbye))
        except BadFrame as error:
            return self.broken(violation("envelope", str(error)))
        except ValidationError as error:
            if self.side is Side.OPEN and self.is_next(id):
                return self.bad_call(error)
            return self.broken(Violation(POLICY, error))
        match envelope:
            case Call():
                return self.take_call(envelope)
            case Received(seq=seq):
                return self.confirm(seq)
            case Goodbye():
                self.side = Side.OVER
        assert not isinstance(envelope, Hello | Call | Received)
        return envelope

    def is_next(self, id: object) -> bool:
        return type(id) is int and id == self.received + 1

    def take_call(self, call: Call) -> ServerHappening | None:
        if 1 <= call.id <= self.received:
            return None  # it arrived before: its answer is on its way, or kept
        if call.id != self.received + 1:
            return self.broken(violation("id", f"must be {self.received + 1}, the next number"))
        self.received = call.id
        return call

    def bad_call(self, error: ValidationError) -> BadCall:
        self.received += 1
        self.answer(self.received, error=error)
        return BadCall(self.received)

    def confirm(self, seq: int) -> Violation | None:
        if not 0 <= seq <= self.sent:
            return self.broken(violation("seq", f"must be from 0 to {self.sent}, the last one sent"))
        while self.kept and self.kept[0][0] <= seq:
            self.kept_bytes -= len(self.kept.popleft()[1])
        return None

    def broken(self, found: Violation) -> Violation:
        self.side = Side.OVER
        self.urgent.append(pack_envelope(self.codec, Refused(error=failure_of(found.error))))
        return found

    # ------------------------------------------------------------ out

    def open(self, welcome: Welcome) -> None:
        """Take the client in. For one that resumes, what it has not seen is sent again."""
        self.side = Side.OPEN
        self.urgent = [pack_envelope(self.codec, welcome)]

    def socket_lost(self) -> None:
        """The socket is gone; the conversation waits for another one."""
        self.side = Side.OVER
        self.urgent = []

    def next_socket(self, seen: int) -> bool:
        """Another socket continues the conversation; whether ``seen`` can be true."""
        first = self.kept[0][0] if self.kept else self.seq + 1
        if not first - 1 <= seen <= self.seq:
            return False
        while self.kept and self.kept[0][0] <= seen:
            self.kept_bytes -= len(self.kept.popleft()[1])
        self.sent = seen
        self.side = Side.JUDGED
        return True

    def refuse(self, error: RuntaraError) -> None:
        """Say why the connection ends; the socket is closed after that."""
        self.side = Side.OVER
        self.urgent.append(pack_envelope(self.codec, Refused(error=failure_of(error))))

    def forget(self) -> None:
        """Nobody comes back: what is not confirmed is given up."""
        self.kept.clear()
        self.kept_bytes = 0

    def answer(self, id: int, body: Any = None, error: RuntaraError | None = None) -> None:
        """Answer a call: ``body`` in plain values, or an error."""
        failed = None if error is None else failure_of(error)
        self.keep(Answer(seq=self.seq + 1, id=id, body=body, error=failed))

    def push(self, kind: str, instance: str | None, epoch: int | None, body: Map) -> None:
        self.keep(Pushed(seq=self.seq + 1, kind=kind, instance=instance, epoch=epoch, body=body))

    def keep(self, envelope: Answer | Pushed) -> None:
        packed = pack_envelope(self.codec, envelope)
        self.seq = envelope.seq
        self.kept.append((envelope.seq, packed))
        self.kept_bytes += len(packed)

    @property
    def has_output(self) -> bool:
        return bool(self.urgent) or (self.side is Side.OPEN and self.sent < self.seq)

    def take_output(self) -> list[Frame]:
        """The frames that are to be sent now, in order."""
        maps, self.urgent = self.urgent, []
        if self.side is Side.OPEN and self.sent < self.seq:
            behind = len(self.kept) - (self.seq - self.sent)
            maps.extend(packed for _, packed in list(self.kept)[behind:])
            self.sent = self.seq
        return gather(maps, self.codec)

    @property
    def is_open(self) -> bool:
        return self.side is Side.OPEN

    @property
    def is_over(self) -> bool:
        """Whether nothing more of this socket counts."""
        return self.side is Side.OVER

    @property
    def stalled(self) -> bool:
        """Whether the client has so much to confirm that nothing more should be asked (rule 3)."""
        return self.kept_bytes > self.buffer_bytes // 2

    @property
    def overflowed(self) -> bool:
        """Whether the client must be given up (rule 3). A single envelope always fits."""
        return self.kept_bytes > self.buffer_bytes and len(self.kept) > 1


# ---------------------------------------------------------------- the client's side

CONFIRM_EVERY: Final = 64
"""Envelopes handled without anything to say, after which they are confirmed all the same."""


@attrs.define(eq=False)
class Pending:
    """A call without an answer."""

    op: str
    instance: str | None
    body: Map
    id: int = 0
    """Changes when the server was restarted."""


@attrs.frozen
class Answered:
    """A call and its answer."""

    pending: Pending
    answer: Answer


ClientHappening = Welcome | Restarted | Answered | Pushed | Refused | Violation


class ClientConversation:
    """One connection, as the client sees it. It outlives its sockets."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.side = Side.NEW
        self.resume: Resume | None = None
        self.next_id = 1
        self.unanswered: dict[int, Pending] = {}
        """In order of their ids."""
        self.outgoing: deque[Pending] = deque()
        """Those that this socket has not been given yet."""
        self.seen = 0
        self.confirmed = 0
        self.urgent: list[bytes] = []

    # ------------------------------------------------------------ out

    def hello(self, token: str | None, client: str, tenant: str | None) -> Frame:
        """The first frame of a socket."""
        self.side = Side.JUDGED
        self.urgent = []
        resume = None if self.resume is None else attrs.evolve(self.resume, seen=self.seen)
        envelope = Hello(version=VERSION, token=token, client=client, tenant=tenant, resume=resume)
        return self.codec.join([pack_envelope(self.codec, envelope)])

    def call(self, op: str, instance: str | None, body: Map) -> Pending:
        """Queue a call."""
        pending = Pending(op, instance, body)
        self.queue(pending)
        return pending

    def queue(self, pending: Pending) -> None:
        """Queue a call under the next id."""
        pending.id = self.next_id
        self.next_id += 1
        self.unanswered[pending.id] = pending
        self.outgoing.append(pending)

    def say(self, envelope: Renew | Goodbye) -> None:
        self.urgent.append(pack_envelope(self.codec, envelope))

    @property
    def has_output(self) -> bool:
        behind = self.seen - self.confirmed
        return self.side is Side.OPEN and (
            bool(self.urgent) or bool(self.outgoing) or behind >= CONFIRM_EVERY
        )

    def take_output(self) -> list[Frame]:
        """The frames that are to be sent now; a confirmation rides on them."""
        if self.side is not Side.OPEN:
            return []
        maps: list[bytes] = []
        if self.seen > self.confirmed:
            maps.append(pack_envelope(self.codec, Received(seq=self.seen)))
            self.confirmed = self.seen
        while self.outgoing:
            one = self.outgoing.popleft()
            call = Call(id=one.id, op=one.op, instance=one.instance, body=one.body)
            maps.append(pack_envelope(self.codec, call))
        maps.extend(self.urgent)
        self.urgent = []
        return gather(maps, self.codec)

    # ------------------------------------------------------------ in

    def receive(self, frame: Frame) -> list[ClientHappening]:
        """What a frame means. Never raises; after a `Violation` the rest of the frame is ignored."""
        if self.side is Side.OVER:
            return []
        found: list[ClientHappening] = []
        try:
            for one in self.codec.envelopes(frame):
                happening = self.take_one(one)
                if happening is not None:
                    found.append(happening)
        except BadFrame as error:
            self.side = Side.OVER
            found.append(violation("frame", str(error), PROTOCOL_ERROR))
        except ValidationError as error:
            self.side = Side.OVER
            found.append(Violation(PROTOCOL_ERROR, error))
        return found

    def take_one(self, found: Map) -> ClientHappening | None:
        if self.side is Side.JUDGED:
            first: Welcome | Refused = unpack_envelope(self.codec, found, (Welcome, Refused))
            return self.welcomed(first) if isinstance(first, Welcome) else first
        envelope: Answer | Pushed | Refused = unpack_envelope(self.codec, found, (Answer, Pushed, Refused))
        if isinstance(envelope, Refused):
            return envelope
        if envelope.seq <= self.seen:
            return None
        if envelope.seq != self.seen + 1:
            raise ValidationError("seq", f"must be {self.seen + 1}, the next number")
        self.seen = envelope.seq
        if isinstance(envelope, Pushed):
            return envelope
        pending = self.unanswered.pop(envelope.id, None)
        if pending is None:
            raise ValidationError("id", "answers no call")
        return Answered(pending, envelope)

    def welcomed(self, welcome: Welcome) -> Welcome | Restarted:
        known = self.resume is not None
        self.side = Side.OPEN
        self.resume = Resume(connection=welcome.connection, secret=welcome.secret, seen=0)
        if welcome.resumed:
            self.confirmed = self.seen
            self.outgoing = deque(one for id, one in self.unanswered.items() if id > welcome.received)
            return welcome
        self.seen = self.confirmed = 0
        return Restarted(welcome) if known else welcome

    def restart(self) -> list[Pending]:
        """Begin to count anew; returns the calls that a server which is gone has not answered."""
        left = list(self.unanswered.values())
        self.unanswered = {}
        self.outgoing = deque()
        self.next_id = 1
        return left

    def socket_lost(self) -> None:
        """The socket is gone; the conversation waits for another one."""
        self.side = Side.NEW
