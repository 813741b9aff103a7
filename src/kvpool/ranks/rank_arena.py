"""The rank's half of a logical instance: the memory of its part of every block, in a worker process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpool import _core
from kvpool.errors import ArgumentError
from kvpool.pool import Pool
from kvpool.transfer.gpu_routes import tell_unused
from kvpool.transfer.peers import nccl_library, ucx_library
from kvpool.transfer.reshard import RankSlice
from kvpool.transfer.ticket import RankTicket
from kvpool.types import HBM, KVLayout

__all__ = ["RankArena"]

# Settings of the pool that is only memory here, and of the links to peers.
_LINK_SETTINGS = (
    "secret", "model", "lease_s", "transfer_threads", "trusted_network", "unix_door", "nccl_pass_bytes", "nccl_init_s",
    "nccl_thread_blocks",
)  # fmt: skip


class RankArena:
    """A rank of a logical instance (MemServe §4.3): the memory of its layers and heads of every block.

    The scheduler's pool, made with ``parallel=``, allocates and indexes for all ranks: a block has the same number in
    each. The rank reads and writes its part of the blocks that the scheduler names; when blocks go to another
    instance, the ranks send their parts to its ranks by themselves, without Python's doing.

    ```
    pool = kvpool.Pool(layout, hbm_blocks=64, parallel=ParallelConfig(tp=2))   # the scheduler
    ticket = pool.export_rank(0)                                               # text; to the worker by any way

    with kvpool.RankArena.join(ticket) as rank:                                # the worker of rank 0
        kv = rank.tensor().numpy()                                             # [block, layer, k/v, head, token, dim]
    ```

    Thread-safe. It belongs to the process that joined. Use it in a ``with``, or call ``close()``: then the instance is
    lost, as it is when the process dies, because every block has lost a part.

    Attributes:
        rank: Number of the rank.
        slice: Which layers and heads it holds.
        layout: Of its part of a block.
        instance: The name of the scheduler's pool.
    """

    def __init__(self, ticket: RankTicket, memory: Pool, node: _core.RankNode, part: RankSlice) -> None:
        """Made by join."""
        self._memory = memory
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
        listen: str | None = None,
        timeout: float | None = 30.0,
        **settings: Any,
    ) -> RankArena:
        """Makes the memory, or adopts it, and joins the scheduler.

        Args:
            ticket: What `Pool.export_rank` returned.
            hbm: The engine's own tensors of this rank's layers, as for `Pool`.
            block_dim: As for `Pool`.
            device: As for `Pool`: where this rank's part of HBM lies. Ranks of one instance need not have the same. A
                rank on a GPU that is told to send or to move blocks waits for all that its GPU has been given by then.
            listen: Where ranks of peers connect to, if they may run on other hosts: "tcp:HOST:PORT", port 0 for any.
                By default a Unix socket, for this host alone. TCP needs a secret.
            timeout: Seconds; None: 30.
            **settings: Fields of kvpool.Settings; `secret` must be the scheduler's.

        Raises:
            ArgumentError, ArgumentTypeError: The ticket or a setting is none.
            PeerLost: Nobody listens there any more, or another instance does.
            AuthError: The secrets differ.
            StateError: That rank has joined already.
            LayoutMismatch: Adopted tensors do not hold this rank's part.
            OutOfMemory: The machine, or the GPU, has not enough memory.
            Unsupported: No such device, or a route that this rank cannot have: "nccl" without NCCL, or without HBM on a
                GPU; "ucx" where UCX takes none of its memory.
            DeadlineExceeded: The scheduler did not answer in time.
        """
        known = RankTicket.read(ticket)
        part = known.parallel.slices(known.layout)[known.rank]
        memory = Pool(
            _layout_of(known, part),
            hbm_blocks=0 if hbm is not None else known.hbm_blocks,
            dram_blocks=known.dram_blocks,
            device=device,
            hbm=hbm,
            block_dim=block_dim,
            **settings,
        )
        try:
            wanted = memory.settings
            node = _core._join_rank(
                memory,
                name=f"{known.name}/rank-{known.rank}",
                routes=list(wanted.routes),
                ucx=ucx_library(wanted.ucx),
                nccl=nccl_library(wanted.nccl),
                scheduler=known.address,
                epoch=known.epoch,
                instance=known.instance,
                rank=known.rank,
                listen=listen or "",
                timeout=timeout,
                **{setting: getattr(wanted, setting) for setting in _LINK_SETTINGS},
            )
        except BaseException:
            memory.close()
            raise
        tell_unused(memory, wanted)
        return cls(known, memory, node, part)

    def tensor(self, medium: int = HBM) -> _core.KVTensor:
        """This rank's part of all blocks of a medium, as `Pool.tensor`. Index it with ``kvpool.block_ids(addrs)``."""
        return self._memory.tensor(medium)

    @property
    def address(self) -> str:
        """Where ranks of peers connect to."""
        return self._node.address

    @property
    def lost(self) -> BaseException | None:
        """Why the rank is of no more use: its scheduler is gone, its GPU failed, or it was closed. None before that."""
        return self._node.lost()

    def wait_lost(self, timeout: float | None = None) -> bool:
        """Waits until the rank is of no more use: for a worker that has nothing else to wait for.

        Args:
            timeout: Seconds; None: for ever.

        Returns:
            False at the timeout.
        """
        return self._node.wait_lost(timeout)

    def check(self) -> None:
        """Raises PeerLost, DeviceLost or ClosedError when the rank is of no more use."""
        why = self.lost
        if why is not None:
            raise why

    def close(self) -> None:
        """Leaves the instance, which is lost then. Views of the memory stay valid. Idempotent."""
        self._node.close()
        self._memory.close()

    def __enter__(self) -> RankArena:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()

    def __repr__(self) -> str:
        """Which part of whose blocks it is."""
        layers, heads = self.slice.layers, self.slice.heads
        state = "lost" if self.lost is not None else "joined"
        return (
            f"<RankArena {self.rank} of {self.instance}: layers {layers.start}-{layers.stop - 1}, "
            f"heads {heads.start}-{heads.stop - 1}, {state}>"
        )


def _layout_of(ticket: RankTicket, part: RankSlice) -> KVLayout:
    if part.layout is None:
        raise ArgumentError(f"rank {ticket.rank} holds no layer: it has nothing to join with", rank=ticket.rank)
    return part.layout
