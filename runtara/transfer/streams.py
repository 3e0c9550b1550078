"""Bytes in and out: lines from chunks, a file that appears when it is whole, and what is not yet whole.

Rules:

1. An export is written to ``<file>.part``, which nobody else writes meanwhile. When it is whole it is
   synced, gets its name, and the folder is synced: so what has the name is whole, also after a loss of
   power.
2. What fails or is killed leaves the ``.part`` behind; `Target.read` and `Target.cut` go on with it.
3. All blocking calls on files run in the executor that is given.
4. No line is longer than a stated number of bytes, whatever a file holds.
"""

import fcntl
import io
import os
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, TypeVar

import attrs

from runtara.errors import BadExport, ValidationError
from runtara.executor import Executor

T = TypeVar("T")

CHUNK: Final = 1024 * 1024
HELD: Final = 4 * CHUNK
"""Bytes of one instance that are held in memory until it is whole; more of them wait in a file."""
FIELD: Final = "file"


# ---------------------------------------------------------------- reading

Receive = Callable[[], Awaitable[bytes]]
"""The next chunk; empty at the end."""


async def lines_of(receive: Receive, longest: int) -> AsyncGenerator[bytes, None]:
    """The lines that chunks hold, each with its newline; the last one may have none.

    Raises:
        BadExport: A line has more than ``longest`` bytes.
    """
    number, size = 1, 0
    parts: list[bytes] = []
    while chunk := await receive():
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            parts.append(end + b"\n")
            check_length(size + len(end), longest, number)
            yield b"".join(parts) if len(parts) > 1 else parts[0]
            parts, size, number = [], 0, number + 1
        parts.append(rest)
        size += len(rest)
        check_length(size, longest, number)
    if size:
        yield b"".join(parts)


def check_length(size: int, longest: int, number: int) -> None:
    if size > longest:
        raise BadExport(number, "line", f"is longer than {longest} bytes (RUNTARA_PAYLOAD_BYTES)")


async def in_file(executor: Executor, call: Callable[[], T], path: str) -> T:
    """Do something with a file. Raises `ValidationError` if the system refuses."""
    try:
        return await executor.run(call)
    except OSError as error:
        raise ValidationError(FIELD, f"{path}: {error.strerror}") from error


@asynccontextmanager
async def open_source(path: str, executor: Executor) -> AsyncIterator[Receive]:
    """The bytes of a file.

    Raises:
        ValidationError: It cannot be read.
    """
    file: io.FileIO = await in_file(executor, partial(io.FileIO, path), path)
    try:
        yield partial(in_file, executor, partial(file.read, CHUNK), path)
    finally:
        file.close()


# ---------------------------------------------------------------- writing


Write = Callable[[bytes], Awaitable[None]]
"""Takes bytes for good."""


@attrs.define(eq=False)
class Target:
    """A file in the making (rule 1). Made by `open_target`."""

    path: str
    file: io.FileIO
    executor: Executor

    @property
    def part(self) -> str:
        return part_of(self.path)

    @property
    def folder(self) -> str:
        return os.path.dirname(os.path.abspath(self.path))

    async def write(self, data: bytes) -> None:
        await in_file(self.executor, partial(write_all, self.file, data), self.part)

    async def read(self) -> bytes:
        return await in_file(self.executor, partial(self.file.read, CHUNK), self.part)

    async def cut(self, size: int) -> None:
        """Forget what is behind the first ``size`` bytes, and go on there."""
        await in_file(self.executor, partial(cut, self.file, size), self.part)

    async def finish(self) -> None:
        """The file is whole: it gets its name."""
        await in_file(self.executor, partial(give_name, self.file, self.part, self.path), self.path)


def part_of(path: str) -> str:
    return f"{path}.part"


def write_all(file: io.FileIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def cut(file: io.FileIO, size: int) -> None:
    file.truncate(size)
    file.seek(size)


def give_name(file: io.FileIO, part: str, path: str) -> None:
    os.fsync(file.fileno())
    os.replace(part, path)
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@asynccontextmanager
async def open_target(path: str, executor: Executor, *, force: bool, resume: bool) -> AsyncIterator[Target]:
    """A file to export to; only `Target.finish` gives it its name.

    Args:
        force: Replace what is at ``path``, and begin anew where an earlier export was broken off.
        resume: Open what an earlier export has left, if there is something, at its beginning.

    Raises:
        ValidationError: There is something at ``path``, or the file cannot be written, or another program is
            writing it.
    """
    file = await in_file(executor, partial(open_part, path, force, resume), part_of(path))
    try:
        yield Target(path, file, executor)
    finally:
        file.close()


def open_part(path: str, force: bool, resume: bool) -> io.FileIO:
    part = part_of(path)
    if os.path.exists(path) and not force:
        raise ValidationError(FIELD, f"{path} is there already; --force replaces it")
    try:
        flags = os.O_RDWR | os.O_CREAT | (0 if resume or force else os.O_EXCL)
        file = io.FileIO(os.open(part, flags, 0o600), "r+")
    except FileExistsError:
        raise ValidationError(
            FIELD, f"{part} is left of an earlier export: --resume goes on with it, --force begins anew"
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ValidationError(FIELD, f"another export is writing {part}") from None
    if not resume:
        file.truncate()
    return file


# ---------------------------------------------------------------- not yet whole


@attrs.define(eq=False)
class Spool:
    """Bytes that may still be taken back. Beyond `HELD` they wait in a file without a name."""

    executor: Executor
    folder: str | None
    """Of that file; None: where temporary files lie."""
    held: list[bytes] = attrs.Factory(list)
    size: int = 0
    """Of what is held in memory."""
    file: io.FileIO | None = None

    def add(self, data: bytes) -> None:
        """Take ``data``; now and then `settle` must be awaited."""
        self.held.append(data)
        self.size += len(data)

    async def settle(self) -> None:
        """Move what is held to the file, if it is much."""
        if self.size <= HELD:
            return
        if self.file is None:
            self.file = await self.run(partial(nameless, self.folder))
        await self.run(partial(write_all, self.file, b"".join(self.held)))
        self.held, self.size = [], 0

    async def clear(self) -> None:
        """Take everything back."""
        self.held, self.size = [], 0
        if self.file is not None:
            await self.run(partial(cut, self.file, 0))

    async def pour(self, write: Write) -> None:
        """Hand everything on, and be empty."""
        if self.file is not None:
            await self.run(partial(self.file.seek, 0))
            while data := await self.run(partial(self.file.read, CHUNK)):
                await write(data)
        if self.held:
            await write(b"".join(self.held))
        await self.clear()

    async def run(self, call: Callable[[], T]) -> T:
        return await in_file(self.executor, call, self.folder or "a temporary file")

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def nameless(folder: str | None) -> io.FileIO:
    """A file that is gone when it is closed."""
    number, name = tempfile.mkstemp(dir=folder)
    os.unlink(name)
    return io.FileIO(number, "r+")
