"""Units in batches, into a store that may be away for a while."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio

from runtara.errors import GuardFailed, OutcomeUnknown, StoreUnavailable
from runtara.persistence.store import Store, Unit

T = TypeVar("T")

BATCH_UNITS: Final = 2000
BATCH_BYTES: Final = 4 * 1024 * 1024
PATIENCE_SECONDS: Final = 30.0
FIRST_DELAY: Final = 0.05
LONGEST_DELAY: Final = 1.0


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """What ``call`` returns; it is made again while the store is away, which leaves nothing done.

    Raises:
        StoreUnavailable: For longer than `PATIENCE_SECONDS`.
    """
    give_up = trio.current_time() + PATIENCE_SECONDS
    delay = FIRST_DELAY
    while True:
        try:
            return await call()
        except StoreUnavailable:
            if trio.current_time() + delay > give_up:
                raise
        await trio.sleep(delay)
        delay = min(2 * delay, LONGEST_DELAY)


class Writer:
    """Collects units, and writes them once they are many."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.batch: list[Unit] = []
        self.size = 0

    @property
    def is_full(self) -> bool:
        return len(self.batch) >= BATCH_UNITS or self.size >= BATCH_BYTES

    def add(self, unit: Unit) -> None:
        """Take a unit; once `is_full`, `flush` must be awaited."""
        self.batch.append(unit)
        self.size += unit.size

    async def flush(self) -> None:
        """Write all that was taken; when this returns, it is durable.

        Raises:
            StoreError: Some or all of it may not be there.
        """
        if not self.batch:
            return
        if await patiently(self.apply):
            raise GuardFailed("another program writes to the store")
        self.batch, self.size = [], 0
        await patiently(self.store.maintain)

    async def apply(self) -> frozenset[int]:
        try:
            return await self.store.apply(self.batch)
        except OutcomeUnknown as error:
            outcome = await patiently(self.store.settle)
            if outcome is None:
                raise StoreUnavailable(error.message) from error
            return outcome
