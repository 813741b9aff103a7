"""The routes of blocks, and where UCX comes from."""

from __future__ import annotations

import importlib.util
import re
from types import SimpleNamespace

import pytest
from transfer.kit import (
    BLOCK_ROUTES,
    NEAR,
    UCX_SETTINGS,
    Child,
    address_of,
    blocks_at_peers,
    eventually,
    not_on_gpu,
    pair_of,
    route_or_skip,
    small_pool,
)  # fmt: skip

import kvpool
from kvpool.transfer.libraries import ucx_library


@pytest.mark.parametrize("route", BLOCK_ROUTES)
def test_a_setting_limits_the_routes(route):
    with pair_of(route) as pair:
        (peer,) = pair.a.peers.list()
        assert peer.routes == (route.partition("-")[0],)
        assert peer.link.startswith("tcp 127.0.0.1:" if route == "sock-tcp" else "unix")
        with pytest.raises(kvpool.Unsupported, match=f"there are: {peer.routes[0]}"):
            pair.a.transfer(pair.to_b, pair.a.alloc(1), route="sock" if peer.routes[0] != "sock" else NEAR)


@not_on_gpu("ucx is for memory of the host")
@pytest.mark.parametrize(("route", "lane"), [("ucx-cma", "cma/memory"), ("ucx-tcp", "tcp/lo")])
def test_ucx_writes_by_the_lane_of_the_routes_name(route, lane, tmp_path):
    """As UCX itself tells, of both sides: this process has loaded it, and has no file for that."""
    assert set(UCX_SETTINGS) == {"ucx-cma", "ucx-tcp"}
    route_or_skip(route)
    child = Child(UCX_PROTO_INFO="y", UCX_LOG_FILE=f"{tmp_path}/%p")
    child(
        "with pair_of(route) as pair:\n"
        "    pair.a.transfer(pair.to_b, pair.a.alloc(2)).wait()\n"
        "    pair.b('pool.transfer(peer, pool.alloc(2)).wait()\\nNone', peer=pair.to_a)\n"
        "    pair.a.inbox.receive(60).close()\n"
        "    pair.b('pool.inbox.receive(60).close()')",
        route=route,
    )
    child.close()
    logs = [log.read_text() for log in tmp_path.iterdir()]
    assert len(logs) == 2
    for log in logs:
        assert "remote memory write" in log
        assert set(re.findall(r"\| +(\S+/\S+) +\|$", log, re.MULTILINE)) == {lane}


def test_the_memory_of_a_process_is_opened_only_if_both_sides_say_so():
    with pair_of(NEAR, a={"routes": ()}, b={"routes": ("cma", "sock")}) as pair:
        assert pair.a.peers.list()[0].routes == ("sock",)
    with pair_of(NEAR, a={"routes": ()}, b={"routes": ()}) as pair:
        assert "cma" not in pair.a.peers.list()[0].routes
        assert {NEAR, "sock"} <= set(pair.a.peers.list()[0].routes)


def test_peers_without_a_common_route_do_not_connect():
    with small_pool(routes=(NEAR,)) as one, small_pool(routes=("sock",)) as two, pytest.raises(kvpool.Error):
        peer = two.peers.connect(one.peers.listen(address_of("shm")))
        two.transfer(peer, two.alloc(1)).wait()


@not_on_gpu("cma is for memory of the host")
def test_adopted_memory_travels_by_the_routes_that_reach_it():
    route_or_skip("cma")
    child = Child()
    make = (
        "tensors = [np.zeros((8, 2, 2, 4, 4), np.float32) for _ in range(2)]\n"
        "pool = kvpool.Pool(small_layout(order='discrete'), hbm=tensors, dram_blocks=8, routes=routes)\n"
        "pool.peers.listen(where)"
    )
    for routes, found in ((("shm", "sock"), "sock"), (("cma", "sock"), "cma")):
        with small_pool(routes=routes, measure_routes=False) as pool:  # by the guess, whatever the machine is at
            peer = pool.peers.connect(child(make, routes=routes, where=address_of("shm")))
            addrs = pool.alloc(3)
            pool.tensor(kvpool.HBM).numpy()[kvpool.block_ids(addrs)] = 7
            done = pool.transfer(peer, addrs).wait()
            assert done.stats.route == found
            assert child("[float(t[ids].min()) for t in tensors]", ids=kvpool.block_ids(done.addrs)) == [7, 7]
            child("pool.close()")
    child.close()


@not_on_gpu("cma is for memory of the host")
def test_routes_are_measured_when_pools_connect_unless_switched_off():
    route_or_skip("cma")
    routes = {"routes": ("cma", "sock")}

    def costs(**settings):
        with pair_of("shm", a=routes | settings, b=routes) as pair:
            eventually(lambda: blocks_at_peers(pair.a) == pair.b("blocks_at_peers(pool)") == 0)
            assert pair.a.stats().hbm.active == pair.b("pool.stats().hbm.active") == 0
            return pair.a.peers.list()[0].route_costs

    guesses = costs(measure_routes=False)
    assert [(one.route, one.measured, one.source) for one in guesses] == [("cma", False, None), ("sock", False, None)]
    found = next(found for found in (costs() for _ in range(50)) if all(one.measured for one in found))  # busy machines
    hbm = {one.route: one for one in found if one.source == one.target == kvpool.HBM}
    assert set(hbm) == {"cma", "sock"}
    for one in found:
        assert one.latency_us >= 0 <= one.us_per_piece
        assert 0 < one.gigabytes_per_s < 1001


def test_the_wheel_s_library_is_found_without_loading_it(monkeypatch, tmp_path):
    assert ucx_library("system") == "system"
    assert ucx_library("/opt/ucx/libucp.so") == "/opt/ucx/libucp.so"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert ucx_library("wheel") == "wheel"
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libucp.so.0").touch()
    found = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    assert ucx_library("wheel") == str(tmp_path / "lib" / "libucp.so.0")


@not_on_gpu("ucx is for memory of the host")
def test_without_ucx_the_error_says_what_to_install():
    child = Child()  # in which no UCX was loaded before
    child("pool = small_pool(routes=('ucx', 'sock'), ucx='/nowhere')")
    with pytest.raises(kvpool.Unsupported, match="/nowhere") as caught:
        child("pool.peers.listen(where)", where=address_of("shm"))
    assert "kvpool[ucx]" in str(caught.value)
    child.close()
