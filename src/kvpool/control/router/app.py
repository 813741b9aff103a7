"""The endpoints. The public application forwards requests and shows state; the operator's changes the instances.

The operator's app listens on loopback and requires a key, because every process on the machine can reach loopback. It
refuses browsers, because a web page could send requests there. Their requests carry an Origin, or (DNS rebinding) a
Host other than this machine's.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvpool.control.router.auth import CHALLENGE, KeyCheck
from kvpool.control.router.errors import error_object
from kvpool.control.router.service import Router
from kvpool.control.router.settings import InstanceSpec
from kvpool.errors import ArgumentError, Error, StateError

__all__ = ["admin_app", "public_app"]

_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
_METHODS: Final = ["GET", "POST", "PUT", "PATCH", "DELETE"]
_SPEC_MAX: Final = 4096
_NO_KEY: Final = "no key, or a wrong one, in the header Authorization"
_CHALLENGE: Final = {CHALLENGE[0].decode(): CHALLENGE[1].decode()}


def public_app(router: Router) -> Starlette:
    """The application for clients. Its lifespan is the router's."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with router.running():
            yield

    key_check = KeyCheck(router.settings.api_key)
    other = router.forwarder("other")
    return Starlette(
        routes=[
            Route("/v1/completions", router.forwarder("completions"), methods=["POST"]),
            Route("/v1/chat/completions", router.forwarder("chat"), methods=["POST"]),
            Route("/v1/{rest:path}", other, methods=_METHODS),
            *_shown(router, key_check, urls=False),
        ],
        exception_handlers={HTTPException: _refused},
        lifespan=lifespan,
    )


def admin_app(router: Router) -> Starlette:
    """The application for the operator. Has no lifespan: the public one runs the router.

    Raises:
        ArgumentError: The settings have no admin_key.
    """
    if router.settings.admin_key is None:
        raise ArgumentError("the operator's listener needs an admin_key")
    key_check = KeyCheck(router.settings.admin_key)

    async def add(request: Request) -> Response:
        body = await _short_body(request)
        try:
            fields = json.loads(body)
            url, name = fields["url"], fields.get("name")
            spec = InstanceSpec.parse(url if name is None else f"{name}={url}", fields.get("role", "both"))
            spec = replace(spec, rank=fields.get("rank"))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(
                'the body must be {"url": "http://...", "name": "...", "role": "...", "rank": 0}'
            ) from error
        router.add(spec)
        return JSONResponse({"name": spec.name, "url": spec.url}, 201)

    async def remove(request: Request) -> Response:
        await router.remove(request.path_params["name"])
        return Response(status_code=204)

    async def drain(request: Request) -> Response:
        instance = router.fleet.set_draining(request.path_params["name"], True)
        return JSONResponse({"name": instance.spec.name, "draining": True, "in_flight": instance.in_flight})

    async def resume(request: Request) -> Response:
        instance = router.fleet.set_draining(request.path_params["name"], False)
        return JSONResponse({"name": instance.spec.name, "draining": False, "in_flight": instance.in_flight})

    return Starlette(
        routes=[
            Route("/instances", add, methods=["POST"]),
            Route("/instances/{name}", remove, methods=["DELETE"]),
            Route("/instances/{name}/drain", drain, methods=["POST"]),
            Route("/instances/{name}/resume", resume, methods=["POST"]),
            *_shown(router, KeyCheck(None), urls=True),  # _Keyed has checked it
        ],
        middleware=[
            Middleware(TrustedHostMiddleware, ["127.0.0.1", "localhost"]),
            Middleware(_NoBrowsers),
            Middleware(_Keyed, key_check),
        ],
        exception_handlers={HTTPException: _refused, ArgumentError: _wrong, StateError: _wrong},
    )


def _shown(router: Router, key_check: KeyCheck, urls: bool) -> list[Route]:
    """Endpoints for the router's state. Health needs no key: its clients seldom have one, and it is only a number."""

    def check(request: Request) -> None:
        if not key_check.admits(request.headers.raw):
            raise HTTPException(401, _NO_KEY, _CHALLENGE)

    async def health(request: Request) -> Response:
        available = router.fleet.available
        status = {"status": "ok" if available else "no instance", "available": available}
        return JSONResponse(status, 200 if available else 503)

    async def metrics(request: Request) -> Response:
        check(request)
        router.fleet.measure()
        return Response(router.metrics.text(), media_type=_TEXT)

    async def instances(request: Request) -> Response:
        check(request)
        return JSONResponse({"policy": router.settings.policy, "instances": router.fleet.report(urls)})

    return [Route("/health", health), Route("/metrics", metrics), Route("/instances", instances)]


class _NoBrowsers:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and any(name == b"origin" for name, _ in scope["headers"]):
            refusal = Response(
                error_object(403, "not from a web page", "forbidden"), 403, media_type="application/json"
            )
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)


class _Keyed:
    """Requires the key, except for /health."""

    def __init__(self, app: ASGIApp, key_check: KeyCheck) -> None:
        self._app = app
        self._key_check = key_check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health" and not self._key_check.admits(scope["headers"]):
            body = error_object(401, _NO_KEY, "invalid_api_key")
            await Response(body, 401, _CHALLENGE, "application/json")(scope, receive, send)
            return
        await self._app(scope, receive, send)


async def _short_body(request: Request) -> bytes:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _SPEC_MAX:
            raise ArgumentError(f"the body has more than {_SPEC_MAX} bytes")
    return body


async def _refused(request: Request, error: Exception) -> Response:
    """Turns Starlette's refusals into the form that OpenAI's clients expect."""
    assert isinstance(error, HTTPException)
    code = {401: "invalid_api_key", 404: "not_found"}.get(error.status_code, "refused")
    body = error_object(error.status_code, error.detail, code)
    return Response(body, error.status_code, error.headers, media_type="application/json")


async def _wrong(request: Request, error: Exception) -> Response:
    """The answer to an impossible request of the operator: 409 if it may be possible later, 404 for an unknown name."""
    assert isinstance(error, Error)
    status: Any = 409 if isinstance(error, StateError) else 404 if "name" in request.path_params else 400
    return Response(error_object(status, str(error), "wrong_request"), status, media_type="application/json")
