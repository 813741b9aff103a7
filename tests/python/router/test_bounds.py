"""The limits of a router: requests, connections, headers, time to send one. Over real sockets."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import uvicorn
from router.router_kit import PATIENCE_S, _Thread, eventually, fakes, httpx, routing
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from kvpool.control.router import InstanceSpec, RouterSettings, upstream
from kvpool.control.router import connections as module
from kvpool.control.router.body import HeldBody
from kvpool.control.router.budget import Budget
from kvpool.control.router.errors import Refusal
from kvpool.control.router.server import _server, _tls
from kvpool.errors import ArgumentError

TLS = Path(__file__).with_name("tls")

# ---- requests


def test_requests_at_a_time_are_bounded_and_health_checks_are_not_counted():
    with fakes("a") as one, routing(*one, requests_max=1) as running:
        with running.client.stream("POST", "/v1/completions", json={"stream": True, "pieces": 2, "hold_at": 1}) as held:
            for path in ("/v1/completions", "/v1/embeddings"):
                refused = running.client.post(path, json={"prompt": "x"})
                assert refused.status_code == 503
                assert int(refused.headers["retry-after"]) >= 1
                assert refused.json()["error"]["code"] == "overloaded"
            for path in ("/health", "/metrics", "/instances"):
                assert running.client.get(path).status_code == 200
            one[0].released.set()
            assert held.read().endswith(b"data: [DONE]\n\n")
        eventually(lambda: running.complete().status_code == 200, "the place was not given back")
        assert len(one[0].seen) == 2


def test_a_request_gives_its_place_back_however_it_ends():
    budget = Budget(bytes_max=10, requests_max=1)
    for _ in range(2):
        with pytest.raises(Refusal, match="bytes"), budget.share() as share:
            assert budget.requests == 1
            with pytest.raises(Refusal, match="under way"), budget.share():
                raise AssertionError
            share.take(11)
        assert (budget.requests, budget.held) == (0, 0)


def test_connections_to_an_instance_are_as_many_as_its_requests_and_no_request_waits_forever(monkeypatch):
    made = []
    client = httpx.AsyncClient
    monkeypatch.setattr(upstream.httpx, "AsyncClient", lambda **options: made.append(options) or client(**options))
    with fakes("a") as one, routing(*one, in_flight_max=1) as running:
        assert [options["limits"].max_connections for options in made] == [1, 2]  # and those of probes
        for number in range(20):
            response = eventually(lambda n=number: _served(running.complete(stream=n % 2 == 0, pieces=2)))
            assert response.status_code == 200


def _served(response: httpx.Response) -> httpx.Response | None:
    return response if response.status_code != 503 else None  # the one before ends a moment after its last byte


def test_a_router_out_of_descriptors_says_so_and_blames_no_instance(monkeypatch):
    with fakes("a") as one, routing(*one, retries=0) as running:
        eventually(lambda: running.complete("x").status_code == 200)

        async def none_left(self: httpx.AsyncClient, *_: object, **__: object) -> httpx.Response:
            try:
                raise OSError(errno.EMFILE, "Too many open files")
            except OSError as error:
                raise httpx.ConnectError("no connection") from error

        with monkeypatch.context() as patch:
            patch.setattr(httpx.AsyncClient, "send", none_left)
            for _ in range(10):  # more than it takes to put an instance out
                refused = running.complete("x")
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "overloaded"
            assert running.state("a") == "healthy"
        assert running.complete("x").status_code == 200


def test_the_lack_of_descriptors_is_noticed_where_a_name_has_several_addresses(monkeypatch):
    """As localhost often has: then the error of each is in a group."""
    families = {socket.AF_INET6: "::1", socket.AF_INET: "127.0.0.1"}
    found = [(family, socket.SOCK_STREAM, 6, "", (host, 80)) for family, host in families.items()]
    tried = []

    async def none_left(*_: object, **__: object) -> None:
        tried.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    async def ask() -> None:
        instance = upstream.Upstream(InstanceSpec("a", "http://two.test"), RouterSettings(()))
        prober = upstream.Prober(InstanceSpec("a", "http://two.test"), PATIENCE_S)
        with pytest.raises(upstream.UpstreamError, match="files"):
            await prober.probe("/health")
        with pytest.raises(upstream.UpstreamError, match="files") as error:
            await instance.open("GET", b"/", [], HeldBody(b"", asyncio.sleep))
        assert error.value.ours
        await instance.close()
        await prober.close()

    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", none_left)
    asyncio.run(ask())
    assert len(tried) == 4


# ---- headers


def test_headers_that_are_too_long_are_refused():
    with fakes("a") as one, routing(*one, head_bytes_max=2_000) as running:
        assert running.complete(headers={"x-long": "x" * 1_000}).status_code == 200
        for refused in (
            running.complete(headers={"x-long": "x" * 3_000}),
            running.complete(headers={f"x-{number}": "x" * 50 for number in range(50)}),
            running.client.get("/v1/models?" + "x" * 3_000),
        ):
            assert refused.status_code == 431
            assert refused.json()["error"]["code"] == "headers_too_large"
        assert len(one[0].seen) == 1


@pytest.mark.parametrize(
    "wrong", [{"requests_max": 0}, {"connections_max": 0}, {"head_bytes_max": 0}, {"head_timeout_s": float("inf")}]
)
def test_wrong_bounds_are_refused(wrong):
    with pytest.raises(ArgumentError):
        RouterSettings((), **wrong)


# ---- connections


async def _hello(request: Request) -> PlainTextResponse:
    await request.body()
    return PlainTextResponse("hello")


@contextmanager
def server(refused: list[None] | None = None, idle_s: float | None = None, **fields) -> Iterator[int]:
    """The router's server in front of an application that says hello; its port."""
    count = [] if refused is None else refused
    app = Starlette(routes=[Route("/", _hello, methods=["GET", "POST"])])
    settings = RouterSettings((), **fields)
    made: uvicorn.Config = _server(app, settings, lambda: count.append(None), lifespan="off", **_tls(settings)).config
    made.port = 0
    if idle_s is not None:
        made.timeout_keep_alive = idle_s
    thread = _Thread(made)
    try:
        yield thread.ports[0]
    finally:
        thread.stop()


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock:
        yield sock


