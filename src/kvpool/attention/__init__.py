"""Attention where the KV cache lies: the results of `Pool.sequence` and `Pool.attend`, and of other kernels."""

from kvpool._core import KVSequence, PartialAttention
from kvpool.attention import moving as _moving  # noqa: F401  adds methods to KVSequence
from kvpool.attention.handle import Attend
from kvpool.types import AttendPlan, SequencePlan

__all__ = ["Attend", "AttendPlan", "KVSequence", "PartialAttention", "SequencePlan"]
