"""Cancellation: the call named ends, in whatever stage it is, and no other."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest
from fault_server import HANG, Connection, ConnectProxy, FaultServer, Response, answer, full_backlog, result
from harness import Harness, call, cancel, large_call, notification

if TYPE_CHECKING:
    from conftest import StartRat
    from fault_server import Request

# Tells on stderr that a connection is being opened: nothing else of the system does.
TELL_CONNECTING = """
connect = rat.Connection._connect_socket
def told(self, *args):
    print("msg=connecting", file=sys.stderr, flush=True)
    return connect(self, *args)
rat.Connection._connect_socket = told
"""


def held(request: Request) -> Response | None:
    """A server's ``respond`` which holds calls of the method wait."""
    return None if b'"wait"' in request.body else answer(request)


def assert_canceled(rat: Harness, identifier: object) -> None:
    """Whether a call ended as canceled: it was told so, and its worker has come to its end."""
    records = rat.wait_record("call canceled")
    assert records[-1]["id"] == str(identifier)
    for count in range(1, 10):
        ended = rat.wait_record("message", count)[-1]
        if ended.get("id") == str(identifier):
            assert "status" not in ended
            return
    raise AssertionError(f"call {identifier} did not end")


def test_a_call_still_queued_is_never_posted(start_rat: StartRat, fault_server: FaultServer) -> None:
    fault_server.respond = held
    rat = start_rat(patch="rat.WORKERS = 1", level="debug")
    rat.send(call(1, "wait"))
    fault_server.wait_requests(1)
    rat.send(call(2), cancel(2), call(3), cancel(1))
    assert rat.answer()["id"] == 3
    assert rat.finish() == (0, [])
    posted = [request.body for request in fault_server.requests]
    assert posted[:3] == [call(1, "wait"), cancel(2), call(3)]
    assert [each["id"] for each in rat.records("call canceled")] == ["2", "1"]


@pytest.mark.skipif(os.name == "nt", reason="a full backlog refuses there")
def test_a_call_connecting(start_rat: StartRat) -> None:
    with full_backlog() as address:
        rat = start_rat(address, patch=TELL_CONNECTING, level="debug")
        rat.send(call(1))
        rat.wait_record("connecting")
        rat.send(cancel(1))
        assert_canceled(rat, 1)
        assert rat.finish() == (0, [])


def test_a_call_whose_name_is_being_resolved(start_rat: StartRat) -> None:
    patch = """
import socket, threading
def stuck(*args, **kwargs):
    print("msg=resolving", file=sys.stderr, flush=True)
    threading.Event().wait()
socket.getaddrinfo = stuck
"""
    rat = start_rat("ratd.example:7433", patch=patch, level="debug")
    rat.send(call(1))
    rat.wait_record("resolving")
    rat.send(cancel(1))
    # Nothing wakes its worker, yet the call is over.
    assert rat.wait_record("call canceled")[0]["id"] == "1"
    assert rat.finish() == (0, [])


def test_a_call_shaking_hands(start_rat: StartRat, fault_server: FaultServer) -> None:
    def silent(connection: Connection) -> None:
        assert connection.receive().startswith(b"\x16")  # a handshake record
        fault_server.report("hello")
        connection.wait_end()
        fault_server.report("gone")

    fault_server.scripts = [silent]
    rat = start_rat(level="debug")
    rat.send(call(1))
    fault_server.wait_report("hello")
    rat.send(cancel(1))
    fault_server.wait_report("gone")
    assert_canceled(rat, 1)
    rat.call(2)
    assert rat.finish() == (0, [])
    assert sorted(request.body for request in fault_server.requests) == sorted([cancel(1), call(2)])


def test_a_call_being_sent(start_rat: StartRat, fault_server: FaultServer) -> None:
    released = threading.Event()

    def deaf(connection: Connection) -> None:
        connection.handshake()
        connection.receive_head()
        fault_server.report("head")
        assert released.wait(HANG)
        connection.wait_end()
        fault_server.report("gone")

    fault_server.scripts = [deaf]
    rat = start_rat(level="debug")
    rat.send(large_call(1, 8 << 20))
    fault_server.wait_report("head")
    rat.send(cancel(1))
    assert_canceled(rat, 1)
    released.set()
    fault_server.wait_report("gone")
    rat.call(2)
    assert rat.finish() == (0, [])


