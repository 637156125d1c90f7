"""What an artifact is made of: its parts with their licences, and the bill of materials that lists them (CycloneDX)."""

from __future__ import annotations

import email.parser
import hashlib
import json
import re
import uuid
import zipfile
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

# SPDX expressions of parts whose metadata tells their licence in words.
_EXPRESSIONS = {"certifi": "MPL-2.0"}


class Part(NamedTuple):
    """A part of an artifact.

    ``reference`` is its package URL (purl). ``licence`` is an SPDX expression, or "" where only the text tells.
    ``sha256`` is that of the file the part came as, "" where it came as none. ``texts`` are its licences.
    """

    name: str
    version: str
    reference: str
    licence: str = ""
    sha256: str = ""
    texts: tuple[str, ...] = ()
    kind: str = "library"


def wheel_part(wheel: Path) -> Part:
    """The part that a wheel is (its core metadata, and the licences among its files: PEP 639 and before)."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        fields = email.parser.HeaderParser().parsestr(archive.read(metadata).decode())
        licences = [
            name
            for name in names
            if re.match(r"[^/]+\.dist-info/(licenses/.*|(LICEN[CS]E|COPYING|NOTICE)[^/]*)$", name, re.IGNORECASE)
        ]
        texts = tuple(archive.read(name).decode() for name in sorted(licences) if not name.endswith("/"))
    name, version = fields["Name"].lower().replace("_", "-"), fields["Version"]
    expression = fields["License-Expression"] or _EXPRESSIONS.get(name) or fields["License"] or ""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return Part(name, version, f"pkg:pypi/{name}@{version}", expression, digest, texts)


def licence_text(parts: list[Part]) -> bytes:
    """The licences of all parts, each under the part's name, those that several share once."""
    shared: dict[tuple[str, ...], list[str]] = {}
    for part in sorted(parts):
        title = f"{part.name} {part.version}" + (f" ({part.licence})" if part.licence else "")
        titles = shared.setdefault(part.texts, [])
        if title not in titles:
            titles.append(title)
    sections = []
    for texts, titles in shared.items():
        if not texts:
            raise ValueError(f"no licence text was found of {', '.join(titles)}")
        rule = "=" * 79
        body = "\n\n".join(text.replace("\r\n", "\n").strip("\n") for text in texts)
        sections.append(f"{rule}\n" + "".join(f"{title}\n" for title in titles) + f"{rule}\n\n{body}\n")
    return "\n".join(sections).encode()


def bill_of_materials(whole: Part, parts: list[Part], epoch: int) -> bytes:
    """The bill of materials of an artifact, CycloneDX 1.6 in JSON, dated ``epoch`` (seconds, UTC).

    Its serial number follows from its content: the same artifact has the same bill.
    """
    unique = sorted(set(parts) - {whole})
    bill = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": "",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": _component(whole),
        },
        "components": [_component(part) for part in unique],
        "dependencies": [
            {"ref": _reference(whole), "dependsOn": [_reference(part) for part in unique]},
            *({"ref": _reference(part), "dependsOn": []} for part in unique),
        ],
    }
    identity = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(bill, sort_keys=True))
    bill["serialNumber"] = f"urn:uuid:{identity}"
    return json.dumps(bill, indent=1).encode() + b"\n"


def _reference(part: Part) -> str:
    # Wheels of one release for several platforms are components of their own.
    return f"{part.reference}#{part.sha256[:16]}" if part.sha256 else part.reference


def _component(part: Part) -> dict[str, object]:
    component: dict[str, object] = {
        "type": part.kind,
        "bom-ref": _reference(part),
        "name": part.name,
        "version": part.version,
        "purl": part.reference,
    }
    if part.licence:
        component["licenses"] = [{"expression": part.licence}]
    if part.sha256:
        component["hashes"] = [{"alg": "SHA-256", "content": part.sha256}]
    return component
