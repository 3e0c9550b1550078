"""One connection to PostgreSQL, driven by trio: no thread, no second event loop.

It stands on `psycopg.pq`, the documented wrapper of libpq, and on nothing private of psycopg.

Rules:

1. A *trip* sends some statements at once (libpq's pipeline mode), ends with one Sync, and reads all their
   answers. Without BEGIN among them they are one transaction of their own. After the first error the server
   skips the rest, so a COMMIT behind a statement that failed is not executed.
2. A connection does one trip at a time; its owner sees to that.
3. A trip that is cancelled is cancelled on the server, and its answers are read to their end, for at most
   `DRAIN_SECONDS`; where that fails, the connection is closed. Then the cancellation goes on. So after any
   trip the connection is either at rest or closed, never between two answers.
4. A trip that gets no answer within its seconds closes the connection at once: the server, or the way to it,
   is silent, and would be silent for a cancel request too.
5. Nothing is prepared by name, and nothing is set for the session: a pooler may give each transaction another
   server.
6. Errors are two: `ServerError`, the server's own words, after which the connection is at rest; and `Lost`.
   Of a server that refuses a new connection libpq tells the words, but not the SQLSTATE, so `Denied` is known
   by `DENIALS`. In another language than English it is a plain `Lost`.
"""

import contextlib
import re
import select
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Self

import attrs
import psycopg
import trio
from psycopg import pq
from psycopg.pq.abc import PGcancelConn, PGconn, PGresult

DRAIN_SECONDS: Final = 1.0
BINARY: Final = 1

POLL: Final = pq.PollingStatus
GOOD: Final = frozenset({pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK, pq.ExecStatus.EMPTY_QUERY})


class DriverError(Exception):
    """Base of what a connection raises."""


class Lost(DriverError):
    """The connection is gone; what became of the statements in flight is not known here."""


class Denied(Lost):
    """There is a server, and it does not let this user in, or knows no such database or user."""


