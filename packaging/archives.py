"""Archives whose bytes follow from what is put in, and from nothing of when, where or by whom."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

# What a zip can say of time begins here (APPNOTE.TXT, section 4.4.6).
ZIP_EPOCH = 315532800


class Member(NamedTuple):
    """A file of an archive: its name, with ``/`` between the parts, its content, whether it is a program."""

    name: str
    content: bytes
    program: bool = False


def read_tree(directory: Path, below: str = "") -> list[Member]:
    """The files of a directory, with all that is below it, their names put below another."""
    members = []
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            name = path.relative_to(directory).as_posix()
            program = bool(path.stat().st_mode & 0o100)
            members.append(Member(f"{below}{name}", path.read_bytes(), program))
    return members


def write_zip(path: Path, members: list[Member], epoch: int, shebang: bytes = b"") -> None:
    """Write a zip, in the order of names, dated ``epoch`` (seconds, UTC), after a line that names what runs it."""
    whole = io.BytesIO()
    whole.write(shebang)  # before the archive is begun, which counts from the start of the file
    date = time.gmtime(max(epoch, ZIP_EPOCH))[:6]
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for member in sorted(members):
            entry = zipfile.ZipInfo(member.name, date)
            entry.create_system = 3  # Unix, wherever it is made: the field that follows is read by it
            entry.external_attr = (0o100755 if member.program else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, member.content, compresslevel=9)
    path.write_bytes(whole.getvalue())
    if shebang:
        path.chmod(0o755)


def write_tar(path: Path, members: list[Member], epoch: int) -> None:
    """Write a .tar.gz, in the order of names, dated ``epoch`` (seconds, UTC), owned by root."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member in sorted(members):
            entry = tarfile.TarInfo(member.name)
            entry.size = len(member.content)
            entry.mtime = epoch
            entry.mode = 0o755 if member.program else 0o644
            archive.addfile(entry, io.BytesIO(member.content))
    with path.open("wb") as file, gzip.GzipFile("", "wb", 9, file, epoch) as packed:
        packed.write(whole.getvalue())


def sums(members: list[Member]) -> bytes:
    """SHA256SUMS of files, as ``sha256sum -c`` reads it."""
    lines = (f"{hashlib.sha256(member.content).hexdigest()}  {member.name}\n" for member in sorted(members))
    return "".join(lines).encode()
