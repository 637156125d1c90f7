"""Limits of the system: descriptors and threads."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from endurance import tell
from fault_server import HANG, Request, Response, answer
from harness import call

if TYPE_CHECKING:
    from conftest import StartRat
    from fault_server import FaultServer
    from harness import Harness

pytestmark = pytest.mark.skipif(os.name == "nt", reason="limits of POSIX")

DESCRIPTORS = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))"

# Set when all else was started, a few threads above what it takes. As root, whom the limit does not bind, after
# becoming a user who has no other process.
THREADS = """
import encodings.idna, os, resource  # one codec is loaded late, from files that this user may not read
run = rat.Relay.run
def run_limited(self):
    if os.getuid() == 0:
        used = 0
    else:
        used = sum(
            len(os.listdir(f"/proc/{process}/task"))
            for process in os.listdir("/proc")
            if process.isdigit() and os.stat(f"/proc/{process}").st_uid == os.getuid()
        )
    limit = used + EXTRA
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
    if os.getuid() == 0:
        own = 100_000 + os.getpid()
        os.setgid(own)
        os.setuid(own)
    return run(self)
rat.Relay.run = run_limited
"""

# Set when all else was started: what the threads and a large line take, and not what its values do.
MEMORY = """
import resource
dispatch = rat.Relay._dispatch
def dispatch_limited(self, line):
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), resource.RLIM_INFINITY))
    dispatch(self, line)
rat.Relay._dispatch = dispatch_limited
"""


class Gate:
    """Holds every call until it is opened."""

    def __init__(self, server: FaultServer) -> None:
        self._opened = threading.Event()
        server.respond = self._respond

    def _respond(self, request: Request) -> Response:
        self._opened.wait(HANG)
        return answer(request)

    def open(self) -> None:
        """Have all calls answered, those that come later, too."""
        self._opened.set()


def errors(rat: Harness, answers: list[dict[str, object]]) -> list[str]:
    """The messages of the errors among some answers."""
    found = [each["error"] for each in answers if "error" in each]
    return [str(error["message"]) for error in found if isinstance(error, dict)]


def test_without_descriptors_a_call_fails_and_the_bridge_goes_on(
    fault_server: FaultServer, start_rat: StartRat
) -> None:
    gate = Gate(fault_server)
    rat = start_rat(patch=DESCRIPTORS)
    rat.send(*(call(number) for number in range(100)))
    # Those that have a connection wait for the gate; the others fail before it is opened.
    failed = [rat.answer() for _ in range(36)]
    texts = errors(rat, failed)
    assert len(texts) == 36
    assert set(texts) == {f"ratd unreachable at {fault_server.address}: too many open files"}
    gate.open()
    rest = [rat.answer() for _ in range(64)]
    assert {str(each["id"]) for each in failed + rest} == {str(number) for number in range(100)}
    answered = len(rest) - len(errors(rat, rest))
    assert 30 < answered <= 64
    assert rat.call("after")["result"] == {"method": "ping"}
    assert rat.finish() == (0, [])
    tell(
        f"100 calls at once with 64 descriptors: {answered} answered, {100 - answered} told so; the next one answered."
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
@pytest.mark.parametrize("workers", [0, 5])
def test_without_threads_calls_wait_or_fail_and_the_bridge_goes_on(
    fault_server: FaultServer, start_rat: StartRat, workers: int
) -> None:
    """With no worker each call fails; with a few, the others wait for them."""
    # As root all of its own: the main thread, log, writer, reader and deadline. Otherwise the first two are counted.
    limit = 5 + workers if os.getuid() == 0 else 3 + workers
    rat = start_rat(patch=THREADS.replace("EXTRA", str(limit)))
    rat.send(*(call(number) for number in range(50)))
    answers = rat.answers(50)
    if workers == 0:
        assert set(errors(rat, answers)) == {"rat cannot relay the message: can't start new thread"}
        assert len(errors(rat, answers)) == 50
    elif os.getuid() == 0:
        assert errors(rat, answers) == []
        assert 1 <= fault_server.accepted <= workers
        tell(f"50 calls at once where {workers} threads can be started: all answered, over {workers} connections.")
    after = rat.call("after")
    assert ("result" in after) == (workers > 0)
    assert rat.finish() == (0, [])


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can become a user without threads")
def test_without_threads_for_itself_it_ends_saying_so(start_rat: StartRat) -> None:
    rat = start_rat(patch=THREADS.replace("EXTRA", "2"))
    assert rat.wait() == 1
    assert rat.wait_record("stopped")[0]["reason"] == "the writer thread failed: can't start new thread"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads its memory in /proc")
def test_without_memory_for_a_message_it_is_answered_and_the_bridge_goes_on(
    fault_server: FaultServer, start_rat: StartRat
) -> None:
    rat = start_rat(patch=MEMORY)
    assert rat.call("before")["result"] == {"method": "ping"}
    many = b"[" + b"{}," * 5_000_000 + b"{}]"  # 64 bytes each, once they are read
    rat.send(b'{"jsonrpc":"2.0","id":1,"method":"m","params":{"a":%s}}' % many)
    answered = rat.answer()
    assert answered["id"] is None
    assert errors(rat, [answered]) == ["rat cannot relay the message: out of memory"]
    assert rat.call("after")["result"] == {"method": "ping"}
    assert rat.finish() == (0, [])
