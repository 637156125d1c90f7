"""A server made with the official SDK, of either major version: on stdio, or over HTTP in each of its forms.

``python sdk_server.py stdio`` serves the standard streams; ``python sdk_server.py http`` serves every form over HTTP
until its input ends, having written their URLs as a line of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import threading
import time
from typing import Any

import uvicorn
from mcp.server.streamable_http import EventMessage
from pydantic import BaseModel

try:  # 2.x
    from mcp.server import MCPServer as Server
    from mcp.server.mcpserver import Context

    LEGACY_SDK = False
except ImportError:  # 1.x
    from mcp.server.fastmcp import Context  # type: ignore[import-not-found, no-redef]
    from mcp.server.fastmcp import FastMCP as Server  # type: ignore[no-redef]

    LEGACY_SDK = True


class Events:
    """Events kept so that a stream can be taken up again: an EventStore of the SDK, in memory."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, Any]] = []

    async def store_event(self, stream_id: str, message: Any) -> str:
        """Keep an event."""
        self.kept.append((stream_id, message))
        return str(len(self.kept))

    async def replay_events_after(self, last_event_id: str, send: Any) -> str | None:
        """Send what came on the same stream later."""
        last = int(last_event_id)
        stream_id = self.kept[last - 1][0]
        for number, (stream, message) in enumerate(self.kept, 1):
            if number > last and stream == stream_id and message is not None:
                await send(EventMessage(message, str(number)))
        return stream_id


class Name(BaseModel):
    """What is asked for."""

    name: str


GETS = {"session": 0}  # requests by GET


def counting(app: Any) -> Any:
    """An application that counts its requests by GET."""

    async def counted(scope: Any, receive: Any, send: Any) -> None:
        GETS["session"] += scope.get("method") == "GET"
        await app(scope, receive, send)

    return counted


def build(**options: Any) -> Any:
    """The server."""
    server = Server("sdk", instructions="From the SDK", **options)

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @server.tool()
    def fail() -> str:
        """Fail always."""
        raise ValueError("on purpose")

    @server.tool()
    async def slow(seconds: float, ctx: Context) -> str:  # type: ignore[type-arg, unused-ignore]
        """Take some time, and tell of the progress."""
        await ctx.report_progress(1, 2)
        await asyncio.sleep(seconds)
        return "slept"

    @server.tool()
    def resumed() -> int:
        """Tell how many requests were GETs: in a session, streams taken up again."""
        return GETS["session"]

    @server.tool()
    async def ask(ctx: Context) -> str:  # type: ignore[type-arg, unused-ignore]
        """Ask the user, who cannot be asked."""
        return str(await ctx.elicit("Who are you?", Name))

    @server.tool()
    async def ping(ctx: Context) -> str:  # type: ignore[type-arg, unused-ignore]
        """Ping the client."""
        await ctx.session.send_ping()
        return "ponged"

    @server.tool()
    async def cut(ctx: Context) -> str:  # type: ignore[type-arg, unused-ignore]
        """Cut the stream of the call, then answer."""
        await ctx.close_sse_stream()
        await asyncio.sleep(0.1)
        return "after the cut"

    return server


def http_apps() -> dict[str, tuple[Any, str]]:
    """Every form of HTTP that the SDK serves, and the path of each."""
    if not LEGACY_SDK:
        return {
            "json": (build().streamable_http_app(stateless_http=True, json_response=True), "/mcp"),
            "stream": (build().streamable_http_app(stateless_http=True), "/mcp"),
            "session": (counting(build().streamable_http_app(event_store=Events(), retry_interval=10)), "/mcp"),
            "sse": (build().sse_app(), "/sse"),
        }
    return {
        "json": (build(stateless_http=True, json_response=True).streamable_http_app(), "/mcp"),
        "stream": (build(stateless_http=True).streamable_http_app(), "/mcp"),
        "session": (counting(build(event_store=Events(), retry_interval=10).streamable_http_app()), "/mcp"),
        "sse": (build().sse_app(), "/sse"),
    }


def serve_http() -> None:
    """Serve every form until the input ends."""
    urls, servers, threads = {}, [], []
    for name, (app, path) in http_apps().items():
        # With its protocol told, asyncio sets TCP_NODELAY on what is accepted.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        urls[name] = f"http://127.0.0.1:{listener.getsockname()[1]}{path}"
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        servers.append(server)
        threads.append(threading.Thread(target=server.run, args=([listener],), daemon=True))
        threads[-1].start()
    for server in servers:
        while not server.started:
            time.sleep(0.01)
    print(json.dumps(urls), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        with contextlib.suppress(KeyboardInterrupt):
            build().run("stdio")
    else:
        serve_http()
