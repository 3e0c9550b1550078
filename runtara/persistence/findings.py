"""What must hold between the rows of a sound store, as SQL that every backend understands.

Each `Check` selects those that break it: an instance's row, and how many records of it do.
"""

from collections.abc import Iterator
from typing import Any, Final

import attrs

from runtara.persistence.rows import APPENDED, COMPENSATIONS, HISTORY, INSTANCES, Decoder, Table
from runtara.records import PayloadKind, Status

MOST: Final = 20
"""Findings of one check that are told; a store that is damaged all over needs no more."""


@attrs.frozen(kw_only=True)
class Check:
    """A question that a sound store answers with no rows, and how a row is told."""

    what: str
    """The table or column that it is about."""
    sql: str
    """Selects an instance's row and a count; at most `MOST` of them."""
    sentence: str

    def finding(self, row: int, count: int) -> str:
        return self.sentence.format(row=row, count=count)


def checks() -> Iterator[Check]:
    """All of them."""
    yield from (without_instance(table) for table in HISTORY)
    yield purged_but_there()
    yield ended_without_finish()
    tables: tuple[Table[Any], ...] = (INSTANCES, COMPENSATIONS, *APPENDED.values())
    for table in tables:
        for position, decode in table.decoders:
            yield unknown_word(table, table.columns[position], members(decode))
    yield unknown_kind_of_payload()


def without_instance(table: str) -> Check:
    return Check(
        what=table,
        sql=f"SELECT c.instance, count(*) FROM {table} AS c"
        ' WHERE NOT EXISTS (SELECT 1 FROM instances AS i WHERE i."row" = c.instance)'
        ' AND NOT EXISTS (SELECT 1 FROM purged AS p WHERE p."row" = c.instance)'
        f" GROUP BY c.instance LIMIT {MOST}",
        sentence=f"{table} holds {{count}} records of instance {{row}}, which is neither there nor purged",
    )


def purged_but_there() -> Check:
    return Check(
        what="purged",
        sql='SELECT p."row", 1 FROM purged AS p'
        f' WHERE EXISTS (SELECT 1 FROM instances AS i WHERE i."row" = p."row") LIMIT {MOST}',
        sentence="instance {row} was purged and is still there",
    )


def ended_without_finish() -> Check:
    ended = ", ".join(str(int(status)) for status in Status if status.is_terminal)
    return Check(
        what="instances",
        sql='SELECT "row", 1 FROM instances'
        f" WHERE (status IN ({ended})) <> (finished_us IS NOT NULL) LIMIT {MOST}",
        sentence="the status of instance {row} and its time of finish contradict each other",
    )


def members(decode: Decoder) -> tuple[int, ...]:
    """The numbers of a word, or of truth."""
    kind: Any = decode
    return (0, 1) if kind is bool else tuple(int(member) for member in kind)


def unknown_word(table: Table[Any], column: str, known: tuple[int, ...]) -> Check:
    owner = '"row"' if table is INSTANCES else "instance"
    return not_among(table.name, owner, column, known)


def unknown_kind_of_payload() -> Check:
    return not_among("payloads", "instance", "kind", members(PayloadKind))


def not_among(table: str, owner: str, column: str, known: tuple[int, ...]) -> Check:
    listed = ", ".join(str(number) for number in known)
    return Check(
        what=f"{table}.{column}",
        sql=f'SELECT {owner}, count(*) FROM {table} WHERE "{column}" NOT IN ({listed})'
        f" GROUP BY {owner} LIMIT {MOST}",
        sentence=f"{table}.{column} is no known word in {{count}} records of instance {{row}}",
    )
