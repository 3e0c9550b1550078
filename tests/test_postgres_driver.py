"""One connection to PostgreSQL under trio: trips, errors, cancelling, silence."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
import trio
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from runtara.persistence.postgres import driver
from runtara.persistence.postgres.driver import Connection, Lost, ServerError, Statement
from runtara.persistence.postgres.statements import BEGIN, COMMIT, ROLLBACK, statement
from runtara.persistence.postgres.values import rows
from tests.postgres_proxy import open_proxy
from tests.postgres_server import administer, server_url

SECONDS = 10.0
ONE = Statement(b"SELECT 1")
LONG = Statement(b"SELECT pg_sleep(60)")


@asynccontextmanager
async def connected(url: str | None = None) -> AsyncIterator[Connection]:
    parameters = conninfo_to_dict(url or server_url())
    conninfo = make_conninfo("", **{**parameters, "hostaddr": parameters["host"]})
    connection = await Connection.connect(conninfo.encode())
    try:
        yield connection
    finally:
        connection.close()


async def number(connection: Connection, sql: str = "SELECT 7::bigint") -> object:
    [answer] = await connection.run([Statement(sql.encode())], SECONDS)
    return rows(answer)[0][0]


class CancelAtStep(trio.abc.Instrument):
    """Cancels ``scope`` just before its task takes its n-th step; counts the steps."""

    def __init__(self, step: int, scope: trio.CancelScope) -> None:
        self.step = step
        self.scope = scope
        self.task = trio.lowlevel.current_task()
        self.seen = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self.seen += 1
            if self.seen == self.step:
                self.scope.cancel()


async def cancelled_at(step: int, call: Callable[[], Awaitable[object]]) -> bool:
    """Run ``call``, cancelled at its ``step``; whether it was still running then."""
    with trio.CancelScope() as scope:
        instrument = CancelAtStep(step, scope)
        trio.lowlevel.add_instrument(instrument)
        try:
            await call()
        finally:
            trio.lowlevel.remove_instrument(instrument)
    return instrument.seen >= step


# ---------------------------------------------------------------- trips


async def test_a_trip_answers_every_statement_in_order() -> None:
    async with connected() as connection:
        asked = [statement("SELECT $1 + 1", n) for n in range(20)]
        answers = await connection.run(asked, SECONDS)
        assert [rows(answer) for answer in answers] == [[(n + 1,)] for n in range(20)]


async def test_the_error_is_that_of_the_first_statement_that_failed() -> None:
    async with connected() as connection:
        for broken, sqlstate in ((b"SELECT 1/0", "22012"), (b"SELEC", "42601")):
            with pytest.raises(ServerError) as caught:
                await connection.run([ONE, Statement(broken), Statement(b"SELECT nothing")], SECONDS)
            assert caught.value.sqlstate == sqlstate
            assert connection.at_rest
        assert await number(connection) == 7


async def test_a_commit_behind_a_statement_that_failed_is_skipped() -> None:
    async with connected() as connection:
        await connection.script("CREATE TEMP TABLE t (a int PRIMARY KEY)", SECONDS)
        insert = Statement(b"INSERT INTO t VALUES (1)")
        with pytest.raises(ServerError) as caught:
            await connection.run([BEGIN, insert, insert, COMMIT], SECONDS)
        assert caught.value.sqlstate == "23505"
        assert not connection.at_rest
        await connection.run([ROLLBACK], SECONDS)
        assert await number(connection, "SELECT count(*) FROM t") == 0


async def test_a_script_runs_several_statements_and_stops_at_an_error() -> None:
    async with connected() as connection:
        await connection.script("CREATE TEMP TABLE t (a int); INSERT INTO t VALUES (1), (2)", SECONDS)
        assert await number(connection, "SELECT count(*) FROM t") == 2
        with pytest.raises(ServerError):
            await connection.script("DELETE FROM t; SELECT 1/0", SECONDS)
        assert await number(connection, "SELECT count(*) FROM t") == 2


@pytest.mark.parametrize("size", [0, 1, 8 * 2**20])
async def test_bytes_go_there_and_back(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + b"\0" * (size % 256)
    async with connected() as connection:
        [answer] = await connection.run([statement("SELECT $1", data)], SECONDS)
        assert rows(answer) == [(data,)]


async def test_a_large_trip_does_not_wait_for_the_server_to_read() -> None:
    """Both sides would block if answers were not read while statements are sent."""
    data = b"x" * 2**20
    async with connected() as connection:
        answers = await connection.run([statement("SELECT $1", data)] * 16, SECONDS)
        assert [rows(answer)[0] for answer in answers] == [(data,)] * 16


# ---------------------------------------------------------------- connecting


async def test_no_server_is_lost_with_its_words() -> None:
    with pytest.raises(Lost, match="refused"):
        await Connection.connect(b"host=127.0.0.1 hostaddr=127.0.0.1 port=1 user=x dbname=x")


async def test_no_such_database_is_lost_with_its_words() -> None:
    with pytest.raises(Lost, match='database "nowhere" does not exist'):
        async with connected(server_url().rpartition("/")[0] + "/nowhere"):
            pass


async def test_connecting_can_be_cancelled_at_every_step() -> None:
    async def connect() -> None:
        async with connected():
            pass

    step = 1
    while await cancelled_at(step, connect):
        step += 1
    assert step > 1


# ---------------------------------------------------------------- cancelling


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need longer than a second to drain."""
    monkeypatch.setattr(driver, "DRAIN_SECONDS", 60.0)


