"""The layers, the import direction and the package list, as code.

A new edge is added to ``MAY_IMPORT`` on purpose or not at all. A new module directly under ``runtara`` is
pure until ``LAYER_OF`` says otherwise.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"runtara": "runtara", "actors": "runtara.actors", "transport": "runtara.transport"}

# Module -> its layer; what lies under a module belongs to it. The longest match counts.
LAYER_OF: dict[str, str] = {
    "runtara": "pure",
    "runtara.clock": "seams",
    "runtara.executor": "seams",
    "runtara.randomness": "seams",
    "runtara.filters": "runtime",
    "runtara.instance": "instance",
    "runtara.wire": "wire",
    "runtara.persistence": "persistence",
    "runtara.persistence.store": "contract",
    "runtara.actors": "actors",
    "runtara.actors.mailbox": "kit",
    "runtara.actors.actor": "kit",
    "runtara.actors.supervisor": "kit",
    "runtara.transport": "transport",
    "runtara.connecting": "runtime",
    "runtara.reader": "runtime",
    "runtara.runtime": "runtime",
    "runtara.server": "runtime",
    "runtara.serving": "runtime",
    "runtara.tenant": "runtime",
    "runtara.tokens": "runtime",
    "runtara.transfer": "transfer",
    "runtara.transfer.format": "pure",
    "runtara.transfer.items": "pure",
    "runtara.transfer.rules": "pure",
    "runtara.transfer.shapes": "pure",
    "runtara.transfer.verifying": "pure",
    "runtara.transfer.stores": "runtime",
    "runtara.testing": "testing",
    "runtara.__main__": "cli",
    "runtara.cli": "cli",
}

# `import runtara` itself: the public names, gathered.
PUBLIC = "public"
EVERYTHING = frozenset(LAYER_OF.values()) | {PUBLIC}

# Layer -> the layers it may import.
MAY_IMPORT: dict[str, frozenset[str]] = {
    PUBLIC: EVERYTHING,
    "pure": frozenset({"pure"}),
    "seams": frozenset({"pure"}),
    "instance": frozenset({"pure", "instance"}),
    "wire": frozenset({"pure", "wire"}),
    "contract": frozenset({"pure"}),
    "persistence": frozenset({"pure", "seams", "contract", "persistence"}),
    "kit": frozenset({"kit"}),
    "actors": frozenset({"pure", "seams", "contract", "kit", "actors"}),
    "transport": frozenset({"pure", "seams", "wire", "instance", "transport"}),
    "transfer": frozenset({"pure", "seams", "contract", "transfer"}),
    "runtime": EVERYTHING,
    "testing": EVERYTHING,
    "cli": frozenset(
        {PUBLIC, "pure", "seams", "contract", "persistence", "transport", "transfer", "runtime", "cli"}
    ),
}

# Layer -> what it may import from outside the standard library.
MAY_USE: dict[str, frozenset[str]] = {
    PUBLIC: frozenset(),
    "pure": frozenset({"attrs"}),
    "seams": frozenset({"attrs", "outcome", "trio"}),
    "instance": frozenset({"attrs", "trio"}),
    "wire": frozenset({"attrs", "cattrs", "msgspec"}),
    "contract": frozenset({"attrs"}),
    "persistence": frozenset({"attrs", "trio"}),
    "kit": frozenset({"attrs", "outcome", "trio"}),
    "actors": frozenset({"attrs", "outcome", "trio"}),
    "transport": frozenset({"attrs", "outcome", "trio", "trio_websocket", "wsproto"}),
    "transfer": frozenset({"attrs", "trio"}),
    "runtime": frozenset({"attrs", "outcome", "trio"}),
    "testing": frozenset({"attrs", "outcome", "trio"}),
    "cli": frozenset({"attrs", "click", "rich", "trio"}),
}

# A database's driver -> the modules of its backend. No other module knows which database there is.
DRIVERS: dict[str, frozenset[str]] = {
    "psycopg": frozenset({"runtara.persistence.postgres"}),
    "sqlite3": frozenset({"runtara.persistence.sqlite"}),
}


def our_modules() -> Iterator[tuple[str, Path]]:
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder)
            if folder == "runtara" and inside.parts[0] in FOLDERS:
                continue  # runtara/actors and runtara/transport are links to the other folders
            yield ".".join([package, *inside.with_suffix("").parts]).removesuffix(".__init__"), path


MODULES = dict(our_modules())


def layer_of(module: str) -> str:
    if module == "runtara":
        return PUBLIC
    return LAYER_OF[max((p for p in LAYER_OF if f"{module}.".startswith(f"{p}.")), key=len)]


def imported_names(source: str) -> Iterator[str]:
    """The modules that ``source`` imports: of `from a import b`, a.b if that is a module, else a."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            assert node.module is not None
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES or inner in LAYER_OF else node.module


def is_wrong(module: str, target: str) -> bool:
    layer, top = layer_of(module), target.partition(".")[0]
    if top == "runtara":
        return layer_of(target) not in MAY_IMPORT[layer]
    if top in DRIVERS:
        return not any(f"{module}.".startswith(f"{home}.") for home in DRIVERS[top])
    return top not in sys.stdlib_module_names and top not in MAY_USE[layer]


def wrong_imports(module: str, source: str) -> list[str]:
    return [f"{module} imports {t}" for t in imported_names(source) if is_wrong(module, t)]


