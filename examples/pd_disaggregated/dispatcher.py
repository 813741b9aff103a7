"""The dispatcher: takes requests, streams answers, and tries again when an instance is lost. And a run on it.

An attempt that is lost with an instance begins again with the tokens that were streamed already: they become a part of
the prompt. So no token comes twice, and none is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

import kvpool
from pd_disaggregated import messages
from pd_disaggregated.fleet import Fleet, Instance
from pd_disaggregated.places import Places
from pd_disaggregated.records import Answer, Event, EventKind, Kill, RunResult, Session, Setting, Tokens
from pd_disaggregated.requests import Reply, Request, RequestFailed
from pd_disaggregated.users import Users

if TYPE_CHECKING:
    from llama import LlamaConfig

    from pd_disaggregated.reference import Reference
    from pd_disaggregated.worker import Plan

HBM_BLOCKS: Final = 1024  # of each instance
DEADLINE_S: Final = 120.0
PATIENCE_S: Final = 60.0
_AGAIN_S: Final = 0.05  # until a request that failed is tried again
_LOOK_S: Final = 0.1
_AUDIT_S: Final = 120.0


class Dispatcher:
    """Serves requests on the instances of a setting. For one asyncio loop.

    Attributes:
        streamed_tokens: Of all answers until now.
    """

    def __init__(self, plan: Plan, *, deadline_s: float, patience_s: float) -> None:
        """Use `Dispatcher.start`."""
        self.streamed_tokens = 0
        self._plan = plan
        self._deadline_s = deadline_s
        self._fleet = Fleet(plan, self, patience_s)
        self._places = Places(self._fleet.instances.values(), plan.setting, plan.config.block_tokens, plan.hbm_blocks)
        self._numbers = itertools.count()
        self._requests: dict[int, Request] = {}  # those that are not over, the oldest first
        self._audits: dict[str, asyncio.Future[kvpool.PoolStats]] = {}
        self._events: list[Event] = []  # on the clock of time.monotonic
        self._next_token: dict[str, EventKind] = {}  # of an instance: what its next token says about it
        self._failure: BaseException | None = None

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls, plan: Plan, *, deadline_s: float = DEADLINE_S, patience_s: float = PATIENCE_S
    ) -> AsyncIterator[Dispatcher]:
        """Starts the instances; ends them when it is left.

        Args:
            plan: Setting, model, sizes.
            deadline_s: A request that is not answered within it fails.
            patience_s: An instance that has work and is silent for so long is killed and started again.

        Raises:
            fleet.InstanceFailed: One does not come up.
        """
        dispatcher = cls(plan, deadline_s=deadline_s, patience_s=patience_s)
        watching = asyncio.ensure_future(dispatcher._watch())
        try:
            dispatcher._fleet.start()
            await dispatcher._all_joined()
            yield dispatcher
        finally:
            watching.cancel()
            await dispatcher._fleet.close()

    # ---- for users

    def ask(self, session: int, prompt: Tokens, new_tokens: int) -> Reply:
        """Begins to serve a request.

        Args:
            session: Whose turn it is: it is served where the session was before.
            prompt: Token ids, int32; at least one.
            new_tokens: How many are generated; at least one.

        Returns:
            The answer, whose tokens come as they are generated.

        Raises:
            ValueError: Empty, or longer than the model or an instance can have.
            fleet.InstanceFailed: An instance does not come up any more.
        """
        limit = min(self._plan.config.tokens_max, self._plan.hbm_blocks * self._plan.config.block_tokens)
        if not len(prompt) or new_tokens < 1 or len(prompt) + new_tokens > limit:
            raise ValueError(
                f"a prompt and its answer have from 1 + 1 to {limit} tokens: got {len(prompt)} + {new_tokens}"
            )
        if self._failure is not None:
            raise self._failure
        request = Request(next(self._numbers), session, np.asarray(prompt, np.int32), new_tokens)
        self._requests[request.number] = request
        self._place_all()
        return Reply(request, self._cancel)

    def kill(self, name: str) -> None:
        """Kills an instance (-9). It is started again, as one that ended by itself would be."""
        victim = self._fleet.instances[name]
        self._happened(victim, "killed")
        victim.kill()
        for other in self._fleet.instances.values():
            if other is not victim and other.joined:
                self._next_token.setdefault(other.name, "went_on")

    def pids(self) -> dict[str, int]:
        """The processes of the instances, for those who look at them from outside."""
        processes = {name: instance.process for name, instance in self._fleet.instances.items()}
        return {name: process.pid for name, process in processes.items() if process is not None and process.pid}

    def events(self, start: float) -> list[Event]:
        """What has happened to instances, in seconds from `start` (time.monotonic)."""
        return [
            dataclasses.replace(
                event, at_s=event.at_s - start, since_s=None if event.since_s is None else event.since_s - start
            )
            for event in self._events
        ]

    async def audit(self) -> dict[str, kvpool.PoolStats]:
        """Has every instance let go of what it works on and audit its pool. For the end of a run.

        Raises:
            TimeoutError: One does not answer.
            fleet.InstanceFailed: One does not come up.
        """
        return await asyncio.wait_for(self._audit(), _AUDIT_S)

    async def _audit(self) -> dict[str, kvpool.PoolStats]:
        await self._all_joined()
        self._audits = {name: asyncio.get_running_loop().create_future() for name in self._fleet.instances}
        for instance in self._fleet.instances.values():
            instance.tell(messages.Audit())
        return {name: await future for name, future in self._audits.items()}

    async def _all_joined(self) -> None:
        while not all(instance.joined for instance in self._fleet.instances.values()):
            if self._failure is not None:
                raise self._failure
            await asyncio.sleep(0.005)

    # ---- what the fleet tells

    def joined(self, instance: Instance) -> None:
        """An instance serves."""
        self._happened(instance, "joined")
        self._next_token[instance.name] = "served"
        self._place_all()

    def lost(self, instance: Instance) -> None:
        """An instance has ended. What it was working on begins again elsewhere, or there when it is back."""
        self._happened(instance, "lost")
        for request in list(self._requests.values()):
            if request.stands_at(instance):
                self._leave(request)
            elif instance is request.prefill and request.prefilled is None:
                # Decode has all it needs; what prefill had to say about the transfer is lost with it.
                request.prefilled = messages.Prefilled(request.number, request.attempt, 0, 0, 0, 0.0)
                self._end_if_answered(request)
        self._place_all()

    def said(self, instance: Instance, message: messages.FromInstance) -> None:
        """An instance has said something."""
        if isinstance(message, messages.Audited):
            self._audits[instance.name].set_result(message.stats)
        elif isinstance(message, messages.Noticed):
            self._happened(instance, "noticed", peer=message.peer)
            self._next_token.setdefault(instance.name, "went_on")
        else:
            request = self._requests.get(message.request)
            if request is not None and request.prefill is not None and request.attempt == message.attempt:
                self._go_on(instance, request, message)
            elif isinstance(message, messages.Token):
                # The attempt is over: an instance that still works on it can stop.
                instance.tell(messages.Cancel(message.request, message.attempt))

    def failed(self, error: BaseException) -> None:
        """Nothing goes on: all requests fail."""
        self._failure = error
        for request in list(self._requests.values()):
            self._end(request, error)

    # ---- requests

    def _go_on(
        self,
        instance: Instance,
        request: Request,
        message: messages.Token | messages.Prefilled | messages.Answered | messages.Failed,
    ) -> None:
        if isinstance(message, messages.Token):
            if instance.name in self._next_token:
                waiting = [one.waits_since for one in self._requests.values() if one.waits_for(instance)]
                kind = self._next_token.pop(instance.name)
                self._happened(instance, kind, since_s=min(waiting, default=request.begun))
            if instance is request.decode:
                request.taken_over = True
            if request.accept(message):
                self.streamed_tokens += 1
        elif isinstance(message, messages.Failed):
            self._leave(request)
            asyncio.get_running_loop().call_later(_AGAIN_S, self._place_all)
        else:
            request.count(message)
            self._end_if_answered(request)

    def _place_all(self) -> None:
        self._places.begin(self._requests.values())

    def _leave(self, request: Request) -> None:
        """Ends the attempt; another one begins when there is a place."""
        if len(request.tokens) == request.new_tokens:
            self._end(request, None)  # its last token was out: there is nothing to try again
        else:
            self._withdraw(request)
            request.leave()

    def _withdraw(self, request: Request) -> None:
        """Tells the instances that work on this attempt to stop."""
        for instance in {request.prefill, request.decode}:
            if instance is not None:
                instance.tell(messages.Cancel(request.number, request.attempt))

    def _cancel(self, request: Request) -> None:
        if request.number in self._requests:
            self._withdraw(request)
            self._end(request, None)

    def _end_if_answered(self, request: Request) -> None:
        if request.answered is not None and request.prefilled is not None:
            self._places.answered(request)
            self._end(request, None)

    def _end(self, request: Request, error: BaseException | None) -> None:
        self._requests.pop(request.number, None)
        request.stream.put_nowait(error)
        self._place_all()

    async def _watch(self) -> None:
        """Ends what takes too long."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self._fleet.watch(lambda instance: any(one.waits_for(instance) for one in self._requests.values()))
            late = time.monotonic() - self._deadline_s
            for request in [one for one in self._requests.values() if one.asked < late]:
                self._withdraw(request)
                self._end(request, RequestFailed(f"request {request.number} has had its {self._deadline_s} s"))

    def _happened(self, instance: Instance, kind: EventKind, *, peer: str = "", since_s: float | None = None) -> None:
        self._events.append(Event(time.monotonic(), instance.name, kind, peer, since_s))


