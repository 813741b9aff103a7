"""The dispatcher: sends what arrives, starts and ends instances as plans ask, and reads what they put out."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Final, Literal, TypeAlias

from kvpool.errors import ArgumentError
from kvpool.policy.migration import OutputGate
from migration import messages
from migration.arrivals import Arrival
from migration.engine import Request
from migration.worker import Setting, run

__all__ = ["Answer", "Dispatcher", "Fault", "Instance", "Outcome", "counted"]

Fault: TypeAlias = Literal["kill", "stop"]

_STOP_S: Final = 4.0  # two leases
_TURN_S: Final = 0.02
_START_S: Final = 60.0  # until an instance serves, on a machine that is busy with other things


@dataclass
class Answer:
    """One request, as its reader sees it.

    Attributes:
        arrival: The request.
        tokens: What was put out, in order, each once.
        times: When each came, in seconds from the beginning of the run.
        attempt: Grows when its instance is lost: then it starts again, from the tokens that were put out.
        owner: The instance that was heard of it last.
        base: So many tokens were out when this attempt began.
        early: Tokens of two places that came before earlier ones, by position.
    """

    arrival: Arrival
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    attempt: int = 0
    owner: str = ""
    base: int = 0
    early: dict[int, messages.Token] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of this attempt."""
        return f"{self.arrival.name}.{self.attempt}"

    @property
    def done(self) -> bool:
        """Whether all of it is there."""
        return len(self.tokens) >= self.arrival.new_tokens

    def request(self) -> Request:
        """The request as it begins now."""
        tokens = [*self.arrival.prompt, *self.tokens]
        return Request(self.name, tokens, len(tokens), len(self.arrival.prompt) + self.arrival.new_tokens)