def test_a_call_waiting(start_rat: StartRat, fault_server: FaultServer) -> None:
    fault_server.respond = held
    rat = start_rat(level="debug")
    rat.send(call(1, "wait"))
    fault_server.wait_requests(1)
    rat.send(cancel(1))
    fault_server.wait_report(("gone", call(1, "wait")))
    assert_canceled(rat, 1)
    rat.call(2)
    assert rat.finish() == (0, [])
    # The notification is relayed all the same.
    assert cancel(1) in [request.body for request in fault_server.requests]


@pytest.mark.parametrize("closing", [False, True], ids=["keep-alive", "Connection: close"])
def test_a_call_being_answered(start_rat: StartRat, fault_server: FaultServer, closing: bool) -> None:
    whole = Response(200, result(1, "x" * 100_000), fields=(("Connection", "close"),) if closing else ())

    def half(connection: Connection) -> None:
        connection.handshake()
        fault_server.receive(connection)
        connection.send(whole.encode()[:50_000])
        fault_server.report("half")
        connection.wait_end()
        fault_server.report("gone")

    fault_server.scripts = [half]
    rat = start_rat(level="debug")
    rat.send(call(1))
    fault_server.wait_report("half")
    rat.send(cancel(1))
    fault_server.wait_report("gone")
    assert rat.wait_record("call canceled")[0]["id"] == "1"
    rat.call(2)
    assert rat.finish() == (0, [])


def test_a_call_waiting_for_a_proxy(start_rat: StartRat, proxy: ConnectProxy, fault_server: FaultServer) -> None:
    proxy.stage = "silent"
    rat = start_rat(
        f"ratd.test:{fault_server.port}", patch=proxy.patch, level="debug", environment={"HTTPS_PROXY": proxy.url}
    )
    rat.send(call(1))
    proxy.wait_report("connect")
    rat.send(cancel(1))
    proxy.wait_report("gone")
    assert_canceled(rat, 1)
    assert rat.finish() == (0, [])


def test_a_call_waiting_behind_a_proxy(start_rat: StartRat, proxy: ConnectProxy, fault_server: FaultServer) -> None:
    fault_server.respond = held
    rat = start_rat(
        f"ratd.test:{fault_server.port}", patch=proxy.patch, level="debug", environment={"HTTPS_PROXY": proxy.url}
    )
    rat.send(call(1, "wait"))
    fault_server.wait_requests(1)
    rat.send(cancel(1))
    fault_server.wait_report(("gone", call(1, "wait")))
    assert_canceled(rat, 1)
    rat.call(2)
    assert rat.finish() == (0, [])


# Which call it is


def test_another_identifier_cancels_nothing(start_rat: StartRat, fault_server: FaultServer) -> None:
    released = threading.Event()

    def respond(request: Request) -> Response:
        if b'"held"' in request.body:
            assert released.wait(HANG)
        return answer(request)

    fault_server.respond = respond
    rat = start_rat(level="debug")
    pairs = [(1, "1"), ("1", 1), (1, True), (0, False), ("a", "A"), (1, 2), ("", None)]
    for identifier, other in pairs:
        fault_server.requests.clear()
        released.clear()
        rat.send(call(identifier, "held"), cancel(other))
        fault_server.wait_requests(2)
        released.set()
        assert rat.answer()["id"] == identifier
    assert rat.finish() == (0, [])
    assert rat.records("call canceled") == []


@pytest.mark.parametrize(
    ("line", "canceling"),
    [(call(2, "held"), b"1.0"), (b'{"jsonrpc":"2.0","id":1e0,"method":"held"}', b"1")],
    ids=range(2),
)
def test_equal_numbers_are_one_identifier(
    start_rat: StartRat, fault_server: FaultServer, line: bytes, canceling: bytes
) -> None:
    fault_server.respond = lambda request: None if b"held" in request.body else answer(request)
    rat = start_rat()
    line = line.replace(b'"id":2', b'"id":1')
    rat.send(line)
    fault_server.wait_requests(1)
    rat.send(cancel(1).replace(b'"requestId":1', b'"requestId":' + canceling))
    fault_server.wait_report(("gone", line))
    assert rat.finish() == (0, [])


def test_of_calls_with_one_identifier_the_latest_is_canceled(start_rat: StartRat, fault_server: FaultServer) -> None:
    first = threading.Event()

    def respond(request: Request) -> Response | None:
        if b'"first"' in request.body:
            assert first.wait(HANG)
            return Response(200, result(1, "first"))
        return None if b'"second"' in request.body else answer(request)

    fault_server.respond = respond
    rat = start_rat()
    rat.send(call(1, "first"))
    fault_server.wait_requests(1)
    rat.send(call(1, "second"))
    fault_server.wait_requests(2)
    rat.send(cancel(1))
    fault_server.wait_report(("gone", call(1, "second")))
    first.set()
    assert rat.answer()["result"] == "first"
    assert rat.finish() == (0, [])


