"""Damage in a store: it ends an export, or is left out and told, and nothing else is lost."""

import json
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from runtara.errors import StoreCorrupt, StoreFailed, StoreUnavailable
from runtara.persistence.store import MAX_PAGE, Page, PageRequest, Store
from runtara.records import EventRecord, InstanceRecord, PayloadKind, PutPayload
from runtara.testing import samples
from runtara.transfer.exporting import Exported
from runtara.transfer.items import Skipped
from runtara.transfer.walking import MOST_LOST, Gap, Lost, Range, pages, readable_pages, readable_times
from tests.sqlite_stores import opened
from tests.transfers import Exporting, content, exported, imported

# ------------------------------------------------------------ walking around damage


def numbers(count: int, damaged: frozenset[int]) -> Callable[[PageRequest], Awaitable[Page[int]]]:
    """A list of numbers; a page that meets a damaged one, or would begin the next, cannot be read."""

    async def ask(page: PageRequest) -> Page[int]:
        await trio.lowlevel.checkpoint()
        order = range(count)[::-1] if page.descending else range(count)
        at = 0 if page.cursor is None else int(page.cursor)
        items = tuple(order[at : at + page.limit])
        if damaged.intersection(order[at : at + page.limit + 1]):
            raise StoreCorrupt("damaged")
        after = at + page.limit
        return Page(items=items, next=str(after) if after < count else None)

    return ask


async def walked(count: int, damaged: frozenset[int]) -> list[Any]:
    """The numbers that were read, and the gaps between them."""
    found: list[Any] = []
    async for page in readable_pages(numbers(count, damaged), lambda number: number):
        found += [page] if isinstance(page, Gap) else page
    return found


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 3 * MAX_PAGE), st.data())
def test_only_what_lies_between_the_first_and_the_last_damage_and_its_neighbours_is_lost(
    count: int, data: st.DataObject
) -> None:
    damaged = (
        data.draw(st.frozensets(st.integers(0, max(count - 1, 0)), max_size=3)) if count else frozenset()
    )
    found = trio.run(walked, count, damaged)
    if not damaged:
        assert found == list(range(count))
        return
    first, last = max(0, min(damaged) - 1), min(count - 1, max(damaged) + 1)
    [gap] = [item for item in found if isinstance(item, Gap)]
    assert found == [*range(first), gap, *range(last + 1, count)]
    assert gap.before == (first - 1 if first else None)
    assert gap.behind == (last + 1 if last + 1 < count else None)
    assert gap.why.message == "damaged"


async def test_an_error_that_is_no_damage_is_never_walked_around() -> None:
    async def ask(page: PageRequest) -> Page[int]:
        await trio.lowlevel.checkpoint()
        raise StoreUnavailable("gone")

    with pytest.raises(StoreUnavailable):
        [page async for page in readable_pages(ask, lambda number: number)]


async def test_what_is_added_behind_the_damage_meanwhile_hides_nothing() -> None:
    """The newest page is read once only: asked for again, it would begin further on."""
    there = list(range(2 * MAX_PAGE))

    async def ask(page: PageRequest) -> Page[int]:
        await trio.lowlevel.checkpoint()
        if page.descending:
            there.append(len(there))
        order = there[::-1] if page.descending else there
        after = None if page.cursor is None else int(page.cursor)
        left = [n for n in order if after is None or (n < after if page.descending else n > after)]
        items = tuple(left[: page.limit])
        if 5 in left[: page.limit + 1]:
            raise StoreCorrupt("damaged")
        return Page(items=items, next=str(items[-1]) if len(left) > page.limit else None)

    found: list[int] = []
    async for page in readable_pages(ask, lambda number: number):
        found += [] if isinstance(page, Gap) else page
    assert [n for n in range(2 * MAX_PAGE) if n not in (4, 5, 6)] == [n for n in found if n < 2 * MAX_PAGE]


async def test_without_salvage_damage_is_raised() -> None:
    with pytest.raises(StoreCorrupt):
        [page async for page in pages(numbers(10, frozenset({5})))]


instants = st.sampled_from((-(2**63), -1, 0, 1, 2**63 - 1)) | st.integers(-20, 20)


def timeline(there: list[int], damaged: set[int]) -> Callable[[Range, PageRequest], Awaitable[Page[int]]]:
    """The list of some instants, of which pages look one ahead."""

    async def ask(range: Range, page: PageRequest) -> Page[int]:
        await trio.lowlevel.checkpoint()
        low = range.low if range.cursor is None else max(range.low, int(range.cursor) + 1)
        found = [instant for instant in there if low <= instant < range.high]
        if damaged.intersection(found[:3]):
            raise StoreCorrupt("damaged")
        return Page(items=tuple(found[:2]), next=str(found[1]) if len(found) > 2 else None)

    return ask


