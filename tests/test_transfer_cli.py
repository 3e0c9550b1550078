"""``runtara export`` and ``runtara import``, as processes and from within; killed, and gone on with."""

import json
import os
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner, Result
from rich.console import Console

import runtara
from runtara.cli import main
from runtara.cli.transfer import Shown, text_of
from runtara.records import Status
from runtara.testing import samples
from runtara.transfer import writing
from runtara.transfer.format import read_line
from runtara.transfer.items import Header, Progress, Skipped
from tests.operated import HOSTILE, make_store
from tests.postgres_server import new_schema
from tests.postgres_server import url_of as schema_url
from tests.runtimes import HandClock, runtime, url_of
from tests.sqlite_stores import ROOT, opened
from tests.transfers import PAYLOAD_BYTES, content, exported, imported

PROGRAM = (sys.executable, "-c", "from runtara.cli import main; main()")
INSTANCES = 40


async def make(url: str) -> None:
    """Instances with a little history each."""
    async with opened(url.removeprefix("sqlite:///")) as store:
        row = await store.reserve(INSTANCES)
        units = [
            samples.creation(samples.instance(row + n, instance_id=f"i{n}"), *samples.one_of_each(1))
            for n in range(INSTANCES)
        ]
        await store.apply(units)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The url of a store that no test changes."""
    url = url_of(tmp_path_factory.mktemp("transfer") / "a.db")
    trio.run(make, url)
    return url


@pytest.fixture(scope="module")
def export(store: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of it."""
    path = tmp_path_factory.mktemp("export") / "a.jsonl"
    assert invoke("export", "--url", store, str(path)).exit_code == 0
    return path


def invoke(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, list(arguments), env=environment)


def run(*arguments: str, data: bytes | None = None) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run([*PROGRAM, *arguments], input=data, capture_output=True, cwd=ROOT, check=False)


def content_of(url: str) -> bytes:
    """What is in a store, without what belongs to an export."""

    async def ask() -> bytes:
        async with opened(url.removeprefix("sqlite:///"), read_only=True) as store:
            return content(await exported(store))

    return trio.run(ask)


# ------------------------------------------------------------ there and back


def test_a_store_goes_to_a_file_and_back(store: str, tmp_path: Path) -> None:
    path, url = tmp_path / "a.jsonl", url_of(tmp_path / "b.db")
    first = invoke("export", "--url", store, str(path))
    assert (first.exit_code, first.stderr) == (0, "")
    assert first.stdout == f"{path}: {INSTANCES} instances, {path.stat().st_size:,} bytes\n"
    second = invoke("import", "--url", url, str(path))
    assert (second.exit_code, second.stderr) == (0, "")
    assert second.stdout == f"{path}: {INSTANCES} instances imported\n"
    assert content_of(url) == content_of(store)
    third = invoke("import", "--url", url, str(path))
    assert (third.exit_code, third.stdout) == (0, f"{path}: was imported before; nothing was done\n")
    fourth = invoke("import", "--url", url, str(path), "--skip-existing")
    assert fourth.stdout == f"{path}: 0 instances imported; {INSTANCES} were there already\n"


def test_a_store_goes_to_postgresql_and_back(export: Path, tmp_path: Path, store: str) -> None:
    postgres, url = schema_url(new_schema()), url_of(tmp_path / "b.db")
    back = tmp_path / "back.jsonl"
    for arguments in (("import", "--url", postgres, str(export)), ("export", "--url", postgres, str(back))):
        result = invoke(*arguments)
        assert (result.exit_code, result.stderr) == (0, "")
    assert content(back.read_bytes()) == content(export.read_bytes())
    header = read_line(back.read_bytes().splitlines(keepends=True)[0], 1, PAYLOAD_BYTES)
    assert isinstance(header, Header)
    assert (header.backend, header.program) == ("postgresql", runtara.__version__)
    assert invoke("import", "--url", url, str(back)).exit_code == 0
    assert content_of(url) == content_of(store)


