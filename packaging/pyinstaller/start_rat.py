"""Where the frozen rat starts.

Not rat.py itself: what a frozen file starts has no loader that could read the schemas, what it imports has.
"""

from __future__ import annotations

import sys

import rat

if __name__ == "__main__":
    sys.exit(rat.main())
