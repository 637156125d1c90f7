"""A proxy from the environment: CONNECT through it, its failures told apart from ratd's."""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING

import pytest
from bundles import Authority, Bundle
from fault_server import Connection, ConnectProxy, FaultServer, Response, result, server_context, unused_port
from harness import Harness, call, large_call, run_rat

import rat

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from conftest import StartRat


def start_behind(
    start_rat: StartRat,
    proxy: ConnectProxy,
    server: FaultServer,
    *,
    url: str | None = None,
    patch: str = "",
    environment: Mapping[str, str] | None = None,
) -> Harness:
    """A rat for the server by a name that only the proxy knows."""
    return start_rat(
        f"ratd.test:{server.port}",
        level="debug",
        patch=proxy.patch + patch,
        environment={"HTTPS_PROXY": url or proxy.url, **(environment or {})},
    )


def test_calls_go_through_one_tunnel(start_rat: StartRat, proxy: ConnectProxy, fault_server: FaultServer) -> None:
    rat = start_behind(start_rat, proxy, fault_server)
    for identifier in range(3):
        rat.call(identifier)
    target = f"ratd.test:{fault_server.port}"
    (head,) = proxy.tunnels
    line, *fields = head.split("\r\n")
    assert re.fullmatch(rf"CONNECT {target} HTTP/1\.[01]", line)
    names = {field.partition(":")[0].lower() for field in fields}
    assert names <= {"host", "user-agent", "proxy-connection"}
    assert [request.field("Host") for request in fault_server.requests] == [target] * 3
    assert not [name for name, _ in fault_server.requests[0].fields if name.lower().startswith("proxy-")]


def test_a_large_message_goes_through_both_ways(
    start_rat: StartRat, proxy: ConnectProxy, fault_server: FaultServer
) -> None:
    fault_server.respond = lambda request: Response(200, result(1, "x" * len(request.body)))
    rat = start_behind(start_rat, proxy, fault_server)
    rat.send(large_call(1, 2 << 20))
    assert rat.line() == result(1, "x" * (2 << 20))


def test_the_server_behind_is_still_checked(
    start_rat: StartRat, proxy: ConnectProxy, other_bundle: Bundle, server_side: Path
) -> None:
    server = FaultServer(other_bundle.server)
    try:
        rat = start_behind(start_rat, proxy, server)
        server.context = server_context(other_bundle.server, trust=server_side / "ca.crt")
        rat.send(call(1))
        assert rat.error(1).startswith(f"rat refused the certificate of ratd at ratd.test:{server.port}: ")
    finally:
        server.close()


@pytest.mark.parametrize("size", [None, 8 << 20], ids=["small", "8 MiB"])
def test_the_alert_of_the_server_behind_is_told(
    start_rat: StartRat, proxy: ConnectProxy, fault_server: FaultServer, server_side: Path, size: int | None
) -> None:
    fault_server.context = server_context(server_side, trust=Authority().certificate)
    rat = start_behind(start_rat, proxy, fault_server)
    rat.send(call(1) if size is None else large_call(1, size))
    assert rat.error(1) == (
        f"ratd at ratd.test:{fault_server.port} refused the TLS handshake: remote error: tls: "
        "unknown certificate authority. Check the bundle with rat-tool check."
    )


def test_an_answer_nobody_waits_for_is_not_the_next_calls(
    start_rat: StartRat, proxy: ConnectProxy, fault_server: FaultServer
) -> None:
    def script(connection: Connection) -> None:
        connection.handshake()
        fault_server.receive(connection)
        first = Response(200, result(1, "x" * 9000)).encode()
        connection.send(first + Response(200, result(2, "forged")).encode())
        while fault_server.exchange(connection):
            pass

    fault_server.scripts = [script]
    rat = start_behind(start_rat, proxy, fault_server)
    rat.call(1)
    assert rat.call(2)["result"] == {"method": "ping"}


# Its failures


def test_a_proxy_that_is_not_there(start_rat: StartRat, fault_server: FaultServer) -> None:
    with unused_port() as port:
        rat = start_rat(f"ratd.test:{fault_server.port}", environment={"HTTPS_PROXY": f"http://127.0.0.1:{port}"})
        rat.send(call(1))
        assert rat.error(1) == f"proxy at 127.0.0.1:{port} unreachable: connection refused"


