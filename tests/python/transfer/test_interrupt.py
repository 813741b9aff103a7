"""Ctrl-C while a verb waits for a peer that does not answer."""

from __future__ import annotations

from typing import Any

import pytest
from kit import run_script
from transfer.kit import Child, address_of

VERBS = {
    "connect, and the handler closes the pool": (
        "signal.signal(signal.SIGINT, lambda *_: (pool.close(), 1 / 0)); "
        "pool.peers.connect(address_of('shm'), timeout=600)"
    ),
    "connect, nobody listens": "pool.peers.connect(address_of('shm'), timeout=600)",
    "connect, nobody answers": "pool.peers.connect(f'unix:{silent}', timeout=600)",
    "alloc": "pool.alloc(2, instance=peer, timeout=600)",
    "free": "pool.free(lent)",
    "disconnect": "pool.peers.disconnect(peer)",
    "fetch": "pool.fetch(peer, lent, timeout=600).wait()",
    "match": "pool.peers.match(peer, prompt(2), timeout=600)",
    "match at several": "pool.peers.match([peer, peer], prompt(2), timeout=600)",
    "fetch_with_insert": "pool.fetch_with_insert(peer, prompt(2), timeout=600).wait()",
    "received": "pool.inbox.receive(600)",
}


SETTINGS: dict[str, Any] = {"routes": ("shm",), "lease_s": 600.0}


@pytest.mark.parametrize("verb", VERBS)
def test_ctrl_c_ends_the_wait(verb):
    """Long before its deadline: the whole script has less time than one wait would take."""
    child = Child()  # forked by what this process forks from: the script has nothing of the kind
    try:
        code = "pool = small_pool(**settings)\npool.peers.listen(where)"
        where = child(code, settings=SETTINGS, where=address_of("shm"))
        run_script(
            f"pid, where, settings = {child.process.pid}, {where!r}, {SETTINGS}\n" + script_of(verb), timeout=250
        )
    finally:
        child.kill()
        child.close()


def script_of(verb: str) -> str:
    return """
import contextlib, os, signal, socket, sys, tempfile, threading
from transfer.kit import *
pool = small_pool(**settings)
peer = pool.peers.connect(where)
lent = pool.alloc(2, instance=peer)
silent = tempfile.mkdtemp() + "/silent"
listener = socket.socket(socket.AF_UNIX)
listener.bind(silent)
listener.listen()
stop_process(pid)
try:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    VERB
except KeyboardInterrupt:
    pass
except ZeroDivisionError:  # by the handler of this test
    assert pool.closed
    os.kill(pid, signal.SIGKILL)
    listener.close()
    sys.exit(0)
else:
    sys.exit("it was not interrupted")
os.kill(pid, signal.SIGKILL)
eventually(lambda: pool.peers.list() == [])
with contextlib.suppress(kvpool.StaleAddress):  # they were given back before the interrupt
    pool.free(lent)
eventually(lambda: pool.audit().hbm.reserved == 0)
pool.close()
listener.close()
""".replace("VERB", VERBS[verb])
