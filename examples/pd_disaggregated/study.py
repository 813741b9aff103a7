"""The study: which settings serve which workload at which load, and their results.

Settings are compared at equal numbers of instances, and a rate is that of one instance: 1P1D counts as two and is
offered as much as two colocated ones. All settings of a comparison are asked the same, word for word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from pd_disaggregated import deaths, workloads
from pd_disaggregated.metrics import Summary, summarize
from pd_disaggregated.records import DISAGGREGATED, Answer, Event, Kill, RunResult, Session, Setting

# Requests a second and instance. The middle one is about what two colocated instances without a cache can serve on two
# cores at 2.5 GHz, where a prompt of 1,024 tokens takes half a second and a generated token 5 to 10 ms.
RATES = {"chat": (0.5, 1.0, 1.5), "documents": (0.3, 0.6, 0.9), "react": (0.2, 0.4, 0.6)}

LEASE_S = 3.0  # after which an instance that says nothing is lost to its peers

ONE_EACH = tuple(Setting(design, 1, 1) for design in DISAGGREGATED)
TWO = (Setting("PD", 2, 0), Setting("PD-CC", 2, 0), *ONE_EACH)
BY_LAYER = Setting("PD-Caching-3", 1, 1, "by_layer")
THREE = (
    Setting("PD", 3, 0),
    Setting("PD-CC", 3, 0),
    Setting("PD-Basic", 2, 1),
    Setting("PD-Basic", 1, 2),
    Setting("PD-Caching-3", 2, 1),
    Setting("PD-Caching-3", 1, 2),
)
_THREE_WITH_CACHE = (THREE[1], *THREE[-2:])
_AT_EVERY_LOAD = (*TWO[:2], ONE_EACH[0], ONE_EACH[-1])  # as in Fig 8: without and with a cache, of either kind

Size = Literal["quick", "standard", "long"]
"""How much of the study. How long a run takes is decided by when its sessions arrive: at the lowest load two instances
wait most of the time.

quick     one load, two instances, few sessions: some minutes
standard  all that the study must show, 9 to 12 minutes on two quiet cores: all designs at the load where no cache is
          just enough, and at a higher one those without and with a cache; layer by layer, three instances, and kills
          for one workload
