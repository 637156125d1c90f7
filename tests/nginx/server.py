"""An MCP server of the official SDK, to stand behind nginx: ``uvicorn server:app --port 8000``.

Stateless, since rat keeps no session; answering in JSON; and taking messages as large as rat relays.
"""

from __future__ import annotations

from mcp.server import MCPServer

notes: list[str] = []
server = MCPServer("notes", version="1.0.0", instructions="Keeps notes until it is stopped.")


@server.tool()
def add_note(text: str) -> str:
    """Keep a note."""
    notes.append(text)
    return f"note {len(notes)}"


@server.tool()
def list_notes() -> str:
    """All notes, one a line."""
    return "\n".join(notes)


app = server.streamable_http_app(stateless_http=True, json_response=True, max_request_body_size=16 << 20)
