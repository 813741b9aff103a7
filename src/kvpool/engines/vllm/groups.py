"""The groups of a model's layers: under which names each one's blocks are cached, and which blocks a prefix needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.engines.vllm.requests import Digests, namespaces_of_groups

__all__ = ["Groups", "Named", "places_of"]

_PLACES_BYTES: Final = 6


class Named(NamedTuple):
    """A part of a prompt, and the namespace in which it is cached."""

    namespace: str
    tokens: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Groups:
    """The groups of layers of a model.

    The blocks of a group are cached as prompts, from the first token on, in a namespace of the group. In a cluster a
    group with a window has tails, too: what the window needs at the end of a prefix, without the blocks before it. A
    tail is a prompt in a namespace that names where it begins and all tokens before that. Its content depends on these.

    A group of states (Mamba, linear attention, short convolutions) has one state for all tokens before a boundary, in
    the block that ends there. It is cached as a tail of that one block, in any engine.

    Attributes:
        block_tokens: Tokens in a block.
        windows: For each group, to how many of the last tokens a token attends; None: to all.
        tails: There are tails.
        places: What `places_of` says of the layers, where engines compare it.
        states: For each group, whether it has states; empty: none has.
    """

    block_tokens: int
    windows: tuple[int | None, ...] = (None,)
    tails: bool = False
    places: str = ""
    states: tuple[bool, ...] = ()

    def __len__(self) -> int:
        """How many there are."""
        return len(self.windows)

    @property
    def windowed(self) -> bool:
        """Whether a group has a window."""
        return any(window is not None for window in self.windows)

    def has_states(self, group: int) -> bool:
        """Whether a group has states."""
        return bool(self.states) and self.states[group]

    @property
    def order(self) -> list[int]:
        """The groups in the order in which they are looked up: those first that attend to all tokens, states last."""
        return sorted(range(len(self)), key=lambda group: (self.has_states(group), self.windows[group] is not None))

    @property
    def mark(self) -> str:
        """The text by which engines compare their groups. "": one group that attends to all tokens."""
        if len(self) == 1 and not self.windowed:
            return ""
        windows = ",".join("all" if window is None else str(window) for window in self.windows)
        return f"[groups {windows} of {self.places}]" if self.places else f"[groups {windows}]"

    def names(self, namespace: str) -> list[str]:
        """The namespace of each group's whole prompts; `namespace` is that of the request."""
        return namespaces_of_groups(namespace, len(self))

    def first_needed(self, group: int, blocks: int) -> int:
        """The first block that a group needs of a prefix of `blocks` blocks, for the token that follows it."""
        if self.has_states(group):
            return blocks - 1
        window = self.windows[group]
        return 0 if window is None else max(0, blocks * self.block_tokens - window + 1) // self.block_tokens

    def part(
        self,
        group: int,
        namespace: str,
        tokens: npt.NDArray[np.int32],
        first: int,
        digests: Digests | None = None,
    ) -> Named:
        """A prompt from a block on, as a group has it in the cache: whole if `first` is 0, otherwise a tail.

        Args:
            group: Of layers.
            namespace: Of the request.
            tokens: Of the prompt, int32.
            first: The block.
            digests: Those of the request, which read no token twice; None: all before the block are read.
        """
        name = self.names(namespace)[group]
        if not first:
            return Named(name, tokens)
        begin = first * self.block_tokens
        digest = (digests or Digests()).of(tokens, begin)
        return Named(f"{name}@{first}:{digest}", tokens[begin:])


def places_of(groups: Sequence[Sequence[str]]) -> str:
    """A hash of which layer is at which place in the blocks of each group. "": there is one group.

    Engines whose layers are at other places would take the content of one layer for that of another.

    Args:
        groups: For each, the names of its layers in their order.
    """
    if len(groups) < 2:
        return ""
    text = json.dumps([list(names) for names in groups])
    return hashlib.blake2b(text.encode(), digest_size=_PLACES_BYTES).hexdigest()
