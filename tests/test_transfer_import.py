"""An export into a store: what is refused, what is gone on with, and how a runtime goes on from it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

import runtara
from runtara.errors import (
    BadExport,
    Conflict,
    GuardFailed,
    ImportUnfinished,
    OutcomeUnknown,
    StoreCorrupt,
    StoreUnavailable,
    ValidationError,
)
from runtara.persistence.store import InstanceFilter, Store, Unit
from runtara.records import PayloadKind, PutPayload, Status
from runtara.testing import samples
from runtara.transfer import importing, writing
from runtara.transfer.discarding import discard_import
from runtara.transfer.items import Progress
from runtara.transfer.unfinished import UNFINISHED, Unfinished, keep_unfinished
from tests.runtimes import runtime, scripted_store, url_of
from tests.sqlite_stores import opened
from tests.transfers import content, exported, forged, imported

HOUR = 3600.0


async def fill(store: Store, count: int = 4) -> None:
    """Instances with a history, of which the first are completed."""
    for number in range(count):
        row = await store.reserve(1)
        record = samples.instance(row, instance_id=f"i{number}", epoch=10 + number, created_us=number)
        if number < 2:
            record = attrs.evolve(record, status=Status.COMPLETED, finished_us=5)
        payload = PutPayload(kind=PayloadKind.INPUT, data=b"in")
        await store.apply([samples.creation(record, payload, *samples.one_of_each(1))])
        for revision in range(2, 4):
            unit = samples.unit(row, revision, *samples.one_of_each(revision), epoch=record.epoch)
            assert await store.apply([unit]) == frozenset()


async def an_export(count: int = 4) -> bytes:
    async with opened(":memory:") as store:
        await fill(store, count)
        return await exported(store)


async def state_of(store: Store) -> tuple[int, str | None]:
    """How many instances there are, and the note about an import."""
    return await store.count_instances(InstanceFilter()), await store.note(UNFINISHED)


def split(lines: bytes) -> list[bytes]:
    return lines.splitlines(keepends=True)


# ------------------------------------------------------------ what is refused


async def test_a_file_that_is_cut_off_writes_nothing() -> None:
    lines = split(await an_export())
    async with opened(":memory:") as store:
        for count in (0, 1, len(lines) // 2, len(lines) - 1):
            with pytest.raises(BadExport) as caught:
                await imported(store, b"".join(lines[:count]))
            assert (caught.value.details["line"], caught.value.field) == (count + 1, "line")
        assert await state_of(store) == (0, None)


async def test_a_file_that_was_changed_writes_nothing() -> None:
    lines = await an_export()
    async with opened(":memory:") as store:
        with pytest.raises(BadExport, match="sha256: is not the digest of the instance's lines"):
            await imported(store, lines.replace(b'"error 3"', b'"error 4"'))
        with pytest.raises(BadExport, match="line 7: state: must be base64 text"):
            await imported(store, lines.replace(b'"state":"', b'"state":"-', 1))
        assert await state_of(store) == (0, None)


async def test_a_line_that_is_too_long_is_refused_before_it_is_held() -> None:
    header = split(await an_export())[0]
    async with opened(":memory:") as store:
        with pytest.raises(BadExport, match="line 2: line: is longer than 2000 bytes"):
            await imported(store, header + b"x" * 10**6, longest=2000)
        with pytest.raises(BadExport, match="line 2: line: is longer than 2000 bytes"):
            await imported(store, header + b"x" * 2001 + b"\n" + header, longest=2000)


async def test_an_instance_that_is_there_already_is_refused_and_nothing_is_written() -> None:
    lines = await an_export()
    async with opened(":memory:") as store:
        await store.apply([samples.creation(samples.instance(1, instance_id="i2"))])
        with pytest.raises(Conflict, match="'i2' of tenant 'acme' is in the store already"):
            await imported(store, lines)
        assert await state_of(store) == (1, None)


async def test_instances_that_are_there_already_can_be_left_as_they_are() -> None:
    lines = await an_export()
    async with opened(":memory:") as store:
        mine = samples.instance(await store.reserve(1), instance_id="i2")
        await store.apply([samples.creation(mine)])
        done = await imported(store, lines, skip_existing=True)
        assert (done.counts["instance"], done.existing) == (4, 1)
        assert await store.find("acme", "i2") == mine
        assert await store.count_records(mine.row, type(samples.event(1))) == 0
        assert await state_of(store) == (4, None)
        again = await imported(store, lines, skip_existing=True)
        assert (again.existing, again.before) == (4, False)


async def test_the_same_export_again_does_nothing_and_says_so() -> None:
    lines = await an_export()
    async with opened(":memory:") as store:
        await imported(store, lines)
        before = await exported(store)
        assert (await imported(store, lines)).before
        assert (await imported(store, lines, twice=False)).before
        assert await exported(store) == before


async def test_an_instance_that_occurs_twice_is_refused() -> None:
    lines = split(await an_export(2))
    end = next(at for at, line in enumerate(lines) if b'"t":"end"' in line)
    twice = b"".join(forged([*lines[: end + 1], *lines[1:]]))
    for units in (1, 10_000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writing, "BATCH_UNITS", units)
            async with opened(":memory:") as store:
                with pytest.raises(BadExport, match=f"line {end + 2}: instance_id: occurs twice"):
                    await imported(store, twice)
                assert (await state_of(store))[1] is not None


async def test_what_the_store_refuses_leaves_the_import_unfinished() -> None:
    """Two checkpoints of one name: only the store can tell."""
    lines = split(await an_export(1))
    at = next(at for at, line in enumerate(lines) if b'"step-2"' in line)
    lines[at] = lines[at].replace(b"step-2", b"step-1")
    async with opened(":memory:") as store:
        with pytest.raises(runtara.StoreRefused, match=f"among the lines up to {len(lines)}: "):
            await imported(store, b"".join(forged(lines)))
        assert (await state_of(store))[1] is not None


async def test_another_import_is_refused_while_one_is_unfinished() -> None:
    lines = await an_export()
    async with opened(":memory:") as store:
        await keep_unfinished(store, Unfinished(header="another", first_row=1))
        with pytest.raises(ImportUnfinished, match="import of another export has not ended"):
            await imported(store, lines)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"header": 1}', "{", '{"first_row": 1, "x": 1}'])
async def test_a_damaged_note_is_damage(text: str) -> None:
    lines = await an_export(0)
    async with opened(":memory:") as store:
        await store.set_note(UNFINISHED, text)
        with pytest.raises(StoreCorrupt, match="note of an unfinished import"):
            await imported(store, lines)


# ------------------------------------------------------------ epochs and rows


async def test_every_imported_epoch_is_below_the_next_number() -> None:
    async with opened(":memory:") as store:
        signal = samples.signal(2, epoch=5_000)
        await store.apply([samples.creation(samples.instance(1, epoch=4_000), signal)])
        lines = await exported(store)
    async with opened(":memory:") as other:
        await imported(other, lines)
        assert await other.reserve(1) == 5_001


async def test_a_counter_that_is_higher_already_is_left_alone() -> None:
    lines = await an_export()
    async with opened(":memory:") as store:
        await store.reserve(100_000)
        await imported(store, lines)
        assert await store.reserve(1) == 100_001 + importing.ROWS_AT_ONCE + 1


async def test_the_highest_epoch_that_is_taken_leaves_room_for_more() -> None:
    async with opened(":memory:") as store:
        await store.apply([samples.creation(samples.instance(1, epoch=2**62))])
        lines = await exported(store)
    async with opened(":memory:") as other:
        await imported(other, lines)
        assert await other.reserve(1_000_000) == 2**62 + 1


async def test_rows_are_reserved_as_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "ROWS_AT_ONCE", 3)
    lines = await an_export(8)
    async with opened(":memory:") as store:
        await store.reserve(50)
        await imported(store, lines)
        rows = [(await store.find("acme", f"i{n}")) for n in range(8)]
        assert [record.row for record in rows if record] == list(range(51, 59))


# ------------------------------------------------------------ broken off, and gone on with


class Killed(BaseException):
    """The program was killed."""


@attrs.define
class Mortal:
    """A store whose program is killed at its n-th write: before it, or after it."""

    store: Store
    left: int
    after: bool

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.store, name)
        if name not in ("apply", "reserve", "set_note"):
            return call

        async def write(*arguments: Any) -> Any:
            self.left -= 1
            if self.left == 0 and not self.after:
                raise Killed
            found = await call(*arguments)
            if self.left == 0:
                raise Killed
            return found

        return write


async def killed_at(store: Store, lines: bytes, write: int, after: bool, **options: Any) -> bool:
    """Whether the import was killed; if not, it is over."""
    try:
        await imported(Mortal(store, write, after), lines, **options)
    except Killed:
        return True
    return False


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "BATCH_UNITS", 7)
    monkeypatch.setattr(importing, "FLUSHES_PER_NOTE", 3)
    monkeypatch.setattr(importing, "ROWS_AT_ONCE", 2)


@pytest.mark.parametrize(("after", "twice"), [(False, True), (True, False)])
async def test_an_import_that_is_killed_at_any_write_goes_on(
    after: bool, twice: bool, small_batches: None
) -> None:
    lines = await an_export(3)
    write = 1
    while True:
        async with opened(":memory:") as store:
            killed = await killed_at(store, lines, write, after, twice=twice)
            if killed and (await state_of(store))[1] is not None:
                with pytest.raises(ImportUnfinished):
                    await exported(store)
            await imported(store, lines, twice=twice)
            assert content(await exported(store)) == content(lines)
            assert await store.note(UNFINISHED) is None
            assert await store.reserve(1) > 12
        if not killed:
            break
        write += 1
    assert write > 15


async def test_an_import_that_is_killed_again_and_again_gets_to_its_end(small_batches: None) -> None:
    lines = await an_export()
    lives = 1
    async with opened(":memory:") as store:
        mine = samples.instance(await store.reserve(1), instance_id="i1")
        await store.apply([samples.creation(mine)])
        while await killed_at(store, lines, 5 + lives // 3, lives % 2 == 0, skip_existing=True):
            lives += 1
        assert lives > 3
        again = await imported(store, lines, skip_existing=True)
        assert again.existing == 4
        assert await store.find("acme", "i1") == mine
        await store.apply(
            [samples.unit(mine.row, 2, attrs.evolve(mine, revision=2, status=Status.FAILED, finished_us=1))]
        )
        await store.purge([mine.row], 100)
        await imported(store, lines, skip_existing=True)
        assert content(await exported(store)) == content(lines)


async def test_the_summary_counts_what_was_there_before_however_often_it_was_killed(
    small_batches: None,
) -> None:
    lines = await an_export()
    write = 1
    killed = True
    while killed:
        async with opened(":memory:") as store:
            row = await store.reserve(2)
            await store.apply(
                [samples.creation(samples.instance(row + n, instance_id=f"i{2 * n}")) for n in range(2)]
            )
            killed = await killed_at(store, lines, write, True, skip_existing=True)
            note = await store.note(UNFINISHED)
            done = await imported(store, lines, skip_existing=True)
            if note is not None:
                assert done.existing == 2
        write += 1
    assert write > 10


async def test_a_file_that_changed_between_two_runs_is_noticed(small_batches: None) -> None:
    lines = await an_export()
    other = lines.replace(b'"attempt":1,"max_attempts":3', b'"attempt":2,"max_attempts":3')
    other = b"".join(forged(split(other)))
    assert other != lines
    async with opened(":memory:") as store:
        await killed_at(store, lines, 5, True)
        with pytest.raises(BadExport, match="instance: is not what it was when its import began"):
            await imported(store, other)
        assert (await state_of(store))[1] is not None


async def test_a_stream_is_read_once_and_what_is_wrong_with_it_leaves_an_unfinished_import() -> None:
    lines = await an_export()
    async with opened(":memory:") as store:
        with pytest.raises(BadExport):
            await imported(store, lines[:-10], twice=False)
        assert (await state_of(store))[1] is not None
        with pytest.raises(BadExport, match="trailer has no place behind the trailer"):
            await imported(store, lines + split(lines)[-1], twice=False)
        assert (await state_of(store))[1] is not None
        await imported(store, lines, twice=False)
        assert content(await exported(store)) == content(lines)


# ------------------------------------------------------------ a store that is away


async def test_a_store_that_is_away_for_a_while_is_waited_for(
    autojump_clock: trio.testing.MockClock,
) -> None:
    lines = await an_export()
    async with scripted_store() as store:
        store.faults = [StoreUnavailable("busy"), StoreUnavailable("busy")]
        await imported(store, lines)
        assert content(await exported(store)) == content(lines)


async def test_a_store_that_stays_away_ends_the_import(autojump_clock: trio.testing.MockClock) -> None:
    lines = await an_export()
    async with scripted_store() as store:
        store.away = StoreUnavailable("gone")
        with pytest.raises(StoreUnavailable, match="gone"):
            await imported(store, lines)
        assert trio.current_time() >= writing.PATIENCE_SECONDS - writing.LONGEST_DELAY
        store.away = None
        await imported(store, lines)
        assert content(await exported(store)) == content(lines)


@pytest.mark.parametrize("written", [True, False])
async def test_a_commit_whose_outcome_is_unknown_is_settled(
    written: bool, autojump_clock: trio.testing.MockClock
) -> None:
    lines = await an_export()
    async with scripted_store() as store:
        if written:
            store.after_commit = [OutcomeUnknown("no answer")]
        else:
            store.faults = [OutcomeUnknown("no answer")]
        store.settling = [StoreUnavailable("busy"), frozenset() if written else None]
        await imported(store, lines)
        assert content(await exported(store)) == content(lines)


async def test_a_chain_that_is_left_out_ends_the_import() -> None:
    lines = await an_export()
    async with scripted_store() as store:
        store.left_out_rows = frozenset({1})
        with pytest.raises(GuardFailed):
            await imported(store, lines)
        assert (await state_of(store))[1] is not None


# ------------------------------------------------------------ discarded


async def test_discarding_takes_back_what_the_import_has_brought_and_nothing_else(
    small_batches: None,
) -> None:
    lines = await an_export()
    async with opened(":memory:") as store:
        await store.reserve(50)
        mine = [samples.creation(samples.instance(row, instance_id=f"mine{row}")) for row in (1, 2)]
        await store.apply(mine)
        before = content(await exported(store))
        seen: list[Progress] = []
        assert await killed_at(store, lines, 14, True)
        there = (await state_of(store))[0] - 2
        assert there > 1
        assert await discard_import(store, 9, seen.append) == there
        assert seen[-1] == Progress(verb="removed", instances=there, lines=0, bytes=0)
        assert await state_of(store) == (2, None)
        assert content(await exported(store)) == before
        assert not await store.sweep(1)
        assert (await store.growth()).rows["events"] == 0
        with pytest.raises(ValidationError, match="no import into this store is unfinished"):
            await discard_import(store, 9)
        await imported(store, lines)


# ------------------------------------------------------------ a runtime on it


async def test_no_runtime_opens_a_store_while_an_import_is_unfinished(
    tmp_path: Path, small_batches: None
) -> None:
    path = tmp_path / "a.db"
    lines = await an_export()
    async with opened(path) as store:
        with pytest.raises(BadExport):
            await imported(store, lines[:-10], twice=False)
    with pytest.raises(ImportUnfinished, match=r"a\.db has not ended: run the same `runtara import` again"):
        async with runtime(url_of(path)):
            raise AssertionError("it was opened")
    async with runtara.open_reader(url_of(path), tenant="acme") as reader:
        assert (await reader.list_instances()).items
    async with opened(path) as store:
        await imported(store, lines)
    async with runtime(url_of(path), tenant="acme") as rt:
        assert len((await rt.list_instances()).items) == 4


async def moved(tmp_path: Path, prepare: Callable[[runtara.Runtime], Any]) -> str:
    """The url of a store with everything that a runtime had, which worked as ``prepare`` says."""
    old, new = tmp_path / "old.db", tmp_path / "new.db"
    async with runtime(url_of(old)) as rt:
        await prepare(rt)
    async with opened(old) as store:
        lines = await exported(store)
    async with opened(new) as store:
        await store.reserve(1)
        await imported(store, lines)
        assert content(await exported(store)) == content(lines)
    return url_of(new)


async def test_a_sleeping_instance_wakes_in_the_new_store(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    deadlines: list[int | None] = []

    async def prepare(rt: runtara.Runtime) -> None:
        async with rt.register("a") as instance:
            with trio.move_on_after(1):
                await instance.sleep(HOUR, checkpoint_id="nap", state=b"zzz")
        deadlines.append((await rt.get("a")).record.sleep_until_us)

    url = await moved(tmp_path, prepare)
    async with runtime(url) as rt:
        view = await rt.get("a")
        assert (view.record.status, view.record.sleep_until_us) == (Status.SUSPENDED, deadlines[0])
        await trio.sleep(HOUR + 1)
        assert (await rt.get("a")).record.sleep_until_us is None
        async with rt.register("a") as instance:
            began = trio.current_time()
            reply = await instance.sleep(HOUR, checkpoint_id="nap", state=b"zzz")
            assert reply.deadline_us == deadlines[0]
            assert trio.current_time() - began < 1
            assert (await instance.get_checkpoint("nap")).state == b"zzz"


async def test_a_pending_signal_is_delivered_and_a_request_is_remembered(tmp_path: Path) -> None:
    sent: list[Any] = []

    async def prepare(rt: runtara.Runtime) -> None:
        async with rt.register("a") as instance:
            await instance.checkpoint("one", b"1")
        sent.append(await rt.send_custom_signal("a", "paid", b"42", idempotency_key="evt-7"))

    url = await moved(tmp_path, prepare)
    async with runtime(url) as rt:
        assert await rt.send_custom_signal("a", "paid", b"42", idempotency_key="evt-7") == sent[0]
        assert len((await rt.list_signals("a")).items) == 1
        with pytest.raises(Conflict):
            await rt.send_custom_signal("a", "paid", b"43", idempotency_key="evt-7")
        async with rt.register("a") as instance:
            assert (await instance.get_checkpoint("one")).state == b"1"
            reply = await instance.wait_signal("paid", checkpoint_id="payment")
            assert reply.payload == b"42"


async def test_a_registration_gets_a_higher_epoch_than_any_before(tmp_path: Path) -> None:
    epochs: list[int] = []

    async def prepare(rt: runtara.Runtime) -> None:
        for _ in range(5):
            async with rt.register("a") as instance:
                epochs.append(instance.epoch)

    url = await moved(tmp_path, prepare)
    async with runtime(url) as rt, rt.register("a") as instance:
        assert instance.epoch > max(epochs)
        await instance.complete(b"done")
    async with runtime(url) as rt:
        assert (await rt.get("a")).output == b"done"


async def test_a_running_instance_that_nobody_takes_over_is_suspended(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    """Its program was killed, and what was left of its store was exported."""
    path = tmp_path / "new.db"
    async with opened(":memory:") as store:
        running = samples.instance(1, tenant_id="default", instance_id="a", epoch=5)
        await store.apply([samples.creation(running)])
        lines = await exported(store)
    async with opened(path) as store:
        await imported(store, lines)
    async with runtime(url_of(path)) as rt:
        await trio.sleep(60)
        assert (await rt.get("a")).record.reason is runtara.Reason.ORPHANED


def test_a_note_holds_plain_json() -> None:
    note = Unfinished(header="a", first_row=1, done=2, last_row=3, existing=4)
    assert Unfinished(**json.loads(json.dumps(attrs.asdict(note)))) == note


async def test_units_say_what_they_guard() -> None:
    """Each record is a unit of its own revision, behind the row that the first one creates."""
    written: list[Unit] = []
    lines = await an_export(1)
    async with scripted_store() as store:
        await imported(store, lines)
        written = [unit for batch in store.written for unit in batch]
    assert [(unit.base, unit.epoch) for unit in written] == [(0, 0), *[(1, 10)] * (len(written) - 1)]
    for unit in written:
        assert len(unit.ops) == 1
        assert getattr(unit.ops[0], "revision", unit.revision) == unit.revision
