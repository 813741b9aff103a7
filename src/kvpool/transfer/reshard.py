"""Instances of different parallelism: which rank sends what to which rank (MemServe §4.3).

A block of a model that runs on several ranks is divided among them: pipeline parallelism gives each stage a range of
layers, tensor parallelism each rank of a stage a range of KV heads. If there are fewer KV heads than ranks,
neighbouring ranks hold the same head. `ParallelConfig` describes a division, and `plan_reshard` plans what to send
between two different ones. The planner is in C++ (cpp/kvpool/transfer/reshard.h, with the invariants of a plan).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import EllipsisType
from typing import Any, Final, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from kvpool import _core
from kvpool.arguments import int_from, shown
from kvpool.errors import ArgumentError, ArgumentTypeError
from kvpool.types import KVLayout

__all__ = ["ParallelConfig", "RankSlice", "ReshardPair", "ReshardPlan", "plan_reshard"]

_RANKS_MAX: Final = 4096

_Shape: TypeAlias = "tuple[int, int, int, str, int, bool, bool]"
_Index: TypeAlias = "tuple[EllipsisType | slice, ...]"


def _number(name: str, value: object, minimum: int, maximum: int) -> int:
    number = int_from(value, f"ParallelConfig: {name}")
    if not minimum <= number <= maximum:
        raise ArgumentError(
            f"ParallelConfig: {name} is {shown(number)}; it must be from {minimum} to {maximum}",
            value=number,
            maximum=maximum,
        )
    return number


def _shape(layout: KVLayout) -> _Shape:
    if not isinstance(layout, KVLayout):
        raise ArgumentTypeError(
            f"only a KVLayout says what layers and heads a block has; this is a {type(layout).__name__}"
        )
    return layout._numbers


@dataclass(frozen=True)
class RankSlice:
    """What one rank holds of each block.

    Attributes:
        rank: Number of the rank: stage * tp + tp_rank.
        stage: Pipeline stage.
        tp_rank: Rank within the stage.
        layers: Layers of the model that the rank holds.
        heads: KV heads of the model that the rank holds.
        replica: Its number among the ranks with the same content; 0 if there is only one.
        replicas: How many ranks have the same content.
        layout: Layout of the rank's pool; None for a stage that has no layer.
    """

    rank: int
    stage: int
    tp_rank: int
    layers: range
    heads: range
    replica: int
    replicas: int
    layout: KVLayout | None

    @property
    def index(self) -> _Index:
        """Takes the slice out of an array that ends in `layout.shape` of the whole block: ``kv[slice.index]``."""
        heads = slice(self.heads.start, self.heads.stop)
        tokens_first = self.layout is not None and self.layout.dims == "NHD"
        inner = (slice(None), heads) if tokens_first else (heads, slice(None))
        layers = slice(self.layers.start, self.layers.stop)
        halves = () if self.layout is not None and self.layout.pages == "fused" else (slice(None),)
        return (..., layers, *halves, *inner, slice(None))


@dataclass(frozen=True)
class ParallelConfig:
    """How a model is divided among ranks.

    Ranks are numbered as in vLLM, SGLang and Megatron: the tensor-parallel rank runs fastest.

    Attributes:
        tp: Tensor-parallel ranks of a stage. It divides the number of KV heads, or is a multiple of it.
        pp: Pipeline stages.
        split: Which stages take the remaining layers when `pp` does not divide their number. "vllm": one each for the
            stages before the last one, backwards from there (5 over 4 is 1, 1, 2, 1). "sglang": one each for the last
            stages (1, 1, 1, 2).
        stage_layers: Layers of each stage, if neither rule applies; the values of `VLLM_PP_LAYER_PARTITION` and
            `SGLANG_PP_LAYER_PARTITION`. A stage may have 0.
    """

    tp: int = 1
    pp: int = 1
    split: Literal["vllm", "sglang"] = "vllm"
    stage_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Checks every value that can be checked without a layout.

        Raises:
            ArgumentError: A number or name is out of range.
            ArgumentTypeError: A value has the wrong type.
        """
        for name in ("tp", "pp"):
            object.__setattr__(self, name, _number(name, getattr(self, name), 1, _RANKS_MAX))
        if self.tp * self.pp > _RANKS_MAX:
            raise ArgumentError(
                f"ParallelConfig: {self.tp} x {self.pp} are {self.tp * self.pp} ranks; at most {_RANKS_MAX}",
                value=self.tp * self.pp,
                maximum=_RANKS_MAX,
            )
        if self.split not in ("vllm", "sglang"):
            raise ArgumentError(f"ParallelConfig: split is {self.split!r}; it must be one of vllm, sglang")
        if self.stage_layers is None:
            return
        given = cast(object, self.stage_layers)
        if isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
            raise ArgumentTypeError(f"ParallelConfig: stage_layers must be a tuple of ints, not {type(given).__name__}")
        stages = tuple(_number("stage_layers", layers, 0, 1 << 20) for layers in given)
        if len(stages) != self.pp:
            raise ArgumentError(
                f"ParallelConfig: the layers of {len(stages)} stages are given, and there are {self.pp} stages",
                given=len(stages),
                needed=self.pp,
            )
        object.__setattr__(self, "stage_layers", stages)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp

    def slices(self, layout: KVLayout) -> tuple[RankSlice, ...]:
        """What each rank holds of a block.

        Args:
            layout: Layout of the whole block, as if one rank held it.

        Raises:
            ArgumentError: The heads cannot be shared evenly, or the stages do not have the layers of the model.
        """
        return tuple(
            RankSlice(
                rank,
                stage,
                tp_rank,
                range(layer, layer + layers),
                range(head, head + heads),
                replica,
                replicas,
                replace(layout, layers=layers, kv_heads=heads) if layers else None,
            )
            for rank, stage, tp_rank, layer, layers, head, heads, replica, replicas in _core._rank_slices(
                _shape(layout), self._core_tuple()
            )
        )

    def _core_tuple(self) -> tuple[int, int, str, tuple[int, ...]]:
        return self.tp, self.pp, self.split, self.stage_layers or ()


