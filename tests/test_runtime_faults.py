"""Actors are lost at any moment while callers work: nothing acknowledged is lost, nothing is done twice."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

import runtara
from runtara import CheckpointRecord, Instance, Runtime, Status, WaitOutcome
from tests.runtimes import MEMORY, StepCounter, runtime, url_of

CALLERS = 20
ROUNDS = 4
CHILDREN = ["writer", "instances", "wake", "recovery", "retention"]


async def insist(call: Callable[[], Awaitable[object]]) -> object:
    """What a program does: send again under the same ids while the error says that this may help."""
    while True:
        try:
            return await call()
        except runtara.RuntaraError as error:
            if not error.retryable:
                raise
            await trio.sleep(0.1)


class Work:
    """Callers with an instance each, and what was acknowledged to them."""

    def __init__(self, rt: Runtime) -> None:
        self.rt = rt
        self.acknowledged: dict[str, dict[str, bytes]] = {}
        self.consumed: dict[str, list[bytes | None]] = {}

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            for number in range(CALLERS):
                nursery.start_soon(self.caller, f"i{number}")

    async def caller(self, name: str) -> None:
        self.acknowledged[name] = {}
        self.consumed[name] = []
        async with self.rt.register(name) as inst:
            for number in range(ROUNDS):
                await self.round(name, inst, number)
            await insist(lambda: inst.complete(name.encode()))

    async def round(self, name: str, inst: Instance, number: int) -> None:
        payload = b"%d" % number
        await insist(lambda: inst.checkpoint(f"c{number}", payload))
        self.acknowledged[name][f"c{number}"] = payload
        key = f"once-{number}"
        await insist(lambda: self.rt.send_custom_signal(name, "k", payload, idempotency_key=key))
        reply = await insist(lambda: inst.wait_signal("k", checkpoint_id=f"w{number}"))
        assert isinstance(reply, runtara.WaitReply)
        self.consumed[name].append(reply.payload)
        nap = await insist(lambda: inst.sleep(0.01, checkpoint_id=f"n{number}"))
        assert isinstance(nap, runtara.WaitReply)
        assert nap.outcome is WaitOutcome.ELAPSED

    async def check(self) -> None:
        """Everything that was acknowledged is there, once."""
        for name, checkpoints in self.acknowledged.items():
            view = await self.rt.get(name)
            assert (view.status, view.output, view.record.attempt) == (Status.COMPLETED, name.encode(), 1)
            assert view.unconsumed_signals == 0
            page = await self.rt.list_checkpoints(name, limit=100)
            stored = {record.checkpoint_id: record.state for record in page.items}
            assert checkpoints.items() <= stored.items()
            assert len(stored) == 3 * ROUNDS
            assert self.consumed[name] == [b"%d" % number for number in range(ROUNDS)]


@contextmanager
def fault_at(steps: list[int], act: Callable[[], object]) -> Iterator[None]:
    """Do ``act`` when all tasks together have run for so many steps."""
    counters = [StepCounter(step, act) for step in steps]
    for counter in counters:
        trio.lowlevel.add_instrument(counter)
    try:
        yield
    finally:
        for counter in counters:
            trio.lowlevel.remove_instrument(counter)


@pytest.mark.parametrize("moment", range(8))
@pytest.mark.parametrize("child", CHILDREN)
async def test_a_lost_part_of_the_tree_loses_nothing(
    autojump_clock: MockClock, child: str, moment: int
) -> None:
    async with runtime() as rt:
        work = Work(rt)
        with fault_at([40 + 97 * moment, 900 + 61 * moment], lambda: rt.system.supervisor.kill(child)):
            await work.run()
        restarts = {c.name: c.restarts for c in rt.system.supervisor.statistics().children}
        assert restarts[child] >= 1
        await work.check()


@pytest.mark.parametrize("child", CHILDREN)
async def test_a_lost_part_of_the_tree_loses_nothing_on_a_file_with_threads(
    tmp_path: Path, child: str
) -> None:
    async with runtime(url_of(tmp_path / "a.db")) as rt:
        work = Work(rt)
        with fault_at([300, 1500, 2700], lambda: rt.system.supervisor.kill(child)):
            await work.run()
        await work.check()


@pytest.mark.parametrize("moment", range(8))
async def test_lost_actors_of_instances_lose_nothing_and_disturb_no_other(
    autojump_clock: MockClock, moment: int
) -> None:
    async with runtime() as rt:
        work = Work(rt)
        victims = [("default", f"i{number}") for number in range(0, CALLERS, 2)]
        with fault_at(
            [50 + 17 * moment + 150 * n for n in range(10)],
            lambda: [rt.system.directory.kill(victim) for victim in victims],
        ):
            await work.run()
        await work.check()
        assert rt.statistics().instances.failures == 0
        assert [c.restarts for c in rt.system.supervisor.statistics().children] == [0] * 5


async def test_an_actor_killed_at_every_step_of_a_call_answers_it_once(autojump_clock: MockClock) -> None:
    async with runtime() as rt:
        for step in range(1, 60):
            name = f"i{step}"
            async with rt.register(name) as inst:
                with fault_at([step], lambda: rt.system.directory.kill(("default", name))):  # noqa: B023
                    first = await inst.checkpoint("c", b"x")
                    await rt.send_custom_signal(name, "k", b"p", idempotency_key="once")
                    reply = await inst.wait_signal("k", checkpoint_id="w")
                    error = await inst.record_error("code", "text")
                    done = await inst.complete(b"out")
            assert first.state == b"x"
            assert reply.payload == b"p"
            assert error > 0
            assert done.status is Status.COMPLETED
            assert await rt.count_records(name, CheckpointRecord) == 2
            assert await rt.count_records(name, runtara.ErrorRecord) == 1
            assert [s.payload for s in (await rt.list_signals(name)).items] == [b"p"]


async def test_a_session_hears_a_signal_whatever_was_lost(autojump_clock: MockClock) -> None:
    """At the n-th step of all tasks after the sending, one part of the tree after the other is lost."""
    async with runtime() as rt:
        for step in range(1, 40):
            name = f"i{step}"
            async with rt.register(name) as inst:
                act: Callable[[], object] = lambda: rt.system.directory.kill(("default", name))  # noqa: B023, E731
                if step % 10 == 0:
                    act = lambda: rt.system.supervisor.kill(CHILDREN[step // 10 % 2])  # noqa: B023, E731
                with fault_at([step], act):
                    sent = await rt.send_custom_signal(name, "k", b"p")
                    heard = await anext(inst.signals())
                assert (heard.signal_id, heard.payload) == (sent.signal_id, b"p")
            await trio.sleep(61)  # so that the restarts are not too many in one minute


async def test_a_lost_scheduler_wakes_who_became_due_meanwhile(autojump_clock: MockClock) -> None:
    async with runtime() as rt:
        woken: list[float] = []
        start = trio.current_time()

        async def session(name: str) -> None:
            async with rt.register(name) as inst:
                assert (await inst.sleep(10, checkpoint_id="nap")).outcome is WaitOutcome.ELAPSED
                woken.append(trio.current_time() - start)

        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(session, f"i{number}")
            await trio.sleep(9.999)
            with fault_at([30], lambda: rt.system.supervisor.kill("wake")):
                await trio.sleep(0.5)
        assert woken == [pytest.approx(10, abs=0.01)] * 50
        assert 0 < rt.statistics().wake.woken <= 50  # a wake that was under way may be lost with its count


async def test_the_grace_of_orphans_begins_anew_when_recovery_is_lost(tmp_path: Path) -> None:
    async with runtime(MEMORY, grace_seconds=0) as rt:
        rt.system.supervisor.kill("recovery")
        async with rt.register("a") as inst:
            assert (await inst.checkpoint("c", b"x")).found is False
            assert (await rt.status("a")).status is Status.RUNNING
