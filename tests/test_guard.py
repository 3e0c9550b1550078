"""What stands before the WebSocket library: the gate for frames, and the request that opens a socket."""

import re
from itertools import pairwise

import attrs
import pytest
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from runtara.transport.guard import (
    FrameGate,
    GatedStream,
    GuardedStream,
    Refusal,
    close_frame,
    server_frame,
)
from runtara.transport.handshake import Head, judge, library_head, parse_head, plain_answer, read_head
from runtara.transport.limits import StreamLimits
from runtara.wire import JSON_PROTOCOL, MSGPACK_PROTOCOL
from tests.gateways import BINARY, CLOSE, KEY, PING, PONG, TEXT, closing, frame, head

SMALL = StreamLimits(
    hello_bytes=2000, message_bytes=1000, fragments=4, frames_per_second=40, controls_per_second=5
)


def fed(data: bytes, cuts: list[int], limits: StreamLimits = SMALL) -> tuple[FrameGate, int | None]:
    """A gate that has seen ``data`` in pieces, and the code with which it refused one."""
    gate = FrameGate(limits)
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    try:
        for begin, end in pairwise(edges):
            gate.feed(data[begin:end], now=5.0)
    except Refusal as refusal:
        return gate, refusal.code
    return gate, None


def plainly(data: bytes, limits: StreamLimits = SMALL) -> int | None:
    """What the gate must find, by a parser that has everything at once."""
    at = frames = controls = early = size = pieces = 0
    within = False
    while at + 2 <= len(data):
        final, reserved, opcode = data[at] >> 7, data[at] >> 4 & 7, data[at] & 15
        masked, short = data[at + 1] >> 7, data[at + 1] & 127
        if not masked or reserved:
            return 1002
        frames, controls = frames + 1, controls + (opcode > 7)
        if frames > limits.frames_per_second or controls > limits.controls_per_second:
            return 1008
        if opcode > 7 and (opcode > 10 or short > 125 or not final):
            return 1002
        if opcode <= 7 and (opcode > 2 or within is not (opcode == 0)):
            return 1002
        wide = {126: 2, 127: 8}.get(short, 0)
        if at + 2 + wide + 4 > len(data):
            return None
        length = int.from_bytes(data[at + 2 : at + 2 + wide], "big") if wide else short
        if (wide == 2 and length < 126) or (wide == 8 and not 65536 <= length < 2**63):
            return 1002
        if opcode == CLOSE:
            return None
        if opcode < 8:
            pieces, size = (pieces + 1, size + length) if opcode == 0 else (1, length)
            within, early = not final, early + length
            if size > limits.message_bytes or pieces > limits.fragments or early > limits.hello_bytes:
                return 1009
        at += 2 + wide + 4 + length
    return None


good_frames = st.builds(
    lambda opcode, data, final: frame(opcode, data, final=final or opcode >= CLOSE),
    st.sampled_from([0, TEXT, BINARY, PING, PONG]),
    st.binary(max_size=125) | st.sampled_from([bytes(126), bytes(900)]),
    st.booleans(),
)
messages = st.builds(
    lambda opcode, parts: b"".join(
        frame(opcode if at == 0 else 0, part, final=at == len(parts) - 1) for at, part in enumerate(parts)
    ),
    st.sampled_from([TEXT, BINARY]),
    st.lists(st.binary(max_size=150), min_size=1, max_size=5),
)
odd_frames = st.builds(
    frame,
    st.integers(0, 15),
    st.binary(max_size=20),
    final=st.booleans(),
    reserved=st.sampled_from([0, 0, 0, 1, 2, 4]),
    masked=st.sampled_from([True, True, True, False]),
    length=st.sampled_from([None, None, None, 0, 5, 126, 1001, 60_000]),
    wide=st.sampled_from([0, 0, 0, 126, 127]),
).filter(lambda data: len(data) < 10_000)
streams = st.lists(messages | messages | good_frames | odd_frames | st.binary(max_size=30), max_size=12).map(
    b"".join
)


