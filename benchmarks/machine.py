"""What the figures were measured on."""

import os
import platform
import sqlite3
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import runtara


def describe() -> Iterator[str]:
    """Machine, versions and settings, line by line."""
    load = os.getloadavg()[0]
    yield f"machine   {os.cpu_count()} cores ({processor()}), load {load:.2f} before the start"
    yield f"system    {platform.system()} {platform.release()}"
    python = f"{platform.python_implementation()} {platform.python_version()}"
    yield f"versions  runtara {version('runtara')}, {python}, trio {version('trio')}"
    yield f"          SQLite {sqlite3.sqlite_version}"
    settings = runtara.Settings()
    yield f"settings  WAL, synchronous={settings.synchronous}, batches of up to {settings.batch_units}"


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    models = (line.partition(":")[2].strip() for line in lines if "model name" in line)
    return next(models, platform.machine())
