"""What can be asked of a store alone, and of a runtime: every question, every filter, on both stores."""

import datetime
import sqlite3
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import attrs
import pytest
import trio

import runtara
from runtara import InstanceOrder, Reader, Reason, Status, StepStatus, Stuck, WaitOutcome
from runtara.questions import Question, questions_of
from tests.operated import HOSTILE, NOON, at, make_store, resting, units, written
from tests.postgres_server import administer, new_schema, url_of
from tests.runtimes import runtime
from tests.runtimes import url_of as file_url

SECOND = datetime.timedelta(seconds=1)
QUESTIONS = questions_of(Reader)


def fields_of(question: Question) -> list[str]:
    return [field.name for field in attrs.fields(question.arguments)]


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store that the tests of this module only read."""
    if request.param == "sqlite":
        made = file_url(tmp_path_factory.mktemp("reader") / "a.db")
    else:
        made = url_of(new_schema())
    trio.run(make_store, made)
    return made


def ids(page: "runtara.Page[Any]") -> list[str]:
    return [record.instance_id for record in page.items]


def revisions(page: "runtara.Page[Any]") -> list[int]:
    return [record.revision for record in page.items]


def unordered(where: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in where.items() if name != "descending"}


# ---------------------------------------------------------------- instances


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ({}, ["stuck", "waiting", "idle", "lost", "paid"]),
        ({"descending": False}, ["paid", "lost", "idle", "waiting", "stuck"]),
        ({"statuses": frozenset({Status.FAILED, Status.COMPLETED})}, ["lost", "paid"]),
        ({"statuses": frozenset({"failed"})}, ["lost"]),
        ({"statuses": frozenset({Status.RUNNING})}, []),
        ({"workflow": "orders"}, ["lost", "paid"]),
        ({"workflow": "order"}, []),
        ({"id_prefix": "s"}, ["stuck"]),
        ({"id_prefix": "%"}, []),
        ({"id_prefix": "a\0"}, []),
        ({"created_from": at(1), "created_before": at(3)}, ["idle", "lost"]),
        ({"finished_from": at(60), "finished_before": at(120)}, ["paid"]),
        ({"finished_from": NOON + 61 * SECOND}, ["lost"]),
        ({"awaits_client": True}, ["idle"]),
        ({"order": InstanceOrder.FINISHED}, ["lost", "paid"]),
        ({"order": "finished", "descending": False}, ["paid", "lost"]),
    ],
)
async def test_instances_are_listed_and_counted_by_every_filter(
    url: str, where: dict[str, Any], found: list[str]
) -> None:
    async with runtara.open_reader(url, tenant="default") as reader:
        assert ids(await reader.list_instances(**where)) == found
        if "order" not in where:
            assert await reader.count_instances(**unordered(where)) == len(found)


def zone(hours: float) -> datetime.timezone:
    return datetime.timezone(datetime.timedelta(hours=hours))


@pytest.mark.parametrize(
    "moment",
    [
        NOON + SECOND,
        (NOON + SECOND).astimezone(zone(5.5)),
        (NOON + SECOND).astimezone(zone(-8)),
        datetime.datetime.fromisoformat("2026-01-31T12:00:01Z"),
        datetime.datetime.fromisoformat("2026-01-31T17:30:01+05:30"),
        datetime.datetime.fromisoformat("2026-01-31T04:00:01-08:00"),
        at(1),
    ],
    ids=str,
)
async def test_an_instant_is_the_same_in_every_zone_and_a_range_is_half_open(
    url: str, moment: datetime.datetime | int
) -> None:
    tick = moment + 1 if isinstance(moment, int) else moment + datetime.timedelta(microseconds=1)
    async with runtara.open_reader(url, tenant="default") as reader:
        assert ids(await reader.list_instances(created_before=moment)) == ["paid"]
        assert ids(await reader.list_instances(created_before=tick)) == ["lost", "paid"]
        assert ids(await reader.list_instances(created_from=moment, created_before=tick)) == ["lost"]
        assert ids(await reader.list_instances(created_from=tick)) == ["stuck", "waiting", "idle"]


BAD_INSTANTS = [
    datetime.datetime(2026, 1, 31, 12),  # naive on purpose
    datetime.date(2026, 1, 31),
    "2026-01-31T12:00:00Z",
    1.5,
    True,
    2**63,
    -(2**63),
]


@pytest.mark.parametrize("moment", BAD_INSTANTS, ids=repr)
async def test_a_naive_or_ill_formed_instant_is_refused_by_its_field(url: str, moment: Any) -> None:
    async with runtara.open_reader(url, tenant="default") as reader:
        asked: list[tuple[str, Callable[..., Awaitable[object]]]] = [
            *((f"{what}_{end}", reader.list_instances) for what in ("created", "finished") for end in ENDS),
            *((f"{what}_{end}", reader.count_instances) for what in ("created", "finished") for end in ENDS),
            *((f"created_{end}", partial(reader.list_events, "lost")) for end in ENDS),
            *((f"created_{end}", partial(reader.count_events, "lost")) for end in ENDS),
            *((f"created_{end}", partial(reader.list_checkpoints, "lost")) for end in ENDS),
        ]
        for field, ask in asked:
            with pytest.raises(runtara.ValidationError) as caught:
                await ask(**{field: moment})
            assert caught.value.field == field


ENDS = ("from", "before")


async def test_instants_at_both_ends_of_the_calendar_are_taken(url: str) -> None:
    first = datetime.datetime.min.replace(tzinfo=zone(14))
    last = datetime.datetime.max.replace(tzinfo=zone(-12))
    async with runtara.open_reader(url, tenant="default") as reader:
        assert await reader.count_instances(created_from=first, created_before=last) == 5
        assert await reader.count_instances(created_from=-(2**63) + 1, created_before=2**63 - 1) == 5


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (lambda r: r.list_instances(statuses={"odd"}), "statuses"),
        (lambda r: r.count_instances(statuses="failed"), "statuses"),
        (lambda r: r.list_instances(workflow=b"w"), "workflow"),
        (lambda r: r.list_instances(id_prefix="\ud800"), "id_prefix"),
        (lambda r: r.list_instances(order="odd"), "order"),
        (lambda r: r.list_instances(limit=0), "limit"),
        (lambda r: r.list_instances(limit=1001), "limit"),
        (lambda r: r.list_instances(cursor="odd"), "cursor"),
        (lambda r: r.list_events("lost", type="odd"), "type"),
        (lambda r: r.list_events("lost", subtype=5), "subtype"),
        (lambda r: r.list_events("lost", text=b"x"), "text"),
        (lambda r: r.count_events("lost", text=""), "text"),
        (lambda r: r.list_events("lost", text="\ud800"), "text"),
        (lambda r: r.list_events("lost", scope_id=5), "scope_id"),
        (lambda r: r.list_events("lost", parent_scope_id=5), "parent_scope_id"),
        (lambda r: r.list_steps("lost", statuses={"odd"}), "statuses"),
        (lambda r: r.list_steps("lost", type=5), "type"),
        (lambda r: r.list_steps("lost", step_ids="charge"), "step_ids"),
        (lambda r: r.list_steps("lost", step_ids={5}), "step_ids"),
        (lambda r: r.count_steps("lost", scope_id="\ud800"), "scope_id"),
        (lambda r: r.error_chain("lost", "13"), "error_id"),
        (lambda r: r.get_checkpoint("lost", ""), "checkpoint_id"),
        (lambda r: r.violations(limit=0), "limit"),
        (lambda r: r.get("a\0"), "instance_id"),
    ],
)
async def test_an_ill_formed_argument_is_refused_by_its_name(
    url: str, ask: Callable[[Reader], Awaitable[object]], field: str
) -> None:
    async with runtara.open_reader(url, tenant="default") as reader:
        with pytest.raises(runtara.ValidationError) as caught:
            await ask(reader)
        assert caught.value.field == field


async def test_pages_continue_where_they_ended(url: str) -> None:
    async with runtara.open_reader(url, tenant="default") as reader:
        first = await reader.list_instances(limit=3)
        assert ids(first) == ["stuck", "waiting", "idle"]
        second = await reader.list_instances(limit=3, cursor=first.next)
        assert (ids(second), second.next) == (["lost", "paid"], None)


async def test_an_instance_is_shown_with_its_payloads(url: str) -> None:
    async with runtara.open_reader(url, tenant="default") as reader:
        view = await reader.get("paid")
        assert (view.status, view.reason, view.record.workflow) == (
            Status.COMPLETED,
            Reason.COMPLETED,
            "orders",
        )
        assert (view.input, view.output) == (b"\xff\x00", "delivered \u00e9".encode())
        assert (view.error, view.stderr, view.connected) == (None, None, False)
        assert view.created_at == NOON
        view = await reader.get("lost")
        assert (view.error, view.stderr) == (HOSTILE, b"trace")
        assert (view.checkpoint_id, view.unconsumed_signals, view.revision) == ("charged", 1, 17)
        with pytest.raises(runtara.InstanceNotFound):
            await reader.get("nowhere")


# ---------------------------------------------------------------- tenants


async def test_a_reader_for_one_tenant_sees_no_other(url: str) -> None:
    async with runtara.open_reader(url, tenant="acme") as reader:
        assert repr(reader) == "<Reader of tenant 'acme'>"
        assert ids(await reader.list_instances()) == ["stuck", "paid"]
        assert await reader.count_instances() == 2
        assert await reader.counts() == {Status.RUNNING: 1, Status.SUSPENDED: 1}
        assert (await reader.get("paid")).status is Status.RUNNING
        assert [v.record.tenant_id for v in await reader.violations()] == ["acme"]
        for ask in (reader.get, reader.list_events, reader.list_checkpoints, reader.compensations):
            with pytest.raises(runtara.InstanceNotFound):
                await ask("lost")


async def test_a_reader_for_everybody_sees_all_and_must_be_told_whose_instance_an_id_names(url: str) -> None:
    async with runtara.open_reader(url) as reader:
        assert repr(reader) == "<Reader of all tenants>"
        assert [(r.tenant_id, r.instance_id) for r in (await reader.list_instances(limit=3)).items] == [
            ("acme", "stuck"),
            ("acme", "paid"),
            ("default", "stuck"),
        ]
        assert await reader.count_instances(workflow="orders") == 3
        assert await reader.counts() == {
            Status.COMPLETED: 1,
            Status.FAILED: 1,
            Status.SUSPENDED: 4,
            Status.RUNNING: 1,
        }
        asked: list[Callable[[str], Awaitable[object]]] = [
            reader.get,
            reader.list_steps,
            reader.count_events,
            reader.compensations,
            lambda i: reader.compensation_data(i, "charged"),
            lambda i: reader.get_checkpoint(i, "charged"),
        ]
        for ask in asked:
            with pytest.raises(runtara.ValidationError) as caught:
                await ask("paid")
            assert caught.value.field == "tenant_id"
        assert (await reader.for_tenant("acme").get("paid")).status is Status.RUNNING
        assert (await reader.for_tenant("default").get("paid")).status is Status.COMPLETED


ARGUMENTS: dict[str, Any] = {"error_id": 13, "checkpoint_id": "charged", "kind": "EventRecord"}


@pytest.mark.parametrize("name", [n for n, q in QUESTIONS.items() if "instance_id" in fields_of(q)])
async def test_no_question_is_answered_about_another_tenants_instance(url: str, name: str) -> None:
    async with runtara.open_reader(url, tenant="default") as theirs:
        ask = getattr(theirs, name)
        needed = {n: ARGUMENTS[n] for n in fields_of(QUESTIONS[name]) if n in ARGUMENTS}
        await ask("lost", **needed)
        with pytest.raises((runtara.InstanceNotFound, runtara.CheckpointNotFound)):
            await getattr(theirs.for_tenant("acme"), name)("lost", **needed)


async def test_an_ill_formed_tenant_is_refused(url: str) -> None:
    for tenant in ("", "a\n", 5):
        with pytest.raises(runtara.ValidationError) as caught:
            async with runtara.open_reader(url, tenant=tenant):  # type: ignore[arg-type]
                raise AssertionError("not reached")
        assert caught.value.field == "tenant_id"


# ---------------------------------------------------------------- histories


async def test_checkpoints_are_found_by_id_and_by_when_they_were_made(url: str) -> None:
    async with runtara.open_reader(url, tenant="default") as reader:
        page = await reader.list_checkpoints("lost")
        assert [(c.checkpoint_id, c.is_compensatable) for c in page.items] == [
            ("charged", True),
            ("reserved", False),
        ]
        assert await reader.count_checkpoints("lost") == 2
        assert revisions(
            await reader.list_checkpoints("lost", created_from=at(10), created_before=at(20))
        ) == [2]
        assert revisions(await reader.list_checkpoints("lost", created_from=NOON + 20 * SECOND)) == [3]
        assert await reader.count_checkpoints("lost", created_before=at(10)) == 0
        assert (await reader.get_checkpoint("lost", "reserved")).state == b"\xff"
        assert not (await reader.get_checkpoint("lost", "nowhere")).found
        assert await reader.count_checkpoints("paid") == 0


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ({}, [9, 8, 7, 6, 5, 4]),
        ({"descending": False}, [4, 5, 6, 7, 8, 9]),
        ({"type": "heartbeat"}, [7]),
        ({"type": runtara.EventType.FAILED}, [9]),
        ({"subtype": "workflow_log"}, [8, 6]),
        ({"created_from": at(31.5), "created_before": at(60)}, [7, 6, 5]),
        ({"text": "card"}, [8, 5]),
        ({"text": "Card"}, []),
        ({"text": "\x1b[31m"}, [6]),
        ({"text": "\0"}, [8]),
        ({"text": "%"}, []),
        ({"scope_id": "s1"}, [5, 4]),
        ({"parent_scope_id": "s1"}, [6]),
        ({"root_only": True, "scope_id": "s1"}, [5, 4]),
        ({"root_only": True, "scope_id": "s2"}, []),
        ({"subtype": "workflow_log", "text": "card", "created_from": NOON, "type": "custom"}, [8]),
    ],
)
async def test_events_are_listed_and_counted_by_every_filter(
    url: str, where: dict[str, Any], found: list[int]
) -> None:
    async with runtara.open_reader(url, tenant="default") as reader:
        assert revisions(await reader.list_events("lost", **where)) == found
        assert await reader.count_events("lost", **unordered(where)) == len(found)


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ({}, [10, 4]),
        ({"descending": False}, [4, 10]),
        ({"statuses": frozenset({StepStatus.FAILED})}, [4]),
        ({"statuses": frozenset({"running", "failed"})}, [10, 4]),
        ({"type": "mail"}, [10]),
        ({"step_ids": frozenset({"charge", "nowhere"})}, [4]),
        ({"scope_id": "s2"}, [10]),
        ({"parent_scope_id": "s1"}, [10]),
        ({"root_only": True}, [4]),
        ({"root_only": True, "type": "mail"}, []),
    ],
)
async def test_steps_are_listed_and_counted_by_every_filter(
    url: str, where: dict[str, Any], found: list[int]
) -> None:
    async with runtara.open_reader(url, tenant="default") as reader:
        assert revisions(await reader.list_steps("lost", **where)) == found
        assert await reader.count_steps("lost", **unordered(where)) == len(found)


async def test_a_step_tells_what_its_events_say(url: str) -> None:
    async with runtara.open_reader(url, tenant="default") as reader:
        [step] = (await reader.list_steps("lost", step_ids=frozenset({"charge"}))).items
        assert (step.step_name, step.status, step.duration_ms) == ("Charge", StepStatus.FAILED, 1500.0)
        assert (step.inputs, step.outputs, step.error) == ({"amount": 7}, {"ok": False}, "card")


async def test_signals_waits_and_attempts_are_listed(url: str) -> None:
    async with runtara.open_reader(url, tenant="default") as reader:
        signals = await reader.list_signals("lost")
        assert [(s.signal_id, s.acknowledged_us) for s in signals.items] == [(12, at(2)), (11, None)]
        assert await reader.count_records("lost", runtara.SignalRecord) == 2
        [wait] = (await reader.list_waits("waiting")).items
        assert (wait.key, wait.open, wait.deadline_us) == ("paid", True, None)
        assert wait.outcome is not WaitOutcome.ELAPSED
        assert [a.attempt for a in (await reader.list_attempts("lost")).items] == [15]


async def test_an_error_is_followed_to_its_causes(url: str) -> None:
    async with runtara.open_reader(url, tenant="default") as reader:
        listed = (await reader.list_errors("lost")).items
        assert [(e.error_id, e.code, e.cause_id) for e in listed] == [
            (14, "E_ORDER", 13),
            (13, "E_CARD", None),
        ]
        assert await reader.error_chain("lost", 14) == listed
        assert await reader.error_chain("lost", 13) == listed[1:]
        with pytest.raises(runtara.ErrorNotFound):
            await reader.error_chain("lost", 12)


async def test_the_compensation_log_is_listed_counted_and_its_last_line_known(url: str) -> None:
    async with runtara.open_reader(url, tenant="default") as reader:
        log = await reader.list_compensation_log("lost", descending=False)
        assert [(line.attempt, line.success) for line in log.items] == [(1, False), (2, True)]
        assert await reader.count_compensation_log("lost") == 2
        assert await reader.last_compensation("lost") == log.items[-1]
        assert await reader.last_compensation("paid") is None
        view = await reader.compensations("lost")
        assert [(c.checkpoint_id, c.step_id) for c in view.compensations] == [("charged", "refund")]
        assert await reader.compensation_data("lost", "charged") == b"receipt"
        with pytest.raises(runtara.CheckpointNotFound):
            await reader.compensation_data("lost", "reserved")


# ---------------------------------------------------------------- the store as a whole


async def test_the_growth_of_a_store_is_told(url: str) -> None:
    async with runtara.open_reader(url) as reader:
        growth = await reader.growth()
        assert (growth.rows["instances"], growth.rows["events"], growth.rows["steps"]) == (7, 6, 2)
        assert growth.oldest_finished_us == at(60)
        assert growth.file_bytes is not None


async def test_a_sound_store_has_no_findings(url: str) -> None:
    async with runtara.open_reader(url) as reader:
        assert await reader.verify() == []


async def test_instances_with_no_reason_to_move_are_found(url: str) -> None:
    async with runtara.open_reader(url) as reader:
        found = await reader.violations()
        assert [(v.stuck, v.record.tenant_id, v.record.instance_id) for v in found] == [
            (Stuck.NO_REASON, "default", "stuck"),
            (Stuck.NO_REASON, "acme", "stuck"),
        ]
        assert await reader.violations(limit=1) == found[:1]
        assert await reader.for_tenant("default").violations() == found[:1]


async def test_many_candidates_are_walked_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = file_url(tmp_path / "a.db")
    async with written(url) as store:
        row = await store.reserve(20)
        for number in range(20):
            record = resting(row + number, f"i{number:02}", number, Reason.WAITING_SIGNAL)
            await store.apply(units(record, [], []))
    monkeypatch.setattr("runtara.reader.CANDIDATES", 3)
    async with runtara.open_reader(url) as reader:
        names = [f"i{number:02}" for number in range(20)]
        assert [v.record.instance_id for v in await reader.violations()] == names
        assert [v.record.instance_id for v in await reader.violations(limit=7)] == names[:7]


# ---------------------------------------------------------------- numbers that nobody knows


@pytest.fixture(params=["sqlite", "postgresql"])
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Callable[[str], None]]:
    """A store of its own, and how to run a statement in it behind the program's back."""
    schema = new_schema()
    if request.param == "sqlite":
        url = file_url(tmp_path / "a.db")

        def run(sql: str) -> None:
            connection = sqlite3.connect(tmp_path / "a.db", isolation_level=None)
            connection.execute(sql)
            connection.close()
    else:
        url = url_of(schema)

        def run(sql: str) -> None:
            administer(f"SET search_path TO {schema}; {sql}")

    trio.run(make_store, url)
    return url, run