@given(streams, st.lists(st.integers(0, 10_000), max_size=8))
@settings(max_examples=300, deadline=None)
def test_the_gate_finds_what_a_plain_parser_finds_wherever_the_bytes_are_cut(
    data: bytes, cuts: list[int]
) -> None:
    assert fed(data, cuts)[1] == plainly(data)
    assert fed(data, list(range(len(data))))[1] == plainly(data)


@given(st.lists(messages, max_size=6))
@settings(max_examples=100, deadline=None)
def test_whole_messages_leave_the_gate_as_it_was(parts: list[bytes]) -> None:
    limits = StreamLimits(fragments=5)
    data = b"".join(parts)
    gate, code = fed(data, [], limits)
    assert code is None
    assert (gate.open, gate.skip, bytes(gate.header), gate.missing) == (False, 0, b"", 2)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(TEXT, masked=False)[:2], 1002),
        (frame(TEXT, b"hi", masked=False)[:2], 1002),
        *[(frame(TEXT, b"hi", reserved=bit)[:2], 1002) for bit in (1, 2, 4)],
        *[(frame(opcode)[:2], 1002) for opcode in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15)],
        (frame(PING, bytes(126))[:2], 1002),
        (frame(PING, final=False)[:2], 1002),
        (frame(CLOSE, bytes(126))[:2], 1002),
        (frame(0)[:2], 1002),
        (frame(TEXT, final=False) + frame(TEXT)[:2], 1002),
        (frame(TEXT, wide=126, length=125), 1002),
        (frame(TEXT, wide=127, length=65_535), 1002),
        (frame(TEXT, wide=127, length=2**63), 1002),
        (frame(BINARY, length=1001), 1009),
        (frame(BINARY, length=10 * 2**30), 1009),
        (frame(BINARY, length=2**62), 1009),
        (frame(BINARY, bytes(500), final=False) + frame(0, length=501), 1009),
        (frame(BINARY, final=False) + 4 * frame(0, final=False), 1009),
        (2 * frame(BINARY, bytes(900)) + frame(BINARY, length=201), 1009),
        ((6 * frame(PING))[:-4], 1008),
        ((3 * frame(PING) + 3 * frame(PONG))[:-4], 1008),
        ((41 * frame(BINARY))[:-4], 1008),
    ],
)
def test_a_frame_is_refused_as_soon_as_it_can_be(data: bytes, code: int) -> None:
    assert fed(data, list(range(len(data))))[1] == code
    assert fed(data[:-1], list(range(len(data))))[1] is None


def test_what_follows_a_close_frame_is_ignored() -> None:
    gate, code = fed(closing(1000) + b"\x00" * 100, [])
    assert (gate.closed, code) == (True, None)


def test_rates_are_of_one_second() -> None:
    gate = FrameGate(SMALL)
    for second in range(100):
        gate.feed(5 * frame(PING), now=float(second))
    with pytest.raises(Refusal, match="too many frames"):
        gate.feed(frame(PING), now=99.9)


def test_before_the_welcome_there_is_less_room_than_behind_it() -> None:
    gate = FrameGate(SMALL)
    gate.feed(2 * frame(BINARY, bytes(1000)), now=0.0)
    gate.welcomed = True
    gate.feed(20 * frame(BINARY, bytes(1000)), now=0.0)


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536])
def test_a_frame_of_the_server_says_its_length(size: int) -> None:
    made = server_frame(BINARY, bytes(size))
    assert made[0] == 0x82
    assert made.endswith(bytes(size))
    short = made[1]
    assert (size if short < 126 else int.from_bytes(made[2 : len(made) - size], "big")) == size


def test_a_close_frame_cuts_a_reason_that_is_too_long_between_characters() -> None:
    assert close_frame(1008, "no") == b"\x88\x04\x03\xf0no"
    made = close_frame(1008, "é" * 200)
    assert made[1] <= 125
    assert made[4:].decode() == "é" * 61


# ---------------------------------------------------------------- heads


def parsed(data: bytes) -> Head:
    return parse_head(data.removesuffix(b"\r\n\r\n"), 64)


