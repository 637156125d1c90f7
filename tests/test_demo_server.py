"""demo_ratd: what it says over HTTP and MCP, and that it ends whole."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import socket
import ssl
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from bundles import Bundle
from fault_server import HANG
from harness import ROOT, rat_environment

import demo_ratd
import rat
from demo_ratd import Call, DemoRatd, DemoTool, ToolError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ACCEPT = "application/json, text/event-stream"
FIELDS = {"Content-Type": "application/json", "Accept": ACCEPT}
META = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "io.modelcontextprotocol/clientCapabilities": {}}
SERVER_INFO = {"name": "demo_ratd", "version": rat.__version__}
INSTRUCTIONS = "A server for demonstrations: the files of one directory, for tenant acme. Your session is laptop."


class Answer(NamedTuple):
    """A response as a client reads it."""

    status: int
    fields: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> object:
        """The body, which must be JSON declared as such."""
        assert self.fields["Content-Type"] == "application/json"
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, object]:
        """The JSON-RPC error of the body."""
        message = self.json
        assert isinstance(message, dict)
        assert set(message) == {"jsonrpc", "id", "error"}
        error = message["error"]
        assert isinstance(error, dict)
        return error


class Client:
    """One connection to the server, with the certificate of the client laptop."""

    def __init__(self, server: DemoRatd, context: ssl.SSLContext) -> None:
        host, _, port = server.address.rpartition(":")
        self.connection = http.client.HTTPSConnection(host, int(port), timeout=HANG, context=context)
        self.connection.connect()
        self.socket = self.connection.sock

    def send(
        self, body: bytes, fields: Mapping[str, str] | None = None, method: str = "POST", target: str = "/mcp"
    ) -> Answer:
        """A request and its answer."""
        self.connection.request(method, target, body, dict(FIELDS if fields is None else fields))
        return self.read(method)

    def read(self, method: str = "POST") -> Answer:
        """The next answer on the connection."""
        response = http.client.HTTPResponse(self.socket, method=method)
        # As http.client would: its own getresponse() closes what is not read by it.
        response.begin()
        answer = Answer(response.status, response.msg, response.read())
        with contextlib.suppress(AttributeError):
            self.connection._HTTPConnection__state = "Idle"  # type: ignore[attr-defined]
        return answer

    def post(self, message: object, fields: Mapping[str, str] | None = None) -> Answer:
        """A message and its answer; `fields` are added to those every message has."""
        return self.send(json.dumps(message).encode(), {**FIELDS, **(fields or {})})

    def call(self, method: str, params: object = None, identifier: object = 1) -> Answer:
        """A request of a negotiated version."""
        return self.post(request(method, params, identifier))

    def tool(self, name: str, **arguments: object) -> tuple[str, bool]:
        """The text of a tool's result, and whether it is an error."""
        answer = self.call("tools/call", {"name": name, "arguments": arguments})
        assert answer.status == 200
        message = answer.json
        assert isinstance(message, dict)
        content = message["result"]["content"]
        assert [part["type"] for part in content] == ["text"]
        return content[0]["text"], message["result"]["isError"]

    def carried(
        self, method: str, params: Mapping[str, object] | None = None, fields: Mapping[str, str | None] | None = None
    ) -> Answer:
        """A request of 2026-07-28; `fields` replaces its HTTP fields, None leaves one out."""
        sent: dict[str, str | None] = {"Mcp-Protocol-Version": "2026-07-28", "Mcp-Method": method}
        if params is not None and isinstance(params.get("name"), str):
            sent["Mcp-Name"] = str(params["name"])
        sent.update(fields or {})
        whole = {"_meta": META, **(params or {})}
        given = {name: value for name, value in sent.items() if value is not None}
        return self.post(request(method, whole), given)


def request(method: object, params: object = None, identifier: object = 1) -> dict[str, object]:
    """A JSON-RPC request."""
    message = {"jsonrpc": "2.0", "id": identifier, "method": method}
    return message if params is None else {**message, "params": params}


