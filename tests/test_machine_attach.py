"""Going on with a session whose connection was lost with the server that held it."""

import attrs
import pytest

from runtara.errors import Conflict, InvalidInstanceState, StaleEpoch
from runtara.limits import Limits
from runtara.machine import decide
from runtara.machine.state import Facts, InstanceState
from runtara.messages import Attach, Registered, SessionLost, SignalPush
from runtara.records import EventRecord, InstanceRecord, Reason, SignalRecord, SignalType, Status

NOW = 1_000_000
FACTS = Facts(tenant_id="t", instance_id="i")


def lost(**changes: object) -> InstanceState:
    """A running instance whose session's connection is gone."""
    fields: dict[str, object] = {
        "row": 1,
        "tenant_id": "t",
        "instance_id": "i",
        "status": Status.RUNNING,
        "epoch": 7,
        "attempt": 2,
        "revision": 5,
        "created_us": 1,
        "last_activity_us": 1,
        **changes,
    }
    row = InstanceRecord(**fields)  # type: ignore[arg-type]
    return InstanceState(row=row, revision=5, last_activity_us=1)


def test_attaching_keeps_the_epoch_and_counts_no_attempt() -> None:
    decision = decide(lost(), Attach(epoch=7), FACTS, NOW, Limits())
    assert decision.state is not None
    assert isinstance(decision.reply, Registered)
    assert decision.reply.epoch == 7
    assert decision.reply.attempt == 2
    assert decision.state.row == lost().row
    assert decision.state.connected
    assert decision.supersedes
    [event] = decision.ops
    assert isinstance(event, EventRecord)
    assert event.subtype == "attached"


def test_pending_signals_are_pushed_again() -> None:
    signal = SignalRecord(revision=4, type=SignalType.PAUSE, created_us=1)
    decision = decide(attrs.evolve(lost(), signals=(signal,)), Attach(epoch=7), FACTS, NOW, Limits())
    [push] = decision.pushes
    assert isinstance(push, SignalPush)
    assert push.signal.signal_id == 4


def test_a_paused_instance_is_attached_and_stays_paused() -> None:
    decision = decide(
        lost(status=Status.SUSPENDED, reason=Reason.PAUSED), Attach(epoch=7), FACTS, NOW, Limits()
    )
    assert isinstance(decision.reply, Registered)
    assert decision.reply.paused
    assert decision.reply.status is Status.SUSPENDED


def test_only_the_newest_epoch_may_attach() -> None:
    with pytest.raises(StaleEpoch):
        decide(lost(), Attach(epoch=6), FACTS, NOW, Limits())


def test_a_session_that_is_held_is_not_taken() -> None:
    with pytest.raises(Conflict, match="epoch"):
        decide(attrs.evolve(lost(), connected=True), Attach(epoch=7), FACTS, NOW, Limits())


@pytest.mark.parametrize(
    "changes",
    [
        {"status": Status.SUSPENDED, "reason": Reason.DISCONNECTED},
        {"status": Status.COMPLETED, "reason": Reason.COMPLETED, "finished_us": 2},
        {"status": Status.PENDING},
    ],
)
def test_a_session_that_is_over_is_not_attached(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidInstanceState):
        decide(lost(**changes), Attach(epoch=7), FACTS, NOW, Limits())


def test_the_end_of_the_grace_period_leaves_a_session_that_came_back() -> None:
    held = attrs.evolve(lost(), connected=True)
    decision = decide(held, SessionLost(epoch=7, orphaned=True), FACTS, NOW, Limits())
    assert decision.state is held
    assert decision.ops == ()
    decision = decide(lost(), SessionLost(epoch=7, orphaned=True), FACTS, NOW, Limits())
    assert decision.state is not None
    assert decision.state.row.status is Status.SUSPENDED
