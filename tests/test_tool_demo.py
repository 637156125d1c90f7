"""rat-tool demo: a real server, a real rat, and nothing left of either."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fault_server import HANG
from harness import ROOT, call, rat_environment

import demo_ratd
import rat
import rat_tool

if TYPE_CHECKING:
    from collections.abc import Iterator

TIME = re.compile(r" +\d+\.\d ms")

OUTPUT = """\
A harness (→ what it sends, ← what it reads), rat, and a server that admits nobody without a client
certificate: all on this machine, over mutual TLS, with bundles made for this run.

rat --server 127.0.0.1:PORT --bundle TMP/bundle/clients/harness

An older protocol, negotiated once
  → initialize, protocol 2025-11-25
  ← demo_ratd VERSION, protocol 2025-11-25 TIME
  → notifications/initialized
  → tools/list
  ← read_file, write_file, wait TIME
  → tools/call write_file hello.txt
  ← hello.txt: 34 bytes written TIME
  → tools/call read_file hello.txt
  ← Written and read over mutual TLS. TIME

A newer protocol, told in every message
  → server/discover, protocol 2026-07-28
  ← demo_ratd VERSION, protocol 2026-07-28 TIME
  → tools/call read_file hello.txt
  ← Written and read over mutual TLS. TIME
    the server received, beside the message:
      Mcp-Protocol-Version: 2026-07-28
      Mcp-Method: tools/call
      Mcp-Name: read_file

Ten calls at once
  → tools/call wait 0.2 s, 10 times at once
  ← 10 answers, where one after the other takes 2 s TIME

A call canceled
  → tools/call wait 60 s
  → notifications/cancelled
  → ping
    the server saw call 17 canceled after TIME, and rat wrote no answer to it

A server of another bundle
  → initialize
  ← error -32050: TIME
    rat refused the certificate of ratd at 127.0.0.1:PORT: REASON. Check the bundle with rat-tool check.
    rat-tool check: The server is of another bundle of tenant demo: give both sides directories of one bundle.

"""
SUMMARY = "Shown: both protocols, ten calls at once, a call canceled, a server refused, nothing left behind (S s).\n"


def without_what_varies(printed: str, tmp_path: Path) -> str:
    """What the demo prints, without times, ports and places."""
    printed = re.sub(re.escape(str(tmp_path)) + r"/rat-demo-\w+", "TMP", printed)
    printed = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", printed)
    printed = re.sub(r"(refused the certificate of ratd at 127.0.0.1:PORT: )[^.]+\.", r"\1REASON.", printed)
    printed = re.sub(r"\(\d+\.\d s\)", "(S s)", printed)
    return TIME.sub(" TIME", printed).replace(f"demo_ratd {rat.__version__}", "demo_ratd VERSION")


def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a demo whose temporary files can be looked at."""
    return {**rat_environment(), "TMPDIR": str(tmp_path), "PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A demo that keeps its server up."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "rat_tool.py"), "demo", "--keep"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=environment(tmp_path),
    )
    with process:
        yield process
        process.kill()


def processes_of(marker: str) -> list[str]:
    """Command lines of processes that hold a text, where that can be seen."""
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            line = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if marker in line:
            found.append(line)
    return found


@pytest.mark.skipif(os.name == "nt", reason="the paths of POSIX")
def test_the_demo_shows_all_of_it_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "rat_tool.py"), "demo"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment(tmp_path),
        timeout=2 * HANG,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert without_what_varies(done.stdout, tmp_path) == OUTPUT + SUMMARY
    assert list(tmp_path.iterdir()) == []
    assert processes_of(str(tmp_path)) == []


@pytest.mark.skipif(os.name == "nt", reason="the signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_keep_leaves_the_server_up_until_a_signal(
    start: subprocess.Popen[str], tmp_path: Path, number: signal.Signals
) -> None:
    assert start.stdout is not None
    head = "".join(start.stdout.readline() for _ in range(OUTPUT.count("\n")))
    assert without_what_varies(head, tmp_path) == OUTPUT
    assert start.stdout.readline() == (
        "The server stays up, until Ctrl-C, for this entry of a harness (rat-tool config has other forms):\n"
    )
    assert start.stdout.readline() == "\n"
    text = ""
    while not text.endswith("\n}\n"):
        text += start.stdout.readline()
    entry = json.loads(text)["mcpServers"]["ratd"]
    done = subprocess.run(
        [entry["command"], *entry["args"]],
        input=None,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=rat_environment(),
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0
    with subprocess.Popen(
        [entry["command"], *entry["args"]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=rat_environment(),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(call(1) + b"\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == {"jsonrpc": "2.0", "id": 1, "result": {}}
        process.stdin.close()
        assert process.wait(HANG) == 0
    start.send_signal(number)
    rest, errors = start.communicate(timeout=HANG)
    assert (start.returncode, rest, errors) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
    assert processes_of(str(tmp_path)) == []


@pytest.mark.skipif(os.name == "nt", reason="the signals of POSIX")
def test_an_interruption_ends_everything(start: subprocess.Popen[str], tmp_path: Path) -> None:
    assert start.stdout is not None
    while "initialize" not in start.stdout.readline():
        pass
    start.send_signal(signal.SIGINT)
    _, errors = start.communicate(timeout=HANG)
    # 130 amid the conversation; 0 where it had come to its end before the signal did.
    assert (start.returncode, errors) in ((130, "rat-tool: interrupted\n"), (0, ""))
    assert list(tmp_path.iterdir()) == []
    assert processes_of(str(tmp_path)) == []


def test_a_demo_that_does_not_come_out_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every part checks what it shows; here, a server that writes something else than it was told."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(demo_ratd.Directory, "write", lambda self, path, text: 0)
    assert rat_tool.main(["demo"]) == 1
    captured = capsys.readouterr()
    assert captured.err == ("rat-tool: the tool read_file failed: hello.txt: no such file or directory\n")
    assert "Shown" not in captured.out
    assert list(tmp_path.iterdir()) == []


def test_a_rat_that_does_not_start_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(rat_tool, "rat_command", lambda: [sys.executable, "-c", "pass"])
    assert rat_tool.main(["demo"]) == 1
    assert capsys.readouterr().err == "rat-tool: rat ended, its last words are above\n"
    assert list(tmp_path.iterdir()) == []


def test_a_rat_that_is_not_there_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(rat_tool, "rat_command", lambda: [str(tmp_path / "no-rat")])
    assert rat_tool.main(["demo"]) == 1
    assert capsys.readouterr().err == f"rat-tool: {tmp_path / 'no-rat'}: no such file or directory\n"
    assert list(tmp_path.iterdir()) == []
