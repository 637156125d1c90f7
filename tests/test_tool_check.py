"""rat-tool check: stops at the right step, says which side is wrong, and what to do."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Callable

import pytest
from bundles import CLIENT, DAY, END, NOW, SERVER, START, Authority, Bundle, write_side
from fault_server import (
    HANG,
    Connection,
    ConnectProxy,
    FaultServer,
    Request,
    Response,
    full_backlog,
    result,
    server_context,
    unused_port,
)
from harness import ROOT, rat_environment
from test_tool_bundle import run

import rat
import rat_tool
from demo_ratd import Call, DemoRatd, DemoTool

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

FILES = f"  ok    Files: client laptop of acme, valid until {END:%Y-%m-%d}\n"
NETWORK = "  ok    Network: connected to ADDRESS in TIME\n"
TLS = "  ok    TLS: both sides accept each other\n"
SERVES = "\nratd at ADDRESS serves this client.\n"


def failed(step: str, said: str) -> str:
    """The end of a check that failed."""
    return f"  FAIL  {step}: {said}\n\ncheck failed: {step}\n"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy of this machine takes part."""
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is what cannot be had: limits are a moment."""
    monkeypatch.setattr(rat_tool, "CONNECT_SECONDS", 0.2)
    monkeypatch.setattr(rat_tool, "REQUEST_SECONDS", 0.3)


def check(capsys: pytest.CaptureFixture[str], address: str, side: Path) -> tuple[int, str]:
    """The status of a check, and what it prints, times and the address aside."""
    status, printed, errors = run(capsys, "check", "--server", address, "--bundle", str(side))
    assert errors == ""
    return status, re.sub(r"\d+\.\d ms", "TIME", printed).replace(address, "ADDRESS")


# --- all is well --------------------------------------------------------------------------------------

DEMO_TOOLS = (
    "  ok    Tools: 3\n"
    "        read_file: Read a text file of the server's directory, whole or some of its lines.\n"
    "        write_file: Write a text file of the server's directory, replacing what it held.\n"
    "        wait: Wait, then answer: a call long enough to be canceled.\n"
)


def test_a_good_server(
    server_side: Path, client_side: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DemoRatd(rat.load_side(str(server_side), "server"), tmp_path, keep_bodies=True) as server:
        assert check(capsys, server.address, client_side) == (
            0,
            FILES
            + NETWORK
            + TLS
            + f"  ok    MCP: demo_ratd {rat.__version__}, protocol 2026-07-28\n"
            + "        A server for demonstrations: the files of one directory, for tenant acme. Your session is\n"
            + "        laptop.\n"
            + DEMO_TOOLS
            + SERVES,
        )
        methods = [json.loads(request.body)["method"] for request in server.requests]
        assert server.wait_until(lambda s: s.connections == 0)
    assert "tools/call" not in methods


def test_a_harness_command_line_is_checked_by_copying_it(server_side: Path, client_side: Path, tmp_path: Path) -> None:
    with DemoRatd(rat.load_side(str(server_side), "server"), tmp_path) as server:
        flags = ["--server", server.address, "--bundle", str(client_side), "--log-level", "debug"]
        done = subprocess.run(
            [sys.executable, str(ROOT / "rat_tool.py"), "check", *flags],
            capture_output=True,
            text=True,
            env=rat_environment(),
            timeout=HANG,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"\nratd at {server.address} serves this client.\n")


def legacy_answers(**results: object) -> Callable[[Request], Response]:
    """A server of 2025-11-25, by what it answers to each method."""

    def respond(request: Request) -> Response:
        message = request.message
        assert isinstance(message, dict)
        method, identifier = message["method"], message.get("id")
        if identifier is None:
            return Response(202, kind="")
        if method == "server/discover":
            error = {"code": -32601, "message": "Method not found"}
            return Response(400, json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode())
        if method == "initialize":
            greeting = {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "old", "version": "0.1"},
            }
            return Response(200, result(identifier, {**greeting, **results}))
        listed = results.get("pages", [{"tools": []}])
        assert isinstance(listed, list)
        cursor = message.get("params", {}).get("cursor", "0")
        return Response(200, result(identifier, listed[int(cursor) % len(listed)]))

    return respond


def test_a_server_of_an_older_protocol_with_several_pages(
    fault_server: FaultServer, client_side: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "Long " * 40
    pages = [
        {"tools": [{"name": "first", "description": text, "inputSchema": {}}], "nextCursor": "1"},
        {"tools": [{"name": "second", "inputSchema": {}}, {"name": "\x1b[2J", "inputSchema": {}}]},
    ]
    fault_server.respond = legacy_answers(pages=pages, instructions="One.\n\nTwo\x07.")
    wrapped = "Long " * 17
    assert check(capsys, fault_server.address, client_side) == (
        0,
        FILES
        + NETWORK
        + TLS
        + "  ok    MCP: old 0.1, protocol 2025-06-18\n"
        + "        One. Two\N{REPLACEMENT CHARACTER}.\n"
        + "  ok    Tools: 3\n"
        + f"        first: {wrapped.rstrip()}\n"
        + f"          {('Long ' * 18).rstrip()}\n"
        + f"          {('Long ' * 5).rstrip()}\n"
        + "        second\n"
        + "        \N{REPLACEMENT CHARACTER}[2J\n"
        + SERVES,
    )


def test_a_server_without_tools(
    fault_server: FaultServer, client_side: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault_server.respond = legacy_answers(capabilities={}, serverInfo=None)
    assert check(capsys, fault_server.address, client_side) == (
        0,
        FILES
        + NETWORK
        + TLS
        + "  ok    MCP: a server without a name, protocol 2025-06-18\n"
        + "  ok    Tools: none\n"
        + SERVES,
    )


def test_through_a_proxy(
    server_side: Path,
    client_side: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxy = ConnectProxy()
    monkeypatch.setenv("HTTPS_PROXY", proxy.url)
    with DemoRatd(rat.load_side(str(server_side), "server"), tmp_path) as server:
        address = f"ratd.example:{server.address.rpartition(':')[2]}"
        status, printed = check(capsys, address, client_side)
    assert status == 0
    assert printed.startswith(
        FILES + f"  ok    Network: connected to the proxy {proxy.address} of HTTPS_PROXY in TIME\n" + TLS
    )
    assert printed.endswith(SERVES)
    proxy.refuse = b"HTTP/1.1 407 Proxy Authentication Required"
    assert check(capsys, address, client_side)[1].endswith(
        failed("Network", f"proxy at {proxy.address} refused the tunnel: HTTP 407")
    )
    proxy.close()
    monkeypatch.setenv("HTTPS_PROXY", "ftp://user:secret@proxy")
    assert check(capsys, address, client_side) == (
        1,
        FILES
        + failed("Network", "HTTPS_PROXY names no http:// or https:// proxy: set it to http://HOST:PORT, or unset it"),
    )


# --- Files --------------------------------------------------------------------------------------------


def test_a_server_directory_is_told_apart(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    place = "clients/NAME of the bundle"
    assert check(capsys, "127.0.0.1:9", bundle.server) == (
        1,
        failed("Files", f"{bundle.server} is the directory of a server: give that of a client ({place})"),
    )


@pytest.mark.parametrize("fault", ["role", "expired", "permissions"])
def test_a_client_that_cannot_be_used(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    side = tmp_path / "side"
    if fault == "permissions":
        if os.name == "nt":
            pytest.skip("Windows has no such modes")
        shutil.copytree(bundle.client, side)
        (side / "client.key").chmod(0o640)
        said = f"{side}/client.key has mode 0640, run: chmod 600 {side}/client.key"
    elif fault == "role":
        write_side(side, "client", bundle.authority.certificate, bundle.authority.issue("laptop", SERVER))
        said = f"{side / 'client.crt'} is a server's, expected a client's (extended key usage clientAuth)"
    else:
        leaf = bundle.authority.issue("laptop", CLIENT, start=START - 9 * DAY, end=NOW - DAY)
        write_side(side, "client", bundle.authority.certificate, leaf)
        said = (
            f"{side / 'client.crt'} expired on {NOW - DAY:%Y-%m-%d %H:%M} UTC: "
            "issue a bundle with rat-tool bundle generate"
        )
    assert check(capsys, "127.0.0.1:9", side) == (1, failed("Files", said))


def test_the_last_year_is_warned_of_and_the_check_goes_on(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leaf = bundle.authority.issue("laptop", CLIENT, end=NOW + 9 * DAY)
    side = write_side(tmp_path / "side", "client", bundle.authority.certificate, leaf)
    (tmp_path / "files").mkdir()
    with DemoRatd(rat.load_side(str(bundle.server), "server"), tmp_path / "files") as server:
        status, printed = check(capsys, server.address, side)
    assert status == 0
    assert printed.startswith(
        f"  ok    Files: client laptop of acme, valid until {NOW + 9 * DAY:%Y-%m-%d}\n"
        "  warn  less than a year remains: issue another bundle, and hand out its directories, before then\n"
    )


# --- Network ------------------------------------------------------------------------------------------


def test_a_server_that_is_down(client_side: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with unused_port() as port:
        assert check(capsys, f"127.0.0.1:{port}", client_side) == (
            1,
            FILES
            + failed(
                "Network",
                "cannot connect to ADDRESS: connection refused. "
                "Nothing listens there: the server is down, or the port is another.",
            ),
        )


@pytest.mark.usefixtures("short")
def test_a_port_that_is_filtered(client_side: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with full_backlog() as address:
        assert check(capsys, address, client_side) == (
            1,
            FILES
            + failed("Network", "no answer from ADDRESS within 0.2 s: the machine is down, or a firewall is between"),
        )


def test_a_name_that_does_not_resolve(
    client_side: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No name service takes part in the tests."""

    def unknown(*arguments: object, **named: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert check(capsys, "ratd.example:7433", client_side) == (
        1,
        FILES
        + failed(
            "Network", "cannot connect to ADDRESS: no such host. Check the name, and that this machine can resolve it."
        ),
    )


# --- TLS ----------------------------------------------------------------------------------------------

REFUSED = re.compile(r"(rat refused the certificate of ratd at ADDRESS: )[^.]+\.")


def assert_refused(capsys: pytest.CaptureFixture[str], server: FaultServer, client: Path, said: str) -> None:
    """Whether rat's side refuses the server, in OpenSSL's words of whatever version, with this explanation."""
    status, printed = check(capsys, server.address, client)
    assert status == 1
    assert REFUSED.sub(r"\1REASON.", printed) == FILES + NETWORK + failed(
        "TLS", f"rat refused the certificate of ratd at ADDRESS: REASON. {said}"
    )


@pytest.fixture
def serve() -> Iterator[Callable[[Path], FaultServer]]:
    """Starts a server of a directory."""
    with contextlib.ExitStack() as stack:

        def start(side: Path) -> FaultServer:
            server = FaultServer(side)
            stack.callback(server.close)
            return server

        yield start


def test_a_server_of_another_bundle_of_the_tenant(
    serve: Callable[[Path], FaultServer], other_bundle: Bundle, client_side: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(
        capsys,
        serve(other_bundle.server),
        client_side,
        "The server is of another bundle of tenant acme: give both sides directories of one bundle.",
    )


def test_a_server_of_another_tenant(
    serve: Callable[[Path], FaultServer], tmp_path: Path, client_side: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Bundle(tmp_path / "other", "globex")
    assert_refused(
        capsys,
        serve(other.server),
        client_side,
        "The server is of tenant globex, this client of acme: check the address, or ask for a client directory of "
        "that tenant.",
    )


def test_a_server_of_no_bundle(
    serve: Callable[[Path], FaultServer], tmp_path: Path, client_side: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Bundle(tmp_path / "other", authority=Authority("Public CA", organization="Trust Inc"))
    assert_refused(
        capsys,
        serve(other.server),
        client_side,
        "Its certificate is of Public CA, and of no bundle: check the address.",
    )


@pytest.mark.parametrize(
    ("start", "end", "said"),
    [
        (
            START - 9 * DAY,
            NOW - DAY,
            f"The server's certificate expired on {NOW - DAY:%Y-%m-%d}: issue another bundle, for both sides.",
        ),
        (
            NOW + DAY,
            END,
            f"The server's certificate is not valid before {NOW + DAY:%Y-%m-%d}: compare the clocks of both machines.",
        ),
    ],
    ids=["expired", "not yet valid"],
)
def test_a_server_out_of_its_time(
    serve: Callable[[Path], FaultServer],
    bundle: Bundle,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    start: object,
    end: object,
    said: str,
) -> None:
    leaf = bundle.authority.issue("acme", SERVER, start=start, end=end)  # type: ignore[arg-type]
    side = write_side(tmp_path / "server", "server", bundle.authority.certificate, leaf)
    assert_refused(capsys, serve(side), bundle.client, said)


def test_a_server_with_the_directory_of_a_client(
    serve: Callable[[Path], FaultServer], bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leaf = bundle.authority.issue("acme", CLIENT)
    side = write_side(tmp_path / "server", "server", bundle.authority.certificate, leaf)
    assert_refused(
        capsys,
        serve(side),
        bundle.client,
        "The server presents a certificate that is not a server's: give it the server directory of the bundle.",
    )


def refusal(told: str, said: str) -> str:
    """What is printed where the server refuses the client."""
    return (
        FILES + NETWORK + failed("TLS", f"ratd at ADDRESS refused the TLS handshake: remote error: tls: {told}. {said}")
    )


@pytest.mark.parametrize("trusts", ["another bundle", "an expired CA", "a CA of servers", "none it revoked"])
def test_a_client_that_the_server_refuses(
    fault_server: FaultServer,
    bundle: Bundle,
    other_bundle: Bundle,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    trusts: str,
) -> None:
    """The server's own certificate is of the client's bundle each time: what it trusts is not, or is no more."""
    if trusts == "another bundle":
        trust = other_bundle.authority.certificate
        expected = refusal(
            "unknown certificate authority",
            "The server trusts the CA of another bundle: give both sides directories of one.",
        )
    elif trusts == "an expired CA":
        trust = Authority(key=bundle.authority.key, start=START - 9 * DAY, end=NOW - DAY).certificate
        expected = refusal(
            "expired certificate",
            "The server takes this client's certificate, or its CA, for expired; here both are valid until "
            f"{END:%Y-%m-%d}. Compare the clocks.",
        )
    elif trusts == "a CA of servers":
        trust = Authority(key=bundle.authority.key, usages=(SERVER,)).certificate
        expected = refusal(
            "unsupported certificate",
            "The server does not take this client's certificate for a client's: its ca.crt is not that of this bundle.",
        )
    else:
        trust = bundle.authority.certificate + bundle.authority.revoke(bundle.leaves["laptop"])
        expected = refusal(
            "revoked certificate", "Whoever runs the server revoked this client: ask for another bundle."
        )
    (tmp_path / "trusted.pem").write_bytes(trust)
    fault_server.context = server_context(
        bundle.server, tmp_path / "trusted.pem", revocations=trusts == "none it revoked"
    )
    assert check(capsys, fault_server.address, bundle.client) == (1, expected)


@pytest.mark.parametrize(
    ("alert", "told", "said"),
    [
        (
            ssl.ALERT_DESCRIPTION_BAD_CERTIFICATE,
            "bad certificate",
            "The server does not take this client's certificate: its bundle is another, or its clock wrong.",
        ),
        (ssl.ALERT_DESCRIPTION_ACCESS_DENIED, "access denied", "Ask whoever runs the server for what it logged."),
    ],
)
def test_an_alert_is_explained(
    fault_server: FaultServer, bundle: Bundle, capsys: pytest.CaptureFixture[str], alert: int, told: str, said: str
) -> None:
    fault_server.context = server_context(bundle.server, alert=alert)
    assert check(capsys, fault_server.address, bundle.client) == (1, refusal(told, said))


def test_every_alert_named_by_rat_is_explained() -> None:
    explained = set(rat_tool._ALERTS)
    assert explained <= set(rat._ALERTS.values())


def assert_no_tls(capsys: pytest.CaptureFixture[str], address: str, client: Path, said: str) -> None:
    """Whether the check stops at TLS, in OpenSSL's words of whatever version, with this explanation."""
    status, printed = check(capsys, address, client)
    assert status == 1
    printed = re.sub(r"(does not answer in TLS 1.3: )[^.]+\.", r"\1REASON.", printed)
    assert printed == FILES + NETWORK + failed("TLS", f"ratd at ADDRESS does not answer in TLS 1.3: REASON. {said}")


def test_a_server_of_plain_http(
    fault_server: FaultServer, client_side: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def plain(connection: Connection) -> None:
        connection.receive()
        connection.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    fault_server.script = plain
    assert_no_tls(
        capsys, fault_server.address, client_side, "It answers plain HTTP: this is the port of a server without TLS."
    )


def test_a_server_of_something_else(
    fault_server: FaultServer, client_side: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def mail(connection: Connection) -> None:
        connection.send(b"220 mail.example ESMTP\r\n")
        connection.wait_end()

    fault_server.script = mail
    assert_no_tls(capsys, fault_server.address, client_side, "Another kind of service listens there: check the port.")


def test_a_server_of_an_older_tls(
    fault_server: FaultServer, server_side: Path, client_side: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault_server.context = server_context(server_side, tls=ssl.TLSVersion.TLSv1_2)
    assert_no_tls(
        capsys, fault_server.address, client_side, "It speaks an older TLS alone: rat wants 1.3, as ratd does."
    )


@pytest.mark.usefixtures("short")
def test_a_server_that_takes_no_part_in_the_handshake(
    fault_server: FaultServer, client_side: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault_server.script = Connection.wait_end
    assert check(capsys, fault_server.address, client_side) == (
        1,
        FILES
        + NETWORK
        + failed(
            "TLS",
            "ratd at ADDRESS did not answer within 0.3s. "
            "It takes no part in a TLS handshake: another kind of service, or a server that hangs.",
        ),
    )


def test_a_server_that_ends_the_handshake(
    fault_server: FaultServer, client_side: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def leave(connection: Connection) -> None:
        connection.receive()
        connection.reset()

    fault_server.scripts = [Connection.wait_end]  # that of the step before
    fault_server.script = leave
    assert check(capsys, fault_server.address, client_side) == (
        1,
        FILES
        + NETWORK
        + failed(
            "TLS",
            "ratd unreachable at ADDRESS: connection reset by peer. "
            "It takes no part in a TLS handshake: another kind of service, or a server that hangs.",
        ),
    )


# --- MCP and tools ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (
            Response(404, b"<h1>Not Found</h1>\n", "text/html"),
            "ratd at ADDRESS answered HTTP 404: <h1>Not Found</h1>. There is no MCP at /mcp.",
        ),
        (Response(405, b"", "text/html"), "ratd at ADDRESS answered HTTP 405. There is no MCP at /mcp."),
        (Response(502, b"bad gateway", "text/plain"), "ratd at ADDRESS answered HTTP 502: bad gateway"),
        (
            Response(200, b"<h1>Hello</h1>", "text/html"),
            "ratd at ADDRESS answered no JSON-RPC response to the request (HTTP 200)",
        ),
    ],
)
def test_a_server_that_is_not_mcp(
    fault_server: FaultServer, client_side: Path, capsys: pytest.CaptureFixture[str], response: Response, said: str
) -> None:
    fault_server.respond = lambda request: response
    assert check(capsys, fault_server.address, client_side) == (1, FILES + NETWORK + TLS + failed("MCP", said))


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("slow", ["silent", "dripping"])
def test_a_server_slow_to_answer(
    fault_server: FaultServer, client_side: Path, capsys: pytest.CaptureFixture[str], slow: str
) -> None:
    """Neither silence nor a byte now and then outlasts the limit."""
    ended = threading.Event()

    def drip(connection: Connection) -> None:
        connection.handshake()
        connection.request()
        connection.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n")
        while not ended.wait(0.02):
            connection.send(b" ")

    if slow == "silent":
        fault_server.respond = lambda request: None
    else:
        fault_server.script = drip
        fault_server.scripts = [Connection.wait_end]
    try:
        assert check(capsys, fault_server.address, client_side) == (
            1,
            FILES + NETWORK + TLS + failed("MCP", "ratd at ADDRESS did not answer within 0.3s"),
        )
    finally:
        ended.set()


MCP = "  ok    MCP: old 0.1, protocol 2025-06-18\n"


def test_a_listing_that_loops(fault_server: FaultServer, client_side: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fault_server.respond = legacy_answers(pages=[{"tools": [], "nextCursor": "1"}])
    assert check(capsys, fault_server.address, client_side) == (
        1,
        FILES
        + NETWORK
        + TLS
        + MCP
        + failed(
            "Tools", "ratd at ADDRESS repeated the cursor '1': its listing does not end. Tell whoever runs the server."
        ),
    )


def test_a_listing_without_end(
    fault_server: FaultServer, client_side: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = [{"tools": [], "nextCursor": str(number + 1)} for number in range(100)]
    fault_server.respond = legacy_answers(pages=pages)
    assert check(capsys, fault_server.address, client_side) == (
        1,
        FILES
        + NETWORK
        + TLS
        + MCP
        + failed(
            "Tools",
            "ratd at ADDRESS lists tools on more than 64 pages: its listing does not end. "
            "Tell whoever runs the server.",
        ),
    )


def test_a_listing_that_is_none(
    fault_server: FaultServer, client_side: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault_server.respond = legacy_answers(pages=[{"tools": 5}])
    assert check(capsys, fault_server.address, client_side) == (
        1,
        FILES + NETWORK + TLS + MCP + failed("Tools", "ratd at ADDRESS listed something else than tools"),
    )


def test_a_tool_with_an_annotation_that_breaks_the_rules_is_left_out(
    server_side: Path, client_side: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(arguments: Mapping[str, object], call: Call) -> str:
        return ""

    schema = {"type": "object", "properties": {"x": {"type": "number", "x-mcp-header": "X"}}}
    tools = [DemoTool("good", "Good.", {"type": "object"}, nothing), DemoTool("bad", "Bad.", schema, nothing)]
    with DemoRatd(rat.load_side(str(server_side), "server"), tmp_path, tools=tools) as server:
        status, printed = check(capsys, server.address, client_side)
    assert status == 0
    assert printed.endswith("  ok    Tools: 1\n        good: Good.\n" + SERVES)


# --- the SDK's servers --------------------------------------------------------------------------------


@pytest.fixture
def serve_sdk(server_side: Path) -> Iterator[Callable[[object], str]]:
    """Serves an application of the SDK over mutual TLS; gives its address."""
    uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    logging.disable(logging.CRITICAL)
    with contextlib.ExitStack() as stack:

        def start(app: object) -> str:
            config = uvicorn.Config(
                app,
                log_config=None,
                ssl_certfile=server_side / "server.crt",
                ssl_keyfile=server_side / "server.key",
                timeout_graceful_shutdown=1,
            )
            config.load()
            config.ssl = server_context(server_side)
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()

            def end() -> None:
                server.should_exit = True
                thread.join(HANG)
                assert not thread.is_alive(), "hangs"

            stack.callback(end)
            return f"127.0.0.1:{listener.getsockname()[1]}"

        yield start
    logging.disable(logging.NOTSET)


def sdk_server() -> object:
    """A server of the SDK with one tool."""
    pytest.importorskip("mcp", reason="the MCP SDK is not installed")
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("sdk", version="9", instructions="For tests.")

    @server.tool()
    def echo(text: str) -> str:
        """The text."""
        return text

    return server


@pytest.mark.parametrize("json_response", [True, False], ids=["JSON", "streams"])
def test_a_stateless_server_of_the_sdk(
    serve_sdk: Callable[[object], str], client_side: Path, capsys: pytest.CaptureFixture[str], json_response: bool
) -> None:
    app = sdk_server().streamable_http_app(stateless_http=True, json_response=json_response)  # type: ignore[attr-defined]
    assert check(capsys, serve_sdk(app), client_side) == (
        0,
        FILES
        + NETWORK
        + TLS
        + "  ok    MCP: sdk 9, protocol 2026-07-28\n"
        + "        For tests.\n"
        + "  ok    Tools: 1\n"
        + "        echo: The text.\n"
        + SERVES,
    )


@pytest.mark.parametrize("json_response", [True, False], ids=["JSON", "streams"])
def test_a_stateful_server_of_the_sdk(
    serve_sdk: Callable[[object], str], client_side: Path, capsys: pytest.CaptureFixture[str], json_response: bool
) -> None:
    app = sdk_server().streamable_http_app(json_response=json_response)  # type: ignore[attr-defined]
    status, printed = check(capsys, serve_sdk(app), client_side)
    printed = re.sub(r"(answered HTTP 400): .*Missing session ID.*\}\.", r"\1: BODY.", printed)
    assert (status, printed) == (
        1,
        FILES
        + NETWORK
        + TLS
        + failed(
            "MCP",
            "ratd at ADDRESS answered HTTP 400: BODY. "
            "It keeps sessions (Mcp-Session-Id), which rat does not: run the server stateless.",
        ),
    )


def test_a_server_of_the_oldest_transport(
    serve_sdk: Callable[[object], str], client_side: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """HTTP with SSE, of 2024-11-05: it has no /mcp."""
    app = sdk_server().sse_app()  # type: ignore[attr-defined]
    assert check(capsys, serve_sdk(app), client_side) == (
        1,
        FILES + NETWORK + TLS + failed("MCP", "ratd at ADDRESS answered HTTP 404: Not Found. There is no MCP at /mcp."),
    )
