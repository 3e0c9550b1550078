"""The operators' commands, on files and schemas that programs made and hold."""

import ast
import contextlib
import io
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from click.testing import CliRunner, Result

import runtara
from runtara.cli import main
from runtara.cli.printing import age, json_line, moment, payload, visible
from runtara.persistence.store import InstanceFilter, InstanceOrder, PageRequest
from runtara.testing import samples
from tests.operated import HOSTILE, as_json, at, instance, make_store, units, written
from tests.postgres_server import new_schema
from tests.postgres_server import url_of as schema_url
from tests.runtimes import runtime, url_of
from tests.test_docs import as_function, examples_of

PROGRAM = (sys.executable, "-c", "from runtara.cli import main; main()")
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("operators") / "a.db"
    trio.run(make_store, url_of(path))
    return path


@pytest.fixture
def path(master: Path, tmp_path: Path) -> Path:
    """A store of its own, which nobody has open."""
    return Path(shutil.copy(master, tmp_path / "a.db"))


def invoke(store: Path | str, *arguments: str) -> Result:
    url = url_of(store) if isinstance(store, Path) else store
    return CliRunner().invoke(
        main, list(arguments), env={"RUNTARA_URL": url, "RUNTARA_STORE": "sqlite:///none.db"}
    )


def said(store: Path | str, *arguments: str) -> list[str]:
    """The lines of a command that went well."""
    result = invoke(store, *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout.splitlines()


def objects(store: Path | str, *arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said(store, *arguments, "--json")]


def column(lines: list[str], at: int = 0) -> list[str]:
    """One column of a table, without its title."""
    return [re.split("  +", line)[at] for line in lines[1:]]


# ---------------------------------------------------------------- ls


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("", ["stuck", "waiting", "idle", "lost", "paid"]),
        ("--oldest-first", ["paid", "lost", "idle", "waiting", "stuck"]),
        ("--status failed --status completed", ["lost", "paid"]),
        ("--workflow orders", ["lost", "paid"]),
        ("--prefix st", ["stuck"]),
        ("--awaits-client", ["idle"]),
        ("--order finished", ["lost", "paid"]),
        ("--tenant acme", ["stuck", "paid"]),
        ("--tenant nobody", []),
        ("--all-tenants --limit 3", ["stuck", "paid", "stuck"]),
        ("--created-from 2026-01-31T12:00:01Z --created-before 2026-01-31T12:00:03Z", ["idle", "lost"]),
        ("--finished-from 2026-01-31T12:01:00Z --finished-before 2026-01-31T12:02:00Z", ["paid"]),
    ],
)
def test_ls_lists_what_its_options_say(path: Path, options: str, found: list[str]) -> None:
    words = options.split()
    assert [o["instance_id"] for o in objects(path, "ls", *words) if "next" not in o] == found
    lines = [line for line in said(path, "ls", *words) if not line.startswith("more: ")]
    assert column(lines, at=1 if "--all-tenants" in words else 0) == found
    if "--limit" not in words and "--order" not in words:
        assert said(path, "ls", *words, "--count") == [str(len(found))]
        assert objects(path, "ls", *words, "--count") == [{"count": len(found)}]


def test_ls_shows_a_table_for_people(path: Path) -> None:
    assert said(path, "ls", "--prefix", "paid") == [
        "INSTANCE  STATUS     REASON     WORKFLOW  CREATED                      FINISHED",
        "paid      completed  completed  orders    2026-01-31T12:00:00.000000Z  2026-01-31T12:01:00.000000Z",
    ]
    assert said(path, "ls", "--prefix", "nothing") == [
        "INSTANCE  STATUS  REASON  WORKFLOW  CREATED  FINISHED"
    ]


def test_ls_says_for_how_long_an_instance_awaits_its_client(path: Path) -> None:
    [line] = said(path, "ls", "--awaits-client")[1:]
    assert re.fullmatch(r"idle +suspended +disconnected +- +2026-01-31T12:00:02.000000Z +\d+d( \d+h)?", line)


def test_json_holds_every_field_of_the_record_in_full(path: Path) -> None:
    [found] = objects(path, "ls", "--prefix", "lost")
    assert set(found) == {field.name for field in attrs.fields(runtara.InstanceRecord)}
    assert (found["status"], found["reason"]) == ("failed", "application_error")
    assert (found["created_us"], found["finished_us"]) == (at(1), at(120))
    assert (found["hosted"], found["exit_code"], found["peak_memory_bytes"]) == (False, -9, 2**40)


