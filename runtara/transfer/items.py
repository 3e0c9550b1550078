"""What the lines of an export hold: the records of the store, and four things beside them."""

from collections.abc import Mapping
from typing import Final

import attrs

from runtara.records import (
    CheckpointRecord,
    CompensationAttemptRecord,
    ErrorRecord,
    EventRecord,
    InstanceRecord,
    PutPayload,
    RequestRecord,
    RetryAttemptRecord,
    SetCompensation,
    SignalRecord,
    Status,
    StepRecord,
    WaitRecord,
)

FORMAT: Final = "runtara-export"
VERSION: Final = 1


@attrs.frozen(kw_only=True)
class Header:
    """The first line."""

    format: str = FORMAT
    version: int = VERSION
    program: str
    """The version of the program that wrote it."""
    backend: str
    created_us: int
    """When the export began, by the clock of whoever made it."""
    export_id: str
    """Tells this export from all others."""
    until_us: int | None = None
    """Instances that were created later than this, by their own word, are not in it."""
    tenant_id: str | None = None
    """None: all tenants."""
    statuses: tuple[Status, ...] = ()
    """Empty: all of them."""
    salvage: bool = False
    """Whether what could not be read was left out."""


@attrs.frozen(kw_only=True)
class Skipped:
    """Something that could not be read and was left out."""

    tenant_id: str | None = None
    instance_id: str | None = None
    what: str
    """The kind of line that is missing: one, or, where that cannot be told, some."""
    revision: int | None = None
    problem: str


@attrs.frozen(kw_only=True)
class End:
    """The last line of an instance."""

    lines: int
    """From the instance's own to the one before this."""
    sha256: str
    """Of the bytes of those lines."""


@attrs.frozen(kw_only=True)
class Trailer:
    """The last line."""

    counts: Mapping[str, int]
    """How many lines of each kind there are; kinds without any are left out."""
    sha256: str
    """Of the bytes of all lines before this."""


@attrs.frozen(kw_only=True)
class Progress:
    """How far a transfer is. This is in no line."""

    verb: str
    """What was done to the lines so far: ``exported``, ``verified``, ``imported``."""
    instances: int
    lines: int
    bytes: int
    of: int | None = None
    """Instances in all, where that is known."""


Record = (
    InstanceRecord
    | PutPayload
    | CompensationAttemptRecord
    | CheckpointRecord
    | SetCompensation
    | WaitRecord
    | EventRecord
    | StepRecord
    | SignalRecord
    | RetryAttemptRecord
    | ErrorRecord
    | RequestRecord
)
Item = Header | Skipped | End | Trailer | Record
