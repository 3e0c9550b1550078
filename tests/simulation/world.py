"""One world: a store, the lives of a runtime on it, one after the other, and those who use and break it.

A life ends when the trouble says so (a crash or a drain), when the runtime stops by itself, or when all work
is done. A *crash* first kills the store under the runtime, then cancels everything: ``finally`` blocks run,
but nothing that they do has an effect, and nothing that they hear is believed.
"""

import logging
import random
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import attrs
import trio

from runtara.actors.instance import state_of
from runtara.actors.supervisor import ChildKilled, RestartIntensityExceeded
from runtara.errors import RuntaraError, RuntimeFault, StoreError, StoreFailed
from runtara.executor import InlineExecutor
from runtara.machine.liveness import Mover, reason_to_move
from runtara.persistence.sqlite import SqliteStore, open_sqlite
from runtara.randomness import SeededRandomness
from runtara.runtime import run_runtime
from runtara.tenant import Runtime
from runtara.testing.faulty import FaultyStore, Rates, SeededFaults
from tests.simulation import snapshots
from tests.simulation.callers import Feeder, Operator, Peacemaker, Waiter, Watcher, Worker
from tests.simulation.chaos import Chaos
from tests.simulation.clock import InjectedFault, JumpingClock
from tests.simulation.determinism import Trace
from tests.simulation.history import History
from tests.simulation.options import Kind, Options
from tests.simulation.programs import Do, Ending, Program, write_program
from tests.simulation.snapshots import Snapshot

TENANT = "simulation"
SETTLING_SECONDS = 20.0
"""Between the end of all work and the last look at what is left."""
WAITS = (Do.WAIT, Do.WAIT_OR_GIVE_UP, Do.BOTH)


class Stuck(AssertionError):
    """Work did not end."""


@attrs.frozen(kw_only=True)
class Evidence:
    """All that the checks look at."""

    options: Options
    history: History
    snapshots: list[Snapshot]
    refused_units: int
    injected: Counter[str]
    lives: int
    calm_us: int
    """When the trouble was over for good, by the wall clock."""


class LogReader(logging.Handler):
    """Reads the runtime's log: a logged exception that nobody injected is a bug."""

    def __init__(self, history: History) -> None:
        super().__init__(logging.WARNING)
        self.history = history

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not all(isinstance(e, InjectedFault | ChildKilled) for e in leaves(error)):
            self.history.bugs.append(f"P11: {record.getMessage()}: {type(error).__name__}: {error}")


def leaves(error: BaseException) -> list[BaseException]:
    """The single exceptions of a group of groups; behind a supervisor that gives up, its reason."""
    if isinstance(error, RestartIntensityExceeded) and error.__cause__ is not None:
        return leaves(error.__cause__)
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


@contextmanager
def log_read(history: History) -> Iterator[None]:
    logger = logging.getLogger("runtara")
    handler, propagate, level = LogReader(history), logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        logger.setLevel(level)


