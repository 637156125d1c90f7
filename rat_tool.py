"""rat-tool: what a person runs around ``rat``, to issue and look at bundles, to find out why a server cannot be
reached, to configure a harness, and to see it all work.

Output is for people and stable for scripts: a line a step, ``  ok    …``, ``  warn  …`` or ``  FAIL  …``, on stdout.
Exit status: 0 when all is well, 1 when something failed, 2 on usage.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import queue
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, NamedTuple

import demo_ratd
import rat
from ratel.client import McpClient, McpToolsListError
from ratel.trace import RatelError
from ratel.transports import Rat

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType
    from typing import TextIO

# --- What is printed ----------------------------------------------------------------------------------


class Failed(Exception):
    """The command cannot do what it was asked: one sentence, for stderr, and status 1."""


class Report:
    """The lines of a command, each written at once so that a script or a person can follow.

    ``to``, ``of`` and ``more`` are two arrows and an ellipsis, as far as the encoding of the stream has them. Marks are
    coloured on a terminal only, and not with NO_COLOR in the environment (no-color.org).
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        try:
            "→←…".encode(stream.encoding or "ascii")
        except UnicodeEncodeError:
            self.to, self.of, self.more = "->", "<-", "..."
        else:
            self.to, self.of, self.more = "→", "←", "…"
        self._colored = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def ok(self, text: str) -> None:
        """A step that passed."""
        self._mark("ok", "32", text)

    def warn(self, text: str) -> None:
        """Something to know about, which fails nothing."""
        self._mark("warn", "33", text)

    def fail(self, text: str) -> None:
        """A step that failed."""
        self._mark("FAIL", "31", text)

    def detail(self, text: str) -> None:
        """More about the step before."""
        self.say(f"        {text}")

    def say(self, text: str = "") -> None:
        """A line as it is, but for what could steer a terminal: names and texts of a server are shown."""
        self._stream.write("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text) + "\n")
        self._stream.flush()

    def _mark(self, mark: str, color: str, text: str) -> None:
        if self._colored:
            # The text goes through say(): only this escape is ours.
            self._stream.write(f"  \x1b[{color}m{mark}\x1b[0m{' ' * (6 - len(mark))}")
            self.say(text)
        else:
            self.say(f"  {mark:6}{text}")


def rat_command() -> list[str]:
    """The command of rat, in absolute paths: the one beside this one, else this interpreter with rat.py or rat.pyz.

    Beside, when this is an installed or a frozen program, since that is the rat a person means; a source tree, or a
    ``python -m``, has none, and the module imported here is the one. Raises Failed for a frozen one that stands alone:
    there is no interpreter then.
    """
    frozen = getattr(sys, "frozen", False)
    started = os.path.abspath(sys.executable if frozen else sys.argv[0])
    name, extension = os.path.splitext(os.path.basename(started))
    if frozen or name == "rat-tool":
        for beside in (f"rat{extension}", "rat.exe"):
            path = os.path.join(os.path.dirname(started), beside)
            if os.path.isfile(path):
                return [path]
    if frozen:
        raise Failed(f"there is no rat beside {started}: put it there")
    archive = getattr(rat.__loader__, "archive", None)  # of the importer of zips
    return [sys.executable, os.path.abspath(archive if isinstance(archive, str) else rat.__file__)]


# --- bundle generate ----------------------------------------------------------------------------------


class _File(NamedTuple):
    path: tuple[str, ...]
    content: bytes
    mode: int


def issue_bundle(tenant: str, clients: Sequence[str]) -> list[_File]:
    """Issue a bundle in memory: the files of its server and of each client, the path of each within the bundle.

    The key of the CA is forgotten here, so nothing can be added to a bundle later: another client is another bundle.
    It leaves nobody's key to guard but each side's own. Raises Failed without the package cryptography.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError:
        raise Failed("issuing a bundle needs the package cryptography: pip install cryptography") from None

    start = datetime.now(timezone.utc).replace(microsecond=0) - timedelta(days=1)  # clocks differ
    try:
        end = start.replace(year=start.year + 10)
    except ValueError:  # the 29th of February
        end = start.replace(year=start.year + 10, day=28)

    def named(*parts: tuple[x509.ObjectIdentifier, str]) -> x509.Name:
        return x509.Name([x509.NameAttribute(kind, text) for kind, text in parts])

    def usage(signature: bool) -> x509.KeyUsage:
        return x509.KeyUsage(signature, False, False, False, False, not signature, False, False, False)

    def pem(certificate: x509.Certificate) -> bytes:
        return certificate.public_bytes(serialization.Encoding.PEM)

    def certificate(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(authority).public_key(key.public_key())
        return builder.serial_number(x509.random_serial_number()).not_valid_before(start).not_valid_after(end)

    authority = named((NameOID.ORGANIZATION_NAME, "rat CA"), (NameOID.COMMON_NAME, tenant))
    ca_key = ec.generate_private_key(ec.SECP256R1())
    identifier = x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key())
    ca = pem(
        certificate(authority, ca_key)
        .add_extension(x509.BasicConstraints(True, 0), critical=True)
        .add_extension(usage(signature=False), critical=True)
        .add_extension(identifier, critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    files = []
    sides = [("server", tenant, ExtendedKeyUsageOID.SERVER_AUTH)]
    sides += [("client", name, ExtendedKeyUsageOID.CLIENT_AUTH) for name in clients]
    for role, name, purpose in sides:
        directory = ("server",) if role == "server" else ("clients", name)
        key = ec.generate_private_key(ec.SECP256R1())
        issued = (
            certificate(named((NameOID.COMMON_NAME, name)), key)
            .add_extension(x509.BasicConstraints(False, None), critical=True)
            .add_extension(usage(signature=True), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
            .sign(ca_key, hashes.SHA256())
        )
        secret = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        files += [
            _File((*directory, "ca.crt"), ca, 0o644),
            _File((*directory, f"{role}.crt"), pem(issued), 0o644),
            _File((*directory, f"{role}.key"), secret, 0o600),
        ]
    return files


def write_bundle(files: Sequence[_File], output: str) -> list[rat.Side]:
    """Write a bundle into a new directory, and read it back as rat does: its sides, the server's first.

    Directories and files are created with their mode, never opened wider first. Raises Failed when `output` exists,
    empty or not, or cannot be written; whatever ends this early, nothing of it stays, nor a parent it made.
    """
    output = os.path.abspath(output)
    made: list[str] = []
    try:
        missing = []
        parent = os.path.dirname(output)
        while not os.path.lexists(parent) and parent != os.path.dirname(parent):
            missing.append(parent)
            parent = os.path.dirname(parent)
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):  # somebody else's, since just now
                os.mkdir(directory)
                made.append(directory)
        os.mkdir(output, 0o700)  # which tells whether it exists at the very moment it does not
        made.append(output)
        roles: dict[str, str] = {}
        for path, content, mode in files:
            place = output
            for name in path[:-1]:
                place = os.path.join(place, name)
                if not os.path.isdir(place):
                    os.mkdir(place, 0o700)
            with open(os.path.join(place, path[-1]), "xb", opener=_created_with(mode)) as file:
                file.write(content)
            roles[place] = "server" if path[0] == "server" else "client"
        return [rat.load_side(place, role) for place, role in roles.items()]
    except BaseException as error:  # an interruption, too, must leave no keys behind
        if output in made:
            shutil.rmtree(output, ignore_errors=True)
        for directory in reversed(made):
            with contextlib.suppress(OSError):
                os.rmdir(directory)
        if isinstance(error, FileExistsError) and output not in made:
            raise Failed(f"{output} exists: give a directory that does not, a bundle is never written over") from None
        if isinstance(error, OSError):
            raise Failed(f"cannot write {error.filename or output}: {rat.system_reason(error)}") from None
        raise


def _created_with(mode: int) -> Callable[[str, int], int]:
    return lambda path, flags: os.open(path, flags, mode)


def generate(report: Report, tenant: str, clients: Sequence[str], output: str) -> int:
    """``bundle generate``: write a bundle and say whom each directory is for."""
    server, *others = write_bundle(issue_bundle(tenant, clients), output)
    rows = [(os.path.join(output, "server"), "to the server")]
    rows += [(os.path.join(output, "clients", side.name), f"to client {side.name}") for side in others]
    width = max(len(place) for place, _ in rows)
    report.say(f"Bundle of tenant {server.tenant}:")
    for place, target in rows:
        report.say(f"  {place:{width}}  {target}")
    report.say(f"CA fingerprint (SHA-256): {server.ca_fingerprint}")
    report.say(f"Expires: {server.expires:%Y-%m-%d}")
    report.say("Copy each directory whole to its side, and to that side only: it holds the side's key.")
    return 0


# --- bundle inspect -----------------------------------------------------------------------------------

_PASSED = {
    "files": "ca.crt, {role}.crt and {role}.key are there, each a single PEM block of its kind",
    "permissions": "only the owner can read {role}.key",
    "key": "{role}.key is that of {role}.crt",
    "signature": "{role}.crt is signed by ca.crt, which is a CA",
    "role": "{role}.crt is a {role}'s",
    "validity": "both certificates are valid now",
    "names": "tenant and {role} have plain names",
}

YEAR_DAYS = 365


def role_of(path: str) -> str:
    """Which side a directory looks like, by the names of its files: "server", or "client" in any doubt."""
    with contextlib.suppress(OSError):
        names = set(os.listdir(path))
        if names & {"server.crt", "server.key"} and not names & {"client.crt", "client.key"}:
            return "server"
    return "client"


def inspect(report: Report, paths: Sequence[str]) -> int:
    """``bundle inspect``: the checks of rat on each directory, what it is, and whether they are of one bundle."""
    sides = [_inspect_one(report, path) for path in paths]
    sound = [side for side in sides if side is not None]
    failed = len(sound) < len(sides)
    if len(sound) > 1:
        bundles: dict[str, list[rat.Side]] = {}
        for side in sound:
            bundles.setdefault(side.ca_fingerprint, []).append(side)
        report.say("together")
        if len(bundles) == 1:
            report.ok(f"one bundle: the {len(sound)} directories have the same CA")
        else:
            failed = True
            report.fail(f"{len(bundles)} bundles: sides with different CAs refuse each other")
            for fingerprint, members in bundles.items():
                places = ", ".join(side.path for side in members)
                report.detail(f"CA {fingerprint[:16]}{report.more} of tenant {members[0].tenant}: {places}")
    return 1 if failed else 0


def _inspect_one(report: Report, path: str) -> rat.Side | None:
    role = role_of(path)
    passed: list[str] = []

    def tell(check: str) -> None:
        passed.append(check)
        text = _PASSED[check].format(role=role)
        if check == "permissions" and os.name == "nt":
            text = "not checked on Windows, where access control lists decide"
        report.ok(f"{check}: {text}")

    report.say(path)
    try:
        side = rat.load_side(path, role, tell)
    except rat.BundleError as error:
        report.fail(f"{rat.CHECKS[len(passed)]}: {error}")
        return None
    days = (side.expires - datetime.now(timezone.utc)).days
    report.detail(f"{_told(side)}")
    report.detail(f"CA fingerprint (SHA-256): {side.ca_fingerprint}")
    report.detail(f"expires {side.expires:%Y-%m-%d}, in {days} days")
    _warn_of_expiry(report, side)
    return side


def _told(side: rat.Side) -> str:
    return f"the server of tenant {side.tenant}" if side.role == "server" else f"client {side.name} of {side.tenant}"


def _warn_of_expiry(report: Report, side: rat.Side) -> None:
    if (side.expires - datetime.now(timezone.utc)).days < YEAR_DAYS:
        report.warn("less than a year remains: issue another bundle, and hand out its directories, before then")


# --- check --------------------------------------------------------------------------------------------

# Seconds for a TCP connection: a machine that is there answers within its round trip, or one repetition of it.
CONNECT_SECONDS = 5.0
# Seconds for each request: as long as rat gives a call, so that what passes here passes there.
REQUEST_SECONDS = float(rat.REQUEST_SECONDS)

_ADVICE = " Check the bundle with rat-tool check."
_PARTIAL_CHAIN = 0x80000  # X509_V_FLAG_PARTIAL_CHAIN: ssl names it from Python 3.10 on
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME
# OpenSSL's codes (X509_V_ERR_*) of a certificate that is not of a CA trusted.
_OF_ANOTHER_CA = frozenset({7, 18, 19, 20, 21})
_NOT_YET_VALID, _EXPIRED, _WRONG_PURPOSE = 9, 10, 26

# What the server's refusal means to the client, by the words of rat's sentence.
_ALERTS = {
    "unknown certificate authority": "The server trusts the CA of another bundle: give both sides directories of one.",
    "bad certificate": "The server does not take this client's certificate: its bundle is another, or its clock wrong.",
    "certificate required": "No certificate reached the server: something between ends TLS and begins it anew.",
    "expired certificate": "The server takes this client's certificate, or its CA, for expired; here both are valid "
    "until {expires:%Y-%m-%d}. Compare the clocks.",
    "revoked certificate": "Whoever runs the server revoked this client: ask for another bundle.",
    "unsupported certificate": "The server does not take this client's certificate for a client's: its ca.crt is not "
    "that of this bundle.",
}
_OTHER_ALERT = "Ask whoever runs the server for what it logged."


class _Step(Exception):
    """A step of the check failed."""

    def __init__(self, step: str, text: str) -> None:
        super().__init__(text)
        self.step = step


def check(report: Report, address: rat.Address, bundle: str) -> int:
    """``check``: try what rat does, step by step, and say at the first that fails which side is wrong and what to do.

    It calls no tool. MCP is spoken as ratel's client does, a standard one, so that the server is proved for it.
    """
    try:
        side = _check_files(report, bundle)
        proxy = _check_network(report, address)
        version = _check_tls(report, address, side, proxy)
        if version is not None:
            _check_without_session(address, side, proxy, version)
        _check_mcp(report, address, bundle)
    except _Step as failed:
        report.fail(f"{failed.step}: {failed}")
        report.say()
        report.say(f"check failed: {failed.step}")
        return 1
    report.say()
    report.say(f"ratd at {address.text} serves this client.")
    return 0


def _check_files(report: Report, bundle: str) -> rat.Side:
    try:
        side = rat.load_side(bundle)
    except rat.BundleError as error:
        raise _Step("Files", str(error)) from None
    report.ok(f"Files: {_told(side)}, valid until {side.expires:%Y-%m-%d}")
    _warn_of_expiry(report, side)
    return side


def _check_network(report: Report, address: rat.Address) -> rat.Proxy | None:
    try:
        proxy = rat.environment_proxy(address)
    except ValueError as error:
        raise _Step("Network", str(error)) from None
    target = address if proxy is None else rat.Address.parse(proxy.address)
    what = target.text if proxy is None else f"the proxy {proxy.address} of HTTPS_PROXY"
    started = time.monotonic()
    try:
        _connected(target).close()
    except socket.timeout:
        raise _Step(
            "Network",
            f"no answer from {what} within {CONNECT_SECONDS:g} s: the machine is down, or a firewall is between",
        ) from None
    except OSError as error:
        reason = rat.system_reason(error)
        advice = {
            "connection refused": "Nothing listens there: the server is down, or the port is another.",
            "no such host": "Check the name, and that this machine can resolve it.",
        }.get(reason, "Check the address, and this machine's way to it.")
        raise _Step("Network", f"cannot connect to {what}: {reason}. {advice}") from None
    report.ok(f"Network: connected to {what} in {(time.monotonic() - started) * 1000:.1f} ms")
    return proxy


def _post(
    ratd: rat.Ratd, message: Mapping[str, object], version: str | None, exchange: rat.Exchange
) -> Mapping[str, object] | rat.Answer:
    """Post a message as rat does: the JSON-RPC response to it, or the answer that is none. Raises rat.Failure."""
    line = json.dumps(message).encode()
    headers = rat.request_headers(rat.read_message(line), version)
    exchange.body = line
    late = threading.Timer(REQUEST_SECONDS, exchange.end)
    late.daemon = True
    late.start()
    answer = rat.Answer(0, False, b"")
    try:
        for answer in ratd.post(exchange, headers, REQUEST_SECONDS):
            with contextlib.suppress(ValueError):
                response = rat.parse_json(answer.body)
                if isinstance(response, dict) and response.get("id") == message.get("id") and "id" in message:
                    return response
        return answer
    except rat.Failure:
        if exchange.ended:
            raise rat.Failure(ratd.late(exchange.stage, REQUEST_SECONDS)) from None
        raise
    finally:
        late.cancel()


def _check_tls(report: Report, address: rat.Address, side: rat.Side, proxy: rat.Proxy | None) -> str | None:
    """TLS, and a request: a server's refusal shows on the first read after the handshake only, since the client's part
    of it ends before the server looks at the certificate (RFC 8446, section 2).

    The request is the initialize of an older protocol. Returns the version that it negotiated, None for a server that
    speaks newer ones alone, or no MCP.
    """
    exchange = rat.Exchange()
    message = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "initialize",
        "params": {
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "clientInfo": {"name": "rat-tool", "version": rat.__version__},
        },
    }
    accepted = "TLS: both sides accept each other"
    try:
        answer = _post(rat.Ratd(address, side, proxy), message, None, exchange)
    except rat.Failure as failure:
        text = str(failure)
        if exchange.stage in ("proxy", "connect"):
            raise _Step("Network", text) from None
        if explained := _explained(failure, address, side, proxy, exchange.stage):
            raise _Step("TLS", f"{text.replace(_ADVICE, '').rstrip('.')}. {explained}") from None
        report.ok(accepted)
        raise _Step("MCP", text) from None
    report.ok(accepted)
    result = answer.get("result") if isinstance(answer, dict) else None
    version = result.get("protocolVersion") if isinstance(result, dict) else None
    return version if isinstance(version, str) else None


def _explained(
    failure: rat.Failure, address: rat.Address, side: rat.Side, proxy: rat.Proxy | None, stage: str
) -> str | None:
    """Which side is wrong and what to do, for a failure of TLS; None for one of what comes after."""
    fault = _certificate_fault(failure)
    if fault is not None:
        return _explained_certificate(fault.verify_code, side, _presented(address) if proxy is None else None)
    text = str(failure)
    if alert := re.search(r"remote error: tls: (.*?)\.(?: |$)", text):
        return _ALERTS.get(alert[1], _OTHER_ALERT).format(expires=side.expires)
    if "does not answer in TLS 1.3" in text:
        if "protocol version" in text or "unsupported protocol" in text:
            return "It speaks an older TLS alone: rat wants 1.3, as ratd does."
        if proxy is None and _answers_plain_http(address):
            return "It answers plain HTTP: this is the port of a server without TLS."
        return "Another kind of service listens there: check the port."
    if stage == "handshake":
        return "It takes no part in a TLS handshake: another kind of service, or a server that hangs."
    return None


def _certificate_fault(failure: BaseException) -> ssl.SSLCertVerificationError | None:
    """The refusal of the server's certificate that a failure tells of, if it is one."""
    cause = failure.__cause__
    return cause if isinstance(cause, ssl.SSLCertVerificationError) else None


def _explained_certificate(code: int, side: rat.Side, presented: Mapping[str, object] | None) -> str:
    issuer = _subject((presented or {}).get("issuer"))
    tenant = issuer.get("commonName")
    if code in _OF_ANOTHER_CA:
        if tenant is None:
            return "The server is not of this client's bundle: give both sides directories of one bundle."
        if issuer.get("organizationName") != "rat CA":
            return f"Its certificate is of {tenant}, and of no bundle: check the address."
        if tenant == side.tenant:
            return f"The server is of another bundle of tenant {tenant}: give both sides directories of one bundle."
        return (
            f"The server is of tenant {tenant}, this client of {side.tenant}: check the address, or ask for a client "
            "directory of that tenant."
        )
    if code == _EXPIRED:
        when = _date((presented or {}).get("notAfter"))
        return f"The server's certificate expired{f' on {when}' if when else ''}: issue another bundle, for both sides."
    if code == _NOT_YET_VALID:
        when = _date((presented or {}).get("notBefore"))
        until = f" before {when}" if when else " yet"
        return f"The server's certificate is not valid{until}: compare the clocks of both machines."
    if code == _WRONG_PURPOSE:
        return "The server presents a certificate that is not a server's: give it the server directory of the bundle."
    return "Do not work around it: this may be another machine."


def _subject(name: object) -> dict[str, str]:
    """A name of a certificate, as the ssl module decodes it, by its parts."""
    return {kind: text for part in name for kind, text in part} if isinstance(name, tuple) else {}


def _date(time_text: object) -> str | None:
    if not isinstance(time_text, str):
        return None
    return f"{datetime.fromtimestamp(ssl.cert_time_to_seconds(time_text), timezone.utc):%Y-%m-%d}"


def _presented(address: rat.Address) -> Mapping[str, object] | None:
    """The certificate that a server presents, decoded, whoever issued it and whatever is wrong with it.

    The ssl module decodes only what it verified. So it is fetched unverified, and verified by itself: trusted as it
    is, at any time. Nothing but the words of the check comes of it, and a stranger is presented no certificate.
    """
    anything, trusting = (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) for _ in range(2))
    for context in (anything, trusting):
        context.check_hostname = False
    anything.verify_mode = ssl.CERT_NONE
    trusting.verify_flags |= _PARTIAL_CHAIN | _NO_CHECK_TIME
    try:
        with _connected(address) as plain, anything.wrap_socket(plain) as connection:
            trusting.load_verify_locations(cadata=connection.getpeercert(binary_form=True) or b"")
        with _connected(address) as plain, trusting.wrap_socket(plain) as connection:
            return connection.getpeercert()
    except (OSError, ValueError):
        return None


