"""Answers that are event streams: what is written of them and when, how long they may last, and how they end."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING, Callable

import pytest
from fault_server import HANG, Connection, FaultServer, Response, answer, is_call, result
from harness import call, cancel, notification

import rat

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Conversation, StartRat
    from fault_server import Request
    from harness import Harness

PROGRESS = notification("notifications/progress", {"progressToken": "t", "progress": 1})
LOG = notification("notifications/message", {"level": "info", "data": "half way"})
WITHOUT = "ratd at ADDRESS sent an invalid response: an event stream without the response to the call"


def event(message: bytes) -> bytes:
    """An event with a message."""
    return b"event: message\r\ndata: " + message + b"\r\n\r\n"


class Stream:
    """An event stream that answers a request, in chunks."""

    def __init__(self, connection: Connection, fields: bytes = b"", chunked: bool = True) -> None:
        self.connection = connection
        self._chunked = chunked
        connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # each piece a packet, at once
        framing = b"Transfer-Encoding: chunked\r\n" if chunked else b"Connection: close\r\n"
        connection.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + framing + fields + b"\r\n")

    def send(self, *pieces: bytes) -> None:
        """Send bytes of the stream, each piece a chunk and a write of its own."""
        for piece in pieces:
            self.connection.send(b"%x\r\n%s\r\n" % (len(piece), piece) if self._chunked else piece)

    def end(self, last: bytes = b"") -> None:
        """End the stream, with a last piece in the same write."""
        assert self._chunked
        chunk = b"%x\r\n%s\r\n" % (len(last), last) if last else b""
        self.connection.send(chunk + b"0\r\n\r\n")


Behavior = Callable[["Connection", "Request"], bool]


def behave(server: FaultServer, behavior: Behavior) -> None:
    """Have a server answer calls by a behavior, which returns whether the connection goes on; pings as ever."""

    def script(connection: Connection) -> None:
        connection.handshake()
        while (request := server.receive(connection)) is not None:
            message = request.message
            if isinstance(message, list) or (is_call(message) and b'"method":"ping"' not in request.body):
                if not behavior(connection, request):
                    return
            else:
                if isinstance(message, dict) and isinstance(params := message.get("params"), dict):
                    time.sleep(params.get("seconds", 0))
                connection.respond(answer(request))

    server.script = script
    server.cut_all()  # a connection of before would be answered as before


def streamed(*pieces: bytes) -> Behavior:
    """Answer with a stream of these pieces, ended."""

    def behavior(connection: Connection, request: Request) -> bool:
        stream = Stream(connection)
        stream.send(*pieces)
        stream.end()
        return True

    return behavior


@pytest.fixture
def server(conversation: Conversation) -> FaultServer:
    """The server of the conversation that the tests share."""
    return conversation.server


@pytest.fixture
def rat_process(conversation: Conversation) -> Harness:
    """The rat of the conversation that the tests share."""
    return conversation.harness


# What is written


def test_a_message_is_written_as_it_comes(server: FaultServer, rat_process: Harness) -> None:
    """Each before the server has sent the next."""
    read = threading.Semaphore(0)
    request = b'{"jsonrpc":"2.0", "id":1, "method":"roots/list"}'

    def behavior(connection: Connection, _: Request) -> bool:
        stream = Stream(connection)
        for message in (PROGRESS, LOG, request, result(1)):
            stream.send(event(message))
            assert read.acquire(timeout=HANG)
        stream.end()
        return True

    behave(server, behavior)
    rat_process.send(call(1, "stream"))
    for message in (PROGRESS, LOG, request, result(1)):
        assert rat_process.line() == message
        read.release()


SPACED = b'{ "jsonrpc" : "2.0",\t"id":1,"result":{"\xc3\xa9":1.0e0,"b":"\\u00e9\\n"} }'


@pytest.mark.parametrize(
    ("stream", "lines"),
    [
        (b"data: " + SPACED + b"\n\n", [SPACED]),
        (b"data:" + SPACED + b"\r\r", [SPACED]),
        (b"\xef\xbb\xbfid: 7\r\nretry: 3000\r\nevent: message\r\ndata: " + SPACED + b"\r\n\r\n", [SPACED]),
        (
            b": open\n\nid: 1\ndata:\n\ndata: " + PROGRESS + b"\n\n: ping\n\ndata:" + SPACED + b"\n\n",
            [PROGRESS, SPACED],
        ),
        (
            b'data: {"jsonrpc":"2.0",\ndata: "id":1,\n: c\ndata:\ndata: "result":{}}\n\n',
            [b'{"jsonrpc":"2.0", "id":1,  "result":{}}'],
        ),
        (b"data: \t" + result(1) + b" \n\n", [result(1)]),
        (b"event: other\ndata: " + result(1) + b"\n\n", [result(1)]),
        (
            b"data: [" + PROGRESS + b", " + LOG + b"]\n\ndata: " + result(1) + b"\n\n",
            [b"[" + PROGRESS + b", " + LOG + b"]", result(1)],
        ),
    ],
    ids=range(8),
)
@pytest.mark.parametrize("split", [False, True], ids=["whole", "byte by byte"])
def test_a_message_is_written_as_received(
    server: FaultServer, rat_process: Harness, stream: bytes, lines: list[bytes], split: bool
) -> None:
    pieces = [stream[i : i + 1] for i in range(len(stream))] if split else [stream]
    behave(server, streamed(*pieces))
    rat_process.send(call(1, "stream"))
    assert [rat_process.line() for _ in lines] == lines
    rat_process.call("nothing more")


@pytest.mark.parametrize("framing", ["length", "close"])
def test_a_stream_need_not_come_in_chunks(server: FaultServer, rat_process: Harness, framing: str) -> None:
    body = event(PROGRESS) + event(result(1))

    def behavior(connection: Connection, request: Request) -> bool:
        if framing == "length":
            connection.respond(Response(200, body, "text/event-stream; charset=utf-8"))
            return True
        Stream(connection, chunked=False).send(event(PROGRESS), event(result(1)))
        return False

    behave(server, behavior)
    rat_process.send(call(1, "stream"))
    assert [rat_process.line(), rat_process.line()] == [PROGRESS, result(1)]


def test_an_event_as_large_as_a_message(server: FaultServer, rat_process: Harness) -> None:
    largest = result(1, "x" * (rat.MESSAGE_LIMIT - len(result(1, ""))))
    assert len(largest) == rat.MESSAGE_LIMIT
    pieces = [b"data: " + largest + b"\n\n"]
    behave(server, lambda *exchange: streamed(*pieces)(*exchange))
    rat_process.send(call(1, "stream"))
    assert rat_process.line() == largest
    pieces[0] = pieces[0].replace(b"xx", b"xxx", 1)
    rat_process.send(call(1, "stream"))
    assert rat_process.error(1) == f"ratd at {server.address} sent an invalid response: over 16 MiB"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"endpoint", "not JSON (character 1)"),
        (result(1)[:-1], "not JSON (character 36)"),
        (b'{"jsonrpc":"2.0","id":1,"result":NaN}', "NaN is not JSON"),
        (b'{"jsonrpc":"2.0","id":1,"result":"\xff"}', "not UTF-8 (byte 35)"),
        (b"\n", "not JSON (character 2)"),
        (b"5", "no JSON-RPC message"),
        (b"[]", "no JSON-RPC message"),
        (b"{}", "no response to the call"),
        (b"[" + PROGRESS + b",5]", "no JSON-RPC message"),
        (result(2), "no response to the call"),
        (result("1"), "no response to the call"),
        (b'{"jsonrpc":"2.0","id":true,"result":{}}', "no response to the call"),
        (b'{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"m"}}', "no response to the call"),
        (b'{"jsonrpc":"2.0","result":{}}', "no response to the call"),
        (b'{"id":1,"result":{}}', "no response to the call"),
        (b'{"jsonrpc":"2.0","id":1}', "no response to the call"),
        (b'{"jsonrpc":"2.0","id":2,"result":{},"method":"m"}', "no response to the call"),
        (b'{"jsonrpc":"2.0","id":2,"method":5}', "no response to the call"),
        (b"[" + PROGRESS + b"," + result(2) + b"]", "no response to the call"),
        (b"[" + result(1) + b"," + result(1) + b"]", "no response to the call"),
        (b"[" * 100_000, "nested too deeply"),
    ],
    ids=range(21),
)
def test_what_is_no_message_to_the_harness_is_passed_over(conversation: Conversation, data: bytes, reason: str) -> None:
    """The stream of messages stays one, each call gets its answer once, and the log tells what was left out."""
    server, rat_process = conversation
    lines = b"".join(b"data: " + line + b"\n" for line in data.split(b"\n"))
    behave(server, streamed(event(PROGRESS) + lines + b"\n" + event(result(1))))
    before = len(rat_process.records("event passed over"))
    rat_process.send(call(1, "stream"))
    assert [rat_process.line(), rat_process.line()] == [PROGRESS, result(1)]
    rat_process.call("nothing more")
    record = rat_process.wait_record("event passed over", before + 1)[-1]
    assert record.pop("time")
    assert record == {"level": "WARN", "msg": "event passed over", "method": "stream", "id": "1", "error": reason}


def test_what_a_stream_is_kept_alive_with_is_told_once(start_rat: StartRat, fault_server: FaultServer) -> None:
    behave(fault_server, streamed(b"event: ping\ndata: {}\n\n" * 100 + event(result(1))))
    harness = start_rat()
    for _ in range(2):
        harness.send(call(1, "stream"))
        assert harness.line() == result(1)
    assert harness.finish() == (0, [])
    assert len(harness.records("event passed over")) == 2


def test_a_response_is_the_last_that_is_written(server: FaultServer, rat_process: Harness) -> None:
    behave(server, streamed(event(result(1)) + event(PROGRESS) + event(result(1)), event(LOG)))
    rat_process.send(call(1, "stream"))
    assert rat_process.line() == result(1)
    rat_process.call("nothing more")


# Connections


def test_the_connection_of_a_stream_that_ended_is_used_again(start_rat: StartRat, fault_server: FaultServer) -> None:
    def behavior(connection: Connection, request: Request) -> bool:
        stream = Stream(connection)
        stream.send(event(PROGRESS))
        stream.end(event(result(1)))  # on a busy machine the end could come later than it is waited for
        return True

    behave(fault_server, behavior)
    harness = start_rat(level="debug")
    for count in range(1, 4):
        harness.send(call(1, "stream"))
        assert [harness.line(), harness.line()] == [PROGRESS, result(1)]
        harness.wait_record("message", count)  # its worker is at its end
    # The next call may take longer than the end of a stream is waited for.
    harness.call(2, "ping", {"seconds": 0.3})
    assert {request.connection for request in fault_server.requests} == {0}


def test_a_stream_that_does_not_end_with_the_response_is_closed(server: FaultServer, rat_process: Harness) -> None:
    def behavior(connection: Connection, request: Request) -> bool:
        Stream(connection).send(event(result(1)))
        connection.wait_end()
        server.report("closed")
        return False

    behave(server, behavior)
    rat_process.send(call(1, "stream"))
    assert rat_process.line() == result(1)
    server.wait_report("closed")
    rat_process.call(2)


def test_what_follows_the_response_is_not_read_for_ever(server: FaultServer, rat_process: Harness) -> None:
    def behavior(connection: Connection, request: Request) -> bool:
        stream = Stream(connection)
        stream.send(event(result(1)))
        try:
            while True:
                stream.send(event(PROGRESS))
        except OSError:
            server.report("closed")
        return False

    behave(server, behavior)
    rat_process.send(call(1, "stream"))
    assert rat_process.line() == result(1)
    server.wait_report("closed")
    rat_process.call(2)


@pytest.mark.parametrize("method", ["stream", "subscriptions/listen"])
def test_what_drips_after_the_response_holds_no_worker_longer_than_a_call(
    start_rat: StartRat, fault_server: FaultServer, method: str
) -> None:
    """Each byte comes in time for one operation of the socket, and the line that they are of has no end."""

    def behavior(connection: Connection, request: Request) -> bool:
        Stream(connection).send(event(PROGRESS), event(result(1)))
        pause = threading.Event()
        with contextlib.suppress(OSError):
            while not pause.wait(0.03):
                connection.send(b"0")
        fault_server.report("closed")
        return False

    behave(fault_server, behavior)
    rat = start_rat(patch="rat.REQUEST_SECONDS = 1")
    rat.send(call(1, method))
    assert [rat.line(), rat.line()] == [PROGRESS, result(1)]
    fault_server.wait_report("closed")
    rat.call(2)
    assert rat.finish() == (0, [])


# Streams that fail


@pytest.mark.parametrize(
    ("sent", "ended", "error"),
    [
        (b"", True, WITHOUT),
        (event(PROGRESS), True, WITHOUT),
        (event(PROGRESS) + b"data: " + result(1) + b"\r\n", True, WITHOUT),
        (
            event(PROGRESS),
            False,
            f"ratd at ADDRESS sent an invalid response: it ended after {len(event(PROGRESS))} bytes",
        ),
    ],
    ids=["empty", "without", "amid the event", "amid the stream"],
)
def test_a_stream_that_ends_without_the_response(
    server: FaultServer, rat_process: Harness, sent: bytes, ended: bool, error: str
) -> None:
    def behavior(connection: Connection, request: Request) -> bool:
        stream = Stream(connection)
        if sent:
            stream.send(sent)
        if ended:
            stream.end()
        return ended

    behave(server, behavior)
    rat_process.send(call(1, "stream"))
    if sent:
        assert rat_process.line() == PROGRESS
    assert rat_process.error(1) == error.replace("ADDRESS", server.address)
    rat_process.call(2)


def test_a_connection_reset_amid_a_stream(server: FaultServer, rat_process: Harness) -> None:
    read = threading.Event()

    def behavior(connection: Connection, request: Request) -> bool:
        Stream(connection).send(event(PROGRESS))
        assert read.wait(HANG)
        connection.reset()
        return False

    behave(server, behavior)
    rat_process.send(call(1, "stream"))
    assert rat_process.line() == PROGRESS
    read.set()
    told = f"ratd unreachable at {server.address}: connection reset by peer"
    # Some CPythons tell a reset within TLS as an end.
    cut = f"ratd at {server.address} sent an invalid response: it ended after {len(event(PROGRESS))} bytes"
    assert rat_process.error(1) in (told, cut)


def test_an_error_status_is_no_stream(server: FaultServer, rat_process: Harness) -> None:
    server.respond = lambda request: Response(429, event(result(1)), "text/event-stream")
    rat_process.send(call(1, "stream"))
    assert rat_process.error(1) == f"ratd at {server.address} answered HTTP 429: event: message"


# What else is posted


def test_a_request_of_the_server_is_answered_by_the_harness(server: FaultServer, rat_process: Harness) -> None:
    """As servers ask up to 2025-11-25: on the stream of a call, the answer in a POST of its own."""
    asked = b'{"jsonrpc":"2.0","id":1,"method":"elicitation/create","params":{"message":"Really?"}}'
    reply = b'{"jsonrpc":"2.0","id":1,"result":{"action":"accept"}}'

    def behavior(connection: Connection, request: Request) -> bool:
        if b'"initialize"' in request.body:
            connection.respond(Response(200, result("i", {"protocolVersion": "2025-11-25"})))
            return True
        stream = Stream(connection)
        stream.send(event(asked))
        posted = server.wait_requests(3)[-1]
        assert (posted.body, posted.field("Mcp-Protocol-Version")) == (reply, "2025-11-25")
        stream.send(event(result(1, "done")))
        stream.end()
        return True

    behave(server, behavior)
    rat_process.call("i", "initialize")
    rat_process.send(call(1, "tools/call"))
    assert rat_process.line() == asked  # of the same identifier as the call, and no answer to it
    rat_process.send(reply)
    assert rat_process.line() == result(1, "done")
    rat_process.call("nothing more")


def test_a_stream_in_answer_to_a_notification(server: FaultServer, rat_process: Harness) -> None:
    server.respond = lambda request: (
        answer(request) if is_call(request.message) else Response(200, event(PROGRESS), "text/event-stream")
    )
    rat_process.send(notification("notifications/initialized"))
    assert rat_process.line() == PROGRESS
    rat_process.send(b'{"jsonrpc":"2.0","id":9,"result":{}}')
    assert rat_process.line() == PROGRESS
    assert not [
        each for each in rat_process.records("relay failed") if each.get("method") == "notifications/initialized"
    ]


def test_the_version_of_an_initialize_on_a_stream_is_kept(start_rat: StartRat, fault_server: FaultServer) -> None:
    answered = result(1, {"protocolVersion": "2025-06-18", "capabilities": {}})
    behave(fault_server, streamed(event(PROGRESS) + event(answered)))
    harness = start_rat()
    harness.send(call(1, "initialize"))
    assert [harness.line(), harness.line()] == [PROGRESS, answered]
    harness.call(2)
    versions = [request.field("Mcp-Protocol-Version") for request in fault_server.requests]
    assert versions == [None, "2025-06-18"]


def test_the_tools_of_a_listing_on_a_stream_are_known(start_rat: StartRat, fault_server: FaultServer) -> None:
    schema = {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}
    listed = result(1, {"tools": [{"name": "t", "inputSchema": schema}]})
    behave(fault_server, streamed(event(listed)))
    harness = start_rat()
    harness.call(1, "tools/list")
    meta = {"io.modelcontextprotocol/protocolVersion": "2026-07-28"}
    harness.send(call(1, "tools/call", {"name": "t", "arguments": {"region": "here"}, "_meta": meta}))
    harness.line()
    assert fault_server.requests[-1].field("Mcp-Param-Region") == "here"


def test_what_was_listed_is_forgotten_when_the_server_refuses_its_headers(
    start_rat: StartRat, fault_server: FaultServer
) -> None:
    """-32020, on a stream or not: the listing was of other schemas, or of older ones. A new one counts again."""
    schema = {"type": "object", "properties": {"path": {"type": "string", "x-mcp-header": "Path"}}}
    listed = {"tools": [{"name": name, "inputSchema": schema} for name in ("t", "read_file")]}
    refusal = b'{"jsonrpc":"2.0","id":1,"error":{"code":-32020,"message":"m"}}'
    answers: list[Response] = []
    fault_server.respond = lambda request: answers.pop(0)
    harness = start_rat()
    meta = {"io.modelcontextprotocol/protocolVersion": "2026-07-28"}

    def mirrored(name: str, refuse: Response | None = None) -> str | None:
        """The header of a call, refused or not."""
        answers.append(refuse or Response(200, result(1)))
        harness.send(call(1, "tools/call", {"name": name, "arguments": {"path": "here"}, "_meta": meta}))
        harness.line()
        return fault_server.requests[-1].field("Mcp-Param-Path")

    for refused in (Response(400, refusal), Response(200, event(refusal), "text/event-stream")):
        answers.append(Response(200, result(1, listed)))
        harness.call(1, "tools/list")
        # A tool of a built-in name is the server's, once listed.
        assert [mirrored("t"), mirrored("read_file"), mirrored("t", refused)] == ["here", "here", "here"]
        assert [mirrored("t"), mirrored("read_file")] == [None, None]


# Batches


BATCH = b"[" + call(1) + b"," + notification("n") + b"," + call("a") + b"," + call(1) + b"]"


@pytest.mark.parametrize(
    "events",
    [
        [result(1), result("a"), result(1)],
        [PROGRESS, result("a"), LOG, result(1), result(1)],
        [b"[" + result(1) + b"," + result("a") + b"," + result(1) + b"]"],
        [b"[" + result(1) + b"," + PROGRESS + b"," + result("a") + b"]", result(1)],
    ],
    ids=["each", "among others", "at once", "in part"],
)
def test_a_batch_may_be_answered_by_a_stream(server: FaultServer, rat_process: Harness, events: list[bytes]) -> None:
    body = b"".join(event(each) for each in events) + event(result("a"))
    behave(server, streamed(body))
    rat_process.send(BATCH)
    assert [rat_process.line() for _ in events] == events
    rat_process.call("nothing more")


def test_a_large_batch_is_answered_by_a_stream_in_the_time_of_its_length(
    server: FaultServer, rat_process: Harness
) -> None:
    calls = 50_000  # where each response costs a walk over those to come, minutes
    behave(server, streamed(b"".join(event(result(number)) for number in reversed(range(calls)))))
    rat_process.send(b"[" + b",".join(call(number) for number in range(calls)) + b"]")
    assert [rat_process.line() for _ in range(calls)] == [result(number) for number in reversed(range(calls))]


def test_what_a_stream_leaves_of_a_batch_are_errors(server: FaultServer, rat_process: Harness) -> None:
    def behavior(connection: Connection, request: Request) -> bool:
        stream = Stream(connection)
        stream.send(event(result(1)))
        stream.end()
        return True

    behave(server, behavior)
    rat_process.send(BATCH)
    assert rat_process.line() == result(1)
    errors = json.loads(rat_process.line())
    assert sorted(str(each["id"]) for each in errors) == ["1", "a"]  # JSON-RPC 2.0, section 6: in any order
    assert {each["error"]["message"] for each in errors} == {WITHOUT.replace("ADDRESS", server.address)}


# Time

# A clock of the tests' own: nobody can wait ten minutes. It goes on by 20 s with whatever a stream brings.
CLOCK = """
import threading, time, types
at = 0.0
rat.time = types.SimpleNamespace(monotonic=lambda: time.monotonic() + at, time=time.time)
registers = []
made = rat.InFlight.__init__
def make(self, answers):
    made(self, answers)
    registers.append(self)
