"""A TLS server that does to each connection exactly what a test says, on raw sockets.

Each connection accepted runs a *script*, a function of its `Connection`, in a thread of its own.
Left alone, the server is a good one: it shakes hands, and answers every request with what
``respond`` makes of it. `ConnectProxy` is the same for the proxy between, and `full_backlog` an
address where nobody answers at all.
"""

from __future__ import annotations

import base64
import contextlib
import json
import select
import socket
import ssl
import struct
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Callable, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Seconds after which a test waiting for something is told that it hangs. It decides nothing else:
# no test is faster or slower for it, so it is far above anything a busy machine does.
HANG = 30.0


class Request(NamedTuple):
    """A request as it came: first line, fields in order, body, and the number of its connection."""

    line: str
    fields: list[tuple[str, str]]
    body: bytes
    connection: int

    def field(self, name: str) -> str | None:
        """The value of a header field without regard to case, None when absent."""
        values = [value for field, value in self.fields if field.lower() == name.lower()]
        assert len(values) <= 1, f"{name} sent {len(values)} times"
        return values[0] if values else None

    @property
    def message(self) -> object:
        """The body as JSON."""
        return json.loads(self.body)


class Response(NamedTuple):
    """What a good server sends back: ``kind`` is the media type, absent when empty."""

    status: int = 200
    body: bytes = b""
    kind: str = "application/json"
    fields: tuple[tuple[str, str], ...] = ()

    def encode(self) -> bytes:
        """The response in HTTP/1.1, its length declared."""
        lines = [f"HTTP/1.1 {self.status} Status"]
        if self.kind:
            lines.append(f"Content-Type: {self.kind}")
        lines += [f"{name}: {value}" for name, value in self.fields]
        lines.append(f"Content-Length: {len(self.body)}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode() + self.body


def result(identifier: object, value: object = None) -> bytes:
    """A JSON-RPC response of success."""
    response = {"jsonrpc": "2.0", "id": identifier, "result": value if value is not None else {}}
    return json.dumps(response, separators=(",", ":")).encode()


def answer(request: Request) -> Response:
    """What a good ratd answers: a result naming the method to a call, 202 to what is none."""
    message = request.message
    if isinstance(message, list):
        answers = [result(part["id"], {"method": part["method"]}) for part in message if is_call(part)]
        return Response(200, b"[" + b",".join(answers) + b"]") if answers else Response(202, kind="")
    if not is_call(message):
        return Response(202, kind="")
    assert isinstance(message, dict)
    return Response(200, result(message["id"], {"method": message["method"]}))


def is_call(message: object) -> bool:
    """Whether a message expects an answer: a method, and an identifier that is not null."""
    return isinstance(message, dict) and isinstance(message.get("method"), str) and message.get("id") is not None


def server_context(
    side: Path,
    trust: Path | bytes | None = None,
    *,
    tls: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
    alert: int | None = None,
    level: int | None = None,
    revocations: bool = False,
) -> ssl.SSLContext:
    """The TLS of a server: that of a real ratd for a server directory, and its faults.

    ``trust`` replaces ca.crt as what clients are checked with, ``tls`` is the only version spoken,
    ``alert`` is sent in answer to any hello, ``level`` is OpenSSL's security level, ``revocations``
    checks clients against the list that ``trust`` holds.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = context.maximum_version = tls
    if level is not None:
        context.set_ciphers(f"DEFAULT:@SECLEVEL={level}")
    context.load_cert_chain(side / "server.crt", side / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED
    if trust is None:
        trust = side / "ca.crt"
    if isinstance(trust, bytes):
        context.load_verify_locations(cadata=trust.decode())
    else:
        context.load_verify_locations(trust)
    if revocations:
        context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    if alert is not None:
        # An answer of the callback other than None is the alert that refuses the hello.
        context.sni_callback = lambda *_: alert
    return context


class Connection:
    """One accepted connection, in the hands of a script.

    Used by its script's thread only, but for `cut`, which any thread may call.
    """

    def __init__(self, sock: socket.socket, number: int, context: ssl.SSLContext | None) -> None:
        self.socket = sock
        self.number = number
        self.context = context
        self.peer: str | None = None
        self._pending = b""

    def handshake(self, context: ssl.SSLContext | None = None) -> None:
        """Shake hands as a server. Raises OSError (ssl.SSLError) when either side refuses."""
        context = context or self.context
        assert context is not None
        raw = self.socket
        self.socket = context.wrap_socket(
            raw, server_side=True, do_handshake_on_connect=False, suppress_ragged_eofs=True
        )
        self.socket.do_handshake()
        certificate = self.socket.getpeercert()
        if certificate:
            names = [part for parts in certificate["subject"] for part in parts]
            self.peer = next(str(part[1]) for part in names if part[0] == "commonName")

    def receive(self, size: int = 65536) -> bytes:
        """Some bytes, empty at the end; what was read ahead of a request comes first."""
        if self._pending:
            pending, self._pending = self._pending, b""
            return pending
        return self.socket.recv(size)

    def holds_data(self) -> bool:
        """Whether bytes are here to receive that no wait on the socket would tell of."""
        if self._pending:
            return True
        return isinstance(self.socket, ssl.SSLSocket) and self.socket.pending() > 0

    def receive_head(self) -> bytes:
        """The bytes up to a blank line, without it; empty when the peer ends first."""
        received = bytearray()
        while b"\r\n\r\n" not in received:
            part = self.receive()
            if not part:
                return b""
            received += part
        head, _, self._pending = bytes(received).partition(b"\r\n\r\n")
        return head

    def request(self) -> Request | None:
        """The next request, whole; None when the peer ends instead."""
        head = self.receive_head()
        if not head:
            return None
        line, *lines = head.decode("latin-1").split("\r\n")
        fields = [(name, value.strip()) for name, _, value in (each.partition(":") for each in lines)]
        length = int(next(value for name, value in fields if name.lower() == "content-length"))
        body = bytearray()
        while len(body) < length:
            part = self.receive()
            if not part:
                return None
            body += part
        self._pending = bytes(body[length:])
        return Request(line, fields, bytes(body[:length]), self.number)

    def send(self, *parts: bytes) -> None:
        """Send bytes, each part in a write of its own."""
        for part in parts:
            self.socket.sendall(part)

    def respond(self, response: Response) -> None:
        """Send a response of HTTP."""
        self.send(response.encode())

    def wait_end(self) -> None:
        """Wait until the peer ends the connection, whichever way; what it sends is dropped."""
        with contextlib.suppress(OSError):
            while self.socket.recv(65536):
                pass

    def reset(self) -> None:
        """Abort the connection: the peer reads ECONNRESET rather than an end."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def cut(self) -> None:
        """Shut the connection from any thread, which ends what its script waits for."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)


Script = Callable[[Connection], None]


class Listener:
    """Accepts connections on a loopback port of the system, and runs a script for each.

    ``scripts`` are for the first connections, in order; ``script`` for all others. Closing raises
    what a script failed with, except for OSError: that a peer leaves is no fault here.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=512)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self.address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        self.context: ssl.SSLContext | None = None
        self.script: Script = lambda connection: None
        self.scripts: list[Script] = []
        # Guards all below; notified when any of it changes.
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._open: list[Connection] = []
        self._failures: list[BaseException] = []
        self._reports: list[object] = []
        self.accepted = 0
        self._accepting = threading.Thread(target=self._accept, name=f"accept {self.port}")
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with self._changed:
                script = self.scripts.pop(0) if self.scripts else self.script
                connection = Connection(sock, self.accepted, self.context)
                thread = threading.Thread(
                    target=self._run, args=(script, connection), name=f"connection {self.accepted}"
                )
                self.accepted += 1
                self._open.append(connection)
                self._threads = [each for each in self._threads if each.is_alive()] + [thread]
                self._changed.notify_all()
                thread.start()

    def _run(self, script: Script, connection: Connection) -> None:
        try:
            script(connection)
        except OSError:
            pass
        except BaseException as e:  # noqa: BLE001 - told by close(), in the thread of the test
            with self._changed:
                self._failures.append(e)
        finally:
            with self._changed:
                self._open.remove(connection)
                self._changed.notify_all()
            connection.socket.close()

    def report(self, what: object) -> None:
        """Say from a script what has been reached."""
        with self._changed:
            self._reports.append(what)
            self._changed.notify_all()

    def wait_report(self, what: object, times: int = 1) -> None:
        """Wait until a script has reported something, so many times."""
        self._wait(lambda: self._reports.count(what) >= times, f"report of {what!r}")

    def wait_accepted(self, count: int) -> None:
        """Wait until so many connections were accepted, in all."""
        self._wait(lambda: self.accepted >= count, f"{count} connections")

    def wait_open(self, count: int) -> None:
        """Wait until so many connections are open."""
        self._wait(lambda: len(self._open) == count, f"{count} open connections")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, HANG), f"hangs waiting for {what}"

    def cut_all(self) -> None:
        """Shut every open connection and wait until its script has ended: a server going down."""
        with self._changed:
            connections = list(self._open)
        for connection in connections:
            connection.cut()
        self.wait_open(0)

    def close(self) -> None:
        """Stop listening, end every connection and thread, and raise what a script failed with."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(HANG)
        with self._changed:
            connections, threads = list(self._open), list(self._threads)
        for connection in connections:
            connection.cut()
        for thread in threads:
            thread.join(HANG)
        assert not any(thread.is_alive() for thread in (*threads, self._accepting)), "hangs"
        if self._failures:
            raise self._failures[0]


class FaultServer(Listener):
    """An MCP server over mutual TLS, as a ratd of a server directory unless scripted otherwise.

    Every request read by the default script is kept in ``requests``; ``respond`` makes its
    response, or returns None to hold it until the client ends the connection (reported as
    ``("gone", body)``).
    """

    def __init__(self, side: Path, host: str = "127.0.0.1", port: int = 0) -> None:
        super().__init__(host, port)
        self.side = side
        self.requests: list[Request] = []
        self.respond: Callable[[Request], Response | None] = answer
        self.context = server_context(side)
        self.script = self.serve  # after its context: at a port known before, clients come at once

    def serve(self, connection: Connection) -> None:
        """The default script: shake hands, then answer requests until the client leaves."""
        connection.handshake()
        while self.exchange(connection):
            pass

    def exchange(self, connection: Connection) -> bool:
        """Read one request and answer it; whether the connection goes on."""
        request = self.receive(connection)
        if request is None:
            return False
        response = self.respond(request)
        if response is None:
            connection.wait_end()
            self.report(("gone", request.body))
            return False
        connection.respond(response)
        return True

    def receive(self, connection: Connection) -> Request | None:
        """Read one request and keep it."""
        request = connection.request()
        if request is not None:
            with self._changed:
                self.requests.append(request)
                self._changed.notify_all()
        return request

    def wait_requests(self, count: int) -> list[Request]:
        """Wait until so many requests were read, in all, and return them."""
        self._wait(lambda: len(self.requests) >= count, f"{count} requests")
        return list(self.requests)


class ConnectProxy(Listener):
    """A proxy of CONNECT, mapping every name to loopback; an https one when given a server directory.

    Its address is in ``url``, and ``patch`` has a rat trust it as it trusts public CAs. ``tunnels`` keeps
    the head of each CONNECT. ``refuse`` is the status line it answers instead of a tunnel; ``stage``
    "accept", "connect" or "tunnel" resets the connection at that point, "close" ends it instead of an
    answer to CONNECT, and "silent" leaves that out.
    """

    def __init__(self, side: Path | None = None) -> None:
        super().__init__()
        self.url = f"http://{self.address}"
        self.patch = ""
        if side is not None:
            self.url = f"https://{self.address}"
            self.context = server_context(side)
            self.context.verify_mode = ssl.CERT_NONE
            trusted = str(side / "ca.crt")
            self.patch = f"""
