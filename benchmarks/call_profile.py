"""``benchmarks/profile``: where the time of a call goes, from the harness to the harness.

A rat process carries stamps around its functions (see stamps.py), each a fraction of a microsecond; calls are made one
after the other on the floor server. The stages are medians and add up to about the whole. What the thread of a worker
does for a call is then broken down by function, by cProfile, which makes Python code look slower than it is beside C.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from contestants import ROOT, Arena, Bridge, arena, direct_socket, direct_urllib3, rat_command, small_call
from stamps import FILE_VARIABLE

import rat

if TYPE_CHECKING:
    from collections.abc import Sequence

# What stands between two stamps, in the order of a call.
STAGES = (
    ("sent by the harness", "reader has it", "pipe, and waking the reader thread"),
    ("reader has it", "read", "JSON read, headers made, call registered"),
    ("read", "worker has it", "hand-over to a worker thread"),
    ("worker has it", "connection taken", "urllib3: pool, is the connection alive"),
    ("connection taken", "request made", "head and body joined"),
    ("request made", "sent", "TLS: write"),
    ("sent", "awaited", "until it reads"),
    ("awaited", "answered", "the server, waking the worker, TLS: read"),
    ("answered", "head read", "head of the response parsed"),
    ("head read", "body read", "http.client: body read; connection given back"),
    ("body read", "answer checked", "JSON of the answer read, is it one to the call"),
    ("answer checked", "writer has it", "settled, hand-over to the writer thread"),
    ("writer has it", "written", "pipe: write"),
    ("written", "read by the harness", "waking the harness"),
)


def waterfall(where: Arena, calls: int) -> None:
    """Print the stages of a call, and the CPU of each thread."""
    with tempfile.TemporaryDirectory(prefix="rat-profile-") as place:
        file = Path(place) / "stamps"
        stamping = rat_command(where, (sys.executable, str(ROOT / "benchmarks" / "stamps.py")))
        bridge = Bridge(stamping, {FILE_VARIABLE: str(file)})
        bridge.one_at_a_time(calls // 4)
        marks: dict[str, list[float]] = defaultdict(list)
        for identifier in range(calls):
            line = small_call(identifier)
            marks["sent by the harness"].append(time.perf_counter())
            bridge.send(line)
            bridge.line()
            marks["read by the harness"].append(time.perf_counter())
        bridge.close()
        dumped = json.loads(file.read_text())
    for name, when in dumped["stamps"]:
        marks[name].append(when)
    last = {name: values[-calls:] for name, values in marks.items()}
    whole = statistics.median(map(float.__sub__, last["read by the harness"], last["sent by the harness"]))
    print("| from the harness to the harness | µs | share |\n| --- | --- | --- |")
    for start, end, what in STAGES:
        # The harness may have read the line before the write of it has returned.
        seconds = max(0.0, statistics.median(map(float.__sub__, last[end], last[start])))
        print(f"| {what} | {seconds * 1e6:.0f} | {seconds / whole:.0%} |")
    print(f"| **a call** | **{whole * 1e6:.0f}** | |")
    made = calls + calls // 4
    threads: dict[str, float] = defaultdict(float)
    for name, seconds in dumped["threads"].items():
        threads["workers" if name.startswith("post") else name] += seconds
    print("\n| CPU of the threads | µs a call |\n| --- | --- |")
    for name, seconds in sorted(threads.items(), key=lambda item: -item[1]):
        print(f"| {name} | {seconds / made * 1e6:.0f} |")


def direct(where: Arena, calls: int) -> None:
    """Print what the same POST takes without a bridge."""
    print("\n| without a bridge, one thread | µs |\n| --- | --- |")
    for name, post in (("through urllib3", direct_urllib3(where)), ("on a TLS socket", direct_socket(where))):
        print(f"| {name} | {statistics.median(post.one_at_a_time(calls)) * 1e6:.0f} |")


def functions(where: Arena, calls: int, rows: int) -> None:
    """Print what a worker's thread does for a call, by function."""
    ratd = rat.Ratd(rat.Address.parse(where.mutual), rat.load_side(str(where.client)))
    line = small_call(1).rstrip()
    message = rat.read_message(line)
    headers = rat.request_headers(message, "2025-06-18")

    def post() -> None:
        for _ in ratd.post(rat.Posting(line, message, headers), headers, 30):
            pass

    for _ in range(calls // 4):
        post()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(calls):
        post()
    profile.disable()
    # {(file, line, function): (primitive calls, calls, own seconds, seconds, callers)}, which no stub tells.
    entries = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    print("\n| function | calls | own µs | µs with all below |\n| --- | --- | --- | --- |")
    by_own = sorted(entries.items(), key=lambda item: -item[1][2])
    for (path, number, function), (_, times, own, cumulative, _) in by_own[:rows]:
        place = f"{Path(path).parent.name}/{Path(path).name}:{number} " if path != "~" else ""
        print(
            f"| `{place}{function}` | {times / calls:.0f} | {own / calls * 1e6:.1f} | {cumulative / calls * 1e6:.1f} |"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurements and print their tables in Markdown."""
    parser = argparse.ArgumentParser(prog="benchmarks/profile", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--calls", type=int, default=2000, help="calls to take the medians of (2000)")
    parser.add_argument("--functions", type=int, default=25, help="functions to list (25)")
    flags = parser.parse_args(arguments)
    with arena() as where:
        waterfall(where, flags.calls)
        direct(where, flags.calls)
        functions(where, flags.calls, flags.functions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
