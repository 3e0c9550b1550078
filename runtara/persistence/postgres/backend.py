"""The store on PostgreSQL.

Rules:

1. One connection writes, under a lease that keeps a second runtime off the schema (`lease`, `writer`); a
   small pool reads (`readers`). Everything runs on the trio loop: there is no thread.
2. Each batch carries a number into the lease's row, in its own transaction. `PostgresStore.settle` reads
   it back, so its answer is exact.
3. Between a commit whose outcome is unknown and its settling, no batch is written. When the lease is lost,
   nothing is written any more.
4. A lost connection is no damage: the caller gets `StoreUnavailable`, and the next call connects again.
5. Opened for reading only, it takes no lease and makes no connection to write with: another runtime may be
   at work on the schema.
"""

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final, ParamSpec, TypeVar

import attrs
import trio

from runtara.errors import (
    OutcomeUnknown,
    RuntimeClosed,
    StoreDenied,
    StoreFailed,
    StoreNotFound,
    StoreReadOnly,
    StoreUnavailable,
    ValidationError,
)
from runtara.persistence.chains import heads_of
from runtara.persistence.postgres import purge, queries, writes
from runtara.persistence.postgres import schema as layout
from runtara.persistence.postgres.address import Connector, parse_address
from runtara.persistence.postgres.damage import find_damage
from runtara.persistence.postgres.driver import Denied, Result, Statement
from runtara.persistence.postgres.faults import store_error
from runtara.persistence.postgres.growth import growth
from runtara.persistence.postgres.lease import Lease
from runtara.persistence.postgres.queries import Question
from runtara.persistence.postgres.readers import Readers
from runtara.persistence.postgres.statements import statement
from runtara.persistence.postgres.values import rows as rows_of
from runtara.persistence.postgres.writer import Writer
from runtara.persistence.postgres.writes import Writing
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
from runtara.randomness import Randomness, SystemRandomness
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

logger = logging.getLogger("runtara.persistence.postgres")

P = ParamSpec("P")
T = TypeVar("T")

READERS: Final = 4
LEASE_SECONDS: Final = 20.0
ANSWER_SECONDS: Final = 10.0

RESERVE: Final = "UPDATE meta SET next_number = next_number + $1 WHERE one = 1 RETURNING next_number"
SET_NOTE: Final = (
    "INSERT INTO notes (name, text) VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET text = excluded.text"
)
REMOVE_NOTE: Final = "DELETE FROM notes WHERE name = $1"


@asynccontextmanager
async def open_postgres(
    url: str,
    *,
    schema: str | None = None,
    readers: int = READERS,
    lease_seconds: float = LEASE_SECONDS,
    answer_seconds: float = ANSWER_SECONDS,
    randomness: Randomness | None = None,
    read_only: bool = False,
) -> AsyncIterator["PostgresStore"]:
    """Open the store in a schema of a PostgreSQL database; the schema is made if there is none.

    Args:
        url: As libpq has it, with ``schema`` as one parameter more.
        schema: Wins over the url's; ``runtara`` if neither says.
        readers: Connections for reading, at most. One more writes.
        lease_seconds: How long a runtime that is cut off keeps others off the schema.
        answer_seconds: How long a call waits for the server; shorter than the lease.
        randomness: Where the lease's token and the jitter of retries come from.
        read_only: Take no lease, write nothing: another runtime may be using the schema.

    Raises:
        ValidationError: An argument is ill formed.
        StoreLocked: Another runtime holds the schema; the message names its process and host.
        StoreTooNew, StoreCorrupt: The schema is not one of this program's; it was not touched.
        StoreUnavailable: There is no server, or it does not answer.
        StoreDenied: The password is wrong, or there is no such user or database; trying again is no use.
        StoreReadOnly: The server does not let this user write.
        StoreNotFound, StoreTooOld: (``read_only``) There is no schema, or one of an older version.
        StoreFailed: The server has a setting that the promises cannot stand on.

    Cancellation: The lease is given up all the same, if the server answers within two seconds.
    """
    if not 0 < answer_seconds < lease_seconds:
        raise ValidationError("answer_seconds", "must be above 0 and below lease_seconds")
    if type(readers) is not int or readers < 1:
        raise ValidationError("readers", "must be a whole number from 1")
    random = randomness or SystemRandomness()
    address = parse_address(url, schema)
    token = random.identifier()
    connector = Connector(address, f"runtara {token[:12]}", random)
    writer = Writer(
        connector=connector,
        lease=Lease(token=token, seconds=lease_seconds),
        location=address.location,
        answer_seconds=answer_seconds,
        randomness=random,
    )
    store = PostgresStore(
        location=address.location,
        writer=writer,
        readers=Readers(
            connector=Connector(address, connector.application, random),
            size=readers,
            answer_seconds=answer_seconds,
        ),
        read_only=read_only,
    )
    failure: Exception | None = None
    try:
        await store.open()
        async with trio.open_nursery() as nursery:
            if not read_only:
                nursery.start_soon(writer.keep_lease, store.fail)
            try:
                yield store
            except Exception as error:  # so that it leaves as it is, and not in a group
                failure = error
            nursery.cancel_scope.cancel()
    finally:
        await store.close()
    if failure is not None:
        raise failure


