"""The persistence actor, by a store that goes by a script: group commit, faults, and who is told what."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

import runtara
from runtara import Instance, Status
from runtara.actors.letters import Session
from runtara.actors.supervisor import RestartIntensityExceeded
from runtara.instance import Inbox
from runtara.persistence.store import PageRequest
from runtara.tenant import Runtime
from tests.runtimes import ScriptedStore, scripted_runtime


class Answers:
    """Calls in the background, and what each of them returned or raised."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.open = 0
        self.answered = trio.Event()
        """Every call so far has its answer."""
        self.order: list[str] = []
        self.results: dict[str, object] = {}

    def ask(self, name: str, call: Callable[[], Awaitable[object]]) -> None:
        if self.open == 0:
            self.answered = trio.Event()
        self.open += 1
        self.nursery.start_soon(self.keep, name, call)

    async def keep(self, name: str, call: Callable[[], Awaitable[object]]) -> None:
        try:
            result = await call()
        except runtara.RuntaraError as error:
            result = type(error)
        self.order.append(name)
        self.results[name] = result
        self.open -= 1
        if self.open == 0:
            self.answered.set()

    def checkpoint(self, inst: Instance, name: str) -> None:
        self.ask(name, lambda: inst.checkpoint(name, b"x"))

    def kinds(self) -> dict[str, object]:
        return {n: r if isinstance(r, type) else type(r) for n, r in self.results.items()}


async def row_of(store: ScriptedStore) -> int:
    record = await store.find("default", "a")
    assert record is not None
    return record.row


async def stored(store: ScriptedStore) -> set[str]:
    """The names of all checkpoints that are in the store."""
    page = await store.list_records(await row_of(store), runtara.CheckpointRecord, PageRequest())
    return {record.checkpoint_id for record in page.items}


# ---------------------------------------------------------------- group commit


async def test_what_waits_is_written_in_one_transaction(autojump_clock: MockClock) -> None:
    async with scripted_runtime() as (rt, store), rt.register("a") as one, rt.register("b") as two:
        gate = store.hold()
        written = len(store.written)
        async with trio.open_nursery() as nursery:
            answers = Answers(nursery)
            answers.checkpoint(one, "first")
            await wait_all_tasks_blocked()
            for number in range(50):
                answers.checkpoint(one, f"a{number}")
                answers.checkpoint(two, f"b{number}")
            await wait_all_tasks_blocked()
            assert answers.results == {}
            gate.set()
        assert [len(batch) for batch in store.written[written:]] == [1, 100]
        assert len(answers.results) == 101


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [({"batch_units": 3}, [1, 3, 3, 3, 1]), ({"batch_bytes": 2000}, None)],
)
async def test_a_transaction_is_bounded_in_units_and_bytes(
    autojump_clock: MockClock, settings: dict[str, Any], sizes: list[int] | None
) -> None:
    async with scripted_runtime(**settings) as (rt, store), rt.register("a") as inst:
        gate = store.hold()
        written = len(store.written)
        async with trio.open_nursery() as nursery:
            answers = Answers(nursery)
            answers.checkpoint(inst, "first")
            await wait_all_tasks_blocked()
            for number in range(10):
                answers.ask(f"c{number}", lambda n=number: inst.checkpoint(f"c{n}", b"x" * 600))  # type: ignore[misc]
            await wait_all_tasks_blocked()
            gate.set()
        batches = store.written[written:]
        if sizes is not None:
            assert [len(batch) for batch in batches] == sizes
        else:
            assert len(batches) > 5
            assert all(len(b) == 1 or sum(unit.size for unit in b) <= 2000 for b in batches)