def ask(sock: socket.socket, close: bool = False) -> bytes:
    """A whole answer, or the received part if the server disconnects."""
    sock.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n%s\r\n" % (b"connection: close\r\n" if close else b""))
    answer = b""
    while b"\r\n\r\nhello" not in answer and (piece := sock.recv(65536)):
        answer += piece
    return answer


def hung_up(sock: socket.socket) -> bool:
    """Waits until the server says no more, or hangs up; whether it said nothing."""
    try:
        return sock.recv(65536) == b""
    except ConnectionError:
        return True


def test_connections_are_bounded_and_one_too_many_is_told_when_to_come_back(monkeypatch):
    monkeypatch.setattr(module, "_REFUSED_S", 600.0)
    refusals: list[None] = []
    with server(refusals, connections_max=2) as port:
        with connected(port) as first, connected(port) as second:
            assert ask(first).startswith(b"HTTP/1.1 200 ")
            assert ask(second).startswith(b"HTTP/1.1 200 ")
            with connected(port) as third:
                refused = ask(third)
                assert refused.startswith(b"HTTP/1.1 503 ")
                assert b"\r\nretry-after: 1\r\n" in refused
                assert refused.endswith(b"}}")
                assert hung_up(third)
            assert ask(first).startswith(b"HTTP/1.1 200 ")  # an open connection stays open
            assert len(refusals) == 1

        def served() -> bool:
            with connected(port) as again:
                return ask(again, close=True).startswith(b"HTTP/1.1 200 ")

        eventually(served, "the places were not given back")


def test_beyond_twice_as_many_connections_get_no_answer(monkeypatch):
    monkeypatch.setattr(module, "_REFUSED_S", 600.0)
    with server(connections_max=1) as port, connected(port) as first:
        assert ask(first).startswith(b"HTTP/1.1 200 ")
        with connected(port) as second, connected(port) as third:
            assert hung_up(third)
            assert ask(second).startswith(b"HTTP/1.1 503 ")


def test_a_refused_connection_that_sends_no_request_is_closed(monkeypatch):
    monkeypatch.setattr(module, "_REFUSED_S", 0.05)
    with server(connections_max=1, head_timeout_s=600) as port, connected(port) as first:
        assert ask(first).startswith(b"HTTP/1.1 200 ")
        with connected(port) as second:
            assert hung_up(second)


