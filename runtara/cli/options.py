"""What the operators' commands take in common, and how they ask.

Exit codes: 0 done; 1 refused, not found, or (``check``, ``violations``) something was found; 2 the command
line is wrong; 3 the store cannot be used.
"""

import functools
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from enum import Enum
from typing import Any, Final, TypeVar

import attrs
import click
import trio

import runtara
from runtara.cli.printing import Columns, fields, is_unknown, say, say_json, say_table

T = TypeVar("T")
Command = Callable[..., None]

STORE: Final = "sqlite:///runtara.db"
TENANT: Final = "default"
MOST: Final = 1000
CONNECT_SECONDS: Final = 10.0
EPOCH_MS: Final = re.compile(r"(-?[0-9]{1,18})ms", re.ASCII)


class Scope(Enum):
    """Whose instances a command is about."""

    STORE = "the store as a whole"
    ONE = "one tenant's"
    SEVERAL = "one tenant's or everybody's"


def instant(value: str) -> datetime | int:
    """ISO 8601 with an offset, or milliseconds since 1970 as ``1700000000000ms``."""
    if (found := EPOCH_MS.fullmatch(value)) is not None:
        return int(found[1]) * 1000
    try:
        moment = datetime.fromisoformat(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is no time: write 2026-01-31T12:00:00+02:00, or milliseconds since 1970 as"
            " 1769853600000ms"
        ) from None
    if moment.utcoffset() is None:
        raise click.BadParameter(f"{value!r} has no offset from UTC: write {value}Z or {value}+02:00")
    return moment


@attrs.frozen(kw_only=True)
class Look:
    """What a command was told about where to look, and how to show it."""

    url: str
    tenant: str | None
    """None: all of them."""
    json: bool
    limit: int
    cursor: str | None
    oldest_first: bool

    @property
    def page(self) -> dict[str, Any]:
        return {"limit": self.limit, "cursor": self.cursor, "descending": not self.oldest_first}


# ---------------------------------------------------------------- options


def store_options() -> list[Callable[[Command], Command]]:
    return [
        click.option(
            "--url",
            default=STORE,
            envvar=["RUNTARA_URL", "RUNTARA_STORE"],
            show_default=True,
            show_envvar=True,
            help="Of the store, or of a gateway (ws://host:8001).",
        ),
        click.option("--json", "json", is_flag=True, help="One JSON object a line, everything in full."),
    ]


def tenant_options(scope: Scope) -> list[Callable[[Command], Command]]:
    if scope is Scope.STORE:
        return []
    one = click.option(
        "--tenant",
        default=TENANT,
        envvar="RUNTARA_TENANT",
        show_default=True,
        show_envvar=True,
        help="Whose instances.",
    )
    if scope is Scope.ONE:
        return [one]
    return [one, click.option("--all-tenants", is_flag=True, help="Everybody's instances.")]


def page_options() -> list[Callable[[Command], Command]]:
    return [
        click.option(
            "--limit", type=click.IntRange(1, MOST), default=100, show_default=True, help="Items at most."
        ),
        click.option("--cursor", help="Go on where a page ended, in the same order."),
        click.option("--oldest-first", is_flag=True, help="The other way round."),
    ]


def count_option(command: Command) -> Command:
    return click.option("--count", is_flag=True, help="Only say how many there are.")(command)


def range_options(what: str) -> Callable[[Command], Command]:
    """``--created-from`` and ``--created-before``, if ``what`` is ``created``."""

    def decorate(command: Command) -> Command:
        before = click.option(f"--{what}-before", type=instant, help="And before this instant.")
        return click.option(f"--{what}-from", type=instant, help=f"{what.title()} at or after this.")(
            before(command)
        )

    return decorate


def scope_options(command: Command) -> Command:
    """Of events and steps."""
    for option in (
        click.option("--root-only", is_flag=True, help="Without a parent scope."),
        click.option("--parent-scope", "parent_scope_id", help="With this parent scope."),
        click.option("--scope", "scope_id", help="In this scope."),
    ):
        command = option(command)
    return command


