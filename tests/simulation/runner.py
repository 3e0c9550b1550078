"""Runs worlds by their seed, and says what was wrong with them."""

import gc
from collections import Counter

import attrs

from tests.simulation.checks import violations
from tests.simulation.determinism import Trace, simulate
from tests.simulation.options import Kind, Options, draw
from tests.simulation.world import Evidence, World, leaves


@attrs.frozen(kw_only=True)
class Verdict:
    """What came of one world."""

    options: Options
    digest: str
    steps: int
    wrong: list[str]
    """Broken promises, in words; empty: all were kept."""
    calls: int
    injected: Counter[str]
    lives: int
    lines: list[object]
    """The history, for people."""

    def __str__(self) -> str:
        without = sorted(k.value for k in set(Kind) - self.options.kinds)
        switched = f" --without {','.join(without)}" if without else ""
        return "\n".join(
            [
                f"seed {self.options.seed} broke {len(self.wrong)} promise(s), digest {self.digest}",
                *(f"  {wrong}" for wrong in self.wrong[:10]),
                f"  options: {self.options}",
                f"  replay: python -m tests.simulation --seed {self.options.seed}{switched} --verbose",
            ]
        )


def run_seed(seed: int, without: frozenset[Kind] = frozenset(), *, keep: bool = False) -> Verdict:
    """Run the world of one seed."""
    return run_options(draw(seed, without), keep=keep)


def run_options(options: Options, *, keep: bool = False) -> Verdict:
    trace = Trace(keep=keep)
    worlds: list[World] = []

    async def live() -> Evidence:
        worlds.append(World(options, trace))
        return await worlds[0].run()

    wrong: list[str] = []
    try:
        evidence = simulate(options.seed, trace, live)
        wrong = violations(evidence)
    except Exception as error:
        wrong = [*worlds[0].history.bugs, *(f"{type(e).__name__}: {e}" for e in leaves(error))]
    world = worlds[0]
    digest, steps = trace.digest, trace.steps
    gc.collect(0)  # all that the world left behind is young: it ran without a collector
    return Verdict(
        options=options,
        digest=digest,
        steps=steps,
        wrong=wrong,
        calls=len(world.history.calls),
        injected=world.injected,
        lives=world.history.life,
        lines=world.history.lines,
    )
