"""Time from the start of each form of rat to its first answer, and the size of each.

A harness starts rat anew for each of its sessions and waits for this. The artifacts of ``packaging/build`` are
started in turn, round by round, so that what else the machine does falls on all alike; each does its first exchange
(``initialize``) with a server over mutual TLS. The installed command is that of the offline kit, installed under the
Python that runs this, which runs the zipapp, too. Ratios are of the medians.

It needs cryptography, to issue a bundle: run it with the Python of an environment that has it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import demo_ratd  # noqa: E402 - found by the line above
import rat  # noqa: E402
import rat_tool  # noqa: E402

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "startup", "version": "1"}},
}


class Form(NamedTuple):
    """A form of rat: how it is started, its size in bytes, and what it may be at most (None: no target)."""

    name: str
    command: list[str]
    size: int
    largest: int | None = None
    slowest: float | None = None  # as a multiple of the installed command


def first_answer(command: list[str], address: str, bundle: str) -> float:
    """Seconds from starting a rat to its answer to initialize. Raises SystemExit when it gives none."""
    began = time.perf_counter()
    with subprocess.Popen(
        [*command, "--server", address, "--bundle", bundle],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(json.dumps(INITIALIZE).encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        took = time.perf_counter() - began
        process.stdin.close()
        log = process.stderr.read().decode()
        process.stdout.read()
    if "result" not in json.loads(line or "{}"):
        raise SystemExit(f"startup: {' '.join(command)} gave no answer: {line!r} {log}")
    return took


def one_bytecode(zipapp: Path) -> int:
    """The size that a zipapp has with the bytecode of one Python, the largest it holds."""
    with zipfile.ZipFile(zipapp) as archive:
        sizes: dict[str, int] = {}
        for entry in archive.infolist():
            folder = entry.filename.partition("/")[0]
            if folder.startswith("cpython-"):
                sizes[folder] = sizes.get(folder, 0) + entry.compress_size + 2 * len(entry.filename) + 76
    return zipapp.stat().st_size - sum(sizes.values()) + max(sizes.values(), default=0)


def forms(dist: Path, place: Path) -> list[Form]:
    """The forms that were built, the installed command first."""
    (kit,) = dist.glob("rat-*-offline.tar.gz")
    with tarfile.open(kit) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(place)
    (unpacked,) = place.glob("rat-*-offline")
    python = os.path.realpath(sys.executable)
    subprocess.run([python, unpacked / "install.py", place / "installed"], check=True, stdout=subprocess.DEVNULL)
    (wheel,) = dist.glob("rat_mcp-*.whl")
    zipapp = dist / "rat.pyz"
    found = [
        Form("installed", [str(place / "installed" / "bin" / "rat")], wheel.stat().st_size),
        Form("zipapp", [python, str(zipapp)], one_bytecode(zipapp), 700_000, 1.3),
    ]
    for frozen in sorted(dist.glob("*-glibc*/rat")):
        folder = dist / f"rat-{rat.__version__}-{frozen.parent.name}.tar.gz"
        with tarfile.open(folder) as archive:
            archive.extractall(place)
        program = place / folder.name.replace(".tar.gz", "") / "rat"
        found.append(Form(f"frozen, {frozen.parent.name}", [str(frozen)], frozen.stat().st_size, 8_000_000, 1.8))
        found.append(Form(f"folder, {frozen.parent.name}", [str(program)], folder.stat().st_size))
    return found


def main() -> int:
    """Print the table. Returns 1 when ``--check`` is given and a target is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks/startup", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", metavar="DIR", help="what packaging/build made")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="starts of each (default: 15)")
    parser.add_argument("--check", action="store_true", help="fail when a target is missed")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rat-startup-") as name:
        place = Path(name)
        sides = rat_tool.write_bundle(rat_tool.issue_bundle("startup", ["harness"]), str(place / "bundle"))
        (place / "files").mkdir()
        times: dict[str, list[float]] = {}
        known = forms(given.dist, place)
        with demo_ratd.DemoRatd(sides[0], str(place / "files")) as server:
            for turn in range(given.rounds + 1):
                for form in known:
                    took = first_answer(form.command, server.address, sides[1].path)
                    if turn:  # the first fills the caches of the system
                        times.setdefault(form.name, []).append(took)
    base = statistics.median(times["installed"])
    missed = False
    print(f"{'form':32} {'size':>9} {'first answer':>13} {'fastest':>9} {'ratio':>7}  target")
    for form in known:
        median = statistics.median(times[form.name])
        target = "" if form.slowest is None else f"at most {form.slowest}"
        over = form.slowest is not None and median / base > form.slowest
        if form.largest is not None:
            target += f", {form.largest / 1e6:g} MB"
            over = over or form.size > form.largest
        missed = missed or over
        print(
            f"{form.name:32} {form.size / 1e6:6.2f} MB {median * 1000:10.0f} ms {min(times[form.name]) * 1000:6.0f} ms "
            f"{median / base:7.2f}  {target}{' MISSED' if over else ''}"
        )
    print("The size of the zipapp is that with the bytecode of one Python; of a folder, that of its archive.")
    return 1 if missed and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
