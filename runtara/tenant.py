"""`Runtime`: everything a program can do with a runtime, for one tenant."""

import datetime
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final, TypeVar

import attrs
import trio

from runtara.actors.mailbox import twin_of
from runtara.actors.system import System, SystemStatistics
from runtara.errors import (
    InstanceFailed,
    InstanceNotFound,
    RuntaraError,
    RuntimeClosed,
    ValidationError,
    WatchLagged,
)
from runtara.ids import TenantId, check_instance_id, check_tenant_id
from runtara.instance import Inbox, Instance, heal
from runtara.link import Link, Sink, Watcher
from runtara.machine.liveness import Violation
from runtara.messages import (
    Change,
    ChangeReply,
    CompensationView,
    ForceTerminate,
    FoundCheckpoint,
    GetCheckpoint,
    GetStatus,
    InstanceView,
    Register,
    Registered,
    Reply,
    Request,
    SendSignal,
    SessionLost,
    SignalReply,
)
from runtara.operations import Role
from runtara.persistence.store import (
    DEFAULT_PAGE,
)
from runtara.questions import Asker, question, question_for_admins, question_for_anyone
from runtara.randomness import Randomness
from runtara.reader import Reader
from runtara.records import (
    SignalType,
    Status,
)
from runtara.retention import ENDED
from runtara.tokens import Made, Token, Tokens
from runtara.validation import check_int, instant_us
from runtara.words import member

T = TypeVar("T", bound=Reply)

WATCH_BUFFER: Final = 1000
LEAVE_SECONDS: Final = 5.0


class LocalLink:
    """A `Link` to the actors of this process."""

    __slots__ = ("system", "tenant")

    def __init__(self, system: System, tenant: str) -> None:
        self.system = system
        self.tenant = tenant

    async def request(self, instance_id: str, message: Request, sink: Sink | None = None) -> Reply:
        return await self.system.request((self.tenant, instance_id), message, sink)

    async def watch(self, instance_id: str, watcher: Watcher) -> None:
        self.system.directory.watch((self.tenant, instance_id), watcher)

    def unwatch(self, instance_id: str, watcher: Watcher) -> None:
        self.system.directory.unwatch((self.tenant, instance_id), watcher)

    def give_up(self, instance_id: str, sink: Sink) -> None:
        self.system.directory.abandon((self.tenant, instance_id), sink)

    def end_session(self, instance_id: str, epoch: int, crashed: bool, told: bool) -> None:
        key = (self.tenant, instance_id)
        self.system.directory.detach(key, epoch)
        if not told:
            self.system.lose_later(key, epoch, crashed)


class InstancePort:
    """A `Port` to one instance."""

    __slots__ = ("instance_id", "runtime")

    def __init__(self, runtime: "Runtime", instance_id: str) -> None:
        self.runtime = runtime
        self.instance_id = instance_id

    async def request(self, message: Request) -> Reply:
        return await self.runtime.link.request(self.instance_id, message)

    async def compensations(self) -> CompensationView:
        return await self.runtime.compensations(self.instance_id)

    async def compensation_data(self, checkpoint_id: str) -> bytes:
        return await self.runtime.compensation_data(self.instance_id, checkpoint_id)


@attrs.frozen(kw_only=True)
class Health:
    """A runtime whose store has just answered."""

    degraded_seconds: float | None
    """How long its writes have been waiting for the store; None if they are not."""
    draining: bool
    """Whether it is shutting down."""
    live: int
    """Instances in memory."""
    sessions: int
    queued: int
    """Changes on their way to the store."""
    file_bytes: int | None
    log_bytes: int | None
    """Of the write-ahead log, where the store has one of its own."""

    @property
    def ok(self) -> bool:
        """Whether it takes new work and writes it."""
        return self.degraded_seconds is None and not self.draining


