"""The numbers that bound one instance, and the ranges of times and durations."""

from typing import Final

import attrs

from runtara.errors import ValidationError

SECOND_US: Final = 1_000_000
MAX_DURATION_US: Final = 100 * 365 * 86_400 * SECOND_US
"""The longest sleep, timeout or delay: 36,500 days."""
MAX_INSTANT_US: Final = 253_402_300_799_999_999
"""The last microsecond of the year 9999, the end of Python's calendar."""
MAX_INT: Final = 2**63 - 1

MEBIBYTE: Final = 1024 * 1024

OPEN_STEPS: Final = 1000
"""Running steps of one instance that are known to its actor; older ones stay running in the list."""
STEP_TEXT: Final = 4096
"""Characters of a step's id, name or type, or of a scope's id, that an event may tell; more count as none."""


@attrs.frozen(kw_only=True)
class Limits:
    """Bounds that the machine keeps for one instance."""

    payload_bytes: int = 4 * MEBIBYTE
    """Of one state, payload, input, output or error text; 1 to 64 MiB."""
    pending_signals: int = 1000
    """Unconsumed signals of one instance; one more is refused (`SignalQueueFull`)."""
    pending_signal_bytes: int = 64 * MEBIBYTE
    """Payloads of all unconsumed signals of one instance."""
    open_waits: int = 1000
    """Sleeps and waits of one instance that are open at once."""
    compensations: int = 10_000
    """Compensatable checkpoints of one instance."""
    heartbeat_seconds: float = 10.0
    """Of a stream of heartbeats, at most one per so many seconds is stored."""

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.payload_bytes <= 64 * MEBIBYTE:
            raise ValidationError("payload_bytes", "must be from 1 to 67108864 (64 MiB)")
        for name in ("pending_signals", "pending_signal_bytes", "open_waits", "compensations"):
            if getattr(self, name) < 1:
                raise ValidationError(name, "must be at least 1")
        if not self.heartbeat_seconds >= 0:
            raise ValidationError("heartbeat_seconds", "must not be negative")