class World:
    """See the module's docstring; also the `callers.Stage`."""

    runtime: Runtime

    def __init__(self, options: Options, trace: Trace) -> None:
        self.options = options
        self.clock = JumpingClock()
        self.history = History(self.clock, trace)
        dice = random.Random(f"programs {options.seed}")
        self.programs = [write_program(dice, n, options.steps) for n in range(options.instances)]
        self.names = [program.instance for program in self.programs]
        self.ending = trio.current_time() + options.horizon
        self.finished: set[str] = set()
        self.fed: set[str] = set()
        self.meals = {
            f"{program.instance} {name}": (program.instance, key, name)
            for program in self.programs
            for key, name in meals(program)
        }
        self.snapshots: list[Snapshot] = []
        self.injected: Counter[str] = Counter()
        self.refused_units = 0
        self.calm = False
        self.calm_us = 0
        self.overtakers = 0
        self.dice = random.Random(f"world {options.seed}")

    # ------------------------------------------------------------ lives

    async def run(self) -> Evidence:
        """Live until all work is done. Raises `Stuck`."""
        with log_read(self.history), tempfile.TemporaryDirectory(prefix="runtara-simulation-") as folder:
            async with self.open_base(Path(folder) / "store.db", kept=not self.options.file) as kept:
                over = False
                while not over:
                    async with self.open_base(Path(folder) / "store.db", kept=True, store=kept) as base:
                        assert base is not None
                        over = await self.live(base)
                        await self.look(base)
        return Evidence(
            options=self.options,
            history=self.history,
            snapshots=self.snapshots,
            refused_units=self.refused_units,
            injected=self.injected,
            lives=self.history.life,
            calm_us=self.calm_us,
        )

    @asynccontextmanager
    async def open_base(
        self, path: Path, *, kept: bool, store: SqliteStore | None = None
    ) -> AsyncIterator[SqliteStore | None]:
        """The real store: one in memory for all lives, or the file for one of them."""
        if not kept or store is not None:
            yield store
            return
        where = str(path) if self.options.file else ":memory:"
        executor = InlineExecutor()
        async with open_sqlite(where, synchronous="OFF", writer=executor, reader=executor) as opened:
            yield opened

    async def look(self, base: SqliteStore) -> None:
        """See what is in the store between two lives."""
        self.snapshots.append(
            await snapshots.read(base, self.history.next_tick(), self.history.life, self.clock.look())
        )

    async def live(self, base: SqliteStore) -> bool:
        """One life of the runtime. Whether all work is done."""
        options, life = self.options, self.history.life
        rates = Rates() if self.calm else options.rates
        store = FaultyStore(base, SeededFaults(f"store {options.seed} {life}", rates))
        randomness = SeededRandomness(options.seed * 1000 + life)
        over = False
        self.history.note(f"life {life} begins")
        try:
            async with trio.open_nursery() as callers:
                try:
                    async with run_runtime(
                        store, self.clock, options.settings, randomness, TENANT
                    ) as self.runtime:
                        over = await self.until_the_end(store, callers)
                        if store.dead:
                            callers.cancel_scope.cancel()
                except (StoreError, RuntimeFault) as error:
                    self.accept_end(error, store)
                    over = False
                callers.cancel_scope.cancel()
        finally:
            self.history.note(f"life {life} is over")
            self.history.end_life()
            self.injected += store.injected
            self.refused_units += len(store.refused)
        if not store.dead and not over:
            await trio.sleep(0.1)
        return over

    def accept_end(self, error: RuntaraError, store: FaultyStore) -> None:
        """The runtime stopped by itself: was there a reason?"""
        self.history.note(f"the runtime stopped: {type(error).__name__}: {error}")
        if isinstance(error, StoreFailed) and (store.dead or store.injected["store_unavailable"]):
            return  # a commit that nobody could settle
        if isinstance(error, StoreFailed) and store.injected["outage"]:
            return
        if isinstance(error, StoreError) and error.retryable:
            return  # the store did not answer when the runtime began
        if self.injected_trouble(store):
            return
        self.history.bugs.append(f"the runtime stopped for no reason: {error}")

    def injected_trouble(self, store: FaultyStore) -> bool:
        return store.injected[Kind.KILL_TREE.value] + store.injected[Kind.HANDLER.value] > 0

    async def until_the_end(self, store: FaultyStore, callers: trio.Nursery) -> bool:
        """Start everybody, do harm, then let the work end. Whether it has."""
        self.start_callers(callers)
        if not self.calm:
            async with trio.open_nursery() as nursery:
                self.start_operators(nursery)
                end = await self.chaos(store, callers).run(self.names, self.ending)
                nursery.cancel_scope.cancel()
            if end is not None:
                self.history.note(f"fault: {end.value}")
                store.injected[end.value] += 1
            if end is Kind.CRASH:
                store.kill()
                self.history.end_life()
            if end is not None:
                return False
            self.calm = True
            self.calm_us = self.clock.look()
            self.history.note("the trouble is over")
        self.clock.readers_fail = 0
        assert isinstance(store.faults, SeededFaults)
        store.faults.rates = Rates()
        await self.finish_work(callers)
        return True

    # ------------------------------------------------------------ who lives

    def start_callers(self, nursery: trio.Nursery) -> None:
        for program in self.programs:
            name = program.instance
            if name not in self.finished:
                nursery.start_soon(Worker(self, program, f"worker {name}").run, name=f"worker {name}")
            if self.dice.random() < 0.5:
                nursery.start_soon(Watcher(self, f"watcher {name}").run, name, name=f"watcher {name}")
            if program.ending is not Ending.ABANDON:
                nursery.start_soon(Waiter(self, f"waiter {name}").run, name, name=f"waiter {name}")
        for meal, (instance, key, name) in self.meals.items():
            if meal not in self.fed:
                feeder = Feeder(self, f"feeder {meal}")
                nursery.start_soon(feeder.run, instance, key, name, name=f"feeder {meal}")

    def start_operators(self, nursery: trio.Nursery) -> None:
        for number in range(2):
            operator = Operator(self, f"operator {number}")
            nursery.start_soon(operator.run, self.names, name=f"operator {number}")

    def chaos(self, store: FaultyStore, callers: trio.Nursery) -> Chaos:
        def take_over(instance: str) -> None:
            program = next(p for p in self.programs if p.instance == instance)
            self.overtakers += 1
            worker = Worker(self, program, f"overtaker {self.overtakers}")

            async def once() -> None:
                await worker.run(once=True)

            callers.start_soon(once, name=worker.who)

        return Chaos(self.options, self.history, self.clock, self.runtime, store, take_over)

    # ------------------------------------------------------------ the end

    async def finish_work(self, callers: trio.Nursery) -> None:
        """Wait until all work is done, and look whether anything is left over. Raises `Stuck`."""
        async with trio.open_nursery() as nursery:
            peacemaker = Peacemaker(self, "peacemaker")
            nursery.start_soon(peacemaker.run, self.names, name="peacemaker")
            await self.until(lambda: not self.unfinished())
            nursery.cancel_scope.cancel()
        if self.unfinished():
            raise Stuck(f"liveness: after {self.options.patience} s unfinished: {self.unfinished()}")
        await self.until(lambda: not waiters(callers))
        if waiters(callers):
            raise Stuck(f"liveness: they wait for results that are there: {waiters(callers)}")
        await trio.sleep(SETTLING_SECONDS)
        await self.look_for_leftovers()

    async def until(self, done: Callable[[], bool]) -> None:
        """Wait until something is done, with bounded patience."""
        with trio.move_on_after(self.options.patience):
            while not done():  # noqa: ASYNC110  # it depends on many tasks
                await trio.sleep(0.5)

    def unfinished(self) -> list[str]:
        return [
            *(n for n in self.names if n not in self.finished),
            *(m for m in self.meals if m not in self.fed),
        ]

    async def look_for_leftovers(self) -> None:
        """Nothing is held, nothing is stuck in silence (P10), no deadline was slept through."""
        system = self.runtime.system
        statistics = system.statistics()
        bugs, now_us = self.history.bugs, self.clock.look()
        if statistics.budget_used:
            bugs.append(f"P8: {statistics.budget_used} bytes of the budget are never given back")
        if statistics.writer.queued:
            bugs.append(f"P8: {statistics.writer.queued} units are left in the queue")
        sessions = [key for key, _ in system.directory.sessions()]
        if sessions:
            bugs.append(f"P10: sessions that nobody has: {sessions}")
        for name in self.names:
            loaded = await system.store.load(TENANT, name, 1)
            if loaded is None:
                continue
            state = state_of(loaded, None)
            mover = reason_to_move(state)
            if mover is None or mover is Mover.OWNER:
                bugs.append(f"P10: nothing moves {name}: {state.row}")
            due_us = state.row.due_us
            if due_us is not None and due_us < now_us - SETTLING_SECONDS / 2 * 1e6:
                bugs.append(f"P10: {name} slept through its deadline {due_us}, it is {now_us}: {state.row}")


def waiters(callers: trio.Nursery) -> list[str]:
    return sorted(task.name for task in callers.child_tasks if task.name.startswith("waiter"))


def meals(program: Program) -> list[tuple[str, str]]:
    """(key, name) of the signals that a program needs."""
    return [(step.key, f"feed {step.name}") for step in program.steps if step.do in WAITS]
