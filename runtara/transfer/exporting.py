"""A store, line by line: read through its contract only, so beside a running program as well.

Rules:

1. Instances come by creation. Each one is written as it was at one moment, after all of it was read
   (`reading`); what is purged meanwhile leaves nothing behind.
2. The walk ends with what had been created when it began.
3. A few instances are read at once. Of each, memory holds one page of records, its payloads, and what
   `Store.load` returns.
4. An export that was broken off goes on behind its last whole instance.
"""

from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial

import attrs
import trio

from runtara.errors import BadExport, StoreError, StoreFailed, ValidationError
from runtara.limits import MAX_INT
from runtara.persistence.store import InstanceFilter, InstanceOrder, Page, PageRequest, Store
from runtara.records import InstanceRecord, Status
from runtara.transfer.format import WORD_OF, write_line
from runtara.transfer.items import End, Header, Item, Progress, Skipped, Trailer
from runtara.transfer.reading import InstanceReader
from runtara.transfer.streams import Receive, Spool, Write, lines_of
from runtara.transfer.unfinished import require_whole
from runtara.transfer.verifying import Tally, Verifier
from runtara.transfer.walking import BEHIND, FIRST, Lost, Range, pages, readable_times


@attrs.frozen(kw_only=True)
class Exported:
    """What an export holds."""

    counts: dict[str, int]
    """Lines of each kind."""
    bytes: int
    sha256: str
    """Of all lines before the trailer."""

    @property
    def skipped(self) -> int:
        """Lines about what could not be read."""
        return self.counts.get(WORD_OF[Skipped], 0)


@attrs.frozen(kw_only=True)
class Start:
    """What is written already: a header, or all that an export that was broken off has left."""

    header: Header
    tally: Tally
    last: InstanceRecord | None = None
    """The instance written last."""
    together: frozenset[tuple[str, str]] = frozenset()
    """Those written that were created in the same microsecond as it."""
    sha256: str = ""
    """What the trailer says, if it is written too."""

    @property
    def over(self) -> bool:
        return self.sha256 != ""


# ---------------------------------------------------------------- beginning


async def begin(
    store: Store,
    write: Write,
    *,
    program: str,
    created_us: int,
    export_id: str,
    tenant_id: str | None = None,
    statuses: frozenset[Status] = frozenset(),
    salvage: bool = False,
) -> Start:
    """Write the header of a new export.

    Args:
        tenant_id: Whose instances; None: everybody's.
        statuses: Only instances with one of these; empty: all.
        salvage: Leave out what cannot be read.

    Raises:
        ImportUnfinished: The store holds only half of another export.
        StoreError: The store does not answer.
    """
    await require_whole(store)
    header = Header(
        program=program,
        backend=store.statistics().backend,
        created_us=created_us,
        export_id=export_id,
        until_us=await newest_creation(store, tenant_id, salvage),
        tenant_id=tenant_id,
        statuses=tuple(sorted(statuses)),
        salvage=salvage,
    )
    tally = Tally()
    line = write_line(header)
    tally.add(header, line)
    await write(line)
    return Start(header=header, tally=tally)


async def newest_creation(store: Store, tenant_id: str | None, salvage: bool) -> int | None:
    """When the newest instance was created (rule 2); None if there is none, or damage hides it."""
    where = InstanceFilter(tenant_id=tenant_id)
    try:
        page = await store.list_instances(where, InstanceOrder.CREATED, PageRequest(limit=1))
    except StoreFailed:
        if not salvage:
            raise
        return None
    return page.items[0].created_us if page.items else None


async def resume(
    receive: Receive,
    *,
    longest: int,
    payload_bytes: int,
    tenant_id: str | None = None,
    statuses: frozenset[Status] = frozenset(),
) -> Start | None:
    """Check what an export that was broken off has left; None if it did not even get to its first line.

    All behind ``tally.bytes`` of it is to be cut off.

    Args:
        receive: The bytes of its file, from the beginning.
        longest: Bytes of a line, at most.

    Raises:
        BadExport: Its first line is no header.
        ValidationError: It was begun for another tenant or other statuses.
    """
    verifier = Verifier(payload_bytes)
    start: Start | None = None
    line = b""
    async with aclosing(lines_of(receive, longest)) as lines:
        try:
            async for line in lines:
                start = after(start, verifier.take(line), verifier)
            verifier.finish()
        except BadExport:
            if start is None and line.endswith(b"\n"):
                raise
    if start is None:
        return None
    if start.header.tenant_id != tenant_id:
        raise ValidationError("tenant", f"was {start.header.tenant_id!r} when the export began")
    if frozenset(start.header.statuses) != statuses:
        words = ", ".join(status.word for status in start.header.statuses) or "any"
        raise ValidationError("status", f"was {words} when the export began")
    return start


def after(start: Start | None, item: Item, verifier: Verifier) -> Start | None:
    """What is whole once ``item`` was read."""
    match item:
        case Header():
            return Start(header=item, tally=verifier.tally.copy())
        case End() if start is not None and verifier.instance is not None:
            record = verifier.instance
            beside = start.last is not None and start.last.created_us == record.created_us
            key = (record.tenant_id, record.instance_id)
            return attrs.evolve(
                start,
                tally=verifier.tally.copy(),
                last=record,
                together=start.together | {key} if beside else frozenset({key}),
            )
        case Trailer() if start is not None:
            return attrs.evolve(start, tally=verifier.tally, sha256=item.sha256)
    return start


# ---------------------------------------------------------------- the rest


