"""The composition root: `open_runtime` puts store, actors and clock together, and gives out a `Runtime`.

Rules:

1. Everything that runs for a runtime runs inside ``async with open_runtime(...)`` and ends with it.
2. Leaving the context drains: live sessions are asked to suspend, get ``drain_seconds``, and are then
   suspended, due at once. Nothing is lost, and no attempt is counted.
3. What the body of the context raises leaves it unchanged, not wrapped in a group.
"""

import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Any, Protocol

import trio

from runtara.actors.system import System
from runtara.clock import Clock, default_clock, runs_on_mock_clock
from runtara.config import Settings, settings_from
from runtara.errors import ValidationError
from runtara.executor import Executor, InlineExecutor, ThreadExecutor
from runtara.ids import check_tenant_id
from runtara.persistence.sqlite import open_sqlite
from runtara.persistence.sqlite.restore import restore_sqlite
from runtara.persistence.store import Store
from runtara.randomness import Randomness, SystemRandomness
from runtara.reader import Reader
from runtara.tenant import Runtime, local_runtime
from runtara.transfer.unfinished import require_whole
from runtara.urls import MEMORY, is_postgres, sqlite_path


@asynccontextmanager
async def open_runtime(
    url: str = "sqlite:///runtara.db",
    *,
    tenant: str = "default",
    clock: Clock | None = None,
    randomness: Randomness | None = None,
    inline: bool | None = None,
    **settings: Any,
) -> AsyncGenerator[Runtime, None]:
    """Open the runtime on a store.

    Args:
        url: ``sqlite:///relative.db``, ``sqlite:////absolute.db``, or ``sqlite:///:memory:`` for tests.
            ``postgresql://user@host/database?schema=runtara`` needs the extra ``runtara[postgres]``.
        tenant: For whom the returned `Runtime` acts; `Runtime.for_tenant` gives others.
        clock: The wall clock; by default the machine's, or trio's own under a mock clock.
        randomness: Where identifiers come from; by default the machine.
        inline: Run SQLite on the trio loop, without threads. By default only for a store in memory and
            under a mock clock (which would jump while a thread works).
        settings: Any field of `runtara.Settings`; those not given come from ``RUNTARA_*`` variables.

    Raises:
        ValidationError: The url or a setting is ill formed.
        StoreLocked: Another runtime holds the store; the message names its process.
        StoreTooNew, StoreCorrupt, StoreReadOnly: The store cannot be used; it was left as it was.
        ImportUnfinished: An import into the store was begun and has not ended.
        StoreUnavailable: The database does not answer.
        StoreFailed: The store failed while the runtime was open; what was acknowledged is on disk.

    Cancellation: The runtime drains and closes all the same, within ``drain_seconds``.
    """
    check_tenant_id(tenant)
    chosen = settings_from(os.environ, **settings)
    async with open_store(url, chosen, randomness or SystemRandomness(), inline) as store:
        await require_whole(store)
        async with run_runtime(store, clock or default_clock(), chosen, randomness, tenant) as runtime:
            yield runtime


@asynccontextmanager
async def open_store(
    url: str, settings: Settings, randomness: Randomness, inline: bool | None
) -> AsyncIterator[Store]:
    """The store that ``url`` names; see `open_runtime`."""
    if is_postgres(url):
        async with postgres_door()(url, randomness=randomness) as store:
            yield store
        return
    path = sqlite_path(url)
    without_threads = inline if inline is not None else path == MEMORY or runs_on_mock_clock()
    async with (
        open_executors(without_threads) as (writer, reader, lister),
        open_sqlite(
            path, synchronous=settings.synchronous, writer=writer, reader=reader, lister=lister
        ) as store,
    ):
        yield store


@asynccontextmanager
async def open_reader(
    url: str = "sqlite:///runtara.db", *, tenant: str | None = None
) -> AsyncGenerator[Reader, None]:
    """Open a store to look at it, also while a program works on it. Nothing in it is changed.

    Args:
        url: As in `open_runtime`; a store in memory has no other readers.
        tenant: Whose instances are seen; None: everybody's.

    Raises:
        ValidationError: The url or the tenant is ill formed.
        StoreNotFound: There is no store.
        StoreTooOld, StoreTooNew: Another version of this program has made it.
        StoreCorrupt: It is damaged, or no store of this program.
        StoreUnavailable, StoreDenied: The database does not answer, or does not let this user in.
    """
    if tenant is not None:
        check_tenant_id(tenant)
    async with open_store_to_read(url) as store:
        yield Reader(store, tenant)


