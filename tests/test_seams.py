"""The seams: time, randomness and threads are given to the system, never reached for.

This is what makes the whole system runnable in a deterministic simulation. ruff's ``banned-api`` says the
same while one types; this test is exact, because an exception there frees a whole file, and here one name.
"""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"runtara": "runtara", "actors": "runtara.actors", "transport": "runtara.transport"}

# A name stands for itself and for everything under it.
FORBIDDEN = frozenset(
    {
        "time",
        "datetime.date.today",
        "datetime.datetime.now",
        "datetime.datetime.today",
        "datetime.datetime.utcnow",
        "os.getrandom",
        "os.urandom",
        "random",
        "secrets",
        "uuid",
        "_thread",
        "asyncio",
        "concurrent",
        "multiprocessing",
        "threading",
        "trio.from_thread",
        "trio.lowlevel.start_thread_soon",
        "trio.to_thread",
    }
)

# The one module of each seam, and what it is there for.
MAY_USE: dict[str, frozenset[str]] = {
    "runtara.clock": frozenset({"time"}),
    "runtara.executor": frozenset({"threading", "time.sleep", "trio.to_thread"}),
    "runtara.randomness": frozenset({"os.urandom", "random", "secrets", "uuid"}),
}

# Programs of their own, which no simulation runs.
FREE = ("runtara.testing", "runtara.cli.demo")


def is_under(name: str, prefix: str) -> bool:
    return f"{name}.".startswith(f"{prefix}.")


class Names(ast.NodeVisitor):
    """Finds every imported or used name of another module, under its full name and with its line."""

    def __init__(self) -> None:
        self.meaning: dict[str, str] = {}
        self.imported: list[tuple[int, str]] = []
        self.used: list[tuple[int, str]] = []

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.imported.append((node.lineno, alias.name))
            first = alias.name.partition(".")[0]
            self.meaning[alias.asname or first] = alias.name if alias.asname else first

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            name = node.module or "" if alias.name == "*" else f"{node.module}.{alias.name}"
            self.meaning[alias.asname or alias.name] = name
            self.used.append((node.lineno, name))

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(
                func=ast.Name("__import__") | ast.Attribute(attr="import_module") | ast.Name("import_module"),
                args=[ast.Constant(str(name)), *_],
            ):
                self.used.append((node.lineno, name))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        parts: list[str] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if not isinstance(inner, ast.Name):
            self.visit(inner)
        elif inner.id in self.meaning:
            self.used.append((node.lineno, ".".join([self.meaning[inner.id], *reversed(parts)])))

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in self.meaning:
            self.used.append((node.lineno, self.meaning[node.id]))


def reaches(module: str, source: str) -> Iterator[tuple[int, str]]:
    """Each line of ``module`` that reaches past a seam, and for what."""
    if any(is_under(module, free) for free in FREE):
        return
    tree = ast.parse(source)
    imports = Names()
    for node in ast.walk(tree):  # first, so that a function may stand above the import it uses
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.visit(node)
    names = Names()
    names.meaning = imports.meaning
    names.visit(tree)
    allowed = MAY_USE.get(module, frozenset())

    def is_wrong(name: str) -> bool:
        return any(is_under(name, f) for f in FORBIDDEN) and not any(is_under(name, a) for a in allowed)

    yield from (
        (line, name)
        for line, name in names.imported
        if is_wrong(name) and not any(is_under(a, name) for a in allowed)
    )
    yield from ((line, name) for line, name in names.used if is_wrong(name))


def test_nothing_reaches_past_a_seam() -> None:
    wrong = []
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder)
            if folder == "runtara" and inside.parts[0] in FOLDERS:
                continue  # runtara/actors and runtara/transport are links to the other folders
            module = ".".join([package, *inside.with_suffix("").parts]).removesuffix(".__init__")
            found = reaches(module, path.read_text(encoding="utf-8"))
            wrong += [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in found]
    assert wrong == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import time", "time"),
        ("import time as clock", "time"),
        ("from time import monotonic", "time.monotonic"),
        ("from time import *", "time"),
        ("import concurrent.futures", "concurrent.futures"),
        ("import os\nx = os.urandom(8)", "os.urandom"),
        ("import os as system\nx = system.urandom", "os.urandom"),
        ("from os import urandom", "os.urandom"),
        ("import datetime\nx = datetime.datetime.now(datetime.UTC)", "datetime.datetime.now"),
        ("from datetime import datetime\nf(default=datetime.now)", "datetime.datetime.now"),
        ("def f():\n    return dt.utcnow()\nfrom datetime import datetime as dt", "datetime.datetime.utcnow"),
        ("from trio import to_thread", "trio.to_thread"),
        ("import trio\nasync def f():\n    await trio.to_thread.run_sync(g)", "trio.to_thread.run_sync"),
        ("import importlib\nimportlib.import_module('random')", "random"),
        ("x = __import__('uuid').uuid4()", "uuid"),
    ],
)
def test_a_planted_reach_is_found(source: str, name: str) -> None:
    assert name in {found for _, found in reaches("runtara.planted", source)}


def test_a_find_names_its_line() -> None:
    source = "import os\n\n\ndef f() -> bytes:\n    return os.urandom(8)\n"
    assert list(reaches("runtara.actors.planted", source)) == [(5, "os.urandom")]


@pytest.mark.parametrize(
    "source",
    [
        "import datetime\nx = datetime.datetime.fromtimestamp(0, datetime.UTC)",
        "from datetime import UTC, datetime\ny: datetime = g()",
        "import trio\nasync def f():\n    await trio.sleep(trio.current_time())",
        "import os\nx = os.fspath(p)",
        "def f(time: float, random: int) -> float:\n    return time + random",
        "from runtara.clock import Clock\ndef f(self, clock: Clock) -> int:\n    return self.time.now(clock)",
    ],
)
def test_what_reaches_past_no_seam_is_left_alone(source: str) -> None:
    assert list(reaches("runtara.planted", source)) == []


def test_each_exception_frees_its_module_for_its_names_only() -> None:
    pause = "import time\ntime.sleep(1)\n"
    assert list(reaches("runtara.executor", pause)) == []
    assert list(reaches("runtara.executor", pause + "time.time()\n")) == [(3, "time.time")]
    assert list(reaches("runtara.executor", "import time\nf(time)\n")) == [(2, "time")]
    assert list(reaches("runtara.clock", "import time, random\n")) == [(1, "random")]
    assert list(reaches("runtara.testing.clocks", "import time, random\n")) == []


def test_ruff_bans_the_same_names() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    lint = config["tool"]["ruff"]["lint"]
    assert set(lint["flake8-tidy-imports"]["banned-api"]) == FORBIDDEN | {"actors", "transport"}
    freed = {path for path, rules in lint["per-file-ignores"].items() if "TID251" in rules}
    assert {path for path in freed if path.startswith("runtara/")} == {
        *(module.replace(".", "/") + ".py" for module in MAY_USE),
        "runtara/cli/demo.py",
        "runtara/cli/demo/**",
        "runtara/testing/**",
    }
