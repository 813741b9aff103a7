"""Which releases of an engine its folder was tested with. Engines change their interfaces from release to release."""

from __future__ import annotations

import os
import re

from kvpool.errors import Unsupported

__all__ = ["ANY_VERSION", "check_version"]

ANY_VERSION = "KVPOOL_ANY_ENGINE_VERSION"
"""The environment variable that lets other releases in, at the user's risk."""


def check_version(engine: str, version: str, tested: str) -> None:
    """Refuses a release that was not tested.

    Args:
        engine: The name for the message.
        version: The installed release, as ``engine.__version__``.
        tested: The first numbers of those that were, such as "0.32".

    Raises:
        Unsupported: It is another one, and the environment variable is not set.
    """
    found = re.match(r"\d+(?:\.\d+)*", version)
    numbers = found[0].split(".") if found else []
    wanted = tested.split(".")
    if numbers[: len(wanted)] == wanted or os.environ.get(ANY_VERSION):
        return
    raise Unsupported(
        f"this is {engine} {version}; kvpool was tested with {tested}.x. Install that release, or a newer kvpool, or "
        f"set {ANY_VERSION}=1 to go on at your own risk"
    )
