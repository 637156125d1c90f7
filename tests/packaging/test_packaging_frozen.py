"""The frozen files: in an environment of nothing, without a Python; and how they end."""

from __future__ import annotations

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Callable

import pytest
from artifacts import Exercise, in_environment, unpack
from fault_server import HANG

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bundles import Bundle
    from fault_server import FaultServer


def runs_here(name: str) -> bool:
    """Whether the glibc here is one that a platform's name asks for."""
    asked = re.search(r"glibc([\d.]+)", name)
    here = platform.libc_ver()
    if asked is None or here[0] != "glibc":
        return False
    return [int(n) for n in here[1].split(".")] >= [int(n) for n in asked[1].split(".")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a platform that there are frozen files for and that runs here."""
    if "system" in metafunc.fixturenames:
        names = sorted(path.name for path in metafunc.config.getoption("--built").glob("linux-*-glibc*"))
        metafunc.parametrize("system", [name for name in names if runs_here(name)], scope="session")


@pytest.fixture(params=["file", "folder"])
def place(request: pytest.FixtureRequest, built: Path, system: str, tmp_path: Path) -> Path:
    """A directory with rat and rat-tool in it, of either form."""
    if request.param == "folder":
        (archive,) = built.glob(f"rat-*-{system}.tar.gz")
        return unpack(archive, tmp_path / "unpacked")
    directory = tmp_path / "bin"
    directory.mkdir()
    for name in ("rat", "rat-tool"):
        shutil.copy2(built / system / name, directory / name)
    return directory


@pytest.fixture
def single(built: Path, system: str, tmp_path: Path) -> Path:
    """The single file, in a directory of its own."""
    (tmp_path / "single").mkdir()
    return Path(shutil.copy2(built / system / "rat", tmp_path / "single" / "rat"))


def test_there_is_one_for_here(built: Path) -> None:
    """Without it the others would find nothing to test."""
    assert [path for path in built.glob("linux-*-glibc*/rat") if runs_here(path.parent.name)]


def test_it_relays_in_an_environment_of_nothing_and_leaves_nothing(
    single: Path, exercise: Exercise, bare: dict[str, str]
) -> None:
    harness = exercise(in_environment(bare, [str(single)]))
    assert harness.finish() == (0, [])
    assert list(Path(bare["TMPDIR"]).iterdir()) == []
    told = subprocess.run(in_environment(bare, [str(single), "--version"]), capture_output=True, check=True).stdout
    version = r"rat [\d.]+ \(frozen, Python 3\.\d+\.\d+, OpenSSL [^,]+, urllib3 [\d.]+\)\n"
    assert re.fullmatch(version, told.decode())


def test_it_relays_in_either_form(place: Path, exercise: Exercise, bare: dict[str, str]) -> None:
    exercise(in_environment(bare, [str(place / "rat")]))


def test_its_schemas_are_read_from_inside(
    place: Path, knows_schemas: Callable[[Sequence[str], Path], None], bare: dict[str, str]
) -> None:
    inside = place if (place / "_internal").exists() else Path(bare["TMPDIR"])
    knows_schemas(in_environment(bare, [str(place / "rat")]), inside)


def test_its_public_authorities_are_read_from_inside(
    place: Path, knows_public_authorities: Callable[[Sequence[str]], None], bare: dict[str, str]
) -> None:
    kept = [f"{name}={value}" for name, value in bare.items()]
    knows_public_authorities(["/usr/bin/env", *kept, str(place / "rat")])


@pytest.mark.parametrize("locale", ["C", "POSIX", "ja_JP.eucJP", "xx_XX.none"])
def test_it_runs_in_any_locale(single: Path, exercise: Exercise, bare: dict[str, str], locale: str) -> None:
    """Python would ask for the character set of the locale at its start, and this one has few."""
    exercise(in_environment({**bare, "LANG": locale, "LC_ALL": locale}, [str(single)]))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_its_temporary_directory(
    single: Path, exercise: Exercise, bare: dict[str, str], number: signal.Signals
) -> None:
    harness = exercise(in_environment(bare, [str(single)]))
    temporary = Path(bare["TMPDIR"])
    assert len(list(temporary.iterdir())) == 1
    harness.signal(number)
    assert harness.wait() == 0
    harness.wait_record("stopped")
    assert list(temporary.iterdir()) == []


class Cut:
    """A harness in a process of its own, to be killed, whose rat logs into a pipe of ours.

    The pipe ends when nobody holds its other end: when no process of that rat is left.
    """

    def __init__(self, command: list[str]) -> None:
        reading, writing = os.pipe()
        program = (
            "import subprocess, sys\n"
            "rat = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, stdout=subprocess.PIPE,"
            " stderr=int(sys.argv[1]))\n"
            'rat.stdin.write(b\'{"jsonrpc": "2.0", "id": 1, "method": "ping"}\\n\'); rat.stdin.flush()\n'
            "print(rat.stdout.readline(), flush=True); rat.wait()"
        )
        words = [sys.executable, "-c", program, str(writing), *command]
        self.harness = subprocess.Popen(words, stdout=subprocess.PIPE, pass_fds=[writing])
        os.close(writing)
        self.log = b""
        self._reading = reading
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with open(self._reading, "rb") as log:
            self.log = log.read()

    def wait_gone(self) -> None:
        """Wait until no process of the rat is left. Fails when one stays."""
        self._reader.join(HANG)
        assert not self._reader.is_alive(), "a process is left"


@pytest.fixture
def cut(single: Path, bundle: Bundle, fault_server: FaultServer, bare: dict[str, str]) -> Iterator[Cut]:
    """Such a harness, whose rat has answered."""
    flags = ["--server", fault_server.address, "--bundle", str(bundle.client)]
    process = Cut(in_environment(bare, [str(single), *flags]))
    assert process.harness.stdout is not None
    assert b"result" in process.harness.stdout.readline()
    yield process
    process.harness.kill()
    process.harness.wait()
    process.harness.stdout.close()
    process.wait_gone()


def test_no_process_is_left_when_the_harness_dies(cut: Cut, bare: dict[str, str]) -> None:
    cut.harness.send_signal(signal.SIGKILL)
    cut.wait_gone()
    assert list(Path(bare["TMPDIR"]).iterdir()) == []


def mounted_noexec(directory: Path) -> bool:
    """Mount a file system there from which nothing can be run, if this user may."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    return (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "noexec", "tmpfs", directory], capture_output=True, check=False
        ).returncode
        == 0
    )


