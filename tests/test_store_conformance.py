"""Every sentence of the store's contract, over every backend that is here."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from runtara.executor import Executor, InlineExecutor, ThreadExecutor
from runtara.persistence.postgres import open_postgres
from runtara.persistence.sqlite import SqliteStore, open_sqlite
from runtara.persistence.store import Store
from runtara.testing.conformance import REOPENING, SENTENCES, Sentence, check_store
from tests.postgres_server import new_schema, server_url

EXECUTORS: dict[str, Callable[[str], Executor]] = {
    "thread": ThreadExecutor,
    "inline": lambda name: InlineExecutor(),
}


@asynccontextmanager
async def open_with(path: str, make: Callable[[str], Executor]) -> AsyncIterator[SqliteStore]:
    writer, reader = make("writer"), make("reader")
    try:
        async with open_sqlite(path, writer=writer, reader=reader) as store:
            yield store
    finally:
        await writer.close()
        await reader.close()


def opener(path: str, executor: str) -> Callable[[], AbstractAsyncContextManager[Store]]:
    return lambda: open_with(path, EXECUTORS[executor])


def name_of(sentence: object) -> str:
    return str(getattr(sentence, "__name__", sentence))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("sentence", SENTENCES, ids=name_of)
async def test_a_sqlite_file_keeps_the_contract(sentence: Sentence, executor: str, tmp_path: Path) -> None:
    await sentence(opener(str(tmp_path / "store.db"), executor))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("sentence", [s for s in SENTENCES if s not in REOPENING], ids=name_of)
async def test_sqlite_in_memory_keeps_the_contract(sentence: Sentence, executor: str) -> None:
    await sentence(opener(":memory:", executor))


@pytest.mark.parametrize("sentence", SENTENCES, ids=name_of)
async def test_postgresql_keeps_the_contract(sentence: Sentence) -> None:
    schema = new_schema()
    await sentence(lambda: open_postgres(server_url(), schema=schema))


async def test_check_store_runs_every_sentence(tmp_path: Path) -> None:
    made = 0

    def new_store() -> Callable[[], AbstractAsyncContextManager[Store]]:
        nonlocal made
        made += 1
        return opener(str(tmp_path / f"{made}.db"), "inline")

    await check_store(new_store)
    assert made == len(SENTENCES)


async def test_check_store_names_the_sentence_that_is_broken() -> None:
    with pytest.raises(AssertionError, match="w1_an_applied_batch_is_there_after_reopening: instance i1"):
        await check_store(lambda: opener(":memory:", "inline"))
