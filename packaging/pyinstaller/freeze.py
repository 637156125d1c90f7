"""Freeze rat and rat-tool with the Python that runs this: ``freeze.py TREE OUTPUT``.

OUTPUT then holds ``rat`` and ``rat-tool`` (each whole in one file), ``folder`` (both, with what they share beside
them) and ``inventory.json``: the platform, the oldest glibc all of it runs on, and each part with its licences. It
runs where the frozen files are to come from, so it needs PyInstaller, objdump and strip, and nothing of its
neighbours.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import re
import shutil
import ssl
import subprocess
import sys
import sysconfig
import zlib
from importlib.metadata import distribution
from pathlib import Path

# What of other people's packages may be inside. cffi is there by one library, which is no module of an archive.
PACKAGES = ("urllib3", "certifi", "cryptography", "cffi", "typing-extensions")

# SPDX: the exception lets what PyInstaller puts in front of a program be given away with it under any terms.
BOOTLOADER_LICENCE = "GPL-2.0-or-later WITH Bootloader-exception"


def freeze(tree: Path, output: Path) -> None:
    """Freeze a source tree. Raises CalledProcessError when PyInstaller, or a program it needs, fails."""
    work = output / "work"
    spec = Path(__file__).resolve().parent / "rat.spec"
    command = [sys.executable, "-m", "PyInstaller", str(spec), "--noconfirm", "--clean", "--log-level", "WARN"]
    environment = {
        **os.environ,
        "RAT_TREE": str(tree),
        # The order of what is hashed goes into bytecode.
        "PYTHONHASHSEED": "0",
        # Columns of the source, for carets in tracebacks without a source: a fifth of the bytecode.
        "PYTHONNODEBUGRANGES": "1",
        # What it keeps between builds stays in this one.
        "PYINSTALLER_CONFIG_DIR": str(output / "cache"),
    }
    subprocess.run(
        [*command, "--workpath", str(work), "--distpath", str(output)], env=environment, check=True, cwd=output
    )
    # What is left out and missed at the start shows here, not at a user's.
    for program in ("rat", "rat-tool", "folder/rat", "folder/rat-tool"):
        subprocess.run([output / program, "--version"], check=True, env={})
    (toc,) = work.rglob("COLLECT-*.toc")
    entries = ast.literal_eval(toc.read_text())
    collected = next(part for part in entries if isinstance(part, list))
    modules = "".join(path.read_text() for path in work.rglob("PYZ-*.toc"))
    packages = [name for name in PACKAGES if f"('{name.replace('-', '_')}'" in modules or name == "cffi"]
    inventory = {
        "platform": f"{platform.system()}-{platform.machine()}".lower(),
        "glibc": ".".join(map(str, glibc_floor(output))),
        "parts": _parts(packages, [(str(name), str(source), str(kind)) for name, source, kind in collected]),
    }
    (output / "inventory.json").write_text(json.dumps(inventory))
    shutil.rmtree(work)
    shutil.rmtree(output / "cache")


def glibc_floor(directory: Path) -> tuple[int, ...]:
    """The newest version of a symbol of glibc that any program or library in a directory asks for."""
    floor: tuple[int, ...] = (0,)
    for path in directory.rglob("*"):
        if path.is_file() and path.read_bytes()[:4] == b"\x7fELF":
            symbols = subprocess.run(["objdump", "-T", path], stdout=subprocess.PIPE, check=True, text=True).stdout
            for version in re.findall(r"\(?GLIBC_([0-9.]+)\)?", symbols):
                floor = max(floor, tuple(map(int, version.split("."))))
    return floor


def _parts(packages: list[str], collected: list[tuple[str, str, str]]) -> list[dict[str, object]]:
    """Python, the packages, the libraries of the system, and the bootloader."""
    python = platform.python_version()
    stdlib = Path(sysconfig.get_path("stdlib"))
    found: list[dict[str, object]] = []
    licences = [path for path in (stdlib / "LICENSE.txt",) if path.is_file()]
    if not licences:
        licences = [_copyright(package) for package in (f"libpython{python.rpartition('.')[0]}-minimal",)]
    texts = [path.read_text() for path in licences]
    found.append(_part("cpython", python, f"pkg:generic/cpython@{python}", "Python-2.0.1", texts))
    for name in packages:
        release = distribution(name)
        texts = [
            Path(str(release.locate_file(file))).read_text()
            for file in sorted(release.files or [], key=str)
            if re.search(r"\.dist-info/(licenses/.*|(LICEN[CS]E|COPYING|NOTICE)[^/]*)$", str(file), re.IGNORECASE)
        ]
        expression = release.metadata["License-Expression"] or {"certifi": "MPL-2.0", "cffi": "MIT"}.get(name, "")
        found.append(_part(name, release.version, f"pkg:pypi/{name}@{release.version}", expression, texts))
        if name == "cryptography":
            # Its bindings link an OpenSSL of their own.
            from cryptography.hazmat.backends.openssl import backend

            version = backend.openssl_version_text().split()[1]
            apache = [text for text in texts if "Apache License" in text]
            found.append(_part("openssl", version, f"pkg:generic/openssl@{version}", "Apache-2.0", apache))
    bootloader = distribution("pyinstaller")
    texts = [
        Path(str(bootloader.locate_file(file))).read_text()
        for file in bootloader.files or []
        if str(file).endswith("COPYING.txt")
    ]
    reference = f"pkg:pypi/pyinstaller@{bootloader.version}"
    found.append(_part("pyinstaller", bootloader.version, reference, BOOTLOADER_LICENCE, texts))
    for name, source, kind in collected:
        base = os.path.basename(name)
        if kind == "BINARY" and re.match(r"lib(?!python)", base):
            found.append(_system_library(base, os.path.realpath(source)))
    return found


def _part(
    name: str, version: str, reference: str, licence: str, texts: list[str], sha256: str = ""
) -> dict[str, object]:
    return {
        "name": name,
        "version": version,
        "reference": reference,
        "licence": licence,
        "sha256": sha256,
        "texts": texts,
    }


def _system_library(name: str, path: str) -> dict[str, object]:
    """A library of the system: the package of Debian it is of, with its licences."""
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    # Where /lib is a link to /usr/lib, packages name either.
    for candidate in (path, path[len("/usr") :] if path.startswith("/usr/") else f"/usr{path}"):
        owner = subprocess.run(
            ["dpkg", "-S", candidate], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
        )
        if owner.returncode == 0:
            package = owner.stdout.split(": ")[0].split(",")[0]
            query = ["dpkg-query", "-W", "-f", "${Package} ${Version} ${Architecture}", package]
            plain, version, architecture = subprocess.run(
                query, stdout=subprocess.PIPE, text=True, check=True
            ).stdout.split()
            reference = f"pkg:deb/debian/{plain}@{version}?arch={architecture}"
            return _part(plain, version, reference, "", [_copyright(plain).read_text()], digest)
    raise SystemExit(f"freeze.py: {path} is of no package: its licence is not known")


def _copyright(package: str) -> Path:
    return Path("/usr/share/doc") / package / "copyright"


if __name__ == "__main__":
    for needed in ("objdump", "strip"):
        if shutil.which(needed) is None:
            raise SystemExit(f"freeze.py: freezing needs {needed}: install binutils")
    print(f"freezing with Python {platform.python_version()}, {ssl.OPENSSL_VERSION}, zlib {zlib.ZLIB_RUNTIME_VERSION}")
    freeze(Path(sys.argv[1]), Path(sys.argv[2]))
