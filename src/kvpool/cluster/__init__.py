"""Membership of a cluster, on one machine or over etcd."""

from kvpool.cluster.callback import MemberCallback
from kvpool.cluster.cluster import Cluster
from kvpool.cluster.record import Load, Member, MemberEvent, Role
from kvpool.cluster.registration import LeaseEvent, Registration

__all__ = ["Cluster", "LeaseEvent", "Load", "Member", "MemberCallback", "MemberEvent", "Registration", "Role"]
