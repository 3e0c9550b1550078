"""The instance actor: drives the machine for one instance.

Rules:

1. It owns the instance's state in memory, and handles one letter at a time, in order of arrival.
2. It speculates, then commits: a decision is the state for the next letter at once, while the unit is on its
   way to the disk. What it says waits for the commit, even a refusal or a plain read (promise P1).
3. It does not wait for commits itself: the writer answers the callers. It waits only where a decision needs
   a fact of the store. A letter that needs none and finds the actor idle is handled where it was posted, for
   nobody could tell the difference but by the time that a switch of tasks takes (`handle_at_once`).
4. Replies of sleeps and waits are held back, by the id of the wait, until a later decision releases them.
5. It holds nothing that the store does not have, but for what may be lost: when it fails, it is thrown away,
   and the next one loads the instance again.
"""

from collections.abc import Callable
from typing import Final

import attrs
import trio

from runtara.actors.actor import Actor
from runtara.actors.facts import FactFinder
from runtara.actors.letters import Key, Letter, Session
from runtara.actors.mailbox import Future, Mailbox
from runtara.actors.numbers import Numbers
from runtara.actors.persistence import Activation, PersistenceActor, Work
from runtara.clock import Clock
from runtara.errors import ActorFailed, Overloaded, RuntaraError
from runtara.limits import Limits
from runtara.machine import Decision, Facts, InstanceState, decide, needs
from runtara.messages import Attach, Change, ClosedPush, Push, Register, Reply, SignalPush
from runtara.persistence.store import Loaded, Store, Unit
from runtara.records import (
    AcknowledgeSignal,
    CheckpointRecord,
    CompensationAttemptRecord,
    ErrorRecord,
    EventRecord,
    FinishCompensationAttempt,
    FinishStep,
    InstanceRecord,
    Op,
    PutPayload,
    RequestRecord,
    RetryAttemptRecord,
    SetCompensation,
    SettleWait,
    SignalRecord,
    StepRecord,
    WaitRecord,
)

YIELD_AFTER: Final = 64
"""Letters handled before others get their turn."""
PARKED_LIMIT: Final = 100
"""Requests that wait for one and the same sleep or signal; the oldest is given up for a newer one."""


@attrs.frozen(kw_only=True)
class Surroundings:
    """What all instance actors of a runtime share."""

    store: Store
    writer: PersistenceActor
    numbers: Numbers
    clock: Clock
    limits: Limits
    known_ids: int
    refuse_new: Callable[[], RuntaraError | None]
    """Why no new instance is taken, if that is so."""
    refuse_sessions: Callable[[], RuntaraError | None]
    """Why no session may begin, if that is so."""
    release: Callable[[int], None]
    """Gives bytes back to the budget."""


class Place:
    """Where an actor lives: what outlives it, and whom it tells. The directory's entry is one."""

    __slots__ = ()

    key: Key
    session: Session | None

    def attach(self, session: Session) -> None:
        """A session began; it is on disk."""
        raise NotImplementedError

    def deliver(self, push: Push) -> None:
        """Hand a push to the live session."""
        raise NotImplementedError

    @property
    def held(self) -> bool:
        """Whether the actor must end after what it has begun."""
        raise NotImplementedError

    def watched(self) -> bool:
        raise NotImplementedError

    def announce(self, change: Change) -> None:
        """Tell the watchers."""
        raise NotImplementedError

    def note_deadline(self, record: InstanceRecord) -> None:
        """The row was written; its deadline may have moved."""
        raise NotImplementedError


class ActivationFailed(Exception):
    """A change of this actor was not written: its memory is wrong, and it must be thrown away."""


