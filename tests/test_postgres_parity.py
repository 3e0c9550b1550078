"""SQLite and PostgreSQL, given the same random batches: every answer of every read must be the same.

So it must be once more when some instances were purged and all that they left was swept.

Most units are such as a store takes. Some are wild: their keys collide, their updates find nothing, a value
does not fit, the guard is wrong; then both must refuse with the same error and stay as they were.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import attrs
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from runtara.errors import RuntaraError
from runtara.persistence.postgres import open_postgres
from runtara.persistence.store import (
    EventFilter,
    InstanceFilter,
    InstanceOrder,
    Page,
    PageRequest,
    RecordFilter,
    StepFilter,
    Store,
    Unit,
)
from runtara.records import (
    AcknowledgeSignal,
    CheckpointRecord,
    CompensationAttemptRecord,
    CompensationSpec,
    CompensationState,
    ErrorRecord,
    EventRecord,
    EventType,
    FinishCompensationAttempt,
    FinishStep,
    InstanceRecord,
    Op,
    PayloadKind,
    PutPayload,
    Reason,
    RequestRecord,
    RetryAttemptRecord,
    SetCompensation,
    SettleWait,
    SignalRecord,
    SignalType,
    Status,
    StepRecord,
    StepStatus,
    WaitKind,
    WaitOutcome,
    WaitRecord,
)
from runtara.testing.samples import NAUGHTY
from tests.postgres_server import new_schema, server_url
from tests.sqlite_stores import opened

TENANTS: Final = ("acme", "acme\0", "\\101 \\\\ \U0001f600")
NAMES: Final = (
    "a",
    "A",
    "a\0",
    "a\1",
    "a/",
    "ab",
    "é",
    "e\u0301",
    "\uffff",
    "\U00010000",
    "\U0010ffff",
    NAUGHTY,
)
INSTANTS: Final = (-(2**63), -1, 0, 1, 1_000, 2**53 + 1, 2**63 - 1)
UNFIT: Final = ("lone \ud800", 2**63)
HISTORY: Final = (
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
ROWS: Final = 5

names = st.sampled_from(NAMES)
maybe_name = st.none() | names
instants = st.sampled_from(INSTANTS)
maybe_instant = st.none() | instants
blobs = st.sampled_from((b"", b"\0", b"x" * 70_000)) | st.binary(max_size=20)
maybe_blob = st.none() | blobs
small = st.integers(1, 3)

Make = Callable[[int], Op]
"""An operation, but for its revision."""


def making(kind: type, /, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Make]:
    """Operations of a class; one that has a revision is given it later."""
    has_revision = any(field.name == "revision" for field in attrs.fields(kind))

    def make(values: dict[str, Any]) -> Make:
        def at(revision: int) -> Op:
            op: Op = kind(**values, **({"revision": revision} if has_revision else {}))
            return op

        return at

    return st.fixed_dictionaries(fields).map(make)


def of(words: type) -> st.SearchStrategy[Any]:
    return st.sampled_from(list(words))  # type: ignore[call-overload]  # an enum


specs = st.builds(CompensationSpec, step_id=names, data=blobs, order=instants)

operations = st.one_of(
    making(
        CheckpointRecord,
        checkpoint_id=names,
        state=blobs,
        created_us=instants,
        compensation=st.none() | specs,
    ),
    making(
        WaitRecord,
        wait_id=names,
        kind=of(WaitKind),
        key=maybe_name,
        deadline_us=maybe_instant,
        created_us=instants,
    ),
    making(
        EventRecord,
        type=of(EventType),
        subtype=maybe_name,
        checkpoint_id=maybe_name,
        payload=maybe_blob,
        created_us=instants,
        applied=st.booleans(),
        scope_id=maybe_name,
        parent_scope_id=maybe_name,
    ),
    making(
        StepRecord,
        step_id=names,
        step_name=maybe_name,
        step_type=maybe_name,
        scope_id=maybe_name,
        parent_scope_id=maybe_name,
        started_us=instants,
    ),
    making(
        FinishStep,
        start_revision=st.integers(1, 9),
        end_revision=st.integers(1, 9),
        status=of(StepStatus),
        finished_us=instants,
    ),
    making(
        SignalRecord,
        type=of(SignalType),
        key=maybe_name,
        payload=maybe_blob,
        created_us=instants,
        epoch=maybe_instant,
    ),
    making(RetryAttemptRecord, checkpoint_id=names, attempt=small, created_us=instants, error=maybe_name),
    making(
        ErrorRecord,
        code=names,
        message=names | st.just(UNFIT[0]),
        created_us=instants,
        attributes=maybe_name,
        cause_id=maybe_instant,
    ),
    making(CompensationAttemptRecord, checkpoint_id=names, step_id=names, attempt=small, started_us=instants),
    making(RequestRecord, request_id=names, digest=blobs, answer=names),
    making(PutPayload, kind=of(PayloadKind), data=blobs),
    making(SettleWait, wait_id=names, outcome=of(WaitOutcome), settled_us=instants),
    making(AcknowledgeSignal, signal_id=st.integers(1, 9), shown_us=maybe_instant, acknowledged_us=instants),
    making(SetCompensation, checkpoint_id=names, state=of(CompensationState), attempts=small),
    making(
        FinishCompensationAttempt,
        checkpoint_id=names,
        attempt=small,
        finished_us=instants,
        success=st.booleans(),
        error_message=maybe_name,
        error_id=maybe_instant,
    ),
)

moves = st.fixed_dictionaries(
    {
        "workflow": maybe_name,
        "status": st.sampled_from([status for status in Status if status is not Status.UNKNOWN]),
        "reason": st.none() | of(Reason),
        "epoch": st.integers(0, 2),
        "started_us": maybe_instant,
        "finished_us": maybe_instant,
        "last_activity_us": instants,
        "sleep_until_us": maybe_instant,
        "deadline_us": maybe_instant,
        "awaits_client_us": maybe_instant,
        "hosted": st.booleans(),
        "exit_code": st.none() | st.sampled_from((-9, 0, UNFIT[1])),
        "checkpoint_id": maybe_name,
    }
)


@attrs.frozen
class Change:
    """One unit, but for what depends on those before it."""

    instance: int
    operations: list[Make]
    move: dict[str, Any] | None
    wrong_guard: bool
    wild: bool
    """Whether operations are kept that the store must refuse."""


@attrs.frozen
class Birth:
    """Who an instance is."""

    tenant_id: str
    instance_id: str
    created_us: int


seldom = st.integers(0, 15).map(lambda number: number == 7)

changes = st.builds(
    Change,
    st.integers(0, ROWS - 1),
    st.lists(operations, max_size=4),
    st.none() | moves,
    seldom,
    seldom,
)
births = st.lists(st.builds(Birth, st.sampled_from(TENANTS), names, instants), min_size=ROWS, max_size=ROWS)
plans = st.lists(st.lists(changes, min_size=1, max_size=6), min_size=1, max_size=6)


@attrs.define
class Known:
    """What a writer knows of an instance: the row as it is stored, and the newest revision."""

    record: InstanceRecord | None = None
    revision: int = 0
    keys: frozenset[tuple[object, ...]] = frozenset()
    """Of the rows that are there and have a key of their own."""

    def take(self, op: Op) -> bool:
        """Note ``op``; whether a store must take it."""
        made, needed = keys_of(op)
        fits = not self.keys & made and self.keys >= needed and not any(v in UNFIT for v in values_of(op))
        self.keys |= made
        return fits


def values_of(op: Op) -> list[object]:
    return [getattr(op, field.name) for field in attrs.fields(type(op))]


def keys_of(op: Op) -> tuple[frozenset[tuple[object, ...]], frozenset[tuple[object, ...]]]:
    """The keys that ``op`` adds, and those that must be there."""
    made: set[tuple[object, ...]] = set()
    needed: set[tuple[object, ...]] = set()
    match op:
        case CheckpointRecord():
            made.add(("checkpoint", op.checkpoint_id))
            if op.compensation is not None:
                made.add(("compensation", op.checkpoint_id))
        case WaitRecord():
            made.add(("wait", op.wait_id))
        case StepRecord():
            made.add(("step", op.revision))
        case SignalRecord():
            made.add(("signal", op.revision))
        case RetryAttemptRecord():
            made.add(("attempt", op.checkpoint_id, op.attempt))
        case CompensationAttemptRecord():
            made.add(("undo", op.checkpoint_id, op.attempt))
        case RequestRecord():
            made.add(("request", op.request_id))
        case SettleWait():
            needed.add(("wait", op.wait_id))
        case FinishStep():
            needed.add(("step", op.start_revision))
        case AcknowledgeSignal():
            needed.add(("signal", op.signal_id))
        case SetCompensation():
            needed.add(("compensation", op.checkpoint_id))
        case FinishCompensationAttempt():
            needed.add(("undo", op.checkpoint_id, op.attempt))
    return frozenset(made), frozenset(needed)


def units_of(
    batch: Sequence[Change], born: Sequence[Birth], first_row: int, known: list[Known]
) -> list[Unit]:
    """The units of a batch; ``known`` moves on as if all of them were written."""
    heads: dict[int, InstanceRecord | None] = {}
    found: list[Unit] = []
    for change in batch:
        row, state = first_row + change.instance, known[change.instance]
        head = heads.setdefault(row, state.record)
        state.revision += 1
        ops: list[Op] = []
        for make in change.operations:
            op = make(state.revision)
            alone = all(type(op) is not type(other) for other in ops)
            if change.wild or (alone and attrs.evolve(state).take(op)):
                state.take(op)
                ops.append(op)
        birth = born[change.instance]
        if state.record is None or change.move is not None:
            base = state.record or InstanceRecord(
                row=row,
                tenant_id=birth.tenant_id,
                instance_id=birth.instance_id,
                status=Status.PENDING,
                revision=1,
                created_us=birth.created_us,
                last_activity_us=0,
            )
            moved: InstanceRecord = attrs.evolve(base, **(change.move or {}), revision=state.revision)
            if moved.status.is_terminal is (moved.finished_us is None):
                moved = attrs.evolve(moved, finished_us=7 if moved.status.is_terminal else None)
            if not change.wild and moved.exit_code == UNFIT[1]:
                moved = attrs.evolve(moved, exit_code=None)
            state.record = moved
            ops.insert(0, moved)
        found.append(
            Unit(
                row=row,
                epoch=(head.epoch if head else 0) + change.wrong_guard,
                base=(head.revision if head else 0) + change.wrong_guard,
                revision=state.revision,
                ops=tuple(ops),
                size=512,
            )
        )
    return found


async def answer(call: Callable[[], Awaitable[object]]) -> object:
    """What a call answers; of an error its class."""
    try:
        return await call()
    except RuntaraError as error:
        return type(error)


Read = Callable[[Store], Awaitable[object]]


async def walk(
    page_of: Callable[[PageRequest], Awaitable[Page[Any]]], limit: int, descending: bool
) -> list[Any]:
    """Every page of a list, with the cursors between them."""
    pages: list[Any] = []
    cursor: str | None = None
    while True:
        page = await page_of(PageRequest(limit=limit, cursor=cursor, descending=descending))
        pages.append(page)
        cursor = page.next
        if cursor is None:
            return pages


def instance_filters() -> Iterator[InstanceFilter]:
    yield InstanceFilter()
    for tenant in TENANTS:
        yield InstanceFilter(tenant_id=tenant)
    for prefix in (*NAMES, "nothing"):
        yield InstanceFilter(id_prefix=prefix)
    yield InstanceFilter(tenant_id=TENANTS[0], statuses=frozenset({Status.PENDING, Status.RUNNING}))
    yield InstanceFilter(statuses=frozenset({Status.FAILED}), workflow=NAMES[2])
    yield InstanceFilter(created_from_us=0, created_before_us=2**63 - 1)
    yield InstanceFilter(finished_from_us=-1, finished_before_us=1_001, id_prefix="a")
    yield InstanceFilter(awaits_client=True)


EVENT_FILTERS: Final = (
    None,
    EventFilter(type=EventType.CUSTOM),
    EventFilter(subtype="a\0"),
    EventFilter(created_from_us=0, created_before_us=1_000),
    EventFilter(text="x", root_only=True),
    EventFilter(text="\0"),
    EventFilter(scope_id="a", parent_scope_id="a\0"),
)
STEP_FILTERS: Final = (
    None,
    StepFilter(statuses=frozenset({StepStatus.RUNNING, StepStatus.FAILED})),
    StepFilter(step_ids=frozenset({"a", "a\0", "\U0010ffff"}), root_only=True),
    StepFilter(type="a\1", scope_id="a"),
)
FILTERS: Final[dict[type, Sequence[RecordFilter | None]]] = {
    EventRecord: EVENT_FILTERS,
    StepRecord: STEP_FILTERS,
}


def lists() -> Iterator[tuple[str, Read]]:
    """Every list and count of instances, with a name for each."""
    for where in instance_filters():
        yield f"count {where}", lambda s, w=where: s.count_instances(w)  # type: ignore[misc]  # of a lambda's default
        for order in InstanceOrder:
            for descending in (False, True):

                async def list_all(
                    s: Store, w: InstanceFilter = where, o: InstanceOrder = order, d: bool = descending
                ) -> object:
                    return await walk(partial(s.list_instances, w, o), 2, d)

                yield f"list {order} {descending} {where}", list_all


def reads(born: Sequence[Birth], first_row: int) -> Iterator[tuple[str, Read]]:
    """Every other question that a store answers."""
    for until in INSTANTS:
        for after in (None, (0, first_row)):
            yield f"due {until} {after}", partial(due, until, after)
    for epoch in (0, 1, 3):
        yield f"running {epoch}", partial(running, epoch, first_row)
    yield "unexplained", partial(unexplained, first_row)
    for tenant in (None, *TENANTS):
        yield f"counts {tenant}", lambda s, t=tenant: s.counts(t)  # type: ignore[misc]
        for status in (Status.COMPLETED, Status.FAILED):
            yield f"terminal {status} {tenant}", partial(terminal, status, tenant)
    yield "growth", growth
    yield "findings", findings
    for number, birth in enumerate(born):
        yield from reads_of_one(birth, first_row + number)


async def due(until: int, after: tuple[int, int] | None, store: Store) -> object:
    return await store.due(until, after, 3)


async def running(epoch: int, first_row: int, store: Store) -> object:
    return await store.running(epoch, first_row - 1, 3)


async def unexplained(first_row: int, store: Store) -> object:
    return await store.unexplained(first_row, 3)


async def terminal(status: Status, tenant: str | None, store: Store) -> object:
    found = [await store.terminal(status, before, tenant, None, 2) for before in INSTANTS]
    return found, await store.terminal(status, 2**63 - 1, tenant, (0, 1), 2)


async def growth(store: Store) -> object:
    found = await store.growth()
    return found.rows, found.oldest_finished_us


async def findings(store: Store) -> object:
    return sorted(await store.verify())


def reads_of_one(birth: Birth, row: int) -> Iterator[tuple[str, Read]]:
    async def whole(store: Store) -> object:
        found = [await store.load(birth.tenant_id, birth.instance_id, known) for known in (0, 2, 100)]
        return found, await store.find(birth.tenant_id, birth.instance_id)

    async def singles(store: Store) -> object:
        found: list[object] = [await store.payloads(row, frozenset(PayloadKind))]
        for name in NAMES[:5]:
            found += [await ask(row, name) for ask in (store.checkpoint, store.wait, store.request)]
            found += [await store.compensation_data(row, name), await store.attempt(row, name, 1)]
        for revision in range(1, 4):
            found += [await store.signal(row, revision), await store.error(row, revision)]
        return found

    yield f"instance {row}", whole
    yield f"parts of {row}", singles
    for kind in HISTORY:
        yield f"{kind.__name__}s of {row}", partial(history, row, kind)


async def history(row: int, kind: type[Any], store: Store) -> object:
    found: list[object] = []
    for where in FILTERS.get(kind, (None,)):
        found.append(await store.count_records(row, kind, where))
        for descending in (False, True):
            found.append(await walk(partial(store.list_records, row, kind, where=where), 2, descending))
    return found


async def compare(folder: Path, born: Sequence[Birth], plan: Sequence[Sequence[Change]]) -> None:
    async with AsyncExitStack() as stack:
        sqlite: Store = await stack.enter_async_context(opened(folder / "a.db", synchronous="OFF"))
        postgres: Store = await stack.enter_async_context(open_postgres(server_url(), schema=new_schema()))
        first_row = await sqlite.reserve(ROWS)
        assert await postgres.reserve(ROWS) == first_row
        known = [Known() for _ in range(ROWS)]
        for batch in plan:
            before = [attrs.evolve(state) for state in known]
            units = units_of(batch, born, first_row, known)
            outcome = await answer(partial(sqlite.apply, units))
            assert await answer(partial(postgres.apply, units)) == outcome, units
            for number, state in enumerate(before):
                if not isinstance(outcome, frozenset) or first_row + number in outcome:
                    known[number] = state
        await compare_reads(sqlite, postgres, lists())
        await compare_reads(sqlite, postgres, reads(born, first_row))
        await compare_purges(sqlite, postgres, range(first_row, first_row + ROWS, 2))
        await compare_reads(sqlite, postgres, reads(born, first_row))


async def compare_reads(sqlite: Store, postgres: Store, asked: Iterable[tuple[str, Read]]) -> None:
    for name, read in asked:
        wanted = await answer(partial(read, sqlite))
        assert await answer(partial(read, postgres)) == wanted, name


async def compare_purges(sqlite: Store, postgres: Store, rows: Sequence[int]) -> None:
    """How far one transaction comes is not compared: each has its own order."""
    gone = (await sqlite.purge(rows, 3)).rows
    assert (await postgres.purge(rows, 3)).rows == gone
    for store in (sqlite, postgres):
        while await store.sweep(3):
            pass
        await store.set_note("purged\0", str(sorted(gone)))
        assert await store.note("purged\0") == str(sorted(gone))


@settings(max_examples=10, deadline=None)
@given(births, plans)
def test_both_backends_give_the_same_answers(born: list[Birth], plan: list[list[Change]]) -> None:
    with TemporaryDirectory() as folder:
        trio.run(compare, Path(folder), born, plan)


async def test_a_value_of_64_mebibytes_comes_back_from_both(tmp_path: Path) -> None:
    data = bytes(range(256)) * (64 * 4096)
    assert len(data) == 64 * 2**20
    put = PutPayload(kind=PayloadKind.OUTPUT, data=data)
    async with (
        opened(tmp_path / "a.db", synchronous="OFF") as sqlite,
        open_postgres(server_url(), schema=new_schema(), answer_seconds=60, lease_seconds=61) as postgres,
    ):
        stores: tuple[Store, ...] = (sqlite, postgres)
        for store in stores:
            row = await store.reserve(1)
            known = [Known()]
            birth = Birth("acme", "large", 1)
            [unit] = units_of([Change(0, [lambda revision: put], None, False, False)], [birth], row, known)
            assert await store.apply([unit]) == frozenset()
            assert (await store.payloads(row, frozenset(PayloadKind)))[PayloadKind.OUTPUT] == data