@pytest.mark.usefixtures("patient")
async def test_a_cancelled_trip_is_cancelled_on_the_server_and_drained() -> None:
    async with connected() as connection:
        pid = connection.pgconn.backend_pid
        with trio.move_on_after(0.05) as scope:
            await connection.run([ONE, LONG, ONE], SECONDS)
        assert scope.cancelled_caught
        assert connection.at_rest
        assert await number(connection) == 7
        running = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND state = 'active'"
        assert administer(running, pid) == [(0,)]


@pytest.mark.usefixtures("patient")
async def test_a_cancelled_transaction_can_be_rolled_back() -> None:
    async with connected() as connection:
        with trio.move_on_after(0.05):
            await connection.run([BEGIN, LONG, COMMIT], SECONDS)
        assert not connection.closed
        assert not connection.at_rest
        await connection.run([ROLLBACK], SECONDS)
        assert await number(connection) == 7


@pytest.mark.usefixtures("patient")
async def test_a_trip_can_be_cancelled_at_every_step() -> None:
    data = b"x" * 2**20
    async with connected() as connection:

        async def call() -> None:
            await connection.run([statement("SELECT $1", data), ONE], SECONDS)

        step = 1
        while await cancelled_at(step, call):
            assert connection.at_rest, f"after step {step}"
            assert await number(connection) == 7
            step += 1
        assert step > 1  # how many waits a trip takes is the kernel's business


async def test_a_trip_whose_cancelling_gets_no_answer_closes_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "DRAIN_SECONDS", 0.05)
    async with open_proxy(server_url()) as proxy, connected(proxy.url) as connection:
        proxy.silent = True
        with trio.move_on_after(0.05) as scope:
            await connection.run([ONE], SECONDS)
        assert scope.cancelled_caught
        assert connection.closed


# ---------------------------------------------------------------- silence and loss


async def test_silence_closes_the_connection_in_time() -> None:
    async with open_proxy(server_url()) as proxy, connected(proxy.url) as connection:
        assert await number(connection) == 7
        proxy.silent = True
        with trio.fail_after(1), pytest.raises(Lost, match=r"no answer within 0\.1 s"):
            await connection.run([ONE], 0.1)
        assert connection.closed


async def test_a_cut_wire_is_lost() -> None:
    async with open_proxy(server_url()) as proxy, connected(proxy.url) as connection:
        assert await number(connection) == 7
        proxy.cut_before = b"SELECT 1"
        with pytest.raises(Lost):
            await connection.run([ONE], SECONDS)
        assert connection.closed


async def test_a_session_that_the_server_ended_is_seen_without_asking() -> None:
    async with connected() as connection:
        assert connection.look()
        administer("SELECT pg_terminate_backend(%s, 5000)", connection.pgconn.backend_pid)
        assert not connection.look()
        assert connection.closed


async def test_a_session_that_is_ended_in_a_trip_is_lost_or_fatal() -> None:
    async with connected() as connection:
        ending = Statement(b"SELECT pg_terminate_backend(pg_backend_pid())")
        with pytest.raises((Lost, ServerError)) as caught:
            await connection.run([ending, LONG], SECONDS)
        assert isinstance(caught.value, Lost) or getattr(caught.value, "fatal", False)
        assert connection.closed
        assert not connection.look()


async def test_a_closed_connection_raises_and_closing_again_does_nothing() -> None:
    async with connected() as connection:
        connection.close()
        connection.close()
        with pytest.raises(Lost):
            await connection.run([ONE], SECONDS)


async def test_a_bug_in_a_statement_closes_the_connection() -> None:
    async with connected() as connection:
        broken = Statement(b"SELECT $1", ("no bytes",), (25,))  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            await connection.run([broken], SECONDS)
        assert connection.closed
