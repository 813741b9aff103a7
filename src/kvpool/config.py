"""The settings of a pool: one typed record, filled from a TOML file, the environment and arguments.

    default < file < environment < argument

The file is the one that `KVPOOL_CONFIG` names, or else `$XDG_CONFIG_HOME/kvpool/config.toml` (`~/.config/...`) if it
exists. Its keys are the names of the fields of `Settings`. In the environment a field `copy_threads` is
`KVPOOL_COPY_THREADS`; an empty variable counts as unset. `kvpool info` shows each value and where it came from.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args, get_origin, get_type_hints

from kvpool.arguments import int_from, shown
from kvpool.errors import ArgumentError, ArgumentTypeError
from kvpool.types import Policy, Route

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Loaded", "Settings", "load", "load_with_sources"]

ENVIRONMENT_PREFIX: Final = "KVPOOL_"
FILE_VARIABLE: Final = "KVPOOL_CONFIG"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a pool, besides its layout and its sizes.

    Attributes:
        policy: Which unused blocks are evicted first: "lru" the least recently used, "lfu" the least often used, "fifo"
            the oldest.
        copy_threads: Threads that share a copy of more than 1 MiB, the caller among them: from 1 to
            256.
        attend_threads: Threads that share the work of one `Pool.attend`, up to 256; 0: as many as the processors that
            the process may use.
        huge_pages: "auto" uses huge pages if the machine has them, "never" does not ask, "require" fails without.
        numa_node: The NUMA node of owned memory; -1: the kernel chooses.
        check_memory: Refuse an arena for which the machine or its cgroup has too little memory, instead of being killed
            later.
        pin_dram: Page-lock DRAM for CUDA: "auto" when the device is a GPU, "never", or "always" (fail without
            a driver).
        device_memory: How a pool on a GPU allocates its memory. "virtual": by cuMemCreate, so that peers get it as a
            file descriptor; "plain": by cuMemAlloc, for libraries that support only that (UCX before 1.22); "auto":
            virtual if the GPU supports it.
        audit: Check every invariant after every call. Slow; for finding bugs.
        zero_on_alloc: alloc fills blocks with zeros, so that no owner sees content of an earlier one; adopt does not.
        name: The pool's name, unique among its peers; "" makes one of host, process and a random number.
        secret: The secret that peers must prove to know. Required for TCP; without it a Unix socket admits processes of
            the same user. Never shown. A pool of a cluster uses the cluster's.
        model: A fingerprint of the model whose cache this is; peers with a different one are refused.
        routes: The routes by which blocks may travel: of "loopback", "shm", "cuda_ipc", "cma", "sock", "ucx" and
            "nccl". Empty: all but "cma", which gives peers access to all memory of this process, not only the blocks,
            and "ucx" and "nccl", which take time to start; "nccl" is only for HBM on a GPU. Separated by commas in the
            environment.
        timeout_s: Seconds that a verb waits if it is called without a `timeout`, or with None. Waiting for a transfer
            ends with the transfer's own deadline instead.
        lease_s: Seconds after which a silent peer is lost.
        reserve_max_s: The longest time, in seconds, for which blocks are reserved for a peer's transfer, or held for
            its match. They are taken back at the peer's own deadline or after this time, whichever is earlier, and when
            the peer is lost.
        transfer_threads: Threads for large writes, which serve the peers in turn.
        trusted_network: Frames on TCP carry a checksum instead of a message authentication code, if the peer sets this
            as well. For networks on which no other party can send or change packets; not for the loopback of a
            machine with other users.
        prefer_unix_socket: A peer on this host that was addressed by TCP is connected over a Unix socket instead, so
            that memory can be shared. If that socket refuses the connection, connect fails. False on either side
            keeps the connection on TCP.
        measure_routes: `connect` measures the routes between two pools, for at most about 50 ms, if it is unclear which
            is fastest: from or to a GPU, and with "cma" or "ucx". This uses a few free blocks of both pools. False: the
            choice begins with guesses, which transfers correct.
        ucx: Which UCX to use: "wheel" (of the extra kvpool[ucx]), "system", or a path: libucp.so.0, or its folder.
        nccl: Which NCCL to use: "wheel" (of the extra kvpool[nccl12] or kvpool[nccl13]), "system", or a path:
            libnccl.so.2, or its folder.
        nccl_pass_bytes: How much "nccl" sends at a time, from 1 MiB to 256 MiB. Both sides allocate that much of their
            GPU's memory for a direction, when it is first used.
        nccl_init_s: Seconds that NCCL has for connecting two GPUs; then the route has failed, and others are used.
        nccl_thread_blocks: Thread blocks of the GPU that a transfer by "nccl" may take from the model; 0: NCCL decides.
        transfers_max: The most transfers of one peer in progress; above it the peer gets Busy.
        reserved_max: The most blocks reserved for and lent to one peer together; above it the peer gets Busy.
        lend_max: The most blocks lent to all peers together, of all media; above it peers get Busy. -1: no limit.
            `Pool.peers.lend_max` changes it while the pool is in use.
        viewed_max: The most blocks of this pool that one peer views for attention, and the most that it holds by
            matches; above either the peer gets Busy.
        received_max: The most items that wait for the application (`Pool.inbox`); above it peers get Busy. A sixteenth
            of it, at least one, is reserved for each peer.
        disk_admission: Which cached blocks a pool with `disk_blocks` writes to disk: "second-use" what was used twice,
            "always" everything.
        disk_bytes_s: The most bytes a second that it writes to disk, on average; 0: no limit.
        disk_bytes_day: The most bytes a day that it writes to disk; 0: no limit. A restarted process begins a day.
        disk_hang_s: Seconds after which a drive that does not answer is taken for broken, and the disk is switched off.
        attend_lent_max: The most attention calls of peers that run or wait in this pool; above it peers get Busy. 0: it
            computes none for peers.
    """

    policy: Policy = "lru"
    copy_threads: int = 2
    attend_threads: int = 0
    huge_pages: Literal["auto", "never", "require"] = "auto"
    numa_node: int = -1
    check_memory: bool = True
    pin_dram: Literal["auto", "never", "always"] = "auto"
    device_memory: Literal["auto", "virtual", "plain"] = "auto"
    audit: bool = False
    zero_on_alloc: bool = False
    name: str = ""
    secret: str = field(default="", repr=False)
    model: str = ""
    routes: tuple[Route, ...] = ()
    timeout_s: float = 30.0
    lease_s: float = 3.0
    reserve_max_s: float = 600.0
    transfer_threads: int = 2
    trusted_network: bool = False
    prefer_unix_socket: bool = True
    measure_routes: bool = True
    ucx: str = "wheel"
    nccl: str = "wheel"
    nccl_pass_bytes: int = 16 << 20
    nccl_init_s: float = 10.0
    nccl_thread_blocks: int = 0
    transfers_max: int = 4096
    reserved_max: int = 1 << 20
    lend_max: int = -1
    viewed_max: int = 1 << 22
    received_max: int = 65536
    disk_admission: Literal["second-use", "always"] = "second-use"
    disk_bytes_s: int = 0
    disk_bytes_day: int = 0
    disk_hang_s: float = 10.0
    attend_lent_max: int = 64

    def __post_init__(self) -> None:
        """Checks every value.

        Raises:
            ArgumentError: A value is out of range.
            ArgumentTypeError: A value has the wrong type.
        """
        for name in FIELDS:
            object.__setattr__(self, name, _checked(name, getattr(self, name), "argument"))


