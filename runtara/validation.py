"""The door: what the fields of a request may hold. Every way in passes it, embedded or over a wire.

Rules:

1. A field that is ill formed is refused with `ValidationError`, one that is too long with
   `PayloadTooLarge`; both name the field. Nothing reached an actor.
2. Free text (error messages, names) is kept as it is, NUL included; a lone surrogate, which no database can
   hold, becomes U+FFFD, visibly.
3. Durations are finite, not negative, and at most `limits.MAX_DURATION_US`.
"""

import datetime
import json
import math
from collections.abc import Callable
from typing import Any, Final, TypeVar

import attrs

from runtara.errors import PayloadTooLarge, ValidationError
from runtara.ids import check_id, check_name
from runtara.limits import MAX_DURATION_US, MAX_INT, Limits
from runtara.messages import (
    AckSignal,
    Attach,
    ExitReport,
    FinishCompensation,
    ForceTerminate,
    GetCheckpoint,
    PollSignals,
    RecordError,
    RecordRetryAttempt,
    Register,
    ReportEvent,
    Request,
    SaveCheckpoint,
    SendSignal,
    Sleep,
    StartCompensation,
    StartInstance,
    WaitSignal,
)
from runtara.payloads import refuse_constant, storable
from runtara.records import (
    CompensationSpec,
    ErrorCategory,
    ErrorSeverity,
    EventType,
    Reason,
    RetryHint,
    SignalType,
    WaitKind,
    to_us,
)

MAX_JSON_DEPTH: Final = 32

M = TypeVar("M", RecordRetryAttempt, RecordError, FinishCompensation, ExitReport, ForceTerminate)
R = TypeVar("R", bound=Request)


# ---------------------------------------------------------------- single values


