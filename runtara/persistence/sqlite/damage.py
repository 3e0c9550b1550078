"""Looking for damage: SQLite's own check of the whole file, and then the rules of `findings`.

Each question is asked alone: one that cannot be answered, because a page is damaged, is a finding, and the
others are asked all the same.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from runtara.errors import StoreFailed
from runtara.persistence.findings import checks
from runtara.persistence.sqlite.faults import store_error

MOST: Final = 100
"""Findings of SQLite's check; a file that is damaged all over needs no more."""
HEADER: Final = "*** in database"


def find_damage(connection: sqlite3.Connection) -> list[str]:
    """One sentence for each finding.

    Raises:
        sqlite3.Error: The store does not answer, for another reason than damage.
    """
    found = answered("the file", lambda: file_damage(connection))
    for check in checks():
        broken = answered(
            check.what,
            lambda sql=check.sql, tell=check.finding: (tell(*row) for row in connection.execute(sql)),  # type: ignore[misc]
        )
        found += broken
    return found


def answered(what: str, ask: Callable[[], Iterable[str]]) -> list[str]:
    """The findings of one question; that it cannot be answered is one more."""
    found: list[str] = []
    try:
        found.extend(ask())
    except sqlite3.Error as error:
        known = store_error(error, what)
        if not isinstance(known, StoreFailed):
            raise
        found.append(known.message)
    return found


def file_damage(connection: sqlite3.Connection) -> Iterator[str]:
    """What SQLite says of pages, records and indexes; it reads everything."""
    for (text,) in connection.execute(f"PRAGMA integrity_check({MOST})"):
        yield from (line for line in text.splitlines() if line != "ok" and not line.startswith(HEADER))
