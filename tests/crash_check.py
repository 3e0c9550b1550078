"""Is the store after a kill what was acknowledged, and does it agree with itself? Asked in plain SQL.

What must hold, each with a function of its own:

1. Every acknowledged fact is there with its bytes (`lost_facts`).
2. A signal that was consumed has exactly one consumer, and an accepted one is pending or consumed
   (`signal_faults`).
3. Revisions: no two changes have the same one, none is missing without a reason (`revision_faults`).
4. Statuses and times go together (`row_faults`), and the file is sound (`file_faults`).
5. Everything that has not ended has a reason to move (`stuck`): promise P10, asked through the product's own
   `load`, as a restart does.
"""

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from runtara.actors.instance import state_of
from runtara.machine.liveness import reason_to_move
from runtara.persistence.sqlite.damage import find_damage
from runtara.persistence.store import Store
from runtara.records import CompensationState, ErrorCategory, Reason, SignalType, Status, WaitOutcome
from tests.crash_ledger import Key, Kind, Ledger, Value, digest

Connection = sqlite3.Connection
Rows = dict[str, int]
"""Instance (``tenant/id``) -> its key in the store."""

RECORDS: Final = (
    "checkpoints",
    "waits",
    "events",
    "signals",
    "retry_attempts",
    "errors",
    "compensation_attempts",
    "requests",
)
SPEAKERS: Final = frozenset({"events", "signals", "retry_attempts", "errors", "compensation_attempts"})
"""Tables that one message writes; two of them never share a revision."""


def rows_of(connection: Connection) -> Rows:
    found = connection.execute("SELECT tenant_id || '/' || instance_id, row FROM instances")
    return dict(found.fetchall())


# ---------------------------------------------------------------- facts

Look = Callable[[Connection, int, Key], Value | None]
"""The stored value of a fact, given the row of its instance and the key without the instance."""


def one(connection: Connection, sql: str, *values: object) -> tuple[object, ...] | None:
    found: tuple[object, ...] | None = connection.execute(sql, values).fetchone()
    return found


def stored_digest(found: tuple[object, ...] | None) -> Value | None:
    return None if found is None else (digest(bytes(found[0] or b"")),)  # type: ignore[call-overload]


def checkpoint(connection: Connection, row: int, key: Key) -> Value | None:
    sql = "SELECT state FROM checkpoints WHERE instance = ? AND checkpoint_id = ?"
    return stored_digest(one(connection, sql, row, key[0]))


def event(connection: Connection, row: int, key: Key) -> Value | None:
    sql = """
        SELECT e.revision, e.subtype, e.payload FROM requests r
        JOIN events e ON e.instance = r.instance AND e.revision = r.revision
        WHERE r.instance = ? AND r.request_id = ?
    """
    found = connection.execute(sql, (row, key[0])).fetchone()
    return None if found is None else (found[0], found[1], digest(found[2] or b""))


def signal(connection: Connection, row: int, key: Key) -> Value | None:
    sql = """
        SELECT s.revision, s.type, s.key, s.payload FROM requests r
        JOIN signals s ON s.instance = r.instance AND s.revision = r.revision
        WHERE r.instance = ? AND r.request_id = ?
    """
    found = connection.execute(sql, (row, key[0])).fetchone()
    return None if found is None else (found[0], SignalType(found[1]).word, found[2], digest(found[3] or b""))


def consumed(connection: Connection, row: int, key: Key) -> Value | None:
    """Who consumed a signal: the wait that recorded its payload, else an acknowledgement."""
    sql = "SELECT acknowledged_us, payload FROM signals WHERE instance = ? AND revision = ?"
    found = connection.execute(sql, (row, key[0])).fetchone()
    if found is None or found[0] is None:
        return None
    taken = "SELECT checkpoint_id FROM checkpoints WHERE instance = ? AND state = ?"
    wait = connection.execute(taken, (row, found[1])).fetchone()
    return ("ack",) if wait is None else (wait[0],)


def deadline(connection: Connection, row: int, key: Key) -> Value | None:
    found = one(connection, "SELECT deadline_us FROM waits WHERE instance = ? AND wait_id = ?", row, key[0])
    return found  # type: ignore[return-value]


def outcome(connection: Connection, row: int, key: Key) -> Value | None:
    sql = "SELECT outcome FROM waits WHERE instance = ? AND wait_id = ? AND outcome IS NOT NULL"
    found = connection.execute(sql, (row, key[0])).fetchone()
    return None if found is None else (WaitOutcome(found[0]).word,)


