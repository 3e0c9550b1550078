"""The side-effect log: what really happened, kept outside the store.

Rules:

1. One entry is one line, written by one ``os.write`` to a file opened for appending. The kernel has it when
   the call returns, so a SIGKILL of the writer loses no entry that was written.
2. `Kind.DID` is written when the body of a step has its effect. All others are written only after the runtime
   answered: they are what was acknowledged.
3. Values are hexadecimal, so a line has exactly five words.
"""

import os
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

import attrs


class Kind(Enum):
    """What an entry tells."""

    UP = "up"
    """The child of this life has opened the store."""
    DID = "did"
    """The body of a step had its effect."""
    ACK = "ack"
    """The runtime acknowledged a checkpoint, or gave back one that it had; the value is its state."""
    SLEPT = "slept"
    """A durable sleep ended; the value is its deadline and the wall clock, as decimal microseconds."""
    SENT = "sent"
    """The runtime accepted a signal; the value is its payload."""
    GOT = "got"
    """A wait returned a signal; the value is its payload."""
    DONE = "done"
    """The end of an instance was acknowledged; the value is its output."""


@attrs.frozen
class Entry:
    """One line of the log."""

    kind: Kind
    life: int
    """Of which child, from 1."""
    instance_id: str = "-"
    name: str = "-"
    """The checkpoint id."""
    value: bytes = b""

    @property
    def place(self) -> tuple[str, str]:
        return self.instance_id, self.name

    @property
    def line(self) -> str:
        return f"{self.kind.value} {self.life} {self.instance_id} {self.name} {self.value.hex() or '-'}"


def parse(line: str) -> Entry:
    """The entry of a line.

    Raises:
        ValueError: It is none.
    """
    kind, life, instance_id, name, value = line.split(" ")
    return Entry(Kind(kind), int(life), instance_id, name, b"" if value == "-" else bytes.fromhex(value))


def parse_all(lines: Iterable[str]) -> list[Entry]:
    """The entries of all lines. Raises `ValueError`, naming the first line that is none."""
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(parse(line))
        except ValueError:
            raise ValueError(f"line {number} of the side-effect log is damaged: {line[:80]!r}") from None
    return entries


class SideLog:
    """The writing end."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, entry: Entry) -> None:
        line = f"{entry.line}\n".encode()
        if os.write(self.descriptor, line) != len(line):
            raise OSError("the side-effect log took only a part of a line")

    def close(self) -> None:
        os.close(self.descriptor)


class LogReader:
    """The reading end: follows the file while it grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def read_new(self) -> list[Entry]:
        """The entries that were written since the last call. Raises `ValueError` for a damaged line."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self.offset += len(whole) + len(newline)
        return parse_all(whole.decode(errors="replace").split("\n")) if newline else []
