"""The request that opens a socket: judged as text before the WebSocket library sees anything of the peer.

Rules:

1. A head is printable ASCII, in lines that end with CR LF, within `StreamLimits`, and nothing follows it
   before the answer.
2. What is upgraded has the headers of RFC 6455, section 4.2.1, one of our subprotocols and, from a page in a
   browser, an origin that was allowed. No extension is taken up, compression least of all.
3. The library gets a head of our own making. Of the peer it holds the key, which is base64, and nothing else.
"""

import re
from http import HTTPStatus
from typing import Final

import attrs
import trio

from runtara.transport.guard import Refusal
from runtara.transport.limits import StreamLimits
from runtara.wire import CODECS

HEAD_END: Final = b"\r\n\r\n"
NAME: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
KEY: Final = re.compile(r"[A-Za-z0-9+/]{21}[AQgw]==")
"""16 bytes in base64."""
MORE: Final = {
    426: "Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
    503: "Retry-After: 1\r\n",
}
"""Headers that go with a status."""


@attrs.frozen(kw_only=True)
class Head:
    """A request, as it was read."""

    method: str
    target: str
    version: str
    headers: dict[str, str]
    """By their names in small letters; what occurs more than once is joined with commas."""

    def words(self, name: str) -> list[str]:
        """The words of a header that is a list."""
        return [word.strip() for word in self.headers.get(name, "").split(",")]


@attrs.frozen
class Upgrade:
    """What the peer may have."""

    key: str
    protocol: str


async def read_head(stream: trio.abc.ReceiveStream, limits: StreamLimits) -> Head | None:
    """The whole request head; None if the peer goes away. The caller sets the deadline.

    Raises:
        Refusal: With an HTTP status.
    """
    data = bytearray()
    while HEAD_END not in data:
        received = await stream.receive_some(4096)
        if not received:
            return None
        data += received
        if len(data) > limits.head_bytes:
            raise Refusal(431, "the request head is too large")
    head, _, rest = bytes(data).partition(HEAD_END)
    if rest:
        raise Refusal(400, "something was sent behind the request head")
    return parse_head(head, limits.head_lines)


def parse_head(head: bytes, most_lines: int) -> Head:
    """Read a head, without the empty line at its end.

    Raises:
        Refusal: With an HTTP status.
    """
    first, *rest = head.split(b"\r\n")
    if len(rest) >= most_lines:
        raise Refusal(431, "the request head has too many lines")
    if any(byte != 9 and not 32 <= byte <= 126 for line in (first, *rest) for byte in line):
        raise Refusal(400, "the request head must be printable ASCII")
    words = first.decode().split(" ")
    if len(words) != 3:
        raise Refusal(400, "this is no request of HTTP")
    headers: dict[str, str] = {}
    for line in rest:
        name, colon, value = line.partition(b":")
        if not colon or not NAME.fullmatch(name):
            raise Refusal(400, "a header of the request is ill formed")
        known, text = name.decode().lower(), value.decode().strip()
        headers[known] = f"{headers[known]}, {text}" if known in headers else text
    return Head(method=words[0], target=words[1], version=words[2], headers=headers)


def judge(head: Head, origins: frozenset[str]) -> Upgrade:
    """Whether a request is upgraded (rule 2).

    Raises:
        Refusal: With an HTTP status.
    """
    headers = head.headers
    if "websocket" not in [word.lower() for word in head.words("upgrade")]:
        raise Refusal(426, "this is a WebSocket server")
    if (head.method, head.version) != ("GET", "HTTP/1.1") or not headers.get("host"):
        raise Refusal(400, "an upgrade is asked for with GET, HTTP/1.1 and a host")
    if "upgrade" not in [word.lower() for word in head.words("connection")]:
        raise Refusal(400, "an upgrade is asked for with Connection: Upgrade")
    if headers.get("sec-websocket-version") != "13":
        raise Refusal(426, "Sec-WebSocket-Version must be 13")
    key = headers.get("sec-websocket-key", "")
    if not KEY.fullmatch(key):
        raise Refusal(400, "Sec-WebSocket-Key must be 16 bytes in base64")
    if "origin" in headers and headers["origin"] not in origins:
        raise Refusal(403, "this origin may not connect")
    offered = head.words("sec-websocket-protocol")
    for name in CODECS:
        if name in offered:
            return Upgrade(key, name)
    raise Refusal(400, f"a subprotocol is needed: {', '.join(CODECS)}")


def library_head(upgrade: Upgrade) -> bytes:
    """The head that the library reads (rule 3)."""
    return (
        "GET / HTTP/1.1\r\nHost: gateway\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {upgrade.key}\r\n"
        f"Sec-WebSocket-Protocol: {upgrade.protocol}\r\n\r\n"
    ).encode()


def plain_answer(status: int, text: str, *, bare: bool = False) -> bytes:
    """A whole HTTP answer that ends the connection; ``bare`` leaves the body out, as HEAD wants it."""
    body = f"{text}\n".encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nConnection: close\r\n"
        f"Content-Type: text/plain\r\n{MORE.get(status, '')}Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + (b"" if bare else body)
