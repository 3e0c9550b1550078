"""The conformance suite of a store: `check_store`, over every sentence of `runtara.persistence.store`.

For whoever writes a backend, with no test framework inside. A *sentence* is an async function that is given
``open_store`` and raises `AssertionError`, with words, where the store breaks its contract::

    await check_store(lambda: partial(open_my_store, new_empty_place()))

The two callables:

* ``new_store()`` makes an empty store, somewhere, and returns its ``open_store``. Every sentence gets one
  of its own.
* ``open_store()`` is an async context manager that yields the store. Within one sentence it is called again
  after it was left, and opens the same store again.

A store that forgets when it is closed (one in memory) is checked with ``reopens=False``, which leaves out
the sentences in `REOPENING`.
"""

from collections.abc import Awaitable, Callable
from typing import Final

from runtara.testing import (
    conformance_asking,
    conformance_deleting,
    conformance_operating,
    conformance_payloads,
    conformance_reading,
    conformance_records,
    conformance_writing,
)
from runtara.testing.conformance_writing import OpenStore

Sentence = Callable[[OpenStore], Awaitable[None]]

SENTENCES: Final[tuple[Sentence, ...]] = (
    *conformance_writing.SENTENCES,
    *conformance_reading.SENTENCES,
    *conformance_asking.SENTENCES,
    *conformance_records.SENTENCES,
    *conformance_payloads.SENTENCES,
    *conformance_operating.SENTENCES,
    *conformance_deleting.SENTENCES,
)
"""All of them."""

REOPENING: Final[frozenset[Sentence]] = frozenset(
    {
        conformance_writing.w1_an_applied_batch_is_there_after_reopening,
        conformance_reading.n1_numbers_are_not_given_again_after_reopening,
        conformance_asking.a1_a_cursor_outlives_a_reopening,
        conformance_operating.k1_notes_are_there_after_reopening,
        conformance_deleting.d2_numbers_of_purged_instances_are_not_given_again,
        conformance_deleting.d3_the_rest_is_swept_after_a_reopening,
    }
)
"""Those that close the store and open it again."""


async def check_store(new_store: Callable[[], OpenStore], *, reopens: bool = True) -> None:
    """Check every sentence of the contract, each on a new store.

    Args:
        new_store: See the module's docstring.
        reopens: Whether the store remembers when it is closed and opened again.

    Raises:
        AssertionError: The store breaks the contract; the message says the sentence and what was seen.
    """
    for sentence in SENTENCES:
        if not reopens and sentence in REOPENING:
            continue
        try:
            await sentence(new_store())
        except AssertionError as error:
            name = getattr(sentence, "__name__", str(sentence))
            raise AssertionError(f"{name}: {error}") from error