async def test_replies_leave_after_their_commit_in_the_order_of_revisions(autojump_clock: MockClock) -> None:
    """Also a refusal and a plain read that came after an uncommitted change wait for it."""
    async with scripted_runtime() as (rt, store), rt.register("a") as inst, trio.open_nursery() as nursery:
        gate = store.hold()
        answers = Answers(nursery)
        for name, call in (
            ("write", lambda: inst.checkpoint("c", b"x")),
            ("read", lambda: inst.get_checkpoint("c")),
            ("status", lambda: rt.status("a")),
            ("found", lambda: inst.checkpoint("c", b"y")),
            ("refusal", lambda: inst.ack(10**6)),
            ("end", inst.complete),
            ("late", lambda: inst.checkpoint("d", b"x")),
            ("view", lambda: rt.status("a")),
        ):
            answers.ask(name, call)
            await wait_all_tasks_blocked()
        assert answers.results == {}
        gate.set()
        await wait_all_tasks_blocked()
        assert answers.results["refusal"] is runtara.SignalNotPending
        assert answers.results["late"] is runtara.InvalidInstanceState
        assert answers.results["found"].state == b"x"  # type: ignore[attr-defined]
        assert answers.results["view"].status is Status.COMPLETED  # type: ignore[attr-defined]
        first, second = answers.order[:5], answers.order[5:]
        assert set(first) == {"write", "read", "status", "found", "refusal"}
        assert set(second) == {"end", "late", "view"}


async def test_pushes_leave_after_their_commit(autojump_clock: MockClock) -> None:
    async with scripted_runtime() as (rt, store), rt.register("a") as inst, trio.open_nursery() as nursery:
        gate = store.hold()
        answers = Answers(nursery)
        answers.ask("send", lambda: rt.send_custom_signal("a", "k", b"1"))
        answers.ask("iterator", lambda: anext(inst.signals()))
        await wait_all_tasks_blocked()
        assert answers.results == {}
        assert inst.inbox.signals == {}
        gate.set()
        await wait_all_tasks_blocked()
        assert sorted(answers.results) == ["iterator", "send"]


# ---------------------------------------------------------------- a refused unit


@pytest.mark.parametrize("position", range(8))
@pytest.mark.parametrize("own", [True, False])
async def test_a_bad_unit_fails_alone_and_its_neighbours_are_acknowledged(
    autojump_clock: MockClock, position: int, own: bool
) -> None:
    async with scripted_runtime() as (rt, store):
        refused = store.refusal = runtara.StoreRefused("bad value")
        store.bad = {f"c{position}"}
        async with trio.open_nursery() as nursery:
            answers = Answers(nursery)
            sessions = [rt.register(f"i{number}" if own else "same") for number in range(8 if own else 1)]
            instances = [await session.__aenter__() for session in sessions]
            gate = store.hold()
            answers.checkpoint(instances[0], "first")
            await wait_all_tasks_blocked()
            for number in range(8):
                answers.checkpoint(instances[number if own else 0], f"c{number}")
                await wait_all_tasks_blocked()
            gate.set()
        kinds = answers.kinds()
        assert kinds.pop(f"c{position}") is type(refused)
        assert set(kinds.values()) == {runtara.CheckpointReply}
        for session in sessions:
            await session.__aexit__(None, None, None)
        assert rt.statistics().instances.failures == 0


async def test_later_units_of_a_failed_life_fail_and_are_asked_again(autojump_clock: MockClock) -> None:
    """They are healed: the caller sees their success, and the store has them once."""
    async with scripted_runtime() as (rt, store), rt.register("a") as inst, trio.open_nursery() as nursery:
        store.refusal, store.bad = runtara.StoreRefused("bad value"), {"c1"}
        gate = store.hold()
        answers = Answers(nursery)
        for number in range(5):
            answers.checkpoint(inst, f"c{number}")
            await wait_all_tasks_blocked()
        gate.set()
        await trio.sleep(1)
        assert answers.kinds() == {
            f"c{n}": runtara.StoreRefused if n == 1 else runtara.CheckpointReply for n in range(5)
        }
        assert await stored(store) == {"c0", "c2", "c3", "c4"}


