"""What the instances of a world are to do: programs, which a worker runs from the top after each crash."""

import random
from enum import Enum

import attrs


class Do(Enum):
    STEP = "step"
    """Look for the checkpoint, run the body if it is not there, store the result."""
    SAVE = "save"
    """Store a checkpoint without looking."""
    SLEEP = "sleep"
    WAIT = "wait"
    """For a signal that a feeder is sure to send."""
    WAIT_OR_GIVE_UP = "wait or give up"
    """For a signal, with a timeout."""
    BOTH = "both"
    """Sleep and wait for a signal at the same time."""
    MANY = "many"
    """Several calls at the same time."""
    UNDOABLE = "undoable"
    """A checkpoint with a compensation."""
    UNNAMED = "unnamed"
    """A sleep without a name, and a look at what is pending."""
    EMIT = "emit"
    ERROR = "error"
    RETRY = "retry"
    HEARTBEAT = "heartbeat"
    SUSPEND = "suspend"
    """Leave until a time, and go on there."""
    NAP = "nap"
    """Leave without a time."""


class Ending(Enum):
    COMPLETE = "complete"
    FAIL = "fail"
    ABANDON = "abandon"
    """The client goes away in the middle, for ever."""


@attrs.frozen(kw_only=True)
class Step:
    do: Do
    name: str
    key: str
    """Of the signal it waits for."""
    seconds: float


@attrs.frozen(kw_only=True)
class Program:
    instance: str
    steps: tuple[Step, ...]
    ending: Ending


WEIGHTS = {
    Do.STEP: 4,
    Do.SAVE: 3,
    Do.SLEEP: 3,
    Do.WAIT: 3,
    Do.WAIT_OR_GIVE_UP: 2,
    Do.BOTH: 1,
    Do.MANY: 3,
    Do.UNDOABLE: 1,
    Do.UNNAMED: 1,
    Do.EMIT: 2,
    Do.ERROR: 1,
    Do.RETRY: 1,
    Do.HEARTBEAT: 1,
    Do.SUSPEND: 2,
    Do.NAP: 1,
}


def write_program(dice: random.Random, number: int, most_steps: int) -> Program:
    instance = f"run-{number}"
    ending = dice.choices(list(Ending), (6, 2, 2))[0]
    kinds = dice.choices(list(WEIGHTS), list(WEIGHTS.values()), k=dice.randint(2, most_steps))
    steps = tuple(
        Step(
            do=do,
            name=f"{position}-{do.name.lower()}",
            key=dice.choice(("shared", f"key-{position}")),
            seconds=dice.choice((0.0, 0.05, 0.7, 2.5, 6.0)),
        )
        for position, do in enumerate(kinds)
    )
    return Program(instance=instance, steps=steps, ending=ending)
