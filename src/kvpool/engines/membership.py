"""An engine's pool as a member of a cluster, so that engines find each other by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvpool.cluster import Cluster, Role
from kvpool.pool import Pool

__all__ = ["NOTHING", "Membership", "Published", "secret_of"]

_LEASE_SECONDS: Final = 15.0  # a busy engine may keep the threads of its process waiting for some seconds


@dataclass(frozen=True)
class Published:
    """What a router is told of an engine beside its URL. For `Pool.attach`, whose arguments these are.

    Attributes:
        events: Where the engine publishes KV events, to connect to; "" for nowhere.
        replay: Where it repeats what it has published.
        rank: Of the engine at its URL; None if the server has one rank.
    """

    events: str = ""
    replay: str = ""
    rank: int | None = None


NOTHING: Final = Published()


class Membership:
    """The membership of a pool. Any thread may call.

    Attributes:
        name: The pool's name in the cluster.
    """

    def __init__(
        self,
        pool: Pool,
        url: str,
        role: Role,
        listen: str | list[str] | None,
        options: Mapping[str, Any],
        engine_url: str = "",
        published: Published = NOTHING,
    ) -> None:
        """Joins; waits as long as `Pool.attach` does.

        Args:
            pool: It has adopted nothing yet: the cluster gives its addresses their number.
            url: Of the cluster.
            role: What others see.
            listen: As for `Pool.attach`.
            options: More for `Cluster.join`, whose ``lease`` is 15 seconds here if it is not given. The password of a
                user comes from KVPOOL_ETCD_PASSWORD.
            engine_url: Where the engine answers HTTP.
            published: Its rank there, and where it publishes KV events.

        Raises:
            Whatever `Cluster.join` and `Pool.attach` raise; then the cluster is left.
        """
        if options.get("user"):
            options = {"password": os.environ.get("KVPOOL_ETCD_PASSWORD"), **options}
        self._cluster = Cluster.join(url, **{"lease": _LEASE_SECONDS, **options})
        try:
            attachment = pool.attach(
                self._cluster,
                name=pool.settings.name or None,
                role=role,
                listen=listen,
                url=engine_url,
                rank=published.rank,
                events=published.events,
                events_replay=published.replay,
            )
            self.name = attachment.name
        except BaseException:
            self._cluster.close()
            raise

    def has(self, name: str) -> bool:
        """Whether another member of this name is up, as far as is known."""
        return name != self.name and any(member.name == name for member in self._cluster.members())

    def others(self) -> list[str]:
        """The names of the other members that are up, as far as is known."""
        return [member.name for member in self._cluster.members() if member.name != self.name]

    def close(self) -> None:
        """Leaves."""
        self._cluster.close()


def secret_of(url: str) -> str:
    """The secret of a local cluster, for a worker beside the pool that joins it. "": the cluster has none.

    Raises:
        Whatever `Cluster.join` raises.
    """
    if not url.startswith("local:"):
        return ""
    with Cluster.join(url) as cluster:
        return cluster.secret
