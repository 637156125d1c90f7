"""The offline kit, where no index can be reached; and the wheel in it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from artifacts import SUPPORTED, Exercise, in_environment, interpreters, unpack

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.fixture
def kit(built: Path, tmp_path: Path) -> Path:
    """The kit, unpacked."""
    (archive,) = built.glob("rat-*-offline.tar.gz")
    return unpack(archive, tmp_path / "kit")


def cut_off(command: Sequence[str]) -> list[str]:
    """A command that runs where there is no network, by the kernel's word where it gives it."""
    unshare = shutil.which("unshare")
    if unshare and subprocess.run([unshare, "-n", "true"], capture_output=True, check=False).returncode == 0:
        return [unshare, "-n", *command]
    nowhere = "http://127.0.0.1:9/"
    return in_environment({"PIP_INDEX_URL": nowhere, "HTTPS_PROXY": nowhere, "HTTP_PROXY": nowhere}, command)


@pytest.mark.parametrize("python", SUPPORTED.values(), ids=SUPPORTED)
def test_it_installs_without_a_network_and_what_it_installs_relays(
    python: str, kit: Path, exercise: Exercise, bare: dict[str, str], tmp_path: Path
) -> None:
    target = tmp_path / "installed"
    done = subprocess.run(
        cut_off(in_environment(bare, [python, "-I", str(kit / "install.py"), str(target)])),
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done
    assert done.stderr == ""
    # Not more: cryptography is there for this machine, too.
    assert done.stdout == f"installed: {target}/bin/rat\ninstalled: {target}/bin/rat-tool\n"
    exercise(in_environment(bare, [str(target / "bin" / "rat")]))
    tool = in_environment(bare, [str(target / "bin" / "rat-tool")])
    told = subprocess.run([*tool, "--version"], capture_output=True, check=True, text=True).stdout
    assert "(installed, Python 3." in told
    subprocess.run(
        [*tool, "bundle", "generate", "--tenant", "t", "--client", "c", "--output", str(tmp_path / "issued")],
        check=True,
        capture_output=True,
    )


def test_the_pip_of_the_host_can_install_it(kit: Path, exercise: Exercise, tmp_path: Path) -> None:
    """By the words of its README."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "v"], check=True)
    (command,) = re.findall(r"^    pip (install .*)$", (kit / "README.txt").read_text(), re.MULTILINE)
    pip = cut_off([str(tmp_path / "v" / "bin" / "pip"), *command.split()])
    subprocess.run(pip, check=True, cwd=kit, capture_output=True)
    exercise([str(tmp_path / "v" / "bin" / "rat")])


def test_a_damaged_kit_is_told(kit: Path, tmp_path: Path) -> None:
    (wheel,) = (kit / "wheels").glob("rat_mcp-*.whl")
    wheel.write_bytes(wheel.read_bytes()[:-1])
    (kit / "rat.pyz").unlink()
    done = subprocess.run(
        [sys.executable, kit / "install.py", tmp_path / "installed"], capture_output=True, check=False, text=True
    )
    assert done.returncode == 1
    assert done.stderr == f"install.py: rat.pyz, wheels/{wheel.name}: not as built, copy the kit again\n"
    assert not (tmp_path / "installed").exists()


def test_nothing_is_installed_over(kit: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, kit / "install.py", tmp_path], capture_output=True, check=False, text=True)
    assert done.returncode == 1
    assert done.stderr == f"install.py: {tmp_path} exists: give a directory that does not\n"


def test_a_python_too_old_is_told(kit: Path, tmp_path: Path) -> None:
    older = [path for name, path in interpreters().items() if int(name[2:]) < 9]
    if not older:
        pytest.skip("no older Python is installed here")
    for python in older:
        done = subprocess.run(
            [python, str(kit / "install.py"), str(tmp_path / "installed")], capture_output=True, check=False, text=True
        )
        if "annotations is not defined" in done.stderr:  # Python 3.6 stops at the first line of it
            continue
        assert done.returncode == 1
        assert re.fullmatch(
            r"install\.py: rat needs Python 3\.9 or newer, this is 3\.\d+\.\d+: run it with another\n", done.stderr
        )


def test_its_sums_hold_and_leave_nothing_out(kit: Path) -> None:
    lines = (kit / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    there = {path.relative_to(kit).as_posix(): path for path in kit.rglob("*") if path.is_file()}
    del there["SHA256SUMS"]
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in there.items()} == listed


def test_it_requires_exactly_the_wheels_it_holds(kit: Path) -> None:
    text = (kit / "requirements.txt").read_text() + (kit / "requirements-tool.txt").read_text()
    (pip,) = (kit / "wheels").glob("pip-*.whl")
    wheels = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (kit / "wheels").iterdir() if path != pip}
    assert set(re.findall(r"--hash=sha256:([0-9a-f]{64})", text)) == wheels


def test_its_bill_lists_every_wheel_and_its_licences_are_there(kit: Path, built: Path) -> None:
    bill = json.loads((kit / "sbom.cdx.json").read_bytes())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert re.fullmatch(
        r"urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-5[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", bill["serialNumber"]
    )
    components = [bill["metadata"]["component"], *bill["components"]]
    hashes = {each["content"] for component in components for each in component["hashes"]}
    wheels = list((kit / "wheels").iterdir())
    assert hashes == {hashlib.sha256(path.read_bytes()).hexdigest() for path in wheels}
    references = [component["bom-ref"] for component in components]
    assert len(set(references)) == len(references)
    assert {entry["ref"] for entry in bill["dependencies"]} == set(references)
    licences = (kit / "LICENSES.txt").read_text()
    for component in components:
        assert f"{component['name']} {component['version']}" in licences
        assert component["licenses"][0]["expression"]
    assert "Mozilla Public License" in licences
    assert "MIT License" in licences
    assert (built / f"rat-{bill['metadata']['component']['version']}.cdx.json").read_bytes() == (
        kit / "sbom.cdx.json"
    ).read_bytes()
    (wheel,) = (kit / "wheels").glob("rat_mcp-*.whl")
    assert wheel.read_bytes() == (built / wheel.name).read_bytes()
    assert (kit / "rat.pyz").read_bytes() == (built / "rat.pyz").read_bytes()


def test_the_wheel_holds_what_its_commands_need(built: Path) -> None:
    (wheel,) = built.glob("rat_mcp-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {"rat.py", "rat_tool.py", "demo_ratd.py", "ratel/__init__.py", "rat_schemas/wait_window.json"} <= names