@settings(max_examples=200, deadline=None)
@given(st.sets(instants), st.sets(instants, max_size=4))
def test_of_instances_only_the_microsecond_of_the_damage_is_lost(there: set[int], damaged: set[int]) -> None:
    async def walk() -> list[int | Lost]:
        found: list[int | Lost] = []
        async for page in readable_times(timeline(sorted(there), damaged & there), Range()):
            found += [page] if isinstance(page, Lost) else page
        return found

    found = trio.run(walk)
    assert [item for item in found if not isinstance(item, Lost)] == sorted(there - damaged)
    assert [item.instant_us if isinstance(item, Lost) else item for item in found] == sorted(there)


async def test_a_list_of_which_nothing_can_be_read_is_given_up() -> None:
    async def ask(range: Range, page: PageRequest) -> Page[int]:
        await trio.lowlevel.checkpoint()
        raise StoreCorrupt("damaged")

    found: list[object] = []
    with pytest.raises(StoreCorrupt):
        async for page in readable_times(ask, Range()):
            found.append(page)
    assert len(found) == MOST_LOST


# ------------------------------------------------------------ damage in a file

EVENTS = 30


async def fill(store: Store) -> None:
    """Three instances; the second one has a longer history."""
    row = await store.reserve(3)
    for number in range(3):
        record = samples.instance(row + number, instance_id=f"i{number}")
        put = [PutPayload(kind=kind, data=b"x") for kind in PayloadKind]
        await store.apply([samples.creation(record, *put, *samples.one_of_each(1))])
    units = [samples.unit(2, n, samples.event(n), samples.compensatable(n)) for n in range(2, EVENTS + 1)]
    await store.apply(units)


async def damaged(path: Path, *statements: str) -> bytes:
    """A store at ``path`` with damage; returns what was exported before."""
    async with opened(path) as store:
        await fill(store)
        before = await exported(store)
    connection = sqlite3.connect(path)
    with connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    return before


async def salvaged(path: Path) -> tuple[bytes, Exported, list[Skipped]]:
    told: list[Skipped] = []
    exporting = Exporting()
    async with opened(path, read_only=True) as store:
        done = await exporting.run(store, tell=told.append, salvage=True)
    return bytes(exporting.data), done, told


def skipped_in(lines: bytes) -> list[dict[str, Any]]:
    return [found for found in map(json.loads, lines.splitlines()) if found["t"] == "skipped"]


UNKNOWN_WORD = "UPDATE events SET type = 99 WHERE instance = 2 AND revision = 7"
NO_TEXT = "UPDATE events SET subtype = CAST(x'ff' AS TEXT) WHERE instance = 2 AND revision IN (7, 9)"
ROW_WORD = "UPDATE instances SET status = 99 WHERE row = 2"
ROW_TEXT = "UPDATE instances SET workflow = CAST(x'ff' AS TEXT) WHERE row = 2"
OPEN_SIGNAL = "UPDATE signals SET type = 99 WHERE instance = 2"
CHECKPOINT = "UPDATE checkpoints SET checkpoint_id = CAST(x'ff' AS TEXT) WHERE instance = 2 AND revision = 3"


