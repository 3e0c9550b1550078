"""The store on a real PostgreSQL that is restarted, killed, cut off, silent, slow, full, or contended."""

import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

import psycopg
import pytest
import trio

from runtara.errors import (
    OutcomeUnknown,
    StoreCorrupt,
    StoreDenied,
    StoreError,
    StoreFailed,
    StoreFull,
    StoreReadOnly,
    StoreRefused,
    StoreUnavailable,
)
from runtara.persistence.postgres import PostgresStore, open_postgres
from runtara.persistence.postgres.driver import Statement
from runtara.persistence.store import InstanceFilter, InstanceOrder, PageRequest, Unit
from runtara.randomness import SeededRandomness
from runtara.records import CheckpointRecord, SettleWait, WaitOutcome
from runtara.testing import samples
from runtara.testing.conformance import SENTENCES, Sentence
from runtara.testing.samples import TENANT, creation, instance, unit
from tests.postgres_pooler import open_pooler
from tests.postgres_proxy import Proxy, open_proxy
from tests.postgres_server import Server, administer, new_schema, new_server, server_url
from tests.test_postgres_driver import cancelled_at

COMMIT = b"COMMIT\0"
"""As it stands in a message; BEGIN ... READ COMMITTED does not hold it."""


@asynccontextmanager
async def opened(
    url: str | None = None, schema: str | None = None, **options: Any
) -> AsyncIterator[PostgresStore]:
    where = schema or new_schema()
    if "answer_seconds" in options:  # for what the test does, not for making the tables
        async with open_postgres(url or server_url(), schema=where):
            pass
    async with open_postgres(
        url or server_url(), schema=where, randomness=SeededRandomness(1), **options
    ) as store:
        yield store


@asynccontextmanager
async def behind_proxy(**options: Any) -> AsyncIterator[tuple[PostgresStore, Proxy, int]]:
    """A store whose way to the server is in the test's hands, and the row of an instance in it."""
    async with open_proxy(server_url()) as proxy, opened(proxy.url, **options) as store:
        yield store, proxy, await one_instance(store)


async def one_instance(store: PostgresStore) -> int:
    row = await store.reserve(1)
    await store.apply([creation(instance(row))])
    return row


def adding(row: int, revision: int) -> Unit:
    """A unit that only appends: it is committed in one trip with its statements."""
    return unit(row, revision, samples.checkpoint(revision))


def moving(row: int, revision: int) -> Unit:
    """A unit that also updates: its COMMIT is a trip of its own."""
    wait = samples.wait(revision)
    return unit(
        row,
        revision,
        samples.checkpoint(revision),
        wait,
        SettleWait(wait_id=wait.wait_id, outcome=WaitOutcome.ELAPSED, settled_us=1),
    )


UNITS = pytest.mark.parametrize("make", [adding, moving])
Make = Callable[[int, int], Unit]


async def revisions(store: PostgresStore, row: int) -> list[int]:
    """Of the stored checkpoints, oldest first."""
    page = await store.list_records(row, CheckpointRecord, PageRequest(limit=1000, descending=False))
    return [record.revision for record in page.items]


@contextmanager
def locked(store: PostgresStore, table: str, mode: str = "ACCESS EXCLUSIVE") -> Iterator[None]:
    """Another session holds ``table``."""
    schema = store.writer.connector.address.schema
    with psycopg.connect(server_url()) as other:
        other.execute(f"LOCK TABLE {schema}.{table} IN {mode} MODE".encode())
        yield
        other.rollback()


async def until_waiting(store: PostgresStore, sessions: int = 1) -> None:
    """Wait until so many sessions of the store wait for a lock."""
    sql = "SELECT pid FROM pg_stat_activity WHERE application_name = %s AND wait_event_type = 'Lock'"
    with trio.fail_after(10):
        while len(administer(sql, store.writer.connector.application)) < sessions:
            await trio.lowlevel.checkpoint()


async def outcome(call: Callable[[], Awaitable[object]]) -> StoreError | None:
    try:
        await call()
    except StoreError as error:
        return error
    return None


# ---------------------------------------------------------------- the answer to COMMIT