class InstanceActor(Actor[Letter]):
    """See the module's docstring."""

    __slots__ = ("activation", "around", "bug", "facts", "handled", "parked", "place", "state")

    def __init__(
        self, place: Place, mailbox: Mailbox[Letter], around: Surroundings, activation: Activation
    ) -> None:
        super().__init__(activation.name, mailbox)
        self.place = place
        self.around = around
        self.activation = activation
        self.state: InstanceState | None = None
        self.facts: FactFinder | None = None
        self.parked: dict[str, list[Future[Reply]]] | None = None
        self.handled = 0
        self.bug: Exception | None = None
        """What `decide` raised outside of a turn; the next turn raises it."""

    # ------------------------------------------------------------ living

    async def load(self) -> None:
        """Fetch the instance. Raises `StoreError` if the store does not answer."""
        tenant_id, instance_id = self.place.key
        around = self.around
        loaded = await around.store.load(tenant_id, instance_id, around.known_ids)
        base = Facts(tenant_id=tenant_id, instance_id=instance_id)
        self.facts = FactFinder(around.store, around.numbers, self.activation, base, loaded, around.known_ids)
        if loaded is not None:
            self.state = state_of(loaded, self.place.session)
            self.catch_up(self.state)

    def catch_up(self, state: InstanceState) -> None:
        """Say again what an earlier life may have failed to say after its commit; repeats do no harm."""
        self.place.note_deadline(state.row)
        if state.connected:
            for signal in state.signals:
                self.place.deliver(SignalPush(signal=signal))
            if state.row.status.is_terminal:
                self.place.deliver(ClosedPush(status=state.row.status, reason=state.row.reason))
        if self.place.watched():
            self.place.announce(change_of(state, ("snapshot",)))

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Handle letters until cancelled or held; an instance that does not exist needs no actor."""
        task_status.started()
        while not self.place.held:
            await self.handle_each(await self.mailbox.get_all())
            if self.state is None and not self.mailbox.statistics().items:
                return

    async def handle(self, message: Letter) -> None:
        """Decide on one letter and see to all that follows."""
        if self.bug is not None:
            raise self.bug
        self.handled += 1
        if self.handled % YIELD_AFTER == 0:
            await trio.lowlevel.checkpoint()
        try:
            facts = await self.find_facts(message)
            if self.activation.failed:
                raise ActivationFailed(self.name)
            decision = decide(
                self.state, message.message, facts, self.around.clock.now_us(), self.around.limits
            )
        except RuntaraError as refusal:
            self.refuse(message, refusal)
            self.around.release(message.size)
            return
        self.carry_out(message, decision)

    def handle_at_once(self, letter: Letter) -> bool:
        """Handle a letter without a turn of the actor, if it is idle and knows enough (rule 3).

        Whether it did; if not, the letter goes into the mailbox. So does one that makes `decide` fail: the
        actor then ends on it, as on any failure.
        """
        if not self.mailbox.idle or self.state is None or self.facts is None or self.activation.failed:
            return False
        around, certain = self.around, self.facts.certain
        for need in needs(self.state, letter.message):
            if not certain(need):
                return False
        try:
            decision = decide(
                self.state, letter.message, self.facts.base, around.clock.now_us(), around.limits
            )
        except RuntaraError as refusal:
            self.refuse(letter, refusal)
            around.release(letter.size)
        except Exception as bug:
            self.bug = bug
            return False
        else:
            self.carry_out(letter, decision)
        return True

    async def find_facts(self, letter: Letter) -> Facts:
        assert self.facts is not None
        finder = self.facts
        open_needs = [need for need in needs(self.state, letter.message) if not finder.certain(need)]
        facts = await finder.find(open_needs) if open_needs else finder.base
        if isinstance(letter.message, Register | Attach):
            refusal = self.around.refuse_sessions()
            if refusal is not None:
                raise refusal
        if self.state is None:
            refuse_new = self.around.refuse_new()
            if refuse_new is not None:
                return attrs.evolve(facts, refuse_new=refuse_new)
        return facts

    # ------------------------------------------------------------ deciding

    def carry_out(self, letter: Letter, decision: Decision) -> None:
        assert self.facts is not None
        before, self.state = self.state, decision.state
        work = None
        if decision.ops:
            assert decision.state is not None
            work = self.work_for(before, decision.state, decision.ops, letter)
            self.facts.learn(decision.ops)
            self.facts.row = decision.state.row.row
        if decision.supersedes or decision.pushes:
            assert work is not None
            assert decision.state is not None
            self.push(work, letter, decision, decision.state.row.epoch)
        if decision.park is not None:
            self.park(decision.park, letter)
        for release in decision.releases:
            for future in self.unpark(release.wait_id):
                self.answer(work, future, release.reply)
        if decision.reply is not None:
            self.answer(work, letter.reply, decision.reply)
        if work is None:
            self.around.release(letter.size)
        else:
            self.around.writer.submit(work)

    def work_for(
        self, before: InstanceState | None, after: InstanceState, ops: tuple[Op, ...], letter: Letter
    ) -> Work:
        stored = None if before is None else before.row
        unit = Unit(
            row=after.row.row,
            epoch=0 if stored is None else stored.epoch,
            base=0 if stored is None else stored.revision,
            revision=after.revision,
            ops=ops,
            size=letter.size,
        )
        work = Work(unit, self.activation, self.around.release, letter.reply)
        if stored is not after.row:
            self.note_row(work, after.row)
            if after.row.status.is_terminal:  # with the commit, the place closes the session
                self.state = attrs.evolve(after, connected=False)
        if self.place.watched():
            self.announce(work, after, ops)
        return work

    def note_row(self, work: Work, record: InstanceRecord) -> None:
        work.after(lambda: self.place.note_deadline(record))

    def announce(self, work: Work, state: InstanceState, ops: tuple[Op, ...]) -> None:
        change = change_of(state, tuple(sorted({KINDS[type(op)] for op in ops})))
        work.after(lambda: self.place.announce(change))

    def push(self, work: Work, letter: Letter, decision: Decision, epoch: int) -> None:
        """Once the unit is on disk: begin the session, if this is its registration, and push."""
        if decision.supersedes and letter.sink is not None:
            session = Session(epoch, letter.sink)
            work.after(lambda: self.place.attach(session))
        for item in decision.pushes:
            work.after(lambda push=item: self.place.deliver(push))  # type: ignore[misc]

    # ------------------------------------------------------------ answering

    def answer(self, work: Work | None, future: Future[Reply], reply: Reply | RuntaraError) -> None:
        """Let a reply leave after the last change that it could have seen."""
        carrier = work if work is not None else self.activation.last
        if carrier is not None and not carrier.settled:
            carrier.reply(future, reply)
        elif isinstance(reply, RuntaraError):
            future.fail(reply)
        else:
            future.set(reply)

    def refuse(self, letter: Letter, refusal: RuntaraError) -> None:
        self.answer(None, letter.reply, refusal)

    def park(self, wait_id: str, letter: Letter) -> None:
        if self.parked is None:
            self.parked = {}
        waiting = self.parked.setdefault(wait_id, [])
        waiting.append(letter.reply)
        if len(waiting) > PARKED_LIMIT:
            waiting.pop(0).fail(Overloaded(f"{PARKED_LIMIT} newer requests wait for the same"))

    def unpark(self, wait_id: str) -> list[Future[Reply]]:
        return [] if self.parked is None else self.parked.pop(wait_id, [])

    # ------------------------------------------------------------ dying

    def lost(self, message: Letter) -> None:
        """The actor is ending while it handles a letter; nothing of it was submitted."""
        self.around.release(message.size)
        message.reply.fail(ActorFailed("the actor was lost while it handled the request"))

    def abandon_parked(self) -> None:
        """The actor is gone: whoever sleeps or waits must ask again, and keeps the deadline."""
        for futures in (self.parked or {}).values():
            for future in futures:
                future.fail(ActorFailed("the actor was lost while the request waited"))
        self.parked = None


def change_of(state: InstanceState, kinds: tuple[str, ...]) -> Change:
    return Change(
        instance_id=state.row.instance_id,
        revision=state.revision,
        status=state.row.status,
        reason=state.row.reason,
        checkpoint_id=state.checkpoint_id,
        kinds=kinds,
    )


def state_of(loaded: Loaded, session: Session | None) -> InstanceState:
    """The state of an instance that was just loaded."""
    record = loaded.record
    over = record.status.is_terminal
    return InstanceState(
        row=record,
        revision=loaded.revision,
        checkpoint_id=loaded.checkpoint_id,
        last_activity_us=record.last_activity_us,
        signals=loaded.signals,
        waits=() if over else loaded.waits,
        compensations=loaded.compensations,
        last_error=loaded.last_error,
        steps=loaded.steps,
        connected=session is not None and session.epoch == record.epoch,
        shown=shown_ids(loaded, session),
    )


def shown_ids(loaded: Loaded, session: Session | None) -> frozenset[int]:
    """A live session was pushed every pending signal."""
    if session is None or session.epoch != loaded.record.epoch:
        return frozenset()
    return frozenset(signal.signal_id for signal in loaded.signals)


KINDS: Final[dict[type[Op], str]] = {
    InstanceRecord: "instance",
    CheckpointRecord: "checkpoint",
    WaitRecord: "wait",
    SettleWait: "wait",
    EventRecord: "event",
    StepRecord: "step",
    FinishStep: "step",
    SignalRecord: "signal",
    AcknowledgeSignal: "signal",
    RetryAttemptRecord: "attempt",
    ErrorRecord: "error",
    CompensationAttemptRecord: "compensation",
    FinishCompensationAttempt: "compensation",
    SetCompensation: "compensation",
    RequestRecord: "request",
    PutPayload: "payload",
}
"""What a change wrote, in the words that watchers get."""
