"""Listeners that speak TLS, with a certificate that guards nothing but these tests, and one that fails."""

import errno
import ssl
from pathlib import Path

import pytest
import trio

import runtara
from runtara.server import tls_context
from tests.gateways import HEAD_END, TEXT, Peer, as_json, closing, frame, head, quick, served, until
from tests.served import QUICK, server

CERTIFICATES = Path(__file__).parent / "certificates"
CERTIFICATE, PRIVATE_KEY = str(CERTIFICATES / "localhost.crt"), str(CERTIFICATES / "localhost.key")


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=CERTIFICATE)


async def test_a_client_speaks_to_a_server_over_tls() -> None:
    async with (
        server(host="localhost", tls_cert=CERTIFICATE, tls_key=PRIVATE_KEY) as found,
        runtara.connect(found.address, tls=trusting(), limits=QUICK) as rt,
        rt.register("a") as inst,
    ):
        assert found.address.startswith("wss://")
        state = bytes(300_000)
        await inst.checkpoint("c", state)
        assert (await inst.checkpoint("c", b"other")).state == state


async def test_peers_that_do_not_speak_tls_are_left_at_the_deadline() -> None:
    context = tls_context(CERTIFICATE, PRIVATE_KEY)
    async with served(quick(handshake_seconds=0.2), tls=context) as found:
        silent, plain, half = [await found.raw() for _ in range(3)]
        await plain.send(head())
        await half.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100))
        began = trio.current_time()
        for peer in (silent, plain, half):
            assert HEAD_END not in await peer.read_all()
        assert trio.current_time() - began < 1.0
        await found.settled()


async def test_an_old_version_of_tls_is_refused() -> None:
    context = tls_context(CERTIFICATE, PRIVATE_KEY)
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    old = trusting()
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    async with served(tls=context) as found:
        stream = trio.SSLStream((await found.raw()).stream, old, server_hostname="localhost")
        with pytest.raises(trio.BrokenResourceError):
            await stream.do_handshake()
        await found.settled()


async def test_the_last_words_reach_a_peer_over_tls() -> None:
    async with served(tls=tls_context(CERTIFICATE, PRIVATE_KEY)) as found:
        raw = await found.raw()
        peer = Peer(
            trio.SSLStream(raw.stream, trusting(), server_hostname="localhost", https_compatible=True)
        )
        await peer.send(head())
        assert await peer.status() == 101
        assert (await peer.hello())["t"] == "welcome"
        await peer.send(frame(TEXT, as_json({"t": "nonsense"})))
        assert (await peer.envelope())["t"] == "refused"
        assert await peer.hear_close() == 1008
        await peer.send(closing(1000))
        await found.settled()


class Exhausted(trio.abc.Listener[trio.SocketStream]):
    """A listener that has no file descriptors left for a while."""

    def __init__(self, known: trio.SocketListener, times: int) -> None:
        self.known = known
        self.times = times

    async def accept(self) -> trio.SocketStream:
        if self.times:
            self.times -= 1
            raise OSError(errno.EMFILE, "too many open files")
        return await self.known.accept()

    async def aclose(self) -> None:
        await self.known.aclose()


async def test_a_gateway_without_file_descriptors_accepts_again_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served() as found, trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listener.socket.getsockname()[1]
        nursery.start_soon(found.gateway.accept, Exhausted(listener, 2), nursery)
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        peer = Peer(stream)
        found.peers.append(peer)
        await peer.send(head())
        assert await peer.status() == 101
        await peer.close()
        assert [record.getMessage() for record in caplog.records].count(
            "sockets cannot be accepted: [Errno 24] too many open files"
        ) == 1
        await listener.aclose()
        await until(lambda: found.gateway.statistics().sockets == 0)
