"""Every way to end a busy process, at random moments."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
from endurance import FULL, accidents, responses, sized, tell
from fault_server import Request, Response, answer
from harness import call, cancel, large_call, notification

if TYPE_CHECKING:
    from conftest import StartRat
    from fault_server import FaultServer

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals and pipes of POSIX")

WAYS = ("end of input", "SIGTERM", "SIGINT", "SIGTERM and SIGINT", "end of output")


def test_it_is_gone_at_once_from_any_moment(fault_server: FaultServer, start_rat: StartRat) -> None:
    """Exit status as documented, no line cut or made up, and the server sees every call in flight end."""
    runs = sized(10, 300)
    chance = accidents()

    def respond(request: Request) -> Response | None:
        message = request.message
        return None if isinstance(message, dict) and message.get("method") == "wait" else answer(request)

    fault_server.respond = respond
    seconds = []
    for number in range(runs):
        way = WAYS[number % len(WAYS)]
        rat = start_rat(read_output=way != "end of output")
        lines = [call(f"{each}", chance.choice(("ping", "ping", "wait"))) for each in range(60)]
        lines[chance.randrange(60)] = large_call("large", 500_000)
        lines += [notification("notifications/x"), cancel("7"), b"[" + call("batch") + b"]"]
        chance.shuffle(lines)
        asked = fault_server.accepted
        rat.send(call("first"))
        fault_server.wait_accepted(asked + 1)
        rat.send(*lines)
        time.sleep(chance.random() / 20)  # the moment
        began = time.monotonic()
        if way == "end of input":
            rat.end_input()
        elif way == "end of output":
            rat.close_output()
            rat.send(call("to be answered"))  # it is noticed by whoever writes
        else:
            for name in way.split(" and "):
                rat.signal(signal.Signals[name])
        status = rat.process.wait()  # no timeout, by which Python would look only now and then; there is a watchdog
        seconds.append(time.monotonic() - began)
        assert status == (1 if way == "end of output" else 0), (way, rat.log)
        fault_server.wait_open(0)
        if way != "end of output":
            for line in rat.unread():
                assert responses(line)
        rat.close()
    seconds.sort()
    worst, most = seconds[-1], seconds[int(len(seconds) * 0.99) - 1]
    if FULL:
        assert most <= 0.2
    tell(
        f"{runs} ends of a busy process at random moments ({', '.join(WAYS)}): gone after "
        f"{seconds[len(seconds) // 2] * 1e3:.0f} ms at the median, {most * 1e3:.0f} ms at the 99th percentile, "
        f"{worst * 1e3:.0f} ms at worst; the server saw every connection end."
    )
