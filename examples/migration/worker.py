"""The process of one instance: a pool, an engine, its migrations, and its part in the epochs."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final

import kvpool
from kvpool.control.migration import Migrations
from kvpool.control.rebalancing import Rebalancer
from kvpool.policy.mell import Boundaries, ComputeProfile, Link
from kvpool.policy.rebalancing import SCHEDULERS, Planner, PolicyName
from migration import messages
from migration.engine import Engine, Request
from migration.model import BLOCK, layout, model

__all__ = ["Setting", "run"]

_TOTALS_S: Final = 0.2
_PREFILL_TOKENS: Final = 256  # beside a batch, in an epoch
_BATCH_MAX: Final = 1024


@dataclass(frozen=True)
class Setting:
    """What all instances of a run have in common.

    Attributes:
        cluster: Its URL.
        policy: The scheduler's name.
        instances_max: No more run.
        blocks: Of one instance.
        step_s: An iteration takes so long, however quick the processor is: as if each instance had its GPU.
        epoch_s: Between two plans.
        link_tokens: KV cache, in tokens, that an instance may send in an epoch; what is more goes by tokens, and is
            prefilled at its destination. None: no bound.
    """

    cluster: str
    policy: PolicyName
    instances_max: int
    blocks: int
    step_s: float
    epoch_s: float
    link_tokens: int | None = None

    @property
    def heartbeat_s(self) -> float:
        """Of the cluster."""
        return self.epoch_s / 4

    def planner(self) -> Planner:
        """The same at all instances. BF and WF move nothing: what outgrows an instance is stopped, and begins again."""
        return Planner(
            SCHEDULERS[self.policy],
            instances_max=self.instances_max,
            moves_max=0 if self.policy in ("bf", "wf") else 64,
            idle_epochs=2,
            boundaries=None if self.link_tokens is None else self._boundaries,
        )

    def _boundaries(self, instances: Sequence[int]) -> Boundaries:
        """Each instance has its own link, and prefills what comes beside its batch."""
        tokens = self.link_tokens or 0
        links: dict[Link, int] = {("up", each): tokens for each in instances}
        profile = ComputeProfile({0: _PREFILL_TOKENS, _BATCH_MAX: _PREFILL_TOKENS})
        return Boundaries(lambda source, destination: [("up", source)], links, dict.fromkeys(instances, profile))

    @property
    def growth(self) -> int:
        """Tokens that a request gets until the next plan is carried out."""
        return int(2 * self.epoch_s / self.step_s)


def run(pipe: Connection, name: str, setting: Setting) -> None:
    """Until it is to end, or the pipe does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the dispatcher, which ends this process
    model()
    _Worker(pipe, name, setting).run()


class _Worker:
    def __init__(self, pipe: Connection, name: str, setting: Setting) -> None:
        self._pipe = pipe
        self._name = name
        self._setting = setting
        self._sending = threading.Lock()
        self._over = threading.Event()
        self._ending = threading.Event()

    def run(self) -> None:
        setting = self._setting
        with contextlib.ExitStack() as stack:
            cluster = stack.enter_context(
                kvpool.Cluster.join(setting.cluster, lease=2.0, heartbeat=setting.heartbeat_s)
            )
            pool = stack.enter_context(kvpool.Pool(layout(), hbm_blocks=setting.blocks + 1, name=self._name))
            pool.attach(cluster, name=self._name)
            self._engine = Engine(pool, self._put_out, self._send_on, self._stopping)
            self._migrations = stack.enter_context(Migrations(pool, self._engine, cluster=cluster))
            self._rebalancer = stack.enter_context(
                Rebalancer(
                    self._migrations,
                    self._engine,
                    cluster,
                    capacity=setting.blocks * BLOCK,
                    growth=setting.growth,
                    policy=setting.planner(),
                    epoch_s=setting.epoch_s,
                    activate=lambda more: self._tell(messages.More(more)),
                    terminate=self._end,
                )
            )
            self._tell(messages.Joined())
            threading.Thread(target=self._listen, daemon=True).start()
            self._decode()

    def _decode(self) -> None:
        """One iteration after another, until this instance is to end and has nothing left."""
        due = time.monotonic()
        totals_due = due
        while not self._over.is_set():
            self._engine.step()
            due = max(due + self._setting.step_s, time.monotonic())
            if time.monotonic() >= totals_due:
                totals_due += _TOTALS_S
                self._say_totals()
            if self._ending.is_set() and self._is_empty():
                break
            self._over.wait(max(0.0, due - time.monotonic()))
        self._say_totals()

    def _is_empty(self) -> bool:
        return self._engine.idle and not self._migrations.arriving() and not self._migrations.under_way()

    def _listen(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._do(self._pipe.recv())
        self._over.set()

    def _do(self, message: messages.ToInstance) -> None:
        match message:
            case messages.Submit(request):
                if self._ending.is_set():
                    self._tell(messages.Refused(request))
                else:
                    self._engine.submit(request)
            case messages.Begin(request):
                if self._ending.is_set() or not self._engine.begin(request):
                    self._tell(messages.Refused(request))
            case messages.Cancel(name):
                self._engine.cancel(name)
            case messages.End():
                self._over.set()

    def _end(self) -> None:
        """A plan ends this instance."""
        self._engine.closing = True
        self._ending.set()
        self._tell(messages.Ending())

    def _put_out(self, request: Request, position: int, token: int) -> None:
        self._tell(messages.Token(request.name, request.term, position, token))

    def _send_on(self, request: Request, to: str) -> None:
        self._tell(messages.Send(request, to))

    def _stopping(self, name: str) -> None:
        to = next((each.to for each in self._migrations.under_way() if each.request == name), "")
        self._tell(messages.Stopping(name, to))

    def _say_totals(self) -> None:
        totals = self._rebalancer.totals()
        self._tell(messages.Totals(self._migrations.totals(), totals.plans_made, dict(totals.moves)))

    def _tell(self, message: messages.FromInstance) -> None:
        with self._sending, contextlib.suppress(OSError):  # the dispatcher has ended: so does this process, soon
            self._pipe.send(message)