def asks(scope: Scope, *, paged: bool = False) -> Callable[[Command], Command]:
    """Give a command the common options, and hand them to it as a `Look`."""

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            everybody = values.pop("all_tenants", scope is Scope.STORE)
            tenant = values.pop("tenant", None)
            look = Look(
                url=values.pop("url"),
                tenant=None if everybody else tenant,
                json=values.pop("json"),
                limit=values.pop("limit") if paged else MOST,
                cursor=values.pop("cursor") if paged else None,
                oldest_first=values.pop("oldest_first") if paged else False,
            )
            command(look, **values)

        decorated: Command = run
        pages = page_options() if paged else []
        for option in reversed([*store_options(), *tenant_options(scope), *pages]):
            decorated = option(decorated)
        return decorated

    return decorate


# ---------------------------------------------------------------- asking and answering


def ask(look: Look, question: Callable[[runtara.Reader], Awaitable[T]]) -> T:
    """The answer of the store. Raises `RuntaraError`, which becomes a line and an exit code."""

    async def run() -> T:
        if is_gateway(look.url):
            async with gateway(look) as runtime:
                return await question(runtime)
        async with runtara.open_reader(look.url, tenant=look.tenant) as reader:
            return await question(reader)

    return trio.run(run)


def is_gateway(url: str) -> bool:
    return url.startswith(("ws://", "wss://"))


@asynccontextmanager
async def gateway(look: Look) -> AsyncIterator[runtara.Runtime]:
    """A connection to the gateway that ``--url`` names, with ``RUNTARA_TOKEN``.

    Raises:
        ClickException: There is no answer within `CONNECT_SECONDS`.
    """
    if look.tenant is None:
        raise click.UsageError("--all-tenants is for stores; a gateway answers for the tenant of its token")
    tenant = None if look.tenant == TENANT else look.tenant
    with trio.move_on_after(CONNECT_SECONDS) as patience:
        async with runtara.connect(look.url, tenant=tenant) as runtime:
            patience.deadline = math.inf
            yield runtime
    if patience.cancelled_caught:
        raise click.ClickException(f"no gateway answers at {look.url}")


@asynccontextmanager
async def acting(look: Look) -> AsyncIterator[runtara.Runtime]:
    """A runtime that changes instances: that of a gateway, or one on a store that nobody else holds."""
    if is_gateway(look.url):
        async with gateway(look) as runtime:
            yield runtime
        return
    await require_store(look.url)
    async with runtara.open_runtime(look.url, tenant=look.tenant or TENANT) as runtime:
        yield runtime


async def require_store(url: str) -> None:
    """A store that is not there must not be made by the wish to change something in it.

    Raises:
        StoreNotFound: It is not there.
    """
    with suppress(runtara.StoreTooOld):
        async with runtara.open_reader(url):
            pass


def answer_count(look: Look, count: int) -> None:
    if look.json:
        say_json({"count": count})
    else:
        say(str(count))


def answer_page(
    look: Look,
    page: "runtara.Page[Any]",
    columns: Columns[Any],
    as_json: Callable[[Any], dict[str, Any]] = fields,
) -> None:
    """One page, and the cursor of the next."""
    if look.json:
        say_json(*(as_json(item) for item in page.items))
        if page.next is not None:
            say_json({"next": page.next})
        return
    say_table(page.items, columns)
    if any(is_unknown(value) for item in page.items for value in attrs.astuple(item, recurse=False)):
        say("? marks a number that this version does not know")
    if page.next is not None:
        say(f"more: --cursor {page.next}")


def exit_code(error: runtara.RuntaraError) -> int:
    """See the module's docstring."""
    match error:
        case runtara.ValidationError():
            return 2
        case runtara.StoreError() if not isinstance(error, runtara.StoreLocked):
            return 3
    return 1
