"""Who uses the runtime: workers that run programs, feeders, operators, watchers.

They live as long as one life of the runtime, like any code that is embedded in it. What they know of earlier
lives they learn from the runtime, except for the ids of what they send: those are the same in every life.
"""

import json
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import trio

from runtara.errors import (
    AlreadyFinished,
    InstanceFailed,
    InstanceNotFound,
    InvalidInstanceState,
    RuntaraError,
    RuntimeClosed,
    StaleEpoch,
    StoreFailed,
    StoreRefused,
    WatchLagged,
)
from runtara.instance import Instance
from runtara.messages import WaitReply
from runtara.records import CompensationSpec, CompensationState, Reason, SignalRecord, SignalType, Status
from runtara.tenant import Runtime
from tests.simulation.history import History
from tests.simulation.options import Options
from tests.simulation.programs import Do, Ending, Program, Step

T = TypeVar("T")

NOTE: Final = "note"
"""Key of signals that no wait asks for: a worker acknowledges them one by one."""
ENDED: Final = frozenset(status.word for status in Status if status.is_terminal)


class Stage(Protocol):
    """The world, as its callers see it."""

    options: Options
    history: History
    runtime: Runtime
    finished: set[str]
    """Instances whose work is over."""
    fed: set[str]
    """Ids of the signals whose acceptance is known."""


class SessionOver(Exception):
    """The program cannot go on in this session."""


class Undo(Exception):
    """The instance is compensating."""


class Oops(Exception):
    """A bug in the code of an instance."""


class SessionGivenUp(Exception):
    """The worker changed its mind while it registered."""


class Caller:
    """Somebody with a name, dice of his own, and a habit of asking again."""

    def __init__(self, stage: Stage, who: str) -> None:
        self.stage = stage
        self.who = who
        self.runtime = stage.runtime
        self.life = stage.history.life
        self.dice = random.Random(f"{stage.options.seed} {self.life} {who}")

    async def ask(
        self, instance: str, name: str, ask: Callable[[], Awaitable[T]], epoch: int | None = None, **how: Any
    ) -> T:
        """Ask once."""
        return await self.stage.history.call(self.life, self.who, instance, name, ask, epoch, **how)

    async def insist(
        self, instance: str, name: str, ask: Callable[[], Awaitable[T]], epoch: int | None = None, **how: Any
    ) -> T:
        """Ask again, under the same ids, until the answer is final; now and then with a change of mind."""
        while True:
            patience = self.dice.random() * 0.1 if self.dice.random() < self.stage.options.cancel else 1e9
            with trio.move_on_after(patience):
                try:
                    return await self.ask(instance, name, ask, epoch, **how)
                except RuntaraError as error:
                    if not (error.retryable or isinstance(error, StoreRefused)):
                        raise
            await trio.sleep(0.01 + self.dice.random() * 0.5)

    async def pause(self, seconds: float) -> None:
        await trio.sleep(self.dice.random() * seconds)


# ---------------------------------------------------------------- workers