class Runtime(Reader):
    """A runtime, for one tenant. Made by `open_runtime` and `Runtime.for_tenant`."""

    tenant: TenantId

    def __init__(
        self,
        link: Link,
        randomness: Randomness,
        tenant: str,
        *,
        here: System | None = None,
        asker: Asker | None = None,
        tokens: Tokens | None = None,
    ) -> None:
        super().__init__(None if here is None else here.store, check_tenant_id(tenant), asker)
        self.link = link
        self.randomness = randomness
        self.here = here
        """The actors, if they are in this process."""
        self.tokens = tokens
        """Those of the gateway, if one is served; else they are read when they are asked for."""

    @property
    def system(self) -> System:
        """The actors. Raises `ValidationError` on a client, which has none."""
        if self.here is None:
            raise ValidationError("runtime", "is on the other side of a connection; this needs it here")
        return self.here

    def for_tenant(self, tenant: str) -> "Runtime":
        """The same runtime, for another tenant; a client connects with ``tenant`` instead.

        Raises:
            ValidationError: The id is ill formed, or this is a client.
        """
        return local_runtime(self.system, self.randomness, tenant, self.tokens)

    def reader(self, tenant: str | None = None) -> Reader:
        """The questions that need the store only, of another tenant, or of all of them."""
        return Reader(self.store, tenant)

    def port(self, instance_id: str) -> InstancePort:
        return InstancePort(self, check_instance_id(instance_id))

    # ------------------------------------------------------------ sessions

    @asynccontextmanager
    async def register(
        self,
        instance_id: str,
        *,
        checkpoint_id: str | None = None,
        workflow: str | None = None,
        definition_version: str | None = None,
    ) -> AsyncGenerator[Instance, None]:
        """Begin a session of an instance, which is created if it is new.

        Args:
            instance_id: Chosen by the caller; unique for the tenant.
            checkpoint_id: One that must exist, or None.
            workflow: A name; the same id under another one is a conflict.
            definition_version: Of the code; kept with the instance.

        Returns:
            A context manager that gives an `Instance`. ``instance.registered`` says what was there before:
            epoch, attempt, current checkpoint, pending signals, whether it is paused or due.

        Raises:
            AlreadyFinished: The instance has ended.
            Conflict, CheckpointNotFound, ValidationError: See the arguments.
            Draining, TooManyInstances: For new ids only.

        A session that had the instance before is superseded. Leaving the context, however it is left, ends
        the session; an instance that is still running is then ``suspended/disconnected``, and the next
        registration goes on from its checkpoints. Left by an exception (other than a cancellation), it
        counts as a crash: ``attempt`` rises, until there is progress.
        """
        port = self.port(instance_id)
        inbox = Inbox()
        message = Register(
            checkpoint_id=checkpoint_id, workflow=workflow, definition_version=definition_version
        )
        send = partial(self.link.request, instance_id, sink=inbox)
        try:
            registered = await heal(send, message, Registered)
        except BaseException:
            inbox.abandoned = True
            self.link.give_up(instance_id, inbox)
            raise
        crashed = False
        try:
            yield Instance(instance_id, port, registered, inbox)
        except Exception:
            crashed = True
            raise
        finally:
            if inbox.ended is None:
                await self.leave(port, registered.epoch, crashed)

    async def leave(self, port: InstancePort, epoch: int, crashed: bool) -> None:
        """End a session. Shielded, within `LEAVE_SECONDS`; what then fails goes on in the background."""
        told = False
        with (
            trio.CancelScope(shield=True, deadline=trio.current_time() + LEAVE_SECONDS),
            suppress(RuntaraError),
        ):
            await heal(port.request, SessionLost(epoch=epoch, crashed=crashed), ChangeReply)
            told = True
        self.link.end_session(port.instance_id, epoch, crashed, told)

    # ------------------------------------------------------------ signals

    async def send_signal(
        self,
        instance_id: str,
        type: SignalType | str,
        payload: bytes | None = None,
        *,
        idempotency_key: str | None = None,
        store_if_unknown: bool = False,
    ) -> SignalReply:
        """Send ``cancel``, ``pause``, ``resume`` or ``shutdown``.

        Args:
            payload: Kept with the signal; of a cancel it becomes the reason that is stored as the error.
            idempotency_key: Sent again under the same key, the signal is stored once and the answer is the
                same; with another body it is a `Conflict`.
            store_if_unknown: Keep it for an instance that does not exist yet.

        Returns:
            ``applied`` tells whether it took effect at once; else it waits for the session's
            acknowledgement. ``status`` is what the instance is now.

        Raises:
            InstanceNotFound, AlreadyFinished, SignalQueueFull.
        """
        if type in (SignalType.CUSTOM, "custom"):
            raise ValidationError("type", "use send_custom_signal for a signal with a key")
        signal_type = member(SignalType, type, "type")
        return await self.send(instance_id, signal_type, None, payload, idempotency_key, store_if_unknown)

    async def send_custom_signal(
        self,
        instance_id: str,
        key: str,
        payload: bytes | None = None,
        *,
        idempotency_key: str | None = None,
        store_if_unknown: bool = False,
    ) -> SignalReply:
        """Send a custom signal to a key of the instance. Arguments and errors as `send_signal`.

        It is consumed exactly once, by `Instance.wait_signal` or `Instance.ack`; signals of one key in the
        order in which they were accepted.
        """
        return await self.send(
            instance_id, SignalType.CUSTOM, key, payload, idempotency_key, store_if_unknown
        )

    async def send(
        self,
        instance_id: str,
        type: SignalType,
        key: str | None,
        payload: bytes | None,
        idempotency_key: str | None,
        store_if_unknown: bool,
    ) -> SignalReply:
        message = SendSignal(
            type=type,
            key=key,
            payload=payload,
            request_id=self.randomness.identifier() if idempotency_key is None else idempotency_key,
            store_if_unknown=store_if_unknown,
        )
        return await heal(self.port(instance_id).request, message, SignalReply)

    async def terminate(self, instance_id: str, error: str | None = None) -> ChangeReply:
        """End an instance now, whatever it does; it becomes cancelled, without compensations.

        Raises:
            InstanceNotFound, AlreadyFinished.
        """
        return await heal(self.port(instance_id).request, ForceTerminate(error=error), ChangeReply)

    # ------------------------------------------------------------ deleting

    @question
    async def purge(self, instance_id: str) -> None:
        """Delete an instance that has ended, with all its history. Its id may be used again, from the start.

        Raises:
            InstanceNotFound: There is none.
            InvalidInstanceState: It has not ended; it does not notice.
            StoreError: It may be gone. Asked again, `InstanceNotFound` says that it is.

        Cancellation: It is gone, or it is there as it was.
        """
        await self.system.purger.purge((self.tenant, check_instance_id(instance_id)))

    @question
    async def purge_finished(
        self,
        before: datetime.datetime | int,
        *,
        statuses: Collection[Status | str] = (),
        limit: int | None = None,
    ) -> int:
        """Delete instances that ended before an instant, with all their history; returns how many.

        In small batches, status by status and oldest first, so that live instances hardly notice.

        Args:
            before: An aware datetime, or microseconds of UTC; compared with the end of an instance.
            statuses: ``completed``, ``failed``, ``cancelled``; empty: all three.
            limit: How many at most; None: all there are.

        Raises:
            ValidationError: Naming the argument.
            StoreError: Some may be gone.

        Cancellation: Some may be gone, each of them whole. What is left of their history is deleted later.
        """
        before_us = instant_us(before, "before")
        chosen = {member(Status, status, "statuses") for status in statuses} or set(ENDED.values())
        if not chosen <= set(ENDED.values()):
            raise ValidationError("statuses", f"must be among {', '.join(ENDED)}")
        if limit is not None:
            check_int(limit, "limit", least=1)
        return await self.system.purger.purge_finished(self.tenant, sorted(chosen), before_us, limit)

    # ------------------------------------------------------------ seeing

    async def status(self, instance_id: str) -> InstanceView:
        """How an instance is now. An unknown one has status ``UNKNOWN`` and an error that says so."""
        return await heal(self.port(instance_id).request, GetStatus(), InstanceView)

    async def get(self, instance_id: str) -> InstanceView:
        """As `status`, but raises `InstanceNotFound` for an unknown instance."""
        view = await self.status(instance_id)
        if view.status is Status.UNKNOWN:
            raise InstanceNotFound(instance_id)
        return view

    async def get_checkpoint(self, instance_id: str, checkpoint_id: str) -> FoundCheckpoint:
        """Read a checkpoint of any instance of the tenant."""
        message = GetCheckpoint(checkpoint_id=checkpoint_id)
        return await heal(self.port(instance_id).request, message, FoundCheckpoint)

    @asynccontextmanager
    async def watch(self, instance_id: str) -> AsyncGenerator[AsyncIterator[Change], None]:
        """Follow an instance: how it is now, then every committed change, until it has ended.

        Returns:
            A context manager that gives an async iterator of `Change`, in order of revision, without gaps.

        Raises:
            InstanceNotFound: At once, or from the iterator when the instance was purged.
            WatchLagged: From the iterator, when its reader was `WATCH_BUFFER` changes behind.
            RuntimeClosed: From the iterator, when the runtime ended before the instance.
        """
        check_instance_id(instance_id)
        send, receive = trio.open_memory_channel[Change](WATCH_BUFFER)
        stream = ChangeStream(receive)

        def watcher(change: Change | RuntaraError) -> None:
            try:
                if isinstance(change, RuntaraError):
                    stream.end(change)
                    send.close()
                else:
                    send.send_nowait(change)
            except trio.WouldBlock:
                stream.end(WatchLagged(f"the watcher is {WATCH_BUFFER} changes behind"))
                send.close()
            except (trio.ClosedResourceError, trio.BrokenResourceError):
                pass  # lagged before, or the reader is just leaving

        await self.link.watch(instance_id, watcher)
        try:
            stream.begin(snapshot(await self.get(instance_id)))
            async with receive:
                yield stream
        finally:
            self.link.unwatch(instance_id, watcher)

    async def result(self, instance_id: str) -> bytes | None:
        """Wait until an instance has ended; returns its output.

        Raises:
            InstanceNotFound: At once, or because it was purged meanwhile.
            InstanceFailed: It failed or was cancelled; ``status`` and ``error`` say how.
            RuntimeClosed: The runtime ended before the instance.

        Cancellation: The instance does not notice.
        """
        while True:
            try:
                async with self.watch(instance_id) as changes:
                    async for _ in changes:
                        pass
                break
            except WatchLagged:
                continue
        view = await self.get(instance_id)
        if not view.status.is_terminal:  # purged meanwhile, and another one has its id
            raise InstanceNotFound(instance_id)
        if view.status is not Status.COMPLETED:
            raise InstanceFailed(view.status.word, view.reason.word if view.reason else None, view.error)
        return view.output

    # ------------------------------------------------------------ tokens

    @question_for_admins
    async def create_token(
        self, *, roles: Collection[str], seconds: float | None = None, name: str = ""
    ) -> Made:
        """A new token for the tenant, and its text, which is shown this once: only its hash is kept.

        Args:
            roles: ``instance``, ``worker``, ``operator``, ``admin``: what its bearer may do.
            seconds: How long it is good for; None: until it is revoked.
            name: Whose it is, for people; up to 200 characters.

        Raises:
            ValidationError: Naming the argument.
        """
        words = {role.value: role for role in Role}
        if isinstance(roles, str) or not set(roles) <= set(words):
            raise ValidationError("roles", f"must be among {', '.join(words)}")
        chosen = frozenset(words[role] for role in roles)
        tokens = await self.all_tokens()
        return await tokens.create(tenant_id=self.tenant, roles=chosen, seconds=seconds, name=name)

    @question_for_admins
    async def list_tokens(self) -> tuple[Token, ...]:
        """The tokens of the tenant, oldest first; none holds its secret."""
        tokens = await self.all_tokens()
        return tuple(token for token in tokens.listed() if token.tenant_id == self.tenant)

    @question_for_admins
    async def revoke_token(self, token_id: str) -> bool:
        """End a token of the tenant now, on open connections too; whether there was one."""
        tokens = await self.all_tokens()
        known = tokens.known.get(token_id)
        if known is None or known.token.tenant_id != self.tenant:
            return False
        return await tokens.revoke(token_id)

    async def all_tokens(self) -> Tokens:
        if self.tokens is None:
            self.tokens = Tokens(self.store, self.system.clock, self.randomness)
            await self.tokens.load()
        return self.tokens

    # ------------------------------------------------------------ the runtime itself

    @question_for_anyone
    async def health(self) -> Health:
        """Ask the store for an answer, and say how the runtime is.

        Raises:
            StoreError: There is no answer.
        """
        await self.store.check()
        report = self.system.statistics()
        since = report.writer.degraded_since
        return Health(
            degraded_seconds=None if since is None else trio.current_time() - since,
            draining=report.draining,
            live=report.instances.live,
            sessions=report.instances.sessions,
            queued=report.writer.queued,
            file_bytes=report.store.file_bytes,
            log_bytes=report.store.log_bytes,
        )

    @question
    async def violations(self, *, limit: int = DEFAULT_PAGE) -> tuple[Violation, ...]:
        """At most ``limit`` instances of the tenant that nothing will ever move; empty if all is well.

        They rest without a reason to move (`Reader.violations`), or they are running and nobody has their
        session: neither this runtime, nor the grace period of one that died.
        """
        return await self.violations_of(self.tenant, limit)

    async def all_violations(self, *, limit: int = DEFAULT_PAGE) -> tuple[Violation, ...]:
        """As `violations`, of all tenants."""
        return await self.violations_of(None, limit)

    async def violations_of(self, tenant: str | None, limit: int) -> tuple[Violation, ...]:
        found = await self.reader(tenant).violations(limit=limit)
        if len(found) == limit:
            return found
        return (*found, *await self.system.violations(tenant, limit - len(found)))

    def statistics(self) -> SystemStatistics:
        """Counts of the whole runtime: instances, sessions, the writer, deadlines, the store."""
        return self.system.statistics()