@dataclass(frozen=True)
class ReshardPair:
    """What one sending rank writes into one receiving rank, for each block.

    Attributes:
        from_rank: The sender.
        to_rank: The receiver.
        bytes: Of one block.
        strips: uint64 array of the shape (n, 3): offset in the sender's content of the block, offset in the receiver's,
            number of bytes. Read-only. Rows ascend in the first two columns, and no two can be joined.
    """

    from_rank: int
    to_rank: int
    bytes: int
    strips: npt.NDArray[np.uint64] = field(repr=False, compare=False)


@dataclass(frozen=True)
class ReshardPlan:
    """Which rank sends what to which rank. One plan serves any number of blocks between two instances.

    Attributes:
        layout: Of the whole block at the sender.
        sender: The sender's division.
        receiver: The receiver's division.
        senders: What each rank of the sender holds.
        receivers: What each rank of the receiver will hold.
        pairs: By (from_rank, to_rank), without empty ones.
    """

    layout: KVLayout
    sender: ParallelConfig
    receiver: ParallelConfig
    senders: tuple[RankSlice, ...] = field(repr=False)
    receivers: tuple[RankSlice, ...] = field(repr=False)
    pairs: tuple[ReshardPair, ...] = field(repr=False)

    def of_sender(self, rank: int) -> tuple[ReshardPair, ...]:
        """What a rank of the sender has to write."""
        return tuple(pair for pair in self.pairs if pair.from_rank == rank)

    def of_receiver(self, rank: int) -> tuple[ReshardPair, ...]:
        """What a rank of the receiver gets: together, each byte of its blocks once."""
        return tuple(pair for pair in self.pairs if pair.to_rank == rank)

    @property
    def strips(self) -> int:
        """Strips of all pairs: pieces to write for each block."""
        return sum(len(pair.strips) for pair in self.pairs)

    @property
    def bytes_sent(self) -> tuple[int, ...]:
        """Bytes that each rank of the sender writes for each block."""
        return tuple(sum(pair.bytes for pair in self.of_sender(rank)) for rank in range(self.sender.ranks))

    def layer_strips(self, pair: ReshardPair, layer: int) -> npt.NDArray[np.uint64]:
        """The part of a pair's strips that can be sent when the sender has computed a layer of the model.

        Args:
            pair: One of `pairs`.
            layer: Number of the layer in the model. The result is empty for layers of another stage than the sender's.
        """
        held = self.senders[pair.from_rank]
        if layer not in held.layers or held.layout is None:
            return pair.strips[:0]
        layer_bytes = held.layout.block_bytes // held.layout.layers
        begin = (layer - held.layers.start) * layer_bytes
        return _core._clip_strips(pair.strips, begin, begin + layer_bytes)

    def apply(
        self,
        senders: Sequence[npt.NDArray[Any] | None],
        receivers: Sequence[npt.NDArray[Any] | None],
        from_blocks: Sequence[int] | npt.NDArray[np.int64],
        to_blocks: Sequence[int] | npt.NDArray[np.int64],
    ) -> None:
        """Executes the plan on arrays of this process: a readable reference for what ranks do over a network.

        Args:
            senders: An array for each rank, of the shape [block, *layout.shape] with the layout of its slice;
                `pool.tensor(...)` of ranks in one process. None for a rank that holds no layer.
            receivers: Likewise; these are written.
            from_blocks: Block numbers at the sender: the same for all ranks.
            to_blocks: As many block numbers at the receiver.

        Raises:
            ArgumentError: An array does not have the shape and type of its rank's blocks.
        """
        if len(from_blocks) != len(to_blocks):
            raise ArgumentError(
                f"{len(from_blocks)} blocks cannot become {len(to_blocks)}",
                given=len(to_blocks),
                needed=len(from_blocks),
            )
        _check_arrays("sender", senders, self.senders)
        _check_arrays("receiver", receivers, self.receivers)
        taken = [_contents(array, from_blocks) for array in senders]
        for slice_, array in zip(self.receivers, receivers, strict=True):
            if slice_.layout is None or array is None:
                continue
            contents = np.empty((len(to_blocks), slice_.layout.block_bytes), np.uint8)
            for pair in self.of_receiver(slice_.rank):
                for start, target, size in pair.strips.tolist():
                    contents[:, target : target + size] = taken[pair.from_rank][:, start : start + size]
            array[np.asarray(to_blocks, np.int64)] = contents.view(array.dtype).reshape(-1, *slice_.layout.shape)

    def __str__(self) -> str:
        """A readable line for each pair."""
        lines = [
            f"TP {self.sender.tp} PP {self.sender.pp} -> TP {self.receiver.tp} PP {self.receiver.pp}: "
            f"{self.strips} strips a block, {len(self.pairs)} pairs"
        ]
        lines += [
            f"  rank {pair.from_rank} -> rank {pair.to_rank}: {pair.bytes} bytes in {len(pair.strips)}"
            for pair in self.pairs
        ]
        return "\n".join(lines)


