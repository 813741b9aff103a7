"""Another library with a separate UCX in the process: NIXL brings one, under other names."""

from __future__ import annotations

import pytest
from transfer.kit import Child, fill, pair_of, route_or_skip

NIXL = """
from nixl_cu13._api import nixl_agent, nixl_agent_config
agent = nixl_agent("agent", nixl_agent_config(backends=["UCX"]))
memory = np.arange(4096, dtype=np.uint8)
registered = agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
handle = agent.initialize_xfer(
    "WRITE", agent.get_xfer_descs([(memory.ctypes.data, 2048, 0)], "DRAM"),
    agent.get_xfer_descs([(memory.ctypes.data + 2048, 2048, 0)], "DRAM"), "agent",
)
state = agent.transfer(handle)
deadline = time.monotonic() + 20
while state == "PROC" and time.monotonic() < deadline:
    state = agent.check_xfer_state(handle)
assert state == "DONE", state
assert (memory[:2048] == memory[2048:]).all()
"""


@pytest.mark.parametrize("nixl_first", [True, False])
def test_nixl_and_kvpool_use_their_own_ucx_in_one_process(nixl_first):
    route_or_skip("ucx-cma")
    pytest.importorskip("nixl_cu13")
    child = Child()
    try:
        if nixl_first:
            child(NIXL)
        with pair_of("ucx-cma", child=child) as pair:
            addrs = pair.a.alloc(3)
            sent = fill(pair.a, addrs)
            transfer = pair.a.transfer(pair.to_b, addrs).wait()
            assert transfer.stats.route == "ucx"
            if not nixl_first:
                child(NIXL)
                transfer = pair.a.transfer(pair.to_b, addrs).wait()
            received = "content(pool, np.array(addrs, dtype=np.uint64))"
            assert pair.b(received, addrs=transfer.addrs.tolist()) == sent
            pair.b("while (item := pool.inbox.receive(0)) is not None: item.close()")
    finally:
        child.close()
