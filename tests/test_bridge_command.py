"""The command line of rat: what it takes, and what it says of what it does not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, run_rat

import rat

EXPECTED = "expected HOST:PORT, such as ratd.example:7433 or [::1]:7433, not"


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("ratd.example:7433", "ratd.example", 7433),
        ("127.0.0.1:1", "127.0.0.1", 1),
        ("[::1]:65535", "::1", 65535),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
        ("[::ffff:127.0.0.1]:80", "::ffff:127.0.0.1", 80),
        ("under_score:443", "under_score", 443),
        ("bücher.example:443", "xn--bcher-kva.example", 443),
        ("h:00080", "h", 80),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    assert rat.Address.parse(text) == (host, port, text)


BAD_ADDRESSES = [
    "",
    "ratd.example",
    "ratd.example:",
    ":7433",
    "ratd.example:0",
    "ratd.example:65536",
    "ratd.example:-1",
    "ratd.example:+1",
    "ratd.example:٣",
    "ratd.example:7433/mcp",
    "https://ratd.example:7433",
    "user@ratd.example:7433",
    "::1:7433",
    "[::1]",
    "[::1]7433",
    "[::1:7433",
    "[ratd.example]:7433",
    "[1.2.3.4]:7433",
    "[12345::]:7433",
    "ratd example:7433",
    "ratd.example:7433 ",
    "ratd.example:7433\n",
    "a\\b:1",
    f"{'ü' * 80}.example:1",
]


@pytest.mark.parametrize("text", BAD_ADDRESSES)
def test_what_is_no_address_is_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{EXPECTED} {text!r}")):
        rat.Address.parse(text)


USAGE = [
    ([], "the following arguments are required: -s/--server, -b/--bundle"),
    (["--server", "h:1"], "the following arguments are required: -b/--bundle"),
    (["--bundle", "d"], "the following arguments are required: -s/--server"),
    (["-s", "h", "-b", "d"], f"argument -s/--server: {EXPECTED} 'h'"),
    (["-s", "h:1", "-s", "h:2", "-b", "d"], "argument -s/--server: given twice"),
    (["-s", "h:1", "-b", "d", "--bundle", "d"], "argument -b/--bundle: given twice"),
    (["-s", "h:1", "-b", "d", "--log-level", "info", "--log-level", "info"], "argument --log-level: given twice"),
    (
        ["-s", "h:1", "-b", "d", "--log-level", "loud"],
        "argument --log-level: expected debug, info, warn or error, not 'loud'",
    ),
    (["-s", "h:1", "-b"], "argument -b/--bundle: expected one argument"),
    (["-s", "h:1", "-b", "d", "--colour"], "unrecognized arguments: --colour"),
    (["-s", "h:1", "-b", "d", "more"], "unrecognized arguments: more"),
    (["--serv", "h:1", "-b", "d"], "the following arguments are required: -s/--server"),
]


@pytest.mark.parametrize(("flags", "error"), USAGE)
def test_a_usage_error_is_one_line_with_status_2(
    flags: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        rat.main(flags)
    assert ended.value.code == 2
    written = capsys.readouterr()
    assert written.err == f"rat: {error}. See rat --help.\n"
    assert written.out == ""


def test_a_usage_error_ends_the_process_with_status_2() -> None:
    assert run_rat(["--server", "h:1"]) == (
        2,
        "",
        "rat: the following arguments are required: -b/--bundle. See rat --help.\n",
    )


def test_a_usage_error_without_a_stderr_has_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # as Python starts when descriptor 2 is closed
    with pytest.raises(SystemExit) as exited:
        rat.main(["--server", "nothing"])
    assert exited.value.code == 2


def test_version_tells_all_that_takes_part_in_a_connection() -> None:
    status, output, errors = run_rat(["--version"])
    assert status == 0
    assert re.fullmatch(
        rf"rat {re.escape(rat.__version__)} \((source|installed|zipapp|frozen), "
        r"Python 3\.\d+\.\S+, \S+SSL [^,]+, urllib3 [\d.]+\)\n",
        output,
    )
    assert errors == ""


def test_help_names_every_flag() -> None:
    status, output, errors = run_rat(["--help"])
    assert status == 0
    assert errors == ""
    for flag in ("-s", "--server HOST:PORT", "-b", "--bundle DIR", "--log-level", "--version"):
        assert flag in output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("flag", ["--version", "--help"])
@pytest.mark.parametrize("program", ["rat", "rat_tool"])
def test_what_cannot_be_printed_is_one_line_with_status_1(program: str, flag: str, unbuffered: str) -> None:
    command = [sys.executable, str(ROOT / f"{program}.py"), flag]
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    name = program.replace("_", "-")
    assert (ended.returncode, ended.stderr) == (
        1,
        f"{name}: cannot write the output: no space left on device\n".encode(),
    )


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_what_nobody_reads_ends_in_status_1(flag: str) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        ended = subprocess.run(
            [sys.executable, str(ROOT / "rat.py"), flag], stdout=write, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (1, b"rat: cannot write the output: broken pipe\n")


def test_a_directory_that_is_not_there_is_one_line_with_status_1(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    assert run_rat(["--server", "127.0.0.1:1", "--bundle", str(missing)]) == (
        1,
        "",
        f"rat: cannot read the directory {missing}: no such file or directory\n",
    )
