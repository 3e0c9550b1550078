"""Every combination of filters, against a plain Python filter over the same rows, on every backend."""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import chain, compress, product
from typing import Any, Final

import attrs
import pytest
import trio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from runtara.errors import ValidationError
from runtara.persistence.postgres import open_postgres
from runtara.persistence.sqlite import indexes
from runtara.persistence.store import EventFilter, InstanceFilter, InstanceOrder, StepFilter, Store
from runtara.records import (
    EventRecord,
    EventType,
    InstanceRecord,
    Status,
    StepRecord,
    StepStatus,
)
from runtara.testing import samples
from runtara.testing.conformance_walks import (
    event_matches,
    in_order,
    instance_matches,
    step_matches,
    walk,
    walk_records,
)
from runtara.testing.samples import creation, unit
from tests.postgres_server import new_schema, server_url
from tests.sqlite_stores import opened

CHOICES: Final = settings(
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
"""Nothing is shrunk: each example opens a store, and what is drawn is small anyway."""
OpenStore = Callable[[], AbstractAsyncContextManager[Store]]

# ---------------------------------------------------------------- what is in the store

TENANTS: Final = ("acme", "acme\0")
WORDS: Final = ("a", "A", "a\0", "", "\u00e9", "e\u0301", "%", "_", "\\", "\U0001f600")
IDS: Final = (*WORDS, "ab", "a%", "\U0010ffff", "\U0010ffffa")
PIECES: Final = (
    *(word.encode() for word in (*WORDS, "\\u00e9", "x" * 3_000)),
    *(b"\xc3", b"\xa9", b"\xff\xfe", b"\0"),
)
INSTANTS: Final = (-(2**63), -1, 0, 1, 2, 3, 2**63 - 1)
KNOWN: Final = tuple(status for status in Status if status is not Status.UNKNOWN)

words = st.sampled_from(WORDS)
maybe_word = st.none() | words
instants = st.sampled_from(INSTANTS)
payloads = st.none() | st.lists(st.sampled_from(PIECES), max_size=4).map(b"".join)
texts = st.lists(st.sampled_from([word for word in WORDS if word]), min_size=1, max_size=2).map("".join)


@attrs.frozen(kw_only=True)
class History:
    """What one instance reported. A revision is a place in a list, from 1."""

    events: list[EventRecord]
    steps: list[StepRecord]

    def records(self) -> list[EventRecord | StepRecord]:
        return [*self.events, *self.steps]

    def listed(self) -> list[StepRecord]:
        """The steps as they are listed: with the payloads of their events."""
        payload_of = {event.revision: event.payload for event in self.events}
        return [
            attrs.evolve(
                step,
                start_payload=payload_of.get(step.revision),
                end_payload=None if step.end_revision is None else payload_of.get(step.end_revision),
            )
            for step in self.steps
        ]


events = st.builds(
    EventRecord,
    revision=st.just(0),
    type=st.sampled_from((EventType.CUSTOM, EventType.HEARTBEAT, EventType.COMPLETED)),
    subtype=maybe_word,
    payload=payloads,
    created_us=instants,
    scope_id=maybe_word,
    parent_scope_id=maybe_word,
)
steps = st.builds(
    StepRecord,
    revision=st.just(0),
    step_id=words,
    step_type=maybe_word,
    scope_id=maybe_word,
    parent_scope_id=maybe_word,
    started_us=instants,
    status=st.sampled_from(StepStatus),
    finished_us=st.none() | instants,
    end_revision=st.none() | st.integers(1, 12),
)
instances = st.builds(
    samples.instance,
    row=st.just(0),
    tenant_id=st.sampled_from(TENANTS),
    instance_id=st.sampled_from(IDS),
    workflow=maybe_word,
    status=st.sampled_from(KNOWN),
    created_us=instants,
    finished_us=instants,
    awaits_client_us=st.none() | instants,
)


def numbered(records: list[Any]) -> list[Any]:
    return [attrs.evolve(record, revision=n) for n, record in enumerate(records, 1)]


histories = st.builds(
    History,
    events=st.lists(events, max_size=12).map(numbered),
    steps=st.lists(steps, max_size=12).map(numbered),
)
populations = st.lists(
    instances, max_size=16, unique_by=lambda record: (record.tenant_id, record.instance_id)
)

# ---------------------------------------------------------------- what is asked

Conditions = tuple[dict[str, Any], ...]
"""The fields of each condition of a filter."""


def where(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """One condition."""
    return st.fixed_dictionaries(fields)


def between(start: str, end: str) -> st.SearchStrategy[dict[str, Any]]:
    """A range, open at one end, both or neither."""
    return where(**{start: st.none() | instants, end: st.none() | instants})


in_scopes: Final = (where(scope_id=words), where(parent_scope_id=words), where(root_only=st.just(True)))
event_conditions: Final = st.tuples(
    where(type=st.sampled_from(EventType)),
    where(subtype=words),
    where(text=texts),
    between("created_from_us", "created_before_us"),
    *in_scopes,
)
step_conditions: Final = st.tuples(
    where(statuses=st.frozensets(st.sampled_from(StepStatus), min_size=1)),
    where(type=words),
    where(step_ids=st.frozensets(words, min_size=1, max_size=4)),
    *in_scopes,
)
instance_conditions: Final = st.tuples(
    where(tenant_id=st.sampled_from(TENANTS)),
    where(statuses=st.frozensets(st.sampled_from(KNOWN), min_size=1)),
    where(workflow=words),
    where(id_prefix=st.sampled_from(IDS)),
    where(awaits_client=st.just(True)),
    between("created_from_us", "created_before_us"),
    between("finished_from_us", "finished_before_us"),
)


def combinations(conditions: Conditions) -> Iterator[dict[str, Any]]:
    """The fields of every subset of the conditions."""
    for chosen in product((False, True), repeat=len(conditions)):
        yield dict(chain.from_iterable(fields.items() for fields in compress(conditions, chosen)))


limits = st.integers(1, 9)


@asynccontextmanager
async def in_memory() -> AsyncIterator[Store]:
    async with opened(":memory:", synchronous="OFF") as store:
        yield store


@asynccontextmanager
async def on_postgres() -> AsyncIterator[Store]:
    async with open_postgres(server_url(), schema=new_schema()) as store:
        yield store


BACKENDS: Final[dict[str, tuple[OpenStore, int]]] = {
    "sqlite": (in_memory, 25),
    "postgresql": (on_postgres, 2),
}
"""How each is opened, and how many examples it is given."""


# ---------------------------------------------------------------- the comparison


async def write_history(store: Store, history: History) -> int:
    """Beside another instance that has the same one, and must not be seen."""
    row = await store.reserve(2)
    for r in (row, row + 1):
        units = [unit(r, record.revision, record) for record in history.records()]
        assert await store.apply([creation(samples.instance(r)), *units]) == frozenset()
    return row


async def compare(
    store: Store, row: int, kind: type[Any], asked: Any, wanted: Sequence[Any], limit: int
) -> None:
    assert await store.count_records(row, kind, asked) == len(wanted), asked
    for descending in (False, True):
        seen = await walk_records(store, row, kind, asked, limit=limit, descending=descending)
        assert seen == (list(reversed(wanted)) if descending else list(wanted)), (asked, descending)


@pytest.mark.parametrize("backend", BACKENDS)
def test_events_are_those_that_a_plain_filter_finds(backend: str) -> None:
    open_store, examples = BACKENDS[backend]

    @settings(CHOICES, max_examples=examples)
    @given(histories, event_conditions, limits)
    def check(history: History, conditions: Conditions, limit: int) -> None:
        async def run() -> None:
            async with open_store() as store:
                row = await write_history(store, history)
                for chosen in combinations(conditions):
                    asked = EventFilter(**chosen)
                    wanted = [event for event in history.events if event_matches(event, asked)]
                    await compare(store, row, EventRecord, asked, wanted, limit)

        trio.run(run)

    check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_are_those_that_a_plain_filter_finds(backend: str) -> None:
    open_store, examples = BACKENDS[backend]

    @settings(CHOICES, max_examples=examples)
    @given(histories, step_conditions, limits)
    def check(history: History, conditions: Conditions, limit: int) -> None:
        async def run() -> None:
            async with open_store() as store:
                row = await write_history(store, history)
                for chosen in combinations(conditions):
                    asked = StepFilter(**chosen)
                    wanted = [step for step in history.listed() if step_matches(step, asked)]
                    await compare(store, row, StepRecord, asked, wanted, limit)

        trio.run(run)

    check()


def placed(records: list[InstanceRecord], row: int) -> list[InstanceRecord]:
    """With keys of their own, and a time of finish if and only if they have ended."""
    return [
        attrs.evolve(
            record, row=row + n, finished_us=record.finished_us if record.status.is_terminal else None
        )
        for n, record in enumerate(records)
    ]


async def compare_instances(
    store: Store, records: list[InstanceRecord], asked: InstanceFilter, limit: int
) -> None:
    wanted = [record for record in records if instance_matches(record, asked)]
    assert await store.count_instances(asked) == len(wanted), asked
    for order in InstanceOrder:
        for descending in (False, True):
            seen = await walk(store, asked, order, limit=limit, descending=descending)
            assert seen == in_order(wanted, order, descending=descending), (asked, order, descending)


def call_everything_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SQLite go by the indexes by which it goes where a condition holds for many."""
    for bound, low in {"FEW": 3, "FEW_OF_A_WORKFLOW": 2, "MOST_TENANTS": 1}.items():
        monkeypatch.setattr(indexes, bound, low)


@pytest.mark.parametrize("backend", BACKENDS)
def test_instances_are_those_that_a_plain_filter_finds(backend: str) -> None:
    open_store, examples = BACKENDS[backend]

    @settings(CHOICES, max_examples=examples)
    @given(populations, instance_conditions, limits)
    def check(population: list[InstanceRecord], conditions: Conditions, limit: int) -> None:
        async def run() -> None:
            async with open_store() as store:
                records = placed(population, await store.reserve(len(population) + 1))
                assert await store.apply([creation(record) for record in records]) == frozenset()
                for chosen in combinations(conditions):
                    await compare_instances(store, records, InstanceFilter(**chosen), limit)

        trio.run(run)

    check()


def test_instances_are_the_same_where_a_condition_holds_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    call_everything_many(monkeypatch)
    test_instances_are_those_that_a_plain_filter_finds("sqlite")


@pytest.mark.parametrize("descending", [False, True])
async def test_a_walk_goes_on_when_few_have_become_many(
    descending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    call_everything_many(monkeypatch)
    async with in_memory() as store:
        row = await store.reserve(20)
        records = [samples.instance(row + n, instance_id=f"a{n}", created_us=n // 2) for n in range(20)]
        there, added = records[::8], [record for n, record in enumerate(records) if n % 8]

        async def add(number: int) -> None:
            await store.apply([creation(record) for record in added[number - 1 :: 3]] if number < 4 else [])

        assert await store.apply([creation(record) for record in there]) == frozenset()
        asked = InstanceFilter(tenant_id="acme", id_prefix="a")
        seen = await walk(store, asked, InstanceOrder.CREATED, limit=1, descending=descending, between=add)
        assert [r for r in seen if r in there] == in_order(
            there, InstanceOrder.CREATED, descending=descending
        )
        assert len(seen) == len(set(seen))


@pytest.mark.parametrize("text", ["", "\ud800", "a\udfff"])
def test_a_text_that_no_payload_can_hold_is_refused(text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        EventFilter(text=text)
    assert caught.value.field == "text"
