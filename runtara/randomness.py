"""The random source: the only module that makes random values.

It is given to the runtime, so that a simulation can give one with a seed.
"""

import base64
import random
import secrets
import uuid
from typing import Protocol


class Randomness(Protocol):
    """Where identifiers and jitter come from."""

    def identifier(self) -> str:
        """A text that nobody else makes: 32 hexadecimal digits."""
        ...

    def secret(self) -> str:
        """256 bits that nobody can guess, as 43 characters that are safe in a URL."""
        ...

    def fraction(self) -> float:
        """A number from 0 (inclusive) to 1 (exclusive), for jitter."""
        ...


class SystemRandomness:
    """The random source of the machine."""

    def identifier(self) -> str:
        return uuid.uuid4().hex

    def secret(self) -> str:
        return secrets.token_urlsafe(32)

    def fraction(self) -> float:
        return random.random()


class SeededRandomness:
    """The same values for the same seed. For tests and simulations only."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def identifier(self) -> str:
        return f"{self.random.getrandbits(128):032x}"

    def secret(self) -> str:
        return base64.urlsafe_b64encode(self.random.randbytes(32)).decode().rstrip("=")

    def fraction(self) -> float:
        return self.random.random()
