"""Streamable HTTP: sessions, answers in JSON and in streams, headers, times, and what is left of them."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from conftest import eventually
from web_server import HANG, Exchange, Request, free_port

import rat
import ratel.client
from ratel import McpError, StreamableHttp, TransportError, UnauthorizedError
from ratel.transports import _web_endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from web_server import WebServer

    from ratel import McpClient

    Clients = Callable[..., McpClient]
    Servers = Callable[[Callable[[Exchange, Request], None]], WebServer]

MODERN = "2026-07-28"
DISCOVERY = {"resultType": "complete", "supportedVersions": [MODERN], "capabilities": {"tools": {}}}
CALLED = {"content": [{"type": "text", "text": "done"}]}


def modern(answer: Callable[[Exchange, Request], None]) -> Callable[[Exchange, Request], None]:
    """A modern server whose requests after the discovery this answers."""

    def respond(exchange: Exchange, request: Request) -> None:
        if request.message.get("method") == "server/discover":
            exchange.result(DISCOVERY)
        else:
            answer(exchange, request)

    return respond


def legacy(
    answer: Callable[[Exchange, Request], None],
    version: str = "2025-11-25",
    session: Callable[[], str | None] = lambda: None,
) -> Callable[[Exchange, Request], None]:
    """A legacy server whose requests after the handshake this answers, its GETs and DELETEs included."""

    def respond(exchange: Exchange, request: Request) -> None:
        method = request.message.get("method")
        if method == "server/discover":
            exchange.answer(status=400)
        elif method == "initialize":
            identifier = session()
            fields = {} if identifier is None else {"Mcp-Session-Id": identifier}
            exchange.result({"protocolVersion": version, "capabilities": {"tools": {}}}, fields=fields)
        elif method is not None and method.startswith("notifications/"):
            exchange.answer(status=202)
        else:
            answer(exchange, request)

    return respond


# --- Answers -----------------------------------------------------------------------------------------


def test_answers_in_json_and_in_streams_are_taken(client_of: Clients, web_server: Servers) -> None:
    def answer(exchange: Exchange, request: Request) -> None:
        if request.message["params"]["name"] == "json":
            exchange.result(CALLED)
        else:
            exchange.stream(
                ": hello\n\n",
                "id: 1\ndata:\n\n",
                exchange.message({"jsonrpc": "2.0", "method": "notifications/progress", "params": {}}),
                "event: other\ndata: {}\n\n",
                exchange.message({"jsonrpc": "2.0", "id": 10**6, "result": {"of": "another"}}),
                exchange.message(CALLED).replace("\n", "\r\n"),
            )

    client = client_of(StreamableHttp(web_server(modern(answer)).url))
    assert client.call_tool("json") == CALLED
    assert client.call_tool("stream") == CALLED


def test_a_connection_serves_the_call_after_a_stream(client_of: Clients, web_server: Servers) -> None:
    ports = []

    def answer(exchange: Exchange, request: Request) -> None:
        ports.append(exchange.client_address)
        event = exchange.message(CALLED).encode()
        exchange.send_response(200)
        exchange.send_header("Content-Type", "text/event-stream")
        exchange.send_header("Transfer-Encoding", "chunked")
        exchange.end_headers()
        exchange.write(b"%x\r\n%s\r\n" % (len(event), event))
        exchange.write(b"0\r\n\r\n")

    client = client_of(StreamableHttp(web_server(modern(answer)).url))
    client.call_tool("any")
    eventually(lambda: not any(thread.name == "ratel-http" for thread in threading.enumerate()))
    client.call_tool("any")
    assert ports[0] == ports[1]


def test_json_rpc_errors_are_raised_as_they_were_sent(client_of: Clients, web_server: Servers) -> None:
    def answer(exchange: Exchange, request: Request) -> None:
        exchange.error(-32602, "no such tool", request.message["params"]["arguments"]["status"], {"why": [1]})

    client = client_of(StreamableHttp(web_server(modern(answer)).url))
    for status in (200, 400, 404, 422, 500):
        with pytest.raises(McpError) as caught:
            client.call_tool("any", {"status": status})
        assert (caught.value.code, caught.value.message, caught.value.data) == (-32602, "no such tool", {"why": [1]})
        assert str(caught.value) == "no such tool (-32602)"


def test_what_is_no_answer_says_so(client_of: Clients, web_server: Servers) -> None:
    replies: dict[str, Callable[[Exchange], None]] = {
        "answered nothing to the request (HTTP 202)": lambda exchange: exchange.answer(status=202),
        "answered no JSON-RPC response to the request (HTTP 200)": lambda exchange: exchange.answer({"a": 1}),
        "answered no JSON-RPC response to the request (HTTP 200) ": lambda exchange: exchange.answer(
            {"jsonrpc": "2.0", "id": "other", "result": {}}
        ),
        "answered HTTP 502: Bad Gateway": lambda exchange: exchange.answer(b"\n Bad Gateway\n", 502),
        "answered HTTP 307, pointing to /mcp/: use that URL if it is right": lambda exchange: exchange.answer(
            status=307, fields={"Location": "/mcp/"}
        ),
        "sent a result that is no object": lambda exchange: exchange.result([]),
        "sent an answer over 16 MiB": lambda exchange: exchange.answer(b"x" * (16 * 1024 * 1024 + 1)),
        "sent an event over 16777216 bytes": lambda exchange: exchange.stream(b"data: " + b"x" * 17_000_000),
        "sent not JSON (character 1)": lambda exchange: exchange.stream("data: x\n\n"),
        "ended its stream before the answer": lambda exchange: exchange.stream(": nothing\n\n"),
        "broke off its answer: it ended before its end": lambda exchange: exchange.answer(
            b"{", fields={"Content-Length": "10"}
        ),
        "asks for input (input_required), and there is none here": lambda exchange: exchange.result(
            {"resultType": "input_required", "inputRequests": {}}
        ),
        "sent a result of an unknown type: 'task'": lambda exchange: exchange.result({"resultType": "task"}),
    }

    def answer(exchange: Exchange, request: Request) -> None:
        replies[request.message["params"]["name"]](exchange)
        if request.message["params"]["name"].startswith("broke off"):
            exchange.close_connection = True

    server = web_server(modern(answer))
    client = client_of(StreamableHttp(server.url))
    for said in replies:
        with pytest.raises(TransportError) as caught:
            client.call_tool(said)
        assert str(caught.value) == f"MCP server at {server.url} {said.strip()}"


def test_an_upgrade_that_nobody_asked_for_is_no_answer(client_of: Clients, web_server: Servers) -> None:
    def answer(exchange: Exchange, request: Request) -> None:
        exchange.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n")
        exchange.close_connection = True

    server = web_server(modern(answer))
    with pytest.raises(TransportError) as caught:
        client_of(StreamableHttp(server.url)).call_tool("any")
    assert str(caught.value) == f"MCP server at {server.url} answered HTTP 101, which nobody asked for"


def test_without_a_thread_left_a_call_says_so(
    client_of: Clients, web_server: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = web_server(modern(lambda exchange, _: exchange.result(CALLED)))
    client = client_of(StreamableHttp(server.url))
    client.connect()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:  # in place of a system at its limit
        if thread.name == "ratel-http":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(TransportError) as caught:
        client.call_tool("any")
    assert str(caught.value) == f"MCP server at {server.url} was not asked: the system has no thread left"
    with pytest.raises(TransportError, match=r" was not told: the system has no thread left$"):
        client.notify("notifications/any")
    monkeypatch.undo()
    assert client.call_tool("any") == CALLED


def test_an_absent_result_type_is_complete(client_of: Clients, web_server: Servers) -> None:
    client = client_of(StreamableHttp(web_server(modern(lambda exchange, _: exchange.result(CALLED))).url))
    assert client.call_tool("any") == CALLED


def test_a_server_that_is_not_there_says_so(client_of: Clients) -> None:
    port = free_port()
    with pytest.raises(TransportError) as caught:
        client_of(StreamableHttp(f"http://user:secret@127.0.0.1:{port}/mcp?key=secret")).connect()
    assert str(caught.value) == f"MCP server at http://127.0.0.1:{port}/mcp is unreachable: connection refused"


def test_a_server_that_is_no_http_server_says_so(client_of: Clients, nothing_left: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        with pytest.raises(TransportError) as caught:
            client_of(StreamableHttp(url)).connect()
        thread.join()
    assert str(caught.value) == f"MCP server at {url} broke off its answer: not an HTTP answer"


# --- Requests of the server --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "reply"),
    [("ping", {"result": {}}), ("sampling/createMessage", {"error": {"code": -32601, "message": "Method not found"}})],
)
def test_requests_of_a_legacy_server_are_answered(
    client_of: Clients, web_server: Servers, method: str, reply: dict[str, Any]
) -> None:
    def answer(exchange: Exchange, request: Request) -> None:
        if "method" not in request.message:
            exchange.answer(status=202)
            return
        exchange.stream()
        exchange.write(exchange.message({"jsonrpc": "2.0", "id": "q", "method": method}))
        got = server.wait_for(lambda request: request.message.get("id") == "q")
        exchange.write(exchange.message({"got": got.message, "session": got.fields.get("mcp-session-id")}))

    server = web_server(legacy(answer, session=lambda: "s1"))
    client = client_of(StreamableHttp(server.url))
    assert client.call_tool("any") == {"got": {"jsonrpc": "2.0", "id": "q", **reply}, "session": "s1"}


def test_requests_of_a_modern_server_are_not(client_of: Clients, web_server: Servers) -> None:
    def answer(exchange: Exchange, request: Request) -> None:
        ping = {"jsonrpc": "2.0", "id": "q", "method": "ping"}
        exchange.stream(exchange.message(ping), exchange.message(CALLED))

    server = web_server(modern(answer))
    client = client_of(StreamableHttp(server.url))
    assert client.call_tool("any") == CALLED
    assert client.call_tool("any") == CALLED
    client.close()
    assert server.methods() == ["server/discover", "tools/call", "tools/call"]


# --- Sessions ----------------------------------------------------------------------------------------


def test_the_session_goes_back_and_is_ended(client_of: Clients, web_server: Servers) -> None:
    def answer(exchange: Exchange, request: Request) -> None:
        if request.method == "DELETE":
            exchange.answer(status=405)
        else:
            exchange.result(CALLED)

    server = web_server(legacy(answer, session=lambda: "s1"))
    client = client_of(StreamableHttp(server.url))
    client.call_tool("any")
    client.close()
    assert server.methods() == ["server/discover", "initialize", "notifications/initialized", "tools/call", "DELETE"]
    assert [request.fields.get("mcp-session-id") for request in server.requests] == [None, None, "s1", "s1", "s1"]
    versions = [request.fields.get("mcp-protocol-version") for request in server.requests]
    assert versions == [MODERN, None, "2025-11-25", "2025-11-25", "2025-11-25"]


def test_without_a_session_nothing_is_deleted(client_of: Clients, web_server: Servers) -> None:
    server = web_server(legacy(lambda exchange, _: exchange.result(CALLED)))
    client = client_of(StreamableHttp(server.url))
    client.call_tool("any")
    client.close()
    assert "DELETE" not in server.methods()


def test_a_session_of_a_version_that_is_not_spoken_is_ended(client_of: Clients, web_server: Servers) -> None:
    server = web_server(legacy(lambda exchange, _: exchange.answer(), "1999-01-01", session=lambda: "s1"))
    with pytest.raises(TransportError, match=r"offers protocol '1999-01-01', which is not spoken here$"):
        client_of(StreamableHttp(server.url)).connect()
    assert server.methods() == ["server/discover", "initialize", "DELETE"]
    assert server.requests[2].fields["mcp-session-id"] == "s1"


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, None),
        (404, {"jsonrpc": "2.0", "id": "server-error", "error": {"code": -32600, "message": "Session not found"}}),
        (400, {"jsonrpc": "2.0", "id": None, "error": {"code": -32000, "message": "Bad Request: No valid session ID"}}),
        (400, b"unknown session"),
    ],
)
def test_a_session_that_is_over_is_begun_anew_once(
    client_of: Clients, web_server: Servers, status: int, body: object
) -> None:
    sessions = iter(["s1", "s2", "s3"])
    over = {"s1"}

    def answer(exchange: Exchange, request: Request) -> None:
        if request.method == "DELETE":
            exchange.answer(status=200)
        elif request.fields["mcp-session-id"] in over:
            exchange.answer(body, status)
        else:
            exchange.result(CALLED)

    server = web_server(legacy(answer, session=lambda: next(sessions)))
    client = client_of(StreamableHttp(server.url))
    assert client.call_tool("any") == CALLED
    assert server.methods()[3:] == ["tools/call", "initialize", "notifications/initialized", "tools/call"]
    assert "mcp-session-id" not in server.requests[4].fields
    over.update(("s2", "s3"))  # a server that ends every session at once is not asked for ever
    with pytest.raises((TransportError, McpError)):
        client.call_tool("any")
    assert server.methods()[7:] == ["tools/call", "initialize", "notifications/initialized", "tools/call"]


def test_one_session_is_begun_for_all_calls_that_met_its_end(client_of: Clients, web_server: Servers) -> None:
    sessions = iter(["s1", "s2", "s3", "s4", "s5"])
    met = threading.Barrier(4)

    def answer(exchange: Exchange, request: Request) -> None:
        if request.method == "DELETE":
            exchange.answer(status=200)
        elif request.fields["mcp-session-id"] == "s1":
            met.wait(HANG)
            exchange.answer(status=404)
        else:
            exchange.result({"session": request.fields["mcp-session-id"]})

    server = web_server(legacy(answer, session=lambda: next(sessions)))
    client = client_of(StreamableHttp(server.url))
    client.connect()
    results = []
    threads = [threading.Thread(target=lambda: results.append(client.call_tool("any"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [{"session": "s2"}] * 4


def test_a_404_without_a_session_is_an_error(client_of: Clients, web_server: Servers) -> None:
    server = web_server(legacy(lambda exchange, _: exchange.answer(status=404)))
    with pytest.raises(TransportError, match=r"answered HTTP 404$"):
        client_of(StreamableHttp(server.url)).call_tool("any")
    assert server.methods().count("initialize") == 1


def test_401_to_a_call_is_an_error_of_its_own(client_of: Clients, web_server: Servers) -> None:
    server = web_server(legacy(lambda exchange, _: exchange.answer(status=401), session=lambda: "s"))
    with pytest.raises(UnauthorizedError, match=r"answered HTTP 401$"):
        client_of(StreamableHttp(server.url)).call_tool("any")


# --- Streams that are cut ----------------------------------------------------------------------------


def test_a_cut_legacy_stream_is_taken_up_again(client_of: Clients, web_server: Servers) -> None:
    asked: list[float] = []

    def answer(exchange: Exchange, request: Request) -> None:
        asked.append(time.monotonic())
        if request.method == "POST":
            calls.append(request.message["id"])
            exchange.stream("id: é1\nretry: 30\ndata:\n\n", "id: lost\ndata: {")
        elif request.fields["last-event-id"] == "é1".encode().decode("latin-1"):
            exchange.stream("id: 2\n", exchange.message({"jsonrpc": "2.0", "method": "notifications/message"}))
        else:
            response = {"jsonrpc": "2.0", "id": calls[0], "result": CALLED}
            exchange.stream(exchange.message(response))

    calls: list[int] = []
    server = web_server(legacy(answer, session=lambda: "s1"))
    client = client_of(StreamableHttp(server.url))
    assert client.call_tool("any") == CALLED
    first, second = [request for request in server.requests if request.method == "GET"]
    assert first.fields["accept"] == "text/event-stream"
    assert first.fields["mcp-session-id"] == "s1"
    assert first.fields["mcp-protocol-version"] == "2025-11-25"
    assert second.fields["last-event-id"] == "2"
    assert asked[1] - asked[0] >= 0.03


def test_a_stream_without_an_id_is_not_taken_up_again(client_of: Clients, web_server: Servers) -> None:
    server = web_server(legacy(lambda exchange, _: exchange.stream("data:\n\n")))
    with pytest.raises(TransportError, match=r"ended its stream before the answer$"):
        client_of(StreamableHttp(server.url)).call_tool("any")
    assert "GET" not in server.methods()


def test_a_modern_stream_is_never_taken_up_again(client_of: Clients, web_server: Servers) -> None:
    server = web_server(modern(lambda exchange, _: exchange.stream("id: 1\nretry: 1\ndata:\n\n")))
    with pytest.raises(TransportError, match=r"ended its stream before the answer$"):
        client_of(StreamableHttp(server.url)).call_tool("any")
    assert "GET" not in server.methods()


def test_a_stream_that_cannot_be_taken_up_again_fails(client_of: Clients, web_server: Servers) -> None:
    def answer(exchange: Exchange, request: Request) -> None:
        if request.method == "POST":
            exchange.stream("id: 1\nretry: 1\ndata:\n\n")
        else:
            exchange.answer(status=405)

    with pytest.raises(TransportError, match=r"answered HTTP 405$"):
        client_of(StreamableHttp(web_server(legacy(answer)).url)).call_tool("any")


def test_taking_up_a_stream_is_given_up_after_three_failures(client_of: Clients, web_server: Servers) -> None:
    def answer(exchange: Exchange, request: Request) -> None:
        if request.method == "POST":
            exchange.stream("id: 1\nretry: 1\ndata:\n\n")
        else:
            exchange.close_connection = True  # without an answer

    server = web_server(legacy(answer))
    with pytest.raises(TransportError, match=r"broke off its answer: the connection closed before an answer$"):
        client_of(StreamableHttp(server.url)).call_tool("any")
    assert server.methods().count("GET") == 3


# --- Times -------------------------------------------------------------------------------------------


def test_a_modern_call_that_is_late_closes_its_connection(client_of: Clients, web_server: Servers) -> None:
    closed = threading.Event()

    def answer(exchange: Exchange, request: Request) -> None:
        exchange.wait_closed()
        closed.set()

    server = web_server(modern(answer))
    client = client_of(StreamableHttp(server.url))
    client.connect()
    with pytest.raises(TransportError) as caught:
        client.call_tool("any", timeout=0.1)
    assert str(caught.value) == f"MCP server at {server.url} did not answer within 0.1s"
    assert closed.wait(HANG)
    client.close()
    assert server.methods() == ["server/discover", "tools/call"]


def test_a_modern_stream_that_is_late_closes_its_connection(client_of: Clients, web_server: Servers) -> None:
    closed = threading.Event()

    def answer(exchange: Exchange, request: Request) -> None:
        exchange.stream(": begun\n\n")
        exchange.wait_closed()
        closed.set()

    client = client_of(StreamableHttp(web_server(modern(answer)).url))
    client.connect()
    with pytest.raises(TransportError, match=r"did not answer within 0\.1s$"):
        client.call_tool("any", timeout=0.1)
    assert closed.wait(HANG)


def test_a_server_that_drips_bytes_is_late_all_the_same(client_of: Clients, web_server: Servers) -> None:
    stop = threading.Event()

    def answer(exchange: Exchange, request: Request) -> None:
        exchange.stream()
        while not stop.wait(0.01):
            exchange.write(": drip\n\n")

    client = client_of(StreamableHttp(web_server(modern(answer)).url))
    client.connect()
    with pytest.raises(TransportError, match=r"did not answer within 0\.2s$"):
        client.call_tool("any", timeout=0.2)
    stop.set()


def test_a_legacy_call_that_is_late_is_canceled(client_of: Clients, web_server: Servers) -> None:
    server = web_server(legacy(lambda exchange, _: exchange.wait_closed(), session=lambda: "s1"))
    client = client_of(StreamableHttp(server.url))
    client.connect()
    with pytest.raises(TransportError, match=r"did not answer within 0\.1s$"):
        client.call_tool("any", timeout=0.1)
    canceled = server.wait_for(lambda request: request.message.get("method") == "notifications/cancelled")
    call = server.wait_for(lambda request: request.message.get("method") == "tools/call")
    assert canceled.message["params"] == {"requestId": call.message["id"], "reason": "timed out"}
    assert canceled.fields["mcp-session-id"] == "s1"


def test_initialize_is_never_canceled(client_of: Clients, web_server: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratel.client, "CONNECT_SECONDS", 0.2)

    def respond(exchange: Exchange, request: Request) -> None:
        if request.message["method"] == "server/discover":
            exchange.answer(status=404)
        else:
            exchange.wait_closed()

    server = web_server(respond)
    client = client_of(StreamableHttp(server.url))
    with pytest.raises(TransportError, match="did not answer"):
        client.connect()
    client.close()
    assert server.methods() == ["server/discover", "initialize"]


def test_the_time_of_a_client_and_the_maximum(client_of: Clients, web_server: Servers) -> None:
    seen: list[float] = []
    server = web_server(modern(lambda exchange, _: exchange.result(CALLED)))
    for own, given, expected in ((60.0, None, 60.0), (5.0, None, 5.0), (60.0, 1e9, 600.0), (1e9, None, 600.0)):
        client = client_of(StreamableHttp(server.url), timeout=own)
        link = client._linked(time.monotonic() + HANG)
        send = link.connection.send
        link.connection.send = lambda call, send=send: (seen.append(call.remaining()), send(call))  # type: ignore[method-assign,misc]
        client.call_tool("any", timeout=given)
        assert expected - HANG < seen.pop() <= expected


def test_close_fails_the_calls_in_flight_and_later_ones(client_of: Clients, web_server: Servers) -> None:
    began = threading.Event()

    def answer(exchange: Exchange, request: Request) -> None:
        began.set()
        exchange.wait_closed()

    server = web_server(modern(answer))
    client = client_of(StreamableHttp(server.url))
    errors = []

    def call() -> None:
        try:
            client.call_tool("any")
        except TransportError as e:
            errors.append(str(e))

    thread = threading.Thread(target=call)
    thread.start()
    assert began.wait(HANG)
    client.close()
    thread.join()
    assert errors == [f"MCP server at {server.url} was closed"]
    with pytest.raises(TransportError, match=r"was closed: register it again to call its tools$"):
        client.call_tool("any")


def test_close_does_not_wait_for_a_connection_to_come_about(client_of: Clients, web_server: Servers) -> None:
    began = threading.Event()

    def respond(exchange: Exchange, request: Request) -> None:
        began.set()
        exchange.wait_closed()

    client = client_of(StreamableHttp(web_server(respond).url))
    errors = []

    def connect() -> None:
        try:
            client.connect()
        except TransportError as e:
            errors.append(e)

    thread = threading.Thread(target=connect)
    thread.start()
    assert began.wait(HANG)
    client.close()
    thread.join()
    assert len(errors) == 1


# --- Headers -----------------------------------------------------------------------------------------


def test_the_headers_of_a_modern_request(client_of: Clients, web_server: Servers) -> None:
    server = web_server(modern(lambda exchange, _: exchange.result({})))
    client = client_of(StreamableHttp(server.url, headers={"authorization": "Bearer x", "mcp-method": "mine"}))
    client.call_tool("größe")
    client.request("resources/read", {"uri": "file:///a b"})
    client.request("prompts/get", {"name": "p"})
    client.request("tools/list")
    fields = [request.fields for request in server.requests[1:]]
    named = [(each["mcp-method"], each.get("mcp-name")) for each in fields]
    assert named == [
        ("tools/call", rat.header_value("größe")),
        ("resources/read", "file:///a b"),
        ("prompts/get", "p"),
        ("tools/list", None),
    ]
    for each in fields:
        assert each["authorization"] == "Bearer x"
        assert each["mcp-protocol-version"] == MODERN
        assert each["accept-encoding"] == "identity"
        assert "mcp-session-id" not in each


def test_what_a_model_sends_never_becomes_a_header_of_its_own(client_of: Clients, web_server: Servers) -> None:
    server = web_server(modern(lambda exchange, _: exchange.result({})))
    client_of(StreamableHttp(server.url)).call_tool("a\r\nX-Evil: 1")
    assert server.requests[1].fields["mcp-name"] == rat.header_value("a\r\nX-Evil: 1")
    assert "x-evil" not in server.requests[1].fields


SCHEMA = {
    "type": "object",
    "properties": {
        "region": {"type": "string", "x-mcp-header": "Region"},
        "deep": {"type": "object", "properties": {"n": {"type": "integer", "x-mcp-header": "Count"}}},
    },
}


def test_annotated_arguments_are_mirrored(client_of: Clients, web_server: Servers) -> None:
    def answer(exchange: Exchange, request: Request) -> None:
        if request.message["method"] == "tools/list":
            exchange.result({"tools": [{"name": "t", "inputSchema": SCHEMA}]})
        else:
            exchange.result({})

    server = web_server(modern(answer))
    client = client_of(StreamableHttp(server.url))
    client.list_tools()
    client.call_tool("t", {"region": "Zürich", "deep": {"n": 5.0}})
    client.call_tool("t", {"region": None})
    fields = server.requests[2].fields
    assert (fields["mcp-param-region"], fields["mcp-param-count"]) == (rat.header_value("Zürich"), "5")
    assert not any(name.startswith("mcp-param") for name in server.requests[3].fields)


def test_a_tool_with_an_invalid_annotation_is_left_out_and_logged(
    client_of: Clients, web_server: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    bad = {"type": "object", "properties": {"x": {"type": "number", "x-mcp-header": "X"}}}
    tools = [{"name": "bad", "inputSchema": bad}, {"name": "good", "inputSchema": SCHEMA}]
    server = web_server(modern(lambda exchange, _: exchange.result({"tools": tools})))
    assert [tool["name"] for tool in client_of(StreamableHttp(server.url)).list_tools()] == ["good"]
    [record] = caplog.records
    assert record.getMessage() == (
        f"the tool bad of MCP server at {server.url} is left out: "
        "X is on an argument that is no string, integer or boolean"
    )


def test_a_legacy_server_is_not_told_of_annotations(client_of: Clients, web_server: Servers) -> None:
    def answer(exchange: Exchange, request: Request) -> None:
        bad = {"type": "object", "properties": {"x": {"type": "number", "x-mcp-header": "X"}}}
        exchange.result({"tools": [{"name": "t", "inputSchema": SCHEMA}, {"name": "bad", "inputSchema": bad}]})

    server = web_server(legacy(answer))
    client = client_of(StreamableHttp(server.url))
    assert len(client.list_tools()) == 2
    client.call_tool("t", {"region": "x"})
    assert not any(name.startswith("mcp-param") or name == "mcp-method" for name in server.requests[-1].fields)


def test_a_header_mismatch_lists_again_and_retries_once(client_of: Clients, web_server: Servers) -> None:
    stubborn = False

    def answer(exchange: Exchange, request: Request) -> None:
        if request.message["method"] == "tools/list":
            exchange.result({"tools": [{"name": "t", "inputSchema": SCHEMA}]})
        elif stubborn or request.fields.get("mcp-param-region") != "here":
            exchange.error(-32020, "Header mismatch")
        else:
            exchange.result(CALLED)

    server = web_server(modern(answer))
    client = client_of(StreamableHttp(server.url))
    assert client.call_tool("t", {"region": "here"}) == CALLED
    assert server.methods() == ["server/discover", "tools/call", "tools/list", "tools/call"]
    stubborn = True
    with pytest.raises(McpError, match=r"Header mismatch \(-32020\)"):
        client.call_tool("t", {"region": "here"})
    assert server.methods()[4:] == ["tools/call", "tools/list", "tools/call"]


@pytest.mark.parametrize("url", ["ftp://a/b", "http://", "/mcp", "http://a:99999/", "http://[::1/", ""])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"^expected an http:// or https:// URL, not "):
        StreamableHttp(url)


@pytest.mark.parametrize("headers", [{"A b": "c"}, {"a": "b\nc"}, {"": "b"}, {"a": "\N{EURO SIGN}"}])
def test_a_header_that_is_none_is_refused_without_telling_its_value(headers: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"cannot be sent: its name or its value is none of HTTP$"):
        StreamableHttp("http://a/", headers)


def test_credentials_are_not_shown() -> None:
    assert "secret" not in repr(StreamableHttp("http://a/", {"Authorization": "secret"}))


def test_parameters_that_are_not_json_are_not_sent(client_of: Clients, web_server: Servers) -> None:
    server = web_server(modern(lambda exchange, _: exchange.result({})))
    client = client_of(StreamableHttp(server.url))
    for arguments in ({"a": float("nan")}, {"a": object()}):
        with pytest.raises(TransportError, match="was not asked: the parameters are not JSON: "):
            client.call_tool("t", arguments)
    assert server.methods() == ["server/discover"]


def test_notifications_are_sent_and_their_refusal_told(client_of: Clients, web_server: Servers) -> None:
    def respond(exchange: Exchange, request: Request) -> None:
        if request.message["method"] == "notifications/good":
            exchange.answer(status=202)
        else:
            exchange.answer(b"why?", 400)

    server = web_server(modern(respond))
    client = client_of(StreamableHttp(server.url))
    client.notify("notifications/good", {"a": 1})
    assert json.loads(server.requests[1].body) == {"jsonrpc": "2.0", "method": "notifications/good", "params": {"a": 1}}
    with pytest.raises(TransportError, match=r"answered HTTP 400: why\?$"):
        client.notify("notifications/bad")


# --- TLS and proxies ---------------------------------------------------------------------------------


def test_https_is_verified_by_what_the_system_trusts(
    client_of: Clients, web_server: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x509 = pytest.importorskip("cryptography.x509", reason="cryptography is not installed here")
    from bundles import END, START, Authority, key_pem, new_key
    from cryptography.hazmat.primitives import hashes, serialization

    authority, key = Authority(), new_key()
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(authority.x509.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(START)
        .not_valid_after(END)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    (tmp_path / "ca.crt").write_bytes(authority.certificate)
    (tmp_path / "server.pem").write_bytes(key_pem(key) + certificate.public_bytes(serialization.Encoding.PEM))
    server = web_server(modern(lambda exchange, _: exchange.result(CALLED)))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    url = f"https://localhost:{server.server_address[1]}/mcp"
    with pytest.raises(TransportError) as caught:
        client_of(StreamableHttp(url)).connect()
    assert str(caught.value).startswith(f"MCP server at {url} failed the TLS handshake: ")
    assert "certificate" in str(caught.value)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.crt"))
    assert client_of(StreamableHttp(url)).call_tool("any") == CALLED
    with pytest.raises(TransportError, match=r"failed the TLS handshake: "):  # the name is verified, too
        client_of(StreamableHttp(url.replace("localhost", "127.0.0.1"))).connect()


def test_a_proxy_of_the_environment_is_passed_through(
    client_of: Clients, web_server: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = web_server(modern(lambda exchange, _: exchange.result(CALLED)))
    monkeypatch.setenv("http_proxy", proxy.origin.replace("://", "://user:p%20w@"))
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    client = client_of(StreamableHttp("http://mcp.invalid:8080/mcp?a=b"))
    assert client.call_tool("any") == CALLED
    assert proxy.requests[0].target == "http://mcp.invalid:8080/mcp?a=b"
    assert proxy.requests[0].fields["proxy-authorization"] == "Basic dXNlcjpwIHc="
    assert proxy.requests[0].fields["host"] == "mcp.invalid:8080"


@pytest.mark.parametrize(
    ("url", "target", "host", "forwarded"),
    [
        (
            "https://mcp.invalid/mcp?resource=https://mcp.invalid/",
            "/mcp?resource=https://mcp.invalid/",
            "mcp.invalid",
            False,
        ),
        ("https://u:p@Mcp.invalid:444/a#b", "/a", "mcp.invalid:444", False),
        ("https://[fd00::1]:443/", "/", "[fd00::1]", False),
        ("https://mcp.invalid/mcp\n", "/mcp", "mcp.invalid", False),
        ("https://b\u00fccher.invalid/\u00e9", "/%C3%A9", "xn--bcher-kva.invalid", False),
        ("https://h.invalid\\@mcp.invalid/x", "/x", "mcp.invalid", False),
        ("http://u:p@mcp.invalid/a?b=http://c/#d", "http://mcp.invalid/a?b=http://c/", "mcp.invalid", True),
    ],
)
def test_what_a_request_names_behind_a_proxy(
    monkeypatch: pytest.MonkeyPatch, url: str, target: str, host: str, forwarded: bool
) -> None:
    """A proxy of plain HTTP is given whole URLs and its credentials; through a tunnel, a server gets neither."""
    for scheme in ("http", "https"):
        monkeypatch.setenv(f"{scheme}_proxy", "http://user:password@proxy.invalid:3128")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    endpoint = _web_endpoint(url)
    assert (endpoint.target, endpoint.host, endpoint.forwarded) == (target, host, forwarded)
    assert endpoint.at(url).target == target


def test_credentials_for_a_proxy_do_not_go_through_its_tunnel(
    client_of: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", "http://user:password@proxy.invalid:3128")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    sent: list[Mapping[str, str]] = []

    def told(pool: rat.Pool, exchange: rat.Exchange, start: str, headers: Mapping[str, str], seconds: float) -> Any:
        assert "Proxy-Authorization" in pool.proxy_headers
        sent.append(headers)
        raise ConnectionRefusedError  # before anything is resolved

    monkeypatch.setattr(rat.Pool, "request_on", told)
    with pytest.raises(TransportError):
        client_of(StreamableHttp("https://mcp.invalid/mcp?resource=https://mcp.invalid/")).connect()
    assert sent
    assert not any("Proxy-Authorization" in headers for headers in sent)


def test_headers_of_the_framing_are_not_the_callers(client_of: Clients, web_server: Servers) -> None:
    server = web_server(modern(lambda exchange, _: exchange.result(CALLED)))
    headers = {"host": "other.invalid", "Content-Length": "3", "Transfer-Encoding": "chunked"}
    assert client_of(StreamableHttp(f"{server.origin}/mcp", headers)).call_tool("any") == CALLED
    request = server.requests[0]
    assert request.fields["host"] == "other.invalid"
    assert request.fields["content-length"] == str(len(request.body))
    assert "transfer-encoding" not in request.fields


def test_a_proxy_that_is_not_there_says_so(client_of: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(TransportError) as caught:
        client_of(StreamableHttp("http://mcp.invalid/")).connect()
    assert str(caught.value) == "the proxy to MCP server at http://mcp.invalid/ is unreachable: connection refused"
