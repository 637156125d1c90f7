"""Install rat from this kit, without a network: ``python3 install.py DIR``.

DIR becomes a virtual environment with the commands ``rat`` and ``rat-tool`` in it. Every file taken is checked against
SHA256SUMS, and again by pip against the hashes of requirements.txt. It needs Python 3.9 or newer and nothing else: pip
is in the kit.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

KIT = Path(__file__).resolve().parent


def damaged(kit: Path) -> list[str]:
    """The files that SHA256SUMS lists and that are missing, or not what it says."""
    wrong = []
    for line in (kit / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ", 1)
        try:
            content = (kit / name).read_bytes()
        except OSError:
            content = b""
        if hashlib.sha256(content).hexdigest() != digest:
            wrong.append(name)
    return wrong


def install(kit: Path, directory: Path) -> bool:
    """Make the environment and fill it. Returns whether the packages for issuing bundles fit this machine, too.

    Raises CalledProcessError when pip fails, which has then said why.
    """
    venv.create(directory, symlinks=os.name != "nt")
    python = program(directory, "python")
    (pip,) = (kit / "wheels").glob("pip-*.whl")

    def install_from(requirements: str, quiet: bool) -> bool:
        command = [str(python), "-I", f"{pip}{os.sep}pip", "--isolated", "--disable-pip-version-check", "install", "-q"]
        command += ["--no-index", "--find-links", str(kit / "wheels"), "--only-binary", ":all:", "--require-hashes"]
        command += ["--no-cache-dir", "-r", str(kit / requirements)]
        # An index named in the environment is not asked, and -I keeps paths of Python's own out.
        return subprocess.run(command, check=not quiet, stderr=subprocess.DEVNULL if quiet else None).returncode == 0

    install_from("requirements.txt", quiet=False)
    return install_from("requirements-tool.txt", quiet=True)


def program(directory: Path, name: str) -> Path:
    """Where a program of a virtual environment is."""
    return directory / "Scripts" / f"{name}.exe" if os.name == "nt" else directory / "bin" / name


def main() -> int:
    """Install, and return the exit status: 0, 1 when it cannot, 2 on usage."""
    parser = argparse.ArgumentParser(
        prog="install.py", description="Install rat and rat-tool from this kit, without a network."
    )
    parser.add_argument("directory", metavar="DIR", help="a directory to make, such as /opt/rat or ~/rat")
    directory = Path(os.path.abspath(os.path.expanduser(parser.parse_args().directory)))
    if sys.version_info < (3, 9):  # noqa: UP036 - whoever has an older one reads this
        version = ".".join(map(str, sys.version_info[:3]))
        print(f"install.py: rat needs Python 3.9 or newer, this is {version}: run it with another", file=sys.stderr)
        return 1
    wrong = damaged(KIT)
    if wrong:
        print(f"install.py: {', '.join(wrong)}: not as built, copy the kit again", file=sys.stderr)
        return 1
    if directory.exists():
        print(f"install.py: {directory} exists: give a directory that does not", file=sys.stderr)
        return 1
    try:
        issues = install(KIT, directory)
    except (OSError, subprocess.CalledProcessError) as e:
        print(f"install.py: cannot install into {directory}: {e}", file=sys.stderr)
        return 1
    print(f"installed: {program(directory, 'rat')}")
    print(f"installed: {program(directory, 'rat-tool')}")
    if not issues:
        print("Of cryptography there is no wheel for this machine in the kit: all but issuing bundles works.")
        print("(rat-tool bundle generate and rat-tool demo issue some.)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
