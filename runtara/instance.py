"""`Instance`: what the code of one durable run holds in its hands.

The same object in process and over a socket: it speaks through a `Port`, which sends requests and answers
with replies; pushes come in through `Inbox.push`.

Rules:

1. Every call returns after its effect is on disk. A call that raises a retryable error, or is cancelled, may
   or may not have taken effect; called again with the same ids it takes effect once.
2. Faults that the same request under the same ids can heal (a lost actor, an unknown outcome) are healed
   here, up to `HEALING_ATTEMPTS` times in a row; the caller sees them only when that does not help, or when
   they say themselves how long to wait.
3. Signals are shown by `Instance.signals` until they are acknowledged, in the order of their acceptance, and
   once per iterator. They are copies: losing one loses nothing.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final, Protocol, TypeVar

import trio

from runtara.errors import (
    ActorFailed,
    GuardFailed,
    OutcomeUnknown,
    RuntaraError,
    StaleEpoch,
    ValidationError,
)
from runtara.messages import (
    AckReply,
    AckSignal,
    CheckpointReply,
    ClosedPush,
    CompensationReply,
    CompensationView,
    ErrorReply,
    EventReply,
    FinishCompensation,
    FoundCheckpoint,
    GetCheckpoint,
    GetStatus,
    InstanceView,
    PollSignals,
    Push,
    RecordError,
    RecordRetryAttempt,
    Registered,
    Reply,
    ReportEvent,
    Request,
    RetryReply,
    SaveCheckpoint,
    SignalPush,
    SignalsReply,
    Sleep,
    StartCompensation,
    SupersededPush,
    WaitReply,
    WaitSignal,
)
from runtara.records import (
    CompensationSpec,
    ErrorCategory,
    ErrorSeverity,
    EventType,
    RetryHint,
    SignalRecord,
    SignalType,
)
from runtara.validation import duration_us
from runtara.words import json_text, member

T = TypeVar("T", bound=Reply)

HEALING_ATTEMPTS: Final = 8
FIRST_DELAY: Final = 0.01
HEALTHY_SECONDS: Final = 1.0
"""A request that waited longer before it failed was in good hands: the count begins anew."""


class Port(Protocol):
    """The way to an instance: in process, or over a connection."""

    async def request(self, message: Request) -> Reply:
        """Send a request and wait for its answer. Raises `RuntaraError`."""
        ...

    async def compensations(self) -> CompensationView: ...

    async def compensation_data(self, checkpoint_id: str) -> bytes: ...


Send = Callable[[Request], Awaitable[Reply]]


async def heal(send: Send, message: Request, kind: type[T]) -> T:
    """Send a request that is safe to send again, until it is answered (rule 2)."""
    failures = 0
    while True:
        begun = trio.current_time()
        try:
            reply = await send(message)
        except (ActorFailed, OutcomeUnknown, GuardFailed) as error:
            if error.retry_after_seconds is not None:
                raise
            waited = trio.current_time() - begun > HEALTHY_SECONDS
            failures = 1 if waited else failures + 1
            if failures == HEALING_ATTEMPTS:
                raise
            await trio.sleep(FIRST_DELAY * 2 ** (failures - 1))
        else:
            assert isinstance(reply, kind)
            return reply


class Inbox:
    """What was pushed to a session and not acknowledged, and whether the session is over.

    Bounded by the instance's own bound on unconsumed signals.
    """

    __slots__ = ("abandoned", "changed", "ended", "signals")

    def __init__(self) -> None:
        self.abandoned = False
        """Set when the registration was given up: should it succeed all the same, it ends at once."""
        self.signals: dict[int, SignalRecord] = {}
        self.ended: RuntaraError | SupersededPush | ClosedPush | None = None
        self.changed: trio.Event | None = None

    def push(self, push: Push) -> None:
        """Take a push. Never blocks."""
        match push:
            case SignalPush(signal=signal):
                self.signals[signal.signal_id] = signal
            case SupersededPush() | ClosedPush():
                self.ended = push
        self.ring()

    def end(self, error: RuntaraError) -> None:
        """Nothing more will come, because of ``error``."""
        if self.ended is None:
            self.ended = error
            self.ring()

    def drop(self, signal_id: int | None) -> None:
        """Forget a signal that was consumed."""
        if signal_id is not None:
            self.signals.pop(signal_id, None)

    def ring(self) -> None:
        if self.changed is not None:
            self.changed.set()
            self.changed = None

    async def wait(self) -> None:
        if self.changed is None:
            self.changed = trio.Event()
        await self.changed.wait()


class SignalStream:
    """One walk over the signals of an inbox. Not a generator: it may be left at any point."""

    __slots__ = ("epoch", "inbox", "last")

    def __init__(self, epoch: int, inbox: Inbox) -> None:
        self.epoch = epoch
        self.inbox = inbox
        self.last = 0

    def __aiter__(self) -> "SignalStream":
        return self

    async def __anext__(self) -> SignalRecord:
        await trio.lowlevel.checkpoint()
        while True:
            ids = [signal_id for signal_id in self.inbox.signals if signal_id > self.last]
            if ids:
                self.last = min(ids)
                return self.inbox.signals[self.last]
            match self.inbox.ended:
                case None:
                    await self.inbox.wait()
                case SupersededPush(epoch=current):
                    raise StaleEpoch(self.epoch, current)
                case ClosedPush():
                    raise StopAsyncIteration
                case error:
                    raise error


class Instance:
    """One registered instance, at one epoch. Made by ``Runtime.register``."""

    __slots__ = ("counter", "inbox", "instance_id", "port", "registered")

    def __init__(self, instance_id: str, port: Port, registered: Registered, inbox: Inbox) -> None:
        self.instance_id = instance_id
        self.port = port
        self.registered = registered
        self.inbox = inbox
        self.counter = 0

    def __repr__(self) -> str:
        return f"<Instance {self.instance_id!r} epoch {self.epoch}>"

    @property
    def epoch(self) -> int:
        """The fencing token of this session. A newer session has a higher one."""
        return self.registered.epoch

    def request_id(self) -> str:
        """A name for a request that nobody has used: epochs never repeat."""
        self.counter += 1
        return f"{self.epoch}.{self.counter}"

    # ------------------------------------------------------------ checkpoints

    async def checkpoint(
        self, checkpoint_id: str, state: bytes, *, compensation: CompensationSpec | None = None
    ) -> CheckpointReply:
        """Store ``state`` under ``checkpoint_id``, or find what was stored there before.

        Args:
            checkpoint_id: A name, unique within the instance.
            state: Not empty. Ignored if the checkpoint exists.
            compensation: What undoes it; registered in the same transaction.

        Returns:
            ``found`` tells whether it existed, ``state`` is what is stored now; ``signal``, ``custom_signal``
            and ``last_error`` are what waits for the instance.

        Raises:
            ValidationError: ``state`` is empty (use `get_checkpoint` to look), or an id is ill formed.
            PayloadTooLarge: ``state`` is over the limit.
            InvalidInstanceState: The instance is not running.
            StaleEpoch: A newer session owns the instance.
            StoreError: See its ``retryable``.

        Durability: When this returns, the state survives ``kill -9`` and a loss of power.
        """
        if state is None or state == b"":
            raise ValidationError("state", "must not be empty; use get_checkpoint to look")
        message = SaveCheckpoint(
            epoch=self.epoch, checkpoint_id=checkpoint_id, state=state, compensation=compensation
        )
        return await heal(self.port.request, message, CheckpointReply)

    async def get_checkpoint(self, checkpoint_id: str) -> FoundCheckpoint:
        """Read a checkpoint; ``found`` is False if there is none. Never writes."""
        return await heal(self.port.request, GetCheckpoint(checkpoint_id=checkpoint_id), FoundCheckpoint)

    # ------------------------------------------------------------ waiting

    async def sleep(
        self, seconds: float, *, checkpoint_id: str | None = None, state: bytes | None = None
    ) -> WaitReply:
        """Sleep until ``seconds`` after this sleep was first asked for.

        Args:
            seconds: 0 to 100 years.
            checkpoint_id: Names the sleep: asked for again under this name, also after a crash, it keeps its
                first deadline. A sleep without a name begins anew after a crash.
            state: Stored as the checkpoint of that name.

        Returns:
            ``interrupted`` is true if a cancel, pause or shutdown ended it early; then ``signal`` is that.

        Raises:
            Conflict: The name was used for something else. Others as `checkpoint`.

        Cancellation: The sleep stays recorded and keeps its deadline.
        """
        message = Sleep(
            epoch=self.epoch,
            duration_us=duration_us(seconds, "seconds"),
            checkpoint_id=checkpoint_id,
            state=state,
            request_id=None if checkpoint_id is not None else self.request_id(),
        )
        return await heal(self.port.request, message, WaitReply)

    async def wait_signal(self, key: str, *, checkpoint_id: str, timeout: float | None = None) -> WaitReply:
        """Consume the oldest custom signal for ``key``; wait for one if there is none.

        The signal's payload is recorded as the checkpoint ``checkpoint_id`` in the transaction that consumes
        it, so a repeated call gets the same answer, also after a crash. A timeout is recorded as well.

        Args:
            key: What the sender addressed.
            checkpoint_id: The name of this wait; another wait for the same key needs another name.
            timeout: Seconds from the first call, or None to wait for ever.

        Returns:
            ``received`` and ``payload``; or ``timed_out``; or ``interrupted`` and ``signal``.

        Raises:
            Conflict: The name was used for something else. Others as `checkpoint`.

        Cancellation: The wait stays recorded. A signal that arrives meanwhile is kept for the next call.
        """
        message = WaitSignal(
            epoch=self.epoch,
            key=key,
            checkpoint_id=checkpoint_id,
            timeout_us=None if timeout is None else duration_us(timeout, "timeout"),
        )
        reply = await heal(self.port.request, message, WaitReply)
        self.inbox.drop(reply.signal_id)
        return reply

    # ------------------------------------------------------------ events

    async def report(
        self,
        type: EventType,
        *,
        subtype: str | None = None,
        payload: bytes | None = None,
        checkpoint_id: str | None = None,
        request_id: str | None = None,
    ) -> EventReply:
        message = ReportEvent(
            epoch=self.epoch,
            type=type,
            subtype=subtype,
            payload=payload,
            checkpoint_id=checkpoint_id,
            request_id=request_id,
        )
        return await heal(self.port.request, message, EventReply)

    async def heartbeat(self) -> EventReply:
        """Report progress. Of a stream of heartbeats only some are stored (``heartbeat_seconds``)."""
        return await self.report(EventType.HEARTBEAT)

    async def emit(
        self,
        subtype: str,
        payload: bytes | None = None,
        *,
        checkpoint_id: str | None = None,
        request_id: str | None = None,
    ) -> EventReply:
        """Report an event of your own. ``request_id`` makes a repeated call the same event."""
        return await self.report(
            EventType.CUSTOM,
            subtype=subtype,
            payload=payload,
            checkpoint_id=checkpoint_id,
            request_id=request_id or self.request_id(),
        )

    async def complete(self, output: bytes | None = None) -> EventReply:
        """End well. ``applied`` is False if the instance is not running any more; then nothing changed."""
        if output is not None and not isinstance(output, bytes):
            raise ValidationError("output", f"must be bytes, not {type(output).__name__}")
        return await self.report(EventType.COMPLETED, payload=output, request_id=self.request_id())

    async def fail(self, error: str | bytes | None = None) -> EventReply:
        """End badly; registered compensations are due first. ``applied`` as in `complete`."""
        payload = error.encode(errors="replace") if isinstance(error, str) else error
        return await self.report(EventType.FAILED, payload=payload, request_id=self.request_id())

    async def suspend(
        self,
        *,
        seconds: float | None = None,
        checkpoint_id: str | None = None,
        state: bytes | None = None,
    ) -> EventReply:
        """Leave for a while: until an open wait ends, or ``seconds`` from now, or the next registration.

        Args:
            seconds: When to be woken; None: no time of its own.
            checkpoint_id: Names the wait that ``seconds`` begins, and the checkpoint that keeps ``state``.
            state: Stored in the same transaction.
        """
        if seconds is None:
            if state is not None:
                raise ValidationError("state", "needs seconds; store it with checkpoint")
            return await self.report(EventType.SUSPENDED, request_id=self.request_id())
        message = ReportEvent(
            epoch=self.epoch,
            type=EventType.SUSPENDED,
            checkpoint_id=checkpoint_id,
            request_id=self.request_id(),
            wake_after_us=duration_us(seconds, "seconds"),
            state=state,
        )
        return await heal(self.port.request, message, EventReply)

    # ------------------------------------------------------------ signals

    def signals(self) -> AsyncIterator[SignalRecord]:
        """Iterate over the pending signals, and then over those that arrive, each once.

        Ends when the instance has ended or was suspended by the runtime. A signal that is not acknowledged
        comes again at the next registration.

        Raises:
            StaleEpoch: A newer session owns the instance.
            RuntimeClosed: The runtime ended before the instance.
        """
        return SignalStream(self.epoch, self.inbox)

    async def poll_signals(self, checkpoint_id: str | None = None) -> SignalsReply:
        """What the next checkpoint reply would carry. Consumes nothing."""
        message = PollSignals(epoch=self.epoch, checkpoint_id=checkpoint_id)
        return await heal(self.port.request, message, SignalsReply)

    async def ack(
        self, signal: SignalRecord | int | SignalType | str, *, acknowledged: bool = True
    ) -> AckReply:
        """Consume a signal; a cancel, pause or shutdown takes effect with that.

        Args:
            signal: A signal or its id; or a type, which means the oldest of that type that was shown to this
                session.
            acknowledged: False says that it was seen but is not obeyed now; it stays pending.

        Returns:
            ``applied`` is False if it was acknowledged before, or the instance has ended.

        Raises:
            SignalNotPending: There never was such a signal, or none of that type was shown.
        """
        named = signal.signal_id if isinstance(signal, SignalRecord) else signal
        by_type = isinstance(named, str | SignalType)
        if not by_type and type(named) is not int:
            raise ValidationError("signal", "must be a signal, its id or its type")
        message = AckSignal(
            epoch=self.epoch,
            signal_id=None if by_type else int(named),
            signal_type=member(SignalType, named, "signal") if by_type else None,
            acknowledged=acknowledged,
        )
        reply = await heal(self.port.request, message, AckReply)
        if acknowledged:
            self.inbox.drop(reply.signal_id)
        return reply

    # ------------------------------------------------------------ the record

    async def record_retry(
        self,
        checkpoint_id: str,
        attempt: int,
        *,
        error: str | None = None,
        category: ErrorCategory | str = ErrorCategory.UNKNOWN,
        severity: ErrorSeverity | str = ErrorSeverity.ERROR,
        retry_hint: RetryHint | str = RetryHint.UNKNOWN,
        retry_after: float | None = None,
        error_code: str | None = None,
    ) -> RetryReply:
        """Put one attempt (from 1) of a step into the audit trail; ``applied`` is False if it is there."""
        message = RecordRetryAttempt(
            epoch=self.epoch,
            checkpoint_id=checkpoint_id,
            attempt=attempt,
            error=error,
            category=member(ErrorCategory, category, "category"),
            severity=member(ErrorSeverity, severity, "severity"),
            retry_hint=member(RetryHint, retry_hint, "retry_hint"),
            retry_after_us=None if retry_after is None else duration_us(retry_after, "retry_after"),
            error_code=error_code,
        )
        return await heal(self.port.request, message, RetryReply)

    async def record_error(
        self,
        code: str,
        message: str,
        *,
        checkpoint_id: str | None = None,
        step_id: str | None = None,
        category: ErrorCategory | str = ErrorCategory.UNKNOWN,
        severity: ErrorSeverity | str = ErrorSeverity.ERROR,
        retry_hint: RetryHint | str = RetryHint.UNKNOWN,
        retry_after: float | None = None,
        attributes: Mapping[str, object] | None = None,
        cause_id: int | None = None,
    ) -> int:
        """Put a structured error into the history; returns its id.

        Raises:
            ErrorNotFound: ``cause_id`` names no error of this instance. Others as `checkpoint`.
        """
        request = RecordError(
            epoch=self.epoch,
            code=code,
            message=message,
            checkpoint_id=checkpoint_id,
            step_id=step_id,
            category=member(ErrorCategory, category, "category"),
            severity=member(ErrorSeverity, severity, "severity"),
            retry_hint=member(RetryHint, retry_hint, "retry_hint"),
            retry_after_us=None if retry_after is None else duration_us(retry_after, "retry_after"),
            attributes=json_text(attributes, "attributes"),
            cause_id=cause_id,
            request_id=self.request_id(),
        )
        return (await heal(self.port.request, request, ErrorReply)).error_id

    @property
    def compensation(self) -> "Compensation":
        """The compensations of the instance: what undoes its checkpoints when it fails or is cancelled."""
        return Compensation(self)

    async def status(self) -> InstanceView:
        """How the instance is now."""
        return await heal(self.port.request, GetStatus(), InstanceView)


class Compensation:
    """The compensations of one instance. They are registered with `Instance.checkpoint`."""

    __slots__ = ("instance",)

    def __init__(self, instance: Instance) -> None:
        self.instance = instance

    async def view(self) -> CompensationView:
        """All of them, the one to run first coming first; how many are pending, whether all succeeded."""
        return await self.instance.port.compensations()

    async def data(self, checkpoint_id: str) -> bytes:
        """The data that was registered.

        Raises:
            CheckpointNotFound: The checkpoint has no compensation.
        """
        return await self.instance.port.compensation_data(checkpoint_id)

    async def start(self, checkpoint_id: str) -> int:
        """Begin an attempt; returns its number, from 1. The instance must be compensating.

        An attempt that a crash left open stays in the log without an end; the next one has a new number.
        """
        message = StartCompensation(epoch=self.instance.epoch, checkpoint_id=checkpoint_id)
        return (await heal(self.instance.port.request, message, CompensationReply)).attempt

    async def finish(
        self,
        checkpoint_id: str,
        attempt: int,
        *,
        success: bool,
        final: bool = True,
        error: str | None = None,
        error_id: int | None = None,
    ) -> CompensationReply:
        """End an attempt. When the last compensation has ended, the instance ends as it was meant to.

        Args:
            final: False after a failure leaves the compensation to be tried again.
        """
        message = FinishCompensation(
            epoch=self.instance.epoch,
            checkpoint_id=checkpoint_id,
            attempt=attempt,
            success=success,
            final=final,
            error_message=error,
            error_id=error_id,
        )
        return await heal(self.instance.port.request, message, CompensationReply)