@dataclass
class Instance:
    """One process.

    Attributes:
        name: Of its member.
        process: It.
        pipe: To it.
        started_s: When it was started.
        ended_s: When it had ended.
        serves: Whether it has joined.
        ending: Whether it takes nothing more.
        totals: What it has said of its migrations last.
    """

    name: str
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    started_s: float
    ended_s: float | None = None
    serves: bool = False
    ending: bool = False
    totals: messages.Totals | None = None

    def tell(self, message: messages.ToInstance) -> None:
        """Sends it a message. One that has ended does not get it; its requests start again elsewhere."""
        with contextlib.suppress(OSError):
            self.pipe.send(message)


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        seconds: From the first arrival to the last token.
        answers: All requests.
        instances: All processes that there were.
        in_use: Seconds and the number of processes from then on.
        hit: Instances that were killed or stopped.
        restarts: Requests that started again.
        stops: Requests that were stopped to be handed over.
    """

    seconds: float
    answers: list[Answer]
    instances: list[Instance]
    in_use: list[tuple[float, int]]
    hit: list[str]
    restarts: int
    stops: int


class Dispatcher:
    """One run. It is the reader of all output.

    Args:
        setting: Of all instances.
        arrivals: What arrives.
        faults: What happens to instances, each in the middle of a migration, to its destination and its source in turn:
            "kill" (-9), or "stop" for longer than its lease.
        watch: Called now and then with this, to show how it goes.
    """

    def __init__(
        self,
        setting: Setting,
        arrivals: Sequence[Arrival],
        faults: Sequence[Fault],
        watch: Callable[[Dispatcher], None],
    ) -> None:
        self.setting = setting
        self.answers = {each.name: Answer(each) for each in arrivals}
        self.instances: dict[str, Instance] = {}
        self.in_use: list[tuple[float, int]] = []
        self.hit: list[str] = []
        self.restarts = 0
        self.stops = 0
        self._faults = list(faults)
        self._stopped: dict[int, float] = {}  # processes, and when they go on
        self._watch = watch
        self._gate = OutputGate()
        self._coming = list(arrivals)
        self._held: list[Answer] = []  # there is no instance to send it to
        self._began = time.monotonic()
        # A process is forked from one that has imported PyTorch and done nothing else: it is up in a moment.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "kvpool", "migration.worker"])

    @property
    def now_s(self) -> float:
        """Seconds from the beginning."""
        return time.monotonic() - self._began

    @property
    def live(self) -> list[Instance]:
        """The processes that run now."""
        return [each for each in self.instances.values() if each.ended_s is None]

    def run(self, deadline_s: float) -> Outcome:
        """Until all requests are answered.

        Raises:
            TimeoutError: They are not, in time.
        """
        try:
            self._start()
            while not any(each.serves for each in self.live):
                self._turn()
                if self.now_s > _START_S:
                    raise TimeoutError("no instance serves")
            self._begin_again()
            while not all(each.done for each in self.answers.values()):
                self._send_due()
                self._turn()
                self._watch(self)
                if self.now_s > deadline_s:
                    missing = [each.name for each in self.answers.values() if not each.done]
                    raise TimeoutError(f"not answered in {deadline_s:.0f} s: {', '.join(missing)}")
            seconds = self.now_s
        finally:
            self._end_all()
        return Outcome(
            seconds,
            list(self.answers.values()),
            list(self.instances.values()),
            self.in_use,
            self.hit,
            self.restarts,
            self.stops,
        )

    # ---- processes

    def _begin_again(self) -> None:
        """The run begins now, with the instances that there are: the first one's start does not count."""
        self._began = time.monotonic()
        for each in self.live:
            each.started_s = 0.0
        self.in_use = [(0.0, len(self.live))]

    def _start(self) -> None:
        name = f"i{len(self.instances)}"
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=run, args=(theirs, name, self.setting), name=name, daemon=True)
        process.start()
        theirs.close()
        self.instances[name] = Instance(name, process, mine, self.now_s)
        self.in_use.append((self.now_s, len(self.live)))

    def _more(self, more: int) -> None:
        """The planner needs more instances than are members: those that are starting count."""
        starting = sum(not each.serves for each in self.live)
        for _ in range(min(more - starting, self.setting.instances_max - len(self.live))):
            self._start()

    def _lost(self, instance: Instance) -> None:
        """Its process has ended, by plan or not: what it had starts again."""
        instance.process.join(5)
        instance.ended_s = self.now_s
        instance.pipe.close()
        self.in_use.append((self.now_s, len(self.live)))
        for answer in self.answers.values():
            if answer.owner == instance.name and not answer.done:
                self._restart(answer)
        if not self.live:
            self._start()

    def _restart(self, answer: Answer) -> None:
        """Another instance may have it already: nobody reads what that puts out, and it is told so."""
        for each in self.live:
            each.tell(messages.Cancel(answer.name))
        answer.attempt += 1
        answer.base = len(answer.tokens)
        answer.early.clear()
        self.restarts += 1
        self._submit(answer)

    def _go_on(self, now_s: float) -> None:
        """Those that were stopped for long enough go on."""
        for process in [each for each, until in self._stopped.items() if now_s >= until]:
            del self._stopped[process]
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)

    def _end_all(self) -> None:
        self._go_on(float("inf"))
        for each in self.live:
            each.tell(messages.End())
        for each in self.live:
            self._drain(each, time.monotonic() + 5)
            each.process.join(5)
            if each.process.is_alive():
                each.process.kill()
                each.process.join()
            each.ended_s = self.now_s

    def _drain(self, instance: Instance, until: float) -> None:
        """Reads what it still says, of which only its totals count."""
        with contextlib.suppress(EOFError, OSError):
            while instance.pipe.poll(max(0.0, until - time.monotonic())):
                message = instance.pipe.recv()
                if isinstance(message, messages.Totals):
                    instance.totals = message

    # ---- requests

    def _send_due(self) -> None:
        while self._coming and self._coming[0].at_s <= self.now_s:
            self._submit(self.answers[self._coming.pop(0).name])
        held, self._held = self._held, []
        for answer in held:
            self._submit(answer)

    def _submit(self, answer: Answer) -> None:
        """A request waits at the oldest instance until a plan places it."""
        able = [each for each in self.live if each.serves and not each.ending]
        if able:
            answer.owner = able[0].name
            able[0].tell(messages.Submit(answer.request()))
        else:
            answer.owner = ""
            self._held.append(answer)

    def _turn(self) -> None:
        """Reads what instances have said."""
        self._go_on(self.now_s)
        by_pipe = {each.pipe: each for each in self.live}
        for pipe in wait(list(by_pipe), _TURN_S):
            instance = by_pipe[pipe]  # type: ignore[index]
            try:
                while instance.ended_s is None and instance.pipe.poll():
                    self._hear(instance, instance.pipe.recv())
            except (EOFError, OSError):
                self._lost(instance)

    def _hear(self, instance: Instance, message: messages.FromInstance) -> None:
        match message:
            case messages.Token():
                self._read(instance, message)
            case messages.Joined():
                instance.serves = True
            case messages.Send(request, to):
                self._send(request, to)
            case messages.Refused(request):
                if (answer := self._current(request.name)) is not None:
                    self._again(answer, request)
            case messages.Stopping(_, to):
                self.stops += 1
                self._maybe_hit(instance, to)
            case messages.More(more):
                self._more(more)
            case messages.Ending():
                instance.ending = True
            case messages.Totals():
                instance.totals = message

    def _current(self, name: str) -> Answer | None:
        """The request whose present attempt has this name."""
        answer = self.answers[name.rsplit(".", 1)[0]]
        return answer if answer.name == name and not answer.done else None

    def _send(self, request: Request, to: str) -> None:
        answer = self._current(request.name)
        if answer is None:
            return
        there = self.instances.get(to)
        if there is None or there.ended_s is not None:
            self._again(answer, request)
            return
        answer.owner = to
        there.tell(messages.Begin(request))

    def _again(self, answer: Answer, request: Request) -> None:
        """It waits for another place, as it is."""
        able = [each for each in self.live if each.serves and not each.ending]
        if able:
            answer.owner = able[0].name
            able[0].tell(messages.Submit(request))
        else:
            self._restart(answer)

    def _read(self, instance: Instance, message: messages.Token) -> None:
        """Each token once, in order, and nothing of an old term or attempt."""
        answer = self._current(message.name)
        if answer is None:
            return
        waiting: messages.Token | None = message
        while waiting is not None:
            try:
                news = self._gate.accept(waiting.name, waiting.term, waiting.position)
            except ArgumentError:  # what its last place has put out before is still in another pipe
                other = answer.early.get(waiting.position)
                if other is None or other.term < waiting.term:
                    answer.early[waiting.position] = waiting
                return
            if news:
                answer.owner = instance.name
                answer.tokens.append(waiting.token)
                answer.times.append(self.now_s)
            waiting = answer.early.pop(len(answer.tokens) - answer.base, None)

    def _maybe_hit(self, source: Instance, to: str) -> None:
        """Kills or stops one end of a migration when its request was stopped."""
        if not self._faults or self.stops < 2:
            return
        victim = source if len(self.hit) % 2 else self.instances.get(to)
        if victim is None or victim.ended_s is not None or victim.process.pid in self._stopped:
            return
        self.hit.append(victim.name)
        if self._faults.pop(0) == "kill":
            victim.process.kill()
        elif victim.process.pid is not None:
            os.kill(victim.process.pid, signal.SIGSTOP)
            self._stopped[victim.process.pid] = self.now_s + _STOP_S


def counted(outcome: Outcome) -> Counter[str]:
    """Migrations of all instances: "kv", "tokens" and "failed"."""
    found: Counter[str] = Counter()
    for each in outcome.instances:
        if each.totals is not None:
            for (way, result), count in each.totals.migrations.left.items():
                found[way if result == "ok" else "failed"] += count
    return found
