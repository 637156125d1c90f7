"""``benchmarks/memory``: what rat holds in memory, idle and with large messages, and how long those hold up small ones.

Each row is a process of its own, the median of several: an allocator that has seen one load answers the next from what
it kept.
"""

from __future__ import annotations

import argparse
import platform
import shlex
import statistics
import sys
import time
from typing import TYPE_CHECKING, Callable, NamedTuple

import urllib3
from contestants import RAT, Arena, Bridge, arena, message, rat_command, small_call

if TYPE_CHECKING:
    from collections.abc import Sequence

_MIB = 1 << 20
_LIMIT = 16 * _MIB - 1024  # what is left of a message is its JSON


def _large_call(identifier: int, argument: int, result: int) -> bytes:
    """A call whose argument and whose result are texts of so many bytes."""
    return message(identifier, "tools/call", {"name": "large", "arguments": {"size": result, "text": "x" * argument}})


class Use(NamedTuple):
    """Bytes in memory: at the peak, and a moment after the last answer."""

    peak: int
    after: int


def _exchange(bridge: Bridge, calls: Sequence[bytes]) -> Use:
    """Write calls, all before the first answer is read, and read as many answers."""
    for call in calls:
        bridge.send(call)
    for _ in calls:
        assert b'"result"' in bridge.line()[:100]
    peak = bridge.memory("VmHWM")
    for identifier in range(10):  # the last buffers are dropped by what comes next
        bridge.send(small_call(identifier))
        bridge.line()
    return Use(peak, bridge.memory())


def _idle(bridge: Bridge) -> Use:
    return _exchange(bridge, [small_call(7)])


def _many_small(bridge: Bridge) -> Use:
    bridge.at_once(2000, 16)
    return Use(bridge.memory("VmHWM"), bridge.memory())


LOADS: Sequence[tuple[str, Callable[[Bridge], Use], str]] = (
    ("idle, after the first calls", _idle, "≤ 30"),
    ("2,000 small calls, 16 at once", _many_small, ""),
    ("an argument of 16 MiB", lambda bridge: _exchange(bridge, [_large_call(7, _LIMIT, 2)]), "≤ 110, then < 60"),
    ("a result of 16 MiB", lambda bridge: _exchange(bridge, [_large_call(7, 2, _LIMIT)]), "≤ 110, then < 60"),
    ("both in one call", lambda bridge: _exchange(bridge, [_large_call(7, _LIMIT, _LIMIT)]), "≤ 110, then < 60"),
    (
        "64 calls at once, 1 MiB each way",
        lambda bridge: _exchange(bridge, [_large_call(n, _MIB, _MIB) for n in range(64)]),
        "≤ 260",
    ),
)


def _held_up(bridge: Bridge, argument: int, result: int) -> float:
    """Seconds until a small call is answered, written right after a large one."""
    large, small = _large_call(7, argument, result), small_call(8)
    bridge.send(large)
    before = time.perf_counter()
    bridge.send(small)
    first = bridge.line()
    if b'"ok"' in first:
        seconds = time.perf_counter() - before
        bridge.line()
    else:
        bridge.line()
        seconds = time.perf_counter() - before
    return seconds


def measure(where: Arena, rat: Sequence[str], runs: int) -> None:
    """Print the tables of one rat in Markdown."""
    print("| | peak | afterwards | to be, MiB |\n| --- | --- | --- | --- |")
    for name, load, bound in LOADS:
        uses = []
        for _ in range(runs):
            bridge = Bridge(rat_command(where, rat))
            try:
                uses.append(load(bridge))
            finally:
                bridge.close()
        peak, after = (statistics.median(values) / _MIB for values in zip(*uses))
        print(f"| {name} | {peak:.0f} MiB | {after:.0f} MiB | {bound} |", flush=True)
    print("\n| a small call right after | is answered in | to be |\n| --- | --- | --- |")
    for name, argument, result in (("an argument of 16 MiB", _LIMIT, 2), ("a result of 16 MiB", 2, _LIMIT)):
        bridge = Bridge(rat_command(where, rat))
        try:
            times = sorted(_held_up(bridge, argument, result) for _ in range(5 * runs))
        finally:
            bridge.close()
        middle = statistics.median(times)
        print(f"| {name} | {middle * 1e3:.0f} ms, {times[-1] * 1e3:.0f} ms at worst | ≤ 150 ms |", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurements and print their tables in Markdown."""
    parser = argparse.ArgumentParser(prog="benchmarks/memory", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="processes for each row (3)")
    parser.add_argument("--rat", metavar="COMMAND", type=shlex.split, default=RAT, help="the rat to measure")
    flags = parser.parse_args(arguments)
    print(f"Python {platform.python_version()}, urllib3 {urllib3.__version__}\n")  # type: ignore[attr-defined]
    with arena() as where:
        measure(where, flags.rat, flags.runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
