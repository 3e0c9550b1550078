"""The model: what the promises say about a history and the snapshots between the lives.

Each check is a function of the evidence that yields what it finds broken, in words that begin with the number
of the promise. *Before* and *after* are ticks: the simulation runs on one loop, so they are exact.
"""

from collections.abc import Callable, Iterator

from tests.simulation import check_endings, check_signals, check_writes
from tests.simulation.world import Evidence

Check = Callable[[Evidence], Iterator[str]]

CHECKS: tuple[Check, ...] = (
    check_writes.acknowledged_is_durable,
    check_writes.seen_is_durable,
    check_writes.checkpoints_never_change,
    check_writes.reads_are_up_to_date,
    check_writes.revisions_never_fall,
    check_writes.nothing_is_torn,
    check_writes.steps_agree_with_events,
    check_writes.revisions_are_serial,
    check_writes.epochs_rise,
    check_signals.signals_are_kept,
    check_signals.signals_are_consumed_once,
    check_signals.accepted_in_time_wins,
    check_signals.answers_agree_with_keys,
    check_signals.shown_once_and_in_order,
    check_signals.live_sessions_are_shown_all,
    check_endings.terminal_is_terminal,
    check_endings.deadlines_stand,
    check_endings.nothing_wakes_early,
    check_endings.deadlines_are_kept,
    check_endings.deadlines_are_met,
    check_endings.register_does_not_unpause,
    check_endings.refusals_are_expected,
)


def violations(evidence: Evidence) -> list[str]:
    """All that is broken, in words."""
    return [*evidence.history.bugs, *(found for check in CHECKS for found in check(evidence))]
