"""The events of a stream, by the rules of the HTML Living Standard (section 9.2.6), from bytes split anywhere."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rat


def read(*pieces: bytes, limit: int = rat.MESSAGE_LIMIT) -> list[tuple[str, bytes]]:
    """The events of a stream that comes in pieces."""
    stream = rat.EventStream(limit)
    return [event for piece in pieces for event in stream.feed(piece)]


STREAMS = {
    "one": (b"data: a\n\n", [("message", b"a")]),
    "no space": (b"data:a\n\n", [("message", b"a")]),
    "one space is dropped": (b"data:  a \n\n", [("message", b" a ")]),
    "a type": (b"event: progress\ndata: a\n\n", [("progress", b"a")]),
    "a type is of its event": (b"event: x\ndata: a\n\ndata: b\n\n", [("x", b"a"), ("message", b"b")]),
    "an empty type": (b"event:\ndata: a\n\n", [("message", b"a")]),
    "the last type": (b"event: x\nevent: y\ndata: a\n\n", [("y", b"a")]),
    "carriage returns": (b"event: x\rdata: a\r\rdata: b\r\r", [("x", b"a"), ("message", b"b")]),
    "both": (b"event: x\r\ndata: a\r\n\r\ndata: b\r\n\r\n", [("x", b"a"), ("message", b"b")]),
    "mixed": (b"data: a\r\ndata: b\rdata: c\n\r\ndata: d\n\r", [("message", b"a\nb\nc"), ("message", b"d")]),
    "two blank lines": (b"data: a\n\n\n\ndata: b\n\n", [("message", b"a"), ("message", b"b")]),
    "line feed, carriage return": (b"data: a\n\rdata: b\n\r", [("message", b"a"), ("message", b"b")]),
    "several lines of data": (b"data: {\ndata:\ndata: }\n\n", [("message", b"{\n\n}")]),
    "fields between data": (b"data: a\nid: 1\n: c\ndata: b\n\n", [("message", b"a\nb")]),
    "comments": (b": ping\n:\n\n:data: a\n\ndata: b\n: c\n\n", [("message", b"b")]),
    "no colon": (b"data\ndata\n\n", [("message", b"\n")]),
    "empty data": (b"data\n\ndata:\n\ndata: \n\nid: 7\ndata: \n\n", []),
    "no data": (b"event: x\n\ndata: a\n\n", [("message", b"a")]),
    "unknown fields": (b"date: a\nDATA: b\n data: c\ndata : d\nx\ndata: e\n\n", [("message", b"e")]),
    "colons in data": (b"data: a: b\ndata::c\n\n", [("message", b"a: b\n:c")]),
    "byte-order mark": (b"\xef\xbb\xbfdata: a\n\n", [("message", b"a")]),
    "a second byte-order mark": (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n", [("message", b"b")]),
    "a byte-order mark later": (b":\n\xef\xbb\xbfdata: a\n\ndata: b\n\n", [("message", b"b")]),
    "a byte-order mark in data": (b"data:\xef\xbb\xbfa\n\n", [("message", b"\xef\xbb\xbfa")]),
    "a byte-order mark alone": (b"\xef\xbb\xbf\n\ndata: a\n\n", [("message", b"a")]),
    "bytes of no text": (
        b"data: \xff\x00\x85\xe2\x80\xa8\x0b\x0c\x1c\n\n",
        [("message", b"\xff\x00\x85\xe2\x80\xa8\x0b\x0c\x1c")],
    ),
    "a type of no text": (b"event: \xff\ndata: a\n\n", [("\ufffd", b"a")]),
    "the end within an event": (b"data: a\n\ndata: b\n", [("message", b"a")]),
    "the end within a line": (b"data: a\n\ndata: b", [("message", b"a")]),
    "nothing": (b"", []),
}


@pytest.mark.parametrize("name", STREAMS)
def test_events(name: str) -> None:
    stream, events = STREAMS[name]
    assert read(stream) == events


@pytest.mark.parametrize("name", STREAMS)
def test_events_split_at_any_byte(name: str) -> None:
    stream, events = STREAMS[name]
    assert read(*(stream[i : i + 1] for i in range(len(stream)))) == events
    for first in range(len(stream) + 1):
        for second in range(first, len(stream) + 1):
            assert read(stream[:first], stream[first:second], b"", stream[second:]) == events


@pytest.mark.parametrize(
    ("stream", "last"),
    [
        (b"data: a\n\n", None),
        (b"id: 1\ndata: a\n\n", "1"),
        (b"id: 1\n\n", "1"),
        (b"id: 1\ndata:\n\n", "1"),
        (b"id: 1\n\ndata: a\n\n", "1"),
        (b"id: 1\n\nid\n\n", ""),
        (b"id: 1\n\nid:\n\n", ""),
        (b"id: 1\n\nid: 2\0\n\n", "1"),
        (b"id: 1\nid: 2\0\n\n", "1"),
        (b"id: \xc3\xa9\xff\n\n", "é\ufffd"),
        # What was cut is to be sent again.
        (b"id: 1\n\nid: 2\ndata: a\n", "1"),
        (b"id: 1", None),
    ],
)
def test_the_last_identifier_is_that_of_a_whole_event(stream: bytes, last: str | None) -> None:
    events = rat.EventStream()
    for i in range(len(stream)):
        list(events.feed(stream[i : i + 1]))
    assert events.last_id == last


@pytest.mark.parametrize(
    ("stream", "retry"),
    [
        (b"data: a\n\n", None),
        (b"retry: 5000\n", 5000),
        (b"retry:0\n", 0),
        (b"retry: 1\nretry: 2\n", 2),
        (b"retry: 1\nretry: -2\nretry: 3.0\nretry: x\nretry:\nretry\nretry: 0x1\nretry:  3\n", 1),
        (b"retry: 1\nretry: \xd9\xa3\n", 1),
        (b"retry: 1\nretry: " + b"9" * 5000 + b"\n", 1),
    ],
)
def test_the_time_before_resuming_is_digits(stream: bytes, retry: int | None) -> None:
    events = rat.EventStream()
    assert list(events.feed(stream + b"\n"))[:1] in ([], [("message", b"a")])
    assert events.retry == retry


@pytest.mark.parametrize("split", [1, 7, 64])
def test_an_event_may_be_as_large_as_the_limit(split: int) -> None:
    def pieces(stream: bytes) -> list[bytes]:
        return [stream[i : i + split] for i in range(0, len(stream), split)]

    for data in (b"x" * 100, b"x" * 49 + b"\n" + b"x" * 50, b"\n" * 100):
        stream = b"\xef\xbb\xbf" + b"".join(b"data: " + line + b"\n" for line in data.split(b"\n")) + b": c\nid: 1\n\n"
        assert read(*pieces(stream * 3), limit=100)[0] == ("message", data)
        with pytest.raises(rat.TooLarge, match=r"\Aan event over 99 bytes\Z"):
            read(*pieces(stream), limit=99)


@pytest.mark.parametrize("endless", [b"data: x", b"x", b":", b"data\n:\n", b"data\n", b"data:\nid: 1\n"])
def test_an_event_without_end_is_not_held(endless: bytes) -> None:
    """A server that never ends an event fills no memory: neither with a line, nor with lines that hold nothing."""
    with pytest.raises(rat.TooLarge, match=r"\Aan event over 1000 bytes\Z"):
        read(*[endless] * 3000, limit=1000)


def test_what_is_not_of_an_event_has_no_limit() -> None:
    stream = rat.EventStream(1000)
    for _ in range(3000):
        assert not list(stream.feed(b": ping\r\n\r\nid: 1\n"))
    assert list(stream.feed(b"data: a\n\n")) == [("message", b"a")]


lines = st.sampled_from([b"data", b"event", b"id", b"retry", b"", b"x"])
values = st.sampled_from([b"", b":", b": ", b": a", b":a", b":  b", b": \xc3\xa9", b": \0", b": 12"])
ends = st.sampled_from([b"\n", b"\r", b"\r\n"])
fields = st.builds(lambda name, value, end: name + value + end, lines, values, ends)


@settings(max_examples=200, deadline=None)
@given(st.lists(fields, max_size=12), st.booleans(), st.data())
def test_a_stream_is_the_same_however_it_is_split(parts: list[bytes], mark: bool, data: st.DataObject) -> None:
    """Against the standard's own way, which takes the whole stream, decodes it and splits it into lines."""
    stream = (b"\xef\xbb\xbf" if mark else b"") + b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)])]
    events = rat.EventStream()
    given = [(kind, value.decode()) for piece in pieces for kind, value in events.feed(piece)]
    expected, last, retry = by_the_standard(stream)
    assert given == [(kind, value) for kind, value in expected if value]
    assert (events.last_id or "", events.retry) == (last, retry)


def by_the_standard(stream: bytes) -> tuple[list[tuple[str, str]], str, int | None]:
    """The events of a stream, its last identifier and its time before resuming, word for word as section 9.2.6 has
    it."""
    text = stream.decode("utf-8-sig", "replace").replace("\r\n", "\n").replace("\r", "\n")
    *whole, _ = text.split("\n")
    events: list[tuple[str, str]] = []
    buffered, kind, identifier, last, retry = "", "", "", "", None
    for line in whole:
        if not line:
            last = identifier
            if buffered:
                events.append((kind or "message", buffered.removesuffix("\n")))
            buffered = kind = ""
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            kind = value
        elif name == "data":
            buffered += value + "\n"
        elif name == "id" and "\0" not in value:
            identifier = value
        elif name == "retry" and value and all(c in "0123456789" for c in value):
            retry = int(value)
    return events, last, retry
