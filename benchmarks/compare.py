"""``benchmarks/compare``: rat beside the bridges a user would take instead, in one run on one floor server.

The contestants take turns, a few hundred calls each, round after round: what else the machine does in the meantime
then falls on all of them alike, and the ratios hold where the absolute times do not. Peers cannot present a client
certificate, so theirs is the port that asks for none, over the same TLS 1.3 (or over plain HTTP with --plain): where
this favours anyone, it favours them.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import shlex
import ssl
import statistics
import sys
from typing import TYPE_CHECKING, NamedTuple

import urllib3
from contestants import (
    PEER_BRIDGES,
    Arena,
    Bridge,
    Direct,
    arena,
    direct_http_client,
    direct_socket,
    direct_urllib3,
    installed_rat,
    rat_command,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

AT_ONCE = 16


class Entry(NamedTuple):
    """A bridge that takes part: its command, and what its environment needs."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]


class Figures:
    """What was measured of one contestant, turn by turn."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.first_answers: list[float] = []  # seconds
        self.times: list[float] = []  # seconds of each call, one at a time
        self.cpu: list[float] = []  # seconds of each turn's calls, per call
        self.rates: list[float] = []  # calls a second of each turn, 16 at once
        self.cpu_at_once: list[float] = []
        self.handshakes = 0
        self.memory = 0  # bytes, after all calls

    @property
    def p50(self) -> float:
        """Seconds of a call at the median."""
        return statistics.median(self.times)

    @property
    def p99(self) -> float:
        """Seconds of a call at the 99th percentile."""
        return statistics.quantiles(self.times, n=100)[98]

    def row(self) -> str:
        """Its row of the table."""
        bridge = bool(self.first_answers)
        cells = [
            self.name,
            f"{statistics.median(self.first_answers) * 1e3:,.0f} ms" if bridge else "",
            f"{self.p50 * 1e6:,.0f} µs",
            f"{self.p99 * 1e3:,.1f} ms",
            f"{statistics.mean(self.cpu) * 1e6:,.0f} µs",
            f"{statistics.median(self.rates):,.0f}" if bridge else "",
            f"{statistics.mean(self.cpu_at_once) * 1e6:,.0f} µs" if bridge else "",
            f"{self.handshakes}" if bridge else "",
            f"{self.memory / 2**20:,.0f} MiB" if bridge else "",
        ]
        return f"| {' | '.join(cells)} |"


HEADING = (
    "| | first answer | p50 of a call | p99 | CPU a call | calls/s, 16 at once | CPU a call, 16 at once "
    "| handshakes | memory |\n" + "| --- " * 9 + "|"
)


def compare(where: Arena, entries: Sequence[Entry], starts: int, rounds: int, calls: int) -> list[Figures]:
    """Measure bridges and direct posts, taking turns."""
    bridges: list[tuple[Bridge, Figures]] = []
    directs: list[tuple[Direct, Figures]] = []
    contestants: list[tuple[Bridge | Direct, Figures]] = []
    try:
        for entry in entries:
            bridges.append((Bridge(entry.command, entry.environment), Figures(entry.name)))
        for turn in range(starts):
            for number, entry in enumerate(entries):
                bridges[number][0].close()
                before = sum(where.server.counts()[:3])
                bridge = Bridge(entry.command, entry.environment)
                figures = bridges[number][1]
                bridges[number] = bridge, figures
                figures.first_answers.append(bridge.first_answer)
                if turn == starts - 1:
                    figures.handshakes += sum(where.server.counts()[:3]) - before
        for name, make in (
            ("direct, urllib3", direct_urllib3),
            ("direct, http.client", direct_http_client),
            ("direct, TLS socket", direct_socket),
        ):
            directs.append((make(where), Figures(name)))
        contestants = [*bridges, *directs]
        gc.disable()  # in this process, whose pauses are nobody's
        for contestant, _ in contestants:
            contestant.one_at_a_time(calls // 2)  # until what is made once has been made
        for _ in range(rounds):
            for contestant, figures in contestants:
                before_cpu = contestant.cpu()
                times = contestant.one_at_a_time(calls)
                figures.times += times
                figures.cpu.append((contestant.cpu() - before_cpu) / calls)
            gc.collect()
        for bridge, _ in bridges:
            bridge.at_once(calls // 2, AT_ONCE)
        for _ in range(rounds):
            for bridge, figures in bridges:
                before = sum(where.server.counts()[:3])
                before_cpu = bridge.cpu()
                figures.rates.append(2 * calls / bridge.at_once(2 * calls, AT_ONCE))
                figures.cpu_at_once.append((bridge.cpu() - before_cpu) / (2 * calls))
                figures.handshakes += sum(where.server.counts()[:3]) - before
            gc.collect()
        for bridge, figures in bridges:
            figures.memory = bridge.memory()
    finally:
        gc.enable()
        for bridge, _ in bridges:
            bridge.close()
    return [figures for _, figures in contestants]


def ratios(figures: Sequence[Figures]) -> list[str]:
    """The rows of the table of ratios: rat's figures over those of others, and what they are to be."""
    named = {each.name: each for each in figures}
    rat, rows = named["rat"], []

    def row(what: str, ours: float, theirs: float, bound: str) -> None:
        rows.append(f"| {what} | {ours / theirs:.2f} | {bound} |")

    base = named["direct, urllib3"]
    row("p50 of a call over the direct POST through urllib3", rat.p50, base.p50, "≤ 1.3")
    row("CPU a call over it", statistics.mean(rat.cpu), statistics.mean(base.cpu), "≤ 1.3")
    if peer := named.get("supergateway"):
        row(
            "calls/s, 16 at once, over supergateway",
            statistics.median(rat.rates),
            statistics.median(peer.rates),
            "≥ 1.5",
        )
        row(
            "CPU a call, 16 at once, over it",
            statistics.mean(rat.cpu_at_once),
            statistics.mean(peer.cpu_at_once),
            "≤ 0.5",
        )
    if peer := named.get("mcp-remote"):
        first, other = statistics.median(rat.first_answers), statistics.median(peer.first_answers)
        row("first answer over mcp-remote", first, other, "≤ 0.25")
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison and print its tables in Markdown."""
    parser = argparse.ArgumentParser(prog="benchmarks/compare", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--starts", type=int, default=5, help="starts of each bridge (5)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each contestant (10)")
    parser.add_argument("--calls", type=int, default=200, help="calls of a turn, twice as many at once (200)")
    parser.add_argument("--plain", action="store_true", help="let the peers reach the server over plain HTTP")
    parser.add_argument("--no-peers", action="store_true", help="rat and the direct posts alone")
    parser.add_argument("--also", metavar="NAME=COMMAND", action="append", default=[], help="another rat to compare")
    flags = parser.parse_args(arguments)
    missing = []
    with arena() as where:
        entries = [Entry("rat", rat_command(where, installed_rat()), {})]
        for also in flags.also:
            name, _, command = also.partition("=")
            entries.append(Entry(name, rat_command(where, shlex.split(command)), {}))
        for peer in () if flags.no_peers else PEER_BRIDGES:
            if reason := peer.installed():
                missing.append(f"{peer.name} is not measured, it could not be installed: {reason}")
            elif flags.plain:
                entries.append(Entry(peer.name, peer.command(where.plain), {}))
            else:
                trusted = {"NODE_EXTRA_CA_CERTS": str(where.public_ca), "SSL_CERT_FILE": str(where.public_ca)}
                entries.append(Entry(peer.name, peer.command(where.tls), trusted))
        figures = compare(where, entries, flags.starts, flags.rounds, flags.calls)
    way = "plain HTTP" if flags.plain else "TLS 1.3 without a client certificate, which they cannot present"
    print(
        f"Python {platform.python_version()}, urllib3 {urllib3.__version__}, {ssl.OPENSSL_VERSION}, "  # type: ignore[attr-defined]
        f"{os.cpu_count()} processors; load {os.getloadavg()[0]:.1f} at the end. Peers: {way}.\n"
    )
    print(HEADING)
    for each in figures:
        print(each.row())
    print("\n| rat's ratio | measured | to be |\n| --- | --- | --- |")
    print("\n".join(ratios(figures)))
    for line in missing:
        print(f"\n{line}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
