"""An order that survives kill -9: run it, kill it at any moment, run it again."""

from contextlib import suppress

import trio

import runtara


async def main() -> None:
    async with runtara.open_runtime("sqlite:///orders.db") as rt:
        with suppress(runtara.AlreadyFinished):
            async with rt.register("order-1") as order:
                for step in ("validate", "charge", "pack", "ship"):
                    if not (await order.get_checkpoint(step)).found:
                        await trio.sleep(0.5)  # the work of the step
                        await order.checkpoint(step, b"done")  # on disk when it returns
                        print(step, flush=True)
                await order.sleep(1, checkpoint_id="cool-off")  # one deadline, however often it is killed
                await order.complete(b"delivered")
        print(await rt.result("order-1"))


trio.run(main)
