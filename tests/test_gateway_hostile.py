"""Peers that mean harm, byte by byte. After each the gateway is as it was, and its client noticed nothing."""

import random
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any, get_args

import attrs
import msgspec
import pytest
import trio
import trio.testing

from runtara.operations import OPERATIONS, Role
from runtara.questions import questions_of
from runtara.tenant import Runtime
from runtara.transport import carrier
from runtara.transport.limits import StreamLimits
from runtara.wire import CODECS, JSON_PROTOCOL, MSGPACK_PROTOCOL
from tests.gateways import (
    BINARY,
    CLOSE,
    KEY,
    PING,
    PONG,
    TEXT,
    Peer,
    Served,
    as_json,
    attacked,
    closing,
    frame,
    head,
    quick,
    resident,
    served,
    until,
)

MEBIBYTE = 1024 * 1024
HELLO = frame(TEXT, b'{"t":"hello","version":1}')

# ---------------------------------------------------------------- before the upgrade


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (head("Host: xn--\xff.com"), 400),
        (head().replace(b"Connection: Upgrade", b"Connection: Upgr\xe4de"), 400),
        (head("Sec-WebSocket-Extensions: \xff"), 400),
        (head(protocol="\xfe"), 400),
        (head(protocol=None), 400),
        (head(protocol="runtara.v9.json"), 400),
        (head("Origin: https://evil.example"), 403),
        (head().replace(KEY.encode(), b"x"), 400),
        (head().replace(b"Host", b"Ghost"), 400),
        (head() + b"x", 400),
        (head() + HELLO, 400),
        (head() + head(), 400),
        (head("X: " + "a" * 15_000), 431),
        (head("X: " + "a" * 17_000), 431),
        (head(*["X: a"] * 70), 431),
        (b"\x00\x01bad\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\n\r\n", 426),
        (b"POST /health HTTP/1.1\r\nHost: a\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", 426),
        (b"\x16\x03\x01" + bytes(300), 408),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET / HTTP/1.1\n\n", 408),
        (b"", 408),
    ],
)
async def test_a_bad_request_gets_a_status_and_nothing_else(data: bytes, status: int) -> None:
    async with attacked(quick(handshake_seconds=0.1)) as found:
        peer = await found.asks(data)
        assert await peer.status() == status
        await peer.read_all()


async def test_a_host_that_no_parser_likes_is_nothing_to_the_gateway() -> None:
    async with attacked() as found:
        peer = await found.asks(head().replace(b"127.0.0.1", b"a" * 70 + b".com"))
        assert await peer.status() == 101
        assert (await peer.hello())["t"] == "welcome"
        await peer.close()
        await found.settled(sockets=1)


async def test_compression_is_never_agreed_on() -> None:
    async with attacked() as found:
        peer = await found.asks(
            head("Sec-WebSocket-Extensions: permessage-deflate; server_max_window_bits=15")
        )
        answer = await peer.read_head()
        assert answer.startswith(b"HTTP/1.1 101 ")
        assert b"extensions" not in answer.lower()
        await peer.send(frame(TEXT, b"\xaaV*I-.Q\xb2R\xcaH\xcd\xc9\xc9W\xaa\x05\x00", reserved=4))
        assert await peer.hear_close() == 1002


