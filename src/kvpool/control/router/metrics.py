"""What /metrics shows: Prometheus' text, in a registry of the router's own."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["Metrics"]

_DECISION_S: Final = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.1, 0.5)
_ANSWER_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_PREFIX: Final = "kvpool_router_"


class Metrics:
    """The router's counters. Labels have few values: no path, no model, no client.

    An instance is named by the label `engine`: `instance` is Prometheus' own, for the address that it scrapes, and it
    would rename ours.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests that ended, by instance (- for none)", "engine", "code")
        self.retries = self._counter(
            "retries", "Requests that went on to another instance, by the failed one", "engine"
        )
        self.refused = self._counter("refused", "Requests and connections that the router itself refused", "reason")
        self.unread = self._counter("prompts_unread", "Prompts that were routed by load alone, by why", "reason")
        self.broken = self._counter("streams_broken", "Answers that broke after their first byte", "engine")
        self.gone = self._counter("clients_gone", "Clients that left before their answer was whole", "engine")
        self.ejections = self._counter("ejections", "Times that an instance was taken out as unhealthy", "engine")
        self.tokens = self._counter("prompt_tokens", "Tokens of prompts, as the router counts them")
        self.cached = self._counter("prompt_tokens_cached", "Of these, cached where they went, as the tree believes")
        self.in_flight = self._gauge("requests_in_flight", "Requests that an instance has", "engine")
        self.up = self._gauge("instance_up", "1 for an instance that is healthy or on trial", "engine")
        self.draining = self._gauge("instance_draining", "1 for an instance that is drained", "engine")
        self.synced = self._gauge("events_synced", "1 if the tree has all events of a followed instance", "engine")
        self.events_forgotten = self._counter(
            "events_forgotten",
            "Times that an instance was forgotten, as its events were missed",
            "engine",
        )
        self.events_dropped = self._counter(
            "events_blocks_dropped", "Blocks of an instance that were dropped, because it has too many", "engine"
        )
        self.tree_blocks = self._gauge("tree_blocks", "Blocks in the prompt tree")
        self.tree_evicted = self._counter("tree_blocks_evicted", "Blocks that it forgot because they were too many")
        self.decision = self._histogram("decision_seconds", "Choosing an instance", _DECISION_S)
        self.reading = self._histogram("read_seconds", "From a body to tokens", _DECISION_S)
        self.tokenizing = self._histogram("tokenize_seconds", "From a question for tokens to its answer", _ANSWER_S)
        self.untokenized = self._counter("prompts_untokenized", "Prompts without the model's tokens, by why", "reason")
        self.first_byte = self._histogram("first_byte_seconds", "From a request to its answer's first byte", _ANSWER_S)
        self.duration = self._histogram("request_seconds", "From a request to its answer's end", _ANSWER_S)

    def text(self) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self.registry)

    def forget(self, instance: str) -> None:
        """Drops the gauges of an instance that was removed. Counters stay."""
        for gauge in (self.in_flight, self.up, self.draining, self.synced):
            with suppress(KeyError):  # it was never measured
                gauge.remove(instance)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(_PREFIX + name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, text, buckets=buckets, registry=self.registry)
