"""Signals end to end: never lost, consumed once, in order; and how a cancel races an ending."""

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio

import runtara
from runtara import AlreadyFinished, Reason, SignalType, Status, WaitOutcome
from runtara.randomness import SeededRandomness
from tests.runtimes import STORES, cancelled_at, runtime, url_on


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_on(request.param, tmp_path)


async def test_a_signal_sent_before_anyone_waits_is_never_lost(autojump_clock: object) -> None:
    """Register, send at once, wait after 0 to 5 ms; 500 times."""
    jitter = SeededRandomness(1)
    async with runtime() as rt:
        for number in range(500):
            name = f"i{number}"
            async with rt.register(name) as inst, trio.open_nursery() as nursery:
                nursery.start_soon(rt.send_custom_signal, name, "go", b"%d" % number)
                await trio.sleep(jitter.fraction() * 0.005)
                reply = await inst.wait_signal("go", checkpoint_id="w", timeout=60)
                assert (reply.outcome, reply.payload) == (WaitOutcome.RECEIVED, b"%d" % number)
        assert rt.statistics().wake.woken == 0


async def test_parallel_signals_of_one_key_are_consumed_once_in_the_order_of_acceptance(url: str) -> None:
    accepted: list[tuple[int, bytes]] = []
    consumed: list[bytes | None] = []
    async with runtime(url) as rt, rt.register("a") as inst, trio.open_nursery() as nursery:

        async def send(number: int) -> None:
            payload = b"%d" % number
            reply = await rt.send_custom_signal("a", "item", payload)
            accepted.append((reply.signal_id, payload))

        for number in range(20):
            nursery.start_soon(send, number)
        for number in range(20):
            reply = await inst.wait_signal("item", checkpoint_id=f"w{number}")
            consumed.append(reply.payload)
            assert (await inst.get_checkpoint(f"w{number}")).state == reply.payload
        assert (await rt.status("a")).unconsumed_signals == 0
    assert consumed == [payload for _, payload in sorted(accepted)]
    assert set(consumed) == {b"%d" % number for number in range(20)}
    assert len(consumed) == 20


async def test_a_full_queue_refuses_the_sender_and_keeps_what_it_has(url: str) -> None:
    async with runtime(url, pending_signals=3) as rt, rt.register("a") as inst:
        for number in range(3):
            await rt.send_custom_signal("a", "k", b"%d" % number)
        with pytest.raises(runtara.SignalQueueFull):
            await rt.send_custom_signal("a", "k", b"3")
        assert (await rt.send_signal("a", "cancel")).applied is False
        assert [s.payload for s in (await rt.list_signals("a")).items] == [None, b"2", b"1", b"0"]
        for signal in [s async for s in take(inst, 2)]:
            await inst.ack(signal)
        assert (await rt.send_custom_signal("a", "k", b"3")).applied is False
        assert (await rt.status("a")).unconsumed_signals == 3


async def test_a_signal_is_pushed_within_the_same_virtual_instant(autojump_clock: object) -> None:
    """The iterator, a parked wait and a parked sleep all hear of it before time moves."""
    async with runtime() as rt, rt.register("a") as inst, trio.open_nursery() as nursery:
        heard: list[tuple[str, float]] = []

        async def iterate() -> None:
            async for _ in inst.signals():
                heard.append(("iterator", trio.current_time()))

        async def sleep() -> None:
            reply = await inst.sleep(10**6, checkpoint_id="nap")
            assert reply.interrupted
            heard.append(("sleep", trio.current_time()))

        async def wait() -> None:
            reply = await inst.wait_signal("k", checkpoint_id="w")
            assert reply.received
            heard.append(("wait", trio.current_time()))

        for task in (iterate, sleep, wait):
            nursery.start_soon(task)
        await trio.sleep(100)
        start = trio.current_time()
        await rt.send_custom_signal("a", "k", b"1")
        await rt.send_signal("a", "pause")
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(heard) == [("iterator", start), ("sleep", start), ("wait", start)]
        nursery.cancel_scope.cancel()


async def test_two_iterators_see_every_signal_once_each_until_the_end(url: str) -> None:
    seen: list[list[bytes | None]] = [[], []]
    async with runtime(url) as rt, rt.register("a") as inst, trio.open_nursery() as nursery:

        async def iterate(into: list[bytes | None]) -> None:
            async for signal in inst.signals():
                into.append(signal.payload)

        nursery.start_soon(iterate, seen[0])
        for number in range(5):
            await rt.send_custom_signal("a", "k", b"%d" % number)
        nursery.start_soon(iterate, seen[1])
        await inst.complete()
    assert seen == [[b"0", b"1", b"2", b"3", b"4"]] * 2