async def test_a_failed_guard_drops_its_chain_alone_and_heals(autojump_clock: MockClock) -> None:
    async with scripted_runtime() as (rt, store), rt.register("a") as one, rt.register("b") as two:
        row = await store.find("default", "a")
        assert row is not None
        gate = store.hold()
        async with trio.open_nursery() as nursery:
            answers = Answers(nursery)
            answers.checkpoint(two, "first")
            await wait_all_tasks_blocked()
            for name in ("c1", "c2"):
                answers.checkpoint(one, f"a-{name}")
                answers.checkpoint(two, f"b-{name}")
                await wait_all_tasks_blocked()
            store.left_out_rows = frozenset({row.row})
            gate.set()
            await trio.sleep(0.005)
            store.left_out_rows = frozenset()
            assert sorted(answers.results) == ["b-c1", "b-c2", "first"]
        assert set(answers.kinds().values()) == {runtara.CheckpointReply}
        assert await stored(store) == {"a-c1", "a-c2"}


# ---------------------------------------------------------------- a commit with an unknown outcome


async def test_an_unknown_commit_that_happened_is_acknowledged(autojump_clock: MockClock) -> None:
    async with scripted_runtime() as (rt, store), rt.register("a") as inst:
        store.after_commit = [runtara.OutcomeUnknown("commit failed")]
        assert (await inst.checkpoint("c", b"x")).found is False
        assert await stored(store) == {"c"}
        assert rt.statistics().writer.failed_units == 0


async def test_an_unknown_commit_that_did_not_happen_is_a_retryable_error(autojump_clock: MockClock) -> None:
    async with scripted_runtime() as (rt, store), rt.register("a") as inst:
        store.faults = [runtara.OutcomeUnknown("commit failed")]
        store.settling = [None]
        with pytest.raises(runtara.StoreUnavailable) as caught:
            await inst.checkpoint("c", b"x")
        assert caught.value.retryable
        assert await stored(store) == set()
        assert (await inst.checkpoint("c", b"y")).found is False


async def test_an_unknown_commit_that_cannot_be_settled_stops_the_runtime(autojump_clock: MockClock) -> None:
    with pytest.raises(runtara.StoreFailed, match="commit failed"):
        async with scripted_runtime() as (rt, store), rt.register("a") as inst:
            store.faults = [runtara.OutcomeUnknown("commit failed")]
            store.settling = [runtara.StoreFailed("gone")]
            await inst.checkpoint("c", b"x")


async def test_a_commit_that_is_never_settled_because_the_lease_is_lost_says_so(
    autojump_clock: MockClock,
) -> None:
    with pytest.raises(runtara.errors.LeaseLost, match=r"commit failed; .* another runtime has taken over"):
        async with scripted_runtime() as (rt, store), rt.register("a") as inst:
            store.faults = [runtara.OutcomeUnknown("commit failed")]
            store.settling = [runtara.errors.LeaseLost("another runtime has taken over")]
            await inst.checkpoint("c", b"x")


AWAY = runtara.StoreUnavailable("away")


@pytest.mark.parametrize("committed", [True, False])
async def test_callers_wait_for_a_commit_that_is_settled_when_the_store_is_back(
    autojump_clock: MockClock, committed: bool
) -> None:
    async with lost_commit(committed) as (rt, store, _, answers):
        await trio.sleep(20)
        assert answers.results == {}
        store.settling = [] if committed else [None]
        await answers.answered.wait()
        lost = runtara.CheckpointReply if committed else runtara.StoreUnavailable
        assert answers.kinds() == {"lost": lost, "other": runtara.CheckpointReply}
        assert await stored(store) == ({"lost"} if committed else set())
        assert rt.statistics().writer.degraded_since is None


