"""How a server is reached: a transport is a description, and opens connections of one kind each.

Four transports (`StreamableHttp`, `Stdio`, `Sse`, `Rat`), three kinds of connection under them. A connection takes
JSON-RPC requests (`Call`) and puts exactly one `Outcome` for each on the queue of whoever waits; it knows HTTP, pipes
and event streams, and nothing of MCP beyond answering the requests of a server. What the messages say is for
`ratel.client`.

A call is sent by one thread and settled by another: the thread that reads a process or a stream, or the thread of
that one HTTP exchange. The waiting thread therefore always wakes in time, whatever its server, its pipe or the name
service does, and closing a connection is settling its calls and shutting its sockets. A thread an exchange costs
under a tenth of a millisecond; a pool of workers would have to be bounded, and a bound is one more way to wait.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import http.client
import json
import logging
import os
import queue
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol
from urllib.parse import urljoin, urlsplit, urlunsplit

import urllib3
import urllib3.connection
import urllib3.exceptions

import rat
from ratel.trace import RatelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_log = logging.getLogger("ratel")

JsonObject = dict[str, object]

# A message at most, in bytes, whatever carries it: what rat relays, too.
MESSAGE_LIMIT = rat.MESSAGE_LIMIT

# Seconds that each step of ending a process takes at most: its input closed, SIGTERM, SIGKILL. The values of the
# official SDKs, so that a server that ends in time there does here.
GRACE_SECONDS = 2.0

# The end of stderr that an error quotes, in bytes: a stack trace, not a log.
STDERR_TAIL = 4096

# Idle seconds after which a connection to a web server is not reused. uvicorn and Node close theirs after five: a
# request sent into that moment is lost, and may not be repeated.
WEB_IDLE_SECONDS = 4.0

# Seconds for what is said to a server without anybody waiting: a reply, a cancellation, the end of a session.
COURTESY_SECONDS = 3.0

# Attempts in a row to resume a stream that failed, and the pause before each unless the server named one (`retry`).
RESUME_ATTEMPTS = 3
RESUME_SECONDS = 1.0


class TransportError(RatelError):
    """A request that got no JSON-RPC response, in one sentence; ``status`` is the HTTP status, if there was one."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class UnauthorizedError(TransportError):
    """A server that answered HTTP 401: it needs credentials, or others."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 401)


# --- Messages ------------------------------------------------------------------------------------------


def read_messages(data: bytes) -> list[JsonObject]:
    """The JSON-RPC messages of a line or a body: one, or those of a batch (MCP 2025-03-26). Raises ValueError."""
    value = rat.parse_json(data)
    messages = [message for message in (value if isinstance(value, list) else [value]) if isinstance(message, dict)]
    if not messages:
        raise ValueError("not a JSON-RPC message")
    return messages


def encode(message: Mapping[str, object]) -> bytes:
    """A message as one line of JSON, without its end. Raises ValueError or TypeError for what JSON cannot hold."""
    return json.dumps(message, separators=(",", ":"), allow_nan=False).encode()


def is_response(message: Mapping[str, object]) -> bool:
    """Whether a message is a JSON-RPC response (section 5)."""
    return "method" not in message and ("result" in message or "error" in message)


def reply_to(message: Mapping[str, object]) -> bytes | None:
    """What a request of the server is answered: a ping with nothing, all else with -32601; None to a notification.

    MCP up to 2025-11-25; a client that declares no capability is asked for nothing else.
    """
    identifier = message.get("id")
    if "method" not in message or isinstance(identifier, bool) or not isinstance(identifier, (str, int)):
        return None
    reply: JsonObject = {"jsonrpc": "2.0", "id": identifier}
    if message["method"] == "ping":
        reply["result"] = {}
    else:
        reply["error"] = {"code": -32601, "message": "Method not found"}
    return encode(reply)


class Call:
    """A JSON-RPC request on its way.

    ``until`` is when nobody waits for it any more, by the monotonic clock. ``headers`` are HTTP fields, for
    connections that have some. ``resumable`` tells that a stream cut before the answer may be taken up again.
    """

    def __init__(
        self,
        identifier: int,
        method: str,
        body: bytes,
        until: float,
        outcomes: queue.SimpleQueue[Outcome],
        headers: Mapping[str, str] | None = None,
        resumable: bool = False,
    ) -> None:
        self.identifier = identifier
        self.method = method
        self.body = body
        self.until = until
        self.outcomes = outcomes
        self.headers = headers or {}
        self.resumable = resumable

    def remaining(self) -> float:
        """Seconds left, never less than a moment: a timeout of zero means another thing to sockets."""
        return max(self.until - time.monotonic(), 0.001)


class Outcome(NamedTuple):
    """What a call came to: a JSON-RPC response, or the error it was lost to.

    ``status`` is the HTTP status, ``session`` the ``Mcp-Session-Id`` of the answer, ``text`` the beginning of a body
    that is no response.
    """

    call: Call
    response: JsonObject | None = None
    error: TransportError | None = None
    status: int | None = None
    session: str | None = None
    text: str = ""


class Connection(abc.ABC):
    """An open way to a server. Any thread may call any method.

    ``lost`` is why it can no longer be used, None while it can. A call is in ``_calls`` until whoever takes it out
    settles it, so each is settled once.
    """

    http: ClassVar[bool] = False  # Streamable HTTP: the headers, statuses and sessions of MCP
    probed: ClassVar[bool] = True  # whether the server may speak a modern version
    modern = False  # set once the era is known: a modern server sends no requests, and gets no replies

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._lock = threading.Lock()
        self._calls: dict[int, Call] = {}  # guarded by the lock
        self.lost: TransportError | None = None  # written once, under the lock

    def start(self, until: float) -> None:  # noqa: B027 - there may be nothing to establish
        """Establish what needs establishing, by ``until``. Raises TransportError."""

    @abc.abstractmethod
    def send(self, call: Call) -> None:
        """Send a request; its outcome comes by its queue. Does not wait and raises nothing."""

    @abc.abstractmethod
    def notify(self, body: bytes, headers: Mapping[str, str], until: float) -> None:
        """Send a notification. Raises TransportError when it certainly was not delivered."""

    @abc.abstractmethod
    def tell(self, body: bytes, headers: Mapping[str, str]) -> None:
        """Send a notification or a reply that nobody waits for. Raises nothing."""

    def abandon(self, call: Call) -> None:
        """Want no outcome any more."""
        with self._lock:
            self._calls.pop(call.identifier, None)

    def end_session(self, headers: Mapping[str, str]) -> None:  # noqa: B027 - nor a session
        """Tell the server that its session is over, where there are sessions."""

    @abc.abstractmethod
    def close(self) -> None:
        """Fail the calls in flight and leave nothing behind: no process, socket or thread. Raises nothing."""

    def _register(self, call: Call) -> bool:
        with self._lock:
            if self.lost is None:
                self._calls[call.identifier] = call
                return True
        call.outcomes.put(Outcome(call, error=self.lost))
        return False

    def _settle(
        self,
        call: Call,
        response: JsonObject | None = None,
        error: TransportError | None = None,
        status: int | None = None,
        session: str | None = None,
        text: str = "",
    ) -> None:
        with self._lock:
            if self._calls.pop(call.identifier, None) is None:
                return  # it was settled, or nobody waits: late answers are dropped
        call.outcomes.put(Outcome(call, response, error, status, session, text))

    def _lose(self, error: TransportError) -> bool:
        """Fail every call, and every later one. Returns whether it was this that lost the connection."""
        with self._lock:
            if self.lost is not None:
                return False
            self.lost = error
            calls = list(self._calls.values())
            self._calls.clear()
        for call in calls:
            call.outcomes.put(Outcome(call, error=error))
        return True

    def _receive(self, data: bytes) -> None:
        """Take what came on a channel that all calls share."""
        try:
            messages = read_messages(data)
        except ValueError as e:
            _log.warning("%s sent a line that is skipped: %s", self.peer, e)
            return
        for message in messages:
            if is_response(message):
                identifier = message.get("id")
                with self._lock:
                    call = self._calls.get(identifier) if type(identifier) is int else None
                if call is not None:
                    self._settle(call, message)
            elif not self.modern and (reply := reply_to(message)) is not None:
                self.tell(reply, {})


class Transport(Protocol):
    """What opens connections to one server."""

    @property
    def label(self) -> str:
        """What the transport is called in traces."""

    def open(self) -> Connection:
        """A connection, to be started. Raises TransportError."""


# --- HTTP ----------------------------------------------------------------------------------------------


class _WebConnection(rat.Connection):
    """A connection to a web server, which closes idle ones sooner than ratd does."""

    @property
    def is_connected(self) -> bool:
        """Whether the pool may give the connection out again."""
        return time.monotonic() - self.used[0] < WEB_IDLE_SECONDS and super().is_connected


class _PlainConnection(_WebConnection):
    """The same without TLS."""

    def connect(self) -> None:
        """Connect, and no more."""
        urllib3.connection.HTTPConnection.connect(self)


class _WebPool(rat.Pool):
    ConnectionCls = _WebConnection


class _ForwardedPool(_WebPool):
    """A pool of connections to a proxy that is given whole URLs, without a tunnel."""

    def _prepare_proxy(self, conn: rat.Connection) -> None:  # type: ignore[override]
        conn.connect()


class _PlainPool(_ForwardedPool):
    ConnectionCls = _PlainConnection
    scheme = "http"


class _Exchange(rat.Exchange):
    """An HTTP exchange that somebody waits beside: ``over`` is set when it is ended."""

    def __init__(self) -> None:
        super().__init__()
        self.over = threading.Event()

    def end(self) -> None:
        """End it from any thread."""
        super().end()
        self.over.set()


_FAILURES = (OSError, http.client.HTTPException, urllib3.exceptions.HTTPError)


def _timed_out(error: BaseException) -> bool:
    """Whether a time of ours was over, rather than one of the system's."""
    return isinstance(error, (TimeoutError, socket.timeout)) and error.errno != errno.ETIMEDOUT


