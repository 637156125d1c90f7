"""What ``import ratel`` gives: names, their documentation, and how little it takes."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import ratel
import ratel.client
from ratel import McpError, McpToolsListError, RatelError, UnauthorizedError

ROOT = Path(__file__).resolve().parents[2]

LISTED = """
    ratel Ratel Tool Skill SearchHit ToolCatalog SkillCatalog register_mcp_server McpServerHandle McpClient
    StreamableHttp Stdio Sse Rat search_capabilities_tool invoke_tool_tool get_skill_content_tool UpstreamServerInfo
    format_upstream_line RatelError McpError UnauthorizedError TransportError McpToolsListError McpToolsListErrorCode
    UnknownToolError EmbeddingError
"""
NAMES = LISTED.split()


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_there_and_documented(name: str) -> None:
    assert name in ratel.__all__
    value = getattr(ratel, name)
    assert inspect.getdoc(value) or name == "McpToolsListErrorCode"  # a type of two strings, which can hold no text


def test_every_name_offered_is_there() -> None:
    assert all(hasattr(ratel, name) for name in ratel.__all__)


@pytest.mark.parametrize("name", [name for name in NAMES if inspect.isclass(getattr(ratel, name))])
def test_public_methods_are_documented(name: str) -> None:
    for attribute, value in vars(getattr(ratel, name)).items():
        if inspect.isfunction(value) and not attribute.startswith("_"):
            assert inspect.getdoc(value), f"{name}.{attribute}"


def test_help_begins_with_what_it_is_for() -> None:
    text = pydoc.plain(pydoc.render_doc(ratel))
    assert "Tools of many MCP servers as one ranked catalog" in text
    assert "register_mcp_server(r.tools.catalog" in text


def test_the_package_is_marked_as_typed() -> None:
    assert (ROOT / "ratel" / "py.typed").is_file()


def test_errors_are_one_tree() -> None:
    errors = [getattr(ratel, name) for name in NAMES if name.endswith("Error")]
    assert all(issubclass(error, RatelError) for error in errors)
    assert issubclass(UnauthorizedError, ratel.TransportError)
    assert not issubclass(McpError, ratel.TransportError)
    assert McpToolsListError("RepeatedCursor", "said").code == "RepeatedCursor"


def test_importing_takes_neither_an_event_loop_nor_an_sdk_nor_numpy() -> None:
    program = (
        "import sys; import ratel; "
        "print(sorted({'asyncio', 'mcp', 'numpy', 'cryptography', 'opentelemetry', 'demo_ratd'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_times_and_limits_that_are_documented() -> None:
    client = ratel.client
    assert (client.REQUEST_SECONDS, client.REQUEST_MAXIMUM) == (60, 600)
    assert (client.CONNECT_SECONDS, client.PROBE_SECONDS) == (60, 5)
    assert client.PAGE_LIMIT == 64
    assert client.LEGACY_VERSIONS == ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
