"""Deleting instances, and their history after them. Nothing here waits: it makes statements.

Rules:

1. An instance goes at once, and its row stands in ``purged`` until nothing of its history is left.
2. History goes record by record, as far as a measure reaches, so a transaction is short however much an
   instance holds. Reading goes no further than that either.
3. A record is deleted by where it lies (``tableoid`` and ``ctid``): nobody but the one writer could move it.
"""

from collections.abc import Sequence
from typing import Final

from runtara.persistence.postgres.driver import Statement
from runtara.persistence.postgres.statements import statement
from runtara.persistence.rows import HISTORY, LARGE
from runtara.records import Status

SWEPT_AT_ONCE: Final = 100
"""Instances whose history one sweep looks at."""
BYTES_PER_COUNT: Final = 4096

ENDED: Final = ", ".join(str(int(status)) for status in Status if status.is_terminal)

REMOVE: Final = (
    f'WITH gone AS (DELETE FROM instances WHERE "row" = ANY($1) AND status IN ({ENDED}) RETURNING "row")'
    ' INSERT INTO purged ("row") SELECT "row" FROM gone RETURNING "row"'
)
UNSWEPT: Final = f'SELECT "row" FROM purged ORDER BY "row" LIMIT {SWEPT_AT_ONCE}'


def costs(table: str) -> str:
    """What each record of a table counts; its size is read from the pointer to its value."""
    large = "".join(f" + coalesce(octet_length({column}), 0)" for column in LARGE.get(table, ()))
    return f"1 + (0{large}) / {BYTES_PER_COUNT}"


def delete_history() -> str:
    found = " UNION ALL ".join(
        f"SELECT {at} AS kind, tableoid AS part, ctid AS place, {costs(table)} AS cost"
        f" FROM {table} WHERE instance = ANY($1)"
        for at, table in enumerate(HISTORY)
    )
    deleted = ", ".join(
        f"deleted_{at} AS (DELETE FROM {table} AS t USING doomed AS d"
        f" WHERE d.kind = {at} AND t.tableoid = d.part AND t.ctid = d.place)"
        for at, table in enumerate(HISTORY)
    )
    return (
        f"WITH found AS ({found} LIMIT $2), counted AS (SELECT kind, part, place,"
        " sum(cost) OVER (ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before FROM found),"
        " doomed AS MATERIALIZED ("
        "SELECT kind, part, place FROM counted WHERE before IS NULL OR before < $2),"
        f" {deleted} SELECT count(*) FROM doomed"
    )


DELETE_HISTORY: Final = delete_history()
FORGET: Final = 'DELETE FROM purged AS p WHERE "row" = ANY($1) AND NOT ({})'.format(
    " OR ".join(f'EXISTS (SELECT 1 FROM {table} WHERE instance = p."row")' for table in HISTORY)
)


def remove(rows: Sequence[int]) -> Statement:
    """Delete those of ``rows`` that have ended; the answer holds them."""
    return statement(REMOVE, list(rows))


def unswept() -> Statement:
    """Asks for instances of which something may be left."""
    return statement(UNSWEPT)


def delete_history_of(rows: Sequence[int], most: int) -> list[Statement]:
    """Delete what ``rows`` have left, up to ``most``, and forget those that have nothing left."""
    return [statement(DELETE_HISTORY, list(rows), most), statement(FORGET, list(rows))]


def left_of(rows: Sequence[int]) -> Statement:
    """Asks how many of ``rows`` have something left."""
    return statement('SELECT count(*) FROM purged WHERE "row" = ANY($1)', list(rows))


def left() -> Statement:
    """Asks whether any purged instance has something left."""
    return statement("SELECT count(*) FROM (SELECT 1 FROM purged LIMIT 1) AS unswept")
