"""What of the SDK's server works through rat when it answers in event streams, in both eras of the protocol."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import ssl
import threading
from typing import TYPE_CHECKING, Annotated

import pytest
from fault_server import HANG
from harness import rat_command, rat_environment, read_record

mcp = pytest.importorskip("mcp", reason="the MCP SDK is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")

import anyio  # noqa: E402 - it comes with the SDK
import mcp_types  # noqa: E402
from mcp import Client, MCPError, StdioServerParameters, stdio_client  # noqa: E402
from mcp.client import ClientRequestContext  # noqa: E402
from mcp.server import Server  # noqa: E402
from mcp.server.context import ServerRequestContext  # noqa: E402
from mcp.server.mcpserver import Context, MCPServer  # noqa: E402
from mcp.server.mcpserver.resolve import Elicit, Resolve  # noqa: E402
from mcp.server.streamable_http import StreamableHTTPServerTransport  # noqa: E402
from mcp.shared.subscriptions import ToolsListChanged  # noqa: E402
from pydantic import BaseModel  # noqa: E402
from test_bridge_sdk import run, text_of  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from starlette.types import ASGIApp, Receive, Scope, Send

ERAS = pytest.mark.parametrize(
    ("mode", "version"), [("auto", "2026-07-28"), ("legacy", "2025-11-25")], ids=["2026-07-28", "2025-11-25"]
)

pytestmark = pytest.mark.filterwarnings("ignore:The logging capability is deprecated")
logging.getLogger("mcp").setLevel(logging.CRITICAL)  # what it says of tools that are faulty on purpose


@contextlib.contextmanager
def serving(app: ASGIApp, side: Path) -> Iterator[str]:
    """An application under uvicorn that requires client certificates; its address."""
    config = uvicorn.Config(
        app,
        log_config=None,
        ssl_certfile=side / "server.crt",
        ssl_keyfile=side / "server.key",
        ssl_ca_certs=str(side / "ca.crt"),
        ssl_cert_reqs=ssl.CERT_REQUIRED,
        timeout_graceful_shutdown=1,
    )
    config.load()
    config.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(HANG)
            assert not thread.is_alive(), "hangs"


class Connected:
    """A harness of the SDK, and the log of the rat between it and its server."""

    def __init__(self, client: Client, log: Path) -> None:
        self.client = client
        self._log = log

    def records(self, message: str) -> list[dict[str, str]]:
        """The records of the log with a message, so far."""
        records = [read_record(line) for line in self._log.read_text().splitlines()]
        return [record for record in records if record["msg"] == message]


class Connect:
    """Connects harnesses to a server through rat."""

    def __init__(self, address: str, client_side: Path, directory: Path) -> None:
        self.address = address
        self._side = client_side
        self._log = directory / "log"

    @contextlib.asynccontextmanager
    async def __call__(self, mode: str, **callbacks: object) -> AsyncIterator[Connected]:
        """A harness that begins as the mode says, with these callbacks of the SDK's client."""
        command, *arguments = rat_command()
        flags = ["--server", self.address, "--bundle", str(self._side)]
        parameters = StdioServerParameters(command=command, args=[*arguments, *flags], env=rat_environment())
        with self._log.open("w") as log:
            async with Client(stdio_client(parameters, errlog=log), mode=mode, **callbacks) as client:  # type: ignore[arg-type]
                yield Connected(client, self._log)


class Confirmation(BaseModel):
    """What a user is asked."""

    sure: bool


async def ask() -> Elicit[Confirmation]:
    """Have the user asked: by a result of 2026-07-28, by a request on the stream before."""
    return Elicit("Really?", Confirmation)


class Tools:
    """A server of the SDK whose tools use all that a stream can carry."""

    def __init__(self) -> None:
        self.server = MCPServer("streams")
        self.half_way = threading.Event()  # set by the harness
        for tool in (self.work, self.delete, self.more):
            self.server.add_tool(tool)

    async def work(self, ctx: Context) -> str:
        """Tells of its progress, and goes on when the harness has heard."""
        await ctx.report_progress(1, 2, "half way")
        await ctx.info("still at work")
        heard = await anyio.to_thread.run_sync(self.half_way.wait, HANG)
        await ctx.report_progress(2, 2)
        return "heard" if heard else "not heard"

    async def delete(self, confirmation: Annotated[Confirmation, Resolve(ask)]) -> str:
        """Asks before."""
        return "deleted" if confirmation.sure else "kept"

    async def more(self, ctx: Context) -> str:
        """Adds a tool, and tells who listens."""
        self.server.add_tool(self.work, "added")
        await ctx.notify_tools_changed()
        return "added"


