"""rat.pyz: under every Python that is at hand, wherever it lies, whatever else is installed there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Callable

import pytest
from artifacts import SUPPORTED, Exercise, annotated, in_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bundles import Bundle

pythons = pytest.mark.parametrize("python", SUPPORTED.values(), ids=SUPPORTED)


@pytest.fixture
def zipapp(built: Path, tmp_path: Path) -> Path:
    """rat.pyz, alone in a directory that nothing can be written to."""
    place = tmp_path / "place"
    place.mkdir()
    copy = Path(shutil.copy2(built / "rat.pyz", place))
    place.chmod(0o555)
    return copy


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """A directory for sys.path whose urllib3 and certifi must not be taken."""
    directory = tmp_path / "strange"
    for name in ("urllib3", "certifi", "rat_schemas"):
        (directory / name).mkdir(parents=True)
        (directory / name / "__init__.py").write_text("raise ImportError('that of the host')")
    return directory


def rewritten(zipapp: Path, target: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """The zipapp with files changed, or left out (None)."""
    with zipfile.ZipFile(zipapp) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            content = change(name, old.read(name))
            if content is not None:
                new.writestr(name, content)
    return target


@pythons
def test_it_relays_alone_and_leaves_nothing(
    python: str, zipapp: Path, exercise: Exercise, bare: dict[str, str]
) -> None:
    harness = exercise(in_environment(bare, [python, "-I", str(zipapp)]))
    assert harness.finish() == (0, [])
    assert [path.name for path in zipapp.parent.iterdir()] == ["rat.pyz"]
    assert list(Path(bare["TMPDIR"]).iterdir()) == []


@pythons
def test_it_is_what_it_brings_whatever_the_host_has(
    python: str, zipapp: Path, strange: Path, exercise: Exercise, bare: dict[str, str]
) -> None:
    environment = {**bare, "PYTHONPATH": str(strange)}
    exercise(in_environment(environment, [python, str(zipapp)]))
    command = in_environment(environment, [python, str(zipapp), "--version"])
    told = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert told.startswith("rat 1.") or told.startswith("rat ")
    assert "(zipapp, Python 3." in told
    version = told.rpartition("urllib3 ")[2].rstrip(")\n")
    with zipfile.ZipFile(zipapp) as archive:
        place = "python3.9/" if "Python 3.9." in told else ""
        assert f"'{version}'" in archive.read(f"{place}urllib3/_version.py").decode()


@pythons
def test_its_bytecode_is_used_where_there_is_some(python: str, zipapp: Path, bare: dict[str, str]) -> None:
    program = (
        "import runpy, sys; sys.argv = [sys.path[0], '--help']\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit: pass\n"
        "import rat, urllib3.connection; print(sys.implementation.cache_tag, rat.__file__, urllib3.connection.__file__)"
    )
    start = f"import sys; sys.path[:1] = [{str(zipapp)!r}]\n{program}"
    output = subprocess.run(
        in_environment(bare, [python, "-c", start]), capture_output=True, check=True, text=True
    ).stdout
    tag, *files = output.splitlines()[-1].split()
    with zipfile.ZipFile(zipapp) as archive:
        tags = {name.partition("/")[0] for name in archive.namelist() if name.startswith("cpython-")}
    aside = f"{zipapp}/python3.9" if tag == "cpython-39" else f"{zipapp}"
    expected = [f"{zipapp}/{tag}/rat.pyc", f"{zipapp}/{tag}/urllib3/connection.pyc"]
    assert files == (expected if tag in tags else [f"{zipapp}/rat.py", f"{aside}/urllib3/connection.py"])


@pythons
def test_it_runs_from_its_sources_where_there_is_no_bytecode(
    python: str, zipapp: Path, exercise: Exercise, bare: dict[str, str], tmp_path: Path
) -> None:
    without = rewritten(zipapp, tmp_path / "sources.pyz", lambda name, old: None if name.startswith("cpy") else old)
    exercise(in_environment(bare, [python, "-I", str(without)]))


@pythons
def test_its_schemas_are_read_from_inside(
    python: str, zipapp: Path, knows_schemas: Callable[[Sequence[str]], None], bare: dict[str, str], tmp_path: Path
) -> None:
    """By a relative path, too, from another directory than the schemas of a checkout."""

    def change(name: str, old: bytes) -> bytes:
        return annotated(old) if name.endswith("rat_schemas/read_file.json") else old

    rewritten(zipapp, tmp_path / "changed.pyz", change)
    command = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', str(tmp_path), python, "-I", "changed.pyz"]
    knows_schemas(in_environment(bare, command))


@pythons
def test_its_public_authorities_are_read_from_inside(
    python: str, zipapp: Path, knows_public_authorities: Callable[[Sequence[str]], None], bare: dict[str, str]
) -> None:
    kept = [f"{name}={value}" for name, value in bare.items()]
    knows_public_authorities(["/usr/bin/env", *kept, python, "-I", str(zipapp)])
    assert list(Path(bare["TMPDIR"]).iterdir()) == []


@pythons
def test_the_tool_is_in_it_and_names_it(python: str, zipapp: Path, bundle: Bundle, bare: dict[str, str]) -> None:
    tool = in_environment(bare, [python, "-I", str(zipapp), "tool"])
    inspected = subprocess.run([*tool, "bundle", "inspect", str(bundle.client)], capture_output=True, check=False)
    assert inspected.returncode == 0, inspected
    configured = subprocess.run(
        [*tool, "config", "-s", "h:1", "-b", str(bundle.client)], capture_output=True, check=True
    )
    entry = json.loads(configured.stdout)["mcpServers"]["ratd"]
    assert entry["args"] == [str(zipapp), "--server", "h:1", "--bundle", str(bundle.client)]
    assert Path(entry["command"]).is_absolute()


def test_the_demonstration_runs_from_it(zipapp: Path) -> None:
    """Under the Python of the tests, which has cryptography."""
    shown = subprocess.run([sys.executable, zipapp, "tool", "demo"], capture_output=True, check=False, text=True)
    assert shown.returncode == 0, shown
    assert "Shown: both protocols" in shown.stdout


def test_it_is_a_program(zipapp: Path) -> None:
    assert zipapp.read_bytes().startswith(b"#!/usr/bin/env python3\nPK")
    assert zipapp.stat().st_mode & 0o111


def test_with_the_bytecode_of_one_python_it_is_small(built: Path) -> None:
    with zipfile.ZipFile(built / "rat.pyz") as archive:
        sizes: dict[str, int] = {}
        for entry in archive.infolist():
            folder = entry.filename.partition("/")[0]
            sizes[folder] = sizes.get(folder, 0) + entry.compress_size + 2 * len(entry.filename) + 76
    bytecode = [size for folder, size in sizes.items() if folder.startswith("cpython-")]
    assert len(bytecode) == len(SUPPORTED)
    assert (built / "rat.pyz").stat().st_size - sum(bytecode) + max(bytecode) <= 700_000
