"""Measure: ``python -m benchmarks`` (which is ``make bench``) prints tables in Markdown.

Each figure is the median of alternating repetitions, and each ratio compares neighbours of the same run. The
whole takes some minutes, most of them for the file with ten million rows; ``--quick`` takes seconds and says
nothing about speed: it only shows that everything still runs.
"""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from benchmarks import profile
from benchmarks.checkpoints import lateness, rates, saturated
from benchmarks.figures import FULL, QUICK, Effort, Figure, table
from benchmarks.gateway import gateway
from benchmarks.growth import growth
from benchmarks.lists import lists, steps
from benchmarks.machine import describe
from benchmarks.memory import memory
from benchmarks.postgres import postgres
from benchmarks.reopening import reopening
from benchmarks.retention import retention
from benchmarks.signals import signals

Measurement = Callable[[Path, Effort], Iterator[Figure]]

MEASUREMENTS: dict[str, tuple[str, Measurement]] = {
    "checkpoints": ("Acknowledged checkpoints, 100-byte states", rates),
    "lateness": ("The loop under 100 instances that checkpoint", lateness),
    "saturated": ("A task that keeps the loop busy", saturated),
    "memory": ("Memory", memory),
    "reopening": ("Opening again", reopening),
    "growth": ("A large file", growth),
    "signals": ("Events and signals", signals),
    "lists": ("Lists of a large store", lists),
    "steps": ("Steps of one instance", steps),
    "retention": ("The purge of what has ended", retention),
    "postgres": ("PostgreSQL, 100-byte states", postgres),
    "gateway": ("The gateway, server and clients in two processes", gateway),
}


@click.command()
@click.option("--quick", is_flag=True, help="Only see that everything runs.")
@click.option("--only", multiple=True, type=click.Choice(list(MEASUREMENTS)), help="Measure only this.")
@click.option("--layers", is_flag=True, help="Show where the time goes instead.")
def main(quick: bool, only: tuple[str, ...], layers: bool) -> None:
    """Measure the runtime beside the raw limit of this machine."""
    effort = QUICK if quick else FULL
    for line in describe():
        click.echo(line)
    if layers:
        for line in profile.report(effort):
            click.echo(line)
        return
    missed: list[str] = []
    for name in only or MEASUREMENTS:
        title, measure = MEASUREMENTS[name]
        with tempfile.TemporaryDirectory(prefix="runtara-bench-") as own:
            folder = Path(own) / "files"
            folder.mkdir()
            figures = list(measure(folder, effort))
        if figures:
            click.echo("\n".join(["", f"### {title}", "", *table(figures)]))
        missed += [figure.name for figure in figures if figure.met is False]
    if not quick:
        click.echo(f"\nGoals missed: {', '.join(missed) or 'none'}")


if __name__ == "__main__":
    main()