@pytest.mark.parametrize("committed", [True, False])
async def test_an_outage_at_commit_is_outlived_and_callers_hear_what_is_not_known(
    autojump_clock: MockClock, committed: bool
) -> None:
    """Nobody waits for longer than store_seconds, nothing stops, and in the end the store tells."""
    async with lost_commit(committed) as (rt, store, inst, answers):
        start = trio.current_time()
        answers.ask("read", lambda: inst.get_checkpoint("lost"))
        await trio.sleep(5)
        answers.checkpoint(inst, "later")
        await answers.answered.wait()
        assert 25 < trio.current_time() - start <= 35
        assert answers.kinds() == {
            "lost": runtara.OutcomeUnknown,
            "other": runtara.StoreUnavailable,
            "read": runtara.OutcomeUnknown,
            "later": runtara.StoreUnavailable,
        }
        await trio.sleep(60)
        for call in (lambda: inst.get_checkpoint("lost"), lambda: inst.checkpoint("again", b"x")):
            with pytest.raises(runtara.StoreUnavailable):
                await call()
        store.settling = [] if committed else [None]
        await trio.sleep(2)
        assert await stored(store) == ({"lost"} if committed else set())
        assert (await inst.checkpoint("lost", b"new")).found is committed
        assert (await inst.checkpoint("other", b"x")).found is False
        assert rt.statistics().instances.failures == 0


async def test_a_push_of_a_commit_that_nobody_waited_for_leaves_when_it_is_settled(
    autojump_clock: MockClock,
) -> None:
    async with scripted_runtime(store_seconds=30) as (rt, store), rt.register("a") as inst:
        store.after_commit = [runtara.OutcomeUnknown("commit failed")]
        store.settling = [AWAY] * 1000
        with pytest.raises(runtara.OutcomeUnknown):
            await rt.send_custom_signal("a", "k", b"1", idempotency_key="once")
        assert inst.inbox.signals == {}
        store.settling = []
        assert (await anext(inst.signals())).payload == b"1"
        await rt.send_custom_signal("a", "k", b"1", idempotency_key="once")
        [kept] = (await store.list_records(await row_of(store), runtara.SignalRecord, PageRequest())).items
        assert kept.payload == b"1"


async def test_a_new_writer_first_settles_what_the_lost_one_left(autojump_clock: MockClock) -> None:
    async with lost_commit(committed=False) as (rt, store, _, answers):
        rt.system.supervisor.kill("writer")
        await trio.sleep(5)
        assert answers.results == {}
        store.settling = [None]
        await answers.answered.wait()
        assert answers.kinds() == {"lost": runtara.CheckpointReply, "other": runtara.CheckpointReply}
        assert store.settling == []
        assert await stored(store) == {"lost"}


@asynccontextmanager
async def lost_commit(committed: bool) -> AsyncIterator[tuple[Runtime, ScriptedStore, Instance, Answers]]:
    """A checkpoint whose commit is lost with the store, and a write of another instance behind it."""
    error = runtara.OutcomeUnknown("commit failed")
    async with (
        scripted_runtime(store_seconds=30) as (rt, store),
        rt.register("a") as inst,
        rt.register("b") as other,
        trio.open_nursery() as nursery,
    ):
        store.after_commit, store.faults = ([error], []) if committed else ([], [error])
        store.settling = [AWAY] * 1000
        answers = Answers(nursery)
        answers.checkpoint(inst, "lost")
        await wait_all_tasks_blocked()
        answers.checkpoint(other, "other")
        await wait_all_tasks_blocked()
        yield rt, store, inst, answers


# ---------------------------------------------------------------- a store that is away


