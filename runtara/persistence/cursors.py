"""Opaque cursors: where a page ended, and of which list.

A cursor is the urlsafe base64 of the JSON array ``[list, value, row]``. ``list`` names the kind of list, the
instance it belongs to, its order and its direction, so a cursor of another list is told apart. The filter
is not part of it: a narrower question may go on from the same place.
"""

import base64
import binascii
import json
from typing import Final

import attrs

from runtara.errors import ValidationError

LONGEST: Final = 512
"""In characters; far over any real one, and short enough that no parser suffers."""


@attrs.frozen
class Place:
    """Where a page ended: its order's value, and the key that breaks ties."""

    value: int
    key: int


def encode_cursor(name: str, place: Place) -> str:
    """The cursor for ``place`` in the list ``name``."""
    text = json.dumps([name, place.value, place.key], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode_cursor(name: str, cursor: str) -> Place:
    """The place that ``cursor`` names in the list ``name``.

    Raises:
        ValidationError: It is no cursor, or one of another list; the field is ``cursor``.
    """
    found = parse(cursor)
    if found is None:
        raise ValidationError("cursor", "is not a cursor that this program made")
    if found[0] != name:
        raise ValidationError("cursor", "belongs to another list, or to another order of it")
    return found[1]


def parse(cursor: str) -> tuple[str, Place] | None:
    """The parts of a cursor, or None for anything that `encode_cursor` does not make."""
    if not isinstance(cursor, str) or len(cursor) > LONGEST:
        return None
    try:
        padded = cursor.encode("ascii") + b"=" * (-len(cursor) % 4)
        found = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (ValueError, binascii.Error, RecursionError):
        return None
    match found:
        case [str(name), int(value), int(key)] if fits(value) and fits(key):
            return name, Place(value, key)
    return None


def fits(number: int) -> bool:
    """Whether SQL can hold it; True and False are no numbers here."""
    return not isinstance(number, bool) and -(2**63) <= number < 2**63
