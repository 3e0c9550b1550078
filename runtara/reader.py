"""`Reader`: every question that needs nothing but the store.

Rules:

1. A reader acts for one tenant. Without one it acts for all of them, and then answers only what is about the
   store or about lists of instances: an instance's id alone names none.
2. What it tells is on disk. It knows of no sessions: it may look at a store that another program works on.
3. Instants are given as aware datetimes or as microseconds of UTC. Ranges are half open: ``from`` is in,
   ``before`` is out.
4. A list comes in pages, by creation or by revision, newest first unless ``descending`` is false. A page ends
   after ``limit`` items, or with the one that brings its payloads to 4 MiB; ``page.next`` goes on behind it.
5. Questions about one tenant travel over a connection (`runtara.questions`); those about the store as a whole
   do not.
6. A word of a record that this version does not know is shown as ``?`` and its number; it hides no other row.
"""

from typing import Any, Final

from runtara.actors.instance import state_of
from runtara.errors import (
    CheckpointNotFound,
    ErrorNotFound,
    InstanceNotFound,
    StoreCorrupt,
    ValidationError,
)
from runtara.filters import (
    Instant,
    checkpoint_filter,
    event_filter,
    instance_filter,
    order_of,
    page_of,
    step_filter,
)
from runtara.ids import TenantId, check_instance_id, check_name, check_tenant_id
from runtara.machine.liveness import Stuck, Violation, reason_to_move
from runtara.messages import CompensationView, FoundCheckpoint, InstanceView
from runtara.persistence.store import (
    DEFAULT_PAGE,
    Growth,
    InstanceOrder,
    Loaded,
    Page,
    PageRequest,
    R,
    RecordFilter,
    Store,
)
from runtara.questions import Asker, question, question_for_anyone
from runtara.records import (
    CheckpointRecord,
    CompensationAttemptRecord,
    ErrorRecord,
    EventRecord,
    EventType,
    InstanceRecord,
    PayloadKind,
    RetryAttemptRecord,
    SignalRecord,
    Status,
    StepRecord,
    StepStatus,
    WaitRecord,
)
from runtara.validation import check_int

MOST_CAUSES: Final = 100
"""Of one error, that are followed."""
RECORD_KINDS: Final[dict[str, type[Any]]] = {kind.__name__: kind for kind in R.__constraints__}
CANDIDATES: Final = 200
"""Instances that are judged in one go."""


