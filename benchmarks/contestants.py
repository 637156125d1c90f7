"""What takes part in a benchmark: stdio bridges in processes of their own, and the same POST made without one.

CPU and memory are read from /proc, of a process and all below it: this part needs Linux.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Callable, NamedTuple

import urllib3

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from bundles import SERVER, Authority, Bundle, write_side  # noqa: E402
from floor_server import FloorServer  # noqa: E402
from harness import rat_environment  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Where peers are installed; .gitignore names it.
PEERS = ROOT / ".venv-peers"

_TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds


def message(identifier: int | None, method: str, params: Mapping[str, object] | None = None) -> bytes:
    """A JSON-RPC message with the end of its line; a notification without an identifier."""
    fields: dict[str, object] = {"jsonrpc": "2.0"}
    if identifier is not None:
        fields["id"] = identifier
    fields["method"] = method
    if params is not None:
        fields["params"] = params
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def small_call(identifier: int) -> bytes:
    """The call that is measured: of a tool without arguments, answered with a text of two letters."""
    return message(identifier, "tools/call", {"name": "small", "arguments": {}})


class Arena(NamedTuple):
    """A floor server, the client directory for it, and the CA by which those know it who check names."""

    server: FloorServer
    client: Path
    public_ca: Path

    @property
    def mutual(self) -> str:
        """HOST:PORT of the port that requires a client certificate."""
        return f"127.0.0.1:{self.server.ports.mutual}"

    @property
    def tls(self) -> str:
        """The URL over TLS that requires none."""
        return f"https://127.0.0.1:{self.server.ports.tls}/mcp"

    @property
    def plain(self) -> str:
        """The URL without TLS."""
        return f"http://127.0.0.1:{self.server.ports.plain}/mcp"


@contextlib.contextmanager
def arena() -> Iterator[Arena]:
    """A floor server with bundles of its own, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="rat-benchmark-") as place:
        bundle = Bundle(Path(place) / "bundle")
        public = Authority("public")
        side = write_side(
            Path(place) / "public", "server", public.certificate, public.issue("floor", SERVER, address="127.0.0.1")
        )
        with FloorServer(bundle.server, side) as server:
            yield Arena(server, bundle.client, side / "ca.crt")


class Bridge:
    """A stdio bridge in a process of its own, past the opening of its session."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._pending = b""
        self._lines: deque[bytes] = deque()
        started = time.perf_counter()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=rat_environment(environment),
            bufsize=0,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._in, self._out = self.process.stdin.fileno(), self.process.stdout.fileno()
        client = {"name": "benchmark", "version": "1"}
        params = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client}
        self.send(message(0, "initialize", params))
        answer = json.loads(self.line())
        assert "result" in answer, answer
        # Seconds from the start of the process to the answer of initialize.
        self.first_answer = time.perf_counter() - started
        self.send(message(None, "notifications/initialized"))
        self.send(message(1, "tools/list"))
        assert b'"tools"' in self.line()

    def send(self, data: bytes) -> None:
        """Write bytes, whole."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._in, view) :]

    def line(self) -> bytes:
        """The next line, without its end."""
        pieces = []
        while not self._lines:
            piece = os.read(self._out, 1 << 20)
            if not piece:
                raise EOFError(f"{self.process.args!r} ended, status {self.process.wait(10)}")
            pieces.append(piece)
            if b"\n" in piece:
                *lines, rest = (self._pending + b"".join(pieces)).split(b"\n")
                self._lines.extend(lines)
                self._pending, pieces = rest, []
        return self._lines.popleft()

    def one_at_a_time(self, calls: int) -> list[float]:
        """Make calls one after the other. Returns the seconds of each."""
        times = []
        for identifier in range(1000, 1000 + calls):
            line = small_call(identifier)
            before = time.perf_counter()
            self.send(line)
            answer = self.line()
            times.append(time.perf_counter() - before)
            assert b'"ok"' in answer, answer
        return times

    def at_once(self, calls: int, at_once: int) -> float:
        """Make calls, so many of them in flight all the time. Returns the seconds of all."""
        lines = [small_call(identifier) for identifier in range(1000, 1000 + calls)]
        before = time.perf_counter()
        self.send(b"".join(lines[:at_once]))
        for sent in range(at_once, calls + at_once):
            answer = self.line()
            assert b'"ok"' in answer, answer
            if sent < calls:
                self.send(lines[sent])
        return time.perf_counter() - before

    def cpu(self) -> float:
        """Seconds of CPU so far, in steps of a tick of the system."""
        return sum(_cpu(process) for process in _tree(self.process.pid))

    def memory(self, field: str = "VmRSS") -> int:
        """Bytes in memory, of ``VmRSS`` now or of ``VmHWM`` at the peak."""
        total = 0
        for process in _tree(self.process.pid):
            with contextlib.suppress(OSError):  # it ended
                status = Path(f"/proc/{process}/status").read_text()
                total += next((int(line.split()[1]) for line in status.splitlines() if line.startswith(field)), 0) << 10
        return total

    def close(self) -> None:
        """End the process, and all below it."""
        below = _tree(self.process.pid)[1:]
        self.process.stdin.close()  # type: ignore[union-attr]
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        for process in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, 9)
        self.process.stdout.close()  # type: ignore[union-attr]


def _tree(root: int) -> list[int]:
    found = [root]
    for process in found:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{process}/task"):
                children = Path(f"/proc/{process}/task/{task}/children").read_text()
                found.extend(int(child) for child in children.split())
    return found


