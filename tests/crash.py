"""Kill a real writer process again and again, and hold the store to every word that it said.

    python -m tests.crash --kills 2000

A warm parent forks the writer (`tests.crash_load`): a runtime on a file with threads and FULL, many instances
and an operator. At a random moment it is killed with SIGKILL: while it works, while it opens a new file or an
old one, or while it drains and closes. Then the parent opens the file with `open_runtime`, holds it against
every acknowledgement (`tests.crash_check`), and goes on with one of its instances; now and then it does not
look at all, and the next writer finds what the kill left. Each file lives for some kills, then a new one
begins; an old file is checked as a whole at its end.

What this proves is the order of commit and answer. It does not prove the fsync: what a killed process has
written stays in the page cache. (That is what the recorded power losses are for.)

The exit status is 0 if nothing was lost and nothing contradicts.
"""

import contextlib
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Final

import attrs
import click
import trio

import runtara
from runtara.actors.persistence import PersistenceActor, Work
from runtara.persistence.store import Unit
from runtara.records import AcknowledgeSignal
from tests import crash_check
from tests.crash_ledger import Ack, Key, Kind, Ledger, Value, digest, read_acks
from tests.crash_load import Life, run_life

KILLS_PER_FILE: Final = 40
SHOWN: Final = 10


class Moment(Enum):
    """When a writer is killed."""

    WORKING = "at work"
    OPENING = "opening"
    CLOSING = "closing"


@attrs.define
class Tally:
    """What happened so far."""

    kills: dict[Moment, int] = attrs.Factory(lambda: dict.fromkeys(Moment, 0))
    ended: int = 0
    """Writers that closed before they were killed."""
    files: int = 0
    acks: int = 0
    unacknowledged: int = 0
    lost: list[str] = attrs.Factory(list)
    faults: list[str] = attrs.Factory(list)
    reopened: list[float] = attrs.Factory(list)
    """Seconds until `open_runtime` gave a runtime."""
    checks: int = 0

    @property
    def killed(self) -> int:
        return sum(self.kills.values())


# ---------------------------------------------------------------- planted bugs


def answer_before_commit() -> None:
    """The bug that this test exists for: the answer leaves before the change is on disk."""
    submit = PersistenceActor.submit

    def hasty(self: PersistenceActor, work: Work) -> None:
        for future, reply in work.replies:
            if isinstance(reply, runtara.RuntaraError):
                future.fail(reply)
            else:
                future.set(reply)
        submit(self, work)

    PersistenceActor.submit = hasty  # type: ignore[method-assign]


def forget_consumption() -> None:
    """A wait records its signal, and the signal stays pending: it will be consumed again."""
    submit = PersistenceActor.submit

    def forgetful(self: PersistenceActor, work: Work) -> None:
        unit = work.unit
        ops = tuple(op for op in unit.ops if type(op) is not AcknowledgeSignal)
        if ops:
            changes = {field.name: getattr(unit, field.name) for field in attrs.fields(Unit)}
            work.unit = Unit(**{**changes, "ops": ops})
        submit(self, work)

    PersistenceActor.submit = forgetful  # type: ignore[method-assign]


PLANTS: Final[dict[str, Callable[[], None]]] = {
    "answer-before-commit": answer_before_commit,
    "forget-consumption": forget_consumption,
}


# ---------------------------------------------------------------- one file