@UNITS
async def test_a_lost_answer_to_commit_is_settled_as_written(make: Make) -> None:
    async with behind_proxy() as (store, proxy, row):
        for revision in range(2, 12):
            proxy.cut_after = COMMIT
            with pytest.raises(OutcomeUnknown):
                await store.apply([make(row, revision)])
            with pytest.raises(StoreUnavailable, match="not settled"):
                await store.apply([make(row, revision)])
            assert await store.settle() == frozenset()
            assert await store.settle() == frozenset()
        assert await revisions(store, row) == list(range(2, 12))
        assert proxy.cuts == 10


@UNITS
async def test_a_commit_that_never_arrived_is_settled_as_not_written(make: Make) -> None:
    async with behind_proxy() as (store, proxy, row):
        for _ in range(5):
            proxy.cut_before = COMMIT
            with pytest.raises(OutcomeUnknown):
                await store.apply([make(row, 2)])
            assert await store.settle() is None
        await store.apply([make(row, 2)])
        assert await revisions(store, row) == [2]


async def test_settling_tells_the_chains_that_were_left_out() -> None:
    async with behind_proxy() as (store, proxy, row):
        other = await one_instance(store)
        proxy.cut_after = COMMIT
        with pytest.raises(OutcomeUnknown):
            await store.apply([adding(row, 2), unit(other, 2, samples.checkpoint(2), epoch=9)])
        assert await store.settle() == frozenset({other})


async def test_settling_can_be_asked_again_until_the_server_is_back() -> None:
    async with behind_proxy() as (store, proxy, row):
        proxy.cut_after = COMMIT
        with pytest.raises(OutcomeUnknown):
            await store.apply([adding(row, 2)])
        proxy.cut_before = b"pg_terminate_backend"
        with pytest.raises(StoreUnavailable):
            await store.settle()
        assert proxy.cut_before is None
        assert await store.settle() == frozenset()


async def lost_while_it_waits(store: PostgresStore, proxy: Proxy, row: int) -> None:
    """Cut the way while the server holds the statements and the COMMIT behind them, and waits for a lock."""
    errors: list[StoreError | None] = []

    async def apply() -> None:
        errors.append(await outcome(lambda: store.apply([adding(row, 2)])))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(apply)
        await until_waiting(store)
        proxy.cut_all()
    assert [type(error) for error in errors] == [OutcomeUnknown]


async def test_settling_ends_a_session_that_might_still_commit() -> None:
    async with behind_proxy() as (store, proxy, row):
        with locked(store, "checkpoints"):
            await lost_while_it_waits(store, proxy, row)
            assert await store.settle() is None
        assert await revisions(store, row) == []
        await store.apply([adding(row, 2)])
        assert await revisions(store, row) == [2]


async def test_settling_waits_for_a_session_that_it_cannot_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtara.persistence.postgres.writer.END_PROCESS", "SELECT $1, $2")
    settled: list[frozenset[int] | None] = []

    async def settle(store: PostgresStore) -> None:
        settled.append(await store.settle())

    async with behind_proxy() as (store, proxy, row):
        async with trio.open_nursery() as nursery:
            with locked(store, "checkpoints"):
                await lost_while_it_waits(store, proxy, row)
                nursery.start_soon(settle, store)
                await until_waiting(store, sessions=2)
                assert settled == []
        assert settled == [frozenset()]
        assert await revisions(store, row) == [2]


async def test_a_server_that_only_reads_is_asked_again_over_another_connection() -> None:
    """As after a failover: the session that cannot settle, or write, is given up."""
    role = f"{new_schema()}_turning"
    administer(f"CREATE ROLE {role} LOGIN SUPERUSER")
    url = server_url().replace("postgres@", f"{role}@")
    async with open_proxy(url) as proxy, opened(proxy.url) as store:
        row = await one_instance(store)
        proxy.cut_after = COMMIT
        with pytest.raises(OutcomeUnknown):
            await store.apply([adding(row, 2)])
        for call in (store.settle, lambda: store.apply([adding(row, 3)])):
            administer(f"ALTER ROLE {role} SET default_transaction_read_only = on")
            proxy.cut_all()
            with pytest.raises(StoreReadOnly):
                await call()
            administer(f"ALTER ROLE {role} RESET default_transaction_read_only")
            assert await call() == frozenset()
        assert await revisions(store, row) == [2, 3]


