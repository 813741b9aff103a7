"""Counts the tests of one run from its reports and prints one line; fails when a report is missing or a test failed.

python .ci/summary.py build/reports
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

CPP_REPORTS = ("cpp-release.txt", "cpp-asan.txt", "cpp-tsan.txt")
PYTHON_REPORT = "python.xml"


def count_cpp(report: str) -> tuple[int, int, int]:
    """Passed, failed and skipped, from the closing lines of doctest."""
    found = re.search(r"test cases:\s*\d+ \|\s*(\d+) passed \|\s*(\d+) failed \|\s*(\d+) skipped", report)
    if not found:
        raise ValueError("doctest did not reach its end")
    return int(found[1]), int(found[2]), int(found[3])


def count_python(report: str) -> tuple[int, int, int]:
    """Passed, failed and skipped, from the JUnit report of pytest."""
    suites = ElementTree.fromstring(report).iter("testsuite")
    total = failed = skipped = 0
    for suite in suites:
        total += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    return total - failed - skipped, failed, skipped


def main(folder: Path) -> int:
    """Prints the line and returns the exit status."""
    sums = [0, 0, 0]
    for name in (*CPP_REPORTS, PYTHON_REPORT):
        count = count_python if name == PYTHON_REPORT else count_cpp
        try:
            counts = count((folder / name).read_text())
        except (OSError, ValueError, ElementTree.ParseError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        if counts[0] == 0:
            print(f"{name}: no test passed", file=sys.stderr)
            return 1
        sums = [total + one for total, one in zip(sums, counts, strict=True)]
    print(f"\n{sums[0]} passed, {sums[1]} failed, {sums[2]} skipped")
    return 1 if sums[1] else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
