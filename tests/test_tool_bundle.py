"""rat-tool bundle: what is issued is what rat expects, and what is inspected is told as it is."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import ssl
import stat
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from bundles import CLIENT, DAY, END, NOW, SERVER, START, Authority, Bundle, new_key, write_side
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from fault_server import HANG
from harness import ROOT, rat_environment

import rat
import rat_tool
from demo_ratd import DemoRatd

TOOL = ROOT / "rat_tool.py"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run rat-tool in this process: exit status, stdout, stderr."""
    try:
        status = rat_tool.main(arguments)
    except SystemExit as ended:
        status = int(ended.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def generate(output: Path, tenant: str = "acme", *clients: str) -> Path:
    """Issue a bundle, and fail where it is not."""
    names = [argument for name in clients or ("laptop",) for argument in ("--client", name)]
    assert rat_tool.main(["bundle", "generate", "--tenant", tenant, *names, "--output", str(output)]) == 0
    return output


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of tenant acme with the clients laptop and build, as generate writes it. For reading only."""
    return generate(tmp_path_factory.mktemp("issued") / "bundle", "acme", "laptop", "build")


# --- generate -----------------------------------------------------------------------------------------


def test_generate_says_what_it_wrote_and_for_whom(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "bundle"
    arguments = ("--tenant", "acme", "--client", "laptop", "--client", "ci-1", "--output", str(output))
    status, printed, errors = run(capsys, "bundle", "generate", *arguments)
    der = ssl.PEM_cert_to_DER_cert((output / "server" / "ca.crt").read_text())
    expires = x509.load_der_x509_certificate(der).not_valid_after_utc
    assert (status, errors) == (0, "")
    assert printed == (
        "Bundle of tenant acme:\n"
        f"  {output}/server          to the server\n"
        f"  {output}/clients/laptop  to client laptop\n"
        f"  {output}/clients/ci-1    to client ci-1\n"
        f"CA fingerprint (SHA-256): {hashlib.sha256(der).hexdigest()}\n"
        f"Expires: {expires:%Y-%m-%d}\n"
        "Copy each directory whole to its side, and to that side only: it holds the side's key.\n"
    ).replace("/", os.sep if os.name == "nt" else "/")


def test_a_bundle_has_these_files_and_no_others(issued: Path) -> None:
    files = sorted(str(path.relative_to(issued)).replace(os.sep, "/") for path in issued.rglob("*"))
    assert files == [
        "clients",
        "clients/build",
        "clients/build/ca.crt",
        "clients/build/client.crt",
        "clients/build/client.key",
        "clients/laptop",
        "clients/laptop/ca.crt",
        "clients/laptop/client.crt",
        "clients/laptop/client.key",
        "server",
        "server/ca.crt",
        "server/server.crt",
        "server/server.key",
    ]
    for path in issued.rglob("*.*"):
        kind = "PRIVATE KEY" if path.suffix == ".key" else "CERTIFICATE"
        text = path.read_text()
        assert text.startswith(f"-----BEGIN {kind}-----\n")
        assert text.endswith(f"-----END {kind}-----\n")
        assert text.count("BEGIN") == 1


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_keys_and_directories_are_for_their_owner_only(tmp_path: Path) -> None:
    """Created with their mode: a umask that allows all widens nothing."""
    before = os.umask(0)
    try:
        bundle = generate(tmp_path / "bundle")
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (bundle, *bundle.rglob("*"))}
    for path, mode in modes.items():
        assert mode == (0o700 if path.is_dir() else 0o600 if path.suffix == ".key" else 0o644), path


def test_the_certificates_are_as_rat_and_ratd_expect_them(issued: Path) -> None:
    ca = x509.load_pem_x509_certificate((issued / "server" / "ca.crt").read_bytes())
    named = {attribute.oid: attribute.value for attribute in ca.subject}
    assert named == {NameOID.ORGANIZATION_NAME: "rat CA", NameOID.COMMON_NAME: "acme"}
    assert ca.issuer == ca.subject
    ca.verify_directly_issued_by(ca)
    constraints = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    assert (constraints.critical, constraints.value) == (True, x509.BasicConstraints(True, 0))
    usage = ca.extensions.get_extension_for_class(x509.KeyUsage)
    only_signs = x509.KeyUsage(False, False, False, False, False, True, False, False, False)
    assert (usage.critical, usage.value) == (True, only_signs)
    keys = [ca.public_key()]
    for directory, role, name, purpose in (
        (issued / "server", "server", "acme", ExtendedKeyUsageOID.SERVER_AUTH),
        (issued / "clients" / "laptop", "client", "laptop", ExtendedKeyUsageOID.CLIENT_AUTH),
        (issued / "clients" / "build", "client", "build", ExtendedKeyUsageOID.CLIENT_AUTH),
    ):
        assert x509.load_pem_x509_certificate((directory / "ca.crt").read_bytes()) == ca
        certificate = x509.load_pem_x509_certificate((directory / f"{role}.crt").read_bytes())
        certificate.verify_directly_issued_by(ca)
        assert [(attribute.oid, attribute.value) for attribute in certificate.subject] == [(NameOID.COMMON_NAME, name)]
        extensions = {extension.oid: extension for extension in certificate.extensions}
        assert x509.SubjectAlternativeName.oid not in extensions
        assert extensions[x509.BasicConstraints.oid].value == x509.BasicConstraints(False, None)
        only_digital = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        assert extensions[x509.KeyUsage.oid].value == only_digital
        assert extensions[x509.ExtendedKeyUsage.oid].value == x509.ExtendedKeyUsage([purpose])
        key = serialization.load_pem_private_key((directory / f"{role}.key").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        assert isinstance(key.curve, ec.SECP256R1)
        assert key.public_key() == certificate.public_key()
        keys.append(certificate.public_key())
        start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        assert (start, end) == (ca.not_valid_before_utc, ca.not_valid_after_utc)
        age = datetime.now(timezone.utc) - start
        assert timedelta(days=1) <= age < timedelta(days=1, minutes=10)
        # To the day, but for a bundle of a 29th of February, in which it ends a day earlier.
        assert (end.year, end.month) == (start.year + 10, start.month)
        assert end.day == start.day or (end.day, start.day) == (28, 29)
    assert (
        len(set(map(repr, (key.public_numbers() for key in keys if isinstance(key, ec.EllipticCurvePublicKey))))) == 4
    )
    # The key of the CA is nowhere.
    assert len(list(issued.rglob("*.key"))) == 3
    serials = {x509.load_pem_x509_certificate(path.read_bytes()).serial_number for path in issued.rglob("*.crt")}
    assert len(serials) == 4


def test_the_sides_of_a_bundle_accept_each_other(issued: Path, tmp_path: Path) -> None:
    server = rat.load_side(str(issued / "server"), "server")
    client = rat.load_side(str(issued / "clients" / "build"))
    assert (server.tenant, server.name, client.tenant, client.name) == ("acme", "acme", "acme", "build")
    with DemoRatd(server, tmp_path) as running:
        ratd = rat.Ratd(rat.Address.parse(running.address), client)
        (answer,) = ratd.post(rat.Exchange(b""), {}, 10)
        assert answer.status == 415
        ratd.pool.close()
        assert [request.session for request in running.requests] == ["build"]


def test_a_bundle_issued_on_a_29th_of_february_ends_on_a_28th(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock is what cannot be had."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime(2028, 3, 1, 12, tzinfo=timezone.utc)

    monkeypatch.setattr(rat_tool, "datetime", Clock)
    ca = x509.load_pem_x509_certificate(rat_tool.issue_bundle("acme", ["laptop"])[0].content)
    assert ca.not_valid_before_utc == datetime(2028, 2, 29, 12, tzinfo=timezone.utc)
    assert ca.not_valid_after_utc == datetime(2038, 2, 28, 12, tzinfo=timezone.utc)


@pytest.mark.parametrize("there", ["file", "empty", "full", "dangling"])
def test_an_output_that_exists_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str], there: str) -> None:
    output = tmp_path / "bundle"
    if there == "file":
        output.write_text("mine")
    elif there == "dangling":
        output.symlink_to(tmp_path / "nowhere")
    else:
        output.mkdir()
        if there == "full":
            (output / "mine").write_text("mine")
    status, printed, errors = run(
        capsys, "bundle", "generate", "--tenant", "acme", "--client", "laptop", "--output", str(output)
    )
    assert (status, printed) == (1, "")
    assert errors == f"rat-tool: {output} exists: give a directory that does not, a bundle is never written over\n"
    assert [path.name for path in tmp_path.rglob("*")] == (["bundle", "mine"] if there == "full" else ["bundle"])


@pytest.mark.parametrize("fails", ["key", "directory", "check", "interrupt"])
def test_a_failure_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """A full disk and the moment of an interruption are what cannot be had."""
    output = tmp_path / "new" / "parents" / "bundle"
    last = output / "clients" / "laptop"
    if fails == "directory":
        mkdir = os.mkdir

        def refuse(path: str, mode: int = 0o777) -> None:
            if Path(path) == last:
                raise OSError(28, "No space left on device", path)
            mkdir(path, mode)

        monkeypatch.setattr(os, "mkdir", refuse)
        said = f"rat-tool: cannot write {last}: no space left on device\n"
    elif fails == "key":
        open_ = os.open

        def refuse_key(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if Path(path) == last / "client.key":
                raise OSError(28, "No space left on device", path)
            return open_(path, flags, mode, dir_fd=dir_fd)

        monkeypatch.setattr(os, "open", refuse_key)
        said = f"rat-tool: cannot write {last / 'client.key'}: no space left on device\n"
    else:

        def stop(*arguments: object) -> None:
            raise KeyboardInterrupt if fails == "interrupt" else rat.BundleError("not as it should be")

        monkeypatch.setattr(rat, "load_side", stop)
        said = "rat-tool: interrupted\n" if fails == "interrupt" else "rat-tool: not as it should be\n"
    status, printed, errors = run(
        capsys, "bundle", "generate", "--tenant", "acme", "--client", "laptop", "--output", str(output)
    )
    assert (status, printed, errors) == (130 if fails == "interrupt" else 1, "", said)
    assert list(tmp_path.iterdir()) == []


def test_a_parent_that_is_a_file_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" / "bundle"
    status, _, errors = run(
        capsys, "bundle", "generate", "--tenant", "acme", "--client", "laptop", "--output", str(output)
    )
    assert status == 1
    assert re.fullmatch(rf"rat-tool: cannot write {re.escape(str(output))}: .*\n", errors)


NAME_EXPECTED = "expected 1 to 32 letters, digits, _ or -, not"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tenant", "a b", "--client", "c"], f"argument --tenant: {NAME_EXPECTED} 'a b'"),
        (["--tenant", "", "--client", "c"], f"argument --tenant: {NAME_EXPECTED} ''"),
        (["--tenant", "é", "--client", "c"], f"argument --tenant: {NAME_EXPECTED} 'é'"),
        (["--tenant", "a", "--client", "../c"], f"argument --client: {NAME_EXPECTED} '../c'"),
        (["--tenant", "a", "--client", "c\n"], f"argument --client: {NAME_EXPECTED} 'c\\n'"),
        (["--tenant", "a", "--client", "c" * 33], f"argument --client: {NAME_EXPECTED} '{'c' * 33}'"),
        (["--tenant", "a", "--client", "c", "--client", "C"], "argument --client: c and C would be one directory"),
        (["--tenant", "a"], "the following arguments are required: --client"),
        (["--client", "c"], "the following arguments are required: --tenant"),
    ],
)
def test_names_are_checked_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    status, printed, errors = run(capsys, "bundle", "generate", *arguments, "--output", str(tmp_path / "bundle"))
    assert (status, printed) == (2, "")
    assert errors == f"rat-tool bundle generate: {said}. See rat-tool bundle generate --help.\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a", "_", "x" * 32, "A-1_b", "0"])
def test_any_plain_name_is_taken(tmp_path: Path, name: str) -> None:
    bundle = generate(tmp_path / "bundle", name, name)
    side = rat.load_side(str(bundle / "clients" / name))
    assert (side.tenant, side.name) == (name, name)


@pytest.mark.parametrize("command", [["bundle", "generate", "--tenant", "a", "--client", "c", "--output"], ["demo"]])
def test_without_cryptography_one_sentence_says_what_to_install(tmp_path: Path, command: list[str]) -> None:
    """A process that has not the package: its import fails, as where it was never installed."""
    output = [str(tmp_path / "bundle")] if command[-1] == "--output" else []
    program = "import sys; sys.modules['cryptography'] = None; sys.path.insert(0, sys.argv.pop(1)); import rat_tool; "
    done = subprocess.run(
        [sys.executable, "-c", program + "sys.exit(rat_tool.main())", str(ROOT), *command, *output],
        capture_output=True,
        env={**rat_environment(), "TMPDIR": str(tmp_path)},
        text=True,
        timeout=HANG,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        1,
        "",
        "rat-tool: issuing a bundle needs the package cryptography: pip install cryptography\n",
    )
    assert list(tmp_path.iterdir()) == []


# --- inspect ------------------------------------------------------------------------------------------


def passed(role: str, count: int = 7) -> str:
    """The lines of the checks that passed."""
    lines = [
        f"files: ca.crt, {role}.crt and {role}.key are there, each a single PEM block of its kind",
        f"permissions: only the owner can read {role}.key",
        f"key: {role}.key is that of {role}.crt",
        f"signature: {role}.crt is signed by ca.crt, which is a CA",
        f"role: {role}.crt is a {role}'s",
        "validity: both certificates are valid now",
        f"names: tenant and {role} have plain names",
    ]
    return "".join(f"  ok    {line}\n" for line in lines[:count])


def facts(path: Path, what: str, end: datetime = END) -> str:
    """The lines that tell what a directory is."""
    der = ssl.PEM_cert_to_DER_cert((path / "ca.crt").read_text())
    days = (end - datetime.now(timezone.utc)).days
    return (
        f"        {what}\n"
        f"        CA fingerprint (SHA-256): {hashlib.sha256(der).hexdigest()}\n"
        f"        expires {end:%Y-%m-%d}, in {days} days\n"
    )


def test_inspect_tells_what_a_directory_is(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "bundle", "inspect", str(bundle.client)) == (
        0,
        f"{bundle.client}\n{passed('client')}{facts(bundle.client, 'client laptop of acme')}",
        "",
    )
    assert run(capsys, "bundle", "inspect", str(bundle.server)) == (
        0,
        f"{bundle.server}\n{passed('server')}{facts(bundle.server, 'the server of tenant acme')}",
        "",
    )


def test_inspect_warns_in_the_last_year(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    authority = Authority()
    leaf = authority.issue("laptop", CLIENT, end=NOW + 100 * DAY)
    side = write_side(tmp_path / "side", "client", authority.certificate, leaf)
    assert run(capsys, "bundle", "inspect", str(side)) == (
        0,
        f"{side}\n{passed('client')}{facts(side, 'client laptop of acme', NOW + 100 * DAY)}"
        "  warn  less than a year remains: issue another bundle, and hand out its directories, before then\n",
        "",
    )


def test_two_directories_of_one_bundle_belong_together(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed, _ = run(capsys, "bundle", "inspect", str(bundle.client), str(bundle.server))
    assert status == 0
    assert printed == (
        f"{bundle.client}\n{passed('client')}{facts(bundle.client, 'client laptop of acme')}"
        f"{bundle.server}\n{passed('server')}{facts(bundle.server, 'the server of tenant acme')}"
        "together\n"
        "  ok    one bundle: the 2 directories have the same CA\n"
    )


def test_directories_of_different_bundles_fail(
    bundle: Bundle, other_bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [bundle.client, other_bundle.server, bundle.server]
    status, printed, _ = run(capsys, "bundle", "inspect", *map(str, paths))
    first, second = (
        hashlib.sha256(ssl.PEM_cert_to_DER_cert((side / "ca.crt").read_text())).hexdigest()[:16]
        for side in (bundle.client, other_bundle.server)
    )
    assert status == 1
    assert printed.endswith(
        "together\n"
        "  FAIL  2 bundles: sides with different CAs refuse each other\n"
        f"        CA {first}… of tenant acme: {bundle.client}, {bundle.server}\n"
        f"        CA {second}… of tenant acme: {other_bundle.server}\n"
    )


def spoil(directory: Path, fault: str) -> str:
    """Give a client directory one fault; returns what is said of it, the directory written as DIR."""
    if fault == "files":
        (directory / "client.key").unlink()
        return "cannot read DIR/client.key: no such file or directory"
    if fault == "permissions":
        (directory / "client.key").chmod(0o644)
        return "DIR/client.key has mode 0644, run: chmod 600 DIR/client.key"
    authority = Authority()
    leaf = authority.issue("laptop", CLIENT)
    said = {
        "key": "DIR/client.key is not the key of DIR/client.crt: copy both from one directory",
        "signature": "DIR/client.crt is not signed by DIR/ca.crt: copy both from one directory",
        "role": "DIR/client.crt is a server's, expected a client's (extended key usage clientAuth)",
        "validity": f"DIR/client.crt expired on {NOW - DAY:%Y-%m-%d %H:%M} UTC: "
        "issue a bundle with rat-tool bundle generate",
        "names": "DIR/client.crt names 'a b', expected one name of 1 to 32 letters, digits, _ or -: "
        "issue a bundle with rat-tool bundle generate",
    }[fault]
    ca = authority.certificate
    if fault == "key":
        leaf = leaf._replace(key=authority.issue("laptop", CLIENT).key)
    elif fault == "signature":
        ca = Authority(key=new_key()).certificate
    elif fault == "role":
        leaf = authority.issue("laptop", SERVER)
    elif fault == "validity":
        leaf = authority.issue("laptop", CLIENT, start=START - 9 * DAY, end=NOW - DAY)
    else:
        leaf = authority.issue("a b", CLIENT)
    shutil.rmtree(directory)
    write_side(directory, "client", ca, leaf)
    return said


@pytest.mark.parametrize("fault", rat.CHECKS)
def test_inspect_stops_at_the_fault_and_says_how_to_mend_it(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    if fault == "permissions" and os.name == "nt":
        pytest.skip("Windows has no such modes")
    side = shutil.copytree(bundle.client, tmp_path / "side")
    said = spoil(side, fault).replace("DIR", str(side))
    before = passed("client", rat.CHECKS.index(fault))
    assert run(capsys, "bundle", "inspect", str(side)) == (1, f"{side}\n{before}  FAIL  {fault}: {said}\n", "")
    # Another directory is inspected all the same, and nothing is said of one bundle.
    status, printed, _ = run(capsys, "bundle", "inspect", str(side), str(bundle.client))
    assert status == 1
    assert printed == (
        f"{side}\n{before}  FAIL  {fault}: {said}\n"
        f"{bundle.client}\n{passed('client')}{facts(bundle.client, 'client laptop of acme')}"
    )


def test_inspect_tells_of_what_is_no_directory_of_one_side(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "bundle", "inspect", str(tmp_path / "none\x1b[31m"))[:2] == (
        1,
        f"{tmp_path}/none\N{REPLACEMENT CHARACTER}[31m\n"
        f"  FAIL  files: cannot read the directory {tmp_path}/none\N{REPLACEMENT CHARACTER}[31m: "
        "no such file or directory\n",
    )
    place = bundle.root / "clients" / "NAME"
    assert run(capsys, "bundle", "inspect", str(bundle.root))[:2] == (
        1,
        f"{bundle.root}\n"
        f"  FAIL  files: {bundle.root} is a whole bundle: give the directory of one client in it, {place}\n",
    )


# --- what is the same for every command ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "rat-tool: the following arguments are required: COMMAND. See rat-tool --help."),
        (["bundle"], "rat-tool bundle: the following arguments are required: COMMAND. See rat-tool bundle --help."),
        (
            ["bundle", "inspect"],
            "rat-tool bundle inspect: the following arguments are required: DIR. See rat-tool bundle inspect --help.",
        ),
        (["demo", "now"], "rat-tool: unrecognized arguments: now. See rat-tool --help."),
    ],
)
def test_usage_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert run(capsys, *arguments) == (2, "", said + "\n")


@pytest.mark.parametrize(
    ("command", "does", "needs", "example"),
    [
        ("bundle generate", "Issue a bundle", "It needs the package cryptography", "--output bundle"),
        ("bundle inspect", "Check directories", "It needs nothing but the directories", "bundle/server"),
        ("check", "Try to reach a server", "It needs the command line of rat", "--server ratd.example:7433"),
        ("config", "Print the entry", "It needs a client directory", "--harness codex"),
        ("demo", "Show rat at work", "It needs the package cryptography", "rat-tool demo"),
    ],
)
def test_help_says_what_it_does_what_it_needs_and_one_example(
    capsys: pytest.CaptureFixture[str], command: str, does: str, needs: str, example: str
) -> None:
    status, printed, errors = run(capsys, *command.split(), "--help")
    assert (status, errors) == (0, "")
    text = " ".join(printed.split())
    for part in (f"usage: rat-tool {command} ", does, needs, f"example: rat-tool {command}", example):
        assert part in text


@pytest.mark.skipif(os.name == "nt", reason="no such terminal there")
@pytest.mark.parametrize("no_color", [False, True])
def test_marks_are_coloured_on_a_terminal_and_not_with_no_color(bundle: Bundle, no_color: bool) -> None:
    import pty

    environment = {**rat_environment(), "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    if no_color:
        environment["NO_COLOR"] = "1"
    outside, inside = pty.openpty()
    with subprocess.Popen(
        [sys.executable, str(TOOL), "bundle", "inspect", str(bundle.client)], stdout=inside, env=environment
    ) as process:
        os.close(inside)
        printed = b""
        with open(outside, "rb", buffering=0) as terminal:
            try:
                while part := terminal.read(65536):
                    printed += part
            except OSError:
                pass  # how Linux tells that the other end is closed
        assert process.wait(HANG) == 0
    assert (b"  ok    files: " in printed) == no_color
    assert (b"  \x1b[32mok\x1b[0m    files: " in printed) == (not no_color)


@pytest.mark.skipif(os.name == "nt", reason="SIGPIPE is of POSIX")
def test_a_reader_that_leaves_ends_the_command_quietly(bundle: Bundle) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, str(TOOL), "bundle", "inspect", str(bundle.client)],
        stdout=writing,
        stderr=subprocess.PIPE,
        env=rat_environment(),
        timeout=HANG,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_signal_handlers_are_put_back(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    run(capsys, "bundle", "inspect", str(bundle.client))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