def status_of(data: bytes) -> int:
    """The status with which a request is refused; 101 if it is not."""
    try:
        judge(parsed(data), frozenset({"https://app.example"}))
    except Refusal as refusal:
        return refusal.code
    return 101


def without(name: str) -> bytes:
    return re.sub(rb"(?m)^" + name.encode() + rb":[^\n]*\n", b"", head())


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (head(), 101),
        (head(protocol=MSGPACK_PROTOCOL), 101),
        (head(protocol=f"chat, {JSON_PROTOCOL} ,{MSGPACK_PROTOCOL}"), 101),
        (head(f"Sec-WebSocket-Protocol: {JSON_PROTOCOL}", protocol="chat"), 101),
        (head("Origin: https://app.example"), 101),
        (head("Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits"), 101),
        (head("Authorization: Bearer x", "Cookie: a=b", "X-Odd: \t a:b,;\"'"), 101),
        (head(first="GET /any?path=1 HTTP/1.1"), 101),
        (head("Origin: https://evil.example"), 403),
        (head("Origin: null"), 403),
        (head("Origin: https://app.example.evil"), 403),
        (head("Origin: https://app.example", "Origin: https://app.example"), 403),
        (head(protocol=None), 400),
        (head(protocol="runtara.v2.json"), 400),
        (head(protocol=JSON_PROTOCOL.upper()), 400),
        (head(first="POST / HTTP/1.1"), 400),
        (head(first="GET / HTTP/1.0"), 400),
        (head(first="GET / HTTP/2"), 400),
        (head(first="GET  / HTTP/1.1"), 400),
        (head(first="GET /"), 400),
        (head(first=""), 400),
        (without("Host"), 400),
        (without("Connection"), 400),
        (without("Upgrade"), 426),
        (without("Sec-WebSocket-Version"), 426),
        (without("Sec-WebSocket-Key"), 400),
        (head("Sec-WebSocket-Version: 13"), 426),
        (head(f"Sec-WebSocket-Key: {KEY}"), 400),
        (head().replace(KEY.encode(), b"x"), 400),
        (head().replace(KEY.encode(), KEY.encode()[:-2]), 400),
        (head().replace(KEY.encode(), b"dGhlIHNhbXBsZSBub25jZR=="), 400),
        (head().replace(b"Upgrade: websocket", b"Upgrade: h2c"), 426),
        (head().replace(b"Connection: Upgrade", b"Connection: close"), 400),
        (head().replace(b"Connection: Upgrade", b"Connection: keep-alive, upgrade"), 101),
        (head("X: \xff"), 400),
        (head("X: \x00"), 400),
        (head("X: a\rb"), 400),
        (head("X: a\nb"), 400),
        (head(" folded: x"), 400),
        (head("no colon"), 400),
        (head(": no name"), 400),
        (head("a b: c"), 400),
        (head("Space-Before-Colon : c"), 400),
        (head(*["X: y"] * 100), 431),
    ],
)
def test_a_request_is_judged(data: bytes, status: int) -> None:
    assert status_of(data) == status


@given(st.binary(max_size=300) | st.lists(st.sampled_from(head().split(b"\r\n"))).map(b"\r\n".join))
@settings(max_examples=300, deadline=None)
def test_no_request_raises_anything_but_a_refusal(data: bytes) -> None:
    assert status_of(data) in (101, 400, 403, 426, 431)


def test_the_library_sees_nothing_of_the_peer_but_its_key() -> None:
    upgrade = judge(parsed(head("X: secret", first="GET /secret HTTP/1.1")), frozenset())
    made = library_head(upgrade)
    assert b"secret" not in made
    assert KEY.encode() in made
    assert status_of(made) == 101


async def test_a_head_is_read_up_to_its_end_and_not_beyond() -> None:
    async def read(*pieces: bytes) -> Head | None:
        near, far = trio.testing.memory_stream_one_way_pair()
        for piece in pieces:
            await near.send_all(piece)
        near.close()
        return await read_head(far, SMALL)

    found = await read(*[bytes([byte]) for byte in head()])
    assert found == parsed(head())
    assert await read() is None
    assert await read(b"GET / HT") is None
    with pytest.raises(Refusal, match="behind the request head"):
        await read(head() + b"x")
    with pytest.raises(Refusal, match="too large"):
        await read(*[b"x" * 1000] * 9)


