"""Where a store lies, as a URL: its scheme says which backend it is."""

from typing import Final
from urllib.parse import unquote

from runtara.errors import ValidationError

MEMORY: Final = ":memory:"
SCHEME: Final = "sqlite://"
POSTGRES_SCHEMES: Final = ("postgresql://", "postgres://")


def is_postgres(url: object) -> bool:
    """Whether ``url`` names a PostgreSQL database, well formed or not."""
    return isinstance(url, str) and url.startswith(POSTGRES_SCHEMES)


def sqlite_path(url: object) -> str:
    """The path of a SQLite store: ``sqlite:///app.db`` is relative, ``sqlite:////srv/app.db`` absolute.

    Raises:
        ValidationError: It is no such URL.
    """
    if not isinstance(url, str):
        raise ValidationError("url", f"must be text, not {type(url).__name__}")
    if not url.startswith(SCHEME):
        raise ValidationError(
            "url", f"must begin with {SCHEME} or postgresql://, for example sqlite:///app.db"
        )
    rest = url.removeprefix(SCHEME)
    if rest in ("", f"/{MEMORY}"):
        return MEMORY
    if not rest.startswith("/") or rest == "/":
        raise ValidationError("url", "must be sqlite:///path, with three slashes for a relative path")
    path = unquote(rest[1:])
    if "\0" in path or "?" in rest or "#" in rest:
        raise ValidationError("url", "must hold a plain path")
    return path
