"""Where blocking calls run: the only module that starts a thread.

Rules:

1. A call that was handed over always runs to its end, and its outcome is always received: cancellation
   waits for it. So no transaction is ever left open by a cancelled task.
2. One `ThreadExecutor` is one thread for its whole life. Calls run one by one, in order. The outcomes of all
   calls that end between two passes of the trio loop come back in one wake-up.
3. While a call is running and the loop has more to do, the loop *donates* the interpreter lock: it sleeps for
   `DONATION_SECONDS` once per pass. Without it, a loop that is never idle starves the thread, which must win
   the lock back after each statement and may wait the whole switch interval (5 ms) each time. A loop that
   waits for I/O gives the lock away by itself.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

import attrs
import outcome
import trio

T = TypeVar("T")

DONATION_SECONDS: Final = 50e-6


class Executor(Protocol):
    """Runs blocking calls for a trio program."""

    async def run(self, call: Callable[[], T]) -> T:
        """Run ``call`` and return what it returns, or raise what it raises. Not cancellable (rule 1)."""
        ...

    async def close(self) -> None:
        """End after the calls that were handed over. Later ones raise `RuntimeError`."""
        ...


class InlineExecutor:
    """Runs each call at once, on the trio loop: for tests under a mock clock, and for simulation."""

    async def run(self, call: Callable[[], T]) -> T:
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()
        return call()

    async def close(self) -> None:
        await trio.lowlevel.checkpoint()


@attrs.define(eq=False)
class Job:
    """A call on its way to the thread and back."""

    call: Callable[[], Any]
    task: trio.lowlevel.Task
    outcome: "outcome.Outcome[Any] | None" = None


class Donation(trio.abc.Instrument):
    """Gives the interpreter lock away once per pass of a loop that is busy (it does not wait for I/O)."""

    def after_io_wait(self, timeout: float) -> None:
        if timeout <= 0:
            time.sleep(DONATION_SECONDS)


class ThreadExecutor:
    """One long-lived thread."""

    def __init__(self, name: str, *, donate: bool = False) -> None:
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.done: deque[Job] = deque()
        self.token = trio.lowlevel.current_trio_token()
        self.donation = Donation() if donate else None
        self.pending = 0
        self.closed = False
        self.thread = threading.Thread(target=self.work, name=name, daemon=True)
        self.thread.start()

    async def run(self, call: Callable[[], T]) -> T:
        if self.closed:
            raise RuntimeError("the executor is closed")
        job = Job(call, trio.lowlevel.current_task())
        self.begin()
        self.jobs.put(job)
        result: T = await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
        return result

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.jobs.put(None)
            with trio.CancelScope(shield=True):
                while self.thread.is_alive():
                    await trio.sleep(0.001)
        await trio.lowlevel.checkpoint()

    def begin(self) -> None:
        self.pending += 1
        if self.pending == 1 and self.donation is not None:
            trio.lowlevel.add_instrument(self.donation)

    def end(self, count: int) -> None:
        self.pending -= count
        if count and self.pending == 0 and self.donation is not None:
            trio.lowlevel.remove_instrument(self.donation)

    def work(self) -> None:
        """The thread: run jobs and ring the loop; rings that it has not answered yet are one."""
        while (job := self.jobs.get()) is not None:
            job.outcome = outcome.capture(job.call)
            self.done.append(job)
            try:
                self.token.run_sync_soon(self.deliver, idempotent=True)
            except trio.RunFinishedError:
                return

    def deliver(self) -> None:
        """On the loop: hand all finished jobs their outcomes.

        There may be none: an earlier call may have taken the job for which the thread rings only now.
        """
        count = 0
        while self.done:
            job = self.done.popleft()
            count += 1
            assert job.outcome is not None
            trio.lowlevel.reschedule(job.task, job.outcome)
        self.end(count)
