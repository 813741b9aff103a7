"""How attention is carried out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["AttendPlan", "SequencePlan"]


@dataclass(frozen=True)
class SequencePlan:
    """How the attention over one sequence is shared between threads. It changes the speed, never the result.

    Attributes:
        way: "heads": the KV heads are shared out, and a thread reads all tokens of its heads, for up to 8,192 tokens.
            "leaves": the tokens are shared out as well, at leaves of 1,024 tokens, up to 32,768. "leaves_and_merges":
            the same, and several threads merge (DistAttention, section 5).
        head_groups: Into how many ranges the KV heads are divided.
        nodes: Into how many ranges the tokens are divided.
        there: Peers that compute a part, and over how many tokens each; the rest is computed here.
        mapped: Peers whose memory is read from here, and how many tokens of each.
        on_gpu: Over how many tokens this pool's GPU computes.
    """

    way: Literal["heads", "leaves", "leaves_and_merges"]
    head_groups: int
    nodes: int
    there: tuple[tuple[str, int], ...] = ()
    mapped: tuple[tuple[str, int], ...] = ()
    on_gpu: int = 0


@dataclass(frozen=True)
class AttendPlan:
    """How a call of `Pool.attend` is carried out.

    Attributes:
        kernel: The CPU's kernel, by instruction set and version: "avx512/1".
        gpu_kernel: That of the pool's GPU, "sm90/1"; None: attention reads no blocks there.
        threads: How many threads share the work.
        sequences: How each sequence's part is shared out.
    """

    kernel: str
    gpu_kernel: str | None
    threads: int
    sequences: tuple[SequencePlan, ...]
