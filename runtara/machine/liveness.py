"""Nothing is stuck in silence: what will move an instance, as a pure function of its state.

Promise P10 as a table. Every change must leave an instance with a `Mover`; the property tests of the machine
check that after each decision, and the runtime may ask it of anything that is loaded.
"""

from enum import Enum

import attrs

from runtara.machine.state import InstanceState
from runtara.records import InstanceRecord, SignalRecord, Status, WaitKind, WaitRecord


class Mover(Enum):
    """What moves an instance next."""

    ENDED = "ended"
    """Nothing, and nothing has to: it has ended."""
    OWNER = "owner"
    """It is running: its session, or the end of the grace period of a lost one."""
    DISPATCH = "dispatch"
    """It is pending and hosted: a place in the dispatch queue."""
    RESUME = "resume"
    """It is paused: whoever paused it."""
    TIME = "time"
    """A deadline."""
    SIGNAL = "signal"
    """A signal that it waits for and that has not come yet."""
    CLIENT = "client"
    """Its client; it is listed, with its age."""


class Stuck(Enum):
    """Why nothing moves an instance."""

    NO_REASON = "no_reason_to_move"
    """It rests, and waits for nothing that can still come."""
    NO_SESSION = "no_session"
    """It is running, and nobody has its session."""
    UNREADABLE = "unreadable"
    """Its rows cannot be read, so it cannot be brought to life."""


@attrs.frozen(kw_only=True)
class Violation:
    """An instance that breaks P10."""

    stuck: Stuck
    record: InstanceRecord


def reason_to_move(state: InstanceState) -> Mover | None:
    """What will move the instance; None is a violation of P10."""
    row = state.row
    if row.status.is_terminal:
        return Mover.ENDED
    if row.status is Status.RUNNING:
        return Mover.OWNER
    if row.status is Status.PENDING and row.hosted:
        return Mover.DISPATCH
    if row.paused:
        return Mover.RESUME
    if row.sleep_until_us is not None:
        return Mover.TIME
    if row.awaits_client_us is not None:
        return Mover.CLIENT
    if any(awaited(wait, state.signals) for wait in state.waits):
        return Mover.SIGNAL
    return None if row.deadline_us is None else Mover.TIME


def awaited(wait: WaitRecord, signals: tuple[SignalRecord, ...]) -> bool:
    """Whether the signal of an open wait is still to come."""
    return wait.kind is WaitKind.SIGNAL and all(signal.key != wait.key for signal in signals)