FIELDS: Final[dict[str, Any]] = get_type_hints(Settings)
_RANGES: Final[dict[str, tuple[float, float]]] = {
    "copy_threads": (1, 256),
    "attend_threads": (0, 256),
    "numa_node": (-1, 1023),
    "timeout_s": (0.001, 86400.0),
    "lease_s": (0.05, 3600.0),
    "reserve_max_s": (0.05, 86400.0),
    "transfer_threads": (1, 256),
    "nccl_pass_bytes": (1 << 20, 256 << 20),
    "nccl_init_s": (0.05, 600.0),
    "nccl_thread_blocks": (0, 64),
    "transfers_max": (1, 1 << 20),
    "reserved_max": (1, 1 << 26),
    "lend_max": (-1, 1 << 40),
    "viewed_max": (1, 1 << 26),
    "received_max": (1, 1 << 24),
    "disk_bytes_s": (0, 1 << 50),
    "disk_bytes_day": (0, 1 << 60),
    "disk_hang_s": (0.05, 600.0),
    "attend_lent_max": (0, 1 << 16),
}
_BYTES_MAX: Final = {"name": 255, "secret": 4096, "model": 255, "ucx": 4096, "nccl": 4096}
ROUTES: Final = get_args(Route)
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
    """Settings, and the source of each: "default", "file ...", "environment ..." or "argument"."""

    settings: Settings
    sources: dict[str, str]
    file: Path | None


