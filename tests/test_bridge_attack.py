"""What a hostile server, a strange environment or a system that gives nothing can do: no more than earn an error."""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import socket
import ssl
import sys
from typing import TYPE_CHECKING

import pytest
from fault_server import Connection, FaultServer, Response, answer, result
from harness import RAT, Harness, call, large_call, rat_command, read_record, run_rat

import rat as bridge

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Conversation, StartRat


# Heads of a response


class Received:
    """In place of a socket: what it would receive."""

    def __init__(self, received: bytes) -> None:
        self.received = received

    def makefile(self, mode: str) -> io.BufferedReader:
        """As a socket's."""
        return io.BufferedReader(io.BytesIO(self.received))  # type: ignore[arg-type]


def read_head(head: bytes) -> bridge.Response:
    """The response with a head, which ends in line feeds alone."""
    response = bridge.Response(Received(head.replace(b"\n", b"\r\n")), method="POST")  # type: ignore[arg-type]
    response.begin()
    return response


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        (b"Content-Length: 5\n", 5),
        (b"Content-Length:005 \n", 5),
        (b"Content-Length: 5\nContent-Length: 5\n", 5),
        (b"Content-Length: 5, 5\n", 5),
        (b"Content-Length: 5\nContent-Length: 6\nTransfer-Encoding: chunked\n", None),
        (b"Content-Length: 5\nTransfer-Encoding: Chunked\n", None),
        (b"Content-Length : 5\n", None),
        (b"X: y\n Content-Length: 5\n", None),
    ],
)
def test_a_length_is_digits(fields: bytes, length: int | None) -> None:
    response = read_head(b"HTTP/1.1 200 OK\n" + fields + b"\n")
    assert response.length == length
    # What has no length ends with its connection.
    assert response.will_close == (length is None and not response.chunked)


@pytest.mark.parametrize("status", [101, 204, 304])
@pytest.mark.parametrize("fields", [b"", b"Content-Length: 5\n", b"Transfer-Encoding: chunked\n"])
def test_some_statuses_have_no_body_whatever_their_head_says(status: int, fields: bytes) -> None:
    response = read_head(b"HTTP/1.1 %d Status\n%s\nhello" % (status, fields))
    assert response.read1(10) == b""


@pytest.mark.parametrize("field", [b"Two Words: x", b"X\x0b: y", b": y", b"\xe9: y", b" folded", b"\tof: two"])
def test_a_field_without_a_proper_name_is_passed_over(field: bytes) -> None:
    response = read_head(b"HTTP/1.1 200 OK\nA: b\n" + field + b"\nC: d\n\n")
    assert response.headers.items() == [("A", "b"), ("C", "d")]


BROKEN_HEADS = {
    "no version": b"OK\r\n\r\n",
    "version 2": b"HTTP/2 200 OK\r\n\r\n",
    "version 0.9": b"HTTP/0.9 200 OK\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "status of four digits": b"HTTP/1.1 1000 OK\r\n\r\n",
    "a line that is no field": b"HTTP/1.1 200 OK\r\nContent-Length 5\r\n\r\n",
    "a field over 64 KiB": b"HTTP/1.1 200 OK\r\nX: " + b"x" * 70_000 + b"\r\n\r\n",
    "100 fields": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100 + b"\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    "two lengths in a field": b"HTTP/1.1 200 OK\r\nContent-Length: 5, 6\r\n\r\n",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
    "a length with a sign": b"HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\n",
    "a length with an underscore": b"HTTP/1.1 200 OK\r\nContent-Length: 5_0\r\n\r\n",
    "a length of another script": b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n",
    "a length of thousands of digits": b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
    "no length where one is due": b"HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\n",
    "another coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\nContent-Length: 5\r\n\r\nhello",
    "two codings": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: gzip\r\n\r\n",
}


