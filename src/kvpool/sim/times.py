"""The times of an instance's work, from a cost model, as a simulation needs them.

Prompts are counted in ids of blocks where the scheduler sees them, and in tokens where an instance computes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, sqrt
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.policy.cost import CostModel

__all__ = ["CountedInBlocks", "DecodeTimes"]

_FAR: Final = 1 << 16  # tokens over which a slope is measured
_KNOWN_MAX: Final = 1 << 16  # predictions that are kept
_FEW: Final = 4  # below that, arrays cost more than they save


class CountedInBlocks(CostModel):
    """The cost model for a caller that counts prompts in blocks: the global scheduler over ids.

    Args:
        model: In tokens.
        unit: Tokens for which an id stands.
    """

    def __init__(self, model: CostModel, unit: int) -> None:
        super().__init__(model.model, model.fits, model.parallel, block_tokens=1)
        self._in_tokens, self._unit = model, unit
        self._known: dict[tuple[int, int], float] = {}  # in blocks there are few different prompts

    def exec_s(self, tokens: int, cached: int = 0, in_dram: int = 0) -> float:
        """As CostModel.exec_s."""
        known = self._known.get((tokens, cached))
        if known is None:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            known = self._in_tokens.exec_s(self._unit * tokens, self._unit * cached)
            self._known[tokens, cached] = known
        return known + self._in_tokens.swap_in_s(self._unit * in_dram) if in_dram else known

    def exec_many_s(self, tokens: int, cached: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """As CostModel.exec_many_s."""
        if len(cached) <= _FEW:
            return np.array([self.exec_s(tokens, each) for each in cached.tolist()])
        return self._in_tokens.exec_many_s(self._unit * tokens, self._unit * cached)

    def stage_s(self, tokens: int, cached: int = 0) -> float:
        """As CostModel.stage_s."""
        return self._in_tokens.stage_s(self._unit * tokens, self._unit * cached)


class DecodeTimes:
    """The times of decoding steps; each makes one token for every request of a batch.

    A step of B requests with K tokens before it, all together, takes base(B) + slope K: products see B rows, attention
    reads K tokens of KV. So the time of several steps with the same batch is a sum in closed form.
    """

    def __init__(self, model: CostModel) -> None:
        self._model = model
        far = model.batch_s([(_FAR + 1, _FAR)]) - model.batch_s([(1, 0)])
        self._slope = far / _FAR
        self._base: list[float] = [0.0]

    def run_s(self, steps: int, batch: int, context: int) -> float:
        """Seconds of `steps` steps.

        Args:
            steps: 0 or more.
            batch: Requests, 1 or more.
            context: Tokens that they have all together before the first step; each step adds one each.
        """
        slope = self._slope
        first = self._of(batch) + slope * context
        return steps * first + slope * batch * (steps * (steps - 1) / 2)

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch: int, context: int) -> float:
        """Seconds of a step that computes chunks of prompts beside requests that decode.

        Args:
            chunks: Of each prompt, up to which token it is computed, and how many tokens are there before.
            batch: Requests that decode, 0 or more.
            context: As in `run_s`.
        """
        return self._model.batch_s(chunks, ones=batch) + self._slope * context

    def steps_until(self, seconds: float, batch: int, context: int) -> int:
        """The fewest steps, at least one, that take at least this long: the current step then ends."""
        slope = self._slope
        half = slope * batch / 2
        linear = self._of(batch) + slope * context - half
        if half * seconds < 1e-12 * linear * linear:  # the root would lose all its digits
            steps = ceil(seconds / linear)
        else:
            steps = ceil((sqrt(linear * linear + 4 * half * seconds) - linear) / (2 * half))
        steps = max(1, steps)
        while steps > 1 and self.run_s(steps - 1, batch, context) >= seconds:  # the root is a float
            steps -= 1
        while self.run_s(steps, batch, context) < seconds:
            steps += 1
        return steps

    def _of(self, batch: int) -> float:
        """Seconds of a step of requests without tokens before it."""
        base = self._base
        while len(base) <= batch:
            base.append(self._model.batch_s((), ones=len(base)))
        return base[batch]
