"""P6, P7 and P11: endings, pauses, deadlines and refusals."""

from collections import defaultdict
from collections.abc import Iterator

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
    ChangeReply,
    EventReply,
    InstanceView,
    Registered,
    SignalReply,
    WaitReply,
)
from runtara.records import (
    Reason,
    Status,
    WaitOutcome,
)
from tests.simulation.history import Call
from tests.simulation.options import Kind
from tests.simulation.world import Evidence

Found = Iterator[str]

LATE_SECONDS = SCAN_SECONDS + QUARANTINE_SECONDS
"""After the trouble: until a jump of the clock is noticed, and an instance may rest from its failures."""

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
