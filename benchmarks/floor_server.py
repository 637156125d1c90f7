"""The fastest MCP server that Python makes: the floor under every bridge, so that their own time is what differs.

A process of its own, one thread and one loop over non-blocking sockets: sixteen connections cost no more
than one, and no hand-over between threads is measured as if it were a bridge's. It answers as JSON what
clients of any era ask for, and nothing else. Three ports lead to the same loop: TLS 1.3 that requires a client
certificate, for rat; TLS 1.3 that asks for none, for bridges that cannot present one; and plain HTTP.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import selectors
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from types import TracebackType

# The text that a result of the tool "large" is cut from: making it is not what is measured.
_FILLER = memoryview(b"x" * (16 << 20))

# Bytes of a request's body that are read as JSON; of a larger one only the beginning, by its pattern.
_PARSED = 16 << 10

# Bytes sent or received before the other connections have their turn.
_PIECE = 256 << 10

_TOOLS = [
    {"name": name, "description": "a tool", "inputSchema": {"type": "object", "properties": {}}}
    for name in ("small", "large")
]


class Ports(NamedTuple):
    """Where a floor server listens on 127.0.0.1."""

    mutual: int
    tls: int
    plain: int


class Counts(NamedTuple):
    """What a floor server has seen so far."""

    mutual_handshakes: int
    tls_handshakes: int
    plain_connections: int
    requests: int


def response(body: bytes) -> list[memoryview]:
    """The response of HTTP to a JSON-RPC message, in pieces: to ``tools/call`` of "large", a text of ``size`` bytes.

    Of a body over 16 KiB the beginning is enough: it must be such a call, its identifier and ``size`` before the rest.
    """
    if len(body) < _PARSED:
        message = json.loads(body)
    else:
        found = re.search(rb'"id":(\d+),.*"size":(\d+)', body)
        assert found is not None
        params: dict[str, object] = {"name": "large", "arguments": {"size": int(found[2])}}
        message = {"id": int(found[1]), "method": "tools/call", "params": params}
    if "id" not in message or "method" not in message:
        return [memoryview(b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n")]
    method, asked = message["method"], message.get("params") or {}
    if method == "initialize":
        result: object = {
            "protocolVersion": asked.get("protocolVersion", "2025-06-18"),
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "floor", "version": "1"},
        }
    elif method == "tools/list":
        result = {"tools": _TOOLS}
    elif method == "tools/call":
        result = {"content": [{"type": "text", "text": "ok"}]}
    else:
        result = {}
    data = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}, separators=(",", ":")).encode()
    pieces = [memoryview(data)]
    if method == "tools/call" and asked.get("name") == "large":
        before, _, after = data.partition(b"ok")
        pieces = [memoryview(before), _FILLER[: int(asked["arguments"]["size"])], memoryview(after)]
    length = sum(map(len, pieces))
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % length
    return [memoryview(head + bytes(pieces[0])), *pieces[1:]]


class _Connection:
    """An accepted connection: what was received and not answered yet, and what is to be sent."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.shaking = isinstance(sock, ssl.SSLSocket)
        self.received = bytearray()
        self.body_at = -1  # where the body of the request begins, when its head was received
        self.length = 0
        self.sending: list[memoryview] = []
        self.events = selectors.EVENT_READ


