"""The writer process of the crash test: many instances that do everything at once, and an operator.

What an instance does is chosen by a seeded random source, but what it writes under a name tells in which life
of the process it was written: so two versions of one name are never the same bytes.

Plain instances (ids ``p...``) only append, and never leave their session: their revisions can be checked
exactly. The others (ids ``m...``) do the rest as well: sleep, wait, obey, leave, fail, undo and end.
"""

import logging
import random
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Final

import attrs
import trio

import runtara
from runtara import Instance, RuntaraError, Runtime, SignalType, Status
from tests.crash_ledger import Kind, Pen, Value, digest

TENANTS: Final = ("default", "other")
PLAIN: Final = 6
MIXED: Final = 18
NAMES: Final = 500
KEYS: Final = 3

EXPECTED: Final = (
    runtara.InvalidInstanceState,
    runtara.AlreadyFinished,
    runtara.StaleEpoch,
    runtara.InstanceNotFound,
    runtara.Draining,
    runtara.RuntimeClosed,
    runtara.SignalQueueFull,
)
"""Refusals that the load provokes. Any other error is trouble."""


@attrs.frozen(kw_only=True)
class Life:
    """One life of the writer process."""

    path: str
    """Of the database."""
    acks: str
    """Of the file for acknowledgements."""
    seed: int
    number: int
    seconds: float
    """After which it closes the runtime by itself."""
    drain_seconds: float


class Complaint(logging.Handler):
    """An error in the product's log is trouble."""

    def __init__(self, pen: Pen) -> None:
        super().__init__(logging.ERROR)
        self.pen = pen

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + "".join(traceback.format_exception(*record.exc_info))
        self.pen.note(Kind.TROUBLE, (text,))


def run_life(life: Life) -> None:
    """Be the writer until the end of the life, or until killed."""
    pen = Pen(life.acks)
    logging.getLogger("runtara").addHandler(Complaint(pen))
    try:
        trio.run(work, life, pen)
    except BaseException:
        pen.note(Kind.TROUBLE, (traceback.format_exc(),))


async def work(life: Life, pen: Pen) -> None:
    url = f"sqlite:///{life.path}"
    async with runtara.open_runtime(url, drain_seconds=life.drain_seconds, heartbeat_seconds=0.0) as root:
        with trio.move_on_after(life.seconds):
            async with trio.open_nursery() as nursery:
                for at, tenant in enumerate(TENANTS):
                    crew = Crew(root.for_tenant(tenant), life, pen, random.Random(life.seed * 7 + at))
                    nursery.start_soon(crew.work)


