"""From the arguments of a question to the filter that a store understands: checked, and named where wrong."""

import datetime

from runtara.errors import ValidationError
from runtara.payloads import storable
from runtara.persistence.store import (
    CheckpointFilter,
    EventFilter,
    InstanceFilter,
    InstanceOrder,
    PageRequest,
    StepFilter,
)
from runtara.records import EventType, Status, StepStatus
from runtara.validation import instant_us
from runtara.words import member

Instant = datetime.datetime | int
"""An aware datetime, or microseconds of UTC since 1970."""


def optional_us(value: Instant | None, field: str) -> int | None:
    return None if value is None else instant_us(value, field)


def filter_text(value: str | None, field: str) -> str | None:
    """A text to compare with; one that no store can hold is refused.

    Raises:
        ValidationError: Naming ``field``.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValidationError(field, f"must be text, not {type(value).__name__}")
    if storable(value) != value:
        raise ValidationError(field, "must be text without lone surrogates")
    return value


def order_of(value: InstanceOrder | str) -> InstanceOrder:
    try:
        return InstanceOrder(value)
    except ValueError:
        words = ", ".join(order.value for order in InstanceOrder)
        raise ValidationError("order", f"must be one of {words}") from None


def page_of(limit: int, cursor: str | None = None, descending: bool = True) -> PageRequest:
    return PageRequest(limit=limit, cursor=cursor, descending=descending)


def instance_filter(
    tenant_id: str | None,
    statuses: frozenset[Status],
    workflow: str | None,
    id_prefix: str | None,
    created: tuple[Instant | None, Instant | None],
    finished: tuple[Instant | None, Instant | None],
    awaits_client: bool,
) -> InstanceFilter:
    return InstanceFilter(
        tenant_id=tenant_id,
        statuses=frozenset(member(Status, status, "statuses") for status in statuses),
        workflow=filter_text(workflow, "workflow"),
        id_prefix=filter_text(id_prefix, "id_prefix"),
        created_from_us=optional_us(created[0], "created_from"),
        created_before_us=optional_us(created[1], "created_before"),
        finished_from_us=optional_us(finished[0], "finished_from"),
        finished_before_us=optional_us(finished[1], "finished_before"),
        awaits_client=awaits_client,
    )


def checkpoint_filter(created_from: Instant | None, created_before: Instant | None) -> CheckpointFilter:
    return CheckpointFilter(
        created_from_us=optional_us(created_from, "created_from"),
        created_before_us=optional_us(created_before, "created_before"),
    )


def event_filter(
    type: EventType | str | None,
    subtype: str | None,
    created: tuple[Instant | None, Instant | None],
    text: str | None,
    scope_id: str | None,
    parent_scope_id: str | None,
    root_only: bool,
) -> EventFilter:
    return EventFilter(
        type=None if type is None else member(EventType, type, "type"),
        subtype=filter_text(subtype, "subtype"),
        created_from_us=optional_us(created[0], "created_from"),
        created_before_us=optional_us(created[1], "created_before"),
        text=filter_text(text, "text"),
        scope_id=filter_text(scope_id, "scope_id"),
        parent_scope_id=filter_text(parent_scope_id, "parent_scope_id"),
        root_only=root_only,
    )


def step_filter(
    statuses: frozenset[StepStatus],
    type: str | None,
    step_ids: frozenset[str],
    scope_id: str | None,
    parent_scope_id: str | None,
    root_only: bool,
) -> StepFilter:
    if isinstance(step_ids, str):
        raise ValidationError("step_ids", "must be several texts, not one")
    named = (filter_text(step_id, "step_ids") for step_id in step_ids)
    return StepFilter(
        statuses=frozenset(member(StepStatus, status, "statuses") for status in statuses),
        type=filter_text(type, "type"),
        step_ids=frozenset(step_id for step_id in named if step_id is not None),
        scope_id=filter_text(scope_id, "scope_id"),
        parent_scope_id=filter_text(parent_scope_id, "parent_scope_id"),
        root_only=root_only,
    )
