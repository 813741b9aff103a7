"""Strangers and programs other than kvpool, as raw sockets that send anything, at every stage.

Bugs that these tests find: anything but an error for a caller that is not a peer (11); strangers that keep peers out;
changed bytes that count as delivered (1).
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crew import Survivor, far_nursery, near_nursery, reading, survivor_of, unix_address, until_no_more_than
from proxy import Proxy
from relay import Relay
from transfer.kit import SECRET, content, fill, prompt, small_pool
from victims import Nursery, big_pool, blocks_at_peers, eventually, repeats, seed_of, things

import kvpool

__all__ = ["far_nursery", "near_nursery"]

HELLO_BYTES = 44
CLIENT, SERVER = 1, 2
NETWORK, LOCAL = 1, 2


def hello(role: int = CLIENT, channel: int = NETWORK, low: int = 3, high: int = 3, version: int = 0) -> bytes:
    return struct.pack("<4sBBHHH", b"KVPL", role, channel, low, high, version) + random.randbytes(32)


def socket_address(address: str) -> Any:
    kind, _, where = address.partition(":")
    host, _, port = where.rpartition(":")
    return (host, int(port)) if kind == "tcp" else where.replace("@", "\0", 1)


def dial(address: str) -> socket.socket:
    one = socket.socket(socket.AF_INET if address.startswith("tcp:") else socket.AF_UNIX)
    one.connect(socket_address(address))
    one.settimeout(60)
    return one


def local_sockets() -> list[str]:
    """Local sockets of the pools of this process: anybody on the machine can read their names."""
    mine = {Path(f"/proc/self/fd/{fd}").readlink() for fd in os.listdir("/proc/self/fd") if is_socket(int(fd))}
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return [f"unix:{one[7]}" for one in sockets if len(one) == 8 and Path(f"socket:[{one[6]}]") in mine]


def is_socket(fd: int) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    return False


@contextlib.contextmanager
def many_descriptors() -> Iterator[None]:
    """Room for strangers. The pool takes no more for it: its bound is 128 of a kind."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], min(before[1], 4096)), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def everything_from(one: socket.socket) -> bytes:
    """All bytes of the other side until it closes, as it must."""
    said = b""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while data := one.recv(4096):
            said += data
    return said


def say(one: socket.socket, data: bytes) -> None:
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        one.sendall(data)


@pytest.fixture(params=["sock-unix", "sock-tcp"])
def survivor(request: Any, near_nursery: Nursery, far_nursery: Nursery) -> Iterator[Survivor]:
    nursery = far_nursery if request.param == "sock-tcp" else near_nursery
    with survivor_of(request.param, nursery) as one:
        yield one
        # Whatever came before, a real peer gets in.
        with nursery.victim() as victim, reading(one.pool) as reader:
            one.greet(victim)
            victim.send("send_for_ever(pool, 'survivor', 1, 1)")
            eventually(lambda: reader.items > 5)
            victim.kill()
            assert reader.wrong == []


def test_garbage_at_every_stage_of_the_handshake_is_answered_by_hanging_up(survivor, request):
    dice = random.Random(seed_of(request))
    channel = LOCAL if survivor.route == "sock-unix" else NETWORK
    good = hello(channel=channel)
    openings = [
        b"GET / HTTP/1.1\r\n\r\n", b"\0" * HELLO_BYTES, b"KVPL" + b"\xff" * 40, hello(SERVER, channel),
        hello(CLIENT, 3 - channel), hello(CLIENT, channel, 0, 0), hello(CLIENT, channel, 9, 3),
        good + b"\0" * 32, good + b"\xff" * 4096,
        *(good + dice.randbytes(dice.randrange(32, 3000)) for _ in range(repeats(10, long=200))),
        *(dice.randbytes(dice.randrange(HELLO_BYTES, 500)) for _ in range(repeats(10, long=200))),
    ]  # fmt: skip
    for opening in openings:
        with contextlib.closing(dial(survivor.address)) as stranger:
            say(stranger, opening)
            said = everything_from(stranger)
        # Its hello, the verdict "your proof is wrong", and never its proof.
        assert len(said) <= HELLO_BYTES + 1, said
        assert said[:4] in (b"", b"KVPL")
        assert said[HELLO_BYTES:] in (b"", b"\x02")
    assert survivor.pool.peers.list() == []