@pytest.mark.parametrize("statement", [UNKNOWN_WORD, NO_TEXT, ROW_WORD, ROW_TEXT, OPEN_SIGNAL, CHECKPOINT])
async def test_damage_ends_an_export(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "a.db"
    await damaged(path, statement)
    async with opened(path, read_only=True) as store:
        with pytest.raises(StoreFailed):
            await exported(store)


async def test_a_record_with_an_unknown_word_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    await damaged(path, UNKNOWN_WORD)
    async with opened(path, read_only=True) as store:
        with pytest.raises(
            StoreCorrupt, match="instance acme/i1: event of revision 7: type: holds the number 99"
        ):
            await exported(store)


@pytest.mark.parametrize(
    ("statement", "missing", "what", "revision", "problem"),
    [
        (UNKNOWN_WORD, range(7, 8), "event", 7, "type: holds the number 99"),
        (NO_TEXT, range(6, 11), "event", None, "some between revision 5 and revision 11: "),
    ],
)
async def test_only_the_damaged_records_are_left_out_and_they_are_told(
    tmp_path: Path, statement: str, missing: range, what: str, revision: int | None, problem: str
) -> None:
    path = tmp_path / "a.db"
    await damaged(path, statement)
    lines, done, told = await salvaged(path)
    [skipped] = told
    assert (skipped.tenant_id, skipped.instance_id) == ("acme", "i1")
    assert (skipped.what, skipped.revision) == (what, revision)
    assert skipped.problem.startswith(problem)
    assert [found["problem"] for found in skipped_in(lines)] == [skipped.problem]
    assert done.skipped == 1
    async with opened(":memory:") as other:
        summary = await imported(other, lines)
        assert summary.skipped == 1
        record = await other.find("acme", "i1")
        assert record is not None
        page = await other.list_records(record.row, EventRecord, PageRequest(descending=False))
        assert [event.revision for event in page.items] == [
            n for n in range(1, EVENTS + 1) if n not in missing
        ]


async def test_a_checkpoint_that_is_left_out_takes_its_compensation_with_it(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    await damaged(path, CHECKPOINT)
    lines, _, told = await salvaged(path)
    assert [(skipped.what, skipped.revision) for skipped in told] == [("checkpoint", None)]
    async with opened(":memory:") as other:
        await imported(other, lines)
        loaded = await other.load("acme", "i1", 100)
        assert loaded is not None
        assert {one.revision for one in loaded.compensations} == set(range(5, EVENTS + 1))


@pytest.mark.parametrize("statement", [ROW_WORD, OPEN_SIGNAL])
async def test_an_instance_that_no_runtime_could_load_is_left_out_as_a_whole(
    tmp_path: Path, statement: str
) -> None:
    path = tmp_path / "a.db"
    await damaged(path, statement)
    lines, done, told = await salvaged(path)
    assert [(skipped.instance_id, skipped.what) for skipped in told] == [("i1", "instance")]
    assert done.counts["instance"] == 2
    async with opened(":memory:") as other:
        await imported(other, lines)
        assert await other.find("acme", "i1") is None
        assert await other.find("acme", "i2") is not None


async def test_an_instance_whose_row_cannot_be_read_is_told_by_its_creation(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    await damaged(path, ROW_TEXT)
    lines, done, told = await salvaged(path)
    [skipped] = told
    assert (skipped.tenant_id, skipped.instance_id, skipped.what) == (None, None, "instance")
    assert skipped.problem.startswith("some created at 1002: ")
    assert (done.counts["instance"], done.skipped) == (2, 1)
    assert len(skipped_in(lines)) == 1


async def test_a_payload_that_cannot_be_read_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    await damaged(path)
    told: list[Skipped] = []
    exporting = Exporting()
    async with opened(path, read_only=True) as store:

        class Damaged:
            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

            async def payloads(self, row: int, kinds: frozenset[PayloadKind]) -> dict[PayloadKind, bytes]:
                if row == 2 and PayloadKind.OUTPUT in kinds:
                    raise StoreCorrupt("a page is damaged")
                return await store.payloads(row, kinds)

        await exporting.run(Damaged(), tell=told.append, salvage=True)
    assert [(skipped.what, skipped.problem) for skipped in told] == [("payload", "output: a page is damaged")]
    kinds = [found["kind"] for found in map(json.loads, exporting.lines) if found["t"] == "payload"]
    assert kinds.count("input") == 3
    assert kinds.count("output") == 2


async def test_a_sound_store_is_salvaged_as_it_is_exported(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    before = await damaged(path)
    lines, done, told = await salvaged(path)
    assert content(lines) == content(before)
    assert (done.skipped, told) == (0, [])


async def test_pages_of_the_file_that_are_overwritten_cost_only_what_stood_on_them(tmp_path: Path) -> None:
    """Real damage: a page in the middle of the events is zeroed."""
    path = tmp_path / "a.db"
    async with opened(path) as store:
        await fill(store)
        big = [samples.unit(3, n, samples.event(n, payload=bytes([n]) * 3000)) for n in range(2, 200)]
        await store.apply(big)
    data = path.read_bytes()
    at = data.index(bytes([100]) * 1000) // 4096 * 4096
    path.write_bytes(data[:at] + bytes(4096) + data[at + 4096 :])
    async with opened(path, read_only=True) as store:
        with pytest.raises(StoreFailed):
            await exported(store)
    lines, done, told = await salvaged(path)
    assert [(skipped.instance_id, skipped.what) for skipped in told] == [("i2", "event")]
    assert done.counts["instance"] == 3
    lost = 199 + EVENTS + 1 - done.counts["event"]
    assert 1 <= lost <= 10
    async with opened(":memory:") as other:
        await imported(other, lines)
        found = await other.find("acme", "i2")
        assert isinstance(found, InstanceRecord)