def attempt(connection: Connection, row: int, key: Key) -> Value | None:
    sql = "SELECT category FROM retry_attempts WHERE instance = ? AND checkpoint_id = ? AND attempt = ?"
    found = connection.execute(sql, (row, *key)).fetchone()
    return None if found is None else (ErrorCategory(found[0]).word,)


def error(connection: Connection, row: int, key: Key) -> Value | None:
    sql = "SELECT code, message FROM errors WHERE instance = ? AND revision = ?"
    found = connection.execute(sql, (row, key[0])).fetchone()
    return None if found is None else (found[0], digest(found[1].encode()))


def compensation(connection: Connection, row: int, key: Key) -> Value | None:
    sql = 'SELECT step_id, "order", data FROM compensations WHERE instance = ? AND checkpoint_id = ?'
    found = connection.execute(sql, (row, key[0])).fetchone()
    return None if found is None else (found[0], found[1], digest(found[2]))


def undone(connection: Connection, row: int, key: Key) -> Value | None:
    sql = """
        SELECT success FROM compensation_attempts
        WHERE instance = ? AND checkpoint_id = ? AND attempt = ? AND finished_us IS NOT NULL
    """
    found = connection.execute(sql, (row, *key)).fetchone()
    return None if found is None else (bool(found[0]),)


def ended(connection: Connection, row: int, key: Key) -> Value | None:
    found = connection.execute("SELECT status FROM instances WHERE row = ?", (row,)).fetchone()
    return None if found is None else (Status(found[0]).word,)


def output(connection: Connection, row: int, key: Key) -> Value | None:
    return stored_digest(one(connection, "SELECT data FROM payloads WHERE instance = ? AND kind = 1", row))


LOOKS: Final[Mapping[Kind, Look]] = {
    Kind.CHECKPOINT: checkpoint,
    Kind.EVENT: event,
    Kind.SIGNAL: signal,
    Kind.CONSUMED: consumed,
    Kind.DEADLINE: deadline,
    Kind.OUTCOME: outcome,
    Kind.ATTEMPT: attempt,
    Kind.ERROR: error,
    Kind.COMPENSATION: compensation,
    Kind.UNDONE: undone,
    Kind.ENDED: ended,
    Kind.OUTPUT: output,
}


def lost_facts(
    connection: Connection, rows: Rows, facts: Iterable[tuple[tuple[Kind, Key], Value]]
) -> Iterator[str]:
    """The acknowledged facts that the store does not have, or has otherwise."""
    for (kind, key), value in facts:
        if kind is Kind.SESSION:
            row = rows.get(str(value[0]))
            sql = "SELECT epoch FROM instances WHERE row = ?"
            found = None if row is None else connection.execute(sql, (row,)).fetchone()
            if found is None or found[0] < int(key[0] or 0):
                yield f"session {key} of {value}: the stored epoch is {found}"
            continue
        row = rows.get(str(key[0]))
        stored = None if row is None else LOOKS[kind](connection, row, key[1:])
        if stored != value:
            yield f"{kind} {key}: acknowledged {value}, stored {stored}"


# ---------------------------------------------------------------- agreement with itself


def signal_faults(connection: Connection) -> Iterator[str]:
    """Custom signals that two waits consumed, or one that left its signal pending."""
    twice = """
        SELECT s.instance, s.revision, count(*), max(s.acknowledged_us IS NULL) FROM signals s
        JOIN checkpoints c ON c.instance = s.instance AND c.state = s.payload
        WHERE s.type = 4 GROUP BY s.instance, s.revision
    """
    for instance, revision, consumers, pending in connection.execute(twice):
        if consumers > 1:
            yield f"instance {instance}: {consumers} waits consumed signal {revision}"
        if pending:
            yield f"instance {instance}: signal {revision} is recorded by a wait and still pending"


def revision_faults(connection: Connection) -> Iterator[str]:
    """Revisions that two changes share, and revisions that no change explains."""
    for instance, row, last in connection.execute(
        "SELECT instance_id, row, revision FROM instances"
    ).fetchall():
        tables: dict[int, set[str]] = {}
        for table in RECORDS:
            for (revision,) in connection.execute(f"SELECT revision FROM {table} WHERE instance = ?", (row,)):  # noqa: S608
                tables.setdefault(revision, set()).add(table)
        shared = [r for r, found in tables.items() if len(found & SPEAKERS) > 1]
        if shared:
            yield f"{instance}: two changes have the revisions {shared[:5]}"
        newest = max([last, *tables])
        gaps = [r for r in range(1, newest + 1) if r not in tables and r != last]
        if instance.startswith("p"):
            yield from plain_gaps(connection, instance, row, gaps, tables)
        elif len(gaps) > explained(connection, row):
            yield f"{instance}: revisions {gaps[:5]}... ({len(gaps)}) have left no trace"


