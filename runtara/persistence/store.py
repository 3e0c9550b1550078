"""The contract of a store. Every sentence marked with a letter and a number is a test of
`runtara.testing.check_store`, which runs over every backend.

Writing
    W1  `apply` writes all units of a batch and commits once; when it returns, all of them are durable.
    W2  When `apply` raises, nothing of the batch was written, with one exception: `OutcomeUnknown`
        means that the commit itself failed. Then, and only then, `settle` tells which it was.
    W3  The units of one instance in a batch form a chain, in order. The guard of its first unit is
        checked once against the stored row: same epoch, same revision of the row, or no row at all for a
        unit that creates the instance.
    W4  A chain whose guard fails is not written, and the others are; `apply` returns the rows of the
        chains that were left out.
    W5  A revision occurs once in each table of an instance; a second one is refused (`StoreRefused`)
        and nothing of the batch is written.
    W6  A checkpoint is never rewritten: a second one under the same id is refused (`StoreRefused`).
    W7  The large values of an instance are not read or rewritten when its row moves.
    W8  Within a batch, the last `InstanceRecord` of an instance wins, and the row is written once.

Reading
    R1  `load` returns all that an actor needs to go on: the row, the newest revision of any table, the
        newest checkpoint's id, pending signals, open waits, the newest running steps, compensations, the
        last error. None if there is no such instance.
    R2  Every read sees every batch whose `apply` returned before the read began.
    R3  Bytes and text come back exactly as they went in, NUL and any Unicode included.
    R4  Tenants are walls: the same instance id in two tenants is two instances.

Numbers
    N1  `reserve` returns the first of ``count`` numbers that were never returned before and never will
        be again, even after a crash, and even when instances are purged.

Time
    T1  `due` returns the instances whose ``sleep_until`` or deadline is at or before the given instant,
        earliest first, in stable pages; terminal ones never.

Asking
    A1  A page holds at most ``limit`` items, and its ``next`` cursor continues exactly where it ended: a
        record present during the whole walk is seen once, whatever is added or finished meanwhile.
    A2  `list` and `count` agree for every filter.
    A3  A cursor that was not made by the same list is refused with a `ValidationError`.
    A4  Records of an instance are ordered by revision, instances by creation or finish with the row as
        the tie-break.
    A5  A page also ends with the record that brings its large values to `PAGE_BYTES`, so it never holds
        more than that and one record; its ``next`` goes on behind it.
    A6  The text of an `EventFilter` is found in payloads byte by byte, whatever else they hold.
    A7  A step is listed with the payloads of the events that began and ended it.
    A8  `counts` agrees with `count_instances` for every status and tenant; `growth` with the rows there are.
    A9  `unexplained` returns every instance that neither its session, a dispatcher, a pause, its wake time
        nor its client moves, in pages by row.

Deleting
    D1  `terminal` returns the instances that ended with a status before an instant, by finish time, oldest
        first, in stable pages.
    D2  `purge` removes the given instances if they are terminal, and leaves all others; it returns the rows
        it removed. At once they are not found any more, and their ids start clean.
    D3  Their children go with them in the same transaction, up to a bound; the rest goes by `sweep`, also
        after a crash. When that returns False, nothing of any purged instance is left.

Notes
    K1  A note is kept, replaced and removed durably.

Closing
    C1  After `close`, everything raises `RuntimeClosed`; closing again does nothing.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Final, Generic, Protocol, TypeVar

import attrs

from runtara.errors import ValidationError
from runtara.limits import MEBIBYTE
from runtara.payloads import storable
from runtara.records import (
    CheckpointRecord,
    CompensationAttemptRecord,
    CompensationRecord,
    ErrorRecord,
    EventRecord,
    EventType,
    InstanceRecord,
    Op,
    PayloadKind,
    RequestRecord,
    RetryAttemptRecord,
    SignalRecord,
    Status,
    StepRecord,
    StepStatus,
    WaitRecord,
)

DEFAULT_PAGE: Final = 100
MAX_PAGE: Final = 1000
PAGE_BYTES: Final = 4 * MEBIBYTE
"""Large values of one page: states, payloads, error texts."""


# ---------------------------------------------------------------- writing


@attrs.frozen(kw_only=True)
class Unit:
    """All that one change of one instance writes."""

    row: int
    """Key of the instance, from `Store.reserve`."""
    epoch: int
    """Guard: the epoch that the stored row must have."""
    base: int
    """Guard: the revision that the stored row must have; 0 if the unit creates the instance."""
    revision: int
    """Of this change; every appended record of the unit carries it."""
    ops: tuple[Op, ...]
    size: int
    """Bytes that the unit holds in memory, roughly: its payloads and a constant."""


# ---------------------------------------------------------------- reading


@attrs.frozen(kw_only=True)
class Loaded:
    """All that an actor needs to go on with an instance."""

    record: InstanceRecord
    revision: int
    checkpoint_id: str | None
    signals: tuple[SignalRecord, ...]
    """Pending ones, oldest first."""
    waits: tuple[WaitRecord, ...]
    """Open ones, oldest first."""
    compensations: tuple[CompensationRecord, ...]
    last_error: ErrorRecord | None
    steps: tuple[StepRecord, ...]
    """The newest `OPEN_STEPS` that are running, oldest first, without their payloads."""
    checkpoint_ids: frozenset[str] | None
    """All of them, or None if there are more than the bound that was asked for."""
    wait_ids: frozenset[str] | None
    request_ids: frozenset[str] | None


@attrs.frozen(kw_only=True)
class Due:
    """An instance and the instant at which it must be looked at."""

    tenant_id: str
    instance_id: str
    row: int
    epoch: int
    deadline_us: int


T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Page(Generic[T]):
    """Some records, and where the next ones begin."""

    items: tuple[T, ...]
    next: str | None
    """Opaque; hand it back as ``cursor``. None: this was the last page."""


class InstanceOrder(Enum):
    CREATED = "created"
    FINISHED = "finished"


@attrs.frozen(kw_only=True)
class InstanceFilter:
    """Which instances. Ranges are half open: from (inclusive), before (exclusive)."""

    tenant_id: str | None = None
    """None: all tenants; only the root and the role admin may ask that."""
    statuses: frozenset[Status] = frozenset()
    """Empty: any."""
    workflow: str | None = None
    id_prefix: str | None = None
    created_from_us: int | None = None
    created_before_us: int | None = None
    finished_from_us: int | None = None
    finished_before_us: int | None = None
    awaits_client: bool = False
    """Only those that nothing but their client can move."""


def storable_text(filter: object, field: "attrs.Attribute[str | None]", value: str | None) -> None:
    if value is not None and (value == "" or storable(value) != value):
        raise ValidationError(field.name, "must be text of at least one character, without lone surrogates")


@attrs.frozen(kw_only=True)
class CheckpointFilter:
    """Which checkpoints. The range is half open."""

    created_from_us: int | None = None
    created_before_us: int | None = None


@attrs.frozen(kw_only=True)
class EventFilter:
    """Which events. Ranges are half open."""

    type: EventType | None = None
    subtype: str | None = None
    created_from_us: int | None = None
    created_before_us: int | None = None
    text: str | None = attrs.field(default=None, validator=storable_text)
    """Found in the payload, as UTF-8, case and all."""
    scope_id: str | None = None
    parent_scope_id: str | None = None
    root_only: bool = False
    """Only those without a parent scope."""


@attrs.frozen(kw_only=True)
class StepFilter:
    """Which steps."""

    statuses: frozenset[StepStatus] = frozenset()
    """Empty: any."""
    type: str | None = None
    step_ids: frozenset[str] = frozenset()
    """Empty: any."""
    scope_id: str | None = None
    parent_scope_id: str | None = None
    root_only: bool = False
    """Only those without a parent scope."""


RecordFilter = CheckpointFilter | EventFilter | StepFilter


@attrs.frozen(kw_only=True)
class PageRequest:
    """How much of a list, and from where."""

    limit: int = DEFAULT_PAGE
    cursor: str | None = None
    descending: bool = True

    def __attrs_post_init__(self) -> None:
        if type(self.limit) is not int or not 1 <= self.limit <= MAX_PAGE:
            raise ValidationError("limit", f"must be a whole number from 1 to {MAX_PAGE}")


R = TypeVar(
    "R",
    CheckpointRecord,
    WaitRecord,
    EventRecord,
    StepRecord,
    SignalRecord,
    ErrorRecord,
    RetryAttemptRecord,
    CompensationAttemptRecord,
    RequestRecord,
)
"""The records that an instance's history is made of; each kind is a list of its own."""


