"""Which code the figures are of."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Final

_HERE: Final = Path(__file__).resolve().parent
_SECONDS: Final = 10.0
_SOURCES: Final = ("bindings", "cpp", "cuda", "third_party")
_ENDINGS: Final = (".h", ".c", ".cpp", ".cu", ".cuh", ".py")  # .py: kernels are compiled from cuda/attention


def revision(folder: Path = _HERE, compiled: str | None = None) -> str | None:
    """The commit of the checkout that `folder` lies in, with "+changes" if files that it tracks differ from it.

    "+unknown" if git does not say. Of files that are not tracked it knows nothing.

    Args:
        folder: Where to look.
        compiled: `sources_digest` of what the core was compiled from; empty: it does not say. "+stale-core" if the
            checkout's sources differ. None: not compared.

    Returns:
        None without git, or outside a checkout that tracks the folder: benches are also run from an installed package.
    """
    if not _git(folder, "ls-files", "."):  # a folder that only lies in somebody else's checkout
        return None
    commit = _git(folder, "rev-parse", "--short=12", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no", ":/", ":(exclude,top)bench/results")
    if not commit:
        return None
    commit += "+unknown" if changes is None else "+changes" if changes else ""
    root = _git(folder, "rev-parse", "--show-toplevel")
    stale = compiled is not None and root is not None and sources_digest(Path(root)) != compiled
    return commit + ("+stale-core" if stale else "")


def sources_digest(root: Path) -> str:
    """SHA-256 of what the core is compiled from, in hexadecimal: as cmake/sources_digest.cmake gives it to the core."""
    listing = ""
    files = (file for folder in _SOURCES for file in (root / folder).rglob("*") if file.suffix in _ENDINGS)
    for name in sorted(file.relative_to(root).as_posix() for file in files):
        listing += f"{hashlib.sha256((root / name).read_bytes()).hexdigest()} {name}\n"
    return hashlib.sha256(listing.encode()).hexdigest()


def _git(folder: Path, *arguments: str) -> str | None:
    """What a git command prints; None if it fails."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return run.stdout.strip() if run.returncode == 0 else None
