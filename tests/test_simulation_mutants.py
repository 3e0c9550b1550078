"""The simulation finds bugs: each one that is planted on purpose, within a stated number of worlds."""

import pytest

from tests.simulation.mutants import MUTANTS, Mutant, planted
from tests.simulation.options import draw
from tests.simulation.runner import run_options


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_is_found(mutant: Mutant) -> None:
    for seed in range(mutant.seeds):
        with planted(mutant):
            verdict = run_options(mutant.worlds(draw(seed)))
        if verdict.wrong:
            assert not any(word in verdict.wrong[0] for word in ("TypeError", "AttributeError", "NameError"))
            assert f"--seed {seed}" in str(verdict)
            return
    pytest.fail(f"{mutant.name} was not found in {mutant.seeds} worlds")
