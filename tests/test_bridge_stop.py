"""Stopping: whatever it is told by, whatever it is amid, the process is gone at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from fault_server import Connection, FaultServer, Response, full_backlog, result
from harness import Harness, call, large_call, rat_command
from test_bridge_cancellation import TELL_CONNECTING
from test_bridge_failures import STUCK_RESOLUTION

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import StartRat

# Seconds that tell a process which hangs from one on its way out on a busy machine. It is gone
# in a tenth of this where nothing else runs, which benchmarks/ measures.
SOON = 2.0

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals and pipes of POSIX")

STATES = ("idle", "waiting", "connecting", "resolving", "shaking hands", "sending", "reading")


@contextlib.contextmanager
def amid(state: str, start_rat: StartRat, server: FaultServer, read_output: bool = True) -> Iterator[Harness]:
    """A rat with calls in a state, at the end of which it is told to stop."""
    with contextlib.ExitStack() as stack:
        if state == "connecting":
            address = stack.enter_context(full_backlog())
            rat = start_rat(address, patch=TELL_CONNECTING, read_output=read_output)
        elif state == "resolving":
            rat = start_rat("ratd.test:7433", patch=STUCK_RESOLUTION, read_output=read_output)
        else:
            rat = start_rat(read_output=read_output)
        rat.wait_record("relaying")
        if state == "waiting":
            server.respond = lambda request: None
            rat.send(call(1), call(2), b"[" + call(3) + b"]", b'{"method":"notifications/x"}')
            server.wait_requests(4)
        elif state in ("connecting", "resolving"):
            rat.send(call(1), call(2))
            rat.wait_record(state, 2)
        elif state == "shaking hands":

            def silent(connection: Connection) -> None:
                connection.receive()
                server.report("hello")
                connection.wait_end()

            server.script = silent
            rat.send(call(1), call(2))
            server.wait_report("hello", 2)
        elif state == "sending":

            def deaf(connection: Connection) -> None:
                connection.handshake()
                server.report("shaken")
                server.wait_report("stopped")
                connection.wait_end()

            server.script = deaf
            rat.send(large_call(1, 8 << 20))
            server.wait_report("shaken")
            stack.callback(server.report, "stopped")
        elif state == "reading":

            def half(connection: Connection) -> None:
                connection.handshake()
                server.receive(connection)
                connection.send(Response(200, result(1, "x" * 50_000)).encode()[:20_000])
                server.report("half")
                connection.wait_end()

            server.script = half
            rat.send(call(1))
            server.wait_report("half")
        yield rat


def assert_gone(rat: Harness, status: int, reason: str, since: float) -> None:
    """Whether the process ended soon, for a reason, and said so."""
    assert rat.wait() == status
    assert time.monotonic() - since < SOON
    (record,) = rat.wait_record("stopped")
    assert (record["level"], record["reason"]) == ("INFO", reason)
    assert not [each for each in rat.records() if each["msg"] == "relay failed"]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    ("end", "reason"),
    [("input", "end of input"), (signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")],
    ids=["end of input", "SIGTERM", "SIGINT"],
)
def test_stop(
    start_rat: StartRat, fault_server: FaultServer, state: str, end: str | signal.Signals, reason: str
) -> None:
    with amid(state, start_rat, fault_server) as rat:
        since = time.monotonic()
        if isinstance(end, str):
            rat.end_input()
        else:
            rat.signal(end)
        assert_gone(rat, 0, reason, since)
        # Nothing is written for the calls that were ended.
        assert rat.unread() == []


@pytest.mark.parametrize("state", ["idle", "waiting", "connecting"])
def test_an_output_that_is_closed(start_rat: StartRat, fault_server: FaultServer, state: str) -> None:
    with amid(state, start_rat, fault_server, read_output=False) as rat:
        rat.close_output()
        since = time.monotonic()
        rat.send(b"[1")  # the answer to it cannot be written
        assert rat.wait() == 1
        assert time.monotonic() - since < SOON
        (record,) = rat.wait_record("stopped")
        assert record["reason"] == "cannot write the output: broken pipe"


@pytest.mark.parametrize("state", ["idle", "waiting", "connecting"])
@pytest.mark.parametrize("end", ["input", signal.SIGTERM, signal.SIGINT], ids=["end of input", "SIGTERM", "SIGINT"])
def test_an_output_that_is_blocked(
    start_rat: StartRat, fault_server: FaultServer, state: str, end: str | signal.Signals
) -> None:
    with amid(state, start_rat, fault_server, read_output=False) as rat:
        # More than a pipe holds.
        rat.send(*[b"[1"] * 1000)
        rat.wait_record("relay failed", 1000)
        since = time.monotonic()
        if isinstance(end, str):
            rat.end_input()
        else:
            rat.signal(end)
        assert rat.wait() == 0
        assert time.monotonic() - since < SOON


def test_a_log_that_is_blocked(start_rat: StartRat, fault_server: FaultServer) -> None:
    rat = start_rat(read_errors=False)
    for _ in range(20):
        rat.send(*[b"[1"] * 100)
        for _ in range(100):
            rat.line()
    since = time.monotonic()
    rat.end_input()
    assert rat.wait() == 0
    assert time.monotonic() - since < SOON


def test_both_blocked(start_rat: StartRat, fault_server: FaultServer) -> None:
    rat = start_rat(read_errors=False, read_output=False)
    rat.send(call(1))
    fault_server.wait_requests(1)  # it has started
    rat.send(*[b"[1"] * 3000)
    since = time.monotonic()
    rat.signal(signal.SIGTERM)
    assert rat.wait() == 0
    assert time.monotonic() - since < SOON


def test_an_input_that_cannot_be_read(start_rat: StartRat, fault_server: FaultServer, client_side: Path) -> None:
    # A stdin opened for writing only.
    command = ["sh", "-c", 'exec "$@" 0>/dev/null', "sh", *rat_command()]
    harness = Harness([*command, "--server", fault_server.address, "--bundle", str(client_side)])
    try:
        assert harness.wait() == 1
        (record,) = harness.wait_record("stopped")
        assert record["reason"] == "cannot read the input: bad file descriptor"
    finally:
        harness.close()


def test_answers_that_were_queued_are_written(start_rat: StartRat, fault_server: FaultServer) -> None:
    rat = start_rat(patch="rat.LAST_ANSWERS_SECONDS = 20")
    rat.write(b"[1\n" * 200)
    status, lines = rat.finish()
    assert status == 0
    assert [json.loads(line)["error"]["code"] for line in lines] == [-32700] * 200


def test_a_large_answer_on_its_way_out_is_written_whole(start_rat: StartRat, fault_server: FaultServer) -> None:
    body = result(1, "x" * (8 << 20))
    fault_server.respond = lambda request: Response(200, body)
    # How much time they get is not what is tested: a machine that is busy may need more.
    rat = start_rat(level="debug", patch="rat.LAST_ANSWERS_SECONDS = 20")
    rat.send(call(1))
    rat.wait_record("message")  # which is logged once its line is queued
    assert rat.finish() == (0, [body])


def test_a_second_signal_changes_nothing(start_rat: StartRat, fault_server: FaultServer) -> None:
    with amid("waiting", start_rat, fault_server) as rat:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
            rat.signal(number)
        assert rat.wait() == 0
        assert len(rat.wait_record("stopped")) == 1


def test_a_server_sees_the_calls_ended(start_rat: StartRat, fault_server: FaultServer) -> None:
    fault_server.respond = lambda request: None
    rat = start_rat()
    rat.send(call(1), call(2))
    fault_server.wait_requests(2)
    rat.end_input()
    for number in (1, 2):
        fault_server.wait_report(("gone", call(number)))
    assert rat.wait() == 0