class Worker(Caller):
    """Runs the program of one instance, session after session, until the instance has ended."""

    def __init__(self, stage: Stage, program: Program, who: str) -> None:
        super().__init__(stage, who)
        self.program = program
        self.instance = program.instance
        self.bodies = 0

    async def run(self, *, once: bool = False) -> None:
        """Until the instance has ended, its client is to go away, or (``once``) for one session."""
        await self.pause(1.0)
        while self.instance not in self.stage.finished:
            try:
                over = await self.session()
            except AlreadyFinished:
                over = True
            except (RuntimeClosed, StoreFailed):
                return
            except (SessionGivenUp, Oops):
                over = False
            except RuntaraError as error:
                if not (error.retryable or isinstance(error, StoreRefused)):
                    raise
                over = False
            if over:
                self.stage.finished.add(self.instance)
            if once:
                return
            await self.pause(2.0)

    async def session(self) -> bool:
        """One session. Whether it was the last one."""
        async with AsyncExitStack() as stack:
            opening = self.runtime.register(self.instance)
            enter = partial(stack.enter_async_context, opening)
            instance = await self.enter(enter)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.listen, instance, name=f"listen {self.instance}")
                over = await self.play(instance)
                nursery.cancel_scope.cancel()
            inbox = instance.inbox
            held = tuple(sorted(inbox.signals)) if inbox.ended is None else None
            self.stage.history.see(self.life, self.who, self.instance, "leave", held, instance.epoch)
            if not over and self.dice.random() < self.stage.options.body * 3:
                raise Oops
            return over

    async def enter(self, enter: Callable[[], Awaitable[Instance]]) -> Instance:
        """Register, now and then with a change of mind."""
        patience = self.dice.random() * 0.1 if self.dice.random() < self.stage.options.cancel else 1e9
        with trio.move_on_after(patience):
            return await self.ask(self.instance, "register", enter)
        raise SessionGivenUp("the registration was given up")

    async def play(self, instance: Instance) -> bool:
        """Run the program, or undo what was done. Whether the instance is done with."""
        try:
            try:
                if instance.registered.compensating:
                    raise Undo
                for step in self.program.steps:
                    await self.until_done(instance, step)
                return await self.finish(instance)
            except Undo:
                return await self.undo(instance)
        except SessionOver:
            return False
        except (StaleEpoch, RuntimeClosed, StoreFailed):
            return False
        except AlreadyFinished:
            return True

    async def until_done(self, instance: Instance, step: Step) -> None:
        """Do a step; when it is refused because the instance rests, wait until it goes on."""
        while True:
            await self.pause(0.3)
            if self.dice.random() < self.stage.options.body:
                raise SessionOver
            try:
                if await self.do(instance, step):
                    return
            except InvalidInstanceState as error:
                if error.details["actual"] in ENDED:
                    raise AlreadyFinished(str(error.details["actual"]), None, None) from None
                await self.until_running(instance)

    async def until_running(self, instance: Instance) -> None:
        """A paused instance may be resumed in this session; one that rests for another reason may not."""
        while True:
            view = await self.insist(self.instance, "status", instance.status)
            if view.status is Status.RUNNING and view.epoch == instance.epoch:
                return
            paused = view.status is Status.SUSPENDED and view.reason is Reason.PAUSED
            if instance.inbox.ended is not None or not paused or self.dice.random() < 0.2:
                raise SessionOver
            await self.pause(1.0)

    async def do(self, instance: Instance, step: Step) -> bool:
        """Do one step. Whether it is done."""
        match step.do:
            case Do.STEP | Do.SAVE:
                await self.step(instance, step)
            case Do.SLEEP:
                return await self.sleep(instance, step.name, step.seconds)
            case Do.WAIT:
                return await self.wait(instance, step.name, step.key, None)
            case Do.WAIT_OR_GIVE_UP:
                return await self.wait(instance, step.name, step.key, step.seconds)
            case Do.BOTH:
                return await self.both(instance, step)
            case Do.SUSPEND | Do.NAP:
                await self.suspend(instance, step)
            case Do.MANY:
                return await self.many(instance, step)
            case Do.UNDOABLE:
                spec = CompensationSpec(step_id="undo", data=b"how", order=len(step.name))
                save = partial(instance.checkpoint, step.name, b"done", compensation=spec)
                await self.say(instance, "checkpoint", save, checkpoint_id=step.name, state=b"done")
            case Do.UNNAMED:
                await self.say(instance, "unnamed sleep", partial(instance.sleep, step.seconds / 2))
                await self.say(instance, "poll", partial(instance.poll_signals, step.name))
            case _:
                await self.report(instance, step)
        return True

    async def say(self, instance: Instance, name: str, ask: Callable[[], Awaitable[T]], **how: Any) -> T:
        return await self.insist(self.instance, name, ask, instance.epoch, **how)

    def body(self, instance: Instance, name: str) -> bytes:
        """The body of a step: it runs, and its result is like no other."""
        self.bodies += 1
        self.stage.history.see(self.life, self.who, self.instance, "body", name, instance.epoch)
        return f"{name} by {self.who} in life {self.life}, {instance.epoch}.{self.bodies}".encode()

    async def step(self, instance: Instance, step: Step) -> None:
        if step.do is Do.STEP:
            look = partial(instance.get_checkpoint, step.name)
            found = await self.insist(self.instance, "get_checkpoint", look, checkpoint_id=step.name)
            if found.found:
                return
        state = self.body(instance, step.name)
        save = partial(instance.checkpoint, step.name, state)
        reply = await self.say(instance, "checkpoint", save, checkpoint_id=step.name, state=state)
        if reply.signal is not None and self.dice.random() < 0.5:
            await self.obey(instance, reply.signal)

    async def sleep(self, instance: Instance, name: str, seconds: float) -> bool:
        ask = partial(instance.sleep, seconds, checkpoint_id=name, state=b"zzz")
        reply = await self.say(instance, "sleep", ask, checkpoint_id=name, seconds=seconds)
        return await self.woken(instance, reply)

    async def wait(self, instance: Instance, name: str, key: str, timeout: float | None) -> bool:
        ask = partial(instance.wait_signal, key, checkpoint_id=name, timeout=timeout)
        reply = await self.say(instance, "wait_signal", ask, checkpoint_id=name, key=key, timeout=timeout)
        return await self.woken(instance, reply)

    async def woken(self, instance: Instance, reply: WaitReply) -> bool:
        """Obey the signal that ended a wait early. Whether the wait is over for good."""
        if reply.interrupted:
            assert reply.signal is not None
            await self.obey(instance, reply.signal)
        return not reply.interrupted

    async def both(self, instance: Instance, step: Step) -> bool:
        """A sleep and a wait at once; what comes of a refusal is found out afterwards."""
        done: list[bool] = []

        async def note(half: Awaitable[bool]) -> None:
            try:
                done.append(await half)
            except (RuntaraError, SessionOver, Undo):
                done.append(False)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(note, self.sleep(instance, f"{step.name}-sleep", step.seconds))
            nursery.start_soon(note, self.wait(instance, step.name, step.key, step.seconds))
        if not all(done):
            await self.until_running(instance)
        return all(done)

    async def many(self, instance: Instance, step: Step) -> bool:
        """Several calls at once; what comes of a refusal is found out afterwards."""
        refused: list[RuntaraError] = []

        async def note(call: Callable[[Instance, Step], Awaitable[object]], part: Step) -> None:
            try:
                await call(instance, part)
            except RuntaraError as error:
                refused.append(error)
            except (SessionOver, Undo):
                pass

        async with trio.open_nursery() as nursery:
            for number, do in enumerate((Do.SAVE, Do.EMIT, Do.STEP, Do.SAVE, Do.RETRY, Do.ERROR)):
                part = Step(do=do, name=f"{step.name}-{number}", key=step.key, seconds=step.seconds)
                call = self.step if do in (Do.SAVE, Do.STEP) else self.report
                nursery.start_soon(note, call, part)
        if refused:
            await self.until_running(instance)
        return not refused

    async def suspend(self, instance: Instance, step: Step) -> None:
        """Leave; whoever comes back later finds the same wait under the same name, and waits for its end."""
        mark = f"{step.name}-left"
        look = partial(instance.get_checkpoint, mark)
        found = await self.insist(self.instance, "get_checkpoint", look, checkpoint_id=mark)
        if not found.found:
            await self.say(
                instance,
                "checkpoint",
                partial(instance.checkpoint, mark, b"x"),
                checkpoint_id=mark,
                state=b"x",
            )
            ask = partial(instance.suspend)
            if step.do is Do.SUSPEND:
                ask = partial(instance.suspend, seconds=step.seconds, checkpoint_id=step.name, state=b"zzz")
            await self.say(instance, "suspend", ask, checkpoint_id=step.name, seconds=step.seconds)
            raise SessionOver
        if step.do is Do.SUSPEND:
            while not await self.sleep(instance, step.name, step.seconds):
                await self.until_running(instance)

    async def report(self, instance: Instance, step: Step) -> None:
        """What has no bearing on how the instance goes on."""
        match step.do:
            case Do.EMIT:
                await self.tell(instance, "step_debug_start", step)
                ask = partial(instance.emit, "news", step.name.encode(), request_id=f"emit {step.name}")
                await self.say(instance, "emit", ask, payload=step.name.encode(), request_id=step.name)
                await self.tell(instance, "step_debug_end", step)
            case Do.ERROR:
                ask_error = partial(instance.record_error, "E1", step.name)
                await self.say(instance, "record_error", ask_error, message=step.name)
            case Do.RETRY:
                for attempt in (1, 2):
                    ask_retry = partial(instance.record_retry, step.name, attempt, error="again")
                    await self.say(
                        instance, "record_retry", ask_retry, checkpoint_id=step.name, attempt=attempt
                    )
            case Do.HEARTBEAT:
                await self.say(instance, "heartbeat", instance.heartbeat)

    async def tell(self, instance: Instance, subtype: str, step: Step) -> None:
        """Tell of a step: sometimes under an id of the call's own, sometimes not at all."""
        if self.dice.random() < 0.2:
            return
        scope, error = ("scope", None) if step.seconds < 1 else (None, "broken")
        payload = json.dumps({"step_id": step.key, "scope_id": scope, "error": error}).encode()
        if self.dice.random() < 0.5:
            ask = partial(instance.emit, subtype, payload)
            await self.say(instance, "tell", ask, payload=payload)
        else:
            request_id = f"{subtype} {step.name}"
            ask = partial(instance.emit, subtype, payload, request_id=request_id)
            await self.say(instance, "emit", ask, payload=payload, request_id=request_id)

    async def finish(self, instance: Instance) -> bool:
        """End, as the program has it. Whether the instance is done with."""
        ending = self.program.ending
        if ending is Ending.ABANDON:
            return True
        while True:
            if ending is Ending.COMPLETE:
                reply = await self.say(instance, "complete", partial(instance.complete, b"done"))
            else:
                reply = await self.say(instance, "fail", partial(instance.fail, "broken"))
            if reply.status.is_terminal:
                return True
            if reply.reason is Reason.COMPENSATING:
                raise Undo
            await self.until_running(instance)

    async def undo(self, instance: Instance) -> bool:
        """Run the compensations that are left. Whether the instance is done with."""
        name = self.instance
        while True:
            view = await self.insist(name, "compensations", instance.compensation.view)
            if not view.pending:
                break
            step = next(c for c in view.compensations if c.state <= CompensationState.TRIGGERED).checkpoint_id
            await self.pause(0.3)
            try:
                attempt = await self.say(instance, "undo", partial(instance.compensation.start, step))
                success = self.dice.random() < 0.7
                finish = partial(
                    instance.compensation.finish,
                    step,
                    attempt,
                    success=success,
                    final=self.dice.random() < 0.7,
                )
                await self.say(instance, "undone", finish)
            except InvalidInstanceState:
                await self.until_running(instance)
        status = (await self.insist(name, "status", instance.status)).status
        if not status.is_terminal:
            raise SessionOver
        return True

    # ------------------------------------------------------------ signals

    async def obey(self, instance: Instance, signal: SignalRecord) -> None:
        ack = partial(instance.ack, signal.signal_id)
        reply = await self.say(instance, "ack", ack, signal_id=signal.signal_id, type=signal.type)
        if reply.status.is_terminal:
            raise AlreadyFinished(reply.status.word, None, None)
        if reply.compensating:
            raise Undo
        if signal.type is SignalType.SHUTDOWN:
            raise SessionOver

    async def listen(self, instance: Instance) -> None:
        """Take note of every signal that is pushed, and obey some of them beside the program."""
        try:
            async for signal in instance.signals():
                self.stage.history.see(
                    self.life, self.who, self.instance, "shown", signal.signal_id, instance.epoch
                )
                if signal.key == NOTE or (signal.type is not SignalType.CUSTOM and self.dice.random() < 0.7):
                    await self.pause(0.5)
                    await self.obey(instance, signal)
        except (StaleEpoch, AlreadyFinished, RuntimeClosed, StoreFailed, SessionOver, Undo):
            return


