"""The model: what the promises say about a history and the snapshots between the lives.

Each check is a function of the evidence that yields what it finds broken, in words that begin with the number
of the promise. *Before* and *after* are ticks: the simulation runs on one loop, so they are exact.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

from runtara.actors.directory import QUARANTINE_SECONDS
from runtara.clock import SCAN_SECONDS
from runtara.errors import (
    ActorFailed,
    AlreadyFinished,
    Draining,
    InstanceFailed,
    InstanceNotFound,
    InvalidInstanceState,
    OutcomeUnknown,
    Overloaded,
    Quarantined,
    RuntaraError,
    RuntimeClosed,
    StaleEpoch,
    StoreFailed,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from runtara.messages import (
    AckReply,
    Change,
    ChangeReply,
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
    EventType,
    PayloadKind,
    Reason,
    SignalType,
    Status,
    WaitKind,
    WaitOutcome,
)
from tests.simulation.history import Call
from tests.simulation.options import Kind
from tests.simulation.snapshots import Snapshot, Stored
from tests.simulation.world import Evidence

Found = Iterator[str]
Check = Callable[[Evidence], Found]

LATE_SECONDS = SCAN_SECONDS + QUARANTINE_SECONDS
"""After the trouble: until a jump of the clock is noticed, and an instance may rest from its failures."""

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


# ---------------------------------------------------------------- P3: serial per instance

ONE_MESSAGE = (
    {"checkpoints", "waits"},
    {"checkpoints", "compensations"},
    {"compensation_attempts"},
    {"events"},
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


# ---------------------------------------------------------------- P6: terminal is terminal


def terminal_is_terminal(evidence: Evidence) -> Found:
    """P6: the first ending that anybody saw is the only one that anybody sees."""
    endings: dict[str, tuple[int, Status, object]] = {}
    seen: list[tuple[int, int, str, Status, object]] = []
    for call in evidence.history.calls:
        status = status_of(call)
        if status is not None and call.ended is not None:
            seen.append((call.ended, call.begun, call.instance, status, call))
    for sighting in evidence.history.sightings:
        if sighting.name == "change":
            seen.append((sighting.tick, 0, sighting.instance, sighting.value.status, sighting))
    for snapshot in evidence.snapshots:
        for instance, stored in snapshot.instances.items():
            seen.append(
                (snapshot.tick, snapshot.tick, instance, Status(stored.instance["status"]), snapshot.life)
            )
    for ended, begun, instance, status, what in sorted(seen, key=lambda look: look[0]):
        if instance in endings:
            since, ending, first = endings[instance]
            if status.is_terminal and status is not ending:
                yield f"P6: {instance} was {ending.name} ({first}) and is {status.name}: {what}"
            elif not status.is_terminal and begun > since:
                yield f"P6: {instance} was {ending.name} ({first}) and lives again: {what}"
        elif status.is_terminal:
            endings[instance] = (ended, status, what)


def status_of(call: Call) -> Status | None:
    """The status of the instance that a reply or a refusal tells, as of now; not one that is recalled."""
    if isinstance(call.refusal, AlreadyFinished):
        return Status[call.refusal.status.upper()]
    if isinstance(call.refusal, InvalidInstanceState):
        word = str(call.refusal.details["actual"]).upper()
        return Status[word] if word in Status.__members__ else None
    recalled = call.arguments.get("idempotency_key") or call.arguments.get("request_id")
    match call.reply:
        case (
            InstanceView(status=status)
            | EventReply(status=status)
            | AckReply(status=status)
            | ChangeReply(status=status)
            | SignalReply(status=status)
            | Registered(status=status)
        ) if not recalled or status.is_terminal:
            return status
        case _:
            return None


# ---------------------------------------------------------------- P7: time is absolute


def deadlines_stand(evidence: Evidence) -> Found:
    """P7: one wait, one deadline, fixed when it was first entered; nothing ends before it."""
    first_asked: dict[tuple[str, str], Call] = {}
    deadlines: dict[tuple[str, str], int | None] = {}
    for call in evidence.history.calls:
        if call.name not in ("sleep", "wait_signal", "suspend"):
            continue
        key = (call.instance, call.arguments["checkpoint_id"])
        first_asked.setdefault(key, call)
        if not call.answered or call.name == "suspend":
            continue
        reply: WaitReply = call.reply
        if deadlines.setdefault(key, reply.deadline_us) != reply.deadline_us:
            yield f"P7: the deadline moved from {deadlines[key]}: {call}"
    for snapshot in evidence.snapshots:
        for instance, stored in snapshot.instances.items():
            for name, wait in stored.waits.items():
                due_us = wait["deadline_us"]
                if deadlines.setdefault((instance, name), due_us) != due_us:
                    yield f"P7: the deadline moved from {deadlines[instance, name]}: {wait}"
                early = due_us is not None and wait["settled_us"] is not None and wait["settled_us"] < due_us
                if early and wait["outcome"] != WaitOutcome.RECEIVED:
                    yield f"P7: {instance} did not wait until {due_us}: {wait}"


def nothing_wakes_early(evidence: Evidence) -> Found:
    """P7: no reply tells of a deadline that the wall clock had not shown."""
    if {Kind.BACKWARD.value, Kind.FORWARD.value} & set(evidence.injected):
        return
    for call in evidence.history.answered("sleep", "wait_signal"):
        reply: WaitReply = call.reply
        over = reply.outcome in (WaitOutcome.ELAPSED, WaitOutcome.TIMED_OUT)
        if over and reply.deadline_us is not None and call.ended_us < reply.deadline_us:
            yield f"P7: {reply.deadline_us - call.ended_us} us too early: {call}"


def deadlines_are_kept(evidence: Evidence) -> Found:
    """P7: a deadline is the first request's time and its duration, no earlier."""
    if {Kind.BACKWARD.value, Kind.FORWARD.value} & set(evidence.injected):
        return
    asked: dict[tuple[str, str], Call] = {}
    for call in evidence.history.calls:
        if call.name == "sleep":
            asked.setdefault((call.instance, call.arguments["checkpoint_id"]), call)
        if call.name == "suspend":
            asked.setdefault((call.instance, call.arguments["checkpoint_id"]), call)
    answered: dict[tuple[str, str], Call] = {}
    for call in evidence.history.answered("sleep"):
        answered.setdefault((call.instance, call.arguments["checkpoint_id"]), call)
    for key, call in answered.items():
        first = asked[key]
        duration_us = round(first.arguments["seconds"] * 1e6)
        entered_us = call.reply.deadline_us - duration_us
        if not first.begun_us <= entered_us <= call.ended_us:
            yield f"P7: entered at {entered_us}, but first asked at {first.begun_us}: {call}"