rat.InFlight.__init__ = make
fed = rat.EventStream.feed
def feed(self, data):
    global at
    if data:
        with rat.Exchange.lock:
            at += 20
            registers[0]._changed.notify()
    yield from fed(self, data)
rat.EventStream.feed = feed
"""


class Paced:
    """A stream that a test sends piece by piece, each a chunk of its own; closed when rat left it."""

    def __init__(self, server: FaultServer) -> None:
        self._pieces: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._server = server
        behave(server, self._behavior)

    def _behavior(self, connection: Connection, request: Request) -> bool:
        stream = Stream(connection)
        while piece := self._pieces.get(timeout=HANG):
            stream.send(piece)
        connection.wait_end()
        self._server.report("gone")
        return False

    def send(self, piece: bytes) -> None:
        """Send a piece."""
        self._pieces.put(piece)

    def wait_closed(self) -> None:
        """Wait until rat has closed the connection."""
        self._pieces.put(b"")
        self._server.wait_report("gone")


def test_each_event_starts_the_silence_again_and_ten_minutes_end_it(
    start_rat: StartRat, fault_server: FaultServer
) -> None:
    harness = start_rat(patch=CLOCK)
    stream = Paced(fault_server)
    harness.send(call(1, "stream"))
    for _ in range(29):  # 580 s
        stream.send(event(PROGRESS))
        assert harness.line() == PROGRESS
    stream.send(b": ping\n\n")
    assert harness.error(1) == f"ratd at {fault_server.address} did not answer within 600s"
    stream.wait_closed()


@pytest.mark.parametrize(
    "piece", [b": ping\n\n", b"id: 1\ndata:\n\n", b"data: x\n"], ids=["comments", "identifiers", "a part"]
)
def test_what_is_no_event_does_not_end_the_silence(
    start_rat: StartRat, fault_server: FaultServer, piece: bytes
) -> None:
    harness = start_rat(patch=CLOCK)
    stream = Paced(fault_server)
    harness.send(call(1, "stream"))
    stream.send(piece)
    stream.send(piece)
    assert harness.error(1) == f"ratd at {fault_server.address} did not answer within 30s"
    stream.wait_closed()


def test_the_wait_of_a_tool_is_added_to_the_silence(start_rat: StartRat, fault_server: FaultServer) -> None:
    harness = start_rat(patch=CLOCK)
    stream = Paced(fault_server)
    harness.send(call(1, "tools/call", {"name": "wait_window", "arguments": {}}))
    for _ in range(3):
        stream.send(b": ping\n\n")
    assert harness.error(1) == f"ratd at {fault_server.address} did not answer within 50s"
    stream.wait_closed()


def test_a_subscription_has_no_time_to_end(start_rat: StartRat, fault_server: FaultServer) -> None:
    harness = start_rat(patch=CLOCK)
    stream = Paced(fault_server)
    harness.send(call(1, "subscriptions/listen"))
    stream.send(event(PROGRESS))
    assert harness.line() == PROGRESS
    for _ in range(100):  # 2,000 s of silence
        stream.send(b": ping\n\n")
    stream.send(event(LOG))
    assert harness.line() == LOG
    harness.send(cancel(1))
    stream.wait_closed()
    assert harness.finish() == (0, [])


def test_a_subscription_must_begin_in_time(start_rat: StartRat, fault_server: FaultServer) -> None:
    harness = start_rat(patch="rat.REQUEST_SECONDS = 0.2")
    fault_server.respond = lambda request: None
    harness.send(call(1, "subscriptions/listen"))
    assert harness.error(1) == f"ratd at {fault_server.address} did not answer within 0.2s"


def test_ten_minutes_are_told_as_such_whatever_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a time that is added to a clock and taken off again, a little is lost now and then."""
    for started in (12345.678, 93000.1, 47.3):
        for _ in range(1000):
            posting = rat.Posting(b"", rat.Message((rat.Call(("number", 1), "1"),)), {})
            posting.started = started
            posting.due = min(started + 10_000, started + rat.STREAM_SECONDS)
            started += 0.137
            assert posting.allowed == rat.STREAM_SECONDS
            posting.due = started
            assert posting.allowed == rat.REQUEST_SECONDS


