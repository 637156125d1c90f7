"""Bundles for the tests: good ones as rat expects them, and every fault one can have.

An `Authority` is the CA of a bundle and keeps its key, which a real one throws away: a fault is
then one argument, and a server that sees the same client otherwise (its CA expired, or not for
clients) is the same key certified anew. ``write_side`` writes a directory; `Bundle` lays out a
whole one.
"""

from __future__ import annotations

import ipaddress
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CLIENT = ExtendedKeyUsageOID.CLIENT_AUTH
SERVER = ExtendedKeyUsageOID.SERVER_AUTH

# Now, for every date of every bundle: whole seconds, as certificates hold them.
NOW = datetime.now(timezone.utc).replace(microsecond=0)
DAY = timedelta(days=1)
START = NOW - DAY
END = START + 3652 * DAY


class Leaf(NamedTuple):
    """A certificate and its key, each as the single PEM block of a file."""

    certificate: bytes
    key: bytes

    @property
    def x509(self) -> x509.Certificate:
        """The certificate, parsed."""
        return x509.load_pem_x509_certificate(self.certificate)


def new_key(curve: ec.EllipticCurve | None = None) -> ec.EllipticCurvePrivateKey:
    """A private key, P-256 unless another curve is asked for."""
    return ec.generate_private_key(curve or ec.SECP256R1())


def key_pem(
    key: ec.EllipticCurvePrivateKey,
    form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8,
    password: bytes | None = None,
) -> bytes:
    """The PEM block of a key: PKCS#8 and not encrypted unless told."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        form,
        serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption(),
    )


def distinguished(common_name: str | None, organization: str | None = None) -> x509.Name:
    """A subject: ``O=…, CN=…``, each part left out when None."""
    parts = []
    if organization is not None:
        parts.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    if common_name is not None:
        parts.append(x509.NameAttribute(NameOID.COMMON_NAME, common_name))
    return x509.Name(parts)


def _key_usage(*, signature: bool = False, certificates: bool = False, lists: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=certificates,
        crl_sign=lists,
        encipher_only=False,
        decipher_only=False,
    )


class Authority:
    """The CA of a bundle, its key kept so that faults can be issued.

    ``usages`` restricts what it may certify, ``within`` names the only subject allowed (both read
    by the peer that trusts it, not by the client that holds its own copy), ``identified`` leaves
    out the key identifiers when False.
    """

    def __init__(
        self,
        tenant: str | None = "acme",
        *,
        organization: str | None = "rat CA",
        is_ca: bool = True,
        start: datetime = START,
        end: datetime = END,
        usages: tuple[x509.ObjectIdentifier, ...] = (),
        within: x509.Name | None = None,
        identified: bool = True,
        key: ec.EllipticCurvePrivateKey | None = None,
    ) -> None:
        self.key = key or new_key()
        self.tenant = tenant
        self.identified = identified
        subject = distinguished(tenant, organization)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(self.key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(is_ca, 0 if is_ca else None), critical=True)
            .add_extension(_key_usage(signature=not is_ca, certificates=is_ca, lists=is_ca), critical=True)
        )
        if identified:
            builder = builder.add_extension(
                x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()), critical=False
            )
        if usages:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if within is not None:
            builder = builder.add_extension(x509.NameConstraints([x509.DirectoryName(within)], None), critical=True)
        self.x509 = builder.sign(self.key, hashes.SHA256())
        self.certificate = self.x509.public_bytes(serialization.Encoding.PEM)

    def issue(
        self,
        name: str | None,
        *usages: x509.ObjectIdentifier,
        start: datetime = START,
        end: datetime = END,
        key: ec.EllipticCurvePrivateKey | None = None,
        digest: hashes.SHA256 | hashes.SHA384 | None = None,
        address: str | None = None,
    ) -> Leaf:
        """A side's certificate and key: ``CN=name``, with exactly the extended key usages given.

        ``address`` is that of an https server of the web, which no side of a bundle has.
        """
        key = key or new_key()
        builder = (
            x509.CertificateBuilder()
            .subject_name(distinguished(name))
            .issuer_name(self.x509.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(False, None), critical=True)
            .add_extension(_key_usage(signature=True), critical=True)
        )
        if usages:
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if address is not None:
            named = x509.IPAddress(ipaddress.ip_address(address))
            builder = builder.add_extension(x509.SubjectAlternativeName([named]), critical=False)
        if self.identified:
            builder = builder.add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
            )
        certificate = builder.sign(self.key, digest or hashes.SHA256())
        return Leaf(certificate.public_bytes(serialization.Encoding.PEM), key_pem(key))

    def revoke(self, leaf: Leaf) -> bytes:
        """A revocation list naming the leaf, as a PEM block."""
        entry = x509.RevokedCertificateBuilder().serial_number(leaf.x509.serial_number).revocation_date(START).build()
        revoked = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.x509.subject)
            .last_update(START)
            .next_update(END)
            .add_revoked_certificate(entry)
            .sign(self.key, hashes.SHA256())
        )
        return revoked.public_bytes(serialization.Encoding.PEM)


def write_side(directory: Path, role: str, ca: bytes, leaf: Leaf) -> Path:
    """Write a directory of one side (``role`` is "client" or "server") and return it."""
    directory.mkdir(mode=0o700, parents=True)
    for name, content, mode in (
        ("ca.crt", ca, 0o644),
        (f"{role}.crt", leaf.certificate, 0o644),
        (f"{role}.key", leaf.key, 0o600),
    ):
        with open(os.open(directory / name, os.O_CREAT | os.O_WRONLY, mode), "wb") as file:
            file.write(content)
    return directory


class Bundle:
    """A whole bundle below ``root``: ``server/`` and ``clients/<name>/``, one client."""

    def __init__(
        self,
        root: Path,
        tenant: str = "acme",
        clients: tuple[str, ...] = ("laptop",),
        authority: Authority | None = None,
        server: Leaf | None = None,
    ) -> None:
        self.root = root
        self.tenant = tenant
        self.authority = authority or Authority(tenant)
        self.server = write_side(
            root / "server", "server", self.authority.certificate, server or self.authority.issue(tenant, SERVER)
        )
        self.leaves = {name: self.authority.issue(name, CLIENT) for name in clients}
        self.clients = [self.add_client(name, leaf) for name, leaf in self.leaves.items()]
        self.client = self.clients[0]

    def add_client(self, name: str, leaf: Leaf) -> Path:
        """Write one more directory of a client, whatever its certificate says."""
        return write_side(self.root / "clients" / name, "client", self.authority.certificate, leaf)
