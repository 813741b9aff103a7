"""The data-parallel ranks of one server as instances: each has a cache, and publishes its KV events apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from kvpool.control.router.settings import EventsSpec, InstanceSpec
from kvpool.errors import ArgumentError

__all__ = ["RANK_HEADERS", "by_rank"]

RANK_HEADERS: Final = (b"x-data-parallel-rank", b"x-override-routed-dp-rank")
"""That name the rank which is to answer: to vLLM, and to SGLang."""
_RANKS_MAX: Final = 1 << 10


def by_rank(
    specs: Iterable[InstanceSpec], events: Mapping[str, EventsSpec], ranks: Mapping[str, int]
) -> tuple[tuple[InstanceSpec, ...], dict[str, EventsSpec]]:
    """Puts an instance for each rank in place of the servers that have several; the names get "-dp0" and so on.

    Args:
        specs: The servers.
        events: Where they publish, by their names. Rank R of a server publishes at a port that is higher by R.
        ranks: How many ranks the servers have, by their names.

    Raises:
        ArgumentError: No such server, a wrong number, or an endpoint without a port.
    """
    servers, told, found = list(specs), dict(events), []
    if unknown := sorted(set(ranks) - {spec.name for spec in servers}):
        raise ArgumentError(f"data-parallel ranks of {', '.join(unknown)}: no such instance")
    for spec in servers:
        count = ranks.get(spec.name)
        if count is None:
            found.append(spec)
            continue
        if not 0 < count <= _RANKS_MAX:
            raise ArgumentError(f"instance {spec.name} has {count} data-parallel ranks; 1 to {_RANKS_MAX} are allowed")
        published = told.pop(spec.name, None)
        for rank in range(count):
            name = f"{spec.name}-dp{rank}"
            found.append(replace(spec, name=name, rank=rank))
            if published is not None:
                told[name] = published.of_rank(rank)
    return tuple(found), told
