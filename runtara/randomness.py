"""The random source: the only module that makes random values.

It is given to the runtime, so that a simulation can give one with a seed.
"""

import random
import uuid
from typing import Protocol


class Randomness(Protocol):
    """Where identifiers and jitter come from."""

    def identifier(self) -> str:
        """A text that nobody else makes: 32 hexadecimal digits."""
        ...

    def fraction(self) -> float:
        """A number from 0 (inclusive) to 1 (exclusive), for jitter."""
        ...


class SystemRandomness:
    """The random source of the machine."""

    def identifier(self) -> str:
        return uuid.uuid4().hex

    def fraction(self) -> float:
        return random.random()


class SeededRandomness:
    """The same values for the same seed. For tests and simulations only."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def identifier(self) -> str:
        return f"{self.random.getrandbits(128):032x}"

    def fraction(self) -> float:
        return self.random.random()
