"""A server with sessions of another implementation, behind nginx: what works of it through rat, and what is told."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from typing import TYPE_CHECKING, NamedTuple

import pytest
from fault_server import HANG
from harness import call, notification
from installed_servers import node_programs
from test_tool_nginx import NGINX, end_nginx, start_nginx

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from bundles import Bundle
    from conftest import StartRat

pytestmark = [
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
    pytest.mark.skipif(os.name == "nt", reason="nginx is given a socket, as on POSIX"),
]

# The server tells only which port it was asked for, and that is any.
TELL_PORT = """
const server = require("net").Server.prototype;
const listen = server.listen;
server.listen = function (...given) {
  this.once("listening", () => console.log(`port=${this.address().port}`));
  return listen.apply(this, given);
};
"""


class Site(NamedTuple):
    """nginx before server-everything."""

    address: str
    client: Path


@pytest.fixture(scope="module")
def everything(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of server-everything over Streamable HTTP."""
    program = node_programs(request.config) / "mcp-server-everything"
    node = shutil.which("node")
    assert node is not None
    hook = tmp_path_factory.mktemp("node") / "port.cjs"
    hook.write_text(TELL_PORT)
    process = subprocess.Popen(
        [node, "--require", str(hook), str(program.resolve()), "streamableHttp"],
        env={**os.environ, "PORT": "0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        told = (re.fullmatch(r"port=([0-9]+)\n", line) for line in process.stdout)
        yield next(int(match[1]) for match in told if match)
    finally:
        process.kill()
        process.communicate(timeout=HANG)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, bundle: Bundle, everything: int) -> Iterator[Site]:
    """nginx as the README has it, before server-everything."""
    process, address = start_nginx(tmp_path_factory.mktemp("nginx") / "prefix", bundle.server, everything)
    yield Site(address, bundle.client)
    assert b"[emerg]" not in end_nginx(process)


INITIALIZE = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "harness", "version": "1"}}


def test_what_needs_no_session_works(start_rat: StartRat, site: Site) -> None:
    """The greeting, on an event stream that begins with an event without data."""
    harness = start_rat(site.address, site.client, level="debug")
    answer = harness.call(1, "initialize", INITIALIZE)
    assert isinstance(answer["result"], dict)
    assert answer["result"]["protocolVersion"] == "2025-11-25"
    assert "tools" in answer["result"]["capabilities"]
    assert "everything" in json.dumps(answer["result"]["serverInfo"]).lower()
    assert harness.records("relay failed") == []


def test_what_needs_a_session_is_told_by_the_server(start_rat: StartRat, site: Site) -> None:
    harness = start_rat(site.address, site.client)
    harness.call(1, "initialize", INITIALIZE)
    refused = (
        f"ratd at {site.address} answered HTTP 400: "
        '{"jsonrpc":"2.0","error":{"code":-32000,"message":"Bad Request: Server not initialized"},"id":null}'
    )
    harness.send(notification("notifications/initialized"))
    (record,) = harness.wait_record("relay failed")
    # What it quotes of a message is for the harness, not for the log.
    assert (record["method"], record["error"]) == ("notifications/initialized", refused.partition(": ")[0])
    for identifier, method in enumerate(("tools/list", "tools/call", "ping", "resources/list")):
        harness.send(call(identifier, method, {"name": "echo", "arguments": {"message": "x"}}))
        assert harness.error(identifier) == refused


def test_a_harness_of_both_eras_comes_as_far(site: Site) -> None:
    """It asks for the newer one, is refused, greets as before, and is told the same."""
    mcp = pytest.importorskip("mcp", reason="the MCP SDK is not installed")
    from test_demo_sdk import run, through_rat

    async def conversation() -> None:
        async with mcp.Client(mcp.stdio_client(through_rat(site.address, site.client))) as client:
            assert client.protocol_version == "2025-11-25"
            with pytest.raises(mcp.MCPError) as refused:
                await client.list_tools()
            assert (refused.value.code, "Server not initialized" in refused.value.message) == (-32050, True)

    run(conversation)
