"""rat: a stdio bridge to an MCP server that admits nobody without a client certificate.

A harness starts ``rat --server HOST:PORT --bundle DIR`` as a stdio server. Each JSON-RPC line it writes
is posted to ``https://HOST:PORT/mcp`` over mutual TLS, and what the server (*ratd*) answers is written
back, byte for byte, on a line of its own. The file reads in the way of a message::

    stdin - reader thread -> Message -> InFlight (postings, calls by identifier)
                 |                            ^ cancel, deadline: shut the socket
                 +---> ThreadPoolExecutor worker -> Ratd.post (PoolManager, one connection) -> Answer
                                                                        |
    stdout <- writer thread <---------- queue of whole lines <----------+

Threads, not an event loop: each call is one blocking exchange on one connection, a worker's stack is its
whole state, and what may end it from outside is a shutdown of its socket. Nothing is kept between messages
but the negotiated protocol version, the annotations of tools that were listed, and the calls in flight, so a
restart of the server fails only what was sent meanwhile. Runtime dependencies: urllib3, and certifi for the one
case of an ``https://`` proxy.
"""

from __future__ import annotations

import argparse
import base64
import collections
import contextlib
import errno
import gc
import hashlib
import http.client
import io
import json
import os
import queue
import re
import select
import shlex
import signal
import socket
import ssl
import stat
import struct
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Callable, ClassVar, NamedTuple

import urllib3
import urllib3.connection
import urllib3.util
from urllib3.util.ssltransport import SSLTransport

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence
    from typing import NoReturn

__version__ = "1.0.0"

# Bytes of a message or an answer, without the end of its line: what the stdio transport of the MCP SDK for Go
# reads, so that nothing passes here that the next reader would refuse.
MESSAGE_LIMIT = 16 * 1024 * 1024

# Seconds for a whole request, name resolution to last byte: above the 10 that ratd gives a tool, so that a
# connection that hangs is cut and nothing that works is.
REQUEST_SECONDS = 30

# Seconds for a call answered by an event stream, in all; REQUEST_SECONDS then bound the silence between events.
STREAM_SECONDS = 600

# ratd closes a connection idle for 120 s; one about to be closed must not be given a request.
IDLE_SECONDS = 90

# Bytes of a stream that may be queued before what a harness reads: what it does not read waits in the network.
AHEAD = 1024 * 1024

# Bytes read at once: four TLS records, and what a pipe holds.
PIECE = 64 * 1024

# Threads, and so connections, at most. A harness with more calls at once has the others wait.
WORKERS = 256

# The code of every failure that rat itself answers. JSON-RPC 2.0 leaves -32000 to -32099 to implementations;
# MCP 2026-07-28 reserves part of that range, yet this is the code harnesses of the bridge know.
ERROR_CODE = -32050
HEADER_MISMATCH = -32020
PARSE_ERROR = -32700
INVALID_REQUEST = -32600

# From this protocol version on each request carries its version in _meta, and headers mirror what it asks for.
# Versions are dates, which compare as text.
MODERN = "2026-07-28"

# Seconds that answers already queued get on their way out when rat stops: of the 0.2 in which it is gone, even when
# nobody reads its output.
LAST_ANSWERS_SECONDS = 0.08

# The request whose event stream lives until somebody ends it.
LISTEN = "subscriptions/listen"

LEVELS = {"debug": 0, "info": 1, "warn": 2, "error": 3}


# --- Target and flags ---------------------------------------------------------------------------------


class Address(NamedTuple):
    """The HOST:PORT of a server.

    ``host`` has no brackets and is ASCII (an international name in its IDNA form), ``port`` is 1 to 65535,
    ``text`` is the address as it was given, for messages.
    """

    host: str
    port: int
    text: str

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read HOST:PORT; an IPv6 address stands between brackets (RFC 3986, section 3.2.2).

        Raises ValueError, saying what was expected. HOST:PORT rather than a URL: the scheme is always https
        and the path always /mcp, less to get wrong.
        """
        expected = f"expected HOST:PORT, such as ratd.example:7433 or [::1]:7433, not {text!r}"
        bracketed = r"\[([0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]"
        match = re.fullmatch(rf"(?:{bracketed}|([^\s\x00-\x1f\x7f/@?#%\\:\[\]<>\"^`{{|}}]+)):([0-9]{{1,5}})", text)
        if match is None or not 1 <= int(match[3]) <= 65535:
            raise ValueError(expected)
        host: str = match[1] or match[2]
        try:
            if match[1]:
                socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
            elif not host.isascii():
                host = host.encode("idna").decode()
        except (OSError, UnicodeError):
            raise ValueError(expected) from None
        return cls(host, int(match[3]), text)


class FlagParser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, of usage with status 2: harnesses show the last line."""

    def error(self, message: str) -> NoReturn:
        """Write the error and exit with status 2."""
        # Without a stderr, argparse fails to write the message before Python 3.12.
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help.\n" if sys.stderr is not None else None)

    def print_help(self, file: object = None) -> NoReturn:
        """Print the help on stdout and exit."""
        self.tell(self.format_help())

    def tell(self, text: str) -> NoReturn:
        """Print a text on stdout and exit, with status 1 when it cannot be written."""
        try:
            print(text, end="", flush=True)
        except OSError as e:
            sys.stdout = None  # the interpreter would try again, and say so
            self.exit(1, f"{self.prog}: cannot write the output: {(e.strerror or str(e)).lower()}\n")
        self.exit()


