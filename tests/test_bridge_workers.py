"""How many calls are under way at once, and how many threads that takes."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from fault_server import HANG, Request, Response, answer
from harness import call

if TYPE_CHECKING:
    from conftest import StartRat
    from fault_server import FaultServer


def test_calls_after_many_in_turn_do_not_wait_for_each_other(fault_server: FaultServer, start_rat: StartRat) -> None:
    """One call after the other leaves one thread; those at once after it each get one of their own."""
    rat = start_rat()
    for identifier in range(50):
        rat.call(identifier)
    together = threading.Barrier(8)

    def respond(request: Request) -> Response:
        together.wait(HANG)
        return answer(request)

    fault_server.respond = respond
    rat.send(*(call(f"at once {number}") for number in range(8)))
    assert len(rat.answers(8)) == 8


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts the threads of a process in /proc")
def test_threads_are_as_many_as_calls_at_once(fault_server: FaultServer, start_rat: StartRat) -> None:
    """Calls one after the other do not add threads, in any number."""
    rat = start_rat()

    def threads() -> int:
        return len(os.listdir(f"/proc/{rat.process.pid}/task"))

    for identifier in range(20):
        rat.call(identifier)
    before = threads()
    for identifier in range(20, 1000):
        rat.call(identifier)
    assert threads() <= before + 1  # its worker may still be finishing a call when the next one comes
    assert fault_server.accepted <= 2
