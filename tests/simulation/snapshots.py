"""What is in the store at one moment, read past the runtime."""

import sqlite3
from typing import Any, Final

import attrs

from runtara.persistence.sqlite import SqliteStore
from runtara.persistence.store import MAX_PAGE, PageRequest
from runtara.records import StepRecord

Row = dict[str, Any]

TABLES: Final = (
    "compensations",
    "compensation_attempts",
    "checkpoints",
    "waits",
    "events",
    "steps",
    "signals",
    "errors",
    "retry_attempts",
    "requests",
    "payloads",
)


@attrs.frozen(kw_only=True)
class Stored:
    """Everything of one instance."""

    instance: Row
    checkpoints: dict[str, Row]
    waits: dict[str, Row]
    signals: dict[int, Row]
    """By revision, as the following."""
    events: dict[int, Row]
    steps: tuple[StepRecord, ...]
    """As the store lists them."""
    errors: dict[int, Row]
    attempts: dict[tuple[str, int], Row]
    requests: dict[str, Row]
    payloads: dict[int, bytes]
    compensations: dict[str, Row]
    revisions: dict[int, frozenset[str]]
    """The tables in which each revision is found."""

    @property
    def newest(self) -> int:
        row_revision: int = self.instance["revision"]
        return max([row_revision, *self.revisions])


@attrs.frozen(kw_only=True)
class Snapshot:
    """The store when nothing was running on it."""

    tick: int
    life: int
    now_us: int
    instances: dict[str, Stored]


def rows_of(connection: sqlite3.Connection, table: str) -> list[Row]:
    cursor = connection.execute(f"SELECT * FROM {table} ORDER BY 1")  # noqa: S608  # our own names
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, values, strict=True)) for values in cursor]


async def read(store: SqliteStore, tick: int, life: int, now_us: int) -> Snapshot:
    """Everything that is in the store."""
    connection = store.write_connection
    assert connection is not None
    tables = {name: rows_of(connection, name) for name in TABLES}
    instances = {}
    for row in rows_of(connection, "instances"):
        own = {name: owned(tables[name], row["row"]) for name in TABLES}
        instances[row["instance_id"]] = stored(row, own, await steps_of(store, row["row"]))
    return Snapshot(tick=tick, life=life, now_us=now_us, instances=instances)


async def steps_of(store: SqliteStore, row: int) -> tuple[StepRecord, ...]:
    page = await store.list_records(row, StepRecord, PageRequest(limit=MAX_PAGE, descending=False))
    assert page.next is None
    return page.items


def owned(rows: list[Row], instance: int) -> list[Row]:
    return [row for row in rows if row["instance"] == instance]


def stored(instance: Row, tables: dict[str, list[Row]], steps: tuple[StepRecord, ...]) -> Stored:
    revisions: dict[int, frozenset[str]] = {}
    for name, rows in tables.items():
        for row in rows:
            if "revision" in row:
                revisions[row["revision"]] = revisions.get(row["revision"], frozenset()) | {name}
    return Stored(
        instance=instance,
        checkpoints={row["checkpoint_id"]: row for row in tables["checkpoints"]},
        waits={row["wait_id"]: row for row in tables["waits"]},
        signals={row["revision"]: row for row in tables["signals"]},
        events={row["revision"]: row for row in tables["events"]},
        steps=steps,
        errors={row["revision"]: row for row in tables["errors"]},
        attempts={(row["checkpoint_id"], row["attempt"]): row for row in tables["retry_attempts"]},
        requests={row["request_id"]: row for row in tables["requests"]},
        payloads={row["kind"]: row["data"] for row in tables["payloads"]},
        compensations={row["checkpoint_id"]: row for row in tables["compensations"]},
        revisions=revisions,
    )
