"""The persistence actor: one writer, group commit.

Rules:

1. Whatever has queued up is written in one transaction and committed once. Then, and only then, everything
   that waited for it leaves: effects first, then replies, in the order in which they were decided.
2. A unit belongs to an *activation*: one life of an instance's actor. When one unit fails, every later unit
   of that activation fails too, for it was decided on a state that does not exist.
3. Nothing was written and the store may come back: the units stay, and the store is asked again with growing
   delays, until the oldest of them has waited for ``store_seconds``.
4. The store refused a value: the batch is halved and written again, so one bad unit fails alone.
5. The commit itself failed: the store is asked what became of it before anything else, again and again
   while it does not answer. Callers that have waited for ``store_seconds`` meanwhile hear `OutcomeUnknown`,
   and `StoreUnavailable` for what has not been tried; but the units stay what they are until the store tells.
6. The store is damaged, or will never tell: nothing is acknowledged any more, and the runtime stops
   (`StoreFailed`).
7. A write that has begun is never torn by a cancellation; it ends first. Units that are left when the actor
   is lost fail with `OutcomeUnknown`.
"""

import logging
from collections.abc import Callable
from typing import Final

import attrs
import trio

from runtara.actors.mailbox import Future, Mailbox
from runtara.config import Settings
from runtara.errors import (
    ActorFailed,
    GuardFailed,
    OutcomeUnknown,
    RuntaraError,
    RuntimeClosed,
    StoreError,
    StoreFailed,
    StoreRefused,
    StoreUnavailable,
)
from runtara.messages import Reply
from runtara.persistence.store import Store, Unit

logger = logging.getLogger("runtara.persistence")

QUEUE_LIMIT: Final = 100_000
FIRST_DELAY: Final = 0.05
LONGEST_DELAY: Final = 1.0

ReplyTo = Future[Reply]

LOST: Final = ActorFailed("an earlier change of the instance failed")


def unsettled() -> StoreUnavailable:
    return StoreUnavailable("an earlier change of the instance is not settled yet")


class Activation:
    """One life of an instance's actor, as the writer knows it."""

    __slots__ = ("failed", "given_up", "last", "name", "on_failure", "outstanding", "waiters")

    def __init__(self, name: str, on_failure: Callable[[], None]) -> None:
        self.name = name
        self.on_failure = on_failure
        self.outstanding = 0
        self.last: Work | None = None
        """The unit submitted last, until nothing is outstanding: an idle instance holds no payload."""
        self.failed = False
        self.given_up = False
        """Whether a unit may be in the store, its callers have heard so, and the store does not tell."""
        self.waiters: list[Future[None]] | None = None

    def fail(self) -> None:
        if not self.failed:
            self.failed = True
            self.on_failure()

    def done(self) -> None:
        """One unit is settled, one way or the other."""
        self.outstanding -= 1
        if self.outstanding:
            return
        self.last = None
        self.given_up = False
        self.wake()

    def give_up(self) -> None:
        """Nobody waits any longer for what is outstanding."""
        self.given_up = True
        self.wake()

    def wake(self) -> None:
        waiters, self.waiters = self.waiters or (), None
        for waiter in waiters:
            waiter.set(None)

    async def settled(self) -> None:
        """Wait until nothing of this activation is queued or being written.

        Raises:
            StoreUnavailable: Nobody can tell when that will be (rule 5).
        """
        while self.outstanding:
            if self.given_up:
                raise unsettled()
            waiter: Future[None] = Future()
            self.waiters = [*(self.waiters or ()), waiter]
            await waiter.wait()


