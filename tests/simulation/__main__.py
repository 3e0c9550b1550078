"""``python -m tests.simulation --seeds 0:1000``, or ``--seed 7 --verbose`` to see one world."""

import argparse
import sys
import time
from collections import Counter

from tests.simulation.options import Kind
from tests.simulation.runner import Verdict, run_seed


def kinds(text: str) -> frozenset[Kind]:
    return frozenset(Kind(word) for word in text.split(",") if word)


def span(text: str) -> range:
    first, _, end = text.partition(":")
    return range(int(first), int(end))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument(
        "--seeds", type=span, default=range(1000), metavar="FIRST:END", help="run these worlds"
    )
    parser.add_argument("--seed", type=int, help="run one world")
    parser.add_argument("--verbose", action="store_true", help="print the history of each world that fails")
    parser.add_argument(
        "--without",
        type=kinds,
        default=frozenset(),
        metavar="KIND,KIND",
        help=f"faults to leave out: {', '.join(kind.value for kind in Kind)}",
    )
    parser.add_argument("--minimise", action="store_true", help="say which faults a failing world needs")
    parser.add_argument("--stop-after", type=int, default=5, metavar="N", help="stop after so many failures")
    return parser.parse_args()


def minimise(seed: int, without: frozenset[Kind]) -> frozenset[Kind]:
    """Leave out one kind of fault after the other, as long as the world still fails."""
    for kind in Kind:
        if kind not in without and run_seed(seed, without | {kind}).wrong:
            without |= {kind}
    return without


def report(verdict: Verdict, options: argparse.Namespace) -> None:
    if options.verbose:
        print(*verdict.lines, sep="\n")
    if verdict.wrong:
        print(verdict, flush=True)
    if verdict.wrong and options.minimise:
        without = minimise(verdict.options.seed, options.without)
        print(f"  needs only: {sorted(kind.value for kind in set(Kind) - without)}")
        print(run_seed(verdict.options.seed, without))


def main() -> int:
    options = parse()
    seeds = options.seeds if options.seed is None else [options.seed]
    began, failures, worlds, steps, calls, lives = time.perf_counter(), 0, 0, 0, 0, 0
    injected: Counter[str] = Counter()
    for seed in seeds:
        verdict = run_seed(seed, options.without)
        worlds, steps, calls = worlds + 1, steps + verdict.steps, calls + verdict.calls
        lives += verdict.lives
        injected += verdict.injected
        if verdict.wrong or options.verbose:
            report(verdict, options)
        failures += bool(verdict.wrong)
        if failures >= options.stop_after:
            break
    took = time.perf_counter() - began
    print(
        f"{worlds} worlds in {took:.1f} s ({60 * worlds / took:.0f} per minute), {failures} failed; "
        f"per world: {steps / worlds:.0f} steps, {calls / worlds:.0f} calls, {lives / worlds:.1f} lives, "
        f"{sum(injected.values()) / worlds:.1f} faults"
    )
    print("faults:", ", ".join(f"{name} {count}" for name, count in sorted(injected.items())))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