async def test_an_unknown_number_hides_no_other_row(damaged: tuple[str, Callable[[str], None]]) -> None:
    url, run = damaged
    run("UPDATE instances SET status = 99, reason = 77 WHERE instance_id = 'idle'")
    run("UPDATE events SET type = 44 WHERE subtype = 'step_debug_end'")
    run("UPDATE steps SET status = 9 WHERE step_id = 'ship'")
    run("UPDATE errors SET severity = 8 WHERE code = 'E_CARD'")
    async with runtara.open_reader(url, tenant="default") as reader:
        shown = {r.instance_id: r.status.word for r in (await reader.list_instances()).items}
        assert shown == {
            "stuck": "suspended",
            "waiting": "suspended",
            "idle": "?99",
            "lost": "failed",
            "paid": "completed",
        }
        [idle] = (await reader.list_instances(id_prefix="idle")).items
        assert (idle.status, idle.reason) == (99, 77)
        assert {status.word: count for status, count in (await reader.counts()).items()} == {
            "completed": 1,
            "failed": 1,
            "suspended": 2,
            "?99": 1,
        }
        assert [e.type.word for e in (await reader.list_events("lost", limit=5)).items][-1] == "?44"
        assert [s.status.word for s in (await reader.list_steps("lost")).items] == ["?9", "failed"]
        assert [e.severity.word for e in (await reader.list_errors("lost")).items] == ["error", "?8"]
        with pytest.raises(runtara.StoreCorrupt, match="instances: 99 is not a valid Status"):
            await reader.get("idle")
        assert len(await reader.verify()) == 5


