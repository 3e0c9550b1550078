"""The parent of the demo: starts the child, kills it, starts it again, and in the end compares.

Only the child writes to the store. The parent opens it when the last child has ended.
"""

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

import attrs
import trio
from rich.console import Console

import runtara
from runtara.cli.demo_child import LOG_NAME, STORE_NAME
from runtara.cli.demo_log import Entry, LogReader
from runtara.cli.demo_plan import Plan
from runtara.cli.demo_screen import Screen, report, verdict
from runtara.cli.demo_verify import Stored, StoredSignal, numbers, violations
from runtara.randomness import Randomness, SystemRandomness

ERRORS_NAME: Final = "child.err"
LOOK_SECONDS: Final = 0.05
START_SECONDS: Final = 15.0
"""How long a child may take to open the store."""
INTERRUPTED: Final = 130


T = TypeVar("T")


class DemoFailed(Exception):
    """The demo cannot go on; the text says why."""


def run_demo(*, kills: int, instances: int, seconds: float, keep: bool) -> int:
    """Run the demo; returns the exit code: 0 verified, 1 not, 130 interrupted.

    The folder is removed, unless ``keep`` says so or there is a violation to look into.
    """
    console = Console(highlight=False)
    plan = Plan(instances=instances, seconds=seconds)
    folder = Path(tempfile.mkdtemp(prefix="runtara-demo-"))
    wrong: tuple[str, ...] | None = None
    try:
        wrong = trio.run(until_interrupted, Demo(plan, kills, folder, console).run)
    except DemoFailed as failure:
        wrong = (str(failure),)
    except KeyboardInterrupt:  # before or after the part that listens for it
        pass
    finally:
        clean_up(folder, keep or bool(wrong), console)
    if wrong is None:
        console.print("interrupted; the child was killed" + ("" if keep else ", and nothing is left behind"))
        return INTERRUPTED
    verdict(console, wrong)
    return 1 if wrong else 0


async def until_interrupted(run: Callable[[], Awaitable[T]]) -> T | None:
    """What ``run`` returns, or None if SIGINT or SIGTERM came first: then it is cancelled where it waits."""
    result: T | None = None
    failure: DemoFailed | None = None
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:

            async def listen() -> None:
                async for _ in signals:
                    nursery.cancel_scope.cancel()

            nursery.start_soon(listen)
            try:
                result = await run()
            except DemoFailed as error:
                failure = error
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return result


def clean_up(folder: Path, keep: bool, console: Console) -> None:
    if keep:
        console.print(f"kept: {folder}", soft_wrap=True, markup=False)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def lifetimes(kills: int, seconds: float, randomness: Randomness) -> list[float]:
    """How long each child works before it is killed: ``kills`` random moments within ``seconds``."""
    moments = sorted(seconds * randomness.fraction() for _ in range(kills))
    return [later - earlier for earlier, later in zip([0.0, *moments], moments, strict=False)]


