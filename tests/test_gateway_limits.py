"""Every limit of a gateway is gone over: a clear error, the right close code, and others notice nothing."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from runtara.records import Reason, Status
from runtara.transport.limits import ConnectionLimits, GatewayLimits, StreamLimits
from runtara.wire import Call
from tests.gateways import (
    BINARY,
    PING,
    PONG,
    TEXT,
    Peer,
    Served,
    as_json,
    attacked,
    frame,
    head,
    quick,
    served,
    until,
)

KIBIBYTE = 1024
STATE = "A" * 16 * KIBIBYTE
"""12 KiB in base64."""


def stream(**changes: Any) -> GatewayLimits:
    return quick(StreamLimits(**{"send_seconds": 0.5, **changes}))


@pytest.mark.parametrize("kind", [StreamLimits, ConnectionLimits, GatewayLimits])
def test_every_limit_has_its_test(kind: type[Any]) -> None:
    source = Path(__file__).read_text() + (Path(__file__).parent / "test_gateway_auth.py").read_text()
    names = {field.name for field in attrs.fields(kind)} - {"stream", "connection"}
    assert {name for name in names if f"{name}=" not in source} == set()


async def refused(peer: Peer, close_code: int, code: str = "validation_error") -> dict[str, Any]:
    """The error with which the server closes; and it does so with ``close_code``."""
    while (envelope := await peer.envelope())["t"] != "refused":
        pass
    assert await peer.hear_close() == close_code
    await peer.leave()
    error: dict[str, Any] = envelope["error"]
    assert error["code"] == code
    return error


async def fill_budget(found: Served) -> int:
    """Leave no room for any request; returns what was free."""
    budget = found.runtime.system.budget
    free = budget.limit - budget.used
    budget.used += free
    return free


# ---------------------------------------------------------------- one socket


async def test_the_size_of_a_head() -> None:
    async with attacked(stream(head_bytes=600)) as found:
        peer = await found.asks(head("X: " + "a" * 600))
        assert await peer.status() == 431
        assert b"too large" in await peer.read_all()


async def test_the_lines_of_a_head() -> None:
    async with attacked(stream(head_lines=10)) as found:
        peer = await found.asks(head(*["X: a"] * 10))
        assert await peer.status() == 431
        assert b"too many lines" in await peer.read_all()


async def test_the_size_of_a_hello() -> None:
    async with attacked(stream(hello_bytes=200)) as found:
        peer = await found.upgraded()
        await peer.say({"t": "hello", "version": 1, "client": "x" * 200})
        error = await refused(peer, 1009)
        assert "200 bytes came before the welcome" in error["message"]


async def test_the_size_of_a_message() -> None:
    async with attacked(stream(message_bytes=5000)) as found:
        peer = await found.welcomed()
        await peer.say(peer.call("checkpoint", "a", epoch=1, checkpoint_id="c", state="A" * 5000))
        error = await refused(peer, 1009)
        assert "over 5000 bytes" in error["message"]


async def test_the_fragments_of_a_message() -> None:
    async with attacked(stream(fragments=3)) as found:
        peer = await found.welcomed()
        call = as_json(peer.call("counts"))
        parts = [frame(TEXT, call[:5], final=False), frame(0, call[5:9], final=False), frame(0, call[9:])]
        await peer.send(b"".join(parts))
        assert (await peer.answer(1))["body"] is not None
        await peer.send(frame(TEXT, final=False) + 3 * frame(0, final=False))
        await refused(peer, 1009)


async def test_the_rate_of_frames() -> None:
    async with attacked(stream(frames_per_second=20)) as found:
        peer = await found.welcomed()
        await peer.send(frame(TEXT, b'{"t":"received","seq":0}') * 25)
        error = await refused(peer, 1008)
        assert "too many frames" in error["message"]


async def test_the_rate_of_control_frames() -> None:
    async with attacked(stream(controls_per_second=10)) as found:
        peer = await found.welcomed()
        await peer.send(frame(PING) * 5 + frame(PONG) * 6)
        error = await refused(peer, 1008)
        assert "too many frames" in error["message"]


async def test_a_peer_that_does_not_read_in_time() -> None:
    limits = quick(StreamLimits(send_seconds=0.1), grace_seconds=0.1)
    async with attacked(limits) as found:
        peer = await found.welcomed()
        epoch = (await peer.ask("register", "a"))["body"]["epoch"]
        await peer.ask("checkpoint", "a", epoch=epoch, checkpoint_id="c", state="A" * 2**20)
        await peer.say(*[peer.call("get_checkpoint", "a", checkpoint_id="c") for _ in range(8)])
        await found.settled(sockets=1)


# ---------------------------------------------------------------- deadlines


async def test_the_handshake_has_a_deadline() -> None:
    async with attacked(quick(handshake_seconds=0.1)) as found:
        peer = await found.asks(head()[:-2])
        began = trio.current_time()
        assert await peer.status() == 408
        assert 0.05 < trio.current_time() - began < 0.5
        await peer.read_all()


async def test_the_hello_has_a_deadline() -> None:
    async with attacked(quick(hello_seconds=0.1)) as found:
        peer = await found.upgraded()
        began = trio.current_time()
        error = await refused(peer, 1008)
        assert error["details"] == {"field": "hello", "problem": "did not come in time"}
        assert 0.05 < trio.current_time() - began < 0.5


async def test_leaving_has_a_deadline() -> None:
    async with attacked(quick(close_seconds=0.1)) as found:
        peer = await found.upgraded()
        await peer.say({"t": "goodbye"})
        began = trio.current_time()
        await found.settled(sockets=1)
        assert 0.05 < trio.current_time() - began < 0.5


async def test_a_silent_peer_is_pinged_and_given_up() -> None:
    async with served(quick(ping_seconds=0.1, pong_seconds=0.1)) as found:
        lively, silent = await found.welcomed(), await found.welcomed()
        found.nursery.start_soon(lively.answer_pings)
        began = trio.current_time()
        heard = await silent.hear()
        assert heard is not None
        assert heard.opcode == PING
        assert await silent.hear_close() == 1001
        assert 0.15 < trio.current_time() - began < 0.6
        await silent.leave()
        await trio.sleep(0.1)
        assert found.gateway.statistics().sockets == 1


async def test_any_byte_is_a_sign_of_life_but_pings_must_be_answered_some_day() -> None:
    async with served(quick(ping_seconds=0.02, pong_seconds=0.04)) as found:
        peer = await found.welcomed()
        message = frame(BINARY, bytes(1000))
        began = trio.current_time()
        for byte in message:
            await peer.send(bytes([byte]))
            await trio.sleep(0.03)
            if found.gateway.statistics().sockets == 0:
                break
        assert 0.3 < trio.current_time() - began < 1.5
        assert await peer.hear_close() == 1001


# ---------------------------------------------------------------- one connection


async def test_sessions_wait_for_the_grace_period_and_no_longer() -> None:
    async with attacked(quick(grace_seconds=0.15)) as found:
        peer = await found.welcomed()
        await peer.ask("register", "a")
        await peer.close()
        await found.settled(sockets=1)
        assert found.gateway.statistics().connections == 2
        assert (await found.runtime.status("a")).status is Status.RUNNING
        await until(lambda: found.gateway.statistics().connections == 1)
        assert found.gateway.statistics().sessions == 1
        view = await suspended(found, "a")
        assert (view.record.reason, view.record.attempt) == (Reason.DISCONNECTED, 2)


async def suspended(found: Served, instance_id: str) -> Any:
    for _ in range(200):
        view = await found.runtime.status(instance_id)
        if view.status is Status.SUSPENDED:
            return view
        await trio.sleep(0.005)
    raise AssertionError("it runs on")


async def test_the_number_of_sessions() -> None:
    async with attacked(quick(sessions=3)) as found:
        peer = await found.welcomed()
        await peer.say(*[peer.call("register", f"i{number}") for number in range(5)])
        answers = [await peer.answer(number) for number in range(1, 6)]
        errors = [answer.get("error", {}).get("code") for answer in answers]
        assert sorted(errors, key=str) == [None, None, None, "overloaded", "overloaded"]
        assert found.gateway.statistics().sessions == 4
        held = next(number for number, error in enumerate(errors) if error is None)
        again = await peer.ask("register", f"i{held}")
        assert "error" not in again
        await peer.ask("leave", f"i{held}", epoch=again["body"]["epoch"], crashed=False)
        assert "error" not in await peer.ask("register", "another")
        await peer.close()


async def test_the_number_of_calls_in_flight() -> None:
    async with attacked(quick(in_flight=3)) as found:
        peer = await found.welcomed()
        epoch = (await peer.ask("register", "a"))["body"]["epoch"]
        await peer.say(*[peer.call("sleep", "a", epoch=epoch, duration_us=10**9) for _ in range(4)])
        error = (await peer.answer(peer.calls))["error"]
        assert (error["code"], error["retryable"], error["retry_after_ms"]) == ("overloaded", True, 100)
        assert "3 calls of this connection" in error["message"]
        await peer.close()


async def test_the_number_of_calls_in_flight_for_one_instance() -> None:
    async with attacked(quick(in_flight_per_instance=2)) as found:
        peer = await found.welcomed()
        epoch = (await peer.ask("register", "a"))["body"]["epoch"]
        await peer.say(*[peer.call("sleep", "a", epoch=epoch, duration_us=10**9) for _ in range(3)])
        error = (await peer.answer(peer.calls))["error"]
        assert "2 calls of this instance" in error["message"]
        assert (await peer.ask("status", "b"))["body"] is not None
        await peer.close()


class Slow:
    """A backend whose questions are answered when it is told, and that counts them."""

    def __init__(self, known: Any) -> None:
        self.known = known
        self.asked = 0
        self.go = trio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.known, name)

    async def ask(self, *_: Any) -> Any:
        self.asked += 1
        await self.go.wait()
        return {}


async def test_the_number_of_questions_at_once() -> None:
    async with attacked(quick(questions=2)) as found:
        slow = Slow(found.gateway.backend)
        found.gateway.backend = slow
        peer = await found.welcomed()
        await peer.say(*[peer.call("counts") for _ in range(20)])
        assert (await peer.ask("status", "a"))["body"] is not None
        assert slow.asked == 2
        slow.go.set()
        answered = {(await peer.envelope())["id"] for _ in range(20)}
        assert answered == set(range(1, 21))
        assert slow.asked == 20
        await peer.close()


async def test_the_number_of_watches() -> None:
    async with attacked(quick(watches=2)) as found:
        peer = await found.welcomed()
        for number in range(2):
            assert (await peer.ask("watch", "neighbour", watch=number))["body"] == {}
        error = (await peer.ask("watch", "neighbour", watch=2))["error"]
        assert error["code"] == "overloaded"
        assert (await peer.ask("unwatch", watch=0))["body"] == {}
        assert (await peer.ask("watch", "neighbour", watch=2))["body"] == {}
        await peer.close()
        await until(lambda: found.gateway.statistics().connections == 1)
        assert not any(entry.watchers for entry in found.runtime.system.directory.entries.values())


async def test_calls_wait_for_room_in_order_and_the_reader_reads_on() -> None:
    async with attacked(quick(waiting_seconds=5.0)) as found:
        peer = await found.welcomed()
        epoch = (await peer.ask("register", "a"))["body"]["epoch"]
        free = await fill_budget(found)
        calls = [
            peer.call("checkpoint", "a", epoch=epoch, checkpoint_id="same", state=state)
            for state in ("Zmlyc3Q=", "c2Vjb25k", "dGhpcmQ=")
        ]
        await peer.say(*calls)
        await peer.send(frame(PING, b"here?"))
        heard = await peer.hear()
        assert heard is not None
        assert (heard.opcode, heard.payload) == (PONG, b"here?")
        assert "error" not in await peer.ask("counts")
        [connection] = [c for c in found.gateway.connections.values() if "a" in c.sessions]
        assert [waiting.call.id for waiting in connection.line] == [2, 3, 4]
        found.runtime.system.budget.release(free)
        answers = [(await peer.answer(number))["body"] for number in (2, 3, 4)]
        assert [answer["found"] for answer in answers] == [False, True, True]
        assert {answer["state"] for answer in answers} == {"Zmlyc3Q="}
        assert (connection.line_bytes, len(connection.line)) == (0, 0)
        await peer.close()


async def test_a_call_that_arrived_is_not_lost_to_a_cancellation() -> None:
    async with served(quick(waiting_seconds=5.0)) as found:
        peer = await found.welcomed()
        free = await fill_budget(found)
        [connection] = found.gateway.connections.values()
        with trio.CancelScope() as scope:
            scope.cancel()
            await connection.handle(Call(id=1, op="status", instance="a"))
        assert [waiting.call.id for waiting in connection.line] == [1]
        found.runtime.system.budget.release(free)
        assert (await peer.answer(1))["body"] is not None


class Held(Slow):
    """A backend in which the request of one id has to wait, and no other one."""

    async def submit(self, key: Any, message: Any, sink: Any, done: Any) -> None:
        if getattr(message, "checkpoint_id", None) == "held":
            await self.go.wait()
        await self.known.submit(key, message, sink, done)


async def test_no_call_overtakes_one_that_waits() -> None:
    async with attacked(quick(waiting_seconds=5.0)) as found:
        held = Held(found.gateway.backend)
        found.gateway.backend = held
        peer = await found.welcomed()
        await peer.say(
            peer.call("get_checkpoint", "a", checkpoint_id="held"),
            peer.call("get_checkpoint", "a", checkpoint_id="free"),
        )
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert peer.envelopes == []
        held.go.set()
        assert [(await peer.envelope())["id"] for _ in range(2)] == [1, 2]
        await peer.close()


async def test_calls_that_wait_too_long_are_refused_all_together() -> None:
    async with attacked(quick(waiting_seconds=0.1)) as found:
        peer = await found.welcomed()
        free = await fill_budget(found)
        began = trio.current_time()
        await peer.say(*[peer.call("status", f"i{number}") for number in range(50)])
        errors = [(await peer.answer(number))["error"] for number in range(1, 51)]
        assert 0.05 < trio.current_time() - began < 0.5
        assert {(error["code"], error["retryable"]) for error in errors} == {("overloaded", True)}
        found.runtime.system.budget.release(free)
        assert (await peer.ask("status", "a"))["body"] is not None
        await peer.close()


async def test_the_bytes_of_calls_that_wait() -> None:
    async with attacked(quick(waiting_bytes=52_000, waiting_seconds=5.0)) as found:
        peer = await found.welcomed()
        free = await fill_budget(found)
        for _ in range(5):
            await peer.say(peer.call("checkpoint", "a", epoch=1, checkpoint_id="c", state=STATE))
        error = (await peer.answer(5))["error"]
        assert "wait for room" in error["message"]
        found.runtime.system.budget.release(free)
        assert (await peer.answer(4))["error"]["code"] != "overloaded"
        await peer.close()


async def test_a_connection_that_ends_while_its_calls_wait() -> None:
    async with attacked(quick(waiting_seconds=5.0)) as found:
        peer = await found.welcomed()
        free = await fill_budget(found)
        await peer.say(*[peer.call("register", f"i{number}") for number in range(5)], {"t": "goodbye"})
        assert await peer.hear_close() == 1000
        await peer.leave()
        found.runtime.system.budget.release(free)
        await trio.testing.wait_all_tasks_blocked()
        assert (await found.runtime.status("i4")).status is Status.UNKNOWN


async def checkpointed(found: Served) -> tuple[Peer, int]:
    """A peer with a session and a checkpoint that makes large answers, and its epoch."""
    peer = await found.welcomed()
    epoch = (await peer.ask("register", "a"))["body"]["epoch"]
    await peer.ask("checkpoint", "a", epoch=epoch, checkpoint_id="c", state=STATE)
    return peer, epoch


async def test_answers_that_are_not_confirmed() -> None:
    async with attacked(quick(buffer_bytes=100 * KIBIBYTE)) as found:
        peer, _ = await checkpointed(found)
        large = [await peer.ask("get_checkpoint", "a", checkpoint_id="c") for _ in range(4)]
        refusal = (await peer.ask("get_checkpoint", "a", checkpoint_id="c"))["error"]
        assert (refusal["code"], refusal["retryable"]) == ("overloaded", True)
        assert "to confirm" in refusal["message"]
        await peer.say({"t": "received", "seq": large[-1]["seq"]})
        await until(lambda: found.gateway.kept_bytes < KIBIBYTE)
        again = await peer.ask("get_checkpoint", "a", checkpoint_id="c")
        assert again["body"]["checkpoint"]["state"] == STATE
        assert found.gateway.kept_bytes < 50 * KIBIBYTE
        await peer.close()


async def test_a_burst_of_large_answers_does_not_end_the_connection() -> None:
    async with attacked(quick(buffer_bytes=100 * KIBIBYTE)) as found:
        peer, _ = await checkpointed(found)
        await peer.say(*[peer.call("get_checkpoint", "a", checkpoint_id="c") for _ in range(30)])
        answers = [await peer.answer(number) for number in range(3, 33)]
        errors = [answer["error"]["code"] for answer in answers if "error" in answer]
        assert 20 < len(errors) < 30
        assert set(errors) == {"overloaded"}
        await peer.say({"t": "received", "seq": answers[-1]["seq"]})
        assert "error" not in await peer.ask("get_checkpoint", "a", checkpoint_id="c")
        await peer.close()


async def test_pushes_that_are_not_confirmed() -> None:
    async with attacked(quick(buffer_bytes=100 * KIBIBYTE)) as found:
        peer = await found.welcomed()
        await peer.ask("register", "a")
        for number in range(8):
            await found.runtime.send_custom_signal("a", f"k{number}", b"x" * 12 * KIBIBYTE)
        error = await refused(peer, 1013, "overloaded")
        assert error["retryable"] is True
        await suspended(found, "a")
        pending = await found.runtime.list_signals("a")
        assert len(pending.items) == 8


async def test_pushes_to_a_client_that_is_away_are_bounded_too() -> None:
    async with attacked(quick(buffer_bytes=100 * KIBIBYTE, grace_seconds=60)) as found:
        peer = await found.welcomed()
        await peer.ask("register", "a")
        await peer.close()
        await found.settled(sockets=1)
        for number in range(9):
            await found.runtime.send_custom_signal("a", f"k{number}", b"x" * 12 * KIBIBYTE)
        await until(lambda: found.gateway.statistics().connections == 1)
        assert found.gateway.kept_bytes < KIBIBYTE


async def test_the_rate_of_bad_calls() -> None:
    async with attacked(quick(bad_calls=10)) as found:
        peer = await found.welcomed()
        await peer.say(
            *[peer.call("nonsense") for _ in range(4)],
            *[peer.call("status", "") for _ in range(4)],
            *[{**peer.call("status", "a"), "body": []} for _ in range(2)],
        )
        for number in range(1, 11):
            assert (await peer.answer(number))["error"]["code"] == "validation_error"
        await peer.say(peer.call("status", "a"))
        assert (await peer.answer(11))["body"] is not None
        await peer.say(peer.call("checkpoint", "a"))
        error = await refused(peer, 1008)
        assert error["message"] == "call: more than 10 calls in a minute were wrong"


# ---------------------------------------------------------------- the gateway


async def test_the_number_of_sockets() -> None:
    async with attacked(quick(sockets=3)) as found:
        held = [await found.upgraded() for _ in range(2)]
        peer = await found.raw()
        assert await peer.status() == 503
        assert b"too many sockets" in await peer.read_all()
        assert found.gateway.statistics().refused == 1
        await held[0].close()
        await found.settled(sockets=2)
        third = await found.welcomed()
        for one in (held[1], third):
            await one.close()


async def test_the_number_of_connections() -> None:
    async with attacked(quick(connections=2)) as found:
        held = await found.welcomed()
        peer = await found.upgraded()
        await peer.say({"t": "hello", "version": 1})
        error = await refused(peer, 1013, "overloaded")
        assert (error["message"], error["retry_after_ms"]) == ("2 connections are open", 5000)
        await held.say({"t": "goodbye"})
        await held.leave()
        await (await found.welcomed()).close()


async def test_the_number_of_connections_of_a_tenant() -> None:
    async with attacked(quick(connections_per_tenant=1)) as found:
        peer = await found.upgraded()
        await peer.say({"t": "hello", "version": 1})
        error = await refused(peer, 1013, "overloaded")
        assert error["message"] == "1 connections of this tenant are open"
        await (await found.welcomed(tenant="other")).close()
        await until(lambda: found.gateway.per_tenant == {"default": 1})


async def test_what_all_clients_together_have_not_confirmed() -> None:
    async with attacked(quick(total_buffer_bytes=100 * KIBIBYTE)) as found:
        worst, _ = await checkpointed(found)
        other = await found.welcomed()
        for _ in range(4):
            await worst.ask("get_checkpoint", "a", checkpoint_id="c")
        for _ in range(3):
            await other.ask("get_checkpoint", "a", checkpoint_id="c")
        error = await refused(worst, 1013, "overloaded")
        assert "over all clients" in error["message"]
        assert "error" not in await other.ask("status", "a")
        assert found.gateway.kept_bytes < 60 * KIBIBYTE
        await other.close()
