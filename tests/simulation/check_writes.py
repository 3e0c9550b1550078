"""P1 to P4: what was acknowledged is there, whole, in order, and written by its owner."""

from collections import defaultdict
from collections.abc import Iterator

import attrs

from runtara.messages import (
    AckReply,
    Change,
    CheckpointReply,
    EventReply,
    FoundCheckpoint,
    InstanceView,
    Registered,
    SignalReply,
    WaitReply,
)
from runtara.persistence.store import Page
from runtara.records import (
    CompensationState,
    EventRecord,
    EventType,
    PayloadKind,
    Status,
    WaitKind,
    WaitOutcome,
)
from tests.simulation.history import Call
from tests.simulation.snapshots import Row, Snapshot, Stored
from tests.simulation.world import Evidence
from tests.steps_model import steps_of, told, words

Found = Iterator[str]

# ---------------------------------------------------------------- P1: acknowledged is durable


def acknowledged_is_durable(evidence: Evidence) -> Found:
    """P1: what a reply said is in the store in every later snapshot."""
    for call in evidence.history.calls:
        if not call.answered:
            continue
        assert call.ended is not None
        for snapshot in later(evidence, call.ended):
            stored = snapshot.instances.get(call.instance)
            if stored is None:
                if claims_existence(call):
                    yield f"P1: the instance is gone after {call}"
                break
            lost = missing(call, stored)
            if lost is not None:
                yield f"P1: {lost} is not in the store after life {snapshot.life - 1}: {call}"
                break


def later(evidence: Evidence, tick: int) -> list[Snapshot]:
    return [snapshot for snapshot in evidence.snapshots if snapshot.tick > tick]


def claims_existence(call: Call) -> bool:
    return not (isinstance(call.reply, InstanceView) and call.reply.status is Status.UNKNOWN)


def missing(call: Call, stored: Stored) -> str | None:
    """What of the reply is not stored, or is stored otherwise."""
    how = call.arguments
    match call.reply:
        case CheckpointReply(state=state) | FoundCheckpoint(state=state) if state is not None:
            row = stored.checkpoints.get(how["checkpoint_id"])
            return None if row is not None and row["state"] == state else f"the checkpoint {state!r}"
        case WaitReply() if call.name == "sleep" or call.name == "wait_signal":
            return missing_wait(call.reply, stored, how["checkpoint_id"])
        case EventReply(event_id=int() as event_id):
            event = stored.events.get(event_id)
            if event is None or ("payload" in how and event["payload"] != how["payload"]):
                return f"event {event_id}"
        case SignalReply(signal_id=signal_id):
            signal = stored.signals.get(signal_id)
            if signal is None or (signal["key"] and signal["payload"] != how["payload"]):
                return f"signal {signal_id}"
        case AckReply(applied=True, signal_id=int() as signal_id):
            signal = stored.signals.get(signal_id)
            if signal is None or signal["acknowledged_us"] is None:
                return f"the acknowledgement of {signal_id}"
        case Registered(epoch=epoch):
            return None if stored.instance["epoch"] >= epoch else f"epoch {epoch}"
        case InstanceView(revision=revision):
            return None if stored.newest >= revision else f"revision {revision}"
        case int() as error_id if call.name == "record_error":
            error = stored.errors.get(error_id)
            return None if error is not None and error["message"] == how["message"] else f"error {error_id}"
        case _ if call.name == "record_retry":
            found = (how["checkpoint_id"], how["attempt"]) in stored.attempts
            return None if found else "the attempt"
        case Page(items=items):
            newest = max((item.revision for item in items), default=0)
            return None if stored.newest >= newest else f"revision {newest}"
        case _:
            pass
    return None


def missing_wait(reply: WaitReply, stored: Stored, wait_id: str) -> str | None:
    row = stored.waits.get(wait_id)
    if row is None:
        return "the wait"
    if reply.outcome is not None and row["outcome"] != reply.outcome:
        return f"the outcome {reply.outcome.name} of the wait"
    if reply.outcome is WaitOutcome.RECEIVED and stored.checkpoints[wait_id]["state"] != reply.payload:
        return f"the payload {reply.payload!r} of the wait"
    return None


def seen_is_durable(evidence: Evidence) -> Found:
    """P1: pushes and watchers never see what is later not there."""
    for sighting in evidence.history.sightings:
        for snapshot in later(evidence, sighting.tick):
            stored = snapshot.instances.get(sighting.instance)
            if sighting.name == "shown" and (stored is None or sighting.value not in stored.signals):
                yield f"P1: a pushed signal is not in the store: {sighting}"
                break
            if sighting.name == "change" and (stored is None or stored.newest < sighting.value.revision):
                yield f"P1: a watched change is not in the store: {sighting}"
                break


