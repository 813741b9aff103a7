"""What happens in a run: a request too long for one pool, the death of a creditor in the middle of the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from long_context.context import BLOCK, LEAF, Creditor
from long_context.fleet import Fleet
from long_context.member import Answer, Progress

Say = Callable[[str], None]

DEBTOR: Final = "a"
CREDITORS: Final = ("b", "c", "d")
VICTIM: Final = "c"
ALONE: Final = "big"

_WAIT_S: Final = 300.0  # for a part of the request, on a machine that is busy with other things
_ANSWERED_BEFORE: Final = 16  # tokens, when the creditor is killed


@dataclass(frozen=True)
class Size:
    """How long the request is, and how small the pools are.

    Attributes:
        pool_leaves: What a pool holds, in leaves of 1,024 tokens: 2 or more, and even.
        answer_tokens: So many of the request's tokens are generated.
    """

    pool_leaves: int = 4
    answer_tokens: int = 48

    @property
    def pool_blocks(self) -> int:
        return self.pool_leaves * LEAF // BLOCK

    @property
    def pool_tokens(self) -> int:
        return self.pool_leaves * LEAF

    @property
    def kv_tokens(self) -> int:
        """The tokens whose K and V are kept: 3.5 times what a pool holds."""
        return self.pool_tokens * 7 // 2

    @property
    def prompt_tokens(self) -> int:
        return self.kv_tokens + 1 - self.answer_tokens  # of the last token of an answer, no K and V are computed


@dataclass(frozen=True)
class Result:
    """What came out.

    Attributes:
        size: What was asked for.
        together: The answer of the four processes.
        alone: The answer of one process with a big pool.
        before: How far the request was before the creditor was killed.
        at_death: How far it was when the creditor was found dead, and what was lost.
        at_end: How far it was when the answer was complete.
        recomputed: So many tokens were computed again,
        recompute_s: in so many seconds.
        in_use: The blocks that are not free then, by process, as its own pool says,
        left_over: and those when the request has ended.
    """

    size: Size
    together: Answer
    alone: Answer
    before: Progress
    at_death: Progress
    at_end: Progress
    recomputed: int
    recompute_s: float
    in_use: dict[str, int]
    left_over: dict[str, int]

    @property
    def lost_tokens(self) -> int:
        return sum(end - begin for begin, end in self.at_death.lost)

    @property
    def promises(self) -> dict[str, bool]:
        """All that must be so."""
        blocks, answer = self.at_end.blocks, self.size.answer_tokens
        return {
            "the request is 3.5 times as long as what a pool holds": 2 * self.at_end.tokens >= 7 * self.size.pool_tokens
            and sum(blocks.values()) * BLOCK >= self.at_end.tokens
            and max(blocks.values()) <= self.size.pool_blocks
            and blocks == self.in_use,
            "a creditor died in the middle of the answer": 0 < self.at_death.answered < answer,
            "the tokens that it had were lost, and no others": 0
            < self.lost_tokens
            == self.before.blocks[VICTIM] * BLOCK,
            "these were computed again, and no others": self.recomputed == self.lost_tokens,
            "the answer has the tokens of one big process": self.together.tokens == self.alone.tokens
            and len(self.alone.tokens) == answer,
            "and its logits, bit for bit": self.together.logits.tobytes() == self.alone.logits.tobytes(),
            "no process has lost a block": not any(self.left_over.values()),
        }


def tell(size: Size, say: Say) -> Result:
    """Has the request served by four processes and by one, and kills a creditor meanwhile."""
    prompt = np.random.default_rng(1).integers(0, 256, size.prompt_tokens, np.int32)
    with Fleet() as fleet:
        members = (DEBTOR, *CREDITORS)
        fleet.start(dict.fromkeys(members, size.pool_blocks) | {ALONE: size.kv_tokens // BLOCK})
        for creditor in CREDITORS:
            fleet.connect(DEBTOR, creditor)
        say(
            f"Processes {', '.join(members)} have pools of {size.pool_blocks} blocks: {size.pool_tokens:,} tokens each."
        )
        say(f"A request needs {size.kv_tokens:,} tokens, 3.5 times as much. One big process serves it as well.\n")

        fleet[ALONE].order("serve", prompt, size.answer_tokens)
        fleet[DEBTOR].ask("begin", prompt, [Creditor(name, size.pool_blocks) for name in CREDITORS])
        _prefill(fleet, size, say)
        before, at_death = _decode_until_death(fleet, size, say)
        recomputed, recompute_s = _recompute(fleet, size, at_death, say)
        at_end = fleet[DEBTOR].ask("decode", size.answer_tokens, within_s=_WAIT_S)
        say(f"  The answer goes on, to {at_end.answered} tokens.\n")
        in_use = {name: fleet[name].ask("used_blocks") for name in members}
        together = fleet[DEBTOR].ask("end")
        left_over = {name: fleet[name].ask("used_blocks") for name in members}
        alone = fleet[ALONE].answer(_WAIT_S)
    return Result(size, together, alone, before, at_death, at_end, recomputed, recompute_s, in_use, left_over)


def _prefill(fleet: Fleet, size: Size, say: Say) -> None:
    """As many tokens at a time as a pool holds, and a line each."""
    say(f"{DEBTOR} computes the prompt, and lends out its oldest blocks as its pool fills.")
    for tokens in range(size.pool_tokens, size.prompt_tokens + size.pool_tokens, size.pool_tokens):
        progress: Progress = fleet[DEBTOR].ask("prefill", tokens, within_s=_WAIT_S)
        blocks = ", ".join(f"{name} {count:>3}" for name, count in progress.blocks.items())
        say(f"  {progress.tokens:>6,} tokens; blocks: {blocks}")


def _decode_until_death(fleet: Fleet, size: Size, say: Say) -> tuple[Progress, Progress]:
    say("\nIt begins to answer.")
    before: Progress = fleet[DEBTOR].ask("decode", _ANSWERED_BEFORE, within_s=_WAIT_S)
    fleet[DEBTOR].order("decode", size.answer_tokens)
    fleet[VICTIM].kill()
    at_death: Progress = fleet[DEBTOR].answer(_WAIT_S)
    lost = ", ".join(f"{begin:,} to {end:,}" for begin, end in at_death.lost)
    say(f"  kill -9 {VICTIM}, after {at_death.answered} of {size.answer_tokens} tokens.")
    say(f"  {DEBTOR} is told that tokens {lost or 'none'} are lost.")
    return before, at_death


def _recompute(fleet: Fleet, size: Size, at_death: Progress, say: Say) -> tuple[int, float]:
    fleet.start({VICTIM: size.pool_blocks})
    fleet.connect(DEBTOR, VICTIM)
    say(f"  {VICTIM} is started again, with an empty pool.")
    recomputed, recompute_s, progress = fleet[DEBTOR].ask("recompute", within_s=_WAIT_S)
    share = f"{recomputed:,} of {at_death.tokens:,} tokens"
    say(f"  {DEBTOR} computes {share} again, in {recompute_s:.1f} s; {VICTIM} holds {progress.blocks[VICTIM]} blocks.")
    return recomputed, recompute_s