async def test_a_store_that_is_away_for_ten_seconds_is_waited_for(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_runtime() as (rt, store), rt.register("a") as one, rt.register("b") as two:
        start = trio.current_time()
        store.away = runtara.StoreUnavailable("locked")
        async with trio.open_nursery() as nursery:
            answers = Answers(nursery)
            for number in range(10):
                answers.checkpoint(one if number % 2 else two, f"c{number}")
                await trio.sleep(1)
            assert answers.results == {}
            degraded = rt.statistics().writer.degraded_since
            assert degraded == pytest.approx(start)
            store.away = None
        assert set(answers.kinds().values()) == {runtara.CheckpointReply}
        assert trio.current_time() - start < 12
        assert rt.statistics().writer.degraded_since is None
        assert rt.statistics().instances.failures == 0
    messages = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
    assert [m.split(",")[0] for m in messages] == ["the store does not answer", "the store answers again"]


async def test_past_its_patience_each_caller_gets_a_retryable_error_and_later_calls_work(
    autojump_clock: MockClock,
) -> None:
    """Nobody waits longer than store_seconds, also those who came while others waited."""
    async with scripted_runtime(store_seconds=30, batch_units=2) as (rt, store), rt.register("a") as inst:
        store.away = runtara.StoreUnavailable("locked")
        waited: list[float] = []

        async def call(number: int) -> None:
            start = trio.current_time()
            with pytest.raises(runtara.StoreUnavailable):
                async with rt.register(f"i{number}"):
                    raise AssertionError("not reached")
            waited.append(trio.current_time() - start)

        async with trio.open_nursery() as nursery:
            for number in range(12):
                nursery.start_soon(call, number)
                await trio.sleep(5)
        assert max(waited) <= 30
        assert min(waited[:5]) > 20
        store.away = None
        assert (await inst.checkpoint("c", b"x")).found is False
        store.faults = [runtara.StoreUnavailable("locked")] * 3
        assert (await inst.checkpoint("d", b"x")).found is False


async def test_a_full_disk_refuses_writes_at_once_while_reads_go_on(autojump_clock: MockClock) -> None:
    async with scripted_runtime() as (rt, store), rt.register("a") as inst:
        await inst.checkpoint("c", b"x")
        store.away = runtara.StoreFull("disk full")
        start = trio.current_time()
        with pytest.raises(runtara.StoreFull) as caught:
            await inst.checkpoint("d", b"x")
        assert (caught.value.retryable, trio.current_time()) == (True, start)
        assert (await inst.get_checkpoint("c")).state == b"x"
        assert (await rt.status("a")).status is Status.RUNNING
        assert (await rt.list_instances()).items[0].instance_id == "a"
        store.away = None
        assert (await inst.checkpoint("d", b"x")).found is False


async def test_a_load_that_the_store_does_not_answer_is_a_retryable_error(autojump_clock: MockClock) -> None:
    async with scripted_runtime() as (rt, store):
        async with rt.register("a") as inst:
            await inst.checkpoint("c", b"x")
        await trio.sleep(100)
        assert rt.statistics().instances.live == 0
        store.loading = [runtara.StoreUnavailable("locked")]
        with pytest.raises(runtara.StoreUnavailable):
            await rt.get_checkpoint("a", "c")
        assert (await rt.get_checkpoint("a", "c")).state == b"x"


# ---------------------------------------------------------------- damage


async def test_damage_stops_the_runtime_and_nothing_is_acknowledged_afterwards(
    autojump_clock: MockClock,
) -> None:
    after: dict[str, object] = {}
    store = None
    with pytest.raises(runtara.StoreFailed, match="I/O error") as caught:
        async with scripted_runtime() as (rt, store), rt.register("a") as inst:
            await inst.checkpoint("before", b"x")
            async with trio.open_nursery() as nursery:
                answers = Answers(nursery)
                gate = store.hold()
                store.away = runtara.StoreFailed("I/O error")
                for number in range(5):
                    answers.checkpoint(inst, f"c{number}")
                    await wait_all_tasks_blocked()
                gate.set()
                with trio.CancelScope(shield=True):
                    await wait_all_tasks_blocked()
                after = answers.results
    assert set(after.values()) == {runtara.StoreFailed}
    assert type(caught.value) is runtara.StoreFailed


async def test_damage_cancels_a_body_that_waits_and_names_what_the_body_raised_instead(
    autojump_clock: MockClock,
) -> None:
    with pytest.raises(runtara.StoreFailed) as caught:
        async with scripted_runtime() as (rt, store), rt.register("a") as inst:
            store.away = runtara.StoreFailed("I/O error")
            with trio.CancelScope(shield=True), pytest.raises(runtara.StoreFailed):
                await inst.checkpoint("c", b"x")
            await trio.sleep_forever()
    assert caught.value.__cause__ is None
    with pytest.raises(runtara.StoreFailed) as blamed:
        async with scripted_runtime() as (rt, store), rt.register("a") as inst:
            store.away = runtara.StoreFailed("I/O error")
            with trio.CancelScope(shield=True):
                await inst.checkpoint("c", b"x")
    assert isinstance(blamed.value.__cause__, runtara.StoreFailed)


# ---------------------------------------------------------------- the writer is lost


@pytest.mark.parametrize("fault", ["idle", "writing", "waiting for the store", "halving"])
async def test_a_lost_writer_loses_nothing_that_was_acknowledged(
    autojump_clock: MockClock, fault: str
) -> None:
    async with scripted_runtime() as (rt, store), rt.register("a") as inst, trio.open_nursery() as nursery:
        answers = Answers(nursery)
        gate = store.hold()
        answers.checkpoint(inst, "first")
        await wait_all_tasks_blocked()
        for number in range(9):
            answers.checkpoint(inst, f"c{number}")
            await wait_all_tasks_blocked()
        if fault == "halving":
            store.faults = [None, runtara.StoreRefused("x"), *[runtara.StoreUnavailable("locked")] * 100]
        elif fault == "waiting for the store":
            store.away = runtara.StoreUnavailable("locked")
        if fault == "writing":
            rt.system.supervisor.kill("writer")
        gate.set()
        await trio.sleep(0.3 if fault in ("halving", "waiting for the store") else 0.01)
        if fault != "writing":
            rt.system.supervisor.kill("writer")
        store.away, store.faults = None, []
        await trio.sleep(5)
        assert len(answers.results) == 10
        assert set(answers.kinds().values()) == {runtara.CheckpointReply}
        assert await stored(store) == {"first", *(f"c{n}" for n in range(9))}


async def test_a_writer_that_is_lost_again_and_again_stops_the_runtime(mock_clock: MockClock) -> None:
    with pytest.raises(runtara.RuntimeFault, match="too many restarts, the last one of writer") as caught:
        async with scripted_runtime() as (rt, _):
            for _ in range(6):
                rt.system.supervisor.kill("writer")
                with trio.CancelScope(shield=True):
                    await wait_all_tasks_blocked()
            await trio.sleep_forever()
    assert isinstance(caught.value.__cause__, RestartIntensityExceeded)


async def test_housekeeping_that_fails_waits_or_stops_the_runtime(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted_runtime() as (rt, store), rt.register("a") as inst:

        async def busy() -> None:
            raise runtara.StoreUnavailable("locked")

        monkeypatch.setattr(type(store), "maintain", lambda self: busy())
        assert (await inst.checkpoint("c", b"x")).found is False
        assert (await inst.checkpoint("d", b"x")).found is False

    async def broken() -> None:
        raise runtara.StoreFailed("I/O error")

    with pytest.raises(runtara.StoreFailed):
        async with scripted_runtime() as (rt, store), rt.register("a") as inst:
            monkeypatch.setattr(type(store), "maintain", lambda self: broken())
            await inst.checkpoint("c", b"x")
            await trio.sleep_forever()


# ---------------------------------------------------------------- foreign code


class BrokenSink(Inbox):
    """A sink of somebody else, with a bug."""

    def push(self, push: object) -> None:
        raise RuntimeError("a bug")


async def test_a_sink_that_raises_costs_nobody_an_answer(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_runtime() as (rt, _), rt.register("a") as inst, rt.register("b") as other:
        entry = rt.system.directory.entries["default", "a"]
        entry.session = Session(inst.epoch, BrokenSink())
        with caplog.at_level(logging.ERROR):
            reply = await rt.send_custom_signal("a", "k", b"x")
        assert reply.signal_id > 0
        assert "an effect of a change of default/a failed" in caplog.text
        await inst.checkpoint("one", b"x")
        await other.checkpoint("one", b"x")
        assert rt.system.writer.statistics().failed_units == 0