async def test_numbers_are_not_given_twice_when_the_answer_is_lost() -> None:
    async with behind_proxy() as (store, proxy, row):
        proxy.cut_after = COMMIT
        with pytest.raises(StoreUnavailable):
            await store.reserve(5)
        assert await store.reserve(1) == row + 6


# ---------------------------------------------------------------- connections that are lost


@UNITS
@pytest.mark.parametrize("how", ["terminate", "kill"])
async def test_a_backend_that_dies_in_a_transaction_loses_nothing(make: Make, how: str, own: Server) -> None:
    async with opened(own.url, answer_seconds=1.0) as store:
        row = await one_instance(store)
        await store.apply([make(row, 2)])
        error: list[StoreError | None] = []

        async def apply() -> None:
            error.append(await outcome(lambda: store.apply([make(row, 3)])))

        schema = store.writer.connector.address.schema
        with suppress(psycopg.OperationalError), psycopg.connect(own.url) as other:
            other.execute(f"LOCK TABLE {schema}.checkpoints".encode())
            async with trio.open_nursery() as nursery:
                nursery.start_soon(apply)
                sql = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                while not (found := administer(sql, url=own.url)):
                    await trio.lowlevel.checkpoint()
                [(pid,)] = found
                assert isinstance(pid, int)
                if how == "kill":
                    os.kill(pid, signal.SIGKILL)
                else:
                    administer("SELECT pg_terminate_backend(%s, 5000)", pid, url=own.url)
        [found_error] = error
        if isinstance(found_error, OutcomeUnknown):
            assert await settled(store) is None
        else:
            assert isinstance(found_error, StoreUnavailable)
        await insist(store, [make(row, 3)])
        assert await revisions(store, row) == [2, 3]


async def test_a_session_that_ended_while_idle_is_replaced_without_a_word() -> None:
    async with opened() as store:
        row = await one_instance(store)
        await store.check()
        for revision in (2, 3):
            administer(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = %s",
                store.writer.connector.application,
            )
            await store.apply([adding(row, revision)])
            assert await revisions(store, row) == list(range(2, revision + 1))


async def test_cut_connections_are_replaced() -> None:
    async with behind_proxy() as (store, proxy, row):
        await store.check()
        proxy.cut_all()
        await store.check()
        await store.apply([adding(row, 2)])
        for word in (b"BEGIN", b"unnest"):
            proxy.cut_before = word
            await insist(store, [adding(row, 3)] if word == b"BEGIN" else [moving(row, 4)])
        assert await revisions(store, row) == [2, 3, 4]


async def insist(store: PostgresStore, batch: list[Unit]) -> None:
    """Write ``batch`` as the runtime does: again while the store is away, and settle what is unknown."""
    with trio.fail_after(30):
        while True:
            try:
                assert await store.apply(batch) == frozenset()
                return
            except StoreUnavailable:
                await trio.sleep(0.01)
            except OutcomeUnknown:
                if await settled(store) == frozenset():
                    return


async def settled(store: PostgresStore) -> frozenset[int] | None:
    while True:
        try:
            return await store.settle()
        except StoreUnavailable:
            await trio.sleep(0.01)


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    """A cluster that may be broken."""
    server = new_server()
    yield server
    server.discard()


@pytest.fixture
def own(own_server: Server) -> Server:
    """It answers: the test before may have left it in recovery."""
    own_server.wait()
    return own_server


async def test_a_wrong_password_is_denied_and_the_right_one_is_let_in(own: Server) -> None:
    administer("CREATE ROLE guarded LOGIN SUPERUSER PASSWORD 'right'", url=own.url)
    rules = own.folder / "pg_hba.conf"
    rules.write_text("host all guarded 127.0.0.1/32 scram-sha-256\n" + rules.read_text("utf-8"), "utf-8")
    administer("SELECT pg_reload_conf()", url=own.url)
    url = own.url.replace("postgres@", "guarded{}@")
    with suppress(psycopg.OperationalError):
        while True:  # until the server has read its rules
            psycopg.connect(url.format("")).close()
    for password, words in ((":wrong", "password authentication failed"), ("", "no password supplied")):
        with pytest.raises(StoreDenied, match=words) as caught:
            async with opened(url.format(password)):
                pass
        assert "wrong" not in str(caught.value)
    async with opened(url.format(":right")) as store:
        await one_instance(store)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT])
