"""A store to lines and back: the same on both backends, and from one to the other."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given, settings

from runtara.errors import ImportUnfinished
from runtara.persistence.postgres import open_postgres
from runtara.persistence.store import InstanceFilter, InstanceOrder, Loaded, PageRequest, Store
from runtara.records import InstanceRecord, PayloadKind, PutPayload, Status
from runtara.testing import samples
from runtara.transfer.exporting import Exported
from runtara.transfer.items import Progress
from runtara.transfer.streams import HELD
from tests.postgres_server import new_schema, server_url
from tests.sqlite_stores import opened
from tests.transfer_samples import Sample, fill, stores
from tests.transfers import Exporting, begin_export, content, exported, imported


def memory() -> AbstractAsyncContextManager[Store]:
    return opened(":memory:")


@asynccontextmanager
async def postgres() -> AsyncIterator[Store]:
    async with open_postgres(server_url(), schema=new_schema()) as store:
        yield store


async def everything(store: Store) -> list[InstanceRecord]:
    page = await store.list_instances(
        InstanceFilter(), InstanceOrder.CREATED, PageRequest(limit=1000, descending=False)
    )
    return list(page.items)


def without_row(loaded: Loaded | None) -> Loaded:
    assert loaded is not None
    return attrs.evolve(loaded, record=attrs.evolve(loaded.record, row=0))


async def assert_same(one: Store, other: Store) -> None:
    """What actors would load from the stores is the same, and so are the payloads."""
    pairs = list(zip(await everything(one), await everything(other), strict=True))
    for first, second in pairs:
        key = (first.tenant_id, first.instance_id)
        assert without_row(await one.load(*key, 100)) == without_row(await other.load(*key, 100))
        kinds = frozenset(PayloadKind)
        assert await one.payloads(first.row, kinds) == await other.payloads(second.row, kinds)


# ------------------------------------------------------------ there and back


async def by_way_of(found: list[Sample], *ways: Any) -> None:
    async with memory() as first:
        await fill(first, found)
        lines = await exported(first)
        for way in ways:
            async with way() as store:
                before = lines
                done = await imported(store, lines)
                assert done.counts.get("instance", 0) == len(found)
                lines = await exported(store)
                assert content(lines) == content(before)
                await assert_same(first, store)
                if found:
                    assert await store.reserve(1) > max(sample.record.epoch for sample in found)


@settings(max_examples=20, deadline=None)
@given(stores)
def test_what_was_exported_is_imported_exactly(found: list[Sample]) -> None:
    trio.run(by_way_of, found, memory, memory)


@settings(max_examples=4, deadline=None)
@given(stores)
def test_sqlite_to_postgresql_and_back_loses_nothing(found: list[Sample]) -> None:
    trio.run(by_way_of, found, postgres, memory)


async def test_an_empty_store_is_an_export_without_instances() -> None:
    async with memory() as store, memory() as other:
        lines = await exported(store)
        assert lines.count(b"\n") == 2
        done = await imported(other, lines)
        assert (done.counts, done.existing, done.before) == ({}, 0, False)
        assert await store.reserve(1) == 1


async def test_many_records_and_large_ones_come_over_in_several_batches() -> None:
    """More than one page, and more than an export holds in memory before the instance is whole."""
    async with memory() as store, memory() as other:
        row = await store.reserve(1)
        await store.apply([samples.creation(samples.instance(row, instance_id="i"))])
        for first in range(1, 2501, 500):
            units = [samples.unit(row, n, samples.event(n)) for n in range(first, first + 500)]
            await store.apply(units)
        size = 2 * 2**20
        for n in range(1, HELD // size + 3):
            await store.apply([samples.unit(row, n, samples.checkpoint(n, state=bytes([n]) * size))])
        lines = await exported(store)
        await imported(other, lines, chunk=100_000)
        assert content(await exported(other)) == content(lines)
        assert other.statistics().batches > 2


# ------------------------------------------------------------ what is asked for


async def three(store: Store) -> None:
    """A running instance of acme, a completed one of acme, and a running one of bank."""
    row = await store.reserve(3)
    await store.apply(
        [
            samples.creation(samples.instance(row, instance_id="a")),
            samples.creation(samples.finished(row + 1, 5, instance_id="b")),
            samples.creation(samples.instance(row + 2, instance_id="a", tenant_id="bank")),
        ]
    )


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [("acme", "a"), ("acme", "b"), ("bank", "a")]),
        ({"tenant_id": "acme"}, [("acme", "a"), ("acme", "b")]),
        ({"statuses": frozenset({Status.RUNNING})}, [("acme", "a"), ("bank", "a")]),
        ({"statuses": frozenset({Status.FAILED, Status.COMPLETED})}, [("acme", "b")]),
        ({"tenant_id": "nobody"}, []),
    ],
)
async def test_only_what_was_asked_for_is_exported(
    options: dict[str, Any], wanted: list[tuple[str, str]]
) -> None:
    async with memory() as store, memory() as other:
        await three(store)
        await imported(other, await exported(store, **options))
        assert [(one.tenant_id, one.instance_id) for one in await everything(other)] == wanted


async def test_an_instance_that_has_moved_on_to_another_status_is_left_out() -> None:
    async with memory() as store:
        await three(store)

        class Moving(Exporting):
            async def write(self, data: bytes) -> None:
                if not self.data:
                    done = samples.finished(1, 9, instance_id="a", revision=2)
                    await store.apply([samples.unit(1, 2, done)])
                await super().write(data)

        exporting = Moving()
        await exporting.run(store, statuses=frozenset({Status.RUNNING}))
        assert [line for line in exporting.lines if b'"t":"instance"' in line and b'"acme"' in line] == []
        assert len(exporting.lines) == 4


async def test_progress_and_the_summary_tell_what_was_written() -> None:
    seen: list[Progress] = []
    async with memory() as store:
        await three(store)
        exporting = Exporting()
        done: Exported = await exporting.run(store, report=seen.append)
        lines = await exported(store)
        assert bytes(exporting.data) == lines
    assert seen[-1] == Progress(
        verb="exported", instances=3, lines=3, bytes=done.bytes - len(exporting.lines[-1]), of=3
    )
    assert [progress.instances for progress in seen] == sorted(progress.instances for progress in seen)
    assert (done.counts, done.bytes, done.skipped) == ({"instance": 3}, len(lines), 0)


# ------------------------------------------------------------ while the store is at work


async def test_what_is_created_meanwhile_is_not_in_the_export_and_does_not_prolong_it() -> None:
    async with memory() as store:
        await three(store)

        class Growing(Exporting):
            async def write(self, data: bytes) -> None:
                row = await store.reserve(1)
                await store.apply(
                    [
                        samples.creation(
                            samples.instance(row, instance_id=f"new {row}", created_us=10**6 + row)
                        )
                    ]
                )
                await super().write(data)

        exporting = Growing()
        done = await exporting.run(store)
        assert done.counts == {"instance": 3}


async def test_what_is_purged_while_it_is_read_leaves_nothing_behind() -> None:
    async with memory() as store:
        await three(store)

        class Purging:
            """The store, in which an instance is purged when its events are asked for."""

            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

            async def list_records(self, row: int, kind: type[Any], page: PageRequest) -> Any:
                if row == 2:
                    await store.purge([2], 100)
                return await store.list_records(row, kind, page)

        exporting = Exporting()
        done = await exporting.run(Purging())  # type: ignore[arg-type]  # it is one by `__getattr__`
        assert done.counts == {"instance": 2}
        assert b'"instance_id":"b"' not in exporting.data


async def test_an_id_that_was_purged_and_used_again_is_another_instance() -> None:
    async with memory() as store:
        await three(store)

        class Renewing(Exporting):
            async def write(self, data: bytes) -> None:
                if not self.data:
                    await store.purge([2], 100)
                    await store.apply(
                        [samples.creation(samples.instance(9, instance_id="b", created_us=1002))]
                    )
                await super().write(data)

        exporting = Renewing()
        assert (await exporting.run(store)).counts == {"instance": 3}
        found = [line for line in exporting.lines if b'"instance_id":"b"' in line]
        assert len(found) == 1
        assert b'"status":"running"' in found[0]


async def test_an_unfinished_import_is_not_exported() -> None:
    async with memory() as store:
        await store.set_note("import", "{}")
        with pytest.raises(ImportUnfinished, match=":memory: has not ended"):
            await begin_export(store, Exporting().write)


async def test_a_payload_of_every_kind_comes_over() -> None:
    async with memory() as store, memory() as other:
        row = await store.reserve(1)
        put = [PutPayload(kind=kind, data=kind.word.encode()) for kind in PayloadKind]
        await store.apply([samples.creation(samples.instance(row), *put)])
        await imported(other, await exported(store))
        [there] = await everything(other)
        assert await other.payloads(there.row, frozenset(PayloadKind)) == {
            kind: kind.word.encode() for kind in PayloadKind
        }
