"""Which code the figures are of."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).resolve().parent
_SECONDS: Final = 10.0


def revision(folder: Path = _HERE) -> str | None:
    """The commit of the checkout that `folder` lies in, with "+changes" if files that it tracks differ from it.

    "+unknown" if git does not say. Of files that are not tracked, the compiled core among them, it knows nothing.
    None without git, or outside a checkout that tracks the folder: benches are also run from an installed package.
    """
    if not _git(folder, "ls-files", "."):  # a folder that only lies in somebody else's checkout
        return None
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no", ":/", ":(exclude,top)bench/results")
    if not commit:
        return None
    return commit + ("+unknown" if changes is None else "+changes" if changes else "")


def _git(folder: Path, *arguments: str) -> str | None:
    """What a git command prints; None if it fails."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None
