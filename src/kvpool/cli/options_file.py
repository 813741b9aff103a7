"""A file with the options of a command: what stands there counts unless the command line names it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kvpool.errors import ArgumentError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Options"]

_GIVEN: Final = "given_options"


class _Noted(argparse.Action):
    """Stores the value, and that the command line named it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, _GIVEN, getattr(namespace, _GIVEN, frozenset()) | {self.dest})


class Options:
    """The options of a command that a file may set, too.

    Args:
        parser: Of the command. Gets the option `--config`.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--config", type=Path, metavar="FILE", help="TOML with these options, without dashes; flags count before it"
        )
        self._actions: dict[str, argparse.Action] = {}

    def add_to(self, group: Any) -> Callable[..., None]:
        """A function with the arguments of `add_argument`, for one value an option, in a group of the parser."""

        def add(flag: str, **settings: Any) -> None:
            action = group.add_argument(flag, action=_Noted, **settings)
            self._actions[flag.removeprefix("--")] = action

        return add

    def read_file(self, arguments: argparse.Namespace) -> None:
        """Sets what the file says and the command line does not.

        Raises:
            ArgumentError: The file cannot be read, is no TOML, or has an option that there is not, or a wrong value.
        """
        if arguments.config is None:
            return
        given: frozenset[str] = getattr(arguments, _GIVEN, frozenset())
        for name, value in _content(arguments.config).items():
            action = self._actions.get(name)
            if action is None:
                raise ArgumentError(f"{arguments.config}: {name} is no option; there are {', '.join(self._actions)}")
            if action.dest not in given:
                setattr(arguments, action.dest, _value(f"{arguments.config}: {name}", action, value))


def _content(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as error:
        raise ArgumentError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path}: {error}") from error


def _value(where: str, action: argparse.Action, value: Any) -> Any:
    """As the command line would give it: numbers as they are, texts by the option's own type."""
    if isinstance(value, dict):  # [instances], a = "http://..."
        value = [f"{key}={each}" for key, each in value.items()]
    if isinstance(value, list):
        value = ",".join(map(str, value))
    wanted = action.type if callable(action.type) else str
    if wanted in (int, float):
        if isinstance(value, bool) or not isinstance(value, int if wanted is int else int | float):
            raise ArgumentError(f"{where} must be a number{' without a fraction' if wanted is int else ''}")
        return wanted(value)
    if not isinstance(value, str):
        raise ArgumentError(f"{where} must be a text, not {value!r}")
    if action.choices is not None and value not in action.choices:
        raise ArgumentError(f"{where} is {value!r}; there are {', '.join(map(str, action.choices))}")
    return wanted(value)
