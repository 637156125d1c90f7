"""Clocks that are set, and machines that are suspended."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from endurance import tell
from harness import call

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import StartRat
    from fault_server import FaultServer

# Clocks of the test's own, which cannot suspend a machine: real ones plus what a file says. Waiting is left to the real
# one.
CLOCKS = """
import time, types
def shifted(name, line):
    real = getattr(time, name)
    return lambda: real() + float(open(PATH).read().split()[line])
rat.time = types.SimpleNamespace(monotonic=shifted("monotonic", 0), time=shifted("time", 1))
rat.REQUEST_SECONDS = LIMIT
"""

HOUR = 3600.0
YEAR = 365 * 24 * HOUR


class Clocks:
    """How far the clocks of a process are from the real ones, in seconds."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.set(0, 0)

    def set(self, monotonic: float, wall: float) -> None:
        """Set both."""
        moved = self._path.with_suffix(".new")
        moved.write_text(f"{monotonic}\n{wall}\n")
        moved.replace(self._path)

    def patch(self, seconds: float) -> str:
        """What has rat follow them, with so many seconds for a request."""
        return CLOCKS.replace("PATH", repr(str(self._path))).replace("LIMIT", str(seconds))


@pytest.fixture
def clocks(tmp_path: Path) -> Clocks:
    return Clocks(tmp_path / "clocks")


@pytest.mark.parametrize("wall", [-YEAR, YEAR], ids=["back", "forth"])
def test_a_call_keeps_its_time_when_the_clock_is_set(
    fault_server: FaultServer, start_rat: StartRat, clocks: Clocks, wall: float
) -> None:
    """A call in flight neither ends early nor lasts longer for it."""
    rat = start_rat(patch=clocks.patch(1))
    fault_server.respond = lambda request: None
    began = time.monotonic()
    rat.send(call(1))
    fault_server.wait_requests(1)
    clocks.set(0, wall)
    assert rat.error(1) == f"ratd at {fault_server.address} did not answer within 1s"
    assert time.monotonic() - began >= 1


def test_connections_are_not_trusted_after_a_suspension(
    fault_server: FaultServer, start_rat: StartRat, clocks: Clocks
) -> None:
    """Whichever of the two clocks tells of it; nor are those that a clock set back would make look young."""
    rat = start_rat(patch=clocks.patch(30))
    expected = 0
    for monotonic, wall, anew in (
        (0, 0, True),
        (0, 60, False),
        (0, 60 + HOUR, True),  # suspended: the monotonic clock of Linux and macOS stands still
        (0, 60 + 2 * HOUR, True),
        (HOUR, 60 + 3 * HOUR, True),  # suspended: that of Windows goes on
        (HOUR, 0, False),  # set back
        (HOUR + 91, -YEAR, True),  # set back while it was idle
        (HOUR + 120, YEAR, True),  # set forth: as good as suspended
    ):
        clocks.set(monotonic, wall)
        rat.call(f"{monotonic} {wall}")
        expected += anew
        assert fault_server.accepted == expected, (monotonic, wall)


def test_calls_in_flight_end_after_a_suspension(fault_server: FaultServer, start_rat: StartRat, clocks: Clocks) -> None:
    """A call whose time went by during a suspension ends as late at its deadline, and the next is answered."""
    rat = start_rat(patch=clocks.patch(2))
    respond = fault_server.respond
    fault_server.respond = lambda request: None
    rat.send(call(1))
    fault_server.wait_requests(1)
    clocks.set(HOUR, HOUR)
    assert rat.error(1) == f"ratd at {fault_server.address} did not answer within 2s"
    fault_server.respond = respond
    assert rat.call(2)["result"] == {"method": "ping"}
    tell(
        "Clocks set a year back and forth, an hour of suspension: deadlines held, idle connections were not used again."
    )
