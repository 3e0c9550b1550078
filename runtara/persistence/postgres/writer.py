"""The one connection that writes.

Rules:

1. One transaction at a time, on one connection. It begins with the lease (see `lease`), carries the number
   of its batch into the lease's row, and ends with COMMIT.
2. Before COMMIT is on its way, any error and any cancellation rolls back: nothing was written. From then on
   no cancellation reaches the connection, and a lost answer is *unknown*.
3. Conflicts with other transactions are tried again here, up to `TRIES` times, after a random moment.
4. When the connection was lost, the server's process at its other end may still hold the lease's row, or
   may be committing. The next connection ends that process first, and `Writer.last_batch` waits for the
   row's lock; so its answer is final.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import attrs
import trio

from runtara.errors import LeaseLost, OutcomeUnknown, StoreFailed, StoreUnavailable
from runtara.persistence.postgres import schema as layout
from runtara.persistence.postgres.address import Connector
from runtara.persistence.postgres.driver import Connection, DriverError, Lost, Result, Statement
from runtara.persistence.postgres.faults import commit_unknown, is_read_only, is_unknown, may_try_again
from runtara.persistence.postgres.lease import LOOK, Lease, holder, living
from runtara.persistence.postgres.statements import (
    BEGIN,
    COMMIT,
    FOR_WRITING,
    ROLLBACK,
    identifier,
    settings,
    statement,
)
from runtara.persistence.postgres.values import rows
from runtara.persistence.postgres.writes import Writing
from runtara.randomness import Randomness

logger = logging.getLogger("runtara.persistence.postgres")

TRIES: Final = 8
LONGEST_PAUSE: Final = 0.1
CLOSE_SECONDS: Final = 2.0
END_PROCESS: Final = (
    "SELECT pg_terminate_backend(pid::integer, 2000) FROM pg_stat_activity"
    " WHERE pid = $1 AND application_name = $2"
)


def timeouts(seconds: float) -> dict[str, str]:
    """The server's own bounds on a transaction whose client waits ``seconds`` for each answer."""
    whole = max(10, round(seconds * 1000))
    return {
        "statement_timeout": str(whole * 8 // 10),  # the server's word comes before our patience ends
        "lock_timeout": str(whole // 3),
        "idle_in_transaction_session_timeout": str(whole),
    }


def seconds_until(give_up: float) -> float:
    """Seconds that are left, never none at all."""
    return max(0.001, give_up - trio.current_time())


@attrs.define(kw_only=True, eq=False)
class Writer:
    """See the module's docstring."""

    connector: Connector
    lease: Lease
    location: str
    answer_seconds: float
    randomness: Randomness
    turn: trio.Lock = attrs.Factory(trio.Lock)
    connection: Connection | None = None
    settings: Statement = attrs.field(init=False)
    commit_level: str = "on"
    process: int | None = None
    """Pid of the server's process that last ran a transaction of ours (rule 4)."""
    renewed: float = 0.0
    """When the lease was last renewed, as trio's clock has it."""

    def __attrs_post_init__(self) -> None:
        self.settings = settings(self.settings_of_a_transaction())

    def settings_of_a_transaction(self) -> Mapping[str, str]:
        return {
            "synchronous_commit": self.commit_level,
            "search_path": identifier(self.connector.address.schema),
            **timeouts(self.answer_seconds),
            **FOR_WRITING,
        }

    # ------------------------------------------------------------ the connection

    async def ready(self, give_up: float) -> Connection:
        """The connection, at rest; a new one if there is none, unless ``give_up`` comes first."""
        if self.connection is not None and not self.connection.look():
            self.drop()
        if self.connection is None:
            try:
                with trio.fail_at(give_up):
                    self.connection = await self.connector.connect()
            except trio.TooSlowError:
                raise Lost(f"no connection within {self.answer_seconds:g} s") from None
            await self.end_process(self.connection)
        return self.connection

    async def end_process(self, connection: Connection) -> None:
        """End what the lost connection left on the server (rule 4)."""
        if self.process is None:
            return
        sql = statement(END_PROCESS, self.process, self.connector.application)
        try:
            await connection.run([sql], self.answer_seconds)
            self.process = None
        except Lost:
            self.drop()
            raise
        except DriverError as error:
            logger.info("%s: the server's process %s was not ended: %s", self.location, self.process, error)

    def drop(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    async def roll_back(self, connection: Connection, error: BaseException) -> None:
        """After ``error``, bring the connection to rest, or close it. Shielded, and bounded.

        After a failover the next connection may lead to the new primary, so one that only reads is let go.
        """
        if not connection.closed and not connection.at_rest:
            with trio.CancelScope(shield=True):
                try:
                    await connection.run([ROLLBACK], min(CLOSE_SECONDS, self.answer_seconds))
                except DriverError:
                    connection.close()
        if connection.closed or is_read_only(error):
            self.drop()

    # ------------------------------------------------------------ opening and closing

    async def open(self) -> int:
        """Bring the schema up and take the lease; returns the number of the newest batch.

        Raises:
            StoreLocked, StoreCorrupt, StoreTooNew, StoreFailed: See `open_postgres`.
        """
        connection = await self.ready(trio.current_time() + self.answer_seconds)
        try:
            [answer] = await connection.run([layout.SERVER], self.answer_seconds)
            self.commit_level = layout.check_server(rows(answer)[0], self.location)
            self.settings = settings(self.settings_of_a_transaction())
            await connection.run([BEGIN, self.settings], self.answer_seconds)
            await layout.bring_up(
                connection, self.connector.address.schema, self.location, self.answer_seconds
            )
            [found] = await connection.run([LOOK], self.answer_seconds)
            current = holder(rows(found)[0])
            current.require_replaceable(self.location)
            if current.owner is not None:
                logger.warning(
                    "%s: taken over from process %s on %s", self.location, current.pid, current.host
                )
            living.add(self.lease.token)
            with trio.CancelScope(shield=True):
                await connection.run([self.lease.take(current), COMMIT], self.answer_seconds)
        except BaseException as error:
            await self.roll_back(connection, error)
            raise
        self.renewed = trio.current_time()
        return current.batch

    async def close(self) -> None:
        """Give the lease up, if the server answers soon, and close. Shielded."""
        with trio.CancelScope(shield=True):
            with contextlib.suppress(DriverError), trio.move_on_after(CLOSE_SECONDS):
                async with self.turn:
                    if self.lease.token in living and self.connection is not None and self.connection.look():
                        give_up = [BEGIN, self.settings, self.lease.give_up(), COMMIT]
                        await self.connection.run(give_up, CLOSE_SECONDS)
            self.drop()
            living.discard(self.lease.token)

    # ------------------------------------------------------------ transactions

    async def write(
        self,
        batch: int | None,
        questions: Sequence[Statement],
        then: Callable[[Sequence[Result]], list[Writing]],
    ) -> list[Result]:
        """One transaction: the lease, ``questions``, and what ``then`` makes of their answers; committed.

        Args:
            batch: The number that is committed with it; None leaves the one that is there.
            questions: What must be known first.
            then: The statements to run, given the answers. It may raise; that rolls back.

        Returns:
            The answers to the statements of ``then``.

        Raises:
            DriverError: Nothing was written.
            OutcomeUnknown: See rule 2.
            LeaseLost: Nothing was written, nor ever will be.
            StoreFailed: The server does not do what was promised.

        Cancellation: Nothing was written, or all of it was and this returns.
        """
        async with self.turn:
            give_up = trio.current_time() + self.answer_seconds
            for left in reversed(range(TRIES)):
                kept = self.connection is not None
                try:
                    return await self.try_once(batch, questions, then, give_up)
                except DriverError as error:
                    stale = kept and is_unknown(error)  # it was lost while nobody looked
                    if left == 0 or trio.current_time() >= give_up or not (stale or may_try_again(error)):
                        raise
                await trio.sleep(LONGEST_PAUSE * self.randomness.fraction())
        raise AssertionError("the last try returns or raises")

    async def try_once(
        self,
        batch: int | None,
        questions: Sequence[Statement],
        then: Callable[[Sequence[Result]], list[Writing]],
        give_up: float,
    ) -> list[Result]:
        connection = await self.ready(give_up)
        try:
            begin = [BEGIN, self.settings, self.lease.renew(batch)]
            left = seconds_until(give_up)
            _, granted, renewed, *answers = await connection.run([*begin, *questions], left)
            self.require_lease(granted, renewed)
            writings = then(answers)
            statements = [writing.statement for writing in writings]
            if all(writing.wanted is None for writing in writings):
                return (await self.commit(connection, [*statements, COMMIT]))[:-1]
            results = await connection.run(statements, self.answer_seconds)
            for writing, result in zip(writings, results, strict=True):
                writing.check(result)
            await self.commit(connection, [COMMIT])
            return results
        except BaseException as error:
            await self.roll_back(connection, error)
            raise

    def require_lease(self, granted: Result, renewed: Result) -> None:
        """The settings were taken as they were given, and the lease is ours."""
        level = rows(granted)[0][0]
        if level != self.commit_level:
            raise StoreFailed(f"{self.location}: synchronous_commit is {level!r}, not {self.commit_level}")
        found = rows(renewed)
        if not found:
            raise self.lease_lost()
        process = found[0][0]
        assert isinstance(process, int)
        self.process = process
        self.renewed = trio.current_time()

    def lease_lost(self) -> LeaseLost:
        return LeaseLost(f"{self.location}: another runtime has taken over; this one must stop")

    async def commit(self, connection: Connection, statements: Sequence[Statement]) -> list[Result]:
        """Run ``statements``, of which the last is COMMIT (rule 2)."""
        try:
            with trio.CancelScope(shield=True):
                results = await connection.run(statements, self.answer_seconds)
        except DriverError as error:
            if is_unknown(error):
                raise commit_unknown(error, self.location) from error
            raise
        if results[-1].command_status != b"COMMIT":
            raise StoreUnavailable(f"{self.location}: the server rolled the transaction back")
        return results

    async def last_batch(self) -> int:
        """The number of the newest batch that is committed; final (rule 4).

        Raises:
            DriverError: The server did not tell.
            LeaseLost: And the answer with it.
        """
        async with self.turn:
            connection = await self.ready(trio.current_time() + self.answer_seconds)
            try:
                asked = [BEGIN, self.settings, self.lease.last_batch(), ROLLBACK]
                results = await connection.run(asked, self.answer_seconds)
            except BaseException as error:
                await self.roll_back(connection, error)
                raise
        found = rows(results[2])
        if not found:
            raise self.lease_lost()
        number = found[0][0]
        assert isinstance(number, int)
        return number

    # ------------------------------------------------------------ the lease

    async def keep_lease(self, on_loss: Callable[[StoreFailed], None]) -> None:
        """Renew the lease while nothing is written; ends when it is lost."""
        pause = self.lease.seconds / 3
        while True:
            await trio.sleep(max(0.0, self.renewed + pause - trio.current_time()))
            if trio.current_time() < self.renewed + pause:
                continue
            try:
                await self.write(None, (), lambda answers: [])
            except StoreFailed as error:
                on_loss(error)
                return
            except (DriverError, OutcomeUnknown, StoreUnavailable) as error:
                logger.warning("%s: the lease was not renewed: %s", self.location, error)
                await trio.sleep(min(1.0, pause / 4))
