"""The command ``runtara``.

Every error is one line on the standard error stream, which begins with its code. What the exit codes mean
stands in `runtara.cli.options`.
"""

import io
import math
import sys
from collections.abc import Callable
from typing import Any

import click

import runtara
from runtara.cli.control import cancel, pause, resume, signal, terminate, watch
from runtara.cli.instances import checkpoints, errors, events, list_instances, show, steps
from runtara.cli.options import exit_code
from runtara.cli.printing import visible
from runtara.cli.serve import health, serve, token
from runtara.cli.stores import backup, check, purge, restore, stats, violations
from runtara.cli.transfer import export, import_


class Program(click.Group):
    """A group whose errors are one line each."""

    def main(self, *args: Any, **extra: Any) -> Any:
        run: Callable[..., Any] = super().main
        if not extra.pop("standalone_mode", True):
            return run(*args, standalone_mode=False, **extra)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # for what the terminal's encoding lacks
        try:
            code = run(*args, standalone_mode=False, **extra)
        except click.ClickException as error:
            click.echo(f"runtara: {visible(error.format_message())}", err=True)
            code = error.exit_code
        except runtara.RuntaraError as error:
            click.echo(f"runtara: {visible(line_of(error))}", err=True)
            code = exit_code(error)
        except click.Abort:
            click.echo("runtara: interrupted", err=True)
            code = 130
        sys.exit(code)


def line_of(error: runtara.RuntaraError) -> str:
    """Code and message, and the instance where the message does not name it."""
    line = f"{error.code}: {error.message}"
    return f"{line}: {error.details['instance_id']}" if isinstance(error, runtara.InstanceNotFound) else line


def finite(context: click.Context, parameter: click.Parameter, value: float) -> float:
    """A range lets NaN through, which is in no range."""
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is no number of seconds", context, parameter)
    return value


@click.group(cls=Program, invoke_without_command=True)
@click.version_option(runtara.__version__, prog_name="runtara")
@click.pass_context
def main(context: click.Context) -> None:
    """Runtara: durable execution for trio programs."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@main.command()
@click.option("--kills", type=click.IntRange(0, 100), default=5, show_default=True, help="How many SIGKILLs.")
@click.option(
    "--instances", type=click.IntRange(1, 1000), default=30, show_default=True, help="How many runs at once."
)
@click.option(
    "--seconds",
    type=click.FloatRange(1, 600),
    callback=finite,
    default=8.0,
    show_default=True,
    help="How long the longest run works; restarts and sleeps come on top.",
)
@click.option("--keep", is_flag=True, help="Keep the folder with the store and the side-effect log.")
@click.pass_context
def demo(context: click.Context, kills: int, instances: int, seconds: float, keep: bool) -> None:
    """Watch runs survive kill -9, and check afterwards that nothing was lost.

    A child process carries out the runs. It is killed with SIGKILL at random moments and started again. In
    the end the store is compared with a log that the child kept beside it. The exit code is 0 if all is
    verified, and 1 if not.
    """
    from runtara.cli.demo import run_demo  # what draws is loaded only when there is something to draw

    context.exit(run_demo(kills=kills, instances=instances, seconds=seconds, keep=keep))


for command in (list_instances, show, events, steps, checkpoints, errors):
    main.add_command(command)
for command in (stats, violations, check, backup, restore, purge):
    main.add_command(command)
for command in (signal, cancel, pause, resume, terminate, watch):
    main.add_command(command)
for command in (serve, token, health):
    main.add_command(command)
for command in (export, import_):
    main.add_command(command)