async def export_store(
    store: Store,
    write: Write,
    spools: Sequence[Spool],
    start: Start,
    *,
    report: Callable[[Progress], None] = lambda progress: None,
    tell: Callable[[Skipped], None] = lambda skipped: None,
) -> Exported:
    """Write everything behind ``start``, and the trailer.

    Args:
        spools: Each holds an instance until it is whole; so many are read at once.
        report: Called after each page and each instance.
        tell: Hears of everything that is left out, if the header says that this may be.

    Raises:
        StoreCorrupt: Something cannot be read, and nothing may be left out.
        StoreError: The store does not answer. What is written can be gone on with.
    """
    export = Export(store, write, spools, start, report, tell)
    if not start.over:
        await export.run()
    return export.summary()


class Export:
    """One export under way."""

    def __init__(
        self,
        store: Store,
        write: Write,
        spools: Sequence[Spool],
        start: Start,
        report: Callable[[Progress], None],
        tell: Callable[[Skipped], None],
    ) -> None:
        self.store = store
        self.sink = write
        self.start = start
        self.report = report
        self.tell = tell
        self.tally = start.tally
        self.sha256 = start.sha256
        self.expected: int | None = None
        self.readers = [
            InstanceReader(
                store=store,
                spool=spool,
                salvage=start.header.salvage,
                tell=tell,
                report=self.report_progress,
            )
            for spool in spools
        ]

    def summary(self) -> Exported:
        return Exported(counts=dict(self.tally.counts), bytes=self.tally.bytes, sha256=self.sha256)

    def report_progress(self) -> None:
        tallies = [self.tally, *(reader.tally for reader in self.readers)]
        self.report(
            Progress(
                verb="exported",
                instances=self.tally.counts[WORD_OF[InstanceRecord]],
                lines=sum(tally.lines for tally in tallies),
                bytes=sum(tally.bytes for tally in tallies),
                of=self.expected,
            )
        )

    async def run(self) -> None:
        with suppress(StoreFailed):  # it is only for show
            written = self.tally.counts[WORD_OF[InstanceRecord]] - len(self.start.together)
            self.expected = written + await self.store.count_instances(self.where())
        ask = partial(self.store.list_instances, self.where(), InstanceOrder.CREATED)
        walk = readable_times(self.ask_for, self.range()) if self.start.header.salvage else pages(ask)
        async with aclosing(walk):
            async for page in walk:
                if isinstance(page, Lost):
                    await self.skip(f"some created at {page.instant_us}: {page.why.message}")
                    continue
                left = [one for one in page if (one.tenant_id, one.instance_id) not in self.start.together]
                for at in range(0, len(left), len(self.readers)):
                    await self.write_instances(left[at : at + len(self.readers)])
        trailer = self.tally.trailer()
        self.sha256 = trailer.sha256
        await self.write_line(trailer)

    def where(self) -> InstanceFilter:
        header, last = self.start.header, self.start.last
        until_us = header.until_us
        return InstanceFilter(
            tenant_id=header.tenant_id,
            statuses=frozenset(header.statuses),
            created_from_us=None if last is None else last.created_us,
            created_before_us=None if until_us is None or until_us == MAX_INT else until_us + 1,
        )

    def range(self) -> Range:
        where = self.where()
        return Range(
            FIRST if where.created_from_us is None else where.created_from_us,
            BEHIND if where.created_before_us is None else where.created_before_us,
        )

    async def ask_for(self, range: Range, page: PageRequest) -> Page[InstanceRecord]:
        where = attrs.evolve(
            self.where(),
            created_from_us=range.low,
            created_before_us=None if range.high == BEHIND else range.high,
        )
        return await self.store.list_instances(where, InstanceOrder.CREATED, page)

    # ------------------------------------------------------------ instances

    async def write_instances(self, several: Sequence[InstanceRecord]) -> None:
        """Read some instances at once, and write them in order."""
        async with trio.open_nursery() as nursery:
            for reader, listed in zip(self.readers, several, strict=False):
                nursery.start_soon(reader.try_to_read, listed)
        for reader, listed in zip(self.readers, several, strict=False):
            await self.write_instance(reader, listed)

    async def write_instance(self, reader: InstanceReader, listed: InstanceRecord) -> None:
        found = reader.found
        if isinstance(found, InstanceRecord) and self.is_wanted(found):
            await self.commit(reader)
        await reader.clear()
        if isinstance(found, StoreFailed) and self.start.header.salvage:
            await self.skip(found.message, listed)
        elif isinstance(found, StoreError):
            raise found
        self.report_progress()

    def is_wanted(self, record: InstanceRecord) -> bool:
        """Whether it still has a status that was asked for."""
        statuses = self.start.header.statuses
        return not statuses or record.status in statuses

    async def commit(self, reader: InstanceReader) -> None:
        """The instance in a reader's spool is whole."""
        reader.spool.add(write_line(reader.tally.end()))
        await reader.spool.pour(self.write)
        self.tally.counts += reader.tally.counts

    # ------------------------------------------------------------ lines that belong to none

    async def write(self, data: bytes) -> None:
        self.tally.add_bytes(data)
        await self.sink(data)

    async def write_line(self, item: Item) -> None:
        line = write_line(item)
        self.tally.add(item, line)
        await self.sink(line)

    async def skip(self, problem: str, record: InstanceRecord | None = None) -> None:
        skipped = Skipped(
            tenant_id=None if record is None else record.tenant_id,
            instance_id=None if record is None else record.instance_id,
            what=WORD_OF[InstanceRecord],
            problem=problem,
        )
        await self.write_line(skipped)
        self.tell(skipped)
