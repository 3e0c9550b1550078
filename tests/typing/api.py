"""The public names as a type checker sees them; mypy reads this file and nothing runs it."""

import datetime
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import assert_type

import runtara
from runtara.actors.system import SystemStatistics


async def opening() -> None:
    opened = runtara.open_runtime("sqlite:///app.db", tenant="acme", drain_seconds=1.0)
    async with opened as rt:
        assert_type(rt, runtara.Runtime)
        tenant: str = rt.tenant
        assert tenant
        assert_type(rt.for_tenant("other"), runtara.Runtime)
        assert_type(rt.statistics(), SystemStatistics)
        health = await rt.health()
        assert_type(health, runtara.Health)
        assert_type(health.ok, bool)
        assert_type(health.degraded_seconds, float | None)
        assert_type(rt.reader(), runtara.Reader)
        assert_type(await rt.violations(limit=5), tuple[runtara.Violation, ...])
        assert_type(await rt.all_violations(), tuple[runtara.Violation, ...])
    async with runtara.open_reader("sqlite:///app.db", tenant="acme") as reader:
        assert_type(reader, runtara.Reader)
        assert_type(reader.for_tenant("other"), runtara.Reader)
        assert_type(await reader.growth(), runtara.Growth)
        assert_type(await reader.verify(), list[str])
        assert_type(await reader.backup("copy.db"), int)
    assert_type(await runtara.restore("copy.db", "sqlite:///app.db", replace=True), int)


async def deleting(rt: runtara.Runtime, before: datetime.datetime) -> None:
    assert_type(await rt.purge("order-1"), None)
    assert_type(await rt.purge_finished(before), int)
    assert_type(await rt.purge_finished(0, statuses=[runtara.Status.FAILED, "completed"], limit=10), int)
    await rt.purge_finished("yesterday")  # type: ignore[arg-type]


async def sessions(rt: runtara.Runtime) -> None:
    session: AbstractAsyncContextManager[runtara.Instance] = rt.register(
        "order-1", checkpoint_id="c", workflow="w", definition_version="1"
    )
    async with session as inst:
        assert_type(inst.instance_id, str)
        assert_type(inst.epoch, int)
        assert_type(inst.registered, runtara.Registered)
        assert_type(inst.registered.signals, tuple[runtara.SignalRecord, ...])
        assert_type(inst.registered.checkpoint_id, str | None)


async def checkpoints(inst: runtara.Instance) -> None:
    spec = runtara.CompensationSpec(step_id="undo", data=b"d", order=1)
    reply = await inst.checkpoint("c", b"state", compensation=spec)
    assert_type(reply, runtara.CheckpointReply)
    assert_type(reply.found, bool)
    assert_type(reply.state, bytes | None)
    assert_type(reply.signal, runtara.SignalRecord | None)
    assert_type(reply.custom_signal, runtara.SignalRecord | None)
    assert_type(reply.last_error, runtara.ErrorRecord | None)
    found = await inst.get_checkpoint("c")
    assert_type(found, runtara.FoundCheckpoint)
    assert_type(found.found, bool)
    assert_type(found.state, bytes | None)
    await inst.checkpoint("c", "text")  # type: ignore[arg-type]
    await inst.checkpoint("c", None)  # type: ignore[arg-type]
    await inst.checkpoint("c")  # type: ignore[call-arg]


async def waiting(inst: runtara.Instance) -> None:
    assert_type(await inst.sleep(1), runtara.WaitReply)
    reply = await inst.sleep(1.5, checkpoint_id="nap", state=b"s")
    assert_type(reply.outcome, runtara.WaitOutcome | None)
    assert_type(reply.interrupted, bool)
    assert_type(reply.timed_out, bool)
    assert_type(reply.received, bool)
    assert_type(await inst.wait_signal("paid", checkpoint_id="w", timeout=60), runtara.WaitReply)
    await inst.sleep("5")  # type: ignore[arg-type]
    await inst.wait_signal("paid")  # type: ignore[call-arg]


async def reports(inst: runtara.Instance) -> None:
    assert_type(await inst.heartbeat(), runtara.EventReply)
    assert_type(await inst.emit("paid", b"7", checkpoint_id="c", request_id="r"), runtara.EventReply)
    assert_type(await inst.complete(b"out"), runtara.EventReply)
    assert_type(await inst.complete(), runtara.EventReply)
    assert_type(await inst.fail("broken"), runtara.EventReply)
    assert_type(await inst.fail(b"broken"), runtara.EventReply)
    done = await inst.suspend(seconds=5, checkpoint_id="nap", state=b"s")
    assert_type(done.applied, bool)
    assert_type(done.status, runtara.Status)
    assert_type(done.reason, runtara.Reason | None)
    attempt = await inst.record_retry("c", 1, category="transient", severity=runtara.ErrorSeverity.INFO)
    assert_type(attempt, runtara.RetryReply)
    assert_type(await inst.record_error("E1", "text", attributes={"a": 1}, cause_id=None), int)
    assert_type(await inst.status(), runtara.InstanceView)


