"""Two processes of one subject: a sender that is timed, and a receiver that checks what it got."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.measure import Sample
from bench.peers.find import Peers, Program
from bench.remote import ANSWER_S_MAX, Remote, RemoteError

_NOTE_CHARACTERS_MAX = 240


@dataclass(frozen=True)
class Kind:
    """One subject of a comparison.

    Attributes:
        name: For a person.
        variants: Names of the ways in which it makes the same transfer; each is timed.
        peer: As bench/peers/find.py calls it; empty for kvpool.
        module: Of kvpool's own subjects.
        environment: Variables for both processes.
        options: Passed to `receive` and `send`.
        bytes_min: Blocks smaller than this are not measured.
        answer_s_max: One that does not answer for so long has failed.
    """

    name: str
    variants: tuple[str, ...]
    peer: str = ""
    module: str = "bench.transfer.own"
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    bytes_min: int = 0
    answer_s_max: float = ANSWER_S_MAX


class Pair:
    """Use it in a `with`, or close it."""

    def __init__(self, kind: Kind, program: Program) -> None:
        """Starts both processes and does not wait for them."""
        self.kind = kind
        self._program = program
        self._slots: list[int] = []
        self.start_again()

    def start_again(self) -> None:
        """Fresh processes: after a failure nobody knows what the old ones may still write."""
        environment = {**self._program.environment, **self.kind.environment}
        self.receiver, self.sender = (
            Remote(self._program.module, self._program.python, environment, self.kind.answer_s_max) for _ in range(2)
        )

    @classmethod
    def start(cls, kinds: Sequence[Kind], peers: Peers) -> list[Pair]:
        """Those kinds that can be had. One that is absent or does not start is left out, and `peers` notes it."""
        pairs = []
        for kind in kinds:
            program = peers.program(kind.peer) if kind.peer else Program(kind.module, sys.executable)
            if program is not None:
                pairs.append(cls(kind, program))
        living = []
        for pair in pairs:
            try:
                version = pair.sender.ask("version")
                pair.receiver.ready()
            except RemoteError as error:
                peers.notes.append(f"{pair.kind.name}: left out: {_first_line(error)}")
                pair.close()
                continue
            if pair.kind.peer:
                peers.versions[pair.kind.peer] = str(version)
            living.append(pair)
        return living

    def open(self, count: int, size: int) -> None:
        """Connects them, with `count` scattered blocks of `size` bytes."""
        options = dict(self.kind.options)
        target = self.receiver.ask("receive", count=count, size=size, **options)
        self.receiver.ask("attend", on=True)
        try:
            self._slots = self.sender.ask("send", count=count, size=size, target=target, **options)
        finally:
            self.receiver.ask("attend", on=False)

    def verify(self, variant: str, number: int) -> None:
        """Stamps the blocks with a number, sends them once, and checks every byte at the receiver."""
        self.sender.ask("stamp", number=number)
        self.receiver.ask("attend", on=True)
        try:
            self.sender.ask("once", variant=variant)
        finally:
            self.receiver.ask("attend", on=False)
        self.check(number)

    def check(self, number: int) -> None:
        self.receiver.ask("check", number=number, slots=self._slots)

    def check_others(self) -> None:
        self.receiver.ask("check_others", slots=self._slots)

    def time(self, variant: str, seconds: float, at_least: int) -> list[float]:
        self.receiver.ask("attend", on=True)
        try:
            times: list[float] = self.sender.ask("time", variant=variant, seconds=seconds, at_least=at_least)
        finally:
            self.receiver.ask("attend", on=False)
        return times

    def shut(self) -> None:
        """Gives the memory of this configuration back; the processes stay."""
        self.receiver.ask("attend", on=True)
        self.sender.ask("end")
        self.receiver.ask("attend", on=False)
        self.receiver.ask("end")

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Timing:
    """What the rounds of one variant come to.

    Attributes:
        sample: Of all transfers; the median is the median of the rounds' medians.
        rounds_us: Median of each round.
    """

    sample: Sample
    rounds_us: tuple[float, ...]


@dataclass(frozen=True)
class Point:
    """What was measured at one configuration.

    Attributes:
        count: Blocks of a transfer.
        size: Bytes of a block.
        timings: By name of the kind and variant.
        facts: What a sender told about the way it took, by name of the kind.
    """

    count: int
    size: int
    timings: Mapping[tuple[str, str], Timing]
    facts: Mapping[str, Mapping[str, Any]]

    def best_us(self, name: str) -> float | None:
        """The median of the fastest variant of a kind; None where it was not measured."""
        medians = [timing.sample.median_us for (kind, _), timing in self.timings.items() if kind == name]
        return min(medians, default=None)


def measure(pairs: Sequence[Pair], count: int, size: int, rounds: int, seconds: float, notes: list[str]) -> Point:
    """Times all pairs in turns at one configuration, and verifies what arrived before and after.

    Args:
        pairs: One that fails is left out of this configuration, and gets fresh processes for the next.
        count: Blocks of a transfer.
        size: Bytes of a block.
        rounds: Turns of each.
        seconds: Of each turn.
        notes: Gets a line for each pair that could not do it.
    """
    facts: dict[str, dict[str, Any]] = {}
    times: dict[tuple[str, str], list[list[float]]] = {}
    taking_part = []
    for pair in [pair for pair in pairs if size >= pair.kind.bytes_min]:
        with _Attempt(pair, count, size, notes) as attempt:
            pair.open(count, size)
            for number, variant in enumerate(pair.kind.variants):
                pair.verify(variant, number)
                times[pair.kind.name, variant] = []
        if not attempt.failed:
            taking_part.append(pair)
    for number in range(rounds):
        for pair in list(taking_part):
            with _Attempt(pair, count, size, notes) as attempt:
                if number == 0:
                    pair.sender.ask("stamp", number=len(pair.kind.variants))
                for variant in pair.kind.variants:
                    times[pair.kind.name, variant].append(pair.time(variant, seconds, 1))
                if number == rounds - 1:
                    pair.check(len(pair.kind.variants))
                    pair.check_others()
            if attempt.failed:
                taking_part.remove(pair)
                for variant in pair.kind.variants:
                    times.pop((pair.kind.name, variant), None)
    for pair in taking_part:
        with _Attempt(pair, count, size, notes):
            facts[pair.kind.name] = pair.sender.ask("facts")
            pair.shut()
    return Point(count, size, {key: _timing(values) for key, values in times.items() if values}, facts)


class _Attempt:
    """Keeps a failure of one pair from ending the comparison, and notes it."""

    def __init__(self, pair: Pair, count: int, size: int, notes: list[str]) -> None:
        self.failed = False
        self._pair = pair
        self._where = f"{count} x {size}"
        self._notes = notes

    def __enter__(self) -> _Attempt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> bool:
        if not isinstance(error, RemoteError):
            return False
        self.failed = True
        self._notes.append(f"{self._pair.kind.name} at {self._where} left out: {_first_line(error)}")
        self._pair.close()
        self._pair.start_again()
        return True


def _first_line(error: RemoteError) -> str:
    return str(error).partition("\n")[0][:_NOTE_CHARACTERS_MAX]


def _timing(rounds: list[list[float]]) -> Timing:
    medians = tuple(median(times) for times in rounds)
    ordered = sorted(time for times in rounds for time in times)
    p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return Timing(Sample(median(medians), p99, ordered[0], len(ordered)), medians)
