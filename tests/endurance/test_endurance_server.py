"""A server whose every answer is a valid one with something wrong in it."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Callable

from endurance import accidents, identifier, responses, sized, tell
from harness import call

if TYPE_CHECKING:
    from conftest import StartRat
    from endurance import Identifier
    from fault_server import Connection, FaultServer, Request

AT_ONCE = 16

# Seconds of a call instead of thirty: some answers are shorter than they say, on a connection that stays open.
IMPATIENT = "rat.REQUEST_SECONDS = 1"


def _body(chance: random.Random, request: Request) -> bytes:
    message = request.message
    assert isinstance(message, dict)
    result = {
        "token": chance.randrange(10**9),
        "text": "ü€\n" * chance.randrange(40),
        "deep": [[[{}]]],
        "number": 1.5e3,
    }
    return json.dumps(
        {"jsonrpc": "2.0", "id": message["id"], "result": result}, indent=chance.choice((None, 1))
    ).encode()


def _chunked(chance: random.Random, body: bytes) -> bytes:
    chunks = []
    while body:
        size = chance.randrange(1, 60)
        extension = chance.choice((b"", b"", b";a=b"))
        chunks.append(b"%x%b\r\n%b\r\n" % (len(body[:size]), extension, body[:size]))
        body = body[size:]
    return b"".join(chunks) + b"0\r\n" + chance.choice((b"", b"Trailer: 1\r\n")) + b"\r\n"


def _valid(chance: random.Random, request: Request) -> bytes:
    body = _body(chance, request)
    kind = chance.choice((b"application/json", b"application/json; charset=utf-8", b"text/event-stream"))
    if kind == b"text/event-stream":
        lines = b"".join(b"data: %b\n" % line for line in body.splitlines())
        body = chance.choice((b"", b": hello\n\n", b"id: 7\ndata:\n\n")) + b"event: message\n" + lines + b"\n"
    head = [b"HTTP/1.1 200 OK", b"Content-Type: " + kind, b"Date: Thu, 01 Jan 2026 00:00:00 GMT"]
    framing = chance.choice(("length", "chunked", "end"))
    if framing == "length":
        head.append(b"Content-Length: %d" % len(body))
    elif framing == "chunked":
        head.append(b"Transfer-Encoding: chunked")
        body = _chunked(chance, body)
    else:
        head.append(b"Connection: close")
    interim = chance.choice(
        (b"", b"", b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n")
    )
    return interim + b"\r\n".join(head) + b"\r\n\r\n" + body


def _flip(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]


def _insert(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data))
    junk = chance.choice(
        (b"\0", b"\r\n", b"\n", b"\r", b"\xff\xfe", b":", b" ", b"\r\n\r\n", b"0\r\n\r\n", bytes(chance.randrange(9)))
    )
    return data[:at] + junk + data[at:]


def _delete(chance: random.Random, data: bytes) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + data[at + chance.randrange(1, 20) :]


def _repeat(chance: random.Random, data: bytes) -> bytes:
    at, size = chance.randrange(len(data)), chance.randrange(1, 80)
    return data[:at] + data[at : at + size] * chance.choice((2, 3, 50)) + data[at + size :]


def _cut(chance: random.Random, data: bytes) -> bytes:
    return data[: chance.randrange(len(data))]


def _append(chance: random.Random, data: bytes) -> bytes:
    return data + chance.choice((b"\r\n", b"x", data, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"))


def _number(chance: random.Random, data: bytes) -> bytes:
    """Another number where one stands: a length, a status, a chunk's size, an identifier."""
    places = [at for at, byte in enumerate(data) if 0x30 <= byte <= 0x39]
    at = chance.choice(places or [0])
    other = (b"0", b"-1", b"+1", b"00", b"9" * 30, b"1e3", b"0x10", b"", b" ", b"204", b"101", b"304", b"500")
    return data[:at] + chance.choice(other) + data[at + chance.choice((1, 1, 3)) :]


def _field(chance: random.Random, data: bytes) -> bytes:
    """One more field, which contradicts or confuses."""
    first, line_end, rest = data.partition(b"\r\n")
    field = chance.choice(
        (
            b"Content-Length: 3", b"Content-Length: 3, 3", b"Content-Length: 99999999999", b"Content-Length: x",
            b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: identity",
            b"Content-Encoding: gzip", b"Connection: close", b"Connection: upgrade", b"Content-Type: text/html",
            b" folded", b"no colon", b": no name", b"X: " + b"y" * 70_000, b"\r\n".join([b"X: y"] * 120),
            b"Location: /elsewhere", b"Keep-Alive: timeout=0", b"Content-Type: text/event-stream",
        )
    )  # fmt: skip
    return first + line_end + field + b"\r\n" + rest


MUTATIONS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _flip, _insert, _delete, _repeat, _cut, _append, _number, _number, _field, _field,
)  # fmt: skip


def test_no_answer_crashes_hangs_or_unbalances_it(fault_server: FaultServer, start_rat: StartRat) -> None:
    """Every line written is one JSON value, every call gets one answer, whatever the bytes that came."""
    total = sized(250, 1_000)
    seeds = accidents()
    kept: list[bytes] = []

    def hostile(connection: Connection) -> None:
        chance = random.Random(seeds.random())
        connection.handshake()
        while (request := connection.request()) is not None:
            data = _valid(chance, request)
            for _ in range(chance.choice((1, 1, 1, 2, 5))):
                data = chance.choice(MUTATIONS)(chance, data) or b"\n"
            kept.append(data)
            middle = chance.randrange(len(data))
            connection.send(*(part for part in (data[:middle], data[middle:]) if part))
            ending = chance.random()
            if ending < 0.2:
                connection.reset()
                return
            if ending < 0.8:
                return

    fault_server.script = hostile
    rat = start_rat(patch=IMPATIENT, level="error")
    rat.allow(sized(120, 3600))
    sent = answered = relayed = 0
    open_calls: set[Identifier | None] = set()
    while sent < total or open_calls:
        while sent < total and len(open_calls) < AT_ONCE:
            name = f"call {sent}" if sent % 2 else sent
            rat.send(call(name))
            open_calls.add(identifier(name))
            sent += 1
        line = rat.line()
        for each in responses(line):
            assert each in open_calls, f"{line!r} answers no call, or one a second time"
            open_calls.remove(each)
            answered += 1
            relayed += b'"result"' in line
    fault_server.script = fault_server.serve
    assert rat.call("last")["result"] == {"method": "ping"}
    status, rest = rat.finish()
    assert (status, answered) == (0, total)
    assert not [each for line in rest for each in responses(line)]
    assert 0 < relayed < total
    tell(
        f"{len(kept):,} answers made of valid ones by {len(MUTATIONS)} kinds of mutation: {relayed:,} still held a "
        f"response to the call and were relayed, {answered - relayed:,} calls got an error; every line was JSON, every "
        "call was answered once."
    )
