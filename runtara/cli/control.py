"""The commands that act: ``signal``, ``cancel``, ``pause``, ``resume``, ``terminate``, ``watch``."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import click
import trio

import runtara
from runtara.cli.options import Look, Scope, acting, asks
from runtara.cli.printing import fields, say, say_json, visible, word

T = TypeVar("T")


def act(look: Look, action: Callable[[runtara.Runtime], Awaitable[T]]) -> T:
    """What comes of an action. Raises `RuntaraError`, which becomes a line and an exit code."""

    async def run() -> T:
        async with acting(look) as runtime:
            return await action(runtime)

    return trio.run(run)


def say_signal(look: Look, instance_id: str, reply: runtara.SignalReply) -> None:
    if look.json:
        say_json({"instance_id": instance_id, **fields(reply)})
        return
    effect = "took effect" if reply.applied else "waits until the instance acknowledges it"
    say(f"{visible(instance_id)} is {word(reply.status)}: signal {reply.signal_id} {effect}")


@click.command()
@asks(Scope.ONE)
@click.argument("instance_id")
@click.argument("key")
@click.argument("payload", required=False)
@click.option("--request-id", help="Sent again under the same id, it is stored once.")
@click.option("--store-if-unknown", is_flag=True, help="Keep it for an instance that does not exist yet.")
def signal(
    look: Look,
    instance_id: str,
    key: str,
    payload: str | None,
    request_id: str | None,
    store_if_unknown: bool,
) -> None:
    """Send a custom signal with a PAYLOAD of text to a KEY of an instance."""
    data = None if payload is None else payload.encode(errors="surrogateescape")
    reply = act(
        look,
        lambda runtime: runtime.send_custom_signal(
            instance_id, key, data, idempotency_key=request_id, store_if_unknown=store_if_unknown
        ),
    )
    say_signal(look, instance_id, reply)


@click.command()
@asks(Scope.ONE)
@click.argument("instance_id")
@click.argument("why", required=False)
def cancel(look: Look, instance_id: str, why: str | None) -> None:
    """Cancel an instance; WHY is stored as its error."""
    send(look, instance_id, "cancel", why)


@click.command()
@asks(Scope.ONE)
@click.argument("instance_id")
def pause(look: Look, instance_id: str) -> None:
    """Pause an instance until it is resumed."""
    send(look, instance_id, "pause", None)


@click.command()
@asks(Scope.ONE)
@click.argument("instance_id")
def resume(look: Look, instance_id: str) -> None:
    """Let a paused instance go on."""
    send(look, instance_id, "resume", None)


def send(look: Look, instance_id: str, type: str, text: str | None) -> None:
    payload = None if text is None else text.encode(errors="surrogateescape")
    reply = act(look, lambda runtime: runtime.send_signal(instance_id, type, payload))
    say_signal(look, instance_id, reply)


@click.command()
@asks(Scope.ONE)
@click.argument("instance_id")
@click.argument("why", required=False)
def terminate(look: Look, instance_id: str, why: str | None) -> None:
    """End an instance now, whatever it does, without its compensations."""
    reply = act(look, lambda runtime: runtime.terminate(instance_id, why))
    if look.json:
        say_json({"instance_id": instance_id, **fields(reply)})
    else:
        say(f"{visible(instance_id)} is {word(reply.status)}")


@click.command()
@asks(Scope.ONE)
@click.argument("instance_id")
def watch(look: Look, instance_id: str) -> None:
    """Follow an instance until it has ended."""

    async def follow(runtime: runtara.Runtime) -> None:
        async with runtime.watch(instance_id) as changes:
            async for change in changes:
                say_change(look, change)

    act(look, follow)


def say_change(look: Look, change: runtara.Change) -> None:
    if look.json:
        say_json(fields(change))
        return
    what = ", ".join(change.kinds)
    checkpoint = "" if change.checkpoint_id is None else f" at {visible(change.checkpoint_id)}"
    say(f"{change.revision}: {word(change.status)}/{word(change.reason)}{checkpoint} ({what})")
