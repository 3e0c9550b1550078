"""What the runs of the demo do. Parent and child derive the same plan from the same two numbers.

An *order* is one instance. Its life: some steps, a durable sleep, two payments (custom signals of one key,
so that one consumed twice would be seen), some more steps, the end.
"""

from typing import Final

import attrs

STEPS_BEFORE: Final = ("validate", "reserve", "charge")
STEPS_AFTER: Final = ("pack", "ship", "thank")
STEPS: Final = STEPS_BEFORE + STEPS_AFTER
NAP: Final = "nap"
PAYMENT_KEY: Final = "payment"
PAYMENTS: Final = ("payment-1", "payment-2")
"""The checkpoint id of each wait, and the idempotency key of the signal that it is for."""
STAGES: Final = len(STEPS) + 1 + len(PAYMENTS) + 1
"""Steps, sleep, payments, end: what an order has to acknowledge."""


@attrs.frozen(kw_only=True)
class Plan:
    """How many orders, and how long the longest one works."""

    instances: int
    seconds: float

    @property
    def instance_ids(self) -> tuple[str, ...]:
        return tuple(f"order-{number:03}" for number in range(1, self.instances + 1))

    @property
    def nap_seconds(self) -> float:
        return 0.2 * self.seconds

    @property
    def payment_delay_seconds(self) -> float:
        """The longest time that the operator waits before a payment."""
        return 0.2 * self.seconds

    @property
    def kill_seconds(self) -> float:
        """All kills fall into so many seconds of work: less than the longest order takes."""
        return 0.85 * self.seconds

    def work_seconds(self, instance_id: str) -> float:
        """How long the bodies of an order take in all: the last one the longest, ``seconds``."""
        place = self.instance_ids.index(instance_id) + 1
        return self.seconds * (0.4 + 0.6 * place / self.instances)


def payment(instance_id: str, name: str) -> bytes:
    """The payload of a payment: the same one every time it is sent, and no two alike."""
    return f"{name} of {instance_id}".encode()
