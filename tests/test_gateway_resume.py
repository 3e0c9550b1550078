"""Connections outlive their sockets: lost, resumed, taken over, given up, drained."""

from typing import Any

import pytest
import trio
import trio.testing

from runtara.messages import StartInstance
from runtara.records import Reason, Status
from runtara.wire import Codec, Hello
from tests.gateways import TEXT, Peer, Served, attacked, closing, frame, quick, served, until

LONG = quick(grace_seconds=60)


async def opened(found: Served) -> tuple[Peer, dict[str, Any]]:
    """A peer, and what it needs to come back; it has seen nothing yet."""
    peer = await found.upgraded()
    welcome = await peer.hello()
    return peer, {"connection": welcome["connection"], "secret": welcome["secret"], "seen": 0}


async def back(found: Served, resume: dict[str, Any], seen: int = 0) -> tuple[Peer, dict[str, Any]]:
    """A peer on a new socket, and its welcome."""
    peer = await found.upgraded()
    return peer, await peer.hello(resume={**resume, "seen": seen})


# ---------------------------------------------------------------- coming back


async def test_what_was_not_confirmed_is_said_again_in_order() -> None:
    async with served(LONG) as found:
        peer, resume = await opened(found)
        await peer.ask("register", "a")
        for number in range(5):
            await found.runtime.send_custom_signal("a", f"k{number}")
        assert [(await peer.envelope())["seq"] for _ in range(3)] == [2, 3, 4]
        await peer.close()
        await found.settled()
        await found.runtime.send_custom_signal("a", "k5")
        peer, welcome = await back(found, resume, seen=2)
        assert (welcome["resumed"], welcome["received"]) == (True, 1)
        pushes = [await peer.envelope() for _ in range(5)]
        assert [push["seq"] for push in pushes] == [3, 4, 5, 6, 7]
        assert [push["body"]["signal"]["key"] for push in pushes] == ["k1", "k2", "k3", "k4", "k5"]


async def test_a_call_that_is_sent_again_is_done_once() -> None:
    async with served(LONG) as found:
        peer, resume = await opened(found)
        await peer.ask("register", "a")
        call = peer.call("send_signal", "a", type="custom", key="k")
        await peer.say(call)
        await peer.close()
        await found.settled()
        peer, welcome = await back(found, resume)
        if welcome["received"] == 1:
            await peer.say(call)
        else:
            await peer.say(call, call)
        assert (await peer.answer(2))["body"]["signal_id"]
        await trio.testing.wait_all_tasks_blocked()
        assert len((await found.runtime.list_signals("a")).items) == 1


async def test_answers_of_calls_that_wait_reach_the_next_socket() -> None:
    async with served(LONG) as found:
        peer, resume = await opened(found)
        epoch = (await peer.ask("register", "a"))["body"]["epoch"]
        await peer.say(peer.call("wait_signal", "a", epoch=epoch, key="k", checkpoint_id="c"))
        await trio.testing.wait_all_tasks_blocked(0.01)
        await peer.close()
        await found.settled()
        await found.runtime.send_custom_signal("a", "k", b"x")
        peer, _ = await back(found, resume)
        assert (await peer.answer(2))["body"]["outcome"] == "received"


@pytest.mark.parametrize("end", ["reset", "close", "bad frame", "close frame", "close frame, 1002"])
async def test_however_a_socket_is_lost_its_connection_waits(end: str) -> None:
    async with served(LONG) as found:
        peer, resume = await opened(found)
        await peer.ask("register", "a")
        match end:
            case "reset":
                await peer.reset()
            case "close":
                await peer.close()
            case "bad frame":
                await peer.send(frame(TEXT, masked=False))
                await peer.read_all()
            case _:
                await peer.send(closing(1002 if "1002" in end else 1001))
                await peer.read_all()
        await found.settled()
        peer, welcome = await back(found, resume)
        assert welcome["resumed"] is (end != "bad frame")
        assert found.gateway.statistics().connections == 1


