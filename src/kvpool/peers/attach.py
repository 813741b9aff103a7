"""Makes a pool a member of a cluster: the implementation of `Pool.attach`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from kvpool.cluster import Cluster, Role
from kvpool.cluster.event_endpoints import check_event_endpoint
from kvpool.errors import ArgumentError, ArgumentTypeError, Error, StateError
from kvpool.peers.addresses import check_member_listens, listen_addresses
from kvpool.peers.attachment import Attachment, load_of
from kvpool.peers.service import NetworkedPool
from kvpool.transfer.gpu_routes import tell_unused
from kvpool.transfer.libraries import nccl_library, ucx_library
from kvpool.types import KVLayout, RawLayout

__all__ = ["attach"]

_log = logging.getLogger("kvpool.cluster")


def attach(
    pool: NetworkedPool,
    cluster: Cluster,
    *,
    name: str | None,
    role: Role,
    listen: str | Sequence[str] | None,
    url: str,
    rank: int | None,
    events: str,
    events_replay: str,
    timeout: float | None,
) -> Attachment:
    """Makes a pool a member: see `Pool.attach`. If it fails, pool and cluster are unchanged."""
    if not isinstance(cluster, Cluster):
        raise ArgumentTypeError(f"cluster must be a kvpool.Cluster, not {type(cluster).__name__}")
    for endpoint in (events, events_replay):
        if endpoint:
            check_event_endpoint(endpoint)
    addresses = _addresses(cluster, listen)
    if cluster.secret and pool.settings.secret not in ("", cluster.secret):
        raise ArgumentError(
            "the pool's setting secret differs from the secret that the local cluster generated: leave it out"
        )
    own = pool.settings
    wanted = dataclasses.replace(
        own, name=pool._own_name if name is None else name, secret=cluster.secret or own.secret
    )
    for address in addresses:
        check_member_listens(address, bool(wanted.secret))
    with _service(pool, wanted):
        endpoints = [pool._listen(address) for address in addresses]
        stats = pool._stats()
        registration = cluster.register(
            name=pool._name() or "",
            role=role,
            incarnation=pool._incarnation(),
            endpoints=endpoints,
            layout=_layout_json(pool.kv_layout),
            model=wanted.model,
            parallel=None if pool._parallel is None else dataclasses.asdict(pool._parallel),
            hbm_blocks=stats["hbm"]["capacity"],
            dram_blocks=stats["dram"]["capacity"],
            load=load_of(pool, 0),
            url=url,
            rank=rank,
            events=events,
            events_replay=events_replay,
            timeout=wanted.timeout_s + 2 * cluster.lease_s if timeout is None else timeout,
        )
        try:
            attachment = Attachment(pool, cluster, registration)
            pool._join(registration.instance)  # last: a pool keeps its id for good
            return attachment
        except BaseException:
            registration.leave()
            raise


# ---- inside


@contextlib.contextmanager
def _service(pool: NetworkedPool, wanted: Any) -> Iterator[None]:
    """Starts the pool's service without connecting to peers. If the body raises, the service is removed again."""
    before = pool.settings
    with pool._serving:
        if pool._name() is not None:
            raise StateError(
                "this pool speaks with peers already: attach it before peers.listen, peers.connect and ranks.export"
            )
        notes = pool._start_service(wanted, ucx_library(wanted.ucx), nccl_library(wanted.nccl), joins_cluster=True)
        for note in notes:
            _log.warning("%s", note)
        tell_unused(pool, wanted)
        pool.settings = wanted
    try:
        yield
    except BaseException:
        with contextlib.suppress(Error):
            pool._drop_service()
        pool.settings = before
        raise


def _addresses(cluster: Cluster, listen: object) -> list[str]:
    if listen is None:
        local = cluster._url.kind == "local"
        return [f"unix:@kvpool-{secrets.token_hex(16)}" if local else "tcp:127.0.0.1:0"]
    return listen_addresses(listen)


def _layout_json(layout: KVLayout | RawLayout) -> dict[str, Any]:
    return {"kind": type(layout).__name__, **dataclasses.asdict(layout)}
