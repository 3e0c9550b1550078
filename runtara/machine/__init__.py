"""All rules of an instance, as two pure functions.

    needs(state, message)                       -> the facts that the decision must know
    decide(state, message, facts, now, limits)  -> what to store, answer, push, and the next state

Rules:

1. No clock, no randomness, no database, no trio: a decision is a function of its arguments alone.
2. A refusal is an exception of `runtara.errors`; then nothing changed and the state stays as it was.
3. The order of checks is: unknown instance, stale epoch, asked before, state of the instance, what the
   request refers to. (The form of the request was checked at the door, by `runtara.validation`.)
4. A change raises the revision by one. The row is written only when a restart must know it.
"""

from typing import Any, Protocol

from runtara.limits import Limits
from runtara.machine import reports, sessions, signals, waits
from runtara.machine.endings import running
from runtara.machine.state import Decision, Fact, Facts, InstanceState, Need, Release
from runtara.messages import (
    AckSignal,
    AskShutdown,
    Attach,
    ExitReport,
    FinishCompensation,
    ForceSuspend,
    ForceTerminate,
    GetCheckpoint,
    GetStatus,
    PollSignals,
    RecordError,
    RecordRetryAttempt,
    Register,
    ReportEvent,
    Request,
    SaveCheckpoint,
    SendSignal,
    SessionLost,
    Sleep,
    StartCompensation,
    StartInstance,
    WaitSignal,
    Wake,
)
from runtara.records import EventType, PayloadKind

__all__ = ["Decision", "Fact", "Facts", "InstanceState", "Limits", "Need", "Release", "decide", "needs"]

NO_NEEDS: tuple[Need, ...] = ()
ALL_PAYLOADS = frozenset(PayloadKind)
INPUT = frozenset({PayloadKind.INPUT})


class Rule(Protocol):
    def __call__(self, state: Any, message: Any, facts: Facts, now_us: int, limits: Limits) -> Decision: ...


RULES: dict[type[Request], Rule] = {
    Register: sessions.register,
    Attach: sessions.attach,
    GetCheckpoint: sessions.get_checkpoint,
    ReportEvent: reports.event,
    PollSignals: signals.poll,
    AckSignal: signals.acknowledge,
    RecordError: reports.record_error,
    ExitReport: reports.exit_report,
    GetStatus: sessions.status,
    StartInstance: sessions.start,
    SendSignal: signals.send,
    ForceTerminate: sessions.force_terminate,
    Wake: waits.wake,
    SessionLost: sessions.session_lost,
    AskShutdown: sessions.ask_shutdown,
    ForceSuspend: sessions.force_suspend,
}
"""Requests that say themselves in which states they apply."""

RULES_WHILE_RUNNING: dict[type[Request], Rule] = {
    SaveCheckpoint: sessions.save_checkpoint,
    Sleep: waits.sleep,
    WaitSignal: waits.wait_signal,
    RecordRetryAttempt: reports.retry_attempt,
    StartCompensation: reports.start_compensation,
    FinishCompensation: reports.finish_compensation,
}
"""Requests of a session whose instance must be running."""


def decide(
    state: InstanceState | None, message: Request, facts: Facts, now_us: int, limits: Limits
) -> Decision:
    """What follows from ``message``.

    Args:
        state: The instance before the message; None if it does not exist.
        message: A request whose form was checked.
        facts: The answers to `needs` of the same state and message.
        now_us: The wall clock, microseconds of UTC.
        limits: The bounds of the instance.

    Raises:
        CallerError: The request is refused; nothing changed.
    """
    rule = RULES_WHILE_RUNNING.get(type(message))
    if rule is not None:
        return rule(running(state, facts, message.epoch), message, facts, now_us, limits)  # type: ignore[union-attr]
    return RULES[type(message)](state, message, facts, now_us, limits)


def needs(state: InstanceState | None, message: Request) -> tuple[Need, ...]:
    """The facts that `decide` must be given for ``message``; empty on most of the hot path's messages."""
    match message:
        case SaveCheckpoint(checkpoint_id=name) | GetCheckpoint(checkpoint_id=name):
            return ((Fact.CHECKPOINT, name),)
        case Register():
            checkpoint = named(Fact.CHECKPOINT, message.checkpoint_id)
            hosted = state is not None and state.row.hosted
            return ((Fact.NUMBER, None), *checkpoint, *(((Fact.PAYLOADS, INPUT),) if hosted else ()))
        case Attach():
            return ((Fact.PAYLOADS, INPUT),) if state is not None and state.row.hosted else ()
        case Sleep():
            again = message.checkpoint_id or message.request_id
            wait = None if again is None else waits.wait_id_of(message, 0)
            return (*named(Fact.WAIT, wait), *named(Fact.CHECKPOINT, message.checkpoint_id))
        case WaitSignal(checkpoint_id=name):
            return ((Fact.WAIT, name), (Fact.CHECKPOINT, name))
        case ReportEvent():
            return (*named(Fact.REQUEST, message.request_id), *suspension_needs(message))
        case AckSignal(signal_id=int() as signal_id):
            known = state is not None and any(s.signal_id == signal_id for s in state.signals)
            return () if known else ((Fact.SIGNAL, signal_id),)
        case RecordRetryAttempt():
            return ((Fact.ATTEMPT, (message.checkpoint_id, message.attempt)),)
        case RecordError():
            cause = () if message.cause_id is None else ((Fact.ERROR, message.cause_id),)
            return (*named(Fact.REQUEST, message.request_id), *cause)
        case _:
            return outside_needs(state, message)


def named(fact: Fact, name: str | None) -> tuple[Need, ...]:
    return () if name is None else ((fact, name),)


def suspension_needs(message: ReportEvent) -> tuple[Need, ...]:
    if message.type is not EventType.SUSPENDED:
        return ()
    name = message.checkpoint_id
    return (*named(Fact.WAIT, name), *named(Fact.CHECKPOINT, name))


def outside_needs(state: InstanceState | None, message: Request) -> tuple[Need, ...]:
    """For those who are no session: starts, signals, the status."""
    match message:
        case StartInstance():
            number = () if state is not None else ((Fact.NUMBER, None),)
            payloads = () if state is None else ((Fact.PAYLOADS, INPUT),)
            return (*number, *payloads, *named(Fact.REQUEST, message.request_id))
        case SendSignal():
            creates = state is None and message.store_if_unknown
            number = ((Fact.NUMBER, None),) if creates else ()
            return (*number, *named(Fact.REQUEST, message.request_id))
        case GetStatus():
            plain = state is None or not (state.row.hosted or state.row.status.is_terminal)
            return () if plain else ((Fact.PAYLOADS, ALL_PAYLOADS),)
        case _:
            return NO_NEEDS