# What a proxy within TLS does looks to CPython, before 3.12.3 and 3.11.9, like an end.
ENDED = "the connection closed before an answer"
RESET = f"(connection reset by peer|{ENDED}|the connection closed)"


def test_a_proxy_that_gives_up(start_rat: StartRat, proxy: ConnectProxy, fault_server: FaultServer) -> None:
    rat = start_behind(start_rat, proxy, fault_server)
    for stage, reason in (("accept", RESET), ("connect", RESET), ("close", ENDED)):
        proxy.stage = stage
        rat.send(call(1))
        assert re.fullmatch(f"proxy at {proxy.address} unreachable: {reason}", rat.error(1))
    proxy.stage = None
    assert rat.call(2)["id"] == 2


def test_a_tunnel_that_breaks_is_the_servers_failure(
    start_rat: StartRat, proxy: ConnectProxy, fault_server: FaultServer
) -> None:
    proxy.stage = "tunnel"
    rat = start_behind(start_rat, proxy, fault_server)
    rat.send(call(1))
    assert re.fullmatch(f"ratd unreachable at ratd.test:{fault_server.port}: {RESET}", rat.error(1))


def test_a_proxy_that_refuses(start_rat: StartRat, proxy: ConnectProxy, fault_server: FaultServer) -> None:
    rat = start_behind(start_rat, proxy, fault_server)
    for line, status in (
        (b"HTTP/1.1 407 Proxy Authentication Required", 407),
        (b"HTTP/1.1 403 Forbidden", 403),
        (b"HTTP/1.0 503 Service Unavailable", 503),
    ):
        proxy.refuse = line
        rat.send(call(1))
        assert rat.error(1) == f"proxy at {proxy.address} refused the tunnel: HTTP {status}"
    proxy.refuse = b"SSH-2.0-OpenSSH_9.0"
    rat.send(call(1))
    assert rat.error(1) == f"proxy at {proxy.address} unreachable: not an HTTP proxy"


def test_a_server_the_proxy_does_not_reach(start_rat: StartRat, proxy: ConnectProxy) -> None:
    with unused_port() as port:
        rat = start_rat(f"ratd.test:{port}", patch=proxy.patch, environment={"HTTPS_PROXY": proxy.url})
        rat.send(call(1))
        assert rat.error(1) == f"proxy at {proxy.address} refused the tunnel: HTTP 502"


def test_a_proxy_that_does_not_answer(start_rat: StartRat, proxy: ConnectProxy, fault_server: FaultServer) -> None:
    proxy.stage = "silent"
    rat = start_behind(start_rat, proxy, fault_server, patch="\nrat.REQUEST_SECONDS = 1")
    rat.send(call(1))
    assert rat.error(1) == f"proxy at {proxy.address} unreachable: no answer within 1s"
    proxy.wait_report("gone")


def test_an_https_proxy_is_verified(start_rat: StartRat, proxy: ConnectProxy, fault_server: FaultServer) -> None:
    if proxy.patch:
        # With the public CAs there are, this one is of nobody's.
        rat = start_rat(f"ratd.test:{fault_server.port}", environment={"HTTPS_PROXY": proxy.url})
        reason = "(self[- ]signed certificate in certificate chain|unable to get local issuer certificate)"
    else:

        def plain(connection: Connection) -> None:
            connection.receive()
            connection.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
            connection.wait_end()

        proxy.scripts = [plain]
        url = proxy.url.replace("http:", "https:")
        rat = start_behind(start_rat, proxy, fault_server, url=url)
        reason = "(wrong version number|record layer failure|the connection closed.*)"
    rat.send(call(1))
    assert re.fullmatch(f"proxy at {proxy.address} unreachable: {reason}", rat.error(1))
    assert proxy.tunnels == []


def test_an_https_proxy_of_another_name_is_refused(
    start_rat: StartRat, proxy: ConnectProxy, fault_server: FaultServer
) -> None:
    if not proxy.patch:
        return  # an http proxy has no certificate
    url = f"https://localhost:{proxy.port}"
    rat = start_behind(start_rat, proxy, fault_server, url=url)
    rat.send(call(1))
    assert re.fullmatch(
        f"proxy at localhost:{proxy.port} unreachable: .*([Hh]ostname mismatch|doesn't match).*", rat.error(1)
    )


# Credentials


