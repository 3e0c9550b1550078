"""Lists: which index each one goes by, and that the way it goes changes nothing in what it gives."""

import sqlite3
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import attrs
import pytest

from runtara.persistence import rows
from runtara.persistence.cursors import Place, encode_cursor
from runtara.persistence.sqlite import indexes, queries, writes
from runtara.persistence.store import (
    CheckpointFilter,
    EventFilter,
    InstanceFilter,
    InstanceOrder,
    PageRequest,
    RecordFilter,
    StepFilter,
)
from runtara.records import (
    CheckpointRecord,
    EventRecord,
    EventType,
    InstanceRecord,
    SignalRecord,
    Status,
    StepRecord,
    StepStatus,
)
from runtara.testing.conformance_walks import in_order, instance_matches
from runtara.testing.samples import TENANT, creation, finished, instance
from tests.sqlite_stores import Recorder, new_database, opened, plan_of

COUNT = 240


def record(n: int) -> InstanceRecord:
    """One of many, of three tenants, five workflows, every status; many are made or end at one instant."""
    fields: dict[str, Any] = {
        "tenant_id": ("acme", "other", "rare")[0 if n % 3 else 1 if n % 7 else 2],
        "instance_id": f"{('order', 'device')[n % 2]}-{n * 37 % COUNT:03}",
        "workflow": None if n % 5 == 0 else f"w{n % 5 if n % 31 else 'rare'}",
        "created_us": n // 3,
        "awaits_client_us": 5 if n % 11 == 0 else None,
    }
    status = Status(1 + n * n % 6)
    if status.is_terminal:
        return finished(n, n * 53 % 90, status=status, **fields)
    return instance(n, status=status, **fields)


RECORDS = [record(n) for n in range(1, COUNT + 1)]

STATUSES: Sequence[frozenset[Status]] = (
    frozenset(),
    frozenset({Status.RUNNING}),
    frozenset({Status.CANCELLED}),
    frozenset({Status.PENDING, Status.COMPLETED, Status.FAILED}),
    frozenset(Status),
)
OTHER_FILTERS: Sequence[dict[str, Any]] = (
    {},
    {"id_prefix": "order-"},
    {"id_prefix": "device-01"},
    {"id_prefix": "none"},
    {"awaits_client": True},
    {"created_from_us": 20, "created_before_us": 50},
    {"finished_from_us": 30},
    {"created_before_us": 60, "finished_before_us": 70, "id_prefix": "order"},
)
FILTERS = [
    InstanceFilter(tenant_id=tenant_id, statuses=statuses, workflow=workflow, **others)
    for tenant_id, statuses, workflow, others in product(
        (None, "acme", "rare", "none"), STATUSES, (None, "w1", "wrare", "none"), OTHER_FILTERS
    )
]
EVERY_LIST = [
    (where, order, descending) for where in FILTERS for order in InstanceOrder for descending in (True, False)
]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sqlite3.Connection]:
    with new_database(tmp_path_factory.mktemp("lists") / "a.db") as database:
        database.execute("BEGIN")
        writes.write(database, [creation(r) for r in RECORDS])
        database.execute("COMMIT")
        yield database


