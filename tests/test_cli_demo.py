"""The demo: what it verifies, and the demo itself as a process."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from click.testing import CliRunner

import runtara
from runtara.cli import main
from runtara.cli.demo import lifetimes
from runtara.cli.demo_log import Entry, Kind, LogReader, SideLog, parse
from runtara.cli.demo_plan import NAP, PAYMENTS, STEPS, Plan, payment
from runtara.cli.demo_screen import Progress, picture
from runtara.cli.demo_verify import Stored, StoredSignal, numbers, violations
from runtara.randomness import SeededRandomness

PLAN = Plan(instances=2, seconds=1.0)
FIRST = "order-001"

# ------------------------------------------------------------ a demo in which nothing went wrong


def true_entries() -> list[Entry]:
    """One kill, in the middle of the step ``reserve`` of the first order."""
    entries = [Entry(Kind.UP, 1), Entry(Kind.DID, 1, FIRST, "reserve"), Entry(Kind.UP, 2)]
    for instance_id in PLAN.instance_ids:
        for name in STEPS:
            entries.append(Entry(Kind.DID, 2, instance_id, name))
            entries.append(Entry(Kind.ACK, 2, instance_id, name, name.encode()))
        entries.append(Entry(Kind.SLEPT, 2, instance_id, NAP, b"1000 1001"))
        for name in PAYMENTS:
            entries.append(Entry(Kind.SENT, 2, instance_id, name, payment(instance_id, name)))
            entries.append(Entry(Kind.GOT, 2, instance_id, name, payment(instance_id, name)))
        entries.append(Entry(Kind.DONE, 2, instance_id, value=b"delivered"))
    return entries


def true_order(instance_id: str) -> Stored:
    payments = [(name, payment(instance_id, name)) for name in PAYMENTS]
    return Stored(
        instance_id=instance_id,
        status="completed",
        output=b"delivered",
        checkpoints=(*((name, name.encode()) for name in STEPS), (NAP, b"nap"), *payments),
        signals=tuple(StoredSignal(payload=payload, consumed=True) for _, payload in payments),
    )


def true_store() -> list[Stored]:
    return [true_order(instance_id) for instance_id in PLAN.instance_ids]


def with_entries(*more: Entry) -> tuple[str, ...]:
    """The violations of a true demo whose log has more lines."""
    return violations(PLAN, [*true_entries(), *more], true_store())


def with_order(**changes: object) -> tuple[str, ...]:
    """The violations of a true demo whose store has another first order."""
    first, *others = true_store()
    return violations(PLAN, true_entries(), [attrs.evolve(first, **changes), *others])  # type: ignore[arg-type] # each test gives the type of its field


def checkpoints_but(name: str, *instead: bytes) -> tuple[tuple[str, bytes], ...]:
    kept = [pair for pair in true_order(FIRST).checkpoints if pair[0] != name]
    return (*kept, *((name, state) for state in instead))


def test_a_demo_in_which_nothing_went_wrong_has_no_violations() -> None:
    assert violations(PLAN, true_entries(), true_store()) == ()


def test_the_numbers_are_counted_from_the_log_and_the_store() -> None:
    found = numbers([*true_entries(), *true_entries()[-6:]], true_store())
    assert (found.completed, found.acknowledged, found.finished_steps) == (2, 18, 12)
    assert (found.repeated_steps, found.signals, found.sendings, found.consumed) == (1, 4, 6, 4)
    assert found.sleeps == 2


# ------------------------------------------------------------ planted faults


def test_a_lost_acknowledged_checkpoint_is_reported() -> None:
    assert with_order(checkpoints=checkpoints_but("charge")) == (
        "order-001: the acknowledged checkpoint charge is not in the store",
    )


def test_a_changed_byte_is_reported() -> None:
    assert with_order(checkpoints=checkpoints_but("charge", b"chargE")) == (
        "order-001: the checkpoint charge holds b'chargE', acknowledged was b'charge'",
    )


def test_a_checkpoint_that_is_stored_twice_is_reported() -> None:
    assert with_order(checkpoints=checkpoints_but("charge", b"charge", b"charge")) == (
        "order-001: the checkpoint charge is in the store 2 times",
    )


def test_a_checkpoint_that_was_read_with_other_bytes_later_is_reported() -> None:
    assert with_entries(Entry(Kind.ACK, 3, FIRST, "charge", b"other")) == (
        "order-001: the checkpoint charge holds b'charge', acknowledged was b'other'",
    )


def test_a_finished_step_that_ran_again_is_reported() -> None:
    assert with_entries(Entry(Kind.DID, 3, FIRST, "charge")) == (
        "order-001: the finished step charge ran again in life 3",
    )


def test_a_step_that_was_never_done_is_reported() -> None:
    entries = [e for e in true_entries() if (e.kind, e.place) != (Kind.DID, (FIRST, "charge"))]
    assert violations(PLAN, entries, true_store()) == (
        "order-001: the step charge was acknowledged, and its body never ran",
    )


def test_a_doubly_consumed_signal_is_reported() -> None:
    twice = payment(FIRST, "payment-1")
    entries = [
        attrs.evolve(e, value=twice) if (e.kind, e.place) == (Kind.GOT, (FIRST, "payment-2")) else e
        for e in true_entries()
    ]
    first, *others = true_store()
    first = attrs.evolve(first, checkpoints=checkpoints_but("payment-2", twice))
    assert violations(PLAN, entries, [first, *others]) == (
        "order-001: the signal b'payment-1 of order-001' was consumed 2 times",
        "order-001: the signal b'payment-2 of order-001' reached nobody",
    )


def test_a_wait_that_received_two_different_things_is_reported() -> None:
    wrong = with_entries(Entry(Kind.GOT, 3, FIRST, "payment-2", b"other"))
    assert "order-001: the wait payment-2 received different things: [b'other', " in "\n".join(wrong)
    assert "order-001: the signal b'other' was received, and never sent" in wrong


def test_a_lost_signal_is_reported() -> None:
    signals = true_order(FIRST).signals[:1]
    assert with_order(signals=signals) == (
        "order-001: the accepted signal b'payment-2 of order-001' is not in the store",
    )


def test_a_signal_that_nobody_consumed_is_reported() -> None:
    one, two = true_order(FIRST).signals
    assert with_order(signals=(one, attrs.evolve(two, consumed=False))) == (
        "order-001: the signal b'payment-2 of order-001' was never consumed",
    )


def test_a_signal_that_is_stored_twice_or_was_never_sent_is_reported() -> None:
    signals = true_order(FIRST).signals
    assert with_order(signals=(*signals, signals[0])) == (
        "order-001: the signal b'payment-1 of order-001' is in the store 2 times",
    )
    assert with_order(signals=(*signals, StoredSignal(payload=b"forged", consumed=False))) == (
        "order-001: nobody sent the signal b'forged'",
    )


def test_an_order_that_is_missing_unfinished_or_changed_is_reported() -> None:
    missing = violations(PLAN, [Entry(Kind.UP, 1)], [])
    assert missing == ("order-001 is not in the store", "order-002 is not in the store")
    assert with_order(status="running") == ("order-001 is running, not completed",)
    assert with_order(output=b"lost") == ("order-001 has the output b'lost', acknowledged was b'delivered'",)


def test_a_sleep_that_ended_early_or_whose_deadline_moved_is_reported() -> None:
    assert with_entries(Entry(Kind.SLEPT, 3, FIRST, NAP, b"1000 999")) == (
        "order-001: nap ended 1 microseconds too early",
    )
    assert with_entries(Entry(Kind.SLEPT, 3, FIRST, NAP, b"2000 2001")) == (
        "order-001: the deadline of nap moved in life 3",
    )


# ------------------------------------------------------------ the log, the plan and the picture


def test_a_log_is_read_while_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader, entries = LogReader(path), true_entries()
    assert reader.read_new() == []
    log = SideLog(path)
    for entry in entries[:3]:
        log.write(entry)
    assert reader.read_new() == entries[:3]
    log.write(entries[3])
    os.write(log.descriptor, b"ack 2 order")  # what is not a whole line yet is left for later
    assert reader.read_new() == entries[3:4]
    os.write(log.descriptor, b"-001 charge 00ff\n")
    assert reader.read_new() == [Entry(Kind.ACK, 2, FIRST, "charge", b"\x00\xff")]
    log.close()


@pytest.mark.parametrize("line", ["", "ack", "ack x order-001 charge 00", "ate 1 a b 00", "ack 1 a b 0"])
def test_a_damaged_line_of_the_log_is_no_entry(line: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unpack|valid|hex"):
        parse(line)
    (tmp_path / "log").write_text(f"up 1 - - -\n{line}\n")
    with pytest.raises(ValueError, match="line 2 of the side-effect log is damaged"):
        LogReader(tmp_path / "log").read_new()


def test_every_kill_comes_before_the_longest_order_can_have_ended() -> None:
    plan = Plan(instances=7, seconds=8.0)
    for seed in range(50):
        lives = lifetimes(5, plan.kill_seconds, SeededRandomness(seed))
        assert len(lives) == 5
        assert min(lives) >= 0
        assert sum(lives) < plan.work_seconds(plan.instance_ids[-1]) == 8.0


def test_the_picture_has_a_cell_for_each_order_and_says_what_it_leaves_out() -> None:
    progress = Progress(Plan(instances=100, seconds=1.0))
    progress.add([e for e in true_entries() if e.instance_id in ("-", FIRST)])
    assert progress.summary == "9 checkpoints acknowledged, 2 signals accepted, 1 of 100 runs completed"
    drawn = [str(part) for part in picture(progress, 80).renderables]
    assert drawn[1:] == ["... and 10 more", f"child 2, kills: 0; {progress.summary}"]


# ------------------------------------------------------------ the command


def test_the_version_is_said() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, result.output) == (0, f"runtara, version {runtara.__version__}\n")


def test_without_a_command_there_is_help() -> None:
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 0
    assert "demo" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--kills", "-1"], "Invalid value for '--kills': -1 is not in the range 0<=x<=100."),
        (["demo", "--instances", "0"], "Invalid value for '--instances': 0 is not in the range 1<=x<=1000."),
        (["demo", "--instances", "many"], "Invalid value for '--instances'"),
        (["demo", "--seconds", "0"], "Invalid value for '--seconds': 0.0 is not in the range"),
        (["demo", "--seconds", "nan"], "Invalid value for '--seconds': nan is no number of seconds"),
        (["demo", "extra"], "Got unexpected extra argument (extra)"),
        (["demonstrate"], "No such command 'demonstrate'."),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert result.output.startswith(f"runtara: {message}")
    assert result.output.count("\n") == 1


# ------------------------------------------------------------ the demo itself


def start_demo(temporary: Path, *options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", "from runtara.cli import main; main()", "demo", *options],
        env={**os.environ, "TMPDIR": str(temporary), "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_short_demo_verifies_what_it_did_and_leaves_nothing_behind(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, "--kills", "2", "--instances", "8", "--seconds", "2")
    said, _ = demo.communicate(timeout=60)
    assert demo.returncode == 0, said
    assert re.search(r"^  kills +2 ", said, re.M)
    assert re.search(r"^  instances +8   8 completed$", said, re.M)
    assert re.search(r"^  acknowledged checkpoints +72 ", said, re.M)
    assert re.search(r"^  signals +16   sent \d+ times in all, 16 consumed$", said, re.M)
    assert said.splitlines()[-1].startswith("verified: ")
    assert "\x1b" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_demo_keeps_its_folder_when_asked_to(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, "--kills", "0", "--instances", "1", "--seconds", "1", "--keep")
    said, _ = demo.communicate(timeout=60)
    assert demo.returncode == 0, said
    [kept] = tmp_path.iterdir()
    assert f"kept: {kept}" in said.splitlines()
    assert {"demo.db", "effects.log"} <= {path.name for path in kept.iterdir()}


def test_an_interrupted_demo_kills_its_child_and_removes_its_folder(tmp_path: Path) -> None:
    demo = start_demo(tmp_path, "--kills", "0")
    assert demo.stdout is not None
    with demo.stdout:
        demo.stdout.readline()
        started = re.fullmatch(r"started child 1, process (\d+)\n", demo.stdout.readline())
        assert started is not None
        demo.send_signal(signal.SIGINT)
        rest = demo.stdout.read()
    assert demo.wait(timeout=30) == 130
    assert rest == "interrupted; the child was killed, and nothing is left behind\n"
    assert is_gone(int(started[1]))
    assert list(tmp_path.iterdir()) == []


def test_a_child_that_ends_by_itself_is_reported(tmp_path: Path) -> None:
    """Planted: a store in whose place there is something else. The folder stays, to be looked into."""
    script = """
import tempfile
from pathlib import Path
from runtara.cli import main
make = tempfile.mkdtemp
def planted(prefix):
    folder = make(prefix=prefix)
    Path(folder, "demo.db").write_text("This is no database, and long enough to be read as one. " * 20)
    return folder
tempfile.mkdtemp = planted
main(["demo", "--kills", "1", "--instances", "1", "--seconds", "1"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "TMPDIR": str(tmp_path), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("  child 1 ended by itself with code 1: runtara.errors.StoreCorrupt: "), (
        done.stdout
    )
    assert "NOT verified: 1 violations" in done.stdout
    assert len(list(tmp_path.iterdir())) == 1
