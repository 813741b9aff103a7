"""A profile: how long each operator took on one machine, as JSON.

    {"format": "kvpool operator profile", "version": 1,
     "model": {"layers": 8, "hidden": 512, ...},
     "machine": {"device": "...", "library": "...", "units": 2},
     "block_tokens": 16,
     "operators": {"qkv": [{"new": 64, "cached": 0, "blocks": 4, "prompts": 1, "seconds": 0.00012}, ...], ...},
     "prefills": [{"new": 64, "cached": 0, "blocks": 4, "prompts": 1, "seconds": 0.0041}, ...]}

`prefills` are whole prefills, for the architecture-level model; they may be absent. Reading checks every field, because
a profile comes from another machine, and a wrong one would mislead a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

from kvpool.errors import ArgumentError
from kvpool.policy.cost.operators import OPERATORS, Work
from kvpool.policy.cost.shape import ModelShape
from kvpool.policy.fields import count_of, format_of, list_of, object_of, seconds_of, text_of

__all__ = ["Machine", "Profile", "Sample"]

_FORMAT: Final = "kvpool operator profile"
_VERSION: Final = 1
_COUNTS: Final = {"new": 0, "cached": 0, "blocks": 0, "prompts": 1}  # the least that each can be


class Sample(NamedTuple):
    """One measurement: the work, and its time."""

    work: Work
    seconds: float


@dataclass(frozen=True)
class Machine:
    """The machine of a profile.

    Attributes:
        device: Its name, for people.
        library: The library that computed, with its version.
        units: SMs, or cores that were used.
    """

    device: str
    library: str
    units: int

    def as_json(self) -> dict[str, Any]:
        """The attributes, for a profile."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any) -> Machine:
        """The opposite of as_json. Raises ArgumentError for a field that is missing or wrong."""
        fields = object_of(value, "machine", ("device", "library", "units"))
        return cls(
            text_of(fields["device"], "machine.device"),
            text_of(fields["library"], "machine.library"),
            count_of(fields["units"], "machine.units", 1),
        )


@dataclass(frozen=True)
class Profile:
    """Measurements of a model's operators, one rank and one stage.

    Attributes:
        model: The model of the operators.
        machine: The machine of the measurements.
        block_tokens: Tokens a block of its KV.
        operators: By name of operator.
        prefills: Whole prefills of the same model on the same machine.
    """

    model: ModelShape
    machine: Machine
    block_tokens: int
    operators: Mapping[str, Sequence[Sample]]
    prefills: Sequence[Sample] = field(default=())

    def as_json(self) -> dict[str, Any]:
        """As the module's docstring draws it; for json.dump."""
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "model": self.model.as_json(),
            "machine": self.machine.as_json(),
            "block_tokens": self.block_tokens,
            "operators": {name: list(map(_sample_as_json, samples)) for name, samples in self.operators.items()},
            "prefills": list(map(_sample_as_json, self.prefills)),
        }

    @classmethod
    def from_json(cls, value: Any) -> Profile:
        """The opposite of as_json.

        Raises:
            ArgumentError: It is no profile, of another version, or a field is missing, unknown or out of range; the
                text names the field.
        """
        fields = object_of(value, "profile", ("format", "version", "model", "machine", "block_tokens", "operators"))
        format_of(fields, _FORMAT, _VERSION)
        operators = object_of(fields["operators"], "operators")
        if unknown := sorted(set(operators) - set(OPERATORS)):
            raise ArgumentError(f"operators: unknown {', '.join(unknown)}; known are {', '.join(OPERATORS)}")
        return cls(
            model=ModelShape.from_json(object_of(fields["model"], "model")),
            machine=Machine.from_json(fields["machine"]),
            block_tokens=count_of(fields["block_tokens"], "block_tokens", 1),
            operators={name: _samples(samples, f"operators.{name}") for name, samples in operators.items()},
            prefills=_samples(fields.get("prefills", []), "prefills"),
        )


def _sample_as_json(sample: Sample) -> dict[str, Any]:
    return {**sample.work._asdict(), "seconds": sample.seconds}


def _samples(value: Any, where: str) -> tuple[Sample, ...]:
    return tuple(_sample(item, f"{where}[{at}]") for at, item in enumerate(list_of(value, where)))


def _sample(value: Any, where: str) -> Sample:
    fields = object_of(value, where, (*_COUNTS, "seconds"))
    seconds = seconds_of(fields["seconds"], f"{where}.seconds")
    counts = (count_of(fields[name], f"{where}.{name}", least) for name, least in _COUNTS.items())
    return Sample(Work(*counts), seconds)