async def test_health_is_told_to_anyone_and_nothing_else() -> None:
    async with attacked() as found:
        told = await (await found.asks(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")).read_all()
        assert told.startswith(b"HTTP/1.1 200 OK\r\n")
        assert told.endswith(b'{"ready": true, "draining": false}\n')
        bare = await (await found.asks(b"HEAD /health HTTP/1.1\r\nHost: a\r\n\r\n")).read_all()
        assert bare.endswith(b"\r\n\r\n")
        found.gateway.draining = True
        told = await (await found.asks(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")).read_all()
        assert told.startswith(b"HTTP/1.1 503 ")


async def test_a_request_that_comes_byte_by_byte_ends_at_the_deadline() -> None:
    async with attacked(quick(handshake_seconds=0.2)) as found:
        peer = await found.raw()
        began = trio.current_time()
        with trio.move_on_after(2) as patience:
            for byte in head():
                await peer.send(bytes([byte]))
                if found.gateway.statistics().sockets == 1:
                    break
                await trio.sleep(0.02)
        assert not patience.cancelled_caught
        assert 0.15 < trio.current_time() - began < 1.0


async def test_headers_without_an_end_are_cut() -> None:
    async with attacked() as found:
        peer = await found.asks(b"GET / HTTP/1.1\r\n")
        began = trio.current_time()
        for number in range(100_000):
            await peer.send(b"X-%d: a\r\n" % number * 100)
            if found.gateway.statistics().sockets == 1:
                break
        assert trio.current_time() - began < 1.0
        assert number < 99_999


@pytest.mark.parametrize(
    "data", [head(), head(protocol="unknown"), b"\x00\x01bad\r\n\r\n", b"GET", head()[:50]]
)
async def test_a_peer_that_resets_while_it_is_answered(data: bytes) -> None:
    async with attacked() as found:
        for _ in range(30):
            peer = await found.asks(data)
            await peer.reset()
        peer = await found.asks(data)
        await peer.close()


async def test_five_hundred_peers_that_leave_without_a_word_are_forgotten_at_once() -> None:
    async with attacked(quick(handshake_seconds=60)) as found:
        for _ in range(500):
            peer = await found.raw()
            await peer.close()
        await found.settled(sockets=1)


async def test_five_hundred_bad_requests_leave_nothing_behind() -> None:
    async with attacked(quick(handshake_seconds=60)) as found:
        for _ in range(500):
            peer = await found.asks(b"POST / HTTP/1.1\r\nHost: a\r\n\r\n")
            await peer.close()
        await found.settled(sockets=1)


async def test_hundreds_of_silent_connections_cost_little_and_end_at_the_deadline() -> None:
    async with attacked(quick(handshake_seconds=1.0)) as found:
        before = resident()
        peers = [await found.raw() for _ in range(300)]
        await until(lambda: found.gateway.statistics().sockets == 301)
        with trio.fail_after(0.5):
            await (await found.welcomed()).close()
        assert resident() - before < 300 * 60 * 1024
        for peer in peers:
            assert await peer.status() == 408
            await peer.close()


# ---------------------------------------------------------------- frames

BAD_FRAMES = [
    (frame(TEXT, b"hi", masked=False), 1002),
    (frame(TEXT, masked=False), 1002),
    (frame(TEXT, b"abc", reserved=4), 1002),
    (frame(TEXT, b"abc", reserved=1), 1002),
    *[(frame(opcode, b"x"), 1002) for opcode in (3, 7, 11, 15)],
    (frame(PING, b"x" * 126), 1002),
    (frame(PING, b"x", final=False), 1002),
    (frame(PONG, b"x" * 126), 1002),
    (frame(0, b"x"), 1002),
    (frame(TEXT, b"{", final=False) + frame(TEXT, b"}"), 1002),
    (frame(TEXT, b"x", wide=127), 1002),
    (frame(TEXT, b"", length=2**63), 1002),
    (head(), 1002),
    (frame(TEXT, b"\xc3\x28"), 1007),
    (frame(TEXT, b"\xed\xa0\x80"), 1007),
    (frame(TEXT, b"\xc3", final=False) + frame(0, b"\x28"), 1007),
    (frame(TEXT, b"\xc3"), 1007),
    (frame(CLOSE, b"x"), 1002),
    (closing(999), 1002),
    (closing(1005), 1002),
    (closing(5000), 1002),
    (closing(1000, b"\xff"), 1007),
    (frame(BINARY, b"", length=10 * 2**30), 1009),
    (frame(BINARY, b"", length=2**62) + b"x" * 65536, 1009),
]


@pytest.mark.parametrize(("data", "code"), BAD_FRAMES)
async def test_a_bad_frame_is_answered_with_its_close_code(data: bytes, code: int) -> None:
    async with attacked() as found:
        for peer in (await found.upgraded(), await found.welcomed()):
            dropped = found.gateway.statistics().dropped
            await peer.send(data)
            refused = await peer.envelope()
            assert refused["t"] == "refused"
            assert refused["error"]["code"] == "validation_error"
            assert await peer.hear_close() == code
            await peer.send(data)
            assert await peer.read_all() == b""
        assert found.gateway.statistics().dropped == dropped + 1


async def test_a_peer_that_was_refused_is_left_as_soon_as_it_has_heard_why() -> None:
    async with attacked(quick(close_seconds=5)) as found:
        peer = await found.welcomed()
        await peer.send(frame(TEXT, masked=False) + b"x" * 100_000)
        assert await peer.hear_close() == 1002
        with trio.fail_after(1):
            await peer.read_all()


async def test_a_violation_lets_the_frame_that_is_being_sent_go_out_whole() -> None:
    async with attacked(quick(StreamLimits(send_seconds=2))) as found:
        peer = await found.welcomed()
        epoch = (await peer.ask("register", "a"))["body"]["epoch"]
        state = "A" * 2**20
        await peer.ask("checkpoint", "a", epoch=epoch, checkpoint_id="c", state=state)
        await peer.say(*[peer.call("get_checkpoint", "a", checkpoint_id="c") for _ in range(16)])
        await trio.testing.wait_all_tasks_blocked(0.01)
        await peer.send(frame(TEXT, masked=False))
        await trio.sleep(0.05)
        first = await peer.envelope()
        assert first["body"]["checkpoint"]["state"] == state
        last = first
        while last["t"] != "refused":
            last = await peer.envelope()
        assert await peer.hear_close() == 1002
        await peer.leave()


async def test_bad_frames_and_resets() -> None:
    async with attacked() as found:
        for _ in range(40):
            peer = await found.upgraded()
            await peer.send(b"\x83\x80\0\0\0\0")
            await peer.reset()


async def test_half_a_frame_before_the_hello_ends_at_the_deadline() -> None:
    async with attacked(quick(hello_seconds=0.1)) as found:
        peer = await found.upgraded()
        await peer.send(HELLO[:-3])
        refused = await peer.envelope()
        assert refused["error"]["details"]["field"] == "hello"
        await peer.read_all()


async def test_half_a_frame_and_silence_is_a_dead_peer() -> None:
    async with served(quick(ping_seconds=0.1, pong_seconds=0.1)) as found:
        lively = await found.welcomed()
        found.nursery.start_soon(lively.answer_pings)
        peer = await found.welcomed()
        await peer.send(frame(TEXT, b"x" * 100)[:50])
        assert await peer.hear_close() == 1001
        await found.settled(sockets=1)


async def flood(found: Served, peer: Peer, data: bytes, most: int) -> int:
    """Send ``data`` again and again until the socket is gone; how often it was."""
    for times in range(most):
        await peer.send(data)
        if found.gateway.statistics().sockets == 1:
            return times
    raise AssertionError("never stopped")


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (frame(BINARY, final=False), frame(0, final=False) * 2000),
        (frame(BINARY, b"x", final=False), frame(0, b"x", final=False) * 2000),
        (frame(TEXT, b"x", final=False), (frame(0, b"x", final=False) + frame(PING)) * 1000),
        (b"", frame(PING, b"p" * 125) * 500),
        (b"", frame(PONG) * 2000),
        (b"", frame(TEXT, b"{}", length=2 * MEBIBYTE) + b"x" * 2 * MEBIBYTE),
        (frame(BINARY, length=2**62), b"x" * MEBIBYTE),
    ],
    ids=["empty fragments", "fragments", "pings between", "pings", "pongs", "large messages", "announced"],
)
async def test_a_flood_ends_soon_and_costs_little(first: bytes, again: bytes) -> None:
    limits = quick(StreamLimits(message_bytes=MEBIBYTE, send_seconds=0.5))
    async with attacked(limits) as found:
        before = resident()
        peer = await found.welcomed()
        began = trio.current_time()
        await peer.send(first)
        await flood(found, peer, again, 100_000)
        assert trio.current_time() - began < 1.5
        assert resident() - before < 24 * MEBIBYTE


async def test_pings_are_answered_while_nothing_else_happens() -> None:
    async with attacked() as found:
        peer = await found.welcomed()
        await peer.send(frame(PING, b"here?"))
        heard = await peer.hear()
        assert heard is not None
        assert (heard.opcode, heard.payload) == (PONG, b"here?")
        await peer.close()


# ---------------------------------------------------------------- closing


@pytest.mark.parametrize(
    "late",
    [
        frame(PING, b"p"),
        frame(PING, b"p") * 20,
        frame(TEXT, b"late"),
        frame(TEXT, b"late", final=False),
        b"\x00",
        closing(1000) * 2,
        b"",
    ],
)
async def test_what_comes_after_the_server_has_closed_is_ignored(late: bytes) -> None:
    async with attacked() as found:
        peer = await found.upgraded()
        await peer.send(frame(TEXT, b'{"t":"call","id":1,"op":"status"}'))
        assert await peer.hear_close() == 1008
        await peer.send(late)
        await trio.testing.wait_all_tasks_blocked(0.005)
        await peer.send(closing(1000))
        assert await peer.read_all() == b""


@pytest.mark.parametrize("times", [1, 2])
async def test_a_peer_that_closes_is_answered_once(times: int) -> None:
    async with attacked() as found:
        peer = await found.welcomed()
        await peer.send(closing(1000) * times)
        heard = [await peer.hear(), await peer.hear()]
        assert [one and one.code for one in heard] == [1000, None]


async def test_a_peer_that_never_answers_a_close_is_left_in_time() -> None:
    async with attacked(quick(close_seconds=0.2)) as found:
        peer = await found.upgraded()
        await peer.say({"t": "nonsense"})
        began = trio.current_time()
        assert await peer.hear_close() == 1008
        assert await peer.read_all() == b""
        assert 0.1 < trio.current_time() - began < 0.6


async def test_pings_and_a_lost_socket_while_the_server_closes() -> None:
    async with attacked() as found:
        for _ in range(10):
            peer = await found.upgraded()
            await peer.say({"t": "nonsense"})
            await peer.send(frame(PING, b"p") * 20)
            await peer.reset()


async def test_a_goodbye_behind_calls_in_one_packet_is_heard() -> None:
    async with attacked() as found:
        peer = await found.welcomed()
        await peer.send(
            frame(TEXT, as_json(peer.call("register", "a")))
            + frame(TEXT, as_json({"t": "goodbye"}))
            + closing(1000)
        )
        assert await peer.hear_close() == 1000
        await until(lambda: found.gateway.statistics().connections == 1)


# ---------------------------------------------------------------- envelopes

JSON_GARBAGE = [
    b"",
    b"x",
    b"{",
    b"[]]",
    b"null",
    b"1",
    b"[1]",
    b"[[]]",
    b"[" * 5000,
    b'{"t":' * 2500,
    b"1" * 6000,
    b'{"t":"call","id":1,"id":1,"op":"status"}',
    b'{"t":"call","t":"call","id":1,"op":"status"}',
    b'{"t":"call","id":NaN,"op":"status"}',
    b'{"t":"call","id":1e999,"op":"status"}',
    b'{"t":"call","id":1.0,"op":"status"}',
    b'{"t":"call","id":true,"op":"status"}',
    b'{"t":"call","id":"1","op":"status"}',
    b'{"t":"call","id":-1,"op":"status"}',
    b'{"t":"call","id":2,"op":"status"}',
    b'{"t":"call","id":18446744073709551616,"op":"status"}',
    b'{"t":"call","id":' + b"9" * 5000 + b',"op":"status"}',
    b'{"t":["call"],"id":1,"op":"status"}',
    b'{"t":{},"id":1,"op":"status"}',
    b'{"t":"answer","id":1,"seq":1}',
    b'{"t":"hello","version":1}',
    b'{"t":"received","seq":99}',
    b'{"t":"received","seq":-1}',
    b'{"t":"received","seq":1e3}',
    b'{"t":"\\ud800"}',
    b"\xef\xbb\xbf{}",
    b"\x00",
]
MSGPACK_GARBAGE = [
    b"",
    b"\xc1",
    b"\xc0",
    b"\x91" * 10_000,
    b"\x81\xa1t" * 4000,
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x82\xa1t\xa4call\x01\x02",
    b"\x81\x91\x01\x01",
    b"\x81\xa1t\xa4\xff\xff\xff\xff",
    b"\xc7\x08\xff" + bytes(8),
    b"\xd4\x00\x00",
    b"\x81\xa1t\xd6\xff\xff\xff\xff\xff",
    msgspec.msgpack.encode({"t": "call", "id": 2**64 - 1, "op": "status"}),
    msgspec.msgpack.encode({"t": "call", "id": float("nan"), "op": "status"}),
    msgspec.msgpack.encode({"t": b"call", "id": 1, "op": "status"}),
    msgspec.msgpack.encode({"t": "call", "id": 1, "op": "status"}) + b"\x00",
    msgspec.msgpack.encode({"t": "hello", "version": 1}),
    msgspec.msgpack.encode([{"t": "received", "seq": 0}] * 1001),
    b'{"t":"call","id":1,"op":"status"}',
]


@pytest.mark.parametrize(
    ("protocol", "opcode", "garbage"),
    [(JSON_PROTOCOL, TEXT, JSON_GARBAGE), (MSGPACK_PROTOCOL, BINARY, MSGPACK_GARBAGE)],
    ids=["json", "msgpack"],
)
async def test_garbage_ends_its_connection_and_no_other(
    protocol: str, opcode: int, garbage: list[bytes]
) -> None:
    async with attacked() as found:
        for data in garbage:
            peers = [await found.welcomed(protocol)]
            if b"hello" not in data:
                peers.append(await found.upgraded(protocol))
            for peer in peers:
                await peer.send(frame(opcode, data))
                refused = await peer.envelope()
                assert refused["t"] == "refused", data
                assert peer.envelopes == []
                last = await peer.hear()
                assert last is not None
                assert last.code in (1008, 1009), data
                await peer.leave()


async def test_a_frame_of_the_other_protocol_is_refused() -> None:
    async with attacked() as found:
        json_peer, msgpack_peer = await found.welcomed(), await found.welcomed(MSGPACK_PROTOCOL)
        await json_peer.send(frame(BINARY, as_json(json_peer.call("counts"))))
        assert await json_peer.hear_close() == 1008
        await msgpack_peer.send(frame(TEXT, as_json(msgpack_peer.call("counts"))))
        assert await msgpack_peer.hear_close() == 1008


BAD_BODIES: list[dict[str, Any]] = [
    {"op": "status", "body": []},
    {"op": "status", "body": None},
    {"op": "status", "body": {"more": 1}},
    {"op": "status", "instance": 5},
    {"op": "status", "instance": ""},
    {"op": "status", "instance": "x" * 10_000},
    {"op": "status", "instance": "a\x00b"},
    {"op": "status", "instance": "a\nb"},
    {"op": "status"},
    {"op": 5},
    {"op": ""},
    {"op": "x" * 10_000},
    {"op": "__class__"},
    {"op": "close"},
    {"op": "start"},
    {"op": "wake", "instance": "a", "body": {"epoch": 1, "deadline_us": 0}},
    {"op": "ask_shutdown", "instance": "a", "body": {"epoch": 1}},
    {"op": "force_suspend", "instance": "a", "body": {"epoch": 1}},
    {"op": "checkpoint", "instance": "a", "body": {}},
    {"op": "checkpoint", "instance": "a", "body": {"epoch": "1", "checkpoint_id": "c"}},
    {"op": "checkpoint", "instance": "a", "body": {"epoch": 2**63, "checkpoint_id": "c"}},
    {"op": "checkpoint", "instance": "a", "body": {"epoch": 1, "checkpoint_id": "c", "state": "no base64"}},
    {"op": "checkpoint", "instance": "a", "body": {"epoch": 1, "checkpoint_id": ["c"]}},
    {"op": "sleep", "instance": "a", "body": {"epoch": 1, "duration_us": -1}},
    {"op": "sleep", "instance": "a", "body": {"epoch": 1, "duration_us": 2**62}},
    {"op": "send_signal", "instance": "a", "body": {"type": "CANCEL"}},
    {"op": "send_signal", "instance": "a", "body": {"type": "cancel' OR 1=1 --"}},
    {"op": "send_signal", "instance": "a", "body": {"type": 0}},
    {"op": "watch", "instance": "a"},
    {"op": "watch", "instance": "a", "body": {"watch": 1.5}},
    {"op": "watch", "instance": "a", "body": {"watch": True}},
    {"op": "watch", "instance": "a", "body": {"watch": 2**53}},
    {"op": "watch", "instance": "a", "body": {"watch": 1, "more": 1}},
    {"op": "watch", "instance": "", "body": {"watch": 1}},
    {"op": "watch", "body": {"watch": 1}},
    {"op": "unwatch", "body": {}},
    {"op": "counts", "body": {"more": 1}},
    {"op": "list_instances", "body": {"limit": "all"}},
    {"op": "list_instances", "body": {"limit": -1}},
    {"op": "list_instances", "body": {"limit": 2**62}},
    {"op": "list_instances", "body": {"statuses": "running"}},
    {"op": "list_instances", "body": {"statuses": ["none"]}},
    {"op": "list_instances", "body": {"cursor": "forged"}},
    {"op": "list_instances", "body": {"created_from": "today"}},
    {"op": "list_events", "instance": "a", "body": {"instance_id": "b", "type": []}},
    {"op": "list_events", "body": {}},
    {"op": "count_kind", "instance": "a", "body": {"kind": "__class__"}},
]


async def test_a_call_of_a_wrong_form_is_answered_and_the_connection_goes_on() -> None:
    async with attacked() as found:
        peer = await found.welcomed()
        for number, call in enumerate(BAD_BODIES, 1):
            await peer.say({"t": "call", "id": number, **call})
            answer = await peer.answer(number)
            assert answer["error"]["code"] == "validation_error", call
            assert answer["error"]["details"]["field"], call
            await peer.say({"t": "received", "seq": answer["seq"]})
        peer.calls = len(BAD_BODIES)
        assert (await peer.ask("counts"))["body"] is not None
        await peer.say({"t": "goodbye"})
        await peer.leave()


# ---------------------------------------------------------------- another tenant


def plausible(hint: Any) -> Any:
    """A value for a field, as it is written in JSON."""
    hints = [one for one in get_args(hint) if one is not type(None)] or [hint]
    kind = hints[0]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind)).name.lower()
    return {int: 1, str: "c", bytes: "eA==", bool: True}.get(kind, [])


