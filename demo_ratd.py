"""A loopback MCP server that speaks to ``rat`` as ratd does, for the demonstration and the tests.

Mutual TLS 1.3, ``POST /mcp`` only, stateless, answers in JSON. Both eras of the protocol: the
versions negotiated by ``initialize`` (2024-11-05 to 2025-11-25), and 2026-07-28, where each request
carries its version and its HTTP fields are checked against its body. A call whose connection the
client closes is canceled. Three real tools: ``read_file`` and ``write_file`` inside one directory,
and ``wait``.

    python demo_ratd.py --bundle BUNDLE/server --directory DIR

It has an HTTP parser of its own rather than ``http.server``: a call that waits must watch its
connection, which means to read ahead on it, and the buffer ``http.server`` reads through cannot be
asked. That module also writes head and body apart, and parses fields as if they were mail.

One thread a connection, one connection a call of rat: no pool is worth its trouble here.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import contextlib
import email.utils
import errno
import json
import math
import os
import re
import secrets
import selectors
import signal
import socket
import ssl
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from types import FrameType
from typing import NamedTuple, TypeVar

import rat

_Recorded = TypeVar("_Recorded")

# What initialize negotiates, oldest first; another version asked for gets the newest of these
# (MCP specification 2025-11-25, Lifecycle, Version Negotiation).
NEGOTIATED_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
# What each request carries by itself (MCP specification 2026-07-28).
CARRIED_VERSIONS = ("2026-07-28",)
# The only version with JSON-RPC batches, and the one of a message that does not tell its version.
BATCH_VERSION = "2025-03-26"

VERSION_META = "io.modelcontextprotocol/protocolVersion"
CAPABILITIES_META = "io.modelcontextprotocol/clientCapabilities"
CLIENT_META = "io.modelcontextprotocol/clientInfo"
SERVER_META = "io.modelcontextprotocol/serverInfo"

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
HEADER_MISMATCH = -32020
UNSUPPORTED_VERSION = -32022

# The HTTP status of a JSON-RPC error in 2026-07-28, as the official SDK has it. The negotiated
# versions answer a well-formed request with 200 whatever comes of it.
STATUS_OF_ERROR = {
    PARSE_ERROR: 400,
    INVALID_REQUEST: 400,
    INVALID_PARAMS: 400,
    HEADER_MISMATCH: 400,
    UNSUPPORTED_VERSION: 400,
    METHOD_NOT_FOUND: 404,
}

# Seconds: ratd closes a connection idle for as long; amid a message or a handshake a peer has less.
IDLE_SECONDS = 120.0
STALL_SECONDS = 30.0
HANDSHAKE_SECONDS = 10.0
# For as long a refused client's request is read and dropped: closing a socket with unread bytes
# resets the connection, and on some systems the alert or the answer is lost with it.
LINGER_SECONDS = 1.0

HEAD_LIMIT = 64 * 1024
# Bytes read ahead to see the connection of a waiting call close; beyond, it is no longer watched.
AHEAD_LIMIT = 1024 * 1024
# Head and body go out in one write up to this size; above, joining them costs more than a write.
JOIN_LIMIT = 64 * 1024
# Requests, cancellations and refusals remembered: the latest of each.
RECORDED = 10_000
WAIT_LIMIT = 600

SERVER_INFO = {"name": "demo_ratd", "version": rat.__version__}

# RFC 9110, section 5.6.2: what a field name, and a name annotated in a schema, is made of.
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_ENCODED = re.compile(r"=\?base64\?(.*)\?=")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


# --- tools ----------------------------------------------------------------------------------------


class ToolError(Exception):
    """A tool failed: its text becomes a result with ``isError``, for the model to read."""


class Canceled(Exception):
    """The client closed the connection of a call that was waiting."""


class Call(NamedTuple):
    """What a tool is given beside its arguments."""

    session: str
    """Name in the client's certificate."""
    wait: Callable[[float], None]
    """Wait for some seconds; raises `Canceled` as soon as the client closes the connection."""


class DemoTool(NamedTuple):
    """A tool of the server. `run` returns its text, or raises `ToolError`."""

    name: str
    description: str
    input_schema: Mapping[str, object]
    run: Callable[[Mapping[str, object], Call], str]


