"""The official MCP SDK as the harness, through rat, to demo_ratd: in both eras of the protocol."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fault_server import HANG
from harness import rat_command, rat_environment

import rat
from demo_ratd import DemoRatd

mcp = pytest.importorskip("mcp", reason="the MCP SDK is not installed")

import anyio  # noqa: E402 - it comes with the SDK
from mcp import Client, ClientSession, StdioServerParameters, stdio_client  # noqa: E402
from mcp_types import CallToolResult, TextContent  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator


@pytest.fixture
def server(server_side: Path, tmp_path: Path) -> Iterator[DemoRatd]:
    """A server of the bundle."""
    with DemoRatd(rat.load_side(str(server_side), "server"), tmp_path) as running:
        yield running


def through_rat(address: str, client_side: Path) -> StdioServerParameters:
    """rat, as a harness of the SDK starts it."""
    command, *arguments = rat_command()
    flags = ["--server", address, "--bundle", str(client_side)]
    return StdioServerParameters(command=command, args=[*arguments, *flags], env=rat_environment())


def outcome(result: CallToolResult) -> tuple[bool, str]:
    """Whether a tool failed, and its text."""
    (content,) = result.content
    assert isinstance(content, TextContent)
    return result.is_error, content.text


def run(conversation: Callable[[], Awaitable[None]]) -> None:
    """Run a conversation, and fail rather than hang."""

    async def bounded() -> None:
        with anyio.fail_after(2 * HANG):
            await conversation()

    anyio.run(bounded)


async def waited_for(server: DemoRatd, holds: Callable[[DemoRatd], bool]) -> bool:
    """Whether something comes to be recorded by the server."""
    return await anyio.to_thread.run_sync(server.wait_until, holds, HANG)


def test_a_harness_of_the_newer_protocol(server: DemoRatd, client_side: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")

    async def conversation() -> None:
        async with Client(stdio_client(through_rat(server.address, client_side))) as client:
            assert client.protocol_version == "2026-07-28"
            assert client.server_info is not None
            assert client.server_info.name == "demo_ratd"
            assert client.instructions is not None
            assert client.instructions.endswith("Your session is laptop.")
            tools = (await client.list_tools()).tools
            assert [tool.name for tool in tools] == ["read_file", "write_file", "wait"]
            read = await client.call_tool("read_file", {"path": "a.txt"})
            assert outcome(read) == (False, "hello")
            failed = await client.call_tool("read_file", {"path": "none"})
            assert outcome(failed) == (True, "none: no such file or directory")
            with pytest.raises(mcp.MCPError, match="Unknown tool: nothing"):
                await client.call_tool("nothing", {})
            async with anyio.create_task_group() as calls:
                for number in range(20):
                    calls.start_soon(write, client, number)
            assert len(list(tmp_path.glob("at-once-*"))) == 20
            with anyio.move_on_after(HANG) as given_up:
                async with anyio.create_task_group() as calls:
                    calls.start_soon(client.call_tool, "wait", {"seconds": 500})
                    assert await waited_for(server, lambda s: called(s) == "wait")
                    calls.cancel_scope.cancel()
            assert not given_up.cancelled_caught
            assert await waited_for(server, lambda s: len(s.canceled) == 1)
            assert outcome(await client.call_tool("wait", {"seconds": 0})) == (False, "waited 0 s")

    async def write(client: Client, number: int) -> None:
        path = f"at-once-{number}"
        answer = await client.call_tool("write_file", {"path": path, "content": "x" * number})
        assert outcome(answer) == (False, f"{path}: {number} bytes written")

    def called(server: DemoRatd) -> str | None:
        return server.requests[-1].field("Mcp-Name")

    run(conversation)
    # All but the notification of the cancellation, which tells no version of its own, and is not waited for.
    versions = [request.field("Mcp-Protocol-Version") for request in server.requests]
    assert set(versions) <= {"2026-07-28", None}
    assert versions.count(None) <= 1
    assert {request.session for request in server.requests} == {"laptop"}


def test_a_harness_of_an_older_protocol(server: DemoRatd, client_side: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")

    async def conversation() -> None:
        async with contextlib.AsyncExitStack() as stack:
            streams = await stack.enter_async_context(stdio_client(through_rat(server.address, client_side)))
            session = await stack.enter_async_context(ClientSession(*streams))
            greeting = await session.initialize()
            assert (greeting.protocol_version, greeting.server_info.name) == ("2025-11-25", "demo_ratd")
            await session.send_ping()
            tools = (await session.list_tools()).tools
            assert [tool.name for tool in tools] == ["read_file", "write_file", "wait"]
            answer = await session.call_tool("read_file", {"path": "a.txt"})
            assert outcome(answer) == (False, "hello")
            failed = await session.call_tool("read_file", {"path": "/etc/passwd"})
            assert outcome(failed) == (True, "/etc/passwd: not inside the directory of this server")
            with pytest.raises(mcp.MCPError, match="Unknown tool: nothing"):
                await session.call_tool("nothing", {})
            before = len(server.requests)
            async with anyio.create_task_group() as calls:
                calls.start_soon(session.call_tool, "wait", {"seconds": 500})
                assert await waited_for(server, lambda s: len(s.requests) > before)
                calls.cancel_scope.cancel()
            assert await waited_for(server, lambda s: len(s.canceled) == 1)
            await session.send_ping()

    run(conversation)
    # The version is negotiated once, and told from then on.
    versions = [request.field("Mcp-Protocol-Version") for request in server.requests]
    assert versions[0] is None
    assert set(versions[1:]) == {"2025-11-25"}


@pytest.mark.skipif(sys.version_info < (3, 10), reason="the MCP SDK needs Python 3.10")
def test_discover_is_what_the_specification_says(server: DemoRatd, client_side: Path) -> None:
    """The SDK's models of 2026-07-28 are strict about what must be there."""
    from mcp_types import _v2026_07_28 as specified
    from test_demo_server import Client as PlainClient

    client = PlainClient(server, rat.tls_context(rat.load_side(str(client_side))))
    for method, model in (
        ("server/discover", specified.DiscoverResultResponse),
        ("tools/list", specified.ListToolsResultResponse),
    ):
        model.model_validate_json(client.carried(method).body)
    called = client.carried("tools/call", {"name": "wait", "arguments": {"seconds": 0}})
    specified.CallToolResultResponse.model_validate_json(called.body)
    meta = {"io.modelcontextprotocol/protocolVersion": "2027-01-01", "io.modelcontextprotocol/clientCapabilities": {}}
    refused = client.carried("tools/list", {"_meta": meta}, {"Mcp-Protocol-Version": "2027-01-01"})
    specified.UnsupportedProtocolVersionError.model_validate_json(refused.body)
    mismatched = client.carried("tools/list", {}, {"Mcp-Method": "ping"})
    specified.HeaderMismatchError.model_validate_json(mismatched.body)
    client.socket.close()