def test_headers_have_a_time_limit_and_nothing_else_counts_in_it():
    with server(head_timeout_s=2) as port, ExitStack() as stack:
        kept = stack.enter_context(connected(port))
        assert ask(kept).startswith(b"HTTP/1.1 200 ")
        slow = stack.enter_context(connected(port))
        slow.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n1")
        with connected(port) as silent:
            assert hung_up(silent)
        with connected(port) as trickling:
            trickling.sendall(b"GET / HTTP/1.1\r\n")
            trickling.settimeout(0.02)

            def gone() -> bool:
                try:
                    trickling.sendall(b"x: y\r\n")
                    return trickling.recv(65536) == b""
                except TimeoutError:
                    return False
                except ConnectionError:
                    return True

            eventually(gone, "headers may trickle for ever")
        # A connection with a request, and one with a body on its way, have outlived both.
        assert ask(kept).startswith(b"HTTP/1.1 200 ")
        slow.sendall(b"2")
        assert slow.recv(65536).startswith(b"HTTP/1.1 200 ")
        slow.sendall(b"GET / HT")  # the next one's headers have the same time
        eventually(lambda: hung_up(slow), "the next headers may take for ever")


@pytest.mark.parametrize(
    "head",
    [
        "POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked",
        "POST / HTTP/1.1\r\nhost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5",
        "GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\ntransfer-encoding: chunked",
        "POST / HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked",
    ],
)
def test_a_body_with_two_lengths_is_refused_and_the_connection_closed(head):
    """One reader takes these bytes for the body's end, another for the next request."""
    with server() as port, connected(port) as sock:
        sock.sendall(head.encode() + b"\r\n\r\n5\r\nhello\r\n0\r\n\r\nGET / HTTP/1.1\r\nhost: x\r\n\r\n")
        answers = b"".join(iter(lambda: _received(sock), b""))
    assert answers.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in answers.lower()
    assert answers.count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("framing", ["content-length: 5\r\n\r\nhello", "transfer-encoding: chunked\r\n\r\n0\r\n\r\n"])
def test_a_body_with_one_length_is_read(framing):
    with server() as port, connected(port) as sock:
        sock.sendall(f"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{framing}".encode())
        answers = b"".join(iter(lambda: _received(sock), b""))
    assert answers.startswith(b"HTTP/1.1 200 ")


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(65536)
    except ConnectionResetError:  # the bytes behind it had not been read
        return b""


def test_bytes_that_are_no_http_are_answered_and_the_connection_closed():
    with server() as port, connected(port) as sock:
        sock.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 400 ")


# ---- connections under TLS


@contextmanager
def speaking_tls(port: int) -> Iterator[socket.socket]:
    """A client that never closes its side of TLS."""
    context = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    with connected(port) as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as sock:
        yield sock


@contextmanager
def tls_server(monkeypatch, **settings) -> Iterator[int]:
    """With as much patience for the end of TLS as Python 3.10 has: without end."""
    monkeypatch.setattr(asyncio.constants, "SSL_SHUTDOWN_TIMEOUT", 600.0, raising=False)
    with server(connections_max=1, tls_cert=TLS / "cert.pem", tls_key=TLS / "key.pem", **settings) as port:
        yield port


def served_tls(port: int) -> bool:
    with speaking_tls(port) as sock:
        return ask(sock).startswith(b"HTTP/1.1 200 ")


def test_a_refused_client_that_keeps_its_side_of_tls_open_loses_its_place_in_time(monkeypatch):
    with tls_server(monkeypatch) as port, ExitStack() as stack:
        with speaking_tls(port) as first:
            assert ask(first).startswith(b"HTTP/1.1 200 ")
            refused = stack.enter_context(speaking_tls(port))
            assert ask(refused).startswith(b"HTTP/1.1 503 ")
            assert hung_up(refused)
        eventually(lambda: served_tls(port), "who was refused has the place")


def _asks_once(sock: socket.socket) -> None:
    assert ask(sock, close=True).startswith(b"HTTP/1.1 200 ")


def _is_idle(sock: socket.socket) -> None:
    assert ask(sock).startswith(b"HTTP/1.1 200 ")


def _asks_nonsense(sock: socket.socket) -> None:
    sock.sendall(b"\x16\x03\x01 hello\r\n\r\n")
    assert sock.recv(65536).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("how", [_asks_once, _is_idle, _asks_nonsense])
def test_a_disconnected_client_that_keeps_its_side_of_tls_open_loses_its_place_in_time(how, monkeypatch):
    idle_s = 0.05 if how is _is_idle else 600.0
    with tls_server(monkeypatch, idle_s=idle_s, head_timeout_s=600) as port, speaking_tls(port) as sock:
        how(sock)
        eventually(lambda: hung_up(sock))
        eventually(lambda: served_tls(port), "who was hung up on has the place")
