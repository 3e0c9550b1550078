"""What the custom events of an instance tell of its scopes and steps.

Rules:

1. A custom event whose payload is a JSON object belongs to the scope that the object names, if any.
2. `START` begins a step, a record of its own each time. `END` ends the newest running step of its id and
   scope: of nested runs the inner one. An end without a running start makes nothing.
3. No payload is refused. What is no text, or more than `STEP_TEXT` characters of it, counts as not said; so
   the running steps of an instance, at most `OPEN_STEPS`, take a bounded place in memory.
4. Only payloads that may tell of a scope or a step are parsed.
"""

from collections.abc import Mapping
from typing import Any, Final

from runtara.limits import OPEN_STEPS, STEP_TEXT
from runtara.machine.draft import Draft
from runtara.messages import ReportEvent
from runtara.payloads import json_object, storable
from runtara.records import EventRecord, EventType, FinishStep, StepRecord, StepStatus

START: Final = "step_debug_start"
END: Final = "step_debug_end"

Body = Mapping[str, Any]

NO_BODY: Final[Body] = {}


def body_of(message: ReportEvent) -> Body:
    """The JSON object in the payload; empty if there is none, or it tells of no scope and no step."""
    if message.type is not EventType.CUSTOM or message.payload is None:
        return NO_BODY
    if message.subtype not in (START, END) and b"scope_id" not in message.payload:
        return NO_BODY
    return json_object(message.payload) or NO_BODY


def text(body: Body, name: str) -> str | None:
    value = body.get(name)
    return storable(value) if isinstance(value, str) and len(value) <= STEP_TEXT else None


def follow(draft: Draft, event: EventRecord, body: Body) -> None:
    """Begin or end the step that the event tells of."""
    step_id = text(body, "step_id")
    if step_id is None:
        return
    if event.subtype == START:
        begin(draft, event, step_id, body)
    elif event.subtype == END:
        finish(draft, event, step_id, body)


def begin(draft: Draft, event: EventRecord, step_id: str, body: Body) -> None:
    step = StepRecord(
        revision=event.revision,
        step_id=step_id,
        step_name=text(body, "step_name"),
        step_type=text(body, "step_type"),
        scope_id=event.scope_id,
        parent_scope_id=event.parent_scope_id,
        started_us=event.created_us,
    )
    draft.ops.append(step)
    draft.set(steps=(*draft.steps, step)[-OPEN_STEPS:])


def finish(draft: Draft, event: EventRecord, step_id: str, body: Body) -> None:
    for step in reversed(draft.steps):
        if (step.step_id, step.scope_id) == (step_id, event.scope_id):
            break
    else:
        return
    draft.ops.append(
        FinishStep(
            start_revision=step.revision,
            end_revision=event.revision,
            status=StepStatus.FAILED if failed(body) else StepStatus.COMPLETED,
            finished_us=event.created_us,
        )
    )
    draft.set(steps=tuple(s for s in draft.steps if s is not step))


def failed(body: Body) -> bool:
    """Whether an end tells of a failure: by its ``error``, or in its ``outputs``."""
    outputs = body.get("outputs")
    return body.get("error") is not None or (isinstance(outputs, dict) and outputs.get("_error") is True)
