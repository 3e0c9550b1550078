"""Exports in tests: from a store to bytes, and from bytes into a store."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from runtara.executor import InlineExecutor
from runtara.limits import MEBIBYTE
from runtara.persistence.store import Store
from runtara.transfer.exporting import Exported, Start, begin, export_store
from runtara.transfer.format import write_line
from runtara.transfer.importing import Imported, import_store
from runtara.transfer.items import Progress, Skipped
from runtara.transfer.rules import line_limit
from runtara.transfer.streams import Receive, Spool, Write
from runtara.transfer.verifying import Tally

PAYLOAD_BYTES: Final = 4 * MEBIBYTE


@attrs.define
class Exporting:
    """What an export into memory needs, and what it has written."""

    data: bytearray = attrs.Factory(bytearray)
    spools: list[Spool] = attrs.Factory(lambda: [Spool(InlineExecutor(), None) for _ in range(3)])

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.data += data

    async def run(
        self,
        store: Store,
        *,
        report: Callable[[Progress], None] = lambda progress: None,
        tell: Callable[[Skipped], None] = lambda skipped: None,
        **options: Any,
    ) -> Exported:
        start = await begin_export(store, self.write, **options)
        try:
            return await export_store(store, self.write, self.spools, start, report=report, tell=tell)
        finally:
            for spool in self.spools:
                spool.close()

    @property
    def lines(self) -> list[bytes]:
        return bytes(self.data).splitlines(keepends=True)


async def begin_export(store: Store, write: Write, **options: Any) -> Start:
    return await begin(store, write, program="1.2.3", created_us=1, export_id="x", **options)


async def exported(store: Store, **options: Any) -> bytes:
    """All lines of an export."""
    exporting = Exporting()
    await exporting.run(store, **options)
    return bytes(exporting.data)


def source_of(data: bytes, chunk: int = 1000) -> Callable[[], Any]:
    """A source that gives ``data`` in chunks, as often as it is opened."""

    @asynccontextmanager
    async def source() -> AsyncIterator[Receive]:
        at = 0

        async def receive() -> bytes:
            nonlocal at
            await trio.lowlevel.checkpoint()
            at += chunk
            return data[at - chunk : at]

        yield receive

    return source


async def imported(
    store: Store, data: bytes, *, chunk: int = 1000, payload_bytes: int = PAYLOAD_BYTES, **options: Any
) -> Imported:
    return await import_store(
        store,
        source_of(data, chunk),
        **{
            "twice": True,
            "longest": line_limit(payload_bytes),
            "payload_bytes": payload_bytes,
            **options,
        },
    )


def content(data: bytes) -> bytes:
    """An export without its header and its trailer, which belong to the export and not to the store."""
    lines = data.split(b"\n")
    return b"\n".join(lines[1:-2])


def forged(lines: list[bytes]) -> list[bytes]:
    """The lines of an export, with the digests and counts that fit them."""
    whole, part = Tally(), Tally()
    found: list[bytes] = []
    for line in lines:
        fields = json.loads(line)
        word = fields["t"]
        if word == "instance":
            part = Tally()
        if word == "end":
            line = write_line(part.end())
        elif word == "trailer":
            line = write_line(whole.trailer())
        found.append(line)
        for tally in (whole, part):
            tally.add_bytes(line)
            if word not in ("header", "end", "trailer"):
                tally.counts[word] += 1
    return found
