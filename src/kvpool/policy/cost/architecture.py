"""The architecture-level model: one regression of the time to first token on (x, y) (MemServe §5.3.2).

The operator-level model is compared with it (Fig 14). It knows nothing of the operators, so another parallelism needs
another calibration; without one, `scaled` can only divide by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvpool.errors import ArgumentError
from kvpool.policy.cost.fit import ErrorReport, fit_nonnegative
from kvpool.policy.cost.operators import NEW, NEW_2, NEW_CACHED, ONE, TOKENS, Work, dot, feature_rows
from kvpool.policy.cost.profile import Sample

__all__ = ["ArchitectureModel"]

_FEATURES: Final = (NEW_CACHED, NEW_2, TOKENS, NEW, ONE)


@dataclass(frozen=True)
class ArchitectureModel:
    """Time to first token as a polynomial of the prompt's lengths.

    Attributes:
        coefficients: Of new * cached, new^2, tokens, new and 1; seconds.
    """

    coefficients: tuple[float, ...]

    @classmethod
    def fit(cls, prefills: Iterable[Sample]) -> ArchitectureModel:
        """From whole prefills of one prompt each. Raises ArgumentError for fewer than five."""
        samples = list(prefills)
        if len(samples) < len(_FEATURES):
            raise ArgumentError(f"{len(samples)} prefills; a fit takes at least {len(_FEATURES)}")
        rows = feature_rows([sample.work for sample in samples], _FEATURES)
        return cls(tuple(fit_nonnegative(rows, np.array([sample.seconds for sample in samples])).tolist()))

    def scaled(self, tp: int) -> ArchitectureModel:
        """For `tp` ranks, as if everything were split: the only estimate without a new measurement."""
        return ArchitectureModel(tuple(coefficient / tp for coefficient in self.coefficients))

    def exec_s(self, tokens: int, cached: int = 0) -> float:
        """Seconds of a prefill; as CostModel.exec_s."""
        cached = min(cached, tokens - 1)
        monomials = Work(tokens - cached, cached).monomials()
        return dot(self.coefficients, (monomials[at] for at in _FEATURES))

    def report(self, prefills: Iterable[Sample]) -> ErrorReport:
        """Errors for whole prefills of one prompt each."""
        samples = list(prefills)
        predicted = [self.exec_s(sample.work.new + sample.work.cached, sample.work.cached) for sample in samples]
        return ErrorReport.of(predicted, (sample.seconds for sample in samples))
