"""An instance that moves while it is exported is exported as it was at one moment.

A plan of changes, such as the machine makes them, is carried out bit by bit between the reads of an export.
What it has written must be what an export of a store at rest writes, after some part of the plan.
"""

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from runtara.errors import StoreUnavailable
from runtara.persistence.store import Store, Unit
from runtara.records import (
    AcknowledgeSignal,
    CompensationState,
    FinishCompensationAttempt,
    InstanceRecord,
    Op,
    PayloadKind,
    PutPayload,
    SetCompensation,
    SettleWait,
    Status,
    WaitOutcome,
)
from runtara.testing import samples
from runtara.transfer.reading import MOST_TRIES
from tests.sqlite_stores import opened
from tests.transfers import Exporting, content, exported

ROW = 1
START = samples.instance(ROW)
ACTIONS = (
    "checkpoint",
    "wait",
    "settle",
    "signal",
    "acknowledge",
    "step",
    "finish step",
    "try",
    "end try",
    "undo",
    "payload",
    "move",
)


@attrs.define
class Instance:
    """What the plan has made so far."""

    record: InstanceRecord = START
    revision: int = 1
    waits: list[str] = attrs.Factory(list)
    signals: list[int] = attrs.Factory(list)
    steps: list[int] = attrs.Factory(list)
    undoable: list[str] = attrs.Factory(list)
    attempts: dict[str, int] = attrs.Factory(dict)

    def change(self, action: str) -> Unit:
        """The next change; as the machine's, it moves the row if it appends no record."""
        guard = self.record
        self.revision += 1
        ops = self.operations(action, self.revision)
        if not any(hasattr(op, "revision") for op in ops) or action == "payload":
            self.record = attrs.evolve(
                self.record, revision=self.revision, status=Status(1 + self.revision % 3)
            )
            ops.append(self.record)
        return Unit(
            row=ROW,
            epoch=guard.epoch,
            base=guard.revision,
            revision=self.revision,
            ops=tuple(ops),
            size=512,
        )

    def operations(self, action: str, now: int) -> list[Op]:
        match action:
            case "checkpoint":
                self.undoable.append(f"step-{now}")
                return [samples.compensatable(now)]
            case "wait":
                self.waits.append(f"wait-{now}")
                return [samples.wait(now)]
            case "settle" if self.waits:
                settled = SettleWait(wait_id=self.waits.pop(0), outcome=WaitOutcome.ELAPSED, settled_us=now)
                return [settled, samples.event(now)] if now % 2 else [settled]
            case "signal":
                self.signals.append(now)
                return [samples.signal(now)]
            case "acknowledge" if self.signals:
                return [AcknowledgeSignal(signal_id=self.signals.pop(), shown_us=now, acknowledged_us=now)]
            case "step":
                self.steps.append(now)
                return [samples.event(now, subtype="step_debug_start", payload=b"{}"), samples.step(now)]
            case "finish step" if self.steps:
                finish = samples.finish_step(self.steps.pop(0), now)
                return [samples.event(now, subtype="step_debug_end", payload=b"{}"), finish]
            case "try" if self.undoable:
                name = self.undoable[0]
                self.attempts[name] = self.attempts.get(name, 0) + 1
                attempt = samples.compensation_attempt(now, checkpoint_id=name, attempt=self.attempts[name])
                return [self.compensation(name, CompensationState.TRIGGERED), attempt]
            case "end try" if self.attempts:
                name, attempt_number = next(iter(self.attempts.items()))
                return [
                    FinishCompensationAttempt(
                        checkpoint_id=name,
                        attempt=attempt_number,
                        finished_us=now,
                        success=False,
                        error_message=f"at {now}",
                        error_id=None,
                    )
                ]
            case "undo" if self.attempts:
                name = next(iter(self.attempts))
                return [self.compensation(name, CompensationState.COMPLETED)]
            case "payload":
                return [
                    PutPayload(kind=PayloadKind(now % 4), data=b"%d" % now),
                    PutPayload(kind=PayloadKind.ERROR, data=b"%d" % now),
                ]
        return []

    def compensation(self, name: str, state: CompensationState) -> SetCompensation:
        return SetCompensation(checkpoint_id=name, state=state, attempts=self.attempts[name])


@attrs.define
class Moving:
    """A store in which the plan goes on before each read."""

    store: Store
    plan: list[Unit]
    steps: Sequence[int]
    """How many changes come before each read."""
    reads: int = 0

    async def go_on(self) -> None:
        self.reads += 1
        for _ in range(self.steps[self.reads % len(self.steps)]):
            if self.plan:
                await self.store.apply([self.plan.pop(0)])

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.store, name)
        if name not in ("load", "find", "payloads", "list_records"):
            return call

        async def read(*arguments: Any) -> Any:
            await self.go_on()
            return await call(*arguments)

        return read


def plan_of(actions: Sequence[str]) -> list[Unit]:
    instance = Instance()
    return [instance.change(action) for action in actions]


async def at_rest(plan: Sequence[Unit]) -> list[bytes]:
    """What is exported after each part of the plan."""
    async with opened(":memory:") as store:
        await store.apply([samples.creation(START)])
        found = [content(await exported(store))]
        for unit in plan:
            assert await store.apply([unit]) == frozenset()
            found.append(content(await exported(store)))
        return found


async def exported_moving(plan: list[Unit], before: int, steps: Sequence[int]) -> bytes:
    """What is exported when the first ``before`` changes come before it and the others during it."""
    async with opened(":memory:") as store:
        await store.apply([samples.creation(START)])
        for unit in plan[:before]:
            await store.apply([unit])
        moving = Moving(store, plan[before:], steps)
        return content(await exported(moving))


async def compare(before: Sequence[str], during: Sequence[str], steps: Sequence[int]) -> None:
    plan = plan_of([*before, *during])
    found = await exported_moving(plan, len(before), steps)
    assert found in (await at_rest(plan))[len(before) :]


actions = st.lists(st.sampled_from(ACTIONS), max_size=20)


@settings(max_examples=30, deadline=None)
@given(actions, actions, st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_an_instance_that_moves_is_exported_as_it_was_at_one_moment(
    before: list[str], during: list[str], steps: list[int]
) -> None:
    trio.run(compare, before, during, steps)


async def test_each_change_between_two_reads_is_left_out_as_a_whole() -> None:
    """Every kind of change, at every read of an export; the changes before it make all of them possible."""
    before = ["checkpoint", "wait", "wait", "signal", "signal", "step", "step", "try", "payload"]
    for action in ACTIONS:
        plan = plan_of([*before, action])
        wanted = (await at_rest(plan))[-2:]
        for read in range(1, 15):
            found = await exported_moving(plan, len(before), [0] * read + [1] + [0] * 40)
            assert found in wanted, (action, read)


async def test_an_instance_that_never_rests_is_given_up_in_the_end() -> None:
    plan = plan_of(["move"] * (5 * MOST_TRIES))
    async with opened(":memory:") as store:
        await store.apply([samples.creation(START)])
        exporting = Exporting()
        with pytest.raises(StoreUnavailable, match="acme/i1 moves faster than it can be read"):
            await exporting.run(Moving(store, plan, [1]))
        assert b'"instance"' not in exporting.data
