"""The supervision tree of a runtime, and the one door through which requests reach its actors.

    writer       the persistence actor
    instances    the directory, which hosts one actor per live instance
    wake         the wake scheduler
    recovery     ends the sessions that nobody has: of a runtime that died, or left while the store was away
    retention    purges what has ended and is kept no longer

Rules:

1. Started in this order, stopped in the reverse; when one fails, those after it are started anew
   (rest-for-one), because they stand on what it lost.
2. A request is held against the budget in bytes from the door until it is on disk. Over the budget callers
   wait in order of arrival, for ``overload_seconds`` at most.
3. Damage of the store, or an actor of the tree that fails again and again, stops the whole runtime.
"""

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import attrs
import trio

from runtara.actors.directory import Directory, DirectoryStatistics
from runtara.actors.instance import Surroundings
from runtara.actors.letters import Key, Letter, Told
from runtara.actors.mailbox import Future
from runtara.actors.numbers import Numbers
from runtara.actors.persistence import PersistenceActor, WriterStatistics
from runtara.actors.purge import Purger
from runtara.actors.retention import RetentionActor, RetentionStatistics
from runtara.actors.supervisor import (
    ChildSpec,
    Intensity,
    RestartIntensityExceeded,
    Strategy,
    Supervisor,
)
from runtara.actors.wake import WakeScheduler, WakeStatistics
from runtara.clock import Clock
from runtara.config import Settings
from runtara.errors import (
    Draining,
    Overloaded,
    RuntaraError,
    RuntimeFault,
    StoreError,
    StoreFailed,
    StoreRefused,
    TooManyInstances,
)
from runtara.limits import MAX_INT
from runtara.link import Done, Sink
from runtara.machine.liveness import Stuck, Violation
from runtara.messages import (
    AskShutdown,
    ChangeReply,
    ClosedPush,
    ForceSuspend,
    GetStatus,
    Reply,
    Request,
    SessionLost,
)
from runtara.persistence.store import Due, Store, StoreStatistics
from runtara.records import Status
from runtara.validation import check, size_of

logger = logging.getLogger("runtara.actors")

TREE_INTENSITY: Final = Intensity(restarts=5, seconds=60.0)
RECOVERY_PAGE: Final = 200


class Budget:
    """Bytes that the runtime may hold (rule 2)."""

    def __init__(self, settings: Settings) -> None:
        self.limit = settings.budget_bytes
        self.patience = settings.overload_seconds
        self.used = 0
        self.queue: deque[tuple[int, Future[None]]] = deque()

    def fits(self, size: int) -> bool:
        """Whether there is room now; a single request always fits into an empty budget."""
        return not self.queue and (self.used + size <= self.limit or self.used == 0)

    async def wait(self, size: int) -> None:
        """Wait for room and take it.

        Raises:
            Overloaded: There was none in time.
        """
        future: Future[None] = Future()
        place = (size, future)
        self.queue.append(place)
        try:
            with trio.move_on_after(self.patience):
                try:
                    await future.wait()
                finally:
                    if not future.done:
                        self.queue.remove(place)
                        self.admit()  # it may have stood before smaller ones
        except trio.Cancelled:
            if future.done:  # let in while the cancellation was on its way
                self.release(size)
            raise
        if not future.done:
            raise Overloaded(
                f"the runtime holds {self.used} bytes of requests, the limit is {self.limit}",
                retry_after_seconds=1.0,
            )

    def release(self, size: int) -> None:
        self.used -= size
        self.admit()

    def admit(self) -> None:
        """Let those in for whom there is room, in order."""
        while self.queue and (self.used + self.queue[0][0] <= self.limit or self.used == 0):
            waiting, future = self.queue.popleft()
            self.used += waiting
            future.set(None)


@attrs.frozen(kw_only=True)
class SystemStatistics:
    """The runtime at one moment."""

    instances: DirectoryStatistics
    writer: WriterStatistics
    wake: WakeStatistics
    retention: RetentionStatistics
    store: StoreStatistics
    budget_used: int
    draining: bool


