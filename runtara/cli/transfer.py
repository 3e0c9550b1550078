"""The commands ``export`` and ``import``: a whole store to a file of lines, and back.

How far they are is told on the standard error stream: drawn where it is a terminal, else a line every few
seconds.
"""

import os
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import click
import trio
from rich.console import Console
from rich.text import Text

import runtara
from runtara.cli.options import Look, Scope, asks
from runtara.cli.printing import json_line, visible
from runtara.transfer.exporting import Exported
from runtara.transfer.importing import Imported
from runtara.transfer.items import Progress, Skipped
from runtara.transfer.stores import STANDARD, discard_from, export_to, import_from

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

STATUSES: Final = [status.word for status in runtara.Status if status is not runtara.Status.UNKNOWN]
INCOMPLETE: Final = 1
"""The exit code of an export that left something out."""
EVERY_US: Final = 5_000_000
"""Between two lines about the progress."""


class Shown:
    """The progress of a transfer, on the standard error stream."""

    def __init__(self, size: int | None = None) -> None:
        self.size = size
        """Bytes to be read, where that is known."""
        self.console = Console(stderr=True, highlight=False)
        self.bar: Bar | None = None
        self.tasks: dict[str, TaskID] = {}
        self.clock: runtara.Clock = runtara.SystemClock()
        self.last_us = self.clock.now_us()

    def __enter__(self) -> "Shown":
        if self.console.is_terminal:
            from rich.progress import Progress  # what draws is loaded only when there is something to draw

            self.bar = Progress(console=self.console, transient=True)
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def report(self, progress: Progress) -> None:
        """Show how far it is."""
        if self.bar is not None:
            self.draw(self.bar, progress)
        elif (now_us := self.clock.now_us()) >= self.last_us + EVERY_US:
            self.last_us = now_us
            self.say(text_of(progress))

    def draw(self, bar: "Bar", progress: Progress) -> None:
        if progress.verb not in self.tasks:
            self.tasks[progress.verb] = bar.add_task(progress.verb, total=None)
        done, total = (
            (progress.instances, progress.of) if progress.of is not None else (progress.bytes, self.size)
        )
        bar.update(self.tasks[progress.verb], completed=done, total=total, description=text_of(progress))

    def tell(self, skipped: Skipped) -> None:
        """Say what was left out."""
        whose = "/".join(part for part in (skipped.tenant_id, skipped.instance_id) if part is not None)
        which = skipped.what if skipped.revision is None else f"{skipped.what} {skipped.revision}"
        self.say(f"left out: {whose} {which}: {skipped.problem}")

    def say(self, text: str) -> None:
        self.console.print(Text(visible(text)), soft_wrap=True)


def text_of(progress: Progress) -> str:
    return f"{progress.verb} {progress.instances:,} instances, {progress.lines:,} lines"


def conclude(look: Look, values: dict[str, Any], text: str, *, aside: bool = False) -> None:
    """The last line: on the standard output, unless the data went there."""
    click.echo(json_line(values) if look.json else visible(text), err=aside)


# ---------------------------------------------------------------- export


@click.command("export")
@asks(Scope.STORE)
@click.argument("file")
@click.option("--tenant", "tenant_id", help="Only this tenant's instances.")
@click.option("--status", "statuses", multiple=True, type=click.Choice(STATUSES), help="Only any of these.")
@click.option(
    "--resume", "go_on", is_flag=True, help="Go on with what an export that was broken off has left."
)
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@click.option("--salvage", is_flag=True, help="Leave out what cannot be read, and say so.")
@click.pass_context
def export(
    context: click.Context,
    look: Look,
    file: str,
    tenant_id: str | None,
    statuses: tuple[str, ...],
    go_on: bool,
    force: bool,
    salvage: bool,
) -> None:
    """Write all instances with all their history to FILE, also while a program works on the store.

    The lines are JSON. FILE appears when it is whole; until then it is called FILE.part. With - it is the
    standard output. The exit code is 1 if something was left out.
    """
    with Shown() as shown:
        work = partial(
            export_to,
            look.url,
            file,
            program=runtara.__version__,
            tenant_id=tenant_id,
            statuses=frozenset(runtara.Status[word.upper()] for word in statuses),
            report=shown.report,
            tell=shown.tell,
            go_on=go_on,
            force=force,
            salvage=salvage,
        )
        done: Exported = trio.run(work)
    conclude(
        look,
        {
            "file": file,
            "counts": done.counts,
            "bytes": done.bytes,
            "sha256": done.sha256,
            "skipped": done.skipped,
        },
        f"{file}: {done.counts.get('instance', 0):,} instances, {done.bytes:,} bytes"
        + (f"; {done.skipped:,} lines say what was left out" if done.skipped else ""),
        aside=file == STANDARD,
    )
    if done.skipped:
        context.exit(INCOMPLETE)


# ---------------------------------------------------------------- import


@click.command("import")
@asks(Scope.STORE)
@click.argument("file", required=False)
@click.option("--skip-existing", is_flag=True, help="Leave instances alone that are in the store already.")
@click.option("--discard", is_flag=True, help="Take back what an unfinished import has brought.")
def import_(look: Look, file: str | None, skip_existing: bool, discard: bool) -> None:
    """Read all instances from a FILE that `export` made into the store, which is made if there is none.

    A FILE is verified as a whole before anything is written; the standard input (-) is read as it comes. An
    import that was broken off goes on when it is started again, and until it is over no runtime opens the
    store. While a program has the store open it is refused.
    """
    if discard == (file is not None) or (discard and skip_existing):
        raise click.UsageError("give a FILE, or --discard alone")
    with Shown(None if file is None else size_of(file)) as shown:
        if file is None:
            removed = trio.run(discard_from, look.url, shown.report)
        else:
            work = partial(import_from, look.url, file, skip_existing=skip_existing, report=shown.report)
            done: Imported = trio.run(work)
    if file is None:
        conclude(look, {"removed": removed}, f"removed {removed:,} instances")
    else:
        conclude_import(look, file, done)


def size_of(file: str) -> int | None:
    try:
        return None if file == STANDARD else os.path.getsize(file)
    except OSError:  # whoever opens it says why
        return None


def conclude_import(look: Look, file: str, done: Imported) -> None:
    values = {
        "file": file,
        "counts": done.counts,
        "bytes": done.bytes,
        "sha256": done.sha256,
        "existing": done.existing,
        "skipped": done.skipped,
        "before": done.before,
    }
    if done.before:
        conclude(look, values, f"{file}: was imported before; nothing was done")
        return
    notes = [f"{done.counts.get('instance', 0) - done.existing:,} instances imported"]
    if done.existing:
        notes.append(f"{done.existing:,} were there already")
    if done.skipped:
        notes.append(f"{done.skipped:,} lines say what the export itself is missing")
    conclude(look, values, f"{file}: {'; '.join(notes)}")
