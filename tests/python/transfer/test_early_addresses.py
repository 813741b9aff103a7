"""Addresses that a pool gave out before it had peers: they name no instance."""

from __future__ import annotations

import numpy as np
import pytest
from kit import cached_tokens, refused
from transfer.kit import address_of, content, fill, local_settings, not_on_gpu, prompt, small_layout, small_pool

import kvpool
from kvpool import ArgumentError, ArgumentTypeError, NotOwner, StateError, decode_address

SETTINGS = local_settings("sock-unix")


def test_they_stay_valid_here_and_peers_use_what_the_pool_makes_of_them():
    with small_pool(name="a", **SETTINGS) as a, small_pool(name="b", **SETTINGS) as b:
        early = b.alloc(3)
        sent = fill(b, early)
        assert decode_address(int(early[0])).instance == 0
        with refused(b, StateError, "no peers yet"):
            b.peers.addresses(early)
        peer = a.peers.connect(b.peers.listen(address_of("sock-unix")))
        late = b.alloc(1)
        with pytest.raises(NotOwner, match=r"before it had peers.*Peers\.addresses"):
            a.fetch(peer, early)
        told = b.peers.addresses(np.concatenate([early, late]))
        assert told[3] == late[0]
        assert content(a, a.fetch(peer, told[:3]).wait().addrs) == sent
        assert content(b, early) == content(b, told[:3])
        b.transfer("a", early, private=b"").wait()  # of the old ones
        assert content(a, a.inbox.receive(60).take()) == sent
        b.insert(prompt(3), early).close()
        assert cached_tokens(b, prompt(3)) == 12
        with a.peers.match(peer, prompt(3)) as found:
            assert found.addrs.tolist() == told[:3].tolist()
        b.free(late)


@not_on_gpu("the engine's tensors are NumPy's")
def test_blocks_that_an_engine_had_adopted_before_can_be_fetched():
    layout = small_layout()
    tensors = [np.zeros((8, 2, 2, 4, 4), np.float32) for _ in range(layout.layers)]
    with small_pool(0, 8, hbm=tensors, engine_allocates=True, name="b", **SETTINGS) as b:
        early = b.adopt([1, 5])
        for number, tensor in enumerate(tensors):
            tensor[[1, 5]] = number + 7
        with small_pool(name="a", **SETTINGS) as a:
            peer = a.peers.connect(b.peers.listen(address_of("sock-unix")))
            mine = a.fetch(peer, b.peers.addresses(early)).wait().addrs
            kv = a.tensor(kvpool.HBM).numpy()[kvpool.block_ids(mine)]
            assert (kv[:, 0] == 7).all()
            assert (kv[:, 1] == 8).all()
        b.free(early)


def test_what_is_no_address_of_the_pool_is_refused():
    with small_pool(name="a", **SETTINGS) as a, small_pool(name="b", **SETTINGS) as b:
        a.peers.connect(b.peers.listen(address_of("sock-unix")))
        theirs = b.alloc(1)
        with refused(a, NotOwner, "of instance", position=0):
            a.peers.addresses(theirs)
        with refused(a, ArgumentError):
            a.peers.addresses([0])
        with refused(a, ArgumentTypeError):
            a.peers.addresses(object())
        assert a.peers.addresses([]).tolist() == []
        with pytest.raises(NotOwner):
            a.peers.addresses(np.concatenate([a.alloc(1), theirs]))
