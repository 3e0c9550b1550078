"""send_signal, send_custom_signal, poll_signals and ack_signal.

Rules:

1. An accepted signal is a row, in the same transaction as what it changes.
2. A live session (connected, or lost but within its grace period) decides when a cancel, pause or shutdown
   takes effect: it is pushed and waits for the acknowledgement. Without one it takes effect at once.
3. An instance-wide signal that is pending already is not stored twice: the answer names the pending one.
   A resume is stored again when there was a pause since.
4. Only a wait that records it or an acknowledgement that names it consumes a custom signal.
"""

import attrs

from runtara.errors import InstanceNotFound, SignalNotPending
from runtara.lifecycle import Cause
from runtara.limits import Limits
from runtara.machine.draft import Draft
from runtara.machine.endings import await_client, cancel, obey_pending, owned, rest, suspend_due
from runtara.machine.requests import recall, remember
from runtara.machine.sessions import blank, finished
from runtara.machine.state import Decision, Facts, InstanceState
from runtara.machine.waits import deliver
from runtara.messages import (
    AckReply,
    AckSignal,
    PollSignals,
    SendSignal,
    SignalReply,
    SignalsReply,
)
from runtara.records import Reason, SignalRecord, SignalType, Status

# ---------------------------------------------------------------- send


def send(
    state: InstanceState | None, message: SendSignal, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    before = recall(facts.request, message, SignalReply)
    if before is not None:
        return Decision(state=state, reply=before)
    draft = Draft(addressee(state, message, facts, now_us), facts, now_us, limits)
    if draft.status.is_terminal:
        raise finished(draft.state.row)
    pending = None if message.type is SignalType.CUSTOM else draft.pending(message.type)
    if pending is None or (pending.type is SignalType.RESUME and to_resume(draft)):
        reply = accept(draft, message)
    else:
        applied = not draft.live and not draft.mailbox and obey_pending(draft)
        reply = signal_reply(draft, pending, applied)
    remember(draft, message, message.request_id, reply)
    if state is None:
        await_client(draft)
    return draft.decide(reply)


def to_resume(draft: Draft) -> bool:
    """Whether there is a pause for a resume to end."""
    return draft.paused or draft.pending(SignalType.PAUSE) is not None


def addressee(state: InstanceState | None, message: SendSignal, facts: Facts, now_us: int) -> InstanceState:
    if state is not None:
        return state
    if not message.store_if_unknown:
        raise InstanceNotFound(facts.instance_id)
    if facts.refuse_new is not None:
        raise facts.refuse_new
    return blank(facts, now_us)


def signal_reply(draft: Draft, signal: SignalRecord, applied: bool) -> SignalReply:
    return SignalReply(signal_id=signal.signal_id, status=draft.status, reason=draft.reason, applied=applied)


def accept(draft: Draft, message: SendSignal) -> SignalReply:
    """Store the signal and let it take effect, or leave it to the live session.

    Only custom signals need room: of the others at most one of a type is pending, and a full queue must not
    keep anybody from ending or resuming the instance.
    """
    signal = SignalRecord(
        revision=draft.revision,
        type=message.type,
        key=message.key,
        payload=message.payload,
        created_us=draft.now_us,
    )
    match message.type:
        case SignalType.CUSTOM:
            draft.check_room(signal.size)
            applied = accept_custom(draft, signal)
        case SignalType.RESUME:
            applied = accept_resume(draft, signal)
        case SignalType.CANCEL:
            applied = accept_cancel(draft, signal)
        case SignalType.PAUSE:
            applied = accept_pause(draft, signal)
        case SignalType.SHUTDOWN:
            applied = accept_shutdown(draft, signal)
    return signal_reply(draft, signal, applied)


def keep(draft: Draft, signal: SignalRecord) -> bool:
    """Leave the signal to the live session."""
    draft.add_signal(signal)
    if signal.type is not SignalType.RESUME:
        draft.interrupt_waits(signal)
    return False


def note(draft: Draft, signal: SignalRecord) -> None:
    """Store the signal as consumed: it takes effect at once, or has none."""
    draft.ops.append(attrs.evolve(signal, acknowledged_us=draft.now_us))


def accept_custom(draft: Draft, signal: SignalRecord) -> bool:
    draft.keep_signal(signal)
    consumed = deliver(draft, signal)
    if not consumed:
        draft.push_signal(signal)
    return consumed


def accept_cancel(draft: Draft, signal: SignalRecord) -> bool:
    if draft.row("intended") is not None:
        note(draft, signal)
        return False
    draft.set_row(cancelling_us=draft.row("cancelling_us") or draft.now_us)
    if draft.live or draft.mailbox:
        return keep(draft, signal)
    note(draft, signal)
    cancel(draft, signal)
    return True


def accept_pause(draft: Draft, signal: SignalRecord) -> bool:
    if draft.reason is Reason.PAUSED:
        note(draft, signal)
        return False
    if draft.status is Status.RUNNING or draft.mailbox:
        return keep(draft, signal)
    note(draft, signal)
    draft.move(Cause.PAUSE)
    return True


def accept_resume(draft: Draft, signal: SignalRecord) -> bool:
    paused = draft.paused
    if not to_resume(draft):
        note(draft, signal)
        return False
    for older in (draft.pending(SignalType.PAUSE), draft.pending(SignalType.RESUME)):
        if older is not None:
            draft.acknowledge(older)
    if draft.connected:
        draft.add_signal(signal)
    else:
        note(draft, signal)
    if paused:
        unpause(draft)
    return True


def unpause(draft: Draft) -> None:
    """Go on where the pause came: in the live session, in a wait, in the queue, or with the client."""
    compensating = draft.row("intended") is not None
    if draft.connected:
        draft.move(Cause.RESUME, Reason.COMPENSATING if compensating else None)
    elif draft.row("hosted") and (compensating or not draft.waits):
        draft.move(Cause.DISPATCH, Reason.COMPENSATING if compensating else None)
    elif compensating:
        suspend_due(draft, Reason.COMPENSATING)
    else:
        rest(draft)


def accept_shutdown(draft: Draft, signal: SignalRecord) -> bool:
    if draft.status is not Status.RUNNING:
        note(draft, signal)
        return False
    return keep(draft, attrs.evolve(signal, epoch=draft.row("epoch")))


# ---------------------------------------------------------------- poll


def poll(
    state: InstanceState | None, message: PollSignals, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    draft = Draft(owned(state, facts, message.epoch), facts, now_us, limits)
    reply = SignalsReply(
        signal=draft.state.control,
        custom_signal=draft.state.custom(message.checkpoint_id),
        last_error=draft.state.last_error,
    )
    draft.show(reply.signal)
    draft.show(reply.custom_signal)
    return draft.decide(reply)


# ---------------------------------------------------------------- acknowledge


def acknowledge(
    state: InstanceState | None, message: AckSignal, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    draft = Draft(owned(state, facts, message.epoch), facts, now_us, limits)
    if draft.status.is_terminal:
        return draft.decide(ack_reply(draft, message.signal_id, False))
    signal = named(draft, message)
    if signal is None or not message.acknowledged:
        return draft.decide(ack_reply(draft, message.signal_id, False))
    draft.acknowledge(signal)
    obey(draft, signal)
    return draft.decide(ack_reply(draft, signal.signal_id, True))


def named(draft: Draft, message: AckSignal) -> SignalRecord | None:
    """The pending signal that the message names; None if it was acknowledged before."""
    if message.signal_id is not None:
        for signal in draft.signals:
            if signal.signal_id == message.signal_id:
                return signal
        if draft.facts.signal is None:
            raise SignalNotPending("signal_id", message.signal_id)
        return None
    for signal in draft.signals:
        if signal.type is message.signal_type and signal.signal_id in draft.now("shown"):
            return signal
    assert message.signal_type is not None
    raise SignalNotPending("signal_type", message.signal_type.word)


def obey(draft: Draft, signal: SignalRecord) -> None:
    """The session acknowledged: the signal takes effect."""
    match signal.type:
        case SignalType.CANCEL if draft.row("intended") is None:
            cancel(draft, signal)
        case SignalType.PAUSE:
            draft.move(Cause.PAUSE)
        case SignalType.SHUTDOWN if draft.status is Status.RUNNING:
            suspend_due(draft, Reason.SHUTDOWN_REQUESTED)
        case _:
            pass


def ack_reply(draft: Draft, signal_id: int | None, applied: bool) -> AckReply:
    return AckReply(
        applied=applied,
        status=draft.status,
        reason=draft.reason,
        signal_id=signal_id,
        compensating=draft.row("intended") is not None and not draft.status.is_terminal,
    )