def _connected(address: rat.Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), CONNECT_SECONDS)


def _answers_plain_http(address: rat.Address) -> bool:
    with contextlib.suppress(OSError), _connected(address) as plain:
        plain.sendall(b"GET /mcp HTTP/1.0\r\n\r\n")
        return plain.recv(5) == b"HTTP/"
    return False


def _check_without_session(address: rat.Address, side: rat.Side, proxy: rat.Proxy | None, version: str) -> None:
    """A request after initialize, as a harness of an older protocol sends it and rat relays it: without a session.

    ratel's client keeps sessions, so it would not notice a server that such a harness cannot be served by.
    """
    ratd = rat.Ratd(address, side, proxy)
    message = {"jsonrpc": "2.0", "id": 2, "method": "tools/list", "params": {}}
    try:
        answer = _post(ratd, message, version, rat.Exchange())
    except rat.Failure as failure:
        raise _Step("MCP", str(failure)) from None
    if isinstance(answer, rat.Answer):
        text = str(ratd.no_answer(answer, called=True))
        if answer.status in (400, 404):
            text += ". It keeps sessions (Mcp-Session-Id), which rat does not: run the server stateless."
        raise _Step("MCP", text)


def _check_mcp(report: Report, address: rat.Address, bundle: str) -> None:
    """MCP, and the tools, as a standard client has them."""
    with contextlib.closing(McpClient(Rat(address, bundle), timeout=REQUEST_SECONDS)) as client:
        try:
            client.connect()
        except RatelError as error:
            advice = " There is no MCP at /mcp." if getattr(error, "status", None) in (404, 405) else ""
            raise _Step("MCP", f"{error}{'.' if advice else ''}{advice}") from None
        report.ok(f"MCP: {_named(client.server_info)}, protocol {client.protocol_version}")
        _wrapped(report, client.instructions or "", "")
        try:
            tools = client.list_tools()
        except McpToolsListError as error:
            raise _Step("Tools", f"{error}: its listing does not end. Tell whoever runs the server.") from None
        except RatelError as error:
            raise _Step("Tools", str(error)) from None
        report.ok(f"Tools: {len(tools) or 'none'}")
        for tool in tools:
            description = tool.get("description")
            named = f"{tool['name']}: {description}" if isinstance(description, str) and description else tool["name"]
            _wrapped(report, str(named), "  ")


