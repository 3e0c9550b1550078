"""Mailboxes and futures: how actors of one trio loop talk to each other.

Rules:

1. Everything here is called on the trio loop. Putting, setting and failing are synchronous and wake at most
   one task.
2. A mailbox has many writers and one reader, and keeps the order in which messages were put.
3. A mailbox is bounded: who puts into a full one is told so at once (`trio.WouldBlock`) and never waits.
4. A reader that is cancelled leaves the mailbox as it was; a reader that returns has the messages.
5. A future is completed once. The first `set` or `fail` wins, later ones are ignored.
6. A value that is there is returned: `Future.wait` on a completed future is a checkpoint, but not a
   cancellation point.

How it works. The reader (or waiter) parks with `wait_task_rescheduled` and leaves its task in a slot; who has
something for it empties the slot and reschedules the task. Trio forgets the abort function of a task that is
rescheduled, so from that moment on a cancellation cannot come between the message and its reader: that is
rules 4 and 6. Between being rescheduled and running, `take_nowait` may have emptied the mailbox, so a reader
looks again and parks again.

The messages stand in a list, not in a `collections.deque`: an empty deque holds a block of 64 slots (about
700 bytes), and there may be very many idle mailboxes.
"""

from collections.abc import Iterable
from typing import Generic, TypeVar

import attrs
import trio
from trio.lowlevel import (
    Abort,
    RaiseCancelT,
    Task,
    cancel_shielded_checkpoint,
    checkpoint,
    current_task,
    reschedule,
    wait_task_rescheduled,
)

T = TypeVar("T")
M = TypeVar("M")


def twin_of(error: Exception) -> Exception:
    """A copy of the error that can be raised without changing the original.

    One error object may fail many futures. Raised itself by each waiter, its traceback would grow with every
    one of them, and a waiter's frames would show up in the log of another. The twin has the original's class,
    arguments, attributes, notes, cause and traceback so far. It is built without the class's own constructor,
    whose parameters often differ from `args`. An error that cannot be rebuilt like that (it has slots, or
    says something else afterwards) is returned itself, with its traceback cleared.
    """
    twin = rebuilt(error)
    if twin is None:
        return error.with_traceback(None)
    twin.__cause__ = error.__cause__
    twin.__suppress_context__ = error.__suppress_context__
    if hasattr(error, "__notes__"):
        twin.__notes__ = list(error.__notes__)
    return twin.with_traceback(error.__traceback__)


def rebuilt(error: Exception) -> Exception | None:
    """The error made again from its class, `args` and attributes; None if that is not faithful."""
    kind = type(error)
    if any(getattr(base, "__slots__", ()) for base in kind.__mro__):
        return None
    builtin: type = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    try:
        twin = kind.__new__(kind, *error.args)
        builtin.__init__(twin, *error.args)  # type: ignore[misc]  # a built-in class fits its own instance
        vars(twin).update(vars(error))
        return twin if str(twin) == str(error) else None
    except Exception:  # whatever a foreign class raises: it only means that there is no twin
        return None


