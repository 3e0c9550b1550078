"""From what people write to what the machine takes: words for numbers, and JSON."""

import json
from collections.abc import Mapping
from typing import TypeVar

from runtara.errors import ValidationError
from runtara.records import Named

N = TypeVar("N", bound=Named)


def member(kind: type[N], value: object, field: str) -> N:
    """The member of ``kind`` that ``value`` is or names.

    Raises:
        ValidationError: Naming ``field`` and the words that are allowed.
    """
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value == value.lower() and value.upper() in kind.__members__:
        return kind[value.upper()]
    words = ", ".join(item.word for item in kind)
    raise ValidationError(field, f"must be one of {words}")


def json_text(value: Mapping[str, object] | None, field: str) -> str | None:
    """A JSON object as text.

    Raises:
        ValidationError: ``value`` is no mapping of plain JSON values.
    """
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValidationError(field, f"must be a mapping, not {type(value).__name__}")
    try:
        return json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise ValidationError(field, f"is not JSON: {exc}") from None