class File:
    """One database file, its ledger, and the kills that it goes through."""

    def __init__(
        self, folder: Path, number: int, rng: random.Random, tally: Tally, plant: str | None
    ) -> None:
        self.path = str(folder / f"{number}.db")
        self.url = f"sqlite:///{self.path}"
        self.rng = rng
        self.tally = tally
        self.plant = plant
        self.number = number
        self.ledger = Ledger()
        self.lives = 0
        self.unchecked: list[tuple[tuple[Kind, Key], Value]] = []

    def suffer(self, kills: int) -> None:
        """Be killed so often, be checked in between, and as a whole at the end."""
        self.tally.files += 1
        for at in range(kills):
            self.kill_once(Moment.OPENING if at == 0 else self.rng.choices(list(Moment), (14, 2, 3))[0])
            if at == kills - 1 or self.rng.random() < 0.8:
                trio.run(self.check, at == kills - 1 or at % 8 == 0)
        self.tally.acks += self.ledger.acks
        self.tally.faults += self.ledger.contradictions

    def kill_once(self, moment: Moment) -> None:
        """One life of the writer."""
        self.lives += 1
        working = self.rng.uniform(0.005, 0.06) if moment is Moment.CLOSING else 3600.0
        life = Life(
            path=self.path,
            acks=f"{self.path}-acks-{self.lives}",
            seed=self.rng.getrandbits(32),
            number=self.lives,
            seconds=working,
            drain_seconds=self.rng.choice((0.0, 0.01, 0.05)),
        )
        pid = fork(life, self.plant)
        delay = {
            Moment.OPENING: self.rng.uniform(0.0, 0.02),
            Moment.WORKING: self.rng.uniform(0.02, 0.15),
            Moment.CLOSING: working + self.rng.uniform(0.0, 0.06),
        }[moment]
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            self.tally.kills[moment] += 1
        else:
            self.tally.ended += 1
        for ack in read_acks(life.acks):
            self.take(ack)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(life.acks)

    def take(self, ack: Ack) -> None:
        self.ledger.add(ack)
        if ack.kind is not Kind.TROUBLE:
            self.unchecked.append(((ack.kind, ack.key), ack.value))

    # ------------------------------------------------------------ checking

    async def check(self, whole: bool) -> None:
        """Open the file as a restart does, compare, and go on with one of its instances."""
        self.tally.checks += 1
        begun = time.perf_counter()
        try:
            async with runtara.open_runtime(self.url, inline=True, drain_seconds=0.0) as runtime:
                self.tally.reopened.append(time.perf_counter() - begun)
                await self.compare(runtime, whole)
                await self.go_on(runtime)
        except runtara.RuntaraError as error:
            self.fault(f"after the kill: {error!r}")

    async def compare(self, runtime: runtara.Runtime, whole: bool) -> None:
        store = runtime.system.store
        connection = getattr(store, "reading").connection  # noqa: B009  # the contract has no SQL
        rows = crash_check.rows_of(connection)
        facts = list(self.ledger.facts.items()) if whole else self.unchecked
        self.unchecked = []
        self.tally.lost += [self.place(lost) for lost in crash_check.lost_facts(connection, rows, facts)]
        self.fault(*crash_check.row_faults(connection), *crash_check.signal_faults(connection))
        self.fault(*await crash_check.stuck(store, connection))
        if whole:
            self.fault(*crash_check.file_faults(connection), *crash_check.revision_faults(connection))
            self.tally.unacknowledged += self.newly_unacknowledged(
                crash_check.unacknowledged(connection, self.ledger)
            )

    seen_unacknowledged = 0

    def newly_unacknowledged(self, total: int) -> int:
        new, self.seen_unacknowledged = total - self.seen_unacknowledged, total
        return new

    async def go_on(self, runtime: runtara.Runtime) -> None:
        """The runtime after the kill works: an instance of before, or a new one, takes a checkpoint."""
        page = await runtime.list_instances(statuses=frozenset({runtara.Status.RUNNING}), limit=20)
        ids = [record.instance_id for record in page.items]
        instance_id = self.rng.choice(ids) if ids else f"m-after-{self.lives}"
        name, state = f"after-{self.lives}", f"{self.lives}".encode()
        async with runtime.register(instance_id) as instance:
            await instance.checkpoint(name, state)
        key = f"default/{instance_id}"
        self.take(Ack(Kind.SESSION, (instance.epoch,), (key,)))
        self.take(Ack(Kind.CHECKPOINT, (key, name), (digest(state),)))

    def fault(self, *faults: str) -> None:
        self.tally.faults += map(self.place, faults)

    def place(self, what: str) -> str:
        return f"file {self.number}, life {self.lives}: {what}"


def fork(life: Life, plant: str | None) -> int:
    """Start the writer; returns its pid. The child never comes back from here."""
    pid = os.fork()
    if pid == 0:
        try:
            if plant is not None:
                PLANTS[plant]()
            run_life(life)
        finally:
            os._exit(0)
    return pid


# ---------------------------------------------------------------- the run


def crash(kills: int, seed: int, folder: Path, plant: str | None, report: Callable[[Tally], None]) -> Tally:
    """Kill ``kills`` times in all."""
    rng, tally = random.Random(seed), Tally()
    while tally.killed < kills and not (plant and tally.lost and tally.files > 3):
        File(folder, tally.files + 1, rng, tally, plant).suffer(min(KILLS_PER_FILE, kills - tally.killed))
        for file in folder.iterdir():
            file.unlink()
        report(tally)
    return tally


def lines(tally: Tally, seconds: float) -> Iterator[str]:
    moments = ", ".join(f"{count} {moment.value}" for moment, count in tally.kills.items())
    yield f"kills            {tally.killed} ({moments}), {60 * tally.killed / seconds:.0f} per minute"
    yield f"closed before    {tally.ended}"
    yield f"files            {tally.files}, checked {tally.checks} times"
    yield f"acknowledgements {tally.acks}"
    yield f"unacknowledged   {tally.unacknowledged} changes were on disk although nobody was told"
    yield f"lost             {len(tally.lost)}"
    yield f"other faults     {len(tally.faults)}"
    if tally.reopened:
        median, longest = statistics.median(tally.reopened), max(tally.reopened)
        yield f"reopened in      {1000 * median:.1f} ms (median), {1000 * longest:.1f} ms (longest)"
    for fault in [*tally.lost[:SHOWN], *tally.faults[:SHOWN]]:
        yield f"  ! {fault}"


@click.command()
@click.option("--kills", default=200, show_default=True, help="How often to kill.")
@click.option("--seed", default=1, show_default=True, help="Of the moments and of the load.")
@click.option("--plant", type=click.Choice(list(PLANTS)), help="A bug that the test must find.")
def main(kills: int, seed: int, plant: str | None) -> None:
    """Kill a writer process, over and over, and check what it acknowledged."""
    begun = time.perf_counter()

    def report(tally: Tally) -> None:
        if tally.files % 10 == 0:
            click.echo(f"{tally.killed} kills, {tally.acks} acks, {len(tally.lost)} lost", err=True)

    with tempfile.TemporaryDirectory(prefix="runtara-crash-") as folder:
        tally = crash(kills, seed, Path(folder), plant, report)
    for line in lines(tally, time.perf_counter() - begun):
        click.echo(line)
    sys.exit(1 if tally.lost or tally.faults else 0)


if __name__ == "__main__":
    main()