@attrs.define(kw_only=True, eq=False)
class PostgresStore:
    """A `Store` in one schema of PostgreSQL. Made by `open_postgres`."""

    location: str
    writer: Writer
    readers: Readers
    read_only: bool
    batch: int = 0
    """Number of the batch that was tried last (rule 2)."""
    left_out: frozenset[int] = frozenset()
    """What that batch leaves out by its guards."""
    unsettled: bool = False
    """Rule 3."""
    failure: StoreFailed | None = None
    """Rule 3."""
    closed: bool = False
    batches: int = 0
    units: int = 0

    # ------------------------------------------------------------ opening and closing

    async def open(self) -> None:
        with self.errors_translated():
            try:
                if self.read_only:
                    await self.require_current()
                else:
                    self.batch = await self.writer.open()
            except Denied as error:
                raise StoreDenied(f"{self.location}: {error}") from error

    async def require_current(self) -> None:
        """The schema is there, ours, and of this program's version."""
        schema = self.readers.connector.address.schema
        if not layout.require_ours(await self.readers.ask(queries.tables(schema)), self.location):
            raise StoreNotFound(f"there is no {self.location}")
        layout.check_current(await self.readers.ask(queries.version()), self.location)

    async def close(self) -> None:
        """Give up the lease and close the connections. A commit that was begun ends first."""
        if self.closed:
            await trio.lowlevel.checkpoint()
            return
        self.closed = True
        self.readers.close()
        await self.writer.close()

    def fail(self, error: StoreFailed) -> None:
        """Nothing is written any more."""
        if self.failure is None:
            self.failure = error
            logger.critical("%s", error)

    # ------------------------------------------------------------ the doors

    @contextmanager
    def errors_translated(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            known = store_error(error, self.location)
            if known is None:
                raise
            raise known from error

    def require_open(self) -> None:
        if self.closed:
            raise RuntimeClosed(f"{self.location} was closed")

    def require_writer(self) -> None:
        self.require_open()
        if self.read_only:
            raise StoreReadOnly(f"{self.location} was opened for reading only")

    def require_writable(self) -> None:
        self.require_writer()
        if self.failure is not None:
            raise type(self.failure)(self.failure.message)
        if self.unsettled:
            raise StoreUnavailable(f"{self.location}: the last commit is not settled yet")

    async def ask(self, make: Callable[P, Question[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """The answer to the question that ``make`` makes."""
        self.require_open()
        with self.errors_translated():
            return await self.readers.ask(make(*args, **kwargs))

    @contextmanager
    def damage_noted(self) -> Iterator[None]:
        """Errors of a write, translated; after some of them no write may follow."""
        try:
            with self.errors_translated():
                yield
        except StoreFailed as error:
            self.fail(error)
            raise

    # ------------------------------------------------------------ writing

    async def apply(self, batch: Sequence[Unit]) -> frozenset[int]:
        self.require_writable()
        if not batch:
            await trio.lowlevel.checkpoint()
            return frozenset()
        heads = heads_of(batch)
        self.batch += 1

        def work(answers: Sequence[Result]) -> list[Writing]:
            self.left_out = writes.left_out(heads, answers[0])
            return writes.writings(batch, heads, self.left_out)

        with self.damage_noted():
            try:
                await self.writer.write(self.batch, [writes.guards(heads)], work)
            except OutcomeUnknown:
                self.unsettled = True
                raise
        self.batches += 1
        self.units += len(batch)
        return self.left_out

    async def settle(self) -> frozenset[int] | None:
        self.require_writer()
        with self.damage_noted():
            newest = await self.writer.last_batch()
        self.unsettled = False
        return self.left_out if newest == self.batch else None

    async def change(
        self, questions: Sequence[Statement], then: Callable[[Sequence[Result]], list[Statement]]
    ) -> list[Result]:
        """One transaction beside the batches: ``questions``, and what ``then`` makes of their answers.

        Returns:
            The answers to what ``then`` made.

        Raises:
            StoreUnavailable: Also when the answer to COMMIT was lost; done again it does no harm.
        """
        self.require_writable()

        def work(answers: Sequence[Result]) -> list[Writing]:
            return [Writing(statement) for statement in then(answers)]

        with self.damage_noted():
            try:
                return await self.writer.write(None, questions, work)
            except OutcomeUnknown as error:  # `settle` is for batches
                raise StoreUnavailable(error.message) from error

    async def reserve(self, count: int) -> int:
        require_positive("count", count)
        [answer] = await self.change((), lambda answers: [statement(RESERVE, count)])
        return number_in(answer) - count

    async def maintain(self) -> None:
        """PostgreSQL keeps house by itself."""
        self.require_writable()
        await trio.lowlevel.checkpoint()

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
        self, row: int, kind: type[R], page: PageRequest, where: RecordFilter | None = None
    ) -> Page[R]:
        return await self.ask(queries.list_records, row, kind, page, where)

    async def count_records(self, row: int, kind: type[R], where: RecordFilter | None = None) -> int:
        return await self.ask(queries.count_records, row, kind, where)

    async def counts(self, tenant_id: str | None) -> dict[Status, int]:
        return await self.ask(queries.counts, tenant_id)

    async def unexplained(self, after_row: int, limit: int) -> list[InstanceRecord]:
        return await self.ask(queries.unexplained, after_row, limit)

    async def growth(self) -> Growth:
        return await self.ask(growth)

    async def verify(self) -> list[str]:
        """See `Store.verify`; with the extension ``amcheck``, the server checks its files and indexes too."""
        self.require_open()
        with self.errors_translated():
            return await find_damage(self.readers.ask)

    async def backup(self, path: str) -> int:
        self.require_open()
        await trio.lowlevel.checkpoint()
        raise ValidationError(
            "path", "a store on PostgreSQL is backed up with pg_dump, or copied with `runtara export`"
        )

    # ------------------------------------------------------------ deleting

    async def terminal(
        self,
        status: Status,
        before_us: int,
        tenant_id: str | None,
        after: tuple[int, int] | None,
        limit: int,
    ) -> list[Finished]:
        return await self.ask(queries.terminal, status, before_us, tenant_id, after, limit)

    async def purge(self, rows: Sequence[int], most: int) -> Purged:
        require_positive("most", most)
        gone: list[int] = []

        def work(answers: Sequence[Result]) -> list[Statement]:
            gone[:] = numbers_in(answers[0])
            return [*purge.delete_history_of(gone, most), purge.left_of(gone)]

        *_, left = await self.change([purge.remove(rows)], work)
        return Purged(rows=frozenset(gone), children_left=number_in(left) > 0)

    async def sweep(self, most: int) -> bool:
        require_positive("most", most)

        def work(answers: Sequence[Result]) -> list[Statement]:
            return [*purge.delete_history_of(numbers_in(answers[0]), most), purge.left()]

        *_, left = await self.change([purge.unswept()], work)
        return number_in(left) > 0

    # ------------------------------------------------------------ notes

    async def note(self, name: str) -> str | None:
        return await self.ask(queries.note, name)

    async def notes(self, prefix: str) -> dict[str, str]:
        return await self.ask(queries.notes, prefix)

    async def set_note(self, name: str, text: str | None) -> None:
        def work(answers: Sequence[Result]) -> list[Statement]:
            return [statement(REMOVE_NOTE, name) if text is None else statement(SET_NOTE, name, text)]

        await self.change((), work)

    async def check(self) -> None:
        await self.ask(queries.alive)

    def statistics(self) -> StoreStatistics:
        self.require_open()
        return StoreStatistics(
            backend="postgresql",
            location=self.location,
            batches=self.batches,
            units=self.units,
            file_bytes=None,
            log_bytes=None,
        )


def require_positive(field: str, value: int) -> None:
    if value < 1:
        raise ValidationError(field, "must be at least 1")


def numbers_in(answer: Result) -> list[int]:
    """The one column of an answer."""
    return [number for (number,) in rows_of(answer) if isinstance(number, int)]


def number_in(answer: Result) -> int:
    [number] = numbers_in(answer)
    return number
