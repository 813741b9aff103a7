"""Sends of prompts from the blocks of DRAM in which workers have saved them. The scheduler's side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvpool import _core
from kvpool.engines.vllm.groups import Named
from kvpool.engines.vllm.params import letter
from kvpool.engines.vllm.plans import SendPlan
from kvpool.engines.vllm.sends import Sends, left_until
from kvpool.errors import StateError
from kvpool.pool import Pool
from kvpool.types import DRAM

__all__ = ["SavedSends"]

_NO_BLOCKS: Final = np.empty(0, np.uint64)


@dataclass
class _Waiting:
    plan: SendPlan
    last_save: int  # planned before it
    asked_about: bool = True


class SavedSends(Sends):
    """The sends of an engine whose workers are other processes. Not thread-safe.

    A send begins when all saves that were planned before it have ended. It sends what is cached of its prompt then:
    the receiver computes what is missing, because a save has failed or there was no room. Of a tail it sends all or
    nothing.
    """

    def __init__(self, pool: Pool, is_member: Callable[[str], bool], timeout_s: float) -> None:
        """Of an engine.

        Args:
            pool: The scheduler's, a member of a cluster.
            is_member: As for Sends.
            timeout_s: As for Sends.
        """
        super().__init__(pool, _NO_BLOCKS, is_member, timeout_s, lambda: None)
        self._waiting: list[_Waiting] = []

    def plan(self, plan: SendPlan, last_save: int) -> None:
        """A send that begins after the saves up to this number."""
        self._waiting.append(_Waiting(plan, last_save))

    def begin(self, first_open: int) -> None:
        """Begins what can begin now. Does not wait.

        Args:
            first_open: The number of the first save that has not ended.
        """
        # The last one of each prompt sends all that the others would.
        ready = {each.plan.id: each for each in self._waiting if each.last_save < first_open}
        self._waiting = [each for each in self._waiting if each.last_save >= first_open]
        for each in ready.values():
            self._send_whole(each.plan, each.asked_about)

    def drop(self) -> None:
        """Nothing of what was saved so far is sent any more, and its receivers are told. Does not wait.

        What a send reads is pinned, and stays as it is until the send has ended.
        """
        for each in self._waiting:
            if each.plan.last:
                self._tell_failure(each.plan)
        self._waiting.clear()
        for send in self._sends:
            send.give_up()
            send.cancel()

    @property
    def busy(self) -> bool:
        """As Sends.busy; also while a send waits for saves."""
        return bool(self._waiting) or super().busy

    def forget(self, number: str) -> None:
        """As Sends.forget."""
        super().forget(number)
        for each in self._waiting:
            if each.plan.id == number:
                each.asked_about = False

    # ----

    def _transfer(self, plan: SendPlan, stream: Any, until: float) -> _core.Transfer:
        left_s = left_until(until, plan.peer)
        whole = plan.saved or Named(plan.namespace, plan.tokens)
        before = len(whole.tokens) - len(plan.tokens)
        with self._pool.match(whole.tokens, whole.namespace) as hit:
            there = max(0, hit.tokens - before)
            if not there or (
                plan.saved is not None and there < len(plan.tokens)
            ):  # a tail is of no use without its end
                raise StateError("it was not saved" if before else "nothing of it was saved")
            return self._pool.transfer_with_insert(
                plan.peer, plan.tokens[:there], hit.addrs[before // self._block_tokens :], namespace=plan.namespace,
                medium=DRAM, private=letter(plan.id) if plan.last else None, timeout=left_s,
            )  # fmt: skip
