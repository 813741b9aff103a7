"""Observation of a pool: metrics for Prometheus, and KV events for routers in other processes.

This imports nothing, because each part needs a different library:

    kvpool.observe.metrics            PoolCollector, serve_metrics          pip install 'kvpool[metrics]'
    kvpool.observe.storage_metrics    StorageCollector                      pip install 'kvpool[metrics]'
    kvpool.observe.events             EventPublisher, EventSubscriber       pip install 'kvpool[events]'
"""
