"""Made-up runs of the PD example, with known results."""

from __future__ import annotations

import functools

import numpy as np
from pd_disaggregated import study
from pd_disaggregated.records import Answer, Event, RunResult, Session, Setting, Turn

import kvpool

BLOCK = 16
TOKEN_BYTES = 2048  # of the demo's model
ADDED, ANSWER = 32, 48


def conversation(number, turns=4, remembers=True, prefix=0):
    text = np.arange(ADDED, dtype=np.int32)
    return Session(number, 0.0, np.zeros(prefix, np.int32), (Turn(text, ANSWER),) * turns, remembers)


def whole(tokens):
    return tokens // BLOCK * BLOCK


def made_up(setting, sessions, *, on_answer=None, kill=(), lease_s=3.0, ttft_s=0.5, token_s=0.01, audits=None):
    """What a run would return if every design did exactly what it says. A cached token takes no time."""
    cached = setting.design not in ("PD", "PD-Basic")
    answers = []
    for session in sessions:
        at_prefill = at_decode = said = 0
        base = len(session.prefix)
        for number, turn in enumerate(session.turns):
            prompt = (base + said if session.remembers else base) + len(turn.added)
            end = prompt + turn.new_tokens
            hit = min(at_prefill, whole(prompt - 1)) if cached else 0
            held = min(at_decode, whole(prompt)) if setting.design in ("PD-Caching-2", "PD-Caching-3") else 0
            keeps_answer = session.remembers and setting.design in ("PD-CC", "PD-Caching-3")
            at_prefill = whole(end - 1) if keeps_answer else whole(prompt) if session.remembers else whole(base)
            at_decode = whole(end - 1) if session.remembers else whole(base)
            first = ttft_s * (prompt - hit) / prompt
            answers.append(
                Answer(
                    session=session.number,
                    turn=number,
                    prompt_tokens=prompt,
                    cached_at_prefill=hit,
                    cached_at_decode=held,
                    tokens=(7,) * turn.new_tokens,
                    asked_s=10.0 * number,
                    first_s=10.0 * number + first,
                    second_s=10.0 * number + first + 2 * token_s,
                    done_s=10.0 * number + first + turn.new_tokens * token_s,
                    prefill=setting.instances[0],
                    decode=setting.instances[-1],
                    bytes_to_decode=0 if setting.colocated else (-(-prompt // BLOCK) * BLOCK - held) * TOKEN_BYTES,
                    bytes_to_prefill=(at_prefill - hit) * TOKEN_BYTES if setting.design == "PD-Caching-3" else 0,
                    kvpool_s=0.002,
                    attempts=2 if kill else 1,
                )
            )
            if on_answer is not None:
                on_answer(answers[-1])
            said = end - base
    events = [Event(-1.0, name, "joined") for name in setting.instances]
    for number, order in enumerate(kill, 1):
        events += killed(10.0 * number, order.instance, setting)
    if audits is None:
        audits = dict.fromkeys(setting.instances, empty())
    return RunResult(setting, answers, 40.0, audits, events, verified=True)


def killed(at, victim, setting):
    """The events of a kill: the others are informed, and go on; the instance comes back and serves."""
    others = [name for name in setting.instances if name != victim]
    return [
        Event(at, victim, "killed"),
        *(Event(at + 0.1, name, "noticed", peer=victim) for name in others),
        Event(at + 0.2, victim, "lost"),
        *(Event(at + 0.3, name, "went_on", since_s=at - 1.0) for name in others),
        Event(at + 1.5, victim, "joined"),
        Event(at + 2.6, victim, "served", since_s=at + 2.0),
    ]


@functools.cache
def empty():
    """A pool of which nothing is used."""
    layout = kvpool.KVLayout(layers=1, kv_heads=1, head_dim=8, dtype="float32", block_tokens=BLOCK)
    with kvpool.Pool(layout, hbm_blocks=4) as pool:
        return pool.stats()


def measured(design="PD-Caching-3", workload="chat", rate=1.0, kill=(), **changes):
    setting = Setting(design, 2, 0) if design in ("PD", "PD-CC") else Setting(design, 1, 1)
    cell = study.Cell(workload, rate, setting, sessions=2, kill=kill)
    return study.measure(cell, lambda *given, **options: made_up(*given, **options, **changes))
