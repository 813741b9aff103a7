"""The ranks of a logical instance: the part of every block that a worker process holds."""

from kvpool.ranks.rank_arena import RankArena

__all__ = ["RankArena"]
