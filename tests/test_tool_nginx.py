"""A real server behind a real nginx, with a bundle of ours: the configuration of the README at work."""

from __future__ import annotations

import getpass
import importlib.util
import os
import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from bundles import SERVER, Bundle, write_side
from fault_server import HANG, unused_port
from harness import call, rat_environment
from test_tool_bundle import generate
from test_tool_bundle import run as run_tool

import rat

pytest.importorskip("mcp", reason="the MCP SDK is not installed")
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")

import anyio  # noqa: E402 - it comes with the SDK
from mcp import Client, ClientSession, stdio_client  # noqa: E402
from test_demo_sdk import outcome, run, through_rat  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import StartRat

NGINX = shutil.which("nginx", path=os.environ.get("PATH", "") + os.pathsep + "/usr/sbin")
FILES = Path(__file__).resolve().parent / "nginx"

# What a distribution's nginx.conf is around the files of conf.d, with everything it writes below its prefix.
AROUND = """\
daemon off;
worker_processes 1;
error_log stderr;
pid nginx.pid;
events {}
http {
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    include conf.d/*.conf;
}
"""

pytestmark = [
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed"),
    pytest.mark.skipif(os.name == "nt", reason="nginx is given a socket, as on POSIX"),
]


class Site(NamedTuple):
    """nginx at an address, and the bundle it was given."""

    address: str
    bundle: Path

    @property
    def client(self) -> Path:
        """The client directory."""
        return self.bundle / "clients" / "laptop"


@pytest.fixture(scope="module")
def upstream() -> Iterator[int]:
    """The port of the SDK's server, as the README has it."""
    spec = importlib.util.spec_from_file_location("server", FILES / "server.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(module.app, log_level="error"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join()
    listener.close()


def start_nginx(prefix: Path, server_side: Path, upstream: int) -> tuple[subprocess.Popen[bytes], str]:
    """nginx with the configuration of the repository, and its address.

    It is handed the socket it listens on, as one nginx hands it to the next on an upgrade, so that the system chooses
    the port and nobody else can have it in between.
    """
    assert NGINX is not None
    prefix.joinpath("conf.d").mkdir(parents=True)
    shutil.copytree(server_side, prefix / "bundle")
    # A worker of another user could not reach what pytest keeps for this one.
    user = f"user {getpass.getuser()};\n" if os.geteuid() == 0 else ""
    prefix.joinpath("nginx.conf").write_text(user + AROUND)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        text = FILES.joinpath("rat.conf").read_text()
        assert text.count("listen 7433 ssl;") == 1
        text = text.replace("listen 7433 ssl;", f"listen 127.0.0.1:{port} ssl;").replace(":8000;", f":{upstream};")
        prefix.joinpath("conf.d", "rat.conf").write_text(text)
        process = subprocess.Popen(
            [NGINX, "-p", str(prefix), "-c", str(prefix / "nginx.conf")],
            stderr=subprocess.PIPE,
            env={**rat_environment(), "NGINX": f"{listener.fileno()};"},
            pass_fds=[listener.fileno()],
        )
    return process, f"127.0.0.1:{port}"


def end_nginx(process: subprocess.Popen[bytes]) -> bytes:
    """End nginx and its worker; returns what it logged."""
    process.terminate()
    _, logged = process.communicate(timeout=HANG)
    return logged


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, upstream: int) -> Iterator[Site]:
    """nginx before the SDK's server, with a bundle as rat-tool issues it."""
    directory = tmp_path_factory.mktemp("nginx")
    bundle = generate(directory / "bundle")
    process, address = start_nginx(directory / "prefix", bundle / "server", upstream)
    yield Site(address, bundle)
    assert b"[emerg]" not in end_nginx(process)


