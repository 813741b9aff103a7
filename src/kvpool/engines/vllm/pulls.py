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
from kvpool.engines.remembered import Remembered
from kvpool.engines.vllm.figures import Figures
from kvpool.engines.vllm.groups import Groups
from kvpool.engines.vllm.pulled import Fetch, TailFetch, begin_fetch
from kvpool.engines.vllm.requests import Digests
from kvpool.errors import Busy, DeadlineExceeded, Error
from kvpool.pool import Pool

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
    asked: list[_core.PeerMatch] = field(default_factory=list)  # of each member, for each group in turn
    fetches: list[Fetch] = field(default_factory=list)  # for each group
    end: int = 0  # tokens that are being fetched, or were
    over: bool = False
    digests: Digests | None = None


@dataclass
class _Answer:
    """What a member has: a match for each group."""

    matches: list[_core.PeerMatch]

    @property
    def peer(self) -> str:
        return self.matches[0].peer

    def done(self) -> bool:
        return all(match.done() for match in self.matches)

    def error(self) -> Exception | None:
        """REQUIRES: it is done."""
        return next((error for match in self.matches if (error := match.exception(0)) is not None), None)

    @property
    def tokens(self) -> int:
        """That all groups have. REQUIRES: there is no error."""
        return min(match.tokens for match in self.matches)


