"""The directory: which instances are live, and the way to each of them.

Rules:

1. A key has at most one live actor. It is activated by the first letter, and loads only when nothing of an
   earlier life of the instance is queued or being written.
2. The mailbox, the session and the watchers of an instance outlive its actor.
3. An actor that fails is thrown away and another one takes over its mailbox. The letter it was handling is
   answered `ActorFailed`. After more failures than `INTENSITY` allows, the instance rests: its letters are
   answered `Quarantined` for `QUARANTINE_SECONDS`, and no other instance notices.
4. An instance without a session, without watchers and without anything in flight is passivated after
   ``idle_seconds``; one that does not exist at once.
5. While a key is *held*, it has no actor: its letters wait in the mailbox, whose bound stays what it is. The
   live actor first handles what it has begun, and all of that is settled. When the key is released, a new
   actor answers what waits. A key has one holder at a time.
"""

import logging
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from itertools import takewhile
from typing import Final

import attrs
import trio

from runtara.actors.instance import ActivationFailed, InstanceActor, Place, Surroundings
from runtara.actors.letters import Key, Letter, Session
from runtara.actors.mailbox import Mailbox
from runtara.actors.persistence import Activation
from runtara.actors.supervisor import Intensity, prune_history, restart_allowed
from runtara.actors.wake import WakeScheduler
from runtara.config import Settings
from runtara.errors import (
    InstanceNotFound,
    Overloaded,
    Quarantined,
    RuntaraError,
    RuntimeClosed,
    StoreError,
    StoreUnavailable,
)
from runtara.link import Sink, Watcher
from runtara.messages import Change, ClosedPush, Push, SupersededPush
from runtara.records import InstanceRecord

logger = logging.getLogger("runtara.actors")

INTENSITY: Final = Intensity(restarts=3, seconds=5.0)
QUARANTINE_SECONDS: Final = 10.0
RELOAD_SECONDS: Final = 0.5
"""Before an instance that somebody is attached to is loaded again after the store did not answer."""


class Entry(Place):
    """One key of the directory: what outlives the instance's actor (rule 2)."""

    __slots__ = (
        "activation",
        "actor",
        "directory",
        "failures",
        "key",
        "mailbox",
        "quarantined_until",
        "scope",
        "session",
        "watchers",
    )

    def __init__(self, directory: "Directory", key: Key, mailbox_limit: int) -> None:
        self.directory = directory
        self.key = key
        self.mailbox: Mailbox[Letter] = Mailbox(mailbox_limit)
        self.session: Session | None = None
        self.watchers: list[Watcher] | None = None
        self.actor: InstanceActor | None = None
        self.activation: Activation | None = None
        self.scope: trio.CancelScope | None = None
        self.failures: tuple[float, ...] = ()
        self.quarantined_until = 0.0

    # ------------------------------------------------------------ what the actor says, after a commit

    def attach(self, session: Session) -> None:
        old, self.session = self.session, session
        if old is not None:
            old.sink.push(SupersededPush(epoch=session.epoch))
        self.directory.touch(self)
        if session.sink.abandoned:
            self.abandon(session)

    def abandon(self, session: Session) -> None:
        """Who asked for the session went away before hearing of it: the instance must be told."""
        self.detach(session.epoch)
        self.directory.lose(self.key, session.epoch)

    def deliver(self, push: Push) -> None:
        session = self.session
        if session is None:
            return
        if isinstance(push, ClosedPush):
            self.detach(session.epoch)
        session.sink.push(push)

    def watched(self) -> bool:
        return bool(self.watchers)

    def announce(self, change: Change) -> None:
        for watcher in tuple(self.watchers or ()):
            watcher(change)

    def note_deadline(self, record: InstanceRecord) -> None:
        self.directory.wake.note(self.key, record.epoch, record.due_us)
        if record.status.is_terminal:
            self.deliver(ClosedPush(status=record.status, reason=record.reason))

    @property
    def held(self) -> bool:
        return self.key in self.directory.held

    # ------------------------------------------------------------ sessions and rest

    def detach(self, epoch: int) -> None:
        """The session of ``epoch`` is over."""
        if self.session is not None and self.session.epoch == epoch:
            self.session = None
            self.directory.touch(self)
            self.directory.session_gone.set()

    @property
    def needs_actor(self) -> bool:
        """Whether letters wait, or somebody attached may have missed what a failed life did not say."""
        if self.mailbox.statistics().items:
            return True
        failed = self.activation is not None and self.activation.failed
        return failed and (self.session is not None or self.watched())

    @property
    def resting(self) -> bool:
        """Whether the actor may be passivated without anybody noticing (rule 4)."""
        actor, activation = self.actor, self.activation
        return (
            self.session is None
            and not self.watchers
            and actor is not None
            and activation is not None
            and not activation.outstanding
            and not actor.parked
            and self.mailbox.statistics().waiting
        )