def test_a_harness_of_the_newer_protocol_reaches_the_server(site: Site) -> None:
    async def conversation() -> None:
        async with Client(stdio_client(through_rat(site.address, site.client))) as client:
            assert client.protocol_version == "2026-07-28"
            assert client.server_info is not None
            assert client.server_info.name == "notes"
            assert [tool.name for tool in (await client.list_tools()).tools] == ["add_note", "list_notes"]
            added = await client.call_tool("add_note", {"text": "grüße\n" * 1000})
            assert outcome(added)[0] is False
            async with anyio.create_task_group() as calls:
                for _ in range(20):
                    calls.start_soon(client.call_tool, "list_notes", {})

    run(conversation)


def test_a_harness_of_an_older_protocol_reaches_the_server(site: Site) -> None:
    async def conversation() -> None:
        streams = stdio_client(through_rat(site.address, site.client))
        async with streams as (read, write), ClientSession(read, write) as session:
            assert (await session.initialize()).protocol_version == "2025-11-25"
            await session.send_ping()
            large = await session.call_tool("add_note", {"text": "x" * (5 << 20)})
            assert outcome(large)[0] is False
            listed = await session.call_tool("list_notes", {})
            assert "x" * (5 << 20) in outcome(listed)[1]

    run(conversation)


def test_check_proves_the_way_in(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed, _ = run_tool(capsys, "check", "--server", site.address, "--bundle", str(site.client))
    assert status == 0
    assert "  ok    MCP: notes 1.0.0, protocol 2026-07-28\n" in printed
    assert printed.endswith(f"\nratd at {site.address} serves this client.\n")


def test_another_path_is_not_found(site: Site) -> None:
    ratd = rat.Ratd(rat.Address.parse(site.address), rat.load_side(str(site.client)))
    exchange = rat.Exchange(b"")
    response = ratd.pool.request_on(exchange, f"POST /other HTTP/1.1\r\nHost: {site.address}", {}, 10)
    assert response.status == 404
    ratd.pool.release(exchange)
    ratd.pool.close()


def test_a_client_of_another_bundle_is_told_so_by_the_server(
    start_rat: StartRat, site: Site, tmp_path: Path, bundle: Bundle, upstream: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server's certificate is of the client's bundle, but it trusts another: it refuses, and says so."""
    mixed = write_side(
        tmp_path / "mixed",
        "server",
        (site.bundle / "server" / "ca.crt").read_bytes(),
        bundle.authority.issue("acme", SERVER),
    )
    process, address = start_nginx(tmp_path / "prefix", mixed, upstream)
    try:
        harness = start_rat(address, bundle.client)
        harness.send(call(1))
        said = f"ratd at {address} answered HTTP 403: the client's certificate is not of this server's bundle"
        assert harness.error(1) == said
        _, printed, _ = run_tool(capsys, "check", "--server", address, "--bundle", str(bundle.client))
        assert printed.endswith(f"  FAIL  MCP: {said}\n\ncheck failed: MCP\n")
    finally:
        end_nginx(process)


def test_a_server_that_is_down_is_told_by_nginx(start_rat: StartRat, site: Site, tmp_path: Path) -> None:
    with unused_port() as port:
        process, address = start_nginx(tmp_path / "prefix", site.bundle / "server", port)
        try:
            harness = start_rat(address, site.bundle / "clients" / "laptop")
            harness.send(call(1))
            down = "nginx reaches no MCP server behind it, or waits in vain: is it running?"
            assert harness.error(1) == f"ratd at {address} answered HTTP 502: {down}"
        finally:
            end_nginx(process)


def test_a_client_without_a_certificate_is_not_served(site: Site) -> None:
    host, _, port = site.address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(site.bundle / "server" / "ca.crt")
    with socket.create_connection((host, int(port)), HANG) as plain, context.wrap_socket(plain) as connection:
        connection.sendall(b"POST /mcp HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 403 ")


def test_an_older_tls_is_refused(site: Site) -> None:
    host, _, port = site.address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_NONE
    refused = pytest.raises(ssl.SSLError, match="ALERT_PROTOCOL_VERSION")
    with socket.create_connection((host, int(port)), HANG) as plain, refused:
        context.wrap_socket(plain)