@pytest.fixture(scope="module")
def tools() -> Tools:
    """The tools of `stateless`."""
    return Tools()


@pytest.fixture(scope="module")
def stateless(tools: Tools, server_side: Path) -> Iterator[str]:
    """The address of a server as rat wants it: without sessions."""
    with serving(tools.server.streamable_http_app(stateless_http=True, json_response=False), server_side) as address:
        yield address


@pytest.fixture
def connect(stateless: str, client_side: Path, tmp_path: Path) -> Connect:
    """Connects harnesses to `stateless`."""
    return Connect(stateless, client_side, tmp_path)


@ERAS
def test_progress_and_logs_arrive_before_the_result(connect: Connect, tools: Tools, mode: str, version: str) -> None:
    heard: list[object] = []
    tools.half_way.clear()

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, total, message))

    async def on_log(params: mcp_types.LoggingMessageNotificationParams) -> None:
        heard.append(params.data)
        tools.half_way.set()

    async def conversation() -> None:
        async with connect(mode, logging_callback=on_log, log_level="info") as connected:
            assert connected.client.protocol_version == version
            done = await connected.client.call_tool("work", progress_callback=on_progress)
            assert text_of(done) == "heard"
        assert heard == [(1, 2, "half way"), "still at work", (2, 2, None)]
        assert connected.records("event passed over") == []

    run(conversation)


async def on_elicit(
    context: ClientRequestContext, params: mcp_types.ElicitRequestParams
) -> mcp_types.ElicitResult | mcp_types.ErrorData:
    """A user who is sure."""
    assert params.message == "Really?"
    return mcp_types.ElicitResult(action="accept", content={"sure": True})


def test_a_tool_that_asks_by_its_result(connect: Connect) -> None:
    """2026-07-28: the result says input_required, and the call is sent again with the answer."""

    async def conversation() -> None:
        async with connect("auto", elicitation_callback=on_elicit) as connected:
            first = await connected.client.session.call_tool("delete", {}, allow_input_required=True)
            assert isinstance(first, mcp_types.InputRequiredResult)
            assert text_of(await connected.client.call_tool("delete")) == "deleted"

    run(conversation)


def test_a_tool_that_asks_on_the_stream(tools: Tools, server_side: Path, client_side: Path, tmp_path: Path) -> None:
    """2025-11-25: a request of the server, whose response is posted, to a server that is one for all its requests."""
    transport = StreamableHTTPServerTransport(mcp_session_id=None)
    server = tools.server._lowlevel_server

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await transport.handle_request(scope, receive, send)
            return
        assert scope["type"] == "lifespan"
        await receive()
        async with transport.connect() as (read, write), anyio.create_task_group() as tasks:
            tasks.start_soon(server.run, read, write, server.create_initialization_options())
            await send({"type": "lifespan.startup.complete"})
            await receive()
            tasks.cancel_scope.cancel()
        await send({"type": "lifespan.shutdown.complete"})

    async def conversation() -> None:
        async with connect("legacy", elicitation_callback=on_elicit) as connected:
            assert text_of(await connected.client.call_tool("delete")) == "deleted"
        assert connected.records("relay failed") == []

    with serving(app, server_side) as address:
        connect = Connect(address, client_side, tmp_path)
        run(conversation)


def test_a_stateless_server_asks_nobody_on_a_stream(connect: Connect) -> None:
    """2025-11-25: the SDK does not ask where the answer could reach no session, and says so."""

    async def conversation() -> None:
        async with connect("legacy", elicitation_callback=on_elicit) as connected:
            with pytest.raises(MCPError) as refused:
                await connected.client.call_tool("delete")
            assert refused.value.message == (
                "Cannot send 'elicitation/create': this transport context has no back-channel for "
                "server-initiated requests."
            )

    run(conversation)