class PrintVersion(argparse.Action):
    """Prints `version_text` on one line, which argparse's own action would break to fit a terminal, and exits."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, option_string: object = None
    ) -> NoReturn:
        assert isinstance(parser, FlagParser)
        parser.tell(f"{version_text()}\n")


class _Once(argparse.Action):
    """Stores a flag's value and refuses the flag given twice: which of the two counts would be a guess."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option_string: object = None
    ) -> None:
        given: set[str] = namespace.__dict__.setdefault("_given", set())
        if self.dest in given:
            raise argparse.ArgumentError(self, "given twice")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def _address(text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _level(text: str) -> str:
    if text not in LEVELS:
        raise argparse.ArgumentTypeError(f"expected debug, info, warn or error, not {text!r}")
    return text


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare ``--server`` (an `Address`), ``--bundle`` and ``--log-level`` (str) on a parser.

    Declared once, for rat and for rat-tool check: a harness's command line is checked by copying it.
    """
    parser.add_argument(
        "-s",
        "--server",
        metavar="HOST:PORT",
        type=_address,
        action=_Once,
        required=True,
        help="the server: a host name or address, and a port; an IPv6 address goes between brackets",
    )
    parser.add_argument(
        "-b",
        "--bundle",
        metavar="DIR",
        action=_Once,
        required=True,
        help="the client directory of a bundle (clients/NAME): ca.crt, client.crt, client.key",
    )
    parser.add_argument(
        "--log-level",
        metavar="LEVEL",
        type=_level,
        action=_Once,
        default="info",
        help="what is logged on stderr: debug, info (the default), warn or error",
    )


# --- What an error of the system says -----------------------------------------------------------------


def system_reason(error: OSError) -> str:
    """The system's reason for an error, in lower case, the same on every platform for the common ones."""
    if isinstance(error, socket.gaierror):
        if error.errno in {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}:
            return "no such host"
    elif isinstance(error, (http.client.RemoteDisconnected, ssl.SSLEOFError, ssl.SSLZeroReturnError, BrokenPipeError)):
        return "the connection closed before an answer"
    elif isinstance(error, ConnectionResetError):
        return "connection reset by peer"
    elif isinstance(error, ConnectionRefusedError):
        return "connection refused"
    return (error.strerror or str(error) or type(error).__name__).lower()


def openssl_reason(error: ssl.SSLError) -> str:
    """OpenSSL's reason for an error, without the brackets and source line that the ssl module puts around it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return "the connection closed"
    text = re.sub(r"^\[[^\]]*\] | \(_ssl\.c:\d+\)$", "", error.strerror or str(error))
    return text.lower() or "unknown error"


# --- Client directory ---------------------------------------------------------------------------------


class BundleError(ValueError):
    """A directory of a bundle that cannot be used: one sentence that names the file and how to mend it."""


# The checks of a directory, in their order: each is made when those before it have passed.
CHECKS = ("files", "permissions", "key", "signature", "role", "validity", "names")

_REISSUE = "issue a bundle with rat-tool bundle generate"
_NO_CHECK_TIME = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, which the ssl module does not name
_INVALID_PURPOSE = 26  # X509_V_ERR_INVALID_PURPOSE, nor its verification codes


class Side(NamedTuple):
    """A checked directory of a bundle, one side of mutual TLS.

    ``role`` is "client" or "server". ``tenant`` is what the CA names, ``name`` what the certificate names: a
    client's is its session. Both certificates are valid until ``expires`` (aware, UTC). ``ca_fingerprint`` is the
    SHA-256 of the CA's DER in lower-case hexadecimal.
    """

    role: str
    path: str
    tenant: str
    name: str
    expires: datetime
    ca_fingerprint: str

    @property
    def ca(self) -> str:
        """The path of the certificate of the CA."""
        return os.path.join(self.path, "ca.crt")

    @property
    def certificate(self) -> str:
        """The path of the certificate of this side."""
        return os.path.join(self.path, f"{self.role}.crt")

    @property
    def key(self) -> str:
        """The path of the private key of this side (PKCS#8)."""
        return os.path.join(self.path, f"{self.role}.key")


def load_side(path: str, role: str = "client", passed: Callable[[str], None] = lambda check: None) -> Side:
    """Check a directory of a bundle and read what it names.

    ``role`` is "client" or "server". The checks run in the order of `CHECKS`, and ``passed`` is told the name of
    each that passed. Raises BundleError at the first that fails.

    No certificate is parsed here: OpenSSL judges them in a TLS handshake of the directory with itself, in memory,
    by the rules the other side will apply. An X.509 library would be a dependency, a parser of one's own a hazard.
    """
    unread = datetime.min.replace(tzinfo=timezone.utc)
    side = Side(role, path, "", "", unread, _check_files(path, role))
    passed("files")
    if os.name != "nt":  # there, who may read is for access control lists to say
        mode = os.stat(side.key).st_mode & 0o777
        if mode & 0o077:
            raise BundleError(f"{side.key} has mode {mode:04o}, run: chmod 600 {shlex.quote(side.key)}")
    passed("permissions")
    contexts = {r: _presenting(side, r) for r in ("client", "server")}
    passed("key")
    # OpenSSL looks at the purpose before the signature: what fails by its purpose is tried in the other role, so
    # that a stranger's certificate is called one whatever its role.
    as_itself = _handshake(side, contexts, role)
    as_other = _handshake(side, contexts, _other(role))
    signed = as_other if as_itself == _INVALID_PURPOSE else as_itself
    if isinstance(signed, int) and signed != _INVALID_PURPOSE:
        raise BundleError(_unsigned(side))
    passed("signature")
    if isinstance(as_itself, int):
        actual = "is of neither role" if isinstance(as_other, int) else f"is a {_other(role)}'s"
        raise BundleError(f"{side.certificate} {actual}, expected a {role}'s (extended key usage {role}Auth)")
    if as_other != _INVALID_PURPOSE:
        raise BundleError(f"{side.certificate} serves both roles, expected {role}Auth as its one extended key usage")
    passed("role")
    certificate, authority = as_itself
    periods = [(side.ca, _period(authority)), (side.certificate, _period(certificate))]
    now = datetime.now(timezone.utc)
    for file, (start, end) in periods:
        if now < start:
            raise BundleError(f"{file} is not valid before {start:%Y-%m-%d %H:%M} UTC: check this machine's clock")
        if now > end:
            raise BundleError(f"{file} expired on {end:%Y-%m-%d %H:%M} UTC: {_REISSUE}")
    passed("validity")
    side = side._replace(
        tenant=_common_name(side.ca, authority),
        name=_common_name(side.certificate, certificate),
        expires=min(end for _, (_, end) in periods),
    )
    passed("names")
    return side


def _other(role: str) -> str:
    return "server" if role == "client" else "client"


def _check_files(path: str, role: str) -> str:
    """Whether each file is there and holds the one PEM block of its kind. Returns the fingerprint of the CA."""
    try:
        names = set(os.listdir(path))
    except OSError as e:
        raise BundleError(f"cannot read the directory {path}: {system_reason(e)}") from None
    mine, others = ({f"{r}.crt", f"{r}.key"} & names for r in (role, _other(role)))
    if others and mine:
        raise BundleError(f"{path} holds files of both sides: copy one side's directory whole, and nothing else")
    if others:
        place = {"client": "clients/NAME of the bundle", "server": "server of the bundle"}[role]
        raise BundleError(f"{path} is the directory of a {_other(role)}: give that of a {role} ({place})")
    if not mine and {"clients", "server"} <= names:
        place = os.path.join(path, "clients", "NAME") if role == "client" else os.path.join(path, "server")
        raise BundleError(f"{path} is a whole bundle: give the directory of one {role} in it, {place}")
    if not mine and any(os.path.isfile(os.path.join(path, name, "client.crt")) for name in names):
        raise BundleError(f"{path} holds the directories of clients: give one of them, {os.path.join(path, 'NAME')}")
    blocks = {}
    for name, kind in (("ca.crt", "CERTIFICATE"), (f"{role}.crt", "CERTIFICATE"), (f"{role}.key", "PRIVATE KEY")):
        file = os.path.join(path, name)
        try:
            if stat.S_ISFIFO(os.stat(file).st_mode):
                raise OSError(errno.EINVAL, "a pipe, which can be read only once")  # and a file is read several times
            with open(file, "rb") as opened:
                blocks[name] = _pem_block(file, opened.read(1 << 20), kind)
            if kind == "CERTIFICATE":
                _context(role).load_verify_locations(file)
        except ssl.SSLError as e:
            raise BundleError(f"{file} holds no X.509 certificate ({openssl_reason(e)}): {_REISSUE}") from None
        except OSError as e:
            raise BundleError(f"cannot read {file}: {system_reason(e)}") from None
    return hashlib.sha256(blocks["ca.crt"]).hexdigest()


def _pem_block(file: str, content: bytes, kind: str) -> bytes:
    """The DER of the single PEM block of a file (RFC 7468). A second one would be ignored by some readers."""
    labels = re.findall(rb"(?m)^-----BEGIN ([^\r\n]*?)-----", content)
    if len(labels) != 1:
        raise BundleError(f"{file} holds {len(labels)} PEM blocks, expected one of {kind}")
    label = labels[0].decode("ascii", "replace")
    if label != kind:
        plain = " (PKCS#8, not encrypted)" if kind == "PRIVATE KEY" else ""
        raise BundleError(f"{file} holds a PEM block of {label}, expected {kind}{plain}")
    match = re.search(rb"(?m)^-----BEGIN [^\r\n]*-----\s([A-Za-z0-9+/=\s]*)^-----END ([^\r\n]*)-----", content)
    try:
        if match is None or match[2] != labels[0]:
            raise ValueError
        return base64.b64decode(b"".join(match[1].split()), validate=True)
    except ValueError:
        raise BundleError(f"{file} holds a damaged PEM block: copy the file again") from None


def _presenting(side: Side, role: str) -> ssl.SSLContext:
    """What presents the certificate of a directory in a role, and trusts its ca.crt, whatever the time."""
    context = _context(role)
    try:
        context.load_cert_chain(side.certificate, side.key)
    except ssl.SSLError as e:
        if "MISMATCH" in (e.reason or ""):
            reason = f"{side.key} is not the key of {side.certificate}: copy both from one directory"
        else:
            reason = f"{side.key} and {side.certificate} cannot be used ({openssl_reason(e)}): {_REISSUE}"
        raise BundleError(reason) from None
    context.load_verify_locations(side.ca)
    context.verify_flags |= _NO_CHECK_TIME
    return context


def _context(role: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if role == "client" else ssl.PROTOCOL_TLS_SERVER)
    context.check_hostname = False  # a side has no address: its CA is what it is known by
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def tls_context(side: Side) -> ssl.SSLContext:
    """The TLS configuration of a side: TLS 1.3 only, presenting its certificate, trusting its CA and no other.

    A client's context checks chain, validity and purpose of the server, not its host name; a server's requires a
    client certificate. Raises OSError (ssl.SSLError included) when the files are no longer what was checked.
    """
    context = _context(side.role)
    context.load_cert_chain(side.certificate, side.key)
    context.load_verify_locations(side.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


if TYPE_CHECKING:
    _Certificate = Mapping[str, object]  # as SSLSocket.getpeercert() gives it


def _handshake(
    side: Side, contexts: Mapping[str, ssl.SSLContext], role: str
) -> tuple[_Certificate, _Certificate] | int:
    """Have the directory in a role, which presents its certificate, shake hands with itself in the other.

    Returns the certificate and the CA's, or OpenSSL's verification code (X509_V_ERR_*) when it was refused.
    """
    presenter, verifier = contexts[role], contexts[_other(role)]
    presenter.verify_mode, verifier.verify_mode = ssl.CERT_NONE, ssl.CERT_REQUIRED
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    presenting = presenter.wrap_bio(there, back, server_side=role == "server")
    verifying = verifier.wrap_bio(back, there, server_side=role == "client")
    try:
        for end in (presenting, verifying) * 3:  # TLS 1.3 takes three flights (RFC 8446, section 2)
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as e:
        return e.verify_code
    except ssl.SSLError as e:
        raise BundleError(f"{side.certificate} cannot be used ({openssl_reason(e)}): {_REISSUE}") from None
    return verifying.getpeercert() or {}, dict(verifier.get_ca_certs()[0])


def _unsigned(side: Side) -> str:
    context = _context(side.role)
    context.load_verify_locations(side.ca)
    if not context.get_ca_certs():  # it lists what may sign
        return f"{side.ca} is not the certificate of a CA: {_REISSUE}"
    return f"{side.certificate} is not signed by {side.ca}: copy both from one directory"


def _period(certificate: _Certificate) -> tuple[datetime, datetime]:
    epoch = datetime(1970, 1, 1, tzinfo=timezone.utc)
    start, end = (
        epoch + timedelta(seconds=ssl.cert_time_to_seconds(str(certificate[field])))
        for field in ("notBefore", "notAfter")
    )
    return start, end


def _common_name(file: str, certificate: _Certificate) -> str:
    subject = certificate.get("subject", ())
    assert isinstance(subject, tuple)
    names = [value for part in subject for field, value in part if field == "commonName"]
    if len(names) != 1 or not re.fullmatch(r"[A-Za-z0-9_-]{1,32}", names[0]):
        found = " and ".join(repr(name) for name in names) or "nobody"
        raise BundleError(f"{file} names {found}, expected one name of 1 to 32 letters, digits, _ or -: {_REISSUE}")
    return str(names[0])


# --- Schemas of ratd's tools ---------------------------------------------------------------------------

_schemas: dict[str, Mapping[str, object] | None] = {}  # read on first use; only the reader thread asks


def built_in_schema(tool: str) -> Mapping[str, object] | None:
    """The input schema (JSON Schema) of a tool of ratd, or None for any other.

    Installed, the files are the package rat_schemas; in a source tree, the folder schemas. Read through this
    module's loader, which finds them in a zip or a frozen executable as well. Where they are not, beside a copy of this
    file alone, no tool has one.
    """
    if tool not in _schemas:
        schema = None
        if re.fullmatch(r"[a-z_]{1,32}", tool):
            here = os.path.dirname(os.path.abspath(__file__))
            for place in ("rat_schemas", "schemas"):
                try:
                    data = __loader__.get_data(os.path.join(here, place, f"{tool}.json"))  # type: ignore[name-defined]
                    schema = json.loads(data)
                    break
                except OSError as e:
                    if e.errno in (errno.EMFILE, errno.ENFILE):  # too many are open: to be asked again
                        return None
        if len(_schemas) > 1000:  # names come from the harness
            _schemas.clear()
        _schemas[tool] = schema
    return _schemas[tool]


# --- Message ------------------------------------------------------------------------------------------


class InvalidMessage(ValueError):
    """A line that cannot be relayed: its JSON-RPC error code, and the reason."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class _Digits(str):
    """An integer of more digits than int() takes, as it stands in the JSON."""


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _integer(digits: str) -> int | _Digits:
    return int(digits) if len(digits) <= 4300 else _Digits(digits)


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_DECODER_OF_LONG_INTEGERS = json.JSONDecoder(parse_constant=_refuse, parse_int=_integer)


def parse_json(data: bytes) -> object:
    """The value of a JSON text in UTF-8 (RFC 8259), neither more nor less than JSON.

    Raises ValueError with a reason. What json.loads takes beyond JSON is refused: NaN and Infinity, UTF-16 and
    UTF-32, a byte-order mark. An integer too long for int() comes as a str subclass.
    """
    # Many small objects make the cycle collector walk all of them over and over, for nothing: JSON has no cycles.
    pause = len(data) > 1 << 20 and gc.isenabled()
    if pause:
        gc.disable()
    try:
        text = data.decode()
        try:
            return _DECODER.decode(text)
        except json.JSONDecodeError:
            raise
        except ValueError:  # an integer too long for int(), or what is refused again
            return _DECODER_OF_LONG_INTEGERS.decode(text)
    except UnicodeDecodeError as e:
        raise ValueError(f"not UTF-8 (byte {e.start + 1})") from None
    except json.JSONDecodeError as e:
        raise ValueError(f"not JSON (character {e.pos + 1})") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    finally:
        if pause:
            gc.enable()


def identifier_key(identifier: object) -> tuple[str, object] | None:
    """What an identifier is compared by, or None for what is none.

    JSON-RPC 2.0, section 4: a string or a number. 1 and "1" differ, and true is not 1, as it is in a dict.
    """
    if isinstance(identifier, _Digits):
        return ("number", str(identifier))
    if isinstance(identifier, str):
        return ("string", identifier)
    if isinstance(identifier, bool) or not isinstance(identifier, (int, float)):
        return None
    # 1e999 is infinite to Python, and would compare equal to any other number that large.
    return None if identifier in {float("inf"), float("-inf")} else ("number", identifier)


class Call(NamedTuple):
    """The identifier of a JSON-RPC request: what it compares by, and its own characters."""

    key: tuple[str, object]
    text: str


class Message(NamedTuple):
    """What is read of a line; the line itself is relayed untouched.

    ``calls`` holds the call of a request, or every call of a batch, and nothing for a notification or a response.
    ``request`` is the identifier that a cancellation names. A field of a type other than expected counts as absent.
    """

    calls: tuple[Call, ...] = ()
    batch: bool = False
    method: str | None = None
    version: str | None = None
    name: str | None = None
    uri: str | None = None
    arguments: Mapping[str, object] | None = None
    request: tuple[str, object] | None = None
    wait: float = 0


def read_message(line: bytes) -> Message:
    """Read what rat needs of a line. Raises InvalidMessage for one it cannot relay."""
    try:
        value = parse_json(line)
        own = [] if _is_plain(value) else list(_identifiers(line.decode()))
    except ValueError as e:
        raise InvalidMessage(PARSE_ERROR, str(e)) from None
    except RecursionError:  # for the second reading, a little deeper in the stack than the first
        raise InvalidMessage(PARSE_ERROR, "nested too deeply") from None
    if isinstance(value, list):
        members = [member for member in value if isinstance(member, dict)]
        calls = tuple(
            Call(key, text)
            for member, text in zip(members, own)
            if _text(member.get("method")) is not None
            for key in (identifier_key(member.get("id")),)
            if key is not None
        )
        return Message(calls, batch=True, wait=max((_wait(member) for member in members), default=0))
    if not isinstance(value, dict):
        raise InvalidMessage(PARSE_ERROR, "neither an object nor an array")
    method, identifier, params = _text(value.get("method")), value.get("id"), value.get("params")
    if method is None:
        return Message()
    call: tuple[Call, ...] = ()
    if identifier is not None:
        key = identifier_key(identifier)
        if key is None:
            raise InvalidMessage(INVALID_REQUEST, "its identifier is neither a string nor a number")
        call = (Call(key, own[0] if own else str(identifier)),)
    if not isinstance(params, dict):
        return Message(call, method=method)
    meta, arguments = params.get("_meta"), params.get("arguments")
    return Message(
        call,
        method=method,
        version=_text(meta.get("io.modelcontextprotocol/protocolVersion")) if isinstance(meta, dict) else None,
        name=_text(params.get("name")),
        uri=_text(params.get("uri")),
        arguments=arguments if isinstance(arguments, dict) else None,
        request=identifier_key(params.get("requestId")),
        wait=_wait(value),
    )


def _is_plain(value: object) -> bool:
    """Whether a message has no identifier, or an integer, whose characters are known (not 0: -0 reads as it)."""
    identifier = value.get("id") if isinstance(value, dict) else None
    return not isinstance(value, list) and (identifier is None or (type(identifier) is int and identifier != 0))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and not isinstance(value, _Digits) else None


_BETWEEN = re.compile(r"[ \t\n\r,:]*")  # what can stand between two values of a JSON text


def _skip(text: str, at: int) -> int:
    match = _BETWEEN.match(text, at)
    assert match is not None
    return match.end()


def _identifiers(text: str) -> Iterator[str]:
    """The identifier of each object of a message in its own characters ("null" for none), so that an error repeats
    it as it came: a number read and written again can change its digits."""
    at = _skip(text, 0)
    if text[at] == "[":
        at = _skip(text, at + 1)
    while at < len(text) and text[at] != "]":
        if text[at] == "{":
            identifier, at = "null", _skip(text, at + 1)
            while text[at] != "}":
                key, end = _DECODER_OF_LONG_INTEGERS.raw_decode(text, at)
                start = _skip(text, end)
                _, end = _DECODER_OF_LONG_INTEGERS.raw_decode(text, start)
                if key == "id":
                    identifier = text[start:end]
                at = _skip(text, end)
            at += 1
            yield identifier
        else:
            _, at = _DECODER_OF_LONG_INTEGERS.raw_decode(text, at)
        at = _skip(text, at)


def _wait(message: Mapping[str, object]) -> float:
    """Seconds that a call of wait_window asks to wait: 0 for any other message."""
    params = message.get("params")
    if message.get("method") != "tools/call" or not isinstance(params, dict) or params.get("name") != "wait_window":
        return 0
    schema = built_in_schema("wait_window")
    if schema is None:
        return 0
    limits: dict[str, float] = schema["properties"]["max_seconds"]  # type: ignore[index]
    arguments = params.get("arguments")
    asked = arguments.get("max_seconds") if isinstance(arguments, dict) else None
    if isinstance(asked, bool) or not isinstance(asked, (int, float)):
        asked = limits["default"]
    return float(min(max(asked, 0), limits["maximum"]))


def error_line(identifier: str, code: int, message: str) -> bytes:
    """A JSON-RPC error response (section 5.1) to the identifier, given in its own characters."""
    return f'{{"jsonrpc":"2.0","id":{identifier},"error":{{"code":{code},"message":{json.dumps(message)}}}}}'.encode()


def failure_line(calls: Sequence[Call], batch: bool, text: str) -> bytes | None:
    """What is written for calls that got no answer, an error each; None when there are none."""
    errors = [error_line(call.text, ERROR_CODE, text) for call in calls]
    if batch and errors:
        return b"[" + b",".join(errors) + b"]"
    return errors[0] if errors else None


# --- Headers ------------------------------------------------------------------------------------------

_PRINTABLE = re.compile(r"[\x20-\x7e]*")


def header_value(text: str) -> str:
    """A text as the value of a header: itself, or ``=?base64?...?=`` where it could not travel so.

    MCP 2026-07-28, Streamable HTTP: what is not printable ASCII, starts or ends with white space, or looks encoded
    already is the Base64 of its UTF-8. This keeps a line break in an argument from becoming a header of its own.
    A lone surrogate, which UTF-8 does not have, is sent as U+FFFD.
    """
    encoded = text.startswith("=?base64?") and text.endswith("?=")
    if _PRINTABLE.fullmatch(text) and text == text.strip(" ") and not encoded:
        return text
    data = re.sub("[\ud800-\udfff]", "\ufffd", text).encode()
    return f"=?base64?{base64.b64encode(data).decode()}?="


def _annotations(schema: object) -> Iterator[tuple[object, tuple[str, ...] | None, object]]:
    """Each ``x-mcp-header`` in a JSON Schema: its value, the path of its property (None where it can be reached by
    other keywords than ``properties``), and the type beside it."""
    todo: list[tuple[object, tuple[str, ...] | None]] = [(schema, ())]
    while todo:
        part, path = todo.pop()
        if isinstance(part, list):
            todo.extend((inner, None) for inner in part)
        elif isinstance(part, dict):
            if "x-mcp-header" in part:
                yield part["x-mcp-header"], path, part.get("type")
            for keyword, inner in part.items():
                if keyword == "properties" and isinstance(inner, dict):
                    todo.extend((below, None if path is None else (*path, key)) for key, below in inner.items())
                elif keyword not in ("const", "default", "enum", "examples"):  # which hold values, not schemas
                    todo.append((inner, None))


_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, section 5.6.2


def header_parameters(schema: object) -> tuple[dict[str, tuple[str, ...]], str | None]:
    """The arguments that an input schema asks to have mirrored, header name to the path of its property, and the first
    fault in what it asks, None for none.

    The annotation is ``x-mcp-header`` (MCP 2026-07-28, Streamable HTTP), on a string, integer or boolean at any depth
    of ``properties``, and unique without regard to case. What is at fault is not among the arguments; by the
    specification, one fault has a client mirror none of a listed tool's.
    """
    uses: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
    faults = []
    for name, path, kind in _annotations(schema):
        if not isinstance(name, str) or not _TOKEN.fullmatch(name):
            faults.append(f"the header name {name!r} is no token")
        elif not path:
            faults.append(f"{name} is not on an argument reached by properties alone")
        elif kind not in ("string", "integer", "boolean"):
            faults.append(f"{name} is on an argument that is no string, integer or boolean")
        else:
            uses.setdefault(name.lower(), []).append((name, path))
    faults += [f"{same[1][0]} is used twice" for same in uses.values() if len(same) > 1]
    sound = {f"Mcp-Param-{same[0][0]}": same[0][1] for same in uses.values() if len(same) == 1}
    return sound, faults[0] if faults else None


def parameter_headers(parameters: Mapping[str, tuple[str, ...]], arguments: object) -> dict[str, str]:
    """The ``Mcp-Param-*`` headers of a call, from its tool's `header_parameters` and the call's arguments.

    A value that is null, absent, an object, an array, a fraction, or an integer beyond what JSON numbers hold exactly
    (RFC 8259, section 6: 2**53 - 1) has no header.
    """
    headers = {}
    for name, path in parameters.items():
        value = arguments
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, bool):
            headers[name] = "true" if value else "false"
        elif isinstance(value, str) and not isinstance(value, _Digits):
            headers[name] = header_value(value)
        elif isinstance(value, (int, float)) and abs(value) < 2**53 and value == int(value):
            headers[name] = str(int(value))
    return headers


# What is the same for every request. Compression is refused: an answer is relayed as it comes.
_FIXED_HEADERS = {
    "Content-Type": "application/json",
    "Accept": "application/json, text/event-stream",
    "Accept-Encoding": "identity",
    "User-Agent": f"rat/{__version__}",
}


def request_headers(
    message: Message, negotiated: str | None, learned: Mapping[str, Mapping[str, tuple[str, ...]]] | None = None
) -> dict[str, str]:
    """The headers of a message's request (MCP, Streamable HTTP), given the version that initialize settled on.

    ``learned`` holds the `header_parameters` of tools by name; ratd's own tools are known without it.

    A version or a method that is no printable ASCII has no form as a header: it is left out, and the server says
    what it thinks of it.
    """
    headers = dict(_FIXED_HEADERS)
    version = message.version if message.version is not None else negotiated
    if version is None:
        return headers
    if _PRINTABLE.fullmatch(version):
        headers["Mcp-Protocol-Version"] = version
    if version < MODERN or message.method is None:
        return headers
    if _PRINTABLE.fullmatch(message.method):
        headers["Mcp-Method"] = message.method
    named = {"tools/call": message.name, "prompts/get": message.name, "resources/read": message.uri}.get(message.method)
    if named is not None:
        headers["Mcp-Name"] = header_value(named)
    if message.method == "tools/call" and message.name is not None:
        parameters = learned.get(message.name) if learned else None
        if parameters is None:
            parameters, _ = header_parameters(built_in_schema(message.name))
        headers.update(parameter_headers(parameters, message.arguments))
    return headers


# --- Connection ---------------------------------------------------------------------------------------


class Exchange:
    """One HTTP exchange of a worker, which another thread may end by shutting its socket down.

    From `Pool.request_on` to `Pool.release` a connection is the exchange's own, and its socket is `raw`: attached when
    it is created and again when TLS takes it over, since ``conn.sock`` is None while connecting and detached while
    shaking hands. It is given up under `lock`, so that none is shut that has gone to a later call. It is shut down,
    which wakes its worker; it is closed by that worker.
    """

    # One lock for all exchanges, held for microseconds and never while waiting: it guards `body`, `ended`, `raw` and
    # everything of InFlight.
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, body: bytes | None = None) -> None:
        self.body = body  # of the request; dropped when the exchange has ended
        self.ended = False
        self.raw: socket.socket | None = None
        # The worker's own; others read the stage: "queued", "proxy", "connect", "handshake", "first request",
        # "request" or "answer".
        self.stage = "queued"
        self.connection: Connection | None = None
        self.response: Response | None = None
        self.received = 0  # bytes of the body of the response
        self.expected: int | None = None  # what was announced

    def end(self) -> None:
        """End the exchange from any thread: its socket is shut, and no other will be attached.

        Does not wait and never fails.
        """
        with self.lock:
            self.ended, self.body = True, None
            self._shut()

    def _shut(self) -> None:  # with the lock held
        if self.raw is not None:
            with contextlib.suppress(OSError):
                if self.stage == "answer":
                    # What is shut tells a server nothing that is blocked in writing, and neither does a close of what
                    # was read to the last byte: a reset does.
                    self.raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                # Not raw.shutdown(): that of an SSLSocket also drops its TLS object, under a worker that is reading.
                socket.socket.shutdown(self.raw, socket.SHUT_RDWR)

    def attach(self, raw: socket.socket | None) -> None:
        """Make a socket known before anything is waited for on it. Raises OSError when the exchange was ended."""
        with self.lock:
            if self.ended:
                raise ConnectionAbortedError("ended")
            self.raw = raw

    def detach(self) -> None:
        """Give up the socket, before it is closed or goes to another exchange."""
        with self.lock:
            self.raw = None

    def bind(self, seconds: float | None) -> None:
        """Let each operation of the socket take so many seconds, or any time: a stream may be silent, and its deadline
        is elsewhere."""
        if self.raw is not None:
            self.raw.settimeout(seconds)

    def pieces(self) -> Iterator[bytes]:
        """The body of the response, as it comes. Raises OSError and HTTPException, IncompleteRead when it is cut."""
        response = self.response
        assert response is not None
        # By read1: a read(n) of a malformed chunked body can take far more than n.
        while piece := response.read1(PIECE):
            self.received += len(piece)
            yield piece
        if response.length:
            raise http.client.IncompleteRead(b"")


_RESET = struct.pack("hh" if os.name == "nt" else "ii", 1, 0)  # struct linger: on, for no time
_connecting = threading.local()  # its `exchange` is that which this thread connects for: urllib3 passes none through


class TlsSocket(ssl.SSLSocket):
    """A TLS socket that is attached before its handshake, in which urllib3 has not got hold of it yet."""

    def do_handshake(self, block: bool = False) -> None:
        """Shake hands. Raises OSError."""
        exchange: Exchange = _connecting.exchange
        exchange.attach(self)
        try:
            super().do_handshake(block)
        except OSError:
            exchange.detach()
            raise


class Response(http.client.HTTPResponse):
    """A response whose head is read here: http.client takes 102 and 103 for final answers, and would leave the real one
    for the next call to read; and its e-mail parser takes longer than all else that is done for a head."""

    def begin(self) -> None:
        """Read the head. Raises OSError and HTTPException."""
        version, status, _ = self._read_status()  # type: ignore[attr-defined]
        while 100 <= status < 200 and status != 101:  # RFC 9110, section 15.2: any number of interim answers
            self._read_fields()
            version, status, _ = self._read_status()  # type: ignore[attr-defined]
        self.code = self.status = status
        if not version.startswith("HTTP/1."):
            raise http.client.UnknownProtocol(version)
        self.version = 10 if version == "HTTP/1.0" else 11
        self.headers = self.msg = self._read_fields()
        # RFC 9112, section 6.3: how long the body is, and so whether the connection outlives it.
        empty = status in (101, 204, 304)
        coding = ", ".join(self.headers.get_all("transfer-encoding", ["identity"])).lower()
        lengths = {text.strip() for field in self.headers.get_all("content-length", ()) for text in field.split(",")}
        # As long as a number is: int() refuses thousands of digits.
        counted = re.fullmatch("[0-9]{1,18}", ",".join(lengths))
        if not empty and (coding not in ("identity", "chunked") or (coding == "identity" and lengths and not counted)):
            raise http.client.HTTPException("a body without a proper length")
        self.chunked, self.chunk_left = coding == "chunked" and not empty, None
        self.length = 0 if empty else int(counted[0]) if counted and not self.chunked else None
        announced = empty and bool(coding != "identity" or lengths - {"0"})  # it may follow all the same
        open_ended = (self.length is None and not self.chunked) or status == 101  # which begins another protocol
        self.will_close = announced or open_ended or self._check_close()  # type: ignore[attr-defined]

    @property
    def media_type(self) -> str:
        """The media type in lower case, without parameters."""
        return self.headers.get("Content-Type", "").partition(";")[0].strip().lower()

    def _read_fields(self) -> http.client.HTTPMessage:
        fields = http.client.HTTPMessage()
        for _ in range(100):  # as many, and as long, as http.client takes
            line = self.fp.readline(65537)
            if not line.endswith(b"\n") and len(line) <= 65536:  # it ends amid the head
                raise http.client.RemoteDisconnected("amid the head")
            if line in (b"\r\n", b"\n"):
                return fields
            name, colon, value = line.decode("iso-8859-1").partition(":")
            folded = name[:1] in (" ", "\t")  # the obsolete folding of a field (section 5.2), of none that matters here
            if len(line) > 65536 or not (colon or folded):
                raise http.client.HTTPException("malformed field")
            if _TOKEN.fullmatch(name):  # some Pythons raise ValueError for what is none
                fields.set_raw(name, value.strip(" \t\r\n"))
        raise http.client.HTTPException("over 100 fields")

    def _read_and_discard_trailer(self) -> None:
        with contextlib.suppress(http.client.RemoteDisconnected):  # some end with the last chunk: http.client has it so
            self._read_fields()  # which ends, as http.client's does not, however many there are
            self.length = 0  # as of a body of known length, of which nothing is left

    def _read_next_chunk_size(self) -> int:
        # RFC 9112, section 7.1, of which http.client takes more: a sign, 0x, an underscore.
        size = re.match(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;.*)?\r?\n", self.fp.readline(65537))
        if size is None:
            raise ValueError("no size of a chunk")
        return int(size[1], 16)

    def _close_conn(self) -> None:
        # What follows the response in the buffer is dropped with it, and its rest would be taken for the next response:
        # it is looked for, without reading on.
        self.fp.raw.readinto = lambda buffer: None  # type: ignore[method-assign]
        if self.fp.peek(1):
            self.will_close = True
        super()._close_conn()  # type: ignore[misc]


class Connection(urllib3.connection.HTTPSConnection):
    """A connection of which a call can be ended, in any of its stages, by a thread that is not its worker."""

    raw: socket.socket | None = None  # that of the exchange which opened it
    used = (0.0, 0.0)  # when it last went back to the pool, by either clock

    @property
    def is_connected(self) -> bool:
        """Whether the pool may give the connection out again.

        Idle time is the longer of two clocks': the monotonic one stands still while the machine is suspended.
        """
        idle = max(time.monotonic() - self.used[0], time.time() - self.used[1])
        return idle < IDLE_SECONDS and super().is_connected and not self._holds_unread()

    def _holds_unread(self) -> bool:
        # What a server sent unasked may be in the TLS layer already, where no wait on the socket tells of it: the next
        # call would take it for its answer.
        if isinstance(self.sock, ssl.SSLSocket):
            return self.sock.pending() > 0
        return isinstance(self.sock, SSLTransport) and bool(self.sock.incoming.pending or self.sock.sslobj.pending())

    def _new_conn(self) -> socket.socket:
        _connecting.exchange.stage = "proxy" if self.proxy else "connect"
        until = time.monotonic() + self.timeout if isinstance(self.timeout, (int, float)) else float("inf")
        try:
            # In bytes: to a str Python applies the codec of international names, which takes a while to load.
            host = self._dns_host.encode() if self._dns_host.isascii() else self._dns_host
            addresses = socket.getaddrinfo(host, self.port, type=socket.SOCK_STREAM)
        except UnicodeError:  # from the IDNA codec, for an empty label or one over 63 bytes
            raise socket.gaierror(socket.EAI_NONAME, "no such host") from None
        for tried, (family, kind, protocol, _, address) in enumerate(addresses):
            # Several addresses of one name share the time, so that a dead first one leaves some to the next.
            share = (until - time.monotonic()) / (len(addresses) - tried)
            sock = None
            try:
                sock = socket.socket(family, kind, protocol)
                self._connect_socket(sock, address, share)
                return sock
            except OSError:
                _connecting.exchange.detach()
                if sock is not None:
                    sock.close()
                if _connecting.exchange.ended or tried == len(addresses) - 1:
                    raise
        raise OSError("no address")

    def _connect_socket(self, sock: socket.socket, address: tuple[object, ...], seconds: float) -> None:
        exchange: Exchange = _connecting.exchange
        until = time.monotonic() + seconds
        exchange.attach(sock)
        for option in self.socket_options or ():
            sock.setsockopt(*option)
        sock.setblocking(False)
        code = sock.connect_ex(address)
        if code in (errno.EINPROGRESS, errno.EWOULDBLOCK):
            # In slices: the shutdown of a socket that has not begun to connect is lost.
            while not urllib3.util.wait_for_write(sock, 0.05):
                if exchange.ended:
                    raise ConnectionAbortedError("ended")
                if time.monotonic() > until:
                    raise TimeoutError("timed out")
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
        sock.settimeout(self.timeout if isinstance(self.timeout, (int, float)) else None)
        if not self.proxy:
            exchange.stage = "handshake"

    def _tunnel(self) -> None:
        super()._tunnel()
        _connecting.exchange.stage = "handshake"

    def send(self, data: bytes) -> None:  # type: ignore[override]
        """Send bytes. Raises OSError, BrokenPipeError when there may be an answer all the same.

        A refusal can hide behind a failed write: in TLS 1.3 the handshake of a client ends before the server has looked
        at its certificate. Who goes on to read the answer meets the alert.
        """
        try:
            super().send(data)
        except OSError as e:
            closed = isinstance(e, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ConnectionResetError))
            if closed or e.errno in (errno.ECONNABORTED, errno.EPROTOTYPE):  # of Windows and of macOS
                raise BrokenPipeError(errno.EPIPE, "the connection closed") from e
            raise

    def post(self, head: bytes, body: bytes) -> None:
        """Send a request, given its head. Raises OSError."""
        # Two writes are two TLS records, two segments and two wake-ups of the server; a larger body is not copied.
        with contextlib.suppress(BrokenPipeError):
            if len(body) > PIECE:
                self.send(head)
                self.send(body)
            else:
                self.send(head + body)


class Pool(urllib3.HTTPSConnectionPool):
    """A pool whose connections belong to an exchange at a time."""

    ConnectionCls = Connection

    def request_on(self, exchange: Exchange, start: str, headers: Mapping[str, str], seconds: float | None) -> Response:
        """Make a request on a connection that is the exchange's own until it is released. Gives the response.

        ``start`` is the request line and the field Host. ``seconds`` bound each operation of the socket; of None, there
        is no bound but one on connecting. Raises OSError and HTTPException, with the connection released.

        urllib3's way through its own request and response objects takes twice the time of all else in a call.
        """
        exchange.attach(None)
        connection = self._get_conn()
        assert isinstance(connection, Connection)
        exchange.connection = connection
        try:
            exchange.attach(connection.raw)
            exchange.stage = "request"
            if connection.is_closed:
                connection.timeout = REQUEST_SECONDS if seconds is None else seconds
                _connecting.exchange = exchange
                try:
                    if self.proxy is not None:
                        self._prepare_proxy(connection)
                    else:
                        connection.connect()
                finally:
                    del _connecting.exchange
                connection.raw = exchange.raw
                exchange.stage = "first request"
            connection.sock.settimeout(seconds)
            body = exchange.body
            length = "" if body is None else f"Content-Length: {len(body)}\r\n"
            fields = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
            connection.post(f"{start}\r\n{length}{fields}\r\n".encode("latin-1"), body or b"")
            del body
            response = exchange.response = Response(connection.sock)
            response.begin()
            exchange.received, exchange.expected = 0, response.length
        except BaseException:
            self.release(exchange)
            raise
        exchange.stage = "answer"
        return response

    def release(self, exchange: Exchange) -> None:
        """Take back the connection of an exchange, if it has one.

        A connection whose response was not read to its end is of use to nobody, and closed.
        """
        connection, response = exchange.connection, exchange.response
        exchange.connection = exchange.response = None
        if connection is None:
            return
        exchange.detach()
        if response is not None:
            response.close()
        if response is None or response.will_close or response.length != 0:
            connection.close()
            connection.raw = None
        connection.used = time.monotonic(), time.time()
        self._put_conn(connection)

    def close_idle(self) -> None:
        """Close the connections that no exchange has."""
        assert self.pool is not None  # as it is once closed
        with contextlib.suppress(queue.Empty):
            while True:
                connection = self.pool.get(block=False)
                if connection is not None:
                    connection.close()


class Proxy(NamedTuple):
    """The proxy on the way to a server: its URL without credentials, HOST:PORT, and its header, if any."""

    url: str
    address: str
    authorization: str | None


def environment_proxy(address: Address, environ: Mapping[str, str] = os.environ) -> Proxy | None:
    """The proxy that HTTPS_PROXY and NO_PROXY (or in lower case) name for a server, None for none.

    Never one for localhost or a loopback address. Raises ValueError for a proxy that cannot be used. Credentials
    are taken from the URL, percent-decoded (RFC 3986, section 3.2.1).
    """
    given = environ.get("HTTPS_PROXY") or environ.get("https_proxy")
    if not given or _bypasses(address, environ.get("NO_PROXY") or environ.get("no_proxy") or ""):
        return None
    from urllib.parse import unquote_to_bytes, urlsplit  # only with a proxy

    try:
        url = urlsplit(given if "://" in given else f"http://{given}")
        usual = {"http": 80, "https": 443}[url.scheme]
        host, port = (url.hostname or "").encode("idna").decode(), url.port or usual
        netloc = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        Address.parse(netloc)
    except (ValueError, KeyError):
        # Never the value itself: it may hold a password.
        raise ValueError(
            "HTTPS_PROXY names no http:// or https:// proxy: set it to http://HOST:PORT, or unset it"
        ) from None
    authorization = None
    if url.username is not None:
        # As bytes: they need not be UTF-8, neither as they stand in the environment nor once decoded.
        user, password = (unquote_to_bytes(os.fsencode(part or "")) for part in (url.username, url.password))
        authorization = f"Basic {base64.b64encode(user + b':' + password).decode()}"
    return Proxy(f"{url.scheme}://{netloc}", netloc, authorization)


def _bypasses(address: Address, patterns: str) -> bool:
    """Whether NO_PROXY covers a server: a name and what is below it, .NAME for only that, an address, a network
    (CIDR), each with :PORT or without; * for all."""
    import ipaddress  # only with a proxy

    host = address.host.lower().rstrip(".")
    names = {host, address.text.rpartition(":")[0].lower().rstrip(".")}  # an international one as it was given, too
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
        ip = getattr(ip, "ipv4_mapped", None) or ip  # is_loopback does not see through it before Python 3.13
    except ValueError:
        ip = None
    if host == "localhost" or host.endswith(".localhost") or (ip is not None and ip.is_loopback):
        return True
    for pattern in patterns.lower().replace(",", " ").split():
        match = re.fullmatch(r"\[(.*)\](?::(\d{1,5}))?|([^:]*)(?::(\d{1,5}))?|(.*)", pattern)
        assert match is not None
        name, port = (match[1] or match[3] or match[5] or "").rstrip("."), match[2] or match[4]
        if port and int(port) != address.port:
            continue
        if name == "*":
            return True
        if ip is not None:
            with contextlib.suppress(ValueError):
                if ip in ipaddress.ip_network(name, strict=False):
                    return True
            continue
        name = name[1:] if name.startswith("*.") else name
        if name and any(each == name or each.endswith(f".{name.lstrip('.')}") for each in names):
            return True
    return False


_SOCKET_OPTIONS = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
# A server that vanished, or a network that changed, is noticed in two minutes rather than two hours: a subscription
# has no other end, and its harness would wait for news that nobody sends.
for _option, _value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPALIVE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
    if hasattr(socket, _option):  # macOS has the second instead of the first
        _SOCKET_OPTIONS.append((socket.IPPROTO_TCP, getattr(socket, _option), _value))


def public_context() -> ssl.SSLContext:
    """A client's TLS configuration that trusts public CAs, those of certifi.

    Given as text: a file of certifi's would be written to a temporary directory when it lies in a zip.
    """
    import certifi  # only for those who need it

    return ssl.create_default_context(cadata=certifi.contents())


def _pool(address: Address, side: Side, proxy: Proxy | None) -> Pool:
    context = tls_context(side)
    context.sslsocket_class = TlsSocket
    # A connection for every worker, of calls and of subscriptions; past that none is kept. Small writes must not wait
    # for acknowledgements of others, which urllib3 forgets on the way through a proxy.
    options = {
        "maxsize": 2 * WORKERS,
        "ssl_context": context,
        "assert_hostname": False,
        "socket_options": _SOCKET_OPTIONS,
    }
    manager: urllib3.PoolManager
    if proxy is None:
        manager = urllib3.PoolManager(1, **options)  # type: ignore[arg-type]
    else:
        if proxy.url.startswith("https:"):  # the one place where public CAs are trusted
            options["proxy_ssl_context"] = public = public_context()
            public.sslsocket_class = TlsSocket
        if proxy.authorization:
            options["proxy_headers"] = {"Proxy-Authorization": proxy.authorization}
        manager = urllib3.ProxyManager(proxy.url, 1, **options)  # type: ignore[arg-type]
    manager.pool_classes_by_scheme = {"https": Pool}
    pool = manager.connection_from_host(address.host, address.port, "https")
    assert isinstance(pool, Pool)
    return pool


class Failure(Exception):
    """Why a message got no answer: a sentence the person at the harness can act on.

    ``logged`` is that sentence without what it quotes of a message, which no log may hold.
    """

    def __init__(self, text: str, logged: str | None = None) -> None:
        super().__init__(text)
        self.logged = logged or text


class TooLarge(ValueError):
    """An answer, or an event of one, over the limit."""


class EventStream:
    """The events of a ``text/event-stream`` (HTML Living Standard, section 9.2.6), from bytes split anywhere.

    ``last_id`` and ``retry`` (milliseconds) are what the stream last said of how to resume it. An event of more than
    ``limit`` bytes of data, or a line that could only be of one, raises TooLarge.
    """

    def __init__(self, limit: int = MESSAGE_LIMIT) -> None:
        self.last_id: str | None = None
        self.retry: int | None = None
        self._limit = limit
        self._line = bytearray()  # the beginning of a line that has not ended
        self._event = b""
        self._id: str | None = None  # of the event that has not ended: one that was cut is to be sent again
        self._data: list[bytes] = []
        self._size = 0  # of the data, each piece with the line feed that joins it to the next
        self._first = True
        self._after_return = False

    def feed(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        """Take some bytes of the stream; gives the type and the data of each event that ends in them.

        An event whose data is empty is not given: it is sent for the sake of its identifier.
        """
        if self._after_return and data.startswith(b"\n"):
            data, self._after_return = data[1:], False
        if data:
            self._after_return = data.endswith(b"\r")
        for piece in data.splitlines(keepends=True):  # of bytes: at LF, CR and CRLF only
            line = piece.rstrip(b"\r\n")
            if self._size + len(self._line) + len(line) > self._limit + 1024:  # for the name of a field, or a comment
                raise TooLarge(f"an event over {self._limit} bytes")
            if len(line) == len(piece):
                self._line += line
                continue
            if self._line:
                self._line += line
                line, self._line = bytes(self._line), bytearray()
            yield from self._take(line)

    def _take(self, line: bytes) -> Iterator[tuple[str, bytes]]:
        if self._first:
            line, self._first = line[3:] if line.startswith(b"\xef\xbb\xbf") else line, False
        if not line:
            event, data = self._event or b"message", b"\n".join(self._data)
            self._event, self._data, self._size = b"", [], 0
            if self._id is not None:
                self.last_id = self._id
            if data:
                yield event.decode("utf-8", "replace"), data
            return
        colon = line.find(b":")
        field = line if colon < 0 else line[:colon]
        value = b"" if colon < 0 else line[colon + 2 if line.startswith(b" ", colon + 1) else colon + 1 :]
        if field == b"data":
            self._data.append(value)
            self._size += len(value) + 1
            if self._size > self._limit + 1:
                raise TooLarge(f"an event over {self._limit} bytes")
        elif field == b"event":
            self._event = value
        elif field == b"id" and b"\0" not in value:
            self._id = value.decode("utf-8", "replace")
        elif field == b"retry" and value.isdigit() and len(value) < 10:  # over eleven days, nobody waits
            self.retry = int(value)


class Answer(NamedTuple):
    """What the server answered: the status, whether it is of an event stream, and the body.

    Of an event stream there is one for its opening, with an empty body, and one for the data of each event.
    """

    status: int
    streamed: bool
    body: bytes


class Ratd:
    """The server at the other end: a POST a message, each on a connection of its own while it lasts."""

    def __init__(self, address: Address, side: Side, proxy: Proxy | None = None) -> None:
        self.address = address
        self.proxy = proxy
        self.pool = _pool(address, side, proxy)
        host = address.host.partition("%")[0]  # a zone is of this machine alone (RFC 6874, section 4)
        self.host = f"[{host}]" if ":" in host else host
        if address.port != 443:
            self.host += f":{address.port}"

    def post(self, exchange: Exchange, headers: Mapping[str, str], seconds: float) -> Generator[Answer, None, None]:
        """Post the body of an exchange and give its answer, or one for each event of a stream, as they come.

        The bound proper is the deadline that ends the exchange. urllib3's ``seconds`` bound each operation of a socket
        only, and would let a server that sends a byte now and then hold a worker for ever. Raises Failure.
        """
        try:
            response = self.pool.request_on(exchange, f"POST /mcp HTTP/1.1\r\nHost: {self.host}", headers, seconds)
            try:
                streamed = response.media_type == "text/event-stream" and response.status < 300
                answer = Answer(response.status, streamed, b"")
                if answer.status < 200:
                    raise self.invalid(f"HTTP {answer.status}, which nobody asked for")
                body = io.BytesIO()  # rather than a list: pieces may be of a byte
                if answer.streamed:
                    exchange.bind(None)
                    yield answer
                    stream = EventStream()
                    for piece in exchange.pieces():
                        for _, data in stream.feed(piece):
                            yield answer._replace(body=data)
                else:
                    for piece in exchange.pieces():
                        body.write(piece)
                        if exchange.received > MESSAGE_LIMIT:
                            raise TooLarge
            except GeneratorExit:
                # The response was in the stream, whose end follows it as a rule: read, it leaves a connection that can
                # be used again.
                exchange.bind(0.1)
                with contextlib.suppress(OSError, http.client.HTTPException):
                    for _ in zip(range(8), exchange.pieces()):
                        pass
                raise
            finally:
                self.pool.release(exchange)
            if not answer.streamed:  # last, so that what queues it has nothing left to do but wait for the next
                answer = answer._replace(body=body.getvalue())
                body.close()  # a large answer is held once
                yield answer
        except TooLarge:
            raise self.invalid("over 16 MiB") from None
        except (OSError, http.client.HTTPException) as e:
            raise Failure(self.explain(e, exchange, seconds)) from e

    def invalid(self, reason: str) -> Failure:
        """The failure of an answer that is not what it should be."""
        return Failure(f"ratd at {self.address.text} sent an invalid response: {reason}")

    def no_answer(self, answer: Answer, called: bool) -> Failure:
        """The failure of an answer that is no JSON-RPC response to the message."""
        lines = [line for line in answer.body[:100_000].decode("utf-8", "replace").splitlines() if line.strip()]
        if answer.status >= 400:
            first = "".join(c if c.isprintable() else " " for c in lines[0].strip()[:200]) if lines else ""
            text = f"ratd at {self.address.text} answered HTTP {answer.status}"
            return Failure(f"{text}: {first}" if first else text, text if first.startswith(("{", "[")) else None)
        if not lines and 200 <= answer.status < 300:
            return self.invalid(f"none to the call (HTTP {answer.status})")
        to = "a JSON-RPC response to the call" if called else "what is answered to a notification"
        return self.invalid(f"not {to} (HTTP {answer.status})")

    def late(self, stage: str, seconds: float) -> str:
        """What is said of a request whose time is over."""
        if stage == "proxy" and self.proxy is not None:
            return f"proxy at {self.proxy.address} unreachable: no answer within {seconds:g}s"
        return f"ratd at {self.address.text} did not answer within {seconds:g}s"

    def explain(self, error: BaseException, exchange: Exchange, seconds: float) -> str:
        """What a failed exchange says. The stage that it reached decides whose failure it is, and not the class of the
        error, which is the same for either."""
        address, stage = self.address.text, exchange.stage
        reason = openssl_reason(error) if isinstance(error, ssl.SSLError) else ""
        if isinstance(error, (TimeoutError, socket.timeout)) and error.errno != errno.ETIMEDOUT:
            return self.late(stage, seconds)
        if stage == "proxy" and self.proxy is not None:
            if refused := re.search(r"Tunnel connection failed: (\d+)", str(error)):
                return f"proxy at {self.proxy.address} refused the tunnel: HTTP {refused[1]}"
            reason = reason or (system_reason(error) if isinstance(error, OSError) else "not an HTTP proxy")
            return f"proxy at {self.proxy.address} unreachable: {reason}"
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"rat refused the certificate of ratd at {address}: {reason}. Check the bundle with rat-tool check."
        if isinstance(error, ssl.SSLError) and not isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            # By its words: the names of some alerts lack ALERT, and for some the ssl module has no name.
            alert = re.match(r"(?:sslv3|tlsv1|tlsv13|ssl/tls) ", reason)
            name = re.sub(r"^(SSLV3|TLSV1|TLSV13)_ALERT_", "", error.reason or "")
            # Of a connection in use, an alert is of something else: a record that was damaged.
            if alert and name != "PROTOCOL_VERSION" and stage in ("handshake", "first request"):
                told = _ALERTS.get(name, reason)
                return (
                    f"ratd at {address} refused the TLS handshake: remote error: tls: {told}. "
                    "Check the bundle with rat-tool check."
                )
            if name == "PROTOCOL_VERSION" or stage == "handshake":
                return f"ratd at {address} does not answer in TLS 1.3: {reason}"
            return str(self.invalid(reason))
        if isinstance(error, http.client.IncompleteRead):
            total = f" of {exchange.expected}" if exchange.expected else ""
            return str(self.invalid(f"it ended after {exchange.received}{total} bytes"))
        if isinstance(error, OSError):
            return f"ratd unreachable at {address}: {system_reason(error)}"
        return str(self.invalid("not an HTTP response"))


# TLS alerts (RFC 8446, section 6.2) in the words of Go's crypto/tls, which people find when they search for them.
_ALERTS = {
    "UNKNOWN_CA": "unknown certificate authority",
    "BAD_CERTIFICATE": "bad certificate",
    "CERTIFICATE_REQUIRED": "certificate required",
    "CERTIFICATE_EXPIRED": "expired certificate",
    "CERTIFICATE_REVOKED": "revoked certificate",
    "UNSUPPORTED_CERTIFICATE": "unsupported certificate",
    "CERTIFICATE_UNKNOWN": "unknown certificate",
    "ACCESS_DENIED": "access denied",
    "HANDSHAKE_FAILURE": "handshake failure",
    "INTERNAL_ERROR": "internal error",
}


# --- Calls in flight ----------------------------------------------------------------------------------


class Posting(Exchange):
    """A message on its way: a call, a notification, a response or a batch, from its line to its end.

    It settles once, under the lock of all exchanges: answered, canceled, late or stopped. Whoever settles it first
    decides, and what it writes is queued in that same step. Settling drops the line.
    """

    def __init__(self, line: bytes, message: Message, headers: Mapping[str, str]) -> None:
        super().__init__(line)
        self.message = message
        self.headers = headers
        self.seconds = REQUEST_SECONDS + message.wait
        self.started = 0.0  # by the monotonic clock, as its deadline; set when a worker takes it
        self.due = 0.0
        self.passed_over = False  # the worker's own: whether an event of its stream was
        self.unanswered: dict[tuple[str, object], list[Call]] = {}  # guarded by the lock; changed by the worker alone
        for call in message.calls:
            self.unanswered.setdefault(call.key, []).append(call)

    @property
    def allowed(self) -> float:
        """Seconds that it had when it is late: of silence, or in all."""
        # As `InFlight.stream` adds them up: taking the start off again would lose a little.
        return STREAM_SECONDS if self.due == self.started + STREAM_SECONDS else self.seconds


class InFlight:
    """The register of postings, the calls among them by identifier, and their deadlines.

    Everything in it is guarded by `Exchange.lock`. A batch is not registered by the identifiers in it: canceling one
    of its calls would end the others.
    """

    def __init__(self, answers: queue.SimpleQueue[bytes | threading.Event | None]) -> None:
        self._answers = answers
        self._lock = Exchange.lock
        self._changed = threading.Condition(self._lock)
        self._postings: set[Posting] = set()
        self._calls: dict[tuple[str, object], list[Posting]] = {}  # the latest of one identifier last
        # Those with a worker, so few enough to look through. One that is settled when it is due, its worker reading a
        # stream out after the response, loses its connection.
        self._started: set[Posting] = set()
        self._next_due = float("inf")  # when the deadline thread looks through them
        self._stopped = False

    def add(self, posting: Posting) -> bool:
        """Register a posting; False when the register was stopped."""
        with self._lock:
            if self._stopped:
                return False
            self._postings.add(posting)
            if posting.message.calls and not posting.message.batch:
                self._calls.setdefault(posting.message.calls[0].key, []).append(posting)
            return True

    def listening(self) -> int:
        """How many subscriptions are registered."""
        with self._lock:
            return sum(posting.message.method == LISTEN for posting in self._postings)

    def start(self, posting: Posting) -> bool:
        """Start the time of a posting that a worker takes; False when it is settled already."""
        with self._lock:
            if posting.ended:
                return False
            posting.started = time.monotonic()
            self._started.add(posting)
            self._bound(posting, posting.started + posting.seconds)
            return True

    def finish(self, posting: Posting) -> None:
        """End the time of a posting whose worker has left it."""
        with self._lock:
            self._started.discard(posting)

    def _bound(self, posting: Posting, due: float) -> None:  # with the lock held
        posting.due = due
        if due < self._next_due:
            self._next_due = due
            self._changed.notify()

    def stream(self, posting: Posting, line: bytes | None, answered: Sequence[tuple[str, object]] = ()) -> bool:
        """Queue a line of an event stream and extend its time; settles the posting when its last call is answered.

        ``answered`` are the keys of calls of it that the line answers. Returns whether the posting is settled.
        """
        with self._lock:
            if posting.ended:
                return True
            for key in answered:
                posting.unanswered[key].pop(0)
                if not posting.unanswered[key]:
                    del posting.unanswered[key]
            if answered and not posting.unanswered:
                if posting.due == float("inf"):  # reading the stream out is not for ever
                    self._bound(posting, time.monotonic() + posting.seconds)
                return self._settle(posting, line)
            if line is not None:
                self._answers.put(line)
            if posting.message.method == LISTEN:
                posting.due = float("inf")
            else:
                posting.due = min(time.monotonic() + posting.seconds, posting.started + STREAM_SECONDS)
            return False

    def settle(self, posting: Posting, line: bytes | None) -> None:
        """Settle a posting and queue its line, if any; nothing is done when it was settled before."""
        with self._lock:
            self._settle(posting, line)

    def fail(self, posting: Posting, text: str, shut: bool = False) -> bool:
        """Settle a posting with an error for each of its calls that is not answered; False when it was settled before.

        Its socket is shut in either case when ``shut``: a worker may be reading on.
        """
        with self._lock:  # a stream may be answering some of a batch at this moment
            unanswered = () if posting.ended else [call for same in posting.unanswered.values() for call in same]
            line = failure_line(unanswered, posting.message.batch, text)
            return self._settle(posting, line, shut)

    def _settle(self, posting: Posting, line: bytes | None, shut: bool = False) -> bool:  # with the lock held
        if shut:
            posting._shut()
        if posting.ended:
            return False
        posting.ended, posting.body = True, None
        self._postings.discard(posting)
        if posting.message.calls and not posting.message.batch:
            key = posting.message.calls[0].key
            same = self._calls[key]
            same.remove(posting)
            if not same:
                del self._calls[key]
        if line is not None:
            self._answers.put(line)
        return True

    def cancel(self, key: tuple[str, object]) -> Posting | None:
        """Settle the latest call of an identifier, writing nothing, and shut its socket. Returns it, if any."""
        with self._lock:
            same = self._calls.get(key)
            if not same:
                return None
            posting = same[-1]
            self._settle(posting, None, shut=True)
            return posting

    def next_late(self) -> Posting | None:
        """Wait for a posting whose time is over and is not settled; None when the register was stopped."""
        with self._lock:
            while not self._stopped:
                posting = min(self._started, key=lambda posting: posting.due, default=None)
                self._next_due = posting.due if posting else float("inf")
                remaining = self._next_due - time.monotonic()
                if posting is None or remaining > 0:
                    self._changed.wait(min(remaining, STREAM_SECONDS))  # infinity is more than a wait takes
                    continue
                self._started.remove(posting)
                if not posting.ended:
                    return posting
                posting._shut()
            return None

    def stop(self) -> None:
        """Settle every posting, writing nothing, and shut the sockets. Nothing is registered or queued afterwards."""
        with self._lock:
            self._stopped = True
            for posting in list(self._postings):
                self._settle(posting, None, shut=True)
            self._changed.notify_all()


# --- Relay --------------------------------------------------------------------------------------------


def read_lines(descriptor: int) -> Iterator[bytes | None]:
    """The lines of a descriptor without their ends, the last one also when it has none; None for one over the limit.

    A line ends in LF or CRLF (MCP, stdio transport). What is over `MESSAGE_LIMIT` is told as soon as it is known,
    then drained without being held. Raises OSError when reading fails.
    """

    def whole(line: bytes) -> bytes | None:
        line = line[:-1] if line.endswith(b"\r") else line
        return line if len(line) <= MESSAGE_LIMIT else None

    pending: list[bytes] = []
    size = 0  # of what is pending; -1 while a line over the limit is drained
    while chunk := os.read(descriptor, PIECE):  # what a pipe holds; more would be mapped and unmapped for each read
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            if size >= 0:
                yield whole(b"".join((*pending, piece)) if pending else piece)
            pending, size = [], 0
        if rest and size >= 0:
            pending.append(rest)
            size += len(rest)
            if size > MESSAGE_LIMIT + 1:  # the one more may be a carriage return
                pending, size = [], -1
                yield None
    if size > 0:
        yield whole(b"".join(pending))


def one_line(body: bytes) -> bytes:
    """A JSON text on a line of its own: white space around it dropped, and line breaks in it replaced.

    A line break within JSON stands between tokens, where a space means the same (RFC 8259, section 2): inside a string
    it is always escaped.
    """
    return body.strip(b" \t\r\n").replace(b"\r", b" ").replace(b"\n", b" ")


class Workers:
    """Threads for postings, of which no more are started than there were ever postings unfinished at once.

    A thread of an executor is given one piece of work, to take postings for good; the one that was idle last gets the
    next: its memory is warm. An item a posting would leave the number of threads to the executor's count of idle ones,
    which is wrong in some Pythons (3.12.1 grew to the maximum), and make a Future of each for nobody; and in a queue
    that idle threads share, each item wakes one of them too many.
    """

    def __init__(self, name: str, work: Callable[[Posting], None]) -> None:
        self._executor = ThreadPoolExecutor(WORKERS, name)
        self._work = work
        self._lock = threading.Lock()  # guards all below
        self._idle: list[queue.SimpleQueue[Posting]] = []  # what each idle thread waits for
        self._waiting: collections.deque[Posting] = collections.deque()  # for a thread
        self._started = 0

    def post(self, posting: Posting) -> bool:
        """Have a thread do the work on a posting; False when there is none and none can be started."""
        with self._lock:
            if self._idle:
                self._idle.pop().put(posting)
                return True
            self._waiting.append(posting)
            if self._started == WORKERS:
                return True
            self._started += 1
        try:
            self._executor.submit(self._take_postings)
        except RuntimeError:  # no thread to be had: those there are will come to it
            with self._lock:
                self._started -= 1
                if not self._started:
                    self._waiting.clear()
                return self._started > 0
        return True

    def _take_postings(self) -> None:
        own: queue.SimpleQueue[Posting] = queue.SimpleQueue()
        while True:
            with self._lock:
                posting = self._waiting.popleft() if self._waiting else None
                if posting is None:
                    self._idle.append(own)
            self._work(posting or own.get())


class Relay:
    """The threads between the harness and the server, and what one message comes to.

    The reader thread dispatches lines, the workers post them, one writer thread owns the output, one more thread ends
    what is late; the main thread waits for the reason to stop, since signals reach it there.
    """

    def __init__(self, ratd: Ratd, log: Log) -> None:
        self._ratd = ratd
        self._log = log
        # Whole lines, events that tell how far they are written, and None at the end.
        self._answers: queue.SimpleQueue[bytes | threading.Event | None] = queue.SimpleQueue()
        self._stops: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self._awake, self.wakeup = os.pipe()  # what `run` waits for, and where signals are to be written
        if os.name != "nt":  # where it is not written by signals
            os.set_blocking(self.wakeup, False)
        self._in_flight = InFlight(self._answers)
        self._workers = Workers("post", self._relay)
        # Subscriptions last, and would take the workers that calls need.
        self._listeners = Workers("listen", self._relay)
        # The version that initialize settled on. Written by a worker before the answer is queued, so before the harness
        # can send a message that counts on it; read by the reader thread.
        self._negotiated: str | None = None
        # The annotated arguments of the tools listed, by name, and the names of those logged as faulty: written
        # by workers before the listing is queued and read by the reader thread, by single operations of a dict or set.
        self._learned: dict[str, Mapping[str, tuple[str, ...]]] = {}
        self._faulty: set[str] = set()

    def stop(self, reason: str, status: int = 0) -> None:
        """Have `run` end. Any thread or signal handler may call it: the put of a SimpleQueue is reentrant."""
        self._stops.put((reason, status))
        with contextlib.suppress(OSError):  # full: it is woken already
            os.write(self.wakeup, b"\0")

    def run(self) -> int:
        """Relay until told to stop. Returns the exit status: 0, or 1 when reading or writing failed.

        Leaves threads behind, waiting for the system: the caller ends the process with os._exit.
        """
        writer = self._start("writer", self._write)
        self._start("deadline", self._end_late)
        self._start("reader", self._read)  # last, so that no worker takes the thread that another of these needs
        reason, status = self._wait_for_stop()
        self._in_flight.stop()
        self._answers.put(None)
        if writer.is_alive():
            writer.join(LAST_ANSWERS_SECONDS)
        self._log.write("info", "stopped", reason=reason)
        self._log.close(0.04)
        return status

    def _start(self, name: str, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except BaseException as e:  # noqa: BLE001 - without any one of them the process would stay behind, deaf
                self.stop(f"the {name} thread failed: {type(e).__name__}: {e}", 1)

        thread = threading.Thread(target=run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as e:
            self.stop(f"the {name} thread failed: {e}", 1)
        return thread

    def _wait_for_stop(self) -> tuple[str, int]:
        # Of two signals at once the system may give one to another thread, which ends no wait of the main thread: the
        # handlers of both were seen not to run. What C writes to the descriptor does.
        while os.name != "nt" and self._stops.empty():
            os.read(self._awake, 1)
        while True:  # on Windows a signal interrupts neither wait
            with contextlib.suppress(queue.Empty):
                return self._stops.get(timeout=0.1)

    # Reader thread

    def _read(self) -> None:
        try:
            for line in read_lines(0):
                self._dispatch(line)
            self.stop("end of input")
        except OSError as e:
            self.stop(f"cannot read the input: {system_reason(e)}", 1)

    def _dispatch(self, line: bytes | None) -> None:
        if line is None:
            self._refuse(ERROR_CODE, "message over 16 MiB, not relayed")
            return
        if not line.strip(b" \t\r"):
            return
        try:
            message = read_message(line)
        except InvalidMessage as e:
            self._refuse(e.code, f"invalid JSON-RPC message: {e}")
            return
        except MemoryError:
            self._refuse(ERROR_CODE, "rat cannot relay the message: out of memory")
            return
        posting = Posting(
            line, message._replace(arguments=None), request_headers(message, self._negotiated, self._learned)
        )
        if not self._in_flight.add(posting):
            return
        if message.method == LISTEN and self._in_flight.listening() > WORKERS:  # it would wait, and never be late
            self._fail(posting, f"rat cannot relay the message: {WORKERS} subscriptions are open, end one first")
            return
        if message.method == "notifications/cancelled" and message.request is not None and not message.calls:
            canceled = self._in_flight.cancel(message.request)
            if canceled is not None:
                self._log.write("debug", "call canceled", id=canceled.message.calls[0].text)
        workers = self._listeners if message.method == LISTEN else self._workers
        if not workers.post(posting):
            self._fail(posting, "rat cannot relay the message: can't start new thread")

    def _refuse(self, code: int, text: str) -> None:
        self._answers.put(error_line("null", code, text))
        self._log.write("warn", "relay failed", error=text)

    # Workers

    def _relay(self, posting: Posting) -> None:
        status: int | None = None
        ahead = 0
        try:
            if not self._in_flight.start(posting):
                return
            # Closed when left, an answer that is not read to its end closes its connection.
            with contextlib.closing(self._ratd.post(posting, posting.headers, posting.seconds)) as answers:
                for answer in answers:
                    status = answer.status
                    if answer.streamed:
                        if self._take_event(posting, answer.body):
                            break
                        ahead += len(answer.body)
                        if ahead > AHEAD:
                            self._await_harness(posting)
                            ahead = 0
                    else:
                        self._in_flight.settle(posting, self._line(posting.message, answer))
            if not posting.ended:
                if posting.unanswered:
                    raise self._ratd.invalid("an event stream without the response to the call")
                self._in_flight.settle(posting, None)
        except Failure as e:
            self._fail(posting, str(e), logged=e.logged)
        except BaseException as e:  # noqa: BLE001 - an executor would keep it in a Future that nobody reads
            self._fail(posting, f"rat cannot relay the message: {type(e).__name__}: {e}")
        finally:
            self._in_flight.finish(posting)
        if self._log.level <= LEVELS["debug"]:
            duration = f"{(time.monotonic() - posting.started) * 1000:.1f}ms"
            self._log.write("debug", "message", **_labels(posting.message), status=status, duration=duration)

    def _line(self, message: Message, answer: Answer) -> bytes | None:
        """The line that is written for an answer, None for none. Raises Failure when it is no answer to the message."""
        if not message.calls and 200 <= answer.status < 300 and not answer.body.strip(b" \t\r\n"):
            return None
        with contextlib.suppress(ValueError):
            value = parse_json(answer.body) if message.batch or message.calls else None
            if message.batch:
                if answer.status == 200 and isinstance(value, list):
                    return one_line(answer.body)
            elif isinstance(value, dict) and (key := _answers(value)) is not None:
                if key == message.calls[0].key:
                    self._learn(message, value)
                    return one_line(answer.body)
                self._ratd.pool.close_idle()  # the response to this call is still to come, on one of them
        raise self._ratd.no_answer(answer, bool(message.calls))

    def _take_event(self, posting: Posting, data: bytes) -> bool:
        """Write an event of a stream; returns whether the stream has served its purpose.

        What is no JSON, or a response to another call, is passed over: the stream of messages must stay one.
        """
        if not data:
            return self._in_flight.stream(posting, None)
        try:
            value = parse_json(data)
            responses: dict[tuple[str, object], list[Mapping[str, object]]] = {}
            for message in value if isinstance(value, list) and value else [value]:
                if not isinstance(message, dict):
                    raise ValueError("no JSON-RPC message")
                if _text(message.get("method")) is not None and not {"result", "error"} & message.keys():
                    continue
                key = _answers(message)
                if key is None or len(responses.get(key, ())) == len(posting.unanswered.get(key, ())):
                    raise ValueError("no response to the call")
                responses.setdefault(key, []).append(message)
        except ValueError as e:
            # The first of a stream: some servers keep theirs alive with events of their own, for hours.
            level = "debug" if posting.passed_over else "warn"
            self._log.write(level, "event passed over", **_labels(posting.message), error=e)
            posting.passed_over = True
            return False
        for message in (message for same in responses.values() for message in same):
            self._learn(posting.message, message)
        return self._in_flight.stream(posting, one_line(data), [key for key, same in responses.items() for _ in same])

    def _await_harness(self, posting: Posting) -> None:
        """Wait until all that is queued by now is written, or the posting is settled."""
        written = threading.Event()
        self._answers.put(written)
        while not written.wait(1) and not posting.ended:
            self._in_flight.stream(posting, None)  # the time that a harness takes is not the server's

    def _learn(self, message: Message, response: Mapping[str, object]) -> None:
        """Keep what later requests need of a response: the version settled on, the annotations of tools."""
        result, error = response.get("result"), response.get("error")
        if isinstance(error, dict) and error.get("code") == HEADER_MISMATCH:
            self._learned.clear()  # the server's schemas are not those that were listed, or no longer
        if not isinstance(result, dict):
            return
        version, tools = result.get("protocolVersion"), result.get("tools")
        if message.method == "initialize" and isinstance(version, str):
            self._negotiated = version
        if message.method != "tools/list" or not isinstance(tools, list):
            return
        for tool in tools:
            name = tool.get("name") if isinstance(tool, dict) else None
            if not isinstance(name, str):
                continue
            if len(self._learned) >= _LEARNED:
                self._learned.clear()
                self._faulty.clear()
            parameters, fault = header_parameters(tool.get("inputSchema"))
            self._learned[name] = {} if fault else parameters
            if fault and name not in self._faulty:
                self._faulty.add(name)
                self._log.write("warn", "annotations of a tool not used", tool=name, error=fault)

    # Deadline thread

    def _end_late(self) -> None:
        while (posting := self._in_flight.next_late()) is not None:
            # Written here, not by its worker: one that is stuck in name resolution would never write it.
            self._fail(posting, self._ratd.late(posting.stage, posting.allowed), shut=True)

    def _fail(self, posting: Posting, text: str, shut: bool = False, logged: str | None = None) -> None:
        if self._in_flight.fail(posting, text, shut):
            self._log.write("warn", "relay failed", **_labels(posting.message), error=logged or text)

    # Writer thread

    def _write(self) -> None:
        try:
            while (line := self._answers.get()) is not None:
                if isinstance(line, threading.Event):
                    line.set()
                    continue
                # A large line is not copied for the sake of its end; there is no other writer.
                for data in (line + b"\n",) if len(line) < PIECE else (line, b"\n"):
                    view = memoryview(data)
                    while view:
                        view = view[os.write(1, view[: 1 << 20]) :]
        except OSError as e:
            # Not by system_reason, for which a broken pipe is a connection's.
            self.stop(f"cannot write the output: {(e.strerror or str(e)).lower()}", 1)


# Tools whose annotations are kept: more than any server has, less than would fill the memory.
_LEARNED = 10_000


def _answers(response: Mapping[str, object]) -> tuple[str, object] | None:
    """The key of the call that a JSON-RPC response (section 5) answers, None for what is none."""
    if response.get("jsonrpc") == "2.0" and ("result" in response or "error" in response):
        return identifier_key(response.get("id"))
    return None


def _labels(message: Message) -> dict[str, object]:
    identifier = ",".join(call.text for call in message.calls[:10]) or None
    return {"method": "batch" if message.batch else message.method, "id": identifier}


# --- Log ----------------------------------------------------------------------------------------------


class Log:
    """Records on stderr, a line each, in the form of the text handler of Go's slog: never the content of a message.

    A harness that does not read stderr blocks whoever writes to it: records pass through a bounded queue to a thread
    of their own. What overflows is dropped and counted.
    """

    def __init__(self, level: str = "info") -> None:
        self.level = LEVELS[level]
        self._records: queue.Queue[str | None] = queue.Queue(1000)
        self._lock = threading.Lock()
        self._dropped = 0  # guarded by the lock
        self._writer = threading.Thread(target=self._drain, name="log", daemon=True)
        self._writer.start()

    def write(self, level: str, message: str, **fields: object) -> None:
        """Log a record of a level ("debug", "info" or "warn"); a field of None is left out."""
        if LEVELS[level] < self.level:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        known = {"time": now, "level": level.upper(), "msg": message, **fields}
        record = " ".join(f"{name}={_quoted(str(value))}" for name, value in known.items() if value is not None)
        try:
            self._records.put_nowait(record)
        except queue.Full:
            with self._lock:
                self._dropped += 1

    def _drain(self) -> None:
        while (record := self._records.get()) is not None:
            with self._lock:
                dropped, self._dropped = self._dropped, 0
            if dropped:
                record += f'\nlevel=WARN msg="log records dropped" count={dropped}'
            data = memoryview(f"{record}\n".encode("utf-8", "backslashreplace"))
            with contextlib.suppress(OSError):  # there is nowhere left to say it
                while data:
                    try:
                        data = data[os.write(2, data) :]
                    except BlockingIOError:  # a stderr shared with the harness, which may want it so
                        select.select([], [2], [])

    def close(self, seconds: float) -> None:
        """Wait for what was logged to be written, for ``seconds`` at most: stderr may be blocked."""
        with contextlib.suppress(queue.Full):
            self._records.put_nowait(None)
        self._writer.join(seconds)


def _quoted(value: str) -> str:
    if len(value) > 500:  # identifiers and methods come from the harness
        value = f"{value[:500]}..."
    if value and value.isprintable() and not re.search(r"[\s\"=]", value):
        return value
    return json.dumps(value, ensure_ascii=not value.isprintable())


# --- Main ---------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    """Run the bridge with the arguments of a command line (those of the process by default).

    Returns the exit status when it does not start: 1 for a client directory or a proxy that cannot be used, or no
    thread to be had. Once it relays it ends the process. Raises SystemExit(2) on usage.
    """
    parser = FlagParser(
        prog="rat",
        allow_abbrev=False,
        description="Bridge a harness that speaks MCP on stdio to a server that requires a client certificate.",
        epilog="example: rat --server ratd.example:7433 --bundle ~/bundle/clients/work",
    )
    add_flags(parser)
    parser.add_argument("--version", action=PrintVersion, nargs=0, help="print the version and exit")
    flags = parser.parse_args(arguments)
    try:
        _start_relay(flags.server, flags.bundle, flags.log_level)
    except (ValueError, OSError, RuntimeError) as e:  # a BundleError is the first, no thread for the log the last
        if sys.stderr is not None:  # print would take stdout for it
            print("rat:", str(e).replace("\n", "\\n"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _start_relay(server: Address, bundle: str, level: str) -> NoReturn:
    """Relay until told to stop, and end the process. What it raises, it raises before the first message."""
    proxy = environment_proxy(server)
    side = load_side(bundle)
    ratd = Ratd(server, side, proxy)
    _own_standard_streams()
    warnings.simplefilter("ignore")  # a library's are not for the person who reads stderr
    # Whatever PYTHONINTMAXSTRDIGITS says: a message may hold more digits, and int() takes the square of their time.
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(4300)
    # A message nested as deep as the recursion limit of any Python would overflow the small stacks of some systems.
    threading.stack_size(4 << 20)
    log = Log(level)
    relay = Relay(ratd, log)
    if os.name != "nt":
        signal.set_wakeup_fd(relay.wakeup, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: relay.stop(signal.Signals(n).name))
    day, remaining = side.expires.date(), (side.expires - datetime.now(timezone.utc)).days
    log.write(
        "info", "relaying", version=__version__, server=server.text, tenant=side.tenant, session=side.name, expires=day
    )
    if remaining < 365:
        log.write("warn", "the bundle expires within a year, issue another", expires=day, days=remaining)
    status = relay.run()
    # Threads may be waiting for the system, in name resolution above all, where nothing can wake them: an exit that
    # joins them, as the interpreter's does, could take as long as they do.
    os._exit(status)


def version_text() -> str:
    """What --version prints: the versions of everything that takes part in a connection."""
    library = urllib3.__version__  # type: ignore[attr-defined]
    python = sys.version.split()[0]
    return f"rat {__version__} ({_form()}, Python {python}, {ssl.OPENSSL_VERSION}, urllib3 {library})"


def _form() -> str:
    """How this rat was delivered: "frozen", "zipapp", "installed", or "source" for a checkout."""
    if getattr(sys, "frozen", False):
        return "frozen"
    if __loader__.__class__.__name__ == "zipimporter":  # type: ignore[name-defined]
        return "zipapp"
    here = os.path.dirname(os.path.abspath(__file__))
    return "installed" if os.path.isdir(os.path.join(here, "rat_schemas")) else "source"


def _own_standard_streams() -> None:
    """Have descriptors 0 and 1 carry messages and nothing else, untouched and complete."""
    # One that is closed would be given to the next socket, and the log would go to the server.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.platform == "win32":
        import msvcrt

        for standard in (0, 1, 2):
            msvcrt.setmode(standard, os.O_BINARY)
    else:
        for standard in (0, 1):  # a harness may hand over pipes that are not, and answers would be lost
            os.set_blocking(standard, True)
    sys.stdout = sys.stderr  # a print of some library would break the stream of messages


if __name__ == "__main__":
    sys.exit(main())