def checkpoints_never_change(evidence: Evidence) -> Found:
    """P1: one id, one value, for every reader and for ever."""
    values: dict[tuple[str, str], bytes] = {}

    def differs(instance: str, name: str, state: bytes) -> bool:
        return values.setdefault((instance, name), state) != state

    for call in evidence.history.answered("checkpoint", "get_checkpoint"):
        state = call.reply.state
        if state is not None and differs(call.instance, call.arguments["checkpoint_id"], state):
            yield f"P1: a checkpoint has two values: {call}"
    for snapshot in evidence.snapshots:
        for instance, stored in snapshot.instances.items():
            for name, row in stored.checkpoints.items():
                if differs(instance, name, row["state"]):
                    yield f"P1: a checkpoint of {instance} has two values: {row}"


def reads_are_up_to_date(evidence: Evidence) -> Found:
    """P1, P3: who looks after an acknowledgement finds it; no finished step runs its body again."""
    known: dict[tuple[str, str], int] = {}
    for call in evidence.history.answered("checkpoint", "get_checkpoint"):
        if call.reply.state is not None:
            assert call.ended is not None
            key = (call.instance, call.arguments["checkpoint_id"])
            known[key] = min(known.get(key, call.ended), call.ended)
    for call in evidence.history.answered("get_checkpoint"):
        since = known.get((call.instance, call.arguments["checkpoint_id"]))
        if not call.reply.found and since is not None and since < call.begun:
            yield f"P1: a checkpoint acknowledged at {since} was not found: {call}"


def revisions_never_fall(evidence: Evidence) -> Found:
    """P1, P3: who looks later sees no less."""
    seen: dict[str, list[tuple[int, int, int, object]]] = defaultdict(list)
    for call in evidence.history.answered("status"):
        assert call.ended is not None
        seen[call.instance].append((call.begun, call.ended, call.reply.revision, call))
    newest: dict[tuple[str, int, str], int] = {}
    for sighting in evidence.history.sightings:
        if sighting.name != "change":
            continue
        change: Change = sighting.value
        key = (sighting.instance, sighting.life, sighting.who)
        fresh = "snapshot" in change.kinds
        if change.revision < newest.get(key, 0) or (not fresh and change.revision == newest.get(key)):
            yield f"P1: a watcher's revisions fall: {sighting}"
        newest[key] = change.revision
        seen[sighting.instance].append((10**9, sighting.tick, change.revision, sighting))
    for looks in seen.values():
        ends = sorted(looks, key=lambda look: look[1])
        for begun, _, revision, what in looks:
            highest = max((r for _, ended, r, _ in ends if ended < begun and begun < 10**9), default=0)
            if revision < highest:
                yield f"P1: revision {highest} was seen before: {what}"


# ---------------------------------------------------------------- P2: one message, one transaction


def nothing_is_torn(evidence: Evidence) -> Found:
    for snapshot in evidence.snapshots:
        for instance, stored in snapshot.instances.items():
            for wrong in torn(stored):
                yield f"P2: after life {snapshot.life - 1}, {instance}: {wrong}"


def torn(stored: Stored) -> Found:
    """What one message wrote in part."""
    row = stored.instance
    status = Status(row["status"])
    if (row["finished_us"] is not None) != status.is_terminal:
        yield f"finished_us does not agree with {status.name}: {row}"
    by_revision = {checkpoint["revision"] for checkpoint in stored.checkpoints.values()}
    for name, wait in stored.waits.items():
        checkpoint = stored.checkpoints.get(name)
        if wait["kind"] == WaitKind.SIGNAL:
            if (wait["outcome"] == WaitOutcome.RECEIVED) != (checkpoint is not None):
                yield f"a wait and its checkpoint: {wait}, {checkpoint}"
        elif not name.startswith("~") and (checkpoint is None or checkpoint["revision"] != wait["revision"]):
            yield f"a sleep and its checkpoint: {wait}, {checkpoint}"
        if (wait["settled_us"] is None) != (wait["outcome"] is None):
            yield f"half an outcome: {wait}"
    for event in stored.events.values():
        if event["type"] == EventType.COMPLETED and event["applied"] and status is not Status.COMPLETED:
            yield f"an applied completion of an instance that is {status.name}: {event}"
        failed = event["type"] == EventType.FAILED and event["applied"]
        if failed and status is not Status.FAILED and not stored.compensations:
            yield f"an applied failure of an instance that is {status.name}: {event}"
        if event["type"] == EventType.SUSPENDED and event["checkpoint_id"] and event["applied"]:
            wait_row = stored.waits.get(event["checkpoint_id"])
            if wait_row is None or (wait_row["revision"] == event["revision"]) != (
                event["revision"] in by_revision
            ):
                yield f"a suspension without its wait: {event}"
    if status is Status.COMPLETED and stored.payloads.get(PayloadKind.OUTPUT) != b"done":
        yield "completed without its output"
    if status is Status.COMPLETED and not any(
        event["type"] == EventType.COMPLETED and event["applied"] for event in stored.events.values()
    ):
        yield "completed without its event"
    if status.is_terminal and row["compensation_state"] == CompensationState.COMPLETED:
        for compensation in stored.compensations.values():
            if compensation["state"] != CompensationState.COMPLETED:
                yield f"ended as if all was undone, but for {compensation}"
    for request in stored.requests.values():
        if not stored.revisions[request["revision"]] & {"events", "signals", "errors", "requests"}:
            yield f"a request without what it made: {request}"


