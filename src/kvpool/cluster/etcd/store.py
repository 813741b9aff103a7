"""Reads, transactions and leases in etcd, with a deadline for each call: what the parts of a directory share."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass
from typing import Any, Final

from kvpool.cluster.directory import Unreachable
from kvpool.cluster.etcd.gateway import AUTHENTICATE_S, Denied, Gateway, NoAnswer, Options, encode
from kvpool.cluster.etcd.keys import Keys, Value, get, values

__all__ = ["EtcdStore", "GrantedLease"]

_ID_LEASE_S: Final = 3600  # an id stays taken for so long after the last sign of its member


@dataclass(frozen=True)
class GrantedLease:
    """A lease that etcd has just granted.

    Attributes:
        id: Its number in etcd.
        ttl_s: How long it lasts without a renewal.
        asked_ns: When it was asked for (CLOCK_MONOTONIC): etcd cannot have begun to count earlier.
    """

    id: int
    ttl_s: int
    asked_ns: int


class EtcdStore:
    """The keys of one cluster in etcd. Any thread may call.

    Attributes:
        options: How etcd is reached.
        keys: The names of the cluster's keys.
        heartbeat_s: Seconds between two heartbeats of a member.
        lease_s: Seconds of a member's lease; more than was asked for if etcd grants no shorter one.
    """

    def __init__(self, options: Options, keys: Keys, heartbeat_s: float, lease_s: float) -> None:
        """Connects with the first call.

        Raises:
            OSError: A TLS file cannot be used.
        """
        self.options = options
        self.keys = keys
        self.heartbeat_s = heartbeat_s
        self.lease_s = float(max(1, math.ceil(lease_s)))  # etcd counts in seconds
        self._gateway = Gateway(options)

    def call(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        """Sends a request and returns the answer. The default timeout is a heartbeat, and at least a second.

        Raises:
            Unreachable: etcd does not answer, or refuses.
        """
        try:
            if timeout_s is None:
                timeout_s = max(1.0, self.heartbeat_s)
            return self._gateway.call(path, body, timeout_s, authenticate_s=AUTHENTICATE_S)
        except (NoAnswer, Denied) as error:
            raise Unreachable(str(error)) from None

    def read(self, key: str) -> Value | None:
        """Reads one key. Raises Unreachable."""
        found = values(self.call("kv/range", {"key": encode(key)}))
        return found[0] if found else None

    def read_at_once(self, *keys: str) -> list[Value | None]:
        """Reads several keys as of one revision. Raises Unreachable."""
        body = {"success": [get(key) for key in keys]}
        found = [values(one.get("response_range", {})) for one in self.call("kv/txn", body)["responses"]]
        return [one[0] if one else None for one in found]

    def grant(self) -> GrantedLease:
        """Asks for a new lease for a member's record. Raises Unreachable."""
        asked_ns = time.monotonic_ns()
        answer = self.call("lease/grant", {"TTL": str(int(self.lease_s)), "ID": "0"})
        ttl_s = int(answer["TTL"])
        self.lease_s = float(ttl_s)
        return GrantedLease(int(answer["ID"]), ttl_s, asked_ns)

    def grant_for_id(self) -> int:
        """Asks for a new lease for the key of an id, which outlasts the lease of the record. Raises Unreachable."""
        return int(self.call("lease/grant", {"TTL": str(_ID_LEASE_S), "ID": "0"})["ID"])

    def revoke(self, lease: int) -> None:
        """Ends a lease. If etcd does not answer, the lease expires."""
        with contextlib.suppress(Unreachable):
            self.call("lease/revoke", {"ID": str(lease)})

    def close(self) -> None:
        """Closes the connection."""
        self._gateway.close()
