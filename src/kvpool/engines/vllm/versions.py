"""Which releases of vLLM the connector was tested with. Its interface changes from release to release."""

from __future__ import annotations

import os
import re

from kvpool.errors import Unsupported

__all__ = ["ANY_VERSION", "TESTED", "check_version"]

TESTED = "0.32"
"""Releases 0.32.x; pyproject.toml and the Makefile name the same."""

ANY_VERSION = "KVPOOL_VLLM_ANY_VERSION"
"""The environment variable that lets another release in, at the user's risk."""


def check_version(version: str) -> None:
    """Refuses a release of vLLM that was not tested.

    Args:
        version: As ``vllm.__version__``.

    Raises:
        Unsupported: It is not 0.32.x, and the environment variable is not set.
    """
    numbers = re.match(r"(\d+\.\d+)(?:\.|$|[a-z+])", version)
    if (numbers and numbers[1] == TESTED) or os.environ.get(ANY_VERSION):
        return
    raise Unsupported(
        f"this is vLLM {version}; kvpool's connector was tested with {TESTED}.x. Install that release, or a newer "
        f"kvpool, or set {ANY_VERSION}=1 to go on at your own risk",
        version=version,
        tested=TESTED,
    )
