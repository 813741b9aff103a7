"""Measures kvpool, beside the peers that are installed, and says which targets are met.

    python bench/run.py [--quick] [--list] [NAME ...]

Writes a table, and JSON and plots under build/bench. What is measured, and how, stands in bench/README.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from bench.suite import main

    sys.exit(main(sys.argv[1:]))
