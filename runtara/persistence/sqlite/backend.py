"""The store on SQLite.

Rules:

1. One connection writes, and only in the ``writer`` executor; another one answers what actors ask, and only
   in ``reader``; a third one answers what may take long, and only in ``lister``. So each sees one call at a
   time, and neither a commit nor an actor waits for a long list. In memory there is one connection for all,
   in ``writer``.
2. Each batch carries a number into the row ``meta``, in its own transaction. `SqliteStore.settle` reads
   it back, so its answer is exact.
3. After an I/O error or damage while writing, and after a commit whose outcome is unknown, nothing is
   written any more: every further `apply` raises `StoreFailed` until the file is opened again. Reads go on.
4. To settle an unknown commit *all* connections are closed first. The log's index in shared memory does not
   know the failed commit, but the log itself may hold it, and the next recovery would bring it back; so the
   question is asked after that recovery. A long question that is being answered is given up for it.
"""

import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Concatenate, Final, ParamSpec, TypeVar

import attrs
import trio

from runtara.errors import (
    OutcomeUnknown,
    RuntimeClosed,
    StoreFailed,
    StoreNotFound,
    StoreReadOnly,
    StoreTooOld,
    ValidationError,
)
from runtara.executor import Executor
from runtara.persistence.sqlite import copies, purge, queries, schema, writes
from runtara.persistence.sqlite.connection import (
    LISTER,
    MEMORY,
    READER,
    Pragmas,
    open_reader,
    open_writer,
    read_pragma,
    synchronous_level,
)
from runtara.persistence.sqlite.damage import find_damage
from runtara.persistence.sqlite.faults import errors_translated
from runtara.persistence.sqlite.lock import FileLock
from runtara.persistence.sqlite.purge import Spending
from runtara.persistence.sqlite.reading import Reading
from runtara.persistence.sqlite.transaction import transact
from runtara.persistence.sqlite.volume import warn_of_unsuitable_volume
from runtara.persistence.sqlite.wal import LogKeeper
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
Connection = sqlite3.Connection

RESERVE: Final = "UPDATE meta SET next_number = next_number + ? RETURNING next_number"


