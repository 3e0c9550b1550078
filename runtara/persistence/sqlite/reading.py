"""A connection that only reads, and the executor that it lives in.

Rules:

1. The connection is opened, asked and closed in its executor, so it sees one question at a time.
2. `Reading.stop` comes from outside: it interrupts the question that is being answered and refuses those
   that wait, so a long one holds up neither closing nor settling.
3. In memory there is nothing to open: the writer's connection answers, in the writer's executor.
"""

import sqlite3
from collections.abc import Callable
from typing import Concatenate, Final, ParamSpec, TypeVar

import attrs

from runtara.errors import StoreUnavailable
from runtara.executor import Executor
from runtara.persistence.sqlite.faults import errors_translated

P = ParamSpec("P")
T = TypeVar("T")
Connection = sqlite3.Connection

STEPS_BETWEEN_LOOKS: Final = 1_000_000
"""Of SQLite's machine, some tens of milliseconds; each look needs the interpreter lock."""


@attrs.define(kw_only=True, eq=False)
class Reading:
    """See the module's docstring."""

    path: str
    executor: Executor
    connect: Callable[[], Connection]
    owned: bool = True
    """Whether the connection is its own, to be closed (rule 3)."""
    connection: Connection | None = None
    stopped: bool = False

    async def open(self) -> None:
        await self.executor.run(self.open_connection)

    def open_connection(self) -> None:
        with errors_translated(self.path):
            self.connection = self.connect()
        self.stopped = False
        if self.owned:
            self.connection.set_progress_handler(self.is_stopped, STEPS_BETWEEN_LOOKS)

    def is_stopped(self) -> bool:
        return self.stopped

    async def ask(
        self, question: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Answer ``question``, which is given the connection.

        Raises:
            StoreUnavailable: Also when it was stopped.
        """

        def answer() -> T:
            if self.connection is None or self.stopped:
                raise StoreUnavailable(f"{self.path} is being opened again")
            with errors_translated(self.path):
                return question(self.connection, *args, **kwargs)

        return await self.executor.run(answer)

    def stop(self) -> None:
        """Give up what is being answered and what waits, until it is opened again (rule 2)."""
        if self.owned and self.connection is not None:
            self.stopped = True
            self.connection.interrupt()

    async def close(self) -> None:
        """Closed already, it does nothing."""
        await self.executor.run(self.close_connection)

    def close_connection(self) -> None:
        if self.connection is not None and self.owned:
            self.connection.close()
        self.connection = None
