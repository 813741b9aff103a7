"""The settings of a pool: one typed record, filled from a TOML file, the environment and arguments.

    default < file < environment < argument

The file is the one that `KVPOOL_CONFIG` names, or else `$XDG_CONFIG_HOME/kvpool/config.toml` (`~/.config/...`) if it
exists. Its keys are the names of the fields of `Settings`. In the environment a field `copy_threads` is
`KVPOOL_COPY_THREADS`; an empty variable counts as unset. `kvpool info` shows each value and where it came from.
"""

from __future__ import annotations

import dataclasses
import difflib
import operator
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, cast, get_args, get_origin, get_type_hints

from kvpool.errors import ArgumentError, ArgumentTypeError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Loaded", "Settings", "load", "load_with_sources"]

ENVIRONMENT_PREFIX: Final = "KVPOOL_"
FILE_VARIABLE: Final = "KVPOOL_CONFIG"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What can be set about a pool, beside its layout and its sizes.

    Attributes:
        policy: Which unused blocks go first: "lru" the least recently used, "lfu" the least often used, "fifo" the
            oldest.
        copy_threads: Threads that share a copy of more than 1 MiB, the caller among them: from 1 to
            256.
        huge_pages: "auto" takes huge pages where the machine gives them, "never" does not ask, "require" fails without.
        numa_node: The NUMA node that owned memory comes from; -1 leaves it to the kernel.
        check_memory: Refuse an arena that the machine or its cgroup has no memory for, rather than be killed later.
        pin_dram: Page-lock DRAM for CUDA: "auto" when the device is a GPU, "never", or "always" (fail without
            a driver).
        audit: Check every invariant after every call. Slow; for finding bugs.
        zero_on_alloc: alloc hands out blocks as zeros, so that no owner sees what an earlier one left; adopt does not.
    """

    policy: Literal["lru", "lfu", "fifo"] = "lru"
    copy_threads: int = 2
    huge_pages: Literal["auto", "never", "require"] = "auto"
    numa_node: int = -1
    check_memory: bool = True
    pin_dram: Literal["auto", "never", "always"] = "auto"
    audit: bool = False
    zero_on_alloc: bool = False

    def __post_init__(self) -> None:
        """Checks every value.

        Raises:
            ArgumentError: A value is out of range.
            ArgumentTypeError: A value has the wrong type.
        """
        for name in FIELDS:
            object.__setattr__(self, name, _checked(name, getattr(self, name), "argument"))


FIELDS: Final[dict[str, Any]] = get_type_hints(Settings)
_RANGES: Final = {"copy_threads": (1, 256), "numa_node": (-1, 1023)}
_WORDS: Final = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


class Loaded(NamedTuple):
    """Settings, and where each came from: "default", "file ...", "environment ..." or "argument"."""

    settings: Settings
    sources: dict[str, str]
    file: Path | None


def load(*, environment: Mapping[str, str] | None = None, **arguments: Any) -> Settings:
    """Returns the settings: defaults, overridden by the file, the environment and the arguments, in this order.

    Args:
        environment: In place of the environment of the process.
        **arguments: Values of fields. None counts as not given.

    Raises:
        ArgumentError: An unknown name, a value out of range, or a file that cannot be read; it says where that stands.
        ArgumentTypeError: A value of the wrong type.
    """
    return load_with_sources(environment=environment, **arguments).settings


def load_with_sources(*, environment: Mapping[str, str] | None = None, **arguments: Any) -> Loaded:
    """Like `load`, but also tells where each value came from and which file was read."""
    environ = os.environ if environment is None else environment
    file = _file_path(environ)
    values: dict[str, Any] = {}
    sources = dict.fromkeys(FIELDS, "default")
    for name, value, source in (*_from_file(file), *_from_environment(environ), *_from_arguments(arguments)):
        values[name] = _checked(name, value, source)
        sources[name] = source
    return Loaded(Settings(**values), sources, file)


def _file_path(environ: Mapping[str, str]) -> Path | None:
    named = environ.get(FILE_VARIABLE)
    if named:
        return Path(named)
    folder = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", ""), ".config")
    usual = Path(folder, "kvpool", "config.toml")
    return usual if usual.is_absolute() and usual.is_file() else None


def _from_file(path: Path | None) -> Iterator[tuple[str, Any, str]]:
    if path is None:
        return
    source = f"file {path}"
    try:
        with path.open("rb") as stream:
            content = tomllib.load(stream)
    except OSError as error:
        raise ArgumentError(f"settings: cannot read {source}: {error.strerror}", source=source) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ArgumentError(f"settings: {source} is not TOML: {error}", source=source) from error
    for name, value in content.items():
        _known(name, source)
        yield name, value, source


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, Any, str]]:
    fields = {name.upper(): name for name in FIELDS}
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == FILE_VARIABLE or text == "":
            continue
        source = f"environment {variable}"
        suffix = variable.removeprefix(ENVIRONMENT_PREFIX)
        if suffix in fields:
            yield fields[suffix], _parsed(fields[suffix], text, source), source
            continue
        # Not every unknown variable is ours: Kubernetes gives each pod KVPOOL_PORT and more when a service is called
        # kvpool. One that looks like a setting misspelt is an error.
        meant = difflib.get_close_matches(suffix, (*fields, "CONFIG"), n=1, cutoff=0.75)
        if meant:
            raise ArgumentError(
                f"settings: {source} is unknown; did you mean {ENVIRONMENT_PREFIX}{meant[0]}?", source=source
            )


def _from_arguments(arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    for name, value in arguments.items():
        _known(name, "argument")
        if value is not None:
            yield name, value, "argument"


def _known(name: str, source: str) -> None:
    if name not in FIELDS:
        meant = difflib.get_close_matches(name, FIELDS, n=1)
        hint = f"did you mean {meant[0]}?" if meant else f"the settings are {', '.join(FIELDS)}"
        raise ArgumentError(f"settings: {source}: {name!r} is unknown; {hint}", source=source)


def _parsed(name: str, text: str, source: str) -> Any:
    """The text of an environment variable as the type of the field."""
    kind = FIELDS[name]
    if kind is bool:
        if text.lower() not in _WORDS:
            raise ArgumentError(f"settings: {source} is {text!r}; it must be one of {', '.join(_WORDS)}", source=source)
        return _WORDS[text.lower()]
    if kind is int:
        try:
            return int(text)
        except ValueError:
            raise ArgumentError(f"settings: {source} is {text!r}; it must be a whole number", source=source) from None
    return text


def _checked(name: str, value: object, source: str) -> Any:
    """The value, if the field can have it."""
    kind = FIELDS[name]
    where = f"settings: {source}: {name}"
    if get_origin(kind) is Literal:
        if not isinstance(value, str):
            raise _wrong_type(where, "a str", value, source)
        if value not in get_args(kind):
            raise ArgumentError(f"{where} is {value!r}; it must be one of {', '.join(get_args(kind))}", source=source)
        return value
    if kind is bool:
        if not isinstance(value, bool):
            raise _wrong_type(where, "a bool", value, source)
        return value
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise _wrong_type(where, "an int", value, source)
    number = operator.index(cast(Any, value))
    low, high = _RANGES[name]
    if not low <= number <= high:
        raise ArgumentError(f"{where} is {number}; it must be from {low} to {high}", value=number, source=source)
    return number


def _wrong_type(where: str, wanted: str, value: object, source: str) -> ArgumentTypeError:
    return ArgumentTypeError(f"{where} must be {wanted}, not {type(value).__name__} ({value!r})", source=source)


def describe(loaded: Loaded) -> list[dict[str, Any]]:
    """One record per setting, in their order: name, value and source."""
    values = dataclasses.asdict(loaded.settings)
    return [{"name": name, "value": values[name], "source": loaded.sources[name]} for name in FIELDS]