async def test_a_server_restarted_under_load_loses_nothing(how: signal.Signals, own: Server) -> None:
    async with opened(own.url) as store:
        rows = [await one_instance(store) for _ in range(3)]
        written = Counter[int]()
        reads = Counter[str]()
        stop = False

        async def write() -> None:
            while not stop:
                number = sum(written.values()) // len(rows) + 2
                await insist(store, [(adding if number % 2 else moving)(row, number) for row in rows])
                written.update(rows)

        async def read() -> None:
            while not stop:
                error = await outcome(lambda: store.list_records(rows[0], CheckpointRecord, PageRequest()))
                assert error is None or isinstance(error, StoreUnavailable), error
                reads["ok" if error is None else "unavailable"] += 1
                await trio.sleep(0.001)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            nursery.start_soon(read)
            for _ in range(2):
                before = written[rows[0]]
                while written[rows[0]] < before + 3:
                    await trio.lowlevel.checkpoint()
                await trio.to_thread.run_sync(own.stop, how)
                await trio.to_thread.run_sync(own.start)
            before, asked = written[rows[0]], reads["ok"]
            while written[rows[0]] < before + 3 or reads["ok"] < asked + 3:
                await trio.lowlevel.checkpoint()
            stop = True
        for row in rows:
            assert await revisions(store, row) == list(range(2, written[row] + 2))


async def test_a_server_that_is_full_is_unavailable_until_there_is_a_place(own: Server) -> None:
    async with opened(own.url, answer_seconds=1.0) as store, AsyncExitStack() as others:
        row = await one_instance(store)
        await store.check()
        administer(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name = %s",
            store.writer.connector.application,
            url=own.url,
        )
        with suppress(psycopg.OperationalError):
            while True:
                others.enter_context(psycopg.connect(own.url))
        for call in (lambda: store.apply([adding(row, 2)]), store.check):
            error = await outcome(call)
            assert isinstance(error, StoreUnavailable)
            assert "too many clients already" in error.message
        await others.aclose()
        await insist(store, [adding(row, 2)])
        assert await revisions(store, row) == [2]


async def test_a_failover_to_a_standby_keeps_what_was_acknowledged() -> None:
    """Both hosts are in the url; the standby is asked for, and refuses, until it is promoted."""
    primary = new_server()
    standby = primary.standby()
    try:
        both = f"127.0.0.1:{standby.port},127.0.0.1:{primary.port}"
        url = primary.url.replace(f"127.0.0.1:{primary.port}", both)
        async with opened(url) as store:
            row = await one_instance(store)
            for revision in range(2, 7):
                await insist(store, [moving(row, revision)])
            primary.stop(signal.SIGQUIT)
            error = await outcome(lambda: store.apply([moving(row, 7)]))
            assert isinstance(error, StoreUnavailable | OutcomeUnknown), error
            administer("SELECT pg_promote()", url=standby.url)
            if isinstance(error, OutcomeUnknown):
                assert await settled(store) is None
            await insist(store, [moving(row, 7)])
            assert await revisions(store, row) == list(range(2, 8))
    finally:
        standby.discard()
        primary.discard()


async def test_a_caller_without_patience_does_not_keep_others_from_connecting() -> None:
    """The pause between attempts grows beyond the deadline of a call; calls after it connect all the same."""
    async with behind_proxy(answer_seconds=0.3) as (store, proxy, row):
        connector = store.writer.connector
        connector.failures = 20
        connector.not_before = trio.current_time() + 0.5
        proxy.cut_all()
        assert isinstance(await outcome(lambda: store.apply([adding(row, 2)])), StoreUnavailable)
        await insist(store, [adding(row, 2)])
        assert connector.failures == 0
        assert await revisions(store, row) == [2]


