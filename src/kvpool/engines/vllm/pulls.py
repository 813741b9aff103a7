"""The requests that fetch what other engines have cached of their prompts. The scheduler's side."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvpool import _core
from kvpool.engines.vllm.figures import Figures
from kvpool.errors import Busy, DeadlineExceeded, Error
from kvpool.pool import Pool
from kvpool.types import DRAM

__all__ = ["Peer", "Pulls"]

_log = logging.getLogger("kvpool.engines.vllm")

_ASKING: Final = 0.25  # of the time that is left: one of many that does not answer costs no more
_SILENT_S: Final = 5.0  # for which a member that has not answered is not asked again


class Peer(Protocol):
    """An engine among its peers."""

    pool: Pool
    figures: Figures

    def others(self) -> list[str]:
        """The names of the other members."""


@dataclass
class _Pull:
    namespace: str
    peers: list[str]
    named: bool  # by the request
    began: float | None = None  # when it was looked up first: until then it waits for its turn
    asked: list[_core.PeerMatch] = field(default_factory=list)
    fetch: _core.Transfer | None = None
    over: bool = False


class Pulls:
    """Which requests fetch. Not thread-safe. No method waits for a peer.

    A request asks one member, or all, how much of its prompt they have; it fetches from the one that has most, if that
    is more than is here. It waits outside the batch meanwhile, until a deadline; then it loads what is cached here, and
    computes the rest.
    """

    def __init__(
        self,
        engine: Peer,
        timeout_s: float,
        from_all: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Of an engine.

        Args:
            engine: Whose pool asks and fetches.
            timeout_s: Seconds from the first look-up of a request to the end of its wait.
            from_all: A request that names no member asks all of them.
            clock: Seconds.
        """
        self._engine = engine
        self._block_tokens = engine.pool.kv_layout.block_tokens
        self._timeout_s = timeout_s
        self._from_all = from_all
        self._clock = clock
        self._pulls: dict[str, _Pull] = {}
        self._silent: dict[str, float] = {}  # members that have not answered, and until when they are not asked

    def add(self, request_id: str, namespace: str, peer: str = "") -> None:
        """A request that may fetch. `peer`: from this member; "": from whom the options say."""
        peers = [peer] if peer else self._engine.others() if self._from_all else []
        if peers:
            self._pulls[request_id] = _Pull(namespace, peers, bool(peer))

    def must_wait(self, request_id: str, tokens: npt.NDArray[np.int32], cached: int) -> bool:
        """Whether the request should be asked again later.

        Args:
            request_id: Of a request, added or not.
            tokens: All that it could load.
            cached: How many of them are cached here now.
        """
        pull = self._pulls.get(request_id)
        if pull is None or pull.over:
            return False
        if pull.began is None:
            pull.began = self._clock()
        wanted = tokens[: len(tokens) // self._block_tokens * self._block_tokens]
        if pull.fetch is not None and pull.fetch.done():
            self._fetched(pull, pull.fetch)
            return True  # what has come is found by the next look-up
        if self._left_s(pull) <= 0:
            if pull.fetch is not None:
                self._has_not_answered(pull.asked[0].peer)
            self._failed(pull, "the time is over")
        elif pull.fetch is None:
            self._ask_or_fetch(pull, wanted, cached)
        return not pull.over

    def finish(self, request_id: str) -> None:
        """The request loads now, or needs nothing any more."""
        pull = self._pulls.pop(request_id, None)
        if pull is not None and not pull.over:
            self._end(pull)

    def cancel(self) -> None:
        """Nothing more is fetched for the requests that there are."""
        for pull in self._pulls.values():
            if not pull.over:
                self._end(pull)

    # ----

    def _left_s(self, pull: _Pull) -> float:
        return self._timeout_s - self._waited_s(pull)

    def _waited_s(self, pull: _Pull) -> float:
        return 0.0 if pull.began is None else self._clock() - pull.began

    def _ask_or_fetch(self, pull: _Pull, wanted: npt.NDArray[np.int32], cached: int) -> None:
        if cached >= len(wanted):
            self._end(pull)
            return
        try:
            if not pull.asked:
                self._ask(pull, wanted)
            else:
                self._fetch_best(pull, wanted, cached)
        except Busy:  # it is asked again
            pass
        except Error as error:
            self._failed(pull, error)

    def _ask(self, pull: _Pull, wanted: npt.NDArray[np.int32]) -> None:
        now, left_s = self._clock(), self._left_s(pull)
        peers = [peer for peer in pull.peers if self._silent.get(peer, now) <= now]
        if not peers:
            self._failed(pull, "it has not answered lately")
            return
        pull.asked = self._engine.pool.peers.match(
            peers, wanted, pull.namespace, hold=left_s, timeout=left_s * _ASKING, wait=False
        )

    def _fetch_best(self, pull: _Pull, wanted: npt.NDArray[np.int32], cached: int) -> None:
        """Fetches from the one that has most, when all have answered or one has everything."""
        answers = [match for match in pull.asked if match.done()]
        for match in answers:
            if isinstance(match.exception(0), DeadlineExceeded):
                self._has_not_answered(match.peer)
        best = self._longest(answers)
        if len(answers) < len(pull.asked) and (best is None or best.tokens < len(wanted)):
            return
        if best is None:
            self._failed(pull, pull.asked[0].exception(0) or "the connection is lost")
            return
        if best.tokens <= cached:
            self._end(pull)
            return
        for match in pull.asked:
            if match is not best:
                match.close()
        pull.asked = [best]
        pull.fetch = self._engine.pool.fetch_with_insert(
            best.peer, wanted[: best.tokens], namespace=pull.namespace, medium=DRAM, timeout=self._left_s(pull)
        )

    def _longest(self, answers: Sequence[_core.PeerMatch]) -> _core.PeerMatch | None:
        """That of the peer which has most, of those to which a fetch need not connect first: that would wait."""
        well = [match for match in answers if match.exception(0) is None]
        connected = {peer.name for peer in self._engine.pool.peers.list()} if well else set()
        return max((match for match in well if match.peer in connected), key=lambda match: match.tokens, default=None)

    def _fetched(self, pull: _Pull, fetch: _core.Transfer) -> None:
        """It has ended."""
        error = fetch.exception(0)
        if isinstance(error, Busy) and self._left_s(pull) > 0:  # a block of it is being saved here: once more
            pull.fetch = None
            return
        if error is not None:
            if isinstance(error, DeadlineExceeded):
                self._has_not_answered(pull.asked[0].peer)
            self._failed(pull, error)
            return
        tokens = (fetch.stats.blocks - fetch.stats.skipped_blocks) * self._block_tokens
        self._engine.figures.add(pulls=1, pulled_tokens=tokens)
        self._end(pull)

    def _has_not_answered(self, peer: str) -> None:
        self._silent[peer] = self._clock() + _SILENT_S

    def _failed(self, pull: _Pull, why: Exception | str | None) -> None:
        level = logging.WARNING if pull.named else logging.DEBUG  # members of another model always refuse
        _log.log(level, "a prompt was not fetched from %s: %s", ", ".join(pull.peers), why)
        self._engine.figures.add(failed_pulls=1)
        self._end(pull)

    def _end(self, pull: _Pull) -> None:
        pull.over = True
        self._engine.figures.add(pull_wait_seconds=self._waited_s(pull))
        if pull.fetch is not None:
            pull.fetch.cancel()
        for match in pull.asked:
            match.close()
