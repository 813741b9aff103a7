"""The ranks of a logical instance, for its scheduler: `Pool.ranks`."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvpool.arguments import int_from, shown
from kvpool.errors import ArgumentError, ArgumentTypeError, DeadlineExceeded, StateError
from kvpool.peers.addresses import check_connect
from kvpool.peers.peers import Peers
from kvpool.peers.service import NetworkedPool
from kvpool.transfer.reshard import ParallelConfig
from kvpool.transfer.ticket import RankTicket
from kvpool.types import KVLayout, RawLayout

__all__ = ["RankInfo", "Ranks", "check_parallel"]


@dataclass(frozen=True)
class RankInfo:
    """A rank of a logical instance, at one moment.

    Attributes:
        rank: Its number.
        joined: Whether it has joined; before that, the other fields are empty.
        pid: Its process id, in its own PID namespace.
        host: Boot id and PID namespace of its machine: equal for ranks that share one.
        link: How it is connected: "unix", "tcp 10.0.0.2:4000"; "closed" when it is lost.
        address: The address to which ranks of peers connect.
    """

    rank: int
    joined: bool
    pid: int
    host: str
    link: str
    address: str


_Infos: TypeAlias = list[RankInfo]  # in the class the name `list` is the method


class Ranks:
    """Exports the ranks of a logical instance, waits for them, and lists them. `Pool.ranks` makes it.

    Iterate over it for a RankInfo of each rank. Keeps its pool alive.
    """

    __slots__ = ("_pool",)

    def __init__(self, pool: NetworkedPool) -> None:
        """Use `Pool.ranks`."""
        self._pool = pool

    @property
    def parallel(self) -> ParallelConfig | None:
        """How the blocks are divided among the ranks, as given to the pool. None: it is an instance of one rank."""
        return self._pool._parallel

    def export(self, rank: int, *, address: str | None = None) -> str:
        """A ticket with which a worker becomes a rank of this logical instance: text for `RankArena.join`.

        It contains no secret. A rank is never replaced: when one is lost, the instance is lost, and its verbs raise
        PeerLost from then on.

        Args:
            rank: Number of the rank; it must hold a layer.
            address: The address to which the worker connects: one of this pool's `Peers.listen`, in the form that the
                worker's host can reach. By default a Unix socket of this host.

        Returns:
            A line of JSON.

        Raises:
            StateError: The pool is an instance of one rank: make it with ``parallel=``. Or an address is given, and the
                pool does not listen.
            ArgumentError: There is no such rank, or it holds no layer; or it is not an address.
            ArgumentTypeError: A value of the wrong type.
        """
        pool = self._pool
        if pool._parallel is None or not isinstance(pool.kv_layout, KVLayout):
            raise StateError("this pool is an instance of one rank: make it with parallel=ParallelConfig(...)")
        number = int_from(rank, "rank")
        slices = pool._parallel.slices(pool.kv_layout)
        if not 0 <= number < len(slices) or slices[number].layout is None:
            raise ArgumentError(
                f"there is no rank {shown(number)} that holds a layer; ranks are 0 to {len(slices) - 1}", rank=number
            )
        if address is None:
            with pool._exporting:
                if pool._rank_address is None:
                    pool._rank_address = Peers(pool).listen(f"unix:@kvpool-{secrets.token_hex(16)}")
                address = pool._rank_address
        else:
            check_connect(address, bool(pool.settings.secret))
        incarnation, instance = pool._scheduler_facts()
        capacity = pool._stats()
        return RankTicket(
            address=address,
            incarnation=incarnation,
            instance=instance,
            name=pool._name() or "",
            rank=number,
            layout=pool.kv_layout,
            parallel=pool._parallel,
            hbm_blocks=capacity["hbm"]["capacity"],
            dram_blocks=capacity["dram"]["capacity"],
        ).text()

    def list(self) -> _Infos:
        """The ranks that hold a part of the blocks, joined or not.

        Raises:
            StateError: The pool is an instance of one rank, or no rank was exported yet.
        """
        return [RankInfo(**facts) for facts in self._pool._ranks()]

    def wait(self, timeout: float | None = None) -> None:
        """Waits until all ranks have joined; before that, the instance cannot connect to peers. Releases the GIL.

        Args:
            timeout: Seconds; None: the setting ``timeout_s``.

        Raises:
            DeadlineExceeded: Some have not joined in time.
            PeerLost: One was lost meanwhile.
            StateError: The pool is an instance of one rank, or no rank was exported yet.
        """
        if self._pool._wait_for_ranks(timeout):
            return
        missing = [rank.rank for rank in self if not rank.joined]
        raise DeadlineExceeded(f"ranks {missing} have not joined within the timeout")

    def __iter__(self) -> Iterator[RankInfo]:
        """Iterates over the result of `list`."""
        return iter(self.list())

    def __repr__(self) -> str:
        """How the blocks are divided."""
        return f"<Ranks of {self.parallel}>" if self.parallel is not None else "<Ranks: an instance of one>"


def check_parallel(parallel: object, layout: KVLayout | RawLayout, device: str, hbm: Sequence[Any] | None) -> None:
    """Raises ArgumentError or ArgumentTypeError for what cannot have ranks, unless `parallel` asks for none: None."""
    if parallel is None:
        return
    if not isinstance(parallel, ParallelConfig):
        raise ArgumentTypeError(f"parallel must be a ParallelConfig, not {type(parallel).__name__}")
    if isinstance(layout, RawLayout):
        raise ArgumentError("only a KVLayout can be shared among ranks: a RawLayout does not say where heads begin")
    if hbm is not None or device != "cpu":
        raise ArgumentError("the memory of a logical instance is its ranks': give hbm and device to RankArena.join")