def _wrapped(report: Report, text: str, indent: str) -> None:
    """A text of the server in lines of a hundred characters, whatever its own were."""
    for line in textwrap.wrap(
        " ".join(text.split()), 92, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ):
        report.detail(line)


# --- config -------------------------------------------------------------------------------------------

# The name of the entry; whoever has several servers renames it.
ENTRY_NAME = "ratd"


class _Form(NamedTuple):
    """How a harness is told of a server: where it reads it, and how an entry is written.

    `reads` are marks in a string that the harness replaces, for which its format knows no escape.
    """

    place: str
    render: Callable[[Sequence[str], bool], str]
    reads: tuple[str, ...] = ()


def _json(value: object, ascii_only: bool) -> str:
    return json.dumps(value, indent=2, ensure_ascii=ascii_only)


def _quoted(text: str, ascii_only: bool) -> str:
    """A string as TOML 1.0 (basic string) and YAML 1.2 (double-quoted) write it alike: what neither would take as it
    is, is escaped by its code point, with four or eight digits."""
    escaped = []
    for letter in text:
        if letter in '"\\':
            escaped.append("\\" + letter)
        elif letter.isprintable() and not (ascii_only and ord(letter) > 126):
            escaped.append(letter)
        else:
            escaped.append(f"\\u{ord(letter):04x}" if ord(letter) < 0x10000 else f"\\U{ord(letter):08x}")
    return '"' + "".join(escaped) + '"'


