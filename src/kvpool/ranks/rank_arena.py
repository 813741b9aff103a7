"""A rank of a logical instance: the memory of its part of every block, in a worker process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, overload

from kvpool import _core
from kvpool.errors import ArgumentError, ArgumentTypeError, LayoutMismatch, StateError
from kvpool.pool import Pool
from kvpool.ranks.rank_blocks import RankBlocks
from kvpool.transfer.gpu_routes import tell_unused
from kvpool.transfer.libraries import nccl_library, ucx_library
from kvpool.transfer.reshard import RankSlice
from kvpool.transfer.ticket import RankTicket
from kvpool.types import HBM, CudaStream, KVLayout, Medium, OneMedium

__all__ = ["RankArena"]

# Settings of the links to peers. The pool below only provides memory.
_LINK_SETTINGS = (
    "secret", "model", "lease_s", "transfer_threads", "trusted_network", "prefer_unix_socket", "nccl_pass_bytes",
    "nccl_init_s", "nccl_thread_blocks",
)  # fmt: skip


class RankArena:
    """A rank of a logical instance (MemServe §4.3): the memory of its layers and heads of every block.

    The scheduler's pool, made with ``parallel=``, allocates and indexes for all ranks: a block has the same number in
    each. The rank reads and writes its part of the blocks that the scheduler names. When blocks go to another
    instance, C++ sends each rank's part to the ranks of that instance.

    ```
    pool = kvpool.Pool(layout, hbm_blocks=64, parallel=ParallelConfig(tp=2))   # the scheduler
    ticket = pool.ranks.export(0)                                              # text; send it to the worker

    with kvpool.RankArena.join(ticket) as rank:                                # the worker of rank 0
        kv = rank.tensor().numpy()                                             # [block, layer, k/v, head, token, dim]
    ```

    Thread-safe. It belongs to the process that joined. Use it in a ``with``, or call ``close()``. After that, or when
    the process dies, the instance is lost, because every block has lost a part.

    Attributes:
        rank: The number of the rank.
        slice: The layers and heads that it holds.
        layout: The layout of its part of a block.
        instance: The name of the scheduler's pool.
    """

    def __init__(
        self, ticket: RankTicket, memory: Pool, blocks: RankBlocks | None, node: _core.RankNode, part: RankSlice
    ) -> None:
        """Use `RankArena.join`."""
        self._memory = memory
        self._blocks = blocks  # None: the memory is somebody else's pool
        self._node = node
        self.rank = ticket.rank
        self.slice = part
        self.layout: KVLayout = _layout_of(ticket, part)
        self.instance = ticket.name

    @classmethod
    def join(
        cls,
        ticket: str,
        *,
        hbm: Sequence[Any] | None = None,
        block_dim: int = 0,
        device: str = "cpu",
        memory: Pool | None = None,
        only_dram: bool = False,
        listen: str | None = None,
        timeout: float | None = None,
        **settings: Any,
    ) -> RankArena:
        """Allocates or adopts the memory, and joins the scheduler.

        Args:
            ticket: What `Ranks.export` returned.
            hbm: The engine's tensors of this rank's layers, as for `Pool`.
            block_dim: As for `Pool`.
            device: As for `Pool`: the device of this rank's part of HBM. Ranks of one instance may have different
                devices. Before a rank on a GPU sends or moves blocks it waits for all earlier work of the GPU.
            memory: Instead of `hbm`, `block_dim`, `device` and settings: a pool with this rank's part of all blocks,
                for a worker that has memory before there is a scheduler. The rank gives peers access to that memory,
                whatever the pool knows of its blocks, and has its settings. Close the rank before the pool. Until then
                the pool cannot be suspended.
            only_dram: With `memory`: the scheduler gives out no block of HBM, because the engine allocates these and
                tells the scheduler of none. So the pool can be suspended.
            listen: The address for ranks of peers, if they may run on other hosts: "tcp:HOST:PORT", port 0 for any. The
                default is a Unix socket, for this host only. TCP needs a secret.
            timeout: Seconds; None: the setting ``timeout_s``.
            **settings: Fields of kvpool.Settings; `secret` must be the scheduler's.

        Raises:
            ArgumentError, ArgumentTypeError: The ticket or a setting is invalid; or `memory` is given, and something in
                whose place it stands.
            PeerLost: The scheduler no longer listens, or another instance listens at its address.
            AuthError: The secrets differ.
            StateError: The rank has already joined; or `memory` is suspended.
            LayoutMismatch: Adopted tensors, or `memory`, do not hold this rank's part of as many blocks.
            OutOfMemory: The machine, or the GPU, has not enough memory.
            Unsupported: There is no such device; or `memory` is a model's pool of a space, whose blocks are numbered by
                units; or this rank cannot have a requested route: "nccl" without NCCL or HBM on a GPU, or "ucx" if UCX
                can register none of its memory.
            DeadlineExceeded: The scheduler did not answer in time.
        """
        known = RankTicket.read(ticket)
        part = known.parallel.slices(known.layout)[known.rank]
        if memory is not None:
            _check_memory(memory, _layout_of(known, part), hbm is not None or block_dim or device != "cpu" or settings)
            if memory.suspended and not only_dram:
                raise StateError("HBM of memory is suspended until resume()")
            rank = cls(known, memory, None, _join(known, memory, listen, timeout), part)
            if not only_dram:
                memory._ranks_here.add(rank)
            return rank
        memory = Pool(
            _layout_of(known, part),
            hbm_blocks=0 if hbm is not None else known.hbm_blocks,
            dram_blocks=known.dram_blocks,
            device=device,
            hbm=hbm,
            block_dim=block_dim,
            **settings | {"zero_on_alloc": False},  # the scheduler allocates
        )
        try:
            return cls(known, memory, RankBlocks(memory), _join(known, memory, listen, timeout), part)
        except BaseException:
            memory.close()
            raise

    def tensor(self, medium: OneMedium = HBM) -> _core.KVTensor:
        """This rank's part of all blocks of a medium, as `Pool.tensor`. Index it with ``kvpool.block_ids(addrs)``."""
        return self._memory.tensor(medium)

    @overload
    def copy(
        self,
        source: Sequence[int],
        target: Sequence[int],
        medium: OneMedium,
        *,
        stream: CudaStream | None = None,
        wait: Literal[True] = True,
    ) -> int: ...
    @overload
    def copy(
        self,
        source: Sequence[int],
        target: Sequence[int],
        medium: OneMedium,
        *,
        stream: CudaStream | None = None,
        wait: bool,
    ) -> int | _core.BlockCopy: ...
    def copy(
        self,
        source: Sequence[int],
        target: Sequence[int],
        medium: OneMedium,
        *,
        stream: CudaStream | None = None,
        wait: bool = True,
    ) -> int | _core.BlockCopy:
        """Copies this rank's part of blocks between its HBM and its DRAM. Thread-safe.

        For an engine whose messages to its workers say what to copy, so that each worker can order the copies with its
        own steps and streams. The scheduler's pool knows the blocks and their states, and hears nothing of this: it
        names blocks that nobody else writes until every rank has copied its part. See ``filled`` of `Pool.insert`.

        Args:
            source: Numbers of the blocks to read: the scheduler's ``kvpool.block_ids(addrs)``, or the engine's own.
            target: As many numbers of blocks to write, in the other medium.
            medium: The medium of `target`: kvpool.DRAM or kvpool.HBM.
            stream: As in `Pool.copy`.
            wait: As in `Pool.copy`.

        Returns:
            How many blocks were copied; with ``wait=False`` the handle that `Pool.copy` returns.

        Raises:
            ArgumentError, ArgumentTypeError: There is no such block or medium; other numbers of sources and targets; a
                target twice.
            StateError: Another copy of this rank writes one of the blocks, or reads one of the targets. Or the rank has
                no blocks in one of the media, or was given its `memory`, whose own copy is to be used.
            PeerLost, DeviceLost, ClosedError: The rank is lost.
            OutOfMemory: No memory for the copy.
        """
        self.check()
        if self._blocks is None:
            raise StateError("the memory of this rank is a pool that was given: use its copy()")
        read = self._blocks.other_than(medium)
        return self._memory.copy(
            self._blocks.addresses(source, read),
            self._blocks.addresses(target, Medium(medium)),
            stream=stream,
            wait=wait,
        )

    @property
    def address(self) -> str:
        """The address that ranks of peers connect to."""
        return self._node.address

    @property
    def lost(self) -> BaseException | None:
        """Why the rank is lost: its scheduler is gone, its GPU has failed, or it was closed. None while it works."""
        return self._node.lost()

    def wait_lost(self, timeout: float | None = None) -> bool:
        """Waits until the rank is lost. For workers that have nothing else to wait for.

        Args:
            timeout: Seconds; None: the setting ``timeout_s``.

        Returns:
            False at the timeout.
        """
        return self._node.wait_lost(self._memory.settings.timeout_s if timeout is None else timeout)

    def check(self) -> None:
        """Raises PeerLost, DeviceLost or ClosedError if the rank is lost."""
        why = self.lost
        if why is not None:
            raise why

    def close(self) -> None:
        """Leaves the instance, which is then lost. Views of the memory stay valid. Idempotent."""
        self._node.close()
        self._memory._ranks_here.discard(self)
        if self._blocks is not None:
            self._memory.close()

    def __enter__(self) -> RankArena:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()

    def __repr__(self) -> str:
        """The instance, and the part of its blocks."""
        layers, heads = self.slice.layers, self.slice.heads
        state = "lost" if self.lost is not None else "joined"
        return (
            f"<RankArena {self.rank} of {self.instance}: layers {layers.start}-{layers.stop - 1}, "
            f"heads {heads.start}-{heads.stop - 1}, {state}>"
        )


