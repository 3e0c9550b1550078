"""Bugs planted on purpose. Each is a small change of the product that one could really make; the simulation
must find it, or it proves nothing.

Not in the list, because other layers mask them: a sweep of the wake scheduler that overwrites a newer
deadline with the one it read (the next sweep repairs that, within one horizon), and a commit of unknown
outcome that is taken for one that did not happen (callers ask again under the same ids, and the next life of
the actor says again what the lost one did not).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

import attrs

from runtara import machine
from runtara.actors import instance
from runtara.actors.instance import InstanceActor, change_of
from runtara.actors.letters import Session
from runtara.actors.mailbox import Future
from runtara.actors.persistence import Activation, PersistenceActor, Work
from runtara.actors.system import System
from runtara.errors import RuntaraError, StoreRefused
from runtara.lifecycle import Cause
from runtara.machine import sessions, signals, waits
from runtara.machine.draft import Draft
from runtara.machine.state import InstanceState
from runtara.messages import Reply, Sleep
from runtara.persistence.store import Loaded
from runtara.records import SignalRecord
from tests.simulation.options import Options

Patches = list[tuple[object, str, object]]


def reply_before_commit() -> Patches:
    def answer(
        self: InstanceActor, work: Work | None, future: Future[Reply], reply: Reply | RuntaraError
    ) -> None:
        if isinstance(reply, RuntaraError):
            future.fail(reply)
        else:
            future.set(reply)

    return [(InstanceActor, "answer", answer)]


def reads_overtake_writes() -> Patches:
    """Only what was written itself waits for its commit; a read of it does not."""
    original = InstanceActor.answer

    def answer(
        self: InstanceActor, work: Work | None, future: Future[Reply], reply: Reply | RuntaraError
    ) -> None:
        if work is None and not isinstance(reply, RuntaraError):
            future.set(reply)
        else:
            original(self, work, future, reply)

    return [(InstanceActor, "answer", answer)]


def watchers_hear_before_commit() -> Patches:
    def announce(self: InstanceActor, work: Work, state: Any, ops: Any) -> None:
        self.place.announce(change_of(state, ()))

    return [(InstanceActor, "announce", announce)]


def keys_forgotten() -> Patches:
    """Idempotency keys of signals are not kept."""
    return [(signals, "remember", lambda draft, message, request_id, reply: None)]


def consumed_when_pushed() -> Patches:
    original = Draft.push_signal

    def push_signal(self: Draft, signal: SignalRecord) -> None:
        original(self, signal)
        if self.connected and any(s.signal_id == signal.signal_id for s in self.signals):
            self.acknowledge(signal)

    return [(Draft, "push_signal", push_signal)]


def deadline_not_noted() -> Patches:
    """The lost wake-up: a new deadline is on disk, and nobody sets the timer."""
    return [(InstanceActor, "note_row", lambda self, work, record: None)]


def epoch_used_again() -> Patches:
    """A session that comes back after another one left gets the old epoch."""
    original = sessions.begin_session

    def begin_session(draft: Draft, message: Any) -> None:
        epoch = draft.row("epoch")
        if epoch and not draft.connected:
            draft.facts = attrs.evolve(draft.facts, number=epoch)
        original(draft, message)

    return [(sessions, "begin_session", begin_session)]


def failed_unit_forgotten() -> Patches:
    """When a unit fails, the later ones of its activation are written all the same."""
    return [(Activation, "fail", lambda self: None)]


def neighbours_refused() -> Patches:
    """A bad unit fails its whole batch."""

    async def halve(self: PersistenceActor, works: list[Work], error: StoreRefused) -> None:
        self.fail(works, error)

    return [(PersistenceActor, "halve", halve)]


def unknown_taken_for_done() -> Patches:
    async def settle(self: PersistenceActor, works: list[Work], error: Any) -> None:
        self.resolve(works, frozenset())

    return [(PersistenceActor, "settle", settle)]


def deadline_moves_at_replay() -> Patches:
    original = waits.sleep

    def sleep(state: Any, message: Sleep, facts: Any, now_us: int, limits: Any) -> Any:
        if facts.wait is not None and facts.wait.open:
            moved = attrs.evolve(facts.wait, deadline_us=now_us + message.duration_us)
            facts = attrs.evolve(facts, wait=moved)
        return original(state, message, facts, now_us, limits)

    return [(machine, "RULES_WHILE_RUNNING", {**machine.RULES_WHILE_RUNNING, Sleep: sleep})]


def register_unpauses() -> Patches:
    original = sessions.begin_session

    def begin_session(draft: Draft, message: Any) -> None:
        paused = draft.paused
        original(draft, message)
        if paused:
            draft.move(Cause.REGISTER)

    return [(sessions, "begin_session", begin_session)]


def sleeps_end_early() -> Patches:
    """Timers ring a second before the wall clock says so."""
    return [
        (
            waits,
            "reached",
            lambda wait, now_us: wait.deadline_us is not None and wait.deadline_us <= now_us + 1e6,
        )
    ]


def lost_sessions_forgotten() -> Patches:
    """An instance whose session was left during an outage is never told."""
    return [(System, "lose_later", lambda self, *session, **how: None)]


def waiting_replies_forgotten() -> Patches:
    """Who waits for a signal is not answered when the instance's actor is lost."""
    return [(InstanceActor, "abandon_parked", lambda self: None)]


def running_steps_forgotten() -> Patches:
    """Who loads an instance in the middle of a step does not know of it."""
    original = instance.state_of

    def state_of(loaded: Loaded, session: Session | None) -> InstanceState:
        return attrs.evolve(original(loaded, session), steps=())

    return [(instance, "state_of", state_of)]


def always(options: Options) -> Options:
    return options


def often(**rates: float) -> Callable[[Options], Options]:
    """Worlds in which such faults of the store are frequent."""
    return lambda options: attrs.evolve(options, rates=attrs.evolve(options.rates, **rates))


@attrs.frozen
class Mutant:
    """A planted bug."""

    plant: Callable[[], Patches]
    seeds: int
    """Within how many worlds it must be found."""
    worlds: Callable[[Options], Options] = always

    @property
    def name(self) -> str:
        return self.plant.__name__


MUTANTS: Final = (
    Mutant(reply_before_commit, 10),
    Mutant(reads_overtake_writes, 30),
    Mutant(watchers_hear_before_commit, 10),
    Mutant(keys_forgotten, 20),
    Mutant(consumed_when_pushed, 10),
    Mutant(deadline_not_noted, 20),
    Mutant(epoch_used_again, 10),
    Mutant(failed_unit_forgotten, 20),
    Mutant(neighbours_refused, 20, often(refused=0.2, slow=1.0, slow_seconds=0.3)),
    Mutant(unknown_taken_for_done, 40),
    Mutant(deadline_moves_at_replay, 60),
    Mutant(register_unpauses, 20),
    Mutant(sleeps_end_early, 10),
    Mutant(lost_sessions_forgotten, 40, often(full=0.5)),
    Mutant(waiting_replies_forgotten, 20),
    Mutant(running_steps_forgotten, 20),
)


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Run the body with the bug in the product."""
    with ExitStack() as stack:
        for target, name, wrong in mutant.plant():
            stack.enter_context(patch.object(target, name, wrong))
        yield
