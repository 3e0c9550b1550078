"""Transactions: one that writes, with what its errors mean, and one that reads."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from runtara.errors import StoreFailed
from runtara.persistence.sqlite.faults import commit_error, store_error

T = TypeVar("T")


def transact(connection: sqlite3.Connection, work: Callable[[sqlite3.Connection], T], location: str) -> T:
    """Run ``work`` in a transaction of its own and commit it. No transaction is open afterwards.

    Raises:
        OutcomeUnknown: The commit itself failed.
        StoreError: Any other fault of the store; nothing was written.
    """
    try:
        connection.execute("BEGIN IMMEDIATE")
        result = work(connection)
    except BaseException as error:
        roll_back(connection, location)
        known = store_error(error, location)
        if known is None:
            raise
        raise known from error
    try:
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        roll_back(connection, location)
        raise commit_error(error, location) from error
    return result


def roll_back(connection: sqlite3.Connection, location: str) -> None:
    """End what is open; a full disk or an I/O error has often ended it already."""
    if not connection.in_transaction:
        return
    try:
        connection.execute("ROLLBACK")
    except sqlite3.Error as error:
        raise StoreFailed(f"{location}: a transaction could not be rolled back ({error})") from error


@contextmanager
def one_moment(connection: sqlite3.Connection) -> Iterator[None]:
    """All that is read inside, from the first question on, is as it was at one moment."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        if connection.in_transaction:
            connection.execute("COMMIT")
