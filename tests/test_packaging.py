"""The wheel, built from the tree and installed where nothing of the tree is in reach.

It needs no network: setuptools comes from the environment that runs the tests, and so do the dependencies.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = {"runtara": "runtara", "actors": "runtara/actors", "transport": "runtara/transport"}
SOURCES = ("pyproject.toml", "README.md", "LICENSE", *FOLDERS)


def run(*command: str | Path, cwd: Path) -> str:
    """What ``command`` printed; fails the test with all of it if it ends with an error."""
    hidden = {"PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "VIRTUAL_ENV"}
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that it leaves nothing behind in the tree and finds nothing old there."""
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, copy / name)
    options = ("--quiet", "--no-deps", "--no-build-isolation")
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", out, copy, cwd=out)
    [built] = out.glob("*.whl")
    return built


@attrs.frozen
class Installed:
    """An environment that holds the wheel and its dependencies, and an empty folder to start from."""

    bin: Path
    folder: Path

    def python(self, *arguments: str | Path) -> str:
        return run(self.bin / "python", *arguments, cwd=self.folder)


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("venv")
    venv.create(place, symlinks=True, with_pip=False)
    python = place / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", wheel, cwd=place)
    # The dependencies of the tests' own environment, but not its editable runtara: a line of a .pth file
    # adds a folder without obeying the .pth files in it.
    paths = sysconfig.get_paths()
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).strip()
    (Path(packages) / "dependencies.pth").write_text(f"{paths['purelib']}\n{paths['platlib']}\n")
    return place


@pytest.fixture
def installed(environment: Path, tmp_path: Path) -> Installed:
    return Installed(environment / "bin", tmp_path)


def test_the_wheel_holds_exactly_what_the_tree_holds(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    expected = {
        f"{target}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".sql", ".typed"}
        and not (folder == "runtara" and path.relative_to(ROOT / folder).parts[0] in FOLDERS)
    }
    assert sorted(name for name in names if ".dist-info/" not in name) == sorted(expected)
    assert "runtara/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_every_module_can_be_imported_from_the_wheel(installed: Installed) -> None:
    script = """
import importlib, pkgutil, sys
import runtara, runtara.actors, runtara.transport
for found in pkgutil.walk_packages(runtara.__path__, "runtara."):
    if not found.name.endswith("__main__"):
        importlib.import_module(found.name)
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] == "runtara":
        print(name, module.__file__)
"""
    lines = dict(line.split(" ", 1) for line in installed.python("-c", script).splitlines())
    assert {"runtara", "runtara.actors", "runtara.transport", "runtara.persistence.store"} <= set(lines)
    assert all(Path(file).is_relative_to(installed.bin.parent) for file in lines.values()), lines


def test_data_files_are_beside_the_modules_that_read_them(installed: Installed) -> None:
    script = """
import importlib.resources
from pathlib import Path
root = importlib.resources.files("runtara")
assert isinstance(root, Path)
print(root.joinpath("py.typed").is_file())
print(*sorted(file.name for file in root.joinpath("persistence", "migrations").rglob("*.sql")))
"""
    typed, migrations = installed.python("-c", script).splitlines()
    tree = sorted(path.name for path in (ROOT / "runtara" / "persistence" / "migrations").rglob("*.sql"))
    assert tree != []
    assert (typed, migrations.split()) == ("True", tree)


def test_the_command_says_its_version(installed: Installed) -> None:
    script = "import importlib.metadata; print(importlib.metadata.version('runtara'))"
    version = installed.python("-c", script).strip()
    assert version == "0.1.0"
    assert version in run(installed.bin / "runtara", "--version", cwd=installed.folder)


def test_a_users_own_actors_and_transport_do_no_harm(installed: Installed) -> None:
    (installed.folder / "actors.py").write_text("CAST = ['Hamlet', 'Ophelia']\n")
    (installed.folder / "transport.py").write_text("LINES = ['S7', 'S75']\n")
    (installed.folder / "play.py").write_text(
        "import actors, runtara.actors, transport, runtara.transport\n"
        "from actors import CAST\n"
        "from transport import LINES\n"
        "import runtara.persistence.store\n"
        "print(*CAST, *LINES)\n"
        "for module in (actors, transport, runtara.actors, runtara.transport):\n"
        "    print(module.__name__, module.__file__)\n"
    )
    said, *places = installed.python(installed.folder / "play.py").splitlines()
    assert said == "Hamlet Ophelia S7 S75"
    files = {name: Path(file) for name, file in (line.split(" ", 1) for line in places)}
    assert files["actors"] == installed.folder / "actors.py"
    assert files["transport"] == installed.folder / "transport.py"
    for name in ("actors", "transport"):
        ours = files[f"runtara.{name}"]
        assert ours.parts[-3:] == ("runtara", name, "__init__.py")
        assert ours.is_relative_to(installed.bin.parent)