def late(peer: str, seconds: float | None = None) -> str:
    """What is said of a server that did not answer."""
    return f"{peer} did not answer " + ("in time" if seconds is None else f"within {seconds:g}s")


class _Endpoint:
    """Where requests go: the pool of one origin, the target on it, its host, and what a failure there is called."""

    def __init__(self, pool: rat.Pool, target: str, host: str, peer: str, forwarded: bool = False) -> None:
        self.forwarded = forwarded  # by a proxy that is given whole URLs
        self.pool = pool
        self.target = target
        self.host = host
        self.peer = peer

    def at(self, url: str) -> _Endpoint:
        """Another target on the same origin."""
        parts = urlsplit(url)
        target = urllib3.util.parse_url(urlunsplit(("http", "host", parts.path, parts.query, ""))).request_uri
        place = f"http://{self.host}" if self.forwarded else ""
        return _Endpoint(self.pool, place + target, self.host, self.peer, self.forwarded)

    def explain(self, error: BaseException, exchange: _Exchange) -> str:
        """What a failed exchange says."""
        if _timed_out(error):
            return late(self.peer)
        if isinstance(error, ssl.SSLError) and exchange.stage == "handshake":
            return f"{self.peer} failed the TLS handshake: {rat.openssl_reason(error)}"
        reason = rat.system_reason(error) if isinstance(error, OSError) else "not an HTTP answer"
        if exchange.stage == "proxy":
            return f"the proxy to {self.peer} is unreachable: {reason}"
        if exchange.stage in ("queued", "connect"):
            return f"{self.peer} is unreachable: {reason}"
        if isinstance(error, http.client.IncompleteRead):
            reason = "it ended before its end"
        return f"{self.peer} broke off its answer: {reason}"


