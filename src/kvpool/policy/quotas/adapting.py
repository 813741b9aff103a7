"""Quotas that follow what models need: demands, moving averages, hysteresis, and fairness (MuxServe §3.3, eq. 2)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from kvpool.errors import ArgumentError
from kvpool.policy.quotas.arguments import known, number_above_0, whole
from kvpool.policy.quotas.filling import reserves_fit, targets, targets_of
from kvpool.policy.quotas.tier import QuotaRule, Use

__all__ = [
    "EPSILON",
    "Adaptation",
    "Fairness",
    "Quotas",
    "Seen",
    "Trend",
    "adapt",
    "demand",
    "fairness",
    "first_quotas",
]

EPSILON: Final = 0.1  # of eq. 2


def demand(rate: float, tokens: float, units_per_token: float, seconds: float = 1.0) -> float:
    """Units that a model's requests need at a time.

    Args:
        rate: Requests a second; 0 for an idle model.
        tokens: Of a request, prompt and output, on average.
        units_per_token: Of the model's layout.
        seconds: How long a request keeps its blocks. Left at 1, demands of models whose requests take equally long are
            still in proportion, which is all that `targets` needs where memory is scarce.

    Raises:
        ArgumentError: A value is negative, not finite, or 0 where it cannot be.
        ArgumentTypeError: One is no number.
    """
    units = (
        number_above_0(rate, "rate", zero=True)
        * number_above_0(tokens, "tokens")
        * number_above_0(units_per_token, "units_per_token")
        * number_above_0(seconds, "seconds")
    )
    return number_above_0(units, "the demand", zero=True)


class Trend(NamedTuple):
    """Moving averages of a model, in units.

    Attributes:
        use: Active units.
        backlog: Units that waiting requests ask for.
    """

    use: float
    backlog: float


class Seen(NamedTuple):
    """What was observed of a model.

    Attributes:
        active: Units that are active now.
        backlog: Units that its waiting requests ask for.
    """

    active: int
    backlog: int = 0


@dataclass(frozen=True)
class Adaptation:
    """How quotas adapt.

    Attributes:
        half_life_s: After so many seconds, what was seen counts half.
        band: Quotas stay while none would change by more than this part of it. A part of the capacity would keep small
            models at 0 for ever.
    """

    half_life_s: float = 10.0
    band: float = 0.1

    def __post_init__(self) -> None:
        number_above_0(self.half_life_s, "half_life_s")
        if number_above_0(self.band, "band", zero=True) >= 1:
            raise ArgumentError(f"band is {self.band}: a part of a quota is below 1")


@dataclass(frozen=True)
class Quotas:
    """The quotas of one tier, and what they were made from. Immutable: `adapt` makes the next.

    Invariants:
      Q1. The quotas sum up to min(capacity, sum of limits) exactly. They change all together or not at all, so that
          no rounding adds up over time.
      Q2. Each quota lies within [reserve, limit] of the rules it was made with.

    Attributes:
        units: By name of model.
        capacity: Of the tier.
        rules: Of the tier.
        trends: By name of model.
    """

    units: Mapping[str, int]
    capacity: int
    rules: Mapping[str, QuotaRule]
    trends: Mapping[str, Trend] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what in ("units", "rules", "trends"):
            object.__setattr__(self, what, dict(getattr(self, what)))


def first_quotas(capacity: int, rules: Mapping[str, QuotaRule], demands: Mapping[str, float]) -> Quotas:
    """Quotas before anything was observed, from demands by rate.

    Raises:
        ArgumentError: All demands are 0, so that they say nothing; or as `targets`.
        ArgumentTypeError: As `targets`.
    """
    units = targets(capacity, rules, demands)
    if not any(demands.values()):
        raise ArgumentError("all rates are 0: demands that say nothing of any model")
    return Quotas(units, capacity, rules, {model: Trend(demands.get(model, 0.0), 0.0) for model in rules})


def adapt(
    last: Quotas,
    capacity: int,
    rules: Mapping[str, QuotaRule],
    seen: Mapping[str, Seen],
    elapsed_s: float,
    settings: Adaptation | None = None,
    demands: Mapping[str, float] | None = None,
) -> Quotas:
    """The quotas after a period: units go from models that use little to those that need more (§3.3).

    A model needs the moving average of its active units and of its backlog. A new model is taken as it is seen. If
    nobody needs anything, less than a unit together, the quotas stay. Rules that have changed take effect at once,
    whatever the hysteresis says: a limit that is raised again must let its model grow.

    Args:
        last: Of the period before.
        capacity: Of the tier now.
        rules: Of the tier now.
        seen: By name of model; one that is not named was idle.
        elapsed_s: Seconds since the period before.
        settings: Half-life and hysteresis.
        demands: By rate, from `demand`: models that all need more than there is share it in proportion to weight *
            demand, so that R of eq. 2 is the same for all. Without them they share in proportion to what they need, and
            the longer a backlog has grown, the more its model gets. A model that is not named counts as the last.

    Raises:
        ArgumentError: A model is unknown, a value negative or not finite, the capacity below 1, or the reserves
            together exceed it.
        ArgumentTypeError: A value has the wrong type.
    """
    settings = settings or Adaptation()
    number_above_0(elapsed_s, "elapsed_s", zero=True)
    if capacity != last.capacity or rules != last.rules:
        reserves_fit(capacity, rules)
    for model, (active, backlog) in seen.items():
        if model not in rules or type(active) is not int or type(backlog) is not int or active < 0 or backlog < 0:
            known(model, rules)
            whole(active, f"the active units seen of {model!r}")
            whole(backlog, f"the backlog seen of {model!r}")
    for model, wanted in (demands or {}).items():
        number_above_0(wanted, f"the demand of {known(model, rules)!r}", zero=True)
    kept = 0.5 ** (elapsed_s / settings.half_life_s)
    trends = _trends(last.trends, rules, seen, kept)
    same = capacity == last.capacity and rules == last.rules
    needs = {model: trend.use + trend.backlog for model, trend in trends.items()}
    if same and sum(needs.values()) < 1:  # an average never comes down to 0
        return Quotas(last.units, capacity, rules, trends)
    fresh = targets_of(capacity, rules, needs, demands)
    if same and _within(settings.band, fresh, last.units):
        return Quotas(last.units, capacity, rules, trends)
    return Quotas(fresh, capacity, rules, trends)


def _within(band: float, fresh: Mapping[str, int], last: Mapping[str, int]) -> bool:
    """Whether each quota would change by at most this part of the larger of the two."""
    return all(abs(units - last[model]) <= band * max(units, last[model]) for model, units in fresh.items())


_IDLE: Final = Seen(0, 0)


def _trends(
    last: Mapping[str, Trend], models: Iterable[str], seen: Mapping[str, Seen], kept: float
) -> dict[str, Trend]:
    found, new = {}, 1 - kept
    for model in models:
        active, backlog = seen.get(model, _IDLE)
        before = last.get(model)
        if before is None:
            found[model] = Trend(float(active), float(backlog))
        else:
            found[model] = Trend(kept * before[0] + new * active, kept * before[1] + new * backlog)
    return found


class Fairness(NamedTuple):
    """How evenly memory is shared, by eq. 2.

    Attributes:
        spread: The largest difference of R between two backlogged models; 0 with fewer than two.
        fair: Whether it is at most epsilon.
        least: The backlogged model with the smallest R, "" without one.
        most: The one with the largest.
    """

    spread: float
    fair: bool
    least: str
    most: str


def fairness(
    uses: Mapping[str, Use],
    demands: Mapping[str, float],
    backlogged: frozenset[str] | set[str],
    weights: Mapping[str, float] | None = None,
    epsilon: float = EPSILON,
) -> Fairness:
    """Eq. 2 over models that have requests waiting for memory: |R_i - R_j| <= epsilon.

    R is a model's part of what is used, active units only, over its part of weight * demand: 1 for all if they share
    evenly. So demands count by rate and by the size of a token, as §3.3 says, and the scale of demands and weights does
    not matter. The paper compares all models; but one that is idle uses nothing because it needs nothing, and would
    make every sharing look unfair.

    Args:
        uses: By name of model.
        demands: By name of model, from `demand`.
        backlogged: Models with requests that wait.
        weights: By name of model; 1 for one that is not named.
        epsilon: The largest difference that counts as fair.

    Raises:
        ArgumentError: A backlogged model has no use or no demand above 0, or a weight or epsilon is not above 0.
        ArgumentTypeError: A demand, a weight or epsilon is no number.
    """
    number_above_0(epsilon, "epsilon")
    used, wanted = {}, {}
    for model in sorted(backlogged):
        use = uses[known(model, uses)]
        needed = number_above_0(demands[known(model, demands)], f"the demand of {model!r}")
        weight = number_above_0((weights or {}).get(model, 1.0), f"the weight of {model!r}")
        used[model] = use.active
        wanted[model] = number_above_0(needed * weight, f"weight * demand of {model!r}")
    all_used = sum(used.values()) or 1
    all_wanted = sum(wanted.values()) or 1.0
    shares = {model: used[model] / all_used / (wanted[model] / all_wanted) for model in used}
    if len(shares) < 2:
        only = next(iter(shares), "")
        return Fairness(0.0, True, only, only)
    least, most = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    spread = shares[most] - shares[least]
    return Fairness(spread, spread <= epsilon, least, most)
