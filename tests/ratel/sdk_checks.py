"""What every server made with the official SDK must do through ratel, whatever its version and its transport."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import ratel
from ratel import McpError, Sse, Stdio, StreamableHttp, TransportError, register_mcp_server

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ratel import Transport
    from ratel.transports import Connection

SERVER = str(Path(__file__).resolve().parent / "sdk_server.py")
TOOLS = ["add", "fail", "slow", "resumed", "ask", "ping", "cut"]


class LegacyHttp(StreamableHttp):
    """A client of the legacy era over Streamable HTTP: it does not ask a server for the other."""

    def open(self) -> Connection:
        """A connection on which initialize comes first."""
        connection = super().open()
        vars(connection)["probed"] = False
        return connection


@contextlib.contextmanager
def http_servers(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """A process that serves every form over HTTP; their URLs."""
    process = subprocess.Popen(
        [sys.executable, SERVER, "http"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=dict(environment),
    )
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.kill()


def transport_of(form: str, urls: Mapping[str, str], environment: Mapping[str, str]) -> Transport:
    """The transport of a form: "stdio", "json", "stream", "session" or "sse", or one of these with " legacy"."""
    form, _, era = form.partition(" ")
    if form == "stdio":
        return Stdio(sys.executable, [SERVER, "stdio"], env=environment)
    if form == "sse":
        return Sse(urls["sse"])
    return (LegacyHttp if era else StreamableHttp)(urls[form])


def check(transport: Transport, version: str, *, session: bool = False, pings: bool = False) -> None:
    """Register the server, call its tools, be late, be asked, have a stream cut, and close."""
    with ratel.ratel() as r:
        handle = register_mcp_server(r.tools.catalog, name="sdk", transport=transport)
        client = handle._client
        assert handle.tool_ids == [f"sdk__{name}" for name in TOOLS]
        assert handle.server_instructions == "From the SDK"
        assert client.protocol_version == version
        assert client.server_info["name"] == "sdk"
        link = client._link
        assert link is not None
        assert (link.session is not None) == session
        [best, *_] = r.tools.search("the sum of two numbers")
        assert best.tool_id == "sdk__add"
        result = r.tools.invoke("sdk__add", {"a": 2, "b": 3})
        assert isinstance(result, dict)
        assert result["content"][0]["text"] == "5"
        assert result["structuredContent"] == {"result": 5}
        assert text(r, "slow", seconds=0.05) == "slept"
        failed = r.tools.invoke("sdk__fail")
        assert isinstance(failed, dict)
        assert failed["isError"] is True
        with pytest.raises(TransportError, match=r"did not answer within 0\.1s$"):
            client.call_tool("slow", {"seconds": 30}, timeout=0.1)
        assert text(r, "add", a=1, b=1) == "2"
        if session:
            before = int(text(r, "resumed"))
            assert text(r, "cut") == "after the cut"
            assert int(text(r, "resumed")) == before + 1
            try:
                refused = text(r, "ask")
            except McpError as e:
                refused = str(e)
            assert "Method not found" in refused  # our answer to the request that came on the stream of the call
        if pings:
            assert text(r, "ping") == "ponged"


def text(r: ratel.Ratel, tool: str, **arguments: object) -> str:
    """What a tool answers."""
    result = r.tools.invoke(f"sdk__{tool}", arguments)
    assert isinstance(result, dict)
    return str(result["content"][0]["text"])