class Pulls:
    """Which requests fetch. Not thread-safe. No method waits for a peer.

    A request asks one member, or all, how much of its prompt they have for each group of layers; it fetches from the
    one that has most for all groups, if that is more than is here. It waits outside the batch meanwhile, until a
    deadline; then it loads what is cached here, and computes the rest.
    """

    def __init__(
        self,
        engine: Peer,
        timeout_s: float,
        from_all: bool = False,
        clock: Callable[[], float] = time.monotonic,
        groups: Groups | None = None,
    ) -> None:
        """Of an engine.

        Args:
            engine: Whose pool asks and fetches.
            timeout_s: Seconds from the first look-up of a request to the end of its wait.
            from_all: A request that names no member asks all of them.
            clock: Seconds.
            groups: As for Planner.
        """
        self._engine = engine
        self._block_tokens = engine.pool.kv_layout.block_tokens
        self._groups = groups or Groups(self._block_tokens)
        self._timeout_s = timeout_s
        self._from_all = from_all
        self._clock = clock
        self._pulls: dict[str, _Pull] = {}
        self._silent = Remembered(clock)  # members that have not answered
        self._dropped: list[TailFetch] = []  # that have not ended yet

    def add(self, request_id: str, namespace: str, peer: str = "", digests: Digests | None = None) -> None:
        """A request that may fetch. `peer`: from this member; "": from whom the options say. `digests`: Its own."""
        peers = [peer] if peer else self._engine.others() if self._from_all else []
        if peers:
            self._pulls[request_id] = _Pull(namespace, peers, bool(peer), digests=digests)

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
        if pull.fetches and all(fetch.done() for fetch in pull.fetches):
            self._fetched(pull)
            return True  # what has come is found by the next look-up
        if self._left_s(pull) <= 0:
            if pull.fetches:
                self._has_not_answered(pull.asked[0].peer)
            self._failed(pull, "the time is over")
        elif not pull.fetches:
            self._ask_or_fetch(pull, wanted, cached)
        return not pull.over

    def end(self, request_id: str) -> int:
        """How many tokens of its prompt a request fetches, or has fetched; 0: none."""
        pull = self._pulls.get(request_id)
        return 0 if pull is None else pull.end

    def finish(self, request_id: str) -> None:
        """The request loads now, or needs nothing any more."""
        pull = self._pulls.pop(request_id, None)
        if pull is not None and not pull.over:
            self._end(pull)

    def let_dropped_go(self) -> None:
        """What has come of fetches that nobody waits for any more makes room. Call it at each step."""
        ended = [fetch for fetch in self._dropped if fetch.done()]
        self._dropped = [fetch for fetch in self._dropped if fetch not in ended]
        for fetch in ended:
            fetch.drop()

    def cancel(self) -> None:
        """Nothing more is fetched for the requests that there are."""
        self.let_dropped_go()
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
        left_s = self._left_s(pull)
        peers = self._silent.missing(pull.peers)
        if not peers:
            self._failed(pull, "it has not answered lately")
            return
        asked: list[_core.PeerMatch] = []
        try:
            for name in self._groups.names(pull.namespace):
                asked += self._engine.pool.peers.match(
                    peers, wanted, name, hold=left_s, timeout=left_s * _ASKING, wait=False
                )
        except Error:
            for match in asked:
                match.close()
            raise
        pull.asked = asked

    def _fetch_best(self, pull: _Pull, wanted: npt.NDArray[np.int32], cached: int) -> None:
        """Fetches from the one that has most, when all have answered or one has everything."""
        asked = _answers(pull.asked)
        answers = [answer for answer in asked if answer.done()]
        for answer in answers:
            if isinstance(answer.error(), DeadlineExceeded):
                self._has_not_answered(answer.peer)
        best = self._longest(answers)
        if len(answers) < len(asked) and (best is None or best.tokens < len(wanted)):
            return
        if best is None:
            self._failed(pull, asked[0].error() or "the connection is lost")
            return
        if best.tokens <= cached:
            self._end(pull)
            return
        for match in pull.asked:
            if match not in best.matches:
                match.close()
        pull.asked = best.matches
        self._fetch(pull, wanted[: best.tokens])

    def _fetch(self, pull: _Pull, tokens: npt.NDArray[np.int32]) -> None:
        """Fetches what each group needs, from the member whose matches are left."""
        pool, left_s = self._engine.pool, self._left_s(pull)
        pull.end = len(tokens)
        try:
            for group, found in enumerate(pull.asked):
                fetch = begin_fetch(pool, found, self._groups, group, pull.namespace, tokens, left_s, pull.digests)
                if fetch is not None:
                    pull.fetches.append(fetch)
        except Error:
            self._drop_fetches(pull)
            raise
        if not pull.fetches:  # all came while it was asked for
            self._end(pull)

    def _drop_fetches(self, pull: _Pull) -> None:
        for fetch in pull.fetches:
            fetch.cancel()
            if isinstance(fetch, TailFetch):
                self._dropped.append(fetch)
        pull.fetches = []
        self.let_dropped_go()

    def _longest(self, answers: Sequence[_Answer]) -> _Answer | None:
        """That of the peer which has most, of those to which a fetch need not connect first: that would wait."""
        well = [answer for answer in answers if answer.error() is None]
        connected = {peer.name for peer in self._engine.pool.peers.list()} if well else set()
        return max((each for each in well if each.peer in connected), key=lambda each: each.tokens, default=None)

    def _fetched(self, pull: _Pull) -> None:
        """All have ended."""
        errors = [error for fetch in pull.fetches if (error := fetch.exception(0)) is not None]
        if errors and all(isinstance(error, Busy) for error in errors) and self._left_s(pull) > 0:
            self._drop_fetches(pull)  # a block of it is being saved here: once more
            return
        if errors:
            if any(isinstance(error, DeadlineExceeded) for error in errors):
                self._has_not_answered(pull.asked[0].peer)
            self._failed(pull, next((error for error in errors if not isinstance(error, Busy)), errors[0]))
            return
        blocks = sum(fetch.stats.blocks - fetch.stats.skipped_blocks for fetch in pull.fetches)
        self._engine.figures.add(pulls=1, pulled_tokens=blocks * self._block_tokens)
        self._end(pull)

    def _has_not_answered(self, peer: str) -> None:
        self._silent.add(peer, _SILENT_S)

    def _failed(self, pull: _Pull, why: Exception | str | None) -> None:
        level = logging.WARNING if pull.named else logging.DEBUG  # members of another model always refuse
        _log.log(level, "a prompt was not fetched from %s: %s", ", ".join(pull.peers), why)
        self._engine.figures.add(failed_pulls=1)
        self._end(pull)

    def _end(self, pull: _Pull) -> None:
        pull.over = True
        self._engine.figures.add(pull_wait_seconds=self._waited_s(pull))
        self._drop_fetches(pull)
        for match in pull.asked:
            match.close()


def _answers(asked: Sequence[_core.PeerMatch]) -> list[_Answer]:
    """What was asked, by member, in the order of the groups."""
    by_peer: dict[str, _Answer] = {}
    for match in asked:
        by_peer.setdefault(match.peer, _Answer([])).matches.append(match)
    return list(by_peer.values())
