"""Any event stream, damaged and split at random: each line written is one JSON value, each call is answered once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from fault_server import result
from harness import call, notification
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_bridge_streams import Stream, behave

if TYPE_CHECKING:
    from conftest import Started
    from fault_server import Connection, FaultServer, Request
    from harness import Harness

NOISE = [
    notification("notifications/progress", {"progressToken": 1, "progress": 0.5}),
    notification("notifications/message", {"data": 'é\u2028 "quoted"\n: {}'}),
    call(1, "elicitation/create", {"message": "data: x"}),
    result(2, "to another call"),
    result("1"),
    b'{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"m"}}',
    b"[]",
    b"[" + notification("n") + b"," + notification("m") + b"]",
    b'{"jsonrpc":"2.0","id":1,"result":{},"method":"m"}',
    b'{"jsonrpc":"2.0",\n"method":\r"n"}',
    b"",
    b"5",
    b"[" * 50,
]
ANSWERS = [
    result(1, {"content": [{"type": "text", "text": "a\r\nb"}]}),
    b'{"jsonrpc":"2.0","id":1,"error":{"code":-32020,"message":"m"}}',
    b'{"id":1.0,"result":null,"jsonrpc":"2.0"}',
    b"[" + notification("n") + b"," + result(1) + b"]",
    b"[" + result(1) + b"," + result(1) + b"]",
]
seldom = st.sampled_from([False, False, False, True])
ends = st.sampled_from([b"\n", b"\r\n", b"\r"])


@st.composite
def events(draw: st.DrawFn) -> bytes:
    """One event, or what stands between events."""
    end = draw(ends)
    message = draw(st.sampled_from(NOISE) | st.sampled_from(ANSWERS))
    lines = [b"data:" + draw(st.sampled_from([b"", b" "])) + line for line in message.splitlines() or [b""]]
    if draw(seldom):  # a comma that stands between tokens may be followed by a line break
        lines = [part for line in lines for part in line.replace(b',"', b',\ndata:"').split(b"\n")]
    extra = [b": ping", b"event: message", b"event: \xff", b"id: 1", b"id", b"retry: 10", b"x: y", b"\xef\xbb\xbf"]
    lines += draw(st.lists(st.sampled_from(extra), max_size=2))
    if draw(seldom):
        lines = draw(st.permutations(lines))
    return end.join(lines) + end * draw(st.sampled_from([2, 2, 2, 3, 1]))


class Change(NamedTuple):
    """Damage at a place, given as a share of the whole: so many bytes replaced."""

    place: float
    length: int
    by: bytes


PIECES = [b"\n", b"\r", b"\n\n", b"\r\r", b"\n\ndata:", b"data: ", b":", b'"', b"{", b"}", b"[", b"]", b","]
PIECES += [b"\0", b"\xff", b"1", b"null", b"\xef\xbb\xbf"]
changes = st.builds(Change, st.floats(0, 1), st.integers(0, 4), st.sampled_from(PIECES) | st.binary(max_size=3))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(events(), max_size=8),
    st.sampled_from([b"", b"data: " + result(1) + b"\n\n"]),
    st.lists(changes, max_size=3) | st.just([]),
    st.lists(st.floats(0, 1), max_size=8),
    st.sampled_from(["end", "end", "end", "cut", "reset"]),
)
def test_any_stream(
    started: Started, parts: list[bytes], last: bytes, damage: list[Change], cuts: list[float], ending: str
) -> None:
    stream = b"".join(parts) + last
    for change in damage:
        at = round(change.place * len(stream))
        stream = stream[:at] + change.by + stream[at + change.length :]
    places = sorted(round(cut * len(stream)) for cut in cuts)
    pieces = [stream[start:end] for start, end in zip([0, *places], [*places, len(stream)]) if start < end]
    try:
        exchange(*started.conversation(), pieces, ending)
    except BaseException:
        started.end()  # what is unread is not for the next example
        raise


class Planned:
    """Answers each call with the stream it was last given, on connections that outlive an example where they can."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.ending = ""
        self._servers: list[FaultServer] = []

    def __call__(self, connection: Connection, request: Request) -> bool:
        """Answer a call."""
        stream = Stream(connection)
        stream.send(*self.pieces)
        if self.ending == "reset":
            connection.reset()
        elif self.ending == "end":
            stream.end()
        return self.ending == "end"

    def take(self, server: FaultServer, pieces: list[bytes], ending: str) -> None:
        """Have a server answer so."""
        self.pieces, self.ending = pieces, ending
        if server not in self._servers:
            behave(server, self)
            self._servers.append(server)


planned = Planned()


def exchange(server: FaultServer, harness: Harness, pieces: list[bytes], ending: str) -> None:
    """Have a call answered by a stream, and read what comes of it."""
    planned.take(server, pieces, ending)
    harness.send(call(1, "stream"))
    answered = 0
    while not answered:
        answered += answers_in(harness.line())
    assert answered == 1
    harness.send(call("then"))
    # What is written after the answer is not of the stream any more.
    assert json.loads(harness.line())["id"] == "then"


def answers_in(line: bytes) -> int:
    """How many responses a line holds, which must be one JSON value of JSON-RPC messages; each to the call."""
    value = json.loads(line.decode(), parse_constant=refuse)
    responses = 0
    for message in value if isinstance(value, list) and value else [value]:
        assert isinstance(message, dict)
        if "result" in message or "error" in message:
            assert message["id"] == 1
            assert not isinstance(message["id"], bool)
            responses += 1
        else:
            assert isinstance(message["method"], str)
    return responses


def refuse(constant: str) -> NoReturn:
    """What is no JSON, though Python takes it for such."""
    raise AssertionError(constant)
