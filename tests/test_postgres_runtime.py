"""A runtime on PostgreSQL whose connections break in the middle of things: what its callers see."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio

import runtara
from runtara import Instance, Runtime, Status
from tests.postgres_pooler import open_pooler
from tests.postgres_proxy import Proxy, open_proxy
from tests.postgres_server import new_schema, server_url, url_of
from tests.runtimes import runtime

TIMES = 20
COMMIT = b"COMMIT\0"
READER = b"READ ONLY"
CUTS = pytest.mark.parametrize("cut", ["cut_before", "cut_after"])


@asynccontextmanager
async def behind_proxy(**options: Any) -> AsyncIterator[tuple[Runtime, Proxy]]:
    """A runtime whose way to the server is in the test's hands; only what writes is cut."""
    async with (
        open_proxy(server_url()) as proxy,
        runtime(url_of(new_schema(), proxy.url), **options) as rt,
    ):
        proxy.but = READER
        yield rt, proxy


async def insist(call: Callable[[], Awaitable[Any]]) -> Any:
    """What ``call`` answers; asked again as long as it says that this may help."""
    for _ in range(20):
        try:
            return await call()
        except runtara.RuntaraError as error:
            if not error.retryable:
                raise
    raise AssertionError("still refused")


async def register(rt: Runtime, name: str) -> int:
    async with rt.register(name) as inst:
        return inst.epoch


@CUTS
async def test_a_registration_whose_commit_is_cut_is_made_once(cut: str) -> None:
    async with behind_proxy() as (rt, proxy):
        for number in range(TIMES):
            setattr(proxy, cut, COMMIT)
            epoch = await insist(lambda n=number: register(rt, f"i{n}"))  # type: ignore[misc]
            record = await rt.system.store.find("default", f"i{number}")
            assert record is not None
            assert (record.epoch, record.attempt) == (epoch, 1)
            started = await rt.list_events(f"i{number}", type=runtara.EventType.STARTED)
            assert len(started.items) == 1
        assert proxy.cuts == TIMES
        assert await rt.count_instances() == TIMES


@CUTS
async def test_what_a_session_says_is_written_once_whatever_commit_is_cut(cut: str) -> None:
    """Checkpoints, signals, acknowledgements and the end, each cut again and again."""
    async with behind_proxy() as (rt, proxy):
        for number in range(TIMES):
            name = f"i{number}"
            async with rt.register(name) as inst:
                for call in steps(rt, inst, name):
                    setattr(proxy, cut, COMMIT)
                    await insist(call)
                    assert getattr(proxy, cut) is None
            await assert_written_once(rt, name)
        assert proxy.cuts == TIMES * 4


def steps(rt: Runtime, inst: Instance, name: str) -> Iterator[Callable[[], Awaitable[object]]]:
    yield lambda: inst.checkpoint("c", b"state")
    yield lambda: rt.send_custom_signal(name, "key", b"payload", idempotency_key="once")
    yield lambda: inst.ack(min(inst.inbox.signals))
    yield lambda: inst.complete(b"output")


async def assert_written_once(rt: Runtime, name: str) -> None:
    [checkpoint] = (await rt.list_checkpoints(name)).items
    assert (checkpoint.checkpoint_id, checkpoint.state) == ("c", b"state")
    [signal] = (await rt.list_signals(name)).items
    assert signal.payload == b"payload"
    assert signal.acknowledged_us is not None
    view = await rt.status(name)
    assert (view.status, view.output) == (Status.COMPLETED, b"output")
    [ended] = (await rt.list_events(name, type=runtara.EventType.COMPLETED)).items
    assert ended.applied


async def test_an_outage_at_commit_is_outlived() -> None:
    """The server is away for longer than callers wait; the runtime stays, and tells what became of it."""
    async with behind_proxy(store_seconds=1.0) as (rt, proxy), rt.register("a") as inst:
        proxy.down, proxy.cut_after = True, COMMIT
        with pytest.raises(runtara.OutcomeUnknown):
            await inst.checkpoint("lost", b"1")
        with pytest.raises(runtara.StoreUnavailable):
            await inst.checkpoint("later", b"2")
        proxy.down = False
        again = await insist(lambda: inst.checkpoint("lost", b"3"))
        assert (again.found, again.state) == (True, b"1")
        assert (await insist(lambda: inst.checkpoint("later", b"2"))).found is False
        assert rt.statistics().writer.degraded_since is None


async def test_instances_go_on_while_a_pooler_restarts() -> None:
    async with (
        open_pooler(server_url()) as pooler,
        runtime(url_of(new_schema(), pooler.url)) as rt,
        trio.open_nursery() as nursery,
    ):

        async def work(name: str) -> None:
            async with rt.register(name) as inst:
                for number in range(20):
                    await insist(lambda n=number: inst.checkpoint(f"c{n}", b"x"))  # type: ignore[misc]
                await insist(inst.complete)
            assert (await rt.list_checkpoints(name, limit=100)).items[0].checkpoint_id == "c19"
            assert len((await rt.list_checkpoints(name, limit=100)).items) == 20

        for number in range(4):
            nursery.start_soon(work, f"i{number}")
        for _ in range(3):
            before = pooler.transactions
            while pooler.transactions < before + 10:
                await trio.lowlevel.checkpoint()
            pooler.restart()
