"""Fixtures of the tests of ratel: servers that misbehave, and what must not be left behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from web_server import HANG, Exchange, Request, WebServer

from ratel import McpClient, Stdio

FAKE = str(Path(__file__).resolve().parent / "fake_server.py")


def fake_stdio(**options: Any) -> Stdio:
    """The transport of a stdio server that does as the options say; see fake_server.py."""
    return Stdio(sys.executable, ["-I", "-S", FAKE, json.dumps(options)])


def eventually(holds: Callable[[], object]) -> None:
    """Wait for something that comes about by itself."""
    until = time.monotonic() + HANG
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        pass
    if os.path.isdir("/proc/self"):
        return False
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(shown.stdout.strip()) and not shown.stdout.strip().startswith("Z")


def ours() -> tuple[int, int, int]:
    """How many threads of ratel, children and sockets this process has; the latter two on Linux only."""
    threads = sum(thread.name.startswith("ratel") for thread in threading.enumerate())
    children = sockets = 0
    if os.path.isdir("/proc/self/task"):
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
                children += len(file.read().split())
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                sockets += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:")
    return threads, children, sockets


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails a test that leaves threads, child processes or sockets of ratel behind."""
    before = ours()
    yield
    eventually(lambda: all(after <= at_first for after, at_first in zip(ours(), before)))


@pytest.fixture
def web_server(nothing_left: None) -> Iterator[Callable[[Callable[[Exchange, Request], None]], WebServer]]:
    """Starts HTTP servers that answer by the function they are given."""
    servers: list[WebServer] = []

    def start(respond: Callable[[Exchange, Request], None]) -> WebServer:
        servers.append(WebServer(respond))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def client_of(nothing_left: None) -> Iterator[Callable[..., McpClient]]:
    """Makes clients and closes them after the test."""
    clients: list[McpClient] = []

    def make(transport: Any, **options: Any) -> McpClient:
        clients.append(McpClient(transport, **options))
        return clients[-1]

    yield make
    for client in clients:
        client.close()
