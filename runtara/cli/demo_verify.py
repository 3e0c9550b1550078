"""Does the store agree with what really happened? Pure: entries of the side-effect log, and rows, in;
violations out.

`violations` is empty only if all of this holds:

1. Every order is completed, with the output that was acknowledged.
2. Every acknowledged checkpoint is in the store once, with the acknowledged bytes (a received payment too).
3. A step whose checkpoint was acknowledged never ran its body again.
4. Every accepted payment is stored once and consumed, and exactly one wait received it; no wait received
   anything else, or two different things.
5. No sleep ended before its deadline, and no restart moved a deadline.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import attrs

from runtara.cli.demo_log import Entry, Kind
from runtara.cli.demo_plan import PAYMENTS, STEPS, Plan, payment


@attrs.frozen(kw_only=True)
class StoredSignal:
    """A signal as the store has it."""

    payload: bytes | None
    consumed: bool


@attrs.frozen(kw_only=True)
class Stored:
    """An order as the store has it."""

    instance_id: str
    status: str
    output: bytes | None
    checkpoints: tuple[tuple[str, bytes], ...]
    """Id and state, as they were listed."""
    signals: tuple[StoredSignal, ...]


@attrs.frozen(kw_only=True)
class Numbers:
    """What there is to say about a demo."""

    completed: int
    acknowledged: int
    """Checkpoints, received payments and sleeps included."""
    finished_steps: int
    repeated_steps: int
    """Steps whose body ran more than once, because its process was killed before the acknowledgement."""
    signals: int
    sendings: int
    """Accepted sendings, repeated ones included."""
    consumed: int
    sleeps: int


Store = dict[str, Stored]


def violations(plan: Plan, entries: Sequence[Entry], stored: Sequence[Stored]) -> tuple[str, ...]:
    """All that is wrong, in words; empty if nothing is."""
    store = {each.instance_id: each for each in stored}
    return (
        *unfinished(plan, entries, store),
        *lost_checkpoints(entries, store),
        *finished_steps_run_again(entries),
        *missing_steps(plan, entries),
        *wrong_signals(plan, entries, store),
        *wrong_sleeps(entries),
    )


def unfinished(plan: Plan, entries: Sequence[Entry], store: Store) -> Iterator[str]:
    """Rule 1."""
    done = {entry.instance_id: entry.value for entry in entries if entry.kind is Kind.DONE}
    for instance_id in plan.instance_ids:
        found = store.get(instance_id)
        if found is None:
            yield f"{instance_id} is not in the store"
        elif found.status != "completed":
            yield f"{instance_id} is {found.status}, not completed"
        elif instance_id not in done:
            yield f"{instance_id} is completed, and nobody was told"
        elif found.output != done[instance_id]:
            yield f"{instance_id} has the output {found.output!r}, acknowledged was {done[instance_id]!r}"


def lost_checkpoints(entries: Sequence[Entry], store: Store) -> Iterator[str]:
    """Rule 2."""
    held: dict[tuple[str, str], list[bytes]] = defaultdict(list)
    for each in store.values():
        for name, state in each.checkpoints:
            held[each.instance_id, name].append(state)
    acknowledged = dict.fromkeys(
        (*entry.place, entry.value) for entry in entries if entry.kind in (Kind.ACK, Kind.GOT)
    )
    for instance_id, name, value in acknowledged:
        found = held[instance_id, name]
        if not found:
            yield f"{instance_id}: the acknowledged checkpoint {name} is not in the store"
        elif len(found) > 1:
            yield f"{instance_id}: the checkpoint {name} is in the store {len(found)} times"
        elif found != [value]:
            yield f"{instance_id}: the checkpoint {name} holds {found[0]!r}, acknowledged was {value!r}"


def finished_steps_run_again(entries: Sequence[Entry]) -> Iterator[str]:
    """Rule 3."""
    acknowledged: set[tuple[str, str]] = set()
    for entry in entries:
        if entry.kind is Kind.ACK:
            acknowledged.add(entry.place)
        elif entry.kind is Kind.DID and entry.place in acknowledged:
            yield f"{entry.instance_id}: the finished step {entry.name} ran again in life {entry.life}"


def missing_steps(plan: Plan, entries: Sequence[Entry]) -> Iterator[str]:
    """Rule 3, the other half: a step that counts as done was done."""
    did = {entry.place for entry in entries if entry.kind is Kind.DID}
    for place in dict.fromkeys(entry.place for entry in entries if entry.kind is Kind.ACK):
        if place not in did:
            yield f"{place[0]}: the step {place[1]} was acknowledged, and its body never ran"


def wrong_signals(plan: Plan, entries: Sequence[Entry], store: Store) -> Iterator[str]:
    """Rule 4."""
    received: dict[str, dict[str, set[bytes]]] = defaultdict(lambda: defaultdict(set))
    for entry in entries:
        if entry.kind is Kind.GOT:
            received[entry.instance_id][entry.name].add(entry.value)
    accepted = dict.fromkeys((entry.instance_id, entry.value) for entry in entries if entry.kind is Kind.SENT)
    for instance_id in plan.instance_ids:
        found = store.get(instance_id)
        sent = [payload for sender, payload in accepted if sender == instance_id]
        yield from wrong_rows(instance_id, sent, () if found is None else found.signals)
        yield from wrong_receipts(instance_id, sent, received[instance_id])


def wrong_rows(instance_id: str, sent: Sequence[bytes], rows: Sequence[StoredSignal]) -> Iterator[str]:
    count = Counter(row.payload for row in rows)
    consumed = Counter(row.payload for row in rows if row.consumed)
    known = {payment(instance_id, name) for name in PAYMENTS}
    for payload in sent:
        if not count[payload]:
            yield f"{instance_id}: the accepted signal {payload!r} is not in the store"
        elif not consumed[payload]:
            yield f"{instance_id}: the signal {payload!r} was never consumed"
    for stored, times in count.items():
        if stored not in known:
            yield f"{instance_id}: nobody sent the signal {stored!r}"
        elif times > 1:
            yield f"{instance_id}: the signal {stored!r} is in the store {times} times"


def wrong_receipts(instance_id: str, sent: Sequence[bytes], received: dict[str, set[bytes]]) -> Iterator[str]:
    for name, payloads in received.items():
        if len(payloads) > 1:
            yield f"{instance_id}: the wait {name} received different things: {sorted(payloads)}"
    times = Counter(payload for payloads in received.values() for payload in payloads)
    for payload, waits in times.items():
        if waits > 1:
            yield f"{instance_id}: the signal {payload!r} was consumed {waits} times"
        if payload not in sent:
            yield f"{instance_id}: the signal {payload!r} was received, and never sent"
    for payload in sent:
        if not times[payload]:
            yield f"{instance_id}: the signal {payload!r} reached nobody"


def wrong_sleeps(entries: Sequence[Entry]) -> Iterator[str]:
    """Rule 5."""
    first: dict[tuple[str, str], int] = {}
    for entry in entries:
        if entry.kind is Kind.SLEPT:
            deadline, woken = (int(word) for word in entry.value.split())
            if woken < deadline:
                yield f"{entry.instance_id}: {entry.name} ended {deadline - woken} microseconds too early"
            if first.setdefault(entry.place, deadline) != deadline:
                yield f"{entry.instance_id}: the deadline of {entry.name} moved in life {entry.life}"


def numbers(entries: Sequence[Entry], stored: Sequence[Stored]) -> Numbers:
    """Count what happened."""
    places = {kind: {entry.place for entry in entries if entry.kind is kind} for kind in Kind}
    bodies = Counter(entry.place for entry in entries if entry.kind is Kind.DID)
    return Numbers(
        completed=sum(each.status == "completed" for each in stored),
        acknowledged=len(places[Kind.ACK] | places[Kind.GOT] | places[Kind.SLEPT]),
        finished_steps=sum(name in STEPS for _, name in places[Kind.ACK]),
        repeated_steps=sum(times > 1 for times in bodies.values()),
        signals=len(places[Kind.SENT]),
        sendings=sum(entry.kind is Kind.SENT for entry in entries),
        consumed=sum(signal.consumed for each in stored for signal in each.signals),
        sleeps=len(places[Kind.SLEPT]),
    )