def test_a_list_that_changed_arrives(connect: Connect, tools: Tools) -> None:
    """2026-07-28: on the stream of a subscription, ended by whoever wants."""

    async def conversation() -> None:
        async with connect("auto") as connected:
            client = connected.client
            async with client.listen(tools_list_changed=True) as subscription:
                assert text_of(await client.call_tool("more")) == "added"
                assert isinstance(await subscription.__anext__(), ToolsListChanged)
                assert "added" in [tool.name for tool in (await client.list_tools(cache_mode="refresh")).tools]
            # The harness has ended it; the next is another.
            async with client.listen(tools_list_changed=True) as subscription:
                await client.call_tool("more")
                assert isinstance(await subscription.__anext__(), ToolsListChanged)
        assert connected.records("relay failed") == []

    run(conversation)
    tools.server.remove_tool("added")


@ERAS
def test_a_server_with_sessions(
    tools: Tools, server_side: Path, client_side: Path, tmp_path: Path, mode: str, version: str
) -> None:
    """A server of the SDK as it is by default: in the older protocol rat brings it no session, and it says so."""

    async def conversation() -> None:
        async with connect(mode) as connected:
            client = connected.client
            assert client.protocol_version == version
            if mode == "auto":
                assert [tool.name for tool in (await client.list_tools()).tools][:2] == ["work", "delete"]
                return
            with pytest.raises(MCPError) as refused:
                await client.list_tools()
            assert refused.value.code == -32050
            assert refused.value.message == (
                f"ratd at {address} answered HTTP 400: "
                '{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"Bad Request: Missing session ID"}}'
            )

    with serving(tools.server.streamable_http_app(), server_side) as address:
        connect = Connect(address, client_side, tmp_path)
        run(conversation)


# Annotated arguments


def annotated(**properties: tuple[str, str]) -> dict[str, object]:
    """A schema of arguments by name: type and header."""
    described = {name: {"type": kind, "x-mcp-header": header} for name, (kind, header) in properties.items()}
    return {"type": "object", "properties": described}


SQL = annotated(
    region=("string", "Region"), text=("string", "Text"), limit=("integer", "Limit"), dry=("boolean", "Dry")
)
SQL["properties"]["options"] = annotated(tag=("string", "Tag"))  # type: ignore[index]


class AnnotatedTools:
    """A server of the SDK with annotated tools on two pages. A call is answered with the headers that came with it,
    once the SDK has found them to be those that the arguments ask for."""

    def __init__(self) -> None:
        self.pages = [
            [mcp_types.Tool(name="faulty", input_schema=annotated(a=("number", "A")))],
            [mcp_types.Tool(name="sql", input_schema=SQL)],
        ]
        self.server = Server("annotated", on_list_tools=self.list, on_call_tool=self.call)

    async def list(
        self, ctx: ServerRequestContext, params: mcp_types.PaginatedRequestParams | None
    ) -> mcp_types.ListToolsResult:
        """A page of the tools."""
        page = int(params.cursor) if params is not None and params.cursor else 0
        following = str(page + 1) if page + 1 < len(self.pages) else None
        return mcp_types.ListToolsResult(tools=self.pages[page], next_cursor=following)

    async def call(
        self, ctx: ServerRequestContext, params: mcp_types.CallToolRequestParams
    ) -> mcp_types.CallToolResult:
        """The headers of the call."""
        assert ctx.request is not None
        mirrored = {name: value for name, value in ctx.request.headers.items() if name.startswith("mcp-param-")}
        return mcp_types.CallToolResult(content=[mcp_types.TextContent(text=json.dumps(mirrored))])


@pytest.fixture
def annotated_tools() -> AnnotatedTools:
    """The tools of a server."""
    return AnnotatedTools()


@pytest.fixture
def connect_annotated(
    annotated_tools: AnnotatedTools, server_side: Path, client_side: Path, tmp_path: Path
) -> Iterator[Connect]:
    """Connects harnesses to the server of annotated tools."""
    app = annotated_tools.server.streamable_http_app(stateless_http=True, json_response=False)
    with serving(app, server_side) as address:
        yield Connect(address, client_side, tmp_path)


