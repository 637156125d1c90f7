"""Compile a tree of sources with the Python that runs this: ``bytecode.py SOURCES OUTPUT``.

Each ``.py`` becomes a ``.pyc`` of the same place that is never checked against its source (PEP 552): in a zip the two
cannot part. It is without docstrings and assertions, a sixth of its size: nothing reads the ones, the others are for
type checkers. Names of files in it are those within SOURCES, so that the bytes do not tell where they were made.
"""

from __future__ import annotations

import py_compile
import sys
from pathlib import Path


def compile_tree(sources: Path, output: Path) -> None:
    """Compile all sources of a tree. Raises py_compile.PyCompileError at the first that cannot be."""
    for source in sorted(sources.rglob("*.py")):
        name = source.relative_to(sources)
        py_compile.compile(
            str(source),
            str(output / name.with_suffix(".pyc")),
            dfile=name.as_posix(),
            doraise=True,
            optimize=2,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )


if __name__ == "__main__":
    compile_tree(Path(sys.argv[1]), Path(sys.argv[2]))
