"""Tools of many MCP servers as one ranked catalog: a model sees three tools instead of four hundred.

Servers are registered by a transport; their tools and those of the host itself are searched, and called, alike::

    from ratel import Rat, Stdio, ratel, register_mcp_server

    with ratel() as r:
        register_mcp_server(r.tools.catalog, name="files", transport=Stdio("npx", ["-y", "a-server", "/srv"]))
        register_mcp_server(r.tools.catalog, name="work", transport=Rat("ratd.example:7433", "bundle/clients/laptop"))
        for hit in r.tools.search("read a log file"):
            print(hit.tool_id, hit.score)
        print(r.tools.invoke("work__read_file", {"path": "build.log"}))

``r.model_tools()`` are what to give a model: search_capabilities, invoke_tool and get_skill_content. Everything is
synchronous, and safe to use from several threads.
"""

from ratel.capabilities import (
    Ratel,
    UpstreamServerInfo,
    format_upstream_line,
    get_skill_content_tool,
    invoke_tool_tool,
    ratel,
    search_capabilities_tool,
)
from ratel.catalog import SearchHit, Skill, SkillCatalog, SkillHit, Tool, ToolCatalog, UnknownToolError
from ratel.client import McpClient, McpError, McpToolsListError, McpToolsListErrorCode
from ratel.ranking import EmbeddingError
from ratel.trace import RatelError, TraceEvent, TraceSink
from ratel.transports import Rat, Sse, Stdio, StreamableHttp, Transport, TransportError, UnauthorizedError
from ratel.upstream import McpServerHandle, register_mcp_server

__all__ = [
    "EmbeddingError",
    "McpClient",
    "McpError",
    "McpServerHandle",
    "McpToolsListError",
    "McpToolsListErrorCode",
    "Rat",
    "Ratel",
    "RatelError",
    "SearchHit",
    "Skill",
    "SkillCatalog",
    "SkillHit",
    "Sse",
    "Stdio",
    "StreamableHttp",
    "Tool",
    "ToolCatalog",
    "TraceEvent",
    "TraceSink",
    "Transport",
    "TransportError",
    "UnauthorizedError",
    "UnknownToolError",
    "UpstreamServerInfo",
    "format_upstream_line",
    "get_skill_content_tool",
    "invoke_tool_tool",
    "ratel",
    "register_mcp_server",
    "search_capabilities_tool",
]
