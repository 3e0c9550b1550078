"""Runtimes in tests: opened on a store in memory, on a file, or on a store that goes by a script.

Every opening ends by asserting that the budget got all its bytes back.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import trio

from runtara.actors.directory import Entry
from runtara.actors.system import System
from runtara.clock import Clock, default_clock
from runtara.config import Settings
from runtara.executor import InlineExecutor
from runtara.persistence.sqlite import SqliteStore
from runtara.persistence.store import Due, Loaded, Unit
from runtara.runtime import open_runtime, run_runtime
from runtara.tenant import Runtime
from tests import postgres_server
from tests.served import client, server

S = TypeVar("S", bound=SqliteStore)

MEMORY = "sqlite:///:memory:"


def url_of(path: Path) -> str:
    return f"sqlite:///{path}"


STORES = ("in memory", "in a file, with threads", "on PostgreSQL")
SURFACES = (*STORES, "over a socket", "over a socket, as JSON", "over a socket, on PostgreSQL")
SERVED = "served+"
"""Before the url of a store: it is served, and a client is connected to it."""


def url_on(store: str, folder: Path) -> str:
    """The url of a new store: one of `STORES` or `SURFACES`."""
    if store.startswith("over a socket"):
        protocol = "json" if "JSON" in store else "msgpack"
        behind = "on PostgreSQL" if "PostgreSQL" in store else "in memory"
        return f"{SERVED}{protocol}+{url_on(behind, folder)}"
    if store == "on PostgreSQL":
        return postgres_server.url_of(postgres_server.new_schema())
    return MEMORY if store == "in memory" else url_of(folder / "a.db")


def assert_nothing_held(system: System) -> None:
    """Whatever happened, every byte of the budget came back, and nobody waits for one."""
    assert system.budget.used == 0
    assert not system.budget.queue


@asynccontextmanager
async def runtime(url: str = MEMORY, **options: Any) -> AsyncIterator[Runtime]:
    """`runtara.open_runtime`, and the assertion."""
    system: System | None = None
    try:
        if url.startswith(SERVED):
            _, protocol, behind = url.split("+", 2)
            async with served_runtime(behind, f"runtara.v1.{protocol}", options) as (system, rt):
                yield rt
            return
        async with open_runtime(url, **options) as rt:
            system = rt.system
            yield rt
    finally:
        if system is not None:
            assert_nothing_held(system)


@asynccontextmanager
async def served_runtime(
    url: str, protocol: str, options: dict[str, Any]
) -> AsyncIterator[tuple[System, Runtime]]:
    """A server on a store, and a client of it; also the actors behind."""
    tenant = options.pop("tenant", "default")
    async with server(url, **options) as found, client(found, protocol=protocol, tenant=tenant) as rt:
        yield found.runtime.system, rt


# ---------------------------------------------------------------- a store that goes by a script


@attrs.define(kw_only=True, eq=False)
class ScriptedStore(SqliteStore):
    """A store in memory that fails and waits as the test says."""

    away: Exception | None = None
    """While set, `apply` raises it."""
    faults: list[Exception | None] = attrs.field(factory=list)
    """What the next calls of `apply` raise before they write; None writes."""
    after_commit: list[Exception | None] = attrs.field(factory=list)
    """What the next calls of `apply` that write raise when they have written."""
    bad: set[str] = attrs.field(factory=set)
    """Checkpoint ids that are refused."""
    refusal: Exception | None = None
    """What a batch with one of them raises."""
    loading: list[Exception | None] = attrs.field(factory=list)
    settling: list[Exception | frozenset[int] | None] = attrs.field(factory=list)
    """What the next calls of `settle` raise or return."""
    due_faults: list[Exception | None] = attrs.field(factory=list)
    held: trio.Event | None = None
    """While set, `apply` waits for it before it writes."""
    begun: int = 0
    written: list[tuple[Unit, ...]] = attrs.field(factory=list)
    left_out_rows: frozenset[int] = frozenset()
    """Rows whose guards fail, says the store."""
    after_due: Callable[[], Awaitable[None]] | None = None
    """Done between the reading of a page of deadlines and its return."""

    async def apply(self, batch: Sequence[Unit]) -> frozenset[int]:
        self.begun += 1
        if self.held is not None:
            await self.held.wait()
        if self.away is not None:
            raise self.away
        self.raise_next(self.faults)
        names = {getattr(op, "checkpoint_id", None) for unit in batch for op in unit.ops}
        if self.refusal is not None and names & self.bad:
            raise self.refusal
        batch = [unit for unit in batch if unit.row not in self.left_out_rows]
        left_out = await super().apply(batch) | self.left_out_rows
        self.written.append(tuple(batch))
        self.raise_next(self.after_commit)
        return left_out

    async def settle(self) -> frozenset[int] | None:
        if not self.settling:
            return await super().settle()
        answer = self.settling.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def load(self, tenant_id: str, instance_id: str, known: int) -> Loaded | None:
        self.raise_next(self.loading)
        return await super().load(tenant_id, instance_id, known)

    async def due(self, until_us: int, after: tuple[int, int] | None, limit: int) -> list[Due]:
        self.raise_next(self.due_faults)
        found = await super().due(until_us, after, limit)
        if self.after_due is not None:
            await self.after_due()
        return found

    def hold(self) -> trio.Event:
        """From now on `apply` waits; set the event to let it go on."""
        self.held = trio.Event()
        return self.held

    @staticmethod
    def raise_next(faults: list[Exception | None]) -> None:
        error = faults.pop(0) if faults else None
        if error is not None:
            raise error


@asynccontextmanager
async def store_of(kind: type[S], path: str = ":memory:") -> AsyncIterator[S]:
    """A store of a class of the test's own, without threads."""
    executor = InlineExecutor()
    store = kind(
        path=path,
        synchronous=2,
        busy_timeout_seconds=0.01,
        read_only=False,
        writer=executor,
        reader=executor,
        lister=executor,
    )
    try:
        await store.open()
        yield store
    finally:
        await store.close()