# ---------------------------------------------------------------- silence and waiting


async def test_a_black_hole_is_left_within_the_deadline() -> None:
    async with behind_proxy(answer_seconds=0.5) as (store, proxy, row):
        await store.check()
        proxy.silent = True
        for call in (store.check, lambda: store.apply([adding(row, 2)]), lambda: store.reserve(1)):
            began = trio.current_time()
            assert isinstance(await outcome(call), StoreUnavailable)
            assert trio.current_time() - began < 1.5
        proxy.silent = False
        await insist(store, [adding(row, 2)])
        assert await revisions(store, row) == [2]


async def test_silence_after_commit_is_unknown_within_the_deadline() -> None:
    async with behind_proxy(answer_seconds=0.5) as (store, proxy, row):
        schema = store.writer.connector.address.schema
        administer(f"CREATE FUNCTION {schema}.slow() RETURNS trigger LANGUAGE plpgsql AS "
                   "$$ BEGIN PERFORM pg_sleep(0.2); RETURN new; END $$")  # fmt: skip
        administer(f"CREATE TRIGGER slow BEFORE INSERT ON {schema}.checkpoints"
                   f" FOR EACH ROW EXECUTE FUNCTION {schema}.slow()")  # fmt: skip
        errors: list[StoreError | None] = []

        async def apply() -> None:
            errors.append(await outcome(lambda: store.apply([adding(row, 2)])))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(apply)
            sql = "SELECT 1 FROM pg_stat_activity WHERE application_name = %s AND wait_event = 'PgSleep'"
            while not administer(sql, store.writer.connector.application):
                await trio.lowlevel.checkpoint()
            proxy.silent = True
        proxy.silent = False
        assert isinstance(errors[0], OutcomeUnknown)
        assert await settled(store) in (None, frozenset())
        found = await revisions(store, row)
        await insist(store, [adding(row, 3)])
        assert await revisions(store, row) == [*found, 3]


async def test_a_statement_that_takes_too_long_is_ended_by_the_server() -> None:
    async with opened(answer_seconds=0.6) as store:
        row = await one_instance(store)
        for table in ("checkpoints", "instances"):
            with locked(store, table):
                error = await outcome(lambda: store.apply([adding(row, 2)]))
                assert isinstance(error, StoreUnavailable)
                assert "a lock was not given in time" in error.message
        with locked(store, "checkpoints"):
            assert isinstance(await outcome(lambda: revisions(store, row)), StoreUnavailable)
        await store.apply([adding(row, 2)])
        assert await revisions(store, row) == [2]


async def test_a_statement_timeout_is_unavailable_and_nothing_was_written() -> None:
    async with opened(answer_seconds=0.5) as store:
        row = await one_instance(store)
        with raising(store, "PERFORM pg_sleep(9)"):
            error = await outcome(lambda: store.apply([adding(row, 2)]))
            assert isinstance(error, StoreUnavailable)
            assert "57014" in error.message
        await store.apply([adding(row, 2)])
        assert await revisions(store, row) == [2]


async def test_a_full_pool_is_unavailable_in_time_and_free_afterwards() -> None:
    async with opened(answer_seconds=0.6, readers=2) as store:
        row = await one_instance(store)
        errors: list[StoreError | None] = []

        async def read() -> None:
            errors.append(await outcome(lambda: revisions(store, row)))

        with locked(store, "checkpoints"):
            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(read)
        assert [type(error) for error in errors] == [StoreUnavailable] * 8
        assert store.readers.places.value == 2
        assert await revisions(store, row) == []


async def test_more_questions_than_readers_all_get_their_answer() -> None:
    async with opened(readers=2) as store:
        row = await one_instance(store)
        found: list[object] = []

        async def read() -> None:
            found.append(await store.find(TENANT, f"i{row}"))

        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(read)
        assert found == [instance(row)] * 50
        assert len(store.readers.idle) <= 2


# ---------------------------------------------------------------- what the server says