# Ends


def test_cancellation_closes_the_stream(server: FaultServer, rat_process: Harness) -> None:
    def behavior(connection: Connection, request: Request) -> bool:
        Stream(connection).send(event(PROGRESS))
        connection.wait_end()
        server.report("gone")
        return False

    behave(server, behavior)
    rat_process.send(call(1, "stream"))
    assert rat_process.line() == PROGRESS
    rat_process.send(cancel(1))
    server.wait_report("gone")
    rat_process.call("nothing more")
    assert cancel(1) in [request.body for request in server.wait_requests(3)]


def test_the_end_of_the_harness_closes_streams(start_rat: StartRat, fault_server: FaultServer) -> None:
    def behavior(connection: Connection, request: Request) -> bool:
        Stream(connection).send(event(PROGRESS))
        connection.wait_end()
        fault_server.report("gone")
        return False

    behave(fault_server, behavior)
    harness = start_rat()
    harness.send(call(1, "stream"), call(2, "subscriptions/listen"))
    assert [harness.line(), harness.line()] == [PROGRESS, PROGRESS]
    assert harness.finish() == (0, [])
    fault_server.wait_report("gone", 2)


# Subscriptions


@pytest.fixture
def listening(fault_server: FaultServer) -> Iterator[threading.Event]:
    """A server that holds subscriptions open until told."""
    release = threading.Event()

    def behavior(connection: Connection, request: Request) -> bool:
        message = request.message
        if not isinstance(message, dict) or message["method"] != "subscriptions/listen":
            connection.respond(answer(request))
            return True
        stream = Stream(connection)
        stream.send(event(notification("notifications/subscriptions/acknowledged", {"of": message["id"]})))
        if message["id"] == "ended":
            assert release.wait(HANG)
            stream.send(event(result("ended")))
            stream.end()
            return True
        connection.wait_end()
        fault_server.report(("gone", message["id"]))
        return False

    behave(fault_server, behavior)
    yield release
    release.set()


