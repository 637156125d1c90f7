"""Messages of a harness: what is read of a line, what is posted, and lines that cannot be relayed."""

from __future__ import annotations

import base64
import json
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fault_server import HANG, FaultServer, Request, Response, answer, jsonl, result
from harness import Harness, call, large_call, notification

import rat

if TYPE_CHECKING:
    from conftest import Conversation, StartRat

CASES = Path(__file__).parent / "cases"
LIMIT = rat.MESSAGE_LIMIT


@pytest.fixture(name="rat")
def rat_of_the_module(conversation: Conversation) -> Harness:
    """The rat of the module."""
    return conversation.harness


@pytest.fixture(name="fault_server")
def server_of_the_module(conversation: Conversation) -> FaultServer:
    """The server of the module."""
    return conversation.server


@pytest.mark.parametrize("case", jsonl(CASES / "lines.jsonl"), ids=lambda case: str(case["name"]))
def test_case(case: dict[str, object], rat: Harness, fault_server: FaultServer) -> None:
    line = base64.b64decode(str(case["line_b64"]))
    rat.send(line)
    error = case.get("error")
    if isinstance(error, dict):
        message = rat.error(error["id"], error["code"])
        assert message.startswith(error["starts"])
        assert len(message) > len(error["starts"])
    elif "error_or_posted" in case:
        assert rat.answer()["id"] in (1, None)
    elif case.get("posted", "") is None:
        pass
    else:
        (request,) = fault_server.wait_requests(1)
        assert request.body == (line[:-1] if line.endswith(b"\r") else line)
        headers = case.get("headers", {})
        assert isinstance(headers, dict)
        for name, value in headers.items():
            assert request.field(name) == value
        if "written" not in case:
            assert rat.line() == answer(request).body
    # Whatever it was, it reads on, and nothing more was written.
    assert rat.call("then")["id"] == "then"
    posted = [request.body for request in fault_server.requests]
    assert posted[-1] == call("then")
    if isinstance(error, dict) or case.get("posted", "") is None:
        assert len(posted) == 1


# What is read of a line


def identifiers(line: bytes) -> list[str]:
    return [each.text for each in rat.read_message(line).calls]


@pytest.mark.parametrize(
    "identifier",
    [
        "1",
        '"1"',
        '""',
        "-0",
        "0",
        "1.0",
        "1e2",
        "1.50",
        '"\\u00e9"',
        '"\\ud800"',
        '"a\\"b"',
        '"é"',
        "9" * 30,
        "-" + "9" * 5000,
        "0.10000000000000000000001",
    ],
)
def test_an_identifier_is_repeated_in_its_own_characters(identifier: str) -> None:
    for line in (
        f'{{"jsonrpc":"2.0","id":{identifier},"method":"m"}}',
        f' {{ "method" : "m" , "params":{{"id":5}}, "id" : {identifier} }} ',
        f'[{{"id":{identifier},"method":"m"}}]',
    ):
        assert identifiers(line.encode()) == [identifier]


def test_the_last_of_a_repeated_key_counts() -> None:
    assert identifiers(b'{"id":1,"id":2,"method":"m"}') == ["2"]
    assert identifiers(b'{"id":1,"\\u0069d":2.0,"method":"m"}') == ["2.0"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1", "1.0", True),
        ("1", "1e0", True),
        ('"a"', '"\\u0061"', True),
        ("1", '"1"', False),
        ("0", "-0", True),
        (str(2**53 + 1), str(2**53), False),
        ("9" * 5000, "9" * 5000, True),
        ("9" * 5000, "9" * 4999 + "8", False),
        ('"' + "9" * 5000 + '"', "9" * 5000, False),
    ],
)
def test_identifiers_compare_as_json_rpc_has_it(one: str, other: str, same: bool) -> None:
    keys = [rat.identifier_key(rat.parse_json(each.encode())) for each in (one, other)]
    assert None not in keys
    assert (keys[0] == keys[1]) is same


