"""The store on SQLite.

Rules:

1. One connection writes, and only in the ``writer`` executor; another one reads, and only in ``reader``. So
   each sees one call at a time, and a long list never holds up a commit. In memory there is one connection
   for both, in ``writer``.
2. Each batch carries a number into the row ``meta``, in its own transaction. `SqliteStore.settle` reads
   it back, so its answer is exact.
3. After an I/O error or damage while writing, and after a commit whose outcome is unknown, nothing is
   written any more: every further `apply` raises `StoreFailed` until the file is opened again. Reads go on.
4. To settle an unknown commit *all* connections are closed first. The log's index in shared memory does not
   know the failed commit, but the log itself may hold it, and the next recovery would bring it back; so the
   question is asked after that recovery.
"""

import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Concatenate, Final, ParamSpec, TypeVar

import attrs
import trio

from runtara.errors import (
    OutcomeUnknown,
    RuntimeClosed,
    StoreFailed,
    StoreReadOnly,
    StoreUnavailable,
    ValidationError,
)
from runtara.executor import Executor
from runtara.persistence.sqlite import queries, schema, writes
from runtara.persistence.sqlite.connection import (
    MEMORY,
    open_reader,
    open_writer,
    read_pragma,
    synchronous_level,
)
from runtara.persistence.sqlite.faults import store_error
from runtara.persistence.sqlite.lock import FileLock
from runtara.persistence.sqlite.transaction import transact
from runtara.persistence.sqlite.volume import warn_of_unsuitable_volume
from runtara.persistence.sqlite.wal import LogKeeper
from runtara.persistence.store import (
    Due,
    EventFilter,
    InstanceFilter,
    InstanceOrder,
    Loaded,
    Page,
    PageRequest,
    R,
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
    WaitRecord,
)

P = ParamSpec("P")
T = TypeVar("T")
Connection = sqlite3.Connection

RESERVE: Final = "UPDATE meta SET next_number = next_number + ? RETURNING next_number"


@asynccontextmanager
async def open_sqlite(
    path: str,
    *,
    synchronous: str = "FULL",
    writer: Executor,
    reader: Executor,
    busy_timeout_seconds: float = 0.25,
    read_only: bool = False,
) -> AsyncIterator["SqliteStore"]:
    """Open the store in the file ``path``, which is made if there is none; ``:memory:`` keeps it in memory.

    Args:
        path: Of the file. ``<path>-wal``, ``-shm`` and ``-lock`` lie beside it.
        synchronous: FULL survives a loss of power. NORMAL may then lose the newest commits, OFF the file.
        writer: Where all writing runs; for ``:memory:`` the reading as well. The caller closes it.
        reader: Where the reading runs. The caller closes it.
        busy_timeout_seconds: How long a call waits for another process that holds SQLite's lock.
        read_only: Take no lock, write nothing: another runtime may be using the file.

    Raises:
        StoreLocked: Another runtime holds the file; the message names its process.
        StoreTooNew, StoreCorrupt: The file is not one of this program's, or is damaged; it was not touched.
        StoreReadOnly: The file or its folder cannot be written, or (``read_only``) is not there.
        StoreFailed: SQLite refused a setting that the promises stand on.
    """
    store = SqliteStore(
        path=path,
        synchronous=synchronous_level(synchronous),
        busy_timeout_seconds=busy_timeout_seconds,
        read_only=read_only,
        writer=writer,
        reader=writer if path == MEMORY else reader,
    )
    try:
        await store.open()
        yield store
    finally:
        await store.close()