def scripted_store(path: str = ":memory:") -> AbstractAsyncContextManager[ScriptedStore]:
    return store_of(ScriptedStore, path)


@asynccontextmanager
async def scripted_runtime(
    clock: Clock | None = None, **settings: Any
) -> AsyncIterator[tuple[Runtime, ScriptedStore]]:
    """A runtime on a `ScriptedStore`."""
    system: System | None = None
    try:
        async with (
            scripted_store() as store,
            run_runtime(store, clock or default_clock(), Settings(**settings)) as rt,
        ):
            system = rt.system
            yield rt, store
    finally:
        if system is not None:
            assert_nothing_held(system)


# ---------------------------------------------------------------- clocks


class HandClock:
    """A wall clock that the test moves; waiting for it is a scan every second of trio's time."""

    def __init__(self, now_us: int = 1_700_000_000_000_000) -> None:
        self.us = now_us

    def now_us(self) -> int:
        return self.us

    def advance(self, seconds: float) -> None:
        self.us += round(seconds * 1e6)

    async def sleep_until_us(self, instant_us: int) -> None:
        await trio.sleep(1.0 if instant_us > self.us else 0.0)


# ---------------------------------------------------------------- moments


class StepCounter(trio.abc.Instrument):
    """Calls ``act`` when ``task`` (or any task) has been run for the n-th time: at its n-th await."""

    def __init__(self, step: int, act: Callable[[], object], task: trio.lowlevel.Task | None = None) -> None:
        self.left = step
        self.act = act
        self.task = task

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self.task is None or task is self.task:
            self.left -= 1
            if self.left == 0:
                self.act()


async def cancelled_at(step: int, call: Callable[[], Awaitable[object]], *, any_task: bool = False) -> bool:
    """Run ``call`` and cancel it at its n-th await (or when any task was run for the n-th time).

    Returns whether it was cancelled; when not, it ran to its end.
    """
    with trio.CancelScope() as scope:
        task = None if any_task else trio.lowlevel.current_task()
        counter = StepCounter(step, scope.cancel, task)
        trio.lowlevel.add_instrument(counter)
        try:
            await call()
        finally:
            trio.lowlevel.remove_instrument(counter)
    return scope.cancelled_caught


async def at_every_await(
    call: Callable[[int], Awaitable[object]], *, any_task: bool = False, most: int = 500
) -> int:
    """Run ``call(n)`` for n = 1, 2, ..., cancelled at its n-th await, until one runs to its end."""
    for step in range(1, most):

        async def attempt(step: int = step) -> None:
            await call(step)

        if not await cancelled_at(step, attempt, any_task=any_task):
            return step
    raise AssertionError(f"still cancelled at step {most}")


def entry_of(rt: Runtime, instance_id: str) -> Entry:
    """The directory's entry of an instance that is live."""
    return rt.system.directory.entries[(rt.tenant, instance_id)]
