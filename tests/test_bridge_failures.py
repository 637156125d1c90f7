"""Failures: what the harness reads of each, to the letter, with a small request and with a large one."""

from __future__ import annotations

import contextlib
import os
import re
import ssl
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Callable, NamedTuple

import pytest
from bundles import CLIENT, DAY, NOW, SERVER, START, Authority, Bundle, distinguished, new_key, write_side
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from fault_server import (
    HANG,
    Connection,
    FaultServer,
    Response,
    Script,
    full_backlog,
    result,
    server_context,
    unused_port,
)
from harness import call, large_call

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Conversation, StartRat

CHECK = "Check the bundle with rat-tool check."
LARGE = 8 * 1024 * 1024

sizes = pytest.mark.parametrize("size", [None, LARGE], ids=["small", "8 MiB"])


def line_of(identifier: int, size: int | None) -> bytes:
    return call(identifier, "tools/call", {"name": "t"}) if size is None else large_call(identifier, size)


# No connection


@sizes
def test_connection_refused(start_rat: StartRat, size: int | None) -> None:
    with unused_port() as port:
        rat = start_rat(f"127.0.0.1:{port}")
        rat.send(line_of(1, size))
        assert rat.error(1) == f"ratd unreachable at 127.0.0.1:{port}: connection refused"


@pytest.mark.parametrize("host", ["ratd.invalid", "a..b"])
def test_a_name_of_no_host(start_rat: StartRat, host: str) -> None:
    rat = start_rat(f"{host}:7433")
    rat.send(call(1))
    # Where no name service answers the system tells another reason.
    assert re.fullmatch(
        rf"ratd unreachable at {re.escape(host)}:7433: "
        "(no such host|temporary failure in name resolution|label empty or too long)",
        rat.error(1),
    )


def test_a_name_of_no_host_is_told_so(start_rat: StartRat) -> None:
    # What the resolver says stands in for one: tests have no name service.
    patch = """
import socket
def none(*args, **kwargs):
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
socket.getaddrinfo = none
"""
    rat = start_rat("ratd.example:7433", patch=patch)
    rat.send(call(1))
    assert rat.error(1) == "ratd unreachable at ratd.example:7433: no such host"


def test_the_next_address_of_a_name_is_tried(start_rat: StartRat, fault_server: FaultServer) -> None:
    # A name with two addresses stands for any: tests have no name service. Nobody listens at the first.
    patch = """
import socket
addresses = socket.getaddrinfo
def both(host, port, *args, **kwargs):
    return [each for one in (unused, port) for each in addresses("127.0.0.1", one, *args, **kwargs)]
socket.getaddrinfo = both
"""
    with unused_port() as port:
        rat = start_rat(f"ratd.example:{fault_server.port}", patch=f"unused = {port}{patch}")
        assert rat.call(1)["id"] == 1


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="no IPv6 here")
def test_a_server_at_an_ipv6_address(start_rat: StartRat, server_side: Path) -> None:
    server = FaultServer(server_side, "::1")
    try:
        assert server.address == f"[::1]:{server.port}"
        rat = start_rat(server.address)
        assert rat.call(1)["id"] == 1
        assert server.requests[0].field("Host") == server.address
        server.respond = lambda request: Response(503, b"", "")
        rat.send(call(2))
        assert rat.error(2) == f"ratd at [::1]:{server.port} answered HTTP 503"
    finally:
        server.close()


# A connection that fails


def read(server: FaultServer, connection: Connection) -> None:
    connection.handshake()
    server.receive(connection)


def reset_when_accepted(server: FaultServer, connection: Connection) -> None:
    connection.reset()


def closed_when_accepted(server: FaultServer, connection: Connection) -> None:
    connection.receive()


def reset_before_the_answer(server: FaultServer, connection: Connection) -> None:
    read(server, connection)
    connection.reset()


def closed_before_the_answer(server: FaultServer, connection: Connection) -> None:
    read(server, connection)


def reset_amid_the_head(server: FaultServer, connection: Connection) -> None:
    read(server, connection)
    connection.send(b"HTTP/1.1 200 OK\r\nContent-Le")
    connection.reset()


def closed_amid_the_head(server: FaultServer, connection: Connection) -> None:
    read(server, connection)
    connection.send(b"HTTP/1.1 200 OK\r\nContent-Type: appl")