async def test_a_seen_that_cannot_be_ends_the_connection() -> None:
    for seen in (-1, 2, 10**6):
        async with served(LONG) as found:
            peer, resume = await opened(found)
            await peer.ask("register", "a")
            other, welcome = await back(found, resume, seen=seen)
            assert welcome["resumed"] is False
            assert welcome["connection"] != resume["connection"]
            assert await peer.hear_close() == 1008
            assert (await other.ask("status", "a"))["body"] is not None
            assert found.gateway.statistics().connections == 1


async def test_a_connection_that_said_goodbye_is_not_there_any_more() -> None:
    async with served(LONG) as found:
        peer, resume = await opened(found)
        await peer.ask("register", "a")
        await peer.say({"t": "goodbye"})
        await peer.leave()
        await until(lambda: found.gateway.statistics().connections == 0)
        view = await suspended(found, "a")
        assert (view.record.reason, view.record.attempt) == (Reason.DISCONNECTED, 1)
        _, welcome = await back(found, resume)
        assert welcome["resumed"] is False


async def suspended(found: Served, instance_id: str) -> Any:
    for _ in range(200):
        view = await found.runtime.status(instance_id)
        if view.status is Status.SUSPENDED:
            return view
        await trio.sleep(0.005)
    raise AssertionError("it runs on")


# ---------------------------------------------------------------- two sockets


async def test_a_socket_that_resumes_takes_the_connection_from_the_one_that_had_it() -> None:
    async with served(LONG) as found:
        old, resume = await opened(found)
        epoch = (await old.ask("register", "a"))["body"]["epoch"]
        new, welcome = await back(found, resume, seen=1)
        assert welcome["resumed"] is True
        assert await old.hear_close() == 4409
        await old.leave()
        new.calls = 1
        assert "error" not in await new.ask("checkpoint", "a", epoch=epoch, checkpoint_id="c")
        assert found.gateway.statistics().sockets == 1


@pytest.mark.parametrize("late", [b"x", b'{"t":"goodbye"}', b'{"t":"received","seq":99}'])
async def test_what_an_overtaken_socket_says_does_not_count(late: bytes) -> None:
    async with served(LONG) as found:
        old, resume = await opened(found)
        epoch = (await old.ask("register", "a"))["body"]["epoch"]
        new = await found.upgraded()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(old.send, frame(TEXT, late) * 3)
            await new.say({"t": "hello", "version": 1, "resume": {**resume, "seen": 1}})
            welcome = await new.envelope()
        if welcome["resumed"]:  # else what was late came in time
            new.calls = 1
            assert "error" not in await new.ask("checkpoint", "a", epoch=epoch, checkpoint_id="c")
        await old.read_all()
        await found.settled(sockets=1)


async def test_an_overtaken_socket_that_was_about_to_write_takes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(LONG) as found:
        peer, resume = await opened(found)
        await peer.ask("register", "a")
        [connection] = found.gateway.connections.values()
        greet = found.gateway.greet

        def greet_in_a_rush(hello: Hello, codec: Codec) -> Any:
            connection.push("signal", "a", 1, {"now": True})  # wakes the old socket, which has not run when
            return greet(hello, codec)  # the new one takes over

        monkeypatch.setattr(found.gateway, "greet", greet_in_a_rush)
        for seen in range(1, 15):  # who runs first is a matter of chance
            old = peer
            peer, welcome = await back(found, resume, seen)
            assert welcome["resumed"] is True
            assert (await peer.envelope())["body"] == {"now": True}
            assert await old.hear_close() == 4409
            await old.leave()


async def test_sockets_that_overtake_one_another_lose_and_double_nothing() -> None:
    async with served(LONG) as found:
        peer, resume = await opened(found)
        await peer.ask("register", "a")
        sent, seen, keys = 0, 1, []
        for _ in range(60):
            for _ in range(3):
                await found.runtime.send_custom_signal("a", f"k{sent}")
                sent += 1
            peer, welcome = await back(found, resume, seen)
            assert welcome["resumed"] is True
            push = await peer.envelope()
            assert push["seq"] == seen + 1
            seen += 1
            keys.append(push["body"]["signal"]["key"])
        while seen <= sent:
            keys.append((await peer.envelope())["body"]["signal"]["key"])
            seen += 1
        assert keys == [f"k{number}" for number in range(sent)]
        for other in found.peers:
            if other is not peer:
                await other.close()
        await found.settled(sockets=1)
        statistics = found.gateway.statistics()
        assert (statistics.connections, statistics.sessions, len(found.gateway.lost)) == (1, 1, 0)