def _layout_of(ticket: RankTicket, part: RankSlice) -> KVLayout:
    if part.layout is None:
        raise ArgumentError(f"rank {ticket.rank} holds no layer: it cannot join", rank=ticket.rank)
    return part.layout


def _check_memory(memory: object, layout: KVLayout, more: object) -> None:
    if not isinstance(memory, Pool):
        raise ArgumentTypeError(f"memory must be a Pool, not {type(memory).__name__}")
    if more:
        raise ArgumentError("memory stands in the place of hbm, block_dim, device and settings: give one or the other")
    if memory.kv_layout != layout:
        raise LayoutMismatch(f"the rank's part of a block is {layout}, and memory has blocks of {memory.kv_layout}")


def _join(ticket: RankTicket, memory: Pool, listen: str | None, timeout: float | None) -> _core.RankNode:
    wanted = memory.settings
    node = _core._join_rank(
        memory,
        name=f"{ticket.name}/rank-{ticket.rank}",
        routes=list(wanted.routes),
        ucx=ucx_library(wanted.ucx),
        nccl=nccl_library(wanted.nccl),
        scheduler=ticket.address,
        incarnation=ticket.incarnation,
        instance=ticket.instance,
        rank=ticket.rank,
        listen=listen or "",
        timeout=timeout,
        **{setting: getattr(wanted, setting) for setting in _LINK_SETTINGS},
    )
    tell_unused(memory, wanted)
    return node