def test_pages_continue_at_the_cursor(path: Path) -> None:
    first = said(path, "ls", "--limit", "3")
    assert column(first)[:-1] == ["stuck", "waiting", "idle"]
    cursor = first[-1].removeprefix("more: --cursor ")
    assert column(said(path, "ls", "--limit", "3", "--cursor", cursor)) == ["lost", "paid"]
    *items, last = objects(path, "ls", "--limit", "3")
    assert (len(items), last) == (3, {"next": cursor})
    assert len(objects(path, "ls", "--cursor", cursor)) == 2
    wrong = invoke(path, "ls", "--cursor", cursor, "--oldest-first")
    assert (wrong.exit_code, wrong.stderr) == (
        2,
        "runtara: validation_error: cursor: belongs to another list, or to another order of it\n",
    )


@pytest.mark.parametrize(
    "instant",
    [
        "2026-01-31T12:00:01Z",
        "2026-01-31T12:00:01.000000+00:00",
        "2026-01-31T17:30:01+05:30",
        "2026-01-31T04:00:01-08:00",
        "20260131T120001Z",
        "1769860801000ms",
    ],
)
def test_an_instant_is_iso_8601_with_an_offset_or_marked_milliseconds(path: Path, instant: str) -> None:
    assert column(said(path, "ls", "--created-before", instant)) == ["paid"]
    assert column(said(path, "ls", "--created-from", instant))[-1] == "lost"


@pytest.mark.parametrize(
    ("instant", "problem"),
    [
        ("2026-01-31T12:00:01", "has no offset from UTC: write 2026-01-31T12:00:01Z or"),
        ("2026-01-31", "has no offset from UTC"),
        ("1769860801000", "is no time: write 2026-01-31T12:00:00+02:00, or milliseconds"),
        ("1769860801", "is no time"),
        ("yesterday", "is no time"),
        ("1.5ms", "is no time"),
        ("\u0661ms", "is no time"),
        ("", "is no time"),
    ],
)
def test_any_other_instant_is_refused_by_its_option(path: Path, instant: str, problem: str) -> None:
    result = invoke(path, "ls", "--created-from", instant)
    assert result.exit_code == 2
    assert result.stderr.startswith("runtara: Invalid value for '--created-from': ")
    assert problem in result.stderr


# ---------------------------------------------------------------- one instance


def test_show_says_all_of_an_instance(path: Path) -> None:
    shown = dict(re.split("  +", line, maxsplit=1) for line in said(path, "show", "lost"))
    assert (shown["status"], shown["reason"]) == ("failed", "application_error")
    assert (shown["checkpoint"], shown["unconsumed signals"]) == ("charged", "1")
    assert (shown["finished"], shown["deadline"]) == ("2026-01-31T12:02:00.000000Z", "-")
    assert (shown["stderr"], shown["input"], shown["exit code"]) == ("trace", "-", "-9")
    shown = dict(re.split("  +", line, maxsplit=1) for line in said(path, "show", "paid"))
    assert (shown["input"], shown["output"]) == ("(2 bytes)", "delivered \u00e9")
    shown = dict(re.split("  +", line, maxsplit=1) for line in said(path, "show", "waiting"))
    assert shown["waits for wait-2"] == "the signal paid"