@attrs.define
class Demo:
    """One demo."""

    plan: Plan
    kills: int
    folder: Path
    console: Console
    entries: list[Entry] = attrs.field(factory=list)
    reader: LogReader = attrs.field(init=False)
    screen: Screen = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.reader = LogReader(self.folder / LOG_NAME)
        self.screen = Screen(self.console, self.plan)

    @property
    def patience_seconds(self) -> float:
        """How long the last child may take; whatever is stuck then is reported as not completed."""
        return 2 * self.plan.seconds + 10.0

    async def run(self) -> tuple[str, ...]:
        """The demo; returns the violations.

        Raises:
            DemoFailed: A child ended by itself, or the store cannot be read.

        Cancellation: The child is killed.
        """
        began = trio.current_time()
        with self.screen:
            self.screen.say(
                f"{self.plan.instances} runs on one SQLite file; the process that carries them out "
                f"is killed with SIGKILL again and again (kills: {self.kills})"
            )
            for life, seconds in enumerate(
                lifetimes(self.kills, self.plan.kill_seconds, SystemRandomness()), 1
            ):
                await self.live_and_die(life, seconds)
            await self.live_to_the_end(self.kills + 1)
        stored = await self.read_store()
        found = numbers(self.entries, stored)
        seconds = trio.current_time() - began
        report(
            self.console,
            found,
            instances=self.plan.instances,
            kills=self.screen.progress.kills,
            seconds=seconds,
        )
        return violations(self.plan, self.entries, stored)

    # ------------------------------------------------------------ the child

    async def live_and_die(self, life: int, seconds: float) -> None:
        """Start a child and kill it ``seconds`` after it has begun to work."""
        child = await self.start(life)
        try:
            await self.follow(child, seconds, lambda: False)
        finally:
            await kill(child)
        if child.returncode != -9:
            raise DemoFailed(self.obituary(life, child))
        self.screen.progress.kills += 1
        self.look()
        self.screen.say(f"killed child {life} after {seconds:.2f} s: {self.screen.progress.summary}")

    async def live_to_the_end(self, life: int) -> None:
        """Start a child and let it finish."""
        child = await self.start(life)
        try:
            await self.follow(child, self.patience_seconds, lambda: child.poll() is not None)
        finally:
            await kill(child)
        self.look()
        if child.returncode not in (0, -9):
            raise DemoFailed(self.obituary(life, child))
        self.screen.say(f"child {life} has ended: {self.screen.progress.summary}")

    async def start(self, life: int) -> trio.Process:
        """Start a child; returns when it works."""
        command = [sys.executable, "-P", "-m", "runtara.cli.demo_child"]
        arguments = [self.folder, self.plan.instances, self.plan.seconds, life]
        with (self.folder / ERRORS_NAME).open("ab") as errors:
            child = await trio.lowlevel.open_process(
                [*command, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is for the parent alone, which kills the child
            )
        try:
            self.screen.say(f"started child {life}, process {child.pid}")
            await self.follow(child, START_SECONDS, lambda: self.screen.progress.life == life)
            if self.screen.progress.life != life:
                raise DemoFailed(self.obituary(life, child))
        except BaseException:
            await kill(child)
            raise
        return child

    def obituary(self, life: int, child: trio.Process) -> str:
        code = child.poll()
        if code is None:
            return f"child {life} did not open the store within {START_SECONDS:.0f} s"
        lines = (self.folder / ERRORS_NAME).read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        return f"child {life} ended by itself with code {code}: {last}"

    async def follow(self, child: trio.Process, seconds: float, enough: Callable[[], bool]) -> None:
        """Show what happens, for ``seconds``, or until it is ``enough`` or the child has ended."""
        with trio.move_on_after(seconds):
            while not enough() and child.poll() is None:
                self.look()
                await trio.sleep(LOOK_SECONDS)
        self.look()

    def look(self) -> None:
        """Read what the side-effect log has to say."""
        try:
            new = self.reader.read_new()
        except ValueError as error:
            raise DemoFailed(str(error)) from None
        self.entries += new
        self.screen.progress.add(new)
        self.screen.refresh()

    # ------------------------------------------------------------ the store

    async def read_store(self) -> list[Stored]:
        """Every order, as the store has it. Raises `DemoFailed`."""
        try:
            async with runtara.open_runtime(f"sqlite:///{self.folder / STORE_NAME}") as runtime:
                return [await read_order(runtime, view.instance_id) for view in await all_instances(runtime)]
        except runtara.RuntaraError as error:
            raise DemoFailed(f"the store cannot be read: {error}") from error


async def kill(child: trio.Process) -> None:
    """SIGKILL, and wait until it is gone."""
    child.kill()
    with trio.CancelScope(shield=True):
        await child.wait()
    if child.stdin is not None:
        await trio.aclose_forcefully(child.stdin)


async def all_instances(runtime: runtara.Runtime) -> list[runtara.InstanceRecord]:
    found: list[runtara.InstanceRecord] = []
    page = await runtime.list_instances(descending=False)
    found += page.items
    while page.next is not None:
        page = await runtime.list_instances(descending=False, cursor=page.next)
        found += page.items
    return found


async def read_order(runtime: runtara.Runtime, instance_id: str) -> Stored:
    view = await runtime.get(instance_id)
    checkpoints: list[runtara.CheckpointRecord] = []
    signals: list[runtara.SignalRecord] = []
    cursor = None
    while True:
        some = await runtime.list_checkpoints(instance_id, cursor=cursor)
        checkpoints += some.items
        if (cursor := some.next) is None:
            break
    while True:
        more = await runtime.list_signals(instance_id, cursor=cursor)
        signals += more.items
        if (cursor := more.next) is None:
            break
    return Stored(
        instance_id=instance_id,
        status=view.status.word,
        output=view.output,
        checkpoints=tuple((record.checkpoint_id, record.state) for record in checkpoints),
        signals=tuple(
            StoredSignal(payload=record.payload, consumed=record.acknowledged_us is not None)
            for record in signals
        ),
    )
