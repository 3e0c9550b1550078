"""The chains of a batch, and their guards: what every backend asks before it writes (W3, W4)."""

from collections.abc import Container, Iterable, Mapping
from typing import TypeAlias

from runtara.errors import StoreRefused
from runtara.persistence.store import Unit

Heads: TypeAlias = dict[int, Unit]
"""The first unit of each chain, which holds its guard, by the instance's row."""


def heads_of(batch: Iterable[Unit]) -> Heads:
    heads: Heads = {}
    for unit in batch:
        heads.setdefault(unit.row, unit)
    return heads


def guards_that_fail(heads: Heads, stored: Mapping[int, tuple[int, int]]) -> frozenset[int]:
    """The rows whose chains do not continue what is stored: epoch and revision by row."""
    return frozenset(row for row, unit in heads.items() if not stands(unit, stored.get(row)))


def stands(unit: Unit, stored: tuple[int, int] | None) -> bool:
    """Whether the first unit of a chain continues the stored row."""
    return stored is None if unit.base == 0 else stored == (unit.epoch, unit.base)


def require_created(heads: Heads, records: Container[int]) -> None:
    """A chain that creates an instance must hold its record: no foreign key would notice.

    Args:
        records: The rows of which the batch holds an `InstanceRecord`.

    Raises:
        StoreRefused: One does not.
    """
    for row, head in heads.items():
        if head.base == 0 and row not in records:
            raise StoreRefused(f"a unit creates the instance {row} without its record")