class Future(Generic[T]):
    """A value, or an error, that one task waits for.

    On a hot path write `reply: Future[int] = Future()`: the form `Future[int]()` is several times slower to
    create.
    """

    __slots__ = ("_done", "_error", "_task", "_value")

    _value: T

    def __init__(self) -> None:
        self._task: Task | None = None
        self._done = False
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether the future has its value or its error."""
        return self._done

    def set(self, value: T) -> None:
        """Complete the future with a value; ignored if it is already completed."""
        if not self._done:
            self._value = value
            self._complete()

    def fail(self, error: Exception) -> None:
        """Complete the future with an error; ignored if it is already completed.

        The same error may be handed to any number of futures: each waiter raises its own copy (see
        `twin_of`).
        """
        if not self._done:
            self._error = error
            self._complete()

    async def wait(self) -> T:
        """Wait for the future to be completed. May be called again afterwards.

        Returns: the value. Raises: a copy of the error given to `fail`; `trio.BusyResourceError` if another
            task is waiting already. Cancellation: before completion the waiter goes away, the future can
            still be completed and waited for; after completion the result is returned even in a cancelled
            scope.
        """
        if self._done:
            await cancel_shielded_checkpoint()
        else:
            if self._task is not None:
                raise trio.BusyResourceError("another task is already waiting for this future")
            self._task = current_task()
            await wait_task_rescheduled(self._leave)
        if self._error is not None:
            raise twin_of(self._error)
        return self._value

    def _complete(self) -> None:
        self._done = True
        task = self._task
        if task is not None:
            self._task = None
            reschedule(task)

    def _leave(self, _: RaiseCancelT) -> Abort:
        self._task = None
        return Abort.SUCCEEDED


@attrs.frozen(kw_only=True)
class MailboxStatistics:
    """A mailbox at one moment."""

    items: int
    """Messages that nobody has taken. Above `limit` only after a `put_back`."""
    limit: int
    """`put_nowait` is refused from this many items on."""
    waiting: bool
    """Whether a reader is parked."""


class Mailbox(Generic[M]):
    """A bounded queue of messages with one reader.

    Args: limit: the number of messages from which on `put_nowait` is refused, at least 1.

    Ordering: messages come out in the order in which they were put; those put back come first.
    """

    __slots__ = ("_closed", "_items", "_limit", "_reader")

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a mailbox must hold at least one message, not {limit}")
        self._limit = limit
        self._items: list[M] = []
        self._reader: Task | None = None
        self._closed = False

    def put_nowait(self, message: M) -> None:
        """Put a message at the end, or refuse it at once.

        Raises: `trio.WouldBlock` if the mailbox is full, `trio.ClosedResourceError` if it is closed.
        """
        if self._closed:
            raise trio.ClosedResourceError("the mailbox is closed")
        if len(self._items) >= self._limit:
            raise trio.WouldBlock
        self._items.append(message)
        if self._reader is not None:
            self._wake_reader()

    def put_back(self, messages: Iterable[M]) -> None:
        """Return messages that were taken, in their order, before all others.

        Never refused, not even when full or closed: these messages had been accepted.
        """
        self._items[:0] = messages
        if self._items and self._reader is not None:
            self._wake_reader()

    async def get_all(self) -> list[M]:
        """Wait for at least one message and take everything that is there.

        Raises: `trio.EndOfChannel` if the mailbox is closed and empty, `trio.BusyResourceError` if another
            reader waits. Cancellation: nothing is taken.
        """
        await self._wait_for_items()
        return self.take_nowait()

    async def get(self) -> M:
        """Wait for a message and take the first one. Raises and Cancellation: as `get_all`."""
        await self._wait_for_items()
        return self._items.pop(0)

    def take_nowait(self) -> list[M]:
        """Take everything that is there now, which may be nothing."""
        items = self._items
        self._items = []
        return items

    def close(self) -> None:
        """Refuse further messages. The reader gets those that are there, then `trio.EndOfChannel`.
        May be repeated.
        """
        self._closed = True
        if self._reader is not None:
            self._wake_reader()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def idle(self) -> bool:
        """Whether the reader is parked and nothing waits for it."""
        return self._reader is not None and not self._items

    def statistics(self) -> MailboxStatistics:
        """The state of the mailbox now."""
        return MailboxStatistics(items=len(self._items), limit=self._limit, waiting=self._reader is not None)

    async def _wait_for_items(self) -> None:
        if self._items:
            await checkpoint()  # a busy reader must still let other tasks run, and be cancellable
        while not self._items:
            if self._closed:
                await checkpoint()
                raise trio.EndOfChannel
            if self._reader is not None:
                raise trio.BusyResourceError("another task is already reading from this mailbox")
            self._reader = current_task()
            await wait_task_rescheduled(self._leave)

    def _wake_reader(self) -> None:
        task = self._reader
        assert task is not None
        self._reader = None
        reschedule(task)

    def _leave(self, _: RaiseCancelT) -> Abort:
        self._reader = None
        return Abort.SUCCEEDED
