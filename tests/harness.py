"""A harness: drives a real ``rat`` process over pipes, and hangs nowhere.

What it reads is collected by threads of its own; waiting for it is bounded by `HANG`, and a process
still there long after is killed, so that a test fails rather than waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from fault_server import HANG

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent
RAT = ROOT / "rat.py"

# What starts rat in the tests, as words of a shell; a frozen or zipped rat is tested by naming it
# here.
COMMAND_VARIABLE = "RAT_TEST_COMMAND"


def rat_command(patch: str | None = None) -> list[str]:
    """The command of rat, without flags.

    ``patch`` is Python run before its ``main``, to set what a test cannot wait for or have: it
    always runs the source.
    """
    if patch is not None:
        start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import rat"
        program = f"{start}\n{patch}\nsys.exit(rat.main())"
        return [sys.executable, "-c", program]
    named = os.environ.get(COMMAND_VARIABLE)
    return shlex.split(named) if named else [sys.executable, str(RAT)]


def rat_environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a rat: this one without proxies or Python's own; ``changes`` added."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.lower().endswith("_proxy") and not name.startswith(("PYTHON", "SSL_CERT"))
    }
    environment.update(changes or {})
    return environment


def call(identifier: object, method: str = "ping", params: object = None) -> bytes:
    """A line with a JSON-RPC request, without its end."""
    message: dict[str, object] = {"jsonrpc": "2.0", "id": identifier, "method": method}
    if params is not None:
        message["params"] = params
    return json.dumps(message, separators=(",", ":")).encode()


def notification(method: str, params: object = None) -> bytes:
    """A line with a JSON-RPC notification, without its end."""
    message: dict[str, object] = {"jsonrpc": "2.0", "method": method}
    if params is not None:
        message["params"] = params
    return json.dumps(message, separators=(",", ":")).encode()


def cancel(identifier: object) -> bytes:
    """The line that cancels a call."""
    return notification("notifications/cancelled", {"requestId": identifier})


def modern(params: Mapping[str, object] | None = None) -> dict[str, object]:
    """Parameters of a request in protocol 2026-07-28."""
    return {**(params or {}), "_meta": {"io.modelcontextprotocol/protocolVersion": "2026-07-28"}}


def large_call(identifier: object, size: int) -> bytes:
    """A call whose line is exactly so many bytes long."""
    short = call(identifier, "tools/call", {"name": "t", "arguments": {"x": ""}})
    return short.replace(b'"x":""', b'"x":"' + b"x" * (size - len(short)) + b'"')


def read_record(line: str) -> dict[str, str]:
    """The attributes of a record of the log, unquoted. Fails on a line that is none."""
    attributes: dict[str, str] = {}
    position = 0
    for match in re.finditer(r'([A-Za-z_]+)=("(?:[^"\\]|\\.)*"|[^\s"=]*)(?: |$)', line):
        assert match.start() == position, f"not a record: {line!r}"
        position = match.end()
        value = match[2]
        attributes[match[1]] = json.loads(value) if value.startswith('"') else value
    assert position == len(line), f"not a record: {line!r}"
    assert line, "an empty record"
    return attributes


class Harness:
    """A ``rat`` process, and what a harness does with it.

    ``read_output`` and ``read_errors`` False leave stdout and stderr unread, as a harness that is
    stuck, until `start_reading_errors`; ``blocking`` False hands it non-blocking standard streams.
    `close` must be called; the fixture ``start_rat`` does.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        read_output: bool = True,
        read_errors: bool = True,
        blocking: bool = True,
    ) -> None:
        # Pipes of one's own: what the process gets must be non-blocking before it starts, where asked.
        standard_input, stdin = os.pipe()
        stdout, standard_output = os.pipe()
        stderr, standard_error = os.pipe()
        for descriptor in (standard_input, standard_output, standard_error):
            os.set_blocking(descriptor, blocking)
        self.process = subprocess.Popen(
            command,
            stdin=standard_input,
            stdout=standard_output,
            stderr=standard_error,
            env=rat_environment(environment),
        )
        for descriptor in (standard_input, standard_output, standard_error):
            os.close(descriptor)
        self.stdin = open(stdin, "wb", buffering=0)  # noqa: SIM115 - closed by close()
        self.stdout = open(stdout, "rb", buffering=0)  # noqa: SIM115
        self.stderr = open(stderr, "rb")  # noqa: SIM115
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._logged = threading.Condition()
        self._log: list[str] = []  # guarded by _logged
        self._log_ended = False  # guarded by _logged
        self._threads: list[threading.Thread] = []
        if read_output:
            self.start_reading_output()
        if read_errors:
            self.start_reading_errors()
        self._watchdog = threading.Timer(4 * HANG, self.process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()

    def allow(self, seconds: float) -> None:
        """Take the process for one that hangs only after so long from now."""
        self._watchdog.cancel()
        self._watchdog = threading.Timer(seconds, self.process.kill)
        self._watchdog.daemon = True
        self._watchdog.start()

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"{target.__name__} {self.process.pid}")
        self._threads.append(thread)
        thread.start()

    def start_reading_errors(self) -> None:
        """Read stderr from now on."""
        self._start(self._read_errors)

    def start_reading_output(self) -> None:
        """Read stdout from now on."""
        self._start(self._read_output)

    def _read_output(self) -> None:
        pending = bytearray()
        with contextlib.suppress(OSError, ValueError):  # closed by a test, or by close()
            while part := os.read(self.stdout.fileno(), 1 << 20):
                pending += part
                if b"\n" in part:
                    *lines, rest = bytes(pending).split(b"\n")
                    for line in lines:
                        self._lines.put(line)
                    pending = bytearray(rest)
        if pending:
            self._lines.put(bytes(pending) + b"<no end of line>")
        self._lines.put(None)

    def _read_errors(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self.stderr:
                with self._logged:
                    self._log.append(line.decode().rstrip("\n"))
                    self._logged.notify_all()
        with self._logged:
            self._log_ended = True
            self._logged.notify_all()

    def send(self, *lines: bytes) -> None:
        """Write messages, each with the end of its line, in one write."""
        self.write(b"".join(line + b"\n" for line in lines))

    def write(self, data: bytes) -> None:
        """Write bytes as they are."""
        view = memoryview(data)
        while view:
            view = view[self.stdin.write(view) or 0 :]

    def line(self) -> bytes:
        """The next line of stdout, without its end. Fails when there is none."""
        try:
            line = self._lines.get(timeout=HANG)
        except queue.Empty:
            raise AssertionError(f"hangs: no line came. Log: {self.log}") from None
        assert line is not None, f"stdout ended. Log: {self.log}"
        return line

    def answer(self) -> dict[str, object]:
        """The next line of stdout, which must be a JSON object."""
        answer = json.loads(self.line())
        assert isinstance(answer, dict), answer
        return answer

    def answers(self, count: int) -> list[dict[str, object]]:
        """The next lines of stdout, in the order of their identifiers."""
        answers = [self.answer() for _ in range(count)]
        return sorted(answers, key=lambda each: str(each["id"]))

    def error(self, identifier: object, code: int = -32050) -> str:
        """The message of the next line, an error of rat's own for a call."""
        answer = self.answer()
        error = answer.get("error")
        assert isinstance(error, dict), answer
        assert answer == {"jsonrpc": "2.0", "id": identifier, "error": {"code": code, "message": error["message"]}}
        assert isinstance(error["message"], str)
        return error["message"]

    def call(self, identifier: object, method: str = "ping", params: object = None) -> dict[str, object]:
        """Send a call and read the next line, its answer."""
        self.send(call(identifier, method, params))
        answer = self.answer()
        assert answer["id"] == identifier, answer
        return answer

    @property
    def log(self) -> list[str]:
        """The lines of stderr so far."""
        with self._logged:
            return list(self._log)

    def records(self, message: str | None = None) -> list[dict[str, str]]:
        """The records of the log so far, those of one message when given."""
        records = [read_record(line) for line in self.log]
        return [each for each in records if message in (None, each["msg"])]

    def wait_record(self, message: str, count: int = 1) -> list[dict[str, str]]:
        """Wait for so many records of one message, and return them."""
        with self._logged:
            self._logged.wait_for(lambda: len(self.records(message)) >= count or self._log_ended, HANG)
        records = self.records(message)
        assert len(records) >= count, f"{message!r} not logged {count} times: {self.log}"
        return records

    def end_input(self) -> None:
        """Close stdin: the harness leaves."""
        with contextlib.suppress(OSError):
            self.stdin.close()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def close_output(self) -> None:
        """Close the reading end of stdout. Only where nothing reads it."""
        self.stdout.close()

    def wait(self) -> int:
        """Wait until the process is gone, and return its exit status."""
        try:
            return self.process.wait(HANG)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"hangs rather than exits. Log: {self.log}") from None

    def finish(self) -> tuple[int, list[bytes]]:
        """Close stdin and wait for the end: exit status, and what was on stdout and not read."""
        self.end_input()
        status = self.wait()
        for thread in self._threads:
            thread.join(HANG)
        return status, self.unread()

    def unread(self) -> list[bytes]:
        """What was on stdout and not read yet, once the process is gone."""
        lines: list[bytes] = []
        while (line := self._lines.get(timeout=HANG)) is not None:
            lines.append(line)
        self._lines.put(None)
        return lines

    def close(self) -> None:
        """End the process, whatever its state, and every thread."""
        self.end_input()
        if self.process.poll() is None:
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(HANG)
        self._watchdog.cancel()
        for thread in self._threads:
            thread.join(HANG)
        for stream in (self.stdout, self.stderr):
            stream.close()


def run_rat(
    flags: Iterable[str], environment: Mapping[str, str] | None = None, command: Sequence[str] | None = None
) -> tuple[int, str, str]:
    """Run rat with nothing on stdin to its end: exit status, stdout, stderr."""
    done = subprocess.run(
        [*(command or rat_command()), *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=rat_environment(environment),
        timeout=HANG,
        check=False,
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()