def run(
    setting: Setting,
    sessions: Sequence[Session],
    *,
    on_answer: Callable[[Answer], None] | None = None,
    hbm_blocks: int = HBM_BLOCKS,
    seed: int = 0,
    kill: Sequence[Kill] = (),
    verify: bool = True,
    reference: Reference | None = None,
    config: LlamaConfig | None = None,
    lease_s: float = 3.0,
    deadline_s: float = DEADLINE_S,
    patience_s: float = PATIENCE_S,
) -> RunResult:
    """Starts the instances of a setting, serves all sessions on them, and compares every token with one process.

    Args:
        setting: Design and number of instances.
        sessions: What is asked, and when.
        on_answer: Called with each answer when it is complete, in the loop that serves: it should be quick.
        hbm_blocks: Of each instance's pool.
        seed: Of the model's weights.
        kill: Which instances are killed, and when.
        verify: Compare with what a single process generates, after the run.
        reference: That process' engine, for those who run several settings: it remembers. By default a new one.
        config: Of the model; by default the reference's, or that of the demo.
        lease_s: After which an instance that says nothing is lost to its peers.
        deadline_s: A request that is not answered within it fails.
        patience_s: An instance that has work and is silent for so long is killed and started again.

    Returns:
        Answers, audits, events.

    Raises:
        ValueError: A session that the model or a pool is too small for, or a kill of an instance that is not there.
        reference.WrongTokens: A token is not that of a single process.
        requests.RequestFailed: A request was not answered within its deadline.
        fleet.InstanceFailed: An instance does not come up.
    """
    from llama import LlamaConfig

    from pd_disaggregated.reference import Reference
    from pd_disaggregated.worker import Plan

    config = config or (reference.config if reference else LlamaConfig())
    unknown = {order.instance for order in kill} - set(setting.instances)
    if unknown:
        raise ValueError(f"{setting.name} has no instance {sorted(unknown)}; it has {', '.join(setting.instances)}")
    if reference is not None and (reference.config, reference.seed) != (config, seed):
        raise ValueError("the reference has another model than the run")
    plan = Plan(setting, f"local://pd-{secrets.token_hex(8)}", config, seed, hbm_blocks, lease_s)
    result = asyncio.run(_run(plan, sessions, on_answer, kill, deadline_s, patience_s))
    if not verify:
        return result
    with contextlib.ExitStack() as ending:
        checker = reference or ending.enter_context(contextlib.closing(Reference(config, seed)))
        checker.check(sessions, result.answers)
    return dataclasses.replace(result, verified=True)


async def _run(
    plan: Plan,
    sessions: Sequence[Session],
    on_answer: Callable[[Answer], None] | None,
    kill: Sequence[Kill],
    deadline_s: float,
    patience_s: float,
) -> RunResult:
    async with Dispatcher.start(plan, deadline_s=deadline_s, patience_s=patience_s) as dispatcher:
        users = Users(dispatcher, on_answer, kill)
        await users.play(sessions)
        wall_s = time.monotonic() - users.start
        audits = await dispatcher.audit()
        return RunResult(plan.setting, users.answers, wall_s, audits, dispatcher.events(users.start))
