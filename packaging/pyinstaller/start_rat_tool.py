"""Where the frozen rat-tool starts."""

from __future__ import annotations

import sys

import rat_tool

if __name__ == "__main__":
    sys.exit(rat_tool.main())
