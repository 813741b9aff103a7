"""Prompts longer than the memory at home: chunk after chunk is computed, and streamed to creditors behind it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import numpy as np

from kvpool.control.lending.moving import Deadline, give_up
from kvpool.control.lending.pools import Addresses, LendingPool
from kvpool.errors import Error, StateError
from kvpool.policy.lending import PrefillPlan

__all__ = ["Chunk", "Prefill"]


class Chunk:
    """Tokens [first, end) of a prompt, which the engine computes together.

    Attributes:
        first: The first token.
        end: Behind the last one.
        addrs: uint64 array with the blocks of this pool into which the engine writes their K and V.
        creditor: The member to which they go; "" if they stay.
    """

    def __init__(self, first: int, end: int, addrs: Addresses, creditor: str, stream: Any | None) -> None:
        """Use `Prefill`."""
        self.first = first
        self.end = end
        self.addrs = addrs
        self.creditor = creditor
        self._stream = stream

    def send_layer(self, layer: int, *, stream: Any = None) -> None:
        """Sends K and V of one layer, once they are written, while the engine computes the next. Does not wait.

        Must be called for every layer; for a chunk that stays it does nothing.

        Args:
            layer: From 0 on.
            stream: For a pool on a GPU: the CUDA stream whose work writes them.

        Raises:
            ArgumentError: There is no such layer, or it was sent before.
            PeerLost, DeadlineExceeded, ...: The creditor does not take it.
        """
        if self._stream is not None:
            self._stream.send_layer(layer, stream=stream)

    def __repr__(self) -> str:
        """The tokens, and where they go."""
        return f"<Chunk of tokens {self.first} to {self.end}{f' for {self.creditor}' if self.creditor else ''}>"


class Prefill:
    """A prompt that is being computed: `Lending.prefill` makes it. A context manager; one thread at a time uses it.

    Iterate over it for the chunks, in their order. When the next one is asked for, all layers of the one before must
    have been sent. Leaving the ``with`` before all were computed, or with an exception, closes the sequence and frees
    all blocks, here and at the creditors.

    Attributes:
        sequence: The KVSequence, as far as chunks were handed out; attention over it may be computed at any time. When
            all chunks have been computed, the caller has it, and its blocks.
    """

    def __init__(
        self,
        pool: LendingPool,
        tokens: int,
        plan: PrefillPlan,
        chunk: int,
        home: Addresses,
        lent: dict[int, Addresses],
        names: dict[int, str],
        timeout_s: float,
        done: Callable[[Any], None],
    ) -> None:
        """Use `Lending.prefill`. Takes the blocks over."""
        self._pool = pool
        self._tokens = tokens
        self._plan = plan
        self._chunk = chunk
        self._home = home[: plan.home]
        self._staging = [home[plan.home :][:chunk], home[plan.home :][chunk:]]
        self._lent = lent
        self._names = names
        self._timeout_s = timeout_s
        self._done = done
        self._sent: list[tuple[int, Addresses, Addresses, Any]] = []  # first block, staged, lent, stream: of two chunks
        self._sequence: Any = None
        self._ended = False

    @property
    def sequence(self) -> Any:
        """The KVSequence. Raises StateError before the first chunk, and when it was abandoned."""
        if self._sequence is None:
            raise StateError("prefill: no chunk has been asked for, or it was abandoned")
        return self._sequence

    def __iter__(self) -> Iterator[Chunk]:
        """The chunks.

        Raises:
            StateError: They were asked for before; or a layer of the chunk before was not sent.
            PeerLost, DeadlineExceeded, ...: A creditor does not take its blocks. Leave the ``with``, and begin again.
        """
        if self._sequence is not None or self._ended:
            raise StateError("prefill: its chunks were asked for before")
        used = dict.fromkeys(self._lent, 0)
        stay = gone = 0
        for first, blocks, creditor in self._ranges():
            to = None
            if creditor:
                addrs = self._stage(gone)[:blocks]
                to = self._lent[creditor][used[creditor] : used[creditor] + blocks]
                used[creditor] += blocks
                gone += 1
            else:
                addrs = self._home[stay : stay + blocks]
                stay += blocks
            self._append(addrs)
            yield from self._compute(first, addrs, self._names.get(creditor, ""), to)
        while self._sent:
            self._arrive()
        self._finish()

    def __enter__(self) -> Prefill:
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abandons what is not complete."""
        if not self._ended:
            self._abandon()

    def _ranges(self) -> Iterator[tuple[int, int, int]]:
        """First block, blocks and creditor (0: here) of each chunk; a chunk has one place to go to."""
        at = 0
        for part in (*self._plan.away, None):
            end = part.first if part else self._plan.blocks
            for first in range(at, end, self._chunk):
                yield first, min(self._chunk, end - first), 0
            if part:
                at = part.first + part.blocks
                for first in range(part.first, at, self._chunk):
                    yield first, min(self._chunk, at - first), part.creditor

    def _stage(self, gone: int) -> Addresses:
        """Blocks to compute in: those of the last chunk but one, when it has arrived."""
        while len(self._sent) > 1:
            self._arrive()
        return self._staging[gone % 2]

    def _append(self, addrs: Addresses) -> None:
        if self._sequence is None:
            self._sequence = self._pool.sequence(addrs, 0)
        else:
            self._sequence.append(addrs)

    def _compute(self, first: int, addrs: Addresses, creditor: str, to: Addresses | None) -> Iterator[Chunk]:
        """Hands a chunk out; behind it all of its layers were sent."""
        size = self._pool.kv_layout.block_tokens
        begin, end = first * size, min(self._tokens, (first + len(addrs)) * size)
        if to is None:
            yield Chunk(begin, end, addrs, "", None)
        else:
            stream = self._pool.transfer(creditor, addrs, to=to, layerwise=True, timeout=self._timeout_s)
            self._sent.append((first, addrs, to, stream))
            yield Chunk(begin, end, addrs, creditor, stream)
            stream.finish()
        if self._sequence.tokens < end:
            self._sequence.tokens = end

    def _arrive(self) -> None:
        """Waits until the oldest chunk that was sent has arrived; from then on it is read at the creditor."""
        first, staged, lent, stream = self._sent[0]
        stream.wait()
        blocks = list(range(first, first + len(staged)))
        deadline = Deadline(self._timeout_s)
        set_backs = self._sequence._set_backs
        self._sequence._switch(blocks, staged, lent, set_backs, deadline.left("switch to the new blocks"))
        del self._sent[0]

    def _finish(self) -> None:
        self._ended = True
        for staged in self._staging:
            if len(staged):
                self._pool.free(staged)
        self._done(self._sequence)

    def _abandon(self) -> None:
        self._ended = True
        for _, _, _, stream in self._sent:
            stream.transfer.cancel()
        for _, _, _, stream in self._sent:  # nothing may be read or written there when the blocks go
            with contextlib.suppress(Error):
                stream.wait()
        self._sent.clear()
        if self._sequence is not None:
            self._sequence.close()
            self._sequence = None
        for addrs in (self._home, *self._staging, *self._lent.values()):
            if len(addrs):
                give_up(self._pool, np.ascontiguousarray(addrs))
