"""One tree of exceptions, split by whose fault it is.

Rules:

1. Every exception that leaves the runtime is a `RuntaraError` with a stable ``code``.
2. ``retryable`` means: the same request, sent again under the same ids, may succeed and cannot do harm.
3. The first level says whose fault it was: `CallerError` (the request), `PeerError` (the other end of a
   connection), `StoreError` (the database or its disk), `RuntimeFault` (the runtime: a bug, or an actor
   that was killed).
4. ``details`` holds plain JSON values only, so an error looks the same in process and over a socket.

`ERROR_CODES` is the table of all of them; ``docs/errors.md`` is generated from it.
"""

from collections.abc import Iterable, Mapping
from typing import ClassVar

import attrs

Details = Mapping[str, "str | int | float | bool | None"]


class RuntaraError(Exception):
    """Base of everything the runtime raises on purpose.

    Attributes:
        code: Stable name of the error, the same on every surface.
        retryable: Whether the same request may be sent again under the same ids.
        http_status: The status an HTTP surface answers with.
        details: JSON values that say more (``field``, ``expected``, ``actual`` ...).
        retry_after_seconds: How long to wait before a retry, or None.
    """

    code: ClassVar[str] = "error"
    meaning: ClassVar[str] = "Any error of the runtime."
    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        details: Details | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, str | int | float | bool | None] = dict(details or {})
        self.retry_after_seconds = retry_after_seconds


# ---------------------------------------------------------------- the caller


class CallerError(RuntaraError):
    """The request cannot be granted; sending it again unchanged does not help unless it is retryable."""

    code = "caller_error"
    meaning = "The request cannot be granted."
    http_status = 400


class ValidationError(CallerError):
    """A field of the request is missing, ill formed or out of range; ``details['field']`` names it."""

    code = "validation_error"
    meaning = "A field is missing, ill formed or out of range; details.field names it."
    http_status = 400

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}", details={"field": field, "problem": problem})

    @property
    def field(self) -> str:
        return str(self.details.get("field"))


class PayloadTooLarge(CallerError):
    """A state or payload is over the limit in bytes."""

    code = "payload_too_large"
    meaning = "A state or payload is over the limit; details give field, size and limit in bytes."
    http_status = 413

    def __init__(self, field: str, size: int, limit: int) -> None:
        super().__init__(
            f"{field}: {size} bytes, the limit is {limit}",
            details={"field": field, "size": size, "limit": limit},
        )

    @property
    def field(self) -> str:
        return str(self.details.get("field"))


class InstanceNotFound(CallerError):
    """No instance with this id exists for this tenant."""

    code = "instance_not_found"
    meaning = "No instance with this id exists for this tenant."
    http_status = 404

    def __init__(self, instance_id: str) -> None:
        super().__init__("Instance not found", details={"instance_id": instance_id})


class CheckpointNotFound(CallerError):
    """The checkpoint named by the request does not exist."""

    code = "checkpoint_not_found"
    meaning = "The checkpoint named by the request does not exist."
    http_status = 404

    def __init__(self, checkpoint_id: str, field: str = "checkpoint_id") -> None:
        super().__init__(
            f"{field}: no checkpoint {checkpoint_id!r}",
            details={"field": field, "checkpoint_id": checkpoint_id},
        )


class ErrorNotFound(CallerError):
    """The recorded error named as a cause does not exist."""

    code = "error_not_found"
    meaning = "The recorded error named as a cause does not exist."
    http_status = 404

    def __init__(self, error_id: int, field: str) -> None:
        super().__init__(
            f"{field}: no recorded error {error_id}", details={"field": field, "error_id": error_id}
        )


class SignalNotPending(CallerError):
    """The signal named by an acknowledgement was never accepted, or none of that type was shown."""

    code = "signal_not_pending"
    meaning = "The acknowledged signal does not exist, or none of that type was shown to this session."
    http_status = 404

    def __init__(self, field: str, value: int | str) -> None:
        super().__init__(f"{field}: no pending signal {value!r}", details={"field": field, "value": value})


class InvalidInstanceState(CallerError):
    """The instance is not in a state in which this request is allowed."""

    code = "invalid_instance_state"
    meaning = "The instance is in another state than the request needs; details give expected and actual."
    http_status = 409

    def __init__(self, expected: str, actual: str) -> None:
        super().__init__(
            f"the instance is {actual}, this needs {expected}",
            details={"expected": expected, "actual": actual},
        )


class AlreadyFinished(CallerError):
    """The instance has ended; ``details`` say how, and it never changes again."""

    code = "already_finished"
    meaning = "The instance has ended and never changes again; details give its status and reason."
    http_status = 409

    def __init__(self, status: str, reason: str | None, finished_us: int | None) -> None:
        super().__init__(
            f"the instance is {status}",
            details={"status": status, "reason": reason, "finished_us": finished_us},
        )

    @property
    def status(self) -> str:
        return str(self.details.get("status"))


