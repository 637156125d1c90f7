"""What a build promises of all its artifacts: their sums, and that another build gives the same bytes."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from artifacts import ROOT


def test_the_sums_hold_and_leave_nothing_out(built: Path) -> None:
    lines = (built / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    there = {path.relative_to(built).as_posix(): path for path in built.rglob("*") if path.is_file()}
    del there["SHA256SUMS"]
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in there.items()} == listed


def test_a_build_elsewhere_at_another_time_gives_the_same_bytes(built: Path, tmp_path: Path) -> None:
    """Of the wheel, the sdist, the zipapp and the kit. What is downloaded and installed to build is lent to it."""
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT)]
    if not (ROOT / ".git").exists() or subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False).returncode:
        pytest.skip("this is no commit: what was built cannot be had from another clone")
    clone = tmp_path / "elsewhere" / "clone"
    subprocess.run(["git", "-c", "safe.directory=*", "clone", "-q", f"file://{ROOT}", clone], check=True)
    (clone / "untracked.py").write_text("# must not get in")
    lent = clone / "build" / "packaging"
    lent.mkdir(parents=True)
    for path in (ROOT / "build" / "packaging").iterdir():
        if path.name == "wheels":
            shutil.copytree(path, lent / path.name)
        elif path.name.startswith("venv-"):
            (lent / path.name).symlink_to(path)
    environment = {key: value for key, value in os.environ.items() if key not in ("SOURCE_DATE_EPOCH", "LC_ALL")}
    environment.update(TZ="Pacific/Kiritimati", LANG="C", PYTHONHASHSEED="77", PYTHON=sys.executable)
    command = 'umask 077; exec "$0" --without-frozen --output "$1"'
    subprocess.run(
        ["sh", "-c", command, clone / "packaging" / "build", tmp_path / "again"],
        env=environment,
        check=True,
        capture_output=True,
    )
    for again in sorted((tmp_path / "again").iterdir()):
        if again.name != "SHA256SUMS":
            assert again.read_bytes() == (built / again.name).read_bytes(), again.name
    assert len(list((tmp_path / "again").iterdir())) == 6


def test_the_sdist_builds_without_git(built: Path, tmp_path: Path) -> None:
    """It holds what git knows, and nothing else."""
    (sdist,) = built.glob("rat_mcp-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"rat.py", "README.md", "packaging/build", "packaging/builder.py", "tests/conftest.py", "PKG-INFO"} <= names
    assert not [name for name in names if re.search(r"(^|/)(\.venv|build|dist|__pycache__)/", name)]


def test_no_file_of_the_build_tells_where_it_was_made(built: Path) -> None:
    (kit,) = built.glob("rat-*-offline.tar.gz")
    for path in [built / "rat.pyz", *built.glob("rat_mcp-*.whl"), *built.glob("*.cdx.json"), *built.glob("*/*.json")]:
        assert str(ROOT).encode() not in path.read_bytes(), path
    with tarfile.open(kit) as archive:
        assert {(entry.uid, entry.gid, entry.uname, entry.gname) for entry in archive} == {(0, 0, "", "")}
        assert len({entry.mtime for entry in archive}) == 1
        assert {entry.mode for entry in archive} == {0o644, 0o755}
