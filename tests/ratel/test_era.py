"""Which era a server speaks is found out, and what does not tell it is not taken for an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import fake_stdio

import ratel.client
from ratel import McpError, StreamableHttp, TransportError, UnauthorizedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from web_server import Exchange, Request, WebServer

    from ratel import McpClient

    Clients = Callable[..., McpClient]
    Servers = Callable[[Callable[[Exchange, Request], None]], WebServer]

MODERN = "2026-07-28"
NO_METHOD = {"code": -32601, "message": "Method not found"}
UNSUPPORTED = {"code": -32022, "message": "Unsupported protocol version"}


def lines(log: Path) -> list[dict[str, Any]]:
    """What a fake server on stdio has read."""
    return [json.loads(line) for line in log.read_text().splitlines()]


def methods(log: Path) -> list[str]:
    return [line["method"] for line in lines(log)]


# --- stdio -------------------------------------------------------------------------------------------


def test_a_discover_result_makes_a_server_on_stdio_modern(client_of: Clients, tmp_path: Path) -> None:
    log = tmp_path / "log"
    client = client_of(fake_stdio(log=str(log)))
    assert client.protocol_version == MODERN
    assert client.instructions == "Use me well"
    assert client.server_info == {"name": "fake", "version": "1"}
    assert client.call_tool("echo", {"a": 1})["arguments"] == {"a": 1}
    probe, call = lines(log)
    meta = {
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientInfo": {"name": "ratel", "version": ratel.client.rat.__version__},
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    assert probe["method"] == "server/discover"
    assert probe["params"] == {"_meta": meta}
    assert call["params"] == {"name": "echo", "arguments": {"a": 1}, "_meta": meta}


@pytest.mark.parametrize("error", [NO_METHOD, {"code": -32602, "message": "?"}, {"code": 0, "message": "?"}, {}])
def test_any_other_error_to_the_probe_means_initialize(client_of: Clients, tmp_path: Path, error: object) -> None:
    log = tmp_path / "log"
    client = client_of(fake_stdio(probe=error, log=str(log)))
    assert client.protocol_version == "2025-11-25"
    assert client.call_tool("echo")["tool"] == "echo"
    assert methods(log) == ["server/discover", "initialize", "notifications/initialized", "tools/call"]
    assert lines(log)[1]["params"] == {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "ratel", "version": ratel.client.rat.__version__},
    }
    assert "_meta" not in lines(log)[3]["params"]


@pytest.mark.parametrize("code", [-32020, -32021])
def test_a_modern_error_to_the_probe_means_modern(client_of: Clients, tmp_path: Path, code: int) -> None:
    log = tmp_path / "log"
    client = client_of(fake_stdio(probe={"code": code, "message": "?"}, log=str(log)))
    assert client.protocol_version == MODERN
    assert [tool["name"] for tool in client.list_tools()] == ["echo", "hang"]
    assert methods(log) == ["server/discover", "tools/list"]


def test_a_server_that_names_a_common_modern_version_is_asked_in_it_once(client_of: Clients, tmp_path: Path) -> None:
    log = tmp_path / "log"
    client = client_of(fake_stdio(probe={**UNSUPPORTED, "data": {"supported": [MODERN]}}, log=str(log)))
    with pytest.raises(McpError) as caught:
        client.connect()
    assert (caught.value.code, caught.value.message) == (-32022, "Unsupported protocol version")
    assert caught.value.data == {"supported": [MODERN]}
    assert methods(log) == ["server/discover"] * 2


def test_a_server_that_names_legacy_versions_is_initialized(client_of: Clients, tmp_path: Path) -> None:
    log = tmp_path / "log"
    supported = {"supported": ["2025-06-18", "2025-11-25"]}
    client = client_of(fake_stdio(probe={**UNSUPPORTED, "data": supported}, log=str(log)))
    assert client.protocol_version == "2025-11-25"
    assert methods(log)[:2] == ["server/discover", "initialize"]


@pytest.mark.parametrize("data", [{"supported": ["2099-01-01"]}, {"supported": "2026-07-28"}, None])
def test_a_server_without_a_common_version_raises(client_of: Clients, data: object) -> None:
    with pytest.raises(McpError, match=r"Unsupported protocol version \(-32022\)"):
        client_of(fake_stdio(probe={**UNSUPPORTED, "data": data})).connect()


def test_a_discover_result_of_legacy_versions_only_is_initialized(client_of: Clients) -> None:
    assert client_of(fake_stdio(supported=["2025-06-18"])).protocol_version == "2025-11-25"


def test_a_discover_result_without_a_common_version_raises(client_of: Clients) -> None:
    with pytest.raises(TransportError, match="speaks 2099-01-01, and this client none of it"):
        client_of(fake_stdio(supported=["2099-01-01"])).connect()


def test_after_a_silence_a_server_is_initialized(
    client_of: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ratel.client, "PROBE_SECONDS", 0.05)
    log = tmp_path / "log"
    client = client_of(fake_stdio(probe="silent", log=str(log)))
    assert client.protocol_version == "2025-11-25"
    client.call_tool("echo")
    assert methods(log) == ["server/discover", "initialize", "notifications/initialized", "tools/call"]


def test_a_late_discover_result_wins_when_it_is_first(client_of: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratel.client, "PROBE_SECONDS", 0.05)
    client = client_of(fake_stdio(probe="late", initialize="silent"))
    assert client.protocol_version == MODERN
    assert client.call_tool("echo")["tool"] == "echo"


def test_a_modern_server_that_refuses_initialize_before_it_answers_late_is_modern(
    client_of: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ratel.client, "PROBE_SECONDS", 0.3)
    assert client_of(fake_stdio(probe="late", initialize=NO_METHOD)).protocol_version == MODERN


def test_a_late_discover_result_after_the_handshake_is_dropped(
    client_of: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ratel.client, "PROBE_SECONDS", 0.05)
    client = client_of(fake_stdio(probe="late"))  # it answers initialize, then the discovery
    assert client.protocol_version == "2025-11-25"
    assert client.call_tool("echo")["tool"] == "echo"


def test_a_refused_initialize_after_a_silence_raises_the_refusal(
    client_of: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ratel.client, "PROBE_SECONDS", 0.05)
    with pytest.raises(McpError, match="not now"):
        client_of(fake_stdio(probe="silent", initialize={"code": -32000, "message": "not now"})).connect()


def test_a_process_that_exits_on_the_probe_is_restarted_with_initialize(client_of: Clients, tmp_path: Path) -> None:
    log = tmp_path / "log"
    client = client_of(fake_stdio(probe="exit", log=str(log)))
    assert client.protocol_version == "2025-11-25"
    client.call_tool("echo")
    assert methods(log) == ["server/discover", "initialize", "notifications/initialized", "tools/call"]


def test_it_is_restarted_only_once(client_of: Clients, tmp_path: Path) -> None:
    log = tmp_path / "log"
    client = client_of(fake_stdio(probe="exit", initialize="exit", log=str(log)))
    with pytest.raises(TransportError, match="exited with status 3: cannot do initialize"):
        client.connect()
    assert methods(log) == ["server/discover", "initialize"]


def test_connecting_ends_in_time(client_of: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratel.client, "PROBE_SECONDS", 0.05)
    monkeypatch.setattr(ratel.client, "CONNECT_SECONDS", 0.3)
    with pytest.raises(TransportError, match=r"did not answer in time$"):
        client_of(fake_stdio(probe="silent", initialize="silent")).connect()


@pytest.mark.parametrize("version", ["2024-11-05", "2025-03-26", "2025-06-18"])
def test_an_older_version_that_is_offered_is_accepted(client_of: Clients, version: str) -> None:
    assert client_of(fake_stdio(probe=NO_METHOD, version=version)).protocol_version == version


@pytest.mark.parametrize("version", ["2024-10-07", "2026-07-28", None, 5])
def test_another_version_that_is_offered_is_refused(client_of: Clients, version: object) -> None:
    client = client_of(fake_stdio(probe=NO_METHOD, version=version))
    with pytest.raises(TransportError, match=f"offers protocol {version!r}, which is not spoken here"):
        client.connect()


# --- HTTP --------------------------------------------------------------------------------------------


def legacy(exchange: Exchange, request: Request) -> None:
    """What a legacy server answers, once it is initialized."""
    method = request.message.get("method")
    if method == "initialize":
        exchange.result({"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {}})
    elif method == "notifications/initialized":
        exchange.answer(status=202)
    elif method == "tools/list":
        exchange.result({"tools": []})
    else:
        exchange.answer(status=405)


DISCOVERY = {
    "resultType": "complete",
    "supportedVersions": [MODERN],
    "capabilities": {"tools": {}},
    "instructions": "Hi",
}


def test_a_discover_result_makes_a_server_over_http_modern(client_of: Clients, web_server: Servers) -> None:
    server = web_server(lambda exchange, request: exchange.result(DISCOVERY))
    client = client_of(StreamableHttp(server.url))
    assert (client.protocol_version, client.instructions) == (MODERN, "Hi")
    [probe] = server.requests
    assert probe.fields["mcp-protocol-version"] == MODERN
    assert probe.fields["mcp-method"] == "server/discover"
    assert probe.fields["accept"] == "application/json, text/event-stream"
    assert probe.fields["content-type"] == "application/json"
    assert probe.message["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"] == MODERN


@pytest.mark.parametrize("status", [400, 404, 405])
@pytest.mark.parametrize("body", [None, b"<html>", {"error": "no session"}])
def test_a_refusal_without_a_modern_error_means_legacy(
    client_of: Clients, web_server: Servers, status: int, body: object
) -> None:
    def respond(exchange: Exchange, request: Request) -> None:
        if request.message.get("method") == "server/discover":
            exchange.answer(body, status)
        else:
            legacy(exchange, request)

    server = web_server(respond)
    assert client_of(StreamableHttp(server.url)).protocol_version == "2025-06-18"
    assert server.methods() == ["server/discover", "initialize", "notifications/initialized"]
    assert "mcp-protocol-version" not in server.requests[1].fields
    assert "mcp-method" not in server.requests[1].fields
    assert server.requests[2].fields["mcp-protocol-version"] == "2025-06-18"


@pytest.mark.parametrize("status", [200, 400, 404])
@pytest.mark.parametrize("identifier", [None, "server-error", 999])
def test_a_json_rpc_error_means_legacy_whatever_its_identifier(
    client_of: Clients, web_server: Servers, status: int, identifier: object
) -> None:
    def respond(exchange: Exchange, request: Request) -> None:
        if request.message.get("method") == "server/discover":
            exchange.answer({"jsonrpc": "2.0", "id": identifier, "error": NO_METHOD}, status)
        else:
            legacy(exchange, request)

    server = web_server(respond)
    assert client_of(StreamableHttp(server.url)).protocol_version == "2025-06-18"


@pytest.mark.parametrize("code", [-32020, -32021])
def test_a_modern_error_over_http_means_modern(client_of: Clients, web_server: Servers, code: int) -> None:
    def respond(exchange: Exchange, request: Request) -> None:
        if request.message["method"] == "server/discover":
            exchange.error(code)
        else:
            exchange.result({"tools": [], "resultType": "complete"})

    server = web_server(respond)
    assert client_of(StreamableHttp(server.url)).list_tools() == []
    assert server.methods() == ["server/discover", "tools/list"]


def test_a_common_version_is_tried_once_over_http(client_of: Clients, web_server: Servers) -> None:
    def respond(exchange: Exchange, request: Request) -> None:
        if len(server.requests) == 1:
            exchange.error(-32022, data={"supported": [MODERN, "2099-01-01"]})
        else:
            exchange.result(DISCOVERY)

    server = web_server(respond)
    assert client_of(StreamableHttp(server.url)).protocol_version == MODERN
    assert server.methods() == ["server/discover"] * 2


def test_a_version_refused_later_is_replaced_once(client_of: Clients, web_server: Servers) -> None:
    calls = 0

    def respond(exchange: Exchange, request: Request) -> None:
        nonlocal calls
        if request.message["method"] == "server/discover":
            exchange.result(DISCOVERY)
            return
        calls += 1
        if calls == 1:
            exchange.error(-32022, data={"supported": [MODERN]})
        elif calls == 2:
            exchange.result({"content": []})
        else:
            exchange.error(-32022, "never", data={"supported": [MODERN]})

    client = client_of(StreamableHttp(web_server(respond).url))
    assert client.call_tool("any") == {"content": []}
    with pytest.raises(McpError, match="never"):
        client.call_tool("any")
    assert calls == 4


@pytest.mark.parametrize("status", [403, 406, 500, 502, 503])
def test_other_statuses_never_fall_back(client_of: Clients, web_server: Servers, status: int) -> None:
    server = web_server(lambda exchange, request: exchange.answer(b"out of\x07order\nmore", status))
    with pytest.raises(TransportError) as caught:
        client_of(StreamableHttp(server.url)).connect()
    assert str(caught.value) == f"MCP server at {server.url} answered HTTP {status}: out of order"
    assert caught.value.status == status
    assert server.methods() == ["server/discover"]


def test_a_server_error_in_json_rpc_never_falls_back(client_of: Clients, web_server: Servers) -> None:
    server = web_server(lambda exchange, request: exchange.error(-32603, "broken", 500))
    with pytest.raises(McpError, match=r"^broken \(-32603\)$"):
        client_of(StreamableHttp(server.url)).connect()
    assert server.methods() == ["server/discover"]


def test_401_is_an_error_of_its_own(client_of: Clients, web_server: Servers) -> None:
    server = web_server(lambda exchange, request: exchange.error(-32001, "who?", 401))
    with pytest.raises(UnauthorizedError, match=r"answered HTTP 401: \{"):
        client_of(StreamableHttp(server.url)).connect()
    assert server.methods() == ["server/discover"]


def test_silence_never_falls_back(client_of: Clients, web_server: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratel.client, "CONNECT_SECONDS", 0.2)
    server = web_server(lambda exchange, request: exchange.wait_closed())
    with pytest.raises(TransportError, match="did not answer"):
        client_of(StreamableHttp(server.url)).connect()
    assert server.methods() == ["server/discover"]


def test_what_answers_something_else_is_initialized(client_of: Clients, web_server: Servers) -> None:
    def respond(exchange: Exchange, request: Request) -> None:
        if request.message.get("method") == "server/discover":
            exchange.result({"anything": "goes"})
        else:
            legacy(exchange, request)

    assert client_of(StreamableHttp(web_server(respond).url)).protocol_version == "2025-06-18"


def test_a_failed_connection_negotiates_anew_the_next_time(client_of: Clients, web_server: Servers) -> None:
    up = False

    def respond(exchange: Exchange, request: Request) -> None:
        if up:
            exchange.result(DISCOVERY)
        else:
            exchange.answer(status=503)

    client = client_of(StreamableHttp(web_server(respond).url))
    with pytest.raises(TransportError, match=r"answered HTTP 503$"):
        client.connect()
    up = True
    assert client.protocol_version == MODERN