async def test_an_instance_that_registers_elsewhere_is_lost_to_the_first_connection() -> None:
    async with attacked() as found:
        old, new = await found.welcomed(), await found.welcomed()
        epochs = [(await peer.ask("register", "a"))["body"]["epoch"] for peer in (old, new)]
        push = await old.envelope()
        assert (push["kind"], push["epoch"], push["body"]["epoch"]) == ("superseded", *epochs)
        late = await old.ask("checkpoint", "a", epoch=epochs[0], checkpoint_id="c")
        assert late["error"]["code"] == "stale_epoch"
        await old.say({"t": "goodbye"})
        await old.leave()
        assert "error" not in await new.ask("checkpoint", "a", epoch=epochs[1], checkpoint_id="c")
        assert (await found.runtime.status("a")).status is Status.RUNNING
        await new.close()


# ---------------------------------------------------------------- the grace period


async def test_a_connection_that_came_back_is_not_ended_by_an_older_grace_period() -> None:
    async with served(quick(grace_seconds=0.3)) as found:
        peer, resume = await opened(found)
        epoch = (await peer.ask("register", "a"))["body"]["epoch"]
        await peer.close()
        await found.settled()
        await trio.sleep(0.2)
        peer, _ = await back(found, resume)
        await trio.sleep(0.3)
        peer.calls = 1
        assert "error" not in await peer.ask("checkpoint", "a", epoch=epoch, checkpoint_id="c")


async def test_a_client_that_flaps_leaves_no_tasks_behind() -> None:
    async with served(LONG) as found:
        peer, resume = await opened(found)
        await peer.ask("register", "a")
        nursery = found.gateway.nursery
        assert nursery is not None
        for _ in range(50):
            peer, welcome = await back(found, resume)
            assert welcome["resumed"] is True
            await peer.close()
        await found.settled()
        await until(
            lambda: len(nursery.child_tasks) == 3
        )  # to accept, and to look at the lost and the tokens
        assert len(found.gateway.lost) == 1


async def test_connections_without_sockets_are_counted_until_their_grace_period_ends() -> None:
    async with served(quick(grace_seconds=0.2, connections=5)) as found:
        for _ in range(5):
            await (await found.welcomed()).close()
        await found.settled()
        assert found.gateway.statistics().connections == 5
        peer = await found.upgraded()
        assert (await peer.hello())["t"] == "refused"
        await until(lambda: found.gateway.statistics().connections == 0)
        assert found.gateway.per_tenant == {}
        assert found.gateway.lost == {}
        await found.welcomed()


async def test_a_session_that_begins_when_its_connection_is_over_does_not_stay() -> None:
    async with served(LONG) as found:
        peer = await found.welcomed()
        await peer.say(*[peer.call("register", f"i{number}") for number in range(20)], {"t": "goodbye"})
        assert await peer.hear_close() == 1000
        await peer.leave()
        for number in range(20):
            assert (await suspended(found, f"i{number}")).connected is False
        assert found.gateway.statistics().sessions == 0


async def test_a_connection_that_is_over_keeps_nothing_for_calls_that_wait_for_long() -> None:
    async with served(LONG) as found:
        peer = await found.welcomed()
        await peer.ask("register", "a")
        await peer.say(peer.call("wait_signal", "a", epoch=1, key="k", checkpoint_id="c"))
        [connection] = found.gateway.connections.values()
        await peer.say({"t": "goodbye"})
        await peer.leave()
        assert (len(connection.conversation.kept), connection.conversation.kept_bytes) == (0, 0)
        assert found.gateway.kept_bytes == 0


async def test_a_session_whose_beginning_was_too_much_for_its_connection_does_not_stay() -> None:
    async with served(quick(buffer_bytes=50_000)) as found:
        start = StartInstance(workflow="w", input=b"x" * 60_000)
        await found.runtime.system.request(("default", "a"), start)
        peer = await found.welcomed()
        await peer.ask("status", "b")
        await peer.say(peer.call("register", "a"))
        assert await peer.hear_close() == 1013
        await peer.leave()
        await until(lambda: found.runtime.system.directory.sessions() == [])
        view = await found.runtime.status("a")
        assert (view.connected, view.record.attempt) == (False, 2)


