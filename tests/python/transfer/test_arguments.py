"""Every wrong argument of the verbs that need peers: a typed error, nothing changed on either side."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from transfer.kit import address_of, fill, pair_of, prompt, small_pool, state_of, store

import kvpool
from kvpool import ArgumentError, ArgumentTypeError, NotOwner, StaleAddress, StateError


@pytest.fixture(scope="module")
def setting():
    """A pair with blocks of every kind, in one process: both sides can be looked at."""
    with pair_of("loopback", a={"hbm_blocks": 16}, b={"hbm_blocks": 16}, clean=False) as pair:
        mine = pair.a.alloc(2)
        fill(pair.a, mine)
        freed = pair.a.alloc(1)
        pair.a.free(freed)
        lent = pair.a.alloc(2, instance=pair.to_b)
        returned = pair.a.alloc(1, instance=pair.to_b)
        pair.a.free(returned)
        yield SimpleNamespace(
            a=pair.a, there=pair.b, peer=pair.to_b, mine=mine.tolist(), freed=int(freed[0]), lent=lent.tolist(),
            returned=int(returned[0]), not_lent=int(pair.b("pool.alloc(1)")[0]),
            cached=store(pair.a, prompt(1)).tolist(),
        )  # fmt: skip


@contextmanager
def nothing_changes(setting, error, text=None):
    before = state_of(setting.a), state_of(setting.there("pool")), setting.a.peers.list()
    with pytest.raises(error, match=text) as caught:
        yield caught
    assert type(caught.value) is error
    after = state_of(setting.a), state_of(setting.there("pool")), setting.a.peers.list()
    for state in (*before[:2], *after[:2]):
        for counter in ("allocated_blocks", "freed_blocks"):  # a fetch may have allocated before it was refused
            del state[counter]
    assert after == before


WRONG = {
    "peer": [(7, ArgumentTypeError), (None, ArgumentTypeError), ("nobody", kvpool.PeerLost), ("\udc80", ArgumentError)],
    "addrs": [("abc", ArgumentTypeError), (None, ArgumentTypeError), ([1.5], ArgumentTypeError), ([-1], ArgumentError),
              ([], ArgumentError), ([0], ArgumentError), (np.zeros((1, 1), np.uint64), ArgumentError)],
    "to": [("abc", ArgumentTypeError), ([], ArgumentError), (7, ArgumentTypeError), ([0, 0], NotOwner)],
    "medium": [(0, ArgumentError), (4, ArgumentError), (kvpool.DISK, kvpool.Unsupported),
               ("HBM", ArgumentTypeError), (None, ArgumentTypeError), (True, ArgumentTypeError)],
    "private": [("text", ArgumentTypeError), (7, ArgumentTypeError), (bytes((1 << 20) + 1), ArgumentError)],
    "strategy": [("fast", ArgumentError), (None, ArgumentTypeError), (1, ArgumentTypeError)],
    "priority": [("high", ArgumentError), (None, ArgumentTypeError), (0, ArgumentTypeError)],
    "route": [("road", kvpool.Unsupported), (1, ArgumentTypeError), ("cma", kvpool.Unsupported)],
    "timeout": [(-1, ArgumentError), (float("nan"), ArgumentError), (float("inf"), ArgumentError),
                ("1", ArgumentTypeError), (True, ArgumentTypeError)],
    "evict": [("yes", ArgumentTypeError), (1, ArgumentTypeError)],
    "checksum": [("yes", ArgumentTypeError), (None, ArgumentTypeError)],
}  # fmt: skip
CASES = [(name, value, error) for name, values in WRONG.items() for value, error in values]
SHORT = [f"{name}={value!r}"[:40] for name, value, _ in CASES]


@pytest.mark.parametrize(("name", "value", "error"), CASES, ids=SHORT)
@pytest.mark.parametrize("verb", ["transfer", "transfer_with_insert", "batch", "layerwise"])
def test_a_wrong_argument_starts_nothing(setting, verb, name, value, error):
    arguments = {"peer": setting.peer, "addrs": setting.mine} | {name: value}
    if verb == "batch" and error is TypeError:
        error = ArgumentTypeError  # a field of a TransferSpec, not an argument
    with nothing_changes(setting, error):
        if verb == "transfer":
            setting.a.transfer(arguments.pop("peer"), arguments.pop("addrs"), **arguments)
        elif verb == "transfer_with_insert":
            setting.a.transfer_with_insert(arguments.pop("peer"), prompt(2), arguments.pop("addrs"), **arguments)
        elif verb == "layerwise":
            setting.a.transfer(arguments.pop("peer"), arguments.pop("addrs"), **arguments, layerwise=True)
        else:
            right = kvpool.TransferSpec(setting.peer, setting.mine)
            setting.a.batch.transfer([right, kvpool.TransferSpec(**arguments)])


def test_a_batch_takes_only_specs(setting):
    right = kvpool.TransferSpec(setting.peer, setting.mine)
    for wrong in (7, None, {"peer": setting.peer, "addrs": setting.mine}):
        with nothing_changes(setting, ArgumentTypeError, "TransferSpec"):
            setting.a.batch.transfer([right, wrong])


@pytest.mark.parametrize(
    ("kind", "error"),
    [("freed", StaleAddress), ("returned", NotOwner), ("not_lent", NotOwner)],
)
def test_an_address_that_is_not_ours_cannot_be_sent(setting, kind, error):
    with nothing_changes(setting, error) as caught:
        setting.a.transfer(setting.peer, [setting.mine[0], getattr(setting, kind)])
    assert caught.value.address == getattr(setting, kind)
    assert caught.value.position == 1


@pytest.mark.parametrize(
    ("kind", "error"),
    [("returned", NotOwner), ("not_lent", NotOwner), ("freed", NotOwner)],
)
def test_a_destination_must_be_lent(setting, kind, error):
    with nothing_changes(setting, error) as caught:
        setting.a.transfer(setting.peer, setting.mine, to=[setting.lent[0], getattr(setting, kind)])
    assert caught.value.address == getattr(setting, kind)


def test_destinations_must_match_the_blocks_in_number_and_be_distinct(setting):
    with nothing_changes(setting, ArgumentError, "2 blocks are sent, and to names 1") as caught:
        setting.a.transfer(setting.peer, setting.mine, to=setting.lent[:1])
    assert (caught.value.needed, caught.value.given) == (2, 1)
    with nothing_changes(setting, ArgumentError, "twice") as caught:
        setting.a.transfer(setting.peer, setting.mine, to=setting.lent[:1] * 2)
    assert (caught.value.address, caught.value.position) == (setting.lent[0], 1)


@pytest.mark.parametrize(
    ("tokens", "error"),
    [(prompt(1), ArgumentError), (prompt(3), ArgumentError), (prompt(2)[:-1], ArgumentError), ([], ArgumentError),
     ("abc", ArgumentTypeError), ([2**31] * 8, ArgumentError), (None, ArgumentTypeError)],
)  # fmt: skip
def test_tokens_must_fit_the_blocks(setting, tokens, error):
    with nothing_changes(setting, error):
        setting.a.transfer_with_insert(setting.peer, tokens, setting.mine)


def test_a_namespace_must_be_text(setting):
    with nothing_changes(setting, ArgumentTypeError):
        setting.a.transfer_with_insert(setting.peer, prompt(2), setting.mine, namespace=b"n")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"n": -1}, ArgumentError),
        ({"n": 17}, kvpool.OutOfBlocks),
        ({"medium": 0}, ArgumentError),
        ({"medium": kvpool.DISK}, kvpool.Unsupported),
        ({"instance": 5}, ArgumentTypeError),
        ({"instance": "nobody"}, kvpool.PeerLost),
        ({"timeout": -1}, ArgumentError),
        ({"timeout": "1"}, ArgumentTypeError),
    ],
)
def test_a_wrong_argument_borrows_nothing(setting, arguments, error):
    with nothing_changes(setting, error):
        setting.a.alloc(**({"n": 1, "instance": setting.peer} | arguments))


@pytest.mark.parametrize("kind", ["freed", "returned", "not_lent", "cached"])
def test_a_wrong_address_anywhere_frees_nothing(setting, kind):
    wrong = getattr(setting, kind)
    for at in range(3):
        addrs = [setting.mine[0], setting.lent[0]]
        addrs[at:at] = wrong if isinstance(wrong, list) else [wrong]
        with nothing_changes(setting, {"cached": StateError, "freed": StaleAddress}.get(kind, NotOwner)):
            setting.a.free(addrs)


def test_a_list_to_free_may_name_an_own_or_borrowed_block_only_once(setting):
    for twice in (setting.mine[1], setting.lent[1]):
        addrs = [setting.lent[0], setting.mine[1], setting.mine[0], setting.lent[1], twice]
        with nothing_changes(setting, ArgumentError, "twice") as caught:
            setting.a.free(addrs)
        assert (caught.value.address, caught.value.position) == (twice, 4)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"addrs": [1.5]}, ArgumentTypeError),
        ({"addrs": []}, ArgumentError),
        ({"peer": "nobody"}, kvpool.PeerLost),
        ({"to": [0]}, ArgumentError),
        ({"medium": 9}, ArgumentError),
        ({"medium": kvpool.DISK}, kvpool.Unsupported),
        ({"priority": "x"}, ArgumentError),
        ({"timeout": -1}, ArgumentError),
    ],
)
def test_a_wrong_argument_fetches_nothing(setting, arguments, error):
    call = {"peer": setting.peer, "addrs": [setting.not_lent]} | arguments
    with nothing_changes(setting, error):
        setting.a.fetch(call.pop("peer"), call.pop("addrs"), **call)


def test_fetching_blocks_of_this_pool_is_refused_because_they_are_here(setting):
    own = setting.a.alloc(2)
    for addrs in (own, own[:1], own & np.uint64((1 << 50) - 1)):  # the last: as before the pool had an id
        with nothing_changes(setting, ArgumentError, "of this pool, and here already"):
            setting.a.fetch(None, addrs)
    for addrs in ([0], [int(own[0]), setting.not_lent]):
        with nothing_changes(setting, ArgumentError, "one owner's blocks"):
            setting.a.fetch(None, addrs)
    setting.a.free(own)


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("", ArgumentError),
        ("tcp:", ArgumentError),
        ("tcp:127.0.0.1", ArgumentError),
        ("tcp:127.0.0.1:70000", ArgumentError),
        ("udp:127.0.0.1:1", ArgumentError),
        ("unix:", ArgumentError),
        ("unix:" + "x" * 200, ArgumentError),
        (7, ArgumentTypeError),
    ],
)
def test_an_address_must_be_a_valid_one(setting, address, error):
    with nothing_changes(setting, error):
        setting.a.peers.listen(address)
    with nothing_changes(setting, error):
        setting.a.peers.connect(address)


def test_tcp_needs_a_secret():
    with small_pool() as pool, pytest.raises(ArgumentError, match="secret"):
        pool.peers.listen("tcp:127.0.0.1:0")


def test_a_pool_has_one_name_and_one_secret_which_are_settings():
    with small_pool(name="one", secret="s") as pool:
        assert pool.peers.name is None
        pool.peers.listen(address_of("shm"))
        assert pool.peers.name == "one"
        for call in (pool.peers.listen, pool.peers.connect):
            for given in ({"name": "two"}, {"secret": "x"}):
                with pytest.raises(TypeError):
                    call(address_of("shm"), **given)


def test_without_peers_the_verbs_say_what_to_do():
    with small_pool() as pool:
        addrs = pool.alloc(1)
        for call in (
            lambda: pool.transfer("b", addrs),
            lambda: pool.alloc(1, instance="b"),
            lambda: pool.fetch("b", addrs),
            lambda: pool.inbox.receive(0),
            lambda: pool.inbox.on_received(print),
            lambda: pool.peers.disconnect("b"),
            lambda: pool.batch.transfer([]),
        ):
            with pytest.raises(StateError, match=r"peers\.listen\(\) or peers\.connect\(\) first"):
                call()
        assert pool.peers.list() == []


def test_a_closed_pool_says_so():
    pool = small_pool()
    pool.peers.listen(address_of("shm"))
    addrs = pool.alloc(1)
    pool.close()
    for call in (
        lambda: pool.transfer("b", addrs),
        lambda: pool.alloc(1, instance="b"),
        lambda: pool.inbox.receive(),
        lambda: pool.peers.listen(address_of("shm")),
        lambda: pool.peers.connect(address_of("shm")),
        pool.peers.list,
    ):
        with pytest.raises(kvpool.ClosedError):
            call()