@contextmanager
def raising(store: PostgresStore, body: str, table: str = "checkpoints") -> Iterator[None]:
    """Every insert into ``table`` first runs ``body``."""
    schema = store.writer.connector.address.schema
    administer(
        f"CREATE FUNCTION {schema}.broken() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN {body}; RETURN new; END $$"
    )
    administer(
        f"CREATE TRIGGER broken BEFORE INSERT ON {schema}.{table}"
        f" FOR EACH ROW EXECUTE FUNCTION {schema}.broken()"
    )
    yield
    administer(f"DROP FUNCTION {schema}.broken CASCADE")


@pytest.mark.parametrize("sqlstate", ["40001", "40P01"])
async def test_a_conflict_is_tried_again_and_nobody_hears_of_it(sqlstate: str) -> None:
    async with opened() as store:
        row = await one_instance(store)
        schema = store.writer.connector.address.schema
        administer(f"CREATE SEQUENCE {schema}.tries")  # a sequence is not rolled back
        body = f"IF nextval('{schema}.tries') <= 3 THEN RAISE 'conflict' USING ERRCODE = '{sqlstate}'; END IF"
        with raising(store, body):
            assert await store.apply([adding(row, 2)]) == frozenset()
        assert administer(f"SELECT last_value FROM {schema}.tries") == [(4,)]
        assert await revisions(store, row) == [2]


async def test_a_conflict_without_end_is_unavailable() -> None:
    async with opened() as store:
        row = await one_instance(store)
        with raising(store, "RAISE 'conflict' USING ERRCODE = '40001'"):
            assert isinstance(await outcome(lambda: store.apply([adding(row, 2)])), StoreUnavailable)
        await store.apply([adding(row, 2)])


@pytest.mark.parametrize(
    ("sqlstate", "kind", "ends"),
    [
        ("53100", StoreFull, False),
        ("53200", StoreUnavailable, False),
        ("25006", StoreReadOnly, False),
        ("23505", StoreRefused, False),
        ("22003", StoreRefused, False),
        ("54000", StoreRefused, False),
        ("57014", StoreUnavailable, False),
        ("58030", StoreFailed, True),
        ("XX001", StoreCorrupt, True),
        ("42P01", StoreFailed, True),
    ],
)
async def test_what_the_server_says_becomes_our_error(
    sqlstate: str, kind: type[StoreError], ends: bool
) -> None:
    async with opened() as store:
        row = await one_instance(store)
        with raising(store, f"RAISE 'broken' USING ERRCODE = '{sqlstate}'"):
            error = await outcome(lambda: store.apply([adding(row, 2)]))
            assert type(error) is kind
            assert f"{sqlstate}: broken" in str(error)
        later = await outcome(lambda: store.apply([adding(row, 2)]))
        assert type(later) is (kind if ends else type(None))
        assert await revisions(store, row) == ([] if ends else [2])


async def test_an_update_that_finds_nothing_is_refused_and_writes_nothing() -> None:
    settle = SettleWait(wait_id="none", outcome=WaitOutcome.ELAPSED, settled_us=1)
    async with opened() as store:
        row = await one_instance(store)
        with pytest.raises(StoreRefused, match="1 rows of waits were to change, 0 were there"):
            await store.apply([unit(row, 2, samples.checkpoint(2), settle)])
        assert await revisions(store, row) == []


async def test_a_creation_without_its_record_is_refused() -> None:
    async with opened() as store:
        row = await store.reserve(1)
        with pytest.raises(StoreRefused):
            await store.apply([unit(row, 1, samples.checkpoint(1), epoch=0, base=0)])
        assert await revisions(store, row) == []