class ServerError(DriverError):
    """The server refused a statement.

    Attributes:
        sqlstate: Five characters; see the appendix of PostgreSQL's manual.
        fatal: Whether the server ended the session with it.
    """

    def __init__(self, message: str, sqlstate: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate
        self.fatal = fatal


@attrs.frozen
class Statement:
    """SQL and its values, which are encoded already: see `runtara.persistence.postgres.values`."""

    sql: bytes
    values: tuple[bytes | None, ...] = ()
    types: tuple[int, ...] = ()
    """The type of each value, as PostgreSQL numbers them."""


Result = PGresult

DENIALS: Final = re.compile(
    "authentication failed|no password supplied|no pg_hba.conf entry|pg_hba.conf rejects"
    '|(role|database) ".*" does not exist|no such (user|database)|is not permitted to log in'
    "|permission denied for database"
)
"""What PostgreSQL and PgBouncer say when trying again does not help."""


async def wait_for(socket: int, status: int) -> None:
    """Wait until a connection in the making may be polled again."""
    if status == POLL.READING:
        await trio.lowlevel.wait_readable(socket)
    elif status == POLL.WRITING:
        await trio.lowlevel.wait_writable(socket)
    else:
        raise Lost(f"libpq said {status} while connecting")


def is_readable(socket: int) -> bool:
    """Whether something has arrived at ``socket``, or its other end is closed; does not wait."""
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return bool(poll.poll(0))


async def wait_for_both(socket: int) -> None:
    """Return when ``socket`` can be read or written, whichever is first."""
    async with trio.open_nursery() as nursery:

        async def first(wait: Callable[[int], Awaitable[None]]) -> None:
            await wait(socket)
            nursery.cancel_scope.cancel()

        nursery.start_soon(first, trio.lowlevel.wait_readable)
        nursery.start_soon(first, trio.lowlevel.wait_writable)


class Connection:
    """See the module's docstring."""

    def __init__(self, pgconn: PGconn) -> None:
        self.pgconn = pgconn

    @classmethod
    async def connect(cls, conninfo: bytes) -> Self:
        """Connect to one address; ``conninfo`` holds it as numbers, so that libpq has no name to look up.

        Raises:
            Denied: The server does not let us in; the message is libpq's.
            Lost: There is no server, or not now.

        Cancellation: Nothing is left behind.
        """
        try:
            pgconn = pq.PGconn.connect_start(conninfo)
        except psycopg.Error as error:
            raise Lost(str(error)) from error
        self = cls(pgconn)
        try:
            if pgconn.status == pq.ConnStatus.BAD:
                raise self.refusal()
            while (status := pgconn.connect_poll()) != POLL.OK:
                if status == POLL.FAILED:
                    raise self.refusal()
                await wait_for(pgconn.socket, status)
        except BaseException:
            self.close()
            raise
        pgconn.nonblocking = 1
        return self

    def refusal(self) -> Lost:
        """Why there is no connection."""
        words = self.trouble()
        return Denied(words) if DENIALS.search(words) else Lost(words)

    def trouble(self) -> str:
        """libpq's words for what went wrong last, in one line."""
        return " ".join(self.pgconn.get_error_message("utf-8").split())

    @property
    def closed(self) -> bool:
        return self.pgconn.status == pq.ConnStatus.BAD

    @property
    def at_rest(self) -> bool:
        """Whether it is open and in no transaction."""
        return self.pgconn.transaction_status == pq.TransactionStatus.IDLE

    def close(self) -> None:
        """Let go at once; again does nothing. An open transaction is rolled back by the server."""
        self.pgconn.finish()

    def look(self) -> bool:
        """Whether the connection at rest still stands, as far as can be seen without asking the server.

        A server that ends a session says so first, so what has arrived is read to its end.
        """
        try:
            while not self.closed and is_readable(self.pgconn.socket):
                self.pgconn.consume_input()
        except psycopg.Error:
            self.close()
        return not self.closed and self.at_rest

    # ------------------------------------------------------------ trips

    async def run(self, statements: Sequence[Statement], seconds: float) -> list[Result]:
        """One trip: the results of ``statements``, in order.

        Raises:
            ServerError: Of the first statement that failed.
            Lost: The connection broke, or there was no answer within ``seconds``; it is closed.

        Cancellation: See rule 3.
        """
        return await self.bounded(lambda: self.pipeline(statements), self.finish_pipeline, seconds)

    async def script(self, sql: str, seconds: float) -> None:
        """Run several statements, separated by semicolons and without values; raises as `run` does."""
        await self.bounded(lambda: self.simple(sql.encode()), self.finish_simple, seconds)

    async def bounded(
        self,
        trip: Callable[[], Awaitable[list[Result]]],
        finish: Callable[[], Awaitable[list[Result]]],
        seconds: float,
    ) -> list[Result]:
        results: list[Result] = []
        try:
            with trio.move_on_after(seconds) as patience:
                results = await trip()
        except psycopg.Error as error:
            self.close()
            raise Lost(" ".join(str(error).split())) from error
        except trio.Cancelled:
            await self.cancel_trip(finish)
            raise
        except BaseException:
            self.close()
            raise
        if patience.cancelled_caught:
            self.close()
            raise Lost(f"no answer within {seconds:g} s")
        self.raise_error(results)
        return results

    async def pipeline(self, statements: Sequence[Statement]) -> list[Result]:
        pgconn = self.pgconn
        pgconn.enter_pipeline_mode()
        for statement in statements:
            pgconn.send_query_params(
                statement.sql,
                statement.values or None,
                param_types=statement.types or None,
                param_formats=(BINARY,) * len(statement.values) or None,
                result_format=BINARY,
            )
        pgconn.pipeline_sync()
        await self.send()
        return await self.finish_pipeline()

    async def finish_pipeline(self) -> list[Result]:
        """Read up to the Sync that ends the trip."""
        results: list[Result] = []
        while True:
            found = await self.receive()
            if found is None:
                if self.closed:
                    break
                continue  # the end of one statement
            if found.status == pq.ExecStatus.PIPELINE_SYNC:
                self.pgconn.exit_pipeline_mode()
                break
            results.append(found)
        return results

    async def simple(self, sql: bytes) -> list[Result]:
        self.pgconn.send_query(sql)
        await self.send()
        return await self.finish_simple()

    async def finish_simple(self) -> list[Result]:
        results: list[Result] = []
        while (found := await self.receive()) is not None:
            results.append(found)
        return results

    async def send(self) -> None:
        """Hand everything to the kernel; what the server says meanwhile is read, or both would block."""
        while self.pgconn.flush():
            await wait_for_both(self.pgconn.socket)
            self.pgconn.consume_input()

    async def receive(self) -> Result | None:
        """The next result; None between the results of two statements, or when the connection is gone."""
        while self.pgconn.is_busy():
            await trio.lowlevel.wait_readable(self.pgconn.socket)
            self.pgconn.consume_input()
        return self.pgconn.get_result()

    def raise_error(self, results: Sequence[Result]) -> None:
        """Raise what the server said against a statement, or that it is gone."""
        lost = Lost(self.trouble() or "the connection was closed") if self.closed else None
        if lost is not None:
            self.close()
        for result in results:
            if result.status in GOOD or result.status == pq.ExecStatus.PIPELINE_ABORTED:
                continue
            if result.error_field(pq.DiagnosticField.SQLSTATE) is not None:
                raise server_error(result)
        if lost is not None:
            raise lost

    # ------------------------------------------------------------ cancelling

    async def cancel_trip(self, finish: Callable[[], Awaitable[list[Result]]]) -> None:
        """Bring a trip in flight to its end, or close the connection (rule 3)."""
        rest = False
        with trio.move_on_after(DRAIN_SECONDS, shield=True), contextlib.suppress(psycopg.Error, Lost):
            if not self.closed:
                await self.send()
                await self.ask_to_cancel()
                await finish()
                rest = not self.closed
        if not rest:
            self.close()

    async def ask_to_cancel(self) -> None:
        """Ask the server, over a connection of its own, to cancel what runs here."""
        cancel: PGcancelConn = self.pgconn.cancel_conn()
        try:
            cancel.start()
            while (status := cancel.poll()) != POLL.OK:
                await wait_for(cancel.socket, status)
        finally:
            cancel.finish()


def server_error(result: Result) -> ServerError:
    """The error that a result stands for."""

    def field(name: pq.DiagnosticField) -> str:
        return (result.error_field(name) or b"").decode("utf-8", "replace")

    said = " ".join(field(pq.DiagnosticField.MESSAGE_PRIMARY).split())
    detail = " ".join(field(pq.DiagnosticField.MESSAGE_DETAIL).split())
    severity = field(pq.DiagnosticField.SEVERITY_NONLOCALIZED)
    return ServerError(
        f"{said}: {detail}" if detail else said or result.get_error_message("utf-8"),
        field(pq.DiagnosticField.SQLSTATE),
        fatal=severity in ("FATAL", "PANIC"),
    )
