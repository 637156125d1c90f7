"""The official MCP SDK on both sides of rat: its client as the harness, its server behind mutual TLS."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from typing import TYPE_CHECKING

import pytest
from fault_server import HANG
from harness import rat_command, rat_environment

mcp = pytest.importorskip("mcp", reason="the MCP SDK is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")

import anyio  # noqa: E402 - it comes with the SDK
from mcp import Client, ClientSession, MCPError, StdioServerParameters, stdio_client  # noqa: E402
from mcp.server.mcpserver import MCPServer  # noqa: E402
from mcp_types import CallToolResult, TextContent  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

    from starlette.types import Message, Receive, Scope, Send


class SdkServer:
    """A stateless MCP server of the SDK under uvicorn, that requires client certificates.

    It answers in JSON, or in event streams where it likes. ``ended`` counts the requests whose client left before
    they were answered, ``canceled`` the calls of the tool wait that the SDK ended for it.
    """

    def __init__(self, side: Path, json_response: bool) -> None:
        self.json_response = json_response
        self.waiting = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)
        self.canceled = threading.Semaphore(0)
        self.leaving = threading.Event()
        server = MCPServer("sdk", instructions="For tests.")
        server.add_tool(self.echo)
        server.add_tool(self.fail)
        server.add_tool(self.wait)
        self._app = server.streamable_http_app(stateless_http=True, json_response=json_response)
        config = uvicorn.Config(
            self.watch,
            interface="asgi3",
            log_config=None,
            ssl_certfile=side / "server.crt",
            ssl_keyfile=side / "server.key",
            ssl_ca_certs=str(side / "ca.crt"),
            ssl_cert_reqs=ssl.CERT_REQUIRED,
            timeout_graceful_shutdown=1,
        )
        config.load()
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._uvicorn.run, kwargs={"sockets": [self._listener]})
        self._thread.start()

    async def watch(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application of the SDK, and a watch over its clients."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        gone = anyio.Event()

        async def replayed() -> Message:
            if messages:
                return messages.pop(0)
            await gone.wait()
            return {"type": "http.disconnect"}

        async def await_end() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.ended.release()
            gone.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(await_end)
            await self._app(scope, replayed, send)
            tasks.cancel_scope.cancel()

    async def echo(self, text: str) -> str:
        """The text."""
        return text

    async def fail(self) -> str:
        """Nothing: it fails."""
        raise ValueError("it failed")

    async def wait(self) -> str:
        """Nothing, until it is canceled or the server leaves."""
        self.waiting.release()
        try:
            while not self.leaving.is_set():
                await anyio.sleep(0.02)
        except anyio.get_cancelled_exc_class():
            self.canceled.release()
            raise
        return "left"

    def close(self) -> None:
        """End the server and its thread."""
        self.leaving.set()
        self._uvicorn.should_exit = True
        self._thread.join(HANG)
        self._listener.close()
        assert not self._thread.is_alive(), "hangs"


@pytest.fixture(params=[True, False], ids=["JSON", "streams"])
def sdk_server(request: pytest.FixtureRequest, server_side: Path) -> Iterator[SdkServer]:
    """An SDK server of the bundle. What it logs of calls it sees ended is not of the tests."""
    logging.disable(logging.CRITICAL)
    server = SdkServer(server_side, request.param)
    yield server
    server.close()
    logging.disable(logging.NOTSET)


def parameters(server: SdkServer, client_side: Path) -> StdioServerParameters:
    """rat, as a harness of the SDK starts it."""
    command, *arguments = rat_command()
    flags = ["--server", server.address, "--bundle", str(client_side), "--log-level", "warn"]
    return StdioServerParameters(command=command, args=[*arguments, *flags], env=rat_environment())


def text_of(result: CallToolResult) -> str:
    """The text of a result."""
    (content,) = result.content
    assert isinstance(content, TextContent)
    return content.text


@contextlib.asynccontextmanager
async def modern(server: SdkServer, client_side: Path) -> AsyncIterator[ClientSession]:
    """A session of protocol 2026-07-28, begun by server/discover."""
    async with Client(stdio_client(parameters(server, client_side))) as client:
        assert client.protocol_version == "2026-07-28"
        assert client.instructions == "For tests."
        yield client.session


@contextlib.asynccontextmanager
async def older(server: SdkServer, client_side: Path) -> AsyncIterator[ClientSession]:
    """A session of protocol 2025-11-25, begun by initialize."""
    async with stdio_client(parameters(server, client_side)) as streams, ClientSession(*streams) as session:
        greeting = await session.initialize()
        assert greeting.protocol_version == "2025-11-25"
        assert greeting.instructions == "For tests."
        yield session


async def converse(session: ClientSession, server: SdkServer, canceled: bool) -> None:
    """What a harness does: list, call, fail, call twenty at once, cancel."""
    assert sorted(tool.name for tool in (await session.list_tools()).tools) == ["echo", "fail", "wait"]
    said = 'é\n\u2028 "😀"'
    assert text_of(await session.call_tool("echo", {"text": said})) == said

    failed = await session.call_tool("fail", {})
    assert failed.is_error
    assert text_of(failed).startswith("Error executing tool fail")
    with pytest.raises(MCPError, match="nothing"):
        await session.read_resource("test://nothing")

    echoed: dict[int, str] = {}

    async def echo(number: int) -> None:
        echoed[number] = text_of(await session.call_tool("echo", {"text": f"{number}" * 1000}))

    async with anyio.create_task_group() as calls:
        for number in range(20):
            calls.start_soon(echo, number)
    assert echoed == {number: f"{number}" * 1000 for number in range(20)}

    async with anyio.create_task_group() as calls:
        calls.start_soon(session.call_tool, "wait", {})
        assert await anyio.to_thread.run_sync(server.waiting.acquire, True, HANG)
        calls.cancel_scope.cancel()
    assert await anyio.to_thread.run_sync(server.ended.acquire, True, HANG)
    if canceled:
        assert await anyio.to_thread.run_sync(server.canceled.acquire, True, HANG)
    assert text_of(await session.call_tool("echo", {"text": "after"})) == "after"


def run(conversation: Callable[[], Awaitable[None]]) -> None:
    """Run a conversation, and fail rather than hang."""

    async def bounded() -> None:
        with anyio.fail_after(2 * HANG):
            await conversation()

    anyio.run(bounded)


def test_a_harness_and_a_server_of_2026_07_28(sdk_server: SdkServer, client_side: Path) -> None:
    async def conversation() -> None:
        async with modern(sdk_server, client_side) as session:
            # Answering in JSON, the SDK lets a call run on whose client has left.
            await converse(session, sdk_server, canceled=not sdk_server.json_response)

    run(conversation)


def test_a_harness_and_a_server_of_2025_11_25(sdk_server: SdkServer, client_side: Path) -> None:
    async def conversation() -> None:
        async with older(sdk_server, client_side) as session:
            await converse(session, sdk_server, canceled=False)

    run(conversation)