class Directory:
    """The files of one directory, and nothing outside it.

    On POSIX each step of a path is opened from the step before without following symbolic links,
    so that nothing changes between a check and its use. Where that cannot be had (Windows), the
    path is resolved, then compared. Links are refused even when they point inside: to follow those
    alone safely takes more than a demonstration should.
    """

    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)
        if not os.path.isdir(self.path):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)

    def read(self, path: str) -> str:
        """Return the text of a file of 16 MiB at most, or raise `ToolError`."""
        with self._reached(path) as (name, parent), open(name, "rb", opener=_opener(parent)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ToolError(f"{path}: not a file")
            content = file.read(rat.MESSAGE_LIMIT + 1)
        if len(content) > rat.MESSAGE_LIMIT:
            raise ToolError(f"{path}: over 16 MiB")
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise ToolError(f"{path}: not UTF-8 text") from error

    def write(self, path: str, text: str) -> int:
        """Replace a file in one step, or leave it as it was and raise `ToolError`.

        Returns the number of bytes written.
        """
        try:
            content = text.encode()
        except UnicodeEncodeError as error:
            raise ToolError(f"{path}: the content is not valid Unicode") from error
        with self._reached(path) as (name, parent):
            mode = 0o666
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(name, dir_fd=parent, follow_symlinks=False)
                if not stat.S_ISREG(found.st_mode):
                    raise ToolError(f"{path}: not a file")
                mode = stat.S_IMODE(found.st_mode)
            draft = os.path.join(os.path.dirname(name), f".{secrets.token_hex(8)}.part")
            try:
                with open(draft, "xb", opener=_opener(parent, mode)) as file:
                    file.write(content)
                os.replace(draft, name, src_dir_fd=parent, dst_dir_fd=parent)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(draft, dir_fd=parent)
                raise
        return len(content)

    @contextlib.contextmanager
    def _reached(self, path: str) -> Iterator[tuple[str, int | None]]:
        """What names the file, and the open directory that name is relative to, where there is one.

        An `OSError` or `ValueError` of the body becomes a `ToolError` telling `path`.
        """
        steps = [step for step in path.replace(os.sep, "/").split("/") if step not in ("", ".")]
        if not steps or ".." in steps or os.path.isabs(path) or path.startswith("/"):
            raise ToolError(f"{path}: not inside the directory of this server")
        try:
            with contextlib.ExitStack() as opened:
                if os.open not in os.supports_dir_fd:
                    whole = os.path.realpath(os.path.join(self.path, *steps))
                    if os.path.commonpath([whole, self.path]) != self.path:
                        raise ToolError(f"{path}: not inside the directory of this server")
                    yield whole, None
                    return
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
                held = os.open(self.path, flags)
                opened.callback(os.close, held)
                for step in steps[:-1]:
                    held = os.open(step, flags, dir_fd=held)
                    opened.callback(os.close, held)
                yield steps[-1], held
        except ValueError as error:  # a null character, half of a surrogate pair, another drive
            raise ToolError(f"{path}: not a path") from error
        except OSError as error:
            link = error.errno == errno.ELOOP
            reason = "symbolic links are not followed" if link else str(error.strerror).lower()
            raise ToolError(f"{path}: {reason}") from error


def _opener(parent: int | None, mode: int = 0o666) -> Callable[[str, int], int]:
    """Opens below a directory, without following a link or waiting for a pipe's other end."""
    more = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    return lambda name, flags: os.open(name, flags | more, mode, dir_fd=parent)


def directory_tools(directory: Directory) -> tuple[DemoTool, ...]:
    """The three tools of the demonstration; the schemas of two of them are ratd's own."""

    def read_file(arguments: Mapping[str, object], call: Call) -> str:
        first = _whole(arguments.get("start_line", 1))
        most = arguments.get("max_lines")
        if first < 1:
            raise ToolError("start_line: lines are counted from 1")
        # At line feeds alone: str.splitlines() knows eight other ends, which editors do not count.
        lines = re.findall(r"[^\n]*\n|[^\n]+", directory.read(str(arguments["path"])))[first - 1 :]
        if most is not None:
            lines = lines[: _whole(most)]
        if arguments.get("line_numbers"):
            lines = [f"{number}\t{line}" for number, line in enumerate(lines, first)]
        return "".join(lines)

    def write_file(arguments: Mapping[str, object], call: Call) -> str:
        path = str(arguments["path"])
        written = directory.write(path, str(arguments["content"]))
        return f"{path}: {written} bytes written"

    def wait(arguments: Mapping[str, object], call: Call) -> str:
        seconds = arguments["seconds"]
        assert isinstance(seconds, (int, float))  # the schema says so
        call.wait(seconds)
        return f"waited {seconds:g} s"

    path_schema = {"type": "string", "description": "Path of the file."}
    return (
        DemoTool(
            "read_file",
            "Read a text file of the server's directory, whole or some of its lines.",
            {
                "type": "object",
                "properties": {
                    "path": path_schema,
                    "start_line": {"type": "integer", "description": "First line to read."},
                    "max_lines": {"type": "integer", "description": "Lines to read at most.", "minimum": 0},
                    "line_numbers": {"type": "boolean", "description": "Whether each line starts with its number."},
                },
                "required": ["path"],
                "additionalProperties": False,
            },
            read_file,
        ),
        DemoTool(
            "write_file",
            "Write a text file of the server's directory, replacing what it held.",
            {
                "type": "object",
                "properties": {"path": path_schema, "content": {"type": "string", "description": "Content to write."}},
                "required": ["path", "content"],
                "additionalProperties": False,
            },
            write_file,
        ),
        DemoTool(
            "wait",
            "Wait, then answer: a call long enough to be canceled.",
            {
                "type": "object",
                "properties": {
                    "seconds": {
                        "type": "number",
                        "description": "Seconds to wait.",
                        "minimum": 0,
                        "maximum": WAIT_LIMIT,
                    }
                },
                "required": ["seconds"],
                "additionalProperties": False,
            },
            wait,
        ),
    )


def _whole(value: object) -> int:
    """The value of an argument its schema calls an integer, of which JSON knows 5 and 5.0."""
    assert isinstance(value, (int, float))
    return int(value)


def _is_number(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return value.is_integer() if isinstance(value, float) else _is_number(value)


_IS_OF_TYPE: Mapping[str, Callable[[object], bool]] = {
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "number": _is_number,
    "integer": _is_whole,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def schema_fault(schema: Mapping[str, object], arguments: Mapping[str, object]) -> str | None:
    """What is wrong with the arguments of a call, or None.

    As much of JSON Schema as ratd's schemas use: required, type, minimum and maximum of the
    properties, additionalProperties.
    """
    properties = _object(schema.get("properties"))
    required = schema.get("required")
    for name in required if isinstance(required, list) else ():
        if name not in arguments:
            return f"{name}: missing"
    for name, value in arguments.items():
        wanted = properties.get(name)
        if not isinstance(wanted, dict):
            if schema.get("additionalProperties") is False:
                return f"{name}: not an argument of this tool"
            continue
        kind = wanted.get("type")
        if isinstance(kind, str) and kind in _IS_OF_TYPE and not _IS_OF_TYPE[kind](value):
            return f"{name}: not of type {kind}"
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if "minimum" in wanted and value < wanted["minimum"]:
                return f"{name}: under {wanted['minimum']}"
            if "maximum" in wanted and value > wanted["maximum"]:
                return f"{name}: over {wanted['maximum']}"
    return None


def _object(value: object) -> Mapping[str, object]:
    """`value` where it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


# --- HTTP -----------------------------------------------------------------------------------------


class Request(NamedTuple):
    """A request as the server received it."""

    session: str
    """Name in the client's certificate."""
    connection: int
    """Which connection it came on, counted from 1."""
    method: str
    target: str
    version: str
    """``HTTP/1.1`` or ``HTTP/1.0``."""
    fields: tuple[tuple[str, str], ...]
    """Names and values in the order and letters received."""
    body: bytes
    """Empty in `DemoRatd.requests` unless the server was told to keep bodies."""

    def values(self, name: str) -> list[str]:
        """The values of each field of this name, in whatever letters."""
        name = name.lower()
        return [value for field, value in self.fields if field.lower() == name]

    def field(self, name: str) -> str | None:
        """The first value of a field, or None."""
        values = self.values(name)
        return values[0] if values else None

    @property
    def keeps_open(self) -> bool:
        """Whether the client expects the connection to stay (RFC 9112, section 9.3)."""
        options = _list_of(self.values("connection"))
        if self.version == "HTTP/1.0":
            return "keep-alive" in options
        return "close" not in options


class HttpError(Exception):
    """A message that cannot be answered but by this status; the connection ends with it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class _Reply(NamedTuple):
    status: int
    body: bytes = b""
    content_type: str = "application/json"
    fields: tuple[tuple[str, str], ...] = ()


def _list_of(values: Sequence[str]) -> list[str]:
    """The members of a comma-separated field in lower case, without their parameters."""
    members = (member.split(";")[0].strip() for value in values for member in value.split(","))
    return [member.lower() for member in members if member]


class _Connection:
    """One accepted connection. Its thread alone reads, writes and closes it.

    Another thread may shut its socket down, by `shut`, which wakes whatever waits on it.
    """

    def __init__(self, number: int, sock: ssl.SSLSocket, stopping: threading.Event) -> None:
        self.number = number
        self.session = ""
        self._socket = sock
        self._stopping = stopping
        self._received = bytearray()

    def shut(self) -> None:
        """End the connection, from any thread; never raises."""
        with contextlib.suppress(OSError):
            # Not SSLSocket.shutdown: it takes the TLS state from under the thread reading it.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def shake_hands(self) -> None:
        """Complete the TLS handshake and learn the session; `OSError` when it fails."""
        self._socket.settimeout(HANDSHAKE_SECONDS)
        self._socket.do_handshake()
        certificate = self._socket.getpeercert() or {}
        subject = certificate.get("subject", ())
        assert isinstance(subject, tuple)
        names = [pair[1] for rdn in subject for pair in rdn if pair[0] == "commonName"]
        self.session = names[0] if names else ""

    def close(self, *, linger: bool = False) -> None:
        """Say goodbye and close; with `linger`, first read what the peer still sends."""
        with contextlib.suppress(OSError, ValueError):
            self._socket.settimeout(0)
            # close_notify goes out at once; the peer's own is not waited for.
            self._socket.unwrap()
        if linger:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_WR)
                self._discard()
        self._socket.close()

    def _discard(self) -> None:
        until = time.monotonic() + LINGER_SECONDS
        while (left := until - time.monotonic()) > 0:
            self._socket.settimeout(left)
            # The bytes of the socket itself: after a failed handshake TLS reads no more of them.
            if not socket.socket.recv(self._socket, 65536):
                return

    def _receive(self, seconds: float) -> bool:
        """Read more; False at the end of the stream."""
        if self._socket.gettimeout() != seconds:
            self._socket.settimeout(seconds)
        received = self._socket.recv(65536)
        self._received += received
        return bool(received)

    def wait(self, seconds: float) -> None:
        """Wait, or raise `Canceled` as soon as the peer closes the connection.

        Closing shows on reading only, so what a client sends meanwhile is kept for later.
        """
        until = time.monotonic() + seconds
        try:
            while (left := until - time.monotonic()) > 0:
                if len(self._received) > AHEAD_LIMIT:
                    if self._stopping.wait(left):
                        raise Canceled
                elif not self._receive(left):
                    raise Canceled
        except socket.timeout:
            return
        except OSError as error:
            raise Canceled from error

    def read(self) -> Request | None:
        """The next request; None when the peer leaves, or is idle for `IDLE_SECONDS`.

        Raises `HttpError` for what is not HTTP or too large, `OSError` when the connection fails.
        """
        lines = self._read_head()
        if lines is None:
            return None
        start, *rest = lines
        parts = start.split(" ")
        if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]) or not parts[1]:
            raise HttpError(400, "the request line is not one of HTTP/1.1")
        if parts[2] not in ("HTTP/1.1", "HTTP/1.0"):
            raise HttpError(505, "only HTTP/1.1 is spoken here")
        fields = []
        for line in rest:
            name, colon, value = line.partition(":")
            # A name followed by a space, or a folded line, is one parser's field and another's
            # text (RFC 9112, section 5.1 and 5.2).
            if not colon or not _TOKEN.fullmatch(name):
                raise HttpError(400, "a field is not of the form NAME: VALUE")
            fields.append((name, value.strip(" \t")))
        head = Request(self.session, self.number, parts[0], parts[1], parts[2], tuple(fields), b"")
        if head.version == "HTTP/1.1" and len(head.values("host")) != 1:
            raise HttpError(400, "there must be one Host field")
        return head._replace(body=self._read_body(head))

    def _read_head(self) -> list[str] | None:
        checked = 0
        while True:
            if not checked:
                # RFC 9112, section 2.2: empty lines before a request line are skipped.
                while self._received.startswith((b"\r", b"\n")):
                    del self._received[:1]
            end = self._received.find(b"\r\n\r\n", max(0, checked - 3))
            if end >= 0:
                break
            checked = len(self._received)
            if checked > HEAD_LIMIT:
                raise HttpError(431, "the head of the request is over 64 KiB")
            try:
                more = self._receive(STALL_SECONDS if checked else IDLE_SECONDS)
            except socket.timeout:
                if checked:
                    raise HttpError(408, "the request did not arrive") from None
                return None
            if not more:
                return None
        head = bytes(self._received[:end])
        del self._received[: end + 4]
        lines = head.decode("latin-1").split("\r\n")
        if any(_CONTROL.search(line) for line in lines):
            raise HttpError(400, "the head of the request holds a control character")
        return lines

    def _read_body(self, head: Request) -> bytes:
        codings = _list_of(head.values("transfer-encoding"))
        lengths = set(_list_of(head.values("content-length")))
        if codings and lengths:
            raise HttpError(400, "Content-Length and Transfer-Encoding contradict each other")
        if codings and codings != ["chunked"]:
            raise HttpError(501, "only the chunked transfer coding is spoken here")
        if len(lengths) > 1 or not all(re.fullmatch("[0-9]{1,18}", length) for length in lengths):
            raise HttpError(400, "Content-Length is not a length")
        length = int(lengths.pop()) if lengths else 0
        if length > rat.MESSAGE_LIMIT:
            raise HttpError(413, "the message is over 16 MiB")
        if (codings or length > len(self._received)) and "100-continue" in _list_of(head.values("expect")):
            self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        return self._read_chunks() if codings else self._read_exactly(length)

    def _read_exactly(self, length: int) -> bytes:
        if length <= len(self._received):
            body = bytes(self._received[:length])
            del self._received[:length]
            return body
        whole = bytearray(length)
        filled = len(self._received)
        whole[:filled] = self._received
        self._received.clear()
        self._socket.settimeout(STALL_SECONDS)
        with memoryview(whole) as view:
            while filled < length:
                count = self._socket.recv_into(view[filled:])
                if not count:
                    raise ConnectionResetError("the connection closed amid a message")
                filled += count
        return bytes(whole)

    def _read_chunks(self) -> bytes:
        """A chunked body (RFC 9112, section 7.1); extensions and trailers are read and dropped."""
        body = bytearray()
        while True:
            size = self._read_line().split(b";")[0].strip()
            if not re.fullmatch(rb"[0-9A-Fa-f]{1,8}", size):
                raise HttpError(400, "a chunk has no size")
            count = int(size, 16)
            if len(body) + count > rat.MESSAGE_LIMIT:
                raise HttpError(413, "the message is over 16 MiB")
            if not count:
                while self._read_line():
                    pass
                return bytes(body)
            body += self._read_exactly(count)
            if self._read_line():
                raise HttpError(400, "a chunk is longer than its size")

    def _read_line(self) -> bytes:
        while (end := self._received.find(b"\r\n")) < 0:
            if len(self._received) > HEAD_LIMIT:
                raise HttpError(400, "a line of the body's framing is over 64 KiB")
            if not self._receive(STALL_SECONDS):
                raise ConnectionResetError("the connection closed amid a message")
        line = bytes(self._received[:end])
        del self._received[: end + 2]
        return line

    def write(self, reply: _Reply, *, keep: bool, head_only: bool = False) -> None:
        """Send an answer; `OSError` when the peer is gone."""
        fields = [("Date", email.utils.formatdate(usegmt=True)), *reply.fields]
        if reply.body:
            fields.append(("Content-Type", reply.content_type))
        fields.append(("Content-Length", str(len(reply.body))))
        if not keep:
            fields.append(("Connection", "close"))
        phrase = HTTPStatus(reply.status).phrase
        lines = [f"HTTP/1.1 {reply.status} {phrase}", *(f"{name}: {text}" for name, text in fields)]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        self._socket.settimeout(IDLE_SECONDS)
        if head_only or not reply.body:
            self._socket.sendall(head)
        elif len(reply.body) <= JOIN_LIMIT:
            self._socket.sendall(head + reply.body)
        else:
            self._socket.sendall(head)
            self._socket.sendall(reply.body)


# --- MCP ------------------------------------------------------------------------------------------


class _RpcError(Exception):
    """A JSON-RPC error, as the response to a request will tell it."""

    def __init__(self, code: int, message: str, data: object = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


def _no_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")


def _parse(body: bytes) -> object:
    """The JSON value of a body; `ValueError` or `RecursionError` where it is none."""
    value: object = json.loads(body.decode(), parse_constant=_no_constant)
    return value


def _rendered(message: object) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def _error(identifier: object, error: _RpcError) -> dict[str, object]:
    told: dict[str, object] = {"code": error.code, "message": error.message}
    if error.data is not None:
        told["data"] = error.data
    return {"jsonrpc": "2.0", "id": identifier, "error": told}


class _Speaker:
    """MCP over one POST: from a request to what is answered, without state between two."""

    def __init__(self, tenant: str, tools: Sequence[DemoTool]) -> None:
        self._tenant = tenant
        self._tools = {tool.name: tool for tool in tools}

    def answer(self, request: Request, call: Call) -> _Reply:
        """The answer to a request for ``/mcp``; raises `Canceled`."""
        try:
            message = _parse(request.body)
        except (ValueError, RecursionError):
            return self._refuse(None, _RpcError(PARSE_ERROR, "the body is not JSON"))
        if isinstance(message, list):
            return self._answer_batch(request, message, call)
        if not isinstance(message, dict):
            return self._refuse(None, _RpcError(INVALID_REQUEST, "the body is not a message"))
        return self._answer_message(request, message, call)

    def _refuse(self, identifier: object, error: _RpcError) -> _Reply:
        return _Reply(STATUS_OF_ERROR.get(error.code, 200), _rendered(_error(identifier, error)))

    def _answer_message(self, request: Request, message: Mapping[str, object], call: Call) -> _Reply:
        version = request.field("mcp-protocol-version")
        meta = _object(_object(message.get("params")).get("_meta"))
        carried = version is not None and version not in NEGOTIATED_VERSIONS
        identifier: object = None
        try:
            kind = _kind(message)
            if kind != "request":
                if version is not None and carried and version not in CARRIED_VERSIONS:
                    raise _unsupported(version)
                return _Reply(202)
            identifier = message["id"]
            if not carried and VERSION_META not in meta:
                return _Reply(200, _rendered(self._answer_negotiated(message, call)))
            self._check_fields(request, message)
            result = self._run_carried(message, call)
        except _RpcError as error:
            return self._refuse(identifier, error)
        return _Reply(200, _rendered({"jsonrpc": "2.0", "id": identifier, "result": result}))

    def _answer_batch(self, request: Request, messages: list[object], call: Call) -> _Reply:
        """A batch of 2025-03-26, one message after the other; an answer for each request of it."""
        if request.field("mcp-protocol-version") not in (None, BATCH_VERSION):
            return self._refuse(None, _RpcError(INVALID_REQUEST, f"only {BATCH_VERSION} has batches"))
        if not messages:
            return self._refuse(None, _RpcError(INVALID_REQUEST, "the batch is empty"))
        answers = []
        for message in messages:
            try:
                if not isinstance(message, dict):
                    raise _RpcError(INVALID_REQUEST, "a member of the batch is not a message")
                if _kind(message) == "request":
                    answers.append(self._answer_negotiated(message, call))
            except _RpcError as error:
                answers.append(_error(None, error))
        return _Reply(200, _rendered(answers)) if answers else _Reply(202)

    def _answer_negotiated(self, message: Mapping[str, object], call: Call) -> dict[str, object]:
        """The response to a request of a version negotiated by initialize."""
        method, params, identifier = message["method"], message.get("params"), message["id"]
        result: dict[str, object]
        try:
            if params is not None and not isinstance(params, dict):
                raise _RpcError(INVALID_PARAMS, "params: not an object")
            fields = _object(params)
            if method == "initialize":
                result = self._initialize(fields, call)
            elif method == "ping":
                result = {}
            elif method == "tools/list":
                result = self._list_tools(fields)
            elif method == "tools/call":
                result = self._call_tool(fields, call)
            else:
                raise _RpcError(METHOD_NOT_FOUND, f"no method {method}")
        except _RpcError as error:
            return _error(identifier, error)
        return {"jsonrpc": "2.0", "id": identifier, "result": result}

    def _run_carried(self, message: Mapping[str, object], call: Call) -> dict[str, object]:
        """The result of a request of 2026-07-28, whose fields have been checked."""
        method = message["method"]
        params = _object(message["params"])
        if method == "server/discover":
            result: dict[str, object] = {
                "supportedVersions": list(CARRIED_VERSIONS),
                "capabilities": {"tools": {}},
                "instructions": self._instructions(call),
            }
        elif method == "tools/list":
            result = self._list_tools(params)
        elif method == "tools/call":
            result = self._call_tool(params, call)
        else:
            raise _RpcError(METHOD_NOT_FOUND, f"no method {method}")
        if method != "tools/call":
            # Required of what a client may cache; this one may not, as 0 says.
            result.update(ttlMs=0, cacheScope="private")
        result.update(resultType="complete", _meta={SERVER_META: SERVER_INFO})
        return result

    def _check_fields(self, request: Request, message: Mapping[str, object]) -> None:
        """What 2026-07-28 wants of each request: its `_meta`, and HTTP fields that repeat the body.

        The order is that of the official SDK: what is missing in the body, then fields against
        body, then whether the version is one of ours. (MCP specification 2026-07-28, Streamable
        HTTP, Standard and Custom Headers.)
        """
        method = message["method"]
        params = _object(message.get("params"))
        meta = _object(params.get("_meta"))
        missing = [key for key in (VERSION_META, CAPABILITIES_META) if key not in meta]
        if missing:
            raise _RpcError(INVALID_PARAMS, f"params._meta lacks {' and '.join(missing)}")
        version = meta[VERSION_META]
        for name in ("Mcp-Protocol-Version", "Mcp-Method", "Mcp-Name"):
            if len(request.values(name)) > 1:
                raise _RpcError(HEADER_MISMATCH, f"{name} is there more than once")
        if request.field("mcp-protocol-version") != version:
            raise _RpcError(HEADER_MISMATCH, "Mcp-Protocol-Version differs from params._meta")
        if request.field("mcp-method") != method:
            raise _RpcError(HEADER_MISMATCH, "Mcp-Method differs from the method")
        named = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}.get(str(method))
        if named is not None and isinstance(params.get(named), str):
            name_field = request.field("mcp-name")
            if name_field is None or _decoded(name_field) != params[named]:
                raise _RpcError(HEADER_MISMATCH, f"Mcp-Name differs from params.{named}")
        if version not in CARRIED_VERSIONS:
            raise _unsupported(str(version))
        if not isinstance(meta[CAPABILITIES_META], dict):
            raise _RpcError(INVALID_PARAMS, f"params._meta.{CAPABILITIES_META}: not an object")
        if CLIENT_META in meta:
            _check_implementation(f"params._meta.{CLIENT_META}", meta[CLIENT_META])
        if method == "tools/call":
            tool = self._tools.get(str(params.get("name")))
            if tool is not None:
                _check_parameters(request, tool.input_schema, params.get("arguments"))

    def _instructions(self, call: Call) -> str:
        return (
            f"A server for demonstrations: the files of one directory, for tenant {self._tenant}. "
            f"Your session is {call.session}."
        )

    def _initialize(self, params: Mapping[str, object], call: Call) -> dict[str, object]:
        asked = params.get("protocolVersion")
        if not isinstance(asked, str):
            raise _RpcError(INVALID_PARAMS, "params.protocolVersion: not a string")
        if not isinstance(params.get("capabilities"), dict):
            raise _RpcError(INVALID_PARAMS, "params.capabilities: not an object")
        _check_implementation("params.clientInfo", params.get("clientInfo"))
        return {
            "protocolVersion": asked if asked in NEGOTIATED_VERSIONS else NEGOTIATED_VERSIONS[-1],
            "capabilities": {"tools": {}},
            "serverInfo": SERVER_INFO,
            "instructions": self._instructions(call),
        }

    def _list_tools(self, params: Mapping[str, object]) -> dict[str, object]:
        if params.get("cursor") is not None:
            raise _RpcError(INVALID_PARAMS, "params.cursor: there is one page only")
        return {
            "tools": [
                {"name": tool.name, "description": tool.description, "inputSchema": tool.input_schema}
                for tool in self._tools.values()
            ]
        }

    def _call_tool(self, params: Mapping[str, object], call: Call) -> dict[str, object]:
        name = params.get("name")
        if not isinstance(name, str):
            raise _RpcError(INVALID_PARAMS, "params.name: not a string")
        tool = self._tools.get(name)
        if tool is None:
            raise _RpcError(INVALID_PARAMS, f"Unknown tool: {name}")
        arguments = params.get("arguments", {})
        if not isinstance(arguments, dict):
            raise _RpcError(INVALID_PARAMS, "params.arguments: not an object")
        # Wrong arguments are the tool's answer, not the protocol's, so that the model can mend them
        # (MCP specification 2025-11-25, Tools, Error Handling).
        text = schema_fault(tool.input_schema, arguments)
        failed = text is not None
        if text is None:
            try:
                text = tool.run(arguments, call)
            except ToolError as error:
                text, failed = str(error), True
        return {"content": [{"type": "text", "text": text}], "isError": failed}


def _kind(message: Mapping[str, object]) -> str:
    """``request``, ``notification`` or ``response``; `_RpcError` for what is none of them."""
    if message.get("jsonrpc") != "2.0":
        raise _RpcError(INVALID_REQUEST, 'jsonrpc is not "2.0"')
    if "method" not in message and ("result" in message or "error" in message):
        return "response"
    if not isinstance(message.get("method"), str):
        raise _RpcError(INVALID_REQUEST, "method: not a string")
    if "id" not in message:
        return "notification"
    identifier = message["id"]
    if not isinstance(identifier, str) and not _is_number(identifier):
        raise _RpcError(INVALID_REQUEST, "id: neither a string nor a number")
    return "request"


def _unsupported(version: str) -> _RpcError:
    return _RpcError(
        UNSUPPORTED_VERSION, "Unsupported protocol version", {"supported": list(CARRIED_VERSIONS), "requested": version}
    )


def _check_implementation(where: str, value: object) -> None:
    told = _object(value)
    if not isinstance(told.get("name"), str) or not isinstance(told.get("version"), str):
        raise _RpcError(INVALID_PARAMS, f"{where}: not an object with a name and a version")


def _decoded(value: str) -> str | None:
    """The text a field carries, plain or as ``=?base64?…?=``; None where that form is damaged.

    Written anew rather than taken from rat.py, whose encoding it is there to check.
    """
    encoded = _ENCODED.fullmatch(value)
    if encoded is None:
        return value
    try:
        return base64.b64decode(encoded[1], validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


class _Annotated(NamedTuple):
    token: str
    path: tuple[str, ...]
    type: str


def _annotated(schema: Mapping[str, object], path: tuple[str, ...] = ()) -> list[_Annotated]:
    """The arguments of a schema annotated ``x-mcp-header``, at any depth of ``properties``."""
    found = []
    for name, value in _object(schema.get("properties")).items():
        property_schema = _object(value)
        token, kind = property_schema.get("x-mcp-header"), property_schema.get("type")
        usable = isinstance(token, str) and _TOKEN.fullmatch(token)
        if usable and kind in ("string", "integer", "boolean"):
            found.append(_Annotated(str(token), (*path, name), str(kind)))
        found += _annotated(property_schema, (*path, name))
    tokens = [annotated.token.lower() for annotated in found]
    return [annotated for annotated in found if path or tokens.count(annotated.token.lower()) == 1]


def _check_parameters(request: Request, schema: Mapping[str, object], arguments: object) -> None:
    """Each annotated argument and its ``Mcp-Param-`` field must agree, or both be absent."""
    for token, path, kind in _annotated(schema):
        name = f"Mcp-Param-{token}"
        value: object = arguments
        for step in path:
            value = _object(value).get(step)
        wanted = _parameter(value, kind)
        sent = request.values(name)
        if len(sent) > 1:
            raise _RpcError(HEADER_MISMATCH, f"{name} is there more than once")
        if (_decoded(sent[0]) if sent else None) != wanted or (sent and wanted is None):
            raise _RpcError(HEADER_MISMATCH, f"{name} differs from the argument {'.'.join(path)}")


def _parameter(value: object, kind: str) -> str | None:
    """The text an argument has in its field; None for one that has no field."""
    if isinstance(value, bool):
        return ("true" if value else "false") if kind == "boolean" else None
    if isinstance(value, str):
        return value if kind == "string" else None
    if isinstance(value, (int, float)) and kind == "integer" and abs(value) <= 2**53 - 1:
        return str(int(value)) if float(value).is_integer() else None
    return None


# --- the server -----------------------------------------------------------------------------------


class DemoRatd:
    """A running server, as a library: ``with DemoRatd(side, directory) as server: …``.

    `side` is the server side of a bundle, `directory` what its tools read and write. `listen` is
    host and port (0: any free one). `tools` replaces the three tools. With `keep_bodies` the
    recorded requests hold their bodies. `log` is called with a line for each answer, from any
    thread; the line never holds content.

    What is recorded is read by any thread; `wait_until` waits for it.
    """

    def __init__(
        self,
        side: rat.Side,
        directory: str | os.PathLike[str],
        *,
        listen: tuple[str, int] = ("127.0.0.1", 0),
        tools: Sequence[DemoTool] | None = None,
        keep_bodies: bool = False,
        log: Callable[[str], None] | None = None,
    ) -> None:
        """Load the side; raises `ssl.SSLError` or `OSError` where that, or `directory`, is bad."""
        if tools is None:
            tools = directory_tools(Directory(os.fspath(directory)))
        self._context = rat.tls_context(side)
        # rat resumes no sessions, and a ticket nobody reads turns a close into a reset.
        self._context.num_tickets = 0
        self._speaker = _Speaker(side.tenant, tools)
        self._listen = listen
        self._keep_bodies = keep_bodies
        self._log = log
        self._stopping = threading.Event()
        # Written by start() and stop(), which one thread calls.
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._waker: socket.socket | None = None
        # Guards everything below; notified of each change of what is recorded.
        self._changed = threading.Condition()
        self._threads: dict[_Connection, threading.Thread] = {}
        self._accepted = 0
        self._requests: deque[Request] = deque(maxlen=RECORDED)
        self._canceled: deque[object] = deque(maxlen=RECORDED)
        self._refused: deque[str] = deque(maxlen=RECORDED)

    def __enter__(self) -> DemoRatd:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Listen, and serve from threads of its own; `OSError` when the address cannot be had."""
        family = socket.AF_INET6 if ":" in self._listen[0] else socket.AF_INET
        listener = socket.create_server(self._listen, family=family, backlog=512)
        listener.setblocking(False)
        self._listener = listener
        # Known from now on: a server stopped and started again keeps its port.
        self._listen = listener.getsockname()[:2]
        self._stopping.clear()
        wakened, self._waker = socket.socketpair()
        self._acceptor = threading.Thread(
            target=self._accept, args=(listener, wakened), name="demo_ratd accept", daemon=True
        )
        self._acceptor.start()

    def stop(self) -> None:
        """End every call and connection; when it returns, no thread and no socket is left."""
        if self._acceptor is None or self._listener is None or self._waker is None:
            return
        self._stopping.set()
        self._waker.close()
        self._acceptor.join()
        self._listener.close()
        self._acceptor = self._listener = self._waker = None
        with self._changed:
            threads = dict(self._threads)
        for connection in threads:
            connection.shut()
        for thread in threads.values():
            thread.join()

    @property
    def address(self) -> str:
        """HOST:PORT, as rat's ``--server`` takes it."""
        host, port = self._listen
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def requests(self) -> list[Request]:
        """The requests received, each recorded before its answer is worked out."""
        with self._changed:
            return list(self._requests)

    @property
    def canceled(self) -> list[object]:
        """JSON-RPC identifiers of the calls whose connection the client closed."""
        with self._changed:
            return list(self._canceled)

    @property
    def refused(self) -> list[str]:
        """Reasons of the TLS handshakes that failed, as OpenSSL spells them."""
        with self._changed:
            return list(self._refused)

    @property
    def connections(self) -> int:
        """Connections open now."""
        with self._changed:
            return len(self._threads)

    def wait_until(self, holds: Callable[[DemoRatd], bool], seconds: float = 30.0) -> bool:
        """Wait until `holds` of what is recorded; False when `seconds` pass before."""
        with self._changed:
            return self._changed.wait_for(lambda: holds(self), seconds)

    def _accept(self, listener: socket.socket, wakened: socket.socket) -> None:
        with wakened, selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(wakened, selectors.EVENT_READ)
            while not self._stopping.is_set():
                selector.select()
                try:
                    accepted, _ = listener.accept()
                except BlockingIOError:
                    continue
                except OSError:
                    # Out of descriptors, or the peer left: the listener is still good.
                    self._stopping.wait(0.05)
                    continue
                self._open(accepted)

    def _open(self, accepted: socket.socket) -> None:
        try:
            accepted.setblocking(True)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock = self._context.wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
        except (OSError, ValueError):  # the peer left, or sent before TLS what no TLS may follow
            accepted.close()
            return
        with self._changed:
            self._accepted += 1
            connection = _Connection(self._accepted, sock, self._stopping)
            thread = threading.Thread(target=self._serve, args=(connection,), name="demo_ratd connection", daemon=True)
            self._threads[connection] = thread
            self._changed.notify_all()
        try:
            thread.start()
        except RuntimeError:  # no more threads: this client is turned away, the others served
            with self._changed:
                del self._threads[connection]
            sock.close()

    def _serve(self, connection: _Connection) -> None:
        linger = False
        try:
            try:
                connection.shake_hands()
            except OSError as error:
                linger = True
                self._record(self._refused, getattr(error, "reason", None) or str(error))
                return
            linger = self._converse(connection)
        except OSError:
            pass  # the peer is gone, or the server stops: there is nobody to tell
        finally:
            connection.close(linger=linger and not self._stopping.is_set())
            with self._changed:
                del self._threads[connection]
                self._changed.notify_all()

    def _converse(self, connection: _Connection) -> bool:
        """Answer one request after the other; True when the last may not have been read whole."""
        while not self._stopping.is_set():
            try:
                request = connection.read()
            except HttpError as error:
                text = f"{error.text}\n".encode()
                connection.write(_Reply(error.status, text, "text/plain"), keep=False)
                return True
            if request is None:
                return False
            self._record(self._requests, request if self._keep_bodies else request._replace(body=b""))
            started = time.monotonic()
            try:
                reply = self._reply(connection, request)
            except Canceled:
                if not self._stopping.is_set():
                    self._record(self._canceled, _identifier_of(request.body))
                    self._tell(request, "canceled", started)
                return False
            keep = request.keeps_open
            connection.write(reply, keep=keep, head_only=request.method == "HEAD")
            self._tell(request, str(reply.status), started)
            if not keep:
                return False
        return False

    def _reply(self, connection: _Connection, request: Request) -> _Reply:
        if _path_of(request.target) != "/mcp":
            return _Reply(404, b"only /mcp is here\n", "text/plain")
        if request.method != "POST":
            # RFC 9110, section 15.5.6: Allow tells what the target takes.
            return _Reply(405, b"only POST is answered\n", "text/plain", (("Allow", "POST"),))
        if _list_of(request.values("content-type")) != ["application/json"]:
            return _Reply(415, b"the message must be application/json\n", "text/plain")
        accepted = _list_of(request.values("accept"))
        for kind in ("application/json", "text/event-stream"):
            if not {kind, kind.split("/")[0] + "/*", "*/*"} & set(accepted):
                return _Reply(406, f"{kind} must be accepted\n".encode(), "text/plain")
        try:
            return self._speaker.answer(request, Call(connection.session, connection.wait))
        except Canceled:
            raise
        except Exception as error:  # noqa: BLE001 - a tool's fault must reach its caller as an answer
            told = _RpcError(INTERNAL_ERROR, f"internal error: {type(error).__name__}")
            return _Reply(200, _rendered(_error(_identifier_of(request.body), told)))

    def _record(self, records: deque[_Recorded], what: _Recorded) -> None:
        with self._changed:
            records.append(what)
            self._changed.notify_all()

    def _tell(self, request: Request, outcome: str, started: float) -> None:
        if self._log is not None:
            took = (time.monotonic() - started) * 1000
            told = f"{request.session}: {_called(request)}: {outcome} in {took:.1f} ms"
            self._log("".join(letter if letter.isprintable() else "?" for letter in told))


def _identifier_of(body: bytes) -> object:
    message = _parse(body)
    return message.get("id") if isinstance(message, dict) else None


def _called(request: Request) -> str:
    """What a request asks for, for the log: its method and what that names, never its content."""
    try:
        message = _parse(request.body)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("method"), str):
        return f"{request.method} {_path_of(request.target)}"
    method, name = message["method"], _object(message.get("params")).get("name")
    return f"{method} {name}" if isinstance(name, str) else str(method)


def _path_of(target: str) -> str:
    """The path of a request target, in origin form or absolute form (RFC 9112, section 3.2)."""
    if "://" in target:
        target = "/" + target.partition("://")[2].partition("/")[2]
    return target.partition("?")[0]


# --- the command ----------------------------------------------------------------------------------


def _listening(text: str) -> tuple[str, int]:
    """HOST:PORT of ``--listen``; unlike an address to reach, its port may be 0."""
    free = text.endswith(":0")
    try:
        address = rat.Address.parse(text[:-1] + "1" if free else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return address.host, 0 if free else address.port


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit status: 0, or 1 when it cannot start."""
    parser = rat.FlagParser(
        prog="demo_ratd.py",
        allow_abbrev=False,
        description="Serve the files of a directory over MCP and mutual TLS, as ratd would. "
        "It needs the server directory of a bundle (rat-tool bundle generate).",
        epilog="example: python demo_ratd.py --bundle bundle/server --directory files",
    )
    parser.add_argument("--bundle", required=True, metavar="DIR", help="server directory")
    parser.add_argument("--directory", required=True, metavar="DIR", help="files to serve")
    parser.add_argument(
        "--listen",
        type=_listening,
        default=("127.0.0.1", 0),
        metavar="HOST:PORT",
        help="where to listen, port 0 for any free one (default: 127.0.0.1:0)",
    )
    given = parser.parse_args(arguments)
    try:
        side = rat.load_side(given.bundle, "server")
        server = DemoRatd(side, given.directory, listen=given.listen, log=lambda line: print(line, flush=True))
        server.start()
    except rat.BundleError as error:
        print(f"demo_ratd: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        where = given.listen[0] if error.filename is None else error.filename
        print(f"demo_ratd: {where}: {rat.system_reason(error)}", file=sys.stderr)
        return 1
    ended = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    print(f"demo_ratd: serving tenant {side.tenant} at {server.address}", flush=True)
    # Not without a limit: on Windows such a wait is deaf to Ctrl-C.
    while not ended.wait(1):
        pass
    server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
