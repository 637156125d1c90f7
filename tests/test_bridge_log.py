"""The log: one record a line in slog's form, at its level, and nothing in it that is secret."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import pytest
from bundles import END, Bundle
from fault_server import Response, answer
from harness import call, cancel, notification, read_record

import rat

if TYPE_CHECKING:
    from conftest import StartRat
    from fault_server import FaultServer, Request


def test_what_it_starts_with(start_rat: StartRat, fault_server: FaultServer) -> None:
    before = datetime.now(timezone.utc).replace(microsecond=0)
    started = start_rat()
    assert started.finish() == (0, [])
    relaying, stopped = started.log
    expected = (
        rf"time=(\S+) level=INFO msg=relaying version={re.escape(rat.__version__)} "
        rf"server={fault_server.address} tenant=acme session=laptop expires={END:%Y-%m-%d}"
    )
    match = re.fullmatch(expected, relaying)
    assert match is not None
    assert before <= datetime.fromisoformat(match[1].replace("Z", "+00:00")) <= datetime.now(timezone.utc)
    assert re.fullmatch(r'time=\S+Z level=INFO msg=stopped reason="end of input"', stopped)


def test_a_failure_tells_method_identifier_and_error(start_rat: StartRat, fault_server: FaultServer) -> None:
    fault_server.respond = lambda request: Response(502, b'a "b" = c', "text/plain")
    started = start_rat()
    started.send(call("x y", "tools/call"))
    started.answer()
    (record,) = started.wait_record("relay failed")
    assert record.pop("time")
    assert record == {
        "level": "WARN",
        "msg": "relay failed",
        "method": "tools/call",
        "id": '"x y"',
        "error": f'ratd at {fault_server.address} answered HTTP 502: a "b" = c',
    }


def test_what_a_failure_quotes_of_a_message_is_not_logged(start_rat: StartRat, fault_server: FaultServer) -> None:
    body = b'{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"s3cret"}}'
    fault_server.respond = lambda request: Response(400, body)
    started = start_rat()
    started.send(call(1))
    text = f"ratd at {fault_server.address} answered HTTP 400"
    assert started.error(1) == f"{text}: {body.decode()}"
    (record,) = started.wait_record("relay failed")
    assert record["error"] == text
    assert "s3cret" not in "\n".join(started.log)


def test_a_line_that_cannot_be_relayed_is_a_failure(start_rat: StartRat) -> None:
    started = start_rat()
    started.send(b"s3cret")
    started.answer()
    (record,) = started.wait_record("relay failed")
    assert (record["level"], record["error"]) == ("WARN", "invalid JSON-RPC message: not JSON (character 1)")
    assert "s3cret" not in "\n".join(started.log)


def test_at_debug_every_message_is_told(start_rat: StartRat, fault_server: FaultServer) -> None:
    fault_server.respond = lambda request: (
        None if b'"wait"' in request.body else Response(404, b"", "") if b'"gone"' in request.body else answer(request)
    )
    started = start_rat(level="debug")
    started.call(1, "tools/call")
    started.send(notification("notifications/x"), b"[" + call(2) + b"," + call("3") + b"]")
    started.line()
    started.send(call(4, "gone"))
    started.answer()
    started.send(call(5, "wait"))
    fault_server.wait_requests(5)
    started.send(cancel(5))
    records = started.wait_record("message", 6)
    assert all(re.fullmatch(r"\d+\.\d+ms", record.pop("duration")) for record in records)
    told = [(each.get("method"), each.get("id"), each.get("status")) for each in records]
    assert sorted(told, key=str) == sorted(
        [
            ("tools/call", "1", "200"),
            ("notifications/x", None, "202"),
            ("batch", '2,"3"', "200"),
            ("gone", "4", "404"),
            ("wait", "5", None),
            ("notifications/cancelled", None, "202"),
        ],
        key=str,
    )
    (canceled,) = started.wait_record("call canceled")
    assert (canceled["level"], canceled["id"]) == ("DEBUG", "5")


@pytest.mark.parametrize(
    ("level", "messages"),
    [
        ("debug", {"relaying", "message", "relay failed", "stopped"}),
        ("info", {"relaying", "relay failed", "stopped"}),
        ("warn", {"relay failed"}),
        ("error", set()),
        (None, {"relaying", "relay failed", "stopped"}),
    ],
)
def test_levels(start_rat: StartRat, fault_server: FaultServer, level: str | None, messages: set[str]) -> None:
    fault_server.respond = lambda request: Response(500, b"", "")
    started = start_rat(level=level)
    started.send(call(1))
    started.answer()
    if level == "debug":
        started.wait_record("message")
    assert started.finish() == (0, [])
    assert {record["msg"] for record in started.records()} == messages


QUOTED = {
    "plain": "plain",
    "a/b-c.d:1": "a/b-c.d:1",
    "é": "é",
    "a\\b": "a\\b",
    "": '""',
    "a b": '"a b"',
    'a"b': '"a\\"b"',
    "a=b": '"a=b"',
    "a\nlevel=ERROR": '"a\\nlevel=ERROR"',
    "a\x1b[31m": '"a\\u001b[31m"',
    "a\u2028b": '"a\\u2028b"',
    "\u202e": '"\\u202e"',
    "\ud800": '"\\ud800"',
}


def test_a_value_is_quoted_where_it_must_be(start_rat: StartRat) -> None:
    started = start_rat(level="debug")
    for number, (value, written) in enumerate(QUOTED.items()):
        started.call(number, value)
        record = started.wait_record("message", number + 1)[-1]
        assert record["method"] == value
        (line,) = [each for each in started.log if f" id={number} " in each]
        assert f" method={written} id={number} " in line


def test_a_long_value_is_cut(start_rat: StartRat) -> None:
    started = start_rat(level="debug")
    started.call("i" * 10_000, "m" * 10_000)
    (record,) = started.wait_record("message")
    assert record["method"] == "m" * 500 + "..."
    assert len(record["id"]) < 600


def test_nothing_of_a_message_is_in_the_log(start_rat: StartRat, fault_server: FaultServer, bundle: Bundle) -> None:
    def respond(request: Request) -> Response | None:
        if b'"wait"' in request.body:
            return None
        if b'"odd"' in request.body:
            return Response(200, b'{"s3cret": "answer"}')
        good = answer(request)
        return good._replace(body=good.body.replace(b'"method"', b'"s3cret"'))

    fault_server.respond = respond
    started = start_rat(level="debug")
    params = {"name": "s3cret", "uri": "s3cret", "arguments": {"s3cret": "s3cret"}, "_meta": {"x": "s3cret"}}
    for number, method in enumerate(("tools/call", "resources/read", "prompts/get")):
        started.call(number, method, params)
    started.send(call(3, "odd", params), notification("notifications/x", params))
    started.send(b"[" + call(4, "tools/call", params) + b"]", b'{"s3cret', b'{"id":{"s3cret":1},"method":"s"}')
    for _ in range(4):
        started.line()
    started.send(call(5, "wait", params))
    fault_server.wait_requests(7)
    started.send(cancel(5))
    started.wait_record("message", 8)
    assert started.finish() == (0, [])
    told = "\n".join(started.log)
    assert "s3cret" not in told
    key = bundle.leaves["laptop"].key.decode().splitlines()[1]
    assert key not in told


# A harness that does not read stderr


@pytest.mark.parametrize("blocking", [True, False])
def test_an_unread_log_blocks_nothing(start_rat: StartRat, blocking: bool) -> None:
    started = start_rat(read_errors=False, blocking=blocking)
    count = 5000  # a pipe and the queue hold fewer records
    for _ in range(count // 100):
        started.send(*[b"no"] * 100)
        for _ in range(100):
            started.line()
    started.start_reading_errors()
    (relaying,) = started.wait_record("relaying")
    assert relaying["level"] == "INFO"
    started.send(b"no")
    started.line()
    # What was dropped is told with the next record that is written.
    dropped = started.wait_record("log records dropped")
    assert all(record["level"] == "WARN" for record in dropped)
    assert started.finish() == (0, [])
    dropped = started.records("log records dropped")
    assert len(started.records("relay failed")) + sum(int(each["count"]) for each in dropped) == count + 1


def test_records_are_read_as_they_are_written() -> None:
    # The reader of the tests itself: it must refuse what is no record.
    assert read_record('a=b c="d e" f=""') == {"a": "b", "c": "d e", "f": ""}
    for line in ("", "text", "a=b text", 'a="b', "a=b  c=d", "=b"):
        with pytest.raises(AssertionError):
            read_record(line)
