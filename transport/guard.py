"""What stands between a peer's bytes and the WebSocket library.

Rules:

1. `FrameGate` sees the header of every frame before the library does: masks, reserved bits, opcodes, lengths,
   fragments and rates. It never holds a payload.
2. A send makes progress within ``send_seconds`` for each slice, or the peer is given up. A send that is
   cancelled, or fails, closes the stream at once: half a frame may be out.
3. Any byte that arrives is a sign of life (`GuardedStream.last_received`).
4. The library never ends a server's stream. `GatedStream.leave` does: it says the last words and the close
   code, and reads on until the peer has seen them, so that no reset of the connection overtakes them.
"""

from collections.abc import Callable
from typing import Final

import trio

from runtara.transport.limits import StreamLimits

SLICE: Final = 64 * 1024
CONTROL: Final = 8
"""Opcodes from here on are control frames."""
CLOSE: Final = 8
PONG: Final = 10
CONTROL_BYTES: Final = 125
"""RFC 6455, section 5.5."""
FINAL: Final = 0x80
TEXT: Final = 1
BINARY: Final = 2


class Refusal(Exception):
    """The peer's bytes are refused: a WebSocket close code, or an HTTP status before the upgrade."""

    def __init__(self, code: int, problem: str) -> None:
        super().__init__(problem)
        self.code = code


class FrameGate:
    """The headers of a client's frames, read as they pass (RFC 6455, section 5.2)."""

    __slots__ = (
        "closed",
        "controls",
        "early",
        "fragments",
        "frames",
        "header",
        "limits",
        "message",
        "missing",
        "open",
        "second",
        "skip",
        "welcomed",
    )

    def __init__(self, limits: StreamLimits) -> None:
        self.limits = limits
        self.header = bytearray()
        """Of the frame that begins, as far as it is there."""
        self.missing = 2
        """Bytes of the header still to come, as far as is known."""
        self.skip = 0
        """Bytes of payload still to pass."""
        self.open = False
        """Whether a message has begun and not ended."""
        self.fragments = 0
        self.message = 0
        """Bytes of the message so far."""
        self.welcomed = False
        self.early = 0
        """Bytes of all messages before the welcome."""
        self.closed = False
        """Whether the peer has sent a close frame; what follows is ignored."""
        self.second = 0.0
        self.frames = 0
        self.controls = 0

    def feed(self, data: bytes | bytearray, now: float) -> None:
        """Look at bytes that have arrived.

        Raises:
            Refusal: They break a rule or a limit.
        """
        at = 0
        while at < len(data) and not self.closed:
            if self.skip:
                passed = min(self.skip, len(data) - at)
                self.skip -= passed
                at += passed
                continue
            piece = data[at : at + self.missing]
            self.header += piece
            self.missing -= len(piece)
            at += len(piece)
            if not self.missing:
                if len(self.header) == 2:
                    self.look_at_start(now)
                else:
                    self.look_at_length()

    def look_at_start(self, now: float) -> None:
        """The first two bytes are there: all that can be wrong with a frame but its length."""
        first, second = self.header
        if not second & 0x80:
            raise Refusal(1002, "a frame of a client must be masked")
        if first & 0x70:
            raise Refusal(1002, "reserved bits are set")
        opcode, final, length = first & 0x0F, bool(first & FINAL), second & 0x7F
        self.count(now, opcode)
        if opcode >= CONTROL:
            if opcode > PONG or length > CONTROL_BYTES or not final:
                raise Refusal(1002, "a control frame is ill formed")
        elif opcode > BINARY:
            raise Refusal(1002, f"there is no opcode {opcode}")
        elif (opcode == 0) is not self.open:
            raise Refusal(1002, "fragments are out of order")
        self.missing = 4 + (0 if length < 126 else 2 if length == 126 else 8)

    def look_at_length(self) -> None:
        """A header is complete."""
        first, length = self.header[0], self.header[1] & 0x7F
        if length >= 126:
            long = int.from_bytes(self.header[2:-4], "big")
            if long < (126 if length == 126 else 2**16) or long >= 2**63:
                raise Refusal(1002, "a length is ill formed")
            length = long
        self.header.clear()
        self.missing = 2
        self.skip = length
        if first & 0x0F == CLOSE:
            self.closed = True
        elif first & 0x0F < CONTROL:
            self.look_at_message(first, length)

    def look_at_message(self, first: int, length: int) -> None:
        """A message begins or goes on."""
        begins = first & 0x0F != 0
        self.fragments = 1 if begins else self.fragments + 1
        self.message = length if begins else self.message + length
        self.open = not first & FINAL
        if self.message > self.limits.message_bytes:
            raise Refusal(1009, f"a message is over {self.limits.message_bytes} bytes")
        if self.fragments > self.limits.fragments:
            raise Refusal(1009, f"a message has more than {self.limits.fragments} fragments")
        if not self.welcomed:
            self.early += length
            if self.early > self.limits.hello_bytes:
                raise Refusal(1009, f"more than {self.limits.hello_bytes} bytes came before the welcome")

    def count(self, now: float, opcode: int) -> None:
        if now - self.second >= 1:
            self.second, self.frames, self.controls = now, 0, 0
        self.frames += 1
        self.controls += opcode >= CONTROL
        if self.frames > self.limits.frames_per_second or self.controls > self.limits.controls_per_second:
            raise Refusal(1008, "too many frames in one second")


