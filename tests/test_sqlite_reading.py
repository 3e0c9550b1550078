"""Three executors: what actors ask is never behind what takes long, and long questions end when they must."""

import sqlite3
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio
import trio.testing

from runtara.errors import RuntimeClosed, StoreUnavailable
from runtara.executor import InlineExecutor
from runtara.persistence.sqlite import SqliteStore, open_sqlite, reading
from runtara.persistence.store import InstanceFilter, InstanceOrder, PageRequest
from runtara.records import EventRecord, PayloadKind, Status
from runtara.testing.samples import TENANT, checkpoint, creation, instance, unit
from tests.sqlite_stores import opened

T = TypeVar("T")

FOR_EVER = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


def ask_for_ever(connection: sqlite3.Connection) -> None:
    connection.execute(FOR_EVER).fetchone()


# ---------------------------------------------------------------- who answers what


class Named(InlineExecutor):
    """Notes in ``ran`` that it ran something."""

    def __init__(self, name: str, ran: list[str]) -> None:
        self.name, self.ran = name, ran

    async def run(self, call: Callable[[], T]) -> T:
        self.ran.append(self.name)
        return await super().run(call)


def calls(store: SqliteStore, folder: Path) -> dict[str, dict[str, Callable[[], Awaitable[object]]]]:
    """Every question and every change, by who does it."""
    page, everything = PageRequest(), InstanceFilter()
    return {
        "reader": {
            "load": lambda: store.load(TENANT, "i", 1),
            "find": lambda: store.find(TENANT, "i"),
            "checkpoint": lambda: store.checkpoint(1, "c"),
            "wait": lambda: store.wait(1, "w"),
            "request": lambda: store.request(1, "r"),
            "signal": lambda: store.signal(1, 1),
            "error": lambda: store.error(1, 1),
            "attempt": lambda: store.attempt(1, "c", 1),
            "payloads": lambda: store.payloads(1, frozenset(PayloadKind)),
            "compensation_data": lambda: store.compensation_data(1, "c"),
            "due": lambda: store.due(1, None, 1),
            "running": lambda: store.running(1, 0, 1),
            "note": lambda: store.note("n"),
            "notes": lambda: store.notes("n"),
            "check": store.check,
        },
        "lister": {
            "list_instances": lambda: store.list_instances(everything, InstanceOrder.CREATED, page),
            "count_instances": lambda: store.count_instances(everything),
            "list_records": lambda: store.list_records(1, EventRecord, page),
            "count_records": lambda: store.count_records(1, EventRecord),
            "counts": lambda: store.counts(None),
            "unexplained": lambda: store.unexplained(0, 1),
            "growth": store.growth,
            "verify": store.verify,
            "backup": lambda: store.backup(str(folder / "backup.db")),
            "terminal": lambda: store.terminal(Status.FAILED, 1, None, None, 1),
        },
        "writer": {
            "apply": lambda: store.apply([unit(1, 2, checkpoint(2))]),
            "reserve": lambda: store.reserve(1),
            "purge": lambda: store.purge([1], 1),
            "sweep": lambda: store.sweep(1),
            "set_note": lambda: store.set_note("n", "text"),
        },
    }


async def run_by(path: str, folder: Path, *, with_lister: bool = True) -> dict[str, list[str]]:
    """Who ran each call."""
    ran: list[str] = []
    writer, reader, lister = (Named(name, ran) for name in ("writer", "reader", "lister"))
    found: dict[str, list[str]] = {}
    async with open_sqlite(
        path, writer=writer, reader=reader, lister=lister if with_lister else None
    ) as store:
        for each in calls(store, folder).values():
            for name, call in each.items():
                ran.clear()
                await call()
                found[name] = list(ran)
    return found


async def test_what_takes_long_runs_in_the_lister(tmp_path: Path) -> None:
    found = await run_by(str(tmp_path / "a.db"), tmp_path)
    async with opened(":memory:") as store:
        wanted = {name: [who] for who, each in calls(store, tmp_path).items() for name in each}
    assert found == wanted


async def test_by_default_the_reader_does_it(tmp_path: Path) -> None:
    found = await run_by(str(tmp_path / "a.db"), tmp_path, with_lister=False)
    assert {who for each in found.values() for who in each} == {"reader", "writer"}
    assert found["list_instances"] == ["reader"]


