"""The commands about a store: ``stats``, ``violations``, ``check``, ``backup``, ``restore``, ``purge``."""

from datetime import datetime
from functools import partial
from typing import Final

import click
import trio

import runtara
from runtara.cli.options import Look, Scope, acting, answer_page, ask, asks, instant
from runtara.cli.printing import Columns, fields, moment, plain, say, say_json, say_pairs, visible, word

FOUND: Final = 1
"""The exit code of a command that looks for trouble, and has found some."""
ENDED: Final = [status.word for status in runtara.Status if status.is_terminal]


@click.command()
@asks(Scope.SEVERAL)
def stats(look: Look) -> None:
    """Count instances by status, and say how large the store is (that is everybody's)."""

    async def question(reader: runtara.Reader) -> tuple[dict[runtara.Status, int], runtara.Growth]:
        return await reader.counts(), await reader.growth()

    counts, growth = ask(look, question)
    if look.json:
        say_json({"counts": plain(counts), **fields(growth)})
        return
    say_pairs(
        [
            *((word(status), f"{count:,}") for status, count in sorted(counts.items())),
            ("file bytes", "-" if growth.file_bytes is None else f"{growth.file_bytes:,}"),
            ("log bytes", "-" if growth.log_bytes is None else f"{growth.log_bytes:,}"),
            ("oldest end", moment(growth.oldest_finished_us)),
            *((f"rows of {table}", f"{rows:,}") for table, rows in growth.rows.items()),
        ]
    )


@click.command()
@asks(Scope.SEVERAL)
@click.option("--limit", "most", type=click.IntRange(1, 1000), default=100, show_default=True)
@click.pass_context
def violations(context: click.Context, look: Look, most: int) -> None:
    """List instances that rest and that nothing will ever move; the exit code is 1 if there are any.

    Which running ones have lost their session only the runtime itself can tell (`Runtime.violations`).
    """
    found = ask(look, lambda reader: reader.violations(limit=most))
    if look.json:
        say_json(*({"stuck": violation.stuck.value, **fields(violation.record)} for violation in found))
    elif found:
        answer_page(look, runtara.Page(items=found, next=None), VIOLATION_COLUMNS)
    else:
        say("every instance that rests has a reason to move")
    if found:
        context.exit(FOUND)


VIOLATION_COLUMNS: Final[Columns[runtara.Violation]] = {
    "TENANT": lambda v: v.record.tenant_id,
    "INSTANCE": lambda v: v.record.instance_id,
    "STUCK": lambda v: v.stuck.value,
    "STATUS": lambda v: word(v.record.status),
    "REASON": lambda v: word(v.record.reason),
    "LAST ACTIVITY": lambda v: moment(v.record.last_activity_us),
}


@click.command()
@asks(Scope.STORE)
@click.pass_context
def check(context: click.Context, look: Look) -> None:
    """Look for damage in the whole store; the exit code is 1 if there is any."""
    findings = ask(look, lambda reader: reader.verify())
    if look.json:
        say_json(*({"finding": finding} for finding in findings))
    else:
        say(*(visible(finding) for finding in findings or ["no damage was found"]))
    if findings:
        context.exit(FOUND)


@click.command()
@asks(Scope.STORE)
@click.argument("file")
def backup(look: Look, file: str) -> None:
    """Copy the store, as it is at one moment, to a new FILE, while a program works on it."""
    size = ask(look, lambda reader: reader.backup(file))
    if look.json:
        say_json({"file": file, "bytes": size})
    else:
        say(f"{visible(file)}: {size:,} bytes")


@click.command()
@asks(Scope.STORE)
@click.argument("file")
@click.option("--replace", is_flag=True, help="Put it in the place of a store that is there.")
def restore(look: Look, file: str, replace: bool) -> None:
    """Make the store from a FILE that `backup` made."""
    size = trio.run(partial(runtara.restore, file, look.url, replace=replace))
    if look.json:
        say_json({"file": file, "bytes": size})
    else:
        say(f"restored {size:,} bytes from {visible(file)}")


@click.command()
@asks(Scope.ONE)
@click.argument("instance_ids", nargs=-1, metavar="[INSTANCE_ID]...")
@click.option("--finished-before", "before", type=instant, help="All that ended before this instant.")
@click.option("--status", "statuses", multiple=True, type=click.Choice(ENDED), help="And ended like this.")
@click.option("--limit", "most", type=click.IntRange(1), help="How many at most.")
def purge(
    look: Look,
    instance_ids: tuple[str, ...],
    before: datetime | int | None,
    statuses: tuple[str, ...],
    most: int | None,
) -> None:
    """Delete instances that have ended, with all their history.

    It works as a runtime does: while a program has the store open it is refused, and says who that is. It
    stops at the first instance that may not be deleted.
    """
    if bool(instance_ids) == (before is not None):
        raise click.UsageError("name instances, or give --finished-before")
    if instance_ids and (statuses or most is not None):
        raise click.UsageError("--status and --limit go with --finished-before")

    async def run() -> int:
        async with acting(look) as runtime:
            if before is not None:
                return await runtime.purge_finished(before, statuses=statuses, limit=most)
            for instance_id in instance_ids:
                await purge_one(runtime, instance_id)
            return len(instance_ids)

    count = trio.run(run)
    if look.json:
        say_json({"purged": count})
    else:
        say(f"{count:,} purged")


async def purge_one(runtime: runtara.Runtime, instance_id: str) -> None:
    try:
        await runtime.purge(instance_id)
    except runtara.InvalidInstanceState as error:
        raise click.ClickException(f"{error.code}: {instance_id}: {error.message}") from error
