"""Listings of tools, and paginators that misbehave."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from conftest import fake_stdio

from ratel import McpError, McpToolsListError, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ratel import McpClient

    Clients = Callable[..., McpClient]


def names(client: McpClient) -> list[object]:
    """The names of the tools that a server lists."""
    return [tool["name"] for tool in client.list_tools()]


def page(*tools: str, cursor: object = ...) -> dict[str, Any]:
    """A page with these tools, and a cursor if one is given."""
    listed = [{"name": name} for name in tools]
    return {"tools": listed} if cursor is ... else {"tools": listed, "nextCursor": cursor}


def test_pages_are_followed_until_there_is_no_cursor(client_of: Clients) -> None:
    pages = {"null": page("a", cursor="1"), "1": page("b", "c", cursor="2"), "2": page("d")}
    assert names(client_of(fake_stdio(pages=pages))) == ["a", "b", "c", "d"]


def test_a_null_cursor_ends_the_listing(client_of: Clients) -> None:
    assert names(client_of(fake_stdio(pages={"null": page("a", cursor=None)}))) == ["a"]


def test_an_empty_string_is_a_cursor(client_of: Clients) -> None:
    assert names(client_of(fake_stdio(pages={"null": page("a", cursor=""), "": page("b")}))) == ["a", "b"]


def test_a_page_without_tools_is_a_page(client_of: Clients) -> None:
    pages = {"null": page("a", cursor="1"), "1": page(cursor="2"), "2": page("b")}
    assert names(client_of(fake_stdio(pages=pages))) == ["a", "b"]


@pytest.mark.parametrize("cursor", [5, True, ["1"], {"a": 1}])
def test_a_cursor_of_another_type_is_a_protocol_error(client_of: Clients, cursor: object) -> None:
    client = client_of(fake_stdio(pages={"null": page("a", cursor=cursor)}))
    with pytest.raises(TransportError) as caught:
        client.list_tools()
    assert str(caught.value).endswith(f" gave a cursor that is no string: {cursor!r}")


@pytest.mark.parametrize(
    "pages",
    [
        {"null": page("a", cursor="1"), "1": page("b", cursor="1")},
        {"null": page("a", cursor="1"), "1": page("b", cursor="2"), "2": page("c", cursor="1")},
        {"null": page(cursor=""), "": page(cursor="")},
    ],
)
def test_a_cursor_seen_before_raises(client_of: Clients, pages: dict[str, Any]) -> None:
    with pytest.raises(McpToolsListError, match=r" repeated the cursor '1?'$") as caught:
        client_of(fake_stdio(pages=pages)).list_tools()
    assert caught.value.code == "RepeatedCursor"


def test_64_pages_are_read(client_of: Clients) -> None:
    pages: dict[str, Any] = {str(number): page(f"t{number}", cursor=str(number + 1)) for number in range(1, 63)}
    pages["null"] = page("t0", cursor="1")
    pages["63"] = page("t63")
    assert names(client_of(fake_stdio(pages=pages))) == [f"t{number}" for number in range(64)]


def test_there_is_no_65th_request(client_of: Clients, tmp_path: Any) -> None:
    log = tmp_path / "log"
    with pytest.raises(McpToolsListError, match=r" lists tools on more than 64 pages$") as caught:
        client_of(fake_stdio(pages="endless", log=str(log))).list_tools()
    assert caught.value.code == "PaginationExceeded"
    assert log.read_text().count('"tools/list"') == 64


@pytest.mark.parametrize("result", [{}, {"tools": None}, {"tools": {}}, {"tools": [7]}, {"tools": [{"title": "x"}]}])
def test_what_lists_no_tools_says_so(client_of: Clients, result: object) -> None:
    with pytest.raises(TransportError, match=r" listed something else than tools$"):
        client_of(fake_stdio(pages={"null": result})).list_tools()


def test_an_error_on_a_later_page_is_raised(client_of: Clients) -> None:
    pages = {"null": page("a", cursor="1"), "1": {"error": {"code": -32603, "message": "worn out"}}}
    with pytest.raises(McpError, match=r"^worn out \(-32603\)$"):
        client_of(fake_stdio(pages=pages)).list_tools()


@pytest.mark.parametrize("probe", ["answer", {"code": -32601, "message": "?"}])
def test_a_server_without_the_capability_has_no_tools_and_is_not_asked(
    client_of: Clients, tmp_path: Any, probe: object
) -> None:
    log = tmp_path / "log"
    client = client_of(fake_stdio(probe=probe, capabilities={"prompts": {}}, log=str(log)))
    assert client.list_tools() == []
    assert "tools/list" not in log.read_text()


def test_tools_come_as_they_were_listed(client_of: Clients) -> None:
    tool = {"name": "a", "title": "A", "annotations": {"readOnlyHint": True}, "inputSchema": {"type": "object"}}
    assert client_of(fake_stdio(pages={"null": {"tools": [tool]}})).list_tools() == [tool]
