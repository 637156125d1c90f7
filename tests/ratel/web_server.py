"""An HTTP server on loopback whose every answer is a function of the test."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Seconds after which a test waiting for something is told that it hangs.
HANG = 30.0


class Request(NamedTuple):
    """A request as it came; names of fields are in lower case."""

    method: str
    target: str
    fields: Mapping[str, str]
    body: bytes

    @property
    def message(self) -> dict[str, Any]:
        """The body as JSON, empty for none."""
        return json.loads(self.body) if self.body else {}


class Exchange(BaseHTTPRequestHandler):
    """One request, and the ways to answer it."""

    protocol_version = "HTTP/1.1"
    server: WebServer
    request_read: Request

    def handle_any(self) -> None:
        """Read the request, and leave the rest to the test."""
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fields = {name.lower(): value for name, value in self.headers.items()}
        self.request_read = Request(self.command, self.path, fields, body)
        self.server.record(self.request_read)
        with contextlib.suppress(OSError):
            self.server.respond(self, self.request_read)

    do_POST = do_GET = do_DELETE = handle_any  # noqa: N815 - the names that http.server looks for

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""

    def answer(self, value: object = None, status: int = 200, fields: Mapping[str, str] | None = None) -> None:
        """Answer with JSON, or nothing for None; bytes as they are."""
        body = value if isinstance(value, bytes) else b"" if value is None else json.dumps(value).encode()
        self.send_response(status)
        if value is not None and "Content-Type" not in (fields or {}):
            self.send_header("Content-Type", "application/json")
        for name, text in (fields or {}).items():
            self.send_header(name, text)
        if "Content-Length" not in (fields or {}):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def result(self, value: object, status: int = 200, fields: Mapping[str, str] | None = None) -> None:
        """Answer the call with a result."""
        self.answer({"jsonrpc": "2.0", "id": self.request_read.message["id"], "result": value}, status, fields)

    def error(self, code: int, message: str = "no", status: int = 400, data: object = None) -> None:
        """Answer the call with a JSON-RPC error."""
        detail = {"code": code, "message": message, **({} if data is None else {"data": data})}
        self.answer({"jsonrpc": "2.0", "id": self.request_read.message.get("id"), "error": detail}, status)

    def stream(self, *events: str | bytes, fields: Mapping[str, str] | None = None) -> None:
        """Answer with an event stream that ends after these bytes; without any it stays open."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        for name, text in (fields or {}).items():
            self.send_header(name, text)
        self.send_header("Connection", "close")
        self.close_connection = True
        self.end_headers()
        for event in events:
            self.write(event)

    def write(self, event: str | bytes) -> None:
        """Some bytes of the body."""
        self.wfile.write(event.encode() if isinstance(event, str) else event)
        self.wfile.flush()

    def message(self, value: object) -> str:
        """A message as an event; a dictionary without ``jsonrpc`` is the result of the call."""
        if isinstance(value, dict) and "jsonrpc" not in value:
            value = {"jsonrpc": "2.0", "id": self.request_read.message["id"], "result": value}
        return f"event: message\ndata: {json.dumps(value)}\n\n"

    def wait_closed(self) -> None:
        """Wait until the client has closed the connection."""
        self.connection.settimeout(HANG)
        with contextlib.suppress(ConnectionError):
            assert self.connection.recv(1) == b""
        self.close_connection = True


class WebServer(ThreadingHTTPServer):
    """The server: ``respond`` is called with each exchange, in a thread of its connection."""

    daemon_threads = True

    def __init__(self, respond: Callable[[Exchange, Request], None]) -> None:
        super().__init__(("127.0.0.1", 0), Exchange)
        self.respond = respond
        self.requests: list[Request] = []
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    @property
    def origin(self) -> str:
        """``http://HOST:PORT``."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def url(self) -> str:
        """The URL of the MCP endpoint."""
        return f"{self.origin}/mcp"

    def record(self, request: Request) -> None:
        """Note a request."""
        with self._changed:
            self.requests.append(request)
            self._changed.notify_all()

    def wait_for(self, holds: Callable[[Request], bool]) -> Request:
        """The first request that this holds for, waiting for it to come."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(map(holds, self.requests)), HANG), self.methods()
            return next(filter(holds, self.requests))

    def methods(self) -> list[str]:
        """The JSON-RPC method of each request, or its HTTP method where there is none."""
        with self._changed:
            return [request.message.get("method", request.method) for request in self.requests]

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing on stderr: a client that goes away is what is tested."""

    def close(self) -> None:
        """Stop serving."""
        self.shutdown()
        self.server_close()
        self._thread.join()


def free_port() -> int:
    """A port that nobody listens on, as long as no other takes it."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
