"""The life of an instance as a table.

Rules:

1. `TRANSITIONS` is the whole truth: what is not in it is refused, with `InvalidInstanceState`.
2. Nothing leaves a terminal status: completed, failed and cancelled have no row.
3. A cause says what happened; the reason that is stored with the new status says why the instance is
   there. `REASONS` gives it where the cause alone decides it.

The diagram in ``docs/lifecycle.md`` is generated from this table by `diagram`.
"""

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from runtara.errors import InvalidInstanceState
from runtara.records import Reason, Status


class Cause(Enum):
    """What can move an instance from one status to another."""

    START = "start"
    """Started for a workflow, to be dispatched."""
    ADDRESS = "address"
    """A signal was stored for an instance that does not exist yet."""
    REGISTER = "register"
    """A session begins."""
    COMPLETE = "complete"
    FAIL = "fail"
    CANCEL = "cancel"
    TERMINATE = "terminate"
    """An operator ends it, whatever it does."""
    SUSPEND = "suspend"
    """It leaves: asleep, waiting, disconnected, shut down, or to be compensated by its client."""
    PAUSE = "pause"
    RESUME = "resume"
    """A paused instance goes on in its live session."""
    DISPATCH = "dispatch"
    """A hosted instance is due, or lost its host: it queues for one."""
    COMPENSATE = "compensate"
    """Its live session undoes what was done."""


S = Status
C = Cause

TRANSITIONS: Mapping[tuple[Status | None, Cause], Status] = MappingProxyType(
    {
        (None, C.START): S.PENDING,
        (None, C.ADDRESS): S.PENDING,
        (None, C.REGISTER): S.RUNNING,
        (S.PENDING, C.START): S.PENDING,
        (S.PENDING, C.REGISTER): S.RUNNING,
        (S.PENDING, C.CANCEL): S.CANCELLED,
        (S.PENDING, C.FAIL): S.FAILED,
        (S.PENDING, C.TERMINATE): S.CANCELLED,
        (S.PENDING, C.PAUSE): S.SUSPENDED,
        (S.PENDING, C.SUSPEND): S.SUSPENDED,
        (S.PENDING, C.DISPATCH): S.PENDING,
        (S.RUNNING, C.REGISTER): S.RUNNING,
        (S.RUNNING, C.COMPLETE): S.COMPLETED,
        (S.RUNNING, C.FAIL): S.FAILED,
        (S.RUNNING, C.CANCEL): S.CANCELLED,
        (S.RUNNING, C.TERMINATE): S.CANCELLED,
        (S.RUNNING, C.SUSPEND): S.SUSPENDED,
        (S.RUNNING, C.PAUSE): S.SUSPENDED,
        (S.RUNNING, C.DISPATCH): S.PENDING,
        (S.RUNNING, C.COMPENSATE): S.RUNNING,
        (S.SUSPENDED, C.REGISTER): S.RUNNING,
        (S.SUSPENDED, C.RESUME): S.RUNNING,
        (S.SUSPENDED, C.DISPATCH): S.PENDING,
        (S.SUSPENDED, C.SUSPEND): S.SUSPENDED,
        (S.SUSPENDED, C.PAUSE): S.SUSPENDED,
        (S.SUSPENDED, C.COMPENSATE): S.RUNNING,
        (S.SUSPENDED, C.CANCEL): S.CANCELLED,
        (S.SUSPENDED, C.FAIL): S.FAILED,
        (S.SUSPENDED, C.TERMINATE): S.CANCELLED,
    }
)

REASONS: Mapping[Cause, Reason | None] = MappingProxyType(
    {
        C.START: None,
        C.ADDRESS: None,
        C.REGISTER: None,
        C.COMPLETE: Reason.COMPLETED,
        C.FAIL: Reason.APPLICATION_ERROR,
        C.CANCEL: Reason.CANCELLED,
        C.TERMINATE: Reason.CANCELLED,
        C.PAUSE: Reason.PAUSED,
        C.RESUME: None,
        C.DISPATCH: None,
        C.COMPENSATE: Reason.COMPENSATING,
    }
)


def allows(status: Status | None, cause: Cause) -> bool:
    """Whether ``cause`` can move an instance that has ``status``."""
    return (status, cause) in TRANSITIONS


def advance(status: Status | None, cause: Cause) -> Status:
    """The status after ``cause``.

    Raises:
        InvalidInstanceState: The table has no such row.
    """
    target = TRANSITIONS.get((status, cause))
    if target is None:
        expected = [s.word for s, c in TRANSITIONS if c is cause and s is not None]
        raise InvalidInstanceState(" or ".join(expected), "absent" if status is None else status.word)
    return target


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2"]
    for (source, cause), target in TRANSITIONS.items():
        begin = "[*]" if source is None else source.word
        lines.append(f"    {begin} --> {target.word}: {cause.value}")
    lines += [f"    {status.word} --> [*]" for status in Status if status.is_terminal]
    return "\n".join(lines) + "\n"
