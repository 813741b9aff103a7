"""What a user may set: ``kv_connector_extra_config``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvpool.engines.given import check_amount, check_cluster, check_known, check_memory, how_many
from kvpool.errors import ArgumentTypeError

__all__ = ["Options", "replica_ending", "replica_of"]

_REPLICA = re.compile(r"_dp(\d+)\Z")
_WHERE: Final = "kv_connector_extra_config"
_OF_MEMBERS = ("cluster_options", "listen", "url", "by_layer", "pull", "transfer_timeout_s")

# vLLM itself notices workers that hang. One that gets no CPU for a while is to keep its part of the cache.
_LEASE_SECONDS = 60.0


def replica_of(engine_id: str) -> int | None:
    """The data-parallel rank in the id of one of vLLM's engines; None if the server has one engine."""
    found = _REPLICA.search(engine_id)
    return None if found is None else int(found[1])


def replica_ending(engine_id: str) -> str:
    """What a name says of a data-parallel replica, such as "-dp0"; "" for an engine without replicas."""
    replica = replica_of(engine_id)
    return "" if replica is None else f"-dp{replica}"


@dataclass(frozen=True)
class Options:
    """The options of a connector.

    Attributes:
        dram_gib: Host memory for the cache, in GiB, of all workers together.
        dram_blocks: The same in blocks of vLLM; takes the place of `dram_gib`.
        async_load: Load while other requests compute, instead of before the step. The request waits for it outside the
            batch. Pays off where a load takes longer than a step.
        name: The pool's name, in logs and errors, and in the cluster. Data-parallel replicas add "-dp0" and so on.
        cluster: The URL of a cluster: the engine becomes a member, sends prompts to others, and gets theirs.
        cluster_options: More for `Cluster.join`, such as ``tls_ca``, or ``lease``, which is 15 seconds by default.
        listen: The addresses for other members, as for `Pool.attach`. Workers in other processes listen at the host of
            the first TCP address, at any port.
        url: Where vLLM's server answers, for routers: "http://10.0.0.1:8000", without ``/v1``.
        by_layer: Send each layer of a prompt as soon as it is computed. Not with workers in other processes.
        pull: Ask all other members for each prompt, and fetch what one of them has and this engine has not.
        transfer_timeout_s: Seconds that a send may take, and for which a request waits for its prompt.
        own_blocks: vLLM's own blocks lie in memory that kvpool allocates. Only where they are in host memory.
    """

    dram_gib: float = 4.0
    dram_blocks: int | None = None
    async_load: bool = False
    name: str | None = None
    cluster: str | None = None
    cluster_options: Mapping[str, Any] = field(default_factory=dict)
    listen: str | list[str] | None = None
    url: str = ""
    by_layer: bool = False
    pull: bool = False
    transfer_timeout_s: float = 5.0
    own_blocks: bool = False

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Options:
        """Reads ``kv_connector_extra_config``.

        Raises:
            ArgumentError: An option is unknown or out of range; or the memory is given twice.
            ArgumentTypeError: An option has the wrong type.
        """
        check_known(_WHERE, extra, list(cls.__dataclass_fields__))
        check_memory(_WHERE, extra, "dram_blocks")
        options = cls(**extra)
        check_amount(_WHERE, "transfer_timeout_s", options.transfer_timeout_s, (int, float))
        for name in ("async_load", "by_layer", "pull", "own_blocks"):
            if not isinstance(getattr(options, name), bool):
                raise ArgumentTypeError(f"kv_connector_extra_config: {name} must be true or false")
        if not isinstance(options.url, str):
            raise ArgumentTypeError(f"{_WHERE}: url must be a text")
        check_cluster(_WHERE, extra, _OF_MEMBERS)
        return options

    @property
    def settings(self) -> dict[str, Any]:
        """Of the pools. The connection of a worker that has ended is closed at once; the lease is for silent ones."""
        return {"lease_s": _LEASE_SECONDS} | ({} if self.name is None else {"name": self.name})

    @property
    def worker_listen(self) -> str | None:
        """Where a worker in another process listens: the interface for other hosts, any port. None: on this host."""
        given = [self.listen] if isinstance(self.listen, str) else self.listen or []
        hosts = [address.rpartition(":")[0] for address in given if address.startswith("tcp:")]
        return f"{hosts[0]}:0" if hosts else None

    def of_engine(self, engine_id: str) -> Options:
        """Those of one of vLLM's engines. Data-parallel replicas have the same: then the name says which one it is.

        Args:
            engine_id: vLLM's. Only this tells replicas apart: those of a dense model hear nothing of each other.
        """
        return self if self.name is None else replace(self, name=self.name + replica_ending(engine_id))

    def blocks(self, block_bytes: int, workers: int = 1) -> int:
        """How many blocks of DRAM a worker's pool gets.

        Args:
            block_bytes: Of the worker's part of a block.
            workers: That share the memory.

        Raises:
            ArgumentError: Not even one fits.
        """
        if self.dram_blocks is not None:
            return self.dram_blocks
        return how_many(_WHERE, self.dram_gib, block_bytes * workers, "a block of this model")
