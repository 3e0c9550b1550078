"""One instance of a store as lines, as it was at one moment (`snapshot`).

To salvage means to leave out records that cannot be read, and to say so in a line of its own. What the
runtime itself could not load is no instance any more: then `StoreFailed` is raised all the same.
"""

from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import attrs

from runtara.errors import StoreCorrupt, StoreError, StoreFailed, StoreUnavailable
from runtara.persistence.store import Loaded, R, Store
from runtara.records import (
    CheckpointRecord,
    CompensationAttemptRecord,
    ErrorRecord,
    EventRecord,
    InstanceRecord,
    PayloadKind,
    PutPayload,
    RequestRecord,
    RetryAttemptRecord,
    SignalRecord,
    StepRecord,
    WaitRecord,
)
from runtara.transfer.format import WORD_OF, write_line
from runtara.transfer.items import Record, Skipped
from runtara.transfer.shapes import FieldProblem
from runtara.transfer.snapshot import Moment, compensations_of, moment_of
from runtara.transfer.streams import Spool
from runtara.transfer.verifying import Tally
from runtara.transfer.walking import Gap, pages, readable_pages

MOST_TRIES: Final = 100
"""How often the beginning of an instance is read while its row moves."""


@attrs.define(eq=False, kw_only=True)
class InstanceReader:
    """Reads one instance after the other; `tally` and the spool hold the lines of the present one."""

    store: Store
    spool: Spool
    salvage: bool
    tell: Callable[[Skipped], None]
    """Hears of all that is left out."""
    report: Callable[[], None]
    """Called after each page."""
    tally: Tally = attrs.Factory(Tally)
    name: tuple[str, str] = ("", "")
    """Tenant and id of the present instance."""
    found: InstanceRecord | StoreError | None = None
    """What came of reading it."""

    async def try_to_read(self, listed: InstanceRecord) -> None:
        """Read all lines of an instance; `found` says what came of it."""
        try:
            self.found = await self.read(listed)
        except StoreError as error:
            self.found = error

    async def read(self, listed: InstanceRecord) -> InstanceRecord | None:
        """Read all lines of an instance; None if it is not there any more.

        Raises:
            StoreFailed: It cannot be read.
            StoreError: The store does not answer.
        """
        self.name = (listed.tenant_id, listed.instance_id)
        loaded = await self.read_beginning(listed)
        if loaded is None:
            return None
        row, moment = listed.row, moment_of(loaded)
        checkpoints = await self.read_checkpoints(row, moment)
        for compensation in compensations_of(loaded):
            if compensation.checkpoint_id in checkpoints:
                self.put(compensation)
        await self.read_records(row, WaitRecord, moment)
        await self.read_records(row, EventRecord, moment)
        await self.read_records(row, StepRecord, moment)
        await self.read_records(row, SignalRecord, moment)
        await self.read_records(row, RetryAttemptRecord, moment)
        await self.read_records(row, ErrorRecord, moment)
        await self.read_records(row, RequestRecord, moment)
        return loaded.record if await self.is_there(listed) else None

    async def clear(self) -> None:
        """Forget the present instance."""
        self.tally = Tally()
        await self.spool.clear()

    async def is_there(self, listed: InstanceRecord) -> bool:
        found = await self.store.find(*self.name)
        return found is not None and found.row == listed.row

    # ------------------------------------------------------------ writing

    def put(self, item: Record) -> bool:
        """Write a record, or leave it out; whether it is written."""
        try:
            self.write(item)
            return True
        except FieldProblem as error:
            word, revision = WORD_OF[type(item)], getattr(item, "revision", None)
            if not self.salvage:
                whose = "/".join(self.name)
                raise StoreCorrupt(f"instance {whose}: {word} of revision {revision}: {error}") from error
            self.skip(what=word, revision=revision, problem=str(error))
            return False

    def skip(self, **what: Any) -> None:
        skipped = Skipped(tenant_id=self.name[0], instance_id=self.name[1], **what)
        self.write(skipped)
        self.tell(skipped)

    def write(self, item: Record | Skipped) -> None:
        line = write_line(item)
        self.tally.add(item, line)
        self.spool.add(line)

    # ------------------------------------------------------------ the beginning

    async def read_beginning(self, listed: InstanceRecord) -> Loaded | None:
        """The row and all that moves only with it: read again while it does."""
        for _ in range(MOST_TRIES):
            loaded = await self.store.load(*self.name, 1)
            if loaded is None or loaded.record.row != listed.row:
                return None
            self.put(loaded.record)
            await self.read_payloads(listed.row)
            await self.read_records(listed.row, CompensationAttemptRecord, moment_of(loaded))
            if await self.store.find(*self.name) == loaded.record:
                return loaded
            await self.clear()
        raise StoreUnavailable(f"instance {'/'.join(self.name)} moves faster than it can be read")

    async def read_payloads(self, row: int) -> None:
        try:
            found = await self.store.payloads(row, frozenset(PayloadKind))
        except StoreFailed:
            if not self.salvage:
                raise
            found = await self.readable_payloads(row)
        for kind in sorted(found):
            self.put(PutPayload(kind=kind, data=found[kind]))

    async def readable_payloads(self, row: int) -> dict[PayloadKind, bytes]:
        found: dict[PayloadKind, bytes] = {}
        for kind in PayloadKind:
            try:
                found |= await self.store.payloads(row, frozenset({kind}))
            except StoreFailed as error:
                self.skip(what=WORD_OF[PutPayload], problem=f"{kind.word}: {error.message}")
        return found

    # ------------------------------------------------------------ the history

    async def read_checkpoints(self, row: int, moment: Moment) -> frozenset[str]:
        """Returns those that have a compensation."""
        found: set[str] = set()

        def note(record: CheckpointRecord) -> None:
            if record.compensation is not None:
                found.add(record.checkpoint_id)

        await self.read_records(row, CheckpointRecord, moment, note)
        return frozenset(found)

    async def read_records(
        self, row: int, kind: type[R], moment: Moment, note: Callable[[R], None] = lambda record: None
    ) -> None:
        """Write all records of a kind that the instance had at a moment."""
        ask = partial(self.store.list_records, row, kind)
        walk = readable_pages(ask, lambda record: record.revision) if self.salvage else pages(ask)
        async with aclosing(walk):
            async for page in walk:
                if isinstance(page, Gap):
                    self.skip_gap(kind, page)
                    continue
                for record in page:
                    if record.revision > moment.revision:
                        return
                    if self.put(moment.as_of(record)):
                        note(record)
                await self.spool.settle()
                self.report()

    def skip_gap(self, kind: type[R], gap: Gap[R]) -> None:
        after = "the first" if gap.before is None else f"revision {gap.before.revision}"
        until = "the last" if gap.behind is None else f"revision {gap.behind.revision}"
        self.skip(what=WORD_OF[kind], problem=f"some between {after} and {until}: {gap.why.message}")
