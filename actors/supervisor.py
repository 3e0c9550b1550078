"""Supervisors: tasks that start other tasks, restart them when they fail, and stop them in order.

Rules:

1. A child may start once every child before it is ready (has called `task_status.started`) or is out for
   good.
2. A child that ends is restarted or not by its `Restart` (see `should_restart`). A failure before it was
   ready is a failure like any other; so is an end before it was ready. Several exceptions at once are one
   failure.
3. ONE_FOR_ONE restarts the failed child. REST_FOR_ONE first stops the children after it, in reverse order,
   then starts it and them again, in order. A child that is stopped for a sibling's sake starts again unless
   it is TEMPORARY.
4. Restarts are counted for all children together. When one more is not allowed by the `Intensity`, the
   supervisor stops all children and raises `RestartIntensityExceeded`, caused by the last failure: its own
   supervisor decides.
5. Children are stopped one by one, in reverse order. Stopping is cancelling; a child that has not ended after
   its `shutdown_seconds` is reported in the log, and the next one is stopped. It cannot be killed: the
   supervisor waits for it before it ends itself or starts it again, so no task outlives its owner and no
   child runs twice at once.
6. A supervisor whose children are all out goes on until it is stopped.

How it works. Each incarnation runs in the supervisor's nursery inside a shielded cancel scope of its own, so
a cancellation from outside reaches the supervisor alone, which then stops the children in order (rule 5 is
the shield's deadline). The supervisor is one loop over the table of children: it looks for the first thing to
do, does it, and sleeps until an incarnation changes. It never waits for a child to become ready, because that
child may be waiting for an earlier one that has just failed.

The table, by `ChildState`:

    WAITING -> STARTING                    its turn has come (rule 1)
    STARTING -> RUNNING                    it called `started`
    STARTING, RUNNING -> STOPPING          the supervisor stops it
    STARTING, RUNNING, STOPPING -> ENDED   its task has ended
    ENDED -> WAITING                       it is to be started again
    ENDED -> OUT                           it is not
"""

import enum
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs
import trio

log = logging.getLogger("runtara.actors")


class Start(Protocol):
    """Runs one incarnation of a child: called anew for each, so that it begins with fresh state."""

    async def __call__(self, *, task_status: trio.TaskStatus[None]) -> None: ...


class Restart(enum.Enum):
    """When a child that ended is started again."""

    PERMANENT = "permanent"
    """Always."""
    TRANSIENT = "transient"
    """When it failed."""
    TEMPORARY = "temporary"
    """Never."""


class Strategy(enum.Enum):
    """Which children are started again when one fails."""

    ONE_FOR_ONE = "one_for_one"
    """That child."""
    REST_FOR_ONE = "rest_for_one"
    """That child and those after it."""