def duration_us(seconds: object, field: str) -> int:
    """A duration in seconds, as the API takes it, in microseconds (rounded up, so never early).

    Raises:
        ValidationError: Not a number, NaN, infinite, negative, or longer than the longest duration.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise ValidationError(field, f"must be a number of seconds, not {type(seconds).__name__}")
    if isinstance(seconds, float) and not math.isfinite(seconds):
        raise ValidationError(field, "must be finite")
    if seconds < 0:
        raise ValidationError(field, "must not be negative")
    if seconds > MAX_DURATION_US / 1e6:
        raise ValidationError(field, f"must be at most {MAX_DURATION_US // 1_000_000} seconds")
    return math.ceil(round(seconds * 1e6, 3))


def instant_us(value: object, field: str) -> int:
    """An instant, as the API takes it, in microseconds of UTC since 1970.

    Raises:
        ValidationError: A datetime without a time zone, another type, or a number that does not fit 64 bits.
    """
    if isinstance(value, datetime.datetime):
        if value.utcoffset() is None:
            raise ValidationError(field, "must have a time zone; a naive datetime has no place in time")
        return to_us(value)
    if type(value) is not int or abs(value) > MAX_INT:
        raise ValidationError(field, "must be an aware datetime, or whole microseconds of UTC in 64 bits")
    return value


def check_duration_us(value: object, field: str) -> None:
    if type(value) is not int or not 0 <= value <= MAX_DURATION_US:
        raise ValidationError(field, f"must be from 0 to {MAX_DURATION_US} microseconds")


def check_int(value: object, field: str, least: int = 0) -> None:
    if type(value) is not int or not least <= value <= MAX_INT:
        raise ValidationError(field, f"must be a whole number of at least {least} that fits 64 bits")


def check_bytes(value: object, field: str, limits: Limits) -> None:
    if not isinstance(value, bytes):
        raise ValidationError(field, f"must be bytes, not {type(value).__name__}")
    if len(value) > limits.payload_bytes:
        raise PayloadTooLarge(field, len(value), limits.payload_bytes)


def clean_text(value: object, field: str, limits: Limits) -> str:
    """Free text, with lone surrogates replaced (rule 2)."""
    if not isinstance(value, str):
        raise ValidationError(field, f"must be text, not {type(value).__name__}")
    if len(value) > limits.payload_bytes:
        raise PayloadTooLarge(field, len(value), limits.payload_bytes)
    value = storable(value)
    size = len(value.encode())
    if size > limits.payload_bytes:
        raise PayloadTooLarge(field, size, limits.payload_bytes)
    return value


def check_member(value: object, kind: type[Any], field: str) -> None:
    if not isinstance(value, kind):
        words = ", ".join(member.name.lower() for member in kind)
        raise ValidationError(field, f"must be one of {words}")


def check_json_object(value: str, field: str) -> None:
    """JSON text of an object, without NaN, duplicate keys, huge integers or deep nesting."""
    try:
        parsed = json.loads(
            value, object_pairs_hook=unique_pairs, parse_constant=refuse_constant, parse_int=small_int
        )
    except (ValueError, RecursionError) as exc:
        raise ValidationError(field, f"is not JSON: {exc}") from None
    if not isinstance(parsed, dict):
        raise ValidationError(field, "must be a JSON object")
    if depth(parsed) > MAX_JSON_DEPTH:
        raise ValidationError(field, f"is nested deeper than {MAX_JSON_DEPTH}")


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def small_int(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= int(text) <= MAX_INT:
        raise ValueError("an integer does not fit 64 bits")
    return int(text)


def depth(value: object) -> int:
    """How deep lists and objects are nested, without recursion of our own."""
    deepest, todo = 0, [(value, 1)]
    while todo:
        current, level = todo.pop()
        children = (
            current.values() if isinstance(current, dict) else current if isinstance(current, list) else ()
        )
        deepest = max(deepest, level)
        todo.extend((child, level + 1) for child in children)
    return deepest


# ---------------------------------------------------------------- requests


def register(message: Register, limits: Limits) -> Register:
    optional_name(message.checkpoint_id, "checkpoint_id")
    optional_id(message.workflow, "workflow")
    optional_id(message.definition_version, "definition_version")
    return message


def attach(message: Attach, limits: Limits) -> Attach:
    return message


def save_checkpoint(message: SaveCheckpoint, limits: Limits) -> SaveCheckpoint:
    check_name(message.checkpoint_id, "checkpoint_id")
    if message.state is not None:
        check_bytes(message.state, "state", limits)
    if message.compensation is not None:
        check_compensation(message.compensation, message.state, limits)
    return message


def check_compensation(spec: object, state: bytes | None, limits: Limits) -> None:
    if not isinstance(spec, CompensationSpec):
        raise ValidationError("compensation", "must be a CompensationSpec")
    if not state:
        raise ValidationError("compensation", "needs a checkpoint with a state")
    check_id(spec.step_id, "compensation.step_id")
    check_bytes(spec.data, "compensation.data", limits)
    check_int(spec.order, "compensation.order", least=-MAX_INT)


def get_checkpoint(message: GetCheckpoint, limits: Limits) -> GetCheckpoint:
    check_name(message.checkpoint_id, "checkpoint_id")
    return message


def sleep(message: Sleep, limits: Limits) -> Sleep:
    check_duration_us(message.duration_us, "duration_us")
    optional_name(message.checkpoint_id, "checkpoint_id")
    optional_bytes(message.state, "state", limits)
    if message.state and message.checkpoint_id is None:
        raise ValidationError("state", "needs a checkpoint_id to be stored under")
    check_member(message.kind, WaitKind, "kind")
    if message.kind is WaitKind.SIGNAL:
        raise ValidationError("kind", "must be sleep or retry")
    optional_id(message.request_id, "request_id")
    return message


def wait_signal(message: WaitSignal, limits: Limits) -> WaitSignal:
    check_name(message.key, "key")
    check_name(message.checkpoint_id, "checkpoint_id")
    if message.timeout_us is not None:
        check_duration_us(message.timeout_us, "timeout_us")
    return message


def report_event(message: ReportEvent, limits: Limits) -> ReportEvent:
    check_member(message.type, EventType, "type")
    if message.type is EventType.STARTED:
        raise ValidationError("type", "started is an event of the runtime's own")
    if message.type is EventType.CUSTOM:
        check_id(message.subtype, "subtype")
    elif message.subtype is not None:
        raise ValidationError("subtype", "belongs to custom events only")
    optional_name(message.checkpoint_id, "checkpoint_id")
    optional_bytes(message.payload, "payload", limits)
    optional_id(message.request_id, "request_id")
    check_timestamp(message.timestamp_us)
    check_suspension(message, limits)
    return message


def check_suspension(message: ReportEvent, limits: Limits) -> None:
    optional_bytes(message.state, "state", limits)
    if message.wake_after_us is not None:
        check_duration_us(message.wake_after_us, "wake_after_us")
        if message.type is not EventType.SUSPENDED:
            raise ValidationError("wake_after_us", "belongs to suspensions only")
    if message.state and (message.wake_after_us is None or message.checkpoint_id is None):
        raise ValidationError("state", "needs wake_after_us and a checkpoint_id to be stored under")


def check_timestamp(value: object) -> None:
    """A whole number; the machine takes the present for one outside the calendar."""
    if value is not None and type(value) is not int:
        raise ValidationError("timestamp_us", "must be a whole number of microseconds")


def poll_signals(message: PollSignals, limits: Limits) -> PollSignals:
    optional_name(message.checkpoint_id, "checkpoint_id")
    return message


def ack_signal(message: AckSignal, limits: Limits) -> AckSignal:
    if (message.signal_id is None) == (message.signal_type is None):
        raise ValidationError("signal_id", "give either signal_id or signal_type")
    if message.signal_type is SignalType.CUSTOM:
        raise ValidationError("signal_type", "custom signals are acknowledged by their id")
    if message.signal_id is not None:
        check_int(message.signal_id, "signal_id", least=1)
    else:
        check_member(message.signal_type, SignalType, "signal_type")
    if not isinstance(message.acknowledged, bool):
        raise ValidationError("acknowledged", "must be true or false")
    return message


def retry_attempt(message: RecordRetryAttempt, limits: Limits) -> RecordRetryAttempt:
    check_name(message.checkpoint_id, "checkpoint_id")
    check_int(message.attempt, "attempt", least=1)
    check_classes(message)
    optional_id(message.error_code, "error_code")
    check_timestamp(message.timestamp_us)
    return optional_text(message, "error", limits)


def record_error(message: RecordError, limits: Limits) -> RecordError:
    check_id(message.code, "code")
    optional_name(message.checkpoint_id, "checkpoint_id")
    optional_id(message.step_id, "step_id")
    check_classes(message)
    optional_id(message.request_id, "request_id")
    if message.cause_id is not None:
        check_int(message.cause_id, "cause_id", least=1)
    clean_text(message.message, "message", limits)
    message = optional_text(optional_text(message, "message", limits), "attributes", limits)
    if message.attributes is not None:
        check_json_object(message.attributes, "attributes")
    return message


def check_classes(message: RecordRetryAttempt | RecordError) -> None:
    check_member(message.category, ErrorCategory, "category")
    check_member(message.severity, ErrorSeverity, "severity")
    check_member(message.retry_hint, RetryHint, "retry_hint")
    if message.retry_after_us is not None:
        check_duration_us(message.retry_after_us, "retry_after_us")


def start_compensation(message: StartCompensation, limits: Limits) -> StartCompensation:
    check_name(message.checkpoint_id, "checkpoint_id")
    return message


def finish_compensation(message: FinishCompensation, limits: Limits) -> FinishCompensation:
    check_name(message.checkpoint_id, "checkpoint_id")
    check_int(message.attempt, "attempt", least=1)
    for name in ("success", "final"):
        if not isinstance(getattr(message, name), bool):
            raise ValidationError(name, "must be true or false")
    if message.error_id is not None:
        check_int(message.error_id, "error_id", least=1)
    return optional_text(message, "error_message", limits)


def exit_report(message: ExitReport, limits: Limits) -> ExitReport:
    check_member(message.reason, Reason, "reason")
    optional_name(message.checkpoint_id, "checkpoint_id")
    optional_bytes(message.stderr, "stderr", limits)
    optional_bytes(message.output, "output", limits)
    if message.exit_code is not None:
        check_int(message.exit_code, "exit_code", least=-MAX_INT)
    for name in ("peak_memory_bytes", "cpu_time_us"):
        if getattr(message, name) is not None:
            check_int(getattr(message, name), name)
    return optional_text(message, "error", limits)


def start_instance(message: StartInstance, limits: Limits) -> StartInstance:
    check_id(message.workflow, "workflow")
    optional_id(message.definition_version, "definition_version")
    optional_bytes(message.input, "input", limits)
    optional_id(message.request_id, "request_id")
    check_int(message.max_attempts, "max_attempts", least=1)
    if message.timeout_us is not None:
        check_duration_us(message.timeout_us, "timeout_us")
    return message


def send_signal(message: SendSignal, limits: Limits) -> SendSignal:
    check_member(message.type, SignalType, "type")
    if message.type is SignalType.CUSTOM:
        check_name(message.key, "key")
    elif message.key is not None:
        raise ValidationError("key", "belongs to custom signals only")
    optional_bytes(message.payload, "payload", limits)
    optional_id(message.request_id, "idempotency_key")
    if not isinstance(message.store_if_unknown, bool):
        raise ValidationError("store_if_unknown", "must be true or false")
    return message


def force_terminate(message: ForceTerminate, limits: Limits) -> ForceTerminate:
    return optional_text(message, "error", limits)


def optional_id(value: object, field: str) -> None:
    if value is not None:
        check_id(value, field)


def optional_name(value: object, field: str) -> None:
    if value is not None:
        check_name(value, field)


def optional_bytes(value: object, field: str, limits: Limits) -> None:
    if value is not None:
        check_bytes(value, field, limits)


def optional_text(message: M, name: str, limits: Limits) -> M:
    """``message`` with its text field ``name`` cleaned."""
    value = getattr(message, name)
    cleaned = None if value is None else clean_text(value, name, limits)
    changes: dict[str, Any] = {name: cleaned}
    return message if cleaned == value else attrs.evolve(message, **changes)


CHECKS: dict[type[Any], Callable[[Any, Limits], Any]] = {
    Register: register,
    Attach: attach,
    SaveCheckpoint: save_checkpoint,
    GetCheckpoint: get_checkpoint,
    Sleep: sleep,
    WaitSignal: wait_signal,
    ReportEvent: report_event,
    PollSignals: poll_signals,
    AckSignal: ack_signal,
    RecordRetryAttempt: retry_attempt,
    RecordError: record_error,
    StartCompensation: start_compensation,
    FinishCompensation: finish_compensation,
    ExitReport: exit_report,
    StartInstance: start_instance,
    SendSignal: send_signal,
    ForceTerminate: force_terminate,
}
"""The runtime's own requests are not here: nobody outside can send one."""


def check(message: R, limits: Limits) -> R:
    """``message`` with its text cleaned, if every field is well formed.

    Raises:
        ValidationError: Naming the field and the rule.
        PayloadTooLarge: Naming the field, its size and the limit.
    """
    rule = CHECKS.get(type(message))
    if rule is None:
        return message
    if hasattr(message, "epoch"):
        check_int(message.epoch, "epoch", least=1)
    checked: R = rule(message, limits)
    return checked


PAYLOADS: Final = frozenset(
    {"state", "payload", "input", "output", "stderr", "message", "error", "attributes"}
)


PAYLOAD_FIELDS: Final[dict[type[Any], tuple[str, ...]]] = {
    kind: tuple(field.name for field in attrs.fields(kind) if field.name in PAYLOADS) for kind in CHECKS
}
"""The fields of a request that may be large; the runtime's own requests have none."""


def size_of(message: Request) -> int:
    """Bytes that a message holds in memory, roughly: its payloads and a constant."""
    total = 512
    for name in PAYLOAD_FIELDS.get(type(message), ()):
        value = getattr(message, name)
        if value is not None:
            total += len(value)
    return total