class _RatdEndpoint(_Endpoint):
    """The target of a ratd, whose failures are told in the words of rat."""

    def __init__(self, ratd: rat.Ratd) -> None:
        super().__init__(ratd.pool, "/mcp", ratd.host, f"ratd at {ratd.address.text}")
        self._ratd = ratd

    def explain(self, error: BaseException, exchange: _Exchange) -> str:
        """What a failed exchange says."""
        return late(self.peer) if _timed_out(error) else self._ratd.explain(error, exchange, 0)


class _HttpBase(Connection):
    """The exchanges of a connection over HTTP, each in a thread of its own."""

    def __init__(self, endpoint: _Endpoint, headers: Mapping[str, str]) -> None:
        super().__init__(endpoint.peer)
        self._endpoint = endpoint
        self._headers = headers
        # All three are guarded by the lock.
        self._exchanges: dict[threading.Thread, _Exchange] = {}  # while they run
        self._of_call: dict[int, _Exchange] = {}  # by identifier of the call
        self._shut = False  # no exchange is begun any more

    def _spawn(self, work: Callable[[_Exchange], None], call: Call | None = None) -> _Exchange | None:
        """Run an exchange in a thread of its own. None when the connection is closed, or there is no thread."""
        exchange = _Exchange()

        def run() -> None:
            try:
                work(exchange)
            finally:
                exchange.over.set()
                with self._lock:
                    self._exchanges.pop(thread, None)
                    if call is not None:
                        self._of_call.pop(call.identifier, None)

        thread = threading.Thread(target=run, name="ratel-http", daemon=True)
        with self._lock:
            if self._shut:
                return None
            self._exchanges[thread] = exchange
            if call is not None:
                self._of_call[call.identifier] = exchange
            try:
                thread.start()
            except RuntimeError:  # the system has no thread left
                self._exchanges.pop(thread)
                if call is not None:
                    self._of_call.pop(call.identifier)
                return None
        return exchange

    def _request(
        self,
        exchange: _Exchange,
        method: str,
        headers: Mapping[str, str],
        seconds: float | None,
        body: bytes | None = None,
    ) -> rat.Response:
        endpoint = self._endpoint
        fields = {name.title(): value for name, value in self._headers.items()}
        fields.update({name.title(): value for name, value in headers.items()})
        fields["Accept-Encoding"] = "identity"
        if endpoint.forwarded:
            fields.update(endpoint.pool.proxy_headers)
        host = fields.pop("Host", endpoint.host)
        for framing in ("Content-Length", "Transfer-Encoding"):
            fields.pop(framing, None)
        for name, value in fields.items():
            if re.search("[^\t\x20-\x7e\x80-\xff]", value):  # RFC 9110, section 5.5
                raise TransportError(f"{self.peer} was not asked: its header {name} cannot be sent")
        # A stream may stay silent for as long as it is open; what comes before it may not.
        start = f"{method} {endpoint.target} HTTP/1.1\r\nHost: {host}"
        exchange.body = body
        response = endpoint.pool.request_on(exchange, start, fields, seconds)
        if response.status < 200:  # 101, after which the connection speaks another protocol
            self._release(exchange)
            raise TransportError(f"{self.peer} answered HTTP {response.status}, which nobody asked for")
        return response

    def _release(self, exchange: _Exchange) -> None:
        self._endpoint.pool.release(exchange)

    @contextlib.contextmanager
    def _settling(self, call: Call, exchange: _Exchange) -> Iterator[None]:
        """Settle a call with what its exchange fails of."""
        try:
            yield
        except TransportError as e:
            self._settle(call, error=e, status=e.status)
        except _FAILURES as e:
            # No operation has less time than the call: whoever waits for that gives up by itself, and says when.
            if not _timed_out(e):
                self._settle(call, error=TransportError(self._endpoint.explain(e, exchange)))
        except BaseException as e:  # a thread that died silently would leave its caller waiting
            self._settle(call, error=TransportError(f"{self.peer} was not asked: {type(e).__name__}: {e}"))
            raise

    def _body(self, exchange: _Exchange, response: rat.Response) -> bytes:
        pieces = []
        for piece in exchange.pieces():
            pieces.append(piece)
            if exchange.received > MESSAGE_LIMIT:
                raise TransportError(f"{self.peer} sent an answer over 16 MiB", response.status)
        return b"".join(pieces)

    def _refusal(self, response: rat.Response, body: bytes) -> TransportError:
        """The error that an answer other than the expected one is."""
        status, location = response.status, response.headers.get("Location")
        line = next((line for line in body[:10_000].decode("utf-8", "replace").splitlines() if line.strip()), "")
        first = "".join(c if c.isprintable() else " " for c in line.strip()[:200])
        said = f": {first}" if first else ""
        if status == 401:
            return UnauthorizedError(f"{self.peer} answered HTTP 401{said}")
        if 300 <= status < 400 and location:
            return TransportError(
                f"{self.peer} answered HTTP {status}, pointing to {location}: use that URL if it is right", status
            )
        if status >= 300:
            return TransportError(f"{self.peer} answered HTTP {status}{said}", status)
        missing = "no JSON-RPC response to the request" if first else "nothing to the request"
        return TransportError(f"{self.peer} answered {missing} (HTTP {status})", status)

    def _post(self, body: bytes, headers: Mapping[str, str], seconds: float) -> _Telling:
        """Post what gets no JSON-RPC response: a notification, a reply."""
        telling = _Telling()

        def work(exchange: _Exchange) -> None:
            try:
                fields = {"Content-Type": "application/json", "Accept": _ACCEPT, **headers}
                response = self._request(exchange, "POST", fields, seconds, body)
                try:
                    content = b"" if response.status < 300 else self._body(exchange, response)
                    if response.status >= 300:
                        telling.error = self._refusal(response, content)
                finally:
                    self._release(exchange)
            except TransportError as e:
                telling.error = e
            except _FAILURES as e:
                telling.error = TransportError(self._endpoint.explain(e, exchange))
            except BaseException as e:  # what was not told must not pass for told
                telling.error = TransportError(f"{self.peer} was not told: {type(e).__name__}: {e}")
                raise

        telling.exchange = self._spawn(work)
        return telling

    def notify(self, body: bytes, headers: Mapping[str, str], until: float) -> None:
        """Post a notification and wait for it to be taken."""
        seconds = max(until - time.monotonic(), 0.001)
        telling = self._post(body, headers, seconds)
        if telling.exchange is None:
            raise self.lost or TransportError(f"{self.peer} was not told: the system has no thread left")
        if not telling.exchange.over.wait(seconds):
            telling.exchange.end()
            raise TransportError(late(self.peer))
        if telling.error is not None:
            raise telling.error

    def tell(self, body: bytes, headers: Mapping[str, str]) -> None:
        """Post a notification or a reply that nobody waits for."""
        self._post(body, headers, COURTESY_SECONDS)

    def abandon(self, call: Call) -> None:
        """Want no outcome any more: the exchange is ended, which a modern server takes for a cancellation."""
        super().abandon(call)
        with self._lock:
            exchange = self._of_call.get(call.identifier)
        if exchange is not None:
            exchange.end()

    def close(self) -> None:
        """Fail the calls in flight, shut the sockets, and wait for the threads."""
        self._lose(TransportError(f"{self.peer} was closed"))
        with self._lock:
            self._shut = True
            exchanges = dict(self._exchanges)
        for exchange in exchanges.values():
            exchange.end()
        until = time.monotonic() + COURTESY_SECONDS
        for thread in exchanges:
            if thread is not threading.current_thread():
                # One that is in name resolution cannot be woken; it ends when the resolver gives up.
                thread.join(max(until - time.monotonic(), 0))
        self._endpoint.pool.close()


