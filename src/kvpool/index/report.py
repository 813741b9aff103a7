"""Explains why a match ends where it does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvpool.types import Medium, media

__all__ = ["MatchReport"]

# Tokens asked for, blocks found, tokens that agree beyond, MatchEnd, addresses, (other namespace, blocks) ...
CoreReport: TypeAlias = tuple[int, int, int, int, npt.NDArray[np.uint64], list[tuple[str, int]]]

# As MatchEnd in cpp/kvpool/index/prompt_index.h.
REASONS: Final = ("complete", "no_namespace", "diverges", "nothing_beyond")


@dataclass(frozen=True)
class MatchReport:
    """What `Pool.match` would find for a prompt, and why it ends there. `str()` gives a readable text.

    Attributes:
        requested_tokens: Tokens of the request.
        matched_tokens: Tokens cached, in whole blocks.
        partial_tokens: Tokens of the next block that agree with a cached block.
        block_tokens: Tokens a block.
        reason: "complete": every whole block is cached; "no_namespace": nothing is stored under the namespace;
            "diverges": cached prompts continue with other tokens; "nothing_beyond": no cached prompt continues.
        addrs: uint64, where the cached blocks lie; not pinned.
        elsewhere: Other namespaces that hold more of these tokens, and how many tokens each.
    """

    requested_tokens: int
    matched_tokens: int
    partial_tokens: int
    block_tokens: int
    reason: str
    addrs: npt.NDArray[np.uint64]
    elsewhere: dict[str, int] = field(default_factory=dict)

    @classmethod
    def from_core(cls, block_tokens: int, found: CoreReport, opaque: bool = False) -> MatchReport:
        """From the result of the core's `_explain`. Leaves out opaque values, because they are no addresses."""
        requested, blocks, partial, end, addrs, elsewhere = found
        return cls(
            requested_tokens=requested,
            matched_tokens=blocks * block_tokens,
            partial_tokens=partial,
            block_tokens=block_tokens,
            reason=REASONS[end],
            addrs=addrs[:0] if opaque else addrs,
            elsewhere={name: held * block_tokens for name, held in elsewhere},
        )

    def __str__(self) -> str:
        """A few lines of text."""
        blocks = self.matched_tokens // self.block_tokens
        lines = [
            f"{self.matched_tokens} of {self.requested_tokens} tokens are cached ({blocks} blocks{self._places()})."
        ]
        lines.append(self._why())
        for namespace, tokens in self.elsewhere.items():
            lines.append(
                f"Namespace {namespace!r} holds {tokens} of them: was the prompt stored under another namespace?"
            )
        return "\n".join(lines)

    def _places(self) -> str:
        if not len(self.addrs):
            return ""
        kinds, counts = np.unique(media(self.addrs), return_counts=True)
        places = (
            f"{count} in {Medium(kind).name}" for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True)
        )
        return ": " + ", ".join(places)

    def _why(self) -> str:
        left = self.requested_tokens - self.matched_tokens
        if self.reason == "complete":
            if left == 0:
                return "The whole prompt is cached."
            agreeing = f"{self.partial_tokens} of it agree"
            return f"What is left ({left}) does not fill a block of {self.block_tokens}; {agreeing}."
        if self.reason == "no_namespace":
            return "Nothing is stored under this namespace."
        if self.reason == "diverges":
            at = self.matched_tokens + self.partial_tokens
            return (
                f"Cached prompts go on differently: token {at} is the first that none of them has there "
                f"({self.partial_tokens} tokens of that block agree, and only whole blocks are reused)."
            )
        return f"No cached prompt goes beyond token {self.matched_tokens}: it was never stored, or its end was evicted."
