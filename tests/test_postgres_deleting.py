"""Purge and sweep on PostgreSQL: what one transaction does at most, and what keeps it from mistakes."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from runtara.errors import LeaseLost, StoreUnavailable, ValidationError
from runtara.persistence.postgres import PostgresStore, open_postgres
from runtara.persistence.rows import HISTORY
from runtara.persistence.store import PageRequest, Purged
from runtara.records import CheckpointRecord, EventRecord, PayloadKind, PutPayload
from runtara.testing import samples
from runtara.testing.samples import TENANT, creation, finished, instance, unit
from tests.postgres_proxy import open_proxy
from tests.postgres_server import administer, new_schema, server_url

COMMIT = b"COMMIT\0"


@asynccontextmanager
async def opened(url: str | None = None) -> AsyncIterator[PostgresStore]:
    async with open_postgres(url or server_url(), schema=new_schema()) as store:
        yield store


async def ended_instance(store: PostgresStore, checkpoints: int, size: int = 1) -> int:
    """A completed instance with so many checkpoints of a size, as many events, and an input."""
    row = await store.reserve(1)
    await store.apply([creation(instance(row))])
    revisions = range(2, checkpoints + 2)
    await store.apply(
        [
            unit(row, n, samples.checkpoint(n, state=b"s" * size), samples.event(n, payload=b"p"))
            for n in revisions
        ]
    )
    end = checkpoints + 2
    put = PutPayload(kind=PayloadKind.INPUT, data=b"input")
    await store.apply([unit(row, end, finished(row, 99, revision=end), put)])
    return row


def left(store: PostgresStore) -> dict[str, int]:
    """How many rows of history each table holds, of those that hold any."""
    schema = store.writer.connector.address.schema
    found = {table: administer(f"SELECT count(*) FROM {schema}.{table}")[0][0] for table in HISTORY}
    return {table: count for table, count in found.items() if isinstance(count, int) and count}


async def test_each_transaction_deletes_up_to_its_measure_and_no_further() -> None:
    async with opened() as store:
        row = await ended_instance(store, checkpoints=50)
        kept = await ended_instance(store, checkpoints=3)
        assert await store.purge([row], most=30) == Purged(rows=frozenset({row}), children_left=True)
        assert sum(left(store).values()) == (50 + 50 + 1 - 30) + 7
        assert await store.find(TENANT, f"i{row}") is None
        assert await store.sweep(most=30) is True
        assert await store.sweep(most=30) is True
        assert await store.sweep(most=30) is False
        assert left(store) == {"checkpoints": 3, "events": 3, "payloads": 1}
        page = await store.list_records(kept, CheckpointRecord, PageRequest())
        assert len(page.items) == 3


async def test_a_large_value_counts_for_what_it_weighs() -> None:
    async with opened() as store:
        row = await ended_instance(store, checkpoints=10, size=40_960)
        await store.purge([row], most=30)  # 1 + 10 each, and the third one reaches it
        assert left(store)["checkpoints"] == 7


async def test_a_purge_of_nothing_that_has_ended_changes_nothing() -> None:
    async with opened() as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row), samples.event(1))])
        nothing = Purged(rows=frozenset(), children_left=False)
        assert await store.purge([row, row + 1], most=10) == nothing
        assert await store.purge([], most=10) == nothing
        assert await store.sweep(most=10) is False
        assert len((await store.list_records(row, EventRecord, PageRequest())).items) == 1


async def test_a_purge_whose_answer_is_lost_is_asked_again_without_harm() -> None:
    async with open_proxy(server_url()) as proxy, opened(proxy.url) as store:
        row = await ended_instance(store, checkpoints=5)
        for cut in ("cut_before", "cut_after"):
            setattr(proxy, cut, COMMIT)
            with pytest.raises(StoreUnavailable):
                await store.purge([row], most=3)
        assert await store.find(TENANT, f"i{row}") is None
        assert await store.purge([row], most=3) == Purged(rows=frozenset(), children_left=False)
        while await store.sweep(most=3):
            pass
        assert left(store) == {}


async def test_who_lost_the_lease_deletes_nothing() -> None:
    async with opened() as store:
        row = await ended_instance(store, checkpoints=5)
        administer(f"UPDATE {store.writer.connector.address.schema}.runtimes SET owner = 'x'")
        for _ in range(2):
            with pytest.raises(LeaseLost):
                await store.purge([row], most=100)
        with pytest.raises(LeaseLost):
            await store.set_note("retention", "on")
        assert await store.find(TENANT, f"i{row}") is not None
        assert left(store)["checkpoints"] == 5
        assert await store.note("retention") is None


@pytest.mark.parametrize("most", [0, -1])
async def test_a_measure_of_nothing_is_refused(most: int) -> None:
    async with opened() as store:
        with pytest.raises(ValidationError, match="most"):
            await store.purge([1], most)
        with pytest.raises(ValidationError, match="most"):
            await store.sweep(most)
