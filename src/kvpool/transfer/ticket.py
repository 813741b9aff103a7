"""The ticket with which a worker process becomes a rank of a logical instance: text, for any way of sending."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from kvpool.errors import ArgumentError, ArgumentTypeError
from kvpool.transfer.reshard import ParallelConfig
from kvpool.types import KVLayout

__all__ = ["RankTicket"]

_FORMAT = 1
_SHOWN = 40  # characters of what is no ticket
_LAYOUT_FIELDS = ("layers", "kv_heads", "head_dim", "dtype", "block_tokens", "order", "dims", "pages")


@dataclass(frozen=True)
class RankTicket:
    """One rank of one incarnation of an instance. It holds no secret.

    Attributes:
        address: Where the scheduler listens.
        incarnation: Number of the incarnation of the scheduler.
        instance: The number in the addresses of its blocks.
        name: The scheduler's name among its peers.
        rank: Number of the rank.
        layout: Of the whole block.
        parallel: Its division among the ranks.
        hbm_blocks: Blocks in the device tier, the same in every rank.
        dram_blocks: Blocks in the host tier.
    """

    address: str
    incarnation: int
    instance: int
    name: str
    rank: int
    layout: KVLayout
    parallel: ParallelConfig
    hbm_blocks: int
    dram_blocks: int

    def text(self) -> str:
        """As one line of JSON."""
        fields = {
            "kvpool_rank": _FORMAT,
            "address": self.address,
            "incarnation": self.incarnation,
            "instance": self.instance,
            "name": self.name,
            "rank": self.rank,
            "layout": {name: getattr(self.layout, name) for name in _LAYOUT_FIELDS},
            "parallel": asdict(self.parallel),
            "hbm_blocks": self.hbm_blocks,
            "dram_blocks": self.dram_blocks,
        }
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def read(cls, text: object) -> RankTicket:
        """Reads the result of text().

        Raises:
            ArgumentTypeError: It is no str.
            ArgumentError: It is no ticket, or one of another version.
        """
        if not isinstance(text, str):
            raise ArgumentTypeError(f"ticket must be the str that Ranks.export returned, not {type(text).__name__}")
        try:
            fields: dict[str, Any] = json.loads(text)
            version = fields.pop("kvpool_rank")
            stages = fields["parallel"]["stage_layers"]
            fields["parallel"]["stage_layers"] = None if stages is None else tuple(stages)
            fields["parallel"] = ParallelConfig(**fields["parallel"])
            fields["layout"] = KVLayout(**fields["layout"])
            ticket = cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            begin = repr(text[:_SHOWN]) + ("..." if len(text) > _SHOWN else "")
            raise ArgumentError(f"ticket must be the text that Ranks.export returned, not {begin}") from error
        if version != _FORMAT:
            raise ArgumentError(f"a ticket of format {version}; this kvpool reads {_FORMAT}")
        return ticket
