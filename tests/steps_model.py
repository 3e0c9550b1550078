"""Step summaries as plain Python would make them: from the events alone, all of them at once."""

import json
from collections.abc import Iterable
from typing import Any

import attrs

from runtara.records import EventRecord, EventType, StepRecord, StepStatus


def steps_of(events: Iterable[EventRecord]) -> list[StepRecord]:
    """The steps that the events of one instance tell of, in the order in which they began."""
    steps: dict[int, StepRecord] = {}
    running: dict[tuple[str, str | None], list[int]] = {}
    for event in sorted(events, key=lambda e: e.revision):
        body = told(event)
        if not isinstance(body.get("step_id"), str):
            continue
        nest = running.setdefault((body["step_id"], words(body, "scope_id")), [])
        if event.subtype == "step_debug_start":
            nest.append(event.revision)
            steps[event.revision] = StepRecord(
                revision=event.revision,
                step_id=body["step_id"],
                step_name=words(body, "step_name"),
                step_type=words(body, "step_type"),
                scope_id=words(body, "scope_id"),
                parent_scope_id=words(body, "parent_scope_id"),
                started_us=event.created_us,
            )
        elif event.subtype == "step_debug_end" and nest:
            begun = nest.pop()
            steps[begun] = attrs.evolve(
                steps[begun],
                status=StepStatus.FAILED if went_wrong(body) else StepStatus.COMPLETED,
                finished_us=event.created_us,
                end_revision=event.revision,
            )
    return list(steps.values())


def told(event: EventRecord) -> dict[str, Any]:
    if event.type is not EventType.CUSTOM:
        return {}
    try:
        body = json.loads(event.payload or b"")
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def words(body: dict[str, Any], name: str) -> str | None:
    value = body.get(name)
    return value if isinstance(value, str) else None


def went_wrong(body: dict[str, Any]) -> bool:
    outputs = body.get("outputs")
    return body.get("error") is not None or (isinstance(outputs, dict) and outputs.get("_error") is True)
