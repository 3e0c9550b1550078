"""The child of the demo: a program like a user's own, which is killed while it works.

Each life of it opens the store, carries every order on from where it was, and plays the operator who sends
the payments. It ends by itself once all orders are completed, or when its parent is gone.
"""

import sys
from pathlib import Path

import trio

import runtara
from runtara.cli.demo_log import Entry, Kind, LogReader, SideLog
from runtara.cli.demo_plan import (
    NAP,
    PAYMENT_KEY,
    PAYMENTS,
    STEPS,
    STEPS_AFTER,
    STEPS_BEFORE,
    Plan,
    payment,
)
from runtara.clock import SystemClock
from runtara.randomness import Randomness, SystemRandomness

STORE_NAME = "demo.db"
LOG_NAME = "effects.log"


class Child:
    """One life of the program."""

    def __init__(self, runtime: runtara.Runtime, plan: Plan, log: SideLog, life: int) -> None:
        self.runtime = runtime
        self.plan = plan
        self.log = log
        self.life = life
        self.clock = SystemClock()
        self.randomness: Randomness = SystemRandomness()

    def note(self, kind: Kind, instance_id: str, name: str = "-", value: bytes = b"") -> None:
        self.log.write(Entry(kind, self.life, instance_id, name, value))

    async def work(self, finished: frozenset[str]) -> None:
        """Carry on every order that has not been seen to end, and pay for it."""
        async with trio.open_nursery() as nursery:
            for instance_id in self.plan.instance_ids:
                if instance_id not in finished:
                    nursery.start_soon(self.carry_out, instance_id)
                    nursery.start_soon(self.pay, instance_id)

    # ------------------------------------------------------------ the order

    async def carry_out(self, instance_id: str) -> None:
        try:
            async with self.runtime.register(instance_id) as order:
                await self.run(order)
        except runtara.AlreadyFinished:  # it was killed between the end and the line about it
            view = await self.runtime.get(instance_id)
            self.note(Kind.DONE, instance_id, value=view.output or b"")

    async def run(self, order: runtara.Instance) -> None:
        for name in STEPS_BEFORE:
            await self.step(order, name)
        await self.nap(order)
        for name in PAYMENTS:
            reply = await order.wait_signal(PAYMENT_KEY, checkpoint_id=name)
            self.note(Kind.GOT, order.instance_id, name, reply.payload or b"")
        for name in STEPS_AFTER:
            await self.step(order, name)
        output = f"{order.instance_id} is delivered".encode()
        await order.complete(output)
        self.note(Kind.DONE, order.instance_id, value=output)

    async def step(self, order: runtara.Instance, name: str) -> None:
        """Do something once, and remember that it is done.

        The state is a new random value each time the body runs: if a body ran again, it would show.
        """
        found = await order.get_checkpoint(name)
        state = found.state
        if state is None:
            seconds = self.plan.work_seconds(order.instance_id) / len(STEPS)
            await trio.sleep(seconds / 2)
            self.note(Kind.DID, order.instance_id, name)
            await trio.sleep(seconds / 2)
            reply = await order.checkpoint(name, self.randomness.identifier().encode())
            state = reply.state or b""
        self.note(Kind.ACK, order.instance_id, name, state)

    async def nap(self, order: runtara.Instance) -> None:
        reply = await order.sleep(self.plan.nap_seconds, checkpoint_id=NAP, state=NAP.encode())
        value = f"{reply.deadline_us} {self.clock.now_us()}".encode()
        self.note(Kind.SLEPT, order.instance_id, NAP, value)

    # ------------------------------------------------------------ the operator

    async def pay(self, instance_id: str) -> None:
        """Send both payments, in order; in each life again, for nobody knows what the last one achieved."""
        for name in PAYMENTS:
            await trio.sleep(self.plan.payment_delay_seconds * self.randomness.fraction())
            payload = payment(instance_id, name)
            await self.runtime.send_custom_signal(
                instance_id, PAYMENT_KEY, payload, idempotency_key=name, store_if_unknown=True
            )
            self.note(Kind.SENT, instance_id, name, payload)


async def live(folder: Path, plan: Plan, life: int) -> None:
    """One life, until all is done or the parent is gone."""
    entries = LogReader(folder / LOG_NAME).read_new()
    finished = frozenset(entry.instance_id for entry in entries if entry.kind is Kind.DONE)
    log = SideLog(folder / LOG_NAME)
    async with runtara.open_runtime(f"sqlite:///{folder / STORE_NAME}") as runtime:
        log.write(Entry(Kind.UP, life))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end_with_parent, nursery.cancel_scope)
            await Child(runtime, plan, log, life).work(finished)
            nursery.cancel_scope.cancel()


async def end_with_parent(scope: trio.CancelScope) -> None:
    """The parent holds the other end of the standard input; it closes when the parent ends, however."""
    async with trio.lowlevel.FdStream(sys.stdin.fileno()) as stream:
        while await stream.receive_some():
            pass
    scope.cancel()


def main(folder: str, instances: str, seconds: str, life: str) -> None:
    trio.run(live, Path(folder), Plan(instances=int(instances), seconds=float(seconds)), int(life))


if __name__ == "__main__":
    main(*sys.argv[1:])