@pytest.fixture(scope="session")
def client_context(client_side: Path) -> ssl.SSLContext:
    """TLS as rat has it, with the certificate of the client laptop."""
    return rat.tls_context(rat.load_side(str(client_side)))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The directory the server has."""
    directory = tmp_path / "files"
    directory.mkdir()
    return directory


@pytest.fixture
def server(server_side: Path, files: Path) -> Iterator[DemoRatd]:
    """A server of the bundle that keeps bodies."""
    with DemoRatd(rat.load_side(str(server_side), "server"), files, keep_bodies=True) as running:
        yield running


@pytest.fixture
def client(server: DemoRatd, client_context: ssl.SSLContext) -> Iterator[Client]:
    """One connection to the server."""
    connected = Client(server, client_context)
    yield connected
    connected.socket.close()


# --- TLS ------------------------------------------------------------------------------------------


def alert_of(server: DemoRatd, context: ssl.SSLContext) -> str:
    """What a client that should be refused is told."""
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), HANG) as plain:
        try:
            context.wrap_socket(plain).recv(1)
        except ssl.SSLError as error:
            return error.reason or ""
    raise AssertionError("not refused")


def test_a_client_of_another_bundle_is_refused_with_an_alert(server: DemoRatd, other_bundle: Bundle) -> None:
    context = rat.tls_context(rat.load_side(str(other_bundle.client)))
    context.verify_mode = ssl.CERT_NONE
    assert alert_of(server, context) == "TLSV1_ALERT_UNKNOWN_CA"
    assert server.wait_until(lambda s: s.refused == ["CERTIFICATE_VERIFY_FAILED"])
    assert server.requests == []


def test_a_client_without_a_certificate_is_refused(server: DemoRatd) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    assert alert_of(server, context) == "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    assert server.wait_until(lambda s: s.refused == ["PEER_DID_NOT_RETURN_A_CERTIFICATE"])


def test_an_older_tls_is_refused(server: DemoRatd, client_side: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(client_side / "client.crt", client_side / "client.key")
    assert alert_of(server, context) == "TLSV1_ALERT_PROTOCOL_VERSION"


def test_plain_http_is_refused_and_the_next_client_served(server: DemoRatd, client_context: ssl.SSLContext) -> None:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), HANG) as plain:
        plain.sendall(b"GET /mcp HTTP/1.1\r\nHost: x\r\n\r\n")
        while plain.recv(4096):
            pass
    assert server.wait_until(lambda s: s.refused == ["HTTP_REQUEST"])
    client = Client(server, client_context)
    assert client.call("ping").status == 200
    client.socket.close()


# --- HTTP -----------------------------------------------------------------------------------------

PING = json.dumps(request("ping")).encode()
PONG = {"jsonrpc": "2.0", "id": 1, "result": {}}


def test_many_requests_use_one_connection(server: DemoRatd, client: Client) -> None:
    for identifier in range(5):
        assert client.call("ping", identifier=identifier).json == {**PONG, "id": identifier}
    assert [(r.connection, r.session, r.method, r.target) for r in server.requests] == [
        (1, "laptop", "POST", "/mcp")
    ] * 5
    assert server.connections == 1


@pytest.mark.parametrize(
    ("method", "target", "fields", "status", "text"),
    [
        ("GET", "/mcp", FIELDS, 405, "only POST is answered\n"),
        ("DELETE", "/mcp?x=1", FIELDS, 405, "only POST is answered\n"),
        ("HEAD", "/mcp", FIELDS, 405, ""),
        ("POST", "/", FIELDS, 404, "only /mcp is here\n"),
        ("GET", "/mcp/", FIELDS, 404, "only /mcp is here\n"),
        ("POST", "https://somewhere/other", FIELDS, 404, "only /mcp is here\n"),
        ("POST", "/mcp", {"Accept": ACCEPT}, 415, "the message must be application/json\n"),
        (
            "POST",
            "/mcp",
            {"Content-Type": "application/json", "Accept": "text/event-stream"},
            406,
            "application/json must be accepted\n",
        ),
        (
            "POST",
            "/mcp",
            {"Content-Type": "application/json", "Accept": "application/json"},
            406,
            "text/event-stream must be accepted\n",
        ),
    ],
)
def test_what_is_no_post_of_a_message_gets_its_status_and_the_connection_stays(
    client: Client, method: str, target: str, fields: dict[str, str], status: int, text: str
) -> None:
    answer = client.send(PING, fields, method, target)
    assert (answer.status, answer.body.decode()) == (status, text)
    assert answer.fields["Allow"] == ("POST" if status == 405 else None)
    assert client.call("ping").json == PONG


@pytest.mark.parametrize(
    ("target", "fields"),
    [
        ("/mcp?session=1", FIELDS),
        ("https://127.0.0.1/mcp", FIELDS),
        ("/mcp", {"Content-Type": "application/json; charset=utf-8", "Accept": "*/*"}),
        ("/mcp", {"content-type": "Application/JSON", "accept": "text/*;q=0.5, application/*"}),
    ],
)
def test_what_http_calls_the_same_is_the_same(client: Client, target: str, fields: dict[str, str]) -> None:
    assert client.send(PING, fields, target=target).json == PONG


HEAD = f"POST /mcp HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAccept: {ACCEPT}\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        f"\r\n\r\n{HEAD}Content-Length: {len(PING)}\r\n\r\n".encode() + PING,
        f"{HEAD}Content-Length: {len(PING)}\r\nContent-Length: {len(PING)}\r\n\r\n".encode() + PING,
        f"{HEAD}Transfer-Encoding: chunked\r\n\r\n5\r\n".encode()
        + PING[:5]
        + f"\r\n{len(PING) - 5:X};note=x\r\n".encode()
        + PING[5:]
        + b"\r\n0\r\nTrailer: x\r\n\r\n",
    ],
    ids=["empty lines before", "length twice", "chunked"],
)
def test_a_request_is_read_however_it_is_split(client: Client, sent: bytes) -> None:
    client.socket.sendall(sent + sent)
    assert client.read().json == PONG
    assert client.read().json == PONG
    for position in range(len(sent)):
        client.socket.sendall(sent[position : position + 1])
    assert client.read().json == PONG


def test_a_client_that_asks_is_told_to_continue(client: Client) -> None:
    client.socket.sendall(f"{HEAD}Expect: 100-continue\r\nContent-Length: {len(PING)}\r\n\r\n".encode())
    assert client.socket.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.socket.sendall(PING)
    assert client.read().json == PONG


@pytest.mark.parametrize(
    ("sent", "keeps"),
    [
        (HEAD.replace("1.1", "1.0"), False),
        (HEAD.replace("1.1", "1.0") + "Connection: Keep-Alive\r\n", True),
        (HEAD + "Connection: x, Close\r\n", False),
        (HEAD, True),
    ],
)
def test_the_connection_stays_as_long_as_the_client_wants(client: Client, sent: str, keeps: bool) -> None:
    client.socket.sendall(f"{sent}Content-Length: {len(PING)}\r\n\r\n".encode() + PING)
    answer = client.read()
    assert answer.json == PONG
    assert answer.fields["Connection"] == (None if keeps else "close")
    if not keeps:
        assert client.socket.recv(1) == b""
    else:
        assert client.call("ping").json == PONG


@pytest.mark.parametrize(
    ("sent", "status", "text"),
    [
        ("POST /mcp\r\n\r\n", 400, "the request line is not one of HTTP/1.1"),
        ("P(ST /mcp HTTP/1.1\r\n\r\n", 400, "the request line is not one of HTTP/1.1"),
        ("POST  HTTP/1.1\r\n\r\n", 400, "the request line is not one of HTTP/1.1"),
        ("POST /mcp HTTP/2.0\r\n\r\n", 505, "only HTTP/1.1 is spoken here"),
        ("POST /mcp HTTP/1.1\r\n\r\n", 400, "there must be one Host field"),
        (HEAD + "Host: y\r\n\r\n", 400, "there must be one Host field"),
        (HEAD + "No colon\r\n\r\n", 400, "a field is not of the form NAME: VALUE"),
        (HEAD + "Space : x\r\n\r\n", 400, "a field is not of the form NAME: VALUE"),
        (HEAD + "X: a\r\n folded\r\n\r\n", 400, "a field is not of the form NAME: VALUE"),
        (HEAD + "X: a\nY: b\r\n\r\n", 400, "the head of the request holds a control character"),
        (HEAD + "X: a\0b\r\n\r\n", 400, "the head of the request holds a control character"),
        (HEAD + "Content-Length: -1\r\n\r\n", 400, "Content-Length is not a length"),
        (HEAD + "Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "Content-Length is not a length"),
        (
            HEAD + "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            400,
            "Content-Length and Transfer-Encoding contradict each other",
        ),
        (HEAD + "Transfer-Encoding: gzip, chunked\r\n\r\n", 501, "only the chunked transfer coding is spoken here"),
        (HEAD + "Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, "a chunk has no size"),
        (HEAD + "Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n", 400, "a chunk is longer than its size"),
        (HEAD + f"Content-Length: {2**24 + 1}\r\n\r\n", 413, "the message is over 16 MiB"),
        (HEAD + "Transfer-Encoding: chunked\r\n\r\n1000001\r\n", 413, "the message is over 16 MiB"),
        ("X" * 70_000, 431, "the head of the request is over 64 KiB"),
    ],
)
def test_what_is_not_http_is_told_so_and_ends_the_connection(
    server: DemoRatd, client: Client, sent: str, status: int, text: str
) -> None:
    client.socket.sendall(sent.encode())
    answer = client.read()
    assert (answer.status, answer.body.decode()) == (status, text + "\n")
    assert answer.fields["Connection"] == "close"
    assert client.socket.recv(1) == b""
    assert server.requests == []


def test_a_message_of_16_mib_is_read_and_answered(client: Client) -> None:
    message = request("ping", {"x": ""})
    message["params"] = {"x": "x" * (2**24 - len(json.dumps(message)))}
    body = json.dumps(message).encode()
    assert len(body) == 2**24
    assert client.send(body).json == PONG


def test_an_idle_connection_is_closed_and_a_stalled_request_told(
    server: DemoRatd, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is what cannot be had: the limits are made short."""
    assert (demo_ratd.IDLE_SECONDS, demo_ratd.STALL_SECONDS) == (120, 30)
    monkeypatch.setattr(demo_ratd, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(demo_ratd, "STALL_SECONDS", 0.05)
    assert client.call("ping").json == PONG  # ends the wait that began before
    assert client.socket.recv(1) == b""
    assert server.wait_until(lambda s: s.connections == 0)


def test_a_stalled_request_is_told_so(
    server: DemoRatd, client_context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_ratd, "STALL_SECONDS", 0.05)
    client = Client(server, client_context)
    client.socket.sendall(b"POST /mcp")
    assert client.read().body == b"the request did not arrive\n"
    client.socket.close()


# --- versions that are negotiated -----------------------------------------------------------------

INITIALIZE = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("2025-11-25", "2025-11-25"),
        ("2025-06-18", "2025-06-18"),
        ("2025-03-26", "2025-03-26"),
        ("2024-11-05", "2024-11-05"),
        ("2026-07-28", "2025-11-25"),
        ("1.0", "2025-11-25"),
    ],
)
def test_initialize_answers_the_version_asked_or_its_newest(client: Client, asked: str, given: str) -> None:
    answer = client.call("initialize", {**INITIALIZE, "protocolVersion": asked})
    assert (answer.status, answer.json) == (
        200,
        {
            "jsonrpc": "2.0",
            "id": 1,
            "result": {
                "protocolVersion": given,
                "capabilities": {"tools": {}},
                "serverInfo": SERVER_INFO,
                "instructions": INSTRUCTIONS,
            },
        },
    )


