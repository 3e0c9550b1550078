"""The sentences A1, A2 and A4 for an instance's records: their lists and filters."""

from typing import Any, Final

import attrs

from runtara.errors import ValidationError
from runtara.persistence.store import (
    CheckpointFilter,
    EventFilter,
    PageRequest,
    RecordFilter,
    StepFilter,
    Store,
)
from runtara.records import (
    CheckpointRecord,
    EventRecord,
    EventType,
    Op,
    StepRecord,
    StepStatus,
)
from runtara.testing import samples
from runtara.testing.conformance_walks import (
    KINDS,
    checkpoint_matches,
    event_matches,
    step_matches,
    walk_records,
)
from runtara.testing.conformance_writing import OpenStore, apply_all
from runtara.testing.expectations import expect, expect_error
from runtara.testing.samples import NAUGHTY, creation, instance, unit

PAGE: Final = PageRequest()


async def written(store: Store, *records: samples.Appended) -> int:
    """The row of a new instance with these records; each is a change of its own."""
    row = await store.reserve(1)
    await apply_all(store, creation(instance(row)), *(unit(row, r.revision, r) for r in records))
    return row


# ---------------------------------------------------------------- A1, A4


async def a1_records_are_paged_like_instances(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(1)
        revisions = range(1, 12)
        units = [unit(row, n, *samples.one_of_each(n)) for n in revisions if n > 1]
        await apply_all(store, creation(instance(row), *samples.one_of_each(1)), *units)
        for kind in KINDS:
            expect(await store.count_records(row, kind), len(revisions), f"the count of {kind.__name__}s")
            for descending in (True, False):
                for limit in (1, 3, 11, 12):
                    seen = await walk_records(store, row, kind, limit=limit, descending=descending)
                    wanted = sorted(revisions, reverse=descending)
                    what = f"{kind.__name__}s in pages of {limit}, descending={descending}"
                    expect([record.revision for record in seen], wanted, what)


async def a1_a_record_there_all_along_is_seen_once_whatever_is_written(open_store: OpenStore) -> None:
    begun = range(2, 32)
    async with open_store() as store:
        row = await written(store, *(samples.step(n) for n in begun))
        newest = begun[-1]

        async def disturb(number: int) -> None:
            nonlocal newest
            newest += 1
            end = samples.finish_step(newest % 30 + 2, newest)
            new: tuple[Op, ...] = (samples.step(newest), samples.event(newest)) if number <= 10 else ()
            await apply_all(store, unit(row, newest, *new, end))

        for where in (None, StepFilter(statuses=frozenset({StepStatus.RUNNING, StepStatus.COMPLETED}))):
            for descending in (False, True):
                seen = await walk_records(
                    store, row, StepRecord, where, limit=4, descending=descending, between=disturb
                )
                found = [s.revision for s in seen if s.revision in begun]
                what = f"each step there all along, once, descending={descending}, {where}"
                expect(found, sorted(begun, reverse=descending), what)
                expect(len({s.revision for s in seen}), len(seen), "no step twice")


async def a4_records_are_ordered_by_revision_and_not_by_time(open_store: OpenStore) -> None:
    async with open_store() as store:
        events = [samples.event(n, created_us=100 - n) for n in (2, 3, 4)]
        steps = [samples.step(n, started_us=100 - n) for n in (2, 3, 4)]
        row = await written(store, *events, *steps)
        await apply_all(store, unit(row, 5, samples.finish_step(4, 5, finished_us=-1)))
        newest_first = await store.list_records(row, EventRecord, PAGE)
        expect(newest_first.items, tuple(reversed(events)), "events, newest first by default")
        found = await store.list_records(row, StepRecord, PAGE)
        expect([s.revision for s in found.items], [4, 3, 2], "steps, newest first by default")


# ---------------------------------------------------------------- A2: filters

EVENTS: Final = (
    samples.event(2),
    samples.event(3, type=EventType.HEARTBEAT, subtype=None),
    samples.event(4, subtype="metric", scope_id="a", parent_scope_id=None),
    samples.event(5, subtype="Metric", scope_id="a", parent_scope_id="a"),
    samples.event(6, subtype="", scope_id="", parent_scope_id=""),
    samples.event(7, subtype="log", scope_id="b", parent_scope_id="a"),
    samples.event(8, type=EventType.COMPLETED, subtype=None, payload=b"a"),
    samples.event(9, subtype="metric", scope_id=NAUGHTY, parent_scope_id="a\0"),
    samples.event(10, subtype="metric", scope_id="a\0", parent_scope_id=NAUGHTY, payload=b"b"),
    samples.event(11, subtype="m%", scope_id="a%", parent_scope_id="_", created_us=-(2**63)),
    samples.event(12, subtype="log", created_us=2**63 - 1),
)
EVENT_FILTERS: Final = (
    None,
    EventFilter(),
    EventFilter(type=EventType.CUSTOM),
    EventFilter(type=EventType.HEARTBEAT),
    EventFilter(type=EventType.STARTED),
    EventFilter(subtype="log"),
    EventFilter(subtype=""),
    EventFilter(subtype="m%"),
    EventFilter(type=EventType.CUSTOM, subtype="metric"),
    EventFilter(created_from_us=2_003, created_before_us=2_006),
    EventFilter(created_from_us=2_006, created_before_us=2_006),
    EventFilter(created_from_us=2_007, created_before_us=2_006),
    EventFilter(created_from_us=2_010),
    EventFilter(created_before_us=2_003),
    EventFilter(created_from_us=-(2**63), created_before_us=2**63 - 1),
    EventFilter(created_from_us=2**63 - 1),
    EventFilter(created_before_us=-(2**63)),
    EventFilter(scope_id="a"),
    EventFilter(scope_id=""),
    EventFilter(scope_id="a\0"),
    EventFilter(scope_id="a%"),
    EventFilter(scope_id=NAUGHTY),
    EventFilter(parent_scope_id="a"),
    EventFilter(parent_scope_id=""),
    EventFilter(parent_scope_id="a\0"),
    EventFilter(parent_scope_id="_"),
    EventFilter(parent_scope_id=NAUGHTY),
    EventFilter(scope_id="b", parent_scope_id="a"),
    EventFilter(root_only=True),
    EventFilter(root_only=True, scope_id="a"),
    EventFilter(root_only=True, parent_scope_id="a"),
    EventFilter(root_only=True, parent_scope_id=""),
    EventFilter(text="a", root_only=True),
    EventFilter(text="b", subtype="metric", scope_id="a\0"),
    EventFilter(text="a", subtype="metric"),
)
STEPS: Final = (
    samples.step(2),
    samples.step(3, step_id="step-2", scope_id="a", step_type=None),
    samples.step(4, step_id="step-2", scope_id="a", parent_scope_id="a", step_type="HTTP"),
    samples.step(5, step_id="", scope_id="", parent_scope_id="", step_type=""),
    samples.step(6, step_id=NAUGHTY, scope_id=NAUGHTY, parent_scope_id=NAUGHTY, step_type=NAUGHTY),
    samples.step(7, step_id="step", step_type="h%", scope_id="b", parent_scope_id="a"),
    samples.step(8, step_id="step%", step_name="step-2"),
)
ENDS: Final = (
    samples.finish_step(3, 20),
    samples.finish_step(4, 21, status=StepStatus.FAILED),
    samples.finish_step(7, 22),
)
STEP_FILTERS: Final = (
    None,
    StepFilter(),
    *(StepFilter(statuses=frozenset({status})) for status in StepStatus),
    StepFilter(statuses=frozenset({StepStatus.RUNNING, StepStatus.FAILED})),
    StepFilter(statuses=frozenset(StepStatus)),
    StepFilter(type="http"),
    StepFilter(type=""),
    StepFilter(type="h%"),
    StepFilter(type=NAUGHTY),
    StepFilter(step_ids=frozenset({"step-2"})),
    StepFilter(step_ids=frozenset({"step-2", "step%", "nobody"})),
    StepFilter(step_ids=frozenset({"", NAUGHTY})),
    StepFilter(step_ids=frozenset({"step_2"})),
    StepFilter(step_ids=frozenset({f"step-{n}" for n in range(300)})),
    StepFilter(scope_id="a"),
    StepFilter(scope_id=""),
    StepFilter(scope_id=NAUGHTY),
    StepFilter(parent_scope_id="a"),
    StepFilter(parent_scope_id=""),
    StepFilter(parent_scope_id=NAUGHTY),
    StepFilter(root_only=True),
    StepFilter(root_only=True, scope_id="a"),
    StepFilter(root_only=True, parent_scope_id="a"),
    StepFilter(statuses=frozenset({StepStatus.COMPLETED}), step_ids=frozenset({"step-2"}), root_only=True),
    StepFilter(statuses=frozenset({StepStatus.FAILED}), type="HTTP", scope_id="a", parent_scope_id="a"),
)


CHECKPOINTS: Final = (
    samples.checkpoint(2, created_us=2_004),
    samples.compensatable(3),
    samples.checkpoint(4, created_us=-(2**63)),
    samples.checkpoint(5, created_us=2**63 - 1),
    samples.checkpoint(6),
)
CHECKPOINT_FILTERS: Final = (
    None,
    CheckpointFilter(),
    CheckpointFilter(created_from_us=2_003),
    CheckpointFilter(created_from_us=2_004),
    CheckpointFilter(created_before_us=2_004),
    CheckpointFilter(created_from_us=2_003, created_before_us=2_006),
    CheckpointFilter(created_from_us=2_004, created_before_us=2_004),
    CheckpointFilter(created_from_us=2_006, created_before_us=2_007),
    CheckpointFilter(created_before_us=2**63 - 1),
    CheckpointFilter(created_before_us=-(2**63)),
)


async def a2_checkpoints_are_filtered(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await written(store, *CHECKPOINTS)
        await written(store, *CHECKPOINTS)
        for where in CHECKPOINT_FILTERS:
            wanted = [c for c in CHECKPOINTS if where is None or checkpoint_matches(c, where)]
            await expect_listed(store, row, CheckpointRecord, where, wanted)


async def a2_events_are_filtered(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await written(store, *EVENTS)
        await written(store, *EVENTS)
        for where in EVENT_FILTERS:
            wanted = [e for e in EVENTS if where is None or event_matches(e, where)]
            await expect_listed(store, row, EventRecord, where, wanted)


async def a2_steps_are_filtered(open_store: OpenStore) -> None:
    async with open_store() as store:
        row, other = await written(store, *STEPS), await written(store, *STEPS)
        await apply_all(store, *(unit(row, end.end_revision, end) for end in ENDS))
        await apply_all(store, unit(other, 23, samples.finish_step(2, 23)))
        steps = {step.revision: step for step in STEPS}
        for end in ENDS:
            steps[end.start_revision] = attrs.evolve(
                steps[end.start_revision],
                status=end.status,
                finished_us=end.finished_us,
                end_revision=end.end_revision,
            )
        for where in STEP_FILTERS:
            wanted = [s for s in steps.values() if where is None or step_matches(s, where)]
            await expect_listed(store, row, StepRecord, where, wanted)


async def expect_listed(
    store: Store, row: int, kind: type[Any], where: RecordFilter | None, wanted: list[Any]
) -> None:
    """The list, in both orders and by pages, and the count."""
    for descending in (False, True):
        seen = await walk_records(store, row, kind, where, limit=2, descending=descending)
        expect(seen, wanted[::-1] if descending else wanted, f"descending={descending}, {where}")
    expect(await store.count_records(row, kind, where), len(wanted), f"the count for {where}")


FILTER_OF: Final[dict[type[Any], RecordFilter]] = {
    CheckpointRecord: CheckpointFilter(),
    EventRecord: EventFilter(),
    StepRecord: StepFilter(),
}


async def a2_a_filter_of_another_kind_is_refused(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await written(store, *samples.one_of_each(2))
        for kind in KINDS:
            for its_kind, where in FILTER_OF.items():
                if kind is its_kind:
                    continue
                for call in (
                    store.list_records(row, kind, PAGE, where),
                    store.count_records(row, kind, where),
                ):
                    error = await expect_error(ValidationError, call, f"{where} for {kind.__name__}s")
                    expect(error.field, "where", "the field that is named")


SENTENCES: Final = (
    a1_records_are_paged_like_instances,
    a1_a_record_there_all_along_is_seen_once_whatever_is_written,
    a2_checkpoints_are_filtered,
    a2_events_are_filtered,
    a2_steps_are_filtered,
    a2_a_filter_of_another_kind_is_refused,
    a4_records_are_ordered_by_revision_and_not_by_time,
)
