"""Connections: which is used again and which not, and what stays of thousands of calls."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import threading
import types
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fault_server import HANG, Connection, FaultServer, Response, answer, result, unused_port
from harness import Harness, call, cancel, rat_command

import rat

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import StartRat
    from fault_server import Request, Script


@pytest.fixture
def ratd(fault_server: FaultServer, client_side: Path) -> Iterator[rat.Ratd]:
    """The connections of rat, in this process."""
    made = rat.Ratd(rat.Address.parse(fault_server.address), rat.load_side(str(client_side)))
    yield made
    made.pool.close()


def post(ratd: rat.Ratd, server: FaultServer) -> int:
    """Post a call and return the number of the connection it went over."""
    (received,) = ratd.post(rat.Exchange(call(1)), {}, HANG)
    assert received.body == result(1, {"method": "ping"})
    return server.requests[-1].connection


def test_a_connection_unused_for_ninety_seconds_is_not_used_again(
    ratd: rat.Ratd, fault_server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Clocks of the test's own: it cannot wait, nor suspend the machine.
    clock = types.SimpleNamespace(at=1000.0, wall=5e9)
    fake = types.SimpleNamespace(monotonic=lambda: clock.at, time=lambda: clock.wall)
    monkeypatch.setattr(rat, "time", fake)
    assert rat.IDLE_SECONDS == 90
    assert post(ratd, fault_server) == 0
    clock.at += 89
    clock.wall += 89
    assert post(ratd, fault_server) == 0
    clock.at += 91
    clock.wall += 91
    assert post(ratd, fault_server) == 1
    # The monotonic clock stands still while a machine is suspended.
    clock.wall += 91
    assert post(ratd, fault_server) == 2
    # The wall clock may be set back.
    clock.at += 91
    clock.wall -= 1000
    assert post(ratd, fault_server) == 3
    clock.at += 1
    assert post(ratd, fault_server) == 3


def test_the_connection_used_last_is_used_first(start_rat: StartRat, fault_server: FaultServer) -> None:
    released = threading.Event()

    def respond(request: Request) -> Response:
        if b'"held"' in request.body:
            assert released.wait(HANG)
        return answer(request)

    fault_server.respond = respond
    rat = start_rat()
    rat.send(*[call(number, "held") for number in range(4)])
    fault_server.wait_requests(4)
    released.set()
    rat.answers(4)
    for number in range(10):
        rat.call(number)
    assert fault_server.accepted == 4
    assert len({request.connection for request in fault_server.requests[4:]}) == 1


def test_a_small_request_is_one_write(rat: Harness, fault_server: FaultServer) -> None:
    line = call(1, "tools/call", {"name": "t", "arguments": {"x": "y" * 2000}})

    def script(connection: Connection) -> None:
        for _ in range(2):
            if connection.peer is None:
                connection.handshake()
            # One record of TLS is one read.
            request = connection.receive()
            assert request.startswith(b"POST /mcp HTTP/1.1\r\n")
            assert request.endswith(b"\r\n\r\n" + line)
            connection.respond(Response(200, result(1)))

    fault_server.script = script
    for _ in range(2):
        rat.send(line)
        assert rat.line() == result(1)


def failing(name: str) -> Script:
    """A script of a server that answers no request."""

    def script(connection: Connection) -> None:
        if name == "no TLS":
            connection.send(b"HTTP/1.0 400 Bad Request\r\n\r\n")
            return
        connection.handshake()
        connection.request()
        if name == "reset":
            connection.reset()
        elif name == "no HTTP":
            connection.send(b"hello\r\n\r\n")
        elif name == "cut":
            connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{")
        elif name == "chunks cut":
            connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n")
        elif name == "events cut":
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 99\r\n\r\n"
            connection.send(head + b"data: {}\n\n")

    return script


@pytest.mark.parametrize(
    "name", ["refused", "no host", "no TLS", "reset", "no HTTP", "cut", "chunks cut", "events cut"]
)
def test_a_call_that_failed_leaves_nothing_of_itself(fault_server: FaultServer, client_side: Path, name: str) -> None:
    """Not even until the cycle collector runs: a message may be of 16 MiB, and there may be many."""
    with unused_port() as port:
        address = {"refused": f"127.0.0.1:{port}", "no host": "ratd.invalid:1"}.get(name, fault_server.address)
        fault_server.script = failing(name)
        ratd = rat.Ratd(rat.Address.parse(address), rat.load_side(str(client_side)))
        body = call(1)
        gc.disable()
        try:
            before = sys.getrefcount(body)
            for _ in range(3):
                exchange = rat.Exchange(body)
                with contextlib.suppress(rat.Failure):
                    list(ratd.post(exchange, {}, HANG))
                    raise AssertionError("it was answered")
                exchange.end()
            assert sys.getrefcount(body) == before
            assert ratd.pool._get_conn().is_closed
        finally:
            gc.enable()
            ratd.pool.close()


def test_what_is_canceled_is_not_held_by_its_worker(
    ratd: rat.Ratd, fault_server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may be in name resolution for as long as the resolver takes."""
    resolving, resolved = threading.Event(), threading.Event()
    resolve = socket.getaddrinfo

    def slow(*arguments: object, **named: object) -> object:
        resolving.set()
        assert resolved.wait(HANG)
        return resolve(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    body = call(1)
    before = sys.getrefcount(body)
    exchange = rat.Exchange(body)
    failures: list[rat.Failure] = []

    def work() -> None:
        try:
            list(ratd.post(exchange, {}, HANG))
        except rat.Failure as e:
            failures.append(e)

    worker = threading.Thread(target=work)
    worker.start()
    assert resolving.wait(HANG)
    assert sys.getrefcount(body) > before
    exchange.end()
    assert sys.getrefcount(body) == before
    resolved.set()
    worker.join(HANG)
    assert len(failures) == 1
    assert fault_server.accepted == 0


def test_small_writes_do_not_wait(ratd: rat.Ratd, fault_server: FaultServer, monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[int] = []
    connect = rat.Connection._connect_socket

    def told(self: rat.Connection, sock: socket.socket, *arguments: object) -> None:
        connect(self, sock, *arguments)  # type: ignore[arg-type]
        options.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(rat.Connection, "_connect_socket", told)
    post(ratd, fault_server)
    assert len(options) == 1
    assert options[0] != 0


def test_the_client_is_who_its_certificate_says(start_rat: StartRat, fault_server: FaultServer) -> None:
    peers: list[tuple[str | None, str | None]] = []

    def script(connection: Connection) -> None:
        connection.handshake()
        peers.append((connection.peer, connection.socket.version()))  # type: ignore[attr-defined]
        while fault_server.exchange(connection):
            pass

    fault_server.script = script
    start_rat().call(1)
    assert peers == [("laptop", "TLSv1.3")]


@pytest.mark.parametrize("variable", ["PYTHONUNBUFFERED", "PYTHONASYNCIODEBUG"])
def test_python_s_own_variables_change_nothing(start_rat: StartRat, variable: str) -> None:
    rat = start_rat(environment={variable: "1"})
    rat.call(1)
    assert rat.finish() == (0, [])


@pytest.mark.skipif(os.name == "nt", reason="pipes of Windows are another matter")
def test_non_blocking_streams_lose_nothing(start_rat: StartRat, fault_server: FaultServer) -> None:
    body = result(1, "x" * (4 << 20))
    fault_server.respond = lambda request: Response(200, body)
    rat = start_rat(blocking=False, read_output=False)
    rat.send(call(1), call(1))
    fault_server.wait_requests(2)
    rat.start_reading_output()  # later than the pipe is full
    assert rat.line() == body
    assert rat.line() == body
    assert rat.finish() == (0, [])


@pytest.mark.skipif(os.name == "nt", reason="needs a shell of POSIX")
def test_a_closed_stderr_is_not_a_socket(fault_server: FaultServer, client_side: Path) -> None:
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *rat_command()]
    flags = ["--server", fault_server.address, "--bundle", str(client_side), "--log-level", "debug"]
    harness = Harness([*command, *flags])
    try:
        for number in range(3):
            harness.call(number)
        assert harness.finish() == (0, [])
    finally:
        harness.close()
    assert [request.body for request in fault_server.requests] == [call(0), call(1), call(2)]


def test_what_a_library_prints_is_no_message(start_rat: StartRat) -> None:
    patch = """
post = rat.Ratd.post
def printing(*args):
    print("stray", flush=True)
    return post(*args)
rat.Ratd.post = printing
"""
    rat = start_rat(patch=patch)
    rat.call(1)
    assert rat.finish() == (0, [])


# Thousands of calls


class Use:
    """What a process holds of the system, where that can be told (Linux)."""

    def __init__(self, process: int) -> None:
        root = Path(f"/proc/{process}")
        self.descriptors = len(list((root / "fd").iterdir()))
        self.threads = len(list((root / "task").iterdir()))
        status = (root / "status").read_text()
        self.kilobytes = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def test_nothing_grows_and_nobody_gets_anothers_answer(start_rat: StartRat, fault_server: FaultServer) -> None:
    def respond(request: Request) -> Response | None:
        message = request.message
        assert isinstance(message, dict)
        if message["method"] == "wait":
            return None
        return Response(200, result(message["id"], message["params"])) if "id" in message else Response(202)

    fault_server.respond = respond
    rat = start_rat()
    before: Use | None = None
    calls = cancellations = 0
    for number in range(100):
        waits = [f"w{number}-{each}" for each in range(5)]
        lines = [call(wait, "wait", {}) for wait in waits]
        tokens = {f"c{number}-{each}": {"token": f"{number}/{each}"} for each in range(20)}
        lines[2:2] = [call(identifier, "echo", token) for identifier, token in tokens.items()]
        # Some waits are canceled while queued or connecting, the others somewhere later.
        rat.send(*lines, *map(cancel, waits[:2]))
        for _ in range(10):
            answered = rat.answer()
            assert tokens.pop(str(answered["id"])) == answered["result"]
        rat.send(*map(cancel, waits[2:]))
        for _ in range(10):
            answered = rat.answer()
            assert tokens.pop(str(answered["id"])) == answered["result"]
        assert not tokens
        calls += 20
        cancellations += 5
        if number == 20 and os.path.exists("/proc/self/fd"):
            before = Use(rat.process.pid)
    assert (calls, cancellations) == (2000, 500)
    if before is not None:
        after = Use(rat.process.pid)
        # As many as there are calls at once, thirty or somewhat more on a slow machine: not one a call.
        assert after.descriptors < 100
        assert after.threads < 100
        assert after.kilobytes < before.kilobytes + 8 * 1024
    assert rat.finish() == (0, [])
    assert not [line for line in rat.log if "WARN" in line]
