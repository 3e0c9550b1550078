"""The store on SQLite. `open_sqlite` is the door; the other modules are its own."""

from runtara.persistence.sqlite.backend import SqliteStore, open_sqlite

__all__ = ["SqliteStore", "open_sqlite"]
