"""One request: read, choose, send, try again elsewhere, relay.

Until the client has a byte, an instance's failure is the router's business: another one is tried, `retries` times at
most. After that byte it is the client's: a stream of events ends with an event that says so, any other body is cut
short, so that no client takes a part for the whole.

Where prefill and decode are apart, a request is two: its prompt goes to an instance that computes it and pushes the KV
cache, and then, with what that one has answered, to the instance that decodes. Both are chosen anew for another try. A
request that cannot be divided (its body was not held, or it has several prompts) is answered by the first alone.

    what fails before the first byte    tried elsewhere
    no connection                       always
    the connection broke, or the        when the request may be sent twice: completions and chats, GET and HEAD
     instance was ejected meanwhile
    502, 503, 504 of the instance       so, too
    a body that passes as a stream      only as long as no byte of it was sent
    no byte in time                     never: the work may be going on, and more of it would not help
"""

from __future__ import annotations

from typing import Final

import anyio

from kvpool.control.reading.halves import (
    ANSWER_BYTES_MAX,
    divisible,
    for_decode,
    for_prefill,
    params_of,
    without_params,
)
from kvpool.control.router.body import Body, HeldBody
from kvpool.control.router.budget import Share
from kvpool.control.router.errors import ClientGone, Refusal, error_event
from kvpool.control.router.events import EventCutter
from kvpool.control.router.exchange import Exchange
from kvpool.control.router.fleet import Fleet
from kvpool.control.router.lease import Lease, Seat
from kvpool.control.router.logs import LOGGER
from kvpool.control.router.metrics import Metrics
from kvpool.control.router.prompts import Asked, Kind
from kvpool.control.router.ranks import RANK_HEADERS
from kvpool.control.router.settings import RouterSettings
from kvpool.control.router.upstream import Answer, UpstreamError, passed_on

__all__ = ["Forwarding", "Load"]

_TRY_ELSEWHERE: Final = frozenset({502, 503, 504})


class _Elsewhere(Exception):
    """The instance failed before the first byte, and another one may do better."""


class Load:
    """The body of a request, and its share of the budget: both are released when the answer begins."""

    def __init__(self, body: Body, share: Share) -> None:
        self.body = body
        self._share = share

    def drop(self) -> None:
        """It is not sent again."""
        self.body.release()
        self._share.give_back()