async def test_in_memory_the_writer_does_everything(tmp_path: Path) -> None:
    found = await run_by(":memory:", tmp_path)
    assert {who for each in found.values() for who in each} == {"writer"}


async def test_actors_and_writes_pass_a_long_question(tmp_path: Path) -> None:
    go_on = threading.Event()
    async with opened(tmp_path / "a.db", inline=False) as store, trio.open_nursery() as nursery:
        row = await store.reserve(1)
        await store.apply([creation(instance(row))])
        nursery.start_soon(store.ask_at_length, lambda connection: go_on.wait(10))
        await store.apply([unit(row, 2, checkpoint(2))])
        loaded = await store.load(TENANT, f"i{row}", 1)
        assert loaded is not None
        assert loaded.revision == 2
        assert await store.checkpoint(row, "step-2") == checkpoint(2)
        go_on.set()


# ---------------------------------------------------------------- when it must end


async def refused(ask: Callable[[], Awaitable[Any]], words: str) -> None:
    with pytest.raises(StoreUnavailable, match=words):
        await ask()


@pytest.mark.parametrize("end", ["close", "settle"])
async def test_a_question_without_end_does_not_hold_up(end: str, tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db", inline=False) as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row))])
        begun, token = trio.Event(), trio.lowlevel.current_trio_token()

        def ask(connection: sqlite3.Connection) -> None:
            token.run_sync_soon(begun.set)
            ask_for_ever(connection)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(refused, lambda: store.ask_at_length(ask), "was interrupted")
            await begun.wait()
            nursery.start_soon(refused, store.growth, "is being opened again")
            nursery.start_soon(refused, store.verify, "is being opened again")
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(getattr(store, end))
        if end == "settle":
            assert (await store.counts(None)) == {Status.RUNNING: 1}
            assert await store.verify() == []
        else:
            with pytest.raises(RuntimeClosed):
                await store.growth()


async def test_a_statement_that_never_looks_up_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a check of the whole file, most of which is one step."""
    monkeypatch.setattr(reading, "STEPS_BETWEEN_LOOKS", 2**31 - 1)
    async with opened(tmp_path / "a.db", inline=False) as store:
        begun, token = trio.Event(), trio.lowlevel.current_trio_token()

        def ask(connection: sqlite3.Connection) -> None:
            connection.create_function("begun", 0, lambda: token.run_sync_soon(begun.set))
            connection.execute(f"SELECT begun() UNION ALL SELECT * FROM ({FOR_EVER})").fetchall()  # noqa: S608

        async with trio.open_nursery() as nursery:
            nursery.start_soon(refused, lambda: store.ask_at_length(ask), "was interrupted")
            await begun.wait()
            nursery.start_soon(store.close)


async def test_a_question_of_many_statements_ends_between_them(tmp_path: Path) -> None:
    """The interrupt falls where none is running; the next one ends all the same."""
    stopped = threading.Event()
    async with opened(tmp_path / "a.db", inline=False) as store:
        begun, token = trio.Event(), trio.lowlevel.current_trio_token()

        def ask(connection: sqlite3.Connection) -> None:
            token.run_sync_soon(begun.set)
            assert stopped.wait(10)
            ask_for_ever(connection)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(refused, lambda: store.ask_at_length(ask), "was interrupted")
            await begun.wait()
            nursery.start_soon(store.close)
            await trio.testing.wait_all_tasks_blocked()
            stopped.set()


async def test_what_actors_asked_before_the_closing_is_answered(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db", inline=False) as store:
        row = await store.reserve(1)
        await store.apply([creation(instance(row))])
        found: list[object] = []

        async def find() -> None:
            found.append(await store.find(TENANT, f"i{row}"))

        go_on = threading.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.ask, lambda connection: go_on.wait(10))
            nursery.start_soon(find)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(store.close)
            await trio.testing.wait_all_tasks_blocked()
            go_on.set()
        assert found == [instance(row)]


async def test_settling_closes_every_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the question is asked, nobody has the file open: its log is gone with the last connection."""
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(opened(tmp_path / "a.db"))
        await store.reserve(1)
        assert (tmp_path / "a.db-wal").exists()
        there: list[bool] = []
        outcome = SqliteStore.outcome

        def looking(self: SqliteStore) -> Any:
            there.append((tmp_path / "a.db-wal").exists())
            return outcome(self)

        monkeypatch.setattr(SqliteStore, "outcome", looking)
        await store.settle()
        assert there == [False]
        await store.check()
        assert await store.counts(None) == {}