# ---------------------------------------------------------------- cancellation


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need longer than a second to drain."""
    monkeypatch.setattr("runtara.persistence.postgres.driver.DRAIN_SECONDS", 60.0)


@UNITS
async def test_apply_can_be_cancelled_at_every_step(make: Make) -> None:
    async with opened() as store:
        row = await one_instance(store)
        step, revision = 1, 2
        while await cancelled_at(step, partial(store.apply, [make(row, revision)])):
            found = await revisions(store, row)
            assert found in (list(range(2, revision)), list(range(2, revision + 1)))
            revision = len(found) + 2
            assert store.writer.connection is None or store.writer.connection.at_rest
            assert await store.apply([make(row, revision)]) == frozenset()
            revision += 1
            step += 1
        assert step > 1
        assert await revisions(store, row) == list(range(2, revision + 1))


@pytest.mark.usefixtures("patient")
async def test_a_cancelled_apply_that_waits_in_the_server_is_ended_there() -> None:
    async with opened() as store:
        row = await one_instance(store)
        with locked(store, "waits"):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.apply, [moving(row, 2)])
                await until_waiting(store)
                nursery.cancel_scope.cancel()
            assert store.writer.connection is not None
            assert store.writer.connection.at_rest
        await store.apply([adding(row, 2)])


async def test_no_cancellation_reaches_a_commit_in_flight() -> None:
    async with opened() as store:
        row = await one_instance(store)
        async with trio.open_nursery() as nursery:
            with locked(store, "checkpoints"):
                nursery.start_soon(store.apply, [adding(row, 2)])
                await until_waiting(store)
                nursery.cancel_scope.cancel()
                await until_waiting(store)
        assert await revisions(store, row) == [2]


async def test_reads_can_be_cancelled_at_every_step_and_lose_no_reader() -> None:
    async with opened(readers=1) as store:
        row = await one_instance(store)
        await store.apply([moving(row, 2)])
        calls: tuple[Callable[[], Awaitable[object]], ...] = (
            lambda: store.load(TENANT, f"i{row}", 10),
            lambda: store.list_instances(InstanceFilter(), InstanceOrder.CREATED, PageRequest()),
            store.check,
        )
        for call in calls:
            step = 1
            while await cancelled_at(step, call):
                assert store.readers.places.value == 1
                assert all(connection.at_rest for connection in store.readers.idle)
                assert await revisions(store, row) == [2]
                step += 1
            assert step > 1


async def test_cancelled_waiters_for_a_reader_lose_none() -> None:
    async with opened(readers=1) as store:
        row = await one_instance(store)
        with locked(store, "checkpoints"):
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(revisions, store, row)
                await until_waiting(store)
                nursery.cancel_scope.cancel()
        assert store.readers.places.value == 1
        assert await revisions(store, row) == []


# ---------------------------------------------------------------- a pooler in transaction mode


@pytest.mark.parametrize("sentence", SENTENCES, ids=lambda s: s.__name__)
async def test_the_contract_is_kept_through_a_pooler(sentence: Sentence) -> None:
    schema = new_schema()
    async with open_pooler(server_url()) as pooler:
        await sentence(lambda: open_postgres(pooler.url, schema=schema))
        assert pooler.changes > 0


async def test_a_pooler_that_is_restarted_loses_nothing() -> None:
    async with open_pooler(server_url()) as pooler, opened(pooler.url) as store:
        row = await one_instance(store)
        for revision in range(2, 40):
            await insist(store, [(adding if revision % 2 else moving)(row, revision)])
            if revision % 4 == 0:
                pooler.restart()
        assert await revisions(store, row) == list(range(2, 40))
        assert pooler.changes > 20


async def test_a_pooler_is_asked_to_cancel_what_runs_for_us() -> None:
    async with open_pooler(server_url()) as pooler, opened(pooler.url) as store:
        row = await one_instance(store)
        with locked(store, "checkpoints"):
            with trio.move_on_after(0.1):
                await revisions(store, row)
            assert len(store.readers.idle) == 1
        assert await revisions(store, row) == []


async def test_nothing_of_ours_stays_in_a_session() -> None:
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(opened())
        row = await one_instance(store)
        await store.apply([moving(row, 2)])
        await store.check()
        assert store.writer.connection is not None
        for connection in (store.writer.connection, *store.readers.idle):
            [changed, prepared] = await connection.run(
                [
                    Statement(b"SELECT count(*) FROM pg_settings WHERE source = 'session'"),
                    Statement(b"SELECT count(*) FROM pg_prepared_statements"),
                ],
                5,
            )
            assert (changed.get_value(0, 0), prepared.get_value(0, 0)) == (bytes(8), bytes(8))