class Work:
    """A unit, and what leaves when it is on disk."""

    __slots__ = (
        "activation",
        "asker",
        "effects",
        "given_up",
        "release",
        "replies",
        "settled",
        "unit",
        "waits_since",
    )

    def __init__(
        self, unit: Unit, activation: Activation, release: Callable[[int], None], asker: ReplyTo
    ) -> None:
        self.unit = unit
        self.activation = activation
        self.release = release
        self.asker = asker
        """The reply to the request that made the unit."""
        self.effects: list[Callable[[], None]] | None = None
        self.replies: list[tuple[ReplyTo, Reply | RuntaraError]] = []
        self.settled = False
        self.given_up: RuntaraError | None = None
        """What callers hear who will not wait until it is settled."""
        self.waits_since: float | None = None
        """When it was submitted, if the store was away then."""

    def waits_from(self, away_since: float) -> float:
        """Since when it waits for a store that is away since an instant."""
        return away_since if self.waits_since is None else self.waits_since

    def after(self, effect: Callable[[], None]) -> None:
        """Do ``effect`` once the unit is on disk; it must not raise."""
        if self.effects is None:
            self.effects = []
        self.effects.append(effect)

    def reply(self, future: ReplyTo, reply: Reply | RuntaraError) -> None:
        """Answer ``future`` once the unit is on disk."""
        if self.given_up is not None:
            future.fail(self.given_up)
        else:
            self.replies.append((future, reply))

    def give_up(self, error: RuntaraError) -> None:
        """Answer everybody who waits, or will; the unit itself stays open."""
        self.given_up = error
        for future, _ in self.replies:
            future.fail(error)
        self.replies.clear()
        self.activation.give_up()

    def commit(self) -> None:
        """The unit is on disk: let everything leave."""
        self.settled = True
        if self.given_up is not None:
            self.activation.given_up = False
        if self.effects is not None:
            for effect in self.effects:
                try:
                    effect()
                except Exception:  # of foreign code that it ends in; the others must be answered all the same
                    logger.exception("an effect of a change of %s failed", self.activation.name)
        for future, reply in self.replies:
            if isinstance(reply, RuntaraError):
                future.fail(reply)
            else:
                future.set(reply)
        self.release(self.unit.size)
        self.activation.done()

    def fail(self, error: RuntaraError) -> None:
        """The unit is not on disk, or nobody knows: nothing of it leaves but the error.

        A refusal is for the request that wanted to write this. Whoever only waited for it (a read, a sleep
        that it would have ended) has done nothing wrong and asks again.
        """
        if self.settled:
            return
        self.settled = True
        self.activation.fail()
        others = LOST if isinstance(error, StoreRefused) else error
        for future, _ in self.replies:
            future.fail(error if future is self.asker else others)
        self.release(self.unit.size)
        self.activation.done()


@attrs.frozen(kw_only=True)
class WriterStatistics:
    """The writer at one moment."""

    queued: int
    units: int
    batches: int
    failed_units: int
    degraded_since: float | None
    """Monotonic seconds since the store last answered; None if it does."""