class Conflict(CallerError):
    """The same id was used before with another meaning; ``details['field']`` names it."""

    code = "conflict"
    meaning = "The same id was used before with another body, kind or workflow; details.field names it."
    http_status = 409

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}", details={"field": field, "problem": problem})

    @property
    def field(self) -> str:
        return str(self.details.get("field"))


class StaleEpoch(CallerError):
    """A newer session owns the instance; this one changed nothing and must stop."""

    code = "stale_epoch"
    meaning = "A newer session owns the instance; the late message changed nothing."
    http_status = 409

    def __init__(self, epoch: int, current: int) -> None:
        super().__init__(
            f"epoch {epoch} is over, the instance is at {current}",
            details={"epoch": epoch, "current": current},
        )


class SignalQueueFull(CallerError):
    """The instance holds as many unconsumed signals as it may."""

    code = "signal_queue_full"
    meaning = "The instance holds as many unconsumed signals as it may; nothing was stored."
    retryable = True
    http_status = 429


class Overloaded(CallerError):
    """The runtime holds as many bytes or messages as it may; nothing was changed."""

    code = "overloaded"
    meaning = "A queue or the budget in bytes is full; nothing was changed."
    retryable = True
    http_status = 429


class TooManyInstances(CallerError):
    """The runtime holds as many live instances as it may."""

    code = "too_many_instances"
    meaning = "The runtime holds as many live instances as it may; existing ones go on."
    retryable = True
    http_status = 429


class Draining(CallerError):
    """The runtime is shutting down and accepts no new work."""

    code = "draining"
    meaning = "The runtime is shutting down and accepts no new instance."
    retryable = True
    http_status = 503


class RuntimeClosed(CallerError):
    """The runtime was closed; what was acknowledged is on disk."""

    code = "runtime_closed"
    meaning = "The runtime was closed; what was acknowledged is on disk."
    http_status = 503


class BadExport(CallerError):
    """An export that is cut off, was changed, or was never one; the details name the line and the field."""

    code = "bad_export"
    meaning = "The export is cut off, changed, or none; details.line and details.field say where."
    http_status = 400

    def __init__(self, line: int, field: str, problem: str) -> None:
        super().__init__(
            f"line {line}: {field}: {problem}", details={"line": line, "field": field, "problem": problem}
        )

    @property
    def field(self) -> str:
        return str(self.details.get("field"))


class WatchLagged(CallerError):
    """A watcher did not read for so long that its buffer overflowed; watch again for the present state."""

    code = "watch_lagged"
    meaning = "The watcher fell behind its bounded buffer; watch again."
    retryable = True
    http_status = 429


class InstanceFailed(CallerError):
    """`result()` of an instance that failed or was cancelled; ``details`` say how it ended."""

    code = "instance_failed"
    meaning = "The instance whose result was asked for failed or was cancelled."
    http_status = 409

    def __init__(self, status: str, reason: str | None, error: str | None) -> None:
        super().__init__(
            f"the instance is {status}" + (f": {error}" if error else ""),
            details={"status": status, "reason": reason, "error": error},
        )

    @property
    def status(self) -> str:
        return str(self.details.get("status"))

    @property
    def error(self) -> str | None:
        found = self.details.get("error")
        return None if found is None else str(found)


class Unauthorized(CallerError):
    """There is no token, or not a good one; the message never says which token."""

    code = "unauthorized"
    meaning = "The token is missing, unknown, expired or revoked."
    http_status = 401


class Forbidden(CallerError):
    """The token does not allow this."""

    code = "forbidden"
    meaning = "The token's roles do not allow this; details.operation names it."
    http_status = 403

    def __init__(self, operation: str, roles: Iterable[str]) -> None:
        words = ", ".join(roles)
        super().__init__(
            f"{operation}: not allowed to {words or 'nobody'}",
            details={"operation": operation, "roles": words},
        )


# ---------------------------------------------------------------- the peer


class PeerError(RuntaraError):
    """The other end of a connection broke the protocol or went away."""

    code = "peer_error"
    meaning = "The other end of a connection broke the protocol or went away."
    http_status = 502


# ---------------------------------------------------------------- the store


class StoreError(RuntaraError):
    """The store could not do what was asked; nothing that was acknowledged is lost."""

    code = "store_error"
    meaning = "The store could not do what was asked."
    http_status = 503


class StoreUnavailable(StoreError):
    """The store did not answer in time; it is asked again, and the request may be sent again."""

    code = "store_unavailable"
    meaning = "The store is busy or does not answer; the request may be sent again."
    retryable = True


class StoreFull(StoreError):
    """The disk is full: writes are refused, reads go on."""

    code = "store_full"
    meaning = "The disk is full: writes are refused until there is space, reads go on."
    retryable = True
    http_status = 507