@pytest.fixture(params=["few", "many", "many tenants"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a list goes that is narrowed by a condition of its own: looked up and sorted, or walked."""
    if request.param == "many":
        monkeypatch.setattr(indexes, "FEW", -1)
        monkeypatch.setattr(indexes, "FEW_OF_A_WORKFLOW", -1)
    if request.param == "many tenants":
        monkeypatch.setattr(indexes, "MOST_TENANTS", 2)
    return str(request.param)


def matches(r: InstanceRecord, where: InstanceFilter) -> bool:
    return instance_matches(r, where) and (r.awaits_client_us is not None or not where.awaits_client)


# ---------------------------------------------------------------- what a list gives


def test_every_way_gives_what_a_plain_filter_gives(way: str, filled: sqlite3.Connection) -> None:
    found = 0
    for where, order, descending in EVERY_LIST:
        wanted = in_order([r for r in RECORDS if matches(r, where)], order, descending=descending)
        page = queries.list_instances(filled, where, order, PageRequest(limit=20, descending=descending))
        got = list(page.items)
        if page.next is not None:
            rest = PageRequest(limit=1000, cursor=page.next, descending=descending)
            got += queries.list_instances(filled, where, order, rest).items
        assert got == wanted, (where, order, descending)
        found += len(got)
    assert found > len(EVERY_LIST)


@attrs.define
class MovedMeanwhile(Recorder):
    """Another connection moves the instance 1 once the first rows of a list were asked for."""

    path: Path = attrs.field(kw_only=True)
    moved: bool = False

    def execute(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        cursor = Recorder.execute(self, sql, values)
        if "ORDER BY" in sql and not self.moved:
            self.moved = True
            other = sqlite3.connect(self.path, isolation_level=None)
            other.execute("UPDATE instances SET status = 2 WHERE row = 1")
            other.close()
        return cursor


def test_a_list_of_several_statuses_is_one_moment(tmp_path: Path) -> None:
    """An instance that moves from the second status to the first while the list is read is seen once."""
    with new_database(tmp_path / "a.db") as database:
        writes.write(database, [creation(instance(1, status=Status.SUSPENDED))])
        moving = MovedMeanwhile(database, path=tmp_path / "a.db")
        where = InstanceFilter(statuses=frozenset({Status.RUNNING, Status.SUSPENDED}))
        for status in (Status.SUSPENDED, Status.RUNNING):
            page = queries.list_instances(moving, where, InstanceOrder.CREATED, PageRequest())  # type: ignore[arg-type]
            assert [(r.row, r.status) for r in page.items] == [(1, status)]


async def test_a_list_leaves_nothing_that_pins_the_log(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as store:
        row = await store.reserve(10)
        await store.apply([creation(instance(r, status=Status(1 + r % 3))) for r in range(row, row + 10)])
        where = InstanceFilter(statuses=frozenset({Status.PENDING, Status.RUNNING, Status.SUSPENDED}))
        await store.list_instances(where, InstanceOrder.CREATED, PageRequest(limit=1))
        await store.list_records(row, EventRecord, PageRequest())
        assert store.write_connection is not None
        answer = store.write_connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        assert answer == (0, 0, 0), "nobody reads"


async def test_a_word_that_is_not_known_hides_no_other_instance(tmp_path: Path) -> None:
    async with opened(tmp_path / "a.db") as store:
        row = await store.reserve(2)
        await store.apply([creation(instance(r)) for r in (row, row + 1)])
        assert store.write_connection is not None
        store.write_connection.execute("UPDATE instances SET status = 99 WHERE row = ?", (row,))
        page = await store.list_instances(InstanceFilter(), InstanceOrder.CREATED, PageRequest())
        assert [(r.row, r.status.name) for r in page.items] == [(row + 1, "RUNNING"), (row, "?99")]
        assert {status.name: count for status, count in (await store.counts(TENANT)).items()} == {
            "RUNNING": 1,
            "?99": 1,
        }


# ---------------------------------------------------------------- which way it goes


def deep(where: InstanceFilter, order: InstanceOrder, descending: bool) -> Iterator[PageRequest]:
    """A first page, and one from the middle."""
    name = f"instances/{order.value}/{'desc' if descending else 'asc'}"
    yield PageRequest(descending=descending)
    yield PageRequest(descending=descending, cursor=encode_cursor(name, Place(40, 120)))


BOUNDED_SCANS = (
    "SCAN (subquery-",  # what was counted, up to a bound
    "SCAN tenants",
    "SCAN instances USING INDEX instances_by_creation",  # in the list's order, up to its limit
    "SCAN instances USING COVERING INDEX instances_awaiting",  # counted, up to a bound
    "SCAN instances USING INDEX instances_awaiting",  # then it holds no more than that
)


def test_no_list_reads_or_sorts_a_whole_table(way: str, filled: sqlite3.Connection) -> None:
    for where, order, descending in EVERY_LIST:
        for page in deep(where, order, descending):
            recorder = Recorder(filled)
            queries.list_instances(recorder, where, order, page)  # type: ignore[arg-type]
            for (sql, _), plan in zip(recorder.asked, recorder.plans(), strict=True):
                if "NOT INDEXED WHERE row IN" in sql:
                    assert "SEARCH instances USING INTEGER PRIMARY KEY (rowid=?)" in plan, plan
                    assert plan.count("LIST SUBQUERY") == 1, plan
                    assert way != "many", plan
                else:
                    assert "USE TEMP B-TREE" not in plan, (sql, plan)
                scans = [step for step in plan.split("; ") if step.startswith("SCAN")]
                assert all(step.startswith(BOUNDED_SCANS) for step in scans), (sql, plan)


CREATED, FINISHED = InstanceOrder.CREATED, InstanceOrder.FINISHED
RUNNING = frozenset({Status.RUNNING})
WALKS = [
    (InstanceFilter(), CREATED, "SCAN instances USING INDEX instances_by_creation"),
    (InstanceFilter(statuses=RUNNING), CREATED, "instances_by_status (status=?"),
    (InstanceFilter(tenant_id=TENANT), CREATED, "instances_by_tenant (tenant_id=?"),
    (
        InstanceFilter(tenant_id=TENANT, statuses=RUNNING),
        CREATED,
        "instances_by_tenant_status (tenant_id=? AND status=?",
    ),
    (
        InstanceFilter(tenant_id=TENANT, workflow="w1"),
        CREATED,
        "instances_by_workflow (tenant_id=? AND workflow=? AND status=?",
    ),
    (InstanceFilter(), FINISHED, "instances_by_finish (status=?"),
    (InstanceFilter(tenant_id=TENANT), FINISHED, "instances_by_tenant_finish (tenant_id=? AND status=?"),
]
FEW = [
    (InstanceFilter(id_prefix="a"), "instances_by_id (tenant_id=? AND instance_id>? AND instance_id<?)"),
    (InstanceFilter(tenant_id=TENANT, id_prefix="a"), "instances_by_id (tenant_id=? AND instance_id>?"),
    (InstanceFilter(workflow="w1"), "instances_by_workflow (tenant_id=? AND workflow=?"),
    (InstanceFilter(tenant_id=TENANT, awaits_client=True), "instances_awaiting (tenant_id=?"),
    (
        InstanceFilter(tenant_id=TENANT, finished_from_us=1, finished_before_us=2),
        "instances_by_tenant_finish (tenant_id=? AND status=? AND finished_us>? AND finished_us<?)",
    ),
    (InstanceFilter(finished_from_us=1), "instances_by_finish (status=? AND finished_us>?)"),
]


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize(("where", "order", "index"), WALKS)
def test_a_list_walks_by_its_index(
    where: InstanceFilter, order: InstanceOrder, index: str, descending: bool, filled: sqlite3.Connection
) -> None:
    for page in deep(where, order, descending):
        recorder = Recorder(filled)
        queries.list_instances(recorder, where, order, page)  # type: ignore[arg-type]
        for plan in filter(None, recorder.plans()):
            assert index.removeprefix("SCAN instances USING INDEX ") in plan, plan


@pytest.mark.parametrize(("where", "index"), FEW)
def test_what_few_rows_have_is_counted_by_an_index_that_knows_it(
    where: InstanceFilter, index: str, filled: sqlite3.Connection
) -> None:
    recorder = Recorder(filled)
    queries.list_instances(recorder, where, CREATED, PageRequest())  # type: ignore[arg-type]
    plans = [plan for sql, plan in zip(recorder.asked, recorder.plans(), strict=True) if "count(*)" in sql[0]]
    assert plans
    assert all(f"COVERING INDEX {index}" in plan for plan in plans), plans


def test_counting_ends_where_it_is_more_than_few(
    filled: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = InstanceFilter(tenant_id="acme", id_prefix="o")
    there = sum(r.tenant_id == "acme" and r.instance_id.startswith("o") for r in RECORDS)
    for bound, walks in ((there, False), (there - 1, True)):
        monkeypatch.setattr(indexes, "FEW", bound)
        recorder = Recorder(filled)
        queries.list_instances(recorder, everything, CREATED, PageRequest())  # type: ignore[arg-type]
        counting, listing = (sql for sql, _ in recorder.asked if "instances" in sql)
        assert f"LIMIT {bound + 1})" in counting
        assert ("INDEXED BY instances_by_tenant " in listing) is walks, listing


def test_a_walk_by_finish_passes_others_without_the_table(filled: sqlite3.Connection) -> None:
    sql = (
        "SELECT row FROM instances INDEXED BY instances_by_tenant_finish"
        " WHERE tenant_id = 'a' AND status = 4 AND workflow = 'w' AND created_us > 5"
        " AND finished_us IS NOT NULL ORDER BY finished_us, row"
    )
    plan = plan_of(filled, sql)
    assert "COVERING INDEX" in plan, plan
    assert "TEMP B-TREE" not in plan, plan


# ---------------------------------------------------------------- records of an instance

RECORD_FILTERS: Sequence[tuple[type[Any], RecordFilter | None]] = (
    (CheckpointRecord, None),
    (CheckpointRecord, CheckpointFilter(created_from_us=1, created_before_us=2)),
    (SignalRecord, None),
    (EventRecord, None),
    (EventRecord, EventFilter(type=EventType.CUSTOM, subtype="log", text="x", scope_id="s")),
    (StepRecord, None),
    (StepRecord, StepFilter(statuses=frozenset({StepStatus.FAILED}), step_ids=frozenset({"a", "b"}))),
)


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize(("kind", "where"), RECORD_FILTERS)
def test_records_are_listed_by_their_revisions(
    kind: type[Any], where: RecordFilter | None, descending: bool, filled: sqlite3.Connection
) -> None:
    table = rows.APPENDED[kind].name
    cursor = encode_cursor(f"{table}/1/{'desc' if descending else 'asc'}", Place(5, 5))
    for at in (None, cursor):
        recorder = Recorder(filled)
        page = PageRequest(cursor=at, descending=descending)
        queries.list_records(recorder, 1, kind, page, where)  # type: ignore[arg-type]
        [plan] = recorder.plans()
        assert f"SEARCH c USING INDEX sqlite_autoindex_{table}_1 (instance=?" in plan, plan
        assert "TEMP B-TREE" not in plan, plan
        assert "SCAN" not in plan, plan


# ---------------------------------------------------------------- the other questions


def questions(recorder: Any) -> Iterator[tuple[partial[Any], str]]:
    yield partial(queries.due, recorder, 5, (1, 1), 10), "instances_due (due_us>? AND due_us<?)"
    yield partial(queries.running, recorder, 5, 1, 10), "instances_running (row>?)"
    yield partial(queries.unexplained, recorder, 1, 10), "instances_unexplained (row>?)"
    ended = "(status=? AND finished_us>? AND finished_us<?)"
    for after in (None, (1, 1)):
        asked = partial(queries.terminal, recorder, Status.FAILED, 5, None, after, 10)
        yield asked, f"instances_by_finish {ended}"
        asked = partial(queries.terminal, recorder, Status.FAILED, 5, TENANT, after, 10)
        yield asked, f"instances_by_tenant_finish {ended.replace('(', '(tenant_id=? AND ')}"
    yield partial(queries.counts, recorder, None), "COVERING INDEX instances_by_status"
    yield partial(queries.counts, recorder, TENANT), "COVERING INDEX instances_by_tenant_status (tenant_id=?)"
    yield partial(queries.oldest_finished, recorder), "COVERING INDEX instances_by_finish (status=?"
    yield partial(queries.find, recorder, TENANT, "i"), "instances_by_id (tenant_id=? AND instance_id=?)"


def test_each_question_goes_by_its_index(filled: sqlite3.Connection) -> None:
    recorder = Recorder(filled)
    for question, index in questions(recorder):
        question()
        plans = recorder.plans()
        recorder.asked.clear()
        assert plans
        for plan in plans:
            assert index in plan, plan
            assert "TEMP B-TREE" not in plan, plan


def test_rows_are_counted_without_their_large_values(filled: sqlite3.Connection) -> None:
    recorder = Recorder(filled)
    counts = queries.rows_by_table(recorder)  # type: ignore[arg-type]
    assert counts == {"instances": COUNT} | dict.fromkeys(rows.HISTORY, 0)
    assert all("USING COVERING INDEX" in plan for plan in recorder.plans())


def test_pending_and_open_rows_have_small_indexes(filled: sqlite3.Connection) -> None:
    pending = "SELECT * FROM signals WHERE instance = 1 AND acknowledged_us IS NULL ORDER BY revision"
    still_open = "SELECT * FROM waits WHERE instance = 1 AND outcome IS NULL ORDER BY revision"
    running = f"SELECT * FROM steps WHERE {queries.OPEN_OF_INSTANCE}"  # noqa: S608
    for sql, index in (
        (pending, "signals_pending"),
        (still_open, "waits_open"),
        (running, "steps_running"),
    ):
        plan = plan_of(filled, sql, (1, 5)[: sql.count("?")])
        assert f"INDEX {index}" in plan, plan
        assert "TEMP B-TREE" not in plan, plan


def test_loading_scans_nothing(filled: sqlite3.Connection) -> None:
    plan = plan_of(filled, queries.NEWEST_REVISION, (1,))
    assert plan.count("SEARCH") == len(rows.APPENDED)
    assert "SCAN" not in plan.replace("SCAN CONSTANT ROW", "")
