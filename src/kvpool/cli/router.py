"""`kvpool router`: HTTP in front of OpenAI-compatible instances."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from re import fullmatch
from typing import TYPE_CHECKING, Any

from kvpool.cli.options_file import Options
from kvpool.errors import ArgumentError, Unsupported

if TYPE_CHECKING:
    from kvpool.cluster import Role
    from kvpool.control.router import ClusterSettings, EventsSpec, InstanceSpec

_MIB = 1 << 20
_KIB = 1 << 10
_API_KEY = "KVPOOL_ROUTER_API_KEY"
_INSTANCE_KEY = "KVPOOL_ROUTER_INSTANCE_KEY"
_ADMIN_KEY = "KVPOOL_ROUTER_ADMIN_KEY"


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's commands."""
    parser = commands.add_parser(
        "router",
        help="route requests of OpenAI's API to instances",
        description="HTTP in front of OpenAI-compatible instances. Sends each prompt to an instance that has much of "
        "it cached and computes the rest soon, watches their health, and retries requests that fail before their first "
        "byte. Needs the extra kvpool[router].",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options = Options(parser)
    parser.set_defaults(run=partial(_run, options))
    add = options.add_to(parser)
    add("--instances", default="", metavar="URL[,URL...]", help="each URL or NAME=URL, without /v1")
    add(
        "--prefill",
        default="",
        metavar="URL[,URL...]",
        help="instances that compute prompts for those of --decode, to which they push the KV cache",
    )
    add(
        "--decode",
        default="",
        metavar="NAME=URL[,...]",
        help="instances that generate the answers; NAME is that of its pool in the cluster",
    )
    add(
        "--data-parallel",
        default="",
        metavar="NAME=RANKS[,...]",
        help="servers with several data-parallel ranks, each of which becomes an instance, NAME-dp0 and so on",
    )
    add("--policy", default="keep-hits", help="keep-hits, queue-plus-exec, longest-prefix, session-id or least-load")
    add("--host", default="127.0.0.1", help="where to listen")
    add("--port", type=int, default=8000, help="0 takes a free one")
    add(
        "--admin-port",
        type=int,
        metavar="PORT",
        help="of the operator's listener on 127.0.0.1, which wants --admin-key; none by default",
    )
    add(
        "--profile",
        type=Path,
        metavar="FILE",
        help="profile of an instance, for the cost model",
    )
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json of the model; four bytes a token without one")
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"], help="of the lines on stderr")

    cluster = parser.add_argument_group("cluster")
    add = options.add_to(cluster)
    add("--cluster", metavar="URL", help="its members that publish a URL become instances: local://NAME or etcd://...")
    add("--cluster-tls-ca", metavar="FILE", help="CA certificates for etcd's certificate")
    add("--cluster-tls-cert", metavar="FILE", help="client certificate for etcd")
    add("--cluster-tls-key", metavar="FILE", help="key to it")
    add("--cluster-user", metavar="NAME", help="user name for etcd; set the password in KVPOOL_ETCD_PASSWORD")

    security = parser.add_argument_group("security")
    add = options.add_to(security)
    add("--tls-cert", type=Path, metavar="FILE", help="certificate of the public listener, PEM; with --tls-key")
    add("--tls-key", type=Path, metavar="FILE", help="key to it, PEM without a password")
    add(
        "--api-key",
        metavar="KEY",
        help=f"clients must name it as a bearer token; {_API_KEY} is safer: ps shows options",
    )
    add("--instance-key", metavar="KEY", help=f"is sent to instances in place of the client's; or {_INSTANCE_KEY}")

    add(
        "--admin-key",
        metavar="KEY",
        help=f"the operator must name it as a bearer token; or {_ADMIN_KEY}. Without one a key is made at start, in a "
        "file that the log names",
    )

    routing = parser.add_argument_group("routing")
    add = options.add_to(routing)
    add("--cap", type=float, default=1.2, help="most load of an instance, times the mean")
    add(
        "--idle",
        type=float,
        default=0.02,
        help="share of its time that an instance works below which there is no cap",
    )
    add("--warmup", type=float, default=60.0, metavar="S", help="how long a newcomer has less than its share")
    add("--ttl", type=float, default=300.0, metavar="S", help="how long a prompt is believed to be cached")
    add(
        "--events", default="", metavar="NAME=ENDPOINT[,...]", help="where instances publish KV events: tcp://HOST:PORT"
    )
    add("--events-replay", default="", metavar="NAME=ENDPOINT[,...]", help="where they repeat what was missed")
    add(
        "--events-blocks",
        type=int,
        default=1 << 18,
        metavar="N",
        help="most blocks that are known of an instance by its events",
    )
    add(
        "--block-tokens",
        type=int,
        metavar="N",
        help="tokens of a block of the instances, whose events name blocks; those of --profile or 16 without it",
    )
    add("--tokenize", metavar="PATH", help="ask instances there for the model's tokens of prompts: /tokenize")
    add("--tokenize-timeout", type=float, default=0.5, metavar="S", help="for an instance to tell them, per 64 KiB")
    add("--tokenize-kib", type=float, default=256.0, metavar="KIB", help="longest body of which tokens are asked for")
    add("--tree-blocks", type=int, default=1 << 20, metavar="N", help="most blocks of prompts that are remembered")

    health = parser.add_argument_group("health")
    add = options.add_to(health)
    add("--health-path", default="/health", metavar="PATH", help="asked by GET; 2xx is well")
    add("--health-interval", type=float, default=5.0, metavar="S", help="between probes; 0 for none")
    add("--health-timeout", type=float, default=2.0, metavar="S", help="of a probe")
    add("--health-fails", type=int, default=2, metavar="N", help="failed probes in a row until an instance is out")
    add("--health-passes", type=int, default=2, metavar="N", help="passed ones until it is on trial, then in")
    add("--health-errors", type=int, default=3, metavar="N", help="failed requests in a row until an instance is out")
    add("--health-backoff", type=float, default=1.0, metavar="S", help="how long it is out at least")
    add("--health-backoff-max", type=float, default=30.0, metavar="S", help="after failed trials at most")

    limits = parser.add_argument_group("limits")
    add = options.add_to(limits)
    add("--in-flight", type=int, default=256, metavar="N", help="requests per instance; 503 when all are full")
    add("--requests", type=int, default=4096, metavar="N", help="that the router has at a time; 503 beyond it")
    add("--connections", type=int, default=8192, metavar="N", help="of clients; 503 beyond it")
    add("--head-kib", type=float, default=32.0, metavar="KIB", help="of a request's line and headers")
    add("--head-timeout", type=float, default=10.0, metavar="S", help="for a client to send them")
    add(
        "--parse-mib",
        type=float,
        default=4.0,
        metavar="MIB",
        help="of a body that is held and read; a longer one passes as a stream, routed by load",
    )
    add("--body-mib", type=float, default=64.0, metavar="MIB", help="of a request's body; 413 beyond it")
    add("--prompt-mib", type=float, default=1.0, metavar="MIB", help="of a prompt that are read, to route by it")
    add("--readers", type=int, default=1, metavar="N", help="processes that read bodies of more than 64 KiB")
    add("--reader-wait", type=float, default=2.0, metavar="S", help="for one of them; then a request is routed by load")
    add(
        "--held-mib",
        type=float,
        default=64.0,
        metavar="MIB",
        help="of all requests at a time; large bodies wait for room, others get 503",
    )
    add("--retries", type=int, default=2, metavar="N", help="other instances that are tried before the first byte")
    add("--connect-timeout", type=float, default=2.0, metavar="S", help="to an instance")
    add("--body-timeout", type=float, default=30.0, metavar="S", help="for a client to send its request")
    add("--first-byte-timeout", type=float, default=600.0, metavar="S", help="for an instance to begin its answer")
    add("--stall-timeout", type=float, default=120.0, metavar="S", help="between two pieces of an answer")
    add("--deadline", type=float, default=3600.0, metavar="S", help="of a request, retries and all")
    add("--shutdown-timeout", type=float, default=30.0, metavar="S", help="for running requests after SIGTERM")


def _key(given: str | None, variable: str) -> str | None:
    """An empty option or variable is refused later, because it does not clearly mean "no key"."""
    return given if given is not None else os.environ.get(variable)


def _specs(text: str, role: Role) -> list[InstanceSpec]:
    from kvpool.control.router import InstanceSpec

    return [InstanceSpec.parse(each, role) for each in text.split(",") if each.strip()]


def _events(endpoints: str, replays: str) -> dict[str, EventsSpec]:
    from kvpool.control.router import EventsSpec

    published, repeated = _named("--events", endpoints), _named("--events-replay", replays)
    if unknown := sorted(set(repeated) - set(published)):
        raise ArgumentError(f"--events-replay of {', '.join(unknown)}, which --events does not name")
    return {name: EventsSpec(endpoint, repeated.get(name)) for name, endpoint in published.items()}


def _named(option: str, text: str, value_name: str = "ENDPOINT") -> dict[str, str]:
    named: dict[str, str] = {}
    for each in filter(None, map(str.strip, text.split(","))):
        name, equals, value = map(str.strip, each.partition("="))
        if not (name and equals and value) or name in named:
            raise ArgumentError(f"{option} {each!r}: it must be NAME={value_name}, and each name once")
        named[name] = value
    return named


def _ranks(text: str) -> dict[str, int]:
    ranks = {}
    for name, count in _named("--data-parallel", text, "RANKS").items():
        if not fullmatch(r"[0-9]{1,9}", count):
            raise ArgumentError(f"--data-parallel '{name}={count}': it must be NAME=RANKS, where RANKS is a number")
        ranks[name] = int(count)
    return ranks


def _cluster(given: argparse.Namespace) -> ClusterSettings | None:
    from kvpool.control.router import ClusterSettings

    if given.cluster is None:
        return None
    user = given.cluster_user
    password = os.environ.get("KVPOOL_ETCD_PASSWORD") if user else None
    return ClusterSettings(
        given.cluster, given.cluster_tls_ca, given.cluster_tls_cert, given.cluster_tls_key, user, password
    )


def _run(options: Options, arguments: argparse.Namespace) -> None:
    try:
        from kvpool.control import router
        from kvpool.control.router import logs
    except ImportError as error:
        raise Unsupported(f"the router needs {error.name}: pip install 'kvpool[router]'") from error
    options.read_file(arguments)
    given = arguments
    named = (
        *_specs(given.instances, "both"),
        *_specs(given.prefill, "prefill"),
        *_specs(given.decode, "decode"),
    )
    instances, events = router.by_rank(named, _events(given.events, given.events_replay), _ranks(given.data_parallel))
    settings = router.RouterSettings(
        instances=instances,
        cluster=_cluster(given),
        policy=given.policy,
        host=given.host,
        port=given.port,
        admin_port=given.admin_port,
        tls_cert=given.tls_cert,
        tls_key=given.tls_key,
        api_key=_key(given.api_key, _API_KEY),
        instance_key=_key(given.instance_key, _INSTANCE_KEY),
        admin_key=_key(given.admin_key, _ADMIN_KEY),
        profile=given.profile,
        tokenizer=given.tokenizer,
        tokenize=given.tokenize,
        tokenize_timeout_s=given.tokenize_timeout,
        tokenize_bytes_max=int(given.tokenize_kib * _KIB),
        events=events,
        events_blocks_max=given.events_blocks,
        block_tokens=given.block_tokens,
        health=router.HealthSettings(
            path=given.health_path,
            interval_s=given.health_interval,
            timeout_s=given.health_timeout,
            fails=given.health_fails,
            passes=given.health_passes,
            errors=given.health_errors,
            backoff_s=given.health_backoff,
            backoff_max_s=given.health_backoff_max,
        ),
        retries=given.retries,
        in_flight_max=given.in_flight,
        requests_max=given.requests,
        connections_max=given.connections,
        head_bytes_max=int(given.head_kib * _KIB),
        head_timeout_s=given.head_timeout,
        parse_bytes_max=int(given.parse_mib * _MIB),
        body_bytes_max=int(given.body_mib * _MIB),
        prompt_bytes_max=int(given.prompt_mib * _MIB),
        readers=given.readers,
        reader_wait_s=given.reader_wait,
        held_bytes_max=int(given.held_mib * _MIB),
        connect_timeout_s=given.connect_timeout,
        body_timeout_s=given.body_timeout,
        first_byte_timeout_s=given.first_byte_timeout,
        stall_timeout_s=given.stall_timeout,
        deadline_s=given.deadline,
        shutdown_timeout_s=given.shutdown_timeout,
        ttl_s=given.ttl,
        cap=given.cap,
        idle=given.idle,
        warmup_s=given.warmup,
        tree_blocks_max=given.tree_blocks,
    )
    if not settings.instances and settings.cluster is None:
        raise ArgumentError("no instance is named: --instances, --prefill and --decode, or --cluster")
    logs.write_to(sys.stderr, given.log_level)
    router.serve(settings)
