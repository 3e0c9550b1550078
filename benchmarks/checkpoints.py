"""Acknowledged checkpoints per second, beside the raw limit; the loop under that load; a saturated loop."""

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.figures import Effort, Figure, figure, number, ratios
from benchmarks.load import STATE, names, run_load
from benchmarks.raw import raw_rate

GOALS = {1: 1 / 3, 100: 0.5}
BATCH = 100


def fresh(folder: Path) -> Path:
    """The path of a file that does not exist; what was in the folder is removed."""
    for file in folder.iterdir():
        file.unlink()
    return folder / "bench.db"


def rates(folder: Path, effort: Effort) -> Iterator[Figure]:
    for instances in (1, 10, 100, 1000):
        batch = 1 if instances == 1 else BATCH
        ours, raw = [], []
        for _ in range(effort.repeats):
            raw.append(raw_rate(fresh(folder), instances, batch, effort.seconds, STATE))
            ours.append(run_load(fresh(folder), names(instances), effort.seconds).rate)
        what = f"{instances:,} instance{'s' if instances > 1 else ''}"
        yield figure(f"checkpoints, {what}", ours, "/s")
        yield figure(f"raw, {batch} per commit", raw, "/s")
        share = ratios(ours, raw)
        yield figure(f"{what} over raw", share, "", at_least=GOALS.get(instances))


def lateness(folder: Path, effort: Effort) -> Iterator[Figure]:
    found = [run_load(fresh(folder), names(100), effort.seconds, tick=True) for _ in range(effort.repeats)]
    yield figure("lateness of a 1 ms ticker, p50", [one.late(50) for one in found], "ms")
    yield figure("lateness of a 1 ms ticker, p99", [one.late(99) for one in found], "ms", at_most=10.0)


def saturated(folder: Path, effort: Effort) -> Iterator[Figure]:
    for instances in (1, 100):
        free, busy = [], []
        for _ in range(effort.repeats):
            free.append(run_load(fresh(folder), names(instances), effort.seconds).rate)
            busy.append(run_load(fresh(folder), names(instances), effort.seconds, saturate=True).rate)
        yield figure(
            f"saturated loop over free loop, {instances} instance{'s' if instances > 1 else ''}",
            ratios(busy, free),
            "",
            beside=f"{number(median(busy))}/s against {number(median(free))}/s",
            at_least=1 / 3 if instances == 100 else None,
        )