def test_a_plain_answer_is_whole() -> None:
    answer = plain_answer(503, "busy")
    assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"Retry-After: 1\r\n" in answer
    assert answer.endswith(b"Content-Length: 5\r\n\r\nbusy\n")
    assert plain_answer(503, "busy", bare=True) == answer.removesuffix(b"busy\n")


# ---------------------------------------------------------------- streams


@attrs.define
class Gone:
    """Counts how often a stream said that its peer is gone."""

    times: int = 0

    def __call__(self) -> None:
        self.times += 1


async def test_a_send_that_is_cancelled_ends_the_stream() -> None:
    near, far = trio.testing.lockstep_stream_pair()
    gone = Gone()
    stream = GuardedStream(near, SMALL, gone)
    with trio.move_on_after(0.01):
        await stream.send_all(bytes(100_000))
    with pytest.raises(trio.ClosedResourceError):
        await stream.send_all(b"x")
    assert gone.times == 2
    with pytest.raises(trio.BrokenResourceError):
        while await far.receive_some():
            pass
        raise trio.BrokenResourceError  # the end of the stream is as good


async def test_a_peer_that_does_not_read_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    near, _far = trio.testing.lockstep_stream_pair()
    stream = GuardedStream(near, SMALL, Gone())
    began = trio.current_time()
    with pytest.raises(trio.BrokenResourceError, match="does not read"):
        await stream.send_all(b"x")
    assert trio.current_time() - began == SMALL.send_seconds


async def test_a_slow_peer_that_reads_on_is_not_given_up(autojump_clock: trio.testing.MockClock) -> None:
    near, far = trio.testing.lockstep_stream_pair()
    stream = GuardedStream(near, SMALL, Gone())
    received = 0

    async def read_slowly() -> None:
        nonlocal received
        while received < 4 * 65536:
            await trio.sleep(SMALL.send_seconds * 0.4)
            received += len(await far.receive_some(32768))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_slowly)
        await stream.send_all(bytes(4 * 65536))
    assert received == 4 * 65536


async def test_any_byte_is_a_sign_of_life(autojump_clock: trio.testing.MockClock) -> None:
    near, far = trio.testing.memory_stream_pair()
    gone = Gone()
    stream = GuardedStream(near, SMALL, gone)
    await trio.sleep(5)
    await far.send_all(b"x")
    assert await stream.receive_some() == b"x"
    assert stream.last_received == trio.current_time()
    await trio.sleep(5)
    await far.send_stream.aclose()
    assert await stream.receive_some() == b""
    assert stream.last_received == trio.current_time() - 5
    assert gone.times == 1


async def test_refused_bytes_do_not_reach_the_library() -> None:
    near, far = trio.testing.memory_stream_pair()
    stream = GatedStream(near, SMALL)
    stream.opening = b"head"
    assert await stream.receive_some() == b"head"
    await far.send_all(frame(TEXT, b"x") + frame(TEXT, b"y", masked=False))
    with pytest.raises(trio.BrokenResourceError):
        await stream.receive_some()
    assert stream.refusal is not None
    assert stream.refusal.code == 1002


async def test_the_last_words_are_said_once_and_the_peer_may_answer() -> None:
    near, far = trio.testing.memory_stream_pair()
    stream = GatedStream(near, SMALL)
    stream.upgraded = True
    await stream.aclose()  # as the library does
    await far.send_all(frame(TEXT, b"late") + closing(1000))
    await stream.leave(close_frame(1001, ""))
    assert await far.receive_some() == close_frame(1001, "")
    assert stream.gate.closed

    stream = GatedStream(near, SMALL)
    stream.upgraded = True
    await stream.send_all(close_frame(1000, ""))
    await far.send_all(closing(1000))
    await stream.leave(close_frame(1001, ""))
    assert await far.receive_some() == close_frame(1000, "")
