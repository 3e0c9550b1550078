"""The commands ``serve``, ``token`` and ``health``."""

import logging
import sys
from functools import partial

import click
import trio

from runtara.cli.options import STORE, Look, Scope, acting, asks, gateway, is_gateway
from runtara.cli.printing import Columns, fields, moment, say, say_json, say_pairs, say_table, visible
from runtara.operations import Role, role_words
from runtara.server import DEFAULT_PORT
from runtara.server import serve as run_server
from runtara.tenant import Health
from runtara.tokens import Made, Token

LEVELS = ("debug", "info", "warning", "error")


@click.command()
@click.option("--store", "url", default=STORE, envvar="RUNTARA_STORE", show_default=True, help="Its url.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True)
@click.option("--tls-cert", type=click.Path(), help="A certificate chain in PEM.")
@click.option("--tls-key", type=click.Path(), help="Its key in PEM.")
@click.option("--insecure", is_flag=True, help="Let everybody in who reaches the port, without tokens.")
@click.option("--origin", "origins", multiple=True, help="A browser page that may connect.")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", show_default=True)
def serve(
    url: str,
    host: str,
    port: int,
    tls_cert: str | None,
    tls_key: str | None,
    insecure: bool,
    origins: tuple[str, ...],
    log_level: str,
) -> None:
    """Serve a store over WebSocket until SIGTERM or SIGINT.

    The first signal drains: sessions are asked to leave and get some time, the rest is suspended, and all
    that was acknowledged is on disk. A second signal hurries. The exit code is 0 after a drain, 2 if an
    option cannot be, 1 if another process holds the store, and 3 if the store cannot be used or failed.
    """
    logging.basicConfig(
        level=log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("trio-websocket").setLevel(logging.WARNING)  # it logs what peers send
    trio.run(
        partial(
            run_server,
            url,
            host=host,
            port=port,
            tls_cert=tls_cert,
            tls_key=tls_key,
            insecure=insecure,
            origins=frozenset(origins),
        )
    )


# ---------------------------------------------------------------- tokens


@click.group()
def token() -> None:
    """Make, list and revoke the tokens that a gateway asks for."""


@token.command()
@asks(Scope.ONE)
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice([role.value for role in Role]),
    default=("instance", "operator"),
    show_default=True,
    help="What its bearer may do.",
)
@click.option("--days", type=click.FloatRange(min=0, min_open=True), help="How long it is good for.")
@click.option("--name", default="", help="Whose it is.")
def create(look: Look, roles: tuple[str, ...], days: float | None, name: str) -> None:
    """Make a token and print it: this once, only its hash is kept."""

    async def run() -> Made:
        async with acting(look) as runtime:
            seconds = None if days is None else days * 86_400
            return await runtime.create_token(roles=roles, seconds=seconds, name=name)

    made = trio.run(run)
    if look.json:
        say_json({**shown(made.token), "token": made.text})
    else:
        say(made.text)


@token.command("ls")
@asks(Scope.ONE)
def list_tokens(look: Look) -> None:
    """List the tokens of a tenant; none shows its secret."""

    async def run() -> tuple[Token, ...]:
        async with acting(look) as runtime:
            return await runtime.list_tokens()

    found = trio.run(run)
    if look.json:
        say_json(*(shown(one) for one in found))
    else:
        say_table(found, TOKEN_COLUMNS)


@token.command()
@asks(Scope.ONE)
@click.argument("token_id")
@click.pass_context
def revoke(context: click.Context, look: Look, token_id: str) -> None:
    """End a token now, on open connections too."""

    async def run() -> bool:
        async with acting(look) as runtime:
            return await runtime.revoke_token(token_id)

    done = trio.run(run)
    if look.json:
        say_json({"token_id": token_id, "revoked": done})
    else:
        say("revoked" if done else f"there is no token {visible(token_id)}")
    if not done:
        context.exit(1)


def shown(one: Token) -> dict[str, object]:
    return {
        "token_id": one.token_id,
        "tenant_id": one.tenant_id,
        "roles": role_words(one.roles),
        "created_us": one.created_us,
        "expires_us": one.expires_us,
        "name": one.name,
    }


TOKEN_COLUMNS: Columns[Token] = {
    "TOKEN": lambda one: one.token_id,
    "TENANT": lambda one: one.tenant_id,
    "ROLES": lambda one: ",".join(role_words(one.roles)),
    "CREATED": lambda one: moment(one.created_us),
    "EXPIRES": lambda one: moment(one.expires_us),
    "NAME": lambda one: one.name or "-",
}


# ---------------------------------------------------------------- health


@click.command()
@asks(Scope.ONE)
@click.pass_context
def health(context: click.Context, look: Look) -> None:
    """Ask a gateway how it is; the exit code is 1 if it takes no new work or its writes wait."""
    if not is_gateway(look.url):
        raise click.UsageError("--url must name a gateway, such as ws://127.0.0.1:8001")

    async def run() -> Health:
        async with gateway(look) as runtime:
            return await runtime.health()

    found = trio.run(run)
    if look.json:
        say_json({"ok": found.ok, **fields(found)})
    else:
        say_pairs([(name.replace("_", " "), plain_word(value)) for name, value in fields(found).items()])
    if not found.ok:
        context.exit(1)


def plain_word(value: object) -> str:
    return "-" if value is None else f"{value:,}" if type(value) is int else str(value)
