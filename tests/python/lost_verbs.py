"""The verbs of a pool whose GPU is lost, as code for a separate process: after `from fake import *`, and with `pool`,
which is connected to another one, "there".
"""

from __future__ import annotations

__all__ = ["VERBS"]

# What an application may call, and what it has been given before, of a pool that is connected to another one.
VERBS = """
addrs = pool.alloc(2)
cached = store(pool, prompt(2))
lent = pool.alloc(1, instance="there")
hit = pool.match(prompt(1))
stream = new_stream()
opened = pool.transfer("there", addrs, stream=stream, layerwise=True)
verbs = {
    "alloc": lambda: pool.alloc(1),
    "alloc, in DRAM": lambda: pool.alloc(1, medium=DRAM),
    "alloc, of a peer": lambda: pool.alloc(1, instance="there"),
    "alloc, after a stream": lambda: pool.alloc(8, stream=stream),
    "match": lambda: pool.match(prompt(1)),
    "match_batch": lambda: pool.batch.match([prompt(1)]),
    "insert": lambda: pool.insert(prompt(2, 1), addrs),
    "insert_batch": lambda: pool.batch.insert([(prompt(2, 1), addrs)]),
    "delete": lambda: pool.delete(prompt(2)),
    "evict": lambda: pool.evict(1),
    "free": lambda: pool.free(addrs),
    "swap_out": lambda: pool.swap_out(1),
    "swap_out, after a stream": lambda: pool.swap_out(1, stream=stream),
    "swap_in": lambda: pool.swap_in(hit.addrs),
    "transfer": lambda: pool.transfer("there", addrs),
    "transfer, after a stream": lambda: pool.transfer("there", addrs, stream=stream),
    "transfer_with_insert": lambda: pool.transfer_with_insert("there", prompt(2), addrs),
    "transfer_batch": lambda: pool.batch.transfer([kvpool.TransferSpec("there", addrs)]),
    "open_transfer": lambda: pool.transfer("there", addrs, layerwise=True),
    "fetch": lambda: pool.fetch("there", lent),
    "fetch_with_insert": lambda: pool.fetch_with_insert("there", prompt(2)),
    "match at a peer": lambda: pool.peers.match("there", prompt(1)),
    "explain_match": lambda: pool.explain_match(prompt(1)),
    "tensor": lambda: pool.tensor(HBM),
    "tensor, of DRAM": lambda: pool.tensor(DRAM),
    "arena": lambda: pool.arena(HBM),
    "subscribe": lambda: pool.subscribe(),
    "listen": lambda: pool.peers.listen(address_of("new")),
    "connect": lambda: pool.peers.connect(address_of("new")),
    "received": lambda: pool.inbox.receive(0),
}
"""
