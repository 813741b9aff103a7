"""A pool among its peers: how it attaches to a cluster, and which members it knows."""
