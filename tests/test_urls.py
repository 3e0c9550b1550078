"""Where a store lies, as a URL."""

import pytest

from runtara import ValidationError
from runtara.urls import sqlite_path


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:///app.db", "app.db"),
        ("sqlite:///data/app.db", "data/app.db"),
        ("sqlite:///../app.db", "../app.db"),
        ("sqlite:////srv/app.db", "/srv/app.db"),
        ("sqlite:///a%20b.db", "a b.db"),
        ("sqlite:///é.db", "é.db"),
        ("sqlite:///100%25.db", "100%.db"),
        ("sqlite:///what%3F.db", "what?.db"),
        ("sqlite:///:memory:", ":memory:"),
        ("sqlite://", ":memory:"),
    ],
)
def test_a_url_names_a_path(url: str, path: str) -> None:
    assert sqlite_path(url) == path


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        (None, "must be text, not NoneType"),
        (b"sqlite:///a.db", "must be text, not bytes"),
        ("app.db", "must begin with sqlite:// or postgresql://, for example sqlite:///app.db"),
        ("", "must begin with sqlite:// or postgresql://, for example sqlite:///app.db"),
        ("SQLITE:///app.db", "must begin with sqlite:// or postgresql://, for example sqlite:///app.db"),
        (
            "postgresql://localhost/app",
            "must begin with sqlite:// or postgresql://, for example sqlite:///app.db",
        ),
        ("sqlite://app.db", "must be sqlite:///path, with three slashes for a relative path"),
        ("sqlite://host/app.db", "must be sqlite:///path, with three slashes for a relative path"),
        ("sqlite:///", "must be sqlite:///path, with three slashes for a relative path"),
        ("sqlite:///app.db?mode=ro", "must hold a plain path"),
        ("sqlite:///app.db#x", "must hold a plain path"),
        ("sqlite:///a%00b", "must hold a plain path"),
    ],
)
def test_what_is_no_url_of_a_store_is_refused_and_says_why(url: object, problem: str) -> None:
    with pytest.raises(ValidationError) as caught:
        sqlite_path(url)
    assert caught.value.field == "url"
    assert caught.value.details["problem"] == problem