def body_of(request: type[Any]) -> dict[str, Any]:
    """The smallest body of a request."""
    return {
        field.name: plausible(field.type) for field in attrs.fields(request) if field.default is attrs.NOTHING
    }


def every_message() -> list[tuple[str, dict[str, Any]]]:
    """Every message type that names an instance, with a body."""
    asked = [(name, body_of(operation.request)) for name, operation in OPERATIONS.items()]
    bodies: dict[str, dict[str, Any]] = {
        "send_signal": {"type": "custom", "key": "k", "payload": "eA=="},
        "exit_report": {"epoch": 1, "reason": "crashed"},
        "ack_signal": {"epoch": 1, "signal_type": "cancel"},
        "event": {"epoch": 1, "type": "heartbeat"},
        "wait_signal": {"epoch": 1, "key": "k", "checkpoint_id": "w", "timeout_us": 1},
    }
    found = [(name, bodies.get(name, body)) for name, body in asked]
    for name, question in questions_of(Runtime).items():
        body = body_of(question.arguments)
        if "instance_id" in body:
            body = {key: value for key, value in body.items() if key != "instance_id"}
            found.append((name, {**body, "kind": "events"} if "kind" in body else body))
    return [*found, ("watch", {"watch": 1})]


NUMBERS = {"seq": 0, "id": 0}
"""Of an answer, which differ from one to the next."""


