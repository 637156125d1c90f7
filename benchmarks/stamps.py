"""Stamps of time in a rat process, for ``benchmarks/profile``: set around its functions, whose code stays as it is."""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import rat  # noqa: E402

# Where the stamps and the CPU of each thread are written when rat stops.
FILE_VARIABLE = "RAT_BENCHMARK_STAMPS"

# (what, when), by the clock that all processes share. Appended by every thread.
_stamps: list[tuple[str, float]] = []

# Seconds of CPU of each thread by its name, as of the last end of a function below that names it.
_threads: dict[str, float] = {}


def _around(owner: object, name: str, enter: str | None = None, leave: str | None = None) -> None:
    # Any: it stands around whatever function it is given.
    inner: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(inner)
    def stamped(*args: Any, **kwargs: Any) -> Any:
        if enter is not None:
            _stamps.append((enter, time.perf_counter()))
        result = inner(*args, **kwargs)
        if leave is not None:
            _stamps.append((leave, time.perf_counter()))
        if name in ("_dispatch", "_line"):
            _threads[threading.current_thread().name] = time.thread_time()
        return result

    setattr(owner, name, stamped)


def _stamp_writes() -> None:
    write = os.write

    def stamped(descriptor: int, data: bytes) -> int:
        if descriptor != 1:
            return write(descriptor, data)
        _stamps.append(("writer has it", time.perf_counter()))
        written = write(descriptor, data)
        _stamps.append(("written", time.perf_counter()))
        _threads[threading.current_thread().name] = time.thread_time()
        return written

    os.write = stamped  # type: ignore[assignment]


def _dump() -> None:
    Path(os.environ[FILE_VARIABLE]).write_text(json.dumps({"stamps": _stamps, "threads": _threads}))


def main() -> None:
    """Run rat with stamps."""
    _around(rat.Relay, "_dispatch", "reader has it")
    _around(rat.Workers, "post", "read")
    _around(rat.Relay, "_relay", "worker has it")
    _around(rat.Connection, "post", "connection taken")
    _around(rat.Connection, "send", "request made", "sent")
    _around(rat.Response, "begin", "awaited", "head read")
    _around(rat.Response, "_read_status", None, "answered")
    _around(rat.Relay, "_line", "body read", "answer checked")
    _stamp_writes()
    run = rat.Relay.run

    def run_and_dump(relay: rat.Relay) -> int:
        status = run(relay)
        _dump()
        return status

    rat.Relay.run = run_and_dump  # type: ignore[method-assign, assignment]
    sys.exit(rat.main())


if __name__ == "__main__":
    main()
