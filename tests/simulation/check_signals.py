"""P5: signals are never lost."""

from collections import defaultdict
from collections.abc import Iterator

from runtara.records import (
    SignalType,
    WaitOutcome,
)
from tests.simulation.history import Call
from tests.simulation.options import Kind
from tests.simulation.snapshots import Stored
from tests.simulation.world import Evidence

Found = Iterator[str]

# ---------------------------------------------------------------- P5: signals are never lost


def signals_are_kept(evidence: Evidence) -> Found:
    """P5: a registration shows every accepted signal that nobody consumed, in order."""
    final = evidence.snapshots[-1].instances
    consumers = consumptions(evidence)
    accepted = evidence.history.answered("send")
    for call in evidence.history.answered("register"):
        shown = [signal.signal_id for signal in call.reply.signals]
        if shown != sorted(shown):
            yield f"P5: signals out of order: {call}"
        for sent in accepted:
            if sent.instance != call.instance or sent.arguments["key"] is None:
                continue
            assert sent.ended is not None
            assert call.ended is not None
            signal_id = sent.reply.signal_id
            begun = consumers.get((call.instance, signal_id))
            consumed = begun is not None and begun < call.ended
            if sent.ended < call.begun and not consumed and signal_id not in shown:
                yield f"P5: signal {signal_id} was accepted at {sent.ended} and is not shown: {call}"
    for instance, stored in final.items():
        for signal_id, row in stored.signals.items():
            taken = row["acknowledged_us"] is not None
            if row["type"] == SignalType.CUSTOM and taken and (instance, signal_id) not in consumers:
                yield f"P5: nobody consumed signal {signal_id} of {instance}, but it is gone: {row}"


def consumptions(evidence: Evidence) -> dict[tuple[str, int], int]:
    """Of each signal that something may have consumed, when that began at the earliest."""
    began: dict[tuple[str, int], int] = {}
    final = evidence.snapshots[-1].instances

    def note(instance: str, signal_id: int, tick: int) -> None:
        key = (instance, signal_id)
        began[key] = min(began.get(key, tick), tick)

    for call in evidence.history.calls:
        if call.name == "ack":
            note(call.instance, call.arguments["signal_id"], call.begun)
        elif call.name == "wait_signal" and call.instance in final:
            stored = final[call.instance]
            wait = stored.waits.get(call.arguments["checkpoint_id"])
            if wait is not None and wait["outcome"] == WaitOutcome.RECEIVED:
                state = stored.checkpoints[wait["wait_id"]]["state"]
                for signal_id, row in stored.signals.items():
                    if row["key"] == wait["key"] and row["payload"] == state:
                        note(call.instance, signal_id, call.begun)
    return began


def signals_are_consumed_once(evidence: Evidence) -> Found:
    """P5: no signal is stored twice, consumed twice, or consumed out of turn."""
    for instance, stored in evidence.snapshots[-1].instances.items():
        payloads: dict[bytes, int] = {}
        keyed = {
            call.arguments["payload"]
            for call in evidence.history.calls
            if call.name == "send" and call.instance == instance and call.arguments["idempotency_key"]
        }
        for signal_id, row in stored.signals.items():
            first = payloads.setdefault(row["payload"], signal_id)
            if first != signal_id and row["payload"] in keyed:
                yield f"P5: one idempotency key was stored twice, as {first} and {signal_id}: {row}"
        yield from consumed_in_turn(instance, stored)
    applied: dict[tuple[str, int], Call] = {}
    for call in evidence.history.answered("ack"):
        if call.reply.applied:
            key = (call.instance, call.arguments["signal_id"])
            other = applied.setdefault(key, call)
            if other is not call:
                yield f"P5: a signal was consumed twice: {other} and {call}"


def consumed_in_turn(instance: str, stored: Stored) -> Found:
    received = [wait for wait in stored.waits.values() if wait["outcome"] == WaitOutcome.RECEIVED]
    order: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for wait in received:
        checkpoint = stored.checkpoints[wait["wait_id"]]
        sources = [
            signal_id
            for signal_id, row in stored.signals.items()
            if row["key"] == wait["key"] and (row["payload"] or b"") == checkpoint["state"]
        ]
        if len(sources) != 1:
            yield f"P5: a wait of {instance} received what {len(sources)} signals hold: {checkpoint}"
            continue
        if stored.signals[sources[0]]["acknowledged_us"] is None:
            yield f"P5: a received signal of {instance} is still pending: {stored.signals[sources[0]]}"
        order[wait["key"]].append((checkpoint["revision"], sources[0]))
    for key, pairs in order.items():
        ids = [signal_id for _, signal_id in sorted(pairs)]
        if ids != sorted(set(ids)):
            yield f"P5: signals of key {key!r} of {instance} were consumed out of turn: {ids}"


def accepted_in_time_wins(evidence: Evidence) -> Found:
    """P5, P7: no wait timed out while a signal for it, accepted before the deadline, was pending."""
    if Kind.BACKWARD.value in evidence.injected:
        return
    for instance, stored in evidence.snapshots[-1].instances.items():
        for wait in stored.waits.values():
            if wait["outcome"] != WaitOutcome.TIMED_OUT:
                continue
            for row in stored.signals.values():
                in_time = row["created_us"] < wait["deadline_us"]
                there = row["acknowledged_us"] is None or row["acknowledged_us"] > wait["settled_us"]
                if row["key"] == wait["key"] and in_time and there:
                    yield f"P5: {instance}: {wait} timed out, but {row} was there"


def answers_agree_with_keys(evidence: Evidence) -> Found:
    """P5: the same request gets the same answer."""
    answers: dict[tuple[str, str, str], Call] = {}
    for call in evidence.history.answered("send", "emit"):
        name = call.arguments.get("idempotency_key") or call.arguments.get("request_id")
        if name is not None:
            first = answers.setdefault((call.instance, call.name, name), call)
            if first.reply != call.reply:
                yield f"P5: asked twice, answered differently: {first} and {call}"


def shown_once_and_in_order(evidence: Evidence) -> Found:
    """P5: one walk over the pushed signals shows each once, in the order of acceptance."""
    last: dict[tuple[str, int | None, str], int] = {}
    for sighting in evidence.history.sightings:
        if sighting.name == "shown":
            key = (sighting.instance, sighting.epoch, sighting.who)
            if sighting.value <= last.get(key, 0):
                yield f"P5: shown again, or out of order: {sighting}"
            last[key] = sighting.value


def live_sessions_are_shown_all(evidence: Evidence) -> Found:
    """P5: when a session is left, its inbox holds every signal that was accepted and that nobody consumed."""
    consumers = consumptions(evidence)
    accepted = [call for call in evidence.history.answered("send") if call.arguments["key"] is not None]
    for sighting in evidence.history.sightings:
        if sighting.name != "leave" or sighting.value is None:
            continue
        for sent in accepted:
            assert sent.ended is not None
            signal_id = sent.reply.signal_id
            consumed = consumers.get((sent.instance, signal_id), sighting.tick) < sighting.tick
            accepted_before = sent.instance == sighting.instance and sent.ended < sighting.tick
            if accepted_before and not consumed and signal_id not in sighting.value:
                yield f"P5: never pushed to the session that was left at {sighting}: {sent}"
