"""Two C++ types, or inline functions, of one name in one namespace: each file sees its own, and the linker keeps one.

The compiler says nothing. A destructor may then be that of the other type, and a count, once inlined and once called,
the result of two different functions.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# clang-format keeps namespaces and the types in them at the left margin, and comments the end of each namespace.
_BEGIN = re.compile(r"namespace(?: ([\w:]+))? \{(?:  // .*)?$")
_END = re.compile(r"\}  // namespace\b")
_TYPE = re.compile(
    r"(?:template <.*> )?(?:struct|class|union|enum class) (?:alignas\([^)]*\) )?(\w+)(?: final)?(?: : [^;]*)? \{"
)
# Overloads differ in what stands between the parentheses, up to the name of each parameter.
_INLINE = re.compile(r"inline (?:[\w:<>,&*]+ )+[&*]?(\w+)\((.*)$")
_PARAMETER_NAME = re.compile(r"\s*\b\w+(?: = [^,()]*)?(?=,|\)|$)")


def definitions_in(path: Path) -> Iterator[str]:
    """The full names of the types and inline functions that a file defines, without those that no other file sees."""
    namespaces: list[str | None] = []
    for line in path.read_text().splitlines():
        if begin := _BEGIN.match(line):
            namespaces.append(begin.group(1))
        elif _END.match(line):
            namespaces.pop()
        elif None in namespaces:
            continue
        elif name := _TYPE.match(line):
            yield "::".join([*(each for each in namespaces if each), name.group(1)])
        elif function := _INLINE.match(line):
            parameters = _PARAMETER_NAME.sub("", function.group(2).partition(") ")[0].removesuffix(")"))
            yield "::".join([*(each for each in namespaces if each), f"{function.group(1)}({parameters})"])


def defined_twice(*folders: Path) -> list[str]:
    """Each such name, with the files. Libraries that are built apart from the tests are folders, and left out."""
    files: defaultdict[str, list[str]] = defaultdict(list)
    for folder in folders:
        for path in sorted(folder.rglob("*") if folder.name == "kvpool" else folder.glob("*")):
            if path.suffix in (".h", ".cpp"):
                for name in dict.fromkeys(definitions_in(path)):  # one file may have one for each way to compile it
                    files[name].append(path.name)
    return [f"{name}: {', '.join(paths)}" for name, paths in files.items() if len(paths) > 1]


def test_types_and_inline_functions_have_one_definition():
    assert not defined_twice(ROOT / "cpp" / "kvpool", ROOT / "tests" / "cpp")
    assert not defined_twice(ROOT / "cpp" / "kvpool", ROOT / "bindings")


def test_a_second_definition_is_found(tmp_path):
    (tmp_path / "a.h").write_text(
        "namespace kvpool {\nstruct Seen {\n};\nnamespace {\nstruct Hidden {\n};\n}  // namespace\n"
    )
    (tmp_path / "b.cpp").write_text(
        "namespace kvpool {\nnamespace {\nstruct Hidden {\n};\n}  // namespace\nclass Seen final : public Base {\n};\n"
        "}  // namespace kvpool\nnamespace kvpool::other {\nstruct Seen {\n};\n}  // namespace kvpool::other\n"
    )
    assert defined_twice(tmp_path) == ["kvpool::Seen: a.h, b.cpp"]


def test_a_second_inline_function_is_found_and_an_overload_is_not(tmp_path):
    (tmp_path / "a.h").write_text(
        "namespace kvpool {\ninline int count(const Bytes& of, int from = 0) {\n}\ninline int count(int of) {\n}\n"
        "namespace {\ninline int hidden() {\n}\n}  // namespace\n}  // namespace kvpool\n"
    )
    (tmp_path / "b.h").write_text(
        "namespace kvpool {\ninline int count(const Bytes& bytes, int first = 1) noexcept {\n}\n"
        "inline int hidden() {\n}\n}  // namespace kvpool\n"
    )
    assert defined_twice(tmp_path) == ["kvpool::count(const Bytes&, int): a.h, b.h"]