def test_credentials_go_to_the_proxy_unquoted_and_nowhere_else(
    start_rat: StartRat, proxy: ConnectProxy, fault_server: FaultServer
) -> None:
    scheme, _, place = proxy.url.partition("://")
    url = f"{scheme}://us%40er:p%C3%A4ss%3A%2F@{place}"
    rat = start_behind(start_rat, proxy, fault_server, url=url)
    rat.call(1)
    assert proxy.authorizations == ["us@er:päss:/"]
    assert "authorization" not in str(fault_server.requests[0].fields).lower()
    fault_server.cut_all()
    proxy.cut_all()
    proxy.refuse = b"HTTP/1.1 407 Proxy Authentication Required"
    rat.send(call(2))
    assert rat.error(2) == f"proxy at {proxy.address} refused the tunnel: HTTP 407"
    assert rat.finish() == (0, [])
    told = "\n".join(rat.log)
    for secret in ("us@er", "us%40er", "päss", "p%C3%A4ss", "dXNAZX", "Basic"):
        assert secret not in told


def test_a_user_without_a_password(start_rat: StartRat, proxy: ConnectProxy, fault_server: FaultServer) -> None:
    rat = start_behind(start_rat, proxy, fault_server, url=proxy.url.replace("://", "://user@"))
    rat.call(1)
    assert proxy.authorizations == ["user:"]


@pytest.mark.parametrize(
    "value",
    [
        "socks5://u:s3cret@h:1",
        "http://",
        "http://u:s3cret@",
        "http://u:s3cret@h:port",
        "http://u:s3cret@[::1",
        "http://u:s3cret@two words:1",
        "http://u:s3cret@h%20:1",
        "http://u:s3cret@<h>:1",
        "http://u:s3cret@\udcff:1",  # as Python gives what is no UTF-8
    ],
)
def test_a_proxy_that_cannot_be_used_is_told_at_startup(value: str, client_side: Path) -> None:
    assert run_rat(["--server", "ratd.test:7433", "--bundle", str(client_side)], {"HTTPS_PROXY": value}) == (
        1,
        "",
        "rat: HTTPS_PROXY names no http:// or https:// proxy: set it to http://HOST:PORT, or unset it\n",
    )


@pytest.mark.parametrize(
    ("url", "credentials"),
    [
        ("http://u%C3%A9:p%3A@p:1", "ué:p:".encode()),
        ("http://u%e9:p@p:1", b"u\xe9:p"),
        ("http://u\udce9:p@p:1", b"u\xe9:p"),
        ("http://:@p:1", b":"),
    ],
)
def test_credentials_are_bytes_of_any_kind(url: str, credentials: bytes) -> None:
    proxy = rat.environment_proxy(rat.Address.parse("ratd.test:7433"), {"HTTPS_PROXY": url})
    assert proxy == ("http://p:1", "p:1", f"Basic {base64.b64encode(credentials).decode()}")


def test_the_name_of_a_proxy_may_be_of_any_language() -> None:
    proxy = rat.environment_proxy(rat.Address.parse("ratd.test:7433"), {"HTTPS_PROXY": "http://prüfung.test:1"})
    assert proxy == ("http://xn--prfung-4ya.test:1", "xn--prfung-4ya.test:1", None)


# Which servers it is for


@pytest.mark.parametrize(
    ("environment", "url"),
    [
        ({}, None),
        ({"HTTPS_PROXY": ""}, None),
        ({"HTTP_PROXY": "http://p:1", "ALL_PROXY": "http://p:1"}, None),
        ({"HTTPS_PROXY": "http://p:1"}, "http://p:1"),
        ({"https_proxy": "http://p:1"}, "http://p:1"),
        ({"HTTPS_PROXY": "", "https_proxy": "http://p:1"}, "http://p:1"),
        ({"HTTPS_PROXY": "http://p:1", "https_proxy": "http://q:1"}, "http://p:1"),
        ({"HTTPS_PROXY": "p:3128"}, "http://p:3128"),
        ({"HTTPS_PROXY": "http://p"}, "http://p:80"),
        ({"HTTPS_PROXY": "https://p/"}, "https://p:443"),
        ({"HTTPS_PROXY": "http://[fd00::1]:8080"}, "http://[fd00::1]:8080"),
        ({"HTTPS_PROXY": "http://u:p@p:1"}, "http://p:1"),
    ],
    ids=range(12),
)
def test_the_proxy_of_the_environment(environment: dict[str, str], url: str | None) -> None:
    proxy = rat.environment_proxy(rat.Address.parse("ratd.example:7433"), environment)
    assert (proxy and proxy.url) == url


