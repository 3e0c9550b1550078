"""The connections that read: a small, bounded pool.

Rules:

1. At most ``size`` questions are asked at once; the others wait for their turn, until their deadline.
2. A question has one deadline for everything: its turn, a new connection, and the answer. Its turn must come
   as soon as that of any other.
3. A connection goes back only if it is at rest; whatever happened, the place of its question is free again.
4. A question is a read, so it is asked again once when the connection that was kept turns out to be lost.
"""

from collections.abc import Sequence
from typing import TypeVar

import attrs
import trio

from runtara.persistence.postgres.address import Connector
from runtara.persistence.postgres.driver import Connection, DriverError, Lost, Result, Statement
from runtara.persistence.postgres.queries import Question
from runtara.persistence.postgres.statements import BEGIN_SNAPSHOT, COMMIT, ROLLBACK, identifier, settings
from runtara.persistence.postgres.writer import seconds_until, timeouts

T = TypeVar("T")

BEGIN_READING = Statement(b"BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY")
ROLLBACK_SECONDS = 1.0


@attrs.define(kw_only=True, eq=False)
class Readers:
    """See the module's docstring."""

    connector: Connector
    size: int
    answer_seconds: float
    idle: list[Connection] = attrs.Factory(list)
    """At rest; the last one is the next to be used."""
    places: trio.Semaphore = attrs.field(init=False)
    settings: Statement = attrs.field(init=False)
    closed: bool = False

    def __attrs_post_init__(self) -> None:
        self.places = trio.Semaphore(self.size, max_value=self.size)
        self.settings = self.settings_for(self.answer_seconds)

    def settings_for(self, seconds: float) -> Statement:
        """Of a transaction whose answer may take so long."""
        path = {"search_path": identifier(self.connector.address.schema)}
        return settings({**path, **timeouts(seconds)})

    async def ask(self, question: Question[T]) -> T:
        """The answer to ``question``.

        Raises:
            DriverError: There is none; `Lost` also when no place was free in time.

        Cancellation: The question is cancelled on the server.
        """
        give_up = trio.current_time() + self.answer_seconds
        with trio.move_on_at(give_up) as patience:
            await self.places.acquire()
        if patience.cancelled_caught:
            raise Lost(f"all {self.size} readers were busy for {self.answer_seconds:g} s")
        if question.seconds is not None:
            give_up = trio.current_time() + question.seconds
        try:
            return question.answer(await self.results(question, give_up))
        finally:
            self.places.release()

    async def results(self, question: Question[T], give_up: float) -> Sequence[Result]:
        kept = self.take_idle()
        if kept is not None:
            try:
                return await self.ask_over(kept, question, give_up)
            except Lost:
                if trio.current_time() >= give_up:
                    raise
        return await self.ask_over(await self.connect(give_up), question, give_up)

    def take_idle(self) -> Connection | None:
        while self.idle:
            connection = self.idle.pop()
            if connection.look():
                return connection
            connection.close()
        return None

    async def connect(self, give_up: float) -> Connection:
        try:
            with trio.fail_at(give_up):
                return await self.connector.connect()
        except trio.TooSlowError:
            raise Lost(f"no connection within {self.answer_seconds:g} s") from None

    async def ask_over(
        self, connection: Connection, question: Question[T], give_up: float
    ) -> Sequence[Result]:
        begin = BEGIN_SNAPSHOT if question.consistent else BEGIN_READING
        bounds = self.settings if question.seconds is None else self.settings_for(question.seconds)
        trip = [begin, bounds, *question.statements, COMMIT]
        try:
            results = await connection.run(trip, seconds_until(give_up))
            return results[2:-1]
        finally:
            await self.give_back(connection)

    async def give_back(self, connection: Connection) -> None:
        """Keep the connection if it can be used again (rule 3). Shielded, and bounded."""
        if not connection.closed and not connection.at_rest:
            with trio.CancelScope(shield=True):
                try:
                    await connection.run([ROLLBACK], ROLLBACK_SECONDS)
                except DriverError:
                    connection.close()
        if connection.closed or self.closed:
            connection.close()
        else:
            self.idle.append(connection)

    def close(self) -> None:
        """Close what is at rest; what is in use closes when it comes back."""
        self.closed = True
        while self.idle:
            self.idle.pop().close()