class ChildState(enum.Enum):
    """Where a child is; the transitions are in the head of the module."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"
    OUT = "out"


ALIVE = frozenset({ChildState.STARTING, ChildState.RUNNING, ChildState.STOPPING})
"""The states in which a child has a task."""


@attrs.frozen(kw_only=True)
class Intensity:
    """How many restarts within which time are normal."""

    restarts: int = attrs.field(default=3, validator=attrs.validators.ge(0))
    """Allowed within any `seconds`; one more is too many. 0 means that the first failure escalates."""
    seconds: float = attrs.field(default=5.0, validator=attrs.validators.gt(0))
    """The length of the window."""


@attrs.frozen
class ChildSpec:
    """A child as data."""

    name: str
    """Unique within its supervisor; for logs, `kill` and statistics."""
    start: Start
    """Runs one incarnation, until it is cancelled, fails, or has nothing left to do."""
    restart: Restart = attrs.field(default=Restart.PERMANENT, kw_only=True)
    """What its end means."""
    shutdown_seconds: float = attrs.field(default=5.0, kw_only=True, validator=attrs.validators.ge(0))
    """How long it may take to end once cancelled; `math.inf` for a supervisor, which keeps its own time."""


@attrs.frozen(kw_only=True)
class ChildStatistics:
    """A child at one moment."""

    name: str
    state: ChildState
    restarts: int
    """How many times it was started again in this run of the supervisor."""


@attrs.frozen(kw_only=True)
class SupervisorStatistics:
    """A supervisor at one moment."""

    children: tuple[ChildStatistics, ...]
    """In order of start."""


class RestartIntensityExceeded(Exception):
    """Children of the supervisor failed more often than its `Intensity` allows; the cause is the last
    failure.

    `supervisor` and `child` are the names of the supervisor and of the child that failed last.
    """

    def __init__(self, supervisor: str, child: str) -> None:
        super().__init__(supervisor, child)
        self.supervisor = supervisor
        self.child = child

    def __str__(self) -> str:
        return f"supervisor {self.supervisor} gives up: too many restarts, the last one of {self.child}"


class ChildKilled(Exception):
    """A child was ended by `Supervisor.kill`; the failure it counts as, when no other was given."""


class ChildNeverReady(Exception):
    """A child ended normally before it called `task_status.started`."""


def prune_history(history: tuple[float, ...], now: float, intensity: Intensity) -> tuple[float, ...]:
    """The restarts that still count: those at most `intensity.seconds` ago."""
    return tuple(moment for moment in history if now - moment <= intensity.seconds)


def restart_allowed(history: tuple[float, ...], now: float, intensity: Intensity) -> bool:
    """Whether one more restart may happen now.

    Args: history: the times of the earlier restarts, in seconds of the same clock as `now`, in any order.
    """
    return len(prune_history(history, now, intensity)) < intensity.restarts


def should_restart(restart: Restart, failed: bool) -> bool:
    """Whether a child that ended by itself is started again."""
    return restart is Restart.PERMANENT or (restart is Restart.TRANSIENT and failed)


@attrs.define(eq=False)
class Incarnation:
    """One life of a child, and the task status that it is given."""

    child: "Child"
    scope: trio.CancelScope = attrs.field(factory=lambda: trio.CancelScope(shield=True))
    ended: trio.Event = attrs.field(factory=trio.Event)
    ready: bool = False
    killed_by: Exception | None = None
    """What its end counts as, once it was killed."""
    error: Exception | None = None
    """Why it failed; None while it lives and when it ended well."""
    changed: Callable[[], None] = attrs.field(kw_only=True)

    def started(self, value: None = None) -> None:
        """Called by the child when it is ready."""
        if self.ready:
            raise RuntimeError(f"child {self.child.spec.name} called started twice")
        self.ready = True
        if self.child.state is ChildState.STARTING:
            self.child.state = ChildState.RUNNING
            self.changed()

    def verdict(self, raised: Exception | None) -> Exception | None:
        """The failure that the end of the task means, None if it ended well."""
        if raised is not None:
            return raised
        if self.killed_by is not None:
            return self.killed_by
        if not self.ready and self.child.state is ChildState.STARTING:
            return ChildNeverReady(f"child {self.child.spec.name} ended before it was ready")
        return None


@attrs.define(eq=False)
class Child:
    """A row of the supervisor's table."""

    spec: ChildSpec
    state: ChildState = ChildState.WAITING
    restarts: int = 0
    incarnation: Incarnation | None = None
    """The present or the last one; None before the first start."""

    @property
    def failed(self) -> bool:
        """Whether the last incarnation ended with a failure."""
        return self.incarnation is not None and self.incarnation.error is not None

    def rest(self) -> None:
        """After ending by itself: wait for the next start, or be out."""
        again = should_restart(self.spec.restart, self.failed)
        self.state = ChildState.WAITING if again else ChildState.OUT


