"""Writes the signatures of the functions of kvpool._core, from the stub, as a table for C++: what help() shows.

usage: signatures.py STUB OUTPUT
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FunctionDefs = list[ast.FunctionDef]

# What names in defaults of the stub are worth: `inspect.signature` evaluates literals alone.
_VALUES = {"Medium.HBM": "1", "Medium.DRAM": "2"}


class Signature(NamedTuple):
    """One function: `shown` has types, for readers; `plain` has none, in the form that `inspect.signature` reads."""

    owner: str  # a class, or "" for the module
    name: str
    plain: str
    shown: str


def signatures(stub: str) -> Iterator[Signature]:
    """The functions and methods of a stub; overloads are one."""
    body = ast.parse(stub).body
    yield from _functions("", body)
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.name, node.body)


def _functions(owner: str, body: list[ast.stmt]) -> Iterator[Signature]:
    named: dict[str, FunctionDefs] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef) and "property" not in _decorators(node) and not _is_setter(node):
            named.setdefault(node.name, []).append(node)
    for name, overloads in named.items():
        yield _signature(owner, name, overloads)


def _signature(owner: str, name: str, overloads: FunctionDefs) -> Signature:
    node = overloads[-1]  # the most general one; but the others know which arguments may be left out
    defaults: dict[str, ast.expr] = {}
    for overload in overloads:
        defaults |= _defaults(overload.args)
    bound = bool(owner) and "staticmethod" not in _decorators(node)
    positional = [*node.args.posonlyargs, *node.args.args]
    plain = [_plain(one, defaults) for one in positional]
    shown = [_shown(one, defaults) for one in positional[bound:]]
    if node.args.posonlyargs:
        plain.insert(len(node.args.posonlyargs), "/")
        shown.insert(len(node.args.posonlyargs) - bound, "/")
    star = node.args.vararg
    if star is not None or node.args.kwonlyargs:
        plain.append("*" + (star.arg if star else ""))
        shown.append("*" + (f"{star.arg}: {_type(star)}" if star else ""))
    plain += [_plain(one, defaults) for one in node.args.kwonlyargs]
    shown += [_shown(one, defaults) for one in node.args.kwonlyargs]
    result = "None" if node.returns is None else _text(node.returns)
    return Signature(owner, name, f"{name}({', '.join(plain)})", f"{name}({', '.join(shown)}) -> {result}")


def _defaults(arguments: ast.arguments) -> dict[str, ast.expr]:
    positional = [*arguments.posonlyargs, *arguments.args]
    last = zip(reversed(positional), reversed(arguments.defaults), strict=False)
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return {one.arg: value for one, value in (*last, *named) if value is not None}


def _plain(argument: ast.arg, defaults: dict[str, ast.expr]) -> str:
    if argument.arg not in defaults:
        return argument.arg
    value = ast.unparse(defaults[argument.arg])
    return f"{argument.arg}={_VALUES.get(value, value)}"


def _shown(argument: ast.arg, defaults: dict[str, ast.expr]) -> str:
    typed = f"{argument.arg}: {_type(argument)}" if argument.annotation is not None else argument.arg
    default = defaults.get(argument.arg)
    return typed if default is None else f"{typed} = {_text(default)}"


def _type(argument: ast.arg) -> str:
    return _text(argument.annotation) if argument.annotation is not None else "Any"


def _text(node: ast.expr) -> str:
    return ast.unparse(node).replace("npt.", "").replace("np.", "").replace("Medium.HBM", "HBM")


def _decorators(node: ast.FunctionDef) -> set[str]:
    return {ast.unparse(one) for one in node.decorator_list}


def _is_setter(node: ast.FunctionDef) -> bool:
    return any(one.endswith(".setter") for one in _decorators(node))


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def main() -> None:
    """See the module."""
    stub, output = map(Path, sys.argv[1:])
    rows = (", ".join(map(_quoted, one)) for one in signatures(stub.read_text()))
    text = "".join(f"{{{row}}},\n" for row in rows)
    if not output.is_file() or output.read_text() != text:
        output.write_text(text)


if __name__ == "__main__":
    main()
