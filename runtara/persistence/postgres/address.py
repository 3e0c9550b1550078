"""Where a store lies in PostgreSQL, and getting a connection to it.

Rules:

1. A url is libpq's own, with one parameter more: ``schema``, the schema that holds the tables.
2. Names are looked up by trio, and libpq is given numbers: it would block the loop otherwise. Each address of
   each host is tried in turn, with ``connect_timeout`` seconds for each.
3. A cut wire must not hang a call: keepalives and ``tcp_user_timeout`` are set unless the url says otherwise.
4. After a failed attempt the next one waits, longer each time up to `LONGEST_DELAY`, with jitter, however
   many tasks ask.
"""

from typing import Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

import attrs
import psycopg
import trio
from psycopg import pq
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from runtara.errors import ValidationError
from runtara.persistence.postgres.driver import Connection, Denied, Lost
from runtara.randomness import Randomness

SCHEMA: Final = "runtara"
LONGEST_SCHEMA: Final = 63
"""In bytes; PostgreSQL cuts off the rest of a longer name."""

DEFAULTS: Final = {
    "connect_timeout": "5",
    "keepalives": "1",
    "keepalives_idle": "2",
    "keepalives_interval": "1",
    "keepalives_count": "3",
    "tcp_user_timeout": "5000",
    "client_encoding": "UTF8",
    "gssencmode": "disable",
}

SEVERAL_HOSTS: Final[dict[bool, dict[str, str]]] = {
    False: {},
    True: {"target_session_attrs": "read-write"},
}
"""Of several hosts, all but one are standbys."""

FIRST_DELAY: Final = 0.05
LONGEST_DELAY: Final = 2.0


@attrs.frozen
class Address:
    """A database, as a url of libpq, and the schema in it."""

    url: str
    schema: str = SCHEMA

    @property
    def location(self) -> str:
        """For people: without the password."""
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        return f"{parts.scheme}://{host}{parts.path} schema {self.schema}"


def parse_address(url: str, schema: str | None = None) -> Address:
    """The parts of ``url``; an argument ``schema`` wins over the parameter.

    Raises:
        ValidationError: The url or the schema is ill formed.
    """
    parts = urlsplit(url)
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    named = dict(pairs).get("schema", SCHEMA) if schema is None else schema
    rest = urlencode([(name, value) for name, value in pairs if name != "schema"], quote_via=quote)
    plain = urlunsplit(parts._replace(query=rest))
    if not plain.startswith(f"{parts.scheme}://"):  # urlunsplit drops the slashes of an empty host
        plain = plain.replace(":", "://", 1)
    if not named or len(named.encode()) > LONGEST_SCHEMA or "\0" in named or named.startswith("pg_"):
        raise ValidationError("schema", f"must be 1 to {LONGEST_SCHEMA} bytes long and not begin with pg_")
    try:
        conninfo_to_dict(plain)
    except psycopg.Error as error:
        raise ValidationError("url", f"is no url of PostgreSQL: {' '.join(str(error).split())}") from error
    return Address(plain, named)


def parameters_of(url: str) -> dict[str, str]:
    """All parameters of libpq for ``url``: its own, then the environment's, then `DEFAULTS`."""
    from_environment = {
        option.keyword.decode(): option.val.decode()
        for option in pq.Conninfo.get_defaults()
        if option.val is not None and option.keyword in (b"host", b"hostaddr", b"port")
    }
    given = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
    return {**DEFAULTS, **from_environment, **given}


async def attempts(parameters: dict[str, str]) -> list[dict[str, str]]:
    """One set of parameters for each address of each host (rule 2)."""
    hosts = parameters.get("host", "").split(",")
    numbers = parameters.get("hostaddr", "").split(",") if parameters.get("hostaddr") else [""] * len(hosts)
    ports = parameters.get("port", "5432").split(",")
    found: list[dict[str, str]] = []
    if len(numbers) > len(hosts):
        hosts = hosts + [""] * (len(numbers) - len(hosts))
    for at, (host, number) in enumerate(zip(hosts, numbers, strict=True)):
        port = (ports[at] if len(ports) > 1 else ports[0]) or "5432"
        alone = {
            **SEVERAL_HOSTS[len(hosts) > 1],
            **parameters,
            "host": host,
            "port": port,
            "hostaddr": number,
        }
        if number or not host or host.startswith(("/", "@")):
            found.append({name: value for name, value in alone.items() if value})
            continue
        found += [{**alone, "hostaddr": address} for address in await look_up(host)]
    return found


async def look_up(host: str) -> list[str]:
    try:
        answers = await trio.socket.getaddrinfo(host, None, type=trio.socket.SOCK_STREAM)
    except OSError as error:
        raise Lost(f"the host {host} is not known: {error}") from error
    return list(dict.fromkeys(str(answer[4][0]) for answer in answers))


@attrs.define(eq=False)
class Connector:
    """Makes connections to one database (rules 2 to 4)."""

    address: Address
    application: str
    """How the sessions call themselves, for people who look at ``pg_stat_activity``."""
    randomness: Randomness
    failures: int = 0
    """Attempts that failed since the last one that did not."""
    not_before: float = 0.0
    """When the next attempt may be made, as trio's clock has it."""

    async def connect(self) -> Connection:
        """A new connection.

        Raises:
            Denied: One of the addresses does not let us in, and no other does.
            Lost: There is no server at any of them, or not now.

        Cancellation: Nothing is left behind.
        """
        await trio.sleep_until(self.not_before)
        try:
            connection = await self.try_all()
        except BaseException:
            self.failures += 1
            longest = min(LONGEST_DELAY, FIRST_DELAY * 2 ** min(self.failures - 1, 10))
            self.not_before = trio.current_time() + longest * (0.5 + self.randomness.fraction() / 2)
            raise
        self.failures = 0
        return connection

    async def try_all(self) -> Connection:
        parameters = {**parameters_of(self.address.url), "application_name": self.application}
        seconds = float(parameters["connect_timeout"])
        told: list[str] = []
        kind = Lost
        for attempt in await attempts(parameters):
            try:
                with trio.fail_after(seconds):
                    return await Connection.connect(make_conninfo("", **attempt).encode())
            except trio.TooSlowError:
                told.append(f"{attempt.get('host')} does not answer within {seconds:g} s")
            except Lost as error:
                told.append(str(error))
                kind = Denied if isinstance(error, Denied) else kind
        raise kind("; ".join(told))