class Reader:
    """See the module's docstring. Made by `runtara.open_reader`, `Reader.for_tenant` and `Runtime.reader`.

    Every question may raise a `StoreError`; those about one instance raise `InstanceNotFound`.
    """

    def __init__(self, store: Store | None, tenant: str | None, asker: Asker | None = None) -> None:
        self.kept = store
        """None on the other side of a connection."""
        self.tenant: TenantId | None = None if tenant is None else check_tenant_id(tenant)
        self.asker = asker
        """Carries the questions to where the store is."""

    @property
    def store(self) -> Store:
        """Raises `ValidationError` on a client, which has none."""
        if self.kept is None:
            raise ValidationError("runtime", "is on the other side of a connection; this needs it here")
        return self.kept

    def __repr__(self) -> str:
        whose = "all tenants" if self.tenant is None else f"tenant {self.tenant!r}"
        return f"<{type(self).__name__} of {whose}>"

    def for_tenant(self, tenant: str) -> "Reader":
        """The same store, for another tenant. Raises `ValidationError` for an ill-formed id."""
        return Reader(self.store, check_tenant_id(tenant))

    # ------------------------------------------------------------ instances

    @question
    async def list_instances(
        self,
        *,
        statuses: frozenset[Status] = frozenset(),
        workflow: str | None = None,
        id_prefix: str | None = None,
        created_from: Instant | None = None,
        created_before: Instant | None = None,
        finished_from: Instant | None = None,
        finished_before: Instant | None = None,
        awaits_client: bool = False,
        order: InstanceOrder = InstanceOrder.CREATED,
        limit: int = DEFAULT_PAGE,
        cursor: str | None = None,
        descending: bool = True,
    ) -> Page[InstanceRecord]:
        """One page of instances.

        Args:
            statuses: Any of these; empty: any at all.
            awaits_client: Only those that nothing but their client can move; the record's
                ``awaits_client_us`` says since when.
            order: By creation, or by finish: then only those that have ended.
            limit: From 1 to 1000.
            cursor: ``next`` of the page before, in the same order.

        Raises:
            ValidationError: Naming the argument.
        """
        where = instance_filter(
            self.tenant,
            statuses,
            workflow,
            id_prefix,
            (created_from, created_before),
            (finished_from, finished_before),
            awaits_client,
        )
        return await self.store.list_instances(where, order_of(order), page_of(limit, cursor, descending))

    @question
    async def count_instances(
        self,
        *,
        statuses: frozenset[Status] = frozenset(),
        workflow: str | None = None,
        id_prefix: str | None = None,
        created_from: Instant | None = None,
        created_before: Instant | None = None,
        finished_from: Instant | None = None,
        finished_before: Instant | None = None,
        awaits_client: bool = False,
    ) -> int:
        """How many instances `list_instances` gives in all."""
        where = instance_filter(
            self.tenant,
            statuses,
            workflow,
            id_prefix,
            (created_from, created_before),
            (finished_from, finished_before),
            awaits_client,
        )
        return await self.store.count_instances(where)

    async def get(self, instance_id: str) -> InstanceView:
        """All of an instance but its history. A reader sees no sessions: ``connected`` is false."""
        loaded = await self.load(instance_id)
        payloads = await self.store.payloads(loaded.record.row, frozenset(PayloadKind))
        error = payloads.get(PayloadKind.ERROR)
        return InstanceView(
            record=loaded.record,
            revision=loaded.revision,
            checkpoint_id=loaded.checkpoint_id,
            last_activity_us=loaded.record.last_activity_us,
            unconsumed_signals=len(loaded.signals),
            connected=False,
            input=payloads.get(PayloadKind.INPUT),
            output=payloads.get(PayloadKind.OUTPUT),
            error=None if error is None else error.decode(errors="replace"),
            stderr=payloads.get(PayloadKind.STDERR),
        )

    @question
    async def counts(self) -> dict[Status, int]:
        """How many instances are in each status; a status without any is left out."""
        return await self.store.counts(self.tenant)

    async def violations(self, *, limit: int = DEFAULT_PAGE) -> tuple[Violation, ...]:
        """At most ``limit`` instances that rest and that nothing will ever move; empty if all is well.

        Each instance that only a signal can move is loaded and judged, so it costs as many reads as there are
        of those. `Runtime.violations` knows of running ones as well.
        """
        page_of(limit)
        found: list[Violation] = []
        after = 0
        while candidates := await self.store.unexplained(after, CANDIDATES):
            for record in candidates:
                if self.tenant in (None, record.tenant_id):
                    found += await self.judged(record)
                if len(found) == limit:
                    return tuple(found)
            after = candidates[-1].row
        return tuple(found)

    async def judged(self, record: InstanceRecord) -> list[Violation]:
        """The violation that an instance is, if it is one now."""
        try:
            loaded = await self.store.load(record.tenant_id, record.instance_id, 1)
        except StoreCorrupt:
            return [Violation(stuck=Stuck.UNREADABLE, record=record)]
        if loaded is None or reason_to_move(state_of(loaded, None)) is not None:
            return []
        return [Violation(stuck=Stuck.NO_REASON, record=loaded.record)]

    # ------------------------------------------------------------ checkpoints

    async def get_checkpoint(self, instance_id: str, checkpoint_id: str) -> FoundCheckpoint:
        """One checkpoint, or that there is none."""
        check_name(checkpoint_id, "checkpoint_id")
        row = await self.row_of(instance_id)
        return FoundCheckpoint(checkpoint=await self.store.checkpoint(row, checkpoint_id))

    @question
    async def list_checkpoints(
        self,
        instance_id: str,
        *,
        created_from: Instant | None = None,
        created_before: Instant | None = None,
        limit: int = DEFAULT_PAGE,
        cursor: str | None = None,
        descending: bool = True,
    ) -> Page[CheckpointRecord]:
        """One page of checkpoints, with their states."""
        where = checkpoint_filter(created_from, created_before)
        page = page_of(limit, cursor, descending)
        return await self.list_records(instance_id, CheckpointRecord, page, where)

    @question
    async def count_checkpoints(
        self,
        instance_id: str,
        *,
        created_from: Instant | None = None,
        created_before: Instant | None = None,
    ) -> int:
        """How many checkpoints `list_checkpoints` gives in all."""
        where = checkpoint_filter(created_from, created_before)
        return await self.counted(instance_id, CheckpointRecord, where)

    # ------------------------------------------------------------ events and steps

    @question
    async def list_events(
        self,
        instance_id: str,
        *,
        type: EventType | str | None = None,
        subtype: str | None = None,
        created_from: Instant | None = None,
        created_before: Instant | None = None,
        text: str | None = None,
        scope_id: str | None = None,
        parent_scope_id: str | None = None,
        root_only: bool = False,
        limit: int = DEFAULT_PAGE,
        cursor: str | None = None,
        descending: bool = True,
    ) -> Page[EventRecord]:
        """One page of events.

        Args:
            text: Found in the payload as it is, case and all.
            root_only: Only those without a parent scope.
        """
        created = (created_from, created_before)
        where = event_filter(type, subtype, created, text, scope_id, parent_scope_id, root_only)
        page = page_of(limit, cursor, descending)
        return await self.list_records(instance_id, EventRecord, page, where)

    @question
    async def count_events(
        self,
        instance_id: str,
        *,
        type: EventType | str | None = None,
        subtype: str | None = None,
        created_from: Instant | None = None,
        created_before: Instant | None = None,
        text: str | None = None,
        scope_id: str | None = None,
        parent_scope_id: str | None = None,
        root_only: bool = False,
    ) -> int:
        """How many events `list_events` gives in all."""
        created = (created_from, created_before)
        where = event_filter(type, subtype, created, text, scope_id, parent_scope_id, root_only)
        return await self.counted(instance_id, EventRecord, where)

    @question
    async def list_steps(
        self,
        instance_id: str,
        *,
        statuses: frozenset[StepStatus] = frozenset(),
        type: str | None = None,
        step_ids: frozenset[str] = frozenset(),
        scope_id: str | None = None,
        parent_scope_id: str | None = None,
        root_only: bool = False,
        limit: int = DEFAULT_PAGE,
        cursor: str | None = None,
        descending: bool = True,
    ) -> Page[StepRecord]:
        """One page of steps, as the events ``step_debug_start`` and ``step_debug_end`` told of them."""
        where = step_filter(statuses, type, step_ids, scope_id, parent_scope_id, root_only)
        page = page_of(limit, cursor, descending)
        return await self.list_records(instance_id, StepRecord, page, where)

    @question
    async def count_steps(
        self,
        instance_id: str,
        *,
        statuses: frozenset[StepStatus] = frozenset(),
        type: str | None = None,
        step_ids: frozenset[str] = frozenset(),
        scope_id: str | None = None,
        parent_scope_id: str | None = None,
        root_only: bool = False,
    ) -> int:
        """How many steps `list_steps` gives in all."""
        where = step_filter(statuses, type, step_ids, scope_id, parent_scope_id, root_only)
        return await self.counted(instance_id, StepRecord, where)

    # ------------------------------------------------------------ the rest of the history

    @question
    async def list_waits(
        self,
        instance_id: str,
        *,
        limit: int = DEFAULT_PAGE,
        cursor: str | None = None,
        descending: bool = True,
    ) -> Page[WaitRecord]:
        """One page of sleeps and waits, open ones and those that have ended."""
        return await self.list_records(instance_id, WaitRecord, page_of(limit, cursor, descending))

    @question
    async def list_signals(
        self,
        instance_id: str,
        *,
        limit: int = DEFAULT_PAGE,
        cursor: str | None = None,
        descending: bool = True,
    ) -> Page[SignalRecord]:
        """One page of signals, consumed ones included."""
        return await self.list_records(instance_id, SignalRecord, page_of(limit, cursor, descending))

    @question
    async def list_errors(
        self,
        instance_id: str,
        *,
        limit: int = DEFAULT_PAGE,
        cursor: str | None = None,
        descending: bool = True,
    ) -> Page[ErrorRecord]:
        """One page of the error history; `error_chain` follows the causes of one."""
        return await self.list_records(instance_id, ErrorRecord, page_of(limit, cursor, descending))

    @question
    async def error_chain(self, instance_id: str, error_id: int) -> tuple[ErrorRecord, ...]:
        """A recorded error, its cause, the cause of that, and so on, at most `MOST_CAUSES` of them.

        Raises:
            ErrorNotFound: There is no such error.
        """
        check_int(error_id, "error_id")
        row = await self.row_of(instance_id)
        first = await self.store.error(row, error_id)
        if first is None:
            raise ErrorNotFound(error_id, "error_id")
        chain = [first]
        while (cause_id := chain[-1].cause_id) is not None and len(chain) < MOST_CAUSES:
            cause = await self.store.error(row, cause_id)
            if cause is None:
                break
            chain.append(cause)
        return tuple(chain)

    @question
    async def list_attempts(
        self,
        instance_id: str,
        *,
        limit: int = DEFAULT_PAGE,
        cursor: str | None = None,
        descending: bool = True,
    ) -> Page[RetryAttemptRecord]:
        """One page of the retry audit trail."""
        return await self.list_records(instance_id, RetryAttemptRecord, page_of(limit, cursor, descending))

    async def list_records(
        self, instance_id: str, kind: type[R], page: PageRequest, where: RecordFilter | None = None
    ) -> Page[R]:
        return await self.store.list_records(await self.row_of(instance_id), kind, page, where)

    async def count_records(self, instance_id: str, kind: type[R]) -> int:
        """How many records of one kind (`runtara.SignalRecord`, `ErrorRecord` ...) there are."""
        return await self.count_kind(instance_id, kind.__name__)

    @question
    async def count_kind(self, instance_id: str, kind: str) -> int:
        """The same, by the name of the kind."""
        if kind not in RECORD_KINDS:
            raise ValidationError("kind", f"must be one of {', '.join(RECORD_KINDS)}")
        return await self.counted(instance_id, RECORD_KINDS[kind])

    async def counted(self, instance_id: str, kind: type[R], where: RecordFilter | None = None) -> int:
        return await self.store.count_records(await self.row_of(instance_id), kind, where)

    # ------------------------------------------------------------ compensations

    @question_for_anyone
    async def compensations(self, instance_id: str) -> CompensationView:
        """The compensations of an instance, the one to run first coming first."""
        loaded = await self.load(instance_id)
        return CompensationView(
            state=loaded.record.compensation_state,
            reason=loaded.record.compensation_reason,
            compensations=tuple(
                sorted(loaded.compensations, key=lambda c: (c.order, c.revision), reverse=True)
            ),
        )

    @question_for_anyone
    async def compensation_data(self, instance_id: str, checkpoint_id: str) -> bytes:
        """What was registered to undo a checkpoint. Raises `CheckpointNotFound`."""
        record = await self.store.find(self.one_tenant(), check_instance_id(instance_id))
        data = None
        if record is not None:
            data = await self.store.compensation_data(record.row, checkpoint_id)
        if data is None:
            raise CheckpointNotFound(checkpoint_id)
        return data

    @question
    async def list_compensation_log(
        self,
        instance_id: str,
        *,
        limit: int = DEFAULT_PAGE,
        cursor: str | None = None,
        descending: bool = True,
    ) -> Page[CompensationAttemptRecord]:
        """One page of the compensation log."""
        page = page_of(limit, cursor, descending)
        return await self.list_records(instance_id, CompensationAttemptRecord, page)

    @question
    async def count_compensation_log(self, instance_id: str) -> int:
        """How many attempts to compensate there were."""
        return await self.counted(instance_id, CompensationAttemptRecord)

    @question
    async def last_compensation(self, instance_id: str) -> CompensationAttemptRecord | None:
        """The newest line of the compensation log; None if there is none."""
        page = await self.list_compensation_log(instance_id, limit=1)
        return page.items[0] if page.items else None

    # ------------------------------------------------------------ the store as a whole

    async def growth(self) -> Growth:
        """How large the store has become, whosever it is. Costs a scan of its keys."""
        return await self.store.growth()

    async def verify(self) -> list[str]:
        """Look for damage: one sentence for each finding, none if all is well. Reads everything."""
        return await self.store.verify()

    async def backup(self, path: str) -> int:
        """Copy the store, as it is at one moment, to a new file while it works; returns its bytes.

        Raises:
            ValidationError: There is something at ``path``, or this store is backed up by other means.
            StoreError: The file could not be written; nothing is left at ``path``.
        """
        return await self.store.backup(path)

    # ------------------------------------------------------------ finding an instance

    def one_tenant(self) -> TenantId:
        """The tenant, where an instance is asked for (rule 1)."""
        if self.tenant is None:
            raise ValidationError("tenant_id", "must be given: an id names an instance of one tenant")
        return self.tenant

    async def load(self, instance_id: str) -> Loaded:
        loaded = await self.store.load(self.one_tenant(), check_instance_id(instance_id), 1)
        if loaded is None:
            raise InstanceNotFound(instance_id)
        return loaded

    async def row_of(self, instance_id: str) -> int:
        record = await self.store.find(self.one_tenant(), check_instance_id(instance_id))
        if record is None:
            raise InstanceNotFound(instance_id)
        return record.row