def test_show_as_json_holds_payloads_in_full(path: Path) -> None:
    [found] = objects(path, "show", "lost")
    row = {field.name for field in attrs.fields(runtara.InstanceRecord)}
    assert set(found) - row == {"unconsumed_signals", "input", "output", "error", "stderr", "open_waits"}
    assert (found["error"], found["stderr"], found["revision"]) == (HOSTILE, "trace", 17)
    [found] = objects(path, "show", "paid")
    assert (found["input"], found["output"]) == ({"base64": "/wA="}, "delivered \u00e9")
    [found] = objects(path, "show", "waiting")
    assert [(wait["key"], wait["kind"], wait["deadline_us"]) for wait in found["open_waits"]] == [
        ("paid", "signal", None)
    ]
    assert [o["status"] for o in objects(path, "show", "paid", "--tenant", "acme")] == ["running"]


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("events lost", [9, 8, 7, 6, 5, 4]),
        ("events lost --type heartbeat", [7]),
        ("events lost --subtype workflow_log --text card", [8]),
        (
            "events lost --created-from 2026-01-31T12:00:31.5Z --created-before 1769860860000ms",
            [7, 6, 5],
        ),
        ("events lost --scope s2", [6]),
        ("events lost --parent-scope s1", [6]),
        ("events lost --root-only --scope s1 --oldest-first", [4, 5]),
        ("steps lost", [10, 4]),
        ("steps lost --status failed --status completed", [4]),
        ("steps lost --type mail --step ship --step charge", [10]),
        ("steps lost --root-only", [4]),
        ("checkpoints lost", [3, 2]),
        ("checkpoints lost --created-before 2026-01-31T12:00:20Z", [2]),
        ("errors lost", [14, 13]),
        ("errors lost --chain 13", [13]),
    ],
)
def test_histories_are_listed_by_every_filter(path: Path, command: str, found: list[int]) -> None:
    words = command.split()
    assert [o["revision"] for o in objects(path, *words)] == found
    assert len(said(path, *words)) == 1 + len(found)
    if "--chain" not in words:
        assert said(path, *words, "--count") == [str(len(found))]


def test_a_step_is_shown_with_what_its_events_say(path: Path) -> None:
    [found] = objects(path, "steps", "lost", "--step", "charge")
    assert (found["status"], found["duration_ms"]) == ("failed", 1500.0)
    assert (found["inputs"], found["outputs"], found["error"]) == ({"amount": 7}, {"ok": False}, "card")
    assert "start_payload" not in found
    assert re.fullmatch(
        r"charge +Charge +http +failed +2026-01-31T12:00:30.000000Z +1500.0 +s1 +card",
        said(path, "steps", "lost", "--step", "charge")[1],
    )


def test_an_error_is_shown_with_its_causes(path: Path) -> None:
    chain = objects(path, "errors", "lost", "--chain", "14")
    assert [(error["revision"], error["cause_id"], error["code"]) for error in chain] == [
        (14, 13, "E_ORDER"),
        (13, None, "E_CARD"),
    ]
    assert invoke(path, "errors", "lost", "--chain", "12").exit_code == 1


def test_a_compensation_is_part_of_its_checkpoint(path: Path) -> None:
    [found, _] = objects(path, "checkpoints", "lost")
    assert found["compensation"] == {"step_id": "refund", "data": "receipt", "order": 1}


# ---------------------------------------------------------------- what a store may hold

LOST = InstanceFilter(id_prefix="lost"), InstanceOrder.CREATED, PageRequest()
HOSTILE_ID = HOSTILE.replace("\n", "")
SHOWING = [
    ("ls",),
    ("show", "lost"),
    *((what, "lost") for what in ("events", "steps", "checkpoints", "errors")),
]
SILENT = [("show", HOSTILE_ID), ("show", "a", "--tenant", HOSTILE), ("stats",), ("check",), ("violations",)]


async def add_hostile_rows(path: Path) -> None:
    """Rows as no program of ours writes them: ids too are full of what controls a terminal."""
    async with written(url_of(path)) as store:
        row = await store.reserve(1)
        record = instance(row, HOSTILE_ID, 50, workflow=HOSTILE, compensation_reason=HOSTILE)
        [lost] = (await store.list_instances(*LOST)).items
        await store.apply(units(record, [], []))
        await store.apply(
            [
                samples.unit(lost.row, 50, samples.checkpoint(50, checkpoint_id=HOSTILE)),
                samples.unit(lost.row, 51, samples.event(51, subtype=HOSTILE, scope_id=HOSTILE)),
                samples.unit(lost.row, 52, samples.error(52, code=HOSTILE, step_id=HOSTILE)),
                samples.unit(
                    lost.row,
                    53,
                    samples.event(53, payload=as_json(inputs=HOSTILE)),
                    samples.step(53, step_id=HOSTILE, step_name=HOSTILE, step_type=HOSTILE),
                ),
            ]
        )