_ACCEPT = "application/json, text/event-stream"


class _Telling:
    """A message that was posted without a response to wait for."""

    exchange: _Exchange | None = None
    error: TransportError | None = None


class HttpConnection(_HttpBase):
    """Streamable HTTP: a POST a message, answered by JSON or by an event stream of its own (MCP, Transports)."""

    http = True

    def send(self, call: Call) -> None:
        """Post a request, in a thread of its own."""
        if not self._register(call):
            return
        if self._spawn(lambda exchange: self._converse(call, exchange), call) is None:
            self._settle(call, error=TransportError(f"{self.peer} was not asked: the system has no thread left"))

    def _converse(self, call: Call, exchange: _Exchange) -> None:
        with self._settling(call, exchange):
            fields = {"Content-Type": "application/json", "Accept": _ACCEPT, **call.headers}
            response = self._request(exchange, "POST", fields, call.remaining(), call.body)
            try:
                self._take(call, exchange, response)
            finally:
                self._release(exchange)

    def _take(self, call: Call, exchange: _Exchange, response: rat.Response) -> None:
        status, session = response.status, response.headers.get("Mcp-Session-Id")
        media_type = response.media_type
        if media_type == "text/event-stream" and 200 <= status < 300:
            self._follow(call, exchange, response, session)
            return
        body = self._body(exchange, response)
        if status != 401:
            with contextlib.suppress(ValueError):
                for message in read_messages(body):
                    # The identifier of an error may be anything: some servers refuse before they have read it.
                    if is_response(message) and ("error" in message or message.get("id") == call.identifier):
                        self._settle(call, message, None, status, session)
                        return
        text = body[:10_000].decode("utf-8", "replace")
        self._settle(call, None, self._refusal(response, body), status, session, text)

    def _follow(self, call: Call, exchange: _Exchange, response: rat.Response, session: str | None) -> None:
        """Read the stream that answers a call, and take it up again where it was cut (MCP 2025-11-25, Resumability)."""
        stream = rat.EventStream()
        pause = RESUME_SECONDS
        failures = 0
        while True:
            try:
                for piece in exchange.pieces():
                    failures = 0
                    for event, data in stream.feed(piece):
                        if event == "message" and self._answered(call, data, response.status, session):
                            self._read_out(exchange)
                            return
                cut = f"{self.peer} ended its stream before the answer"
            except ValueError as e:
                raise TransportError(f"{self.peer} sent {e}", response.status) from None
            except _FAILURES as e:
                cut = self._endpoint.explain(e, exchange)
            finally:
                self._release(exchange)
            last = stream.last_id
            pause = pause if stream.retry is None else stream.retry / 1000
            stream = rat.EventStream()  # what was cut within an event is sent again
            stream.last_id = last
            while True:
                if not call.resumable or last is None or failures >= RESUME_ATTEMPTS or exchange.ended:
                    raise TransportError(cut)
                failures += 1
                if exchange.over.wait(pause):
                    return
                # The identifier of an event is text of the server's; http.client takes Latin-1.
                fields = {
                    **call.headers,
                    "Accept": "text/event-stream",
                    "Last-Event-ID": last.encode().decode("latin-1"),
                }
                try:
                    response = self._request(exchange, "GET", fields, call.remaining())
                except _FAILURES as e:
                    cut = self._endpoint.explain(e, exchange)
                    continue
                kind = response.media_type
                if response.status == 200 and kind == "text/event-stream":
                    break
                body = self._body(exchange, response)
                self._release(exchange)
                raise self._refusal(response, body)

    def _answered(self, call: Call, data: bytes, status: int, session: str | None) -> bool:
        """Take the data of one event of the stream of a call. Returns whether it was the answer."""
        for message in read_messages(data):
            if is_response(message):
                if "error" in message or message.get("id") == call.identifier:
                    self._settle(call, message, None, status, session)
                    return True
            elif not self.modern and (reply := reply_to(message)) is not None:
                self.tell(reply, call.headers)  # in another thread: this one is amid its own exchange
        return False

    def _read_out(self, exchange: _Exchange) -> None:
        """Read what follows the answer, nothing as a rule, so that the connection can be used again."""
        with contextlib.suppress(*_FAILURES):
            exchange.bind(1.0)
            for _ in zip(exchange.pieces(), range(100)):
                pass

    def end_session(self, headers: Mapping[str, str]) -> None:
        """DELETE the session (MCP 2025-11-25, Session Management); a server that keeps it is as well."""

        def work(exchange: _Exchange) -> None:
            try:
                response = self._request(exchange, "DELETE", headers, COURTESY_SECONDS)
                if response.status >= 300 and response.status != 405:
                    _log.info("%s answered the end of the session with HTTP %s", self.peer, response.status)
                self._release(exchange)
            except TransportError as e:
                _log.info("the session was not ended: %s", e)
            except _FAILURES as e:
                _log.info("the session was not ended: %s", self._endpoint.explain(e, exchange))

        exchange = self._spawn(work)
        if exchange is not None and not exchange.over.wait(COURTESY_SECONDS):
            exchange.end()