def test_subscriptions_take_no_worker_from_calls(
    start_rat: StartRat, fault_server: FaultServer, listening: threading.Event
) -> None:
    """As many as there are workers, and the calls go through; one more is refused rather than left waiting."""
    harness = start_rat(patch="rat.WORKERS = 3")
    for identifier in ("ended", 1, 2):
        harness.send(call(identifier, "subscriptions/listen"))
        assert json.loads(harness.line())["params"] == {"of": identifier}
    for number in range(10, 20):
        harness.call(number)
    harness.send(*[call(number) for number in range(10)])
    assert [each["id"] for each in harness.answers(10)] == list(range(10))
    harness.send(call(3, "subscriptions/listen"))
    assert harness.error(3) == "rat cannot relay the message: 3 subscriptions are open, end one first"
    # One that is canceled, or that the server ends, makes room.
    harness.send(cancel(1))
    fault_server.wait_report(("gone", 1))
    harness.send(call(4, "subscriptions/listen"))
    assert json.loads(harness.line())["params"] == {"of": 4}
    listening.set()
    assert harness.line() == result("ended")
    harness.send(call(5, "subscriptions/listen"))
    assert json.loads(harness.line())["params"] == {"of": 5}
    # Of more connections than there are calls at once, nothing is said either.
    assert [each["msg"] for each in harness.records()] == ["relaying", "relay failed"]