async def test_an_unacknowledged_signal_comes_again_with_the_next_session(url: str) -> None:
    async with runtime(url) as rt:
        await rt.send_custom_signal("a", "k", b"0", store_if_unknown=True)
        async with rt.register("a") as inst:
            first = await anext(inst.signals())
            ignored = await inst.ack(first, acknowledged=False)
            assert ignored.applied is False
            assert [s.signal_id async for s in take(inst, 1)] == [first.signal_id]
        async with rt.register("a") as again:
            assert [s.payload for s in again.registered.signals] == [b"0"]
            assert (await again.ack(await anext(again.signals()))).applied is True
        async with rt.register("a") as last:
            assert last.registered.signals == ()


async def take(inst: runtara.Instance, count: int):  # type: ignore[no-untyped-def]
    async for signal in inst.signals():
        yield signal
        count -= 1
        if not count:
            return


async def test_an_acknowledgement_counts_once(url: str) -> None:
    async with runtime(url) as rt, rt.register("a") as inst:
        sent = await rt.send_custom_signal("a", "k", b"0")
        signal = await anext(inst.signals())
        assert signal.signal_id == sent.signal_id
        assert (await inst.ack(signal)).applied is True
        assert (await inst.ack(signal.signal_id)).applied is False
        with pytest.raises(runtara.SignalNotPending):
            await inst.ack(10**6)
        for type in ("cancel", SignalType.PAUSE):
            with pytest.raises(runtara.SignalNotPending):
                await inst.ack(type)
        with pytest.raises(runtara.ValidationError, match="custom signals are acknowledged by their id"):
            await inst.ack("custom")
        assert (await rt.status("a")).unconsumed_signals == 0


async def test_20_parallel_acknowledgements_of_one_cancel_have_one_winner(url: str) -> None:
    applied: list[bool] = []
    async with runtime(url) as rt, rt.register("a") as inst:
        await rt.send_signal("a", "cancel", b"why")
        signal = await anext(inst.signals())
        async with trio.open_nursery() as nursery:

            async def acknowledge(by_type: bool) -> None:
                try:
                    applied.append((await inst.ack("cancel" if by_type else signal)).applied)
                except runtara.SignalNotPending:
                    applied.append(False)

            for number in range(20):
                nursery.start_soon(acknowledge, number % 2 == 0)
        view = await rt.status("a")
        assert (view.status, view.error) == (Status.CANCELLED, "why")
    assert sorted(applied) == [False] * 19 + [True]


async def test_a_pause_interrupts_a_sleep_and_a_resume_goes_on_with_its_deadline(
    autojump_clock: object,
) -> None:
    async with runtime() as rt, rt.register("a") as inst, trio.open_nursery() as nursery:
        start = trio.current_time()
        nursery.start_soon(paused_after, rt, 100)
        nap = await inst.sleep(1000, checkpoint_id="nap", state=b"s")
        assert trio.current_time() - start == pytest.approx(100)
        assert nap.interrupted
        assert nap.signal is not None
        acknowledged = await inst.ack(nap.signal)
        assert (acknowledged.status, acknowledged.reason) == (Status.SUSPENDED, Reason.PAUSED)
        with pytest.raises(runtara.InvalidInstanceState):
            await inst.sleep(1000, checkpoint_id="nap")
        await trio.sleep(200)
        resumed = await rt.send_signal("a", "resume")
        assert (resumed.applied, resumed.status) == (True, Status.RUNNING)
        signal = await anext(inst.signals())
        assert signal.type is SignalType.RESUME
        await inst.ack(signal)
        again = await inst.sleep(1000, checkpoint_id="nap")
        assert again.outcome is WaitOutcome.ELAPSED
        assert trio.current_time() - start == pytest.approx(1000)


async def paused_after(rt: runtara.Runtime, seconds: float) -> None:
    await trio.sleep(seconds)
    assert (await rt.send_signal("a", "pause")).applied is False


