"""The client directory: its seven checks, each telling which file and what to do, and the expiry."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import ssl
from datetime import timedelta
from typing import TYPE_CHECKING, Callable

import pytest
from bundles import CLIENT, DAY, END, NOW, SERVER, START, Authority, Bundle, Leaf, key_pem, new_key, write_side
from cryptography.hazmat.primitives import serialization
from harness import run_rat

import rat

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import StartRat

REISSUE = "issue a bundle with rat-tool bundle generate"


@pytest.fixture
def side(bundle: Bundle, tmp_path: Path) -> Path:
    """A copy of the client directory, to spoil."""
    return shutil.copytree(bundle.client, tmp_path / "laptop")


def checks_passed(side: Path, role: str = "client") -> tuple[list[str], str | None]:
    """The checks that a directory passes, and what is said at the first that fails."""
    passed: list[str] = []
    try:
        rat.load_side(str(side), role, passed.append)
    except rat.BundleError as e:
        return passed, str(e)
    return passed, None


def assert_fails(side: Path, check: str, error: str, role: str = "client") -> None:
    """Whether a directory fails at one check, those before it having passed, saying ``error``."""
    before = list(rat.CHECKS[: rat.CHECKS.index(check)])
    assert checks_passed(side, role) == (before, error)


def test_the_checks_are_these_in_this_order() -> None:
    assert rat.CHECKS == ("files", "permissions", "key", "signature", "role", "validity", "names")


def test_a_good_client_directory_passes_all(bundle: Bundle) -> None:
    assert checks_passed(bundle.client) == (list(rat.CHECKS), None)
    side = rat.load_side(str(bundle.client))
    der = bundle.authority.x509.public_bytes(serialization.Encoding.DER)
    assert side == rat.Side(
        role="client",
        path=str(bundle.client),
        tenant="acme",
        name="laptop",
        expires=END,
        ca_fingerprint=hashlib.sha256(der).hexdigest(),
    )


def test_a_good_server_directory_passes_as_a_server(bundle: Bundle) -> None:
    assert checks_passed(bundle.server, "server") == (list(rat.CHECKS), None)
    side = rat.load_side(str(bundle.server), "server")
    assert (side.role, side.tenant, side.name) == ("server", "acme", "acme")


def test_key_identifiers_are_not_needed(tmp_path: Path) -> None:
    plain = Bundle(tmp_path / "plain", authority=Authority(identified=False))
    assert checks_passed(plain.client) == (list(rat.CHECKS), None)


# 1: files


def test_a_file_in_place_of_the_directory(side: Path) -> None:
    file = side / "ca.crt"
    assert_fails(file, "files", f"cannot read the directory {file}: not a directory")


@pytest.mark.parametrize("name", ["ca.crt", "client.crt", "client.key"])
def test_a_file_that_is_missing(side: Path, name: str) -> None:
    (side / name).unlink()
    assert_fails(side, "files", f"cannot read {side / name}: no such file or directory")


def test_an_empty_directory(tmp_path: Path) -> None:
    error = f"cannot read {tmp_path / 'ca.crt'}: no such file or directory"
    assert_fails(tmp_path, "files", error)


def test_a_directory_in_place_of_a_file(side: Path) -> None:
    (side / "client.key").unlink()
    (side / "client.key").mkdir()
    assert_fails(side, "files", f"cannot read {side / 'client.key'}: is a directory")


def test_the_directory_of_a_server_is_refused_as_what_it_is(bundle: Bundle) -> None:
    assert_fails(
        bundle.server,
        "files",
        f"{bundle.server} is the directory of a server: give that of a client (clients/NAME of the bundle)",
    )
    assert_fails(
        bundle.client,
        "files",
        f"{bundle.client} is the directory of a client: give that of a server (server of the bundle)",
        role="server",
    )


def test_a_whole_bundle_is_refused_with_the_directory_to_give(bundle: Bundle) -> None:
    assert_fails(
        bundle.root,
        "files",
        f"{bundle.root} is a whole bundle: give the directory of one client in it, {bundle.root / 'clients' / 'NAME'}",
    )


def test_the_directory_of_all_clients_is_refused_with_the_directory_to_give(bundle: Bundle) -> None:
    clients = bundle.root / "clients"
    assert_fails(clients, "files", f"{clients} holds the directories of clients: give one of them, {clients / 'NAME'}")


def test_files_of_both_sides(side: Path, bundle: Bundle) -> None:
    shutil.copy(bundle.server / "server.key", side)
    assert_fails(side, "files", f"{side} holds files of both sides: copy one side's directory whole, and nothing else")


def pem(label: str, der: bytes) -> bytes:
    """A PEM block of any label."""
    body = base64.encodebytes(der).decode()
    return f"-----BEGIN {label}-----\n{body}-----END {label}-----\n".encode()


def traditional_key() -> bytes:
    return key_pem(new_key(), serialization.PrivateFormat.TraditionalOpenSSL)


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("ca.crt", lambda good: b"", "holds 0 PEM blocks, expected one of CERTIFICATE"),
        ("client.crt", lambda good: b"not PEM", "holds 0 PEM blocks, expected one of CERTIFICATE"),
        ("client.crt", lambda good: good * 2, "holds 2 PEM blocks, expected one of CERTIFICATE"),
        ("client.key", lambda good: good * 3, "holds 3 PEM blocks, expected one of PRIVATE KEY"),
        ("client.crt", lambda good: key_pem(new_key()), "holds a PEM block of PRIVATE KEY, expected CERTIFICATE"),
        (
            "client.key",
            lambda good: Authority().certificate,
            "holds a PEM block of CERTIFICATE, expected PRIVATE KEY (PKCS#8, not encrypted)",
        ),
        (
            "client.key",
            lambda good: traditional_key(),
            "holds a PEM block of EC PRIVATE KEY, expected PRIVATE KEY (PKCS#8, not encrypted)",
        ),
        (
            "client.key",
            lambda good: key_pem(new_key(), password=b"secret"),
            "holds a PEM block of ENCRYPTED PRIVATE KEY, expected PRIVATE KEY (PKCS#8, not encrypted)",
        ),
        ("client.crt", lambda good: good.replace(b"MII", b"M!I"), "holds a damaged PEM block: copy the file again"),
        ("client.crt", lambda good: good[: len(good) // 2], "holds a damaged PEM block: copy the file again"),
        # OpenSSL looks for the boundaries at the beginning of a line, and so must whoever counts them.
        ("ca.crt", lambda good: b" " + good, "holds 0 PEM blocks, expected one of CERTIFICATE"),
        ("ca.crt", lambda good: good.replace(b"\n", b""), "holds a damaged PEM block: copy the file again"),
        ("ca.crt", lambda good: good.replace(b"E-----\n", b"E-----"), "holds a damaged PEM block: copy the file again"),
        (
            "client.key",
            lambda good: good.replace(b"-----END", b" -----END"),
            "holds a damaged PEM block: copy the file again",
        ),
        (
            "ca.crt",
            lambda good: good.replace(b"END CERTIFICATE", b"END OTHER"),
            "holds a damaged PEM block: copy the file again",
        ),
    ],
)
def test_a_file_that_is_no_single_pem_block_of_its_kind(
    side: Path, name: str, content: Callable[[bytes], bytes], error: str
) -> None:
    file = side / name
    file.write_bytes(content(file.read_bytes()))
    assert_fails(side, "files", f"{file} {error}")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no such pipes")
@pytest.mark.parametrize("name", ["ca.crt", "client.crt", "client.key"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(side: Path, name: str) -> None:
    (side / name).unlink()
    os.mkfifo(side / name)
    assert_fails(side, "files", f"cannot read {side / name}: a pipe, which can be read only once")


@pytest.mark.parametrize("name", ["ca.crt", "client.crt"])
def test_a_pem_block_that_holds_no_certificate(side: Path, name: str) -> None:
    (side / name).write_bytes(pem("CERTIFICATE", b"no DER at all"))
    passed, error = checks_passed(side)
    assert passed == []
    assert error is not None
    assert error.startswith(f"{side / name} holds no X.509 certificate (")
    assert error.endswith(f"): {REISSUE}")


# 2: permissions


@pytest.mark.skipif(os.name == "nt", reason="Windows has no modes")
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o610, 0o777])
def test_a_key_that_others_may_read(side: Path, mode: int) -> None:
    key = side / "client.key"
    key.chmod(mode)
    assert_fails(side, "permissions", f"{key} has mode {mode:04o}, run: chmod 600 {key}")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no modes")
@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_key_that_its_owner_alone_may_read(side: Path, mode: int) -> None:
    (side / "client.key").chmod(mode)
    assert checks_passed(side)[1] is None


# 3: key


def test_a_key_of_another_certificate(side: Path) -> None:
    key = side / "client.key"
    key.write_bytes(key_pem(new_key()))
    assert_fails(side, "key", f"{key} is not the key of {side / 'client.crt'}: copy both from one directory")


def test_a_key_that_is_none(side: Path) -> None:
    key = side / "client.key"
    key.write_bytes(pem("PRIVATE KEY", b"no DER at all"))
    passed, error = checks_passed(side)
    assert passed == ["files", "permissions"]
    assert error is not None
    assert error.startswith(f"{key} and {side / 'client.crt'} cannot be used (")
    assert error.endswith(f"): {REISSUE}")


# 4: signature


def test_a_certificate_of_another_bundle_of_the_same_tenant(side: Path, other_bundle: Bundle) -> None:
    shutil.copy(other_bundle.client / "ca.crt", side)
    assert_fails(
        side, "signature", f"{side / 'client.crt'} is not signed by {side / 'ca.crt'}: copy both from one directory"
    )


def test_a_certificate_of_another_bundle_without_key_identifiers(tmp_path: Path) -> None:
    mine, other = Authority(identified=False), Authority(identified=False)
    side = write_side(tmp_path / "c", "client", other.certificate, mine.issue("laptop", CLIENT))
    assert_fails(
        side, "signature", f"{side / 'client.crt'} is not signed by {side / 'ca.crt'}: copy both from one directory"
    )


def test_a_certificate_of_another_tenant(side: Path) -> None:
    (side / "ca.crt").write_bytes(Authority("globex").certificate)
    assert_fails(
        side, "signature", f"{side / 'client.crt'} is not signed by {side / 'ca.crt'}: copy both from one directory"
    )


def test_a_strangers_certificate_is_told_so_before_its_role(side: Path) -> None:
    stranger = Authority("globex").issue("laptop", SERVER)
    (side / "client.crt").write_bytes(stranger.certificate)
    (side / "client.key").write_bytes(stranger.key)
    assert_fails(
        side, "signature", f"{side / 'client.crt'} is not signed by {side / 'ca.crt'}: copy both from one directory"
    )


def test_a_ca_that_is_none(tmp_path: Path) -> None:
    authority = Authority(is_ca=False)
    leaf = authority.issue("laptop", CLIENT)
    side = write_side(tmp_path / "c", "client", authority.certificate, leaf)
    assert_fails(side, "signature", f"{side / 'ca.crt'} is not the certificate of a CA: {REISSUE}")


def test_the_certificate_itself_in_place_of_its_ca(side: Path) -> None:
    shutil.copy(side / "client.crt", side / "ca.crt")
    assert_fails(side, "signature", f"{side / 'ca.crt'} is not the certificate of a CA: {REISSUE}")


# 5: role


def issued(directory: Path, leaf: Callable[[Authority], Leaf], role: str = "client") -> Path:
    """A directory whose certificate is issued by a good CA."""
    authority = Authority()
    return write_side(directory, role, authority.certificate, leaf(authority))


def test_the_certificate_of_a_server(tmp_path: Path) -> None:
    side = issued(tmp_path / "c", lambda ca: ca.issue("laptop", SERVER))
    assert_fails(
        side, "role", f"{side / 'client.crt'} is a server's, expected a client's (extended key usage clientAuth)"
    )


def test_the_certificate_of_a_client_in_a_server_directory(tmp_path: Path) -> None:
    side = issued(tmp_path / "s", lambda ca: ca.issue("acme", CLIENT), "server")
    assert_fails(
        side,
        "role",
        f"{side / 'server.crt'} is a client's, expected a server's (extended key usage serverAuth)",
        role="server",
    )


def test_a_certificate_of_both_roles(tmp_path: Path) -> None:
    side = issued(tmp_path / "c", lambda ca: ca.issue("laptop", CLIENT, SERVER))
    assert_fails(
        side, "role", f"{side / 'client.crt'} serves both roles, expected clientAuth as its one extended key usage"
    )


def test_a_certificate_without_any_role(tmp_path: Path) -> None:
    # Without an extended key usage OpenSSL takes a certificate for any purpose (RFC 5280, 4.2.1.12).
    side = issued(tmp_path / "c", lambda ca: ca.issue("laptop"))
    assert_fails(
        side, "role", f"{side / 'client.crt'} serves both roles, expected clientAuth as its one extended key usage"
    )


def test_a_certificate_of_neither_role(tmp_path: Path) -> None:
    from cryptography.x509.oid import ExtendedKeyUsageOID

    side = issued(tmp_path / "c", lambda ca: ca.issue("laptop", ExtendedKeyUsageOID.CODE_SIGNING))
    assert_fails(
        side, "role", f"{side / 'client.crt'} is of neither role, expected a client's (extended key usage clientAuth)"
    )


# 6: validity


def test_a_certificate_that_expired(tmp_path: Path) -> None:
    end = NOW - timedelta(hours=1)
    side = issued(tmp_path / "c", lambda ca: ca.issue("laptop", CLIENT, end=end))
    assert_fails(side, "validity", f"{side / 'client.crt'} expired on {end:%Y-%m-%d %H:%M} UTC: {REISSUE}")


def test_a_certificate_that_is_not_valid_yet(tmp_path: Path) -> None:
    start = NOW + DAY
    side = issued(tmp_path / "c", lambda ca: ca.issue("laptop", CLIENT, start=start))
    assert_fails(
        side,
        "validity",
        f"{side / 'client.crt'} is not valid before {start:%Y-%m-%d %H:%M} UTC: check this machine's clock",
    )


@pytest.mark.parametrize("expired", [True, False])
def test_the_validity_of_the_ca_counts_as_well(tmp_path: Path, expired: bool) -> None:
    start, end = (START - DAY, NOW - DAY / 2) if expired else (NOW + DAY, END)
    authority = Authority(start=start, end=end)
    leaf = authority.issue("laptop", CLIENT)
    side = write_side(tmp_path / "c", "client", authority.certificate, leaf)
    told = (
        f"expired on {end:%Y-%m-%d %H:%M} UTC: {REISSUE}"
        if expired
        else f"is not valid before {start:%Y-%m-%d %H:%M} UTC: check this machine's clock"
    )
    assert_fails(side, "validity", f"{side / 'ca.crt'} {told}")


# 7: names

BAD_NAMES = ["a b", "a.b", "ü", "x" * 33, "a/b", "laptop\n"]


@pytest.mark.parametrize("name", [*BAD_NAMES, None])
def test_a_client_of_no_plain_name(tmp_path: Path, name: str | None) -> None:
    side = issued(tmp_path / "c", lambda ca: ca.issue(name, CLIENT))
    found = "nobody" if name is None else repr(name)
    assert_fails(
        side,
        "names",
        f"{side / 'client.crt'} names {found}, expected one name of 1 to 32 letters, digits, _ or -: {REISSUE}",
    )


@pytest.mark.parametrize("tenant", ["a b", "x" * 33, None])
def test_a_tenant_of_no_plain_name(tmp_path: Path, tenant: str | None) -> None:
    authority = Authority(tenant)
    leaf = authority.issue("laptop", CLIENT)
    side = write_side(tmp_path / "c", "client", authority.certificate, leaf)
    found = "nobody" if tenant is None else repr(tenant)
    assert_fails(
        side,
        "names",
        f"{side / 'ca.crt'} names {found}, expected one name of 1 to 32 letters, digits, _ or -: {REISSUE}",
    )


@pytest.mark.parametrize("name", ["a", "Z", "0", "-", "_", "a-B_9", "x" * 32])
def test_a_plain_name(tmp_path: Path, name: str) -> None:
    side = issued(tmp_path / "c", lambda ca: ca.issue(name, CLIENT))
    assert checks_passed(side) == (list(rat.CHECKS), None)
    assert rat.load_side(str(side)).name == name


# What a process does with it


def test_a_failed_check_is_one_line_with_status_1(side: Path) -> None:
    (side / "client.crt").unlink()
    assert run_rat(["--server", "127.0.0.1:1", "--bundle", str(side)]) == (
        1,
        "",
        f"rat: cannot read {side / 'client.crt'}: no such file or directory\n",
    )


def test_it_starts_without_a_server(start_rat: StartRat, client_side: Path) -> None:
    from fault_server import unused_port

    with unused_port() as port:
        started = start_rat(f"127.0.0.1:{port}")
        (record,) = started.wait_record("relaying")
        assert record["level"] == "INFO"
        assert started.finish() == (0, [])


@pytest.mark.parametrize(("days", "warned"), [(364, True), (367, False)])
def test_it_warns_when_less_than_a_year_remains(tmp_path: Path, start_rat: StartRat, days: int, warned: bool) -> None:
    end = NOW + days * DAY + DAY / 2
    side = issued(tmp_path / "c", lambda ca: ca.issue("laptop", CLIENT, end=end))
    started = start_rat("127.0.0.1:1", side)
    assert started.finish() == (0, [])
    records = started.records("the bundle expires within a year, issue another")
    assert [(each["level"], each["expires"], each["days"]) for each in records] == (
        [("WARN", f"{end:%Y-%m-%d}", str(days))] if warned else []
    )


def test_the_contexts_of_both_sides_speak_tls_13_only(bundle: Bundle) -> None:
    for role, directory in (("client", bundle.client), ("server", bundle.server)):
        context = rat.tls_context(rat.load_side(str(directory), role))
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED
        assert [each["subject"] for each in context.get_ca_certs()] == [
            ((("organizationName", "rat CA"),), (("commonName", "acme"),))
        ]
