"""Looking for damage: every rule has a finding, and damaged pages are findings, not errors."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from runtara.persistence.rows import APPENDED, COMPENSATIONS, HISTORY, INSTANCES, Table
from runtara.persistence.sqlite import SqliteStore
from runtara.persistence.sqlite.damage import MOST, answered
from runtara.records import PayloadKind, PutPayload
from runtara.testing.samples import compensatable, creation, finished, instance, one_of_each
from tests.sqlite_stores import opened
from tests.test_sqlite_faults import PAGE, with_code


async def filled(path: Path) -> None:
    """Two instances that hold something in every table; the first has ended."""
    async with opened(path) as store:
        row = await store.reserve(2)
        puts = [PutPayload(kind=kind, data=b"x") for kind in PayloadKind]
        await store.apply(
            [
                creation(record, compensatable(1), *one_of_each(1)[1:], *puts)
                for record in (finished(row, 9), instance(row + 1))
            ]
        )
        assert await store.verify() == []


def execute(store: SqliteStore, sql: str, *values: object) -> None:
    assert store.write_connection is not None
    store.write_connection.execute(sql, values)


# ---------------------------------------------------------------- rows that contradict each other


@pytest.mark.parametrize("table", HISTORY)
async def test_history_without_an_instance_is_found(table: str, tmp_path: Path) -> None:
    await filled(tmp_path / "a.db")
    async with opened(tmp_path / "a.db") as store:
        execute(store, f"UPDATE {table} SET instance = 99 WHERE instance = 1")  # noqa: S608
        count = len(PayloadKind) if table == "payloads" else 1
        assert await store.verify() == [
            f"{table} holds {count} records of instance 99, which is neither there nor purged"
        ]
        execute(store, "INSERT INTO purged VALUES (99)")
        assert await store.verify() == []


@pytest.mark.parametrize(
    ("sql", "finding"),
    [
        ("INSERT INTO purged VALUES (1)", "instance 1 was purged and is still there"),
        (
            "UPDATE instances SET finished_us = NULL WHERE row = 1",
            "the status of instance 1 and its time of finish contradict each other",
        ),
        (
            "UPDATE instances SET finished_us = 5 WHERE row = 2",
            "the status of instance 2 and its time of finish contradict each other",
        ),
        (
            "UPDATE payloads SET kind = 99 WHERE instance = 2 AND kind = 0",
            "payloads.kind is no known word in 1 records of instance 2",
        ),
    ],
)
async def test_what_contradicts_itself_is_found(sql: str, finding: str, tmp_path: Path) -> None:
    await filled(tmp_path / "a.db")
    async with opened(tmp_path / "a.db") as store:
        execute(store, sql)
        assert await store.verify() == [finding]


TABLES: tuple[Table[Any], ...] = (INSTANCES, COMPENSATIONS, *APPENDED.values())
WORDS = [(table.name, table.columns[at]) for table in TABLES for at, _ in table.decoders]


@pytest.mark.parametrize(("table", "column"), WORDS)
async def test_a_word_that_is_not_known_is_found(table: str, column: str, tmp_path: Path) -> None:
    await filled(tmp_path / "a.db")
    owner = "row" if table == "instances" else "instance"
    async with opened(tmp_path / "a.db") as store:
        execute(store, f"UPDATE {table} SET {column} = 99 WHERE {owner} = 1")  # noqa: S608
        found = await store.verify()
        assert f"{table}.{column} is no known word in 1 records of instance 1" in found


def test_every_word_and_truth_is_looked_at() -> None:
    assert ("instances", "status") in WORDS
    assert ("instances", "reason") in WORDS
    assert ("events", "applied") in WORDS
    assert ("steps", "status") in WORDS
    assert len(WORDS) > 15


# ---------------------------------------------------------------- damaged pages


def damage_page(path: Path, table: str) -> None:
    """Overwrite the first page of a table or an index."""
    connection = sqlite3.connect(path)
    sql = "SELECT rootpage FROM sqlite_schema WHERE name = ?"
    (root,) = connection.execute(sql, (table,)).fetchone()
    connection.close()
    with path.open("r+b") as file:
        file.seek((root - 1) * PAGE)
        file.write(b"\xa5" * PAGE)


@pytest.mark.parametrize("table", ["instances", "purged", *HISTORY, "instances_by_id", "waits_open"])
async def test_a_damaged_page_is_found_and_raises_nothing(table: str, tmp_path: Path) -> None:
    await filled(tmp_path / "a.db")
    damage_page(tmp_path / "a.db", table)
    async with opened(tmp_path / "a.db") as store:
        found = await store.verify()
        assert found
        assert all(isinstance(sentence, str) and "\n" not in sentence for sentence in found)
        assert len(found) < MOST + 40
        assert await store.verify() == found, "it is asked again and nothing is changed"


async def test_the_other_rules_are_looked_at_beside_a_damaged_page(tmp_path: Path) -> None:
    await filled(tmp_path / "a.db")
    async with opened(tmp_path / "a.db") as store:
        execute(store, "INSERT INTO purged VALUES (1)")
    damage_page(tmp_path / "a.db", "events")
    async with opened(tmp_path / "a.db") as store:
        found = await store.verify()
    assert "instance 1 was purged and is still there" in found
    assert any(sentence.startswith("events.type: the store is damaged") for sentence in found), found


async def test_a_broken_chain_of_a_large_value_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    await filled(path)
    async with opened(path) as store:
        execute(store, "UPDATE checkpoints SET state = ? WHERE instance = 1", b"\x07" * 50_000)
    data = path.read_bytes()
    page = data.index(b"\x07" * 4000) // PAGE * PAGE
    path.write_bytes(data[:page] + b"\xff" * 4 + data[page + 4 :])
    async with opened(path) as store:
        assert await store.verify() != []


async def test_pages_that_belong_to_nothing_are_found(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    await filled(path)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA writable_schema = 1")
    connection.execute("DELETE FROM sqlite_schema WHERE name = 'waits_open'")
    connection.execute("PRAGMA writable_schema = RESET")
    connection.close()
    async with opened(path) as store:
        assert any(
            "is never used" in sentence or "never used" in sentence for sentence in await store.verify()
        )


async def test_findings_have_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with opened(path) as store:
        row = await store.reserve(500)
        await store.apply([creation(instance(r)) for r in range(row, row + 500)])
        execute(store, "UPDATE instances SET status = 99, reason = 99, finished_us = NULL")
        found = await store.verify()
        assert 20 < len(found) <= 3 * 20


# ---------------------------------------------------------------- who looks


async def test_a_reader_looks_beside_a_program_that_works(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    await filled(path)
    async with opened(path) as store, opened(path, read_only=True) as looker:
        execute(store, "INSERT INTO purged VALUES (1)")
        assert await looker.verify() == ["instance 1 was purged and is still there"]


def test_what_is_no_damage_is_raised() -> None:
    def interrupted() -> list[str]:
        raise with_code(sqlite3.SQLITE_INTERRUPT)

    with pytest.raises(sqlite3.OperationalError):
        answered("events", interrupted)


def test_findings_before_the_damage_are_kept() -> None:
    def damaged() -> Any:
        yield "one"
        raise with_code(sqlite3.SQLITE_CORRUPT)

    assert answered("events", damaged) == ["one", "events: the store is damaged (made up)"]