@pytest.mark.parametrize("as_json", [False, True], ids=["for people", "json"])
def test_nothing_in_a_store_reaches_the_terminal_as_it_is(path: Path, as_json: bool) -> None:
    trio.run(add_hostile_rows, path)
    for words in (*SHOWING, *SILENT):
        result = invoke(path, *words, *(["--json"] if as_json else []))
        assert CONTROL.findall(result.output) == [], words
        assert ("[red]markup[/red]" in result.output) is (words in SHOWING), words
    shown = invoke(path, "errors", "lost").output
    assert "declined \\x1b[31m\\x1b]0;title\\x07 [red]markup[/red] \\u202e\\nnext" in shown


def test_every_row_stays_one_line(path: Path) -> None:
    trio.run(add_hostile_rows, path)
    assert len(said(path, "checkpoints", "lost")) == 1 + 3
    assert len(said(path, "events", "lost")) == 1 + 8
    assert len(said(path, "errors", "lost", "--json")) == 3


def test_json_gives_a_hostile_text_back_as_it_was(path: Path) -> None:
    assert objects(path, "errors", "lost")[-1]["message"] == HOSTILE


def run_sql(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def test_an_unknown_number_is_marked_and_hides_no_other_row(path: Path) -> None:
    run_sql(
        path,
        "UPDATE instances SET status = 99 WHERE instance_id = 'idle'",
        "UPDATE events SET type = 44, created_us = 9000000000000000000 WHERE revision = 8",
    )
    lines = said(path, "ls")
    assert column(lines[:-1]) == ["stuck", "waiting", "idle", "lost", "paid"]
    assert column(lines[:-1], 1) == ["suspended", "suspended", "?99", "failed", "completed"]
    assert lines[-1] == "? marks a number that this version does not know"
    marks = {o["instance_id"]: o.get("undecodable") for o in objects(path, "ls")}
    assert marks == {"stuck": None, "waiting": None, "idle": ["status"], "lost": None, "paid": None}
    assert [o["type"] for o in objects(path, "events", "lost")][:3] == ["failed", "?44", "heartbeat"]
    assert "9000000000000000000us" in "\n".join(said(path, "events", "lost"))
    result = invoke(path, "show", "idle")
    assert (result.exit_code, result.stderr) == (
        3,
        "runtara: store_corrupt: instances: 99 is not a valid Status\n",
    )


async def add_infinite_step(path: Path) -> None:
    async with written(url_of(path)) as store:
        [lost] = (await store.list_instances(*LOST)).items
        event = samples.event(60, payload=b'{"step_id": "odd", "inputs": 1e999}')
        await store.apply([samples.unit(lost.row, 60, event, samples.step(60, step_id="odd"))])


def test_a_value_that_json_cannot_hold_is_marked_and_hides_no_other_row(path: Path) -> None:
    trio.run(add_infinite_step, path)
    odd, *others = objects(path, "steps", "lost")
    assert (odd["step_id"], odd["undecodable"], "inputs" in odd) == ("odd", ["inputs"], False)
    assert [other["step_id"] for other in others] == ["ship", "charge"]


# ---------------------------------------------------------------- the store as a whole


def test_stats_counts_and_measures(path: Path) -> None:
    [found] = objects(path, "stats")
    assert found["counts"] == {"completed": 1, "failed": 1, "suspended": 3}
    assert (found["rows"]["instances"], found["rows"]["checkpoints"]) == (7, 2)
    assert found["file_bytes"] == path.stat().st_size
    assert found["oldest_finished_us"] == at(60)
    assert [o["counts"] for o in objects(path, "stats", "--all-tenants")] == [
        {"completed": 1, "failed": 1, "suspended": 4, "running": 1}
    ]
    shown = dict(re.split("  +", line, maxsplit=1) for line in said(path, "stats"))
    assert (shown["suspended"], shown["rows of events"]) == ("3", "6")
    assert shown["oldest end"] == "2026-01-31T12:01:00.000000Z"


def test_violations_are_listed_and_are_an_exit_code(path: Path) -> None:
    result = invoke(path, "violations")
    assert result.exit_code == 1
    assert column(result.stdout.splitlines(), 1) == ["stuck"]
    result = invoke(path, "violations", "--all-tenants", "--json")
    assert result.exit_code == 1
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(o["tenant_id"], o["instance_id"], o["stuck"]) for o in found] == [
        ("default", "stuck", "no_reason_to_move"),
        ("acme", "stuck", "no_reason_to_move"),
    ]
    assert len(invoke(path, "violations", "--all-tenants", "--limit", "1").stdout.splitlines()) == 2
    assert said(path, "violations", "--tenant", "nobody") == [
        "every instance that rests has a reason to move"
    ]
    assert objects(path, "violations", "--tenant", "nobody") == []


