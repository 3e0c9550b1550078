"""A store as an operator meets it, with everything in it that can be asked for.

It is written without a runtime, so every instant in it is known: they are seconds after `NOON`.
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Final

import attrs

from runtara.config import Settings
from runtara.persistence.store import Store, Unit
from runtara.randomness import SystemRandomness
from runtara.records import (
    CompensationSpec,
    EventType,
    InstanceRecord,
    Op,
    PayloadKind,
    PutPayload,
    Reason,
    Status,
    StepStatus,
    to_us,
)
from runtara.runtime import open_store
from runtara.testing import samples

NOON: Final = datetime(2026, 1, 31, 12, tzinfo=UTC)
HOSTILE: Final = "declined \x1b[31m\x1b]0;title\x07 [red]markup[/red] \u202e\nnext"
"""A text that would control a terminal, reorder its line, and be markup."""


def at(seconds: float) -> int:
    """Microseconds of UTC."""
    return to_us(NOON) + round(seconds * 1_000_000)


def units(record: InstanceRecord, payloads: Sequence[PutPayload], history: Sequence[Op]) -> list[Unit]:
    """The instance, and each record of its history at its own revision."""
    after = [samples.unit(record.row, getattr(op, "revision", 90), op) for op in history]
    return [samples.creation(record, *payloads), *after]


def instance(row: int, instance_id: str, seconds: float, **fields: Any) -> InstanceRecord:
    made: dict[str, Any] = {
        "tenant_id": "default",
        "instance_id": instance_id,
        "created_us": at(seconds),
        "last_activity_us": at(seconds),
    }
    return samples.instance(row, **(made | fields))


def as_json(**values: object) -> bytes:
    return json.dumps(values).encode()


def paid(row: int) -> list[Unit]:
    record = instance(
        row,
        "paid",
        0,
        workflow="orders",
        status=Status.COMPLETED,
        reason=Reason.COMPLETED,
        started_us=at(0),
        finished_us=at(60),
    )
    payloads = [
        PutPayload(kind=PayloadKind.INPUT, data=b"\xff\x00"),
        PutPayload(kind=PayloadKind.OUTPUT, data="delivered \u00e9".encode()),
    ]
    return units(record, payloads, [])


def lost(row: int) -> list[Unit]:
    """The one with a history: revisions 2 to 17."""
    record = instance(
        row,
        "lost",
        1,
        workflow="orders",
        status=Status.FAILED,
        reason=Reason.APPLICATION_ERROR,
        finished_us=at(120),
        exit_code=-9,
        peak_memory_bytes=2**40,
    )
    payloads = [
        PutPayload(kind=PayloadKind.ERROR, data=HOSTILE.encode()),
        PutPayload(kind=PayloadKind.STDERR, data=b"trace"),
    ]
    undo = CompensationSpec(step_id="refund", data=b"receipt", order=1)
    history: list[Op] = [
        samples.checkpoint(2, checkpoint_id="reserved", state=b"\xff", created_us=at(10)),
        samples.checkpoint(3, checkpoint_id="charged", created_us=at(20), compensation=undo),
        samples.event(
            4,
            subtype="step_debug_start",
            created_us=at(30),
            scope_id="s1",
            payload=as_json(step_id="charge", inputs={"amount": 7}),
        ),
        samples.step(4, step_id="charge", step_name="Charge", scope_id="s1", started_us=at(30)),
        samples.event(
            5,
            subtype="step_debug_end",
            created_us=at(31.5),
            scope_id="s1",
            payload=as_json(step_id="charge", outputs={"ok": False}, error="card"),
        ),
        samples.finish_step(4, 5, status=StepStatus.FAILED, finished_us=at(31.5)),
        samples.event(
            6,
            subtype="workflow_log",
            created_us=at(40),
            scope_id="s2",
            parent_scope_id="s1",
            payload=HOSTILE.encode(),
        ),
        samples.event(7, type=EventType.HEARTBEAT, subtype=None, created_us=at(50)),
        samples.event(8, subtype="workflow_log", created_us=at(60), payload=b"\xff card \x00"),
        samples.event(9, type=EventType.FAILED, subtype=None, created_us=at(120), applied=False),
        samples.step(10, step_id="ship", step_type="mail", scope_id="s2", parent_scope_id="s1"),
        samples.signal(11),
        samples.signal(12, shown_us=at(1), acknowledged_us=at(2)),
        samples.error(13, message=HOSTILE),
        samples.error(14, code="E_ORDER", cause_id=13, created_us=at(70)),
        samples.attempt(15),
        samples.compensation_attempt(16, attempt=1, finished_us=at(80), success=False),
        samples.compensation_attempt(17, attempt=2, finished_us=at(90), success=True),
    ]
    return units(record, payloads, history)


def resting(row: int, instance_id: str, seconds: float, reason: Reason, **fields: Any) -> InstanceRecord:
    return instance(row, instance_id, seconds, status=Status.SUSPENDED, reason=reason, **fields)


async def fill(store: Store) -> None:
    """Five instances of ``default`` and two of ``acme``; the last of each is stuck."""
    row = await store.reserve(7)
    idle = resting(row + 2, "idle", 2, Reason.DISCONNECTED, awaits_client_us=at(5))
    waiting = resting(row + 3, "waiting", 3, Reason.WAITING_SIGNAL)
    stuck = resting(row + 4, "stuck", 4, Reason.WAITING_SIGNAL)
    theirs = instance(row + 5, "paid", 5, tenant_id="acme", workflow="orders")
    their_stuck = attrs.evolve(stuck, row=row + 6, tenant_id="acme", created_us=at(6))
    wait = samples.wait(2, deadline_us=None)
    await store.apply(
        [
            *paid(row),
            *lost(row + 1),
            *units(idle, [], []),
            *units(waiting, [], [wait]),
            *units(stuck, [], []),
            *units(theirs, [], []),
            *units(their_stuck, [], []),
        ]
    )


@asynccontextmanager
async def written(url: str) -> AsyncIterator[Store]:
    """The store at ``url``, open for writing."""
    async with open_store(url, Settings(), SystemRandomness(), True) as store:
        yield store


async def make_store(url: str) -> None:
    async with written(url) as store:
        await fill(store)