@pytest.fixture
def noexec(tmp_path: Path) -> Iterator[Path]:
    """A directory from which nothing can be run."""
    directory = tmp_path / "noexec"
    directory.mkdir()
    if not mounted_noexec(directory):
        pytest.skip("mounting needs root, which is not to be had here")
    yield directory
    subprocess.run(["umount", directory], check=True)


def test_where_nothing_runs_from_the_temporary_directory_another_or_the_folder_helps(
    single: Path, built: Path, system: str, exercise: Exercise, bare: dict[str, str], noexec: Path, tmp_path: Path
) -> None:
    """The words are the README's."""
    there = {**bare, "TMPDIR": str(noexec)}
    failed = subprocess.run(in_environment(there, [str(single), "--version"]), capture_output=True, check=False)
    assert failed.returncode == 127
    assert failed.stdout == b""
    assert failed.stderr.decode() == (
        f"{single}: error while loading shared libraries: libz.so.1: failed to map segment from shared object\n"
    )
    assert list(noexec.iterdir()) == []
    exercise(in_environment(bare, [str(single)]))
    (archive,) = built.glob(f"rat-*-{system}.tar.gz")
    exercise(in_environment(there, [str(unpack(archive, tmp_path / "unpacked") / "rat")]))


def test_the_tool_issues_bundles_and_shows_all_of_it(place: Path, bare: dict[str, str], tmp_path: Path) -> None:
    tool = in_environment(bare, [str(place / "rat-tool")])
    bundle = str(tmp_path / "issued")
    subprocess.run(
        [*tool, "bundle", "generate", "--tenant", "t", "--client", "c", "--output", bundle],
        check=True,
        capture_output=True,
    )
    subprocess.run([*tool, "bundle", "inspect", f"{bundle}/server", f"{bundle}/clients/c"], check=True)
    shown = subprocess.run([*tool, "demo"], capture_output=True, check=False, text=True)
    assert shown.returncode == 0, shown
    assert "Shown: both protocols" in shown.stdout
    assert list(Path(bare["TMPDIR"]).iterdir()) == []


def test_the_name_tells_the_oldest_glibc(built: Path, tmp_path: Path) -> None:
    """By the symbols that what is inside asks for: the loader refuses all of it for a single one that is newer."""
    if shutil.which("objdump") is None:
        pytest.skip("objdump (binutils) is not installed here")
    for place in sorted(built.glob("linux-*-glibc*")):
        if not place.is_dir():
            continue
        (archive,) = built.glob(f"rat-*-{place.name}.tar.gz")
        folder = unpack(archive, tmp_path / place.name)
        newest: tuple[int, ...] = (0,)
        libraries = 0
        for path in [*folder.rglob("*"), place / "rat", place / "rat-tool"]:
            if path.is_file() and path.read_bytes()[:4] == b"\x7fELF":
                libraries += 1
                listed = subprocess.run(["objdump", "-T", path], capture_output=True, check=True, text=True).stdout
                for version in re.findall(r"GLIBC_([0-9.]+)", listed):
                    newest = max(newest, tuple(map(int, version.split("."))))
        assert libraries > 10
        assert place.name.endswith(f"-glibc{'.'.join(map(str, newest))}")


def test_the_single_file_is_small(built: Path) -> None:
    for rat in built.glob("linux-*-glibc*/rat"):
        assert rat.stat().st_size <= 8_000_000
