"""Says which tests no second thread can run in: ThreadSanitizer need not see them.

python cmake/one_thread.py INCLUDE_DIR... -- TEST_FILE...

Prints the files, one a line, for which nothing that they reach through includes, headers and the source files beside
them, uses a thread, an atomic variable or a lock. A test is left to ThreadSanitizer when in doubt.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

INCLUDE = re.compile(r"^\s*#\s*include\s*([<\"])([^>\"]+)[>\"]", re.MULTILINE)
THREADS = {
    *("atomic", "barrier", "condition_variable", "future", "latch", "mutex", "pthread.h", "semaphore", "shared_mutex"),
    *("stop_token", "thread", "threads.h", "stdatomic.h"),
}


def reached(file: Path, roots: list[Path]) -> tuple[set[Path], set[str]]:
    """The project's files that a file reaches, and the names of the system's headers that those include."""
    files, system, waiting = {file}, set(), [file]
    while waiting:
        here = waiting.pop()
        for kind, name in INCLUDE.findall(here.read_text()):
            header = next((root / name for root in (here.parent, *roots) if (root / name).is_file()), None)
            if kind == "<" or header is None:
                system.add(name)
                continue
            for each in (header, header.with_suffix(".cpp")):
                if each.is_file() and each not in files:
                    files.add(each)
                    waiting.append(each)
    return files, system


def has_one_thread(file: Path, roots: list[Path]) -> bool:
    """Whether a test cannot have a second thread."""
    return not reached(file, roots)[1] & THREADS


def main(arguments: list[str]) -> int:
    """Prints the files."""
    at = arguments.index("--")
    roots = [Path(folder) for folder in arguments[:at]]
    for name in arguments[at + 1 :]:
        if has_one_thread(Path(name), roots):
            print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
