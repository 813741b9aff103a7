"""A cluster of many machines: keys in etcd that expire with their leases (ADR 0012)."""
