"""Prompts longer than the memory at home: chunk after chunk is computed, and streamed to creditors behind it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from kvpool.control.lending.moving import Deadline, give_up
from kvpool.control.lending.outgoing import PrefillRoom
from kvpool.control.lending.pools import Addresses, LendingPool
from kvpool.errors import ArgumentError, Error, StateError
from kvpool.types.addresses import instances

__all__ = ["Chunk", "Prefill"]


class Chunk:
    """Tokens [first, end) of a prompt, which the engine computes together.

    Attributes:
        first: The first token.
        end: Behind the last one.
        addrs: uint64 array with the blocks of this pool into which the engine writes their K and V.
        creditor: The member to which they go; "" if they stay.
    """

    def __init__(self, first: int, end: int, addrs: Addresses, creditor: str, layers: Any) -> None:
        """Use `Prefill`. `layers`: where they are sent, a TransferStream or `_Staying`."""
        self.first = first
        self.end = end
        self.addrs = addrs
        self.creditor = creditor
        self._layers = layers

    def send_layer(self, layer: int, *, stream: Any = None) -> None:
        """Sends K and V of one layer, once they are written, while the engine computes the next. Does not wait.

        Must be called once for every layer; of a chunk that stays nothing is sent.

        Args:
            layer: From 0 on.
            stream: For a pool on a GPU: the CUDA stream whose work writes them.

        Raises:
            ArgumentError: There is no such layer, or it was sent before.
            PeerLost, DeadlineExceeded, ...: The creditor does not take it.
        """
        self._layers.send_layer(layer, stream=stream)

    def __repr__(self) -> str:
        """The tokens, and where they go."""
        return f"<Chunk of tokens {self.first} to {self.end}{f' for {self.creditor}' if self.creditor else ''}>"


class Prefill:
    """A prompt that is being computed: `Lending.prefill` makes it. A context manager; one thread at a time uses it.

    Iterate over it, in the ``with``, for the chunks, in their order. When the next one is asked for, all layers of the
    one before must have been sent, and attention that was begun for it must have ended: blocks are written again.
    Leaving the ``with`` before all chunks were computed, or with an exception, closes the sequence and frees all
    blocks, here and at the creditors.

    Attributes:
        sequence: The KVSequence, as far as chunks were handed out, to attend to. When all chunks have been computed,
            the caller has it, and its blocks.
    """

    def __init__(
        self,
        pool: LendingPool,
        tokens: int,
        room: PrefillRoom,
        chunk: int,
        timeout_s: float,
        done: Callable[[Any], None],
    ) -> None:
        """Use `Lending.prefill`. Takes the blocks over; `chunk`: in blocks; `timeout_s`: for each of them."""
        self._pool = pool
        self._tokens = tokens
        self._room = room
        self._chunk = chunk
        self._timeout_s = timeout_s
        self._done = done
        staging, half = room.home[room.plan.home :], room.plan.staging // 2
        self._staging = (staging[:half], staging[half:])
        self._sent: list[_Sent] = []  # at most two
        self._sequence: Any = None
        self._state = "new"  # then "open", "complete" or "abandoned"
        self._forgotten = weakref.finalize(self, _free, pool, [room.home, *room.lent.values()])

    @property
    def sequence(self) -> Any:
        """The KVSequence. Raises StateError before the first chunk, and when it was abandoned."""
        if self._sequence is None:
            raise StateError("prefill: no chunk has been asked for, or it was abandoned")
        return self._sequence

    def __iter__(self) -> Iterator[Chunk]:
        """The chunks.

        Raises:
            StateError: This is not in its ``with``, they were asked for before; or a layer of the chunk before was not
                sent, or tokens of it were taken back before it had arrived.
            PeerLost, StaleAddress, DeadlineExceeded, ...: A creditor does not take its blocks, or has recalled them.
                Leave the ``with``, and begin again.
        """
        if self._state != "open" or self._sequence is not None:
            raise StateError("prefill: its chunks are asked for once, in its with")
        used = dict.fromkeys(self._room.lent, 0)
        stay = gone = 0
        for first, blocks, creditor in self._ranges():
            if creditor:
                begin = used[creditor]
                used[creditor] = end = begin + blocks
                yield from self._send(first, self._stage(gone)[:blocks], creditor, self._room.lent[creditor][begin:end])
                gone += 1
            else:
                yield from self._keep(first, self._room.home[stay : stay + blocks])
                stay += blocks
        while self._sent:
            self._arrive()
        self._finish()

    def __enter__(self) -> Prefill:
        """Itself."""
        if self._state != "new":
            raise StateError("prefill: its with was entered before")
        self._forgotten.detach()
        self._state = "open"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abandons it, if it is not complete or an exception leaves the ``with``."""
        if kind is not None or self._state != "complete":
            self._abandon()

    def _ranges(self) -> Iterator[tuple[int, int, int]]:
        """First block, blocks and creditor (0: here) of each chunk; a chunk has one place to go to."""
        plan, at = self._room.plan, 0
        half = len(self._staging[0])
        for part in (*plan.away, None):
            end = part.first if part else plan.blocks
            for first in range(at, end, self._chunk):
                yield first, min(self._chunk, end - first), 0
            if part:
                at = part.first + part.blocks
                for first in range(part.first, at, half):
                    yield first, min(half, at - first), part.creditor

    def _stage(self, gone: int) -> Addresses:
        """Blocks to compute in: those of the last chunk but one, when it has arrived."""
        while len(self._sent) > 1:
            self._arrive()
        return self._staging[gone % 2]

    def _keep(self, first: int, addrs: Addresses) -> Iterator[Chunk]:
        """Hands out a chunk that stays."""
        self._append(addrs)
        begin, end = self._token_range(first, addrs)
        layers = _Staying(self._pool.kv_layout.layers)
        yield Chunk(begin, end, addrs, "", layers)
        self._computed(end, layers)

    def _send(self, first: int, addrs: Addresses, creditor: int, to: Addresses) -> Iterator[Chunk]:
        """Hands out a chunk that goes to a creditor while it is computed."""
        self._append(addrs)
        begin, end = self._token_range(first, addrs)
        name, set_backs = self._room.names[creditor], self._sequence._set_backs
        stream = self._pool.transfer(name, addrs, to=to, layerwise=True, timeout=self._timeout_s)
        self._sent.append(_Sent(first, addrs, to, stream, set_backs))
        yield Chunk(begin, end, addrs, name, stream)
        self._computed(end, stream)

    def _append(self, addrs: Addresses) -> None:
        if self._sequence is None:
            self._sequence = self._pool.sequence(addrs, 0)
        else:
            self._sequence.append(addrs)

    def _token_range(self, first: int, addrs: Addresses) -> tuple[int, int]:
        size = self._pool.kv_layout.block_tokens
        return first * size, min(self._tokens, (first + len(addrs)) * size)

    def _computed(self, end: int, layers: Any) -> None:
        """All layers of a chunk have been sent."""
        if self._state != "open":
            raise StateError("prefill: it was abandoned")
        layers.finish()
        if self._sequence.tokens < end:
            self._sequence.tokens = end

    def _arrive(self) -> None:
        """Waits until the oldest chunk that was sent has arrived; from then on it is read at the creditor."""
        sent = self._sent[0]
        sent.stream.wait()
        blocks = list(range(sent.first, sent.first + len(sent.staged)))
        left_s = Deadline(self._timeout_s).left("switch to the new blocks")
        self._sequence._switch(blocks, sent.staged, sent.lent, sent.set_backs, left_s)
        del self._sent[0]

    def _finish(self) -> None:
        for staged in self._staging:
            if len(staged):
                give_up(self._pool, staged)
        self._done(self._sequence)
        self._state = "complete"

    def _abandon(self) -> None:
        """Frees every block that is, or may be, this prompt's: what was freed or moved before has another address."""
        if self._state == "abandoned":
            return
        self._state = "abandoned"
        sequence, self._sequence = self._sequence, None
        kept = [self._room.home, *self._room.lent.values()]
        try:
            for sent in self._sent:
                sent.stream.transfer.cancel()
            for sent in self._sent:  # nothing may be read or written there when the blocks go
                with contextlib.suppress(Error):
                    sent.stream.wait()
        finally:
            if sequence is not None:
                kept.append(sequence.addrs)
                sequence.close()
            _free(self._pool, kept)


@dataclass(frozen=True)
class _Sent:
    """A chunk on its way: from block `first` of the prompt on, and how often tokens had been taken back before."""

    first: int
    staged: Addresses
    lent: Addresses
    stream: Any
    set_backs: int


class _Staying:
    """Counts the layers of a chunk that stays, and refuses what a TransferStream refuses."""

    def __init__(self, layers: int) -> None:
        self._missing = set(range(layers))
        self._layers = layers

    def send_layer(self, layer: int, *, stream: Any = None) -> None:
        if layer not in self._missing:
            said = "was sent before" if layer in range(self._layers) else "is not there"
            raise ArgumentError(f"layer {layer} {said}")
        self._missing.remove(layer)

    def finish(self) -> None:
        if self._missing:
            raise StateError(f"prefill: layer {min(self._missing)} was not sent")


def _free(pool: LendingPool, kept: list[Addresses]) -> None:
    """Each block once, owner by owner: a creditor that is gone keeps no other from getting its blocks back."""
    addrs = np.unique(np.concatenate(kept))
    owners = instances(addrs)
    for owner in np.unique(owners):
        give_up(pool, addrs[owners == owner])
