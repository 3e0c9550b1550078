"""The embedded surface: what each method of `Runtime` and `Instance` does and answers, on every store."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

import runtara
from runtara import (
    CompensationSpec,
    CompensationState,
    EventType,
    InstanceOrder,
    Reason,
    Runtime,
    SignalType,
    Status,
    WaitOutcome,
)
from tests.runtimes import STORES, SURFACES, runtime, url_of, url_on


@pytest.fixture(params=SURFACES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_on(request.param, tmp_path)


@pytest.fixture(params=STORES)
def local(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return url_on(request.param, tmp_path)


# ---------------------------------------------------------------- sessions


async def test_a_first_registration_creates_the_instance_and_says_so(url: str) -> None:
    async with runtime(url) as rt, rt.register("a", workflow="w", definition_version="1") as inst:
        first = inst.registered
        assert (first.created, first.status, first.attempt) == (True, Status.RUNNING, 1)
        assert (first.paused, first.due, first.compensating) == (False, False, False)
        assert (first.checkpoint_id, first.input, first.signals) == (None, None, ())
        assert inst.epoch == first.epoch > 0
        assert inst.instance_id == "a"
        view = await inst.status()
        assert (view.status, view.reason, view.connected) == (Status.RUNNING, None, True)
        assert (view.record.workflow, view.record.definition_version) == ("w", "1")
        assert view == await rt.status("a")


async def test_a_later_registration_finds_what_was_there(url: str) -> None:
    async with runtime(url) as rt:
        async with rt.register("a") as inst:
            await inst.checkpoint("one", b"1")
        view = await rt.status("a")
        assert (view.status, view.reason) == (Status.SUSPENDED, Reason.DISCONNECTED)
        async with rt.register("a", checkpoint_id="one") as again:
            assert again.epoch > inst.epoch
            assert (again.registered.created, again.registered.checkpoint_id) == (False, "one")
            assert (await again.checkpoint("one", b"2")).state == b"1"


async def test_registering_refuses_another_workflow_an_unknown_checkpoint_and_an_ended_instance(
    url: str,
) -> None:
    async with runtime(url) as rt:
        async with rt.register("a", workflow="w"):
            pass
        with pytest.raises(runtara.Conflict) as conflict:
            async with rt.register("a", workflow="other"):
                raise AssertionError("not reached")
        assert conflict.value.field == "workflow"
        with pytest.raises(runtara.CheckpointNotFound):
            async with rt.register("a", checkpoint_id="nowhere"):
                raise AssertionError("not reached")
        with pytest.raises(runtara.CheckpointNotFound):
            async with rt.register("new", checkpoint_id="nowhere"):
                raise AssertionError("not reached")
        assert (await rt.status("new")).status is Status.UNKNOWN
        async with rt.register("a") as inst:
            await inst.complete()
        with pytest.raises(runtara.AlreadyFinished) as ended:
            async with rt.register("a"):
                raise AssertionError("not reached")
        assert (ended.value.status, ended.value.details["reason"]) == ("completed", "completed")


@pytest.mark.parametrize("name", ["", "a\0b", "a\nb", "x" * 10_000, "\ud800", None, 5, b"a"])
async def test_an_ill_formed_id_is_refused_by_every_method(name: str) -> None:
    async with runtime() as rt:
        calls: list[Callable[..., Awaitable[object]]] = [
            rt.status,
            rt.get,
            rt.terminate,
            rt.result,
            rt.list_checkpoints,
            rt.list_events,
            lambda i: rt.send_signal(i, "cancel"),
            lambda i: rt.send_custom_signal(i, "k"),
        ]
        for call in calls:
            with pytest.raises(runtara.ValidationError) as caught:
                await call(name)
            assert caught.value.field == "instance_id"
        with pytest.raises(runtara.ValidationError):
            async with rt.register(name):
                raise AssertionError("not reached")
        with pytest.raises(runtara.ValidationError):
            async with rt.watch(name):
                raise AssertionError("not reached")
        assert rt.statistics().instances.live == 0


async def test_a_second_registration_supersedes_the_first(url: str) -> None:
    async with runtime(url) as rt:
        async with rt.register("a") as old, rt.register("a") as new:
            for use in (
                lambda: old.checkpoint("c", b"1"),
                lambda: old.sleep(0),
                lambda: old.wait_signal("k", checkpoint_id="w"),
                old.heartbeat,
                lambda: old.emit("e"),
                old.complete,
                old.fail,
                old.suspend,
                old.poll_signals,
                lambda: old.ack("cancel"),
                lambda: old.record_retry("c", 1),
                lambda: old.record_error("code", "message"),
                lambda: old.compensation.start("c"),
            ):
                with pytest.raises(runtara.StaleEpoch) as stale:
                    await use()
                assert stale.value.details == {"epoch": old.epoch, "current": new.epoch}
            with pytest.raises(runtara.StaleEpoch) as pushed:
                async for _ in old.signals():
                    raise AssertionError("no signal was sent")
            assert pushed.value.details == {"epoch": old.epoch, "current": new.epoch}
            await new.checkpoint("c", b"new")
        # `old` was left after `new`, and changed nothing
        assert (await rt.status("a")).reason is Reason.DISCONNECTED


async def test_the_exit_of_a_superseded_session_does_not_disturb_the_new_one(url: str) -> None:
    async with runtime(url) as rt:
        first = rt.register("a")
        await first.__aenter__()
        async with rt.register("a") as new:
            await first.__aexit__(None, None, None)
            assert (await rt.status("a")).connected
            assert (await new.checkpoint("c", b"1")).state == b"1"
            await rt.send_signal("a", "cancel")
            async for signal in new.signals():
                assert signal.type is SignalType.CANCEL
                break


async def test_a_superseded_sleep_ends_with_stale_epoch(url: str) -> None:
    async with runtime(url) as rt, rt.register("a") as old, trio.open_nursery() as nursery:

        async def sleep() -> None:
            with pytest.raises(runtara.StaleEpoch):
                await old.sleep(3600, checkpoint_id="nap")

        nursery.start_soon(sleep)
        while not (await old.status()).record.sleep_until_us:
            await trio.lowlevel.checkpoint()
        async with rt.register("a"):
            pass


# ---------------------------------------------------------------- exceptions


class Mine(Exception):
    pass


async def test_what_the_body_raises_comes_out_as_it_was(url: str) -> None:
    error = Mine("body")
    with pytest.raises(Mine) as caught:
        async with runtime(url) as rt, rt.register("a"):
            raise error
    assert caught.value is error
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
async def test_an_interrupt_of_the_body_comes_out_unwrapped(kind: type[BaseException]) -> None:
    with pytest.raises(kind):
        async with runtime() as rt, rt.register("a"):
            raise kind


async def test_a_body_that_raises_leaves_the_instance_to_the_next_session(url: str) -> None:
    async with runtime(url) as rt:
        with pytest.raises(Mine):
            async with rt.register("a") as inst:
                await inst.checkpoint("one", b"1")
                raise Mine
        view = await rt.status("a")
        assert (view.status, view.reason, view.connected) == (Status.SUSPENDED, Reason.DISCONNECTED, False)


async def test_a_cancelled_body_leaves_the_instance_to_the_next_session(url: str) -> None:
    async with runtime(url) as rt:
        with trio.CancelScope() as scope:
            async with rt.register("a") as inst:
                await inst.checkpoint("one", b"1")
                scope.cancel()
                await inst.sleep(3600)
        assert scope.cancelled_caught
        assert (await rt.status("a")).connected is False
        async with rt.register("a") as again:
            assert again.registered.checkpoint_id == "one"


async def test_a_bad_tenant_or_setting_is_refused_before_a_file_is_made(tmp_path: Path) -> None:
    url = url_of(tmp_path / "a.db")
    with pytest.raises(runtara.ValidationError) as tenant:
        async with runtime(url, tenant="a\0"):
            raise AssertionError("not reached")
    assert tenant.value.field == "tenant_id"
    with pytest.raises(runtara.ValidationError, match="drain: is no setting"):
        async with runtime(url, drain=1):
            raise AssertionError("not reached")
    assert list(tmp_path.iterdir()) == []


async def test_a_second_runtime_on_one_file_is_refused_unwrapped(tmp_path: Path) -> None:
    url = url_of(tmp_path / "a.db")
    async with runtime(url) as rt:
        with pytest.raises(runtara.StoreLocked):
            async with runtime(url):
                raise AssertionError("not reached")
        async with rt.register("a") as inst:
            assert (await inst.checkpoint("c", b"1")).state == b"1"


async def test_two_runtimes_in_one_process_share_nothing(tmp_path: Path) -> None:
    async with runtime(url_of(tmp_path / "a.db")) as one, runtime(url_of(tmp_path / "b.db")) as two:
        async with one.register("a") as first, two.register("a") as second:
            await one.send_signal("a", "cancel")
            await first.ack(await anext(first.signals()))
            await second.checkpoint("c", b"2")
            assert (await one.status("a")).status is Status.CANCELLED
            assert (await two.status("a")).status is Status.RUNNING
        assert one.statistics().instances.failures == two.statistics().instances.failures == 0


# ---------------------------------------------------------------- what an instance does


async def test_a_checkpoint_is_written_once(url: str) -> None:
    async with runtime(url) as rt, rt.register("a") as inst:
        first = await inst.checkpoint("c", b"1")
        assert (first.found, first.state, first.signal, first.custom_signal) == (False, b"1", None, None)
        second = await inst.checkpoint("c", b"2")
        assert (second.found, second.state, second.created_us) == (True, b"1", first.created_us)
        assert (await inst.get_checkpoint("c")).state == b"1"
        missing = await inst.get_checkpoint("d")
        assert (missing.found, missing.state) == (False, None)
        assert (await rt.get_checkpoint("a", "c")).state == b"1"
        with pytest.raises(runtara.ValidationError, match="use get_checkpoint to look"):
            await inst.checkpoint("d", b"")
        assert (await inst.get_checkpoint("d")).found is False


@pytest.mark.parametrize(("size", "fits"), [(99, True), (100, True), (101, False)])
async def test_a_state_over_the_limit_is_refused_with_size_and_limit(url: str, size: int, fits: bool) -> None:
    async with runtime(url, payload_bytes=100) as rt, rt.register("a") as inst:
        if fits:
            assert (await inst.checkpoint("c", b"x" * size)).state == b"x" * size
            return
        with pytest.raises(runtara.PayloadTooLarge) as caught:
            await inst.checkpoint("c", b"x" * size)
        assert caught.value.details == {"field": "state", "size": size, "limit": 100}
        assert (await inst.checkpoint("c", b"small")).state == b"small"


async def test_every_report_is_answered_and_listed(url: str) -> None:
    async with runtime(url) as rt, rt.register("a") as inst:
        beat = await inst.heartbeat()
        assert (beat.applied, beat.status) == (True, Status.RUNNING)
        assert (await inst.heartbeat()).event_id is None
        event = await inst.emit("paid", b"7", checkpoint_id="c", request_id="r")
        assert await inst.emit("paid", b"7", checkpoint_id="c", request_id="r") == event
        with pytest.raises(runtara.Conflict):
            await inst.emit("paid", b"8", checkpoint_id="c", request_id="r")
        assert (await inst.record_retry("c", 1, error="no", category="transient")).applied is True
        assert (await inst.record_retry("c", 1, error="no", category="transient")).applied is False
        first = await inst.record_error("E1", "first", attributes={"a": 1})
        second = await inst.record_error("E2", "second", cause_id=first, severity="critical", retry_after=2)
        with pytest.raises(runtara.ErrorNotFound):
            await inst.record_error("E3", "third", cause_id=10**6)
        assert (await inst.poll_signals()).last_error is not None
        errors = (await rt.list_errors("a")).items
        assert [(e.code, e.cause_id) for e in errors] == [("E2", first), ("E1", None)]
        assert second > first
        assert [(a.checkpoint_id, a.attempt) for a in (await rt.list_attempts("a")).items] == [("c", 1)]
        events = (await rt.list_events("a", descending=False)).items
        assert [e.type for e in events] == [EventType.STARTED, EventType.HEARTBEAT, EventType.CUSTOM]
        assert [e.payload for e in (await rt.list_events("a", type="custom")).items] == [b"7"]
        assert (await rt.list_events("a", subtype="other")).items == ()
        assert await rt.count_records("a", runtara.EventRecord) == 3


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda inst: inst.record_retry("c", 1, category="odd"), "category"),
        (lambda inst: inst.record_retry("c", 0), "attempt"),
        (lambda inst: inst.record_retry("c", 1, retry_after=-1), "retry_after"),
        (lambda inst: inst.record_error("c", "m", severity="odd"), "severity"),
        (lambda inst: inst.record_error("c", "m", attributes=[1]), "attributes"),
        (lambda inst: inst.suspend(state=b"x"), "state"),
        (lambda inst: inst.suspend(seconds=float("nan")), "seconds"),
        (lambda inst: inst.sleep(1, state=b"x"), "state"),
        (lambda inst: inst.ack("odd"), "signal"),
        (lambda inst: inst.checkpoint("", b"x"), "checkpoint_id"),
        (lambda inst: inst.checkpoint("c", "text"), "state"),
        (lambda inst: inst.wait_signal("", checkpoint_id="c"), "key"),
        (lambda inst: inst.wait_signal("k", checkpoint_id="c", timeout=-1), "timeout"),
        (lambda inst: inst.complete("text"), "output"),
    ],
)
async def test_bad_input_is_refused_by_its_field_and_changes_nothing(call, field: str) -> None:  # type: ignore[no-untyped-def]
    async with runtime() as rt, rt.register("a") as inst:
        before = (await inst.status()).revision
        with pytest.raises(runtara.ValidationError) as caught:
            await call(inst)
        assert caught.value.field == field
        assert (await inst.status()).revision == before


async def test_an_instance_completes_once(url: str) -> None:
    async with runtime(url) as rt:
        async with rt.register("a") as inst:
            done = await inst.complete(b"out")
            assert (done.applied, done.status, done.reason) == (True, Status.COMPLETED, Reason.COMPLETED)
            late = await inst.fail("late")
            assert (late.applied, late.status) == (False, Status.COMPLETED)
            with pytest.raises(runtara.InvalidInstanceState) as caught:
                await inst.checkpoint("c", b"1")
            assert caught.value.details == {"expected": "running", "actual": "completed"}
            assert [s async for s in inst.signals()] == []
        view = await rt.status("a")
        assert (view.status, view.output, view.error) == (Status.COMPLETED, b"out", None)
        assert view.record.finished_us is not None
        assert await rt.result("a") == b"out"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("broken", "broken"),
        (None, "Unknown error"),
        (b"\xff", "Unknown error (binary payload)"),
        ("a\ud800", "a?"),
    ],
)
async def test_an_instance_fails_with_a_text(given: str | bytes | None, text: str) -> None:
    async with runtime() as rt:
        async with rt.register("a") as inst:
            assert (await inst.fail(given)).applied is True
        view = await rt.status("a")
        assert (view.status, view.reason, view.error) == (Status.FAILED, Reason.APPLICATION_ERROR, text)
        with pytest.raises(runtara.InstanceFailed) as caught:
            await rt.result("a")
        assert (caught.value.status, caught.value.error) == ("failed", text)
        assert caught.value.details["reason"] == "application_error"


async def test_a_suspended_instance_is_due_for_its_next_registration(url: str) -> None:
    async with runtime(url) as rt:
        async with rt.register("a") as inst:
            reply = await inst.suspend(seconds=0, checkpoint_id="nap", state=b"s")
            assert (reply.applied, reply.status) == (True, Status.SUSPENDED)
        async with rt.register("a") as again:
            assert again.registered.checkpoint_id == "nap"
            assert (await again.get_checkpoint("nap")).state == b"s"
            woken = await again.sleep(100, checkpoint_id="nap", state=b"ignored")
            assert woken.outcome is WaitOutcome.ELAPSED


async def test_compensations_run_in_order_and_then_the_instance_ends(url: str) -> None:
    async with runtime(url) as rt:
        async with rt.register("a") as inst:
            for order in (1, 2):
                spec = CompensationSpec(step_id=f"undo-{order}", data=b"d%d" % order, order=order)
                await inst.checkpoint(f"c{order}", b"x", compensation=spec)
            assert (await inst.compensation.view()).pending == 2
            failed = await inst.fail("no")
            assert (failed.status, failed.reason) == (Status.RUNNING, Reason.COMPENSATING)
            view = await inst.compensation.view()
            assert [c.checkpoint_id for c in view.compensations] == ["c2", "c1"]
            assert await inst.compensation.data("c2") == b"d2"
            with pytest.raises(runtara.CheckpointNotFound):
                await inst.compensation.data("c3")
            for name in ("c2", "c1"):
                attempt = await inst.compensation.start(name)
                assert attempt == 1
                reply = await inst.compensation.finish(name, attempt, success=True)
            assert (reply.status, reply.pending) == (Status.FAILED, 0)
            ended = await inst.compensation.view()
            assert (ended.state, ended.all_succeeded) == (CompensationState.COMPLETED, True)
        log = (await rt.list_compensation_log("a", descending=False)).items
        assert [(c.checkpoint_id, c.success) for c in log] == [("c2", True), ("c1", True)]


# ---------------------------------------------------------------- tenants


async def test_tenants_are_walls(local: str) -> None:
    async with runtime(local, tenant="t1") as one:
        two = one.for_tenant("t2")
        async with one.register("a") as first, two.register("a") as second:
            await first.checkpoint("c", b"1")
            await second.checkpoint("c", b"2")
            await one.send_signal("a", "cancel")
            await one.send_custom_signal("a", "k", b"for one")
            assert (await two.status("a")).unconsumed_signals == 0
            assert (await second.poll_signals("k")).signal is None
            assert (await one.get_checkpoint("a", "c")).state == b"1"
            assert (await two.get_checkpoint("a", "c")).state == b"2"
            assert [s.type for s in (await one.list_signals("a")).items] == [
                SignalType.CUSTOM,
                SignalType.CANCEL,
            ]
            assert (await two.list_signals("a")).items == ()
            await second.complete()
            assert (await one.status("a")).status is Status.RUNNING
        async with one.register("only-one"):
            pass
        assert await one.count_instances() == 2
        assert [r.instance_id for r in (await two.list_instances()).items] == ["a"]
        assert (await two.status("only-one")).status is Status.UNKNOWN
        for call in (two.result, two.terminate, two.list_events, two.get):
            with pytest.raises(runtara.InstanceNotFound):
                await call("only-one")
        with pytest.raises(runtara.ValidationError):
            one.for_tenant("")


# ---------------------------------------------------------------- anyone


async def test_an_unknown_instance_is_answered_at_once_everywhere(url: str) -> None:
    async with runtime(url) as rt:
        view = await rt.status("typo")
        assert (view.status, view.error, view.revision) == (Status.UNKNOWN, "Instance not found", 0)
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: rt.get("typo"),
            lambda: rt.get_checkpoint("typo", "c"),
            lambda: rt.result("typo"),
            lambda: rt.terminate("typo"),
            lambda: rt.send_signal("typo", "cancel"),
            lambda: rt.send_custom_signal("typo", "k"),
            lambda: rt.list_checkpoints("typo"),
            lambda: rt.list_signals("typo"),
            lambda: rt.count_records("typo", runtara.CheckpointRecord),
        ]
        for call in calls:
            with pytest.raises(runtara.InstanceNotFound) as caught:
                await call()
            assert caught.value.details == {"instance_id": "typo"}
        with pytest.raises(runtara.InstanceNotFound):
            async with rt.watch("typo"):
                raise AssertionError("not reached")
        assert await rt.count_instances() == 0


async def test_asking_for_an_unknown_instance_leaves_nothing_behind(local: str) -> None:
    async with runtime(local) as rt:
        for _ in range(3):
            await rt.status("typo")
        assert rt.statistics().instances.live == 0
        assert rt.system.supervisor.statistics().children[1].restarts == 0


async def test_a_signal_can_be_kept_for_an_instance_that_does_not_exist_yet(url: str) -> None:
    async with runtime(url) as rt:
        kept = await rt.send_custom_signal("a", "k", b"early", store_if_unknown=True)
        assert (kept.status, kept.applied) == (Status.PENDING, False)
        async with rt.register("a") as inst:
            assert [s.payload for s in inst.registered.signals] == [b"early"]
            reply = await inst.wait_signal("k", checkpoint_id="w")
            assert (reply.received, reply.payload, reply.signal_id) == (True, b"early", kept.signal_id)


async def test_a_finished_instance_refuses_signals_and_repeats_the_answer_to_a_known_key(url: str) -> None:
    async with runtime(url) as rt:
        async with rt.register("a") as inst:
            sent = await rt.send_custom_signal("a", "k", b"1", idempotency_key="once")
            await inst.complete()
        assert await rt.send_custom_signal("a", "k", b"1", idempotency_key="once") == sent
        with pytest.raises(runtara.AlreadyFinished):
            await rt.send_custom_signal("a", "k", b"1")
        with pytest.raises(runtara.Conflict):
            await rt.send_custom_signal("a", "k", b"2", idempotency_key="once")
        for type in ("cancel", "pause", "resume", "shutdown"):
            with pytest.raises(runtara.AlreadyFinished):
                await rt.send_signal("a", type)
        with pytest.raises(runtara.AlreadyFinished):
            await rt.terminate("a")
        assert (await rt.status("a")).unconsumed_signals == 1


async def test_a_custom_signal_without_a_key_is_refused() -> None:
    async with runtime() as rt:
        for type in ("custom", SignalType.CUSTOM, "odd"):
            with pytest.raises(runtara.ValidationError) as caught:
                await rt.send_signal("a", type)
            assert caught.value.field == "type"


async def test_terminate_ends_a_live_instance_at_once(url: str) -> None:
    async with runtime(url) as rt, rt.register("a") as inst:
        reply = await rt.terminate("a", "enough")
        assert (reply.applied, reply.status, reply.reason) == (True, Status.CANCELLED, Reason.CANCELLED)
        assert [s async for s in inst.signals()] == []
        with pytest.raises(runtara.InvalidInstanceState):
            await inst.checkpoint("c", b"1")
        assert (await rt.status("a")).error == "enough"


# ---------------------------------------------------------------- lists


async def walked(rt: Runtime, limit: int, **options: object) -> list[str]:
    found: list[str] = []
    cursor = None
    while True:
        page = await rt.list_instances(limit=limit, cursor=cursor, **options)  # type: ignore[arg-type]
        assert len(page.items) <= limit
        found += [record.instance_id for record in page.items]
        cursor = page.next
        if cursor is None:
            return found


async def test_lists_and_counts_agree_in_pages_of_any_size(url: str) -> None:
    async with runtime(url) as rt:
        for number in range(7):
            async with rt.register(f"i-{number}", workflow="even" if number % 2 == 0 else "odd") as inst:
                if number < 3:
                    await inst.complete()
        names = [f"i-{number}" for number in range(7)]
        for limit in (1, 2, 3, 7, 100):
            assert await walked(rt, limit, descending=False) == names
            assert await walked(rt, limit) == names[::-1]
        completed = frozenset({Status.COMPLETED})
        assert await walked(rt, 2, statuses=completed, descending=False) == names[:3]
        assert await walked(rt, 2, order=InstanceOrder.FINISHED, statuses=completed) == names[2::-1]
        assert await walked(rt, 10, workflow="odd", descending=False) == ["i-1", "i-3", "i-5"]
        assert await walked(rt, 10, id_prefix="i-6") == ["i-6"]
        assert await rt.count_instances() == 7
        assert await rt.count_instances(statuses=completed) == 3
        assert await rt.count_instances(workflow="odd", statuses=completed) == 1
        assert await rt.count_instances(finished_from=0) == 3
        assert await rt.count_instances(created_before=0) == 0


async def test_a_page_that_is_ill_formed_is_refused_by_its_field(url: str) -> None:
    async with runtime(url) as rt, rt.register("a"):
        for limit in (0, 1001, True, "5", None, 1.0):
            with pytest.raises(runtara.ValidationError) as caught:
                await rt.list_instances(limit=limit)  # type: ignore[arg-type]
            assert caught.value.field == "limit"
            with pytest.raises(runtara.ValidationError):
                await rt.list_checkpoints("a", limit=limit)  # type: ignore[arg-type]
        with pytest.raises(runtara.ValidationError) as cursor:
            await rt.list_instances(cursor="odd")
        assert cursor.value.field == "cursor"


async def test_checkpoints_come_in_pages(url: str) -> None:
    async with runtime(url) as rt, rt.register("a") as inst:
        for number in range(5):
            await inst.checkpoint(f"c{number}", b"%d" % number)
        page = await rt.list_checkpoints("a", limit=3, descending=False)
        rest = await rt.list_checkpoints("a", limit=3, descending=False, cursor=page.next)
        assert [c.checkpoint_id for c in (*page.items, *rest.items)] == ["c0", "c1", "c2", "c3", "c4"]
        assert rest.next is None
        assert await rt.count_records("a", runtara.CheckpointRecord) == 5


# ---------------------------------------------------------------- the runtime


async def test_the_runtime_reports_on_itself(local: str) -> None:
    async with runtime(local) as rt:
        assert repr(rt) == "<Runtime of tenant 'default'>"
        await rt.health()
        async with rt.register("a") as inst:
            assert repr(inst) == f"<Instance 'a' epoch {inst.epoch}>"
            await inst.checkpoint("c", b"1")
            report = rt.statistics()
            assert (report.instances.live, report.instances.sessions, report.instances.failures) == (1, 1, 0)
            assert (report.writer.units, report.writer.queued, report.writer.failed_units) == (2, 0, 0)
            assert report.writer.degraded_since is None
            assert report.store.backend == local.partition(":")[0]
            assert report.store.units == 2
            assert (report.budget_used, report.draining) == (0, False)
    with pytest.raises(runtara.RuntimeClosed):
        await rt.health()
    with pytest.raises(runtara.RuntimeClosed):
        await rt.status("a")
    with pytest.raises(runtara.RuntimeClosed):
        async with rt.register("a"):
            raise AssertionError("not reached")
    with pytest.raises(runtara.RuntimeClosed):
        async with rt.watch("a"):
            raise AssertionError("not reached")
