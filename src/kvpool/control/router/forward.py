"""The ASGI applications of the endpoints: take a request in, let it be forwarded, and note how it ended."""

from __future__ import annotations

import logging
import time

import anyio
from starlette.types import Receive, Scope, Send

from kvpool.control.router.auth import KeyCheck
from kvpool.control.router.body import Body, HeldBody
from kvpool.control.router.budget import Budget
from kvpool.control.router.errors import ClientGone, Refusal
from kvpool.control.router.exchange import Exchange
from kvpool.control.router.fleet import Fleet
from kvpool.control.router.forwarding import Forwarding, Load
from kvpool.control.router.intake import Intake
from kvpool.control.router.logs import event
from kvpool.control.router.metrics import Metrics
from kvpool.control.router.paths import check_path
from kvpool.control.router.prompts import Asked, Kind, PromptReader
from kvpool.control.router.settings import RouterSettings

__all__ = ["Forwarder"]


class Forwarder:
    """An ASGI application that hands requests to instances.

    Args:
        settings: Limits and deadlines.
        fleet: Where requests go.
        intake: Takes their bodies in; one for all forwarders.
        reader: Says what they ask.
        budget: Of the bytes of all requests; one for all forwarders.
        metrics: To count in.
        kind: Of its endpoint.
    """

    def __init__(
        self,
        settings: RouterSettings,
        fleet: Fleet,
        intake: Intake,
        reader: PromptReader,
        budget: Budget,
        metrics: Metrics,
        kind: Kind,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._intake = intake
        self._reader = reader
        self._budget = budget
        self._metrics = metrics
        self._kind: Kind = kind
        self._key_check = KeyCheck(settings.api_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        exchange = Exchange(scope, receive, send, self._settings.stall_timeout_s)
        forwarding = Forwarding(self._settings, self._fleet, self._metrics, self._kind, exchange)
        try:
            if not self._key_check.admits(exchange.raw_headers):
                raise Refusal(401, "no key, or a wrong one, in the header Authorization", "invalid_api_key")
            exchange.check_head(self._settings.head_bytes_max)
            check_path(exchange.path)
            with self._budget.share() as share:
                load = Load(await self._intake.take(exchange, self._kind != "other", share), share)
                asked = await self._read(exchange, load.body)
                await self._while_there(exchange, forwarding, asked, load)
        except Refusal as refusal:
            await forwarding.refuse(refusal)
        except ClientGone:
            forwarding.outcome = "client gone"
        finally:
            self._note(forwarding)

    async def _read(self, exchange: Exchange, body: Body) -> Asked:
        began = time.perf_counter()
        if isinstance(body, HeldBody):
            asked = await self._reader.read(self._kind, exchange.headers, body.data)
        else:
            asked = self._reader.unread(self._kind, exchange.headers, "large")
        self._metrics.reading.observe(time.perf_counter() - began)
        if asked.unread is not None and self._kind != "other":
            self._metrics.unread.labels(asked.unread).inc()
        return asked

    async def _while_there(self, exchange: Exchange, forwarding: Forwarding, asked: Asked, load: Load) -> None:
        """Serves the client until it disconnects, which cancels everything under way for it."""

        async def watch() -> None:
            await exchange.gone()
            if forwarding.outcome is None:
                forwarding.outcome = "client gone"
                group.cancel_scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(watch)
            await forwarding.serve(asked, load)
            group.cancel_scope.cancel()

    def _note(self, forwarding: Forwarding) -> None:
        """Counts and logs a request that has ended."""
        exchange, metrics = forwarding.exchange, self._metrics
        outcome = forwarding.outcome or "cancelled"
        metrics.requests.labels(forwarding.instance, str(exchange.status or 499)).inc()
        metrics.duration.observe(exchange.age_s)
        if outcome == "client gone":
            metrics.gone.labels(forwarding.instance).inc()
        event(
            logging.INFO,
            "request",
            request_id=exchange.request_id,
            kind=self._kind,
            status=exchange.status or None,
            outcome=outcome,
            instance=forwarding.instance,
            prefill=forwarding.prefill,
            tries=forwarding.tries,
            prompt_tokens=forwarding.tokens,
            cached_tokens=forwarding.cached,
            first_byte_s=forwarding.first_byte_s,
            total_s=round(exchange.age_s, 6),
            sent_bytes=exchange.sent_bytes,
        )
