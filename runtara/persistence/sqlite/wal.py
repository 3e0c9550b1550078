"""The write-ahead log: how much of it waits to be moved into the file, and moving it.

Rules:

1. The log is moved on purpose, by `LogKeeper.maintain`, after `CHECKPOINT_PAGES` pages: an error of the disk
   is then raised, where an automatic checkpoint would swallow it.
2. PASSIVE waits for nobody. Once all is moved and no reader is in the way, the next write starts the log
   again from its beginning, so its size stays bounded.
3. A log over `FAR_PAGES` is one that readers kept from starting again: TRUNCATE waits for them, as long as
   the busy timeout; if they stay, that is logged with the size, and tried again only after another
   `CHECKPOINT_PAGES`.

How many frames the log holds is read from the log itself: the frames of its present round carry the two
salts of its header, older ones beyond them do not, so the end is found by bisection. That is exact and costs
some 15 small reads. `LogKeeper.written` is a cheap upper bound that says when to look.
"""

import logging
import os
import sqlite3
import struct
from typing import Final

import attrs

logger = logging.getLogger("runtara.persistence")

CHECKPOINT_PAGES: Final = 10_000
FAR_PAGES: Final = 4 * CHECKPOINT_PAGES

HEADER: Final = struct.Struct(">4sII4x8s8x")
"""Magic, version, page size, (checkpoint sequence), salts, (checksum)."""
FRAME_HEADER_BYTES: Final = 24
SALT_OFFSET: Final = 8
PAGES_PER_ROW: Final = 5
"""At most: a page of the table and one of each index, with room for splits."""
PAGES_PER_BATCH: Final = 4


@attrs.frozen
class Log:
    """What the log holds now."""

    salt: bytes
    """Names the round; another one after the log started again."""
    frames: int
    page_bytes: int


EMPTY: Final = Log(b"", 0, 0)


def read_log(path: str) -> Log:
    """Look into the log file at ``path``; a missing or empty one holds nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return EMPTY
    try:
        return inspect(descriptor)
    finally:
        os.close(descriptor)


def inspect(descriptor: int) -> Log:
    head = os.pread(descriptor, HEADER.size, 0)
    if len(head) < HEADER.size:
        return EMPTY
    _, _, page_bytes, salt = HEADER.unpack(head)
    step = page_bytes + FRAME_HEADER_BYTES
    low, high = 0, max(0, (os.fstat(descriptor).st_size - HEADER.size) // step)
    while low < high:
        middle = (low + high) // 2
        found = os.pread(descriptor, len(salt), HEADER.size + middle * step + SALT_OFFSET)
        low, high = (middle + 1, high) if found == salt else (low, middle)
    return Log(salt, low, page_bytes)


@attrs.define
class LogKeeper:
    """Keeps the log of one file short. Belongs to the writer's connection and thread."""

    path: str
    """Of the database; the log lies beside it."""
    written: int = 0
    """Pages that may have been written since the log was last looked at, at most."""
    moved: Log = EMPTY
    """What was in the file when the log was last moved."""
    waiting: int = 0
    """Frames that were waiting when the log was last looked at."""

    @property
    def log_path(self) -> str:
        return self.path + "-wal"

    def note(self, rows: int, size: int) -> None:
        """A batch of so many rows and bytes was committed."""
        self.written += PAGES_PER_BATCH + PAGES_PER_ROW * rows + size // 4096

    @property
    def may_be_due(self) -> bool:
        """False while not even the upper bound reaches the threshold."""
        return self.waiting + self.written >= CHECKPOINT_PAGES

    def maintain(self, connection: sqlite3.Connection) -> None:
        """Move the log into the file, if it is long enough."""
        log = self.look()
        if self.waiting < CHECKPOINT_PAGES:
            return
        run_checkpoint(connection, "PASSIVE")
        if log.frames >= FAR_PAGES and not run_checkpoint(connection, "TRUNCATE"):
            size = log.frames * (log.page_bytes + FRAME_HEADER_BYTES)
            logger.warning(
                "the write-ahead log %s holds %d bytes: a reader keeps it from starting again",
                self.log_path,
                size,
            )
        self.moved = log
        self.waiting = 0

    def look(self) -> Log:
        log = read_log(self.log_path)
        before = self.moved.frames if log.salt == self.moved.salt else 0
        self.waiting = log.frames - before
        self.written = 0
        return log


def run_checkpoint(connection: sqlite3.Connection, mode: str) -> bool:
    """Whether it could do all that its mode promises."""
    busy: int = connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()[0]
    return busy == 0