@attrs.define(kw_only=True, eq=False)
class SqliteStore:
    """A `Store` in one SQLite file, or in memory. Made by `open_sqlite`."""

    path: str
    synchronous: int
    busy_timeout_seconds: float
    read_only: bool
    writer: Executor
    reader: Executor
    lock: FileLock | None = None
    write_connection: Connection | None = None
    read_connection: Connection | None = None
    log: LogKeeper | None = None
    batch: int = 0
    """Number of the batch that was tried last (rule 2)."""
    left_out: frozenset[int] = frozenset()
    """What that batch leaves out by its guards."""
    failed: bool = False
    """Rule 3."""
    closed: bool = False
    batches: int = 0
    units: int = 0

    # ------------------------------------------------------------ opening and closing

    async def open(self) -> None:
        """Open the connections; on an error `close` takes back what was opened."""
        if not self.read_only:
            await self.writer.run(self.open_writing)
        await self.reader.run(self.open_reading)

    def open_writing(self) -> None:
        if self.path != MEMORY:
            self.lock = FileLock(self.path)
        with self.errors_translated():
            if self.path != MEMORY:
                warn_of_unsuitable_volume(self.path)
                schema.prepare_file(self.path, self.busy_timeout_seconds)
                self.log = LogKeeper(os.path.realpath(self.path))
            self.batch = queries.marker(self.connect_writer())

    def connect_writer(self) -> Connection:
        connection = open_writer(self.path, self.synchronous, self.busy_timeout_seconds)
        self.write_connection = connection
        schema.migrate(connection, self.path)
        return connection

    def open_reading(self) -> None:
        if self.path == MEMORY:
            self.read_connection = self.write_connection
            return
        with self.errors_translated():
            self.read_connection = open_reader(self.path, self.busy_timeout_seconds, read_only=self.read_only)
            if self.read_only:
                self.require_current(self.read_connection)
            elif read_pragma(self.read_connection, "journal_mode") != "wal":
                raise StoreFailed(f"{self.path}: the reader does not see the write-ahead log")

    def require_current(self, connection: Connection) -> None:
        """A file of an older version must first be opened for writing."""
        if schema.check_version(connection, self.path) != schema.newest_version():
            raise StoreReadOnly(f"{self.path} has an older layout; open it for writing once")

    async def close(self) -> None:
        """Close the connections and give up the lock. A commit that was begun ends first."""
        if self.closed:
            await trio.lowlevel.checkpoint()
            return
        self.closed = True
        await self.reader.run(self.close_reading)
        await self.writer.run(self.close_writing)

    def close_reading(self) -> None:
        if self.read_connection is not None and self.path != MEMORY:
            self.read_connection.close()
        self.read_connection = None

    def close_writing(self) -> None:
        if self.write_connection is not None:
            self.write_connection.close()
            self.write_connection = None
        if self.closed and self.lock is not None:
            self.lock.release()

    # ------------------------------------------------------------ the doors

    @contextmanager
    def errors_translated(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            known = store_error(error, self.path)
            if known is None:
                raise
            raise known from error

    def require_open(self) -> None:
        if self.closed:
            raise RuntimeClosed(f"{self.path} was closed")

    def require_writable(self) -> None:
        self.require_open()
        if self.read_only:
            raise StoreReadOnly(f"{self.path} was opened for reading only")
        if self.failed:
            raise StoreFailed(f"{self.path} failed before and must be opened again")

    async def ask(
        self, question: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Answer ``question`` in the reader."""
        self.require_open()

        def answer() -> T:
            if self.read_connection is None:
                raise StoreUnavailable(f"{self.path} is being opened again")
            with self.errors_translated():
                return question(self.read_connection, *args, **kwargs)

        return await self.reader.run(answer)

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run ``work`` in the writer, where `failed` is kept (rule 3)."""
        self.require_writable()

        def run() -> T:
            if self.write_connection is None:
                raise StoreFailed(f"{self.path} has no connection to write with")
            try:
                return work(self.write_connection)
            except (StoreFailed, OutcomeUnknown):
                self.failed = True
                raise

        return await self.writer.run(run)

    # ------------------------------------------------------------ writing

    async def apply(self, batch: Sequence[Unit]) -> frozenset[int]:
        if not batch:
            self.require_writable()
            await trio.lowlevel.checkpoint()
            return frozenset()
        left_out = await self.write(partial(self.write_batch, batch))
        self.batches += 1
        self.units += len(batch)
        return left_out

    def write_batch(self, batch: Sequence[Unit], connection: Connection) -> frozenset[int]:
        self.batch += 1
        number = self.batch

        def work(connection: Connection) -> frozenset[int]:
            self.left_out = writes.write(connection, batch)
            connection.execute("UPDATE meta SET last_batch = ?", (number,))
            return self.left_out

        left_out = transact(connection, work, self.path)
        if self.log is not None:
            self.log.note(writes.appended_rows(batch), sum(unit.size for unit in batch))
        return left_out

    async def settle(self) -> frozenset[int] | None:
        self.require_open()
        if self.path == MEMORY:
            return await self.writer.run(self.outcome)
        await self.reader.run(self.close_reading)
        await self.writer.run(self.close_writing)
        try:
            return await self.writer.run(self.outcome)
        finally:
            await self.reader.run(self.open_reading)

    def outcome(self) -> frozenset[int] | None:
        """What became of the batch that was tried last, asked of a new connection (rule 4)."""
        with self.errors_translated():
            connection = self.write_connection or self.connect_writer()
            return self.left_out if queries.marker(connection) == self.batch else None

    async def reserve(self, count: int) -> int:
        if count < 1:
            raise ValidationError("count", "must be at least 1")
        return await self.write(partial(self.take_numbers, count))

    def take_numbers(self, count: int, connection: Connection) -> int:
        def work(connection: Connection) -> int:
            after: int = connection.execute(RESERVE, (count,)).fetchone()[0]
            return after - count

        try:
            return transact(connection, work, self.path)
        except OutcomeUnknown as error:  # numbers that may be lost do no harm; `settle` is for batches
            raise StoreFailed(error.message) from error

    async def maintain(self) -> None:
        self.require_writable()
        if self.log is None or not self.log.may_be_due:
            await trio.lowlevel.checkpoint()
            return
        await self.write(partial(self.move_log, self.log))

    def move_log(self, log: LogKeeper, connection: Connection) -> None:
        with self.errors_translated():
            log.maintain(connection)

    # ------------------------------------------------------------ reading

    async def load(self, tenant_id: str, instance_id: str, known: int) -> Loaded | None:
        return await self.ask(queries.load, tenant_id, instance_id, known)

    async def find(self, tenant_id: str, instance_id: str) -> InstanceRecord | None:
        return await self.ask(queries.find, tenant_id, instance_id)

    async def checkpoint(self, row: int, checkpoint_id: str) -> CheckpointRecord | None:
        return await self.ask(queries.checkpoint, row, checkpoint_id)

    async def wait(self, row: int, wait_id: str) -> WaitRecord | None:
        return await self.ask(queries.wait, row, wait_id)

    async def request(self, row: int, request_id: str) -> RequestRecord | None:
        return await self.ask(queries.request, row, request_id)

    async def signal(self, row: int, signal_id: int) -> SignalRecord | None:
        return await self.ask(queries.signal, row, signal_id)

    async def error(self, row: int, error_id: int) -> ErrorRecord | None:
        return await self.ask(queries.error, row, error_id)

    async def attempt(self, row: int, checkpoint_id: str, attempt: int) -> RetryAttemptRecord | None:
        return await self.ask(queries.attempt, row, checkpoint_id, attempt)

    async def payloads(self, row: int, kinds: frozenset[PayloadKind]) -> dict[PayloadKind, bytes]:
        return await self.ask(queries.payloads, row, kinds)

    async def compensation_data(self, row: int, checkpoint_id: str) -> bytes | None:
        return await self.ask(queries.compensation_data, row, checkpoint_id)

    async def due(self, until_us: int, after: tuple[int, int] | None, limit: int) -> list[Due]:
        return await self.ask(queries.due, until_us, after, limit)

    async def running(self, before_epoch: int, after_row: int, limit: int) -> list[Due]:
        return await self.ask(queries.running, before_epoch, after_row, limit)

    async def list_instances(
        self, where: InstanceFilter, order: InstanceOrder, page: PageRequest
    ) -> Page[InstanceRecord]:
        return await self.ask(queries.list_instances, where, order, page)

    async def count_instances(self, where: InstanceFilter) -> int:
        return await self.ask(queries.count_instances, where)

    async def list_records(
        self, row: int, kind: type[R], page: PageRequest, where: EventFilter | None = None
    ) -> Page[R]:
        return await self.ask(queries.list_records, row, kind, page, where)

    async def count_records(self, row: int, kind: type[R], where: EventFilter | None = None) -> int:
        return await self.ask(queries.count_records, row, kind, where)

    async def check(self) -> None:
        await self.ask(queries.marker)

    def statistics(self) -> StoreStatistics:
        self.require_open()
        return StoreStatistics(
            backend="sqlite",
            location=self.path,
            batches=self.batches,
            units=self.units,
            file_bytes=file_size(self.path),
            log_bytes=file_size(f"{os.path.realpath(self.path)}-wal"),
        )


def file_size(path: str) -> int | None:
    try:
        return os.path.getsize(path)
    except OSError:
        return None