def test_strangers_who_leave_at_any_byte_leave_nothing(survivor):
    good = hello(channel=LOCAL if survivor.route == "sock-unix" else NETWORK)
    for length in range(HELLO_BYTES + 1):
        with contextlib.closing(dial(survivor.address)) as stranger:
            say(stranger, good[:length])
    assert survivor.pool.peers.list() == []


def test_both_sides_are_told_of_a_version_that_neither_speaks(survivor):
    channel = LOCAL if survivor.route == "sock-unix" else NETWORK
    with contextlib.closing(dial(survivor.address)) as stranger:
        say(stranger, hello(channel=channel, low=7, high=9))
        said = everything_from(stranger)
    magic, role, _, low, high, version = struct.unpack("<4sBBHHH", said[:12])
    assert (magic, role, version) == (b"KVPL", SERVER, 0)
    assert 1 <= low <= high < 7
    assert len(said) == HELLO_BYTES


@pytest.mark.parametrize("answer", ["other versions", "garbage", "nothing", "a lie", "silence", "an echo"])
def test_a_server_that_is_not_a_pool_is_recognised(answer):
    kinds = {"nothing": kvpool.PeerLost, "silence": kvpool.DeadlineExceeded}
    with socket.create_server(("127.0.0.1", 0)) as listener, big_pool(secret=SECRET) as pool:
        with pytest.raises(kvpool.PeerLost):
            pool.peers.connect(unix_address(), wait=False)
        before = things()

        def serve(one: socket.socket) -> None:
            with one:
                one.settimeout(60)
                came = one.recv(HELLO_BYTES)
                answers = {
                    "other versions": hello(SERVER, NETWORK, 7, 9),
                    "garbage": b"SSH-2.0-OpenSSH_9.2p1\r\n" * 8,
                    "a lie": hello(SERVER, NETWORK, 3, 3, 3) + b"\x01" + b"\0" * 32,
                    "an echo": came,
                }
                say(one, answers.get(answer, b""))
                if answer != "nothing":
                    everything_from(one)

        def serve_all() -> None:  # a silent server is called more than once
            with contextlib.suppress(OSError):
                while True:
                    serve(listener.accept()[0])

        thread = threading.Thread(target=serve_all)
        thread.start()
        with pytest.raises(kinds.get(answer, (kvpool.ProtocolError, kvpool.AuthError))) as caught:
            pool.peers.connect(f"tcp:127.0.0.1:{listener.getsockname()[1]}", timeout=1.0 if answer == "silence" else 60)
        if answer == "other versions":
            assert {"7", "9"} <= set(str(caught.value).replace(",", " ").replace(".", " ").replace("-", " ").split())
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)
        assert pool.peers.list() == []
        until_no_more_than(before)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"secret": "another"}, kvpool.AuthError),
        ({"secret": ""}, kvpool.AuthError),
        ({"model": "another"}, kvpool.LayoutMismatch),
        ({"name": "survivor"}, kvpool.ArgumentError),
        ({"routes": ("shm",)}, kvpool.Unsupported),
    ],
)
def test_a_peer_that_does_not_fit_is_told_why_and_nothing_is_left(changes, error, near_nursery):
    with survivor_of("sock-unix", near_nursery) as survivor, near_nursery.victim() as victim:
        options = survivor.options | {"name": "victim"} | changes
        with pytest.raises(error):
            victim("pool = big_pool(**options)\npool.peers.connect(where)", where=survivor.address, options=options)
        assert victim("pool.peers.list()") == survivor.pool.peers.list() == []
        with pytest.raises(kvpool.LayoutMismatch):
            victim(
                "small = small_pool(secret=secret, name='small')\nsmall.peers.connect(where)",
                where=survivor.address, secret=SECRET,
            )  # fmt: skip
        assert survivor.pool.peers.list() == []