def test_check_finds_damage(path: Path) -> None:
    assert said(path, "check") == ["no damage was found"]
    assert objects(path, "check") == []
    run_sql(path, "UPDATE events SET type = 44 WHERE revision = 8")
    result = invoke(path, "check")
    assert (result.exit_code, len(result.stdout.splitlines())) == (1, 1)
    assert "events.type is no known word in 1 records" in result.stdout
    result = invoke(path, "check", "--json")
    assert result.exit_code == 1
    assert "events.type" in json.loads(result.stdout)["finding"]


def test_a_backup_is_made_and_restored(path: Path, tmp_path: Path) -> None:
    copy, again = tmp_path / "copy.db", tmp_path / "again.db"
    [made] = objects(path, "backup", str(copy))
    assert made == {"file": str(copy), "bytes": copy.stat().st_size}
    again_made = invoke(path, "backup", str(copy))
    assert again_made.exit_code == 2
    assert "there is something at" in again_made.stderr
    assert said(again, "restore", str(copy))[0].startswith("restored ")
    assert said(again, "ls", "--count") == ["5"]
    assert invoke(again, "restore", str(copy)).exit_code == 2
    run_sql(again, "DELETE FROM instances")
    [restored] = objects(again, "restore", str(copy), "--replace")
    assert restored["file"] == str(copy)
    assert said(again, "ls", "--count") == ["5"]


def test_purge_deletes_what_has_ended(path: Path) -> None:
    assert objects(path, "purge", "paid") == [{"purged": 1}]
    assert column(said(path, "ls")) == ["stuck", "waiting", "idle", "lost"]
    assert said(path, "purge", "--finished-before", "2026-01-31T12:02:00Z") == ["0 purged"]
    assert said(path, "purge", "--finished-before", "2026-02-01T00:00:00Z", "--status", "completed") == [
        "0 purged"
    ]
    assert said(path, "purge", "--finished-before", "2026-02-01T00:00:00Z", "--limit", "5") == ["1 purged"]
    assert column(said(path, "ls")) == ["stuck", "waiting", "idle"]
    assert said(path, "check") == ["no damage was found"]
    assert objects(path, "stats")[0]["rows"]["events"] == 0


def test_purge_refuses_what_has_not_ended(path: Path) -> None:
    result = invoke(path, "purge", "paid", "idle", "lost")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("runtara: invalid_instance_state: idle: the instance is suspended")
    assert column(said(path, "ls")) == ["stuck", "waiting", "idle", "lost"]
    assert invoke(path, "purge", "nowhere").exit_code == 1


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["show", "nowhere"], 1, "instance_not_found: Instance not found: nowhere"),
        (["events", "paid", "--tenant", "nobody"], 1, "instance_not_found: Instance not found: paid"),
        (["show", "a\x1b[31m"], 2, "validation_error: instance_id: holds the forbidden character U+001B"),
        (["ls", "--tenant", ""], 2, "validation_error: tenant_id: must not be empty"),
        (
            ["ls", "--url", "http://host"],
            2,
            "validation_error: url: must begin with sqlite:// or postgresql://",
        ),
        (["ls", "--url", "sqlite:///:memory:"], 2, "validation_error: url: names a store in memory"),
        (["ls", "--limit", "0"], 2, "Invalid value for '--limit': 0 is not in the range"),
        (["ls", "--status", "odd"], 2, "Invalid value for '--status': 'odd' is not one of"),
        (["events", "lost", "--text", ""], 2, "validation_error: text: must be text of at least one"),
        (["show"], 2, "Missing argument 'INSTANCE_ID'"),
        (["purge"], 2, "name instances, or give --finished-before"),
        (["purge", "a", "--finished-before", "0ms"], 2, "name instances, or give --finished-before"),
        (["purge", "a", "--status", "failed"], 2, "--status and --limit go with --finished-before"),
        (["restore", "/no/such/file"], 2, "validation_error: backup: there is no file at /no/such/file"),
        (["backup", "/no/such/folder/a.db"], 3, "store_"),
    ],
)
def test_an_error_is_one_line_with_its_code(path: Path, words: list[str], code: int, line: str) -> None:
    result = invoke(path, *words)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith(f"runtara: {line}")
    assert result.stderr.count("\n") == 1
    assert CONTROL.findall(result.stderr) == []