class _Server:
    def __init__(self, server_side: Path, public_side: Path) -> None:
        self._selector = selectors.DefaultSelector()
        self._contexts: dict[socket.socket, ssl.SSLContext | None] = {}
        self._counts = Counts(0, 0, 0, 0)
        mutual = _context(server_side)
        mutual.load_verify_locations(server_side / "ca.crt")
        mutual.verify_mode = ssl.CERT_REQUIRED
        self.ports = Ports(self._listen(mutual), self._listen(_context(public_side)), self._listen(None))

    def _listen(self, context: ssl.SSLContext | None) -> int:
        listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        listener.setblocking(False)
        self._contexts[listener] = context
        self._selector.register(listener, selectors.EVENT_READ)
        port: int = listener.getsockname()[1]
        return port

    def run(self) -> None:
        """Serve until standard input ends."""
        self._selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is sys.stdin:
                    return
                if key.data is None:
                    self._accept(key.fileobj)  # type: ignore[arg-type]
                else:
                    try:
                        self._serve(key.data)
                    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                        pass
                    except OSError:  # the client is gone, whichever way
                        self._drop(key.data)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            sock, _ = listener.accept()
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setblocking(False)
            context = self._contexts[listener]
            if context is not None:
                sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            else:
                self._count("plain_connections")
            self._selector.register(sock, selectors.EVENT_READ, _Connection(sock))

    def _count(self, what: str) -> None:
        self._counts = self._counts._replace(**{what: getattr(self._counts, what) + 1})

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _serve(self, connection: _Connection) -> None:
        sock = connection.socket
        if connection.shaking:
            assert isinstance(sock, ssl.SSLSocket)
            sock.do_handshake()
            connection.shaking = False
            mutual = sock.context.verify_mode == ssl.CERT_REQUIRED
            self._count("mutual_handshakes" if mutual else "tls_handshakes")
        if connection.sending:
            self._send(connection)
            return
        while True:
            piece = sock.recv(_PIECE)
            if not piece:
                self._drop(connection)
                return
            connection.received += piece
            if self._take(connection):
                self._send(connection)
            if connection.sending or not isinstance(sock, ssl.SSLSocket) or not sock.pending():
                return

    def _take(self, connection: _Connection) -> bool:
        """Whether a whole request was received, whose response is then to be sent."""
        received = connection.received
        if connection.body_at < 0:
            end = received.find(b"\r\n\r\n")
            if end < 0:
                return False
            head = bytes(received[:end])
            connection.body_at = end + 4
            length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
            connection.length = int(length[1]) if length else 0
            assert length or not head.startswith(b"POST"), f"a request without a length: {head!r}"
        if len(received) < connection.body_at + connection.length:
            return False
        end = connection.body_at + connection.length
        if received.startswith(b"POST"):
            self._count("requests")
            connection.sending = response(bytes(received[connection.body_at : min(end, connection.body_at + _PARSED)]))
        elif received.startswith(b"GET /counts"):
            data = json.dumps(self._counts).encode()
            connection.sending = [memoryview(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data)]
        else:  # a client that asks for a standing stream, or ends a session: neither exists here
            refusal = b"HTTP/1.1 405 Method Not Allowed\r\nAllow: POST\r\nContent-Length: 0\r\n\r\n"
            connection.sending = [memoryview(refusal)]
        connection.received = received[end:]
        connection.body_at = -1
        return True

    def _send(self, connection: _Connection) -> None:
        with contextlib.suppress(ssl.SSLWantWriteError, BlockingIOError):
            sent = connection.socket.send(connection.sending[0][:_PIECE])
            connection.sending[:1] = [rest] if (rest := connection.sending[0][sent:]) else []
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.sending else 0)
        if events != connection.events:
            connection.events = events
            self._selector.modify(connection.socket, events, connection)


def _context(side: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(side / "server.crt", side / "server.key")
    return context


class FloorServer:
    """A floor server's process. ``server_side`` is the server directory of a bundle, ``public_side`` one whose
    certificate names 127.0.0.1, for bridges that check it."""

    def __init__(self, server_side: Path, public_side: Path) -> None:
        command = [sys.executable, str(Path(__file__)), str(server_side), str(public_side)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.ports = Ports(*json.loads(self.process.stdout.readline()))

    def counts(self) -> Counts:
        """What it has seen so far."""
        connection = http.client.HTTPConnection("127.0.0.1", self.ports.plain, timeout=60)
        try:
            connection.request("GET", "/counts")
            counts = Counts(*json.loads(connection.getresponse().read()))
        finally:
            connection.close()
        return counts._replace(plain_connections=counts.plain_connections - 1)

    def __enter__(self) -> FloorServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)


if __name__ == "__main__":
    server = _Server(Path(sys.argv[1]), Path(sys.argv[2]))
    print(json.dumps(server.ports), flush=True)
    server.run()
