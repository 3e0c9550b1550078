"""How large the store has become.

A table whose rows fill no more than `COUNTED_BYTES` is counted; of a larger one the server's own estimate is
told, which it makes when it vacuums or analyses the table. The partitions of a table count as the table.
"""

from collections.abc import Sequence
from typing import Final

from runtara.limits import MEBIBYTE
from runtara.persistence.postgres.driver import Result
from runtara.persistence.postgres.queries import Question
from runtara.persistence.postgres.statements import statement
from runtara.persistence.postgres.values import rows
from runtara.persistence.rows import HISTORY
from runtara.persistence.store import Growth
from runtara.records import Status

TABLES: Final = ("instances", *HISTORY)
COUNTED_BYTES: Final = 16 * MEBIBYTE

FILES: Final = (
    "SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class"
    " WHERE relnamespace = to_regnamespace(current_schema()) AND relkind = 'r'"
)
OLDEST: Final = "SELECT min(us) FROM ({}) AS ended".format(
    " UNION ALL ".join(
        f"SELECT min(finished_us) AS us FROM instances WHERE status = {status:d} AND finished_us IS NOT NULL"
        for status in Status
        if status.is_terminal
    )
)


def rows_of(table: str) -> str:
    """How many rows a table has: counted, or estimated (see above)."""
    return (
        f"SELECT CASE WHEN bytes <= {COUNTED_BYTES} THEN (SELECT count(*) FROM {table}) ELSE estimate END"
        " FROM (SELECT sum(pg_relation_size(oid)) AS bytes, sum(CASE WHEN reltuples < 0"
        " THEN pg_stat_get_live_tuples(oid) ELSE reltuples::bigint END)::bigint AS estimate"
        f" FROM pg_class WHERE relkind = 'r' AND coalesce(pg_partition_root(oid), oid) = '{table}'::regclass"
        ") AS size"
    )


def growth() -> Question[Growth]:
    def answer(results: Sequence[Result]) -> Growth:
        files, oldest, *counted = (number_of(result) for result in results)
        return Growth(
            file_bytes=files,
            log_bytes=None,
            rows={table: count or 0 for table, count in zip(TABLES, counted, strict=True)},
            oldest_finished_us=oldest,
        )

    asked = (FILES, OLDEST, *(rows_of(table) for table in TABLES))
    return Question(tuple(statement(sql) for sql in asked), answer, consistent=True)


def number_of(result: Result) -> int | None:
    number = rows(result)[0][0]
    assert number is None or isinstance(number, int)
    return number
