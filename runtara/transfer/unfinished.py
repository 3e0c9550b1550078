"""The notes that an import leaves in its store: that it is not over, or which one came last."""

import json
from typing import Final

import attrs

from runtara.errors import ImportUnfinished, StoreCorrupt
from runtara.persistence.store import Store

UNFINISHED: Final = "import"
FINISHED: Final = "imported"
"""The digest of the header of the export that was imported last."""


@attrs.frozen(kw_only=True)
class Unfinished:
    """How far an import has come."""

    header: str
    """The digest of its export's header."""
    first_row: int
    """Its instances have rows from here on; no other instance has."""
    done: int = 0
    """So many instances at the beginning of the export are there as a whole."""
    last_row: int = 0
    """The highest row among those."""
    existing: int = 0
    """Those among them that were there before and are as they were."""


async def find_unfinished(store: Store) -> Unfinished | None:
    """Raises `StoreCorrupt` for a note that is none of these."""
    text = await store.note(UNFINISHED)
    if text is None:
        return None
    try:
        return Unfinished(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise StoreCorrupt("the note of an unfinished import is damaged") from error


async def keep_unfinished(store: Store, unfinished: Unfinished) -> None:
    await store.set_note(UNFINISHED, json.dumps(attrs.asdict(unfinished)))


async def require_whole(store: Store) -> None:
    """Raises `ImportUnfinished` if an import into the store was begun and has not ended."""
    if await store.note(UNFINISHED) is not None:
        raise ImportUnfinished(
            f"an import into {store.statistics().location} has not ended: run the same `runtara import`"
            " again, or take back what it has brought with `runtara import --discard`"
        )