@pytest.mark.parametrize("version", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"])
def test_any_negotiated_version_is_served_without_a_session(client: Client, version: str) -> None:
    answer = client.post(request("tools/list"), {"Mcp-Protocol-Version": version})
    message = answer.json
    assert isinstance(message, dict)
    assert list(message["result"]) == ["tools"]
    assert [tool["name"] for tool in message["result"]["tools"]] == ["read_file", "write_file", "wait"]


@pytest.mark.parametrize(
    ("method", "params", "code", "text"),
    [
        ("initialize", None, -32602, "params.protocolVersion: not a string"),
        ("initialize", {**INITIALIZE, "capabilities": 1}, -32602, "params.capabilities: not an object"),
        (
            "initialize",
            {**INITIALIZE, "clientInfo": {"name": "x"}},
            -32602,
            "params.clientInfo: not an object with a name and a version",
        ),
        ("ping", [1], -32602, "params: not an object"),
        ("tools/list", {"cursor": "x"}, -32602, "params.cursor: there is one page only"),
        ("tools/call", {}, -32602, "params.name: not a string"),
        ("tools/call", {"name": "nothing"}, -32602, "Unknown tool: nothing"),
        ("tools/call", {"name": "wait", "arguments": [1]}, -32602, "params.arguments: not an object"),
        ("resources/list", {}, -32601, "no method resources/list"),
        ("server/discover", {}, -32601, "no method server/discover"),
    ],
)
def test_a_request_that_cannot_be_served_is_an_error_under_200(
    client: Client, method: str, params: object, code: int, text: str
) -> None:
    answer = client.call(method, params, "x")
    assert answer.status == 200
    assert answer.json == {"jsonrpc": "2.0", "id": "x", "error": {"code": code, "message": text}}


@pytest.mark.parametrize(
    ("body", "code", "text"),
    [
        (b"", -32700, "the body is not JSON"),
        (b"{", -32700, "the body is not JSON"),
        (b'{"x": NaN}', -32700, "the body is not JSON"),
        (b"\xff", -32700, "the body is not JSON"),
        (b"\xef\xbb\xbf{}", -32700, "the body is not JSON"),
        (b"[" * 200_000, -32700, "the body is not JSON"),
        (b"5", -32600, "the body is not a message"),
        (b"[]", -32600, "the batch is empty"),
        (b"{}", -32600, 'jsonrpc is not "2.0"'),
        (b'{"jsonrpc": "2.0"}', -32600, "method: not a string"),
        (b'{"jsonrpc": "2.0", "id": 1, "method": 5}', -32600, "method: not a string"),
        (b'{"jsonrpc": "2.0", "id": null, "method": "ping"}', -32600, "id: neither a string nor a number"),
        (b'{"jsonrpc": "2.0", "id": true, "method": "ping"}', -32600, "id: neither a string nor a number"),
        (b'{"jsonrpc": "2.0", "id": 1e999, "method": "ping"}', -32600, "id: neither a string nor a number"),
    ],
)
def test_what_is_no_message_is_an_error_under_400(client: Client, body: bytes, code: int, text: str) -> None:
    answer = client.send(body)
    assert answer.status == 400
    assert answer.json == {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": text}}
    assert client.call("ping").json == PONG


@pytest.mark.parametrize(
    "message",
    [
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}},
        {"jsonrpc": "2.0", "id": 1, "result": {}},
        {"jsonrpc": "2.0", "id": None, "error": {"code": 1, "message": "x"}},
        [{"jsonrpc": "2.0", "method": "notifications/initialized"}],
    ],
)
@pytest.mark.parametrize("version", [None, "2025-03-26", "2026-07-28"])
def test_notifications_and_responses_are_accepted_without_a_body(
    client: Client, message: object, version: str | None
) -> None:
    if isinstance(message, list) and version == "2026-07-28":
        version = None
    answer = client.post(message, {} if version is None else {"Mcp-Protocol-Version": version})
    assert (answer.status, answer.body, answer.fields["Content-Type"]) == (202, b"", None)
    assert answer.fields["Content-Length"] == "0"


