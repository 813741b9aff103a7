"""What users notice when an instance is killed: how long the others do not answer, and how soon it serves again.

Who has nothing to do gives no token, and that is nobody's fault. So every time counts from when there was something to
do for the instance, where that came later.
"""

from __future__ import annotations

from collections.abc import Iterator

from pd_disaggregated.records import Event, RunResult


def noticed_s(result: RunResult) -> list[float]:
    """For each kill and each other instance that kvpool informed of it: seconds from the kill.

    It is told where it has met the one that was killed, which needs that something was sent between them.
    """
    return [noticed.at_s - kill.at_s for kill, _, noticed in _survivors(result) if noticed is not None]


def silences_s(result: RunResult) -> list[float]:
    """For each kill and each other instance that lives: seconds from the kill to its next token.

    To the first one after it was told of the kill, where it was told: what it gave before does not show that it can
    do without the one that is gone. One that gave none because nothing was left to do is not counted.
    """
    silences = []
    for kill, name, noticed in _survivors(result):
        token = _next_token(result, name, noticed or kill)
        if token is not None:
            silences.append(_waited_s(token, kill))
    return silences


def returns_s(result: RunResult) -> list[float]:
    """For each kill after which the instance has served again: seconds from its return to its first token."""
    returns = []
    for kill in _kills(result):
        joined = next(_after(result, kill.instance, kill, "joined"), None)
        token = None if joined is None else next(_after(result, kill.instance, joined, "served"), None)
        if joined is not None and token is not None:
            returns.append(_waited_s(token, joined))
    return returns


def strays(result: RunResult) -> int:
    """How many instances ended that the run had not killed: those that are left must not die of it."""
    found = 0
    killed: set[str] = set()
    for event in result.events:
        if event.kind == "killed":
            killed.add(event.instance)
        elif event.kind == "joined":
            killed.discard(event.instance)
        elif event.kind == "lost":
            found += event.instance not in killed
    return found


def _kills(result: RunResult) -> list[Event]:
    return [event for event in result.events if event.kind == "killed"]


def _survivors(result: RunResult) -> Iterator[tuple[Event, str, Event | None]]:
    """For each kill every other instance that lives then, and when it was told."""
    for kill in _kills(result):
        for name in result.setting.instances:
            if name != kill.instance and _is_up(result, name, kill.at_s):
                told = (event for event in _after(result, name, kill, "noticed") if event.peer == kill.instance)
                yield kill, name, next(told, None)


def _is_up(result: RunResult, name: str, at_s: float) -> bool:
    """Whether it has joined by then, and has not been killed or lost since."""
    happened = [event.kind for event in result.events if event.instance == name and event.at_s <= at_s]
    return next((kind == "joined" for kind in reversed(happened) if kind in ("joined", "killed", "lost")), False)


def _next_token(result: RunResult, name: str, since: Event) -> Event | None:
    """Of one that has given none since it joined, the next one is its first."""
    return next(_after(result, name, since, "went_on", "served"), None)


def _after(result: RunResult, name: str, since: Event, *kinds: str) -> Iterator[Event]:
    """What happened to an instance from then on, until it was killed."""
    for event in result.events:
        if event is since or event.at_s < since.at_s or event.instance != name:
            continue
        if event.kind == "killed":
            return
        if event.kind in kinds:
            yield event


def _waited_s(token: Event, since: Event) -> float:
    return token.at_s - (since.at_s if token.since_s is None else max(since.at_s, token.since_s))
