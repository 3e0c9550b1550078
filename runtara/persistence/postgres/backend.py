"""The store on PostgreSQL.

Rules:

1. One connection writes, under a lease that keeps a second runtime off the schema (`lease`, `writer`); a
   small pool reads (`readers`). Everything runs on the trio loop: there is no thread.
2. Each batch carries a number into the lease's row, in its own transaction. `PostgresStore.settle` reads
   it back, so its answer is exact.
3. Between a commit whose outcome is unknown and its settling, nothing is written. When the lease is lost,
   nothing is written any more.
4. A lost connection is no damage: the caller gets `StoreUnavailable`, and the next call connects again.
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
    StoreFailed,
    StoreUnavailable,
    ValidationError,
)
from runtara.persistence.postgres import queries, writes
from runtara.persistence.postgres.address import Connector, parse_address
from runtara.persistence.postgres.driver import Result
from runtara.persistence.postgres.faults import store_error
from runtara.persistence.postgres.lease import Lease
from runtara.persistence.postgres.queries import Question
from runtara.persistence.postgres.readers import Readers
from runtara.persistence.postgres.statements import statement
from runtara.persistence.postgres.values import rows
from runtara.persistence.postgres.writer import Writer
from runtara.persistence.postgres.writes import Writing
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
from runtara.randomness import Randomness, SystemRandomness
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

logger = logging.getLogger("runtara.persistence.postgres")

P = ParamSpec("P")
T = TypeVar("T")

READERS: Final = 4
LEASE_SECONDS: Final = 20.0
ANSWER_SECONDS: Final = 10.0
SETTLE_SECONDS: Final = 60.0
SETTLE_PAUSE: Final = 0.2

RESERVE: Final = "UPDATE meta SET next_number = next_number + $1 WHERE one = 1 RETURNING next_number"


@asynccontextmanager
async def open_postgres(
    url: str,
    *,
    schema: str | None = None,
    readers: int = READERS,
    lease_seconds: float = LEASE_SECONDS,
    answer_seconds: float = ANSWER_SECONDS,
    settle_seconds: float = SETTLE_SECONDS,
    randomness: Randomness | None = None,
) -> AsyncIterator["PostgresStore"]:
    """Open the store in a schema of a PostgreSQL database; the schema is made if there is none.

    Args:
        url: As libpq has it, with ``schema`` as one parameter more.
        schema: Wins over the url's; ``runtara`` if neither says.
        readers: Connections for reading, at most. One more writes.
        lease_seconds: How long a runtime that is cut off keeps others off the schema.
        answer_seconds: How long a call waits for the server; shorter than the lease.
        settle_seconds: How long `PostgresStore.settle` goes on asking what became of a commit.
        randomness: Where the lease's token and the jitter of retries come from.

    Raises:
        ValidationError: An argument is ill formed.
        StoreLocked: Another runtime holds the schema; the message names its process and host.
        StoreTooNew, StoreCorrupt: The schema is not one of this program's; it was not touched.
        StoreUnavailable: There is no server, or it does not answer.
        StoreReadOnly: The server does not let this user in or write.
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
        settle_seconds=settle_seconds,
    )
    failure: Exception | None = None
    try:
        await store.open()
        async with trio.open_nursery() as nursery:
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
    settle_seconds: float
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
            self.batch = await self.writer.open()

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

    def require_writable(self) -> None:
        self.require_open()
        if self.failure is not None:
            raise StoreFailed(self.failure.message)
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
        heads = writes.heads_of(batch)
        self.batch += 1

        def work(answers: Sequence[Result]) -> list[Writing]:
            self.left_out = writes.guards_that_fail(heads, answers[0])
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
        """See `Store.settle`. Asks again, over new connections, for ``settle_seconds``."""
        self.require_open()
        give_up = trio.current_time() + self.settle_seconds
        while True:
            try:
                with self.damage_noted():
                    newest = await self.writer.last_batch()
            except StoreUnavailable:
                if trio.current_time() >= give_up:
                    raise
                await trio.sleep(self.writer.randomness.fraction() * SETTLE_PAUSE)
                continue
            self.unsettled = False
            return self.left_out if newest == self.batch else None

    async def reserve(self, count: int) -> int:
        if count < 1:
            raise ValidationError("count", "must be at least 1")
        self.require_writable()
        with self.damage_noted():
            try:
                [answer] = await self.writer.write(
                    None, (), lambda answers: [Writing(statement(RESERVE, count))]
                )
            except OutcomeUnknown as error:  # numbers that may be lost do no harm; `settle` is for batches
                raise StoreUnavailable(error.message) from error
        after = rows(answer)[0][0]
        assert isinstance(after, int)
        return after - count

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
        self, row: int, kind: type[R], page: PageRequest, where: EventFilter | None = None
    ) -> Page[R]:
        return await self.ask(queries.list_records, row, kind, page, where)

    async def count_records(self, row: int, kind: type[R], where: EventFilter | None = None) -> int:
        return await self.ask(queries.count_records, row, kind, where)

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
