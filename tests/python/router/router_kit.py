"""Shared by the tests of the router: fakes in threads and processes, and a router in a thread, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from router.fake import FakeInstance, config

from kvpool.cluster import Role
from kvpool.control.router import HealthSettings, InstanceSpec, Router, RouterSettings, admin_app, public_app

if sys.version_info >= (3, 11):
    import httpx2 as httpx
else:  # httpx2, which goes on with it, does not run there
    import httpx

ADMIN_KEY = "the-operators"
PATIENCE_S = 60.0  # of a busy machine; no test is meant to need it
# Its timeout is long: no instance that answers is to be excluded because this machine was busy.
QUICK = HealthSettings(interval_s=0.1, timeout_s=30.0, fails=2, passes=1, errors=3, backoff_s=0.1, backoff_max_s=0.4)


def eventually(holds: Callable[[], Any], what: str = "") -> Any:
    """Waits until it holds."""
    end = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < end, what or "it never held"
        time.sleep(0.02)
    return found


class _Thread:
    """Servers on an event loop in a separate thread."""

    def __init__(self, *configs: uvicorn.Config) -> None:
        self.servers = [uvicorn.Server(each) for each in configs]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        eventually(lambda: all(server.started for server in self.servers), "a server did not start")
        self.ports = [server.servers[0].sockets[0].getsockname()[1] for server in self.servers]

    async def _serve(self) -> None:
        await asyncio.gather(*(server.serve() for server in self.servers))

    def stop(self) -> None:
        for server in self.servers:
            server.should_exit = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "a server did not stop"


class Fake(FakeInstance):
    """A fake instance in a thread."""

    def __init__(self, name: str, port: int = 0, role: Role = "both") -> None:
        super().__init__(name)
        self._thread = _Thread(config(self.app, port))
        self.spec = InstanceSpec(name, f"http://127.0.0.1:{self._thread.ports[0]}", role)

    def stop(self) -> None:
        self._thread.stop()


@contextmanager
def fakes(*names: str, port: int = 0) -> Iterator[list[Fake]]:
    """One for each name; p1, p2, d1 and so on only prefill or decode."""
    roles: dict[str, Role] = {"p": "prefill", "d": "decode"}
    with contextlib.ExitStack() as stack:
        running = []
        for name in names:
            running.append(Fake(name, port, roles.get(name[0], "both") if len(name) > 1 else "both"))
            stack.callback(running[-1].stop)
        yield running


class FakeProcess:
    """A fake instance in a process, to be killed.

    Args:
        name: Its.
        program: What it runs: fake.py, or deaf.py for one that is not busy with what it gets.
    """

    def __init__(self, name: str, program: str = "fake.py") -> None:
        command = [sys.executable, str(Path(__file__).with_name(program)), name]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        port = self.process.stdout.readline().strip()
        assert port, "the fake did not start"
        self.spec = InstanceSpec(name, f"http://127.0.0.1:{port}")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self.process.stdout.close()


@contextmanager
def processes(*names: str, program: str = "fake.py") -> Iterator[list[FakeProcess]]:
    with contextlib.ExitStack() as stack:
        running = []
        for name in names:
            running.append(FakeProcess(name, program))
            stack.callback(running[-1].stop)
        yield running


@contextmanager
def unheard(port: int = 0) -> Iterator[int]:
    """A port where nothing listens, and that no other process gets meanwhile. A fake may take it."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        yield sock.getsockname()[1]


class Running:
    """A router in a thread, and clients of it."""

    def __init__(self, router: Router, ports: list[int]) -> None:
        self.router = router
        self.url, self.admin_url = (f"http://127.0.0.1:{port}" for port in ports)
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S, trust_env=False)
        named = {"authorization": f"Bearer {ADMIN_KEY}"}
        self.admin = httpx.Client(base_url=self.admin_url, headers=named, timeout=PATIENCE_S, trust_env=False)

    def complete(self, prompt: Any = "hello", headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, **fields}, headers=headers)

    def where(self, prompt: Any, headers: dict[str, str] | None = None, **fields: Any) -> str:
        """The name of the instance that a prompt went to."""
        response = self.complete(prompt, headers, **fields)
        assert response.status_code == 200, response.text
        return response.headers["x-kvpool-instance"]

    def states(self) -> dict[str, dict[str, Any]]:
        return {each["name"]: each for each in self.client.get("/instances").json()["instances"]}

    def state(self, name: str) -> str:
        return self.states()[name]["state"]

    def metric(self, name: str, **labels: str) -> float:
        """A sample of /metrics; 0 where it is not there."""
        wanted = "".join(f'{key}="{value}",' for key, value in sorted(labels.items())).rstrip(",")
        start = f"kvpool_router_{name}{{{wanted}}} " if labels else f"kvpool_router_{name} "
        lines = [line for line in self.client.get("/metrics").text.splitlines() if line.startswith(start)]
        return float(lines[0].rpartition(" ")[2]) if lines else 0.0


def connected(running: Running) -> socket.socket:
    """A client that is done with when this is closed, whatever it has sent."""
    return socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2])), PATIENCE_S)


def head_of(length: int, path: str = "/v1/completions") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n\r\n".encode()


@contextmanager
def routing(*instances: Any, up: int | None = None, **settings: Any) -> Iterator[Running]:
    """A router in front of fakes, once `up` of them (all) are up."""
    settings = {"health": QUICK, "connect_timeout_s": 30.0, "admin_key": ADMIN_KEY} | settings
    specs = tuple(each if isinstance(each, InstanceSpec) else each.spec for each in instances)
    router = Router(RouterSettings(specs, shutdown_timeout_s=5, **settings))
    thread = _Thread(config(public_app(router)), config(admin_app(router)))
    running = Running(router, thread.ports)
    try:
        wanted = len(specs) if up is None else up
        eventually(lambda: running.client.get("/health").json()["available"] >= wanted, "instances did not come up")
        yield running
        eventually(
            lambda: all(not each["in_flight"] for each in running.states().values()), "requests were never ended"
        )
        assert router.fleet.scheduler.in_flight == 0
    finally:
        running.client.close()
        running.admin.close()
        thread.stop()


@contextmanager
def asking_alone(running: Running, name: str, other: str, **fields: Any) -> Iterator[Future[httpx.Response]]:
    """A request that one instance has, and that may go to the other if that one fails it."""
    running.admin.post(f"/instances/{other}/drain")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(running.complete, "x", **fields)
        eventually(lambda: running.states()[name]["in_flight"] == 1, "the request did not get there")
        running.admin.post(f"/instances/{other}/resume")
        yield asked


def events(text: str) -> list[Any]:
    """The data of each event: JSON, but for [DONE]."""
    data = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


@contextmanager
def logged() -> Iterator[list[logging.LogRecord]]:
    """Records of the router's log."""
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logger, handler = logging.getLogger("kvpool.router"), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def asked_of(fake: Fake) -> list[dict[str, Any]]:
    """The bodies that a fake has seen."""
    with fake.lock:
        return [json.loads(body) for _, _, body in fake.seen]
