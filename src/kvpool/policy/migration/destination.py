"""The destination's part of one migration: what it has to bring here, and when it may decode.

    moving ──> decoding ──> ended        released: it is ours; revoked: the source has taken it back
       └─────> failed                    never to be decoded here under this id

D1  It decodes only after a hand-over was heard and all of its tokens are whole here.
D2  `failed` is a promise: nothing changes it.
D3  A hand-over that was heard is enough: what cannot be fetched any more is computed from the tokens.
D4  What a source has asked back that is gone by now is not given back to it: nobody would have it.
D5  From `decoding` on its blocks are the request's own; before that they can be freed at any time.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from kvpool.policy.migration.messages import Addresses, DestinationSays, SourceSays, Tokens, Way
from kvpool.policy.migration.terms import Term

__all__ = ["Destination", "DestinationState", "Work"]

DestinationState: TypeAlias = Literal["moving", "decoding", "failed", "released", "revoked"]


class Work(NamedTuple):
    """What is to be brought here now.

    Attributes:
        begin: The first token; of a block, by KV.
        end: Behind the last one.
        urgent: The request has been stopped for it.
    """

    begin: int
    end: int
    urgent: bool


class Destination:
    """One request that arrives. Not thread-safe.

    Attributes:
        state: See above.
        why: In `failed` and `revoked`, why.
        full: It failed because there is no room.
        alone: In `moving`: the source has handed it over, and is gone. Nobody else has the request.
        by_proof: In `released`: the source has not said so, but its incarnation is fenced.
        tokens: The request's, as far as they are known here.
        blocks: Where its blocks lie at the source, as far as that is known.
        whole: So many tokens have keys and values here.
        sent: Blocks that were fetched.

    Args:
        offer: The source's first word.
        way: How it goes.
        cached: Blocks of its prefix that are cached here.
        block_tokens: Tokens of a block.
    """

    def __init__(self, offer: SourceSays, way: Way, cached: int, block_tokens: int) -> None:
        self.id = offer.id
        self.request = offer.request
        self.namespace = offer.namespace
        self.state: DestinationState = "moving"
        self.why = ""
        self.full = False
        self.alone = False
        self.by_proof = False
        self.tokens: Tokens = np.empty(0, np.int32)
        self.blocks: Addresses = np.empty(0, np.uint64)
        self.whole = cached * block_tokens
        self.sent = 0
        self._way = way
        self._cached = cached
        self._block_tokens = block_tokens
        self._number = 0  # of the source's last word
        self._told_whole = 0  # so many tokens the source has whole, as far as its blocks are known here
        self._handed: SourceSays | None = None
        self.hear(offer)

    @property
    def way(self) -> Way:
        """How it goes."""
        return self._way

    @property
    def ended(self) -> bool:
        """Whether nothing more is to be done."""
        return self.state in ("failed", "released", "revoked")

    @property
    def settled(self) -> bool:
        """Whether nothing more is to be heard about it, either."""
        return self.ended and not self.by_proof

    @property
    def handed(self) -> bool:
        """Whether a hand-over was heard: all tokens and the engine's state are known here."""
        return self._handed is not None

    @property
    def cached(self) -> int:
        """Blocks that were cached here."""
        return self._cached

    @property
    def term(self) -> Term:
        """Under which it decodes here. Only after a hand-over."""
        assert self._handed is not None
        return self._handed.term

    @property
    def engine_state(self) -> bytes:
        """The engine's own, of the hand-over."""
        return b"" if self._handed is None else self._handed.state

    @property
    def ready(self) -> bool:
        """Whether it may be decoded here."""
        handed = self._handed
        return self.state == "moving" and handed is not None and self.whole >= handed.whole

    def hear(self, said: SourceSays, *, gone: bool = False) -> None:
        """Takes what the source says; what is older than it has said before is dropped.

        Args:
            said: The message.
            gone: There is proof that the source's incarnation is gone. Then `withdrawn` is not heard: if it is only
                fenced, and wakes, it asks again.
        """
        if gone and said.phase == "withdrawn":
            return
        if said.number <= self._number or (self.ended and not self.by_proof):
            return
        self._number = said.number
        if said.phase == "released":
            if self.state in ("decoding", "released"):
                self.state, self.by_proof = "released", False
        elif said.phase == "revoked":
            self.why = "the source has taken the request back"
            self.state, self.by_proof = "failed" if self.state == "moving" else "revoked", False
        elif said.phase in ("cancelled", "withdrawn"):
            if self.state == "moving":
                self.fail(f"{said.phase} by the source")
        elif self.state == "moving":
            self._learn(said)

    def work(self) -> Work | None:
        """What is to be brought here next, as far as it is known; None if everything is here."""
        if self.state != "moving" or self.whole >= self._told_whole:
            return None
        begin = self.whole if self._way == "tokens" else self.whole // self._block_tokens * self._block_tokens
        return Work(begin, self._told_whole, self._handed is not None)

    def brought(self, whole: int, blocks: int) -> None:
        """So many tokens are whole here now, and so many blocks were fetched for that."""
        self.whole = max(self.whole, whole)
        self.sent += blocks

    def decode(self) -> None:
        """The engine decodes it from now on."""
        assert self.ready, "decoded before everything is here"
        self.state = "decoding"

    def fail(self, why: str, *, full: bool = False) -> None:
        """Gives up, for ever. Not once it decodes."""
        if self.state == "moving":
            self.state, self.why, self.full = "failed", why, full

    def gone(self, why: str, *, ended: bool) -> None:
        """There is proof that the source's incarnation is gone.

        Args:
            why: What is the proof.
            ended: Its process has ended; otherwise it is only fenced, and may wake up and ask.
        """
        if self.state == "decoding" or self.by_proof:
            self.state, self.by_proof = "released", not ended
        elif not self.compute_rest():  # else it is decoded here: its source has let it go
            self.fail(why)
        else:
            self.alone = True

    def compute_rest(self) -> bool:
        """What is not here yet is computed: it cannot be fetched. False: no hand-over was heard, or it has ended."""
        if self.state != "moving" or self._handed is None:
            return False
        if not self.ready:
            self._way = "tokens"
        return True

    def says(self, number: int) -> DestinationSays:
        """What to tell the source now."""
        return DestinationSays(
            self.id,
            number,
            "failed" if self.state in ("failed", "revoked") else "moving" if self.state == "moving" else "decoding",
            self._way,
            len(self.tokens),
            len(self.blocks),
            self.whole,
            self._cached,
            self.sent,
            self.full,
            self.why,
        )

    def _learn(self, said: SourceSays) -> None:
        """Adds tokens and blocks behind those that are known; a message that begins beyond them waits for another."""
        if said.at > len(self.tokens) or said.first > len(self.blocks):
            return
        known = max(said.first + len(said.blocks), len(self.blocks))
        if self._way == "kv" and known * self._block_tokens < said.whole:
            self.fail("the source's blocks do not hold the tokens that it says are whole")
            return
        new = said.tokens[len(self.tokens) - said.at :]
        if len(new):
            self.tokens = np.concatenate([self.tokens, new])
        more = said.blocks[len(self.blocks) - said.first :]
        if len(more):
            self.blocks = np.concatenate([self.blocks, more])
        self._told_whole = max(self._told_whole, said.whole)
        if said.phase == "handed":
            self._handed = said
