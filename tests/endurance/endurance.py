"""How long an endurance test runs, and where its figures go.

In the suite each is scaled down to seconds. ``tests/endurance/run --full`` runs them at their size, which takes the
better part of an hour, and prints what was measured.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import NamedTuple

# Set by the command: "full" for the full size, a file for the figures, a number for other accidents.
SIZE_VARIABLE = "RAT_ENDURANCE"
FIGURES_VARIABLE = "RAT_ENDURANCE_FIGURES"
SEED_VARIABLE = "RAT_ENDURANCE_SEED"

FULL = os.environ.get(SIZE_VARIABLE) == "full"


def sized(suite: int, full: int) -> int:
    """A number for the suite, or for the full run."""
    return full if FULL else suite


def accidents() -> random.Random:
    """The source of all that is random in a test, the same each time unless another seed is asked for."""
    return random.Random(int(os.environ.get(SEED_VARIABLE, "1")))


def tell(figures: str) -> None:
    """Give a line of figures to the command."""
    path = os.environ.get(FIGURES_VARIABLE)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{figures}\n")


class Use(NamedTuple):
    """What a process holds of the system. Only where it can be told (Linux)."""

    descriptors: int
    threads: int
    memory: int  # bytes

    @classmethod
    def of(cls, process: int) -> Use | None:
        """That of a process, None where it cannot be told."""
        root = Path(f"/proc/{process}")
        if not (root / "fd").exists():
            return None
        status = (root / "status").read_text()
        kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
        return cls(len(list((root / "fd").iterdir())), len(list((root / "task").iterdir())), int(kilobytes) * 1024)

    def __str__(self) -> str:
        return f"{self.descriptors} descriptors, {self.threads} threads, {self.memory / 2**20:.0f} MiB"


Identifier = tuple[str, object]


def identifier(value: object) -> Identifier | None:
    """What an identifier of JSON-RPC is compared by, None for what is none: written apart from rat's own."""
    if isinstance(value, str):
        return "string", value
    if type(value) in (int, float):
        return None if value in (float("inf"), float("-inf")) else ("number", value)
    return None


def parse(line: bytes) -> object:
    """One JSON value in UTF-8, which a line must be. Raises ValueError."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(line.decode(), parse_constant=refuse)


def responses(line: bytes) -> Counter[Identifier | None]:
    """The identifiers of the responses that a line of stdout holds, None for the identifier null."""
    value = parse(line)
    found: Counter[Identifier | None] = Counter()
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, dict) and "method" not in each:
            assert "result" in each or "error" in each, line
            found[identifier(each["id"])] += 1
    return found
