"""The commands about instances: ``ls``, ``show``, ``events``, ``steps``, ``checkpoints``, ``errors``."""

from collections.abc import Mapping
from typing import Any, Final

import attrs
import click

import runtara
from runtara.cli.options import (
    Look,
    Scope,
    answer_count,
    answer_page,
    ask,
    asks,
    count_option,
    range_options,
    scope_options,
)
from runtara.cli.printing import (
    Columns,
    age,
    fields,
    moment,
    payload,
    plain,
    say_json,
    say_pairs,
    shortened,
    word,
)

STATUSES: Final = [status.word for status in runtara.Status if status is not runtara.Status.UNKNOWN]
STEP_STATUSES: Final = [status.word for status in runtara.StepStatus]
EVENT_TYPES: Final = [type.word for type in runtara.EventType]
ORDERS: Final = [order.value for order in runtara.InstanceOrder]


def given(**values: Any) -> Mapping[str, Any]:
    """The arguments of a question."""
    return values


# ---------------------------------------------------------------- ls


@click.command("ls")
@asks(Scope.SEVERAL, paged=True)
@click.option("--status", "statuses", multiple=True, type=click.Choice(STATUSES), help="Any of these.")
@click.option("--workflow", help="Of this workflow.")
@click.option("--prefix", "id_prefix", help="Ids that begin so.")
@range_options("created")
@range_options("finished")
@click.option("--awaits-client", is_flag=True, help="That nothing but their client moves, and since when.")
@click.option("--order", type=click.Choice(ORDERS), default="created", show_default=True)
@count_option
def list_instances(
    look: Look, statuses: tuple[str, ...], awaits_client: bool, order: str, count: bool, **filters: Any
) -> None:
    """List instances, the newest first."""
    where = given(
        statuses=frozenset(runtara.Status[status.upper()] for status in statuses),
        awaits_client=awaits_client,
        **filters,
    )
    if count:
        answer_count(look, ask(look, lambda reader: reader.count_instances(**where)))
        return
    chosen = runtara.InstanceOrder(order)
    page = ask(look, lambda reader: reader.list_instances(**where, order=chosen, **look.page))
    answer_page(look, page, instance_columns(look, awaits_client))


def instance_columns(look: Look, awaits_client: bool) -> Columns[runtara.InstanceRecord]:
    now_us = runtara.SystemClock().now_us()
    columns: dict[str, Any] = {} if look.tenant is not None else {"TENANT": lambda r: r.tenant_id}
    columns |= {
        "INSTANCE": lambda r: r.instance_id,
        "STATUS": lambda r: word(r.status),
        "REASON": lambda r: word(r.reason),
        "WORKFLOW": lambda r: word(r.workflow),
        "CREATED": lambda r: moment(r.created_us),
    }
    if awaits_client:
        columns["AWAITS CLIENT FOR"] = lambda r: age(now_us - r.awaits_client_us)
    else:
        columns["FINISHED"] = lambda r: moment(r.finished_us)
    return columns


# ---------------------------------------------------------------- show


@click.command()
@asks(Scope.ONE)
@click.argument("instance_id")
def show(look: Look, instance_id: str) -> None:
    """Show one instance: its row, its payloads, and what it waits for (of its newest 100 waits)."""

    async def question(reader: runtara.Reader) -> tuple[runtara.InstanceView, list[runtara.WaitRecord]]:
        waits = await reader.list_waits(instance_id)
        return await reader.get(instance_id), [wait for wait in waits.items if wait.open]

    view, waits = ask(look, question)
    if look.json:
        say_json(view_as_json(view, waits))
    else:
        say_pairs([*pairs_of(view), *((f"waits for {wait.wait_id}", wait_text(wait)) for wait in waits)])


def view_as_json(view: runtara.InstanceView, waits: list[runtara.WaitRecord]) -> dict[str, Any]:
    """The row, and over it what the other tables know better. Sessions cannot be seen from here."""
    beside = {
        field.name: plain(getattr(view, field.name))
        for field in attrs.fields(runtara.InstanceView)
        if field.name not in ("record", "connected")
    }
    return {**fields(view.record), **beside, "open_waits": plain(waits)}


def pairs_of(view: runtara.InstanceView) -> list[tuple[str, str]]:
    record = view.record
    return [
        ("instance", record.instance_id),
        ("tenant", record.tenant_id),
        ("status", word(record.status)),
        ("reason", word(record.reason)),
        ("workflow", word(record.workflow)),
        ("definition version", word(record.definition_version)),
        ("epoch, revision", f"{record.epoch}, {view.revision}"),
        ("attempt", f"{record.attempt} of {record.max_attempts}"),
        ("checkpoint", word(view.checkpoint_id)),
        ("unconsumed signals", str(view.unconsumed_signals)),
        ("created", moment(record.created_us)),
        ("started", moment(record.started_us)),
        ("last activity", moment(view.last_activity_us)),
        ("finished", moment(record.finished_us)),
        ("sleeps until", moment(record.sleep_until_us)),
        ("deadline", moment(record.deadline_us)),
        ("awaits client since", moment(record.awaits_client_us)),
        ("compensation", word(record.compensation_state)),
        ("exit code", word(record.exit_code)),
        ("peak memory bytes", word(record.peak_memory_bytes)),
        ("cpu time us", word(record.cpu_time_us)),
        ("input", payload(view.input)),
        ("output", payload(view.output)),
        ("error", "-" if view.error is None else shortened(view.error)),
        ("stderr", payload(view.stderr)),
    ]