def deadlines_are_met(evidence: Evidence) -> Found:
    """P7, P10: in calm times whoever waits for a deadline hears of it soon."""
    for call in evidence.history.answered("sleep", "wait_signal"):
        reply: WaitReply = call.reply
        if reply.outcome in (WaitOutcome.ELAPSED, WaitOutcome.TIMED_OUT) and reply.deadline_us is not None:
            late_us = call.ended_us - max(reply.deadline_us, call.begun_us, evidence.calm_us)
            if late_us > LATE_SECONDS * 1e6:
                yield f"P7: {late_us / 1e6:.1f} s too late: {call}"


# ---------------------------------------------------------------- the rules of pausing


def register_does_not_unpause(evidence: Evidence) -> Found:
    """A paused instance stays paused, whoever registers, until somebody sends a resume."""
    pauses: dict[str, list[int]] = defaultdict(list)
    movers: dict[str, list[int]] = defaultdict(list)
    for call in evidence.history.calls:
        if call.name == "send" and call.arguments.get("type") in ("resume", "cancel"):
            movers[call.instance].append(call.begun)
        if call.name == "terminate":
            movers[call.instance].append(call.begun)
        match call.reply:
            case (
                InstanceView(status=Status.SUSPENDED, reason=Reason.PAUSED)
                | AckReply(status=Status.SUSPENDED, reason=Reason.PAUSED)
            ):
                pauses[call.instance].append(call.begun)
    for call in evidence.history.answered("register"):
        assert call.ended is not None
        paused = max((tick for tick in pauses[call.instance] if tick < call.begun), default=None)
        if paused is None or call.reply.paused:
            continue
        last_pause_known = paused
        # A resume that began at any time may have come between; only one that never began cannot.
        if not any(tick < call.ended for tick in movers[call.instance]):
            yield f"P6: paused at {last_pause_known}, never resumed, and not paused: {call}"


# ---------------------------------------------------------------- P11: no quiet failure

EXPECTED: tuple[type[RuntaraError], ...] = (
    ActorFailed,
    AlreadyFinished,
    Draining,
    InstanceFailed,
    InstanceNotFound,
    InvalidInstanceState,
    OutcomeUnknown,
    Overloaded,
    Quarantined,
    RuntimeClosed,
    StaleEpoch,
    StoreFailed,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)


def refusals_are_expected(evidence: Evidence) -> Found:
    """P11: nobody is refused what he may ask for, and one bad write harms no other."""
    refused = 0
    for call in evidence.history.calls:
        if call.refusal is None:
            continue
        if type(call.refusal) not in EXPECTED:
            yield f"P11: an unexpected refusal: {call}"
        if isinstance(call.refusal, StoreRefused):
            refused += 1
        if isinstance(call.refusal, InstanceNotFound) and existed(evidence, call):
            yield f"P1: the instance existed: {call}"
    if refused > evidence.refused_units:
        yield f"P11: {refused} calls were refused for {evidence.refused_units} bad units"


def existed(evidence: Evidence, call: Call) -> bool:
    return any(
        other.instance == call.instance and other.ended is not None and other.ended < call.begun
        for other in evidence.history.answered("register")
    )


CHECKS: tuple[Check, ...] = (
    acknowledged_is_durable,
    seen_is_durable,
    checkpoints_never_change,
    reads_are_up_to_date,
    revisions_never_fall,
    nothing_is_torn,
    revisions_are_serial,
    epochs_rise,
    signals_are_kept,
    signals_are_consumed_once,
    accepted_in_time_wins,
    answers_agree_with_keys,
    shown_once_and_in_order,
    live_sessions_are_shown_all,
    terminal_is_terminal,
    deadlines_stand,
    nothing_wakes_early,
    deadlines_are_kept,
    deadlines_are_met,
    register_does_not_unpause,
    refusals_are_expected,
)


def violations(evidence: Evidence) -> list[str]:
    """All that is broken, in words."""
    return [*evidence.history.bugs, *(found for check in CHECKS for found in check(evidence))]