@pytest.mark.parametrize("head", BROKEN_HEADS.values(), ids=list(BROKEN_HEADS))
def test_a_broken_head_is_no_response(conversation: Conversation, head: bytes) -> None:
    server, harness = conversation

    def script(connection: Connection) -> None:
        connection.handshake()
        assert server.receive(connection)
        connection.send(head)
        connection.wait_end()

    server.cut_all()
    server.scripts = [script]
    harness.send(call(1))
    assert harness.error(1) == f"ratd at {server.address} sent an invalid response: not an HTTP response"
    assert harness.call(2)["result"] == {"method": "ping"}


# What comes after a response


def head(fields: str, status: int = 200) -> bytes:
    return f"HTTP/1.1 {status} Status\r\nContent-Type: {fields}\r\n\r\n".encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


KNOWN = head(f"application/json\r\nContent-Length: {len(result(1))}") + result(1)
CHUNKED = head("application/json\r\nTransfer-Encoding: chunked")
EVENTS = head("text/event-stream\r\nTransfer-Encoding: chunked") + chunk(b"data: " + result(1) + b"\n\n")
CUT = "sent an invalid response: it ended after {} bytes"
NONE = "sent an invalid response: none to the call (HTTP {})"

# What a server sends to a first call, and what the harness reads of it: the response when that is empty.
LEFTOVERS = {
    "a chunk of no size": (CHUNKED + b"zz\r\n", CUT.format(0)),
    "a chunk of an empty size": (CHUNKED + b"\r\n", CUT.format(0)),
    "a chunk of no size after another": (CHUNKED + chunk(result(1)) + b"zz\r\n", CUT.format(len(result(1)))),
    "events, then a chunk of no size": (EVENTS + b"zz\r\n", ""),
    "events, then an empty line": (EVENTS + b"\r\n", ""),
    "half a head": (KNOWN + b"HTTP/1.1 200 OK\r\nX: ", ""),
    "half a head after chunks": (CHUNKED + chunk(result(1)) + b"0\r\n\r\nHTTP/1.1 200 OK\r\nX: ", ""),
    "half a head after events": (EVENTS + b"0\r\n\r\nHTTP/1.1 20", ""),
    "half a line end": (KNOWN + b"\r", ""),
    "a whole response": (KNOWN + KNOWN, ""),
    "204 with a length": (head("x\r\nContent-Length: 5", 204), NONE.format(204)),
    "204 with chunks": (head("x\r\nTransfer-Encoding: chunked", 204), NONE.format(204)),
    "304 with a length": (head("x\r\nContent-Length: 5", 304), "not a JSON-RPC response to the call (HTTP 304)"),
}


@pytest.mark.parametrize(("sent", "error"), LEFTOVERS.values(), ids=list(LEFTOVERS))
def test_a_connection_on_which_more_may_follow_is_not_used_again(
    conversation: Conversation, sent: bytes, error: str
) -> None:
    """Whatever follows, a call would take it for its answer."""
    server, harness = conversation

    def script(connection: Connection) -> None:
        connection.handshake()
        assert server.receive(connection)
        connection.send(sent)
        if server.receive(connection):
            connection.respond(Response(200, result(2, "of another")))

    server.cut_all()
    server.scripts = [script]
    harness.send(call(1))
    if error:
        assert harness.error(1).endswith(error)
    else:
        assert harness.line() == result(1)
    assert harness.call(2)["result"] == {"method": "ping"}


def test_a_response_to_another_call_costs_one_call(conversation: Conversation) -> None:
    """The response to the call itself comes later, and would be taken for that to the next, without end."""
    server, harness = conversation

    def script(connection: Connection) -> None:
        connection.handshake()
        late = server.receive(connection)
        assert late is not None
        connection.respond(Response(200, result("stray")))
        while request := server.receive(connection):
            connection.respond(answer(late))
            late = request

    server.cut_all()
    server.scripts = [script]
    harness.send(call(1))
    assert harness.error(1).endswith("not a JSON-RPC response to the call (HTTP 200)")
    for identifier in range(2, 5):
        assert harness.call(identifier)["result"] == {"method": "ping"}


