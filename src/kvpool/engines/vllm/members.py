"""How vLLM's engines are members of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvpool.cluster import Role
from kvpool.engines.membership import Membership, secret_of

__all__ = ["ROLES", "Membership", "secret_of"]

ROLES: Final[Mapping[str, Role]] = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
"""By vLLM's ``kv_role``."""