@pytest.mark.parametrize("identifier", ["", "1", 0, -7, 1.5, 2**70, "\ud800"])
def test_an_identifier_comes_back_as_it_was(client: Client, identifier: object) -> None:
    assert client.call("ping", identifier=identifier).json == {**PONG, "id": identifier}


def test_a_batch_of_2025_03_26_is_answered_as_one(client: Client) -> None:
    batch = [
        request("ping", None, 1),
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        request("nothing", None, "2"),
        5,
        {"jsonrpc": "2.0", "id": 9, "result": {}},
    ]
    answered = [
        PONG,
        {"jsonrpc": "2.0", "id": "2", "error": {"code": -32601, "message": "no method nothing"}},
        {"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": "a member of the batch is not a message"}},
    ]
    for fields in ({}, {"Mcp-Protocol-Version": "2025-03-26"}):
        answer = client.post(batch, fields)
        assert (answer.status, answer.json) == (200, answered)
    for version in ("2025-06-18", "2026-07-28"):
        answer = client.post(batch, {"Mcp-Protocol-Version": version})
        assert answer.status == 400
        assert answer.error == {"code": -32600, "message": "only 2025-03-26 has batches"}


# --- 2026-07-28 -----------------------------------------------------------------------------------


def test_discover_tells_what_the_server_is(client: Client) -> None:
    answer = client.carried("server/discover")
    assert answer.status == 200
    message = answer.json
    assert isinstance(message, dict)
    assert message["result"] == {
        "supportedVersions": ["2026-07-28"],
        "capabilities": {"tools": {}},
        "instructions": INSTRUCTIONS,
        "ttlMs": 0,
        "cacheScope": "private",
        "resultType": "complete",
        "_meta": {"io.modelcontextprotocol/serverInfo": SERVER_INFO},
    }


