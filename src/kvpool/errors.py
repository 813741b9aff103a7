"""The errors of kvpool.

    kvpool.Error
    ├── ArgumentError (ValueError)      a value that is invalid in every state of the pool
    ├── ArgumentTypeError (TypeError)   a value of the wrong type
    ├── OutOfBlocks                     not enough blocks are free or can be made free
    │   └── OutOfQuota                  a model of a shared space may have no more of it
    ├── OutOfMemory (MemoryError)       an arena does not fit the machine or its cgroup
    ├── StaleAddress                    the block behind the address was freed or moved
    ├── StateError                      the block or the pool is in a state that forbids the call
    │   ├── ClosedError                 the pool or handle was closed
    │   ├── Suspended                   the engine has taken HBM back for a while
    │   └── Fenced                      the pool has no lease in its cluster, so it has no peers
    ├── NotOwner                        the address belongs to another instance or pool
    ├── LayoutMismatch                  offered memory, or the blocks of a peer, do not match the layout
    ├── PeerLost                        the peer is gone, or does not answer
    ├── DeadlineExceeded (TimeoutError) not done by its deadline
    ├── Busy                            the limit of one peer is reached: try again later
    ├── Cancelled                       cancelled by the caller
    ├── AuthError                       the peer has another secret
    ├── ProtocolError                   the peer breaks the protocol, or speaks another version of it
    ├── RouteFailed                     a route to the peer has failed: the next transfer takes another one
    ├── StoreFailed                     a store on disk or of kvpool.storage has failed, or cannot be reached
    ├── DeviceLost                      the GPU, or this process's context on it, is lost, with its memory's content
    ├── ForkError                       called in a child process after fork
    ├── Unsupported                     this machine or build cannot do it
    └── AuditError                      an invariant is broken: a bug in kvpool or memory corruption

A call that raises one of these has changed nothing. A transfer that ends with one leaves the sender's blocks unchanged.
The text of an error has the numbers for people; programs read them as attributes (`error.requested`, `error.free`), or
all together in the dict `error.fields`.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "AuditError",
    "AuthError",
    "Busy",
    "Cancelled",
    "ClosedError",
    "DeadlineExceeded",
    "DeviceLost",
    "Error",
    "Fenced",
    "ForkError",
    "LayoutMismatch",
    "NotOwner",
    "OutOfBlocks",
    "OutOfMemory",
    "OutOfQuota",
    "PeerLost",
    "ProtocolError",
    "RouteFailed",
    "StaleAddress",
    "StateError",
    "StoreFailed",
    "Suspended",
    "Unsupported",
]


class Error(Exception):
    """Base of all errors of kvpool."""

    def __init__(self, message: str, **fields: Any) -> None:
        """Each field becomes an attribute."""
        super().__init__(message)
        self.fields: dict[str, Any] = fields
        for name, value in fields.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the fields, too, so that another process gets the complete error."""
        return _rebuild, (type(self), str(self), self.fields)


def _rebuild(kind: type[Error], message: str, fields: dict[str, Any]) -> Error:
    return kind(message, **fields)


# The attributes that errors of a class can have. Each error has those that its text mentions.


class ArgumentError(Error, ValueError):
    """A value that is invalid in every state of the pool."""

    pieces: int  # of a block of a space
    address: int  # the wrong address, and
    position: int  # its position in the list
    value: int  # a number out of range, and
    minimum: int  # the least that is possible, and
    maximum: int  # the largest
    source: str  # where a setting came from
    given: int  # how many there were, and
    needed: int  # how many there must be
    requested: int  # blocks asked for
    capacity: int  # of the media that could have them
    caches: int  # that share a space
    units: int  # of a block
    reserve: int  # of a model of a space, and
    limit: int  # its limit, in units
    waste: float  # the part of a block's units that it leaves empty
    blocks: int
    blocks_max: int
    block_bytes: int
    block_tokens: int
    tokens: int
    instance: int
    largest: int
    numa_node: int
    errno: int
    kv_heads: int
    device: int  # the number of a GPU
    tp: int
    layer: int  # of an attention, and
    layers: int  # how many there are
    query_heads: int
    heads: int
    head: int
    head_dim: int
    query_tokens: int
    query_begin: int  # the position of the first query token
    token: int
    begin: int  # tokens [begin, end)
    end: int
    dtype: int
    block: int
    k_blocks: int
    v_blocks: int
    table_begin: int  # the position of a table's first token, and
    table_tokens: int  # how many its blocks hold
    row: int  # bytes of a token of a head, and
    token_stride: int  # from one token to the next, and
    head_stride: int  # from one head to the next


class ArgumentTypeError(Error, TypeError):
    """A value of the wrong type."""

    source: str  # where a setting came from


class OutOfBlocks(Error):
    """Not enough blocks are free, or can be made free by eviction."""

    requested: int
    free: int
    evictable: int
    active: int
    pinned: int
    capacity: int
    fragmented: bool  # in a space of several models: there is memory, but no place for a block of this size
    largest_run: int  # units


class OutOfQuota(OutOfBlocks):
    """A model may have no more of a space that it shares: its limit is reached, or the rest is active or reserved.

    Counts are units of the space.
    """

    model: str
    limit: int
    reserve: int


