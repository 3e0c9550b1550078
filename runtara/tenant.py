"""`Runtime`: everything a program can do with a runtime, for one tenant."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Final, TypeVar

import trio

from runtara.actors.letters import Key
from runtara.actors.system import System, SystemStatistics
from runtara.errors import (
    CheckpointNotFound,
    InstanceFailed,
    InstanceNotFound,
    RuntaraError,
    RuntimeClosed,
    ValidationError,
    WatchLagged,
)
from runtara.ids import check_instance_id, check_tenant_id
from runtara.instance import Inbox, Instance, heal
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
from runtara.persistence.store import (
    DEFAULT_PAGE,
    EventFilter,
    InstanceFilter,
    InstanceOrder,
    Page,
    PageRequest,
    R,
)
from runtara.randomness import Randomness
from runtara.records import (
    CheckpointRecord,
    CompensationAttemptRecord,
    ErrorRecord,
    EventRecord,
    EventType,
    InstanceRecord,
    RetryAttemptRecord,
    SignalRecord,
    SignalType,
    Status,
)
from runtara.words import member

T = TypeVar("T", bound=Reply)

WATCH_BUFFER: Final = 1000
LEAVE_SECONDS: Final = 5.0


class LocalPort:
    """A `Port` to an instance of this process."""

    __slots__ = ("key", "system")

    def __init__(self, system: System, key: Key) -> None:
        self.system = system
        self.key = key

    async def request(self, message: Request) -> Reply:
        return await self.system.request(self.key, message)

    async def compensations(self) -> CompensationView:
        loaded = await self.system.store.load(*self.key, 1)
        if loaded is None:
            raise InstanceNotFound(self.key[1])
        return CompensationView(
            state=loaded.record.compensation_state,
            reason=loaded.record.compensation_reason,
            compensations=tuple(
                sorted(loaded.compensations, key=lambda c: (c.order, c.revision), reverse=True)
            ),
        )

    async def compensation_data(self, checkpoint_id: str) -> bytes:
        record = await self.system.store.find(*self.key)
        data = None
        if record is not None:
            data = await self.system.store.compensation_data(record.row, checkpoint_id)
        if data is None:
            raise CheckpointNotFound(checkpoint_id)
        return data


class Runtime:
    """A runtime, for one tenant. Made by `open_runtime` and `Runtime.for_tenant`."""

    def __init__(self, system: System, randomness: Randomness, tenant: str) -> None:
        self.system = system
        self.randomness = randomness
        self.tenant = check_tenant_id(tenant)

    def __repr__(self) -> str:
        return f"<Runtime of tenant {self.tenant!r}>"

    def for_tenant(self, tenant: str) -> "Runtime":
        """The same runtime, for another tenant. Raises `ValidationError` for an ill-formed id."""
        return Runtime(self.system, self.randomness, tenant)

    def port(self, instance_id: str) -> LocalPort:
        return LocalPort(self.system, (self.tenant, check_instance_id(instance_id)))

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
        key = (self.tenant, check_instance_id(instance_id))
        inbox = Inbox()
        message = Register(
            checkpoint_id=checkpoint_id, workflow=workflow, definition_version=definition_version
        )
        port = LocalPort(self.system, key)
        send = partial(self.system.request, key, sink=inbox)
        try:
            registered = await heal(send, message, Registered)
        except BaseException:
            inbox.abandoned = True
            self.system.directory.abandon(key, inbox)
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

    async def leave(self, port: LocalPort, epoch: int, crashed: bool) -> None:
        """End a session. Shielded, within `LEAVE_SECONDS`; what then fails goes on in the background."""
        told = False
        with (
            trio.CancelScope(shield=True, deadline=trio.current_time() + LEAVE_SECONDS),
            suppress(RuntaraError),
        ):
            await heal(port.request, SessionLost(epoch=epoch, crashed=crashed), ChangeReply)
            told = True
        self.system.directory.detach(port.key, epoch)
        if not told:
            self.system.lose_later(port.key, epoch, crashed)

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
            InstanceNotFound: At once.
            WatchLagged: From the iterator, when its reader was `WATCH_BUFFER` changes behind.
            RuntimeClosed: From the iterator, when the runtime ended before the instance.
        """
        key = (self.tenant, check_instance_id(instance_id))
        send, receive = trio.open_memory_channel[Change](WATCH_BUFFER)
        lagged = trio.Event()

        def watcher(change: Change | None) -> None:
            if change is None:
                send.close()
                return
            try:
                send.send_nowait(change)
            except trio.WouldBlock:
                lagged.set()
                send.close()
            except (trio.ClosedResourceError, trio.BrokenResourceError):
                pass  # lagged before, or the reader is just leaving

        self.system.directory.watch(key, watcher)
        try:
            view = await self.get(instance_id)
            async with receive:
                yield ChangeStream(snapshot(view), receive, lagged)
        finally:
            self.system.directory.unwatch(key, watcher)

    async def result(self, instance_id: str) -> bytes | None:
        """Wait until an instance has ended; returns its output.

        Raises:
            InstanceNotFound: At once.
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
        if view.status is not Status.COMPLETED:
            raise InstanceFailed(view.status.word, view.reason.word if view.reason else None, view.error)
        return view.output

    # ------------------------------------------------------------ lists

    async def list_instances(
        self,
        *,
        statuses: frozenset[Status] = frozenset(),
        workflow: str | None = None,
        id_prefix: str | None = None,
        created_from_us: int | None = None,
        created_before_us: int | None = None,
        finished_from_us: int | None = None,
        finished_before_us: int | None = None,
        order: InstanceOrder = InstanceOrder.CREATED,
        limit: int = DEFAULT_PAGE,
        cursor: str | None = None,
        descending: bool = True,
    ) -> Page[InstanceRecord]:
        """One page of the tenant's instances; ``page.next`` is the cursor of the next one.

        Ranges are half open, in microseconds of UTC (`runtara.to_us` makes them from a datetime).

        Raises:
            ValidationError: ``limit`` or ``cursor``.
        """
        where = InstanceFilter(
            tenant_id=self.tenant,
            statuses=statuses,
            workflow=workflow,
            id_prefix=id_prefix,
            created_from_us=created_from_us,
            created_before_us=created_before_us,
            finished_from_us=finished_from_us,
            finished_before_us=finished_before_us,
        )
        page = PageRequest(limit=limit, cursor=cursor, descending=descending)
        return await self.system.store.list_instances(where, order, page)

    async def count_instances(
        self,
        *,
        statuses: frozenset[Status] = frozenset(),
        workflow: str | None = None,
        id_prefix: str | None = None,
        created_from_us: int | None = None,
        created_before_us: int | None = None,
        finished_from_us: int | None = None,
        finished_before_us: int | None = None,
    ) -> int:
        """How many instances `list_instances` would give in all."""
        where = InstanceFilter(
            tenant_id=self.tenant,
            statuses=statuses,
            workflow=workflow,
            id_prefix=id_prefix,
            created_from_us=created_from_us,
            created_before_us=created_before_us,
            finished_from_us=finished_from_us,
            finished_before_us=finished_before_us,
        )
        return await self.system.store.count_instances(where)

    async def list_checkpoints(
        self,
        instance_id: str,
        *,
        limit: int = DEFAULT_PAGE,
        cursor: str | None = None,
        descending: bool = True,
    ) -> Page[CheckpointRecord]:
        """One page of checkpoints; ``limit``, ``cursor`` and ``descending`` as in `list_instances`."""
        return await self.list_records(
            instance_id, CheckpointRecord, PageRequest(limit=limit, cursor=cursor, descending=descending)
        )

    async def list_events(
        self,
        instance_id: str,
        *,
        type: EventType | str | None = None,
        subtype: str | None = None,
        limit: int = DEFAULT_PAGE,
        cursor: str | None = None,
        descending: bool = True,
    ) -> Page[EventRecord]:
        """One page of events, newest first by default."""
        where = EventFilter(type=None if type is None else member(EventType, type, "type"), subtype=subtype)
        return await self.list_records(
            instance_id, EventRecord, PageRequest(limit=limit, cursor=cursor, descending=descending), where
        )

    async def list_signals(
        self,
        instance_id: str,
        *,
        limit: int = DEFAULT_PAGE,
        cursor: str | None = None,
        descending: bool = True,
    ) -> Page[SignalRecord]:
        """One page of signals, consumed ones included."""
        return await self.list_records(
            instance_id, SignalRecord, PageRequest(limit=limit, cursor=cursor, descending=descending)
        )

    async def list_errors(
        self,
        instance_id: str,
        *,
        limit: int = DEFAULT_PAGE,
        cursor: str | None = None,
        descending: bool = True,
    ) -> Page[ErrorRecord]:
        """One page of the error history."""
        return await self.list_records(
            instance_id, ErrorRecord, PageRequest(limit=limit, cursor=cursor, descending=descending)
        )

    async def list_attempts(
        self,
        instance_id: str,
        *,
        limit: int = DEFAULT_PAGE,
        cursor: str | None = None,
        descending: bool = True,
    ) -> Page[RetryAttemptRecord]:
        """One page of the retry audit trail."""
        return await self.list_records(
            instance_id, RetryAttemptRecord, PageRequest(limit=limit, cursor=cursor, descending=descending)
        )

    async def list_compensation_log(
        self,
        instance_id: str,
        *,
        limit: int = DEFAULT_PAGE,
        cursor: str | None = None,
        descending: bool = True,
    ) -> Page[CompensationAttemptRecord]:
        """One page of the compensation log."""
        return await self.list_records(
            instance_id,
            CompensationAttemptRecord,
            PageRequest(limit=limit, cursor=cursor, descending=descending),
        )

    async def list_records(
        self, instance_id: str, kind: type[R], page: PageRequest, where: EventFilter | None = None
    ) -> Page[R]:
        row = await self.row_of(instance_id)
        return await self.system.store.list_records(row, kind, page, where)

    async def count_records(self, instance_id: str, kind: type[R], where: EventFilter | None = None) -> int:
        """How many records of one kind (`runtara.CheckpointRecord`, `EventRecord` ...) there are."""
        return await self.system.store.count_records(await self.row_of(instance_id), kind, where)

    async def row_of(self, instance_id: str) -> int:
        record = await self.system.store.find(self.tenant, check_instance_id(instance_id))
        if record is None:
            raise InstanceNotFound(instance_id)
        return record.row

    # ------------------------------------------------------------ the runtime itself

    async def health(self) -> None:
        """Ask the store for an answer. Raises a `StoreError` if there is none."""
        await self.system.store.check()

    def statistics(self) -> SystemStatistics:
        """Counts of the whole runtime: instances, sessions, the writer, deadlines, the store."""
        return self.system.statistics()


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

    def __init__(
        self, first: Change, receive: "trio.MemoryReceiveChannel[Change]", lagged: trio.Event
    ) -> None:
        self.first: Change | None = first
        self.last = first
        self.receive = receive
        self.lagged = lagged

    def __aiter__(self) -> "ChangeStream":
        return self

    async def __anext__(self) -> Change:
        await trio.lowlevel.checkpoint()
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
            if self.lagged.is_set():
                raise WatchLagged(f"the watcher is {WATCH_BUFFER} changes behind") from None
            raise RuntimeClosed("the runtime is closed") from None
        return change