@pytest.mark.parametrize(
    "address",
    [
        "localhost:1",
        "LOCALHOST:1",
        "ratd.localhost:1",
        "localhost.:1",
        "127.0.0.1:1",
        "127.8.9.10:1",
        "[::1]:1",
        "[0:0:0:0:0:0:0:1]:1",
        "[::ffff:127.0.0.1]:1",
    ],
)
def test_this_machine_is_never_reached_through_a_proxy(address: str) -> None:
    environment = {"HTTPS_PROXY": "http://p:1"}
    assert rat.environment_proxy(rat.Address.parse(address), environment) is None


@pytest.mark.parametrize(
    ("address", "patterns", "bypasses"),
    [
        ("ratd.example:1", "ratd.example", True),
        ("ratd.example:1", "RATD.example", True),
        ("Ratd.Example:1", "ratd.example", True),
        ("ratd.example.:1", "ratd.example", True),
        ("ratd.example:1", "ratd.example.", True),
        ("ratd.bücher.example:1", "Bücher.example", True),
        ("ratd.bücher.example:1", "xn--bcher-kva.example", True),
        ("ratd.bücher.example:1", "bucher.example", False),
        ("ratd.example:1", "example", True),
        ("ratd.example:1", ".example", True),
        ("ratd.example:1", "*.example", True),
        ("ratd.example:1", "*", True),
        ("ratd.example:1", "a, b ,ratd.example", True),
        ("ratd.example:1", "a ratd.example", True),
        ("ratd.example:1", "ratd.example:1", True),
        ("ratd.example:1", "ratd.example:2", False),
        ("ratd.example:1", ".ratd.example", False),
        ("ratd.example:1", "d.example", False),
        ("ratd.example:1", "xratd.example", False),
        ("ratd.example:1", "example.com", False),
        ("ratd.example:1", "", False),
        ("ratd.example:1", ",", False),
        ("10.1.2.3:1", "10.1.2.3", True),
        ("10.1.2.3:1", "10.0.0.0/8", True),
        ("10.1.2.3:1", "10.1.2.3:1", True),
        ("10.1.2.3:1", "10.1.2.3:2", False),
        ("10.1.2.3:1", "10.1.2.0/30", True),
        ("10.1.2.4:1", "10.1.2.0/30", False),
        ("10.1.2.3:1", "1.2.3", False),
        ("10.1.2.3:1", "*", True),
        ("[fd00::1]:1", "fd00::1", True),
        ("[fd00::1]:1", "fd00:0::/16", True),
        ("[fd00::1]:1", "[fd00::1]", True),
        ("[fd00::1]:1", "[fd00::1]:1", True),
        ("[fd00::1]:1", "[fd00::1]:2", False),
        ("[fd00::1]:1", "fd01::/16", False),
        ("[fd00::1]:1", "10.0.0.0/8", False),
        ("ratd.test:7433", "ratd.test:" + "7" * 5000, False),
        ("ratd.test:7433", "ratd.test:" + "7" * 5000 + ",ratd.test", True),
    ],
    ids=range(39),
)
def test_no_proxy(address: str, patterns: str, bypasses: bool) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        environment = {"HTTPS_PROXY": "http://p:1", name: patterns}
        proxy = rat.environment_proxy(rat.Address.parse(address), environment)
        assert (proxy is None) is bypasses


def test_a_server_of_no_proxy_is_reached_directly(
    start_rat: StartRat, proxy: ConnectProxy, fault_server: FaultServer
) -> None:
    # A name of its own stands for any: tests have no name service.
    patch = """
import socket
addresses = socket.getaddrinfo
socket.getaddrinfo = lambda host, *args, **kwargs: addresses("127.0.0.1", *args, **kwargs)
"""
    rat = start_behind(start_rat, proxy, fault_server, patch=patch, environment={"NO_PROXY": "test"})
    rat.call(1)
    assert proxy.accepted == 0


def test_a_loopback_server_is_reached_directly(start_rat: StartRat, fault_server: FaultServer) -> None:
    with unused_port() as port:
        rat = start_rat(environment={"HTTPS_PROXY": f"http://127.0.0.1:{port}"})
        rat.call(1)