def sources_under(folder: str) -> Iterable[tuple[Path, str]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path.relative_to(ROOT), path.read_text(encoding="utf-8")


def test_imports_follow_the_layers() -> None:
    found = (wrong_imports(module, path.read_text(encoding="utf-8")) for module, path in MODULES.items())
    assert [wrong for each in found for wrong in each] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("runtara.machine", "import trio"),
        ("runtara.machine.rules", "import sqlite3"),
        ("runtara.retry", "from runtara import clock"),
        ("runtara.retry", "from runtara import Retry"),
        ("runtara.records", "from runtara.wire import encode"),
        ("runtara.records", "import cattrs"),
        ("runtara.clock", "from runtara.executor import Executor"),
        ("runtara.instance", "import runtara.actors.instance"),
        ("runtara.wire", "import trio"),
        ("runtara.persistence.store", "from runtara.persistence import sqlite"),
        ("runtara.persistence.cursors", "import sqlite3"),
        ("runtara.persistence.cursors", "import psycopg"),
        ("runtara.persistence.rows", "from runtara.wire import encode"),
        ("runtara.persistence.sqlite", "import psycopg"),
        ("runtara.persistence.postgres.writer", "import sqlite3"),
        ("runtara.actors.mailbox", "from runtara.errors import RuntaraError"),
        ("runtara.actors.supervisor", "from runtara.actors import directory"),
        ("runtara.actors.persistence", "from runtara.persistence.sqlite import SqliteStore"),
        ("runtara.actors.persistence", "import sqlite3"),
        ("runtara.actors.instance", "from runtara.transport import gateway"),
        ("runtara.actors.instance", "from runtara.instance import Instance"),
        ("runtara.transport.gateway", "from runtara.actors.directory import Directory"),
        ("runtara.transport.gateway", "from runtara.persistence.store import Store"),
        ("runtara.transfer.exporting", "from runtara.persistence.sqlite import SqliteStore"),
        ("runtara.transfer.format", "from runtara.persistence.store import Store"),
        ("runtara.cli.main", "from runtara.actors.system import System"),
        ("runtara.runtime", "import cattrs"),
        ("runtara.testing.stores", "import sqlite3"),
        ("runtara.testing.stores", "import pytest"),
    ],
)
def test_a_planted_wrong_import_is_found(module: str, source: str) -> None:
    assert len(wrong_imports(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("runtara.machine.rules", "import attrs\nfrom runtara.records import Status"),
        ("runtara.wire", "import cattrs\nfrom runtara import messages"),
        ("runtara.persistence.sqlite", "import sqlite3"),
        ("runtara.persistence.postgres.driver", "import psycopg\nfrom psycopg import pq"),
        ("runtara.actors.persistence", "from runtara.persistence import store\nimport trio"),
        ("runtara.actors.supervisor", "from runtara.actors.actor import Actor"),
        ("runtara.transport.client", "from runtara import wire\nfrom runtara.instance import Instance"),
        ("runtara.cli.demo", "import runtara\nimport rich.live\nfrom runtara.runtime import open_runtime"),
    ],
)
def test_a_right_import_is_let_through(module: str, source: str) -> None:
    assert wrong_imports(module, source) == []


def reachable_from(layer: str) -> set[str]:
    seen: set[str] = set()
    ahead = [layer]
    while ahead:
        if (here := ahead.pop()) not in seen:
            seen.add(here)
            ahead.extend(MAY_IMPORT[here])
    return seen


def test_the_table_lets_the_lower_layers_reach_nothing_above_them() -> None:
    assert set(MAY_IMPORT) == set(MAY_USE) == EVERYTHING
    assert reachable_from("pure") == {"pure"}
    assert reachable_from("contract") == {"contract", "pure"}
    assert reachable_from("kit") == {"kit"}
    assert reachable_from("transport") & {"actors", "kit", "contract", "persistence"} == set()
    assert reachable_from("actors") & {"transport", "wire", "persistence"} == set()


def test_examples_use_public_names_only() -> None:
    wrong = [
        f"{path} imports {target}"
        for path, source in sources_under("examples")
        for target in imported_names(source)
        if target.startswith("runtara") and target not in {"runtara", "runtara.testing"}
    ]
    assert wrong == []


def test_nothing_takes_our_folders_for_packages_of_their_own() -> None:
    wrong = [
        f"{path} imports {target}"
        for folder in ("actors", "benchmarks", "examples", "runtara", "tests", "transport")
        for path, source in sources_under(folder)
        for target in imported_names(source)
        if target.partition(".")[0] in {"actors", "transport"}
    ]
    assert wrong == []


def test_every_dependency_is_declared_and_used() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = {
        re.split(r"[\s<>=!~;\[]", requirement)[0].replace("-", "_")
        for requirement in (
            *config["project"]["dependencies"],
            *config["project"]["optional-dependencies"]["postgres"],
        )
    }
    imported = {
        target.partition(".")[0]
        for path in MODULES.values()
        for target in imported_names(path.read_text(encoding="utf-8"))
    }
    assert imported - sys.stdlib_module_names - {"runtara"} == declared


def test_the_package_list_is_complete() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    assert sorted(config["tool"]["setuptools"]["packages"]) == sorted(packages)
    assert {module.rpartition(".")[0] for module in MODULES if "." in module} <= packages


def test_type_checkers_find_the_folders_through_links() -> None:
    for folder in ("actors", "transport"):
        link = ROOT / "runtara" / folder
        assert link.is_symlink()
        assert link.readlink() == Path("..", folder)