def scrubbed(value: Any, *names: str) -> Any:
    """An answer without what differs between any two instances: their ids, numbers and times."""
    if isinstance(value, dict):
        return {key: scrubbed(one, *names) for key, one in value.items()}
    if isinstance(value, list):
        return [scrubbed(one, *names) for one in value]
    if isinstance(value, str):
        for name in names:
            value = value.replace(name, "ID")
        return value
    return 0 if isinstance(value, int) and not isinstance(value, bool) else value


async def test_every_message_about_another_tenants_instance_is_answered_as_if_it_did_not_exist() -> None:
    everything = frozenset(Role) - {Role.ADMIN}
    async with served() as found:
        a, b = await found.token("a", *everything), await found.token("b", *everything)
        owner, stranger = await found.welcomed(token=a), await found.welcomed(token=b)
        messages = every_message()
        assert {name for name, _ in messages} > set(OPERATIONS)
        for name, body in messages:
            theirs, nobodys = f"theirs-{name}", f"nobodys-{name}"
            epoch = (await owner.ask("register", theirs))["body"]["epoch"]
            await owner.ask("checkpoint", theirs, epoch=epoch, checkpoint_id="c", state="aGlkZGVu")
            before = await owner.ask("status", theirs)
            if "epoch" in body:
                body = {**body, "epoch": epoch}
            answers = []
            for instance in (theirs, nobodys):
                answers.append(scrubbed(await stranger.ask(name, instance, **body), instance))
                assert "aGlkZGVu" not in str(answers)
                await stranger.ask("unwatch", watch=1)
            assert answers[0] == answers[1], name
            assert await owner.ask("status", theirs) | NUMBERS == before | NUMBERS, name
            saved = await owner.ask("checkpoint", theirs, epoch=epoch, checkpoint_id="d", state="eA==")
            assert saved["body"]["state"] == "eA==", name
        listed = await stranger.ask("list_instances")
        assert {item["tenant_id"] for item in listed["body"]["items"]} == {"b"}
        assert owner.envelopes == []


