"""How many GPUs a service level needs: the smallest cluster that meets it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Final

from kvpool.errors import ArgumentError
from kvpool.sim.measures import Measures
from kvpool.sim.setup import Setup
from kvpool.sim.sketch import Sketch

__all__ = ["Slo", "Try", "find_gpus", "out_of_reach"]

_ALONE_RATE: Final = 1e-3  # requests a second
_AMPLE_GB: Final = 1e6


@dataclass(frozen=True)
class Slo:
    """A service level.

    Attributes:
        ttft_s: The longest time to first token; None for no limit.
        tpot_s: The longest time between tokens; None for no limit.
        quantile: The share of requests that must keep the limits.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    quantile: float = 0.99

    def __post_init__(self) -> None:
        if self.ttft_s is None and self.tpot_s is None:
            raise ArgumentError("a promise is of the time to first token, of the time between tokens, or of both")
        if any(limit is not None and not (limit > 0 and isfinite(limit)) for limit in (self.ttft_s, self.tpot_s)):
            raise ArgumentError(f"what is promised must be above 0, and finite: {self}")
        if not 0 < self.quantile < 1:
            raise ArgumentError(f"the share of requests is {self.quantile}; it must be above 0 and below 1")

    def kept(self, measures: Measures) -> bool:
        """Whether a run kept it. A refused request breaks it.

        Raises ArgumentError when nothing was measured that the limits apply to: then it is neither kept nor broken.
        """
        ttft, tpot = measures.ttft_s, measures.tpot_s
        promised = [(sketch, most) for sketch, most in ((ttft, self.ttft_s), (tpot, self.tpot_s)) if most is not None]
        return all(self._of(sketch, measures.refused) <= most for sketch, most in promised)

    def within(self, measures: Measures) -> dict[str, float]:
        """The share of requests that kept each limit, by its name: "ttft_s", "tpot_s". Refused requests did not.

        Raises ArgumentError as `kept` does.
        """
        found = {}
        for name, most in (("ttft_s", self.ttft_s), ("tpot_s", self.tpot_s)):
            if most is not None:
                sketch: Sketch = getattr(measures, name)
                self._of(sketch, measures.refused)
                found[name] = sketch.share(most) * sketch.count / (sketch.count + measures.refused)
        return found

    def can_be_kept(self, measures: Measures) -> bool:
        """Whether more GPUs may help: not if too many requests were refused, because no instance has room for them."""
        promised = [(measures.ttft_s, self.ttft_s), (measures.tpot_s, self.tpot_s)]
        return all(self._of(sketch, measures.refused) < inf for sketch, most in promised if most is not None)

    def _of(self, sketch: Sketch, refused: int) -> float:
        """The quantile, with refused requests counted as the longest."""
        if not sketch.count + refused:
            raise ArgumentError(
                "no request was measured whose time the service level limits (fewer requests than are skipped, or "
                "answers of one token, which have no time between tokens)"
            )
        if not refused:
            return sketch.quantile(self.quantile)
        rank, last = self.quantile * (sketch.count + refused - 1), sketch.count - 1
        return inf if rank > last else sketch.quantile(rank / max(1, last))


@dataclass(frozen=True)
class Try:
    """One size that was tried."""

    setup: Setup
    measures: Measures
    kept: bool


def out_of_reach(setup: Setup, slo: Slo, measures: Measures) -> str | None:
    """Why no number of GPUs keeps a promise, or None where some number may.

    Requests that are longer than an instance has room for are refused by any number of instances. And no cluster is
    faster than one whose requests come one by one, minutes apart, to instances that have HBM for everything that was
    ever computed: there nothing waits, and all that can be cached is.

    Args:
        setup: Its number of GPUs and its rate do not matter.
        slo: The promise.
        measures: Of a run of any size.

    Raises:
        ArgumentError: As `find_gpus`.
    """
    if not slo.can_be_kept(measures):
        return (
            f"{measures.refused:,} of {measures.arrived:,} requests need more KV than one instance has room for "
            f"({setup.hbm_gb_each * setup.tp:g} GB)"
        )
    alone = replace(setup.of_size(1), rate=_ALONE_RATE, rate_scale=1.0, hbm_gb=_AMPLE_GB, ttl_s=0.0).run()
    for name, most in (("ttft_s", slo.ttft_s), ("tpot_s", slo.tpot_s)):
        if most is not None and (best := getattr(alone, name).quantile(slo.quantile)) > most:
            return (
                f"a request that waits for no other, with all that can be cached, has {name[:4].upper()} of "
                f"{best:.3g} s at {slo.quantile:.3g} of requests: faster or more GPUs an instance (--tp) would help"
            )
    return None


def find_gpus(
    setup: Setup,
    slo: Slo,
    gpus_max: int = 1024,
    *,
    told: Callable[[int, float], None] | None = None,
    tried: Callable[[Try], None] | None = None,
    hopeless: Callable[[str], None] | None = None,
) -> tuple[Try | None, list[Try]]:
    """The smallest cluster of a kind that keeps a promise, by doubling and then halving the gap.

    It assumes that more GPUs keep what fewer keep. Prefill and decode instances keep the setup's ratio.

    Args:
        setup: Its number of GPUs does not matter.
        slo: The promise.
        gpus_max: More are not tried.
        told: As in `ClusterSim`.
        tried: Called after each size.
        hopeless: Called with the reason if no number of GPUs keeps it (`out_of_reach`); then no more are tried.

    Returns:
        The smallest that keeps it, or None if `gpus_max` do not, or so much is refused that no number does; and all
        that were tried, the smallest first.

    Raises:
        ArgumentError: `gpus_max` GPUs make no cluster, or the run measured nothing that the limits apply to.
    """
    tries: dict[int, Try] = {}

    def keeps(factor: int) -> bool:
        if factor not in tries:
            sized = setup.of_size(factor)
            measures = sized.run(told)
            tries[factor] = Try(sized, measures, slo.kept(measures))
            if tried is not None:
                tried(tries[factor])
        return tries[factor].kept

    largest = gpus_max // setup.of_size(1).gpu_count
    if largest < 1:
        raise ArgumentError(
            f"the smallest cluster has {setup.of_size(1).gpu_count} GPUs, at most {gpus_max} are allowed"
        )
    below, above = 0, 1  # `below` does not keep it
    if not keeps(1) and (reason := out_of_reach(setup, slo, tries[1].measures)) is not None:
        if hopeless is not None:
            hopeless(reason)
        return None, [tries[1]]
    while not keeps(above):
        if above == largest or not slo.can_be_kept(tries[above].measures):
            return None, [tries[factor] for factor in sorted(tries)]
        below, above = above, min(2 * above, largest)
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if keeps(middle) else (middle, above)
    return tries[above], [tries[factor] for factor in sorted(tries)]
