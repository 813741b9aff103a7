"""The URL of a cluster and its options, checked."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, Literal

from kvpool.errors import ArgumentError, ArgumentTypeError

__all__ = ["ClusterUrl", "parse_cluster_url"]

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PREFIX: Final = re.compile(r"[A-Za-z0-9._-]{1,64}(/[A-Za-z0-9._-]{1,64}){0,7}")
_HOST: Final = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:(?P<port>[0-9]{1,5}))?")
_PORT: Final = 2379
_TIMES: Final = {"lease": (0.05, 3600.0), "heartbeat": (0.01, 1800.0), "timeout": (0.0, 3600.0)}


@dataclass(frozen=True)
class ClusterUrl:
    """The address of a cluster, and the credentials and times of a process that joins it.

    Attributes:
        kind: "local" or "etcd".
        name: The name of a local cluster, or the prefix of the keys in etcd.
        hosts: The etcd endpoints, as (host, port).
        tls: Whether to use TLS.
        tls_ca: File of the CA certificates that etcd's certificate must be signed by; None: the system's.
        tls_cert: File of the client certificate.
        tls_key: File of its key.
        user: User name for etcd.
        password: Password of that user.
        lease_s: Seconds after which a silent member is lost.
        heartbeat_s: Seconds between two heartbeats of a member.
    """

    kind: Literal["local", "etcd"]
    name: str
    hosts: tuple[tuple[str, int], ...] = ()
    tls: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    lease_s: float = 3.0
    heartbeat_s: float = 1.0

    def __str__(self) -> str:
        """The URL, without user and password."""
        if self.kind == "local":
            return f"local://{self.name}"
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.hosts)
        return f"etcd{'s' if self.tls else ''}://{hosts}/{self.name}"


def parse_cluster_url(url: str, *, lease: float, heartbeat: float | None, **options: str | None) -> ClusterUrl:
    """Checks the arguments of `Cluster.join`. `options` are the fields of `ClusterUrl` for etcd only.

    Raises:
        ArgumentError: An invalid URL, an option that does not apply to it, or a value out of range.
        ArgumentTypeError: A value of the wrong type.
    """
    texts: dict[str, object] = {"url": url, **options}
    for name, value in texts.items():
        if not isinstance(value, str) and not (value is None and name != "url"):
            raise ArgumentTypeError(f"cluster: {name} must be a str, not {type(value).__name__}")
    lease_s = check_seconds("lease", lease)
    heartbeat_s = lease_s / 3 if heartbeat is None else check_seconds("heartbeat", heartbeat)
    if heartbeat_s > lease_s / 2:
        raise ArgumentError(f"cluster: heartbeat is {heartbeat_s} s; it must be at most half of the lease, {lease_s} s")
    scheme, separator, rest = url.partition("://")
    if separator and scheme == "local":
        return _local(rest, {name for name, value in options.items() if value is not None}, lease_s, heartbeat_s)
    if separator and scheme in ("etcd", "etcds"):
        _check_etcd_options(scheme, options)
        hosts, prefix = _etcd(rest)
        return ClusterUrl("etcd", prefix, hosts, scheme == "etcds", **options, lease_s=lease_s, heartbeat_s=heartbeat_s)
    raise ArgumentError(
        f"cluster: {_shown(url)!r} is neither local://NAME nor etcd://HOST:PORT/PREFIX (etcds:// for TLS)"
    )


def check_seconds(name: str, value: object) -> float:
    """Checks a time argument and returns it in seconds.

    Raises:
        ArgumentError: It is out of range.
        ArgumentTypeError: It is not a number.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(f"cluster: {name} must be a number, not {type(value).__name__}")
    low, high = _TIMES[name]
    if not low <= value <= high:
        raise ArgumentError(f"cluster: {name} is {value}; it must be from {low} to {high} seconds")
    return float(value)


def _local(name: str, options: set[str], lease_s: float, heartbeat_s: float) -> ClusterUrl:
    if not _NAME.fullmatch(name):
        raise ArgumentError(f"cluster: local://{name}: a name must have 1 to 64 letters, digits, '.', '_' and '-'")
    if options:
        raise ArgumentError(f"cluster: {', '.join(sorted(options))}: only for etcd")
    return ClusterUrl("local", name, lease_s=lease_s, heartbeat_s=heartbeat_s)


def _etcd(rest: str) -> tuple[tuple[tuple[str, int], ...], str]:
    if "@" in rest:
        raise ArgumentError("cluster: put no user or password into the URL, which is logged; use user= and password=")
    listed, _, prefix = rest.partition("/")
    hosts = []
    for part in listed.split(","):
        found = _HOST.fullmatch(part)
        port = int(found["port"] or _PORT) if found else 0
        if found is None or not 1 <= port <= 65535:
            raise ArgumentError(f"cluster: etcd://{rest}: {part!r} is not HOST:PORT")
        hosts.append((found["host"].strip("[]"), port))
    prefix = prefix.strip("/") or "kvpool"
    if not _PREFIX.fullmatch(prefix):
        raise ArgumentError(
            f"cluster: etcd://{rest}: {prefix!r} is not a valid prefix of letters, digits, '.', '_', '-' and '/'"
        )
    return tuple(hosts), prefix


def _check_etcd_options(scheme: str, options: dict[str, str | None]) -> None:
    given = {name for name, value in options.items() if value is not None}
    if scheme == "etcd" and given & {"tls_ca", "tls_cert", "tls_key"}:
        raise ArgumentError("cluster: TLS options need etcds://")
    for one, other in (("tls_cert", "tls_key"), ("user", "password")):
        if (one in given) != (other in given):
            raise ArgumentError(f"cluster: give both {one} and {other}, or neither")


def _shown(url: str) -> str:
    """The URL for a message, without what may be a password."""
    return re.sub(r"//[^/]*@", "//...@", url)[:200]
