"""What a world is made of. Everything is drawn from the seed; kinds of faults can be left out."""

import random
from enum import Enum

import attrs

from runtara.config import Settings
from runtara.testing.faulty import Rates


class Kind(Enum):
    """Kinds of faults. Each can be switched off, to see whether a failure needs it."""

    UNAVAILABLE = "unavailable"
    """Store calls fail before the commit."""
    FULL = "full"
    REFUSED = "refused"
    """One unit of a batch is bad."""
    UNKNOWN = "unknown"
    """The commit itself fails; the batch is in the store, or not."""
    UNSETTLED = "unsettled"
    """... and nobody can say which: the runtime must stop."""
    SLOW = "slow"
    OUTAGE = "outage"
    KILL_ACTOR = "kill-actor"
    KILL_TREE = "kill-tree"
    """The writer, the directory, the wake scheduler or the recovery is killed."""
    HANDLER = "handler"
    """A handler of an instance's actor raises."""
    CRASH = "crash"
    """The whole runtime dies."""
    DRAIN = "drain"
    """The runtime is closed and opened again while its callers are busy."""
    FORWARD = "forward"
    """The wall clock jumps ahead."""
    BACKWARD = "backward"
    TAKEOVER = "takeover"
    """A second session of an instance begins while the first lives."""
    CANCEL = "cancel"
    """Callers are cancelled in the middle of a call."""
    BODY = "body"
    """The code of an instance raises in the middle of its session."""


@attrs.frozen(kw_only=True)
class Options:
    """One world."""

    seed: int
    kinds: frozenset[Kind] = frozenset(Kind)
    instances: int = 4
    steps: int = 7
    """Of each program, at most."""
    horizon: float = 12.0
    """Virtual seconds of trouble. Then the faults stop, and all work must end."""
    patience: float = 240.0
    """Virtual seconds after the horizon within which it must."""
    file: bool = False
    """A store in a file, opened anew by each life of the runtime; else one in memory that outlives it."""
    faults_per_second: float = 1.5
    settings: Settings
    rates: Rates
    cancel: float = 0.0
    """How often a call is cancelled in the middle."""
    body: float = 0.0
    """How often a step raises."""


def draw(seed: int, without: frozenset[Kind] = frozenset()) -> Options:
    """The options of a seed."""
    dice = random.Random(f"options {seed}")
    kinds = frozenset(Kind) - without
    calm = dice.random() < 0.1

    def rate(kind: Kind, highest: float) -> float:
        drawn = dice.choice((0.0, 0.3, 1.0)) * highest
        return drawn if kind in kinds and not calm else 0.0

    rates = Rates(
        unavailable=rate(Kind.UNAVAILABLE, 0.05),
        full=rate(Kind.FULL, 0.03),
        refused=rate(Kind.REFUSED, 0.05),
        unknown=rate(Kind.UNKNOWN, 0.08),
        unsettled=rate(Kind.UNSETTLED, 0.1),
        slow=rate(Kind.SLOW, 1.0),
        slow_seconds=dice.choice((0.005, 0.05, 0.3)),
    )
    settings = Settings(
        heartbeat_seconds=1.0,
        budget_bytes=dice.choice((2_000, 1_000_000)),
        overload_seconds=1.0,
        mailbox_messages=dice.choice((4, 1000)),
        batch_units=dice.choice((1, 3, 1000)),
        store_seconds=dice.choice((0.5, 3.0)),
        known_ids=dice.choice((1, 3, 10_000)),
        idle_seconds=dice.choice((0.2, 3.0)),
        grace_seconds=dice.choice((0.5, 3.0)),
        drain_seconds=dice.choice((0.1, 2.0)),
        horizon_seconds=dice.choice((2.0, 60.0)),
        horizon_deadlines=dice.choice((2, 1000)),
        concurrent_wakes=dice.choice((1, 200)),
    )
    return Options(
        seed=seed,
        kinds=frozenset() if calm else kinds,
        instances=dice.choice((2, 3, 5)),
        file=dice.random() < 0.2,
        faults_per_second=dice.choice((0.5, 1.5, 3.0)),
        settings=settings,
        rates=rates,
        cancel=rate(Kind.CANCEL, 0.2),
        body=rate(Kind.BODY, 0.1),
    )