class SseConnection(_HttpBase):
    """HTTP with SSE (MCP 2024-11-05, Transports): requests are posted, all answers come on one stream."""

    probed = False

    def __init__(self, endpoint: _Endpoint, headers: Mapping[str, str], url: str) -> None:
        super().__init__(endpoint, headers)
        self._url = url
        self._open = threading.Event()  # set once the server has named the endpoint, or the stream is lost

    def start(self, until: float) -> None:
        """Open the stream, which names where to post."""
        self._spawn(self._listen)
        if not self._open.wait(max(until - time.monotonic(), 0)):
            raise TransportError(f"{self.peer} named no endpoint in time")
        if self.lost is not None:
            raise self.lost

    def _listen(self, exchange: _Exchange) -> None:
        error = TransportError(f"{self.peer} ended its stream")
        try:
            response = self._request(exchange, "GET", {"Accept": "text/event-stream"}, None)
            try:
                kind = response.media_type
                if response.status != 200 or kind != "text/event-stream":
                    body = self._body(exchange, response)
                    error = self._refusal(response, body)
                    if response.status == 200:
                        error = TransportError(f"{self.peer} answered no event stream (HTTP 200)", 200)
                    return
                stream = rat.EventStream()
                for piece in exchange.pieces():
                    for event, data in stream.feed(piece):
                        self._take(event, data)
            finally:
                self._release(exchange)
        except TransportError as e:
            error = e
        except ValueError as e:
            error = TransportError(f"{self.peer} sent {e}")
        except _FAILURES as e:
            error = TransportError(self._endpoint.explain(e, exchange))
        finally:
            self._lose(error)
            self._open.set()

    def _take(self, event: str, data: bytes) -> None:
        if event == "endpoint" and not self._open.is_set():
            url = urljoin(self._url, data.decode("utf-8", "replace"))
            if _origin(url) != _origin(self._url):
                raise TransportError(f"{self.peer} named an endpoint of another origin: {_place(url)}")
            self._endpoint = self._endpoint.at(url)  # the stream itself is open, all else is posted there
            self._open.set()
        elif event == "message":
            self._receive(data)

    def send(self, call: Call) -> None:
        """Post a request; its answer comes on the stream."""
        if not self._register(call):
            return

        if self._spawn(lambda exchange: self._hand_in(call, exchange), call) is None:
            self._settle(call, error=TransportError(f"{self.peer} was not asked: the system has no thread left"))

    def _hand_in(self, call: Call, exchange: _Exchange) -> None:
        with self._settling(call, exchange):
            fields = {"Content-Type": "application/json", **call.headers}
            response = self._request(exchange, "POST", fields, call.remaining(), call.body)
            try:
                body = self._body(exchange, response)
                if response.status >= 300:
                    raise self._refusal(response, body)
            finally:
                self._release(exchange)


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.hostname, port


