"""Promises P1 to P7 and P10 against SIGKILL: the short run of `tests.crash`, and proof that it can fail.

The crash test forks, and pytest has threads of its own: so it runs in a process of its own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KILLS = 80


def run_crash(*arguments: str) -> tuple[int, dict[str, str], str]:
    """Exit status, the figures by name, and the whole output."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.crash", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    text = done.stdout + done.stderr
    figures = {line[:17].strip(): line[17:] for line in done.stdout.splitlines() if line[:1] != " "}
    return done.returncode, figures, text


def leading_number(text: str) -> int:
    return int(text.split()[0])


def test_a_writer_killed_at_any_moment_loses_nothing_that_it_acknowledged() -> None:
    status, figures, text = run_crash("--kills", str(KILLS), "--seed", "20240")
    print(text)
    assert figures["lost"] == "0", text
    assert figures["other faults"] == "0", text
    assert status == 0, text
    assert leading_number(figures["kills"]) >= KILLS
    assert leading_number(figures["acknowledgements"]) > 20 * KILLS, "the writers hardly did anything"
    assert leading_number(figures["unacknowledged"]) > 0, "no kill ever fell between a commit and its answer"
    for moment in ("at work", "opening", "closing"):
        found = re.search(rf"(\d+) {moment}", figures["kills"])
        assert found is not None
        assert int(found.group(1)) > 0, f"no kill fell while {moment}"


@pytest.mark.parametrize("plant", ["answer-before-commit", "forget-consumption"])
def test_the_crash_test_finds_a_planted_bug(plant: str) -> None:
    status, figures, text = run_crash("--kills", "15", "--plant", plant)
    assert status == 1, text
    assert leading_number(figures["lost"]) > 0, text