def test_a_call_has_the_type_of_its_result_and_a_list_may_not_be_cached(client: Client, files: Path) -> None:
    (files / "a").write_text("hello")
    stamp = {"io.modelcontextprotocol/serverInfo": SERVER_INFO}
    called = client.carried("tools/call", {"name": "read_file", "arguments": {"path": "a"}}).json
    assert called == {
        "jsonrpc": "2.0",
        "id": 1,
        "result": {
            "content": [{"type": "text", "text": "hello"}],
            "isError": False,
            "resultType": "complete",
            "_meta": stamp,
        },
    }
    listed = client.carried("tools/list").json
    assert isinstance(listed, dict)
    assert len(listed["result"].pop("tools")) == 3
    assert listed["result"] == {"ttlMs": 0, "cacheScope": "private", "resultType": "complete", "_meta": stamp}


CALL = {"name": "wait", "arguments": {"seconds": 0}}


@pytest.mark.parametrize(
    ("params", "fields", "text"),
    [
        (CALL, {"Mcp-Protocol-Version": None}, "Mcp-Protocol-Version differs from params._meta"),
        (CALL, {"Mcp-Protocol-Version": "2025-11-25"}, "Mcp-Protocol-Version differs from params._meta"),
        (CALL, {"Mcp-Protocol-Version": "2027-01-01"}, "Mcp-Protocol-Version differs from params._meta"),
        (CALL, {"Mcp-Method": None}, "Mcp-Method differs from the method"),
        (CALL, {"Mcp-Method": "tools/list"}, "Mcp-Method differs from the method"),
        (CALL, {"Mcp-Name": None}, "Mcp-Name differs from params.name"),
        (CALL, {"Mcp-Name": "Wait"}, "Mcp-Name differs from params.name"),
        (CALL, {"Mcp-Name": "=?base64?d2FpdA?="}, "Mcp-Name differs from params.name"),
        (CALL, {"Mcp-Name": "=?base64?/w==?="}, "Mcp-Name differs from params.name"),
        (
            {**CALL, "_meta": {**META, "io.modelcontextprotocol/protocolVersion": 5}},
            {},
            "Mcp-Protocol-Version differs from params._meta",
        ),
    ],
)
def test_a_field_that_differs_from_the_body_is_an_error_under_400(
    client: Client, params: dict[str, object], fields: dict[str, str | None], text: str
) -> None:
    answer = client.carried("tools/call", params, fields)
    assert answer.status == 400
    assert answer.json == {"jsonrpc": "2.0", "id": 1, "error": {"code": -32020, "message": text}}


