"""Where rat.pyz starts (as its ``__main__``): rat, or rat-tool when the first argument is ``tool``.

Bytecode of each Python that was at hand when it was built lies in a folder of the zip, named by the cache tag of that
Python (``cpython-311``), and comes before the sources, which any other Python compiles at each start. Beside the
sources, where the importer of zips looks for it, there is room for the bytecode of one Python only.
"""

from __future__ import annotations

import os
import sys


def start() -> int:
    """Run the program that the command line asks for, and return its exit status."""
    # Absolute, for what is read through the loader by its path; and whatever the directory becomes.
    archive = os.path.abspath(sys.path[0])
    folders = [os.path.join(archive, str(sys.implementation.cache_tag))]
    if sys.version_info < (3, 10):
        folders.append(os.path.join(archive, "python3.9"))  # what newer releases no longer run on
    # Before everything of the host: its urllib3 may be any.
    sys.path[:1] = [*folders, archive]
    if sys.argv[1:2] == ["tool"]:
        import rat_tool

        return rat_tool.main(sys.argv[2:])
    import rat

    return rat.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(start())