@pytest.mark.skipif(not hasattr(socket, "TCP_KEEPIDLE"), reason="the system has other names for it")
def test_a_server_that_vanished_is_noticed(fault_server: FaultServer, client_side: Path) -> None:
    """By probes of the system, whose answers no test can hold back; asked for on each connection."""
    ratd = rat.Ratd(rat.Address.parse(fault_server.address), rat.load_side(str(client_side)))
    list(ratd.post(rat.Exchange(call(1)), {}, HANG))
    connection = ratd.pool._get_conn()
    assert isinstance(connection, rat.Connection)
    assert connection.sock is not None
    probed = [connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)]
    probed += [connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)]
    probed += [connection.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)]
    assert (connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), *probed) == (1, 60, 15, 4)
    connection.close()


# A harness that does not read


def test_a_stream_does_not_run_ahead_of_the_harness(start_rat: StartRat, fault_server: FaultServer) -> None:
    """What a server sends without end waits in the network, not in the memory of rat."""
    message = notification("notifications/message", {"data": "x" * (1 << 16)})
    total = 600  # 39 MB
    sent = threading.Condition()
    count = 0

    def behavior(connection: Connection, request: Request) -> bool:
        nonlocal count
        # What the system buffers would otherwise depend on it.
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        stream = Stream(connection)
        for _ in range(total):
            stream.send(event(message))
            with sent:
                count += 1
                sent.notify_all()
        stream.send(event(result(1)))
        stream.end()
        return True

    behave(fault_server, behavior)
    harness = start_rat(read_output=False)
    harness.send(call(1, "stream"))
    with sent:
        while sent.wait(1.0):  # until nothing moves any more
            pass
        assert count < total // 2
    harness.start_reading_output()
    for _ in range(total):
        assert harness.line() == message
    assert harness.line() == result(1)