def test_a_call_of_a_batch_is_not_canceled(start_rat: StartRat, fault_server: FaultServer) -> None:
    released = threading.Event()

    def respond(request: Request) -> Response:
        if request.body.startswith(b"["):
            assert released.wait(HANG)
        return answer(request)

    fault_server.respond = respond
    rat = start_rat(level="debug")
    rat.send(b"[" + call(1) + b"," + call(2) + b"]", cancel(1))
    fault_server.wait_requests(2)
    released.set()
    assert rat.line() == b"[" + result(1, {"method": "ping"}) + b"," + result(2, {"method": "ping"}) + b"]"
    assert rat.finish() == (0, [])
    assert rat.records("call canceled") == []


def test_what_was_answered_is_canceled_no_more(start_rat: StartRat, fault_server: FaultServer) -> None:
    rat = start_rat(level="debug")
    rat.call(1)
    rat.send(cancel(1))
    rat.wait_record("message", 2)
    rat.call(2)
    assert rat.finish() == (0, [])
    assert rat.records("call canceled") == []
    # The connection it was answered on lives on.
    assert {request.connection for request in fault_server.requests if b'"id"' in request.body} == {0}


def test_a_cancellation_that_names_no_call_is_relayed(start_rat: StartRat, fault_server: FaultServer) -> None:
    released = threading.Event()

    def respond(request: Request) -> Response:
        if b'"held"' in request.body:
            assert released.wait(HANG)
        return answer(request)

    fault_server.respond = respond
    rat = start_rat()
    namings: list[object] = [None, {}, {"requestId": None}, {"requestId": [1]}, {"requestId": {}}, [1], "1"]
    lines = [notification("notifications/cancelled", params) for params in namings]
    rat.send(call(1, "held"), *lines)
    posted = [request.body for request in fault_server.wait_requests(1 + len(lines))]
    assert sorted(posted) == sorted([call(1, "held"), *lines])
    released.set()
    assert rat.answer()["id"] == 1


def test_a_cancellation_ends_no_other_call(start_rat: StartRat, fault_server: FaultServer) -> None:
    released = threading.Event()

    def respond(request: Request) -> Response | None:
        if b'"wait"' in request.body:
            return None
        if b'"held"' in request.body:
            assert released.wait(HANG)
        return answer(request)

    fault_server.respond = respond
    rat = start_rat()
    lines = [call(number, "wait" if number % 2 else "held") for number in range(20)]
    rat.send(*lines)
    fault_server.wait_requests(20)
    rat.send(*[cancel(number) for number in range(1, 20, 2)])
    for line in lines[1::2]:
        fault_server.wait_report(("gone", line))
    released.set()
    answers = [rat.answer() for _ in range(10)]
    assert sorted(str(each["id"]) for each in answers) == sorted(map(str, range(0, 20, 2)))
    assert all("result" in each for each in answers)
    assert rat.finish() == (0, [])


def test_a_connection_that_was_given_back_is_another_calls(start_rat: StartRat, fault_server: FaultServer) -> None:
    """A call is answered, and its connection given to the next, before it is settled: canceled just then, it must
    not end the next one."""
    released = threading.Event()

    def respond(request: Request) -> Response:
        if b'"next"' in request.body:
            assert released.wait(HANG)
        return answer(request)

    fault_server.respond = respond
    # The moment is some microseconds long; it lasts here until the cancellation has come.
    patch = """
import time
settle = rat.InFlight.settle
def slow(self, posting, *args, **kwargs):
    if posting.message.method == "answered":
        print("msg=settling", file=sys.stderr, flush=True)
        while not posting.ended:
            time.sleep(0.001)
    return settle(self, posting, *args, **kwargs)
rat.InFlight.settle = slow
"""
    rat = start_rat(patch=patch)
    rat.send(call(1, "answered"))
    rat.wait_record("settling")
    rat.send(call(2, "next"))
    fault_server.wait_requests(2)
    assert fault_server.accepted == 1
    rat.send(cancel(1))
    fault_server.wait_requests(3)
    released.set()
    assert rat.answer() == {"jsonrpc": "2.0", "id": 2, "result": {"method": "next"}}
    assert rat.finish() == (0, [])
