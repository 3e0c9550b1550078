"""Who breaks the runtime: one task that does harm at random moments, until the trouble is over."""

import random
from collections.abc import Callable

import trio

from runtara.tenant import Runtime
from runtara.testing.faulty import FaultyStore
from tests.simulation.clock import JumpingClock
from tests.simulation.history import History
from tests.simulation.options import Kind, Options

CHILDREN = ("writer", "instances", "wake", "recovery")
RESTARTS = 3
"""Kills of the tree in one life, at most: more of them in a minute stop the runtime, as they should."""
WEIGHTS = {
    Kind.OUTAGE: 2,
    Kind.KILL_ACTOR: 6,
    Kind.KILL_TREE: 2,
    Kind.HANDLER: 2,
    Kind.CRASH: 2,
    Kind.DRAIN: 1,
    Kind.FORWARD: 1,
    Kind.BACKWARD: 1,
    Kind.TAKEOVER: 2,
}
ENDS_THE_LIFE = (Kind.CRASH, Kind.DRAIN)


class Chaos:
    """Does harm to one life of the runtime."""

    def __init__(
        self,
        options: Options,
        history: History,
        clock: JumpingClock,
        runtime: Runtime,
        store: FaultyStore,
        take_over: Callable[[str], None],
    ) -> None:
        self.options = options
        self.history = history
        self.clock = clock
        self.runtime = runtime
        self.store = store
        self.take_over = take_over
        self.dice = random.Random(f"chaos {options.seed} {history.life}")
        self.kills = 0

    async def run(self, instances: list[str], until: float) -> Kind | None:
        """Do harm until ``until``, or until the life is to end; then how."""
        kinds = [kind for kind in WEIGHTS if kind in self.options.kinds]
        while kinds:
            moment = trio.current_time() + self.dice.expovariate(self.options.faults_per_second)
            if moment >= until:
                break
            await trio.sleep_until(moment)
            kind = self.dice.choices(kinds, [WEIGHTS[kind] for kind in kinds])[0]
            if kind in ENDS_THE_LIFE:
                return kind
            await self.harm(kind, self.dice.choice(instances))
        await trio.sleep_until(until)
        return None

    async def harm(self, kind: Kind, instance: str) -> None:
        self.history.note(f"fault: {kind.value} {instance}")
        self.store.injected[kind.value] += 1
        match kind:
            case Kind.KILL_ACTOR:
                self.runtime.system.directory.kill((self.runtime.tenant, instance))
            case Kind.KILL_TREE if self.kills < RESTARTS:
                self.kills += 1
                self.runtime.system.supervisor.kill(self.dice.choice(CHILDREN))
            case Kind.HANDLER:
                self.clock.readers_fail = 1
            case Kind.FORWARD:
                self.clock.jump(self.dice.choice((0.5, 5.0, 3600.0)))
            case Kind.BACKWARD:
                self.clock.jump(-self.dice.choice((0.5, 5.0)))
            case Kind.TAKEOVER:
                self.take_over(instance)
            case Kind.OUTAGE:
                self.store.outage = True
                await trio.sleep(self.dice.choice((0.2, 1.0, 4.0, 8.0)))
                self.store.outage = False
            case _:
                pass
