"""Which instance gets a request: the policy's choice, but no request waits in vain while an instance is idle.

A policy alone may send all requests to the instances that hold a bit of the prompt, and none to the others. So while an
instance is idle, a busy one is eligible only if waiting for it costs no more than computing the prefix again:

    backlog there <= patience * (execution on the idle one - execution there)

`patience` is the balance's, or the policy's own where the balance leaves it open.

That holds for every policy, for sessions too. Backlogs are in seconds (tokens, for instances that decode), so the bound
is a time, however loaded the other instances are. The load cap comes second: if it forbids every instance that this
rule allows, the request ignores it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import numpy as np

from kvpool.policy.routing.candidates import FEW, Candidates, Values
from kvpool.policy.routing.load import LoadTable
from kvpool.policy.routing.policies import Asked, Policy, Ranking, View
from kvpool.policy.routing.search import find_best
from kvpool.policy.routing.waiting import Wait

__all__ = ["choose", "view"]


def choose(
    policy: Policy,
    table: LoadTable,
    found: Candidates,
    exec_s: Sequence[Values],
    now: float,
    session: str | None,
    asked: Asked | None = None,
) -> int:
    """The slot of the instance that gets a request.

    Args:
        policy: The policy that decides.
        table: The instances that it decides among. REQUIRES: one of them is open.
        found: How much each of them holds.
        exec_s: The time of the prompt for each model and each of `found.lengths`; the load cap uses the largest.
        now: Seconds.
        session: The request's.
        asked: The prompt, for a policy that asks; None for none.
    """
    patience = _patience(policy, table)
    if asked is not None and isinstance(policy, Ranking):
        policy.asked(asked)
    if isinstance(policy, Ranking) and policy.ranks(session):
        slot = _find(policy, table, found, exec_s, now, session, patience)
        if slot is not None:
            policy.sent(session, table.id_of(slot))
            return slot
    return policy.choose(view(table, found, exec_s, now, session, patience))


def view(
    table: LoadTable,
    found: Candidates,
    exec_s: Sequence[Values],
    now: float,
    session: str | None,
    patience: float,
) -> View:
    """All instances, for a policy that has to see them all. Arguments as for `choose`; `patience` as in Balance."""
    spread = found.spread(exec_s[0])
    for number, other in enumerate(exec_s[1:], start=1):
        spread = np.where(table.models == number, found.spread(other), spread)
    cached = found.spread(found.lengths).astype(np.int64)
    load, backlog = table.load(now), table.backlog(now)
    is_open, allowed = table.is_open, table.may_get_more(load, now, _most(exec_s))
    idle = table.is_idle()
    if idle.any() and patience != inf:
        wait = Wait(patience, float(spread[idle].min()))
        is_open = is_open & wait.pays_of(backlog, spread)
        allowed = allowed & is_open
        if not allowed.any():
            allowed = is_open
    return View(table.ids, cached, backlog, spread, load, is_open, allowed, session)


def _find(
    policy: Ranking,
    table: LoadTable,
    found: Candidates,
    exec_s: Sequence[Values],
    now: float,
    session: str | None,
    patience: float,
) -> int | None:
    """The slot that a ranking policy chooses, found by examining few; None if it was not found."""
    work, home = _most(exec_s), policy.home(session)
    slot = (
        table.slot(home) if home >= 0 and table.has_open(home) else find_best(policy, table, found, exec_s, now, work)
    )
    if slot is None:
        return None
    wait = _wait_exceeded(table, found, exec_s, slot, now, patience)
    return slot if wait is None else find_best(policy, table, found, exec_s, now, work, wait)


def _wait_exceeded(
    table: LoadTable, found: Candidates, exec_s: Sequence[Values], slot: int, now: float, patience: float
) -> Wait | None:
    """How long the request may wait, if its wait at this instance is longer; else None."""
    backlog = table.backlog_of(slot, now)
    if backlog <= 0.0 or patience == inf or not table.idle:
        return None
    own_s = exec_s[table.model_of(slot) if len(exec_s) > 1 else 0][found.at(slot)]
    kinds = sorted((times[at], model, at) for model, times in enumerate(exec_s) for at in range(len(found.lengths)))
    for least_s, model, at in kinds:
        wait = Wait(patience, least_s)
        if wait.pays(backlog, own_s):
            return None
        if _has_idle(table, found, model if len(exec_s) > 1 else None, at):
            return wait
    return None


def _has_idle(table: LoadTable, found: Candidates, model: int | None, at: int) -> bool:
    """Whether an idle instance of a model (None: of any) holds the length with this index in `found.lengths`."""
    idle = table.idle
    if len(idle) <= FEW or at == len(found.lengths) - 1:
        some = (slot for slot in idle if found.at(slot) == at)
    elif found.count(at) <= FEW:
        some = (slot for slot in found.few(at) if slot in idle)
    else:
        slots = found.slots(at)
        some = iter(slots[table.is_idle()[slots]].tolist())
    return any(model is None or table.model_of(slot) == model for slot in some)


def _patience(policy: Policy, table: LoadTable) -> float:
    own = policy.patience if isinstance(policy, Ranking) else Ranking.patience
    return own if table.balance.patience is None else table.balance.patience


def _most(exec_s: Sequence[Values]) -> float:
    return exec_s[0][-1] if len(exec_s) == 1 else max(times[-1] for times in exec_s)
