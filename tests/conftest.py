"""Fixtures of all tests: a bundle, a server, and rat between them and a harness.

Bundles are for reading only and made once; servers and processes belong to one test and are ended
with it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bundles import SERVER, Authority, Bundle, write_side
from fault_server import ConnectProxy, FaultServer, answer
from harness import Harness, rat_command

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The bundle of tenant acme, with the client laptop."""
    return Bundle(tmp_path_factory.mktemp("bundle") / "acme")


@pytest.fixture(scope="session")
def other_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Another bundle of the same tenant, as made a second time."""
    return Bundle(tmp_path_factory.mktemp("bundle") / "again")


@pytest.fixture(scope="session")
def server_side(bundle: Bundle) -> Path:
    """The server directory of the bundle."""
    return bundle.server


@pytest.fixture(scope="session")
def client_side(bundle: Bundle) -> Path:
    """The client directory of the bundle."""
    return bundle.client


@pytest.fixture
def fault_server(server_side: Path) -> Iterator[FaultServer]:
    """A server of the bundle, good until told otherwise."""
    server = FaultServer(server_side)
    yield server
    server.close()


class StartRat(Protocol):
    """Starts a rat process for a test."""

    def __call__(
        self,
        address: str | None = None,
        side: Path | None = None,
        *,
        level: str | None = None,
        patch: str | None = None,
        environment: Mapping[str, str] | None = None,
        read_output: bool = True,
        read_errors: bool = True,
        blocking: bool = True,
    ) -> Harness: ...


@pytest.fixture
def start_rat(request: pytest.FixtureRequest, client_side: Path) -> Iterator[StartRat]:
    """Starts rat: for the test's ``fault_server`` and the client directory of the bundle unless
    told.

    ``level`` is its --log-level, ``patch`` Python run in it before main. Every process is ended,
    and must have written only JSON lines on stdout, nothing like a traceback on stderr.
    """
    started: list[Harness] = []

    def start(
        address: str | None = None,
        side: Path | None = None,
        *,
        level: str | None = None,
        patch: str | None = None,
        environment: Mapping[str, str] | None = None,
        read_output: bool = True,
        read_errors: bool = True,
        blocking: bool = True,
    ) -> Harness:
        if address is None:
            server: FaultServer = request.getfixturevalue("fault_server")
            address = server.address
        flags = ["--server", address, "--bundle", str(side or client_side)]
        if level is not None:
            flags += ["--log-level", level]
        harness = Harness(
            [*rat_command(patch), *flags],
            environment,
            read_output=read_output,
            read_errors=read_errors,
            blocking=blocking,
        )
        started.append(harness)
        return harness

    yield start
    for harness in started:
        harness.close()
    for harness in started:
        assert "Traceback" not in "\n".join(harness.log), harness.log


@pytest.fixture
def rat(start_rat: StartRat) -> Harness:
    """A rat for the test's server."""
    return start_rat()


class Conversation(NamedTuple):
    """A rat and its server."""

    server: FaultServer
    harness: Harness


class Started:
    """The conversation that the tests of a module share; ended and started anew when one broke it."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._conversation: Conversation | None = None

    def conversation(self) -> Conversation:
        """The one there is, or a new one."""
        if self._conversation is None:
            server = FaultServer(self._bundle.server)
            flags = ["--server", server.address, "--bundle", str(self._bundle.client)]
            self._conversation = Conversation(server, Harness([*rat_command(), *flags]))
        return self._conversation

    def end(self) -> None:
        """End the one there is. Fails when rat logged a traceback or a script failed."""
        if self._conversation is not None:
            server, harness = self._conversation
            self._conversation = None
            harness.close()
            server.close()
            assert "Traceback" not in "\n".join(harness.log), harness.log


@pytest.fixture(scope="module")
def started(bundle: Bundle) -> Iterator[Started]:
    """What ``conversation`` starts once for a module."""
    shared = Started(bundle)
    yield shared
    shared.end()


@pytest.fixture
def conversation(started: Started, request: pytest.FixtureRequest) -> Iterator[Conversation]:
    """A rat and its server, shared by the tests of a module: starting a process costs more than most.

    What a test did to the server is undone after it; one that fails leaves nothing to the next.
    """
    failed = request.session.testsfailed
    server, harness = started.conversation()
    yield Conversation(server, harness)
    if request.session.testsfailed > failed:
        started.end()
        return
    server.respond = answer
    server.script = server.serve
    server.scripts.clear()
    try:
        harness.call("last")  # nothing else is there to read
    except BaseException:
        started.end()
        raise
    server.cut_all()
    server.requests.clear()


@pytest.fixture(params=["http", "https"])
def proxy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ConnectProxy]:
    """A proxy, of http and of https: the latter certified by a CA of its own, which stands for public ones."""
    side = None
    if request.param == "https":
        public = Authority("public")
        leaf = public.issue("proxy", SERVER, address="127.0.0.1")
        side = write_side(tmp_path / "proxy", "server", public.certificate, leaf)
    server = ConnectProxy(side)
    yield server
    server.close()
