"""Payloads from outside: reading them as JSON where they are, and text that every store can hold."""

import json
from typing import Any, NoReturn


def json_object(data: bytes | None) -> dict[str, Any] | None:
    """The JSON object that ``data`` holds; None if it holds anything else. Never raises."""
    if not data or data.lstrip()[:1] != b"{":
        return None
    try:
        found = json.loads(data, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def storable(text: str) -> str:
    """``text`` with lone surrogates, which no database can hold, replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
    return text