class Crew:
    """All that one tenant does in one life."""

    def __init__(self, runtime: Runtime, life: Life, pen: Pen, rng: random.Random) -> None:
        self.runtime = runtime
        self.life = life
        self.pen = pen
        self.rng = rng
        self.living: list[str] = []
        """Ids of mixed instances, for the operator."""
        self.made = 0

    async def work(self) -> None:
        """Take the instances that have not ended, make new ones up to the number, and go."""
        found = await self.runtime.list_instances(
            statuses=frozenset({Status.PENDING, Status.RUNNING, Status.SUSPENDED}), limit=PLAIN + MIXED
        )
        ids = [record.instance_id for record in found.items]
        plain = [i for i in ids if i.startswith("p")]
        self.living = [i for i in ids if i.startswith("m")]
        plain += [self.new_id("p") for _ in range(PLAIN // 2 - len(plain))]
        self.living += [self.new_id("m") for _ in range(MIXED // 2 - len(self.living))]
        async with trio.open_nursery() as nursery:
            for instance_id in plain:
                nursery.start_soon(self.live_plainly, instance_id)
            for slot in range(len(self.living)):
                nursery.start_soon(self.live_slot, slot)
            nursery.start_soon(self.operate)

    def new_id(self, prefix: str) -> str:
        self.made += 1
        return f"{prefix}-{self.life.number}-{self.made}"

    # ------------------------------------------------------------ saying what was acknowledged

    def name(self, instance_id: str) -> str:
        return f"{self.runtime.tenant}/{instance_id}"

    def note(self, kind: Kind, instance_id: str, *key: str | int, value: Value = ()) -> None:
        self.pen.note(kind, (self.name(instance_id), *key), value)

    def trouble(self, what: str) -> None:
        self.pen.note(Kind.TROUBLE, (what,))

    def data(self, what: str) -> bytes:
        """Bytes that no other call writes; now and then many."""
        size = self.rng.choice((10, 100, 100, 100, 1000, 30_000 if self.rng.random() < 0.1 else 200))
        tail = self.rng.randbytes(size)
        return f"{what}/{self.life.number}/".encode() + tail

    async def attempt(self, act: Callable[[], Awaitable[None]]) -> bool:
        """Do it; whether it was not refused."""
        try:
            await act()
        except EXPECTED:
            return False
        except RuntaraError:
            self.trouble(traceback.format_exc())
            return False
        return True

    # ------------------------------------------------------------ lives of instances

    async def live_plainly(self, instance_id: str) -> None:
        async def session() -> None:
            async with self.runtime.register(instance_id) as instance:
                self.pen.note(Kind.SESSION, (instance.epoch,), (self.name(instance_id),))
                while True:
                    await self.append(instance)

        await self.attempt(session)

    async def live_slot(self, slot: int) -> None:
        """One instance after the other: as often as one has ended, a new one."""
        while True:
            if await self.ended(self.living[slot]):
                self.living[slot] = self.new_id("m")
            await trio.sleep(0.001 * self.rng.random())

    async def ended(self, instance_id: str) -> bool:
        """Hold one session. Whether the instance has ended."""

        async def session() -> None:
            async with self.runtime.register(instance_id) as instance:
                self.pen.note(Kind.SESSION, (instance.epoch,), (self.name(instance_id),))
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.attempt, lambda: self.obey(instance))
                    for _ in range(self.rng.randrange(40)):
                        if not await self.attempt(lambda: self.act(instance)):
                            break
                    await self.attempt(lambda: self.recover(instance))
                    nursery.cancel_scope.cancel()

        try:
            await session()
        except runtara.AlreadyFinished:
            return True
        except EXPECTED:
            return False
        except RuntaraError:
            self.trouble(traceback.format_exc())
        return False

    async def recover(self, instance: Instance) -> None:
        """Whatever keeps the instance from running: undo what is to be undone, resume what is paused."""
        view = await instance.status()
        if view.record.compensating:
            await self.undo(instance)
        elif view.record.paused:
            await self.send(instance.instance_id, SignalType.RESUME, None)

    # ------------------------------------------------------------ what an instance does

    async def act(self, instance: Instance) -> None:
        acts = (self.append, self.append, self.append, self.nap, self.wait, self.end)
        weights = (5, 5, 5, 3, 6, 1)
        (act,) = self.rng.choices(acts, weights)
        await act(instance)

    async def append(self, instance: Instance) -> None:
        acts = (self.save, self.emit, self.record_attempt, self.record_error, self.look)
        (act,) = self.rng.choices(acts, (8, 3, 1, 1, 1))
        await act(instance)

    async def save(self, instance: Instance) -> None:
        name = f"c{self.rng.randrange(NAMES)}"
        undo = None
        if instance.instance_id.startswith("m") and self.rng.random() < 0.05:
            undo = runtara.CompensationSpec(
                step_id=f"undo-{name}", data=self.data("undo"), order=self.rng.randrange(5)
            )
        reply = await instance.checkpoint(name, self.data(name), compensation=undo)
        assert reply.state is not None
        self.note(Kind.CHECKPOINT, instance.instance_id, name, value=(digest(reply.state),))
        if undo is not None and not reply.found:
            value = (undo.step_id, undo.order, digest(undo.data))
            self.note(Kind.COMPENSATION, instance.instance_id, name, value=value)

    async def emit(self, instance: Instance) -> None:
        request_id = f"e{self.life.number}-{instance.request_id()}"
        payload = self.data("event")
        for _ in range(2 if self.rng.random() < 0.1 else 1):
            reply = await instance.emit("tick", payload, request_id=request_id)
            value = (reply.event_id, "tick", digest(payload))
            self.note(Kind.EVENT, instance.instance_id, request_id, value=value)

    async def record_attempt(self, instance: Instance) -> None:
        name, attempt = f"r{self.rng.randrange(NAMES)}", self.rng.randrange(1, 4)
        await instance.record_retry(name, attempt, category="transient", error="again")
        self.note(Kind.ATTEMPT, instance.instance_id, name, attempt, value=("transient",))

    async def record_error(self, instance: Instance) -> None:
        text = self.data("error").hex()
        error_id = await instance.record_error("broken", text)
        self.note(Kind.ERROR, instance.instance_id, error_id, value=("broken", digest(text.encode())))

    async def look(self, instance: Instance) -> None:
        """What was read is as good as acknowledged."""
        name = f"c{self.rng.randrange(NAMES)}"
        reply = await instance.get_checkpoint(name)
        if reply.state is not None:
            self.note(Kind.CHECKPOINT, instance.instance_id, name, value=(digest(reply.state),))

    async def nap(self, instance: Instance) -> None:
        seconds = self.rng.choice((0.0, 0.002, 0.01, 0.05))
        if self.rng.random() < 0.2:
            await instance.sleep(seconds)
            return
        name = f"s{self.rng.randrange(NAMES)}"
        reply = await instance.sleep(seconds, checkpoint_id=name, state=self.data(name))
        self.note_wait(instance, name, reply)
        if not reply.interrupted:
            found = await instance.get_checkpoint(name)
            self.note(Kind.CHECKPOINT, instance.instance_id, name, value=(digest(found.state or b""),))

    async def wait(self, instance: Instance) -> None:
        number = self.rng.randrange(NAMES)
        name, key = f"w{number}", f"k{number % KEYS}"
        reply = await instance.wait_signal(key, checkpoint_id=name, timeout=0.02)
        self.note_wait(instance, name, reply)
        if reply.received:
            self.note(Kind.CHECKPOINT, instance.instance_id, name, value=(digest(reply.payload or b""),))
            if reply.signal_id is not None:
                self.note(Kind.CONSUMED, instance.instance_id, reply.signal_id, value=(name,))

    def note_wait(self, instance: Instance, name: str, reply: runtara.WaitReply) -> None:
        self.note(Kind.DEADLINE, instance.instance_id, name, value=(reply.deadline_us,))
        if reply.outcome is None:
            return
        self.note(Kind.OUTCOME, instance.instance_id, name, value=(reply.outcome.word,))
        early = (reply.deadline_us or 0) - time.time_ns() // 1000
        if not reply.received and early > 0:
            self.trouble(f"{self.name(instance.instance_id)}: {name} ended {early} us before its deadline")

    async def obey(self, instance: Instance) -> None:
        """Acknowledge what is pushed; half of the custom signals are left to the waits."""
        async for signal in instance.signals():
            if signal.type is SignalType.CUSTOM and self.rng.random() < 0.5:
                continue
            reply = await instance.ack(signal)
            if reply.applied:
                self.note(Kind.CONSUMED, instance.instance_id, signal.signal_id, value=("ack",))
                self.note_end(instance.instance_id, reply.status)

    async def end(self, instance: Instance) -> None:
        how = self.rng.random()
        if how < 0.4:
            output = self.data("output")
            reply = await instance.complete(output)
            if reply.applied:
                self.note(Kind.OUTPUT, instance.instance_id, value=(digest(output),))
        elif how < 0.7:
            reply = await instance.fail("it broke")
        else:
            name = f"s{self.rng.randrange(NAMES)}"
            found = await instance.get_checkpoint(name)
            if found.found:
                return
            reply = await instance.suspend(seconds=0.01, checkpoint_id=name, state=self.data(name))
        if reply.applied:
            self.note_end(instance.instance_id, reply.status)

    def note_end(self, instance_id: str, status: Status) -> None:
        if status.is_terminal:
            self.note(Kind.ENDED, instance_id, value=(status.word,))

    async def undo(self, instance: Instance) -> None:
        view = await instance.compensation.view()
        for record in view.compensations:
            if record.state.word in ("pending", "triggered"):
                attempt = await instance.compensation.start(record.checkpoint_id)
                success = self.rng.random() < 0.8
                reply = await instance.compensation.finish(record.checkpoint_id, attempt, success=success)
                key = (record.checkpoint_id, attempt)
                self.note(Kind.UNDONE, instance.instance_id, *key, value=(success,))
                self.note_end(instance.instance_id, reply.status)

    # ------------------------------------------------------------ the operator

    async def operate(self) -> None:
        while True:
            instance_id = self.rng.choice(self.living)
            type = SignalType.CUSTOM if self.rng.random() < 0.93 else self.rng.choice(CONTROLS)
            key = f"k{self.rng.randrange(KEYS)}" if type is SignalType.CUSTOM else None
            await self.attempt(lambda: self.send(instance_id, type, key))  # noqa: B023
            await trio.sleep(0.0005)

    async def send(self, instance_id: str, type: SignalType, key: str | None) -> None:
        self.made += 1
        idempotency_key, payload = f"op{self.life.number}-{self.made}", self.data("signal")
        for _ in range(2 if self.rng.random() < 0.2 else 1):
            if key is None:
                reply = await self.runtime.send_signal(
                    instance_id, type, payload, idempotency_key=idempotency_key
                )
            else:
                reply = await self.runtime.send_custom_signal(
                    instance_id, key, payload, idempotency_key=idempotency_key
                )
            if key is not None:  # of the others, a pending one of an earlier payload may answer
                value = (reply.signal_id, type.word, key, digest(payload))
                self.note(Kind.SIGNAL, instance_id, idempotency_key, value=value)
            self.note_end(instance_id, reply.status)


CONTROLS: Final = (SignalType.PAUSE, SignalType.RESUME, SignalType.CANCEL, SignalType.SHUTDOWN)
