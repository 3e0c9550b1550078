"""The wake scheduler: every deadline of the runtime.

Rules:

1. The rows are the truth. Memory holds the deadlines that are nearer than the horizon; farther ones are read
   when their time nears, one sweep per horizon. Nothing is polled in between.
2. A timer is a hint. When it fires, the wall clock is read, and nothing is woken before the wall clock has
   reached its deadline. A clock that jumps forward is noticed within `clock.SCAN_SECONDS`.
3. To wake is to send a message that names epoch and deadline. If either has changed meanwhile, it does
   nothing; so a deadline may be noted twice, or too late, and no harm comes of it.
4. A wake that fails (the store is away, a mailbox is full) is tried again after `RETRY_SECONDS`.
"""

import heapq
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Final

import attrs
import trio

from runtara.actors.letters import Key
from runtara.clock import Clock
from runtara.config import Settings
from runtara.errors import InstanceNotFound, RuntaraError, StoreError
from runtara.limits import MAX_INSTANT_US, SECOND_US
from runtara.messages import ChangeReply, Reply, Wake
from runtara.persistence.store import MAX_PAGE, Due, Store

logger = logging.getLogger("runtara.actors")

RETRY_SECONDS: Final = 1.0
SWEEP_SECONDS: Final = 1.0
"""From one sweep to the next, at least. Very many near deadlines bring the horizon so near that a sweep would
be due at once, again and again."""

Post = Callable[[Key, Wake], Awaitable[Reply]]


@attrs.frozen(kw_only=True)
class WakeStatistics:
    """The scheduler at one moment."""

    deadlines: int
    """In memory."""
    horizon_us: int
    next_us: int | None
    woken: int


