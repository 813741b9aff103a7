"""What users write into `kv_connector_extra_config`, and what is refused."""

from __future__ import annotations

import pytest

import kvpool
from kvpool.engines.given import GIB
from kvpool.engines.vllm.options import Options


def test_options_have_defaults_and_a_size():
    options = Options.parse({})
    assert options == Options(dram_gib=4.0, dram_blocks=None, async_load=False, name=None)
    assert options.blocks(1 << 20) == 4096
    assert Options.parse({"dram_gib": 0.5}).blocks(GIB // 4) == 2
    assert Options.parse({"dram_blocks": 7, "async_load": True, "name": "it"}).blocks(1) == 7


@pytest.mark.parametrize(
    ("extra", "error", "words"),
    [
        ({"dram_gb": 4}, kvpool.ArgumentError, "dram_gb.*it knows dram_gib, dram_blocks, async_load, name"),
        ({"dram_gib": 1, "dram_blocks": 5}, kvpool.ArgumentError, "not both"),
        ({"dram_gib": 0}, kvpool.ArgumentError, "above 0"),
        ({"dram_gib": float("nan")}, kvpool.ArgumentError, "above 0"),
        ({"dram_blocks": -1}, kvpool.ArgumentError, "above 0"),
        ({"dram_blocks": 1.5}, kvpool.ArgumentTypeError, "float"),
        ({"dram_gib": "4"}, kvpool.ArgumentTypeError, "str"),
        ({"dram_blocks": True}, kvpool.ArgumentTypeError, "bool"),
        ({"async_load": 1}, kvpool.ArgumentTypeError, "async_load"),
        ({"name": 3}, kvpool.ArgumentTypeError, "name"),
        ({"cluster": 3}, kvpool.ArgumentTypeError, "cluster must be a text"),
        ({"by_layer": True}, kvpool.ArgumentError, "by_layer is for a member of a cluster"),
        ({"cluster": "", "listen": "tcp:127.0.0.1:0"}, kvpool.ArgumentError, "listen is for a member"),
        ({"cluster": "local://a", "listen": 7000}, kvpool.ArgumentTypeError, "listen must be an address or a sequence"),
        ({"cluster": "local://a", "listen": ["tcp:h:1", 2]}, kvpool.ArgumentTypeError, "listen must be an address"),
        ({"cluster": "local://a", "listen": []}, kvpool.ArgumentError, "listen is empty"),
        ({"cluster": "local://a", "listen": "10.0.0.1:7000"}, kvpool.ArgumentError, '"10.0.0.1:7000" is no address'),
        ({"cluster": "local://a", "listen": "tcp:10.0.0.1"}, kvpool.ArgumentError, "no address"),
        ({"cluster": "local://a", "listen": ["unix:@a", "tcp:0.0.0.0:7000"]}, kvpool.ArgumentError, "wildcard"),
        ({"cluster": "local://a", "listen": "tcp:10.0.0.1:99999"}, kvpool.ArgumentError, "port"),
        ({"cluster": "local://a", "listen": "tcp:a:b:5"}, kvpool.ArgumentError, "brackets"),
        ({"cluster": "local://a", "listen": "tcp:ho st:1"}, kvpool.ArgumentError, "blanks"),
        ({"cluster": "local://a", "listen": "unix:@" + 200 * "a"}, kvpool.ArgumentError, "107 bytes"),
        ({"cluster": "local://a", "listen": "tcp://h:1"}, kvpool.ArgumentError, "without slashes"),
        ({"cluster": "etcd://h:1/kv", "listen": "tcp:10.0.0.1:7000"}, kvpool.ArgumentError, "needs a secret"),
        ({"cluster": "local://a", "listen": "tcp:0:7000"}, kvpool.ArgumentError, "wildcard"),
        ({"cluster": "local://a", "by_layer": "yes"}, kvpool.ArgumentTypeError, "by_layer must be true or false"),
        ({"pull": True}, kvpool.ArgumentError, "pull is for a member of a cluster"),
        ({"cluster": "local://a", "pull": 1}, kvpool.ArgumentTypeError, "pull must be true or false"),
        ({"cluster": "local://a", "transfer_timeout_s": 0}, kvpool.ArgumentError, "transfer_timeout_s is 0"),
        ({"cluster": "local://a", "transfer_timeout_s": "5"}, kvpool.ArgumentTypeError, "transfer_timeout_s"),
        ({"cluster": "local://a", "cluster_options": []}, kvpool.ArgumentTypeError, "cluster_options"),
        ({"cluster": "local://a", "cluster_options": {"password": "x"}}, kvpool.ArgumentError, "KVPOOL_ETCD_PASSWORD"),
    ],
)
def test_a_wrong_option_is_refused(extra, error, words):
    with pytest.raises(error, match=words):
        Options.parse(extra)


def test_memory_for_less_than_a_block_is_refused():
    with pytest.raises(kvpool.ArgumentError, match="2147483648 bytes"):
        Options.parse({"dram_gib": 1}).blocks(2 * GIB)


def test_a_member_may_listen_where_attach_would(monkeypatch):
    assert Options.parse({"cluster": "local://a", "listen": "unix:@a\n"}).listen == "unix:@a\n"
    monkeypatch.setenv("KVPOOL_SECRET", "s3cret")  # of the pool that attaches
    for listen in ("tcp:10.0.0.1:7000", ["tcp:[fd00::1]:0", "tcp:host.example:65535"]):
        assert Options.parse({"cluster": "etcd://h:1/kv", "listen": listen}).listen == listen


@pytest.mark.parametrize(
    ("listen", "workers"),
    [
        (None, None),
        ("unix:@kvpool-test", None),
        ("tcp:10.0.0.5:7000", "tcp:10.0.0.5:0"),
        (["unix:@kvpool-test", "tcp:[::1]:0", "tcp:10.0.0.5:1"], "tcp:[::1]:0"),
    ],
)
def test_workers_listen_where_their_scheduler_does_at_any_port(listen, workers):
    more = {} if listen is None else {"listen": listen}
    assert Options.parse({"cluster": "local://x", **more}).worker_listen == workers


def test_replicas_have_names_of_their_own():
    assert Options(name="decode-0").of_engine("5b0c7e1f_dp12").name == "decode-0-dp12"
    assert Options(name="decode-0").of_engine("5b0c7e1f").name == "decode-0"
    assert Options().of_engine("5b0c7e1f_dp0").name is None  # the cluster makes one up
