"""Each question is answered by an index, in its order; and the tables of history can be partitioned."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from runtara.persistence.cursors import Place, encode_cursor
from runtara.persistence.postgres import PostgresStore, open_postgres, queries
from runtara.persistence.postgres.driver import Statement
from runtara.persistence.postgres.queries import Question
from runtara.persistence.postgres.values import rows
from runtara.persistence.store import InstanceFilter, InstanceOrder, PageRequest
from runtara.records import CheckpointRecord, EventRecord, SignalRecord, Status
from runtara.testing import samples
from runtara.testing.conformance import SENTENCES, Sentence
from runtara.testing.conformance_writing import OpenStore
from runtara.testing.samples import TENANT, creation, instance, unit
from tests.postgres_server import administer, new_schema, server_url

MIDDLE = PageRequest(cursor=encode_cursor("instances/created/desc", Place(5, 5)))
FINISHED = PageRequest(cursor=encode_cursor("instances/finished/desc", Place(5, 5)))
DEEP = PageRequest(cursor=encode_cursor("checkpoints/1/desc", Place(5, 5)))


def questions() -> Iterator[tuple[str, Question[Any], str]]:
    """A name, the question, and an index that must answer it."""
    created, finished = InstanceOrder.CREATED, InstanceOrder.FINISHED
    everyone, tenant = InstanceFilter(), InstanceFilter(tenant_id=TENANT)
    running = InstanceFilter(tenant_id=TENANT, statuses=frozenset({Status.RUNNING}))
    prefix = InstanceFilter(tenant_id=TENANT, id_prefix="order-")
    yield "all", queries.list_instances(everyone, created, MIDDLE), "instances_by_creation"
    yield "tenant", queries.list_instances(tenant, created, MIDDLE), "instances_by_tenant"
    yield "status", queries.list_instances(running, created, MIDDLE), "instances_by_status"
    yield "finished", queries.list_instances(everyone, finished, FINISHED), "instances_by_finish"
    yield "tenant, finished", queries.list_instances(tenant, finished, FINISHED), "instances_by_tenant_finish"
    yield "prefix", queries.count_instances(prefix), "instances_tenant_id_instance_id_key"
    yield "due", queries.due(5, (4, 3), 10), "instances_due"
    yield "running", queries.running(5, 3, 10), "instances_running"
    yield "find", queries.find(TENANT, "i1"), "instances_tenant_id_instance_id_key"
    yield "checkpoints", queries.list_records(1, CheckpointRecord, DEEP, None), "checkpoints_pkey"
    yield "checkpoint", queries.checkpoint(1, "a"), "checkpoints_instance_checkpoint_id_key"
    yield "events", queries.list_records(1, EventRecord, PageRequest(), None), "events_pkey"
    yield (
        "signals",
        queries.list_records(1, SignalRecord, PageRequest(descending=False), None),
        "signals_pkey",
    )


async def plan_of(store: PostgresStore, statement: Statement) -> str:
    """The plan when the server may choose whatever avoids reading a whole table and sorting it."""
    explain = Statement(b"EXPLAIN " + statement.sql, statement.values, statement.types)
    limits = Statement(
        b"SELECT set_config('enable_seqscan', 'off', true), set_config('enable_sort', 'off', true),"
        b" set_config('enable_bitmapscan', 'off', true)"
    )
    question = Question((limits, explain), lambda results: rows(results[1]))
    return "\n".join(str(line) for (line,) in await store.readers.ask(question))


async def test_every_question_has_an_index_that_gives_its_order() -> None:
    async with open_postgres(server_url(), schema=new_schema()) as store:
        first = await store.reserve(200)
        await store.apply(
            [
                creation(instance(row, status=Status(1 + row % 6), finished_us=row))
                for row in range(first, first + 200)
            ]
        )
        await store.apply([unit(first, n, samples.checkpoint(n), samples.event(n)) for n in range(2, 200)])
        administer(f"ANALYZE {store.writer.connector.address.schema}.instances")
        for name, question, index in questions():
            plan = await plan_of(store, question.statements[-1])
            assert index in plan, f"{name}:\n{plan}"
            assert "Sort" not in plan, f"{name}:\n{plan}"
            assert "Seq Scan" not in plan, f"{name}:\n{plan}"


PARTITIONED: Sequence[str] = (
    "checkpoints",
    "waits",
    "events",
    "signals",
    "retry_attempts",
    "errors",
    "compensation_attempts",
    "requests",
    "compensations",
    "payloads",
)


def partition(schema: str) -> None:
    """What docs/postgres.md says, on an empty schema."""
    for table in PARTITIONED:
        administer(
            f"DO $$ BEGIN ALTER TABLE {schema}.{table} RENAME TO {table}_before;"
            f" CREATE TABLE {schema}.{table} (LIKE {schema}.{table}_before INCLUDING ALL)"
            f" PARTITION BY HASH (instance); DROP TABLE {schema}.{table}_before;"
            f" FOR part IN 0..3 LOOP EXECUTE format('CREATE TABLE {schema}.{table}_%s PARTITION OF"
            f" {schema}.{table} FOR VALUES WITH (MODULUS 4, REMAINDER %s)', part, part); END LOOP; END $$"
        )


def name_of(sentence: object) -> str:
    return str(getattr(sentence, "__name__", sentence))


@pytest.mark.parametrize("sentence", SENTENCES[:14:2], ids=name_of)
async def test_partitioned_tables_keep_the_contract(sentence: Sentence) -> None:
    schema = new_schema()
    async with open_postgres(server_url(), schema=schema):
        partition(schema)
    open_store: OpenStore = lambda: open_postgres(server_url(), schema=schema)  # noqa: E731
    await sentence(open_store)