import certifi
certifi.where = lambda: {trusted!r}
certifi.contents = lambda: open({trusted!r}).read()
"""
        self.tunnels: list[str] = []
        self.refuse: bytes | None = None
        self.stage: str | None = None
        self.script = self.serve

    @property
    def authorizations(self) -> list[str]:
        """The user:password of each CONNECT, decoded from its Basic credentials."""
        return [
            base64.b64decode(line.split()[2]).decode()
            for head in self.tunnels
            for line in head.split("\r\n")
            if line.lower().startswith("proxy-authorization: basic ")
        ]

    def serve(self, connection: Connection) -> None:
        """Open one tunnel, or fail as told."""
        if self.stage == "accept":
            connection.reset()
            return
        if self.context is not None:
            connection.handshake()
        head = connection.receive_head().decode("latin-1")
        if not head:
            return
        self.tunnels.append(head)
        self.report("connect")
        if self.stage == "connect":
            connection.reset()
            return
        if self.stage == "close":
            return
        if self.stage == "silent":
            connection.wait_end()
            self.report("gone")
            return
        if self.refuse is not None:
            connection.send(self.refuse + b"\r\nContent-Length: 0\r\n\r\n")
            connection.wait_end()
            return
        port = int(head.split()[1].rpartition(":")[2])
        try:
            upstream = socket.create_connection(("127.0.0.1", port))
        except OSError:
            connection.send(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
            return
        with upstream:
            connection.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
            if self.stage == "tunnel":
                connection.receive()  # the hello: what was sent before a reset may be lost with it
                connection.reset()
                return
            self._tunnel(connection, upstream)

    def _tunnel(self, connection: Connection, upstream: socket.socket) -> None:
        # One thread for both ways: the object of a TLS connection is not for two at once.
        while True:
            ready: list[socket.socket] = [connection.socket]
            if not connection.holds_data():
                ready = select.select([connection.socket, upstream], [], [])[0]
            for sock in ready:
                part = connection.receive() if sock is connection.socket else upstream.recv(65536)
                if not part:
                    return
                if sock is upstream:
                    connection.send(part)
                else:
                    try:
                        upstream.sendall(part)
                    except OSError:
                        # What it said before it closed is still to be passed on.
                        while part := upstream.recv(65536):
                            connection.send(part)
                        return


@contextlib.contextmanager
def full_backlog() -> Iterator[str]:
    """An address where a connection is neither accepted nor refused: its backlog is full."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address: tuple[str, int] = listener.getsockname()
        waiting: list[socket.socket] = []
        try:
            # The system lets in one or two more than asked for; the first left waiting shows it
            # full.
            for _ in range(16):
                sock = socket.socket()
                waiting.append(sock)
                sock.setblocking(False)
                sock.connect_ex(address)
                if not select.select([], [sock], [], 0.05)[1]:
                    break
            else:
                raise AssertionError("no backlog of this system is ever full")
            yield f"127.0.0.1:{address[1]}"
        finally:
            for sock in waiting:
                sock.close()


@contextlib.contextmanager
def unused_port() -> Iterator[int]:
    """A port where connections are refused: bound, so that nobody else gets it, never listening."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def jsonl(path: Path) -> Sequence[dict[str, object]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
