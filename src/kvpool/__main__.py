"""`python -m kvpool` is the command `kvpool`."""

from __future__ import annotations

import sys

from kvpool.cli import main

sys.exit(main())
