"""register, the loss of a session, drains, starts, forced endings, and the status."""

import attrs

from runtara.errors import (
    AlreadyFinished,
    CheckpointNotFound,
    Conflict,
    InvalidInstanceState,
    StaleEpoch,
)
from runtara.lifecycle import Cause
from runtara.limits import Limits
from runtara.machine.draft import Draft
from runtara.machine.endings import known, leave, obey_pending, owned
from runtara.machine.requests import recall, remember
from runtara.machine.state import Decision, Facts, InstanceState
from runtara.messages import (
    AskShutdown,
    Attach,
    ChangeReply,
    CheckpointReply,
    ClosedPush,
    ForceSuspend,
    ForceTerminate,
    FoundCheckpoint,
    GetCheckpoint,
    GetStatus,
    InstanceView,
    Register,
    Registered,
    SaveCheckpoint,
    SessionLost,
    StartInstance,
    StartReply,
)
from runtara.records import (
    CheckpointRecord,
    CompensationState,
    EventType,
    InstanceRecord,
    PayloadKind,
    Reason,
    SignalRecord,
    SignalType,
    Status,
)

ATTACHED = "attached"
"""Subtype of the event that says that a session goes on over another connection."""


def blank(facts: Facts, now_us: int, *, hosted: bool = False) -> InstanceState:
    """The state before the first change of a new instance; its first change makes the row."""
    assert facts.number is not None
    row = InstanceRecord(
        row=facts.number,
        tenant_id=facts.tenant_id,
        instance_id=facts.instance_id,
        status=Status.PENDING,
        hosted=hosted,
        revision=0,
        created_us=now_us,
        last_activity_us=now_us,
    )
    return InstanceState(row=row, revision=0, last_activity_us=now_us)


# ---------------------------------------------------------------- register