def local_runtime(
    system: System, randomness: Randomness, tenant: str, tokens: Tokens | None = None
) -> Runtime:
    """A `Runtime` over the actors of this process."""
    link = LocalLink(system, check_tenant_id(tenant))
    return Runtime(link, randomness, tenant, here=system, tokens=tokens)


def snapshot(view: InstanceView) -> Change:
    """How an instance is now, as the first change that a watcher sees."""
    return Change(
        instance_id=view.instance_id,
        revision=view.revision,
        status=view.status,
        reason=view.reason,
        checkpoint_id=view.checkpoint_id,
        kinds=("snapshot",),
    )


class ChangeStream:
    """``first``, then what comes after it, until the instance has ended. Not a generator: a reader that is
    cancelled may go on reading."""

    def __init__(self, receive: "trio.MemoryReceiveChannel[Change]") -> None:
        self.receive = receive
        self.first: Change | None = None
        self.last: Change | None = None
        self.error: RuntaraError = RuntimeClosed("the runtime is closed")

    def begin(self, first: Change) -> None:
        self.first = self.last = first

    def end(self, error: RuntaraError) -> None:
        """Why no more will come."""
        self.error = error

    def __aiter__(self) -> "ChangeStream":
        return self

    async def __anext__(self) -> Change:
        await trio.lowlevel.checkpoint()
        assert self.last is not None
        if self.first is not None:
            self.first = None
            return self.last
        if self.last.status.is_terminal:
            raise StopAsyncIteration
        self.last = await self.next_after(self.last.revision)
        return self.last

    async def next_after(self, revision: int) -> Change:
        try:
            while (change := await self.receive.receive()).revision <= revision:
                pass
        except trio.EndOfChannel:
            raise twin_of(self.error) from None
        return change