class Supervisor:
    """Runs children as the rules above say. May itself be a child: give `ChildSpec` its `run`.

    Args:
        children: in order of start; names are unique.
        name: for logs.
        intensity: how many restarts are normal, of all children together.
        on_failure: called with the child's name and its failure, once per failure, before anything is done
            about it; must not raise, otherwise the supervisor stops and raises that.
    """

    def __init__(
        self,
        children: Sequence[ChildSpec],
        *,
        name: str = "supervisor",
        strategy: Strategy = Strategy.ONE_FOR_ONE,
        intensity: Intensity = Intensity(),
        on_failure: Callable[[str, Exception], None] | None = None,
    ) -> None:
        if len({spec.name for spec in children}) != len(children):
            raise ValueError(f"supervisor {name} has two children of one name")
        self.name = name
        self._specs = tuple(children)
        self._strategy = strategy
        self._intensity = intensity
        self._on_failure = on_failure
        self._prepare()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Start the children, and look after them until stopped; "started" when all of them are ready.

        May be run again after it has ended, from a clean table.

        Returns: after `stop`, when all children have ended. Raises: `RestartIntensityExceeded`.
        Cancellation: children are stopped in order first (rule 5).
        """
        self._prepare()
        escalation: RestartIntensityExceeded | None = None
        async with trio.open_nursery() as nursery:
            try:
                with self._scope:
                    escalation = await self._supervise(nursery, task_status)
            finally:
                await self._stop_all()
        if escalation is not None:
            raise escalation

    def stop(self) -> None:
        """Ask a running supervisor to stop its children and return from `run`. Otherwise without effect."""
        self._scope.cancel()

    def kill(self, name: str, error: Exception | None = None) -> bool:
        """Inject a fault: cancel the named child, and count its end as the given failure (else
        `ChildKilled`).

        Returns: whether the child had a task to kill. Raises: KeyError if there is no child of that name.
        """
        child = self._child(name)
        if child.incarnation is None or child.state not in ALIVE:
            return False
        child.incarnation.killed_by = error or ChildKilled(f"child {name} was killed")
        child.incarnation.scope.cancel()
        return True

    def statistics(self) -> SupervisorStatistics:
        """The table of children now."""
        return SupervisorStatistics(
            children=tuple(
                ChildStatistics(name=child.spec.name, state=child.state, restarts=child.restarts)
                for child in self._children
            )
        )

    def _prepare(self) -> None:
        self._scope = trio.CancelScope()
        self._changed = trio.Event()
        self._history: tuple[float, ...] = ()
        self._children = [Child(spec) for spec in self._specs]

    def _child(self, name: str) -> Child:
        for child in self._children:
            if child.spec.name == name:
                return child
        raise KeyError(name)

    # -- the loop

    async def _supervise(
        self, nursery: trio.Nursery, task_status: trio.TaskStatus[None]
    ) -> RestartIntensityExceeded | None:
        announced = False
        while True:
            self._changed = trio.Event()
            ended = self._first(ChildState.ENDED)
            if ended is not None:
                escalation = await self._settle(ended)
                if escalation is not None:
                    return escalation
                continue
            self._start_next(nursery)
            if not announced and self._all_ready():
                announced = True
                task_status.started()
            await self._changed.wait()

    def _first(self, state: ChildState) -> Child | None:
        return next((child for child in self._children if child.state is state), None)

    def _all_ready(self) -> bool:
        return all(child.state in (ChildState.RUNNING, ChildState.OUT) for child in self._children)

    def _start_next(self, nursery: trio.Nursery) -> None:
        """Start the first child that is not ready, if it has no task yet."""
        for child in self._children:
            if child.state is ChildState.WAITING:
                self._start(nursery, child)
            if child.state not in (ChildState.RUNNING, ChildState.OUT):
                return

    def _start(self, nursery: trio.Nursery, child: Child) -> None:
        if child.incarnation is not None:
            child.restarts += 1
        child.incarnation = Incarnation(child, changed=lambda: self._changed.set())
        child.state = ChildState.STARTING
        nursery.start_soon(self._live, child, child.incarnation, name=f"{self.name}/{child.spec.name}")

    async def _live(self, child: Child, incarnation: Incarnation) -> None:
        """The task of one incarnation. What is not an `Exception` (KeyboardInterrupt) ends the supervisor."""
        raised: Exception | None = None
        try:
            with incarnation.scope:
                await child.spec.start(task_status=incarnation)
        except Exception as error:
            raised = error
        except BaseException:
            child.state = (
                ChildState.OUT
            )  # not ENDED, or the loop might start it again before the nursery stops
            incarnation.ended.set()
            raise
        incarnation.error = incarnation.verdict(raised)
        child.state = ChildState.ENDED
        incarnation.ended.set()
        self._changed.set()
        if incarnation.error is not None:
            self._report(child.spec.name, incarnation.error)

    def _report(self, name: str, error: Exception) -> None:
        log.error("%s: child %s failed", self.name, name, exc_info=error)
        if self._on_failure is not None:
            self._on_failure(name, error)

    # -- after an end

    async def _settle(self, child: Child) -> RestartIntensityExceeded | None:
        """Decide what the end of a child means. Returns the escalation, if it is one."""
        child.rest()
        if child.state is ChildState.OUT:
            return None
        now = trio.current_time()
        if not restart_allowed(self._history, now, self._intensity):
            return self._escalation(child)
        self._history = (*prune_history(self._history, now, self._intensity), now)
        if self._strategy is Strategy.REST_FOR_ONE:
            await self._set_back_after(child)
        return None

    def _escalation(self, child: Child) -> RestartIntensityExceeded:
        escalation = RestartIntensityExceeded(self.name, child.spec.name)
        escalation.__cause__ = None if child.incarnation is None else child.incarnation.error
        return escalation

    async def _set_back_after(self, child: Child) -> None:
        """Stop the children after this one, in reverse order, and let them wait for their turn."""
        position = self._children.index(child)
        for later in reversed(self._children[position + 1 :]):
            if later.state is ChildState.ENDED:
                later.rest()
            elif later.state in ALIVE:
                await self._stop_to_the_end(later)
                temporary = later.spec.restart is Restart.TEMPORARY
                later.state = ChildState.OUT if temporary else ChildState.WAITING

    # -- stopping

    async def _stop_all(self) -> None:
        with trio.CancelScope(shield=True):  # each child's shutdown_seconds is the deadline
            for child in reversed(self._children):
                await self._stop(child)

    async def _stop_to_the_end(self, child: Child) -> None:
        await self._stop(child)
        if child.incarnation is not None:
            await child.incarnation.ended.wait()

    async def _stop(self, child: Child) -> None:
        """Cancel the child and wait, at most for its `shutdown_seconds`."""
        if child.incarnation is None or child.state not in ALIVE:
            return
        child.state = ChildState.STOPPING
        child.incarnation.scope.cancel()
        with trio.move_on_after(child.spec.shutdown_seconds):
            await child.incarnation.ended.wait()
        if not child.incarnation.ended.is_set():
            log.error(
                "%s: child %s has not ended %s seconds after it was cancelled; waiting for it",
                self.name,
                child.spec.name,
                child.spec.shutdown_seconds,
            )