def load(*, environment: Mapping[str, str] | None = None, **arguments: Any) -> Settings:
    """Returns the settings: defaults, overridden by the file, the environment and the arguments, in this order.

    Args:
        environment: Replaces the environment of the process.
        **arguments: Values of fields. None counts as not given.

    Raises:
        ArgumentError: An unknown name, a value out of range, or a file that cannot be read; it names the place.
        ArgumentTypeError: A value of the wrong type.
    """
    return load_with_sources(environment=environment, **arguments).settings


def load_with_sources(*, environment: Mapping[str, str] | None = None, **arguments: Any) -> Loaded:
    """Like `load`, but also returns the source of each value and the file that was read."""
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


def check_names(names: Iterable[str], callee: Callable[..., Any]) -> None:
    """Checks the names of settings in a call; an unknown one may be a misspelt argument of the call.

    Args:
        names: The given names.
        callee: The called function, which takes settings besides its own arguments.

    Raises:
        ArgumentError: A name is no setting; it names similar settings or arguments, or all settings.
    """
    for name in names:
        if name not in FIELDS:
            found = inspect.signature(callee).parameters.values()
            own = [each.name for each in found if each.kind is not each.VAR_KEYWORD and each.name != "self"]
            _known(name, "argument", own)


def _known(name: str, source: str, own: Sequence[str] = ()) -> None:
    """Raises ArgumentError unless it is a setting; `own` are other names that the caller may have meant."""
    if name not in FIELDS:
        meant = difflib.get_close_matches(name, [*own, *FIELDS], n=1)
        arguments = f"the arguments are {', '.join(own)}; " if own else ""
        hint = f"did you mean {meant[0]}?" if meant else f"{arguments}the settings are {', '.join(FIELDS)}"
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
    if kind is float:
        try:
            return float(text)
        except ValueError:
            raise ArgumentError(f"settings: {source} is {text!r}; it must be a number", source=source) from None
    if get_origin(kind) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text


def _checked(name: str, value: object, source: str) -> Any:
    """The value, if the field can have it."""
    kind = FIELDS[name]
    where = f"settings: {source}: {name}"
    if get_origin(kind) is Literal:
        if not isinstance(value, str):
            raise _wrong_type(where, "a str", value, source)
        if value not in get_args(kind):
            raise ArgumentError(
                f"{where} is {shown(value)}; it must be one of {', '.join(get_args(kind))}", source=source
            )
        return value
    if kind is bool:
        if not isinstance(value, bool):
            raise _wrong_type(where, "a bool", value, source)
        return value
    if kind is str:
        return _checked_text(name, value, where, source)
    if get_origin(kind) is tuple:
        return _checked_routes(value, where, source)
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _wrong_type(where, "a number", value, source)
        number: float = value  # a huge int is no float
    else:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise _wrong_type(where, "an int", value, source)
        number = int_from(value, where)
    low, high = _RANGES[name]
    if not low <= number <= high:
        raise ArgumentError(f"{where} is {shown(number)}; it must be from {low} to {high}", value=number, source=source)
    return float(number) if kind is float else number


def _checked_text(name: str, value: object, where: str, source: str) -> str:
    if not isinstance(value, str):
        # A secret of the wrong type is a secret all the same.
        raise _wrong_type(where, "a str", "..." if name == "secret" else value, source, type(value).__name__)
    length = len(value.encode("utf-8", "surrogatepass"))
    if length > _BYTES_MAX[name] or not value.isprintable():
        raise ArgumentError(
            f"{where} must be printable text of at most {_BYTES_MAX[name]} bytes, and has {length}",
            given=length,
            maximum=_BYTES_MAX[name],
            source=source,
        )
    return value


def _checked_routes(value: object, where: str, source: str) -> tuple[str, ...]:
    if not isinstance(value, (tuple, list)) or not all(isinstance(one, str) for one in value):
        raise _wrong_type(where, "a list of str", value, source)
    for one in value:
        if one not in ROUTES:
            raise ArgumentError(f"{where} has {shown(one)}; each must be one of {', '.join(ROUTES)}", source=source)
    return tuple(dict.fromkeys(value))


def _wrong_type(where: str, wanted: str, value: object, source: str, kind: str | None = None) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"{where} must be {wanted}, not {kind or type(value).__name__} ({shown(value)})", source=source
    )


def describe(loaded: Loaded) -> list[dict[str, Any]]:
    """One record per setting, in their order: name, value and source. For a secret, only whether it is set."""
    values = dataclasses.asdict(loaded.settings)
    values["secret"] = "set" if loaded.settings.secret else "not set"
    return [{"name": name, "value": values[name], "source": loaded.sources[name]} for name in FIELDS]