def _list(texts: Sequence[str], ascii_only: bool) -> str:
    return "[" + ", ".join(_quoted(text, ascii_only) for text in texts) + "]"


def _mcp_servers(command: Sequence[str], ascii_only: bool) -> str:
    return _json({"mcpServers": {ENTRY_NAME: {"command": command[0], "args": command[1:]}}}, ascii_only)


def _vscode(command: Sequence[str], ascii_only: bool) -> str:
    entry = {"type": "stdio", "command": command[0], "args": command[1:]}
    return _json({"servers": {ENTRY_NAME: entry}}, ascii_only)


def _codex(command: Sequence[str], ascii_only: bool) -> str:
    # A call may take as long as rat gives it: 30 s and the 50 of a wait. Codex gives 60 unless told.
    return (
        f"[mcp_servers.{ENTRY_NAME}]\n"
        f"command = {_quoted(command[0], ascii_only)}\n"
        f"args = {_list(command[1:], ascii_only)}\n"
        "tool_timeout_sec = 90"
    )


def _zed(command: Sequence[str], ascii_only: bool) -> str:
    entry = {"source": "custom", "command": command[0], "args": command[1:], "env": {}}
    return _json({"context_servers": {ENTRY_NAME: entry}}, ascii_only)


def _opencode(command: Sequence[str], ascii_only: bool) -> str:
    entry = {"type": "local", "command": command, "enabled": True}
    return _json({"$schema": "https://opencode.ai/config.json", "mcp": {ENTRY_NAME: entry}}, ascii_only)


