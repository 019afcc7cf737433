"""``python -m alphamoe_profiler`` is ``alphamoe-trace``."""

from __future__ import annotations

import sys

from alphamoe_profiler.cli import main

if __name__ == "__main__":
    sys.exit(main())