READING = [["ls"], ["show", "a"], ["stats"], ["check"], ["violations"], ["backup", "copy.db"], ["purge", "a"]]


@pytest.mark.parametrize("words", READING, ids=lambda words: words[0])
def test_a_store_that_is_not_there_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(tmp_path / "none.db", *words)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("runtara: store_not_found: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", READING, ids=lambda words: words[0])
def test_what_is_no_store_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.db").write_bytes(b"no database " * 100)
    result = invoke(tmp_path / "a.db", *words)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("runtara: store_corrupt: ")
    assert result.stderr.count("\n") == 1
    assert (tmp_path / "a.db").read_bytes() == b"no database " * 100


def test_a_store_of_another_version_is_refused(path: Path) -> None:
    run_sql(path, "PRAGMA user_version = 99")
    result = invoke(path, "ls")
    assert (result.exit_code, result.stderr.split(": ")[1]) == (3, "store_too_new")


def test_without_a_url_the_store_is_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RUNTARA_STORE", "RUNTARA_URL"):
        monkeypatch.delenv(name, raising=False)
    assert CliRunner().invoke(main, ["ls"]).exit_code == 3
    trio.run(make_store, "sqlite:///runtara.db")
    result = CliRunner().invoke(main, ["ls", "--count"])
    assert (result.exit_code, result.stdout) == (0, "5\n")
    for name in ("RUNTARA_STORE", "RUNTARA_URL"):
        assert CliRunner().invoke(main, ["ls"], env={name: "sqlite:///none.db"}).exit_code == 3


# ---------------------------------------------------------------- beside a runtime


async def test_a_store_that_a_runtime_holds_can_be_looked_at_and_not_purged(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with runtime(url_of(path)) as rt:
        async with rt.register("ended") as ended:
            await ended.complete(b"out")
        async with rt.register("running") as inst:
            await inst.checkpoint("one", b"1")
            run = partial(trio.to_thread.run_sync, abandon_on_cancel=True)
            lines = await run(partial(said, path, "ls"))
            assert column(lines) == ["running", "ended"]
            assert column(lines, 1) == ["running", "completed"]
            [found] = await run(partial(objects, path, "checkpoints", "running"))
            assert found["state"] == "1"
            assert await run(partial(said, path, "check")) == ["no damage was found"]
            copy = tmp_path / "copy.db"
            assert len(await run(partial(said, path, "backup", str(copy)))) == 1
            for words in (["purge", "ended"], ["restore", str(copy), "--replace"]):
                result = await run(partial(invoke, path, *words))
                assert result.exit_code == 1
                assert result.stderr.startswith(
                    f"runtara: store_locked: {path} is held by process {os.getpid()}"
                )
            assert (await inst.checkpoint("two", b"2")).state == b"2"
        assert await rt.count_instances() == 2


async def test_the_commands_work_on_postgresql(tmp_path: Path) -> None:
    url = schema_url(new_schema())
    run = partial(trio.to_thread.run_sync, abandon_on_cancel=True)
    missing = await run(partial(invoke, url, "ls"))
    assert (missing.exit_code, missing.stderr.split(": ")[1]) == (3, "store_not_found")
    await make_store(url)
    async with runtime(url):
        assert column(await run(partial(said, url, "ls"))) == ["stuck", "waiting", "idle", "lost", "paid"]
        assert len(await run(partial(objects, url, "events", "lost", "--text", "card"))) == 2
        [shown] = await run(partial(objects, url, "show", "lost"))
        assert shown["error"] == HOSTILE
        [stats] = await run(partial(objects, url, "stats"))
        assert stats["counts"] == {"completed": 1, "failed": 1, "suspended": 3}
        assert (await run(partial(invoke, url, "violations"))).exit_code == 1
        refused = await run(partial(invoke, url, "purge", "paid"))
        assert (refused.exit_code, refused.stderr.split(": ")[1]) == (1, "store_locked")
        backup = await run(partial(invoke, url, "backup", str(tmp_path / "copy.db")))
        assert (backup.exit_code, backup.stdout) == (2, "")
        assert (await run(partial(invoke, url, "restore", "copy.db"))).exit_code == 2
    assert await run(partial(said, url, "purge", "paid")) == ["1 purged"]
    assert column(await run(partial(said, url, "ls"))) == ["stuck", "waiting", "idle", "lost"]


# ---------------------------------------------------------------- as a process


def test_a_reader_that_goes_away_and_a_terminal_without_unicode_are_no_errors(path: Path) -> None:
    environment = {**os.environ, "RUNTARA_URL": url_of(path), "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run([*PROGRAM, "show", "paid"], env=environment, capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "delivered \\xe9" in shown.stdout
    reading, writing = os.pipe()
    os.close(reading)
    try:
        gone = subprocess.run([*PROGRAM, "ls"], env=environment, stdout=writing, stderr=subprocess.PIPE)
    finally:
        os.close(writing)
    assert (gone.returncode, gone.stderr) == (1, b"")


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain \u00e9 \u4e2d \U0001f600", "plain \u00e9 \u4e2d \U0001f600"),
        ("\x1b[2J\x07\0\x7f\x9b", "\\x1b[2J\\x07\\x00\\x7f\\x9b"),
        ("a\r\n\tb", "a\\r\\n\\tb"),
        ("\u202e\u2028\u200b\ufeff", "\\u202e\\u2028\\u200b\\ufeff"),
        ("\ud800\U000e0001", "\\ud800\\U000e0001"),
        ("[bold]x[/bold] :smile:", "[bold]x[/bold] :smile:"),
    ],
)
def test_what_is_not_printed_as_itself_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_long_payloads_are_shortened_and_say_so() -> None:
    assert payload(b"x" * 80) == "x" * 80
    assert payload(b"x" * 81) == f"{'x' * 80}... (81 characters)"
    assert (payload(None), payload(b""), payload(b"\xff" * 5)) == ("-", "", "(5 bytes)")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-5, "0s"), (0.9, "0s"), (59, "59s"), (60, "1m 0s"), (3_661, "1h 1m"), (90_061, "1d 1h")],
)
def test_an_age_is_told_in_its_two_largest_units(seconds: float, shown: str) -> None:
    assert age(round(seconds * 1_000_000)) == shown