@pytest.mark.parametrize(
    "line",
    [
        b'{"jsonrpc":"2.0","method":"m"}',
        b'{"jsonrpc":"2.0","id":null,"method":"m"}',
        b'{"jsonrpc":"2.0","id":1,"result":{}}',
        b'{"jsonrpc":"2.0","id":1,"error":{}}',
        b'{"jsonrpc":"2.0","id":1}',
        b'{"id":{},"result":1}',
        b'{"method":5,"id":1}',
        b"{}",
        b"[]",
        b"[1,null,[],{}]",
        b'[{"method":"m"},{"id":1,"result":1},{"id":null,"method":"m"}]',
    ],
)
def test_what_is_no_call_is_relayed_and_answered_by_nobody(line: bytes) -> None:
    assert rat.read_message(line).calls == ()


def test_a_batch_holds_each_of_its_calls() -> None:
    line = b' [1, {"id":1,"method":"m"}, {"method":"n"}, [{"id":9,"method":"m"}], '
    line += b'{"id":"b","method":"m"}, {"id":true,"method":"m"}, {"id":3,"result":1}] '
    message = rat.read_message(line)
    assert message.batch
    assert [each.text for each in message.calls] == ["1", '"b"']


@pytest.mark.parametrize(
    ("line", "code", "reason"),
    [
        (b"not json", -32700, "not JSON (character 1)"),
        (b'{"id":1', -32700, "not JSON (character 8)"),
        (b'{"id":1}}', -32700, "not JSON (character 9)"),
        (b"{'id':1}", -32700, "not JSON (character 2)"),
        (b'{"id":01,"method":"m"}', -32700, "not JSON (character 8)"),
        (b"\x00", -32700, "not JSON (character 1)"),
        (b'{"a":"\t"}', -32700, "not JSON (character 7)"),
        (b'\xef\xbb\xbf{"id":1}', -32700, "not JSON (character 1)"),
        (b'{"id":"\xff"}', -32700, "not UTF-8 (byte 8)"),
        (b'{"id":"\xed\xa0\x80"}', -32700, "not UTF-8 (byte 8)"),
        (b'{"id":NaN}', -32700, "NaN is not JSON"),
        (b'{"x":[Infinity]}', -32700, "Infinity is not JSON"),
        (b'{"x":-Infinity}', -32700, "-Infinity is not JSON"),
        (b"5", -32700, "neither an object nor an array"),
        (b'"text"', -32700, "neither an object nor an array"),
        (b"null", -32700, "neither an object nor an array"),
        (b"true", -32700, "neither an object nor an array"),
        (b'{"id":{},"method":"m"}', -32600, "its identifier is neither a string nor a number"),
        (b'{"id":[1],"method":"m"}', -32600, "its identifier is neither a string nor a number"),
        (b'{"id":false,"method":"m"}', -32600, "its identifier is neither a string nor a number"),
        (b'{"id":1e999,"method":"m"}', -32600, "its identifier is neither a string nor a number"),
        (b'{"id":-1e999,"method":"m"}', -32600, "its identifier is neither a string nor a number"),
        (b"[" * 200_000, -32700, "nested too deeply"),
    ],
    ids=range(23),
)
def test_a_line_that_cannot_be_relayed(line: bytes, code: int, reason: str) -> None:
    with pytest.raises(rat.InvalidMessage) as caught:
        rat.read_message(line)
    assert (caught.value.code, str(caught.value)) == (code, reason)


def test_an_integer_too_long_for_python_is_no_fault() -> None:
    line = b'{"id":1,"method":"m","params":{"x":' + b"9" * 5000 + b"}}"
    assert identifiers(line) == ["1"]
    both = b'{"id":1,"method":"m","params":[' + b"9" * 5000 + b",NaN]}"
    with pytest.raises(rat.InvalidMessage, match="NaN is not JSON"):
        rat.read_message(both)


@pytest.mark.parametrize(
    ("arguments", "seconds"),
    [
        ({}, 20),
        (None, 20),
        ({"max_seconds": 5}, 5),
        ({"max_seconds": 50}, 50),
        ({"max_seconds": 51}, 50),
        ({"max_seconds": 1e400}, 50),
        ({"max_seconds": 10**400}, 50),
        ({"max_seconds": -1}, 0),
        ({"max_seconds": 0}, 0),
        ({"max_seconds": 2.5}, 2.5),
        ({"max_seconds": "5"}, 20),
        ({"max_seconds": True}, 20),
        ({"max_seconds": None}, 20),
        ([5], 20),
    ],
    ids=range(14),
)
def test_a_call_of_wait_window_gets_what_it_waits_on_top(arguments: object, seconds: float) -> None:
    params: dict[str, object] = {"name": "wait_window"}
    if arguments is not None:
        params["arguments"] = arguments
    line = call(1, "tools/call", params).replace(b"Infinity", b"1e400")
    message = rat.read_message(line)
    assert message.wait == seconds
    posting = rat.Posting(line, message, {})
    assert posting.seconds == 30 + seconds