def steps_agree_with_events(evidence: Evidence) -> Found:
    """P2: scopes and steps are written with the events that tell of them."""
    for snapshot in evidence.snapshots:
        for instance, stored in snapshot.instances.items():
            events = {revision: event_of(row) for revision, row in stored.events.items()}
            wanted = [
                attrs.evolve(
                    step,
                    start_payload=events[step.revision].payload,
                    end_payload=None if step.end_revision is None else events[step.end_revision].payload,
                )
                for step in steps_of(events.values())
            ]
            if list(stored.steps) != wanted:
                yield f"P2: after life {snapshot.life - 1}, {instance}: {stored.steps} and not {wanted}"
            for event in events.values():
                if event.scope_id != words(told(event), "scope_id"):
                    yield f"P2: after life {snapshot.life - 1}, {instance}: the scope of {event}"


def event_of(row: Row) -> EventRecord:
    fields = {name: row[name] for name in attrs.fields_dict(EventRecord)}
    return EventRecord(**{**fields, "type": EventType(row["type"]), "applied": bool(row["applied"])})


# ---------------------------------------------------------------- P3: serial per instance

ONE_MESSAGE = (
    {"checkpoints", "waits"},
    {"checkpoints", "compensations"},
    {"compensation_attempts"},
    {"events"},
    {"events", "requests", "steps"},
    {"events", "requests", "checkpoints", "waits"},
    {"signals", "requests", "checkpoints"},
    {"errors", "requests"},
    {"retry_attempts"},
)
"""The tables in which one message can write."""


def revisions_are_serial(evidence: Evidence) -> Found:
    """P3: one revision, one message; a call that began after another's end has a higher one."""
    for snapshot in evidence.snapshots[-1:]:
        for instance, stored in snapshot.instances.items():
            for revision, tables in stored.revisions.items():
                if not any(tables <= allowed for allowed in ONE_MESSAGE):
                    yield f"P3: revision {revision} of {instance} is in {sorted(tables)}"
    made: dict[str, list[tuple[int, Call]]] = defaultdict(list)
    for call in evidence.history.calls:
        told = revision_of(call)
        if told is not None:
            made[call.instance].append((told, call))
    for calls in made.values():
        used: dict[int, Call] = {}
        for revision, call in calls:
            other = used.setdefault(revision, call)
            if other is not call and not same_request(other, call):
                yield f"P3: two calls have revision {revision}: {other} and {call}"
        for revision, call in calls:
            before = max((r for r, c in calls if c.ended is not None and c.ended < call.begun), default=0)
            if revision < before and is_new(call):
                yield f"P3: revision {before} was acknowledged before: {call}"


def is_new(call: Call) -> bool:
    """Whether the call cannot have been answered with what an earlier one had made."""
    named = call.arguments.get("idempotency_key") or call.arguments.get("request_id")
    return named is None and call.arguments.get("type") in (None, "note")


def revision_of(call: Call) -> int | None:
    """The revision of the change that the call made, where the reply tells."""
    match call.reply:
        case EventReply(event_id=int() as revision) | SignalReply(signal_id=revision):
            return revision
        case int() if call.name == "record_error":
            revision = call.reply
            return revision
        case _:
            return None


def same_request(one: Call, other: Call) -> bool:
    """Whether two calls may have one answer: the same id, or a signal that was pending already."""
    if one.name == other.name == "send" and one.arguments.get("key") is None:
        return bool(one.arguments["type"] == other.arguments["type"])
    for name in ("idempotency_key", "request_id"):
        if one.arguments.get(name) is not None:
            return bool(one.arguments.get(name) == other.arguments.get(name))
    return False


# ---------------------------------------------------------------- P4: one owner


def epochs_rise(evidence: Evidence) -> Found:
    """P4: no epoch is given twice; of one instance a later one is higher; an older one is refused."""
    owners: dict[int, Call] = {}
    registrations: dict[str, list[Call]] = defaultdict(list)
    for call in evidence.history.answered("register"):
        other = owners.setdefault(call.reply.epoch, call)
        if other is not call:
            yield f"P4: an epoch was given twice: {other} and {call}"
        for earlier in registrations[call.instance]:
            assert earlier.ended is not None
            if earlier.ended < call.begun and earlier.reply.epoch >= call.reply.epoch:
                yield f"P4: the epoch did not rise: {earlier} and {call}"
        registrations[call.instance].append(call)
    for call in evidence.history.calls:
        if call.epoch is None or not call.answered:
            continue
        for newer in registrations[call.instance]:
            assert newer.ended is not None
            if newer.reply.epoch > call.epoch and newer.ended < call.begun:
                yield f"P4: epoch {call.epoch} is older than {newer.reply.epoch}, and was obeyed: {call}"
                break
