"""How an instance ends, leaves and comes back: the changes that several messages share."""

from runtara.errors import InstanceNotFound, InvalidInstanceState, StaleEpoch
from runtara.lifecycle import REASONS, Cause
from runtara.machine.draft import UNFINISHED, Draft
from runtara.machine.state import Facts, InstanceState
from runtara.messages import ClosedPush, WakePush
from runtara.records import (
    CompensationState,
    PayloadKind,
    Reason,
    SignalRecord,
    SignalType,
    Status,
    WaitKind,
    WaitRecord,
)


def known(state: InstanceState | None, facts: Facts) -> InstanceState:
    """The state of an instance that must exist."""
    if state is None:
        raise InstanceNotFound(facts.instance_id)
    return state


def owned(state: InstanceState | None, facts: Facts, epoch: int) -> InstanceState:
    """The state of an instance whose newest session must be of ``epoch``."""
    found = known(state, facts)
    if epoch != found.row.epoch:
        raise StaleEpoch(epoch, found.row.epoch)
    return found


def running(state: InstanceState | None, facts: Facts, epoch: int) -> InstanceState:
    """The same, and it must be running."""
    found = owned(state, facts, epoch)
    if found.row.status is not Status.RUNNING:
        raise InvalidInstanceState(Status.RUNNING.word, found.row.status.word)
    return found


def end(draft: Draft, cause: Cause, reason: Reason | None = None, error: str | None = None) -> None:
    """Fail or cancel the instance; first its compensations, if any are due."""
    if error is not None:
        draft.put_payload(PayloadKind.ERROR, error.encode())
    intended = Status.CANCELLED if cause is Cause.CANCEL else Status.FAILED
    if draft.row("intended") is None and any(c.state in UNFINISHED for c in draft.compensations):
        begin_compensating(draft, intended, reason or REASONS[cause])
        return
    draft.move(cause, reason)


def cancel(draft: Draft, signal: SignalRecord) -> None:
    """A cancel takes effect; its payload is the text that says why."""
    text = None if not signal.payload else signal.payload.decode(errors="replace")
    end(draft, Cause.CANCEL, error=text)


def begin_compensating(draft: Draft, intended: Status, reason: Reason | None) -> None:
    """Turn compensating: in the live session, in the dispatch queue, or waiting for the client.

    The instance's own deadline was for the work, not for undoing it. ``compensation_reason`` keeps the word
    of the reason with which the instance will end.
    """
    draft.set_row(
        intended=intended,
        cancelling_us=draft.row("cancelling_us") or draft.now_us,
        deadline_us=None,
        compensation_state=CompensationState.TRIGGERED,
        compensation_reason=None if reason is None else reason.word,
    )
    draft.release_all(InvalidInstanceState(Status.RUNNING.word, Reason.COMPENSATING.word))
    if draft.row("hosted"):
        draft.move(Cause.DISPATCH, Reason.COMPENSATING)
        draft.close_session()
    elif draft.connected:
        draft.move(Cause.COMPENSATE)
    else:
        draft.move(Cause.SUSPEND, Reason.COMPENSATING)
        await_client(draft)


def finish_compensating(draft: Draft) -> None:
    """Become terminal once every compensation has ended."""
    if draft.row("intended") is None or any(c.state in UNFINISHED for c in draft.compensations):
        return
    failed = any(c.state is CompensationState.FAILED for c in draft.compensations)
    draft.set_row(compensation_state=CompensationState.FAILED if failed else CompensationState.COMPLETED)
    word = draft.row("compensation_reason")
    reason = None if word is None else Reason[word.upper()]
    draft.move(Cause.CANCEL if draft.row("intended") is Status.CANCELLED else Cause.FAIL, reason)


def await_client(draft: Draft) -> None:
    """From now on only its client can move the instance."""
    if draft.row("awaits_client_us") is None:
        draft.set_row(awaits_client_us=draft.now_us)


def in_time(draft: Draft, wait: WaitRecord) -> SignalRecord | None:
    """The oldest unconsumed signal for the wait's key, if it came before the wait or before its deadline."""
    signal = next((s for s in draft.signals if s.key == wait.key), None)
    if signal is None or wait.deadline_us is None or signal.revision < wait.revision:
        return signal
    return signal if signal.created_us < wait.deadline_us else None


def answered(draft: Draft) -> bool:
    """Whether what an open wait waits for is there already, so that nothing more will come for it."""
    return any(w.kind is WaitKind.SIGNAL and in_time(draft, w) is not None for w in draft.waits)


def resting_reason(draft: Draft) -> Reason:
    """Why an instance without a session rests where it is."""
    kinds = {wait.kind for wait in draft.waits}
    if kinds & {WaitKind.SLEEP, WaitKind.RETRY}:
        return Reason.SLEEPING
    return Reason.WAITING_SIGNAL if kinds else Reason.DISCONNECTED


def rest(draft: Draft, reason: Reason | None = None) -> None:
    """Suspend without a session to come back in: until a wait ends, or until the client registers."""
    reason = reason or resting_reason(draft)
    if not draft.waits or answered(draft):
        suspend_due(draft, reason)
    else:
        draft.move(Cause.SUSPEND, reason)


def leave(draft: Draft, reason: Reason, *, crashed: bool = False) -> None:
    """The session is gone. What was asked of it and not acknowledged takes effect now."""
    if crashed:
        draft.count_crash()
    draft.release_all(StaleEpoch(draft.row("epoch"), draft.row("epoch")))
    draft.set(connected=False, shown=frozenset())
    for shutdown in [s for s in draft.signals if s.type is SignalType.SHUTDOWN]:
        draft.acknowledge(shutdown)
    if not obey_pending(draft):
        go_on_elsewhere(draft, reason)
    draft.pushes.append(ClosedPush(status=draft.status, reason=draft.reason))


def go_on_elsewhere(draft: Draft, reason: Reason) -> None:
    """The session is gone and nobody asked the instance to end or to pause."""
    intended = draft.row("intended") is not None
    if draft.row("hosted") and reason is not Reason.SHUTDOWN_REQUESTED:
        draft.move(Cause.DISPATCH, Reason.COMPENSATING if intended else None)
    elif intended or reason is Reason.SHUTDOWN_REQUESTED:
        suspend_due(draft, Reason.COMPENSATING if intended else reason)
    else:
        rest(draft, reason)


def obey_pending(draft: Draft) -> bool:
    """Let a pending cancel, or else a pending pause, take effect: its session is gone. Whether one did."""
    signal, pause = draft.pending(SignalType.CANCEL), draft.pending(SignalType.PAUSE)
    if signal is not None and draft.row("intended") is None:
        draft.acknowledge(signal)
        cancel(draft, signal)
        return True
    if pause is not None:
        draft.acknowledge(pause)
        draft.move(Cause.PAUSE)
        return True
    return False


def suspend_due(draft: Draft, reason: Reason) -> None:
    """Suspend, due at once: to be dispatched, or recorded as due for the client."""
    draft.move(Cause.SUSPEND, reason)
    if draft.row("hosted"):
        draft.set_row(sleep_until_us=draft.now_us)
    else:
        await_client(draft)


def become_due(draft: Draft) -> None:
    """A suspended instance has a reason to go on: dispatch it, or record it as due and tell its client."""
    if draft.status is not Status.SUSPENDED or draft.reason is Reason.PAUSED:
        return
    if draft.row("hosted"):
        draft.move(Cause.DISPATCH, Reason.COMPENSATING if draft.row("intended") else None)
        return
    await_client(draft)
    draft.push(WakePush())
