"""Servers that are installed for these tests: those of SDK 1, which know one era only, and those of Node."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from conftest import alive, eventually
from installed_servers import installed, node_programs
from sdk_checks import check, http_servers, transport_of
from web_server import HANG, free_port

import ratel
from ratel import McpClient, Sse, Stdio, StreamableHttp, TransportError, register_mcp_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ratel import Transport

# --- SDK 1 -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sdk_1(request: pytest.FixtureRequest) -> dict[str, str]:
    """An environment in which the SDK is of version 1."""
    if sys.version_info < (3, 10):
        pytest.skip("the SDK runs on Python 3.10 and later")
    name = f"mcp-1-python-{sys.version_info[0]}.{sys.version_info[1]}"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    place = installed(request.config, name, lambda own: [*install, "--target", str(own), "mcp<2"])
    return {"PYTHONPATH": str(place)}


@pytest.fixture(scope="module")
def sdk_1_urls(sdk_1: dict[str, str]) -> Iterator[dict[str, str]]:
    """The URL of each form over HTTP."""
    with http_servers({**os.environ, **sdk_1}) as served:
        yield served


@pytest.mark.parametrize("form", ["json", "stream", "session", "sse", "stdio"])
def test_a_server_of_sdk_1(sdk_1: dict[str, str], sdk_1_urls: dict[str, str], form: str, nothing_left: None) -> None:
    transport = transport_of(form, sdk_1_urls, sdk_1)
    check(transport, "2025-11-25", session=form == "session", pings=form in ("sse", "stdio"))


# --- Node --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def node_servers(request: pytest.FixtureRequest) -> Path:
    """The directory of the programs of the servers."""
    return node_programs(request.config)


def text(result: object) -> str:
    """The text of a result."""
    assert isinstance(result, dict)
    return str(result["content"][0]["text"])


@contextlib.contextmanager
def everything_over(node_servers: Path, form: str) -> Iterator[Transport]:
    """server-everything over a transport."""
    program = str(node_servers / "mcp-server-everything")
    if form == "stdio":
        yield Stdio(program, ["stdio"])
        return
    port = free_port()
    process = subprocess.Popen(
        [program, form],
        env={**os.environ, "PORT": str(port)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:

        def listens() -> bool:
            assert process.poll() is None
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), HANG):
                return True
            return False

        eventually(listens)
        yield Sse(f"http://127.0.0.1:{port}/sse") if form == "sse" else StreamableHttp(f"http://127.0.0.1:{port}/mcp")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("form", ["stdio", "streamableHttp", "sse"])
def test_everything(node_servers: Path, form: str, nothing_left: None) -> None:
    with everything_over(node_servers, form) as transport, ratel.ratel() as r:
        handle = register_mcp_server(r.tools.catalog, name="everything", transport=transport)
        assert "everything__echo" in handle.tool_ids
        assert handle.server_instructions
        assert r.tools.search("echo the input back")[0].tool_id == "everything__echo"
        assert text(r.tools.invoke("everything__echo", {"message": "hällo"})) == "Echo: hällo"
        long = "everything__trigger-long-running-operation"
        assert "completed" in text(r.tools.invoke(long, {"duration": 0.2, "steps": 2}))
        client = handle._client
        assert client.server_info["name"]
        with pytest.raises(TransportError, match="did not answer within"):
            client.call_tool(long.partition("__")[2], {"duration": 20, "steps": 2}, timeout=0.2)
        assert text(r.tools.invoke("everything__echo", {"message": "still"})) == "Echo: still"


def test_filesystem(node_servers: Path, tmp_path: Path, nothing_left: None) -> None:
    (tmp_path / "a.txt").write_text("content")
    transport = Stdio(str(node_servers / "mcp-server-filesystem"), [str(tmp_path)])
    with ratel.ratel() as r:
        register_mcp_server(r.tools.catalog, name="fs", transport=transport)
        hits = [hit.tool_id for hit in r.tools.search("read the text of a file")]
        assert "fs__read_text_file" in hits
        assert text(r.tools.invoke("fs__read_text_file", {"path": str(tmp_path / "a.txt")})) == "content"
        refused: Any = r.tools.invoke("fs__read_text_file", {"path": "/etc/passwd"})
        assert refused["isError"] is True


def test_memory(node_servers: Path, tmp_path: Path, nothing_left: None) -> None:
    transport = Stdio(str(node_servers / "mcp-server-memory"), env={"MEMORY_FILE_PATH": str(tmp_path / "memory.json")})
    entity = {"name": "Ada", "entityType": "person", "observations": ["wrote programs"]}
    with ratel.ratel() as r:
        register_mcp_server(r.tools.catalog, name="memory", transport=transport)
        r.tools.invoke("memory__create_entities", {"entities": [entity]})
        assert "wrote programs" in text(r.tools.invoke("memory__search_nodes", {"query": "Ada"}))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no process groups")
def test_npx_leaves_no_child(node_servers: Path, nothing_left: None) -> None:
    npx = shutil.which("npx")
    if npx is None:
        pytest.skip("npx is not installed here")
    with McpClient(Stdio(npx, ["--no-install", "mcp-server-memory"], cwd=node_servers.parent.parent)) as client:
        assert client.list_tools()
        leader = vars(client._link.connection)["_process"].pid if client._link is not None else 0
        group = [int(line) for line in processes_of(leader)]
        assert len(group) > 1  # npx is one, the server another
    assert not any(map(alive, group))


def processes_of(group: int) -> list[str]:
    """The processes of a group."""
    listed = subprocess.run(["ps", "-A", "-o", "pgid=,pid="], capture_output=True, text=True, check=True).stdout
    return [line.split()[1] for line in listed.splitlines() if int(line.split()[0]) == group]
