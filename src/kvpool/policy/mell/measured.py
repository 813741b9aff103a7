"""Measured boundaries (§V, "boundary profiling"): links, and iterations of an instance, as JSON.

    {"format": "kvpool boundary profile", "version": 1,
     "model": {"layers": 8, "hidden": 512, ...},
     "machine": {"device": "...", "library": "...", "units": 2},
     "context": 512,
     "links": {"sock": [{"bytes": 65536, "seconds": 0.00012}, ...], ...},
     "iterations": [{"batch": 8, "tokens": 32, "seconds": 0.011}, ...]}

A sample of a link is one transfer. An iteration decodes a token of each of `batch` requests of `context` tokens and
prefills `tokens` of one more; with 0 tokens it only decodes. The file keeps the measurements; boundaries for an epoch
and an allowed slowdown are computed from them on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from kvpool.errors import ArgumentError
from kvpool.policy import cost
from kvpool.policy.cost import Machine, ModelShape
from kvpool.policy.cost.fit import fit_nonnegative
from kvpool.policy.fields import count_of, format_of, list_of, object_of, seconds_of
from kvpool.policy.mell.boundaries import Boundaries, ComputeProfile, Link

__all__ = ["BoundaryProfile", "IterationSample", "LinkSample"]

_FORMAT: Final = "kvpool boundary profile"
_VERSION: Final = 1
_NOTHING: Final = 1e-9  # as a part of a transfer's time: less is rounding
_FIELDS: Final = ("format", "version", "model", "machine", "context", "links", "iterations")


class LinkSample(NamedTuple):
    """One transfer: how much, and how long until it was there."""

    bytes: int
    seconds: float


class IterationSample(NamedTuple):
    """One iteration: requests that decode, tokens that are prefilled beside them, and how long it took."""

    batch: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class BoundaryProfile:
    """What links carry, and what instances can prefill beside their batches.

    Attributes:
        model: The model that was measured.
        machine: Where its iterations were measured.
        context: Tokens of each request in an iteration.
        links: Transfers over each link that was measured, by a name for its kind.
        iterations: For each batch size, one iteration without prefill and others with.
    """

    model: ModelShape
    machine: Machine
    context: int
    links: Mapping[str, Sequence[LinkSample]]
    iterations: Sequence[IterationSample]

    def link(self, name: str) -> cost.Link:
        """Latency and bandwidth of a link: the line through its samples with the least relative errors.

        If the line does not rise with size, the bandwidth is that of the largest transfer, all its time counted.

        Raises:
            ArgumentError: It was not measured, or by fewer than two transfers.
        """
        if name not in self.links:
            raise ArgumentError(f"link {name!r} was not measured; these were: {', '.join(self.links) or 'none'}")
        samples = self.links[name]
        features = np.array([[1.0, sample.bytes] for sample in samples]).reshape(-1, 2)
        latency_s, per_byte_s = fit_nonnegative(features, np.array([sample.seconds for sample in samples]))
        largest = max(samples)
        if per_byte_s * largest.bytes < _NOTHING * largest.seconds:
            return cost.Link(largest.bytes / largest.seconds)
        return cost.Link(1 / float(per_byte_s), latency_s=float(latency_s))

    def tokens_beside(self, batch: int, slowdown: float) -> int:
        """Tokens that fit beside a batch into an iteration that takes `slowdown` longer than without them.

        Interpolates between two measured numbers and assumes that more tokens never take less time. At most the largest
        number that was measured.

        Args:
            batch: A size that was measured.
            slowdown: A part of the iteration without prefill: 0.1 for 10 %.

        Raises:
            ArgumentError: The batch was not measured.
        """
        tokens, seconds = self._iterations_of(batch)
        limit_s = (1 + slowdown) * seconds[0]
        beyond = int(np.searchsorted(seconds, limit_s, "right"))
        if beyond == len(tokens):
            return tokens[-1]
        before, after = seconds[beyond - 1], seconds[beyond]
        share = (limit_s - before) / (after - before)
        return int(tokens[beyond - 1] + share * (tokens[beyond] - tokens[beyond - 1]))

    def compute(self, epoch_s: float, slowdown: float = 0.1) -> ComputeProfile:
        """The computation boundary: tokens of an epoch, for each batch size that was measured.

        Args:
            epoch_s: Seconds of an epoch.
            slowdown: How much longer iterations may take, as a part: 0.1 for 10 %.

        Raises:
            ArgumentError: Nothing was measured, an epoch that is not positive, or a negative slowdown.
        """
        if not epoch_s > 0 or not slowdown >= 0:
            raise ArgumentError(f"an epoch of {epoch_s} s, which must be above 0; a slowdown of {slowdown}, from 0")
        found = {}
        for batch in sorted({sample.batch for sample in self.iterations}):
            iterations = epoch_s / ((1 + slowdown) * self._iterations_of(batch)[1][0])
            found[batch] = int(iterations) * self.tokens_beside(batch, slowdown)
        return ComputeProfile(found)

    def boundaries(
        self,
        links: Callable[[int, int], Sequence[Link]],
        kinds: Mapping[Link, str],
        gpus: Iterable[int],
        epoch_s: float,
        share: float = 0.5,
        slowdown: float = 0.1,
    ) -> Boundaries:
        """The boundaries that `divide` and `Backlog` take.

        Args:
            links: The links that KV cache from one GPU to another passes.
            kinds: The name by which each of these links was measured.
            gpus: The GPUs whose instances are like the measured one; others prefill nothing for migration.
            epoch_s: Seconds of an epoch.
            share: Of each link's time, for migration.
            slowdown: How much longer iterations may take, as a part.

        Raises:
            ArgumentError: A link of a name that was not measured, a share outside 0 to 1, or as `compute`.
        """
        if not 0 <= share <= 1:
            raise ArgumentError(f"a share of {share}; it must be 0 to 1")
        profile = self.compute(epoch_s, slowdown)
        fitted = {name: self.link(name) for name in set(kinds.values())}
        tokens_s = {name: link.bytes_per_s / self.model.kv_bytes_per_token for name, link in fitted.items()}
        return Boundaries(
            links,
            {link: int(share * epoch_s * tokens_s[name]) for link, name in kinds.items()},
            dict.fromkeys(gpus, profile),
            {link: -int(-fitted[name].latency_s * tokens_s[name] // 1) for link, name in kinds.items()},
        )

    def _iterations_of(self, batch: int) -> tuple[list[int], list[float]]:
        """Tokens, and seconds that never fall, of the iterations of a batch; the first is the one without prefill."""
        samples = sorted((sample.tokens, sample.seconds) for sample in self.iterations if sample.batch == batch)
        if not samples or samples[0][0] != 0:
            raise ArgumentError(f"no iteration of a batch of {batch} without prefill was measured")
        seconds = np.maximum.accumulate([seconds for _, seconds in samples])
        return [tokens for tokens, _ in samples], seconds.tolist()

    def as_json(self) -> dict[str, Any]:
        """As the module's docstring draws it; for json.dump."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "model": self.model.as_json(),
            "machine": self.machine.as_json(),
            "context": self.context,
            "links": {name: [sample._asdict() for sample in samples] for name, samples in self.links.items()},
            "iterations": [sample._asdict() for sample in self.iterations],
        }

    @classmethod
    def from_json(cls, value: Any) -> BoundaryProfile:
        """The opposite of as_json.

        Raises:
            ArgumentError: It is no such profile, of another version, or a field is missing or out of range; the text
                names the field.
        """
        fields = object_of(value, "profile", _FIELDS)
        format_of(fields, _FORMAT, _VERSION)
        iterations = list_of(fields["iterations"], "iterations")
        return cls(
            model=ModelShape.from_json(object_of(fields["model"], "model")),
            machine=Machine.from_json(fields["machine"]),
            context=count_of(fields["context"], "context", 1),
            links={name: _links(samples, name) for name, samples in object_of(fields["links"], "links").items()},
            iterations=tuple(_iteration(item, f"iterations[{at}]") for at, item in enumerate(iterations)),
        )


def _links(value: Any, name: str) -> tuple[LinkSample, ...]:
    found = []
    for at, item in enumerate(list_of(value, f"links.{name}")):
        where = f"links.{name}[{at}]"
        fields = object_of(item, where, LinkSample._fields)
        found.append(
            LinkSample(
                count_of(fields["bytes"], f"{where}.bytes", 1), seconds_of(fields["seconds"], f"{where}.seconds")
            )
        )
    return tuple(found)


def _iteration(value: Any, where: str) -> IterationSample:
    fields = object_of(value, where, IterationSample._fields)
    return IterationSample(
        count_of(fields["batch"], f"{where}.batch", 1),
        count_of(fields["tokens"], f"{where}.tokens", 0),
        seconds_of(fields["seconds"], f"{where}.seconds"),
    )