def _place(url: str) -> str:
    """A URL as it may be shown: without what may be a secret in it."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}{f':{parts.port}' if parts.port else ''}{parts.path}"


def web_manager(
    url: str, socket_class: type[ssl.SSLSocket] = ssl.SSLSocket, **options: object
) -> tuple[urllib3.PoolManager, rat.Proxy | None]:
    """A urllib3 manager for the web server of a URL, with ``options`` of urllib3's, and the proxy of the environment
    that it goes through, if there is one.

    Certificates are judged by certifi and by what the system trusts (SSL_CERT_FILE included), unlike ratd's. Raises
    ValueError for a proxy that cannot be used.
    """
    scheme, host, port = _origin(url)
    assert host is not None
    assert port is not None

    def judging() -> ssl.SSLContext:
        context = rat.public_context()
        context.load_default_certs()
        context.sslsocket_class = socket_class
        return context

    if scheme == "https":
        options["ssl_context"] = judging()
    environ = os.environ if scheme == "https" else _PlainEnvironment(os.environ)
    proxy = rat.environment_proxy(rat.Address(host, port, url), environ)
    if proxy is None:
        return urllib3.PoolManager(1, **options), None  # type: ignore[arg-type]
    if proxy.authorization:
        options["proxy_headers"] = {"Proxy-Authorization": proxy.authorization}
    if proxy.url.startswith("https:"):
        options["proxy_ssl_context"] = judging()
    return urllib3.ProxyManager(proxy.url, 1, **options), proxy  # type: ignore[arg-type]


def _web_endpoint(url: str) -> _Endpoint:
    """The endpoint of a URL, by the proxy of the environment if there is one."""
    scheme, host, port = _origin(url)
    assert host is not None
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    try:
        manager, proxy = web_manager(url, rat.TlsSocket, maxsize=rat.WORKERS, socket_options=options)
        forwarded = proxy is not None and scheme == "http"
        manager.pool_classes_by_scheme = {"http": _PlainPool, "https": _ForwardedPool if forwarded else _WebPool}
        pool = manager.connection_from_host(host, port, scheme)
        assert isinstance(pool, rat.Pool)
        named = host.partition("%")[0]  # without a zone, which is of this machine alone (RFC 6874, section 4)
        named = f"[{named}]" if ":" in named else named if named.isascii() else named.encode("idna").decode()
        if port != {"http": 80, "https": 443}[scheme]:
            named += f":{port}"
        return _Endpoint(pool, "", named, f"MCP server at {_place(url)}", forwarded).at(url)
    except ValueError as e:  # of which urllib3's for what is no host is one
        raise TransportError(str(e)) from None


class _PlainEnvironment(dict[str, str]):
    """An environment whose proxy for https is the one for http."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__({name: environ[name] for name in ("NO_PROXY", "no_proxy") if name in environ})
        # Not HTTP_PROXY: under CGI it is a header of the request (CVE-2016-5385).
        if "http_proxy" in environ:
            self["HTTPS_PROXY"] = environ["http_proxy"]


