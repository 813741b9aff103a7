"""Prints what pyproject.toml requires, with the named extras: one requirement a line, without building the package.

python tools/requirements.py EXTRA...
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def project_of(text: str) -> dict[str, Any]:
    """The table `project`. Python 3.10 cannot read TOML by itself; pip, which is there, can."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        from pip._vendor import tomli as tomllib
    project: dict[str, Any] = tomllib.loads(text)["project"]
    return project


def required(project: dict[str, Any], extras: list[str]) -> list[str]:
    """The requirements of the package and of its extras, which may name further extras of the same package."""
    own = re.compile(rf"{re.escape(project['name'])}\[([^\]]+)\]$")
    found: dict[str, None] = dict.fromkeys(project["dependencies"])
    waiting, seen = list(extras), set[str]()
    while waiting:
        extra = waiting.pop(0)
        if extra in seen:
            continue
        seen.add(extra)
        for requirement in project["optional-dependencies"][extra]:
            if named := own.match(requirement.replace(" ", "")):
                waiting += named[1].split(",")
            else:
                found[requirement] = None
    return list(found)


if __name__ == "__main__":
    print("\n".join(required(project_of(PYPROJECT.read_text()), sys.argv[1:])))
