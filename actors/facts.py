"""What an actor knows without asking the store, and how it asks for the rest.

Rules:

1. A set of ids is *complete* as long as it holds every id there is. Then an id that is not in it does not
   exist, and a new checkpoint needs no read.
2. Over its bound a set is given up: from then on each id is asked of the store.
3. The store is asked only when nothing of the instance is on its way to it, so that the answer cannot be
   older than what the actor decided.
"""

from typing import Any, Final

import attrs

from runtara.actors.numbers import Numbers
from runtara.actors.persistence import Activation
from runtara.machine import Fact, Facts, Need
from runtara.persistence.store import Loaded, Store
from runtara.records import CheckpointRecord, Op, RequestRecord, WaitRecord

NO_IDS: Final[set[str]] = set()
"""Shared and never added to: an empty set takes 216 bytes, and a live instance would have three of them."""


class KnownIds:
    """The ids of one kind that an instance has, or nothing (rule 2)."""

    __slots__ = ("bound", "ids")

    def __init__(self, ids: frozenset[str] | None, bound: int) -> None:
        self.ids: set[str] | None = None if ids is None else set(ids) if ids else NO_IDS
        self.bound = bound

    def absent(self, name: str) -> bool:
        """Whether the id certainly does not exist."""
        return self.ids is not None and name not in self.ids

    def add(self, name: str) -> None:
        if self.ids is None:
            return
        if self.ids is NO_IDS:
            self.ids = set()
        self.ids.add(name)
        if len(self.ids) > self.bound:
            self.ids = None


class FactFinder:
    """Answers `needs` for one activation of one instance."""

    __slots__ = ("activation", "base", "checkpoints", "numbers", "requests", "row", "store", "waits")

    def __init__(
        self,
        store: Store,
        numbers: Numbers,
        activation: Activation,
        base: Facts,
        loaded: Loaded | None,
        bound: int,
    ) -> None:
        nothing: frozenset[str] = frozenset()
        self.store = store
        self.numbers = numbers
        self.activation = activation
        self.base = base
        self.row = 0 if loaded is None else loaded.record.row
        self.checkpoints = KnownIds(nothing if loaded is None else loaded.checkpoint_ids, bound)
        self.waits = KnownIds(nothing if loaded is None else loaded.wait_ids, bound)
        self.requests = KnownIds(nothing if loaded is None else loaded.request_ids, bound)

    def learn(self, ops: tuple[Op, ...]) -> None:
        """Note the ids that a decision makes."""
        for op in ops:
            match op:
                case CheckpointRecord():
                    self.checkpoints.add(op.checkpoint_id)
                case WaitRecord():
                    self.waits.add(op.wait_id)
                case RequestRecord():
                    self.requests.add(op.request_id)

    def certain(self, need: Need) -> bool:
        """Whether the answer is known to be that there is no such thing."""
        fact, key = need
        if self.row == 0:
            return fact is not Fact.NUMBER
        if fact is Fact.CHECKPOINT:
            return self.checkpoints.absent(key)  # type: ignore[arg-type]
        if fact is Fact.WAIT:
            return self.waits.absent(key)  # type: ignore[arg-type]
        return fact is Fact.REQUEST and self.requests.absent(key)  # type: ignore[arg-type]

    async def find(self, needs: list[Need]) -> Facts:
        """The facts, with what has to be read or reserved for them.

        Raises:
            StoreError: The store does not answer.
        """
        found: dict[str, Any] = {}
        for fact, key in needs:
            if fact is Fact.NUMBER:
                found["number"] = await self.numbers.take()
            else:
                await self.activation.settled()
                found[fact.value] = await self.read(fact, key)
        return attrs.evolve(self.base, **found)

    async def read(self, fact: Fact, key: Any) -> Any:
        match fact:
            case Fact.CHECKPOINT:
                return await self.store.checkpoint(self.row, key)
            case Fact.WAIT:
                return await self.store.wait(self.row, key)
            case Fact.REQUEST:
                return await self.store.request(self.row, key)
            case Fact.ATTEMPT:
                return await self.store.attempt(self.row, *key)
            case Fact.SIGNAL:
                return await self.store.signal(self.row, key)
            case Fact.ERROR:
                return await self.store.error(self.row, key) is not None
            case Fact.PAYLOADS:
                return await self.store.payloads(self.row, key)
            case Fact.NUMBER:
                raise AssertionError("numbers are taken, not read")