def _check_url(url: str) -> None:
    try:
        scheme, host, port = _origin(url)
    except ValueError:
        scheme, host, port = "", None, None
    if scheme not in ("http", "https") or not host or not port:
        raise ValueError(f"expected an http:// or https:// URL, not {url!r}")


def _check_headers(headers: Mapping[str, str] | None) -> None:
    for name, value in (headers or {}).items():
        # RFC 9110, sections 5.1 and 5.5. The value may be a secret, and is not told.
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or re.search("[^\\t\\x20-\\x7e\\x80-\\xff]", value):
            raise ValueError(f"the header {name!r} cannot be sent: its name or its value is none of HTTP")


def _web_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    return {"User-Agent": f"ratel/{rat.__version__}", **{k.title(): v for k, v in (headers or {}).items()}}


@dataclass(frozen=True)
class StreamableHttp:
    """A server over Streamable HTTP (MCP 2025-03-26 and later).

    ``headers`` go with every request; those of the protocol itself cannot be replaced. Raises ValueError for a URL
    that is not http or https, or a header that HTTP does not allow.
    """

    url: str
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    label: ClassVar[str] = "http"

    def __post_init__(self) -> None:
        _check_url(self.url)
        _check_headers(self.headers)

    def open(self) -> Connection:
        """A connection to the server. Raises TransportError for a proxy that cannot be used."""
        return HttpConnection(_web_endpoint(self.url), _web_headers(self.headers))


@dataclass(frozen=True)
class Sse:
    """A server over HTTP with SSE, the transport of MCP 2024-11-05; ``url`` is that of its stream.

    ``headers`` go with every request. Raises ValueError for a URL that is not http or https, or a header that
    HTTP does not allow.
    """

    url: str
    headers: Mapping[str, str] | None = field(default=None, repr=False)
    label: ClassVar[str] = "sse"

    def __post_init__(self) -> None:
        _check_url(self.url)
        _check_headers(self.headers)

    def open(self) -> Connection:
        """A connection to the server. Raises TransportError for a proxy that cannot be used."""
        return SseConnection(_web_endpoint(self.url), _web_headers(self.headers), self.url)


@dataclass(frozen=True)
class Rat:
    """A ratd at HOST:PORT behind mutual TLS, as the client of a bundle's directory: the connection of ``rat``.

    Raises ValueError for an address that is none. The directory is checked when a connection is opened, by the
    checks of rat.
    """

    server: str | rat.Address
    bundle: str | os.PathLike[str]
    label: ClassVar[str] = "rat"

    def __post_init__(self) -> None:
        self._address()

    def _address(self) -> rat.Address:
        return self.server if isinstance(self.server, rat.Address) else rat.Address.parse(self.server)

    def open(self) -> Connection:
        """A connection to the server. Raises TransportError for a directory or a proxy that cannot be used."""
        address = self._address()
        try:
            ratd = rat.Ratd(address, rat.load_side(os.fspath(self.bundle)), rat.environment_proxy(address))
        except (ValueError, OSError) as e:  # of which a BundleError is one
            raise TransportError(str(e)) from e
        return HttpConnection(_RatdEndpoint(ratd), _web_headers(None))


# --- Processes -----------------------------------------------------------------------------------------

# What a server gets of the environment besides its `env`: what it needs to run, and no credential of another's.
_INHERITED = (
    (
        "APPDATA",
        "HOMEDRIVE",
        "HOMEPATH",
        "LOCALAPPDATA",
        "PATH",
        "PATHEXT",
        "PROCESSOR_ARCHITECTURE",
        "SYSTEMDRIVE",
        "SYSTEMROOT",
        "TEMP",
        "USERNAME",
        "USERPROFILE",
    )
    if sys.platform == "win32"
    else ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER")
)


