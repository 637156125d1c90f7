"""Compile a tree of sources with the Python that runs this: ``bytecode.py SOURCES OUTPUT``.

Each ``.py`` becomes a ``.pyc`` of the same place that is never checked against its source (PEP 552): in a zip the two
cannot part. It is without docstrings and assertions, a sixth of its size: nothing reads the ones, the others are for
type checkers.

Nothing of where it is made goes in. The names of files in it are those within SOURCES. And not a module more is loaded
than it takes, pathlib least of all: it interns the parts of paths, and a string that the compiled module names, too,
is then written otherwise (marshal marks what others may refer to).
"""

from __future__ import annotations

import os
import py_compile
import sys


def compile_tree(sources: str, output: str) -> None:
    """Compile all sources of a tree. Raises py_compile.PyCompileError at the first that cannot be."""
    for directory, below, names in os.walk(sources):
        below.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                place = os.path.relpath(os.path.join(directory, name), sources)
                py_compile.compile(
                    os.path.join(sources, place),
                    os.path.join(output, f"{place}c"),
                    dfile=place.replace(os.sep, "/"),
                    doraise=True,
                    optimize=2,
                    invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
                )


if __name__ == "__main__":
    compile_tree(sys.argv[1], sys.argv[2])