def test_a_wait_of_thousands_of_digits_is_no_number_python_has() -> None:
    line = b'{"id":1,"method":"tools/call","params":{"name":"wait_window","arguments":'
    line += b'{"max_seconds":' + b"9" * 5000 + b"}}}"
    assert rat.read_message(line).wait in (20, 50)


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("tools/call", {"name": "read_window", "arguments": {"max_seconds": 5}}),
        ("prompts/get", {"name": "wait_window", "arguments": {"max_seconds": 5}}),
        ("tools/call", {"name": ["wait_window"]}),
        ("tools/call", ["wait_window"]),
    ],
)
def test_any_other_call_waits_for_nothing(method: str, params: object) -> None:
    message = rat.read_message(call(1, method, params))
    assert message.wait == 0
    assert rat.Posting(b"", message, {}).seconds == 30


def test_a_batch_gets_the_longest_wait_in_it() -> None:
    waits = [call(n, "tools/call", {"name": "wait_window", "arguments": {"max_seconds": n}}) for n in (3, 40, 7)]
    assert rat.read_message(b"[" + b",".join(waits) + b",5]").wait == 40
    assert rat.read_message(b"[" + call(1) + b"]").wait == 0
    assert rat.read_message(b"[]").wait == 0


# Lines


def test_lines_end_in_lf_or_crlf_and_blank_ones_are_skipped(rat: Harness, fault_server: FaultServer) -> None:
    rat.write(b"\n\r\n \t \n" + call(1) + b"\r\n\n" + call(2) + b"\n\r\n")
    assert [each["id"] for each in rat.answers(2)] == [1, 2]
    assert sorted(request.body for request in fault_server.requests) == [call(1), call(2)]


def test_a_line_may_come_in_pieces(rat: Harness, fault_server: FaultServer) -> None:
    line = call(1, "tools/call", {"name": "é", "arguments": {}})
    for byte in line[:-1]:
        rat.write(bytes([byte]))
    rat.write(line[-1:] + b"\r")
    rat.write(b"\n")
    assert rat.answer()["id"] == 1
    assert fault_server.requests[0].body == line


def test_the_bytes_posted_are_the_bytes_read(rat: Harness, fault_server: FaultServer) -> None:
    lines = [
        b' {"jsonrpc" : "2.0",  "id":1, "method":"m", "x":1.10, "x":1e5}',
        '{"id":2,"method":"é","params":"\\u00e9\\/"}'.encode(),
        b'{"id":3,"method":"m","n":123456789012345678901234567890.10}\t ',
        b'{"id":4,"method":"m","params":"' + b"\x7f" + '\u2028"}'.encode(),
    ]
    rat.send(*lines)
    assert [each["id"] for each in rat.answers(4)] == [1, 2, 3, 4]
    assert sorted(request.body for request in fault_server.requests) == sorted(lines)


def test_a_last_line_without_its_end_is_dispatched(start_rat: StartRat, fault_server: FaultServer) -> None:
    rat = start_rat()
    # It is ended with the rest, so its post shows only where the end of input comes later: here it is
    # invalid, and answered by rat itself.
    rat.write(b"not json")
    status, written = rat.finish()
    assert status == 0
    (line,) = written
    assert json.loads(line)["error"]["code"] == -32700
    assert fault_server.requests == []


# Too large


def test_a_line_of_the_limit_is_relayed(rat: Harness, fault_server: FaultServer) -> None:
    fault_server.respond = lambda request: Response(200, result(1, len(request.body)))
    line = large_call(1, LIMIT)
    rat.write(line + b"\r\n")
    assert rat.answer()["result"] == LIMIT
    assert fault_server.requests[0].body == line


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_line_over_the_limit_is_answered_and_drained(rat: Harness, fault_server: FaultServer, end: bytes) -> None:
    rat.write(large_call(1, LIMIT + 1) + end)
    assert rat.error(None) == "message over 16 MiB, not relayed"
    assert rat.call(2)["id"] == 2
    assert [request.body for request in fault_server.requests] == [call(2)]


