"""The store on PostgreSQL. `open_postgres` is the door; the other modules are its own."""

from runtara.persistence.postgres.backend import PostgresStore, open_postgres

__all__ = ["PostgresStore", "open_postgres"]
