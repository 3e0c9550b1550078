"""Clients over real sockets: what a lost socket, a lost server and a slow peer cost. Nothing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

import runtara
from runtara import Reason, Runtime, SignalType, Status, WaitOutcome
from runtara.instance import Inbox
from runtara.messages import Register
from runtara.server import Server
from runtara.transport.client import ClientLimits
from runtara.transport.limits import GatewayLimits
from tests.served import QUICK, Proxy, client, limits, proxy, server, until


@asynccontextmanager
async def cuttable(**options: object) -> AsyncIterator[tuple[Server, Proxy, Runtime]]:
    """A server, and a client whose connection can be cut."""
    async with (
        server(**options) as found,  # type: ignore[arg-type]
        proxy(found.ports[0]) as between,
        runtara.connect(between.address, limits=QUICK) as runtime,
    ):
        yield found, between, runtime


async def suspended(found: Server) -> None:
    """Wait until the server has suspended the instance."""
    with trio.fail_after(5):
        while (await found.runtime.status("a")).status is not Status.SUSPENDED:  # noqa: ASYNC110
            await trio.sleep(0.01)


# ---------------------------------------------------------------- the plain way


@pytest.mark.parametrize("protocol", ["runtara.v1.msgpack", "runtara.v1.json"])
async def test_a_session_over_a_socket_does_all_that_an_embedded_one_does(protocol: str) -> None:
    async with server() as found, client(found, protocol=protocol) as rt:
        async with rt.register("a", workflow="w") as inst:
            assert inst.registered.created
            first = await inst.checkpoint("one", b"\x00\xff" * 100)
            assert (first.found, first.state) == (False, b"\x00\xff" * 100)
            assert (await inst.checkpoint("one", b"other")).state == b"\x00\xff" * 100
            await rt.send_custom_signal("a", "go", b"now")
            reply = await inst.wait_signal("go", checkpoint_id="went")
            assert (reply.outcome, reply.payload) == (WaitOutcome.RECEIVED, b"now")
            assert (await inst.sleep(0.01)).outcome is WaitOutcome.ELAPSED
            assert (await inst.complete(b"done")).applied
        assert await rt.result("a") == b"done"


async def test_a_signal_is_pushed_at_once() -> None:
    async with server() as found, client(found) as rt, rt.register("a") as inst:
        with trio.fail_after(2):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(rt.send_signal, "a", "cancel")
                async for signal in inst.signals():
                    assert signal.type is SignalType.CANCEL
                    await inst.ack(signal)
        assert (await rt.status("a")).status is Status.CANCELLED


async def test_errors_are_the_same_exceptions_with_the_same_fields() -> None:
    async with server() as found, client(found) as rt, rt.register("a") as inst:
        with pytest.raises(runtara.ValidationError) as bad:
            await inst.checkpoint("", b"x")
        assert bad.value.field == "checkpoint_id"
        with pytest.raises(runtara.InstanceNotFound):
            await rt.send_signal("nobody", "cancel")
        with pytest.raises(runtara.PayloadTooLarge) as large:
            await inst.checkpoint("large", bytes(5 * 1024 * 1024))
        assert large.value.details["limit"] == 4 * 1024 * 1024
        assert (await inst.checkpoint("next", b"x")).found is False


@pytest.mark.parametrize("protocol", ["runtara.v1.msgpack", "runtara.v1.json"])
async def test_a_call_that_no_frame_can_hold_is_refused_and_costs_nothing(protocol: str) -> None:
    async with server() as found, client(found, protocol=protocol) as rt, rt.register("a") as inst:
        for mebibytes in (7, 9, 20):
            with pytest.raises(runtara.PayloadTooLarge):
                await inst.checkpoint("large", bytes(mebibytes * 1024 * 1024))
        assert (await inst.checkpoint("next", b"x")).found is False
        assert found.gateway.statistics().dropped == 0


async def test_a_cancelled_call_leaves_the_connection_usable() -> None:
    async with server() as found, client(found) as rt, rt.register("a") as inst:
        for _ in range(3):
            with trio.move_on_after(0.02):
                await inst.wait_signal("never", checkpoint_id="w")
        assert (await inst.checkpoint("one", b"x")).found is False
        await rt.send_custom_signal("a", "never", b"after all")
        assert (await inst.wait_signal("never", checkpoint_id="w")).payload == b"after all"


async def test_leaving_a_session_suspends_it_at_once() -> None:
    async with server() as found, client(found) as rt:
        async with rt.register("a"):
            pass
        view = await rt.status("a")
        assert (view.status, view.reason) == (Status.SUSPENDED, Reason.DISCONNECTED)
        assert found.gateway.statistics().sessions == 0


async def test_a_client_that_leaves_says_goodbye() -> None:
    async with server() as found:
        async with client(found) as rt:
            await rt.link.request("a", Register(), Inbox())
        await until(lambda: found.gateway.statistics().connections == 0)
        await suspended(found)
        assert (await found.runtime.status("a")).record.attempt == 1


async def test_watching_shows_every_change() -> None:
    async with server() as found, client(found) as rt, rt.register("a") as inst:
        async with rt.watch("a") as changes:
            await inst.checkpoint("one", b"x")
            await inst.complete()
            seen = [change async for change in changes]
        assert seen[0].kinds == ("snapshot",)
        assert [change.revision for change in seen] == sorted({change.revision for change in seen})
        assert seen[-1].status is Status.COMPLETED


async def test_watching_an_unknown_instance_is_refused_and_watches_nothing() -> None:
    async with server() as found, client(found) as rt:
        with pytest.raises(runtara.InstanceNotFound):
            async with rt.watch("nobody"):
                raise AssertionError("not reached")
        await rt.status("other")
        assert all(not c.watches for c in found.gateway.connections.values())


# ---------------------------------------------------------------- a lost socket


async def test_a_lost_socket_is_not_noticed_by_the_session() -> None:
    async with cuttable() as (found, between, rt), rt.register("a") as inst:
        epoch = inst.epoch
        for at in range(10):
            await inst.checkpoint(f"c{at}", b"x")
            await between.cut()
        await inst.checkpoint("last", b"x")
        view = await rt.status("a")
        assert (view.status, view.epoch, view.record.attempt) == (Status.RUNNING, epoch, 1)
        assert between.accepted >= 5
        assert found.gateway.statistics().connections == 1


async def test_each_call_takes_effect_once_however_often_the_socket_is_lost() -> None:
    async with cuttable() as (found, between, rt), rt.register("a") as inst:

        async def cutting() -> None:
            while True:
                await trio.sleep(0.007)
                await between.cut()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(cutting)
            with trio.fail_after(20):
                async with trio.open_nursery() as lanes:
                    for lane in range(5):
                        lanes.start_soon(emit_many, inst, lane)
            nursery.cancel_scope.cancel()
        events = await found.runtime.list_events("a", subtype="tick", limit=1000)
        assert sorted(event.payload or b"" for event in events.items) == sorted(
            b"%d.%d" % (lane, at) for lane in range(5) for at in range(20)
        )


async def emit_many(inst: runtara.Instance, lane: int) -> None:
    for at in range(20):
        await inst.emit("tick", b"%d.%d" % (lane, at))


async def test_a_signal_that_comes_while_the_socket_is_lost_is_shown_after_it() -> None:
    async with cuttable() as (found, between, rt), rt.register("a") as inst:
        between.refusing = True
        await between.cut()
        await found.runtime.send_signal("a", "pause")
        await found.runtime.send_custom_signal("a", "k", b"1")
        between.refusing = False
        shown = []
        with trio.fail_after(5):
            async for signal in inst.signals():
                shown.append(signal.type)
                await inst.ack(signal)
                if len(shown) == 2:
                    break
        assert shown == [SignalType.PAUSE, SignalType.CUSTOM]


async def test_a_sleep_and_a_wait_outlast_a_lost_socket() -> None:
    async with cuttable() as (found, between, rt), rt.register("a") as inst:
        ended: dict[str, runtara.WaitReply] = {}

        async def sleeping() -> None:
            ended["sleep"] = await inst.sleep(0.3, checkpoint_id="nap")

        async def waiting() -> None:
            ended["wait"] = await inst.wait_signal("go", checkpoint_id="went")

        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sleeping)
                nursery.start_soon(waiting)
                await trio.sleep(0.05)
                await between.cut()
                await found.runtime.send_custom_signal("a", "go", b"now")
        assert ended["sleep"].outcome is WaitOutcome.ELAPSED
        assert ended["wait"].payload == b"now"


async def test_an_idle_client_comes_back_by_itself() -> None:
    async with cuttable() as (found, between, rt), rt.register("a"):
        await between.cut()
        await until(lambda: between.accepted == 2)
        await until(lambda: found.gateway.statistics().sockets == 1)
        assert (await found.runtime.status("a")).status is Status.RUNNING


async def test_after_the_grace_period_the_session_is_over_and_told_so() -> None:
    async with cuttable(limits=limits(grace_seconds=0.1)) as (found, between, rt):
        with pytest.raises(runtara.RuntaraError) as over:
            async with rt.register("a") as inst:
                between.refusing = True
                await between.cut()
                await suspended(found)
                view = await found.runtime.status("a")
                assert (view.reason, view.record.attempt) == (Reason.DISCONNECTED, 2)
                between.refusing = False
                await inst.checkpoint("late", b"x")
        assert over.value.code in ("invalid_instance_state", "stale_epoch")
        async with rt.register("a") as again:
            assert again.epoch > inst.epoch


async def test_a_half_open_connection_is_found_by_both_sides() -> None:
    impatient = GatewayLimits(ping_seconds=0.1, pong_seconds=0.1, handshake_seconds=0.2)
    quick = ClientLimits(
        first_pause=0.01, longest_pause=0.05, ping_seconds=0.1, pong_seconds=0.1, connect_seconds=0.3
    )
    async with (
        server(limits=impatient) as found,
        proxy(found.ports[0]) as between,
        runtara.connect(between.address, limits=quick) as rt,
        rt.register("a") as inst,
    ):
        between.silent = True
        await until(lambda: between.accepted >= 2)
        [connection] = found.gateway.connections.values()
        await until(lambda: not connection.conversation.is_open)
        between.silent = False
        await between.cut()
        with trio.fail_after(5):
            await inst.checkpoint("one", b"x")


async def test_another_connection_takes_an_instance_over() -> None:
    async with (
        server() as found,
        client(found) as one,
        client(found) as two,
        one.register("a") as old,
        two.register("a") as new,
    ):
        assert new.epoch > old.epoch
        with pytest.raises(runtara.StaleEpoch):
            await old.checkpoint("late", b"x")
        with pytest.raises(runtara.StaleEpoch):
            async for _ in old.signals():
                pass
        await new.checkpoint("mine", b"x")


# ---------------------------------------------------------------- a lost server


async def test_a_server_that_is_started_again_finds_its_sessions(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    async with trio.open_nursery() as nursery:
        async with server(url) as first:
            port = first.ports[0]
            between = await start_proxy(nursery, port)
            runtime = await open_client(nursery, between.address)
            session = runtime.register("a")
            inst = await session.__aenter__()
            await inst.checkpoint("one", b"x")
            await crash(first)
        async with server(url) as second:
            between.port = second.ports[0]
            with trio.fail_after(5):
                reply = await inst.checkpoint("two", b"x")
            assert reply.found is False
            view = await second.runtime.status("a")
            assert (view.status, view.epoch, view.record.attempt) == (Status.RUNNING, inst.epoch, 1)
            await session.__aexit__(None, None, None)
        nursery.cancel_scope.cancel()


async def test_servers_that_are_lost_again_and_again_lose_no_call(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    names = [f"i{at}" for at in range(5)]
    async with trio.open_nursery() as nursery:
        saved: dict[str, int] = {}
        ready = trio.Event()
        stop = trio.Event()

        async def work(runtime: Runtime, name: str) -> None:
            async with runtime.register(name) as inst:
                saved[name] = 0
                if len(saved) == len(names):
                    ready.set()
                while not stop.is_set():
                    await inst.checkpoint(f"c{saved[name]}", b"x")
                    saved[name] += 1
                    await trio.sleep(0.005)
                assert (await inst.complete()).applied

        async def cutting(between: Proxy) -> None:
            while not stop.is_set():
                await trio.sleep(0.02)
                await between.cut()

        async with server(url) as first:
            between = await start_proxy(nursery, first.ports[0])
            runtime = await open_client(nursery, between.address)
            for name in names:
                nursery.start_soon(work, runtime, name)
            await ready.wait()
            await crash(first)
        nursery.start_soon(cutting, between)
        for life in range(3):
            async with server(url) as again:
                between.port = again.ports[0]
                before = dict(saved)
                with trio.fail_after(20):
                    while any(saved[name] < before[name] + 3 for name in names):  # noqa: ASYNC110
                        await trio.sleep(0.01)
                if life < 2:
                    await crash(again)
                    continue
                stop.set()
                with trio.fail_after(20):
                    for name in names:
                        await again.runtime.result(name)
                for name in names:
                    count = await again.runtime.count_records(name, runtara.CheckpointRecord)
                    assert count == saved[name]
                    assert (await again.runtime.status(name)).record.attempt == 1
        nursery.cancel_scope.cancel()


async def start_proxy(nursery: trio.Nursery, port: int) -> Proxy:
    found = Proxy(port)
    await nursery.start(found.run)
    return found


async def open_client(nursery: trio.Nursery, address: str) -> Runtime:
    """A client that lives as long as the nursery."""
    opened: list[Runtime] = []

    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        async with runtara.connect(address, limits=QUICK) as runtime:
            opened.append(runtime)
            task_status.started()
            await trio.sleep_forever()

    await nursery.start(run)
    return opened[0]


async def crash(found: Server) -> None:
    """The server goes without a word: no drain, no farewell, no session told."""
    found.gateway.draining = True
    for connection in found.gateway.connections.values():
        connection.sessions.clear()
        connection.over = True
    found.runtime.system.stop()
    await found.runtime.system.stopped.wait()


# ---------------------------------------------------------------- drain


async def test_a_drain_tells_the_sessions_and_suspends_the_rest(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    async with trio.open_nursery() as nursery:
        async with server(url) as found:
            rt = await open_client(nursery, found.address)
            await nursery.start(hold, rt, "obedient", True)
            await nursery.start(hold, rt, "deaf", False)
        nursery.cancel_scope.cancel()
    async with runtara.open_runtime(url) as again:
        for name in ("obedient", "deaf"):
            view = await again.status(name)
            assert (view.status, view.reason) == (Status.SUSPENDED, Reason.SHUTDOWN_REQUESTED), name
            assert view.record.attempt == 1


async def hold(rt: Runtime, name: str, obey: bool, *, task_status: trio.TaskStatus[None]) -> None:
    """A session that obeys its signals, or does not hear them."""
    async with rt.register(name) as inst:
        task_status.started()
        if not obey:
            await trio.sleep_forever()
        async for signal in inst.signals():
            await inst.ack(signal)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "url",
    ["http://a", "ws://", "ws://a:x", "ws://user:secret@a", "ws://a?token=secret", "ws://a:99999", ""],
)
async def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(runtara.ValidationError) as bad:
        async with runtara.connect(url or " "):
            raise AssertionError("not reached")
    assert bad.value.field == "url"
    assert "secret" not in str(bad.value)


async def test_an_unknown_protocol_is_refused() -> None:
    with pytest.raises(runtara.ValidationError, match="protocol"):
        async with runtara.connect("ws://127.0.0.1:1", protocol="runtara.v9.xml"):
            raise AssertionError("not reached")


async def test_a_client_waits_for_a_server_that_is_not_there_yet() -> None:
    with trio.move_on_after(0.2) as scope:
        async with runtara.connect("ws://127.0.0.1:1", limits=QUICK):
            raise AssertionError("not reached")
    assert scope.cancelled_caught


async def test_what_the_body_raises_leaves_it_as_it_is() -> None:
    async with server() as found:
        with pytest.raises(KeyError):
            async with client(found):
                raise KeyError("mine")


async def test_a_client_has_no_actors() -> None:
    async with server() as found, client(found) as rt:
        with pytest.raises(runtara.ValidationError, match="connection"):
            rt.for_tenant("other")
