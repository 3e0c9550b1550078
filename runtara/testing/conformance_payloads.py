"""The sentences A5 to A7: how much a page holds, text in payloads, and the payloads of a step."""

from typing import Any, Final

import attrs

from runtara.limits import MEBIBYTE
from runtara.persistence.store import PAGE_BYTES, EventFilter, PageRequest
from runtara.records import (
    CheckpointRecord,
    CompensationSpec,
    ErrorRecord,
    EventRecord,
    StepRecord,
)
from runtara.testing import samples
from runtara.testing.conformance_records import PAGE, written
from runtara.testing.conformance_walks import KINDS, expect_bounded, record_pages, walk_records
from runtara.testing.conformance_writing import OpenStore, apply_all
from runtara.testing.expectations import expect
from runtara.testing.samples import creation, instance, unit

# ---------------------------------------------------------------- A5: bytes

HALF: Final = PAGE_BYTES // 2


def text_of(size: int) -> str:
    """Text of ``size`` bytes and a fourth as many characters."""
    return "\U0001f600" * (size // 4)


def large(kind: type[Any], revision: int, size: int) -> samples.Appended | None:
    """A record with a large value of ``size`` bytes; None for a kind that has none."""
    data, text = b"x" * size, text_of(size)
    of_kind = next(r for r in samples.one_of_each(revision) if isinstance(r, kind))
    fields: dict[str, Any] = {
        "CheckpointRecord": {"state": data},
        "EventRecord": {"payload": data},
        "SignalRecord": {"payload": data},
        "ErrorRecord": {"message": text},
        "RetryAttemptRecord": {"error": text},
        "CompensationAttemptRecord": {"error_message": text},
        "RequestRecord": {"answer": text},
    }
    changed = fields.get(kind.__name__)
    return None if changed is None else attrs.evolve(of_kind, **changed)


async def a5_pages_of_every_kind_end_where_their_bytes_do(open_store: OpenStore) -> None:
    async with open_store() as store:
        for kind in KINDS:
            records = [large(kind, n, size) for n, size in ((2, 4), (3, PAGE_BYTES), (4, 4))]
            there = [record for record in records if record is not None]
            row = await written(store, *there)
            for descending in (False, True) if there else ():
                found = await record_pages(store, row, kind, descending=descending)
                revisions = [[record.revision for record in page] for page in found]
                wanted = [[4, 3], [2]] if descending else [[2, 3], [4]]
                what = f"{kind.__name__}s around one of a whole page, descending={descending}"
                expect(revisions, wanted, what)


async def a5_a_record_larger_than_a_page_has_one_of_its_own(open_store: OpenStore) -> None:
    sizes = {2: 1, 3: PAGE_BYTES + 1, 4: PAGE_BYTES, 5: PAGE_BYTES - 4_096, 6: 4_096, 7: 1}
    async with open_store() as store:
        row = await written(
            store, *(samples.event(n, subtype=None, payload=b"x" * size) for n, size in sizes.items())
        )
        ways = ((False, [[2, 3], [4], [5, 6], [7]]), (True, [[7, 6, 5], [4], [3], [2]]))
        for descending, wanted in ways:
            found = await record_pages(store, row, EventRecord, descending=descending)
            expect_bounded(found, lambda event: len(event.payload or b""), f"descending={descending}")
            revisions = [[event.revision for event in page] for page in found]
            expect(revisions, wanted, f"pages of events, descending={descending}")
        single = await record_pages(store, row, EventRecord, limit=1)
        revisions = [[event.revision for event in page] for page in single]
        expect(revisions, [[n] for n in reversed(sizes)], "pages of one")


async def a5_only_what_the_filter_finds_counts(open_store: OpenStore) -> None:
    async with open_store() as store:
        events = [samples.event(2 * n, subtype="large", payload=b"x" * MEBIBYTE) for n in range(1, 10)]
        events += [samples.event(2 * n + 1, payload=b"y") for n in range(1, 10)]
        row = await written(store, *sorted(events, key=lambda event: event.revision))
        small = await record_pages(store, row, EventRecord, EventFilter(text="y"))
        expect([len(page) for page in small], [9], "a page of small events among large ones")
        big = await record_pages(store, row, EventRecord, EventFilter(text="xx"), descending=False)
        expect([len(page) for page in big], [4, 4, 1], "pages of the large ones")
        expect(await store.count_records(row, EventRecord, EventFilter(text="xx")), 9, "their count")


async def a5_both_payloads_of_a_step_count(open_store: OpenStore) -> None:
    payload = b"{" + b" " * MEBIBYTE
    async with open_store() as store:
        row = await store.reserve(1)
        begun = range(2, 8)
        await apply_all(
            store,
            creation(instance(row)),
            *(unit(row, n, samples.step(n), samples.event(n, payload=payload)) for n in begun),
            *(
                unit(row, 10 + n, samples.finish_step(n, 10 + n), samples.event(10 + n, payload=payload))
                for n in begun
            ),
        )
        found = await record_pages(store, row, StepRecord, descending=False)
        expect([[s.revision for s in page] for page in found], [[2, 3], [4, 5], [6, 7]], "pages of steps")


async def a5_the_data_of_a_compensation_counts(open_store: OpenStore) -> None:
    async with open_store() as store:
        spec = CompensationSpec(step_id="undo", data=b"x" * (HALF // 2))
        state = b"y" * (HALF // 2)
        row = await written(
            store, *(samples.checkpoint(n, state=state, compensation=spec) for n in (2, 3, 4))
        )
        found = await record_pages(store, row, CheckpointRecord)
        expect([[c.revision for c in page] for page in found], [[4, 3], [2]], "pages of checkpoints")


async def a5_a_page_that_is_full_at_the_end_is_the_last(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await written(store, *(samples.error(n, message=text_of(HALF)) for n in (2, 3)))
        page = await store.list_records(row, ErrorRecord, PAGE)
        expect((len(page.items), page.next), (2, None), "a page that ends with the list")


# ---------------------------------------------------------------- A6: text in payloads

SEARCHES: Final[tuple[tuple[str, bytes, bool], ...]] = (
    # the edges
    ("needle", b"needle", True),
    ("needle", b"needle and hay", True),
    ("needle", b"hay and needle", True),
    ("needle", b"needl", False),
    ("needle", b"eedle", False),
    ("needle", b"need\0le", False),
    ("needle", b"needneedle", True),
    ("needle", b"", False),
    ("end", b"x" * 100_000 + b"end", True),
    ("end", b"end" + b"x" * 100_000, True),
    ("end", b"x" * 100_000 + b"en", False),
    ("y" * 5_000, b"y" * 5_000, True),
    ("y" * 5_001, b"y" * 5_000, False),
    # case, accents and the forms of one letter are told apart
    ("Needle", b"needle", False),
    ("\u00e9", "caf\u00e9".encode(), True),
    ("\u00e9", "cafe\u0301".encode(), False),
    ("e\u0301", "caf\u00e9".encode(), False),
    ("\u00c9", "\u00e9".encode(), False),
    ("\u00df", b"ss", False),
    # no wildcards, no escapes
    ("100%", b"100 percent", False),
    ("100%", b"100%!", True),
    ("%", b"percent", False),
    ("_", b"a", False),
    ("a_c", b"abc", False),
    ("a_c", b"a_c", True),
    ("a.c", b"abc", False),
    ("[a]", b"a", False),
    ("*", b"*", True),
    ("\\", b"a\\b", True),
    ("\\", b"ab", False),
    ("\\\\", b"a\\b", False),
    ("'", b"it's", True),
    ("''", b"it's", False),
    # JSON is not read: its escapes are bytes like others
    ("\u00e9", b'{"name":"caf\\u00e9"}', False),
    ("\\u00e9", b'{"name":"caf\\u00e9"}', True),
    ('say "hi"', b'{"text":"say \\"hi\\""}', False),
    ('say \\"hi', b'{"text":"say \\"hi\\""}', True),
    ("a\nb", b'{"text":"a\\nb"}', False),
    ("a\nb", b"a\nb", True),
    ("a b", b'{"text": "a  b"}', False),
    ('{"a":1}', b'{"a": 1}', False),
    # NUL ends nothing
    ("\0", b"a\0b", True),
    ("\0", b"ab", False),
    ("b", b"a\0b", True),
    ("a\0c", b"a\0b", False),
    ("a\0b", b"a\0b", True),
    ("a\0", b"a", False),
    # bytes that are no text, and no other way of writing them
    ("a", b"\xff\xfea\xff", True),
    ("\u00e9", b"\xc3\xa9", True),
    ("\u00e9", b"\xc3 \xa9", False),
    ("\u00e9", b"\xe9", False),
    ("\u00a9", b"\xe0\xc2\xa9\xff", True),
    ("\U0001f600", b"\xff\xf0\x9f\x98\x80\xc0", True),
    ("\U0001f600", b"\xed\xa0\xbd\xed\xb8\x80", False),
    ("\ufffd", b"\xff", False),
    ("?", b"\xff", False),
    ("\ufeff", b"\xef\xbb\xbf{}", True),
    ("a", b"\x16\x10", False),
    ("ff", b"\xff", False),
    ("x", b"\xff", False),
    ("377", b"\xff", False),
    ("\\377", b"\xff", False),
    ("/w", b"\xff", False),
    ("\U0010ffff", "\U0010ffff".encode(), True),
)
"""A text, a payload, and whether it is found there."""


async def a6_text_is_found_byte_by_byte(open_store: OpenStore) -> None:
    async with open_store() as store:
        payloads = dict.fromkeys(payload for _, payload, _ in SEARCHES)
        events = [samples.event(n, payload=payload) for n, payload in enumerate(payloads, 3)]
        row = await written(store, samples.event(2, payload=None), *events)
        at = {payload: n for n, payload in enumerate(payloads, 3)}
        for text, payload, found in SEARCHES:
            where = EventFilter(text=text)
            seen = await walk_records(store, row, EventRecord, where, limit=100, descending=False)
            revisions = [event.revision for event in seen]
            name = f"{text[:20]!r} in {payload[:40]!r}"
            expect(at[payload] in revisions, found, f"{name} is found")
            wanted = [event.revision for event in events if text.encode() in (event.payload or b"")]
            expect(revisions, wanted, f"all events that hold {text[:20]!r}")
            expect(await store.count_records(row, EventRecord, where), len(wanted), f"count of {text[:20]!r}")


async def a6_text_is_sought_in_the_payload_alone(open_store: OpenStore) -> None:
    async with open_store() as store:
        named = samples.event(
            2, subtype="word", checkpoint_id="word", scope_id="word", parent_scope_id="word", payload=b"-"
        )
        row = await written(store, named, samples.event(3, payload=b"word"))
        other = await written(store, samples.event(2, payload=b"word"))
        for r, wanted in ((row, [3]), (other, [2])):
            seen = await walk_records(store, r, EventRecord, EventFilter(text="word"), limit=10)
            expect([event.revision for event in seen], wanted, "the events of one instance")


# ---------------------------------------------------------------- A7: the payloads of a step


async def a7_a_step_is_listed_with_the_payloads_of_its_events(open_store: OpenStore) -> None:
    async with open_store() as store:
        row = await store.reserve(2)
        theirs = [samples.event(n, payload=b"another's") for n in (2, 3, 4, 5, 6, 7)]
        await apply_all(store, creation(instance(row + 1)), *(unit(row + 1, e.revision, e) for e in theirs))
        payloads = {2: b'{"inputs":1}', 3: b"", 4: samples.ALL_BYTES, 5: b'{"outputs":2}', 6: None, 7: b"log"}
        events = [samples.event(n, payload=payload) for n, payload in payloads.items()]
        await apply_all(
            store,
            creation(instance(row)),
            unit(row, 2, samples.step(2), events[0]),
            unit(row, 3, samples.step(3), events[1]),
            unit(row, 4, samples.finish_step(3, 4), events[2]),
            unit(row, 5, samples.finish_step(2, 5), events[3]),
            unit(row, 6, samples.step(6), events[4]),
            unit(row, 7, events[5]),
            unit(row, 8, samples.step(8)),
        )
        page = await store.list_records(row, StepRecord, PageRequest(descending=False))
        found = {step.revision: (step.start_payload, step.end_payload) for step in page.items}
        wanted = {
            2: (b'{"inputs":1}', b'{"outputs":2}'),
            3: (b"", samples.ALL_BYTES),
            6: (None, None),
            8: (None, None),
        }
        expect(found, wanted, "the payloads that began and ended each step")
        expect((page.items[0].inputs, page.items[0].outputs), (1, 2), "what a step says of itself")


SENTENCES: Final = (
    a5_pages_of_every_kind_end_where_their_bytes_do,
    a5_a_record_larger_than_a_page_has_one_of_its_own,
    a5_only_what_the_filter_finds_counts,
    a5_both_payloads_of_a_step_count,
    a5_the_data_of_a_compensation_counts,
    a5_a_page_that_is_full_at_the_end_is_the_last,
    a6_text_is_found_byte_by_byte,
    a6_text_is_sought_in_the_payload_alone,
    a7_a_step_is_listed_with_the_payloads_of_its_events,
)