def plan_reshard(
    layout: KVLayout, sender: ParallelConfig, receiver: ParallelConfig, *, receiver_layout: KVLayout | None = None
) -> ReshardPlan:
    """Plans a transfer between two instances of the same model with different divisions.

    Args:
        layout: Of the whole block at the sender, as if one rank held it.
        sender: The sender's division.
        receiver: The receiver's division.
        receiver_layout: Of the whole block at the receiver, if different. Only `order` may differ.

    Raises:
        LayoutMismatch: The blocks of the two have different contents.
        ArgumentError: A configuration does not fit the layout, or the plan would have millions of strips.
        ArgumentTypeError: A value of the wrong type.
    """
    for side, spread in (("sender", sender), ("receiver", receiver)):
        if not isinstance(spread, ParallelConfig):
            raise ArgumentTypeError(f"{side} must be a ParallelConfig, not {type(spread).__name__}")
    other = layout if receiver_layout is None else receiver_layout
    pairs = _core._plan_reshard(_shape(layout), sender._core_tuple(), _shape(other), receiver._core_tuple())
    for _, _, _, strips in pairs:
        strips.flags.writeable = False
    return ReshardPlan(
        layout,
        sender,
        receiver,
        sender.slices(layout),
        receiver.slices(other),
        tuple(ReshardPair(*pair) for pair in pairs),
    )


def _check_arrays(side: str, arrays: Sequence[npt.NDArray[Any] | None], slices: tuple[RankSlice, ...]) -> None:
    if len(arrays) != len(slices):
        raise ArgumentError(
            f"the {side} has {len(slices)} ranks; arrays of {len(arrays)} are given",
            given=len(arrays),
            needed=len(slices),
        )
    for slice_, array in zip(slices, arrays, strict=True):
        layout = slice_.layout
        if layout is None:
            continue
        if array is None or array.shape[1:] != layout.shape or array.dtype != layout.numpy_dtype:
            found = "nothing" if array is None else f"{array.dtype} {array.shape}"
            raise ArgumentError(
                f"rank {slice_.rank} of the {side} holds blocks of {layout.numpy_dtype} {layout.shape}; "
                f"given is {found}"
            )


def _contents(array: npt.NDArray[Any] | None, blocks: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    """A copy of the blocks' contents, a row of bytes each."""
    if array is None:
        return np.empty((len(blocks), 0), np.uint8)
    taken = np.ascontiguousarray(array[np.asarray(blocks, np.int64)])
    return taken.view(np.uint8).reshape(len(blocks), math.prod(array.shape[1:]) * array.itemsize)
