"""What travels to an instance's actor, and the session that its pushes travel back to."""

from typing import Protocol

import attrs

from runtara.actors.mailbox import Future
from runtara.errors import RuntaraError
from runtara.messages import Push, Reply, Request

Key = tuple[str, str]
"""(tenant id, instance id)."""


class Sink(Protocol):
    """Where the pushes of a session go."""

    @property
    def abandoned(self) -> bool:
        """Whether whoever asked for the session went away before it began."""
        ...

    def push(self, push: Push) -> None:
        """Take a push. Must not block, must not raise, and must keep within a bound of its own."""
        ...

    def end(self, error: RuntaraError) -> None:
        """Nothing more will be pushed, because of ``error``. Must not raise."""
        ...


class Letter:
    """A request on its way to an actor."""

    __slots__ = ("message", "reply", "sink", "size")

    def __init__(self, message: Request, size: int, sink: Sink | None = None) -> None:
        self.message = message
        self.reply: Future[Reply] = Future()
        self.size = size
        """Bytes that it takes from the budget until it is settled."""
        self.sink = sink
        """Where the pushes of a new session go; with `Register` only."""


@attrs.frozen
class Session:
    """The live session of an instance. It survives its instance's actor."""

    epoch: int
    sink: Sink