async def compensations(inst: runtara.Instance) -> None:
    assert_type(inst.compensation, runtara.Compensation)
    view = await inst.compensation.view()
    assert_type(view, runtara.CompensationView)
    assert_type(view.compensations, tuple[runtara.CompensationRecord, ...])
    assert_type(await inst.compensation.data("c"), bytes)
    number = await inst.compensation.start("c")
    assert_type(number, int)
    assert_type(await inst.compensation.finish("c", number, success=True), runtara.CompensationReply)


async def signals(inst: runtara.Instance) -> None:
    assert_type(inst.signals(), AsyncIterator[runtara.SignalRecord])
    async for signal in inst.signals():
        assert_type(signal, runtara.SignalRecord)
        assert_type(signal.type, runtara.SignalType)
        assert_type(signal.payload, bytes | None)
        assert_type(await inst.ack(signal), runtara.AckReply)
    await inst.ack(5)
    await inst.ack("cancel", acknowledged=False)
    await inst.ack(runtara.SignalType.PAUSE)
    polled = await inst.poll_signals("c")
    assert_type(polled, runtara.SignalsReply)


async def sending(rt: runtara.Runtime) -> None:
    reply = await rt.send_signal("a", "cancel", b"why", idempotency_key="once", store_if_unknown=True)
    assert_type(reply, runtara.SignalReply)
    assert_type(reply.signal_id, int)
    assert_type(await rt.send_signal("a", runtara.SignalType.PAUSE), runtara.SignalReply)
    assert_type(await rt.send_custom_signal("a", "paid", b"p"), runtara.SignalReply)
    assert_type(await rt.terminate("a", "enough"), runtara.ChangeReply)


async def seeing(rt: runtara.Runtime) -> None:
    view = await rt.status("a")
    assert_type(view, runtara.InstanceView)
    assert_type(view.output, bytes | None)
    assert_type(view.error, str | None)
    assert_type(view.last_activity, datetime.datetime)
    assert_type(await rt.get("a"), runtara.InstanceView)
    assert_type(await rt.get_checkpoint("a", "c"), runtara.FoundCheckpoint)
    assert_type(await rt.result("a"), bytes | None)
    async with rt.watch("a") as changes:
        assert_type(changes, AsyncIterator[runtara.Change])
        async for change in changes:
            assert_type(change, runtara.Change)
            assert_type(change.kinds, tuple[str, ...])


async def lists(rt: runtara.Reader) -> None:
    page = await rt.list_instances(
        statuses=frozenset({runtara.Status.RUNNING}),
        order=runtara.InstanceOrder.FINISHED,
        created_from=datetime.datetime.now(datetime.UTC),
        finished_before=1_700_000_000_000_000,
        awaits_client=True,
        limit=10,
    )
    assert_type(page, runtara.Page[runtara.InstanceRecord])
    assert_type(page.items, tuple[runtara.InstanceRecord, ...])
    assert_type(page.next, str | None)
    assert_type(await rt.count_instances(workflow="w"), int)
    assert_type(await rt.list_checkpoints("a", limit=5), runtara.Page[runtara.CheckpointRecord])
    assert_type(await rt.list_events("a", type="custom", text="x"), runtara.Page[runtara.EventRecord])
    assert_type(await rt.count_events("a", type=runtara.EventType.CUSTOM, root_only=True), int)
    steps = await rt.list_steps("a", statuses=frozenset({runtara.StepStatus.FAILED}))
    assert_type(steps, runtara.Page[runtara.StepRecord])
    assert_type(await rt.count_steps("a", scope_id="s"), int)
    assert_type(await rt.list_waits("a"), runtara.Page[runtara.WaitRecord])
    assert_type(await rt.list_signals("a"), runtara.Page[runtara.SignalRecord])
    assert_type(await rt.list_errors("a"), runtara.Page[runtara.ErrorRecord])
    assert_type(await rt.list_attempts("a"), runtara.Page[runtara.RetryAttemptRecord])
    log = await rt.list_compensation_log("a")
    assert_type(log, runtara.Page[runtara.CompensationAttemptRecord])
    assert_type(await rt.count_compensation_log("a"), int)
    assert_type(await rt.last_compensation("a"), runtara.CompensationAttemptRecord | None)
    assert_type(await rt.error_chain("a", 5), tuple[runtara.ErrorRecord, ...])
    assert_type(await rt.count_checkpoints("a", created_from=0), int)
    assert_type(await rt.counts(), dict[runtara.Status, int])
    [violation] = await rt.violations()
    assert_type(violation.stuck, runtara.Stuck)
    assert_type(violation.record, runtara.InstanceRecord)
    await rt.list_instances(created_from="2026-01-31")  # type: ignore[arg-type]
    assert_type(await rt.count_records("a", runtara.EventRecord), int)
    await rt.list_checkpoints("a", offset=5)  # type: ignore[call-arg]
    await rt.count_records("a", runtara.Page)  # type: ignore[type-var]


def values(error: runtara.RuntaraError) -> None:
    assert_type(error.code, str)
    assert_type(error.retryable, bool)
    assert_type(error.retry_after_seconds, float | None)
    assert_type(error.details, dict[str, str | int | float | bool | None])
    assert_type(runtara.to_datetime(0), datetime.datetime)
    assert_type(runtara.Settings(drain_seconds=1).drain_seconds, float)
    clock: runtara.Clock = runtara.SystemClock()
    assert_type(clock.now_us(), int)
