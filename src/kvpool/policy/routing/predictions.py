"""The cost models of a fleet, and the time of one prompt with each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from kvpool.errors import ArgumentError
from kvpool.policy.cost import CostModel

__all__ = ["Models", "Times"]

_FEW: Final = 8  # below that, arrays cost more than they save


class Models:
    """The fleet's model, number 0, and each other model of an instance. Equal models share a number.

    Each decision asks all of them, so a model is dropped when its last instance leaves.

    Args:
        model: The fleet's; it stays.
    """

    def __init__(self, model: CostModel) -> None:
        self._models = [model]
        self._users = [0]  # how many instances have each

    def __len__(self) -> int:
        return len(self._models)

    def __iter__(self) -> Iterator[CostModel]:
        return iter(self._models)

    def checked(self, model: CostModel | None) -> CostModel:
        """The model to use for an instance with this one. Raises ArgumentError when its blocks are not the fleet's."""
        own = self._models[0]
        if model is None:
            return own
        if model.block_tokens != own.block_tokens:
            raise ArgumentError(f"blocks of {model.block_tokens} tokens; the fleet has {own.block_tokens}")
        return model

    def number(self, model: CostModel) -> int:
        """The number that `take` would return."""
        return self._models.index(model) if model in self._models else len(self._models)

    def take(self, model: CostModel) -> None:
        """Counts one more instance with this model."""
        number = self.number(model)
        if number == len(self._models):
            self._models.append(model)
            self._users.append(0)
        self._users[number] += 1

    def give_back(self, number: int) -> int | None:
        """Counts one instance less with this model. Returns the number whose model got this number; None for none."""
        self._users[number] -= 1
        if number == 0 or self._users[number]:
            return None
        last = len(self._models) - 1
        self._models[number], self._users[number] = self._models[last], self._users[last]
        del self._models[last], self._users[last]
        return last


class Times:
    """The times of a prompt with one model: predicted on demand if only few lengths of it are held.

    Args:
        model: Predicts them.
        tokens: Tokens of the prompt.
        lengths: The lengths that are held of it, as `Candidates.lengths`.
    """

    __slots__ = ("_lengths", "_seconds", "_tokens", "model")

    def __init__(self, model: CostModel, tokens: int, lengths: Sequence[int]) -> None:
        self.model = model
        self._tokens = tokens
        self._lengths = lengths
        self._seconds: dict[int, float] = {}
        if len(lengths) > _FEW:
            many = model.exec_many_s(tokens, np.array(lengths)).tolist()
            self._seconds = dict(zip(lengths, many, strict=True))

    def of(self, cached: int) -> float:
        """By how many tokens are cached."""
        seconds = self._seconds.get(cached)
        if seconds is None:
            seconds = self._seconds[cached] = self.model.exec_s(self._tokens, cached)
        return seconds

    def __getitem__(self, at: int) -> float:
        cached = self._lengths[at]
        seconds = self._seconds.get(cached)
        return self.of(cached) if seconds is None else seconds
