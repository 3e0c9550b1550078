"""Every sentence of the store's contract, over every backend that is here."""

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from runtara.executor import Executor, InlineExecutor, ThreadExecutor
from runtara.persistence import store as contract
from runtara.persistence.postgres import open_postgres
from runtara.persistence.sqlite import SqliteStore, open_sqlite
from runtara.persistence.store import Store
from runtara.testing import conformance
from runtara.testing.conformance import REOPENING, SENTENCES, Sentence, check_store
from runtara.testing.conformance_writing import OpenStore
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


def test_each_sentence_of_the_contract_is_checked_and_nothing_else() -> None:
    promised = re.findall(r"^    ([A-Z]\d+)  ", contract.__doc__ or "", re.MULTILINE)
    checked = {name_of(sentence).partition("_")[0].upper() for sentence in SENTENCES}
    assert promised[0] == "W1"
    assert len(promised) == len(set(promised))
    assert checked == set(promised)


def test_no_sentence_is_left_out() -> None:
    written = {
        name
        for path in Path(conformance.__file__).parent.glob("conformance_*.py")
        for name in re.findall(r"^async def ([a-z]\d+_\w+)", path.read_text(), re.MULTILINE)
    }
    names = [name_of(sentence) for sentence in SENTENCES]
    assert sorted(names) == sorted(written)


@pytest.mark.parametrize("reopens", [True, False])
async def test_check_store_runs_every_sentence_on_a_store_of_its_own(
    reopens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[Sentence, OpenStore] = {}

    def recorded(sentence: Sentence) -> Sentence:
        async def record(open_store: OpenStore) -> None:
            given[sentence] = open_store

        return record

    recorders = {sentence: recorded(sentence) for sentence in SENTENCES}
    monkeypatch.setattr(conformance, "SENTENCES", tuple(recorders.values()))
    monkeypatch.setattr(conformance, "REOPENING", frozenset(recorders[s] for s in REOPENING))
    await check_store(lambda: opener(":memory:", "inline"), reopens=reopens)
    assert set(given) == set(SENTENCES) - (frozenset() if reopens else REOPENING)
    assert len({id(open_store) for open_store in given.values()}) == len(given)


async def test_check_store_names_the_sentence_that_is_broken() -> None:
    with pytest.raises(AssertionError, match="w1_an_applied_batch_is_there_after_reopening: instance i1"):
        await check_store(lambda: opener(":memory:", "inline"))
