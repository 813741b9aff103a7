"""Four processes serve a request that is 3.5 times as long as what a pool of theirs holds.

    python -m examples.long_context [--small]

One of them lends out its oldest blocks to the others, and attention runs where the blocks are. A creditor is killed
(-9) in the middle of the answer; what it had is computed again. Exits with 1 unless tokens and logits are those of one
big process, bit for bit, and everything else was as promised.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # where this package and process.py are


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    # The matrices are small, and several processes share the processors. NumPy reads this when it is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from long_context.report import summary
    from long_context.story import Size, tell

    started = time.monotonic()
    result = tell(Size(pool_leaves=2) if options.small else Size(), _say)
    print(summary(result))
    kept = all(result.promises.values())
    print(f"{time.monotonic() - started:.0f} s. " + ("All as promised." if kept else "NOT AS PROMISED."))
    return 0 if kept else 1


def _say(line: str) -> None:
    print(line, flush=True)  # a pipe would keep it until the end


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.long_context",
        description="Serve a request that is 3.5 times as long as what one process holds, by four processes, and kill\n"
        "one of them. Tokens and logits are compared, bit for bit, with those of one big process.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--small", action="store_true", help="pools of 2,048 tokens instead of 4,096: some seconds")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
