"""exec(x, y): how long the prefill of a prompt takes, operator by operator (MemServe §5.3).

The sum over all operators of how often a forward pass runs each, times its time. Tensor and pipeline parallelism change
the operators' shapes and numbers, not what was fitted, so a profile of one rank serves every parallelism.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError
from kvpool.policy.cost.compiled import Compiled, Fits, OperatorCost, communication
from kvpool.policy.cost.fit import ErrorReport, Floats, fit_nonnegative
from kvpool.policy.cost.operators import OPERATORS, Work, feature_rows, matmul_of
from kvpool.policy.cost.profile import Profile, Sample
from kvpool.policy.cost.shape import ModelShape, Parallel
from kvpool.policy.cost.waves import WaveModel

__all__ = ["CostModel"]

_FEW: Final = 4  # below that, arrays cost more than they save


class CostModel:
    """The operator-level cost model. Immutable, and all calls are pure; equal when it predicts by the same figures.

    Lengths are tokens: a prompt of `tokens`, of which the first `cached` have their KV already, so x = tokens and
    y = cached / tokens. At least one token is always computed, because its logits are needed, however many are cached.

    Args:
        model: The shape.
        fits: From `CostModel.fit`, or by hand.
        parallel: The instance's division among ranks; one rank by default.
        block_tokens: Tokens a block of KV.
    """

    def __init__(self, model: ModelShape, fits: Fits, parallel: Parallel | None = None, block_tokens: int = 16) -> None:
        self.model = model
        self.fits = fits
        self.parallel = (parallel or Parallel()).checked(model)
        self.block_tokens = block_tokens
        stages = self.parallel.pp
        self._costs = {
            operator.name: OperatorCost(operator, model, fits, self.parallel.tp) for operator in OPERATORS.values()
        }
        self._whole = Compiled(model, fits, self.parallel, model.layers, sends=stages - 1)
        self._stage = Compiled(model, fits, self.parallel, -(-model.layers // stages), sends=min(1, stages - 1))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CostModel):
            return NotImplemented
        if type(self) is not CostModel or type(other) is not CostModel:
            return self is other  # a subclass may add or change anything
        return self._made_of() == other._made_of()

    def __hash__(self) -> int:
        model, _, parallel, block_tokens = self._made_of()
        return hash((model, parallel, block_tokens))

    @classmethod
    def fit(cls, profile: Profile, *, waves_from: Sequence[str] = ()) -> CostModel:
        """From a profile of one rank.

        Args:
            profile: Measurements. An operator that is not in it counts as free.
            waves_from: Compute-bound operators to fit the wave model to; all by default. One is enough (§5.3.2 (a)).

        Raises:
            ArgumentError: There are too few measurements of an operator, or of those that are compute-bound.
        """
        model = profile.model
        linear = {}
        products = []
        for name, samples in profile.operators.items():
            if OPERATORS[name].kind == "compute":
                if not waves_from or name in waves_from:
                    products += [(sample.work.new, matmul_of(name, model), sample.seconds) for sample in samples]
                continue
            features = OPERATORS[name].features
            if len(samples) < len(features):
                raise ArgumentError(f"{name}: {len(samples)} measurements; a fit takes at least {len(features)}")
            rows = feature_rows([sample.work for sample in samples], features)
            fitted = fit_nonnegative(rows, np.array([sample.seconds for sample in samples]))
            linear[name] = tuple(fitted.tolist())
        if len(products) < 3:
            raise ArgumentError(f"{len(products)} measurements of compute-bound operators; a fit takes at least 3")
        waves = WaveModel.fit(products, profile.machine.units, model.itemsize)
        return cls(model, Fits(waves, linear), block_tokens=profile.block_tokens)

    def spread(self, parallel: Parallel) -> CostModel:
        """The same fits for another parallelism. Raises ArgumentError if the model cannot be split in this way."""
        return CostModel(self.model, self.fits, parallel, self.block_tokens)

    # ---- predictions

    def exec_s(self, tokens: int, cached: int = 0, in_dram: int = 0) -> float:
        """Seconds of a prefill, from the first operator to the logits of the last token.

        Args:
            tokens: Length of the prompt.
            cached: Tokens of it that are cached.
            in_dram: Of these, tokens whose KV has to be swapped in first.
        """
        if tokens < 1 or cached < 0:
            raise _wrong(tokens, cached)
        cached = cached if cached < tokens else tokens - 1
        seconds = self._whole.prompt_s(tokens - cached, cached, -(-tokens // self.block_tokens))
        return seconds + self.swap_in_s(in_dram) if in_dram else seconds

    def exec_many_s(self, tokens: int, cached: npt.NDArray[np.int64]) -> Floats:
        """exec_s of one prompt for many cached lengths at once; float64, as long as `cached`."""
        if len(cached) <= _FEW:
            return np.array([self._whole.time_s(self._work(tokens, length)) for length in cached.tolist()])
        return self._whole.many_s(tokens, -(-tokens // self.block_tokens), np.minimum(cached, tokens - 1))

    def swap_in_s(self, tokens: int) -> float:
        """Seconds to bring the KV of `tokens` from DRAM to HBM."""
        if tokens <= 0:
            return 0.0
        return self._costs["swap_in"].time_s(Work(0, tokens, -(-tokens // self.block_tokens)))

    def stage_s(self, tokens: int, cached: int = 0) -> float:
        """Seconds for which a prompt occupies one pipeline stage, and the next prompts wait. exec_s if pp is 1."""
        return self._stage.time_s(self._work(tokens, cached))

    def batch_s(self, prompts: Iterable[tuple[int, int]], ones: int = 0) -> float:
        """Seconds of one forward pass over several prompts, (tokens, cached) each; 0 for none.

        With `ones`, over as many more prompts of one token, in a time that does not grow with their number.

        Matrix products see the sum of all new tokens, attention sees each prompt alone. (The paper sums lengths and
        cached shares, as if prompts attended to each other.)
        """
        works = [self._work(tokens, cached) for tokens, cached in prompts]
        return self._whole.batch_s(works, ones) if works or ones else 0.0

    def equal_batch_s(self, prompts: int, tokens: int, cached: int = 0) -> float:
        """batch_s of `prompts` equal prompts, in a time that does not grow with their number."""
        if prompts < 1:
            raise ArgumentError(f"a batch of {prompts} prompts")
        return self._whole.equal_s(self._work(tokens, cached), prompts)

    def operators_s(self, tokens: int, cached: int = 0) -> dict[str, float]:
        """Seconds by operator, for all its runs in one forward pass; "communication" is the time of links."""
        work, layers = self._work(tokens, cached), self.model.layers
        parts = {
            name: (operator.per_layer * layers + operator.once) * self._costs[name].time_s(work)
            for name, operator in OPERATORS.items()
            if operator.per_layer or operator.once
        }
        fixed_s, per_token_s = communication(self.model, self.parallel, layers, self.parallel.pp - 1)
        return parts | {"communication": fixed_s + per_token_s * work.new}

    # ---- how good they are

    def report(self, prefills: Iterable[Sample]) -> ErrorReport:
        """Errors for whole prefills. A sample of several prompts counts as a batch of equal ones."""
        samples = list(prefills)
        predicted = [self._whole.batch_s([_share(sample.work)] * sample.work.prompts) for sample in samples]
        return ErrorReport.of(predicted, (sample.seconds for sample in samples))

    def operator_reports(self, profile: Profile) -> dict[str, ErrorReport]:
        """Errors for each operator of a profile, which need not be the one that was fitted."""
        return {
            name: ErrorReport.of(
                (self._costs[name].time_s(sample.work) for sample in samples),
                (sample.seconds for sample in samples),
            )
            for name, samples in profile.operators.items()
            if samples
        }

    def _made_of(self) -> tuple[ModelShape, Fits, Parallel, int]:
        return self.model, self.fits, self.parallel, self.block_tokens

    def _work(self, tokens: int, cached: int) -> Work:
        if tokens < 1 or cached < 0:
            raise _wrong(tokens, cached)
        cached = min(cached, tokens - 1)
        return Work(tokens - cached, cached, -(-tokens // self.block_tokens))


def _wrong(tokens: int, cached: int) -> ArgumentError:
    return ArgumentError(f"a prompt of {tokens} tokens, {cached} of them cached")


def _share(work: Work) -> Work:
    """One of the equal prompts of a sample."""
    share = work.prompts
    return Work(work.new // share, work.cached // share, work.blocks // share)