async def test_an_instance_that_cannot_be_read_is_a_violation(
    damaged: tuple[str, Callable[[str], None]],
) -> None:
    url, run = damaged
    run("UPDATE instances SET reason = 77 WHERE instance_id = 'waiting'")
    async with runtara.open_reader(url, tenant="default") as reader:
        found = await reader.violations()
        assert [(v.stuck, v.record.instance_id) for v in found] == [
            (Stuck.UNREADABLE, "waiting"),
            (Stuck.NO_REASON, "stuck"),
        ]


# ---------------------------------------------------------------- opening


async def refusal(url: str) -> runtara.RuntaraError:
    with pytest.raises(runtara.RuntaraError) as caught:
        async with runtara.open_reader(url):
            raise AssertionError("not reached")
    return caught.value


async def test_a_file_that_is_not_there_is_said_so_and_not_made(tmp_path: Path) -> None:
    error = await refusal(file_url(tmp_path / "none.db"))
    assert isinstance(error, runtara.StoreNotFound)
    assert (error.code, error.retryable) == ("store_not_found", False)
    assert str(tmp_path / "none.db") in error.message
    assert list(tmp_path.iterdir()) == []
    assert isinstance(await refusal(file_url(tmp_path / "none" / "a.db")), runtara.StoreNotFound)