def reset_amid_the_body(server: FaultServer, connection: Connection) -> None:
    read(server, connection)
    connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 10)
    connection.reset()


def cut_short(server: FaultServer, connection: Connection) -> None:
    read(server, connection)
    connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 10)


def cut_short_before_the_body(server: FaultServer, connection: Connection) -> None:
    read(server, connection)
    connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")


def chunks_cut_short(server: FaultServer, connection: Connection) -> None:
    read(server, connection)
    connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\na\r\n" + b"x" * 10 + b"\r\n")


def not_http(server: FaultServer, connection: Connection) -> None:
    read(server, connection)
    connection.send(b"SSH-2.0-OpenSSH_9.0\r\n")
    connection.wait_end()


def a_status_of_letters(server: FaultServer, connection: Connection) -> None:
    read(server, connection)
    connection.send(b"HTTP/1.1 OK 200\r\n\r\n")
    connection.wait_end()


def an_endless_head(server: FaultServer, connection: Connection) -> None:
    read(server, connection)
    connection.send(b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 17))
    connection.wait_end()


def too_many_fields(server: FaultServer, connection: Connection) -> None:
    read(server, connection)
    connection.send(b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n")
    connection.wait_end()


def refused_while_sending(server: FaultServer, connection: Connection) -> None:
    # It answers before it has read the body, then ends the connection under the writer.
    connection.handshake()
    connection.receive_head()
    closing = (("Connection", "close"),)
    connection.respond(Response(413, b"too large", "text/plain", closing))
    connection.wait_end()


UNREACHABLE = "ratd unreachable at ADDRESS: "
INVALID = "ratd at ADDRESS sent an invalid response: "
CLOSED = UNREACHABLE + "the connection closed before an answer"
RESET = UNREACHABLE + "connection reset by peer"
CUT_SHORT = INVALID + "it ended after 10 of 100 bytes"
# CPython tells a reset within TLS as an end before 3.12.3 and 3.11.9.
RESET_WITHIN_TLS = UNREACHABLE + "(connection reset by peer|the connection closed before an answer)"


@sizes
@pytest.mark.parametrize(
    ("script", "error"),
    [
        (reset_when_accepted, RESET),
        (closed_when_accepted, CLOSED),
        (reset_before_the_answer, RESET_WITHIN_TLS),
        (closed_before_the_answer, CLOSED),
        (reset_amid_the_head, RESET_WITHIN_TLS),
        (closed_amid_the_head, CLOSED),
        (reset_amid_the_body, f"{RESET_WITHIN_TLS}|{CUT_SHORT}"),
        (cut_short, CUT_SHORT),
        (cut_short_before_the_body, INVALID + "it ended after 0 of 100 bytes"),
        (chunks_cut_short, INVALID + "it ended after 10 bytes"),
        (not_http, INVALID + "not an HTTP response"),
        (a_status_of_letters, INVALID + "not an HTTP response"),
        (an_endless_head, INVALID + "not an HTTP response"),
        (too_many_fields, INVALID + "not an HTTP response"),
        (refused_while_sending, "ratd at ADDRESS answered HTTP 413: too large"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_connection_that_fails(
    conversation: Conversation, script: Callable[[FaultServer, Connection], None], error: str, size: int | None
) -> None:
    server, rat = conversation
    server.scripts = [lambda connection: script(server, connection)]
    rat.send(line_of(1, size))
    assert re.fullmatch(error.replace("ADDRESS", server.address), rat.error(1))
    # It is nothing to the next call.
    assert rat.call(2)["result"] == {"method": "ping"}


@sizes
@pytest.mark.parametrize(
    ("response", "error"),
    [
        (Response(200, result(2)), INVALID + "not a JSON-RPC response to the call (HTTP 200)"),
        (
            Response(502, b"<h1>bad gateway</h1>", "text/html"),
            "ratd at ADDRESS answered HTTP 502: <h1>bad gateway</h1>",
        ),
        (Response(202, kind=""), INVALID + "none to the call (HTTP 202)"),
        (Response(200, b"x" * (17 << 20)), INVALID + "over 16 MiB"),
    ],
    ids=["another's", "502", "202", "17 MiB"],
)
def test_an_answer_that_is_none(conversation: Conversation, response: Response, error: str, size: int | None) -> None:
    server, rat = conversation
    server.respond = lambda request: response
    rat.send(line_of(1, size))
    assert rat.error(1) == error.replace("ADDRESS", server.address)


@sizes
def test_a_chunked_answer(conversation: Conversation, size: int | None) -> None:
    server, rat = conversation

    def script(connection: Connection) -> None:
        read(server, connection)
        body = b"".join(b"1\r\n%c\r\n" % byte for byte in result(1)) + b"0\r\n\r\n"
        connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        connection.wait_end()

    server.scripts = [script]
    rat.send(line_of(1, size))
    assert rat.line() == result(1)
    server.cut_all()


# The TLS of ratd


def plain_http(connection: Connection) -> None:
    connection.receive()
    connection.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    connection.wait_end()


def ssh(connection: Connection) -> None:
    connection.send(b"SSH-2.0-OpenSSH_9.0\r\n")
    connection.wait_end()


@sizes
@pytest.mark.parametrize("script", [plain_http, ssh])
def test_a_server_that_speaks_no_tls(conversation: Conversation, script: Script, size: int | None) -> None:
    server, rat = conversation
    server.scripts = [script]
    rat.send(line_of(1, size))
    # The reason is in the words of the OpenSSL there is.
    assert re.fullmatch(
        re.escape(f"ratd at {server.address} does not answer in TLS 1.3: ")
        + "(wrong version number|record layer failure|packet length too long)",
        rat.error(1),
    )


@sizes
def test_a_server_of_an_older_tls(conversation: Conversation, bundle: Bundle, size: int | None) -> None:
    server, rat = conversation
    older = server_context(bundle.server, tls=ssl.TLSVersion.TLSv1_2)
    server.scripts = [lambda connection: connection.handshake(older)]
    rat.send(line_of(1, size))
    assert rat.error(1) == (f"ratd at {server.address} does not answer in TLS 1.3: tlsv1 alert protocol version")


@sizes
@pytest.mark.parametrize("fault", ["another bundle", "another tenant", "expired", "not yet valid", "wrong role"])
def test_a_server_certificate_that_is_refused(
    conversation: Conversation, bundle: Bundle, tmp_path: Path, fault: str, size: int | None
) -> None:
    server, rat = conversation
    mine, other, foreign = bundle.authority, Authority(), Authority("globex")
    authority, leaf, reason = {
        "another bundle": (other, other.issue("acme", SERVER), UNKNOWN_CHAIN),
        "another tenant": (foreign, foreign.issue("globex", SERVER), UNKNOWN_CHAIN),
        "expired": (mine, mine.issue("acme", SERVER, end=NOW - timedelta(hours=1)), "certificate has expired"),
        "not yet valid": (mine, mine.issue("acme", SERVER, start=NOW + DAY), "certificate is not yet valid"),
        "wrong role": (mine, mine.issue("acme", CLIENT), "(unsuitable|unsupported) certificate purpose"),
    }[fault]
    side = write_side(tmp_path / "server", "server", authority.certificate, leaf)
    # It would take this client: it is rat that refuses.
    context = server_context(side, trust=bundle.server / "ca.crt")
    server.scripts = [lambda connection: connection.handshake(context)]
    rat.send(line_of(1, size))
    assert re.fullmatch(
        rf"rat refused the certificate of ratd at {server.address}: {reason}\. {re.escape(CHECK)}", rat.error(1)
    )
    assert rat.call(2)["result"] == {"method": "ping"}


UNKNOWN_CHAIN = (
    "(unable to get local issuer certificate|self[- ]signed certificate in certificate chain"
    "|certificate signature failure)"
)


# What ratd thinks of the client


class ClientFault(NamedTuple):
    """What makes a server refuse the client, and the alert it refuses it with."""

    context: Callable[[Bundle, Path], ssl.SSLContext]
    alert: str


def trusting(**changes: object) -> Callable[[Bundle, Path], ssl.SSLContext]:
    """A server that has the key of the right CA in a certificate of its own, changed."""

    def make(bundle: Bundle, directory: Path) -> ssl.SSLContext:
        trusted = Authority(bundle.tenant, key=bundle.authority.key, **changes)  # type: ignore[arg-type]
        return server_context(bundle.server, trust=trusted.certificate)

    return make


def trusting_other(tenant: str) -> Callable[[Bundle, Path], ssl.SSLContext]:
    """A server that trusts another CA, as one that has another bundle's ca.crt."""
    return lambda bundle, directory: server_context(bundle.server, trust=Authority(tenant).certificate)


def having_revoked(bundle: Bundle, directory: Path) -> ssl.SSLContext:
    """A server with a list that has the client on it."""
    trust = directory / "ca-and-list.pem"
    revoked = bundle.authority.revoke(bundle.leaves["laptop"])
    trust.write_bytes(bundle.authority.certificate + revoked)
    return server_context(bundle.server, trust=trust, revocations=True)


REFUSALS = {
    # The alerts are those of a real verification, after the client has ended its handshake.
    "another bundle": ClientFault(trusting_other("acme"), "unknown certificate authority"),
    "another tenant": ClientFault(trusting_other("globex"), "unknown certificate authority"),
    "wrong role": ClientFault(trusting(usages=(SERVER,)), "unsupported certificate"),
    "expired": ClientFault(trusting(start=START - DAY, end=NOW - DAY / 2), "expired certificate"),
    "not yet valid": ClientFault(trusting(start=NOW + DAY), "bad certificate"),
    "not allowed": ClientFault(trusting(within=distinguished(None, "x")), "unknown certificate"),
    "revoked": ClientFault(having_revoked, "revoked certificate"),
}


def refused(address: str, alert: str) -> str:
    return f"ratd at {address} refused the TLS handshake: remote error: tls: {alert}. {CHECK}"


@sizes
@pytest.mark.parametrize("fault", REFUSALS)
def test_a_client_that_ratd_refuses(
    conversation: Conversation, bundle: Bundle, tmp_path: Path, fault: str, size: int | None
) -> None:
    server, rat = conversation
    context = REFUSALS[fault].context(bundle, tmp_path)
    server.scripts = [lambda connection: read_on(connection, context)]
    rat.send(line_of(1, size))
    assert rat.error(1) == refused(server.address, REFUSALS[fault].alert)
    assert rat.call(2)["result"] == {"method": "ping"}


def read_on(connection: Connection, context: ssl.SSLContext) -> None:
    """A server that would read a request of whom it takes."""
    with contextlib.suppress(ssl.SSLError):
        connection.handshake(context)
        pytest.fail("the server took the client")


@sizes
def test_a_client_without_a_certificate(tmp_path: Path, start_rat: StartRat, size: int | None) -> None:
    # rat always has one. It presents none to a server which takes signatures of 192 bits of security
    # and more only, which the client's P-256 key is not.
    authority = Authority(key=new_key(ec.SECP384R1()))
    leaf = authority.issue("acme", SERVER, key=new_key(ec.SECP384R1()), digest=hashes.SHA384())
    strong = Bundle(tmp_path / "strong", authority=authority, server=leaf)
    server = FaultServer(strong.server)
    try:
        context = server_context(strong.server, level=4)
        server.script = lambda connection: read_on(connection, context)
        rat = start_rat(server.address, strong.client)
        rat.send(line_of(1, size))
        assert rat.error(1) == refused(server.address, "certificate required")
    finally:
        server.close()


ALERTS = {
    40: "handshake failure",
    42: "bad certificate",
    43: "unsupported certificate",
    44: "revoked certificate",
    45: "expired certificate",
    46: "unknown certificate",
    48: "unknown certificate authority",
    49: "access denied",
    80: "internal error",
    116: "certificate required",
    # Of no name known here, in OpenSSL's words.
    51: "tlsv1 alert decrypt error",
    47: "(sslv3|ssl/tls) alert illegal parameter",
    112: "tlsv1 unrecognized name",
    120: "tlsv1 alert no application protocol",
}


@pytest.mark.parametrize("number", ALERTS)
def test_an_alert_in_the_handshake(conversation: Conversation, bundle: Bundle, number: int) -> None:
    server, rat = conversation
    context = server_context(bundle.server, alert=number)
    server.scripts = [lambda connection: connection.handshake(context)]
    rat.send(call(1))
    told = rat.error(1)
    before, _, after = refused(server.address, "\0").partition("\0")
    assert told.startswith(before)
    assert told.endswith(after)
    assert re.fullmatch(ALERTS[number], told[len(before) : -len(after)])


def test_the_alert_of_another_version_is_no_refusal(conversation: Conversation, bundle: Bundle) -> None:
    server, rat = conversation
    context = server_context(bundle.server, alert=70)
    server.scripts = [lambda connection: connection.handshake(context)]
    rat.send(call(1))
    assert rat.error(1) == (f"ratd at {server.address} does not answer in TLS 1.3: tlsv1 alert protocol version")


# A server that restarts


@sizes
def test_a_restarted_server_fails_nothing(start_rat: StartRat, server_side: Path, size: int | None) -> None:
    first = FaultServer(server_side)
    rat = start_rat(first.address)
    rat.call(1)
    first.close()
    second = FaultServer(server_side, port=first.port)
    try:
        rat.send(line_of(2, size))
        assert rat.answer()["result"] == {"method": "tools/call"}
    finally:
        second.close()


def test_a_server_that_is_down_fails_only_what_is_sent_meanwhile(start_rat: StartRat, server_side: Path) -> None:
    first = FaultServer(server_side)
    rat = start_rat(first.address)
    rat.call(1)
    first.close()
    rat.send(call(2))
    assert rat.error(2) == f"ratd unreachable at {first.address}: connection refused"
    second = FaultServer(server_side, port=first.port)
    try:
        assert rat.call(3)["id"] == 3
    finally:
        second.close()


# A time-out


def silent_when_accepted(server: FaultServer, connection: Connection) -> None:
    connection.wait_end()


def silent_when_asked(server: FaultServer, connection: Connection) -> None:
    read(server, connection)
    connection.wait_end()


def drip(connection: Connection, data: bytes) -> None:
    """Send a byte now and then, each in time for any limit of one operation."""
    pause = threading.Event()
    for byte in data * 1000:
        connection.send(bytes([byte]))
        pause.wait(0.1)


def drips_the_head(server: FaultServer, connection: Connection) -> None:
    read(server, connection)
    connection.send(b"HTTP/1.1 200 OK\r\nX: ")
    drip(connection, b"x")


def drips_the_body(server: FaultServer, connection: Connection) -> None:
    read(server, connection)
    connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    drip(connection, b" ")


def drips_chunks(server: FaultServer, connection: Connection) -> None:
    read(server, connection)
    connection.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    drip(connection, b"1\r\n \r\n")


def drips_interim_answers(server: FaultServer, connection: Connection) -> None:
    read(server, connection)
    drip(connection, b"HTTP/1.1 103 Early Hints\r\n\r\n")


def sends_on_after_the_answer(server: FaultServer, connection: Connection) -> None:
    read(server, connection)
    connection.send(b"HTTP/1.1 200 OK\r\n\r\n" + result(1))
    drip(connection, b" ")


# Seconds of the limit in these tests, and the launcher that sets it. It is 30 in truth, checked below.
SHORT = "rat.REQUEST_SECONDS = 1"
# A call that has longer than that, for what is to be answered on however slow a machine.
UNHURRIED = call("then", "tools/call", {"name": "wait_window", "arguments": {"max_seconds": 50}})


@sizes
def test_a_server_that_does_not_answer_in_time(
    start_rat: StartRat, fault_server: FaultServer, size: int | None
) -> None:
    scripts = [
        silent_when_accepted,
        silent_when_asked,
        drips_the_head,
        drips_the_body,
        drips_chunks,
        drips_interim_answers,
        sends_on_after_the_answer,
    ]
    if size is not None:
        scripts = [silent_when_asked, drips_the_body]
    fault_server.scripts = [
        lambda connection, script=each: script(fault_server, connection)  # type: ignore[misc]
        for each in scripts
    ]
    rat = start_rat(patch=SHORT)
    rat.send(*[line_of(identifier, size) for identifier in range(len(scripts))])
    for answer in rat.answers(len(scripts)):
        assert answer["error"] == {
            "code": -32050,
            "message": f"ratd at {fault_server.address} did not answer within 1s",
        }
    fault_server.wait_open(0)
    rat.send(UNHURRIED)
    assert rat.answer()["id"] == "then"
    assert rat.finish() == (0, [])


def test_a_server_that_does_not_read_in_time(start_rat: StartRat, fault_server: FaultServer) -> None:
    released = threading.Event()

    def never_reads(connection: Connection) -> None:
        connection.handshake()
        released.wait(HANG)

    fault_server.scripts = [never_reads]
    rat = start_rat(patch=SHORT)
    rat.send(large_call(1, LARGE))
    assert rat.error(1) == f"ratd at {fault_server.address} did not answer within 1s"
    released.set()
    rat.send(UNHURRIED)
    assert rat.answer()["id"] == "then"


@pytest.mark.skipif(os.name == "nt", reason="a full backlog refuses there")
def test_an_address_that_does_not_answer_in_time(start_rat: StartRat) -> None:
    with full_backlog() as address:
        rat = start_rat(address, patch=SHORT)
        rat.send(call(1))
        assert rat.error(1) == f"ratd at {address} did not answer within 1s"


# Name resolution nobody can end stands in for a name service that does not answer.
STUCK_RESOLUTION = """
import socket, sys, threading
def stuck(*args, **kwargs):
    print("msg=resolving", file=sys.stderr, flush=True)
    threading.Event().wait()
socket.getaddrinfo = stuck
"""


def test_a_name_that_does_not_resolve_in_time(start_rat: StartRat) -> None:
    rat = start_rat("ratd.example:7433", patch=SHORT + STUCK_RESOLUTION)
    rat.send(call(1), call(2))
    answers = rat.answers(2)
    assert {str(each["error"]) for each in answers} == {
        "{'code': -32050, 'message': 'ratd at ratd.example:7433 did not answer within 1s'}"
    }
    assert rat.finish() == (0, [])


def test_what_wait_window_waits_comes_on_top(start_rat: StartRat, fault_server: FaultServer) -> None:
    fault_server.respond = lambda request: None
    rat = start_rat(patch=SHORT)
    waiting = call(1, "tools/call", {"name": "wait_window", "arguments": {"max_seconds": 1}})
    rat.send(waiting, b"[" + call(2) + b"," + waiting.replace(b'"id":1', b'"id":3') + b"]", call(4))
    assert rat.error(4) == f"ratd at {fault_server.address} did not answer within 1s"
    written = {rat.line() for _ in range(2)}
    error = b'"error":{"code":-32050,"message":"ratd at %s did not answer within 2s"}}' % (
        fault_server.address.encode()
    )
    assert written == {
        b'{"jsonrpc":"2.0","id":1,' + error,
        b'[{"jsonrpc":"2.0","id":2,' + error + b',{"jsonrpc":"2.0","id":3,' + error + b"]",
    }


def test_the_time_of_a_call_starts_when_a_worker_takes_it(start_rat: StartRat, fault_server: FaultServer) -> None:
    fault_server.respond = lambda request: None
    rat = start_rat(patch=SHORT + "; rat.WORKERS = 1")
    rat.send(call(1), call(2))
    for identifier in (1, 2):
        assert rat.error(identifier) == (f"ratd at {fault_server.address} did not answer within 1s")
    # The second was posted, though its line had waited longer than the limit by then.
    assert [request.body for request in fault_server.wait_requests(2)] == [call(1), call(2)]


def test_a_late_notification_is_only_logged(start_rat: StartRat, fault_server: FaultServer) -> None:
    fault_server.respond = lambda request: None
    rat = start_rat(patch=SHORT)
    rat.send(b'{"jsonrpc":"2.0","method":"notifications/x"}')
    (record,) = rat.wait_record("relay failed")
    assert record["error"] == f"ratd at {fault_server.address} did not answer within 1s"
    assert rat.finish() == (0, [])


def test_the_limit_is_thirty_seconds_and_told_with_the_wait() -> None:
    import rat

    assert rat.REQUEST_SECONDS == 30
    waiting = call(1, "tools/call", {"name": "wait_window", "arguments": {}})
    for line, seconds in ((call(1), "30s"), (waiting, "50s")):
        posting = rat.Posting(line, rat.read_message(line), {})
        assert f"{posting.seconds:g}s" == seconds