@pytest.mark.parametrize("name", ["Mcp-Protocol-Version", "mcp-method", "MCP-NAME"])
def test_a_field_there_twice_is_an_error_under_400(client: Client, name: str) -> None:
    values = {"mcp-protocol-version": "2026-07-28", "mcp-method": "tools/call", "mcp-name": "wait"}
    lines = "".join(f"{field}: {value}\r\n" for field, value in values.items())
    lines += f"{name}: {values[name.lower()]}\r\n"
    body = json.dumps(request("tools/call", {**CALL, "_meta": META})).encode()
    client.socket.sendall(f"{HEAD}{lines}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = client.read()
    assert answer.status == 400
    proper = "-".join(part.capitalize() for part in name.split("-"))
    assert answer.error == {"code": -32020, "message": f"{proper} is there more than once"}


def test_a_name_encoded_is_the_name(client: Client) -> None:
    encoded = base64.b64encode(b"wait").decode()
    answer = client.carried("tools/call", CALL, {"Mcp-Name": f"=?base64?{encoded}?="})
    assert answer.status == 200


def test_a_version_of_the_future_is_told_the_one_served(client: Client) -> None:
    meta = {**META, "io.modelcontextprotocol/protocolVersion": "2027-01-01"}
    answer = client.carried("tools/list", {"_meta": meta}, {"Mcp-Protocol-Version": "2027-01-01"})
    assert answer.status == 400
    assert answer.error == {
        "code": -32022,
        "message": "Unsupported protocol version",
        "data": {"supported": ["2026-07-28"], "requested": "2027-01-01"},
    }
    notified = client.post({"jsonrpc": "2.0", "method": "notifications/x"}, {"Mcp-Protocol-Version": "2027-01-01"})
    assert notified.status == 400
    assert notified.error["code"] == -32022


VERSION_KEY, CAPABILITIES_KEY = META


@pytest.mark.parametrize(
    ("method", "params", "status", "code", "text"),
    [
        ("tools/list", {"_meta": {}}, 400, -32602, f"params._meta lacks {VERSION_KEY} and {CAPABILITIES_KEY}"),
        ("tools/list", {"_meta": {VERSION_KEY: "2026-07-28"}}, 400, -32602, f"params._meta lacks {CAPABILITIES_KEY}"),
        (
            "tools/list",
            {"_meta": {**META, CAPABILITIES_KEY: []}},
            400,
            -32602,
            f"params._meta.{CAPABILITIES_KEY}: not an object",
        ),
        (
            "tools/list",
            {"_meta": {**META, "io.modelcontextprotocol/clientInfo": {"name": "x"}}},
            400,
            -32602,
            "params._meta.io.modelcontextprotocol/clientInfo: not an object with a name and a version",
        ),
        ("tools/call", {"name": 5}, 400, -32602, "params.name: not a string"),
        ("tools/call", {"name": "nothing"}, 400, -32602, "Unknown tool: nothing"),
        ("initialize", INITIALIZE, 404, -32601, "no method initialize"),
        ("ping", {}, 404, -32601, "no method ping"),
    ],
)
def test_a_request_that_cannot_be_served_has_the_status_of_its_error(
    client: Client, method: str, params: dict[str, object], status: int, code: int, text: str
) -> None:
    answer = client.carried(method, params)
    assert (answer.status, answer.error) == (status, {"code": code, "message": text})


ANNOTATED = {
    "type": "object",
    "properties": {
        "where": {"type": "string", "x-mcp-header": "Region"},
        "count": {"type": "integer", "x-mcp-header": "Count"},
        "deep": {"type": "object", "properties": {"sure": {"type": "boolean", "x-mcp-header": "Sure"}}},
        "one": {"type": "string", "x-mcp-header": "Same"},
        "other": {"type": "string", "x-mcp-header": "same"},
        "bad": {"type": "string", "x-mcp-header": "a b"},
        "fraction": {"type": "number", "x-mcp-header": "Fraction"},
    },
}


@pytest.mark.parametrize(
    ("arguments", "fields", "wrong"),
    [
        ({}, {}, None),
        ({"where": "eu"}, {"Mcp-Param-Region": "eu"}, None),
        ({"where": "ü\n"}, {"mcp-param-region": "=?base64?w7wK?="}, None),
        ({"where": "eu"}, {}, "Region differs from the argument where"),
        ({"where": "eu"}, {"Mcp-Param-Region": "us"}, "Region differs from the argument where"),
        ({}, {"Mcp-Param-Region": "eu"}, "Region differs from the argument where"),
        ({"where": None}, {}, None),
        ({}, {"Mcp-Param-Region": "=?base64?!?="}, "Region differs from the argument where"),
        ({"count": 5.0}, {"Mcp-Param-Count": "5"}, None),
        ({"count": 5}, {"Mcp-Param-Count": "5.0"}, "Count differs from the argument count"),
        ({"count": 2**53}, {}, None),
        ({"count": 1.5}, {}, None),
        ({"count": True}, {}, None),
        ({"deep": {"sure": False}}, {"Mcp-Param-Sure": "false"}, None),
        ({"deep": {"sure": True}}, {}, "Sure differs from the argument deep.sure"),
        ({"deep": 5}, {}, None),
        ({"one": "x", "other": "y", "bad": "z", "fraction": 1}, {}, None),
    ],
)
def test_annotated_arguments_and_their_fields_agree(
    server_side: Path,
    files: Path,
    client_context: ssl.SSLContext,
    arguments: dict[str, object],
    fields: dict[str, str],
    wrong: str | None,
) -> None:
    called: list[object] = []

    def run(arguments: Mapping[str, object], call: Call) -> str:
        called.append(arguments)
        return call.session

    # Types of arguments are not what is tried here.
    tool = DemoTool("t", "", {"properties": ANNOTATED["properties"]}, run)
    with DemoRatd(rat.load_side(str(server_side), "server"), files, tools=[tool]) as server:
        client = Client(server, client_context)
        answer = client.carried("tools/call", {"name": "t", "arguments": arguments}, fields)
        client.socket.close()
    if wrong is not None:
        assert answer.status == 400
        assert answer.error == {"code": -32020, "message": f"Mcp-Param-{wrong}"}
        assert called == []
    else:
        assert answer.status == 200, answer.body


# --- tools ----------------------------------------------------------------------------------------


def test_the_schemas_of_the_file_tools_are_those_of_ratd(client: Client) -> None:
    message = client.call("tools/list").json
    assert isinstance(message, dict)
    schemas = {tool["name"]: tool["inputSchema"] for tool in message["result"]["tools"]}
    for name in ("read_file", "write_file"):
        assert schemas[name] == json.loads((ROOT / "schemas" / f"{name}.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "one\ntwo\nthree"),
        ({"start_line": 2}, "two\nthree"),
        ({"start_line": 2.0, "max_lines": 1}, "two\n"),
        ({"max_lines": 0}, ""),
        ({"start_line": 9}, ""),
        ({"start_line": 2, "line_numbers": True}, "2\ttwo\n3\tthree"),
    ],
)
def test_a_file_is_read_whole_or_by_lines(client: Client, files: Path, arguments: dict[str, object], text: str) -> None:
    (files / "in").mkdir()
    (files / "in" / "é.txt").write_bytes(b"one\ntwo\nthree")
    assert client.tool("read_file", path="in/é.txt", **arguments) == (text, False)
    assert client.tool("read_file", path="./in//é.txt", **arguments) == (text, False)


def test_lines_end_at_line_feeds_alone(client: Client, files: Path) -> None:
    (files / "a").write_bytes("one\u2028still\x0b\x0cone\r\n\ntwo\rstill two".encode())
    assert client.tool("read_file", path="a", line_numbers=True) == (
        "1\tone\u2028still\x0b\x0cone\r\n2\t\n3\ttwo\rstill two",
        False,
    )


def test_a_file_is_written_and_replaced(client: Client, files: Path) -> None:
    assert client.tool("write_file", path="a", content="one\r\né") == ("a: 7 bytes written", False)
    assert (files / "a").read_bytes() == "one\r\né".encode()
    (files / "a").chmod(0o640)
    assert client.tool("write_file", path="a", content="") == ("a: 0 bytes written", False)
    assert (files / "a").read_bytes() == b""
    if os.name != "nt":
        assert stat.S_IMODE((files / "a").stat().st_mode) == 0o640
    assert os.listdir(files) == ["a"]


@pytest.mark.parametrize("tool", ["read_file", "write_file"])
@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("../outside", "../outside: not inside the directory of this server"),
        ("in/../../outside", "in/../../outside: not inside the directory of this server"),
        ("in/../a", "in/../a: not inside the directory of this server"),
        ("/etc/passwd", "/etc/passwd: not inside the directory of this server"),
        ("", ": not inside the directory of this server"),
        (".", ".: not inside the directory of this server"),
        ("a\0b", "a\0b: not a path"),
        ("\ud800", "\ud800: not a path"),
        ("nowhere/a", "nowhere/a: no such file or directory"),
        ("in", "in: is a directory"),
        ("a/b", "a/b: not a directory"),
        ("x" * 300, f"{'x' * 300}: file name too long"),
        ("link", "link: symbolic links are not followed"),
        ("loop", "loop: symbolic links are not followed"),
        ("away/outside", "away/outside: not a directory"),
        ("pipe", "pipe: not a file"),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="the paths and words of POSIX")