def _goose(command: Sequence[str], ascii_only: bool) -> str:
    return (
        "extensions:\n"
        f"  {ENTRY_NAME}:\n"
        "    enabled: true\n"
        f"    name: {ENTRY_NAME}\n"
        "    type: stdio\n"
        f"    cmd: {_quoted(command[0], ascii_only)}\n"
        f"    args: {_list(command[1:], ascii_only)}\n"
        "    envs: {}\n"
        "    timeout: 300"
    )


# Written after the documentation of each: code.claude.com/docs/en/mcp (.mcp.json, whose ${NAME} is replaced), Codex's
# docs/config.md (mcp_servers, STDIO), code.visualstudio.com/docs/agents/reference/mcp-configuration (${…} as well),
# Zed's docs/src/ai/mcp.md (Custom Servers), opencode.ai/docs/mcp-servers (Local; {env:…} and {file:…} are replaced),
# goose's documentation/docs/guides/config-files.md (Extensions Configuration).
HARNESSES: Mapping[str, _Form] = {
    "mcpServers": _Form(
        ".mcp.json of Claude Code, claude_desktop_config.json, .cursor/mcp.json, cline_mcp_settings.json",
        _mcp_servers,
        ("${",),
    ),
    "vscode": _Form(".vscode/mcp.json", _vscode, ("${",)),
    "codex": _Form("~/.codex/config.toml", _codex),
    "zed": _Form("settings.json of Zed", _zed),
    "opencode": _Form("opencode.json", _opencode, ("{env:", "{file:")),
    "goose": _Form("~/.config/goose/config.yaml", _goose),
}