async def test_a_schema_that_is_not_there_is_said_so_and_not_made() -> None:
    schema = new_schema()
    assert isinstance(await refusal(url_of(schema)), runtara.StoreNotFound)
    assert administer("SELECT 1 FROM pg_namespace WHERE nspname = %s", schema) == []


async def test_a_file_that_is_no_store_is_refused_and_not_touched(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"no database " * 100)
    sqlite3.connect(tmp_path / "other").executescript("CREATE TABLE t (x); INSERT INTO t VALUES (1);").close()
    for name in ("text", "other"):
        before = (tmp_path / name).read_bytes()
        assert isinstance(await refusal(file_url(tmp_path / name)), runtara.StoreCorrupt)
        assert (tmp_path / name).read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"text", "other"}


async def test_a_folder_an_empty_file_and_other_urls_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert isinstance(await refusal(file_url(tmp_path / "empty")), runtara.StoreError)
    assert isinstance(await refusal(file_url(tmp_path)), runtara.StoreError)
    assert (tmp_path / "empty").read_bytes() == b""
    for url in ("sqlite:///:memory:", "ws://host", "sqlite://a.db", ""):
        error = await refusal(url)
        assert isinstance(error, runtara.ValidationError)
        assert error.field == "url"


async def test_a_store_of_an_older_or_newer_version_is_refused(
    damaged: tuple[str, Callable[[str], None]],
) -> None:
    url, run = damaged
    number = {"sqlite": "PRAGMA user_version = {}", "postgr": "UPDATE meta SET version = {}"}[url[:6]]
    run(number.format(0))
    assert isinstance(await refusal(url), runtara.StoreTooOld)
    run(number.format(99))
    assert isinstance(await refusal(url), runtara.StoreTooNew)


