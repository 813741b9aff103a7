"""What a transfer is asked to do, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass

from kvpool.types.medium import HBM
from kvpool.types.parameters import AddressVector, Bytes, MediumChoice, Priority, Route, Strategy, TokenVector

__all__ = ["TransferSpec", "TransferStats", "TransferTotals"]


@dataclass(frozen=True)
class TransferStats:
    """The cost of one transfer. Times in microseconds.

    Attributes:
        route: The route of the bytes; "" if there were no bytes to send.
        strategy: How blocks were cut into calls; for "auto", the strategy that was used.
        blocks: Blocks of the request.
        skipped_blocks: Of these, the prefix that the receiver had cached.
        calls: Messages, system calls, puts or copies, by the plan: what a route cuts because it is long counts once.
        runs: Runs of blocks that are neighbours on both sides: the least possible number of calls for whole blocks
            where nothing is gathered.
        bytes: Bytes written.
        reserve_us: Until the receiver had blocks for it.
        write_us: Writing.
        complete_us: From the last byte to the receiver's answer.
        total_us: In all.

    A fetch is written by the owner, who says by which route, in how many calls and in what time: that is ``write_us``,
    and what is left of ``total_us`` is the way there and back, and waiting. Before the end these are empty and 0. A
    fetch that reads the owner's mapped memory from here has "fetch" as its route, and ``reserve_us`` is the time until
    the owner held the blocks.
    """

    route: str
    strategy: str
    blocks: int
    skipped_blocks: int
    calls: int
    runs: int
    bytes: int
    reserve_us: float
    write_us: float
    complete_us: float
    total_us: float


@dataclass(frozen=True)
class TransferTotals:
    """The ended transfers of one kind that a pool has begun.

    Attributes:
        succeeded: How many succeeded.
        failed: How many ended with an error, by the name of its class; without zeros.
        bytes: Bytes written or read by all of them, without failed fetches, for which it is unknown.
        seconds: The total time of the successful ones.
        durations: A histogram of the times of the successful ones: pairs of an upper bound in seconds, ascending, and a
            number; the last bound is infinite.
    """

    succeeded: int
    failed: dict[str, int]
    bytes: int
    seconds: float
    durations: tuple[tuple[float, int], ...]


@dataclass(frozen=True, eq=False)
class TransferSpec:
    """One transfer of `Batch.transfer`. The fields are the arguments of `Pool.transfer`, which explains them.

    Attributes:
        tokens: Insert the blocks at the receiver as this prompt, as `Pool.transfer_with_insert` does.
        namespace: Of the prompt.
    """

    peer: str
    addrs: AddressVector
    tokens: TokenVector | None = None
    namespace: str = ""
    to: AddressVector | None = None
    medium: MediumChoice = HBM
    evict: bool = True
    private: Bytes | None = None
    strategy: Strategy = "auto"
    priority: Priority = "prefill"
    route: Route | None = None
    checksum: bool = False
    stream: object = None
    timeout: float | None = None
