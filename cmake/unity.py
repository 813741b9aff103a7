"""Says which source files are compiled together: files of one group declare no name twice.

python cmake/unity.py BYTES INCLUDE_DIR... -- FILE...

Prints a line `group;file` for each file. A group holds up to BYTES of source. What a file declares outside of functions
and classes begins at the start of a line, because clang-format does not indent what is in a namespace. A name that is
missed here costs a compiler error, never a wrong program.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from itertools import combinations
from pathlib import Path

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.DOTALL)
INCLUDE = re.compile(r"^#include \"([^\"]+)\"", re.MULTILINE)
MACRO = re.compile(r"^#define (\w+)", re.MULTILINE)
# A definition, not a declaration of what a header defines.
TYPE = re.compile(
    r"^(?:struct|class|enum class|enum|union|namespace)\s+(?:alignas\([^)]*\) )?(\w+)(?!\w|[^{;]*;)", re.MULTILINE
)
ALIAS = re.compile(r"^using (\w+) =", re.MULTILINE)
# A type and then a name: a function, a variable or a constant.
VALUE = re.compile(
    r"^(?!(?:using|namespace|struct|class|enum|union|return) |template|TEST_CASE|extern \"C\")"
    r"[A-Za-z_\[][^\n;={(]*?[\s*&](\w+)\s*(?:\[[^\]]*\])*\s*[;={(]",
    re.MULTILINE,
)
SHARED = {"kvpool", "testing", "std"}  # namespaces, which many files open


def declared(text: str) -> frozenset[str]:
    """The names that a text declares outside of functions and classes."""
    text = COMMENT.sub("", text)
    names = {match[1] for pattern in (MACRO, TYPE, ALIAS, VALUE) for match in pattern.finditer(text)}
    return frozenset(names - SHARED)


class Sources:
    """What files declare themselves, and what the headers that they include declare.

    A set of files is an integer with a bit for each: some ten thousand pairs are compared.
    """

    def __init__(self, roots: list[Path]) -> None:
        self._roots = roots
        self._bits: dict[Path, int] = {}
        self._names: dict[str, int] = {}  # the files that declare each
        self.own = lru_cache(maxsize=None)(self._own)
        self.included = lru_cache(maxsize=None)(self._included)
        self.clash = lru_cache(maxsize=None)(self._clash)
        self._direct = lru_cache(maxsize=None)(self._directly_included)
        self._text = lru_cache(maxsize=None)(Path.read_text)
        self._sights = lru_cache(maxsize=None)(self._seen_by)

    def _own(self, file: Path) -> frozenset[str]:
        return declared(self._text(file))

    def _directly_included(self, file: Path) -> list[Path]:
        places = [[root / name for root in (file.parent, *self._roots)] for name in INCLUDE.findall(self._text(file))]
        return [found for found in (next(filter(Path.is_file, each), None) for each in places) if found is not None]

    def _included(self, file: Path) -> frozenset[Path]:
        found: set[Path] = set()
        waiting = [file]
        while waiting:
            new = [header for header in self._direct(waiting.pop()) if header not in found]
            found.update(new)
            waiting += new
        return frozenset(found)

    def _bit(self, file: Path) -> int:
        """Of this file, whose names are known from now on."""
        if file not in self._bits:
            self._bits[file] = 1 << len(self._bits)
            for name in self.own(file):
                self._names[name] = self._names.get(name, 0) | self._bits[file]
        return self._bits[file]

    def _seen_by(self, file: Path) -> tuple[int, frozenset[str]]:
        """The file with all that it includes, and every name there."""
        files = self.included(file) | {file}
        return sum(self._bit(each) for each in files), frozenset().union(*(self.own(each) for each in files))

    def _clash(self, one: Path, other: Path) -> bool:
        """Whether a name has one meaning in one file, or in a header of it alone, and another in the other file."""
        if self.own(one) & self.own(other):
            return True
        (mine, names_here), (theirs, names_there) = self._sights(one), self._sights(other)
        here, there = mine & ~theirs, theirs & ~mine
        return any(self._names[name] & here and self._names[name] & there for name in names_here & names_there)


def grouped(files: list[Path], sources: Sources, at_most: int) -> list[list[Path]]:
    """The files in groups, each in the first group that has room for it and no clash with it.

    Those that clash with many come first: later the groups are full, and each would be a group by itself.
    """
    clashes = dict.fromkeys(files, 0)
    for one, other in combinations(files, 2):
        if sources.clash(one, other):
            clashes[one] += 1
            clashes[other] += 1
    groups: list[list[Path]] = []
    for file in sorted(files, key=lambda file: -clashes[file]):
        for group in groups:
            size = sum(each.stat().st_size for each in (*group, file))
            if size <= at_most and not any(sources.clash(file, each) for each in group):
                group.append(file)
                break
        else:
            groups.append([file])
    return groups


def main(arguments: list[str]) -> int:
    """Prints the groups."""
    at = arguments.index("--")
    sources = Sources([Path(folder) for folder in arguments[1:at]])
    files = sorted(Path(name) for name in arguments[at + 1 :])
    for number, group in enumerate(grouped(files, sources, int(arguments[0]))):
        for file in group:
            print(f"{number};{file}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
