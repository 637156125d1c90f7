"""Servers of the official SDK that speak both eras, on every transport."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from sdk_checks import LegacyHttp, check, http_servers, transport_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ratel import McpClient

pytest.importorskip("mcp_types", reason="the SDK of version 2 is not installed here")
pytest.importorskip("uvicorn", reason="uvicorn is not installed here")

MODERN = "2026-07-28"


@pytest.fixture(scope="module")
def urls() -> Iterator[dict[str, str]]:
    """The URL of each form."""
    with http_servers(os.environ) as served:
        yield served


@pytest.mark.parametrize(
    ("form", "version"),
    [
        ("json", MODERN),
        ("stream", MODERN),
        ("session", MODERN),
        ("json legacy", "2025-11-25"),
        ("stream legacy", "2025-11-25"),
        ("session legacy", "2025-11-25"),
        ("sse", "2025-11-25"),
        ("stdio", MODERN),
    ],
)
def test_a_server_of_the_sdk(urls: dict[str, str], form: str, version: str, nothing_left: None) -> None:
    check(transport_of(form, urls, {}), version, session=form == "session legacy", pings=form == "sse")


def test_a_session_that_the_server_forgot_is_begun_anew(
    urls: dict[str, str], client_of: Callable[..., McpClient]
) -> None:
    client = client_of(LegacyHttp(urls["session"]))
    client.connect()
    link = client._link
    assert link is not None
    link.connection.end_session({"Mcp-Session-Id": str(link.session), "Mcp-Protocol-Version": "2025-11-25"})
    assert client.call_tool("add", {"a": 1, "b": 1})["structuredContent"] == {"result": 2}
    assert client._link is not None
    assert client._link.session not in (None, link.session)