async def test_the_same_id_in_two_tenants_is_two_instances() -> None:
    async with served() as found:
        a, b = await found.token("a", Role.WORKER), await found.token("b", Role.WORKER)
        one, two = await found.welcomed(token=a), await found.welcomed(token=b)
        epochs = [(await peer.ask("register", "same"))["body"]["epoch"] for peer in (one, two)]
        await two.say(two.call("send_signal", "same", type="pause"))
        told = [await two.envelope(), await two.envelope()]
        assert {one.get("kind") for one in told} == {None, "signal"}
        saved = await one.ask("checkpoint", "same", epoch=epochs[0], checkpoint_id="c", state="eA==")
        assert saved["body"]["state"] == "eA=="
        assert "signal" not in saved["body"]
        assert one.envelopes == []


async def test_a_connection_of_another_tenant_cannot_be_resumed() -> None:
    async with served() as found:
        a, b = await found.token("a", Role.WORKER), await found.token("b", Role.WORKER)
        peer = await found.upgraded()
        welcome = await peer.hello(token=a)
        thief = await found.upgraded()
        resume = {"connection": welcome["connection"], "secret": welcome["secret"], "seen": 0}
        stolen = await thief.hello(token=b, resume=resume)
        assert (stolen["t"], stolen["resumed"], stolen["tenant"]) == ("welcome", False, "b")
        assert stolen["connection"] != welcome["connection"]
        for secret in ("", welcome["secret"][:-1], welcome["secret"] + "x", "é"):
            guess = await found.upgraded()
            answer = await guess.hello(token=a, resume={**resume, "secret": secret})
            assert answer["resumed"] is False
        assert (await peer.ask("register", "x"))["body"]["epoch"]


