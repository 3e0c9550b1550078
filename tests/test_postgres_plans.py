"""Each question is answered by an index, in its order; and the tables of history can be partitioned."""

from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from runtara.persistence.cursors import Place, encode_cursor
from runtara.persistence.postgres import PostgresStore, open_postgres, queries
from runtara.persistence.postgres.driver import Statement
from runtara.persistence.postgres.queries import Question
from runtara.persistence.postgres.values import rows
from runtara.persistence.rows import HISTORY
from runtara.persistence.store import EventFilter, InstanceFilter, InstanceOrder, PageRequest
from runtara.records import CheckpointRecord, EventRecord, SignalRecord, Status, StepRecord
from runtara.testing.conformance import SENTENCES, Sentence
from runtara.testing.conformance_writing import OpenStore
from tests.postgres_server import administer, new_schema, server_url

MIDDLE = PageRequest(cursor=encode_cursor("instances/created/desc", Place(10_000, 10_000)))
FINISHED = PageRequest(cursor=encode_cursor("instances/finished/desc", Place(10_000, 10_000)))
DEEP = PageRequest(cursor=encode_cursor("checkpoints/7/desc", Place(500, 500)))

FILL = """
    INSERT INTO {schema}.instances ("row", epoch, revision, attempt, max_attempts, created_us, finished_us,
        last_activity_us, sleep_until_us, awaits_client_us, hosted, status, compensation_state, tenant_id,
        instance_id, workflow)
    SELECT n, 1, 1, 1, 3, n, CASE WHEN status >= 4 THEN n END, n, CASE WHEN n % 2 = 0 THEN n END,
        CASE WHEN n % 97 IN (1, 2) THEN n END, 0, status, 0,
        'tenant-' || n % 200, 'order-' || n, 'flow-' || n / 200 % 10
    FROM (SELECT n, CASE WHEN n % 97 < 3 THEN 1 + n % 97 ELSE 4 + n % 3 END AS status
        FROM generate_series(1, 20000) AS n) AS numbers;
    INSERT INTO {schema}.checkpoints (instance, revision, created_us, checkpoint_id, state)
    SELECT n % 20, n, n, 'step-' || n, '' FROM generate_series(1, 20000) AS n;
    INSERT INTO {schema}.events (instance, revision, created_us, type, applied, payload)
    SELECT n % 20, n, n, 5, 1, '{{}}' FROM generate_series(1, 20000) AS n;
    INSERT INTO {schema}.steps (instance, revision, end_revision, started_us, status, step_id)
    SELECT n % 20, n, n + 20, n, n % 50, 'a' FROM generate_series(1, 20000) AS n;
    INSERT INTO {schema}.signals (instance, revision, created_us, type, acknowledged_us)
    SELECT n % 20, n, n, 4, CASE WHEN n % 50 > 0 THEN n END FROM generate_series(1, 20000) AS n;
"""
"""Twenty thousand instances, nearly all of them ended, and long histories of twenty."""


