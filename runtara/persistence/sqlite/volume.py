"""On what kind of volume a file lies: SQLite's locks and its shared memory do not work over a network.

A file on such a volume is opened all the same (a single process may get away with it), but the log says so,
with the kind of the volume and what to do.
"""

import logging
import os
from typing import Final

logger = logging.getLogger("runtara.persistence")

UNSUITABLE: Final = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "fuse.", "ceph", "glusterfs")
"""Kinds of volume (or their beginnings) where locks or shared memory were seen to fail."""
MOUNTS: Final = "/proc/self/mounts"


def kind_of_volume(path: str, mounts: str) -> str | None:
    """The kind of the volume that ``path`` lies on, by the text of a mount table; None if it is not there."""
    best, kind = "", None
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = fields[1].encode().decode("unicode_escape")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def is_unsuitable(kind: str | None) -> bool:
    """Whether SQLite's guarantees are known not to hold on such a volume."""
    return kind is not None and any(
        kind == word or (word.endswith(".") and kind.startswith(word)) for word in UNSUITABLE
    )


def warn_of_unsuitable_volume(path: str) -> None:
    """Log a warning if the file at ``path`` lies on such a volume. Where that cannot be told, say nothing."""
    try:
        with open(MOUNTS, encoding="utf-8", errors="replace") as table:
            kind = kind_of_volume(os.path.realpath(path), table.read())
    except OSError:
        return
    if is_unsuitable(kind):
        logger.warning(
            "%s lies on a %s volume, where SQLite's locks may not work and the file may be damaged; "
            "use a local disk (in a container: a named volume)",
            path,
            kind,
        )
