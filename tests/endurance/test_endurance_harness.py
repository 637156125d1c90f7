"""A harness that writes whatever comes near to JSON-RPC, and one that does not read."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from endurance import FULL, Use, accidents, identifier, parse, responses, sized, tell
from fault_server import Response, answer, is_call, result
from harness import call

if TYPE_CHECKING:
    from conftest import StartRat
    from endurance import Identifier
    from fault_server import FaultServer, Request

_NUMBERS = (
    b"0",
    b"-0",
    b"1",
    b"-7",
    b"1.50",
    b"1e3",
    b"1E-2",
    b"123456789012345678901234567890",
    b"01",
    b"1.",
    b"+1",
    b"1e999",
)
_STRINGS = (
    b'""',
    b'"a"',
    b'"\\u00fc"',
    '"ü€😀"'.encode(),
    b'"\\ud800"',
    b'"a\\nb"',
    b'"a\nb"',
    b'"\\x"',
    b'"unended',
    b'"\xff"',
    b'"\xed\xa0\x80"',
)
_CONSTANTS = (b"null", b"true", b"false", b"NaN", b"-Infinity", b"None", b"nul")
_METHODS = (
    b'"ping"', b'"tools/call"', b'"tools/list"', b'"initialize"', b'"resources/read"', b'"notifications/initialized"',
    b'"subscriptions/listen"', b'"notifications/cancelled"', b'"a\\nb"', b'""',
)  # fmt: skip
_SPACES = (b"", b"", b"", b" ", b"\t", b"  ", b"\r")


class Grammar:
    """Lines near to JSON-RPC: each production now and then takes another's place, or something that is none."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._count = 0

    def line(self) -> bytes:
        """One line, without its end."""
        roll = self._chance.random()
        if roll < 0.04:
            return self._chance.choice(
                (b"", b" ", b"\r", b"\t \r", b"[]", b"[[]]", b"{}", b"7", b"\xef\xbb\xbf{}", b"\0", b"{")
            )
        if roll < 0.12:
            members = [self._message() for _ in range(self._chance.randrange(4))]
            line = b"[" + b",".join(members) + b"]"
        else:
            line = self._message()
        if roll > 0.9:
            at = self._chance.randrange(len(line))
            cut = line[at + self._chance.choice((0, 1, 1, 5)) :]
            line = line[:at] + self._chance.choice((b"", b"{", b"}", b",", b'"', b"\\", b"\0", b"\xc3", b"x")) + cut
        return line.replace(b"\n", b"")

    def _message(self) -> bytes:
        self._count += 1
        fields = [(b'"jsonrpc"', b'"2.0"')]
        roll = self._chance.random()
        if roll < 0.9:
            fields.append((b'"method"', self._pick(_METHODS)))
        else:
            fields.append((b'"result"', self._value(2)))
        if self._chance.random() < 0.6:
            own = (b"%d" % self._count, b'"call %d"' % self._count, b"%d.25" % self._count)
            fields.append((b'"id"', self._pick(own)))
        if self._chance.random() < 0.6:
            fields.append((b'"params"', self._params() if self._chance.random() < 0.7 else self._value(3)))
        self._chance.shuffle(fields)
        return self._object(fields)

    def _params(self) -> bytes:
        version = self._chance.choice((b'"2026-07-28"', b'"2025-06-18"', b'"9"', b'"\\u0007"', b"7"))
        meta = self._object([(b'"io.modelcontextprotocol/protocolVersion"', version)])
        fields = [(b'"_meta"', meta), (b'"name"', self._pick((b'"read_file"', b'"wait_window"', b'"a\\r\\nb"')))]
        fields += [(b'"arguments"', self._value(3)), (b'"uri"', self._pick(_STRINGS)), (b'"requestId"', b'"nobody"')]
        return self._object(self._chance.sample(fields, self._chance.randrange(len(fields) + 1)))

    def _object(self, fields: list[tuple[bytes, bytes]]) -> bytes:
        space = self._chance.choice(_SPACES)
        return b"{" + (b"," + space).join(name + b":" + space + value for name, value in fields) + b"}" + space

    def _pick(self, usual: tuple[bytes, ...]) -> bytes:
        return self._chance.choice(usual) if self._chance.random() < 0.95 else self._value(1)

    def _value(self, depth: int) -> bytes:
        roll = self._chance.random()
        if depth and roll < 0.2:
            return b"[" + b",".join(self._value(depth - 1) for _ in range(self._chance.randrange(3))) + b"]"
        if depth and roll < 0.4:
            return self._object([(self._chance.choice(_STRINGS[:4]), self._value(depth - 1)) for _ in range(2)])
        valid = self._chance.random() < 0.95
        kind = self._chance.choice(
            (_NUMBERS[:8], _STRINGS[:6], _CONSTANTS[:3]) if valid else (_NUMBERS, _STRINGS, _CONSTANTS)
        )
        return self._chance.choice(kind)


