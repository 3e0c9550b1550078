"""The pages: every link leads somewhere, every linked test exists, the code in them says what is shown."""

import ast
import contextlib
import inspect
import io
import os
import re
import types
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import pytest
import trio
import trio.testing

import runtara
from runtara import config

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md")])
PROMISES = tuple(f"P{number}" for number in range(1, 12))

LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
HEADING = re.compile(r"^#+ (.+)$", re.M)


class Link(NamedTuple):
    page: Path
    text: str
    target: str


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """A page without its code."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def links_of(page: Path) -> Iterator[Link]:
    """The links of a page to other places of the tree."""
    for text, target in LINK.findall(prose(page)):
        if not target.startswith(("http://", "https://")):
            yield Link(page, text, target)


def anchor(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def problem_of(link: Link) -> str | None:
    """Why a link leads nowhere; None if it leads somewhere."""
    file, _, fragment = link.target.partition("#")
    path = (link.page.parent / file).resolve() if file else link.page
    if not path.is_relative_to(ROOT) or not path.exists():
        return "there is no such file"
    if fragment and anchor(fragment) not in {anchor(found) for found in HEADING.findall(prose(path))}:
        return "there is no such heading"
    named = re.fullmatch(r"`(\w+)`", link.text)
    if path.suffix == ".py" and named is not None and named[1] not in functions_of(path):
        return "there is no such function"
    return None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_somewhere(page: Path) -> None:
    problems = {link.target: problem_of(link) for link in links_of(page)}
    assert {target: problem for target, problem in problems.items() if problem is not None} == {}


@pytest.mark.parametrize(
    ("text", "target", "problem"),
    [
        ("a page", "nowhere.md", "there is no such file"),
        ("a page", "../../etc/passwd", "there is no such file"),
        ("a heading", "storage.md#no-such-thing", "there is no such heading"),
        ("`test_no_such_test`", "../tests/test_docs.py", "there is no such function"),
        ("`test_every_link_leads_somewhere`", "../tests/test_docs.py", None),
        ("a heading", "storage.md#when-the-disk-fails", None),
    ],
)
def test_a_planted_wrong_link_is_found(text: str, target: str, problem: str | None) -> None:
    assert problem_of(Link(DOCS / "index.md", text, target)) == problem


def test_every_page_can_be_reached_from_the_index() -> None:
    linked = {(DOCS / link.target.partition("#")[0]).resolve() for link in links_of(DOCS / "index.md")}
    assert {page for page in DOCS.glob("*.md") if page.name != "index.md"} <= linked


def test_the_pages_name_no_place_of_ours() -> None:
    found = [name_of(page) for page in PAGES if re.search(r"/work/|/home/|/root/", page.read_text("utf-8"))]
    assert found == []


# ------------------------------------------------------------ guarantees


def promises() -> dict[str, str]:
    """The section of each promise."""
    text = (DOCS / "guarantees.md").read_text(encoding="utf-8")
    return {
        section.split(" ", 1)[0]: section
        for section in re.split(r"^## ", text, flags=re.M)[1:]
        if section[0] == "P"
    }


def test_every_promise_has_its_section_in_order() -> None:
    assert tuple(promises()) == PROMISES


@pytest.mark.parametrize("promise", PROMISES)
def test_every_promise_says_its_limits_and_the_tests_that_try_to_break_it(promise: str) -> None:
    section = promises()[promise]
    assert "**Not promised:**" in section
    tests = [
        Link(DOCS / "guarantees.md", *found) for found in LINK.findall(section.split("**Tried by:**")[1])
    ]
    assert len(tests) >= 2
    for link in tests:
        assert re.fullmatch(r"`\w+`", link.text), f"{link.target} names no test"
        assert problem_of(link) is None, link


# ------------------------------------------------------------ settings


def rules_of_the_settings() -> dict[str, str]:
    """What stands below each field of `Settings`, in one line."""
    [body] = [
        node.body
        for node in ast.parse(inspect.getsource(config)).body
        if isinstance(node, ast.ClassDef) and node.name == "Settings"
    ]
    rules = {}
    for field, rule in pairwise(body):
        match field, rule:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                rules[name] = " ".join(text.split())
    return rules


def unit_of(name: str) -> str:
    last = name.rpartition("_")[2]
    words = {"seconds": "seconds", "bytes": "bytes", "synchronous": "a word", "retention": "rules"}
    return words.get(last, "a count")


def settings_table() -> str:
    rules = rules_of_the_settings()
    lines = ["| setting | default | unit | what it does |", "|---|---|---|---|"]
    for field in attrs.fields(runtara.Settings):
        default = f"{field.default:,}" if isinstance(field.default, int) else str(field.default) or "none"
        lines.append(f"| `{field.name}` | {default} | {unit_of(field.name)} | {rules[field.name]} |")
    return "\n".join(lines)


def test_the_page_of_settings_shows_them_as_they_are() -> None:
    page = DOCS / "settings.md"
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition("<!-- settings: begin -->\n")
    shown, _, after = rest.partition("<!-- settings: end -->")
    if os.environ.get("UPDATE_DOCS"):
        written = f"{before}<!-- settings: begin -->\n{settings_table()}\n<!-- settings: end -->{after}"
        page.write_text(written, encoding="utf-8")
        return
    assert shown.rstrip("\n") == settings_table()


# ------------------------------------------------------------ the code in the pages


class Example(NamedTuple):
    number: int
    source: str
    output: str


def examples_of(page: Path) -> list[Example]:
    """The blocks of Python of a page, each with the output that is shown below it."""
    blocks = FENCE.findall(page.read_text(encoding="utf-8"))
    found = []
    for number, (kind, source) in enumerate(blocks):
        following = blocks[number + 1] if number + 1 < len(blocks) else ("", "")
        if kind == "python":
            found.append(Example(number, source, following[1] if following[0] == "output" else ""))
    return found


EMBEDDING = examples_of(DOCS / "embedding.md")


@pytest.mark.parametrize(
    "example", [e for e in EMBEDDING if "trio.run(" not in e.source], ids=lambda e: str(e.number)
)
async def test_the_code_in_the_embedding_page_says_what_is_shown(
    example: Example, autojump_clock: trio.testing.MockClock
) -> None:
    code = compile(example.source, "embedding.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    said = io.StringIO()
    async with runtara.open_runtime("sqlite:///:memory:") as rt:
        run: Callable[[], Any] = as_function(code, {"rt": rt, "runtara": runtara, "trio": trio})
        with contextlib.redirect_stdout(said):
            result = run()
            if inspect.isawaitable(result):
                await result
    assert said.getvalue() == example.output


def as_function(code: Any, names: dict[str, Any]) -> Callable[[], Any]:
    """A module's code as a function; with a top-level ``await`` it returns a coroutine."""
    return types.FunctionType(code, names)


def test_the_program_in_the_embedding_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [example] = [e for e in EMBEDDING if "trio.run(" in e.source]
    monkeypatch.chdir(tmp_path)
    as_function(compile(example.source, "embedding.md", "exec"), {"__name__": "__main__"})()
    assert capsys.readouterr().out == example.output