long      three loads and three instances for every workload, more sessions: forty minutes
"""
_SESSIONS: dict[Size, int] = {"quick": 3, "standard": 5, "long": 8}
_KILL_SESSIONS_MIN = 12  # with fewer, nothing may be left to ask when the last one that was killed is back
_AT_ONE_LOAD = ("documents",)  # in the standard study: its sessions take longest to arrive
_KILLED = Setting("PD-Caching-3", 2, 2)
_RUSH = 4  # times the highest load


class Run(Protocol):
    """`pd_disaggregated.dispatcher.run`, or what stands for it in a test."""

    def __call__(
        self,
        setting: Setting,
        sessions: Sequence[Session],
        /,
        *,
        on_answer: Callable[[Answer], None] | None = None,
        kill: Sequence[Kill] = (),
        lease_s: float = ...,
    ) -> RunResult:
        """Serves the sessions."""


@dataclass(frozen=True)
class Cell:
    """One run of the study.

    Attributes:
        workload: One of `workloads.WORKLOADS`.
        rate: Requests a second and instance.
        setting: What serves it.
        sessions: How many.
        seed: Of the workload.
        kill: Instances to kill meanwhile, each after a share (0 to 1) of all tokens.
    """

    workload: str
    rate: float
    setting: Setting
    sessions: int
    seed: int = 0
    kill: tuple[tuple[str, float], ...] = ()

    @property
    def instances(self) -> int:
        """Of the setting, of both kinds."""
        return self.setting.prefill + self.setting.decode

    @property
    def name(self) -> str:
        """For people."""
        killed = f", {' and '.join(name for name, _ in self.kill)} killed" if self.kill else ""
        return f"{self.workload}, {self.rate:g}/s an instance: {self.setting.name}{killed}"

    def made(self) -> workloads.Workload:
        """What is asked in it."""
        return workloads.make(self.workload, self.sessions, self.rate * self.instances, self.seed)


@dataclass(frozen=True)
class Measured:
    """What came of a cell.

    Attributes:
        cell: What ran.
        source: Where the workload's lengths come from.
        summary: Its figures.
        tokens: Of each answer, by (session, turn).
        verified: Whether the run has compared all tokens with those of one process.
        lost_blocks: Neither free nor cached at the end, in all instances.
        audited: Instances whose pool was audited at the end.
        events: What happened to instances.
        noticed_s: After each kill, until each of the others that had met it was told: see `deaths`.
        silences_s: After each kill, until each of the others gave a token.
        returns_s: After each restart, until the instance gave a token.
        strays: Instances that ended and were not killed by the run.
    """

    cell: Cell
    source: str
    summary: Summary
    tokens: dict[tuple[int, int], tuple[int, ...]]
    verified: bool
    lost_blocks: int
    audited: int
    events: tuple[Event, ...]
    noticed_s: tuple[float, ...]
    silences_s: tuple[float, ...]
    returns_s: tuple[float, ...]
    strays: int

    def as_json(self) -> dict[str, Any]:
        """All figures, for programs; without the tokens."""
        return {
            "cell": {**asdict(self.cell), "name": self.cell.name, "instances": self.cell.instances},
            "source": self.source,
            "summary": self.summary.as_json(),
            "verified": self.verified,
            "lost_blocks": self.lost_blocks,
            "audited": self.audited,
            "events": [asdict(event) for event in self.events],
            "noticed_s": self.noticed_s,
            "silences_s": self.silences_s,
            "returns_s": self.returns_s,
            "strays": self.strays,
        }


def plan(names: Sequence[str], *, size: Size = "standard", seed: int = 0) -> list[Cell]:
    """All cells of the study.

    Args:
        names: Workloads. The standard study shows three instances, streaming and kills with the first of them.
        size: How much of it.
        seed: Of the workloads.
    """
    sessions = _SESSIONS[size]
    cells = []
    for name in names:
        middle = RATES[name][1]
        for rate in _rates(name, size):
            wanted = TWO if rate == middle else _AT_EVERY_LOAD
            cells += [Cell(name, rate, setting, sessions, seed) for setting in wanted]
        more = (BY_LAYER, *THREE) if size == "long" else (BY_LAYER, *_THREE_WITH_CACHE)
        if size == "long" or (size == "standard" and name == names[0]):
            cells += [Cell(name, middle, setting, sessions, seed) for setting in more]
    return [*cells, *(_with_kills(name, max(sessions, _KILL_SESSIONS_MIN), seed) for name in names[:1])]


def _rates(name: str, size: Size) -> Sequence[float]:
    low, middle, high = RATES[name]
    if size == "long":
        return low, middle, high
    return (middle,) if size == "quick" or name in _AT_ONE_LOAD else (middle, high)


def _with_kills(name: str, sessions: int, seed: int) -> Cell:
    """Two of each kind, so that somebody is left to serve on while one of either kind is away.

    The sessions come nearly at once, so that all instances are at work when it happens, on a fast machine, too. Both
    are killed in the first half, so that there is enough to do for them when they are back.
    """
    kill = (("prefill-0", 0.2), ("decode-0", 0.4))
    return Cell(name, _RUSH * RATES[name][2], _KILLED, sessions, seed, kill)


def measure(cell: Cell, run: Run, on_answer: Callable[[Answer], None] | None = None) -> Measured:
    """Runs a cell.

    Args:
        cell: What to run.
        run: What runs it.
        on_answer: Called with each answer as it is done.

    Raises:
        ValueError: The answers are not those to what was asked.
    """
    workload = cell.made()
    tokens = sum(turn.new_tokens for session in workload.sessions for turn in session.turns)
    kill = [Kill(name, max(1, round(share * tokens))) for name, share in cell.kill]
    result = run(cell.setting, workload.sessions, on_answer=on_answer, kill=kill, lease_s=LEASE_S)
    return Measured(
        cell=cell,
        source=workload.source,
        summary=summarize(result, workload.sessions),
        tokens={(answer.session, answer.turn): answer.tokens for answer in result.answers},
        verified=result.verified,
        lost_blocks=result.lost_blocks,
        audited=len(result.audits),
        events=tuple(result.events),
        noticed_s=tuple(deaths.noticed_s(result)),
        silences_s=tuple(deaths.silences_s(result)),
        returns_s=tuple(deaths.returns_s(result)),
        strays=deaths.strays(result),
    )


def most_compared(runs: Sequence[Measured]) -> list[Measured]:
    """Of each workload the runs at the load at which most settings ran."""
    chosen: list[Measured] = []
    for name in dict.fromkeys(run.cell.workload for run in runs):
        of = [run for run in runs if run.cell.workload == name]
        rates = [run.cell.rate for run in of]
        rate = max(dict.fromkeys(rates), key=rates.count)
        chosen += [run for run in of if run.cell.rate == rate]
    return chosen
