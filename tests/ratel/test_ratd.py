"""A ratd behind mutual TLS, through the connection of rat."""

from __future__ import annotations

import shutil
import threading
from typing import TYPE_CHECKING

import pytest
from conftest import eventually
from web_server import HANG, free_port

pytest.importorskip("cryptography", reason="cryptography, which makes the bundles, is not installed here")

import demo_ratd
import rat
import ratel
from ratel import McpError, Rat, TransportError, register_mcp_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from bundles import Bundle

    from ratel import McpClient

    Clients = Callable[..., McpClient]


@pytest.fixture
def ratd(server_side: Path, tmp_path: Path) -> Iterator[demo_ratd.DemoRatd]:
    """A ratd with one file to read."""
    (tmp_path / "note.txt").write_text("one\ntwo\n")
    with demo_ratd.DemoRatd(rat.load_side(str(server_side), "server"), tmp_path, keep_bodies=True) as server:
        yield server


def test_a_ratd_is_registered_searched_and_called(
    ratd: demo_ratd.DemoRatd, client_side: Path, nothing_left: None
) -> None:
    with ratel.ratel() as r:
        handle = register_mcp_server(r.tools.catalog, name="work", transport=Rat(ratd.address, client_side))
        assert handle.tool_ids == ["work__read_file", "work__write_file", "work__wait"]
        assert handle.server_instructions
        assert r.tools.search("read some text")[0].tool_id == "work__read_file"
        result = r.tools.invoke("work__read_file", {"path": "note.txt", "start_line": 2})
        assert isinstance(result, dict)
        assert result["content"][0]["text"] == "two\n"
        assert r.tools.catalog.drain_trace_events()[1]["transport"] == "rat"
        assert ratd.connections == 1
    assert ratd.wait_until(lambda server: server.connections == 0)
    assert {request.field("Mcp-Method") for request in ratd.requests} == {"server/discover", "tools/list", "tools/call"}


def test_a_late_call_is_canceled_by_its_connection(
    ratd: demo_ratd.DemoRatd, client_side: Path, client_of: Clients
) -> None:
    client = client_of(Rat(rat.Address.parse(ratd.address), str(client_side)))
    client.connect()
    with pytest.raises(TransportError) as caught:
        client.call_tool("wait", {"seconds": 60}, timeout=0.1)
    assert str(caught.value) == f"ratd at {ratd.address} did not answer within 0.1s"
    assert ratd.wait_until(lambda server: bool(server.canceled))
    assert client.call_tool("wait", {"seconds": 0})["isError"] is False


def test_close_fails_the_calls_in_flight(ratd: demo_ratd.DemoRatd, client_side: Path, client_of: Clients) -> None:
    client = client_of(Rat(ratd.address, client_side))
    client.connect()
    failed = []

    def call() -> None:
        try:
            client.call_tool("wait", {"seconds": 60})
        except TransportError as e:
            failed.append(str(e))

    thread = threading.Thread(target=call)
    thread.start()
    assert ratd.wait_until(lambda server: len(server.requests) == 2)
    client.close()
    thread.join(HANG)
    assert failed == [f"ratd at {ratd.address} was closed"]


def test_errors_of_a_ratd_come_as_they_were_sent(
    ratd: demo_ratd.DemoRatd, client_side: Path, client_of: Clients
) -> None:
    with pytest.raises(McpError) as caught:
        client_of(Rat(ratd.address, client_side)).call_tool("no_such_tool")
    assert caught.value.code == -32602


def test_a_ratd_that_is_not_there_says_so(client_side: Path, client_of: Clients) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(TransportError) as caught:
        client_of(Rat(address, client_side)).connect()
    assert str(caught.value) == f"ratd unreachable at {address}: connection refused"


def test_a_client_of_another_bundle_is_told_so(
    ratd: demo_ratd.DemoRatd, other_bundle: Bundle, client_of: Clients
) -> None:
    with pytest.raises(TransportError) as caught:
        client_of(Rat(ratd.address, other_bundle.client)).connect()
    assert "Check the bundle with rat-tool check." in str(caught.value)


def test_a_directory_that_cannot_be_used_is_told_as_rat_does(
    server_side: Path, client_side: Path, tmp_path: Path, client_of: Clients
) -> None:
    with pytest.raises(TransportError, match="is the directory of a server: give that of a client"):
        client_of(Rat("127.0.0.1:1", server_side)).connect()
    lacking = shutil.copytree(client_side, tmp_path / "lacking")
    (lacking / "client.key").unlink()
    with pytest.raises(TransportError, match=r"client\.key"):
        client_of(Rat("127.0.0.1:1", lacking)).connect()


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="expected HOST:PORT"):
        Rat("http://a/", "b")


def test_a_ratd_that_was_restarted_answers_the_next_call(
    server_side: Path, client_side: Path, tmp_path: Path, client_of: Clients
) -> None:
    side = rat.load_side(str(server_side), "server")
    with demo_ratd.DemoRatd(side, tmp_path) as first:
        host, port = first.address.rsplit(":", 1)
        client = client_of(Rat(first.address, client_side))
        client.call_tool("wait", {"seconds": 0})
    with pytest.raises(TransportError, match="ratd unreachable at"):
        client.call_tool("wait", {"seconds": 0})
    with demo_ratd.DemoRatd(side, tmp_path, listen=(host, int(port))):
        eventually(lambda: client.call_tool("wait", {"seconds": 0})["isError"] is False)
