"""The program of the README runs as it stands there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from web_server import HANG

pytest.importorskip("cryptography", reason="cryptography, which makes the bundles, is not installed here")

ROOT = Path(__file__).resolve().parents[2]


def test_the_program_of_the_readme_runs_as_pasted(tmp_path: Path) -> None:
    _, begun, rest = (ROOT / "README.md").read_text(encoding="utf-8").partition("<!-- ratel-program -->\n```python\n")
    assert begun
    program, ended, _ = rest.partition("```\n<!-- /ratel-program -->")
    assert ended
    assert len(program.splitlines()) < 20
    pasted = tmp_path / "program.py"
    pasted.write_text(program)
    # Run in the source tree, as the README has it: -c puts the working directory first on the path.
    run = f"exec(compile(open({str(pasted)!r}).read(), 'program.py', 'exec'))"
    done = subprocess.run(
        [sys.executable, "-c", run], cwd=ROOT, capture_output=True, text=True, timeout=2 * HANG, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second, answer = done.stdout.splitlines()
    assert [line.split()[0] for line in (first, second)] == ["bridge__write_file", "work__write_file"]
    assert "'text': 'hello\\n'" in answer
