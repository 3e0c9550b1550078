"""What an error of PostgreSQL means to us: one table, and the only place that reads SQLSTATEs.

Rules:

1. Before COMMIT was sent, an error means that nothing was written. What it says about the store is in
   `FAULTS`, by the whole SQLSTATE or else by its class, the first two characters.
2. When the connection is lost, or no answer comes, with a COMMIT on its way, the outcome is *unknown*. An
   error that the server gives to a statement of that trip, and survives, is known: the COMMIT was skipped
   or refused.
3. `TRY_AGAIN` are conflicts between transactions; the transaction is run again, and nobody hears of them.
"""

from typing import Final

from runtara.errors import (
    OutcomeUnknown,
    StoreCorrupt,
    StoreDenied,
    StoreError,
    StoreFailed,
    StoreFull,
    StoreReadOnly,
    StoreRefused,
    StoreUnavailable,
)
from runtara.persistence.postgres.driver import DriverError, Lost, ServerError
from runtara.persistence.postgres.values import UNFIT

TRY_AGAIN: Final = frozenset({"40001", "40P01"})
"""Serialization failure, deadlock."""

Fault = tuple[type[StoreError], str]

FAULTS: Final[dict[str, Fault]] = {
    "08": (StoreUnavailable, "the connection failed"),
    "22": (StoreRefused, "a value was refused"),
    "23": (StoreRefused, "a key or a value was refused"),
    "25": (StoreUnavailable, "the transaction was ended by the server"),
    "25006": (StoreReadOnly, "the database cannot be written; it may be a standby"),
    "28": (StoreDenied, "the server does not let this user in"),
    "3D": (StoreDenied, "there is no such database"),
    "3F": (StoreFailed, "there is no such schema"),
    "40": (StoreUnavailable, "the transaction met another one"),
    "42": (StoreFailed, "the tables are not as this program made them"),
    "42501": (StoreReadOnly, "this user may not do that"),
    "53": (StoreUnavailable, "the server is short of something"),
    "53100": (StoreFull, "the server's disk is full"),
    "54": (StoreRefused, "a value is too large for the server"),
    "55": (StoreUnavailable, "a lock was not given in time"),
    "57": (StoreUnavailable, "the server ended the statement or is going away"),
    "58": (StoreFailed, "the server's disk reported an error"),
    "58P01": (StoreFailed, "a file of the server is missing"),
    "XX": (StoreFailed, "the server failed inside"),
    "XX001": (StoreCorrupt, "the database is damaged"),
    "XX002": (StoreCorrupt, "an index of the database is damaged"),
}
"""SQLSTATE or class -> what to raise, and the plain words for it."""


def fault_of(sqlstate: str) -> Fault:
    known = FAULTS.get(sqlstate) or FAULTS.get(sqlstate[:2])
    return known or (StoreFailed, "an unexpected error")


def store_error(error: BaseException, location: str) -> StoreError | None:
    """What ``error`` means for the store at ``location``; None if it is not the store's error."""
    if isinstance(error, ServerError):
        kind, words = fault_of(error.sqlstate)
        return kind(f"{location}: {words} ({error.sqlstate}: {error})")
    if isinstance(error, Lost):
        return StoreUnavailable(f"{location}: no connection ({error})")
    if isinstance(error, UNFIT):
        return StoreRefused(f"{location}: a value was refused ({error})")
    return None


def is_unknown(error: DriverError) -> bool:
    """Whether the connection is gone with ``error``; a COMMIT in that trip has an open outcome (rule 2)."""
    return isinstance(error, Lost) or (isinstance(error, ServerError) and error.fatal)


def commit_unknown(error: DriverError, location: str) -> OutcomeUnknown:
    return OutcomeUnknown(f"{location}: no answer to COMMIT, it may or may not have happened ({error})")


def is_read_only(error: BaseException) -> bool:
    return isinstance(error, ServerError) and fault_of(error.sqlstate)[0] is StoreReadOnly


def may_try_again(error: BaseException) -> bool:
    return isinstance(error, ServerError) and not error.fatal and error.sqlstate in TRY_AGAIN
