"""The lock that keeps a second runtime off a file.

Rules:

1. The lock is a `flock` on the file ``<path>-lock``, beside the database and never on it: closing any
   descriptor of the database would drop SQLite's own locks in this process.
2. The kernel releases it when its holder dies, however it dies. So what the file says (pid, host, since)
   is only for people; the lock itself decides.
3. It belongs to one open file, not to a process: a second opening in the same process is refused as well.
   A forked child closes its copy at once, or it would keep the lock after its parent's death; and
   `FileLock.release` unlocks before it closes, for a child that has not come to that yet.
4. The file is never removed: between another's opening and locking it, that would make two locks.
"""

import fcntl
import json
import os
import socket
from typing import Final

from runtara.clock import SystemClock
from runtara.errors import StoreLocked
from runtara.persistence.sqlite.faults import file_error
from runtara.records import to_datetime

SUFFIX: Final = "-lock"
LONGEST_HOLDER: Final = 4096

held: "set[FileLock]" = set()
"""The locks of this process, for its forked children to close."""


def close_in_child() -> None:
    for lock in held:
        os.close(lock.descriptor)  # no unlocking here: that would take the lock from the parent
    held.clear()


os.register_at_fork(after_in_child=close_in_child)


class FileLock:
    """An exclusive lock for ``path``, taken at once or refused.

    Raises:
        StoreLocked: Another holds it; the message names its pid, host, and since when.
        StoreReadOnly: The lock file cannot be made; the message names the folder.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path) + SUFFIX
        try:
            self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise file_error(self.path, error) from error
        try:
            self.take(path)
        except BaseException:
            os.close(self.descriptor)
            raise
        held.add(self)

    def take(self, path: str) -> None:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreLocked(f"{path} is held by {self.holder()}") from error
        except OSError as error:
            raise file_error(self.path, error) from error
        self.sign()

    def sign(self) -> None:
        """Say in the file who holds it."""
        since = to_datetime(SystemClock().now_us()).isoformat(timespec="seconds")
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since})
        try:
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, text.encode(), 0)
        except OSError as error:
            raise file_error(self.path, error) from error

    def holder(self) -> str:
        """Who holds the lock, in words."""
        try:
            found = json.loads(os.pread(self.descriptor, LONGEST_HOLDER, 0))
            return f"process {found['pid']} on {found['host']} since {found['since']}"
        except (ValueError, KeyError, TypeError):
            return "another process, which is just taking it"

    def release(self) -> None:
        """Let go; again does nothing."""
        if self in held:
            held.discard(self)
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            os.close(self.descriptor)
