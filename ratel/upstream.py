"""Registering an MCP server: its tools enter a catalog, and are called over the connection they came by.

A registration is all or nothing. The client connects, reads the instructions and lists every page before the catalog
is touched; the catalog then takes all tools in one step. Registering a name again is how a host follows a server
whose tools changed: the new connection stands before the old tools go, so that no call finds neither. A subscription
to changes would do it unasked, and have the tools of a model change between its search and its call.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from ratel.catalog import Tool, ToolCatalog
from ratel.client import McpClient
from ratel.trace import span
from ratel.transports import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from ratel.transports import JsonObject, Transport

# Between the name of a server and that of its tool, in the id of the tool.
SEPARATOR = "__"


class McpServerHandle:
    """A registered server. As a context manager it closes itself.

    ``tool_ids`` are the ids of its tools, in the order of the listing; ``server_instructions`` is what the server
    told how to use it, None when nothing.
    """

    def __init__(self, name: str, client: McpClient, tool_ids: list[str], server_instructions: str | None) -> None:
        self.tool_ids = tool_ids
        self.server_instructions = server_instructions
        self._name = name
        self._client = client
        self._lock = threading.Lock()  # guards all below
        self._calls = 0  # under way
        self._closed = False
        self._successor: McpServerHandle | None = None

    def __enter__(self) -> McpServerHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect: calls under way fail, and so do later ones, although the tools stay in the catalog.

        Once the same name was registered again this does nothing: the tools are no longer this connection's.
        """
        with self._lock:
            if self._successor is not None:
                return
            self._closed = True
        self._client.close()

    def call(self, tool: str, arguments: JsonObject) -> JsonObject:
        """The result of a tool of the server, by its own name. Raises what `McpClient.call_tool` raises."""
        with self._lock:
            successor = self._successor
            if successor is None:
                if self._closed:
                    raise TransportError(f"MCP server {self._name!r} was closed: register it again to call its tools")
                self._calls += 1
        if successor is not None:
            # The tool was looked up just before the name was registered again.
            return successor.call(tool, arguments)
        try:
            return self._client.call_tool(tool, arguments)
        finally:
            with self._lock:
                self._calls -= 1
                over = self._successor is not None and not self._calls
            if over:
                # A server may take seconds to end, which are none of this caller's.
                closing = threading.Thread(target=self._client.close, name="ratel-close", daemon=True)
                try:
                    closing.start()
                except RuntimeError:  # the system has no thread left
                    self._client.close()

    def displace(self, successor: McpServerHandle) -> None:
        """Leave the name to another registration; the connection closes once its calls are over."""
        with self._lock:
            self._successor = successor
            idle = not self._calls
        if idle:
            self._client.close()


def register_mcp_server(catalog: ToolCatalog, *, name: str, transport: Transport) -> McpServerHandle:
    """Connect to a server and register its tools, each as ``<name>__<its name>``.

    A tool without a description has "", one without an output schema takes any object. Of tools of one name the last
    counts. The same name again is a re-sync: the tools become those listed now, in one step, and the connection of
    before closes after its calls.

    Raises ValueError for a name that is empty, holds ``__`` or ends in ``_``; McpError, UnauthorizedError,
    TransportError, McpToolsListError or EmbeddingError when connecting, listing or registering fails, after the
    connection was closed: nothing is left of the attempt, and an earlier registration of the name goes on working.
    """
    if not isinstance(name, str) or not name or SEPARATOR in name or name.endswith("_"):
        raise ValueError(f"a server's name is not empty, holds no {SEPARATOR} and does not end in _: not {name!r}")
    attributes = {"ratel.upstream.server": name, "ratel.upstream.transport": transport.label}
    with span("ratel.upstream.register", attributes) as registration, contextlib.ExitStack() as undo:
        client = McpClient(transport)
        undo.callback(client.close)
        client.connect()
        listed = client.list_tools()
        tool_ids = [f"{name}{SEPARATOR}{tool['name']}" for tool in listed]
        handle = McpServerHandle(name, client, tool_ids, client.instructions)
        tools = {tool_id: _tool(catalog, handle, name, tool_id, tool) for tool_id, tool in zip(tool_ids, listed)}
        before = catalog.replace(name, list(tools.values()), handle)
        undo.pop_all()
        registration.set("ratel.upstream.tool_count", len(tools))
        catalog.trace.record("upstream_register", server=name, transport=transport.label, tool_count=len(tools))
        if isinstance(before, McpServerHandle):
            before.displace(handle)
        elif before is not None:
            before.close()
    return handle


def _tool(catalog: ToolCatalog, handle: McpServerHandle, server: str, tool_id: str, listed: JsonObject) -> Tool:
    tool = str(listed["name"])
    description, takes, gives = (listed.get(key) for key in ("description", "inputSchema", "outputSchema"))
    return Tool(
        id=tool_id,
        name=tool,
        description=description if isinstance(description, str) else "",
        input_schema=takes if isinstance(takes, dict) else {"type": "object"},
        output_schema=gives if isinstance(gives, dict) else {"type": "object"},
        execute=_execute(catalog, handle, server, tool_id, tool),
    )


def _execute(
    catalog: ToolCatalog, handle: McpServerHandle, server: str, tool_id: str, tool: str
) -> Callable[[JsonObject], JsonObject]:
    def execute(arguments: JsonObject) -> JsonObject:
        catalog.trace.record("upstream_invoke", server=server, tool_id=tool_id)
        try:
            return handle.call(tool, arguments)
        except BaseException as e:
            error = str(e) or type(e).__name__
            catalog.trace.record("upstream_error", server=server, tool_id=tool_id, error=error)
            raise

    return execute
