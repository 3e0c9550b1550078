"""A dump of a store that works, restored elsewhere by what the page about PostgreSQL says."""

import re
import subprocess
from pathlib import Path

from runtara.persistence.postgres import open_postgres
from runtara.persistence.store import PageRequest
from runtara.records import CheckpointRecord
from runtara.testing import samples
from runtara.testing.samples import NAUGHTY, creation, instance, unit
from tests.postgres_server import ROOT, administer, binary, new_schema, shared_server

AFTERWARDS = re.compile(r"^UPDATE runtara\.(\w+ SET .*);$", re.M)


async def test_a_dump_made_while_a_runtime_works_is_restored(tmp_path: Path) -> None:
    schema = new_schema()
    url, file = shared_server().url, tmp_path / "dump"
    elsewhere = url.removesuffix("postgres") + schema
    async with open_postgres(url, schema=schema) as store:
        row = await store.reserve(1)
        record = instance(row, tenant_id=NAUGHTY, instance_id=NAUGHTY)
        checkpoint = samples.checkpoint(2, state=bytes(range(256)))
        await store.apply([creation(record), unit(row, 2, checkpoint)])
        subprocess.run([binary("pg_dump"), url, "-n", schema, "-Fc", "-f", file], check=True)
        given = await store.reserve(1_000_000)
    administer(f"CREATE DATABASE {schema}")
    subprocess.run([binary("pg_restore"), "-d", elsewhere, file], check=True)
    page = (ROOT / "docs" / "postgres.md").read_text(encoding="utf-8")
    for change in AFTERWARDS.findall(page):
        administer(f"UPDATE {schema}.{change}", url=elsewhere)
    async with open_postgres(elsewhere, schema=schema) as store:
        assert await store.find(NAUGHTY, NAUGHTY) == record
        assert (await store.list_records(row, CheckpointRecord, PageRequest())).items == (checkpoint,)
        assert await store.verify() == []
        assert await store.reserve(1) > given + 1_000_000
        assert await store.apply([unit(row, 3, samples.checkpoint(3))]) == frozenset()