# ---------------------------------------------------------------- those outside


class Feeder(Caller):
    """Sends one custom signal, until it knows that it was accepted; now and then once more."""

    async def run(self, instance: str, key: str, name: str) -> None:
        await self.pause(self.stage.options.horizon * 0.7)
        payload = f"{name} for {instance}".encode()
        again = self.dice.random() < 0.3
        in_advance = random.Random(f"{self.stage.options.seed} {name}").random() < 0.3
        send = partial(
            self.runtime.send_custom_signal,
            instance,
            key,
            payload,
            idempotency_key=name,
            store_if_unknown=in_advance,
        )
        while True:
            try:
                await self.insist(instance, "send", send, key=key, payload=payload, idempotency_key=name)
            except InstanceNotFound:
                await self.pause(1.0)
                continue
            except AlreadyFinished:
                break
            except (RuntimeClosed, StoreFailed):
                return
            if not again:
                break
            again = False
            await self.pause(3.0)
        self.stage.fed.add(f"{instance} {name}")


class Operator(Caller):
    """Meddles, until the trouble is over."""

    async def run(self, instances: list[str]) -> None:
        while True:
            await trio.sleep(self.dice.expovariate(1.0))
            try:
                await self.act(self.dice.choice(instances))
            except (RuntimeClosed, StoreFailed):
                return
            except (InstanceNotFound, AlreadyFinished, InstanceFailed):
                pass

    async def act(self, instance: str) -> None:
        match self.dice.choices(
            ("pause", "resume", "cancel", "shutdown", NOTE, "status", "lists", "terminate"),
            (3, 4, 0.4, 0.4, 5, 2, 1, 0.2),
        )[0]:
            case "status":
                await self.insist(instance, "status", partial(self.runtime.get, instance))
            case "lists":
                await self.look(instance)
            case "terminate":
                await self.insist(instance, "terminate", partial(self.runtime.terminate, instance, "enough"))
            case word:
                await self.send(instance, word)

    async def send(self, instance: str, word: str) -> None:
        """A signal, with an idempotency key or without."""
        name = f"{word} {self.dice.getrandbits(40)}"
        key = name if self.dice.random() < 0.6 else None
        payload = name.encode()
        if word == NOTE:
            send = partial(
                self.runtime.send_custom_signal,
                instance,
                NOTE,
                payload,
                idempotency_key=key,
                store_if_unknown=self.dice.random() < 0.3,
            )
        else:
            send = partial(self.runtime.send_signal, instance, word, payload, idempotency_key=key)
        how: dict[str, Any] = {"key": NOTE if word == NOTE else None, "type": word, "payload": payload}
        await self.insist(instance, "send", send, idempotency_key=key, **how)
        if key is not None and self.dice.random() < 0.3:
            await self.pause(2.0)
            await self.insist(instance, "send", send, idempotency_key=key, **how)

    async def look(self, instance: str) -> None:
        pages = (self.runtime.list_checkpoints, self.runtime.list_signals, self.runtime.list_events)
        page = self.dice.choice(pages)
        await self.insist(instance, page.__name__, partial(page, instance))


