"""Actors: a task with a name and a mailbox, which handles one message after the other.

Rules:

1. Messages are handled one at a time, in the order of the mailbox. A handler that raises ends the actor.
2. The mailbox may outlive the actor. Messages taken from it and not begun when the actor ends go back to its
   front, for the next incarnation. The one that was being handled is lost with the actor, never handled
   twice.
3. Who asked with the lost message is told: `Actor.lost` fails the message's reply future. So an `ask` returns
   or raises, as long as somebody goes on reading the mailbox. Who gives a mailbox up for good closes it, and
   answers what `take_nowait` still finds there.
4. An actor whose mailbox is closed handles what is left, then ends normally.

There is no checkpoint between the messages of a batch except in the handlers; a batch is never longer than
what the mailbox held.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

import trio

from runtara.actors.mailbox import Future, Mailbox

M = TypeVar("M")
T = TypeVar("T")


class ActorEnded(Exception):
    """The actor ended while it was handling the message. Whether the message took effect is not known.

    `name` is the actor's name.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"actor {self.name} ended while it was handling the message"


class Actor(ABC, Generic[M]):
    """One role with its mailbox. Subclasses say what a message does.

    Args: name: for logs. mailbox: read by this actor alone while it runs; give the same one to the next
        incarnation.
    """

    __slots__ = ("mailbox", "name")

    def __init__(self, name: str, mailbox: Mailbox[M]) -> None:
        self.name = name
        self.mailbox = mailbox

    @abstractmethod
    async def handle(self, message: M) -> None:
        """Do what the message asks. An exception ends the actor (let it crash)."""

    def lost(self, message: M) -> None:
        """The actor is ending, and this message was being handled; called once, must not raise.

        As it stands, a `Future` in the attribute `reply` of the message fails with `ActorEnded`.
        """
        reply: object = getattr(message, "reply", None)
        if isinstance(reply, Future):
            reply.fail(ActorEnded(self.name))

    def tell(self, message: M) -> None:
        """Put a message into the mailbox and do not wait. Raises: as `Mailbox.put_nowait`."""
        self.mailbox.put_nowait(message)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Handle messages until the mailbox is closed and empty.

        Raises: what `handle` raises. Cancellation: as a failure, see rules 2 and 3; a message whose handler
            had not begun stays in the mailbox.
        """
        task_status.started()
        while True:
            try:
                batch = await self.mailbox.get_all()
            except trio.EndOfChannel:
                return
            await self.handle_each(batch)

    async def handle_each(self, batch: list[M]) -> None:
        """Handle messages that were taken from the mailbox (rules 1 to 3)."""
        begun = 0
        try:
            for message in batch:
                begun += 1
                await self.handle(message)
        except BaseException:  # cancellation as well; always raised again
            self.mailbox.put_back(batch[begun:])
            self.lost(batch[begun - 1])
            raise


async def ask(mailbox: Mailbox[M], make_message: Callable[[Future[T]], M]) -> T:
    """Put a message that carries a reply future, and wait for the reply.

    Args: make_message: called with the future, returns the message; keep it in the attribute `reply` (see
        rule 3).
    Raises: as `Mailbox.put_nowait`; what the future fails with. Cancellation: the message stays on its way
        and is handled; its reply is dropped.
    """
    reply: Future[T] = Future()
    mailbox.put_nowait(make_message(reply))
    return await reply.wait()