@attrs.frozen(kw_only=True)
class StoreStatistics:
    """What the store can say of itself without reading rows."""

    backend: str
    location: str
    batches: int
    units: int
    file_bytes: int | None
    log_bytes: int | None
    """Size of the write-ahead log."""


@attrs.frozen(kw_only=True)
class Finished:
    """An instance that has ended, and when."""

    tenant_id: str
    instance_id: str
    row: int
    finished_us: int


@attrs.frozen(kw_only=True)
class Purged:
    """What a purge did."""

    rows: frozenset[int]
    """The instances that are gone."""
    children_left: bool
    """Whether some of their history is still to be swept."""


@attrs.frozen(kw_only=True)
class Growth:
    """How large a store has become."""

    file_bytes: int | None
    log_bytes: int | None
    """Of the write-ahead log, where the store has one of its own."""
    rows: Mapping[str, int]
    """By table; PostgreSQL estimates large ones from its statistics."""
    oldest_finished_us: int | None
    """When the instance ended that ended first; None if none has."""


class Store(Protocol):
    """See the module's docstring. All methods may be called from any task; `apply` from one at a time.

    Cancellation: a call that has reached the database is not torn; it ends first, and then the
    cancellation is delivered.
    """

    async def apply(self, batch: Sequence[Unit]) -> frozenset[int]:
        """Write ``batch`` and commit. Returns the rows whose chains were left out by their guard.

        Raises:
            StoreUnavailable: The store is busy or gone; nothing was written; try again.
            StoreFull, StoreReadOnly: Nothing was written.
            StoreRefused: A value or a key of some unit was refused; nothing was written.
            OutcomeUnknown: The commit failed; ask `settle`.
            StoreFailed: Damage or an I/O error; the store must not be used any more.
        """
        ...

    async def settle(self) -> frozenset[int] | None:
        """What became of the last batch, whose `apply` raised `OutcomeUnknown`.

        Returns what `apply` would have returned if the batch is in the store, None if it is not.

        Raises:
            StoreUnavailable: It cannot be told now; ask again. Any other retryable error means the same.
            StoreFailed: It will never be told.
        """
        ...

    async def reserve(self, count: int) -> int:
        """Durably take ``count`` numbers; returns the first (N1)."""
        ...

    async def maintain(self) -> None:
        """Do the housekeeping that is due (SQLite: move the log into the file). Cheap when nothing is."""
        ...

    async def load(self, tenant_id: str, instance_id: str, known: int) -> Loaded | None:
        """Everything of an instance that its actor needs; id sets of up to ``known`` ids each."""
        ...

    async def checkpoint(self, row: int, checkpoint_id: str) -> CheckpointRecord | None: ...

    async def wait(self, row: int, wait_id: str) -> WaitRecord | None: ...

    async def request(self, row: int, request_id: str) -> RequestRecord | None: ...

    async def signal(self, row: int, signal_id: int) -> SignalRecord | None: ...

    async def error(self, row: int, error_id: int) -> ErrorRecord | None: ...

    async def attempt(self, row: int, checkpoint_id: str, attempt: int) -> RetryAttemptRecord | None: ...

    async def payloads(self, row: int, kinds: frozenset[PayloadKind]) -> dict[PayloadKind, bytes]: ...

    async def compensation_data(self, row: int, checkpoint_id: str) -> bytes | None: ...

    async def due(self, until_us: int, after: tuple[int, int] | None, limit: int) -> list[Due]:
        """At most ``limit`` instances due at or before ``until_us``, after ``(deadline, row)`` (T1)."""
        ...

    async def running(self, before_epoch: int, after_row: int, limit: int) -> list[Due]:
        """Running instances of an epoch below ``before_epoch``, by row; ``deadline_us`` is 0."""
        ...

    async def list_instances(
        self, where: InstanceFilter, order: InstanceOrder, page: PageRequest
    ) -> Page[InstanceRecord]: ...

    async def count_instances(self, where: InstanceFilter) -> int: ...

    async def list_records(
        self, row: int, kind: type[R], page: PageRequest, where: RecordFilter | None = None
    ) -> Page[R]:
        """One page of one kind of record; ``where`` is for checkpoints, events or steps.

        Raises:
            ValidationError: The filter is for another kind, or the cursor of another list.
        """
        ...

    async def count_records(self, row: int, kind: type[R], where: RecordFilter | None = None) -> int: ...

    async def counts(self, tenant_id: str | None) -> dict[Status, int]:
        """How many instances are in each status; a status without any is left out (A8)."""
        ...

    async def unexplained(self, after_row: int, limit: int) -> list[InstanceRecord]:
        """Suspended and pending instances that only a signal, or nothing, can move (A9)."""
        ...

    async def growth(self) -> Growth:
        """Sizes, and rows of every table. Costs a scan of the keys; not for every second."""
        ...

    async def verify(self) -> list[str]:
        """Look for damage: one sentence for each finding, none if all is well. Reads everything."""
        ...

    async def backup(self, path: str) -> int:
        """Copy the store, as it is at one moment, to a new file while it works; returns its bytes.

        Raises:
            ValidationError: There is something at ``path``, or this store is backed up by other means.
            StoreError: The file could not be written; nothing is left at ``path``.
        """
        ...

    # ------------------------------------------------------------ deleting

    async def terminal(
        self,
        status: Status,
        before_us: int,
        tenant_id: str | None,
        after: tuple[int, int] | None,
        limit: int,
    ) -> list[Finished]:
        """At most ``limit`` instances that ended before an instant, after ``(finished, row)`` (D1)."""
        ...

    async def purge(self, rows: Sequence[int], most: int) -> Purged:
        """Delete instances, and at most about ``most`` records of their history, in one transaction (D2).

        A record counts once, and once more for every 4 KiB of its large value.
        """
        ...

    async def sweep(self, most: int) -> bool:
        """Delete what purges have left, as far as ``most`` goes; whether more is left (D3)."""
        ...

    # ------------------------------------------------------------ notes

    async def note(self, name: str) -> str | None:
        """A text that the program keeps about the store as a whole (K1)."""
        ...

    async def notes(self, prefix: str) -> dict[str, str]:
        """All notes whose names begin with ``prefix``, by name. There are few of them."""
        ...

    async def set_note(self, name: str, text: str | None) -> None:
        """Keep a text, or remove it."""
        ...

    async def find(self, tenant_id: str, instance_id: str) -> InstanceRecord | None:
        """The row of an instance, without what else an actor would need."""
        ...

    async def check(self) -> None:
        """Ask the database for an answer. Raises a `StoreError` if there is none."""
        ...

    def statistics(self) -> StoreStatistics: ...

    async def close(self) -> None: ...