def plain_gaps(
    connection: Connection, instance: str, row: int, gaps: list[int], tables: Mapping[int, set[str]]
) -> Iterator[str]:
    """A plain instance changes without a trace of its own only when its session is taken from it: at most
    two such changes, and a registration follows."""
    sql = "SELECT revision FROM events WHERE instance = ? AND type = 1"
    starts = {revision for (revision,) in connection.execute(sql, (row,))}
    missing = set(gaps)
    for gap in gaps:
        following = next((r for r in range(gap + 1, gap + 3) if r not in missing), None)
        if following is None or (following in tables and following not in starts):
            yield f"{instance}: revision {gap} is missing and no registration explains it"


def explained(connection: Connection, row: int) -> int:
    """How many changes of an instance may have written nothing but rows that were written again since."""
    sql = """
        SELECT (SELECT count(*) FROM waits WHERE instance = ?1 AND outcome IS NOT NULL)
             + (SELECT count(*) FROM signals WHERE instance = ?1)
             + (SELECT count(*) FROM compensation_attempts WHERE instance = ?1)
             + 3 * (SELECT count(*) FROM events WHERE instance = ?1 AND type = 1) + 3
    """
    found: int = connection.execute(sql, (row,)).fetchone()[0]
    return found


ENDINGS: Final = ", ".join(
    str(int(reason)) for reason in Reason if Reason.COMPLETED <= reason <= Reason.ATTEMPTS_EXHAUSTED
)

ROW_RULES: Final = {
    "an unknown status": "status NOT BETWEEN 1 AND 6",
    "ended without a time, or a time without an end": "(status >= 4) <> (finished_us IS NOT NULL)",
    "ended and still to be moved": "status >= 4 AND ifnull(sleep_until_us, awaits_client_us) IS NOT NULL",
    "running and awaiting its client": "status = 2 AND awaits_client_us IS NOT NULL",
    "suspended for the reason of an end": f"status = 3 AND reason IN ({ENDINGS})",
    "ended while undoing": f"status >= 4 AND compensation_state = {int(CompensationState.TRIGGERED)}",
    "an epoch that was never given out": "epoch >= (SELECT next_number FROM meta)",
    "a key that was never given out": "row >= (SELECT next_number FROM meta)",
}


def row_faults(connection: Connection) -> Iterator[str]:
    for fault, condition in ROW_RULES.items():
        found = connection.execute(f"SELECT instance_id, status, reason FROM instances WHERE {condition}")  # noqa: S608
        for instance, status, reason in found:
            yield f"{instance} (status {status}, reason {reason}): {fault}"


def file_faults(connection: Connection) -> list[str]:
    """What is damaged, and what is no history of any instance."""
    return find_damage(connection)


async def stuck(store: Store, connection: Connection) -> list[str]:
    """Instances that nothing will ever move (P10)."""
    faults = []
    found = connection.execute("SELECT tenant_id, instance_id FROM instances WHERE status < 4").fetchall()
    for tenant_id, instance_id in found:
        loaded = await store.load(tenant_id, instance_id, 1)
        assert loaded is not None
        if reason_to_move(state_of(loaded, None)) is None:
            faults.append(f"{tenant_id}/{instance_id}: nothing will ever move it")
    return faults


def unacknowledged(connection: Connection, ledger: Ledger) -> int:
    """Changes that are in the store although nobody was told: killed between the commit and the answer."""
    counts = Counter(kind for kind, _ in ledger.facts)
    stored = {
        Kind.EVENT: "SELECT count(*) FROM events WHERE type = 5",
        Kind.ATTEMPT: "SELECT count(*) FROM retry_attempts",
        Kind.ERROR: "SELECT count(*) FROM errors",
        Kind.SIGNAL: "SELECT count(*) FROM signals WHERE type = 4",
        Kind.CHECKPOINT: "SELECT count(*) FROM checkpoints",
    }
    return sum(int(connection.execute(sql).fetchone()[0]) - counts[kind] for kind, sql in stored.items())
