"""Counts the tests of one run from its reports and prints one line; fails when a report is missing or a test failed.

python .ci/summary.py build/reports python.xml cpp-test ...

A name that ends in .xml is a report of pytest; another one is that of a C++ run, whose parts have a report each.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

Counts = tuple[int, int, int]  # passed, failed, skipped


def count_cpp(report: str) -> Counts:
    """From the closing lines of doctest."""
    found = re.search(r"test cases:\s*\d+ \|\s*(\d+) passed \|\s*(\d+) failed \|\s*(\d+) skipped", report)
    if not found:
        raise ValueError("doctest did not reach its end")
    return int(found[1]), int(found[2]), int(found[3])


def count_cpp_run(folder: Path, name: str) -> Counts:
    """Of all parts together; fails unless every part of the program's test cases has been run."""
    reports = sorted(folder.glob(f"{name}-*of*.txt"))
    if not reports:
        raise ValueError("no report")
    sums, seen, sizes, parts_seen = (0, 0, 0), 0, set(), set()
    for report in reports:
        said = report.read_text(errors="replace")
        shard = re.search(r"^shard (\d+) of (\d+): (\d+) of (\d+) test cases$", said, re.MULTILINE)
        if not shard:
            raise ValueError(f"{report.name} does not say which part it is")
        part, parts, cases, all_cases = map(int, shard.groups())
        counts = count_cpp(said)
        if sum(counts) != cases:
            raise ValueError(f"{report.name}: {cases} test cases, and {sum(counts)} counted")
        sums = added(sums, counts)
        seen += cases
        sizes.add((parts, all_cases))
        parts_seen.add(part)
    if len(sizes) != 1:
        raise ValueError("the parts are of different programs")
    parts, all_cases = sizes.pop()
    if parts_seen != set(range(1, parts + 1)) or seen != all_cases:
        raise ValueError(f"{seen} of {all_cases} test cases in {len(parts_seen)} of {parts} parts")
    return sums


def count_python(report: str) -> Counts:
    """From the JUnit report of pytest."""
    suites = ElementTree.fromstring(report).iter("testsuite")
    total = failed = skipped = 0
    for suite in suites:
        total += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    return total - failed - skipped, failed, skipped


def added(one: Counts, other: Counts) -> Counts:
    """The sums."""
    return one[0] + other[0], one[1] + other[1], one[2] + other[2]


def main(folder: Path, names: list[str]) -> int:
    """Prints the line and returns the exit status."""
    sums: Counts = (0, 0, 0)
    if not names:
        print("no report is named", file=sys.stderr)
        return 1
    for name in names:
        try:
            of_pytest = name.endswith(".xml")
            counts = count_python((folder / name).read_text()) if of_pytest else count_cpp_run(folder, name)
        except (OSError, ValueError, ElementTree.ParseError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        if counts[0] == 0:
            print(f"{name}: no test passed", file=sys.stderr)
            return 1
        sums = added(sums, counts)
    print(f"\n{sums[0]} passed, {sums[1]} failed, {sums[2]} skipped")
    return 1 if sums[1] else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