# ---------------------------------------------------------------- peers that do not read


async def test_a_peer_that_never_reads_is_dropped_and_its_answers_are_bounded() -> None:
    limits = quick(StreamLimits(send_seconds=0.3), buffer_bytes=4 * MEBIBYTE, grace_seconds=0.1)
    async with attacked(limits) as found:
        before = resident()
        peer = await found.welcomed()
        epoch = (await peer.ask("register", "big"))["body"]["epoch"]
        state = "eA==" * (256 * 1024 // 4)
        await peer.ask("checkpoint", "big", epoch=epoch, checkpoint_id="c", state="A" * len(state))
        most = 0
        with trio.fail_after(5):
            for _ in range(40):
                await peer.say(*[peer.call("get_checkpoint", "big", checkpoint_id="c") for _ in range(10)])
                await trio.sleep(0.005)
                most = max(most, found.gateway.kept_bytes)
            await found.settled(sockets=1)
        assert MEBIBYTE < most < 5 * MEBIBYTE
        assert resident() - before < 48 * MEBIBYTE
        await until(lambda: found.gateway.kept_bytes < 1000)


async def test_a_watcher_that_never_reads_does_not_hold_up_the_others() -> None:
    limits = quick(StreamLimits(send_seconds=0.3), buffer_bytes=2 * MEBIBYTE, grace_seconds=0.1)
    async with attacked(limits) as found:
        deaf, hearing, worker = [await found.welcomed() for _ in range(3)]
        epoch = (await worker.ask("register", "busy"))["body"]["epoch"]
        for watcher in (deaf, hearing):
            assert (await watcher.ask("watch", "busy", watch=7))["body"] == {}
        payload = "A" * 32 * 1024
        with trio.fail_after(5):
            for number in range(200):
                await worker.ask(
                    "event",
                    "busy",
                    epoch=epoch,
                    type="custom",
                    subtype="x",
                    payload=payload,
                    request_id=f"r{number}",
                )
                push = await hearing.envelope()
                assert push["kind"] == "change"
                await hearing.say({"t": "received", "seq": push["seq"]})
                await worker.say({"t": "received", "seq": number + 2})
        for peer in (deaf, hearing, worker):
            await peer.close()


async def test_a_client_whose_frames_take_long_does_not_have_the_loop_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(carrier, "LONG_SECONDS", 0.01)
    async with attacked() as found:
        peer, other = await found.welcomed(), await found.welcomed()
        keys = b",".join(b'"k%d":[{},{}]' % number for number in range(15_000))
        began = trio.current_time()
        await peer.send(frame(TEXT, b'{"t":"call","id":1,"op":"none","body":{' + keys + b"}}"))
        assert (await peer.answer(1))["error"]["code"] == "validation_error"
        took = trio.current_time() - began
        await other.ask("status", "a")
        assert trio.current_time() - began < took * 3
        peer.calls = 1
        await peer.ask("status", "a")
        assert trio.current_time() - began > took * 3
        for one in (peer, other):
            await one.close()


async def test_two_hundred_peers_with_random_bytes() -> None:
    randomness = random.Random(7)
    good = HELLO + frame(
        TEXT, b'[{"t":"call","id":1,"op":"status","instance":"a","body":{}},{"t":"goodbye"}]'
    )
    async with attacked() as found:
        for number in range(200):
            peer = await found.upgraded()
            data = bytearray(good * 2 if number % 2 else randomness.randbytes(300))
            for _ in range(randomness.randrange(6)):
                data[randomness.randrange(len(data))] = randomness.randrange(256)
            for begin in range(0, len(data), 64):
                await peer.send(bytes(data[begin : begin + 64]))
            if number % 3:
                await peer.send(closing(1000))
            await (peer.reset() if number % 5 == 0 else peer.close())


# ---------------------------------------------------------------- bugs of our own


class Broken:
    """A backend with a bug in one of its methods."""

    def __init__(self, known: Any, name: str) -> None:
        self.known = known
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name != self.name:
            return getattr(self.known, name)
        raise ZeroDivisionError("a bug")


async def broken(name: str, attack: Callable[[Served], Awaitable[None]]) -> int:
    """Attack a gateway whose backend has a bug; how many sockets failed by it."""
    async with served() as found:
        neighbour = await found.welcomed()
        found.gateway.backend = Broken(found.gateway.backend, name)
        await attack(found)
        failed, found.gateway.failed = found.gateway.failed, 0
        assert (await neighbour.ask("counts"))["body"] is not None
    return failed


async def test_a_bug_in_a_hello_ends_that_socket(caplog: pytest.LogCaptureFixture) -> None:
    async def attack(found: Served) -> None:
        peer = await found.upgraded()
        await peer.say({"t": "hello", "version": 1})
        assert await peer.hear_close() == 1011
        await found.settled(sockets=1)

    assert await broken("authenticate", attack) == 1
    assert "a socket failed" in caplog.text


@pytest.mark.parametrize(("name", "op"), [("submit", "status"), ("ask", "counts"), ("watch", "watch")])
async def test_a_bug_in_a_call_is_answered(name: str, op: str, caplog: pytest.LogCaptureFixture) -> None:
    async def attack(found: Served) -> None:
        peer = await found.welcomed()
        answer = await peer.ask(op, "a", **({"watch": 1} if op == "watch" else {}))
        assert answer["error"]["code"] == "internal_error"
        assert "bug" not in answer["error"]["message"]
        await peer.close()

    assert await broken(name, attack) == 0
    assert f"{op} failed" in caplog.text


async def test_a_bug_in_the_health_ends_that_socket() -> None:
    async def attack(found: Served) -> None:
        peer = await found.asks(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert await peer.read_all() == b""
        await found.settled(sockets=1)

    assert await broken("ready", attack) == 1


async def test_a_bug_in_the_look_at_tokens_is_counted_and_they_are_looked_at_again() -> None:
    async with served(quick(token_seconds=0.01)) as found:
        good = found.gateway.backend
        peer = await found.welcomed()
        found.gateway.backend = Broken(good, "lasting")
        await until(lambda: found.gateway.failed >= 2)
        found.gateway.backend = good
        found.gateway.failed = 0
        await trio.sleep(0.03)
        assert (await peer.ask("counts"))["body"] is not None


def test_every_codec_is_attacked() -> None:
    assert set(CODECS) == {JSON_PROTOCOL, MSGPACK_PROTOCOL}