class StdioConnection(Connection):
    """A process that speaks JSON-RPC lines on its standard streams (MCP, stdio transport).

    Four threads: one reads its output, one its stderr, one writes its input (a server that does not read must not
    block a caller), one waits for its end. The process leads a session, hence a process group, of its own: signals go
    to the whole group, since ``npx`` does not pass them on; and Ctrl-C in a terminal does not reach the servers
    before their host has dealt with it.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], directory: str | None, peer: str
    ) -> None:
        super().__init__(peer)
        self._command = command
        self._environment = environment
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._tail = b""  # of stderr; the errors thread's until it has ended
        self._exited = threading.Event()
        self._closing = threading.Lock()
        self._threads = {
            name: threading.Thread(target=work, name=f"ratel-{name}", daemon=True)
            for name, work in (
                ("reader", self._read),
                ("errors", self._read_errors),
                ("writer", self._write),
                ("waiter", self._wait),
            )
        }

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process, once started."""
        assert self._process is not None
        return self._process

    def start(self, until: float) -> None:
        """Start the process. Raises TransportError when there is none to start."""
        try:
            self._process = subprocess.Popen(
                self._command,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self._directory,
                env=dict(self._environment),
                start_new_session=True,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            )
        except (OSError, ValueError) as e:
            reason = rat.system_reason(e) if isinstance(e, OSError) else str(e)
            error = TransportError(f"{self.peer} cannot be started: {reason}")
            self._lose(error)
            raise error from e
        for thread in self._threads.values():
            thread.start()

    def send(self, call: Call) -> None:
        """Queue a request for the process."""
        if self._register(call):
            self._outgoing.put(call.body)

    def notify(self, body: bytes, headers: Mapping[str, str], until: float) -> None:
        """Queue a notification for the process."""
        if self.lost is not None:
            raise self.lost
        self._outgoing.put(body)

    def tell(self, body: bytes, headers: Mapping[str, str]) -> None:
        """Queue a notification or a reply for the process."""
        self._outgoing.put(body)

    def _write(self) -> None:
        assert self.process.stdin is not None
        try:
            with self.process.stdin as pipe:
                while (line := self._outgoing.get()) is not None:
                    view = memoryview(line + b"\n")
                    while view:
                        view = view[os.write(pipe.fileno(), view) :]
        except OSError:
            pass  # it ended, or closed its input: the other threads tell what of

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as pipe:
            try:
                for line in rat.read_lines(pipe.fileno()):
                    if line is None:
                        _log.warning("%s sent a line over 16 MiB, which is skipped", self.peer)
                    elif line.strip():
                        self._receive(line)
            except OSError as e:
                _log.warning("%s cannot be read: %s", self.peer, rat.system_reason(e))
        # How it ended tells the reason better, and is known a moment later as a rule.
        if not self._exited.wait(0.5):
            self._lose(TransportError(f"{self.peer} closed its output"))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as pipe, contextlib.suppress(OSError):
            while chunk := os.read(pipe.fileno(), 64 * 1024):
                self._tail = (self._tail + chunk)[-STDERR_TAIL:]

    def _wait(self) -> None:
        status = self.process.wait()
        self._exited.set()
        self._outgoing.put(None)  # what it left behind may wait for the end of its input, too
        # What it wrote last is read before its calls fail; a child of its that holds the pipes is not waited for.
        self._threads["errors"].join(0.5)
        self._threads["reader"].join(0.5)
        how = f"exited with status {status}" if status >= 0 else f"was ended by {_signal_name(-status)}"
        said = self._tail.decode("utf-8", "replace").strip()
        self._lose(TransportError(f"{self.peer} {how}" + (f": {said}" if said else "")))
        for number in (signal.SIGTERM, _SIGKILL):
            if self._group_ended(GRACE_SECONDS):
                return
            self._signal(number)
        self._group_ended(0.2)  # none outlives that signal, but whoever inherited them may be slow to reap them

    def _group_ended(self, seconds: float) -> bool:
        """Wait for the children of the process to be gone. Its number stays taken while one of its group is there."""
        if os.name == "nt":
            return True
        until = time.monotonic() + seconds
        while True:
            try:
                os.killpg(self.process.pid, 0)
            except OSError:  # gone, or on macOS nothing but zombies
                return True
            if time.monotonic() > until:
                return False
            time.sleep(0.02)

    def _signal(self, number: int) -> None:
        if os.name == "nt":
            # There are no signals; what was started is found by its parents.
            kill = ["taskkill", "/F", "/T", "/PID", str(self.process.pid)]
            subprocess.run(kill, capture_output=True, check=False)
            return
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """End the process and all its group: its input closed, SIGTERM after 2 s, SIGKILL after 2 more; reaped."""
        self._lose(TransportError(f"{self.peer} was closed"))
        with self._closing:
            if self._process is None:
                return
            self._outgoing.put(None)
            for number in (signal.SIGTERM, _SIGKILL, None):
                if self._exited.wait(GRACE_SECONDS) or number is None:
                    break
                self._signal(number)
            for name in ("waiter", "reader", "errors", "writer"):
                if self._threads[name] is not threading.current_thread():
                    # A process that left the group may hold a pipe for as long as it likes.
                    self._threads[name].join(4 * GRACE_SECONDS + 2.0 if name == "waiter" else 1.0)


_SIGKILL = getattr(signal, "SIGKILL", signal.SIGTERM)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True)
class Stdio:
    """A server that is a process of ours, spoken to on its standard streams.

    ``env`` is added to the little of the environment that it inherits (HOME, LOGNAME, PATH, SHELL, TERM and USER, or
    what corresponds on Windows); ``cwd`` is its working directory. Nothing is started before a connection is.
    """

    command: str
    args: Sequence[str] = ()
    env: Mapping[str, str] | None = field(default=None, repr=False)
    cwd: str | os.PathLike[str] | None = None
    label: ClassVar[str] = "stdio"

    def open(self) -> Connection:
        """A connection whose start will start the process."""
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        environment.update(self.env or {})
        command = self.command
        if sys.platform == "win32":  # CreateProcess finds no npx.cmd
            command = shutil.which(command, path=environment.get("PATH")) or command
        directory = None if self.cwd is None else os.fspath(self.cwd)
        shown = " ".join((self.command, *self.args))
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        return StdioConnection((command, *self.args), environment, directory, f"MCP server {shown!r}")
