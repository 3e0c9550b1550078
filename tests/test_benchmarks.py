"""The benchmarks still run, every one of them. What they measure in so short a time means nothing."""

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.figures import figure, percentile, ratios, table

ROOT = Path(__file__).parent.parent


def run_benchmarks(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_measurement_prints_figures_of_its_own() -> None:
    text = run_benchmarks()
    rows = dict(re.findall(r"^\| ([^|]+) \| ([\d.,]+) [^|]*\|", text, re.MULTILINE))
    for name in (
        "checkpoints, 1 instance",
        "raw, 1 per commit",
        "1,000 instances over raw",
        "lateness of a 1 ms ticker, p99",
        "saturated loop over free loop, 100 instances",
        "memory per idle live instance",
        "opening with 1,000 suspended instances, until the first answer",
        "a checkpoint with 2,000 rows",
        "events, 100 instances",
        "signals sent and consumed, 100 instances",
        "a signal from the call to the session, p50",
    ):
        assert float(rows[name].replace(",", "")) > 0, text


def test_the_layers_of_a_checkpoint_are_told_apart() -> None:
    text = run_benchmarks("--layers")
    for layer in ("inside SQLite", "machine: needs, decide", "mailbox and actor", "neither thread"):
        assert len(re.findall(rf"^ +-?[\d.]+ us  .*{layer}", text, re.MULTILINE)) >= 1, text


def test_a_figure_is_a_median_that_is_held_against_its_goal() -> None:
    (line,) = table([figure("speed", [3.0, 1.0, 2.0], "/s", at_least=2.0)])[2:]
    assert line == "| speed | 2.00 /s | 1.00 to 3.00 |  | >= 2.00 | met |"
    (line,) = table([figure("memory", [12.0], "KiB", at_most=10.0)])[2:]
    assert line == "| memory | 12.0 KiB |  |  | <= 10.0 | MISSED |"


def test_ratios_compare_neighbours_and_percentiles_are_of_the_sorted_values() -> None:
    assert ratios([1.0, 6.0], [2.0, 3.0]) == [0.5, 2.0]
    assert percentile([5.0, 1.0, 3.0], 50) == 3.0
    assert percentile([5.0, 1.0, 3.0], 99) == 5.0
