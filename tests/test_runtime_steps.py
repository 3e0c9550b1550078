"""Step summaries of a whole runtime, from events as an instance reports them."""

from pathlib import Path

import pytest
import trio

from runtara import Change, Runtime, StepStatus
from tests.runtimes import STORES, runtime, url_on

START, END = "step_debug_start", "step_debug_end"


@pytest.fixture(params=STORES[1:])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store that outlives its runtime."""
    return url_on(request.param, tmp_path)


async def test_a_restart_in_the_middle_of_a_step_ends_it_properly(url: str) -> None:
    async with runtime(url) as rt, rt.register("a") as inst:
        await inst.emit(START, b'{"step_id": "x", "scope_id": "s", "inputs": [1]}', request_id="begin")
        await inst.emit(START, b'{"step_id": "x"}')
    async with runtime(url) as rt, rt.register("a") as inst:
        await inst.emit(START, b'{"step_id": "x", "scope_id": "s", "inputs": [1]}', request_id="begin")
        await inst.emit(END, b'{"step_id": "x", "scope_id": "s", "outputs": "ok"}')
        await inst.complete()
    async with runtime(url) as rt:
        left, done = (await rt.list_steps("a")).items
        assert (left.status, left.scope_id, left.completed_at) == (StepStatus.RUNNING, None, None)
        assert (done.status, done.scope_id) == (StepStatus.COMPLETED, "s")
        assert (done.inputs, done.outputs, done.error) == ([1], "ok", None)
        assert await rt.count_steps("a") == 2


async def test_a_watcher_hears_of_steps(url: str) -> None:
    seen: list[Change] = []

    async def watch(rt: Runtime, *, task_status: trio.TaskStatus[None]) -> None:
        async with rt.watch("a") as changes:
            task_status.started()
            async for change in changes:
                seen.append(change)

    async with runtime(url) as rt, rt.register("a") as inst, trio.open_nursery() as nursery:
        await nursery.start(watch, rt)
        await inst.emit(START, b'{"step_id": "x"}')
        await inst.emit(END, b'{"step_id": "x"}')
        await inst.emit(END, b'{"step_id": "x"}')
        await inst.complete()
    assert [change.kinds for change in seen[1:4]] == [
        ("event", "request", "step"),
        ("event", "request", "step"),
        ("event", "request"),
    ]
