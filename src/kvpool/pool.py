"""The pool of one instance."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from kvpool import _core
from kvpool.alloc.disk import DiskLog, DiskStats, DiskWarning, disk_options
from kvpool.alloc.kv_view import kv_view
from kvpool.alloc.refusals import explained
from kvpool.alloc.stats import ArenaInfo, MediumStats, PoolStats, stats_of, tiers_text
from kvpool.arguments import flag_from
from kvpool.cluster import Cluster, Role
from kvpool.config import Settings, check_names, load
from kvpool.errors import ArgumentError, ArgumentTypeError, StateError, Unsupported
from kvpool.index import EventStream, MatchReport
from kvpool.peers import Attachment, Inbox, NetworkedPool, Peers, Ranks
from kvpool.peers.attach import attach
from kvpool.peers.ranks import check_parallel
from kvpool.transfer import Batch, ParallelConfig
from kvpool.types import HBM, KVLayout, OneMedium, RawLayout, SettingArguments, TokenVector
from kvpool.types.memories import one_medium, ordinal_of
from kvpool.types.setting_arguments import Unpack

__all__ = ["ArenaInfo", "DiskStats", "DiskWarning", "MediumStats", "Pool", "PoolStats"]

_log = logging.getLogger("kvpool")

# Of the settings, those that the core takes when a pool is made; the others are for peers.
_LOCAL_SETTINGS = (
    "policy", "copy_threads", "huge_pages", "numa_node", "check_memory", "pin_dram", "device_memory", "audit",
    "zero_on_alloc", "lend_max", "timeout_s",
)  # fmt: skip


class Pool(NetworkedPool):
    """Blocks of KV cache in two tiers, and the index of the prompts that they hold.

    All methods are thread-safe; a method that raises has changed nothing. A pool belongs to the process that made it:
    in a forked child every method raises ForkError. Use it in a ``with``, or call ``close()``.

    Four objects have the methods for peers, the ranks of a logical instance, received items, and batches of calls:
    `peers`, `ranks`, `inbox`, `batch`. A verb that waits takes a ``timeout`` in seconds; None, the default, is the
    setting ``timeout_s`` everywhere. The secret is the setting ``secret``, or the one of the local cluster.

    Attributes:
        settings: The kvpool.Settings in effect.
        kv_layout: The layout of its blocks.

    Args:
        layout: The content of a block: a KVLayout, or a RawLayout for other data.
        hbm_blocks: Blocks in the device tier.
        dram_blocks: Blocks in the host tier.
        disk_blocks: Blocks on disk, for what is evicted from memory; they survive a restart. With `dram_blocks` only.
            See docs/how-to/disk.md.
        disk_path: The directory for them, of this pool alone; it is made if it does not exist.
        device: The device of the device tier. "cpu": ordinary memory, so everything runs without a GPU. "cuda:0" and so
            on: that GPU's memory, and DRAM is page-locked; "cuda" is "cuda:0".
        hbm: Instead of hbm_blocks: an engine's tensors, one for each layer in order, which become the device tier
            without a copy. Anything with ``__dlpack__`` or ``__cuda_array_interface__``, all on one device, which
            becomes the pool's. The engine's block ids are the block numbers. Shapes and types must be those that the
            layout declares.
        block_dim: The dimension of those tensors that counts blocks. Dimensions before it enumerate pieces, such as K
            and V; those after it must be contiguous.
        engine_allocates: The engine's allocator manages the blocks of HBM, and reports by adopt and free which it
            holds. Transfers can send and fill them, and they are never cached. For adopted tensors, given as `hbm`, or
            with `parallel` to RankArena.join.
        parallel: Makes this the scheduler of a logical instance of several ranks: it allocates and indexes blocks whose
            memory is in its ranks, each of which holds its layers and heads of every block. Give each worker a ticket
            of Ranks.export, with which it joins by RankArena.join. `layout` is that of the whole block.
        **settings: Fields of kvpool.Settings; they override the environment and the file.

    Raises:
        ArgumentError, ArgumentTypeError: A number, name or type is wrong.
        OutOfMemory: The machine, its cgroup or the GPU has too little memory.
        LayoutMismatch: Adopted tensors do not hold the pages that the layout declares: other sizes, shapes or types. Or
            the blocks on disk are of another layout, model or number.
        StateError: Another pool has the blocks on disk open, or the directory is not of a pool, or is damaged.
        StoreFailed: The file system of the directory failed.
        Unsupported: This machine does not support it; for example, the device does not exist.
        DeviceLost: The GPU no longer works. From then on every verb raises it, except those that end something (close,
            peers.disconnect) or only read (stats, audit, peers).
    """

    def __init__(
        self,
        layout: KVLayout | RawLayout,
        hbm_blocks: int = 0,
        dram_blocks: int = 0,
        *,
        disk_blocks: int = 0,
        disk_path: str | os.PathLike[str] | None = None,
        device: str = "cpu",
        hbm: Sequence[Any] | None = None,
        block_dim: int = 0,
        engine_allocates: bool = False,
        parallel: ParallelConfig | None = None,
        **settings: Unpack[SettingArguments],
    ) -> None:
        """See the class."""
        if not isinstance(layout, KVLayout | RawLayout):
            raise ArgumentTypeError(f"layout must be a KVLayout or a RawLayout, not {type(layout).__name__}")
        check_names(settings, Pool.__init__)
        ordinal = ordinal_of(device)
        if hbm is not None and (type(hbm_blocks) is not int or hbm_blocks):
            raise ArgumentError("give hbm_blocks or the engine's own tensors as hbm, not both", hbm_blocks=hbm_blocks)
        if flag_from(engine_allocates, "engine_allocates") and hbm is None and parallel is None:
            raise ArgumentError(
                "engine_allocates is for adopted tensors: give them as hbm, or to the ranks of `parallel`"
            )
        check_parallel(parallel, layout, device, hbm)
        chosen = load(**settings)
        self._begin(
            layout, chosen, parallel, hbm_blocks=hbm_blocks, dram_blocks=dram_blocks, adopted=hbm,
            block_dim=block_dim, engine_allocates=engine_allocates, device=ordinal,
            disk=disk_options(disk_blocks, disk_path, layout, chosen),
        )  # fmt: skip

    def _begin(
        self,
        layout: KVLayout | RawLayout,
        settings: Settings,
        parallel: ParallelConfig | None = None,
        *,
        hbm_blocks: int = 0,
        dram_blocks: int = 0,
        adopted: Sequence[Any] | None = None,
        block_dim: int = 0,
        engine_allocates: bool = False,
        device: int = -1,
        space: _core.Space | None = None,
        pieces: int = 1,
        disk: tuple[int, bytes, list[tuple[str, str]], str, int, int, float] | None = None,
    ) -> None:
        self.settings: Settings = settings
        self._parallel = parallel
        self.kv_layout: KVLayout | RawLayout = layout
        self._adopted = adopted is not None
        self._ranks_here: weakref.WeakSet[object] = weakref.WeakSet()  # whose schedulers give out blocks of this HBM
        self._block_stride = layout.block_bytes  # bytes, of the aggregated layout
        self._pieces = pieces  # in so many a block may lie
        options = {name: getattr(self.settings, name) for name in _LOCAL_SETTINGS}
        with explained(layout, adopted):
            super().__init__(
                block_tokens=layout.block_tokens,
                piece_bytes=list(layout.piece_bytes),
                aggregated=len(layout.segment_bytes) == 1,
                hbm_blocks=hbm_blocks,
                dram_blocks=dram_blocks,
                adopted=adopted,
                block_dim=block_dim,
                engine_allocates=engine_allocates,
                shape=None if isinstance(layout, RawLayout) else layout._numbers,
                parallel=None if parallel is None else parallel._core_tuple(),
                device=device,
                attend_threads=settings.attend_threads or min(len(os.sched_getaffinity(0)), 256),
                space=space,
                pieces=pieces,
                disk=disk,
                **options,
            )
        self._disk_log = DiskLog(self._disk_stats())
        self._gpu = ordinal_of(device_name := self.arena(HBM).device)
        bounds = _core.kernel_piece_bytes(self._gpu)
        if bounds is not None:
            _log.info("%s: kernels copy pieces of up to %d bytes out, %d in, %d within", device_name, *bounds)
        self._attaching = threading.Lock()
        self._attachment: Attachment | None = None

    def attach(
        self,
        cluster: Cluster,
        *,
        name: str | None = None,
        role: Role = "both",
        listen: str | Sequence[str] | None = None,
        url: str = "",
        rank: int | None = None,
        events: str = "",
        events_replay: str = "",
        timeout: float | None = None,
    ) -> Attachment:
        """Makes this pool a member of a cluster: from then on every verb reaches every member by its name.

        The directory gives the pool the instance id of its addresses, so attach it before `Peers.listen`,
        `Peers.connect` and `Ranks.export`. A verb that names a member connects to it, within the verb's deadline; the
        application need not call connect. The pool disconnects members that the cluster has given up. While a pool has
        no lease, verbs that need peers raise Fenced: see docs/how-to/cluster.md. Each heartbeat publishes the load.

        Verbs that need peers may be called when this has returned. A pool can attach only once, even if it has left.
        The scheduler attaches a logical instance (``parallel=``); then its ranks join.

        Args:
            cluster: The result of `Cluster.join`, for this pool only.
            name: The pool's name among the members; by default the setting, or host, process and a random number. A
                restarted process takes its old name again.
            role: "prefill", "decode" or "both".
            listen: The addresses for peers, one or several, the best first. By default a Unix socket in a cluster of
                one machine, and TCP on the loopback in others: name an interface for other hosts.
            url: Where the engine of this pool answers HTTP, for routers: "http://10.0.0.1:8000", without `/v1`.
            rank: The data-parallel rank of this pool's engine there; None if the server has one rank.
            events: Where the engine publishes KV events, to connect to, for routers: "tcp://10.0.0.1:5557".
            events_replay: Where it repeats them; empty for nowhere.
            timeout: Seconds; None: the setting ``timeout_s`` plus two leases, for which the directory may have to wait:
                one for the name of a dead member, one, if etcd lists no members, for members that may be coming back.

        Returns:
            A handle for leaving. The pool keeps it, and closes it when the pool is closed.

        Raises:
            StateError: The pool is attached, was attached before, or has peers already; a live member has the name;
                the cluster has a member of this process already; an address is in use.
            DeadlineExceeded: The directory does not answer, or the name of a dead member is not free yet; or etcd lists
                no members, and the lease for members that may be coming back has not passed.
            ArgumentError: A wrong address, name, role or endpoint of events; TCP without a secret; the pool has another
                secret than the cluster.
            ArgumentTypeError: A value of the wrong type.
            ClosedError, ForkError: As everywhere. After any error, pool and cluster are unchanged.
        """
        with self._attaching:
            if self._attachment is not None:
                state = "has left its cluster: make a new one" if self._attachment.closed else "is attached already"
                raise StateError(f"this pool {state}")
            self._attachment = attach(
                self, cluster, name=name, role=role, listen=listen, url=url, rank=rank, events=events,
                events_replay=events_replay, timeout=timeout,
            )  # fmt: skip
            return self._attachment

    def close(self) -> None:
        """Ends the pool: every verb raises ClosedError from now on. Views of the memory stay valid. Idempotent.

        Leaves its cluster first, if it is in one. Called from a callback of a pool or a cluster, or from a finalizer
        that the garbage collector runs, it only schedules the leave. Peers are informed; transfers in progress end with
        ClosedError here and PeerLost there. The memory is freed with its last view, except for two kinds:

        - Memory to whose addresses a peer may still write (cma, ucx; a process that was stopped in a write) is kept
          until that peer has ended.
        - ``device_memory="plain"`` and an engine's tensors on a GPU are kept until every peer on this host that had
          access has closed them: when it leaves, or, with ucx, when its process ends.

        Page-locked DRAM and the memory of a GPU are given back through the CUDA driver, which may wait for all work
        that the GPU has, in the streams of other libraries as well. So close(), or the end of the last view, may take
        as long as that work: end what stands still there before.
        """
        attachment = self._attachment
        if attachment is not None:
            attachment.close()
        super().close()

    def tensor(self, medium: OneMedium = HBM) -> _core.KVTensor:
        """The memory of a medium, as a zero-copy view.

        Args:
            medium: kvpool.HBM or kvpool.DRAM.

        Returns:
            A KVTensor of shape [block, layer, k/v, head, token, dim], tokens before heads when the layout's `dims` are
            "NHD", [block, layer, head, token, 2 * dim] when its `pages` are "fused". For a RawLayout, and for DRAM of
            a pool over adopted memory, [block, byte]. Index it with ``kvpool.block_ids(addrs)``. In a Space, whose
            blocks lie at any unit, the first extent counts units, and its elements overlap: read and write those of
            your own blocks alone.

        Raises:
            StateError: The medium is adopted memory: use the engine's tensors. Or the memory is in ranks.
        """
        medium = one_medium(medium)
        blocks = self._rows(medium)
        layout = self.kv_layout
        if self._parallel is not None:
            raise StateError("the memory of a logical instance is its ranks': see RankArena.tensor")
        if self._adopted and medium == HBM:
            raise StateError("HBM is adopted memory: the engine's own tensors are the view")
        if isinstance(layout, RawLayout) or self._adopted:
            return self._view(int(medium), [blocks, layout.block_bytes], [self._block_stride, 1], "uint8")
        shape, strides = kv_view(layout, blocks, self._block_stride)
        return self._view(int(medium), shape, strides, layout.dtype)

    def _rows(self, medium: int) -> int:
        """How many numbers blocks of HBM or DRAM can have: the first extent of `tensor`."""
        stats = self.stats()
        return stats.hbm.capacity if medium == HBM else stats.dram.capacity

    def arena(self, medium: OneMedium) -> ArenaInfo:
        """The size, kind and device of a medium's memory."""
        return ArenaInfo(**self._arena(int(one_medium(medium))))

    def stats(self) -> PoolStats:
        """The state of every block and the counters, at one moment."""
        return stats_of(self._stats(), self._gpu, self._disk_log.seen(self._disk_stats()))

    def audit(self) -> PoolStats:
        """Checks every invariant of the allocator and the index, and returns the stats.

        Visits every block and node. Raises AuditError when an invariant is broken: a bug in kvpool, or overwritten
        memory.
        """
        return stats_of(self._audit(), self._gpu, self._disk_log.seen(self._disk_stats()))

    def suspend(self, *, keep: bool = True, timeout: float | None = None, stream: Any = None) -> int:
        """Gives HBM back to the engine until `resume`: for an engine that sleeps, and unmaps its memory. Thread-safe.

        When this returns, nothing here reads or writes HBM, and neither do peers: all addresses of it are stale for
        good. Until `resume` verbs that need a block of HBM raise Suspended (MIXED takes DRAM alone), peers that want
        one get Busy, and what is cached in DRAM is found, sent and fetched as before. Memory that the pool itself has
        allocated stays allocated. After a change of weights drop what is cached in DRAM, too: ``evict``.

        Free what you have in HBM before, close matches and sequences, and let transfers end; an engine that allocates
        frees all its blocks. From the call on HBM gives no more blocks.

        Args:
            keep: Whether cached blocks move to DRAM, as many as fit (the coldest are dropped, of both tiers). False:
                they are dropped, with what continues them in DRAM.
            timeout: Seconds to wait for blocks in use; None: the setting ``timeout_s``. 0 does not wait. Copying to
                DRAM takes as long as it takes.
            stream: As in swap_out.

        Returns:
            How many blocks moved to DRAM.

        Raises:
            Busy: Blocks of HBM are still in use, as its numbers say. HBM is as before, except that some cached blocks
                may have moved or been dropped.
            Suspended: It is suspended, or is being suspended, already.
            StateError: The pool has no HBM; or it is the memory of a rank (`RankArena.join`), whose scheduler may have
                blocks there in use that this pool knows nothing of. Close the rank before.
            Unsupported: The memory is adopted, or that of ranks, which may have adopted it, and the setting `routes`
                names "ucx", which registers it with network adapters: what peers write would go to the memory that
                was there before.
        """
        if self._ranks_here:
            raise StateError(
                "HBM of this pool is the memory of a rank, whose scheduler may have blocks there in use: close the rank"
            )
        if (self._adopted or self._parallel is not None) and "ucx" in self.settings.routes:
            raise Unsupported(
                "adopted memory cannot be suspended with the route ucx: network adapters keep writing to the memory "
                "that was there when it was registered. Leave ucx out of routes"
            )
        return self._suspend(keep, timeout, stream)

    @property
    def peers(self) -> Peers:
        """Connects to peers, disconnects them, and lists them."""
        return Peers(self)

    @property
    def ranks(self) -> Ranks:
        """Exports and lists the ranks of a logical instance, made with ``parallel=``."""
        return Ranks(self)

    @property
    def inbox(self) -> Inbox:
        """The items that peers have sent for the application."""
        return Inbox(self)

    @property
    def batch(self) -> Batch:
        """The batch forms of match, insert and transfer."""
        return Batch(self)

    def explain_match(self, tokens: TokenVector, namespace: str = "") -> MatchReport:
        """Explains what match would find, and why it ends there. Pins nothing and does not count as a use.

        Args:
            tokens: As in match.
            namespace: As in match.
        """
        return MatchReport.from_core(self.kv_layout.block_tokens, self._explain(tokens, namespace))

    def subscribe(self, capacity_tokens: int = 1 << 24, include_cached: bool = False) -> EventStream:
        """A stream of all changes of cached prompts from now on, as events that wait until they are drained.

        Args:
            capacity_tokens: When the waiting events have more tokens than this together, the oldest are lost.
            include_cached: Begin with a StoredEvent for everything that is cached now, regardless of the capacity: for
                a reader that starts, or starts again after it has lost events.
        """
        return EventStream(self._subscribe(capacity_tokens, include_cached))

    def __enter__(self) -> Pool:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()

    def __repr__(self) -> str:
        """How many blocks are in use."""
        if "_gpu" not in self.__dict__:  # tracebacks show what could not be made, and the C++ half has no state then
            return "<Pool that was not made>"
        if self.closed:
            return "<Pool closed>"
        return f"<Pool {tiers_text(self.stats())}>"
