"""What the writer process was told, kept outside the store: one line per acknowledgement.

Rules:

1. The writer adds a line only after the call that it speaks of has returned, with one `os.write` to a file
   that was opened for appending. So the line is there when the process is killed afterwards, and the effect
   that it names must be in the store.
2. A line is a kind, a key and a value. Whatever is acknowledged again under the same kind and key must have
   the same value, also in a later life of the process: a second version of the truth is a contradiction.
3. The last line may be torn by the kill; then nobody has read it, and it counts for nothing.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from enum import StrEnum

import attrs

Part = str | int | bool | None
Key = tuple[Part, ...]
"""The instance first (``tenant/id``), for all kinds but `SESSION`."""
Value = tuple[Part, ...]


class Kind(StrEnum):
    """What was acknowledged: key -> value."""

    SESSION = "session"
    """epoch -> instance"""
    CHECKPOINT = "checkpoint"
    """instance, checkpoint id -> digest of its state"""
    EVENT = "event"
    """instance, request id -> event id, subtype, digest of the payload"""
    SIGNAL = "signal"
    """instance, idempotency key -> signal id, type, signal key, digest of the payload"""
    CONSUMED = "consumed"
    """instance, signal id -> who consumed it: ``ack``, or the id of the wait"""
    DEADLINE = "deadline"
    """instance, wait id -> deadline"""
    OUTCOME = "outcome"
    """instance, wait id -> outcome"""
    ATTEMPT = "attempt"
    """instance, checkpoint id, attempt -> category"""
    ERROR = "error"
    """instance, error id -> code, digest of the message"""
    COMPENSATION = "compensation"
    """instance, checkpoint id -> step id, order, digest of the data"""
    UNDONE = "undone"
    """instance, checkpoint id, attempt -> success"""
    ENDED = "ended"
    """instance -> status"""
    OUTPUT = "output"
    """instance -> digest of the output"""
    TROUBLE = "trouble"
    """something that must not happen, in words -> nothing"""


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


@attrs.frozen
class Ack:
    """One line."""

    kind: Kind
    key: Key
    value: Value


class Pen:
    """Writes lines (rule 1). Belongs to the writer process."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, kind: Kind, key: Key, value: Value = ()) -> None:
        os.write(self.descriptor, json.dumps([kind, key, value]).encode() + b"\n")


def read_acks(path: str) -> Iterator[Ack]:
    """The lines of one life of the writer (rule 3)."""
    try:
        with open(path, "rb") as file:
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return
    for line in lines:
        kind, key, value = json.loads(line)
        yield Ack(Kind(kind), tuple(key), tuple(value))


@attrs.define
class Ledger:
    """All that was acknowledged for one file, over all lives of the writer."""

    facts: dict[tuple[Kind, Key], Value] = attrs.Factory(dict)
    contradictions: list[str] = attrs.Factory(list)
    acks: int = 0

    def add(self, ack: Ack) -> None:
        """Take a line; one that contradicts an earlier one is noted (rule 2)."""
        self.acks += 1
        if ack.kind is Kind.TROUBLE:
            self.contradictions.append(f"the writer says: {ack.key[0]}")
            return
        before = self.facts.setdefault((ack.kind, ack.key), ack.value)
        if before != ack.value:
            self.contradictions.append(f"{ack.kind} {ack.key}: first {before}, then {ack.value}")

    def count(self, kind: Kind) -> int:
        return sum(found is kind for found, _ in self.facts)
