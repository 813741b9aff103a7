"""From which instance what another one computes is fetched instead (MemServe eq. 2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvpool.policy.cost import KVTransfer
from kvpool.policy.routing.types import Fetch, Holder

__all__ = ["TransferModel", "best_fetch"]

TransferModel = KVTransfer | Callable[[int, int], KVTransfer | None]  # from an instance to another


def best_fetch(
    instance: int,
    holders: Sequence[Holder],
    computed: Callable[[Holder], int],
    exec_s: Callable[[int], float],
    transfer: TransferModel,
) -> Fetch | None:
    """The holder from which fetching gains the most, if any does: of what is computed already.

    Args:
        instance: The one that would compute.
        holders: Those that hold more, and which tokens.
        computed: How many of these tokens a holder has computed.
        exec_s: Seconds to compute the prompt with so many tokens cached.
        transfer: The cost of moving them.
    """
    best: Fetch | None = None
    best_gain_s, last_stop = 0.0, 0
    for holder in holders:
        source, start, _ = holder
        stop = computed(holder)
        if stop <= start:
            continue
        if callable(transfer):
            link = transfer(source, instance)
        elif stop != last_stop:  # over equal links, equal lengths gain the same
            link, last_stop = transfer, stop
        else:
            continue
        if link is None:
            continue
        transfer_s = link.time_s(stop - start)
        saved_s = exec_s(start) - exec_s(stop)
        if saved_s - transfer_s > best_gain_s or (best is None and saved_s == transfer_s):
            best, best_gain_s = Fetch(source, start, stop, transfer_s, saved_s), saved_s - transfer_s
    return best