class WakeScheduler:
    """See the module's docstring."""

    def __init__(self, store: Store, clock: Clock, settings: Settings) -> None:
        self.store = store
        self.clock = clock
        self.settings = settings
        self.heap: list[tuple[int, Key]] = []
        self.deadlines: dict[Key, tuple[int, int]] = {}
        """Of each key: (deadline, epoch); entries of the heap that differ are out of date."""
        self.horizon_us = 0
        self.swept = -math.inf
        """When the last sweep began, in monotonic seconds."""
        self.changed = trio.Event()
        self.limiter = trio.CapacityLimiter(settings.concurrent_wakes)
        self.woken = 0

    # ------------------------------------------------------------ noting

    def note(self, key: Key, epoch: int, deadline_us: int | None) -> None:
        """The committed row of an instance has this deadline now, or none."""
        if deadline_us is None or deadline_us > self.horizon_us:
            self.deadlines.pop(key, None)
            return
        if self.deadlines.get(key) == (deadline_us, epoch):
            return
        self.deadlines[key] = (deadline_us, epoch)
        heapq.heappush(self.heap, (deadline_us, key))
        if self.heap[0] == (deadline_us, key):
            self.changed.set()
        if len(self.heap) > 2 * self.settings.horizon_deadlines:
            self.shrink()

    def shrink(self) -> None:
        """Too many deadlines: drop those out of date, then the farthest, and bring the horizon nearer."""
        kept = sorted((deadline, key) for key, (deadline, _) in self.deadlines.items())
        limit = self.settings.horizon_deadlines
        if len(kept) > limit:
            self.horizon_us = kept[limit - 1][0]
            while kept[-1][0] > self.horizon_us:
                del self.deadlines[kept.pop()[1]]
        self.heap = kept

    # ------------------------------------------------------------ running

    async def run(self, post: Post, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Wake what is due, for ever. Started again, it reads everything anew."""
        self.heap, self.deadlines, self.horizon_us, self.swept = [], {}, 0, -math.inf
        task_status.started()
        async with trio.open_nursery() as nursery:
            while True:
                if self.clock.now_us() >= self.next_sweep_us():
                    await self.sweep()
                await self.fire_due(nursery, post)
                await self.wait_for_next()

    def margin_us(self) -> int:
        """How long before the end of the horizon the next sweep is made."""
        return round(self.settings.horizon_seconds * SECOND_US / 10)

    def next_sweep_us(self) -> int:
        """When the next sweep is due: before the end of the horizon, but not right after the last one."""
        rest = max(0.0, self.swept + SWEEP_SECONDS - trio.current_time())
        return max(self.horizon_us - self.margin_us(), self.clock.now_us() + round(rest * SECOND_US))

    async def sweep(self) -> None:
        """Read the deadlines of the next horizon. What was noted meanwhile is newer than what is read."""
        self.swept = trio.current_time()
        until = min(self.clock.now_us() + round(self.settings.horizon_seconds * SECOND_US), MAX_INSTANT_US)
        self.horizon_us = max(self.horizon_us, until)
        after: tuple[int, int] | None = None
        while True:
            page = await self.insist(until, after)
            for due in page:
                if due.deadline_us <= self.horizon_us:
                    self.note_if_new((due.tenant_id, due.instance_id), due.epoch, due.deadline_us)
            if len(page) < MAX_PAGE or page[-1].deadline_us > self.horizon_us:
                return
            after = (page[-1].deadline_us, page[-1].row)

    async def insist(self, until_us: int, after: tuple[int, int] | None) -> list[Due]:
        """Read a page of deadlines, again and again while the store is away."""
        while True:
            try:
                return await self.store.due(until_us, after, MAX_PAGE)
            except StoreError as error:
                logger.warning("the deadlines could not be read, trying again: %s", error)
                await trio.sleep(RETRY_SECONDS)

    async def fire_due(self, nursery: trio.Nursery, post: Post) -> None:
        while self.heap and self.heap[0][0] <= self.clock.now_us():
            deadline, key = heapq.heappop(self.heap)
            current = self.deadlines.get(key)
            if current is None or current[0] != deadline:
                continue
            del self.deadlines[key]
            token = object()
            await self.limiter.acquire_on_behalf_of(token)
            nursery.start_soon(self.fire, post, key, current[1], deadline, token)

    async def fire(self, post: Post, key: Key, epoch: int, deadline_us: int, token: object) -> None:
        """Wake one instance; on trouble, later."""
        try:
            again = await self.wake(post, key, Wake(epoch=epoch, deadline_us=deadline_us))
        finally:
            self.limiter.release_on_behalf_of(token)
        if again:
            await trio.sleep(RETRY_SECONDS)
            self.note_if_new(key, epoch, deadline_us)

    async def wake(self, post: Post, key: Key, message: Wake) -> bool:
        """Send the message. Whether it must be sent again."""
        try:
            reply = await post(key, message)
        except InstanceNotFound:
            return False
        except RuntaraError as error:
            logger.warning("instance %s/%s could not be woken, trying again: %s", *key, error)
            return True
        applied = isinstance(reply, ChangeReply) and reply.applied
        self.woken += applied
        return not applied and self.clock.now_us() < message.deadline_us  # the clock was set back

    def note_if_new(self, key: Key, epoch: int, deadline_us: int) -> None:
        """Note a deadline again, unless a newer one was noted meanwhile."""
        if key not in self.deadlines:
            self.note(key, epoch, deadline_us)

    async def wait_for_next(self) -> None:
        """Until the nearest deadline, the next sweep, or a nearer deadline is noted."""
        self.changed = trio.Event()
        target = self.next_sweep_us()
        if self.heap:
            target = min(target, self.heap[0][0])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.wait_for_clock, target, nursery.cancel_scope)
            await self.changed.wait()
            nursery.cancel_scope.cancel()

    async def wait_for_clock(self, target_us: int, scope: trio.CancelScope) -> None:
        await self.clock.sleep_until_us(target_us)
        scope.cancel()

    def statistics(self) -> WakeStatistics:
        return WakeStatistics(
            deadlines=len(self.deadlines),
            horizon_us=self.horizon_us,
            next_us=self.heap[0][0] if self.heap else None,
            woken=self.woken,
        )