def questions() -> Iterator[tuple[str, Question[Any], str]]:
    """A name, the question, and an index that must answer it."""
    created, finished = InstanceOrder.CREATED, InstanceOrder.FINISHED
    everyone, tenant = InstanceFilter(), InstanceFilter(tenant_id="tenant-3")
    running, live = frozenset({Status.RUNNING}), frozenset({Status.RUNNING, Status.PENDING})
    flow = attrs.evolve(tenant, workflow="flow-3")
    prefix = attrs.evolve(tenant, id_prefix="order-77")
    lists = queries.list_instances
    yield "all", lists(everyone, created, MIDDLE), "instances_by_creation"
    yield "tenant", lists(tenant, created, MIDDLE), "instances_by_tenant"
    yield "status", lists(attrs.evolve(everyone, statuses=running), created, MIDDLE), "instances_by_status"
    yield "statuses", lists(attrs.evolve(everyone, statuses=live), created, MIDDLE), "instances_by_status"
    yield (
        "tenant, status",
        lists(attrs.evolve(tenant, statuses=running), created, MIDDLE),
        "instances_by_tenant_status",
    )
    yield "workflow", lists(flow, created, MIDDLE), "instances_by_workflow"
    yield "awaiting", lists(attrs.evolve(tenant, awaits_client=True), created, MIDDLE), "instances_awaiting"
    yield "finished", lists(everyone, finished, FINISHED), "instances_by_finish"
    yield "tenant, finished", lists(tenant, finished, FINISHED), "instances_by_tenant_finish"
    yield "prefix", queries.count_instances(prefix), "instances_tenant_digest_instance_id_key"
    yield "counts", queries.counts("tenant-3"), "instances_by_tenant"
    yield "unexplained", queries.unexplained(5, 10), "instances_unexplained"
    yield "due", queries.due(10_000, (9_000, 3), 10), "instances_due"
    yield "running", queries.running(5, 3, 10), "instances_running"
    yield "terminal", queries.terminal(Status.FAILED, 9_000, None, (5, 5), 10), "instances_by_finish"
    yield "find", queries.find("tenant-3", "order-3"), "instances_tenant_digest_instance_id_key"
    yield "checkpoints", queries.list_records(7, CheckpointRecord, DEEP, None), "checkpoints_pkey"
    yield "checkpoint", queries.checkpoint(7, "step-7"), "checkpoints_instance_checkpoint_id_key"
    yield "events", queries.list_records(7, EventRecord, PageRequest(), EventFilter(text="a")), "events_pkey"
    yield "steps", queries.list_records(7, StepRecord, PageRequest(), None), "steps_pkey"
    yield "signals", queries.list_records(7, SignalRecord, PageRequest(), None), "signals_pkey"
    for at, index in ((3, "signals_pending"), (7, "steps_running")):
        load = queries.load("tenant-3", "order-3", 10)
        yield f"load, {index}", attrs.evolve(load, statements=load.statements[at : at + 1]), index


async def plan_of(store: PostgresStore, statement: Statement) -> str:
    """The plan when the server may choose whatever gives rows in order."""
    explain = Statement(b"EXPLAIN " + statement.sql, statement.values, statement.types)
    in_order = Statement(
        b"SELECT set_config('enable_sort', 'off', true), set_config('enable_bitmapscan', 'off', true)"
    )
    question = Question((in_order, explain), lambda results: rows(results[1]))
    return "\n".join(str(line) for (line,) in await store.readers.ask(question))


async def test_every_question_is_answered_by_an_index_and_no_table_is_read_whole() -> None:
    schema = new_schema()
    async with open_postgres(server_url(), schema=schema) as store:
        for sql in FILL.format(schema=schema).split(";")[:-1]:
            administer(sql)
        for table in ("instances", "checkpoints", "events", "steps", "signals"):
            administer(f"ANALYZE {schema}.{table}")
        for name, question, index in questions():
            plan = await plan_of(store, question.statements[-1])
            assert index in plan, f"{name}:\n{plan}"
            assert "Seq Scan on" not in plan.replace("Seq Scan on compensations", ""), f"{name}:\n{plan}"
            assert "Sort  (" not in plan, f"{name}:\n{plan}"


def partition(schema: str) -> None:
    """What docs/postgres.md says, on an empty schema."""
    for table in HISTORY:
        administer(
            f"DO $$ BEGIN ALTER TABLE {schema}.{table} RENAME TO {table}_before;"
            f" CREATE TABLE {schema}.{table} (LIKE {schema}.{table}_before INCLUDING ALL)"
            f" PARTITION BY HASH (instance); DROP TABLE {schema}.{table}_before;"
            f" FOR part IN 0..1 LOOP EXECUTE format('CREATE TABLE {schema}.{table}_%s PARTITION OF"
            f" {schema}.{table} FOR VALUES WITH (MODULUS 2, REMAINDER %s)', part, part); END LOOP; END $$"
        )


def name_of(sentence: object) -> str:
    return str(getattr(sentence, "__name__", sentence))


CHOSEN = {
    "w6_a_checkpoint_is_never_rewritten",
    "r1_load_returns_all_that_an_actor_needs",
    "a8_growth_tells_the_rows_of_every_table",
    "d3_every_table_is_swept",
}
"""Such as read and write every table."""
PARTITIONED = [sentence for sentence in SENTENCES if name_of(sentence) in CHOSEN]


@pytest.mark.parametrize("sentence", PARTITIONED, ids=name_of)
async def test_partitioned_tables_keep_the_contract(sentence: Sentence) -> None:
    schema = new_schema()
    async with open_postgres(server_url(), schema=schema):
        partition(schema)
    open_store: OpenStore = lambda: open_postgres(server_url(), schema=schema)  # noqa: E731
    await sentence(open_store)
    assert len(PARTITIONED) == len(CHOSEN)