# ---------------------------------------------------------------- the end of the gateway


async def test_a_drain_says_everything_before_it_closes() -> None:
    async with served(LONG) as found:
        peer, _ = await opened(found)
        away, _ = await opened(found)
        await peer.ask("register", "a")
        await away.ask("register", "b")
        await away.close()
        silent, half = await found.upgraded(), await found.raw()
        await found.settled(sockets=3)
        found.gateway.begin_drain()
        assert (await peer.envelope())["kind"] == "drain"
        for number in range(100):
            await found.runtime.send_custom_signal("a", f"k{number}")
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(found.gateway.finish_drain)
            pushes = [await peer.envelope() for _ in range(100)]
            assert [push["body"]["signal"]["key"] for push in pushes] == [f"k{n}" for n in range(100)]
            refused = await peer.envelope()
            assert (refused["t"], refused["error"]["code"]) == ("refused", "draining")
            assert await peer.hear_close() == 1001
            await peer.leave()
            assert await silent.hear_close() == 1001
            assert await half.read_all() == b""
        assert trio.current_time() - began < 0.5
        statistics = found.gateway.statistics()
        assert (statistics.sockets, statistics.connections, statistics.dropped) == (0, 0, 0)
        for instance in ("a", "b"):
            assert (await suspended(found, instance)).record.attempt == 1


async def test_what_was_said_in_the_last_moment_of_a_drain_is_sent() -> None:
    async with served(LONG) as found:
        peer = await found.welcomed()
        [connection] = found.gateway.connections.values()
        heard: list[Any] = []

        async def listen() -> None:
            while (envelope := await peer.envelope()) is not None:
                heard.append(envelope)
            await peer.leave()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(listen)
            for number in range(100):
                connection.push("signal", "a", 1, {"number": number})
            await found.gateway.finish_drain()
        assert [envelope["body"]["number"] for envelope in heard[:100]] == list(range(100))
        assert [envelope["t"] for envelope in heard[100:]] == ["refused"]


async def test_a_drain_does_not_wait_for_peers_that_do_not_read() -> None:
    async with served(quick(close_seconds=0.1, grace_seconds=60)) as found:
        peer = await found.welcomed()
        epoch = (await peer.ask("register", "i"))["body"]["epoch"]
        await peer.ask("checkpoint", "i", epoch=epoch, checkpoint_id="c", state="A" * 2**20)
        await peer.say(*[peer.call("get_checkpoint", "i", checkpoint_id="c") for _ in range(20)])
        await trio.testing.wait_all_tasks_blocked(0.01)
        began = trio.current_time()
        found.gateway.begin_drain()
        await found.gateway.finish_drain()
        await found.settled()
        assert trio.current_time() - began < 0.6


async def test_while_it_drains_nobody_new_is_let_in() -> None:
    async with served(LONG) as found:
        half, silent = await found.raw(), await found.upgraded()
        await until(lambda: found.gateway.statistics().sockets == 2)
        found.gateway.begin_drain()
        await half.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert await half.status() == 426
        answer = await silent.hello()
        assert (answer["t"], answer["error"]["code"]) == ("refused", "draining")
        assert await silent.hear_close() == 1013


async def test_a_gateway_that_is_cancelled_tells_its_peers_and_leaves_its_sessions_in_order() -> None:
    async with served(LONG) as found:
        peer, _ = await opened(found)
        away, _ = await opened(found)
        await peer.ask("register", "a")
        await away.ask("register", "b")
        await away.close()
        await found.settled(sockets=1)
        assert found.gateway.nursery is not None
        found.gateway.nursery.cancel_scope.cancel()
        assert await peer.hear_close() == 1001
        await peer.leave()
        await until(lambda: found.gateway.statistics().connections == 0)
        for instance in ("a", "b"):
            assert (await suspended(found, instance)).record.attempt == 1