class Forwarding:
    """One request that the router forwards: the state between its tries."""

    def __init__(
        self, settings: RouterSettings, fleet: Fleet, metrics: Metrics, kind: Kind, exchange: Exchange
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._metrics = metrics
        self._kind = kind
        self.exchange = exchange
        self.outcome: str | None = None
        self.instance = "-"
        self.prefill: str | None = None  # the instance that has computed the prompt, if that is another one
        self.tries = 0
        self._tried: list[int] = []  # numbers of instances
        self.tokens = self.cached = 0
        self.first_byte_s: float | None = None

    async def serve(self, asked: Asked, load: Load) -> None:
        """Answers the request, however it ends; raises nothing but cancellation."""
        try:
            await self._try_instances(asked, load)
        except Refusal as refusal:
            await self.refuse(refusal)
        except ClientGone:
            self.outcome = "client gone"
        except Exception:  # a bug, which must not take other requests along
            LOGGER.exception("error")
            await self.refuse(Refusal(500, "the router failed", "internal_error"))

    async def refuse(self, refusal: Refusal) -> None:
        """The router answers itself."""
        self.outcome = self.outcome or refusal.code
        self._metrics.refused.labels(refusal.code).inc()
        try:
            await self.exchange.refuse(refusal)
        except ClientGone:
            self.outcome = "client gone"

    async def _try_instances(self, asked: Asked, load: Load) -> None:
        failure: _Elsewhere | None = None
        whole = self._is_whole(load.body)
        if whole and self._fleet.divides:
            self._drop_params(load.body)
        while True:
            try:
                lease = self._fleet.lease(asked, self._tried, whole)
            except Refusal as refusal:
                if failure is None:
                    raise
                raise Refusal(502, f"{failure}, and there is no other", "upstream_failed") from refusal
            with lease:
                self.tries += 1
                self.prefill = None
                try:
                    seat, answer = await self._answer(lease, asked, load.body)
                except _Elsewhere as error:
                    failure = error
                else:
                    load.drop()
                    await self._relay(lease, seat, asked, answer)
                    return
            if self.tries > self._settings.retries:
                raise Refusal(502, f"{failure}; it was the last of {self.tries} that were tried", "upstream_failed")
            self._metrics.retries.labels(self.instance).inc()

    # ---- until the first byte

    def _is_whole(self, body: Body) -> bool:
        """Whether one instance must answer alone."""
        if self._kind == "other" or not self._fleet.divides:
            return True
        return not isinstance(body, HeldBody) or not divisible(body.data)

    def _drop_params(self, body: Body) -> None:
        """Where the router says which cache goes where, clients do not: not even in requests that are not divided."""
        if isinstance(body, HeldBody):
            cleaned = without_params(body.data)
            body.data = body.data if cleaned is None else cleaned

    async def _answer(self, lease: Lease, asked: Asked, body: Body) -> tuple[Seat, Answer]:
        """The answer that the client gets, and whose it is. Raises _Elsewhere, or Refusal."""
        seat, decode = lease.seat, lease.decode
        if decode is None or not isinstance(body, HeldBody):
            answer = await self._open(seat, asked, body)
            lease.computed()
            return seat, answer
        answer = await self._open_half(
            seat, asked, body, for_prefill(body.data, self._kind == "chat", decode.instance.spec.name)
        )
        lease.computed()
        if answer.status != 200:
            return seat, answer
        params = params_of(await self._read_whole(seat, answer))
        seat.leave()
        self._tried.remove(seat.instance.number)  # if decode fails, it may compute the prompt again: it has it cached
        if decode.fell:
            self._tried.append(decode.instance.number)
            raise _Elsewhere("the instance that decodes fell out while the prompt was computed")
        self.prefill = seat.instance.spec.name
        answer = await self._open_half(decode, asked, body, for_decode(body.data, params))
        decode.answered()
        return decode, answer

    async def _open_half(self, seat: Seat, asked: Asked, body: HeldBody, data: bytes) -> Answer:
        """As _open, of one half: its body is not held longer than it takes to be sent."""
        half = body.with_data(data)
        try:
            return await self._open(seat, asked, half, divided=True)
        finally:
            half.release()

    async def _read_whole(self, seat: Seat, answer: Answer) -> bytes:
        """The body of prefill's answer. Raises _Elsewhere."""
        data = bytearray(answer.first)
        try:
            while len(data) <= ANSWER_BYTES_MAX and (piece := await self._next(answer)):
                data += piece
        except UpstreamError as error:
            if not isinstance(error.__cause__, TimeoutError):
                seat.broken()
            raise _Elsewhere(str(error)) from error
        finally:
            await answer.close()
        return bytes(data)

    async def _open(self, seat: Seat, asked: Asked, body: Body, divided: bool = False) -> Answer:
        """Sends the request. Raises _Elsewhere, or Refusal when another instance would not help."""
        exchange, idempotent = self.exchange, self._kind != "other" or self.exchange.method in ("GET", "HEAD")
        self.instance = seat.instance.spec.name
        self._tried.append(seat.instance.number)
        with seat.instance.awaited(min(self._settings.first_byte_timeout_s, self._left_s())) as scope:
            try:
                upstream = seat.instance.upstream
                answer = await upstream.open(exchange.method, exchange.path, self._headers(seat, asked, divided), body)
            except UpstreamError as error:
                if error.ours:
                    raise Refusal(503, str(error), "overloaded", 1) from error
                seat.broken()
                if not body.may_be_sent or (error.sent and not idempotent):
                    raise Refusal(502, str(error), "upstream_failed") from error
                raise _Elsewhere(str(error)) from error
        twice = idempotent and body.may_be_sent
        if scope.cancelled_caught and seat.fell:
            fell = "the instance fell out while it was waited for"
            raise _Elsewhere(fell) if twice else Refusal(502, fell, "upstream_failed")
        if scope.cancelled_caught:
            raise Refusal(504, "the instance sent nothing in time", "upstream_timeout")
        others = self.tries <= self._settings.retries and self._fleet.has_other(self._tried, not divided)
        if answer.status in _TRY_ELSEWHERE and twice and others:
            await answer.close()
            raise _Elsewhere(f"the instance said {answer.status}")
        return answer

    def _headers(self, seat: Seat, asked: Asked, legible: bool) -> list[tuple[bytes, bytes]]:
        headers = passed_on(self.exchange.raw_headers)
        rank = seat.instance.spec.rank
        if rank is not None:
            headers = [(name, value) for name, value in headers if name not in RANK_HEADERS]
            headers += [(name, str(rank).encode()) for name in RANK_HEADERS]
        if legible or asked.stream or not any(name == b"accept-encoding" for name, _ in headers):
            headers = [(name, value) for name, value in headers if name != b"accept-encoding"]
            headers.append((b"accept-encoding", b"identity"))  # events are cut, and prefill's answer is read
        own, instances = self._settings.api_key, self._settings.instance_key
        if own is not None or instances is not None:  # the router's key is no business of the instances
            headers = [(name, value) for name, value in headers if name != b"authorization"]
        if instances is not None:
            headers.append((b"authorization", b"Bearer " + instances.encode("ascii")))
        return [*headers, (b"x-request-id", self.exchange.request_id.encode())]

    def _left_s(self) -> float:
        return max(0.0, self._settings.deadline_s - self.exchange.age_s)

    # ---- from the first byte on

    async def _relay(self, lease: Lease, seat: Seat, asked: Asked, answer: Answer) -> None:
        try:
            self._first_byte(lease, asked)
            headers = [*answer.headers, (b"x-kvpool-instance", self.instance.encode())]
            if self.prefill is not None:
                headers.append((b"x-kvpool-prefill", self.prefill.encode()))
            await self.exchange.start(answer.status, headers)
            relay = self._relay_events if answer.is_events else self._relay_body
            await relay(lease, seat, answer)
        finally:
            await answer.close()

    def _first_byte(self, lease: Lease, asked: Asked) -> None:
        self.first_byte_s = round(self.exchange.age_s, 6)
        self._metrics.first_byte.observe(self.first_byte_s)
        if asked.kind != "other" and asked.unread is None:
            self.tokens, self.cached = len(asked.tokens), lease.decision.cached
            self._metrics.tokens.inc(self.tokens)
            self._metrics.cached.inc(self.cached)

    async def _relay_body(self, lease: Lease, seat: Seat, answer: Answer) -> None:
        piece = answer.first
        try:
            while piece:
                await self.exchange.piece(piece)
                piece = await self._next(answer)
        except UpstreamError as error:
            # The body stays unfinished, so the server closes the connection: the client sees that something is missing.
            self._broke(seat, error)
            return
        self._finish(lease)
        await self.exchange.piece(b"", more=False)

    async def _relay_events(self, lease: Lease, seat: Seat, answer: Answer) -> None:
        cutter, piece = EventCutter(), answer.first
        try:
            while piece:
                if whole := cutter.feed(piece):
                    await self.exchange.piece(whole)
                piece = await self._next(answer)
        except UpstreamError as error:
            if cutter.done:
                self._finish(lease)
                await self.exchange.piece(b"", more=False)
                return
            self._broke(seat, error)
            await self.exchange.piece(error_event(str(error), "upstream_failed"), more=False)
            return
        self._finish(lease)
        await self.exchange.piece(cutter.rest(), more=False)

    async def _next(self, answer: Answer) -> bytes:
        """The next piece within its time. Raises UpstreamError."""
        try:
            with anyio.fail_after(min(self._settings.stall_timeout_s, self._left_s())):
                return await answer.next()
        except TimeoutError as error:
            raise UpstreamError("the instance sent nothing more in time", sent=True) from error

    def _finish(self, lease: Lease) -> None:
        lease.finished()
        self.outcome = "done"

    def _broke(self, seat: Seat, error: UpstreamError) -> None:
        if not isinstance(error.__cause__, TimeoutError):
            seat.broken()
        self._metrics.broken.labels(self.instance).inc()
        self.outcome = "broken"
