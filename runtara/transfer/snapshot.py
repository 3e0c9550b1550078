"""One instance as it was at one moment, read from a store that goes on working.

Every change of an instance has a revision, and every revision is found in its row or in a record. So what
`Store.load` returns, which is one consistent picture, dates everything that is read after it:

1. A record of a higher revision was appended later, and is left out.
2. A signal, a wait or a step that was pending, open or running then may have been settled since. It is
   taken as it was: the picture holds all pending signals and open waits as they were, and a step that a
   later event has ended was running.
3. What a compensation has become is taken from the picture.
4. Payloads and the log of compensations say nothing of when they changed, but a change of them always moves
   the row. They are read first, and again if the row has moved meanwhile.
"""

from collections.abc import Mapping

import attrs

from runtara.persistence.store import Loaded
from runtara.records import SetCompensation, SignalRecord, StepRecord, StepStatus, WaitRecord
from runtara.transfer.items import Record


@attrs.frozen(kw_only=True)
class Moment:
    """An instance at one revision."""

    revision: int
    open: Mapping[tuple[type, int], WaitRecord | SignalRecord]
    """Signals and waits that were not settled, by class and revision."""

    def as_of(self, record: Record) -> Record:
        """A record that is no newer, as it was at this moment."""
        match record:
            case WaitRecord() | SignalRecord():
                return self.open.get((type(record), record.revision), record)
            case StepRecord(end_revision=int(end)) if end > self.revision:
                return attrs.evolve(record, status=StepStatus.RUNNING, finished_us=None, end_revision=None)
        return record


def moment_of(loaded: Loaded) -> Moment:
    unsettled: tuple[WaitRecord | SignalRecord, ...] = (*loaded.waits, *loaded.signals)
    return Moment(
        revision=loaded.revision, open={(type(record), record.revision): record for record in unsettled}
    )


def compensations_of(loaded: Loaded) -> tuple[SetCompensation, ...]:
    """What has become of each compensation, by the revision of its checkpoint."""
    return tuple(
        SetCompensation(checkpoint_id=one.checkpoint_id, state=one.state, attempts=one.attempts)
        for one in sorted(loaded.compensations, key=lambda one: one.revision)
    )
