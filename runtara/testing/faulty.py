"""A store that fails on purpose: `FaultyStore` wraps any `Store`, and lets its calls fail or linger.

For testing whatever stands on a store. It keeps the contract of `runtara.persistence.store`: an error means
that nothing was written, except `OutcomeUnknown`, after which `FaultyStore.settle` tells the truth.

    faults = ScriptedFaults()
    faults.add("apply", Fault.unknown(committed=True))
    store = FaultyStore(inner, faults)

Rules:

1. `Faults` decides once per call, before it begins. `ScriptedFaults` plays a list for each method;
   `SeededFaults` draws from rates, the same for the same seed.
2. *Before* the commit: the call fails and has had no effect. *During*: the commit itself fails
   (`OutcomeUnknown`), and nothing or all of the batch is in the store. *After*: the call takes effect, and
   lingers before it answers.
3. A refusal (`StoreRefused`) belongs to one unit: each batch that holds it is refused, until it was refused
   alone. So whoever looks for the bad unit finds it.
4. `FaultyStore.outage` makes every call fail with `StoreUnavailable`, for as long as it is set. After
   `FaultyStore.kill` every call fails with `StoreFailed`, for ever, also those that are under way: that is
   how a process dies, seen from its disk.
"""

import random
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, ParamSpec, Protocol, TypeVar

import attrs
import trio