def wait_text(wait: runtara.WaitRecord) -> str:
    what = "its time" if wait.key is None else f"the signal {wait.key}"
    return what if wait.deadline_us is None else f"{what}, until {moment(wait.deadline_us)}"


# ---------------------------------------------------------------- histories


@click.command()
@asks(Scope.ONE, paged=True)
@click.argument("instance_id")
@click.option("--type", type=click.Choice(EVENT_TYPES), help="Of this type.")
@click.option("--subtype", help="Of this subtype.")
@range_options("created")
@click.option("--text", help="With this in the payload, case and all.")
@scope_options
@count_option
def events(look: Look, instance_id: str, count: bool, **where: Any) -> None:
    """List what an instance reported, the newest first."""
    if count:
        answer_count(look, ask(look, lambda reader: reader.count_events(instance_id, **where)))
        return
    page = ask(look, lambda reader: reader.list_events(instance_id, **where, **look.page))
    answer_page(look, page, EVENT_COLUMNS)


EVENT_COLUMNS: Final[Columns[runtara.EventRecord]] = {
    "ID": lambda r: str(r.revision),
    "CREATED": lambda r: moment(r.created_us),
    "TYPE": lambda r: word(r.type) if r.applied else f"{word(r.type)} (too late)",
    "SUBTYPE": lambda r: word(r.subtype),
    "SCOPE": lambda r: word(r.scope_id),
    "PAYLOAD": lambda r: payload(r.payload),
}


@click.command()
@asks(Scope.ONE, paged=True)
@click.argument("instance_id")
@click.option("--status", "statuses", multiple=True, type=click.Choice(STEP_STATUSES), help="Any of these.")
@click.option("--type", help="Of this type.")
@click.option("--step", "step_ids", multiple=True, help="Any of these ids.")
@scope_options
@count_option
def steps(
    look: Look,
    instance_id: str,
    statuses: tuple[str, ...],
    step_ids: tuple[str, ...],
    count: bool,
    **filters: Any,
) -> None:
    """List the steps of an instance, the newest first."""
    where = given(
        statuses=frozenset(runtara.StepStatus[status.upper()] for status in statuses),
        step_ids=frozenset(step_ids),
        **filters,
    )
    if count:
        answer_count(look, ask(look, lambda reader: reader.count_steps(instance_id, **where)))
        return
    page = ask(look, lambda reader: reader.list_steps(instance_id, **where, **look.page))
    answer_page(look, page, STEP_COLUMNS, step_as_json)


def step_as_json(step: runtara.StepRecord) -> dict[str, Any]:
    """A step, with what its events say in place of the events."""
    found = fields(step)
    del found["start_payload"], found["end_payload"]
    more = given(duration_ms=step.duration_ms, inputs=step.inputs, outputs=step.outputs, error=step.error)
    return {**found, **more}


STEP_COLUMNS: Final[Columns[runtara.StepRecord]] = {
    "STEP": lambda r: r.step_id,
    "NAME": lambda r: word(r.step_name),
    "TYPE": lambda r: word(r.step_type),
    "STATUS": lambda r: word(r.status),
    "STARTED": lambda r: moment(r.started_us),
    "MS": lambda r: word(r.duration_ms),
    "SCOPE": lambda r: word(r.scope_id),
    "ERROR": lambda r: "-" if r.error is None else shortened(str(r.error)),
}


@click.command()
@asks(Scope.ONE, paged=True)
@click.argument("instance_id")
@range_options("created")
@count_option
def checkpoints(look: Look, instance_id: str, count: bool, **where: Any) -> None:
    """List the checkpoints of an instance, the newest first."""
    if count:
        answer_count(look, ask(look, lambda reader: reader.count_checkpoints(instance_id, **where)))
        return
    page = ask(look, lambda reader: reader.list_checkpoints(instance_id, **where, **look.page))
    answer_page(look, page, CHECKPOINT_COLUMNS)


CHECKPOINT_COLUMNS: Final[Columns[runtara.CheckpointRecord]] = {
    "CHECKPOINT": lambda r: r.checkpoint_id,
    "CREATED": lambda r: moment(r.created_us),
    "BYTES": lambda r: str(len(r.state)),
    "UNDONE BY": lambda r: "-" if r.compensation is None else r.compensation.step_id,
    "STATE": lambda r: payload(r.state),
}


@click.command()
@asks(Scope.ONE, paged=True)
@click.argument("instance_id")
@click.option("--chain", "error_id", type=int, help="Only the error of this id, its cause, and so on.")
@count_option
def errors(look: Look, instance_id: str, error_id: int | None, count: bool) -> None:
    """List the errors that an instance recorded, the newest first."""
    if count:
        answer_count(look, ask(look, lambda reader: reader.count_records(instance_id, runtara.ErrorRecord)))
    elif error_id is None:
        page = ask(look, lambda reader: reader.list_errors(instance_id, **look.page))
        answer_page(look, page, ERROR_COLUMNS)
    else:
        wanted = error_id
        chain = ask(look, lambda reader: reader.error_chain(instance_id, wanted))
        answer_page(look, runtara.Page(items=chain, next=None), ERROR_COLUMNS)


ERROR_COLUMNS: Final[Columns[runtara.ErrorRecord]] = {
    "ID": lambda r: str(r.error_id),
    "CREATED": lambda r: moment(r.created_us),
    "SEVERITY": lambda r: word(r.severity),
    "CATEGORY": lambda r: word(r.category),
    "CODE": lambda r: r.code,
    "CAUSE": lambda r: word(r.cause_id),
    "STEP": lambda r: word(r.step_id),
    "MESSAGE": lambda r: shortened(r.message),
}
