"""What travels to an instance's actor, and the session that its pushes travel back to."""

import logging

import attrs

from runtara.actors.mailbox import Future
from runtara.errors import RuntaraError, RuntimeFault
from runtara.link import Done, Sink
from runtara.messages import Reply, Request

logger = logging.getLogger("runtara.actors")

Key = tuple[str, str]
"""(tenant id, instance id)."""


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


class Told(Future[Reply]):
    """A reply that is handed to a function, so that nobody has to wait for it in a task of its own."""

    __slots__ = ("done_with",)

    def __init__(self, done: Done) -> None:
        super().__init__()
        self.done_with = done

    def _complete(self) -> None:
        super()._complete()
        error = self._error
        if error is None:
            answer: Reply | RuntaraError = self._value
        elif isinstance(error, RuntaraError):
            answer = error
        else:
            answer = RuntimeFault(f"the request failed: {error}")
        try:
            self.done_with(answer)
        except Exception:  # the writer, which calls this, has others to answer
            logger.exception("an answer could not be handed on")