from runtara.errors import (
    OutcomeUnknown,
    StoreError,
    StoreFailed,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from runtara.persistence.store import (
    Due,
    Finished,
    Growth,
    InstanceFilter,
    InstanceOrder,
    Loaded,
    Page,
    PageRequest,
    Purged,
    R,
    RecordFilter,
    Store,
    StoreStatistics,
    Unit,
)
from runtara.records import (
    CheckpointRecord,
    ErrorRecord,
    InstanceRecord,
    PayloadKind,
    RequestRecord,
    RetryAttemptRecord,
    SignalRecord,
    Status,
    WaitRecord,
)

P = ParamSpec("P")
T = TypeVar("T")

# ---------------------------------------------------------------- faults


@attrs.frozen(kw_only=True)
class Fault:
    """What happens to one call."""

    error: type[StoreError] | None = None
    """Raised instead of an answer; None: the call only lingers."""
    committed: bool = False
    """With `OutcomeUnknown` only: whether the batch is in the store all the same."""
    unit: int | None = None
    """With `StoreRefused` only: which unit of the batch is bad; taken modulo the length of the batch."""
    before_seconds: float = 0.0
    """How long the call lingers before it takes effect. Cancellation: it has none."""
    after_seconds: float = 0.0
    """How long it lingers after it took effect. Not cancellable."""

    def __attrs_post_init__(self) -> None:
        if self.committed and self.error is not OutcomeUnknown:
            raise ValueError("only a commit with an unknown outcome may fail and be in the store")
        if (self.unit is not None) != (self.error is StoreRefused):
            raise ValueError("a refusal names the bad unit, and nothing else does")

    @classmethod
    def unavailable(cls) -> "Fault":
        """The store is busy or gone; nothing was written."""
        return cls(error=StoreUnavailable)

    @classmethod
    def full(cls) -> "Fault":
        """The disk is full; nothing was written."""
        return cls(error=StoreFull)

    @classmethod
    def refused(cls, unit: int = 0) -> "Fault":
        """One unit of the batch is bad (rule 3)."""
        return cls(error=StoreRefused, unit=unit)

    @classmethod
    def unknown(cls, *, committed: bool) -> "Fault":
        """The commit failed. Whether it happened is for `FaultyStore.settle` to say."""
        return cls(error=OutcomeUnknown, committed=committed)

    @classmethod
    def slow(cls, before_seconds: float = 0.0, after_seconds: float = 0.0) -> "Fault":
        """The call lingers before and after it takes effect."""
        return cls(before_seconds=before_seconds, after_seconds=after_seconds)


NO_FAULT: Final = Fault()


class Faults(Protocol):
    """Decides what happens to each call."""

    def next(self, call: str) -> Fault:
        """What happens to this call of the method named ``call``."""
        ...


class ScriptedFaults:
    """Faults by a script: for each method, what happens to its next calls, one after the other."""

    def __init__(self) -> None:
        self.script: defaultdict[str, deque[Fault]] = defaultdict(deque)

    def add(self, call: str, *faults: Fault) -> None:
        """Let the next calls of a method fail so, in this order; `NO_FAULT` lets one pass."""
        self.script[call].extend(faults)

    def next(self, call: str) -> Fault:
        waiting = self.script[call]
        return waiting.popleft() if waiting else NO_FAULT


@attrs.frozen(kw_only=True)
class Rates:
    """How often calls fail: probabilities from 0 to 1, and the longest time for which a call lingers."""

    unavailable: float = 0.0
    """Any call but `Store.settle`."""
    full: float = 0.0
    """`Store.apply` and `Store.reserve`."""
    refused: float = 0.0
    """`Store.apply`."""
    unknown: float = 0.0
    """`Store.apply`; half of them are in the store."""
    unsettled: float = 0.0
    """`Store.settle` itself fails: nobody can say what became of the batch."""
    slow: float = 0.0
    slow_seconds: float = 0.0


class SeededFaults:
    """Faults by chance, the same for the same seed. ``rates`` may be replaced at any time."""

    def __init__(self, seed: int | str, rates: Rates) -> None:
        self.random = random.Random(seed)
        self.rates = rates

    def next(self, call: str) -> Fault:
        fault = self.failure(call)
        if self.random.random() >= self.rates.slow:
            return fault
        longest = self.rates.slow_seconds
        return attrs.evolve(
            fault,
            before_seconds=self.random.random() * longest,
            after_seconds=self.random.random() * longest,
        )

    def failure(self, call: str) -> Fault:
        rates, dice = self.rates, self.random.random()
        if call == "settle":
            return Fault.unavailable() if dice < rates.unsettled else NO_FAULT
        if (dice := dice - rates.unavailable) < 0:
            return Fault.unavailable()
        if call in ("apply", "reserve") and (dice := dice - rates.full) < 0:
            return Fault.full()
        if call == "apply" and (dice := dice - rates.refused) < 0:
            return Fault.refused(self.random.randrange(1000))
        if call == "apply" and (dice := dice - rates.unknown) < 0:
            return Fault.unknown(committed=self.random.random() < 0.5)
        return NO_FAULT


# ---------------------------------------------------------------- the store


class FaultyStore:
    """A `Store` that passes every call on to ``store``, or fails. See the module's docstring.

    Attributes:
        outage: While it is true, every call fails with `StoreUnavailable`.
        injected: How many faults of each kind happened.
        refused: (row, revision) of each unit that was refused alone, in order.
    """

    def __init__(self, store: Store, faults: Faults) -> None:
        self.store = store
        self.faults = faults
        self.outage = False
        self.dead = False
        self.injected: Counter[str] = Counter()
        self.bad: set[tuple[int, int]] = set()
        self.refused: list[tuple[int, int]] = []
        self.unknown: tuple[frozenset[int] | None] | None = None
        """What `settle` will say of the last batch; None: that is for the wrapped store to say."""

    def kill(self) -> None:
        """Fail from now on, for ever (rule 4)."""
        self.dead = True

    async def call(
        self, name: str, method: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Pass one call on, unless it fails."""
        fault = await self.begin(name)
        self.fail_before(name, fault)
        answer = await method(*args, **kwargs)
        await self.end(name, fault)
        return answer

    async def begin(self, name: str) -> Fault:
        fault = self.faults.next(name)
        if fault.before_seconds:
            self.injected["slow"] += 1
            await trio.sleep(fault.before_seconds)
        return fault

    def fail_before(self, name: str, fault: Fault) -> None:
        self.require_alive(name)
        if self.outage:
            self.injected["outage"] += 1
            raise StoreUnavailable(f"{name}: an outage of the store")
        if fault.error is not None and fault.error not in (OutcomeUnknown, StoreRefused):
            self.injected[fault.error.code] += 1
            raise fault.error(f"{name}: a fault was injected")

    async def end(self, name: str, fault: Fault) -> None:
        if fault.after_seconds:
            with trio.CancelScope(shield=True):
                await trio.sleep(fault.after_seconds)
        self.require_alive(name)

    def require_alive(self, name: str) -> None:
        if self.dead:
            raise StoreFailed(f"{name}: the store is dead")

    # ------------------------------------------------------------ writing

    async def apply(self, batch: Sequence[Unit]) -> frozenset[int]:
        fault = await self.begin("apply")
        self.fail_before("apply", fault)
        self.refuse_bad(batch, fault)
        self.unknown = None
        if fault.error is OutcomeUnknown and not fault.committed:
            self.unknown = (None,)
            await self.end("apply", fault)
            self.injected["unknown, not committed"] += 1
            raise OutcomeUnknown("apply: the commit failed, says an injected fault")
        left_out = await self.store.apply(batch)
        if fault.error is OutcomeUnknown:
            self.unknown = (left_out,)
        await self.end("apply", fault)
        if fault.error is OutcomeUnknown:
            self.injected["unknown, committed"] += 1
            raise OutcomeUnknown("apply: the commit failed, says an injected fault")
        return left_out

    def refuse_bad(self, batch: Sequence[Unit], fault: Fault) -> None:
        """Refuse the batch if it holds a bad unit (rule 3)."""
        names = [(unit.row, unit.revision) for unit in batch]
        if fault.unit is not None and names:
            self.bad.add(names[fault.unit % len(names)])
        found = [name for name in names if name in self.bad]
        if not found:
            return
        self.injected[StoreRefused.code] += 1
        if len(names) == 1:
            self.bad.discard(names[0])
            self.refused.append(names[0])
        raise StoreRefused("apply: a fault was injected into one unit")

    async def settle(self) -> frozenset[int] | None:
        fault = await self.begin("settle")
        self.fail_before("settle", fault)
        if self.unknown is not None:
            (answer,) = self.unknown
            await trio.lowlevel.checkpoint()
        else:
            answer = await self.store.settle()
        await self.end("settle", fault)
        return answer

    async def reserve(self, count: int) -> int:
        return await self.call("reserve", self.store.reserve, count)

    async def maintain(self) -> None:
        await self.call("maintain", self.store.maintain)

    # ------------------------------------------------------------ reading

    async def load(self, tenant_id: str, instance_id: str, known: int) -> Loaded | None:
        return await self.call("load", self.store.load, tenant_id, instance_id, known)

    async def find(self, tenant_id: str, instance_id: str) -> InstanceRecord | None:
        return await self.call("find", self.store.find, tenant_id, instance_id)

    async def checkpoint(self, row: int, checkpoint_id: str) -> CheckpointRecord | None:
        return await self.call("checkpoint", self.store.checkpoint, row, checkpoint_id)

    async def wait(self, row: int, wait_id: str) -> WaitRecord | None:
        return await self.call("wait", self.store.wait, row, wait_id)

    async def request(self, row: int, request_id: str) -> RequestRecord | None:
        return await self.call("request", self.store.request, row, request_id)

    async def signal(self, row: int, signal_id: int) -> SignalRecord | None:
        return await self.call("signal", self.store.signal, row, signal_id)

    async def error(self, row: int, error_id: int) -> ErrorRecord | None:
        return await self.call("error", self.store.error, row, error_id)

    async def attempt(self, row: int, checkpoint_id: str, attempt: int) -> RetryAttemptRecord | None:
        return await self.call("attempt", self.store.attempt, row, checkpoint_id, attempt)

    async def payloads(self, row: int, kinds: frozenset[PayloadKind]) -> dict[PayloadKind, bytes]:
        return await self.call("payloads", self.store.payloads, row, kinds)

    async def compensation_data(self, row: int, checkpoint_id: str) -> bytes | None:
        return await self.call("compensation_data", self.store.compensation_data, row, checkpoint_id)

    async def due(self, until_us: int, after: tuple[int, int] | None, limit: int) -> list[Due]:
        return await self.call("due", self.store.due, until_us, after, limit)

    async def running(self, before_epoch: int, after_row: int, limit: int) -> list[Due]:
        return await self.call("running", self.store.running, before_epoch, after_row, limit)

    async def list_instances(
        self, where: InstanceFilter, order: InstanceOrder, page: PageRequest
    ) -> Page[InstanceRecord]:
        return await self.call("list_instances", self.store.list_instances, where, order, page)

    async def count_instances(self, where: InstanceFilter) -> int:
        return await self.call("count_instances", self.store.count_instances, where)

    async def list_records(
        self, row: int, kind: type[R], page: PageRequest, where: RecordFilter | None = None
    ) -> Page[R]:
        fault = await self.begin("list_records")
        self.fail_before("list_records", fault)
        answer = await self.store.list_records(row, kind, page, where)
        await self.end("list_records", fault)
        return answer

    async def count_records(self, row: int, kind: type[R], where: RecordFilter | None = None) -> int:
        fault = await self.begin("count_records")
        self.fail_before("count_records", fault)
        answer = await self.store.count_records(row, kind, where)
        await self.end("count_records", fault)
        return answer

    async def counts(self, tenant_id: str | None) -> dict[Status, int]:
        return await self.call("counts", self.store.counts, tenant_id)

    async def unexplained(self, after_row: int, limit: int) -> list[InstanceRecord]:
        return await self.call("unexplained", self.store.unexplained, after_row, limit)

    async def growth(self) -> Growth:
        return await self.call("growth", self.store.growth)

    async def verify(self) -> list[str]:
        return await self.call("verify", self.store.verify)

    async def backup(self, path: str) -> int:
        return await self.call("backup", self.store.backup, path)

    async def check(self) -> None:
        await self.call("check", self.store.check)

    # ------------------------------------------------------------ deleting

    async def terminal(
        self,
        status: Status,
        before_us: int,
        tenant_id: str | None,
        after: tuple[int, int] | None,
        limit: int,
    ) -> list[Finished]:
        return await self.call("terminal", self.store.terminal, status, before_us, tenant_id, after, limit)

    async def purge(self, rows: Sequence[int], most: int) -> Purged:
        return await self.call("purge", self.store.purge, rows, most)

    async def sweep(self, most: int) -> bool:
        return await self.call("sweep", self.store.sweep, most)

    # ------------------------------------------------------------ notes

    async def note(self, name: str) -> str | None:
        return await self.call("note", self.store.note, name)

    async def notes(self, prefix: str) -> dict[str, str]:
        return await self.call("notes", self.store.notes, prefix)

    async def set_note(self, name: str, text: str | None) -> None:
        await self.call("set_note", self.store.set_note, name, text)

    def statistics(self) -> StoreStatistics:
        return self.store.statistics()

    async def close(self) -> None:
        """Close the wrapped store. Never fails on purpose."""
        await self.store.close()
