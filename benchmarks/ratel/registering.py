"""What registering a server adds to its own start: python benchmarks/ratel/registering.py

server-everything, the test server of the protocol's authors, on stdio, installed by npm into a temporary directory.
Each round starts it three times, each time anew: alone, until it has answered initialize on a bare pipe; by ratel,
until its tools are registered and searched for; and by a client of the official SDK, where it is installed, until its
tools are listed, in an interpreter that has imported the SDK already. Rounds alternate, so that the load of the machine
is the same for all; told is the median, and what it is above that of the server alone. The status is 1 when ratel adds
more than its limit.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import ratel
from ratel import Stdio, register_mcp_server

if TYPE_CHECKING:
    from collections.abc import Callable

PACKAGE = "@modelcontextprotocol/server-everything"
ROUNDS = 9
LIMIT = 50.0  # milliseconds

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "bare", "version": "1"}},
}


def alone(program: str) -> float:
    """Seconds until the server has answered initialize."""
    since = time.perf_counter()
    with subprocess.Popen(
        [program, "stdio"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(INITIALIZE).encode() + b"\n")
        process.stdin.flush()
        process.stdout.readline()
        took = time.perf_counter() - since
        process.stdin.close()
    return took


def by_ratel(program: str) -> float:
    """Seconds until its tools are registered and searched for."""
    with ratel.ratel() as r:
        since = time.perf_counter()
        register_mcp_server(r.tools.catalog, name="everything", transport=Stdio(program, ["stdio"]))
        assert r.tools.search("echo the input back")[0].tool_id == "everything__echo"
        return time.perf_counter() - since


def by_sdk(program: str) -> float:
    """Seconds until a client of the official SDK has listed its tools."""
    import anyio
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    async def run() -> float:
        since = time.perf_counter()
        with open(os.devnull, "w") as nowhere:
            parameters = StdioServerParameters(command=program, args=["stdio"])
            async with stdio_client(parameters, nowhere) as streams, ClientSession(*streams) as session:
                await session.initialize()
                assert (await session.list_tools()).tools
                return time.perf_counter() - since

    return anyio.run(run)


def main() -> int:
    """Print the table."""
    npm = shutil.which("npm")
    if npm is None:
        print("npm is not installed here, and the server comes by it")
        return 0
    with tempfile.TemporaryDirectory() as place:
        install = [
            npm,
            "install",
            "--silent",
            "--no-audit",
            "--no-fund",
            "--ignore-scripts",
            "--prefix",
            place,
            PACKAGE,
        ]
        subprocess.run(install, check=True, cwd=place)
        program = os.path.join(place, "node_modules", ".bin", "mcp-server-everything")
        contenders: dict[str, Callable[[str], float]] = {"the server alone": alone, "ratel": by_ratel}
        if importlib.util.find_spec("mcp") is not None:
            contenders["the official SDK"] = by_sdk
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(ROUNDS + 1):
            for name, contender in contenders.items():
                times[name].append(contender(program) * 1000)
    medians = {name: statistics.median(took[1:]) for name, took in times.items()}  # the first fills the caches
    base = medians["the server alone"]
    print(f"{'server-everything on stdio':28}{'ms':>8}{'added':>8}")
    for name, median in medians.items():
        print(f"{name:28}{median:8.0f}{median - base:8.0f}")
    added = medians["ratel"] - base
    print(f"ratel adds {added:.0f} ms; the limit is {LIMIT:.0f} ms")
    return int(added > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
