"""The appendix of the design: every name, every number, and every field of a record."""

import datetime
import enum
from collections.abc import Mapping
from typing import Any, get_args

import attrs
import pytest

from runtara import messages, records
from runtara.actors.instance import KINDS
from runtara.machine import RULES, RULES_WHILE_RUNNING
from runtara.messages import InstanceView, Request, SessionRequest
from runtara.records import (
    CheckpointRecord,
    CompensationAttemptRecord,
    CompensationSpec,
    CompensationState,
    ErrorCategory,
    ErrorRecord,
    ErrorSeverity,
    EventRecord,
    EventType,
    InstanceRecord,
    PayloadKind,
    Reason,
    RetryAttemptRecord,
    RetryHint,
    SignalRecord,
    SignalType,
    Status,
    StepRecord,
    StepStatus,
    WaitKind,
    WaitOutcome,
    WaitRecord,
    to_datetime,
    to_us,
)
from runtara.validation import CHECKS

WORDS: list[tuple[type[records.Named], Mapping[str, int]]] = [
    (SignalType, {"cancel": 0, "pause": 1, "resume": 2, "shutdown": 3, "custom": 4}),
    (
        EventType,
        {"heartbeat": 0, "started": 1, "completed": 2, "failed": 3, "suspended": 4, "custom": 5},
    ),
    (
        Status,
        {
            "unknown": 0,
            "pending": 1,
            "running": 2,
            "suspended": 3,
            "completed": 4,
            "failed": 5,
            "cancelled": 6,
        },
    ),
    (ErrorCategory, {"unknown": 0, "transient": 1, "permanent": 2, "business": 3}),
    (ErrorSeverity, {"info": 0, "warning": 1, "error": 2, "critical": 3}),
    (
        RetryHint,
        {
            "unknown": 0,
            "retry_immediately": 1,
            "retry_with_backoff": 2,
            "retry_after": 3,
            "do_not_retry": 4,
        },
    ),
    (CompensationState, {"none": 0, "pending": 1, "triggered": 2, "completed": 3, "failed": 4}),
    # Words of our own; what is stored must not change either.
    (
        Reason,
        {
            "sleeping": 1,
            "waiting_signal": 2,
            "paused": 3,
            "shutdown_requested": 4,
            "disconnected": 5,
            "compensating": 6,
            "completed": 7,
            "application_error": 8,
            "cancelled": 9,
            "crashed": 10,
            "timeout": 11,
            "attempts_exhausted": 12,
            "orphaned": 13,
        },
    ),
    (WaitKind, {"sleep": 0, "signal": 1, "retry": 2}),
    (WaitOutcome, {"elapsed": 0, "received": 1, "timed_out": 2}),
    (PayloadKind, {"input": 0, "output": 1, "error": 2, "stderr": 3}),
    (StepStatus, {"running": 0, "completed": 1, "failed": 2}),
]


@pytest.mark.parametrize(("kind", "numbers"), WORDS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_word_has_its_number(kind: type[records.Named], numbers: Mapping[str, int]) -> None:
    assert {member.word: int(member) for member in kind} == numbers


def test_the_table_of_words_is_complete() -> None:
    named = {
        value
        for value in vars(records).values()
        if isinstance(value, enum.EnumType) and issubclass(value, records.Named)
    }
    assert {kind for kind, _ in WORDS} == named - {records.Named}


def test_completed_failed_and_cancelled_are_the_terminal_states() -> None:
    assert [s.word for s in Status if s.is_terminal] == ["completed", "failed", "cancelled"]


FIELDS: list[tuple[type[Any], str]] = [
    (
        InstanceRecord,
        "tenant_id instance_id workflow definition_version status reason epoch revision checkpoint_id"
        " attempt max_attempts created_at started_at finished_at last_activity_us sleep_until deadline_us"
        " termination_reason exit_code peak_memory_bytes cpu_time_us cancelling_us intended"
        " compensation_state compensation_reason",
    ),
    (InstanceView, "record input output error stderr unconsumed_signals checkpoint_id last_activity"),
    (CheckpointRecord, "revision checkpoint_id state created_at is_compensatable compensation"),
    (CompensationSpec, "step_id data order"),
    (records.CompensationRecord, "checkpoint_id step_id order state attempts"),
    (
        EventRecord,
        "revision type checkpoint_id payload created_at subtype applied scope_id parent_scope_id",
    ),
    (
        StepRecord,
        "step_id step_name step_type status started_at completed_at duration_ms inputs outputs error"
        " scope_id parent_scope_id",
    ),
    (SignalRecord, "signal_id type key payload created_at acknowledged_us"),
    (
        RetryAttemptRecord,
        "checkpoint_id attempt created_us error category severity retry_hint retry_after_us error_code",
    ),
    (
        ErrorRecord,
        "error_id checkpoint_id step_id code message category severity retry_hint retry_after_us attributes"
        " cause_id created_at",
    ),
    (
        CompensationAttemptRecord,
        "revision checkpoint_id step_id attempt started_us finished_us success error_message error_id",
    ),
    (WaitRecord, "revision wait_id kind key deadline_us created_us outcome"),
]


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in FIELDS for name in names.split()])
def test_every_record_has_the_fields_of_the_appendix(kind: type[Any], name: str) -> None:
    assert name in attrs.fields_dict(kind) or isinstance(getattr(kind, name), property)


def test_an_instance_has_three_attempts_unless_it_says_otherwise() -> None:
    assert attrs.fields_dict(InstanceRecord)["max_attempts"].default == 3
    assert attrs.fields_dict(messages.StartInstance)["max_attempts"].default == 3


def test_instants_are_whole_microseconds_of_utc() -> None:
    instant = datetime.datetime(2026, 3, 29, 2, 30, 0, 1, tzinfo=datetime.UTC)
    assert to_us(instant) == 1_774_751_400_000_001
    assert to_datetime(to_us(instant)) == instant
    berlin = datetime.timezone(datetime.timedelta(hours=2))
    assert to_us(datetime.datetime(1970, 1, 1, 2, tzinfo=berlin)) == 0
    with pytest.raises(ValueError, match="time zone"):
        to_us(datetime.datetime(2026, 1, 1))


# ---------------------------------------------------------------- nothing is said that nobody understands


def test_every_request_has_one_rule() -> None:
    assert not RULES.keys() & RULES_WHILE_RUNNING.keys()
    assert {*RULES, *RULES_WHILE_RUNNING} == members_of(Request)


def test_every_request_of_a_session_carries_its_epoch() -> None:
    assert all("epoch" in attrs.fields_dict(kind) for kind in members_of(SessionRequest))


def test_every_request_from_outside_is_checked_at_the_door() -> None:
    own = {
        messages.GetStatus,
        messages.Wake,
        messages.SessionLost,
        messages.AskShutdown,
        messages.ForceSuspend,
    }
    assert members_of(Request) - own == set(CHECKS)


def test_everything_that_a_change_writes_has_a_word_for_watchers() -> None:
    assert set(KINDS) == members_of(records.Op)


def members_of(union: Any) -> set[type[Any]]:
    return set(get_args(union))
