"""The listeners and the end: SIGTERM stops listening and lets running requests finish, a second one cuts them off."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from math import ceil
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from kvpool.control.router.app import admin_app, public_app
from kvpool.control.router.logs import event
from kvpool.control.router.service import Router
from kvpool.control.router.settings import RouterSettings
from kvpool.errors import ArgumentError

__all__ = ["serve"]

_LOOPBACK: Final = "127.0.0.1"
_BACKLOG: Final = 2048
_IDLE_S: Final = 30  # of a client's connection between two requests


class _Server(uvicorn.Server):
    """A server whose signals are somebody else's: there are two of them in the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with nullcontext():
            yield


def serve(settings: RouterSettings) -> None:
    """Runs a router until SIGTERM or SIGINT. In the main thread.

    Raises:
        ArgumentError: An address cannot be bound; the profile or the tokenizer is none.
        Unsupported: A package is missing.
    """
    with closing(_bound(settings.host, settings.port)) as public:
        if settings.admin_port is None:
            asyncio.run(_serve(settings, public, None))
            return
        with closing(_bound(_LOOPBACK, settings.admin_port)) as admin:
            asyncio.run(_serve(settings, public, admin))


async def _serve(settings: RouterSettings, public: socket.socket, admin: socket.socket | None) -> None:
    router = Router(settings)
    servers = [(_server(public_app(router), settings, "on"), public)]
    if admin is not None:
        servers.append((_server(admin_app(router), settings, "off"), admin))

    def stop(number: int) -> None:
        event(logging.INFO, "stopping", signal=signal.Signals(number).name)
        for server, _ in servers:
            server.force_exit = server.should_exit
            server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    where: dict[str, Any] = {"public": _name(public), "admin": None if admin is None else _name(admin)}
    event(logging.INFO, "listening", **where, policy=settings.policy, instances=len(settings.instances))
    await asyncio.gather(*(server.serve([sock]) for server, sock in servers))
    event(logging.INFO, "stopped")


def _server(app: ASGIApp, settings: RouterSettings, lifespan: Any) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan=lifespan,
            server_header=False,
            ws="none",
            proxy_headers=False,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=ceil(settings.shutdown_timeout_s),
        )
    )


def _bound(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ArgumentError when there can be none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ArgumentError(f"cannot listen on {host}: {error.strerror}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ArgumentError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    sock.setblocking(False)
    return sock


def _name(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