class System:
    """See the module's docstring."""

    def __init__(self, store: Store, clock: Clock, settings: Settings) -> None:
        self.store = store
        self.clock = clock
        self.settings = settings
        self.limits = settings.limits()
        self.numbers = Numbers(store)
        self.budget = Budget(settings)
        self.writer = PersistenceActor(store, settings, self.damaged)
        self.wake = WakeScheduler(store, clock, settings)
        self.draining = False
        self.suspending = False
        """Whether a drain is past its patience: what runs is suspended, and no session begins any more."""
        self.hurried = False
        self.patience = trio.CancelScope()
        """Of a drain that waits for its sessions."""
        self.fatal: RuntaraError | None = None
        self.left: dict[tuple[Key, int], bool] = {}
        """Sessions that are over, unknown to their instances: key and epoch; whether they crashed."""
        self.orphans_lost = False
        """Whether all that a dead runtime left running was told, or taken over."""
        self.left_changed = trio.Event()
        self.scope = trio.CancelScope()
        self.ready = trio.Event()
        self.stopped = trio.Event()
        around = Surroundings(
            store=store,
            writer=self.writer,
            numbers=self.numbers,
            clock=clock,
            limits=self.limits,
            known_ids=settings.known_ids,
            refuse_new=self.refuse_new,
            refuse_sessions=self.refuse_sessions,
            release=self.budget.release,
        )
        self.directory = Directory(around, self.wake, settings, partial(self.lose_later, crashed=False))
        self.purger = Purger(store, self.directory, self.damaged)
        self.retention = RetentionActor(self.purger, clock, settings)
        self.supervisor = Supervisor(
            [
                ChildSpec("writer", self.writer.run, shutdown_seconds=settings.store_seconds),
                ChildSpec("instances", self.directory.run),
                ChildSpec("wake", partial(self.wake.run, self.wake_instance)),
                ChildSpec("recovery", self.recover),
                ChildSpec("retention", self.retention.run, shutdown_seconds=settings.store_seconds),
            ],
            name="runtime",
            strategy=Strategy.REST_FOR_ONE,
            intensity=TREE_INTENSITY,
        )

    # ------------------------------------------------------------ the door

    async def request(self, key: Key, message: Request, sink: Sink | None = None) -> Reply:
        """Send a request to an instance and wait for the answer.

        Raises:
            CallerError, StoreError, RuntimeFault: See `runtara.errors`; ``retryable`` says what to do.

        Cancellation: the request may or may not take effect; sent again under the same ids it takes effect
        once.
        """
        message = check(message, self.limits)
        size = size_of(message)
        if self.budget.fits(size):
            self.budget.used += size
        else:
            await self.budget.wait(size)
        letter = Letter(message, size, sink)
        try:
            self.directory.post(key, letter)
        except RuntaraError:
            self.budget.release(size)
            raise
        return await letter.reply.wait()

    async def submit(self, key: Key, message: Request, sink: Sink | None, done: Done) -> None:
        """Send a request and return once it stands in line; ``done`` gets its answer, or why there is none.

        Cancellation: the request was not sent, or it stands in line.
        """
        try:
            message = check(message, self.limits)
            size = size_of(message)
            if self.budget.fits(size):
                self.budget.used += size
            else:
                await self.budget.wait(size)
            letter = Letter(message, size, sink)
            letter.reply = Told(done)
            try:
                self.directory.post(key, letter)
            except RuntaraError:
                self.budget.release(size)
                raise
        except RuntaraError as error:
            done(error)

    async def wake_instance(self, key: Key, message: Request) -> Reply:
        return await self.request(key, message)

    def refuse_new(self) -> RuntaraError | None:
        """Why no new instance is taken, if that is so."""
        if self.draining:
            return Draining("the runtime is shutting down")
        if len(self.directory.entries) > self.settings.live_instances:
            return TooManyInstances(
                f"{self.settings.live_instances} instances are live, which is the limit",
                retry_after_seconds=self.settings.idle_seconds,
            )
        return None

    def refuse_sessions(self) -> RuntaraError | None:
        """Why no session may begin, not even of a known instance, if that is so."""
        return Draining("the runtime is shutting down") if self.suspending else None

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Run the tree until `stop`, or until it cannot go on; then `fatal` says why. Once only."""
        try:
            with self.scope:
                await self.numbers.take()
                await self.supervisor.run(task_status=self)
        except StoreError as error:
            self.fatal = error
        except RestartIntensityExceeded as error:
            logger.critical("the runtime stops: %s", error, exc_info=error)
            self.fatal = RuntimeFault(f"the runtime stopped: {error}")
            self.fatal.__cause__ = error
        finally:
            self.directory.close()
            self.writer.close()
            self.stopped.set()

    def started(self, value: None = None) -> None:
        """The tree is up: for it, the system is the task status."""
        self.ready.set()

    def damaged(self, error: StoreFailed) -> None:
        """The store failed for good: stop everything."""
        self.fatal = error
        self.scope.cancel()

    def stop(self) -> None:
        """Stop the tree, in order; also while it is starting."""
        self.scope.cancel()

    async def drain(self) -> None:
        """Ask all sessions to suspend, wait for them, and suspend the rest, due at once."""
        self.draining = True
        await self.tell_sessions(lambda epoch: AskShutdown(epoch=epoch))
        with trio.move_on_after(0 if self.hurried else self.settings.drain_seconds) as self.patience:
            while self.directory.sessions():
                await self.directory.session_ended()
        self.suspending = True
        await self.directory.settled()  # a session that was beginning has begun, or never will
        await self.tell_sessions(lambda epoch: ForceSuspend(epoch=epoch))

    def hurry(self) -> None:
        """Wait no longer for sessions that drain."""
        self.hurried = True
        self.patience.cancel()

    async def tell_sessions(self, message: Callable[[int], Request]) -> None:
        async with trio.open_nursery() as nursery:
            for key, epoch in self.directory.sessions():
                nursery.start_soon(self.tell, key, epoch, message(epoch))

    async def tell(self, key: Key, epoch: int, message: Request) -> None:
        """Tell one session. One whose instance does not run (any more) is closed."""
        try:
            reply = await self.request(key, message)
        except RuntaraError as error:
            logger.info("instance %s/%s: %s", *key, error)
            return
        if isinstance(reply, ChangeReply) and reply.status is not Status.RUNNING:
            self.directory.close_session(key, epoch, ClosedPush(status=reply.status, reason=reply.reason))

    # ------------------------------------------------------------ recovery

    async def recover(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Tell instances that nobody has them any more. Started again, it begins with all that are left."""
        task_status.started()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.lose_orphans)
            begun: set[tuple[Key, int]] = set()
            while True:
                for key, epoch in [name for name in self.left if name not in begun]:
                    begun.add((key, epoch))
                    nursery.start_soon(self.lose_left, key, epoch, begun)
                self.left_changed = trio.Event()
                await self.left_changed.wait()

    def lose_later(self, key: Key, epoch: int, crashed: bool = True) -> None:
        """A session is over and its instance could not be told: tell it in the background."""
        self.left[key, epoch] = crashed
        self.left_changed.set()

    async def lose_left(self, key: Key, epoch: int, begun: set[tuple[Key, int]]) -> None:
        await self.lose(key, SessionLost(epoch=epoch, crashed=self.left[key, epoch]))
        begun.discard((key, epoch))
        self.left.pop((key, epoch), None)

    async def lose_orphans(self) -> None:
        """After the grace period, suspend what a dead runtime left running and nobody took over."""
        await trio.sleep(self.settings.grace_seconds)
        assert self.numbers.first is not None
        after, found = 0, await self.orphans(0)
        while found:
            async with trio.open_nursery() as nursery:
                for due in found:
                    message = SessionLost(epoch=due.epoch, orphaned=True)
                    nursery.start_soon(self.lose, (due.tenant_id, due.instance_id), message)
            after = found[-1].row
            found = await self.orphans(after)
        self.orphans_lost = True

    async def lose(self, key: Key, message: SessionLost) -> None:
        """Tell an instance that its session is over, again and again while that is not possible."""
        while True:
            try:
                await self.request(key, message)
                return
            except RuntaraError as error:
                if not (error.retryable or isinstance(error, StoreRefused)):
                    return
            await trio.sleep(1.0)

    async def orphans(self, after_row: int) -> list[Due]:
        assert self.numbers.first is not None
        while True:
            try:
                return await self.store.running(self.numbers.first, after_row, RECOVERY_PAGE)
            except StoreError as error:
                logger.warning("the orphans could not be read, trying again: %s", error)
                await trio.sleep(1.0)

    # ------------------------------------------------------------ seeing

    async def violations(self, tenant_id: str | None, limit: int) -> list[Violation]:
        """At most ``limit`` running instances whose session nobody has; None: of all tenants.

        Raises:
            StoreError: The store does not answer.
        """
        found: list[Violation] = []
        after = 0
        while len(found) < limit and (page := await self.store.running(MAX_INT, after, RECOVERY_PAGE)):
            for due in page:
                key = (due.tenant_id, due.instance_id)
                if tenant_id in (None, key[0]) and not self.has_owner(key, due.epoch):
                    found += await self.without_owner(key, due.epoch)
            after = page[-1].row
        return found[:limit]

    def has_owner(self, key: Key, epoch: int) -> bool:
        """Whether somebody has the session of ``epoch``, or will tell its instance that it is over."""
        assert self.numbers.first is not None
        within_grace = epoch < self.numbers.first and not self.orphans_lost
        return within_grace or (key, epoch) in self.left or self.directory.has_session(key, epoch)

    async def without_owner(self, key: Key, epoch: int) -> list[Violation]:
        """Look again once the instance's actor has said all it knew: a registration may be on its way."""
        with suppress(RuntimeFault):  # one that cannot be asked is judged by its row
            await self.request(key, GetStatus())
        record = await self.store.find(*key)
        if record is None or record.status is not Status.RUNNING or record.epoch != epoch:
            return []
        return [] if self.has_owner(key, epoch) else [Violation(stuck=Stuck.NO_SESSION, record=record)]

    def statistics(self) -> SystemStatistics:
        return SystemStatistics(
            instances=self.directory.statistics(),
            writer=self.writer.statistics(),
            wake=self.wake.statistics(),
            retention=self.retention.statistics(),
            store=self.store.statistics(),
            budget_used=self.budget.used,
            draining=self.draining,
        )
