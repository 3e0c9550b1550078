"""The order of the lines of an export, their digests and their counts: what no line can say alone.

    header  (instance  payload*  ...  request*  end | skipped)*  trailer

Rules:

1. The lines of an instance come in the order of `format.KINDS`, those of one kind by revision, each
   revision once; payloads by their kind. A ``skipped`` line may stand anywhere between header and trailer.
2. ``end`` holds the digest of its instance's lines, the trailer that of all lines before it, and how many
   there are of each kind. An export without a trailer is cut off.
"""

import hashlib
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

import attrs

from runtara.errors import BadExport
from runtara.records import InstanceRecord, PutPayload
from runtara.transfer.format import KINDS, WORD_OF, read_line
from runtara.transfer.items import End, Header, Item, Skipped, Trailer

UNCOUNTED: Final = (Header, End, Trailer)
PLACE_OF: Final[Mapping[type[Any], int]] = {kind: place for place, kind in enumerate(KINDS.values())}


def of_an_instance(item: Item) -> bool:
    """Whether it is a record of the history of an instance."""
    return PLACE_OF[InstanceRecord] < PLACE_OF[type(item)] < PLACE_OF[Skipped]


class Tally:
    """The digest and the counts of the lines so far: those of a writer and of a reader must agree."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.bytes = 0
        self.hasher = hashlib.sha256()

    def add(self, item: Item, line: bytes) -> None:
        self.add_bytes(line)
        if not isinstance(item, UNCOUNTED):
            self.counts[WORD_OF[type(item)]] += 1

    def add_bytes(self, data: bytes) -> None:
        self.bytes += len(data)
        self.hasher.update(data)

    @property
    def sha256(self) -> str:
        return self.hasher.hexdigest()

    @property
    def lines(self) -> int:
        """But for those that are not counted."""
        return self.counts.total()

    def copy(self) -> "Tally":
        other = Tally()
        other.counts, other.bytes, other.hasher = self.counts.copy(), self.bytes, self.hasher.copy()
        return other

    def trailer(self) -> Trailer:
        return Trailer(counts=dict(sorted(self.counts.items())), sha256=self.sha256)

    def end(self) -> End:
        """The last line of an instance whose lines these are."""
        return End(lines=self.lines, sha256=self.sha256)


class Place(Enum):
    """Where in an export a reader is."""

    START = "before the header"
    BETWEEN = "between instances"
    WITHIN = "within an instance"
    OVER = "behind the trailer"


@attrs.define(eq=False)
class Verifier:
    """Reads an export line by line and checks all of it; `finish` says that no line is missing."""

    payload_bytes: int
    """The largest value that is taken."""
    tally: Tally = attrs.Factory(Tally)
    line: int = 0
    place: Place = Place.START
    instance: InstanceRecord | None = None
    """The present one, or the last."""
    part: Tally = attrs.Factory(Tally)
    """Its lines."""
    last: tuple[int, int] = (0, 0)
    """Place and revision of the last record."""

    def take(self, line: bytes) -> Item:
        """What the next line holds.

        Raises:
            BadExport: It is no line of an export, or has no place here.
        """
        self.line += 1
        item = read_line(line, self.line, self.payload_bytes)
        match self.place, item:
            case Place.START, Header():
                self.place = Place.BETWEEN
            case Place.BETWEEN, InstanceRecord():
                self.begin(item)
            case Place.BETWEEN, Trailer():
                self.check_trailer(item)
            case Place.BETWEEN | Place.WITHIN, Skipped():
                pass
            case Place.WITHIN, End():
                self.check_end(item)
            case Place.WITHIN, _ if of_an_instance(item):
                self.check_order(item)
            case _:
                raise self.bad("t", f"{WORD_OF[type(item)]} has no place {self.place.value}")
        self.note(item, line)
        return item

    def finish(self) -> None:
        """There are no more lines. Raises `BadExport` if there should be."""
        if self.place is not Place.OVER:
            raise BadExport(self.line + 1, "line", "is missing: the file is cut off before its trailer")

    def bad(self, field: str, problem: str) -> BadExport:
        return BadExport(self.line, field, problem)

    def begin(self, record: InstanceRecord) -> None:
        self.place = Place.WITHIN
        self.instance = record
        self.part = Tally()
        self.last = (0, 0)

    def note(self, item: Item, line: bytes) -> None:
        self.tally.add(item, line)
        if self.place is Place.WITHIN:
            self.part.add(item, line)

    def check_order(self, item: Item) -> None:
        place = PLACE_OF[type(item)]
        revision = item.kind + 1 if isinstance(item, PutPayload) else getattr(item, "revision", None)
        before, newest = self.last
        if place < before:
            raise self.bad("t", f"{WORD_OF[type(item)]} comes too late")
        if revision is None:
            self.last = (place, 0)
            return
        if place == before and revision <= newest:
            raise self.bad("revision", "is not above that of the line before")
        self.last = (place, revision)

    def check_end(self, end: End) -> None:
        if end.lines != self.part.lines:
            raise self.bad("lines", f"must be {self.part.lines}: some are missing, or were added")
        if end.sha256 != self.part.sha256:
            raise self.bad("sha256", "is not the digest of the instance's lines: they were changed")
        self.place = Place.BETWEEN

    def check_trailer(self, trailer: Trailer) -> None:
        if trailer.counts != dict(self.tally.counts):
            raise self.bad("counts", "are not those of the lines before: some are missing, or were added")
        if trailer.sha256 != self.tally.sha256:
            raise self.bad("sha256", "is not the digest of the lines before: they were changed")
        self.place = Place.OVER
