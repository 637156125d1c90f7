"""Build everything that rat is given away as: see ``packaging/build --help``.

The files of the source tree that git knows are copied, and built from there: what else lies about never gets into an
artifact. Whatever comes from outside is pinned by hash in ``requirements/``. All dates are that of the commit (or
SOURCE_DATE_EPOCH), all orders are sorted, and no path of this machine goes in, so that a commit built again is the
same to the byte: the wheel, the sdist, the zipapp and the kit, by the same versions of Python at hand; the frozen
files on the same system.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from archives import Member, read_tree, sums, write_tar, write_zip
from parts import Part, bill_of_materials, licence_text, wheel_part

if TYPE_CHECKING:
    from collections.abc import Iterable

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

# Minor versions of Python 3 that rat runs on.
PYTHONS = range(9, 15)

# The release of each that pip is told of; cryptography does not run on the first two of 3.9.
MICRO = 2

# Machines that the kit has wheels of cryptography for; all else in it runs anywhere. The tag is of the oldest glibc
# that cryptography is built for.
MACHINES = ("x86_64", "aarch64")
MANYLINUX = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")

# What an artifact takes from outside, as it is: the first two into every one, the others to issue bundles.
BASE = ("urllib3", "certifi")
TOOL = ("cryptography", "cffi", "pycparser", "typing-extensions")

# What urllib3 has for others; nothing of rat's loads it (an HTTP for browsers, SOCKS, pyOpenSSL, HTTP/2).
LEFT_OUT = re.compile(r"urllib3/(contrib/.+|http2/connection\.py)")


class Source(NamedTuple):
    """The tree to build: a copy of what git knows of it, the version it says it has, its date (seconds, UTC)."""

    tree: Path
    version: str
    epoch: int


def run(*command: object, cwd: Path | None = None, **changes: str) -> str:
    """Run a program, with changes to the environment, and return what it printed. Raises SystemExit when it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=cwd, env={**os.environ, **changes}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    output = done.stdout.decode(errors="replace")
    if done.returncode:
        raise SystemExit(f"{output}\nbuild: failed with status {done.returncode}: {' '.join(words)}")
    return output


