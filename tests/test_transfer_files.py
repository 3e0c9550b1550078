"""Files of exports: lines out of chunks, a file that appears when it is whole, going on with a part."""

import os
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from runtara.errors import BadExport, ValidationError
from runtara.executor import InlineExecutor
from runtara.persistence.store import Store
from runtara.records import Status
from runtara.testing import samples
from runtara.transfer import streams
from runtara.transfer.exporting import Start, begin, export_store, resume
from runtara.transfer.items import Progress
from runtara.transfer.rules import line_limit
from runtara.transfer.streams import Spool, Target, lines_of, open_source, open_target
from tests.sqlite_stores import opened
from tests.transfers import PAYLOAD_BYTES, content, exported, source_of

# ------------------------------------------------------------ lines


async def lines_in(data: bytes, chunk: int, longest: int = 100) -> list[bytes]:
    async with source_of(data, chunk)() as receive:
        return [line async for line in lines_of(receive, longest)]


@given(st.lists(st.binary(max_size=9).filter(lambda line: b"\n" not in line)), st.integers(1, 12))
def test_lines_are_found_wherever_the_chunks_end(lines: list[bytes], chunk: int) -> None:
    data = b"\n".join(lines)
    found = trio.run(lines_in, data, chunk)
    assert b"".join(found) == data
    assert all(line.endswith(b"\n") for line in found[:-1])
    assert all(line.count(b"\n") <= 1 for line in found)
    assert b"" not in found


@pytest.mark.parametrize(
    "data", [b"a\n" + b"x" * 11, b"a\n" + b"x" * 11 + b"\n", b"a\nxxxxx" + b"x" * 6 + b"\nb"]
)
@pytest.mark.parametrize("chunk", [1, 3, 1000])
async def test_a_line_over_the_limit_is_refused_by_its_number(data: bytes, chunk: int) -> None:
    with pytest.raises(BadExport, match="line 2: line: is longer than 10 bytes"):
        await lines_in(data, chunk, longest=10)
    assert await lines_in(data, chunk, longest=11)


# ------------------------------------------------------------ a file that appears when it is whole


@asynccontextmanager
async def target_at(path: Path, *, force: bool = False, resume: bool = False) -> AsyncIterator[Target]:
    async with open_target(str(path), InlineExecutor(), force=force, resume=resume) as target:
        yield target


async def test_a_file_appears_when_it_is_whole_and_belongs_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    async with target_at(path) as target:
        await target.write(b"one")
        assert not path.exists()
        await target.write(b"two")
        await target.finish()
        assert path.read_bytes() == b"onetwo"
    assert [found.name for found in tmp_path.iterdir()] == ["x.jsonl"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_a_file_that_is_there_is_replaced_only_by_force_and_only_when_the_new_one_is_whole(
    tmp_path: Path,
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"old")
    for resume_too in (False, True):
        with pytest.raises(ValidationError, match=r"file: .*/x is there already; --force replaces it"):
            async with target_at(path, resume=resume_too):
                raise AssertionError("it was opened")
    async with target_at(path, force=True) as target:
        await target.write(b"new")
        assert path.read_bytes() == b"old"
        await target.finish()
    assert path.read_bytes() == b"new"


async def test_what_is_left_of_an_export_is_neither_lost_nor_mixed_with_another(tmp_path: Path) -> None:
    path = tmp_path / "x"
    async with target_at(path) as target:
        await target.write(b"half")
    with pytest.raises(ValidationError, match=r"x\.part is left of an earlier export: --resume goes on"):
        async with target_at(path):
            raise AssertionError("it was opened")
    async with target_at(path, resume=True) as target:
        assert await target.read() == b"half"
        await target.cut(2)
        await target.write(b"!")
    assert (tmp_path / "x.part").read_bytes() == b"ha!"
    async with target_at(path, force=True) as target:
        await target.write(b"new")
        await target.finish()
    assert path.read_bytes() == b"new"


async def test_two_exports_to_one_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "x"
    async with target_at(path) as target:
        await target.write(b"mine")
        for force, resume_too in ((True, False), (False, True)):
            with pytest.raises(ValidationError, match="another export is writing"):
                async with target_at(path, force=force, resume=resume_too):
                    raise AssertionError("it was opened")
        await target.finish()
    assert path.read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["missing/x", "folder"])
async def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.part").mkdir()
    with pytest.raises(ValidationError, match=f"file: {tmp_path / name}.part: (No such file|Is a directory)"):
        async with target_at(tmp_path / name, resume=True):
            raise AssertionError("it was opened")