def test_no_path_leads_out_of_the_directory(client: Client, files: Path, tool: str, path: str, text: str) -> None:
    outside = files.parent / "outside"
    outside.write_text("outside")
    (files / "a").write_text("a")
    (files / "in").mkdir()
    (files / "link").symlink_to(outside)
    (files / "loop").symlink_to("loop")
    (files / "away").symlink_to(files.parent)
    os.mkfifo(files / "pipe")
    arguments = {"path": path}
    if tool == "write_file":
        arguments["content"] = "changed"
        if path in ("in", "link", "loop"):
            text = f"{path}: not a file"
    assert client.tool(tool, **arguments) == (text, True)
    assert outside.read_text() == "outside"
    assert sorted(os.listdir(files)) == ["a", "away", "in", "link", "loop", "pipe"]


def test_a_write_that_fails_leaves_the_file_as_it_was(
    client: Client, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is what cannot be had."""
    (files / "a").write_text("before")

    def refuse(*arguments: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    assert client.tool("write_file", path="a", content="after") == ("a: no space left on device", True)
    assert os.listdir(files) == ["a"]
    assert (files / "a").read_text() == "before"


@pytest.mark.parametrize(("content", "text"), [(b"\xff", "a: not UTF-8 text"), (b"x" * (2**24 + 1), "a: over 16 MiB")])
def test_what_is_no_text_is_not_read(client: Client, files: Path, content: bytes, text: str) -> None:
    (files / "a").write_bytes(content)
    assert client.tool("read_file", path="a") == (text, True)


@pytest.mark.parametrize(
    ("tool", "arguments", "text"),
    [
        ("read_file", {}, "path: missing"),
        ("read_file", {"path": 5}, "path: not of type string"),
        ("read_file", {"path": "a", "mode": "r"}, "mode: not an argument of this tool"),
        ("read_file", {"path": "a", "max_lines": -1}, "max_lines: under 0"),
        ("read_file", {"path": "a", "max_lines": 1.5}, "max_lines: not of type integer"),
        ("read_file", {"path": "a", "start_line": True}, "start_line: not of type integer"),
        ("read_file", {"path": "a", "start_line": 0}, "start_line: lines are counted from 1"),
        ("read_file", {"path": "a", "line_numbers": 1}, "line_numbers: not of type boolean"),
        ("write_file", {"path": "a"}, "content: missing"),
        ("write_file", {"path": "a", "content": "\ud800"}, "a: the content is not valid Unicode"),
        ("wait", {"seconds": "1"}, "seconds: not of type number"),
        ("wait", {"seconds": 601}, "seconds: over 600"),
    ],
)
def test_wrong_arguments_are_an_error_of_the_tool(
    client: Client, files: Path, tool: str, arguments: dict[str, object], text: str
) -> None:
    (files / "a").write_text("a")
    assert client.tool(tool, **arguments) == (text, True)


def test_a_tool_that_breaks_is_an_internal_error_and_the_server_goes_on(
    server_side: Path, files: Path, client_context: ssl.SSLContext
) -> None:
    def broken(arguments: Mapping[str, object], call: Call) -> str:
        raise KeyError("secret")

    def failing(arguments: Mapping[str, object], call: Call) -> str:
        raise ToolError(f"not for {call.session}")

    tools = [DemoTool("broken", "", {}, broken), DemoTool("failing", "", {}, failing)]
    with DemoRatd(rat.load_side(str(server_side), "server"), files, tools=tools) as server:
        client = Client(server, client_context)
        assert client.call("tools/call", {"name": "broken"}).error == {
            "code": -32603,
            "message": "internal error: KeyError",
        }
        assert client.tool("failing") == ("not for laptop", True)
        client.socket.close()


# --- waiting, canceling, stopping -----------------------------------------------------------------


def start_waiting(server: DemoRatd, client: Client, identifier: object = 1) -> None:
    """Send a call that waits for minutes, and return once the server has it."""
    params = {"name": "wait", "arguments": {"seconds": 500}}
    body = json.dumps(request("tools/call", params, identifier)).encode()
    had = len(server.requests)
    client.connection.request("POST", "/mcp", body, FIELDS)
    assert server.wait_until(lambda s: len(s.requests) > had)


def test_waiting_takes_its_time(client: Client) -> None:
    started = time.monotonic()
    assert client.tool("wait", seconds=0.05) == ("waited 0.05 s", False)
    assert time.monotonic() - started >= 0.05


@pytest.mark.parametrize("how", ["close", "half", "reset"])
def test_a_call_whose_connection_the_client_closes_is_canceled(server: DemoRatd, client: Client, how: str) -> None:
    start_waiting(server, client, "the call")
    if how == "close":
        client.socket.close()
        client.connection.close()
    elif how == "half":
        socket.socket.shutdown(client.socket, socket.SHUT_WR)
    else:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.socket.close()
        client.connection.close()
    assert server.wait_until(lambda s: s.canceled == ["the call"] and s.connections == 0)


def test_what_arrives_during_a_wait_is_answered_after_it(server: DemoRatd, client: Client) -> None:
    params = {"name": "wait", "arguments": {"seconds": 0.1}}
    first = json.dumps(request("tools/call", params)).encode()
    second = json.dumps(request("ping", {"x": "x" * 3_000_000}, 2)).encode()
    client.socket.sendall(
        b"".join(f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in (first, second))
    )
    assert b"waited 0.1 s" in client.read().body
    assert client.read().json == {**PONG, "id": 2}
    assert server.canceled == []


def descriptors() -> set[str]:
    """The descriptors of this process that are sockets, where that can be seen."""
    found = set()
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{number}"))
    return {target for target in found if target.startswith("socket:")}


def test_stopping_leaves_no_thread_and_no_socket(
    server_side: Path, files: Path, client_context: ssl.SSLContext
) -> None:
    threads, sockets = set(threading.enumerate()), descriptors()
    server = DemoRatd(rat.load_side(str(server_side), "server"), files)
    server.start()
    host, _, port = server.address.rpartition(":")
    idle, waiting, amid = (Client(server, client_context) for _ in range(3))
    assert idle.call("ping").json == PONG
    start_waiting(server, waiting)
    amid.socket.sendall(f"{HEAD}Content-Length: 1000\r\n\r\n".encode())
    with socket.create_connection((host, int(port))) as silent:
        assert server.wait_until(lambda s: s.connections == 4)
        server.stop()
        assert silent.recv(1) == b""
    assert server.canceled == []
    for client in (idle, waiting, amid):
        client.socket.close()
        client.connection.close()
    assert set(threading.enumerate()) == threads
    assert descriptors() == sockets
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))
    server.stop()  # harmless


def test_a_server_started_again_has_the_same_address(server: DemoRatd, client_context: ssl.SSLContext) -> None:
    for _ in range(2):
        address = server.address
        client = Client(server, client_context)
        assert client.call("ping").json == PONG
        client.socket.close()
        server.stop()
        server.start()
        assert server.address == address


def test_twenty_clients_at_once(server: DemoRatd, client_context: ssl.SSLContext) -> None:
    answers: list[object] = []

    def ask(identifier: int) -> None:
        client = Client(server, client_context)
        answers.append(client.call("ping", identifier=identifier).json)
        client.socket.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer["id"] for answer in answers if isinstance(answer, dict)) == list(range(20))


def test_an_address_of_ipv6_stands_between_brackets(server_side: Path, files: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    side = rat.load_side(str(server_side), "server")
    with DemoRatd(side, files, listen=("::1", 0)) as server:
        assert server.address.startswith("[::1]:")


# --- the command ----------------------------------------------------------------------------------


def run_command(*flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "demo_ratd.py"), *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=rat_environment(),
    )


@pytest.mark.skipif(os.name == "nt", reason="SIGTERM ends a process there at once")
def test_the_command_serves_until_it_is_told_to_stop(
    server_side: Path, files: Path, client_context: ssl.SSLContext
) -> None:
    process = run_command("--bundle", str(server_side), "--directory", str(files))
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("demo_ratd: serving tenant acme at 127.0.0.1:")
            host, _, port = line.split()[-1].rpartition(":")
            connection = http.client.HTTPSConnection(host, int(port), timeout=HANG, context=client_context)
            body = json.dumps(request("tools/call", {"name": "wait\x1b", "arguments": {}}))
            connection.request("POST", "/mcp", body, FIELDS)
            assert connection.getresponse().read()
            connection.request("GET", "/mcp", headers=FIELDS)
            assert connection.getresponse().read()
            connection.close()
            told = [process.stdout.readline().rpartition(" in ")[0] for _ in range(2)]
            assert told == ["laptop: tools/call wait?: 200", "laptop: GET /mcp: 405"]
        finally:
            process.terminate()
        rest, errors = process.communicate(timeout=HANG)
    assert (process.returncode, rest, errors) == (0, "", "")


def test_a_command_that_cannot_start_says_why(server_side: Path, client_side: Path, files: Path) -> None:
    for flags, status, text in (
        (("--bundle", str(client_side), "--directory", str(files)), 1, "demo_ratd: "),
        (
            ("--bundle", str(server_side), "--directory", str(files / "none")),
            1,
            f"demo_ratd: {files / 'none'}: not a directory",
        ),
        (
            ("--bundle", str(server_side), "--directory", str(files), "--listen", "here"),
            2,
            "demo_ratd.py: argument --listen: expected HOST:PORT",
        ),
    ):
        process = run_command(*flags)
        output, errors = process.communicate(timeout=HANG)
        assert (process.returncode, output) == (status, "")
        assert errors.startswith(text)
        assert errors.count("\n") == 1
