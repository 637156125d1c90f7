"""HTTP with SSE, the transport of 2024-11-05."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

import pytest
from web_server import HANG, Exchange, Request

import ratel.client
from ratel import McpError, Sse, TransportError, UnauthorizedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from web_server import WebServer

    from ratel import McpClient

    Clients = Callable[..., McpClient]
    Servers = Callable[[Callable[[Exchange, Request], None]], WebServer]


class SseServer:
    """A server of that transport; ``answer`` is given each request after the handshake, and returns a message."""

    def __init__(self, answer: Callable[[dict[str, Any]], dict[str, Any] | None], endpoint: str = "/post?id=1") -> None:
        self.answer = answer
        self.endpoint = endpoint
        self.outgoing: queue.Queue[str | None] = queue.Queue()
        self.streams = 0
        self.post_status = 202

    def __call__(self, exchange: Exchange, request: Request) -> None:
        """Take a request."""
        if request.method == "GET":
            self.streams += 1
            self.outgoing = queue.Queue()
            exchange.stream(f"event: endpoint\ndata: {self.endpoint}\n\n", "data:\n\n", ": still here\n\n")
            while (event := self.outgoing.get(timeout=HANG)) is not None:
                exchange.write(event)
            return
        message = request.message
        exchange.answer(b"Accepted", self.post_status, {"Content-Type": "text/plain"})
        if message.get("method") == "initialize":
            value = {"protocolVersion": "2024-11-05", "capabilities": {"tools": {}}, "instructions": "Hi"}
            self.outgoing.put(exchange.message(value))
        elif not str(message.get("method", "")).startswith("notifications/"):
            told = self.answer(message)
            if told is not None:
                self.outgoing.put(exchange.message(told))


CALLED = {"content": []}


def test_it_initializes_at_once_and_posts_to_the_endpoint(client_of: Clients, web_server: Servers) -> None:
    sse = SseServer(lambda message: CALLED)
    server = web_server(sse)
    client = client_of(Sse(f"{server.origin}/sse", headers={"Authorization": "Bearer x"}))
    assert (client.protocol_version, client.instructions) == ("2024-11-05", "Hi")
    assert client.call_tool("any") == CALLED
    assert server.methods() == ["GET", "initialize", "notifications/initialized", "tools/call"]
    assert [request.target for request in server.requests] == ["/sse", *["/post?id=1"] * 3]
    assert {request.fields["authorization"] for request in server.requests} == {"Bearer x"}
    sse.outgoing.put(None)


@pytest.mark.parametrize("form", ["{origin}/messages", "messages", "//{host}/messages"])
def test_an_endpoint_of_the_same_origin_may_be_given_in_any_form(
    client_of: Clients, web_server: Servers, form: str
) -> None:
    sse = SseServer(lambda message: CALLED)
    server = web_server(sse)
    sse.endpoint = form.format(origin=server.origin, host=server.origin.partition("//")[2])
    assert client_of(Sse(f"{server.origin}/sse")).call_tool("any") == CALLED
    assert server.requests[1].target == "/messages"
    sse.outgoing.put(None)


@pytest.mark.parametrize(
    "endpoint", ["http://mcp.invalid/post?token=x", "https://127.0.0.1/post", "//127.0.0.1:1/post"]
)
def test_an_endpoint_of_another_origin_is_refused(client_of: Clients, web_server: Servers, endpoint: str) -> None:
    sse = SseServer(lambda message: CALLED, endpoint)
    server = web_server(sse)
    with pytest.raises(TransportError, match=r"/sse named an endpoint of another origin: https?://[a-z0-9.:]+/post$"):
        client_of(Sse(f"{server.origin}/sse")).connect()
    sse.outgoing.put(None)
    assert server.methods() == ["GET"]


@pytest.mark.parametrize(
    ("status", "said"), [(404, "answered HTTP 404: gone"), (200, "answered no event stream (HTTP 200)")]
)
def test_what_is_no_stream_says_so(client_of: Clients, web_server: Servers, status: int, said: str) -> None:
    server = web_server(lambda exchange, request: exchange.answer(b"gone", status))
    with pytest.raises(TransportError) as caught:
        client_of(Sse(f"{server.origin}/sse")).connect()
    assert str(caught.value) == f"MCP server at {server.origin}/sse {said}"


def test_401_to_the_stream_and_to_a_call(client_of: Clients, web_server: Servers) -> None:
    server = web_server(lambda exchange, request: exchange.answer(status=401))
    with pytest.raises(UnauthorizedError, match=r"answered HTTP 401$"):
        client_of(Sse(f"{server.origin}/sse")).connect()
    sse = SseServer(lambda message: None)
    client = client_of(Sse(f"{web_server(sse).origin}/sse"))
    client.connect()
    sse.post_status = 401
    with pytest.raises(UnauthorizedError, match=r"answered HTTP 401: Accepted$"):
        client.call_tool("any")
    sse.post_status = 500
    with pytest.raises(TransportError, match=r"answered HTTP 500: Accepted$"):
        client.call_tool("any")
    sse.outgoing.put(None)


def test_a_server_that_names_no_endpoint_is_late(
    client_of: Clients, web_server: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ratel.client, "CONNECT_SECONDS", 0.1)

    def respond(exchange: Exchange, request: Request) -> None:
        exchange.stream(": wait\n\n")
        exchange.wait_closed()

    with pytest.raises(TransportError, match=r"named no endpoint in time$"):
        client_of(Sse(f"{web_server(respond).origin}/sse")).connect()


def test_the_loss_of_the_stream_fails_the_calls_pending_and_the_next_call_opens_another(
    client_of: Clients, web_server: Servers
) -> None:
    lost = False

    def answer(message: dict[str, Any]) -> dict[str, Any] | None:
        nonlocal lost
        if not lost:
            lost = True
            sse.outgoing.put(None)
            return None
        return CALLED

    sse = SseServer(answer)
    server = web_server(sse)
    client = client_of(Sse(f"{server.origin}/sse"))
    with pytest.raises(TransportError, match=r"/sse ended its stream$"):
        client.call_tool("any")
    assert client.call_tool("any") == CALLED
    assert sse.streams == 2
    assert server.methods().count("tools/call") == 2
    sse.outgoing.put(None)


def test_a_late_call_is_canceled(client_of: Clients, web_server: Servers) -> None:
    sse = SseServer(lambda message: None)
    server = web_server(sse)
    client = client_of(Sse(f"{server.origin}/sse"))
    client.connect()
    with pytest.raises(TransportError, match=r"did not answer within 0\.1s$"):
        client.call_tool("any", timeout=0.1)
    call = server.wait_for(lambda request: request.message.get("method") == "tools/call")
    canceled = server.wait_for(lambda request: request.message.get("method") == "notifications/cancelled")
    assert canceled.message["params"] == {"requestId": call.message["id"], "reason": "timed out"}
    sse.outgoing.put(None)


def test_requests_of_the_server_are_answered(client_of: Clients, web_server: Servers) -> None:
    called: list[Any] = []

    def answer(message: dict[str, Any]) -> dict[str, Any] | None:
        if "method" not in message:
            return {"jsonrpc": "2.0", "id": called[0], "result": {"got": message}}
        called.append(message["id"])
        return {"jsonrpc": "2.0", "id": 77, "method": "ping"}

    sse = SseServer(answer)
    client = client_of(Sse(f"{web_server(sse).origin}/sse"))
    assert client.call_tool("any") == {"got": {"jsonrpc": "2.0", "id": 77, "result": {}}}
    sse.outgoing.put(None)


def test_errors_come_as_they_were_sent(client_of: Clients, web_server: Servers) -> None:
    sse = SseServer(lambda message: {"jsonrpc": "2.0", "id": message["id"], "error": {"code": 5, "message": "no"}})
    with pytest.raises(McpError, match=r"^no \(5\)$"):
        client_of(Sse(f"{web_server(sse).origin}/sse")).call_tool("any")
    sse.outgoing.put(None)


def test_close_fails_the_calls_in_flight(client_of: Clients, web_server: Servers) -> None:
    began = threading.Event()
    sse = SseServer(lambda message: began.set())
    server = web_server(sse)
    client = client_of(Sse(f"{server.origin}/sse"))
    client.connect()
    failed = []

    def call() -> None:
        try:
            client.call_tool("any")
        except TransportError as e:
            failed.append(str(e))

    thread = threading.Thread(target=call)
    thread.start()
    assert began.wait(HANG)
    client.close()
    thread.join(HANG)
    assert failed == [f"MCP server at {server.origin}/sse was closed"]
    sse.outgoing.put(None)
