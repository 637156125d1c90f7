"""Tests of what ``packaging/build`` made: run them with ``pytest tests/packaging --built dist``.

They are collected only when told where it is. What lies in ``dist`` may be older than the sources: a suite that took
it up whenever it is there would test one commit by the artifacts of another.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from artifacts import Exercise, annotated
from fault_server import ConnectProxy, FaultServer
from harness import Harness, call, modern

import demo_ratd
import rat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bundles import Bundle

collect_ignore_glob = ["test_*.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--built", type=Path, metavar="DIR", help="test the artifacts in DIR, made by packaging/build")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--built", default=None) is not None:
        collect_ignore_glob.clear()


@pytest.fixture(scope="session")
def built(request: pytest.FixtureRequest) -> Path:
    """The directory of the artifacts."""
    directory = request.config.getoption("--built")
    assert isinstance(directory, Path)
    return directory.resolve()


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, str]:
    """An environment with nothing in it but empty directories: no program on PATH, above all no Python."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "temporary").mkdir()
    return {"PATH": str(tmp_path / "empty"), "TMPDIR": str(tmp_path / "temporary"), "HOME": str(tmp_path / "empty")}


@pytest.fixture
def exercise(bundle: Bundle, tmp_path: Path) -> Iterator[Exercise]:
    """Starts a rat by a command against demo_ratd over mutual TLS, and has the conversation a harness has in both
    eras, a large answer and several calls at once included. The rat is returned, still there."""
    (tmp_path / "files").mkdir()
    started: list[Harness] = []
    side = rat.load_side(str(bundle.server), "server")
    with demo_ratd.DemoRatd(side, str(tmp_path / "files")) as server:

        def start(command: Sequence[str]) -> Harness:
            harness = Harness([*command, "--server", server.address, "--bundle", str(bundle.client)])
            started.append(harness)
            client = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
            answer = harness.call(1, "initialize", client)
            assert answer["result"]["serverInfo"]["name"] == "demo_ratd", answer  # type: ignore[index]
            text = "\u20ac" * 100_000
            written = {"name": "write_file", "arguments": {"path": "a", "content": text}}
            assert "error" not in harness.call(2, "tools/call", written)
            read = harness.call(3, "tools/call", {"name": "read_file", "arguments": {"path": "a"}})
            assert text in json.dumps(read, ensure_ascii=False)
            details = modern()
            details["_meta"].update(  # type: ignore[attr-defined]
                {
                    "io.modelcontextprotocol/clientCapabilities": {},
                    "io.modelcontextprotocol/clientInfo": {"name": "t", "version": "1"},
                }
            )
            harness.send(*(call(n, "tools/list", details) for n in range(10, 20)))
            assert all("result" in answer for answer in harness.answers(10))
            return harness

        yield start
        for each in started:
            each.close()


@pytest.fixture
def knows_schemas(fault_server: FaultServer, bundle: Bundle) -> Iterator[Callable[[Sequence[str], Path | None], None]]:
    """Checks that a rat reads the schemas that came with it.

    Those of today ask for nothing that shows at once, so an argument of one of them has been given an annotation, in
    the artifact; or is given it now, in the file, which is read when a tool is first called.
    """
    started: list[Harness] = []

    def check(command: Sequence[str], unpacked_in: Path | None = None) -> None:
        harness = Harness([*command, "--server", fault_server.address, "--bundle", str(bundle.client)])
        started.append(harness)
        harness.call(1)  # it is up
        if unpacked_in is not None:
            (schema,) = unpacked_in.glob("*/rat_schemas/read_file.json")
            schema.write_bytes(annotated(schema.read_bytes()))
        params = {**modern(), "name": "read_file", "arguments": {"path": "a b"}}
        harness.call(2, "tools/call", params)
        fields = {name.lower(): value for name, value in fault_server.requests[-1].fields}
        assert fields["mcp-param-place"] == "a b"

    yield check
    for each in started:
        each.close()


@pytest.fixture
def knows_public_authorities(
    bundle: Bundle, fault_server: FaultServer, tmp_path: Path
) -> Iterator[Callable[[Sequence[str]], None]]:
    """Checks that a rat has public certificates: it refuses a proxy for being of none of them, and no file is missed.

    The command must keep HTTPS_PROXY of the environment it is given.
    """
    proxy = ConnectProxy(bundle.server)
    started: list[Harness] = []

    def check(command: Sequence[str]) -> None:
        words = [*command, "--server", f"ratd.test:{fault_server.port}", "--bundle", str(bundle.client)]
        harness = Harness(["/usr/bin/env", f"HTTPS_PROXY={proxy.url}", *words])
        started.append(harness)
        harness.send(call(1))
        text = harness.error(1)
        assert text.startswith(f"proxy at {proxy.address} unreachable: "), text
        assert "certificate" in text, text

    yield check
    for each in started:
        each.close()
    proxy.close()
