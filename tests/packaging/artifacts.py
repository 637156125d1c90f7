"""What the tests of artifacts share: Pythons, environments, archives."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Callable

from harness import Harness

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent.parent

# Starts a rat by a command, and has a conversation with it.
Exercise = Callable[..., Harness]


def interpreters() -> dict[str, str]:
    """A Python of each minor version that is at hand, older than supported included, by ``3.N``."""
    places = [Path(place) for place in os.environ.get("PATH", "").split(os.pathsep) if place]
    places += sorted(Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv").glob("versions/*/bin"))
    found: dict[str, str] = {}
    for place in places:
        for minor in range(6, 20):
            program = place / f"python3.{minor}"
            if f"3.{minor}" not in found and os.access(program, os.X_OK):
                program_here = "import ssl, sys; print(sys.version_info[1], sys.executable)"
                told = subprocess.run([program, "-c", program_here], capture_output=True, check=False, text=True)
                version, _, path = told.stdout.rstrip("\n").partition(" ")
                if version == str(minor):  # not a shim without a version behind it
                    found[f"3.{minor}"] = path
    return found


SUPPORTED = {name: path for name, path in interpreters().items() if 9 <= int(name[2:]) <= 14}


def in_environment(environment: Mapping[str, str], command: Sequence[str]) -> list[str]:
    """A command that runs in exactly this environment."""
    return [str(shutil.which("env")), "-i", *(f"{name}={value}" for name, value in environment.items()), *command]


def annotated(schema: bytes) -> bytes:
    """The schema of read_file, its path to be sent in a header."""
    value = json.loads(schema)
    value["properties"]["path"]["x-mcp-header"] = "Place"
    return json.dumps(value).encode()


def unpack(archive: Path, directory: Path) -> Path:
    """Unpack a .tar.gz of one folder, and return the folder."""
    with tarfile.open(archive) as opened:
        if hasattr(tarfile, "data_filter"):
            opened.extraction_filter = tarfile.data_filter
        opened.extractall(directory)
        top = opened.getnames()[0].partition("/")[0]
    return directory / top
