"""An import that will not be finished: taking back what it has brought."""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final

import attrs

from runtara.errors import ValidationError
from runtara.persistence.store import InstanceFilter, InstanceOrder, Store, Unit
from runtara.records import InstanceRecord, Reason, Status
from runtara.transfer.items import Progress
from runtara.transfer.unfinished import UNFINISHED, find_unfinished
from runtara.transfer.walking import pages
from runtara.transfer.writing import Writer, patiently

PURGED_AT_ONCE: Final = 100
DELETED_AT_ONCE: Final = 10_000


async def discard_import(
    store: Store, now_us: int, report: Callable[[Progress], None] = lambda progress: None
) -> int:
    """Remove every instance that an unfinished import has brought; returns how many there were.

    Raises:
        ValidationError: No import is unfinished.
        StoreError: The store does not answer.

    Cancellation: What is left goes when this is called again.
    """
    note = await patiently(partial(find_unfinished, store))
    if note is None:
        raise ValidationError("discard", "no import into this store is unfinished")
    removed = 0
    async with aclosing(
        pages(partial(store.list_instances, InstanceFilter(), InstanceOrder.CREATED))
    ) as walk:
        async for page in walk:
            ours = [record for record in page if record.row >= note.first_row]
            await end(store, ours, now_us)
            for at in range(0, len(ours), PURGED_AT_ONCE):
                rows = [record.row for record in ours[at : at + PURGED_AT_ONCE]]
                removed += len((await patiently(partial(store.purge, rows, DELETED_AT_ONCE))).rows)
                await patiently(store.maintain)
                report(Progress(verb="removed", instances=removed, lines=0, bytes=0))
    while await patiently(partial(store.sweep, DELETED_AT_ONCE)):
        await patiently(store.maintain)
    await patiently(partial(store.set_note, UNFINISHED, None))
    return removed


async def end(store: Store, records: Sequence[InstanceRecord], now_us: int) -> None:
    """Only what has ended can be purged."""
    writer = Writer(store)
    for record in records:
        if not record.status.is_terminal:
            writer.add(ending(record, now_us))
    await writer.flush()


def ending(record: InstanceRecord, now_us: int) -> Unit:
    revision = record.revision + 1
    ended = attrs.evolve(
        record, status=Status.CANCELLED, reason=Reason.CANCELLED, revision=revision, finished_us=now_us
    )
    return Unit(
        row=record.row, epoch=record.epoch, base=record.revision, revision=revision, ops=(ended,), size=512
    )