class StoreReadOnly(StoreError):
    """The file or its folder cannot be written."""

    code = "store_read_only"
    meaning = "The file or its folder cannot be written: writes are refused, reads go on."
    retryable = True


class OutcomeUnknown(StoreError):
    """The write may or may not be on disk; send it again under the same id to find out."""

    code = "outcome_unknown"
    meaning = "The write may or may not have happened; send it again under the same id."
    retryable = True


class StoreFailed(StoreError):
    """The store reported an I/O error or damage: the runtime stops, and recovers by a restart."""

    code = "store_failed"
    meaning = "An I/O error or damage: the runtime stops acknowledging and must be restarted."


class StoreCorrupt(StoreFailed):
    """The file is damaged or is no database."""

    code = "store_corrupt"
    meaning = "The file is damaged, or is no store of this program."


class LeaseLost(StoreFailed):
    """Another runtime has taken the store over; this one can write nothing any more, and stops."""

    code = "lease_lost"
    meaning = "Another runtime has taken the store over; this one stops, nothing more of it is written."
    http_status = 409


class StoreDenied(StoreError):
    """The database does not let this user in, or there is no such database."""

    code = "store_denied"
    meaning = "The database does not let this user in, or there is no such database or user."


class StoreLocked(StoreError):
    """Another runtime holds the store; the message says who."""

    code = "store_locked"
    meaning = "Another runtime holds this store; the message says which process."
    http_status = 409


class StoreNotFound(StoreError):
    """There is no store at this place, and whoever only reads makes none."""

    code = "store_not_found"
    meaning = "There is no store at this place, and whoever only reads makes none."
    http_status = 404


class StoreTooOld(StoreError):
    """The store has an older layout, and whoever only reads does not change it; open it for writing once."""

    code = "store_too_old"
    meaning = "The store has an older layout; open it for writing once, which brings it up to date."
    http_status = 409


class StoreTooNew(StoreError):
    """The store was written by a newer version of this program and was left untouched."""

    code = "store_too_new"
    meaning = "The store was written by a newer version of this program; it was left untouched."
    http_status = 409


class ImportUnfinished(StoreError):
    """An import into this store was begun and has not ended; no runtime opens it before it has."""

    code = "import_unfinished"
    meaning = "An import into this store has not ended: run it again, or discard it."
    http_status = 409


class StoreRefused(StoreError):
    """The store refused a value of one unit; the others of its batch are not affected."""

    code = "store_refused"
    meaning = "The store refused one write; the other writes of its batch were not affected."
    http_status = 500


class GuardFailed(StoreError):
    """The stored row was at another epoch or revision than the writer believed; nothing was written."""

    code = "guard_failed"
    meaning = "Another writer changed the instance first; nothing was written."
    retryable = True
    http_status = 409


# ---------------------------------------------------------------- the runtime itself


class RuntimeFault(RuntaraError):
    """The runtime failed: a bug, or an actor that was killed."""

    code = "internal_error"
    meaning = "A bug of the runtime; it was logged with the instance id."


class ActorFailed(RuntimeFault):
    """The actor that held the request was lost before it could answer; send the request again."""

    code = "actor_failed"
    meaning = "The actor was lost before it could answer; send the request again under the same ids."
    retryable = True
    http_status = 503


class Quarantined(RuntimeFault):
    """The instance's actor failed too often in a short time and rests for a while."""

    code = "quarantined"
    meaning = "The instance's actor failed too often in a short time and rests for a while."
    retryable = True
    http_status = 503


# ---------------------------------------------------------------- the table


@attrs.frozen
class ErrorCode:
    """One row of the table: what a code means and what to do about it."""

    code: str
    meaning: str
    retryable: bool
    http_status: int
    exception: type[RuntaraError]


def walk(cls: type[RuntaraError]) -> list[type[RuntaraError]]:
    """``cls`` and all that derive from it, parents first, in the order they are defined."""
    return [cls, *(found for sub in cls.__subclasses__() for found in walk(sub))]


ERROR_CODES: dict[str, ErrorCode] = {
    cls.code: ErrorCode(cls.code, cls.meaning, cls.retryable, cls.http_status, cls)
    for cls in walk(RuntaraError)
}


def restored(
    code: str, message: str, details: Details, retryable: bool, retry_after_seconds: float | None
) -> RuntaraError:
    """An error that came over a connection, as the exception that it was.

    A code that this program does not know becomes a plain `RuntaraError` that keeps ``retryable``.
    """
    known = ERROR_CODES.get(code)
    kind = RuntaraError if known is None else known.exception
    error = kind.__new__(kind)
    RuntaraError.__init__(error, message, details=details, retry_after_seconds=retry_after_seconds)
    if known is None:
        vars(error).update(code=code, retryable=retryable)
    return error
