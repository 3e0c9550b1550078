"""All pages of a list, oldest first; and around those that cannot be read.

Rules:

1. Instances come by creation, so a range of time that cannot be read is halved, again and again, until only
   the microsecond of the damage is left out.
2. Records come by revision, for which there are no ranges. `readable_pages` reads forward up to the damage,
   in smaller and smaller pages, and then backward from the end up to it: what lies between the first and
   the last damaged record is lost, and the neighbours of these two, for a page looks one record ahead.
3. What was found from the end is read again, page by page in the other order, so that no more than two
   pages are held. The newest page is one of them: meanwhile others may be added.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final, Generic, TypeVar

import attrs

from runtara.errors import StoreFailed
from runtara.persistence.store import MAX_PAGE, Page, PageRequest

T = TypeVar("T")

Ask = Callable[[PageRequest], Awaitable[Page[T]]]

NEARER: Final = 10
"""By so much a page is made smaller when it cannot be read."""


async def pages(ask: Ask[T]) -> AsyncGenerator[tuple[T, ...], None]:
    cursor: str | None = None
    while True:
        page = await ask(PageRequest(limit=MAX_PAGE, cursor=cursor, descending=False))
        yield page.items
        cursor = page.next
        if cursor is None:
            return


@attrs.frozen(kw_only=True)
class Gap(Generic[T]):
    """What could not be read."""

    why: StoreFailed
    before: T | None
    """The last item before it."""
    behind: T | None
    """The first item behind it."""


async def readable_pages(
    ask: Ask[T], place: Callable[[T], Any]
) -> AsyncGenerator[tuple[T, ...] | Gap[T], None]:
    """As `pages`, and around damage, which is told as a `Gap` where it lies.

    Args:
        place: What the list is ordered by, of an item.
    """
    forward: Walk[T] = Walk(ask, descending=False)
    before: T | None = None
    while (page := await forward.next()) is not None:
        yield page.items
        before = page.items[-1] if page.items else before
    if forward.trouble is None:
        return

    def is_behind(item: T) -> bool:
        return before is None or place(item) > place(before)

    backward: Walk[T] = Walk(ask, descending=True)
    found: list[PageRequest] = []
    newest: tuple[T, ...] = ()
    first: T | None = None
    while (page := await backward.next()) is not None and (items := tuple(filter(is_behind, page.items))):
        found.append(backward.request)
        newest = newest or items
        first = items[-1]
    yield Gap(why=forward.trouble, before=before, behind=first)
    for request in reversed(found[1:]):
        page = await ask(request)
        yield tuple(filter(is_behind, page.items))[::-1]
    if newest:
        yield newest[::-1]


@attrs.define(eq=False)
class Walk(Generic[T]):
    """The pages of a list up to its end or to damage."""

    ask: Ask[T]
    descending: bool
    limit: int = MAX_PAGE
    cursor: str | None = None
    over: bool = False
    trouble: StoreFailed | None = None

    request: PageRequest = attrs.Factory(PageRequest)
    """For the newest page."""

    async def next(self) -> Page[T] | None:
        """The next page; None at the end, and at damage: then `trouble` says why."""
        while not self.over:
            self.request = PageRequest(limit=self.limit, cursor=self.cursor, descending=self.descending)
            try:
                page = await self.ask(self.request)
            except StoreFailed as error:
                self.trouble = error
                self.over = self.limit == 1
                self.limit = self.limit // NEARER or 1
                continue
            self.trouble = None
            self.cursor = page.next
            self.over = page.next is None
            return page
        return None


# ---------------------------------------------------------------- by time

FIRST: Final = -(2**63)
BEHIND: Final = 2**63
"""No instant is as late as this."""
MOST_LOST: Final = 1000
"""Microseconds in a row that cannot be read; with more of them, nothing can."""


@attrs.frozen
class Range:
    """From an instant, inclusive, to another one, exclusive; and where to go on in it."""

    low: int = FIRST
    high: int = BEHIND
    cursor: str | None = None

    def halves(self) -> "tuple[Range, Range]":
        middle = (self.low + self.high) // 2
        return attrs.evolve(self, high=middle), attrs.evolve(self, low=middle)


@attrs.frozen
class Lost:
    """A microsecond of which something cannot be read."""

    instant_us: int
    why: StoreFailed


async def readable_times(
    ask: Callable[[Range, PageRequest], Awaitable[Page[T]]], whole: Range
) -> AsyncGenerator[tuple[T, ...] | Lost, None]:
    """As `pages`, of a list that is ordered by time; around damage, which is told as `Lost` where it lies.

    Raises:
        StoreFailed: Hardly anything can be read.
    """
    ahead = [whole]
    lost = 0
    while ahead:
        here = ahead.pop()
        try:
            page = await ask(here, PageRequest(limit=MAX_PAGE, cursor=here.cursor, descending=False))
        except StoreFailed as error:
            if here.high - here.low > 1:
                earlier, later = here.halves()
                ahead += [later, earlier]
                continue
            lost += 1
            if lost > MOST_LOST:
                raise
            yield Lost(here.low, error)
            continue
        lost = 0
        yield page.items
        if page.next is not None:
            ahead.append(attrs.evolve(here, cursor=page.next))
