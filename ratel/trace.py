"""What ratel tells of itself: trace events, spans, and the root of its errors.

Events are plain dictionaries in a bounded list in memory, which the owner drains, rather than callbacks: a callback
runs in whichever thread recorded the event, under whatever that thread holds, and one that fails has nobody to tell.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

TraceEvent = dict[str, object]

_log = logging.getLogger("ratel")

# Events kept until they are drained. A host that never drains them loses the oldest, not its memory.
TRACE_LIMIT = 10_000


class RatelError(Exception):
    """The root of every error that ratel raises of its own."""


class TraceSink:
    """Where events go: a bounded list in memory, and a JSON Lines file when one is named.

    The file is appended to, a line an event, written at once so that what led to a crash is in it. A file that
    cannot be written is told to the log once, and given up: tracing never fails what it traces.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, limit: int = TRACE_LIMIT) -> None:
        self._lock = threading.Lock()  # guards all below
        self._events: deque[TraceEvent] = deque(maxlen=limit)
        self._path = path

    def record(self, kind: str, **fields: object) -> None:
        """Record an event: its ``type``, ``time`` (seconds since the epoch) and what is told of it. Never fails."""
        event: TraceEvent = {"type": kind, "time": time.time(), **fields}
        with self._lock:
            self._events.append(event)
            if self._path is None:
                return
            try:
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(event, default=str) + "\n")
            except (OSError, ValueError) as e:
                _log.warning("trace events are no longer written to %s: %s", self._path, e)
                self._path = None

    def drain(self) -> list[TraceEvent]:
        """The events since the last call, oldest first; they are forgotten."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
            return events


class Span:
    """A span of OpenTelemetry, or nothing where it is not installed."""

    def __init__(self, span: object = None) -> None:
        self._span = span

    def set(self, key: str, value: str | int) -> None:
        """Set an attribute."""
        if self._span is not None:
            self._span.set_attribute(key, value)  # type: ignore[attr-defined]


@contextlib.contextmanager
def span(name: str, attributes: Mapping[str, str | int]) -> Iterator[Span]:
    """A current span around what is done inside, which records the exception that leaves it.

    Without opentelemetry-api it does nothing.
    """
    try:
        from opentelemetry import trace
    except ImportError:
        yield Span()
        return
    with trace.get_tracer("ratel").start_as_current_span(name, attributes=attributes) as current:
        yield Span(current)