def _cpu(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) * _TICK


class Direct:
    """The same POST made from one thread, without a bridge: what a bridge is measured against."""

    def __init__(self, post: Callable[[bytes], bytes]) -> None:
        self._post = post
        assert b'"ok"' in post(small_call(0).rstrip())

    def one_at_a_time(self, calls: int) -> list[float]:
        """Make calls one after the other. Returns the seconds of each."""
        times = []
        for identifier in range(1000, 1000 + calls):
            body = small_call(identifier).rstrip()
            before = time.perf_counter()
            answer = self._post(body)
            times.append(time.perf_counter() - before)
            assert b'"ok"' in answer
        return times

    def cpu(self) -> float:
        """Seconds of CPU of this process so far, of which the calls are nearly all while they are made."""
        return time.process_time()


_HEADERS = {
    "Content-Type": "application/json",
    "Accept": "application/json, text/event-stream",
    "Mcp-Protocol-Version": "2025-06-18",
}


def _client_context(client: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(client / "client.crt", client / "client.key")
    context.load_verify_locations(client / "ca.crt")
    return context


def direct_urllib3(where: Arena) -> Direct:
    """Through urllib3, as it comes."""
    pool = urllib3.PoolManager(ssl_context=_client_context(where.client), assert_hostname=False)
    url = f"https://{where.mutual}/mcp"

    def post(body: bytes) -> bytes:
        data: bytes = pool.request("POST", url, body=body, headers=_HEADERS).data
        return data

    return Direct(post)


def direct_http_client(where: Arena) -> Direct:
    """Through http.client of the standard library, as it comes."""
    port = where.server.ports.mutual
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=_client_context(where.client))

    def post(body: bytes) -> bytes:
        connection.request("POST", "/mcp", body, _HEADERS)
        return connection.getresponse().read()

    return Direct(post)


def direct_socket(where: Arena) -> Direct:
    """On a bare TLS socket, the request's bytes made beforehand: what no HTTP client can beat."""
    raw = socket.create_connection(("127.0.0.1", where.server.ports.mutual))
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock = _client_context(where.client).wrap_socket(raw)
    fields = "".join(f"{name}: {value}\r\n" for name, value in _HEADERS.items())
    head = f"POST /mcp HTTP/1.1\r\nHost: {where.mutual}\r\n{fields}".encode()

    def post(body: bytes) -> bytes:
        sock.sendall(b"%sContent-Length: %d\r\n\r\n%s" % (head, len(body), body))
        return sock.recv(65536)

    return Direct(post)


# As the command that pip installs runs it: imported, so that its bytecode is kept, as that of a script is not.
RAT = (sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); import rat; sys.exit(rat.main())")


def installed_rat() -> Sequence[str]:
    """rat as a user has it, as the peers are: installed in an environment that holds nothing else.

    Its source where that cannot be had; a Python with many packages takes longer to find those of rat.
    """
    place = ROOT / ".venv-rat"
    try:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True, capture_output=True)
        subprocess.run(
            [str(place / "bin/pip"), "install", "-q", str(ROOT)], check=True, capture_output=True, timeout=600
        )
    except (OSError, subprocess.SubprocessError):
        return RAT
    return (str(place / "bin/rat"),)


def rat_command(where: Arena, rat: Sequence[str] = RAT) -> list[str]:
    """The command of rat, for the port that requires its certificate."""
    return [*rat, "--server", where.mutual, "--bundle", str(where.client)]


class Peer(NamedTuple):
    """A bridge that a user would take instead: what installs it, and its command for a URL."""

    name: str
    install: Sequence[str]
    executable: Path
    arguments: Sequence[str]
    runtime: Sequence[str] = ()

    def installed(self) -> str | None:
        """Install it unless it is there. Returns why it could not be, None when it is."""
        if self.executable.exists():
            return None
        PEERS.mkdir(exist_ok=True)
        (PEERS / "package.json").write_text("{}")  # or npm would take a directory above for its own
        try:
            if self.install[0] != "npm" and not (PEERS / "bin").exists():
                subprocess.run([sys.executable, "-m", "venv", str(PEERS)], check=True, capture_output=True)
            subprocess.run(self.install, check=True, capture_output=True, cwd=PEERS, timeout=600)
        except (OSError, subprocess.SubprocessError) as e:
            return f"{type(e).__name__}: {e}"
        return None

    def command(self, url: str) -> list[str]:
        """Its command for a URL."""
        return [*self.runtime, str(self.executable), *(argument.format(url=url) for argument in self.arguments)]


_NPM = ("npm", "install", "--no-fund", "--no-audit", "--no-save", "--prefix", str(PEERS))
# npx would add a second to each start: the scripts are run as they are installed.
PEER_BRIDGES = (
    Peer(
        "mcp-remote",
        (*_NPM, "mcp-remote", "supergateway"),
        PEERS / "node_modules/mcp-remote/dist/proxy.js",
        ("{url}", "--transport", "http-only", "--allow-http"),
        ("node",),
    ),
    Peer(
        "supergateway",
        (*_NPM, "mcp-remote", "supergateway"),
        PEERS / "node_modules/supergateway/dist/index.js",
        ("--streamableHttp", "{url}", "--logLevel", "none"),
        ("node",),
    ),
    Peer(
        "mcp-proxy",
        (str(PEERS / "bin/pip"), "install", "-q", "mcp-proxy"),
        PEERS / "bin/mcp-proxy",
        ("--transport", "streamablehttp", "{url}"),
    ),
)
