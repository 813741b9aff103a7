"""Clusters of both kinds, and an etcd that a test may kill."""

from __future__ import annotations

from cluster.own_etcd import own, own_etcd
from cluster.places import etcd, etcd_server, local, place

__all__ = ["etcd", "etcd_server", "local", "own", "own_etcd", "place"]
