"""Figures, and the tables that they are printed in.

Rules:

1. A figure is the median of its repetitions; the smallest and the largest stand beside it, for the machine is
   never quiet.
2. A ratio is the median of the ratios of neighbours: both sides were measured right after one another, so
   that a slow minute slows both.
"""

import statistics
from collections.abc import Sequence

import attrs


@attrs.frozen(kw_only=True)
class Effort:
    """How much is measured."""

    repeats: int = 5
    seconds: float = 2.0
    """Of one repetition of a load."""
    live: int = 100_000
    suspended: int = 100_000
    few_rows: int = 100_000
    many_rows: int = 10_000_000


FULL = Effort()
QUICK = Effort(repeats=1, seconds=0.2, live=500, suspended=1000, few_rows=2000, many_rows=4000)


@attrs.frozen(kw_only=True)
class Figure:
    """One line of a table."""

    name: str
    values: tuple[float, ...]
    unit: str
    beside: str = ""
    """What it is compared with, in words and numbers."""
    goal: str = ""
    met: bool | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def figure(
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    beside: str = "",
    at_least: float | None = None,
    at_most: float | None = None,
) -> Figure:
    """A figure, held against its goal if it has one."""
    median = statistics.median(values)
    goal, met = "", None
    if at_least is not None:
        goal, met = f">= {number(at_least)}", median >= at_least
    if at_most is not None:
        goal, met = f"<= {number(at_most)}", median <= at_most
    return Figure(name=name, values=tuple(values), unit=unit, beside=beside, goal=goal, met=met)


def ratios(ours: Sequence[float], others: Sequence[float]) -> list[float]:
    """Neighbour by neighbour (rule 2)."""
    return [mine / other for mine, other in zip(ours, others, strict=True)]


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def table(figures: Sequence[Figure]) -> list[str]:
    """The lines of a table in Markdown."""
    lines = ["| what | median | smallest to largest | beside it | goal | |", "|---|---|---|---|---|---|"]
    for one in figures:
        verdict = {True: "met", False: "MISSED", None: ""}[one.met]
        spread = f"{number(min(one.values))} to {number(max(one.values))}" if len(one.values) > 1 else ""
        middle = f"{number(one.median)} {one.unit}".strip()
        lines.append(f"| {one.name} | {middle} | {spread} | {one.beside} | {one.goal} | {verdict} |")
    return lines
