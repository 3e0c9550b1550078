"""From urls and files to an export or an import: opens the store, the file, and what else is needed.

A file ``-`` is the standard input or output.
"""

import os
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from functools import partial
from typing import Final

import trio

from runtara.clock import SystemClock, runs_on_mock_clock
from runtara.config import settings_from
from runtara.errors import ValidationError
from runtara.executor import Executor, InlineExecutor, ThreadExecutor
from runtara.ids import check_tenant_id
from runtara.limits import MEBIBYTE
from runtara.persistence.store import Store
from runtara.randomness import SystemRandomness
from runtara.records import Status
from runtara.runtime import open_store, open_store_to_read
from runtara.transfer.discarding import discard_import
from runtara.transfer.exporting import Exported, Start, begin, export_store, resume
from runtara.transfer.importing import Imported, import_store
from runtara.transfer.items import Progress, Skipped
from runtara.transfer.rules import line_limit
from runtara.transfer.streams import (
    CHUNK,
    FIELD,
    Receive,
    Spool,
    Target,
    Write,
    in_file,
    open_source,
    open_target,
)

STANDARD: Final = "-"
AT_ONCE: Final = 4
"""Instances that are read at once."""
LARGEST: Final = 64 * MEBIBYTE
"""Of a value that any store holds."""


async def export_to(
    url: str,
    file: str,
    *,
    program: str,
    tenant_id: str | None = None,
    statuses: frozenset[Status] = frozenset(),
    salvage: bool = False,
    go_on: bool = False,
    force: bool = False,
    report: Callable[[Progress], None] = lambda progress: None,
    tell: Callable[[Skipped], None] = lambda skipped: None,
) -> Exported:
    """Export a store, which may be at work, to a file that appears when it is whole.

    Args:
        program: The version of this program.
        go_on: Go on with what an earlier export to the same file has left, if there is something.
        force: Replace a file that is there.
        report: Hears how far it is.
        tell: Hears of everything that ``salvage`` leaves out.

    Raises:
        ValidationError: An argument is ill formed, or the file cannot be written.
        ImportUnfinished, StoreCorrupt, StoreError: See `export_store`.

    Cancellation: What is written of a file stays, to be gone on with.
    """
    if tenant_id is not None:
        check_tenant_id(tenant_id)
    if file == STANDARD and (go_on or force):
        raise ValidationError(FIELD, "the standard output cannot be gone on with or replaced")

    async def fresh(store: Store, write: Write) -> Start:
        return await begin(
            store,
            write,
            program=program,
            created_us=SystemClock().now_us(),
            export_id=SystemRandomness().identifier(),
            tenant_id=tenant_id,
            statuses=statuses,
            salvage=salvage,
        )

    async with AsyncExitStack() as stack:
        executor = await stack.enter_async_context(open_executor())
        store = await stack.enter_async_context(open_store_to_read(url))
        target: Target | None = None
        start: Start | None = None
        if file == STANDARD:
            write = await stack.enter_async_context(standard_output())
        else:
            target = await stack.enter_async_context(open_target(file, executor, force=force, resume=go_on))
            write = target.write
            start = await what_is_left(target, tenant_id, statuses)
        folder = None if target is None else target.folder
        spools = [stack.enter_context(closing(Spool(executor, folder))) for _ in range(AT_ONCE)]
        start = start or await fresh(store, write)
        found = await export_store(store, write, spools, start, report=report, tell=tell)
        if target is not None:
            await target.finish()
        return found


async def what_is_left(target: Target, tenant_id: str | None, statuses: frozenset[Status]) -> Start | None:
    """What an earlier export has written as a whole, if anything; the rest is cut off."""
    start = await resume(
        target.read,
        longest=line_limit(LARGEST),
        payload_bytes=LARGEST,
        tenant_id=tenant_id,
        statuses=statuses,
    )
    await target.cut(0 if start is None else start.tally.bytes)
    return start


async def import_from(
    url: str,
    file: str,
    *,
    skip_existing: bool = False,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Imported:
    """Import an export into a store, which is made if there is none; see `import_store`.

    The largest value that is taken is the setting ``payload_bytes``, from ``RUNTARA_PAYLOAD_BYTES``.

    Raises:
        ValidationError: An argument is ill formed, or the file cannot be read.
        StoreLocked: A runtime has the store.
        BadExport, Conflict, ImportUnfinished, StoreError: See `import_store`.
    """
    settings = settings_from(os.environ)
    async with AsyncExitStack() as stack:
        executor = await stack.enter_async_context(open_executor())
        source = standard_input if file == STANDARD else partial(open_source, file, executor)
        again = file != STANDARD and await can_be_read_again(file, executor)
        store = await stack.enter_async_context(open_store(url, settings, SystemRandomness(), None))
        return await import_store(
            store,
            source,
            twice=again,
            longest=line_limit(settings.payload_bytes),
            payload_bytes=settings.payload_bytes,
            skip_existing=skip_existing,
            report=report,
        )


async def can_be_read_again(file: str, executor: Executor) -> bool:
    """Whether it is a file, and not a pipe. Raises `ValidationError` if it cannot be read."""
    found = await in_file(executor, partial(os.stat, file), file)
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        return False
    async with open_source(file, executor):  # it is told before a store is made for it
        return True


async def discard_from(url: str, report: Callable[[Progress], None] = lambda progress: None) -> int:
    """Take back what an unfinished import has brought; see `discard_import`."""
    async with open_store(url, settings_from(os.environ), SystemRandomness(), None) as store:
        return await discard_import(store, SystemClock().now_us(), report)


# ---------------------------------------------------------------- what they stand on


@asynccontextmanager
async def open_executor() -> AsyncIterator[Executor]:
    """Where files are read and written."""
    executor: Executor = InlineExecutor() if runs_on_mock_clock() else ThreadExecutor("runtara-file")
    try:
        yield executor
    finally:
        await executor.close()


@asynccontextmanager
async def standard_output() -> AsyncIterator[Write]:
    async with trio.lowlevel.FdStream(os.dup(1)) as stream:

        async def write(data: bytes) -> None:
            try:
                await stream.send_all(data)
            except trio.BrokenResourceError as error:
                raise ValidationError(FIELD, "whoever read the standard output is gone") from error

        yield write


@asynccontextmanager
async def standard_input() -> AsyncIterator[Receive]:
    async with trio.lowlevel.FdStream(os.dup(0)) as stream:
        yield partial(stream.receive_some, CHUNK)
