"""Supervisors of the kit: order of starts and stops, restarts, escalation, what stopping leaves behind."""

import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from runtara.actors.supervisor import (
    ChildKilled,
    ChildNeverReady,
    ChildSpec,
    ChildState,
    ChildStatistics,
    Intensity,
    Restart,
    RestartIntensityExceeded,
    Strategy,
    Supervisor,
    prune_history,
    restart_allowed,
    should_restart,
)

PATIENT = Intensity(restarts=100)


class Troupe:
    """Children that note their starts and stops, and end when told to."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.failures: list[tuple[str, Exception]] = []
        self.fail_starts: dict[str, int] = {}
        self.hold_starts: dict[str, trio.Event] = {}
        self.deaf_seconds: dict[str, float] = {}
        self.exits: dict[str, trio.Event] = {}
        self.errors: dict[str, Exception | None] = {}

    def spec(
        self, name: str, *, restart: Restart = Restart.PERMANENT, shutdown_seconds: float = 5.0
    ) -> ChildSpec:
        async def start(*, task_status: trio.TaskStatus[None]) -> None:
            await self.perform(name, task_status)

        return ChildSpec(name, start, restart=restart, shutdown_seconds=shutdown_seconds)

    def specs(self, names: str) -> list[ChildSpec]:
        return [self.spec(name) for name in names]

    async def perform(self, name: str, task_status: trio.TaskStatus[None]) -> None:
        self.log.append(f"+{name}")
        self.exits[name] = trio.Event()
        try:
            await self.enter(name)
            task_status.started()
            self.log.append(f"={name}")
            await self.exits[name].wait()
            error = self.errors.pop(name, None)
            if error is not None:
                raise error
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(self.deaf_seconds.get(name, 0))
            self.log.append(f"-{name}")

    async def enter(self, name: str) -> None:
        if name in self.hold_starts:
            await self.hold_starts[name].wait()
        if self.fail_starts.get(name, 0) > 0:
            self.fail_starts[name] -= 1
            raise OSError(f"{name} cannot start")

    async def end(self, name: str, error: Exception | None = None) -> list[str]:
        """Let the child end, and return what happened in consequence."""
        seen = len(self.log)
        self.errors[name] = error
        self.exits[name].set()
        await wait_all_tasks_blocked()
        return self.log[seen:]

    def note(self, name: str, error: Exception) -> None:
        self.failures.append((name, error))

    def supervisor(
        self,
        children: list[ChildSpec],
        *,
        strategy: Strategy = Strategy.ONE_FOR_ONE,
        intensity: Intensity = PATIENT,
    ) -> Supervisor:
        return Supervisor(children, name="top", strategy=strategy, intensity=intensity, on_failure=self.note)


@pytest.fixture
def troupe() -> Troupe:
    return Troupe()


@asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[None]:
    """The supervisor, all ready; stopped at the end."""
    async with trio.open_nursery() as nursery:
        await nursery.start(supervisor.run)
        yield
        supervisor.stop()


def states(supervisor: Supervisor) -> dict[str, ChildState]:
    return {child.name: child.state for child in supervisor.statistics().children}


# -- pure


def test_a_child_is_restarted_by_the_table() -> None:
    table = [(restart, should_restart(restart, False), should_restart(restart, True)) for restart in Restart]
    assert table == [
        (Restart.PERMANENT, True, True),
        (Restart.TRANSIENT, False, True),
        (Restart.TEMPORARY, False, False),
    ]


HISTORIES = st.lists(st.floats(0, 100), max_size=12).map(lambda moments: tuple(sorted(moments)))
INTENSITIES = st.builds(Intensity, restarts=st.integers(0, 6), seconds=st.floats(0.1, 50))


@given(HISTORIES, st.floats(100, 200), INTENSITIES)
def test_pruning_changes_no_decision_now_or_later(
    history: tuple[float, ...], now: float, intensity: Intensity
) -> None:
    pruned = prune_history(history, now, intensity)
    assert set(pruned) <= set(history)
    assert prune_history(pruned, now, intensity) == pruned
    for later in (now, now + 1, now + 60):
        assert restart_allowed(pruned, later, intensity) == restart_allowed(history, later, intensity)


@given(HISTORIES, st.floats(100, 200), INTENSITIES)
def test_a_restart_is_allowed_while_fewer_than_the_limit_are_in_the_window(
    history: tuple[float, ...], now: float, intensity: Intensity
) -> None:
    within = sum(1 for moment in history if now - moment <= intensity.seconds)
    assert restart_allowed(history, now, intensity) == (within < intensity.restarts)


@given(st.lists(st.floats(0, 3), max_size=60), INTENSITIES)
def test_no_window_ever_holds_more_restarts_than_allowed(gaps: list[float], intensity: Intensity) -> None:
    now = 0.0
    granted: list[float] = []
    history: tuple[float, ...] = ()
    for gap in gaps:
        now += gap
        if restart_allowed(history, now, intensity):
            granted.append(now)
            history = (*prune_history(history, now, intensity), now)
    for first in granted:
        assert sum(1 for moment in granted if 0 <= moment - first <= intensity.seconds) <= intensity.restarts


def test_two_children_of_one_name_are_refused(troupe: Troupe) -> None:
    with pytest.raises(ValueError, match="two children of one name"):
        Supervisor(troupe.specs("aa"))


# -- start and stop


async def test_children_start_in_order_each_after_the_one_before_is_ready(troupe: Troupe) -> None:
    troupe.hold_starts["b"] = trio.Event()
    supervisor = troupe.supervisor(troupe.specs("abc"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await wait_all_tasks_blocked()
        assert troupe.log == ["+a", "=a", "+b"]
        assert states(supervisor) == {
            "a": ChildState.RUNNING,
            "b": ChildState.STARTING,
            "c": ChildState.WAITING,
        }
        troupe.hold_starts["b"].set()
        await wait_all_tasks_blocked()
        assert troupe.log == ["+a", "=a", "+b", "=b", "+c", "=c"]
        supervisor.stop()


async def test_the_supervisor_is_ready_when_all_children_are(troupe: Troupe) -> None:
    async with running(troupe.supervisor(troupe.specs("ab"))):
        assert troupe.log == ["+a", "=a", "+b", "=b"]


async def test_stop_ends_children_in_reverse_order_and_run_returns(troupe: Troupe) -> None:
    supervisor = troupe.supervisor(troupe.specs("abc"))
    async with running(supervisor):
        troupe.log.clear()
    assert troupe.log == ["-c", "-b", "-a"]
    assert troupe.failures == []
    assert set(states(supervisor).values()) == {ChildState.ENDED}


async def test_a_cancelled_supervisor_stops_in_reverse_order_and_stays_cancelled(
    troupe: Troupe, autojump_clock: MockClock
) -> None:
    troupe.deaf_seconds = {"a": 1, "b": 1, "c": 1}
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(troupe.supervisor(troupe.specs("abc")).run)
            troupe.log.clear()
            scope.cancel()
    assert scope.cancelled_caught
    assert troupe.log == ["-c", "-b", "-a"]
    assert trio.current_time() == pytest.approx(3)


async def test_a_supervisor_stopped_while_it_starts_stops_what_has_started(troupe: Troupe) -> None:
    troupe.hold_starts["b"] = trio.Event()
    supervisor = troupe.supervisor(troupe.specs("abc"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await wait_all_tasks_blocked()
        supervisor.stop()
    assert troupe.log == ["+a", "=a", "+b", "-b", "-a"]
    assert troupe.failures == []


async def test_a_child_deaf_past_its_deadline_is_reported_and_waited_for(
    troupe: Troupe, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    troupe.deaf_seconds["b"] = 10
    children = [troupe.spec("a"), troupe.spec("b", shutdown_seconds=2)]
    async with running(troupe.supervisor(children)):
        troupe.log.clear()
    assert troupe.log == ["-a", "-b"]
    assert trio.current_time() == pytest.approx(10)
    assert [record.getMessage() for record in caplog.records] == [
        "top: child b has not ended 2 seconds after it was cancelled; waiting for it"
    ]


async def test_a_supervisor_can_run_again_from_a_clean_table(troupe: Troupe) -> None:
    supervisor = troupe.supervisor(troupe.specs("a"), intensity=Intensity(restarts=1))
    for _ in range(2):
        async with running(supervisor):
            await troupe.end("a", ValueError("x"))
            assert supervisor.statistics().children == (
                ChildStatistics(name="a", state=ChildState.RUNNING, restarts=1),
            )


# -- restarts


async def test_one_for_one_restarts_the_failed_child_alone(troupe: Troupe) -> None:
    supervisor = troupe.supervisor(troupe.specs("abc"))
    async with running(supervisor):
        error = ValueError("x")
        assert await troupe.end("b", error) == ["-b", "+b", "=b"]
        assert troupe.failures == [("b", error)]
        assert [child.restarts for child in supervisor.statistics().children] == [0, 1, 0]


async def test_rest_for_one_stops_the_later_ones_in_reverse_and_starts_all_in_order(troupe: Troupe) -> None:
    supervisor = troupe.supervisor(troupe.specs("abcd"), strategy=Strategy.REST_FOR_ONE)
    async with running(supervisor):
        consequence = await troupe.end("b", ValueError("x"))
        assert consequence == ["-b", "-d", "-c", "+b", "=b", "+c", "=c", "+d", "=d"]
        assert [name for name, _ in troupe.failures] == ["b"]


async def test_rest_for_one_leaves_out_who_is_temporary_or_done(troupe: Troupe) -> None:
    children = [
        troupe.spec("a"),
        troupe.spec("b", restart=Restart.TEMPORARY),
        troupe.spec("c", restart=Restart.TRANSIENT),
        troupe.spec("d", restart=Restart.TRANSIENT),
    ]
    supervisor = troupe.supervisor(children, strategy=Strategy.REST_FOR_ONE)
    async with running(supervisor):
        await troupe.end("d")
        assert await troupe.end("a", ValueError("x")) == ["-a", "-c", "-b", "+a", "=a", "+c", "=c"]
        assert states(supervisor)["b"] is ChildState.OUT


async def test_rest_for_one_never_runs_a_deaf_child_twice_at_once(
    troupe: Troupe, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    troupe.deaf_seconds["b"] = 10
    children = [troupe.spec("a"), troupe.spec("b", shutdown_seconds=2)]
    async with running(troupe.supervisor(children, strategy=Strategy.REST_FOR_ONE)):
        troupe.log.clear()
        troupe.errors["a"] = ValueError("x")
        troupe.exits["a"].set()
        await trio.sleep(11)
        assert troupe.log == ["-a", "-b", "+a", "=a", "+b", "=b"]
        assert "has not ended 2 seconds" in caplog.records[-1].getMessage()


async def test_rest_for_one_takes_two_failures_at_once_as_one_restart_of_each(troupe: Troupe) -> None:
    supervisor = troupe.supervisor(troupe.specs("abc"), strategy=Strategy.REST_FOR_ONE)
    async with running(supervisor):
        troupe.log.clear()
        for name in "ab":
            troupe.errors[name] = ValueError(name)
            troupe.exits[name].set()
        await wait_all_tasks_blocked()
        assert sorted(troupe.log[:2]) == ["-a", "-b"]
        assert troupe.log[2:] == ["-c", "+a", "=a", "+b", "=b", "+c", "=c"]
        assert sorted(name for name, _ in troupe.failures) == ["a", "b"]
        assert [child.restarts for child in supervisor.statistics().children] == [1, 1, 1]


@pytest.mark.parametrize(
    ("restart", "error", "again"),
    [
        (Restart.PERMANENT, None, True),
        (Restart.PERMANENT, ValueError("x"), True),
        (Restart.TRANSIENT, None, False),
        (Restart.TRANSIENT, ValueError("x"), True),
        (Restart.TEMPORARY, None, False),
        (Restart.TEMPORARY, ValueError("x"), False),
    ],
)
async def test_a_child_that_ends_is_restarted_by_its_policy(
    troupe: Troupe, restart: Restart, error: Exception | None, again: bool
) -> None:
    supervisor = troupe.supervisor([troupe.spec("a", restart=restart)])
    async with running(supervisor):
        assert await troupe.end("a", error) == (["-a", "+a", "=a"] if again else ["-a"])
        assert states(supervisor)["a"] is (ChildState.RUNNING if again else ChildState.OUT)
        assert troupe.failures == ([] if error is None else [("a", error)])


async def test_several_exceptions_at_once_are_one_failure(
    troupe: Troupe, caplog: pytest.LogCaptureFixture
) -> None:
    group = ExceptionGroup("two", [ValueError("a"), KeyError("b")])
    async with running(troupe.supervisor(troupe.specs("a"), intensity=Intensity(restarts=1))):
        assert await troupe.end("a", group) == ["-a", "+a", "=a"]
    assert troupe.failures == [("a", group)]
    assert [(r.name, r.levelno, r.getMessage()) for r in caplog.records] == [
        ("runtara.actors", logging.ERROR, "top: child a failed")
    ]


# -- failures of the start


async def test_a_failure_during_the_start_is_restarted_like_any_other(troupe: Troupe) -> None:
    troupe.fail_starts["b"] = 2
    async with running(troupe.supervisor(troupe.specs("abc"))):
        assert troupe.log == ["+a", "=a", "+b", "-b", "+b", "-b", "+b", "=b", "+c", "=c"]
        assert [str(error) for _, error in troupe.failures] == ["b cannot start"] * 2


async def test_a_child_that_cannot_start_escalates_and_stops_those_before_it(troupe: Troupe) -> None:
    troupe.fail_starts["b"] = 1000
    with pytest.raises(RestartIntensityExceeded, match="last one of b") as caught:
        await troupe.supervisor(troupe.specs("abc"), intensity=Intensity(restarts=2)).run()
    assert isinstance(caught.value.__cause__, OSError)
    assert troupe.log == ["+a", "=a", "+b", "-b", "+b", "-b", "+b", "-b", "-a"]


async def test_a_child_that_returns_before_it_is_ready_has_failed(troupe: Troupe) -> None:
    async def start(*, task_status: trio.TaskStatus[None]) -> None:
        await trio.lowlevel.checkpoint()

    child = ChildSpec("a", start, restart=Restart.TRANSIENT)
    with pytest.raises(RestartIntensityExceeded) as caught:
        await troupe.supervisor([child], intensity=Intensity(restarts=0)).run()
    assert isinstance(caught.value.__cause__, ChildNeverReady)


async def test_an_earlier_child_is_restarted_while_a_later_one_still_starts(troupe: Troupe) -> None:
    troupe.hold_starts["b"] = trio.Event()
    supervisor = troupe.supervisor(troupe.specs("ab"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await wait_all_tasks_blocked()
        assert await troupe.end("a", ValueError("x")) == ["-a", "+a", "=a"]
        assert states(supervisor)["b"] is ChildState.STARTING
        supervisor.stop()


async def test_rest_for_one_takes_back_a_start_when_an_earlier_child_fails(troupe: Troupe) -> None:
    troupe.hold_starts["b"] = trio.Event()
    supervisor = troupe.supervisor(troupe.specs("ab"), strategy=Strategy.REST_FOR_ONE)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await wait_all_tasks_blocked()
        assert await troupe.end("a", ValueError("x")) == ["-a", "-b", "+a", "=a", "+b"]
        assert [name for name, _ in troupe.failures] == ["a"]
        supervisor.stop()


async def test_a_child_that_says_started_twice_has_failed(troupe: Troupe) -> None:
    async def start(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        task_status.started()

    with pytest.raises(RestartIntensityExceeded) as caught:
        await troupe.supervisor([ChildSpec("a", start)], intensity=Intensity(restarts=0)).run()
    assert str(caught.value.__cause__) == "child a called started twice"


# -- escalation


async def test_too_many_restarts_stop_all_and_raise_from_the_last_failure(
    troupe: Troupe, autojump_clock: MockClock
) -> None:
    errors = [ValueError(str(number)) for number in range(3)]
    with pytest.raises(ExceptionGroup) as caught:
        async with running(troupe.supervisor(troupe.specs("abc"), intensity=Intensity(restarts=2))):
            await troupe.end("a", errors[0])
            await troupe.end("b", errors[1])
            assert await troupe.end("a", errors[2]) == ["-a", "-c", "-b"]
    [escalation] = caught.value.exceptions
    assert isinstance(escalation, RestartIntensityExceeded)
    assert (escalation.supervisor, escalation.child) == ("top", "a")
    assert escalation.__cause__ is errors[2]


async def test_restarts_far_enough_apart_never_escalate(troupe: Troupe, autojump_clock: MockClock) -> None:
    supervisor = troupe.supervisor(troupe.specs("a"), intensity=Intensity(restarts=1, seconds=5))
    async with running(supervisor):
        for _ in range(10):
            assert await troupe.end("a", ValueError("x")) == ["-a", "+a", "=a"]
            await trio.sleep(5.1)


async def test_a_supervisor_restarts_the_supervisor_below_it(troupe: Troupe) -> None:
    lower = Supervisor(troupe.specs("ab"), name="lower", intensity=Intensity(restarts=0))
    upper = troupe.supervisor([ChildSpec("lower", lower.run, shutdown_seconds=math.inf), troupe.spec("c")])
    async with running(upper):
        assert troupe.log == ["+a", "=a", "+b", "=b", "+c", "=c"]
        assert await troupe.end("a", ValueError("x")) == ["-a", "-b", "+a", "=a", "+b", "=b"]
        [(name, error)] = troupe.failures
        assert name == "lower"
        assert isinstance(error, RestartIntensityExceeded)
        troupe.log.clear()
    assert troupe.log == ["-c", "-b", "-a"]


async def test_what_is_not_an_exception_ends_the_supervisor_after_its_children(troupe: Troupe) -> None:
    class Fatal(BaseException):
        pass

    async def start(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        raise Fatal

    with pytest.raises(BaseExceptionGroup) as caught:
        await troupe.supervisor([*troupe.specs("ab"), ChildSpec("c", start)]).run()
    assert [type(error) for error in caught.value.exceptions] == [Fatal]
    assert troupe.log[-2:] == ["-b", "-a"]
    assert troupe.failures == []


# -- kill


@pytest.mark.parametrize("strategy", list(Strategy))
async def test_a_killed_child_counts_as_failed(troupe: Troupe, strategy: Strategy) -> None:
    children = [troupe.spec("a", restart=Restart.TRANSIENT), troupe.spec("b")]
    error = ValueError("injected")
    supervisor = troupe.supervisor(children, strategy=strategy)
    assert supervisor.kill("a", error) is False
    async with running(supervisor):
        troupe.log.clear()
        assert supervisor.kill("a", error) is True
        await wait_all_tasks_blocked()
        alone = ["-a", "+a", "=a"]
        with_rest = ["-a", "-b", "+a", "=a", "+b", "=b"]
        assert troupe.log == (alone if strategy is Strategy.ONE_FOR_ONE else with_rest)
        assert troupe.failures == [("a", error)]


async def test_kill_without_an_error_reports_child_killed_and_counts(troupe: Troupe) -> None:
    supervisor = troupe.supervisor(troupe.specs("a"), intensity=Intensity(restarts=0))
    with pytest.raises(ExceptionGroup) as caught:
        async with running(supervisor):
            supervisor.kill("a")
            await wait_all_tasks_blocked()
    assert isinstance(caught.value.exceptions[0].__cause__, ChildKilled)


async def test_kill_of_an_unknown_child_is_a_key_error(troupe: Troupe) -> None:
    with pytest.raises(KeyError, match="nobody"):
        troupe.supervisor(troupe.specs("a")).kill("nobody")


async def test_a_child_killed_while_it_starts_is_started_again(troupe: Troupe) -> None:
    troupe.hold_starts["a"] = trio.Event()
    supervisor = troupe.supervisor(troupe.specs("a"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await wait_all_tasks_blocked()
        supervisor.kill("a")
        await wait_all_tasks_blocked()
        assert troupe.log == ["+a", "-a", "+a"]
        assert [type(error) for _, error in troupe.failures] == [ChildKilled]
        supervisor.stop()


# -- failures while stopping


async def test_a_failure_while_stopping_is_reported_and_stopping_goes_on(troupe: Troupe) -> None:
    async def start(*, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            raise OSError("b cannot clean up")

    async with running(troupe.supervisor([troupe.spec("a"), ChildSpec("b", start)])):
        pass
    assert [(name, str(error)) for name, error in troupe.failures] == [("b", "b cannot clean up")]
    assert troupe.log[-1] == "-a"
