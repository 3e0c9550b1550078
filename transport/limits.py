"""The bounds and deadlines of a gateway: of one socket, of one connection, and of all of them together."""

import attrs

from runtara.limits import MEBIBYTE


@attrs.frozen(kw_only=True)
class StreamLimits:
    """Bounds on what one socket may send, and how long it may take."""

    head_bytes: int = 8192
    head_lines: int = 64
    hello_bytes: int = 16 * 1024
    """All messages of a socket before its welcome."""
    message_bytes: int = 8 * MEBIBYTE
    fragments: int = 1024
    """Frames of one message."""
    frames_per_second: int = 20_000
    controls_per_second: int = 50
    send_seconds: float = 10.0
    """For each 64 KiB that are sent: a peer that takes them more slowly is given up."""


@attrs.frozen(kw_only=True)
class ConnectionLimits:
    """Bounds of one connection."""

    grace_seconds: float = 30.0
    """How long sessions outlive a dropped socket."""
    sessions: int = 10_000
    in_flight: int = 10_000
    """Calls that are not answered, sleeps and waits among them."""
    in_flight_per_instance: int = 1_000
    questions: int = 8
    """Questions about the tenant that are being answered at once; more of them wait."""
    watches: int = 1_000
    waiting_bytes: int = 16 * MEBIBYTE
    """Calls that wait until the server has room for them; one more is refused."""
    waiting_seconds: float = 5.0
    """How long they wait."""
    buffer_bytes: int = 64 * MEBIBYTE
    """Answers and pushes that the client has not confirmed."""
    bad_calls: int = 1_000
    """Calls that were answered with a validation error, in one minute."""


@attrs.frozen(kw_only=True)
class GatewayLimits:
    """Bounds of a gateway as a whole, and its deadlines."""

    handshake_seconds: float = 5.0
    """From the first byte to the end of the upgrade."""
    hello_seconds: float = 5.0
    close_seconds: float = 2.0
    """How long a peer has to go after it was told."""
    ping_seconds: float = 15.0
    """A socket that was silent for so long is pinged."""
    pong_seconds: float = 10.0
    """A socket that stays silent for so long after a ping is dead."""
    token_seconds: float = 30.0
    """How often the tokens of open connections are looked at for their end; revoking one acts at once."""
    sockets: int = 12_000
    connections: int = 10_000
    connections_per_tenant: int = 5_000
    total_buffer_bytes: int = 1024 * MEBIBYTE
    """The ``buffer_bytes`` of all connections together; over it, the one that has most is ended."""
    stream: StreamLimits = attrs.Factory(StreamLimits)
    connection: ConnectionLimits = attrs.Factory(ConnectionLimits)