def test_an_alert_amid_a_connection_is_no_refusal(conversation: Conversation) -> None:
    """It is of a record that was damaged on its way; the bundle is good."""
    server, harness = conversation

    def script(connection: Connection) -> None:
        connection.handshake()
        assert server.exchange(connection)
        with socket.socket(fileno=os.dup(connection.socket.fileno())) as raw:
            # A record that is lost makes the next one unreadable.
            start = raw.recv(5, socket.MSG_WAITALL)
            raw.recv(int.from_bytes(start[3:], "big"), socket.MSG_WAITALL)
            with pytest.raises(ssl.SSLError):
                connection.receive()
            while raw.recv(65536):
                pass

    server.cut_all()
    server.scripts = [script]
    harness.call(1)
    harness.send(large_call(2, 100_000))
    pattern = rf"ratd at {server.address} sent an invalid response: (sslv3|ssl/tls) alert bad record mac"
    assert re.fullmatch(pattern, harness.error(2))
    assert harness.call(3)["result"] == {"method": "ping"}


# Bodies


ENDLESS = {
    "trailers": b"5\r\n%s\r\n0\r\n" % result(1)[:5] + b"X: y\r\n" * 200,
    "a trailer": b"0\r\nX: " + b"x" * 70_000,
}


@pytest.mark.parametrize("body", ENDLESS.values(), ids=list(ENDLESS))
def test_trailers_without_end_are_not_read(conversation: Conversation, body: bytes) -> None:
    server, harness = conversation

    def script(connection: Connection) -> None:
        connection.handshake()
        assert server.receive(connection)
        connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", body)
        connection.wait_end()

    server.cut_all()
    server.scripts = [script]
    harness.send(call(1))
    assert harness.error(1) == f"ratd at {server.address} sent an invalid response: not an HTTP response"


# What the system does not give


WAIT = call(1, "tools/call", {"name": "wait_window"})


def test_a_copy_of_the_file_alone_knows_no_schema(
    client_side: Path, tmp_path: Path, conversation: Conversation
) -> None:
    shutil.copy(RAT, tmp_path)
    command = [sys.executable, str(tmp_path / "rat.py"), "--server", conversation.server.address]
    harness = Harness([*command, "--bundle", str(client_side)])
    try:
        harness.send(WAIT)
        assert harness.line() == result(1, {"method": "tools/call"})
    finally:
        harness.close()


def test_a_schema_that_cannot_be_opened_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exhausted:
        """A loader while too many files are open, which a test cannot have without ending itself."""

        def get_data(self, path: str) -> bytes:
            raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(bridge, "_schemas", {})
    with monkeypatch.context() as patch:
        patch.setattr(bridge, "__loader__", Exhausted())
        assert bridge.read_message(WAIT).wait == 0
    assert bridge.read_message(WAIT).wait == 20


@pytest.mark.parametrize("digits", ["640", "0"])
def test_the_digits_of_integers_are_not_for_the_environment_to_limit(
    start_rat: StartRat, fault_server: FaultServer, digits: str
) -> None:
    fault_server.respond = lambda request: Response(500)
    rat = start_rat(environment={"PYTHONINTMAXSTRDIGITS": digits})
    for count in (1000, 5000, 1_000_000):  # the last would take int() seconds
        rat.send(call(1).replace(b'"id":1', b'"id":' + b"1" * count))
        assert rat.line().startswith(b'{"jsonrpc":"2.0","id":' + b"1" * count + b",")


# A system without threads cannot be had in a test: the limit of them is one for all of a user's processes.
NO_THREADS = """
import threading
start = threading.Thread.start
def limited(self):
    if self.name == {name!r}:
        raise RuntimeError("can't start new thread")
    start(self)
threading.Thread.start = limited
"""


@pytest.mark.parametrize("name", ["log", "writer", "reader", "deadline"])
def test_without_threads_it_says_so_and_ends(client_side: Path, name: str) -> None:
    flags = ["--server", "127.0.0.1:1", "--bundle", str(client_side)]
    status, output, errors = run_rat(flags, command=rat_command(NO_THREADS.format(name=name)))
    assert (status, output) == (1, "")
    if name == "log":
        assert errors == "rat: can't start new thread\n"
    else:
        assert read_record(errors.splitlines()[-1])["reason"] == f"the {name} thread failed: can't start new thread"