class Hold:
    """What a holder of keys waits for, and who waits for it (rule 5)."""

    def __init__(self) -> None:
        self.actor_gone = trio.Event()
        self.released = trio.Event()


@attrs.frozen(kw_only=True)
class DirectoryStatistics:
    """The directory at one moment."""

    live: int
    """Instances in memory."""
    sessions: int
    failures: int
    """Actors that failed since the start."""


class Directory:
    """See the module's docstring."""

    def __init__(
        self,
        around: Surroundings,
        wake: WakeScheduler,
        settings: Settings,
        lose: Callable[[Key, int], None],
    ) -> None:
        self.around = around
        self.wake = wake
        self.lose = lose
        """Called with key and epoch of a session that began when nobody wanted it any more."""
        self.settings = settings
        self.entries: dict[Key, Entry] = {}
        self.idle: dict[Entry, float] = {}
        """Entries without a session, by the time of their last letter, oldest first."""
        self.idle_changed = trio.Event()
        self.session_gone = trio.Event()
        self.held: dict[Key, Hold] = {}
        self.nursery: trio.Nursery | None = None
        self.closed = False
        self.failures = 0

    # ------------------------------------------------------------ letters

    def post(self, key: Key, letter: Letter) -> None:
        """Send a letter; its reply future is completed sooner or later. Never blocks.

        Raises:
            Overloaded: The instance's mailbox is full.
            Quarantined: The instance rests after too many failures.
            RuntimeClosed: The runtime is closed.
        """
        if self.closed:
            raise RuntimeClosed("the runtime is closed")
        entry = self.entry(key)
        if entry.actor is not None and entry.actor.handle_at_once(letter):
            if entry.session is None:
                self.touch(entry)
            return
        left = entry.quarantined_until - trio.current_time()
        if left > 0:
            raise Quarantined(
                "the instance's actor failed too often and rests", retry_after_seconds=round(left, 3)
            )
        try:
            entry.mailbox.put_nowait(letter)
        except trio.WouldBlock:
            raise Overloaded("too many requests wait for this instance", retry_after_seconds=0.1) from None
        if entry.session is None:
            self.touch(entry)
        if entry.scope is None:
            self.activate(entry)

    def entry(self, key: Key) -> Entry:
        found = self.entries.get(key)
        if found is None:
            found = self.entries[key] = Entry(self, key, self.settings.mailbox_messages)
        return found

    def watch(self, key: Key, watcher: Watcher) -> None:
        """Call ``watcher`` with every change of the instance that is committed from now on.

        Raises:
            RuntimeClosed: The runtime is closed.
        """
        if self.closed:
            raise RuntimeClosed("the runtime is closed")
        entry = self.entry(key)
        entry.watchers = [*(entry.watchers or ()), watcher]

    def unwatch(self, key: Key, watcher: Watcher) -> None:
        entry = self.entries.get(key)
        if entry is not None and entry.watchers is not None:
            entry.watchers = [other for other in entry.watchers if other is not watcher] or None
            self.touch(entry)
            if entry.scope is None:
                self.forget(entry)

    # ------------------------------------------------------------ lives of actors

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Host the actors. When it is started again, instances with letters are activated again."""
        async with trio.open_nursery() as nursery:
            self.nursery = nursery
            for entry in list(self.entries.values()):
                if entry.needs_actor:
                    self.activate(entry)
            task_status.started()
            try:
                await self.passivate_idle()
            finally:
                self.nursery = None
                nursery.cancel_scope.cancel()

    def activate(self, entry: Entry) -> None:
        if self.nursery is not None and not entry.held:
            entry.scope = trio.CancelScope()
            self.nursery.start_soon(self.live, entry, entry.scope)

    async def live(self, entry: Entry, scope: trio.CancelScope) -> None:
        """One actor after the other, until the instance is at rest."""
        try:
            again = True
            while again:
                with scope:
                    await self.live_once(entry)
                again = entry.needs_actor and not self.closed and not entry.held
                entry.scope = scope = trio.CancelScope()
        finally:
            entry.scope = None
            self.forget(entry)
            if entry.held:
                self.held[entry.key].actor_gone.set()

    async def live_once(self, entry: Entry) -> None:
        """One life of the instance's actor. Returns when it ended, well or badly."""
        try:
            if entry.activation is not None:
                await entry.activation.settled()
        except StoreError as error:
            await self.answer_and_rest(entry, error)
            return
        activation = Activation(f"{entry.key[0]}/{entry.key[1]}", lambda: self.end_life(entry))
        actor = InstanceActor(entry, entry.mailbox, self.around, activation)
        entry.activation, entry.actor = activation, actor
        try:
            await actor.load()
            await actor.run()
        except StoreError as error:
            activation.failed = True
            await self.answer_and_rest(entry, error)
        except ActivationFailed:
            logger.info("instance %s: reloaded after a change that was not written", actor.name)
        except Exception as error:
            self.bury(entry, error)
        finally:
            actor.abandon_parked()
            entry.actor = None

    async def answer_and_rest(self, entry: Entry, error: StoreError) -> None:
        """The instance cannot be loaded now."""
        self.answer_all(entry, error)
        if entry.needs_actor:
            await trio.sleep(RELOAD_SECONDS)

    def end_life(self, entry: Entry) -> None:
        """A change was not written: the actor's memory is wrong."""
        if entry.scope is not None:
            entry.scope.cancel()

    def bury(self, entry: Entry, error: Exception) -> None:
        """An actor failed: say so, and let the instance rest if it fails too often (rule 3)."""
        self.failures += 1
        logger.error("instance %s/%s: its actor failed", *entry.key, exc_info=error)
        now = trio.current_time()
        history = prune_history(entry.failures, now, INTENSITY)
        if restart_allowed(history, now, INTENSITY):
            entry.failures = (*history, now)
            return
        entry.failures = ()
        entry.quarantined_until = now + QUARANTINE_SECONDS
        logger.error("instance %s/%s: quarantined for %g s", *entry.key, QUARANTINE_SECONDS)
        self.answer_all(
            entry,
            Quarantined(
                "the instance's actor failed too often and rests", retry_after_seconds=QUARANTINE_SECONDS
            ),
        )

    def answer_all(self, entry: Entry, error: RuntaraError) -> None:
        """Answer every waiting letter with an error."""
        for letter in entry.mailbox.take_nowait():
            self.around.release(letter.size)
            letter.reply.fail(error)

    def kill(self, key: Key) -> bool:
        """For tests: end the instance's actor as if it had failed. Whether there was one."""
        entry = self.entries.get(key)
        if entry is None or entry.scope is None or entry.actor is None:
            return False
        logger.warning("instance %s/%s: its actor is killed", *key)
        entry.scope.cancel()
        return True

    # ------------------------------------------------------------ holds

    @asynccontextmanager
    async def hold(self, keys: Collection[Key]) -> AsyncGenerator[None, None]:
        """Keep actors away (rule 5). In the block nothing of these instances is queued or being written.

        Waits while another one holds any of the keys, and then takes all of them at once, so two holders
        never wait for each other.

        Raises:
            RuntimeClosed: The runtime is closed.
            StoreUnavailable: A change of an instance is not settled, and nobody can tell when it will be.

        Cancellation: the keys are released.
        """
        while (other := next((self.held[key] for key in keys if key in self.held), None)) is not None:
            await other.released.wait()
        if self.closed:
            raise RuntimeClosed("the runtime is closed")
        hold = Hold()
        self.held.update(dict.fromkeys(keys, hold))
        try:
            for key in keys:
                await self.quieten(key, hold)
            yield
        finally:
            self.release(keys, hold)

    async def quieten(self, key: Key, hold: Hold) -> None:
        """Wait until the actor of a held key is gone, and all that it wrote is settled."""
        entry = self.entries.get(key)
        if entry is None:
            return
        while entry.scope is not None:
            if entry.actor is None or entry.mailbox.statistics().waiting:
                entry.scope.cancel()  # else it ends by itself, after what it has begun
            hold.actor_gone = trio.Event()
            await hold.actor_gone.wait()
        if entry.activation is not None:
            await entry.activation.settled()

    def release(self, keys: Collection[Key], hold: Hold) -> None:
        for key in keys:
            del self.held[key]
        hold.released.set()
        for key in keys:
            entry = self.entries.get(key)
            if entry is not None and entry.scope is None and entry.needs_actor:
                self.activate(entry)

    def let_go(self, key: Key) -> None:
        """The instance of a held key was purged: whoever is attached hears so, and the id starts clean."""
        entry = self.entries.get(key)
        if entry is None:
            return
        error = InstanceNotFound(key[1])
        watchers, entry.watchers = entry.watchers or (), None
        for watcher in watchers:
            watcher(error)
        if entry.session is not None:
            entry.session.sink.end(error)
            entry.detach(entry.session.epoch)
        entry.failures, entry.quarantined_until = (), 0.0

    # ------------------------------------------------------------ rest

    def touch(self, entry: Entry) -> None:
        """Note that something happened to an entry; without a session it is a candidate for rest."""
        self.idle.pop(entry, None)
        if entry.session is None and entry.key in self.entries:
            if not self.idle:
                self.idle_changed.set()
            self.idle[entry] = trio.current_time()

    def forget(self, entry: Entry) -> None:
        """Drop an entry that nothing needs any more."""
        empty = not entry.mailbox.statistics().items
        now = trio.current_time()
        ill = entry.quarantined_until > now or prune_history(entry.failures, now, INTENSITY) != ()  # rule 3
        written = entry.activation is None or not entry.activation.outstanding  # rule 1
        if empty and written and entry.session is None and not entry.watchers and not ill:
            self.entries.pop(entry.key, None)
            self.idle.pop(entry, None)
        elif entry.session is None and entry not in self.idle:
            self.touch(entry)

    async def passivate_idle(self) -> None:
        """Let entries rest that were idle for long enough."""
        while True:
            while not self.idle:  # an entry may come and go before this task runs
                self.idle_changed = trio.Event()
                await self.idle_changed.wait()
            oldest = next(iter(self.idle.values()))
            await trio.sleep_until(oldest + self.settings.idle_seconds)
            self.passivate_due(trio.current_time())

    def passivate_due(self, now: float) -> None:
        due = takewhile(lambda item: item[1] + self.settings.idle_seconds <= now, self.idle.items())
        for entry, _ in list(due):
            if entry.scope is None:
                self.forget(entry)
            elif entry.resting:
                entry.scope.cancel()
            self.touch(entry)

    # ------------------------------------------------------------ the end

    def close(self) -> None:
        """Refuse letters from now on, answer those that wait, and let sessions and watchers go."""
        self.closed = True
        error = RuntimeClosed("the runtime is closed")
        for entry in list(self.entries.values()):
            self.answer_all(entry, error)
            if entry.session is not None:
                entry.session.sink.end(error)
            for watcher in entry.watchers or ():
                watcher(error)

    def detach(self, key: Key, epoch: int) -> None:
        """The session of ``epoch`` is over, if there still is one."""
        entry = self.entries.get(key)
        if entry is not None:
            entry.detach(epoch)

    def abandon(self, key: Key, sink: Sink) -> None:
        """A registration was given up. Its session may have begun a moment ago, unheard."""
        entry = self.entries.get(key)
        if entry is not None and entry.session is not None and entry.session.sink is sink:
            entry.abandon(entry.session)

    def close_session(self, key: Key, epoch: int, push: ClosedPush) -> None:
        """Tell a session that it is over, if it still is the live one."""
        entry = self.entries.get(key)
        if entry is not None and entry.session is not None and entry.session.epoch == epoch:
            entry.deliver(push)

    def has_session(self, key: Key, epoch: int) -> bool:
        """Whether the session of ``epoch`` is live."""
        entry = self.entries.get(key)
        return entry is not None and entry.session is not None and entry.session.epoch == epoch

    def sessions(self) -> list[tuple[Key, int]]:
        """Key and epoch of every live session."""
        return [
            (key, entry.session.epoch) for key, entry in self.entries.items() if entry.session is not None
        ]

    async def settled(self) -> None:
        """Wait until every change that was decided before is settled, as far as the store can tell."""
        for entry in list(self.entries.values()):
            if entry.activation is not None:
                with suppress(StoreUnavailable):
                    await entry.activation.settled()

    async def session_ended(self) -> None:
        """Wait until a session ends."""
        self.session_gone = trio.Event()
        await self.session_gone.wait()

    def statistics(self) -> DirectoryStatistics:
        return DirectoryStatistics(
            live=len(self.entries),
            sessions=sum(entry.session is not None for entry in self.entries.values()),
            failures=self.failures,
        )
