"""`connect`: the surface of a runtime over a connection to a gateway."""

import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import trio

from runtara.errors import RuntimeClosed, ValidationError
from runtara.ids import check_tenant_id
from runtara.questions import Question, made_of, questions_of
from runtara.randomness import Randomness, SystemRandomness
from runtara.tenant import Runtime
from runtara.transport.client import Client, ClientLimits, parse_address
from runtara.wire import CODECS, MSGPACK_PROTOCOL

QUESTIONS: Final = questions_of(Runtime)
DEFAULT_URL: Final = "ws://127.0.0.1:8001"


class ClientAsker:
    """Carries the questions of a `Runtime`."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def ask(self, name: str, arguments: Mapping[str, Any]) -> Any:
        found: Question = QUESTIONS[name]
        return await self.client.ask(name, None, made_of(found, arguments), found.answer)


@asynccontextmanager
async def connect(
    url: str | None = None,
    *,
    token: str | None = None,
    tenant: str | None = None,
    protocol: str = MSGPACK_PROTOCOL,
    tls: ssl.SSLContext | None = None,
    limits: ClientLimits | None = None,
    randomness: Randomness | None = None,
) -> AsyncGenerator[Runtime, None]:
    """Connect to a gateway; gives a `Runtime` with the same surface as an embedded one.

    The connection comes back by itself, with its sessions, as long as the context is open; calls wait for it.

    Args:
        url: ``ws://host:8001`` or ``wss://host``; by default ``RUNTARA_URL``, or this machine.
        token: By default ``RUNTARA_TOKEN``. It is sent in the first message, never in the url.
        tenant: Only where the gateway asks for no tokens, or the token has the role admin.
        protocol: ``runtara.v1.msgpack`` or ``runtara.v1.json``.
        tls: For ``wss``; by default one that checks the server against the machine's certificates.

    Raises:
        ValidationError: An argument is ill formed.
        Unauthorized, Forbidden: The gateway does not let the token in; at once, or later from every call.

    Cancellation: Sessions that are open are ended, and the gateway is told if it can be reached at once.
    """
    if protocol not in CODECS:
        raise ValidationError("protocol", f"must be one of {', '.join(CODECS)}")
    if tenant is not None:
        check_tenant_id(tenant)
    random = randomness or SystemRandomness()
    client = Client(
        parse_address(url or os.environ.get("RUNTARA_URL") or DEFAULT_URL),
        token=token or os.environ.get("RUNTARA_TOKEN") or None,
        tenant=tenant,
        randomness=random,
        codec=CODECS[protocol],
        tls=tls,
        limits=limits,
    )
    failure: BaseException | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.run)
        try:
            await client.first_welcome.wait()
            if client.welcome is None:
                raise client.fatal or RuntimeClosed("the client is closed")
            yield Runtime(client, random, client.welcome.tenant, asker=ClientAsker(client))
        except (Exception, KeyboardInterrupt, SystemExit) as error:  # the nursery would wrap it in a group
            failure = error
        finally:
            await client.leave_server()
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
