"""The designs, one after another: what each does with blocks that the one before it does not (MemServe §5.1, Table 4).

An instance calls these methods in the life of a request; in between it computes (worker.py). `work` has the request's
tokens and blocks. Blocks that are neither held nor sent on are freed when the work is closed, which the worker does.

    prefill instance                                  decode instance
    find_cached   what need not be computed
    (compute)
    send          the KV, with a letter        -->    take_over     what has come
    prefilled     what is kept                        (compute a token, and another one, ...)
                                               <--    answered      what is kept, what is sent back

    PD-Basic       KV goes to decode, nothing is kept           transfer
    PD-Caching-1   + prefill keeps prompts                      + match, insert at prefill
    PD-Caching-2   + decode keeps prompts and answers,          + transfer_with_insert, insert at decode
                     and is sent only what it does not have
    PD-Caching-3   + prefill gets the answers, too              + transfer_with_insert back
    PD             prefill and decode in one process
    PD-CC          + which keeps prompts and answers            + match, insert

Sends are asynchronous: the worker waits for what they return. Whatever fails raises a kvpool.Error; the work is closed
then, and the blocks are as they were.
"""

from __future__ import annotations

from typing import Final

import kvpool
from pd_disaggregated.engine import Work

TRANSFER_S: Final = 10.0  # a transfer takes milliseconds; this is when to give up


class PDBasic:
    """Prefill sends the KV of the prompt to decode. Every prompt is computed whole, and sent whole."""

    def find_cached(self, pool: kvpool.Pool, work: Work) -> None:
        """At prefill, before anything is computed. Here: nothing is cached."""

    def send(self, pool: kvpool.Pool, decode: str, work: Work, letter: bytes) -> kvpool.Transfer:
        """At prefill, when the prompt is computed: all its KV goes to decode, and the letter with it."""
        return pool.transfer(
            decode, work.table, private=letter, strategy="by_request_agg", priority="prefill", timeout=TRANSFER_S
        )

    def open_stream(self, pool: kvpool.Pool, decode: str, work: Work, letter: bytes) -> kvpool.TransferStream:
        """At prefill, by layer, before the prompt is computed: its blocks but the last one, each layer when it is.

        The last block follows when the first token is known, by send_last.
        """
        return pool.transfer(decode, work.early_blocks, private=letter, timeout=TRANSFER_S, layerwise=True)

    def send_last(self, pool: kvpool.Pool, decode: str, work: Work, letter: bytes) -> kvpool.Transfer:
        """At prefill, by layer: the block in which the prompt ends, and the letter that has the first token."""
        last = work.table[len(work.early_blocks) :]
        return pool.transfer(decode, last, private=letter, priority="prefill", timeout=TRANSFER_S)

    def prefilled(self, pool: kvpool.Pool, work: Work) -> None:
        """At prefill, when the KV was sent. Here: nothing is kept."""

    def take_over(self, work: Work, item: kvpool.Received) -> None:
        """At decode: the blocks are the request's, and free when it ends."""
        work.own(item.take())

    def answered(self, pool: kvpool.Pool, prefill: str, work: Work) -> kvpool.Transfer | None:
        """At decode, when the last token is out. Here: nothing is kept."""
        return None


class PDCaching1(PDBasic):
    """Prefill keeps the prompts that it has computed. What they share is not computed again, but all is still sent."""

    def find_cached(self, pool: kvpool.Pool, work: Work) -> None:
        """Up to the last token, which must be computed for what follows it."""
        work.hold(pool.match(work.prompt[:-1]))

    def prefilled(self, pool: kvpool.Pool, work: Work) -> None:
        """The active blocks of the prompt become historical."""
        work.hold(pool.insert(work.whole_tokens, work.whole_blocks, free_duplicates=True))


class PDCaching2(PDCaching1):
    """Decode keeps what it was sent and what it has generated, and is sent only what it does not have."""

    def send(self, pool: kvpool.Pool, decode: str, work: Work, letter: bytes) -> kvpool.Transfer:
        """The blocks go to decode's index; those of the prompt that are there stay here."""
        if not len(work.whole_blocks):
            return super().send(pool, decode, work, letter)  # shorter than a block: nothing that an index can have
        return pool.transfer_with_insert(
            decode, work.whole_tokens, work.whole_blocks, private=letter, strategy="by_request_agg", timeout=TRANSFER_S
        )

    def open_stream(self, pool: kvpool.Pool, decode: str, work: Work, letter: bytes) -> kvpool.TransferStream:
        """The same by layer."""
        return pool.transfer_with_insert(
            decode, work.early_tokens, work.early_blocks, private=letter, timeout=TRANSFER_S, layerwise=True
        )

    def take_over(self, work: Work, item: kvpool.Received) -> None:
        """The blocks are cached, and pinned as long as the request lives."""
        if item.inserted:
            work.hold(item)
        else:
            super().take_over(work, item)

    def answered(self, pool: kvpool.Pool, prefill: str, work: Work) -> kvpool.Transfer | None:
        """Prompt and answer become historical."""
        work.hold(pool.insert(work.whole_tokens, work.whole_blocks, free_duplicates=True))
        return None


class PDCaching3(PDCaching2):
    """Prefill gets the KV of the answers, so that the next turn of a conversation computes only what is new."""

    def answered(self, pool: kvpool.Pool, prefill: str, work: Work) -> kvpool.Transfer | None:
        """As before; and what prefill does not have of it is sent back."""
        super().answered(pool, prefill, work)
        if not len(work.whole_blocks):
            return None
        return pool.transfer_with_insert(
            prefill, work.whole_tokens, work.whole_blocks, priority="background", timeout=TRANSFER_S
        )


class Colocated(PDBasic):
    """One process does both, so nothing is ever sent."""


class ColocatedCaching(PDCaching1):
    """The same with a context cache: match before, insert after prefill (as above), and insert after the answer."""

    def answered(self, pool: kvpool.Pool, prefill: str, work: Work) -> kvpool.Transfer | None:
        """Prompt and answer become historical."""
        work.hold(pool.insert(work.whole_tokens, work.whole_blocks, free_duplicates=True))
        return None


BY_NAME: Final[dict[str, PDBasic]] = {
    "PD": Colocated(),
    "PD-CC": ColocatedCaching(),
    "PD-Basic": PDBasic(),
    "PD-Caching-1": PDCaching1(),
    "PD-Caching-2": PDCaching2(),
    "PD-Caching-3": PDCaching3(),
}