class Peacemaker(Caller):
    """When the trouble is over: resumes whatever is paused, so that everything can end."""

    async def run(self, instances: list[str]) -> None:
        while True:
            for instance in instances:
                try:
                    view = await self.insist(instance, "status", partial(self.runtime.get, instance))
                    pending = await self.insist(
                        instance, "list_signals", partial(self.runtime.list_signals, instance)
                    )
                    paused = any(
                        s.type is SignalType.PAUSE and s.acknowledged_us is None for s in pending.items
                    )
                    if not view.status.is_terminal and (paused or view.reason is Reason.PAUSED):
                        resume = partial(self.runtime.send_signal, instance, "resume")
                        await self.insist(
                            instance,
                            "send",
                            resume,
                            key=None,
                            type="resume",
                            payload=None,
                            idempotency_key=None,
                        )
                except (InstanceNotFound, AlreadyFinished):
                    continue
                except (RuntimeClosed, StoreFailed):
                    return
            await trio.sleep(2.0)


class Watcher(Caller):
    """Follows an instance to its end, with breaks, and keeps all that it sees."""

    walks = 0

    async def run(self, instance: str) -> None:
        while True:
            try:
                patience = self.dice.choice((0.5, 3.0, 1e9))
                with trio.move_on_after(patience):
                    async with self.runtime.watch(instance) as changes:
                        self.walks += 1
                        async for change in changes:
                            who = f"{self.who} {self.walks}"
                            self.stage.history.see(self.life, who, instance, "change", change)
                    return
                await self.pause(2.0)
            except WatchLagged:
                continue
            except (RuntimeClosed, StoreFailed):
                return
            except RuntaraError:
                await self.pause(1.0)


class Waiter(Caller):
    """Waits for the result of an instance."""

    async def run(self, instance: str) -> None:
        await self.pause(3.0)
        while True:
            try:
                await self.insist(instance, "result", partial(self.runtime.result, instance))
                return
            except InstanceNotFound:
                await self.pause(1.0)
            except (InstanceFailed, RuntimeClosed, StoreFailed):
                return
