"""The server: where it listens, whom it lets in without tokens, its limits, and how it stops."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

import runtara
from runtara import Reason, Status
from runtara.server import gateway_limits, is_loopback
from tests.served import QUICK, server

# ---------------------------------------------------------------- limits


def test_limits_come_from_arguments_then_the_environment_then_the_defaults() -> None:
    found = gateway_limits(
        {"RUNTARA_GATEWAY_SOCKETS": "7", "RUNTARA_GATEWAY_GRACE_SECONDS": "1.5", "OTHER": "x"},
        head_bytes=100,
        sockets=9,
    )
    assert (found.sockets, found.connection.grace_seconds, found.stream.head_bytes) == (9, 1.5, 100)
    assert found.ping_seconds == 15.0


@pytest.mark.parametrize(
    ("environment", "arguments", "field"),
    [
        ({"RUNTARA_GATEWAY_SOCKETS": "many"}, {}, "RUNTARA_GATEWAY_SOCKETS"),
        ({"RUNTARA_GATEWAY_SOCKETS": "0"}, {}, "sockets"),
        ({"RUNTARA_GATEWAY_PING_SECONDS": "nan"}, {}, "ping_seconds"),
        ({"RUNTARA_GATEWAY_PING_SECONDS": "-1"}, {}, "ping_seconds"),
        ({}, {"sockets": True}, "sockets"),
        ({}, {"stream": 1}, "stream"),
        ({}, {"nonsense": 1}, "nonsense"),
    ],
)
def test_a_bad_limit_is_refused_by_its_name(
    environment: dict[str, str], arguments: dict[str, object], field: str
) -> None:
    with pytest.raises(runtara.ValidationError) as bad:
        gateway_limits(environment, **arguments)
    assert bad.value.field == field


# ---------------------------------------------------------------- where, and for whom


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
        ("", False),
    ],
)
def test_loopback_is_told_apart(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


async def test_without_tokens_only_loopback_is_served() -> None:
    with pytest.raises(runtara.ValidationError, match="token") as refused:
        async with server(host="0.0.0.0"):
            raise AssertionError("not reached")
    assert refused.value.field == "host"
    async with server(host="0.0.0.0", insecure=True) as found:
        assert found.ports[0] > 0


async def test_a_token_opens_the_gateway_to_other_addresses_and_closes_it_to_the_rest(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path / 'a.db'}"
    async with runtara.open_runtime(url) as rt:
        made = await rt.create_token(roles=["instance", "operator"])
    async with server(url, host="0.0.0.0") as found:
        address = f"ws://127.0.0.1:{found.ports[0]}"
        with pytest.raises(runtara.Unauthorized):
            async with runtara.connect(address, limits=QUICK):
                raise AssertionError("not reached")
        async with runtara.connect(address, token=made.text, limits=QUICK) as rt:
            async with rt.register("a") as inst:
                await inst.checkpoint("one", b"x")
            with pytest.raises(runtara.Forbidden):
                await rt.list_tokens()


async def test_tokens_are_made_listed_and_revoked_over_a_connection() -> None:
    async with server() as found:
        async with runtara.connect(found.address, limits=QUICK) as first:
            admin = await first.create_token(roles=["admin"], name="root")
        async with runtara.connect(found.address, token=admin.text, limits=QUICK) as rt:
            other = await rt.create_token(roles=["instance"], seconds=60)
            listed = await rt.list_tokens()
            assert [token.name for token in listed] == ["root", ""]
            assert "digest" not in repr(listed)
            assert await rt.revoke_token(other.token.token_id)
            assert not await rt.revoke_token(other.token.token_id)
        with pytest.raises(runtara.Unauthorized):
            async with runtara.connect(found.address, token=other.text, limits=QUICK):
                raise AssertionError("not reached")


async def test_a_revoked_token_ends_its_open_connections() -> None:
    async with server() as found:
        made = await found.runtime.create_token(roles=["instance"])
        served = found.tokens
        await served.load()
        with pytest.raises(runtara.RuntaraError) as over:
            async with (
                runtara.connect(found.address, token=made.text, limits=QUICK) as rt,
                rt.register("a") as inst,
            ):
                await served.revoke(made.token.token_id)
                with trio.fail_after(5):
                    while True:
                        await inst.checkpoint("late", b"x")
                        await trio.sleep(0.01)
        assert over.value.code == "unauthorized"


async def test_a_port_that_is_taken_is_said_so() -> None:
    async with server() as found:
        with pytest.raises(runtara.ValidationError) as taken:
            async with server(port=found.ports[0]):
                raise AssertionError("not reached")
        assert taken.value.field == "port"


@pytest.mark.parametrize("files", [{"tls_cert": "a"}, {"tls_key": "a"}, {"tls_cert": "/", "tls_key": "/"}])
async def test_tls_files_that_cannot_be_used_are_refused(files: dict[str, str]) -> None:
    with pytest.raises(runtara.ValidationError, match="tls_cert"):
        async with server(**files):
            raise AssertionError("not reached")


# ---------------------------------------------------------------- as a process


@contextmanager
def serving(store: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``runtara serve`` on a port of its own; the process, and its address."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "runtara",
            "serve",
            "--store",
            f"sqlite:///{store}",
            "--port",
            "0",
            *options,
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        while "listening on" not in line:
            assert line, "it ended before it listened"
            line = process.stderr.readline()
        yield process, line.rsplit(" ", 1)[1].strip()
    finally:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


def wait_for(process: "subprocess.Popen[str]") -> int:
    return process.wait(timeout=20)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_and_the_exit_code_is_zero(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path / "a.db") as (process, address):
        async with runtara.connect(address, limits=QUICK) as rt:
            async with rt.register("a") as inst:
                await inst.checkpoint("one", b"x")
                process.send_signal(number)
                async for found in inst.signals():
                    await inst.ack(found)
                    break  # a session that has obeyed a shutdown leaves
            assert await trio.to_thread.run_sync(wait_for, process) == 0
    async with runtara.open_runtime(f"sqlite:///{tmp_path / 'a.db'}") as again:
        view = await again.status("a")
        assert (view.status, view.reason) == (Status.SUSPENDED, Reason.SHUTDOWN_REQUESTED)
        assert view.record.attempt == 1


async def test_a_second_signal_hurries(tmp_path: Path) -> None:
    with serving(tmp_path / "a.db") as (process, address):
        async with runtara.connect(address, limits=QUICK) as rt, trio.open_nursery() as nursery:
            started = time.monotonic()

            async def deaf(*, task_status: trio.TaskStatus[None]) -> None:
                async with rt.register("a"):
                    task_status.started()
                    await trio.sleep_forever()

            await nursery.start(deaf)
            process.send_signal(signal.SIGTERM)
            await trio.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            assert await trio.to_thread.run_sync(wait_for, process) == 0
            assert time.monotonic() - started < 4.5
            nursery.cancel_scope.cancel()


async def test_a_killed_server_that_is_started_again_keeps_its_sessions(tmp_path: Path) -> None:
    with serving(tmp_path / "a.db") as (process, address):
        port = address.rsplit(":", 1)[1]
        async with runtara.connect(address, limits=QUICK) as rt, rt.register("a") as inst:
            await inst.checkpoint("one", b"x")
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            with serving(tmp_path / "a.db", "--port", port):
                with trio.fail_after(20):
                    assert (await inst.checkpoint("one", b"y")).state == b"x"
                    await inst.checkpoint("two", b"x")
                view = await rt.status("a")
                assert (view.epoch, view.record.attempt) == (inst.epoch, 1)
                await inst.complete()


def test_a_store_that_is_held_is_said_so_with_exit_code_one(tmp_path: Path) -> None:
    with serving(tmp_path / "a.db"):
        done = subprocess.run(
            [sys.executable, "-m", "runtara", "serve", "--store", f"sqlite:///{tmp_path / 'a.db'}"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    assert done.returncode == 1
    assert "store_locked" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bad_option_ends_with_exit_code_two(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "runtara", "serve", "--store", "mysql://x", "--host", "0.0.0.0"],
        capture_output=True,
        text=True,
        timeout=20,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
