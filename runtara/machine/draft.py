"""A decision in the making.

A `Draft` collects what one message changes and turns it into a `Decision`. It is made, used and dropped
within one call of `decide`; nothing outside ever sees one, so `decide` stays a function of its arguments.

Rules:

1. The revision of the change is the state's plus one; if nothing is written, the revision stays.
2. The row is written when one of its fields changed, and also when the change appends no record of its
   own, so that every revision is found on disk.
3. What is pushed and shown to the session goes through `push_signal`, so ``shown`` never lies.
"""

from typing import Any

import attrs

from runtara.errors import AlreadyFinished, Overloaded, RuntaraError, SignalQueueFull
from runtara.lifecycle import REASONS, Cause, advance
from runtara.limits import Limits
from runtara.machine.state import Decision, Facts, InstanceState, Release
from runtara.messages import ClosedPush, Push, Reply, SignalPush, WaitReply
from runtara.records import (
    AcknowledgeSignal,
    CheckpointRecord,
    CompensationRecord,
    CompensationSpec,
    CompensationState,
    EventRecord,
    EventType,
    InstanceRecord,
    Op,
    PayloadKind,
    PutPayload,
    Reason,
    SettleWait,
    SignalRecord,
    SignalType,
    Status,
    StepRecord,
    WaitKind,
    WaitOutcome,
    WaitRecord,
)

UNFINISHED = (CompensationState.PENDING, CompensationState.TRIGGERED)


