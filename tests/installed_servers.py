"""Servers that are installed for the tests that need them, and kept in the cache of pytest for the next run.

Where they cannot be installed, those tests are skipped and say so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INSTALLING = 300.0  # seconds; only to tell a hang from a slow network

NPM = (
    "@modelcontextprotocol/server-everything",
    "@modelcontextprotocol/server-filesystem",
    "@modelcontextprotocol/server-memory",
)


def installed(config: pytest.Config, name: str, command: Callable[[Path], list[str]]) -> Path:
    """The directory that a command installs into, which is run unless an earlier run has."""
    cache = getattr(config, "cache", None)  # there is none under -p no:cacheprovider
    if cache is None:
        pytest.skip(f"{name} is installed into the cache of pytest, which is turned off")
    place = Path(cache.mkdir("ratel-servers")) / name
    if place.exists():
        return place
    with _one_at_a_time(place.with_name(f"{name}.lock")):
        if place.exists():
            return place
        own = place.with_name(f"{name}-unfinished")
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        try:
            done = subprocess.run(
                command(own), capture_output=True, text=True, timeout=INSTALLING, check=False, cwd=own
            )
        except (OSError, subprocess.TimeoutExpired) as e:
            pytest.skip(f"{name} cannot be installed here: {e}")
        if done.returncode:
            pytest.skip(f"{name} cannot be installed here: {done.stderr.strip()[-300:]}")
        own.rename(place)
    return place


@contextlib.contextmanager
def _one_at_a_time(lock: Path) -> Iterator[None]:
    """Keep the other workers of this run waiting; a lock that an interrupted run left is not waited for for ever."""
    while True:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
            break
        except FileExistsError:
            with contextlib.suppress(OSError):
                if time.time() - lock.stat().st_mtime > INSTALLING:
                    lock.unlink()
            time.sleep(0.1)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


def node_programs(config: pytest.Config) -> Path:
    """The directory of the programs of the servers of Node."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed here")
    install = [npm, "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", "."]
    return installed(config, "node", lambda own: [*install, *NPM]) / "node_modules" / ".bin"
