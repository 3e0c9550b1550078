"""Settings, from arguments and from the environment."""

from typing import Any

import attrs
import pytest

from runtara import Settings, ValidationError
from runtara.config import settings_from

NUMBERS = [f.name for f in attrs.fields(Settings) if f.type in (int, float)]
COUNTS = [f.name for f in attrs.fields(Settings) if f.type is int and f.name != "size_warning_bytes"]


def test_without_arguments_and_variables_the_defaults_hold() -> None:
    assert settings_from({}) == Settings()
    assert Settings().synchronous == "FULL"
    assert Settings().payload_bytes == 4 * 1024 * 1024


def test_variables_set_what_arguments_leave_open() -> None:
    environment = {"RUNTARA_DRAIN_SECONDS": "1.5", "RUNTARA_LIVE_INSTANCES": "7", "RUNTARA_OTHER": "x"}
    chosen = settings_from(environment, live_instances=8)
    assert chosen == Settings(drain_seconds=1.5, live_instances=8)


@pytest.mark.parametrize("name", NUMBERS)
def test_each_number_has_a_variable(name: str) -> None:
    value = 4096
    assert getattr(settings_from({f"RUNTARA_{name.upper()}": str(value)}), name) == value


def test_the_synchronous_setting_has_a_variable() -> None:
    assert settings_from({"RUNTARA_SYNCHRONOUS": "NORMAL"}).synchronous == "NORMAL"


@pytest.mark.parametrize("text", ["", "x", "1.5", "0x10", "9" * 5000])
def test_a_variable_that_is_no_whole_number_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        settings_from({"RUNTARA_LIVE_INSTANCES": text})
    assert caught.value.field == "RUNTARA_LIVE_INSTANCES"


@pytest.mark.parametrize("text", ["", "soon", "1,5"])
def test_a_variable_that_is_no_number_is_refused_by_its_name(text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        settings_from({"RUNTARA_DRAIN_SECONDS": text})
    assert caught.value.field == "RUNTARA_DRAIN_SECONDS"


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e400", "-1"])
def test_a_variable_out_of_range_is_refused(text: str) -> None:
    with pytest.raises(ValidationError) as caught:
        settings_from({"RUNTARA_DRAIN_SECONDS": text})
    assert caught.value.field == "drain_seconds"


def test_an_unknown_argument_is_refused_by_its_name() -> None:
    with pytest.raises(ValidationError, match=r"^drain: is no setting$"):
        settings_from({}, drain=1)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [None, "5", True, float("nan"), float("inf"), -1, -0.5, [], 10**400])
def test_a_number_that_is_none_or_out_of_range_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings(**{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_whole_and_at_least_one(name: str) -> None:
    for value in (0, 1.0):
        with pytest.raises(ValidationError) as caught:
            Settings(**{name: value})  # type: ignore[arg-type]
        assert caught.value.field == name


def test_a_size_of_none_turns_the_warning_off() -> None:
    assert Settings(size_warning_bytes=0).size_warning_bytes == 0
    assert Settings().size_warning_bytes == 10 * 2**30
    with pytest.raises(ValidationError, match=r"^size_warning_bytes: must be a whole number$"):
        Settings(size_warning_bytes=1.0)  # type: ignore[arg-type]


def test_the_passes_of_the_retention_do_not_follow_each_other_without_a_pause() -> None:
    assert Settings(retention_seconds=1).retention_seconds == 1
    with pytest.raises(ValidationError, match=r"^retention_seconds: must be at least 1\.0$"):
        Settings(retention_seconds=0.5)


def test_the_retention_has_a_variable_and_is_off_without_it() -> None:
    assert Settings().retention == ""
    assert settings_from({"RUNTARA_RETENTION": "completed=30d"}).retention == "completed=30d"
    assert settings_from({"RUNTARA_RETENTION": "completed=30d"}, retention="").retention == ""


@pytest.mark.parametrize("value", ["full", "", "ON", 2, None, ["FULL"]])
def test_an_unknown_synchronous_setting_is_refused_with_those_that_are_known(value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings(synchronous=value)
    assert caught.value.field == "synchronous"
    assert caught.value.details["problem"] == "must be one of FULL, NORMAL, OFF, EXTRA"


def test_payloads_are_at_most_64_mebibytes() -> None:
    assert Settings(payload_bytes=64 * 2**20).limits().payload_bytes == 64 * 2**20
    with pytest.raises(ValidationError, match="payload_bytes: must be from 1 to 67108864"):
        Settings(payload_bytes=64 * 2**20 + 1)


def test_the_bounds_of_an_instance_come_from_the_settings() -> None:
    limits = Settings(payload_bytes=10, pending_signals=20, heartbeat_seconds=30).limits()
    assert (limits.payload_bytes, limits.pending_signals, limits.heartbeat_seconds) == (10, 20, 30)
