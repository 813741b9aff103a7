"""How the reference reads docstrings: the types of properties in C++, which the stub knows, and pieces of code."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

_STUB = Path(__file__).resolve().parents[1] / "src" / "kvpool" / "_core.pyi"


@cache
def types_of_properties() -> dict[str, str]:
    """By "Class.property" of kvpool._core, what it returns."""
    return {
        f"{owner.name}.{node.name}": ast.unparse(node.returns).replace("npt.", "").replace("np.", "")
        for owner in ast.parse(_STUB.read_text()).body
        if isinstance(owner, ast.ClassDef)
        for node in owner.body
        if isinstance(node, ast.FunctionDef)
        and node.returns is not None
        and any(isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list)
    }


def read_as_rst(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Of Sphinx's event autodoc-process-docstring: types of properties, and code as reStructuredText has it."""
    owner, _, member = name.rpartition(".")
    known = types_of_properties().get(f"{owner.rpartition('.')[2]}.{member}")
    if isinstance(thing, property) and known is not None and lines:
        lines[0] = f"``{known}``: {lines[0]}"
    lines[:] = _with_code(lines)


def _with_code(lines: list[str]) -> list[str]:
    """Fences, and what is indented behind a colon and an empty line, become literal blocks."""
    read: list[str] = []
    fenced = False
    for number, line in enumerate(lines):
        if line.strip().startswith("```"):
            fenced = not fenced
            read += ["::", ""] if fenced else [""]
            continue
        following = lines[number + 1 : number + 3]
        begins = line.endswith(":") and not line.endswith("::") and len(following) == 2 and not following[0].strip()
        colon = ":" if begins and _indent(following[1]) > _indent(line) else ""
        read.append("    " + line if fenced else line + colon)
    return read


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip()) if line.strip() else -1