def register(
    state: InstanceState | None, message: Register, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    created = state is None
    if created and facts.refuse_new is not None:
        raise facts.refuse_new
    if state is not None:
        check_known(state, message)
    if message.checkpoint_id is not None and facts.checkpoint is None:
        raise CheckpointNotFound(message.checkpoint_id)
    draft = Draft(state or blank(facts, now_us), facts, now_us, limits)
    due = draft.row("awaits_client_us") is not None and not created
    begin_session(draft, message)
    draft.add_event(EventType.STARTED, checkpoint_id=message.checkpoint_id)
    return draft.decide(
        Registered(
            epoch=draft.row("epoch"),
            created=created,
            status=draft.status,
            paused=draft.status is Status.SUSPENDED,
            due=due,
            attempt=draft.row("attempt"),
            compensating=draft.row("intended") is not None,
            input=facts.payloads.get(PayloadKind.INPUT),
            checkpoint_id=draft.now("checkpoint_id"),
            signals=draft.signals,
        )
    )


def check_known(state: InstanceState, message: Register) -> None:
    row = state.row
    if message.workflow is not None and row.workflow is not None and row.workflow != message.workflow:
        raise Conflict("workflow", f"the instance runs {row.workflow!r}, not {message.workflow!r}")
    if row.status.is_terminal:
        raise finished(row)


def finished(row: InstanceRecord) -> AlreadyFinished:
    return AlreadyFinished(row.status.word, row.reason.word if row.reason else None, row.finished_us)


def begin_session(draft: Draft, message: Register) -> None:
    old_epoch, epoch = draft.row("epoch"), draft.facts.number
    assert epoch is not None
    draft.supersedes = True
    draft.release_all(StaleEpoch(old_epoch, epoch))
    for signal in [s for s in draft.signals if s.type is SignalType.SHUTDOWN]:
        draft.acknowledge(signal)
    if draft.status is Status.RUNNING and not draft.connected:
        draft.count_crash()
    draft.set_row(
        epoch=epoch,
        workflow=draft.row("workflow") or message.workflow,
        definition_version=message.definition_version or draft.row("definition_version"),
        started_us=draft.row("started_us") or draft.now_us,
        attempt=max(1, draft.row("attempt")),
    )
    if not draft.paused:
        draft.move(Cause.REGISTER, Reason.COMPENSATING if draft.row("intended") else None)
    draft.set(connected=True, shown=frozenset())
    for signal in draft.signals:
        draft.push_signal(signal)


def attach(
    state: InstanceState | None, message: Attach, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    found = owned(state, facts, message.epoch)
    draft = Draft(found, facts, now_us, limits)
    if found.connected:
        raise Conflict("epoch", "the session is held by another connection")
    if draft.status is not Status.RUNNING and not draft.paused:
        raise InvalidInstanceState("running or paused", draft.status.word)
    draft.supersedes = True
    draft.set(connected=True, shown=frozenset())
    draft.add_event(EventType.STARTED, subtype=ATTACHED)
    for signal in draft.signals:
        draft.push_signal(signal)
    return draft.decide(
        Registered(
            epoch=message.epoch,
            created=False,
            status=draft.status,
            paused=draft.paused,
            due=False,
            attempt=draft.row("attempt"),
            compensating=draft.row("intended") is not None,
            input=facts.payloads.get(PayloadKind.INPUT),
            checkpoint_id=draft.now("checkpoint_id"),
            signals=draft.signals,
        )
    )


def session_lost(
    state: InstanceState | None, message: SessionLost, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    found = owned(state, facts, message.epoch)
    draft = Draft(found, facts, now_us, limits)
    if message.orphaned and found.connected:  # its client has come back in time
        return Decision(
            state=found, reply=ChangeReply(applied=False, status=draft.status, reason=draft.reason)
        )
    applied = found.row.status is Status.RUNNING
    if applied:
        leave(
            draft,
            Reason.ORPHANED if message.orphaned else Reason.DISCONNECTED,
            crashed=message.crashed,
        )
    else:
        lose_idle_session(draft)
    return draft.decide(ChangeReply(applied=applied, status=draft.status, reason=draft.reason))


def lose_idle_session(draft: Draft) -> None:
    """The session of an instance that is not running goes: what only it could acknowledge takes effect."""
    draft.set(connected=False, shown=frozenset())
    if not draft.status.is_terminal and not draft.mailbox:
        obey_pending(draft)


def ask_shutdown(
    state: InstanceState | None, message: AskShutdown, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    found = owned(state, facts, message.epoch)
    draft = Draft(found, facts, now_us, limits)
    applied = found.row.status is Status.RUNNING and found.pending(SignalType.SHUTDOWN) is None
    if applied:
        signal = SignalRecord(
            revision=draft.revision, type=SignalType.SHUTDOWN, created_us=now_us, epoch=message.epoch
        )
        draft.add_signal(signal)
        draft.interrupt_waits(signal)
    return draft.decide(ChangeReply(applied=applied, status=draft.status, reason=draft.reason))


def force_suspend(
    state: InstanceState | None, message: ForceSuspend, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    found = owned(state, facts, message.epoch)
    draft = Draft(found, facts, now_us, limits)
    applied = found.row.status is Status.RUNNING
    if applied:
        leave(draft, Reason.SHUTDOWN_REQUESTED)
    else:
        lose_idle_session(draft)
    return draft.decide(ChangeReply(applied=applied, status=draft.status, reason=draft.reason))


# ---------------------------------------------------------------- checkpoints


def save_checkpoint(
    state: InstanceState, message: SaveCheckpoint, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    """The hot path: a new checkpoint is one record and one small change of the state."""
    found = facts.checkpoint
    if found is None and message.state:
        if state.waits and any(wait.wait_id == message.checkpoint_id for wait in state.waits):
            raise Conflict("checkpoint_id", f"{message.checkpoint_id!r} is the name of an open wait")
        if message.compensation is not None:
            return save_compensatable(state, message, facts, now_us, limits)
        record = CheckpointRecord(
            revision=state.revision + 1,
            checkpoint_id=message.checkpoint_id,
            state=message.state,
            created_us=now_us,
        )
        state = state.after_checkpoint(record)
        reply = checkpoint_reply(state, message.checkpoint_id, message.state, False, now_us)
        return Decision(state=having_shown(state, reply, now_us), ops=(record,), reply=reply)
    state = attrs.evolve(state, last_activity_us=max(now_us, state.last_activity_us))
    if found is None:
        reply = checkpoint_reply(state, message.checkpoint_id, None, False, None)
    else:
        reply = checkpoint_reply(state, message.checkpoint_id, found.state, True, found.created_us)
    return Decision(state=having_shown(state, reply, now_us), reply=reply)


def having_shown(state: InstanceState, reply: CheckpointReply, now_us: int) -> InstanceState:
    """``state`` with the signals of the reply noted as seen; the same object if they all were."""
    if reply.signal is None and reply.custom_signal is None:
        return state
    new = {
        signal.signal_id
        for signal in (reply.signal, reply.custom_signal)
        if signal is not None and signal.signal_id not in state.shown
    }
    if not new:
        return state
    seen = tuple(
        attrs.evolve(s, shown_us=s.shown_us or now_us) if s.signal_id in new else s for s in state.signals
    )
    return attrs.evolve(state, signals=seen, shown=state.shown | new)


def save_compensatable(
    state: InstanceState, message: SaveCheckpoint, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    draft = Draft(state, facts, now_us, limits)
    assert message.state is not None
    draft.add_checkpoint(message.checkpoint_id, message.state, message.compensation)
    reply = checkpoint_reply(state, message.checkpoint_id, message.state, False, now_us)
    draft.show(reply.signal)
    draft.show(reply.custom_signal)
    return draft.decide(reply)


def checkpoint_reply(
    state: InstanceState, checkpoint_id: str, stored: bytes | None, found: bool, created_us: int | None
) -> CheckpointReply:
    return CheckpointReply(
        found=found,
        state=stored,
        created_us=created_us,
        signal=state.control,
        custom_signal=state.custom(checkpoint_id),
        last_error=state.last_error,
    )


def get_checkpoint(
    state: InstanceState | None, message: GetCheckpoint, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    return Decision(state=known(state, facts), reply=FoundCheckpoint(checkpoint=facts.checkpoint))


# ---------------------------------------------------------------- anyone


def start(
    state: InstanceState | None, message: StartInstance, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    before = recall(facts.request, message, StartReply)
    if before is not None:
        return Decision(state=state, reply=before)
    if state is not None and state.row.workflow is not None:
        return start_again(state, message, facts)
    if facts.refuse_new is not None:
        raise facts.refuse_new
    draft = Draft(state or blank(facts, now_us, hosted=True), facts, now_us, limits)
    draft.set_row(
        hosted=True,
        workflow=message.workflow,
        definition_version=message.definition_version,
        max_attempts=message.max_attempts,
        deadline_us=None if message.timeout_us is None else now_us + message.timeout_us,
    )
    if state is not None:
        draft.move(Cause.START)
    draft.put_payload(PayloadKind.INPUT, message.input)
    reply = StartReply(created=True, status=Status.PENDING)
    remember(draft, message, message.request_id, reply)
    return draft.decide(reply)


def start_again(state: InstanceState, message: StartInstance, facts: Facts) -> Decision:
    if state.row.workflow != message.workflow:
        raise Conflict("workflow", f"the instance runs {state.row.workflow!r}, not {message.workflow!r}")
    if (facts.payloads.get(PayloadKind.INPUT) or b"") != (message.input or b""):
        raise Conflict("input", "the instance was started with another input")
    return Decision(state=state, reply=StartReply(created=False, status=state.row.status))


def force_terminate(
    state: InstanceState | None, message: ForceTerminate, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    found = known(state, facts)
    if found.row.status.is_terminal:
        raise finished(found.row)
    draft = Draft(found, facts, now_us, limits)
    if message.error:
        draft.put_payload(PayloadKind.ERROR, message.error.encode())
    if draft.row("intended") is not None:
        draft.set_row(compensation_state=CompensationState.FAILED)
    draft.set_row(cancelling_us=draft.row("cancelling_us") or now_us)
    connected = draft.connected
    draft.move(Cause.TERMINATE)
    draft.set(connected=False, shown=frozenset())
    if connected:
        draft.pushes.append(ClosedPush(status=draft.status, reason=draft.reason))
    return draft.decide(ChangeReply(applied=True, status=draft.status, reason=draft.reason))


def status(
    state: InstanceState | None, message: GetStatus, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    if state is None:
        return Decision(state=None, reply=unknown(facts))
    error = facts.payloads.get(PayloadKind.ERROR)
    view = InstanceView(
        record=state.row,
        revision=state.revision,
        checkpoint_id=state.checkpoint_id,
        last_activity_us=state.last_activity_us,
        unconsumed_signals=len(state.signals),
        connected=state.connected,
        input=facts.payloads.get(PayloadKind.INPUT),
        output=facts.payloads.get(PayloadKind.OUTPUT),
        error=None if error is None else error.decode(),
        stderr=facts.payloads.get(PayloadKind.STDERR),
    )
    return Decision(state=state, reply=view)


def unknown(facts: Facts) -> InstanceView:
    """The answer about an instance that does not exist."""
    record = InstanceRecord(
        row=0,
        tenant_id=facts.tenant_id,
        instance_id=facts.instance_id,
        status=Status.UNKNOWN,
        revision=0,
        created_us=0,
        last_activity_us=0,
    )
    return InstanceView(
        record=record,
        revision=0,
        checkpoint_id=None,
        last_activity_us=0,
        unconsumed_signals=0,
        connected=False,
        error="Instance not found",
    )
