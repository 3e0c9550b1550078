"""Looking for damage: the rules of `findings`, every value read to its end, the server's check of its files.

Each question is asked alone: one that the server cannot answer, because a page is damaged, is a finding, and
the others are asked all the same. They read everything, so each may take `SECONDS`.
"""

from collections.abc import Awaitable, Callable, Iterator
from typing import Final

import attrs

from runtara.errors import StoreFailed, StoreRefused
from runtara.persistence.findings import MOST, checks
from runtara.persistence.postgres.driver import ServerError
from runtara.persistence.postgres.faults import fault_of
from runtara.persistence.postgres.queries import Question, asking
from runtara.persistence.postgres.statements import KINDS, identifier
from runtara.persistence.postgres.values import BYTES
from runtara.persistence.rows import LARGE, Row

SECONDS: Final = 3600.0
"""How long one question may take; then the server ends it."""

AMCHECK: Final = (
    "SELECT n.nspname::text FROM pg_extension AS e JOIN pg_namespace AS n ON n.oid = e.extnamespace"
    " JOIN pg_proc AS p ON p.pronamespace = n.oid AND p.proname = 'bt_index_check' AND p.pronargs = 2"
    " WHERE e.extname = 'amcheck' AND has_function_privilege(p.oid, 'EXECUTE')"
)
"""The schema of the extension, if it is there and we may use it."""
RELATIONS: Final = (
    "SELECT c.oid::bigint, c.relname::text, (c.relkind = 'i')::int FROM pg_class AS c"
    " LEFT JOIN pg_am AS a ON a.oid = c.relam WHERE c.relnamespace = to_regnamespace(current_schema())"
    " AND (c.relkind = 'r' OR c.relkind = 'i' AND a.amname = 'btree') ORDER BY c.relname"
)

Asked = Question[list[Row]]


@attrs.frozen
class Look:
    """One question, and what a row of its answer tells."""

    what: str
    """Named when the server cannot answer."""
    question: Asked
    tell: Callable[[Row], str | None]


async def find_damage(ask: Callable[[Asked], Awaitable[list[Row]]]) -> list[str]:
    """One sentence for each finding.

    Args:
        ask: Gives the answer to a question.

    Raises:
        DriverError: The server does not answer, or does not let us look.
    """
    found = [sentence for look in looks() for sentence in await findings(look, ask)]
    for (home,) in await ask(reading(AMCHECK)):
        for row in await ask(reading(RELATIONS)):
            found += await findings(file_check(str(home), *row), ask)
    return found


async def findings(look: Look, ask: Callable[[Asked], Awaitable[list[Row]]]) -> list[str]:
    try:
        answer = await ask(look.question)
    except ServerError as error:
        if not issubclass(fault_of(error.sqlstate)[0], StoreFailed | StoreRefused):
            raise
        return [f"{look.what}: {error}"]
    return [sentence for row in answer if (sentence := look.tell(row)) is not None]


def reading(sql: str) -> Asked:
    return asking(sql, answer=lambda found: found, seconds=SECONDS)


def looks() -> Iterator[Look]:
    for check in checks():
        yield Look(check.what, reading(check.sql), lambda row, check=check: check.finding(*row))  # type: ignore[misc]
    for table, columns in LARGE.items():
        for column in columns:
            read = "sha256({})" if KINDS[table][column] is BYTES else "char_length({})"
            sql = f"SELECT count({read.format(column)}) FROM {table}"
            yield Look(f"{table}.{column}", reading(sql), lambda row: None)


def file_check(home: str, oid: object, name: object, is_index: object) -> Look:
    """The server's own check of a table's or an index's file; ``home`` is the schema of its functions."""
    if is_index:
        sql = f"SELECT {identifier(home)}.bt_index_check({oid}::regclass, true)::text"
        return Look(f"index {name}", reading(sql), lambda row: None)
    sql = (
        f"SELECT blkno, msg FROM {identifier(home)}.verify_heapam({oid}::regclass, check_toast => true)"
        f" LIMIT {MOST}"
    )
    return Look(f"table {name}", reading(sql), lambda row: f"table {name}, page {row[0]!s}: {row[1]!s}")
