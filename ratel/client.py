"""A client of one MCP server over a transport: it connects, asks, and closes, for any number of threads.

The official SDK wants an event loop and a session handed over; here a transport is handed over, and the client owns
what it opens. It finds out which era the server speaks (the handshake of 2025-11-25 and before, *legacy*, or the
self-contained requests of 2026-07-28, *modern*) and hides the difference: `request` is the same for both.

What was negotiated is a `_Link`, replaced whole when a process or a session has to be started again, so that a call
works with one state from its first byte to its last.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Literal, NamedTuple

import rat
from ratel.trace import RatelError
from ratel.transports import Call, Connection, Outcome, TransportError, encode, late

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

    from ratel.transports import JsonObject, Transport

_log = logging.getLogger("ratel")

# What this client speaks. Of legacy versions the newest is asked for, and any a server offers instead is accepted.
MODERN_VERSIONS = ("2026-07-28",)
LEGACY_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")

HEADER_MISMATCH = -32020
MISSING_CAPABILITY = -32021
UNSUPPORTED_VERSION = -32022
MODERN_ERRORS = (HEADER_MISMATCH, MISSING_CAPABILITY, UNSUPPORTED_VERSION)

# Seconds for a request unless the caller says otherwise, and whatever the caller says.
REQUEST_SECONDS = 60.0
REQUEST_MAXIMUM = 600.0

# Seconds to connect, starting the server included; and of silence after which a server on stdio is also asked as a
# legacy one, since some of those do not answer what they do not know. A cold npx can take longer: both stay asked.
CONNECT_SECONDS = 60.0
PROBE_SECONDS = 5.0

# Pages of a listing at most. Servers page by fifty or more; one that gets here will not stop at all.
PAGE_LIMIT = 64

CLIENT_INFO = {"name": "ratel", "version": rat.__version__}
_META = "io.modelcontextprotocol/"


class McpError(RatelError):
    """A JSON-RPC error of the server: ``code``, ``message`` and ``data`` as it sent them."""

    def __init__(self, code: int, message: str, data: object = None) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message
        self.data = data


# A cursor that an earlier page had given, or more pages than `PAGE_LIMIT`.
McpToolsListErrorCode = Literal["RepeatedCursor", "PaginationExceeded"]


class McpToolsListError(RatelError):
    """A listing of tools that does not end; ``code`` is "RepeatedCursor" or "PaginationExceeded"."""

    def __init__(self, code: McpToolsListErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Link(NamedTuple):
    """What was negotiated over a connection. ``server`` is what the server says of itself, as it sent it."""

    connection: Connection
    modern: bool
    version: str
    session: str | None
    capabilities: Mapping[str, object]
    instructions: str | None
    server: Mapping[str, object]


class McpClient:
    """A client of the server that a transport reaches. Safe for any number of threads.

    It connects at the first request, or at `connect`; after the server went away the next request connects anew. A
    request that may have been delivered is never sent twice. As a context manager it connects, and closes.
    """

    def __init__(self, transport: Transport, *, timeout: float = REQUEST_SECONDS) -> None:
        """Take a transport, and the seconds that a request has unless it is given others (600 at most)."""
        self._transport = transport
        self._timeout = timeout
        self._identifiers = itertools.count(1)  # next() of it is atomic
        # Held while connecting, so that one thread connects and the others wait for it. Guards the writing of _link.
        self._connecting = threading.Lock()
        self._link: _Link | None = None
        # Guards the two below, and is held for moments only: close() must not wait for a connection to come about.
        self._state = threading.Lock()
        self._connection: Connection | None = None  # the latest, be it established or not
        self._closed = False
        self._was_legacy = False  # the era is the server's, not the connection's: it is asked for once
        self._schemas: Mapping[str, object] = {}  # input schemas by tool, as last listed; replaced whole

    def __enter__(self) -> McpClient:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def connect(self) -> None:
        """Connect unless it is connected, within 60 seconds.

        Raises TransportError, UnauthorizedError or McpError; nothing is left open then.
        """
        self._linked(time.monotonic() + CONNECT_SECONDS)

    @property
    def protocol_version(self) -> str:
        """The version of MCP spoken with the server. Connects if need be."""
        return self._linked(time.monotonic() + CONNECT_SECONDS).version

    @property
    def instructions(self) -> str | None:
        """What the server tells how to use it, if anything. Connects if need be."""
        return self._linked(time.monotonic() + CONNECT_SECONDS).instructions

    @property
    def capabilities(self) -> Mapping[str, object]:
        """The capabilities that the server declared. Connects if need be."""
        return self._linked(time.monotonic() + CONNECT_SECONDS).capabilities

    @property
    def server_info(self) -> Mapping[str, object]:
        """Name and version of the server, as it sent them; empty when it did not. Connects if need be."""
        return self._linked(time.monotonic() + CONNECT_SECONDS).server

    # Requests

    def request(
        self, method: str, params: Mapping[str, object] | None = None, *, timeout: float | None = None
    ) -> JsonObject:
        """The result of a request.

        ``timeout`` is in seconds, 600 at most, from now to the last byte, connecting included if it is needed.
        Raises McpError for an error of the server, UnauthorizedError for HTTP 401, TransportError otherwise.
        """
        return self._request(method, params or {}, timeout)

    def notify(self, method: str, params: Mapping[str, object] | None = None) -> None:
        """Send a notification. Raises TransportError when it certainly was not delivered."""
        until = time.monotonic() + self._timeout
        link = self._linked(until)
        link.connection.notify(self._notification(method, params), self._fields(link, method, {}), until)

    def list_tools(self, *, timeout: float | None = None) -> list[JsonObject]:
        """Every tool that the server lists, in its order, as it describes them; ``timeout`` is for each page.

        Over HTTP, in the modern era, a tool whose header annotations break the rules is left out and logged, as the
        specification has it. Raises McpToolsListError for a listing that does not end, and what `request` raises.
        """
        link = self._linked(time.monotonic() + CONNECT_SECONDS)
        tools: list[JsonObject] = []
        if "tools" in link.capabilities:
            for page in self._pages(timeout):
                tools.extend(page)
        if link.modern and link.connection.http:
            tools = [tool for tool in tools if self._well_annotated(link, tool)]
        self._schemas = {str(tool["name"]): tool.get("inputSchema") for tool in tools}
        return tools

    def call_tool(
        self, name: str, arguments: Mapping[str, object] | None = None, *, timeout: float | None = None
    ) -> JsonObject:
        """The whole result of a tool, be it one with ``isError``; ``structuredContent`` is not validated.

        Raises what `request` raises.
        """
        params = {"name": name, "arguments": dict(arguments or {})}
        try:
            return self._request("tools/call", params, timeout)
        except McpError as e:
            link = self._link
            if e.code != HEADER_MISMATCH or link is None or not link.modern or not link.connection.http:
                raise
            # It was refused unread, as the annotations have changed since they were listed.
            self.list_tools(timeout=timeout)
            return self._request("tools/call", params, timeout)

    def close(self) -> None:
        """Close: calls in flight fail, later ones raise, and no process, socket or thread is left. Once is enough."""
        with self._state:
            self._closed = True
            connection, link = self._connection, self._link
        if connection is None:
            return
        if link is not None and link.connection is connection and link.session and connection.lost is None:
            connection.end_session(self._fields(link, "", {}))
        connection.close()

    def _request(self, method: str, params: Mapping[str, object], timeout: float | None) -> JsonObject:
        seconds = min(self._timeout if timeout is None else timeout, REQUEST_MAXIMUM)
        until = time.monotonic() + seconds
        link = self._linked(until)
        outcome = self._ask(link, method, params, until, seconds)
        if link.session is not None and _session_expired(outcome):
            link = self._renewed(link, until)
            outcome = self._ask(link, method, params, until, seconds)
        elif link.modern and (version := _offered(outcome, MODERN_VERSIONS)) is not None:
            link = link._replace(version=version)
            outcome = self._ask(link, method, params, until, seconds)
        result = _result(link.connection, outcome)
        if link.modern:
            kind = result.get("resultType", "complete")
            if kind == "input_required":
                raise TransportError(f"{link.connection.peer} asks for input (input_required), and there is none here")
            if kind != "complete":
                raise TransportError(f"{link.connection.peer} sent a result of an unknown type: {kind!r}")
        return result

    def _pages(self, timeout: float | None) -> Iterator[list[JsonObject]]:
        peer = self._linked(time.monotonic() + CONNECT_SECONDS).connection.peer
        params: JsonObject = {}
        seen: set[str] = set()
        for _ in range(PAGE_LIMIT):
            result = self._request("tools/list", params, timeout)
            tools = result.get("tools")
            if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
                raise TransportError(f"{peer} listed something else than tools")
            yield tools
            cursor = result.get("nextCursor")
            if cursor is None:
                return
            if not isinstance(cursor, str):
                raise TransportError(f"{peer} gave a cursor that is no string: {cursor!r:.80}")
            if cursor in seen:
                raise McpToolsListError("RepeatedCursor", f"{peer} repeated the cursor {cursor!r:.80}")
            seen.add(cursor)
            params = {"cursor": cursor}
        raise McpToolsListError("PaginationExceeded", f"{peer} lists tools on more than {PAGE_LIMIT} pages")

    def _well_annotated(self, link: _Link, tool: JsonObject) -> bool:
        _, fault = rat.header_parameters(tool.get("inputSchema"))
        if fault is not None:
            _log.warning("the tool %s of %s is left out: %s", tool["name"], link.connection.peer, fault)
        return fault is None

    # One request and its outcome

    def _fields(self, link: _Link, method: str, params: Mapping[str, object]) -> dict[str, str]:
        """The HTTP fields of a message (MCP, Streamable HTTP)."""
        if not link.connection.http:
            return {}
        fields = {"Mcp-Protocol-Version": link.version}
        if link.session is not None:
            fields["Mcp-Session-Id"] = link.session
        if not link.modern or not method:
            return fields
        fields["Mcp-Method"] = rat.header_value(method)
        named = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}.get(method)
        if named is not None and isinstance(params.get(named), str):
            fields["Mcp-Name"] = rat.header_value(str(params[named]))
        if method == "tools/call":
            parameters, _ = rat.header_parameters(self._schemas.get(str(params.get("name"))))
            fields.update(rat.parameter_headers(parameters, params.get("arguments")))
        return fields

    def _call(
        self,
        link: _Link,
        method: str,
        params: Mapping[str, object],
        until: float,
        outcomes: queue.SimpleQueue[Outcome] | None = None,
    ) -> Call:
        if link.modern:
            meta = params.get("_meta")
            params = {
                **params,
                "_meta": {
                    **(meta if isinstance(meta, dict) else {}),
                    f"{_META}protocolVersion": link.version,
                    f"{_META}clientInfo": CLIENT_INFO,
                    f"{_META}clientCapabilities": {},
                },
            }
        identifier = next(self._identifiers)
        request: JsonObject = {"jsonrpc": "2.0", "id": identifier, "method": method}
        if params:
            request["params"] = params
        try:
            body = encode(request)
        except (TypeError, ValueError, RecursionError) as e:
            raise TransportError(f"{link.connection.peer} was not asked: the parameters are not JSON: {e}") from e
        fields = {} if method == "initialize" else self._fields(link, method, params)
        return Call(identifier, method, body, until, outcomes or queue.SimpleQueue(), fields, not link.modern)

    def _ask(
        self, link: _Link, method: str, params: Mapping[str, object], until: float, seconds: float | None = None
    ) -> Outcome:
        """Send a request and wait for its outcome. Raises TransportError when there is none in time."""
        call = self._call(link, method, params, until)
        try:
            link.connection.send(call)
            return call.outcomes.get(timeout=call.remaining())
        except queue.Empty:
            self._abandon(link, call, "timed out")
            raise TransportError(late(link.connection.peer, seconds)) from None
        except BaseException:  # an interrupt of the waiting thread, above all: nobody waits any more
            self._abandon(link, call, "interrupted")
            raise

    def _abandon(self, link: _Link, call: Call, reason: str) -> None:
        """Give a call up, and say so to a server that would not see it by a closed connection."""
        link.connection.abandon(call)
        if call.method in ("initialize", "server/discover") or (link.modern and link.connection.http):
            return
        body = self._notification("notifications/cancelled", {"requestId": call.identifier, "reason": reason})
        link.connection.tell(body, self._fields(link, "", {}))

    @staticmethod
    def _notification(method: str, params: Mapping[str, object] | None) -> bytes:
        notification: JsonObject = {"jsonrpc": "2.0", "method": method}
        if params:
            notification["params"] = params
        return encode(notification)

    # Connecting

    def _linked(self, until: float) -> _Link:
        """The link to work with, made if there is none or the connection was lost."""
        link = self._usable()
        if link is not None:
            return link
        if not self._connecting.acquire(timeout=max(until - time.monotonic(), 0)):
            raise TransportError(f"the {self._transport.label} server was not connected to in time")
        try:
            link = self._usable()
            if link is None:
                if self._link is not None:
                    self._link.connection.close()  # lost, but its remains are ours
                self._link = link = self._connect(min(until, time.monotonic() + CONNECT_SECONDS))
            return link
        finally:
            self._connecting.release()

    def _usable(self) -> _Link | None:
        with self._state:
            if self._closed:
                peer = "the server" if self._connection is None else self._connection.peer
                raise TransportError(f"{peer} was closed: register it again to call its tools")
            link = self._link
        return link if link is not None and link.connection.lost is None else None

    def _connect(self, until: float) -> _Link:
        connection = self._opened(until)
        try:
            return self._negotiate(connection, until)
        except BaseException:  # whatever it is, nothing that was opened is left
            with self._state:
                connection = self._connection or connection
            connection.close()
            self._was_legacy = False
            raise

    def _opened(self, until: float) -> Connection:
        connection = self._transport.open()
        with self._state:
            if self._closed:
                raise TransportError("the server was closed while it was connected to")
            self._connection = connection
        try:
            connection.start(until)
        except BaseException:  # whatever it is, nothing that was opened is left
            connection.close()
            raise
        return connection

    def _negotiate(self, connection: Connection, until: float) -> _Link:
        if not connection.probed or self._was_legacy:
            return self._initialize(connection, until)
        link = self._probe_http(connection, until) if connection.http else self._probe_pipe(connection, until)
        link.connection.modern = link.modern
        self._was_legacy = not link.modern
        return link

    def _tentative(self, connection: Connection, version: str = MODERN_VERSIONS[-1]) -> _Link:
        modern = version in MODERN_VERSIONS
        # What a server can do that answered no discovery is found out by asking.
        return _Link(connection, modern, version, None, {"tools": {}}, None, {})

    def _probe_http(self, connection: Connection, until: float) -> _Link:
        """Find the era by a modern request (MCP 2026-07-28, Streamable HTTP, Backward Compatibility)."""
        tentative = self._tentative(connection)
        outcome = self._ask(tentative, "server/discover", {}, until)
        link = self._discovered(tentative, outcome, until)
        if link is not None:
            return link
        answered = outcome.status is not None and 200 <= outcome.status < 300 and outcome.response is not None
        if not answered and outcome.status not in (400, 404, 405):
            _result(connection, outcome)  # which is none: an outage tells nothing of the era
        return self._initialize(connection, until)

    def _discovered(self, link: _Link, outcome: Outcome, until: float, last: bool = False) -> _Link | None:
        """The link that the answer to a discovery makes, None when it is not of a modern server.

        Raises McpError or TransportError for a modern server that speaks no version in common.
        """
        if outcome.response is None:
            return None
        code = _error_code(outcome)
        if code is not None:
            if code not in MODERN_ERRORS:
                return None
            if code != UNSUPPORTED_VERSION:
                return link  # modern, although it would not be discovered
            version = None if last else _offered(outcome, MODERN_VERSIONS)
            if version is not None:
                link = link._replace(version=version)
                outcome = self._ask(link, "server/discover", {}, until)
                again = self._discovered(link, outcome, until, last=True)
                if again is None:
                    _result(link.connection, outcome)
                return again
            if _offered(outcome, LEGACY_VERSIONS) is None:
                _result(link.connection, outcome)
            return None
        result = outcome.response.get("result") if outcome.response is not None else None
        versions = result.get("supportedVersions") if isinstance(result, dict) else None
        if not isinstance(result, dict) or not isinstance(versions, list):
            return None  # an answer, but not to this question
        common = [version for version in MODERN_VERSIONS if version in versions]
        if not common:
            if any(version in versions for version in LEGACY_VERSIONS):
                return None
            raise TransportError(f"{link.connection.peer} speaks {_list(versions)}, and this client none of it")
        meta = result.get("_meta")
        server = meta.get(f"{_META}serverInfo") if isinstance(meta, dict) else None
        return _described(link._replace(version=common[-1]), result, server or result.get("serverInfo"))

    def _initialize(self, connection: Connection, until: float) -> _Link:
        """The handshake of the legacy era (MCP 2025-11-25, Lifecycle). Raises McpError or TransportError."""
        link = self._tentative(connection, LEGACY_VERSIONS[-1])
        return self._initialized(link, self._ask(link, "initialize", _INITIALIZE, until), until)

    def _initialized(self, link: _Link, outcome: Outcome, until: float) -> _Link:
        peer, result = link.connection.peer, _result(link.connection, outcome)
        version = result.get("protocolVersion")
        link = link._replace(version=str(version), session=outcome.session)
        try:
            if version not in LEGACY_VERSIONS:
                raise TransportError(f"{peer} offers protocol {version!r:.40}, which is not spoken here")
            body = self._notification("notifications/initialized", None)
            link.connection.notify(body, self._fields(link, "", {}), until)
        except BaseException:  # whatever it is, the server is not left with a session that nobody has
            if outcome.session is not None:
                link.connection.end_session({"Mcp-Session-Id": outcome.session})
            raise
        return _described(link, result, result.get("serverInfo"))

    def _renewed(self, expired: _Link, until: float) -> _Link:
        """A link with a new session, in place of one whose session is over (MCP 2025-11-25, Session Management)."""
        if not self._connecting.acquire(timeout=max(until - time.monotonic(), 0)):
            raise TransportError(f"{expired.connection.peer} was not connected to in time")
        try:
            if self._link is expired:
                self._link = self._initialize(expired.connection, until)
            assert self._link is not None
            return self._link
        finally:
            self._connecting.release()

    def _probe_pipe(self, connection: Connection, until: float) -> _Link:
        """Find the era of a process (MCP 2026-07-28, stdio, Backward Compatibility).

        Of a discovery and, after a silence, an initialize the first decisive answer wins.
        """
        outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        modern, legacy = self._tentative(connection), self._tentative(connection, LEGACY_VERSIONS[-1])
        discover = self._call(modern, "server/discover", {}, until, outcomes)
        initialize = self._call(legacy, "initialize", _INITIALIZE, until, outcomes)
        try:
            connection.send(discover)
            outcome = _next(outcomes, min(until, time.monotonic() + PROBE_SECONDS))
            if outcome is not None and outcome.error is not None:
                # It ended when it was asked what it does not know: once more, and as a legacy one.
                connection.close()
                return self._initialize(self._opened(until), until)
            link = None if outcome is None else self._discovered(modern, outcome, until)
            if link is not None:
                return link
            connection.send(initialize)
            silent = outcome is None  # so that its answer to the discovery may yet come
            outcome = _next(outcomes, until)
            if silent and outcome is not None and outcome.call is discover:
                link = self._discovered(modern, outcome, until)
                if link is not None:
                    return link
                outcome = _next(outcomes, until)
            elif silent and outcome is not None and _error_code(outcome) is not None:
                # A modern server refuses it, and may be about to answer the discovery.
                late_outcome = _next(outcomes, min(until, time.monotonic() + PROBE_SECONDS))
                link = None if late_outcome is None else self._discovered(modern, late_outcome, until)
                if link is not None:
                    return link
            if outcome is None:
                raise TransportError(late(connection.peer))
            return self._initialized(legacy, outcome, until)
        finally:
            connection.abandon(discover)
            connection.abandon(initialize)


_INITIALIZE: Mapping[str, object] = {
    "protocolVersion": LEGACY_VERSIONS[-1],
    "capabilities": {},
    "clientInfo": CLIENT_INFO,
}


def _next(outcomes: queue.SimpleQueue[Outcome], until: float) -> Outcome | None:
    """The next outcome, None when there is none by then."""
    try:
        return outcomes.get(timeout=max(until - time.monotonic(), 0.001))
    except queue.Empty:
        return None


def _is_tool(tool: object) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("name"), str) and bool(tool["name"])


def _list(versions: Sequence[object]) -> str:
    return ", ".join(str(version)[:40] for version in versions[:10]) or "nothing"


def _described(link: _Link, result: Mapping[str, object], server: object) -> _Link:
    capabilities, instructions = result.get("capabilities"), result.get("instructions")
    return link._replace(
        capabilities=capabilities if isinstance(capabilities, dict) else {},
        instructions=instructions if isinstance(instructions, str) else None,
        server=server if isinstance(server, dict) else {},
    )


def _error_of(outcome: Outcome) -> Mapping[str, object] | None:
    error = outcome.response.get("error") if outcome.response is not None else None
    return error if isinstance(error, dict) else None


def _error_code(outcome: Outcome) -> int | None:
    """The code of the JSON-RPC error that an outcome is, 0 for an error without one, None for none."""
    if outcome.response is None or "error" not in outcome.response:
        return None
    code = (_error_of(outcome) or {}).get("code")
    return code if isinstance(code, int) and not isinstance(code, bool) else 0


def _offered(outcome: Outcome, spoken: Sequence[str]) -> str | None:
    """The newest version in common that an UnsupportedProtocolVersionError names, None when it is no such error."""
    if _error_code(outcome) != UNSUPPORTED_VERSION:
        return None
    data = (_error_of(outcome) or {}).get("data")
    supported = data.get("supported") if isinstance(data, dict) else None
    common = [version for version in spoken if isinstance(supported, list) and version in supported]
    return common[-1] if common else None


def _session_expired(outcome: Outcome) -> bool:
    """Whether an outcome says that the session is over: HTTP 404, or 400 with a word of it."""
    if outcome.status == 404:
        return True
    said = outcome.text or str((_error_of(outcome) or {}).get("message", ""))
    return outcome.status == 400 and "session" in said.lower()


def _result(connection: Connection, outcome: Outcome) -> JsonObject:
    """The result that an outcome is. Raises what it is otherwise."""
    if outcome.error is not None:
        raise outcome.error
    assert outcome.response is not None
    if "error" in outcome.response:
        error = _error_of(outcome) or {}
        raise McpError(_error_code(outcome) or 0, str(error.get("message", "unknown error")), error.get("data"))
    result = outcome.response.get("result")
    if not isinstance(result, dict):
        raise TransportError(f"{connection.peer} sent a result that is no object")
    return result
