"""The settings of a router: instances, policy, limits, deadlines. Checked when made; immutable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from re import fullmatch, sub
from typing import Final, get_args
from urllib.parse import urlsplit

from kvpool.cluster import Role
from kvpool.cluster.event_endpoints import check_event_endpoint
from kvpool.control.reading.prompts import INLINE_BYTES
from kvpool.control.router.budget import STREAM_BYTES, Budget
from kvpool.errors import ArgumentError
from kvpool.policy.routing import Balance, KeepHits, LeastLoad, LongestPrefix, Policy, QueuePlusExec, SessionId

__all__ = ["POLICIES", "ClusterSettings", "EventsSpec", "HealthSettings", "InstanceSpec", "RouterSettings"]

POLICIES: Final[Mapping[str, Callable[[], Policy]]] = {
    "keep-hits": KeepHits,
    "queue-plus-exec": QueuePlusExec,
    "longest-prefix": LongestPrefix,
    "session-id": SessionId,
    "least-load": LeastLoad,
}


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if not (value > 0 and isfinite(value)):
            raise ArgumentError(f"{name} is {value}; it must be above 0")


@dataclass(frozen=True)
class EventsSpec:
    """Where an instance publishes its KV events.

    Attributes:
        endpoint: Of its publisher, to connect to: tcp://10.0.0.1:5557, ipc:///path.
        replay: Where it repeats what was missed; None: nowhere.
    """

    endpoint: str
    replay: str | None = None

    def __post_init__(self) -> None:
        for each in (self.endpoint, self.replay):
            if each is not None:
                check_event_endpoint(each)

    def of_rank(self, rank: int) -> EventsSpec:
        """Where a data-parallel rank publishes if rank 0 does so here: at a port that is higher by the rank.

        Raises:
            ArgumentError: An endpoint has no port, or none that is so much higher.
        """
        return EventsSpec(_of_rank(self.endpoint, rank), None if self.replay is None else _of_rank(self.replay, rank))


@dataclass(frozen=True)
class InstanceSpec:
    """An instance as the operator names it.

    Attributes:
        name: In metrics, logs and headers: letters, digits and `._:-`, at most 64 of them.
        url: http:// or https://, a host, and a path before `/v1` where there is one.
        role: "prefill" computes prompts for those that "decode"; "both" answers alone.
        rank: The data-parallel rank of the server at `url` that it is; None: the server chooses one.
        events: Where it publishes its KV events, unless the settings say so by its name; None: nowhere.
    """

    name: str
    url: str
    role: Role = "both"
    rank: int | None = None
    events: EventsSpec | None = None

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            port = parts.port
        except ValueError as error:
            raise ArgumentError(f"instance {self.url!r}: {error}") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ArgumentError(f"instance {self.url!r}: it must look like http://127.0.0.1:8001")
        if parts.query or parts.fragment or parts.username or parts.password:
            raise ArgumentError(f"instance {self.name}: a URL with a query, a fragment or a password is refused")
        if not fullmatch(r"[A-Za-z0-9._:-]{1,64}", self.name):
            raise ArgumentError(f"instance name {self.name!r}: letters, digits and ._:- only, at most 64")
        if self.role not in get_args(Role):
            raise ArgumentError(f"instance {self.name}: role {self.role!r}; there are {', '.join(get_args(Role))}")
        if self.rank is not None and (type(self.rank) is not int or self.rank < 0):
            raise ArgumentError(f"instance {self.name}: rank {self.rank!r} must be a number from 0 on")

    @property
    def place(self) -> str:
        """Its URL and rank: no two instances have the same."""
        return self.url if self.rank is None else f"{self.url} (rank {self.rank})"

    @classmethod
    def parse(cls, text: str, role: Role = "both") -> InstanceSpec:
        """From `URL` or `NAME=URL`; the name is host:port where none is given. Raises ArgumentError."""
        name, equals, url = text.strip().partition("=")
        if not equals:
            name, url = "", text.strip()
        url = url.rstrip("/")
        return cls(name or sub(r"[^A-Za-z0-9._:-]", "", urlsplit(url).netloc) or "?", url, role)


def _of_rank(endpoint: str, rank: int) -> str:
    if rank and not endpoint.startswith("tcp://"):
        raise ArgumentError(f"KV events of rank {rank}: {endpoint} has no port that the rank could be added to")
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}" if rank else endpoint


@dataclass(frozen=True)
class HealthSettings:
    """When an instance is out, and when it is back.

    Attributes:
        path: Asked by GET; 2xx is well.
        interval_s: Between two probes of an instance; 0 for none: then errors of requests alone decide.
        timeout_s: Of a probe.
        fails: Probes in a row that must fail before the instance is out.
        passes: Probes in a row that must pass before it is on trial, and again before it is in without a request.
        errors: Requests in a row that must fail to be answered before it is out.
        backoff_s: How long it is out at least; doubled each time that it fails on trial.
        backoff_max_s: The most that this grows to.
    """

    path: str = "/health"
    interval_s: float = 5.0
    timeout_s: float = 2.0
    fails: int = 2
    passes: int = 2
    errors: int = 3
    backoff_s: float = 1.0
    backoff_max_s: float = 30.0

    def __post_init__(self) -> None:
        _positive(self, "timeout_s", "fails", "passes", "errors", "backoff_s", "backoff_max_s")
        if not (self.interval_s >= 0 and isfinite(self.interval_s)):
            raise ArgumentError(f"interval_s is {self.interval_s}; it must be at least 0")
        if not self.path.startswith("/"):
            raise ArgumentError(f"health path {self.path!r} must begin with /")

    @property
    def probes(self) -> bool:
        """Whether instances are asked at all."""
        return self.interval_s > 0


@dataclass(frozen=True)
class ClusterSettings:
    """A cluster whose members become instances.

    Attributes:
        url: As for Cluster.join: "local://NAME" or "etcd://HOST:PORT/PREFIX".
        tls_ca: File of the CA certificates for etcd's certificate; None: the system's.
        tls_cert: File of the client certificate; None if etcd wants none.
        tls_key: File of its key.
        user: User name for etcd.
        password: Of that user.
    """

    url: str
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    user: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class RouterSettings:
    """All of it. Times are seconds of the monotonic clock.

    Attributes:
        instances: To begin with; the operator may add and remove some later.
        cluster: Whose members that publish a URL become instances, too; None for no cluster.
        policy: One of POLICIES.
        host: Where the public listener binds; loopback unless asked.
        port: Its port; 0 takes a free one.
        tls_cert: File of its certificate, and of those that lead to a known one (PEM); None for HTTP without TLS.
        tls_key: File of the key to it, without a password.
        api_key: That clients name as `Authorization: Bearer ...`; None for no such thing.
        instance_key: That instances are sent in the same way, in place of what the client sent; None for none.
        admin_port: Of the operator's listener, always on 127.0.0.1; None for no such listener.
        admin_key: That the operator names as `Authorization: Bearer ...`; None for one that `serve` makes.
        profile: A file that `kvpool.control.save_profile` wrote, for the cost model; None for the default one.
        tokenizer: A tokenizer.json of Hugging Face; None for four bytes a token.
        tokenize: The path at which instances are asked for the tokens of prompts; None: they are not asked.
        tokenize_timeout_s: For an instance to tell them, for each 64 KiB of a request's body.
        tokenize_bytes_max: Of a request's body; of a longer one nobody is asked for tokens.
        events: Where instances publish KV events, by the instances' names.
        events_blocks_max: Blocks that are known of an instance by its events; beyond it the oldest are dropped.
        block_tokens: Tokens of a block in the prompt tree: as many as the instances' blocks have, if their events are
            followed. None: those of the profile, or 16.
        health: When an instance is out.
        retries: Further instances that are tried when one fails before its first byte.
        in_flight_max: Requests that one instance may have, and connections to it; when all have as many, clients get
            503.
        requests_max: That the router has at a time; beyond it clients get 503.
        connections_max: Connections of clients at a time; more get 503, and beyond twice as many no answer at all.
        head_bytes_max: Of a request's line and headers.
        head_timeout_s: For a client to send these, from connecting or from their first byte.
        parse_bytes_max: Of a request's body that is held and read, to route it by its prompt. A longer one passes as a
            stream and is routed by load.
        body_bytes_max: Of a request; beyond it clients get 413.
        prompt_bytes_max: Of a prompt that are read to route by; what follows makes no difference.
        readers: Processes that read bodies of more than 64 KiB.
        reader_wait_s: For one of them to be free; then a request is routed by load.
        held_bytes_max: Of all requests that the router has at a time, three quarters of them for bodies of more than
            64 KiB: these wait until there is room, others get 503.
        connect_timeout_s: To an instance.
        body_timeout_s: For a client to send its request.
        first_byte_timeout_s: From sending a request to the first byte of its answer's body.
        stall_timeout_s: Between two pieces of an answer, and for a client to take one.
        deadline_s: For a request, retries and all.
        shutdown_timeout_s: How long running requests may go on after SIGTERM.
        ttl_s: How long a prompt is believed to be cached where it went.
        cap: Load cap, times the mean (`Balance.cap`).
        idle: Utilisation below which there is no load cap (`Balance.idle`).
        warmup_s: How long a newcomer has less than its share (`Balance.warmup_s`).
        tree_blocks_max: Blocks that the prompt tree may have; beyond it the longest unused are forgotten.
    """

    instances: tuple[InstanceSpec, ...]
    cluster: ClusterSettings | None = None
    policy: str = "keep-hits"
    host: str = "127.0.0.1"
    port: int = 8000
    tls_cert: Path | None = None
    tls_key: Path | None = None
    api_key: str | None = field(default=None, repr=False)
    instance_key: str | None = field(default=None, repr=False)
    admin_port: int | None = None
    admin_key: str | None = field(default=None, repr=False)
    profile: Path | None = None
    tokenizer: Path | None = None
    tokenize: str | None = None
    tokenize_timeout_s: float = 0.5
    tokenize_bytes_max: int = 256 << 10
    events: Mapping[str, EventsSpec] = field(default_factory=dict)
    events_blocks_max: int = 1 << 18
    block_tokens: int | None = None
    health: HealthSettings = field(default_factory=HealthSettings)
    retries: int = 2
    in_flight_max: int = 256
    requests_max: int = 4096
    connections_max: int = 8192
    head_bytes_max: int = 32 << 10
    head_timeout_s: float = 10.0
    parse_bytes_max: int = 4 << 20
    body_bytes_max: int = 64 << 20
    prompt_bytes_max: int = 1 << 20
    readers: int = 1
    reader_wait_s: float = 2.0
    held_bytes_max: int = 64 << 20
    connect_timeout_s: float = 2.0
    body_timeout_s: float = 30.0
    first_byte_timeout_s: float = 600.0
    stall_timeout_s: float = 120.0
    deadline_s: float = 3600.0
    shutdown_timeout_s: float = 30.0
    ttl_s: float = 300.0
    cap: float = Balance.cap
    idle: float = Balance.idle
    warmup_s: float = 60.0
    tree_blocks_max: int = 1 << 20

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ArgumentError(f"policy {self.policy!r}; there are {', '.join(POLICIES)}")
        for seen in ("name", "place"):
            values = [getattr(spec, seen) for spec in self.instances]
            if twice := sorted({value for value in values if values.count(value) > 1}):
                raise ArgumentError(f"instances: {', '.join(twice)} is there twice")
        self._check_cached()
        roles = {spec.role for spec in self.instances}
        if self.cluster is None and len(roles & {"prefill", "decode"}) == 1:
            raise ArgumentError(f"instances that only {(roles - {'both'}).pop()}, and none for the other half")
        for name, port in (("port", self.port), ("admin_port", self.admin_port)):
            if port is not None and not 0 <= port < 1 << 16:
                raise ArgumentError(f"{name} is {port}; it must be from 0 to 65535")
        if self.port and self.port == self.admin_port:
            raise ArgumentError(f"port and admin_port are both {self.port}")
        if self.retries < 0 or not self.warmup_s >= 0:
            raise ArgumentError(f"retries {self.retries} and warmup_s {self.warmup_s} must be at least 0")
        if self.body_bytes_max < self.parse_bytes_max:
            raise ArgumentError(
                f"body_bytes_max is {self.body_bytes_max}, less than parse_bytes_max, {self.parse_bytes_max}"
            )
        needed, most = self.body_bytes_max, self.held_bytes_max
        if needed > INLINE_BYTES:  # some are large: held, or streamed
            needed, most = max(self.parse_bytes_max, STREAM_BYTES), Budget.for_large(most)
        if most < needed:
            raise ArgumentError(
                f"held_bytes_max is {self.held_bytes_max}, which leaves {most} for bodies; one may need {needed}"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ArgumentError("tls_cert and tls_key go together, and one of them is not there")
        for name in ("api_key", "instance_key", "admin_key"):
            key = getattr(self, name)
            if key is not None and not fullmatch(r"[\x21-\x7e]{1,1024}", key):
                raise ArgumentError(f"{name}: 1 to 1024 characters of ASCII without spaces")
        _positive(self, "requests_max", "connections_max", "head_bytes_max", "head_timeout_s")
        _positive(self, "parse_bytes_max", "prompt_bytes_max", "readers", "reader_wait_s")
        _positive(self, "in_flight_max", "body_bytes_max", "connect_timeout_s", "body_timeout_s", "stall_timeout_s")
        _positive(self, "first_byte_timeout_s", "deadline_s", "shutdown_timeout_s", "ttl_s", "tree_blocks_max")

    def _check_cached(self) -> None:
        """What says how prompts are matched with what instances have cached."""
        unknown = set(self.events) - {spec.name for spec in self.instances}
        if unknown and self.cluster is None and self.admin_port is None:  # with either, others may come
            raise ArgumentError(f"events of {', '.join(sorted(unknown))}: no such instance")
        named = [each for spec in self.events.values() for each in (spec.endpoint, spec.replay) if each is not None]
        if twice := sorted({each for each in named if named.count(each) > 1}):
            raise ArgumentError(f"events: {', '.join(twice)} is there twice, and tells of one instance")
        if self.tokenize is not None and not fullmatch(r"/[!-~]*", self.tokenize):
            raise ArgumentError(f"tokenize path {self.tokenize!r} must begin with /")
        if self.block_tokens is not None and not 0 < self.block_tokens <= 1 << 16:
            raise ArgumentError(f"block_tokens is {self.block_tokens}; it must be from 1 to {1 << 16}")
        _positive(self, "tokenize_timeout_s", "tokenize_bytes_max", "events_blocks_max")
