"""Answers of a server: what is written of them, byte for byte, and what is said of the others."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fault_server import Connection, FaultServer, Response, answer, jsonl, result
from harness import Harness, call, notification

import rat

if TYPE_CHECKING:
    from conftest import Conversation, StartRat
    from fault_server import Request

CASES = Path(__file__).parent / "cases"
LIMIT = rat.MESSAGE_LIMIT


@pytest.fixture(name="rat")
def rat_of_the_module(conversation: Conversation) -> Harness:
    """The rat of the module."""
    return conversation.harness


@pytest.fixture(name="fault_server")
def server_of_the_module(conversation: Conversation) -> FaultServer:
    """The server of the module."""
    return conversation.server


@pytest.mark.parametrize("case", jsonl(CASES / "answers.jsonl"), ids=lambda case: str(case["name"]))
def test_case(case: dict[str, object], rat: Harness, fault_server: FaultServer) -> None:
    body = str(case["body"])
    fields = (("Location", str(case["location"])),) if "location" in case else ()
    status, kind = case["status"], case["type"]
    assert isinstance(status, int)
    fault_server.respond = lambda request: Response(status, body.encode(), str(kind), fields)
    rat.send(str(case["call"]).encode())
    if "written" in case:
        written = body if case["written"] == "the body" else str(case["written"])
        assert rat.line() == written.encode()
    else:
        assert rat.error(1) == str(case["error"]).replace("ADDRESS", fault_server.address)
    assert len(fault_server.requests) == 1


@pytest.mark.parametrize(
    "body",
    [
        b'{"jsonrpc":"2.0","id":1,"result":null}',
        b'{"jsonrpc":"2.0","id":1,"error":null}',
        b'{"id" : 1.0,"x":1.10,"result":{"a":"\\u00e9\\/"},"jsonrpc":"2.0"}',
        '{"jsonrpc":"2.0","id":1,"result":"é\u2028😀"}'.encode(),
        b'{"jsonrpc":"2.0","id":1,"result":123456789012345678901234567890}',
        b'{"jsonrpc":"2.0","id":1,"result":' + b"9" * 5000 + b"}",
        b'{"jsonrpc":"2.0","id":1,"error":{},"result":{}}',
    ],
    ids=range(7),
)
@pytest.mark.parametrize("status", [200, 201, 400, 404, 500])
def test_a_response_to_the_call_is_written_as_received(conversation: Conversation, body: bytes, status: int) -> None:
    server, harness = conversation
    server.respond = lambda request: Response(status, body)
    harness.send(call(1))
    assert harness.line() == body


@pytest.mark.parametrize("kind", ["application/json", "", "text/plain", "application/problem+json"])
def test_a_response_to_the_call_may_come_as_any_type(conversation: Conversation, kind: str) -> None:
    server, harness = conversation
    server.respond = lambda request: Response(200, result(1), kind)
    harness.send(call(1))
    assert harness.line() == result(1)


@pytest.mark.parametrize(
    ("body", "written"),
    [
        (b"\r\n" + result(1) + b"\n\n", result(1)),
        (b" \t" + result(1) + b"\t ", result(1)),
        (b'{\n"jsonrpc":\r\n"2.0",\r"id":1,\n\n"result":"a\\nb"}', b'{ "jsonrpc":  "2.0", "id":1,  "result":"a\\nb"}'),
    ],
    ids=["around", "spaces around", "between tokens"],
)
def test_an_answer_is_on_a_line_of_its_own(conversation: Conversation, body: bytes, written: bytes) -> None:
    server, harness = conversation
    server.respond = lambda request: Response(200, body)
    harness.send(call(1))
    assert harness.line() == written


INVALID = "ratd at ADDRESS sent an invalid response: "
NOT_TO_THE_CALL = INVALID + "not a JSON-RPC response to the call (HTTP STATUS)"


@pytest.mark.parametrize(
    ("status", "body", "kind", "error"),
    [
        (200, b'{"jsonrpc":"1.0","id":1,"result":{}}', "application/json", NOT_TO_THE_CALL),
        (200, b'{"id":1,"result":{}}', "application/json", NOT_TO_THE_CALL),
        (200, b'{"jsonrpc":"2.0","result":{}}', "application/json", NOT_TO_THE_CALL),
        (200, b'{"jsonrpc":"2.0","id":null,"result":{}}', "application/json", NOT_TO_THE_CALL),
        (200, b'{"jsonrpc":"2.0","id":true,"result":{}}', "application/json", NOT_TO_THE_CALL),
        (200, b'{"jsonrpc":"2.0","id":2,"result":{}}', "application/json", NOT_TO_THE_CALL),
        (200, b"[" + result(1) + b"]", "application/json", NOT_TO_THE_CALL),
        (200, result(1) + result(1), "application/json", NOT_TO_THE_CALL),
        (200, result(1)[:-1], "application/json", NOT_TO_THE_CALL),
        (200, b'{"jsonrpc":"2.0","id":1,"result":NaN}', "application/json", NOT_TO_THE_CALL),
        (200, b'{"jsonrpc":"2.0","id":1,"result":"\xff"}', "application/json", NOT_TO_THE_CALL),
        (200, b"\xef\xbb\xbf" + result(1), "application/json", NOT_TO_THE_CALL),
        (200, b"[" * 100_000, "application/json", NOT_TO_THE_CALL),
        (200, b"<html>", "text/html", NOT_TO_THE_CALL),
        (200, gzip.compress(result(1)), "application/json", NOT_TO_THE_CALL),
        (302, b"moved", "text/plain", NOT_TO_THE_CALL),
        (200, b"", "application/json", INVALID + "none to the call (HTTP STATUS)"),
        (200, b" \r\n\t", "application/json", INVALID + "none to the call (HTTP STATUS)"),
        (204, b"", "", INVALID + "none to the call (HTTP STATUS)"),
        (200, b"", "text/event-stream", INVALID + "an event stream without the response to the call"),
        (
            200,
            b"data: " + result(2) + b"\n\n",
            "Text/Event-Stream; charset=utf-8",
            INVALID + "an event stream without the response to the call",
        ),
        (400, b"", "text/plain", "ratd at ADDRESS answered HTTP 400"),
        (400, b"\n \n  no  way \nmore", "text/plain", "ratd at ADDRESS answered HTTP 400: no  way"),
        (404, b"x" * 300, "text/plain", "ratd at ADDRESS answered HTTP 404: " + "x" * 200),
        (500, b"a\x00b\x1b[31mc\td", "text/plain", "ratd at ADDRESS answered HTTP 500: a b [31mc d"),
        (500, "é\u202e".encode(), "text/plain", "ratd at ADDRESS answered HTTP 500: é "),
        (500, b"\xff", "text/plain", "ratd at ADDRESS answered HTTP 500: \ufffd"),
        (599, b'{"error":1}', "application/json", 'ratd at ADDRESS answered HTTP 599: {"error":1}'),
        (
            403,
            b'{"jsonrpc":"2.0","id":null,"error":{}}',
            "application/json",
            'ratd at ADDRESS answered HTTP 403: {"jsonrpc":"2.0","id":null,"error":{}}',
        ),
    ],
    ids=range(29),
)
def test_any_other_answer_is_an_error_of_its_own(
    conversation: Conversation, status: int, body: bytes, kind: str, error: str
) -> None:
    server, harness = conversation
    server.respond = lambda request: Response(status, body, kind)
    harness.send(call(1))
    expected = error.replace("ADDRESS", server.address).replace("STATUS", str(status))
    assert harness.error(1) == expected


@pytest.mark.parametrize("status", [200, 202, 204])
def test_a_notification_without_an_answer_is_fine(start_rat: StartRat, fault_server: FaultServer, status: int) -> None:
    started = start_rat()
    fault_server.respond = lambda request: Response(status, kind="")
    started.send(notification("notifications/initialized"), b'{"jsonrpc":"2.0","id":1,"result":{}}')
    fault_server.wait_requests(2)
    fault_server.respond = answer
    started.call("then")
    assert started.finish() == (0, [])
    assert started.records("relay failed") == []


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (
            Response(200, result(1)),
            "ratd at ADDRESS sent an invalid response: not what is answered to a notification (HTTP 200)",
        ),
        (Response(404, b"none here", "text/plain"), "ratd at ADDRESS answered HTTP 404: none here"),
        (Response(500, b"", ""), "ratd at ADDRESS answered HTTP 500"),
    ],
    ids=["a body", "404", "500"],
)
def test_a_failed_notification_is_only_logged(
    start_rat: StartRat, fault_server: FaultServer, response: Response, error: str
) -> None:
    started = start_rat()
    fault_server.respond = lambda request: response
    started.send(notification("notifications/x"))
    (record,) = started.wait_record("relay failed")
    assert record["level"] == "WARN"
    assert record["method"] == "notifications/x"
    assert "id" not in record
    assert record["error"] == error.replace("ADDRESS", fault_server.address)
    assert started.finish() == (0, [])


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (200, result(1), "sent an invalid response: not a JSON-RPC response to the call (HTTP 200)"),
        (200, b"[1", "sent an invalid response: not a JSON-RPC response to the call (HTTP 200)"),
        (202, b"", "sent an invalid response: none to the call (HTTP 202)"),
        (207, b"[]", "sent an invalid response: not a JSON-RPC response to the call (HTTP 207)"),
        (400, b"no batches", "answered HTTP 400: no batches"),
    ],
    ids=range(5),
)
def test_an_answer_to_a_batch_that_is_none(conversation: Conversation, status: int, body: bytes, error: str) -> None:
    server, harness = conversation
    server.respond = lambda request: Response(status, body)
    harness.send(b"[" + call(1) + b"," + call("b") + b"]")
    assert json.loads(harness.line()) == [
        {"jsonrpc": "2.0", "id": identifier, "error": {"code": -32050, "message": f"ratd at {server.address} {error}"}}
        for identifier in (1, "b")
    ]


def test_an_array_answers_a_batch_on_a_line_of_its_own(conversation: Conversation) -> None:
    server, harness = conversation
    server.respond = lambda request: Response(200, b"\n[\n1.10 ,\n2]\n")
    harness.send(b"[" + call(1) + b"]")
    assert harness.line() == b"[ 1.10 , 2]"


# Large ones


def test_an_answer_of_the_limit_is_written(rat: Harness, fault_server: FaultServer) -> None:
    short = result(1, "")
    body = short.replace(b'""', b'"' + b"x" * (LIMIT - len(short)) + b'"')
    assert len(body) == LIMIT
    fault_server.respond = lambda request: Response(200, body)
    rat.send(call(1))
    assert rat.line() == body


def chunked(body: bytes, size: int) -> bytes:
    """A response whose body comes in chunks of so many bytes."""
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    encoded = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + encoded


OVER = b"x" * (17 * 1024 * 1024)


@pytest.mark.parametrize(
    "response",
    [
        Response(200, OVER).encode(),
        chunked(OVER, 1 << 20),
        b"HTTP/1.1 200 OK\r\n\r\n" + OVER,
        Response(500, OVER, "text/plain").encode(),
    ],
    ids=["of a length", "chunked", "until the end", "an error"],
)
def test_an_answer_over_the_limit_is_not_read_on(rat: Harness, fault_server: FaultServer, response: bytes) -> None:
    def script(connection: Connection) -> None:
        connection.handshake()
        fault_server.receive(connection)
        connection.send(response)
        connection.wait_end()

    fault_server.scripts = [script]
    rat.send(call(1))
    told = f"ratd at {fault_server.address} sent an invalid response: over 16 MiB"
    assert rat.error(1) == told
    fault_server.wait_open(0)  # an answer not read to its end closes its connection
    assert rat.call(2)["id"] == 2


# What must not reach the next call on the connection


def test_calls_one_after_another_share_a_connection(rat: Harness, fault_server: FaultServer) -> None:
    for identifier in range(5):
        rat.call(identifier)
    assert len({request.connection for request in fault_server.requests}) == 1


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_chunked_answer(rat: Harness, fault_server: FaultServer, size: int) -> None:
    accepted = fault_server.accepted
    body = result(1, "x" * 3000)

    def script(connection: Connection) -> None:
        connection.handshake()
        fault_server.receive(connection)
        connection.send(chunked(body, size))
        while fault_server.exchange(connection):
            pass

    fault_server.scripts = [script]
    rat.send(call(1))
    assert rat.line() == body
    assert rat.call(2)["id"] == 2
    assert fault_server.accepted == accepted + 1


INTERIM = {
    "100": b"HTTP/1.1 100 Continue\r\n\r\n",
    "102": b"HTTP/1.1 102 Processing\r\n\r\n",
    "103": b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\nContent-Length: 5\r\n\r\n",
    # Of no meaning to rat, and interim all the same (RFC 9110, section 15.2).
    "104": b"HTTP/1.1 104 Upload Resumption Supported\r\n\r\n",
    "199": b"HTTP/1.1 199 Whatever\r\n\r\n",
}


@pytest.mark.parametrize("interim", [*INTERIM, "100 100", "102 103 100 102", "103 103"])
def test_interim_answers_are_not_the_answer(rat: Harness, fault_server: FaultServer, interim: str) -> None:
    accepted = fault_server.accepted
    before = [INTERIM[each] for each in interim.split()]

    def script(connection: Connection) -> None:
        connection.handshake()
        while request := fault_server.receive(connection):
            connection.send(*before, answer(request).encode())

    fault_server.scripts = [script]
    for identifier in range(3):
        assert rat.call(identifier, f"m{identifier}")["result"] == {"method": f"m{identifier}"}
    assert fault_server.accepted == accepted + 1


def test_101_is_no_answer_and_ends_the_connection(rat: Harness, fault_server: FaultServer) -> None:
    def script(connection: Connection) -> None:
        connection.handshake()
        request = fault_server.receive(connection)
        assert request is not None
        switching = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"
        connection.send(switching, answer(request).encode())
        connection.wait_end()

    fault_server.scripts = [script]
    rat.send(call(1))
    assert rat.error(1) == (
        f"ratd at {fault_server.address} sent an invalid response: HTTP 101, which nobody asked for"
    )
    fault_server.wait_open(0)
    assert rat.call(2)["result"] == {"method": "ping"}


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "body",
    [b"-1\r\n", b"-a\r\n", b"zz\r\n", b"\r\n", b"5", b"-0\r\n\r\n", b"5 \r\nabcd", b"0x5\r\n", b"+5\r\n", b"5_0\r\n"],
)
def test_a_malformed_chunk_is_no_answer(rat: Harness, fault_server: FaultServer, body: bytes) -> None:
    def script(connection: Connection) -> None:
        connection.handshake()
        fault_server.receive(connection)
        connection.send(HEAD + body + result(1) + b"\r\n0\r\n\r\n")

    fault_server.scripts = [script]
    rat.send(call(1))
    told = rat.error(1)
    assert told.startswith(f"ratd at {fault_server.address} sent an invalid response: ")
    assert rat.call(2)["result"] == {"method": "ping"}


def test_gzip_nobody_asked_for_is_not_inflated(rat: Harness, fault_server: FaultServer) -> None:
    accepted = fault_server.accepted
    bomb = gzip.compress(b" " * (64 << 20) + result(1))
    fault_server.respond = lambda request: Response(200, bomb, fields=(("Content-Encoding", "gzip"),))
    rat.send(call(1))
    assert rat.error(1) == (
        f"ratd at {fault_server.address} sent an invalid response: not a JSON-RPC response to the call (HTTP 200)"
    )
    fault_server.respond = answer
    assert rat.call(2)["result"] == {"method": "ping"}
    assert fault_server.accepted == accepted + 1


@pytest.mark.parametrize("padding", [0, 6000, 9000, 15000, 100_000])
def test_an_answer_nobody_waits_for_is_not_the_next_calls(
    rat: Harness, fault_server: FaultServer, padding: int
) -> None:
    def script(connection: Connection) -> None:
        connection.handshake()
        request = fault_server.receive(connection)
        assert request is not None
        first = Response(200, result(1, "x" * padding)).encode()
        connection.send(first + Response(200, result(2, "forged")).encode())
        while fault_server.exchange(connection):
            pass

    fault_server.scripts = [script]
    rat.call(1)
    assert rat.call(2)["result"] == {"method": "ping"}


def test_cookies_and_redirects_are_nothing_to_it(rat: Harness, fault_server: FaultServer) -> None:
    def respond(request: Request) -> Response:
        good = answer(request)
        return good._replace(fields=(("Set-Cookie", "a=b"), ("Location", "/elsewhere")))

    fault_server.respond = respond
    rat.call(1)
    rat.call(2)
    assert [request.line for request in fault_server.requests] == ["POST /mcp HTTP/1.1"] * 2
    assert fault_server.requests[1].field("Cookie") is None
    for status in (301, 302, 303, 307, 308):
        fault_server.respond = lambda request, status=status: Response(  # type: ignore[misc]
            status, b"", "", (("Location", f"https://{fault_server.address}/elsewhere"),)
        )
        rat.send(call(3))
        assert rat.error(3).endswith(f"not a JSON-RPC response to the call (HTTP {status})")
    assert len(fault_server.requests) == 7
