"""The lease: one runtime at a time may write to a schema.

Rules:

1. The lease is the one row of ``runtimes``. Its holder is named by a token that nobody else makes, and by
   an epoch that grows with every acquisition.
2. Every transaction that writes begins with `Lease.renew`: an update of that row, by token and epoch. It
   locks the row until the commit, so nobody can take over in between, and it finds nothing once somebody
   has. So a holder that was cut off or suspended can never commit afterwards, whatever it believes.
3. Time is the database's (``clock_timestamp()``; ``now()`` would be the transaction's start). The lease
   runs `Lease.seconds` from its last renewal; a writer that is idle renews it three times as often.
4. It is taken over when it has run out, when it was given up, or when its holder is known to be gone: a
   process of this machine (same boot, same pid namespace) that does not exist any more.
"""

import os
import socket
from pathlib import Path
from typing import Final

import attrs

from runtara.errors import StoreLocked
from runtara.persistence.postgres.driver import Statement
from runtara.persistence.postgres.statements import literal, statement
from runtara.persistence.rows import Row

LOOK: Final = Statement(
    b"SELECT epoch, batch, owner, machine, host, pid,"
    b" to_char(since AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"'),"
    b" ceil(extract(epoch FROM expires - clock_timestamp()))::bigint"
    b" FROM runtimes WHERE slot = 1 FOR UPDATE"
)
TAKE: Final = (
    "UPDATE runtimes SET epoch = $1, owner = $2, machine = $3, host = $4, pid = $5,"
    " since = clock_timestamp(), expires = clock_timestamp() + {seconds} WHERE slot = 1"
)
RENEW: Final = (
    "UPDATE runtimes SET expires = clock_timestamp() + {seconds}{batch}"
    " WHERE slot = 1 AND owner = $1 AND epoch = $2 RETURNING pg_backend_pid()"
)
LAST_BATCH: Final = "SELECT batch FROM runtimes WHERE slot = 1 AND owner = $1 AND epoch = $2 FOR UPDATE"
GIVE_UP: Final = (
    "UPDATE runtimes SET owner = NULL, expires = NULL WHERE slot = 1 AND owner = $1 AND epoch = $2"
)

living: set[str] = set()
"""The tokens of this process's stores: a lease of this process with another token was left behind."""


def machine() -> str:
    """Names the boot and the pid namespace in which a pid of this process means something; or nothing."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@attrs.frozen(kw_only=True)
class Holder:
    """What the row says."""

    epoch: int
    batch: int
    owner: str | None
    machine: str | None
    host: str | None
    pid: int | None
    since: str | None
    seconds_left: int | None

    @property
    def may_be_replaced(self) -> bool:
        """Rule 4."""
        if self.owner is None or self.seconds_left is None or self.seconds_left <= 0:
            return True
        return self.is_gone

    @property
    def is_gone(self) -> bool:
        if not self.machine or self.machine != machine() or self.pid is None:
            return False
        if self.pid == os.getpid():
            return self.owner not in living
        return not process_exists(self.pid)

    def require_replaceable(self, location: str) -> None:
        """Raise `StoreLocked`, saying who holds the lease, unless it may be taken."""
        if not self.may_be_replaced:
            raise StoreLocked(
                f"{location} is held by process {self.pid} on {self.host} since {self.since};"
                f" its lease runs {self.seconds_left} s more unless it renews it"
            )


def holder(row: Row) -> Holder:
    """The answer to `LOOK`."""
    names = [field.name for field in attrs.fields(Holder)]
    fields: dict[str, object] = dict(zip(names, row, strict=True))
    return Holder(**fields)  # type: ignore[arg-type]  # the columns have the types of the fields


@attrs.define(kw_only=True, eq=False)
class Lease:
    """Ours, held or not yet."""

    token: str
    seconds: float
    epoch: int = 0

    @property
    def interval(self) -> str:
        return f"interval {literal(f'{self.seconds} seconds')}"

    def take(self, found: Holder) -> Statement:
        """Take it from ``found``, which was locked in the same transaction."""
        self.epoch = found.epoch + 1
        values = (self.epoch, self.token, machine(), socket.gethostname(), os.getpid())
        return statement(TAKE.format(seconds=self.interval), *values)

    def renew(self, batch: int | None) -> Statement:
        """Rule 2. The number of a batch stands in the row afterwards if and only if the batch is committed.

        The answer holds the pid of the server's process, or nothing when the lease was lost.
        """
        if batch is None:
            sql = RENEW.format(seconds=self.interval, batch="")
            return statement(sql, self.token, self.epoch)
        sql = RENEW.format(seconds=self.interval, batch=", batch = $3")
        return statement(sql, self.token, self.epoch, batch)

    def last_batch(self) -> Statement:
        """The number of the newest batch. Waits for a transaction that may still be committing one."""
        return statement(LAST_BATCH, self.token, self.epoch)

    def give_up(self) -> Statement:
        return statement(GIVE_UP, self.token, self.epoch)
