"""Any sequence of lines: one answer a call, none for anything else, the bytes posted those read."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from fault_server import FaultServer, Response, is_call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rat

if TYPE_CHECKING:
    from conftest import Started
    from fault_server import Request
    from harness import Harness


class Line(NamedTuple):
    """A line of a harness: its bytes, what is posted, and what is written, as a bag of JSON values."""

    line: bytes
    posted: bytes | None
    written: tuple[str, ...]


# Text without lone surrogates, which no UTF-8 holds but JSON may escape: those come by \u below.
texts = st.text(st.characters(codec="utf-8"), max_size=20)
numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
identifiers = texts | numbers | st.sampled_from(["\ud800", 0, -0.0, "1", 1])
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)
methods = st.sampled_from(["tools/call", "resources/read", "prompts/get", "ping", "m"]) | texts
META = "io.modelcontextprotocol/protocolVersion"
params = values | st.fixed_dictionaries(
    {},
    optional={
        "name": texts | st.just("read_file") | values,
        "uri": texts | values,
        "arguments": values,
        "_meta": values | st.fixed_dictionaries({META: st.sampled_from(["2025-11-25", "2026-07-28"]) | texts}),
    },
)
spaces = st.text(" \t", max_size=3)


@st.composite
def encoded(draw: st.DrawFn, value: object) -> bytes:
    """A JSON text of a value, in one of its many spellings."""
    separators = draw(spaces) + "," + draw(spaces), draw(spaces) + ":" + draw(spaces)
    plain = json.dumps(value, ensure_ascii=draw(st.booleans()), separators=separators)
    text = draw(spaces) + plain + draw(spaces)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=separators).encode()


def key(identifier: object) -> str:
    """What tells answers apart: the identifier as JSON, numbers of one value alike."""
    assert rat.identifier_key(identifier) is not None
    return repr(rat.identifier_key(identifier))


Message = dict[str, object]
requests: st.SearchStrategy[Message] = st.fixed_dictionaries(
    {"jsonrpc": st.just("2.0"), "id": identifiers, "method": methods}, optional={"params": params, "x": values}
)
notifications: st.SearchStrategy[Message] = st.fixed_dictionaries(
    {"method": methods}, optional={"jsonrpc": st.just("2.0"), "id": st.none(), "params": params}
)
responses: st.SearchStrategy[Message] = st.fixed_dictionaries(
    {"id": identifiers}, optional={"result": values, "error": values}
)


@st.composite
def lines(draw: st.DrawFn) -> Line:
    """A line of any kind."""
    kind = draw(st.sampled_from(["call", "call", "notification", "response", "batch", "blank", "bad", "id"]))
    end = draw(st.sampled_from([b"\n", b"\n", b"\r\n"]))
    if kind == "blank":
        return Line(draw(spaces).encode() + end, None, ())
    if kind == "bad":
        bad = draw(
            st.binary(min_size=1, max_size=20).filter(is_bad)
            | st.sampled_from([b"5", b'"x"', b"null", b'{"a":NaN}', b'{"a":"\xff"}', b"{", b"[1"])
        )
        return Line(bad + end, None, ("None",))
    if kind == "id":
        message = draw(requests)
        message["id"] = draw(st.sampled_from([True, False, {}, [], [1], {"a": 1}]))
        return Line(draw(encoded(message)) + end, None, ("None",))
    if kind == "batch":
        members: list[object] = draw(st.lists(requests | notifications | responses | values, max_size=4))
        body = draw(encoded(members))
        calls = tuple(key(each["id"]) for each in members if isinstance(each, dict) and is_answerable(each))
        return Line(body + end, body, calls)
    message = draw({"call": requests, "notification": notifications, "response": responses}[kind])
    body = draw(encoded(message))
    return Line(body + end, body, (key(message["id"]),) if kind == "call" else ())


def is_bad(line: bytes) -> bool:
    """Whether a line is nothing that could be relayed, and one line."""
    if b"\n" in line or not line.strip(b" \t\r"):
        return False
    try:
        return not isinstance(json.loads(line.decode()), (dict, list))
    except ValueError:
        return True


def is_answerable(message: object) -> bool:
    """Whether a message of a batch is a call."""
    return is_call(message) and isinstance(message, dict) and rat.identifier_key(message["id"]) is not None


def respond(request: Request) -> Response:
    """Answer with the identifiers as they came."""
    message = json.loads(request.body)
    if isinstance(message, list):
        calls = [each for each in message if is_answerable(each)]
        if not calls:
            return Response(202, kind="")
        answers = [{"jsonrpc": "2.0", "id": each["id"], "result": {}} for each in calls]
        return Response(200, json.dumps(answers).encode())
    if not is_answerable(message):
        return Response(202, kind="")
    return Response(200, json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": {}}).encode())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(lines(), max_size=12))
def test_any_lines(started: Started, sequence: list[Line]) -> None:
    try:
        exchange(*started.conversation(), sequence)
    except BaseException:
        started.end()  # what is unread is not for the next example
        raise


def exchange(server: FaultServer, harness: Harness, sequence: list[Line]) -> None:
    """Send lines, and read what must come of them."""
    server.respond = respond
    server.requests.clear()
    harness.write(b"".join(each.line for each in sequence))
    expected = Counter(each for line in sequence for each in line.written)
    written: Counter[str] = Counter()
    while sum(written.values()) < sum(expected.values()):
        answer = json.loads(harness.line())
        for each in answer if isinstance(answer, list) else [answer]:
            assert ("result" in each) != ("error" in each)
            assert ("error" in each) == (each["id"] is None)
            written["None" if each["id"] is None else key(each["id"])] += 1
    assert written == expected
    posted = Counter(each.posted for each in sequence if each.posted is not None)
    seen = server.wait_requests(sum(posted.values()))
    assert Counter(request.body for request in seen) == posted
    # Nothing more comes: the next line is this call's.
    assert harness.call("then")["id"] == "then"