def test_bytes_that_change_on_the_way_are_never_delivered(far_nursery, request):
    """Over a network every byte is authenticated: the connection ends, and both reconnect."""
    dice = random.Random(seed_of(request))
    with (
        survivor_of("sock-tcp", far_nursery) as survivor,
        Proxy(survivor.address) as proxy,
        far_nursery.victim() as victim,
        reading(survivor.pool) as reader,
    ):
        pool = survivor.pool
        victim("pool = big_pool(name='victim', **options)\nNone", options=survivor.options)
        for flip in range(1, repeats(15, long=1000)):
            wait = dice.randrange(0, 1 << dice.randrange(4, 22))

            def mangle(data: bytes) -> bytes:
                nonlocal wait
                wait -= len(data)
                if wait >= 0:
                    return data
                proxy.mangle = bytes
                changed = bytearray(data)
                changed[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
                return bytes(changed)

            proxy.mangle = mangle
            error = victim(
                "addrs = pool.alloc(16)\nstamp(pool, addrs, number)\n"
                "try:\n"
                "    peer = pool.peers.connect(where, timeout=60)\n"
                "    pool.transfer(peer, addrs, private=number.to_bytes(4, 'little')).wait(60)\n"
                "    error = None\n"
                "except kvpool.Error as caught:\n"
                "    error = caught\n"
                "pool.free(addrs)\nerror",
                number=flip, where=proxy.address,
            )  # fmt: skip
            # DeadlineExceeded: a length changed in the handshake, and the peer waits for bytes that never come.
            expected = kvpool.PeerLost, kvpool.ProtocolError, kvpool.AuthError, kvpool.DeadlineExceeded, type(None)
            assert isinstance(error, expected), error
            proxy.reset()
            eventually(lambda: pool.peers.list() == [])
            assert victim("eventually(lambda: pool.peers.list() == [])\npool.audit().hbm.active") == 0
            eventually(lambda: blocks_at_peers(pool) == 0)
            eventually(lambda: pool.stats().hbm.active == 0)  # the reader is done, and there is room for the next
            assert reader.wrong == []


@pytest.mark.parametrize("trusting", [(False, False), (True, False), (False, True), (True, True)])
def test_content_that_a_relay_forges_is_delivered_only_where_both_sides_trust_the_network(trusting):
    """Loopback is no exception: other users of the machine are there."""
    options = {"secret": SECRET, "routes": ("sock",), "prefer_unix_socket": False}
    receiver = small_pool(name="receiver", trusted_network=trusting[0], **options)
    sender = small_pool(name="sender", trusted_network=trusting[1], **options)
    with receiver, sender, Relay(receiver.peers.listen("tcp:127.0.0.1:0")) as relay:
        peer = sender.peers.connect(relay.address, timeout=60)
        tokens = prompt(2)
        addrs = sender.alloc(2)
        fill(sender, addrs)
        transfer = sender.transfer_with_insert(peer, tokens, addrs, timeout=60)
        if all(trusting):  # the relay can forge content
            transfer.wait(60)
            with receiver.match(tokens) as found:
                assert found.tokens == len(tokens)
                assert content(receiver, found.addrs) != content(sender, addrs)
        else:
            with pytest.raises((kvpool.PeerLost, kvpool.ProtocolError)):
                transfer.wait(60)
            eventually(lambda: receiver.peers.list() == [])
            with receiver.match(tokens) as found:
                assert found.tokens == 0
        assert relay.forged == 1
        assert (relay.checksums > 0) == all(trusting)


@pytest.mark.parametrize("what", ["silence", "hello"])
@pytest.mark.parametrize("where", ["unix", "tcp", "local"])
def test_a_thousand_strangers_keep_no_peer_out(where, what):
    """Each stranger has 5 s, so a peer that waits for them is late. "local": also at the local socket."""
    address = unix_address() if where == "unix" else "tcp:127.0.0.1:0"
    options = {"secret": SECRET, "prefer_unix_socket": where == "local"}
    with many_descriptors(), contextlib.ExitStack() as stack:
        server = stack.enter_context(small_pool(name="server", **options))
        bound = server.peers.listen(address)
        crowded = [bound, *local_sockets()] if where == "local" else [bound]
        channel = LOCAL if where == "unix" else NETWORK
        for number in range(1000):
            stranger = socket.socket(
                socket.AF_UNIX if crowded[number % len(crowded)].startswith("unix") else socket.AF_INET
            )
            stack.enter_context(contextlib.closing(stranger))
            stranger.settimeout(0)
            with contextlib.suppress(BlockingIOError):
                stranger.connect(socket_address(crowded[number % len(crowded)]))
            if what == "hello":
                with contextlib.suppress(OSError):
                    stranger.send(hello(channel=channel))
        client = stack.enter_context(small_pool(name="client", **options))
        assert client.peers.connect(bound, timeout=4.0) == "server"
        assert client.peers.list()[0].link.startswith("tcp" if where == "tcp" else "unix")