class OutOfMemory(Error, MemoryError):
    """An arena does not fit the memory of the machine or of its cgroup."""

    needed_bytes: int
    available_bytes: int
    total_bytes: int  # of the GPU
    device: int  # its number
    driver_code: int
    bytes: int
    errno: int


class StaleAddress(Error):
    """The block behind the address was freed, moved or recalled since the address was given out."""

    address: int
    position: int
    instance: int  # the owner that recalled a borrowed block
    begin: int  # of attention: tokens of a sequence whose blocks are no longer there
    end: int


class StateError(Error):
    """The block or the pool is in a state that forbids the call."""

    address: int
    position: int
    block: int
    pinned: int
    instance: int
    needed: int
    maximum: int  # how many there may be
    cache: int  # the number of the other cache of a space
    errno: int
    incarnation: int
    begin: int  # tokens [begin, end) that a result lacks
    end: int
    covered: int  # the end of the tokens that it covers, and
    tokens: int  # those that it should cover
    device: int  # the GPU on which a CUDA graph is being captured
    driver_code: int  # and the CUDA driver's number


class ClosedError(StateError):
    """The pool or handle was closed."""


class Suspended(StateError):
    """The engine has taken HBM back: see `Pool.suspend`. It gives no blocks until `Pool.resume`. Peers get Busy."""


class Fenced(StateError):
    """The pool has no lease in its cluster at the moment, so it has no peers until it regains one."""


class NotOwner(Error):
    """The address belongs to another instance or pool."""

    address: int
    position: int
    instance: int


class LayoutMismatch(Error):
    """Offered memory, or the blocks of a peer, do not match the layout.

    For a peer, offered_* are its numbers and layout_* those of this side. Raw bytes have 0 layers, heads and dim.
    """

    device: int  # the number of a GPU
    segment: int
    other_segment: int
    offered_bytes: int
    layout_bytes: int
    offered_layers: int
    layout_layers: int
    offered_kv_heads: int
    layout_kv_heads: int
    offered_head_dim: int
    layout_head_dim: int
    offered_block_tokens: int
    layout_block_tokens: int
    position: int
    sender: int
    receiver: int
    blocks: int
    blocks_needed: int


class PeerLost(Error):
    """The peer is gone, does not answer, or never existed."""

    instance: int
    silent_ms: int  # how long it had been silent
    lost: list[tuple[int, list[tuple[int, int]]]]  # of attention: (position in the batch, [(begin, end), ...])
    errno: int


class DeadlineExceeded(Error, TimeoutError):
    """The deadline has passed. `except TimeoutError` catches it, too."""


class Busy(Error):
    """Not now: try again later.

    A limit is reached, of one peer's running or waiting requests or of what this pool lends; or the content of a block
    is still to come; or HBM is in use and cannot be suspended, or a peer's HBM is suspended.
    """

    address: int
    position: int
    retry_after_us: int  # a hint
    limit: int
    requested: int
    free: int  # how many blocks it would lend, where it lends too few
    active: int  # blocks that keep HBM from being suspended, by state, and
    reserved: int
    lent: int
    quarantined: int
    pinned: int  # those that open matches and insertions hold
    read: int  # those that transfers, saves or sequences read


class Cancelled(Error):
    """The caller cancelled it."""


class AuthError(Error):
    """The secrets of the two sides differ."""


class ProtocolError(Error):
    """The peer breaks the protocol, or speaks no version that this side speaks."""

    address: int
    limit: int
    needed: int
    given: int
    value: int
    maximum: int
    errno: int
    version_min: int  # the versions that this side speaks
    version_max: int
    peer_version_min: int  # the versions that the peer speaks
    peer_version_max: int


class RouteFailed(Error):
    """A route to the peer has failed, for example NCCL or a copy on a GPU. The peer may be well.

    The next transfer takes another route, if there is one; this one is tried again later. `Pool.peers` has the reason
    on the side that was writing.
    """

    nccl_code: int  # NCCL's number, an ncclResult_t
    driver_code: int  # the CUDA driver's number, a CUresult


class StoreFailed(Error):
    """A store on disk or of `kvpool.storage` has failed, or cannot be reached. The pool is well."""

    errno: int  # of the file system, or 0


class DeviceLost(Error):
    """The GPU, or this process's context on it, is gone, with the content of its memory.

    From then on all verbs of the pool raise it, except those that end or read something (see Pool). Make a new pool, in
    a new process if the driver requires it. Requests of its peers fail with PeerLost until it is closed.
    """

    driver_code: int  # the driver's number, a CUresult


class ForkError(Error):
    """Called in a child process after fork: a pool belongs to the process that made it, and so does CUDA."""

    driver_code: int  # the CUDA driver's number, where the parent had used CUDA


class Unsupported(Error):
    """This machine or this build does not support it."""

    needed_bytes: int
    limit: int  # of the bytes that a peer's attention may take on a GPU
    huge_page_bytes: int
    numa_node: int
    device: int  # the number of a GPU
    driver_code: int
    connections: int  # CUDA_DEVICE_MAX_CONNECTIONS
    nccl_code: int
    address: int  # of a block that attention cannot read, and
    position: int  # its position in the list
    layer: int
    errno: int


class AuditError(Error):
    """An invariant is broken: a bug in kvpool, or memory corruption."""

    block: int
    unit: int
    found: int
    counted: int
