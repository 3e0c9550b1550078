"""sleep, wait_signal and wake.

Rules:

1. A wait is a row, named by the checkpoint id it is asked under. The first entry fixes kind, key and
   deadline; asking again under the same id finds the same wait, over reconnects and restarts.
2. A deadline is reached when the wall clock says so, not when a timer fires.
3. A signal accepted before the deadline of a wait wins over the timeout; one accepted after it stays queued.
4. cancel, pause and shutdown end a wait early: the answer carries that signal, the wait stays open.
"""

from runtara.errors import Conflict
from runtara.lifecycle import Cause
from runtara.limits import Limits
from runtara.machine.draft import Draft
from runtara.machine.endings import become_due, end, in_time, known
from runtara.machine.state import Decision, Facts, InstanceState
from runtara.messages import ChangeReply, ClosedPush, Sleep, WaitReply, WaitSignal, Wake
from runtara.records import (
    Reason,
    SignalRecord,
    WaitKind,
    WaitOutcome,
    WaitRecord,
)


def wait_id_of(message: Sleep, revision: int) -> str:
    """The name of a sleep's wait; a sleep without a checkpoint id and a request id cannot be asked again."""
    return message.checkpoint_id or named_by(message.request_id, revision)


def named_by(request_id: str | None, revision: int) -> str:
    """The name of a wait without a checkpoint id. A request id never looks like a revision of ours."""
    return f"~{revision}" if request_id is None else f"~request:{request_id}"


def reached(wait: WaitRecord, now_us: int) -> bool:
    return wait.deadline_us is not None and wait.deadline_us <= now_us


# ---------------------------------------------------------------- sleep


def sleep(state: InstanceState, message: Sleep, facts: Facts, now_us: int, limits: Limits) -> Decision:
    draft = Draft(state, facts, now_us, limits)
    if facts.wait is None:
        return enter_sleep(draft, message)
    wait = facts.wait
    if wait.kind is not message.kind:
        raise Conflict("checkpoint_id", f"{wait.wait_id!r} was used for a wait of another kind")
    if not wait.open:
        return draft.decide(ended(draft, wait))
    return go_on_sleeping(draft, wait)


def enter_sleep(draft: Draft, message: Sleep) -> Decision:
    checkpoint_id, now_us = message.checkpoint_id, draft.now_us
    if draft.facts.checkpoint is not None:
        raise Conflict("checkpoint_id", f"{checkpoint_id!r} was used for a checkpoint before")
    if checkpoint_id is not None:
        draft.add_checkpoint(checkpoint_id, message.state or b"")
    outcome = WaitOutcome.ELAPSED if message.duration_us == 0 else None
    wait_id = wait_id_of(message, draft.revision)
    wait = draft.add_wait(wait_id, message.kind, now_us + message.duration_us, outcome=outcome)
    return go_on_sleeping(draft, wait) if wait.open else draft.decide(ended(draft, wait))


def go_on_sleeping(draft: Draft, wait: WaitRecord) -> Decision:
    if reached(wait, draft.now_us):
        return draft.decide(draft.settle(wait, WaitOutcome.ELAPSED))
    return interrupt_or_park(draft, wait)


def interrupt_or_park(draft: Draft, wait: WaitRecord) -> Decision:
    signal = draft.state.interrupt
    if signal is None:
        draft.park(wait.wait_id)
        return draft.decide()
    draft.show(signal)
    return draft.decide(WaitReply(outcome=None, deadline_us=wait.deadline_us, signal=signal))


def ended(
    draft: Draft, wait: WaitRecord, payload: bytes | None = None, signal_id: int | None = None
) -> WaitReply:
    return WaitReply(
        outcome=wait.outcome,
        deadline_us=wait.deadline_us,
        payload=payload,
        signal_id=signal_id,
        signal=draft.control_signal(),
    )


# ---------------------------------------------------------------- wait_signal


