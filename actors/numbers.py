"""Numbers that never come twice: epochs, and the row keys of new instances.

They are taken from the store in blocks, so that a registration needs no write of its own for its epoch. A
block that a crash leaves unused is never used again.
"""

from typing import Final

import trio

from runtara.persistence.store import Store

BLOCK: Final = 1000


class Numbers:
    """The runtime's block of fresh numbers."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.next = 0
        self.end = 0
        self.first: int | None = None
        """The first number of this run of the runtime: older epochs belong to runs that are over."""
        self.lock = trio.Lock()

    async def take(self) -> int:
        """The next number.

        Raises:
            StoreError: A new block is needed and the store does not give one.

        Cancellation: a number may be lost, which does no harm.
        """
        if self.next == self.end:
            async with self.lock:
                if self.next == self.end:
                    await self.refill()
        number = self.next
        self.next += 1
        return number

    async def refill(self) -> None:
        first = await self.store.reserve(BLOCK)
        self.next, self.end = first, first + BLOCK
        if self.first is None:
            self.first = first