# The table of the specification (2026-07-28, Streamable HTTP, Value Encoding), and what it says in words.
MIRRORED: list[tuple[dict[str, object], dict[str, str]]] = [
    ({"region": "us-west1"}, {"region": "us-west1"}),
    ({"text": "Hello, 世界"}, {"text": "=?base64?SGVsbG8sIOS4lueVjA==?="}),
    ({"text": " padded "}, {"text": "=?base64?IHBhZGRlZCA=?="}),
    ({"text": "line1\nline2"}, {"text": "=?base64?bGluZTEKbGluZTI=?="}),
    ({"text": "=?base64?literal?="}, {"text": "=?base64?PT9iYXNlNjQ/bGl0ZXJhbD89?="}),
    ({"text": "=?base64?="}, {"text": "=?base64?PT9iYXNlNjQ/PQ==?="}),
    ({"text": "a\r\nX-Client: CN=root"}, {"text": "=?base64?YQ0KWC1DbGllbnQ6IENOPXJvb3Q=?="}),
    ({"text": "\ttab"}, {"text": "=?base64?CXRhYg==?="}),
    ({"text": "in a row: a  b,c;d"}, {"text": "in a row: a  b,c;d"}),
    ({"text": "=?BASE64?x?="}, {"text": "=?BASE64?x?="}),
    ({"text": ""}, {"text": ""}),
    ({"limit": 42}, {"limit": "42"}),
    ({"limit": -7}, {"limit": "-7"}),
    ({"limit": 42.0}, {"limit": "42"}),
    ({"limit": 2**53 - 1}, {"limit": "9007199254740991"}),
    ({"dry": True}, {"dry": "true"}),
    ({"dry": False, "limit": 0}, {"dry": "false", "limit": "0"}),
    ({"region": None, "options": {"tag": "nested"}}, {"tag": "nested"}),
    ({"options": {"tag": None}}, {}),
    ({"options": {}}, {}),
    ({"unknown": "x"}, {}),
    ({}, {}),
]


def test_annotated_arguments_are_mirrored(connect_annotated: Connect) -> None:
    """In every encoding; and a tool whose annotations break the rules is told of once and mirrored never."""

    async def conversation() -> None:
        async with connect_annotated("auto") as connected:
            session = connected.client.session
            for _ in range(2):
                first = await session.list_tools()
                await session.list_tools(params=mcp_types.PaginatedRequestParams(cursor=first.next_cursor))
            for arguments, headers in MIRRORED:
                answer = text_of(await connected.client.call_tool("sql", arguments))
                assert json.loads(answer) == {f"mcp-param-{name}": value for name, value in headers.items()}
            assert json.loads(text_of(await connected.client.call_tool("faulty", {"a": 1}))) == {}
        (record,) = connected.records("annotations of a tool not used")
        assert record["tool"] == "faulty"
        assert record["error"] == "A is on an argument that is no string, integer or boolean"
        assert connected.records("relay failed") == []

    run(conversation)


def test_nothing_is_mirrored_in_the_older_protocol(connect_annotated: Connect) -> None:
    async def conversation() -> None:
        async with connect_annotated("legacy") as connected:
            session = connected.client.session
            await session.list_tools(params=mcp_types.PaginatedRequestParams(cursor="1"))
            assert json.loads(text_of(await connected.client.call_tool("sql", {"region": "x"}))) == {}

    run(conversation)


def test_a_tool_whose_annotations_changed(connect_annotated: Connect, annotated_tools: AnnotatedTools) -> None:
    """The server refuses the call (-32020); listed anew, as the harness does, the tool is called as it is now."""

    async def conversation() -> None:
        async with connect_annotated("auto") as connected:
            client = connected.client
            await client.list_tools(cursor="1")
            annotated_tools.pages[1][0] = mcp_types.Tool(name="sql", input_schema=annotated(region=("string", "Where")))
            with pytest.raises(MCPError) as refused:
                await client.session.call_tool("sql", {"region": "x"})
            assert (refused.value.code, refused.value.message) == (
                -32020,
                "Mcp-Param-Where header is missing but the request body's 'region' argument is present",
            )
            answer = await client.call_tool("sql", {"region": "x"})
            assert json.loads(text_of(answer)) == {"mcp-param-where": "x"}

    run(conversation)