def copy_source(work: Path) -> Source:
    """Copy the files that git knows, or all of a tree that is not of git (an unpacked sdist)."""
    tree = work / "source"
    shutil.rmtree(tree, ignore_errors=True)
    if (ROOT / ".git").exists():
        names = run("git", "-c", "safe.directory=*", "ls-files", "-z", cwd=ROOT).split("\0")
        for name in names:
            path = ROOT / name
            if name and path.is_file():  # not what is deleted and not committed yet
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, tree / name)
                (tree / name).chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
        committed = run("git", "-c", "safe.directory=*", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    else:
        ignored = shutil.ignore_patterns(".venv*", "__pycache__", "build", "dist", "node_modules", ".*_cache")
        shutil.copytree(ROOT, tree, ignore=ignored)
        committed = str(int((ROOT / "rat.py").stat().st_mtime))
    version = re.search(r'^__version__ = "([^"]+)"', (tree / "rat.py").read_text(), re.MULTILINE)
    assert version is not None
    return Source(tree, version[1], int(os.environ.get("SOURCE_DATE_EPOCH") or committed))


# --- What comes from outside --------------------------------------------------------------------------


class Pin(NamedTuple):
    """A release and the hashes of its files, as a line of a list tells it."""

    name: str
    version: str
    hashes: tuple[str, ...]


def pins(minor: int) -> dict[str, Pin]:
    """The pinned list for a minor version of Python 3, by name."""
    lists = {int(path.stem.rpartition(".")[2]): path for path in (HERE / "requirements").glob("python3.*.txt")}
    text = lists[max(each for each in lists if each <= minor)].read_text()
    found = {}
    for match in re.finditer(r"^([\w.-]+)==(\S+)((?:\s*\\\n\s*--hash=sha256:[0-9a-f]{64})+)", text, re.MULTILINE):
        hashes = tuple(re.findall(r"sha256:([0-9a-f]{64})", match[3]))
        found[match[1]] = Pin(match[1], match[2], hashes)
    return found


def make_environment(work: Path) -> Path:
    """A virtual environment with what builds, of the Python that runs this. Returns its interpreter."""
    minor = sys.version_info[1]
    lists = sorted((HERE / "requirements").glob("python3.*.txt"), key=lambda path: int(path.stem.rpartition(".")[2]))
    pinned = [path for path in lists if int(path.stem.rpartition(".")[2]) <= minor][-1]
    identity = hashlib.sha256(pinned.read_bytes() + sys.version.encode() + sys.prefix.encode()).hexdigest()[:12]
    directory = work / f"venv-{identity}"
    python = directory / "bin" / "python"
    done = directory / "complete"
    if not done.exists():
        shutil.rmtree(directory, ignore_errors=True)
        run(sys.executable, "-m", "venv", directory)
        run(python, "-m", "pip", "install", "-q", "--require-hashes", "--only-binary", ":all:", "-r", pinned)
        done.touch()
    return python


class Wheels(NamedTuple):
    """The wheels of the runtime parts: by name and version, each with the minors of Python that use that version."""

    files: dict[tuple[str, str], list[Path]]
    minors: dict[tuple[str, str], list[int]]

    def pure(self, name: str, minor: int) -> Path:
        """The wheel, of any platform, of a part for a minor version of Python 3."""
        ((key, files),) = ((k, f) for k, f in self.files.items() if k[0] == name and minor in self.minors[k])
        (file,) = files
        assert key[1] in file.name
        return file


def download(python: Path, work: Path) -> Wheels:
    """Download the wheels of the runtime parts for all Pythons and machines, or take those that are here already."""
    directory = work / "wheels"
    directory.mkdir(exist_ok=True)
    wanted: dict[int, list[Pin]] = {}
    minors: dict[tuple[str, str], list[int]] = {}
    for minor in PYTHONS:
        for name in (*BASE, *TOOL, *(("pip",) if minor == PYTHONS[0] else ())):
            pin = pins(minor).get(name)
            if pin is None:  # newer Pythons have it in themselves
                continue
            users = minors.setdefault((name, pin.version), [])
            # A wheel for the first Python that uses a release serves those after it; but cffi's are one a Python.
            if not users or name == "cffi":
                wanted.setdefault(minor, []).append(pin)
            users.append(minor)

    def fetch(job: tuple[int, str]) -> None:
        minor, machine = job
        place = directory / f"python3.{minor}-{machine}"
        listed = "".join(
            f"{pin.name}=={pin.version} " + " ".join(f"--hash=sha256:{each}" for each in pin.hashes) + "\n"
            for pin in wanted[minor]
        )
        mark = place / "list"
        if mark.exists() and mark.read_text() == listed:
            return
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        (place / "requirements").write_text(listed)
        platforms = [word for tag in MANYLINUX for word in ("--platform", f"{tag}_{machine}")]
        run(
            *(python, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "--only-binary", ":all:"),
            *("--implementation", "cp", "--python-version", f"3.{minor}.{MICRO}", *platforms),
            *("-d", place, "-r", place / "requirements"),
        )
        (place / "requirements").rename(mark)

    with ThreadPoolExecutor(4) as several:
        list(several.map(fetch, [(minor, machine) for minor in wanted for machine in MACHINES]))
    files: dict[tuple[str, str], list[Path]] = {}
    for minor, wanted_here in wanted.items():
        for machine in MACHINES:
            for path in (directory / f"python3.{minor}-{machine}").glob("*.whl"):
                for pin in wanted_here:
                    if path.name.startswith(f"{pin.name.replace('-', '_')}-{pin.version}-"):
                        known = files.setdefault((pin.name, pin.version), [])
                        if path.name not in [each.name for each in known]:
                            known.append(path)
    return Wheels(files, minors)


def interpreters() -> dict[str, str]:
    """A CPython of each minor version that is at hand, by its cache tag: on PATH, or installed by pyenv."""
    patterns = [Path(place) for place in os.environ.get("PATH", "").split(os.pathsep) if place]
    roots = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    patterns += sorted(roots.glob("versions/*/bin"))
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    asked = "import sys; i = sys.implementation; print(i.cache_tag, *sys.version_info[:3], sys.version_info[3])"
    for place in patterns:
        for minor in PYTHONS:
            candidate = place / f"python3.{minor}"
            if not os.access(candidate, os.X_OK):
                continue
            told = subprocess.run(
                [candidate, "-S", "-c", asked], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
            )
            match = re.fullmatch(rf"(cpython-3{minor}) (\d+) (\d+) (\d+) final\n", told.stdout.decode())
            if told.returncode or match is None:  # a shim of pyenv without a version behind it, a preview
                continue
            version = tuple(map(int, match.groups()[1:]))
            # The newest of a minor version, wherever it lies: the same set makes the same bytes.
            if version > found.get(match[1], ((), ""))[0]:
                found[match[1]] = (version, str(candidate))
    return {tag: path for tag, (_, path) in sorted(found.items())}


# --- The artifacts ------------------------------------------------------------------------------------


def build_wheel(source: Source, python: Path, output: Path) -> Path:
    """The wheel and the sdist. Returns the wheel."""
    run(*(python, "-m", "hatchling", "build", "-d", output), cwd=source.tree, SOURCE_DATE_EPOCH=str(source.epoch))
    return output / f"rat_mcp-{source.version}-py3-none-any.whl"


def unpack(wheel: Path, directory: Path) -> None:
    """Put the modules of a wheel into a directory, without what describes it and without what nothing loads."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if ".dist-info/" not in name and not LEFT_OUT.fullmatch(name) and name.endswith((".py", ".json", ".pem")):
                archive.extract(name, directory)


def build_zipapp(source: Source, work: Path, wheel: Path, wheels: Wheels, output: Path) -> list[Part]:
    """The zipapp. Returns its parts.

    Sources at the top, for any Python; bytecode of those at hand in folders that come before (see zipapp/start.py),
    of what a harness starts: rat and urllib3. For the tool as well it would take another half of the size, to spare a
    person a quarter of a second. certifi has none either: its certificates, which are found beside the package, would
    have to be there for each Python.
    """
    stage = work / "zipapp"
    shutil.rmtree(stage, ignore_errors=True)
    newest, oldest = PYTHONS[-1], PYTHONS[0]
    for each in (wheel, wheels.pure("urllib3", newest), wheels.pure("certifi", newest)):
        unpack(each, stage / "top")
    parts = [wheel_part(wheel), wheel_part(wheels.pure("urllib3", newest)), wheel_part(wheels.pure("certifi", newest))]
    aside = None
    if wheels.pure("urllib3", oldest) != wheels.pure("urllib3", newest):
        aside = stage / "aside"
        unpack(wheels.pure("urllib3", oldest), aside)
        parts.append(wheel_part(wheels.pure("urllib3", oldest)))
    members = read_tree(stage / "top")
    if aside is not None:
        members += read_tree(aside, f"python3.{oldest}/")
    for tag, interpreter in interpreters().items():
        compiled = stage / tag
        sources = stage / f"sources-{tag}"
        sources.mkdir()
        shutil.copy2(stage / "top" / "rat.py", sources)
        shutil.copytree(stage / "top" / "rat_schemas", sources / "rat_schemas")
        of_it = aside if aside is not None and tag == f"cpython-3{oldest}" else stage / "top"
        shutil.copytree(of_it / "urllib3", sources / "urllib3")
        bytecode = HERE / "zipapp" / "bytecode.py"
        # The order of what is hashed goes into bytecode; columns of the source, a fifth of it, need not.
        run(
            *(interpreter, "-S", "-s", bytecode, sources, compiled),
            PYTHONHASHSEED="0",
            PYTHONNODEBUGRANGES="1",
            PYTHONPATH="",
        )
        members += read_tree(compiled, f"{tag}/")
        members += read_tree(sources / "rat_schemas", f"{tag}/rat_schemas/")  # found beside each rat
        version = run(interpreter, "-S", "-c", "import platform; print(platform.python_version())").strip()
        print(f"  rat.pyz: bytecode of Python {version}")
    start = (HERE / "zipapp" / "start.py").read_bytes()
    members += [Member("__main__.py", start), Member("LICENSES.txt", licence_text(parts))]
    unique = {member.name: member for member in members}
    write_zip(output / "rat.pyz", list(unique.values()), source.epoch, b"#!/usr/bin/env python3\n")
    return parts


def requirements(names: Iterable[str], wheels: Wheels, extra: list[Path]) -> bytes:
    """A list for pip, of the wheels that are there, by hash, each release for the Pythons that use it."""
    lines = []
    for path in extra:
        part = wheel_part(path)
        lines.append(f"{part.name}=={part.version} --hash=sha256:{part.sha256}")
    for (name, version), files in sorted(wheels.files.items()):
        if name in names:
            minors = wheels.minors[name, version]
            bounds = []
            if minors[0] > PYTHONS[0]:
                bounds.append(f'python_version >= "3.{minors[0]}"')
            if minors[-1] < PYTHONS[-1]:
                bounds.append(f'python_version < "3.{minors[-1] + 1}"')
            marker = f" ; {' and '.join(bounds)}" if bounds else ""
            hashes = sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
            lines.append(
                " \\\n    ".join([f"{name}=={version}{marker}", *(f"--hash=sha256:{each}" for each in hashes)])
            )
    return ("\n".join(lines) + "\n").encode()


def build_kit(source: Source, wheel: Path, wheels: Wheels, output: Path) -> None:
    """The offline kit; and, beside it, its bill of materials, which is that of the zipapp and the wheel, too."""
    files = [wheel, *(path for key in sorted(wheels.files) for path in sorted(wheels.files[key]))]
    whole = wheel_part(wheel)._replace(kind="application")
    parts = [wheel_part(path) for path in files]
    bill = bill_of_materials(whole, [part for part in parts if part.name != whole.name], source.epoch)
    readme = (HERE / "airgap" / "README.txt").read_text()
    rule = "=" * len(f"rat {source.version}, for a site without a network")
    members = [
        *(Member(f"wheels/{path.name}", path.read_bytes()) for path in files),
        Member("README.txt", readme.replace("{version}", source.version).replace("{rule}", rule).encode()),
        Member("install.py", (HERE / "airgap" / "install.py").read_bytes(), program=True),
        Member("rat.pyz", (output / "rat.pyz").read_bytes(), program=True),
        Member("requirements.txt", requirements(BASE, wheels, [wheel])),
        Member("requirements-tool.txt", requirements(TOOL, wheels, [])),
        Member("LICENSES.txt", licence_text(parts)),
        Member("sbom.cdx.json", bill),
    ]
    members.append(Member("SHA256SUMS", sums(members)))
    top = f"rat-{source.version}-offline"
    named = [member._replace(name=f"{top}/{member.name}") for member in members]
    write_tar(output / f"{top}.tar.gz", named, source.epoch)
    (output / f"rat-{source.version}.cdx.json").write_bytes(bill)


def build_frozen(source: Source, work: Path, python: Path, wheel: Path, output: Path) -> None:
    """The frozen files of this system."""
    stage = work / "frozen"
    shutil.rmtree(stage, ignore_errors=True)
    stage.mkdir()
    print(
        "  " + run(python, HERE / "pyinstaller" / "freeze.py", source.tree, stage, SOURCE_DATE_EPOCH=str(source.epoch))
    )
    take_frozen(source, stage, wheel, output)


def take_frozen(source: Source, stage: Path, wheel: Path, output: Path) -> None:
    """Put what freeze.py made into the output, with licences and bills, under the name of where it runs."""
    inventory = json.loads((stage / "inventory.json").read_text())
    place = f"{inventory['platform']}-glibc{inventory['glibc']}"
    whole = wheel_part(wheel)._replace(kind="application")
    parts = [Part(**{**part, "texts": tuple(part["texts"])}) for part in inventory["parts"]]
    licences = licence_text([whole, *parts])
    bill = bill_of_materials(whole, parts, source.epoch)
    directory = output / place
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for name in ("rat", "rat-tool"):
        shutil.copy2(stage / name, directory / name)
    (directory / "LICENSES.txt").write_bytes(licences)
    (directory / "sbom.cdx.json").write_bytes(bill)
    top = f"rat-{source.version}-{place}"
    members = [
        *read_tree(stage / "folder", f"{top}/"),
        Member(f"{top}/LICENSES.txt", licences),
        Member(f"{top}/sbom.cdx.json", bill),
    ]
    write_tar(output / f"{top}.tar.gz", members, source.epoch)


def build_in_root(source: Source, work: Path, suite: str, python: Path, wheel: Path, output: Path) -> None:
    """The frozen files of an older Debian, made in a root of it: they run wherever glibc is at least as new as its."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise SystemExit("build: --root needs to be root, and debootstrap: apt-get install debootstrap")
    root = work / f"root-{suite}"
    if not (root / "complete").exists():
        shutil.rmtree(root, ignore_errors=True)
        include = "python3,python3-venv,libpython3-dev,binutils"
        run("debootstrap", "--variant=minbase", f"--include={include}", suite, root)
        (root / "complete").touch()
    inside = "import sys; print(sys.version_info[1])"
    minor = int(run("chroot", root, "/usr/bin/python3", "-c", inside))
    # Its wheels are downloaded here and installed there: a root has no way to an index, and no need of one.
    job = root / "job"
    shutil.rmtree(job, ignore_errors=True)
    job.mkdir()
    listed = HERE / "requirements" / f"python3.{min(minor, 11)}.txt"
    machine = os.uname().machine
    floor = run("chroot", root, "/usr/bin/python3", "-c", "import platform; print(platform.libc_ver()[1])").strip()
    newest = int(floor.split(".")[1])
    platforms = [word for n in range(newest, 16, -1) for word in ("--platform", f"manylinux_2_{n}_{machine}")]
    run(
        *(python, "-m", "pip", "download", "-q", "--require-hashes", "--only-binary", ":all:", "--no-deps"),
        *("--implementation", "cp", "--python-version", f"3.{minor}.{MICRO}", *platforms),
        *("--platform", f"manylinux2014_{machine}", "-d", job / "wheels", "-r", listed),
    )
    shutil.copy2(listed, job / "requirements.txt")
    shutil.copytree(source.tree, job / "source")
    (job / "output").mkdir()
    clean = ("env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/job", "LANG=C.UTF-8")
    (pip,) = (job / "wheels").glob("pip-*.whl")
    run("chroot", root, *clean, "python3", "-m", "venv", "--without-pip", "/job/venv")
    run(
        *("chroot", root, *clean, "/job/venv/bin/python", f"/job/wheels/{pip.name}/pip", "install", "-q", "--no-index"),
        *("--find-links", "/job/wheels", "--require-hashes", "-r", "/job/requirements.txt"),
    )
    freezing = "/job/source/packaging/pyinstaller/freeze.py"
    dated = f"SOURCE_DATE_EPOCH={source.epoch}"
    print("  " + run("chroot", root, *clean, dated, "/job/venv/bin/python", freezing, "/job/source", "/job/output"))
    take_frozen(source, job / "output", wheel, output)


def main() -> int:
    """Build what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="packaging/build",
        description="Build the wheel, the sdist, the zipapp, the offline kit and the frozen files of rat into dist/.",
    )
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="DIR", help="where to (default: dist)")
    parser.add_argument(
        "--root",
        metavar="SUITE",
        help="build the frozen files alone, in a root of that Debian (bullseye) made by debootstrap, as root",
    )
    parser.add_argument("--without-frozen", action="store_true", help="leave out the frozen files")
    given = parser.parse_args()
    if sys.version_info < (3, 9):  # noqa: UP036 - whoever has an older one reads this
        raise SystemExit("build: needs Python 3.9 or newer; name one by PYTHON=")
    os.umask(0o022)
    work = ROOT / "build" / "packaging"
    work.mkdir(parents=True, exist_ok=True)
    output: Path = given.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    if not given.root:
        # All of it is made anew; what an earlier commit left would be listed as of this one.
        for pattern in ("rat-*", "rat_mcp-*", "rat.pyz", "linux-*-glibc*", "SHA256SUMS"):
            for path in output.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    source = copy_source(work)
    python = make_environment(work)
    print(f"rat {source.version}, dated {source.epoch}")
    wheel = build_wheel(source, python, work / "wheel" if given.root else output)
    if given.root:
        build_in_root(source, work, given.root, python, wheel, output)
    else:
        wheels = download(python, work)
        build_zipapp(source, work, wheel, wheels, output)
        build_kit(source, wheel, wheels, output)
        if not given.without_frozen:
            build_frozen(source, work, python, wheel, output)
    listed = [member for member in read_tree(output) if member.name != "SHA256SUMS"]
    (output / "SHA256SUMS").write_bytes(sums(listed))
    for member in listed:
        print(f"  {len(member.content) / 1e6:7.2f} MB  {member.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