@asynccontextmanager
async def open_store_to_read(url: str) -> AsyncIterator[Store]:
    if is_postgres(url):
        async with postgres_door()(url, randomness=SystemRandomness(), read_only=True) as store:
            yield store
        return
    path = sqlite_path(url)
    if path == MEMORY:
        raise ValidationError("url", "names a store in memory, which only its own program can read")
    async with (
        open_executors(runs_on_mock_clock()) as (writer, reader, lister),
        open_sqlite(path, writer=writer, reader=reader, lister=lister, read_only=True) as store,
    ):
        yield store


async def restore(backup: str, url: str, *, replace: bool = False) -> int:
    """Make a SQLite store from a file that `Reader.backup` made; returns its bytes.

    Args:
        backup: Path of the file.
        url: Where the store is to be; no runtime may have it open.
        replace: Put it in the place of a store that is there.

    Raises:
        ValidationError: The url is no SQLite file's, there is no backup, or (without ``replace``) there is
            something in its place.
        StoreLocked: A runtime has the store open; the message names its process.
        StoreCorrupt, StoreTooNew: The backup is damaged, or is none of this program's.
        StoreError: The store cannot be written. As with all others, what was there is as it was.
    """
    if is_postgres(url):
        raise ValidationError("url", "is PostgreSQL's, which is restored by its own tools")
    path = sqlite_path(url)
    if path == MEMORY:
        raise ValidationError("url", "names a store in memory")
    async with open_executors(runs_on_mock_clock()) as (writer, *_):
        return await writer.run(partial(restore_sqlite, backup, path, replace=replace))


class PostgresDoor(Protocol):
    """`runtara.persistence.postgres.open_postgres`, as it is called here."""

    def __call__(
        self, url: str, *, randomness: Randomness, read_only: bool = False
    ) -> AbstractAsyncContextManager[Store]: ...


def postgres_door() -> PostgresDoor:
    """`open_postgres`, imported only now: its driver is an extra.

    Raises:
        ValidationError: The driver is not installed; the message names the extra.
    """
    try:
        from runtara.persistence.postgres import open_postgres
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "psycopg" and "pq wrapper" not in str(error):
            raise
        raise ValidationError("url", "PostgreSQL needs psycopg: pip install 'runtara[postgres]'") from error
    return open_postgres


@asynccontextmanager
async def open_executors(inline: bool) -> AsyncIterator[tuple[Executor, Executor, Executor]]:
    """One executor for the writer, one for what actors ask, and one for what may take long."""
    writer: Executor = InlineExecutor() if inline else ThreadExecutor("runtara-writer", donate=True)
    reader: Executor = InlineExecutor() if inline else ThreadExecutor("runtara-reader")
    lister: Executor = InlineExecutor() if inline else ThreadExecutor("runtara-lister")
    try:
        yield writer, reader, lister
    finally:
        with trio.CancelScope(shield=True):
            await lister.close()
            await reader.close()
            await writer.close()


@asynccontextmanager
async def run_runtime(
    store: Store,
    clock: Clock,
    settings: Settings,
    randomness: Randomness | None = None,
    tenant: str = "default",
) -> AsyncGenerator[Runtime, None]:
    """Run a runtime on a store that is open already; the store stays open. See `open_runtime`."""
    system = System(store, clock, settings)
    runtime = local_runtime(system, randomness or SystemRandomness(), tenant)
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run_system, system, nursery.cancel_scope)
        try:
            await system.ready.wait()
            yield runtime
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # the nursery would wrap it in a group
            failure = error
        finally:
            await close_system(system)
            nursery.cancel_scope.cancel()
    if system.fatal is not None:
        raise system.fatal from failure or system.fatal.__cause__
    if failure is not None:
        raise failure


async def run_system(system: System, body: trio.CancelScope) -> None:
    """Run the tree, shielded from the cancellation of the body: it must outlive the drain.

    Not begun with `nursery.start`: a task whose start is cancelled stays where the cancellation is, and the
    shield would keep it there for ever.
    """
    with trio.CancelScope(shield=True):
        await system.run()
    if system.fatal is not None:
        body.cancel()


async def close_system(system: System) -> None:
    """Drain and stop. Shielded; bounded by ``drain_seconds`` and the store's patience."""
    settings = system.settings
    with trio.CancelScope(shield=True):
        if system.fatal is None and system.ready.is_set():
            with trio.move_on_after(settings.drain_seconds + settings.store_seconds):
                await system.drain()
        system.stop()
        await system.stopped.wait()
