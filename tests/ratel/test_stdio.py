"""Servers that are processes: what they are given, how they end, and that they end."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from conftest import FAKE, alive, eventually, fake_stdio
from web_server import HANG

import ratel.transports
from ratel import McpError, Stdio, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ratel import McpClient

    Clients = Callable[..., McpClient]

NO_METHOD = {"code": -32601, "message": "Method not found"}
LEGACY: dict[str, Any] = {"probe": NO_METHOD}
posix = pytest.mark.skipif(os.name == "nt", reason="Windows has neither signals nor process groups")


def about(client: McpClient) -> dict[str, Any]:
    """What a fake server says of its process."""
    told = client.call_tool("about")["about"]
    assert isinstance(told, dict)
    return told


@posix
def test_a_server_leads_a_group_of_its_own(client_of: Clients) -> None:
    told = about(client_of(fake_stdio()))
    assert told["group"] == told["pid"] != os.getpgid(0)


def test_a_server_gets_little_of_the_environment(client_of: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("HOME", "/home/of/somebody")
    transport = fake_stdio()
    given = Stdio(transport.command, transport.args, env={"TOKEN": "t", "TERM": "dumb"})
    environment = about(client_of(given))["env"]
    assert "AWS_SECRET_ACCESS_KEY" not in environment
    assert environment["TOKEN"] == "t"
    if os.name != "nt":
        assert environment["TERM"] == "dumb"
        assert environment["HOME"] == "/home/of/somebody"
        # The interpreter that is the server here adds LC_CTYPE itself.
        assert set(environment) <= {"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "TOKEN", "LC_CTYPE"}


def test_a_server_runs_in_the_directory_it_is_given(client_of: Clients, tmp_path: Path) -> None:
    transport = fake_stdio()
    told = about(client_of(Stdio(transport.command, transport.args, cwd=tmp_path)))
    assert os.path.realpath(told["cwd"]) == os.path.realpath(tmp_path)


def test_what_cannot_be_started_says_so(client_of: Clients, tmp_path: Path) -> None:
    missing = str(tmp_path / "server")
    with pytest.raises(TransportError) as caught:
        client_of(Stdio(missing, ["--flag"])).connect()
    said = f"MCP server '{missing} --flag'"
    assert str(caught.value).startswith(said if len(said) <= 80 else said[:60])
    assert "cannot be started: no such file or directory" in str(caught.value)


def test_a_nul_in_an_argument_says_so(client_of: Clients) -> None:
    with pytest.raises(TransportError, match=r"cannot be started: embedded null byte$"):
        client_of(Stdio("server", ["a\0b"])).connect()


def test_credentials_in_the_environment_are_not_shown() -> None:
    assert "secret" not in repr(Stdio("server", env={"TOKEN": "secret"}))


def test_lines_that_are_not_json_are_logged_and_skipped(client_of: Clients, caplog: pytest.LogCaptureFixture) -> None:
    garbage = ["Listening on stdio", "", "[1, 2]", "7", "\x1b[32mready\x1b[0m", '{"jsonrpc": "2.0", "id": 1e999}']
    client = client_of(fake_stdio(garbage=garbage))
    assert client.call_tool("echo")["tool"] == "echo"
    told = [record.getMessage().split(" sent ", 1)[1] for record in caplog.records if record.levelno == logging.WARNING]
    assert told == [
        "a line that is skipped: not JSON (character 1)",
        "a line that is skipped: not a JSON-RPC message",
        "a line that is skipped: not a JSON-RPC message",
        "a line that is skipped: not JSON (character 1)",
    ]


def test_a_line_over_the_limit_is_skipped(client_of: Clients, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    program = tmp_path / "server.py"
    begin = "import sys; sys.argv[1] = '{}'; print('x' * (16 * 1024 * 1024 + 2), flush=True)\n"
    program.write_text(begin + Path(FAKE).read_text().replace("from __future__ import annotations", ""))
    assert client_of(Stdio(sys.executable, ["-I", "-S", str(program), ""])).call_tool("echo")["tool"] == "echo"
    assert "sent a line over 16 MiB, which is skipped" in caplog.text


def test_the_end_of_stderr_is_in_the_error_of_a_server_that_dies(client_of: Clients) -> None:
    client = client_of(fake_stdio())
    with pytest.raises(TransportError) as caught:
        client.call_tool("die")
    head, _, tail = str(caught.value).partition(" exited with status 7: ")
    assert head.startswith("MCP server '")
    end = "\nthe end of me"
    assert tail == "x" * (4096 - len(end) - 1) + end


@posix
def test_a_server_that_is_killed_says_by_what(client_of: Clients) -> None:
    client = client_of(fake_stdio())
    pid = about(client)["pid"]
    failed: list[str] = []

    def call() -> None:
        try:
            client.call_tool("hang")
        except TransportError as e:
            failed.append(str(e))

    thread = threading.Thread(target=call)
    thread.start()
    os.kill(pid, signal.SIGKILL)
    thread.join(HANG)
    assert len(failed) == 1
    assert failed[0].endswith(" was ended by SIGKILL")


@pytest.mark.parametrize("options", [{}, LEGACY])
def test_the_next_call_after_a_death_starts_the_server_again(
    client_of: Clients, options: dict[str, Any], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    client = client_of(fake_stdio(**options, log=str(log)))
    first = about(client)["pid"]
    with pytest.raises(TransportError, match="exited with status 7"):
        client.call_tool("die")
    second = about(client)["pid"]
    assert second != first
    assert not alive(first)
    received = [json.loads(line)["method"] for line in log.read_text().splitlines()]
    # What may have been delivered was not sent again; the era is known, and not asked for anew.
    assert received.count("tools/call") == 3
    assert received.count("server/discover") == (1 if options else 2)


def test_a_server_that_closes_its_output_is_lost(client_of: Clients) -> None:
    program = "import os, sys; os.close(1); sys.stdin.read()"
    client = client_of(Stdio(sys.executable, ["-I", "-S", "-c", program]))
    with pytest.raises(TransportError, match=r" closed its output$"):
        client.connect()


def test_a_late_call_is_canceled_and_its_answer_dropped(client_of: Clients, tmp_path: Path) -> None:
    for options in ({}, LEGACY):
        log = tmp_path / f"log{len(options)}"
        client = client_of(fake_stdio(**options, log=str(log)))
        client.connect()
        with pytest.raises(TransportError, match=r" did not answer within 0\.05s$"):
            client.call_tool("wait", {"seconds": 0.2}, timeout=0.05)
        client.call_tool("wait", {"seconds": 0.3})  # the late answer comes meanwhile
        messages = [json.loads(line) for line in log.read_text().splitlines()]
        [canceled] = [message for message in messages if message["method"] == "notifications/cancelled"]
        late = next(message for message in messages if message["method"] == "tools/call")
        assert canceled["params"] == {"requestId": late["id"], "reason": "timed out"}


@pytest.mark.parametrize(
    ("method", "answered"), [("ping", {"id": "q", "result": {}}), ("roots/list", {"id": "q", "error": NO_METHOD})]
)
def test_requests_of_a_legacy_server_are_answered(client_of: Clients, method: str, answered: dict[str, Any]) -> None:
    assert client_of(fake_stdio(**LEGACY)).call_tool("ask", {"method": method})["answered"] == answered


def test_requests_of_a_modern_server_are_not(client_of: Clients, tmp_path: Path) -> None:
    log = tmp_path / "log"
    client = client_of(fake_stdio(log=str(log)))
    client.connect()
    with pytest.raises(TransportError, match="did not answer"):
        client.call_tool("ask", {"method": "ping"}, timeout=0.1)
    client.call_tool("echo")
    assert all("method" in json.loads(line) for line in log.read_text().splitlines())


def test_result_types_count_in_the_modern_era_only(client_of: Clients) -> None:
    modern, legacy = client_of(fake_stdio()), client_of(fake_stdio(**LEGACY))
    assert modern.call_tool("result", {"resultType": "complete"}) == {"resultType": "complete"}
    with pytest.raises(TransportError, match=r" asks for input \(input_required\), and there is none here$"):
        modern.call_tool("result", {"resultType": "input_required"})
    assert legacy.call_tool("result", {"resultType": "input_required"}) == {"resultType": "input_required"}


def test_errors_come_as_they_were_sent(client_of: Clients) -> None:
    with pytest.raises(McpError) as caught:
        client_of(fake_stdio()).call_tool("fail", {"code": -1, "message": "no", "data": [1]})
    assert (caught.value.code, caught.value.message, caught.value.data) == (-1, "no", [1])


def test_calls_of_several_threads_find_their_answers(client_of: Clients) -> None:
    client = client_of(fake_stdio())
    wrong = []

    def call(number: int) -> None:
        for step in range(50):
            arguments = {"number": number, "step": step}
            if client.call_tool("echo", arguments)["arguments"] != arguments:
                wrong.append(arguments)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_server_that_does_not_read_blocks_nobody(client_of: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratel.transports, "GRACE_SECONDS", 0.2)
    answer = json.dumps(
        {"jsonrpc": "2.0", "id": 1, "result": {"supportedVersions": ["2026-07-28"], "capabilities": {}}}
    )
    program = f"import sys, time; sys.stdin.readline(); print({answer!r}, flush=True); time.sleep(600)"
    client = client_of(Stdio(sys.executable, ["-I", "-S", "-c", program]))
    client.connect()
    with pytest.raises(TransportError, match=r"did not answer within 0\.1s$"):
        client.call_tool("big", {"text": "x" * 1_000_000}, timeout=0.1)
    client.close()


def test_close_fails_the_calls_in_flight(client_of: Clients) -> None:
    client = client_of(fake_stdio())
    client.connect()
    failed = []

    def call() -> None:
        try:
            client.call_tool("hang")
        except TransportError as e:
            failed.append(str(e))

    thread = threading.Thread(target=call)
    thread.start()
    eventually(lambda: client._link is not None and client._link.connection._calls)
    client.close()
    thread.join(HANG)
    assert len(failed) == 1
    assert failed[0].endswith(" was closed")


def test_the_end_of_its_input_ends_a_server(client_of: Clients) -> None:
    client = client_of(fake_stdio())
    pid = about(client)["pid"]
    client.close()
    assert not alive(pid)
    with pytest.raises(TransportError, match=r"was closed: register it again to call its tools$"):
        client.call_tool("echo")
    client.close()


@posix
def test_a_group_leaves_neither_children_nor_grandchildren(
    client_of: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ratel.transports, "GRACE_SECONDS", 0.2)
    client = client_of(fake_stdio(children=str(tmp_path / "pids")))
    leader = about(client)["pid"]
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(map(alive, [leader, *pids]))
    client.close()
    assert not any(map(alive, [leader, *pids]))


@posix
def test_what_ignores_sigterm_is_killed(client_of: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratel.transports, "GRACE_SECONDS", 0.2)
    client = client_of(fake_stdio(deaf=True))
    pid = about(client)["pid"]
    client.close()
    assert not alive(pid)


@posix
def test_a_server_that_dies_takes_its_group_along(
    client_of: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ratel.transports, "GRACE_SECONDS", 0.2)
    client = client_of(fake_stdio(children=str(tmp_path / "pids")))
    with pytest.raises(TransportError, match="exited with status 7"):
        client.call_tool("die")
    for pid in (tmp_path / "pids").read_text().split():
        eventually(lambda pid=int(pid): not alive(pid))


def test_the_grace_is_that_of_the_official_clients() -> None:
    assert ratel.transports.GRACE_SECONDS == 2.0
