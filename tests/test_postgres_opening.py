"""Opening a schema: whose it is, its version, the lease, the settings; the way from `open_runtime`."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import attrs
import pytest
import trio

import runtara
from runtara.errors import (
    LeaseLost,
    RuntimeClosed,
    StoreCorrupt,
    StoreDenied,
    StoreFailed,
    StoreLocked,
    StoreNotFound,
    StoreReadOnly,
    StoreRefused,
    StoreTooNew,
    StoreTooOld,
    StoreUnavailable,
    ValidationError,
)
from runtara.ids import check_id
from runtara.persistence.postgres import PostgresStore, lease, open_postgres
from runtara.persistence.postgres.address import parameters_of, parse_address
from runtara.persistence.postgres.schema import Migration, check_server, migrations, newest_version
from runtara.persistence.store import InstanceFilter, InstanceOrder, PageRequest
from runtara.records import PayloadKind, PutPayload
from runtara.runtime import postgres_door
from runtara.testing.samples import TENANT, creation, instance, unit
from tests.postgres_server import ROOT, administer, new_schema, server_url, url_of

HOLDER = """
import sys, trio
from runtara.persistence.postgres import open_postgres

async def main():
    async with open_postgres(sys.argv[1]):
        print("open", flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@asynccontextmanager
async def opened(schema: str, **options: Any) -> AsyncIterator[PostgresStore]:
    async with open_postgres(server_url(), schema=schema, **options) as store:
        yield store


@contextmanager
def holder(url: str) -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds the store of ``url``."""
    command = [sys.executable, "-c", HOLDER, url]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            yield process
        finally:
            process.kill()


# ---------------------------------------------------------------- the lease


async def test_a_second_opening_is_refused_and_told_who_holds_it() -> None:
    schema = new_schema()
    async with opened(schema) as store:
        with pytest.raises(StoreLocked, match=f"held by process {os.getpid()} on .* since 2"):
            async with opened(schema):
                pass
        assert await store.reserve(1) == 1
    async with opened(schema) as store:
        assert await store.reserve(1) == 2


async def test_another_process_is_named_and_its_lease_is_free_once_it_is_killed() -> None:
    schema = new_schema()
    with holder(url_of(schema)) as process:
        with pytest.raises(StoreLocked, match=f"held by process {process.pid} "):
            async with opened(schema):
                pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        async with opened(schema) as store:
            assert await store.reserve(1) == 1


async def test_the_lease_of_another_machine_is_free_when_it_has_run_out() -> None:
    schema = new_schema()
    async with opened(schema):
        pass
    held = (
        "UPDATE {}.runtimes SET owner = 'x', machine = 'far', host = 'far', pid = 1, since = now(), "
        "expires = "
    )
    administer(held.format(schema) + "clock_timestamp() + interval '1 hour'")
    with pytest.raises(StoreLocked, match=r"process 1 on far .* runs 3600 s more"):
        async with opened(schema):
            pass
    administer(held.format(schema) + "clock_timestamp() - interval '1 second'")
    async with opened(schema) as store:
        assert store.writer.lease.epoch == 2


async def test_a_holder_whose_lease_was_taken_can_never_write_again() -> None:
    schema = new_schema()
    async with opened(schema) as stale:
        row = await stale.reserve(1)
        await stale.apply([creation(instance(row))])
        administer(f"UPDATE {schema}.runtimes SET expires = clock_timestamp() - interval '1 second'")
        lease.living.discard(stale.writer.lease.token)  # as if it were another process
        async with opened(schema) as fresh:
            for _ in range(2):
                with pytest.raises(LeaseLost, match="another runtime has taken over"):
                    await stale.apply([unit(row, 2, PutPayload(kind=PayloadKind.INPUT, data=b"stale"))])
            with pytest.raises(LeaseLost):
                await stale.reserve(1)
            assert await stale.payloads(row, frozenset(PayloadKind)) == {}
            await fresh.apply([unit(row, 2, PutPayload(kind=PayloadKind.INPUT, data=b"fresh"))])
        assert await stale.find(TENANT, f"i{row}") == instance(row)


async def test_an_idle_holder_renews_its_lease() -> None:
    schema = new_schema()
    async with opened(schema, lease_seconds=0.3, answer_seconds=0.29) as store:
        since = trio.current_time()
        for _ in range(3):
            before = store.writer.renewed
            with trio.fail_after(5):
                while store.writer.renewed == before:
                    await trio.lowlevel.checkpoint()
        assert store.writer.renewed - since >= 0.2
        assert await store.reserve(1) == 1


async def test_an_idle_holder_that_lost_its_lease_stops() -> None:
    schema = new_schema()
    async with opened(schema, lease_seconds=0.3, answer_seconds=0.29) as store:
        administer(f"UPDATE {schema}.runtimes SET owner = 'x'")
        with trio.fail_after(5):
            while store.failure is None:
                await trio.lowlevel.checkpoint()
        with pytest.raises(LeaseLost, match="another runtime has taken over"):
            await store.reserve(1)


# ---------------------------------------------------------------- whose it is, and its version


async def test_two_that_open_a_new_schema_at_once_make_it_once() -> None:
    schema = new_schema()
    outcomes: list[str] = []
    first_done = trio.Event()

    async def open_it() -> None:
        try:
            async with opened(schema):
                outcomes.append("opened")
                await first_done.wait()
        except StoreLocked:
            outcomes.append("locked")
            first_done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(open_it)
        nursery.start_soon(open_it)
    assert sorted(outcomes) == ["locked", "opened"]
    assert administer(f"SELECT version FROM {schema}.meta") == [(newest_version(),)]


async def test_a_newer_schema_is_refused_and_left_as_it_was() -> None:
    schema = new_schema()
    async with opened(schema):
        pass
    administer(f"UPDATE {schema}.meta SET version = 99")
    before = administer(f"SELECT * FROM {schema}.runtimes, {schema}.meta")
    with pytest.raises(StoreTooNew, match="has version 99"):
        async with opened(schema):
            pass
    assert administer(f"SELECT * FROM {schema}.runtimes, {schema}.meta") == before


async def test_a_schema_of_another_program_is_refused_and_left_as_it_was() -> None:
    schema = new_schema()
    administer(f"CREATE SCHEMA {schema}")
    administer(f"CREATE TABLE {schema}.instances (name text)")
    with pytest.raises(StoreCorrupt, match="holds 1 tables of another program"):
        async with opened(schema):
            pass
    found = administer("SELECT tablename FROM pg_tables WHERE schemaname = %s", schema)
    assert found == [("instances",)]


async def test_an_opening_that_fails_leaves_nothing_half_made() -> None:
    schema = new_schema()
    with pytest.MonkeyPatch.context() as patch:
        broken = [*migrations(), Migration(2, "CREATE TABLE more (a int); SELECT 1/0")]
        patch.setattr("runtara.persistence.postgres.schema.migrations", lambda: broken)
        with pytest.raises(StoreRefused, match="division by zero"):
            async with opened(schema):
                pass
    assert administer("SELECT count(*) FROM pg_namespace WHERE nspname = %s", schema) == [(0,)]
    async with opened(schema) as store:
        assert await store.reserve(1) == 1


async def test_a_later_migration_runs_once_on_an_older_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = new_schema()
    async with opened(schema) as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row))])
    more = [*migrations(), Migration(2, "CREATE TABLE more (a int); INSERT INTO more VALUES (1)")]
    monkeypatch.setattr("runtara.persistence.postgres.schema.migrations", lambda: more)
    for _ in range(2):
        async with opened(schema) as store:
            assert await store.find(TENANT, f"i{row}") == instance(row)
    assert administer(f"SELECT a FROM {schema}.more") == [(1,)]


@pytest.mark.parametrize("schema", ["with \"quotes\" and 'more'", "Ä \\ é", "select", "a.b;c--"])
async def test_any_name_of_a_schema_works(schema: str) -> None:
    schema = f"{schema} {new_schema()}"
    async with opened(schema) as store:
        assert await store.reserve(3) == 1
    async with open_postgres(url_of(schema)) as store:
        assert await store.reserve(1) == 4


# ---------------------------------------------------------------- for reading only


async def test_a_reader_beside_a_runtime_reads_and_writes_nothing() -> None:
    schema = new_schema()
    async with opened(schema) as store, opened(schema, read_only=True) as reader:
        row = await store.reserve(1)
        await store.apply([creation(instance(row))])
        before = administer(f"SELECT owner, epoch, batch FROM {schema}.runtimes")
        assert await reader.find(TENANT, f"i{row}") == instance(row)
        assert await reader.verify() == []
        for call in (
            lambda: reader.apply([unit(row, 2, PutPayload(kind=PayloadKind.INPUT, data=b"x"))]),
            lambda: reader.apply([]),
            reader.settle,
            reader.maintain,
            lambda: reader.reserve(1),
            lambda: reader.purge([row], 10),
            lambda: reader.sweep(10),
            lambda: reader.set_note("retention", "on"),
        ):
            with pytest.raises(StoreReadOnly, match="opened for reading only"):
                await call()
        assert administer(f"SELECT owner, epoch, batch FROM {schema}.runtimes") == before
        assert reader.writer.connection is None
    async with opened(schema, read_only=True) as reader:
        assert await reader.find(TENANT, f"i{row}") == instance(row)


async def test_a_reader_needs_no_right_but_to_select() -> None:
    schema = new_schema()
    role = f"{schema}_reader"
    async with opened(schema) as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row))])
    administer(f"CREATE ROLE {role} LOGIN")
    administer(f"GRANT USAGE ON SCHEMA {schema} TO {role}")
    administer(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {role}")
    url = server_url().replace("postgres@", f"{role}@")
    async with open_postgres(url, schema=schema, read_only=True) as reader:
        assert await reader.load(TENANT, f"i{row}", 10) is not None
        assert (await reader.growth()).rows["instances"] == 1


async def test_a_reader_refuses_what_is_not_of_this_version_and_makes_nothing() -> None:
    schema = new_schema()
    with pytest.raises(StoreNotFound, match="there is no "):
        async with opened(schema, read_only=True):
            pass
    assert administer("SELECT count(*) FROM pg_namespace WHERE nspname = %s", schema) == [(0,)]
    async with opened(schema):
        pass
    for version, kind in ((newest_version() - 1, StoreTooOld), (newest_version() + 1, StoreTooNew)):
        administer(f"UPDATE {schema}.meta SET version = {version}")
        with pytest.raises(kind):
            async with opened(schema, read_only=True):
                pass
    administer(f"DROP TABLE {schema}.runtimes")
    with pytest.raises(StoreCorrupt, match="tables of another program"):
        async with opened(schema, read_only=True):
            pass


# ---------------------------------------------------------------- the server


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (("off", "on", "UTF8", "on", 180000), "fsync is off"),
        (("on", "off", "UTF8", "on", 180000), "full_page_writes is off"),
        (("on", "on", "LATIN1", "on", 180000), "encoding is LATIN1"),
        (("on", "on", "UTF8", "on", 130000), "PostgreSQL 14 or newer"),
    ],
)
def test_a_server_that_may_lose_a_commit_is_refused(answer: tuple[str | int, ...], words: str) -> None:
    with pytest.raises(StoreFailed, match=words):
        check_server(answer, "here")


def test_a_weaker_synchronous_commit_becomes_on_and_a_stronger_one_stays() -> None:
    for word, level in (("off", "on"), ("local", "on"), ("remote_apply", "remote_apply")):
        assert check_server(("on", "on", "UTF8", word, 180000), "here") == level


async def test_no_server_is_unavailable() -> None:
    with pytest.raises(StoreUnavailable, match="refused"):
        async with open_postgres("postgresql://postgres@127.0.0.1:1/postgres"):
            pass


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("postgres@", "nobody_we_know@", 'role "nobody_we_know" does not exist'),
        ("/postgres", "/no_such_base", 'database "no_such_base" does not exist'),
    ],
)
@pytest.mark.parametrize("read_only", [False, True])
async def test_an_unknown_user_or_database_is_denied_at_once(
    old: str, new: str, words: str, read_only: bool
) -> None:
    base, _, database = server_url().rpartition("/")
    url = f"{base}/{database}".replace(old, new) if old == "postgres@" else f"{base}{new}"
    with pytest.raises(StoreDenied, match=words) as caught:
        async with open_postgres(url, schema="x", read_only=read_only):
            pass
    assert not caught.value.retryable


async def test_who_may_not_log_in_any_more_is_unavailable_until_he_may() -> None:
    schema = new_schema()
    role = f"{schema}_guest"
    administer(f"CREATE ROLE {role} LOGIN SUPERUSER")
    async with open_postgres(server_url().replace("postgres@", f"{role}@"), schema=schema) as store:
        administer(f"ALTER ROLE {role} NOLOGIN")
        administer("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE usename = %s", role)
        with pytest.raises(StoreUnavailable, match="not permitted to log in"):
            await store.reserve(1)
        administer(f"ALTER ROLE {role} LOGIN")
        assert await store.reserve(1) == 1


async def test_a_user_who_may_not_write_is_refused() -> None:
    schema = new_schema()
    role = f"{schema}_reader"
    administer(f"CREATE ROLE {role} LOGIN")
    with pytest.raises(StoreReadOnly, match="permission denied"):
        async with open_postgres(server_url().replace("postgres@", f"{role}@"), schema=schema):
            pass


async def test_a_role_whose_defaults_are_unfit_is_served_all_the_same() -> None:
    """Serializable, no durable commit, another search path: none of it reaches our transactions."""
    schema = new_schema()
    role = f"{schema}_odd"
    administer(f"CREATE ROLE {role} LOGIN SUPERUSER")
    for setting in (
        "default_transaction_isolation = 'serializable'",
        "synchronous_commit = 'off'",
        "search_path = 'pg_temp'",
        "statement_timeout = '30ms'",
        "standard_conforming_strings = 'off'",
    ):
        administer(f"ALTER ROLE {role} SET {setting}")
    async with open_postgres(server_url().replace("postgres@", f"{role}@"), schema=schema) as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row))])
        assert await store.find(TENANT, f"i{row}") == instance(row)


async def test_a_role_that_writes_nothing_by_default_is_read_only() -> None:
    schema = new_schema()
    async with opened(schema):
        pass
    role = f"{schema}_still"
    administer(f"CREATE ROLE {role} LOGIN SUPERUSER")
    administer(f"ALTER ROLE {role} SET default_transaction_read_only = on")
    with pytest.raises(StoreReadOnly, match="25006"):
        async with open_postgres(server_url().replace("postgres@", f"{role}@"), schema=schema):
            pass


async def test_every_legal_pair_of_ids_fits_into_the_indexes() -> None:
    """512 characters of four bytes each, in no order that a compression would find."""
    long = ["".join(chr(0x20000 + (start + n * n * 7919) % 40_000) for n in range(512)) for start in range(3)]
    tenant, name, workflow = long
    for value in long:
        assert check_id(value, "id") == value
        assert len(value.encode()) == 2048
    async with opened(new_schema()) as store:
        row = await store.reserve(2)
        record = instance(row, tenant_id=tenant, instance_id=name, workflow=workflow)
        await store.apply([creation(record)])
        assert await store.find(tenant, name) == record
        where = InstanceFilter(tenant_id=tenant, workflow=workflow, id_prefix=name[:-1])
        assert (await store.list_instances(where, InstanceOrder.CREATED, PageRequest())).items == (record,)
        with pytest.raises(StoreRefused, match="already exists"):
            await store.apply([creation(attrs.evolve(record, row=row + 1))])


# ---------------------------------------------------------------- closing, urls, the runtime


async def test_an_error_of_the_body_leaves_as_it_is_and_the_lease_is_given_up() -> None:
    schema = new_schema()
    mine = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        async with opened(schema):
            raise mine
    assert caught.value is mine
    assert administer(f"SELECT owner FROM {schema}.runtimes") == [(None,)]


async def test_a_cancelled_body_gives_the_lease_up() -> None:
    schema = new_schema()
    with trio.CancelScope() as scope:
        async with opened(schema):
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert administer(f"SELECT owner FROM {schema}.runtimes") == [(None,)]


async def test_everything_raises_once_it_is_closed() -> None:
    async with opened(new_schema()) as store:
        await store.close()
        await store.close()
        for call in (store.check, store.settle, store.maintain, lambda: store.apply([])):
            with pytest.raises(RuntimeClosed):
                await call()
        with pytest.raises(RuntimeClosed):
            store.statistics()


@pytest.mark.parametrize("options", [{"answer_seconds": 20.0}, {"answer_seconds": 0.0}, {"readers": 0}])
async def test_ill_formed_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        async with opened("x", **options):
            pass


def test_the_schema_is_a_parameter_of_the_url() -> None:
    address = parse_address("postgresql://me:secret@host/db?sslmode=require&schema=my%20own")
    assert (address.url, address.schema) == ("postgresql://me:secret@host/db?sslmode=require", "my own")
    assert "secret" not in address.location
    assert parse_address("postgresql:///db").schema == "runtara"
    assert parameters_of(parse_address("postgresql:///db?host=/tmp&port=7").url)["host"] == "/tmp"


@pytest.mark.parametrize(
    "url", ["postgresql://h/d?schema=", "postgresql://h/d?schema=pg_x", "postgresql://h/d?nonsense=1"]
)
def test_an_ill_formed_url_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        parse_address(url)


async def test_a_runtime_runs_on_postgresql_and_goes_on_after_reopening() -> None:
    url = url_of(new_schema())
    async with runtara.open_runtime(url) as runtime, runtime.register("order-1") as order:
        assert (await order.checkpoint("charged", b"state")).found is False
        await runtime.send_custom_signal("order-1", "paid", b"12")
    async with runtara.open_runtime(url) as runtime, runtime.register("order-1") as order:
        again = await order.checkpoint("charged", b"other")
        assert (again.found, again.state) == (True, b"state")
        waited = await order.wait_signal("paid", timeout=5, checkpoint_id="paid")
        assert waited.payload == b"12"
        await order.complete(b"done")
        assert (await runtime.status("order-1")).status.word == "completed"


def test_without_the_driver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("runtara.persistence.postgres")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ValidationError, match=r"pip install 'runtara\[postgres\]'"):
        postgres_door()


def test_the_driver_is_imported_only_for_postgresql() -> None:
    script = "import sys, runtara, runtara.runtime; print('psycopg' in sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert said.stdout == "False\n"
