"""Growth, and looking for damage, in schemas that were tampered with."""

from hashlib import sha256
from pathlib import Path

import pytest

from runtara.errors import StoreUnavailable, ValidationError
from runtara.persistence.postgres import PostgresStore, growth, open_postgres
from runtara.records import Status
from runtara.testing import samples
from runtara.testing.samples import creation, finished, instance, unit
from tests.postgres_server import Server, administer, new_schema, new_server, server_url

INCOMPRESSIBLE = b"".join(sha256(bytes([number])).digest() for number in range(256))


async def one_instance(store: PostgresStore) -> int:
    row = await store.reserve(1)
    await store.apply([creation(instance(row), samples.event(1, payload=INCOMPRESSIBLE), samples.step(1))])
    return row


async def test_small_tables_are_counted_and_large_ones_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = new_schema()
    async with open_postgres(server_url(), schema=schema) as store:
        row = await one_instance(store)
        ended = await store.reserve(1)
        await store.apply([creation(finished(ended, 77))])
        found = await store.growth()
        assert found.rows["instances"] == 2
        assert found.rows["events"] == 1
        assert found.rows["checkpoints"] == 0
        assert found.oldest_finished_us == 77
        assert found.file_bytes is not None
        assert found.file_bytes > 100_000
        administer(f"ANALYZE {schema}.instances")
        await store.apply([unit(row, 2, samples.event(2))])
        monkeypatch.setattr(growth, "COUNTED_BYTES", -1)
        estimated = (await store.growth()).rows
        assert estimated["instances"] == 2


async def test_a_sound_store_has_no_findings() -> None:
    schema = new_schema()
    async with open_postgres(server_url(), schema=schema) as store:
        await one_instance(store)
        assert await store.verify() == []


async def test_what_does_not_belong_together_is_found() -> None:
    schema = new_schema()
    async with open_postgres(server_url(), schema=schema) as store:
        row = await one_instance(store)
        for sql in (
            "INSERT INTO {}.checkpoints SELECT 777 + n / 2, n, 1, n, '' FROM generate_series(0, 2) AS n",
            "INSERT INTO {}.payloads VALUES (777, 0, '')",
            "INSERT INTO {}.purged VALUES (778)",
            "INSERT INTO {}.payloads VALUES (1, 9, '')",
            "UPDATE {}.events SET type = 99",
            "UPDATE {}.events SET applied = 2",
            "UPDATE {}.instances SET status = 4, reason = 0",
        ):
            administer(sql.format(schema))
        assert await store.verify() == [
            "checkpoints holds 2 records of instance 777, which is neither there nor purged",
            "payloads holds 1 records of instance 777, which is neither there nor purged",
            f"the status of instance {row} and its time of finish contradict each other",
            f"instances.reason is no known word in 1 records of instance {row}",
            f"events.type is no known word in 1 records of instance {row}",
            f"events.applied is no known word in 1 records of instance {row}",
            "payloads.kind is no known word in 1 records of instance 1",
        ]
        administer(f"INSERT INTO {schema}.purged VALUES ({row})")
        assert f"instance {row} was purged and is still there" in await store.verify()


async def test_lists_show_what_verify_finds() -> None:
    schema = new_schema()
    async with open_postgres(server_url(), schema=schema) as store:
        await one_instance(store)
        administer(f"UPDATE {schema}.instances SET status = 9")
        assert {status.word: count for status, count in (await store.counts(None)).items()} == {"?9": 1}
        assert Status.RUNNING not in await store.counts(None)


def file_of(server: Server, relation: str) -> Path:
    [(path,)] = administer(f"SELECT pg_relation_filepath('{relation}')", url=server.url)
    return server.folder / str(path)


async def test_damage_on_the_disk_is_found() -> None:
    """A value that cannot be read, and, where the extension is there, an index that nothing has asked."""
    server = new_server()
    schema = new_schema()
    try:
        async with open_postgres(server.url, schema=schema) as store:
            await one_instance(store)
        sql = "SELECT reltoastrelid::regclass::text FROM pg_class WHERE oid = %s::regclass"
        [(toast,)] = administer(sql, f"{schema}.events", url=server.url)
        files = [file_of(server, str(toast)), file_of(server, f"{schema}.steps_running")]
        server.stop()
        for page, file in enumerate(files):
            with file.open("r+b") as opened:
                opened.seek(page * 8192)  # the first page of an index holds nothing but where it begins
                opened.write(bytes(range(100)))
        server.start()
        async with open_postgres(server.url, schema=schema, read_only=True) as store:
            found = await store.verify()
            assert [line.partition(" of relation")[0] for line in found] == [
                "events.payload: invalid page in block 0"
            ]
            administer("CREATE EXTENSION amcheck", url=server.url)
            found = await store.verify()
        assert [line.partition(":")[0] for line in found] == [
            "events.payload",
            "table events",
            "index steps_running",
        ]
    finally:
        server.discard()


async def test_a_server_that_is_gone_is_no_finding() -> None:
    server = new_server()
    async with open_postgres(server.url, schema=new_schema(), answer_seconds=0.5) as store:
        server.discard()
        with pytest.raises(StoreUnavailable):
            await store.verify()


async def test_a_backup_is_made_by_other_means(tmp_path: Path) -> None:
    async with open_postgres(server_url(), schema=new_schema()) as store:
        with pytest.raises(ValidationError, match=r"pg_dump.*runtara export") as caught:
            await store.backup(str(tmp_path / "copy"))
        assert caught.value.field == "path"
        assert not (tmp_path / "copy").exists()
