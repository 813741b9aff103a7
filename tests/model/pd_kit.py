"""Sessions, settings and runs of the PD example, small enough for a test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llama import LlamaConfig
from pd_disaggregated.dispatcher import run
from pd_disaggregated.records import Answer, Kill, RunResult, Session, Setting, Tokens, Turn
from pd_disaggregated.reference import Reference

SIZE = 4  # tokens of a block
SETTINGS = {
    "PD": Setting("PD", 2, 0),
    "PD-CC": Setting("PD-CC", 2, 0),
    **{name: Setting(name, 1, 1) for name in ("PD-Basic", "PD-Caching-1", "PD-Caching-2", "PD-Caching-3")},
}
CONFIG = LlamaConfig(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, block_tokens=SIZE, tokens_max=256)
TOKEN_BYTES = 2 * CONFIG.layers * CONFIG.kv_heads * CONFIG.head_dim * 4


def tokens(count: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 256, count).astype(np.int32)


def chats(count: int = 3, turns: int = 3, new_tokens: int = 8) -> list[Session]:
    """Conversations of an odd length: prompts end within a block, and at its end."""
    return [
        Session(
            number, 0.0, tokens(17 + number, number),
            tuple(Turn(tokens(5 + turn, 100 * number + turn), new_tokens) for turn in range(turns)), remembers=True,
        )
        for number in range(count)
    ]  # fmt: skip


def first_prompt(session: Session) -> Tokens:
    return np.concatenate([session.prefix, session.turns[0].added])


def play(setting: Setting, sessions: list[Session], reference: Reference, kill: Sequence[Kill] = ()) -> RunResult:
    """A run that is checked as every run must be: all answered, right tokens, no block lost.

    Only where somebody is killed must a lease end soon: a busy machine keeps an instance silent for seconds, and a lost
    peer changes what is sent and found.
    """
    lease_s = 2.0 if kill else 60.0
    result = run(setting, sessions, reference=reference, kill=kill, hbm_blocks=256, lease_s=lease_s, deadline_s=300.0)
    assert result.verified
    assert len(result.answers) == sum(len(session.turns) for session in sessions)
    assert set(result.audits) == set(setting.instances)
    assert result.lost_blocks == 0
    for stats in result.audits.values():
        assert (stats.hbm.active, stats.hbm.reserved, stats.hbm.lent, stats.hbm.quarantined) == (0, 0, 0, 0)
    return result


def by_turn(result: RunResult, session: int = 0) -> list[Answer]:
    return sorted((one for one in result.answers if one.session == session), key=lambda one: one.turn)


def whole(count: int) -> int:
    """Tokens in the whole blocks of so many."""
    return count // SIZE * SIZE
