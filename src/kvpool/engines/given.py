"""What users write into an engine's configuration for kvpool: the checks that all engines share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from kvpool.config import load
from kvpool.errors import ArgumentError, ArgumentTypeError
from kvpool.peers.addresses import check_member_listens, listen_addresses

__all__ = ["GIB", "check_amount", "check_cluster", "check_known", "check_memory", "how_many"]

GIB: Final = 1 << 30

_OF_CLUSTERS = ("lease", "heartbeat", "timeout", "tls_ca", "tls_cert", "tls_key", "user")


def check_known(where: str, given: Collection[str], known: Collection[str]) -> None:
    """Raises ArgumentError for options that nobody knows. `where`: where they stand, as the text begins."""
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ArgumentError(
            f"{where} has {', '.join(unknown)}, which kvpool does not know; it knows {', '.join(known)}",
            unknown=unknown,
        )


def check_memory(where: str, given: Mapping[str, Any], count: str) -> None:
    """Checks ``dram_gib`` and the option that says the same as a count of blocks, or whatever is counted.

    Raises:
        ArgumentError: Both are given, or one is out of range.
        ArgumentTypeError: One is no number.
    """
    if "dram_gib" in given and given.get(count) is not None:
        raise ArgumentError(f"{where}: give dram_gib or {count}, not both")
    check_amount(where, "dram_gib", given.get("dram_gib", 1), (int, float))
    if given.get(count) is not None:
        check_amount(where, count, given[count], (int,))


def how_many(where: str, gib: float, bytes_each: int, what: str) -> int:
    """How many blocks, or whatever is kept, fit into so much memory.

    Args:
        where: As above.
        gib: The memory; the option ``dram_gib``.
        bytes_each: Of one block.
        what: What it is, for the error, such as "a block of this model".

    Raises:
        ArgumentError: Not even one fits.
    """
    count = int(gib * GIB) // bytes_each
    if not count:
        raise ArgumentError(
            f"{where}: dram_gib is {gib}, and {what} has {bytes_each} bytes: not even one fits", bytes_each=bytes_each
        )
    return count


def check_amount(where: str, name: str, value: Any, types: tuple[type, ...]) -> None:
    """Raises ArgumentTypeError for what is no number of these types, ArgumentError for one out of range."""
    if isinstance(value, bool) or not isinstance(value, types):
        raise ArgumentTypeError(f"{where}: {name} must be a number, not {type(value).__name__}")
    number: Any = value
    if not 0 < number < 1 << 40:  # not NaN either
        raise ArgumentError(f"{where}: {name} is {value}; it must be above 0", value=value)


def check_cluster(where: str, given: Mapping[str, Any], of_members: Collection[str]) -> None:
    """Checks ``name``, ``cluster``, ``cluster_options``, ``listen``, and that what is for members has ``cluster``.

    Args:
        where: As above.
        given: All that the user has set.
        of_members: The options that only a member of a cluster needs.

    Raises:
        ArgumentError: One of them stands there without ``cluster``; or an option of the cluster is unknown; or a
            member cannot listen at an address, or others cannot connect to it.
        ArgumentTypeError: One has the wrong type.
    """
    for name in ("name", "cluster"):
        if not isinstance(given.get(name), str | None):
            raise ArgumentTypeError(f"{where}: {name} must be a text")
    options = given.get("cluster_options", {})
    if not isinstance(options, Mapping):
        raise ArgumentTypeError(f"{where}: cluster_options must be an object")
    strange = sorted(set(options) - set(_OF_CLUSTERS))
    if strange:
        raise ArgumentError(
            f"{where}: cluster_options has {', '.join(map(str, strange))}; it may have {', '.join(_OF_CLUSTERS)} (the "
            "password is KVPOOL_ETCD_PASSWORD)",
            unknown=strange,
        )
    alone = [name for name in of_members if name in given]
    if alone and not given.get("cluster"):
        verb = "is" if len(alone) == 1 else "are"
        raise ArgumentError(f"{where}: {', '.join(alone)} {verb} for a member of a cluster: give cluster, too")
    _check_listen(where, given.get("cluster"), given.get("listen"))


def _check_listen(where: str, cluster: str | None, listen: Any) -> None:
    """The checks of `Pool.attach`, which comes later and perhaps in another process, with the same settings."""
    if listen is None:
        return
    has_secret = (cluster or "").startswith("local:") or bool(load().secret)
    try:
        for address in listen_addresses(listen):
            check_member_listens(address, has_secret)
    except (ArgumentError, ArgumentTypeError) as error:
        raise type(error)(f"{where}: {error}", **error.fields) from None
