"""Transfer or recompute: eq. 2 of MemServe §5.3.1."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvpool.policy.cost.link import KVTransfer

__all__ = ["ExecModel", "FetchChoice", "fetch_or_recompute"]


class ExecModel(Protocol):
    """A predictor of prefills: `CostModel`, `ArchitectureModel`, a table."""

    def exec_s(self, tokens: int, cached: int = 0) -> float:
        """Seconds of a prefill of `tokens`, of which `cached` are cached."""


class FetchChoice(NamedTuple):
    """The cost of fetching, and its saving.

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
    """Whether an instance should fetch the further part of a prompt that another instance holds, or compute it.

    Args:
        model: Of the instance that will compute.
        transfer: From the other instance to it; None if there is no route, so that it computes.
        tokens: Length of the prompt, x.
        cached: Tokens that the instance holds, x * y_p.
        elsewhere: Tokens that the other instance holds, x * y'_p. If not more, nothing is fetched.
    """
    elsewhere = min(elsewhere, tokens)
    if transfer is None or elsewhere <= cached:
        return FetchChoice(False, 0.0, 0.0)
    transfer_s = transfer.time_s(elsewhere - cached)
    saved_s = model.exec_s(tokens, cached) - model.exec_s(tokens, elsewhere)
    return FetchChoice(transfer_s <= saved_s, transfer_s, saved_s)