class PersistenceActor:
    """See the module's docstring. One incarnation at a time runs; the queue outlives it."""

    def __init__(self, store: Store, settings: Settings, on_damage: Callable[[StoreFailed], None]) -> None:
        self.store = store
        self.settings = settings
        self.on_damage = on_damage
        self.queue: Mailbox[Work] = Mailbox(QUEUE_LIMIT)
        self.batch: list[Work] = []
        self.units = 0
        self.batches = 0
        self.failed_units = 0
        self.degraded_since: float | None = None
        self.damage: StoreFailed | None = None
        self.unsettled: OutcomeUnknown | None = None
        """Why the store must be asked what became of the last batch, before it takes another one."""

    def submit(self, work: Work) -> None:
        """Queue a unit. The runtime's budget keeps the queue within its bound; over it, the unit fails."""
        work.activation.outstanding += 1
        work.activation.last = work
        if self.damage is not None:
            work.fail(self.damage)
            return
        if work.activation.given_up:
            work.fail(unsettled())
            return
        if self.degraded_since is not None:
            work.waits_since = trio.current_time()
        try:
            self.queue.put_nowait(work)
        except trio.WouldBlock:
            work.fail(ActorFailed("the writer's queue is full"))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        try:
            if self.unsettled is not None:
                await self.settle([], self.unsettled)
            while True:
                while self.batch:
                    await self.write(self.next_chunk())
                self.batch = await self.queue.get_all()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """The actor is lost: whoever waits must ask again to learn what became of it."""
        left, self.batch = [*self.batch, *self.queue.take_nowait()], []
        for work in left:
            work.fail(OutcomeUnknown("the writer was lost before it could answer"))

    def next_chunk(self) -> list[Work]:
        """The next units, within the bounds of one transaction; failed activations are answered at once."""
        chunk: list[Work] = []
        size = taken = 0
        for work in self.batch:
            if chunk and (
                len(chunk) >= self.settings.batch_units or size + work.unit.size > self.settings.batch_bytes
            ):
                break
            taken += 1
            if work.activation.failed:
                self.fail([work], LOST)
            else:
                chunk.append(work)
                size += work.unit.size
        del self.batch[:taken]
        return chunk

    async def write(self, works: list[Work]) -> None:
        """Write units, or fail them; never raises but for damage and bugs. Not torn by cancellation."""
        if not works:
            return
        try:
            await self.try_to_write(works)
        except BaseException:
            self.batch = [*works, *self.batch]  # `abandon` answers them
            raise

    async def try_to_write(self, works: list[Work]) -> None:
        try:
            left_out = await self.insist(works)
        except StoreRefused as error:
            await self.halve(works, error)
        except OutcomeUnknown as error:
            await self.settle(works, error)
        except StoreFailed as error:
            self.stop(works, error)
        except StoreError as error:
            self.fail(works, error)
        else:
            self.resolve(works, left_out)
            await self.maintain()

    async def insist(self, works: list[Work]) -> frozenset[int]:
        """Apply, again and again while the store is away (rule 3)."""
        units = [work.unit for work in works]
        delay = FIRST_DELAY
        while True:
            try:
                with trio.CancelScope(shield=True):
                    left_out = await self.store.apply(units)
            except StoreUnavailable as error:
                away_since = self.note_trouble(error)
                oldest = min(work.waits_from(away_since) for work in works)
                if trio.current_time() + delay > oldest + self.settings.store_seconds:
                    raise
                await trio.sleep(delay)
                delay = min(2 * delay, LONGEST_DELAY)
            else:
                self.note_health()
                return left_out

    def note_trouble(self, error: StoreError) -> float:
        """Since when the store is away."""
        if self.degraded_since is None:
            self.degraded_since = trio.current_time()
            logger.warning("the store does not answer, writes wait: %s", error)
        return self.degraded_since

    def note_health(self) -> None:
        if self.degraded_since is not None:
            logger.warning("the store answers again, %.1f s later", trio.current_time() - self.degraded_since)
            self.degraded_since = None

    def resolve(self, works: list[Work], left_out: frozenset[int]) -> None:
        self.batches += 1
        for work in works:
            if work.unit.row in left_out:
                self.fail([work], GuardFailed("another writer changed the instance first"))
            else:
                self.units += 1
                work.commit()

    def fail(self, works: list[Work], error: RuntaraError) -> None:
        for work in works:
            self.failed_units += 1
            logger.warning("a change of %s was not written: %s", work.activation.name, error)
            work.fail(error)

    async def halve(self, works: list[Work], error: StoreRefused) -> None:
        """One of these units is bad: find it, and write the others."""
        if len(works) == 1:
            self.fail(works, error)
            return
        middle = len(works) // 2
        self.batch = [*works[middle:], *self.batch]  # so that nothing is lost if the first half is torn
        await self.write(works[:middle])

    async def settle(self, works: list[Work], error: OutcomeUnknown) -> None:
        """The commit failed; the store knows whether it happened all the same (rule 5)."""
        self.unsettled = error
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.answer_overdue, works, error, trio.current_time())
            outcome = await self.ask_until_settled(error)
            nursery.cancel_scope.cancel()
        self.unsettled = None
        if isinstance(outcome, StoreFailed):
            self.stop(works, outcome, answer=error)
            return
        self.note_health()
        if outcome is None:
            self.fail(works, StoreUnavailable(f"{error.message}; it did not happen"))
        else:
            self.resolve(works, outcome)

    async def ask_until_settled(self, error: OutcomeUnknown) -> frozenset[int] | StoreFailed | None:
        """What the store says of its last batch; `StoreFailed` if it will never tell."""
        delay = FIRST_DELAY
        while True:
            try:
                with trio.CancelScope(shield=True):
                    return await self.store.settle()
            except StoreError as trouble:
                if not trouble.retryable:
                    kind = type(trouble) if isinstance(trouble, StoreFailed) else StoreFailed
                    return kind(f"{error.message}; it could not be settled: {trouble.message}")
                self.note_trouble(trouble)
            await trio.sleep(delay)
            delay = min(2 * delay, LONGEST_DELAY)

    async def answer_overdue(self, works: list[Work], error: OutcomeUnknown, since: float) -> None:
        """While ``works`` cannot be settled, let nobody wait for longer than ``store_seconds``."""
        unknown = OutcomeUnknown(error.message, retry_after_seconds=LONGEST_DELAY)
        while True:
            await trio.sleep(LONGEST_DELAY)
            limit = trio.current_time() + LONGEST_DELAY - self.settings.store_seconds
            for work in works:
                if work.given_up is None and work.waits_from(since) <= limit:
                    work.give_up(unknown)
            waiting, self.batch = [*self.batch, *self.queue.take_nowait()], []
            for work in waiting:
                if work.waits_from(since) <= limit:
                    self.fail([work], StoreUnavailable("the store does not answer; this was not tried"))
                else:
                    self.batch.append(work)

    async def maintain(self) -> None:
        try:
            with trio.CancelScope(shield=True):
                await self.store.maintain()
        except StoreFailed as error:
            self.stop([], error)
        except StoreError as error:
            logger.warning("the store's housekeeping has to wait: %s", error)

    def stop(self, works: list[Work], error: StoreFailed, answer: RuntaraError | None = None) -> None:
        """Damage: refuse everything from now on, and stop the runtime."""
        if self.damage is None:
            self.damage = error
            logger.critical("the store failed, the runtime stops: %s", error)
            self.on_damage(error)
        self.fail(works, answer or error)
        left, self.batch = [*self.batch, *self.queue.take_nowait()], []
        self.fail(left, error)

    def close(self) -> None:
        """Refuse what comes after the end of the runtime."""
        self.damage = self.damage or StoreFailed("the runtime is closed")
        for work in self.queue.take_nowait():
            work.fail(RuntimeClosed("the runtime is closed"))

    def statistics(self) -> WriterStatistics:
        return WriterStatistics(
            queued=self.queue.statistics().items,
            units=self.units,
            batches=self.batches,
            failed_units=self.failed_units,
            degraded_since=self.degraded_since,
        )