def test_an_instant_outside_the_calendar_is_told_as_a_number() -> None:
    assert (moment(0), moment(None), moment(2**62)) == ("1970-01-01T00:00:00.000000Z", "-", f"{2**62}us")


def test_json_is_ascii_and_marks_what_it_cannot_hold() -> None:
    assert json_line({"a": "\u202e\x9b"}) == '{"a": "\\u202e\\u009b"}'
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for bad in (float("inf"), [float("nan")], deep):
        assert json.loads(json_line({"a": 1, "b": bad})) == {"a": 1, "undecodable": ["b"]}


def test_every_command_says_what_it_does() -> None:
    listed = CliRunner().invoke(main, []).output
    for name, command in main.commands.items():
        assert name in listed
        assert command.help, name


# ---------------------------------------------------------------- the page


PAGE = Path(__file__).parent.parent / "docs" / "operating.md"
OPERATING = (
    "ls",
    *("show", "events", "steps", "checkpoints", "errors"),
    *("stats", "violations", "check", "backup", "restore", "purge"),
)


@pytest.fixture
def in_its_folder(master: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder has a store under the name that is looked for without a url."""
    shutil.copy(master, tmp_path / "runtara.db")
    monkeypatch.chdir(tmp_path)
    for name in ("RUNTARA_STORE", "RUNTARA_URL", "RUNTARA_TENANT"):
        monkeypatch.delenv(name, raising=False)


def test_the_page_has_every_command() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [name for name in OPERATING if f"| `runtara {name}" not in text] == []
    assert set(OPERATING) <= set(main.commands)


def test_the_commands_on_the_page_say_what_is_shown(in_its_folder: None) -> None:
    [session] = re.findall(r"^```console\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    shown = ""
    for line in session.splitlines():
        if line.startswith("$ runtara "):
            shown += f"{line}\n{CliRunner().invoke(main, line.split()[2:]).output}"
    assert shown == session


async def test_the_program_on_the_page_says_what_is_shown(in_its_folder: None) -> None:
    [example] = examples_of(PAGE)
    code = compile(example.source, "operating.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        await as_function(code, {"runtara": runtara})()
    assert said.getvalue() == example.output
