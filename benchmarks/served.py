"""A server in a process of its own: ``python -m benchmarks.served store.db``; ``--echo`` for the raw limit.

It prints its port, and serves until its standard input is closed.
"""

import sys
from functools import partial

import trio
from trio_websocket import ConnectionClosed, WebSocketRequest, serve_websocket

from runtara.server import Server, gateway_limits, serve


async def echo(request: WebSocketRequest) -> None:
    """Give every message back: what the WebSocket library itself can do."""
    socket = await request.accept()
    try:
        while True:
            await socket.send_message(await socket.get_message())
    except ConnectionClosed:
        pass


async def until_told(scope: trio.CancelScope) -> None:
    await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
    scope.cancel()


async def main(path: str) -> None:
    async with trio.open_nursery() as nursery:
        if path == "--echo":
            start = partial(serve_websocket, echo, "127.0.0.1", 0, ssl_context=None)
            found = await nursery.start(start)
            print(found.port, flush=True)
        else:
            limits = gateway_limits({})
            server: Server = await nursery.start(
                partial(serve, f"sqlite:///{path}", port=0, signals=False, limits=limits)
            )
            print(server.ports[0], flush=True)
        await until_told(nursery.cancel_scope)


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