async def test_a_paused_instance_stays_paused_when_time_or_a_signal_comes(autojump_clock: object) -> None:
    async with runtime() as rt:
        async with rt.register("a") as inst:
            with trio.move_on_after(1):
                await inst.sleep(100, checkpoint_id="nap")
        assert (await rt.status("a")).reason is Reason.DISCONNECTED
        await rt.send_signal("a", "pause")
        await rt.send_custom_signal("a", "k")
        await trio.sleep(1000)
        view = await rt.status("a")
        assert (view.status, view.reason) == (Status.SUSPENDED, Reason.PAUSED)
        async with rt.register("a") as again:
            assert again.registered.paused
        assert (await rt.send_signal("a", "resume")).applied is True
        async with rt.register("a") as last:
            assert not last.registered.paused
            assert (await last.sleep(100, checkpoint_id="nap")).outcome is WaitOutcome.ELAPSED


async def test_a_cancel_without_a_session_takes_effect_at_once(url: str) -> None:
    async with runtime(url) as rt:
        async with rt.register("a"):
            pass
        reply = await rt.send_signal("a", "cancel", b"gone")
        assert (reply.applied, reply.status, reply.reason) == (True, Status.CANCELLED, Reason.CANCELLED)
        assert (await rt.status("a")).error == "gone"


async def test_a_cancel_that_races_completion_answers_with_what_really_happened(
    autojump_clock: object,
) -> None:
    """Both start together; the other starts after the n-th step of the first, for 100 n, both ways."""
    ends = set()
    async with runtime() as rt:
        for number in range(200):
            ends.add(await race(rt, f"i{number}", number // 2, cancel_first=number % 2 == 0))
    assert ends == {Status.COMPLETED, Status.CANCELLED}


async def race(rt: runtara.Runtime, name: str, steps: int, *, cancel_first: bool) -> Status:
    answers: dict[str, Status] = {}

    async def cancel() -> None:
        try:
            reply = await rt.send_signal(name, "cancel")
            assert reply.applied is (reply.status is Status.CANCELLED)
        except AlreadyFinished as error:
            answers["cancel"] = Status[error.status.upper()]

    async def complete(inst: runtara.Instance) -> None:
        reply = await inst.checkpoint("c", b"x")
        if reply.signal is not None:
            await inst.ack(reply.signal)
        answers["complete"] = (await inst.complete(b"out")).status

    async with rt.register(name) as inst, trio.open_nursery() as nursery:
        first: Callable[[], Awaitable[None]] = cancel if cancel_first else lambda: complete(inst)
        second: Callable[[], Awaitable[None]] = (lambda: complete(inst)) if cancel_first else cancel
        nursery.start_soon(first)
        for _ in range(steps):
            await trio.lowlevel.checkpoint()
        nursery.start_soon(second)
    view = await rt.status(name)
    assert view.status.is_terminal
    assert set(answers.values()) == {view.status}
    assert (view.output == b"out") is (view.status is Status.COMPLETED)
    return view.status


async def test_cancelling_one_instance_leaves_its_likes_alone(url: str) -> None:
    names = ["order-1", "order-10", "order-1/2", "order-"]
    async with runtime(url, tenant="t1") as rt:
        other = rt.for_tenant("t2")
        for tenant in (rt, other):
            for name in names:
                async with tenant.register(name):
                    pass
        await rt.send_signal("order-1", "cancel")
        cancelled = frozenset({Status.CANCELLED})
        assert [i.instance_id for i in (await rt.list_instances(statuses=cancelled)).items] == ["order-1"]
        assert await other.count_instances(statuses=cancelled) == 0


async def test_a_wait_that_was_cancelled_and_asked_again_gets_the_signal_once(
    autojump_clock: object,
) -> None:
    async with runtime() as rt, rt.register("a") as inst:
        for step in range(1, 12):
            with trio.move_on_after(1):
                await cancelled_at(step, partial(inst.wait_signal, "k", checkpoint_id=f"w{step}"))
            await rt.send_custom_signal("a", "k", b"%d" % step)
            reply = await inst.wait_signal("k", checkpoint_id=f"w{step}")
            assert reply.payload == b"%d" % step
            assert (await inst.wait_signal("k", checkpoint_id=f"w{step}")).payload == b"%d" % step
        assert (await rt.status("a")).unconsumed_signals == 0


@pytest.mark.parametrize("odd", [None, 1.5, True, b"pause"])
async def test_an_acknowledgement_of_no_signal_at_all_is_refused(odd: object) -> None:
    async with runtara.open_runtime("sqlite:///:memory:") as rt, rt.register("a") as inst:
        with pytest.raises(runtara.ValidationError) as caught:
            await inst.ack(odd)  # type: ignore[arg-type]
        assert caught.value.field == "signal"