def test_the_summary_in_json_holds_counts_and_a_digest_that_others_find_too(
    store: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    found = json.loads(invoke("export", "--url", store, str(path), "--json").stdout)
    command = f"head -n -1 {path} | sha256sum"
    digest = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    counts = {
        "instance",
        "checkpoint",
        "wait",
        "event",
        "step",
        "signal",
        "retry_attempt",
        "error",
        "request",
    }
    assert found == {
        "file": str(path),
        "counts": dict.fromkeys([*counts, "compensation_attempt"], INSTANCES),
        "bytes": path.stat().st_size,
        "sha256": digest.stdout.split()[0],
        "skipped": 0,
    }
    done = json.loads(invoke("import", "--url", url_of(tmp_path / "b.db"), str(path), "--json").stdout)
    assert done == {**found, "existing": 0, "before": False}


def test_the_standard_streams_take_an_export_too(store: str, tmp_path: Path) -> None:
    url = url_of(tmp_path / "b.db")
    first = run("export", "--url", store, "-")
    assert first.returncode == 0
    assert first.stderr.decode() == f"-: {INSTANCES} instances, {len(first.stdout):,} bytes\n"
    second = run("import", "--url", url, "-", data=first.stdout)
    assert (second.returncode, second.stdout.decode()) == (0, f"-: {INSTANCES} instances imported\n")
    assert content_of(url) == content(first.stdout)


def test_a_pipe_with_a_name_is_read_once_as_well(export: Path, tmp_path: Path) -> None:
    pipe, url = tmp_path / "pipe", url_of(tmp_path / "b.db")
    os.mkfifo(pipe)
    with subprocess.Popen(["cp", str(export), str(pipe)]) as process:
        result = invoke("import", "--url", url, str(pipe))
    assert (process.returncode, result.exit_code, result.stderr) == (0, 0, "")
    assert content_of(url) == content(export.read_bytes())


def test_a_reader_of_the_standard_output_that_leaves_ends_the_export(store: str) -> None:
    with subprocess.Popen(
        [*PROGRAM, "export", "--url", store, "-"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 2
    assert said == b"runtara: validation_error: file: whoever read the standard output is gone\n"


def test_only_what_is_asked_for_is_exported(tmp_path: Path) -> None:
    url = url_of(tmp_path / "a.db")
    trio.run(make_store, url)
    path = tmp_path / "a.jsonl"
    options = ("--tenant", "default", "--status", "completed", "--status", "failed")
    result = invoke("export", "--url", url, str(path), *options, "--json")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    statuses = {line["status"] for line in lines if line["t"] == "instance"}
    assert statuses <= {"completed", "failed"}
    assert json.loads(result.stdout)["counts"]["instance"] == len([x for x in lines if x["t"] == "instance"])
    assert (lines[0]["tenant_id"], lines[0]["statuses"]) == ("default", ["completed", "failed"])


# ------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("export", "x", "--url", "sqlite:///none.db"), 3, "store_not_found: "),
        (("export", "-", "--force"), 2, "validation_error: file: the standard output cannot be"),
        (("export", "x", "--tenant", "\n"), 2, "validation_error: tenant_id: "),
        (("export", "x", "--status", "dead"), 2, "Invalid value for '--status'"),
        (("import", "none.jsonl"), 2, "validation_error: file: none.jsonl: No such file or directory"),
        (("import",), 2, "give a FILE, or --discard alone"),
        (("import", "x", "--discard"), 2, "give a FILE, or --discard alone"),
        (("import", "--discard", "--skip-existing"), 2, "give a FILE, or --discard alone"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    arguments: tuple[str, ...], code: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == code
    assert result.stderr.startswith(f"runtara: {said}")
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_cut_off_is_refused_by_its_line(export: Path, tmp_path: Path) -> None:
    path, url = tmp_path / "x", url_of(tmp_path / "b.db")
    path.write_bytes(export.read_bytes()[:-5])
    result = invoke("import", "--url", url, str(path))
    lines = export.read_bytes().count(b"\n")
    assert result.exit_code == 1
    assert result.stderr == f"runtara: bad_export: line {lines}: line: has no end: the file is cut off\n"
    assert content_of(url) == b""


def test_a_value_over_the_setting_names_the_setting(tmp_path: Path) -> None:
    url, path = url_of(tmp_path / "a.db"), tmp_path / "a.jsonl"

    async def fill() -> None:
        async with opened(tmp_path / "a.db") as store:
            record = samples.instance(await store.reserve(1))
            await store.apply([samples.creation(record, samples.checkpoint(1, state=b"x" * 5000))])

    trio.run(fill)
    assert invoke("export", "--url", url, str(path)).exit_code == 0
    other = url_of(tmp_path / "b.db")
    result = invoke("import", "--url", other, str(path), RUNTARA_PAYLOAD_BYTES="4999")
    assert result.exit_code == 1
    assert result.stderr == (
        "runtara: bad_export: line 3: state: is 5000 bytes long, the limit is 4999 (RUNTARA_PAYLOAD_BYTES)\n"
    )
    assert invoke("import", "--url", other, str(path), RUNTARA_PAYLOAD_BYTES="5000").exit_code == 0


async def test_a_store_that_a_runtime_has_open_is_exported_and_not_imported_into(
    export: Path, tmp_path: Path
) -> None:
    url = url_of(tmp_path / "a.db")
    async with runtime(url) as rt:
        async with rt.register("a") as instance:
            await instance.checkpoint("one", b"1")
        refused = await trio.to_thread.run_sync(invoke, "import", "--url", url, str(export))
        assert refused.exit_code == 1
        assert refused.stderr.startswith("runtara: store_locked: ")
        done = await trio.to_thread.run_sync(invoke, "export", "--url", url, str(tmp_path / "a.jsonl"))
        assert (done.exit_code, done.stderr) == (0, "")
    assert b'"checkpoint_id":"one"' in (tmp_path / "a.jsonl").read_bytes()


def test_an_unfinished_import_is_gone_on_with_or_discarded(
    export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "BATCH_UNITS", 30)
    url = url_of(tmp_path / "b.db")

    async def begin() -> None:
        async with opened(tmp_path / "b.db") as store:
            with pytest.raises(runtara.BadExport):
                await imported(store, export.read_bytes()[:-5], twice=False)

    trio.run(begin)
    for command in (("export", str(tmp_path / "x")), ("purge", "i0")):
        result = invoke(*command, "--url", url)
        assert result.exit_code == 3
        assert result.stderr.startswith("runtara: import_unfinished: an import into ")
    discarded = invoke("import", "--url", url, "--discard", "--json")
    found = json.loads(discarded.stdout)["removed"]
    assert (discarded.exit_code, discarded.stderr) == (0, "")
    assert 0 < found <= INSTANCES
    assert content_of(url) == b""
    assert invoke("import", "--url", url, "--discard").exit_code == 2
    assert invoke("import", "--url", url, str(export)).exit_code == 0


def test_damage_is_left_out_and_said_and_the_exit_code_is_1(tmp_path: Path) -> None:
    path, url = tmp_path / "a.jsonl", url_of(tmp_path / "a.db")

    async def fill() -> None:
        async with opened(tmp_path / "a.db") as store:
            for number, name in enumerate(
                (HOSTILE.replace("\x1b", "").replace("\x07", "").replace("\n", ""), "b")
            ):
                record = samples.instance(number + 1, instance_id=name)
                await store.apply([samples.creation(record, samples.event(1))])
            write = store.write_connection
            assert write is not None
            write.execute("UPDATE events SET type = 99 WHERE instance = 1")

    trio.run(fill)
    assert invoke("export", "--url", url, str(path)).exit_code == 3
    result = invoke("export", "--url", url, str(path), "--force", "--salvage")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "left out: acme/declined [31m]0;title [red]markup[/red] \\u202enext event 1: type: "
    )
    assert result.stdout.endswith("; 1 lines say what was left out\n")
    done = invoke("import", "--url", url_of(tmp_path / "b.db"), str(path))
    assert done.exit_code == 0
    assert done.stdout.endswith("2 instances imported; 1 lines say what the export itself is missing\n")


# ------------------------------------------------------------ killed

REPORTER = """
import os, sys, trio
from runtara.transfer import importing, stores, writing

writing.BATCH_UNITS = 30
importing.FLUSHES_PER_NOTE = 2

def report(progress):
    os.write(1, f"{progress.verb} {progress.instances}\\n".encode())
    if progress.verb == wait_for[0] and progress.instances >= int(wait_for[1]):
        sys.stdin.readline()

async def export():
    await stores.export_to(url, file, program="1", report=report)

async def import_():
    await stores.import_from(url, file, report=report)

command, url, file, *wait_for = sys.argv[1:]
trio.run(export if command == "export" else import_)
"""


def kill_at(command: str, url: str, file: Path, verb: str, instances: int) -> None:
    """Begin a transfer in another process, and kill it there."""
    with subprocess.Popen(
        [sys.executable, "-c", REPORTER, command, url, str(file), verb, str(instances)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.decode().split() == [verb, str(instances)]:
                os.kill(process.pid, signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL


def test_an_import_that_is_killed_goes_on_where_it_was(export: Path, tmp_path: Path, store: str) -> None:
    url = url_of(tmp_path / "b.db")
    for verb, instances in (("imported", 9), ("imported", 25)):
        kill_at("import", url, export, verb, instances)
        opening = invoke("purge", "--url", url, "i0")
        assert (opening.exit_code, opening.stderr.split(": ")[1]) == (3, "import_unfinished")
    result = invoke("import", "--url", url, str(export))
    assert (result.exit_code, result.stdout) == (0, f"{export}: {INSTANCES} instances imported\n")
    assert content_of(url) == content_of(store)
    assert invoke("check", "--url", url).exit_code == 0


def test_an_export_that_is_killed_goes_on_where_it_was(export: Path, tmp_path: Path, store: str) -> None:
    path = tmp_path / "a.jsonl"
    kill_at("export", store, path, "exported", 11)
    part = path.with_name("a.jsonl.part")
    size = part.stat().st_size
    assert 0 < size < export.stat().st_size
    assert not path.exists()
    assert invoke("export", "--url", store, str(path)).exit_code == 2
    result = invoke("export", "--url", store, str(path), "--resume")
    assert (result.exit_code, result.stderr) == (0, "")
    assert not part.exists()
    assert content(path.read_bytes()) == content(export.read_bytes())
    assert invoke("import", "--url", url_of(tmp_path / "b.db"), str(path)).exit_code == 0


# ------------------------------------------------------------ the progress


def test_without_a_terminal_a_line_is_said_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = HandClock(0)
    with Shown() as shown:
        shown.clock = clock
        shown.last_us = 0
        for second in range(12):
            clock.us = second * 1_000_000
            shown.report(Progress(verb="exported", instances=second * 1000, lines=second, bytes=9))
    assert capsys.readouterr().err.splitlines() == [
        "exported 5,000 instances, 5 lines",
        "exported 10,000 instances, 10 lines",
    ]


def test_on_a_terminal_it_is_drawn_and_taken_away_again(monkeypatch: pytest.MonkeyPatch) -> None:
    out = StringIO()
    with Shown(size=200) as quiet:
        quiet.console = Console(file=out, force_terminal=True, width=100)
        quiet.__enter__()
        for of, size in ((None, 50), (40, 60)):
            quiet.report(Progress(verb="imported", instances=10, lines=7, bytes=size, of=of))
        quiet.tell(Skipped(tenant_id="acme", what="event", revision=3, problem="bad \x1b[31m"))
        assert quiet.bar is not None
        [task] = quiet.bar.tasks
        assert (task.completed, task.total) == (10, 40)
        assert task.description == text_of(Progress(verb="imported", instances=10, lines=7, bytes=0))
    assert "left out: acme event 3: bad \\x1b[31m" in out.getvalue()


def test_help_names_every_option() -> None:
    for command, options in (
        ("export", ("--url", "--tenant", "--status", "--resume", "--force", "--salvage", "--json")),
        ("import", ("--url", "--skip-existing", "--discard", "--json")),
    ):
        shown = invoke(command, "--help").output
        assert [option for option in options if option not in shown] == []


def test_every_status_can_be_asked_for() -> None:
    shown = invoke("export", "--help").output
    assert all(status.word in shown for status in Status if status is not Status.UNKNOWN)
