"""The purger: deletes instances that have ended, with all their history.

Rules:

1. Only what has ended is purged, and only while its key is held in the directory: nothing of it is on its way
   to the store then, and nothing comes in between. A late message of the old life meets an unknown instance,
   or a new one at another epoch.
2. A delete is never torn by a cancellation; it ends first, and whoever is attached hears of it.
3. The writer is shared with everything that lives. A batch takes about `TARGET_SECONDS` of it, its size
   follows what the last one took, and the pause after it is at least as long as it took.
4. An instance goes at once. What a batch cannot delete of its history is swept afterwards, and if that does
   not come about, by the next pass of the retention actor, which begins with it.
"""

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, TypeVar

import attrs
import trio

from runtara.actors.directory import Directory
from runtara.actors.letters import Key
from runtara.errors import InstanceNotFound, InvalidInstanceState, StoreError, StoreFailed
from runtara.persistence.store import MAX_PAGE, Finished, Purged, Store
from runtara.records import InstanceRecord, Status
from runtara.retention import ENDED, FIRST_RECORDS, next_batch

logger = logging.getLogger("runtara.actors")

T = TypeVar("T")

LEAST_PAUSE: Final = 0.001
RECORDS_OF_AN_INSTANCE: Final = 4
"""What the row of an instance costs, in records of its history: it stands in many indexes."""


class Pace:
    """How much a batch deletes, and how long the writer has for others after it (rule 3)."""

    def __init__(self) -> None:
        self.records = FIRST_RECORDS
        self.took = 0.0

    @property
    def instances(self) -> int:
        """How many instances go into a batch."""
        return self.records // RECORDS_OF_AN_INSTANCE

    async def measure(self, work: Callable[[int], Awaitable[T]]) -> T:
        """Do one batch, which is told how many records it may delete. Not torn by a cancellation."""
        begun = trio.current_time()
        with trio.CancelScope(shield=True):
            answer = await work(self.records)
        self.took = trio.current_time() - begun
        return answer

    async def pause(self, full: bool) -> None:
        """Leave the writer to others, and choose the size of the next batch."""
        self.records = next_batch(self.records, self.took, full)
        await trio.sleep(max(self.took, LEAST_PAUSE))


class Purger:
    """See the module's docstring."""

    def __init__(self, store: Store, directory: Directory, on_damage: Callable[[StoreFailed], None]) -> None:
        self.store = store
        self.directory = directory
        self.on_damage = on_damage

    async def purge(self, key: Key) -> None:
        """Delete one instance; when this returns, nothing is left of it.

        Raises:
            InstanceNotFound: There is none.
            InvalidInstanceState: It has not ended. Nobody who is attached to it notices.
            StoreError: It may be gone. Asked again, `InstanceNotFound` says that it is.

        Cancellation: it is gone, or it is there as it was.
        """
        with self.damage_told():
            require_ended(key, await self.store.find(*key))
            async with self.directory.hold([key]):
                record = require_ended(key, await self.store.find(*key))
                pace = Pace()
                purged = await self.delete({record.row: key}, pace)
            await self.keep_house()
            if record.row not in purged.rows:
                raise InstanceNotFound(key[1])
            if purged.children_left:
                await pace.pause(full=True)
                await self.sweep(pace)

    async def purge_finished(
        self, tenant_id: str, statuses: Sequence[Status], before_us: int, limit: int | None
    ) -> int:
        """Delete instances of a tenant that ended before an instant, at most ``limit``; returns how many."""
        count = 0
        with self.damage_told():
            for status in statuses:
                left = None if limit is None else limit - count
                walk = Walk(purger=self, status=status, before_us=before_us, tenant_id=tenant_id, limit=left)
                await walk.go_on()
                count += walk.purged
        return count

    async def delete(self, keys: Mapping[int, Key], pace: Pace) -> Purged:
        """Delete instances, by row, whose keys are held (rule 2)."""
        purged = await pace.measure(lambda most: self.store.purge(tuple(keys), most))
        for row in purged.rows:
            self.directory.let_go(keys[row])
        return purged

    async def sweep(self, pace: Pace) -> None:
        """Delete what purges have left, until there is nothing."""
        left = True
        while left:
            left = await pace.measure(self.store.sweep)
            await self.keep_house()
            await pace.pause(full=left)

    async def keep_house(self) -> None:
        """The store's log grows by what is deleted, and perhaps nobody else writes."""
        try:
            await self.store.maintain()
        except StoreFailed:
            raise
        except StoreError as error:
            logger.warning("the store's housekeeping has to wait: %s", error)

    @contextmanager
    def damage_told(self) -> Iterator[None]:
        try:
            yield
        except StoreFailed as error:
            self.on_damage(error)
            raise


@attrs.define(kw_only=True)
class Walk:
    """A walk over instances that ended with a status before an instant, oldest first, purging them."""

    purger: Purger
    status: Status
    before_us: int
    tenant_id: str | None
    limit: int | None = None
    """How many are purged at most; None: all."""
    wanted: Callable[[Finished], bool] = lambda finished: True
    purged: int = 0
    """How many are, so far."""
    after: tuple[int, int] | None = None
    pace: Pace = attrs.field(factory=Pace)

    async def go_on(self) -> None:
        """Walk to the end. After an error the same walk may go on where it was.

        Raises:
            StoreError: The store does not answer.
        """
        while page := await self.next_page():
            ahead = [finished for finished in page if self.wanted(finished)]
            while ahead:
                most = self.pace.instances
                await self.purge(ahead[:most])
                del ahead[:most]
            self.after = (page[-1].finished_us, page[-1].row)

    async def next_page(self) -> list[Finished]:
        left = MAX_PAGE if self.limit is None else min(MAX_PAGE, self.limit - self.purged)
        if left <= 0:
            return []
        return await self.purger.store.terminal(self.status, self.before_us, self.tenant_id, self.after, left)

    async def purge(self, batch: Sequence[Finished]) -> None:
        keys = {finished.row: (finished.tenant_id, finished.instance_id) for finished in batch}
        async with self.purger.directory.hold(tuple(keys.values())):
            purged = await self.purger.delete(keys, self.pace)
        self.purged += len(purged.rows)
        await self.purger.keep_house()
        await self.pace.pause(full=purged.children_left or len(batch) == self.pace.instances)
        if purged.children_left:
            await self.purger.sweep(self.pace)


def require_ended(key: Key, record: InstanceRecord | None) -> InstanceRecord:
    if record is None:
        raise InstanceNotFound(key[1])
    if not record.status.is_terminal:
        raise InvalidInstanceState(" or ".join(ENDED), record.status.word)
    return record