def server_frame(opcode: int, payload: bytes) -> bytes:
    """A whole frame of a server: final, not masked."""
    size = len(payload)
    if size < 126:
        length = bytes([size])
    elif size < 2**16:
        length = b"\x7e" + size.to_bytes(2, "big")
    else:
        length = b"\x7f" + size.to_bytes(8, "big")
    return bytes([FINAL | opcode]) + length + payload


def close_frame(code: int, reason: str) -> bytes:
    """A close frame; a reason that is too long is cut."""
    text = reason.encode("utf-8", "replace")[: CONTROL_BYTES - 2]
    return server_frame(CLOSE, code.to_bytes(2, "big") + text.decode("utf-8", "ignore").encode())


class GuardedStream(trio.abc.Stream):
    """A stream that is sent to with a deadline (rule 2), and knows when it last heard something (rule 3)."""

    def __init__(self, stream: trio.abc.Stream, limits: StreamLimits, on_gone: Callable[[], None]) -> None:
        self.stream = stream
        self.limits = limits
        self.on_gone = on_gone
        """Called when the peer is gone or given up; more than once perhaps."""
        self.last_received = trio.current_time()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        try:
            received = await self.stream.receive_some(max_bytes)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.on_gone()
            raise
        if received:
            self.last_received = trio.current_time()
        else:
            self.on_gone()
        return received

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        """Send, slice by slice.

        Raises:
            trio.BrokenResourceError: The peer is gone, or does not read.

        Cancellation: The stream is closed.
        """
        view = memoryview(data)
        try:
            for at in range(0, len(view), SLICE):
                with trio.fail_after(self.limits.send_seconds):
                    await self.stream.send_all(view[at : at + SLICE])
        except BaseException as error:
            self.on_gone()
            await trio.aclose_forcefully(self.stream)
            if isinstance(error, trio.TooSlowError):
                raise trio.BrokenResourceError("the peer does not read") from None
            raise

    async def wait_send_all_might_not_block(self) -> None:
        await self.stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self.stream.aclose()
        self.on_gone()


class GatedStream(GuardedStream):
    """The stream of one client: what it sends passes the gate (rule 1), and it is left in order (rule 4)."""

    def __init__(self, stream: trio.abc.Stream, limits: StreamLimits) -> None:
        super().__init__(stream, limits, lambda: None)
        self.gate = FrameGate(limits)
        self.opening = b""
        """What the library reads first: a head of our own making."""
        self.upgraded = False
        self.refusal: Refusal | None = None
        self.close_sent = False

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        """Receive what passes the gate.

        Raises:
            trio.BrokenResourceError: The peer is gone, or its bytes are refused (`refusal`).
        """
        if self.opening:
            opening, self.opening = self.opening, b""
            await trio.lowlevel.checkpoint()
            return opening
        received = await super().receive_some(max_bytes)
        try:
            self.gate.feed(received, self.last_received)
        except Refusal as refusal:
            self.refusal = refusal
            raise trio.BrokenResourceError("the peer's bytes are refused") from None
        return received

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await super().send_all(data)
        if self.upgraded and data[0] == FINAL | CLOSE:
            self.close_sent = True

    async def aclose(self) -> None:
        """What the library calls when it is done with the stream: nothing ends yet (rule 4)."""
        await trio.lowlevel.checkpoint()

    async def leave(self, last_words: bytes) -> None:
        """Say the last words, if no close frame is out, and wait for the peer to go.

        Nobody else may use the stream any more. The caller sets a deadline, and closes the stream after it.
        """
        try:
            if last_words and not self.close_sent:
                await self.send_all(last_words)
            deaf = self.refusal is not None or not self.upgraded
            if deaf and isinstance(self.stream, trio.abc.HalfCloseableStream):
                await self.stream.send_eof()
            while not self.gate.closed:
                received = await self.stream.receive_some(SLICE)
                if not received:
                    return
                if not deaf:
                    self.gate.feed(received, trio.current_time())
        except (Refusal, trio.BrokenResourceError, trio.ClosedResourceError):
            return