@asynccontextmanager
async def open_sqlite(
    path: str,
    *,
    synchronous: str = "FULL",
    writer: Executor,
    reader: Executor,
    lister: Executor | None = None,
    busy_timeout_seconds: float = 0.25,
    read_only: bool = False,
) -> AsyncIterator["SqliteStore"]:
    """Open the store in the file ``path``, which is made if there is none; ``:memory:`` keeps it in memory.

    Args:
        path: Of the file. ``<path>-wal``, ``-shm`` and ``-lock`` lie beside it.
        synchronous: FULL survives a loss of power. NORMAL may then lose the newest commits, OFF the file.
        writer: Where all writing runs; for ``:memory:`` the reading as well. The caller closes it.
        reader: Where the reading runs. The caller closes it.
        lister: Where what may take long runs: lists, counts, backups. By default ``reader``. The caller
            closes it.
        busy_timeout_seconds: How long a call waits for another process that holds SQLite's lock.
        read_only: Take no lock, write nothing: another runtime may be using the file.

    Raises:
        StoreLocked: Another runtime holds the file; the message names its process.
        StoreTooNew, StoreCorrupt: The file is not one of this program's, or is damaged; it was not touched.
        StoreReadOnly: The file or its folder cannot be written.
        StoreNotFound, StoreTooOld: With ``read_only``: it is not there, or must be opened for writing once.
        StoreFailed: SQLite refused a setting that the promises stand on.
    """
    store = SqliteStore(
        path=path,
        synchronous=synchronous_level(synchronous),
        busy_timeout_seconds=busy_timeout_seconds,
        read_only=read_only,
        writer=writer,
        reader=reader,
        lister=lister or reader,
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
    lister: Executor
    lock: FileLock | None = None
    write_connection: Connection | None = None
    reading: Reading = attrs.field(init=False)
    """For what actors ask."""
    listing: Reading = attrs.field(init=False)
    """For what may take long."""
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

    def __attrs_post_init__(self) -> None:
        self.reading = self.reading_in(self.reader, READER)
        self.listing = self.reading_in(self.lister, LISTER)

    def reading_in(self, executor: Executor, pragmas: Pragmas) -> Reading:
        if self.path == MEMORY:
            return Reading(path=self.path, executor=self.writer, connect=self.require_connection, owned=False)
        return Reading(path=self.path, executor=executor, connect=partial(self.connect_reader, pragmas))

    # ------------------------------------------------------------ opening and closing

    async def open(self) -> None:
        """Open the connections; on an error `close` takes back what was opened."""
        if not self.read_only:
            await self.writer.run(self.open_writing)
        await self.reading.open()
        await self.listing.open()

    def open_writing(self) -> None:
        if self.path != MEMORY:
            self.lock = FileLock(self.path)
        with errors_translated(self.path):
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

    def require_connection(self) -> Connection:
        if self.write_connection is None:
            raise StoreFailed(f"{self.path} has no connection to write with")
        return self.write_connection

    def connect_reader(self, pragmas: Pragmas) -> Connection:
        if self.read_only and not os.path.exists(self.path):
            raise StoreNotFound(f"there is no store at {self.path}")
        connection = open_reader(
            self.path, self.busy_timeout_seconds, read_only=self.read_only, pragmas=pragmas
        )
        try:
            self.require_usable(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def require_usable(self, connection: Connection) -> None:
        """A file of an older version must first be opened for writing."""
        if not self.read_only:
            if read_pragma(connection, "journal_mode") != "wal":
                raise StoreFailed(f"{self.path}: the reader does not see the write-ahead log")
        elif schema.check_version(connection, self.path) != schema.newest_version():
            raise StoreTooOld(f"{self.path} has an older layout; open it for writing once")

    async def close(self) -> None:
        """Close the connections and give up the lock. A commit that was begun ends first."""
        if self.closed:
            await trio.lowlevel.checkpoint()
            return
        self.closed = True
        await self.close_readings()
        await self.writer.run(self.close_writing)

    async def close_readings(self) -> None:
        self.listing.stop()
        await self.reading.close()
        await self.listing.close()

    def close_writing(self) -> None:
        if self.write_connection is not None:
            self.write_connection.close()
            self.write_connection = None
        if self.closed and self.lock is not None:
            self.lock.release()

    # ------------------------------------------------------------ the doors

    def require_open(self) -> None:
        if self.closed:
            raise RuntimeClosed(f"{self.path} was closed")

    def require_writable(self) -> None:
        self.require_open()
        if self.read_only:
            raise StoreReadOnly(f"{self.path} was opened for reading only")
        self.require_unfailed()

    def require_unfailed(self) -> None:
        if self.failed:
            raise StoreFailed(f"{self.path} failed before and must be opened again")

    async def ask(
        self, question: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Answer a question that an actor waits for."""
        self.require_open()
        return await self.reading.ask(question, *args, **kwargs)

    async def ask_at_length(
        self, question: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Answer a question that may take long."""
        self.require_open()
        return await self.listing.ask(question, *args, **kwargs)

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run ``work`` in the writer, where `failed` is kept (rule 3)."""
        self.require_writable()

        def run() -> T:
            self.require_unfailed()  # it may have failed while this waited
            connection = self.require_connection()
            try:
                return work(connection)
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
        self.note_written(writes.appended_rows(batch), sum(unit.size for unit in batch))
        return left_out

    def note_written(self, rows: int, size: int) -> None:
        """So much goes into the log, at most."""
        if self.log is not None:
            self.log.note(rows, size)

    async def settle(self) -> frozenset[int] | None:
        self.require_open()
        if self.path == MEMORY:
            return await self.writer.run(self.outcome)
        await self.close_readings()
        await self.writer.run(self.close_writing)
        try:
            return await self.writer.run(self.outcome)
        finally:
            await self.reading.open()
            await self.listing.open()

    def outcome(self) -> frozenset[int] | None:
        """What became of the batch that was tried last, asked of a new connection (rule 4)."""
        with errors_translated(self.path):
            connection = self.write_connection or self.connect_writer()
            return self.left_out if queries.marker(connection) == self.batch else None

    async def change(self, work: Callable[[Connection], T]) -> T:
        """Do ``work`` in a transaction of its own, beside the batches."""

        def run(connection: Connection) -> T:
            self.note_written(rows=0, size=0)
            try:
                return transact(connection, work, self.path)
            except OutcomeUnknown as error:  # `settle` is for batches
                raise StoreFailed(error.message) from error

        return await self.write(run)

    async def reserve(self, count: int) -> int:
        """See `Store.reserve`; numbers that are lost with an unknown commit do no harm."""
        require_positive("count", count)

        def take(connection: Connection) -> int:
            after: int = connection.execute(RESERVE, (count,)).fetchone()[0]
            return after - count

        return await self.change(take)

    async def maintain(self) -> None:
        self.require_writable()
        if self.log is None or not self.log.may_be_due:
            await trio.lowlevel.checkpoint()
            return
        await self.write(partial(self.move_log, self.log))

    def move_log(self, log: LogKeeper, connection: Connection) -> None:
        with errors_translated(self.path):
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
        return await self.ask_at_length(queries.list_instances, where, order, page)

    async def count_instances(self, where: InstanceFilter) -> int:
        return await self.ask_at_length(queries.count_instances, where)

    async def list_records(
        self, row: int, kind: type[R], page: PageRequest, where: RecordFilter | None = None
    ) -> Page[R]:
        return await self.ask_at_length(queries.list_records, row, kind, page, where)

    async def count_records(self, row: int, kind: type[R], where: RecordFilter | None = None) -> int:
        return await self.ask_at_length(queries.count_records, row, kind, where)

    async def counts(self, tenant_id: str | None) -> dict[Status, int]:
        return await self.ask_at_length(queries.counts, tenant_id)

    async def unexplained(self, after_row: int, limit: int) -> list[InstanceRecord]:
        return await self.ask_at_length(queries.unexplained, after_row, limit)

    async def growth(self) -> Growth:
        def answer(connection: Connection) -> Growth:
            return Growth(
                file_bytes=file_size(self.path),
                log_bytes=file_size(self.log_path),
                rows=queries.rows_by_table(connection),
                oldest_finished_us=queries.oldest_finished(connection),
            )

        return await self.ask_at_length(answer)

    async def verify(self) -> list[str]:
        return await self.ask_at_length(find_damage)

    async def backup(self, path: str) -> int:
        """See `Store.backup`; closing or settling the store gives it up, with `StoreUnavailable`."""
        return await self.ask_at_length(copies.back_up, path, self.listing.is_stopped)

    # ------------------------------------------------------------ deleting

    async def terminal(
        self,
        status: Status,
        before_us: int,
        tenant_id: str | None,
        after: tuple[int, int] | None,
        limit: int,
    ) -> list[Finished]:
        return await self.ask_at_length(queries.terminal, status, before_us, tenant_id, after, limit)

    async def purge(self, rows: Sequence[int], most: int) -> Purged:
        require_positive("most", most)

        def work(connection: Connection) -> Purged:
            spending = Spending(most)
            gone = purge.purge(connection, rows, spending)
            self.note_written(purge.RECORDS_OF_AN_INSTANCE * len(gone) + spending.deleted, spending.size)
            return Purged(rows=gone, children_left=purge.is_left(connection, gone))

        return await self.change(work)

    async def sweep(self, most: int) -> bool:
        require_positive("most", most)

        def work(connection: Connection) -> bool:
            spending = Spending(most)
            more = purge.sweep(connection, spending)
            self.note_written(spending.deleted, spending.size)
            return more

        return await self.change(work)

    # ------------------------------------------------------------ notes

    async def note(self, name: str) -> str | None:
        return await self.ask(queries.note, name)

    async def notes(self, prefix: str) -> dict[str, str]:
        return await self.ask(queries.notes, prefix)

    async def set_note(self, name: str, text: str | None) -> None:
        await self.change(partial(writes.set_note, name=name, text=text))

    async def check(self) -> None:
        await self.ask(queries.marker)

    @property
    def log_path(self) -> str:
        return f"{os.path.realpath(self.path)}-wal"

    def statistics(self) -> StoreStatistics:
        self.require_open()
        self.require_open()
        return StoreStatistics(
            backend="sqlite",
            location=self.path,
            batches=self.batches,
            units=self.units,
            file_bytes=file_size(self.path),
            log_bytes=file_size(self.log_path),
        )


def file_size(path: str) -> int | None:
    try:
        return os.path.getsize(path)
    except OSError:
        return None


def require_positive(field: str, value: int) -> None:
    if value < 1:
        raise ValidationError(field, "must be at least 1")
