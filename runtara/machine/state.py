"""What the machine works on: the state of one instance, the facts it asks for, and its decisions."""

from collections.abc import Mapping
from enum import Enum
from typing import Final

import attrs

from runtara.errors import RuntaraError
from runtara.messages import Push, Reply
from runtara.records import (
    CheckpointRecord,
    CompensationRecord,
    ErrorRecord,
    InstanceRecord,
    Op,
    PayloadKind,
    RequestRecord,
    RetryAttemptRecord,
    SignalRecord,
    SignalType,
    StepRecord,
    WaitRecord,
)


@attrs.frozen(kw_only=True)
class InstanceState:
    """An instance as its actor knows it: the stored row, and what changed since but need not be written."""

    row: InstanceRecord
    """As it was last decided to be written."""
    revision: int
    """Of the last decided change."""
    checkpoint_id: str | None = None
    last_activity_us: int
    signals: tuple[SignalRecord, ...] = ()
    """Unconsumed, oldest first."""
    waits: tuple[WaitRecord, ...] = ()
    """Open, oldest first."""
    compensations: tuple[CompensationRecord, ...] = ()
    last_error: ErrorRecord | None = None
    steps: tuple[StepRecord, ...] = ()
    """Running, oldest first: the newest `OPEN_STEPS` of them."""
    connected: bool = False
    """Whether the row's epoch has a live session (within its grace period counts as live)."""
    shown: frozenset[int] = frozenset()
    """Ids of unconsumed signals that this session has seen."""
    parked: frozenset[str] = frozenset()
    """Ids of open waits whose reply is held back until they end."""
    heartbeat_us: int = 0
    """When a heartbeat was last stored."""

    def after_checkpoint(self, record: CheckpointRecord) -> "InstanceState":
        """The state once ``record`` is the newest checkpoint. (`attrs.evolve` takes twice as long.)"""
        return InstanceState(
            row=self.row,
            revision=record.revision,
            checkpoint_id=record.checkpoint_id,
            last_activity_us=max(record.created_us, self.last_activity_us),
            signals=self.signals,
            waits=self.waits,
            compensations=self.compensations,
            last_error=self.last_error,
            steps=self.steps,
            connected=self.connected,
            shown=self.shown,
            parked=self.parked,
            heartbeat_us=self.heartbeat_us,
        )

    @property
    def control(self) -> SignalRecord | None:
        """The oldest pending instance-wide signal, a cancel first."""
        found: SignalRecord | None = None
        for signal in self.signals:
            if signal.type is SignalType.CANCEL:
                return signal
            if found is None and signal.type is not SignalType.CUSTOM:
                found = signal
        return found

    @property
    def interrupt(self) -> SignalRecord | None:
        """The pending signal that ends sleeps and waits early: a cancel, a pause or a shutdown."""
        found: SignalRecord | None = None
        for signal in self.signals:
            if signal.type is SignalType.CANCEL:
                return signal
            if found is None and signal.type in (SignalType.PAUSE, SignalType.SHUTDOWN):
                found = signal
        return found

    def pending(self, type: SignalType) -> SignalRecord | None:
        """The oldest unconsumed signal of one type."""
        return next((s for s in self.signals if s.type is type), None)

    def custom(self, key: str | None) -> SignalRecord | None:
        """The oldest unconsumed custom signal for ``key``."""
        if not self.signals or key is None:
            return None
        return next((s for s in self.signals if s.key == key), None)


class Fact(Enum):
    """What a decision may have to know beyond the state."""

    NUMBER = "number"
    """A fresh number of the store, for an epoch (and for the row of a new instance)."""
    CHECKPOINT = "checkpoint"
    WAIT = "wait"
    REQUEST = "request"
    ATTEMPT = "attempt"
    ERROR = "error"
    SIGNAL = "signal"
    PAYLOADS = "payloads"


Need = tuple[Fact, "str | int | tuple[str, int] | frozenset[PayloadKind] | None"]


@attrs.frozen(kw_only=True)
class Facts:
    """The answers to `needs`; None means that there is no such thing."""

    tenant_id: str
    instance_id: str
    number: int | None = None
    checkpoint: CheckpointRecord | None = None
    wait: WaitRecord | None = None
    request: RequestRecord | None = None
    attempt: RetryAttemptRecord | None = None
    error: bool = False
    """Whether the recorded error exists."""
    signal: SignalRecord | None = None
    payloads: Mapping[PayloadKind, bytes] = attrs.field(factory=dict)
    refuse_new: RuntaraError | None = None
    """Why the runtime takes no new instance: it drains, or is over its cap."""


@attrs.frozen(kw_only=True)
class Release:
    """The end of a held-back reply."""

    wait_id: str
    reply: Reply | RuntaraError


NOTHING: Final[tuple[()]] = ()


@attrs.frozen(kw_only=True)
class Decision:
    """All that follows from one message."""

    state: InstanceState | None
    ops: tuple[Op, ...] = NOTHING
    """To be written in one transaction; empty: nothing changed on disk."""
    reply: Reply | None = None
    """None if and only if ``park`` is set."""
    park: str | None = None
    """Hold the reply back until this wait is released."""
    releases: tuple[Release, ...] = NOTHING
    pushes: tuple[Push, ...] = NOTHING
    """For the session that is live after this change."""
    supersedes: bool = False
    """A new session begins: push `SupersededPush` to the old one, if there is one."""
