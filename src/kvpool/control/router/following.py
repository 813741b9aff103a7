"""What instances have cached, by their KV events: each instance that publishes them is followed while it is up.

A subscriber has a thread for each instance, which feeds the prompt tree. It ends when the instance is ejected, since
most instances come back empty, and another one begins when it returns: that one asks for everything that is cached, if
the instance has an endpoint for replays, and else learns it with the next events.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvpool.control.router.adapter_names import AdapterNames
from kvpool.control.router.logs import event
from kvpool.control.router.metrics import Metrics
from kvpool.control.router.settings import EventsSpec, InstanceSpec
from kvpool.errors import ArgumentError, StateError, Unsupported
from kvpool.index import RemovedEvent, StoredEvent
from kvpool.policy.routing import PromptTree

if TYPE_CHECKING:
    from kvpool.observe.events import EventSubscriber

__all__ = ["Following"]

_NEEDS: Final = "needs pyzmq and msgpack: pip install 'kvpool[events]'"


class _Feed:
    """A tree, as long as the instance is followed. Thread-safe: an event that comes after `stop` is dropped."""

    def __init__(self, tree: PromptTree) -> None:
        self.block_tokens = tree.block_tokens
        self._tree = tree
        self._lock = threading.Lock()
        self._stopped = False

    def apply(self, instance: int, event: StoredEvent | RemovedEvent) -> None:
        """Applies an event of the instance."""
        with self._lock:
            if not self._stopped:
                self._tree.apply(instance, event)

    def forget(self, instance: int) -> None:
        """Forgets what the instance has."""
        with self._lock:
            if not self._stopped:
                self._tree.forget(instance)

    def stop(self) -> None:
        """Nothing is applied from now on."""
        with self._lock:
            self._stopped = True


@dataclass
class _Followed:
    name: str
    endpoint: str
    feed: _Feed
    subscriber: EventSubscriber
    told: set[str] = field(default_factory=set)  # faults that the log has
    counted: Counter[str] = field(default_factory=Counter)  # what the metrics contain


class Following:
    """Follows instances by their KV events. Belongs to one event loop; trees are fed by threads.

    Args:
        endpoints: Of instances, by name: those that publish events.
        blocks_max: Of an instance, that are known at most.
        metrics: To count in.
        adapters: Takes the names of adapters that events contain.

    Raises:
        Unsupported: There are endpoints, and the packages for events are missing.
    """

    def __init__(
        self, endpoints: Mapping[str, EventsSpec], blocks_max: int, metrics: Metrics, adapters: AdapterNames
    ) -> None:
        self._endpoints = endpoints
        self._blocks_max = blocks_max
        self._metrics = metrics
        self._adapters = adapters
        self._followed: dict[int, _Followed] = {}  # by the instance's number
        self._not_followed: dict[int, Exception] = {}  # the log has these
        self._subscribe: type[EventSubscriber] | None = None
        self._unable = False  # packages are missing; the log says so
        if endpoints:
            try:
                self._subscribe = _subscriber()
            except ImportError as error:
                raise Unsupported(f"--events {_NEEDS}") from error

    def publishes(self, instance: InstanceSpec) -> bool:
        """Whether an instance is to be followed."""
        return self._where(instance) is not None

    def follow(self, instance: InstanceSpec, number: int, tree: PromptTree) -> bool:
        """Follows an instance from now on, if it publishes events. Idempotent; returns whether it is followed.

        False for a failure, too, which may pass (no file or thread is left, or another instance has the endpoint): call
        it again after a while. One whose thread has failed is forgotten and followed anew. Without the packages for
        events, which members of a cluster may publish unasked, no instance is followed.
        """
        spec, name = self._where(instance), instance.name
        if spec is None or self._unable:
            return False
        followed = self._followed.get(number)
        if followed is not None:
            if not followed.subscriber.failed:
                return True
            self.end(number)
            tree.forget(number)
        before = self._not_followed.get(number)
        if isinstance(before, ArgumentError):  # an address that ZMQ does not take
            return False
        try:
            subscribe = self._subscribe = self._subscribe or _subscriber()
        except ImportError:
            self._unable = True
            event(logging.WARNING, "instances not followed", instance=name, cause=f"following KV events {_NEEDS}")
            return False
        feed = _Feed(tree)
        try:
            self._check_free(spec.endpoint)
            subscriber = subscribe(
                feed,
                number,
                spec.endpoint,
                spec.replay,
                blocks_max=self._blocks_max,
                rank=instance.rank,
                on_adapter=self._adapters.add,
            )
        except Exception as error:
            self._not_followed[number] = error
            if str(before) != str(error):
                event(logging.WARNING, "instance not followed", instance=name, cause=str(error))
            return False
        self._not_followed.pop(number, None)
        self._followed[number] = _Followed(name, spec.endpoint, feed, subscriber)
        return True

    def end(self, number: int) -> None:
        """Follows an instance no longer: when this returns, nothing more of it is applied. Idempotent."""
        self._not_followed.pop(number, None)
        followed = self._followed.pop(number, None)
        if followed is not None:
            self._count(followed)
            followed.feed.stop()
            # Its thread may be waiting for the answer of an instance that is gone.
            threading.Thread(target=followed.subscriber.close, name="kvpool-unfollow", daemon=True).start()

    def close(self) -> None:
        """Ends all."""
        for number in list(self._followed):
            self.end(number)

    def is_synced(self, number: int) -> bool:
        """Whether an instance is followed, and everything that it is known to have published has been applied."""
        followed = self._followed.get(number)
        return followed is not None and followed.subscriber.synced

    def report(self, number: int) -> dict[str, Any] | None:
        """How well an instance is followed, for /instances; None for one that is not."""
        followed = self._followed.get(number)
        if followed is None:
            return None
        subscriber = followed.subscriber
        return {
            "synced": subscriber.synced,
            "gaps": subscriber.gaps,
            "malformed": subscriber.malformed,
            "left_out": subscriber.left_out,
            "dropped": subscriber.dropped,
            "of_others": subscriber.of_others,
        }

    def tick(self) -> None:
        """Counts what is wrong with events, and logs it once for each instance."""
        for followed in self._followed.values():
            self._count(followed)
            for fault, template in _CAUSES.items():
                if getattr(followed.subscriber, fault) and fault not in followed.told:
                    followed.told.add(fault)
                    cause = template.format(followed.feed.block_tokens, self._blocks_max)
                    event(logging.WARNING, "events ignored", instance=followed.name, cause=cause)

    def _where(self, instance: InstanceSpec) -> EventsSpec | None:
        """Where an instance publishes: what the operator says counts before what its member does."""
        return self._endpoints.get(instance.name, instance.events)

    def _check_free(self, endpoint: str) -> None:
        """Raises StateError if another instance is followed there: what it has cached is not this one's."""
        other = next((each.name for each in self._followed.values() if each.endpoint == endpoint), None)
        if other is not None:
            raise StateError(f"the events of {endpoint} are those of instance {other}")

    def _count(self, followed: _Followed) -> None:
        for what, counter in (("gaps", self._metrics.events_forgotten), ("dropped", self._metrics.events_dropped)):
            now = getattr(followed.subscriber, what)
            counter.labels(followed.name).inc(now - followed.counted[what])
            followed.counted[what] = now


def _subscriber() -> type[EventSubscriber]:
    """Raises ImportError where a package is missing. Importing takes a while: only a router that follows does."""
    from kvpool.observe.events import EventSubscriber

    return EventSubscriber


_CAUSES = {
    "malformed": "messages that are no batch of KV events",
    "left_out": "blocks of another size than --block-tokens, {0}, or of layers of another kind",
    "of_others": "batches of another data-parallel rank: the endpoint is not this rank's",
    "dropped": "the oldest blocks, because the instance has more than --events-blocks, {1}",
}
