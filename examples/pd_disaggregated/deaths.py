"""What users notice when an instance is killed: how long nobody else answers, and how soon it is of use again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pd_disaggregated.records import Answer, Event, EventKind, RunResult


def noticed_s(result: RunResult) -> list[float]:
    """Seconds from each kill until the last of the other instances has been told of it."""
    return [max(at) for at in _after_kills(result.events, "noticed") if at]


def silences_s(result: RunResult) -> list[float]:
    """Seconds from each kill to the first token of an instance that has been told of it.

    None for a kill after which no such token came: the run was over, or nobody else is there.
    """
    return [min(at) for at in _after_kills(result.events, "went_on") if at]


def _after_kills(events: list[Event], kind: EventKind) -> Iterator[list[float]]:
    """For each kill, when this happened to others before the next kill, in seconds from it."""
    kills = sorted((event for event in events if event.kind == "killed"), key=lambda event: event.at_s)
    for number, kill in enumerate(kills, 1):
        end = kills[number].at_s if number < len(kills) else float("inf")
        yield [
            event.at_s - kill.at_s
            for event in events
            if event.kind == kind and event.instance != kill.instance and kill.at_s <= event.at_s < end
        ]


def returns_s(result: RunResult) -> list[float]:
    """Seconds from each return of a killed instance to its first token.

    Counted from when there was something to do for it, where it was idle before: for one that prefills from the first
    question that it has answered since, for one that decodes from when that was prefilled.
    """
    return [
        served.at_s - max(joined.at_s, _first_work_s(result.answers, joined))
        for joined, served in _returned(result.events)
    ]


def _first_work_s(answers: Sequence[Answer], joined: Event) -> float:
    """When it came; not later than it did, for what was begun elsewhere."""
    name, since = joined.instance, joined.at_s
    asked = (one.asked_s for one in answers if one.prefill == name and one.first_s > since)
    prefilled = (one.first_s for one in answers if one.decode == name != one.prefill and one.done_s > since)
    return min((*asked, *prefilled), default=since)


def _returned(events: list[Event]) -> Iterator[tuple[Event, Event]]:
    """For each kill after which the instance has served again: when it joined, and when it gave its first token."""
    dead: set[str] = set()
    joined: dict[str, Event] = {}
    for event in sorted(events, key=lambda event: event.at_s):
        if event.kind == "killed":
            dead.add(event.instance)
            joined.pop(event.instance, None)
        elif event.kind == "joined" and event.instance in dead:
            dead.discard(event.instance)
            joined[event.instance] = event
        elif event.kind == "served" and event.instance in joined:
            yield joined.pop(event.instance), event
