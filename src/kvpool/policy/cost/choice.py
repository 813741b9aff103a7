"""Transfer or recompute: eq. 2 of MemServe §5.3.1."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvpool.policy.cost.link import KVTransfer

__all__ = ["ExecModel", "FetchChoice", "fetch_or_recompute"]


class ExecModel(Protocol):
    """Whatever predicts a prefill: `CostModel`, `ArchitectureModel`, a table."""

    def exec_s(self, tokens: int, cached: int = 0) -> float:
        """Seconds of a prefill of `tokens`, of which `cached` are cached."""


class FetchChoice(NamedTuple):
    """What fetching would cost, and what it would save.

    Attributes:
        fetch: Whether it pays: transfer_s <= saved_s.
        transfer_s: transfer(y_p, y'_p).
        saved_s: exec(x, y_p) - exec(x, y'_p).
    """

    fetch: bool
    transfer_s: float
    saved_s: float


def fetch_or_recompute(
    model: ExecModel, transfer: KVTransfer | None, tokens: int, cached: int, elsewhere: int
) -> FetchChoice:
    """Whether an instance should fetch what another holds more of a prompt, or compute it.

    Args:
        model: Of the instance that will compute.
        transfer: From the other one to it; None where there is no way, and then it computes.
        tokens: Length of the prompt, x.
        cached: Tokens that the instance holds, x * y_p.
        elsewhere: Tokens that the other one holds, x * y'_p. Nothing is fetched when these are not more.
    """
    elsewhere = min(elsewhere, tokens)
    if transfer is None or elsewhere <= cached:
        return FetchChoice(False, 0.0, 0.0)
    transfer_s = transfer.time_s(elsewhere - cached)
    saved_s = model.exec_s(tokens, cached) - model.exec_s(tokens, elsewhere)
    return FetchChoice(transfer_s <= saved_s, transfer_s, saved_s)
