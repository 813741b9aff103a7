"""Prompts that go between a store's pool and its peers: pools of other engines, such as vLLM's."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool import _core
from kvpool.errors import ArgumentTypeError, DeadlineExceeded, Error, OutOfBlocks, PeerLost
from kvpool.pool import Pool
from kvpool.types import DRAM, Medium

__all__ = ["Fetched", "Sources", "send"]

_REST_S = 10.0  # for which a peer that is gone or silent is not asked: else it would delay each prompt

_log = logging.getLogger("kvpool.transformers")


class Fetched(NamedTuple):
    """What a look-up has fetched: tokens, each once; and how many times it failed."""

    tokens: int = 0
    failures: int = 0


class Sources:
    """The peers that are asked for what a pool lacks. Thread-safe.

    Args:
        pool: That fetches.
        names: Of the peers, in the order in which they are asked.
        medium: Where fetched blocks go.

    Raises:
        ArgumentTypeError: The names are no list of texts.
    """

    def __init__(self, pool: Pool, names: Sequence[str], medium: Medium) -> None:
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ArgumentTypeError(f"sources must be a list of names, not {names!r}")
        self._pool = pool
        self._names = tuple(names)
        self._medium = medium
        self._block_tokens = pool.kv_layout.block_tokens
        self._rests: dict[str, float] = {}  # of a name, until when it is not asked

    def fetch(self, prompts: Sequence[npt.NDArray[np.int32]], namespace: str) -> Fetched:
        """Fetches what peers have of prompts and the pool has not. Waits for it, at most the setting ``timeout_s``.

        That is for all prompts and peers together. A peer that is lost, or has not answered by then, is not asked for
        the next ten seconds. Raises nothing: what a peer does not give is computed.
        """
        found = Fetched()
        deadline = monotonic() + self._pool.settings.timeout_s
        for name in self._names:
            for wave in self._waves(prompts):
                remaining = deadline - monotonic()
                if remaining <= 0 or self._rests.get(name, 0.0) > monotonic():
                    break
                for transfer in [self._begin(name, prompt, namespace, remaining) for prompt in wave]:
                    found = self._ended(name, transfer, found)
        return found

    def _waves(self, prompts: Sequence[npt.NDArray[np.int32]]) -> Iterator[list[npt.NDArray[np.int32]]]:
        """Prompts that are fetched at once: no two begin alike, so that the later one has what the first brought."""
        alike: dict[bytes, list[npt.NDArray[np.int32]]] = {}
        for prompt in prompts:
            if len(prompt) >= self._block_tokens:
                alike.setdefault(prompt[: self._block_tokens].tobytes(), []).append(prompt)
        for wave in itertools.zip_longest(*alike.values()):
            yield [prompt for prompt in wave if prompt is not None]

    def _begin(
        self, name: str, prompt: npt.NDArray[np.int32], namespace: str, timeout: float
    ) -> _core.Transfer | Error:
        try:
            return self._pool.fetch_with_insert(
                name, prompt, namespace=namespace, medium=self._medium, timeout=timeout
            )  # fmt: skip
        except Error as error:
            return error

    def _ended(self, name: str, transfer: _core.Transfer | Error, found: Fetched) -> Fetched:
        try:
            if isinstance(transfer, Error):
                raise transfer
            stats = transfer.wait().stats
        except Error as error:
            if isinstance(error, DeadlineExceeded | PeerLost):
                self._rests[name] = monotonic() + _REST_S
            level = logging.INFO if isinstance(error, OutOfBlocks) else logging.WARNING
            _log.log(level, "a prompt does not come from %s, and is computed: %s", name, error)
            return found._replace(failures=found.failures + 1)
        return found._replace(tokens=found.tokens + (stats.blocks - stats.skipped_blocks) * self._block_tokens)


def send(pool: Pool, peer: str, tokens: npt.NDArray[np.int32], namespace: str) -> int:
    """Sends a peer what the pool has of a prompt. See `PromptStore.send`."""
    with pool.match(tokens, namespace) as hit:
        if not hit.tokens:
            return 0
        done = pool.transfer_with_insert(
            peer, tokens[: hit.tokens], hit.addrs, namespace=namespace, medium=DRAM
        ).wait()  # fmt: skip
    return (done.stats.blocks - done.stats.skipped_blocks) * pool.kv_layout.block_tokens