@attrs.define(eq=False)
class Draft:
    """See the module's docstring."""

    state: InstanceState
    facts: Facts
    now_us: int
    limits: Limits
    ops: list[Op] = attrs.field(factory=list)
    pushes: list[Push] = attrs.field(factory=list)
    releases: list[Release] = attrs.field(factory=list)
    park_id: str | None = None
    row_changes: dict[str, Any] = attrs.field(factory=dict)
    changes: dict[str, Any] = attrs.field(factory=dict)
    """Of the state, besides the row."""
    supersedes: bool = False

    # ------------------------------------------------------------ reading

    @property
    def revision(self) -> int:
        return self.state.revision + 1

    def now(self, name: str) -> Any:
        """A field of the state as it is in the draft."""
        return self.changes[name] if name in self.changes else getattr(self.state, name)

    def row(self, name: str) -> Any:
        """A field of the row as it is in the draft."""
        return self.row_changes[name] if name in self.row_changes else getattr(self.state.row, name)

    @property
    def status(self) -> Status:
        found: Status = self.row("status")
        return found

    @property
    def reason(self) -> Reason | None:
        found: Reason | None = self.row("reason")
        return found

    @property
    def paused(self) -> bool:
        return self.status is Status.SUSPENDED and self.reason is Reason.PAUSED

    @property
    def signals(self) -> tuple[SignalRecord, ...]:
        found: tuple[SignalRecord, ...] = self.now("signals")
        return found

    @property
    def waits(self) -> tuple[WaitRecord, ...]:
        found: tuple[WaitRecord, ...] = self.now("waits")
        return found

    @property
    def compensations(self) -> tuple[CompensationRecord, ...]:
        found: tuple[CompensationRecord, ...] = self.now("compensations")
        return found

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        found: tuple[StepRecord, ...] = self.now("steps")
        return found

    @property
    def connected(self) -> bool:
        return bool(self.now("connected"))

    @property
    def live(self) -> bool:
        """Whether a session is there to acknowledge: connected, or lost but within its grace period."""
        return self.connected or self.status is Status.RUNNING

    @property
    def mailbox(self) -> bool:
        """Whether nobody has started or registered the instance yet: it only keeps signals."""
        return self.row("epoch") == 0 and not self.row("hosted")

    # ------------------------------------------------------------ changing

    def set(self, **changes: Any) -> None:
        """Change fields of the state."""
        self.changes.update(changes)

    def set_row(self, **changes: Any) -> None:
        """Change fields of the row."""
        for name, value in changes.items():
            if self.row(name) != value:
                self.row_changes[name] = value

    def move(self, cause: Cause, reason: Reason | None = None) -> None:
        """Take the transition of ``cause``; its own reason unless another one is given."""
        status = advance(self.status, cause)
        self.set_row(status=status, reason=reason if reason is not None else REASONS.get(cause))
        if status.is_terminal:
            self.finish_life(status)
        elif status is not Status.SUSPENDED:
            self.set_row(awaits_client_us=None)
        self.rearm()

    def count_crash(self) -> None:
        """One more attempt; after progress, the first again."""
        progress = self.now("checkpoint_id") != self.state.row.checkpoint_id
        self.set_row(attempt=1 if progress else self.row("attempt") + 1)

    def finish_life(self, status: Status) -> None:
        self.set_row(finished_us=self.now_us, awaits_client_us=None, intended=None)
        self.release_all(AlreadyFinished(status.word, self.reason.word if self.reason else None, self.now_us))
        self.set(waits=())

    def rearm(self) -> None:
        """Set ``sleep_until`` to the earliest deadline that may move the instance."""
        held = self.paused or self.status.is_terminal
        deadlines = [] if held else [w.deadline_us for w in self.waits if w.deadline_us is not None]
        self.set_row(sleep_until_us=min(deadlines, default=None))

    # ------------------------------------------------------------ records

    def add_event(self, type: EventType, **fields: Any) -> EventRecord:
        fields.setdefault("created_us", self.now_us)
        event = EventRecord(revision=self.revision, type=type, **fields)
        self.ops.append(event)
        return event

    def put_payload(self, kind: PayloadKind, data: bytes | None) -> None:
        if data:
            self.ops.append(PutPayload(kind=kind, data=data))

    def add_checkpoint(
        self, checkpoint_id: str, state: bytes, compensation: CompensationSpec | None = None
    ) -> CheckpointRecord:
        """Append a checkpoint; it becomes the current one."""
        record = CheckpointRecord(
            revision=self.revision,
            checkpoint_id=checkpoint_id,
            state=state,
            created_us=self.now_us,
            compensation=compensation,
        )
        self.ops.append(record)
        self.set(checkpoint_id=checkpoint_id)
        if compensation is not None:
            self.add_compensation(checkpoint_id, compensation)
        return record

    def add_compensation(self, checkpoint_id: str, spec: CompensationSpec) -> None:
        if len(self.compensations) >= self.limits.compensations:
            limit = self.limits.compensations
            raise Overloaded(f"the instance has {limit} compensations, which is the limit")
        record = CompensationRecord(
            checkpoint_id=checkpoint_id, step_id=spec.step_id, order=spec.order, revision=self.revision
        )
        self.set(compensations=(*self.compensations, record))
        if self.row("compensation_state") is CompensationState.NONE:
            self.set_row(compensation_state=CompensationState.PENDING)

    # ------------------------------------------------------------ waits

    def add_wait(
        self,
        wait_id: str,
        kind: WaitKind,
        deadline_us: int | None,
        key: str | None = None,
        outcome: WaitOutcome | None = None,
    ) -> WaitRecord:
        """Append a wait: open, or settled at once if ``outcome`` is given."""
        if outcome is None and len(self.waits) >= self.limits.open_waits:
            raise Overloaded(f"the instance has {self.limits.open_waits} open waits, which is the limit")
        wait = WaitRecord(
            revision=self.revision,
            wait_id=wait_id,
            kind=kind,
            key=key,
            deadline_us=deadline_us,
            created_us=self.now_us,
            outcome=outcome,
            settled_us=None if outcome is None else self.now_us,
        )
        self.ops.append(wait)
        if outcome is None:
            self.set(waits=(*self.waits, wait))
            self.rearm()
        return wait

    def settle(
        self,
        wait: WaitRecord,
        outcome: WaitOutcome,
        payload: bytes | None = None,
        signal_id: int | None = None,
    ) -> WaitReply:
        """End an open wait for good and answer whoever is parked on it."""
        self.ops.append(SettleWait(wait_id=wait.wait_id, outcome=outcome, settled_us=self.now_us))
        self.set(waits=tuple(w for w in self.waits if w.wait_id != wait.wait_id))
        reply = WaitReply(
            outcome=outcome,
            deadline_us=wait.deadline_us,
            payload=payload,
            signal_id=signal_id,
            signal=self.control_signal(),
        )
        self.release(wait.wait_id, reply)
        self.rearm()
        return reply

    def consume(self, wait: WaitRecord, signal: SignalRecord) -> WaitReply:
        """Record ``signal`` as the checkpoint of an open wait; the signal is consumed."""
        payload = signal.payload or b""
        self.acknowledge(signal)
        self.add_checkpoint(wait.wait_id, payload)
        return self.settle(wait, WaitOutcome.RECEIVED, payload, signal.signal_id)

    def park(self, wait_id: str) -> None:
        """Hold the reply to this message back until the wait ends."""
        self.park_id = wait_id
        self.set(parked=self.now("parked") | {wait_id})

    def release(self, wait_id: str, reply: Reply | RuntaraError) -> None:
        parked: frozenset[str] = self.now("parked")
        if wait_id in parked:
            self.releases.append(Release(wait_id=wait_id, reply=reply))
            self.set(parked=parked - {wait_id})

    def release_all(self, error: RuntaraError) -> None:
        """Answer all that are parked with an error; their waits stay as they are."""
        for wait_id in sorted(self.now("parked")):
            self.release(wait_id, error)

    def interrupt_waits(self, signal: SignalRecord) -> None:
        """End all parked waits early; they stay open and may be asked for again."""
        for wait in self.waits:
            if wait.wait_id in self.now("parked"):
                self.show(signal)
            self.release(wait.wait_id, WaitReply(outcome=None, deadline_us=wait.deadline_us, signal=signal))

    def control_signal(self) -> SignalRecord | None:
        """The oldest pending instance-wide signal, a cancel first, for a reply: it is shown."""
        signal = attrs.evolve(self.state, signals=self.signals).control
        self.show(signal)
        return signal

    # ------------------------------------------------------------ signals

    def pending(self, type: SignalType) -> SignalRecord | None:
        """The oldest unconsumed signal of one type."""
        return next((s for s in self.signals if s.type is type), None)

    def check_room(self, size: int) -> None:
        """Refuse a signal that is over the bounds in number or bytes."""
        if len(self.signals) >= self.limits.pending_signals:
            raise SignalQueueFull(
                f"the instance holds {len(self.signals)} unconsumed signals, which is the limit"
            )
        if sum(s.size for s in self.signals) + size > self.limits.pending_signal_bytes:
            raise SignalQueueFull(
                f"the unconsumed signals of the instance would hold more than "
                f"{self.limits.pending_signal_bytes} bytes"
            )

    def add_signal(self, signal: SignalRecord) -> None:
        """Append a pending signal and push it."""
        self.keep_signal(signal)
        self.push_signal(signal)

    def keep_signal(self, signal: SignalRecord) -> None:
        """Append a pending signal; it is not pushed yet."""
        self.ops.append(signal)
        self.set(signals=(*self.signals, signal))

    def push_signal(self, signal: SignalRecord) -> None:
        if self.connected:
            self.pushes.append(SignalPush(signal=signal))
            self.show(signal)

    def show(self, signal: SignalRecord | None) -> None:
        """Note that the session has seen a signal."""
        if signal is not None and signal.signal_id not in self.now("shown"):
            self.set(shown=self.now("shown") | {signal.signal_id})
            seen = attrs.evolve(signal, shown_us=signal.shown_us or self.now_us)
            self.set(signals=tuple(seen if s.signal_id == signal.signal_id else s for s in self.signals))

    def acknowledge(self, signal: SignalRecord) -> None:
        """Consume a pending signal."""
        self.ops.append(
            AcknowledgeSignal(
                signal_id=signal.signal_id, shown_us=signal.shown_us, acknowledged_us=self.now_us
            )
        )
        self.set(
            signals=tuple(s for s in self.signals if s.signal_id != signal.signal_id),
            shown=self.now("shown") - {signal.signal_id},
        )

    def push(self, push: Push) -> None:
        """Push something else than a signal to the live session."""
        if self.connected:
            self.pushes.append(push)

    def close_session(self) -> None:
        """Tell the session that the instance left it, and forget the session."""
        self.push(ClosedPush(status=self.status, reason=self.reason))
        self.set(connected=False, shown=frozenset())

    # ------------------------------------------------------------ the end

    def decide(self, reply: Reply | None = None) -> Decision:
        """The decision that this draft has become. ``reply`` is left out if and only if it is parked."""
        if self.ops or self.row_changes:
            self.write_row()
            self.changes["revision"] = self.revision
        self.changes["last_activity_us"] = max(self.state.last_activity_us, self.now_us)
        return Decision(
            state=attrs.evolve(self.state, **self.changes),
            ops=tuple(self.ops),
            reply=None if self.park_id is not None else reply,
            park=self.park_id,
            releases=tuple(self.releases),
            pushes=tuple(self.pushes),
            supersedes=self.supersedes,
        )

    def write_row(self) -> None:
        """Put the row into the unit where rule 2 asks for it. Progress clears the count of attempts."""
        if not self.row_changes and any(hasattr(op, "revision") for op in self.ops):
            return
        changes = dict(self.row_changes)
        checkpoint_id = self.now("checkpoint_id")
        if checkpoint_id != self.state.row.checkpoint_id and self.row("attempt") > 1:
            changes["attempt"] = 1
        row: InstanceRecord = attrs.evolve(
            self.state.row,
            **changes,
            revision=self.revision,
            checkpoint_id=checkpoint_id,
            last_activity_us=max(self.state.last_activity_us, self.now_us),
        )
        self.ops.insert(0, row)
        self.changes["row"] = row
