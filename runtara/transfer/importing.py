"""An export into a store that is held for writing, as a runtime holds it.

Rules:

1. A file is read twice: first all of it is verified, and nothing is written; then it is written. A stream
   is read once.
2. Each instance gets a new row and keeps everything else. One that is in the store already is refused, or
   left as it is.
3. While an import is not over, a note in the store says so, and no runtime opens it (`unfinished`). Started
   again with the same export, an import goes on: the rows of its own instances are above all others, and of
   an instance that is there in part the records are counted, kind by kind, for they were written in the
   order of the export.
4. Every number up to the highest epoch is taken before the import is over, so no epoch is ever given out
   twice.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing
from functools import partial
from typing import Final

import attrs

from runtara.errors import BadExport, Conflict, ImportUnfinished, StoreRefused
from runtara.persistence.store import Store, Unit
from runtara.records import InstanceRecord, SignalRecord
from runtara.transfer.format import APPENDED, WORD_OF
from runtara.transfer.items import End, Header, Item, Progress, Record, Skipped, Trailer
from runtara.transfer.streams import Receive, lines_of
from runtara.transfer.unfinished import (
    FINISHED,
    UNFINISHED,
    Unfinished,
    find_unfinished,
    keep_unfinished,
)
from runtara.transfer.verifying import Verifier
from runtara.transfer.writing import Writer, patiently

ROWS_AT_ONCE: Final = 1000
FLUSHES_PER_NOTE: Final = 16
LINES_PER_REPORT: Final = 1000

Source = Callable[[], AbstractAsyncContextManager[Receive]]
"""Opens the bytes of an export, from the beginning."""


@attrs.frozen(kw_only=True)
class Imported:
    """What an import has done."""

    counts: dict[str, int]
    """Lines of each kind in the export."""
    bytes: int
    sha256: str
    """Of all lines before the trailer."""
    existing: int
    """Instances that were in the store before and are as they were."""
    skipped: int
    """Lines about what the export itself is missing."""
    before: bool = False
    """Whether this export was imported before; then nothing was done."""


async def import_store(
    store: Store,
    source: Source,
    *,
    twice: bool,
    longest: int,
    payload_bytes: int,
    skip_existing: bool = False,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Imported:
    """Import an export, or go on with an import that was broken off.

    Args:
        twice: Whether ``source`` can be opened again; then all of it is verified before anything is written.
        longest: Bytes of a line, at most.
        payload_bytes: The largest value that is taken.
        skip_existing: Leave instances that are in the store as they are, instead of refusing the export.

    Raises:
        BadExport: It is cut off, was changed, or is none.
        Conflict: It holds an instance that is in the store already.
        ImportUnfinished: An import of another export was begun and has not ended.
        StoreError: The store does not answer, or refuses something.

    Cancellation: What is written stays; the same import goes on with it.
    """
    run = Import(store, Verifier(payload_bytes), skip_existing)
    readings = [("imported", run.write)]
    if twice:
        readings.insert(0, ("verified", run.look_at))
    for verb, take in readings:
        run.verifier = Verifier(payload_bytes)
        async with source() as receive, aclosing(lines_of(receive, longest)) as lines:
            async for line in lines:
                item = run.verifier.take(line)
                await take(item, len(line))
                if run.before:
                    return run.summary()
                if isinstance(item, End) or run.verifier.line % LINES_PER_REPORT == 0:
                    report(run.progress(verb))
        run.verifier.finish()
    await run.end()
    return run.summary()


@attrs.frozen(kw_only=True)
class Present:
    """The instance whose lines are being read, and where they go."""

    record: InstanceRecord
    """As it is in the store."""
    there: Counter[type]
    """How many of its records are in the store already, by class."""


class Import:
    """One import under way."""

    def __init__(self, store: Store, verifier: Verifier, skip_existing: bool) -> None:
        self.store = store
        self.verifier = verifier
        self.skip_existing = skip_existing
        self.writer = Writer(store)
        self.flushes = 0
        self.creating: set[tuple[str, str]] = set()
        """Instances that are created by what is not written yet."""
        self.note: Unfinished | None = None
        self.before = False
        self.over = 0
        """Instances whose lines have all been read."""
        self.existing = 0
        self.last_row = 0
        self.rows = range(0)
        """Reserved, and not used yet."""
        self.highest_epoch = 0
        self.reached: Unfinished | None = None
        """What the note is to say once all that was taken is durable."""
        self.sha256 = ""
        self.present: Present | None = None
        """None between instances, and for one that is left as it is."""

    def summary(self) -> Imported:
        tally = self.verifier.tally
        return Imported(
            counts=dict(tally.counts),
            bytes=tally.bytes,
            sha256=self.sha256,
            existing=self.existing,
            skipped=tally.counts[WORD_OF[Skipped]],
            before=self.before,
        )

    def progress(self, verb: str) -> Progress:
        tally = self.verifier.tally
        instances = tally.counts[WORD_OF[InstanceRecord]]
        return Progress(verb=verb, instances=instances, lines=tally.lines, bytes=tally.bytes)

    # ------------------------------------------------------------ the first reading

    async def look_at(self, item: Item, size: int) -> None:
        """Look for what stands against this import, while nothing is written."""
        match item:
            case Header():
                await self.look_at_notes()
            case InstanceRecord() if not self.skip_existing:
                self.require_absent(await self.find(item))

    async def look_at_notes(self) -> None:
        """Whether this is a new import, goes on with one, or was done before."""
        header = self.verifier.tally.sha256
        self.note = await patiently(partial(find_unfinished, self.store))
        if self.note is None:
            last = await patiently(partial(self.store.note, FINISHED))
            self.before = last == header and not self.skip_existing
        elif self.note.header != header:
            raise ImportUnfinished(
                "an import of another export has not ended: go on with that one, or take back what it has"
                " brought with `runtara import --discard`"
            )

    async def find(self, record: InstanceRecord) -> InstanceRecord | None:
        return await patiently(partial(self.store.find, record.tenant_id, record.instance_id))

    def require_absent(self, found: InstanceRecord | None) -> None:
        if found is not None and (self.note is None or found.row < self.note.first_row):
            raise Conflict(
                "instance_id",
                f"{found.instance_id!r} of tenant {found.tenant_id!r} is in the store already;"
                " --skip-existing leaves such instances as they are",
            )

    # ------------------------------------------------------------ the reading that writes

    async def write(self, item: Item, size: int) -> None:
        match item:
            case Header():
                await self.begin()
            case InstanceRecord():
                await self.begin_instance(item, size)
            case End():
                self.end_instance()
            case Trailer():
                self.sha256 = item.sha256
            case Skipped():
                pass
            case _:
                await self.write_record(item, size)

    async def begin(self) -> None:
        await self.look_at_notes()
        if self.note is not None:
            self.last_row, self.existing = self.note.last_row, self.note.existing
        elif not self.before:
            await self.take_rows()
            self.note = Unfinished(header=self.verifier.tally.sha256, first_row=self.rows[0])
            await self.keep_note()

    async def take_rows(self) -> None:
        first = await patiently(partial(self.store.reserve, ROWS_AT_ONCE))
        self.rows = range(first, first + ROWS_AT_ONCE)

    async def keep_note(self) -> None:
        assert self.note is not None
        await patiently(partial(keep_unfinished, self.store, self.note))

    async def begin_instance(self, record: InstanceRecord, size: int) -> None:
        assert self.note is not None
        self.highest_epoch = max(self.highest_epoch, record.epoch)
        if self.over < self.note.done:
            return
        key = (record.tenant_id, record.instance_id)
        if key in self.creating:
            await self.flush()
        found = await self.find(record)
        if found is None:
            await self.create(record, size)
        elif found.row >= self.note.first_row:
            await self.go_on_with(record, found)
        elif self.skip_existing:
            self.existing += 1
        else:
            self.require_absent(found)

    async def create(self, record: InstanceRecord, size: int) -> None:
        if not self.rows:
            await self.take_rows()
        self.last_row, self.rows = self.rows[0], self.rows[1:]
        stored = attrs.evolve(record, row=self.last_row)
        self.creating.add((record.tenant_id, record.instance_id))
        self.present = Present(record=stored, there=Counter())
        await self.add(
            Unit(row=stored.row, epoch=0, base=0, revision=stored.revision, ops=(stored,), size=size)
        )

    async def go_on_with(self, record: InstanceRecord, found: InstanceRecord) -> None:
        """An instance that this import has created earlier (rule 3)."""
        if found.row <= self.last_row:
            raise BadExport(self.verifier.line, "instance_id", "occurs twice")
        if attrs.evolve(record, row=found.row) != found:
            raise BadExport(self.verifier.line, "instance", "is not what it was when its import began")
        self.last_row = found.row
        there = {
            kind: await patiently(partial(self.store.count_records, found.row, kind)) for kind in APPENDED
        }
        self.present = Present(record=found, there=Counter(there))

    async def write_record(self, record: Record, size: int) -> None:
        if isinstance(record, SignalRecord):
            self.highest_epoch = max(self.highest_epoch, record.epoch or 0)
        if self.present is None:
            return
        kind = type(record)
        if self.present.there[kind]:
            self.present.there[kind] -= 1
            return
        instance = self.present.record
        unit = Unit(
            row=instance.row,
            epoch=instance.epoch,
            base=instance.revision,
            revision=getattr(record, "revision", instance.revision),
            ops=(record,),
            size=size,
        )
        await self.add(unit)

    async def add(self, unit: Unit) -> None:
        self.writer.add(unit)
        if self.writer.is_full:
            await self.flush()

    async def flush(self) -> None:
        """Make durable what was taken, and now and then how far that is."""
        await self.write_batch()
        self.flushes += 1
        if self.flushes % FLUSHES_PER_NOTE == 0:
            await self.note_progress()

    async def write_batch(self) -> None:
        try:
            await self.writer.flush()
        except StoreRefused as error:
            raise StoreRefused(f"among the lines up to {self.verifier.line}: {error.message}") from error
        self.creating.clear()

    async def note_progress(self) -> None:
        if self.reached is not None:
            self.note, self.reached = self.reached, None
            await self.keep_note()

    # ------------------------------------------------------------ the end

    def end_instance(self) -> None:
        assert self.note is not None
        self.present = None
        self.over += 1
        self.reached = attrs.evolve(self.note, done=self.over, last_row=self.last_row, existing=self.existing)

    async def end(self) -> None:
        """All was read and is as it must be: the store is whole."""
        assert self.note is not None
        await self.write_batch()
        await self.pass_over(self.highest_epoch)
        await patiently(partial(self.store.set_note, FINISHED, self.note.header))
        await patiently(partial(self.store.set_note, UNFINISHED, None))

    async def pass_over(self, epoch: int) -> None:
        """Take all numbers up to an epoch, so that no registration gets one of them."""
        first = await patiently(partial(self.store.reserve, 1))
        if first < epoch:
            await patiently(partial(self.store.reserve, epoch - first))
