"""The listeners and the end: SIGTERM stops listening and lets running requests finish, a second one cuts them off."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import secrets
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from math import ceil
from tempfile import mkstemp
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from kvpool.control.router.app import admin_app, public_app
from kvpool.control.router.connections import connections
from kvpool.control.router.logs import event
from kvpool.control.router.service import Router
from kvpool.control.router.settings import RouterSettings
from kvpool.control.router.upstream import trusts_nobody
from kvpool.errors import ArgumentError

__all__ = ["serve"]

_LOOPBACK: Final = "127.0.0.1"
_BACKLOG: Final = 2048
_IDLE_S: Final = 30  # of a client's connection between two requests
_FILES: Final = 256  # that are open beside connections
_FILES_OF_INSTANCE: Final = 66  # connections that are kept, and those of probes


class _Server(uvicorn.Server):
    """A server that handles no signals, because the process runs two of them."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with nullcontext():
            yield


def serve(settings: RouterSettings) -> None:
    """Runs a router until SIGTERM or SIGINT. In the main thread.

    Raises:
        ArgumentError: An address cannot be bound; or the profile, tokenizer or certificate is invalid.
        Unsupported: A package is missing.
    """
    _check_certificate(settings)
    with closing(_bound(settings.host, settings.port)) as public:
        if settings.admin_port is None:
            asyncio.run(_serve(settings, public, None))
            return
        with closing(_bound(_LOOPBACK, settings.admin_port)) as admin, _admin_key(settings) as (keyed, file):
            asyncio.run(_serve(keyed, public, admin, file))


@contextmanager
def _admin_key(settings: RouterSettings) -> Iterator[tuple[RouterSettings, str | None]]:
    """The settings with a key for the operator. One that is made here stands in a file as long as the router runs.

    The log names the file and not the key: logs are read by more people than the operator.
    """
    if settings.admin_key is not None:
        yield settings, None
        return
    key = secrets.token_urlsafe(32)
    folder = os.environ.get("XDG_RUNTIME_DIR")
    try:
        number, file = mkstemp(".key", "kvpool-router-", folder if folder and os.path.isdir(folder) else None)
    except OSError as error:
        raise ArgumentError(f"no file for the operator's key ({error.strerror}): name one by --admin-key") from error
    try:
        with open(number, "w") as out:  # which only this user may read
            out.write(key + "\n")
        yield replace(settings, admin_key=key), file
    finally:
        with suppress(OSError):
            os.unlink(file)


async def _serve(
    settings: RouterSettings, public: socket.socket, admin: socket.socket | None, admin_key_file: str | None = None
) -> None:
    router = Router(settings)
    refused = router.metrics.refused.labels("connections")
    servers = [(_server(public_app(router), settings, refused.inc, lifespan="on", **_tls(settings)), public)]
    if admin is not None:
        servers.append((_server(admin_app(router), settings, refused.inc, lifespan="off"), admin))

    def stop(number: int) -> None:
        event(logging.INFO, "stopping", signal=signal.Signals(number).name)
        for server, _ in servers:
            server.force_exit = server.should_exit
            server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    where: dict[str, Any] = {"public": _name(public), "admin": None if admin is None else _name(admin)}
    where["admin_key_file"] = admin_key_file
    where["tls"] = settings.tls_cert is not None
    if any(one.url.startswith("https:") for one in settings.instances) and trusts_nobody():
        event(logging.WARNING, "no trusted certificates", hint="install ca-certificates, or set SSL_CERT_FILE")
    event(logging.INFO, "listening", **where, policy=settings.policy, instances=len(settings.instances))
    clients = 2 * settings.connections_max * len(servers)  # with those that are refused
    _allow_files(clients + settings.requests_max + _FILES_OF_INSTANCE * len(settings.instances) + _FILES)
    _bound_handshakes(loop, settings.head_timeout_s)
    await asyncio.gather(router.warm(), *(server.serve([sock]) for server, sock in servers))
    event(logging.INFO, "stopped")


def _server(app: ASGIApp, settings: RouterSettings, on_refused: Callable[[], None], **options: Any) -> _Server:
    made: Any = connections(settings.connections_max, settings.head_timeout_s, on_refused)
    return _Server(
        uvicorn.Config(
            app,
            http=made,
            h11_max_incomplete_event_size=settings.head_bytes_max,
            log_config=None,
            access_log=False,
            server_header=False,
            ws="none",
            proxy_headers=False,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=ceil(settings.shutdown_timeout_s),
            **options,
        )
    )


def _bound_handshakes(loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
    """The server below does not see a silent connection before TLS is up; asyncio would give it a minute."""
    create_server = loop.create_server

    async def bounded(*args: Any, **options: Any) -> asyncio.Server:
        if options.get("ssl") is not None:
            options["ssl_handshake_timeout"] = timeout_s
        return await create_server(*args, **options)

    loop.create_server = bounded  # type: ignore[method-assign]


def _tls(settings: RouterSettings) -> dict[str, Any]:
    if settings.tls_cert is None:
        return {}
    return {"ssl_certfile": settings.tls_cert, "ssl_keyfile": settings.tls_key}


def _check_certificate(settings: RouterSettings) -> None:
    """Raises ArgumentError when it cannot be read, or key and certificate do not fit: before anything listens."""
    if settings.tls_cert is None or settings.tls_key is None:
        return
    try:
        for file in (settings.tls_cert, settings.tls_key):
            file.open("rb").close()  # the error for a missing file below names neither

        def no_password() -> str:
            raise ArgumentError(f"{settings.tls_key} has a password, which a server cannot type")

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.tls_cert, settings.tls_key, no_password)
    except ssl.SSLError as error:
        raise ArgumentError(f"{settings.tls_cert} with {settings.tls_key}: {error.reason or error}") from error
    except OSError as error:
        raise ArgumentError(f"{error.filename}: {error.strerror}") from error


def _allow_files(count: int) -> None:
    """As many open files as the limits of the router say, where the process may have them; less is said in the log."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < count:
        event(logging.WARNING, "few files", open_files_max=wanted, wanted=count)


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