def harness_entry(whole: Sequence[str], harness: str, ascii_only: bool) -> str:
    """The entry of a harness that starts a command line, as its format writes it.

    Raises Failed for a path that is no text: no configuration file can hold it.
    """
    for part in whole:
        try:
            part.encode()
        except UnicodeEncodeError:
            shown = part.encode(errors="backslashreplace").decode()
            raise Failed(f"no configuration file can hold the path {shown}: rename it to text in UTF-8") from None
    return HARNESSES[harness].render(whole, ascii_only)


def config(report: Report, address: rat.Address, bundle: str, log_level: str, harness: str, command: str | None) -> int:
    """``config``: the entry on stdout, and nothing else there; where it goes, on stderr."""
    side = rat.load_side(bundle)
    start = rat_command() if command is None else [os.path.abspath(command)]
    if command is not None and not os.path.isfile(start[0]):
        raise Failed(f"there is no {start[0]}: --command takes the path of rat")
    # The text of a file, not lines of a report: it goes out as it is, in an encoding that holds it.
    ascii_only = not (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf8")
    whole = [*start, "--server", address.text, "--bundle", os.path.abspath(bundle)]
    if log_level != "info":
        whole += ["--log-level", log_level]
    print(harness_entry(whole, harness, ascii_only), flush=True)
    form = HARNESSES[harness]
    report.say(f"rat-tool: paste it into {form.place}")
    for part in whole:
        if any(mark in part for mark in form.reads):
            report.warn(f"the program replaces what it takes for a variable in {part}: rename that path")
    _warn_of_expiry(report, side)
    return 0


# --- demo ---------------------------------------------------------------------------------------------

DEMO_SECONDS = 30.0
_TEXT = "Written and read over mutual TLS.\n"
_MODERN_META = {
    demo_ratd.VERSION_META: rat.MODERN,
    demo_ratd.CAPABILITIES_META: {},
    demo_ratd.CLIENT_META: {"name": "rat-tool", "version": rat.__version__},
}


class Harness:
    """rat as a harness has it: a process that reads messages on stdin and writes answers on stdout, lines each."""

    def __init__(self, address: str, bundle: str) -> None:
        self._process = subprocess.Popen(
            [*rat_command(), "--server", address, "--bundle", bundle, "--log-level", "error"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="answers of rat", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(b"")

    def send(self, *messages: Mapping[str, object]) -> None:
        """Write messages, one a line. Raises Failed when rat is gone."""
        assert self._process.stdin is not None
        try:
            for message in messages:
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise Failed("rat ended, its last words are above") from None

    def receive(self) -> Mapping[str, object]:
        """The next answer. Raises Failed when none comes."""
        try:
            line = self._answers.get(timeout=DEMO_SECONDS)
        except queue.Empty:
            raise Failed(f"rat did not answer within {DEMO_SECONDS:g} s") from None
        if not line:
            raise Failed("rat ended, its last words are above")
        answer: Mapping[str, object] = json.loads(line)
        return answer

    def close(self) -> None:
        """Leave, as a harness does: rat ends with its input. What does not is killed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()


class _Demonstration:
    """The conversation of the demo: every part shows something, and fails where it does not come out."""

    def __init__(self, report: Report, harness: Harness, server: demo_ratd.DemoRatd) -> None:
        self._report = report
        self._harness = harness
        self._server = server
        self._identifier = 0

    def sent(self, text: str) -> None:
        self._report.say(f"  {self._report.to} {text}")

    def received(self, text: str, started: float) -> None:
        self._report.say(f"  {self._report.of} {text:<66} {(time.monotonic() - started) * 1000:7.1f} ms")

    def noted(self, text: str) -> None:
        self._report.say(f"    {text}")

    def request(self, method: str, params: Mapping[str, object]) -> dict[str, object]:
        self._identifier += 1
        return {"jsonrpc": "2.0", "id": self._identifier, "method": method, "params": params}

    def call(self, shown: str, method: str, **params: object) -> tuple[dict[str, object], float]:
        """Send a request and read its answer: the result, and when it was sent."""
        message = self.request(method, params)
        self.sent(shown)
        started = time.monotonic()
        self._harness.send(message)
        answer = self._harness.receive()
        result = answer.get("result")
        if answer.get("id") != message["id"] or not isinstance(result, dict):
            raise Failed(f"{method} was answered {json.dumps(answer)}")
        return result, started

    def tool(self, shown: str, name: str, arguments: Mapping[str, object], **more: object) -> str:
        """Call a tool and show its text."""
        result, started = self.call(f"tools/call {shown}", "tools/call", name=name, arguments=arguments, **more)
        text = _text_of(result)
        if result.get("isError"):
            raise Failed(f"the tool {name} failed: {text}")
        self.received(text.strip(), started)
        return text

    def older_protocol(self) -> None:
        result, started = self.call(
            "initialize, protocol 2025-11-25",
            "initialize",
            protocolVersion="2025-11-25",
            capabilities={},
            clientInfo={"name": "rat-tool", "version": rat.__version__},
        )
        self.received(f"{_named(result.get('serverInfo'))}, protocol {result.get('protocolVersion')}", started)
        self.sent("notifications/initialized")
        self._harness.send({"jsonrpc": "2.0", "method": "notifications/initialized"})
        result, started = self.call("tools/list", "tools/list")
        self.received(", ".join(_tool_names(result)), started)
        self.tool("write_file hello.txt", "write_file", {"path": "hello.txt", "content": _TEXT})
        if self.tool("read_file hello.txt", "read_file", {"path": "hello.txt"}) != _TEXT:
            raise Failed("the file did not come back as it was written")

    def newer_protocol(self) -> None:
        result, started = self.call("server/discover, protocol 2026-07-28", "server/discover", _meta=_MODERN_META)
        meta = result.get("_meta")
        info = meta.get(demo_ratd.SERVER_META) if isinstance(meta, dict) else None
        versions = result.get("supportedVersions")
        self.received(f"{_named(info)}, protocol {', '.join(versions if isinstance(versions, list) else [])}", started)
        self.tool("read_file hello.txt", "read_file", {"path": "hello.txt"}, _meta=_MODERN_META)
        # Not just the last: the notification before has no answer, and may be received at any time.
        request = [each for each in self._server.requests if each.field("Mcp-Method") == "tools/call"][-1]
        self.noted("the server received, beside the message:")
        for name in ("Mcp-Protocol-Version", "Mcp-Method", "Mcp-Name"):
            value = request.field(name)
            if value is None:
                raise Failed(f"the server did not receive {name}")
            self.noted(f"  {name}: {value}")

    def at_once(self, count: int, seconds: float) -> None:
        arguments = {"name": "wait", "arguments": {"seconds": seconds}}
        messages = [self.request("tools/call", arguments) for _ in range(count)]
        self.sent(f"tools/call wait {seconds:g} s, {count} times at once")
        started = time.monotonic()
        self._harness.send(*messages)
        answers = [self._harness.receive() for _ in messages]
        took = time.monotonic() - started
        if {answer.get("id") for answer in answers if "result" in answer} != {each["id"] for each in messages}:
            raise Failed("not every call got its answer")
        if took >= count * seconds:
            raise Failed(f"{count} calls took {took:.1f} s: they ran one after the other")
        self.received(f"{count} answers, where one after the other takes {count * seconds:g} s", started)

    def cancellation(self) -> None:
        message = self.request("tools/call", {"name": "wait", "arguments": {"seconds": 60}})
        line = json.dumps(message).encode()
        self.sent("tools/call wait 60 s")
        self._harness.send(message)
        if not self._server.wait_until(lambda server: any(each.body == line for each in server.requests), DEMO_SECONDS):
            raise Failed("the server did not receive the call")
        self.sent("notifications/cancelled")
        started = time.monotonic()
        cancel = {"requestId": message["id"], "reason": "shown"}
        self._harness.send({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": cancel})
        if not self._server.wait_until(lambda server: message["id"] in server.canceled, DEMO_SECONDS):
            raise Failed("the server did not see the call canceled")
        took = (time.monotonic() - started) * 1000
        # The answer to a later call shows that nothing was written for the canceled one.
        self.call("ping", "ping")
        self.noted(f"the server saw call {message['id']} canceled after {took:.1f} ms, and rat wrote no answer to it")

    def refusal(self, bundle: str) -> None:
        message = self.request("initialize", {})
        self.sent("initialize")
        started = time.monotonic()
        self._harness.send(message)
        error = self._harness.receive().get("error")
        text = str(error.get("message")) if isinstance(error, dict) else ""
        if not text.startswith(f"rat refused the certificate of ratd at {self._server.address}: "):
            raise Failed(f"rat did not refuse a server of another bundle: {text}")
        self.received(f"error {rat.ERROR_CODE}:", started)
        self.noted(text)
        checked = io.StringIO()
        check(Report(checked), rat.Address.parse(self._server.address), bundle)
        explained = re.search(r"  FAIL  TLS: .*?\. (.*)", checked.getvalue())
        if explained is None:
            raise Failed("rat-tool check did not find the fault")
        self.noted(f"rat-tool check: {explained[1]}")


def _text_of(result: Mapping[str, object]) -> str:
    content = result.get("content")
    if isinstance(content, list) and content and isinstance(content[0], dict):
        return str(content[0].get("text"))
    return json.dumps(result)


def _named(info: object) -> str:
    told = [info.get(key) for key in ("name", "version")] if isinstance(info, dict) else []
    return " ".join(str(part) for part in told if part) or "a server without a name"


def _tool_names(result: Mapping[str, object]) -> list[str]:
    tools = result.get("tools")
    return [str(tool.get("name")) for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []


@contextlib.contextmanager
def _demo_server(place: str, name: str) -> Iterator[tuple[demo_ratd.DemoRatd, str]]:
    """A server of a bundle of its own, and the client directory of that bundle."""
    bundle = os.path.join(place, name)
    server_side, client_side = write_bundle(issue_bundle("demo", ["harness"]), bundle)
    files = os.path.join(place, f"{name}-files")
    os.mkdir(files, 0o700)
    with demo_ratd.DemoRatd(server_side, files, keep_bodies=True) as server:
        yield server, client_side.path


def demo(report: Report, keep: bool) -> int:
    """``demo``: the whole project at work on this machine, in a conversation shown line by line."""
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(tempfile.TemporaryDirectory(prefix="rat-demo-"))
        server, client = stack.enter_context(_demo_server(place, "bundle"))
        stranger, _ = stack.enter_context(_demo_server(place, "another"))
        # Started together: that of the last part loads while the others talk.
        harness = Harness(server.address, client)
        stack.callback(harness.close)
        astray = Harness(stranger.address, client)
        stack.callback(astray.close)
        report.say(
            "A harness (→ what it sends, ← what it reads), rat, and a server that admits nobody without a client"
        )
        report.say("certificate: all on this machine, over mutual TLS, with bundles made for this run.")
        report.say()
        report.say(f"rat --server {server.address} --bundle {client}")
        talk = _Demonstration(report, harness, server)
        talk_astray = _Demonstration(report, astray, stranger)
        for title, part in (
            ("An older protocol, negotiated once", talk.older_protocol),
            ("A newer protocol, told in every message", talk.newer_protocol),
            ("Ten calls at once", lambda: talk.at_once(10, 0.2)),
            ("A call canceled", talk.cancellation),
            ("A server of another bundle", lambda: talk_astray.refusal(client)),
        ):
            report.say()
            report.say(title)
            part()
        report.say()
        if keep:
            report.say(
                "The server stays up, until Ctrl-C, for this entry of a harness (rat-tool config has other forms):"
            )
            report.say()
            whole = [*rat_command(), "--server", server.address, "--bundle", client]
            for line in harness_entry(whole, "mcpServers", ascii_only=True).splitlines():
                report.say(line)
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    time.sleep(1)  # until a signal; on Windows a longer wait is deaf to Ctrl-C
            return 0
    report.say(
        "Shown: both protocols, ten calls at once, a call canceled, a server refused, nothing left behind "
        f"({time.monotonic() - started:.1f} s)."
    )
    return 0


# --- Command line -------------------------------------------------------------------------------------


def _name(text: str) -> str:
    """The name of a tenant or a client, as an argument."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,32}", text):
        raise argparse.ArgumentTypeError(f"expected 1 to 32 letters, digits, _ or -, not {text!r}")
    return text


class _Clients(argparse.Action):
    """Collects the names of clients, and refuses one that some file system could not tell from another."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        names: list[str] = getattr(namespace, self.dest) or []
        for name in names:
            if name.lower() == str(values).lower():
                raise argparse.ArgumentError(self, f"{name} and {values} would be one directory")
        setattr(namespace, self.dest, [*names, str(values)])


def _parser() -> rat.FlagParser:
    parser = rat.FlagParser(
        prog="rat-tool",
        allow_abbrev=False,
        description="Issue and inspect bundles, find out why a server cannot be reached, configure harnesses.",
        epilog="example: rat-tool demo",
    )
    parser.add_argument("--version", action=rat.PrintVersion, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(
        under: argparse._SubParsersAction[rat.FlagParser], name: str, summary: str, needs: str, example: str
    ) -> rat.FlagParser:
        return under.add_parser(
            name,
            allow_abbrev=False,
            help=summary[0].lower() + summary[1:].rstrip("."),
            description=f"{summary} {needs}",
            epilog=f"example: {example}",
        )

    bundle = commands.add_parser(
        "bundle",
        allow_abbrev=False,
        help="issue and inspect bundles",
        description="Issue and inspect bundles: the certificates and keys of a server and of its clients.",
        epilog="example: rat-tool bundle inspect ~/bundle/clients/laptop",
    ).add_subparsers(dest="bundle_command", metavar="COMMAND", required=True)

    issuing = command(
        bundle,
        "generate",
        "Issue a bundle: a CA whose key is thrown away, the directory of its server, and one for each client.",
        "It needs the package cryptography, and a DIR that does not exist.",
        "rat-tool bundle generate --tenant acme --client laptop --client build --output bundle",
    )
    issuing.add_argument("--tenant", required=True, type=_name, metavar="NAME", help="whom the server is for")
    issuing.add_argument(
        "--client", required=True, type=_name, action=_Clients, metavar="NAME", help="a client; give it once for each"
    )
    issuing.add_argument("--output", required=True, metavar="DIR", help="where to write it; must not exist")

    inspecting = command(
        bundle,
        "inspect",
        "Check directories of bundles, of either side, as rat does, and tell what they are and whether they belong "
        "together.",
        "It needs nothing but the directories: no server, no network.",
        "rat-tool bundle inspect bundle/server bundle/clients/laptop",
    )
    inspecting.add_argument("directories", nargs="+", metavar="DIR", help="the directory of a server or of a client")

    checking = command(
        commands,
        "check",
        "Try to reach a server as rat does, step by step, and say at the first that fails which side is wrong.",
        "It needs the command line of rat in the harness, with rat-tool check in place of rat, and calls no tool.",
        "rat-tool check --server ratd.example:7433 --bundle ~/bundle/clients/laptop",
    )
    rat.add_flags(checking)

    configuring = command(
        commands,
        "config",
        "Print the entry of a harness that starts rat for a server, ready to paste.",
        "It needs a client directory that passes the checks of rat; the server is not contacted.",
        "rat-tool config --server ratd.example:7433 --bundle ~/bundle/clients/laptop --harness codex",
    )
    rat.add_flags(configuring)
    configuring.add_argument(
        "--harness",
        choices=sorted(HARNESSES),
        default="mcpServers",
        metavar="NAME",
        help=f"{', '.join(HARNESSES)} (default: mcpServers, of Claude Code, Claude Desktop, Cursor and Cline)",
    )
    configuring.add_argument(
        "--command", dest="rat", metavar="PATH", help="the rat to start (default: that of rat-tool)"
    )

    showing = command(
        commands,
        "demo",
        "Show rat at work: a harness, rat and a server over mutual TLS, on this machine.",
        "It needs the package cryptography; nothing is prepared before, and nothing is left after.",
        "rat-tool demo",
    )
    showing.add_argument(
        "--keep", action="store_true", help="leave the server up, until Ctrl-C, and print the entry of a harness for it"
    )
    return parser


def _run(given: argparse.Namespace) -> int:
    report = Report(sys.stdout)
    if given.command == "bundle":
        if given.bundle_command == "generate":
            return generate(report, given.tenant, given.client, given.output)
        return inspect(report, given.directories)
    if given.command == "check":
        return check(report, given.server, given.bundle)
    if given.command == "config":
        return config(Report(sys.stderr), given.server, given.bundle, given.log_level, given.harness, given.rat)
    return demo(report, given.keep)


def _interrupt(number: int, frame: FrameType | None) -> None:
    # One is enough: a second must not cut short the tidying up that the first began.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (that of the process by default). Returns its exit status, 130 when interrupted; raises
    SystemExit(2) on usage."""
    for stream in (sys.stdout, sys.stderr):
        # What a narrow encoding cannot show is shown as its code: no character ends the command.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    given = _parser().parse_args(arguments)
    before: dict[int, object] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return _run(given)
    except (Failed, rat.BundleError) as error:
        print("rat-tool:", str(error).replace("\n", "\\n"), file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of stdout left; what Python would still flush there goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"rat-tool: {where}{rat.system_reason(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("rat-tool: interrupted", file=sys.stderr)
        return 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