async def test_a_source_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path, problem in ((tmp_path / "x", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ValidationError, match=f"file: {path}: {problem}"):
            async with open_source(str(path), InlineExecutor()):
                raise AssertionError("it was opened")


async def test_a_source_gives_all_bytes_of_its_file(tmp_path: Path) -> None:
    data = os.urandom(3 * streams.CHUNK + 5)
    path = tmp_path / "x"
    path.write_bytes(data)
    async with open_source(str(path), InlineExecutor()) as receive:
        chunks = []
        while chunk := await receive():
            chunks.append(chunk)
    assert b"".join(chunks) == data


async def test_a_spool_gives_back_what_it_took_or_forgets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "HELD", 10)
    spool = Spool(InlineExecutor(), str(tmp_path))
    taken = bytearray()

    async def write(data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        taken.extend(data)

    for text in (b"a" * 30, b"b", b"c" * 11, b"d"):
        spool.add(text)
        await spool.settle()
    assert spool.size == 1
    await spool.pour(write)
    assert taken == b"a" * 30 + b"b" + b"c" * 11 + b"d"
    spool.add(b"x" * 50)
    await spool.settle()
    await spool.clear()
    spool.add(b"y")
    taken.clear()
    await spool.pour(write)
    assert taken == b"y"
    assert list(tmp_path.iterdir()) == []
    spool.close()


# ------------------------------------------------------------ going on with a part


async def fill(store: Store) -> None:
    """Instances of which several were created in the same microsecond."""
    row = await store.reserve(6)
    for number, created in enumerate((1, 2, 2, 2, 3, 3)):
        record = samples.instance(row + number, instance_id=f"i{number}", created_us=created)
        await store.apply([samples.creation(record, *samples.one_of_each(1))])


async def go_on(
    store: Store, part: bytes, report: Callable[[Progress], None] = lambda progress: None
) -> bytes:
    """The whole export, gone on with from a part of it."""
    start = await left_of(part)
    data = bytearray(part[: 0 if start is None else start.tally.bytes])

    async def write(more: bytes) -> None:
        await trio.lowlevel.checkpoint()
        data.extend(more)

    if start is None:
        start = await begin(store, write, program="1.2.3", created_us=1, export_id="x")
    await export_store(store, write, [Spool(InlineExecutor(), None)], start, report=report)
    return bytes(data)


async def left_of(
    part: bytes, tenant_id: str | None = None, statuses: frozenset[Status] = frozenset()
) -> Start | None:
    async with source_of(part)() as receive:
        return await resume(
            receive,
            longest=line_limit(PAYLOAD_BYTES),
            payload_bytes=PAYLOAD_BYTES,
            tenant_id=tenant_id,
            statuses=statuses,
        )


async def test_an_export_that_was_cut_off_anywhere_ends_as_if_it_had_not_been() -> None:
    async with opened(":memory:") as store:
        await fill(store)
        whole = await exported(store)
        for size in (*range(0, len(whole), 97), len(whole) - 1, len(whole)):
            assert await go_on(store, whole[:size]) == whole, size


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_what_is_damaged_at_the_end_of_a_part_is_written_again(data: st.DataObject) -> None:
    async def run() -> None:
        async with opened(":memory:") as store:
            await fill(store)
            whole = await exported(store)
            size = data.draw(st.integers(whole.index(b"\n") + 1, len(whole)))
            rubbish = data.draw(st.sampled_from((b"\0" * 4096, b"{}\n", b"\n\n", b'{"t":"end"}\n', whole)))
            assert await go_on(store, whole[:size] + rubbish) == whole

    trio.run(run)


async def test_only_the_same_question_is_gone_on_with() -> None:
    async with opened(":memory:") as store:
        await fill(store)
        part = (await exported(store, tenant_id="acme", statuses=frozenset({Status.RUNNING})))[:2000]
        running = frozenset({Status.RUNNING})
        assert await left_of(part, "acme", running) is not None
        with pytest.raises(ValidationError, match="tenant: was 'acme' when the export began"):
            await left_of(part, None, running)
        with pytest.raises(ValidationError, match="status: was running when the export began"):
            await left_of(part, "acme", frozenset())


@pytest.mark.parametrize("part", [b"{}\n", b"name,age\n", b'{"t":"trailer","counts":{},"sha256":""}\n'])
async def test_what_is_no_export_is_not_gone_on_with(part: bytes) -> None:
    with pytest.raises(BadExport):
        await left_of(part)


async def test_what_was_created_since_is_not_added_when_an_export_goes_on() -> None:
    async with opened(":memory:") as store:
        await fill(store)
        whole = await exported(store)
        row = await store.reserve(1)
        late = samples.instance(row, instance_id="late", created_us=4)
        await store.apply([samples.creation(late)])
        assert content(await go_on(store, whole[: len(whole) // 2])) == content(whole)


async def test_the_progress_of_an_export_that_goes_on_counts_what_was_there() -> None:
    seen: list[Progress] = []
    async with opened(":memory:") as store:
        await fill(store)
        whole = await exported(store)
        for share in range(1, 10):
            await go_on(store, whole[: len(whole) * share // 10], seen.append)
            assert (seen[-1].instances, seen[-1].of) == (6, 6)
