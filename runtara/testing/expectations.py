"""Assertions that say what was seen, for suites that run without a test framework."""

from collections.abc import Awaitable
from typing import TypeVar

E = TypeVar("E", bound=Exception)


def expect(actual: object, wanted: object, what: str) -> None:
    """Raise `AssertionError` unless ``actual`` equals ``wanted``."""
    if actual != wanted:
        raise AssertionError(f"{what}: wanted {wanted!r}, found {actual!r}")


async def expect_error(kind: type[E], call: Awaitable[object], what: str) -> E:
    """The error of ``kind`` that ``call`` must raise."""
    try:
        found = await call
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(f"{what}: wanted {kind.__name__}, found {error!r}") from error
    raise AssertionError(f"{what}: wanted {kind.__name__}, it returned {found!r}")