def calls_of(batch: list[object]) -> list[dict[str, object]]:
    """The calls of a batch, by identifiers that a response can have."""
    return [each for each in batch if isinstance(each, dict) and is_call(each) and identifier(each["id"]) is not None]


def expected(line: bytes) -> Counter[Identifier | None] | None:
    """What answers a line: identifiers, None among them for an error to the identifier null; None for a batch, which
    is answered by a line of its own."""
    line = line[:-1] if line.endswith(b"\r") else line
    if not line.strip(b" \t\r"):
        return Counter()
    try:
        value = parse(line)
    except ValueError:
        return Counter([None])
    if isinstance(value, list):
        return None if calls_of(value) else Counter()
    if not isinstance(value, dict):
        return Counter([None])
    if not is_call(value):
        return Counter()
    return Counter([identifier(value["id"])])


def test_whatever_a_harness_writes_is_answered(fault_server: FaultServer, start_rat: StartRat) -> None:
    """Lines from a grammar of near-valid JSON-RPC, at full speed and split at any byte, get what each is due."""
    total = sized(2_000, 100_000)
    chance = accidents()
    grammar = Grammar(chance)
    lines = [grammar.line() for _ in range(total)]
    due: Counter[Identifier | None] = Counter()
    batches = 0
    for line in lines:
        answers = expected(line)
        if answers is None:
            batches += 1
        else:
            due += answers
    stream = b"".join(line + b"\n" for line in lines)

    def respond(request: Request) -> Response:
        message = request.message
        if not isinstance(message, list):
            return answer(request)
        results = [result(each["id"]) for each in calls_of(message)]
        return Response(200, b"[" + b",".join(results) + b"]") if results else Response(202, kind="")

    fault_server.respond = respond
    rat = start_rat(level="error")
    rat.allow(sized(120, 3600))

    def write() -> None:
        at = 0
        while at < len(stream):
            size = chance.choice((1, 2, 7, 100, 4096, 70_000))
            rat.write(stream[at : at + size])
            at += size

    began = time.monotonic()
    writer = threading.Thread(target=write)
    writer.start()
    got: Counter[Identifier | None] = Counter()
    arrays = 0
    for _ in range(sum(due.values()) + batches):
        line = rat.line()
        if line.startswith(b"["):
            assert isinstance(parse(line), list)
            arrays += 1
        else:
            got += responses(line)
    writer.join()
    seconds = time.monotonic() - began
    rat.call("last")
    status, rest = rat.finish()
    assert (status, rest) == (0, [])
    assert got == due
    assert arrays == batches
    tell(
        f"{total:,} lines in {seconds:.0f} s, split at any byte: {sum(due.values()) - due[None]:,} calls and "
        f"{batches:,} batches answered, {due[None]:,} refused, {total - sum(due.values()) - batches:,} due no answer; "
        "each got exactly what it was due."
    )


@pytest.mark.parametrize("size", [200, 20_000], ids=["small", "20 KB"])
def test_a_harness_that_does_not_read_loses_nothing(fault_server: FaultServer, start_rat: StartRat, size: int) -> None:
    """Answers that come while the output is not read are kept, in the memory that they take."""
    count = 500
    text = "x" * size

    def respond(request: Request) -> Response:
        message = request.message
        assert isinstance(message, dict)
        return Response(200, result(message["id"], {"text": text})) if message["method"] == "large" else answer(request)

    fault_server.respond = respond
    rat = start_rat(read_output=False)
    rat.send(call("first"))
    fault_server.wait_requests(1)
    before = Use.of(rat.process.pid)
    rat.send(*(call(number, "large") for number in range(count)))
    fault_server.wait_requests(1 + count)
    if FULL:
        time.sleep(10)
    full = Use.of(rat.process.pid)
    rat.start_reading_output()
    answers = {str(each["id"]): each["result"] for each in rat.answers(1 + count)}
    assert answers.pop("first") == {"method": "ping"}
    assert answers == {str(number): {"text": text} for number in range(count)}
    assert rat.finish() == (0, [])
    if before is not None and full is not None:
        # What was answered, and what as many workers as there were calls take at most.
        held = full.memory - before.memory
        assert held <= count * (size + 200) * 1.5 + full.threads * (128 << 10) + (8 << 20)
        tell(
            f"{count} answers of {size:,} bytes while the output is not read{' for ten seconds' if FULL else ''}: "
            f"{held / 2**20:.0f} MiB more for {count * size / 2**20:.1f} MiB of answers and {full.threads} threads; "
            "nothing lost."
        )