def wait_signal(
    state: InstanceState, message: WaitSignal, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    draft = Draft(state, facts, now_us, limits)
    if facts.wait is None:
        return enter_wait(draft, message)
    wait = facts.wait
    if wait.kind is not WaitKind.SIGNAL:
        raise Conflict("checkpoint_id", f"{wait.wait_id!r} was used for a wait of another kind")
    if wait.key != message.key:
        raise Conflict("key", f"{wait.wait_id!r} waits for {wait.key!r}, not for {message.key!r}")
    if wait.open:
        return go_on_waiting(draft, wait)
    payload = None
    if wait.outcome is WaitOutcome.RECEIVED:
        payload = b"" if facts.checkpoint is None else facts.checkpoint.state
    return draft.decide(ended(draft, wait, payload))


def enter_wait(draft: Draft, message: WaitSignal) -> Decision:
    if draft.facts.checkpoint is not None:
        raise Conflict("checkpoint_id", f"{message.checkpoint_id!r} was used for a checkpoint before")
    deadline = None if message.timeout_us is None else draft.now_us + message.timeout_us
    signal = None if draft.state.interrupt else draft.state.custom(message.key)
    if signal is not None:
        return receive_at_once(draft, message, signal, deadline)
    if message.timeout_us == 0 and draft.state.interrupt is None:
        outcome = WaitOutcome.TIMED_OUT
        wait = draft.add_wait(message.checkpoint_id, WaitKind.SIGNAL, deadline, message.key, outcome)
        return draft.decide(ended(draft, wait))
    wait = draft.add_wait(message.checkpoint_id, WaitKind.SIGNAL, deadline, message.key)
    return interrupt_or_park(draft, wait)


def receive_at_once(
    draft: Draft, message: WaitSignal, signal: SignalRecord, deadline_us: int | None
) -> Decision:
    """The signal is there already: the wait is stored with its outcome, and nothing is ever open."""
    draft.acknowledge(signal)
    payload = signal.payload or b""
    draft.add_checkpoint(message.checkpoint_id, payload)
    wait = draft.add_wait(
        message.checkpoint_id, WaitKind.SIGNAL, deadline_us, message.key, WaitOutcome.RECEIVED
    )
    return draft.decide(ended(draft, wait, payload, signal.signal_id))


def go_on_waiting(draft: Draft, wait: WaitRecord) -> Decision:
    signal = in_time(draft, wait)
    if signal is not None and draft.state.interrupt is None:
        return draft.decide(draft.consume(wait, signal))
    if signal is None and reached(wait, draft.now_us):
        return draft.decide(draft.settle(wait, WaitOutcome.TIMED_OUT))
    return interrupt_or_park(draft, wait)


def deliver(draft: Draft, signal: SignalRecord) -> bool:
    """A custom signal was just accepted: whether a parked wait consumed it. Either way a rest may end."""
    waiting = [w for w in draft.waits if w.kind is WaitKind.SIGNAL and next_for(draft, w) == signal.signal_id]
    parked = next((w for w in waiting if w.wait_id in draft.now("parked")), None)
    if parked is not None:
        draft.consume(parked, signal)
    if waiting:
        become_due(draft)
    return parked is not None


def next_for(draft: Draft, wait: WaitRecord) -> int | None:
    """The id of the signal that the wait would consume now."""
    signal = in_time(draft, wait)
    return None if signal is None else signal.signal_id


# ---------------------------------------------------------------- wake


def wake(state: InstanceState | None, message: Wake, facts: Facts, now_us: int, limits: Limits) -> Decision:
    """A deadline was reached, says the scheduler; the row and the wall clock have the last word."""
    found = known(state, facts)
    row = found.row
    if row.epoch != message.epoch or row.due_us != message.deadline_us or now_us < message.deadline_us:
        return Decision(state=found, reply=ChangeReply(applied=False, status=row.status, reason=row.reason))
    draft = Draft(found, facts, now_us, limits)
    if row.deadline_us is not None and row.deadline_us <= now_us:
        time_out(draft)
    else:
        ring(draft)
    return draft.decide(ChangeReply(applied=True, status=draft.status, reason=draft.reason))


def time_out(draft: Draft) -> None:
    connected = draft.connected
    draft.set_row(deadline_us=None)
    end(draft, Cause.FAIL, Reason.TIMEOUT, "Timed out")
    if draft.status.is_terminal and connected:
        draft.pushes.append(ClosedPush(status=draft.status, reason=draft.reason))
        draft.set(connected=False, shown=frozenset())


def ring(draft: Draft) -> None:
    """Settle the waits that are due, then let a resting instance go on.

    A change appends at most one checkpoint, so it consumes at most one signal; a second due wait with a
    signal keeps its deadline, and rings again at once.
    """
    draft.set_row(sleep_until_us=None)
    consumed = False
    for wait in draft.waits:
        if reached(wait, draft.now_us):
            signal = in_time(draft, wait) if wait.kind is WaitKind.SIGNAL else None
            if signal is None:
                elapsed = WaitOutcome.TIMED_OUT if wait.kind is WaitKind.SIGNAL else WaitOutcome.ELAPSED
                draft.settle(wait, elapsed)
            elif not consumed:
                draft.consume(wait, signal)
                consumed = True
    draft.rearm()
    become_due(draft)
