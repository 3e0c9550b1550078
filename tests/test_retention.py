"""The rules of the retention, the size of its batches, and how growth is counted: all of it pure."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtara import Settings, Status, ValidationError
from runtara.config import settings_from
from runtara.ids import FORBIDDEN, MAX_ID_LENGTH
from runtara.retention import (
    ENDED,
    FIRST_RECORDS,
    LEAST_RECORDS,
    LONGEST_SECONDS,
    MOST_RECORDS,
    TARGET_SECONDS,
    UNITS,
    Policy,
    Rule,
    doublings,
    next_batch,
    parse_policy,
)

DAY_US = 86_400_000_000


def rules_of(text: str) -> list[Rule]:
    return list(parse_policy(text).rules.values())


# ---------------------------------------------------------------- what is allowed


def test_a_policy_says_what_its_rules_say_those_of_tenants_first() -> None:
    assert rules_of("completed=30d, failed=90d,acme/completed=7d ,  bank/failed=keep") == [
        Rule(tenant_id="acme", status=Status.COMPLETED, keep_us=7 * DAY_US),
        Rule(tenant_id="bank", status=Status.FAILED, keep_us=None),
        Rule(status=Status.COMPLETED, keep_us=30 * DAY_US),
        Rule(status=Status.FAILED, keep_us=90 * DAY_US),
    ]


@pytest.mark.parametrize(
    ("age", "keep_us"),
    [
        ("1s", 1_000_000),
        ("90m", 5_400_000_000),
        ("12h", 12 * 3_600_000_000),
        ("36500d", 36_500 * DAY_US),
        ("keep", None),
    ],
)
def test_every_unit_means_what_it_says(age: str, keep_us: int | None) -> None:
    assert rules_of(f"cancelled={age}") == [Rule(status=Status.CANCELLED, keep_us=keep_us)]


@pytest.mark.parametrize("text", ["", " ", "   "])
def test_without_rules_the_retention_is_off(text: str) -> None:
    assert parse_policy(text) == Policy({})
    assert parse_policy(text).off


def test_a_policy_that_keeps_everything_is_off_and_one_that_deletes_something_is_not() -> None:
    assert parse_policy("completed=keep, acme/failed=keep").off
    assert not parse_policy("completed=keep, acme/failed=1d").off


def test_the_rule_of_a_tenant_replaces_the_general_one_for_that_status_alone() -> None:
    policy = parse_policy("completed=30d, failed=90d, acme/completed=7d, bank/completed=keep")

    def keeps(tenant_id: str, status: Status) -> int | None:
        rule = policy.rule_for(tenant_id, status)
        assert rule is not None
        return rule.keep_us

    assert keeps("acme", Status.COMPLETED) == 7 * DAY_US
    assert keeps("acme", Status.FAILED) == 90 * DAY_US
    assert keeps("bank", Status.COMPLETED) is None
    assert keeps("other", Status.COMPLETED) == 30 * DAY_US
    assert policy.rule_for("acme", Status.CANCELLED) is None


@pytest.mark.parametrize("tenant_id", ["a/b", "a=b", "a b", "%2F", "completed", "ä/=/", "'#", "keep"])
def test_a_tenant_may_have_any_name_without_a_comma(tenant_id: str) -> None:
    assert rules_of(f"{tenant_id}/failed=1d") == [
        Rule(tenant_id=tenant_id, status=Status.FAILED, keep_us=DAY_US)
    ]


# ---------------------------------------------------------------- what is refused

RULE = "a rule is status=age or tenant/status=age"
STATUS = "the status must be one of completed, failed, cancelled"
AGE = "the age must be a whole number with one of s, m, h, d, or keep"


@pytest.mark.parametrize(
    ("text", "part", "problem"),
    [
        ("completed", "completed", RULE),
        ("completed=30d,", "", RULE),
        (",completed=30d", "", RULE),
        ("completed=30d,,failed=1d", "", RULE),
        ("completed=30d failed=1d", "completed=30d failed=1d", STATUS),
        ("completed=30d; failed=1d", "completed=30d; failed=1d", STATUS),
        ("=30d", "=30d", STATUS),
        ("completed=30d, done=1d", "done=1d", STATUS),
        ("running=1d", "running=1d", STATUS),
        ("Completed=1d", "Completed=1d", STATUS),
        ("completed =1d", "completed =1d", STATUS),
        ("acme/=1d", "acme/=1d", STATUS),
        ("acme/ completed=1d", "acme/ completed=1d", STATUS),
        ("/completed=1d", "/completed=1d", "the tenant must not be empty"),
        ("a\x00b/completed=1d", "a\\x00b/completed=1d", "the tenant holds the forbidden character U+0000"),
        ("completed=", "completed=", AGE),
        ("completed= 1d", "completed= 1d", AGE),
        ("completed=1", "completed=1", AGE),
        ("completed=d", "completed=d", AGE),
        ("completed=0d", "completed=0d", AGE),
        ("completed=007d", "completed=007d", AGE),
        ("completed=-1d", "completed=-1d", AGE),
        ("completed=+1d", "completed=+1d", AGE),
        ("completed=1.5d", "completed=1.5d", AGE),
        ("completed=1_0d", "completed=1_0d", AGE),
        ("completed=1D", "completed=1D", AGE),
        ("completed=1w", "completed=1w", AGE),
        ("completed=1d1h", "completed=1d1h", AGE),
        ("completed=Keep", "completed=Keep", AGE),
        ("completed=٣d", "completed=٣d", AGE),
        ("completed=1d\n", "completed=1d\\n", AGE),
        (f"completed={'9' * 5000}d", f"completed={'9' * 5000}d", AGE),
        ("completed=36501d", "completed=36501d", "the age must be at most 36500 days"),
        ("completed=999999999999d", "completed=999999999999d", "the age must be at most 36500 days"),
        ("failed=1d, completed=1d, failed=2d", "failed=2d", "there is another rule for the same"),
        ("a/failed=1d,a/failed=keep", "a/failed=keep", "there is another rule for the same"),
    ],
)
def test_what_is_wrong_is_refused_by_its_field_and_part(text: str, part: str, problem: str) -> None:
    with pytest.raises(ValidationError) as caught:
        parse_policy(text)
    assert caught.value.field == "retention"
    said = str(caught.value.details["problem"])
    assert said.startswith(f"'{part}': {problem}")


@pytest.mark.parametrize("value", [None, 30, ["completed=30d"], b"completed=30d"])
def test_a_policy_that_is_no_text_is_refused(value: Any) -> None:
    with pytest.raises(ValidationError, match=r"^retention: must be text"):
        Settings(retention=value)


def test_the_setting_is_off_by_default_and_is_checked_when_it_is_given() -> None:
    assert parse_policy(Settings().retention).off
    chosen = settings_from({"RUNTARA_RETENTION": "acme/failed=1h"})
    assert chosen.retention == "acme/failed=1h"
    with pytest.raises(ValidationError, match=r"^retention: 'failed=soon': the age"):
        settings_from({"RUNTARA_RETENTION": "completed=1d, failed=soon"})


# ---------------------------------------------------------------- properties

tenants = st.none() | st.text(min_size=1, max_size=20).filter(
    lambda name: "," not in name and name == name.strip(" ") and FORBIDDEN.search(name) is None
)
seconds = st.integers(1, 36_500 * 86_400)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    keep = draw(st.none() | seconds)
    return Rule(
        tenant_id=draw(tenants),
        status=draw(st.sampled_from(list(ENDED.values()))),
        keep_us=None if keep is None else keep * 1_000_000,
    )


def written(rule: Rule, unit: str) -> str:
    """A rule as text, in the given unit if that is exact."""
    age = "keep"
    if rule.keep_us is not None:
        whole = rule.keep_us // 1_000_000
        age = f"{whole // UNITS[unit]}{unit}" if whole % UNITS[unit] == 0 else f"{whole}s"
    subject = rule.status.word if rule.tenant_id is None else f"{rule.tenant_id}/{rule.status.word}"
    return f"{subject}={age}"


@given(
    st.lists(rules(), max_size=8, unique_by=lambda rule: (rule.tenant_id, rule.status)),
    st.sampled_from(list(UNITS)),
    st.sampled_from([",", ", ", " ,", "  ,   "]),
)
def test_what_is_written_is_read_back_and_every_instance_falls_under_one_rule(
    some: list[Rule], unit: str, comma: str
) -> None:
    policy = parse_policy(comma.join(written(rule, unit) for rule in some))
    assert sorted(policy.rules.values(), key=repr) == sorted(some, key=repr)
    general = [rule.tenant_id is None for rule in policy.rules.values()]
    assert general == sorted(general)
    for tenant_id in {rule.tenant_id for rule in some if rule.tenant_id is not None} | {"nobody"}:
        for status in ENDED.values():
            own = [r for r in some if (r.tenant_id, r.status) == (tenant_id, status)]
            others = [r for r in some if (r.tenant_id, r.status) == (None, status)]
            assert policy.rule_for(tenant_id, status) == next(iter(own + others), None)


@given(st.text() | st.text(alphabet="completed=30d, /keepfail", max_size=60))
def test_any_text_is_a_policy_or_refused_by_the_field(text: str) -> None:
    try:
        policy = parse_policy(text)
    except ValidationError as error:
        refused = error.field
    else:
        refused = "retention"
        for (tenant_id, status), rule in policy.rules.items():
            assert (rule.tenant_id, rule.status) == (tenant_id, status)
            assert status.is_terminal
            assert rule.keep_us is None or 0 < rule.keep_us <= 36_500 * DAY_US
            assert tenant_id is None or 0 < len(tenant_id) <= MAX_ID_LENGTH
    assert refused == "retention"


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize(
    ("took", "full", "records"),
    [
        (0.0, True, 2 * FIRST_RECORDS),
        (TARGET_SECONDS / 2, True, 2 * FIRST_RECORDS),
        (0.0, False, FIRST_RECORDS),
        (TARGET_SECONDS, True, FIRST_RECORDS),
        (TARGET_SECONDS * 1.01, True, FIRST_RECORDS // 2),
        (LONGEST_SECONDS, False, FIRST_RECORDS // 2),
        (LONGEST_SECONDS * 1.01, False, LEAST_RECORDS),
    ],
)
def test_a_batch_grows_when_it_was_short_and_full_and_shrinks_when_it_was_long(
    took: float, full: bool, records: int
) -> None:
    assert next_batch(FIRST_RECORDS, took, full) == records


@given(
    st.integers(LEAST_RECORDS, MOST_RECORDS),
    st.floats(0, 10, allow_nan=False),
    st.booleans(),
)
def test_a_batch_stays_within_its_bounds(records: int, took: float, full: bool) -> None:
    chosen = next_batch(records, took, full)
    assert LEAST_RECORDS <= chosen <= MOST_RECORDS
    assert chosen <= records or (full and took <= TARGET_SECONDS / 2)


@given(st.floats(1e-7, 1e-3))
def test_where_a_record_costs_the_same_each_time_batches_come_to_the_target(cost: float) -> None:
    records = FIRST_RECORDS
    for _ in range(20):
        records = next_batch(records, records * cost, full=True)
    took = records * cost
    assert took <= TARGET_SECONDS or records == LEAST_RECORDS
    assert took > TARGET_SECONDS / 2 or records == MOST_RECORDS


# ---------------------------------------------------------------- growth


@pytest.mark.parametrize(
    ("size", "limit", "times"),
    [(0, 100, 0), (99, 100, 0), (100, 100, 1), (199, 100, 1), (200, 100, 2), (399, 100, 2), (400, 100, 3)],
)
def test_growth_counts_doublings_of_the_limit(size: int, limit: int, times: int) -> None:
    assert doublings(size, limit) == times


@given(st.integers(0, 2**60))
def test_no_limit_is_never_reached(size: int) -> None:
    assert doublings(size, 0) == 0
