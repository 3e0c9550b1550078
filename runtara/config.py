"""All settings of a runtime, in one frozen object."""

import math
from collections.abc import Mapping
from typing import Any, Final

import attrs

from runtara.errors import ValidationError
from runtara.limits import MAX_INT, MEBIBYTE, Limits
from runtara.retention import parse_policy

PREFIX: Final = "RUNTARA_"
SYNCHRONOUS: Final = ("FULL", "NORMAL", "OFF", "EXTRA")


def seconds(default: float, least: float = 0.0) -> Any:
    """A setting that is a number of seconds."""
    return attrs.field(default=default, metadata={"least": least})


def count(default: int, least: int = 1) -> Any:
    """A setting that is a whole number."""
    return attrs.field(default=default, metadata={"least": least})


@attrs.frozen(kw_only=True)
class Settings:
    """How a runtime behaves. Each field can be given as an argument of `open_runtime`, or in the environment
    as ``RUNTARA_`` and its name in capitals; an argument wins.

    Raises:
        ValidationError: Naming the setting.
    """

    synchronous: str = "FULL"
    """SQLite: FULL survives a power loss. NORMAL may lose the newest commits then, OFF may lose the file."""
    payload_bytes: int = count(4 * MEBIBYTE)
    """The largest state, payload, input or output; at most 64 MiB."""
    pending_signals: int = count(1000)
    """Unconsumed signals of one instance; one more is refused."""
    heartbeat_seconds: float = seconds(10.0)
    """Of a stream of heartbeats, at most one per so many seconds is stored."""
    budget_bytes: int = count(256 * MEBIBYTE)
    """Requests that the runtime holds before they are on disk; over it, callers wait."""
    overload_seconds: float = seconds(5.0)
    """How long a caller waits for room in the budget before it gets `Overloaded`."""
    mailbox_messages: int = count(1000)
    """Requests that wait for one instance; one more gets `Overloaded` at once."""
    batch_units: int = count(1000)
    """Changes that are written in one transaction, at most."""
    batch_bytes: int = count(16 * MEBIBYTE)
    """Bytes that are written in one transaction, at most (a single change may be larger)."""
    store_seconds: float = seconds(30.0)
    """How long a change waits for a store that is busy or gone before its caller gets `StoreUnavailable`."""
    known_ids: int = count(10_000)
    """Ids of checkpoints (and of waits, and of requests) that a live instance keeps in memory. A new id of
    an instance that has more costs a read."""
    live_instances: int = count(250_000)
    """Instances in memory; over it, new ids get `TooManyInstances`."""
    idle_seconds: float = seconds(30.0, least=0.001)
    """How long an instance without a session stays in memory after its last message."""
    grace_seconds: float = seconds(30.0)
    """How long the session of a runtime that died may come back before its instance is suspended."""
    drain_seconds: float = seconds(5.0)
    """How long a closing runtime waits for its sessions to suspend by themselves."""
    horizon_seconds: float = seconds(3600.0, least=1.0)
    """Deadlines that are nearer than this are kept in memory; farther ones are read when their time nears."""
    horizon_deadlines: int = count(100_000)
    """Deadlines kept in memory; with more of them, the horizon is nearer."""
    concurrent_wakes: int = count(200)
    """Instances that are being woken at once."""
    retention: str = ""
    """How long instances that have ended are kept: rules such as `completed=30d, failed=90d,
    acme/completed=7d, bank/failed=keep`. What no rule names is kept for ever."""
    retention_seconds: float = seconds(3600.0, least=1.0)
    """From the end of one pass of the retention to the next; the first one comes soon after the start."""
    size_warning_bytes: int = count(10 * 1024 * MEBIBYTE, least=0)
    """Without a retention, a store that has reached this size is told of in the log, and again whenever it
    has doubled; 0: never."""

    def __attrs_post_init__(self) -> None:
        if self.synchronous not in SYNCHRONOUS:  # the words as SQLite writes them
            raise ValidationError("synchronous", f"must be one of {', '.join(SYNCHRONOUS)}")
        for field in attrs.fields(Settings):
            if "least" in field.metadata:
                check_number(field.name, getattr(self, field.name), field.type, field.metadata["least"])
        self.limits()
        parse_policy(self.retention)

    def limits(self) -> Limits:
        """The bounds of one instance."""
        return Limits(
            payload_bytes=self.payload_bytes,
            pending_signals=self.pending_signals,
            heartbeat_seconds=self.heartbeat_seconds,
        )


def check_number(name: str, value: object, kind: object, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        raise ValidationError(name, f"must be a {'whole number' if kind is int else 'number'}")
    if value > MAX_INT:
        raise ValidationError(name, f"must be at most {MAX_INT}")
    if not math.isfinite(value) or value < least:
        raise ValidationError(name, f"must be at least {least}")


def settings_from(environment: Mapping[str, str], **arguments: Any) -> Settings:
    """Settings from arguments and, where those are silent, from ``RUNTARA_*`` variables.

    Raises:
        ValidationError: A value is ill formed, or an argument is unknown.
    """
    known = {field.name: field for field in attrs.fields(Settings)}
    for name in arguments:
        if name not in known:
            raise ValidationError(name, "is no setting")
    values: dict[str, Any] = {}
    for name, field in known.items():
        text = environment.get(PREFIX + name.upper())
        if name in arguments:
            values[name] = arguments[name]
        elif text is not None:
            values[name] = parse(name, text, field.type)
    return Settings(**values)


def parse(name: str, text: str, kind: Any, prefix: str = PREFIX) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValidationError(prefix + name.upper(), f"{text!r} is not a {kind.__name__}") from None
