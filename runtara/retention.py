"""How long instances that have ended are kept, and how much of them is deleted at once. All of it is pure.

    completed=30d, failed=90d, acme/completed=7d, bank/failed=keep

Rules of the text:

1. A rule is a status (``completed``, ``failed``, ``cancelled``), ``=``, and an age: a whole number with a
   unit (``s``, ``m``, ``h``, ``d``), or ``keep`` for ever. The age counts from the end of the instance.
2. ``tenant/`` before the status makes it a rule for that tenant alone. For that status it replaces the
   general one. The id of a tenant may hold any character but a comma and an outer space.
3. What no rule names is kept for ever; so does the empty text.
4. Rules are separated by commas, and spaces may stand around each. Anything else is refused.
"""

import re
from collections.abc import Mapping
from typing import Final

import attrs

from runtara.errors import ValidationError
from runtara.ids import check_tenant_id
from runtara.limits import MAX_DURATION_US, SECOND_US
from runtara.records import Status

# ---------------------------------------------------------------- rules

ENDED: Final = {status.word: status for status in Status if status.is_terminal}
UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
KEEP: Final = "keep"
AGE: Final = re.compile("([1-9][0-9]{0,11})([smhd])", re.ASCII)


@attrs.frozen(kw_only=True)
class Rule:
    """How long the instances that ended with a status are kept."""

    tenant_id: str | None = None
    """None: of every tenant that has no rule of its own for the status."""
    status: Status
    keep_us: int | None
    """From the end of the instance; None: for ever."""


@attrs.frozen
class Policy:
    """All rules, those of tenants first."""

    rules: Mapping[tuple[str | None, Status], Rule]

    @property
    def off(self) -> bool:
        """Whether nothing is ever deleted."""
        return all(rule.keep_us is None for rule in self.rules.values())

    def rule_for(self, tenant_id: str, status: Status) -> Rule | None:
        """The rule that an instance falls under."""
        return self.rules.get((tenant_id, status)) or self.rules.get((None, status))


def parse_policy(text: str, field: str = "retention") -> Policy:
    """The policy that ``text`` says.

    Raises:
        ValidationError: Naming ``field`` and the part of the text that is wrong.
    """
    if not isinstance(text, str):
        raise ValidationError(field, f"must be text, not {type(text).__name__}")
    rules: dict[tuple[str | None, Status], Rule] = {}
    for part in text.split(",") if text.strip(" ") else ():
        rule = parse_rule(part.strip(" "), field)
        if (rule.tenant_id, rule.status) in rules:
            raise wrong(field, part, "there is another rule for the same")
        rules[rule.tenant_id, rule.status] = rule
    return Policy(dict(sorted(rules.items(), key=lambda item: item[1].tenant_id is None)))


def parse_rule(part: str, field: str) -> Rule:
    subject, equals, age = part.rpartition("=")
    tenant_id, slash, word = subject.rpartition("/")
    if not equals:
        raise wrong(field, part, "a rule is status=age or tenant/status=age")
    if word not in ENDED:
        raise wrong(field, part, f"the status must be one of {', '.join(ENDED)}")
    if slash:
        check_tenant(tenant_id, part, field)
    return Rule(
        tenant_id=tenant_id if slash else None, status=ENDED[word], keep_us=parse_age(age, part, field)
    )


def check_tenant(tenant_id: str, part: str, field: str) -> None:
    try:
        check_tenant_id(tenant_id)
    except ValidationError as error:
        raise wrong(field, part, f"the tenant {error.details['problem']}") from None


def parse_age(age: str, part: str, field: str) -> int | None:
    if age == KEEP:
        return None
    found = AGE.fullmatch(age)
    if found is None:
        raise wrong(field, part, f"the age must be a whole number with one of {', '.join(UNITS)}, or {KEEP}")
    keep_us = int(found[1]) * UNITS[found[2]] * SECOND_US
    if keep_us > MAX_DURATION_US:
        raise wrong(field, part, f"the age must be at most {MAX_DURATION_US // SECOND_US // 86_400} days")
    return keep_us


def wrong(field: str, part: str, problem: str) -> ValidationError:
    return ValidationError(field, f"{part.strip(' ')!r}: {problem}")


# ---------------------------------------------------------------- batches

TARGET_SECONDS: Final = 0.005
"""What a batch should take of the writer."""
LONGEST_SECONDS: Final = 0.05
"""What it must not take; the next one is then as small as can be."""
LEAST_RECORDS: Final = 64
"""About where the records, and not the commit, begin to cost the most."""
FIRST_RECORDS: Final = 128
MOST_RECORDS: Final = 4096


def next_batch(records: int, seconds: float, full: bool) -> int:
    """How many records the next batch may delete.

    Args:
        records: What the last one was allowed.
        seconds: What it took.
        full: Whether it deleted as much as it was allowed; one that did not proves nothing about more.
    """
    if seconds > LONGEST_SECONDS:
        return LEAST_RECORDS
    if seconds > TARGET_SECONDS:
        return max(LEAST_RECORDS, records // 2)
    if full and seconds <= TARGET_SECONDS / 2:
        return min(MOST_RECORDS, 2 * records)
    return records


# ---------------------------------------------------------------- growth


def doublings(size: int, limit: int) -> int:
    """How often a store has reached a size: 1 from ``limit`` on, 2 from twice that, and so on.

    0 below the limit, and for a limit of 0, which means none.
    """
    return (size // limit).bit_length() if limit else 0
