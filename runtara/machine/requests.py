"""Asking twice: the digest of a request's body, and the answer that is kept for it."""

import enum
import hashlib
import json
from typing import Any, TypeVar

import attrs

from runtara.errors import Conflict
from runtara.machine.draft import Draft
from runtara.messages import ErrorReply, EventReply, Request, SignalReply, StartReply
from runtara.records import Reason, RequestRecord, Status

Answer = EventReply | SignalReply | ErrorReply | StartReply
A = TypeVar("A", EventReply, SignalReply, ErrorReply, StartReply)

NOT_BODY = frozenset({"epoch", "request_id"})
"""Fields that may differ between two sendings of one request."""


def digest(message: Request) -> bytes:
    """16 bytes that two requests share if and only if their bodies are the same."""
    hasher = hashlib.blake2b(digest_size=16)
    hasher.update(type(message).__name__.encode())
    for field in attrs.fields(type(message)):
        if field.name not in NOT_BODY:
            data = encode(getattr(message, field.name))
            hasher.update(f"|{field.name}:{len(data)}:".encode())
            hasher.update(data)
    return hasher.digest()


def encode(value: object) -> bytes:
    if isinstance(value, bytes):
        return b"b" + value
    if isinstance(value, enum.IntEnum):
        return b"e%d" % int(value)
    return f"{type(value).__name__[0]}{value}".encode()


def recall(record: RequestRecord | None, message: Request, kind: type[A]) -> A | None:
    """The answer that was given to this request before, or None if it is new.

    Raises:
        Conflict: The id was used for another body.
    """
    if record is None:
        return None
    if record.digest != digest(message):
        raise Conflict("request_id", f"{record.request_id!r} was used before with another body")
    fields: dict[str, Any] = json.loads(record.answer)
    if fields.get("status") is not None:
        fields["status"] = Status(fields["status"])
    if fields.get("reason") is not None:
        fields["reason"] = Reason(fields["reason"])
    return kind(**fields)


def remember(draft: Draft, message: Request, request_id: str | None, answer: Answer) -> None:
    """Keep the answer for the next time, in the same transaction."""
    if request_id is not None:
        draft.ops.append(
            RequestRecord(
                revision=draft.revision,
                request_id=request_id,
                digest=digest(message),
                answer=json.dumps(attrs.asdict(answer)),
            )
        )
