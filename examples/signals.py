"""Signals: an order that can be paused and cancelled at any time, and that waits to be paid.

Two tasks of one program: `work` is the order, `operate` is whoever has something to say to it.
"""

import trio

import runtara
from runtara import SignalType


async def work(rt: runtara.Runtime, order_id: str) -> None:
    """Do the order; leave it when it is told to."""
    async with rt.register(order_id) as order, trio.open_nursery() as nursery:
        nursery.start_soon(obey, order, nursery.cancel_scope)
        paid = await order.wait_signal("payment", timeout=3600, checkpoint_id="paid")
        if paid.received:
            print(order_id, "received", paid.payload)
            for parcel in range(100):
                packed = await order.checkpoint(f"parcel-{parcel}", b"packed")
                if not packed.found:
                    await trio.sleep(0.1)
            await order.complete(b"delivered")
        nursery.cancel_scope.cancel()


async def obey(order: runtara.Instance, scope: trio.CancelScope) -> None:
    """Signals are pushed. Each is pending, also over a crash, until it is acknowledged by its id."""
    async for signal in order.signals():
        if signal.type in (SignalType.CANCEL, SignalType.PAUSE):
            reply = await order.ack(signal)  # takes effect with this: on disk when it returns
            print(order.instance_id, "is", reply.status.word)
            scope.cancel()


async def operate(rt: runtara.Runtime) -> None:
    await rt.send_custom_signal("order-1", "payment", b"10 EUR", idempotency_key="transfer-7")
    await rt.send_custom_signal("order-1", "payment", b"10 EUR", idempotency_key="transfer-7")  # the same one
    await trio.sleep(0.5)
    await rt.send_signal("order-1", "pause")


async def main() -> None:
    async with runtara.open_runtime("sqlite:///:memory:") as rt:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, rt, "order-1")
            await trio.sleep(0.1)
            nursery.start_soon(operate, rt)
        await rt.send_signal("order-1", "resume")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work, rt, "order-1")
            await trio.sleep(0.5)
            await rt.send_signal("order-1", "cancel", b"the customer changed his mind")
        view = await rt.status("order-1")
        print(view.status.word, "because", view.error)


if __name__ == "__main__":
    trio.run(main)
