"""Which index a list of instances goes by: SQLite has no statistics here that it could choose by.

Rules:

1. A list is walked in its order, by an index that gives it. A page costs what it holds, as long as most of
   the rows that are passed belong to it.
2. A condition that such an index does not know may hold for a few rows only, far apart. So these are first
   counted, by an index that knows it, up to `FEW`. If there are no more, they are looked up and sorted; if
   there are more, the walk is expected to meet them soon.
3. Ids and workflows are found within a tenant. A list over all tenants asks one after the other, if there
   are no more than `MOST_TENANTS`.
4. What is counted and what is listed must be one moment: the caller holds a transaction.
"""

import sqlite3
from collections.abc import Iterator
from functools import partial
from typing import Final

import attrs

from runtara.persistence.lists import (
    TERMINAL,
    Clause,
    Listing,
    branches_of,
    instance_clause,
    ordered_clause,
)
from runtara.persistence.store import InstanceFilter, InstanceOrder

ID: Final = "instances_by_id"
WORKFLOW: Final = "instances_by_workflow"
AWAITING: Final = "instances_awaiting"
CREATION: Final = "instances_by_creation"
FINISH: Final = "instances_by_finish"
TENANT: Final = "instances_by_tenant"
TENANT_FINISH: Final = "instances_by_tenant_finish"
OF_A_TENANT: Final = (ID, WORKFLOW)
"""They know their condition only within a tenant."""

FEW: Final = 10_000
FEW_OF_A_WORKFLOW: Final = 2_500
"""Less, because the indexes by finish know it as well, so a walk passes the others quickly."""
MOST_TENANTS: Final = 50
EVER: Final = (None, None)
ENDED: Final = frozenset(TERMINAL)

TENANTS: Final = (
    "WITH RECURSIVE tenants (name) AS (SELECT min(tenant_id) FROM instances UNION ALL"
    " SELECT (SELECT min(tenant_id) FROM instances WHERE tenant_id > name) FROM tenants"
    " WHERE name IS NOT NULL)"
    f" SELECT name FROM tenants WHERE name IS NOT NULL LIMIT {MOST_TENANTS + 1}"
)
"""One look-up for each tenant."""


@attrs.frozen(kw_only=True)
class Run:
    """Some rows of a list, in its order."""

    index: str
    clause: Clause
    sorted: bool
    """Whether the rows are looked up and then sorted, because the index gives another order."""

    def sql(self, listing: Listing) -> str:
        """Its last value is how many rows to read at most. Sorting moves keys only, not whole rows."""
        if not self.sorted:
            walked = attrs.evolve(listing, select=f"{listing.select} INDEXED BY {self.index}")
            return walked.sql(self.clause)
        found = attrs.evolve(listing, select=f"SELECT row FROM instances INDEXED BY {self.index}")
        return (
            f"{listing.select} NOT INDEXED WHERE row IN ({found.sql(self.clause)}) ORDER BY {listing.order}"
        )


def runs(connection: sqlite3.Connection, where: InstanceFilter, order: InstanceOrder) -> list[Run]:
    """What a list is merged from."""
    for index, part in narrow(where, order):
        found = few(connection, index, part)
        if found is not None:
            return [sorted_run(index, part, attrs.evolve(where, tenant_id=t), order) for t in found]
    return [
        Run(index=walked_by(where, order), clause=ordered_clause(where, order, statuses), sorted=False)
        for statuses in branches_of(where, order)
    ]


def sorted_run(index: str, part: InstanceFilter, where: InstanceFilter, order: InstanceOrder) -> Run:
    clause = ordered_clause(where, order, part.statuses or where.statuses)
    return Run(index=index, clause=clause, sorted=True)


def walked_by(where: InstanceFilter, order: InstanceOrder) -> str:
    """The index that gives the order of a list."""
    of_tenant = where.tenant_id is not None
    if order is InstanceOrder.FINISHED:
        return TENANT_FINISH if of_tenant else FINISH
    if of_tenant and where.workflow is not None:
        return WORKFLOW
    if where.statuses:
        return "instances_by_tenant_status" if of_tenant else "instances_by_status"
    return TENANT if of_tenant else CREATION


# ---------------------------------------------------------------- few


def narrow(where: InstanceFilter, order: InstanceOrder) -> Iterator[tuple[str, InstanceFilter]]:
    """The indexes that know a condition which the walk does not, each with the part of ``where`` it knows."""
    one = partial(InstanceFilter, tenant_id=where.tenant_id)
    of_tenant = where.tenant_id is not None
    by_finish = order is InstanceOrder.FINISHED
    if where.id_prefix:
        yield ID, one(id_prefix=where.id_prefix)
    if where.workflow is not None and walked_by(where, order) != WORKFLOW:
        yield WORKFLOW, one(workflow=where.workflow, statuses=where.statuses)
    if where.awaits_client:
        yield AWAITING, one(awaits_client=True)
    created = where.created_from_us, where.created_before_us
    if by_finish and created != EVER:
        index = TENANT if of_tenant else CREATION
        yield index, one(created_from_us=created[0], created_before_us=created[1])
    finished = where.finished_from_us, where.finished_before_us
    statuses = where.statuses & ENDED if where.statuses else ENDED
    if not by_finish and finished != EVER and statuses:
        index = TENANT_FINISH if of_tenant else FINISH
        yield index, one(statuses=statuses, finished_from_us=finished[0], finished_before_us=finished[1])


def few(connection: sqlite3.Connection, index: str, part: InstanceFilter) -> list[str | None] | None:
    """If ``part`` holds for few rows: the tenants that have some; None stands for all of them."""
    tenants: list[str | None] = [part.tenant_id]
    if part.tenant_id is None and index in OF_A_TENANT:
        tenants = [name for (name,) in connection.execute(TENANTS)]
        if len(tenants) > MOST_TENANTS:
            return None
    bound = FEW_OF_A_WORKFLOW if index == WORKFLOW else FEW
    counts: dict[str | None, int] = {}
    for tenant in tenants:
        clause = instance_clause(attrs.evolve(part, tenant_id=tenant), part.statuses)
        sql = (
            "SELECT count(*) FROM"
            f" (SELECT 1 FROM instances INDEXED BY {index} WHERE {clause.sql} LIMIT {bound + 1})"
        )
        counts[tenant] = connection.execute(sql, clause.values).fetchone()[0]
        if sum(counts.values()) > bound:
            return None
    return [tenant for tenant, count in counts.items() if count]
