"""rat-tool config: what it prints is what the harness reads, whatever the path holds."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Callable

import pytest
from bundles import CLIENT, DAY, NOW, Authority, Bundle, write_side
from fault_server import HANG
from harness import ROOT, rat_environment
from test_tool_bundle import run

import rat_tool

RAT = str(ROOT / "rat.py")
SERVER = "ratd.example:7433"


def parsed_toml(text: str) -> object:
    """What a TOML parser makes of a text."""
    if sys.version_info >= (3, 11):
        import tomllib

        return tomllib.loads(text)
    return pytest.importorskip("tomli", reason="tomli is not installed").loads(text)


def parsed_yaml(text: str) -> object:
    """What a YAML parser makes of a text."""
    return pytest.importorskip("yaml", reason="PyYAML is not installed").safe_load(text)


# The document each harness must read, from the command and its arguments. Claude Code's form is that of
# code.claude.com/docs/en/mcp (".mcp.json", also docs.anthropic.com/en/docs/claude-code/sdk/sdk-mcp), Codex's that of
# docs/config.md in the repository openai/codex (mcp_servers, STDIO, and Other configuration options).
DOCUMENTS: dict[str, tuple[Callable[[str], object], Callable[[str, list[str]], object]]] = {
    "mcpServers": (json.loads, lambda command, args: {"mcpServers": {"ratd": {"command": command, "args": args}}}),
    "vscode": (
        json.loads,
        lambda command, args: {"servers": {"ratd": {"type": "stdio", "command": command, "args": args}}},
    ),
    "codex": (
        parsed_toml,
        lambda command, args: {"mcp_servers": {"ratd": {"command": command, "args": args, "tool_timeout_sec": 90}}},
    ),
    "zed": (
        json.loads,
        lambda command, args: {
            "context_servers": {"ratd": {"source": "custom", "command": command, "args": args, "env": {}}}
        },
    ),
    "opencode": (
        json.loads,
        lambda command, args: {
            "$schema": "https://opencode.ai/config.json",
            "mcp": {"ratd": {"type": "local", "command": [command, *args], "enabled": True}},
        },
    ),
    "goose": (
        parsed_yaml,
        lambda command, args: {
            "extensions": {
                "ratd": {
                    "enabled": True,
                    "name": "ratd",
                    "type": "stdio",
                    "cmd": command,
                    "args": args,
                    "envs": {},
                    "timeout": 300,
                }
            }
        },
    ),
}

NAMES = [
    "plain",
    "two words",
    "quotes \"double\" and 'single'",
    "back\\slash \\n \\u0041 \\",
    "Grüße 東京 \N{RAT}",
    "# : - {} [] , & * ! | > % @ `",
    "true",
    "tab\tline\nbell\x07escape\x1bdelete\x7f",
    "nel\x85separators\u2028\u2029nbsp\xa0bom\ufeff",
    "$HOME %PATH% ~",
    " leading and trailing ",
]


def test_every_harness_named_is_tested() -> None:
    assert list(DOCUMENTS) == list(rat_tool.HARNESSES)


@pytest.mark.parametrize("harness", DOCUMENTS)
@pytest.mark.parametrize("ascii_only", [False, True])
def test_what_is_printed_parses_back_whatever_the_path_holds(harness: str, ascii_only: bool) -> None:
    parse, document = DOCUMENTS[harness]
    for name in NAMES:
        command, *args = [f"/opt/{name}/rat", "--server", SERVER, "--bundle", f"/home/{name}"]
        text = rat_tool.harness_entry([command, *args], harness, ascii_only)
        assert parse(text) == document(command, args), text
        assert text.isascii() or not ascii_only


@pytest.mark.skipif(os.name == "nt", reason="Windows takes no such names")
@pytest.mark.parametrize("harness", DOCUMENTS)
def test_the_command_prints_absolute_paths_of_a_real_directory(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, harness: str
) -> None:
    name = "a \"b\" 'c' \\d é 東"
    directory = tmp_path / name
    shutil.copytree(bundle.client, directory)
    program = directory / "my rat"
    program.write_text("")
    parse, document = DOCUMENTS[harness]
    monkeypatch.chdir(tmp_path)
    arguments = ["config", "--server", SERVER, "--bundle", name, "--harness", harness]
    status, printed, errors = run(capsys, *arguments)
    end = ["--server", SERVER, "--bundle", str(directory)]
    assert (status, parse(printed)) == (0, document(sys.executable, [RAT, *end]))
    assert errors == f"rat-tool: paste it into {rat_tool.HARNESSES[harness].place}\n"
    status, printed, _ = run(capsys, *arguments, "--command", str(program.relative_to(tmp_path)))
    assert (status, parse(printed)) == (0, document(str(program), end))
    status, printed, _ = run(capsys, *arguments, "--log-level", "debug")
    assert (status, parse(printed)) == (0, document(sys.executable, [RAT, *end, "--log-level", "debug"]))


def test_the_entry_is_printed_to_the_letter(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["config", "-s", SERVER, "-b", str(bundle.client), "--command", RAT]
    printed = {
        name: run(capsys, *arguments, "--harness", name)[1].replace(str(bundle.client), "DIR").replace(RAT, "RAT")
        for name in ("codex", "goose")
    }
    printed["default"] = run(capsys, *arguments)[1].replace(str(bundle.client), "DIR").replace(RAT, "RAT")
    assert printed == {
        "default": (
            "{\n"
            '  "mcpServers": {\n'
            '    "ratd": {\n'
            '      "command": "RAT",\n'
            '      "args": [\n'
            '        "--server",\n'
            '        "ratd.example:7433",\n'
            '        "--bundle",\n'
            '        "DIR"\n'
            "      ]\n"
            "    }\n"
            "  }\n"
            "}\n"
        ),
        "codex": (
            "[mcp_servers.ratd]\n"
            'command = "RAT"\n'
            'args = ["--server", "ratd.example:7433", "--bundle", "DIR"]\n'
            "tool_timeout_sec = 90\n"
        ),
        "goose": (
            "extensions:\n"
            "  ratd:\n"
            "    enabled: true\n"
            "    name: ratd\n"
            "    type: stdio\n"
            '    cmd: "RAT"\n'
            '    args: ["--server", "ratd.example:7433", "--bundle", "DIR"]\n'
            "    envs: {}\n"
            "    timeout: 300\n"
        ),
    }


def test_the_entry_starts_rat(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    _, printed, _ = run(capsys, "config", "-s", "127.0.0.1:9", "-b", str(bundle.client))
    entry = json.loads(printed)["mcpServers"]["ratd"]
    done = subprocess.run(
        [entry["command"], *entry["args"]],
        input=b'{"jsonrpc":"2.0","id":1,"method":"ping"}\n',
        capture_output=True,
        env=rat_environment(),
        timeout=HANG,
        check=False,
    )
    assert done.returncode == 0
    assert b"msg=relaying" in done.stderr


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp1252"])
def test_the_entry_is_whole_in_any_encoding_of_stdout(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    directory = shutil.copytree(bundle.client, tmp_path / "東京 é")
    stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stdout)
    assert rat_tool.main(["config", "-s", SERVER, "-b", str(directory), "--harness", "codex"]) == 0
    printed = stdout.buffer.getvalue().decode("utf-8")
    parsed = parsed_toml(printed)
    assert isinstance(parsed, dict)
    assert parsed["mcp_servers"]["ratd"]["args"][-1] == str(directory)


@pytest.mark.parametrize(
    ("harness", "name", "warned"),
    [
        ("mcpServers", "${HOME}", True),
        ("vscode", "${workspaceFolder}", True),
        ("opencode", "{env:HOME}", True),
        ("codex", "${HOME}", False),
        ("mcpServers", "$HOME", False),
    ],
)
def test_a_path_the_harness_would_read_as_a_variable_is_warned_of(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], harness: str, name: str, warned: bool
) -> None:
    directory = shutil.copytree(bundle.client, tmp_path / name)
    status, printed, errors = run(capsys, "config", "-s", SERVER, "-b", str(directory), "--harness", harness)
    warning = f"  warn  the program replaces what it takes for a variable in {directory}: rename that path\n"
    assert status == 0
    assert name in printed
    assert errors.endswith(warning) == warned


def test_the_last_year_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = Authority()
    leaf = authority.issue("laptop", CLIENT, end=NOW + 9 * DAY)
    side = write_side(tmp_path / "side", "client", authority.certificate, leaf)
    status, _, errors = run(capsys, "config", "-s", SERVER, "-b", str(side))
    assert status == 0
    assert errors.endswith(
        "  warn  less than a year remains: issue another bundle, and hand out its directories, before then\n"
    )


def test_what_cannot_be_configured_prints_nothing(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = "clients/NAME of the bundle"
    for arguments, status, said in (
        (
            ["-b", str(bundle.server)],
            1,
            f"rat-tool: {bundle.server} is the directory of a server: give that of a client ({place})",
        ),
        (
            ["-b", str(bundle.client), "--command", str(tmp_path / "none")],
            1,
            f"rat-tool: there is no {tmp_path / 'none'}: --command takes the path of rat",
        ),
        (
            ["-b", str(bundle.client), "--harness", "emacs"],
            2,
            "rat-tool config: argument --harness: invalid choice: 'emacs' (choose from",
        ),
    ):
        got, printed, errors = run(capsys, "config", "-s", SERVER, *arguments)
        assert (got, printed) == (status, "")
        assert errors.startswith(said)
        assert errors.count("\n") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only there a path may be no text")
def test_a_path_that_is_no_text_is_refused(bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = shutil.copytree(bundle.client, tmp_path / os.fsdecode(b"\xff"))
    assert run(capsys, "config", "-s", SERVER, "-b", str(directory)) == (
        1,
        "",
        f"rat-tool: no configuration file can hold the path {tmp_path}/\\udcff: rename it to text in UTF-8\n",
    )


@pytest.mark.parametrize(
    ("started", "frozen", "beside", "found"),
    [
        ("rat-tool", False, "rat", True),
        ("rat-tool", False, None, False),
        ("rat_tool.py", False, "rat", False),
        ("rat-tool.exe", True, "rat.exe", True),
        ("rat-tool", True, "rat", True),
    ],
)
def test_the_rat_beside_an_installed_program_is_the_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: str, frozen: bool, beside: str | None, found: bool
) -> None:
    if beside is not None:
        (tmp_path / beside).write_text("")
    if frozen:
        monkeypatch.setattr(sys, "frozen", True, raising=False)
        monkeypatch.setattr(sys, "executable", str(tmp_path / started))
    else:
        monkeypatch.setattr(sys, "argv", [str(tmp_path / started)])
    assert rat_tool.rat_command() == ([str(tmp_path / str(beside))] if found else [sys.executable, RAT])


def test_a_frozen_program_that_stands_alone_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "rat-tool"))
    with pytest.raises(rat_tool.Failed) as failed:
        rat_tool.rat_command()
    assert str(failed.value) == f"there is no rat beside {tmp_path}/rat-tool: put it there"
