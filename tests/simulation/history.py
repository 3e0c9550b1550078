"""What happened, in the order in which it was observed.

The simulation runs on one loop, so a counter (the *tick*) orders all observations: a call whose end has a
lower tick than another's beginning was over before the other began.
"""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import attrs
import trio

from runtara.errors import RuntaraError
from tests.simulation.clock import JumpingClock
from tests.simulation.determinism import Trace

T = TypeVar("T")


@attrs.define(eq=False, kw_only=True)
class Call:
    """One call of the API: what was asked, and what came of it."""

    life: int
    who: str
    instance: str
    name: str
    epoch: int | None
    """Of the session that asks; None for calls of anyone."""
    arguments: dict[str, Any]
    begun: int
    begun_us: int
    ended: int | None = None
    """None: never answered, because the caller or the runtime died."""
    ended_us: int = 0
    reply: Any = None
    """Of a register: the `Registered`."""
    refusal: RuntaraError | None = None
    answered: bool = False
    """Whether there is a reply (which may be None)."""

    def __str__(self) -> str:
        end = "no answer"
        if self.answered:
            end = f"-> {self.reply!r}"
        elif self.refusal is not None:
            end = f"!! {type(self.refusal).__name__}: {self.refusal}"
        epoch = "" if self.epoch is None else f" epoch {self.epoch}"
        return (
            f"[{self.begun}..{self.ended}] life {self.life} {self.who}{epoch}: "
            f"{self.name} {self.instance} {self.arguments} {end}"
        )


@attrs.frozen(kw_only=True)
class Sighting:
    """Something that was seen without asking for it: a shown signal, a watched change, a body run."""

    tick: int
    life: int
    who: str
    instance: str
    name: str
    epoch: int | None
    value: Any

    def __str__(self) -> str:
        return (
            f"[{self.tick}] life {self.life} {self.who} sees {self.name} of {self.instance}: {self.value!r}"
        )


class History:
    """Collects calls and sightings. What a dead life still says is not heard."""

    def __init__(self, clock: JumpingClock, trace: Trace) -> None:
        self.clock = clock
        self.trace = trace
        self.tick = 0
        self.life = 0
        self.calls: list[Call] = []
        self.sightings: list[Sighting] = []
        self.lines: list[object] = []
        """Everything, in order, for people."""
        self.bugs: list[str] = []
        """What may never happen, noticed on the way."""

    def next_tick(self) -> int:
        self.tick += 1
        return self.tick

    def note(self, text: str) -> None:
        """Note what the world itself does."""
        self.lines.append(f"[{self.next_tick()}] {trio.current_time():.3f} s: {text}")
        self.trace.note(text)

    def see(
        self, life: int, who: str, instance: str, name: str, value: Any, epoch: int | None = None
    ) -> None:
        if life == self.life:
            sighting = Sighting(
                tick=self.next_tick(),
                life=life,
                who=who,
                instance=instance,
                name=name,
                epoch=epoch,
                value=value,
            )
            self.sightings.append(sighting)
            self.lines.append(sighting)
            self.trace.note(str(sighting))

    async def call(
        self,
        life: int,
        who: str,
        instance: str,
        name: str,
        ask: Callable[[], Awaitable[T]],
        epoch: int | None = None,
        **arguments: Any,
    ) -> T:
        """Ask, and keep what came of it. Raises what ``ask`` raises."""
        call = Call(
            life=life,
            who=who,
            instance=instance,
            name=name,
            epoch=epoch,
            arguments=arguments,
            begun=self.next_tick(),
            begun_us=self.clock.look(),
        )
        self.calls.append(call)
        try:
            reply = await ask()
        except RuntaraError as refusal:
            self.end(call, refusal=refusal)
            raise
        except Exception as error:
            self.bugs.append(f"P11: a call raised {type(error).__name__}, no RuntaraError: {error}: {call}")
            raise
        self.end(call, reply=getattr(reply, "registered", reply), answered=True)
        return reply

    def end(self, call: Call, **outcome: Any) -> None:
        if call.life == self.life:
            call.ended, call.ended_us = self.next_tick(), self.clock.look()
            for name, value in outcome.items():
                setattr(call, name, value)
            self.lines.append(call)
            self.trace.note(str(call))

    def end_life(self) -> None:
        """The runtime is dead: nothing that it still says was ever said."""
        self.life += 1

    def answered(self, *names: str) -> list[Call]:
        return [call for call in self.calls if call.name in names and call.answered]