# ---------------------------------------------------------------- beside a runtime


@pytest.fixture(params=["sqlite", "postgresql"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return file_url(tmp_path / quote("a b.db")) if request.param == "sqlite" else url_of(new_schema())


async def test_a_reader_sees_what_a_runtime_has_just_acknowledged(empty: str) -> None:
    async with runtime(empty) as rt, runtara.open_reader(empty, tenant="default") as reader:
        assert await reader.count_instances() == 0
        async with rt.register("a", workflow="w") as inst:
            await inst.checkpoint("one", b"1")
            assert (await reader.get("a")).checkpoint_id == "one"
            assert not (await reader.get("a")).connected
            assert (await rt.get("a")).connected
            await inst.complete(b"out")
        assert (await reader.get("a")).output == b"out"
        for other in (rt, rt.reader("default")):
            assert await other.list_instances() == await reader.list_instances()
            assert await other.list_events("a") == await reader.list_events("a")
            assert await other.counts() == {Status.COMPLETED: 1}
        assert ids(await rt.reader().list_instances()) == ["a"]
        assert ids(await rt.for_tenant("acme").list_instances()) == []


async def test_a_copy_of_a_store_that_works_is_a_store(tmp_path: Path) -> None:
    url, copy = file_url(tmp_path / "a.db"), str(tmp_path / "copy.db")
    async with runtime(url) as rt, rt.register("a") as inst:
        await inst.checkpoint("one", b"1")
        async with runtara.open_reader(url) as reader:
            assert await reader.backup(copy) == Path(copy).stat().st_size
        await inst.checkpoint("two", b"2")
        with pytest.raises(runtara.ValidationError):
            await rt.backup(copy)
    async with runtara.open_reader(file_url(Path(copy)), tenant="default") as reader:
        assert (await reader.get("a")).checkpoint_id == "one"
    again = file_url(tmp_path / "again.db")
    await runtara.restore(copy, again)
    async with runtime(again) as rt, rt.register("a") as inst:
        assert inst.registered.checkpoint_id == "one"


async def test_restoring_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    for url in ("sqlite:///:memory:", "postgresql://host/database", "ws://host"):
        with pytest.raises(runtara.ValidationError) as caught:
            await runtara.restore(str(tmp_path / "copy.db"), url)
        assert caught.value.field == "url"
    assert list(tmp_path.iterdir()) == []


async def test_what_is_asked_of_the_runtime_itself_is_refused_where_it_is_not() -> None:
    async with runtime() as rt:
        client = runtara.Runtime(rt.link, rt.randomness, "default")
        for ask in (client.growth, client.verify, client.health, client.all_violations):
            with pytest.raises(runtara.ValidationError) as caught:
                await ask()
            assert caught.value.field == "runtime"
        with pytest.raises(runtara.ValidationError):
            client.for_tenant("acme")
        with pytest.raises(runtara.ValidationError):
            client.reader()
