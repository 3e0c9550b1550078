"""The examples do what they say, and the README shows one of them."""

import ast
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SECONDS = 60.0


def start(example: str, folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, EXAMPLES / example],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(example: str, folder: Path) -> str:
    """What an example says; it must end well."""
    process = start(example, folder)
    said, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    return said


def kill_after(line: str, example: str, folder: Path) -> list[str]:
    """Kill an example when it has said ``line``; returns all lines that it said."""
    process = start(example, folder)
    assert process.stdout is not None
    said = []
    with process.stdout:
        for each in process.stdout:
            said.append(each.rstrip())
            if said[-1] == line:
                process.kill()
    assert process.wait(SECONDS) == -signal.SIGKILL, said
    return said


def test_the_readme_shows_the_embedded_example_as_it_is() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.split("```python\n")[1].split("```")[0]
    assert shown == (EXAMPLES / "embedded.py").read_text(encoding="utf-8")


def test_the_embedded_example_is_as_short_as_the_readme_says() -> None:
    tree = ast.parse((EXAMPLES / "embedded.py").read_text(encoding="utf-8"))
    code = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)}
    assert len(code) <= 20


def test_the_embedded_example_survives_kill_9_at_any_step(tmp_path: Path) -> None:
    assert kill_after("validate", "embedded.py", tmp_path) == ["validate"]
    assert kill_after("pack", "embedded.py", tmp_path) == ["charge", "pack"]
    assert run("embedded.py", tmp_path).splitlines() == ["ship", "b'delivered'"]
    assert run("embedded.py", tmp_path).splitlines() == ["b'delivered'"]


def test_the_signals_example_says_what_happens(tmp_path: Path) -> None:
    assert run("signals.py", tmp_path).splitlines() == [
        "order-1 received b'10 EUR'",
        "order-1 is suspended",
        "order-1 received b'10 EUR'",
        "order-1 is cancelled",
        "cancelled because the customer changed his mind",
    ]
    assert list(tmp_path.iterdir()) == []


def test_the_users_tests_pass_where_a_user_has_them(tmp_path: Path) -> None:
    """In a folder of their own, without our settings of pytest."""
    shutil.copy(EXAMPLES / "user_tests.py", tmp_path / "test_reminders.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_says_what_it_is_for_and_is_linked(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert f"(examples/{path.name})" in (ROOT / "README.md").read_text(encoding="utf-8")