def test_a_line_far_over_the_limit_is_not_held(start_rat: StartRat) -> None:
    rat = start_rat()
    # 160 MiB in one line: answered while it still comes, and once.
    for _ in range(17):
        rat.write(b"x" * (1 << 20))
    assert rat.error(None) == "message over 16 MiB, not relayed"
    for _ in range(143):
        rat.write(b"x" * (1 << 20))
    status = Path(f"/proc/{rat.process.pid}/status")
    if status.exists():  # Linux tells the most memory ever held
        peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        assert int(peak.split()[1]) < 120 * 1024
    rat.write(b"\n")
    assert rat.call(2)["id"] == 2
    assert rat.finish() == (0, [])


# Several at once


def test_answers_are_written_as_they_come(rat: Harness, fault_server: FaultServer) -> None:
    first_waits = threading.Event()

    def respond(request: Request) -> Response:
        message = request.message
        assert isinstance(message, dict)
        if message["id"] == 1:
            assert first_waits.wait(HANG)
        return Response(200, result(message["id"]))

    fault_server.respond = respond
    rat.send(call(1), call(2))
    assert rat.answer()["id"] == 2
    first_waits.set()
    assert rat.answer()["id"] == 1


def test_calls_of_one_identifier_get_an_answer_each(rat: Harness, fault_server: FaultServer) -> None:
    rat.send(call(1, "a"), call(1, "b"), call("1", "c"))
    answers = [rat.answer() for _ in range(3)]
    assert sorted(str(each["result"]) for each in answers) == ["{'method': 'a'}", "{'method': 'b'}", "{'method': 'c'}"]
    assert {type(each["id"]) for each in answers if each["result"] == {"method": "c"}} == {str}


def test_a_batch_is_relayed_and_answered_as_it_is(rat: Harness, fault_server: FaultServer) -> None:
    line = b"[" + call(1) + b" ," + notification("n") + b"," + call("x") + b"]"
    rat.send(line)
    assert json.loads(rat.line()) == [
        {"jsonrpc": "2.0", "id": 1, "result": {"method": "ping"}},
        {"jsonrpc": "2.0", "id": "x", "result": {"method": "ping"}},
    ]
    assert fault_server.requests[0].body == line


def test_a_batch_without_calls_is_answered_by_nobody(rat: Harness, fault_server: FaultServer) -> None:
    rat.send(b"[" + notification("n") + b"]", b"[]")
    fault_server.wait_requests(2)
    assert rat.call(1)["id"] == 1


def test_a_batch_that_fails_is_answered_for_each_of_its_calls(rat: Harness, fault_server: FaultServer) -> None:
    fault_server.respond = lambda request: Response(503, b"busy", "text/plain")
    line = b"[" + call(1) + b"," + notification("n") + b',{"id":2.50,"method":"m"}]'
    rat.send(line)
    text = f"ratd at {fault_server.address} answered HTTP 503: busy"
    error = f'"error":{{"code":-32050,"message":"{text}"}}}}'
    assert rat.line().decode() == (f'[{{"jsonrpc":"2.0","id":1,{error},{{"jsonrpc":"2.0","id":2.50,{error}]')


def test_a_failed_batch_without_calls_is_only_logged(start_rat: StartRat, fault_server: FaultServer) -> None:
    fault_server.respond = lambda request: Response(503, b"busy", "text/plain")
    started = start_rat()
    started.send(b"[" + notification("n") + b"]")
    (record,) = started.wait_record("relay failed")
    assert record["method"] == "batch"
    assert record["error"] == f"ratd at {fault_server.address} answered HTTP 503: busy"
    assert started.finish() == (0, [])


def test_an_identifier_beside_any_depth_of_nesting_never_ends_the_bridge() -> None:
    """Its own characters are read a second time, deeper in the stack: the last depths to parse must not raise."""
    refused = 0
    for depth in range(1 if sys.version_info < (3, 12) else 9_800, 12_000):
        line = b'{"jsonrpc":"2.0","id":"a","method":"m","params":' + b"[" * depth + b"]" * depth + b"}"
        try:
            assert rat.read_message(line).calls[0].text == '"a"'
        except rat.InvalidMessage as e:
            refused += str(e) == "nested too deeply"
            if refused == 20:
                return
    pytest.fail("no depth was refused")
