"""The server: a runtime, a gateway before it, and how both end.

Rules:

1. Without tokens the gateway listens on loopback only, and says so; anything else needs ``insecure``.
2. A signal to stop begins the drain: no new connections, ``drain`` and shutdown signals to all, up to
   ``drain_seconds`` for sessions to leave, the rest is suspended due at once, the sockets are closed (1001),
   and the store last. A second signal hurries: what is left is suspended at once.
3. What a limit of the gateway is called here, it is called in the environment, in capitals behind
   ``RUNTARA_GATEWAY_``.
"""

import ipaddress
import logging
import os
import signal
import socket
import ssl
from collections.abc import Mapping
from typing import Any, Final

import attrs
import trio

from runtara.clock import Clock, default_clock
from runtara.config import parse
from runtara.errors import ValidationError
from runtara.randomness import Randomness, SystemRandomness
from runtara.runtime import open_runtime
from runtara.serving import ServedRuntime
from runtara.tenant import Runtime
from runtara.tokens import Tokens
from runtara.transport.gateway import Gateway
from runtara.transport.limits import ConnectionLimits, GatewayLimits, StreamLimits

logger = logging.getLogger("runtara.server")

DEFAULT_PORT: Final = 8001
BACKLOG: Final = 1024
PREFIX: Final = "RUNTARA_GATEWAY_"
STOPPING: Final = (signal.SIGTERM, signal.SIGINT)


# ---------------------------------------------------------------- limits


def gateway_limits(environment: Mapping[str, str], **arguments: Any) -> GatewayLimits:
    """The limits of a gateway, from arguments and, where those are silent, the environment (rule 3).

    Raises:
        ValidationError: A value is ill formed or out of range, or an argument is no limit.
    """
    parts: dict[type[Any], dict[str, Any]] = {GatewayLimits: {}, StreamLimits: {}, ConnectionLimits: {}}
    left = dict(arguments)
    for kind, values in parts.items():
        for field in attrs.fields(kind):
            if field.name in ("stream", "connection"):
                continue
            text = environment.get(PREFIX + field.name.upper())
            if field.name in left:
                values[field.name] = left.pop(field.name)
            elif text is not None:
                values[field.name] = parse(field.name, text, field.type, PREFIX)
    for name in left:
        raise ValidationError(name, "is no limit of the gateway")
    for values in parts.values():
        for name, value in values.items():
            check_limit(name, value)
    return GatewayLimits(
        **parts[GatewayLimits],
        stream=StreamLimits(**parts[StreamLimits]),
        connection=ConnectionLimits(**parts[ConnectionLimits]),
    )


def check_limit(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 2**53:
        raise ValidationError(name, "must be a number over 0")


# ---------------------------------------------------------------- where to listen


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_safe(host: str, tokens: Tokens, insecure: bool) -> None:
    """Rule 1. Raises `ValidationError`."""
    if tokens.required or insecure or is_loopback(host):
        return
    raise ValidationError(
        "host",
        f"{host} can be reached from elsewhere, and there are no tokens: make one with "
        "'runtara token create', or say --insecure",
    )


def tls_context(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    """Raises `ValidationError` if the files cannot be used."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ValidationError("tls_cert", "and tls_key go together")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ValidationError("tls_cert", f"cannot be used: {error}") from None
    return context


async def open_listeners(
    host: str, port: int, tls: ssl.SSLContext | None
) -> tuple[list["trio.abc.Listener[trio.abc.Stream]"], list[int]]:
    """Listen on all addresses of ``host``; returns the listeners and their ports.

    Raises:
        ValidationError: The address cannot be listened on.
    """
    try:
        plain = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
    except (OSError, socket.gaierror) as error:
        raise ValidationError("port", f"{host}:{port} cannot be listened on: {error}") from None
    ports = [listener.socket.getsockname()[1] for listener in plain]
    if tls is None:
        return list(plain), ports
    return [trio.SSLListener(listener, tls, https_compatible=True) for listener in plain], ports


# ---------------------------------------------------------------- the server


@attrs.define(eq=False)
class Server:
    """A server that runs. Made by `serve`, which hands it to ``task_status``."""

    runtime: Runtime
    gateway: Gateway
    tokens: Tokens
    ports: list[int]
    address: str
    stopping: trio.Event = attrs.Factory(trio.Event)

    def stop(self) -> None:
        """Begin the drain, as a signal does."""
        self.stopping.set()


async def serve(
    url: str = "sqlite:///runtara.db",
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    insecure: bool = False,
    origins: frozenset[str] = frozenset(),
    limits: GatewayLimits | None = None,
    clock: Clock | None = None,
    randomness: Randomness | None = None,
    signals: bool = True,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
    **settings: Any,
) -> None:
    """Serve a store over WebSocket until a signal stops it; returns when everything is on disk and closed.

    Args:
        url: Of the store; see `open_runtime`.
        host: To listen on. Anything but loopback needs tokens, or ``insecure``.
        port: 0 lets the machine choose.
        tls_cert, tls_key: Files in PEM; with them the gateway speaks ``wss``.
        origins: Of the browser pages that may connect, such as ``https://app.example``.
        limits: See `gateway_limits`.
        signals: Whether SIGTERM and SIGINT stop it; only in the main thread.
        settings: See `open_runtime`.

    Raises:
        ValidationError: An argument is ill formed, or the address cannot be listened on.
        StoreError: See `open_runtime`.

    Cancellation: Drains all the same, as `open_runtime` does.
    """
    tls = tls_context(tls_cert, tls_key)
    wall = clock or default_clock()
    random = randomness or SystemRandomness()
    async with open_runtime(url, clock=wall, randomness=random, **settings) as runtime:
        tokens = Tokens(runtime.system.store, wall, random)
        await tokens.load()
        require_safe(host, tokens, insecure)
        listeners, ports = await open_listeners(host, port, tls)
        backend = ServedRuntime(runtime.system, tokens, random)
        gateway = Gateway(backend, random, limits or gateway_limits(os.environ), origins)
        tokens.watchers.add(gateway.revoked)
        scheme = "ws" if tls is None else "wss"
        server = Server(runtime, gateway, tokens, ports, f"{scheme}://{host}:{ports[0]}")
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(gateway.serve, listeners)
                say_where(server, insecure)
                if signals:
                    await nursery.start(stop_on_signals, server)
                task_status.started(server)
                await server.stopping.wait()
                await drain(server, listeners)
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                for listener in listeners:
                    await trio.aclose_forcefully(listener)


def say_where(server: Server, insecure: bool) -> None:
    logger.info("listening on %s", server.address)
    if not server.tokens.required:
        reach = "everybody who reaches it is let in" if insecure else "only this machine reaches it"
        logger.warning("there are no tokens: %s", reach)


async def stop_on_signals(
    server: Server, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """The first signal begins the drain, the second hurries it (rule 2)."""
    with trio.open_signal_receiver(*STOPPING) as received:
        task_status.started()
        async for number in received:
            if server.stopping.is_set():
                logger.warning("%s again: hurrying", signal.Signals(number).name)
                server.runtime.system.hurry()
            else:
                logger.info("%s: draining", signal.Signals(number).name)
                server.stop()


async def drain(server: Server, listeners: list["trio.abc.Listener[trio.abc.Stream]"]) -> None:
    server.gateway.begin_drain()
    for listener in listeners:
        await trio.aclose_forcefully(listener)
    await server.runtime.system.drain()
    await server.gateway.finish_drain()