# A second of waiting for the harness takes twenty, five times.
SLOW_HARNESS = """
import threading, time, types
at = 0.0
rat.time = types.SimpleNamespace(monotonic=lambda: time.monotonic() + at, time=time.time)
class Written(threading.Event):
    def wait(self, timeout=None):
        global at
        written = super().wait(timeout and timeout / 10)
        if not written and timeout == 1 and at < 100:
            at += 20
            print("msg=waited", file=sys.stderr, flush=True)
        return written
threading.Event = Written
"""


def test_a_call_that_waits_for_the_harness_is_not_late(start_rat: StartRat, fault_server: FaultServer) -> None:
    """The time that the harness takes is not the server's."""
    message = notification("notifications/message", {"data": "x" * (1 << 20)})
    behave(fault_server, streamed(*[event(message)] * 8, event(result(1))))
    harness = start_rat(read_output=False, patch=SLOW_HARNESS)
    harness.send(call(1, "stream"))
    harness.wait_record("waited", 5)
    harness.start_reading_output()
    for _ in range(8):
        assert harness.line() == message
    assert harness.line() == result(1)


def test_a_stream_that_waits_for_the_harness_can_be_canceled(start_rat: StartRat, fault_server: FaultServer) -> None:
    message = notification("notifications/message", {"data": "x" * (1 << 20)})

    def behavior(connection: Connection, request: Request) -> bool:
        stream = Stream(connection)
        try:
            while True:
                stream.send(event(message))
                fault_server.report("sent")
        except OSError:
            fault_server.report("gone")
        return False

    behave(fault_server, behavior)
    harness = start_rat(read_output=False)
    harness.send(call(1, "stream"))
    fault_server.wait_report("sent", 3)
    harness.send(cancel(1))
    fault_server.wait_report("gone")
