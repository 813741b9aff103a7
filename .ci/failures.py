"""Prints once more what failed in a run, so that it stands at the end of the log where people look.

python .ci/failures.py build/reports
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

RULE = re.compile(r"^={60,}$", re.MULTILINE)  # doctest draws one above every case with something to say
FAILED = re.compile(r"\bERROR: |Sanitizer")
SEED = re.compile(r"^.* fuzz: KVPOOL_SEED=\d+\n", re.MULTILINE)
AT_MOST = 4000  # characters of one failure


def cpp_failures(report: str) -> list[str]:
    """The paragraphs of a doctest report in which a check failed, a case threw or a sanitizer spoke.

    The end of a report without its closing line, for then the program died.
    """
    said = SEED.sub("", report)
    found = [part.strip()[:AT_MOST] for part in RULE.split(said) if FAILED.search(part)]
    return found if "[doctest] Status:" in said else [*found, said[-AT_MOST:].strip()]


def python_failures(report: str) -> list[str]:
    """A name and the end of the trace for each failed test of pytest's JUnit report."""
    told = []
    for case in ElementTree.fromstring(report).iter("testcase"):
        for problem in (*case.findall("failure"), *case.findall("error")):
            told.append(f"{case.get('classname')}::{case.get('name')}\n{(problem.text or '')[-AT_MOST:].strip()}")
    return told


def main(folder: Path) -> int:
    """Prints the failures of every report in the folder."""
    for path in sorted((*folder.glob("*.txt"), *folder.glob("*.xml"))):
        try:
            found = (python_failures if path.suffix == ".xml" else cpp_failures)(path.read_text(errors="replace"))
        except ElementTree.ParseError as error:
            found = [f"cut short: {error}"]
        if found:
            print(f"\n== {path.name}: {len(found)} failed\n" + "\n\n".join(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
