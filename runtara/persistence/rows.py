"""Records to rows and back, as data: a `Table` for each kind that is appended, a `Change` for what moves.

Rules:

1. A column has the name of its field. Words are stored as their numbers, truth as 0 and 1.
2. `Table.values` gives the columns of a record in the order of `Table.columns`, without its instance.
3. A checkpoint's compensation is a row of another table; `CHECKPOINTS` reads it back beside its own.
4. A number that is no known word is refused where something is decided by it, and shown as a `stand_in` in
   lists: one bad row hides no others.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar, get_args

import attrs

from runtara.errors import StoreCorrupt
from runtara.records import (
    AcknowledgeSignal,
    CheckpointRecord,
    CompensationAttemptRecord,
    CompensationRecord,
    CompensationSpec,
    CompensationState,
    ErrorRecord,
    EventRecord,
    FinishCompensationAttempt,
    FinishStep,
    InstanceRecord,
    Named,
    PutPayload,
    RequestRecord,
    RetryAttemptRecord,
    SetCompensation,
    SettleWait,
    SignalRecord,
    StepRecord,
    WaitRecord,
)

Value = int | str | bytes | None
Row = tuple[Value, ...]
Decoder = Callable[[Any], object]

A = TypeVar("A")


def names(columns: Iterable[str], of: str = "") -> str:
    """Columns as SQL writes them, ``of`` a table."""
    return ", ".join(f'{of}"{column}"' for column in columns)


def decoder_of(hint: object) -> Decoder | None:
    """How a column of a field with this type is read back; None: as it is."""
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and (kind is bool or issubclass(kind, Named)):
            return kind
    return None


def known(decode: Decoder, number: Any) -> object:
    return decode(number)


def known_or_stand_in(decode: Decoder, number: Any) -> Any:
    try:
        return decode(number)
    except ValueError:
        return stand_in(decode, number)


def stand_in(kind: Any, number: int) -> Any:
    """For a number that is no member of ``kind``: its word is ``?`` and the number."""
    found = int.__new__(kind, number)
    found._value_, found._name_ = number, f"?{number}"
    return found


@attrs.frozen(kw_only=True)
class Table(Generic[A]):
    """One kind of record, and the table that holds it."""

    name: str
    make: Callable[..., A]
    columns: tuple[str, ...]
    values: Callable[[A], Row]
    decoders: tuple[tuple[int, Decoder], ...]
    """For the columns that are not read back as they are: position and type."""

    def record(self, row: Sequence[Value]) -> A:
        """The record of a row that holds `columns` in order.

        Raises:
            StoreCorrupt: A number in it is no known word.
        """
        try:
            return self.decoded(row, known)
        except ValueError as error:
            raise StoreCorrupt(f"{self.name}: {error}") from error

    def listed(self, row: Sequence[Value]) -> A:
        """As `record`, for lists (rule 4)."""
        return self.decoded(row, known_or_stand_in)

    def decoded(self, row: Sequence[Value], read: Callable[[Decoder, Any], object]) -> A:
        found: list[object] = list(row)
        for position, decode in self.decoders:
            if found[position] is not None:
                found[position] = read(decode, found[position])
        return self.make(**dict(zip(self.columns, found, strict=True)))


def table(name: str, kind: type[A], without: frozenset[str] = frozenset()) -> Table[A]:
    """The table of a record class: all its fields but ``without``."""
    fields: dict[str, attrs.Attribute[Any]] = {
        field.name: field
        for field in attrs.fields(kind)  # type: ignore[arg-type]  # that A is an attrs class cannot be said
        if field.name not in without
    }
    hints = [decoder_of(field.type) for field in fields.values()]
    return Table(
        name=name,
        make=kind,
        columns=tuple(fields),
        values=attrgetter(*fields),
        decoders=tuple((at, hint) for at, hint in enumerate(hints) if hint is not None),
    )


# ---------------------------------------------------------------- tables

INSTANCES: Final = table("instances", InstanceRecord)
CHECKPOINTS: Final = table("checkpoints", CheckpointRecord, without=frozenset({"compensation"}))
COMPENSATIONS: Final = table("compensations", CompensationRecord)
WAITS: Final = table("waits", WaitRecord)
EVENTS: Final = table("events", EventRecord)
STEPS: Final = table("steps", StepRecord, without=frozenset({"start_payload", "end_payload"}))
SIGNALS: Final = table("signals", SignalRecord)
RETRY_ATTEMPTS: Final = table("retry_attempts", RetryAttemptRecord)
ERRORS: Final = table("errors", ErrorRecord)
COMPENSATION_ATTEMPTS: Final = table("compensation_attempts", CompensationAttemptRecord)
REQUESTS: Final = table("requests", RequestRecord)

APPENDED: Final[Mapping[type, Table[Any]]] = {
    CheckpointRecord: CHECKPOINTS,
    WaitRecord: WAITS,
    EventRecord: EVENTS,
    StepRecord: STEPS,
    SignalRecord: SIGNALS,
    RetryAttemptRecord: RETRY_ATTEMPTS,
    ErrorRecord: ERRORS,
    CompensationAttemptRecord: COMPENSATION_ATTEMPTS,
    RequestRecord: REQUESTS,
}
"""Every table whose rows carry a revision, by the class of its records."""

HISTORY: Final = (*(table.name for table in APPENDED.values()), "compensations", "payloads")
"""Every table whose rows belong to an instance."""

LARGE: Final[Mapping[str, tuple[str, ...]]] = {
    "checkpoints": ("state",),
    "events": ("payload",),
    "signals": ("payload",),
    "retry_attempts": ("error",),
    "errors": ("message", "attributes"),
    "compensation_attempts": ("error_message",),
    "requests": ("answer",),
    "compensations": ("data",),
    "payloads": ("data",),
}
"""The columns of a table that may hold large values."""

COMPENSATION_COLUMNS: Final = ("revision", "checkpoint_id", "step_id", "order", "state", "attempts", "data")


def compensation_row(checkpoint: CheckpointRecord, spec: CompensationSpec) -> Row:
    """The pending compensation that a checkpoint with ``spec`` brings with it."""
    return (
        checkpoint.revision,
        checkpoint.checkpoint_id,
        spec.step_id,
        spec.order,
        CompensationState.PENDING,
        0,
        spec.data,
    )


SPEC_COLUMNS: Final = ("step_id", "data", "order")


def checkpoint_record(row: Sequence[Value]) -> CheckpointRecord:
    """A checkpoint, from its own columns and then `SPEC_COLUMNS`, all NULL if it has no compensation."""
    own, spec = row[: len(CHECKPOINTS.columns)], row[len(CHECKPOINTS.columns) :]
    record = CHECKPOINTS.record(own)
    if spec[0] is None:
        return record
    parts: dict[str, Any] = dict(zip(SPEC_COLUMNS, spec, strict=True))
    return attrs.evolve(record, compensation=CompensationSpec(**parts))


PAYLOADS_OF_STEP: Final = ("start_payload", "end_payload")


def step_record(row: Sequence[Value]) -> StepRecord:
    """A step, from its own columns and then the payloads of the events that began and ended it."""
    own, payloads = row[: len(STEPS.columns)], row[len(STEPS.columns) :]
    parts: dict[str, Any] = dict(zip(PAYLOADS_OF_STEP, payloads, strict=True))
    return attrs.evolve(STEPS.listed(own), **parts)


# ---------------------------------------------------------------- changes


@attrs.frozen(kw_only=True)
class Change:
    """An update of rows that are there: found by their instance and ``keys``, moved in ``columns``."""

    table: str
    keys: tuple[str, ...]
    columns: tuple[str, ...]
    key: Callable[[Any], Row]
    values: Callable[[Any], Row]


def several(*names: str) -> Callable[[Any], Row]:
    """The named attributes, as a tuple also when it is only one."""
    first, *others = names
    if others:
        return attrgetter(first, *others)
    get = attrgetter(first)
    return lambda op: (get(op),)


CHANGES: Final[Mapping[type, Change]] = {
    SettleWait: Change(
        table="waits",
        keys=("wait_id",),
        columns=("outcome", "settled_us"),
        key=several("wait_id"),
        values=several("outcome", "settled_us"),
    ),
    FinishStep: Change(
        table="steps",
        keys=("revision",),
        columns=("status", "finished_us", "end_revision"),
        key=several("start_revision"),
        values=several("status", "finished_us", "end_revision"),
    ),
    AcknowledgeSignal: Change(
        table="signals",
        keys=("revision",),
        columns=("shown_us", "acknowledged_us"),
        key=several("signal_id"),
        values=several("shown_us", "acknowledged_us"),
    ),
    SetCompensation: Change(
        table="compensations",
        keys=("checkpoint_id",),
        columns=("state", "attempts"),
        key=several("checkpoint_id"),
        values=several("state", "attempts"),
    ),
    FinishCompensationAttempt: Change(
        table="compensation_attempts",
        keys=("checkpoint_id", "attempt"),
        columns=("finished_us", "success", "error_message", "error_id"),
        key=several("checkpoint_id", "attempt"),
        values=several("finished_us", "success", "error_message", "error_id"),
    ),
}

FIXED: Final = frozenset({"row", "tenant_id", "instance_id", "created_us"})
"""Columns of an instance that are written once; an update leaves them, and their indexes, alone."""

MOVING: Final = tuple(name for name in INSTANCES.columns if name not in FIXED)
moving_values: Final[Callable[[InstanceRecord], Row]] = attrgetter(*MOVING)

PAYLOAD_COLUMNS: Final = ("kind", "data")


def payload_row(op: PutPayload) -> Row:
    return (op.kind, op.data)
