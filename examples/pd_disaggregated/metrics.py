"""What a user of the instances notices, and what the instances did for it: figures of one run, from its answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pd_disaggregated.records import Answer, RunResult, Session


@dataclass(frozen=True)
class Spread:
    """Mean, median and 99th percentile, in seconds. Of few values the 99th percentile is close to the largest."""

    mean: float
    p50: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None where there are no values."""
        found = np.fromiter(values, np.float64)
        if not len(found):
            return None
        p50, p99 = np.percentile(found, (50, 99))
        return cls(float(found.mean()), float(p50), float(p99))


@dataclass(frozen=True)
class ByTurn:
    """The turns number `turn` of all sessions that have so many.

    Attributes:
        turn: From 1, as people count.
        requests: How many there were.
        prompt_tokens: Mean.
        hit_at_prefill: Tokens that were found where the prompt was prefilled, a share of the prompts' tokens.
        hit_at_decode: Tokens that the decode instance held already, a share of the prompts' tokens.
        decoded_tokens: Mean number of tokens found at prefill that were computed in decoding and not by prefilling
            there: see `decoded_hits`.
        bytes_to_decode: Mean of a request, prefill to decode.
        bytes_to_prefill: Mean of a request, decode to prefill.
    """

    turn: int
    requests: int
    prompt_tokens: float
    hit_at_prefill: float
    hit_at_decode: float
    decoded_tokens: float
    bytes_to_decode: float
    bytes_to_prefill: float


@dataclass(frozen=True)
class Summary:
    """Figures of one run.

    Attributes:
        requests: That were answered: all.
        wall_s: From the start to the last answer.
        ttft_s: From the question to the first token of the answer.
        ttst_s: From the question to the second token; with PD-Basic the first one that needs the transfer.
        tpot_s: A token after the first one, the mean of an answer.
        jct_s: From the question to the last token.
        prompt_tokens: In all.
        cached_at_prefill: Of these, found where their prompt was prefilled.
        cached_at_decode: Of these, held by the decode instance already.
        bytes_to_decode: In all.
        bytes_to_prefill: In all.
        kvpool_share: Time in calls of kvpool, of the requests' times from question to last token.
        retried: Answers that took more than one attempt.
        turns: In order.
    """

    requests: int
    wall_s: float
    ttft_s: Spread
    ttst_s: Spread | None
    tpot_s: Spread | None
    jct_s: Spread
    prompt_tokens: int
    cached_at_prefill: int
    cached_at_decode: int
    bytes_to_decode: int
    bytes_to_prefill: int
    kvpool_share: float
    retried: int
    turns: tuple[ByTurn, ...]

    @property
    def hit_at_prefill(self) -> float:
        """As in ByTurn, of all turns."""
        return self.cached_at_prefill / self.prompt_tokens

    @property
    def hit_at_decode(self) -> float:
        """As in ByTurn, of all turns."""
        return self.cached_at_decode / self.prompt_tokens

    def as_json(self) -> dict[str, Any]:
        """All figures, for programs."""
        return {**asdict(self), "hit_at_prefill": self.hit_at_prefill, "hit_at_decode": self.hit_at_decode}


def summarize(result: RunResult, sessions: Sequence[Session]) -> Summary:
    """Figures of a run.

    Args:
        result: Of `sessions`: every turn of every session answered once.
        sessions: What was asked.

    Raises:
        ValueError: Turns are missing, were answered twice, or were never asked.
    """
    answers = result.answers
    asked = sorted((session.number, turn) for session in sessions for turn in range(len(session.turns)))
    if not asked or sorted((answer.session, answer.turn) for answer in answers) != asked:
        raise ValueError(f"{len(answers)} answers are not those to {len(asked)} turns, each once")
    jct = [answer.done_s - answer.asked_s for answer in answers]
    ttft, done = Spread.of(answer.first_s - answer.asked_s for answer in answers), Spread.of(jct)
    assert ttft is not None
    assert done is not None
    return Summary(
        requests=len(answers),
        wall_s=result.wall_s,
        ttft_s=ttft,
        ttst_s=Spread.of(answer.second_s - answer.asked_s for answer in answers if answer.second_s is not None),
        tpot_s=Spread.of(
            (answer.done_s - answer.first_s) / (len(answer.tokens) - 1) for answer in answers if len(answer.tokens) > 1
        ),
        jct_s=done,
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        cached_at_prefill=sum(answer.cached_at_prefill for answer in answers),
        cached_at_decode=sum(answer.cached_at_decode for answer in answers),
        bytes_to_decode=sum(answer.bytes_to_decode for answer in answers),
        bytes_to_prefill=sum(answer.bytes_to_prefill for answer in answers),
        kvpool_share=sum(answer.kvpool_s for answer in answers) / sum(jct),
        retried=sum(answer.attempts > 1 for answer in answers),
        turns=_by_turn(answers, decoded_hits(answers, sessions)),
    )


def decoded_hits(answers: Sequence[Answer], sessions: Sequence[Session]) -> dict[tuple[int, int], int]:
    """Tokens that a prefill instance found and had not computed itself, by (session, turn).

    An instance that prefills a prompt has computed what it did not find of it, earlier answers included. So what it
    finds is of two kinds: what it computed for an earlier turn, and what a decode instance computed and sent back. This
    counts the second kind, which is what the last design adds to the one before it. Colocated instances decode
    themselves, and count the same way: what they kept from decoding.
    """
    found: dict[tuple[int, int], int] = {}
    by_place = {(answer.session, answer.turn): answer for answer in answers}
    for session in sessions:
        if not session.remembers:
            found.update({(session.number, turn): 0 for turn in range(len(session.turns))})
            continue
        generated = np.zeros(0, np.bool_)  # of each token of the conversation: an answer's, not a user's
        computed: dict[str, Any] = {}  # by instance, of each token: prefilled there
        said = len(session.prefix)
        for number, turn in enumerate(session.turns):
            answer = by_place[session.number, number]
            said += len(turn.added)
            generated = _longer(generated, said)
            here = _longer(computed.get(answer.prefill, generated[:0]), said)
            cached = answer.cached_at_prefill
            found[session.number, number] = int((generated[:cached] & ~here[:cached]).sum())
            here[cached:said] = True
            computed[answer.prefill] = here
            generated = np.concatenate([generated, np.ones(turn.new_tokens, np.bool_)])
            said += turn.new_tokens
    return found


def _longer(flags: Any, length: int) -> Any:
    """A copy of `flags`, filled up with False."""
    return np.concatenate([flags, np.zeros(length - len(flags), np.bool_)])


def _by_turn(answers: Sequence[Answer], decoded: dict[tuple[int, int], int]) -> tuple[ByTurn, ...]:
    turns = []
    for number in sorted({answer.turn for answer in answers}):
        these = [answer for answer in answers if answer.turn == number]
        prompts = sum(answer.prompt_tokens for answer in these)
        turns.append(
            ByTurn(
                turn=number + 1,
                requests=len(these),
                prompt_tokens=prompts / len(these),
                hit_at_prefill=sum(answer.cached_at_prefill for answer in these) / prompts,
                hit_at_decode=sum(answer.cached_at_decode for answer in these) / prompts,
                decoded_tokens=sum(decoded[answer.session, answer.turn] for answer in these) / len(these),
                bytes_to_decode=sum(answer.bytes_to_decode for answer in these) / len(these),
                bytes_to_prefill=sum(answer.bytes_to_prefill for answer in these) / len(these),
            )
        )
    return tuple(turns)
