"""What may be asked over a connection: every operation by its name, what it takes and gives, and who may ask.

The names, requests and replies are those of `runtara.messages`; ``docs/protocol.md`` lists them, and a test
keeps the two in step.
"""

from collections.abc import Iterable
from enum import Enum
from typing import Any, Final

import attrs

from runtara import messages as m


class Role(Enum):
    """What the bearer of a token may do, for the tenant of the token."""

    INSTANCE = "instance"
    """Hold sessions: register, checkpoint, wait, report."""
    WORKER = "worker"
    """Run workflows; all of `INSTANCE`."""
    OPERATOR = "operator"
    """See everything of the tenant, signal, end and purge instances."""
    ADMIN = "admin"
    """Everything, for every tenant, and the tokens."""


def role_words(roles: Iterable[Role]) -> tuple[str, ...]:
    """Roles as they are written: in one order."""
    return tuple(sorted(role.value for role in roles))


HOLDERS: Final = frozenset({Role.INSTANCE, Role.WORKER, Role.ADMIN})
OPERATORS: Final = frozenset({Role.OPERATOR, Role.ADMIN})
ADMINS: Final = frozenset({Role.ADMIN})
ANYONE: Final = frozenset(Role)


@attrs.frozen
class Operation:
    """One operation on one instance."""

    request: type[Any]
    reply: type[Any]
    roles: frozenset[Role]


OPERATIONS: Final[dict[str, Operation]] = {
    "register": Operation(m.Register, m.Registered, HOLDERS),
    "attach": Operation(m.Attach, m.Registered, HOLDERS),
    "leave": Operation(m.SessionLost, m.ChangeReply, HOLDERS),
    "checkpoint": Operation(m.SaveCheckpoint, m.CheckpointReply, HOLDERS),
    "get_checkpoint": Operation(m.GetCheckpoint, m.FoundCheckpoint, ANYONE),
    "sleep": Operation(m.Sleep, m.WaitReply, HOLDERS),
    "wait_signal": Operation(m.WaitSignal, m.WaitReply, HOLDERS),
    "event": Operation(m.ReportEvent, m.EventReply, HOLDERS),
    "poll_signals": Operation(m.PollSignals, m.SignalsReply, HOLDERS),
    "ack_signal": Operation(m.AckSignal, m.AckReply, HOLDERS),
    "retry_attempt": Operation(m.RecordRetryAttempt, m.RetryReply, HOLDERS),
    "record_error": Operation(m.RecordError, m.ErrorReply, HOLDERS),
    "start_compensation": Operation(m.StartCompensation, m.CompensationReply, HOLDERS),
    "finish_compensation": Operation(m.FinishCompensation, m.CompensationReply, HOLDERS),
    "exit_report": Operation(m.ExitReport, m.ChangeReply, HOLDERS),
    "status": Operation(m.GetStatus, m.InstanceView, ANYONE),
    "send_signal": Operation(m.SendSignal, m.SignalReply, OPERATORS | {Role.WORKER}),
    "terminate": Operation(m.ForceTerminate, m.ChangeReply, OPERATORS),
}
"""Those that an instance's actor answers."""

NAME_OF: Final = {operation.request: name for name, operation in OPERATIONS.items()}

PUSH_KINDS: Final[dict[type[m.Push], str]] = {
    m.SignalPush: "signal",
    m.WakePush: "wake",
    m.SupersededPush: "superseded",
    m.ClosedPush: "closed",
}
"""The pushes of a session, by the word that they travel under."""
